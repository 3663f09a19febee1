//! How long turns take: a turn is what the application does with one event, while all others wait.
//!
//! Limits: the longest turn is kept for two windows, this one and the one before; what is told of long ones is told
//! once in [`TELL_EVERY`].

use super::{App, Event, Io};
use crate::clock;
use holdfast_base::Instant;
use std::fmt;
use std::time::Duration;

/// A turn longer than this is told of, and this often.
const LONG: Duration = Duration::from_millis(10);
const TELL_EVERY: Duration = Duration::from_secs(10);

/// For so long the longest turn is remembered at least, and for twice that at most.
const WINDOW: Duration = Duration::from_secs(600);

/// A turn that took long.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Turn {
    pub began_at: Instant,
    pub took: Duration,
    /// The kind of event.
    pub event: &'static str,
    /// Whose it was, and what was done, as far as the application knows.
    pub cause: Option<String>,
}

impl fmt::Display for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} ms, {}", self.took.as_secs_f64() * 1000.0, self.event)?;
        self.cause.iter().try_for_each(|cause| write!(f, " ({cause})"))
    }
}

#[derive(Default)]
pub(super) struct Turns {
    longest: Option<Turn>,
    before: Option<Turn>,
    window_began_at: Instant,
    told_at: Option<Instant>,
    /// Long ones that nobody was told of.
    untold: u64,
}

impl Turns {
    pub(super) fn longest(&self) -> Option<&Turn> {
        self.longest.iter().chain(&self.before).max_by_key(|turn| turn.took)
    }

    /// Whether more is to be found out about a turn.
    fn is_notable(&self, began_at: Instant, took: Duration) -> bool {
        let is_first = began_at.since(self.window_began_at) >= WINDOW;
        is_first || took > LONG || self.longest.as_ref().is_none_or(|longest| took > longest.took)
    }

    /// True if it is to be told of.
    fn note(&mut self, turn: &Turn) -> bool {
        if turn.began_at.since(self.window_began_at) >= WINDOW {
            (self.before, self.window_began_at) = (self.longest.take(), turn.began_at);
        }
        if self.longest.as_ref().is_none_or(|longest| turn.took > longest.took) {
            self.longest = Some(turn.clone());
        }
        if turn.took <= LONG {
            return false;
        }
        if self.told_at.is_some_and(|at| turn.began_at.since(at) < TELL_EVERY) {
            self.untold += 1;
            return false;
        }
        self.told_at = Some(turn.began_at);
        true
    }
}

/// An application whose turns are measured.
pub(super) struct Timed<'a, A>(pub(super) &'a mut A);

impl<A: App> Timed<'_, A> {
    fn ended(&mut self, began_at: Instant, event: &'static str, io: &mut Io) {
        let took = clock::now().since(began_at);
        if !io.turns.is_notable(began_at, took) {
            return;
        }
        let turn = Turn { began_at, took, event, cause: self.0.cause() };
        if io.turns.note(&turn) {
            self.0.on_long_turn(&turn, std::mem::take(&mut io.turns.untold));
        }
    }
}

impl<A: App> App for Timed<'_, A> {
    fn on_event(&mut self, now: Instant, event: Event<'_>, io: &mut Io) {
        let (kind, began_at) = (event.kind(), clock::now());
        self.0.on_event(now, event, io);
        self.ended(began_at, kind, io);
    }

    fn on_batch_end(&mut self, now: Instant, io: &mut Io) {
        let began_at = clock::now();
        self.0.on_batch_end(now, io);
        self.ended(began_at, "end of a batch", io);
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.0.next_deadline()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(at_ms: u64, took_ms: u64) -> Turn {
        let began_at = Instant::ZERO + Duration::from_millis(at_ms);
        Turn { began_at, took: Duration::from_millis(took_ms), event: "timer", cause: None }
    }

    #[test]
    fn the_longest_turn_is_remembered_for_a_while_and_long_ones_are_told_now_and_then() {
        let mut turns = Turns::default();
        let is_notable = |turns: &Turns, turn: Turn| turns.is_notable(turn.began_at, turn.took);
        assert!(is_notable(&turns, turn(900, 1)));
        assert!(!turns.note(&turn(1000, 3)), "it is not long");
        assert!(!is_notable(&turns, turn(1100, 2)));
        assert!(turns.note(&turn(2000, 40)));
        assert!(!turns.note(&turn(3000, 30)), "one was told of just now");
        assert_eq!((turns.untold, turns.longest()), (1, Some(&turn(2000, 40))));
        assert!(turns.note(&turn(13_000, 20)));
        let window_ms = WINDOW.as_millis() as u64;
        assert!(is_notable(&turns, turn(window_ms, 5)), "it is the first of a window");
        assert!(!turns.note(&turn(window_ms, 5)));
        assert_eq!(turns.longest(), Some(&turn(2000, 40)), "it was in the window before");
        assert!(!turns.note(&turn(2 * window_ms, 4)));
        assert_eq!(turns.longest(), Some(&turn(window_ms, 5)));
    }
}
