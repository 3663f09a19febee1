//! Orders of the control plane: what shall become of volumes that are here, or shall be.

use crate::event::{ChangeOutcome, CloseOutcome, Effect, OpenSpec, Order, Outcome, ResizeOutcome, Wanted};
use crate::host::{Host, Out, info, warn};
use crate::inspections::Purpose;
use crate::reservation::ReservedVolume;
use crate::volumes::{VOLUMES_MAX, Volume};
use crate::waiters::Awaited;
use holdfast_base::{DeviceId, HeadId, Instant, Token, VolumeId};
use holdfast_volume::{Change, Claim, Event as VolumeEvent, PreloadState, Question, State, Target};
use std::collections::BTreeMap;

impl Host {
    pub(crate) fn on_order(&mut self, now: Instant, ticket: u64, order: Order, out: Out) {
        // Nothing where it is told later.
        let outcome = match order {
            Order::Open { spec, exported } => {
                self.open_if_closed(now, spec, (exported, VolumeEvent::Open), out);
                Some(Outcome::Done)
            }
            Order::Preload { spec } => self.preload(now, spec, ticket, out),
            Order::Inspect(question) => {
                self.inspect(now, ticket, Purpose::Volumes, question, out);
                None
            }
            Order::LetGo { volume } => {
                self.let_go(now, volume, out);
                Some(Outcome::Done)
            }
            Order::Close { name, only_care, .. } if only_care && !self.is_in_care(&name) => {
                Some(Outcome::Closed(CloseOutcome::NotOpen))
            }
            Order::Close { name, force, discard, .. } => self.close(now, &name, (force, discard), ticket, out),
            Order::Receive { name, ticket } => Some(Outcome::Was(self.set_receiver(&name, ticket, out))),
            Order::Resize { name, size_bytes, force } => self.resize(now, &name, (size_bytes, force), ticket, out),
            Order::Change { volume, wanted } => self.change(now, &volume, wanted, ticket, out),
            Order::Filters { volume, change } => {
                Some(Outcome::Filtered(self.change_filters(now, &volume, change, out)))
            }
            Order::SnapshotGroup(order) => {
                self.begin_group(now, ticket, order, out);
                None
            }
            Order::AskToYield { host, volume } => {
                self.ask_to_yield(ticket, &host, volume, out);
                None
            }
            Order::Offer { offers, hosts, heard_at } => {
                self.forward.heard_at = heard_at;
                self.set_offers(offers, hosts, out);
                Some(Outcome::Done)
            }
            Order::CloseAll => {
                self.close_all(now, out);
                Some(Outcome::Done)
            }
            order => self.on_small_order(now, ticket, order, out),
        };
        if let Some(outcome) = outcome {
            out.push(Effect::Done { ticket, outcome });
        }
    }

    fn tell(&mut self, now: Instant, name: &str, event: VolumeEvent, out: Out) {
        if let Some((at, _)) = self.volumes.find_open(name) {
            self.drive(now, at, event, out);
        }
    }

    /// Orders that are hardly more than an event for a controller, or a value that is kept.
    fn on_small_order(&mut self, now: Instant, ticket: u64, order: Order, out: Out) -> Option<Outcome> {
        match order {
            Order::SetPolicy { name, policy } => {
                let Some((at, _)) = self.volumes.find_open(&name) else { return Some(Outcome::Was(false)) };
                self.waiters.add(at, Awaited::Policy(policy), ticket);
                self.drive(now, at, policy.into(), out);
                return None;
            }
            Order::Prepare { name } => {
                let found = self.find_serving(&name);
                let found = found.filter(|(at, _)| self.volumes.table.get(*at).is_some_and(Volume::serves));
                let Some((at, _)) = found else { return Some(Outcome::Was(false)) };
                self.waiters.add(at, Awaited::Prepare, ticket);
                self.drive(now, at, VolumeEvent::Prepare, out);
                return None;
            }
            Order::CreateDependent { volume, snapshot, dependent, name, size_bytes } => {
                let Some((at, head)) = self.volumes.find_open(&volume) else {
                    return Some(Outcome::Dependent(crate::DependentOutcome::NotOpen));
                };
                self.waiters.add(at, Awaited::Dependent(dependent), ticket);
                self.drive(now, at, VolumeEvent::CreateDependent { head, snapshot, dependent, name, size_bytes }, out);
                return None;
            }
            Order::CheckReads { name, checked } => self.tell(now, &name, VolumeEvent::CheckReads(checked), out),
            Order::SetSharing { name, store, key } => {
                self.tell(now, &name, VolumeEvent::SetSharing { store, key }, out);
            }
            Order::EndSharing { name } => self.tell(now, &name, VolumeEvent::EndSharing, out),
            Order::Dependent { origin, dependent, names } => {
                if let Some(at) = self.volumes.find_id(origin) {
                    self.drive(now, at, VolumeEvent::Dependent { volume: dependent, names }, out);
                }
            }
            Order::KeepSpare(keep) => {
                if std::mem::replace(&mut self.volumes.keeps_spare, keep) != keep {
                    self.drive_all(now, &VolumeEvent::KeepSpare(keep), out);
                }
            }
            Order::Drain(devices) => {
                self.draining = devices.clone();
                self.drive_all(now, &VolumeEvent::Drain { devices }, out);
            }
            Order::LocalNodes(nodes) => {
                self.local_nodes = nodes.clone();
                self.drive_all(now, &VolumeEvent::LocalNodes { nodes }, out);
            }
            Order::TakeNoMore => self.is_stopping = true,
            Order::Share(volumes) => self.set_shared(volumes),
            Order::SetReservation { volume, reservation } => self.set_reservation(now, volume, reservation, out),
            Order::Access { lists, limits } => {
                if self.volumes.access != lists {
                    self.volumes.access = lists;
                    self.cut_refused(out);
                }
                self.set_limits(now, limits, out);
            }
            order => unreachable!("taken by on_order: {order:?}"),
        }
        Some(Outcome::Done)
    }

    // ---- open and close ----

    /// `begin` is told to a controller that has not begun to open.
    fn open_if_closed(&mut self, now: Instant, spec: OpenSpec, (exported, begin): (bool, VolumeEvent), out: Out) {
        if self.is_stopping {
            return;
        }
        if let Some((at, _)) = self.volumes.find_open(&spec.name) {
            let is_over = |v: &Volume| matches!(v.controller.state(), State::Deposed | State::Closed);
            let of_use = |v: &&mut Volume| !is_over(v) && !v.is_in_the_way_of(&spec);
            if let Some(volume) = self.volumes.table.get_mut(at).filter(of_use) {
                if exported || !volume.exported {
                    volume.controller.guard_claim(spec.guard);
                }
                volume.exported |= exported;
                self.changed.push(spec.volume);
                return self.drive(now, at, begin, out);
            }
            self.on_volume_closed(now, at, out);
        }
        // Under the name that it had before, or in the trash, nobody uses it.
        let is_former = |at: &Token| self.volumes.table.get(*at).is_some_and(|v| !v.exported && v.name != spec.name);
        if let Some(at) = self.volumes.find_id(spec.volume).filter(is_former) {
            self.on_volume_closed(now, at, out);
        }
        if self.volumes.table.is_full() {
            let name = &spec.name;
            return warn(
                out,
                format!("volume {name} is not opened: {VOLUMES_MAX} are, and a host has no more at a time"),
            );
        }
        self.open_volume(now, spec, (exported, begin), out);
    }

    /// Reads what another host is about to hand over.
    fn preload(&mut self, now: Instant, spec: OpenSpec, ticket: u64, out: Out) -> Option<Outcome> {
        let id = spec.volume;
        self.open_if_closed(now, spec, (false, VolumeEvent::Preload), out);
        let volume = self.find_id(id);
        let state = volume.map(|volume| volume.controller.preload_state());
        // With more nodes away than its layout bears, the log's being there is not all that it takes.
        let is_short = volume.is_some_and(|volume| self.nodes_away.len() > usize::from(volume.layout().failures()));
        if state != Some(Some(PreloadState::Done)) || !is_short {
            return Some(Outcome::Preload(state));
        }
        self.inspect(now, ticket, Purpose::Preload(id), Question::Lost(self.nodes_away.clone()), out);
        None
    }

    fn is_in_care(&self, name: &str) -> bool {
        self.find(name).is_some_and(|(volume, _)| !volume.exported)
    }

    fn close(
        &mut self,
        now: Instant,
        name: &str,
        (force, discard): (bool, bool),
        ticket: u64,
        out: Out,
    ) -> Option<Outcome> {
        let found = self.volumes.find_open(name).and_then(|(at, _)| Some((at, self.volumes.table.get(at)?)));
        let Some((at, volume)) = found else { return Some(Outcome::Closed(CloseOutcome::NotOpen)) };
        if volume.sessions() > 0 && !force {
            return Some(Outcome::Closed(CloseOutcome::InUse(volume.sessions())));
        }
        let is_over = matches!(volume.controller.state(), State::Deposed | State::Closed);
        self.let_sessions_go(at, out);
        self.waiters.add(at, Awaited::Close, ticket);
        if discard || is_over {
            self.on_volume_closed(now, at, out);
        } else {
            self.drain_filters(now, at, out);
            self.drive(now, at, VolumeEvent::Close, out);
        }
        None
    }

    fn let_go(&mut self, now: Instant, volume: VolumeId, out: Out) {
        while let Some(at) = self.volumes.find_id(volume) {
            self.let_sessions_go(at, out);
            self.on_volume_closed(now, at, out);
        }
    }

    /// Every volume is closed; see [`Host::count_open`].
    fn close_all(&mut self, now: Instant, out: Out) {
        info(out, format!("stopping: {} volumes are closed first", self.volumes.table.len()));
        for at in self.volumes.tokens() {
            self.drain_filters(now, at, out);
            self.drive(now, at, VolumeEvent::Close, out);
        }
    }

    /// Volumes that a stop still waits for.
    pub fn count_open(&self) -> usize {
        self.volumes().filter(|v| !matches!(v.controller.state(), State::Closed | State::Deposed)).count()
    }

    fn set_receiver(&mut self, name: &str, ticket: Option<String>, out: Out) -> bool {
        let Some((at, HeadId::VOLUME)) = self.volumes.find_open(name) else { return false };
        match self.volumes.table.get_mut(at).filter(|volume| !volume.exported) {
            Some(volume) => volume.receiver = ticket,
            None => return false,
        }
        for session in self.sessions_where(|session| session.at() == Some(at)) {
            self.abort_session(session, None, out);
        }
        true
    }

    // ---- changes ----

    fn resize(
        &mut self,
        now: Instant,
        name: &str,
        (size_bytes, force): (u64, bool),
        ticket: u64,
        out: Out,
    ) -> Option<Outcome> {
        let found = self.volumes.find_open(name);
        let found = found.and_then(|(at, head)| Some((at, head, self.volumes.table.get(at)?.size_bytes(head))));
        let Some((at, head, now_bytes)) = found else { return Some(Outcome::Resized(ResizeOutcome::NotOpen)) };
        if now_bytes == size_bytes {
            return Some(Outcome::Resized(ResizeOutcome::Done));
        }
        if size_bytes < now_bytes && !force && self.users_of(at, head, Target::Head(head)) > 0 {
            return Some(Outcome::Resized(ResizeOutcome::InUse));
        }
        self.waiters.add(at, Awaited::Resize { size_bytes }, ticket);
        self.drive(now, at, VolumeEvent::Resize { size_bytes }, out);
        None
    }

    fn find_serving(&self, name: &str) -> Option<(Token, HeadId)> {
        let is_open = |at: Token| self.volumes.table.get(at).is_some_and(|v| v.controller.state() == State::Open);
        self.volumes.find_open(name).filter(|(at, _)| is_open(*at))
    }

    fn change(&mut self, now: Instant, volume: &str, wanted: Wanted, ticket: u64, out: Out) -> Option<Outcome> {
        let Some((at, head)) = self.find_serving(volume) else {
            return Some(Outcome::Changed(ChangeOutcome::NotOpen));
        };
        if matches!(wanted, Wanted::DropClone { force: true }) {
            for session in self.sessions_of_head(at, head) {
                self.abort_session(session, None, out);
            }
            self.cut_remotes_of(at, head);
        }
        match self.change_for(at, head, wanted) {
            Ok(change) => {
                if matches!(change, Change::DropClone { .. }) {
                    self.drain_filters_of(now, at, head, out);
                }
                self.waiters.add(at, Awaited::Change(change.clone()), ticket);
                self.drive(now, at, VolumeEvent::Change(change), out);
                None
            }
            Err(outcome) => Some(Outcome::Changed(outcome)),
        }
    }

    /// What the controller is asked for, or why not.
    fn change_for(&self, at: Token, head: HeadId, wanted: Wanted) -> Result<Change, ChangeOutcome> {
        let volume = self.volumes.table.get(at).expect("a volume in service");
        let unused = |clients: usize| if clients > 0 { Err(ChangeOutcome::InUse(clients)) } else { Ok(()) };
        match wanted {
            Wanted::Snapshot { name, created_ms } => Ok(Change::Snapshot { head, name, created_ms }),
            Wanted::DropSnapshot { name } => {
                let found = volume.snapshot(head, &name);
                unused(found.map_or(0, |(layer, _)| self.users_of(at, head, Target::Snapshot(layer))))?;
                Ok(Change::DropSnapshot { head, name })
            }
            Wanted::Rollback { snapshot } => {
                unused(self.users_of(at, head, Target::Head(head)))?;
                volume.check_filters_are_clear(head)?;
                Ok(Change::Rollback { head, name: snapshot })
            }
            Wanted::Clone { snapshot, id, name, size_bytes } => {
                let found = volume.snapshot(head, &snapshot);
                let (of, found) = found.ok_or(ChangeOutcome::Refused("the volume has no snapshot of that name"))?;
                Ok(Change::Clone { of, id, name, size_bytes: size_bytes.unwrap_or(found.size_bytes) })
            }
            Wanted::DropClone { .. } => {
                unused(self.sessions_of_head(at, head).len() + self.remotes_of(at, head, None))?;
                Ok(Change::DropClone { head })
            }
            Wanted::ResizeClone { size_bytes, force } => {
                if size_bytes < volume.size_bytes(head) && !force {
                    unused(self.users_of(at, head, Target::Head(head)))?;
                }
                Ok(Change::ResizeClone { head, size_bytes })
            }
        }
    }

    // ---- room ----

    fn set_reservation(&mut self, now: Instant, volume: VolumeId, reservation: Option<ReservedVolume>, out: Out) {
        let before = self.volumes.reservations.remove(&volume);
        let after = reservation.map(|reservation| before.map_or(reservation, |before| reservation.after(&before)));
        self.volumes.reservations.extend(after.map(|reservation| (volume, reservation)));
        self.tell_claims(now, out);
    }

    /// What is set aside for fixed volumes.
    pub fn reservations(&self) -> &BTreeMap<VolumeId, ReservedVolume> {
        &self.volumes.reservations
    }

    /// What volumes own and have not used yet, beside one.
    pub fn claims_beside(&self, volume: Option<VolumeId>) -> Vec<Claim> {
        self.volumes.claims_beside(volume)
    }

    /// What volumes here have taken on and not placed, beside one.
    pub fn unplaced_beside(&self, volume: Option<VolumeId>) -> Vec<Claim> {
        self.volumes.unplaced_beside(volume)
    }

    /// What clients' data leaves free of a device, and what is not promised to it besides.
    pub fn reserve_and_spare_bytes(&self, capacity_bytes: u64) -> (u64, u64) {
        self.volumes.reserve_and_spare_bytes(capacity_bytes)
    }

    /// By device that is being drained: shards and logs of volumes in service that are still there.
    pub fn left_to_drain(&self) -> BTreeMap<DeviceId, u64> {
        let mut left: BTreeMap<DeviceId, u64> = self.draining.iter().map(|device| (*device, 0)).collect();
        for volume in self.volumes() {
            for (device, count) in volume.controller.left_to_drain() {
                *left.entry(device).or_default() += count;
            }
        }
        left
    }

    /// Devices that volumes find slow: since when, and whether one does without them.
    pub fn slow_devices(&self) -> BTreeMap<DeviceId, (Instant, bool)> {
        let mut slow = BTreeMap::new();
        for (device, since, bypassed) in self.volumes().flat_map(|v| v.controller.slow_devices()) {
            let (first, any) = slow.entry(device).or_insert((since, false));
            (*first, *any) = (since.min(*first), *any | bypassed);
        }
        slow
    }
}
