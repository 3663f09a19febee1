//! One way to a volume: a TCP connection that can be left at any moment, and for good.
//!
//! Who leaves a connection that is silent must take back what is still on its way: a kernel goes on sending what was written to a
//! socket that was closed, and a write that arrives after its repetition elsewhere would undo later ones. So a path that is left
//! is reset (`SO_LINGER` of zero), once neither of its threads is inside of it.

use anyhow::{Context, Result, ensure};
use holdfast_lab::nbd::{Client, Stream};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a connection may take to be made, and an export to be opened.
const CONNECT_MAX: Duration = Duration::from_secs(1);
const HANDSHAKE_MAX: Duration = Duration::from_secs(5);

/// Pace of looking whether the path was left.
const LOOK_PACE: Duration = Duration::from_millis(100);

/// A handle of a path; the connection ends with the last one.
#[derive(Clone, Debug)]
pub struct Path {
    stream: Arc<TcpStream>,
    left: Arc<AtomicBool>,
    /// While the export is being opened.
    until: Option<Instant>,
}

impl Path {
    /// Opens an export of a server, which must have the size that is expected.
    pub fn open(server: SocketAddr, export: &str, size_bytes: u64, structured: bool) -> Result<Client<Path>> {
        let stream = TcpStream::connect_timeout(&server, CONNECT_MAX).with_context(|| format!("to {server}"))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(LOOK_PACE))?;
        stream.set_write_timeout(Some(LOOK_PACE))?;
        let until = Some(Instant::now() + HANDSHAKE_MAX);
        let path = Path { stream: Arc::new(stream), left: Arc::new(AtomicBool::new(false)), until };
        let mut client = Client::open(path, export, structured)?;
        client.stream.until = None;
        let size = client.size_bytes;
        ensure!(size == size_bytes, "export {export} has {size} bytes, not {size_bytes}");
        Ok(client)
    }

    /// Ends it, and takes back what has not arrived at the other end yet.
    pub fn leave(&self) {
        // Whether a reset can be had makes no difference to a socket that is broken.
        let _ = rustix::net::sockopt::set_socket_linger(&*self.stream, Some(Duration::ZERO));
        self.left.store(true, Ordering::Relaxed);
    }

    /// Repeats what only waited, until there is an answer, or the path was left.
    fn patiently(&self, mut act: impl FnMut(&TcpStream) -> io::Result<usize>) -> io::Result<usize> {
        loop {
            match act(&self.stream) {
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    if self.left.load(Ordering::Relaxed) {
                        return Err(ErrorKind::UnexpectedEof.into());
                    }
                    if self.until.is_some_and(|until| Instant::now() > until) {
                        return Err(ErrorKind::TimedOut.into());
                    }
                }
                done => return done,
            }
        }
    }
}

impl Read for Path {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.patiently(|mut stream| stream.read(buffer))
    }
}

impl Write for Path {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.patiently(|mut stream| stream.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Stream for Path {
    fn second(&self) -> io::Result<Path> {
        Ok(self.clone())
    }
}
