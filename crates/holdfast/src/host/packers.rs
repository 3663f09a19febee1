//! The thread that packs blocks for a reactor, behind everything else on its core: guests' requests don't wait for it. The
//! host's machine says what it packs, and when; what it does not come to in time is written as it is.

use crate::logger;
use holdfast_base::Buf;
use holdfast_host::Call;
use holdfast_runtime::Waker;
use holdfast_runtime::mailbox::{self, Receiver, Sender};
use holdfast_volume::{Task, Worked};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// More than the machine gives it at a time.
const ENDS_MAX: usize = 1 << 10;

/// Of the thread.
const NICE: i32 = 10;

/// What came of it, and the CPU time that it took.
type Done = (Call, Worked, Duration);

/// A reactor's way to the worker, which is started with the first blocks.
pub struct Packers {
    worker: Option<mpsc::Sender<(Call, Task, Vec<Buf>)>>,
    cpu_us: Arc<AtomicU64>,
    ends: Sender<Done>,
    pub done: Receiver<Done>,
}

impl Packers {
    pub fn new(waker: Waker) -> Packers {
        let (ends, done) = mailbox::mailbox(waker, ENDS_MAX);
        Packers { worker: None, cpu_us: Arc::default(), ends, done }
    }

    /// CPU time of the worker so far.
    pub fn cpu(&self) -> Duration {
        Duration::from_micros(self.cpu_us.load(Ordering::Relaxed))
    }

    /// Has it done with the blocks. Where nobody can they stay as they are, and that is told.
    pub fn work(&mut self, call: Call, task: Task, blocks: Vec<Buf>) {
        if self.worker.is_none() {
            self.worker = start(Arc::clone(&self.cpu_us), self.ends.clone());
        }
        let not_done = task.not_done();
        if self.worker.as_ref().is_some_and(|worker| worker.send((call, task, blocks)).is_ok()) {
            return;
        }
        // The mailbox is larger than what can be asked for.
        let _ = self.ends.post((call, not_done, Duration::ZERO));
    }
}

fn cpu_of_thread() -> Duration {
    let of = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(of.tv_sec as u64, of.tv_nsec as u32)
}

fn start(cpu_us: Arc<AtomicU64>, ends: Sender<Done>) -> Option<mpsc::Sender<(Call, Task, Vec<Buf>)>> {
    let (worker, work) = mpsc::channel::<(Call, Task, Vec<Buf>)>();
    let run = move || {
        let _ = rustix::process::nice(NICE);
        let mut cpu = cpu_of_thread();
        for (call, task, blocks) in work {
            let outcome = task.work(&blocks);
            let (before, so_far) = (cpu, cpu_of_thread());
            cpu = so_far;
            cpu_us.store(so_far.as_micros() as u64, Ordering::Relaxed);
            if ends.post((call, outcome, so_far.saturating_sub(before))).is_err() {
                return;
            }
        }
    };
    match thread::Builder::new().name("packer".to_string()).spawn(run) {
        Ok(_) => Some(worker),
        Err(error) => {
            logger::warn(format_args!("no thread packs blocks, which are written as they are: {error}"));
            None
        }
    }
}
