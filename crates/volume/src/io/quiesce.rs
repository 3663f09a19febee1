//! Holding back answers: for a moment no guest hears that a write is done, so that snapshots of several volumes hold a
//! state that could have been at one instant (see [`crate::sharing::group`]).
//!
//! Role: keeps the answers of writes, discards and zeroings of all heads, from [`crate::Event::Quiesce`] until
//! [`crate::Event::Release`]. The writes themselves go on. Not held back: answers that say that a request failed, since
//! nothing follows from them; those of reads, unless that is asked for; and those of flushes. A flush speaks of writes
//! that were answered before, which are durable. It says nothing about writes that were not, so nobody can conclude
//! from it that one of these is done.
//!
//! States: none -> quiet -> released -> ended. A released quiesce ends when this controller is known to own the volume
//! still, by its grants for reading: otherwise a successor may have answered writes meanwhile.
//!
//! Invariants: (1) a quiesce that was asked for ends once, and that is told; (2) it ends `whole` only where no owner
//! answered a write between [`Notice::Quiesced`] and [`crate::Event::Release`].
//!
//! Limits: one quiesce at a time, [`QUIESCE_MAX`]; answers by what guests may have in flight.
//!
//! Faults: a host that forgets a quiesce gets it ended by the deadline, and not whole, as does a close. A deposed owner
//! answers what it held back by an error, like everything else.

use crate::api::{Effect, Notice, State};
use crate::controller::{Controller, Out};
use holdfast_base::{BlockData, BlockError, Instant, QuiesceId, RequestToken};
use holdfast_stages::{Stage, Trail};
use std::time::Duration;

/// Longest time that a guest waits for an answer because of a quiesce: longer than a group of snapshots takes to give
/// up.
pub const QUIESCE_MAX: Duration = Duration::from_millis(700);

/// Grants are asked for to last so much longer than now.
const GRANT_MIN: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(crate) struct Quiesce {
    id: QuiesceId,
    until: Instant,
    is_released: bool,
    with_reads: bool,
    /// Whose requests are done, and what they are told.
    answers: Vec<Held>,
}

/// An answer that is held back.
#[derive(Debug)]
struct Held {
    token: RequestToken,
    data: BlockData,
    /// Where its time went so far, of what counts.
    trail: Option<Trail>,
}

impl Controller {
    pub(crate) fn on_quiesce(&mut self, id: QuiesceId, with_reads: bool, out: Out) {
        if self.state != State::Open || self.quiesce.is_some() {
            return self.notice(Notice::QuiesceEnded { quiesce: id, whole: false }, out);
        }
        let until = self.basis.now + QUIESCE_MAX;
        self.quiesce = Some(Quiesce { id, until, is_released: false, with_reads, answers: Vec::new() });
        self.notice(Notice::Quiesced { quiesce: id }, out);
    }

    pub(crate) fn on_release(&mut self, id: QuiesceId, out: Out) {
        if let Some(quiesce) = self.quiesce.as_mut().filter(|quiesce| quiesce.id == id) {
            quiesce.is_released = true;
            self.progress_quiesce(out);
        }
    }

    /// Whether answers are held back.
    pub fn is_quiesced(&self) -> bool {
        self.quiesce.is_some()
    }

    pub(crate) fn quiesce_deadline(&self) -> Option<Instant> {
        self.quiesce.as_ref().map(|quiesce| quiesce.until)
    }

    /// Tells a guest that its write is done, now or when answers are told again.
    pub(crate) fn answer_write(&mut self, token: RequestToken, trail: Trail, out: Out) {
        let held = Held { token, data: BlockData::Done, trail: Some(trail) };
        match &mut self.quiesce {
            Some(quiesce) if !self.basis.config.mutations.quiesce_tells() => quiesce.answers.push(held),
            _ => self.tell(held, out),
        }
    }

    /// Tells a guest what it has read, now or when answers are told again.
    pub(crate) fn answer_read(&mut self, token: RequestToken, trail: Option<Trail>, data: BlockData, out: Out) {
        let held = Held { token, data, trail };
        match &mut self.quiesce {
            Some(quiesce) if quiesce.with_reads && !self.basis.config.mutations.quiesce_tells() => {
                quiesce.answers.push(held);
            }
            _ => self.tell(held, out),
        }
    }

    fn tell(&mut self, Held { token, data, trail }: Held, out: Out) {
        if let Some(mut trail) = trail {
            trail.mark(self.basis.now, Stage::Snapshots);
            out.push(Effect::Took { token, spans: *trail.spans() });
        }
        self.reply(token, Ok(data), out);
    }

    /// Ends a quiesce that was released, or has lasted too long.
    pub(crate) fn progress_quiesce(&mut self, out: Out) {
        let Some(quiesce) = &self.quiesce else { return };
        if quiesce.is_released && self.may_read() {
            self.end_quiesce(true, out);
        } else if quiesce.until <= self.basis.now {
            self.end_quiesce(false, out);
        } else if quiesce.is_released {
            self.ask_grants(self.basis.now + GRANT_MIN, out);
        }
    }

    /// What was held back is told.
    pub(crate) fn end_quiesce(&mut self, whole: bool, out: Out) {
        let Some(quiesce) = self.quiesce.take() else { return };
        self.notice(Notice::QuiesceEnded { quiesce: quiesce.id, whole }, out);
        quiesce.answers.into_iter().for_each(|held| self.tell(held, out));
    }

    /// This controller answers nothing any more.
    pub(crate) fn abandon_quiesce(&mut self, error: BlockError, out: Out) {
        let Some(quiesce) = self.quiesce.take() else { return };
        self.notice(Notice::QuiesceEnded { quiesce: quiesce.id, whole: false }, out);
        for Held { token, .. } in quiesce.answers {
            self.reply(token, Err(error), out);
        }
    }
}
