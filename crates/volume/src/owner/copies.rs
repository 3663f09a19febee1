//! Copies of the root record on the legs of the log: what tells where a volume's data begin when the metadata store is
//! lost.
//!
//! A root that changes more than where a checkpoint is goes to the legs at the same time as its swap. What it names
//! counts only when both are done: the swap has won, and a copy is durable on an ack set of the open ledger's legs, and
//! on a fence set of those of the ledger that it seals (protocol rule 27). Where that many legs can't be had the volume
//! goes on without after [`WAIT_MAX`], and says so ([`Controller::is_recoverable`]); they get their copy when they are
//! back.
//!
//! **A feature** is used when copies that name it were where a recovery can't miss them, in this opening: the log would hold
//! records that the root which is found does not know of ([`Controller::uses`]).
//!
//! Limits: one root at a time, as there is one swap at a time.

use crate::api::Lane;
use crate::controller::{Controller, Out};
use crate::owner::root::Change;
use crate::peers::Purpose;
use holdfast_base::Instant;
use holdfast_format::features::{Feature, Features};
use holdfast_format::ledger::{LedgerRef, Leg};
use holdfast_format::root::Root;
use holdfast_format::wire::{Reply, Request};
use std::collections::BTreeSet;
use std::time::Duration;

/// How long a swap that has won waits for copies.
const WAIT_MAX: Duration = Duration::from_millis(100);

/// Legs that lack a copy are tried again this often.
const RETRY_EVERY: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(crate) struct RootCopies {
    /// Rises with each root of this opening.
    sequence: u64,
    root: Option<Root>,
    /// The ledger that takes appends from then on, and the one that this root seals.
    open: Option<LedgerRef>,
    seals: Option<LedgerRef>,
    held: BTreeSet<Leg>,
    asked: BTreeSet<Leg>,
    tried_at: Instant,
    /// When the swap that waits for the copies goes on without.
    wait_until: Option<Instant>,
    /// Of the last root whose copies were safe.
    features: Features,
}

impl RootCopies {
    fn legs(&self) -> BTreeSet<Leg> {
        [&self.open, &self.seals].into_iter().flatten().flat_map(|ledger| ledger.legs.iter().copied()).collect()
    }

    fn mask(&self, ledger: &LedgerRef) -> u8 {
        let held = ledger.legs.iter().enumerate().filter(|(_, leg)| self.held.contains(leg));
        held.fold(0, |mask, (i, _)| mask | 1 << i)
    }

    /// Whether a recovery that asks all that it must can't miss it.
    fn is_safe(&self) -> bool {
        let on_open = |open: &LedgerRef| open.rule.is_ack_set(&open.legs, self.mask(open));
        let on_sealed = |sealed: &LedgerRef| sealed.rule.is_fence_set(&sealed.legs, self.mask(sealed));
        self.open.as_ref().is_none_or(on_open) && self.seals.as_ref().is_none_or(on_sealed)
    }

    fn note_features(&mut self) {
        if let Some(root) = &self.root
            && self.is_safe()
        {
            self.features = root.features.clone();
        }
    }
}

/// Whether the root is copied: not where it only names a newer checkpoint, which the log names as well, and not before
/// the opening that it is about serves.
fn is_copied(change: Change, old: Option<&Root>, new: &Root) -> bool {
    let drops = |old: &Root| old.ledgers.iter().any(|l| !new.ledgers.iter().any(|kept| kept.id == l.id));
    match change {
        Change::Claim | Change::Unclaim => false,
        Change::Tidy => old.is_some_and(drops),
        Change::Serve
        | Change::Roll
        | Change::Resize
        | Change::Layout
        | Change::Tiers
        | Change::Compression(_)
        | Change::Dependent
        | Change::Unname
        | Change::Members
        | Change::Dismiss { .. }
        | Change::Store => true,
    }
}

impl Controller {
    /// A swap to this root begins.
    pub(crate) fn copy_root(&mut self, root: &Root, change: Change, out: Out) {
        let old = self.basis.known();
        if !is_copied(change, old, root) {
            return;
        }
        let was_open = old.and_then(Root::open_ledger);
        let open = root.open_ledger().cloned();
        let seals = was_open.filter(|was| open.as_ref().is_none_or(|open| open.id != was.id)).cloned();
        self.copies = RootCopies {
            sequence: self.copies.sequence + 1,
            root: Some(root.clone()),
            open,
            seals,
            features: std::mem::take(&mut self.copies.features),
            ..RootCopies::default()
        };
        self.copies.note_features();
        self.send_copies(out);
    }

    /// To legs that have none, and were not asked. Those whose nodes don't know of copies count as out of reach.
    fn send_copies(&mut self, out: Out) {
        let Some(root) = self.copies.root.clone() else { return };
        self.copies.tried_at = self.basis.now;
        let (volume, sequence, bytes) = (self.basis.config.volume, self.copies.sequence, root.encode());
        for leg in self.copies.legs() {
            if self.copies.held.contains(&leg) || self.copies.asked.contains(&leg) {
                continue;
            }
            let request =
                Request::PutRoot { device: leg.device, volume, epoch: root.epoch, sequence, root: bytes.clone() };
            let purpose = Purpose::PutRoot { leg, sequence };
            if self.peers.understands(leg.node, &request)
                && self.send(leg.node, Lane::Fast, purpose, request, Vec::new(), out).is_some()
            {
                self.copies.asked.insert(leg);
            }
        }
    }

    pub(crate) fn on_root_put(&mut self, leg: Leg, sequence: u64, reply: &Reply, out: Out) {
        if sequence != self.copies.sequence {
            return;
        }
        self.copies.asked.remove(&leg);
        if *reply == Reply::Done {
            self.copies.held.insert(leg);
            self.copies.note_features();
        }
        self.finish_swap(out);
    }

    pub(crate) fn on_root_put_lost(&mut self, leg: Leg, sequence: u64, out: Out) {
        if sequence == self.copies.sequence {
            self.copies.asked.remove(&leg);
            self.finish_swap(out);
        }
    }

    /// Whether a swap that has won waits for copies that are on their way.
    pub(crate) fn awaits_copies(&mut self) -> bool {
        if self.copies.is_safe() || self.copies.asked.is_empty() {
            return false;
        }
        let until = *self.copies.wait_until.get_or_insert(self.basis.now + WAIT_MAX);
        self.basis.now < until
    }

    /// Legs that were out of reach get their copy when they are back.
    pub(crate) fn drive_copies(&mut self, out: Out) {
        if self.basis.now.since(self.copies.tried_at) < RETRY_EVERY || !self.copies.asked.is_empty() {
            return;
        }
        if !self.root.is_swapping() && self.lacks_copy() {
            self.send_copies(out);
        }
    }

    /// Whether a leg within reach has no copy.
    pub(crate) fn lacks_copy(&self) -> bool {
        let lacks = |leg: &Leg| !self.copies.held.contains(leg) && self.peers.is_usable(leg.node);
        self.copies.legs().iter().any(lacks)
    }

    /// Whether records of that feature may be written.
    pub(crate) fn uses(&self, feature: Feature) -> bool {
        self.root().features.has(feature) && self.copies.features.has(feature)
    }

    /// Whether the volume could be opened as it is if the metadata store were lost.
    pub(crate) fn is_recoverable(&self) -> bool {
        self.copies.root.is_some() && self.copies.is_safe()
    }
}
