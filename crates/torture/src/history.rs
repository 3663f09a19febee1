//! The last requests and faults of a run, kept for the case that something must be explained.

use std::collections::VecDeque;
use std::fmt::Write;
use std::time::{Duration, Instant};

/// Enough for some minutes at the rates seen here.
const LINES_MAX: usize = 1 << 20;

/// Lines that an explanation shows.
const SHOWN_MAX: usize = 60;

#[derive(Clone, Debug)]
enum What {
    Request { volume: u8, offset: u64, len: u64, text: &'static str, version: u64 },
    Fault(String),
}

/// A ring of what happened.
pub struct History {
    begun: Instant,
    lines: VecDeque<(Duration, What)>,
}

impl History {
    pub fn new(begun: Instant) -> History {
        History { begun, lines: VecDeque::new() }
    }

    fn push(&mut self, what: What) {
        if self.lines.len() == LINES_MAX {
            self.lines.pop_front();
        }
        self.lines.push_back((self.begun.elapsed(), what));
    }

    pub fn request(&mut self, text: &'static str, volume: u8, offset: u64, len: u64, version: u64) {
        self.push(What::Request { volume, offset, len, text, version });
    }

    pub fn fault(&mut self, text: &str) {
        self.push(What::Fault(text.to_string()));
    }

    /// Faults, and the last requests that touched a byte of a volume.
    pub fn about(&self, volume: u8, offset: u64) -> String {
        let touches = |what: &What| match what {
            What::Request { volume: v, offset: o, len, .. } => *v == volume && *o <= offset && offset < o + len,
            What::Fault(_) => true,
        };
        let chosen: Vec<_> = self.lines.iter().rev().filter(|(_, w)| touches(w)).take(SHOWN_MAX).collect();
        let mut text = String::new();
        for (at, what) in chosen.into_iter().rev() {
            let _ = write!(text, "  {:>9.3} s  ", at.as_secs_f64());
            let _ = match what {
                What::Fault(fault) => writeln!(text, "fault: {fault}"),
                What::Request { offset, len, text: what, version, .. } => {
                    let version = crate::cell::Version(*version);
                    writeln!(text, "{what} {offset}+{len} {version:?}")
                }
            };
        }
        text
    }
}
