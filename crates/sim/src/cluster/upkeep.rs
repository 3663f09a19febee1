//! What hosts do as time goes by: the real [`Upkeep`] machines of the hosts, over volumes that are snapshotted by schedule while
//! they are handed over, taken over and cut off, looks and actions come late, and clocks differ.

use super::host::HostEvent;
use super::volume::{FAILURES, Stage};
use super::{Grid, ms, volume_id};
use holdfast_base::{Effects, Instant, VolumeId};
use holdfast_cluster::schedule::{self, Snapshot};
use holdfast_cluster::upkeep::{Action, Chore, Config, Effect, Event, Facts, LookId, Scheduled, Take, Upkeep};
use holdfast_format::meta::{SCHEDULE_PREFIX, encode, export_key};
use holdfast_format::schedule::ScheduleRecord;
use std::collections::BTreeMap;
use std::time::Duration;

/// How often, in milliseconds and as it is written: more often than hosts look, too.
fn every_of(volume: VolumeId) -> (u64, &'static str) {
    if volume.0.is_multiple_of(2) { (10_000, "10s") } else { (1_000, "1s") }
}

/// Of each of so many seconds that have any.
const KEEP: &str = "3s";
const KEPT: usize = 3;

/// Clocks of hosts differ by less.
const CLOCKS_MS: u64 = 2_000;

/// When the newest snapshot of a volume that is served is no older, where nothing is wrong: looks, and what is on its way.
const OVERDUE_AFTER: Duration = Duration::from_secs(16);

/// A snapshot of a volume, when it really was taken.
pub(super) struct Taken {
    snapshot: Snapshot,
    at: Instant,
}

/// A host's upkeep, and the ways from it.
pub(super) struct HostUpkeep {
    upkeep: Upkeep,
    tick_at: Option<Instant>,
    under_way: Vec<Chore>,
    /// When the look began, and when the last action of each chore ended.
    looked_at: Instant,
    ended_at: BTreeMap<Chore, Instant>,
}

impl HostUpkeep {
    pub(super) fn new(host: &str, plan: &super::ClusterPlan) -> HostUpkeep {
        let (host, rebuild_after) = (host.to_string(), Duration::from_secs(600));
        let config = Config { host, rebuild_after, spreads_authority: false, mutations: plan.upkeep };
        let (looked_at, ended_at) = (Instant::ZERO, BTreeMap::new());
        HostUpkeep { upkeep: Upkeep::new(config), tick_at: None, under_way: Vec::new(), looked_at, ended_at }
    }
}

pub(super) fn schedule_record(volume: VolumeId) -> (String, Option<Vec<u8>>) {
    let record = ScheduleRecord::new(every_of(volume).1.parse().expect("a span"), KEEP.parse().expect("rules"));
    (format!("{SCHEDULE_PREFIX}{volume}"), Some(encode(&record)))
}

impl Grid {
    fn wall_ms(&self, host: usize) -> u64 {
        const BEGIN_MS: u64 = 1_800_000_000_000;
        let skew = (host as u64 * 1_234 + self.plan.seed % 977) % CLOCKS_MS;
        BEGIN_MS + self.now.since(Instant::ZERO).as_millis() as u64 + skew
    }

    pub(super) fn tell_keeper(&mut self, host: usize, event: Event) {
        let own = &mut self.hosts[host];
        let mut out = Effects::new();
        own.keeper.upkeep.handle(self.now, &own.view, event, &mut out);
        if let Some(at) = own.keeper.upkeep.next_deadline()
            && own.keeper.tick_at.is_none_or(|expected| at < expected)
        {
            own.keeper.tick_at = Some(at);
            self.post(host, at.since(self.now), HostEvent::KeeperTick);
        }
        for effect in out.take() {
            match effect {
                Effect::Look(look) => self.look_around(host, look),
                Effect::Act(action) => self.on_chore_begun(host, action),
            }
        }
    }

    pub(super) fn on_keeper_tick(&mut self, host: usize) {
        if self.hosts[host].keeper.tick_at.is_some_and(|at| at <= self.now) {
            self.hosts[host].keeper.tick_at = None;
            self.tell_keeper(host, Event::Tick);
        }
    }

    fn look_around(&mut self, host: usize, look: LookId) {
        self.hosts[host].keeper.looked_at = self.now;
        let open: Vec<VolumeId> = self.hosts[host].volumes.keys().copied().collect();
        let open = open.into_iter().filter(|volume| self.serving(*volume).contains(&host));
        let seen = |volume: VolumeId| {
            let taken = self.snapshots.get(&volume).into_iter().flatten();
            Scheduled { volume, snapshots: taken.map(|taken| taken.snapshot.clone()).collect() }
        };
        let facts = Facts { wall_ms: self.wall_ms(host), scheduled: open.map(seen).collect(), ..Facts::default() };
        let is_late = !self.is_healing && self.prng.chance(self.plan.late_action);
        let after = if is_late { ms(self.prng.between(500, 4_000)) } else { ms(self.prng.between(1, 30)) };
        let facts = Some(facts).filter(|_| !self.prng.chance(20));
        self.post(host, after, HostEvent::Seen { look, facts });
    }

    fn on_chore_begun(&mut self, host: usize, action: Action) {
        let (chore, keeper) = (action.chore(), &mut self.hosts[host].keeper);
        let is_old = keeper.ended_at.get(&chore).is_some_and(|ended| *ended > keeper.looked_at);
        let is_twice = keeper.under_way.contains(&chore);
        keeper.under_way.push(chore);
        if is_old || is_twice {
            self.fail(format!(
                "h{host}: {action:?} follows from what was seen before the last one's end, or beside it"
            ));
        }
        let is_late = !self.is_healing && self.prng.chance(self.plan.late_action);
        let after = if is_late { ms(self.prng.between(500, 5_000)) } else { ms(self.prng.between(1, 20)) };
        self.post(host, after, HostEvent::Chore { action });
    }

    pub(super) fn do_chore(&mut self, host: usize, action: Action) {
        let chore = action.chore();
        let is_done = match action {
            Action::Snapshots { volume, take, drops } => {
                let is_taken = take.is_none_or(|take| self.take_snapshot(host, volume, take));
                let can = self.can_write(host, volume);
                if can && let Some(taken) = self.snapshots.get_mut(&volume) {
                    taken.retain(|taken| !drops.contains(&taken.snapshot.name));
                }
                can && is_taken
            }
            other => return self.fail(format!("h{host}: nothing asks for {other:?}")),
        };
        self.post(host, ms(1), HostEvent::ChoreDone { chore, is_done });
    }

    pub(super) fn on_chore_done(&mut self, host: usize, chore: Chore, is_done: bool) {
        let now = self.now;
        let keeper = &mut self.hosts[host].keeper;
        keeper.under_way.retain(|found| *found != chore);
        keeper.ended_at.insert(chore, now);
        self.tell_keeper(host, Event::Outcome { chore, is_done });
    }

    fn can_write(&self, host: usize, volume: VolumeId) -> bool {
        let own = &self.hosts[host];
        let is_here = own.view.export(volume).is_some_and(|(_, export)| export.host == own.name);
        let epoch = own.volumes.get(&volume).and_then(|vol| match &vol.stage {
            Stage::Open { root, .. } => Some(root.epoch.0),
            _ => None,
        });
        let promised = self.promises.get(&volume).copied().unwrap_or_default();
        is_here && own.nodes_away(self.now) <= FAILURES && epoch.is_some_and(|epoch| epoch >= promised)
    }

    fn take_snapshot(&mut self, host: usize, volume: VolumeId, take: Take) -> bool {
        if !self.can_write(host, volume) {
            return false;
        }
        let created_ms = self.wall_ms(host);
        let taken = self.snapshots.entry(volume).or_default();
        let last = taken.last().map(|taken| (taken.snapshot.layer, taken.at));
        // Another one was taken since it was planned.
        if last.map(|(layer, _)| layer) != take.after {
            return true;
        }
        let layer = last.map_or(0, |(layer, _)| layer + 1);
        taken.push(Taken { snapshot: Snapshot { name: take.name, layer, created_ms }, at: self.now });
        self.outcome.snapshots += 1;
        self.trace(&[60, host as u64, volume.0 as u64], || format!("h{host}: a snapshot of {volume}"));
        if let Some((_, at)) = last
            && self.now.since(at) < ms(every_of(volume).0.saturating_sub(CLOCKS_MS))
        {
            self.fail(format!("h{host} takes a snapshot of {volume} {:?} after the last", self.now.since(at)));
        }
        true
    }

    /// Where nothing is wrong any more each volume with a schedule that is served has a young snapshot, and none too many.
    pub(super) fn check_schedules(&self) -> Result<(), String> {
        for number in 0..self.plan.volumes {
            let volume = volume_id(number);
            let has_schedule = self.store.get(&schedule_record(volume).0).is_some();
            let is_served = self.store.get(&export_key(volume)).is_some() && !self.serving(volume).is_empty();
            if !has_schedule || !is_served {
                continue;
            }
            let taken = self.snapshots.get(&volume).map_or(&[][..], Vec::as_slice);
            let age = taken.last().map(|taken| self.now.since(taken.at));
            if age.is_none_or(|age| age > OVERDUE_AFTER) {
                return Err(format!("the newest snapshot of {volume} was taken {age:?} ago"));
            }
            if taken.len() > KEPT + 1 {
                return Err(format!("{volume} has {} snapshots", taken.len()));
            }
            let layers = taken.windows(2).all(|pair| pair[0].snapshot.layer < pair[1].snapshot.layer);
            assert!(layers && taken.iter().all(|taken| taken.snapshot.name.starts_with(schedule::PREFIX)));
        }
        Ok(())
    }
}
