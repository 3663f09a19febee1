//! Stories of tiers: where data are born, what leaves the first tier, what dies there, and what happens when a tier is full or
//! gone.
//!
//! As in `scenarios`, every story ends with `finish`, which heals, reads everything back and judges it.

use holdfast_base::MediaClass;
use holdfast_format::geometry::Layout;
use holdfast_format::tier::{FirstTier, TierSize, Tiers};
use holdfast_sim::disk::DiskFaults;
use holdfast_sim::stage::{Scenery, Stage};
use holdfast_volume::TierUse;
use std::time::Duration;

const MIB: u64 = 1 << 20;

/// Segments are of 128 KiB.
const SEGMENT: u64 = 128 << 10;

fn first(layout: &str, media: Option<MediaClass>, bytes: u64) -> FirstTier {
    FirstTier { layout: layout.parse().unwrap(), media, size: TierSize::Bytes(bytes) }
}

/// Four nodes, in each an SSD and two disks; a mirror of that size on flash, parity on disks.
fn hybrid(seed: u64, bytes: u64) -> Scenery {
    Scenery::new(seed).layout("parity:2+1").nodes(4).disks(3).with(|plan| {
        plan.media = vec![MediaClass::Ssd, MediaClass::Hdd, MediaClass::Hdd];
        let first = first("mirror:2", Some(MediaClass::Ssd), bytes);
        plan.tiers = Tiers { first: Some(first), capacity: Some(MediaClass::Hdd) };
        plan.volume_bytes = 8 * MIB;
    })
}

/// Mirror-accelerated parity: all media alike.
fn alike(seed: u64, bytes: u64) -> Scenery {
    Scenery::new(seed).layout("parity:2+1").nodes(4).disks(1).with(|plan| {
        plan.tiers = Tiers { first: Some(first("mirror:2", None, bytes)), capacity: None };
        plan.volume_bytes = 8 * MIB;
    })
}

fn tier(stage: &Stage) -> TierUse {
    stage.status().first_tier.expect("a first tier")
}

/// Bytes of guests' data by layout.
fn data_in(stage: &mut Stage, layout: &str) -> u64 {
    let layout: Layout = layout.parse().unwrap();
    let at = stage.owner();
    let anatomy = stage.world().machine(at).expect("the owner runs").anatomy();
    anatomy.segments.iter().filter(|s| s.is_data && s.layout == layout).map(|s| s.bytes).sum()
}

/// Bytes of shards on the disks of one place in every node, as far as the volume knows.
fn held_on(stage: &mut Stage, slots: &[usize]) -> u64 {
    let devices: Vec<_> = (0..4).flat_map(|node| slots.iter().map(move |slot| (node, *slot))).collect();
    let ids: Vec<_> = devices.into_iter().map(|(node, slot)| stage.device(node, slot)).collect();
    let at = stage.owner();
    let anatomy = stage.world().machine(at).expect("the owner runs").anatomy();
    anatomy.devices.iter().filter(|d| ids.contains(&d.leg.device)).map(|d| d.bytes).sum()
}

/// Writes that go through the log, so many blocks each, one after the other from a block on.
fn fill(stage: &mut Stage, from: u64, blocks: u64) {
    for block in (from..from + blocks).step_by(8) {
        stage.write(block, 8);
    }
}

fn destage(stage: &mut Stage) {
    stage.until("all is destaged", |s| s.status().log_bytes == 0 || s.status().log_bytes < SEGMENT);
}

#[test]
fn what_is_written_is_born_on_flash_and_leaves_it_by_age() {
    let mut stage = hybrid(2600, 2 * MIB).raise();
    fill(&mut stage, 0, 96);
    destage(&mut stage);
    assert!(data_in(&mut stage, "mirror:2") > 0);
    assert_eq!(data_in(&mut stage, "parity:2+1"), 0, "a quarter of the tier stays");
    assert_eq!(held_on(&mut stage, &[1, 2]), 0);
    for from in (96..1496).step_by(56) {
        fill(&mut stage, from, 56);
        stage.pass_ms(40);
    }
    stage.until("guests rest, and a quarter is left", |s| tier(s).bytes <= MIB / 2 + SEGMENT);
    let told = tier(&stage);
    assert!(told.rotated_bytes >= 4 * MIB && told.bytes_max == 2 * MIB, "{told:?}");
    assert!(data_in(&mut stage, "parity:2+1") > 6 * MIB);
    assert!(held_on(&mut stage, &[1, 2]) > 6 * MIB);
    stage.finish();
}

#[test]
fn it_never_runs_into_a_wall() {
    for (seed, scenery) in [(2610, hybrid(2610, 2 * MIB)), (2611, alike(2611, 2 * MIB))] {
        let mut stage = scenery.raise();
        let mut most = 0;
        for round in 0..4 {
            for from in (0..2048).step_by(64) {
                fill(&mut stage, (from + 17 * round) % 1984, 64);
                stage.pass_ms(40);
                most = most.max(tier(&stage).bytes);
            }
        }
        let told = tier(&stage);
        assert!(most <= 2 * MIB + 4 * SEGMENT, "seed {seed}: {most} of 2 MiB, {told:?}");
        assert!(told.passed_bytes <= told.born_bytes / 10, "seed {seed}: most is born in the first tier: {told:?}");
        stage.finish();
    }
}

#[test]
fn what_is_overwritten_soon_dies_before_it_is_moved() {
    let mut stage = alike(2620, 4 * MIB).raise();
    fill(&mut stage, 0, 256);
    // A megabyte of it is written over and over, eight times what the tier holds.
    for _ in 0..32 {
        fill(&mut stage, 0, 256);
        destage(&mut stage);
    }
    let told = tier(&stage);
    assert!(told.born_bytes > 4 * MIB, "{told:?}");
    assert!(told.rotated_bytes * 4 < told.born_bytes, "{told:?}");
    stage.finish();
}

#[test]
fn bulk_writes_skip_a_first_tier_that_is_no_faster() {
    let mut stage = alike(2630, 2 * MIB).raise();
    for block in (0..1024).step_by(32) {
        stage.write(block, 32);
    }
    assert_eq!(tier(&stage).born_bytes, 0);
    let mut stage = hybrid(2631, 2 * MIB).raise();
    for block in (0..1024).step_by(32) {
        stage.write(block, 32);
    }
    assert!(tier(&stage).born_bytes >= 2 * MIB, "{:?}", tier(&stage));
    stage.finish();
}

#[test]
fn with_flash_gone_everything_goes_on_and_comes_back() {
    let mut stage = hybrid(2640, 4 * MIB).raise();
    fill(&mut stage, 0, 512);
    // One by one, and time in between to make again what was lost.
    for node in 0..3 {
        stage.lose_disk(node, 0);
        fill(&mut stage, 64 * node as u64, 64);
        // What nothing was written to is not known to be gone yet: until then all seems whole.
        stage.pass(Duration::from_secs(20));
        stage.until("what was lost is made again", Stage::is_whole);
    }
    fill(&mut stage, 600, 256);
    stage.read(0, 1024);
    destage(&mut stage);
    for node in 0..3 {
        stage.crash_node(node);
        stage.world().nodes[node].disks[0].faults = DiskFaults::default();
        stage.world().format_disk(node, 0);
        stage.start_node(node);
        stage.pass(Duration::from_secs(2));
        stage.until("it is back", Stage::is_whole);
    }
    let before = tier(&stage).born_bytes;
    fill(&mut stage, 900, 128);
    destage(&mut stage);
    let told = tier(&stage);
    assert!(told.born_bytes > before, "data are born on flash again: {told:?}");
    stage.until("what went elsewhere is where it belongs", |s| held_elsewhere(s) == 0);
    stage.finish();
}

/// Segments that lie neither where they are born nor where they end.
fn held_elsewhere(stage: &Stage) -> u64 {
    stage.status().astray_segments
}

#[test]
fn a_full_capacity_tier_leaves_data_where_it_was_born_and_a_full_first_tier_passes_on() {
    // Flash is smaller than what may be born there.
    let mut stage = hybrid(2650, 6 * MIB).with(|plan| plan.disk_bytes = 12 * MIB).raise();
    fill(&mut stage, 0, 2048);
    stage.read(0, 2048);
    stage.finish();
}

#[test]
fn tiers_come_and_go_while_a_volume_is_used() {
    let mut stage = hybrid(2660, 4 * MIB).raise();
    let tiers = stage.status().tiers;
    fill(&mut stage, 0, 512);
    stage.set_tiers(Tiers::default());
    fill(&mut stage, 256, 512);
    stage.until("mirrors are coded", |s| s.status().degraded_segments == 0);
    destage(&mut stage);
    assert!(stage.status().first_tier.is_none());
    stage.until("no mirror is left", |s| s.status().degraded_segments == 0 && s.status().log_bytes < SEGMENT);
    assert_eq!(data_in(&mut stage, "mirror:2"), 0);
    stage.set_tiers(tiers);
    stage.until("data have left flash", |s| s.status().astray_segments == 0);
    fill(&mut stage, 1024, 256);
    destage(&mut stage);
    assert!(tier(&stage).born_bytes > 0);
    stage.set_layout("mirror:3");
    assert!(stage.status().first_tier.is_none(), "a tier that bears less counts as none");
    stage.until("all is in three copies", |s| s.status().degraded_segments == 0);
    stage.finish();
}

#[test]
fn owners_that_die_while_data_moves_lose_nothing() {
    for seed in 2670..2682 {
        let mut stage = if seed % 2 == 0 { hybrid(seed, MIB) } else { alike(seed, MIB) }.raise();
        for round in 0..4 {
            fill(&mut stage, round * 320, 640);
            stage.pass(Duration::from_millis(7 * seed % 40));
            let host = (round % 2) as usize;
            stage.crash_host(host);
            stage.take_over_on(1 - host);
            stage.start_host(host);
        }
        stage.finish();
    }
}
