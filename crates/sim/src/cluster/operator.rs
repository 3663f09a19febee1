//! What an operator asks for, and how a host's commands do it: those that work on a volume here hold it meanwhile; records are
//! changed by compare-and-swap.

use super::host::{HostEvent, Purpose, name_of, number_of_name};
use super::store::{Answer, Op};
use super::{Grid, ms, volume_id};
use holdfast_base::{Epoch, GridId, Instant, MetaVersion, VolumeId};
use holdfast_cluster::exports::{self, HandOver};
use holdfast_cluster::view::Record;
use holdfast_cluster::{Event as ClusterEvent, Local};
use holdfast_format::geometry::Layout;
use holdfast_format::meta::{ExportRecord, decode, deleting_key, encode, export_key, trash_key};
use holdfast_format::root::{Root, root_key};
use std::time::Duration;

/// How long an export waits until the volume serves.
const OPEN_MAX: Duration = Duration::from_secs(10);

/// Pace of a command that waits.
const LOOK: Duration = Duration::from_millis(50);

/// Attempts at a swap that others race for.
const SWAPS_MAX: u32 = 8;

/// How long a command may wait until it holds the volume: an action may be carried out late, and its outcome never come.
const HELD_WITHIN: Duration = Duration::from_secs(20);

const VOLUMES_MAX: usize = 12;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum What {
    Create,
    Delete,
    Export {
        takeover: bool,
    },
    Unexport,
    Offer,
    HandOver {
        to: usize,
    },
    /// Something that works on the volume for so long.
    Hold(Duration),
}

/// What is done to a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Change {
    Claim { takeover: bool },
    AddOffers { host: usize },
    HandTo { to: usize },
    TakeBack { to: usize },
    End,
    DeleteRoot,
    CreateRoot,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Hold,
    Close,
    Change(Change),
    AwaitOpen,
    Prepare,
    AwaitServed,
    Wait,
    End,
}

/// A command under way at a host.
pub(super) struct Task {
    pub what: What,
    pub volume: VolumeId,
    phase: Phase,
    /// The phase waits for an event, and does not begin anew.
    is_begun: bool,
    /// It has asked to hold the volume; and does.
    wants: bool,
    holds: bool,
    tries: u32,
    began: Instant,
    hand_over: HandOver,
}

impl Grid {
    pub(super) fn operate(&mut self) {
        if !self.prng.chance(self.plan.command) {
            return;
        }
        let host = self.prng.below(self.hosts.len() as u64) as usize;
        let volume = self.prng.below(self.plan.volumes as u64) as usize;
        let other = self.prng.below(self.hosts.len() as u64) as usize;
        let owner = self.export_of(volume_id(volume)).and_then(|export| number_of_name(&export.host));
        let owner = owner.filter(|owner| *owner < self.hosts.len()).unwrap_or(host);
        let first = match self.is_real() {
            // Clients wait for what is out of service.
            true => 2,
            false if self.plan.is_calm() => 8,
            false => 0,
        };
        let (what, host) = match self.prng.between(first, 19) {
            0 => (What::Create, host),
            1 => (What::Delete, owner),
            2..4 => (What::Export { takeover: false }, host),
            4 => (What::Export { takeover: true }, host),
            5..7 => (What::Unexport, owner),
            7 => (What::Hold(ms(self.prng.between(10, 3_000))), owner),
            8..11 => (What::Offer, host),
            _ => (What::HandOver { to: other }, owner),
        };
        self.command(host, volume, what);
    }

    /// An operator asks a host for something; one that is not there, or whose store is not right, refuses.
    pub fn command(&mut self, host: usize, volume: usize, what: What) {
        if !self.hosts[host].is_running() || !self.hosts[host].is_right {
            return;
        }
        let mut volume = volume_id(volume);
        if what == What::Create {
            if self.plan.volumes == VOLUMES_MAX {
                return;
            }
            volume = volume_id(self.plan.volumes);
            self.plan.volumes += 1;
        }
        self.outcome.commands += 1;
        let task = self.number();
        self.trace(&[50, host as u64, task, volume.0 as u64], || format!("h{host}: #{task} {what:?} {volume}"));
        let phase = match what {
            What::Create => Phase::Change(Change::CreateRoot),
            What::Offer => Phase::Change(Change::AddOffers { host }),
            What::HandOver { to } if to == host || !self.hosts[host].view.has_host(&name_of(to)) => return,
            What::HandOver { to } => Phase::Change(Change::AddOffers { host: to }),
            What::Delete | What::Export { .. } | What::Unexport | What::Hold(_) => Phase::Hold,
        };
        let began = self.now;
        let (is_begun, wants, holds, tries, hand_over) = (false, false, false, 0, HandOver::begun(began));
        let fresh = Task { what, volume, phase, is_begun, wants, holds, tries, began, hand_over };
        self.hosts[host].tasks.insert(task, fresh);
        self.post(host, Duration::ZERO, HostEvent::Task { task });
    }

    pub(super) fn on_held(&mut self, host: usize, ticket: u64) {
        let Some(task) = self.hosts[host].tasks.get_mut(&ticket) else { return };
        task.holds = true;
        let (volume, waited) = (task.volume, self.now.since(task.began));
        *self.hosts[host].held.entry(volume).or_default() += 1;
        self.trace(&[51, host as u64, ticket], || format!("h{host}: #{ticket} holds {volume}"));
        if waited > HELD_WITHIN && self.hosts[host].well_from < self.now - HELD_WITHIN {
            self.fail(format!("h{host}: command #{ticket} waited {waited:?} to hold {volume}"));
        }
        self.post(host, Duration::ZERO, HostEvent::Task { task: ticket });
    }

    /// Whatever the command waited for may have come.
    pub(super) fn on_task(&mut self, host: usize, id: u64) {
        let Some(task) = self.hosts[host].tasks.get_mut(&id) else { return };
        let is_first = !std::mem::replace(&mut task.is_begun, true);
        let Task { what, volume, phase, holds, .. } = *task;
        match phase {
            Phase::Hold if holds => {
                let next = match what {
                    What::Export { takeover } => Phase::Change(Change::Claim { takeover }),
                    What::Hold(_) => Phase::Wait,
                    _ if self.is_of(host, volume) => Phase::Close,
                    _ => Phase::End,
                };
                self.next_phase(host, id, next);
            }
            Phase::Hold if is_first => {
                task.wants = true;
                self.tell(host, ClusterEvent::Hold { volume, ticket: id });
            }
            Phase::Hold => {}
            Phase::Close if is_first => self.close(host, volume, id),
            Phase::Close if !self.hosts[host].locals.contains_key(&volume) => {
                self.next_phase(host, id, Phase::Change(Change::End));
            }
            Phase::Close => {}
            Phase::Change(change) if is_first => self.begin_change(host, id, change),
            Phase::Change(_) => {}
            Phase::AwaitOpen => self.await_open(host, id, is_first),
            Phase::Prepare if is_first && self.is_real() => self.order_preparing(host, volume, id),
            Phase::Prepare if is_first => {
                let after = ms(self.prng.between(10, 200));
                self.post(host, after, HostEvent::Task { task: id });
            }
            Phase::Prepare => {
                let What::HandOver { to } = what else { return };
                self.next_phase(host, id, Phase::Change(Change::HandTo { to }));
            }
            Phase::AwaitServed => self.await_served(host, id),
            Phase::Wait if is_first => {
                let What::Hold(span) = what else { return };
                self.post(host, span, HostEvent::Task { task: id });
            }
            Phase::Wait => self.next_phase(host, id, Phase::End),
            Phase::End => self.end_task(host, id),
        }
    }

    fn next_phase(&mut self, host: usize, id: u64, phase: Phase) {
        let Some(task) = self.hosts[host].tasks.get_mut(&id) else { return };
        (task.phase, task.is_begun, task.tries) = (phase, false, 0);
        self.post(host, Duration::ZERO, HostEvent::Task { task: id });
    }

    fn end_task(&mut self, host: usize, id: u64) {
        let Some(task) = self.hosts[host].tasks.remove(&id) else { return };
        let volume = task.volume;
        self.trace(&[52, host as u64, id], || format!("h{host}: #{id} ends"));
        if task.holds {
            let held = &mut self.hosts[host].held;
            let count = held.get_mut(&volume).expect("it was counted when it was granted");
            *count -= 1;
            if *count == 0 {
                held.remove(&volume);
            }
        }
        if task.wants {
            self.tell(host, ClusterEvent::Release { volume });
        }
    }

    /// Whether, as far as the host knows, nobody else serves the volume.
    fn is_of(&self, host: usize, volume: VolumeId) -> bool {
        self.hosts[host].view.export(volume).is_none_or(|(_, export)| export.host == self.hosts[host].name)
    }

    fn await_open(&mut self, host: usize, id: u64, is_first: bool) {
        let Some(task) = self.hosts[host].tasks.get_mut(&id) else { return };
        if is_first {
            task.began = self.now;
        }
        let (volume, is_late) = (task.volume, self.now.since(task.began) >= OPEN_MAX);
        let local = self.hosts[host].locals.get(&volume).copied();
        if is_late || local == Some(Local::Open) {
            return self.next_phase(host, id, Phase::End);
        }
        // One that another opening has overtaken is not begun again by the command.
        if is_first && matches!(local, None | Some(Local::Reading)) {
            self.open_by_command(host, volume);
        } else if local.is_none() {
            return self.next_phase(host, id, Phase::End);
        }
        self.post(host, LOOK, HostEvent::Task { task: id });
    }

    fn await_served(&mut self, host: usize, id: u64) {
        let now = self.now;
        let own = &mut self.hosts[host];
        let Some(task) = own.tasks.get_mut(&id) else { return };
        let What::HandOver { to } = task.what else { return };
        let export = own.view.export(task.volume).map(|(_, export)| export);
        let is_ours = export.is_some_and(|e| e.host == name_of(to) && e.from.as_ref() == Some(&own.name));
        if !is_ours {
            self.outcome.handovers += 1;
            return self.next_phase(host, id, Phase::End);
        }
        let serves = own.locals.get(&task.volume) == Some(&Local::Open);
        if task.hand_over.look(now, own.view.has_host(&name_of(to)), serves).is_some() {
            return self.next_phase(host, id, Phase::Change(Change::TakeBack { to }));
        }
        self.post(host, LOOK, HostEvent::Task { task: id });
    }

    // ---- records ----

    fn begin_change(&mut self, host: usize, id: u64, change: Change) {
        let Some(task) = self.hosts[host].tasks.get(&id) else { return };
        let key = match change {
            Change::CreateRoot | Change::DeleteRoot => root_key(task.volume),
            _ => export_key(task.volume),
        };
        let purpose = Purpose::Task { task: id, compares: Vec::new(), writes: Vec::new() };
        self.ask(host, Op::Get(key), purpose, None);
    }

    pub(super) fn on_task_answer(&mut self, host: usize, id: u64, answer: Answer) {
        let Some(task) = self.hosts[host].tasks.get_mut(&id) else { return };
        let Phase::Change(change) = task.phase else { return };
        match answer {
            Answer::Record(found) => self.change(host, id, change, found),
            Answer::Conflict(_) if task.tries < SWAPS_MAX => {
                task.tries += 1;
                self.begin_change(host, id, change);
            }
            Answer::Done(_) => self.on_changed_record(host, id, change),
            // Nobody knows whether it was: the command says so.
            _ => self.next_phase(host, id, Phase::End),
        }
    }

    fn change(&mut self, host: usize, id: u64, change: Change, found: Option<Record>) {
        let Some(volume) = self.hosts[host].tasks.get(&id).map(|task| task.volume) else { return };
        let next = match change {
            Change::CreateRoot if found.is_none() => {
                let root = Root::new(GridId(1), volume, "vm", 1 << 30, Layout::DEFAULT);
                Some((root_key(volume), Some(root.encode())))
            }
            Change::CreateRoot => None,
            Change::DeleteRoot => {
                let root = found.as_ref().and_then(|found| Root::decode(&found.value).ok());
                let gone = root.map(|root| Root { deleted: true, epoch: Epoch(root.epoch.0 + 1), ..root });
                gone.map(|gone| (root_key(volume), Some(gone.encode())))
            }
            _ => {
                let export = found.as_ref().and_then(|found| decode::<ExportRecord>(&found.value).ok());
                let changed = self.changed_export(host, volume, change, export);
                changed.map(|export| (export_key(volume), export.map(|export| encode(&export))))
            }
        };
        let Some((key, value)) = next else { return self.on_nothing_to_change(host, id, change) };
        let mut compares = vec![(key.clone(), found.map_or(MetaVersion::ABSENT, |found| found.version))];
        if let Change::Claim { .. } = change {
            let gone = [trash_key(volume), deleting_key(&volume.to_string())];
            compares.extend(gone.map(|key| (key, MetaVersion::ABSENT)));
        }
        let writes = vec![(key, value)];
        let op = Op::Commit(compares.clone(), writes.clone(), None);
        self.ask(host, op, Purpose::Task { task: id, compares, writes }, None);
    }

    /// What becomes of the record; nothing where it may not be changed, or is so already.
    fn changed_export(
        &self,
        host: usize,
        volume: VolumeId,
        change: Change,
        found: Option<ExportRecord>,
    ) -> Option<Option<ExportRecord>> {
        let own = &self.hosts[host];
        let me = own.name.clone();
        match (change, found) {
            (Change::Claim { takeover }, found) => {
                let is_there = own.view.volume(volume).is_some_and(|known| !known.is_gone);
                let other = found.as_ref().map(|found| &found.host).filter(|host| !host.is_empty() && **host != me);
                let may = is_there && (takeover || !other.is_some_and(|host| own.view.has_host(host)));
                may.then(|| Some(exports::claimed(found, &me)))
            }
            (Change::AddOffers { host: other }, Some(found)) => {
                let hosts = [found.host.clone(), name_of(other)];
                let mut next = found.clone();
                next.offered_by.extend(hosts);
                let is_handed_on = other != host && found.host != me;
                (!is_handed_on && next != found).then_some(Some(next))
            }
            (Change::HandTo { to }, Some(found)) => {
                let next = exports::handed_over(found.clone(), &me, &name_of(to));
                (next != found).then_some(Some(next))
            }
            (Change::TakeBack { to }, Some(found)) => {
                let next = exports::taken_back(found.clone(), &me, &name_of(to));
                (next != found).then_some(Some(next))
            }
            (Change::End, Some(found)) if exports::may_end(&found, &me) => Some(None),
            _ => None,
        }
    }

    fn on_nothing_to_change(&mut self, host: usize, id: u64, change: Change) {
        match change {
            Change::AddOffers { .. } => self.on_changed_record(host, id, change),
            _ => self.next_phase(host, id, Phase::End),
        }
    }

    fn on_changed_record(&mut self, host: usize, id: u64, change: Change) {
        let Some(task) = self.hosts[host].tasks.get_mut(&id) else { return };
        task.began = self.now;
        task.hand_over = HandOver::begun(self.now);
        let next = match (change, task.what) {
            (Change::Claim { .. }, _) => Phase::AwaitOpen,
            (Change::AddOffers { .. }, What::HandOver { .. }) if self.may_hand_over(host, id) => Phase::Prepare,
            (Change::HandTo { .. }, _) => Phase::AwaitServed,
            (Change::End, What::Delete) => Phase::Change(Change::DeleteRoot),
            _ => Phase::End,
        };
        self.next_phase(host, id, next);
    }

    fn may_hand_over(&self, host: usize, id: u64) -> bool {
        let own = &self.hosts[host];
        let Some(task) = own.tasks.get(&id) else { return false };
        own.locals.get(&task.volume) == Some(&Local::Open)
    }
}
