//! How far long work has come: a bar on a terminal, a line now and then elsewhere.
//!
//! Role: told of what is done, whenever that is known. What it says goes to standard error, so that a stream or an answer on standard
//! output stays what it is.
//!
//! Limits: elsewhere nothing within [`SHORT`], and then at most a line each [`LINE_EVERY`].

use holdfast_base::size::Size;
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::fmt::Write;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// What ends by then is not told of.
const SHORT: Duration = Duration::from_secs(2);

const LINE_EVERY: Duration = Duration::from_secs(5);

/// A rate is told of when it is known a little.
const RATE_FROM: Duration = Duration::from_secs(1);

/// What is counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unit {
    Bytes,
    Seconds,
    /// By its name.
    Of(&'static str),
}

/// Where it is told.
enum Place {
    Nowhere,
    Bar(ProgressBar),
    Lines { next_at: Instant },
}

pub struct Progress {
    what: String,
    unit: Unit,
    whole: u64,
    begun: Instant,
    place: Place,
}

/// A bar each for several things that go on at a time.
pub struct Bars(Option<MultiProgress>);

impl Bars {
    /// Nothing where nobody looks at a terminal.
    pub fn new(is_quiet: bool) -> Bars {
        let is_seen = !is_quiet && std::io::stderr().is_terminal();
        Bars(is_seen.then(|| MultiProgress::with_draw_target(ProgressDrawTarget::stderr())))
    }

    pub fn are_seen(&self) -> bool {
        self.0.is_some()
    }

    pub fn begin(&self, what: &str, unit: Unit, whole: u64) -> Progress {
        let place = self.0.as_ref().map_or(Place::Nowhere, |bars| Place::Bar(bars.add(bar(whole))));
        Progress { what: what.to_string(), unit, whole, begun: Instant::now(), place }
    }
}

fn bar(whole: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("[{bar:24}] {msg}").expect("a template that is known");
    ProgressBar::with_draw_target(Some(whole), ProgressDrawTarget::stderr()).with_style(style.progress_chars("=> "))
}

impl Progress {
    /// `is_quiet`: whoever asked reads JSON.
    pub fn begin(what: impl Into<String>, unit: Unit, whole: u64, is_quiet: bool) -> Progress {
        let begun = Instant::now();
        let place = match (is_quiet, std::io::stderr().is_terminal()) {
            (true, _) => Place::Nowhere,
            (false, true) => Place::Bar(bar(whole)),
            (false, false) => Place::Lines { next_at: begun + SHORT },
        };
        Progress { what: what.into(), unit, whole, begun, place }
    }

    /// So much is done of it.
    pub fn set(&mut self, done: u64) {
        let now = Instant::now();
        match &mut self.place {
            Place::Nowhere => {}
            Place::Bar(bar) => {
                let text = text(&self.what, self.unit, (done, self.whole), now.duration_since(self.begun));
                bar.set_position(done.min(self.whole));
                bar.set_message(text);
            }
            Place::Lines { next_at } => {
                if is_due(next_at, now) {
                    eprintln!("{}", text(&self.what, self.unit, (done, self.whole), now.duration_since(self.begun)));
                }
            }
        }
    }

    /// So much is left of it; the most that there was is the whole.
    pub fn set_left(&mut self, left: u64) {
        if left > self.whole {
            self.whole = left;
            if let Place::Bar(bar) = &self.place {
                bar.set_length(left);
            }
        }
        self.set(self.whole - left);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Place::Bar(bar) = &self.place {
            bar.finish_and_clear();
        }
    }
}

/// Whether a line is to be said now; then the next one is later.
fn is_due(next_at: &mut Instant, now: Instant) -> bool {
    let is_due = now >= *next_at;
    if is_due {
        *next_at = now + LINE_EVERY;
    }
    is_due
}

/// `sending vm1@monday: 1.5 GiB of 4 GiB (37 %), 120 MiB/s, 21 s left`.
fn text(what: &str, unit: Unit, (done, whole): (u64, u64), spent: Duration) -> String {
    let count = |n: u64| match unit {
        Unit::Bytes => Size(n).to_string(),
        Unit::Seconds => format!("{n} s"),
        Unit::Of(name) => format!("{n} {name}"),
    };
    let of = match unit {
        Unit::Of(_) => done.to_string(),
        Unit::Bytes | Unit::Seconds => count(done),
    };
    let mut text = format!("{what}: {of} of {}", count(whole));
    if whole > 0 {
        let _ = write!(text, " ({} %)", u128::from(done.min(whole)) * 100 / u128::from(whole));
    }
    if spent >= RATE_FROM && done > 0 && unit != Unit::Seconds {
        let rate = done as f64 / spent.as_secs_f64();
        let _ = match unit {
            Unit::Bytes => write!(text, ", {}/s", Size(rate as u64)),
            _ => write!(text, ", {rate:.1}/s"),
        };
        let _ = write!(text, ", {:.0} s left", whole.saturating_sub(done) as f64 / rate);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_begin_late_and_come_seldom() {
        let begun = Instant::now();
        let mut next_at = begun + SHORT;
        let said: Vec<u64> = (0..200)
            .map(|tenth| tenth * 100)
            .filter(|ms| is_due(&mut next_at, begun + Duration::from_millis(*ms)))
            .collect();
        assert_eq!(said, [2000, 7000, 12_000, 17_000]);
    }

    #[test]
    fn what_is_told_has_share_rate_and_time() {
        let spent = Duration::from_secs(10);
        let told = text("sending vm@s", Unit::Bytes, (1 << 30, 4 << 30), spent);
        assert_eq!(told, "sending vm@s: 1 GiB of 4 GiB (25 %), 102.4 MiB/s, 30 s left");
        assert_eq!(text("x", Unit::Of("shards"), (3, 9), spent), "x: 3 of 9 shards (33 %), 0.3/s, 20 s left");
        assert_eq!(text("x", Unit::Seconds, (3, 9), spent), "x: 3 s of 9 s (33 %)");
        assert_eq!(text("x", Unit::Bytes, (0, 0), Duration::ZERO), "x: 0 B of 0 B");
    }
}
