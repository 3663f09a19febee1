//! Stories of layouts over devices: redundancy inside one node, and the way from one node to many and back.
//!
//! As in `scenarios`, every story ends with `finish`, which heals, reads everything back and judges it.

use holdfast_format::wire::DeviceHealth;
use holdfast_sim::scenario::{Cluster, Setup};
use std::time::Duration;

const OVER_DEVICES: [(&str, usize); 4] =
    [("mirror:2@device", 2), ("mirror:3@device", 3), ("parity:2+1@device", 4), ("parity:4+2@device", 7)];

fn start(seed: u64, layout: &str, nodes: usize, disks: usize) -> Cluster {
    let mut cluster = Setup::new(seed).layout(layout).nodes(nodes).disks(disks).start();
    cluster.write_segments(12);
    cluster.write(300, 40);
    cluster.until("everything is whole", Cluster::is_whole);
    cluster
}

#[test]
fn a_device_of_one_node_is_lost_and_everything_goes_on() {
    for (i, (layout, disks)) in OVER_DEVICES.into_iter().enumerate() {
        for (lost, other) in [(0, 1), (1, 0)] {
            let mut cluster = start(2400 + 2 * i as u64 + lost as u64, layout, 1, disks);
            cluster.lose_disk(0, lost);
            cluster.read(0, 512);
            for block in (0..512).step_by(8) {
                cluster.write(block, 3);
            }
            cluster.pass(Duration::from_secs(3));
            cluster.read(0, 512);
            cluster.swap_disk(0, lost);
            cluster.until("everything is whole again", Cluster::is_whole);
            // The other way round, by what was made again.
            cluster.lose_disk(0, other);
            cluster.read(0, 512);
            cluster.write(5, 9);
            cluster.swap_disk(0, other);
            cluster.until("everything is whole again", Cluster::is_whole);
            cluster.finish();
        }
    }
}

#[test]
fn what_was_acknowledged_outlives_owner_and_device_at_once() {
    for (i, (layout, disks)) in OVER_DEVICES.into_iter().enumerate() {
        for lost in 0..disks.min(3) {
            let seed = 2420 + 3 * i as u64 + lost as u64;
            let setup = Setup::new(seed).layout(layout).nodes(1).disks(disks);
            let mut cluster = setup.with(|plan| plan.destage_age = Duration::from_secs(60)).start();
            for block in (0..256).step_by(8) {
                cluster.write(block, 5);
            }
            // All of it lies in the log alone.
            cluster.crash_host(0);
            cluster.lose_disk(0, lost);
            cluster.take_over_on(1);
            cluster.read(0, 256);
            cluster.write(3, 9);
            cluster.swap_disk(0, lost);
            cluster.start_host(0);
            cluster.finish();
        }
    }
}

#[test]
fn a_lost_device_is_made_again_on_the_others_of_the_node() {
    let setup = Setup::new(2440).layout("parity:2+1@device").nodes(1).disks(4);
    let mut cluster = setup.with(|plan| plan.rebuild_after = Duration::from_secs(1)).start();
    cluster.write_segments(20);
    cluster.until("everything is whole", Cluster::is_whole);
    let before = cluster.held_by(0);
    cluster.lose_disk(0, 1);
    cluster.write_segments(4);
    cluster.until("everything is whole again", Cluster::is_whole);
    // But for one segment that may be dead since what it held was overwritten; a quarter was lost.
    assert!(cluster.held_by(0) + 3 >= before, "the node holds as much as before, on three devices");
    // It bears the same once more.
    cluster.lose_disk(0, 2);
    cluster.read(0, 512);
    cluster.swap_disk(0, 1);
    cluster.finish();
}

#[test]
fn what_the_last_device_took_is_copied_as_soon_as_there_is_a_second_one() {
    let mut cluster = start(2450, "mirror:2@device", 1, 2);
    cluster.lose_disk(0, 1);
    for block in (0..512).step_by(8) {
        cluster.write(block, 5);
    }
    cluster.until("the loss shows", |s| s.status().at_risk_entries > 0);
    cluster.pass(Duration::from_secs(3));
    cluster.swap_disk(0, 1);
    cluster.until("everything is whole again", Cluster::is_whole);
    cluster.lose_disk(0, 0);
    cluster.crash_host(0);
    cluster.take_over_on(1);
    cluster.read(0, 512);
    cluster.swap_disk(0, 0);
    cluster.start_host(0);
    cluster.finish();
}

#[test]
fn what_the_last_of_three_devices_took_is_copied_as_soon_as_there_is_a_second_one() {
    for (i, layout) in ["parity:2+1@device", "mirror:3@device"].into_iter().enumerate() {
        let mut cluster = start(2455 + i as u64, layout, 1, 3);
        if layout == "parity:2+1@device" {
            // It bears one loss: the second comes when the first is made up for.
            cluster.lose_disk(0, 1);
            cluster.pass(Duration::from_secs(3));
            cluster.until("what is left is in two copies", |s| s.status().at_risk_entries == 0);
            cluster.pass(Duration::from_secs(60));
        } else {
            cluster.lose_disk(0, 1);
        }
        cluster.lose_disk(0, 2);
        for block in (0..512).step_by(8) {
            cluster.write(block, 8);
        }
        cluster.pass(Duration::from_secs(5));
        cluster.swap_disk(0, 1);
        cluster.pass(Duration::from_secs(20));
        cluster.lose_disk(0, 0);
        cluster.read(0, 512);
        cluster.swap_disk(0, 0);
        cluster.swap_disk(0, 2);
        cluster.until("everything is whole again", Cluster::is_whole);
        cluster.finish();
    }
}

#[test]
fn while_the_only_node_is_away_everything_waits_and_then_goes_on() {
    for (i, (layout, disks)) in OVER_DEVICES.into_iter().enumerate() {
        let mut cluster = start(2460 + i as u64, layout, 1, disks);
        cluster.crash_node(0);
        let owner = cluster.owner();
        let token = cluster.ask(owner, holdfast_sim::workload::What::Write(0), 7, 9);
        cluster.pass_ms(500);
        cluster.start_node(0);
        cluster.until("the write is answered", |s| s.is_answered(token));
        cluster.power_loss();
        cluster.until("everything is whole again", Cluster::is_whole);
        cluster.finish();
    }
}

#[test]
fn a_device_that_hangs_is_written_around_where_there_are_others() {
    for slot in 0..4 {
        let mut cluster = start(2470 + slot as u64, "mirror:2@device", 1, 4);
        cluster.write_around(0, slot);
        cluster.finish();
    }
}

#[test]
fn over_several_nodes_shards_are_spread_and_a_node_may_be_lost_as_well() {
    // Two of six shards, and two of five legs, lie on each.
    let mut cluster = start(2480, "parity:4+2@device", 3, 2);
    for node in 0..3 {
        cluster.crash_node(node);
        cluster.read(0, 512);
        cluster.write(9, 30);
        cluster.start_node(node);
        cluster.until("everything is whole again", Cluster::is_whole);
    }
    cluster.finish();
}

#[test]
fn a_device_is_drained_with_the_log_on_it() {
    let mut cluster = start(2490, "mirror:2@device", 1, 3);
    for slot in [0, 2, 1] {
        cluster.drain(Some((0, slot)));
        cluster.until("nothing is left there", |s| {
            let left = s.status().left_to_drain;
            !left.is_empty() && left.iter().all(|(_, left)| *left == 0)
        });
        cluster.write(8, 40);
        cluster.drain(None);
    }
    cluster.finish();
}

/// Everything on the disk fails for a while, and then nothing does.
fn glitch(cluster: &mut Cluster, node: usize, slot: usize, ms: u64) {
    let until = cluster.now() + Duration::from_millis(ms);
    cluster.world().nodes[node].disks[slot].failing_until = until;
}

fn serves(cluster: &mut Cluster, node: usize) -> bool {
    let now = cluster.now();
    let stats = cluster.world().nodes[node].stats(now);
    stats.iter().all(|stat| stat.health == DeviceHealth::Serving)
}

#[test]
fn a_glitch_on_two_of_three_nodes_one_after_the_other_leaves_all_three_in_use() {
    for seed in 2510..2516 {
        let mut cluster = Setup::new(seed).start();
        cluster.write(0, 64);
        for node in 0..2 {
            glitch(&mut cluster, node, 0, 500);
            for block in (0..128).step_by(4) {
                cluster.write(block, 4);
            }
            assert!(!serves(&mut cluster, node), "a write has failed");
            cluster.pass(Duration::from_secs(5));
            assert!(serves(&mut cluster, node), "node {node} is back");
        }
        cluster.write(0, 64);
        cluster.until("everything is whole", Cluster::is_whole);
        // The node that had none is lost, and what is left suffices.
        cluster.crash_node(2);
        cluster.read(0, 128);
        cluster.write(3, 50);
        cluster.start_node(2);
        cluster.finish();
    }
}

#[test]
fn while_all_nodes_have_a_glitch_writes_wait_and_are_done_afterwards() {
    for seed in 2520..2526 {
        let mut cluster = Setup::new(seed).start();
        cluster.write(0, 64);
        (0..3).for_each(|node| glitch(&mut cluster, node, 0, 300));
        let owner = cluster.owner();
        let token = cluster.ask(owner, holdfast_sim::workload::What::Write(0), 7, 9);
        cluster.until("the write is answered", |s| s.is_answered(token));
        cluster.read(0, 64);
        // The owner dies while one of them is out once more.
        glitch(&mut cluster, 1, 0, 300);
        cluster.write(16, 4);
        cluster.crash_host(0);
        cluster.take_over_on(1);
        cluster.read(0, 64);
        cluster.start_host(0);
        cluster.finish();
    }
}

#[test]
fn reads_that_fail_for_a_moment_are_nobodys_trouble() {
    let mut cluster = start(2530, "mirror:2", 2, 1);
    // Until nothing is written any more.
    cluster.pass(Duration::from_secs(10));
    for node in 0..2 {
        glitch(&mut cluster, node, 0, 80);
    }
    cluster.read(0, 512);
    for node in 0..2 {
        let now = cluster.now();
        let stats = cluster.world().nodes[node].stats(now);
        assert_eq!((stats[0].io_errors, stats[0].health), (0, DeviceHealth::Serving));
    }
    cluster.finish();
}

#[test]
fn a_disk_with_a_glitch_after_the_other_is_not_trusted_for_ever() {
    let mut cluster = Setup::new(2540).start();
    for _ in 0..3 {
        glitch(&mut cluster, 0, 0, 3_600_000);
        for _ in 0..50 {
            if serves(&mut cluster, 0) {
                cluster.write_segments(2);
            }
        }
        assert!(!serves(&mut cluster, 0), "a write has failed");
        glitch(&mut cluster, 0, 0, 0);
        cluster.pass(Duration::from_secs(70));
    }
    assert!(!serves(&mut cluster, 0), "the third within a day is the last");
    cluster.pass(Duration::from_secs(1200));
    assert!(!serves(&mut cluster, 0));
    cluster.crash_node(0);
    cluster.start_node(0);
    cluster.until("the operator's word counts", |s| s.is_whole());
    cluster.finish();
}

/// One stop of the journey: the layout is set while the volume is used; then what it promises to bear is lost.
fn go_to(cluster: &mut Cluster, layout: &str, at: &mut u64, losses: &[(usize, Option<usize>)]) {
    cluster.set_layout(layout);
    while !cluster.is_whole() {
        cluster.write(*at * 7 % 500, 3);
        cluster.read(*at * 11 % 400, 16);
        *at += 1;
        assert!(*at < 200_000, "{layout}: {:?}", cluster.status());
    }
    let lose = |cluster: &mut Cluster| {
        for (node, slot) in losses {
            match slot {
                Some(slot) => cluster.lose_disk(*node, *slot),
                None => cluster.crash_node(*node),
            }
        }
    };
    lose(cluster);
    cluster.read(0, 512);
    cluster.write(*at % 300, 8);
    // The owner dies as well.
    let (host, next) = (cluster.owner().host, 1 - cluster.owner().host);
    cluster.crash_host(host);
    cluster.take_over_on(next);
    cluster.read(0, 512);
    cluster.start_host(host);
    for (node, slot) in losses {
        match slot {
            Some(slot) => cluster.swap_disk(*node, *slot),
            None => cluster.start_node(*node),
        }
    }
    cluster.until("everything is whole again", Cluster::is_whole);
}

#[test]
fn a_grid_grows_from_one_node_to_six_and_shrinks_to_one_while_its_volume_is_used() {
    let mut cluster = Setup::new(2500).nodes(1).disks(2).layout("mirror:2@device").start();
    cluster.write_segments(20);
    let mut at = 0;
    go_to(&mut cluster, "mirror:2@device", &mut at, &[(0, Some(1))]);
    cluster.add_node(2);
    go_to(&mut cluster, "mirror:2", &mut at, &[(0, None)]);
    go_to(&mut cluster, "nested-mirror", &mut at, &[(0, None), (1, Some(0))]);
    cluster.add_node(2);
    go_to(&mut cluster, "parity:2+1", &mut at, &[(1, None)]);
    for _ in 0..3 {
        cluster.add_node(2);
    }
    go_to(&mut cluster, "parity:4+2", &mut at, &[(0, None), (4, None)]);
    go_to(&mut cluster, "parity:2+1", &mut at, &[(5, None)]);
    cluster.empty_nodes(&[3, 4, 5]);
    (3..6).for_each(|node| cluster.crash_node(node));
    go_to(&mut cluster, "nested-mirror", &mut at, &[(2, None), (0, Some(1))]);
    cluster.empty_nodes(&[2, 3, 4, 5]);
    cluster.crash_node(2);
    go_to(&mut cluster, "mirror:2@device", &mut at, &[(1, Some(0))]);
    cluster.empty_nodes(&[1, 2, 3, 4, 5]);
    cluster.crash_node(1);
    go_to(&mut cluster, "mirror:2@device", &mut at, &[(0, Some(0))]);
    cluster.finish();
}
