//! Volumes of one host or of two beside each other, by counts of schedulers and of nodes: see `holdfast_sim::neighbours`.

use holdfast_base::Urgency;
use holdfast_format::packing::Compression;
use holdfast_host::{Kind, Mutations, PackingShare, Report, Stage};
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
    Load { volume, in_flight, bytes, reads: false, at: 0, step: 1 }
}

fn reads(volume: usize, in_flight: u64, bytes: u64) -> Load {
    Load { volume, in_flight, bytes, reads: true, at: 0, step: 1 }
}

fn forgets_class() -> Mutations {
    Mutations { turn_forgets_class: true, ..Mutations::default() }
}

/// Reads of both volumes while one has 256 under way and the other so many, of that class: by how many they are passed at
/// nodes whose disks take two operations at a time.
fn passed_beside_256(grid: Grid, homes: &[Home], in_flight: u64, class: Urgency) -> [Passed; 2] {
    let mut run = Neighbours::on(11, Grid { disk_in_flight: Some(2), isolation: None, ..grid }, homes);
    [NOISY, QUIET].into_iter().for_each(|volume| run.fill(volume));
    run.come(reads(NOISY, 256, 8 << 10));
    run.pass(Duration::from_millis(50));
    run.count_service();
    let victim = run.come(reads(QUIET, in_flight, 8 << 10));
    run.pass(Duration::from_millis(200));
    assert!(run.answered(victim) > 10, "{}", run.answered(victim));
    [(NOISY, Urgency::Normal), (QUIET, class)].map(|(volume, class)| run.service().of(id_of(volume), class))
}

#[test]
fn nodes_serve_who_has_one_read_in_flight_before_the_256_of_another_volume() {
    let homes = [home(0, ""), home(0, "")];
    let [noisy, victim] = passed_beside_256(Grid::default(), &homes, 1, Urgency::Sparse);
    assert!(noisy.mean() > 40.0, "reads wait at nodes: {noisy:?}");
    assert!(victim.reads > 50 && victim.mean() < 4.0 && victim.by_most <= 12, "{victim:?}");
    let forgets = Grid { mutations: forgets_class(), ..Grid::default() };
    let [_, victim] = passed_beside_256(forgets, &homes, 1, Urgency::Normal);
    assert!(victim.mean() > 20.0, "without its class it waits behind all: {victim:?}");
}

#[test]
fn nodes_have_hosts_take_turns() {
    let apart = Grid { reactors: 2, are_hosts: true, mutations: forgets_class(), ..Grid::default() };
    let [noisy, victim] = passed_beside_256(apart, &[home(0, ""), home(1, "")], 16, Urgency::Normal);
    assert!(noisy.mean() > 40.0, "reads wait at nodes: {noisy:?}");
    // Each of its reads waits for its own before it, and for as many of the other host.
    assert!(victim.reads > 500 && victim.mean() < 24.0, "{victim:?}");
}

#[test]
fn nodes_serve_care_last_and_it_goes_on() {
    let grid = Grid { disk_in_flight: Some(2), rebuild_after: Duration::from_secs(2), ..Grid::default() };
    let mut run = Neighbours::on(12, grid, &[home(0, "")]);
    run.fill(NOISY);
    // Too many to be sparse, and few enough that one of care would not wait long in order of arrival.
    run.come(reads(NOISY, 8, 8 << 10));
    run.count_service();
    run.world.crash_node(2, Crash::Process);
    run.pass(Duration::from_secs(6));
    let [normal, care] = [Urgency::Normal, Urgency::Care].map(|urgency| run.service().of(id_of(NOISY), urgency));
    assert!(normal.reads > 1_000 && care.reads > 20, "{normal:?} {care:?}");
    assert!(care.mean() > 1.5 * normal.mean(), "{normal:?} {care:?}");
    assert!(care.by_most <= 64, "{care:?}");
}

#[test]
fn who_has_one_read_in_flight_hardly_feels_a_rebuild() {
    let grid = Grid { disk_in_flight: Some(2), rebuild_after: Duration::from_secs(4), ..Grid::default() };
    let mut run = Neighbours::on(14, grid, &[home(0, ""), home(0, "")]);
    [NOISY, QUIET].into_iter().for_each(|volume| run.fill(volume));
    let guest = run.come(reads(QUIET, 1, 8 << 10));
    run.world.crash_node(2, Crash::Process);
    run.pass(Duration::from_secs(1));
    let answered = |run: &mut Neighbours| {
        let before = run.answered(guest);
        run.count_service();
        run.pass(Duration::from_millis(500));
        let care = [NOISY, QUIET].map(|volume| run.service().of(id_of(volume), Urgency::Care).reads);
        (run.answered(guest) - before, care[0] + care[1])
    };
    let (before, care) = answered(&mut run);
    assert_eq!(care, 0, "nothing is rebuilt yet");
    run.pass(Duration::from_millis(2_600));
    let (during, care) = answered(&mut run);
    assert!(care > 20, "{care}");
    // Of one in flight: a read takes at most half as long again.
    assert!(during * 3 >= before * 2, "{before} before, {during} while {care} reads were for the rebuild");
}

/// CPU time of packing in two seconds, of two volumes that are written all the time. A share of 20 ms a second.
fn packing_beside_writes(mutations: Mutations) -> Duration {
    let packing = PackingShare { busy_per_mille: 20, idle_per_mille: 20 };
    let grid = Grid {
        compression: Compression::Lz4,
        packing,
        mutations,
        tune: |config| {
            config.segment_payload_bytes = 256 << 10;
            config.destage_age_max = Duration::from_millis(100);
        },
        ..Grid::default()
    };
    let mut run = Neighbours::on(15, grid, &[home(0, ""), home(0, "")]);
    [NOISY, QUIET].into_iter().for_each(|volume| _ = run.come(writes(volume, 2, 8 << 10)));
    run.pass(Duration::from_secs(2));
    run.worked(0)
}

#[test]
fn packing_takes_its_share_of_cpu_and_no_more_while_guests_write() {
    // What a second gives may be saved up, and two jobs may take longer than was thought.
    let took = packing_beside_writes(Mutations::default());
    assert!((Duration::from_millis(25)..Duration::from_millis(75)).contains(&took), "{took:?}");
    let for_nothing = packing_beside_writes(Mutations { packs_for_nothing: true, ..Mutations::default() });
    assert!(for_nothing > 2 * took, "{for_nothing:?} where packing costs nothing, {took:?} else");
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
fn a_floor_is_kept_beside_256_of_others_though_volumes_are_not_isolated() {
    for reactors in [1, 2] {
        let load = |limit| {
            // One of the reactors has another noisy one.
            let homes = [home(0, ""), home(0, limit), home(reactors - 1, "")];
            let grid = Grid { reactors, disk_in_flight: Some(2), isolation: None, ..Grid::default() };
            let mut run = Neighbours::on(13, grid, &homes);
            (0..3).for_each(|volume| run.fill(volume));
            let noisy = [0, 2].map(|volume| run.come(reads(volume, 256, 8 << 10)));
            let quiet = run.come(reads(QUIET, 16, 8 << 10));
            // The window has found what it is to be.
            run.pass(Duration::from_secs(2));
            let before = (run.answered(quiet), noisy.map(|noisy| run.answered(noisy)));
            run.pass(Duration::from_secs(1));
            let quiet = run.answered(quiet) - before.0;
            let noisy = [0, 1].map(|n| run.answered(noisy[n]) - before.1[n]);
            (quiet, noisy.iter().sum::<u64>(), run.figures(NOISY).waited)
        };
        let (alike, noisy, waited) = load("");
        assert!(alike * 8 < noisy && waited == 0, "it has the share of its queue: {alike} beside {noisy}");
        let floor = alike + noisy / 8;
        let words: &'static str = format!("floor={floor}").leak();
        let (kept, noisy, waited) = load(words);
        assert!(kept * 100 >= floor * 98 && waited > 0, "{kept} of {floor} beside {noisy}, {reactors} reactors");
        assert!(noisy > kept, "others have the rest: {kept} beside {noisy}");
    }
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

/// Median of a stage of a volume's requests, in microseconds.
fn median(report: &Report, stage: Stage) -> u128 {
    report.stages.iter().find(|of| of.stage == stage).expect("each is told of").p50.as_micros()
}

/// Where reads and writes of one guest are, half of them, on nodes that this was done to.
fn stages_with(spoil: impl Fn(&mut Neighbours), in_flight: u64) -> [Report; 2] {
    let mut run = Neighbours::on(21, Grid { disk_in_flight: Some(2), ..Grid::default() }, &[home(0, "")]);
    run.fill(NOISY);
    spoil(&mut run);
    [reads(NOISY, in_flight, 8 << 10), writes(NOISY, in_flight, 8 << 10)].map(|load| {
        let guest = run.come(load);
        run.pass(Duration::from_millis(400));
        run.go(guest);
        run.stages(NOISY, if load.reads { Kind::Read } else { Kind::Write })
    })
}

const AT_NODES: [Stage; 3] = [Stage::Queue, Stage::Device, Stage::Network];

/// The stage that has most of the median, and is more than the others together.
fn most(report: &Report) -> Option<Stage> {
    let of = AT_NODES.map(|stage| median(report, stage));
    let most = (0..3).max_by_key(|at| of[*at]).expect("three");
    (2 * of[most] > of.iter().sum()).then_some(AT_NODES[most])
}

#[test]
fn what_nodes_tell_of_their_times_tells_a_slow_device_from_a_slow_way_and_a_queue() {
    let slow_disks = |run: &mut Neighbours| {
        run.world.nodes.iter_mut().flat_map(|node| &mut node.disks).for_each(|disk| disk.slowness = 20);
    };
    let slow_links = |run: &mut Neighbours| {
        (0..3).for_each(|node| run.world.net.link_mut(0, node).slow = Duration::from_millis(2));
    };
    for (of, stages) in [
        ("disks", stages_with(slow_disks, 1)),
        ("links", stages_with(slow_links, 1)),
        ("guest", stages_with(|_| {}, 64)),
    ] {
        let wanted = match of {
            "disks" => Stage::Device,
            "links" => Stage::Network,
            _ => Stage::Queue,
        };
        for report in &stages {
            assert_eq!(median(report, Stage::Nodes), 0, "{of}: all of it is told apart");
        }
        assert_eq!(most(&stages[0]), Some(wanted), "reads, {of}: {:?}", AT_NODES.map(|at| median(&stages[0], at)));
        if of != "guest" {
            assert_eq!(most(&stages[1]), Some(wanted), "writes, {of}: {:?}", AT_NODES.map(|at| median(&stages[1], at)));
        }
    }
}
