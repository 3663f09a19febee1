//! Runs many seeds on several threads, each twice, and turns panics of the machines into findings.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};

thread_local! {
    static RUNNING: RefCell<Option<u64>> = const { RefCell::new(None) };
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// A run that found something.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    pub seed: u64,
    pub why: String,
}

/// A run that takes so long goes round in circles inside of a machine, where nobody can stop it.
const HANG_AFTER: Duration = Duration::from_secs(60);

/// How to see the run again.
pub fn replay_command(seed: u64) -> String {
    format!("./x sim --seed {seed}")
}

/// Keeps what panics say instead of printing it, in threads that run a seed.
fn install_hook() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let Some(seed) = RUNNING.with_borrow(|r| *r) else { return before(info) };
            let place = info.location().map_or_else(String::new, |l| format!(" at {}:{}", l.file(), l.line()));
            let text = info.payload_as_str().unwrap_or("panic").to_string();
            PANIC.set(Some(format!("panic{place}: {text}")));
            if cfg!(panic = "abort") {
                eprintln!("seed {seed}: panic{place}: {text}\n  replay: {}", replay_command(seed));
            }
        }));
    });
}

/// Runs once, with panics as errors.
pub fn guarded<T>(seed: u64, run: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    install_hook();
    RUNNING.set(Some(seed));
    let result = catch_unwind(AssertUnwindSafe(run));
    RUNNING.set(None);
    result.unwrap_or_else(|_| Err(PANIC.take().unwrap_or_else(|| "panic".to_string())))
}

/// Runs a seed twice; both runs must come to the same, trace hash included.
pub fn twice<T: PartialEq + std::fmt::Debug>(seed: u64, run: impl Fn() -> Result<T, String>) -> Result<T, String> {
    let first = guarded(seed, &run)?;
    let second = guarded(seed, &run)?;
    if first != second {
        return Err(format!("two runs of the same seed differ: {first:?} and {second:?}"));
    }
    Ok(first)
}

/// Runs seeds `from .. from + count` on `jobs` threads. Stops early after the first finding where `first_only` is set.
/// Findings come in the order of their seeds.
pub fn run_seeds<T: Send>(
    from: u64,
    count: u64,
    jobs: usize,
    first_only: bool,
    run: impl Fn(u64) -> Result<T, String> + Sync,
) -> (Vec<(u64, T)>, Vec<Finding>) {
    let next = AtomicU64::new(from);
    let stop = AtomicBool::new(false);
    let jobs = jobs.max(1);
    let running: Vec<Mutex<Option<(u64, Instant)>>> = (0..jobs).map(|_| Mutex::new(None)).collect();
    let workers_left = AtomicU64::new(jobs as u64);
    let (sender, receiver) = mpsc::channel();
    std::thread::scope(|scope| {
        for slot in &running {
            let (sender, next, stop, run, workers_left) = (sender.clone(), &next, &stop, &run, &workers_left);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= from + count {
                        break;
                    }
                    *slot.lock().expect("nothing panics under it") = Some((seed, Instant::now()));
                    let result = run(seed);
                    if result.is_err() && first_only {
                        stop.store(true, Ordering::Relaxed);
                    }
                    sender.send((seed, result)).expect("the receiver waits for all");
                }
                *slot.lock().expect("nothing panics under it") = None;
                workers_left.fetch_sub(1, Ordering::Relaxed);
            });
        }
        watch_for_hangs(&running, &workers_left);
    });
    drop(sender);
    let (mut outcomes, mut findings) = (Vec::new(), Vec::new());
    for (seed, result) in receiver {
        match result {
            Ok(outcome) => outcomes.push((seed, outcome)),
            Err(why) => findings.push(Finding { seed, why }),
        }
    }
    outcomes.sort_by_key(|(seed, _)| *seed);
    findings.sort_by_key(|f| f.seed);
    (outcomes, findings)
}

/// Waits for the workers, and ends the whole process where a run hangs: its seed is the finding.
fn watch_for_hangs(running: &[Mutex<Option<(u64, Instant)>>], workers_left: &AtomicU64) {
    while workers_left.load(Ordering::Relaxed) > 0 {
        std::thread::sleep(Duration::from_millis(2));
        for slot in running {
            let Some((seed, since)) = *slot.lock().expect("nothing panics under it") else { continue };
            if since.elapsed() > HANG_AFTER {
                eprintln!("seed {seed}: a machine hangs inside of an event\n  replay: {}", replay_command(seed));
                std::process::exit(3);
            }
        }
    }
}
