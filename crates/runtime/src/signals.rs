//! SIGTERM and SIGINT as events of one reactor: the handler notes the signal and wakes it.

use crate::mailbox::Waker;
use std::io;
use std::os::fd::IntoRawFd;
use std::sync::atomic::{AtomicI32, Ordering};

static PENDING: AtomicI32 = AtomicI32::new(0);
static WAKE_FD: AtomicI32 = AtomicI32::new(-1);

extern "C" fn on_signal(signal: libc::c_int) {
    PENDING.store(signal, Ordering::SeqCst);
    let fd = WAKE_FD.load(Ordering::SeqCst);
    let one = 1_u64;
    // SAFETY: write is async-signal-safe; the descriptor was leaked for it and `one` outlives the call. errno is put
    // back, since the interrupted code may be about to read its own.
    unsafe {
        let errno = libc::__errno_location();
        let saved = *errno;
        libc::write(fd, (&raw const one).cast(), 8);
        *errno = saved;
    }
}

/// Routes SIGTERM and SIGINT to the reactor of `waker`; the last caller gets them. SIGPIPE is ignored from here on.
pub(crate) fn route_to(waker: &Waker) -> io::Result<()> {
    // Leaked on purpose: the handler may run until the process ends.
    WAKE_FD.store(waker.duplicate()?.into_raw_fd(), Ordering::SeqCst);
    let handler: extern "C" fn(libc::c_int) = on_signal;
    for (signal, action) in
        [(libc::SIGTERM, handler as usize), (libc::SIGINT, handler as usize), (libc::SIGPIPE, libc::SIG_IGN)]
    {
        // SAFETY: a zeroed sigaction is a valid one (no flags, empty mask); the handler does only async-signal-safe
        // things.
        let set = unsafe {
            let mut new: libc::sigaction = std::mem::zeroed();
            new.sa_sigaction = action;
            new.sa_flags = libc::SA_RESTART;
            libc::sigaction(signal, &raw const new, std::ptr::null_mut())
        };
        if set != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// The signal that arrived since the last call, if one did.
pub(crate) fn take() -> Option<i32> {
    match PENDING.swap(0, Ordering::SeqCst) {
        0 => None,
        signal => Some(signal),
    }
}
