//! Rolling: a new ledger on healthy legs takes over from one whose legs are not.
//!
//! States: `Creating` (the new ledger is being created durably on all its legs; the old one works on as far as it can)
//! -> `Asking` (whether the metadata store is there, where the old ledger can do without) -> `Swapping` (old one
//! frozen, seal chosen, root swap in flight) -> done. A leg that doesn't answer its creation is left out: the roll
//! begins again with others under a new ledger id.
//!
//! Invariant: a ledger that acknowledges is frozen only after the metadata store has answered something that it was
//! asked since the roll began: while the store is away writes go on.
//!
//! Protocol rules 1, 3 and 4.

use crate::api::{Effect, Lane, Notice, State};
use crate::care::ledger_inventory;
use crate::controller::{Controller, Out};
use crate::log::window::OpenLedger;
use crate::owner::root::Change;
use crate::peers::Purpose;
use holdfast_base::{Instant, LedgerId, Lsn};
use holdfast_format::ledger::{LedgerRef, Leg};
use holdfast_format::root::Root;
use holdfast_format::wire::{LedgerState, Reply, Request};
use std::collections::BTreeSet;
use std::time::Duration;

#[derive(Debug)]
pub(crate) struct Roll {
    pub(crate) new: LedgerRef,
    created: u8,
    began_at: Instant,
    sealed_at: Option<Lsn>,
}

/// Without need, the ledger is rolled to a better one at most this often.
const BETTER_EVERY: Duration = Duration::from_millis(500);

impl Controller {
    /// A ledger of this epoch that never was.
    pub(crate) fn new_ledger_ref(&mut self) -> Option<LedgerRef> {
        let (legs, rule) = self.placer().choose_legs()?;
        let id = LedgerId { epoch: self.epoch(), n: self.next_ledger };
        self.next_ledger += 1;
        Some(LedgerRef { id, legs, rule, sealed: None })
    }

    pub(crate) fn create_ledger(&mut self, new: &LedgerRef, out: Out) -> bool {
        let (volume, epoch, instance) = (self.basis.config.volume, self.epoch(), self.basis.config.instance);
        let mut sent = true;
        for (i, leg) in new.legs.iter().enumerate() {
            let request = Request::CreateLedger {
                device: leg.device,
                volume,
                epoch,
                instance,
                ledger: new.id,
                legs: new.legs.clone(),
                rule: new.rule,
            };
            let purpose = Purpose::CreateLedger { ledger: new.id, leg: i as u8 };
            sent &= self.send(leg.node, Lane::Fast, purpose, request, Vec::new(), out).is_some();
        }
        sent
    }

    /// Begins a roll unless one is under way.
    pub(crate) fn want_roll(&mut self, out: Out) {
        if self.roll.is_some() || !matches!(self.state, State::Open | State::Closing) {
            return;
        }
        let Some(new) = self.new_ledger_ref() else { return };
        self.roll = Some(Roll { new: new.clone(), created: 0, began_at: self.basis.now, sealed_at: None });
        if !self.create_ledger(&new, out) {
            self.roll = None;
        }
    }

    pub(crate) fn roll_is_swapping(&self) -> bool {
        self.roll.as_ref().is_some_and(|r| r.sealed_at.is_some())
    }

    pub(crate) fn on_ledger_created(&mut self, ledger: LedgerId, leg: u8, sent_at: Instant, reply: &Reply, out: Out) {
        if self.opening.is_some() {
            self.on_first_ledger_created(ledger, leg, reply, out);
            return;
        }
        let Some(roll) = &mut self.roll else { return };
        if roll.new.id != ledger || roll.sealed_at.is_some() {
            return;
        }
        if *reply != Reply::Done {
            let home = roll.new.legs[usize::from(leg)];
            self.on_leg_refused_creation(home, reply);
            self.roll = None;
            return;
        }
        roll.created |= 1 << leg;
        let _ = sent_at;
        self.drive_roll(out);
    }

    /// A device that refuses for good is out; one that is busy is tried again.
    pub(crate) fn on_leg_refused_creation(&mut self, home: Leg, reply: &Reply) {
        use holdfast_format::wire::Refusal::{DeviceFailed, Invalid, UnknownDevice};
        if let Reply::Refused(DeviceFailed | UnknownDevice | Invalid) = reply {
            self.peers.on_device_failed(home);
        }
    }

    pub(crate) fn on_create_lost(&mut self, ledger: LedgerId, leg: u8, out: Out) {
        if self.opening.is_some() {
            self.on_first_ledger_lost(ledger, leg, out);
        } else if self.roll.as_ref().is_some_and(|r| r.new.id == ledger && r.sealed_at.is_none()) {
            self.roll = None;
        }
    }

    /// Moves the roll on, and begins one where the open ledger has no usable ack set, or a better one is to be had.
    pub(crate) fn drive_roll(&mut self, out: Out) {
        let Some(roll) = &self.roll else {
            let Some(open) = &self.log.open else { return };
            let usable = self.usable_legs();
            let broken = open.choose_preferred(usable) == 0;
            let better =
                self.topology().better_ledger_possible(&open.legs, open.rule, usable) && self.roll_pause_over();
            if broken || better {
                self.rolled_at = self.basis.now;
                self.want_roll(out);
            }
            return;
        };
        let all = ((1_u16 << roll.new.legs.len()) - 1) as u8;
        if roll.sealed_at.is_some() || roll.created != all || self.root.is_swapping() {
            return;
        }
        if !roll.new.legs.iter().all(|leg| self.peers.leg_usable(*leg)) {
            return self.give_up_roll(out);
        }
        if self.waits_for_store(out) {
            return;
        }
        let sealed = self.log.completed;
        let roll = self.roll.as_mut().expect("just seen");
        roll.sealed_at = Some(sealed);
        let new = roll.new.clone();
        let mut root = self.tidied_root();
        let old = root.ledgers.last_mut().expect("an open volume has a ledger");
        assert!(old.sealed.is_none(), "the last ledger is the open one");
        old.sealed = Some(sealed);
        root.ledgers.push(new);
        // From here on nothing completes in the old ledger, whatever comes of the swap.
        self.log.open.as_mut().expect("an open volume has an open ledger").frozen = true;
        self.swap_root(root, Change::Roll, out);
    }

    /// Whether the old ledger is better than none, as it is while nobody knows that the store answers.
    fn waits_for_store(&mut self, out: Out) -> bool {
        let (Some(roll), Some(open)) = (&self.roll, &self.log.open) else { return false };
        let since = roll.began_at;
        if open.choose_preferred(self.usable_legs()) == 0 || self.root.was_heard_since(since) {
            return false;
        }
        self.ask_store(since, out);
        true
    }

    /// The new ledger has waited and lost a leg, which is no better than what there is.
    fn give_up_roll(&mut self, out: Out) {
        let Some(Roll { new: LedgerRef { id, legs, .. }, .. }) = self.roll.take() else { return };
        for leg in legs {
            if self.peers.is_usable(leg.node) {
                self.delete_ledger(leg, id, out);
            }
        }
    }

    pub(crate) fn roll_pause_over(&self) -> bool {
        self.basis.now.since(self.rolled_at) >= BETTER_EVERY
    }

    pub(crate) fn on_rolled(&mut self, out: Out) {
        let roll = self.roll.take().expect("a roll was swapped");
        self.counters.rolls += 1;
        self.open_ledger(&roll.new);
        self.move_in_flight_to_open_ledger();
        self.on_legs_changed(out);
        self.serve_granted_reads(out);
        let ledgers = self.root().ledgers.len();
        out.push(Effect::Notice(Notice::LedgerRolled { ledgers }));
    }

    pub(crate) fn open_ledger(&mut self, reference: &LedgerRef) {
        self.log.open = Some(OpenLedger::new(reference));
    }

    /// Entries beyond the seal don't exist in the old ledger: they go to the new one under their LSNs.
    fn move_in_flight_to_open_ledger(&mut self) {
        let id = self.log.open.as_ref().expect("just opened").id;
        for lsn in self.log.completed.0 + 1..self.log.next_lsn().0 {
            self.log.give_to(Lsn(lsn), id);
        }
    }

    // ---- ledgers that are over ----

    pub(crate) fn on_ledger_inventory(&mut self, leg: Leg, reply: &Reply, out: Out) {
        let Reply::Fenced { ledgers, .. } = reply else { return };
        self.note_held(leg, ledgers);
        let opening = self.opening.as_ref().and_then(|opening| opening.new_ledger());
        let to_be_named = self.roll.as_ref().map(|r| r.new.id).or(opening);
        self.delete_unnamed_ledgers(leg, ledgers, to_be_named, out);
    }

    /// Of these ledgers on a leg, deletes those that the root doesn't name, apart from one that is still to be named.
    pub(crate) fn delete_unnamed_ledgers(
        &mut self,
        leg: Leg,
        ledgers: &[LedgerState],
        to_be_named: Option<LedgerId>,
        out: Out,
    ) {
        let named: BTreeSet<_> = self.root().ledgers.iter().map(|l| l.id).chain(to_be_named).collect();
        for state in ledgers.iter().filter(|state| !named.contains(&state.ledger)) {
            self.delete_ledger(leg, state.ledger, out);
        }
    }

    pub(crate) fn delete_ledger(&mut self, leg: Leg, ledger: LedgerId, out: Out) {
        let (volume, epoch) = (self.basis.config.volume, self.epoch());
        let request = Request::DeleteLedger { device: leg.device, volume, epoch, ledger };
        self.send(leg.node, Lane::Fast, Purpose::Forget, request, Vec::new(), out);
    }

    /// The root record names these ledgers no more.
    pub(crate) fn delete_dropped_ledgers(&mut self, old: Option<&Root>, out: Out) {
        let Some(old) = old else { return };
        let named: BTreeSet<_> = self.root().ledgers.iter().map(|l| l.id).collect();
        for ledger in old.ledgers.iter().filter(|l| !named.contains(&l.id)) {
            for leg in &ledger.legs {
                if self.peers.is_usable(leg.node) {
                    self.delete_ledger(*leg, ledger.id, out);
                }
            }
        }
    }

    /// Asks which ledgers of the volume the device has: those that the root doesn't name will go.
    pub(crate) fn list_ledgers(&mut self, leg: Leg, out: Out) {
        self.peers.send(self.basis.now, ledger_inventory(&self.basis, leg), out);
    }
}
