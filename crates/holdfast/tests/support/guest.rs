//! A small NBD client of a test.

use super::{Grid, until};
use socket2::{Domain, Socket, Type};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;

pub const READ: u16 = 0;
pub const WRITE: u16 = 1;
pub const FLUSH: u16 = 3;
pub const TRIM: u16 = 4;
pub const ZEROES: u16 = 6;

pub const BLOCK: usize = 4096;

/// A client that asks without waiting, and sees every error number.
pub struct Guest {
    stream: Box<dyn Stream>,
    next_cookie: u64,
}

trait Stream: Read + Write + Send {}
impl<T: Read + Write + Send> Stream for T {}

impl Guest {
    /// By the unix socket.
    pub fn connect(grid: &Grid, export: &str) -> Guest {
        Guest::open(Box::new(UnixStream::connect(grid.path("nbd.sock")).unwrap()), export)
    }

    /// From an address of one's own.
    pub fn connect_tcp(from: [u8; 4], to: SocketAddr, export: &str) -> Guest {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::from((from, 0)).into()).unwrap();
        socket.connect(&to.into()).unwrap();
        Guest::open(Box::new(TcpStream::from(socket)), export)
    }

    fn open(stream: Box<dyn Stream>, export: &str) -> Guest {
        let mut guest = Guest { stream, next_cookie: 1 };
        let mut greeting = [0; 18];
        guest.stream.read_exact(&mut greeting).unwrap();
        assert_eq!(&greeting[..8], b"NBDMAGIC");
        // Fixed newstyle, no zeroes; then GO.
        let mut hello = 3_u32.to_be_bytes().to_vec();
        hello.extend(b"IHAVEOPT");
        hello.extend(7_u32.to_be_bytes());
        hello.extend((export.len() as u32 + 6).to_be_bytes());
        hello.extend((export.len() as u32).to_be_bytes());
        hello.extend(export.as_bytes());
        hello.extend(0_u16.to_be_bytes());
        guest.stream.write_all(&hello).unwrap();
        loop {
            let mut head = [0; 20];
            guest.stream.read_exact(&mut head).unwrap();
            let kind = u32::from_be_bytes(head[12..16].try_into().unwrap());
            let mut data = vec![0; u32::from_be_bytes(head[16..].try_into().unwrap()) as usize];
            guest.stream.read_exact(&mut data).unwrap();
            assert!(kind < 1 << 31, "{}", String::from_utf8_lossy(&data));
            if kind == 1 {
                return guest;
            }
        }
    }

    pub fn ask(&mut self, command: u16, offset: u64, len: usize, data: &[u8]) -> u64 {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let mut bytes = 0x2560_9513_u32.to_be_bytes().to_vec();
        bytes.extend(0_u16.to_be_bytes());
        bytes.extend(command.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        bytes.extend((len as u32).to_be_bytes());
        bytes.extend(data);
        self.stream.write_all(&bytes).unwrap();
        cookie
    }

    /// The next answer: whose it is, and the error number.
    pub fn answer(&mut self) -> (u64, u32) {
        let mut head = [0; 16];
        self.stream.read_exact(&mut head).unwrap();
        assert_eq!(head[..4], 0x6744_6698_u32.to_be_bytes());
        (u64::from_be_bytes(head[8..].try_into().unwrap()), u32::from_be_bytes(head[4..8].try_into().unwrap()))
    }

    /// Writes a block of this byte; the error number.
    pub fn write(&mut self, offset: u64, byte: u8) -> u32 {
        let cookie = self.ask(WRITE, offset, BLOCK, &[byte; BLOCK]);
        let (of, error) = self.answer();
        assert_eq!(of, cookie);
        error
    }

    /// The byte that a block is full of.
    pub fn read(&mut self, offset: u64) -> Result<u8, u32> {
        let cookie = self.ask(READ, offset, BLOCK, &[]);
        let (of, error) = self.answer();
        assert_eq!(of, cookie);
        if error != 0 {
            return Err(error);
        }
        Ok(self.block())
    }

    /// Reads a block, whatever it holds.
    pub fn read_any(&mut self, offset: u64) -> Result<(), u32> {
        let cookie = self.ask(READ, offset, BLOCK, &[]);
        let (of, error) = self.answer();
        assert_eq!(of, cookie);
        if error != 0 {
            return Err(error);
        }
        self.stream.read_exact(&mut [0; BLOCK]).unwrap();
        Ok(())
    }

    pub fn block(&mut self) -> u8 {
        let mut block = [0; BLOCK];
        self.stream.read_exact(&mut block).unwrap();
        assert!(block.iter().all(|byte| *byte == block[0]), "a block of one write");
        block[0]
    }
}

/// A write of this process that is under way, and stays so. Nobody may follow its client as one that is quiet, however
/// long a busy machine keeps that from writing.
pub struct Held<'a> {
    grid: &'a Grid,
    volume: &'a str,
    guest: Guest,
    cookie: u64,
}

impl Held<'_> {
    /// Behind the first 8 MiB of a volume that the grid's own host serves.
    pub fn begin<'a>(grid: &'a Grid, volume: &'a str) -> Held<'a> {
        grid.ok(&format!("volume filter add {volume} delay:write=3600s,range=8MiB..9MiB"));
        let mut guest = Guest::connect(grid, volume);
        let cookie = guest.ask(WRITE, 8 << 20, BLOCK, &[1; BLOCK]);
        let told = || grid.json(&format!("volume filter list {volume}"));
        until("a write is under way", || told()["filters"][0]["counters"]["held now"] == 1);
        Held { grid, volume, guest, cookie }
    }

    pub fn end(self) {
        self.grid.ok(&format!("volume filter remove {}", self.volume));
        self.answered();
    }

    /// A hand-over has it done.
    pub fn answered(mut self) {
        assert_eq!(self.guest.answer(), (self.cookie, 0));
    }
}
