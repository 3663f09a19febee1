//! A small NBD client: fixed newstyle handshake, simple or structured replies, any number of requests in flight.
//!
//! One half sends, the other receives, each on a thread of its own if need be. The receiving half keeps no table of
//! requests: a [`Cookie`] carries the length of the read it belongs to.

use anyhow::{Context, Result, bail, ensure};
use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

const MAGIC: u64 = 0x4e42_444d_4147_4943;
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

const OPT_GO: u32 = 7;
const OPT_STRUCTURED_REPLY: u32 = 8;

const REP_ACK: u32 = 1;
const REP_INFO: u32 = 3;
const REP_ERROR_BIT: u32 = 1 << 31;

const INFO_EXPORT: u16 = 0;

const FLAG_FUA: u16 = 1;

/// Longest reply that is believed.
const REPLY_BYTES_MAX: u32 = 64 << 20;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Command {
    Read,
    Write,
    Disconnect,
    Flush,
    Trim,
    WriteZeroes,
}

impl Command {
    fn code(self) -> u16 {
        match self {
            Command::Read => 0,
            Command::Write => 1,
            Command::Disconnect => 2,
            Command::Flush => 3,
            Command::Trim => 4,
            Command::WriteZeroes => 6,
        }
    }
}

/// Names a request; the reply brings it back.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Cookie {
    pub slot: u32,
    /// Bytes that the answer must carry: the length of a read, else zero.
    pub read_bytes: u32,
}

impl Cookie {
    fn word(self) -> u64 {
        (u64::from(self.slot) << 32) | u64::from(self.read_bytes)
    }

    fn from_word(word: u64) -> Cookie {
        Cookie { slot: (word >> 32) as u32, read_bytes: word as u32 }
    }
}

/// A request's bytes on the wire.
pub fn encode(command: Command, fua: bool, slot: u32, offset: u64, len: u32, payload: &[u8]) -> Vec<u8> {
    let cookie = Cookie { slot, read_bytes: if command == Command::Read { len } else { 0 } };
    let mut bytes = Vec::with_capacity(28 + payload.len());
    bytes.extend(REQUEST_MAGIC.to_be_bytes());
    bytes.extend((if fua { FLAG_FUA } else { 0 }).to_be_bytes());
    bytes.extend(command.code().to_be_bytes());
    bytes.extend(cookie.word().to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// One end of a conversation, of which a second handle can be had.
pub trait Stream: Read + Write + Sized {
    fn second(&self) -> std::io::Result<Self>;
}

impl Stream for UnixStream {
    fn second(&self) -> std::io::Result<UnixStream> {
        self.try_clone()
    }
}

/// An export that is open, before anything is asked of it.
pub struct Client<S = UnixStream> {
    pub stream: S,
    pub size_bytes: u64,
    pub structured: bool,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reply {
    pub cookie: Cookie,
    /// Zero, or the protocol's error number.
    pub error: u32,
    pub message: String,
    /// The bytes of a read.
    pub data: Vec<u8>,
    /// Where they lie, if the server said so.
    pub data_offset: Option<u64>,
}

impl Client {
    /// Opens `export` of the server at `socket`, with structured replies if asked for and offered.
    pub fn connect(socket: &Path, export: &str, structured: bool) -> Result<Client> {
        let stream = UnixStream::connect(socket).with_context(|| format!("cannot connect to {}", socket.display()))?;
        Client::open(stream, export, structured)
    }
}

impl<S: Stream> Client<S> {
    /// One half that sends, and one that receives.
    pub fn split(self) -> Result<(S, Receiver<S>)> {
        Ok((self.stream.second()?, self.into_receiver()))
    }
}

impl<S: Read + Write> Client<S> {
    /// Opens `export` of the server at the other end, with structured replies if asked for and offered.
    pub fn open(stream: S, export: &str, structured: bool) -> Result<Client<S>> {
        let mut client = Client { stream, size_bytes: 0, structured: false };
        client.handshake(export, structured).with_context(|| format!("opening export '{export}'"))?;
        Ok(client)
    }

    /// For who sends and receives in turn, by the receiver's stream.
    pub fn into_receiver(self) -> Receiver<S> {
        Receiver { stream: self.stream, partial: HashMap::new() }
    }

    fn handshake(&mut self, export: &str, structured: bool) -> Result<()> {
        ensure!(self.read_u64()? == MAGIC && self.read_u64()? == OPTION_MAGIC, "the server's greeting is not NBD's");
        let flags = self.read_u16()?;
        ensure!(flags & 3 == 3, "the server lacks fixed newstyle or no-zeroes (flags {flags:#x})");
        self.stream.write_all(&3_u32.to_be_bytes())?;
        if structured {
            self.send_option(OPT_STRUCTURED_REPLY, &[])?;
            self.structured = self.read_option_reply(OPT_STRUCTURED_REPLY)?.0 == REP_ACK;
        }
        let mut body = Vec::from((export.len() as u32).to_be_bytes());
        body.extend(export.as_bytes());
        body.extend(0_u16.to_be_bytes());
        self.send_option(OPT_GO, &body)?;
        loop {
            let (kind, payload) = self.read_option_reply(OPT_GO)?;
            match kind {
                REP_ACK => break,
                REP_INFO if payload.starts_with(&INFO_EXPORT.to_be_bytes()) && payload.len() == 12 => {
                    self.size_bytes = u64::from_be_bytes(payload[2..10].try_into().expect("eight bytes"));
                }
                REP_INFO => {}
                _ => bail!("refused ({kind:#x}): {}", String::from_utf8_lossy(&payload)),
            }
        }
        ensure!(self.size_bytes > 0, "the server did not tell the export's size");
        Ok(())
    }

    fn send_option(&mut self, option: u32, body: &[u8]) -> Result<()> {
        let mut bytes = Vec::from(OPTION_MAGIC.to_be_bytes());
        bytes.extend(option.to_be_bytes());
        bytes.extend((body.len() as u32).to_be_bytes());
        bytes.extend(body);
        Ok(self.stream.write_all(&bytes)?)
    }

    fn read_option_reply(&mut self, option: u32) -> Result<(u32, Vec<u8>)> {
        ensure!(self.read_u64()? == OPTION_REPLY_MAGIC, "not an option reply");
        let (about, kind, len) = (self.read_u32()?, self.read_u32()?, self.read_u32()?);
        ensure!(about == option, "a reply about option {about} to option {option}");
        ensure!(len <= REPLY_BYTES_MAX, "an option reply of {len} bytes");
        let mut payload = vec![0; len as usize];
        self.stream.read_exact(&mut payload)?;
        ensure!(kind & REP_ERROR_BIT != 0 || kind == REP_ACK || kind == REP_INFO, "unknown option reply {kind}");
        Ok((kind, payload))
    }

    fn read_u16(&mut self) -> Result<u16> {
        Ok(u16::from_be_bytes(read_array(&mut self.stream)?))
    }

    fn read_u32(&mut self) -> Result<u32> {
        Ok(u32::from_be_bytes(read_array(&mut self.stream)?))
    }

    fn read_u64(&mut self) -> Result<u64> {
        Ok(u64::from_be_bytes(read_array(&mut self.stream)?))
    }
}

fn read_array<const N: usize>(stream: &mut impl Read) -> Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// A structured reply of which not all chunks have come.
#[derive(Default)]
struct Partial {
    /// Offset and bytes of each chunk, in the order they came.
    pieces: Vec<(u64, Vec<u8>)>,
    error: u32,
    message: String,
}

/// Receives replies, in whatever order the server gives them.
pub struct Receiver<S = UnixStream> {
    pub stream: S,
    partial: HashMap<Cookie, Partial>,
}

impl<S: Read> Receiver<S> {
    /// The next whole reply; `None` when the server has closed the connection between two messages or cut it.
    pub fn receive(&mut self) -> Result<Option<Reply>> {
        loop {
            let magic = match self.read_magic() {
                Ok(magic) => magic,
                Err(error) if is_cut(&error) => return Ok(None),
                Err(error) => return Err(error),
            };
            let reply = match magic {
                SIMPLE_REPLY_MAGIC => self.simple().map(Some),
                STRUCTURED_REPLY_MAGIC => self.chunk(),
                _ => bail!("{magic:#x} is not the magic number of a reply"),
            };
            match reply {
                Ok(Some(reply)) => return Ok(Some(reply)),
                Ok(None) => {}
                Err(error) if is_cut(&error) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }

    fn read_magic(&mut self) -> Result<u32> {
        Ok(u32::from_be_bytes(read_array(&mut self.stream)?))
    }

    fn simple(&mut self) -> Result<Reply> {
        let head: [u8; 12] = read_array(&mut self.stream)?;
        let error = u32::from_be_bytes(head[..4].try_into().expect("four bytes"));
        let cookie = Cookie::from_word(u64::from_be_bytes(head[4..].try_into().expect("eight bytes")));
        let mut data = vec![0; if error == 0 { cookie.read_bytes as usize } else { 0 }];
        self.stream.read_exact(&mut data)?;
        Ok(Reply { cookie, error, message: String::new(), data, data_offset: None })
    }

    /// Takes one chunk of a structured reply; gives the reply when it was the last.
    fn chunk(&mut self) -> Result<Option<Reply>> {
        let head: [u8; 16] = read_array(&mut self.stream)?;
        let is_last = head[1] & 1 != 0;
        let kind = u16::from_be_bytes([head[2], head[3]]);
        let cookie = Cookie::from_word(u64::from_be_bytes(head[4..12].try_into().expect("eight bytes")));
        let len = u32::from_be_bytes(head[12..].try_into().expect("four bytes"));
        ensure!(len <= REPLY_BYTES_MAX, "a chunk of {len} bytes");
        let mut body = vec![0; len as usize];
        self.stream.read_exact(&mut body)?;
        let partial = self.partial.entry(cookie).or_default();
        match kind {
            0 => ensure!(body.is_empty(), "an empty chunk with a body"),
            1 | 2 => partial.fill(kind == 2, &body)?,
            0x8001 | 0x8002 => {
                ensure!(body.len() >= 6, "an error chunk of {len} bytes");
                partial.error = u32::from_be_bytes(body[..4].try_into().expect("four bytes"));
                ensure!(partial.error != 0, "an error chunk without an error");
                partial.message = String::from_utf8_lossy(&body[6..]).into_owned();
            }
            _ => bail!("unknown chunk type {kind:#x}"),
        }
        if !is_last {
            return Ok(None);
        }
        let done = self.partial.remove(&cookie).expect("it was just put there");
        done.into_reply(cookie).map(Some)
    }
}

impl Partial {
    fn fill(&mut self, is_hole: bool, body: &[u8]) -> Result<()> {
        ensure!(body.len() >= 8, "a data chunk without an offset");
        let offset = u64::from_be_bytes(body[..8].try_into().expect("eight bytes"));
        let bytes = if is_hole {
            ensure!(body.len() == 12, "a hole chunk of {} bytes", body.len());
            let len = u32::from_be_bytes(body[8..].try_into().expect("four bytes"));
            ensure!(len <= REPLY_BYTES_MAX, "a hole of {len} bytes");
            vec![0; len as usize]
        } else {
            body[8..].to_vec()
        };
        self.pieces.push((offset, bytes));
        Ok(())
    }

    /// Puts the chunks together: they may come in any order, and must cover the read once.
    fn into_reply(mut self, cookie: Cookie) -> Result<Reply> {
        self.pieces.sort_by_key(|(offset, _)| *offset);
        let data_offset = self.pieces.first().map(|(offset, _)| *offset);
        let mut data = Vec::with_capacity(cookie.read_bytes as usize);
        for (offset, bytes) in &self.pieces {
            let due = data_offset.expect("there is a first piece") + data.len() as u64;
            ensure!(*offset == due, "a read's chunks leave a gap or overlap at {offset}");
            data.extend(bytes);
        }
        let complete = self.error != 0 || data.len() == cookie.read_bytes as usize;
        ensure!(complete, "a read of {} bytes was answered with {}", cookie.read_bytes, data.len());
        Ok(Reply { cookie, error: self.error, message: self.message, data, data_offset })
    }
}

fn is_cut(error: &anyhow::Error) -> bool {
    let kind = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
    matches!(kind, Some(ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe))
}
