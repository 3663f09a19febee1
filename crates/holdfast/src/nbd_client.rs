//! A small NBD client over a unix socket, for what this program reads and writes itself. It blocks.
//!
//! Limits: one request of at most [`REQUEST_BYTES_MAX`]; a reply that takes longer than [`REPLY_TIME_MAX`] is an error,
//! so that a lost reply ends a command instead of hanging it.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// What every server takes (the protocol asks for 32 MiB).
pub const REQUEST_BYTES_MAX: usize = 1 << 20;

/// Far beyond any stall that would be called survivable.
pub const REPLY_TIME_MAX: Duration = Duration::from_secs(120);

const SERVER_MAGIC: u64 = 0x4e42_444d_4147_4943;
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;

const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

const FLAG_FIXED_NEWSTYLE: u16 = 1;
const FLAGS_CLIENT: u32 = 3; // Fixed newstyle, no zeroes.
const OPTION_GO: u32 = 7;
const OPTION_STRUCTURED_REPLY: u32 = 8;
const OPTION_SET_META_CONTEXT: u32 = 10;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const REPLY_META_CONTEXT: u32 = 4;
const REPLY_ERROR_BIT: u32 = 1 << 31;

const COMMAND_READ: u16 = 0;
const COMMAND_WRITE: u16 = 1;
const COMMAND_DISCONNECT: u16 = 2;
const COMMAND_FLUSH: u16 = 3;
const COMMAND_WRITE_ZEROES: u16 = 6;
const COMMAND_BLOCK_STATUS: u16 = 7;

/// What the server says about an export that is opened: its size and flags.
const INFO_EXPORT: u16 = 0;

const CHUNK_BLOCK_STATUS: u16 = 5;
const CHUNK_ERROR_BIT: u16 = 1 << 15;
const CHUNK_DONE: u16 = 1;

/// Longest chunk that is taken in answer to a block status.
const CHUNK_BYTES_MAX: u32 = 4 << 20;

/// Longest option reply that is taken.
const OPTION_REPLY_BYTES_MAX: u32 = 64 << 10;

pub struct Client {
    stream: UnixStream,
    next_cookie: u64,
    size_bytes: u64,
    /// Metadata contexts that were selected; with any, replies are structured, and only their status can be asked for.
    contexts: usize,
}

/// A run of a block status: bytes, and the flags of the context.
pub type Run = (u64, u32);

/// As the protocol writes one.
fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes(), text.as_bytes()].concat()
}

fn malformed(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the NBD server sent {what}"))
}

impl Client {
    pub fn connect(socket: &Path, export: &str) -> io::Result<Client> {
        Self::connect_for_status(socket, export, &[])
    }

    /// A connection for [`Client::status`] of these metadata contexts.
    pub fn connect_for_status(socket: &Path, export: &str, contexts: &[&str]) -> io::Result<Client> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(REPLY_TIME_MAX))?;
        stream.set_write_timeout(Some(REPLY_TIME_MAX))?;
        let mut client = Client { stream, next_cookie: 1, size_bytes: 0, contexts: contexts.len() };
        client.shake_hands(export, contexts)?;
        Ok(client)
    }

    /// Of the export.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn shake_hands(&mut self, export: &str, contexts: &[&str]) -> io::Result<()> {
        if self.receive_u64()? != SERVER_MAGIC || self.receive_u64()? != OPTION_MAGIC {
            return Err(malformed("no newstyle greeting"));
        }
        if self.receive_u16()? & FLAG_FIXED_NEWSTYLE == 0 {
            return Err(malformed("a greeting without fixed newstyle"));
        }
        self.stream.write_all(&FLAGS_CLIENT.to_be_bytes())?;
        if !contexts.is_empty() {
            self.option(OPTION_STRUCTURED_REPLY, &[])?;
            let mut data = string(export);
            data.extend((contexts.len() as u32).to_be_bytes());
            data.extend(contexts.iter().flat_map(|context| string(context)));
            let replies = self.option(OPTION_SET_META_CONTEXT, &data)?;
            let selected = replies.iter().filter(|(kind, _)| *kind == REPLY_META_CONTEXT).count();
            if selected != contexts.len() {
                return Err(io::Error::other(format!("the NBD server does not know all of {}", contexts.join(", "))));
            }
        }
        let mut data = string(export);
        data.extend(0_u16.to_be_bytes());
        let replies = self.option(OPTION_GO, &data)?;
        let size = replies.iter().find_map(|(kind, data)| {
            let info = data.strip_prefix(&INFO_EXPORT.to_be_bytes()).filter(|_| *kind == REPLY_INFO)?;
            Some(u64::from_be_bytes(*info.first_chunk()?))
        });
        self.size_bytes = size.ok_or_else(|| malformed("no size of the export"))?;
        Ok(())
    }

    /// Sends an option; returns what comes before the server's yes.
    fn option(&mut self, option: u32, data: &[u8]) -> io::Result<Vec<(u32, Vec<u8>)>> {
        let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
        bytes.extend(option.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        self.stream.write_all(&bytes)?;
        let mut replies = Vec::new();
        loop {
            if self.receive_u64()? != OPTION_REPLY_MAGIC || self.receive_u32()? != option {
                return Err(malformed("no reply to our option"));
            }
            let (kind, len) = (self.receive_u32()?, self.receive_u32()?);
            if len > OPTION_REPLY_BYTES_MAX {
                return Err(malformed("an option reply that is too long"));
            }
            let mut data = vec![0; len as usize];
            self.stream.read_exact(&mut data)?;
            match kind {
                REPLY_ACK => return Ok(replies),
                kind if kind & REPLY_ERROR_BIT != 0 => {
                    let why = String::from_utf8_lossy(&data);
                    return Err(io::Error::other(format!("the NBD server refuses: {why} ({kind:#x})")));
                }
                kind => replies.push((kind, data)),
            }
        }
    }

    /// What the selected contexts say from `offset` on: for each, runs that cover up to `len` bytes, and at least one.
    pub fn status(&mut self, offset: u64, len: u32) -> io::Result<Vec<Vec<Run>>> {
        let cookie = self.send_header(COMMAND_BLOCK_STATUS, offset, len)?;
        let mut runs = vec![Vec::new(); self.contexts];
        loop {
            if self.receive_u32()? != STRUCTURED_REPLY_MAGIC {
                return Err(malformed("no structured reply"));
            }
            let (flags, kind) = (self.receive_u16()?, self.receive_u16()?);
            let (to, len) = (self.receive_u64()?, self.receive_u32()?);
            if to != cookie || len > CHUNK_BYTES_MAX {
                return Err(malformed("a chunk of another reply, or one that is too long"));
            }
            let mut data = vec![0; len as usize];
            self.stream.read_exact(&mut data)?;
            let words: Vec<u32> = data.as_chunks().0.iter().map(|word| u32::from_be_bytes(*word)).collect();
            match (kind, words.split_first()) {
                (CHUNK_BLOCK_STATUS, Some((id, words))) if !words.is_empty() => {
                    let of = runs.get_mut((*id as usize).wrapping_sub(1)).ok_or_else(|| malformed("an unknown id"))?;
                    of.extend(words.as_chunks().0.iter().map(|[len, flags]| (u64::from(*len), *flags)));
                }
                (kind, Some((errno, _))) if kind & CHUNK_ERROR_BIT != 0 => {
                    return Err(io::Error::from_raw_os_error(*errno as i32));
                }
                _ => return Err(malformed("an unknown chunk")),
            }
            if flags & CHUNK_DONE != 0 {
                let is_whole = runs.iter().all(|runs| !runs.is_empty());
                return if is_whole { Ok(runs) } else { Err(malformed("no status of a context")) };
            }
        }
    }

    /// The bytes of these ranges, in order, each in pieces of at most [`REQUEST_BYTES_MAX`], `depth` requests at a time.
    pub fn read_in_order(
        &mut self,
        ranges: impl IntoIterator<Item = Range<u64>>,
        depth: usize,
        mut take: impl FnMut(u64, &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let step = REQUEST_BYTES_MAX as u64;
        let pieces = ranges.into_iter().flat_map(|range| {
            let Range { start, end } = range;
            (start..end).step_by(REQUEST_BYTES_MAX).map(move |at| (at, step.min(end - at) as usize))
        });
        let mut pieces = pieces.fuse();
        let mut waiting: VecDeque<(u64, u64, usize)> = VecDeque::with_capacity(depth);
        let mut arrived: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
        // Memory that was used before costs less than new one.
        let mut spare: Vec<Vec<u8>> = Vec::new();
        loop {
            while waiting.len() < depth {
                let Some((offset, len)) = pieces.next() else { break };
                waiting.push_back((self.send(COMMAND_READ, offset, len, &[])?, offset, len));
            }
            let Some((cookie, offset, _)) = waiting.front().copied() else { return Ok(()) };
            if let Some(data) = arrived.remove(&cookie) {
                waiting.pop_front();
                take(offset, &data)?;
                spare.push(data);
                continue;
            }
            let (cookie, error) = self.receive_reply()?;
            let of = waiting.iter().find(|w| w.0 == cookie).ok_or_else(|| malformed("an unknown cookie"))?;
            if let Some(error) = error {
                return Err(error);
            }
            let mut data = spare.pop().unwrap_or_default();
            data.resize(of.2, 0);
            self.stream.read_exact(&mut data)?;
            arrived.insert(cookie, data);
        }
    }

    pub fn write_zeroes(&mut self, offset: u64, len: u32) -> io::Result<()> {
        let cookie = self.send_header(COMMAND_WRITE_ZEROES, offset, len)?;
        self.receive_reply_to(cookie)
    }

    pub fn read(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        let cookie = self.send(COMMAND_READ, offset, data.len(), &[])?;
        self.receive_reply_to(cookie)?;
        self.stream.read_exact(data)
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let cookie = self.send(COMMAND_WRITE, offset, data.len(), data)?;
        self.receive_reply_to(cookie)
    }

    pub fn flush(&mut self) -> io::Result<()> {
        let cookie = self.send(COMMAND_FLUSH, 0, 0, &[])?;
        self.receive_reply_to(cookie)
    }

    /// Reads all of `range`, `depth` requests at a time, and shows each piece as it arrives, in any order. A piece that
    /// the server could not read is shown as its error.
    pub fn scan(
        &mut self,
        range: Range<u64>,
        depth: usize,
        mut show: impl FnMut(u64, io::Result<&[u8]>),
    ) -> io::Result<()> {
        assert!(depth > 0, "a scan without requests would never end");
        let mut waiting: Vec<(u64, u64, usize)> = Vec::with_capacity(depth);
        let mut data = vec![0; REQUEST_BYTES_MAX];
        let mut next = range.start;
        loop {
            while next < range.end && waiting.len() < depth {
                let len = (range.end - next).min(REQUEST_BYTES_MAX as u64) as usize;
                let cookie = self.send(COMMAND_READ, next, len, &[])?;
                waiting.push((cookie, next, len));
                next += len as u64;
            }
            if waiting.is_empty() {
                return Ok(());
            }
            let (cookie, error) = self.receive_reply()?;
            let index = waiting.iter().position(|w| w.0 == cookie).ok_or_else(|| malformed("an unknown cookie"))?;
            let (_, offset, len) = waiting.swap_remove(index);
            match error {
                Some(error) => show(offset, Err(error)),
                None => {
                    self.stream.read_exact(&mut data[..len])?;
                    show(offset, Ok(&data[..len]));
                }
            }
        }
    }

    fn send(&mut self, command: u16, offset: u64, len: usize, payload: &[u8]) -> io::Result<u64> {
        assert!(len <= REQUEST_BYTES_MAX, "a request of {len} bytes is too long");
        let (cookie, mut request) = self.request(command, offset, len as u32);
        request.extend(payload);
        self.stream.write_all(&request)?;
        Ok(cookie)
    }

    /// A request without payload, of any length.
    fn send_header(&mut self, command: u16, offset: u64, len: u32) -> io::Result<u64> {
        let (cookie, request) = self.request(command, offset, len);
        self.stream.write_all(&request)?;
        Ok(cookie)
    }

    fn request(&mut self, command: u16, offset: u64, len: u32) -> (u64, Vec<u8>) {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let mut request = Vec::with_capacity(28);
        request.extend(REQUEST_MAGIC.to_be_bytes());
        request.extend(0_u16.to_be_bytes());
        request.extend(command.to_be_bytes());
        request.extend(cookie.to_be_bytes());
        request.extend(offset.to_be_bytes());
        request.extend(len.to_be_bytes());
        (cookie, request)
    }

    fn receive_reply_to(&mut self, cookie: u64) -> io::Result<()> {
        match self.receive_reply()? {
            (other, _) if other != cookie => Err(malformed("a reply to another request")),
            (_, Some(error)) => Err(error),
            (_, None) => Ok(()),
        }
    }

    fn receive_reply(&mut self) -> io::Result<(u64, Option<io::Error>)> {
        if self.receive_u32()? != SIMPLE_REPLY_MAGIC {
            return Err(malformed("no simple reply"));
        }
        let error = self.receive_u32()?;
        let cookie = self.receive_u64()?;
        Ok((cookie, (error != 0).then(|| io::Error::from_raw_os_error(error as i32))))
    }

    fn receive_u64(&mut self) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.stream.read_exact(&mut bytes)?;
        Ok(u64::from_be_bytes(bytes))
    }

    fn receive_u32(&mut self) -> io::Result<u32> {
        let mut bytes = [0; 4];
        self.stream.read_exact(&mut bytes)?;
        Ok(u32::from_be_bytes(bytes))
    }

    fn receive_u16(&mut self) -> io::Result<u16> {
        let mut bytes = [0; 2];
        self.stream.read_exact(&mut bytes)?;
        Ok(u16::from_be_bytes(bytes))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // A server that is gone needs no good-bye.
        let _ = self.send(COMMAND_DISCONNECT, 0, 0, &[]);
    }
}
