//! A small NBD client over a unix socket, for what the drill reads and writes itself: blocking, simple replies.
//!
//! Limits: one request of at most [`REQUEST_BYTES_MAX`]; a reply that takes longer than [`REPLY_TIME_MAX`] is an error,
//! so that a lost reply ends a drill instead of hanging it.

use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// What every server takes (the protocol asks for 32 MiB).
pub const REQUEST_BYTES_MAX: usize = 1 << 20;

/// Far beyond any stall that a drill would call survivable.
pub const REPLY_TIME_MAX: Duration = Duration::from_secs(120);

const SERVER_MAGIC: u64 = 0x4e42_444d_4147_4943;
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;

const FLAG_FIXED_NEWSTYLE: u16 = 1;
const FLAGS_CLIENT: u32 = 3; // Fixed newstyle, no zeroes.
const OPTION_GO: u32 = 7;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const REPLY_ERROR_BIT: u32 = 1 << 31;

const COMMAND_READ: u16 = 0;
const COMMAND_WRITE: u16 = 1;
const COMMAND_DISCONNECT: u16 = 2;
const COMMAND_FLUSH: u16 = 3;

/// Longest option reply that is taken.
const OPTION_REPLY_BYTES_MAX: u32 = 64 << 10;

pub struct Client {
    stream: UnixStream,
    next_cookie: u64,
}

fn malformed(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the NBD server sent {what}"))
}

impl Client {
    pub fn connect(socket: &Path, export: &str) -> io::Result<Client> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(REPLY_TIME_MAX))?;
        stream.set_write_timeout(Some(REPLY_TIME_MAX))?;
        let mut client = Client { stream, next_cookie: 1 };
        client.shake_hands(export)?;
        Ok(client)
    }

    fn shake_hands(&mut self, export: &str) -> io::Result<()> {
        if self.receive_u64()? != SERVER_MAGIC || self.receive_u64()? != OPTION_MAGIC {
            return Err(malformed("no newstyle greeting"));
        }
        if self.receive_u16()? & FLAG_FIXED_NEWSTYLE == 0 {
            return Err(malformed("a greeting without fixed newstyle"));
        }
        let mut go = Vec::new();
        go.extend(FLAGS_CLIENT.to_be_bytes());
        go.extend(OPTION_MAGIC.to_be_bytes());
        go.extend(OPTION_GO.to_be_bytes());
        go.extend((export.len() as u32 + 6).to_be_bytes());
        go.extend((export.len() as u32).to_be_bytes());
        go.extend(export.as_bytes());
        go.extend(0_u16.to_be_bytes());
        self.stream.write_all(&go)?;
        loop {
            if self.receive_u64()? != OPTION_REPLY_MAGIC || self.receive_u32()? != OPTION_GO {
                return Err(malformed("no reply to our option"));
            }
            let (kind, len) = (self.receive_u32()?, self.receive_u32()?);
            if len > OPTION_REPLY_BYTES_MAX {
                return Err(malformed("an option reply that is too long"));
            }
            let mut data = vec![0; len as usize];
            self.stream.read_exact(&mut data)?;
            match kind {
                REPLY_ACK => return Ok(()),
                REPLY_INFO => {}
                kind if kind & REPLY_ERROR_BIT != 0 => {
                    let why = String::from_utf8_lossy(&data);
                    return Err(io::Error::other(format!("the NBD server refuses export {export}: {kind:#x} {why}")));
                }
                _ => return Err(malformed("an unknown option reply")),
            }
        }
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
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let mut request = Vec::with_capacity(28 + payload.len());
        request.extend(REQUEST_MAGIC.to_be_bytes());
        request.extend(0_u16.to_be_bytes());
        request.extend(command.to_be_bytes());
        request.extend(cookie.to_be_bytes());
        request.extend(offset.to_be_bytes());
        request.extend((len as u32).to_be_bytes());
        request.extend(payload);
        self.stream.write_all(&request)?;
        Ok(cookie)
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
