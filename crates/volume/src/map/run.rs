//! A run of a checkpoint: how it is encoded, in parts, and cut into payloads of segments.
//!
//! A part has a head, and three lists, each behind its length: leaves, segments, runs of the overlay. They are encoded
//! and read element by element, so that nobody waits for a whole part. The parts of a run are read in order.
//!
//! Limits: a part takes [`PART_BYTES_MAX`] and one element more; it is what is put together and summed at once.

use super::layers::LayerTable;
use super::leaf::{LeafNo, LeafPointer, Mapped, Place};
use crate::segment::SegmentInfo;
use crate::segment::writer::{JobKind, Work};
use holdfast_base::{BLOCK_BYTES, BlockCrc, Buf, BufMut, Lsn, block_crcs, crc32c};
use holdfast_format::geometry::Geometry;
use holdfast_format::ledger::Leg;
use holdfast_format::record::{MetaPointer, SegmentNo};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Some hundred microseconds of copying and checksums.
const PART_BYTES_MAX: usize = 512 << 10;

/// Bytes that cost as much, to be copied and summed, as a run of the overlay costs to be looked at and encoded.
const BYTES_A_RUN: usize = 256;

/// Checksums that cost as much.
const CRCS_A_RUN: usize = 32;

#[derive(Debug, Deserialize)]
pub(crate) enum SavedPlace {
    Log(Lsn),
    Segment { segment: SegmentNo, block: u32, crcs: Vec<BlockCrc> },
    Zero,
}

#[derive(Debug, Deserialize)]
pub(crate) struct SavedRun {
    pub(crate) key: u64,
    pub(crate) blocks: u64,
    pub(crate) stamp: Lsn,
    pub(crate) place: SavedPlace,
}

/// The same, as it is written.
#[derive(Serialize)]
enum SaidPlace<'a> {
    Log(Lsn),
    Segment { segment: SegmentNo, block: u32, crcs: &'a [BlockCrc] },
    Zero,
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
        Work { kind, extents: Vec::new(), payload: self.payload, crcs: self.crcs }
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
        self.segments.push(&(no, info));
        self.on_pushed(1);
    }

    pub(crate) fn run(&mut self, key: u64, blocks: u64, mapped: &Mapped) {
        let stamp = mapped.stamp;
        let place = match &mapped.place {
            Place::Log { lsn, .. } => SaidPlace::Log(*lsn),
            Place::Zero => SaidPlace::Zero,
            Place::Segment { segment, block, crcs } => {
                // A long run is cut, so that its checksums fit a part.
                let chunk = (self.part_bytes_max / 10).max(1);
                for (i, crcs) in crcs.as_slice().chunks(chunk).enumerate() {
                    let offset = (i * chunk) as u64;
                    let place = SaidPlace::Segment { segment: *segment, block: block + offset as u32, crcs };
                    self.overlay.push(&SaidRun { key: key + offset, blocks: crcs.len() as u64, stamp, place });
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
        append(&mut bytes, &(std::mem::take(&mut self.full), self.layers.take(), self.folded_at));
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
        let mut reader = PartReader { bytes, at: 0, left: 0, lists: 3 };
        let head = reader.take()?;
        Ok((reader, head))
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
                let (no, info) = self.take()?;
                Element::Segment(no, info)
            }
            _ => Element::Run(self.take()?),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::Crcs;
    use crate::segment::tests::{info, no};

    /// The whole form of a part.
    #[derive(Serialize)]
    struct Whole<'a> {
        full: bool,
        layers: Option<LayerTable>,
        folded_at: Lsn,
        leaves: Vec<(u64, Option<LeafPointer>)>,
        segments: Vec<(SegmentNo, Option<SegmentInfo>)>,
        overlay: Vec<SaidRun<'a>>,
    }

    fn place(block: u32, crcs: Vec<BlockCrc>) -> Mapped {
        Mapped { place: Place::Segment { segment: no(1, 3), block, crcs: Crcs::new(crcs) }, stamp: Lsn(7) }
    }

    #[test]
    fn what_is_encoded_bit_by_bit_has_the_form_of_the_whole_part() {
        let pointer = LeafPointer { segment: no(9, 1), offset_bytes: 3, len_bytes: 700, crc: 8 };
        let mut writer = RunWriter::new(true, LayerTable::default(), Lsn(5), 1 << 20);
        writer.leaf(LeafNo(300), Some(pointer));
        writer.leaf(LeafNo(301), None);
        writer.segment(no(1, 3), Some(&info(512, 4, &[])));
        writer.segment(no(1, 4), None);
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
            segments: vec![(no(1, 3), Some(info(512, 4, &[]))), (no(1, 4), None)],
            overlay: vec![SaidRun { key: 40, blocks: 2, stamp: Lsn(7), place: data }, zero],
        };
        let expected = postcard::to_stdvec(&whole).expect("it encodes");
        assert_eq!(packed.parts()[0][..], expected[..]);
        assert_eq!(packed.index, [(0, expected.len() as u32, crc32c(&expected))]);
        assert_eq!(packed.crcs, block_crcs(&packed.payload[0]));
        assert!(writer.next_packed().is_none());
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
