//! A node on fake disks: sectors of 512 bytes, a volatile cache, crashes that tear whatever was not durable.

#![allow(dead_code)]

use holdfast_base::{
    BLOCK_BYTES, Buf, DeviceId, Effects, Epoch, GridId, InstanceId, Instant, LedgerId, Lsn, MediaClass, NodeId, Prng,
    SegmentId, ShardId, Urgency, VolumeId, block_crcs, buf,
};
use holdfast_format::disk::Superblock;
use holdfast_format::geometry::{Geometry, Layout};
use holdfast_format::ledger::{AckRule, Leg};
use holdfast_format::segment::{SegmentIndex, ShardHeader};
use holdfast_format::wire::{Beside, LedgerState, LogEntry, NodeTimes, Refusal, Reply, Request, WIRE};
use holdfast_store::{
    AskToken, DeviceSlot, DiskError, DiskToken, Effect, Event, JournalSizing, Message, Node, NodeConfig, Notice,
    PeerId, format_device, probe_superblock,
};
use std::collections::BTreeMap;

const SECTOR: usize = 512;

pub const GRID: GridId = GridId(7);
pub const NODE: NodeId = NodeId(3);

#[derive(Debug)]
enum Op {
    Read { offset: u64, len: u32 },
    Write { offset: u64, data: Vec<u8>, durable: bool },
    Flush,
}

/// What a crash leaves of a disk's cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Crash {
    Process,
    Power,
}

pub struct FakeDisk {
    media: Vec<u8>,
    /// Sectors written but not durable.
    cache: BTreeMap<usize, [u8; SECTOR]>,
    in_flight: BTreeMap<u64, (DiskToken, Op)>,
    next_op: u64,
    pub fail_writes: bool,
    /// Reads that touch these bytes fail.
    pub bad_reads: Vec<std::ops::Range<u64>>,
    pub bytes_read: u64,
    pub read_count: u64,
    /// What it is found to be made of.
    pub class: Option<MediaClass>,
    pub write_count: u64,
    pub bytes_written: u64,
}

impl FakeDisk {
    pub fn new(size: u64) -> FakeDisk {
        FakeDisk {
            media: vec![0; size as usize],
            cache: BTreeMap::new(),
            in_flight: BTreeMap::new(),
            next_op: 0,
            fail_writes: false,
            bad_reads: Vec::new(),
            bytes_read: 0,
            read_count: 0,
            class: None,
            write_count: 0,
            bytes_written: 0,
        }
    }

    pub fn write_media(&mut self, offset: u64, data: &[u8]) {
        let offset = offset as usize;
        self.media[offset..offset + data.len()].copy_from_slice(data);
    }

    pub fn media(&self) -> &[u8] {
        &self.media
    }

    /// Changes what lies in the disk's own cache.
    pub fn spoil_cache(&mut self, spoil: impl Fn(&mut [u8])) {
        self.cache.values_mut().for_each(|sector| spoil(sector));
    }

    pub fn corrupt(&mut self, offset: u64) {
        self.media[offset as usize] ^= 0x5a;
    }

    fn read(&mut self, offset: u64, len: u32) -> Result<Buf, DiskError> {
        let range = offset..offset + u64::from(len);
        if self.bad_reads.iter().any(|bad| bad.start < range.end && range.start < bad.end) {
            return Err(DiskError::Io);
        }
        self.bytes_read += u64::from(len);
        self.read_count += 1;
        let mut bytes = self.media[range.start as usize..range.end as usize].to_vec();
        for (sector, data) in self.cache.range(range.start as usize / SECTOR..range.end as usize / SECTOR) {
            let at = sector * SECTOR - range.start as usize;
            bytes[at..at + SECTOR].copy_from_slice(data);
        }
        Ok(Buf::copy_from(&bytes))
    }

    fn complete(&mut self, op: Op) -> Result<Buf, DiskError> {
        match op {
            Op::Read { offset, len } => return self.read(offset, len),
            Op::Write { .. } | Op::Flush if self.fail_writes => return Err(DiskError::Io),
            Op::Write { offset, data, durable } => {
                self.write_count += 1;
                self.bytes_written += data.len() as u64;
                for (i, sector) in data.chunks_exact(SECTOR).enumerate() {
                    let at = offset as usize / SECTOR + i;
                    if durable {
                        self.cache.remove(&at);
                        self.media[at * SECTOR..(at + 1) * SECTOR].copy_from_slice(sector);
                    } else {
                        self.cache.insert(at, sector.try_into().unwrap());
                    }
                }
            }
            Op::Flush => {
                for (at, sector) in std::mem::take(&mut self.cache) {
                    self.media[at * SECTOR..(at + 1) * SECTOR].copy_from_slice(&sector);
                }
            }
        }
        Ok(Buf::empty())
    }

    /// Writes in flight leave any subset of their sectors; after a power loss, so does the cache.
    fn crash(&mut self, crash: Crash, prng: &mut Prng) {
        for (_, (_, op)) in std::mem::take(&mut self.in_flight) {
            let Op::Write { offset, data, .. } = op else { continue };
            // Whole, nothing, or a mixture.
            let per_mille = *prng.pick(&[0, 1000, 500, 900]);
            for (i, sector) in data.chunks_exact(SECTOR).enumerate() {
                if prng.chance(per_mille) {
                    self.cache.insert(offset as usize / SECTOR + i, sector.try_into().unwrap());
                }
            }
        }
        if crash == Crash::Power {
            for (at, sector) in std::mem::take(&mut self.cache) {
                if prng.chance(500) {
                    self.media[at * SECTOR..(at + 1) * SECTOR].copy_from_slice(&sector);
                }
            }
        }
    }
}

pub struct Rig {
    pub config: NodeConfig,
    pub node: Option<Node>,
    pub disks: Vec<FakeDisk>,
    pub now: Instant,
    pub prng: Prng,
    out: Effects<Effect>,
    next_token: u64,
    /// Requests ask for times, and what was told of those that did.
    pub wants_times: bool,
    pub times: BTreeMap<u64, NodeTimes>,
    pub replies: BTreeMap<u64, (Reply, Vec<Buf>)>,
    pub notices: Vec<Notice>,
    /// Devices that the node wants to have opened.
    pub to_open: Vec<DeviceSlot>,
    /// What the node has asked of others.
    pub asks: Vec<(NodeId, AskToken, Request)>,
    /// What it has told the node's other reactors.
    pub told: Vec<(u16, Message)>,
}

pub fn small_sizing() -> JournalSizing {
    JournalSizing { journal_bytes: 512 << 10, unit_bytes: 64 << 10, shard_bytes_mean: 32 << 10 }
}

pub fn device(slot: usize) -> DeviceId {
    DeviceId(100 + slot as u128)
}

pub fn superblock(rig: &Rig) -> Superblock {
    probe_superblock(&rig.disks[0].media()[..4096]).unwrap()
}

impl Rig {
    /// One node with freshly formatted disks of these sizes, opened.
    pub fn new(seed: u64, sizes: &[u64], sizing: JournalSizing) -> Rig {
        Rig::of(seed, sizes.iter().map(|s| FakeDisk::new(*s)).collect(), sizing, |_| {})
    }

    /// With disks of these classes and sizes, and a node that is configured further.
    pub fn mixed(seed: u64, disks: &[(MediaClass, u64)], configure: impl Fn(&mut NodeConfig)) -> Rig {
        let disk = |(class, size): &(MediaClass, u64)| FakeDisk { class: Some(*class), ..FakeDisk::new(*size) };
        Rig::of(seed, disks.iter().map(disk).collect(), small_sizing(), configure)
    }

    pub fn of(seed: u64, disks: Vec<FakeDisk>, sizing: JournalSizing, configure: impl Fn(&mut NodeConfig)) -> Rig {
        let mut rig = Rig {
            config: NodeConfig::new(GRID, NODE, InstanceId(1)),
            node: None,
            disks,
            now: Instant(1_000_000_000),
            prng: Prng::new(seed),
            out: Effects::new(),
            next_token: 1,
            wants_times: false,
            times: BTreeMap::new(),
            replies: BTreeMap::new(),
            notices: Vec::new(),
            to_open: Vec::new(),
            asks: Vec::new(),
            told: Vec::new(),
        };
        configure(&mut rig.config);
        for (slot, disk) in rig.disks.iter_mut().enumerate() {
            let size_bytes = disk.media.len() as u64;
            for (offset, data) in format_device(GRID, NODE, device(slot), size_bytes, sizing).unwrap() {
                disk.write_media(offset, &data);
            }
        }
        rig.start();
        rig.settle();
        rig
    }

    pub fn small(seed: u64) -> Rig {
        Rig::new(seed, &[4 << 20], small_sizing())
    }

    pub fn start(&mut self) {
        self.config.boot = InstanceId(self.prng.next_u128());
        self.node = Some(Node::new(self.config.clone()));
        let own = |slot: &usize| slot % usize::from(self.config.reactors) == usize::from(self.config.reactor);
        for slot in (0..self.disks.len()).filter(own).collect::<Vec<_>>() {
            let (size_bytes, media) = (self.disks[slot].media.len() as u64, self.disks[slot].class);
            self.event(Event::AddDevice { slot: DeviceSlot(slot), size_bytes, media, is_direct: true });
        }
    }

    /// As a shell opens what the node wants to have opened.
    pub fn open(&mut self) {
        for slot in std::mem::take(&mut self.to_open) {
            let (size_bytes, media) = (self.disks[slot.0].media.len() as u64, self.disks[slot.0].class);
            self.event(Event::AddDevice { slot, size_bytes, media, is_direct: true });
        }
    }

    pub fn crash(&mut self, crash: Crash) {
        self.node = None;
        self.replies.clear();
        self.to_open.clear();
        for disk in &mut self.disks {
            disk.crash(crash, &mut self.prng);
        }
    }

    pub fn restart(&mut self, crash: Crash) {
        self.crash(crash);
        self.start();
        self.settle();
    }

    pub fn event(&mut self, event: Event) {
        let Some(node) = self.node.as_mut() else { return };
        node.handle(self.now, event, &mut self.out);
        for effect in self.out.take() {
            match effect {
                Effect::Reply { token, reply, times, payload, .. } => {
                    self.times.extend(times.map(|times| (token, times)));
                    let twice = self.replies.insert(token, (reply, payload));
                    assert!(twice.is_none(), "request {token} is answered twice");
                }
                Effect::Read { slot, offset, len, token } => self.submit(slot, token, Op::Read { offset, len }),
                Effect::Write { slot, offset, data, durable, token } => {
                    assert!(data.iter().all(|d| (d.as_ptr() as usize).is_multiple_of(BLOCK_BYTES)));
                    let data = buf::concat(&data).to_vec();
                    assert!(offset.is_multiple_of(4096) && data.len().is_multiple_of(4096) && !data.is_empty());
                    self.submit(slot, token, Op::Write { offset, data, durable });
                }
                Effect::Tell { reactor, message } => self.told.push((reactor, message)),
                Effect::Ask { node, token, request, .. } => self.asks.push((node, token, request)),
                Effect::Flush { slot, token } => self.submit(slot, token, Op::Flush),
                Effect::Discard { .. } | Effect::Close { .. } => {}
                Effect::Open { slot } => self.to_open.push(slot),
                Effect::Note(notice) => {
                    println!("{notice:?}");
                    self.notices.push(notice);
                }
            }
        }
    }

    fn submit(&mut self, slot: DeviceSlot, token: DiskToken, op: Op) {
        let disk = &mut self.disks[slot.0];
        disk.in_flight.insert(disk.next_op, (token, op));
        disk.next_op += 1;
        assert!(disk.in_flight.len() <= self.config.disk_in_flight_max, "{} at a time", disk.in_flight.len());
    }

    pub fn in_flight(&self) -> usize {
        self.disks.iter().map(|d| d.in_flight.len()).sum()
    }

    /// A write is in flight.
    pub fn is_writing(&self) -> bool {
        self.disks.iter().flat_map(|d| d.in_flight.values()).any(|(_, op)| matches!(op, Op::Write { .. }))
    }

    /// Completes one operation in flight, any; false where there is none.
    pub fn complete_any(&mut self) -> bool {
        let busy: Vec<usize> = (0..self.disks.len()).filter(|d| !self.disks[*d].in_flight.is_empty()).collect();
        if busy.is_empty() {
            return false;
        }
        let disk = *self.prng.pick(&busy);
        let ops: Vec<u64> = self.disks[disk].in_flight.keys().copied().collect();
        let op = *self.prng.pick(&ops);
        self.now = self.now + std::time::Duration::from_micros(self.prng.below(100));
        let (token, op) = self.disks[disk].in_flight.remove(&op).unwrap();
        let result = self.disks[disk].complete(op);
        self.event(Event::Disk { token, result });
        true
    }

    /// Completes the operation that has been in flight for longest; false where there is none.
    pub fn complete_oldest(&mut self, slot: usize) -> bool {
        let Some((_, (token, op))) = self.disks[slot].in_flight.pop_first() else { return false };
        let result = self.disks[slot].complete(op);
        self.event(Event::Disk { token, result });
        true
    }

    /// As a shell ends a batch of events: a tick, if one is due by now.
    pub fn end_moment(&mut self) {
        if self.node.as_ref().and_then(Node::next_deadline).is_some_and(|due| due <= self.now) {
            self.tick();
        }
    }

    /// Lets time pass to the next deadline; false where there is none.
    pub fn tick(&mut self) -> bool {
        let Some(due) = self.node.as_ref().and_then(Node::next_deadline) else { return false };
        self.now = self.now.max(due);
        self.event(Event::Tick);
        let again = self.node.as_ref().and_then(Node::next_deadline);
        assert!(again.is_none_or(|d| d > self.now), "a deadline that has passed is asked for again");
        true
    }

    /// Runs until nothing is in flight and no deadline is left.
    pub fn settle(&mut self) {
        let mut steps = 0;
        while self.complete_any() || self.tick() {
            steps += 1;
            assert!(steps < 2_000_000, "the node never rests");
        }
        if let Some(node) = &self.node {
            node.verify();
        }
    }

    pub fn send(&mut self, request: Request, payload: Buf) -> u64 {
        self.send_as(1, Urgency::Normal, request, payload)
    }

    /// Over that connection.
    pub fn send_as(&mut self, conn: u64, urgency: Urgency, request: Request, payload: Buf) -> u64 {
        let token = self.next_token;
        self.next_token += 1;
        let beside = Beside { urgency, wants_times: self.wants_times, times: None };
        self.event(Event::Request { peer: PeerId::here(conn), token, beside, request, payload });
        token
    }

    /// From here on that connection is the host's.
    pub fn greet(&mut self, conn: u64, host: &str) {
        let hello = Request::Hello { versions: WIRE, grid: GRID, host: host.to_string() };
        self.send_as(conn, Urgency::Normal, hello, Buf::empty());
    }

    /// Sends, and runs until the answer is there.
    pub fn call_with(&mut self, request: Request, payload: Buf) -> (Reply, Vec<Buf>) {
        let token = self.send(request, payload);
        while !self.replies.contains_key(&token) {
            assert!(self.complete_any() || self.tick(), "request {token} is never answered");
        }
        self.replies.remove(&token).unwrap()
    }

    pub fn call(&mut self, request: Request) -> Reply {
        self.call_with(request, Buf::empty()).0
    }

    /// Asks again while the node is busy.
    pub fn call_patiently(&mut self, request: Request) -> Reply {
        loop {
            let reply = self.call(request.clone());
            if reply != Reply::Refused(Refusal::Busy) {
                return reply;
            }
            assert!(self.complete_any() || self.tick(), "busy with nothing");
        }
    }

    pub fn create(&mut self, v: u128, epoch: u64, n: u32) -> Reply {
        self.call(create(v, epoch, n))
    }

    pub fn append(&mut self, v: u128, epoch: u64, n: u32, lsn: u64, blocks: usize) -> Reply {
        let (request, payload) = append(v, epoch, n, lsn, lsn - 1, blocks);
        self.call_with(request, payload).0
    }

    pub fn fence(&mut self, v: u128, epoch: u64) -> (u64, Vec<LedgerState>) {
        match self.call(fence(v, epoch, u128::from(epoch))) {
            Reply::Fenced { grant_left_ms, ledgers } => (grant_left_ms, ledgers),
            other => panic!("fence: {other:?}"),
        }
    }

    /// All entries of a ledger from an LSN on, with payloads, and the damaged ones.
    pub fn read_log(&mut self, v: u128, epoch: u64, n: u32, from: u64) -> (Vec<(LogEntry, Vec<u8>)>, Vec<u64>) {
        let (mut entries, mut damaged, mut from) = (Vec::new(), Vec::new(), from);
        loop {
            let request = Request::ReadLog {
                device: device(0),
                volume: VolumeId(v),
                ledger: ledger(epoch, n),
                from: Lsn(from),
                bytes_max: 100_000,
            };
            let (reply, payload) = self.call_with(request, Buf::empty());
            let Reply::LogEntries { entries: got, damaged: bad, more } = reply else { panic!("read log: {reply:?}") };
            let payload = buf::concat(&payload);
            let mut at = 0;
            for entry in got {
                let len = entry.crcs.len() * BLOCK_BYTES;
                assert_eq!(block_crcs(&payload[at..at + len]), entry.crcs);
                from = from.max(entry.lsn.0 + 1);
                entries.push((entry, payload[at..at + len].to_vec()));
                at += len;
            }
            assert_eq!(at, payload.len());
            from = bad.iter().fold(from, |f, lsn| f.max(lsn.0 + 1));
            damaged.extend(bad.iter().map(|l| l.0));
            if !more {
                return (entries, damaged);
            }
        }
    }

    pub fn put(&mut self, v: u128, epoch: u64, counter: u64, blocks: u32) -> Reply {
        let (request, payload) = put(v, epoch, counter, blocks);
        self.call_with(request, payload).0
    }

    pub fn read_shard(&mut self, shard: ShardId, block: u32, blocks: u32) -> Result<Vec<u8>, Refusal> {
        self.read_shard_of(0, shard, block, blocks)
    }

    pub fn read_shard_of(&mut self, slot: usize, shard: ShardId, block: u32, blocks: u32) -> Result<Vec<u8>, Refusal> {
        let read = Request::ReadShard { device: device(slot), shard, block, blocks, checked: true, cached: true };
        let (reply, payload) = self.call_with(read, Buf::empty());
        match reply {
            Reply::Shard { blocks: got } => {
                assert_eq!(got, blocks);
                Ok(buf::concat(&payload).to_vec())
            }
            Reply::Refused(refusal) => Err(refusal),
            other => panic!("read shard: {other:?}"),
        }
    }

    pub fn list(&mut self, v: u128) -> Vec<ShardId> {
        let (mut all, mut after) = (Vec::new(), None);
        loop {
            let request = Request::ListShards { device: device(0), volume: VolumeId(v), after, count_max: 5 };
            let Reply::Shards { shards, more } = self.call(request) else { panic!("list") };
            after = shards.last().copied().or(after);
            all.extend(shards);
            if !more {
                return all;
            }
        }
    }
}

pub fn ledger(epoch: u64, n: u32) -> LedgerId {
    LedgerId { epoch: Epoch(epoch), n }
}

pub fn create(v: u128, epoch: u64, n: u32) -> Request {
    Request::CreateLedger {
        device: device(0),
        volume: VolumeId(v),
        epoch: Epoch(epoch),
        instance: InstanceId(u128::from(epoch)),
        ledger: ledger(epoch, n),
        legs: vec![Leg { node: NODE, device: device(0) }; 3],
        rule: AckRule::flat(1),
    }
}

/// The payload that this entry always has.
pub fn entry_payload(v: u128, epoch: u64, n: u32, lsn: u64, blocks: usize) -> Vec<u8> {
    let mut bytes = vec![0; blocks * BLOCK_BYTES];
    Prng::new(v as u64 ^ epoch << 20 ^ u64::from(n) << 30 ^ lsn << 8).fill(&mut bytes);
    bytes
}

pub fn append(v: u128, epoch: u64, n: u32, lsn: u64, acked: u64, blocks: usize) -> (Request, Buf) {
    let payload = Buf::copy_from(&entry_payload(v, epoch, n, lsn, blocks));
    let request = Request::Append {
        device: device(0),
        volume: VolumeId(v),
        epoch: Epoch(epoch),
        ledger: ledger(epoch, n),
        lsn: Lsn(lsn),
        acked: Lsn(acked),
        header: format!("entry {lsn}").into_bytes(),
        crcs: block_crcs(&payload),
    };
    (request, payload)
}

pub fn fence(v: u128, epoch: u64, instance: u128) -> Request {
    let (volume, instance) = (VolumeId(v), InstanceId(instance));
    Request::Fence { device: device(0), volume, epoch: Epoch(epoch), instance }
}

pub fn trim(v: u128, epoch: u64, id: LedgerId, upto: u64) -> Request {
    Request::TrimLedger { device: device(0), volume: VolumeId(v), epoch: Epoch(epoch), ledger: id, upto: Lsn(upto) }
}

pub fn delete_ledger(v: u128, epoch: u64, id: LedgerId) -> Request {
    Request::DeleteLedger { device: device(0), volume: VolumeId(v), epoch: Epoch(epoch), ledger: id }
}

pub fn shard_id(v: u128, epoch: u64, counter: u64) -> ShardId {
    ShardId { segment: SegmentId { volume: VolumeId(v), epoch: Epoch(epoch), counter }, index: 1 }
}

/// The blocks that this shard always has.
pub fn shard_data(shard: ShardId, blocks: u32) -> Vec<u8> {
    let mut bytes = vec![0; blocks as usize * BLOCK_BYTES];
    let segment = shard.segment;
    Prng::new(segment.volume.0 as u64 ^ segment.epoch.0 << 32 ^ segment.counter << 8).fill(&mut bytes);
    bytes
}

pub fn put(v: u128, epoch: u64, counter: u64, blocks: u32) -> (Request, Buf) {
    put_on(0, v, epoch, counter, blocks)
}

pub fn put_on(slot: usize, v: u128, epoch: u64, counter: u64, blocks: u32) -> (Request, Buf) {
    let shard = shard_id(v, epoch, counter);
    let data = shard_data(shard, blocks);
    let header = ShardHeader {
        grid: GRID,
        shard,
        geometry: Geometry::new(Layout::Mirror { copies: 2 }, blocks),
        block_crcs: block_crcs(&data),
        index: SegmentIndex::Meta,
        payload_crcs: block_crcs(&data),
        sealed: false,
        packed: None,
    };
    let mut payload = header.encode();
    let header_blocks = (payload.len() / BLOCK_BYTES) as u32;
    payload.extend_from_slice(&data);
    let request =
        Request::PutShard { device: device(slot), volume: VolumeId(v), epoch: Epoch(epoch), shard, header_blocks };
    (request, Buf::copy_from(&payload))
}

pub fn is_done(reply: &Reply) -> bool {
    *reply == Reply::Done
}

pub fn is_appended(reply: &Reply) -> bool {
    matches!(reply, Reply::Appended { .. })
}

/// A journal of 32 units of 512 KiB, for devices of 64 MiB.
pub const JOURNAL_LARGE: JournalSizing =
    JournalSizing { journal_bytes: 16 << 20, unit_bytes: 512 << 10, shard_bytes_mean: 64 << 10 };
