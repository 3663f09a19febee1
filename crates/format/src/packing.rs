//! How blocks lie in a packed segment: each block of the volume is a unit, stored raw or compressed, one behind the other.
//!
//! Nothing says where a unit starts: that follows from the lengths of those before it, and one rule. A raw unit starts at
//! a whole block. A unit that would cross a stripe starts the next one. So a unit lies in one shard, a raw one is read as
//! if nothing were packed, and a slice of a run finds its own start.
//!
//! ```text
//! granule  0      23     40  64       128  150                       1,000    1,024
//!          | lz4  | zstd |   | raw    | lz4 | …                       |        | lz4 (30)
//!                         └ the raw one starts at a block               └ 30 granules would cross the stripe
//! ```
//! What is left free between units is padding, and is in no account.

use crate::geometry::{Geometry, STRIPE_BLOCKS};
use holdfast_base::BLOCK_BYTES;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// Unit of places and lengths in a packed segment.
pub const GRANULE_BYTES: usize = 64;

/// Granules of a block: no unit has more.
pub const BLOCK_GRANULES: u32 = (BLOCK_BYTES / GRANULE_BYTES) as u32;

/// Granules of a stripe, which no unit crosses.
pub const STRIPE_GRANULES: u32 = STRIPE_BLOCKS * BLOCK_GRANULES;

/// Places are below this: they have 31 bits.
pub const GRANULES_MAX: u32 = 1 << 31;

/// What a unit was made smaller by; what makes it smallest last.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(u8)]
pub enum Codec {
    Raw = 0,
    Lz4 = 1,
    Zstd = 2,
}

/// Which blocks of a volume are packed, and by what.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Compression {
    /// None from here on; what is packed stays so.
    #[default]
    Off,
    /// All by lz4, which is fast.
    Lz4,
    /// By lz4 when they leave the log, and by zstd what is moved later, which makes more of it for more work.
    Auto,
}

/// What is no [`Compression`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NoCompression(String);

impl fmt::Display for NoCompression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} is no way to compress; there are off, lz4 and auto", self.0)
    }
}

impl std::error::Error for NoCompression {}

impl FromStr for Compression {
    type Err = NoCompression;

    fn from_str(text: &str) -> Result<Compression, NoCompression> {
        match text {
            "off" => Ok(Compression::Off),
            "lz4" => Ok(Compression::Lz4),
            "auto" => Ok(Compression::Auto),
            other => Err(NoCompression(other.to_string())),
        }
    }
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Compression::Off => "off",
            Compression::Lz4 => "lz4",
            Compression::Auto => "auto",
        })
    }
}

/// How one unit is stored: two bits of codec, and six of granules less one. A raw unit is 63.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StoredLength(u8);

impl StoredLength {
    pub const RAW: StoredLength = StoredLength(BLOCK_GRANULES as u8 - 1);

    /// Of a unit that is compressed to so many granules, one at least and a block at most.
    pub fn compressed(codec: Codec, granules: u32) -> StoredLength {
        assert!(codec != Codec::Raw && (1..=BLOCK_GRANULES).contains(&granules), "{granules} granules, {codec:?}");
        StoredLength((codec as u8) << 6 | (granules - 1) as u8)
    }

    /// `None` for a codec that isn't known, and for a raw unit that is no whole block.
    pub fn of(byte: u8) -> Option<StoredLength> {
        let length = StoredLength(byte);
        match byte >> 6 {
            0 => (length == StoredLength::RAW).then_some(length),
            1 | 2 => Some(length),
            _ => None,
        }
    }

    pub fn byte(self) -> u8 {
        self.0
    }

    pub fn codec(self) -> Codec {
        match self.0 >> 6 {
            0 => Codec::Raw,
            1 => Codec::Lz4,
            _ => Codec::Zstd,
        }
    }

    pub fn granules(self) -> u32 {
        u32::from(self.0 & 0x3f) + 1
    }

    /// The rule of placement: where the unit starts, if the one before it ends at `at`.
    pub fn start_after(self, at: u32) -> u32 {
        assert!(at <= GRANULES_MAX, "granule {at} has no place");
        if self == StoredLength::RAW {
            // A stripe is whole blocks, so that a whole block crosses none.
            return at.next_multiple_of(BLOCK_GRANULES);
        }
        match at % STRIPE_GRANULES + self.granules() > STRIPE_GRANULES {
            true => at.next_multiple_of(STRIPE_GRANULES),
            false => at,
        }
    }
}

/// A unit in its segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Unit {
    /// Granule of the payload.
    pub start: u32,
    pub length: StoredLength,
}

impl Unit {
    pub fn end(self) -> u32 {
        self.start + self.length.granules()
    }
}

/// Stored lengths of the units of a run, one a block; slices share them.
#[derive(Clone, Serialize, Deserialize)]
#[serde(try_from = "Vec<u8>", into = "Vec<u8>")]
pub struct StoredLengths {
    all: Arc<[u8]>,
    first: u32,
    len: u32,
}

/// A list with a byte that is no length.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoLength(pub u8);

impl fmt::Display for NoLength {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#04x} is no length of a stored unit", self.0)
    }
}

impl StoredLengths {
    pub fn new(lengths: impl IntoIterator<Item = StoredLength>) -> StoredLengths {
        StoredLengths::of(lengths.into_iter().map(StoredLength::byte).collect())
    }

    /// Of bytes that are lengths. What is empty takes no memory of its own.
    fn of(bytes: Vec<u8>) -> StoredLengths {
        let len = bytes.len() as u32;
        let all = if bytes.is_empty() { Arc::default() } else { bytes.into() };
        StoredLengths { all, first: 0, len }
    }

    /// One byte a unit.
    pub fn as_bytes(&self) -> &[u8] {
        &self.all[self.first as usize..][..self.len as usize]
    }

    pub fn len(&self) -> u64 {
        u64::from(self.len)
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn iter(&self) -> impl Iterator<Item = StoredLength> {
        self.as_bytes().iter().map(|byte| StoredLength(*byte))
    }

    #[must_use]
    pub fn slice(&self, offset: u64, len: u64) -> StoredLengths {
        assert!(offset + len <= self.len(), "stored lengths {offset}+{len} of {}", self.len);
        StoredLengths { all: Arc::clone(&self.all), first: self.first + offset as u32, len: len as u32 }
    }

    /// The units, if the one before the first ends at `at`; the first starts there where the rule has it so.
    pub fn units_after(&self, at: u32) -> impl Iterator<Item = Unit> {
        let mut end = at;
        self.iter().map(move |length| {
            let unit = Unit { start: length.start_after(end), length };
            end = unit.end();
            unit
        })
    }

    /// Where unit `n` starts, if the first does at `start`.
    pub fn start_of(&self, n: u64, start: u32) -> u32 {
        assert!(n < self.len(), "unit {n} of {}", self.len);
        self.units_after(start).nth(n as usize).expect("just checked").start
    }

    /// Where the last unit ends, if the first starts at `start`.
    pub fn end_from(&self, start: u32) -> u32 {
        self.units_after(start).last().map_or(start, Unit::end)
    }

    /// Granules of all units, without padding: what accounts count.
    pub fn granules(&self) -> u64 {
        self.iter().map(|length| u64::from(length.granules())).sum()
    }

    /// Whether units lie so from `start` on: the first is where the rule has it, the last ends where places end.
    pub fn fit_from(&self, start: u32) -> bool {
        // Each takes a stripe at most, however the others lie.
        let end_max = u64::from(start) + self.len() * u64::from(STRIPE_GRANULES);
        let Some(first) = self.iter().next().filter(|_| start < GRANULES_MAX) else { return false };
        first.start_after(start) == start && (end_max <= u64::from(GRANULES_MAX) || self.end_fits(start))
    }

    /// The same of those that lie near the end.
    fn end_fits(&self, start: u32) -> bool {
        let mut end = start;
        self.iter().all(|length| {
            let fits = end < GRANULES_MAX && length.start_after(end) + length.granules() <= GRANULES_MAX;
            end = if fits { length.start_after(end) + length.granules() } else { end };
            fits
        })
    }

    /// Whether these units are a payload of that shape. The stripes of a short last row are shorter than others: only
    /// raw units may lie there.
    pub fn fill(&self, geometry: &Geometry) -> bool {
        let payload = u64::from(geometry.payload_blocks) * u64::from(BLOCK_GRANULES);
        let are_raw = self.iter().all(|length| length == StoredLength::RAW);
        let is_whole = geometry.stripe_blocks == STRIPE_BLOCKS && geometry.has_whole_rows();
        self.fit_from(0) && u64::from(self.end_from(0)) <= payload && (are_raw || is_whole)
    }
}

impl TryFrom<Vec<u8>> for StoredLengths {
    type Error = NoLength;

    fn try_from(bytes: Vec<u8>) -> Result<StoredLengths, NoLength> {
        match bytes.iter().find(|byte| StoredLength::of(**byte).is_none()) {
            Some(byte) => Err(NoLength(*byte)),
            None => Ok(StoredLengths::of(bytes)),
        }
    }
}

impl From<StoredLengths> for Vec<u8> {
    fn from(lengths: StoredLengths) -> Vec<u8> {
        lengths.as_bytes().to_vec()
    }
}

impl PartialEq for StoredLengths {
    fn eq(&self, other: &StoredLengths) -> bool {
        self.as_bytes() == other.as_bytes()
    }
}

impl Eq for StoredLengths {}

impl Default for StoredLengths {
    fn default() -> StoredLengths {
        StoredLengths::new([])
    }
}

impl fmt::Debug for StoredLengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter().map(|length| (length.codec(), length.granules()))).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::Layout;
    use proptest::prelude::*;

    fn lz4(granules: u32) -> StoredLength {
        StoredLength::compressed(Codec::Lz4, granules)
    }

    fn lengths() -> impl Strategy<Value = StoredLengths> {
        let length = prop_oneof![
            Just(StoredLength::RAW),
            (1u32..=64).prop_map(lz4),
            (1u32..=64).prop_map(|granules| StoredLength::compressed(Codec::Zstd, granules)),
        ];
        proptest::collection::vec(length, 1..600).prop_map(StoredLengths::new)
    }

    #[test]
    fn a_length_is_two_bits_of_codec_and_six_of_granules() {
        assert_eq!(StoredLength::RAW.byte(), 63);
        assert_eq!(StoredLength::compressed(Codec::Zstd, 1).byte(), 0x80);
        assert_eq!((lz4(64).byte(), lz4(64).granules(), lz4(64).codec()), (0x7f, 64, Codec::Lz4));
        let known: Vec<u8> = (0..=255).filter(|byte| StoredLength::of(*byte).is_some()).collect();
        assert_eq!(known, [&[63][..], &(0x40..0xc0).collect::<Vec<u8>>()].concat());
        assert_eq!(StoredLengths::try_from(vec![63, 62]), Err(NoLength(62)));
        assert_eq!(StoredLengths::try_from(vec![0xc0]), Err(NoLength(0xc0)));
        let told = format!("{:?}", StoredLengths::new([StoredLength::RAW, lz4(3)]));
        assert_eq!(told, "[(Raw, 64), (Lz4, 3)]");
    }

    #[test]
    fn the_picture_above_is_right() {
        let zstd = StoredLength::compressed(Codec::Zstd, 17);
        let starts: Vec<u32> = StoredLengths::new([lz4(23), zstd, StoredLength::RAW, lz4(22), lz4(1)])
            .units_after(0)
            .map(|unit| unit.start)
            .collect();
        assert_eq!(starts, [0, 23, 64, 128, 150]);
        assert_eq!((lz4(30).start_after(1000), lz4(24).start_after(1000)), (1024, 1000));
        assert_eq!(StoredLength::RAW.start_after(961), 1024);
    }

    #[test]
    fn places_end_where_they_have_no_bits_left() {
        let last = StoredLengths::new([StoredLength::RAW]);
        assert!(last.fit_from(GRANULES_MAX - 64) && !last.fit_from(GRANULES_MAX));
        assert!(!last.fit_from(u32::MAX) && !last.fit_from(1), "a raw unit starts at a block");
        let over = StoredLengths::new([lz4(64), lz4(1)]);
        assert!(over.fit_from(GRANULES_MAX - 65) && !over.fit_from(GRANULES_MAX - 64));
        assert!(!StoredLengths::default().fit_from(0), "no run is empty");
    }

    #[test]
    fn only_raw_units_lie_in_a_short_last_row() {
        let layout = Layout::Parity { data: 2, parity: 1 };
        let (raw, small) = (StoredLengths::new([StoredLength::RAW; 33]), StoredLengths::new([lz4(64); 32]));
        assert!(raw.fill(&Geometry::new(layout, 33)) && !raw.fill(&Geometry::new(layout, 32)));
        assert!(small.fill(&Geometry::new(layout, 32)) && !small.fill(&Geometry::new(layout, 33)));
        let other_stripe = Geometry { stripe_blocks: 8, ..Geometry::new(layout, 32) };
        assert!(!small.fill(&other_stripe));
    }

    proptest! {
        #[test]
        fn units_keep_the_rule_and_slices_find_their_own_start(
            lengths in lengths(),
            at in 0u32..3000,
            cut in (0u64..600, 0u64..600),
        ) {
            let units: Vec<Unit> = lengths.units_after(at).collect();
            let start = units[0].start;
            prop_assert!(start >= at && lengths.fit_from(start));
            for unit in &units {
                prop_assert_eq!(unit.start / STRIPE_GRANULES, (unit.end() - 1) / STRIPE_GRANULES);
                prop_assert!(unit.length != StoredLength::RAW || unit.start % BLOCK_GRANULES == 0);
            }
            for pair in units.windows(2) {
                // None is put off further than the rule asks for.
                let (gap, next) = (pair[1].start.checked_sub(pair[0].end()), pair[1].length);
                let gap_max = if next == StoredLength::RAW { BLOCK_GRANULES } else { next.granules() };
                prop_assert!(gap.is_some_and(|gap| gap < gap_max), "{:?}", pair);
            }
            prop_assert_eq!(lengths.end_from(start), units.last().unwrap().end());
            let (from, len) = (cut.0 % lengths.len(), cut.1);
            let len = 1 + len % (lengths.len() - from);
            let slice = lengths.slice(from, len);
            let own: Vec<Unit> = slice.units_after(lengths.start_of(from, start)).collect();
            prop_assert_eq!(&own[..], &units[from as usize..(from + len) as usize]);
            let one = slice.slice(len - 1, 1);
            prop_assert!(one.fit_from(own[len as usize - 1].start));
        }

        #[test]
        fn lists_read_back_and_count_what_is_stored(lengths in lengths()) {
            let bytes = postcard::to_stdvec(&lengths).unwrap();
            prop_assert_eq!(&postcard::from_bytes::<StoredLengths>(&bytes).unwrap(), &lengths);
            prop_assert_eq!(&StoredLengths::try_from(lengths.as_bytes().to_vec()).unwrap(), &lengths);
            let stored: u64 = lengths.units_after(0).map(|unit| u64::from(unit.end() - unit.start)).sum();
            prop_assert_eq!(lengths.granules(), stored);
            prop_assert!(stored <= u64::from(lengths.end_from(0)));
        }

        #[test]
        fn any_list_of_bytes_is_lengths_or_none(bytes: Vec<u8>, start: u32) {
            match StoredLengths::try_from(bytes.clone()) {
                Ok(lengths) => {
                    prop_assert!(!lengths.fit_from(start) || lengths.end_from(start) <= GRANULES_MAX);
                    prop_assert_eq!(lengths.as_bytes(), &bytes[..]);
                }
                Err(NoLength(byte)) => prop_assert!(StoredLength::of(byte).is_none()),
            }
        }
    }
}
