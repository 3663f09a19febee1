//! What the old owner does for a hand-over, and how the new one reads the map beforehand, against ideal nodes. That hosts come and
//! go meanwhile belongs to the simulator.

use crate::support::*;
use holdfast_base::BLOCK_BYTES;
use holdfast_format::geometry::Layout;
use holdfast_format::record::Checkpoint;
use holdfast_format::root::Root;
use holdfast_volume::{Controller, Event, Notice, PreloadState, State};
use std::time::Duration;

const MIB: u64 = 1 << 20;

fn named(world: &World) -> Checkpoint {
    Root::decode(&world.root.1).unwrap().checkpoint
}

fn is_prepared(world: &World) -> bool {
    world.notices.iter().any(|notice| matches!(notice, Notice::Prepared))
}

fn prepare(world: &mut World) {
    world.notices.clear();
    world.push(Event::Prepare);
}

/// One with a little in it that is to be handed over now.
fn prepared(seed: u64) -> World {
    let mut world = World::new(seed, 3, Layout::Mirror { copies: 2 }, 16 * MIB);
    world.write_all(0, 2 * MIB);
    prepare(&mut world);
    world.run_until(is_prepared);
    world
}

/// All copies of the runs that the root names are gone.
fn delete_runs(world: &mut World) {
    let runs: Vec<_> = named(world).runs.iter().map(|run| run.segment.of(VOLUME)).collect();
    assert!(!runs.is_empty());
    for node in &mut world.nodes {
        node.shards.retain(|shard, _| !runs.contains(&shard.segment));
    }
}

fn preloaded(world: &World) -> &Controller {
    world.preloaded.as_ref().expect("another host has read it")
}

#[test]
fn a_volume_that_was_idle_for_however_long_is_prepared_within_moments() {
    for idle_seconds in [0, 1, 5, 20, 60, 301] {
        let mut world = World::new(1, 3, Layout::Mirror { copies: 2 }, 16 * MIB);
        world.write_all(0, 2 * MIB);
        world.span(Duration::from_secs(idle_seconds));
        prepare(&mut world);
        let from = world.now;
        while !is_prepared(&world) && world.now.since(from) < Duration::from_secs(30) {
            world.span(Duration::from_millis(1));
        }
        let took = world.now.since(from);
        assert!(took < Duration::from_secs(1), "after {idle_seconds} s: {took:?}");
        // What the root names is all there is.
        world.preload(1000);
        assert_eq!(preloaded(&world).preload_state(), Some(PreloadState::Done), "after {idle_seconds} s");
        world.open();
        let before: Vec<u8> = (0..BLOCK_BYTES).map(|i| (i % 251) as u8).collect();
        assert_eq!(world.read(0, BLOCK_BYTES as u64), before);
    }
}

#[test]
fn a_volume_that_nothing_was_written_to_is_prepared_and_read() {
    let mut world = World::new(1, 3, Layout::Mirror { copies: 2 }, 16 * MIB);
    prepare(&mut world);
    world.run_until(is_prepared);
    world.preload(1000);
    assert_eq!(preloaded(&world).preload_state(), Some(PreloadState::Done));
}

#[test]
fn a_map_that_can_not_be_read_is_told_apart_and_is_no_damage() {
    let mut world = prepared(2);
    delete_runs(&mut world);
    world.preload(1000);
    assert_eq!(preloaded(&world).preload_state(), Some(PreloadState::Unreadable));
    assert_eq!(preloaded(&world).status().counters.checksum_errors, 0);
    assert_eq!(world.controller.state(), State::Open);
}

#[test]
fn runs_that_another_host_may_be_reading_stay() {
    let mut world = prepared(3);
    let before = named(&world);
    // The log outgrows what the next owner may find, again and again.
    for round in 0..10 {
        world.write_all(round % 3 * 5 * MIB, 5 * MIB);
        world.span(Duration::from_millis(500));
    }
    let after = named(&world);
    assert!(after.lsn > before.lsn && after.runs.len() > 12, "{} runs", after.runs.len());
    assert!(after.runs.starts_with(&before.runs));
    // Nobody came. The chain is written anew, as ever.
    world.span(Duration::from_secs(20));
    world.write_all(0, MIB);
    world.span(Duration::from_secs(5));
    world.push(Event::Close);
    world.run_until(|w| w.controller.state() == State::Closed);
    world.open();
    prepare(&mut world);
    world.run_until(is_prepared);
    assert!(named(&world).runs.len() <= 12, "{} runs", named(&world).runs.len());
}

#[test]
fn who_asks_for_it_hears_that_a_log_can_not_be_emptied_just_now() {
    let mut world = World::new(5, 3, Layout::Mirror { copies: 2 }, 16 * MIB);
    world.write_all(0, MIB);
    // Of two copies one can't be written.
    world.node_down(1);
    world.node_down(2);
    prepare(&mut world);
    world.run_until(|world| world.notices.iter().any(|notice| matches!(notice, Notice::NotPrepared)));
    assert!(!is_prepared(&world));
    world.node_back(1);
    world.node_back(2);
    prepare(&mut world);
    world.run_until(is_prepared);
}
