//! The journal for ever: units return, what is idle is moved, what is full says so and still takes orders.

use crate::support::*;
use holdfast_base::{Buf, Epoch, VolumeId};
use holdfast_format::wire::{Refusal, Reply, Request};

#[test]
fn appending_and_trimming_goes_on_for_ever() {
    let mut rig = Rig::small(1);
    rig.create(5, 1, 0);
    for lsn in 1..20_000_u64 {
        let reply = rig.append(5, 1, 0, lsn, (lsn % 4) as usize);
        assert!(is_appended(&reply), "{lsn}: {reply:?}");
        if lsn % 8 == 0 {
            rig.call(trim(5, 1, ledger(1, 0), lsn - 4));
        }
        if lsn % 5000 == 0 {
            rig.restart(Crash::Power);
        }
    }
    rig.settle();
}

#[test]
fn an_idle_ledger_does_not_hold_the_journal() {
    let mut rig = Rig::small(2);
    for v in 100..110 {
        rig.create(v, 1, 0);
    }
    rig.create(5, 1, 0);
    let (mut lsn, mut idle, mut busy) = (0, 0_u64, 0);
    for round in 0..3000_u64 {
        lsn += 1;
        let mut reply = rig.append(5, 1, 0, lsn, 2);
        while reply == Reply::Refused(Refusal::Busy) {
            // A unit is being emptied.
            busy += 1;
            rig.complete_any();
            reply = rig.append(5, 1, 0, lsn, 2);
        }
        assert!(is_appended(&reply), "{round}: {reply:?}");
        rig.call(trim(5, 1, ledger(1, 0), lsn));
        // Now and then an entry of a ledger that is then left alone.
        if round % 200 == 50 {
            let v = 100 + u128::from(idle % 10);
            assert!(is_appended(&rig.append(v, 1, 0, idle / 10 + 1, 1)));
            idle += 1;
        }
    }
    assert!(busy < 100, "{busy} retries");
    rig.settle();
    for v in 100..110 {
        let entries = rig.read_log(v, 1, 0, 0).0;
        assert!(!entries.is_empty());
        for (entry, payload) in entries {
            assert_eq!(payload, entry_payload(v, 1, 0, entry.lsn.0, 1));
        }
    }
    rig.restart(Crash::Power);
    assert!((100..110).all(|v| !rig.read_log(v, 1, 0, 0).0.is_empty()));
}

#[test]
fn a_full_journal_refuses_entries_and_takes_orders() {
    let mut rig = Rig::small(3);
    rig.create(5, 1, 0);
    let (mut lsn, mut fill) = (0, 0);
    loop {
        match rig.append(5, 1, 0, lsn + 1, 3) {
            Reply::Appended { journal_fill, .. } => {
                assert!(journal_fill >= fill, "the fill only rises");
                fill = journal_fill;
                lsn += 1;
            }
            reply => {
                assert_eq!(reply, Reply::Refused(Refusal::NoSpace));
                break;
            }
        }
    }
    assert!(fill > 220, "full at {fill}/255");
    assert!(lsn * 3 * 4096 > 200 << 10, "{lsn} entries");
    // A thousand promises, creations and tombstones, through many crashes.
    for n in 0..1000_u64 {
        let v = u128::from(10 + n % 7);
        assert!(matches!(rig.call_patiently(fence(v, n + 1, 1)), Reply::Fenced { .. }), "{n}");
        let mut request = create(v, n + 1, 0);
        if let Request::CreateLedger { instance, .. } = &mut request {
            *instance = holdfast_base::InstanceId(1);
        }
        assert!(is_done(&rig.call_patiently(request)), "{n}");
        assert!(is_done(&rig.call_patiently(delete_ledger(v, n + 1, ledger(n + 1, 0)))), "{n}");
        if n % 10 == 3 {
            rig.restart(Crash::Power);
        }
    }
    assert_eq!(rig.read_log(5, 1, 0, 0).0.len() as u64, lsn, "and nothing was lost");
    assert!(is_done(&rig.call(trim(5, 1, ledger(1, 0), lsn))));
    rig.settle();
    assert!(is_appended(&rig.append(5, 1, 0, lsn + 1, 3)), "a trim makes room");
    let drop = Request::DropVolume { device: device(0), volume: VolumeId(5), epoch: Epoch(1) };
    assert!(is_done(&rig.call(drop)));
}

#[test]
fn tombstones_are_forgotten_and_deleted_ledgers_stay_deleted() {
    let mut rig = Rig::small(4);
    rig.create(5, 1, 0);
    for n in 1..400 {
        assert!(is_done(&rig.create(5, 1, n)));
        for lsn in 1..4 {
            assert!(is_appended(&rig.append(5, 1, n, lsn, 1)));
        }
        assert!(is_done(&rig.call(delete_ledger(5, 1, ledger(1, n)))));
        if n % 37 == 0 {
            rig.restart(Crash::Power);
            let told: Vec<_> = rig.fence(5, 1).1.iter().map(|l| l.ledger).collect();
            assert_eq!(told, [ledger(1, 0)]);
        }
    }
    rig.settle();
}

#[test]
fn opening_reads_no_payload_of_shards() {
    let read_at_open = |shards: u64| {
        let mut rig = Rig::new(5, &[64 << 20], JOURNAL_LARGE);
        for counter in 1..=shards {
            assert!(is_done(&rig.put(5, 1, counter, 100)));
        }
        rig.settle();
        rig.crash(Crash::Process);
        rig.disks[0].bytes_read = 0;
        rig.start();
        rig.settle();
        assert_eq!(rig.list(5).len() as u64, shards);
        rig.crash(Crash::Process);
        rig.disks[0].bytes_read
    };
    let (few, many) = (read_at_open(1), read_at_open(100));
    // What differs is one page of the list, not the open.
    assert_eq!(few, many);
}

#[test]
fn too_much_at_once_is_refused_as_busy() {
    let mut rig = Rig::new(
        6,
        &[256 << 20],
        holdfast_store::JournalSizing { journal_bytes: 128 << 20, unit_bytes: 4 << 20, shard_bytes_mean: 64 << 10 },
    );
    rig.create(5, 1, 0);
    rig.settle();
    let tokens: Vec<u64> = (1..=2000)
        .map(|lsn| {
            let (request, payload) = append(5, 1, 0, lsn, 0, 16);
            rig.send(request, payload)
        })
        .collect();
    let busy = tokens.iter().filter(|t| rig.replies.get(t).is_some_and(|r| r.0 == Reply::Refused(Refusal::Busy)));
    assert!(busy.count() > 500, "64 MiB of payload wait at most");
    rig.settle();
    assert!(tokens.iter().all(|t| rig.replies.contains_key(t)));
    assert!(is_appended(&rig.append(5, 1, 0, 2001, 1)));
    let _ = Buf::empty();
}
