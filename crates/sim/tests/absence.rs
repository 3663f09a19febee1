//! Nodes that are silent, slow or gone: who is done without and when, and how what they held is made again.

use holdfast_format::ledger::AckRule;
use holdfast_sim::disk::DiskFaults;
use holdfast_sim::stage::{Scenery, Stage};
use holdfast_sim::workload::What;
use std::time::Duration;

/// With as many nodes as copies none is to spare: one that is silent is done without as long as two are left, by another rule
/// of the log, and used again when it is back.
#[test]
fn a_hung_node_that_can_not_be_spared_does_not_stall_writes_for_long() {
    for (node, blocks) in [(0, 1), (1, 8), (2, 32)] {
        let mut stage = Scenery::new(162).layout("mirror:3").raise();
        stage.write(0, 32);
        stage.world().pause_node(node);
        let start = stage.now();
        stage.write(32, blocks);
        let stalled = stage.now().since(start);
        assert!(stalled < Duration::from_millis(800), "stalled for {stalled:?}");
        assert_eq!(stage.root().open_ledger().expect("an open ledger").rule, AckRule::flat(1));
        // What was written meanwhile bears a loss.
        stage.crash_node((node + 1) % 3);
        stage.world().resume_node(node);
        stage.read(0, 32 + blocks);
        stage.start_node((node + 1) % 3);
        stage.until("three copies again", |stage| {
            stage.is_whole() && stage.root().open_ledger().is_some_and(|ledger| ledger.rule == AckRule::flat(2))
        });
        stage.finish();
    }
}

/// Neither can one of two nodes: without it copies lie on two devices of the other, as long as it is away.
#[test]
fn a_hung_node_of_two_does_not_stall_writes_for_long() {
    for (node, layout) in [(0, "mirror:2"), (1, "mirror:2"), (1, "nested-mirror")] {
        let disks = if layout == "mirror:2" { 2 } else { 3 };
        let mut stage = Scenery::new(165).nodes(2).disks(disks).layout(layout).raise();
        stage.write(0, 32);
        stage.world().pause_node(node);
        let start = stage.now();
        stage.write(32, 8);
        let stalled = stage.now().since(start);
        assert!(stalled < Duration::from_millis(900), "{layout}: stalled for {stalled:?}");
        stage.write(40, 8);
        stage.world().resume_node(node);
        stage.until("two copies again", |stage| stage.is_whole());
        stage.pass_ms(50);
        stage.crash_node(1 - node);
        stage.read(0, 48);
        stage.start_node(1 - node);
        stage.finish();
    }
}

/// Where the other node has one device, what is written without a node would have one copy, or waits: a node that stands still for
/// a moment is waited for.
#[test]
fn a_node_that_stands_still_for_a_moment_is_waited_for_where_one_device_is_left_without_it() {
    for (seed, layout) in [(166, "mirror:2"), (167, "mirror:2@device")] {
        let mut stage = Scenery::new(seed).nodes(2).disks(1).layout(layout).raise();
        stage.write(0, 32);
        let rolls = stage.status().counters.rolls;
        stage.world().pause_node(1);
        let owner = stage.owner();
        let token = stage.ask(owner, What::Write(0), 32, 8);
        stage.pass_ms(1200);
        assert!(!stage.is_answered(token) && stage.status().suspect_nodes.is_empty(), "{layout}: {:?}", stage.status());
        stage.world().resume_node(1);
        stage.until("the write is done", |stage| stage.is_answered(token));
        assert_eq!(stage.status().counters.rolls, rolls, "{layout}");
        stage.finish();
    }
}

/// A log that waits for its next record waits for as long as the metadata store is away.
#[test]
fn a_node_that_stands_still_for_a_moment_while_the_metadata_store_is_away_stalls_writes_for_that_moment() {
    let mut stage = Scenery::new(163).layout("mirror:3").raise();
    stage.write(0, 8);
    stage.pass_ms(2000);
    let host = stage.owner().host;
    stage.world().hosts[host].meta_reachable = false;
    stage.world().pause_node(1);
    let (start, owner) = (stage.now(), stage.owner());
    let token = stage.ask(owner, What::Write(0), 8, 8);
    stage.pass_ms(900);
    assert!(!stage.is_answered(token), "it waits for the node");
    stage.world().resume_node(1);
    stage.until("the write is done", |stage| stage.is_answered(token));
    assert!(stage.now().since(start) < Duration::from_millis(1200));
    stage.write(16, 8);
    stage.world().hosts[host].meta_reachable = true;
    stage.finish();
}

#[test]
fn a_node_whose_disk_takes_long_for_a_write_is_waited_for_where_it_would_be_missed() {
    let mut stage = Scenery::new(164).layout("mirror:3").raise();
    stage.write(0, 8);
    stage.world().nodes[2].disks[0].slowness = 4_000;
    let (rolls, gets) = (stage.status().counters.rolls, stage.world().meta.gets);
    let start = stage.now();
    for round in 0..4 {
        stage.write(8 + round * 8, 8);
    }
    let took = stage.now().since(start);
    assert!(took > Duration::from_millis(2000), "the disk is not slow enough to tell: {took:?}");
    assert_eq!(stage.status().counters.rolls, rolls, "its process is alive");
    let gets = stage.world().meta.gets - gets;
    assert!(gets <= 4, "the metadata store was asked {gets} times about a node that answers");
    stage.world().nodes[2].disks[0].slowness = 1;
    stage.finish();
}

#[test]
fn a_node_that_stays_away_is_done_without() {
    // After the grace time its shards are made again on others; it may come back later with what it had, which goes.
    for layout in ["mirror:2", "parity:2+1"] {
        let scenery =
            Scenery::new(204).nodes(5).layout(layout).with(|plan| plan.rebuild_after = Duration::from_secs(5));
        let mut stage = scenery.raise();
        stage.write_segments(8);
        stage.pass_ms(4000);
        stage.crash_node(1);
        stage.write(0, 8);
        stage.pass_ms(4000);
        assert!(stage.status().degraded_segments > 0, "{layout}: it is waited for");
        stage.until("redundancy is whole", Stage::is_whole);
        let counters = stage.status().counters;
        assert!(counters.shards_rebuilt > 0);
        assert_eq!(counters.shards_made_by_nodes, counters.shards_rebuilt, "none of it went through the host");
        // Now another one may go.
        stage.crash_node(2);
        stage.crash_host(0);
        stage.take_over_on(1);
        stage.read(0, 256);
        stage.start_node(1);
        stage.finish();
    }
}

#[test]
fn what_nodes_can_not_make_by_themselves_the_owner_makes() {
    // One in some questions between nodes is never answered, or damage is found, or a node dies in the midst of it.
    for (seed, case) in [(2060, "cut"), (2061, "lost"), (2062, "damaged"), (2063, "crash")] {
        let mut stage = Scenery::new(seed)
            .nodes(6)
            .layout("parity:2+2")
            .with(|plan| plan.rebuild_after = Duration::from_secs(2))
            .raise();
        stage.write_segments(24);
        stage.pass_ms(1000);
        stage.world().asks_lost_one_in = match case {
            "cut" => 1,
            "lost" => 4,
            _ => 0,
        };
        stage.crash_node(1);
        if case == "damaged" {
            let faults = DiskFaults { read_error: 500, ..DiskFaults::default() };
            stage.world().set_disk_faults(2, faults);
        }
        let some = if case == "cut" { 0 } else { 2 };
        stage.until("shards are made again", |stage| {
            let counters = stage.status().counters;
            counters.shards_rebuilt > 2 && counters.shards_made_by_nodes >= some
        });
        if case == "crash" {
            stage.crash_node(2);
            stage.pass_ms(500);
            stage.start_node(2);
        }
        stage.until("redundancy is whole", Stage::is_whole);
        let counters = stage.status().counters;
        if case != "crash" {
            assert!(counters.shards_made_by_nodes < counters.shards_rebuilt, "{case}: {counters:?}");
        }
        stage.world().set_disk_faults(2, DiskFaults::default());
        stage.start_node(1);
        stage.finish();
    }
}

#[test]
fn a_node_that_hangs_while_its_shard_is_scrubbed_is_left_and_found_again() {
    let mut stage = Scenery::new(165).with(|plan| plan.scrub_every = Duration::from_millis(500)).raise();
    stage.write_segments(8);
    stage.pass_ms(1000);
    // The owner leaves its connection, and with it the question that was never answered.
    stage.world().pause_node(1);
    stage.pass_ms(3000);
    stage.world().resume_node(1);
    let scrubbed = stage.status().counters.shards_scrubbed;
    stage.until("the tour goes on", |stage| stage.status().counters.shards_scrubbed > scrubbed + 8);
    stage.finish();
}
