//! Holding back answers: for a moment no guest hears that a write is done, so that snapshots of several volumes hold a
//! state that could have been at one instant (see [`crate::sharing::group`]).
//!
//! Role: keeps the answers of writes, discards and zeroings of all heads, from [`crate::Event::Hold`] until
//! [`crate::Event::Release`]. The writes themselves go on. Not held back: answers that say that a request failed, since
//! nothing follows from them; those of reads, unless that is asked for; and those of flushes. A flush speaks of writes
//! that were answered before, which are durable. It says nothing about writes that were not, so nobody can conclude
//! from it that one of these is done.
//!
//! States: none -> held -> released -> ended. A released hold ends when this controller is known to own the volume
//! still, by its grants for reading: otherwise a successor may have answered writes meanwhile.
//!
//! Invariants: (1) a hold that was asked for ends once, and that is told; (2) it ends `whole` only where no owner
//! answered a write between [`Notice::Held`] and [`crate::Event::Release`].
//!
//! Limits: one hold at a time, [`HOLD_MAX`]; answers by what guests may have in flight.
//!
//! Faults: a host that forgets a hold gets it ended by the deadline, and not whole, as does a close. A deposed owner
//! answers what it held back by an error, like everything else.

use crate::api::{Notice, State};
use crate::controller::{Controller, Out};
use holdfast_base::{BlockData, BlockError, HoldId, Instant, RequestToken};
use std::time::Duration;

/// Longest time that a guest waits for an answer because of a hold: longer than a group of snapshots takes to give up.
pub const HOLD_MAX: Duration = Duration::from_millis(700);

/// Grants are asked for to last so much longer than now.
const GRANT_MIN: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(crate) struct Quiesce {
    id: HoldId,
    until: Instant,
    is_released: bool,
    with_reads: bool,
    /// Whose requests are done, and what they are told.
    answers: Vec<(RequestToken, BlockData)>,
}

impl Controller {
    pub(crate) fn on_quiesce(&mut self, id: HoldId, with_reads: bool, out: Out) {
        if self.state != State::Open || self.quiesce.is_some() {
            return self.notice(Notice::HoldEnded { hold: id, whole: false }, out);
        }
        let until = self.basis.now + HOLD_MAX;
        self.quiesce = Some(Quiesce { id, until, is_released: false, with_reads, answers: Vec::new() });
        self.notice(Notice::Held { hold: id }, out);
    }

    pub(crate) fn on_release(&mut self, id: HoldId, out: Out) {
        if let Some(hold) = self.quiesce.as_mut().filter(|hold| hold.id == id) {
            hold.is_released = true;
            self.progress_quiesce(out);
        }
    }

    pub(crate) fn quiesce_deadline(&self) -> Option<Instant> {
        self.quiesce.as_ref().map(|hold| hold.until)
    }

    /// Tells a guest that its write is done, now or when answers are told again.
    pub(crate) fn tell_written(&mut self, token: RequestToken, out: Out) {
        match &mut self.quiesce {
            Some(hold) if !self.basis.config.mutations.hold_tells() => hold.answers.push((token, BlockData::Done)),
            _ => self.reply(token, Ok(BlockData::Done), out),
        }
    }

    /// Tells a guest what it has read, now or when answers are told again.
    pub(crate) fn tell_read(&mut self, token: RequestToken, data: BlockData, out: Out) {
        match &mut self.quiesce {
            Some(hold) if hold.with_reads && !self.basis.config.mutations.hold_tells() => {
                hold.answers.push((token, data));
            }
            _ => self.reply(token, Ok(data), out),
        }
    }

    /// Ends a hold that was released, or has lasted too long.
    pub(crate) fn progress_quiesce(&mut self, out: Out) {
        let Some(hold) = &self.quiesce else { return };
        if hold.is_released && self.may_read() {
            self.end_quiesce(true, out);
        } else if hold.until <= self.basis.now {
            self.end_quiesce(false, out);
        } else if hold.is_released {
            self.ask_grants(self.basis.now + GRANT_MIN, out);
        }
    }

    /// What was held back is told.
    pub(crate) fn end_quiesce(&mut self, whole: bool, out: Out) {
        let Some(hold) = self.quiesce.take() else { return };
        self.notice(Notice::HoldEnded { hold: hold.id, whole }, out);
        for (token, data) in hold.answers {
            self.reply(token, Ok(data), out);
        }
    }

    /// This controller answers nothing any more.
    pub(crate) fn abandon_quiesce(&mut self, error: BlockError, out: Out) {
        let Some(hold) = self.quiesce.take() else { return };
        self.notice(Notice::HoldEnded { hold: hold.id, whole: false }, out);
        for (token, _) in hold.answers {
            self.reply(token, Err(error), out);
        }
    }
}
