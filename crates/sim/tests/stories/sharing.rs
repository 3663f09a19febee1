//! Stories of sharing domains (protocol rule 28): volumes with equal content, and the store that has it once.
//!
//! As in `scenarios`, every story ends with `finish`, which reads everything back and judges it.

use holdfast_sim::checker::REPEATED;
use holdfast_sim::scenario::{Cluster, Setup};
use std::time::Duration;

/// A quarter of a second until data is destaged, and room for everything twice.
fn setup(seed: u64) -> Setup {
    Setup::new(seed).with(|plan| {
        plan.disk_bytes = 48 << 20;
    })
}

/// The same content in as much of each.
fn install(cluster: &mut Cluster, members: &[usize], version: u32) {
    for member in members {
        for block in (0..512).step_by(8) {
            cluster.write_member_as(*member, block, 8, version);
        }
    }
}

fn is_shared(cluster: &Cluster, members: &[usize]) -> bool {
    members.iter().all(|member| cluster.shared_blocks(*member) >= 400)
}

#[test]
fn what_two_volumes_hold_alike_is_stored_once() {
    let mut cluster = setup(2801).start();
    let store = cluster.store();
    let members = [cluster.member_of(store), cluster.member_of(store)];
    install(&mut cluster, &members, 77);
    cluster.until("content is shared", |s| is_shared(s, &members));
    cluster.pass(Duration::from_secs(5));
    for member in members {
        let own = cluster.member_status(member).space;
        assert!(own.data_bytes <= 400 << 10, "{own:?} is its own of 2 MiB");
        cluster.read_member(member);
    }
    let stored = cluster.member_status(store).space;
    assert!(stored.data_bytes >= 1600 << 10 && stored.data_bytes <= 2 << 20, "{stored:?} is in the store");
    cluster.finish();
}

#[test]
fn what_many_tell_of_at_once_is_stored_once() {
    let mut cluster = setup(2806).start();
    let store = cluster.store();
    let members: Vec<usize> = (0..4).map(|_| cluster.member_of(store)).collect();
    install(&mut cluster, &members, 77);
    cluster.until_within(LONG, "content is shared", |s| is_shared(s, &members));
    cluster.pass(Duration::from_secs(20));
    let stored = cluster.member_status(store).space;
    assert!(stored.data_bytes <= 2 << 20, "{stored:?} is in the store");
    members.iter().for_each(|member| cluster.read_member(*member));
    cluster.finish();
}

#[test]
fn what_one_volume_holds_twice_is_stored_once() {
    let mut cluster = setup(2807).start();
    let store = cluster.store();
    let member = cluster.member_of(store);
    install(&mut cluster, &[member], REPEATED);
    cluster.until_within(LONG, "content is shared", |s| s.shared_blocks(member) >= 400);
    cluster.pass(Duration::from_secs(5));
    let (own, stored) = (cluster.member_status(member).space, cluster.member_status(store).space);
    assert!(own.data_bytes <= 400 << 10, "{own:?} is its own of 2 MiB");
    assert!(stored.data_bytes >= 800 << 10 && stored.data_bytes <= 1 << 20, "{stored:?} is in the store");
    cluster.read_member(member);
    cluster.finish();
}

#[test]
fn all_that_one_volume_holds_many_times_is_stored_once() {
    let mut cluster = setup(2809).with(|plan| (plan.volume_bytes, plan.disk_bytes) = (16 << 20, 192 << 20)).start();
    let store = cluster.store();
    let member = cluster.member_of(store);
    for block in (0..4096).step_by(8) {
        cluster.write_member_as(member, block, 8, REPEATED);
    }
    cluster.until_within(10 * LONG, "content is shared", |s| s.member_status(member).space.data_bytes <= 1 << 20);
    cluster.read_member(member);
    cluster.finish();
}

#[test]
fn what_was_moved_within_a_volume_is_not_taken_for_content_that_it_has_twice() {
    let mut cluster = setup(2808).start();
    let store = cluster.store();
    let member = cluster.member_of(store);
    install(&mut cluster, &[member], 77);
    cluster.pass(LONG);
    // A quarter of each segment stays, and is moved.
    (0..512).step_by(8).for_each(|block| cluster.write_member(member, block, 6));
    cluster
        .until_within(LONG, "what is left was moved", |s| s.member_status(member).counters.cleaned_bytes >= 512 << 10);
    cluster.pass(LONG);
    assert_eq!(cluster.shared_blocks(store), 0, "the store has something that its member has once");
    cluster.finish();
}

/// Long enough for whatever may be shared, freed or told again.
const LONG: Duration = Duration::from_secs(40);

#[test]
fn what_no_member_names_any_more_is_forgotten_and_freed() {
    let mut cluster = setup(2802).start();
    let store = cluster.store();
    let members = [cluster.member_of(store), cluster.member_of(store)];
    install(&mut cluster, &members, 77);
    cluster.until("content is shared", |s| is_shared(s, &members));
    for block in (0..512).step_by(8) {
        cluster.write_member(members[0], block, 8);
    }
    cluster.pass(LONG);
    let kept = cluster.member_status(store).space;
    assert!(kept.data_bytes >= 1600 << 10, "{kept:?}: one member names it yet");
    cluster.read_member(members[1]);
    for block in (0..512).step_by(8) {
        cluster.write_member(members[1], block, 8);
    }
    cluster.until_within(LONG, "the store is empty", |s| {
        let space = s.member_status(store).space;
        space.data_bytes + space.dead_bytes + space.kept_bytes == 0
    });
    cluster.finish();
}

/// Offers arrive when what they offer was forgotten, withdrawn and freed.
fn take_late(takes_old_offers: bool) {
    let mut cluster = setup(2830).with(|plan| plan.volume_mutations.takes_old_offers = takes_old_offers).start();
    let store = cluster.store();
    let members = [cluster.member_of(store), cluster.member_of(store)];
    cluster.hold_offers();
    install(&mut cluster, &members, 77);
    cluster.until("content is in the store", |s| s.shared_blocks(store) >= 400);
    cluster.until_within(LONG, "the store is empty", |s| {
        let space = s.member_status(store).space;
        space.data_bytes + space.dead_bytes + space.kept_bytes == 0
    });
    cluster.release_offers();
    cluster.pass(Duration::from_secs(2));
    members.iter().for_each(|member| cluster.read_member(*member));
    cluster.finish();
}

#[test]
fn an_offer_of_what_was_withdrawn_meanwhile_is_not_taken() {
    take_late(false);
}

#[test]
fn a_member_that_takes_whatever_is_offered_loses_it() {
    let lost = std::panic::catch_unwind(|| take_late(true));
    assert!(lost.is_err(), "nobody saw that a member names what was freed");
}

#[test]
fn a_member_that_is_deleted_holds_nothing() {
    let mut cluster = setup(2803).start();
    let store = cluster.store();
    let members = [cluster.member_of(store), cluster.member_of(store)];
    install(&mut cluster, &members, 77);
    cluster.until("content is shared", |s| is_shared(s, &members));
    members.iter().for_each(|member| cluster.drop_member(*member));
    cluster.until_within(LONG, "the store is empty", |s| {
        let space = s.member_status(store).space;
        space.data_bytes + space.dead_bytes + space.kept_bytes == 0
    });
    cluster.finish();
}

fn is_empty(cluster: &Cluster, store: usize) -> bool {
    let space = cluster.member_status(store).space;
    space.data_bytes + space.dead_bytes + space.kept_bytes == 0
}

#[test]
fn a_volume_that_asked_and_never_came_holds_nothing() {
    let mut cluster = setup(2840).start();
    let store = cluster.store();
    let late = cluster.half_joined(store);
    let members = [cluster.member_of(store), cluster.member_of(store)];
    install(&mut cluster, &members, 77);
    cluster.until("content is shared", |s| is_shared(s, &members));
    for member in members {
        (0..512).step_by(8).for_each(|block| cluster.write_member(member, block, 8));
    }
    cluster.until_within(LONG, "the store is empty", |s| is_empty(s, store));
    // It comes after all.
    cluster.wish_for(late, store);
    install(&mut cluster, &[members[0], late], 78);
    cluster.until_within(LONG, "content is shared", |s| is_shared(s, &[late]));
    cluster.read_member(late);
    cluster.finish();
}

#[test]
fn a_volume_has_separate_clones_or_is_in_a_domain() {
    let mut cluster = setup(2842).start();
    let store = cluster.store();
    let origin = cluster.volume();
    install(&mut cluster, &[origin], 77);
    cluster.separate_of_member(origin);
    cluster.wish_for(origin, store);
    cluster.pass(LONG);
    assert!(!cluster.has_members(store), "a volume with a separate clone is in a domain");
    // Of one that is to be in a domain, no clone is begun either.
    cluster.delay_talk(10 * LONG);
    let member = cluster.member_of(store);
    install(&mut cluster, &[member], 77);
    assert!(cluster.refuses_separate_of_member(member));
    cluster.finish();
}

#[test]
fn owners_of_store_and_members_come_and_go_and_what_is_shared_stays() {
    for seed in 2810..2816 {
        let mut cluster = setup(seed).start();
        let store = cluster.store();
        let members = [cluster.member_of(store), cluster.member_of(store)];
        for round in 0..6_u64 {
            install(&mut cluster, &members[..1], 70 + round as u32);
            cluster.open_member_on(store, (round % 2) as usize);
            cluster.write_member(members[1], round * 37, 64);
            install(&mut cluster, &members[1..], 70 + round as u32);
            cluster.open_member_on(members[(round % 2) as usize], (seed % 2) as usize);
            cluster.pass(Duration::from_millis(700 * (seed - 2809)));
        }
        cluster.pass(LONG);
        assert!(members.iter().map(|member| cluster.shared_blocks(*member)).sum::<u64>() > 100);
        members.iter().for_each(|member| cluster.read_member(*member));
        cluster.finish();
    }
}

#[test]
fn the_next_owner_of_a_store_is_told_again_what_members_remember() {
    let mut cluster = setup(2870).start();
    let store = cluster.store();
    let members = [cluster.member_of(store), cluster.member_of(store)];
    install(&mut cluster, &members[..1], 77);
    cluster.pass(LONG);
    cluster.open_member_on(store, 1);
    cluster.pass(Duration::from_secs(5));
    install(&mut cluster, &members[1..], 77);
    cluster.until_within(LONG, "content is shared", |s| is_shared(s, &members));
    members.iter().for_each(|member| cluster.read_member(*member));
    cluster.finish();
}

#[test]
fn a_store_whose_owner_hangs_is_in_nobodys_way() {
    let (mut cluster, store, members) = shared(setup(2872));
    cluster.open_member_on(store, 0);
    members.iter().for_each(|member| cluster.open_member_on(*member, 1));
    cluster.world().pause_host(0);
    let begun = cluster.now();
    for member in members {
        cluster.read_member(member);
        cluster.write_member(member, 40, 64);
    }
    let took = cluster.now().since(begun);
    assert!(took < Duration::from_secs(1), "members waited for {took:?}");
    cluster.pass(LONG);
    cluster.world().resume_host(0);
    install(&mut cluster, &members, 79);
    cluster.until_within(LONG, "they share again", |s| is_shared(s, &members));
    members.iter().for_each(|member| cluster.read_member(*member));
    cluster.finish();
}

#[test]
fn a_node_that_is_lost_takes_nothing_that_is_shared() {
    let mut cluster = setup(2820).nodes(4).with(|plan| plan.rebuild_after = Duration::from_secs(1)).start();
    let store = cluster.store();
    let members = [cluster.member_of(store), cluster.member_of(store)];
    install(&mut cluster, &members, 77);
    cluster.until("content is shared", |s| is_shared(s, &members));
    cluster.pass(Duration::from_secs(5));
    for node in 0..2 {
        cluster.crash_node(node);
        cluster.pass(Duration::from_secs(12));
    }
    members.iter().for_each(|member| cluster.read_member(*member));
    (0..2).for_each(|node| cluster.start_node(node));
    cluster.finish();
}

/// Nothing that the store had is the member's any more, and all of it is there.
fn is_on_its_own(cluster: &mut Cluster, member: usize) {
    let own = cluster.member_status(member).space;
    assert!(own.data_bytes >= 1600 << 10, "{own:?} is its own");
    cluster.read_member(member);
}

/// Two members that share all they have; a run of this seed.
fn shared(setup: Setup) -> (Cluster, usize, [usize; 2]) {
    let mut cluster = setup.start();
    let store = cluster.store();
    let members = [cluster.member_of(store), cluster.member_of(store)];
    install(&mut cluster, &members, 77);
    cluster.until_within(LONG, "content is shared", |s| is_shared(s, &members));
    (cluster, store, members)
}

#[test]
fn who_leaves_takes_along_what_it_has_and_holds_nothing() {
    let (mut cluster, store, members) = shared(setup(2840));
    cluster.take_out(members[0]);
    cluster.until_within(LONG, "the first has left", |s| s.is_out(members[0]));
    is_on_its_own(&mut cluster, members[0]);
    cluster.read_member(members[1]);
    cluster.take_out(members[1]);
    cluster.until_within(LONG, "both have left", |s| s.is_out(members[1]) && !s.has_members(store));
    cluster.until_within(LONG, "the store is empty", |s| is_empty(s, store));
    is_on_its_own(&mut cluster, members[1]);
    cluster.finish();
}

#[test]
fn who_leaves_may_come_back_and_owners_come_and_go() {
    for seed in 2841..2847 {
        let (mut cluster, store, members) = shared(setup(seed));
        cluster.delay_talk(Duration::from_millis(300));
        for round in 0..4_u64 {
            cluster.take_out(members[0]);
            cluster.pass(Duration::from_millis(200 * (seed - 2840) * (round + 1)));
            if round % 2 == 0 {
                cluster.open_member_on(members[0], (seed % 2) as usize);
            } else {
                cluster.open_member_on(store, (round % 2) as usize);
            }
            cluster.until_within(LONG, "it has left", |s| s.is_out(members[0]));
            cluster.pass(Duration::from_millis(150 * round));
            cluster.wish_for(members[0], store);
            install(&mut cluster, &members[..1], 77);
            cluster.pass(Duration::from_secs(4));
        }
        cluster.until_within(LONG, "it shares again", |s| !s.is_out(members[0]) && s.shared_blocks(members[0]) > 0);
        cluster.pass(LONG);
        members.iter().for_each(|member| cluster.read_member(*member));
        cluster.finish();
    }
}

#[test]
fn a_domain_is_encrypted_with_a_key_of_its_own() {
    let setup = setup(2852).nodes(4).with(|plan| {
        plan.encrypted = true;
        plan.rebuild_after = Duration::from_secs(1);
    });
    let (mut cluster, store, members) = shared(setup);
    cluster.pass(Duration::from_secs(5));
    let stored = cluster.member_status(store).space;
    assert!(stored.data_bytes >= 1600 << 10 && stored.data_bytes <= 2 << 20, "{stored:?} is in the store");
    for (round, member) in members.into_iter().enumerate() {
        cluster.open_member_on(member, round);
        cluster.read_member(member);
    }
    cluster.crash_node(1);
    cluster.pass(Duration::from_secs(12));
    members.iter().for_each(|member| cluster.read_member(*member));
    cluster.start_node(1);
    cluster.take_out(members[0]);
    cluster.until_within(LONG, "the first has left", |s| s.is_out(members[0]));
    is_on_its_own(&mut cluster, members[0]);
    cluster.finish();
}

#[test]
fn what_little_is_named_of_is_vacated_and_what_is_alike_of_that_gathered_anew() {
    let (mut cluster, store, members) = shared(setup(2860));
    // One block in eight stays, in both; of the last quarter all.
    for member in members {
        for block in (0..384).step_by(8) {
            cluster.write_member(member, block, 7);
        }
    }
    cluster.pass(LONG);
    cluster.pass(LONG);
    members.iter().for_each(|member| cluster.read_member(*member));
    let stored = cluster.member_status(store).space;
    // 48 blocks are left of 384, and may be shared again; 128 are as they were.
    assert!(stored.data_bytes <= (128 + 48 + 32) * 4096, "{stored:?} is in the store");
    assert!(stored.data_bytes >= 100 * 4096, "{stored:?} is in the store");
    cluster.finish();
}

/// Walks rest for as long as outside of the simulator, and what is there stays: so that a domain may come to rest.
fn slow(seed: u64) -> Setup {
    setup(seed).with(|plan| {
        plan.destage_age = Duration::from_secs(10);
        plan.forget_after = Duration::from_secs(3600);
        plan.audit_every = Duration::from_secs(3600);
    })
}

#[test]
fn a_domain_comes_to_rest_and_who_has_left_it_does() {
    for seed in 2870..2876 {
        let mut cluster = slow(seed).start();
        let store = cluster.store();
        let members = [cluster.member_of(store), cluster.member_of(store)];
        install(&mut cluster, &members, 77);
        let some = |s: &Cluster| members.iter().all(|member| s.shared_blocks(*member) >= 200);
        cluster.until_within(20 * LONG, "content is shared", some);
        cluster.until_within(20 * LONG, "members rest", |s| members.iter().all(|member| s.rests(*member)));
        cluster.until_within(LONG, "the store rests", |s| s.rests(store));
        // It leaves while something of what it has told is on its way.
        install(&mut cluster, &members[..1], 78);
        cluster.pass(Duration::from_secs(4 * (seed - 2868)));
        cluster.take_out(members[0]);
        cluster.until_within(20 * LONG, "it has left", |s| s.is_out(members[0]));
        cluster.until_within(20 * LONG, "it rests", |s| s.rests(members[0]));
        cluster.read_member(members[0]);
        cluster.finish();
    }
}

#[test]
fn who_has_left_one_domain_shares_in_another() {
    let mut cluster = setup(2880).start();
    let (older, newer) = (cluster.store(), cluster.store());
    let members = [cluster.member_of(older), cluster.member_of(newer)];
    install(&mut cluster, &members, 77);
    cluster.pass(LONG);
    assert_eq!(members.map(|member| cluster.shared_blocks(member)), [0, 0], "each is alone in its domain");
    cluster.take_out(members[1]);
    cluster.until_within(LONG, "it has left", |s| s.is_out(members[1]));
    cluster.wish_for(members[1], older);
    cluster.until_within(LONG, "content is shared", |s| is_shared(s, &members));
    members.iter().for_each(|member| cluster.read_member(*member));
    cluster.finish();
}
