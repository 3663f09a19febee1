//! Whole conversations: however the connection cuts them and whenever the volume answers, they mean the same.

use holdfast_base::{
    BlockData, BlockError, BlockOp, BlockReply, BlockRequest, Buf, ByteRange, Effects, ExportInfo, ObjectId, Prng,
    StatusExtent,
};
use holdfast_frontend::nbd::{Effect, Exports, Session, SessionConfig};
use proptest::prelude::*;

const SIZE_BYTES: u64 = 1 << 20;

struct OneExport;

impl Exports for OneExport {
    fn list(&self) -> Vec<ExportInfo> {
        let description = "a disk".to_owned();
        vec![ExportInfo { name: "vm".to_owned(), description, size_bytes: SIZE_BYTES, read_only: false }]
    }

    fn find(&self, name: &str) -> Option<ExportInfo> {
        self.list().into_iter().find(|export| export.name == name)
    }

    fn snapshots(&self, _export: &str) -> Vec<(String, ObjectId)> {
        vec![("monday".to_owned(), ObjectId(5))]
    }
}

fn option(number: u32, data: &[u8]) -> Vec<u8> {
    [b"IHAVEOPT", &number.to_be_bytes()[..], &(data.len() as u32).to_be_bytes(), data].concat()
}

#[derive(Clone, Debug)]
struct Asked {
    flags: u16,
    command: u16,
    offset: u64,
    len: u32,
}

impl Asked {
    fn bytes(&self, cookie: u64) -> Vec<u8> {
        let mut bytes = 0x2560_9513u32.to_be_bytes().to_vec();
        bytes.extend(self.flags.to_be_bytes());
        bytes.extend(self.command.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(self.offset.to_be_bytes());
        bytes.extend(self.len.to_be_bytes());
        if self.command == 1 {
            bytes.extend((0..self.len).map(|at| (u64::from(at) + cookie) as u8));
        }
        bytes
    }
}

/// Requests of all kinds, most of them valid, a few with a flag or a range that isn't.
fn asked() -> impl Strategy<Value = Asked> {
    let len = prop_oneof![3 => 1u32..9000, 1 => 60_000u32..100_000, 1 => Just(0), 1 => Just(4096)];
    let offset = prop_oneof![8 => 0..SIZE_BYTES - 100_000, 1 => SIZE_BYTES - 100..SIZE_BYTES + 100];
    let flags = prop_oneof![8 => Just(0u16), 1 => Just(1), 1 => Just(4), 1 => Just(8), 1 => Just(1 << 9)];
    let command = prop_oneof![3 => Just(0u16), 3 => Just(1), 1 => 3u16..9];
    (flags, command, offset, len).prop_map(|(flags, command, offset, len)| Asked { flags, command, offset, len })
}

/// Flags, options (also unknown, malformed and oversized ones) and `GO`.
fn opening(structured: bool) -> Vec<u8> {
    let mut bytes = 3u32.to_be_bytes().to_vec();
    bytes.extend(option(99, b"unknown"));
    bytes.extend(option(3, b""));
    bytes.extend(option(6, b"malformed"));
    bytes.extend(option(6, &vec![0; 100_000]));
    if structured {
        bytes.extend(option(8, b""));
        let queries = b"\0\0\0\x0fbase:allocation\0\0\0\x17holdfast:changed:monday";
        bytes.extend(option(10, &[&b"\0\0\0\x02vm\0\0\0\x02"[..], queries].concat()));
    }
    bytes.extend(option(7, b"\0\0\0\x02vm\0\x03\0\x01\0\x02\0\x03"));
    bytes
}

/// A shell that can do each of its parts at any time.
struct Shell {
    session: Session,
    out: Effects<Effect>,
    sent: Vec<u8>,
    unsent_bytes: usize,
    requests: Vec<BlockRequest>,
    /// Everything the session did, in order, runs of bytes as one.
    log: Vec<String>,
    logged_sent: usize,
    closed: bool,
}

impl Shell {
    fn new(config: SessionConfig) -> Shell {
        let mut out = Effects::new();
        let session = Session::new(config, &mut out);
        let (sent, requests, log) = (Vec::new(), Vec::new(), Vec::new());
        let mut shell = Shell { session, out, sent, unsent_bytes: 0, requests, log, logged_sent: 0, closed: false };
        shell.carry_out();
        shell
    }

    fn note(&mut self, what: String) {
        if self.sent.len() > self.logged_sent {
            let bytes = &self.sent[self.logged_sent..];
            self.log.push(format!("send {} bytes, {:08x}", bytes.len(), holdfast_base::crc32c(bytes)));
            self.logged_sent = self.sent.len();
        }
        self.log.push(what);
    }

    fn carry_out(&mut self) {
        while !self.out.is_empty() {
            for effect in self.out.take() {
                assert!(!self.closed, "{effect:?} after the end");
                match effect {
                    Effect::Send(head) => self.send(&head),
                    Effect::SendBuf(buf) => self.send(&buf),
                    Effect::Open { export } => {
                        self.note(format!("open {export}"));
                        let result = Ok(OneExport.find(&export).unwrap());
                        self.session.on_opened(result, &OneExport, &mut self.out);
                    }
                    Effect::Move { export } => unreachable!("{export} is nowhere else"),
                    Effect::Request(request) => {
                        let crc = match &request.op {
                            BlockOp::Write { data, .. } => holdfast_base::crc32c(data),
                            _ => 0,
                        };
                        self.note(format!("{request:?} {crc:08x}"));
                        self.requests.push(request);
                    }
                    Effect::StartTls => panic!("not asked for"),
                    Effect::Close => {
                        self.note("close".to_owned());
                        self.closed = true;
                    }
                }
            }
        }
    }

    fn send(&mut self, bytes: &[u8]) {
        self.sent.extend_from_slice(bytes);
        self.unsent_bytes += bytes.len();
    }

    fn flush(&mut self, count: usize) {
        self.unsent_bytes -= count;
        self.session.on_sent(count, &OneExport, &mut self.out);
        self.carry_out();
    }

    /// Passes on up to `count` of the client's bytes, to the sink where there is one; returns how many.
    fn receive(&mut self, bytes: &[u8], count: usize) -> usize {
        let count = match self.session.take_sink() {
            Some((mut sink, filled)) => {
                let count = count.min(sink.len() - filled).min(bytes.len());
                sink[filled..filled + count].copy_from_slice(&bytes[..count]);
                self.session.give_sink(sink, filled + count, &mut self.out);
                count
            }
            None => {
                let count = count.min(bytes.len());
                self.session.on_bytes(&bytes[..count], &OneExport, &mut self.out);
                count
            }
        };
        self.carry_out();
        count
    }

    fn answer(&mut self, at: usize) {
        let BlockRequest { token, op } = self.requests.swap_remove(at);
        let result = match op {
            BlockOp::Read(range) => Ok(BlockData::Data(contents(range))),
            BlockOp::Status(range) | BlockOp::Changes { range, .. } => {
                Ok(BlockData::Status(vec![StatusExtent { len: range.len, set: range.offset % 2 == 0 }]))
            }
            BlockOp::Discard(range) if range.len == 4096 => Err(BlockError::Unavailable),
            _ => Ok(BlockData::Done),
        };
        self.session.on_reply(BlockReply { token, result }, &mut self.out);
        self.carry_out();
    }
}

/// The volume's bytes: each says where it is. In two buffers, as a volume may.
fn contents(range: ByteRange) -> Vec<Buf> {
    let bytes: Vec<u8> = (range.offset..range.offset + range.len).map(|at| (at % 251) as u8).collect();
    let (first, second) = bytes.split_at(bytes.len() / 2);
    vec![Buf::copy_from(first), Buf::copy_from(second)]
}

/// Splits what the session sent in the transmission phase into replies; returns the cookies of complete ones. Checks what reads say.
fn replies(mut bytes: &[u8], asked: &[Asked]) -> Vec<u64> {
    let mut cookies = Vec::new();
    while !bytes.is_empty() {
        let word = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap());
        let cookie = u64::from_be_bytes(bytes[8..16].try_into().unwrap());
        let asked = &asked[cookie as usize];
        let is_read = asked.command == 0;
        let len = if word(0) == 0x6744_6698 {
            let data_len = if is_read && word(4) == 0 { asked.len as usize } else { 0 };
            check(&bytes[16..16 + data_len], asked.offset);
            16 + data_len
        } else {
            assert_eq!(word(0), 0x668e_33ef);
            let len = 20 + word(16) as usize;
            match word(4) & 0xffff {
                1 => {
                    assert!(is_read && len == 28 + asked.len as usize);
                    check(&bytes[28..len], asked.offset);
                }
                2 => assert!(is_read && asked.len == 1 && asked.offset.is_multiple_of(251), "the only short zero run"),
                0 => assert!(is_read && asked.len == 0),
                5 => assert_eq!(asked.command, 7),
                kind => assert_eq!(kind, 0x8001),
            }
            len
        };
        let is_last = word(0) == 0x6744_6698 || word(4) >> 16 == 1;
        assert!(is_last || asked.command == 7, "only a status has several chunks");
        if is_last {
            cookies.push(cookie);
        }
        bytes = &bytes[len..];
    }
    cookies
}

fn check(data: &[u8], offset: u64) {
    assert!(data.iter().zip(offset..).all(|(byte, at)| u64::from(*byte) == at % 251), "bytes of another place");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    /// Invariant 2 of the session: fragments don't matter.
    #[test]
    fn any_cut_gives_the_same_effects(
        structured: bool,
        asked in proptest::collection::vec(asked(), 0..20),
        goodbye: bool,
        cuts in proptest::collection::vec(prop_oneof![1usize..40, 1usize..50_000], 1..30),
    ) {
        let mut bytes = opening(structured);
        bytes.extend(asked.iter().enumerate().flat_map(|(cookie, asked)| asked.bytes(cookie as u64)));
        if goodbye {
            bytes.extend(Asked { flags: 0, command: 2, offset: 0, len: 0 }.bytes(0));
        }
        let run = |cuts: &[usize]| {
            let mut shell = Shell::new(SessionConfig::default());
            let mut rest = &bytes[..];
            for cut in cuts.iter().cycle() {
                rest = &rest[shell.receive(rest, *cut)..];
                if rest.is_empty() {
                    break;
                }
            }
            while !shell.requests.is_empty() {
                shell.answer(0);
            }
            assert_eq!(shell.closed, goodbye);
            shell.note("end".to_owned());
            shell.log
        };
        prop_assert_eq!(run(&cuts), run(&[bytes.len()]));
    }

    /// Invariant 1 of the session: one answer each, under any limits and in any order of events.
    #[test]
    fn every_request_gets_one_answer(
        structured: bool,
        asked in proptest::collection::vec(asked(), 1..40),
        in_flight_max in 1usize..6,
        held_bytes_max in 1u64..300_000,
        seed: u64,
    ) {
        let mut prng = Prng::new(seed);
        let mut shell = Shell::new(SessionConfig { in_flight_max, held_bytes_max, ..SessionConfig::default() });
        let mut bytes = opening(structured);
        bytes.extend(asked.iter().enumerate().flat_map(|(cookie, asked)| asked.bytes(cookie as u64)));
        bytes.extend(Asked { flags: 0, command: 2, offset: 0, len: 0 }.bytes(0));
        let mut rest = &bytes[..];
        while !shell.closed {
            let can_receive = !rest.is_empty() && shell.session.wants_input();
            prop_assert!(can_receive || shell.unsent_bytes > 0 || !shell.requests.is_empty(), "the session is stuck");
            match prng.below(3) {
                0 if can_receive => rest = &rest[shell.receive(rest, prng.between(1, 100_000) as usize)..],
                1 if shell.unsent_bytes > 0 => shell.flush(prng.between(1, shell.unsent_bytes as u64) as usize),
                2 if !shell.requests.is_empty() => shell.answer(prng.below(shell.requests.len() as u64) as usize),
                _ => {}
            }
            prop_assert!(shell.session.in_flight() <= in_flight_max);
        }
        prop_assert!(rest.is_empty(), "closed by the goodbye");
        // The transmission phase begins behind the answer to GO: option 7, ACK, no data.
        let ack = [&0x0003_e889_0455_65a9u64.to_be_bytes()[..], b"\0\0\0\x07\0\0\0\x01\0\0\0\0"].concat();
        let at = shell.sent.windows(ack.len()).position(|window| window == ack).expect("the export opened");
        let mut cookies = replies(&shell.sent[at + ack.len()..], &asked);
        cookies.sort_unstable();
        prop_assert!(cookies.into_iter().eq(0..asked.len() as u64), "one answer each");
    }
}
