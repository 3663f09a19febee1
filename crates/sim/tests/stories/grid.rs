//! Whole grids: control planes decide what real hosts serve, from real controllers over real nodes, while clients go on: see
//! `holdfast_sim::grid`.

use holdfast_sim::cluster::{Grid, SETTLED_AFTER, What};
use holdfast_sim::grid::{GridOutcome, GridPlan, grid_of, run_grid};
use holdfast_sim::runner::{guarded, replay_command, run_seeds, twice};
use std::time::Duration;

const SEEDS: u64 = 400;

const MINUTE: Duration = Duration::from_secs(60);

#[test]
fn clients_go_on_whatever_control_planes_decide() {
    let jobs = std::thread::available_parallelism().map_or(2, |n| n.get());
    let run = |seed| twice(seed, || run_grid(&GridPlan::from_seed(seed), false));
    let (outcomes, findings) = run_seeds(0, SEEDS, jobs, false, run);
    for finding in &findings {
        eprintln!("seed {}: {}\n  replay: {} --grid", finding.seed, finding.why, replay_command(finding.seed));
    }
    assert!(findings.is_empty(), "{} of {SEEDS} seeds found something", findings.len());
    let sum = |f: fn(&GridOutcome) -> u64| outcomes.iter().map(|(_, o)| f(o)).sum::<u64>();
    for (what, count) in [
        ("requests answered", sum(|o| o.hosts.answered)),
        ("openings", sum(|o| o.hosts.openings)),
        ("sessions ended", sum(|o| o.hosts.aborts)),
        ("faults", sum(|o| o.control.faults)),
        ("hand-overs", sum(|o| o.control.handovers)),
        ("take-overs", sum(|o| o.control.take_overs)),
    ] {
        assert!(count > 20, "{count} {what} in {SEEDS} runs: the simulator has gone blind");
    }
}

/// One volume, served by host 0, which both offer, and a client that asks all the time.
fn two_hosts(seed: u64) -> Grid {
    let mut plan = GridPlan::quiet(seed, 2, 1);
    plan.hosts.clients = 1;
    let mut grid = grid_of(&plan, false);
    grid.set_export(0, 0, &[0, 1]);
    grid.run_for(Duration::from_secs(4));
    assert_eq!(grid.open_at(0), [0]);
    grid
}

fn answered(grid: &Grid) -> u64 {
    grid.of_hosts().expect("they are real").answered
}

fn settle(mut grid: Grid) -> GridOutcome {
    grid.settle().and_then(|()| grid.settle_clients()).unwrap_or_else(|why| panic!("{why}"));
    GridOutcome { control: grid.outcome, hosts: grid.of_hosts().expect("they are real") }
}

#[test]
fn a_client_goes_on_when_its_host_is_killed_and_its_lease_is_over() {
    for seed in 0..10 {
        let mut grid = two_hosts(seed);
        grid.crash(0, Some(MINUTE));
        grid.run_for(SETTLED_AFTER);
        assert_eq!(grid.open_at(0), [1]);
        let before = answered(&grid);
        grid.run_for(Duration::from_secs(2));
        assert!(answered(&grid) > before, "seed {seed}: the client waits");
        let outcome = settle(grid);
        assert_eq!((outcome.control.take_overs, outcome.hosts.openings), (1, 2));
    }
}

#[test]
fn a_hand_over_by_the_records_ends_no_session() {
    for seed in 0..10 {
        let mut grid = two_hosts(seed);
        let paths = grid.of_hosts().expect("they are real").path_changes;
        for (from, to) in [(0, 1), (1, 0), (0, 1)] {
            grid.command(from, 0, What::HandOver { to });
            grid.run_for(Duration::from_secs(3));
            assert_eq!(grid.open_at(0), [to]);
        }
        let outcome = settle(grid);
        assert_eq!((outcome.control.handovers, outcome.control.take_overs), (3, 0));
        assert_eq!(
            (outcome.hosts.aborts, outcome.hosts.path_changes),
            (0, paths),
            "seed {seed}: it had to connect again"
        );
    }
}

#[test]
fn a_hung_host_that_was_taken_over_from_answers_nothing_old() {
    for seed in 0..10 {
        let mut grid = two_hosts(seed);
        grid.hang(0, Duration::from_secs(20));
        grid.run_for(SETTLED_AFTER + Duration::from_secs(1));
        assert!(grid.open_at(0).contains(&1), "seed {seed}");
        grid.run_for(Duration::from_secs(14));
        assert_eq!(grid.open_at(0), [1], "what hung finds that it was deposed");
        assert_eq!(settle(grid).control.take_overs, 1);
    }
}

/// A seed below `seeds` finds the mistake, and nothing without it.
fn expect_found(seeds: u64, make: impl Fn(&mut GridPlan)) {
    let plan = |seed, is_made: bool| {
        let mut plan = GridPlan::from_seed(seed);
        if is_made {
            make(&mut plan);
        }
        plan
    };
    let run = |seed, is_made| guarded(seed, || run_grid(&plan(seed, is_made), false));
    let found = (0..seeds).find_map(|seed| run(seed, true).err().map(|why| (seed, why)));
    let (seed, why) = found.unwrap_or_else(|| panic!("it is not found"));
    println!("found by seed {seed}: {why}");
    run(seed, false).unwrap_or_else(|why| panic!("seed {seed} finds something without it: {why}"));
}

#[test]
fn a_take_over_from_a_host_that_is_there_is_found() {
    expect_found(SEEDS, |plan| plan.control.mutations.leaves_absence_out = true);
}

#[test]
fn transactions_without_what_they_compare_are_found() {
    expect_found(SEEDS, |plan| plan.control.mistakes.leaves_compares_out = true);
}

#[test]
fn an_opening_by_an_old_plan_is_found() {
    expect_found(SEEDS, |plan| {
        (plan.control.mistakes.carries_out_late, plan.control.mistakes.claims_whatever) = (true, true);
    });
}

#[test]
fn a_controller_that_waits_for_no_fence_is_found() {
    expect_found(SEEDS, |plan| plan.hosts.of_controllers.skip_fence = true);
}

#[test]
fn a_host_that_serves_on_however_long_it_stood_still_is_found() {
    expect_found(SEEDS, |plan| plan.hosts.mutations.never_lapses = true);
}
