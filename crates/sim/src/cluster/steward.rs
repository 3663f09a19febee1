//! What one host does for all: the shell of each host's [`Steward`](holdfast_cluster::steward::Steward), devices that are asked to
//! drop volumes, operators who throw volumes away and want them back, and what must never happen then.

use super::host::{HostEvent, Purpose, name_of};
use super::store::{Answer, Op, Writes};
use super::{ClusterPlan, Event, Grid, ms, volume_id};
use holdfast_base::prng::Prng;
use holdfast_base::{DeviceId, Effects, Epoch, MetaVersion, NodeId, VolumeId};
use holdfast_cluster::steward::{self as duties, Action, ActionId, Config, Outcome};
use holdfast_format::meta::{
    DELETING_PREFIX, DeletingRecord, Other, STEWARD_KEY, TRASH_PREFIX, TrashRecord, deleting_key, encode, export_key,
    trash_key,
};
use holdfast_format::root::{Root, root_key};
use std::collections::BTreeSet;
use std::time::Duration;

/// Of the grid, one a node.
pub(super) const DEVICES: usize = 3;

/// What is thrown away can be had back for so long, in minutes that pass faster here.
const KEPT_MINUTES: u64 = 3;
const MINUTE: Duration = Duration::from_secs(4);

pub(super) fn duties_of((host, boot): (usize, u64), plan: &ClusterPlan) -> Config {
    let (kept_minutes, minute, mutations) = (KEPT_MINUTES, MINUTE, plan.duties);
    let random = Prng::new(plan.seed ^ boot << 8 ^ host as u64).next_u64();
    Config { host: name_of(host), kept_minutes, minute, random, mutations }
}

fn places() -> BTreeSet<duties::Place> {
    (0..DEVICES).map(|n| (NodeId(n as u32 + 1), DeviceId(n as u128 + 1))).collect()
}

impl Grid {
    pub(super) fn begin_duties(&mut self, host: usize) {
        self.hosts[host].steward = duties::Steward::new(self.now, duties_of((host, self.hosts[host].boot), &self.plan));
        self.tell_steward(host, duties::Event::Places(places()));
    }

    pub(super) fn tell_steward(&mut self, host: usize, event: duties::Event) {
        let own = &mut self.hosts[host];
        let mut out = Effects::new();
        own.steward.handle(self.now, &own.view, event, &mut out);
        own.steward.verify();
        let (at, boot) = (own.steward.next_deadline(), own.boot);
        if own.duty_tick_at.is_none_or(|expected| at < expected) {
            own.duty_tick_at = Some(at);
            self.push(at, Event::At { host, boot, event: HostEvent::DutyTick });
        }
        for (id, action) in out.take() {
            self.trace(&[60, host as u64, id.0], || format!("h{host}: duty {id:?} {action:?}"));
            self.check_duty(host, &action);
            let is_late = !self.is_healing && self.prng.chance(self.plan.late_action);
            let after = if is_late { ms(self.prng.between(500, 5_000)) } else { ms(self.prng.below(4)) };
            if is_late {
                self.disturb(self.now + after);
            }
            self.post(host, after, HostEvent::Duty { id, action });
        }
    }

    pub(super) fn on_duty_tick(&mut self, host: usize) {
        // One that an earlier deadline has made needless.
        if self.hosts[host].duty_tick_at.is_none_or(|at| at > self.now) {
            return;
        }
        self.hosts[host].duty_tick_at = None;
        self.tell_steward(host, duties::Event::Tick);
    }

    pub(super) fn do_duty(&mut self, host: usize, id: ActionId, action: Action) {
        let outcome = match action {
            Action::BeSteward { replaces } => {
                let compares = vec![(STEWARD_KEY.to_string(), replaces)];
                let writes = vec![(STEWARD_KEY.to_string(), Some(name_of(host).into_bytes()))];
                let Some(lease) = self.hosts[host].lease else { return self.end_duty(host, id, Outcome::Failed) };
                let op = Op::Commit(compares.clone(), writes.clone(), Some(lease));
                return self.ask(host, op, Purpose::Duty { id, compares, writes }, None);
            }
            Action::Commit { compares, writes, .. } | Action::Beat { compares, writes } => {
                let op = Op::Commit(compares.clone(), writes.clone(), None);
                return self.ask(host, op, Purpose::Duty { id, compares, writes }, None);
            }
            Action::Drop { volume, epoch, place } => {
                let device = place.0.0 as usize - 1;
                if device < self.hosts[host].nodes_away(self.now) {
                    return self.end_duty(host, id, Outcome::Failed);
                }
                let (boot, at) = (self.hosts[host].boot, self.now + ms(self.prng.between(1, 300)));
                return self.push(at, Event::Drop { host, boot, id, volume, epoch, device });
            }
            Action::LookAtSpace => Outcome::Space { is_short: !self.is_healing && self.prng.chance(self.plan.short) },
            Action::OpenForCare { .. } if self.prng.chance(200) => Outcome::Failed,
            Action::LookAtCare { .. } => {
                let is_there = self.prng.chance(950);
                Outcome::Care { is_busy: is_there.then(|| self.prng.chance(300)) }
            }
            Action::EndCare { .. } => {
                self.outcome.cared += 1;
                Outcome::Done
            }
            Action::CopyRecords => Outcome::Copied { is_everywhere: self.prng.chance(800) },
            Action::OpenForCare { .. } | Action::SettleRemoved => Outcome::Done,
        };
        self.end_duty(host, id, outcome);
    }

    fn end_duty(&mut self, host: usize, id: ActionId, outcome: Outcome) {
        self.post(host, ms(1), HostEvent::DutyDone { id, outcome });
    }

    pub(super) fn on_duty_answer(&mut self, host: usize, id: ActionId, writes: &Writes, answer: Answer) {
        let is_election = writes[0].0 == STEWARD_KEY;
        let outcome = match answer {
            Answer::Done(version) if is_election => Outcome::Steward(version),
            Answer::Done(_) => Outcome::Done,
            _ => Outcome::Failed,
        };
        self.tell_steward(host, duties::Event::Outcome { id, outcome });
    }

    /// A device is asked to drop a volume.
    pub(super) fn on_drop(
        &mut self,
        (host, boot): (usize, u64),
        id: ActionId,
        (volume, epoch): (VolumeId, Epoch),
        device: usize,
    ) {
        let root = self.right_store().get(&root_key(volume)).map(|record| Root::decode(&record.value).expect("a root"));
        if let Some(root) = root.filter(|root| !root.deleted || root.epoch < epoch) {
            self.fail(format!("device {device} drops {volume}, which is {root:?}"));
        }
        self.devices[device].remove(&volume);
        self.push(
            self.now + ms(1),
            Event::At { host, boot, event: HostEvent::DutyDone { id, outcome: Outcome::Done } },
        );
    }

    // ---- operators ----

    /// Throws a volume that nobody serves away, has one back, or deletes one for good: by what a host knows.
    pub(super) fn throw_and_restore(&mut self) {
        if !self.prng.chance(self.plan.deletion) {
            return;
        }
        let host = self.prng.below(self.hosts.len() as u64) as usize;
        let volume = volume_id(self.prng.below(self.plan.volumes as u64) as usize);
        let (way, own) = (self.prng.below(4), &self.hosts[host]);
        if !own.is_running() || !own.is_right {
            return;
        }
        let version = |key: &str| own.view.get(key).map_or(MetaVersion::ABSENT, |record| record.version);
        let keys = [root_key(volume), export_key(volume), trash_key(volume), deleting_key(&volume.to_string())];
        let compares: Vec<_> = keys.iter().map(|key| (key.clone(), version(key))).collect();
        let is_live = own.view.volume(volume).is_some_and(|known| !known.is_gone);
        let is_absent = |at: usize| compares[at].1 == MetaVersion::ABSENT;
        if !is_live || !is_absent(1) || !is_absent(3) {
            return;
        }
        let writes = match (way, is_absent(2)) {
            (0..2, true) => {
                let record = TrashRecord { name: "vm".to_string(), taken_bytes: 0, minutes: 0, other: Other::new() };
                vec![(keys[2].clone(), Some(encode(&record)))]
            }
            (0..3, false) => vec![(keys[2].clone(), None)],
            (3, true) => {
                let (volume, name, other) = (volume.to_string(), "vm".to_string(), Other::new());
                vec![(keys[3].clone(), Some(encode(&DeletingRecord { volume, name, other })))]
            }
            _ => return,
        };
        let purpose = Purpose::Duty { id: ActionId(u64::MAX), compares: compares.clone(), writes: writes.clone() };
        self.ask(host, Op::Commit(compares, writes, None), purpose, None);
    }

    // ---- what must hold ----

    fn check_duty(&mut self, host: usize, action: &Action) {
        if !self.hosts[host].is_right && !matches!(action, Action::EndCare { .. }) {
            self.fail(format!("h{host}: {action:?} begins while the store is silent or doubtful"));
        }
    }

    /// A transaction was carried out: what becomes of volumes by it, and by whom.
    pub(super) fn check_fates(&mut self, host: usize, writes: &Writes) {
        if !self.is_true() {
            return;
        }
        for (key, value) in writes {
            let now = self.now;
            if let Some(volume) = key.strip_prefix(TRASH_PREFIX).and_then(|id| id.parse::<VolumeId>().ok()) {
                let is_given_up = writes.iter().any(|(other, _)| other.starts_with(DELETING_PREFIX));
                match (value, is_given_up) {
                    (Some(_), _) if !self.thrown_at.contains_key(&volume) => {
                        self.thrown_at.insert(volume, now);
                        self.outcome.thrown_away += 1;
                    }
                    (Some(_), _) => {}
                    (None, false) => {
                        self.thrown_at.remove(&volume);
                        self.outcome.restored += 1;
                    }
                    (None, true) => self.check_giving_up(host, volume),
                }
            }
            let is_root = key.ends_with("/root") && value.is_none();
            if let Some(id) =
                key.strip_prefix("volume/").and_then(|rest| rest.strip_suffix("/root")).filter(|_| is_root)
            {
                let volume: VolumeId = id.parse().expect("an id");
                self.outcome.deleted += 1;
                if self.devices.iter().any(|device| device.contains(&volume)) {
                    self.fail(format!("h{host}: {volume} is forgotten, and a device holds it still"));
                }
            }
        }
    }

    fn check_giving_up(&mut self, host: usize, volume: VolumeId) {
        let Some(since) = self.thrown_at.remove(&volume) else {
            return self.fail(format!("h{host} gives {volume} up, which is not in the trash"));
        };
        let kept = self.now.since(since);
        if kept < MINUTE * KEPT_MINUTES as u32 && self.plan.short == 0 {
            self.fail(format!("h{host} gives {volume} up after {kept:?}"));
        }
        let steward = self.store.get(STEWARD_KEY).map(|record| record.value);
        if steward.as_deref() != Some(name_of(host).as_bytes()) {
            self.fail(format!("h{host} gives {volume} up, and is not the steward"));
        }
    }

    /// After everything: what was begun has come to its end.
    pub(super) fn check_duties(&self) -> Result<(), String> {
        let left: Vec<String> = self.store.list().into_iter().map(|record| record.key).collect();
        let is_open = |key: &&String| key.starts_with(DELETING_PREFIX) || key.starts_with(TRASH_PREFIX);
        match left.iter().find(is_open).filter(|_| self.hosts.iter().any(|host| host.is_up)) {
            Some(key) => Err(format!("{key} is there still")),
            None => Ok(()),
        }
    }
}
