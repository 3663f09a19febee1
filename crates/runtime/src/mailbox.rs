//! Bounded queues from other threads into a reactor, and the wake-up that goes with them.
//!
//! Role: control-plane threads post, the reactor's application drains on [`crate::reactor::Event::Wake`]. Nothing on
//! the I/O path goes through here.
//!
//! Invariants
//! 1. A message posted is seen by a drain that follows a wake-up: the sender queues first, then wakes; the reactor
//!    re-arms the wake-up first, then lets the application drain.
//!
//! Limits: each mailbox has the capacity its creator chose; a post beyond it is handed back to the sender.

use rustix::event::{EventfdFlags, eventfd};
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Wakes one reactor from any thread. Cheap while a wake-up is already pending.
#[derive(Clone)]
pub struct Waker(Arc<WakeState>);

struct WakeState {
    eventfd: OwnedFd,
    pending: AtomicBool,
}

impl Waker {
    pub(crate) fn new() -> io::Result<Waker> {
        let eventfd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Waker(Arc::new(WakeState { eventfd, pending: AtomicBool::new(false) })))
    }

    pub fn wake(&self) {
        if !self.0.pending.swap(true, Ordering::SeqCst) {
            // The counter can't be full (one write per pending wake-up), and a full one would wake all the same.
            let _ = rustix::io::write(&self.0.eventfd, &1_u64.to_ne_bytes());
        }
    }

    /// Called by the reactor when it has read the counter, before the application drains.
    pub(crate) fn rearm(&self) {
        self.0.pending.store(false, Ordering::SeqCst);
    }

    pub(crate) fn raw_fd(&self) -> RawFd {
        self.0.eventfd.as_raw_fd()
    }

    /// A second descriptor of the same counter, for a signal handler.
    pub(crate) fn duplicate(&self) -> io::Result<OwnedFd> {
        self.0.eventfd.try_clone()
    }
}

impl fmt::Debug for Waker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Waker")
    }
}

struct Shared<T> {
    queue: Mutex<VecDeque<T>>,
    capacity_max: usize,
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, VecDeque<T>> {
        // The queue is whole between any two operations on it, so a panicked sender leaves it usable.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The posting end; clone it for every thread that posts.
pub struct Sender<T> {
    shared: Arc<Shared<T>>,
    waker: Waker,
}

/// The reactor's end.
pub struct Receiver<T> {
    shared: Arc<Shared<T>>,
}

/// The mailbox holds as many messages as it may: the message comes back.
#[derive(Debug, PartialEq, Eq)]
pub struct Full<T>(pub T);

/// A mailbox of at most `capacity_max` messages, whose posts wake the reactor of `waker`.
pub fn mailbox<T>(waker: Waker, capacity_max: usize) -> (Sender<T>, Receiver<T>) {
    let shared = Arc::new(Shared { queue: Mutex::new(VecDeque::new()), capacity_max });
    (Sender { shared: Arc::clone(&shared), waker }, Receiver { shared })
}

impl<T> Sender<T> {
    /// Of the reactor that drains it.
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// Queues `message` and wakes the reactor.
    pub fn post(&self, message: T) -> Result<(), Full<T>> {
        {
            let mut queue = self.shared.lock();
            if queue.len() >= self.shared.capacity_max {
                return Err(Full(message));
            }
            queue.push_back(message);
        }
        self.waker.wake();
        Ok(())
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Sender { shared: Arc::clone(&self.shared), waker: self.waker.clone() }
    }
}

impl<T> Receiver<T> {
    /// Everything posted so far, oldest first.
    pub fn drain(&self) -> VecDeque<T> {
        std::mem::take(&mut *self.shared.lock())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn posts_come_out_in_order_and_a_full_mailbox_hands_them_back() {
        let (tx, rx) = mailbox(Waker::new().unwrap(), 2);
        tx.post(1).unwrap();
        tx.clone().post(2).unwrap();
        assert_eq!(tx.post(3), Err(Full(3)));
        assert_eq!(rx.drain(), [1, 2]);
        assert!(rx.drain().is_empty());
        tx.post(4).unwrap();
        assert_eq!(rx.drain(), [4]);
    }
}
