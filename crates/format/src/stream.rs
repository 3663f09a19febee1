//! Snapshots as streams: what `holdfast send` writes and `holdfast receive` reads.
//!
//! ```text
//! 0        4      5       8               12       16       24     28        32
//! +--------+------+-------+---------------+--------+--------+------+---------+---------+
//! | "HFS1" | kind | zeroes| payload bytes | offset          | span          | crc32c  | payload
//! +--------+------+-------+---------------+--------+--------+------+---------+---------+
//! ```
//! A stream is one begin frame, then data and zeroes at ascending offsets, then one end frame. What no frame tells of is as
//! in the snapshot that the stream builds on, or zeroes where there is none.
//!
//! The checksum of a frame covers the checksum of the frame before it (zero for the first), the head up to here, and the
//! payload: so that a frame lost, doubled or moved is found as well as one that is damaged.

use crate::geometry::Layout;
use crate::{FormatError, from_postcard, to_postcard};
use holdfast_base::{ObjectId, VolumeId, crc32c};
use serde::{Deserialize, Serialize};

/// Of this stream, its begin and end frames.
pub const STREAM_VERSION: u16 = 1;

pub const HEAD_BYTES: usize = 32;

/// Bytes of a frame's payload.
pub const PAYLOAD_BYTES_MAX: u32 = 4 << 20;

const MAGIC: [u8; 4] = *b"HFS1";

/// In place of a volume's name: the stream is told of a disk image.
pub const IMAGE: &str = "(image)";

/// In place of a volume's name: the stream is told of a backup.
pub const BACKUP: &str = "(backup)";

const BEGIN: u8 = 1;
const DATA: u8 = 2;
const ZEROES: u8 = 3;
const END: u8 = 4;

/// Names a snapshot everywhere: numbers of layers are never given out twice, and a copy keeps the name of what it is a
/// copy of. Written as `VOLUME/LAYER`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SnapshotId {
    pub volume: VolumeId,
    pub layer: ObjectId,
}

impl From<SnapshotId> for String {
    fn from(id: SnapshotId) -> String {
        format!("{}/{}", id.volume, id.layer)
    }
}

impl TryFrom<String> for SnapshotId {
    type Error = FormatError;
    fn try_from(text: String) -> Result<SnapshotId, FormatError> {
        let parsed = text.split_once('/').and_then(|(volume, layer)| {
            Some(SnapshotId { volume: volume.parse().ok()?, layer: ObjectId(layer.parse().ok()?) })
        });
        parsed.ok_or(FormatError::Field("snapshot id"))
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Begin {
    pub version: u16,
    /// Names at the sender.
    pub volume: String,
    pub snapshot: String,
    pub id: SnapshotId,
    /// The snapshot that the receiver must have: its name at the sender, and what it is.
    pub from: Option<(String, SnapshotId)>,
    pub size_bytes: u64,
    pub layout: Layout,
    /// The stream tells of what lies from here on: the receiver has the rest.
    pub start: u64,
}

impl Begin {
    /// It is told by a command that begins anew by itself, of what no grid has.
    pub fn is_of_no_grid(&self) -> bool {
        self.volume == IMAGE || self.volume == BACKUP
    }
}

/// What the sender has sent since `start`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Totals {
    pub data_bytes: u64,
    pub zeroes_bytes: u64,
}

/// What a frame tells.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Part {
    Begin(Begin),
    /// The payload belongs at this offset.
    Data {
        offset: u64,
    },
    Zeroes {
        offset: u64,
        len: u64,
    },
    End(Totals),
}

/// Frames of one stream, in order.
#[derive(Debug, Default)]
pub struct Sender {
    crc: u32,
    totals: Totals,
}

impl Sender {
    pub fn begin(&mut self, begin: &Begin) -> Vec<u8> {
        self.record(BEGIN, &to_postcard(begin))
    }

    /// The head of a frame whose payload is `data`, at most [`PAYLOAD_BYTES_MAX`] bytes.
    pub fn data(&mut self, offset: u64, data: &[u8]) -> [u8; HEAD_BYTES] {
        self.totals.data_bytes += data.len() as u64;
        self.head(DATA, offset, data.len() as u64, data)
    }

    pub fn zeroes(&mut self, offset: u64, len: u64) -> [u8; HEAD_BYTES] {
        self.totals.zeroes_bytes += len;
        self.head(ZEROES, offset, len, &[])
    }

    pub fn end(&mut self) -> Vec<u8> {
        self.record(END, &to_postcard(&self.totals))
    }

    pub fn totals(&self) -> Totals {
        self.totals
    }

    fn record(&mut self, kind: u8, payload: &[u8]) -> Vec<u8> {
        let mut frame = self.head(kind, 0, 0, payload).to_vec();
        frame.extend_from_slice(payload);
        frame
    }

    fn head(&mut self, kind: u8, offset: u64, span: u64, payload: &[u8]) -> [u8; HEAD_BYTES] {
        let len = u32::try_from(payload.len()).ok().filter(|len| *len <= PAYLOAD_BYTES_MAX);
        let mut head = [0; HEAD_BYTES];
        head[..4].copy_from_slice(&MAGIC);
        head[4] = kind;
        head[8..12].copy_from_slice(&len.expect("a payload of bounded length").to_le_bytes());
        head[12..20].copy_from_slice(&offset.to_le_bytes());
        head[20..28].copy_from_slice(&span.to_le_bytes());
        self.crc = chained(self.crc, &head, payload);
        head[28..].copy_from_slice(&self.crc.to_le_bytes());
        head
    }
}

fn chained(before: u32, head: &[u8; HEAD_BYTES], payload: &[u8]) -> u32 {
    let mut covered = before.to_le_bytes().to_vec();
    covered.extend_from_slice(&head[..28]);
    covered.extend_from_slice(&crc32c(payload).to_le_bytes());
    crc32c(&covered)
}

/// Checks the frames of one stream as they come.
#[derive(Debug, Default)]
pub struct Receiver {
    crc: u32,
    size_bytes: Option<u64>,
    /// Everything before it was told of.
    told: u64,
    totals: Totals,
    ended: bool,
}

impl Receiver {
    /// How many bytes of payload follow this head; the checksum is checked with them.
    ///
    /// # Errors
    /// Where this is no head of a stream.
    pub fn payload_bytes(head: &[u8; HEAD_BYTES]) -> Result<usize, FormatError> {
        if head[..4] != MAGIC {
            return Err(FormatError::Magic);
        }
        let len = u32::from_le_bytes(head[8..12].try_into().expect("four bytes"));
        if len > PAYLOAD_BYTES_MAX { Err(FormatError::Field("payload bytes")) } else { Ok(len as usize) }
    }

    /// What the next frame tells.
    ///
    /// # Errors
    /// Where it is damaged, or not the one that belongs here. Nothing further of the stream can be trusted then.
    pub fn frame(&mut self, head: &[u8; HEAD_BYTES], payload: &[u8]) -> Result<Part, FormatError> {
        if payload.len() != Self::payload_bytes(head)? {
            return Err(FormatError::Truncated);
        }
        let crc = u32::from_le_bytes(head[28..].try_into().expect("four bytes"));
        if crc != chained(self.crc, head, payload) {
            return Err(FormatError::Checksum);
        }
        self.crc = crc;
        let u64_at = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("eight bytes"));
        let (offset, span) = (u64_at(12), u64_at(20));
        match (head[4], self.size_bytes, self.ended) {
            (BEGIN, None, false) => self.on_begin(payload),
            (DATA, Some(size_bytes), false) if span == payload.len() as u64 => {
                self.take(offset, span, size_bytes)?;
                self.totals.data_bytes += span;
                Ok(Part::Data { offset })
            }
            (ZEROES, Some(size_bytes), false) => {
                self.take(offset, span, size_bytes)?;
                self.totals.zeroes_bytes += span;
                Ok(Part::Zeroes { offset, len: span })
            }
            (END, Some(_), false) => {
                let totals: Totals = from_postcard(payload)?;
                self.ended = true;
                if totals == self.totals { Ok(Part::End(totals)) } else { Err(FormatError::Field("totals")) }
            }
            _ => Err(FormatError::Field("kind")),
        }
    }

    fn on_begin(&mut self, payload: &[u8]) -> Result<Part, FormatError> {
        let begin: Begin = from_postcard(payload)?;
        if begin.version != STREAM_VERSION {
            return Err(FormatError::Version(begin.version));
        }
        if begin.start > begin.size_bytes {
            return Err(FormatError::Field("start"));
        }
        (self.size_bytes, self.told) = (Some(begin.size_bytes), begin.start);
        Ok(Part::Begin(begin))
    }

    /// Offsets ascend, so that a receiver can say how far it has come with one number.
    fn take(&mut self, offset: u64, span: u64, size_bytes: u64) -> Result<(), FormatError> {
        let end = offset.checked_add(span).filter(|end| *end <= size_bytes && span > 0);
        match end {
            Some(end) if offset >= self.told => {
                self.told = end;
                Ok(())
            }
            _ => Err(FormatError::Field("offset")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn begin(start: u64) -> Begin {
        let id = |layer| SnapshotId { volume: VolumeId(7), layer: ObjectId(layer) };
        Begin {
            version: STREAM_VERSION,
            volume: "vm1".to_string(),
            snapshot: "tuesday".to_string(),
            id: id(2),
            from: Some(("monday".to_string(), id(1))),
            size_bytes: 1 << 20,
            layout: Layout::DEFAULT,
            start,
        }
    }

    /// The frames of a small stream.
    fn frames() -> Vec<Vec<u8>> {
        let mut sender = Sender::default();
        let data = |sender: &mut Sender, offset, data: &[u8]| [&sender.data(offset, data)[..], data].concat();
        vec![
            sender.begin(&begin(4096)),
            data(&mut sender, 4096, b"one"),
            sender.zeroes(8192, 100_000).to_vec(),
            data(&mut sender, 200_000, b"two"),
            sender.end(),
        ]
    }

    fn receive(frames: &[Vec<u8>]) -> Result<Vec<Part>, FormatError> {
        let mut receiver = Receiver::default();
        frames
            .iter()
            .map(|frame| {
                let (head, payload) = frame.split_first_chunk().ok_or(FormatError::Truncated)?;
                receiver.frame(head, payload)
            })
            .collect()
    }

    #[test]
    fn a_stream_reads_back() {
        let totals = Totals { data_bytes: 6, zeroes_bytes: 100_000 };
        let parts = [
            Part::Begin(begin(4096)),
            Part::Data { offset: 4096 },
            Part::Zeroes { offset: 8192, len: 100_000 },
            Part::Data { offset: 200_000 },
            Part::End(totals),
        ];
        assert_eq!(receive(&frames()).unwrap(), parts);
    }

    #[test]
    fn frames_lost_doubled_or_swapped_are_found() {
        let whole = frames();
        for at in 0..whole.len() - 1 {
            let mut frames = whole.clone();
            frames.swap(at, at + 1);
            assert!(receive(&frames).is_err(), "{at} is swapped with the next");
            let mut frames = whole.clone();
            frames.insert(at, frames[at].clone());
            assert!(receive(&frames).is_err(), "{at} is doubled");
            let mut frames = whole.clone();
            frames.remove(at);
            assert!(receive(&frames).is_err(), "{at} is lost");
        }
    }

    #[test]
    fn offsets_ascend_and_stay_inside() {
        for (offset, len) in [(0, 1), (4095, 2), (1 << 20, 1), ((1 << 20) - 1, 2), (u64::MAX, 2), (4096, 0)] {
            let mut sender = Sender::default();
            let frames = [sender.begin(&begin(4096)), sender.zeroes(offset, len).to_vec()];
            assert_eq!(receive(&frames).unwrap_err(), FormatError::Field("offset"), "{len} bytes at {offset}");
        }
        let mut sender = Sender::default();
        assert!(receive(&[sender.begin(&begin((1 << 20) + 1))]).is_err(), "starts behind its end");
        let mut sender = Sender::default();
        let version = Begin { version: 2, ..begin(0) };
        assert_eq!(receive(&[sender.begin(&version)]).unwrap_err(), FormatError::Version(2));
    }

    proptest! {
        #[test]
        fn any_damage_is_found(at in 0usize..5, byte: usize, bit in 0u8..8) {
            let mut frames = frames();
            let byte = byte % frames[at].len();
            frames[at][byte] ^= 1 << bit;
            prop_assert!(receive(&frames).is_err());
        }

        #[test]
        fn noise_is_refused(noise in proptest::collection::vec(any::<u8>(), HEAD_BYTES..200)) {
            prop_assert!(receive(&[noise]).is_err());
        }
    }
}
