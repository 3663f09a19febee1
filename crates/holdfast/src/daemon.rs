//! What a process of a local grid does before it serves.

use anyhow::{Context, Result};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::{Duration, Instant};

/// How long what a killed process held may still be taken: the kernel ends its operations in flight first.
const PREDECESSOR_MAX: Duration = Duration::from_secs(3);

const PACE: Duration = Duration::from_millis(10);

/// With `--daemon`: leaves the session of whoever started it, so that closing a terminal does not end the grid.
pub fn begin(is_daemon: bool) -> Result<()> {
    if is_daemon {
        rustix::process::setsid().context("cannot leave the terminal's session")?;
    }
    Ok(())
}

/// Lets this process have as many open files as it may, whatever whoever started it was content with; how many that
/// are.
pub fn raise_open_files() -> usize {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
        if let Err(error) = setrlimit(Resource::Nofile, raised) {
            crate::logger::warn(format_args!("the limit of open files can't be raised: {error}"));
        }
    }
    let count = getrlimit(Resource::Nofile).current;
    count.and_then(|count| usize::try_from(count).ok()).unwrap_or(OPEN_FILES_ANY)
}

/// What is reckoned with where there is no limit.
const OPEN_FILES_ANY: usize = 1 << 20;

/// Names the socket on which systemd wants to hear that a service is ready.
pub const NOTIFY_SOCKET: &str = "NOTIFY_SOCKET";

/// Held by a thread of a reactor: what one leaves half done nobody may go on with.
pub struct EndsTheProcess;

impl Drop for EndsTheProcess {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

/// Tells systemd that this process serves, where it waits for that.
pub fn tell_ready() {
    let Some(path) = std::env::var_os(NOTIFY_SOCKET) else { return };
    let bytes = path.as_bytes();
    let address = match bytes.strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(&path),
    };
    let sent = address.and_then(|address| UnixDatagram::unbound()?.send_to_addr(b"READY=1", &address));
    if let Err(error) = sent {
        crate::logger::warn(format_args!("systemd can't be told that this process is ready: {error}"));
    }
}

/// Repeats `attempt` for a while where it failed because something is in use: a process that has just been killed lets
/// go of its files and ports a little after it is gone.
pub fn outwait<T, E>(mut attempt: impl FnMut() -> Result<T, E>, is_in_use: impl Fn(&E) -> bool) -> Result<T, E> {
    let end = Instant::now() + PREDECESSOR_MAX;
    loop {
        match attempt() {
            Err(error) if is_in_use(&error) && Instant::now() < end => std::thread::sleep(PACE),
            other => return other,
        }
    }
}
