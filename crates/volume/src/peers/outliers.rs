//! Devices that are slow against their peers, or report errors: found, bypassed, and trusted again.
//!
//! Role: nodes tell how long their devices' operations take ([`DeviceStat`]); [`Outliers`] compares the devices of all
//! nodes, and [`Peers::settle_bypass`] bypasses what it finds: no new shards, no new log entries, reads from elsewhere
//! where there is a choice. A slow *node* is another matter, judged by our own requests in milliseconds
//! ([`super::health`]).
//!
//! States of a device: trusted -> slow (at every look for `slow_after`: 99th percentile of reads or durable writes more
//! than [`OUTLIER_TIMES`] that of its peers in the middle, and above [`FLOOR_US`]; or at once: [`ERRORS_MAX`] errors
//! within [`ERRORS_WITHIN`]) -> trusted (none of that for as long). One that soon relapses has to behave twice as long.
//!
//! A slow device is bypassed where the volume can do without it: the nodes that remain suffice for layout and log and
//! have room, and all bypassed devices are one node's. Where that ends (another node is lost) the bypass ends with it.
//!
//! Limits: one record a device. What was found is kept in memory only: a volume that is opened judges anew.

use super::Peers;
use crate::api::{Effect, Notice, Out, SlowBecause};
use crate::basis::Basis;
use crate::space::reserve_bytes;
use holdfast_base::{DeviceId, Instant, NodeId};
use holdfast_format::ledger::Leg;
use holdfast_format::wire::{DeviceHealth, DeviceStat, OpTimes};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// So many times the peers' time is an outlier.
const OUTLIER_TIMES: u64 = 10;

/// What takes less is fast enough, whatever peers take.
const FLOOR_US: u32 = 5_000;

/// Operations in the window of a trusted device, and of its peers, from which on they are compared.
const SAMPLES_MIN: u32 = 32;

/// Of a slow one: it is spared, and does little more than what nodes ask of an idle device to see how it does.
const SAMPLES_MIN_SLOW: u32 = 1;

/// Errors within this time that make a device slow: a sector that can't be read is one, a disk that dies has many.
const ERRORS_MAX: usize = 3;
const ERRORS_WITHIN: Duration = Duration::from_secs(60);

/// Looks in the span that a finding must hold for: as many at most, and at least.
const LOOKS: u32 = 30;
const LOOKS_MIN: u32 = 3;

/// Slow again within so many spans: a relapse. Each doubles the span that it must behave for, up to so many times.
const RELAPSE_SPANS: u32 = 20;
const RELAPSES_MAX: u32 = 8;

/// What is known of one device.
#[derive(Debug, Default)]
struct Standing {
    /// The first of the looks in a row that found it an outlier, and how many they were.
    bad: Option<(Instant, u32)>,
    slow_since: Option<Instant>,
    /// The first of the looks in a row that found a slow one well.
    good_since: Option<Instant>,
    trusted_at: Option<Instant>,
    relapses: u32,
    errors_told: Option<u64>,
    errors_at: VecDeque<Instant>,
}

/// What a look finds of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Finding {
    Bad(SlowBecause),
    Good,
    /// Too little was done to tell.
    Unclear,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verdict {
    Slow(Leg, SlowBecause),
    Trusted(Leg),
}

/// Compares devices. Fed with what nodes tell, and with time; decides nothing but who is slow.
#[derive(Debug, Default)]
pub(super) struct Outliers {
    devices: BTreeMap<Leg, Standing>,
    looked_at: Instant,
}

impl Standing {
    /// Takes note of the errors told, and tells whether they were many of late.
    fn note_errors(&mut self, now: Instant, told: u64) -> bool {
        let before = self.errors_told.replace(told).unwrap_or(told);
        // A node that was started again counts from zero.
        let new = told.checked_sub(before).unwrap_or(told);
        for _ in 0..new.min(ERRORS_MAX as u64) {
            self.errors_at.push_back(now);
        }
        while self.errors_at.len() > ERRORS_MAX
            || self.errors_at.front().is_some_and(|at| now.since(*at) > ERRORS_WITHIN)
        {
            self.errors_at.pop_front();
        }
        self.errors_at.len() >= ERRORS_MAX
    }

    fn weigh(&mut self, now: Instant, finding: Finding, span: Duration, span_max: Duration) -> Option<bool> {
        if self.slow_since.is_none() {
            let Finding::Bad(because) = finding else {
                self.bad = None;
                return None;
            };
            let (since, looks) = self.bad.map_or((now, 1), |(since, looks)| (since, looks + 1));
            self.bad = Some((since, looks));
            let holds = looks >= LOOKS_MIN && now.since(since) >= span;
            if !holds && matches!(because, SlowBecause::Latency { .. }) {
                return None;
            }
            let relapsed = self.trusted_at.is_some_and(|at| now.since(at) < span * RELAPSE_SPANS);
            self.relapses = if relapsed { (self.relapses + 1).min(RELAPSES_MAX) } else { 0 };
            (self.slow_since, self.good_since, self.bad) = (Some(now), None, None);
            return Some(true);
        }
        if finding != Finding::Good {
            self.good_since = None;
            return None;
        }
        let calm = (span * (1 << self.relapses)).min(span_max.max(span));
        if now.since(*self.good_since.get_or_insert(now)) < calm {
            return None;
        }
        (self.slow_since, self.trusted_at) = (None, Some(now));
        Some(false)
    }
}

impl Outliers {
    /// Whether it is time to look again, for a finding that has to hold for `span`.
    fn is_due(&self, now: Instant, span: Duration) -> bool {
        now.since(self.looked_at) >= span / LOOKS
    }

    /// Compares the devices that serve. A slow one must behave for `span`, or after relapses for longer, up to
    /// `span_max`.
    fn look(
        &mut self,
        now: Instant,
        (span, span_max): (Duration, Duration),
        serving: &[(Leg, &DeviceStat)],
    ) -> Vec<Verdict> {
        self.looked_at = now;
        let mut findings = Vec::with_capacity(serving.len());
        for (leg, stat) in serving {
            let many_errors = self.devices.entry(*leg).or_default().note_errors(now, stat.io_errors);
            let finding = match many_errors {
                true => Finding::Bad(SlowBecause::Errors { count: stat.io_errors }),
                false => self.compare(*leg, stat, serving),
            };
            findings.push((*leg, finding));
        }
        let mut verdicts = Vec::new();
        for (leg, finding) in findings {
            let standing = self.devices.get_mut(&leg).expect("just looked at");
            match (standing.weigh(now, finding, span, span_max), finding) {
                (Some(true), Finding::Bad(because)) => verdicts.push(Verdict::Slow(leg, because)),
                (Some(_), _) => verdicts.push(Verdict::Trusted(leg)),
                (None, _) => {}
            }
        }
        verdicts
    }

    fn compare(&self, leg: Leg, stat: &DeviceStat, serving: &[(Leg, &DeviceStat)]) -> Finding {
        let samples_min = if self.is_slow(leg) { SAMPLES_MIN_SLOW } else { SAMPLES_MIN };
        let mut found = Finding::Unclear;
        let kinds: [fn(&DeviceStat) -> OpTimes; 2] = [|d| d.reads, |d| d.writes];
        for times_of in kinds {
            let own = times_of(stat);
            let peers = serving.iter().filter(|(peer, _)| *peer != leg && !self.is_slow(*peer));
            let mut peers: Vec<u32> =
                peers.map(|(_, d)| times_of(d)).filter(|t| t.samples >= samples_min).map(|t| t.p99_us).collect();
            if own.samples < samples_min || peers.is_empty() {
                continue;
            }
            peers.sort_unstable();
            let peers_us = peers[peers.len() / 2];
            if own.p99_us > FLOOR_US && u64::from(own.p99_us) > u64::from(peers_us) * OUTLIER_TIMES {
                return Finding::Bad(SlowBecause::Latency { p99_us: own.p99_us, peers_us });
            }
            found = Finding::Good;
        }
        found
    }

    fn is_slow(&self, leg: Leg) -> bool {
        self.devices.get(&leg).is_some_and(|standing| standing.slow_since.is_some())
    }

    /// Those that are slow, with since when.
    /// No device is slow, or looks as if it were.
    pub(super) fn is_calm(&self) -> bool {
        self.devices.values().all(|standing| standing.bad.is_none() && standing.slow_since.is_none())
    }

    pub(super) fn slow(&self) -> impl Iterator<Item = (Leg, Instant)> {
        self.devices.iter().filter_map(|(leg, standing)| Some((*leg, standing.slow_since?)))
    }
}

impl Peers {
    /// Nodes have told how their devices do.
    pub(crate) fn judge_devices(&mut self, basis: &Basis, out: Out) {
        let span = basis.config.slow_after;
        if !self.outliers.is_due(basis.now, span) {
            return;
        }
        let up = self.nodes.iter().filter(|(_, node)| node.is_up());
        let serving: Vec<(Leg, &DeviceStat)> = up
            .flat_map(|(id, node)| node.devices().map(move |d| (Leg { node: *id, device: d.device }, d)))
            .filter(|(_, d)| d.health == DeviceHealth::Serving)
            .collect();
        let verdicts = self.outliers.look(basis.now, (span, basis.config.rebuild_after), &serving);
        for verdict in verdicts {
            out.push(Effect::Notice(match verdict {
                Verdict::Slow(leg, because) => Notice::DeviceSlow { node: leg.node, device: leg.device, because },
                Verdict::Trusted(leg) => Notice::DeviceTrusted { node: leg.node, device: leg.device },
            }));
        }
    }

    /// Bypasses as many slow devices as the volume can do without just now.
    pub(crate) fn settle_bypass(&mut self, basis: &Basis) {
        if self.outliers.slow().next().is_none() {
            self.bypassed.clear();
            return;
        }
        let mut slow: Vec<(bool, Instant, Leg)> = self
            .outliers
            .slow()
            .filter(|(leg, _)| self.device_serves(*leg))
            .map(|(leg, since)| (!self.is_bypassed(leg.device), since, leg))
            .collect();
        slow.sort_unstable();
        let mut bypassed: BTreeSet<DeviceId> = BTreeSet::new();
        let mut of_node: Option<NodeId> = None;
        for (_, _, leg) in slow {
            // One that is being emptied takes nothing anyway.
            let is_leaving = self.is_draining(leg.device);
            if !is_leaving && of_node.is_some_and(|node| node != leg.node) {
                continue;
            }
            bypassed.insert(leg.device);
            if !is_leaving && !self.can_do_without(basis, &bypassed) {
                bypassed.remove(&leg.device);
            } else if !is_leaving {
                of_node = Some(leg.node);
            }
        }
        self.bypassed = bypassed;
    }

    /// Whether the other devices suffice for the volume's layout and its log, and have room.
    fn can_do_without(&self, basis: &Basis, bypassed: &BTreeSet<DeviceId>) -> bool {
        let Some(layout) = basis.layout() else { return false };
        let takes = |d: &&DeviceStat| {
            d.health == DeviceHealth::Serving
                && !self.is_draining(d.device)
                && !bypassed.contains(&d.device)
                && d.free_bytes > reserve_bytes(&basis.config, d.capacity_bytes)
        };
        let needed = usize::from(layout.width().max(layout.failures() + 1));
        if layout.is_on_devices() {
            return self.usable().flat_map(|(_, node)| node.devices()).filter(takes).count() >= needed;
        }
        let each = usize::from(layout.shards_a_domain());
        let takers = self.usable().filter(|(_, node)| node.devices().filter(takes).count() >= each).count();
        takers >= needed
    }

    /// Devices found slow: since when, and whether this volume does without them.
    pub(crate) fn slow_devices(&self) -> Vec<(DeviceId, Instant, bool)> {
        let known = self.outliers.slow().filter(|(leg, _)| self.device(*leg).is_some());
        known.map(|(leg, since)| (leg.device, since, self.is_bypassed(leg.device))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPAN: Duration = Duration::from_secs(30);
    const SPAN_MAX: Duration = Duration::from_secs(600);

    fn leg(n: u32) -> Leg {
        Leg { node: NodeId(n), device: DeviceId(u128::from(n)) }
    }

    /// One device a node, with these times of reads in microseconds, a hundred samples each.
    struct Grid {
        outliers: Outliers,
        stats: Vec<DeviceStat>,
        now: Instant,
    }

    impl Grid {
        fn new(reads_us: &[u32]) -> Grid {
            let stat = |(n, us): (usize, &u32)| DeviceStat {
                reads: OpTimes { p99_us: *us, samples: 100 },
                ..DeviceStat::unknown(leg(n as u32).device, DeviceHealth::Serving)
            };
            let stats = reads_us.iter().enumerate().map(stat).collect();
            Grid { outliers: Outliers::default(), stats, now: Instant(0) }
        }

        /// A look a second; returns what was found, by the second.
        fn pass(&mut self, seconds: u64) -> Vec<(u64, Verdict)> {
            let mut found = Vec::new();
            for second in 1..=seconds {
                self.now = self.now + Duration::from_secs(1);
                let serving: Vec<(Leg, &DeviceStat)> =
                    self.stats.iter().enumerate().map(|(n, d)| (leg(n as u32), d)).collect();
                let verdicts = self.outliers.look(self.now, (SPAN, SPAN_MAX), &serving);
                found.extend(verdicts.into_iter().map(|v| (second, v)));
            }
            found
        }

        fn slow(&self) -> Vec<Leg> {
            self.outliers.slow().map(|(leg, _)| leg).collect()
        }
    }

    #[test]
    fn an_outlier_for_thirty_seconds_is_slow_and_trusted_after_thirty_good_ones() {
        let mut grid = Grid::new(&[300, 400, 20_000, 500]);
        let because = SlowBecause::Latency { p99_us: 20_000, peers_us: 400 };
        assert_eq!(grid.pass(40), [(31, Verdict::Slow(leg(2), because))]);
        grid.stats[2].reads.p99_us = 450;
        assert_eq!(grid.pass(40), [(31, Verdict::Trusted(leg(2)))]);
    }

    #[test]
    fn a_moment_of_calm_begins_the_span_anew() {
        let mut grid = Grid::new(&[300, 400, 20_000]);
        assert!(grid.pass(29).is_empty());
        grid.stats[2].reads.p99_us = 4_000;
        assert!(grid.pass(1).is_empty());
        grid.stats[2].reads.p99_us = 20_000;
        assert!(grid.pass(29).is_empty());
        assert_eq!(grid.pass(5).len(), 1);
    }

    #[test]
    fn where_all_are_slow_nobody_is() {
        let mut grid = Grid::new(&[20_000, 30_000, 150_000, 40_000]);
        assert!(grid.pass(100).is_empty());
        // Nor where the peers' times are not known.
        let mut grid = Grid::new(&[20_000, 300, 300]);
        grid.stats[1].reads.samples = SAMPLES_MIN - 1;
        grid.stats[2].reads.samples = 0;
        assert!(grid.pass(100).is_empty());
    }

    #[test]
    fn below_the_floor_or_with_few_samples_nothing_is_an_outlier() {
        let mut grid = Grid::new(&[100, 100, 5_000]);
        assert!(grid.pass(100).is_empty());
        let mut grid = Grid::new(&[100, 100, 50_000]);
        grid.stats[2].reads.samples = SAMPLES_MIN - 1;
        assert!(grid.pass(100).is_empty());
    }

    #[test]
    fn slow_writes_count_though_reads_are_fast() {
        let mut grid = Grid::new(&[100, 100, 100]);
        for stat in &mut grid.stats {
            stat.writes = OpTimes { p99_us: 900, samples: 50 };
        }
        grid.stats[0].writes.p99_us = 9_100;
        grid.pass(31);
        assert_eq!(grid.slow(), [leg(0)]);
    }

    #[test]
    fn a_spared_device_is_judged_by_the_little_it_does_and_not_at_all_by_nothing() {
        let mut grid = Grid::new(&[100, 100, 50_000]);
        grid.pass(31);
        assert_eq!(grid.slow(), [leg(2)]);
        for stat in &mut grid.stats {
            stat.reads = OpTimes { p99_us: 90, samples: 0 };
        }
        assert!(grid.pass(300).is_empty(), "nothing is known");
        for stat in &mut grid.stats {
            stat.reads.samples = SAMPLES_MIN_SLOW;
        }
        grid.stats[2].reads.p99_us = 50_000;
        assert!(grid.pass(300).is_empty(), "still slow");
        grid.stats[2].reads.p99_us = 90;
        assert_eq!(grid.pass(31), [(31, Verdict::Trusted(leg(2)))]);
    }

    #[test]
    fn each_relapse_doubles_the_time_it_must_behave_up_to_the_bound() {
        let mut grid = Grid::new(&[100, 100, 50_000]);
        let mut behaved = Vec::new();
        for _ in 0..7 {
            grid.stats[2].reads.p99_us = 50_000;
            assert_eq!(grid.pass(31).len(), 1);
            grid.stats[2].reads.p99_us = 90;
            let found = grid.pass(601);
            behaved.push(found[0].0 - 1);
            // The rest of the time does not count: go on where it was trusted.
            grid.now = Instant(grid.now.0 - (601 - found[0].0) * 1_000_000_000);
        }
        assert_eq!(behaved, [30, 60, 120, 240, 480, 600, 600]);
    }

    #[test]
    fn several_errors_within_a_minute_make_a_device_slow_at_once_and_one_does_not() {
        let mut grid = Grid::new(&[100, 100, 100]);
        grid.stats[1].io_errors = 7;
        assert!(grid.pass(1).is_empty(), "who knows when they were");
        for _ in 0..5 {
            grid.stats[1].io_errors += 1;
            assert!(grid.pass(61).is_empty(), "one a minute");
        }
        grid.stats[1].io_errors += 3;
        let because = SlowBecause::Errors { count: 15 };
        assert_eq!(grid.pass(1), [(1, Verdict::Slow(leg(1), because))]);
        assert_eq!(grid.pass(120), [(91, Verdict::Trusted(leg(1)))]);
        // The node was started again, and counts from zero.
        grid.stats[1].io_errors = 2;
        assert!(grid.pass(10).is_empty());
    }

    #[test]
    fn a_slow_device_is_bypassed_where_the_others_suffice_and_only_on_one_node() {
        use super::super::tests::peers;
        let mut basis = crate::basis::tests::basis("mirror:2");
        let leg = super::super::tests::leg;
        let mut peers = peers(Instant(0), &[1, 1, 1]);
        let slow_since = |peers: &mut Peers, leg, at| {
            peers.outliers.devices.entry(leg).or_default().slow_since = Some(Instant(at));
        };
        slow_since(&mut peers, leg(1, 0), 1);
        slow_since(&mut peers, leg(2, 0), 2);
        peers.settle_bypass(&basis);
        assert_eq!(peers.slow_devices(), [(leg(1, 0).device, Instant(1), true), (leg(2, 0).device, Instant(2), false)]);
        peers.on_down(Instant(3), NodeId(3));
        peers.settle_bypass(&basis);
        assert!(!peers.is_bypassed(leg(1, 0).device), "it is needed now");
        basis.replace_root(crate::basis::tests::basis("mirror:2@device").root().clone());
        peers.set_draining(BTreeSet::from([leg(2, 0).device]));
        peers.settle_bypass(&basis);
        assert!(!peers.is_bypassed(leg(1, 0).device) && peers.is_bypassed(leg(2, 0).device));
        peers.verify(Instant(3));
    }
}
