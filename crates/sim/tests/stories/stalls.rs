//! No guest waits for maintenance: whatever has to be done goes in slices, and requests have their turns in between. A
//! machine has no clock: what is bounded is the work of a turn, in runs of the map (see `Config::slice_runs_max`).

use holdfast_base::Prng;
use holdfast_sim::scenario::{BLOCK, Cluster, Setup};
use holdfast_sim::workload::What;
use std::time::Duration;

const SLICE: usize = 512;

/// A slice goes on to the end of what it is at: a leaf that is full, the one that it replaces, and what lies over it.
const LEAF: usize = 3 * 512;

const LEAVES: u64 = 48;

/// Single blocks at random places of the whole volume.
fn write_at_random(cluster: &mut Cluster, prng: &mut Prng, count: u64) {
    let owner = cluster.owner();
    for _ in 0..count / 32 {
        let asked: Vec<_> = (0..32).map(|_| cluster.ask(owner, What::Write(0), prng.below(LEAVES * 512), 1)).collect();
        cluster.until("the writes are answered", |s| asked.iter().all(|token| s.is_answered(*token)));
    }
}

/// Or to the end of a part of a checkpoint, which is copied and summed: a quarter of a segment.
const PART: usize = (1 << 20) / 4 / 256;

fn setup() -> Setup {
    Setup::new(1).with(|plan| {
        (plan.volume_bytes, plan.disk_bytes) = (LEAVES * 512 * BLOCK, 256 << 20);
        (plan.map_cache_bytes, plan.writeback_bytes) = (8 << 20, 4 << 20);
        (plan.segment_bytes, plan.direct_bytes) = (1 << 20, 512 << 10);
        (plan.fold_runs, plan.slice_runs) = (2000, SLICE);
        plan.audit_every = Duration::from_secs(3600);
    })
}

/// No turn was longer than a slice and what that goes to the end of; and some were as long as a slice.
fn judge(cluster: &mut Cluster) {
    let (longest, of) = cluster.world().longest_slice;
    println!("{longest} runs of {SLICE} in a turn, {of}; {:?}", cluster.status().counters);
    assert!(longest < SLICE + LEAF.max(PART), "guests have waited for a turn of {longest} runs: {of}");
    assert!(longest >= SLICE, "no turn was a whole slice, but of {longest} runs");
}

/// Elements that a slice may go through without asking whether it has come to its end.
const AT_ONCE: usize = 32;

/// No turn that ended with that work was longer than a slice, and what that goes to the end of; and there were some.
fn judge_part(cluster: &mut Cluster, of: &str, slice: usize, beyond: usize) {
    let longest = cluster.world().longest_slices.get(of).copied().unwrap_or_default();
    println!("{of}: {longest} of {slice} in a turn");
    assert!(longest > 0, "nothing was done of: {of}");
    assert!(longest < slice + beyond, "guests have waited for a turn of {longest} elements: {of}");
}

/// Many small segments, and short slices.
fn small_segments(volume_bytes: u64, slice: usize) -> Setup {
    Setup::new(1).with(|plan| {
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
    let mut cluster = small_segments(BLOCKS * BLOCK, SHORT).start();
    (0..BLOCKS).step_by(256).for_each(|block| cluster.write(block, 256));
    cluster.until("all is in segments", |s| s.status().segment_count > 200);
    (0..BLOCKS).step_by(256).for_each(|block| cluster.discard(block, 256));
    cluster.until("dead segments are freed", |s| s.status().segment_count < 50);
    judge_part(&mut cluster, "checkpoint: dead segments are condemned", SHORT, AT_ONCE);
    cluster.finish();
}

#[test]
fn an_audit_is_done_in_slices() {
    const SHORT: usize = 16;
    const BLOCKS: u64 = 8192;
    // A place that is looked at, with the runs of its leaf.
    const PLACE: usize = 256 + 512;
    let setup = small_segments(BLOCKS * BLOCK, SHORT).with(|plan| plan.audit_every = Duration::from_secs(1));
    let (mut cluster, mut prng) = (setup.start(), Prng::new(4));
    let owner = cluster.owner();
    (0..BLOCKS).step_by(256).for_each(|block| cluster.write(block, 256));
    for _ in 0..32 {
        let asked: Vec<_> = (0..32).map(|_| cluster.ask(owner, What::Write(0), prng.below(BLOCKS), 1)).collect();
        cluster.until("the writes are answered", |s| asked.iter().all(|token| s.is_answered(*token)));
    }
    let before = cluster.status().counters.audits;
    cluster.until("rounds are done", |s| s.status().counters.audits >= before + 2);
    judge_part(&mut cluster, "audit: leaves are counted", SHORT, PLACE);
    judge_part(&mut cluster, "audit: what the overlay names is counted", SHORT, 1);
    judge_part(&mut cluster, "audit: accounts are compared", SHORT, 1);
    cluster.finish();
}

#[test]
fn what_lives_in_victims_of_the_cleaner_is_looked_up_in_slices() {
    const SHORT: usize = 16;
    // An extent of a whole segment, block by block.
    const EXTENT: usize = 1 + 32;
    let (mut cluster, mut prng) = (small_segments(8 << 20, SHORT).start(), Prng::new(3));
    let owner = cluster.owner();
    for _ in 0..256 {
        let asked: Vec<_> = (0..32).map(|_| cluster.ask(owner, What::Write(0), prng.below(2048), 1)).collect();
        cluster.until("the writes are answered", |s| asked.iter().all(|token| s.is_answered(*token)));
    }
    cluster.until("some is cleaned", |s| s.status().counters.segments_cleaned >= 16);
    judge_part(&mut cluster, "cleaner: what lives is looked up", SHORT, EXTENT);
    cluster.finish();
}

#[test]
fn a_fold_of_many_leaves_is_done_in_slices() {
    let (mut cluster, mut prng) = (setup().start(), Prng::new(1));
    for _ in 0..4 {
        write_at_random(&mut cluster, &mut prng, 2048);
    }
    cluster.until("folds are done", |s| s.status().counters.folds >= 2);
    judge(&mut cluster);
    judge_part(&mut cluster, "fold: runs are looked at", SLICE, AT_ONCE);
    cluster.finish();
}

#[test]
fn a_checkpoint_of_many_runs_is_captured_in_slices() {
    let setup = setup().with(|plan| plan.fold_runs = 1_000_000);
    let (mut cluster, mut prng) = (setup.start(), Prng::new(2));
    write_at_random(&mut cluster, &mut prng, 8192);
    let before = cluster.status().counters.checkpoints;
    cluster.until("checkpoints are done", |s| s.status().counters.checkpoints >= before + 2);
    judge(&mut cluster);
    cluster.finish();
}

#[test]
fn an_owner_that_crashed_is_followed_by_an_opening_in_slices() {
    let setup = setup().with(|plan| plan.fold_runs = 1_000_000);
    let (mut cluster, mut prng) = (setup.start(), Prng::new(4));
    write_at_random(&mut cluster, &mut prng, 8192);
    cluster.crash_host(0);
    cluster.take_over_on(1);
    judge_part(&mut cluster, "opening: the map is read", SLICE, PART);
    judge_part(&mut cluster, "opening: the log is put together", SLICE, LEAF);
    judge_part(&mut cluster, "opening: what is in the log is counted", SLICE, LEAF);
    cluster.read(0, 1024);
    cluster.finish();
}

#[test]
fn a_separate_clone_is_made_in_slices_while_guests_write() {
    let setup = setup().with(|plan| {
        (plan.fold_runs, plan.separate_max) = (1_000_000, 0);
        // Each turn goes through a small part.
        plan.slice_runs = SLICE / 4;
    });
    let (mut cluster, mut prng) = (setup.start(), Prng::new(5));
    write_at_random(&mut cluster, &mut prng, 4096);
    let name = cluster.snapshot();
    write_at_random(&mut cluster, &mut prng, 512);
    let clone = cluster.begin_separate(&name);
    write_at_random(&mut cluster, &mut prng, 1024);
    cluster.until_made(clone);
    judge_part(&mut cluster, "sharing: a clone's map is encoded", SLICE / 4, PART);
    judge_part(&mut cluster, "sharing: what a clone needs is looked for in the log", SLICE / 4, LEAF);
    judge_part(&mut cluster, "sharing: what is kept is marked", SLICE / 4, AT_ONCE);
    cluster.drop_snapshot(&name);
    write_at_random(&mut cluster, &mut prng, 512);
    cluster.read_member(clone);
    cluster.finish();
}

#[test]
fn what_a_lost_node_takes_with_it_is_found_and_made_again_in_slices() {
    const SHORT: usize = 16;
    const BLOCKS: u64 = 8192;
    let setup = small_segments(BLOCKS * BLOCK, SHORT).nodes(4).with(|plan| plan.rebuild_after = Duration::from_secs(1));
    let mut cluster = setup.start();
    (0..BLOCKS).step_by(256).for_each(|block| cluster.write(block, 256));
    cluster.until("all is in segments", |s| s.status().segment_count > 200);
    cluster.world().longest_slices.clear();
    cluster.crash_node(0);
    cluster.until("it is missed", |s| s.status().degraded_segments > 50);
    cluster.until("all is made again elsewhere", |s| s.status().degraded_segments == 0);
    judge_part(&mut cluster, "survey: segments are judged", SHORT, AT_ONCE);
    judge_part(&mut cluster, "repairs: what is lost is looked for", SHORT, AT_ONCE);
    cluster.drain(Some((1, 0)));
    let device = cluster.device(1, 0);
    let has_left = |s: &Cluster| s.controller().left_to_drain().iter().all(|(d, left)| *d != device || *left == 0);
    cluster.until("the device is drained", has_left);
    judge_part(&mut cluster, "moves: what is to move is looked for", SHORT, AT_ONCE);
    cluster.finish();
}

#[test]
fn a_long_log_is_forgotten_in_slices() {
    const SHORT: usize = 64;
    let setup = setup().with(|plan| plan.slice_runs = SHORT);
    let (mut cluster, mut prng) = (setup.start(), Prng::new(6));
    write_at_random(&mut cluster, &mut prng, 2048);
    cluster.until("all is destaged", |s| s.status().log_bytes < 4096);
    judge_part(&mut cluster, "log: entries are forgotten", SHORT, 1);
    cluster.close();
    cluster.open_on(1);
    cluster.read(0, 1024);
    cluster.finish();
}
