//! Clients that mean harm, or are broken: the session neither panics nor lets them make the process hold more than its
//! limits say. This file has one test, since it counts what the process allocates.

use holdfast_base::{
    BlockData, BlockError, BlockOp, BlockReply, BlockRequest, Buf, BufMut, Effects, ExportInfo, ObjectId, Prng,
    StatusExtent,
};
use holdfast_frontend::nbd::{
    DRAIN_BYTES_MAX, Effect, Exports, OPTION_DATA_BYTES_MAX, PAYLOAD_BYTES_MAX, Refusal, RefusalKind, Session,
    SessionConfig, TlsPolicy,
};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

struct Counting;

static HELD_BYTES: AtomicUsize = AtomicUsize::new(0);
static PEAK_BYTES: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed to the system's allocator as it is; counting touches no memory of the caller's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD_BYTES.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK_BYTES.fetch_max(held, Relaxed);
        // SAFETY: the caller's promises are the system allocator's conditions.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let held = HELD_BYTES.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK_BYTES.fetch_max(held, Relaxed);
        // SAFETY: as in `alloc`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        HELD_BYTES.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as in `alloc`.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Small, so that crossing it shows.
const HELD_BYTES_MAX: u64 = 1 << 20;

const RECEIVE_BYTES_MAX: usize = 64 << 10;

/// What a session may make the process hold: its bound, the one payload that may cross it, a read not yet looked at,
/// an option and its answer.
const SESSION_BYTES_MAX: usize =
    HELD_BYTES_MAX as usize + PAYLOAD_BYTES_MAX as usize + RECEIVE_BYTES_MAX + 2 * OPTION_DATA_BYTES_MAX as usize;

/// Buffers waiting for reuse, and the powers of two that small ones round up to.
const SLACK_BYTES: usize = (24 << 20) + 2 * HELD_BYTES_MAX as usize;

const EXPORT_BYTES: u64 = 1 << 40;

struct Two;

impl Exports for Two {
    fn list(&self) -> Vec<ExportInfo> {
        ["vm", "ro"].iter().map(|name| self.find(name).unwrap()).collect()
    }

    fn find(&self, name: &str) -> Option<ExportInfo> {
        let (description, read_only) = ("a disk".to_owned(), name == "ro");
        ["vm", "ro"].contains(&name).then(|| ExportInfo {
            name: name.to_owned(),
            description,
            size_bytes: EXPORT_BYTES,
            read_only,
        })
    }

    fn snapshots(&self, _export: &str) -> Vec<(String, ObjectId)> {
        vec![("monday".to_owned(), ObjectId(5))]
    }
}

fn random_bytes(prng: &mut Prng, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    prng.fill(&mut bytes);
    bytes
}

/// An option as a careless fuzzer would write it: mostly well formed.
fn option(prng: &mut Prng) -> Vec<u8> {
    let names: [&[u8]; 5] = [b"vm", b"ro", b"", b"other", b"\xff\xfe"];
    let name = *prng.pick(&names);
    let name_len = if prng.chance(50) { prng.next_u64() as u32 } else { name.len() as u32 };
    let number = prng.below(13) as u32;
    let tail = match number {
        6 | 7 => b"\0\x02\0\x01\0\x03".to_vec(),
        9 | 10 => [&(prng.below(3) as u32).to_be_bytes()[..], b"\0\0\0\x0fbase:allocation"].concat(),
        _ => Vec::new(),
    };
    let data = match prng.below(8) {
        0 => Vec::new(),
        1 => {
            let len = prng.below(3 * u64::from(OPTION_DATA_BYTES_MAX));
            random_bytes(prng, len)
        }
        2 => random_bytes(prng, 30),
        _ if matches!(number, 3 | 5 | 8) => Vec::new(),
        _ if number == 1 => name.to_vec(),
        _ => [&name_len.to_be_bytes()[..], name, &tail].concat(),
    };
    let len = if prng.chance(20) { prng.next_u64() as u32 } else { data.len() as u32 };
    [b"IHAVEOPT", &number.to_be_bytes()[..], &len.to_be_bytes(), &data].concat()
}

fn request(prng: &mut Prng) -> Vec<u8> {
    let flags = if prng.chance(800) { 0 } else { 1 << prng.below(16) };
    let command = if prng.chance(20) { prng.next_u64() as u16 } else { *prng.pick(&[0, 1, 3, 4, 5, 6, 7, 8]) };
    let len = match prng.below(6) {
        0 => prng.next_u64() as u32,
        1 => prng.below(u64::from(DRAIN_BYTES_MAX) + 2) as u32,
        2 => PAYLOAD_BYTES_MAX,
        _ => prng.below(70_000) as u32,
    };
    let offset = if prng.chance(100) { prng.next_u64() } else { prng.below(EXPORT_BYTES) };
    let mut bytes = 0x2560_9513u32.to_be_bytes().to_vec();
    bytes.extend((flags as u16).to_be_bytes());
    bytes.extend(command.to_be_bytes());
    bytes.extend(prng.next_u64().to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    if command == 1 && prng.chance(900) {
        bytes.resize(bytes.len() + len.min(2 << 20) as usize, 7);
    }
    bytes
}

/// What a client sends: noise from some point on, as often as not from the start of a phase.
fn stream(prng: &mut Prng) -> Vec<u8> {
    let mut bytes = if prng.chance(900) { vec![0, 0, 0, 3] } else { random_bytes(prng, 4) };
    for _ in 0..prng.below(12) {
        bytes.extend(option(prng));
    }
    if prng.chance(900) {
        bytes.extend(b"IHAVEOPT\0\0\0\x08\0\0\0\0");
        bytes.extend(b"IHAVEOPT\0\0\0\x07\0\0\0\x08\0\0\0\x02vm\0\0");
        for _ in 0..prng.below(60) {
            bytes.extend(request(prng));
        }
    }
    if prng.chance(500) {
        bytes.extend(random_bytes(prng, 3000));
    }
    bytes
}

fn answer(prng: &mut Prng, op: &BlockOp) -> Result<BlockData, BlockError> {
    if prng.chance(100) {
        return Err(*prng.pick(&[BlockError::NoSpace, BlockError::Unavailable, BlockError::Deposed]));
    }
    Ok(match op {
        BlockOp::Read(range) => BlockData::Data(vec![BufMut::new(range.len as usize).freeze()]),
        BlockOp::Status(range) | BlockOp::Changes { range, .. } => {
            let half = StatusExtent { len: range.len.div_ceil(2), set: true };
            BlockData::Status(vec![half, StatusExtent { set: false, ..half }])
        }
        _ => BlockData::Done,
    })
}

fn run(prng: &mut Prng, bytes: &[u8]) {
    let tls = *prng.pick(&[TlsPolicy::None, TlsPolicy::Offered, TlsPolicy::Required]);
    let config = SessionConfig { tls, in_flight_max: 8, held_bytes_max: HELD_BYTES_MAX, default_export: None };
    let mut out = Effects::new();
    let mut session = Session::new(config, &mut out);
    let mut requests: Vec<BlockRequest> = Vec::new();
    // The client reads nothing, a little, or everything.
    let reads_per_mille = *prng.pick(&[0, 100, 1000]);
    let mut unread: Vec<Buf> = Vec::new();
    let mut rest = bytes;
    let mut closed = false;
    for _ in 0..400 {
        while !out.is_empty() {
            for effect in out.take() {
                assert!(!closed, "{effect:?} after the end");
                match effect {
                    Effect::Send(head) => unread.push(Buf::copy_from(&head)),
                    Effect::SendBuf(buf) => unread.push(buf),
                    Effect::StartTls => session.on_tls_started(),
                    Effect::Open { export } => {
                        let refusal = Refusal { kind: RefusalKind::Forbidden, message: "not now".to_owned() };
                        let result = if prng.chance(900) { Ok(Two.find(&export).unwrap()) } else { Err(refusal) };
                        session.on_opened(result, &Two, &mut out);
                    }
                    Effect::Move { export } => unreachable!("{export} is nowhere else"),
                    Effect::Request(request) => requests.push(request),
                    Effect::Close => closed = true,
                }
            }
        }
        assert!(session.in_flight() <= 8);
        assert!(session.held_bytes() <= SESSION_BYTES_MAX as u64, "{} bytes held", session.held_bytes());
        if prng.chance(reads_per_mille) {
            let count = unread.drain(..).map(|buf| buf.len()).sum();
            session.on_sent(count, &Two, &mut out);
        }
        if !requests.is_empty() && prng.chance(300) {
            let BlockRequest { token, op } = requests.swap_remove(prng.below(requests.len() as u64) as usize);
            session.on_reply(BlockReply { token, result: answer(prng, &op) }, &mut out);
        } else if session.wants_input() {
            let count = (prng.between(1, RECEIVE_BYTES_MAX as u64) as usize).min(rest.len());
            let count = match session.take_sink() {
                Some((mut sink, filled)) => {
                    let count = count.min(sink.len() - filled);
                    sink[filled..filled + count].copy_from_slice(&rest[..count]);
                    session.give_sink(sink, filled + count, &mut out);
                    count
                }
                None => {
                    session.on_bytes(&rest[..count], &Two, &mut out);
                    count
                }
            };
            rest = &rest[count..];
        } else if prng.chance(5) {
            session.on_shutdown(&mut out);
        }
    }
}

#[test]
fn hostile_clients_get_no_more_than_their_limits() {
    for seed in 0..1500 {
        let mut prng = Prng::new(seed);
        let bytes = stream(&mut prng);
        let before = HELD_BYTES.load(Relaxed);
        PEAK_BYTES.store(before, Relaxed);
        run(&mut prng, &bytes);
        let peak = PEAK_BYTES.load(Relaxed) - before;
        assert!(peak <= SESSION_BYTES_MAX + SLACK_BYTES, "seed {seed}: {peak} bytes at the peak");
    }
}
