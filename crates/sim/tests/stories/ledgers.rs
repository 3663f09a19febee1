//! The ledger protocol over real nodes, before any controller: committed is never lost.

use holdfast_sim::disk::Crash;
use holdfast_sim::faults::Weights;
use holdfast_sim::ledger_run::{LedgerPlan, LedgerRun, run_ledgers};
use holdfast_sim::runner::{run_seeds, twice};
use std::time::Duration;

/// Three nodes of one disk, two hosts, no faults but those that the test makes.
fn quiet_plan(seed: u64) -> LedgerPlan {
    let mut plan = LedgerPlan::from_seed(seed);
    plan.failures = 1;
    plan.nodes = 3;
    plan.disks = 1;
    plan.appends = 0;
    plan.weights = Weights::default();
    plan
}

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

#[test]
fn an_entry_survives_the_loss_of_either_leg() {
    for node in 0..3 {
        let mut run = LedgerRun::new(quiet_plan(1), false);
        run.append_and_wait(20);
        run.world.crash_node(node, Crash::Power);
        run.reopen(1);
        run.append_and_wait(5);
        run.finish().expect("one node of three is enough to lose");
    }
}

#[test]
fn an_entry_survives_the_power_loss_of_the_whole_grid_at_any_moment() {
    for step in 0..40 {
        let mut run = LedgerRun::new(quiet_plan(step), false);
        run.append_and_wait(3);
        run.append_some(12);
        run.pass(Duration::from_micros(20 * step));
        for node in 0..3 {
            run.world.crash_node(node, Crash::Power);
        }
        run.pass(ms(5));
        for node in 0..3 {
            run.world.start_node(node);
        }
        run.reopen(1);
        run.append_and_wait(3);
        run.finish().expect("durable is durable");
    }
}

#[test]
fn a_fenced_owner_that_goes_on_sending_commits_nothing() {
    let mut run = LedgerRun::new(quiet_plan(3), false);
    run.append_and_wait(10);
    run.world.pause_host(0);
    run.append_some(6);
    run.reopen(1);
    run.append_and_wait(10);
    run.world.resume_host(0);
    run.pass(ms(200));
    run.append_and_wait(10);
    run.finish().expect("the old owner's entries are refused");
}

#[test]
fn a_leg_that_hangs_is_hedged_by_the_standby() {
    let mut run = LedgerRun::new(quiet_plan(4), false);
    run.append_and_wait(5);
    run.world.pause_node(0);
    let start = run.world.now();
    run.append_and_wait(1);
    assert!(run.world.now().since(start) < ms(40), "stalled for {:?}", run.world.now().since(start));
    run.world.resume_node(0);
    run.append_and_wait(5);
    run.finish().expect("a late leg does no harm");
}

#[test]
fn two_nodes_that_restart_one_after_the_other_lose_nothing() {
    let mut run = LedgerRun::new(quiet_plan(5), false);
    run.append_and_wait(8);
    for node in [0, 1] {
        run.world.crash_node(node, Crash::Process);
        run.append_and_wait(4);
        run.world.start_node(node);
        run.pass(ms(60));
    }
    run.reopen(1);
    run.append_and_wait(4);
    run.finish().expect("each was missing alone");
}

#[test]
fn a_blank_disk_proves_nothing() {
    let mut run = LedgerRun::new(quiet_plan(6), false);
    run.append_and_wait(12);
    run.world.crash_node(0, Crash::Process);
    run.world.format_disk(0, 0);
    run.world.start_node(0);
    run.reopen(1);
    run.append_and_wait(4);
    run.finish().expect("the other leg has everything");
}

#[test]
fn random_runs_lose_nothing_that_was_committed() {
    let seeds = std::env::var("HOLDFAST_SIM_SEEDS").ok().and_then(|s| s.parse().ok()).unwrap_or(300);
    let jobs = std::thread::available_parallelism().map_or(2, |n| n.get());
    let run = |seed| twice(seed, || run_ledgers(LedgerPlan::from_seed(seed), false));
    let (outcomes, findings) = run_seeds(0, seeds, jobs, false, run);
    assert!(findings.is_empty(), "{findings:#?}");
    let committed: u64 = outcomes.iter().map(|(_, o)| o.committed).sum();
    let openings: u32 = outcomes.iter().map(|(_, o)| o.openings).sum();
    assert!(committed > 10 * seeds && u64::from(openings) > seeds, "{committed} committed, {openings} openings");
}

/// The judge itself is put to the test: what breaks a rule must be found.
#[test]
fn broken_rules_are_found() {
    type Breaks = fn(&mut LedgerPlan);
    let broken: [(&str, Breaks); 4] = [
        ("appends below the promise are accepted", |p| p.mutations.skip_fence_check = true),
        ("entries are acknowledged before they are durable", |p| p.mutations.ack_before_durable = true),
        ("promises are not persisted", |p| p.mutations.promise_not_persisted = true),
        ("absent legs count as lacking", |p| p.trust_absent_legs = true),
    ];
    for (what, break_it) in broken {
        let run = |seed| {
            let mut plan = LedgerPlan::from_seed(seed);
            break_it(&mut plan);
            twice(seed, || run_ledgers(plan.clone(), false))
        };
        let (_, findings) = run_seeds(0, 1000, 2, true, run);
        let finding = findings.first().unwrap_or_else(|| panic!("{what}: not found"));
        println!("{what}: found by seed {}: {}", finding.seed, finding.why);
    }
}
