//! Ideal nodes: every request is answered at once and nothing is ever torn or lost, but nodes go away and come back, get
//! full or hang, and the controller is dropped and opened anew. Faults of disks and network belong to the simulator.

#![allow(dead_code)]

use holdfast_base::{
    BLOCK_BYTES, BlockData, BlockOp, BlockRequest, Buf, ByteRange, DeviceId, Effects, Epoch, GridId, InstanceId,
    Instant, LedgerId, Lsn, MetaGuard, MetaReply, MetaRequest, MetaVersion, NodeId, Prng, RequestToken, ShardId,
    Urgency, VolumeId,
};
use holdfast_cipher::VolumeKey;
use holdfast_format::geometry::Layout;
use holdfast_format::meta::export_key;
use holdfast_format::root::{Root, root_key};
use holdfast_format::segment::{SegmentIndex, ShardHeader};
use holdfast_format::wire::{
    DeviceHealth, DeviceStat, HeldRoot, HeldVolume, LedgerState, LogEntry, Refusal, Reply, Request, WIRE,
};
use holdfast_volume::{Change, Config, Controller, Effect, Event, Notice, PreloadState, State, Target};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

pub const VOLUME: VolumeId = VolumeId(7);
pub const GRID: GridId = GridId(1);
pub const CAPACITY: u64 = 64 << 20;

#[derive(Default)]
pub struct Ledger {
    pub entries: BTreeMap<Lsn, (LogEntry, Buf)>,
    pub acked: Lsn,
    pub trimmed: Lsn,
}

/// Shards with their headers' blocks; knows their bytes.
#[derive(Default)]
pub struct Shards {
    held: BTreeMap<ShardId, (u32, Buf)>,
    bytes: u64,
}

impl std::ops::Deref for Shards {
    type Target = BTreeMap<ShardId, (u32, Buf)>;
    fn deref(&self) -> &Self::Target {
        &self.held
    }
}

impl Shards {
    fn insert(&mut self, shard: ShardId, header_blocks: u32, bytes: Buf) {
        self.bytes += bytes.len() as u64;
        if let Some((_, old)) = self.held.insert(shard, (header_blocks, bytes)) {
            self.bytes -= old.len() as u64;
        }
    }

    fn remove(&mut self, shard: &ShardId) {
        if let Some((_, old)) = self.held.remove(shard) {
            self.bytes -= old.len() as u64;
        }
    }

    pub fn retain(&mut self, keep: impl Fn(&ShardId, &(u32, Buf)) -> bool) {
        self.held.retain(|shard, held| keep(shard, held));
        self.bytes = self.held.values().map(|(_, bytes)| bytes.len() as u64).sum();
    }

    /// Changes the data in shards of guests' data, as a bad device would: what their headers say stays.
    pub fn alter_data(&mut self, alter: impl Fn(&ShardId, &mut [u8])) {
        for (shard, (header_blocks, bytes)) in &mut self.held {
            let data_at = *header_blocks as usize * BLOCK_BYTES;
            let header = ShardHeader::decode(*shard, &bytes[..data_at]).unwrap();
            if matches!(header.index, SegmentIndex::Data(_)) {
                let mut altered = bytes.to_vec();
                alter(shard, &mut altered[data_at..]);
                *bytes = Buf::copy_from(&altered);
            }
        }
    }

    /// Puts headers there that vouch for whatever data there is, as only a forger would.
    pub fn vouch(&mut self) {
        for (shard, (header_blocks, bytes)) in &mut self.held {
            let (header, data) = bytes.split_at(*header_blocks as usize * BLOCK_BYTES);
            let header = ShardHeader::decode(*shard, header).unwrap();
            let mut forged = ShardHeader { block_crcs: holdfast_base::block_crcs(data), ..header }.encode();
            forged.extend_from_slice(data);
            *bytes = Buf::copy_from(&forged);
        }
    }

    pub fn clear(&mut self) {
        *self = Shards::default();
    }
}

/// A node with one device that does at once, and for ever, what it is asked.
pub struct IdealNode {
    pub id: NodeId,
    pub up: bool,
    /// Stopped, like by SIGSTOP: what is sent to it waits.
    pub hung: bool,
    /// (token, request, payload, on a connection that is still there)
    pub waiting: Vec<(u64, Request, Buf, bool)>,
    pub promised: Epoch,
    /// The newest copy of the volume's root: (epoch, sequence, blocks).
    pub root: Option<(Epoch, u64, u32)>,
    pub ledgers: BTreeMap<LedgerId, Ledger>,
    pub shards: Shards,
    /// Bytes that others take.
    pub extra_used: u64,
    /// In 1/255.
    pub journal_fill: u8,
    /// Longer shards find no room.
    pub refuse_above: usize,
    /// Appends wait; other requests don't.
    pub hang_appends: bool,
    /// So do reads of shards.
    pub hang_shard_reads: bool,
    pub capacity_bytes: u64,
    /// Of shards that were ever put here: of data, and of the map and checkpoints.
    pub put_bytes: (u64, u64),
}

impl IdealNode {
    pub fn new(id: u32) -> IdealNode {
        IdealNode {
            id: NodeId(id),
            up: true,
            hung: false,
            waiting: Vec::new(),
            promised: Epoch(0),
            root: None,
            ledgers: BTreeMap::new(),
            shards: Shards::default(),
            extra_used: 0,
            journal_fill: 0,
            refuse_above: usize::MAX,
            hang_appends: false,
            hang_shard_reads: false,
            capacity_bytes: CAPACITY,
            put_bytes: (0, 0),
        }
    }

    pub fn stat(&self) -> DeviceStat {
        let used = self.shards.bytes + self.extra_used;
        DeviceStat {
            capacity_bytes: self.capacity_bytes,
            free_bytes: self.capacity_bytes.saturating_sub(used),
            journal_bytes: 16 << 20,
            journal_used_bytes: (16_u64 << 20) * u64::from(self.journal_fill) / 255,
            shard_count: self.shards.len() as u64,
            ..DeviceStat::unknown(DeviceId(u128::from(self.id.0)), DeviceHealth::Serving)
        }
    }

    pub fn is_full_for(&self, shard: &ShardId, len: usize) -> bool {
        let fits = self.shards.contains_key(shard) || self.stat().free_bytes >= len as u64;
        !fits || len > self.refuse_above
    }

    pub fn stale(&self, epoch: Epoch) -> bool {
        epoch < self.promised
    }

    fn ledger_states(&self) -> Vec<LedgerState> {
        let state = |(id, l): (&LedgerId, &Ledger)| LedgerState {
            ledger: *id,
            sound: true,
            acked: l.acked,
            trimmed: l.trimmed,
            last: l.entries.keys().max().copied().unwrap_or_default(),
        };
        self.ledgers.iter().map(state).collect()
    }

    pub fn answer(&mut self, request: Request, payload: Buf) -> (Reply, Buf) {
        let none = Buf::empty();
        let refused = |why| (Reply::Refused(why), Buf::empty());
        match request {
            Request::Append { epoch, .. }
            | Request::CreateLedger { epoch, .. }
            | Request::PutShard { epoch, .. }
            | Request::Fence { epoch, .. }
            | Request::DeleteShards { epoch, .. }
            | Request::PutRoot { epoch, .. }
                if self.stale(epoch) =>
            {
                refused(Refusal::StaleEpoch { promised: self.promised })
            }
            Request::CreateLedger { epoch, ledger, .. } => {
                self.promised = epoch;
                self.ledgers.entry(ledger).or_default();
                (Reply::Done, none)
            }
            Request::Append { ledger, lsn, acked, header, crcs, .. } => {
                let Some(found) = self.ledgers.get_mut(&ledger) else { return refused(Refusal::UnknownLedger) };
                found.acked = found.acked.max(acked);
                found.entries.insert(lsn, (LogEntry { lsn, header, crcs }, payload));
                (Reply::Appended { lsn, journal_fill: self.journal_fill }, none)
            }
            Request::Fence { epoch, .. } => {
                self.promised = epoch;
                (Reply::Fenced { grant_left_ms: 0, ledgers: self.ledger_states() }, none)
            }
            Request::ReadLog { ledger, from, .. } => {
                let found = &self.ledgers[&ledger];
                let some: Vec<_> = found.entries.range(from..).take(50).map(|(_, e)| e.clone()).collect();
                let more = found.entries.range(from..).count() > some.len();
                let payload: Vec<Buf> = some.iter().map(|(_, p)| p.clone()).collect();
                let entries = some.into_iter().map(|(e, _)| e).collect();
                (Reply::LogEntries { entries, damaged: vec![], more }, holdfast_base::buf::concat(&payload))
            }
            Request::TrimLedger { ledger, upto, .. } => {
                if let Some(found) = self.ledgers.get_mut(&ledger) {
                    found.trimmed = found.trimmed.max(upto);
                    found.entries.retain(|lsn, _| *lsn > upto);
                }
                (Reply::Done, none)
            }
            Request::DeleteLedger { ledger, .. } => {
                self.ledgers.remove(&ledger);
                (Reply::Done, none)
            }
            Request::Grant { .. } => (Reply::Done, none),
            Request::PutRoot { epoch, sequence, root, .. } => {
                let blocks = root.len().div_ceil(BLOCK_BYTES) as u32;
                self.root = self.root.max(Some((epoch, sequence, blocks)));
                (Reply::Done, none)
            }
            // It knows one volume, whatever its id: the one that is asked for.
            Request::ListVolumes { after, .. } => {
                let volume = VolumeId(after.map_or(0, |before| before.0 + 1));
                let root = self.root.map(|(epoch, sequence, blocks)| HeldRoot { epoch, sequence, blocks });
                let held = HeldVolume { volume, promised: self.promised, ledgers: self.ledger_states(), root };
                (Reply::Volumes { volumes: vec![held], more: false }, none)
            }
            Request::PutShard { ref shard, .. } if self.is_full_for(shard, payload.len()) => refused(Refusal::NoSpace),
            Request::PutShard { shard, header_blocks, .. } => {
                let header = ShardHeader::decode(shard, &payload[..header_blocks as usize * BLOCK_BYTES]).unwrap();
                let data = &payload[header_blocks as usize * BLOCK_BYTES..];
                assert_eq!(holdfast_base::block_crcs(data), header.block_crcs);
                if let Some((_, old)) = self.shards.get(&shard) {
                    assert_eq!(old[..], payload[..], "a shard is never written twice with different bytes");
                }
                let is_data = matches!(header.index, SegmentIndex::Data(_));
                let put = if is_data { &mut self.put_bytes.0 } else { &mut self.put_bytes.1 };
                *put += payload.len() as u64;
                self.shards.insert(shard, header_blocks, payload);
                (Reply::Done, none)
            }
            Request::ReadShard { shard, block, blocks, checked, .. } => match self.shards.get(&shard) {
                None => refused(Refusal::UnknownShard),
                Some((header_blocks, bytes)) => {
                    let from = (header_blocks + block) as usize * BLOCK_BYTES;
                    let data = bytes.slice(from..from + blocks as usize * BLOCK_BYTES);
                    let header = ShardHeader::decode(shard, &bytes[..*header_blocks as usize * BLOCK_BYTES]).unwrap();
                    let crcs = &header.block_crcs[block as usize..(block + blocks) as usize];
                    if checked && holdfast_base::block_crcs(&data) != crcs {
                        return refused(Refusal::Checksum);
                    }
                    (Reply::Shard { blocks }, data)
                }
            },
            Request::ReadShardHeader { shard, .. } => match self.shards.get(&shard) {
                None => refused(Refusal::UnknownShard),
                Some((header, bytes)) => (Reply::ShardHeader, bytes.slice(0..*header as usize * BLOCK_BYTES)),
            },
            Request::DeleteShards { shards, .. } => {
                shards.iter().for_each(|shard| self.shards.remove(shard));
                (Reply::Done, none)
            }
            Request::ListShards { .. } => {
                (Reply::Shards { shards: self.shards.keys().copied().collect(), more: false }, none)
            }
            Request::Stat => (Reply::Stat { devices: vec![self.stat()] }, none),
            Request::Ping => (Reply::Pong, none),
            // It reaches no other node: the controller does it.
            Request::MakeShard { .. } => refused(Refusal::Busy),
            other => panic!("the controller does not send {other:?}"),
        }
    }
}

/// Flips a bit in each so-many-th of these blocks.
pub fn flip_blocks(data: &mut [u8], every: usize) {
    data.chunks_exact_mut(BLOCK_BYTES).step_by(every).for_each(|block| block[9] ^= 1);
}

/// Version and bytes.
pub type RootRecord = (MetaVersion, Vec<u8>);

pub struct World {
    pub now: Instant,
    pub nodes: Vec<IdealNode>,
    /// The root record; empty where the store has none.
    pub root: RootRecord,
    /// What happens to it just before the next swaps arrive, one for each.
    pub before_swap: VecDeque<fn(&mut RootRecord)>,
    /// Version of the record of who serves the volume, and what the next openings are guarded by.
    pub export: MetaVersion,
    pub guard: Option<MetaVersion>,
    /// Swaps that have failed for their guard, and by what the opening is guarded before it hears of the next one.
    pub guards_failed: usize,
    pub guard_next: Option<MetaVersion>,
    /// The next swap happens, and its answer is lost; then who serves the volume is decided anew.
    pub loses_answer: bool,
    pub controller: Controller,
    /// One that has read the map beforehand, or has begun to: for the next opening.
    pub preloaded: Option<Controller>,
    pub openings: u64,
    pub rng: Prng,
    pub layout: Layout,
    pub replies: BTreeMap<u64, Result<BlockData, holdfast_base::BlockError>>,
    pub notices: Vec<Notice>,
    pub next_token: u64,
    /// From the next opening on: its bounds, without ids.
    pub config: Option<Config>,
    pub clean_dead_per_mille: u32,
    /// A fault makes it count wrong: the audit may say so.
    pub miscounts: bool,
    pub out: Effects<Effect>,
    pub queue: VecDeque<Event>,
    /// The most that has waited in it.
    pub queue_max: usize,
    /// By whose work it was: turns, and the most of maintenance that was done in one.
    pub turns: BTreeMap<&'static str, (usize, usize)>,
    /// How often legs were told what of the log they may forget.
    pub trims_told: u64,
    /// Of guests' requests from here on.
    pub urgency: Urgency,
    /// What nodes are asked, while that is noted.
    pub asked: Option<Vec<(Request, Urgency)>>,
    /// Answers of nodes take time, drawn from here, and wait in `later`; those of one node stay in order.
    pub slow: Option<Prng>,
    later: BTreeMap<(Instant, u64), Event>,
    /// What was packed, where the worker is held up.
    pub packed: Option<Vec<Event>>,
}

impl World {
    pub fn new(seed: u64, nodes: u32, layout: Layout, size: u64) -> World {
        let root = Root::new(GRID, VOLUME, "test", size, layout);
        let mut world = World {
            now: Instant(1_000_000_000),
            nodes: (1..=nodes).map(IdealNode::new).collect(),
            root: (MetaVersion(1), root.encode()),
            export: MetaVersion(1),
            guard: None,
            guards_failed: 0,
            guard_next: None,
            loses_answer: false,
            before_swap: VecDeque::new(),
            controller: Controller::new(config(seed, 0)),
            preloaded: None,
            openings: 0,
            rng: Prng::new(seed),
            layout,
            replies: BTreeMap::new(),
            notices: Vec::new(),
            next_token: 1,
            config: None,
            clean_dead_per_mille: 850,
            miscounts: false,
            out: Effects::new(),
            queue: VecDeque::new(),
            queue_max: 0,
            turns: BTreeMap::new(),
            trims_told: 0,
            urgency: Urgency::Normal,
            asked: None,
            slow: None,
            later: BTreeMap::new(),
            packed: None,
        };
        world.open();
        world
    }

    /// From the next opening on, which needs the key too, the volume is an encrypted one. Nothing may have been written yet.
    pub fn encrypt(&mut self, key: &VolumeKey) {
        let root = Root { key_id: Some(key.id()), ..Root::decode(&self.root.1).unwrap() };
        self.root.1 = root.encode();
    }

    pub fn open(&mut self) {
        self.begin_open();
        self.run_until(|w| w.controller.state() == State::Open);
    }

    fn new_controller(&mut self) -> Controller {
        self.openings += 1;
        let mut config = config(self.rng.next_u64(), self.openings);
        config.clean_dead_per_mille = self.clean_dead_per_mille;
        if let Some(bounds) = &self.config {
            config = Config { instance: config.instance, seed: config.seed, ..bounds.clone() };
        }
        Controller::new(config)
    }

    /// Another host reads the map while this one serves, as far as it gets within so many ticks.
    pub fn preload(&mut self, ticks: u64) {
        let other = self.new_controller();
        let serving = std::mem::replace(&mut self.controller, other);
        let notices = std::mem::take(&mut self.notices);
        self.begin(Event::Preload);
        for _ in 0..ticks {
            if matches!(self.controller.preload_state(), Some(PreloadState::Done | PreloadState::Unreadable)) {
                break;
            }
            self.span(Duration::from_micros(1));
        }
        for i in 0..self.nodes.len() {
            if self.nodes[i].up && !self.nodes[i].hung {
                self.push(Event::NodeDown { node: self.nodes[i].id });
            }
        }
        let damaged = self.notices.iter().find(|notice| matches!(notice, Notice::ShardDamaged { .. }));
        assert!(damaged.is_none(), "what the other host has deleted is called damaged: {damaged:?}");
        self.notices = notices;
        self.preloaded = Some(std::mem::replace(&mut self.controller, serving));
    }

    pub fn begin_open(&mut self) {
        self.queue.clear();
        for node in &mut self.nodes {
            node.waiting.iter_mut().for_each(|w| w.3 = false);
            node.up = node.up && !node.hung;
        }
        self.controller = match self.preloaded.take() {
            Some(preloaded) => preloaded,
            None => self.new_controller(),
        };
        self.controller.guard_claim(self.guard);
        self.begin(Event::Open);
    }

    fn begin(&mut self, event: Event) {
        self.push(event);
        for i in 0..self.nodes.len() {
            if self.nodes[i].up && !self.nodes[i].hung {
                self.announce(i);
            }
        }
    }

    pub fn announce(&mut self, i: usize) {
        let (node, stat) = (self.nodes[i].id, self.nodes[i].stat());
        self.push(Event::NodeUp { node, boot: InstanceId(1), version: WIRE.newest, devices: vec![stat] });
    }

    pub fn push(&mut self, event: Event) {
        self.queue.push_back(event);
        self.drain();
    }

    pub fn drain(&mut self) {
        while let Some(event) = self.queue.pop_front() {
            self.controller.handle(self.now, event, &mut self.out);
            let turn = self.controller.last_turn();
            if turn.sliced > 0 {
                let (turns, longest) = self.turns.entry(turn.of).or_default();
                (*turns, *longest) = (*turns + 1, turn.sliced.max(*longest));
            }
            for effect in self.out.take() {
                self.carry_out(effect);
            }
            self.queue_max = self.queue_max.max(self.queue.len());
        }
    }

    fn swap(&mut self, expect: MetaVersion, value: Option<Vec<u8>>, guard: Option<MetaGuard>) -> MetaReply {
        let there = Some(self.root.1.clone()).filter(|bytes| !bytes.is_empty());
        if let Some(guard) = guard.filter(|guard| guard.version != self.export) {
            assert_eq!(guard.key, export_key(VOLUME));
            self.guards_failed += 1;
            if let Some(next) = self.guard_next.take() {
                self.controller.guard_claim(Some(next));
            }
            return MetaReply::GuardFailed { version: self.root.0, value: there };
        }
        if expect != self.root.0 {
            return MetaReply::Conflict { version: self.root.0, value: there };
        }
        self.root = (MetaVersion(expect.0 + 1), value.unwrap());
        if std::mem::take(&mut self.loses_answer) {
            self.export.0 += 1;
            return MetaReply::Unknown;
        }
        MetaReply::Swapped { version: self.root.0 }
    }

    pub fn carry_out(&mut self, effect: Effect) {
        match effect {
            Effect::Send { node, token, request, urgency, payload, .. } => {
                self.asked.iter_mut().for_each(|asked| asked.push((request.clone(), urgency)));
                let target = self.nodes.iter_mut().find(|n| n.id == node).unwrap();
                assert!(target.up || target.hung, "sent to a node that is down");
                self.trims_told += u64::from(matches!(request, Request::TrimLedger { .. }));
                let payload = holdfast_base::buf::concat(&payload);
                let hangs = match request {
                    Request::Append { .. } => target.hang_appends,
                    Request::ReadShard { .. } => target.hang_shard_reads,
                    _ => false,
                };
                if target.hung || hangs {
                    target.waiting.push((token, request, payload, true));
                    return;
                }
                let (reply, payload) = target.answer(request, payload);
                self.answer_later(node, Event::Node { node, token, reply, times: None, payload });
            }
            Effect::Meta { token, request } => {
                if matches!(request, MetaRequest::Swap { .. })
                    && let Some(change) = self.before_swap.pop_front()
                {
                    change(&mut self.root);
                }
                let there = Some(self.root.1.clone()).filter(|bytes| !bytes.is_empty());
                let reply = match request {
                    MetaRequest::Get { key } => {
                        assert_eq!(key, root_key(VOLUME));
                        MetaReply::Record { version: self.root.0, value: there }
                    }
                    MetaRequest::Swap { expect, value, guard, .. } => self.swap(expect, value, guard),
                };
                self.queue.push_back(Event::Meta { token, reply });
            }
            Effect::Took { .. } | Effect::Talk { .. } => {}
            Effect::Reply(reply) => {
                self.replies.insert(reply.token.0, reply.result);
            }
            Effect::Work { job, task, blocks, .. } => {
                let packed = Event::Worked { job, outcome: task.work(&blocks) };
                match &mut self.packed {
                    Some(held) => held.push(packed),
                    None => self.queue.push_back(packed),
                }
            }
            Effect::Reconnect { node } => {
                self.later.retain(|_, event| !matches!(event, Event::Node { node: of, .. } if *of == node));
                let target = self.nodes.iter_mut().find(|n| n.id == node).unwrap();
                target.up = !target.hung;
                for waiting in &mut target.waiting {
                    waiting.3 = false;
                }
                self.queue.push_back(Event::NodeDown { node });
                if !target.hung {
                    let devices = vec![target.stat()];
                    self.queue.push_back(Event::NodeUp { node, boot: InstanceId(1), version: WIRE.newest, devices });
                }
            }
            Effect::Notice(notice @ Notice::Miscounted { .. }) if !self.miscounts => panic!("{notice:?}"),
            Effect::Notice(notice) => self.notices.push(notice),
        }
    }

    fn answer_later(&mut self, node: NodeId, answer: Event) {
        let Some(prng) = &mut self.slow else { return self.queue.push_back(answer) };
        let us_max = if prng.chance(30) { 3000 } else { 300 };
        let due = self.now + Duration::from_micros(prng.between(20, us_max));
        let is_its = |event: &Event| matches!(event, Event::Node { node: of, .. } if *of == node);
        let last = self.later.iter().rfind(|(_, event)| is_its(event)).map(|((at, _), _)| *at);
        let number = self.later.keys().map(|(_, number)| *number).max().unwrap_or(0) + 1;
        self.later.insert((last.map_or(due, |last| last.max(due)), number), answer);
    }

    /// When something happens next by itself.
    pub fn next_at(&self) -> Instant {
        let tick = self.controller.next_deadline().unwrap_or(self.now + Duration::from_millis(1));
        self.later.first_key_value().map_or(tick, |((at, _), _)| tick.min(*at))
    }

    /// Lets time pass up to an instant before which nothing happens by itself.
    pub fn step_to(&mut self, now: Instant) {
        self.now = self.now.max(now);
        while let Some(first) = self.later.first_entry().filter(|first| first.key().0 <= now) {
            let event = first.remove();
            self.push(event);
        }
        if self.controller.next_deadline().is_some_and(|deadline| deadline <= now) {
            self.push(Event::Tick);
        }
    }

    /// From here on nodes answer at once, as they do at first.
    pub fn end_slow(&mut self) {
        self.slow = None;
        while let Some((_, event)) = self.later.pop_first() {
            self.push(event);
        }
    }

    /// Lets time pass, tick by tick, until the condition holds.
    pub fn run_until(&mut self, done: impl Fn(&World) -> bool) {
        for _ in 0..20_000 {
            if done(self) {
                return;
            }
            let deadline = self.controller.next_deadline().unwrap_or(self.now + Duration::from_millis(1));
            self.now = Instant(deadline.0.max(self.now.0 + 1));
            self.push(Event::Tick);
        }
        panic!("nothing comes of it at {:?}: {:?}", self.now, self.controller.status());
    }

    pub fn request(&mut self, op: BlockOp) -> u64 {
        self.request_to(Target::VOLUME, op)
    }

    pub fn request_to(&mut self, target: Target, op: BlockOp) -> u64 {
        let token = self.next_token;
        self.next_token += 1;
        let (request, urgency) = (BlockRequest { token: RequestToken(token), op }, self.urgency);
        self.push(Event::Request { target, request, urgency });
        token
    }

    /// What was made, or why it was refused.
    pub fn change(&mut self, change: Change) -> Result<Option<Target>, &'static str> {
        self.notices.clear();
        self.push(Event::Change(change.clone()));
        let outcome = |notices: &[Notice]| {
            notices.iter().find_map(|notice| match notice {
                Notice::Changed { change: of, target } if *of == change => Some(Ok(*target)),
                Notice::Refused { change: of, why } if *of == change => Some(Err(*why)),
                _ => None,
            })
        };
        self.run_until(|w| outcome(&w.notices).is_some());
        outcome(&self.notices).expect("just seen")
    }

    pub fn wait(&mut self, token: u64) -> BlockData {
        self.run_until(|w| w.replies.contains_key(&token));
        self.replies.remove(&token).unwrap().expect("no request fails here")
    }

    pub fn read(&mut self, offset: u64, len: u64) -> Vec<u8> {
        self.read_of(Target::VOLUME, offset, len)
    }

    pub fn read_of(&mut self, target: Target, offset: u64, len: u64) -> Vec<u8> {
        let token = self.request_to(target, BlockOp::Read(ByteRange::new(offset, len)));
        match self.wait(token) {
            BlockData::Data(parts) => holdfast_base::buf::concat(&parts).to_vec(),
            other => panic!("a read answered {other:?}"),
        }
    }

    pub fn settle(&mut self, span: Duration) {
        let until = self.now + span;
        self.run_until(|w| w.now >= until);
    }

    pub fn node_down(&mut self, i: usize) {
        self.nodes[i].up = false;
        let node = self.nodes[i].id;
        self.push(Event::NodeDown { node });
    }

    pub fn node_hangs(&mut self, i: usize) {
        self.nodes[i].hung = true;
    }

    /// The node goes on: everything that was sent to it happens, however old it is.
    pub fn node_resumes(&mut self, i: usize) {
        self.nodes[i].hung = false;
        for (token, request, payload, connected) in std::mem::take(&mut self.nodes[i].waiting) {
            let (reply, payload) = self.nodes[i].answer(request, payload);
            let node = self.nodes[i].id;
            if connected {
                self.push(Event::Node { node, token, reply, times: None, payload });
            }
        }
        if !self.nodes[i].up {
            self.node_up(i);
        }
    }

    pub fn node_back(&mut self, i: usize) {
        if self.nodes[i].hung { self.node_resumes(i) } else { self.node_up(i) }
    }

    pub fn node_up(&mut self, i: usize) {
        self.nodes[i].up = true;
        self.announce(i);
    }
}

pub fn config(seed: u64, instance: u64) -> Config {
    let mut config = Config::new(GRID, VOLUME, "host", InstanceId(u128::from(instance) + 1), seed);
    config.writeback_bytes_max = 1 << 20;
    config.segment_payload_bytes = 128 << 10;
    config.direct_bytes_min = 64 << 10;
    config.map_cache_bytes_max = 8 << 10;
    config.fold_runs_min = 16;
    config
}

impl World {
    /// Lets time pass, deadline by deadline.
    pub fn span(&mut self, span: Duration) {
        let until = self.now + span;
        while self.now < until {
            let deadline = self.controller.next_deadline().unwrap_or(self.now + Duration::from_millis(1));
            self.now = Instant(deadline.0.max(self.now.0 + 1));
            self.push(Event::Tick);
            let again = self.controller.next_deadline();
            assert!(again.is_none_or(|d| d > self.now), "a deadline that has passed is asked for again");
        }
    }
    pub fn write_op(&mut self, offset: u64, len: u64) -> u64 {
        let data: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
        self.request(BlockOp::Write { offset, data: Buf::copy_from(&data) })
    }
    /// How long it took, and the answer.
    pub fn answer(
        &mut self,
        token: u64,
        max: Duration,
    ) -> (Duration, Option<Result<BlockData, holdfast_base::BlockError>>) {
        let from = self.now;
        while !self.replies.contains_key(&token) && self.now.since(from) < max {
            self.span(Duration::from_micros(1));
        }
        (self.now.since(from), self.replies.remove(&token))
    }
    pub fn write_all(&mut self, offset: u64, len: u64) {
        let mut at = offset;
        while at < offset + len {
            let n = (32 << 10).min(offset + len - at);
            let t = self.write_op(at, n);
            let (_, r) = self.answer(t, Duration::from_secs(30));
            assert!(matches!(r, Some(Ok(_))), "{r:?} at {at}");
            at += n;
        }
    }
    pub fn free_now(&mut self, free: u64) {
        for n in &mut self.nodes {
            n.extra_used = 0;
            n.extra_used = n.stat().free_bytes.saturating_sub(free);
        }
        self.tell_devices();
    }

    /// As a host does, which asks all nodes once a second.
    pub fn tell_devices(&mut self) {
        for i in 0..self.nodes.len() {
            if self.nodes[i].up && !self.nodes[i].hung {
                let (node, devices) = (self.nodes[i].id, vec![self.nodes[i].stat()]);
                self.push(Event::Devices { node, devices });
            }
        }
    }
}
