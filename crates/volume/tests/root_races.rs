//! A root swap that loses: to the old owner's own changes, to another owner, and to a store that was emptied or set back.

mod support;

use holdfast_base::{BLOCK_BYTES, Epoch, InstanceId, MetaVersion};
use holdfast_format::features::{Feature, Features};
use holdfast_format::geometry::Layout;
use holdfast_format::root::Root;
use holdfast_volume::{Event, Notice, State};
use std::time::Duration;
use support::*;

const MIB: u64 = 1 << 20;

fn change(record: &mut RootRecord, how: impl FnOnce(&mut Root)) {
    let mut root = Root::decode(&record.1).unwrap();
    how(&mut root);
    *record = (MetaVersion(record.0.0 + 1), root.encode());
}

/// As for a checkpoint that the owner has named just before it stopped.
fn changed_by_owner(record: &mut RootRecord) {
    change(record, |root| root.layout = Layout::Mirror { copies: 3 });
}

fn claimed_by_another(record: &mut RootRecord) {
    change(record, |root| (root.epoch, root.instance) = (root.epoch.next(), InstanceId(99)));
}

fn emptied(record: &mut RootRecord) {
    *record = (MetaVersion::ABSENT, Vec::new());
}

fn world() -> World {
    let mut world = World::new(1, 3, Layout::Mirror { copies: 2 }, 16 * MIB);
    world.write_all(0, MIB);
    world
}

fn epoch(world: &World) -> Epoch {
    Root::decode(&world.root.1).unwrap().epoch
}

fn doubts(world: &World) -> Vec<bool> {
    let doubted = |notice: &Notice| match notice {
        Notice::StoreDoubted { is_doubted } => Some(*is_doubted),
        _ => None,
    };
    world.notices.iter().filter_map(doubted).collect()
}

#[test]
fn the_old_owners_last_change_does_not_keep_the_next_from_claiming() {
    for changes in 1..4 {
        let mut world = world();
        let before = epoch(&world);
        world.before_swap.extend(vec![changed_by_owner as fn(&mut RootRecord); changes]);
        world.open();
        assert_eq!(epoch(&world), before.next(), "nothing was claimed in vain");
        assert_eq!(
            Root::decode(&world.root.1).unwrap().layout,
            Layout::Mirror { copies: 3 },
            "what the old owner changed last stands"
        );
        assert_eq!(world.read(0, BLOCK_BYTES as u64).len(), BLOCK_BYTES);
    }
}

#[test]
fn an_opening_gives_way_to_one_that_has_claimed_first() {
    let mut world = world();
    world.before_swap.push_back(claimed_by_another);
    world.begin_open();
    world.run_until(|w| w.controller.state() == State::Deposed);
}

#[test]
fn an_owner_gives_way_to_a_higher_epoch_only() {
    let mut world = world();
    world.before_swap.push_back(claimed_by_another);
    world.push(Event::Resize { size_bytes: 20 * MIB });
    world.run_until(|w| w.controller.state() == State::Deposed);
}

#[test]
fn a_store_that_was_emptied_or_set_back_deposes_nobody() {
    let set_back = |record: &mut RootRecord| change(record, |root| root.epoch = Epoch(0));
    for fault in [emptied as fn(&mut RootRecord), set_back] {
        let mut world = world();
        let right = world.root.clone();
        world.before_swap.push_back(fault);
        world.push(Event::Resize { size_bytes: 20 * MIB });
        world.span(Duration::from_secs(30));
        assert_eq!(world.controller.state(), State::Open);
        assert_eq!(doubts(&world), [true], "it is told once");
        world.write_all(MIB, MIB);
        assert_eq!(world.read(0, BLOCK_BYTES as u64).len(), BLOCK_BYTES);
        // The right one is back: what waited for it goes on.
        world.root = right;
        world.run_until(|w| Root::decode(&w.root.1).is_ok_and(|root| root.size_bytes == 20 * MIB));
        world.span(Duration::from_secs(1));
        assert_eq!(doubts(&world), [true, false]);
    }
}

#[test]
fn a_volume_that_uses_what_is_not_served_waits_says_what_and_is_as_it_was() {
    let mut world = world();
    let right = world.root.clone();
    change(&mut world.root, |root| root.features = Features::default().with(Feature::Heads).with(Feature::Packed));
    let unserved = world.root.clone();
    let mut newer = unserved.clone();
    newer.1[4] += 1;
    for (root, told) in [(unserved, "feature 2 (packed)"), (newer, "newer release")] {
        world.root = root.clone();
        world.notices.clear();
        world.begin_open();
        world.span(Duration::from_secs(10));
        assert_eq!(world.controller.state(), State::Opening);
        let tells = |notice: &Notice| matches!(notice, Notice::OpenWaits { why } if why.contains(told));
        assert_eq!(world.notices.iter().filter(|notice| tells(notice)).count(), 1, "{:?}", world.notices);
        assert!(world.root == root, "nobody claims what it can't serve");
    }
    world.root = right;
    world.open();
    assert_eq!(world.read(0, BLOCK_BYTES as u64).len(), BLOCK_BYTES);
}

#[test]
fn an_opening_waits_for_a_store_that_was_emptied() {
    let mut world = world();
    let right = world.root.clone();
    emptied(&mut world.root);
    world.begin_open();
    world.span(Duration::from_secs(10));
    assert_eq!(world.controller.state(), State::Opening);
    world.root = right;
    world.run_until(|w| w.controller.state() == State::Open);
    // The same between reading the record and claiming.
    let now = world.root.clone();
    world.before_swap.push_back(emptied);
    world.begin_open();
    world.span(Duration::from_secs(10));
    assert_eq!(world.controller.state(), State::Opening);
    world.root = now;
    world.run_until(|w| w.controller.state() == State::Open);
}
