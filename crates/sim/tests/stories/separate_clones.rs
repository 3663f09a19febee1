//! Stories of volumes that share segments (protocol rule 19): separate clones, and what they were made of.
//!
//! As in `scenarios`, every story ends with `finish`, which reads everything back and judges it.

use holdfast_sim::scenario::{Cluster, Setup};
use std::time::Duration;

/// A quarter of a second until data is destaged, room for separate clones, and a cleaner that has enough to do.
fn setup(seed: u64) -> Setup {
    Setup::new(seed).with(|plan| {
        plan.separate_max = 0;
        plan.disk_bytes = 48 << 20;
    })
}

/// Overwrites the whole volume so often, in short writes that leave no segment whole.
fn overwrite(cluster: &mut Cluster, times: u64) {
    for round in 0..times {
        for i in 0..128 {
            cluster.write((i * 37 + round) % 128 * 4, 4);
        }
    }
}

#[test]
fn a_separate_clone_shows_what_its_snapshot_held_whatever_becomes_of_the_volume() {
    let mut cluster = setup(2101).start();
    overwrite(&mut cluster, 1);
    let name = cluster.snapshot();
    let clone = cluster.separate(&name);
    cluster.drop_snapshot(&name);
    overwrite(&mut cluster, 3);
    cluster.discard(0, 512);
    cluster.write_member(clone, 3, 70);
    cluster.pass(Duration::from_secs(5));
    // What the clone names is neither free nor dead to the volume's owner.
    let kept = cluster.status().space;
    assert!(kept.kept_bytes >= 1 << 20, "{kept:?}");
    cluster.read_member(clone);
    cluster.finish();
}

#[test]
fn what_is_kept_for_a_separate_clone_is_freed_when_that_is_gone() {
    let mut cluster = setup(2102).start();
    overwrite(&mut cluster, 1);
    let name = cluster.snapshot();
    let clone = cluster.separate(&name);
    cluster.drop_snapshot(&name);
    cluster.discard(0, 512);
    cluster.pass(Duration::from_secs(8));
    let kept = cluster.held_segments();
    assert!(kept > 8, "{kept} segments are held");
    cluster.drop_member(clone);
    cluster.until("nothing is kept", |s| s.status().dependents.is_empty() && s.status().space.kept_bytes == 0);
    cluster.pass(Duration::from_secs(8));
    let left = cluster.held_segments();
    assert!(left * 2 < kept, "{left} of {kept} segments are held after the clone is gone");
    cluster.finish();
}

#[test]
fn a_separate_clone_that_has_overwritten_everything_keeps_nothing_of_its_origin() {
    let mut cluster = setup(2103).start();
    overwrite(&mut cluster, 1);
    let name = cluster.snapshot();
    let clone = cluster.separate(&name);
    cluster.drop_snapshot(&name);
    for block in (0..512).step_by(16) {
        cluster.write_member(clone, block, 16);
    }
    cluster.pass(Duration::from_secs(2));
    // The snapshot that it began with shows the rest; its last segments go with it.
    let before = cluster.status().space.kept_bytes;
    overwrite(&mut cluster, 1);
    cluster.drop_snapshot_of_member(clone, &name);
    cluster.until("the origin is let go of", |s| s.status().dependents.is_empty());
    assert!(cluster.status().space.kept_bytes <= before);
    cluster.read_member(clone);
    cluster.finish();
}

#[test]
fn shards_that_the_origins_owner_has_moved_are_found_where_they_are() {
    let mut cluster = setup(2104).nodes(4).disks(1).start();
    overwrite(&mut cluster, 1);
    let name = cluster.snapshot();
    let clone = cluster.separate(&name);
    // Each node's disk is emptied in turn: nothing is where the clone has seen it, and both shards of many segments moved.
    for node in 0..4 {
        cluster.drain(Some((node, 0)));
        cluster.until("the disk is empty", |s| {
            s.held_by(node) == 0 || s.status().left_to_drain.iter().all(|(_, left)| *left == 0)
        });
        cluster.pass(Duration::from_secs(2));
    }
    cluster.drain(None);
    cluster.read_member(clone);
    cluster.finish();
}

#[test]
fn what_a_lost_node_held_is_made_again_by_the_origins_owner_and_found_by_the_clone() {
    let mut cluster = setup(2105).nodes(4).with(|plan| plan.rebuild_after = Duration::from_secs(1)).start();
    overwrite(&mut cluster, 1);
    let name = cluster.snapshot();
    let clone = cluster.separate(&name);
    cluster.drop_snapshot(&name);
    cluster.discard(0, 512);
    cluster.pass(Duration::from_secs(4));
    for node in 0..2 {
        // The second loss would be one too many if what is only kept were not made again.
        cluster.crash_node(node);
        cluster.pass(Duration::from_secs(12));
    }
    cluster.read_member(clone);
    (0..2).for_each(|node| cluster.start_node(node));
    cluster.finish();
}

#[test]
fn an_owner_that_dies_while_it_makes_a_separate_clone_leaves_nothing_kept() {
    for micros in [200, 900, 2_000, 4_000, 9_000, 20_000] {
        let mut cluster = setup(2106 + micros).start();
        overwrite(&mut cluster, 1);
        let name = cluster.snapshot();
        let clone = cluster.begin_separate(&name);
        cluster.pass(Duration::from_micros(micros));
        cluster.crash_host(0);
        cluster.take_over_on(1);
        // It may have been made at the last moment.
        cluster.drop_member(clone);
        cluster.until("nothing is kept", |s| s.status().dependents.is_empty() && s.status().space.kept_bytes == 0);
        cluster.finish();
    }
}

#[test]
fn a_clone_of_a_separate_clone_needs_what_both_hold() {
    let mut cluster = setup(2120).start();
    overwrite(&mut cluster, 1);
    let name = cluster.snapshot();
    let clone = cluster.separate(&name);
    cluster.write_member(clone, 9, 100);
    let second = cluster.separate_of_member(clone);
    cluster.drop_snapshot(&name);
    cluster.discard(0, 512);
    // The first clone lets go of all that it shares, of the volume's and its own.
    for block in (0..512).step_by(16) {
        cluster.write_member(clone, block, 16);
    }
    cluster.pass(Duration::from_secs(8));
    cluster.read_member(second);
    cluster.read_member(clone);
    cluster.open_member_on(second, 1);
    cluster.read_member(second);
    cluster.finish();
}

#[test]
fn a_separate_clone_is_made_while_a_node_is_away() {
    // And the layout is as wide as the grid: what the snapshot shows leaves the log as copies.
    let mut cluster = setup(2121).layout("parity:2+1").nodes(3).start();
    overwrite(&mut cluster, 1);
    cluster.pass(Duration::from_secs(1));
    let name = cluster.snapshot();
    cluster.crash_node(0);
    cluster.pass_ms(300);
    overwrite(&mut cluster, 1);
    let clone = cluster.separate(&name);
    cluster.start_node(0);
    cluster.read_member(clone);
    cluster.finish();
}

#[test]
fn a_separate_clone_names_nothing_that_the_origins_next_owner_does_not_know() {
    for step in 0..60 {
        let setup = setup(2130 + step).with(|plan| {
            plan.fold_runs = 2;
            plan.writeback_bytes = 256 << 10;
            plan.destage_age = Duration::from_millis(5);
        });
        let mut cluster = setup.start();
        cluster.pass_ms(37 * step);
        overwrite(&mut cluster, 1);
        let name = cluster.snapshot();
        cluster.pass_ms(10);
        let folds = cluster.status().counters.folds;
        // A fold by age alone comes half a minute after the one before, with the next tick.
        let is_folded = |s: &Cluster| s.status().counters.folds > folds && s.is_checkpointing();
        let patience = Duration::from_secs(35);
        cluster.until_within(patience, "leaves of the map were written, and are in no checkpoint yet", is_folded);
        // A part of the checkpoint waits for a node; with luck nothing of the clone's does.
        cluster.world().pause_node(step as usize % 3);
        let clone = cluster.begin_separate(&name);
        cluster.until_made(clone);
        cluster.crash_host(0);
        cluster.world().resume_node(step as usize % 3);
        cluster.take_over_on(1);
        cluster.pass_ms(500);
        cluster.read_member(clone);
        cluster.finish();
    }
}
