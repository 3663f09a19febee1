//! Every command, flag, limit and error of the transmission phase.

use super::*;
use crate::nbd::SessionConfig;
use crate::nbd::harness::{COOKIE, Client, SIZE_BYTES, contexts, info_data, request_bytes};
use holdfast_base::ObjectId;

const READ: u16 = 0;
const WRITE: u16 = 1;
const DISCONNECT: u16 = 2;
const FLUSH: u16 = 3;
const TRIM: u16 = 4;
const CACHE: u16 = 5;
const WRITE_ZEROES: u16 = 6;
const BLOCK_STATUS: u16 = 7;

const ERRORS: [BlockError; 8] = [
    BlockError::OutOfRange,
    BlockError::NoSpace,
    BlockError::Unavailable,
    BlockError::Deposed,
    BlockError::ShuttingDown,
    BlockError::Invalid,
    BlockError::NotWriter,
    BlockError::Injected,
];

fn simple() -> Client {
    Client::serving(SessionConfig::default(), "vm", false)
}

fn structured() -> Client {
    Client::serving(SessionConfig::default(), "vm", true)
}

fn simple_reply(error: u32) -> Vec<u8> {
    [&0x6744_6698u32.to_be_bytes(), &error.to_be_bytes(), &COOKIE[..]].concat()
}

fn chunk(kind: u16, payload: &[&[u8]]) -> Vec<u8> {
    let payload = payload.concat();
    let mut bytes = 0x668e_33efu32.to_be_bytes().to_vec();
    bytes.extend(1u16.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(COOKIE);
    bytes.extend((payload.len() as u32).to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// The error number of a reply of either kind that is nothing but an error.
fn error_of(sent: &[u8]) -> u32 {
    let word = |at: usize| u32::from_be_bytes(sent[at..at + 4].try_into().unwrap());
    if word(0) == 0x6744_6698 {
        assert_eq!(sent.len(), 16);
        return word(4);
    }
    assert_eq!(sent[4..8], [0, 1, 0x80, 1], "the last chunk, of the error type");
    assert_eq!(sent.len(), 20 + word(16) as usize);
    assert_eq!(sent[24..26], ((sent.len() - 26) as u16).to_be_bytes());
    assert!(std::str::from_utf8(&sent[26..]).is_ok_and(|text| !text.is_empty()));
    word(20)
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + 1) as u8).collect()
}

fn data(parts: &[&[u8]]) -> Result<BlockData, BlockError> {
    Ok(BlockData::Data(parts.iter().map(|part| Buf::copy_from(part)).collect()))
}

const DONE: Result<BlockData, BlockError> = Ok(BlockData::Done);

#[test]
fn a_read_is_a_head_and_the_volumes_own_buffers() {
    let mut client = simple();
    assert!(client.request(0, READ, 100, 5, b"").is_empty());
    assert!(matches!(client.operation(), BlockOp::Read(range) if *range == ByteRange::new(100, 5)));
    assert_eq!(client.answer(data(&[b"ab", b"cde"])), [&simple_reply(0)[..], b"abcde"].concat());
    client.request(0, READ, 100, 2, b"");
    assert_eq!(client.answer(data(&[b"\0\0"])), [&simple_reply(0)[..], b"\0\0"].concat(), "no holes here");
}

#[test]
fn a_structured_read_is_one_chunk() {
    for flags in [0, command_flag::DF, command_flag::FUA] {
        let mut client = structured();
        client.request(flags, READ, 100, 5, b"");
        assert_eq!(client.answer(data(&[b"\0\0", b"cde"])), chunk(1, &[&100u64.to_be_bytes(), b"\0\0cde"]));
        client.request(flags, READ, 100, 200, b"");
        let hole = chunk(2, &[&100u64.to_be_bytes(), &200u32.to_be_bytes()]);
        assert_eq!(client.answer(data(&[&[0; 150], &[0; 50]])), hole);
    }
}

#[test]
fn a_write_reaches_the_volume_in_one_aligned_buffer() {
    for len in [1, 4096, 100_000] {
        let mut client = simple();
        let payload = bytes(len);
        assert!(client.request(command_flag::FUA, WRITE, 7, len as u32, &payload).is_empty());
        let BlockOp::Write { offset: 7, data } = client.operation() else { panic!("{:?}", client.requests) };
        assert_eq!(data[..], payload);
        assert_eq!(data.as_ptr() as usize % 4096, 0);
        assert_eq!(client.answer(DONE), simple_reply(0));
    }
}

#[test]
fn a_large_payload_goes_through_the_sink() {
    let mut client = structured();
    let payload = bytes(100_000);
    client.request(0, WRITE, 0, 100_000, &payload[..1000]);
    let (mut sink, filled) = client.session.take_sink().expect("a large rest");
    assert_eq!((sink.len(), filled), (100_000, 1000));
    sink[1000..61_000].copy_from_slice(&payload[1000..61_000]);
    client.session.give_sink(sink, 61_000, &mut client.out);
    let (mut sink, filled) = client.session.take_sink().expect("a large rest");
    sink[filled..71_000].copy_from_slice(&payload[61_000..71_000]);
    client.session.give_sink(sink, 71_000, &mut client.out);
    assert!(client.session.take_sink().is_none(), "{} bytes are few", SINK_BYTES_MIN - 1);
    assert!(client.session.wants_input() && client.out.is_empty());
    client.say(&payload[71_000..]);
    assert!(matches!(client.operation(), BlockOp::Write { offset: 0, data } if data[..] == payload));
    assert!(client.session.take_sink().is_none());
}

#[test]
fn commands_without_payload_pass_on_what_they_say() {
    let mut client = simple();
    let whole = ByteRange::new(0, SIZE_BYTES);
    let zero_flags = command_flag::FUA | command_flag::NO_HOLE | command_flag::FAST_ZERO;
    for (flags, command) in [(0, TRIM), (command_flag::FUA, CACHE), (zero_flags, WRITE_ZEROES)] {
        assert!(client.request(flags, command, 0, SIZE_BYTES as u32, b"").is_empty());
        match (command, client.operation()) {
            (TRIM, BlockOp::Discard(range)) => assert_eq!(*range, whole),
            (CACHE, BlockOp::Prefetch(range)) => assert_eq!(*range, whole),
            (WRITE_ZEROES, BlockOp::WriteZeroes(range)) => assert_eq!(*range, whole),
            (_, other) => panic!("{other:?}"),
        }
        assert_eq!(client.answer(DONE), simple_reply(0));
    }
    client.request(command_flag::FUA, FLUSH, 0, 0, b"");
    assert!(matches!(client.operation(), BlockOp::Flush));
    assert_eq!(client.answer(DONE), simple_reply(0));
}

#[test]
fn successes_without_payload_are_simple_in_either_mode() {
    let mut client = structured();
    client.request(0, WRITE, 0, 3, b"abc");
    assert_eq!(client.answer(DONE), simple_reply(0));
}

#[test]
fn requests_of_no_bytes_succeed_without_the_volume() {
    for (mut client, read) in [(simple(), simple_reply(0)), (structured(), chunk(0, &[]))] {
        for offset in [0, 17, SIZE_BYTES] {
            assert_eq!(client.request(0, READ, offset, 0, b""), read);
            for command in [WRITE, TRIM, CACHE, WRITE_ZEROES] {
                assert_eq!(client.request(0, command, offset, 0, b""), simple_reply(0));
            }
        }
        assert_eq!(error_of(&client.request(0, READ, SIZE_BYTES + 1, 0, b"")), 22);
        assert_eq!(error_of(&client.request(0, WRITE, SIZE_BYTES + 1, 0, b"")), 28);
        assert_eq!(error_of(&client.request(0, BLOCK_STATUS, 0, 0, b"")), 22);
        assert!(client.requests.is_empty());
    }
}

#[test]
fn what_reaches_beyond_the_end_is_refused() {
    for mut client in [simple(), structured()] {
        for offset in [SIZE_BYTES - 4, SIZE_BYTES, u64::MAX - 4, u64::MAX] {
            for (command, error) in [(READ, 22), (TRIM, 22), (CACHE, 22), (BLOCK_STATUS, 22), (WRITE_ZEROES, 28)] {
                assert_eq!(error_of(&client.request(0, command, offset, 5, b"")), error);
            }
            assert_eq!(error_of(&client.request(0, WRITE, offset, 5, b"abcde")), 28);
        }
        assert!(client.requests.is_empty());
        client.request(0, READ, SIZE_BYTES - 5, 5, b"");
        assert_eq!(client.requests.len(), 1);
    }
}

#[test]
fn flags_that_do_not_belong_to_a_command_are_refused() {
    use command_flag::{DF, FAST_ZERO, FUA, NO_HOLE, REQ_ONE};
    let allowed = |command, is_structured| match command {
        READ if is_structured => FUA | DF,
        WRITE_ZEROES => FUA | NO_HOLE | FAST_ZERO,
        BLOCK_STATUS => FUA | REQ_ONE,
        _ => FUA,
    };
    for is_structured in [false, true] {
        let mut client = if is_structured { structured() } else { simple() };
        for command in [READ, WRITE, FLUSH, TRIM, CACHE, WRITE_ZEROES, BLOCK_STATUS] {
            for flag in (0..16).map(|bit| 1 << bit) {
                let len = if command == FLUSH { 0 } else { 4 };
                let payload = if command == WRITE { &b"abcd"[..] } else { b"" };
                let sent = client.request(flag, command, 0, len, payload);
                if flag & allowed(command, is_structured) == 0 || command == BLOCK_STATUS && !is_structured {
                    assert_eq!(error_of(&sent), 22, "command {command}, flag {flag}");
                    assert!(client.requests.is_empty());
                } else {
                    assert!(sent.is_empty());
                    client.operation();
                    client.answer(Err(BlockError::Invalid));
                }
            }
        }
    }
}

#[test]
fn unknown_commands_and_ranged_flushes_are_refused() {
    for mut client in [simple(), structured()] {
        for command in [8, 9, 0x100, u16::MAX] {
            assert_eq!(error_of(&client.request(0, command, 0, 0, b"")), 22);
        }
        assert_eq!(error_of(&client.request(0, FLUSH, 1, 0, b"")), 22);
        assert_eq!(error_of(&client.request(0, FLUSH, 0, 1, b"")), 22);
        assert!(client.requests.is_empty() && !client.closed);
    }
}

#[test]
fn a_read_only_export_is_not_changed() {
    let mut client = Client::serving(SessionConfig::default(), "ro", true);
    assert_eq!(error_of(&client.request(0, WRITE, 0, 3, b"abc")), 1);
    assert_eq!(error_of(&client.request(0, TRIM, 0, 3, b"")), 1);
    assert_eq!(error_of(&client.request(0, WRITE_ZEROES, 0, 3, b"")), 1);
    assert!(client.requests.is_empty());
    client.request(0, READ, 0, 3, b"");
    client.request(0, FLUSH, 0, 0, b"");
    assert_eq!(client.requests.len(), 2);
}

#[test]
fn reads_and_writes_of_32_mib_are_the_largest() {
    let max = PAYLOAD_BYTES_MAX;
    for (mut client, read_error) in [(simple(), 22), (structured(), 75)] {
        assert_eq!(error_of(&client.request(0, READ, 0, max + 1, b"")), read_error);
        client.request(0, READ, 0, max, b"");
        client.operation();
        client.answer(Err(BlockError::Invalid));
        for len in [max + 1, DRAIN_BYTES_MAX] {
            let payload = vec![1; len as usize];
            assert_eq!(error_of(&client.request(0, WRITE, 0, len, &payload)), 22);
            assert!(client.session.held_bytes() == 0, "dropped, not kept");
        }
        client.request(0, WRITE, 0, max, &vec![1; max as usize]);
        assert!(matches!(client.operation(), BlockOp::Write { data, .. } if data.len() == max as usize));
        client.answer(DONE);
        assert!(client.request(0, WRITE, 0, DRAIN_BYTES_MAX + 1, b"").is_empty());
        assert!(client.closed);
    }
}

#[test]
fn a_refused_writes_payload_is_no_request() {
    let mut client = simple();
    let inner = request_bytes(0, READ, 0, 1, b"");
    let outer = request_bytes(0x8000, WRITE, 0, inner.len() as u32, &inner);
    let (first, second) = outer.split_at(40);
    assert!(client.say(first).is_empty());
    assert_eq!(error_of(&client.say(second)), 22);
    assert!(client.requests.is_empty());
    client.request(0, READ, 0, 1, b"");
    assert_eq!(client.requests.len(), 1);
}

#[test]
fn a_bad_magic_closes_and_late_replies_are_dropped() {
    let mut client = simple();
    client.request(0, READ, 0, 4, b"");
    let mut bad = request_bytes(0, READ, 0, 4, b"");
    bad[3] ^= 1;
    bad.extend(request_bytes(0, READ, 0, 4, b""));
    assert!(client.say(&bad).is_empty());
    assert!(client.closed && !client.session.wants_input());
    assert_eq!(client.session.held_bytes(), 4, "of the request in flight, none of what came behind");
    assert!(client.answer(data(&[b"late"])).is_empty());
    assert_eq!(client.session.in_flight(), 0);
    client.session.on_shutdown(&mut client.out);
    assert!(client.out.is_empty());
}

#[test]
fn errors_of_the_volume_have_their_numbers() {
    for mut client in [simple(), structured()] {
        for command in [READ, WRITE, TRIM, CACHE, WRITE_ZEROES, FLUSH] {
            for error in ERRORS {
                let expected = match error {
                    BlockError::OutOfRange if matches!(command, WRITE | WRITE_ZEROES) => 28,
                    BlockError::OutOfRange | BlockError::Invalid => 22,
                    BlockError::NoSpace => 28,
                    BlockError::Unavailable | BlockError::Injected => 5,
                    BlockError::Deposed | BlockError::ShuttingDown => 108,
                    BlockError::NotWriter => 1,
                };
                let len = if command == FLUSH { 0 } else { 2 };
                client.request(0, command, 0, len, if command == WRITE { b"ab" } else { b"" });
                assert_eq!(error_of(&client.answer(Err(error))), expected, "command {command}, {error:?}");
            }
        }
    }
}

fn status(extents: &[(u64, bool)]) -> Result<BlockData, BlockError> {
    Ok(BlockData::Status(extents.iter().map(|&(len, set)| StatusExtent { len, set }).collect()))
}

fn described(extents: &[(u32, u32)]) -> Vec<u8> {
    let extents: Vec<u8> =
        extents.iter().flat_map(|(len, state)| [len.to_be_bytes(), state.to_be_bytes()].concat()).collect();
    chunk(5, &[&1u32.to_be_bytes(), &extents])
}

#[test]
fn a_status_describes_what_was_asked() {
    let mut client = structured();
    for (flags, answer, expected) in [
        (0, &[(4096, true), (8192, false), (4096, true)][..], &[(4096, 0), (8192, 3), (4096, 0)][..]),
        (0, &[(16384, false)], &[(16384, 3)]),
        (0, &[(4096, true), (4096, true), (0, false), (8192, true)], &[(16384, 0)]),
        (0, &[(4096, true), (SIZE_BYTES, false)], &[(4096, 0), (12288, 3)]),
        (0, &[(4096, true)], &[(4096, 0)]),
        (command_flag::REQ_ONE, &[(4096, true), (4096, true), (8192, false)], &[(8192, 0)]),
        (command_flag::REQ_ONE, &[(1 << 40, false)], &[(16384, 3)]),
    ] {
        client.request(flags, BLOCK_STATUS, 4096, 16384, b"");
        assert!(matches!(client.operation(), BlockOp::Status(range) if *range == ByteRange::new(4096, 16384)));
        assert_eq!(client.answer(status(answer)), described(expected));
    }
    client.request(0, BLOCK_STATUS, 0, 4096, b"");
    assert_eq!(error_of(&client.answer(Err(BlockError::Unavailable))), 5);
}

/// Serving with both kinds of context.
fn with_changes() -> Client {
    let mut client = Client::new(SessionConfig::default(), &["vm"]);
    client.option(8, b"");
    let queries = ["holdfast:changed:tuesday", "base:allocation"];
    assert_eq!(client.option(10, &contexts("vm", &queries)).len(), 3);
    client.option(7, &info_data("vm", &[]));
    client
}

#[test]
fn a_status_of_two_contexts_is_two_chunks() {
    let mut client = with_changes();
    assert!(client.request(0, BLOCK_STATUS, 4096, 16384, b"").is_empty());
    let range = ByteRange::new(4096, 16384);
    assert!(matches!(client.operation(), BlockOp::Changes { range: r, since: ObjectId(7) } if *r == range));
    let first = client.answer(status(&[(4096, false), (12288, true)]));
    assert_eq!(first[4..8], [0, 0, 0, 5], "more follows");
    assert_eq!(first[20..], [&1u32, &4096, &0, &12288, &1].map(|word| word.to_be_bytes()).concat());
    assert!(matches!(client.operation(), BlockOp::Status(r) if *r == range));
    let second = client.answer(status(&[(16384, false)]));
    assert_eq!(second[4..8], [0, 1, 0, 5], "the last");
    assert_eq!(second[20..], [&2u32, &16384, &3].map(|word| word.to_be_bytes()).concat());
    assert_eq!(client.session.in_flight(), 0);
}

#[test]
fn a_status_that_fails_half_way_ends_with_the_error() {
    let mut client = with_changes();
    client.request(0, BLOCK_STATUS, 0, 4096, b"");
    client.answer(status(&[(4096, true)]));
    assert_eq!(error_of(&client.answer(Err(BlockError::Unavailable))), 5);
    assert_eq!((client.requests.len(), client.session.in_flight()), (0, 0));
}

#[test]
fn a_goodbye_waits_for_all_chunks_of_a_status() {
    let mut client = with_changes();
    client.request(0, BLOCK_STATUS, 0, 4096, b"");
    client.request(0, DISCONNECT, 0, 0, b"");
    client.answer(status(&[(4096, true)]));
    assert!(!client.closed);
    client.answer(status(&[(4096, true)]));
    assert!(client.closed);
}

#[test]
fn a_long_status_is_cut() {
    let mut client = structured();
    client.request(0, BLOCK_STATUS, 0, SIZE_BYTES as u32, b"");
    let extents: Vec<(u64, bool)> = (0..STATUS_EXTENTS_MAX + 100).map(|at| (4096, at % 2 == 0)).collect();
    let sent = client.answer(status(&extents));
    assert_eq!(sent.len(), 20 + 4 + 8 * STATUS_EXTENTS_MAX);
}

#[test]
fn a_status_needs_a_context() {
    assert_eq!(error_of(&simple().request(0, BLOCK_STATUS, 0, 4096, b"")), 22);
}

#[test]
fn disconnecting_waits_for_what_is_in_flight() {
    let mut client = simple();
    client.request(0, DISCONNECT, 0, 0, b"");
    assert!(client.closed);
    let mut client = simple();
    client.request(0, READ, 0, 3, b"");
    client.request(0, FLUSH, 0, 0, b"");
    client.say(&[request_bytes(0, DISCONNECT, 0, 0, b""), request_bytes(0, READ, 0, 1, b"")].concat());
    assert_eq!(client.requests.len(), 2, "nothing is taken after the goodbye");
    assert!(!client.closed && !client.session.wants_input());
    assert_eq!(client.answer(data(&[b"abc"])).len(), 19);
    assert!(!client.closed);
    assert_eq!(client.answer(DONE), simple_reply(0));
    assert!(client.closed);
}

#[test]
fn a_shutdown_finishes_what_is_in_flight() {
    let mut client = simple();
    client.session.on_shutdown(&mut client.out);
    client.carry_out();
    assert!(client.closed);
    let mut client = simple();
    client.request(0, READ, 0, 3, b"");
    client.session.on_shutdown(&mut client.out);
    client.session.on_shutdown(&mut client.out);
    client.request(0, READ, 0, 3, b"");
    assert_eq!(client.answer(data(&[b"abc"])).len(), 19);
    assert!(client.closed && client.requests.is_empty());
}

#[test]
fn a_sink_outlives_the_end_of_its_session() {
    let mut client = simple();
    client.request(0, WRITE, 0, 100_000, b"");
    let (sink, _) = client.session.take_sink().expect("a large payload");
    client.session.on_shutdown(&mut client.out);
    client.carry_out();
    assert!(client.closed && client.session.take_sink().is_none());
    client.session.give_sink(sink, 100_000, &mut client.out);
    assert!(client.out.is_empty(), "a write that came too late is not done");
}

#[test]
fn input_waits_while_the_volume_has_enough_to_do() {
    let config = SessionConfig { in_flight_max: 4, ..SessionConfig::default() };
    let mut client = Client::serving(config, "vm", false);
    client.reads = false;
    client.say(&request_bytes(0, FLUSH, 0, 0, b"").repeat(10));
    assert_eq!((client.requests.len(), client.session.in_flight()), (4, 4));
    assert!(!client.session.wants_input());
    client.say(&request_bytes(0, DISCONNECT, 0, 0, b""));
    for left in (0..10).rev() {
        assert!(!client.closed);
        assert_eq!(client.answer(DONE), simple_reply(0));
        assert_eq!(client.requests.len(), left.min(4));
    }
    assert!(client.closed, "the goodbye came last");
}

#[test]
fn input_waits_while_payload_fills_the_bounds() {
    let config = SessionConfig { held_bytes_max: 10_000, ..SessionConfig::default() };
    let mut client = Client::serving(config, "vm", false);
    client.reads = false;
    client.say(&request_bytes(0, READ, 0, 4096, b"").repeat(5));
    assert_eq!(client.requests.len(), 3, "the third is the first to reach the bound");
    assert_eq!(client.session.held_bytes(), 3 * 4096 + 2 * 28);
    client.answer(data(&[&[1; 4096]]));
    assert_eq!(client.requests.len(), 2, "answered, but still held for a client that doesn't read");
    assert!(!client.session.wants_input());
    client.reads = true;
    client.carry_out();
    assert_eq!(client.requests.len(), 3);
    client.answer(data(&[&[1; 4096]]));
    assert_eq!(client.requests.len(), 3);
    assert!(!client.session.wants_input());
    client.answer(data(&[&[1; 4096]]));
    assert!(client.session.wants_input());
    client.request(0, WRITE, 0, 4096, b"part");
    assert!(client.session.wants_input(), "what has started is finished");
}

#[test]
#[should_panic(expected = "a request gets one reply")]
fn a_second_reply_is_a_bug() {
    let mut client = simple();
    client.request(0, READ, 0, 4, b"");
    let token = client.requests[0].token;
    client.answer(data(&[b"once"]));
    client.session.on_reply(BlockReply { token, result: data(&[b"more"]) }, &mut client.out);
}

#[test]
#[should_panic(expected = "3 bytes answer a read of 4")]
fn a_read_that_comes_short_is_a_bug() {
    let mut client = simple();
    client.request(0, READ, 0, 4, b"");
    client.answer(data(&[b"abc"]));
}

#[test]
fn zeroes_are_told_from_data_at_every_place() {
    for len in [0, 1, 63, 64, 65, 4096, 4100] {
        let mut bytes = vec![0; len];
        assert!(is_zero(&bytes));
        for at in (0..len).step_by(7).chain(len.checked_sub(1)) {
            bytes[at] = 1;
            assert!(!is_zero(&bytes));
            bytes[at] = 0;
        }
    }
}
