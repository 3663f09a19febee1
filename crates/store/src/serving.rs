//! A device that is open: its journal, ledgers, promises and shards, and what requests do to them.
//!
//! Role: the device ([`crate::device`]) passes on requests for it and completions of its disk operations. This file holds
//! the requests; [`crate::completion`] what happens when the disk has answered.
//!
//! Every request of an owner carries its epoch, checked here against the promise before anything else (protocol rule 6).
//! A promise counts from the moment it is accepted: what a lower epoch sent before is answered before the fence is, and
//! what it sends after is refused.

use crate::api::Notice;
use crate::cache::Asked;
use crate::fence::{Grants, Promise};
use crate::io::{Client, Ctx};
use crate::journal::recover::Recovered;
use crate::journal::units::UnitState;
use crate::journal::{EntryIn, Journal, Queued, Source, Then, Use};
use crate::labels::Label;
use crate::ledgers::{ControlKey, Ledger, LedgerKey, Life, Volumes};
use crate::log_read::{LOG_READS_MAX, LogRead};
use crate::shards::Shards;
use holdfast_base::{BLOCK_BYTES, BlockCrc, Buf, Epoch, InstanceId, Instant, LedgerId, Lsn, ShardId, Slab, VolumeId};
use holdfast_format::copy::root_copy_id;
use holdfast_format::disk::{Superblock, blocks_match};
use holdfast_format::ledger::{AckRule, LEGS_MAX, Leg};
use holdfast_format::wire::{DeviceHealth, DeviceStat, HeldVolume, Refusal, Reply, Request};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

/// Requests in flight that wait for several things.
const JOINS_MAX: usize = 1024;

/// Volumes of one page of a list: stays below a frame's meta part.
const LIST_VOLUMES_MAX: usize = 1000;

/// A request that is answered when all its parts are durable.
pub(crate) struct Join {
    pub client: Client,
    pub waiting: u32,
}

pub(crate) struct Serving {
    pub superblock: Superblock,
    pub journal: Journal,
    pub volumes: Volumes,
    pub shards: Shards,
    pub log_reads: Slab<LogRead>,
    pub joins: Slab<Join>,
    /// Promises may be lost: nothing that depends on them is served.
    pub promises_lost: bool,
    /// The opening's table write is complete.
    pub is_table_written: bool,
    /// That, and whatever of the slot table had to be written anew.
    pub is_ready: bool,
    pub label: Option<Label>,
}

/// An append's own fields.
pub(crate) struct Append {
    volume: VolumeId,
    epoch: Epoch,
    ledger: LedgerId,
    lsn: Lsn,
    acked: Lsn,
    header: Vec<u8>,
    crcs: Vec<BlockCrc>,
}

/// A creation's own fields.
pub(crate) struct Create {
    volume: VolumeId,
    claim: Promise,
    ledger: LedgerId,
    legs: Vec<Leg>,
    rule: AckRule,
}

impl Serving {
    /// From what the opening found. Starts the table write after which the device serves.
    pub fn new(ctx: &mut Ctx, superblock: Superblock, found: Recovered, shards: Shards) -> Serving {
        let device = superblock.device;
        let Recovered { mut volumes, units, next_seq, lost, newly_unsound, promises_lost, damaged_entries } = found;
        for ((volume, ledger), lsn) in damaged_entries {
            ctx.note(Notice::EntryDamaged { device, volume, ledger, lsn });
        }
        if lost > 0 {
            let unsound_ledgers = newly_unsound.len() as u64;
            ctx.note(Notice::JournalDamaged { device, batches: lost, unsound_ledgers });
        }
        for volume in volumes.by_id.values_mut() {
            volume.grants = Grants::assumed_at_start(volume.promise, ctx.now);
        }
        let mut serving = Serving {
            superblock,
            journal: Journal::new(units, next_seq),
            volumes,
            shards,
            log_reads: Slab::new(LOG_READS_MAX),
            joins: Slab::new(JOINS_MAX),
            promises_lost,
            is_table_written: false,
            is_ready: promises_lost,
            label: None,
        };
        if !promises_lost {
            serving.journal.recovery_moves = newly_unsound.len() as u32;
            for key in newly_unsound {
                let record = Queued::Control { key: ControlKey::Ledger(key), then: Then::Recovered };
                serving.journal.push(ctx.now, record);
            }
            serving.journal.start_table_write(ctx);
            serving.shards.mend(ctx);
        }
        serving
    }

    pub fn health(&self) -> DeviceHealth {
        match (self.promises_lost, self.is_ready) {
            (true, _) => DeviceHealth::Failed,
            (false, true) => DeviceHealth::Serving,
            (false, false) => DeviceHealth::Opening,
        }
    }

    pub fn stat(&self) -> DeviceStat {
        DeviceStat {
            capacity_bytes: self.shards.capacity_bytes(),
            free_bytes: self.shards.free_bytes(),
            journal_bytes: self.journal.usable_bytes(),
            journal_used_bytes: self.journal.units.used_bytes(),
            shard_count: self.shards.live_count(),
            flush_us: self.superblock.flush_us,
            media: self.superblock.media,
            ..DeviceStat::unknown(self.superblock.device, self.health())
        }
    }

    pub fn next_deadline(&self, batch_in_flight_max: usize) -> Option<Instant> {
        if self.is_at_work() { self.journal.next_deadline(batch_in_flight_max) } else { None }
    }

    /// After a request or a completion: get space back, keep a unit in advance. What was queued leaves with the tick
    /// that follows the events of the same moment ([`Serving::next_deadline`]): what came together shares a batch.
    pub fn settle(&mut self, ctx: &mut Ctx) {
        if self.is_at_work() {
            self.journal.look_for_unit_again();
            self.journal.reclaim(ctx, &self.volumes);
            self.keep_ahead(ctx);
        }
    }

    /// Sends what is due.
    pub fn on_tick(&mut self, ctx: &mut Ctx) {
        if !self.is_at_work() {
            return;
        }
        loop {
            self.journal.commit(ctx, &mut self.volumes);
            if !self.journal.reclaim_due {
                break;
            }
            self.journal.reclaim(ctx, &self.volumes);
        }
        self.keep_ahead(ctx);
    }

    fn is_at_work(&self) -> bool {
        self.is_ready && !self.promises_lost
    }

    fn keep_ahead(&mut self, ctx: &mut Ctx) {
        self.journal.confirm(ctx, &mut self.volumes);
        self.journal.drive_table(ctx);
    }

    pub fn on_request(&mut self, ctx: &mut Ctx, client: Client, request: Request, payload: Buf) {
        let result = if !self.is_ready || !ctx.has_io_room() {
            Err(Refusal::Busy)
        } else if self.promises_lost && !reads_only(&request) {
            Err(Refusal::DeviceFailed)
        } else {
            self.dispatch(ctx, client, request, payload)
        };
        if let Err(refusal) = result {
            ctx.refuse(client, refusal);
        }
    }

    /// See [`crate::device::Device::read_shard`].
    pub fn on_read_shard(&mut self, ctx: &mut Ctx, asked: &Asked, wanted: bool) {
        let is_possible = self.is_ready && ctx.has_io_room();
        let result = if is_possible { self.shards.read(ctx, asked, wanted) } else { Err(Refusal::Busy) };
        if let Err(refusal) = result {
            ctx.refuse(asked.client, refusal);
        }
    }

    fn dispatch(&mut self, ctx: &mut Ctx, client: Client, request: Request, payload: Buf) -> Result<(), Refusal> {
        match request {
            Request::ReadShard { shard, block, blocks, checked, .. } => {
                let asked = Asked { client, slot: ctx.slot, shard, block, blocks, checked };
                self.shards.read(ctx, &asked, false)
            }
            Request::Append { volume, epoch, ledger, lsn, acked, header, crcs, .. } => {
                let append = Append { volume, epoch, ledger, lsn, acked, header, crcs };
                self.on_append(ctx, client, append, payload)
            }
            Request::Grant { volume, epoch, .. } => self.on_grant(ctx, client, volume, epoch),
            Request::Release { volume, epoch, .. } => {
                if let Some(state) = self.volumes.by_id.get_mut(&volume) {
                    state.grants.release(epoch, ctx.now);
                }
                ctx.reply(client, Reply::Done);
                Ok(())
            }
            Request::SetMedia { media, .. } => self.on_set_media(ctx, client, media),
            Request::CreateLedger { volume, epoch, instance, ledger, legs, rule, .. } => {
                let claim = Promise { epoch, instance };
                self.on_create(ctx, client, Create { volume, claim, ledger, legs, rule })
            }
            Request::Fence { volume, epoch, instance, .. } => self.on_fence(ctx, client, volume, epoch, instance),
            Request::ReadLog { volume, ledger, from, bytes_max, .. } => {
                self.on_read_log(ctx, client, (volume, ledger), from, bytes_max)
            }
            Request::TrimLedger { volume, epoch, ledger, upto, .. } => {
                self.on_trim(ctx, client, (volume, ledger), epoch, upto)
            }
            Request::DeleteLedger { volume, epoch, ledger, .. } => {
                self.on_delete_ledger(ctx, client, (volume, ledger), epoch)
            }
            Request::PutShard { volume, epoch, shard, header_blocks, .. } => {
                self.volumes.promise(volume).check(epoch)?;
                if shard.segment.volume != volume {
                    return Err(Refusal::Invalid);
                }
                self.shards.put(ctx, client, shard, header_blocks, payload)
            }
            Request::ReadShardHeader { shard, .. } => self.shards.read_header(ctx, client, shard),
            Request::CheckShard { shard, .. } => self.shards.check(ctx, client, shard),
            Request::DeleteShards { volume, epoch, shards, .. } => {
                self.on_delete_shards(ctx, client, volume, epoch, &shards)
            }
            Request::ListShards { volume, after, count_max, .. } => {
                ctx.reply(client, self.shards.list(volume, after, count_max));
                Ok(())
            }
            Request::DropVolume { volume, epoch, .. } => self.on_drop_volume(ctx, client, volume, epoch),
            Request::PutRoot { volume, epoch, sequence, root, .. } => {
                self.volumes.promise(volume).check(epoch)?;
                self.shards.put_root(ctx, client, root_copy_id(volume, epoch, sequence), &root)
            }
            Request::ListVolumes { after, count_max, .. } => {
                ctx.reply(client, self.list_volumes(after, count_max));
                Ok(())
            }
            Request::Hello { .. }
            | Request::Ping
            | Request::Stat
            | Request::Drives
            | Request::Troubles
            | Request::Heard { .. }
            | Request::Reactors
            | Request::Join { .. }
            | Request::MakeShard { .. } => {
                unreachable!("the node answers requests that concern no device, or other nodes as well")
            }
        }
    }

    fn on_append(&mut self, ctx: &mut Ctx, client: Client, append: Append, payload: Buf) -> Result<(), Refusal> {
        let Append { volume, epoch, ledger, lsn, acked, header, crcs } = append;
        let state = self.volumes.by_id.get_mut(&volume).ok_or(Refusal::UnknownLedger)?;
        if !ctx.config.mutations.skip_fence_check() {
            state.promise.check(epoch)?;
        }
        let held = state.ledgers.get(&ledger).filter(|l| l.is_live()).ok_or(Refusal::UnknownLedger)?;
        let fits = payload.len() == crcs.len() * BLOCK_BYTES && self.journal.can_hold(header.len(), crcs.len());
        if epoch != ledger.epoch || lsn == Lsn::ZERO || !fits {
            return Err(Refusal::Invalid);
        }
        if !blocks_match(&crcs, &payload) {
            return Err(Refusal::Checksum);
        }
        if lsn <= held.trimmed || held.find(lsn).is_some_and(|p| !p.damaged) {
            state.grants.give(epoch, ctx.now);
            ctx.reply(client, Reply::Appended { lsn, journal_fill: self.journal.fill() });
            return Ok(());
        }
        if self.journal.is_queue_full() {
            return Err(Refusal::Busy);
        }
        if !self.journal.has_room(Journal::entry_bytes(header.len(), crcs.len()), Use::Entry) {
            return Err(self.full());
        }
        state.grants.give(epoch, ctx.now);
        let source = Source::Client(client);
        let entry = EntryIn { volume, ledger, lsn, epoch, acked, header, crcs, payload, source };
        self.journal.push(ctx.now, Queued::Entry(entry));
        Ok(())
    }

    /// No room: for a moment, if units are on their way back.
    fn full(&self) -> Refusal {
        if self.journal.is_reclaiming() { Refusal::Busy } else { Refusal::NoSpace }
    }

    /// Whether so many control records may be queued.
    fn admit_control(&self, count: u64) -> Result<(), Refusal> {
        if self.journal.is_queue_full() {
            return Err(Refusal::Busy);
        }
        let has_room = self.journal.has_room(count * BLOCK_BYTES as u64, Use::Control);
        if has_room { Ok(()) } else { Err(self.full()) }
    }

    fn on_create(&mut self, ctx: &mut Ctx, client: Client, create: Create) -> Result<(), Refusal> {
        let Create { volume, claim, ledger, legs, rule } = create;
        let raises = self.volumes.promise(volume).check_claim(claim)?;
        if ledger.epoch != claim.epoch || legs.len() > LEGS_MAX {
            return Err(Refusal::Invalid);
        }
        if let Some(held) = self.volumes.ledger((volume, ledger)) {
            match held.life {
                Life::Deleting | Life::Deleted => return Err(Refusal::UnknownLedger),
                Life::Creating | Life::Live if held.legs != legs || held.rule != rule => return Err(Refusal::Invalid),
                Life::Creating | Life::Live => {}
            }
        }
        self.admit_control(2)?;
        let state = self.volumes.by_id.entry(volume).or_default();
        if raises {
            state.promise.raise(claim);
        }
        state.grants.give(claim.epoch, ctx.now);
        state.ledgers.entry(ledger).or_insert_with(|| Ledger::new(rule, legs));
        if raises && !ctx.config.mutations.promise_not_persisted() {
            let record = Queued::Control { key: ControlKey::Promise(volume), then: Then::Nothing };
            self.journal.push(ctx.now, record);
        }
        let record = Queued::Control { key: ControlKey::Ledger((volume, ledger)), then: Then::Done(client) };
        self.journal.push(ctx.now, record);
        Ok(())
    }

    fn on_fence(
        &mut self,
        ctx: &mut Ctx,
        client: Client,
        volume: VolumeId,
        epoch: Epoch,
        instance: InstanceId,
    ) -> Result<(), Refusal> {
        let claim = Promise { epoch, instance };
        self.volumes.promise(volume).check_claim(claim)?;
        self.admit_control(1)?;
        self.volumes.by_id.entry(volume).or_default().promise.raise(claim);
        if ctx.config.mutations.promise_not_persisted() {
            self.answer_fence(ctx, client, volume, epoch);
            return Ok(());
        }
        let record = Queued::Control { key: ControlKey::Promise(volume), then: Then::Fenced { client, epoch } };
        self.journal.push(ctx.now, record);
        Ok(())
    }

    fn on_grant(&mut self, ctx: &mut Ctx, client: Client, volume: VolumeId, epoch: Epoch) -> Result<(), Refusal> {
        self.volumes.promise(volume).check(epoch)?;
        let state = self.volumes.by_id.get_mut(&volume).ok_or(Refusal::UnknownLedger)?;
        if epoch > state.promise.epoch {
            // No ledger of that epoch was created here: this device is none of its owner's legs.
            return Err(Refusal::UnknownLedger);
        }
        state.grants.give(epoch, ctx.now);
        ctx.reply(client, Reply::Done);
        Ok(())
    }

    fn on_read_log(
        &mut self,
        ctx: &mut Ctx,
        client: Client,
        key: LedgerKey,
        from: Lsn,
        bytes_max: u32,
    ) -> Result<(), Refusal> {
        let Some(ledger) = self.volumes.ledger(key).filter(|l| matches!(l.life, Life::Live | Life::Deleting)) else {
            if ctx.config.mutations.blank_says_dont_have() {
                let reply = Reply::LogEntries { entries: Vec::new(), damaged: Vec::new(), more: false };
                ctx.reply(client, reply);
                return Ok(());
            }
            return Err(Refusal::UnknownLedger);
        };
        if self.log_reads.is_full() {
            return Err(Refusal::Busy);
        }
        let read = LogRead::plan(client, key, ledger, &self.journal.units, from, bytes_max);
        let op = self.log_reads.insert(read);
        let read = self.log_reads.get_mut(op).expect("just put there");
        if read.start(ctx, &mut self.journal.units, op) {
            self.finish_log_read(ctx, op);
        }
        Ok(())
    }

    fn on_trim(
        &mut self,
        ctx: &mut Ctx,
        client: Client,
        (volume, id): LedgerKey,
        epoch: Epoch,
        upto: Lsn,
    ) -> Result<(), Refusal> {
        let state = self.volumes.by_id.get_mut(&volume).ok_or(Refusal::UnknownLedger)?;
        state.promise.check(epoch)?;
        let ledger = state.ledgers.get_mut(&id).filter(|l| l.is_live()).ok_or(Refusal::UnknownLedger)?;
        let journal = &mut self.journal;
        ledger.trim(upto, |place| journal.drop_entry(&place));
        ctx.reply(client, Reply::Done);
        Ok(())
    }

    fn on_delete_ledger(&mut self, ctx: &mut Ctx, client: Client, key: LedgerKey, epoch: Epoch) -> Result<(), Refusal> {
        self.volumes.promise(key.0).check(epoch)?;
        match self.volumes.ledger(key).map(|l| l.life) {
            None | Some(Life::Deleted) => ctx.reply(client, Reply::Done),
            Some(Life::Creating) => return Err(Refusal::Busy),
            Some(Life::Live | Life::Deleting) => {
                self.admit_control(1)?;
                self.bury(ctx, key, Then::Done(client));
            }
        }
        Ok(())
    }

    /// Queues the tombstone of a ledger, which serves nothing from here on.
    fn bury(&mut self, ctx: &mut Ctx, key: LedgerKey, then: Then) {
        let ledger = self.volumes.ledger_mut(key).expect("looked up before");
        assert!(matches!(ledger.life, Life::Live | Life::Deleting), "{key:?} can be deleted");
        ledger.life = Life::Deleting;
        self.journal.push(ctx.now, Queued::Control { key: ControlKey::Ledger(key), then });
    }

    fn on_delete_shards(
        &mut self,
        ctx: &mut Ctx,
        client: Client,
        volume: VolumeId,
        epoch: Epoch,
        shards: &[ShardId],
    ) -> Result<(), Refusal> {
        self.volumes.promise(volume).check(epoch)?;
        if shards.iter().any(|s| s.segment.volume != volume) {
            return Err(Refusal::Invalid);
        }
        if self.joins.is_full() {
            return Err(Refusal::Busy);
        }
        let join = self.joins.insert(Join { client, waiting: 1 });
        self.delete_shards(ctx, join, shards)?;
        self.finish_join(ctx, join, 1);
        Ok(())
    }

    /// Starts deletions as parts of a join; without effect where it is refused.
    fn delete_shards(&mut self, ctx: &mut Ctx, join: holdfast_base::Token, shards: &[ShardId]) -> Result<(), Refusal> {
        match self.shards.delete(ctx, shards.iter().copied(), join) {
            Ok(parts) => {
                self.joins.get_mut(join).expect("it waits").waiting += parts;
                Ok(())
            }
            Err(refusal) => {
                self.joins.remove(join);
                Err(refusal)
            }
        }
    }

    fn on_drop_volume(&mut self, ctx: &mut Ctx, client: Client, volume: VolumeId, epoch: Epoch) -> Result<(), Refusal> {
        self.volumes.promise(volume).check(epoch)?;
        let held = self.volumes.get(volume).map(|v| &v.ledgers);
        let lives = |life: Life| held.into_iter().flatten().filter(move |(_, l)| l.life == life).map(|(id, _)| *id);
        if self.joins.is_full() || lives(Life::Creating).next().is_some() {
            return Err(Refusal::Busy);
        }
        let ledgers: Vec<LedgerId> = lives(Life::Live).chain(lives(Life::Deleting)).collect();
        if !ledgers.is_empty() {
            self.admit_control(1)?;
        }
        let shards = self.shards.of_volume(volume);
        let join = self.joins.insert(Join { client, waiting: 1 });
        self.delete_shards(ctx, join, &shards)?;
        self.joins.get_mut(join).expect("it waits").waiting += ledgers.len() as u32;
        for ledger in ledgers {
            self.bury(ctx, (volume, ledger), Then::Join(join));
        }
        self.finish_join(ctx, join, 1);
        Ok(())
    }

    fn list_volumes(&self, after: Option<VolumeId>, count_max: u32) -> Reply {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let known = self.volumes.by_id.range((from, Bound::Unbounded)).map(|(volume, _)| *volume);
        let count_max = (count_max as usize).clamp(1, LIST_VOLUMES_MAX);
        // The first of either are among the first of both.
        let mut ids: BTreeSet<VolumeId> = known.take(count_max + 1).collect();
        ids.extend(self.shards.volumes_after(after).take(count_max + 1));
        let held = |volume: VolumeId| {
            let state = self.volumes.get(volume);
            let ledgers = state.into_iter().flat_map(|v| &v.ledgers).filter(|(_, l)| l.life != Life::Deleted);
            HeldVolume {
                volume,
                promised: self.volumes.promise(volume).epoch,
                ledgers: ledgers.map(|(id, ledger)| ledger.state(*id)).collect(),
                root: self.shards.root_of(volume),
            }
        };
        Reply::Volumes { more: ids.len() > count_max, volumes: ids.into_iter().take(count_max).map(held).collect() }
    }

    /// Asserts that space adds up and that every unit's account agrees with the index.
    pub fn verify(&self) {
        self.shards.verify();
        let units = &self.journal.units;
        let mut live = vec![(0_u32, 0_u64); units.units.len()];
        let mut refs: BTreeMap<LedgerKey, u32> = BTreeMap::new();
        for key in units.units.iter().flat_map(|u| u.ledgers.keys()) {
            *refs.entry(*key).or_default() += 1;
        }
        for (volume, state) in &self.volumes.by_id {
            for (ledger, state) in &state.ledgers {
                assert!(state.entries.iter().zip(state.entries.iter().skip(1)).all(|(a, b)| a.0 < b.0), "sorted");
                assert!(state.entries.front().is_none_or(|(lsn, _)| *lsn > state.trimmed), "trimmed entries are gone");
                assert_eq!(state.unit_refs, refs.get(&(*volume, *ledger)).copied().unwrap_or(0), "{ledger:?}");
                for (_, place) in &state.entries {
                    let (count, bytes) = &mut live[place.unit as usize];
                    *count += 1;
                    *bytes += place.live_bytes();
                }
            }
        }
        for (unit, (count, bytes)) in units.units.iter().zip(live) {
            assert_eq!((unit.live_entries, unit.live_bytes), (count, bytes), "a unit's account: {unit:?}");
            let is_empty = matches!(unit.state, UnitState::Free | UnitState::Dead | UnitState::Next);
            assert!(!is_empty || count == 0, "nothing lives in a unit that is not in use");
        }
    }

    /// Clients of everything that waits, for a device that fails.
    pub fn waiting_clients(&self) -> Vec<Client> {
        let mut clients = self.journal.waiting_clients();
        clients.extend(self.log_reads.iter().map(|(_, read)| read.client));
        clients.extend(self.joins.iter().map(|(_, join)| join.client));
        clients.extend(self.shards.waiting_clients());
        clients.extend(self.label.iter().map(|label| label.client));
        clients
    }
}

/// Requests that are served without any promise being known.
fn reads_only(request: &Request) -> bool {
    matches!(
        request,
        Request::ReadShard { .. }
            | Request::ReadShardHeader { .. }
            | Request::CheckShard { .. }
            | Request::ListShards { .. }
            | Request::ReadLog { .. }
    )
}
