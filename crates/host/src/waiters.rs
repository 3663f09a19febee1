//! Orders whose end controllers tell: who waits for which.
//!
//! Invariant: each is told once, at the latest when its volume goes out of service.

use crate::event::{ChangeOutcome, CloseOutcome, DependentOutcome, Effect, Outcome, Policy, ResizeOutcome};
use crate::host::Out;
use holdfast_base::{Token, VolumeId};
use holdfast_volume::{Change, Notice};

/// What an order waits for.
#[derive(Debug)]
pub(crate) enum Awaited {
    Resize { size_bytes: u64 },
    Policy(Policy),
    Change(Change),
    Dependent(VolumeId),
    Prepare,
    Close,
}

struct Waiter {
    at: Token,
    awaited: Awaited,
    ticket: u64,
}

#[derive(Default)]
pub(crate) struct Waiters(Vec<Waiter>);

impl Waiters {
    pub fn add(&mut self, at: Token, awaited: Awaited, ticket: u64) {
        self.0.push(Waiter { at, awaited, ticket });
    }

    /// Tells those of a volume that wait for something of the kind.
    fn tell(&mut self, at: Token, is_it: impl Fn(&Awaited) -> bool, outcome: &Outcome, out: Out) {
        for waiter in self.0.extract_if(.., |waiter| waiter.at == at && is_it(&waiter.awaited)) {
            out.push(Effect::Done { ticket: waiter.ticket, outcome: outcome.clone() });
        }
    }

    pub fn on_resized(&mut self, at: Token, size_bytes: u64, out: Out) {
        let is_it = |of: &Awaited| matches!(of, Awaited::Resize { size_bytes: of } if *of == size_bytes);
        self.tell(at, is_it, &Outcome::Resized(ResizeOutcome::Done), out);
    }

    pub fn on_policy_set(&mut self, at: Token, policy: Policy, out: Out) {
        let is_it = |of: &Awaited| matches!(of, Awaited::Policy(of) if *of == policy);
        self.tell(at, is_it, &Outcome::Was(true), out);
    }

    pub fn on_change(&mut self, at: Token, change: &Change, outcome: &ChangeOutcome, out: Out) {
        let is_it = |of: &Awaited| matches!(of, Awaited::Change(of) if of == change);
        self.tell(at, is_it, &Outcome::Changed(outcome.clone()), out);
    }

    /// What came of making a separate clone.
    pub fn on_dependent_notice(&mut self, at: Token, notice: &Notice, out: Out) {
        let (of, outcome) = match notice {
            Notice::DependentCreated { dependent, root } => (*dependent, DependentOutcome::Made(root.clone())),
            Notice::DependentRefused { dependent, why } => (*dependent, DependentOutcome::Refused(why)),
            _ => return,
        };
        let is_it = |awaited: &Awaited| matches!(awaited, Awaited::Dependent(dependent) if *dependent == of);
        self.tell(at, is_it, &Outcome::Dependent(outcome), out);
    }

    /// Its log is short, or the volume is served here no more.
    pub fn on_prepared(&mut self, at: Token, is_prepared: bool, out: Out) {
        self.tell(at, |of| matches!(of, Awaited::Prepare), &Outcome::Was(is_prepared), out);
    }

    /// The volume went out of service: what became of the changes that were asked for, its next owner knows.
    pub fn on_changes_lost(&mut self, at: Token, out: Out) {
        self.tell(at, |of| matches!(of, Awaited::Change(_)), &Outcome::Changed(ChangeOutcome::NotOpen), out);
        self.tell(at, |of| matches!(of, Awaited::Dependent(_)), &Outcome::Dependent(DependentOutcome::NotOpen), out);
    }

    pub fn on_closed(&mut self, at: Token, out: Out) {
        self.on_changes_lost(at, out);
        self.on_prepared(at, false, out);
        self.tell(at, |of| matches!(of, Awaited::Policy(_)), &Outcome::Was(false), out);
        self.tell(at, |of| matches!(of, Awaited::Close), &Outcome::Closed(CloseOutcome::Closed), out);
        self.tell(at, |of| matches!(of, Awaited::Resize { .. }), &Outcome::Resized(ResizeOutcome::NotOpen), out);
    }
}
