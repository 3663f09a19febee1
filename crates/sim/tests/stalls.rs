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
        plan.mark_every = Duration::from_secs(3600);
    })
}

/// No turn was longer than a slice and what that goes to the end of; and some were as long as a slice.
fn judge(stage: &mut Stage) {
    let (longest, of) = stage.world().longest_slice;
    println!("{longest} runs of {SLICE} in a turn, {of}; {:?}", stage.status().counters);
    assert!(longest < SLICE + LEAF.max(PART), "guests have waited for a turn of {longest} runs: {of}");
    assert!(longest >= SLICE, "no turn was a whole slice, but of {longest} runs");
}

#[test]
fn a_fold_of_many_leaves_is_done_in_slices() {
    let (mut stage, mut prng) = (scenery().raise(), Prng::new(1));
    for _ in 0..4 {
        write_at_random(&mut stage, &mut prng, 2048);
    }
    stage.until("folds are done", |s| s.status().counters.folds >= 2);
    judge(&mut stage);
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
