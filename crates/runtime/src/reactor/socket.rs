//! Making sockets: options, listening, addresses. Nothing here blocks.

use super::patience::SendState;
use socket2::{Domain, SockAddr, Socket, TcpKeepalive, Type};
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;
use thiserror::Error;

/// Kernel buffer of each direction: with less, a burst of 64 KiB replies stalls on the window.
const SOCKET_BUFFER_BYTES: usize = 4 << 20;

/// Connections waiting to be accepted.
const BACKLOG: i32 = 1024;

/// An idle connection whose peer's machine vanished is noticed after this and a few probes.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);

/// Why an address can't be listened on: what, why, and what to do.
#[derive(Debug, Error)]
pub enum ListenError {
    #[error("cannot listen on {address}: it is in use; stop the process that has it (`ss -lntxp` names it)")]
    InUse { address: String },
    #[error("cannot listen on {address}: permission denied; choose a port above 1023 or a directory you may write")]
    Denied { address: String },
    #[error("cannot listen on {address}: no interface of this machine has that address; `ip address` lists them")]
    NotLocal { address: String },
    #[error("cannot listen on {address}: {path} exists and is no socket; move it away or choose another path")]
    NotASocket { address: String, path: PathBuf },
    #[error("cannot listen on {address}: {source}; check the address and `ulimit -n`")]
    System { address: String, source: io::Error },
}

fn listen_error(address: String, source: io::Error) -> ListenError {
    match source.kind() {
        io::ErrorKind::AddrInUse => ListenError::InUse { address },
        io::ErrorKind::PermissionDenied => ListenError::Denied { address },
        io::ErrorKind::AddrNotAvailable => ListenError::NotLocal { address },
        _ => ListenError::System { address, source },
    }
}

pub(super) fn listen_tcp(address: SocketAddr) -> Result<(OwnedFd, SocketAddr), ListenError> {
    let listen = || {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        if address.is_ipv6() {
            socket.set_only_v6(address.ip() != std::net::Ipv6Addr::UNSPECIFIED)?;
        }
        // Before listening: the window's scale is settled when a connection is made.
        enlarge_buffers(&socket);
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        let bound = socket.local_addr()?.as_socket().expect("a TCP socket has an internet address");
        Ok((OwnedFd::from(socket), bound))
    };
    listen().map_err(|e| listen_error(address.to_string(), e))
}

/// A socket file that nobody listens on any more is replaced.
pub(super) fn listen_unix(path: &Path) -> Result<OwnedFd, ListenError> {
    let address = path.display().to_string();
    if let Ok(found) = fs::symlink_metadata(path) {
        if !found.file_type().is_socket() {
            return Err(ListenError::NotASocket { address, path: path.into() });
        }
        if UnixStream::connect(path).is_ok() {
            return Err(ListenError::InUse { address });
        }
        fs::remove_file(path).map_err(|e| listen_error(address.clone(), e))?;
    }
    let listen = || {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        socket.bind(&SockAddr::unix(path)?)?;
        // Nobody gets in before it listens.
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        socket.listen(BACKLOG)?;
        Ok(OwnedFd::from(socket))
    };
    listen().map_err(|e| listen_error(address, e))
}

/// Where to connect to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Target {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

pub(super) fn unconnected(target: &Target, peer_timeout: Duration) -> io::Result<(OwnedFd, Box<SockAddr>)> {
    let (domain, address) = match target {
        Target::Tcp(address) => (Domain::for_address(*address), SockAddr::from(*address)),
        Target::Unix(path) => (Domain::UNIX, SockAddr::unix(path)?),
    };
    let socket = Socket::new(domain, Type::STREAM, None)?;
    tune(&socket, matches!(target, Target::Tcp(_)).then_some(peer_timeout));
    Ok((OwnedFd::from(socket), Box::new(address)))
}

/// Options of an accepted connection; its peer's address, or process, where it has one, and its name for people.
pub(super) fn accepted(fd: &OwnedFd, peer_timeout: Duration) -> (Option<SocketAddr>, Option<u32>, String) {
    let socket = socket2::SockRef::from(fd);
    let peer = socket.peer_addr().ok().and_then(|a| a.as_socket());
    tune(&socket, peer.map(|_| peer_timeout));
    let Some(address) = peer else {
        let credentials = rustix::net::sockopt::socket_peercred(fd.as_fd());
        let process = credentials.ok().map(|credentials| credentials.pid.as_raw_nonzero().get());
        let name = process.map_or_else(|| "unix".to_string(), |process| format!("unix, process {process}"));
        return (None, process.and_then(|process| u32::try_from(process).ok()), name);
    };
    (peer, None, address.to_string())
}

/// Best effort: a connection without one of these options is slower, not wrong.
fn tune(socket: &Socket, tcp_timeout: Option<Duration>) {
    if let Some(timeout) = tcp_timeout {
        let _ = socket.set_tcp_nodelay(true);
        let _ = socket.set_tcp_user_timeout(Some(timeout));
        let keepalive = TcpKeepalive::new().with_time(KEEPALIVE_IDLE).with_interval(KEEPALIVE_INTERVAL);
        let _ = socket.set_tcp_keepalive(&keepalive);
    }
    enlarge_buffers(socket);
}

/// How long the peer may acknowledge nothing, from here on.
pub(super) fn set_peer_timeout(fd: &OwnedFd, timeout: Duration) {
    // It fails for no socket that has taken it before.
    let _ = socket2::SockRef::from(fd).set_tcp_user_timeout(Some(timeout));
}

/// How what was sent over TCP fares.
pub(super) fn send_state(fd: &OwnedFd) -> io::Result<SendState> {
    use std::os::fd::AsRawFd;
    // SAFETY: it is made of numbers alone, for which zero is a value.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes, and both outlive the call.
    let got = unsafe {
        libc::getsockopt(fd.as_raw_fd(), libc::SOL_TCP, libc::TCP_INFO, (&raw mut info).cast(), &raw mut len)
    };
    if got != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(SendState {
        in_flight: info.tcpi_unacked,
        unsent_bytes: info.tcpi_notsent_bytes,
        window_bytes: info.tcpi_snd_wnd,
        silence: Duration::from_millis(info.tcpi_last_ack_recv.into()),
    })
}

/// Sets both buffers where that makes them larger: below the system's bound, the kernel's own tuning does better.
fn enlarge_buffers(socket: &Socket) {
    for (forced, plain, bound) in [
        (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF, "/proc/sys/net/core/wmem_max"),
        (libc::SO_RCVBUFFORCE, libc::SO_RCVBUF, "/proc/sys/net/core/rmem_max"),
    ] {
        if set_buffer(socket, forced) {
            continue;
        }
        let allowed = fs::read_to_string(bound).ok().and_then(|text| text.trim().parse::<usize>().ok());
        if allowed.is_some_and(|bytes| bytes >= SOCKET_BUFFER_BYTES) {
            set_buffer(socket, plain);
        }
    }
}

fn set_buffer(socket: &Socket, option: libc::c_int) -> bool {
    use std::os::fd::AsRawFd;
    let bytes = SOCKET_BUFFER_BYTES as libc::c_int;
    // SAFETY: the option's value is one int, which outlives the call.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            (&raw const bytes).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    set == 0
}
