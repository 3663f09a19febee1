//! Stories of tiers: where data are born, what leaves the first tier, what dies there, and what happens when a tier is full or
//! gone.
//!
//! As in `scenarios`, every story ends with `finish`, which heals, reads everything back and judges it.

use holdfast_base::MediaClass;
use holdfast_format::geometry::Layout;
use holdfast_format::tier::{FirstTier, TierSize, Tiers};
use holdfast_sim::disk::DiskFaults;
use holdfast_sim::scenario::{Cluster, Setup};
use holdfast_volume::TierUse;
use std::time::Duration;

const MIB: u64 = 1 << 20;

/// Segments are of 128 KiB.
const SEGMENT: u64 = 128 << 10;

fn first(layout: &str, media: Option<MediaClass>, bytes: u64) -> FirstTier {
    FirstTier { layout: layout.parse().unwrap(), media, size: TierSize::Bytes(bytes) }
}

/// Four nodes, in each an SSD and two disks; a mirror of that size on flash, parity on disks.
fn hybrid(seed: u64, bytes: u64) -> Setup {
    Setup::new(seed).layout("parity:2+1").nodes(4).disks(3).with(|plan| {
        plan.media = vec![MediaClass::Ssd, MediaClass::Hdd, MediaClass::Hdd];
        let first = first("mirror:2", Some(MediaClass::Ssd), bytes);
        plan.tiers = Tiers { first: Some(first), capacity: Some(MediaClass::Hdd) };
        plan.volume_bytes = 8 * MIB;
    })
}

/// Mirror-accelerated parity: all media alike.
fn alike(seed: u64, bytes: u64) -> Setup {
    Setup::new(seed).layout("parity:2+1").nodes(4).disks(1).with(|plan| {
        plan.tiers = Tiers { first: Some(first("mirror:2", None, bytes)), capacity: None };
        plan.volume_bytes = 8 * MIB;
    })
}

fn tier(cluster: &Cluster) -> TierUse {
    cluster.status().first_tier.expect("a first tier")
}

/// Bytes of guests' data by layout.
fn data_in(cluster: &mut Cluster, layout: &str) -> u64 {
    let layout: Layout = layout.parse().unwrap();
    let at = cluster.owner();
    let anatomy = cluster.world().machine(at).expect("the owner runs").anatomy();
    anatomy.segments.iter().filter(|s| s.is_data && s.layout == layout).map(|s| s.bytes).sum()
}

/// Bytes of shards on the disks of one place in every node, as far as the volume knows.
fn held_on(cluster: &mut Cluster, slots: &[usize]) -> u64 {
    let devices: Vec<_> = (0..4).flat_map(|node| slots.iter().map(move |slot| (node, *slot))).collect();
    let ids: Vec<_> = devices.into_iter().map(|(node, slot)| cluster.device(node, slot)).collect();
    let at = cluster.owner();
    let anatomy = cluster.world().machine(at).expect("the owner runs").anatomy();
    anatomy.devices.iter().filter(|d| ids.contains(&d.leg.device)).map(|d| d.bytes).sum()
}

/// Writes that go through the log, so many blocks each, one after the other from a block on.
fn fill(cluster: &mut Cluster, from: u64, blocks: u64) {
    for block in (from..from + blocks).step_by(8) {
        cluster.write(block, 8);
    }
}

fn destage(cluster: &mut Cluster) {
    cluster.until("all is destaged", |s| s.status().log_bytes == 0 || s.status().log_bytes < SEGMENT);
}

#[test]
fn what_is_written_is_born_on_flash_and_leaves_it_by_age() {
    let mut cluster = hybrid(2600, 2 * MIB).start();
    fill(&mut cluster, 0, 96);
    destage(&mut cluster);
    assert!(data_in(&mut cluster, "mirror:2") > 0);
    assert_eq!(data_in(&mut cluster, "parity:2+1"), 0, "a quarter of the tier stays");
    assert_eq!(held_on(&mut cluster, &[1, 2]), 0);
    for from in (96..1496).step_by(56) {
        fill(&mut cluster, from, 56);
        cluster.pass_ms(40);
    }
    cluster.until("guests rest, and a quarter is left", |s| tier(s).bytes <= MIB / 2 + SEGMENT);
    let told = tier(&cluster);
    assert!(told.rotated_bytes >= 4 * MIB && told.bytes_max == 2 * MIB, "{told:?}");
    assert!(data_in(&mut cluster, "parity:2+1") > 6 * MIB);
    assert!(held_on(&mut cluster, &[1, 2]) > 6 * MIB);
    cluster.finish();
}

#[test]
fn it_never_runs_into_a_wall() {
    for (seed, setup) in [(2610, hybrid(2610, 2 * MIB)), (2611, alike(2611, 2 * MIB))] {
        let mut cluster = setup.start();
        let mut most = 0;
        for round in 0..4 {
            for from in (0..2048).step_by(64) {
                fill(&mut cluster, (from + 17 * round) % 1984, 64);
                cluster.pass_ms(40);
                most = most.max(tier(&cluster).bytes);
            }
        }
        let told = tier(&cluster);
        assert!(most <= 2 * MIB + 4 * SEGMENT, "seed {seed}: {most} of 2 MiB, {told:?}");
        assert!(told.passed_bytes <= told.born_bytes / 10, "seed {seed}: most is born in the first tier: {told:?}");
        cluster.finish();
    }
}

#[test]
fn what_is_overwritten_soon_dies_before_it_is_moved() {
    let mut cluster = alike(2620, 4 * MIB).start();
    fill(&mut cluster, 0, 256);
    // A megabyte of it is written over and over, eight times what the tier holds.
    for _ in 0..32 {
        fill(&mut cluster, 0, 256);
        destage(&mut cluster);
    }
    let told = tier(&cluster);
    assert!(told.born_bytes > 4 * MIB, "{told:?}");
    assert!(told.rotated_bytes * 4 < told.born_bytes, "{told:?}");
    cluster.finish();
}

#[test]
fn bulk_writes_skip_a_first_tier_that_is_no_faster() {
    let mut cluster = alike(2630, 2 * MIB).start();
    for block in (0..1024).step_by(32) {
        cluster.write(block, 32);
    }
    assert_eq!(tier(&cluster).born_bytes, 0);
    let mut cluster = hybrid(2631, 2 * MIB).start();
    for block in (0..1024).step_by(32) {
        cluster.write(block, 32);
    }
    assert!(tier(&cluster).born_bytes >= 2 * MIB, "{:?}", tier(&cluster));
    cluster.finish();
}

#[test]
fn with_flash_gone_everything_goes_on_and_comes_back() {
    let mut cluster = hybrid(2640, 4 * MIB).start();
    fill(&mut cluster, 0, 512);
    // One by one, and time in between to make again what was lost.
    for node in 0..3 {
        cluster.lose_disk(node, 0);
        fill(&mut cluster, 64 * node as u64, 64);
        // What nothing was written to is not known to be gone yet: until then all seems whole.
        cluster.pass(Duration::from_secs(20));
        cluster.until("what was lost is made again", Cluster::is_whole);
    }
    fill(&mut cluster, 600, 256);
    cluster.read(0, 1024);
    destage(&mut cluster);
    for node in 0..3 {
        cluster.crash_node(node);
        cluster.world().nodes[node].disks[0].faults = DiskFaults::default();
        cluster.world().format_disk(node, 0);
        cluster.start_node(node);
        cluster.pass(Duration::from_secs(2));
        cluster.until("it is back", Cluster::is_whole);
    }
    let before = tier(&cluster).born_bytes;
    fill(&mut cluster, 900, 128);
    destage(&mut cluster);
    let told = tier(&cluster);
    assert!(told.born_bytes > before, "data are born on flash again: {told:?}");
    cluster.until("what went elsewhere is where it belongs", |s| held_elsewhere(s) == 0);
    cluster.finish();
}

/// Segments that lie neither where they are born nor where they end.
fn held_elsewhere(cluster: &Cluster) -> u64 {
    cluster.status().astray_segments
}

#[test]
fn a_full_capacity_tier_leaves_data_where_it_was_born_and_a_full_first_tier_passes_on() {
    // Flash is smaller than what may be born there.
    let mut cluster = hybrid(2650, 6 * MIB).with(|plan| plan.disk_bytes = 12 * MIB).start();
    fill(&mut cluster, 0, 2048);
    cluster.read(0, 2048);
    cluster.finish();
}

#[test]
fn tiers_come_and_go_while_a_volume_is_used() {
    let mut cluster = hybrid(2660, 4 * MIB).start();
    let tiers = cluster.status().tiers;
    fill(&mut cluster, 0, 512);
    cluster.set_tiers(Tiers::default());
    fill(&mut cluster, 256, 512);
    cluster.until("mirrors are coded", |s| s.status().degraded_segments == 0);
    destage(&mut cluster);
    assert!(cluster.status().first_tier.is_none());
    cluster.until("no mirror is left", |s| s.status().degraded_segments == 0 && s.status().log_bytes < SEGMENT);
    // One that is dead leaves the table with the next checkpoint.
    cluster.pass(Duration::from_secs(4));
    assert_eq!(data_in(&mut cluster, "mirror:2"), 0);
    cluster.set_tiers(tiers);
    cluster.until("data have left flash", |s| s.status().astray_segments == 0);
    fill(&mut cluster, 1024, 256);
    destage(&mut cluster);
    assert!(tier(&cluster).born_bytes > 0);
    cluster.set_layout("mirror:3");
    assert!(cluster.status().first_tier.is_none(), "a tier that bears less counts as none");
    cluster.until("all is in three copies", |s| s.status().degraded_segments == 0);
    cluster.finish();
}

#[test]
fn owners_that_die_while_data_moves_lose_nothing() {
    for seed in 2670..2682 {
        let mut cluster = if seed % 2 == 0 { hybrid(seed, MIB) } else { alike(seed, MIB) }.start();
        for round in 0..4 {
            fill(&mut cluster, round * 320, 640);
            cluster.pass(Duration::from_millis(7 * seed % 40));
            let host = (round % 2) as usize;
            cluster.crash_host(host);
            cluster.take_over_on(1 - host);
            cluster.start_host(host);
        }
        cluster.finish();
    }
}
