//! A run of a checkpoint: how it is encoded, in parts, and cut into payloads of segments.
//!
//! A part has a head, and three lists, each behind its length: leaves, segments, runs of the overlay. They are encoded
//! and read element by element, so that nobody waits for a whole part. The parts of a run are read in order.
//!
//! A part begins with 0 or 1, or with a 2: then it is of version 2, and may have packed segments and runs; its layers have
//! the numbers that they would have in wide keys.
//!
//! Limits: a part takes [`PART_BYTES_MAX`] and one element more; it is what is put together and summed at once.

use super::layers::LayerTable;
use super::leaf::{LeafNo, LeafPointer, Mapped, Place, Stored};
use crate::segment::writer::{JobKind, Work};
use crate::segment::{Kind, Named, SegmentInfo};
use holdfast_base::{BLOCK_BYTES, BlockCrc, Buf, BufMut, KeyWidth, Lsn, block_crcs, crc32c};
use holdfast_format::geometry::Geometry;
use holdfast_format::ledger::Leg;
use holdfast_format::packing::{BLOCK_GRANULES, StoredLengths};
use holdfast_format::record::{MetaPointer, SegmentNo};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::num::NonZeroU32;

/// Some hundred microseconds of copying and checksums.
const PART_BYTES_MAX: usize = 512 << 10;

/// Bytes that cost as much, to be copied and summed, as a run of the overlay costs to be looked at and encoded.
pub(crate) const BYTES_A_RUN: usize = 256;

/// Checksums that cost as much.
pub(crate) const CRCS_A_RUN: usize = 32;

#[derive(Debug, Deserialize)]
pub(crate) enum SavedPlace {
    Log(Lsn),
    Segment { segment: SegmentNo, block: u32, crcs: Vec<BlockCrc> },
    Zero,
    Packed { segment: SegmentNo, granule: u32, crcs: Vec<BlockCrc>, lengths: StoredLengths },
}

#[derive(Debug, Deserialize)]
pub(crate) struct SavedRun {
    pub(crate) key: u64,
    pub(crate) blocks: u64,
    pub(crate) stamp: Lsn,
    pub(crate) place: SavedPlace,
}

impl SavedRun {
    /// Its lists are as long as the run, and units lie where they may.
    fn is_valid(&self) -> bool {
        let is_count = |crcs: &[BlockCrc]| crcs.len() as u64 == self.blocks;
        self.blocks > 0
            && match &self.place {
                SavedPlace::Log(_) | SavedPlace::Zero => true,
                SavedPlace::Segment { crcs, .. } => is_count(crcs),
                SavedPlace::Packed { granule, crcs, lengths, .. } => {
                    is_count(crcs) && lengths.len() == self.blocks && lengths.fit_from(*granule)
                }
            }
    }
}

/// A segment as it is saved, with what is named of it: blocks of data, bytes of leaves, or 1 for a part of a checkpoint.
/// Packed ones are in parts of version 2 only.
#[derive(Debug, Deserialize)]
enum SavedSegment {
    Data(SavedShape, u64),
    Meta(SavedShape, u64),
    Run(SavedShape, u64),
    Packed { shape: SavedShape, granules: u64, blocks: u64, units: NonZeroU32 },
}

#[derive(Debug, Deserialize)]
struct SavedShape {
    geometry: Geometry,
    homes: Vec<Leg>,
}

impl SavedSegment {
    /// `None` where what it says can't be.
    fn into_info(self) -> Option<SegmentInfo> {
        let (kind, shape, live, units) = match self {
            SavedSegment::Data(shape, blocks) => {
                blocks.checked_mul(u64::from(BLOCK_GRANULES))?;
                (Kind::Data, shape, Named::of_blocks(blocks), None)
            }
            SavedSegment::Meta(shape, bytes) => (Kind::Meta, shape, Named::of_metadata(bytes), None),
            SavedSegment::Run(shape, count) => (Kind::Run, shape, Named::of_metadata(count), None),
            SavedSegment::Packed { shape, granules, blocks, units } => {
                let payload = u64::from(shape.geometry.payload_blocks) * u64::from(BLOCK_GRANULES);
                let are_units = granules >= blocks && granules.div_ceil(u64::from(BLOCK_GRANULES)) <= blocks;
                if !are_units || u64::from(units.get()) > payload {
                    return None;
                }
                (Kind::Data, shape, Named { size: granules, blocks }, Some(units))
            }
        };
        let SavedShape { geometry, homes } = shape;
        Some(SegmentInfo { live, units, ..SegmentInfo::new(kind, geometry, homes) })
    }
}

/// The same, as it is written.
#[derive(Serialize)]
enum SaidSegment<'a> {
    Data(SaidShape<'a>, u64),
    Meta(SaidShape<'a>, u64),
    Run(SaidShape<'a>, u64),
    Packed { shape: SaidShape<'a>, granules: u64, blocks: u64, units: NonZeroU32 },
}

#[derive(Serialize)]
struct SaidShape<'a> {
    geometry: Geometry,
    homes: &'a [Leg],
}

impl SaidSegment<'_> {
    fn of(info: &SegmentInfo) -> SaidSegment<'_> {
        let (shape, live) = (SaidShape { geometry: info.geometry, homes: &info.homes }, info.live);
        match (info.kind, info.units) {
            (Kind::Data, None) => SaidSegment::Data(shape, live.blocks),
            (Kind::Data, Some(units)) => SaidSegment::Packed { shape, granules: live.size, blocks: live.blocks, units },
            (Kind::Meta, _) => SaidSegment::Meta(shape, live.size),
            (Kind::Run, _) => SaidSegment::Run(shape, live.size),
        }
    }
}

/// The first byte of a part of version 2.
const PART_VERSION_PACKED: u8 = 2;

/// The same, as it is written.
#[derive(Serialize)]
enum SaidPlace<'a> {
    Log(Lsn),
    Segment { segment: SegmentNo, block: u32, crcs: &'a [BlockCrc] },
    Zero,
    Packed { segment: SegmentNo, granule: u32, crcs: &'a [BlockCrc], lengths: &'a [u8] },
}

#[derive(Serialize)]
struct SaidRun<'a> {
    key: u64,
    blocks: u64,
    stamp: Lsn,
    place: SaidPlace<'a>,
}

/// Parts in one payload: (first block, bytes, checksum).
pub(crate) type PartIndex = Vec<(u32, u32, u32)>;

/// Parts that lie in one segment.
#[derive(Debug, Default)]
pub(crate) struct Packed {
    pub(crate) index: PartIndex,
    payload: Vec<Buf>,
    crcs: Vec<BlockCrc>,
}

impl Packed {
    pub(crate) fn into_work(self, kind: JobKind) -> Work {
        Work { payload: self.payload, crcs: self.crcs, ..Work::new(kind) }
    }

    /// The bytes of the parts.
    #[cfg(test)]
    pub(super) fn parts(&self) -> Vec<Buf> {
        let lens = self.index.iter().map(|(_, len, _)| *len as usize);
        self.payload.iter().zip(lens).map(|(buf, len)| buf.slice(0..len)).collect()
    }

    /// Without what fills blocks up.
    pub(crate) fn bytes(&self) -> u64 {
        self.index.iter().map(|(_, bytes, _)| u64::from(*bytes)).sum()
    }
}

/// Where the parts in one payload lie.
pub(crate) fn pointers_into(
    index: &PartIndex,
    segment: SegmentNo,
    geometry: Geometry,
    homes: &[Leg],
) -> Vec<MetaPointer> {
    let pointer = |&(block, len_bytes, crc): &(u32, u32, u32)| MetaPointer {
        segment,
        geometry,
        homes: homes.to_vec(),
        block,
        len_bytes,
        crc,
    };
    index.iter().map(pointer).collect()
}

// ---- writing ----

/// Elements that were encoded, one behind the other.
#[derive(Debug, Default)]
struct List {
    count: u64,
    bytes: Vec<u8>,
}

impl List {
    fn push(&mut self, element: &impl Serialize) {
        self.count += 1;
        append(&mut self.bytes, element);
    }

    fn move_to(&mut self, bytes: &mut Vec<u8>) {
        append(bytes, &std::mem::take(&mut self.count));
        bytes.append(&mut self.bytes);
    }
}

fn append(bytes: &mut Vec<u8>, what: &impl Serialize) {
    *bytes = postcard::to_extend(what, std::mem::take(bytes)).expect("our records always encode");
}

/// Encodes a run, in parts that each fit well into a segment.
#[derive(Debug)]
pub(crate) struct RunWriter {
    /// Forget everything loaded before; in the first part.
    full: bool,
    /// Once a run, in the first part.
    layers: Option<LayerTable>,
    /// Overlay runs up to this stamp under the leaves named here are in those leaves, but for runs said anew here.
    folded_at: Lsn,
    leaves: List,
    segments: List,
    overlay: List,
    /// A run or a segment of the part is packed.
    has_packed: bool,
    part_bytes_max: usize,
    payload_blocks_max: usize,
    filling: Packed,
    packed: VecDeque<Packed>,
    /// What was done since that was asked last, in runs.
    work: usize,
}

impl RunWriter {
    pub(crate) fn new(full: bool, layers: LayerTable, folded_at: Lsn, segment_payload_bytes: u32) -> RunWriter {
        let payload_bytes = segment_payload_bytes as usize;
        RunWriter {
            full,
            layers: Some(layers),
            folded_at,
            leaves: List::default(),
            segments: List::default(),
            overlay: List::default(),
            has_packed: false,
            part_bytes_max: (payload_bytes / 4).min(PART_BYTES_MAX),
            payload_blocks_max: payload_bytes / BLOCK_BYTES,
            filling: Packed::default(),
            packed: VecDeque::new(),
            work: 0,
        }
    }

    pub(crate) fn leaf(&mut self, no: LeafNo, pointer: Option<LeafPointer>) {
        self.leaves.push(&(no.0, pointer));
        self.on_pushed(1);
    }

    pub(crate) fn segment(&mut self, no: SegmentNo, info: Option<&SegmentInfo>) {
        self.has_packed |= info.is_some_and(|info| info.units.is_some());
        self.segments.push(&(no, info.map(SaidSegment::of)));
        self.on_pushed(1);
    }

    pub(crate) fn run(&mut self, key: u64, blocks: u64, mapped: &Mapped) {
        let stamp = mapped.stamp;
        let place = match &mapped.place {
            Place::Log { lsn, .. } => SaidPlace::Log(*lsn),
            Place::Zero => SaidPlace::Zero,
            Place::Segment { segment, stored, crcs } => {
                // A long run is cut, so that its checksums fit a part.
                let chunk = (self.part_bytes_max / 10).max(1);
                for (i, crcs) in crcs.as_slice().chunks(chunk).enumerate() {
                    let (offset, blocks) = ((i * chunk) as u64, crcs.len() as u64);
                    let stored = stored.slice(offset, blocks);
                    let place = match &stored {
                        Stored::Plain { block } => SaidPlace::Segment { segment: *segment, block: *block, crcs },
                        Stored::Packed { granule, lengths } => {
                            self.has_packed = true;
                            let (segment, granule, lengths) = (*segment, *granule, lengths.as_bytes());
                            SaidPlace::Packed { segment, granule, crcs, lengths }
                        }
                    };
                    self.overlay.push(&SaidRun { key: key + offset, blocks, stamp, place });
                    self.on_pushed(1 + crcs.len() / CRCS_A_RUN);
                }
                return;
            }
        };
        self.overlay.push(&SaidRun { key, blocks, stamp, place });
        self.on_pushed(1);
    }

    fn on_pushed(&mut self, work: usize) {
        self.work += work;
        if self.leaves.bytes.len() + self.segments.bytes.len() + self.overlay.bytes.len() >= self.part_bytes_max {
            self.end_part();
        }
    }

    fn end_part(&mut self) {
        let mut bytes = Vec::new();
        let mut layers = self.layers.take();
        if std::mem::take(&mut self.has_packed) {
            bytes.push(PART_VERSION_PACKED);
            let widened = |layers: LayerTable| layers.renumbered(|layer| KeyWidth::Narrow.widened(layer));
            layers = layers.map(|layers| widened(layers).expect("layers have numbers that keys can have"));
        }
        append(&mut bytes, &(std::mem::take(&mut self.full), layers, self.folded_at));
        for list in [&mut self.leaves, &mut self.segments, &mut self.overlay] {
            list.move_to(&mut bytes);
        }
        let mut part = BufMut::new(bytes.len().next_multiple_of(BLOCK_BYTES));
        part[..bytes.len()].copy_from_slice(&bytes);
        part[bytes.len()..].fill(0);
        let blocks = self.filling.crcs.len();
        if blocks > 0 && blocks + part.len() / BLOCK_BYTES > self.payload_blocks_max {
            self.packed.push_back(std::mem::take(&mut self.filling));
        }
        let filling = &mut self.filling;
        filling.index.push((filling.crcs.len() as u32, bytes.len() as u32, crc32c(&bytes)));
        filling.crcs.extend(block_crcs(&part));
        filling.payload.push(part.freeze());
        self.work += bytes.len() / BYTES_A_RUN;
    }

    /// A payload that is full.
    pub(crate) fn next_packed(&mut self) -> Option<Packed> {
        self.packed.pop_front()
    }

    /// Everything was said: what is left of the payloads, one at least.
    pub(crate) fn end(&mut self) {
        if self.layers.is_some() || self.leaves.count + self.segments.count + self.overlay.count > 0 {
            self.end_part();
        }
        self.packed.push_back(std::mem::take(&mut self.filling));
    }

    pub(crate) fn take_work(&mut self) -> usize {
        std::mem::take(&mut self.work)
    }
}

// ---- reading ----

/// What is left of a part that is being read.
#[derive(Debug)]
pub(crate) struct PartReader {
    bytes: Buf,
    at: usize,
    /// Elements that are left of the list that it is at.
    left: u64,
    /// Lists that are left behind that.
    lists: u8,
    /// It may have packed runs and segments.
    may_be_packed: bool,
}

/// The head of a part.
#[derive(Debug, Deserialize)]
pub(crate) struct Head {
    /// Forget everything loaded before.
    pub(crate) full: bool,
    /// Once a run.
    pub(crate) layers: Option<LayerTable>,
    pub(crate) folded_at: Lsn,
}

#[derive(Debug)]
pub(crate) enum Element {
    Leaf(LeafNo, Option<LeafPointer>),
    Segment(SegmentNo, Option<SegmentInfo>),
    Run(SavedRun),
}

/// A part whose checksum is right, and that is none.
#[derive(Debug)]
pub(crate) struct Unreadable;

impl PartReader {
    pub(crate) fn begin(bytes: Buf) -> Result<(PartReader, Head), Unreadable> {
        let may_be_packed = bytes.first() == Some(&PART_VERSION_PACKED);
        let mut reader = PartReader { bytes, at: usize::from(may_be_packed), left: 0, lists: 3, may_be_packed };
        let mut head: Head = reader.take()?;
        if may_be_packed && let Some(layers) = head.layers.take() {
            let own = layers.renumbered(|layer| KeyWidth::Narrow.of_wide(layer));
            head.layers = Some(own.ok_or(Unreadable)?);
        }
        Ok((reader, head))
    }

    pub(super) fn bytes_left(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn take<'a, T: Deserialize<'a>>(&'a mut self) -> Result<T, Unreadable> {
        let bytes = &self.bytes[self.at..];
        let (what, rest) = postcard::take_from_bytes(bytes).map_err(|_| Unreadable)?;
        self.at += bytes.len() - rest.len();
        Ok(what)
    }

    /// The next one; `None` behind the last.
    pub(crate) fn next(&mut self) -> Result<Option<Element>, Unreadable> {
        while self.left == 0 {
            if self.lists == 0 {
                return Ok(None);
            }
            self.left = self.take()?;
            self.lists -= 1;
        }
        self.left -= 1;
        Ok(Some(match self.lists {
            2 => {
                let (no, pointer) = self.take()?;
                Element::Leaf(LeafNo(no), pointer)
            }
            1 => {
                let (no, saved): (SegmentNo, Option<SavedSegment>) = self.take()?;
                let is_known = self.may_be_packed || !matches!(saved, Some(SavedSegment::Packed { .. }));
                let info = saved.map(|saved| saved.into_info().filter(|_| is_known).ok_or(Unreadable)).transpose()?;
                Element::Segment(no, info)
            }
            _ => {
                let run: SavedRun = self.take()?;
                let is_known = self.may_be_packed || !matches!(run.place, SavedPlace::Packed { .. });
                if !is_known || !run.is_valid() {
                    return Err(Unreadable);
                }
                Element::Run(run)
            }
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::{Crcs, Snapshot};
    use crate::peers::tests::leg;
    use crate::segment::tests::{info, no};
    use holdfast_base::{HeadId, ObjectId};

    /// Kind, shape, homes and what is named of a segment.
    type Row = (u8, Geometry, Vec<Leg>, u64);

    /// The whole form of a part.
    #[derive(Serialize)]
    struct Whole<'a> {
        full: bool,
        layers: Option<LayerTable>,
        folded_at: Lsn,
        leaves: Vec<(u64, Option<LeafPointer>)>,
        segments: Vec<(SegmentNo, Option<Row>)>,
        overlay: Vec<SaidRun<'a>>,
    }

    fn place(block: u32, crcs: Vec<BlockCrc>) -> Mapped {
        Mapped { place: Place::plain(no(1, 3), block, Crcs::new(crcs)), stamp: Lsn(7) }
    }

    #[test]
    fn what_is_encoded_bit_by_bit_has_the_form_of_the_whole_part() {
        let pointer = LeafPointer { segment: no(9, 1), offset_bytes: 3, len_bytes: 700, crc: 8 };
        let mut writer = RunWriter::new(true, LayerTable::default(), Lsn(5), 1 << 20);
        writer.leaf(LeafNo(300), Some(pointer));
        writer.leaf(LeafNo(301), None);
        let (of_data, geometry) = (info(512, 4, &[leg(1, 0)]), info(512, 0, &[]).geometry);
        let metadata = |kind, size| {
            let live = Named::of_metadata(size);
            SegmentInfo { live, ..SegmentInfo::new(kind, geometry, Vec::new()) }
        };
        writer.segment(no(1, 3), Some(&of_data));
        writer.segment(no(1, 4), None);
        writer.segment(no(1, 5), Some(&metadata(Kind::Meta, 700)));
        writer.segment(no(1, 6), Some(&metadata(Kind::Run, 1)));
        writer.run(40, 2, &place(8, vec![1, 2]));
        writer.run(50, 3, &Mapped { place: Place::Zero, stamp: Lsn(6) });
        writer.end();
        let packed = writer.next_packed().expect("one payload");
        let zero = SaidRun { key: 50, blocks: 3, stamp: Lsn(6), place: SaidPlace::Zero };
        let data = SaidPlace::Segment { segment: no(1, 3), block: 8, crcs: &[1, 2] };
        let whole = Whole {
            full: true,
            layers: Some(LayerTable::default()),
            folded_at: Lsn(5),
            leaves: vec![(300, Some(pointer)), (301, None)],
            segments: vec![
                (no(1, 3), Some((0, geometry, vec![leg(1, 0)], 4))),
                (no(1, 4), None),
                (no(1, 5), Some((1, geometry, Vec::new(), 700))),
                (no(1, 6), Some((2, geometry, Vec::new(), 1))),
            ],
            overlay: vec![SaidRun { key: 40, blocks: 2, stamp: Lsn(7), place: data }, zero],
        };
        let expected = postcard::to_stdvec(&whole).expect("it encodes");
        assert_eq!(packed.parts()[0][..], expected[..]);
        assert_eq!(packed.index, [(0, expected.len() as u32, crc32c(&expected))]);
        assert_eq!(packed.crcs, block_crcs(&packed.payload[0]));
        assert!(writer.next_packed().is_none());
        let (mut reader, _) = PartReader::begin(packed.parts().remove(0)).expect("it can be read");
        let mut segments = Vec::new();
        while let Some(element) = reader.next().expect("it can be read") {
            if let Element::Segment(_, info) = element {
                segments.push(info);
            }
        }
        assert_eq!(segments, [Some(of_data), None, Some(metadata(Kind::Meta, 700)), Some(metadata(Kind::Run, 1))]);
    }

    #[test]
    fn a_packed_segment_is_saved_with_granules_in_parts_of_version_2() {
        let segment = |live: Named, units| SegmentInfo { live, units: NonZeroU32::new(units), ..info(32, 0, &[]) };
        let part_of = |info: &SegmentInfo| {
            let mut writer = RunWriter::new(true, layers(), Lsn(5), 1 << 20);
            writer.segment(no(1, 3), Some(info));
            only_part(&mut writer)
        };
        let info = segment(Named { size: 700, blocks: 40 }, 2000);
        let part = part_of(&info);
        // Number, present, kind, geometry, no homes, granules and blocks that are named, granules of all units.
        let row = ["0103", "01", "03", "0201001020", "00", "bc05", "28", "d00f"].concat();
        assert_eq!(hex(&part), format!("0201{}050001{row}00", layers_of("10")));
        let (mut reader, _) = PartReader::begin(part.clone()).expect("it can be read");
        let Ok(Some(Element::Segment(at, Some(read)))) = reader.next() else { panic!("a segment") };
        assert_eq!((at, read), (no(1, 3), info));
        assert!(!reads(part.slice(1..part.len())), "version 1 has none");
        for bad in [
            segment(Named { size: 39, blocks: 40 }, 2000),
            segment(Named { size: 2561, blocks: 40 }, 2000),
            segment(Named { size: 700, blocks: 40 }, 32 * 64 + 1),
        ] {
            assert!(!reads(part_of(&bad)), "{bad:?}");
        }
    }

    #[test]
    fn parts_of_a_large_run_fit_segments_and_say_all_of_it_once() {
        let mut writer = RunWriter::new(false, LayerTable::default(), Lsn(5), 64 << 10);
        for key in 0..5000 {
            writer.run(key * 10, 4, &place(key as u32, vec![u32::MAX; 4]));
        }
        writer.end();
        let (mut keys, mut heads) = (Vec::new(), 0);
        while let Some(packed) = writer.next_packed() {
            assert!(packed.crcs.len() * BLOCK_BYTES <= 64 << 10, "a payload of {} blocks", packed.crcs.len());
            for part in packed.parts() {
                let (mut reader, head) = PartReader::begin(part).expect("it can be read");
                heads += usize::from(head.layers.is_some());
                while let Some(element) = reader.next().expect("it can be read") {
                    let Element::Run(run) = element else { panic!("{element:?}") };
                    keys.push(run.key);
                }
            }
        }
        assert_eq!((heads, keys), (1, (0..5000).map(|key| key * 10).collect()));
        assert!(writer.take_work() >= 5000);
    }

    fn packed(granule: u32, lengths: &[u8]) -> Mapped {
        let crcs = Crcs::new((0..lengths.len() as u32).collect::<Vec<_>>());
        let lengths = StoredLengths::try_from(lengths.to_vec()).expect("they are lengths");
        Mapped {
            place: Place::Segment { segment: no(1, 3), stored: Stored::Packed { granule, lengths }, crcs },
            stamp: Lsn(7),
        }
    }

    fn only_part(writer: &mut RunWriter) -> Buf {
        writer.end();
        let mut parts = writer.next_packed().expect("one payload").parts();
        assert_eq!(parts.len(), 1);
        parts.remove(0)
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|b| format!("{b:02x}")).collect()
    }

    /// With layers 0 and 1.
    fn layers() -> LayerTable {
        let mut layers = LayerTable::default();
        let snapshot = Snapshot { name: "a".to_string(), head: HeadId::VOLUME, created_ms: 5, size_bytes: 6 };
        layers.freeze(ObjectId(0), ObjectId(1), snapshot, true);
        layers
    }

    /// Their bytes in a part, with the number that the second one has there.
    fn layers_of(number: &str) -> String {
        format!("01020000010161000506{number}0100000100{number}0000{number}00")
    }

    #[test]
    fn parts_of_version_2_have_packed_runs_and_wide_layers() {
        let mut writer = RunWriter::new(true, layers(), Lsn(5), 1 << 20);
        writer.run(40, 3, &packed(130, &[0x41, 63, 0x9d]));
        let part = only_part(&mut writer);
        let golden = |layers: &str| format!("0201{layers}0500000128030703010382010300010203413f9d");
        assert_eq!(hex(&part), golden(&layers_of("10")));
        let (mut reader, head) = PartReader::begin(part.clone()).expect("it can be read");
        let table = |layers: Option<LayerTable>| layers.expect("they are there").iter().collect::<Vec<_>>();
        assert_eq!(table(head.layers), layers().iter().collect::<Vec<_>>());
        let Ok(Some(Element::Run(run))) = reader.next() else { panic!("a run") };
        let SavedPlace::Packed { segment, granule, crcs, lengths } = run.place else { panic!("{run:?}") };
        assert_eq!((run.key, run.blocks, segment, granule), (40, 3, no(1, 3), 130));
        assert_eq!((crcs, lengths.as_bytes()), (vec![0, 1, 2], &[0x41, 63, 0x9d][..]));
        assert!(reader.next().is_ok_and(|end| end.is_none()));
        // One of version 1 has none of that, and narrow layers are 16 apart.
        assert!(!reads(part.slice(1..part.len())));
        let bytes = |hex: &str| {
            (0..hex.len() / 2).map(|i| u8::from_str_radix(&hex[2 * i..][..2], 16).unwrap()).collect::<Vec<_>>()
        };
        assert!(reads(Buf::copy_from(&bytes(&golden(&layers_of("20"))))));
        assert!(!reads(Buf::copy_from(&bytes(&golden(&layers_of("21"))))));
    }

    #[test]
    fn long_packed_runs_are_cut_and_each_piece_knows_where_it_starts() {
        let lengths: Vec<u8> = (0..20_000_u32).map(|i| if i % 5 == 0 { 63 } else { 0x40 + (i % 60) as u8 }).collect();
        let whole = packed(0, &lengths);
        let Place::Segment { stored, .. } = &whole.place else { panic!("{whole:?}") };
        let mut writer = RunWriter::new(false, LayerTable::default(), Lsn(5), 64 << 10);
        writer.run(100, lengths.len() as u64, &whole);
        writer.end();
        let mut at = 0;
        while let Some(payload) = writer.next_packed() {
            for part in payload.parts() {
                let (mut reader, _) = PartReader::begin(part).expect("it can be read");
                while let Some(element) = reader.next().expect("it can be read") {
                    let Element::Run(run) = element else { panic!("{element:?}") };
                    let SavedPlace::Packed { granule, lengths, .. } = run.place else { panic!("{run:?}") };
                    assert_eq!(
                        (run.key, Stored::Packed { granule, lengths }),
                        (100 + at, stored.slice(at, run.blocks))
                    );
                    at += run.blocks;
                }
            }
        }
        assert_eq!(at, lengths.len() as u64);
    }

    /// Reads all of a part, if it is one.
    fn reads(part: Buf) -> bool {
        let Ok((mut reader, _)) = PartReader::begin(part) else { return false };
        loop {
            match reader.next() {
                Ok(Some(_)) => {}
                Ok(None) => return true,
                Err(Unreadable) => return false,
            }
        }
    }

    #[test]
    fn whatever_is_damaged_is_a_part_or_none() {
        let mut writer = RunWriter::new(true, layers(), Lsn(5), 1 << 20);
        writer.leaf(LeafNo(3), None);
        writer.run(40, 2, &place(8, vec![1, 2]));
        writer.run(60, 3, &packed(130, &[0x41, 63, 0x9d]));
        let part = only_part(&mut writer);
        assert!(reads(part.clone()));
        for len in 0..part.len() {
            assert!(!reads(part.slice(0..len)), "{len}");
        }
        for bit in 0..part.len() * 8 {
            let mut bytes = part.to_vec();
            bytes[bit / 8] ^= 1 << (bit % 8);
            reads(Buf::copy_from(&bytes));
        }
    }

    #[test]
    fn bytes_that_are_no_part_are_told_apart() {
        let mut writer = RunWriter::new(true, LayerTable::default(), Lsn(5), 1 << 20);
        writer.run(40, 2, &place(8, vec![1, 2]));
        writer.end();
        let part = writer.next_packed().expect("one payload").parts().remove(0);
        let (mut reader, _) = PartReader::begin(part.slice(0..part.len() - 1)).expect("the head is there");
        assert!(reader.next().is_err());
    }
}
