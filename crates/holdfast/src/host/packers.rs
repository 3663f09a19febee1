//! The thread that packs blocks for a reactor, behind everything else on its core: guests' requests don't wait for it. What
//! it does not come to in time is written as it is.

use crate::logger;
use holdfast_base::Buf;
use holdfast_base::buf::total_len;
use holdfast_host::Call;
use holdfast_runtime::Waker;
use holdfast_runtime::mailbox::{self, Receiver, Sender};
use holdfast_volume::{NotPacked, PackedPayload, Way, pack_blocks};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Blocks that wait for a worker: beyond that they are written as they are.
const WAITING_BYTES_MAX: usize = 8 << 20;

/// No volume has more segments on their way.
const ENDS_MAX: usize = 1 << 16;

/// Of the thread.
const NICE: i32 = 10;

type Packed = (Call, Result<PackedPayload, NotPacked>);

/// A reactor's way to the worker, which is started with the first blocks.
pub struct Packers {
    worker: Option<mpsc::Sender<(Call, Way, Vec<Buf>)>>,
    shared: Arc<Shared>,
    ends: Sender<Packed>,
    pub packed: Receiver<Packed>,
}

/// What a reactor and its worker tell each other beside blocks.
#[derive(Default)]
struct Shared {
    waiting_bytes: AtomicUsize,
    cpu_us: AtomicU64,
}

impl Packers {
    pub fn new(waker: Waker) -> Packers {
        let (ends, packed) = mailbox::mailbox(waker, ENDS_MAX);
        Packers { worker: None, shared: Arc::default(), ends, packed }
    }

    /// CPU time of the worker so far.
    pub fn cpu(&self) -> Duration {
        Duration::from_micros(self.shared.cpu_us.load(Ordering::Relaxed))
    }

    /// Has the blocks packed. Where nobody can they stay as they are, and that is told.
    pub fn pack(&mut self, call: Call, way: Way, blocks: Vec<Buf>) {
        let bytes = total_len(&blocks);
        let has_room = self.shared.waiting_bytes.load(Ordering::Relaxed) + bytes <= WAITING_BYTES_MAX;
        if self.worker.is_none() {
            self.worker = start(Arc::clone(&self.shared), self.ends.clone());
        }
        if let Some(worker) = self.worker.as_ref().filter(|_| has_room) {
            self.shared.waiting_bytes.fetch_add(bytes, Ordering::Relaxed);
            if worker.send((call, way, blocks)).is_ok() {
                return;
            }
        }
        // The mailbox is larger than what can be asked for.
        let _ = self.ends.post((call, Err(NotPacked::NotTried)));
    }
}

fn cpu_of_thread() -> Duration {
    let of = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(of.tv_sec as u64, of.tv_nsec as u32)
}

fn start(shared: Arc<Shared>, ends: Sender<Packed>) -> Option<mpsc::Sender<(Call, Way, Vec<Buf>)>> {
    let (worker, work) = mpsc::channel::<(Call, Way, Vec<Buf>)>();
    let run = move || {
        let _ = rustix::process::nice(NICE);
        for (call, way, blocks) in work {
            let packed = pack_blocks(way, &blocks);
            shared.waiting_bytes.fetch_sub(total_len(&blocks), Ordering::Relaxed);
            shared.cpu_us.store(cpu_of_thread().as_micros() as u64, Ordering::Relaxed);
            if ends.post((call, packed)).is_err() {
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
