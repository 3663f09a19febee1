//! Random runs of several hosts, each twice with the same trace: see `holdfast_sim::multi_host`.

use holdfast_sim::multi_host::{MultiHostOutcome, MultiHostPlan, run_multi_host};
use holdfast_sim::runner::{guarded, replay_command, run_seeds, twice};

const SEEDS: u64 = 400;

/// A plan in which nothing happens by itself.
fn quiet(seed: u64) -> MultiHostPlan {
    let mut plan = MultiHostPlan::from_seed(seed);
    (plan.crash, plan.hang, plan.cut, plan.reset, plan.slow, plan.node_hang) = (0, 0, 0, 0, 0, 0);
    (plan.jump, plan.take_over, plan.hand_over) = (0, 0, 0);
    plan.filters.clear();
    (plan.limit, plan.small_share) = (String::new(), false);
    plan
}

#[test]
fn clients_of_several_hosts_get_what_they_wrote_whatever_happens() {
    let jobs = std::thread::available_parallelism().map_or(2, |n| n.get());
    let run = |seed| twice(seed, || run_multi_host(MultiHostPlan::from_seed(seed), false));
    let (outcomes, findings) = run_seeds(0, SEEDS, jobs, false, run);
    for finding in &findings {
        eprintln!("seed {}: {}\n  replay: {} --multi-host", finding.seed, finding.why, replay_command(finding.seed));
    }
    assert!(findings.is_empty(), "{} of {SEEDS} seeds found something", findings.len());
    let sum = |f: fn(&MultiHostOutcome) -> u64| outcomes.iter().map(|(_, o)| f(o)).sum::<u64>();
    for (what, count) in [
        ("sessions ended by forwarding hosts", sum(|o| o.aborts)),
        ("openings", sum(|o| o.openings)),
        ("hand-overs", sum(|o| o.handovers)),
        ("requests in layers of a volume that went", sum(|o| o.caught)),
        ("requests that waited for their turn as their session or controller went", sum(|o| o.dropped)),
        ("requests that had their turn early since their volume went", sum(|o| o.released)),
    ] {
        assert!(count > 0, "no {what} in {SEEDS} runs: the simulator has gone blind");
    }
}

/// A session's barrier ends in a tick, and what waited behind it goes to a controller that had nothing to do.
#[test]
fn a_volume_that_becomes_due_in_a_tick_has_its_own_in_it() {
    run_multi_host(MultiHostPlan::from_seed(1_000_240), false).expect("sound");
}

/// A session waits for others' requests, and its host stands still for longer than its client waits for it. What the session was
/// asked before is too old then, although the session begins only now.
#[test]
fn what_a_session_held_before_it_began_is_as_old_as_it_is() {
    run_multi_host(MultiHostPlan::from_seed(1_000_483), false).expect("sound");
}

#[test]
fn hand_overs_alone_end_no_session() {
    let mut handovers = 0;
    for seed in 0..20 {
        let mut plan = quiet(seed);
        (plan.requests, plan.hand_over) = (300, 150);
        let clients = plan.clients as u64;
        let outcome = run_multi_host(plan, false).expect("sound");
        assert_eq!((outcome.aborts, outcome.path_changes), (0, clients), "seed {seed}: a client had to connect again");
        handovers += outcome.handovers;
    }
    assert!(handovers > 60, "{handovers} hand-overs");
}

#[test]
fn take_overs_from_owners_that_work_end_no_session() {
    let mut openings = 0;
    for seed in 0..20 {
        let mut plan = quiet(seed);
        plan.take_over = 60;
        let clients = plan.clients as u64;
        let outcome = run_multi_host(plan, false).expect("sound");
        assert_eq!((outcome.aborts, outcome.path_changes), (0, clients), "seed {seed}: a client had to connect again");
        openings += outcome.openings;
    }
    assert!(openings > 60, "{openings} openings");
}

#[test]
fn what_a_layer_holds_comes_out_before_its_volume_goes() {
    let (mut caught, mut handovers) = (0, 0);
    for seed in 0..20 {
        let mut plan = quiet(seed);
        plan.requests = 300;
        (plan.hand_over, plan.take_over) = (100, if seed % 2 == 0 { 20 } else { 0 });
        plan.filters = vec!["delay:write=5ms..400ms,share=0.5".to_string(), "delay:all=0ms..5ms".to_string()];
        let clients = plan.clients as u64;
        let outcome = run_multi_host(plan, false).expect("sound");
        assert_eq!((outcome.aborts, outcome.path_changes), (0, clients), "seed {seed}: a client had to connect again");
        caught += outcome.caught;
        handovers += outcome.handovers;
    }
    assert!(caught > 100 && handovers > 60, "{caught} requests caught, {handovers} hand-overs");
}

/// What waits by a limit is of a volume that is handed over, of one that is taken over, and of sessions that end.
#[test]
fn what_waits_for_its_turn_goes_with_its_volume_and_is_dropped_with_its_session() {
    let (mut dropped, mut released, mut path_changes) = (0, 0, 0);
    for seed in 0..30 {
        let mut plan = quiet(seed);
        plan.requests = 200;
        plan.limit = "iops=40,burst=1ms".to_string();
        plan.small_share = seed % 2 == 0;
        match seed % 3 {
            0 => plan.hand_over = 100,
            1 => plan.take_over = 30,
            _ => (plan.jump, plan.reset) = (60, 20),
        }
        let is_left = plan.jump > 0;
        let clients = plan.clients as u64;
        let outcome = run_multi_host(plan, false).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
        if is_left {
            path_changes += outcome.path_changes;
        } else {
            assert_eq!(
                (outcome.aborts, outcome.path_changes),
                (0, clients),
                "seed {seed}: a client had to connect again"
            );
        }
        (dropped, released) = (dropped + outcome.dropped, released + outcome.released);
    }
    assert!(dropped > 50 && released > 50, "{dropped} dropped, {released} released");
    assert!(path_changes > 100, "{path_changes} changes of paths");
}

#[test]
fn clients_that_go_elsewhere_come_behind_what_a_layer_holds() {
    let mut path_changes = 0;
    for seed in 0..20 {
        let mut plan = quiet(seed);
        (plan.jump, plan.reset) = (60, 20);
        plan.filters = vec!["delay:write=20ms..3s,share=0.1".to_string()];
        path_changes += run_multi_host(plan, false).expect("sound").path_changes;
    }
    assert!(path_changes > 200, "{path_changes} changes of paths");
}

#[test]
fn a_host_whose_layers_outlive_their_controller_is_found() {
    let plan = |seed, keeps_layers| {
        let mut plan = quiet(seed);
        (plan.jump, plan.take_over, plan.hand_over) = (60, 10, 60);
        plan.filters = vec!["delay:write=20ms..3s,share=0.1".to_string()];
        plan.mutations.keeps_filters = keeps_layers;
        plan
    };
    let run = |seed, keeps_layers| guarded(seed, || run_multi_host(plan(seed, keeps_layers), false));
    expect_found(60, run);
}

#[test]
fn a_map_that_was_read_too_early_is_found() {
    let plan = |seed, fits_anything| {
        let mut plan = quiet(seed);
        (plan.requests, plan.hand_over) = (600, 60);
        plan.of_controllers.preload_fits_anything = fits_anything;
        plan
    };
    let run = |seed, fits_anything| guarded(seed, || run_multi_host(plan(seed, fits_anything), false));
    expect_found(1_000, run);
}

/// A seed below `seeds` finds the mistake, and nothing without it.
fn expect_found(seeds: u64, run: impl Fn(u64, bool) -> Result<MultiHostOutcome, String>) {
    let found = (0..seeds).find_map(|seed| run(seed, true).err().map(|why| (seed, why)));
    let (seed, why) = found.unwrap_or_else(|| panic!("it is not found"));
    println!("found by seed {seed}: {why}");
    run(seed, false).unwrap_or_else(|why| panic!("seed {seed} finds something without it: {why}"));
}

/// Clients take turns, and now and then one comes between; nobody ever errs but by being refused to write.
fn contending(seed: u64) -> MultiHostPlan {
    let mut plan = quiet(seed);
    (plan.clients, plan.requests, plan.contend) = (3, 400, Some(20));
    plan
}

#[test]
fn of_clients_that_contend_one_writes_at_a_time() {
    let (mut refused, mut passed_on, mut handovers, mut path_changes) = (0, 0, 0, 0);
    for seed in 0..60 {
        let mut plan = contending(seed);
        match seed % 4 {
            0 => {}
            1 => plan.hand_over = 40,
            2 => (plan.jump, plan.reset) = (30, 30),
            _ => (plan.take_over, plan.node_hang) = (10, 30),
        }
        let outcome = run_multi_host(plan, false).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
        refused += outcome.refused;
        passed_on += outcome.passed_on;
        handovers += outcome.handovers;
        path_changes += outcome.path_changes;
    }
    for (what, count) in [("refused", refused), ("passed on", passed_on), ("hand-overs", handovers)] {
        assert!(count > 50, "{count} {what}: nobody contends");
    }
    assert!(path_changes > 300, "{path_changes} changes of paths");
}

#[test]
fn hosts_that_let_a_second_writer_in_are_found() {
    let found = (0..20).filter(|seed| {
        let mut plan = contending(*seed);
        plan.mutations.lets_second_in = true;
        run_multi_host(plan, false).is_err()
    });
    assert!(found.count() > 10, "two clients write, and nobody notices");
}
