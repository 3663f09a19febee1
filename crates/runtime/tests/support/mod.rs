//! What the reactor tests share: an application made of one closure.

use holdfast_base::Instant;
use holdfast_runtime::reactor::Config;
use holdfast_runtime::{App, Event, Io, Reactor};

/// An application that is one closure, with a deadline that the closure may move.
pub struct Script<F> {
    pub on_event: F,
    pub deadline: Option<Instant>,
}

impl<F: FnMut(&mut Option<Instant>, Event<'_>, &mut Io)> App for Script<F> {
    fn on_event(&mut self, _now: Instant, event: Event<'_>, io: &mut Io) {
        (self.on_event)(&mut self.deadline, event, io);
    }

    fn on_batch_end(&mut self, _now: Instant, _io: &mut Io) {}

    fn next_deadline(&self) -> Option<Instant> {
        self.deadline
    }
}

/// Runs a fresh reactor with `set_up` and `on_event` until the closure stops it.
#[allow(dead_code, reason = "each test file uses part of this module")]
pub fn run<S>(
    config: Config,
    set_up: impl FnOnce(&mut Reactor) -> S,
    mut on_event: impl FnMut(&mut S, Event<'_>, &mut Io),
) -> S {
    let mut reactor = Reactor::new(config).unwrap();
    let mut state = set_up(&mut reactor);
    let mut app = Script {
        on_event: |_: &mut Option<Instant>, event: Event<'_>, io: &mut Io| on_event(&mut state, event, io),
        deadline: None,
    };
    reactor.run(&mut app).unwrap();
    drop(reactor);
    state
}

/// Bytes that differ by position and seed.
#[allow(dead_code, reason = "each test file uses part of this module")]
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    holdfast_base::Prng::new(seed).fill(&mut bytes);
    bytes
}
