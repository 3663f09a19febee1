//! Random work, crashes at any write, and after each: everything acknowledged is there, what was fenced stays fenced,
//! nothing overlaps, nothing leaks.

use crate::support::*;
use holdfast_base::{Buf, Epoch, LedgerId, Lsn, Prng, ShardId, VolumeId};
use holdfast_format::wire::{Refusal, Reply, Request};
use holdfast_store::{Mutations, Notice};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Default, Debug)]
struct LedgerModel {
    created: bool,
    delete_sent: bool,
    deleted: bool,
    sent: BTreeMap<u64, usize>,
    acked: BTreeSet<u64>,
    trim_sent: u64,
    next_lsn: u64,
}

#[derive(Default, Debug)]
struct VolumeModel {
    epoch: u64,
    /// Highest epoch whose fence or creation was answered.
    promised: u64,
    ledgers: BTreeMap<LedgerId, LedgerModel>,
    next_counter: u64,
    shards_sent: BTreeMap<ShardId, u32>,
    shards_acked: BTreeSet<ShardId>,
    delete_sent: BTreeSet<ShardId>,
    shards_deleted: BTreeSet<ShardId>,
}

enum Sent {
    Create(u128, LedgerId),
    Append(u128, LedgerId, u64),
    Fence(u128, u64),
    DeleteLedger(u128, LedgerId),
    Put(u128, ShardId),
    DeleteShards(u128, Vec<ShardId>),
    Drop(u128, Vec<LedgerId>, Vec<ShardId>),
    Ignored,
}

struct Test {
    rig: Rig,
    prng: Prng,
    volumes: BTreeMap<u128, VolumeModel>,
    waiting: BTreeMap<u64, Sent>,
    acks: u64,
}

const VOLUMES: u64 = 4;

impl Test {
    fn new(seed: u64) -> Test {
        let mut prng = Prng::new(seed);
        let rig = Rig::small(prng.next_u64());
        let volumes = (1..=VOLUMES).map(|v| (u128::from(v), VolumeModel { epoch: 1, ..Default::default() })).collect();
        Test { rig, prng, volumes, waiting: BTreeMap::new(), acks: 0 }
    }

    fn send(&mut self, request: Request, payload: Buf, sent: Sent) {
        let token = self.rig.send(request, payload);
        self.waiting.insert(token, sent);
    }

    /// Appends somewhere; where a fence was answered already, only to be refused.
    fn append_step(&mut self, v: u128, id: LedgerId) {
        let volume = self.volumes.get_mut(&v).unwrap();
        let epoch = volume.epoch;
        let held = volume.ledgers.get_mut(&id).unwrap();
        if id.epoch.0 < volume.promised && id.epoch.0 < epoch {
            let (request, payload) = append(v, id.epoch.0, id.n, held.next_lsn, 0, 1);
            let reply = self.rig.call_with(request, payload).0;
            assert!(matches!(reply, Reply::Refused(Refusal::StaleEpoch { .. })), "fenced, but {reply:?}");
            return;
        }
        let lsn = held.next_lsn;
        held.next_lsn += self.prng.between(1, 2);
        let blocks = self.prng.below(4) as usize;
        held.sent.insert(lsn, blocks);
        let (request, payload) = append(v, id.epoch.0, id.n, lsn, lsn.saturating_sub(3), blocks);
        self.send(request, payload, Sent::Append(v, id, lsn));
    }

    fn step(&mut self) {
        let v = u128::from(self.prng.between(1, VOLUMES));
        let volume = self.volumes.get_mut(&v).unwrap();
        let epoch = volume.epoch;
        let all: Vec<LedgerId> = volume.ledgers.iter().filter(|(_, l)| !l.delete_sent).map(|(id, _)| *id).collect();
        match self.prng.below(100) {
            0..5 => {
                let id = ledger(epoch, volume.ledgers.len() as u32);
                volume.ledgers.insert(id, LedgerModel { next_lsn: 1, ..Default::default() });
                self.send(create(v, epoch, id.n), Buf::empty(), Sent::Create(v, id));
            }
            5..60 if !all.is_empty() => {
                let id = *self.prng.pick(&all);
                self.append_step(v, id);
            }
            60..72 if !all.is_empty() => {
                let id = *self.prng.pick(&all);
                let held = volume.ledgers.get_mut(&id).unwrap();
                // Only what is acknowledged is trimmed.
                if let Some(upto) = held.acked.iter().nth_back(self.prng.below(4) as usize).copied() {
                    held.trim_sent = held.trim_sent.max(upto);
                    self.send(trim(v, epoch, id, upto), Buf::empty(), Sent::Ignored);
                }
            }
            72..76 if !all.is_empty() => {
                let id = *self.prng.pick(&all);
                volume.ledgers.get_mut(&id).unwrap().delete_sent = true;
                self.send(delete_ledger(v, epoch, id), Buf::empty(), Sent::DeleteLedger(v, id));
            }
            76..79 => {
                volume.epoch += 1;
                let epoch = volume.epoch;
                self.send(fence(v, epoch, u128::from(epoch)), Buf::empty(), Sent::Fence(v, epoch));
            }
            79..90 => {
                volume.next_counter += 1;
                let blocks = self.prng.between(1, 12) as u32;
                let shard = shard_id(v, epoch, volume.next_counter);
                volume.shards_sent.insert(shard, blocks);
                let (request, payload) = put(v, epoch, volume.next_counter, blocks);
                self.send(request, payload, Sent::Put(v, shard));
            }
            90..97 => {
                let some: Vec<ShardId> = volume.shards_acked.difference(&volume.delete_sent).copied().collect();
                let some: Vec<ShardId> = some.into_iter().filter(|_| self.prng.chance(600)).collect();
                volume.delete_sent.extend(&some);
                let request = Request::DeleteShards {
                    device: device(0),
                    volume: VolumeId(v),
                    epoch: Epoch(epoch),
                    shards: some.clone(),
                };
                self.send(request, Buf::empty(), Sent::DeleteShards(v, some));
            }
            97 if self.prng.chance(300) => {
                let shards: Vec<ShardId> = volume.shards_sent.keys().copied().collect();
                volume.delete_sent.extend(&shards);
                let acked: Vec<LedgerId> =
                    volume.ledgers.iter().filter(|(_, l)| l.created).map(|(id, _)| *id).collect();
                volume.ledgers.values_mut().for_each(|l| l.delete_sent = true);
                let acked_shards = volume.shards_acked.iter().copied().collect();
                let drop = Request::DropVolume { device: device(0), volume: VolumeId(v), epoch: Epoch(epoch) };
                self.send(drop, Buf::empty(), Sent::Drop(v, acked, acked_shards));
            }
            _ => {
                self.rig.tick();
            }
        }
    }

    fn harvest(&mut self) {
        for (token, (reply, _)) in std::mem::take(&mut self.rig.replies) {
            let Some(sent) = self.waiting.remove(&token) else { continue };
            if let Reply::Refused(refusal) = reply {
                let expected = matches!(
                    refusal,
                    Refusal::Busy | Refusal::NoSpace | Refusal::UnknownLedger | Refusal::StaleEpoch { .. }
                );
                assert!(expected, "{refusal:?}");
                continue;
            }
            self.acks += 1;
            match sent {
                Sent::Create(v, id) => {
                    let volume = self.volumes.get_mut(&v).unwrap();
                    volume.promised = volume.promised.max(id.epoch.0);
                    volume.ledgers.get_mut(&id).unwrap().created = true;
                }
                Sent::Append(v, id, lsn) => {
                    let volume = self.volumes.get_mut(&v).unwrap();
                    assert!(id.epoch.0 >= volume.promised, "acknowledged after the fence");
                    volume.ledgers.get_mut(&id).unwrap().acked.insert(lsn);
                }
                Sent::Fence(v, epoch) => {
                    let Reply::Fenced { ledgers, .. } = reply else { panic!("{reply:?}") };
                    let volume = self.volumes.get_mut(&v).unwrap();
                    volume.promised = volume.promised.max(epoch);
                    for (id, held) in volume.ledgers.iter().filter(|(_, l)| l.created && !l.delete_sent) {
                        let state = ledgers.iter().find(|s| s.ledger == *id).expect("a created ledger is told");
                        let last = held.acked.last().copied().unwrap_or(0);
                        assert!(state.sound && state.last.0.max(state.trimmed.0) >= last, "{state:?} {held:?}");
                    }
                }
                Sent::DeleteLedger(v, id) => {
                    self.volumes.get_mut(&v).unwrap().ledgers.get_mut(&id).unwrap().deleted = true;
                }
                Sent::Put(v, shard) => {
                    self.volumes.get_mut(&v).unwrap().shards_acked.insert(shard);
                }
                Sent::DeleteShards(v, shards) => {
                    self.volumes.get_mut(&v).unwrap().shards_deleted.extend(shards);
                }
                Sent::Drop(v, ledgers, shards) => {
                    let volume = self.volumes.get_mut(&v).unwrap();
                    for id in ledgers {
                        volume.ledgers.get_mut(&id).unwrap().deleted = true;
                    }
                    volume.shards_deleted.extend(shards);
                }
                Sent::Ignored => {}
            }
        }
    }

    fn check(&mut self) {
        for v in 1..=u128::from(VOLUMES) {
            self.check_promise(v);
            let volume = &self.volumes[&v];
            let ledgers: Vec<LedgerId> = volume.ledgers.keys().copied().collect();
            for id in ledgers {
                self.check_ledger(v, id);
            }
            self.check_shards(v);
        }
    }

    fn check_promise(&mut self, v: u128) {
        let volume = self.volumes.get_mut(&v).unwrap();
        if volume.promised > 0 {
            let grant = Request::Grant { device: device(0), volume: VolumeId(v), epoch: Epoch(volume.promised - 1) };
            let reply = self.rig.call(grant);
            let Reply::Refused(Refusal::StaleEpoch { promised }) = reply else { panic!("{v}: {reply:?}") };
            assert!(promised.0 >= volume.promised && promised.0 <= volume.epoch, "{promised:?} {volume:?}");
            let other = fence(v, volume.promised, 999);
            assert!(matches!(self.rig.call(other), Reply::Refused(Refusal::StaleEpoch { .. })));
        }
    }

    fn check_ledger(&mut self, v: u128, id: LedgerId) {
        let held = &self.volumes[&v].ledgers[&id];
        let probe =
            Request::ReadLog { device: device(0), volume: VolumeId(v), ledger: id, from: Lsn(u64::MAX), bytes_max: 1 };
        let is_known = matches!(self.rig.call(probe), Reply::LogEntries { .. });
        assert!(!held.deleted || !is_known, "{id:?} of {v} is back after its deletion");
        assert!(!held.created || held.delete_sent || is_known, "{id:?} of {v} is lost: {held:?}");
        if !is_known {
            return;
        }
        let (entries, damaged) = self.rig.read_log(v, id.epoch.0, id.n, 0);
        assert!(damaged.is_empty(), "{id:?} of {v}: {damaged:?}");
        let mut found = BTreeSet::new();
        for (entry, payload) in entries {
            let lsn = entry.lsn.0;
            let blocks = held.sent[&lsn];
            assert_eq!(payload, entry_payload(v, id.epoch.0, id.n, lsn, blocks));
            assert_eq!(entry.header, format!("entry {lsn}").into_bytes());
            found.insert(lsn);
        }
        let lost: Vec<u64> = held.acked.iter().copied().filter(|l| !found.contains(l) && *l > held.trim_sent).collect();
        assert!(lost.is_empty(), "{id:?} of {v} lacks {lost:?} of {held:?}");
    }

    fn check_shards(&mut self, v: u128) {
        let volume = &self.volumes[&v];
        let listed: BTreeSet<ShardId> = self.rig.list(v).into_iter().collect();
        for shard in volume.shards_acked.difference(&volume.delete_sent) {
            assert!(listed.contains(shard), "{shard:?} is lost");
        }
        for shard in &listed {
            assert!(!volume.shards_deleted.contains(shard), "{shard:?} is back");
            let blocks = volume.shards_sent[shard];
            assert_eq!(self.rig.read_shard(*shard, 0, blocks), Ok(shard_data(*shard, blocks)));
        }
    }

    /// A sound leg never says "I lack it" of what was acknowledged here: what is below the trim point that it tells was
    /// trimmed, and what is above it is there.
    fn check_told(&mut self, v: u128) {
        let volume = self.volumes.get_mut(&v).unwrap();
        volume.epoch += 1;
        let epoch = volume.epoch;
        let (_, ledgers) = self.rig.fence(v, epoch);
        self.volumes.get_mut(&v).unwrap().promised = epoch;
        for state in ledgers {
            let held = &self.volumes[&v].ledgers[&state.ledger];
            assert!(state.sound && state.trimmed.0 <= held.trim_sent, "{state:?} {held:?}");
            let acked: Vec<u64> = held.acked.iter().copied().filter(|l| *l > state.trimmed.0).collect();
            let from = state.trimmed.0 + 1;
            let found: BTreeSet<u64> = self
                .rig
                .read_log(v, state.ledger.epoch.0, state.ledger.n, from)
                .0
                .iter()
                .map(|(e, _)| e.lsn.0)
                .collect();
            assert!(acked.iter().all(|l| found.contains(l)), "{state:?} lacks some of {acked:?}: {found:?}");
        }
    }

    fn run(&mut self, rounds: usize, steps: u64) {
        for _ in 0..rounds {
            for _ in 0..self.prng.between(1, steps) {
                self.step();
                // One moment's events end with a tick, if one is due.
                if self.prng.chance(600) {
                    self.rig.end_moment();
                }
                for _ in 0..self.prng.below(4) {
                    self.rig.complete_any();
                }
                self.harvest();
            }
            let crash = if self.prng.chance(500) { Crash::Power } else { Crash::Process };
            self.waiting.clear();
            self.rig.crash(crash);
            self.rig.start();
            // Half of the time the next crash comes while the device is being opened.
            if self.prng.chance(300) {
                for _ in 0..self.prng.below(30) {
                    self.rig.complete_any();
                }
                self.rig.crash(crash);
                self.rig.start();
            }
            self.rig.settle();
            self.check();
            if self.prng.chance(300) {
                let v = u128::from(self.prng.between(1, VOLUMES));
                self.check_told(v);
            }
            self.rig.settle();
            let dead = self.rig.notices.iter().find(|n| !matches!(n, Notice::DeviceOpened { .. }));
            assert!(dead.is_none(), "crashes alone damage nothing: {dead:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn acknowledged_is_there_after_any_crash(seed: u64) {
        let mut test = Test::new(seed);
        test.run(6, 150);
    }
}

#[test]
fn long_lives_with_many_crashes() {
    for seed in 0..6 {
        let mut test = Test::new(seed);
        test.run(40, 200);
        assert!(test.acks > 500, "seed {seed}: only {} acknowledged", test.acks);
    }
}

/// After one sector has rotted: what is read is right, what is told as sound lacks nothing.
fn check_rotten(test: &mut Test) {
    for v in 1..=u128::from(VOLUMES) {
        for shard in test.rig.list(v) {
            let blocks = test.volumes[&v].shards_sent[&shard];
            match test.rig.read_shard(shard, 0, blocks) {
                Ok(data) => assert_eq!(data, shard_data(shard, blocks)),
                Err(refusal) => assert_eq!(refusal, Refusal::Checksum),
            }
        }
        let promised = test.volumes[&v].promised;
        let reply = test.rig.call(fence(v, promised, 999));
        let refused = matches!(reply, Reply::Refused(Refusal::StaleEpoch { .. } | Refusal::DeviceFailed));
        assert!(promised == 0 || refused, "the promise of {promised} is forgotten");
        let epoch = test.volumes[&v].epoch + 1;
        let reply = test.rig.call(fence(v, epoch, u128::from(epoch)));
        let Reply::Fenced { ledgers, .. } = reply else {
            assert_eq!(reply, Reply::Refused(Refusal::DeviceFailed), "its promises may be lost");
            continue;
        };
        let volume = test.volumes.get_mut(&v).unwrap();
        (volume.epoch, volume.promised) = (epoch, epoch);
        for state in ledgers.iter().filter(|s| s.sound) {
            let held = &test.volumes[&v].ledgers[&state.ledger];
            let acked: Vec<u64> = held.acked.iter().copied().filter(|l| *l > state.trimmed.0).collect();
            let (id, from) = (state.ledger, state.trimmed.0 + 1);
            let (entries, damaged) = test.rig.read_log(v, id.epoch.0, id.n, from);
            for lsn in acked {
                let found = entries.iter().find(|(e, _)| e.lsn.0 == lsn);
                assert!(found.is_some() || damaged.contains(&lsn), "{id:?} says that it lacks {lsn}");
            }
            for (entry, payload) in entries {
                let blocks = test.volumes[&v].ledgers[&id].sent[&entry.lsn.0];
                assert_eq!(payload, entry_payload(v, id.epoch.0, id.n, entry.lsn.0, blocks));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn one_rotten_sector_never_makes_a_sound_leg_lie(seed: u64) {
        let mut test = Test::new(seed);
        for _ in 0..200 {
            test.step();
            test.rig.complete_any();
            test.harvest();
        }
        test.rig.settle();
        test.harvest();
        test.rig.crash(Crash::Power);
        // Mostly where the journal and the tables are.
        let limit = if test.prng.chance(800) { 600 << 10 } else { 4 << 20 };
        let sector = test.prng.below(limit / 512);
        if test.prng.chance(300) {
            test.rig.disks[0].bad_reads.push(sector * 512..sector * 512 + 512);
        } else {
            for at in 0..512 {
                test.rig.disks[0].corrupt(sector * 512 + at);
            }
        }
        for _ in 0..2 {
            test.rig.start();
            test.rig.settle();
            check_rotten(&mut test);
            test.rig.settle();
            test.rig.crash(Crash::Power);
        }
    }
}

#[test]
fn when_a_device_fails_everything_that_waits_is_answered() {
    for seed in 0..60 {
        let mut test = Test::new(seed);
        for _ in 0..150 {
            test.step();
            if test.prng.chance(700) {
                test.rig.complete_any();
            }
            test.harvest();
        }
        test.rig.disks[0].fail_writes = true;
        let (request, payload) = append(1, 1, 0, 1, 0, 1);
        test.send(request, payload, Sent::Ignored);
        test.rig.settle();
        let waiting: Vec<u64> = test.waiting.keys().copied().collect();
        assert!(waiting.iter().all(|token| test.rig.replies.contains_key(token)), "seed {seed}");
    }
}

/// The deliberate mistakes are found by this very test: what finds nothing proves nothing.
#[test]
fn each_mutation_of_a_device_is_found() {
    let mutations = [
        Mutations { skip_fence_check: true, ..Mutations::default() },
        Mutations { ack_before_durable: true, ..Mutations::default() },
        Mutations { promise_not_persisted: true, ..Mutations::default() },
        Mutations { scan_stops_at_hole: true, ..Mutations::default() },
    ];
    let survives = |mutations: Mutations, seed: u64| {
        std::panic::catch_unwind(|| {
            let mut test = Test::new(seed);
            test.rig.config.mutations = mutations;
            test.rig.restart(Crash::Process);
            test.run(6, 150);
        })
        .is_ok()
    };
    let unfound: Vec<Mutations> = mutations.into_iter().filter(|m| (0..60).all(|seed| survives(*m, seed))).collect();
    assert!(unfound.is_empty(), "not found: {unfound:?}");
}

/// For hours: `SEED=1 cargo test -p holdfast-store --test node -- --ignored crashes`.
#[test]
#[ignore = "soak"]
fn many_more_seeds() {
    let first: u64 = std::env::var("SEED").map_or(1000, |s| s.parse().expect("a number"));
    for seed in first..first + 5000 {
        println!("seed {seed}");
        let mut test = Test::new(seed);
        let (rounds, steps) = *Prng::new(seed).pick(&[(8, 200), (60, 12), (30, 60)]);
        test.run(rounds, steps);
    }
}
