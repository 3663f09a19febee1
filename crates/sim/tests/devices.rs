//! Stories of layouts over devices: redundancy inside one node, and the way from one node to many and back.
//!
//! As in `scenarios`, every story ends with `finish`, which heals, reads everything back and judges it.

use holdfast_format::wire::DeviceHealth;
use holdfast_sim::stage::{Scenery, Stage};
use std::time::Duration;

const OVER_DEVICES: [(&str, usize); 4] =
    [("mirror:2@device", 2), ("mirror:3@device", 3), ("parity:2+1@device", 4), ("parity:4+2@device", 7)];

fn raise(seed: u64, layout: &str, nodes: usize, disks: usize) -> Stage {
    let mut stage = Scenery::new(seed).layout(layout).nodes(nodes).disks(disks).raise();
    stage.write_segments(12);
    stage.write(300, 40);
    stage.until("everything is whole", Stage::is_whole);
    stage
}

#[test]
fn a_device_of_one_node_is_lost_and_everything_goes_on() {
    for (i, (layout, disks)) in OVER_DEVICES.into_iter().enumerate() {
        for (lost, other) in [(0, 1), (1, 0)] {
            let mut stage = raise(2400 + 2 * i as u64 + lost as u64, layout, 1, disks);
            stage.lose_disk(0, lost);
            stage.read(0, 512);
            for block in (0..512).step_by(8) {
                stage.write(block, 3);
            }
            stage.pass(Duration::from_secs(3));
            stage.read(0, 512);
            stage.swap_disk(0, lost);
            stage.until("everything is whole again", Stage::is_whole);
            // The other way round, by what was made again.
            stage.lose_disk(0, other);
            stage.read(0, 512);
            stage.write(5, 9);
            stage.swap_disk(0, other);
            stage.until("everything is whole again", Stage::is_whole);
            stage.finish();
        }
    }
}

#[test]
fn what_was_acknowledged_outlives_owner_and_device_at_once() {
    for (i, (layout, disks)) in OVER_DEVICES.into_iter().enumerate() {
        for lost in 0..disks.min(3) {
            let seed = 2420 + 3 * i as u64 + lost as u64;
            let scenery = Scenery::new(seed).layout(layout).nodes(1).disks(disks);
            let mut stage = scenery.with(|plan| plan.destage_age = Duration::from_secs(60)).raise();
            for block in (0..256).step_by(8) {
                stage.write(block, 5);
            }
            // All of it lies in the log alone.
            stage.crash_host(0);
            stage.lose_disk(0, lost);
            stage.take_over_on(1);
            stage.read(0, 256);
            stage.write(3, 9);
            stage.swap_disk(0, lost);
            stage.start_host(0);
            stage.finish();
        }
    }
}

#[test]
fn a_lost_device_is_made_again_on_the_others_of_the_node() {
    let scenery = Scenery::new(2440).layout("parity:2+1@device").nodes(1).disks(4);
    let mut stage = scenery.with(|plan| plan.rebuild_after = Duration::from_secs(1)).raise();
    stage.write_segments(20);
    stage.until("everything is whole", Stage::is_whole);
    let before = stage.held_by(0);
    stage.lose_disk(0, 1);
    stage.write_segments(4);
    stage.until("everything is whole again", Stage::is_whole);
    // But for one segment that may be dead since what it held was overwritten; a quarter was lost.
    assert!(stage.held_by(0) + 3 >= before, "the node holds as much as before, on three devices");
    // It bears the same once more.
    stage.lose_disk(0, 2);
    stage.read(0, 512);
    stage.swap_disk(0, 1);
    stage.finish();
}

#[test]
fn what_the_last_device_took_is_copied_as_soon_as_there_is_a_second_one() {
    let mut stage = raise(2450, "mirror:2@device", 1, 2);
    stage.lose_disk(0, 1);
    for block in (0..512).step_by(8) {
        stage.write(block, 5);
    }
    stage.until("the loss shows", |s| s.status().at_risk_entries > 0);
    stage.pass(Duration::from_secs(3));
    stage.swap_disk(0, 1);
    stage.until("everything is whole again", Stage::is_whole);
    stage.lose_disk(0, 0);
    stage.crash_host(0);
    stage.take_over_on(1);
    stage.read(0, 512);
    stage.swap_disk(0, 0);
    stage.start_host(0);
    stage.finish();
}

#[test]
fn what_the_last_of_three_devices_took_is_copied_as_soon_as_there_is_a_second_one() {
    for (i, layout) in ["parity:2+1@device", "mirror:3@device"].into_iter().enumerate() {
        let mut stage = raise(2455 + i as u64, layout, 1, 3);
        if layout == "parity:2+1@device" {
            // It bears one loss: the second comes when the first is made up for.
            stage.lose_disk(0, 1);
            stage.pass(Duration::from_secs(3));
            stage.until("what is left is in two copies", |s| s.status().at_risk_entries == 0);
            stage.pass(Duration::from_secs(60));
        } else {
            stage.lose_disk(0, 1);
        }
        stage.lose_disk(0, 2);
        for block in (0..512).step_by(8) {
            stage.write(block, 8);
        }
        stage.pass(Duration::from_secs(5));
        stage.swap_disk(0, 1);
        stage.pass(Duration::from_secs(20));
        stage.lose_disk(0, 0);
        stage.read(0, 512);
        stage.swap_disk(0, 0);
        stage.swap_disk(0, 2);
        stage.until("everything is whole again", Stage::is_whole);
        stage.finish();
    }
}

#[test]
fn while_the_only_node_is_away_everything_waits_and_then_goes_on() {
    for (i, (layout, disks)) in OVER_DEVICES.into_iter().enumerate() {
        let mut stage = raise(2460 + i as u64, layout, 1, disks);
        stage.crash_node(0);
        let owner = stage.owner();
        let token = stage.ask(owner, holdfast_sim::workload::What::Write(0), 7, 9);
        stage.pass_ms(500);
        stage.start_node(0);
        stage.until("the write is answered", |s| s.is_answered(token));
        stage.power_loss();
        stage.until("everything is whole again", Stage::is_whole);
        stage.finish();
    }
}

#[test]
fn a_device_that_hangs_is_written_around_where_there_are_others() {
    for slot in 0..4 {
        let mut stage = raise(2470 + slot as u64, "mirror:2@device", 1, 4);
        let until = stage.now() + Duration::from_secs(20);
        stage.world().nodes[0].disks[slot].stuck_until = until;
        for block in (0..256).step_by(8) {
            stage.write(block, 3);
        }
        assert!(stage.now() < until, "writes wait for the device");
        stage.pass(Duration::from_secs(25));
        stage.crash_node(0);
        stage.start_node(0);
        stage.finish();
    }
}

#[test]
fn over_several_nodes_shards_are_spread_and_a_node_may_be_lost_as_well() {
    // Two of six shards, and two of five legs, lie on each.
    let mut stage = raise(2480, "parity:4+2@device", 3, 2);
    for node in 0..3 {
        stage.crash_node(node);
        stage.read(0, 512);
        stage.write(9, 30);
        stage.start_node(node);
        stage.until("everything is whole again", Stage::is_whole);
    }
    stage.finish();
}

#[test]
fn a_device_is_drained_with_the_log_on_it() {
    let mut stage = raise(2490, "mirror:2@device", 1, 3);
    for slot in [0, 2, 1] {
        stage.drain(Some((0, slot)));
        stage.until("nothing is left there", |s| {
            let left = s.status().left_to_drain;
            !left.is_empty() && left.iter().all(|(_, left)| *left == 0)
        });
        stage.write(8, 40);
        stage.drain(None);
    }
    stage.finish();
}

/// Everything on the disk fails for a while, and then nothing does.
fn glitch(stage: &mut Stage, node: usize, slot: usize, ms: u64) {
    let until = stage.now() + Duration::from_millis(ms);
    stage.world().nodes[node].disks[slot].failing_until = until;
}

fn serves(stage: &mut Stage, node: usize) -> bool {
    let now = stage.now();
    let stats = stage.world().nodes[node].machine().expect("it runs").stats(now);
    stats.iter().all(|stat| stat.health == DeviceHealth::Serving)
}

#[test]
fn a_glitch_on_two_of_three_nodes_one_after_the_other_leaves_all_three_in_use() {
    for seed in 2510..2516 {
        let mut stage = Scenery::new(seed).raise();
        stage.write(0, 64);
        for node in 0..2 {
            glitch(&mut stage, node, 0, 500);
            for block in (0..128).step_by(4) {
                stage.write(block, 4);
            }
            assert!(!serves(&mut stage, node), "a write has failed");
            stage.pass(Duration::from_secs(5));
            assert!(serves(&mut stage, node), "node {node} is back");
        }
        stage.write(0, 64);
        stage.until("everything is whole", Stage::is_whole);
        // The node that had none is lost, and what is left suffices.
        stage.crash_node(2);
        stage.read(0, 128);
        stage.write(3, 50);
        stage.start_node(2);
        stage.finish();
    }
}

#[test]
fn while_all_nodes_have_a_glitch_writes_wait_and_are_done_afterwards() {
    for seed in 2520..2526 {
        let mut stage = Scenery::new(seed).raise();
        stage.write(0, 64);
        (0..3).for_each(|node| glitch(&mut stage, node, 0, 300));
        let owner = stage.owner();
        let token = stage.ask(owner, holdfast_sim::workload::What::Write(0), 7, 9);
        stage.until("the write is answered", |s| s.is_answered(token));
        stage.read(0, 64);
        // The owner dies while one of them is out once more.
        glitch(&mut stage, 1, 0, 300);
        stage.write(16, 4);
        stage.crash_host(0);
        stage.take_over_on(1);
        stage.read(0, 64);
        stage.start_host(0);
        stage.finish();
    }
}

#[test]
fn reads_that_fail_for_a_moment_are_nobodys_trouble() {
    let mut stage = raise(2530, "mirror:2", 2, 1);
    // Until nothing is written any more.
    stage.pass(Duration::from_secs(10));
    for node in 0..2 {
        glitch(&mut stage, node, 0, 80);
    }
    stage.read(0, 512);
    for node in 0..2 {
        let now = stage.now();
        let stats = stage.world().nodes[node].machine().expect("it runs").stats(now);
        assert_eq!((stats[0].io_errors, stats[0].health), (0, DeviceHealth::Serving));
    }
    stage.finish();
}

#[test]
fn a_disk_with_a_glitch_after_the_other_is_not_trusted_for_ever() {
    let mut stage = Scenery::new(2540).raise();
    for _ in 0..3 {
        glitch(&mut stage, 0, 0, 3_600_000);
        for _ in 0..50 {
            if serves(&mut stage, 0) {
                stage.write_segments(2);
            }
        }
        assert!(!serves(&mut stage, 0), "a write has failed");
        glitch(&mut stage, 0, 0, 0);
        stage.pass(Duration::from_secs(70));
    }
    assert!(!serves(&mut stage, 0), "the third within a day is the last");
    stage.pass(Duration::from_secs(1200));
    assert!(!serves(&mut stage, 0));
    stage.crash_node(0);
    stage.start_node(0);
    stage.until("the operator's word counts", |s| s.is_whole());
    stage.finish();
}

/// One stop of the journey: the layout is set while the volume is used; then what it promises to bear is lost.
fn go_to(stage: &mut Stage, layout: &str, at: &mut u64, losses: &[(usize, Option<usize>)]) {
    stage.set_layout(layout);
    while !stage.is_whole() {
        stage.write(*at * 7 % 500, 3);
        stage.read(*at * 11 % 400, 16);
        *at += 1;
        assert!(*at < 200_000, "{layout}: {:?}", stage.status());
    }
    let lose = |stage: &mut Stage| {
        for (node, slot) in losses {
            match slot {
                Some(slot) => stage.lose_disk(*node, *slot),
                None => stage.crash_node(*node),
            }
        }
    };
    lose(stage);
    stage.read(0, 512);
    stage.write(*at % 300, 8);
    // The owner dies as well.
    let (host, next) = (stage.owner().host, 1 - stage.owner().host);
    stage.crash_host(host);
    stage.take_over_on(next);
    stage.read(0, 512);
    stage.start_host(host);
    for (node, slot) in losses {
        match slot {
            Some(slot) => stage.swap_disk(*node, *slot),
            None => stage.start_node(*node),
        }
    }
    stage.until("everything is whole again", Stage::is_whole);
}

#[test]
fn a_grid_grows_from_one_node_to_six_and_shrinks_to_one_while_its_volume_is_used() {
    let mut stage = Scenery::new(2500).nodes(1).disks(2).layout("mirror:2@device").raise();
    stage.write_segments(20);
    let mut at = 0;
    go_to(&mut stage, "mirror:2@device", &mut at, &[(0, Some(1))]);
    stage.add_node(2);
    go_to(&mut stage, "mirror:2", &mut at, &[(0, None)]);
    go_to(&mut stage, "nested-mirror", &mut at, &[(0, None), (1, Some(0))]);
    stage.add_node(2);
    go_to(&mut stage, "parity:2+1", &mut at, &[(1, None)]);
    for _ in 0..3 {
        stage.add_node(2);
    }
    go_to(&mut stage, "parity:4+2", &mut at, &[(0, None), (4, None)]);
    go_to(&mut stage, "parity:2+1", &mut at, &[(5, None)]);
    stage.empty_nodes(&[3, 4, 5]);
    (3..6).for_each(|node| stage.crash_node(node));
    go_to(&mut stage, "nested-mirror", &mut at, &[(2, None), (0, Some(1))]);
    stage.empty_nodes(&[2, 3, 4, 5]);
    stage.crash_node(2);
    go_to(&mut stage, "mirror:2@device", &mut at, &[(1, Some(0))]);
    stage.empty_nodes(&[1, 2, 3, 4, 5]);
    stage.crash_node(1);
    go_to(&mut stage, "mirror:2@device", &mut at, &[(0, Some(0))]);
    stage.finish();
}
