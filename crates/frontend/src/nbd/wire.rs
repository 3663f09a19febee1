//! NBD's numbers and messages: what each byte means, and nothing about when it may be said.
//!
//! The reference is `doc/proto.md` of the NetworkBlockDevice project; names follow it. Everything is big-endian.
//!
//! Invariants
//! 1. Decoding never reads past the bytes it was given, and never allocates by a length that the peer named.
//! 2. Every message head of the transmission phase fits a [`Head`].

use std::fmt;
use std::ops::Deref;

pub(super) const GREETING_MAGIC: u64 = u64::from_be_bytes(*b"NBDMAGIC");
pub(super) const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// A string of the protocol (export name, query, error text) is no longer than this.
pub(super) const STRING_BYTES_MAX: usize = 4096;

pub(super) const CLIENT_FLAGS_BYTES: usize = 4;
pub(super) const OPTION_HEADER_BYTES: usize = 16;
pub(super) const REQUEST_HEADER_BYTES: usize = 28;

/// Zeroes that follow the answer to `EXPORT_NAME`, unless both sides agreed to leave them out.
pub(super) const EXPORT_NAME_PADDING_BYTES: usize = 124;

/// Handshake flags, offered in the greeting and accepted by the client under the same numbers.
pub(super) mod handshake_flag {
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    pub const NO_ZEROES: u16 = 1 << 1;
}

pub(super) mod option {
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const STARTTLS: u32 = 5;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
    pub const STRUCTURED_REPLY: u32 = 8;
    pub const LIST_META_CONTEXT: u32 = 9;
    pub const SET_META_CONTEXT: u32 = 10;
}

pub(super) mod reply {
    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    pub const INFO: u32 = 3;
    pub const META_CONTEXT: u32 = 4;
    pub const ERR_UNSUP: u32 = (1 << 31) + 1;
    pub const ERR_POLICY: u32 = (1 << 31) + 2;
    pub const ERR_INVALID: u32 = (1 << 31) + 3;
    pub const ERR_TLS_REQD: u32 = (1 << 31) + 5;
    pub const ERR_UNKNOWN: u32 = (1 << 31) + 6;
    pub const ERR_SHUTDOWN: u32 = (1 << 31) + 7;
    pub const ERR_TOO_BIG: u32 = (1 << 31) + 9;
}

pub(super) mod info {
    pub const EXPORT: u16 = 0;
    pub const NAME: u16 = 1;
    pub const DESCRIPTION: u16 = 2;
    pub const BLOCK_SIZE: u16 = 3;
}

pub(super) mod transmission_flag {
    pub const HAS_FLAGS: u16 = 1 << 0;
    pub const READ_ONLY: u16 = 1 << 1;
    pub const SEND_FLUSH: u16 = 1 << 2;
    pub const SEND_FUA: u16 = 1 << 3;
    pub const SEND_TRIM: u16 = 1 << 5;
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub const SEND_DF: u16 = 1 << 7;
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    pub const SEND_CACHE: u16 = 1 << 10;
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

pub(super) mod command_flag {
    pub const FUA: u16 = 1 << 0;
    pub const NO_HOLE: u16 = 1 << 1;
    pub const DF: u16 = 1 << 2;
    pub const REQ_ONE: u16 = 1 << 3;
    pub const FAST_ZERO: u16 = 1 << 4;
}

/// Types of structured reply chunks.
mod chunk {
    pub const NONE: u16 = 0;
    pub const OFFSET_DATA: u16 = 1;
    pub const OFFSET_HOLE: u16 = 2;
    pub const BLOCK_STATUS: u16 = 5;
    pub const ERROR: u16 = (1 << 15) + 1;
}

/// Set on the last chunk of a reply. All replies but those to a block status have one chunk.
const CHUNK_DONE: u16 = 1;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Command {
    Read,
    Write,
    Disconnect,
    Flush,
    Trim,
    Cache,
    WriteZeroes,
    BlockStatus,
}

impl Command {
    fn decode(number: u16) -> Option<Command> {
        Some(match number {
            0 => Command::Read,
            1 => Command::Write,
            2 => Command::Disconnect,
            3 => Command::Flush,
            4 => Command::Trim,
            5 => Command::Cache,
            6 => Command::WriteZeroes,
            7 => Command::BlockStatus,
            _ => return None,
        })
    }
}

/// Error numbers of replies: the protocol's own, whatever the platform's `errno` says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub(super) enum Errno {
    Perm = 1,
    Io = 5,
    Inval = 22,
    NoSpace = 28,
    Overflow = 75,
    Shutdown = 108,
}

/// How many bytes a [`Head`] holds: a hole chunk, or a status chunk of one extent.
const HEAD_BYTES_MAX: usize = 32;

/// The head of a message, kept inline so that answering an I/O allocates nothing.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Head {
    len: u8,
    bytes: [u8; HEAD_BYTES_MAX],
}

impl Head {
    pub(super) fn new() -> Head {
        Head { len: 0, bytes: [0; HEAD_BYTES_MAX] }
    }

    fn put<const N: usize>(mut self, bytes: [u8; N]) -> Head {
        let at = usize::from(self.len);
        self.bytes[at..at + N].copy_from_slice(&bytes);
        self.len += N as u8;
        self
    }

    pub(super) fn u16(self, value: u16) -> Head {
        self.put(value.to_be_bytes())
    }

    pub(super) fn u32(self, value: u32) -> Head {
        self.put(value.to_be_bytes())
    }

    pub(super) fn u64(self, value: u64) -> Head {
        self.put(value.to_be_bytes())
    }
}

impl Deref for Head {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

impl fmt::Debug for Head {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Head(")?;
        self.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        f.write_str(")")
    }
}

/// Names a request to its client, who chose it; opaque here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Cookie(pub u64);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RequestHeader {
    pub flags: u16,
    /// `None` for a command of a protocol newer than this one.
    pub command: Option<Command>,
    pub cookie: Cookie,
    pub offset: u64,
    pub len: u32,
}

/// `None` where the bytes are no request: the stream has lost its frame.
pub(super) fn decode_request(bytes: &[u8; REQUEST_HEADER_BYTES]) -> Option<RequestHeader> {
    let mut fields = Fields(bytes);
    if fields.u32()? != REQUEST_MAGIC {
        return None;
    }
    Some(RequestHeader {
        flags: fields.u16()?,
        command: Command::decode(fields.u16()?),
        cookie: Cookie(fields.u64()?),
        offset: fields.u64()?,
        len: fields.u32()?,
    })
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct OptionHeader {
    pub option: u32,
    pub len: u32,
}

/// `None` where the bytes are no option.
pub(super) fn decode_option(bytes: &[u8; OPTION_HEADER_BYTES]) -> Option<OptionHeader> {
    let mut fields = Fields(bytes);
    if fields.u64()? != OPTION_MAGIC {
        return None;
    }
    Some(OptionHeader { option: fields.u32()?, len: fields.u32()? })
}

/// The data of `INFO` and `GO`.
#[derive(Debug)]
pub(super) struct InfoRequest<'a> {
    pub name: &'a str,
    /// Big-endian pairs of bytes, one for each wanted piece of information.
    wanted: &'a [u8],
}

impl<'a> InfoRequest<'a> {
    pub(super) fn decode(data: &'a [u8]) -> Option<InfoRequest<'a>> {
        let mut fields = Fields(data);
        let name = fields.string()?;
        let count = usize::from(fields.u16()?);
        (fields.0.len() == count * 2).then_some(InfoRequest { name, wanted: fields.0 })
    }

    pub(super) fn wants(&self, kind: u16) -> bool {
        self.wanted.chunks_exact(2).any(|pair| pair == kind.to_be_bytes())
    }
}

/// The data of `LIST_META_CONTEXT` and `SET_META_CONTEXT`, checked to the last query.
#[derive(Debug)]
pub(super) struct ContextRequest<'a> {
    pub name: &'a str,
    queries: Fields<'a>,
}

impl<'a> ContextRequest<'a> {
    pub(super) fn decode(data: &'a [u8]) -> Option<ContextRequest<'a>> {
        let mut fields = Fields(data);
        let name = fields.string()?;
        let query_count = fields.u32()?;
        let mut rest = Fields(fields.0);
        for _ in 0..query_count {
            rest.string()?;
        }
        rest.0.is_empty().then_some(ContextRequest { name, queries: fields })
    }

    pub(super) fn queries(&self) -> impl Iterator<Item = &'a str> {
        let mut fields = Fields(self.queries.0);
        std::iter::from_fn(move || fields.string())
    }
}

/// Reads fields off the front of a message; `None` where it is too short for one.
#[derive(Debug)]
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*field)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_be_bytes)
    }

    /// A length and as many bytes of UTF-8.
    fn string(&mut self) -> Option<&'a str> {
        let len = self.u32()? as usize;
        if len > STRING_BYTES_MAX {
            return None;
        }
        let (text, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        std::str::from_utf8(text).ok()
    }
}

/// `text` cut to the longest string that the protocol allows.
pub(super) fn bounded(text: &str) -> &str {
    &text[..text.floor_char_boundary(STRING_BYTES_MAX)]
}

/// Appends one reply to an option; a reply of several parts is several calls.
pub(super) fn put_option_reply(to: &mut Vec<u8>, option: u32, kind: u32, parts: &[&[u8]]) {
    let len: usize = parts.iter().map(|part| part.len()).sum();
    to.extend_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
    to.extend_from_slice(&option.to_be_bytes());
    to.extend_from_slice(&kind.to_be_bytes());
    to.extend_from_slice(&u32::try_from(len).expect("replies hold a few bounded strings").to_be_bytes());
    parts.iter().for_each(|part| to.extend_from_slice(part));
}

pub(super) fn simple_reply(cookie: Cookie, error: Option<Errno>) -> Head {
    Head::new().u32(SIMPLE_REPLY_MAGIC).u32(error.map_or(0, |e| e as u32)).u64(cookie.0)
}

fn chunk_head(cookie: Cookie, kind: u16, payload_len: u32) -> Head {
    chunk_head_of(cookie, CHUNK_DONE, kind, payload_len)
}

fn chunk_head_of(cookie: Cookie, flags: u16, kind: u16, payload_len: u32) -> Head {
    Head::new().u32(STRUCTURED_REPLY_MAGIC).u16(flags).u16(kind).u64(cookie.0).u32(payload_len)
}

/// The whole answer to a read of nothing: a content chunk may not be empty.
pub(super) fn none_chunk(cookie: Cookie) -> Head {
    chunk_head(cookie, chunk::NONE, 0)
}

/// The head of a chunk of `len` data bytes, which follow.
pub(super) fn data_chunk(cookie: Cookie, offset: u64, len: u32) -> Head {
    assert!(len > 0, "a content chunk describes at least one byte");
    chunk_head(cookie, chunk::OFFSET_DATA, len + 8).u64(offset)
}

pub(super) fn hole_chunk(cookie: Cookie, offset: u64, len: u32) -> Head {
    assert!(len > 0, "a content chunk describes at least one byte");
    chunk_head(cookie, chunk::OFFSET_HOLE, 12).u64(offset).u32(len)
}

/// The head of a chunk of a metadata context; `extent_count` pairs of length and state follow.
pub(super) fn status_chunk(cookie: Cookie, context_id: u32, is_last: bool, extent_count: u32) -> Head {
    assert!(extent_count > 0, "a status chunk describes at least one extent");
    let flags = if is_last { CHUNK_DONE } else { 0 };
    chunk_head_of(cookie, flags, chunk::BLOCK_STATUS, 4 + 8 * extent_count).u32(context_id)
}

/// The head of an error chunk; its text follows.
pub(super) fn error_chunk(cookie: Cookie, error: Errno, text: &str) -> Head {
    let len = u16::try_from(text.len()).expect("error texts are short");
    chunk_head(cookie, chunk::ERROR, 6 + u32::from(len)).u32(error as u32).u16(len)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meta(name: &str, count: u32, queries: &[&str]) -> Vec<u8> {
        let mut data = Vec::new();
        data.extend((name.len() as u32).to_be_bytes());
        data.extend(name.bytes());
        data.extend(count.to_be_bytes());
        for query in queries {
            data.extend((query.len() as u32).to_be_bytes());
            data.extend(query.bytes());
        }
        data
    }

    #[test]
    fn the_magics_are_the_documented_numbers() {
        assert_eq!(GREETING_MAGIC, 0x4e42_444d_4147_4943);
        assert_eq!(OPTION_MAGIC, 0x4948_4156_454F_5054);
    }

    #[test]
    fn reply_heads_are_the_documented_bytes() {
        let cookie = Cookie(0x0102_0304_0506_0708);
        assert_eq!(*simple_reply(cookie, None), *b"\x67\x44\x66\x98\0\0\0\0\x01\x02\x03\x04\x05\x06\x07\x08");
        assert_eq!(simple_reply(cookie, Some(Errno::Shutdown))[4..8], [0, 0, 0, 108]);
        assert_eq!(
            *data_chunk(cookie, 0x1000, 0x200),
            *b"\x66\x8e\x33\xef\0\x01\0\x01\x01\x02\x03\x04\x05\x06\x07\x08\0\0\x02\x08\0\0\0\0\0\0\x10\0"
        );
        let hole =
            b"\x66\x8e\x33\xef\0\x01\0\x02\x01\x02\x03\x04\x05\x06\x07\x08\0\0\0\x0c\0\0\0\0\0\0\x10\0\0\0\x02\0";
        assert_eq!(*hole_chunk(cookie, 0x1000, 0x200), *hole);
        assert_eq!(*none_chunk(cookie), *b"\x66\x8e\x33\xef\0\x01\0\0\x01\x02\x03\x04\x05\x06\x07\x08\0\0\0\0");
        assert_eq!(
            *status_chunk(cookie, 1, true, 2),
            *b"\x66\x8e\x33\xef\0\x01\0\x05\x01\x02\x03\x04\x05\x06\x07\x08\0\0\0\x14\0\0\0\x01"
        );
        assert_eq!(
            *error_chunk(cookie, Errno::Inval, "no"),
            *b"\x66\x8e\x33\xef\0\x01\x80\x01\x01\x02\x03\x04\x05\x06\x07\x08\0\0\0\x08\0\0\0\x16\0\x02"
        );
        assert_eq!(status_chunk(cookie, 1, false, 1)[4..6], [0, 0]);
        assert_eq!(status_chunk(cookie, 1, true, 1).u32(4096).u32(3).len(), HEAD_BYTES_MAX);
    }

    #[test]
    fn requests_decode_and_a_bad_magic_does_not() {
        let mut bytes = *b"\x25\x60\x95\x13\0\x01\0\x01\x01\x02\x03\x04\x05\x06\x07\x08\0\0\0\0\0\0\x10\0\0\0\x02\0";
        let request = decode_request(&bytes).unwrap();
        assert_eq!(request.command, Some(Command::Write));
        assert_eq!((request.flags, request.offset, request.len), (command_flag::FUA, 0x1000, 0x200));
        assert_eq!(request.cookie, Cookie(0x0102_0304_0506_0708));
        bytes[7] = 8;
        assert_eq!(decode_request(&bytes).unwrap().command, None);
        bytes[0] = 0;
        assert_eq!(decode_request(&bytes), None);
    }

    #[test]
    fn info_requests_must_fit_exactly() {
        let data = b"\0\0\0\x02vm\0\x02\0\x03\0\x01";
        let request = InfoRequest::decode(data).unwrap();
        assert_eq!(request.name, "vm");
        assert!(request.wants(info::BLOCK_SIZE) && request.wants(info::NAME) && !request.wants(info::DESCRIPTION));
        for len in 0..data.len() {
            assert!(InfoRequest::decode(&data[..len]).is_none(), "cut at {len}");
        }
        assert!(InfoRequest::decode(b"\0\0\0\x02vm\0\0x").is_none(), "a byte too many");
        assert!(InfoRequest::decode(b"\xff\xff\xff\xffvm\0\0").is_none(), "a name beyond the data");
        assert!(InfoRequest::decode(b"\0\0\0\x01\xff\0\0").is_none(), "not UTF-8");
    }

    #[test]
    fn context_requests_must_fit_exactly() {
        let data = meta("vm", 2, &["base:", "x:y"]);
        let request = ContextRequest::decode(&data).unwrap();
        assert_eq!(request.name, "vm");
        assert_eq!(request.queries().collect::<Vec<_>>(), ["base:", "x:y"]);
        for len in 0..data.len() {
            assert!(ContextRequest::decode(&data[..len]).is_none(), "cut at {len}");
        }
        assert!(ContextRequest::decode(&meta("vm", 1, &["a:", "b:"])).is_none(), "a query too many");
        assert!(ContextRequest::decode(&meta("vm", u32::MAX, &["a:"])).is_none(), "queries that are not there");
        let long = "x".repeat(STRING_BYTES_MAX + 1);
        assert!(ContextRequest::decode(&meta(&long, 0, &[])).is_none());
        assert!(ContextRequest::decode(&meta(&long[1..], 0, &[])).is_some());
    }

    #[test]
    fn strings_are_cut_between_characters() {
        let text = format!("{}é", "x".repeat(STRING_BYTES_MAX - 1));
        assert_eq!(bounded(&text).len(), STRING_BYTES_MAX - 1);
        assert_eq!(bounded("short"), "short");
    }
}
