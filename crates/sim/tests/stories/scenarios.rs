//! One story a protocol rule, named after it, and the cases that bit other systems most often.
//!
//! Every story ends with `finish`: all faults are healed, everything is read back, and every answer that was given on the
//! way is judged. What is asserted before that is what the rule says beyond "no data is lost".

use holdfast_base::{BlockError, Epoch, MetaReply, MetaRequest, Prng};
use holdfast_format::root::root_key;
use holdfast_format::versions::Versions;
use holdfast_format::wire::{DeviceHealth, WIRE};
use holdfast_sim::disk::DiskFaults;
use holdfast_sim::scenario::{BLOCK, Cluster, Setup};
use holdfast_sim::swarm::VOLUME;
use holdfast_sim::workload::What;
use holdfast_volume::{GroupEnd, State, Why};
use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

fn cut_off(cluster: &mut Cluster, host: usize, nodes: &[usize]) {
    for node in nodes {
        cluster.world().block(host, *node, true, true);
    }
}

fn join(cluster: &mut Cluster, host: usize, nodes: &[usize]) {
    for node in nodes {
        cluster.world().unblock(host, *node);
    }
}

#[test]
fn rule_01_legs_are_devices_by_uuid() {
    // One holder's disk is swapped for a blank one, the other holder hangs: the log's end can't be known, so the taker
    // waits. When the other holder is back, everything is there.
    let mut cluster = Setup::long_destage(1).start();
    cluster.write(0, 8);
    let legs = cluster.leg_nodes();
    cluster.crash_host(0);
    cluster.swap_disks(legs[0]);
    cluster.world().pause_node(legs[1]);
    let taker = cluster.open_on(1);
    cluster.pass_ms(2000);
    assert_eq!(cluster.state(taker), Some(State::Opening), "it waits and does not truncate");
    cluster.world().resume_node(legs[1]);
    cluster.until("the volume is open", |s| s.state(taker) == Some(State::Open));
    cluster.read(0, 8);
    cluster.finish();
}

#[test]
fn rule_02_copies_lie_in_distinct_nodes() {
    for seed in 0..5 {
        let mut cluster = Setup::long_destage(seed).nodes(4).disks(2).start();
        let nodes = cluster.leg_nodes();
        assert_eq!(nodes.iter().collect::<BTreeSet<_>>().len(), nodes.len(), "legs {nodes:?} share a node");
        cluster.write(0, 8);
        cluster.crash_host(0);
        cluster.crash_node(nodes[0]);
        cluster.take_over_on(1);
        cluster.read(0, 8);
        cluster.finish();
    }
}

#[test]
fn rule_03_nothing_is_acknowledged_before_the_root_names_the_ledger() {
    let mut cluster = Setup::long_destage(3).nodes(4).start();
    cluster.write(0, 4);
    let (owner, legs, ledger) = (cluster.owner(), cluster.leg_nodes(), cluster.root().open_ledger().unwrap().id);
    let outage = cluster.now() + Duration::from_secs(3);
    cluster.world().meta.faults.unavailable_until = outage;
    cluster.crash_node(legs[0]);
    cluster.crash_node(legs[1]);
    let write = cluster.ask(owner, What::Write(0), 4, 1);
    cluster.pass_ms(2500);
    assert!(!cluster.is_answered(write), "its ledger is not in the root yet");
    cluster.until("the write is answered", |s| s.is_answered(write));
    assert_ne!(cluster.root().open_ledger().unwrap().id, ledger);
    cluster.finish();
}

#[test]
fn rule_04_late_acknowledgements_complete_nothing_after_the_freeze() {
    for seed in 0..6 {
        let mut cluster = Setup::long_destage(seed).nodes(4).start();
        cluster.write(0, 4);
        let (owner, legs) = (cluster.owner(), cluster.leg_nodes());
        cluster.world().meta.faults.unknown = 500;
        cluster.world().pause_node(legs[0]);
        cluster.world().pause_node(legs[1]);
        cluster.ask_writes(owner, 0, 6);
        cluster.pass_ms(150 + 100 * seed);
        // The answers that lay in the hanging nodes' sockets come now, in the middle of the roll.
        cluster.world().resume_node(legs[0]);
        cluster.pass_ms(30);
        cluster.crash_host(0);
        cluster.world().resume_node(legs[1]);
        cluster.take_over_on(1);
        cluster.read(0, 8);
        cluster.finish();
    }
}

#[test]
fn rule_05_who_cannot_finish_does_not_depose() {
    let mut cluster = Setup::long_destage(5).start();
    cluster.write(0, 4);
    let owner = cluster.owner();
    let legs = cluster.leg_nodes();
    cut_off(&mut cluster, 1, &legs[..2]);
    cluster.world().reset_connection(1, legs[0]);
    cluster.world().reset_connection(1, legs[1]);
    cluster.pass_ms(50);
    let taker = cluster.open_on(1);
    cluster.pass_ms(1500);
    assert_eq!((cluster.state(owner), cluster.state(taker)), (Some(State::Open), Some(State::Opening)));
    assert_eq!(cluster.root().epoch, Epoch(1));
    join(&mut cluster, 1, &legs);
    cluster.until("the taker serves", |s| s.state(taker) == Some(State::Open));
    cluster.read(0, 4);
    cluster.finish();
}

#[test]
fn rule_05_nothing_is_served_before_the_swap() {
    let mut cluster = Setup::long_destage(55).start();
    cluster.write(0, 4);
    cluster.crash_host(0);
    let taker = cluster.open_on(1);
    cluster.until("the epoch is claimed", |s| s.root().epoch == Epoch(2));
    let outage = cluster.now() + Duration::from_secs(3);
    cluster.world().meta.faults.unavailable_until = outage;
    let (read, write) = (cluster.ask(taker, What::Read, 0, 4), cluster.ask(taker, What::Write(0), 9, 1));
    cluster.pass_ms(2500);
    assert!(!cluster.is_answered(read) && !cluster.is_answered(write));
    cluster.finish();
}

#[test]
fn rule_06_promises_outlive_power_loss() {
    let mut cluster = Setup::long_destage(6).start();
    cluster.write(0, 4);
    let old = cluster.owner();
    cluster.world().pause_host(0);
    cluster.take_over_on(1);
    cluster.write(0, 4);
    cluster.power_loss();
    cluster.ask_writes(old, 0, 4);
    cluster.world().resume_host(0);
    cluster.until("the old owner is told", |s| s.state(old) == Some(State::Deposed));
    cluster.read(0, 4);
    cluster.finish();
}

#[test]
fn rule_07_leases_only_permit_take_over() {
    let mut cluster = Setup::new(7).start();
    let outage = cluster.now() + Duration::from_secs(8);
    cluster.world().meta.faults.unavailable_until = outage;
    for i in 0..200 {
        let start = cluster.now();
        cluster.write(i % 500, 2);
        assert!(cluster.now().since(start) < Duration::from_millis(200), "write {i} waited for the metadata store");
        cluster.pass_ms(20);
    }
    assert!(cluster.now() < outage, "all within the outage; {:?}", cluster.status());
    cluster.finish();
}

#[test]
fn rule_08_reads_are_fenced_too() {
    let mut cluster = Setup::long_destage(8).start();
    cluster.write(0, 4);
    let old = cluster.owner();
    // The old owner holds the data in its memory, and hears nothing.
    cut_off(&mut cluster, 0, &[0, 1, 2]);
    cluster.take_over_on(1);
    cluster.write(0, 4);
    let stale = cluster.ask(old, What::Read, 0, 4);
    cluster.pass_ms(300);
    assert!(!cluster.is_answered(stale), "it has no grant any more");
    cluster.finish();
}

#[test]
fn rule_09_margin_comes_back() {
    let mut cluster = Setup::long_destage(9).nodes(4).start();
    cluster.write(0, 16);
    let legs = cluster.leg_nodes();
    for leg in &legs[..2] {
        cluster.crash_node(*leg);
        cluster.pass_ms(100);
        cluster.until("no entry is at risk", |s| s.status().at_risk_entries == 0);
    }
    cluster.crash_host(0);
    cluster.start_node(legs[0]);
    cluster.take_over_on(1);
    cluster.read(0, 16);
    cluster.finish();
}

#[test]
fn rule_08_reads_are_answered_where_an_answer_takes_longer_than_a_grant_lasts() {
    for layout in ["parity:2+1", "mirror:3"] {
        let mut cluster = Setup::new(8).layout(layout).start();
        cluster.write(0, 16);
        for node in 0..3 {
            cluster.world().net.link_mut(0, node).slow = Duration::from_millis(110);
        }
        cluster.pass_ms(1000);
        for block in 0..8 {
            let start = cluster.now();
            cluster.read(block, 2);
            let took = cluster.now().since(start);
            assert!(took < Duration::from_millis(1000), "{layout}: a read took {took:?}");
        }
        cluster.finish();
    }
}

#[test]
fn rule_10_only_outliers_are_hedged() {
    let mut cluster = Setup::new(10).start();
    // Everything is slow: nobody is an outlier.
    for node in 0..3 {
        cluster.world().nodes[node].disks[0].slowness = 100;
    }
    let owner = cluster.owner();
    for round in 0..30 {
        cluster.ask_writes(owner, round * 8, 8);
        cluster.pass_ms(20);
    }
    cluster.pass_ms(500);
    let counters = cluster.status().counters;
    assert!(counters.append_hedges * 20 <= counters.writes + 20, "{} hedges", counters.append_hedges);
    cluster.finish();
}

#[test]
fn rule_11_every_batch_is_found_by_itself() {
    for step in 0..24 {
        let mut cluster = Setup::long_destage(step).start();
        cluster.write(0, 4);
        let owner = cluster.owner();
        cluster.ask_writes(owner, 0, 12);
        cluster.pass(Duration::from_micros(25 * step));
        cluster.power_loss();
        cluster.crash_host(0);
        cluster.take_over_on(1);
        cluster.read(0, 12);
        cluster.finish();
    }
}

#[test]
fn rule_12_a_commit_applies_only_where_the_map_names_its_source() {
    for step in 0..10 {
        let mut cluster = Setup::new(step).with(|plan| plan.destage_age = Duration::from_millis(20)).start();
        cluster.write(0, 16);
        // Overwritten and discarded while its segment is on the way.
        cluster.pass(Duration::from_millis(18) + Duration::from_micros(400 * step));
        cluster.write(0, 4);
        cluster.discard(4, 4);
        cluster.write(20, 1);
        cluster.pass_ms(60);
        cluster.read(0, 21);
        cluster.crash_host(0);
        cluster.take_over_on(1);
        cluster.read(0, 21);
        cluster.finish();
    }
}

#[test]
fn rule_13_bulk_writes_keep_their_place_in_the_order() {
    for step in 0..8 {
        let mut cluster = Setup::new(step).start();
        let owner = cluster.owner();
        cluster.ask(owner, What::Write(0), 0, 20);
        cluster.pass(Duration::from_micros(150 * step));
        cluster.ask(owner, What::Write(0), 2, 2);
        cluster.ask(owner, What::Write(0), 10, 24);
        cluster.ask(owner, What::Discard, 12, 4);
        cluster.pass_ms(20);
        cluster.read(0, 40);
        assert!(cluster.status().counters.direct_bytes > 0);
        cluster.crash_host(0);
        cluster.take_over_on(1);
        cluster.read(0, 40);
        cluster.finish();
    }
}

#[test]
fn rule_15_an_absent_metadata_store_never_fills_the_log() {
    let mut cluster = Setup::new(15).with(|plan| plan.writeback_bytes = 256 << 10).start();
    let outage = cluster.now() + Duration::from_secs(60);
    cluster.world().meta.faults.unavailable_until = outage;
    for i in 0..300 {
        cluster.write((i * 7) % 500, 4);
    }
    assert!(cluster.now() < outage, "4.7 MB went through a log of 256 KiB");
    cluster.world().meta.heal();
    cluster.crash_host(0);
    cluster.take_over_on(1);
    cluster.read(0, 500);
    cluster.finish();
}

#[test]
fn rule_16_a_hung_node_does_not_stall_a_direct_write() {
    for node in 0..4 {
        let mut cluster = Setup::new(16).nodes(4).layout("parity:2+1").start();
        cluster.write(0, 32);
        cluster.world().pause_node(node);
        let start = cluster.now();
        cluster.write(32, 32);
        let stalled = cluster.now().since(start);
        assert!(stalled < Duration::from_millis(600), "stalled for {stalled:?}");
        cluster.crash_node(node);
        cluster.read(0, 64);
        cluster.start_node(node);
        cluster.finish();
    }
}

/// Begun anew each time it is late, on the same disks and with their work doubled, it would never be done.
#[test]
fn a_direct_write_to_slow_disks_that_nothing_can_stand_in_for_is_done_at_their_pace() {
    for lost in 0..3 {
        let mut cluster = Setup::new(161).layout("parity:2+1").start();
        cluster.write(0, 32);
        cluster.crash_node(lost);
        for node in (0..3).filter(|node| *node != lost) {
            // A shard takes a second and more.
            cluster.world().nodes[node].disks[0].slowness = 5_000;
        }
        let before = cluster.status().counters.segments_written;
        cluster.write(32, 32);
        let begun = cluster.status().counters.segments_written - before;
        assert!(begun <= 10, "begun {begun} times");
        cluster.start_node(lost);
        cluster.finish();
    }
}

#[test]
fn rule_17_an_owner_that_dies_amid_segments_leaves_nothing_behind() {
    let mut cluster = Setup::new(17).with(|plan| plan.destage_age = Duration::from_millis(10)).start();
    for round in 0..8 {
        let owner = cluster.owner();
        cluster.ask(owner, What::Write(0), round * 16, 16);
        cluster.ask_writes(owner, round * 8, 8);
        cluster.pass(Duration::from_micros(700 * round + 300));
        let host = owner.host;
        cluster.crash_host(host);
        cluster.start_host(host);
        cluster.take_over_on(1 - host);
    }
    cluster.finish();
}

#[test]
fn rule_18_nothing_that_a_durable_checkpoint_names_is_freed() {
    let mut cluster = Setup::new(18).with(|plan| plan.destage_age = Duration::from_millis(10)).start();
    for round in 0..6 {
        cluster.write_segments(3);
        cluster.discard(round * 20, 64);
        cluster.pass_ms(7 * round);
        let host = cluster.owner().host;
        cluster.crash_host(host);
        cluster.start_host(host);
        cluster.take_over_on(1 - host);
        cluster.read(0, 256);
    }
    cluster.finish();
}

#[test]
fn rule_23_the_log_is_bounded_by_the_writeback_budget() {
    let mut cluster = Setup::new(23).with(|plan| plan.writeback_bytes = 256 << 10).start();
    let owner = cluster.owner();
    for i in 0..60 {
        cluster.ask_writes(owner, i * 8, 8);
        cluster.pass(Duration::from_micros(300));
        let log_bytes = cluster.status().log_bytes;
        assert!(log_bytes <= 2 * (256 << 10), "{log_bytes} bytes in the log");
    }
    cluster.finish();
}

#[test]
fn rule_24_a_checkpoint_writes_what_changed() {
    let mut cluster = Setup::new(24).with(|plan| plan.fold_runs = 100_000).start();
    for i in 0..120 {
        cluster.write((i * 37) % 500, 1);
    }
    cluster.pass_ms(3000);
    let counters = cluster.status().counters;
    assert!(counters.checkpoints > 0);
    assert!(counters.checkpoint_bytes <= counters.checkpoints * 3 * BLOCK, "{counters:?}");
    cluster.finish();
}

#[test]
fn rule_25_a_failed_device_is_alone() {
    let mut cluster = Setup::new(25).disks(2).start();
    cluster.write(0, 16);
    let faults = DiskFaults { write_error: 1000, ..DiskFaults::default() };
    cluster.world().nodes[0].disks[0].faults = faults;
    for i in 0..40 {
        cluster.write(i * 4, 4);
    }
    cluster.pass_ms(500);
    let now = cluster.now();
    let stats = cluster.world().nodes[0].stats(now);
    let health: Vec<DeviceHealth> = stats.iter().map(|s| s.health).collect();
    assert!(health.contains(&DeviceHealth::Serving), "the other device serves on: {health:?}");
    cluster.read(0, 160);
    cluster.finish();
}

// ---- by how often it bit others ----

#[test]
fn case_01_a_node_is_lost_during_an_ensemble_change() {
    for third in 0..3 {
        let mut cluster = Setup::long_destage(101).nodes(5).layout("mirror:3").start();
        cluster.write(0, 8);
        let legs = cluster.leg_nodes();
        let owner = cluster.owner();
        cluster.crash_node(legs[0]);
        cluster.ask_writes(owner, 0, 8);
        cluster.pass_ms(20 * third);
        cluster.crash_node(legs[1]);
        cluster.ask_writes(owner, 4, 8);
        cluster.pass_ms(400);
        cluster.crash_host(0);
        cluster.take_over_on(1);
        cluster.read(0, 12);
        cluster.finish();
    }
}

#[test]
fn case_02_two_reboots_in_sequence() {
    let mut cluster = Setup::long_destage(102).start();
    for node in [0, 1, 2, 0] {
        cluster.crash_node(node);
        cluster.write(0, 8);
        cluster.start_node(node);
        cluster.pass_ms(80);
    }
    cluster.read(0, 8);
    cluster.finish();
}

#[test]
fn case_03_a_leg_is_slow_not_dead() {
    let mut cluster = Setup::long_destage(103).start();
    cluster.write(0, 8);
    let legs = cluster.leg_nodes();
    cluster.world().nodes[legs[0]].disks[0].slowness = 2000;
    for i in 0..20 {
        let start = cluster.now();
        cluster.write(i * 2, 2);
        let took = cluster.now().since(start);
        assert!(took < Duration::from_millis(160), "write {i} took {took:?}");
    }
    cluster.finish();
}

#[test]
fn case_04_a_fenced_writer_goes_on_sending() {
    let mut cluster = Setup::new(104).start();
    cluster.write(0, 32);
    let old = cluster.owner();
    cluster.ask_writes(old, 0, 12);
    cluster.ask(old, What::Write(0), 0, 20);
    cluster.world().pause_host(0);
    cluster.take_over_on(1);
    cluster.write(0, 32);
    cluster.world().resume_host(0);
    cluster.ask_writes(old, 0, 12);
    cluster.pass_ms(500);
    assert_eq!(cluster.state(old), Some(State::Deposed));
    cluster.read(0, 32);
    cluster.finish();
}

#[test]
fn case_05_the_metadata_leader_is_lost_with_a_node() {
    let mut cluster = Setup::new(105).start();
    cluster.write(0, 16);
    let legs = cluster.leg_nodes();
    let outage = cluster.now() + Duration::from_millis(1500);
    cluster.world().meta.faults.unavailable_until = outage;
    cluster.crash_node(legs[0]);
    for i in 0..20 {
        let start = cluster.now();
        cluster.write(i, 2);
        assert!(cluster.now().since(start) < Duration::from_millis(250), "write {i} waited");
    }
    cluster.finish();
}

/// Where there is a node to spare the log moves to it. That needs the metadata store, and until it answers nothing completes in the
/// old ledger: it is left only for one that can be had.
#[test]
fn a_node_lost_while_the_metadata_store_is_away_stalls_no_write_where_another_could_take_its_place() {
    for (seed, layout, hangs) in [(112, "mirror:2", true), (113, "parity:2+1", true), (114, "parity:2+1", false)] {
        let mut cluster = Setup::new(seed).nodes(4).layout(layout).start();
        cluster.write(0, 16);
        cluster.pass_ms(2000);
        let node = cluster.leg_nodes()[0];
        let outage = cluster.now() + Duration::from_secs(8);
        cluster.world().meta.faults.unavailable_until = outage;
        if hangs {
            cluster.world().pause_node(node)
        } else {
            cluster.crash_node(node)
        }
        for i in 0..100 {
            let start = cluster.now();
            cluster.write(i, 2);
            let took = cluster.now().since(start);
            assert!(took < Duration::from_millis(250), "{layout}: write {i} waited {took:?}");
            cluster.pass_ms(30);
        }
        assert!(cluster.now() < outage, "all within the outage");
        cluster.until("the log moves on when the store is back", |s| !s.leg_nodes().contains(&node));
        if hangs {
            cluster.world().resume_node(node);
        }
        cluster.finish();
    }
}

#[test]
fn case_06_a_full_log_and_cleaning_debt_and_a_lost_node() {
    let setup = Setup::new(106).with(|plan| {
        plan.writeback_bytes = 256 << 10;
        plan.disk_bytes = 10 << 20;
        plan.sizing.journal_bytes = 3 << 20;
    });
    let mut cluster = setup.nodes(4).start();
    for i in 0..150 {
        cluster.write((i * 11) % 480, 8);
    }
    cluster.crash_node(0);
    for i in 0..150 {
        cluster.write((i * 13) % 480, 8);
    }
    cluster.finish();
}

#[test]
fn case_06_a_burst_that_is_larger_than_the_journals() {
    // Everything is asked for at once: were the journals filled to the brim, the checkpoint that frees them would find no
    // room for its record.
    let setup = Setup::new(206).with(|plan| {
        plan.writeback_bytes = 64 << 20;
        plan.volume_bytes = 8 << 20;
        plan.disk_bytes = 40 << 20;
        plan.sizing.journal_bytes = 3 << 20;
    });
    let mut cluster = setup.start();
    let owner = cluster.owner();
    let writes: Vec<_> = (0..160).map(|i| cluster.ask(owner, What::Write(0), i * 12, 12)).collect();
    for write in writes {
        cluster.until("a write is done", |s| s.is_answered(write));
    }
    cluster.finish();
}

#[test]
fn openings_that_die_leave_room_for_the_next() {
    // Each copies the log anew, since a node that held it is away, and dies while the old owner's read grants run out.
    let mut cluster = Setup::long_destage(306)
        .with(|plan| (plan.writeback_bytes, plan.sizing.journal_bytes) = (8 << 20, 3 << 20))
        .start();
    for block in 0..24 {
        cluster.write(block * 8, 8);
    }
    let lost = cluster.leg_nodes()[0];
    cluster.crash_node(lost);
    let host = cluster.owner().host;
    cluster.crash_host(host);
    cluster.start_host(host);
    cluster.die_opening(8);
    cluster.take_over_on(0);
    cluster.start_node(lost);
    cluster.finish();
}

#[test]
fn metadata_that_were_set_back_cost_nothing() {
    let mut cluster = Setup::long_destage(313).start();
    cluster.write(0, 8);
    let set_root = |cluster: &mut Cluster, value: Vec<u8>| {
        let (meta, key) = (&mut cluster.world().meta, root_key(VOLUME));
        let MetaReply::Record { version, .. } = meta.apply(&MetaRequest::Get { key: key.clone() }) else { panic!() };
        let swapped = meta.apply(&MetaRequest::Swap { key, expect: version, value: Some(value), guard: None });
        assert!(matches!(swapped, MetaReply::Swapped { .. }));
    };
    let old = cluster.root().encode();
    for round in 0..3 {
        cluster.crash_host(round % 2);
        cluster.start_host(round % 2);
        cluster.take_over_on(1 - round % 2);
        cluster.write(round as u64 * 8, 8);
    }
    let newest = cluster.root().encode();
    cluster.crash_host(1);
    cluster.start_host(1);
    set_root(&mut cluster, old.clone());
    // However often: the epoch must not come to be as high as what nodes have promised.
    for round in 0..8 {
        let opening = cluster.open_on(round % 2);
        cluster.pass_ms(600);
        assert_eq!(cluster.state(opening), Some(State::Opening));
        cluster.crash_host(round % 2);
        cluster.start_host(round % 2);
    }
    assert_eq!(cluster.root().encode(), old);
    set_root(&mut cluster, newest);
    cluster.take_over_on(0);
    cluster.read(0, 32);
    cluster.finish();
}

#[test]
fn case_07_a_crash_between_segment_and_commit() {
    for step in 0..12 {
        let mut cluster = Setup::new(107).start();
        cluster.write(0, 8);
        let owner = cluster.owner();
        cluster.ask(owner, What::Write(0), 0, 20);
        cluster.pass(Duration::from_micros(100 + 120 * step));
        cluster.crash_host(0);
        cluster.take_over_on(1);
        cluster.read(0, 20);
        cluster.finish();
    }
}

#[test]
fn case_08_torn_lost_and_misdirected_writes() {
    for seed in 0..4 {
        let mut cluster = Setup::new(seed).start();
        let faults = DiskFaults { lost_write: 200, misdirected_write: 100, ..DiskFaults::default() };
        cluster.world().set_disk_faults(0, faults);
        for i in 0..60 {
            cluster.write((i * 5) % 400, 5);
        }
        cluster.pass_ms(2000);
        cluster.read(0, 400);
        cluster.finish();
    }
}

#[test]
fn case_10_the_witness_is_lost_then_a_node() {
    let mut cluster = Setup::long_destage(110).start();
    cluster.write(0, 8);
    let outage = cluster.now() + Duration::from_secs(4);
    cluster.world().meta.faults.unavailable_until = outage;
    cluster.pass_ms(500);
    let legs = cluster.leg_nodes();
    cluster.crash_node(legs[1]);
    cluster.write(8, 8);
    assert!(cluster.now() < outage, "the standby needs no metadata store");
    cluster.read(0, 16);
    cluster.finish();
}

#[test]
fn case_12_a_clock_jumps_during_a_lease() {
    // To a process, a jump of the clock is a hang: suddenly everything has expired.
    let mut cluster = Setup::long_destage(112).start();
    cluster.write(0, 8);
    let owner = cluster.owner();
    cluster.world().pause_host(0);
    cluster.pass_ms(5000);
    let read = cluster.ask(owner, What::Read, 0, 8);
    cluster.world().resume_host(0);
    cluster.until("the read is answered", |s| s.is_answered(read));
    cluster.write(0, 8);
    let suspects = cluster.status().suspect_nodes;
    assert!(suspects.is_empty(), "{suspects:?} are judged by the sleeper's own fault");
    cluster.finish();
}

#[test]
fn a_deposed_owner_says_so() {
    let mut cluster = Setup::long_destage(200).start();
    cluster.write(0, 4);
    let old = cluster.owner();
    cluster.take_over_on(1);
    cluster.ask_writes(old, 0, 1);
    cluster.until("the old owner knows", |s| s.state(old) == Some(State::Deposed));
    let refused = BlockError::Deposed.to_string();
    assert!(refused.contains("another host"));
    cluster.finish();
}

#[test]
fn a_device_that_forgot_its_ledgers_is_made_whole() {
    // It comes back empty under its id, as after somebody restored its superblock: it serves, so its shards are made anew
    // on it, and the ledger that it lacks is left for one that it holds.
    let mut cluster = Setup::new(201).start();
    cluster.write_segments(4);
    let legs = cluster.leg_nodes();
    let rolls = cluster.status().counters.rolls;
    cluster.forget_disks(legs[0]);
    cluster.write(0, 8);
    cluster.until("the ledger is rolled", |s| s.status().counters.rolls > rolls);
    let rebuilt = Cluster::is_whole;
    cluster.until("redundancy is whole", rebuilt);
    assert!(cluster.status().counters.shards_rebuilt > 0, "what the device forgot was made anew");
    cluster.finish();
}

#[test]
fn a_volume_closes_although_it_cannot_be_destaged() {
    // Too few nodes are left for a segment: the log keeps what lies there, and the next owner finds it.
    let mut cluster = Setup::long_destage(202).start();
    cluster.write(0, 8);
    let legs = cluster.leg_nodes();
    let owner = cluster.owner();
    cluster.crash_node(legs[0]);
    cluster.crash_node(legs[1]);
    cluster.close();
    cluster.until("the volume is let go of", |s| s.owner() != owner);
    cluster.start_node(legs[0]);
    cluster.start_node(legs[1]);
    cluster.until("another opening serves", |s| s.serving().is_some());
    assert!(cluster.status().log_bytes >= 8 * BLOCK, "the log kept it");
    cluster.read(0, 8);
    cluster.finish();
}

#[test]
fn what_was_made_whole_bears_another_loss() {
    // Each node's disk is swapped for a blank one in turn; when redundancy is whole again, any other node may go, and a new
    // owner must be able to read everything that it needs, the checkpoint included.
    for lost in 0..4 {
        for next in (0..4).filter(|n| *n != lost) {
            let mut cluster = Setup::new(203).nodes(4).start();
            cluster.write_segments(6);
            cluster.pass_ms(4000);
            cluster.swap_disks(lost);
            cluster.write(0, 8);
            cluster.pass_ms(500);
            cluster.until("redundancy is whole", Cluster::is_whole);
            cluster.crash_host(0);
            cluster.crash_node(next);
            cluster.take_over_on(1);
            cluster.read(0, 256);
            cluster.finish();
        }
    }
}

#[test]
fn on_two_nodes_what_was_made_whole_bears_the_loss_of_the_other() {
    // While one is away the log lies on the other alone: until it is back on both, nothing is whole.
    for lost in 0..2 {
        let mut cluster = Setup::new(213).nodes(2).disks(2).start();
        cluster.write(0, 64);
        cluster.crash_node(lost);
        cluster.write(32, 64);
        cluster.start_node(lost);
        cluster.pass_ms(50);
        cluster.until("redundancy is whole", Cluster::is_whole);
        cluster.crash_host(0);
        cluster.crash_node(1 - lost);
        cluster.take_over_on(1);
        cluster.read(0, 128);
        cluster.finish();
    }
}

#[test]
fn more_reads_than_are_under_way_at_a_time_are_all_answered() {
    let mut cluster = Setup::new(205).start();
    cluster.write_segments(8);
    let owner = cluster.owner();
    let reads: Vec<_> = (0..96).map(|i| cluster.ask(owner, What::Read, i % 4 * 64, 256)).collect();
    cluster.crash_node(0);
    for read in reads {
        cluster.until("a read is answered", |s| s.is_answered(read));
    }
    cluster.finish();
}

#[test]
fn damage_in_different_places_of_two_shards_is_read_around() {
    // Each block can be had, but not all runs of several: those are read block by block. No block is damaged in two shards:
    // one node rots in even chunks, the other in odd ones.
    for seed in 0..12 {
        let mut cluster = Setup::new(seed).layout("parity:2+1").start();
        cluster.write_segments(8);
        cluster.pass_ms(1500);
        for node in 0..2 {
            let disk = &mut cluster.world().nodes[node].disks[0];
            let from = disk.silent_from;
            assert!(disk.rot_where(from, 40, |chunk| chunk % 2 == node) > 0, "something rots");
        }
        cluster.read(0, 256);
        assert!(cluster.status().counters.checksum_errors > 0, "seed {seed}: damage was met");
        cluster.until("it is repaired", |s| s.status().degraded_segments == 0);
        cluster.finish();
    }
}

#[test]
fn what_is_being_made_again_is_not_damaged_anew_by_being_read() {
    for seed in 0..8 {
        let mut cluster = Setup::new(seed).layout("mirror:2").start();
        cluster.write_segments(8);
        cluster.pass_ms(1500);
        let disk = &mut cluster.world().nodes[0].disks[0];
        let from = disk.silent_from;
        assert!(disk.rot(from, 12) > 0, "something rots");
        let owner = cluster.owner();
        // Also between the deletion of what is damaged and its successor.
        for _ in 0..400 {
            for block in (0..256).step_by(16) {
                cluster.ask(owner, What::Read, block, 16);
            }
            cluster.pass(Duration::from_micros(300));
        }
        cluster.until("it is repaired", |s| s.status().degraded_segments == 0);
        let counters = cluster.status().counters;
        assert!(counters.shards_rebuilt > 0, "seed {seed}: damage was met");
        assert_eq!(
            counters.checksum_errors, counters.shards_rebuilt,
            "seed {seed}: each is told of and made again once"
        );
        cluster.finish();
    }
}

#[test]
fn damage_that_nobody_reads_is_found_and_repaired() {
    // Bits rot on one node; a scrub finds them before the node with the other copies is lost.
    for seed in 0..4 {
        let mut cluster = Setup::new(seed).with(|plan| plan.scrub_every = Duration::from_secs(2)).start();
        if seed % 2 == 0 {
            // A node of the release before sends what it reads, and does not only tell whether it matches.
            cluster.crash_node(0);
            cluster.world().nodes[0].config.wire.newest = WIRE.oldest;
            cluster.start_node(0);
            cluster.pass(Duration::from_secs(3));
        }
        cluster.write_segments(8);
        cluster.pass_ms(1500);
        assert!(cluster.held_by(0) > 0, "seed {seed}: it has shards that can rot");
        let disk = &mut cluster.world().nodes[0].disks[0];
        let from = disk.silent_from;
        assert!(disk.rot(from, 30) > 0, "something rots");
        let scrubbed = cluster.status().counters.shards_scrubbed;
        let held = cluster.status().segment_count * 2;
        cluster.until("everything is scrubbed", |s| s.status().counters.shards_scrubbed > scrubbed + held + 2);
        cluster.until("it is repaired", |s| s.status().degraded_segments == 0);
        assert!(cluster.status().counters.shards_rebuilt > 0, "seed {seed}: damage was found");
        cluster.crash_node(1);
        cluster.read(0, 256);
        cluster.crash_host(0);
        cluster.take_over_on(1);
        cluster.finish();
    }
}

#[test]
fn nodes_are_brought_to_a_new_release_one_after_the_other_under_an_owner_of_either() {
    let mut cluster =
        Setup::new(212).layout("parity:2+1").with(|plan| plan.scrub_every = Duration::from_secs(2)).start();
    let old = Versions { newest: WIRE.oldest, ..WIRE };
    // All of the old release first; then up, and down again where the new one disappoints.
    for versions in [old, WIRE, old] {
        for node in 0..3 {
            cluster.crash_node(node);
            cluster.world().nodes[node].config.wire = versions;
            cluster.write(node as u64 * 32, 24);
            cluster.start_node(node);
            cluster
                .until("full redundancy", |s| s.status().suspect_nodes.is_empty() && s.status().degraded_segments == 0);
            let scrubbed = cluster.status().counters.shards_scrubbed;
            cluster.until("shards are scrubbed", |s| s.status().counters.shards_scrubbed > scrubbed + 6);
        }
    }
    cluster.finish();
}

#[test]
fn a_grid_that_is_more_than_half_full_takes_overwrites_for_ever() {
    // Space gets cut up and full of what is dead: the cleaner keeps up, and writes are slowed rather than refused.
    let cases = [
        (207, "parity:2+1", 24, 1),
        (208, "mirror:2", 18, 1),
        (209, "parity:2+1", 30, 1),
        (210, "parity:2+1", 32, 8),
        (211, "mirror:2", 24, 8),
    ];
    for (seed, layout, volume_mib, len) in cases {
        let setup = Setup::new(seed).nodes(4).layout(layout).with(|plan| {
            plan.volume_bytes = volume_mib << 20;
            plan.writeback_bytes = 2 << 20;
            plan.segment_bytes = 256 << 10;
            plan.sizing.journal_bytes = 3 << 20;
            // 15 MiB of each are for shards.
            plan.disk_bytes = 18_300 << 10;
        });
        let mut cluster = setup.start();
        let (owner, blocks) = (cluster.owner(), (volume_mib << 20) / BLOCK);
        for block in (0..blocks).step_by(16) {
            cluster.write(block, 16);
        }
        let mut prng = Prng::new(seed);
        let mut writes: VecDeque<_> = VecDeque::new();
        for i in 0..3 * blocks / len {
            // At random, and from front to back: then whole segments die.
            let block = if seed % 2 == 0 { i * len % blocks } else { prng.below(blocks / len) * len };
            writes.push_back(cluster.ask(owner, What::Write(0), block, len));
            if writes.len() >= 16 {
                let oldest = writes.pop_front().expect("just counted");
                cluster.until("a write is done", |s| s.is_answered(oldest));
            }
        }
        assert!(cluster.status().counters.segments_freed > 100);
        cluster.finish();
    }
}

#[test]
fn what_is_set_aside_for_others_is_not_written_to() {
    // Guests' writes stop at it; what was acknowledged, and what the volume does for itself, goes on.
    for layout in ["mirror:2", "parity:2+1"] {
        let mut cluster = Setup::new(220).nodes(4).layout(layout).start();
        cluster.write_segments(4);
        let owner = cluster.owner();
        let waiting: Vec<_> = (0..20).map(|i| cluster.ask(owner, What::Write(0), 3 * i, 2)).collect();
        cluster.set_aside(4, 1 << 40);
        for write in waiting {
            cluster.until("a write is answered", |s| s.is_answered(write));
        }
        let before = cluster.refused();
        cluster.write(100, 8);
        assert_eq!(cluster.refused(), before + 1, "nothing is left for it");
        cluster.discard(0, 16);
        cluster.read(0, 64);
        assert_eq!(cluster.refused(), before + 1, "discards and reads are not held back");
        let checkpoints = cluster.status().counters.checkpoints;
        cluster.until("what was acknowledged is destaged", |s| s.status().log_bytes < BLOCK);
        cluster.until("a checkpoint is written", |s| s.status().counters.checkpoints > checkpoints);
        // A successor learns of it anew.
        cluster.crash_host(0);
        cluster.take_over_on(1);
        cluster.set_aside(4, 0);
        cluster.write(100, 8);
        assert_eq!(cluster.refused(), before + 1, "the others have let go of it");
        cluster.finish();
    }
}

#[test]
fn a_snapshot_holds_what_was_there() {
    for layout in ["mirror:2", "parity:2+1"] {
        let mut cluster = Setup::new(210).nodes(4).layout(layout).start();
        cluster.write(0, 64);
        cluster.write(100, 30);
        let first = cluster.snapshot();
        cluster.write(10, 8);
        cluster.discard(100, 10);
        let second = cluster.snapshot();
        cluster.write(12, 2);
        cluster.write(300, 40);
        cluster.discard(0, 5);
        for pause in [0, 1000, 5000] {
            cluster.pass_ms(pause);
            for name in [&first, &second] {
                cluster.read_snapshot(name, 0, 256);
                cluster.read_snapshot(name, 256, 256);
            }
            cluster.read(0, 256);
            cluster.read(256, 256);
        }
        // Another owner knows them, and what they hold.
        cluster.crash_host(0);
        cluster.take_over_on(1);
        for name in [&first, &second] {
            cluster.read_snapshot(name, 0, 256);
            cluster.read_snapshot(name, 256, 256);
        }
        cluster.drop_snapshot(&first);
        cluster.pass_ms(6000);
        cluster.read_snapshot(&second, 0, 256);
        cluster.drop_snapshot(&second);
        cluster.pass_ms(6000);
        assert_eq!(cluster.status().snapshots, []);
        cluster.finish();
    }
}

#[test]
fn the_cleaner_leaves_snapshots_whole() {
    let mut cluster = Setup::new(211).nodes(4).layout("parity:2+1").start();
    cluster.write_segments(12);
    let name = cluster.snapshot();
    let cleaned = cluster.status().counters.segments_cleaned;
    let mut at = 0;
    while cluster.status().counters.segments_cleaned < cleaned + 20 {
        cluster.write(at % 250, 3);
        at += 7;
    }
    cluster.read_snapshot(&name, 0, 256);
    // What was merged is cleaned under the key that it was written with.
    cluster.drop_snapshot(&name);
    cluster.pass_ms(8000);
    let cleaned = cluster.status().counters.segments_cleaned;
    while cluster.status().counters.segments_cleaned < cleaned + 20 {
        cluster.write(at % 250, 3);
        at += 7;
    }
    cluster.crash_host(0);
    cluster.take_over_on(1);
    cluster.read(0, 256);
    cluster.finish();
}

#[test]
fn space_of_a_snapshot_comes_back_when_it_is_dropped() {
    let mut cluster = Setup::new(212).start();
    let overwrite = |cluster: &mut Cluster| (0..256).step_by(8).for_each(|block| cluster.write(block, 8));
    overwrite(&mut cluster);
    cluster.pass_ms(8000);
    let before = cluster.status().mapped_blocks;
    assert_eq!(before, 256);
    let mut names = Vec::new();
    for _ in 0..4 {
        names.push(cluster.snapshot());
        overwrite(&mut cluster);
    }
    cluster.pass_ms(4000);
    assert!(cluster.status().mapped_blocks >= 5 * before, "each holds what was overwritten since");
    // From the middle, from the ends.
    for i in [1, 0, 3, 2] {
        cluster.drop_snapshot(&names[i]);
        if i == 0 {
            cluster.crash_host(0);
            cluster.start_host(0);
            cluster.take_over_on(1);
        }
    }
    cluster.until("space is back", |s| s.status().mapped_blocks == before);
    cluster.finish();
}

#[test]
fn a_snapshot_waits_for_bulk_writes_that_are_part_of_it() {
    let mut cluster = Setup::new(213).nodes(4).layout("parity:2+1").start();
    let owner = cluster.owner();
    let bulk: Vec<_> = (0..6).map(|i| cluster.ask(owner, What::Write(0), i * 40, 40)).collect();
    let name = cluster.snapshot();
    cluster.write(0, 8);
    for write in bulk {
        cluster.until("a write is done", |s| s.is_answered(write));
    }
    cluster.read_snapshot(&name, 0, 256);
    cluster.crash_host(0);
    cluster.take_over_on(1);
    cluster.read_snapshot(&name, 0, 256);
    cluster.finish();
}

#[test]
fn a_group_of_snapshots_is_taken_while_answers_wait_or_undone() {
    let mut cluster = Setup::new(250).start();
    cluster.write(0, 64);
    let base = cluster.snapshot();
    cluster.read_snapshot(&base, 0, 512);
    let clone = cluster.clone_snapshot(&base);
    let names = cluster.begin_group(&[0, clone]);
    let owner = cluster.owner();
    let writes = [cluster.ask(owner, What::Write(0), 3, 2), cluster.ask_clone(clone, What::Write(0), 5, 2)];
    cluster.until("the group is over", |s| s.group_end().is_some());
    assert_eq!(cluster.group_end(), Some(GroupEnd::Taken));
    cluster.until("what was held back is told", |s| writes.iter().all(|write| s.is_answered(*write)));
    names.iter().for_each(|name| cluster.read_snapshot(name, 0, 256));
    // Nobody to take the records: after a while the guests hear again, and what is taken later is dropped.
    cluster.crash_node(1);
    cluster.crash_node(2);
    let undone = cluster.begin_group(&[0, clone]);
    cluster.pass_ms(3_000);
    assert_eq!(cluster.group_end(), None);
    cluster.start_node(1);
    cluster.start_node(2);
    cluster.until("the group is undone", |s| s.group_end().is_some());
    assert_eq!(cluster.group_end(), Some(GroupEnd::Failed { member: 0, why: Why::Late, left: Vec::new() }));
    let there: Vec<String> = cluster.status().snapshots.into_iter().map(|(_, s)| s.name).collect();
    assert!(names.iter().all(|name| there.contains(name)) && !undone.iter().any(|name| there.contains(name)));
    cluster.finish();
}

#[test]
fn clones_go_their_own_ways() {
    for layout in ["mirror:2", "parity:2+1"] {
        let mut cluster = Setup::new(214).nodes(4).layout(layout).start();
        cluster.write(0, 64);
        cluster.write(200, 40);
        let base = cluster.snapshot();
        let first = cluster.clone_snapshot(&base);
        let second = cluster.clone_snapshot(&base);
        cluster.write_clone(first, 10, 20);
        cluster.discard_clone(second, 5, 30);
        cluster.write(0, 8);
        let of_first = cluster.snapshot_of(first);
        let third = cluster.clone_snapshot(&of_first);
        cluster.write_clone(third, 12, 4);
        cluster.write_clone(first, 0, 3);
        let all = [first, second, third];
        for pause in [0, 1000, 6000] {
            cluster.pass_ms(pause);
            all.iter().for_each(|clone| cluster.read_clone(*clone, 0, 256));
            cluster.read(0, 256);
        }
        // What it came from may go first; so may one between two others.
        cluster.drop_snapshot(&base);
        cluster.drop_clone(first);
        cluster.crash_host(0);
        cluster.take_over_on(1);
        cluster.pass_ms(8000);
        cluster.read_clone(third, 0, 256);
        cluster.read_clone(second, 0, 256);
        cluster.finish();
    }
}

#[test]
fn a_rollback_brings_back_what_was_there_and_keeps_later_snapshots() {
    let mut cluster = Setup::new(215).nodes(4).layout("parity:2+1").start();
    cluster.write(0, 100);
    let first = cluster.snapshot();
    cluster.write(50, 100);
    cluster.discard(0, 20);
    let second = cluster.snapshot();
    cluster.write(10, 8);
    cluster.roll_back(0, &first);
    cluster.read(0, 256);
    cluster.write(60, 4);
    cluster.pass_ms(6000);
    cluster.read_snapshot(&second, 0, 256);
    // And forward again.
    cluster.roll_back(0, &second);
    cluster.crash_host(0);
    cluster.take_over_on(1);
    cluster.read(0, 256);
    cluster.drop_snapshot(&first);
    cluster.drop_snapshot(&second);
    cluster.pass_ms(8000);
    assert_eq!(cluster.status().mapped_blocks, 130, "what was rolled back is gone");
    cluster.finish();
}

#[test]
fn bulk_writes_on_their_way_to_a_clone_that_is_dropped_do_no_harm() {
    let mut cluster = Setup::new(216).nodes(4).layout("parity:2+1").start();
    cluster.write(0, 200);
    let base = cluster.snapshot();
    cluster.read_snapshot(&base, 0, 512);
    let clone = cluster.clone_snapshot(&base);
    let bulk: Vec<_> = (0..6).map(|i| cluster.ask_clone(clone, What::Write(0), i * 40, 40)).collect();
    cluster.drop_clone(clone);
    for write in bulk {
        cluster.until("a write is done", |s| s.is_answered(write));
    }
    cluster.pass_ms(8000);
    assert_eq!(cluster.status().mapped_blocks, 200);
    cluster.finish();
}

#[test]
fn a_disk_is_drained_while_it_is_written_to() {
    for (seed, layout, disks) in [(220, "parity:2+1", 1), (221, "mirror:2", 1), (222, "parity:2+1", 2)] {
        let mut cluster = Setup::new(seed).nodes(4).disks(disks).layout(layout).start();
        cluster.write_segments(12);
        cluster.drain(Some((0, 0)));
        let mut at = 0;
        while cluster.status().left_to_drain[0].1 > 0 {
            cluster.write(at % 250, 3);
            cluster.read(at % 200, 16);
            at += 7;
            assert!(at < 70_000, "{:?}", cluster.status());
        }
        if disks == 1 {
            cluster.until("what lay there is deleted", |s| s.held_by(0) == 0);
            // It is not missed.
            cluster.crash_node(0);
            cluster.pass_ms(2000);
            assert_eq!((cluster.status().degraded_segments, cluster.status().at_risk_entries), (0, 0));
            cluster.read(0, 256);
        }
        // Another owner knows where things are now, and what is being drained.
        cluster.crash_host(0);
        cluster.take_over_on(1);
        // A segment that was just being freed is there once more.
        cluster.until("nothing is left there", |cluster| cluster.status().left_to_drain[0].1 == 0);
        cluster.read(0, 256);
        if disks == 1 {
            cluster.start_node(0);
        }
        cluster.finish();
    }
}

#[test]
fn a_drained_node_that_dies_is_not_waited_for() {
    let mut cluster = Setup::new(223).nodes(4).layout("parity:2+1").start();
    cluster.write_segments(30);
    cluster.drain(Some((0, 0)));
    cluster.crash_node(0);
    cluster.until("what lay there is made again", |s| {
        let status = s.status();
        status.left_to_drain[0].1 == 0 && status.degraded_segments == 0
    });
    cluster.start_node(0);
    cluster.finish();
}

#[test]
fn a_new_node_takes_its_share() {
    let setup = Setup::new(224).nodes(4).layout("parity:2+1").with(|plan| {
        plan.volume_bytes = 8 << 20;
        plan.disk_bytes = 24 << 20;
    });
    let mut cluster = setup.start();
    cluster.crash_node(3);
    for block in (0..2048).step_by(16) {
        cluster.write(block, 16);
    }
    cluster.start_node(3);
    let fill = |s: &Cluster, node: usize| s.held_by(node);
    cluster.until("shards are moved to it", |s| fill(s, 3) * 2 > fill(s, 0) && s.status().counters.shards_moved > 10);
    for block in (0..2048).step_by(256) {
        cluster.read(block, 256);
    }
    cluster.finish();
}

#[test]
fn a_volume_is_written_in_another_layout_while_it_is_used() {
    let mut cluster = Setup::new(225).nodes(6).layout("parity:2+1").start();
    cluster.write_segments(30);
    let snapshot = cluster.snapshot();
    let mut at = 0;
    for layout in ["mirror:2", "parity:4+2", "mirror:3", "parity:2+1"] {
        cluster.set_layout(layout);
        while cluster.status().degraded_segments > 0 {
            cluster.write(at % 250, 3);
            cluster.read(at % 200, 16);
            at += 7;
            assert!(at < 200_000, "{layout}: {:?}", cluster.status());
        }
        // It bears what the layout promises: data, map and log.
        let failures = usize::from(cluster.status().layout.failures());
        (0..failures).for_each(|node| cluster.crash_node(node));
        cluster.pass_ms(1000);
        cluster.read(0, 256);
        cluster.read_snapshot(&snapshot, 0, 256);
        cluster.write(0, 8);
        (0..failures).for_each(|node| cluster.start_node(node));
        cluster.pass_ms(2000);
        let other = (cluster.owner().host + 1) % 2;
        cluster.crash_host(1 - other);
        cluster.take_over_on(other);
        cluster.start_host(1 - other);
        cluster.read(0, 256);
    }
    cluster.finish();
}

// ---- devices that are slow, not dead ----

/// A guest at work: a write and two reads twenty times a second. Returns the longest time that one of them took.
fn work(cluster: &mut Cluster, seconds: u64) -> Duration {
    let mut longest = Duration::ZERO;
    for i in 0..seconds * 20 {
        let start = cluster.now();
        cluster.write(i * 7 % 400, 2);
        let written = cluster.now();
        cluster.read(i * 13 % 400, 2);
        cluster.read((i * 29 + 200) % 400, 1);
        longest = longest.max(written.since(start)).max(cluster.now().since(written));
        cluster.pass_ms(50);
    }
    longest
}

/// Its reads take 18 ms and more, its durable writes 36 ms and more.
const SLOWNESS: u32 = 300;

#[test]
fn a_slow_device_is_bypassed_and_trusted_again_when_it_has_recovered() {
    for layout in ["mirror:2", "parity:2+1"] {
        let mut cluster = Setup::new(31).nodes(4).layout(layout).start();
        cluster.write_segments(12);
        let slow = cluster.leg_nodes()[0];
        let device = cluster.device(slow, 0);
        cluster.world().nodes[slow].disks[0].slowness = SLOWNESS;
        work(&mut cluster, 20);
        assert!(cluster.slow_devices().is_empty(), "it may be a moment's trouble");
        work(&mut cluster, 40);
        assert_eq!(cluster.slow_devices(), [(device, true)], "{layout}");
        cluster.pass_ms(2000);
        assert!(!cluster.leg_nodes().contains(&slow), "its log is elsewhere");
        let held = cluster.held_by(slow);
        let longest = work(&mut cluster, 20);
        assert!(longest < Duration::from_millis(10), "{layout}: {longest:?}");
        assert!(cluster.held_by(slow) <= held, "{layout}: nothing new goes there");
        assert_eq!(cluster.slow_devices(), [(device, true)], "it does little, and that little is slow");
        cluster.world().nodes[slow].disks[0].slowness = 1;
        work(&mut cluster, 60);
        assert!(cluster.slow_devices().is_empty());
        work(&mut cluster, 20);
        assert!(cluster.held_by(slow) > 0, "{layout}: it is used again");
        cluster.finish();
    }
}

#[test]
fn where_all_devices_are_slow_none_is_bypassed() {
    let mut cluster = Setup::new(32).nodes(4).start();
    for node in 0..4 {
        cluster.world().nodes[node].disks[0].slowness = SLOWNESS;
    }
    work(&mut cluster, 90);
    assert!(cluster.slow_devices().is_empty(), "{:?}", cluster.slow_devices());
    cluster.finish();
}

#[test]
fn a_slow_device_is_used_while_another_node_is_lost() {
    let mut cluster = Setup::new(33).start();
    cluster.write_segments(12);
    let (slow, lost) = (cluster.leg_nodes()[0], cluster.leg_nodes()[1]);
    let device = cluster.device(slow, 0);
    cluster.world().nodes[slow].disks[0].slowness = SLOWNESS;
    work(&mut cluster, 60);
    assert_eq!(cluster.slow_devices(), [(device, true)], "two nodes suffice for two copies");
    cluster.crash_node(lost);
    work(&mut cluster, 2);
    assert_eq!(cluster.slow_devices(), [(device, false)], "every copy is needed");
    cluster.until("no entry is at risk", |s| s.status().at_risk_entries == 0);
    cluster.start_node(lost);
    work(&mut cluster, 5);
    assert_eq!(cluster.slow_devices(), [(device, true)]);
    cluster.finish();
}

#[test]
fn devices_of_one_node_are_bypassed_at_a_time() {
    let mut cluster = Setup::new(34).nodes(5).start();
    cluster.write_segments(12);
    for node in [0, 1] {
        cluster.world().nodes[node].disks[0].slowness = SLOWNESS;
    }
    work(&mut cluster, 120);
    let slow = cluster.slow_devices();
    assert!(!slow.is_empty() && slow.iter().filter(|(_, bypassed)| *bypassed).count() == 1, "{slow:?}");
    cluster.finish();
}

#[test]
fn a_device_with_many_errors_is_bypassed() {
    let mut cluster = Setup::new(35).nodes(4).start();
    cluster.write_segments(12);
    let bad = (0..4).find(|node| cluster.held_by(*node) > 4).expect("some node holds shards");
    let device = cluster.device(bad, 0);
    cluster.world().nodes[bad].disks[0].faults = DiskFaults { read_error: 300, ..DiskFaults::default() };
    work(&mut cluster, 20);
    assert_eq!(cluster.slow_devices(), [(device, true)]);
    cluster.finish();
}

#[test]
fn writes_that_come_while_no_leg_can_be_used_leave_journals_room() {
    let mut cluster = Setup::new(71)
        .with(|plan| {
            (plan.volume_bytes, plan.writeback_bytes) = (16 << 20, 64 << 20);
            (plan.segment_bytes, plan.direct_bytes) = (512 << 10, 512 << 10);
            plan.disk_bytes = 96 << 20;
        })
        .start();
    let at = cluster.owner();
    cluster.write(0, 1);
    // Of three legs one is suspected, and the connection to another one is lost.
    cluster.world().pause_node(0);
    cluster.ask(at, What::Write(0), 1, 1);
    cluster.pass_ms(60);
    cluster.crash_node(1);
    cluster.pass_ms(1);
    let asked: Vec<_> = (0..240).map(|i| cluster.ask(at, What::Write(0), 16 + i * 12, 12)).collect();
    cluster.pass_ms(20);
    cluster.world().resume_node(0);
    cluster.start_node(1);
    cluster.until("all writes are answered", |s| asked.iter().all(|token| s.is_answered(*token)));
    cluster.finish();
}

#[test]
fn the_third_node_of_three_is_drained_with_the_log_on_it() {
    let mut cluster = Setup::new(2510).nodes(3).layout("mirror:2").start();
    cluster.write_segments(6);
    for node in 0..3 {
        cluster.drain(Some((node, 0)));
        cluster.until("nothing is left there", |s| {
            let left = s.status().left_to_drain;
            !left.is_empty() && left.iter().all(|(_, left)| *left == 0)
        });
        cluster.drain(None);
    }
    cluster.finish();
}

#[test]
fn what_a_taker_copied_into_a_ledger_that_it_gives_up_is_copied_again() {
    for step in 0..24 {
        let seed = 2900 + step;
        let lost = (step % 3) as usize;
        let mut cluster = Setup::new(seed).with(|plan| plan.destage_age = Duration::from_secs(60)).start();
        for block in (0..128).step_by(8) {
            cluster.write(block, 8);
        }
        cluster.crash_host(0);
        // Of what this node held there is one copy.
        cluster.swap_disks(lost);
        cluster.open_on(1);
        cluster.until("it copies", |s| s.controller().dump().contains("step: Reappending"));
        cluster.pass(Duration::from_micros(50 * step));
        // The new ledger's legs go away, and come back.
        (0..3).for_each(|node| cluster.crash_node(node));
        cluster.pass_ms(50);
        (0..3).for_each(|node| cluster.start_node(node));
        cluster.until("the taker serves", |s| s.serving().is_some());
        cluster.until("it says that all is safe", |s| {
            s.status().at_risk_entries == 0 && s.status().degraded_segments == 0
        });
        // So another may go.
        cluster.crash_host(1);
        cluster.start_host(0);
        cluster.swap_disks((lost + 1) % 3);
        cluster.take_over_on(0);
        cluster.read(0, 128);
        cluster.finish();
    }
}
