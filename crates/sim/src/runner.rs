//! Runs many seeds on several threads, each twice, and turns panics of the machines into findings.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;

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
    let (sender, receiver) = mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            let (sender, next, stop, run) = (sender.clone(), &next, &stop, &run);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= from + count {
                        break;
                    }
                    let result = run(seed);
                    if result.is_err() && first_only {
                        stop.store(true, Ordering::Relaxed);
                    }
                    sender.send((seed, result)).expect("the receiver waits for all");
                }
            });
        }
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
