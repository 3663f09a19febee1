//! A guest of a test: asks without waiting, and sees every error number. What it does not expect ends the test.

use crate::grid::Grid;
use crate::nbd::{self, Client, Command, Receiver};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;

/// Bytes of a block.
pub const BLOCK: usize = 4096;

trait Line: Read + Write + Send {}
impl<T: Read + Write + Send> Line for T {}

/// One connection to a volume.
pub struct Guest {
    line: Receiver<Box<dyn Line>>,
    next_slot: u32,
    /// The bytes of the last read that was answered.
    data: Vec<u8>,
}

impl Guest {
    /// Connects by the unix socket of the grid's host.
    ///
    /// # Panics
    ///
    /// As all of this, where the export can't be opened.
    pub fn connect(grid: &Grid, export: &str) -> Guest {
        Guest::open(Box::new(UnixStream::connect(grid.nbd_socket()).expect("the host's socket")), export)
    }

    /// Connects from an address of its own, one of this machine's.
    pub fn connect_tcp(from: [u8; 4], to: SocketAddr, export: &str) -> Guest {
        Guest::open(Box::new(connect_from(from, to).expect("the host's address")), export)
    }

    fn open(line: Box<dyn Line>, export: &str) -> Guest {
        let client = Client::open(line, export, false).unwrap_or_else(|error| panic!("{error:#}"));
        Guest { line: client.into_receiver(), next_slot: 1, data: Vec::new() }
    }

    /// Sends a request; returns its name.
    pub fn ask(&mut self, command: Command, offset: u64, len: usize, data: &[u8]) -> u32 {
        let slot = self.next_slot;
        self.next_slot += 1;
        let len = u32::try_from(len).expect("a request's length");
        let bytes = nbd::encode(command, false, slot, offset, len, data);
        self.line.stream.write_all(&bytes).expect("the host takes requests");
        slot
    }

    /// The next answer: its request's name, and the error number.
    pub fn answer(&mut self) -> (u32, u32) {
        let reply = self.line.receive().expect("an answer").expect("the host does not close");
        self.data = reply.data;
        (reply.cookie.slot, reply.error)
    }

    /// Asks, and waits for the answer; its error number.
    fn done(&mut self, command: Command, offset: u64, len: usize, data: &[u8]) -> u32 {
        let slot = self.ask(command, offset, len, data);
        let (of, error) = self.answer();
        assert_eq!(of, slot, "nothing else was asked");
        error
    }

    /// Writes a block of this byte; the error number.
    pub fn write(&mut self, offset: u64, byte: u8) -> u32 {
        self.done(Command::Write, offset, BLOCK, &[byte; BLOCK])
    }

    /// Reads a block, and tells the byte that it is full of.
    pub fn read(&mut self, offset: u64) -> Result<u8, u32> {
        self.read_any(offset).map(|()| self.block())
    }

    /// Reads a block, whatever it holds.
    pub fn read_any(&mut self, offset: u64) -> Result<(), u32> {
        match self.done(Command::Read, offset, BLOCK, &[]) {
            0 => Ok(()),
            error => Err(error),
        }
    }

    /// The byte that the last block read is full of.
    pub fn block(&self) -> u8 {
        assert_eq!(self.data.len(), BLOCK, "a block was read");
        assert!(self.data.iter().all(|byte| *byte == self.data[0]), "a block of one write");
        self.data[0]
    }
}

/// A connection from one of this machine's addresses.
pub fn connect_from(from: [u8; 4], to: SocketAddr) -> io::Result<TcpStream> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with};
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    bind(&socket, &SocketAddr::from((from, 0)))?;
    connect(&socket, &to)?;
    Ok(TcpStream::from(socket))
}
