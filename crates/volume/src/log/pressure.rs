//! Pressure: how full the journals are that this volume appends to, and what is held back for it.
//!
//! A journal is shared by all volumes of its device, and only a durable checkpoint frees it. The record of that
//! checkpoint goes through the same journal, behind whatever was appended before it; so guests' writes stop short of a
//! full journal, with what is in flight counted, and a quarter stays for records.

use crate::controller::{Controller, Out};
use crate::peers::Node;
use crate::space::{STAND_IN_PER_MILLE, fill_per_mille, is_roomy};
use holdfast_base::{Instant, LedgerId, NodeId};
use holdfast_format::ledger::Leg;
use holdfast_format::wire::{DeviceHealth, DeviceStat};
use std::collections::BTreeSet;
use std::time::Duration;

/// Share of a journal that guests' writes fill at most, with those in flight.
const FILL_PER_MILLE_MAX: u64 = 750;

/// One volume's entries in flight take at most this part of a journal: others may be as fast at the same moment.
const IN_FLIGHT_SHARE: u64 = 16;

/// While writes are held back, nodes are asked this often how full their journals are.
const ASK_EVERY: Duration = Duration::from_millis(10);

#[derive(Debug, Default)]
pub(crate) struct Pressure {
    asked_at: Instant,
}

impl Controller {
    /// An append's answer told how full the leg's journal is, in 1/255.
    pub(crate) fn note_journal_fill(&mut self, ledger: LedgerId, leg: u8, fill: u8) {
        self.checkpointer.note_journal_fill(fill);
        let Some(open) = self.log.open.as_ref().filter(|o| o.id == ledger) else { return };
        self.peers.on_journal_fill(open.legs[usize::from(leg)], fill);
    }

    /// Legs' journals that new entries go to; while none can, those that they will go to.
    fn preferred_journals(&self) -> impl Iterator<Item = &DeviceStat> {
        let open = self.log.open.iter();
        let is_preferred = |preferred: u8, i: usize| preferred == 0 || preferred >> i & 1 == 1;
        open.flat_map(move |open| open.legs.iter().enumerate().filter(move |(i, _)| is_preferred(open.preferred, *i)))
            .filter_map(|(_, leg)| self.peers.device(*leg))
    }

    /// Fill of the fullest of them, in 1/1000 of what guests' writes may fill, with what is in flight.
    pub(crate) fn journal_per_mille(&self) -> u64 {
        let in_flight = self.log.in_flight_bytes();
        let fullest = self.preferred_journals().map(|d| fill_per_mille(d, in_flight)).max();
        fullest.unwrap_or(0) * 1000 / FILL_PER_MILLE_MAX
    }

    /// Whether the journals take another `len` bytes of a guest. Where others fill them, a volume with nothing left to
    /// destage still gets one write through at a time.
    pub(crate) fn journals_admit(&self, len: u64) -> bool {
        let in_flight = self.log.in_flight_bytes();
        let fits = self.preferred_journals().all(|d| {
            fill_per_mille(d, in_flight + len) <= FILL_PER_MILLE_MAX
                && (in_flight == 0 || (in_flight + len) * IN_FLIGHT_SHARE <= d.journal_bytes)
        });
        // Nothing is known of the journals of nodes that were never heard of.
        let is_known = self.preferred_journals().next().is_some();
        fits && (is_known || in_flight == 0) || in_flight == 0 && self.log.all_destaged()
    }

    /// Held back by full journals, a controller hears of no fill by itself: it asks.
    pub(crate) fn ask_for_journal_room(&mut self, out: Out) {
        let due = self.basis.now.since(self.pressure.asked_at) >= ASK_EVERY;
        if !due || !self.writes_wait_for_journals() {
            return;
        }
        self.pressure.asked_at = self.basis.now;
        let nodes: Vec<_> = self.log.open.iter().flat_map(|o| o.legs.iter().map(|l| l.node)).collect();
        for node in nodes {
            self.peers.ask_state(self.basis.now, node, out);
        }
    }

    /// Whether a device with room could stand for a full leg that entries go to.
    pub(crate) fn finds_roomier_legs(&self) -> bool {
        let Some(open) = &self.log.open else { return false };
        let preferred =
            || open.legs.iter().enumerate().filter(|(i, _)| open.preferred >> i & 1 == 1).map(|(_, leg)| leg);
        let is_full = |leg: &Leg| self.peers.device(*leg).is_none_or(|d| fill_per_mille(d, 0) >= 1000);
        let is_nested = self.root().layout.is_nested();
        let usable = self.peers.usable();
        let mut devices = usable.flat_map(|(id, n)| n.devices().map(move |d| (id, d)));
        preferred().any(&is_full)
            && devices.any(|(node, d)| {
                let here = || preferred().filter(move |leg| leg.node == node);
                let may_stand = here().any(&is_full) || !is_nested && here().next().is_none();
                may_stand
                    && self.peers.takes_shards(d)
                    && fill_per_mille(d, 0) < STAND_IN_PER_MILLE
                    && here().all(|leg| leg.device != d.device)
            })
    }

    /// A leg has no room for an entry: its ledger is rolled if that finds journals with more room. The entry itself is
    /// sent again with the next tick.
    pub(crate) fn on_journal_full(&mut self, ledger: LedgerId, leg: u8, out: Out) {
        self.note_journal_fill(ledger, leg, u8::MAX);
        let Some(open) = &self.log.open else { return };
        if open.rule.domains == 0 {
            let roomy = self.topology().usable_devices().filter(|d| is_roomy(d)).count();
            if roomy >= usize::from(open.rule.copies) && self.roll_pause_over() {
                self.rolled_at = self.basis.now;
                self.want_roll(out);
            }
            return;
        }
        let nodes: BTreeSet<NodeId> = open.legs.iter().map(|leg| leg.node).collect();
        let each = usize::from(open.rule.copies.div_ceil(open.rule.domains.max(1)));
        let roomy = |(_, n): &(_, &Node)| {
            let devices = n.devices().filter(|d| d.health == DeviceHealth::Serving && is_roomy(d));
            n.is_usable() && devices.count() >= each
        };
        if self.peers.iter().filter(roomy).count() >= nodes.len() && self.roll_pause_over() {
            self.rolled_at = self.basis.now;
            self.want_roll(out);
        }
    }
}
