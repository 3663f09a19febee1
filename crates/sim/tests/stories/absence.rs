//! Nodes that are silent, slow or gone: who is done without and when, and how what they held is made again.

use holdfast_base::{Instant, Prng, RequestToken};
use holdfast_format::ledger::AckRule;
use holdfast_sim::disk::DiskFaults;
use holdfast_sim::scenario::{Cluster, Setup};
use holdfast_sim::workload::What;
use std::time::Duration;

/// Guests that always have eight requests under way, and how long each took.
struct Press {
    prng: Prng,
    blocks: u64,
    asked: Vec<(RequestToken, Instant)>,
    took: Vec<Duration>,
}

impl Press {
    fn new(blocks: u64) -> Press {
        Press { prng: Prng::new(8), blocks, asked: Vec::new(), took: Vec::new() }
    }

    /// Keeps on until something is so, which is looked at twenty times a second. How long that was.
    fn until(&mut self, cluster: &mut Cluster, most: Duration, is_so: impl Fn(&Cluster) -> bool) -> Duration {
        let begun = cluster.now();
        let mut looked_at = begun;
        loop {
            while self.asked.len() < 8 {
                let what = if self.prng.chance(500) { What::Read } else { What::Write(0) };
                let token = cluster.ask(cluster.owner(), what, self.prng.below(self.blocks), 1);
                self.asked.push((token, cluster.now()));
            }
            let asked = &self.asked;
            cluster.until("a guest is answered", |s| asked.iter().any(|(token, _)| s.is_answered(*token)));
            let now = cluster.now();
            let took = &mut self.took;
            self.asked.retain(|(token, at)| {
                let is_answered = cluster.is_answered(*token);
                took.extend(is_answered.then(|| now.since(*at)));
                !is_answered
            });
            if now.since(looked_at) >= Duration::from_millis(50) {
                looked_at = now;
                if is_so(cluster) {
                    return now.since(begun);
                }
                assert!(now.since(begun) < most, "not so after {most:?}: {:?}", cluster.status());
            }
        }
    }

    fn go_on_for(&mut self, cluster: &mut Cluster, span: Duration) {
        let end = cluster.now() + span;
        self.until(cluster, span * 2, |s| s.now() >= end);
    }

    /// Mean and 99th percentile since this was asked last.
    fn latency(&mut self) -> (Duration, Duration) {
        let mut took = std::mem::take(&mut self.took);
        took.sort_unstable();
        (took.iter().sum::<Duration>() / took.len() as u32, took[took.len() * 99 / 100])
    }
}

/// Guests feel every shard that passes through their disks. A drain gives way to them; what one more loss would take is made
/// again all the same.
#[test]
fn what_one_more_loss_would_take_is_made_again_however_guests_press() {
    let mib = 96;
    let mut cluster = Setup::new(207)
        .nodes(6)
        .with(|plan| {
            (plan.volume_bytes, plan.segment_bytes) = (mib << 20, 512 << 10);
            (plan.disk_bytes, plan.sizing.journal_bytes) = (128 << 20, 16 << 20);
            (plan.writeback_bytes, plan.map_cache_bytes) = (4 << 20, 4 << 20);
            plan.rebuild_after = Duration::from_secs(1);
        })
        .start();
    for at in 0..mib * 2 {
        cluster.write(at * 128, 128);
    }
    for disk in cluster.world().nodes.iter_mut().flat_map(|node| &mut node.disks) {
        (disk.slowness, disk.bytes_per_second) = (20, Some(20_000_000));
    }
    let mut guests = Press::new(mib << 8);
    guests.go_on_for(&mut cluster, Duration::from_secs(5));
    let calm = guests.latency();
    cluster.drain(Some((0, 0)));
    guests.go_on_for(&mut cluster, Duration::from_secs(10));
    let drained = cluster.status().counters.shards_moved;
    assert!((20..120).contains(&drained), "{drained} shards left the device, which guests feel");
    let draining = guests.latency();
    cluster.crash_node(1);
    guests.go_on_for(&mut cluster, Duration::from_millis(1100));
    guests.latency();
    let took = guests.until(&mut cluster, Duration::from_secs(60), Cluster::is_whole);
    let rebuilt = cluster.status().counters.shards_rebuilt;
    println!(
        "mean and p99: calm {calm:?}, draining {draining:?}, making {rebuilt} again {:?}, {took:?}",
        guests.latency()
    );
    // About 60 MiB: at the rate that a drain is left with it takes 13 s.
    assert!(rebuilt > 80 && took < Duration::from_secs(7), "{rebuilt} shards were made again in {took:?}");
    cluster.drain(None);
    cluster.start_node(1);
    cluster.finish();
}

/// With as many nodes as copies none is to spare: one that is silent is done without as long as two are left, by another rule
/// of the log, and used again when it is back.
#[test]
fn a_hung_node_that_can_not_be_spared_does_not_stall_writes_for_long() {
    for (node, blocks) in [(0, 1), (1, 8), (2, 32)] {
        let mut cluster = Setup::new(162).layout("mirror:3").start();
        cluster.write(0, 32);
        cluster.world().pause_node(node);
        let start = cluster.now();
        cluster.write(32, blocks);
        let stalled = cluster.now().since(start);
        assert!(stalled < Duration::from_millis(800), "stalled for {stalled:?}");
        assert_eq!(cluster.root().open_ledger().expect("an open ledger").rule, AckRule::flat(1));
        // What was written meanwhile bears a loss.
        cluster.crash_node((node + 1) % 3);
        cluster.world().resume_node(node);
        cluster.read(0, 32 + blocks);
        cluster.start_node((node + 1) % 3);
        cluster.until("three copies again", |cluster| {
            cluster.is_whole() && cluster.root().open_ledger().is_some_and(|ledger| ledger.rule == AckRule::flat(2))
        });
        cluster.finish();
    }
}

/// Neither can one of two nodes: without it copies lie on two devices of the other, as long as it is away.
#[test]
fn a_hung_node_of_two_does_not_stall_writes_for_long() {
    for (node, layout) in [(0, "mirror:2"), (1, "mirror:2"), (1, "nested-mirror")] {
        let disks = if layout == "mirror:2" { 2 } else { 3 };
        let mut cluster = Setup::new(165).nodes(2).disks(disks).layout(layout).start();
        cluster.write(0, 32);
        cluster.world().pause_node(node);
        let start = cluster.now();
        cluster.write(32, 8);
        let stalled = cluster.now().since(start);
        assert!(stalled < Duration::from_millis(900), "{layout}: stalled for {stalled:?}");
        cluster.write(40, 8);
        cluster.world().resume_node(node);
        cluster.until("two copies again", |cluster| cluster.is_whole());
        cluster.pass_ms(50);
        cluster.crash_node(1 - node);
        cluster.read(0, 48);
        cluster.start_node(1 - node);
        cluster.finish();
    }
}

/// Where the other node has one device, what is written without a node would have one copy, or waits: a node that stands still for
/// a moment is waited for.
#[test]
fn a_node_that_stands_still_for_a_moment_is_waited_for_where_one_device_is_left_without_it() {
    for (seed, layout) in [(166, "mirror:2"), (167, "mirror:2@device")] {
        let mut cluster = Setup::new(seed).nodes(2).disks(1).layout(layout).start();
        cluster.write(0, 32);
        let rolls = cluster.status().counters.rolls;
        cluster.world().pause_node(1);
        let owner = cluster.owner();
        let token = cluster.ask(owner, What::Write(0), 32, 8);
        cluster.pass_ms(1200);
        assert!(
            !cluster.is_answered(token) && cluster.status().suspect_nodes.is_empty(),
            "{layout}: {:?}",
            cluster.status()
        );
        cluster.world().resume_node(1);
        cluster.until("the write is done", |cluster| cluster.is_answered(token));
        assert_eq!(cluster.status().counters.rolls, rolls, "{layout}");
        cluster.finish();
    }
}

/// A log that waits for its next record waits for as long as the metadata store is away.
#[test]
fn a_node_that_stands_still_for_a_moment_while_the_metadata_store_is_away_stalls_writes_for_that_moment() {
    let mut cluster = Setup::new(163).layout("mirror:3").start();
    cluster.write(0, 8);
    cluster.pass_ms(2000);
    let host = cluster.owner().host;
    cluster.world().hosts[host].meta_reachable = false;
    cluster.world().pause_node(1);
    let (start, owner) = (cluster.now(), cluster.owner());
    let token = cluster.ask(owner, What::Write(0), 8, 8);
    cluster.pass_ms(900);
    assert!(!cluster.is_answered(token), "it waits for the node");
    cluster.world().resume_node(1);
    cluster.until("the write is done", |cluster| cluster.is_answered(token));
    assert!(cluster.now().since(start) < Duration::from_millis(1200));
    cluster.write(16, 8);
    cluster.world().hosts[host].meta_reachable = true;
    cluster.finish();
}

#[test]
fn a_node_whose_disk_takes_long_for_a_write_is_waited_for_where_it_would_be_missed() {
    let mut cluster = Setup::new(164).layout("mirror:3").start();
    cluster.write(0, 8);
    cluster.world().nodes[2].disks[0].slowness = 4_000;
    let (rolls, gets) = (cluster.status().counters.rolls, cluster.world().meta.gets);
    let start = cluster.now();
    for round in 0..4 {
        cluster.write(8 + round * 8, 8);
    }
    let took = cluster.now().since(start);
    assert!(took > Duration::from_millis(2000), "the disk is not slow enough to tell: {took:?}");
    assert_eq!(cluster.status().counters.rolls, rolls, "its process is alive");
    let gets = cluster.world().meta.gets - gets;
    assert!(gets <= 4, "the metadata store was asked {gets} times about a node that answers");
    cluster.world().nodes[2].disks[0].slowness = 1;
    cluster.finish();
}

#[test]
fn a_node_that_stays_away_is_done_without() {
    // After the grace time its shards are made again on others; it may come back later with what it had, which goes.
    for layout in ["mirror:2", "parity:2+1"] {
        let setup = Setup::new(204).nodes(5).layout(layout).with(|plan| plan.rebuild_after = Duration::from_secs(5));
        let mut cluster = setup.start();
        cluster.write_segments(8);
        cluster.pass_ms(4000);
        cluster.crash_node(1);
        cluster.write(0, 8);
        cluster.pass_ms(4000);
        assert!(cluster.status().degraded_segments > 0, "{layout}: it is waited for");
        cluster.until("redundancy is whole", Cluster::is_whole);
        let counters = cluster.status().counters;
        assert!(counters.shards_rebuilt > 0);
        assert_eq!(counters.shards_made_by_nodes, counters.shards_rebuilt, "none of it went through the host");
        // Now another one may go.
        cluster.crash_node(2);
        cluster.crash_host(0);
        cluster.take_over_on(1);
        cluster.read(0, 256);
        cluster.start_node(1);
        cluster.finish();
    }
}

#[test]
fn what_nodes_can_not_make_by_themselves_the_owner_makes() {
    // One in some questions between nodes is never answered, or damage is found, or a node dies in the midst of it.
    for (seed, case) in [(2060, "cut"), (2061, "lost"), (2064, "damaged"), (2063, "crash")] {
        let mut cluster = Setup::new(seed)
            .nodes(6)
            .layout("parity:2+2")
            .with(|plan| plan.rebuild_after = Duration::from_secs(2))
            .start();
        cluster.write_segments(24);
        cluster.pass_ms(1000);
        cluster.world().asks_lost_one_in = match case {
            "cut" => 1,
            "lost" => 4,
            _ => 0,
        };
        cluster.crash_node(1);
        if case == "damaged" {
            // On one, so that no block lacks more than parity makes good: a node is lost besides.
            let faults = DiskFaults { read_error: 500, ..DiskFaults::default() };
            cluster.world().set_disk_faults(2, faults);
        }
        let some = if case == "cut" { 0 } else { 2 };
        cluster.until("shards are made again", |cluster| {
            let counters = cluster.status().counters;
            counters.shards_rebuilt > 2 && counters.shards_made_by_nodes >= some
        });
        if case == "crash" {
            cluster.crash_node(2);
            cluster.pass_ms(500);
            cluster.start_node(2);
        }
        cluster.until("redundancy is whole", Cluster::is_whole);
        let counters = cluster.status().counters;
        if case != "crash" {
            assert!(counters.shards_made_by_nodes < counters.shards_rebuilt, "{case}: {counters:?}");
        }
        cluster.world().set_disk_faults(2, DiskFaults::default());
        cluster.start_node(1);
        cluster.finish();
    }
}

#[test]
fn a_node_that_hangs_while_its_shard_is_scrubbed_is_left_and_found_again() {
    let mut cluster = Setup::new(165).with(|plan| plan.scrub_every = Duration::from_millis(500)).start();
    cluster.write_segments(8);
    cluster.pass_ms(1000);
    // The owner leaves its connection, and with it the question that was never answered.
    cluster.world().pause_node(1);
    cluster.pass_ms(3000);
    cluster.world().resume_node(1);
    let scrubbed = cluster.status().counters.shards_scrubbed;
    cluster.until("the tour goes on", |cluster| cluster.status().counters.shards_scrubbed > scrubbed + 8);
    cluster.finish();
}

/// All that is under way is gone through to tell who is late: of thousands of requests that must not become what the host does.
#[test]
fn thousands_of_reads_that_a_hung_node_owes_are_judged_at_little_cost() {
    let mut cluster = Setup::new(171).nodes(4).with(|plan| plan.read_cache_per_mille = 0).start();
    (0..512).step_by(32).for_each(|block| cluster.write(block, 32));
    cluster.pass(Duration::from_secs(10));
    cluster.world().pause_node(1);
    let (owner, before, start) = (cluster.owner(), cluster.status().counters.calls_examined, cluster.now());
    let asked: Vec<_> = (0..16_000).map(|i| cluster.ask(owner, What::Read, i % 512, 1)).collect();
    cluster.pass(Duration::from_secs(1));
    let owed = cluster.controller().calls_under_way();
    cluster.world().resume_node(1);
    cluster.until("all are answered", |s| asked.iter().all(|token| s.is_answered(*token)));
    cluster.until("it owes nothing", |s| s.controller().calls_under_way() == 0);
    let ms = cluster.now().since(start).as_millis() as u64;
    let examined = cluster.status().counters.calls_examined - before;
    println!("{owed} were owed; {examined} looks in {ms} ms");
    assert!(owed > 3000, "the node owes {owed}");
    assert!(examined / ms < 2500, "{examined} looks in {ms} ms");
    cluster.finish();
}
