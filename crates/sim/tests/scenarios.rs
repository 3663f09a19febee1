//! One story a protocol rule, named after it, and the cases that bit other systems most often.
//!
//! Every story ends with `finish`: all faults are healed, everything is read back, and every answer that was given on the
//! way is judged. What is asserted before that is what the rule says beyond "no data is lost".

use holdfast_base::{BlockError, Epoch, MetaReply, MetaRequest, Prng};
use holdfast_format::root::root_key;
use holdfast_format::versions::Versions;
use holdfast_format::wire::{DeviceHealth, WIRE};
use holdfast_sim::disk::DiskFaults;
use holdfast_sim::stage::{BLOCK, Scenery, Stage};
use holdfast_sim::swarm::VOLUME;
use holdfast_sim::workload::What;
use holdfast_volume::{GroupEnd, State, Why};
use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

fn cut_off(stage: &mut Stage, host: usize, nodes: &[usize]) {
    for node in nodes {
        stage.world().block(host, *node, true, true);
    }
}

fn join(stage: &mut Stage, host: usize, nodes: &[usize]) {
    for node in nodes {
        stage.world().unblock(host, *node);
    }
}

#[test]
fn rule_01_legs_are_devices_by_uuid() {
    // One holder's disk is swapped for a blank one, the other holder hangs: the log's end can't be known, so the taker
    // waits. When the other holder is back, everything is there.
    let mut stage = Scenery::long_destage(1).raise();
    stage.write(0, 8);
    let legs = stage.leg_nodes();
    stage.crash_host(0);
    stage.swap_disks(legs[0]);
    stage.world().pause_node(legs[1]);
    let taker = stage.open_on(1);
    stage.pass_ms(2000);
    assert_eq!(stage.state(taker), Some(State::Opening), "it waits and does not truncate");
    stage.world().resume_node(legs[1]);
    stage.until("the volume is open", |s| s.state(taker) == Some(State::Open));
    stage.read(0, 8);
    stage.finish();
}

#[test]
fn rule_02_copies_lie_in_distinct_nodes() {
    for seed in 0..5 {
        let mut stage = Scenery::long_destage(seed).nodes(4).disks(2).raise();
        let nodes = stage.leg_nodes();
        assert_eq!(nodes.iter().collect::<BTreeSet<_>>().len(), nodes.len(), "legs {nodes:?} share a node");
        stage.write(0, 8);
        stage.crash_host(0);
        stage.crash_node(nodes[0]);
        stage.take_over_on(1);
        stage.read(0, 8);
        stage.finish();
    }
}

#[test]
fn rule_03_nothing_is_acknowledged_before_the_root_names_the_ledger() {
    let mut stage = Scenery::long_destage(3).nodes(4).raise();
    stage.write(0, 4);
    let (owner, legs, ledger) = (stage.owner(), stage.leg_nodes(), stage.root().open_ledger().unwrap().id);
    let outage = stage.now() + Duration::from_secs(3);
    stage.world().meta.faults.unavailable_until = outage;
    stage.crash_node(legs[0]);
    stage.crash_node(legs[1]);
    let write = stage.ask(owner, What::Write(0), 4, 1);
    stage.pass_ms(2500);
    assert!(!stage.is_answered(write), "its ledger is not in the root yet");
    stage.until("the write is answered", |s| s.is_answered(write));
    assert_ne!(stage.root().open_ledger().unwrap().id, ledger);
    stage.finish();
}

#[test]
fn rule_04_late_acknowledgements_complete_nothing_after_the_freeze() {
    for seed in 0..6 {
        let mut stage = Scenery::long_destage(seed).nodes(4).raise();
        stage.write(0, 4);
        let (owner, legs) = (stage.owner(), stage.leg_nodes());
        stage.world().meta.faults.unknown = 500;
        stage.world().pause_node(legs[0]);
        stage.world().pause_node(legs[1]);
        stage.ask_writes(owner, 0, 6);
        stage.pass_ms(150 + 100 * seed);
        // The answers that lay in the hanging nodes' sockets come now, in the middle of the roll.
        stage.world().resume_node(legs[0]);
        stage.pass_ms(30);
        stage.crash_host(0);
        stage.world().resume_node(legs[1]);
        stage.take_over_on(1);
        stage.read(0, 8);
        stage.finish();
    }
}

#[test]
fn rule_05_who_cannot_finish_does_not_depose() {
    let mut stage = Scenery::long_destage(5).raise();
    stage.write(0, 4);
    let owner = stage.owner();
    let legs = stage.leg_nodes();
    cut_off(&mut stage, 1, &legs[..2]);
    stage.world().reset_connection(1, legs[0]);
    stage.world().reset_connection(1, legs[1]);
    stage.pass_ms(50);
    let taker = stage.open_on(1);
    stage.pass_ms(1500);
    assert_eq!((stage.state(owner), stage.state(taker)), (Some(State::Open), Some(State::Opening)));
    assert_eq!(stage.root().epoch, Epoch(1));
    join(&mut stage, 1, &legs);
    stage.until("the taker serves", |s| s.state(taker) == Some(State::Open));
    stage.read(0, 4);
    stage.finish();
}

#[test]
fn rule_05_nothing_is_served_before_the_swap() {
    let mut stage = Scenery::long_destage(55).raise();
    stage.write(0, 4);
    stage.crash_host(0);
    let taker = stage.open_on(1);
    stage.until("the epoch is claimed", |s| s.root().epoch == Epoch(2));
    let outage = stage.now() + Duration::from_secs(3);
    stage.world().meta.faults.unavailable_until = outage;
    let (read, write) = (stage.ask(taker, What::Read, 0, 4), stage.ask(taker, What::Write(0), 9, 1));
    stage.pass_ms(2500);
    assert!(!stage.is_answered(read) && !stage.is_answered(write));
    stage.finish();
}

#[test]
fn rule_06_promises_outlive_power_loss() {
    let mut stage = Scenery::long_destage(6).raise();
    stage.write(0, 4);
    let old = stage.owner();
    stage.world().pause_host(0);
    stage.take_over_on(1);
    stage.write(0, 4);
    stage.power_loss();
    stage.ask_writes(old, 0, 4);
    stage.world().resume_host(0);
    stage.until("the old owner is told", |s| s.state(old) == Some(State::Deposed));
    stage.read(0, 4);
    stage.finish();
}

#[test]
fn rule_07_leases_only_permit_take_over() {
    let mut stage = Scenery::new(7).raise();
    let outage = stage.now() + Duration::from_secs(8);
    stage.world().meta.faults.unavailable_until = outage;
    for i in 0..200 {
        let start = stage.now();
        stage.write(i % 500, 2);
        assert!(stage.now().since(start) < Duration::from_millis(200), "write {i} waited for the metadata store");
        stage.pass_ms(20);
    }
    assert!(stage.now() < outage, "all within the outage; {:?}", stage.status());
    stage.finish();
}

#[test]
fn rule_08_reads_are_fenced_too() {
    let mut stage = Scenery::long_destage(8).raise();
    stage.write(0, 4);
    let old = stage.owner();
    // The old owner holds the data in its memory, and hears nothing.
    cut_off(&mut stage, 0, &[0, 1, 2]);
    stage.take_over_on(1);
    stage.write(0, 4);
    let stale = stage.ask(old, What::Read, 0, 4);
    stage.pass_ms(300);
    assert!(!stage.is_answered(stale), "it has no grant any more");
    stage.finish();
}

#[test]
fn rule_09_margin_comes_back() {
    let mut stage = Scenery::long_destage(9).nodes(4).raise();
    stage.write(0, 16);
    let legs = stage.leg_nodes();
    for leg in &legs[..2] {
        stage.crash_node(*leg);
        stage.pass_ms(100);
        stage.until("no entry is at risk", |s| s.status().at_risk_entries == 0);
    }
    stage.crash_host(0);
    stage.start_node(legs[0]);
    stage.take_over_on(1);
    stage.read(0, 16);
    stage.finish();
}

#[test]
fn rule_08_reads_are_answered_where_an_answer_takes_longer_than_a_grant_lasts() {
    for layout in ["parity:2+1", "mirror:3"] {
        let mut stage = Scenery::new(8).layout(layout).raise();
        stage.write(0, 16);
        for node in 0..3 {
            stage.world().net.link_mut(0, node).slow = Duration::from_millis(110);
        }
        stage.pass_ms(1000);
        for block in 0..8 {
            let start = stage.now();
            stage.read(block, 2);
            let took = stage.now().since(start);
            assert!(took < Duration::from_millis(1000), "{layout}: a read took {took:?}");
        }
        stage.finish();
    }
}

#[test]
fn rule_10_only_outliers_are_hedged() {
    let mut stage = Scenery::new(10).raise();
    // Everything is slow: nobody is an outlier.
    for node in 0..3 {
        stage.world().nodes[node].disks[0].slowness = 100;
    }
    let owner = stage.owner();
    for round in 0..30 {
        stage.ask_writes(owner, round * 8, 8);
        stage.pass_ms(20);
    }
    stage.pass_ms(500);
    let counters = stage.status().counters;
    assert!(counters.append_hedges * 20 <= counters.writes + 20, "{} hedges", counters.append_hedges);
    stage.finish();
}

#[test]
fn rule_11_every_batch_is_found_by_itself() {
    for step in 0..24 {
        let mut stage = Scenery::long_destage(step).raise();
        stage.write(0, 4);
        let owner = stage.owner();
        stage.ask_writes(owner, 0, 12);
        stage.pass(Duration::from_micros(25 * step));
        stage.power_loss();
        stage.crash_host(0);
        stage.take_over_on(1);
        stage.read(0, 12);
        stage.finish();
    }
}

#[test]
fn rule_12_a_commit_applies_only_where_the_map_names_its_source() {
    for step in 0..10 {
        let mut stage = Scenery::new(step).with(|plan| plan.destage_age = Duration::from_millis(20)).raise();
        stage.write(0, 16);
        // Overwritten and discarded while its segment is on the way.
        stage.pass(Duration::from_millis(18) + Duration::from_micros(400 * step));
        stage.write(0, 4);
        stage.discard(4, 4);
        stage.write(20, 1);
        stage.pass_ms(60);
        stage.read(0, 21);
        stage.crash_host(0);
        stage.take_over_on(1);
        stage.read(0, 21);
        stage.finish();
    }
}

#[test]
fn rule_13_bulk_writes_keep_their_place_in_the_order() {
    for step in 0..8 {
        let mut stage = Scenery::new(step).raise();
        let owner = stage.owner();
        stage.ask(owner, What::Write(0), 0, 20);
        stage.pass(Duration::from_micros(150 * step));
        stage.ask(owner, What::Write(0), 2, 2);
        stage.ask(owner, What::Write(0), 10, 24);
        stage.ask(owner, What::Discard, 12, 4);
        stage.pass_ms(20);
        stage.read(0, 40);
        assert!(stage.status().counters.bypass_bytes > 0);
        stage.crash_host(0);
        stage.take_over_on(1);
        stage.read(0, 40);
        stage.finish();
    }
}

#[test]
fn rule_15_an_absent_metadata_store_never_fills_the_log() {
    let mut stage = Scenery::new(15).with(|plan| plan.writeback_bytes = 256 << 10).raise();
    let outage = stage.now() + Duration::from_secs(60);
    stage.world().meta.faults.unavailable_until = outage;
    for i in 0..300 {
        stage.write((i * 7) % 500, 4);
    }
    assert!(stage.now() < outage, "4.7 MB went through a log of 256 KiB");
    stage.world().meta.heal();
    stage.crash_host(0);
    stage.take_over_on(1);
    stage.read(0, 500);
    stage.finish();
}

#[test]
fn rule_16_a_hung_node_does_not_stall_a_bypass_write() {
    for node in 0..4 {
        let mut stage = Scenery::new(16).nodes(4).layout("parity:2+1").raise();
        stage.write(0, 32);
        stage.world().pause_node(node);
        let start = stage.now();
        stage.write(32, 32);
        let stalled = stage.now().since(start);
        assert!(stalled < Duration::from_millis(600), "stalled for {stalled:?}");
        stage.crash_node(node);
        stage.read(0, 64);
        stage.start_node(node);
        stage.finish();
    }
}

/// Begun anew each time it is late, on the same disks and with their work doubled, it would never be done.
#[test]
fn a_bypass_write_to_slow_disks_that_nothing_can_stand_in_for_is_done_at_their_pace() {
    for lost in 0..3 {
        let mut stage = Scenery::new(161).layout("parity:2+1").raise();
        stage.write(0, 32);
        stage.crash_node(lost);
        for node in (0..3).filter(|node| *node != lost) {
            // A shard takes a second and more.
            stage.world().nodes[node].disks[0].slowness = 5_000;
        }
        let before = stage.status().counters.segments_written;
        stage.write(32, 32);
        let begun = stage.status().counters.segments_written - before;
        assert!(begun <= 10, "begun {begun} times");
        stage.start_node(lost);
        stage.finish();
    }
}

#[test]
fn rule_17_an_owner_that_dies_amid_segments_leaves_nothing_behind() {
    let mut stage = Scenery::new(17).with(|plan| plan.destage_age = Duration::from_millis(10)).raise();
    for round in 0..8 {
        let owner = stage.owner();
        stage.ask(owner, What::Write(0), round * 16, 16);
        stage.ask_writes(owner, round * 8, 8);
        stage.pass(Duration::from_micros(700 * round + 300));
        let host = owner.host;
        stage.crash_host(host);
        stage.start_host(host);
        stage.take_over_on(1 - host);
    }
    stage.finish();
}

#[test]
fn rule_18_nothing_that_a_durable_checkpoint_names_is_freed() {
    let mut stage = Scenery::new(18).with(|plan| plan.destage_age = Duration::from_millis(10)).raise();
    for round in 0..6 {
        stage.write_segments(3);
        stage.discard(round * 20, 64);
        stage.pass_ms(7 * round);
        let host = stage.owner().host;
        stage.crash_host(host);
        stage.start_host(host);
        stage.take_over_on(1 - host);
        stage.read(0, 256);
    }
    stage.finish();
}

#[test]
fn rule_23_the_log_is_bounded_by_the_writeback_budget() {
    let mut stage = Scenery::new(23).with(|plan| plan.writeback_bytes = 256 << 10).raise();
    let owner = stage.owner();
    for i in 0..60 {
        stage.ask_writes(owner, i * 8, 8);
        stage.pass(Duration::from_micros(300));
        let log_bytes = stage.status().log_bytes;
        assert!(log_bytes <= 2 * (256 << 10), "{log_bytes} bytes in the log");
    }
    stage.finish();
}

#[test]
fn rule_24_a_checkpoint_writes_what_changed() {
    let mut stage = Scenery::new(24).with(|plan| plan.fold_runs = 100_000).raise();
    for i in 0..120 {
        stage.write((i * 37) % 500, 1);
    }
    stage.pass_ms(3000);
    let counters = stage.status().counters;
    assert!(counters.checkpoints > 0);
    assert!(counters.checkpoint_bytes <= counters.checkpoints * 3 * BLOCK, "{counters:?}");
    stage.finish();
}

#[test]
fn rule_25_a_failed_device_is_alone() {
    let mut stage = Scenery::new(25).disks(2).raise();
    stage.write(0, 16);
    let faults = DiskFaults { write_error: 1000, ..DiskFaults::default() };
    stage.world().nodes[0].disks[0].faults = faults;
    for i in 0..40 {
        stage.write(i * 4, 4);
    }
    stage.pass_ms(500);
    let now = stage.now();
    let stats = stage.world().nodes[0].machine().expect("it runs").stats(now);
    let health: Vec<DeviceHealth> = stats.iter().map(|s| s.health).collect();
    assert!(health.contains(&DeviceHealth::Serving), "the other device serves on: {health:?}");
    stage.read(0, 160);
    stage.finish();
}

// ---- by how often it bit others ----

#[test]
fn case_01_a_node_is_lost_during_an_ensemble_change() {
    for third in 0..3 {
        let mut stage = Scenery::long_destage(101).nodes(5).layout("mirror:3").raise();
        stage.write(0, 8);
        let legs = stage.leg_nodes();
        let owner = stage.owner();
        stage.crash_node(legs[0]);
        stage.ask_writes(owner, 0, 8);
        stage.pass_ms(20 * third);
        stage.crash_node(legs[1]);
        stage.ask_writes(owner, 4, 8);
        stage.pass_ms(400);
        stage.crash_host(0);
        stage.take_over_on(1);
        stage.read(0, 12);
        stage.finish();
    }
}

#[test]
fn case_02_two_reboots_in_sequence() {
    let mut stage = Scenery::long_destage(102).raise();
    for node in [0, 1, 2, 0] {
        stage.crash_node(node);
        stage.write(0, 8);
        stage.start_node(node);
        stage.pass_ms(80);
    }
    stage.read(0, 8);
    stage.finish();
}

#[test]
fn case_03_a_leg_is_slow_not_dead() {
    let mut stage = Scenery::long_destage(103).raise();
    stage.write(0, 8);
    let legs = stage.leg_nodes();
    stage.world().nodes[legs[0]].disks[0].slowness = 2000;
    for i in 0..20 {
        let start = stage.now();
        stage.write(i * 2, 2);
        let took = stage.now().since(start);
        assert!(took < Duration::from_millis(160), "write {i} took {took:?}");
    }
    stage.finish();
}

#[test]
fn case_04_a_fenced_writer_goes_on_sending() {
    let mut stage = Scenery::new(104).raise();
    stage.write(0, 32);
    let old = stage.owner();
    stage.ask_writes(old, 0, 12);
    stage.ask(old, What::Write(0), 0, 20);
    stage.world().pause_host(0);
    stage.take_over_on(1);
    stage.write(0, 32);
    stage.world().resume_host(0);
    stage.ask_writes(old, 0, 12);
    stage.pass_ms(500);
    assert_eq!(stage.state(old), Some(State::Deposed));
    stage.read(0, 32);
    stage.finish();
}

#[test]
fn case_05_the_metadata_leader_is_lost_with_a_node() {
    let mut stage = Scenery::new(105).raise();
    stage.write(0, 16);
    let legs = stage.leg_nodes();
    let outage = stage.now() + Duration::from_millis(1500);
    stage.world().meta.faults.unavailable_until = outage;
    stage.crash_node(legs[0]);
    for i in 0..20 {
        let start = stage.now();
        stage.write(i, 2);
        assert!(stage.now().since(start) < Duration::from_millis(250), "write {i} waited");
    }
    stage.finish();
}

/// Where there is a node to spare the log moves to it. That needs the metadata store, and until it answers nothing completes in the
/// old ledger: it is left only for one that can be had.
#[test]
fn a_node_lost_while_the_metadata_store_is_away_stalls_no_write_where_another_could_take_its_place() {
    for (seed, layout, hangs) in [(112, "mirror:2", true), (113, "parity:2+1", true), (114, "parity:2+1", false)] {
        let mut stage = Scenery::new(seed).nodes(4).layout(layout).raise();
        stage.write(0, 16);
        stage.pass_ms(2000);
        let node = stage.leg_nodes()[0];
        let outage = stage.now() + Duration::from_secs(8);
        stage.world().meta.faults.unavailable_until = outage;
        if hangs {
            stage.world().pause_node(node)
        } else {
            stage.crash_node(node)
        }
        for i in 0..100 {
            let start = stage.now();
            stage.write(i, 2);
            let took = stage.now().since(start);
            assert!(took < Duration::from_millis(250), "{layout}: write {i} waited {took:?}");
            stage.pass_ms(30);
        }
        assert!(stage.now() < outage, "all within the outage");
        stage.until("the log moves on when the store is back", |s| !s.leg_nodes().contains(&node));
        if hangs {
            stage.world().resume_node(node);
        }
        stage.finish();
    }
}

#[test]
fn case_06_a_full_log_and_cleaning_debt_and_a_lost_node() {
    let scenery = Scenery::new(106).with(|plan| {
        plan.writeback_bytes = 256 << 10;
        plan.disk_bytes = 10 << 20;
        plan.sizing.journal_bytes = 3 << 20;
    });
    let mut stage = scenery.nodes(4).raise();
    for i in 0..150 {
        stage.write((i * 11) % 480, 8);
    }
    stage.crash_node(0);
    for i in 0..150 {
        stage.write((i * 13) % 480, 8);
    }
    stage.finish();
}

#[test]
fn case_06_a_burst_that_is_larger_than_the_journals() {
    // Everything is asked for at once: were the journals filled to the brim, the checkpoint that frees them would find no
    // room for its record.
    let scenery = Scenery::new(206).with(|plan| {
        plan.writeback_bytes = 64 << 20;
        plan.volume_bytes = 8 << 20;
        plan.disk_bytes = 40 << 20;
        plan.sizing.journal_bytes = 3 << 20;
    });
    let mut stage = scenery.raise();
    let owner = stage.owner();
    let writes: Vec<_> = (0..160).map(|i| stage.ask(owner, What::Write(0), i * 12, 12)).collect();
    for write in writes {
        stage.until("a write is done", |s| s.is_answered(write));
    }
    stage.finish();
}

#[test]
fn openings_that_die_leave_room_for_the_next() {
    // Each copies the log anew, since a node that held it is away, and dies while the old owner's read grants run out.
    let mut stage = Scenery::long_destage(306)
        .with(|plan| (plan.writeback_bytes, plan.sizing.journal_bytes) = (8 << 20, 3 << 20))
        .raise();
    for block in 0..24 {
        stage.write(block * 8, 8);
    }
    let lost = stage.leg_nodes()[0];
    stage.crash_node(lost);
    let host = stage.owner().host;
    stage.crash_host(host);
    stage.start_host(host);
    stage.die_opening(8);
    stage.take_over_on(0);
    stage.start_node(lost);
    stage.finish();
}

#[test]
fn metadata_that_were_set_back_cost_nothing() {
    let mut stage = Scenery::long_destage(313).raise();
    stage.write(0, 8);
    let set_root = |stage: &mut Stage, value: Vec<u8>| {
        let (meta, key) = (&mut stage.world().meta, root_key(VOLUME));
        let MetaReply::Record { version, .. } = meta.apply(&MetaRequest::Get { key: key.clone() }) else { panic!() };
        let swapped = meta.apply(&MetaRequest::Swap { key, expect: version, value: Some(value) });
        assert!(matches!(swapped, MetaReply::Swapped { .. }));
    };
    let old = stage.root().encode();
    for round in 0..3 {
        stage.crash_host(round % 2);
        stage.start_host(round % 2);
        stage.take_over_on(1 - round % 2);
        stage.write(round as u64 * 8, 8);
    }
    let newest = stage.root().encode();
    stage.crash_host(1);
    stage.start_host(1);
    set_root(&mut stage, old.clone());
    // However often: the epoch must not come to be as high as what nodes have promised.
    for round in 0..8 {
        let opening = stage.open_on(round % 2);
        stage.pass_ms(600);
        assert_eq!(stage.state(opening), Some(State::Opening));
        stage.crash_host(round % 2);
        stage.start_host(round % 2);
    }
    assert_eq!(stage.root().encode(), old);
    set_root(&mut stage, newest);
    stage.take_over_on(0);
    stage.read(0, 32);
    stage.finish();
}

#[test]
fn case_07_a_crash_between_segment_and_commit() {
    for step in 0..12 {
        let mut stage = Scenery::new(107).raise();
        stage.write(0, 8);
        let owner = stage.owner();
        stage.ask(owner, What::Write(0), 0, 20);
        stage.pass(Duration::from_micros(100 + 120 * step));
        stage.crash_host(0);
        stage.take_over_on(1);
        stage.read(0, 20);
        stage.finish();
    }
}

#[test]
fn case_08_torn_lost_and_misdirected_writes() {
    for seed in 0..4 {
        let mut stage = Scenery::new(seed).raise();
        let faults = DiskFaults { lost_write: 200, misdirected_write: 100, ..DiskFaults::default() };
        stage.world().set_disk_faults(0, faults);
        for i in 0..60 {
            stage.write((i * 5) % 400, 5);
        }
        stage.pass_ms(2000);
        stage.read(0, 400);
        stage.finish();
    }
}

#[test]
fn case_10_the_witness_is_lost_then_a_node() {
    let mut stage = Scenery::long_destage(110).raise();
    stage.write(0, 8);
    let outage = stage.now() + Duration::from_secs(4);
    stage.world().meta.faults.unavailable_until = outage;
    stage.pass_ms(500);
    let legs = stage.leg_nodes();
    stage.crash_node(legs[1]);
    stage.write(8, 8);
    assert!(stage.now() < outage, "the standby needs no metadata store");
    stage.read(0, 16);
    stage.finish();
}

#[test]
fn case_12_a_clock_jumps_during_a_lease() {
    // To a process, a jump of the clock is a hang: suddenly everything has expired.
    let mut stage = Scenery::long_destage(112).raise();
    stage.write(0, 8);
    let owner = stage.owner();
    stage.world().pause_host(0);
    stage.pass_ms(5000);
    let read = stage.ask(owner, What::Read, 0, 8);
    stage.world().resume_host(0);
    stage.until("the read is answered", |s| s.is_answered(read));
    stage.write(0, 8);
    let suspects = stage.status().suspect_nodes;
    assert!(suspects.is_empty(), "{suspects:?} are judged by the sleeper's own fault");
    stage.finish();
}

#[test]
fn a_deposed_owner_says_so() {
    let mut stage = Scenery::long_destage(200).raise();
    stage.write(0, 4);
    let old = stage.owner();
    stage.take_over_on(1);
    stage.ask_writes(old, 0, 1);
    stage.until("the old owner knows", |s| s.state(old) == Some(State::Deposed));
    let refused = BlockError::Deposed.to_string();
    assert!(refused.contains("another host"));
    stage.finish();
}

#[test]
fn a_device_that_forgot_its_ledgers_is_made_whole() {
    // It comes back empty under its id, as after somebody restored its superblock: it serves, so its shards are made anew
    // on it, and the ledger that it lacks is left for one that it holds.
    let mut stage = Scenery::new(201).raise();
    stage.write_segments(4);
    let legs = stage.leg_nodes();
    let rolls = stage.status().counters.rolls;
    stage.forget_disks(legs[0]);
    stage.write(0, 8);
    stage.until("the ledger is rolled", |s| s.status().counters.rolls > rolls);
    let rebuilt = Stage::is_whole;
    stage.until("redundancy is whole", rebuilt);
    assert!(stage.status().counters.shards_rebuilt > 0, "what the device forgot was made anew");
    stage.finish();
}

#[test]
fn a_volume_closes_although_it_cannot_be_destaged() {
    // Too few nodes are left for a segment: the log keeps what lies there, and the next owner finds it.
    let mut stage = Scenery::long_destage(202).raise();
    stage.write(0, 8);
    let legs = stage.leg_nodes();
    let owner = stage.owner();
    stage.crash_node(legs[0]);
    stage.crash_node(legs[1]);
    stage.close();
    stage.until("the volume is let go of", |s| s.owner() != owner);
    stage.start_node(legs[0]);
    stage.start_node(legs[1]);
    stage.until("another opening serves", |s| s.serving().is_some());
    assert!(stage.status().log_bytes >= 8 * BLOCK, "the log kept it");
    stage.read(0, 8);
    stage.finish();
}

#[test]
fn what_was_made_whole_bears_another_loss() {
    // Each node's disk is swapped for a blank one in turn; when redundancy is whole again, any other node may go, and a new
    // owner must be able to read everything that it needs, the checkpoint included.
    for lost in 0..4 {
        for next in (0..4).filter(|n| *n != lost) {
            let mut stage = Scenery::new(203).nodes(4).raise();
            stage.write_segments(6);
            stage.pass_ms(4000);
            stage.swap_disks(lost);
            stage.write(0, 8);
            stage.pass_ms(500);
            stage.until("redundancy is whole", Stage::is_whole);
            stage.crash_host(0);
            stage.crash_node(next);
            stage.take_over_on(1);
            stage.read(0, 256);
            stage.finish();
        }
    }
}

#[test]
fn on_two_nodes_what_was_made_whole_bears_the_loss_of_the_other() {
    // While one is away the log lies on the other alone: until it is back on both, nothing is whole.
    for lost in 0..2 {
        let mut stage = Scenery::new(213).nodes(2).disks(2).raise();
        stage.write(0, 64);
        stage.crash_node(lost);
        stage.write(32, 64);
        stage.start_node(lost);
        stage.pass_ms(50);
        stage.until("redundancy is whole", Stage::is_whole);
        stage.crash_host(0);
        stage.crash_node(1 - lost);
        stage.take_over_on(1);
        stage.read(0, 128);
        stage.finish();
    }
}

#[test]
fn more_reads_than_are_under_way_at_a_time_are_all_answered() {
    let mut stage = Scenery::new(205).raise();
    stage.write_segments(8);
    let owner = stage.owner();
    let reads: Vec<_> = (0..96).map(|i| stage.ask(owner, What::Read, i % 4 * 64, 256)).collect();
    stage.crash_node(0);
    for read in reads {
        stage.until("a read is answered", |s| s.is_answered(read));
    }
    stage.finish();
}

#[test]
fn damage_in_different_places_of_two_shards_is_read_around() {
    // Each block can be had, but not all runs of several: those are read block by block. In these seeds no block happens to
    // be damaged in two shards.
    for seed in [0, 1, 4, 5, 6, 9, 13, 18, 24, 32, 40, 50] {
        let mut stage = Scenery::new(seed).layout("parity:2+1").raise();
        stage.write_segments(8);
        stage.pass_ms(1500);
        for node in 0..2 {
            let disk = &mut stage.world().nodes[node].disks[0];
            let from = disk.silent_from;
            assert!(disk.rot(from, 3) > 0, "something rots");
        }
        stage.read(0, 256);
        assert!(stage.status().counters.checksum_errors > 0, "seed {seed}: damage was met");
        stage.until("it is repaired", |s| s.status().degraded_segments == 0);
        stage.finish();
    }
}

#[test]
fn what_is_being_made_again_is_not_damaged_anew_by_being_read() {
    for seed in 0..8 {
        let mut stage = Scenery::new(seed).layout("mirror:2").raise();
        stage.write_segments(8);
        stage.pass_ms(1500);
        let disk = &mut stage.world().nodes[0].disks[0];
        let from = disk.silent_from;
        assert!(disk.rot(from, 12) > 0, "something rots");
        let owner = stage.owner();
        // Also between the deletion of what is damaged and its successor.
        for _ in 0..400 {
            for block in (0..256).step_by(16) {
                stage.ask(owner, What::Read, block, 16);
            }
            stage.pass(Duration::from_micros(300));
        }
        stage.until("it is repaired", |s| s.status().degraded_segments == 0);
        let counters = stage.status().counters;
        assert!(counters.shards_rebuilt > 0, "seed {seed}: damage was met");
        assert_eq!(
            counters.checksum_errors, counters.shards_rebuilt,
            "seed {seed}: each is told of and made again once"
        );
        stage.finish();
    }
}

#[test]
fn damage_that_nobody_reads_is_found_and_repaired() {
    // Bits rot on one node; a scrub finds them before the node with the other copies is lost.
    for seed in 0..4 {
        let mut stage = Scenery::new(seed).with(|plan| plan.scrub_every = Duration::from_secs(2)).raise();
        if seed % 2 == 0 {
            // A node of the release before sends what it reads, and does not only tell whether it matches.
            stage.crash_node(0);
            stage.world().nodes[0].config.wire.newest = WIRE.oldest;
            stage.start_node(0);
        }
        stage.write_segments(8);
        stage.pass_ms(1500);
        let disk = &mut stage.world().nodes[0].disks[0];
        let from = disk.silent_from;
        assert!(disk.rot(from, 30) > 0, "something rots");
        let scrubbed = stage.status().counters.shards_scrubbed;
        let held = stage.status().segment_count * 2;
        stage.until("everything is scrubbed", |s| s.status().counters.shards_scrubbed > scrubbed + held + 2);
        stage.until("it is repaired", |s| s.status().degraded_segments == 0);
        assert!(stage.status().counters.shards_rebuilt > 0, "seed {seed}: damage was found");
        stage.crash_node(1);
        stage.read(0, 256);
        stage.crash_host(0);
        stage.take_over_on(1);
        stage.finish();
    }
}

#[test]
fn nodes_are_brought_to_a_new_release_one_after_the_other_under_an_owner_of_either() {
    let mut stage =
        Scenery::new(212).layout("parity:2+1").with(|plan| plan.scrub_every = Duration::from_secs(2)).raise();
    let old = Versions { newest: WIRE.oldest, ..WIRE };
    // All of the old release first; then up, and down again where the new one disappoints.
    for versions in [old, WIRE, old] {
        for node in 0..3 {
            stage.crash_node(node);
            stage.world().nodes[node].config.wire = versions;
            stage.write(node as u64 * 32, 24);
            stage.start_node(node);
            stage
                .until("full redundancy", |s| s.status().suspect_nodes.is_empty() && s.status().degraded_segments == 0);
            let scrubbed = stage.status().counters.shards_scrubbed;
            stage.until("shards are scrubbed", |s| s.status().counters.shards_scrubbed > scrubbed + 6);
        }
    }
    stage.finish();
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
        let scenery = Scenery::new(seed).nodes(4).layout(layout).with(|plan| {
            plan.volume_bytes = volume_mib << 20;
            plan.writeback_bytes = 2 << 20;
            plan.segment_bytes = 256 << 10;
            plan.sizing.journal_bytes = 3 << 20;
            // 15 MiB of each are for shards.
            plan.disk_bytes = 18_300 << 10;
        });
        let mut stage = scenery.raise();
        let (owner, blocks) = (stage.owner(), (volume_mib << 20) / BLOCK);
        for block in (0..blocks).step_by(16) {
            stage.write(block, 16);
        }
        let mut prng = Prng::new(seed);
        let mut writes: VecDeque<_> = VecDeque::new();
        for i in 0..3 * blocks / len {
            // At random, and from front to back: then whole segments die.
            let block = if seed % 2 == 0 { i * len % blocks } else { prng.below(blocks / len) * len };
            writes.push_back(stage.ask(owner, What::Write(0), block, len));
            if writes.len() >= 16 {
                let oldest = writes.pop_front().expect("just counted");
                stage.until("a write is done", |s| s.is_answered(oldest));
            }
        }
        assert!(stage.status().counters.segments_freed > 100);
        stage.finish();
    }
}

#[test]
fn what_is_set_aside_for_others_is_not_written_to() {
    // Guests' writes stop at it; what was acknowledged, and what the volume does for itself, goes on.
    for layout in ["mirror:2", "parity:2+1"] {
        let mut stage = Scenery::new(220).nodes(4).layout(layout).raise();
        stage.write_segments(4);
        let owner = stage.owner();
        let waiting: Vec<_> = (0..20).map(|i| stage.ask(owner, What::Write(0), 3 * i, 2)).collect();
        stage.set_aside(4, 1 << 40);
        for write in waiting {
            stage.until("a write is answered", |s| s.is_answered(write));
        }
        let before = stage.refused();
        stage.write(100, 8);
        assert_eq!(stage.refused(), before + 1, "nothing is left for it");
        stage.discard(0, 16);
        stage.read(0, 64);
        assert_eq!(stage.refused(), before + 1, "discards and reads are not held back");
        let checkpoints = stage.status().counters.checkpoints;
        stage.until("what was acknowledged is destaged", |s| s.status().log_bytes < BLOCK);
        stage.until("a checkpoint is written", |s| s.status().counters.checkpoints > checkpoints);
        // A successor learns of it anew.
        stage.crash_host(0);
        stage.take_over_on(1);
        stage.set_aside(4, 0);
        stage.write(100, 8);
        assert_eq!(stage.refused(), before + 1, "the others have let go of it");
        stage.finish();
    }
}

#[test]
fn a_snapshot_holds_what_was_there() {
    for layout in ["mirror:2", "parity:2+1"] {
        let mut stage = Scenery::new(210).nodes(4).layout(layout).raise();
        stage.write(0, 64);
        stage.write(100, 30);
        let first = stage.snapshot();
        stage.write(10, 8);
        stage.discard(100, 10);
        let second = stage.snapshot();
        stage.write(12, 2);
        stage.write(300, 40);
        stage.discard(0, 5);
        for pause in [0, 1000, 5000] {
            stage.pass_ms(pause);
            for name in [&first, &second] {
                stage.read_snapshot(name, 0, 256);
                stage.read_snapshot(name, 256, 256);
            }
            stage.read(0, 256);
            stage.read(256, 256);
        }
        // Another owner knows them, and what they hold.
        stage.crash_host(0);
        stage.take_over_on(1);
        for name in [&first, &second] {
            stage.read_snapshot(name, 0, 256);
            stage.read_snapshot(name, 256, 256);
        }
        stage.drop_snapshot(&first);
        stage.pass_ms(6000);
        stage.read_snapshot(&second, 0, 256);
        stage.drop_snapshot(&second);
        stage.pass_ms(6000);
        assert_eq!(stage.status().snapshots, []);
        stage.finish();
    }
}

#[test]
fn the_cleaner_leaves_snapshots_whole() {
    let mut stage = Scenery::new(211).nodes(4).layout("parity:2+1").raise();
    stage.write_segments(12);
    let name = stage.snapshot();
    let cleaned = stage.status().counters.segments_cleaned;
    let mut at = 0;
    while stage.status().counters.segments_cleaned < cleaned + 20 {
        stage.write(at % 250, 3);
        at += 7;
    }
    stage.read_snapshot(&name, 0, 256);
    // What was merged is cleaned under the key that it was written with.
    stage.drop_snapshot(&name);
    stage.pass_ms(8000);
    let cleaned = stage.status().counters.segments_cleaned;
    while stage.status().counters.segments_cleaned < cleaned + 20 {
        stage.write(at % 250, 3);
        at += 7;
    }
    stage.crash_host(0);
    stage.take_over_on(1);
    stage.read(0, 256);
    stage.finish();
}

#[test]
fn space_of_a_snapshot_comes_back_when_it_is_dropped() {
    let mut stage = Scenery::new(212).raise();
    let overwrite = |stage: &mut Stage| (0..256).step_by(8).for_each(|block| stage.write(block, 8));
    overwrite(&mut stage);
    stage.pass_ms(8000);
    let before = stage.status().mapped_blocks;
    assert_eq!(before, 256);
    let mut names = Vec::new();
    for _ in 0..4 {
        names.push(stage.snapshot());
        overwrite(&mut stage);
    }
    stage.pass_ms(4000);
    assert!(stage.status().mapped_blocks >= 5 * before, "each holds what was overwritten since");
    // From the middle, from the ends.
    for i in [1, 0, 3, 2] {
        stage.drop_snapshot(&names[i]);
        if i == 0 {
            stage.crash_host(0);
            stage.start_host(0);
            stage.take_over_on(1);
        }
    }
    stage.until("space is back", |s| s.status().mapped_blocks == before);
    stage.finish();
}

#[test]
fn a_snapshot_waits_for_bulk_writes_that_are_part_of_it() {
    let mut stage = Scenery::new(213).nodes(4).layout("parity:2+1").raise();
    let owner = stage.owner();
    let bulk: Vec<_> = (0..6).map(|i| stage.ask(owner, What::Write(0), i * 40, 40)).collect();
    let name = stage.snapshot();
    stage.write(0, 8);
    for write in bulk {
        stage.until("a write is done", |s| s.is_answered(write));
    }
    stage.read_snapshot(&name, 0, 256);
    stage.crash_host(0);
    stage.take_over_on(1);
    stage.read_snapshot(&name, 0, 256);
    stage.finish();
}

#[test]
fn a_group_of_snapshots_is_taken_while_answers_wait_or_undone() {
    let mut stage = Scenery::new(250).raise();
    stage.write(0, 64);
    let base = stage.snapshot();
    stage.read_snapshot(&base, 0, 512);
    let clone = stage.clone_snapshot(&base);
    let names = stage.begin_group(&[0, clone]);
    let owner = stage.owner();
    let writes = [stage.ask(owner, What::Write(0), 3, 2), stage.ask_clone(clone, What::Write(0), 5, 2)];
    stage.until("the group is over", |s| s.group_end().is_some());
    assert_eq!(stage.group_end(), Some(GroupEnd::Taken));
    stage.until("what was held back is told", |s| writes.iter().all(|write| s.is_answered(*write)));
    names.iter().for_each(|name| stage.read_snapshot(name, 0, 256));
    // Nobody to take the records: after a while the guests hear again, and what is taken later is dropped.
    stage.crash_node(1);
    stage.crash_node(2);
    let undone = stage.begin_group(&[0, clone]);
    stage.pass_ms(3_000);
    assert_eq!(stage.group_end(), None);
    stage.start_node(1);
    stage.start_node(2);
    stage.until("the group is undone", |s| s.group_end().is_some());
    assert_eq!(stage.group_end(), Some(GroupEnd::Failed { member: 0, why: Why::Late, left: Vec::new() }));
    let there: Vec<String> = stage.status().snapshots.into_iter().map(|(_, s)| s.name).collect();
    assert!(names.iter().all(|name| there.contains(name)) && !undone.iter().any(|name| there.contains(name)));
    stage.finish();
}

#[test]
fn clones_go_their_own_ways() {
    for layout in ["mirror:2", "parity:2+1"] {
        let mut stage = Scenery::new(214).nodes(4).layout(layout).raise();
        stage.write(0, 64);
        stage.write(200, 40);
        let base = stage.snapshot();
        let first = stage.clone_snapshot(&base);
        let second = stage.clone_snapshot(&base);
        stage.write_clone(first, 10, 20);
        stage.discard_clone(second, 5, 30);
        stage.write(0, 8);
        let of_first = stage.snapshot_of(first);
        let third = stage.clone_snapshot(&of_first);
        stage.write_clone(third, 12, 4);
        stage.write_clone(first, 0, 3);
        let all = [first, second, third];
        for pause in [0, 1000, 6000] {
            stage.pass_ms(pause);
            all.iter().for_each(|clone| stage.read_clone(*clone, 0, 256));
            stage.read(0, 256);
        }
        // What it came from may go first; so may one between two others.
        stage.drop_snapshot(&base);
        stage.drop_clone(first);
        stage.crash_host(0);
        stage.take_over_on(1);
        stage.pass_ms(8000);
        stage.read_clone(third, 0, 256);
        stage.read_clone(second, 0, 256);
        stage.finish();
    }
}

#[test]
fn a_rollback_brings_back_what_was_there_and_keeps_later_snapshots() {
    let mut stage = Scenery::new(215).nodes(4).layout("parity:2+1").raise();
    stage.write(0, 100);
    let first = stage.snapshot();
    stage.write(50, 100);
    stage.discard(0, 20);
    let second = stage.snapshot();
    stage.write(10, 8);
    stage.roll_back(0, &first);
    stage.read(0, 256);
    stage.write(60, 4);
    stage.pass_ms(6000);
    stage.read_snapshot(&second, 0, 256);
    // And forward again.
    stage.roll_back(0, &second);
    stage.crash_host(0);
    stage.take_over_on(1);
    stage.read(0, 256);
    stage.drop_snapshot(&first);
    stage.drop_snapshot(&second);
    stage.pass_ms(8000);
    assert_eq!(stage.status().mapped_blocks, 130, "what was rolled back is gone");
    stage.finish();
}

#[test]
fn bulk_writes_on_their_way_to_a_clone_that_is_dropped_do_no_harm() {
    let mut stage = Scenery::new(216).nodes(4).layout("parity:2+1").raise();
    stage.write(0, 200);
    let base = stage.snapshot();
    stage.read_snapshot(&base, 0, 512);
    let clone = stage.clone_snapshot(&base);
    let bulk: Vec<_> = (0..6).map(|i| stage.ask_clone(clone, What::Write(0), i * 40, 40)).collect();
    stage.drop_clone(clone);
    for write in bulk {
        stage.until("a write is done", |s| s.is_answered(write));
    }
    stage.pass_ms(8000);
    assert_eq!(stage.status().mapped_blocks, 200);
    stage.finish();
}

#[test]
fn a_disk_is_drained_while_it_is_written_to() {
    for (seed, layout, disks) in [(220, "parity:2+1", 1), (221, "mirror:2", 1), (222, "parity:2+1", 2)] {
        let mut stage = Scenery::new(seed).nodes(4).disks(disks).layout(layout).raise();
        stage.write_segments(12);
        stage.drain(Some((0, 0)));
        let mut at = 0;
        while stage.status().left_to_drain[0].1 > 0 {
            stage.write(at % 250, 3);
            stage.read(at % 200, 16);
            at += 7;
            assert!(at < 70_000, "{:?}", stage.status());
        }
        if disks == 1 {
            stage.until("what lay there is deleted", |s| s.held_by(0) == 0);
            // It is not missed.
            stage.crash_node(0);
            stage.pass_ms(2000);
            assert_eq!((stage.status().degraded_segments, stage.status().at_risk_entries), (0, 0));
            stage.read(0, 256);
        }
        // Another owner knows where things are now, and what is being drained.
        stage.crash_host(0);
        stage.take_over_on(1);
        // A segment that was just being freed is there once more.
        stage.until("nothing is left there", |stage| stage.status().left_to_drain[0].1 == 0);
        stage.read(0, 256);
        if disks == 1 {
            stage.start_node(0);
        }
        stage.finish();
    }
}

#[test]
fn a_drained_node_that_dies_is_not_waited_for() {
    let mut stage = Scenery::new(223).nodes(4).layout("parity:2+1").raise();
    stage.write_segments(30);
    stage.drain(Some((0, 0)));
    stage.crash_node(0);
    stage.until("what lay there is made again", |s| {
        let status = s.status();
        status.left_to_drain[0].1 == 0 && status.degraded_segments == 0
    });
    stage.start_node(0);
    stage.finish();
}

#[test]
fn a_new_node_takes_its_share() {
    let scenery = Scenery::new(224).nodes(4).layout("parity:2+1").with(|plan| {
        plan.volume_bytes = 8 << 20;
        plan.disk_bytes = 24 << 20;
    });
    let mut stage = scenery.raise();
    stage.crash_node(3);
    for block in (0..2048).step_by(16) {
        stage.write(block, 16);
    }
    stage.start_node(3);
    let fill = |s: &Stage, node: usize| s.held_by(node);
    stage.until("shards are moved to it", |s| fill(s, 3) * 2 > fill(s, 0) && s.status().counters.shards_moved > 10);
    for block in (0..2048).step_by(256) {
        stage.read(block, 256);
    }
    stage.finish();
}

#[test]
fn a_volume_is_written_in_another_layout_while_it_is_used() {
    let mut stage = Scenery::new(225).nodes(6).layout("parity:2+1").raise();
    stage.write_segments(30);
    let snapshot = stage.snapshot();
    let mut at = 0;
    for layout in ["mirror:2", "parity:4+2", "mirror:3", "parity:2+1"] {
        stage.set_layout(layout);
        while stage.status().degraded_segments > 0 {
            stage.write(at % 250, 3);
            stage.read(at % 200, 16);
            at += 7;
            assert!(at < 200_000, "{layout}: {:?}", stage.status());
        }
        // It bears what the layout promises: data, map and log.
        let failures = usize::from(stage.status().layout.failures());
        (0..failures).for_each(|node| stage.crash_node(node));
        stage.pass_ms(1000);
        stage.read(0, 256);
        stage.read_snapshot(&snapshot, 0, 256);
        stage.write(0, 8);
        (0..failures).for_each(|node| stage.start_node(node));
        stage.pass_ms(2000);
        let other = (stage.owner().host + 1) % 2;
        stage.crash_host(1 - other);
        stage.take_over_on(other);
        stage.start_host(1 - other);
        stage.read(0, 256);
    }
    stage.finish();
}

// ---- devices that are slow, not dead ----

/// A guest at work: a write and two reads twenty times a second. Returns the longest time that one of them took.
fn work(stage: &mut Stage, seconds: u64) -> Duration {
    let mut longest = Duration::ZERO;
    for i in 0..seconds * 20 {
        let start = stage.now();
        stage.write(i * 7 % 400, 2);
        let written = stage.now();
        stage.read(i * 13 % 400, 2);
        stage.read((i * 29 + 200) % 400, 1);
        longest = longest.max(written.since(start)).max(stage.now().since(written));
        stage.pass_ms(50);
    }
    longest
}

/// Its reads take 18 ms and more, its durable writes 36 ms and more.
const SLOWNESS: u32 = 300;

#[test]
fn a_slow_device_is_bypassed_and_trusted_again_when_it_has_recovered() {
    for layout in ["mirror:2", "parity:2+1"] {
        let mut stage = Scenery::new(31).nodes(4).layout(layout).raise();
        stage.write_segments(12);
        let slow = stage.leg_nodes()[0];
        let device = stage.device(slow, 0);
        stage.world().nodes[slow].disks[0].slowness = SLOWNESS;
        work(&mut stage, 20);
        assert!(stage.slow_devices().is_empty(), "it may be a moment's trouble");
        work(&mut stage, 40);
        assert_eq!(stage.slow_devices(), [(device, true)], "{layout}");
        stage.pass_ms(2000);
        assert!(!stage.leg_nodes().contains(&slow), "its log is elsewhere");
        let held = stage.held_by(slow);
        let longest = work(&mut stage, 20);
        assert!(longest < Duration::from_millis(10), "{layout}: {longest:?}");
        assert!(stage.held_by(slow) <= held, "{layout}: nothing new goes there");
        assert_eq!(stage.slow_devices(), [(device, true)], "it does little, and that little is slow");
        stage.world().nodes[slow].disks[0].slowness = 1;
        work(&mut stage, 60);
        assert!(stage.slow_devices().is_empty());
        work(&mut stage, 20);
        assert!(stage.held_by(slow) > 0, "{layout}: it is used again");
        stage.finish();
    }
}

#[test]
fn where_all_devices_are_slow_none_is_bypassed() {
    let mut stage = Scenery::new(32).nodes(4).raise();
    for node in 0..4 {
        stage.world().nodes[node].disks[0].slowness = SLOWNESS;
    }
    work(&mut stage, 90);
    assert!(stage.slow_devices().is_empty(), "{:?}", stage.slow_devices());
    stage.finish();
}

#[test]
fn a_slow_device_is_used_while_another_node_is_lost() {
    let mut stage = Scenery::new(33).raise();
    stage.write_segments(12);
    let (slow, lost) = (stage.leg_nodes()[0], stage.leg_nodes()[1]);
    let device = stage.device(slow, 0);
    stage.world().nodes[slow].disks[0].slowness = SLOWNESS;
    work(&mut stage, 60);
    assert_eq!(stage.slow_devices(), [(device, true)], "two nodes suffice for two copies");
    stage.crash_node(lost);
    work(&mut stage, 2);
    assert_eq!(stage.slow_devices(), [(device, false)], "every copy is needed");
    stage.until("no entry is at risk", |s| s.status().at_risk_entries == 0);
    stage.start_node(lost);
    work(&mut stage, 5);
    assert_eq!(stage.slow_devices(), [(device, true)]);
    stage.finish();
}

#[test]
fn devices_of_one_node_are_bypassed_at_a_time() {
    let mut stage = Scenery::new(34).nodes(5).raise();
    stage.write_segments(12);
    for node in [0, 1] {
        stage.world().nodes[node].disks[0].slowness = SLOWNESS;
    }
    work(&mut stage, 120);
    let slow = stage.slow_devices();
    assert!(!slow.is_empty() && slow.iter().filter(|(_, bypassed)| *bypassed).count() == 1, "{slow:?}");
    stage.finish();
}

#[test]
fn a_device_with_many_errors_is_bypassed() {
    let mut stage = Scenery::new(35).nodes(4).raise();
    stage.write_segments(12);
    let bad = (0..4).find(|node| stage.held_by(*node) > 4).expect("some node holds shards");
    let device = stage.device(bad, 0);
    stage.world().nodes[bad].disks[0].faults = DiskFaults { read_error: 300, ..DiskFaults::default() };
    work(&mut stage, 20);
    assert_eq!(stage.slow_devices(), [(device, true)]);
    stage.finish();
}

#[test]
fn writes_that_come_while_no_leg_can_be_used_leave_journals_room() {
    let mut stage = Scenery::new(71)
        .with(|plan| {
            (plan.volume_bytes, plan.writeback_bytes) = (16 << 20, 64 << 20);
            (plan.segment_bytes, plan.bypass_bytes) = (512 << 10, 512 << 10);
            plan.disk_bytes = 96 << 20;
        })
        .raise();
    let at = stage.owner();
    stage.write(0, 1);
    // Of three legs one is suspected, and the connection to another one is lost.
    stage.world().pause_node(0);
    stage.ask(at, What::Write(0), 1, 1);
    stage.pass_ms(60);
    stage.crash_node(1);
    stage.pass_ms(1);
    let asked: Vec<_> = (0..240).map(|i| stage.ask(at, What::Write(0), 16 + i * 12, 12)).collect();
    stage.pass_ms(20);
    stage.world().resume_node(0);
    stage.start_node(1);
    stage.until("all writes are answered", |s| asked.iter().all(|token| s.is_answered(*token)));
    stage.finish();
}

#[test]
fn the_third_node_of_three_is_drained_with_the_log_on_it() {
    let mut stage = Scenery::new(2510).nodes(3).layout("mirror:2").raise();
    stage.write_segments(6);
    for node in 0..3 {
        stage.drain(Some((node, 0)));
        stage.until("nothing is left there", |s| {
            let left = s.status().left_to_drain;
            !left.is_empty() && left.iter().all(|(_, left)| *left == 0)
        });
        stage.drain(None);
    }
    stage.finish();
}

#[test]
fn what_a_taker_copied_into_a_ledger_that_it_gives_up_is_copied_again() {
    for step in 0..24 {
        let seed = 2900 + step;
        let lost = (step % 3) as usize;
        let mut stage = Scenery::new(seed).with(|plan| plan.destage_age = Duration::from_secs(60)).raise();
        for block in (0..128).step_by(8) {
            stage.write(block, 8);
        }
        stage.crash_host(0);
        // Of what this node held there is one copy.
        stage.swap_disks(lost);
        stage.open_on(1);
        stage.until("it copies", |s| s.controller().dump().contains("step: Reappending"));
        stage.pass(Duration::from_micros(50 * step));
        // The new ledger's legs go away, and come back.
        (0..3).for_each(|node| stage.crash_node(node));
        stage.pass_ms(50);
        (0..3).for_each(|node| stage.start_node(node));
        stage.until("the taker serves", |s| s.serving().is_some());
        stage.until("it says that all is safe", |s| {
            s.status().at_risk_entries == 0 && s.status().degraded_segments == 0
        });
        // So another may go.
        stage.crash_host(1);
        stage.start_host(0);
        stage.swap_disks((lost + 1) % 3);
        stage.take_over_on(0);
        stage.read(0, 128);
        stage.finish();
    }
}
