//! Volumes of one host or of two beside each other, by counts of schedulers and of nodes: see `holdfast_sim::neighbours`.

use holdfast_base::Urgency;
use holdfast_sim::disk::Crash;
use holdfast_sim::neighbours::{Grid, Home, Load, Neighbours, id_of};
use holdfast_sim::service::Passed;
use std::time::Duration;

const NOISY: usize = 0;
const QUIET: usize = 1;

fn home(reactor: usize, limit: &'static str) -> Home {
    Home { reactor, limit }
}

fn writes(volume: usize, in_flight: u64, bytes: u64) -> Load {
    Load { volume, in_flight, bytes, reads: false }
}

fn reads(volume: usize, in_flight: u64, bytes: u64) -> Load {
    Load { volume, in_flight, bytes, reads: true }
}

/// Reads of both volumes while one has 256 under way and the other this: by how many they are passed at nodes whose disks
/// take two operations at a time.
fn passed_beside_256(grid: Grid, homes: &[Home], in_flight: u64) -> [Passed; 2] {
    let mut run = Neighbours::on(11, Grid { disk_in_flight: Some(2), isolation: None, ..grid }, homes);
    [NOISY, QUIET].into_iter().for_each(|volume| run.fill(volume));
    run.come(reads(NOISY, 256, 8 << 10));
    run.pass(Duration::from_millis(50));
    run.count_service();
    let victim = run.come(reads(QUIET, in_flight, 8 << 10));
    run.pass(Duration::from_millis(200));
    assert!(run.answered(victim) > 10, "{}", run.answered(victim));
    [NOISY, QUIET].map(|volume| run.service().of_volume(id_of(volume)))
}

#[test]
fn nodes_serve_who_has_one_read_in_flight_before_the_256_of_another_volume() {
    let homes = [home(0, ""), home(0, "")];
    let [noisy, victim] = passed_beside_256(Grid::default(), &homes, 1);
    assert!(noisy.mean() > 40.0, "reads wait at nodes: {noisy:?}");
    assert!(victim.reads > 50 && victim.mean() < 4.0 && victim.by_most <= 12, "{victim:?}");
    let forgets = Grid { forgets_class: true, ..Grid::default() };
    let [_, victim] = passed_beside_256(forgets, &homes, 1);
    assert!(victim.mean() > 20.0, "without its class it waits behind all: {victim:?}");
}

#[test]
fn nodes_have_hosts_take_turns() {
    let apart = Grid { reactors: 2, are_hosts: true, forgets_class: true, ..Grid::default() };
    let [noisy, victim] = passed_beside_256(apart, &[home(0, ""), home(1, "")], 16);
    assert!(noisy.mean() > 40.0, "reads wait at nodes: {noisy:?}");
    // Each of its reads waits for its own before it, and for as many of the other host.
    assert!(victim.reads > 500 && victim.mean() < 24.0, "{victim:?}");
}

#[test]
fn nodes_serve_care_last_and_it_goes_on() {
    let grid = Grid { disk_in_flight: Some(2), rebuild_after: Duration::from_secs(2), ..Grid::default() };
    let mut run = Neighbours::on(12, grid, &[home(0, "")]);
    run.fill(NOISY);
    run.come(reads(NOISY, 64, 8 << 10));
    run.count_service();
    run.world.crash_node(2, Crash::Process);
    run.pass(Duration::from_secs(10));
    let [normal, care] = [Urgency::Normal, Urgency::Care].map(|urgency| run.service().of(id_of(NOISY), urgency));
    assert!(normal.reads > 1_000 && care.reads > 20, "{normal:?} {care:?}");
    assert!(care.mean() > normal.mean(), "{normal:?} {care:?}");
}

#[test]
fn who_has_one_request_in_flight_waits_for_nobody_beside_256() {
    let mut run = Neighbours::new(1, 1, &[home(0, ""), home(0, "")]);
    let noisy = run.come(writes(NOISY, 256, 8 << 10));
    run.pass(Duration::from_millis(50));
    let alone = run.figures(NOISY);
    assert_eq!(alone.waited, 0, "who is alone has no window: {alone:?}");
    let victim = run.come(writes(QUIET, 1, 8 << 10));
    run.pass(Duration::from_millis(300));
    let (of_noisy, of_victim) = (run.figures(NOISY), run.figures(QUIET));
    assert!(run.answered(victim) > 50 && run.answered(noisy) > 1_000, "both go on");
    assert!(of_noisy.waited * 2 > of_noisy.went - alone.went, "there is a window: {of_noisy:?}");
    assert!(of_victim.waited * 20 <= of_victim.went, "one of twenty waits at most: {of_victim:?}");
}

#[test]
fn a_limit_is_of_all_sessions_of_a_volume_and_only_of_that() {
    let mut run = Neighbours::new(2, 1, &[home(0, "iops=200,burst=1ms"), home(0, "")]);
    for _ in 0..2 {
        run.come(writes(NOISY, 16, 4 << 10));
    }
    let other = run.come(writes(QUIET, 1, 4 << 10));
    run.pass(Duration::from_secs(3));
    let figures = run.figures(NOISY);
    assert!((590..=602).contains(&figures.went), "{figures:?}");
    assert!(figures.held_by_limit * 100 > figures.went * 95 && figures.waiting >= 31, "{figures:?}");
    let other = (run.answered(other), run.figures(QUIET).waited);
    assert!(other.0 > 600 && other.1 * 20 <= other.0, "{other:?}");
}

#[test]
fn what_a_guest_had_waiting_is_dropped_as_it_goes() {
    let mut run = Neighbours::new(3, 1, &[home(0, "iops=10,burst=1ms"), home(0, "")]);
    let (goes, stays) = (run.come(writes(NOISY, 40, 4 << 10)), run.come(writes(NOISY, 2, 4 << 10)));
    run.pass(Duration::from_secs(1));
    assert!(run.figures(NOISY).waiting > 30 && run.answered(stays) == 0, "{:?}", run.figures(NOISY));
    run.go(goes);
    assert_eq!(run.figures(NOISY).waiting, 2);
    run.pass(Duration::from_secs(1));
    assert!(run.answered(stays) >= 9, "it comes behind nobody: {}", run.answered(stays));
}

#[test]
fn without_isolation_limits_are_kept_and_nobody_waits_for_others() {
    let homes = [home(0, ""), home(0, "iops=200,burst=1ms"), home(1, "")];
    let mut run = Neighbours::isolated(6, 2, &homes, None);
    for load in [writes(0, 128, 8 << 10), writes(1, 8, 4 << 10), writes(2, 1, 8 << 10)] {
        run.come(load);
    }
    run.pass(Duration::from_millis(300));
    let figures = [0, 1, 2].map(|volume| run.figures(volume));
    assert_eq!([figures[0].waited, figures[2].waited], [0, 0], "{figures:?}");
    assert!((58..=62).contains(&figures[1].went) && figures[1].held_by_limit > 50, "{figures:?}");
    assert_eq!((run.sums, run.shares), (0, 0), "there is no window to share");
}

#[test]
fn the_least_weight_waits_a_second_at_most() {
    let limits = ["iops=1000000,weight=1", "iops=1000000,weight=1000", "iops=1000000,weight=1000"];
    let mut run = Neighbours::new(4, 1, &limits.map(|limit| home(0, limit)));
    run.give_least_share();
    run.come(writes(0, 1, 256 << 10));
    for volume in 1..3 {
        run.come(writes(volume, 64, 4 << 10));
    }
    run.pass(Duration::from_secs(3));
    let (least, others) = (run.figures(0), [run.figures(1), run.figures(2)]);
    let waits = Duration::from_millis(900)..=Duration::from_secs(1);
    assert!(
        least.waited > 1 && waits.contains(&least.waited_max),
        "its weight alone would have it wait for longer: {least:?}"
    );
    assert!(others.iter().all(|other| other.went > 10 * least.went), "weights count: {least:?} {others:?}");
}

#[test]
fn reactors_share_the_window_and_rest_is_quiet() {
    let mut run = Neighbours::new(5, 2, &[home(0, ""), home(1, "")]);
    let guests = [run.come(writes(0, 128, 8 << 10)), run.come(writes(1, 128, 8 << 10))];
    run.pass(Duration::from_secs(1));
    assert!(run.sums >= 8 && run.shares >= 8, "{} sums, {} shares", run.sums, run.shares);
    let figures = [run.figures(0), run.figures(1)];
    assert!(figures.iter().all(|of| of.waited > 100), "each has a share of one window: {figures:?}");
    assert!(guests.iter().all(|guest| run.answered(*guest) > 200));
    run.rest();
    run.pass(Duration::from_secs(2));
    let (sums, shares) = (run.sums, run.shares);
    run.pass(Duration::from_secs(5));
    assert_eq!((run.sums, run.shares), (sums, shares), "who rests tells nothing");
}
