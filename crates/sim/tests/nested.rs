//! Stories of nested layouts: a node is lost and a device of the other at the same time.
//!
//! As in `scenarios`, every story ends with `finish`, which heals, reads everything back and judges it.

use holdfast_sim::stage::{Scenery, Stage};
use std::time::Duration;

const NESTED: [(&str, usize); 3] = [("nested-mirror", 2), ("nested-parity:2+1", 3), ("nested-parity:3+1", 5)];

fn raise(seed: u64, layout: &str, disks: usize, nodes: usize) -> Stage {
    let mut stage = Scenery::new(seed).layout(layout).nodes(nodes).disks(disks).raise();
    stage.write_segments(12);
    stage.write(300, 40);
    stage.until("everything is whole", Stage::is_whole);
    stage
}

#[test]
fn a_node_and_a_device_of_the_other_are_lost_and_everything_goes_on() {
    for (i, (layout, disks)) in NESTED.into_iter().enumerate() {
        for (lost, other) in [(0, 1), (1, 0)] {
            let mut stage = raise(2300 + 2 * i as u64 + lost as u64, layout, disks, 2);
            stage.crash_node(lost);
            stage.lose_disk(other, 0);
            stage.read(0, 512);
            for block in (0..512).step_by(8) {
                stage.write(block, 3);
            }
            stage.pass(Duration::from_secs(3));
            stage.read(0, 512);
            stage.swap_disk(other, 0);
            stage.start_node(lost);
            stage.until("everything is whole again", Stage::is_whole);
            // The other way round, by what was made again.
            stage.crash_node(other);
            stage.lose_disk(lost, 1);
            stage.read(0, 512);
            stage.write(5, 9);
            stage.swap_disk(lost, 1);
            stage.start_node(other);
            stage.finish();
        }
    }
}

#[test]
fn what_was_acknowledged_outlives_owner_node_and_device_at_once() {
    for (i, (layout, disks)) in NESTED.into_iter().enumerate() {
        let seed = 2310 + i as u64;
        let scenery = Scenery::new(seed).layout(layout).nodes(2).disks(disks);
        let mut stage = scenery.with(|plan| plan.destage_age = Duration::from_secs(60)).raise();
        for block in (0..256).step_by(8) {
            stage.write(block, 5);
        }
        // All of it lies in the log alone.
        stage.crash_host(0);
        stage.crash_node(0);
        stage.lose_disk(1, 0);
        stage.take_over_on(1);
        stage.read(0, 256);
        stage.write(3, 9);
        stage.swap_disk(1, 0);
        stage.start_node(0);
        stage.start_host(0);
        stage.finish();
    }
}

#[test]
fn a_lost_device_is_made_again_on_the_others_of_its_node() {
    let mut stage = Scenery::new(2320)
        .layout("nested-parity:2+1")
        .nodes(2)
        .disks(4)
        .with(|plan| plan.rebuild_after = Duration::from_secs(1))
        .raise();
    stage.write_segments(20);
    stage.until("everything is whole", Stage::is_whole);
    let before = stage.held_by(0);
    stage.lose_disk(0, 1);
    stage.write_segments(4);
    stage.until("everything is whole again", Stage::is_whole);
    assert!(stage.held_by(0) >= before, "the node holds as much as before, on three devices");
    // It bears the same once more.
    stage.crash_node(1);
    stage.lose_disk(0, 2);
    stage.read(0, 512);
    stage.start_node(1);
    stage.swap_disk(0, 1);
    stage.finish();
}

#[test]
fn a_third_node_takes_the_place_of_one_that_stays_away() {
    let mut stage = Scenery::new(2330)
        .layout("nested-mirror")
        .nodes(3)
        .disks(2)
        .with(|plan| plan.rebuild_after = Duration::from_secs(1))
        .raise();
    stage.write_segments(20);
    stage.until("everything is whole", Stage::is_whole);
    stage.crash_node(0);
    stage.pass(Duration::from_secs(3));
    stage.until("everything is whole without it", Stage::is_whole);
    stage.crash_node(1);
    stage.lose_disk(2, 0);
    stage.read(0, 512);
    stage.swap_disk(2, 0);
    stage.start_node(0);
    stage.start_node(1);
    stage.finish();
}

#[test]
fn a_volume_goes_from_one_node_more_to_nested_and_on_and_back_while_it_is_used() {
    let mut stage = Scenery::new(2340).nodes(6).disks(3).layout("mirror:2").raise();
    stage.write_segments(20);
    let mut at = 0;
    for layout in ["nested-mirror", "nested-parity:2+1", "parity:2+1", "parity:4+2", "nested-parity:2+1", "mirror:2"] {
        stage.set_layout(layout);
        while stage.status().degraded_segments > 0 || stage.status().at_risk_entries > 0 {
            stage.write(at % 500, 3);
            stage.read(at % 400, 16);
            at += 7;
            assert!(at < 400_000, "{layout}: {:?}", stage.status());
        }
        stage.crash_node(0);
        if layout.starts_with("nested") {
            stage.lose_disk(1, 0);
        }
        stage.read(0, 512);
        stage.write(0, 8);
        if layout.starts_with("nested") {
            stage.swap_disk(1, 0);
        }
        stage.start_node(0);
        stage.until("everything is whole again", Stage::is_whole);
    }
    stage.finish();
}

#[test]
fn what_the_last_device_took_is_copied_as_soon_as_there_is_a_second_one() {
    let mut stage = raise(2350, "nested-mirror", 2, 2);
    stage.crash_node(1);
    stage.lose_disk(0, 1);
    stage.pass(Duration::from_secs(1));
    for block in (0..512).step_by(8) {
        stage.write(block, 5);
    }
    stage.pass(Duration::from_secs(3));
    stage.swap_disk(0, 1);
    stage.pass(Duration::from_secs(12));
    // Neither the other node nor its data are back: two devices of one node have everything.
    stage.lose_disk(0, 0);
    stage.crash_host(0);
    stage.take_over_on(1);
    stage.read(0, 512);
    stage.swap_disk(0, 0);
    stage.start_node(1);
    stage.start_host(0);
    stage.finish();
}

#[test]
fn what_is_held_as_is_asked_now_is_not_copied_at_each_opening() {
    for (i, (layout, disks)) in NESTED.into_iter().enumerate() {
        let scenery = Scenery::new(2355 + i as u64).layout(layout).nodes(2).disks(disks);
        let mut stage = scenery.with(|plan| plan.destage_age = Duration::from_secs(60)).raise();
        // Of these one node has copies, which was enough while it was alone.
        stage.crash_node(1);
        stage.pass(Duration::from_secs(1));
        for block in (0..256).step_by(2) {
            stage.write(block, 1);
        }
        stage.crash_host(0);
        stage.start_node(1);
        let used = |stage: &mut Stage| -> u64 {
            stage.pass_ms(120);
            stage.journal_bytes_used()
        };
        // The first opening copies them, those after it find them copied.
        let mut first = 0;
        for round in 0..6 {
            let host = (round + 1) % 2;
            if round > 0 {
                stage.start_host(host);
            }
            stage.take_over_on(host);
            let now = used(&mut stage);
            if round == 0 {
                first = now;
            }
            assert!(now < 2 * first, "{layout}: {now} bytes of journals in round {round}, {first} at first");
            stage.crash_host(host);
        }
        stage.start_host(1);
        stage.take_over_on(1);
        stage.start_host(0);
        stage.finish();
    }
}

#[test]
fn copies_go_apart_when_the_other_node_is_back_with_one_device() {
    let mut stage = raise(2360, "nested-mirror", 2, 2);
    stage.crash_node(1);
    stage.pass(Duration::from_secs(1));
    for block in (0..512).step_by(8) {
        stage.write(block, 5);
    }
    stage.lose_disk(1, 1);
    stage.start_node(1);
    stage.pass(Duration::from_secs(12));
    stage.crash_host(0);
    stage.crash_node(0);
    stage.take_over_on(1);
    stage.read(0, 512);
    stage.write(9, 3);
    stage.swap_disk(1, 1);
    stage.start_node(0);
    stage.start_host(0);
    stage.finish();
}

#[test]
fn a_device_of_several_is_drained_with_the_log_on_it() {
    let mut stage = raise(2370, "nested-mirror", 3, 2);
    for (node, slot) in [(0, 0), (1, 2)] {
        stage.drain(Some((node, slot)));
        stage.until("nothing is left there", |s| {
            let left = s.status().left_to_drain;
            !left.is_empty() && left.iter().all(|(_, left)| *left == 0)
        });
        stage.write(8, 40);
    }
    stage.drain(None);
    stage.finish();
}

#[test]
fn a_device_that_hangs_is_written_around_on_its_own_node() {
    for slot in 0..3 {
        let mut stage = raise(2380 + slot as u64, "nested-mirror", 3, 2);
        let until = stage.now() + Duration::from_secs(20);
        stage.world().nodes[1].disks[slot].stuck_until = until;
        for block in (0..256).step_by(8) {
            stage.write(block, 3);
        }
        assert!(stage.now() < until, "writes wait for the device");
        stage.pass(Duration::from_secs(25));
        // Shards that it wrote after their deletion are found when the node lists what it holds.
        stage.crash_node(1);
        stage.start_node(1);
        stage.finish();
    }
}

#[test]
fn a_map_of_four_copies_stays_on_four_nodes() {
    let mut stage = Scenery::new(2390).layout("parity:1+3").nodes(4).disks(2).raise();
    stage.write_segments(12);
    stage.until("everything is whole", Stage::is_whole);
    for node in 0..4 {
        stage.drain(Some((node, 0)));
        stage.pass(Duration::from_secs(4));
        stage.drain(None);
        stage.until("everything is whole", Stage::is_whole);
    }
    stage.crash_host(0);
    stage.take_over_on(1);
    (0..3).for_each(|node| stage.crash_node(node));
    stage.read(0, 512);
    (0..3).for_each(|node| stage.start_node(node));
    stage.start_host(0);
    stage.finish();
}

#[test]
fn openings_that_die_leave_room_for_the_next_on_devices_that_no_ledger_named_has() {
    // The log lies on one device of each node when its owner dies. Each opening copies it to a second one, too, and dies.
    let mut stage = Scenery::new(2400)
        .layout("nested-mirror")
        .nodes(2)
        .disks(2)
        .with(|plan| {
            plan.destage_age = Duration::from_secs(60);
            (plan.writeback_bytes, plan.sizing.journal_bytes) = (8 << 20, 3 << 20);
        })
        .raise();
    stage.lose_disk(0, 1);
    stage.lose_disk(1, 1);
    stage.write(0, 8);
    stage.pass_ms(1000);
    for block in 0..24 {
        stage.write(block * 8, 8);
    }
    stage.crash_host(0);
    stage.swap_disk(0, 1);
    stage.swap_disk(1, 1);
    assert_eq!(stage.root().open_ledger().expect("one is open").legs.len(), 2);
    stage.start_host(0);
    stage.pass_ms(50);
    stage.die_opening(12);
    stage.take_over_on(0);
    stage.finish();
}
