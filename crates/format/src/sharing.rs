//! Sharing: volumes that name segments of each other. A clone that is a volume of its own begins with the map of the
//! volume that it was made of, its *origin*, and reads that one's segments; to the origin it is a *dependent*.
//!
//! A dependent says in a record of the metadata store which of its origin's segments it still names. It never names more
//! of them later, so an old record says too much, and never too little.

use crate::record::SegmentNo;
use crate::{FormatError, from_postcard, to_postcard};
use holdfast_base::{Epoch, VolumeId, crc32c};
use serde::{Deserialize, Serialize};

/// Segments of these epochs, above those of the origin before, belong to this volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Origin {
    pub upto: Epoch,
    pub volume: VolumeId,
}

/// Segments of these epochs belong to this store, which shares its content. Each store has epochs of its own for ever,
/// all of them from [`STORE_EPOCHS`] on, so that a volume may name segments of several.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Store {
    pub volume: VolumeId,
    pub first: Epoch,
    pub last: Epoch,
}

/// The first epoch of stores: other volumes' are below.
pub const STORE_EPOCHS: Epoch = Epoch(1 << 63);

/// How many of them each store has.
pub const STORE_SPAN: u64 = 1 << 32;

/// A state of a store's catalogue, which tells what may be shared: rising, since each of its owners has a new epoch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct CatalogueNo {
    pub epoch: Epoch,
    pub counter: u64,
}

/// A volume that may name this one's segments up to a number.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Dependent {
    pub volume: VolumeId,
    pub upto: SegmentNo,
}

/// Prefix of the records in which dependents of a volume say what they name.
pub fn dependents_prefix(origin: VolumeId) -> String {
    format!("volume/{origin}/dependent/")
}

/// The record in which one says so.
pub fn dependent_key(origin: VolumeId, dependent: VolumeId) -> String {
    format!("{}{dependent}", dependents_prefix(origin))
}

/// Numbers of segments, in runs: first and last. Sorted, and apart from each other.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct SegmentRanges {
    runs: Vec<(SegmentNo, SegmentNo)>,
}

/// Magic number and version in front of the record: "HFFM", 1; 2 of a member's.
const MAGIC: [u8; 4] = *b"HFFM";
const VERSION: u16 = 1;
const NAMES_VERSION: u16 = 2;

impl SegmentRanges {
    /// Everything up to a number.
    pub fn upto(last: SegmentNo) -> SegmentRanges {
        SegmentRanges { runs: vec![(SegmentNo::default(), last)] }
    }

    /// What holds these numbers, which come sorted, in at most so many runs. Where there are more, the closest runs are
    /// joined: then it holds others, too.
    pub fn holding(numbers: impl Iterator<Item = SegmentNo>, runs_max: usize) -> SegmentRanges {
        let mut runs: Vec<(SegmentNo, SegmentNo)> = Vec::new();
        for no in numbers {
            match runs.last_mut() {
                Some((_, last)) if last.epoch == no.epoch && no.counter - last.counter <= 1 => *last = no,
                _ => runs.push((no, no)),
            }
        }
        if runs.len() > runs_max.max(1) {
            let gap = |pair: &[(SegmentNo, SegmentNo)]| match pair[0].1.epoch == pair[1].0.epoch {
                true => pair[1].0.counter - pair[0].1.counter,
                false => u64::MAX,
            };
            let mut gaps: Vec<(u64, usize)> = runs.windows(2).map(gap).zip(1..).collect();
            gaps.sort_unstable();
            let kept: std::collections::BTreeSet<usize> =
                gaps.into_iter().rev().take(runs_max.max(1) - 1).map(|(_, at)| at).collect();
            let mut joined: Vec<(SegmentNo, SegmentNo)> = Vec::with_capacity(kept.len() + 1);
            for (at, run) in runs.into_iter().enumerate() {
                match joined.last_mut() {
                    Some((_, last)) if !kept.contains(&at) => *last = run.1,
                    _ => joined.push(run),
                }
            }
            runs = joined;
        }
        SegmentRanges { runs }
    }

    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    pub fn contains(&self, no: SegmentNo) -> bool {
        let at = self.runs.partition_point(|(first, _)| *first <= no);
        at > 0 && no <= self.runs[at - 1].1
    }

    /// Magic, version, checksum of the body, body.
    pub fn encode(&self) -> Vec<u8> {
        sealed(VERSION, &to_postcard(self))
    }

    pub fn decode(bytes: &[u8]) -> Result<SegmentRanges, FormatError> {
        let ranges: SegmentRanges = from_postcard(opened(VERSION, bytes)?)?;
        if ranges.is_valid() { Ok(ranges) } else { Err(FormatError::Field("runs")) }
    }

    fn is_valid(&self) -> bool {
        let is_sorted = self.runs.windows(2).all(|pair| pair[0].1 < pair[1].0);
        is_sorted && self.runs.iter().all(|(first, last)| first <= last)
    }
}

/// No opening of a volume has this epoch.
pub const NOBODY: Epoch = Epoch(0);

/// No catalogue comes to that state.
const LEFT: CatalogueNo = CatalogueNo { epoch: Epoch(u64::MAX), counter: u64::MAX };

/// What a member of a sharing domain says it names of the store.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Names {
    /// Of the member: nobody writes it over one of a later opening. Of a member that has never shared its store writes it,
    /// as of [`NOBODY`].
    pub epoch: Epoch,
    /// What was withdrawn by then and is not named here never will be.
    pub catalogue: CatalogueNo,
    pub ranges: SegmentRanges,
}

impl Names {
    /// What a store says for a member that has never shared.
    pub fn of_nobody(catalogue: CatalogueNo) -> Names {
        Names { epoch: NOBODY, catalogue, ranges: SegmentRanges::default() }
    }

    /// What a member says last: of all that is withdrawn, ever, it names nothing. It is no member any more until its store has
    /// taken that back.
    pub fn of_one_that_left(epoch: Epoch) -> Names {
        Names { epoch, catalogue: LEFT, ranges: SegmentRanges::default() }
    }

    pub fn has_left(&self) -> bool {
        self.catalogue == LEFT
    }

    /// As [`SegmentRanges::encode`], in another version.
    pub fn encode(&self) -> Vec<u8> {
        sealed(NAMES_VERSION, &to_postcard(self))
    }

    pub fn decode(bytes: &[u8]) -> Result<Names, FormatError> {
        let names: Names = from_postcard(opened(NAMES_VERSION, bytes)?)?;
        if !names.ranges.is_valid() || names.catalogue.epoch < STORE_EPOCHS {
            return Err(FormatError::Field("names"));
        }
        Ok(names)
    }
}

/// Magic, version, checksum of the body, body.
fn sealed(version: u16, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(body.len() + 10);
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&version.to_le_bytes());
    bytes.extend_from_slice(&crc32c(body).to_le_bytes());
    bytes.extend_from_slice(body);
    bytes
}

fn opened(wanted: u16, bytes: &[u8]) -> Result<&[u8], FormatError> {
    let (header, body) = bytes.split_at_checked(10).ok_or(FormatError::Truncated)?;
    if header[..4] != MAGIC {
        return Err(FormatError::Magic);
    }
    let version = u16::from_le_bytes([header[4], header[5]]);
    if version != wanted {
        return Err(FormatError::Version(version));
    }
    if header[6..10] != crc32c(body).to_le_bytes() {
        return Err(FormatError::Checksum);
    }
    Ok(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn no(epoch: u64, counter: u64) -> SegmentNo {
        SegmentNo { epoch: Epoch(epoch), counter }
    }

    #[test]
    fn ranges_hold_what_they_were_made_of_however_few_they_may_be() {
        let all = [no(1, 3), no(1, 4), no(1, 9), no(2, 0), no(2, 500), no(2, 501), no(7, 1)];
        let exact = SegmentRanges::holding(all.into_iter(), 100);
        assert_eq!(exact.runs.len(), 5);
        assert!(!exact.contains(no(1, 5)) && !exact.contains(no(2, 1)) && !exact.contains(no(7, 2)));
        for runs_max in 0..6 {
            let ranges = SegmentRanges::holding(all.into_iter(), runs_max);
            assert!(ranges.runs.len() <= runs_max.max(1), "{ranges:?}");
            assert!(all.into_iter().all(|no| ranges.contains(no)), "{ranges:?}");
            assert!(!ranges.contains(no(1, 2)) && !ranges.contains(no(7, 2)));
            assert_eq!(SegmentRanges::decode(&ranges.encode()), Ok(ranges));
        }
    }

    #[test]
    fn what_a_member_names_reads_back_and_is_no_clones() {
        let catalogue = CatalogueNo { epoch: STORE_EPOCHS, counter: 7 };
        let names = Names { epoch: Epoch(3), catalogue, ranges: SegmentRanges::upto(no(1, 5)) };
        assert_eq!(Names::decode(&names.encode()), Ok(names.clone()));
        assert_eq!(SegmentRanges::decode(&names.encode()), Err(FormatError::Version(2)));
        assert_eq!(Names::decode(&names.ranges.encode()), Err(FormatError::Version(1)));
        let early = Names { catalogue: CatalogueNo { epoch: Epoch(4), counter: 7 }, ..names };
        assert_eq!(Names::decode(&early.encode()), Err(FormatError::Field("names")));
    }

    #[test]
    fn damage_is_seen() {
        let mut bytes = SegmentRanges::upto(no(3, 9)).encode();
        assert!(SegmentRanges::decode(&bytes).is_ok_and(|r| r.contains(no(2, 1_000_000)) && !r.contains(no(3, 10))));
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        assert_eq!(SegmentRanges::decode(&bytes), Err(FormatError::Checksum));
        assert_eq!(SegmentRanges::decode(&[]), Err(FormatError::Truncated));
        let unsorted = SegmentRanges { runs: vec![(no(2, 0), no(2, 5)), (no(1, 0), no(1, 1))] };
        assert_eq!(SegmentRanges::decode(&unsorted.encode()), Err(FormatError::Field("runs")));
    }
}
