//! What must hold at every moment, and what a grid must come to when nothing is wrong with it any more.

use super::host::{name_of, number_of_name};
use super::store::{Op, Which, Writes};
use super::{About, ClusterOutcome, Grid, LEASE, ms, volume_id};
use holdfast_base::{Instant, MetaVersion, VolumeId};
use holdfast_cluster::{Action, Local};
use holdfast_format::meta::{ExportRecord, ROOT_SUFFIX, decode, export_key, host_key};
use holdfast_format::root::{Root, root_key};
use std::time::Duration;

/// When everything is as the records say after the last fault: a lease runs out, a take-over is written, the volume opened.
pub const SETTLED_AFTER: Duration = Duration::from_secs(LEASE.as_secs() + 4);

/// Where the store was lost: leases are taken anew, and a whole one is waited for since it answers again.
pub const SETTLED_AFTER_STORE: Duration = Duration::from_secs(2 * LEASE.as_secs() + 6);

/// What nodes have said of a host is acted on no later.
const SILENCE_USED_WITHIN: Duration = ms(2_000);

/// How long commands that were under way may still take.
const COMMANDS_MAX: Duration = Duration::from_secs(50);

/// After that nothing happens any more; for so long it is looked.
const IDLE_FOR: Duration = Duration::from_secs(20);

/// How long a volume that is handed over may be served by nobody, where nothing is wrong.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// A volume that a command has left is as its record says after that.
const TAKEN_UP_WITHIN: Duration = Duration::from_secs(4);

/// What was thrown away is given up, and its space returned: minutes in the trash, and a lease of a steward that is gone.
const DUTIES_DONE_WITHIN: Duration = Duration::from_secs(30);

impl Grid {
    pub(super) fn check_action(&mut self, host: usize, action: &Action) {
        let own = &self.hosts[host];
        if own.held.contains_key(&action.volume()) {
            self.fail(format!("h{host}: {action:?} begins while a command holds the volume"));
        } else if !own.is_right {
            self.fail(format!("h{host}: {action:?} begins while the store is silent or doubtful"));
        }
    }

    /// A store that was emptied is never believed.
    pub(super) fn check_belief(&mut self, host: usize, which: Which) {
        if which == Which::Emptied {
            self.fail(format!("h{host} believes a store that was emptied"));
        } else if which == Which::Older && !self.is_as_right(host) {
            self.fail(format!("h{host} believes a store that was set back"));
        }
    }

    /// Whether what the host has taken in of another store is what the right one says too.
    fn is_as_right(&self, host: usize) -> bool {
        let (view, right) = (&self.hosts[host].view, self.right_store());
        (0..self.plan.volumes).all(|number| {
            let key = export_key(volume_id(number));
            view.get(&key).map(|record| record.version) == right.get(&key).map(|record| record.version)
        })
    }

    /// A transaction that a machine has planned is about to be carried out, if its compares hold.
    pub(super) fn check_plan(&mut self, host: usize, boot: u64, about: &About, writes: &Writes, op: &Op) {
        let key = export_key(about.volume);
        let Op::Commit(compares, ..) = op else { return };
        let holds = |(key, version): &(String, MetaVersion)| {
            self.store.get(key).map_or(MetaVersion::ABSENT, |record| record.version) == *version
        };
        if !self.is_true() || !compares.iter().all(holds) {
            return;
        }
        let version = self.store.get(&key).map_or(MetaVersion::ABSENT, |record| record.version);
        if version != about.planned_by {
            return self.fail(format!("h{host} (start {boot}) changes a record by a plan from an older one"));
        }
        let before = self.store.get(&key).and_then(|record| decode::<ExportRecord>(&record.value).ok());
        let after = writes.iter().find(|(written, _)| *written == key).and_then(|(_, value)| value.as_ref());
        let after = after.and_then(|value| decode::<ExportRecord>(value).ok());
        if let Some((before, after)) = before.zip(after)
            && before.host != after.host
        {
            self.outcome.take_overs += 1;
            self.check_take_over(host, &before.host, about.planned_at);
            if !before.offered_by.contains(&name_of(host)) {
                self.outcome.fail_overs += 1;
                // In a hand-over the other one may be serving it still.
                for from in std::iter::once(&before.host).chain(&before.from) {
                    self.check_fail_over(host, from, about);
                }
            }
        }
    }

    /// Whoever was gone when it was planned may be back when the transaction comes, and without a lease for a moment.
    fn check_take_over(&mut self, host: usize, from: &str, planned_at: Instant) {
        if self.store.has(&host_key(from)) {
            self.fail(format!("h{host} takes a volume over from {from}, which is there"));
        }
        let Some(other) = number_of_name(from).and_then(|number| self.hosts.get(number)) else { return };
        if other.is_running() && other.was_right && other.well_from < planned_at {
            self.fail(format!("h{host} takes a volume over from {from}, which is well"));
        }
    }

    /// Clients of the other host lose the volume: it must not be one that serves it, and reached nodes enough for that all the time.
    fn check_fail_over(&mut self, host: usize, from: &str, about: &About) {
        let Some(other) = number_of_name(from) else { return };
        let own = &self.hosts[other];
        let is_well = own.is_running() && own.reaches_from + SILENCE_USED_WITHIN < about.planned_at;
        if is_well && self.serving(about.volume).contains(&other) {
            self.fail(format!("h{host} takes {} over from {from}, which serves it and has its nodes", about.volume));
        }
    }

    /// Whom the record names when a host claims a root: what changes later deposes nobody any more than it did.
    pub(super) fn note_claims(&mut self, host: usize, writes: &Writes) {
        let roots = writes.iter().filter(|(key, _)| key.ends_with(ROOT_SUFFIX)).filter_map(|(_, value)| value.as_ref());
        for root in roots.filter_map(|value| Root::decode(value).ok()) {
            let named = self.export_of(root.volume).map(|export| export.host).unwrap_or_default();
            let known = self.claims.get(&(root.volume, host)).map(|(epoch, _)| *epoch);
            if known != Some(root.epoch) {
                self.claims.insert((root.volume, host), (root.epoch, named));
            }
        }
    }

    /// Nodes have promised to a new claim: whoever serves the volume until then is deposed. Where the record named who
    /// claimed it, the former owner was deposed at the root already, and its being named again came too late.
    pub(super) fn check_deposing(&mut self, host: usize, volume: VolumeId) {
        let named = self.export_of(volume).and_then(|export| number_of_name(&export.host));
        let Some(other) = named.filter(|other| *other != host && self.serving(volume).contains(other)) else { return };
        if self.claims.get(&(volume, host)).is_some_and(|(_, named)| *named == name_of(host)) {
            return;
        }
        if self.is_true() && self.hosts[other].is_running() {
            self.fail(format!("h{host} deposes h{other}, which serves {volume} by the record"));
        }
    }

    pub(super) fn check_pause(&mut self, volume: VolumeId, pause: Duration) {
        if self.plan.is_calm() && self.plan.command > 0 && pause >= PAUSE_MAX {
            self.fail(format!("{volume} was served by nobody for {pause:?} in a hand-over"));
        }
    }

    /// A host opens what it is to serve.
    pub(super) fn check_opening(&mut self, host: usize, volume: VolumeId) {
        let own = &self.hosts[host];
        if own.view.export(volume).is_none_or(|(_, export)| export.host != own.name) {
            self.fail(format!("h{host} opens {volume}, which another host is to serve as far as it knows"));
        }
    }

    /// An owner drops what it serves, since another host is to serve it.
    pub(super) fn check_letting_go(&mut self, host: usize, volume: VolumeId) {
        let own = &self.hosts[host];
        let is_open = own.locals.get(&volume) == Some(&Local::Open);
        if is_open && own.view.export(volume).is_some_and(|(_, export)| export.host == own.name) {
            self.fail(format!("h{host} lets go of {volume}, which it is to serve as far as it knows"));
        }
    }

    pub(super) fn serving(&self, volume: VolumeId) -> Vec<usize> {
        let is_open = |host: &usize| self.hosts[*host].locals.get(&volume) == Some(&Local::Open);
        (0..self.hosts.len()).filter(is_open).collect()
    }

    /// Whether the volume is as its records say: open where it is to be, and nowhere else.
    fn check_volume(&self, number: usize) -> Result<(), String> {
        let volume = volume_id(number);
        let root = self.store.get(&root_key(volume)).and_then(|record| Root::decode(&record.value).ok());
        let export = self.export_of(volume).filter(|_| root.is_some_and(|root| !root.deleted));
        let serving = self.serving(volume);
        let found = || format!("volume {number} is open at {serving:?}, by the record {export:?}");
        let is_up = |name: &str| number_of_name(name).is_some_and(|host| self.hosts[host].is_up);
        let wanted = match &export {
            None => Vec::new(),
            Some(export) if is_up(&export.host) => number_of_name(&export.host).into_iter().collect(),
            Some(export) if export.failover || export.offered_by.iter().any(|host| is_up(host)) => {
                if !self.hosts.iter().any(|host| host.is_up) {
                    return Ok(());
                }
                return Err(format!("nobody takes over: {}", found()));
            }
            Some(_) => Vec::new(),
        };
        if serving != wanted {
            return Err(found());
        }
        if export.as_ref().is_some_and(|export| export.from.is_some() && is_up(&export.host)) {
            return Err(format!("a hand-over has no end: {}", found()));
        }
        Ok(())
    }

    fn check_volumes(&self, when: &str) -> Result<(), String> {
        let has_task = |number: &usize| {
            let mut tasks = self.hosts.iter().flat_map(|host| host.tasks.values());
            tasks.any(|task| task.volume == volume_id(*number))
        };
        for number in (0..self.plan.volumes).filter(|number| !has_task(number)) {
            self.check_volume(number).map_err(|why| format!("{when}: {why}"))?;
        }
        Ok(())
    }

    /// Faults for a while; then everything comes to rest as the records say.
    pub(crate) fn run(&mut self) -> Result<ClusterOutcome, String> {
        self.run_until(Instant::ZERO + self.plan.duration)?;
        self.settle()?;
        self.settle_clients()?;
        self.outcome.trace_hash = self.trace.hash();
        Ok(self.outcome)
    }

    /// Ends the faults, and waits until everything has come to rest.
    pub fn settle(&mut self) -> Result<(), String> {
        self.is_healing = true;
        self.with_real(|real| real.heal());
        self.disturb(self.now);
        // What was asked before may have consequences still.
        while self.now < self.faults_end {
            self.run_until(self.faults_end)?;
        }
        let was_store_lost = self.store_was_lost_until + SETTLED_AFTER_STORE > self.now;
        let bound = if was_store_lost { SETTLED_AFTER_STORE } else { SETTLED_AFTER };
        self.run_until(self.now + bound)?;
        self.check_volumes("after the bound")?;
        self.await_commands()?;
        self.serve_all()?;
        self.await_commands()?;
        self.run_until(self.now + TAKEN_UP_WITHIN)?;
        self.check_volumes("at rest")?;
        if self.is_real() {
            return self.check_idle();
        }
        self.run_until(self.now + DUTIES_DONE_WITHIN)?;
        self.check_duties()?;
        self.check_schedules()?;
        self.check_idle()
    }

    fn await_commands(&mut self) -> Result<(), String> {
        let end = self.now + COMMANDS_MAX;
        while self.hosts.iter().any(|host| !host.tasks.is_empty()) {
            if self.now > end {
                let left = self.hosts.iter().flat_map(|host| host.tasks.iter());
                let left: Vec<_> = left.map(|(id, task)| (*id, task.what, task.volume)).collect();
                return Err(format!("commands don't end: {left:?}"));
            }
            self.run_until(self.now + ms(200))?;
        }
        Ok(())
    }

    fn check_idle(&mut self) -> Result<(), String> {
        let before: Vec<_> = self.hosts.iter().map(|host| (host.ticks, host.actions)).collect();
        self.run_until(self.now + IDLE_FOR)?;
        for (number, (ticks, actions)) in before.into_iter().enumerate() {
            let host = &self.hosts[number];
            let name = name_of(number);
            if host.actions != actions {
                return Err(format!("{name} goes on acting when all is as it should be"));
            }
            if host.ticks - ticks > IDLE_FOR.as_secs() {
                return Err(format!("{name} wakes up {} times in {IDLE_FOR:?}", host.ticks - ticks));
            }
            if host.is_up && !(host.is_right && host.cluster.is_idle()) {
                return Err(format!("{name} has something under way for ever, or no store"));
            }
        }
        self.check_volumes("in the end")
    }
}
