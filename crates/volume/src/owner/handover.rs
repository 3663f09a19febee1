//! The old owner's part of a hand-over: its log is emptied while it serves, then it stops at once, without a grant
//! left.
//!
//! States: none -> emptying ([`Event::Prepare`]) -> prepared ([`Notice::Prepared`]) -> giving up grants
//! ([`Event::Yield`]) -> closed. From emptying and prepared it falls back after [`EMPTYING_MAX`]: nobody came.
//!
//! The new owner opens as it does after a crash, and finds a short log and no grant to wait out (protocol rule 8). An
//! opening that has yielded never serves again: where nobody takes over, its host opens the volume anew.
//!
//! [`Event::Prepare`]: crate::Event::Prepare
//! [`Event::Yield`]: crate::Event::Yield

use crate::api::{Effect, Lane, Notice, State};
use crate::controller::{Controller, Out};
use crate::log::window::Log;
use crate::peers::Purpose;
use holdfast_base::{BlockError, Instant, Lsn};
use holdfast_format::wire::Request;
use std::time::Duration;

/// How long the log is kept short for an owner that does not come.
const EMPTYING_MAX: Duration = Duration::from_secs(15);

/// Log bytes that a new owner may find. Beyond them what has come since is emptied, too.
const LEFT_MAX: u64 = 4 << 20;

/// How long an owner that has stopped waits for nodes to know it. Of one that does not answer the new owner learns how
/// long its grant lasts.
const RELEASE_MAX: Duration = Duration::from_millis(50);

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Handover {
    #[default]
    None,
    /// Until all up to there is in segments, and the root names a checkpoint that knows it: from that the new owner
    /// reads the map beforehand.
    Emptying {
        upto: Lsn,
        until: Instant,
    },
    Prepared {
        until: Instant,
    },
    /// So many nodes have not answered yet.
    GivingUpGrants {
        left: usize,
        until: Instant,
    },
}

impl Handover {
    /// Whether all that is to go from the log waits for a checkpoint only.
    pub(crate) fn waits_for_checkpoint(&self, log: &Log) -> bool {
        let Handover::Emptying { upto, .. } = *self else { return false };
        log.first() <= upto && log.first_undestaged() > upto && log.trims_at.is_none()
    }

    /// Runs of checkpoints that the new owner is reading stay for a while.
    pub(crate) fn keeps_chain(&self) -> bool {
        matches!(self, Handover::Emptying { .. } | Handover::Prepared { .. })
    }
}

impl Controller {
    /// Whether a segment that is short is written rather than waited for, beside no other: guests' requests wait behind
    /// what is written at once.
    pub(crate) fn empties_log(&mut self) -> bool {
        let Handover::Emptying { upto, .. } = self.handover else { return false };
        self.state == State::Open && self.log.next_to_destage() <= upto
    }

    /// Whether the newest checkpoint waits for nothing but to be named by the root, as far as it is of use to the new
    /// owner.
    pub(crate) fn notes_checkpoint(&self) -> bool {
        let Handover::Emptying { upto, .. } = self.handover else { return false };
        self.root().checkpoint.lsn < self.checkpointer.durable().lsn.min(upto)
    }

    /// Whether all up to there is in segments and in a checkpoint. Records of what changes no map, as a checkpoint's
    /// own, stay in a log that is not written any more.
    fn is_emptied(&self, upto: Lsn) -> bool {
        let is_clean = !self.wants.checkpoint && self.checkpointer.is_idle() && self.log.trims_at.is_none();
        self.log.first_undestaged() > upto && (self.log.first() > upto || is_clean)
    }

    /// Whether somebody waits for the log to be emptied.
    pub(crate) fn is_awaited(&self) -> bool {
        matches!(self.handover, Handover::Emptying { .. })
    }

    pub(crate) fn on_prepare(&mut self, out: Out) {
        if self.state != State::Open {
            // It has nothing that could be emptied beside its service.
            return out.push(Effect::Notice(Notice::Prepared));
        }
        let (upto, until) = (self.log.completed, self.basis.now + EMPTYING_MAX);
        self.handover = Handover::Emptying { upto, until };
        self.progress(out);
    }

    pub(crate) fn drive_handover(&mut self, out: Out) {
        match self.handover {
            Handover::Emptying { until, .. } if until <= self.basis.now => {
                self.handover = Handover::None;
                out.push(Effect::Notice(Notice::NotPrepared));
            }
            Handover::Prepared { until } if until <= self.basis.now => self.handover = Handover::None,
            Handover::Emptying { upto, until } if self.is_emptied(upto) && !self.notes_checkpoint() => {
                self.handover = Handover::Prepared { until };
                out.push(Effect::Notice(Notice::Prepared));
            }
            Handover::Prepared { until } if self.log.bytes > LEFT_MAX => {
                self.handover = Handover::Emptying { upto: self.log.completed, until };
            }
            _ => {}
        }
    }

    /// Stops serving for good.
    pub(crate) fn on_yield(&mut self, out: Out) {
        if self.state != State::Open {
            return self.leave(State::Closed, BlockError::ShuttingDown, out);
        }
        self.abandon_creation(out);
        self.end_quiesce(false, out);
        self.refuse_all(BlockError::ShuttingDown, out);
        // Closed but for the notice: nothing is asked of nodes any more, and no answer counts.
        self.state = State::Closed;
        let open = self.log.open.as_ref().expect("an open volume has an open ledger");
        let (volume, epoch, legs) = (self.basis.config.volume, self.epoch(), open.legs.clone());
        let mut left = 0;
        for leg in legs {
            let request = Request::Release { device: leg.device, volume, epoch };
            left += usize::from(self.send(leg.node, Lane::Fast, Purpose::Release, request, Vec::new(), out).is_some());
        }
        self.handover = Handover::GivingUpGrants { left, until: self.basis.now + RELEASE_MAX };
        self.progress_release(0, out);
    }

    /// So many more nodes know that this owner serves no more, or won't be asked again.
    pub(crate) fn progress_release(&mut self, answered: usize, out: Out) {
        let Handover::GivingUpGrants { left, until } = &mut self.handover else { return };
        *left -= answered;
        if *left == 0 || *until <= self.basis.now {
            self.handover = Handover::None;
            out.push(Effect::Notice(Notice::StateChanged(State::Closed)));
        }
    }

    pub(crate) fn release_deadline(&self) -> Option<Instant> {
        match self.handover {
            Handover::GivingUpGrants { until, .. } => Some(until),
            _ => None,
        }
    }
}
