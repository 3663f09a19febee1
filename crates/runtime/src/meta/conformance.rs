//! What every metadata store must do, as a suite that runs against any of them: the embedded one and etcd alike.
//!
//! Panics with the rule that is broken. Keys lie under `conformance/`, each check under a part of its own, so that a
//! store that holds other data can be checked; the checks delete what they make.

mod patient;

use super::{
    COMMIT_KEYS_MAX, Change, Commit, Compare, LeaseId, MetaError, MetaStore, Record, Revision, Swap, VALUE_BYTES_MAX,
    Watch, WatchEvent, Write,
};
use holdfast_base::MetaVersion;
use patient::Patient;
use std::cell::Cell;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// A store under test.
pub trait Subject {
    /// A new handle on the same store, with everything that was committed. The suite drops all earlier handles before
    /// it asks for another, except where it clones one.
    fn open(&self) -> Arc<dyn MetaStore>;

    /// Lets time pass for leases: by moving an injected clock, or by sleeping.
    fn advance(&self, span: Duration);

    /// Makes the store forget its changes so far, if it can be made to. False where it can't.
    fn forget_history(&self, _store: &dyn MetaStore) -> bool {
        false
    }
}

/// Time to live of the suite's leases: stores that count in whole seconds round it little.
const TTL: Duration = Duration::from_secs(3);

/// Time after which a lease is over for sure.
const TTL_AND_MORE: Duration = Duration::from_secs(6);

/// How long a watch may take to tell of a change that has happened.
const PATIENCE: Duration = Duration::from_secs(60);

fn open(subject: &dyn Subject) -> Arc<dyn MetaStore> {
    Arc::new(Patient(subject.open()))
}

/// Runs every check.
pub fn run(subject: &dyn Subject) {
    records_live_and_die(subject);
    versions_rise_for_ever(subject);
    lists_are_sorted_and_bounded_by_their_prefix(subject);
    a_swap_is_won_once(subject);
    transactions_happen_whole_or_not_at_all(subject);
    transactions_test_leases(subject);
    a_transaction_is_won_once(subject);
    records_survive_reopening(subject);
    leases_take_their_records_with_them(subject);
    leases_are_let_go_by_another_swap(subject);
    revoked_leases_are_gone(subject);
    watches_are_ordered_and_complete(subject);
    watches_resume_where_they_stopped(subject);
    watches_see_leases_end(subject);
    forgotten_history_is_an_error(subject);
}

fn key(part: &str) -> String {
    format!("conformance/{part}")
}

fn put(store: &dyn MetaStore, key: &str, expect: MetaVersion, value: &[u8]) -> MetaVersion {
    match store.swap(key, expect, Some(value), None).expect("swap") {
        Swap::Done(version) => version,
        Swap::Conflict(found) => panic!("{key}: expected {expect:?}, found {found:?}"),
    }
}

fn create_leased(store: &dyn MetaStore, key: &str, lease: LeaseId) -> MetaVersion {
    match store.swap(key, MetaVersion::ABSENT, Some(b"leased"), Some(lease)).expect("swap") {
        Swap::Done(version) => version,
        Swap::Conflict(found) => panic!("{key} is absent, found {found:?}"),
    }
}

fn delete(store: &dyn MetaStore, key: &str) {
    let expect = store.get(key).expect("get").map_or(MetaVersion::ABSENT, |r| r.version);
    let deleted = store.swap(key, expect, None, None).expect("swap");
    assert_eq!(deleted, Swap::Done(MetaVersion::ABSENT), "a deletion leaves no version");
    assert_eq!(store.get(key).expect("get"), None, "a deleted record is absent");
}

fn records_live_and_die(subject: &dyn Subject) {
    let store = open(subject);
    let key = key("life");
    assert_eq!(store.get(&key).expect("get"), None);
    let first = put(&*store, &key, MetaVersion::ABSENT, b"one");
    assert!(first > MetaVersion::ABSENT, "a record that is there has a version");
    let found = store.get(&key).expect("get").expect("the record is there");
    assert_eq!((found.version, found.value.as_slice(), found.lease), (first, b"one".as_slice(), None));

    let lost = store.swap(&key, MetaVersion::ABSENT, Some(b"two"), None).expect("swap");
    assert_eq!(lost, Swap::Conflict(Some(found.clone())), "creating what is there is a conflict, and shows it");
    let lost = store.swap(&key, MetaVersion(first.0 + 1), None, None).expect("swap");
    assert_eq!(lost, Swap::Conflict(Some(found)), "deleting another version is a conflict");
    let second = put(&*store, &key, first, b"");
    assert!(second > first, "a change raises the version");
    assert_eq!(store.get(&key).expect("get").expect("there").value, b"", "an empty value is a value");

    delete(&*store, &key);
    let lost = store.swap(&key, second, Some(b"three"), None).expect("swap");
    assert_eq!(lost, Swap::Conflict(None), "changing what is absent is a conflict");
    let nothing = store.swap(&key, MetaVersion::ABSENT, None, None).expect("swap");
    assert_eq!(nothing, Swap::Done(MetaVersion::ABSENT), "deleting what is absent changes nothing");
    assert_eq!(store.swap("", MetaVersion::ABSENT, Some(b"x"), None), Err(MetaError::TooLarge));
}

fn versions_rise_for_ever(subject: &dyn Subject) {
    let mut store = open(subject);
    let key = key("rise");
    let mut last = MetaVersion::ABSENT;
    for round in 0..3 {
        let created = put(&*store, &key, MetaVersion::ABSENT, b"created");
        assert!(created > last, "round {round}: {created:?} after {last:?}, over a deletion");
        last = put(&*store, &key, created, b"changed");
        assert!(last > created);
        delete(&*store, &key);
        drop(store);
        store = open(subject);
    }
}

fn lists_are_sorted_and_bounded_by_their_prefix(subject: &dyn Subject) {
    let store = open(subject);
    let names = ["list/b", "list/a", "list/a/x", "list/", "list0", "list", "list/\u{10ffff}"].map(key);
    let mut last = Revision(0);
    for name in &names {
        last = Revision(put(&*store, name, MetaVersion::ABSENT, name.as_bytes()).0);
    }
    let listing = store.list(&key("list/")).expect("list");
    let keys: Vec<_> = listing.records.iter().map(|r| r.key.as_str()).collect();
    assert_eq!(keys, ["list/", "list/a", "list/a/x", "list/b", "list/\u{10ffff}"].map(key), "sorted, all, no others");
    assert!(listing.records.iter().all(|r| r.value == r.key.as_bytes()));
    assert!(listing.revision >= last, "a listing is at least as new as the changes before it");
    assert!(store.list(&key("listless")).expect("list").records.is_empty());
    names.iter().for_each(|name| delete(&*store, name));
}

fn a_swap_is_won_once(subject: &dyn Subject) {
    const THREADS: usize = 4;
    const ROUNDS: u8 = 25;
    let store = open(subject);
    let key = &key("race");
    // Each thread counts in a place of its own: a swap that is lost or carried out twice shows there. One that a store did
    // not know the outcome of, and that others have swapped since, shows there as well.
    thread::scope(|scope| {
        for own in 0..THREADS {
            let store = Arc::clone(&store);
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let mut found = store.get(key).expect("get");
                    let mut is_asked = false;
                    loop {
                        let expect = found.as_ref().map_or(MetaVersion::ABSENT, |r| r.version);
                        let mut counts = found.map_or(vec![0; THREADS], |r| r.value);
                        if is_asked && counts[own] == round + 1 {
                            break;
                        }
                        assert_eq!(counts[own], round, "a swap was lost, or carried out twice");
                        counts[own] += 1;
                        is_asked = true;
                        match store.swap(key, expect, Some(&counts), None).expect("swap") {
                            Swap::Done(_) => break,
                            Swap::Conflict(other) => found = other,
                        }
                    }
                }
            });
        }
    });
    let counts = store.get(key).expect("get").expect("there").value;
    assert_eq!(counts, [ROUNDS; THREADS], "every swap counts exactly once");
    delete(&*store, key);
}

fn is(key: &str, version: MetaVersion) -> Compare {
    Compare { key: key.to_string(), version }
}

fn sets(key: &str, value: &[u8]) -> Write {
    Write { key: key.to_string(), value: Some(value.to_vec()), lease: None }
}

fn deletes(key: &str) -> Write {
    Write { key: key.to_string(), value: None, lease: None }
}

fn value_of(store: &dyn MetaStore, key: &str) -> Option<Vec<u8>> {
    store.get(key).expect("get").map(|record| record.value)
}

fn transactions_happen_whole_or_not_at_all(subject: &dyn Subject) {
    let mut store = open(subject);
    let (a, b, c) = (&key("txn/a"), &key("txn/b"), &key("txn/c"));
    let nothing = MetaVersion::ABSENT;
    let start = store.list(&key("txn/")).expect("list").revision.next();
    let made = store.commit(&[is(a, nothing), is(b, nothing)], &[sets(a, b"1"), sets(b, b"1")]).expect("commit");
    let Commit::Done(versions) = made else { panic!("both are absent: {made:?}") };
    let (va, vb) = (versions[0], versions[1]);
    for (key, version) in [(a, va), (b, vb)] {
        let found = store.get(key).expect("get").expect("it is there");
        assert_eq!(
            (found.version, found.value),
            (version, b"1".to_vec()),
            "the versions told are those that are there"
        );
    }
    // One compare of several that fails is enough.
    let lost = store.commit(&[is(a, va), is(b, nothing)], &[sets(a, b"2"), deletes(b), sets(c, b"2")]).expect("commit");
    let Commit::Conflict(found) = lost else { panic!("b is there: {lost:?}") };
    let found: Vec<_> = found.into_iter().map(|record| record.map(|r| (r.key, r.version, r.value))).collect();
    let there = |key: &String, version| Some((key.clone(), version, b"1".to_vec()));
    assert_eq!(found, [there(a, va), there(b, vb)], "a conflict shows all that was compared");
    assert_eq!((value_of(&*store, a), value_of(&*store, c)), (Some(b"1".to_vec()), None), "nothing of it happened");
    // What is written needs not be what is compared.
    let done = store.commit(&[is(b, vb)], &[sets(a, b"3"), deletes(b), sets(c, b"3")]).expect("commit");
    let Commit::Done(versions) = done else { panic!("b is as expected: {done:?}") };
    assert!(versions[0] > va && versions[1] == nothing && versions[2] > va, "{versions:?}");
    let all = store.list(&key("txn/")).expect("list").records;
    let all: Vec<_> = all.iter().map(|r| (r.key.as_str(), r.value.as_slice())).collect();
    assert_eq!(all, [(a.as_str(), b"3".as_slice()), (c.as_str(), b"3".as_slice())]);
    let events = collect(&mut *store.watch(&key("txn/"), start).expect("watch"), 5);
    assert!(events.is_sorted_by_key(|event| event.revision), "in order: {events:?}");

    let too_many: Vec<Write> = (0..=COMMIT_KEYS_MAX).map(|n| sets(&key(&format!("txn/{n}")), b"")).collect();
    let half = vec![0; VALUE_BYTES_MAX / 2 + 1];
    let refused: [&[Write]; 3] = [&too_many, &[sets(a, b""), sets(a, b"")], &[sets(a, &half), sets(c, &half)]];
    for writes in refused {
        assert_eq!(store.commit(&[], writes), Err(MetaError::TooLarge));
    }
    let most: Vec<Write> = too_many[1..].to_vec();
    let compares: Vec<Compare> = most.iter().map(|write| is(&write.key, nothing)).collect();
    assert!(matches!(store.commit(&compares, &most), Ok(Commit::Done(_))), "as many as are promised");
    drop(store);
    store = open(subject);
    assert_eq!(store.list(&key("txn/")).expect("list").records.len(), 2 + COMMIT_KEYS_MAX, "it is durable");
    most.iter().for_each(|write| delete(&*store, &write.key));
    delete(&*store, a);
    delete(&*store, c);
}

fn transactions_test_leases(subject: &dyn Subject) {
    let store = open(subject);
    let (a, b) = (&key("txn-lease/a"), &key("txn-lease/b"));
    let lease = store.grant(TTL_AND_MORE * 10).expect("grant");
    let leased = |key: &str| Write { lease: Some(lease), ..sets(key, b"leased") };
    assert!(matches!(store.commit(&[], &[leased(a), sets(b, b"1")]), Ok(Commit::Done(_))));
    assert_eq!(store.get(a).expect("get").expect("there").lease, Some(lease));
    store.revoke(lease).expect("revoke");
    assert_eq!(value_of(&*store, a), None);
    assert_eq!(store.commit(&[], &[sets(b, b"2"), leased(a)]), Err(MetaError::LeaseGone));
    assert_eq!(value_of(&*store, b), Some(b"1".to_vec()), "nothing of it happened");
    delete(&*store, b);
}

/// Money goes from one record to another and back: the sum is always the same, however many do it.
fn a_transaction_is_won_once(subject: &dyn Subject) {
    const THREADS: u64 = 3;
    const ROUNDS: u64 = 15;
    let store = open(subject);
    let (a, b) = (&key("sum/a"), &key("sum/b"));
    let log = |own: u64, round: u64| key(&format!("sum/done/{own}/{round}"));
    let number = |record: &Option<Record>| -> u64 {
        record.as_ref().map_or(1000, |r| String::from_utf8_lossy(&r.value).parse().expect("a number"))
    };
    let version = |record: &Option<Record>| record.as_ref().map_or(MetaVersion::ABSENT, |r| r.version);
    thread::scope(|scope| {
        for own in 0..THREADS {
            let store = Arc::clone(&store);
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    loop {
                        let (from, to) = (store.get(a).expect("get"), store.get(b).expect("get"));
                        let writes = [
                            sets(a, (number(&from) - own - 1).to_string().as_bytes()),
                            sets(b, (number(&to) + own + 1).to_string().as_bytes()),
                            sets(&log(own, round), b"done"),
                        ];
                        let compares =
                            [is(a, version(&from)), is(b, version(&to)), is(&log(own, round), MetaVersion::ABSENT)];
                        match store.commit(&compares, &writes).expect("commit") {
                            Commit::Done(_) => break,
                            // One that was not known to have happened.
                            Commit::Conflict(found) if found[2].is_some() => break,
                            Commit::Conflict(_) => {}
                        }
                    }
                }
            });
        }
    });
    let moved = ROUNDS * (1..=THREADS).sum::<u64>();
    let (from, to) = (store.get(a).expect("get"), store.get(b).expect("get"));
    assert_eq!((number(&from), number(&to)), (1000 - moved, 1000 + moved), "each transaction counts exactly once");
    for record in store.list(&key("sum/")).expect("list").records {
        delete(&*store, &record.key);
    }
}

fn records_survive_reopening(subject: &dyn Subject) {
    let store = open(subject);
    let key = key("reopen");
    let version = put(&*store, &key, MetaVersion::ABSENT, &[7; 70_000]);
    drop(store);
    let store = open(subject);
    let found = store.get(&key).expect("get").expect("a committed record survives");
    assert_eq!((found.version, found.value), (version, vec![7; 70_000]));
    delete(&*store, &key);
}

fn leases_take_their_records_with_them(subject: &dyn Subject) {
    let store = open(subject);
    let (a, b, free) = (key("lease/a"), key("lease/b"), key("lease/free"));
    let other = store.grant(TTL_AND_MORE * 20).expect("grant");
    create_leased(&*store, &b, other);
    put(&*store, &free, MetaVersion::ABSENT, b"free");
    let lease = in_time(&*store, &a, |lease, is_in_time| {
        assert_ne!(lease, other);
        assert!(store.get(&a).expect("get").is_none_or(|found| found.lease == Some(lease)));
        for _ in 0..4 {
            subject.advance(TTL * 2 / 3);
            let kept = store.keep_alive(lease);
            if !is_in_time() {
                return None;
            }
            kept.expect("a lease kept alive in time lives");
        }
        let found = store.get(&a).expect("get");
        is_in_time().then(|| assert!(found.is_some(), "a lease kept alive keeps its records"))?;
        Some(lease)
    });
    outlive(subject, &*store, &a);
    assert_eq!(store.keep_alive(lease), Err(MetaError::LeaseGone));
    let refused = store.swap(&a, MetaVersion::ABSENT, Some(b"late"), Some(lease));
    assert_eq!(refused, Err(MetaError::LeaseGone), "nothing is attached to a lease that is over");
    assert!(store.get(&b).expect("get").is_some(), "another lease's record stays");
    store.revoke(other).expect("revoke");
    delete(&*store, &free);
}

/// Does something while a record is there with a fresh lease, which is not over as long as it is in time. Where the
/// machine stood still for longer than a lease may last that says nothing, and it is done anew.
fn in_time<T>(store: &dyn MetaStore, key: &str, act: impl Fn(LeaseId, &dyn Fn() -> bool) -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        let at = Cell::new(Instant::now());
        // Of whatever came before it counts from here on.
        let is_in_time = || at.replace(Instant::now()).elapsed() < TTL;
        let lease = store.grant(TTL).expect("grant");
        let made = store.swap(key, MetaVersion::ABSENT, Some(b"leased"), Some(lease));
        if is_in_time() {
            assert!(matches!(made, Ok(Swap::Done(_))), "{key} is absent: {made:?}");
            if let Some(done) = act(lease, &is_in_time) {
                return done;
            }
        }
        assert!(Instant::now() < end, "the machine stands still again and again");
        // Whether the lease is over or not.
        let _ = store.revoke(lease);
        delete(store, key);
    }
}

/// Lets a lease be over, and with it the record that hangs on it. A store that can't write that down just then lets the lease
/// live anew.
fn outlive(subject: &dyn Subject, store: &dyn MetaStore, key: &str) {
    let end = Instant::now() + PATIENCE;
    loop {
        subject.advance(TTL_AND_MORE);
        if store.get(key).expect("get").is_none() {
            return;
        }
        assert!(Instant::now() < end, "a lease that is over takes its records along");
    }
}

fn leases_are_let_go_by_another_swap(subject: &dyn Subject) {
    let store = open(subject);
    let key = key("detach");
    in_time(&*store, &key, |_, is_in_time| {
        let leased = store.get(&key).expect("get").map_or(MetaVersion::ABSENT, |found| found.version);
        let freed = store.swap(&key, leased, Some(b"free"), None).expect("swap");
        is_in_time().then(|| assert!(matches!(freed, Swap::Done(_)), "{freed:?}"))
    });
    subject.advance(TTL_AND_MORE);
    let found = store.get(&key).expect("get").expect("a record swapped without a lease outlives the old one");
    assert_eq!(found.lease, None);
    delete(&*store, &key);
}

fn revoked_leases_are_gone(subject: &dyn Subject) {
    let store = open(subject);
    let key = key("revoke");
    let lease = store.grant(TTL_AND_MORE * 10).expect("grant");
    create_leased(&*store, &key, lease);
    store.revoke(lease).expect("revoke");
    assert_eq!(store.get(&key).expect("get"), None, "revoking deletes the lease's records");
    assert_eq!(store.keep_alive(lease), Err(MetaError::LeaseGone));
    assert_eq!(store.revoke(lease), Err(MetaError::LeaseGone));
}

/// Collects `count` events, or panics when they don't come.
fn collect(watch: &mut dyn Watch, count: usize) -> Vec<WatchEvent> {
    let mut events = Vec::new();
    let end = Instant::now() + PATIENCE;
    while events.len() < count {
        events.extend(watch.next(Duration::from_millis(100)).expect("watch"));
        assert!(Instant::now() < end, "{} of {count} events came: {events:?}", events.len());
    }
    assert_eq!(events.len(), count, "no more events than changes: {events:?}");
    assert!(events.is_sorted_by_key(|e| e.revision), "events come in order of revision: {events:?}");
    events
}

fn watches_are_ordered_and_complete(subject: &dyn Subject) {
    let store = open(subject);
    let start = store.list(&key("watch/")).expect("list").revision.next();
    let mut early = store.watch(&key("watch/"), start).expect("watch");
    assert_eq!(early.next(Duration::ZERO).expect("watch"), [], "nothing has happened yet");
    let (a, other) = (key("watch/a"), key("watching"));
    let writer = Arc::clone(&store);
    let versions = thread::scope(|scope| {
        let writing = scope.spawn(|| {
            let mut versions = vec![MetaVersion::ABSENT];
            for n in 0..10_u8 {
                versions.push(put(&*writer, &a, versions[n as usize], &[n]));
                put(&*writer, &other, MetaVersion::ABSENT, b"not watched");
                delete(&*writer, &other);
            }
            delete(&*writer, &a);
            versions
        });
        let events = collect(&mut *early, 11);
        check_history(&events, &a);
        writing.join().expect("writer")
    });
    // A watch that starts late sees the same.
    let mut late = store.watch(&key("watch/"), start).expect("watch");
    let events = collect(&mut *late, 11);
    check_history(&events, &a);
    for (event, version) in events.iter().zip(&versions[1..]) {
        let Change::Put(record) = &event.change else { panic!("{event:?}") };
        assert_eq!(record.version, *version);
        assert_eq!(event.revision, Revision(version.0), "a record's version is the revision of its change");
    }
    assert_eq!(late.next(Duration::ZERO).expect("watch"), []);
}

fn check_history(events: &[WatchEvent], key: &str) {
    assert!(events.iter().all(|e| e.key == key), "only keys under the prefix: {events:?}");
    for (n, event) in events.iter().enumerate() {
        match &event.change {
            Change::Put(record) => assert_eq!(record.value, [n as u8], "every change, in order"),
            Change::Deleted => assert_eq!(n, 10, "the deletion comes last"),
        }
    }
}

fn watches_resume_where_they_stopped(subject: &dyn Subject) {
    let store = open(subject);
    let (a, prefix) = (key("resume/a"), key("resume/"));
    let start = store.list(&prefix).expect("list").revision.next();
    let first = put(&*store, &a, MetaVersion::ABSENT, b"1");
    let mut watch = store.watch(&prefix, start).expect("watch");
    let seen = collect(&mut *watch, 1)[0].revision;
    drop(watch);
    let second = put(&*store, &a, first, b"2");
    drop(store);
    let store = open(subject);
    put(&*store, &a, second, b"3");
    let mut watch = store.watch(&prefix, seen.next()).expect("watch");
    let values: Vec<_> = collect(&mut *watch, 2)
        .into_iter()
        .map(|event| match event.change {
            Change::Put(record) => record.value,
            Change::Deleted => panic!("nothing was deleted"),
        })
        .collect();
    assert_eq!(values, [b"2", b"3"], "a watch continues over a gap and a reopening");
    delete(&*store, &a);
}

fn watches_see_leases_end(subject: &dyn Subject) {
    let store = open(subject);
    let (a, prefix) = (key("ending/a"), key("ending/"));
    let mut watch = in_time(&*store, &a, |_, is_in_time| {
        let leased = store.get(&a).expect("get");
        let from = Revision(leased.filter(|_| is_in_time())?.version.0).next();
        Some(store.watch(&prefix, from).expect("watch"))
    });
    outlive(subject, &*store, &a);
    let events = collect(&mut *watch, 1);
    assert_eq!((events[0].key.as_str(), &events[0].change), (a.as_str(), &Change::Deleted));
    // The next version is above the deletion's revision.
    assert!(put(&*store, &a, MetaVersion::ABSENT, b"again").0 > events[0].revision.0);
    delete(&*store, &a);
}

fn forgotten_history_is_an_error(subject: &dyn Subject) {
    let store = open(subject);
    let key = key("forgotten");
    let version = put(&*store, &key, MetaVersion::ABSENT, b"1");
    let mut slow = store.watch(&key, Revision(version.0)).expect("watch");
    if subject.forget_history(&*store) {
        let old = Revision(version.0);
        let failed = store.watch(&key, old).and_then(|mut watch| watch.next(PATIENCE)).expect_err("history is gone");
        assert!(matches!(failed, MetaError::Compacted { wanted, .. } if wanted == old), "{failed}");
        match slow.next(PATIENCE) {
            Err(failed) => assert!(matches!(failed, MetaError::Compacted { .. }), "{failed}"),
            // It was told before.
            Ok(events) => assert_eq!(events.iter().map(|e| e.revision).collect::<Vec<_>>(), [old], "the one change"),
        }
        let now = store.list(&key).expect("list").revision.next();
        assert_eq!(store.watch(&key, now).expect("watch").next(Duration::ZERO).expect("watch"), []);
    }
    delete(&*store, &key);
}
