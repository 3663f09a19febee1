//! A root swap that loses: to the old owner's own changes, to another owner, and to a store that was emptied or set back.

use crate::support::*;
use holdfast_base::{BLOCK_BYTES, Epoch, InstanceId, MetaVersion};
use holdfast_format::features::{Feature, Features};
use holdfast_format::geometry::Layout;
use holdfast_format::root::Root;
use holdfast_volume::{Event, Notice, State};
use std::time::Duration;

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
    for (root, told) in [(unserved, "feature 3 (heads)"), (newer, "newer release")] {
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

#[test]
fn a_claim_that_a_host_of_a_later_release_has_forestalled_ends_and_doubts_no_store() {
    let mut world = world();
    (world.guard, world.export) = (Some(MetaVersion(1)), MetaVersion(2));
    // Its record can't be read here.
    world.before_swap.push_back(|root| {
        root.0 = MetaVersion(root.0.0 + 1);
        root.1[4] += 9;
    });
    world.begin_open();
    world.run_until(|w| w.controller.state() == State::Closed);
    assert!(world.notices.iter().any(|notice| matches!(notice, Notice::NotClaimed)));
    assert!(!world.notices.iter().any(|notice| matches!(notice, Notice::StoreDoubted { .. })));
}

#[test]
fn a_claim_by_an_older_record_of_who_serves_deposes_nobody() {
    let mut world = world();
    let (before, promised) = (world.root.clone(), |w: &World| w.nodes.iter().map(|n| n.promised).collect::<Vec<_>>());
    let promises = promised(&world);
    (world.guard, world.export) = (Some(MetaVersion(1)), MetaVersion(2));
    world.begin_open();
    world.run_until(|w| w.controller.state() == State::Closed);
    assert_eq!((&world.root, promised(&world)), (&before, promises), "its owner goes on");
    assert!(world.notices.iter().any(|notice| matches!(notice, Notice::NotClaimed)));
    // By the newer one it is claimed, also where the root changes meanwhile.
    world.guard = Some(MetaVersion(2));
    world.before_swap.push_back(changed_by_owner);
    world.open();
    // Its own changes rest on nothing else.
    world.export = MetaVersion(3);
    world.push(Event::Resize { size_bytes: 20 * MIB });
    world.run_until(|w| Root::decode(&w.root.1).is_ok_and(|root| root.size_bytes == 20 * MIB));
}

#[test]
fn an_opening_goes_on_that_is_decided_anew_while_it_claims() {
    let mut world = world();
    (world.guard, world.export) = (Some(MetaVersion(1)), MetaVersion(2));
    world.guard_next = Some(MetaVersion(2));
    world.open();
    assert_eq!(world.guards_failed, 1);
}

#[test]
fn a_claim_that_had_won_unheard_stands_though_its_guard_fails_by_then() {
    let mut world = world();
    let before = epoch(&world);
    (world.guard, world.loses_answer) = (Some(MetaVersion(1)), true);
    world.open();
    assert_eq!((world.guards_failed, epoch(&world)), (1, before.next()));
}

#[test]
fn a_guard_in_a_store_that_was_emptied_decides_nothing() {
    let mut world = world();
    let (right, version) = (world.root.clone(), world.export);
    world.guard = Some(version);
    world.before_swap.push_back(emptied);
    world.export = MetaVersion::ABSENT;
    world.begin_open();
    world.span(Duration::from_secs(10));
    assert_eq!((world.controller.state(), doubts(&world)), (State::Opening, vec![true]));
    (world.root, world.export) = (right, version);
    world.run_until(|w| w.controller.state() == State::Open);
}
