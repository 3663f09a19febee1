//! What goes through a whole map, table or log does so in slices: openings, against ideal nodes. Folds and checkpoints
//! have their tests in the simulator.

use crate::support::*;
use holdfast_base::{BLOCK_BYTES, NodeId};
use holdfast_format::geometry::Layout;
use holdfast_format::root::Root;
use holdfast_volume::{Event, Inspection, Notice, PreloadState, Question, State};
use std::time::Duration;

const BLOCK: u64 = BLOCK_BYTES as u64;
const SLICE: usize = 64;

/// The end of what a slice is at: a part of a checkpoint, which is a quarter of a segment, is put together at once.
const BEYOND: usize = (128 << 10) / 4 / 256 + 64;

/// One with many runs in its checkpoints' overlay, and many entries in its log.
fn world(slice: usize) -> World {
    let mut world = World::new(1, 3, Layout::Mirror { copies: 2 }, 64 << 20);
    let mut bounds = config(0, 0);
    (bounds.slice_runs_max, bounds.fold_runs_min) = (slice, 1_000_000);
    (bounds.map_cache_bytes_max, bounds.writeback_bytes_max) = (64 << 20, 4 << 20);
    world.config = Some(bounds);
    world.open();
    for block in 0..1500 {
        world.write_all(block * 2 * BLOCK, BLOCK);
    }
    world.span(Duration::from_secs(4));
    for block in 0..300 {
        world.write_all(block * 6 * BLOCK, 2 * BLOCK);
    }
    world.turns.clear();
    world
}

fn judge(world: &World, of: &str) {
    let (turns, longest) = world.turns.get(of).copied().unwrap_or_default();
    assert!(turns > 1, "{of}: {turns} turns; {:?}", world.turns);
    assert!(longest < SLICE + BEYOND, "{of}: a turn of {longest}");
}

fn seen(world: &mut World) -> Vec<u8> {
    world.read(0, 3000 * BLOCK)
}

#[test]
fn an_opening_goes_in_slices_and_says_what_one_in_one_turn_says() {
    let mut whole = world(1 << 20);
    whole.open();
    assert!(whole.turns.values().all(|(turns, _)| *turns < 10), "{:?}", whole.turns);
    let mut sliced = world(SLICE);
    let from = sliced.now;
    sliced.open();
    for of in [
        "opening: the log is put together",
        "opening: the map is read",
        "opening: what is in the log is counted",
        "opening: the log is replayed",
        "opening: what lacks copies is looked for",
    ] {
        judge(&sliced, of);
    }
    let took = sliced.now.since(from);
    assert!(took < Duration::from_secs(1), "{took:?}");
    assert!(sliced.turns.values().all(|(_, longest)| *longest < SLICE + BEYOND), "{:?}", sliced.turns);
    assert_eq!(seen(&mut sliced), seen(&mut whole));
}

#[test]
fn what_was_read_beforehand_gets_its_log_in_slices() {
    let mut world = world(SLICE);
    // Of what was written last not all leaves the log, and a checkpoint that the root names says so.
    world.config.as_mut().expect("it has its own").destage_age_max = Duration::from_secs(3600);
    world.open();
    for block in 0..20 {
        world.write_all(block * 6 * BLOCK, 2 * BLOCK);
    }
    let before = seen(&mut world);
    world.span(Duration::from_secs(4));
    world.open();
    world.turns.clear();
    world.preload(100_000);
    let preloaded = world.preloaded.as_ref().expect("another host has read it");
    assert_eq!(preloaded.preload_state(), Some(PreloadState::Done));
    judge(&world, "opening: the map is read");
    world.open();
    judge(&world, "opening: what is in the log is counted");
    assert_eq!(seen(&mut world), before);
    // What is counted is what leaves the log.
    world.write_all(2500 * BLOCK, BLOCK);
    world.span(Duration::from_secs(4));
    world.open();
    assert_eq!(seen(&mut world), before);
}

/// Steps until it has begun to do that.
fn reach(world: &mut World, of: &str) {
    world.begin_open();
    world.run_until(|w| w.turns.get(of).is_some_and(|(turns, _)| *turns >= 2));
    assert_eq!(world.controller.state(), State::Opening);
}

#[test]
fn an_opening_that_ends_between_two_slices_leaves_all_to_the_next() {
    let mut world = world(SLICE);
    let before = seen(&mut world);
    for of in ["opening: the log is put together", "opening: the map is read", "opening: the log is replayed"] {
        world.turns.clear();
        reach(&mut world, of);
        world.push(Event::Close);
        assert_eq!((world.controller.state(), world.controller.next_deadline()), (State::Closed, None), "{of}");
        world.turns.clear();
        // So does one that crashes.
        reach(&mut world, of);
    }
    world.open();
    assert_eq!(seen(&mut world), before);
}

#[test]
fn nodes_that_go_and_come_between_two_slices_change_nothing_of_what_is_recovered() {
    let mut world = world(SLICE);
    let before = seen(&mut world);
    world.turns.clear();
    reach(&mut world, "opening: the log is replayed");
    world.node_down(0);
    world.run_until(|w| w.controller.state() == State::Open);
    world.node_up(0);
    assert_eq!(seen(&mut world), before);
}

#[test]
fn an_opening_names_no_ledger_of_which_it_copied_everything() {
    let named = |world: &World| Root::decode(&world.root.1).expect("a root").ledgers.len();
    let mut world = World::new(3, 3, Layout::Mirror { copies: 2 }, 16 << 20);
    world.write_all(0, 64 * BLOCK);
    let before = world.read(0, 64 * BLOCK);
    world.open();
    assert_eq!(named(&world), 2, "the log is in the former one");
    // What one of its legs had is copied, and so is all that the other has.
    world.node_down(0);
    world.open();
    assert_eq!(named(&world), 1);
    world.node_back(0);
    world.open();
    assert_eq!(world.read(0, 64 * BLOCK), before);
}

/// Many entries that are destaged soon, and go from the log slice by slice.
fn fill_log(world: &mut World) {
    for block in 0..800 {
        world.write_all(block * 3 * BLOCK, BLOCK);
    }
    assert!(world.controller.anatomy().log.entries > 400);
    world.turns.clear();
}

#[test]
fn legs_are_told_once_of_a_trim_that_goes_in_slices() {
    let mut world = world(SLICE);
    fill_log(&mut world);
    let (before, checkpoints) = (world.controller.anatomy().log, world.controller.status().counters.checkpoints);
    world.trims_told = 0;
    world.span(Duration::from_secs(4));
    let log = world.controller.anatomy().log;
    assert!(log.entries < 100 && world.turns["log: entries are forgotten"].0 > 5, "{log:?} {:?}", world.turns);
    let checkpoints = world.controller.status().counters.checkpoints - checkpoints;
    // One trim may have been under way before.
    let told_max = (checkpoints + 1) * before.legs.len() as u64 * before.ledgers;
    assert!(world.turns["log: entries are forgotten"].0 as u64 > 2 * (checkpoints + 1), "{:?}", world.turns);
    assert!((1..=told_max).contains(&world.trims_told), "{} times at {checkpoints} checkpoints", world.trims_told);
    // They have heard it all.
    let (open, _) = log.open.expect("it is served");
    for leg in log.legs {
        let node = world.nodes.iter().find(|node| node.id == leg.leg.node).expect("one of them");
        assert_eq!(node.ledgers[&open].trimmed, log.trimmed);
    }
}

#[test]
fn a_log_is_said_to_be_emptied_when_its_entries_are_gone() {
    let mut world = world(SLICE);
    fill_log(&mut world);
    world.notices.clear();
    world.push(Event::Prepare);
    world.run_until(|w| w.notices.iter().any(|notice| matches!(notice, Notice::Prepared)));
    let log = world.controller.anatomy().log;
    assert!(log.entries < 100, "{log:?}");
}

#[test]
fn a_volume_is_closed_when_its_log_is_gone() {
    let mut world = world(SLICE);
    fill_log(&mut world);
    world.push(Event::Close);
    world.run_until(|w| w.controller.state() == State::Closed);
    assert!(world.controller.anatomy().log.entries < 100 && world.turns["log: entries are forgotten"].0 > 5);
}

/// Segments that an inspection finds, in whatever slices.
fn inspected(world: &World, question: &Question) -> u64 {
    let in_slices_of = |count| {
        let mut inspection = Inspection::default();
        while !world.controller.inspect(question, &mut inspection, count) {}
        inspection.found()
    };
    let found = in_slices_of(usize::MAX);
    assert_eq!([1, 7].map(in_slices_of), [found; 2]);
    found
}

#[test]
fn what_lacks_copies_for_another_reason_than_a_nodes_absence_is_told_apart() {
    let mut world = World::new(4, 4, Layout::Mirror { copies: 2 }, 16 << 20);
    world.write_all(0, 1024 * BLOCK);
    world.span(Duration::from_secs(4));
    let (gone, other) = (world.nodes[0].id, world.nodes[1].id);
    let weak = |world: &World, node| inspected(world, &Question::WeakApartFrom(node));
    assert_eq!((weak(&world, gone), weak(&world, other)), (0, 0));
    world.node_down(0);
    assert!(weak(&world, gone) == 0 && weak(&world, other) > 1, "before they are judged anew it is counted");
    let before = weak(&world, other);
    world.span(Duration::from_secs(1));
    assert_eq!((weak(&world, gone), weak(&world, other)), (0, before));
}

#[test]
fn what_would_be_lost_without_nodes_is_told_as_things_are_now() {
    let mut world = World::new(4, 4, Layout::Mirror { copies: 2 }, 16 << 20);
    world.write_all(0, 1024 * BLOCK);
    world.span(Duration::from_secs(4));
    let nodes: Vec<NodeId> = world.nodes.iter().map(|node| node.id).collect();
    let lost = |world: &World, of: &[NodeId]| inspected(world, &Question::Lost(of.iter().copied().collect()));
    let all = lost(&world, &nodes);
    assert!(all > 4 && nodes.iter().all(|node| lost(&world, &[*node]) == 0), "one copy of each of {all} may go");
    let pair = lost(&world, &nodes[..2]);
    assert!(pair < all);
    world.node_down(0);
    assert_eq!((lost(&world, &[]), lost(&world, &nodes[1..2])), (0, pair), "one of the two is away already");
}

#[test]
fn one_that_is_served_no_more_says_nothing_of_its_segments() {
    let mut world = World::new(4, 4, Layout::Mirror { copies: 2 }, 16 << 20);
    world.write_all(0, 1024 * BLOCK);
    world.span(Duration::from_secs(4));
    world.push(Event::Close);
    world.run_until(|w| w.controller.state() == State::Closed);
    world.node_down(0);
    let other = world.nodes[1].id;
    assert_eq!(inspected(&world, &Question::WeakApartFrom(other)), 0);
    assert_eq!(world.controller.status().degraded_segments, 0);
}
