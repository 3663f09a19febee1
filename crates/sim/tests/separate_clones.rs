//! Stories of volumes that share segments (protocol rule 19): separate clones, and what they were made of.
//!
//! As in `scenarios`, every story ends with `finish`, which reads everything back and judges it.

use holdfast_sim::stage::{Scenery, Stage};
use std::time::Duration;

/// A quarter of a second until data is destaged, room for separate clones, and a cleaner that has enough to do.
fn scenery(seed: u64) -> Scenery {
    Scenery::new(seed).with(|plan| {
        plan.separate_max = 0;
        plan.disk_bytes = 48 << 20;
    })
}

/// Overwrites the whole volume so often, in short writes that leave no segment whole.
fn overwrite(stage: &mut Stage, times: u64) {
    for round in 0..times {
        for i in 0..128 {
            stage.write((i * 37 + round) % 128 * 4, 4);
        }
    }
}

#[test]
fn a_separate_clone_shows_what_its_snapshot_held_whatever_becomes_of_the_volume() {
    let mut stage = scenery(2101).raise();
    overwrite(&mut stage, 1);
    let name = stage.snapshot();
    let clone = stage.separate(&name);
    stage.drop_snapshot(&name);
    overwrite(&mut stage, 3);
    stage.discard(0, 512);
    stage.write_member(clone, 3, 70);
    stage.pass(Duration::from_secs(5));
    // What the clone names is neither free nor dead to the volume's owner.
    let kept = stage.status().space;
    assert!(kept.kept_bytes >= 1 << 20, "{kept:?}");
    stage.read_member(clone);
    stage.finish();
}

#[test]
fn what_is_kept_for_a_separate_clone_is_freed_when_that_is_gone() {
    let mut stage = scenery(2102).raise();
    overwrite(&mut stage, 1);
    let name = stage.snapshot();
    let clone = stage.separate(&name);
    stage.drop_snapshot(&name);
    stage.discard(0, 512);
    stage.pass(Duration::from_secs(8));
    let kept = stage.held_segments();
    assert!(kept > 8, "{kept} segments are held");
    stage.drop_member(clone);
    stage.until("nothing is kept", |s| s.status().dependents.is_empty() && s.status().space.kept_bytes == 0);
    stage.pass(Duration::from_secs(8));
    let left = stage.held_segments();
    assert!(left * 2 < kept, "{left} of {kept} segments are held after the clone is gone");
    stage.finish();
}

#[test]
fn a_separate_clone_that_has_overwritten_everything_keeps_nothing_of_its_origin() {
    let mut stage = scenery(2103).raise();
    overwrite(&mut stage, 1);
    let name = stage.snapshot();
    let clone = stage.separate(&name);
    stage.drop_snapshot(&name);
    for block in (0..512).step_by(16) {
        stage.write_member(clone, block, 16);
    }
    stage.pass(Duration::from_secs(2));
    // The snapshot that it began with shows the rest; its last segments go with it.
    let before = stage.status().space.kept_bytes;
    overwrite(&mut stage, 1);
    stage.drop_snapshot_of_member(clone, &name);
    stage.until("the origin is let go of", |s| s.status().dependents.is_empty());
    assert!(stage.status().space.kept_bytes <= before);
    stage.read_member(clone);
    stage.finish();
}

#[test]
fn shards_that_the_origins_owner_has_moved_are_found_where_they_are() {
    let mut stage = scenery(2104).nodes(4).disks(1).raise();
    overwrite(&mut stage, 1);
    let name = stage.snapshot();
    let clone = stage.separate(&name);
    // Each node's disk is emptied in turn: nothing is where the clone has seen it, and both shards of many segments moved.
    for node in 0..4 {
        stage.drain(Some((node, 0)));
        stage.until("the disk is empty", |s| {
            s.held_by(node) == 0 || s.status().left_to_drain.iter().all(|(_, left)| *left == 0)
        });
        stage.pass(Duration::from_secs(2));
    }
    stage.drain(None);
    stage.read_member(clone);
    stage.finish();
}

#[test]
fn what_a_lost_node_held_is_made_again_by_the_origins_owner_and_found_by_the_clone() {
    let mut stage = scenery(2105).nodes(4).with(|plan| plan.rebuild_after = Duration::from_secs(1)).raise();
    overwrite(&mut stage, 1);
    let name = stage.snapshot();
    let clone = stage.separate(&name);
    stage.drop_snapshot(&name);
    stage.discard(0, 512);
    stage.pass(Duration::from_secs(4));
    for node in 0..2 {
        // The second loss would be one too many if what is only kept were not made again.
        stage.crash_node(node);
        stage.pass(Duration::from_secs(12));
    }
    stage.read_member(clone);
    (0..2).for_each(|node| stage.start_node(node));
    stage.finish();
}

#[test]
fn an_owner_that_dies_while_it_makes_a_separate_clone_leaves_nothing_kept() {
    for micros in [200, 900, 2_000, 4_000, 9_000, 20_000] {
        let mut stage = scenery(2106 + micros).raise();
        overwrite(&mut stage, 1);
        let name = stage.snapshot();
        let clone = stage.begin_separate(&name);
        stage.pass(Duration::from_micros(micros));
        stage.crash_host(0);
        stage.take_over_on(1);
        // It may have been made at the last moment.
        stage.drop_member(clone);
        stage.until("nothing is kept", |s| s.status().dependents.is_empty() && s.status().space.kept_bytes == 0);
        stage.finish();
    }
}

#[test]
fn a_clone_of_a_separate_clone_needs_what_both_hold() {
    let mut stage = scenery(2120).raise();
    overwrite(&mut stage, 1);
    let name = stage.snapshot();
    let clone = stage.separate(&name);
    stage.write_member(clone, 9, 100);
    let second = stage.separate_of_member(clone);
    stage.drop_snapshot(&name);
    stage.discard(0, 512);
    // The first clone lets go of all that it shares, of the volume's and its own.
    for block in (0..512).step_by(16) {
        stage.write_member(clone, block, 16);
    }
    stage.pass(Duration::from_secs(8));
    stage.read_member(second);
    stage.read_member(clone);
    stage.open_member_on(second, 1);
    stage.read_member(second);
    stage.finish();
}

#[test]
fn a_separate_clone_is_made_while_a_node_is_away() {
    // And the layout is as wide as the grid: what the snapshot shows leaves the log as copies.
    let mut stage = scenery(2121).layout("parity:2+1").nodes(3).raise();
    overwrite(&mut stage, 1);
    stage.pass(Duration::from_secs(1));
    let name = stage.snapshot();
    stage.crash_node(0);
    stage.pass_ms(300);
    overwrite(&mut stage, 1);
    let clone = stage.separate(&name);
    stage.start_node(0);
    stage.read_member(clone);
    stage.finish();
}

#[test]
fn a_separate_clone_names_nothing_that_the_origins_next_owner_does_not_know() {
    for step in 0..60 {
        let scenery = scenery(2130 + step).with(|plan| {
            plan.fold_runs = 2;
            plan.writeback_bytes = 256 << 10;
            plan.destage_age = Duration::from_millis(5);
        });
        let mut stage = scenery.raise();
        stage.pass_ms(37 * step);
        overwrite(&mut stage, 1);
        let name = stage.snapshot();
        stage.pass_ms(10);
        let folds = stage.status().counters.folds;
        stage.until("leaves of the map were written, and are in no checkpoint yet", |s| {
            s.status().counters.folds > folds && s.is_checkpointing()
        });
        // A part of the checkpoint waits for a node; with luck nothing of the clone's does.
        stage.world().pause_node(step as usize % 3);
        let clone = stage.begin_separate(&name);
        stage.until_made(clone);
        stage.crash_host(0);
        stage.world().resume_node(step as usize % 3);
        stage.take_over_on(1);
        stage.pass_ms(500);
        stage.read_member(clone);
        stage.finish();
    }
}
