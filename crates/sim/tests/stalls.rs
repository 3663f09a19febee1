//! No guest waits for maintenance: whatever has to be done goes in slices, and requests have their turns in between. A
//! machine has no clock: what is bounded is the work of a turn, in runs of the map (see `Config::slice_runs_max`).

use holdfast_base::Prng;
use holdfast_sim::stage::{BLOCK, Scenery, Stage};
use holdfast_sim::workload::What;
use std::time::Duration;

const SLICE: usize = 512;

/// A slice goes on to the end of what it is at: a leaf that is full, the one that it replaces, and what lies over it.
const LEAF: usize = 3 * 512;

const LEAVES: u64 = 48;

/// Single blocks at random places of the whole volume.
fn write_at_random(stage: &mut Stage, prng: &mut Prng, count: u64) {
    let owner = stage.owner();
    for _ in 0..count / 32 {
        let asked: Vec<_> = (0..32).map(|_| stage.ask(owner, What::Write(0), prng.below(LEAVES * 512), 1)).collect();
        stage.until("the writes are answered", |s| asked.iter().all(|token| s.is_answered(*token)));
    }
}

/// Or to the end of a part of a checkpoint, which is copied and summed: a quarter of a segment.
const PART: usize = (1 << 20) / 4 / 256;

fn scenery() -> Scenery {
    Scenery::new(1).with(|plan| {
        (plan.volume_bytes, plan.disk_bytes) = (LEAVES * 512 * BLOCK, 256 << 20);
        (plan.map_cache_bytes, plan.writeback_bytes) = (8 << 20, 4 << 20);
        (plan.segment_bytes, plan.bypass_bytes) = (1 << 20, 512 << 10);
        (plan.fold_runs, plan.slice_runs) = (2000, SLICE);
        plan.audit_every = Duration::from_secs(3600);
    })
}

/// No turn was longer than a slice and what that goes to the end of; and some were as long as a slice.
fn judge(stage: &mut Stage) {
    let (longest, of) = stage.world().longest_slice;
    println!("{longest} runs of {SLICE} in a turn, {of}; {:?}", stage.status().counters);
    assert!(longest < SLICE + LEAF.max(PART), "guests have waited for a turn of {longest} runs: {of}");
    assert!(longest >= SLICE, "no turn was a whole slice, but of {longest} runs");
}

/// Elements that a slice may go through without asking whether it has come to its end.
const AT_ONCE: usize = 32;

/// No turn that ended with that work was longer than a slice, and what that goes to the end of; and there were some.
fn judge_part(stage: &mut Stage, of: &str, slice: usize, beyond: usize) {
    let longest = stage.world().longest_slices.get(of).copied().unwrap_or_default();
    println!("{of}: {longest} of {slice} in a turn");
    assert!(longest > 0, "nothing was done of: {of}");
    assert!(longest < slice + beyond, "guests have waited for a turn of {longest} elements: {of}");
}

/// Many small segments, and short slices.
fn small_segments(volume_bytes: u64, slice: usize) -> Scenery {
    Scenery::new(1).with(|plan| {
        (plan.volume_bytes, plan.disk_bytes) = (volume_bytes, 192 << 20);
        (plan.map_cache_bytes, plan.writeback_bytes) = (8 << 20, 4 << 20);
        plan.slice_runs = slice;
        plan.audit_every = Duration::from_secs(3600);
    })
}

#[test]
fn dead_segments_are_condemned_in_slices() {
    const SHORT: usize = 16;
    const BLOCKS: u64 = 8192;
    let mut stage = small_segments(BLOCKS * BLOCK, SHORT).raise();
    (0..BLOCKS).step_by(256).for_each(|block| stage.write(block, 256));
    stage.until("all is in segments", |s| s.status().segment_count > 200);
    (0..BLOCKS).step_by(256).for_each(|block| stage.discard(block, 256));
    stage.until("dead segments are freed", |s| s.status().segment_count < 50);
    judge_part(&mut stage, "checkpoint: dead segments are condemned", SHORT, AT_ONCE);
    stage.finish();
}

#[test]
fn what_lives_in_victims_of_the_cleaner_is_looked_up_in_slices() {
    const SHORT: usize = 16;
    // An extent of a whole segment, block by block.
    const EXTENT: usize = 1 + 32;
    let (mut stage, mut prng) = (small_segments(8 << 20, SHORT).raise(), Prng::new(3));
    let owner = stage.owner();
    for _ in 0..256 {
        let asked: Vec<_> = (0..32).map(|_| stage.ask(owner, What::Write(0), prng.below(2048), 1)).collect();
        stage.until("the writes are answered", |s| asked.iter().all(|token| s.is_answered(*token)));
    }
    stage.until("some is cleaned", |s| s.status().counters.segments_cleaned >= 16);
    judge_part(&mut stage, "cleaner: what lives is looked up", SHORT, EXTENT);
    stage.finish();
}

#[test]
fn a_fold_of_many_leaves_is_done_in_slices() {
    let (mut stage, mut prng) = (scenery().raise(), Prng::new(1));
    for _ in 0..4 {
        write_at_random(&mut stage, &mut prng, 2048);
    }
    stage.until("folds are done", |s| s.status().counters.folds >= 2);
    judge(&mut stage);
    judge_part(&mut stage, "fold: runs are looked at", SLICE, AT_ONCE);
    stage.finish();
}

#[test]
fn a_checkpoint_of_many_runs_is_captured_in_slices() {
    let scenery = scenery().with(|plan| plan.fold_runs = 1_000_000);
    let (mut stage, mut prng) = (scenery.raise(), Prng::new(2));
    write_at_random(&mut stage, &mut prng, 8192);
    let before = stage.status().counters.checkpoints;
    stage.until("checkpoints are done", |s| s.status().counters.checkpoints >= before + 2);
    judge(&mut stage);
    stage.finish();
}
