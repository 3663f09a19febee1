//! What `holdfast status` says of faults on two hosts, and which of it people are told: see `holdfast_sim::sight`.

use holdfast_api::Concern;
use holdfast_sim::disk::Crash;
use holdfast_sim::neighbours::{Grid, Home, Load, Neighbours};

use holdfast_verdict::alerts::{Alerts, Became};
use holdfast_verdict::findings;
use std::time::Duration;

const SECOND: Duration = Duration::from_secs(1);

/// Two hosts with a volume each, which looks as often as a host does.
struct Watched {
    run: Neighbours,
    /// By host; the first one tells.
    alerts: [Alerts; 2],
    told: Vec<(Became, String)>,
}

impl Watched {
    fn new() -> Watched {
        let homes = [0, 1].map(|reactor| Home { reactor, limit: "" });
        let grid = Grid { reactors: 2, are_hosts: true, rebuild_after: 60 * SECOND, ..Grid::default() };
        let mut run = Neighbours::on(37, grid, &homes);
        for volume in [0, 1] {
            run.fill(volume);
        }
        Watched { run, alerts: Default::default(), told: Vec::new() }
    }

    /// Lets time pass, and both hosts look every five seconds; what they find agrees with what controllers say.
    fn pass(&mut self, seconds: u64) {
        for _ in 0..seconds / 5 {
            self.run.pass(5 * SECOND);
            for host in [0, 1] {
                let found = findings::of(&self.run.status(host));
                self.agree(&found);
                let told = self.alerts[host].look(self.run.world.now(), &found, host == 0);
                assert!(host == 0 || told.is_empty(), "one tells");
                self.told.extend(told.into_iter().map(|alert| (alert.became, alert.finding.about)));
            }
        }
    }

    fn agree(&self, found: &[holdfast_api::Finding]) {
        let lacking = |concern: Concern, about: &str, lacks: fn(&holdfast_volume::Status) -> bool| {
            let names = [0, 1].map(|volume| self.run.home_of(volume)).into_iter().filter(|(host, name)| {
                let (volume, _) = host.find(name).expect("it is served");
                lacks(&volume.controller().status())
            });
            let names: Vec<String> = names.map(|(_, name)| name).collect();
            let finding = found.iter().find(|finding| finding.concern == concern && finding.about == about);
            assert_eq!(finding.is_some(), !names.is_empty(), "{about}: {names:?}, and {found:?}");
            assert!(names.iter().all(|name| finding.is_some_and(|f| f.what.contains(name.as_str()))), "{found:?}");
        };
        lacking(Concern::DataAtRisk, "volumes at risk", |status| status.at_risk_entries > 0);
        lacking(Concern::Redundancy, "volumes degraded", |status| status.degraded_segments > 0);
    }

    fn count(&self, became: Became, about: &str) -> usize {
        self.told.iter().filter(|(was, of)| (*was, of.as_str()) == (became, about)).count()
    }
}

#[test]
fn of_a_grid_that_works_nobody_is_told_anything() {
    let mut watched = Watched::new();
    watched.run.come(Load { volume: 1, in_flight: 4, bytes: 8 << 10, reads: false, at: 0, step: 1 });
    watched.pass(60);
    assert_eq!(findings::of(&watched.run.status(0)), []);
    assert_eq!(watched.told, []);
}

#[test]
fn a_node_that_is_away_for_a_moment_is_shown_and_nobody_is_told() {
    let mut watched = Watched::new();
    watched.run.world.crash_node(1, Crash::Process);
    watched.pass(30);
    assert!(findings::of(&watched.run.status(0)).iter().any(|finding| finding.about == "node 2"));
    watched.run.world.start_node(1);
    watched.pass(120);
    assert_eq!(findings::of(&watched.run.status(0)), []);
    assert_eq!(watched.told, []);
}

/// Records that were on the node say again what they said, on the others; and where there is no other, once at most.
#[test]
fn records_of_a_volume_at_rest_are_soon_on_as_many_devices_as_there_are() {
    for nodes in [2, 3, 4] {
        let homes = [0, 1].map(|reactor| Home { reactor, limit: "" });
        let grid = Grid { reactors: 2, are_hosts: true, nodes, rebuild_after: 3600 * SECOND, ..Grid::default() };
        let mut run = Neighbours::on(41, grid, &homes);
        (0..2).for_each(|volume| run.fill(volume));
        run.pass(60 * SECOND);
        let told = |run: &Neighbours| {
            [0, 1].map(|volume| {
                let (host, name) = run.home_of(volume);
                let status = host.find(&name).expect("it is served").0.controller().status();
                (status.at_risk_entries, status.counters.checkpoints)
            })
        };
        run.world.crash_node(1, Crash::Process);
        run.pass(10 * SECOND);
        let soon = told(&run);
        assert!(nodes == 2 || soon.iter().all(|(at_risk, _)| *at_risk == 0), "{nodes} nodes: {soon:?}");
        run.pass(600 * SECOND);
        let late = told(&run);
        let more: u64 = late.iter().zip(soon).map(|(late, soon)| late.1 - soon.1).sum();
        assert!(more <= 2, "{nodes} nodes: {more} checkpoints of volumes at rest: {soon:?}, {late:?}");
    }
}

#[test]
fn what_volumes_of_both_hosts_lack_is_told_once_and_its_end_once() {
    let mut watched = Watched::new();
    watched.run.world.crash_node(1, Crash::Process);
    // Nothing is made again before a minute is over.
    watched.pass(55);
    let degraded = findings::of(&watched.run.status(0));
    let degraded = degraded.iter().find(|finding| finding.about == "volumes degraded").expect("both lack it");
    assert!(degraded.what.contains("volumes v0, v1"), "{degraded}");
    // All of it is on the two others then; the node is missed on.
    watched.pass(600);
    assert_eq!(watched.count(Became::Raised, "node 2"), 1, "{:?}", watched.told);
    assert_eq!(watched.count(Became::Cleared, "node 2"), 0, "{:?}", watched.told);
    let left = findings::of(&watched.run.status(1));
    assert!(left.iter().all(|finding| finding.about == "node 2") && left.len() == 1, "{left:?}");
    watched.run.world.start_node(1);
    watched.pass(120);
    assert_eq!(findings::of(&watched.run.status(1)), []);
    assert_eq!(watched.count(Became::Cleared, "node 2"), 1, "{:?}", watched.told);
    let raised = watched.told.iter().filter(|(became, _)| *became == Became::Raised).count();
    assert_eq!(raised * 2, watched.told.len(), "what was raised is cleared: {:?}", watched.told);
}
