//! Stories of nested layouts: a node is lost and a device of the other at the same time.
//!
//! As in `scenarios`, every story ends with `finish`, which heals, reads everything back and judges it.

use holdfast_sim::scenario::{Cluster, Setup};
use std::time::Duration;

const NESTED: [(&str, usize); 3] = [("nested-mirror", 2), ("nested-parity:2+1", 3), ("nested-parity:3+1", 5)];

fn start(seed: u64, layout: &str, disks: usize, nodes: usize) -> Cluster {
    let mut cluster = Setup::new(seed).layout(layout).nodes(nodes).disks(disks).start();
    cluster.write_segments(12);
    cluster.write(300, 40);
    cluster.until("everything is whole", Cluster::is_whole);
    cluster
}

#[test]
fn a_node_and_a_device_of_the_other_are_lost_and_everything_goes_on() {
    for (i, (layout, disks)) in NESTED.into_iter().enumerate() {
        for (lost, other) in [(0, 1), (1, 0)] {
            let mut cluster = start(2300 + 2 * i as u64 + lost as u64, layout, disks, 2);
            cluster.crash_node(lost);
            cluster.lose_disk(other, 0);
            cluster.read(0, 512);
            for block in (0..512).step_by(8) {
                cluster.write(block, 3);
            }
            cluster.pass(Duration::from_secs(3));
            cluster.read(0, 512);
            cluster.swap_disk(other, 0);
            cluster.start_node(lost);
            cluster.until("everything is whole again", Cluster::is_whole);
            // The other way round, by what was made again.
            cluster.crash_node(other);
            cluster.lose_disk(lost, 1);
            cluster.read(0, 512);
            cluster.write(5, 9);
            cluster.swap_disk(lost, 1);
            cluster.start_node(other);
            cluster.finish();
        }
    }
}

#[test]
fn what_was_acknowledged_outlives_owner_node_and_device_at_once() {
    for (i, (layout, disks)) in NESTED.into_iter().enumerate() {
        let seed = 2310 + i as u64;
        let setup = Setup::new(seed).layout(layout).nodes(2).disks(disks);
        let mut cluster = setup.with(|plan| plan.destage_age = Duration::from_secs(60)).start();
        for block in (0..256).step_by(8) {
            cluster.write(block, 5);
        }
        // All of it lies in the log alone.
        cluster.crash_host(0);
        cluster.crash_node(0);
        cluster.lose_disk(1, 0);
        cluster.take_over_on(1);
        cluster.read(0, 256);
        cluster.write(3, 9);
        cluster.swap_disk(1, 0);
        cluster.start_node(0);
        cluster.start_host(0);
        cluster.finish();
    }
}

#[test]
fn a_lost_device_is_made_again_on_the_others_of_its_node() {
    let mut cluster = Setup::new(2320)
        .layout("nested-parity:2+1")
        .nodes(2)
        .disks(4)
        .with(|plan| plan.rebuild_after = Duration::from_secs(1))
        .start();
    cluster.write_segments(20);
    cluster.until("everything is whole", Cluster::is_whole);
    let before = cluster.held_by(0);
    cluster.lose_disk(0, 1);
    cluster.write_segments(4);
    cluster.until("everything is whole again", Cluster::is_whole);
    assert!(cluster.held_by(0) >= before, "the node holds as much as before, on three devices");
    // It bears the same once more.
    cluster.crash_node(1);
    cluster.lose_disk(0, 2);
    cluster.read(0, 512);
    cluster.start_node(1);
    cluster.swap_disk(0, 1);
    cluster.finish();
}

#[test]
fn a_third_node_takes_the_place_of_one_that_stays_away() {
    let mut cluster = Setup::new(2330)
        .layout("nested-mirror")
        .nodes(3)
        .disks(2)
        .with(|plan| plan.rebuild_after = Duration::from_secs(1))
        .start();
    cluster.write_segments(20);
    cluster.until("everything is whole", Cluster::is_whole);
    cluster.crash_node(0);
    cluster.pass(Duration::from_secs(3));
    cluster.until("everything is whole without it", Cluster::is_whole);
    cluster.crash_node(1);
    cluster.lose_disk(2, 0);
    cluster.read(0, 512);
    cluster.swap_disk(2, 0);
    cluster.start_node(0);
    cluster.start_node(1);
    cluster.finish();
}

#[test]
fn a_volume_goes_from_one_node_more_to_nested_and_on_and_back_while_it_is_used() {
    let mut cluster = Setup::new(2340).nodes(6).disks(3).layout("mirror:2").start();
    cluster.write_segments(20);
    let mut at = 0;
    for layout in ["nested-mirror", "nested-parity:2+1", "parity:2+1", "parity:4+2", "nested-parity:2+1", "mirror:2"] {
        cluster.set_layout(layout);
        while cluster.status().degraded_segments > 0 || cluster.status().at_risk_entries > 0 {
            cluster.write(at % 500, 3);
            cluster.read(at % 400, 16);
            at += 7;
            assert!(at < 400_000, "{layout}: {:?}", cluster.status());
        }
        cluster.crash_node(0);
        if layout.starts_with("nested") {
            cluster.lose_disk(1, 0);
        }
        cluster.read(0, 512);
        cluster.write(0, 8);
        if layout.starts_with("nested") {
            cluster.swap_disk(1, 0);
        }
        cluster.start_node(0);
        cluster.until("everything is whole again", Cluster::is_whole);
    }
    cluster.finish();
}

#[test]
fn what_the_last_device_took_is_copied_as_soon_as_there_is_a_second_one() {
    let mut cluster = start(2350, "nested-mirror", 2, 2);
    cluster.crash_node(1);
    cluster.lose_disk(0, 1);
    cluster.pass(Duration::from_secs(1));
    for block in (0..512).step_by(8) {
        cluster.write(block, 5);
    }
    cluster.pass(Duration::from_secs(3));
    cluster.swap_disk(0, 1);
    cluster.pass(Duration::from_secs(12));
    // Neither the other node nor its data are back: two devices of one node have everything.
    cluster.lose_disk(0, 0);
    cluster.crash_host(0);
    cluster.take_over_on(1);
    cluster.read(0, 512);
    cluster.swap_disk(0, 0);
    cluster.start_node(1);
    cluster.start_host(0);
    cluster.finish();
}

#[test]
fn what_is_held_as_is_asked_now_is_not_copied_at_each_opening() {
    for (i, (layout, disks)) in NESTED.into_iter().enumerate() {
        let setup = Setup::new(2355 + i as u64).layout(layout).nodes(2).disks(disks);
        let mut cluster = setup.with(|plan| plan.destage_age = Duration::from_secs(60)).start();
        // Of these one node has copies, which was enough while it was alone.
        cluster.crash_node(1);
        cluster.pass(Duration::from_secs(1));
        for block in (0..256).step_by(2) {
            cluster.write(block, 1);
        }
        cluster.crash_host(0);
        cluster.start_node(1);
        let used = |cluster: &mut Cluster| -> u64 {
            cluster.pass_ms(120);
            cluster.journal_bytes_used()
        };
        // The first opening copies them, those after it find them copied: what they add is records of their own.
        let (mut first, mut before) = (0, 0);
        for round in 0..6 {
            let host = (round + 1) % 2;
            if round > 0 {
                cluster.start_host(host);
            }
            cluster.take_over_on(host);
            let now = used(&mut cluster);
            if round == 0 {
                (first, before) = (now, now);
            }
            let added = now.saturating_sub(before);
            assert!(added < first / 2, "{layout}: {added} bytes of journals more in round {round}, {first} at first");
            before = now;
            cluster.crash_host(host);
        }
        cluster.start_host(1);
        cluster.take_over_on(1);
        cluster.start_host(0);
        cluster.finish();
    }
}

#[test]
fn copies_go_apart_when_the_other_node_is_back_with_one_device() {
    let mut cluster = start(2360, "nested-mirror", 2, 2);
    cluster.crash_node(1);
    cluster.pass(Duration::from_secs(1));
    for block in (0..512).step_by(8) {
        cluster.write(block, 5);
    }
    cluster.lose_disk(1, 1);
    cluster.start_node(1);
    cluster.pass(Duration::from_secs(12));
    cluster.crash_host(0);
    cluster.crash_node(0);
    cluster.take_over_on(1);
    cluster.read(0, 512);
    cluster.write(9, 3);
    cluster.swap_disk(1, 1);
    cluster.start_node(0);
    cluster.start_host(0);
    cluster.finish();
}

#[test]
fn a_device_of_several_is_drained_with_the_log_on_it() {
    let mut cluster = start(2370, "nested-mirror", 3, 2);
    for (node, slot) in [(0, 0), (1, 2)] {
        cluster.drain(Some((node, slot)));
        cluster.until("nothing is left there", |s| {
            let left = s.status().left_to_drain;
            !left.is_empty() && left.iter().all(|(_, left)| *left == 0)
        });
        cluster.write(8, 40);
    }
    cluster.drain(None);
    cluster.finish();
}

#[test]
fn a_device_that_hangs_is_written_around_on_its_own_node() {
    for slot in 0..3 {
        let mut cluster = start(2380 + slot as u64, "nested-mirror", 3, 2);
        cluster.write_around(1, slot);
        cluster.finish();
    }
}

#[test]
fn a_map_of_four_copies_stays_on_four_nodes() {
    let mut cluster = Setup::new(2390).layout("parity:1+3").nodes(4).disks(2).start();
    cluster.write_segments(12);
    cluster.until("everything is whole", Cluster::is_whole);
    for node in 0..4 {
        cluster.drain(Some((node, 0)));
        cluster.pass(Duration::from_secs(4));
        cluster.drain(None);
        cluster.until("everything is whole", Cluster::is_whole);
    }
    cluster.crash_host(0);
    cluster.take_over_on(1);
    (0..3).for_each(|node| cluster.crash_node(node));
    cluster.read(0, 512);
    (0..3).for_each(|node| cluster.start_node(node));
    cluster.start_host(0);
    cluster.finish();
}

#[test]
fn openings_that_die_leave_room_for_the_next_on_devices_that_no_ledger_named_has() {
    // The log lies on one device of each node when its owner dies. Each opening copies it to a second one, too, and dies.
    let mut cluster = Setup::new(2400)
        .layout("nested-mirror")
        .nodes(2)
        .disks(2)
        .with(|plan| {
            plan.destage_age = Duration::from_secs(60);
            (plan.writeback_bytes, plan.sizing.journal_bytes) = (8 << 20, 3 << 20);
        })
        .start();
    cluster.lose_disk(0, 1);
    cluster.lose_disk(1, 1);
    cluster.write(0, 8);
    cluster.pass_ms(1000);
    for block in 0..24 {
        cluster.write(block * 8, 8);
    }
    cluster.crash_host(0);
    cluster.swap_disk(0, 1);
    cluster.swap_disk(1, 1);
    assert_eq!(cluster.root().open_ledger().expect("one is open").legs.len(), 2);
    cluster.start_host(0);
    cluster.pass_ms(50);
    cluster.die_opening(12);
    cluster.take_over_on(0);
    cluster.finish();
}
