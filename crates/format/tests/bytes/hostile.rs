//! What peers may send that is no frame of ours: truncated, forged, too large, or anything at all. A reader says so, or waits; it
//! never passes on what was not said, and keeps no more than its limits.

use holdfast_base::stream::Inbound;
use holdfast_base::{DeviceId, Epoch, InstanceId, LedgerId, Lsn, VolumeId, crc32c};
use holdfast_format::FormatError;
use holdfast_format::forward::{Answer, Ask, Client, Op, Range};
use holdfast_format::wire::{
    FRAME_HEADER_BYTES, Frame, FrameReader, META_BYTES_MAX, Message, PAYLOAD_BYTES_MAX, Reply, Request, encode_frame,
};
use proptest::prelude::*;
use std::fmt::Debug;

fn requests() -> Vec<Request> {
    let (device, volume, epoch) = (DeviceId(1), VolumeId(2), Epoch(3));
    let ledger = LedgerId { epoch, n: 0 };
    vec![
        Request::Ping,
        Request::TrimLedger { device, volume, epoch, ledger, upto: Lsn(9) },
        Request::Fence { device, volume, epoch, instance: InstanceId(4) },
        Request::ReadLog { device, volume, ledger, from: Lsn(1), bytes_max: u32::MAX },
    ]
}

fn asks() -> Vec<Ask> {
    let op = Op::Read(Range { offset: 4096, len: 8192 });
    vec![
        Ask::Ping,
        Ask::Attach { session: 1, export: "vm1".to_string(), fresh: true },
        Ask::Op { session: 1, tick: 5, op },
        Ask::Yield { volume: VolumeId(7) },
        Ask::Tell { from: VolumeId(7), to: VolumeId(8) },
        Ask::AttachAs {
            session: 1,
            export: "vm1".to_string(),
            fresh: true,
            client: Client { label: "vm".to_string(), process: Some(7), ..Client::default() },
            wrote_ms: Some(5),
            fenced: true,
        },
    ]
}

fn answers() -> Vec<Answer> {
    vec![Answer::Done, Answer::Data { crc: 7 }, Answer::Hello { version: 2, host: "a".to_string(), tick: 3 }]
}

fn read<M: Message>(bytes: &[u8], piece: usize) -> (Vec<Frame<M>>, Option<FormatError>) {
    let mut reader = FrameReader::<M>::new();
    for part in bytes.chunks(piece.max(1)) {
        reader.on_bytes(part);
    }
    let frames = std::iter::from_fn(|| reader.pop()).collect();
    (frames, reader.error())
}

/// A header that fits its checksum, whatever it says.
fn sealed(kind: u8, (meta_len, payload_len): (u32, u32), meta: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; FRAME_HEADER_BYTES];
    bytes[..4].copy_from_slice(b"HFW1");
    bytes[4] = kind;
    bytes[8..12].copy_from_slice(&meta_len.to_le_bytes());
    bytes[12..16].copy_from_slice(&payload_len.to_le_bytes());
    let crc = crc32c(meta) ^ crc32c(&bytes[..24]).rotate_left(1);
    bytes[24..28].copy_from_slice(&crc.to_le_bytes());
    bytes.extend_from_slice(meta);
    bytes
}

/// Of a message: each place where it may be cut, and each bit that may be flipped.
fn cut_or_forged<M: Message + Debug>(message: &M) {
    let bytes = encode_frame(7, message, 0);
    for len in 0..bytes.len() {
        let (frames, error) = read::<M>(&bytes[..len], 5);
        assert!(frames.is_empty() && error.is_none(), "{message:?}, cut at {len}: it waits for the rest");
    }
    for bit in 0..bytes.len() * 8 {
        let mut forged = bytes.clone();
        forged[bit / 8] ^= 1 << (bit % 8);
        let (frames, _) = read::<M>(&forged, usize::MAX);
        assert!(frames.is_empty(), "{message:?}, bit {bit}: {frames:?}");
    }
}

#[test]
fn what_is_cut_waits_and_what_is_forged_is_not_passed_on() {
    requests().iter().for_each(cut_or_forged);
    asks().iter().for_each(cut_or_forged);
    answers().iter().for_each(cut_or_forged);
}

#[test]
fn messages_of_one_direction_or_protocol_are_none_of_another() {
    let (request, ask) = (encode_frame(1, &Request::Ping, 0), encode_frame(1, &Ask::Ping, 0));
    assert_eq!(read::<Reply>(&request, 9).1, Some(FormatError::Magic));
    assert_eq!(read::<Ask>(&request, 9).1, Some(FormatError::Magic));
    assert_eq!(read::<Request>(&ask, 9).1, Some(FormatError::Magic));
    assert_eq!(read::<Answer>(&ask, 9).1, Some(FormatError::Magic));
    assert_eq!(read::<Ask>(&ask, 9).0.len(), 1);
}

#[test]
fn what_is_too_large_breaks_the_stream_at_its_header() {
    for (meta_len, payload_len) in [(META_BYTES_MAX + 1, 0), (u32::MAX, 0), (4, PAYLOAD_BYTES_MAX + 1), (4, u32::MAX)] {
        // Nothing of it has come yet.
        let header = &sealed(1, (meta_len, payload_len), &[])[..FRAME_HEADER_BYTES];
        let (frames, error) = read::<Request>(header, usize::MAX);
        assert!(frames.is_empty() && matches!(error, Some(FormatError::Field(_))), "{meta_len}, {payload_len}");
    }
    // What follows is not looked at.
    let mut reader = FrameReader::<Request>::new();
    reader.on_bytes(&sealed(1, (u32::MAX, 0), &[]));
    reader.on_bytes(&encode_frame(1, &Request::Ping, 0));
    assert!(reader.pop().is_none() && reader.error().is_some());
}

proptest! {
    #[test]
    fn any_bytes_are_frames_or_break_the_stream(bytes: Vec<u8>, piece in 1usize..64) {
        // By chance nobody finds a checksum.
        prop_assert!(read::<Request>(&bytes, piece).0.is_empty());
        prop_assert!(read::<Answer>(&bytes, piece).0.is_empty());
    }

    /// Whoever is let in can make checksums: what he then says is a message, or breaks the stream.
    #[test]
    fn any_message_with_a_sound_checksum_is_read_or_breaks_the_stream(
        kind in 1u8..5,
        meta in proptest::collection::vec(any::<u8>(), 0..200),
        payload_len in 0u32..64,
        piece in 1usize..64,
    ) {
        let mut bytes = sealed(kind, (meta.len() as u32, payload_len), &meta);
        bytes.resize(bytes.len() + payload_len as usize, 0);
        fn holds<M: Message>(bytes: &[u8], piece: usize, payload_len: u32) -> bool {
            let (frames, error) = read::<M>(bytes, piece);
            frames.len() == usize::from(error.is_none()) && frames.iter().all(|f| f.payload.len() == payload_len as usize)
        }
        let is_sound = match kind {
            1 => holds::<Request>(&bytes, piece, payload_len),
            2 => holds::<Reply>(&bytes, piece, payload_len),
            3 => holds::<Ask>(&bytes, piece, payload_len),
            _ => holds::<Answer>(&bytes, piece, payload_len),
        };
        prop_assert!(is_sound);
    }

    /// A list that says it is longer than its message takes no memory for what is not there.
    #[test]
    fn lists_that_lie_about_their_length_break_the_stream(len in 1_000_000u64..u64::MAX) {
        let mut meta = vec![4]; // the number of a message that has a list, or another: neither may come of it
        let mut rest = len;
        while rest >= 0x80 {
            meta.push(rest as u8 | 0x80);
            rest >>= 7;
        }
        meta.push(rest as u8);
        for kind in 0u8..40 {
            meta[0] = kind;
            let (frames, _) = read::<Reply>(&sealed(2, (meta.len() as u32, 0), &meta), usize::MAX);
            prop_assert!(frames.iter().all(|f| f.payload.is_empty()));
        }
    }
}
