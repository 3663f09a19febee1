//! What goes wrong, and when. The store's faults keep a distance from each other, so that what a host must survive is defined:
//! one that works is never gone for others for longer than its lease after the store was silent once.

use super::store::{Store, Which};
use super::{Event, Grid, LEASE, host::HostEvent, ms, volume_id};
use holdfast_base::Instant;
use std::time::Duration;

/// Between the end of one fault of the store and the next.
const STORE_PAUSE: Duration = Duration::from_secs(12);

/// States of the store that may come back.
const OLDER_KEPT: usize = 6;

impl Grid {
    pub(super) fn misfortune(&mut self) {
        self.keep_older();
        let host = self.prng.below(self.hosts.len() as u64) as usize;
        let plan = self.plan.clone();
        if self.prng.chance(plan.crash) {
            let is_for_good = plan.stays_down && self.prng.chance(300);
            let after = ms(self.prng.between(50, 9_000));
            self.crash(host, (!is_for_good).then_some(after));
        }
        let span = |grid: &mut Grid| {
            let most = *grid.prng.pick(&[400, 1_500, 4_000, 12_000]);
            ms(grid.prng.between(50, most))
        };
        if self.prng.chance(plan.hang) {
            let span = span(self);
            self.hang(host, span);
        }
        if self.prng.chance(plan.cut_store) {
            let span = span(self);
            self.cut_from_store(host, span);
        }
        if self.prng.chance(plan.cut_peers) {
            let (other, span) = (self.prng.below(self.hosts.len() as u64) as usize, span(self));
            self.cut_peers(host, other, span);
        }
        if self.prng.chance(plan.cut_nodes) {
            let (count, span) = (self.prng.between(1, 3) as usize, span(self));
            self.cut_from_nodes(host, count, span);
        }
        if self.prng.chance(plan.watch_stall) {
            let span = span(self);
            self.stall_watch(host, span);
        }
        if self.prng.chance(plan.compaction) {
            self.store.compact();
        }
        if self.prng.chance(plan.unreadable) {
            let (volume, span) = (self.prng.below(plan.volumes as u64) as usize, span(self));
            self.make_unreadable(volume, span);
        }
        self.store_misfortune();
    }

    fn store_misfortune(&mut self) {
        let plan = self.plan.clone();
        if self.now < self.next_store_fault_at || self.put_away.is_some() {
            return;
        }
        if self.prng.chance(plan.leader_loss) {
            let span = ms(self.prng.between(1_000, 3_000));
            self.lose_store(span, true);
        } else if self.prng.chance(plan.outage) {
            let most = *self.prng.pick(&[2_000, 8_000, 30_000]);
            let span = ms(self.prng.between(500, most));
            // A shorter one ends no lease.
            let keeps_leases = span < LEASE || self.prng.chance(500);
            self.lose_store(span, keeps_leases);
        } else if self.prng.chance(plan.emptied) {
            let (span, revision) = (ms(self.prng.between(500, 15_000)), self.store.revision);
            let revision = if self.prng.chance(500) { 0 } else { revision + self.prng.below(1_000) };
            let keeps_leases = self.prng.chance(500);
            self.replace_store(Store::new(Which::Emptied, revision), span, keeps_leases);
        } else if self.prng.chance(plan.older)
            && let Some(older) = self.older_than_seen()
        {
            let (span, keeps_leases) = (ms(self.prng.between(500, 15_000)), self.prng.chance(500));
            self.replace_store(older, span, keeps_leases);
        }
    }

    /// A state of the store of which every host that is up has seen more: who hasn't can't tell it from the right one.
    fn older_than_seen(&mut self) -> Option<Store> {
        let up = self.hosts.iter().filter(|host| host.is_up);
        let seen = up.map(|host| host.view.upto()).min()?;
        let older: Vec<&Store> = self.older.iter().filter(|older| older.revision + 20 < seen).collect();
        (!older.is_empty()).then(|| (*self.prng.pick(&older)).clone())
    }

    fn keep_older(&mut self) {
        if self.plan.older == 0 || !self.prng.chance(20) || !self.is_true() {
            return;
        }
        if self.older.len() == OLDER_KEPT {
            self.older.remove(0);
        }
        let older = self.snapshot();
        self.older.push(older);
    }

    /// A state of the store as it is now, to come back later.
    pub fn snapshot(&self) -> Store {
        let mut older = self.store.clone();
        older.which = Which::Older;
        older
    }

    /// A store that was set back goes past what hosts have seen when enough is written to it. When whatever differs was written anew
    /// nobody can tell any more who does not remember a later beat: so far it does not come.
    pub(super) fn end_older_in_time(&mut self) {
        const MARGIN: u64 = 4;
        if self.store.which != Which::Older {
            return;
        }
        let up = self.hosts.iter().filter(|host| host.is_up && !host.knows_more_than(&self.store));
        if up.map(|host| host.view.upto()).min().is_some_and(|seen| self.store.revision + MARGIN >= seen) {
            self.on_store_is(Which::Right, true);
        }
    }

    /// The host's process ends without a word, and starts again after a while.
    pub fn crash(&mut self, host: usize, starts_after: Option<Duration>) {
        if !self.hosts[host].is_up {
            return;
        }
        self.outcome.faults += 1;
        self.trace(&[20, host as u64], || format!("h{host} crashes"));
        self.drop_process(host);
        self.with_real(|real| real.end(host));
        self.disturb(self.now + LEASE);
        if let Some(after) = starts_after {
            let at = self.now + after;
            self.disturb(at);
            self.push(at, Event::Start { host });
        }
    }

    /// Nothing of the host runs for a while; then all at once.
    pub fn hang(&mut self, host: usize, span: Duration) {
        let until = self.now + span;
        if !self.hosts[host].is_up || self.hosts[host].hangs_until.is_some() {
            return;
        }
        self.outcome.faults += 1;
        self.trace(&[21, host as u64], || format!("h{host} hangs for {span:?}"));
        self.hosts[host].hangs_until = Some(until);
        self.hosts[host].hangs_for = span;
        self.hosts[host].unwell(until);
        self.with_real(|real| real.hang(host, span));
        self.disturb(until);
        self.push(until, Event::Resume { host });
    }

    pub fn cut_from_store(&mut self, host: usize, span: Duration) {
        let until = self.now + span;
        self.outcome.faults += 1;
        self.trace(&[22, host as u64], || format!("h{host} is cut from the store for {span:?}"));
        let own = &mut self.hosts[host];
        own.cut_store_until = own.cut_store_until.max(until);
        own.unwell(until);
        self.stall_watch(host, span);
    }

    pub fn cut_peers(&mut self, host: usize, other: usize, span: Duration) {
        let until = self.now + span;
        self.outcome.faults += 1;
        self.trace(&[23, host as u64, other as u64], || format!("h{host} and h{other} are cut for {span:?}"));
        self.cut_peers_until.insert((host.min(other), host.max(other)), until);
        self.with_real(|real| real.cut_peers(host, other, until));
        self.disturb(until);
    }

    pub fn cut_from_nodes(&mut self, host: usize, count: usize, span: Duration) {
        let until = self.now + span;
        self.outcome.faults += 1;
        self.trace(&[24, host as u64, count as u64], || format!("h{host} lacks {count} nodes for {span:?}"));
        self.hosts[host].nodes_away = (count, until);
        self.disturb(until + LEASE);
        self.cut_real_nodes(host);
        self.push(until, Event::ReachNodes { host });
        let boot = self.hosts[host].boot;
        let late = ms(self.prng.between(10, 400));
        self.push(self.now + late, Event::At { host, boot, event: HostEvent::Nodes });
        self.push(until + late, Event::At { host, boot, event: HostEvent::Nodes });
    }

    /// The watch says nothing for a while; then all of it comes, or it fails.
    pub fn stall_watch(&mut self, host: usize, span: Duration) {
        let until = self.now + span;
        let own = &mut self.hosts[host];
        own.watch_stalled_until = own.watch_stalled_until.max(until);
        let (boot, watch) = (own.boot, own.watch);
        self.disturb(until);
        if let Some(watch) = watch
            && self.prng.chance(500)
        {
            self.push(until, Event::At { host, boot, event: HostEvent::WatchFails { watch: watch.id } });
        }
    }

    /// The volume's map can't be read beforehand.
    pub fn make_unreadable(&mut self, volume: usize, span: Duration) {
        let until = self.now + span;
        self.unreadable_until.insert(volume_id(volume), until);
        self.disturb(until);
    }

    /// The store answers nobody for a while; a new leader gives all leases their time again, else they may be over all at once.
    pub fn lose_store(&mut self, span: Duration, keeps_leases: bool) {
        self.outcome.faults += 1;
        self.trace(&[25, u64::from(keeps_leases)], || format!("the store is away for {span:?} ({keeps_leases})"));
        let until = self.now + span;
        self.store_away_until = until;
        self.store_is_lost_until(until);
        self.push(until, Event::StoreIs { which: self.store.which, keeps_leases, is_return: false });
    }

    /// Another store is found in the place of the right one, which comes back later.
    pub fn replace_store(&mut self, other: Store, span: Duration, keeps_leases: bool) {
        self.outcome.faults += 1;
        let which = other.which;
        self.trace(&[26, other.revision], || format!("the store is {which:?} for {span:?}"));
        self.put_away = Some(std::mem::replace(&mut self.store, other));
        let away = ms(self.prng.below(1_500));
        self.store_away_until = self.now + away;
        self.push(self.now + away, Event::StoreIs { which, keeps_leases, is_return: false });
        let until = self.now + away + span;
        self.store_is_lost_until(until);
        self.push(until, Event::StoreIs { which: Which::Right, keeps_leases, is_return: true });
    }

    fn store_is_lost_until(&mut self, until: Instant) {
        self.store_was_lost_until = until;
        self.next_store_fault_at = until + STORE_PAUSE;
        self.disturb(until + Duration::from_secs(1));
    }

    pub(super) fn on_store_is(&mut self, which: Which, keeps_leases: bool) {
        if which == Which::Right
            && let Some(right) = self.put_away.take()
        {
            self.store = right;
        }
        self.trace(&[27, self.store.revision], || format!("the store answers: {which:?}"));
        if keeps_leases {
            self.store.extend_leases(self.now, LEASE);
        } else {
            self.store.end_leases(self.now);
        }
        self.break_watches();
        self.expire();
    }
}
