//! The controller against ideal nodes: every request is answered at once and nothing is ever torn or lost, but nodes go
//! away and come back, and the controller is dropped and opened anew. What it serves is compared with a plain array.
//! Faults of disks and network belong to the simulator.

use holdfast_base::{
    BLOCK_BYTES, BlockData, BlockOp, BlockRequest, Buf, ByteRange, DeviceId, Effects, Epoch, GridId, InstanceId,
    Instant, LedgerId, Lsn, MetaReply, MetaRequest, MetaVersion, NodeId, Prng, RequestToken, ShardId, VolumeId,
};
use holdfast_format::geometry::Layout;
use holdfast_format::root::{Root, root_key};
use holdfast_format::segment::ShardHeader;
use holdfast_format::wire::{DeviceHealth, DeviceStat, LedgerState, LogEntry, Refusal, Reply, Request};
use holdfast_volume::{Config, Controller, Effect, Event, State};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

const VOLUME: VolumeId = VolumeId(7);
const GRID: GridId = GridId(1);
const CAPACITY: u64 = 64 << 20;

#[derive(Default)]
struct Ledger {
    entries: BTreeMap<Lsn, (LogEntry, Buf)>,
    acked: Lsn,
    trimmed: Lsn,
}

/// A node with one device that does at once, and for ever, what it is asked.
struct IdealNode {
    id: NodeId,
    up: bool,
    /// Stopped, like by SIGSTOP: what is sent to it waits.
    hung: bool,
    /// (token, request, payload, on a connection that is still there)
    waiting: Vec<(u64, Request, Buf, bool)>,
    promised: Epoch,
    ledgers: BTreeMap<LedgerId, Ledger>,
    shards: BTreeMap<ShardId, (u32, Buf)>,
}

impl IdealNode {
    fn new(id: u32) -> IdealNode {
        IdealNode {
            id: NodeId(id),
            up: true,
            hung: false,
            waiting: Vec::new(),
            promised: Epoch(0),
            ledgers: BTreeMap::new(),
            shards: BTreeMap::new(),
        }
    }

    fn stat(&self) -> DeviceStat {
        let used: u64 = self.shards.values().map(|(_, b)| b.len() as u64).sum();
        DeviceStat {
            device: DeviceId(u128::from(self.id.0)),
            health: DeviceHealth::Serving,
            capacity_bytes: CAPACITY,
            free_bytes: CAPACITY.saturating_sub(used),
            journal_bytes: 16 << 20,
            journal_used_bytes: 0,
            shard_count: self.shards.len() as u64,
        }
    }

    fn stale(&self, epoch: Epoch) -> bool {
        epoch < self.promised
    }

    fn answer(&mut self, request: Request, payload: Buf) -> (Reply, Buf) {
        let none = Buf::empty();
        let refused = |why| (Reply::Refused(why), Buf::empty());
        match request {
            Request::Append { epoch, .. }
            | Request::CreateLedger { epoch, .. }
            | Request::PutShard { epoch, .. }
            | Request::Fence { epoch, .. }
            | Request::DeleteShards { epoch, .. }
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
                (Reply::Appended { lsn, journal_fill: 0 }, none)
            }
            Request::Fence { epoch, .. } => {
                self.promised = epoch;
                let state = |(id, l): (&LedgerId, &Ledger)| LedgerState {
                    ledger: *id,
                    sound: true,
                    acked: l.acked,
                    trimmed: l.trimmed,
                    last: l.entries.keys().max().copied().unwrap_or_default(),
                };
                (Reply::Fenced { grant_left_ms: 0, ledgers: self.ledgers.iter().map(state).collect() }, none)
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
            Request::PutShard { shard, header_blocks, .. } => {
                let header = ShardHeader::decode(shard, &payload[..header_blocks as usize * BLOCK_BYTES]).unwrap();
                let data = &payload[header_blocks as usize * BLOCK_BYTES..];
                assert_eq!(holdfast_base::block_crcs(data), header.block_crcs);
                if let Some((_, old)) = self.shards.get(&shard) {
                    assert_eq!(old[..], payload[..], "a shard is never written twice with different bytes");
                }
                self.shards.insert(shard, (header_blocks, payload));
                (Reply::Done, none)
            }
            Request::ReadShard { shard, block, blocks, .. } => match self.shards.get(&shard) {
                None => refused(Refusal::UnknownShard),
                Some((header, bytes)) => {
                    let from = (header + block) as usize * BLOCK_BYTES;
                    (Reply::Shard { blocks }, bytes.slice(from..from + blocks as usize * BLOCK_BYTES))
                }
            },
            Request::ReadShardHeader { shard, .. } => match self.shards.get(&shard) {
                None => refused(Refusal::UnknownShard),
                Some((header, bytes)) => (Reply::ShardHeader, bytes.slice(0..*header as usize * BLOCK_BYTES)),
            },
            Request::DeleteShards { shards, .. } => {
                self.shards.retain(|s, _| !shards.contains(s));
                (Reply::Done, none)
            }
            Request::ListShards { .. } => {
                (Reply::Shards { shards: self.shards.keys().copied().collect(), more: false }, none)
            }
            Request::Stat => (Reply::Stat { devices: vec![self.stat()] }, none),
            Request::Ping => (Reply::Pong, none),
            other => panic!("the controller does not send {other:?}"),
        }
    }
}

struct World {
    now: Instant,
    nodes: Vec<IdealNode>,
    root: (MetaVersion, Vec<u8>),
    controller: Controller,
    openings: u64,
    rng: Prng,
    layout: Layout,
    replies: BTreeMap<u64, Result<BlockData, holdfast_base::BlockError>>,
    next_token: u64,
    out: Effects<Effect>,
    queue: VecDeque<Event>,
}

impl World {
    fn new(seed: u64, nodes: u32, layout: Layout, size: u64) -> World {
        let root = Root::new(GRID, VOLUME, "test", size, layout);
        let mut world = World {
            now: Instant(1_000_000_000),
            nodes: (1..=nodes).map(IdealNode::new).collect(),
            root: (MetaVersion(1), root.encode()),
            controller: Controller::new(config(seed, 0)),
            openings: 0,
            rng: Prng::new(seed),
            layout,
            replies: BTreeMap::new(),
            next_token: 1,
            out: Effects::new(),
            queue: VecDeque::new(),
        };
        world.open();
        world
    }

    fn open(&mut self) {
        self.openings += 1;
        self.queue.clear();
        for node in &mut self.nodes {
            node.waiting.iter_mut().for_each(|w| w.3 = false);
            node.up = node.up && !node.hung;
        }
        self.controller = Controller::new(config(self.rng.next_u64(), self.openings));
        self.push(Event::Open);
        for i in 0..self.nodes.len() {
            if self.nodes[i].up && !self.nodes[i].hung {
                self.announce(i);
            }
        }
        self.run_until(|w| w.controller.state() == State::Open);
    }

    fn announce(&mut self, i: usize) {
        let (node, stat) = (self.nodes[i].id, self.nodes[i].stat());
        self.push(Event::NodeUp { node, boot: InstanceId(1), devices: vec![stat] });
    }

    fn push(&mut self, event: Event) {
        self.queue.push_back(event);
        self.drain();
    }

    fn drain(&mut self) {
        while let Some(event) = self.queue.pop_front() {
            self.controller.handle(self.now, event, &mut self.out);
            for effect in self.out.take() {
                self.carry_out(effect);
            }
        }
    }

    fn carry_out(&mut self, effect: Effect) {
        match effect {
            Effect::Send { node, token, request, payload, .. } => {
                let target = self.nodes.iter_mut().find(|n| n.id == node).unwrap();
                assert!(target.up || target.hung, "sent to a node that is down");
                let payload = holdfast_base::buf::concat(&payload);
                if target.hung {
                    target.waiting.push((token, request, payload, true));
                    return;
                }
                let (reply, payload) = target.answer(request, payload);
                self.queue.push_back(Event::Node { node, token, reply, payload });
            }
            Effect::Meta { token, request } => {
                let reply = match request {
                    MetaRequest::Get { key } => {
                        assert_eq!(key, root_key(VOLUME));
                        MetaReply::Record { version: self.root.0, value: Some(self.root.1.clone()) }
                    }
                    MetaRequest::Swap { expect, value, .. } if expect == self.root.0 => {
                        self.root = (MetaVersion(expect.0 + 1), value.unwrap());
                        MetaReply::Swapped { version: self.root.0 }
                    }
                    MetaRequest::Swap { .. } => {
                        MetaReply::Conflict { version: self.root.0, value: Some(self.root.1.clone()) }
                    }
                };
                self.queue.push_back(Event::Meta { token, reply });
            }
            Effect::Reply(reply) => {
                self.replies.insert(reply.token.0, reply.result);
            }
            Effect::Reconnect { node } => {
                let target = self.nodes.iter_mut().find(|n| n.id == node).unwrap();
                target.up = !target.hung;
                for waiting in &mut target.waiting {
                    waiting.3 = false;
                }
                self.queue.push_back(Event::NodeDown { node });
                if !target.hung {
                    let devices = vec![target.stat()];
                    self.queue.push_back(Event::NodeUp { node, boot: InstanceId(1), devices });
                }
            }
            Effect::Notice(_) => {}
        }
    }

    /// Lets time pass, tick by tick, until the condition holds.
    fn run_until(&mut self, done: impl Fn(&World) -> bool) {
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

    fn request(&mut self, op: BlockOp) -> u64 {
        let token = self.next_token;
        self.next_token += 1;
        self.push(Event::Request(BlockRequest { token: RequestToken(token), op }));
        token
    }

    fn wait(&mut self, token: u64) -> BlockData {
        self.run_until(|w| w.replies.contains_key(&token));
        self.replies.remove(&token).unwrap().expect("no request fails here")
    }

    fn read(&mut self, offset: u64, len: u64) -> Vec<u8> {
        let token = self.request(BlockOp::Read(ByteRange::new(offset, len)));
        match self.wait(token) {
            BlockData::Data(parts) => parts.iter().flat_map(|p| p.to_vec()).collect(),
            other => panic!("a read answered {other:?}"),
        }
    }

    fn settle(&mut self, span: Duration) {
        let until = self.now + span;
        self.run_until(|w| w.now >= until);
    }

    fn node_down(&mut self, i: usize) {
        self.nodes[i].up = false;
        let node = self.nodes[i].id;
        self.push(Event::NodeDown { node });
    }

    fn node_hangs(&mut self, i: usize) {
        self.nodes[i].hung = true;
    }

    /// The node goes on: everything that was sent to it happens, however old it is.
    fn node_resumes(&mut self, i: usize) {
        self.nodes[i].hung = false;
        for (token, request, payload, connected) in std::mem::take(&mut self.nodes[i].waiting) {
            let (reply, payload) = self.nodes[i].answer(request, payload);
            let node = self.nodes[i].id;
            if connected {
                self.push(Event::Node { node, token, reply, payload });
            }
        }
        if !self.nodes[i].up {
            self.node_up(i);
        }
    }

    fn node_back(&mut self, i: usize) {
        if self.nodes[i].hung { self.node_resumes(i) } else { self.node_up(i) }
    }

    fn node_up(&mut self, i: usize) {
        self.nodes[i].up = true;
        self.announce(i);
    }
}

fn config(seed: u64, instance: u64) -> Config {
    let mut config = Config::new(GRID, VOLUME, "host", InstanceId(u128::from(instance) + 1), seed);
    config.writeback_bytes_max = 1 << 20;
    config.segment_payload_bytes = 128 << 10;
    config.bypass_bytes_min = 64 << 10;
    config.map_cache_bytes_max = 8 << 10;
    config.fold_runs_min = 16;
    config
}

fn random_range(rng: &mut Prng, size: u64) -> (u64, u64) {
    let len = match rng.below(10) {
        0 => rng.between(1, 6000),
        1 => rng.between(1, 40) * 4096,
        _ => rng.between(1, 4) * 4096,
    };
    let offset = rng.below(size - len);
    (if len % 4096 == 0 { offset / 4096 * 4096 } else { offset }, len)
}

/// Random requests, nodes away one at a time, and re-openings; every read is checked against an array.
fn compare_with_array(seed: u64, nodes: u32, layout: Layout, ops: u32) {
    let size: u64 = 6 << 20;
    let mut world = World::new(seed, nodes, layout, size);
    let mut model = vec![0_u8; size as usize];
    let mut rng = Prng::new(seed ^ 0x5eed);
    let mut down: Option<usize> = None;
    for _ in 0..ops {
        let (offset, len) = random_range(&mut rng, size);
        let range = offset as usize..(offset + len) as usize;
        match rng.below(100) {
            0..45 => {
                let mut data = vec![0; len as usize];
                rng.fill(&mut data);
                model[range].copy_from_slice(&data);
                let token = world.request(BlockOp::Write { offset, data: Buf::copy_from(&data) });
                world.wait(token);
            }
            45..50 => {
                model[range].fill(0);
                let token = world.request(BlockOp::Discard(ByteRange::new(offset, len)));
                world.wait(token);
            }
            50..90 => assert!(world.read(offset, len) == model[range], "seed {seed}: read {offset}+{len} differs"),
            90..94 => match down.take() {
                Some(i) => world.node_back(i),
                None => {
                    let i = rng.below(u64::from(nodes)) as usize;
                    if rng.chance(500) {
                        world.node_down(i)
                    } else {
                        world.node_hangs(i)
                    }
                    down = Some(i);
                }
            },
            94..98 => world.settle(Duration::from_millis(rng.between(1, 4000))),
            _ => world.open(),
        }
    }
    if let Some(i) = down.take() {
        world.node_back(i);
    }
    finish(seed, &mut world, &model);
}

fn finish(seed: u64, world: &mut World, model: &[u8]) {
    world.settle(Duration::from_secs(30));
    assert_eq!(world.controller.status().degraded_segments, 0, "seed {seed}: redundancy is back");
    for chunk in 0..model.len() / 65536 {
        let at = chunk * 65536;
        assert!(world.read(at as u64, 65536) == model[at..at + 65536], "seed {seed}: chunk {chunk} differs");
    }
    world.push(Event::Close);
    world.run_until(|w| w.controller.state() == State::Closed);
    world.open();
    for chunk in 0..model.len() / 65536 {
        let at = chunk * 65536;
        assert!(world.read(at as u64, 65536) == model[at..at + 65536], "seed {seed}: chunk {chunk} differs, reopened");
    }
    world.settle(Duration::from_secs(30));
    let live = world.controller.status().mapped_blocks * BLOCK_BYTES as u64;
    let held: u64 = world.nodes.iter().flat_map(|n| n.shards.values()).map(|(_, b)| b.len() as u64).sum();
    assert!(held < 4 * live * u64::from(world.layout.width()) + (4 << 20), "seed {seed}: {held} held for {live} live");
}

#[test]
fn parity_on_four_nodes() {
    for seed in 0..24 {
        compare_with_array(seed, 4, Layout::DEFAULT, 400);
    }
}

#[test]
fn parity_on_three_nodes_degrades_to_mirrors_and_is_recoded() {
    for seed in 100..124 {
        compare_with_array(seed, 3, Layout::DEFAULT, 400);
    }
}

#[test]
fn mirrors() {
    for seed in 200..212 {
        compare_with_array(seed, 3, Layout::Mirror { copies: 2 }, 300);
        compare_with_array(seed, 4, Layout::Mirror { copies: 3 }, 300);
    }
}

#[test]
fn wide_codes() {
    for seed in 300..306 {
        compare_with_array(seed, 7, Layout::Parity { data: 4, parity: 2 }, 300);
        compare_with_array(seed, 8, Layout::Parity { data: 7, parity: 1 }, 300);
    }
}

#[test]
fn what_a_smaller_size_cut_off_never_comes_back() {
    const MIB: u64 = 1 << 20;
    for (seed, cut) in [(400, 4 * MIB), (401, 5 * MIB + BLOCK_BYTES as u64), (402, 0)] {
        for opens_between in [false, true] {
            let mut world = World::new(seed, 4, Layout::DEFAULT, 8 * MIB);
            world.run_until(|w| w.controller.state() == State::Open);
            for i in 0..8 {
                let data = Buf::copy_from(&vec![i as u8 + 1; MIB as usize]);
                let write = world.request(BlockOp::Write { offset: i * MIB, data });
                world.wait(write);
            }
            world.settle(Duration::from_secs(8));
            let mut resize = |size: u64| {
                world.push(Event::Resize { size_bytes: size });
                world.run_until(|w| Root::decode(&w.root.1).unwrap().size_bytes == size);
                if opens_between {
                    world.open();
                    world.run_until(|w| w.controller.state() == State::Open);
                }
            };
            resize(cut);
            resize(8 * MIB);
            let kept: Vec<u8> = (0..cut).map(|at| (at / MIB) as u8 + 1).collect();
            assert!(cut == 0 || world.read(0, cut) == kept, "what lies in front of the end stays");
            assert!(world.read(cut, 8 * MIB - cut).iter().all(|b| *b == 0), "cut at {cut}, {opens_between}");
        }
    }
}
