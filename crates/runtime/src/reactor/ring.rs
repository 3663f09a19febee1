//! The io_uring itself: set-up with what the kernel offers, submission that never loses an entry, completions in bulk.
//!
//! Limits: a submission queue of [`SQ_ENTRIES`] (entries beyond it wait in a backlog for the next system call), a
//! completion queue four times that (the kernel keeps what overflows it).

use io_uring::types::{SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, squeue};
use std::collections::VecDeque;
use std::io;
use std::time::Duration;

/// Entries that one system call can submit: some ten times what a busy batch produces.
const SQ_ENTRIES: u32 = 1024;

/// What a completion belongs to, in the upper bits of its user data; the lower 32 hold the index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum Kind {
    /// Nobody waits for it (cancellations).
    Ignored = 0,
    Wake = 1,
    Accept = 2,
    Connect = 3,
    Receive = 4,
    Send = 5,
    Disk = 6,
}

impl Kind {
    pub(super) fn tag(self, index: u32) -> u64 {
        (self as u64) << 56 | u64::from(index)
    }

    fn of(user_data: u64) -> Kind {
        match user_data >> 56 {
            1 => Kind::Wake,
            2 => Kind::Accept,
            3 => Kind::Connect,
            4 => Kind::Receive,
            5 => Kind::Send,
            6 => Kind::Disk,
            _ => Kind::Ignored,
        }
    }
}

/// One completion.
#[derive(Clone, Copy, Debug)]
pub(super) struct Completion {
    pub kind: Kind,
    pub index: u32,
    pub result: i32,
    pub flags: u32,
}

impl Completion {
    /// The result as a count, or the error it stands for.
    pub(super) fn outcome(self) -> Result<usize, io::Error> {
        usize::try_from(self.result).map_err(|_| io::Error::from_raw_os_error(-self.result))
    }

    /// The operation goes on and will complete again.
    pub(super) fn more(self) -> bool {
        cqueue::more(self.flags)
    }
}

/// How long [`Ring::enter`] may sleep.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Wait {
    No,
    AtMost(Duration),
    Forever,
}

pub(super) struct Ring {
    uring: IoUring,
    backlog: VecDeque<squeue::Entry>,
    /// Operations whose last completion has not been seen: while there are any, the kernel may touch their memory.
    in_flight: usize,
}

impl Ring {
    pub(super) fn new() -> io::Result<Ring> {
        let uring = build()?;
        let params = uring.params();
        if !(params.is_feature_nodrop() && params.is_feature_ext_arg() && params.is_feature_fast_poll()) {
            return Err(io::Error::from(io::ErrorKind::Unsupported));
        }
        Ok(Ring { uring, backlog: VecDeque::new(), in_flight: 0 })
    }

    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    pub(super) fn submitter(&self) -> io_uring::Submitter<'_> {
        self.uring.submitter()
    }

    /// Queues `entry` for the next system call.
    ///
    /// # Safety
    /// Everything the entry points to stays valid, and untouched where the kernel writes, until its last completion.
    pub(super) unsafe fn push(&mut self, entry: squeue::Entry) {
        if Kind::of(entry.get_user_data()) != Kind::Ignored {
            self.in_flight += 1;
        }
        // SAFETY: passed on to the caller.
        if !self.backlog.is_empty() || unsafe { self.uring.submission().push(&entry) }.is_err() {
            self.backlog.push_back(entry);
        }
    }

    fn refill(&mut self) {
        let mut queue = self.uring.submission();
        while let Some(entry) = self.backlog.front() {
            // SAFETY: the promise was made to `push`.
            if unsafe { queue.push(entry) }.is_err() {
                break;
            }
            self.backlog.pop_front();
        }
    }

    /// Submits what is queued and sleeps, as `wait` says, until there is a completion.
    pub(super) fn enter(&mut self, wait: Wait) -> io::Result<()> {
        while !self.backlog.is_empty() {
            self.refill();
            if !self.backlog.is_empty() {
                self.enter_once(Wait::No)?;
                if self.has_completions() {
                    // The caller makes room first; the rest of the backlog goes out with its next call.
                    return Ok(());
                }
            }
        }
        self.enter_once(wait)
    }

    fn enter_once(&mut self, wait: Wait) -> io::Result<()> {
        let submitter = self.uring.submitter();
        let result = match wait {
            Wait::No => submitter.submit(),
            Wait::Forever => submitter.submit_and_wait(1),
            Wait::AtMost(span) => {
                let span = Timespec::new().sec(span.as_secs()).nsec(span.subsec_nanos());
                submitter.submit_with_args(1, &SubmitArgs::new().timespec(&span))
            }
        };
        match result {
            Ok(_) => Ok(()),
            // Timed out, interrupted by a signal, or out of room until completions are taken: all are for the caller's
            // next round.
            Err(e)
                if matches!(
                    e.raw_os_error(),
                    Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN | libc::ENOMEM)
                ) =>
            {
                Ok(())
            }
            Err(e) => Err(e),
        }
    }

    pub(super) fn has_completions(&mut self) -> bool {
        !self.uring.completion().is_empty()
    }

    /// Whether a system call would find something: completions posted, or work that only a call will finish.
    pub(super) fn is_stirring(&mut self) -> bool {
        self.uring.submission().taskrun() || self.has_completions()
    }

    /// Moves all posted completions to `out`.
    pub(super) fn take(&mut self, out: &mut Vec<Completion>) {
        for entry in self.uring.completion() {
            let completion = Completion {
                kind: Kind::of(entry.user_data()),
                index: entry.user_data() as u32,
                result: entry.result(),
                flags: entry.flags(),
            };
            if completion.kind != Kind::Ignored {
                if !completion.more() {
                    assert!(self.in_flight > 0, "a completion of nothing");
                    self.in_flight -= 1;
                }
                out.push(completion);
            }
        }
    }
}

/// The best ring that this kernel gives: task work deferred to our own waits (6.1), or at least not interrupting us
/// (5.19), or plain.
fn build() -> io::Result<IoUring> {
    let mut deferred = IoUring::builder();
    deferred.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
    let mut cooperative = IoUring::builder();
    cooperative.setup_coop_taskrun().setup_taskrun_flag();
    let mut last = None;
    for mut builder in [deferred, cooperative, IoUring::builder()] {
        match builder.dontfork().setup_clamp().setup_cqsize(SQ_ENTRIES * 4).build(SQ_ENTRIES) {
            Ok(ring) => return Ok(ring),
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => last = Some(e),
            Err(e) => return Err(e),
        }
    }
    Err(last.expect("the loop ran"))
}
