//! An NBD server over memory: the smallest shell around [`holdfast_frontend::nbd::Session`].
//!
//! ```text
//! cargo run --release --example nbd_memory -- /tmp/nbd.sock scratch=1024 fixed=64:ro
//! nbdinfo --list nbd+unix:///?socket=/tmp/nbd.sock
//! ```
//!
//! Each `NAME=MIB[:ro]` is an export. One thread serves one connection, with blocking reads and writes. Requests that
//! arrive together are answered newest first, as a real volume may: NBD clients match replies by cookie.

use holdfast_base::{
    BlockData, BlockError, BlockOp, BlockReply, BlockRequest, BufMut, ByteRange, Effects, ExportInfo, ObjectId,
    StatusExtent,
};
use holdfast_frontend::nbd::{Effect, Exports, Refusal, RefusalKind, Session, SessionConfig};
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Mutex, PoisonError};

/// What is allocated, and given back, as one.
const CHUNK_BYTES: usize = 64 << 10;

/// What one receive takes, unless a large payload goes straight to its buffer.
const RECEIVE_BYTES: usize = 256 << 10;

type Chunk = Box<[u8]>;

/// A sparse volume in memory.
struct Volume {
    info: ExportInfo,
    /// `None` is a hole.
    chunks: Mutex<Vec<Option<Chunk>>>,
}

/// One chunk's part of a range: which chunk, and which of its bytes.
fn parts(range: ByteRange) -> impl Iterator<Item = (usize, std::ops::Range<usize>)> {
    let (mut at, end) = (range.offset as usize, (range.offset + range.len) as usize);
    std::iter::from_fn(move || {
        let start = at % CHUNK_BYTES;
        let len = (CHUNK_BYTES - start).min(end - at);
        let part = (len > 0).then_some((at / CHUNK_BYTES, start..start + len));
        at += len;
        part
    })
}

impl Volume {
    fn new(info: ExportInfo) -> Volume {
        let count = (info.size_bytes as usize).div_ceil(CHUNK_BYTES);
        Volume { info, chunks: Mutex::new(vec![None; count]) }
    }

    /// Does what a request asks; the session has checked that it lies within the volume.
    fn serve(&self, op: BlockOp) -> Result<BlockData, BlockError> {
        let mut chunks = self.chunks.lock().unwrap_or_else(PoisonError::into_inner);
        match op {
            BlockOp::Read(range) => {
                let mut data = BufMut::new(range.len as usize);
                let mut rest = &mut data[..];
                for (index, part) in parts(range) {
                    let (to, after) = rest.split_at_mut(part.len());
                    match &chunks[index] {
                        Some(chunk) => to.copy_from_slice(&chunk[part]),
                        None => to.fill(0),
                    }
                    rest = after;
                }
                Ok(BlockData::Data(vec![data.freeze()]))
            }
            BlockOp::Write { offset, data } => {
                let mut rest = &data[..];
                for (index, part) in parts(ByteRange::new(offset, data.len() as u64)) {
                    let (from, after) = rest.split_at(part.len());
                    let chunk = chunks[index].get_or_insert_with(|| vec![0; CHUNK_BYTES].into_boxed_slice());
                    chunk[part].copy_from_slice(from);
                    rest = after;
                }
                Ok(BlockData::Done)
            }
            BlockOp::Discard(range) | BlockOp::WriteZeroes(range) => {
                for (index, part) in parts(range) {
                    if part.len() == CHUNK_BYTES {
                        chunks[index] = None;
                    } else if let Some(chunk) = &mut chunks[index] {
                        chunk[part].fill(0);
                    }
                }
                Ok(BlockData::Done)
            }
            BlockOp::Status(range) => {
                let extent = |(index, part): (usize, std::ops::Range<usize>)| StatusExtent {
                    len: part.len() as u64,
                    set: chunks[index].is_some(),
                };
                Ok(BlockData::Status(parts(range).map(extent).collect()))
            }
            BlockOp::Flush | BlockOp::Prefetch(_) => Ok(BlockData::Done),
            // There are no snapshots.
            BlockOp::Changes { .. } => Err(BlockError::Invalid),
        }
    }
}

struct Catalog {
    volumes: Vec<Volume>,
}

impl Catalog {
    fn volume(&self, name: &str) -> Option<&Volume> {
        self.volumes.iter().find(|volume| volume.info.name == name)
    }
}

impl Exports for Catalog {
    fn list(&self) -> Vec<ExportInfo> {
        self.volumes.iter().map(|volume| volume.info.clone()).collect()
    }

    fn find(&self, name: &str) -> Option<ExportInfo> {
        self.volume(name).map(|volume| volume.info.clone())
    }

    fn snapshots(&self, _export: &str) -> Vec<(String, ObjectId)> {
        Vec::new()
    }
}

/// One connection: the machine, and what its effects act on.
struct Connection<'a> {
    catalog: &'a Catalog,
    stream: &'a UnixStream,
    session: Session,
    out: Effects<Effect>,
    volume: Option<&'a Volume>,
    requests: Vec<BlockRequest>,
}

impl<'a> Connection<'a> {
    fn new(catalog: &'a Catalog, stream: &'a UnixStream) -> Connection<'a> {
        let mut out = Effects::new();
        let session = Session::new(SessionConfig::default(), &mut out);
        Connection { catalog, stream, session, out, volume: None, requests: Vec::new() }
    }

    fn run(mut self) -> io::Result<()> {
        let mut buffer = vec![0; RECEIVE_BYTES];
        while self.carry_out()? {
            assert!(self.session.wants_input(), "all is answered and sent");
            if let Some((mut sink, filled)) = self.session.take_sink() {
                match self.stream.read(&mut sink[filled..])? {
                    0 => return Ok(()),
                    count => self.session.give_sink(sink, filled + count, &mut self.out),
                }
            } else {
                match self.stream.read(&mut buffer)? {
                    0 => return Ok(()),
                    count => self.session.on_bytes(&buffer[..count], self.catalog, &mut self.out),
                }
            }
        }
        Ok(())
    }

    /// Carries out effects, and what follows from them, until the session waits for its client. False at the end.
    fn carry_out(&mut self) -> io::Result<bool> {
        loop {
            if self.out.is_empty() {
                let Some(request) = self.requests.pop() else { return Ok(true) };
                let volume = self.volume.expect("requests come to an open export");
                let reply = BlockReply { token: request.token, result: volume.serve(request.op) };
                self.session.on_reply(reply, &mut self.out);
            }
            if !self.carry_out_pushed()? {
                return Ok(false);
            }
        }
    }

    fn carry_out_pushed(&mut self) -> io::Result<bool> {
        let mut socket = BufWriter::new(self.stream);
        let mut sent = 0;
        let mut send = |bytes: &[u8]| {
            sent += bytes.len();
            socket.write_all(bytes)
        };
        for effect in self.out.take() {
            match effect {
                Effect::Send(head) => send(&head)?,
                Effect::SendBuf(buf) => send(&buf)?,
                Effect::Move { export } => unreachable!("{export} is nowhere else"),
                Effect::Request(request) => self.requests.push(request),
                Effect::Open { export } => {
                    self.volume = self.catalog.volume(&export);
                    let gone = || Refusal { kind: RefusalKind::Unknown, message: format!("{export} is gone") };
                    let result = self.volume.map(|volume| volume.info.clone()).ok_or_else(gone);
                    self.session.on_opened(result, self.catalog, &mut self.out);
                }
                Effect::StartTls => unreachable!("the session's policy is to refuse TLS"),
                Effect::Close => {
                    socket.flush()?;
                    return Ok(false);
                }
            }
        }
        socket.flush()?;
        self.session.on_sent(sent, self.catalog, &mut self.out);
        Ok(true)
    }
}

fn parse_export(text: &str) -> Option<Volume> {
    let (name, size) = text.split_once('=')?;
    let (mib, read_only) = match size.strip_suffix(":ro") {
        Some(mib) => (mib, true),
        None => (size, false),
    };
    let size_bytes = mib.parse::<u64>().ok()?.checked_mul(1 << 20)?;
    let description = format!("{mib} MiB of memory");
    Some(Volume::new(ExportInfo { name: name.to_owned(), description, size_bytes, read_only }))
}

fn main() -> io::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let socket = arguments.next();
    let volumes: Option<Vec<Volume>> = arguments.map(|text| parse_export(&text)).collect();
    let (Some(socket), Some(volumes)) = (socket, volumes) else {
        eprintln!("usage: nbd_memory SOCKET NAME=MIB[:ro] ...");
        std::process::exit(2);
    };
    let catalog = Catalog { volumes };
    let listener = UnixListener::bind(&socket)?;
    std::thread::scope(|scope| {
        for stream in listener.incoming() {
            let (stream, catalog) = (stream?, &catalog);
            scope.spawn(move || {
                match Connection::new(catalog, &stream).run() {
                    // A client that aborts may leave without waiting for the answer.
                    Err(error) if error.kind() != io::ErrorKind::BrokenPipe => eprintln!("connection lost: {error}"),
                    _ => {}
                }
            });
        }
        Ok(())
    })
}
