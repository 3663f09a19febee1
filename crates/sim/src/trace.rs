//! What happened in a run: a hash over every event, and on request the events as text.
//!
//! Two runs of one seed must have the same hash: anything that differs (a clock read, an iteration over a hash map)
//! would make failures impossible to replay.

use holdfast_base::Instant;

/// Running hash of a run's events.
#[derive(Debug)]
pub struct Trace {
    hash: u64,
    events: u64,
    verbose: bool,
}

impl Trace {
    /// A `verbose` trace also prints each event to standard output.
    pub fn new(verbose: bool) -> Trace {
        Trace { hash: 0x6a09_e667_f3bc_c908, events: 0, verbose }
    }

    /// Takes one event in: its time, what tells it apart, and its text (only made where it is printed).
    pub fn event(&mut self, now: Instant, words: &[u64], text: impl FnOnce() -> String) {
        self.mix(now.0);
        for word in words {
            self.mix(*word);
        }
        self.events += 1;
        if self.verbose {
            println!("{now:?} {}", text());
        }
    }

    fn mix(&mut self, word: u64) {
        self.hash = (self.hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23);
    }

    pub fn hash(&self) -> u64 {
        self.hash
    }

    pub fn events(&self) -> u64 {
        self.events
    }

    pub fn is_verbose(&self) -> bool {
        self.verbose
    }
}
