//! The control plane of several hosts over one store: what must hold in the main cases, and random runs of everything at once,
//! each twice with the same trace: see `holdfast_sim::cluster`.

use holdfast_sim::cluster::store::{Store, Which};
use holdfast_sim::cluster::{ClusterOutcome, ClusterPlan, Grid, SETTLED_AFTER, What, ms, run_cluster};
use holdfast_sim::runner::{guarded, replay_command, run_seeds, twice};
use std::time::Duration;

const SEEDS: u64 = 2000;

#[test]
fn clusters_come_to_rest_whatever_happens() {
    let jobs = std::thread::available_parallelism().map_or(2, |n| n.get());
    let run = |seed| twice(seed, || run_cluster(ClusterPlan::from_seed(seed), false));
    let (outcomes, findings) = run_seeds(0, SEEDS, jobs, false, run);
    for finding in &findings {
        eprintln!("seed {}: {}\n  replay: {} --cluster", finding.seed, finding.why, replay_command(finding.seed));
    }
    assert!(findings.is_empty(), "{} of {SEEDS} seeds found something", findings.len());
    let sum = |f: fn(&ClusterOutcome) -> u64| outcomes.iter().map(|(_, o)| f(o)).sum::<u64>();
    for (what, count) in [
        ("faults", sum(|o| o.faults)),
        ("commands", sum(|o| o.commands)),
        ("hand-overs", sum(|o| o.handovers)),
        ("take-overs", sum(|o| o.take_overs)),
        ("of these by hosts that did not offer them", sum(|o| o.fail_overs)),
        ("depositions", sum(|o| o.depositions)),
        ("lost swaps", sum(|o| o.conflicts)),
        ("listings that were not believed", sum(|o| o.doubts)),
        ("volumes thrown away", sum(|o| o.thrown_away)),
        ("volumes had back", sum(|o| o.restored)),
        ("volumes deleted for good", sum(|o| o.deleted)),
        ("volumes cared for", sum(|o| o.cared)),
        ("snapshots by schedule", sum(|o| o.snapshots)),
    ] {
        assert!(count > 50, "{count} {what} in {SEEDS} runs: the simulator has gone blind");
    }
}

/// A host that went on asking nobody, and opened. Another one that was late, and claimed what was not its own any more.
const ASKED_NOBODY: u64 = 29_534;
const CLAIMED_LATE: u64 = 77_421;

#[test]
fn seeds_that_found_something_are_sound() {
    for seed in [ASKED_NOBODY, CLAIMED_LATE] {
        let run = || run_cluster(ClusterPlan::from_seed(seed), false);
        twice(seed, run).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
    }
    let mut plan = ClusterPlan::from_seed(CLAIMED_LATE);
    plan.mistakes.leaves_guard_out = true;
    let found = guarded(CLAIMED_LATE, || run_cluster(plan, false)).expect_err("it finds nothing any more");
    assert!(found.contains("by the record"), "{found}");
}

const MINUTE: Duration = Duration::from_secs(60);

/// One volume, served by host 0 and offered by all three, open for a while.
fn three_hosts(seed: u64) -> Grid {
    let mut grid = Grid::new(ClusterPlan::quiet(seed, 3, 1), false);
    grid.set_export(0, 0, &[0, 1, 2]);
    grid.run_for(Duration::from_secs(8));
    assert_eq!(grid.open_at(0), [0]);
    grid
}

/// Which host the record names; that alone has it open.
fn served_by(grid: &Grid) -> String {
    let host = grid.record(0).expect("it is to be served").host;
    let open_at: Vec<String> = grid.open_at(0).iter().map(|n| format!("h{n}")).collect();
    assert_eq!(open_at.join(", "), host);
    host
}

fn settle(mut grid: Grid) -> ClusterOutcome {
    grid.settle().unwrap_or_else(|why| panic!("{why}"));
    grid.outcome
}

#[test]
fn a_hand_over_leaves_the_volume_alone_for_a_moment_only() {
    for seed in 0..20 {
        let mut grid = three_hosts(seed);
        for (from, to) in [(0, 1), (1, 2), (2, 0)] {
            grid.command(from, 0, What::HandOver { to });
            grid.run_for(Duration::from_secs(2));
            assert_eq!(served_by(&grid), format!("h{to}"));
        }
        let outcome = settle(grid);
        assert_eq!((outcome.handovers, outcome.take_overs, outcome.depositions), (3, 0, 0));
        assert!(outcome.pause_max < Duration::from_secs(1), "{:?}", outcome.pause_max);
    }
}

#[test]
fn the_volumes_of_a_killed_host_are_taken_over_when_its_lease_is_over() {
    for seed in 0..20 {
        let mut grid = three_hosts(seed);
        grid.crash(0, Some(MINUTE));
        grid.run_for(Duration::from_secs(3));
        assert_eq!(grid.record(0).unwrap().host, "h0", "it may be back in a moment");
        grid.run_for(SETTLED_AFTER);
        assert_ne!(served_by(&grid), "h0");
        // When it is back it is one that offers the volume.
        assert_eq!(settle(grid).take_overs, 1);
    }
}

#[test]
fn a_hung_owner_is_deposed_and_finds_that_it_was() {
    for seed in 0..20 {
        let mut grid = three_hosts(seed);
        grid.hang(0, Duration::from_secs(20));
        grid.run_for(SETTLED_AFTER + LEASE_BEGUN);
        assert_ne!(grid.record(0).unwrap().host, "h0");
        assert_eq!(grid.open_at(0).len(), 2, "what hangs has it open still, and can't write");
        grid.run_for(Duration::from_secs(10));
        assert_ne!(served_by(&grid), "h0");
        assert_eq!(settle(grid).take_overs, 1);
    }
}

/// One volume at host 0 alone, which whoever lives takes over.
fn failing_over(seed: u64) -> Grid {
    let mut grid = Grid::new(ClusterPlan::quiet(seed, 3, 1), false);
    grid.set_failover(0, 0);
    grid.run_for(Duration::from_secs(8));
    assert_eq!(grid.open_at(0), [0]);
    grid
}

#[test]
fn a_volume_that_fails_over_is_served_elsewhere_when_its_host_is_killed() {
    for seed in 0..20 {
        let mut grid = failing_over(seed);
        grid.crash(0, Some(MINUTE));
        grid.run_for(SETTLED_AFTER);
        assert_ne!(served_by(&grid), "h0");
        let outcome = settle(grid);
        assert_eq!((outcome.take_overs, outcome.fail_overs), (1, 1));
    }
}

#[test]
fn a_host_that_lacks_nothing_but_the_store_keeps_what_fails_over() {
    for seed in 0..20 {
        let mut grid = failing_over(seed);
        grid.cut_from_store(0, Duration::from_secs(30));
        grid.run_for(Duration::from_secs(29));
        assert_eq!(served_by(&grid), "h0", "nodes hear it, so its clients have the volume");
        let outcome = settle(grid);
        assert_eq!((outcome.take_overs, outcome.depositions), (0, 0));
    }
}

#[test]
fn a_host_that_is_cut_off_from_store_and_nodes_loses_what_fails_over() {
    for seed in 0..20 {
        let mut grid = failing_over(seed);
        grid.cut_from_store(0, Duration::from_secs(40));
        grid.run_for(Duration::from_secs(15));
        assert_eq!(served_by(&grid), "h0");
        grid.cut_from_nodes(0, 3, Duration::from_secs(20));
        grid.run_for(Duration::from_secs(5));
        assert_ne!(grid.record(0).unwrap().host, "h0");
        grid.run_for(MINUTE);
        assert_ne!(served_by(&grid), "h0");
        assert_eq!(settle(grid).fail_overs, 1);
    }
}

#[test]
fn a_host_that_hands_over_and_lacks_the_store_keeps_what_fails_over() {
    for seed in 0..20 {
        let mut grid = failing_over(seed);
        grid.make_unreadable(0, MINUTE);
        grid.command(0, 0, What::HandOver { to: 1 });
        grid.run_for(Duration::from_secs(1));
        assert_eq!((grid.record(0).unwrap().host.as_str(), grid.open_at(0)), ("h1", vec![0]));
        // The record names who is lost; who serves it lacks the store, and nodes hear it.
        grid.crash(1, Some(MINUTE));
        grid.cut_from_store(0, Duration::from_secs(30));
        grid.run_for(Duration::from_secs(29));
        assert_eq!((grid.record(0).unwrap().host.as_str(), grid.open_at(0)), ("h1", vec![0]));
        let outcome = settle(grid);
        assert_eq!((outcome.fail_overs, outcome.depositions), (0, 0));
    }
}

/// It may have been renewed in the moment before.
const LEASE_BEGUN: Duration = Duration::from_secs(1);

#[test]
fn a_store_that_was_silent_moves_no_volume_though_all_leases_are_over() {
    for seed in 0..20 {
        let mut grid = three_hosts(seed);
        grid.lose_store(Duration::from_secs(30), false);
        grid.run_for(MINUTE);
        assert_eq!(served_by(&grid), "h0");
        let outcome = settle(grid);
        assert_eq!((outcome.take_overs, outcome.depositions), (0, 0));
    }
}

#[test]
fn a_hand_over_deposes_nobody_though_the_store_was_silent_meanwhile() {
    for seed in 0..20 {
        let mut grid = three_hosts(seed);
        grid.make_unreadable(0, Duration::from_secs(18));
        grid.command(0, 0, What::HandOver { to: 1 });
        grid.run_for(Duration::from_secs(1));
        assert_eq!((grid.record(0).unwrap().host.as_str(), grid.open_at(0)), ("h1", vec![0]));
        // Neither is gone, though neither has a lease any more.
        grid.lose_store(Duration::from_secs(10), false);
        grid.run_for(Duration::from_secs(25));
        // Its command may have given up.
        assert!(["h0", "h1"].contains(&served_by(&grid).as_str()));
        let outcome = settle(grid);
        assert_eq!((outcome.take_overs, outcome.depositions), (0, 0));
    }
}

#[test]
fn a_store_that_is_emptied_changes_nothing_and_is_believed_when_it_is_back() {
    for seed in 0..20 {
        let mut grid = three_hosts(seed);
        // With revisions from the beginning, and with such as go on.
        let revision = if seed % 2 == 0 { 0 } else { 500 };
        grid.replace_store(Store::new(Which::Emptied, revision), Duration::from_secs(30), seed % 3 == 0);
        grid.run_for(Duration::from_secs(20));
        assert_eq!(served_by(&grid), "h0");
        grid.command(0, 0, What::HandOver { to: 1 });
        grid.run_for(Duration::from_secs(30));
        assert_eq!(served_by(&grid), "h0", "what an operator asks for meanwhile is refused");
        grid.command(0, 0, What::HandOver { to: 1 });
        grid.run_for(Duration::from_secs(2));
        assert_eq!(served_by(&grid), "h1", "the right store is back");
        let outcome = settle(grid);
        assert_eq!((outcome.take_overs, outcome.depositions), (0, 0));
    }
}

#[test]
fn a_store_that_was_set_back_changes_nothing() {
    for seed in 0..20 {
        let mut grid = three_hosts(seed);
        let older = grid.snapshot();
        grid.command(0, 0, What::HandOver { to: 1 });
        grid.run_for(MINUTE);
        // By its records host 0 serves the volume.
        grid.replace_store(older, Duration::from_secs(10), seed % 2 == 0);
        grid.run_for(Duration::from_secs(5));
        assert_eq!(served_by(&grid), "h1");
        let outcome = settle(grid);
        assert_eq!((outcome.take_overs, outcome.depositions), (0, 0));
        assert!(outcome.doubts > 0);
    }
}

#[test]
fn a_take_over_whose_outcome_nobody_hears_of_is_found_done() {
    for seed in 0..20 {
        let mut grid = three_hosts(seed);
        grid.plan.lost_answer = 1000;
        grid.crash(0, Some(MINUTE));
        grid.run_for(SETTLED_AFTER + Duration::from_secs(2));
        assert_ne!(grid.record(0).unwrap().host, "h0");
        grid.plan.lost_answer = 0;
        grid.run_for(Duration::from_secs(5));
        assert_ne!(served_by(&grid), "h0");
        assert_eq!(settle(grid).take_overs, 1);
    }
}

#[test]
fn a_transaction_that_comes_late_takes_the_volume_from_nobody() {
    for seed in 0..20 {
        let mut grid = three_hosts(seed);
        grid.crash(0, Some(Duration::from_secs(6)));
        // What the others write is still on its way when host 0 is back, and the volume goes on.
        grid.plan.late_commit = 1000;
        grid.run_for(Duration::from_secs(6));
        grid.plan.late_commit = 0;
        grid.run_for(Duration::from_secs(10));
        let host = served_by(&grid);
        grid.run_for(MINUTE);
        assert_eq!(served_by(&grid), host);
        settle(grid);
    }
}

#[test]
fn a_command_that_holds_the_volume_is_alone_with_it_during_a_hand_over() {
    for seed in 0..20 {
        let mut grid = three_hosts(seed);
        grid.command(0, 0, What::HandOver { to: 1 });
        grid.run_for(ms(seed * 17));
        // That nothing begins, and nothing is carried out, at the host that holds it is checked at every moment.
        grid.command(1, 0, What::Hold(Duration::from_secs(3)));
        grid.run_for(Duration::from_secs(6));
        assert_eq!(served_by(&grid), "h1");
        settle(grid);
    }
}

/// Host 1 can't ask host 0 to yield, and opens without; so much later than at first host 0 is to serve after all.
fn forestalled(late: u64, leaves_guard_out: bool) -> Result<(), String> {
    guarded(late, || {
        let mut grid = three_hosts(late % 10);
        grid.plan.mistakes.leaves_guard_out = leaves_guard_out;
        grid.cut_peers(0, 1, MINUTE);
        grid.command(0, 0, What::HandOver { to: 1 });
        grid.run_for(ms(3_000 + late * 5));
        grid.command(0, 0, What::Export { takeover: true });
        grid.run_for(Duration::from_secs(10));
        assert_eq!(served_by(&grid), "h0");
        settle(grid);
        Ok(())
    })
}

#[test]
fn an_opening_that_is_forestalled_deposes_nobody() {
    let found = |leaves_guard_out| (0..120).filter(|late| forestalled(*late, leaves_guard_out).is_err()).count();
    assert_eq!(found(false), 0);
    assert!(found(true) > 0, "the moment is missed");
}

#[test]
fn a_volume_whose_record_was_deleted_late_is_served_no_more() {
    for seed in 0..20 {
        let mut grid = three_hosts(seed);
        // The command gives up, and the host serves the volume again; then the transaction comes.
        grid.plan.late_commit = 1000;
        grid.command(0, 0, What::Unexport);
        grid.run_for(Duration::from_secs(1));
        grid.plan.late_commit = 0;
        grid.run_for(Duration::from_secs(10));
        assert!(grid.record(0).is_none());
        assert_eq!(grid.open_at(0), [0; 0]);
        settle(grid);
    }
}

#[test]
fn five_hundred_volumes_of_a_lost_host_are_served_by_the_others() {
    let mut grid = Grid::new(ClusterPlan::quiet(1, 3, 500), false);
    for volume in 0..500 {
        grid.set_export(volume, 0, &[0, 1, 2]);
    }
    grid.run_for(Duration::from_secs(15));
    assert!((0..500).all(|volume| grid.open_at(volume) == [0]));
    grid.crash(0, None);
    grid.run_for(SETTLED_AFTER);
    let at = |host: usize| (0..500).filter(|volume| grid.open_at(*volume) == [host]).count();
    assert_eq!(at(1) + at(2), 500);
    assert!(at(1) > 100 && at(2) > 100, "{} and {}: each takes its part", at(1), at(2));
    assert_eq!(settle(grid).take_overs, 500);
}
