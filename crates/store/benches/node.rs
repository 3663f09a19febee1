//! What a node's own work costs: microseconds of one core for an 8 KiB append and an 8 KiB read, on a disk that is always
//! done at once; and how much more two reactors do than one, each with a device.
//!
//! `cargo bench -p holdfast-store`. Run in any other way it does a little of each, to show that it still works.

use holdfast_base::{
    Buf, BufMut, DeviceId, Effects, Epoch, GridId, InstanceId, Instant, LedgerId, Lsn, NodeId, SegmentId, ShardId,
    VolumeId, block_crcs,
};
use holdfast_format::geometry::{Geometry, Layout};
use holdfast_format::ledger::AckRule;
use holdfast_format::segment::{SegmentIndex, ShardHeader};
use holdfast_format::wire::{Reply, Request};
use holdfast_store::{DeviceSlot, DiskToken, Effect, Event, JournalSizing, Node, NodeConfig, PeerId, format_device};
use std::hint::black_box;
use std::time::Duration;

const GRID: GridId = GridId(1);
const DEVICE: DeviceId = DeviceId(2);
const VOLUME: VolumeId = VolumeId(3);
const SIZE: usize = 1 << 30;
const DEPTH: usize = 16;
const SHARD_BLOCKS: u32 = 512;
const SHARDS: u64 = 100;
const LEDGER: LedgerId = LedgerId { epoch: Epoch(1), n: 0 };

struct Bench {
    node: Node,
    now: Instant,
    out: Effects<Effect>,
    disk: Vec<u8>,
    /// Reads of the measured phase are answered with this, so that the copy out of `disk` is not measured.
    canned: Option<Buf>,
    writes: u64,
}

impl Bench {
    /// With one of the node's two devices, on a reactor of its own, or with its only one.
    fn new(reactors: u16, reactor: u16) -> Bench {
        let node = NodeId(1);
        let mut disk = vec![0; SIZE];
        let sizing = JournalSizing::for_device(SIZE as u64);
        for (offset, data) in format_device(GRID, node, DEVICE, SIZE as u64, sizing).expect("large enough") {
            disk[offset as usize..offset as usize + data.len()].copy_from_slice(&data);
        }
        let config = NodeConfig { reactor, reactors, ..NodeConfig::new(GRID, node, InstanceId(1)) };
        let (now, out) = (Instant(1), Effects::new());
        let mut bench = Bench { node: Node::new(config), now, out, disk, canned: None, writes: 0 };
        bench.run(vec![Event::AddDevice {
            slot: DeviceSlot(0),
            size_bytes: SIZE as u64,
            media: None,
            is_direct: true,
        }]);
        bench
    }

    /// Handles the events and all that they lead to; returns how many requests were answered well.
    fn run(&mut self, events: Vec<Event>) -> usize {
        let mut answered = 0;
        let mut done: Vec<(DiskToken, Buf)> = Vec::new();
        for event in events {
            self.node.handle(self.now, event, &mut self.out);
        }
        loop {
            for effect in self.out.drain() {
                match effect {
                    Effect::Reply { reply, .. } => {
                        assert!(!matches!(reply, Reply::Refused(_)), "{reply:?}");
                        answered += 1;
                    }
                    Effect::Read { offset, len, token, .. } => {
                        let range = offset as usize..offset as usize + len as usize;
                        let bytes = match &self.canned {
                            Some(buf) if buf.len() == len as usize => buf.clone(),
                            _ => Buf::copy_from(&self.disk[range]),
                        };
                        done.push((token, bytes));
                    }
                    Effect::Write { offset, data, token, .. } => {
                        self.writes += 1;
                        if self.canned.is_none() {
                            let bytes = holdfast_base::buf::concat(&data);
                            self.disk[offset as usize..offset as usize + bytes.len()].copy_from_slice(&bytes);
                        }
                        done.push((token, Buf::empty()));
                    }
                    Effect::Flush { token, .. } => done.push((token, Buf::empty())),
                    Effect::Discard { .. }
                    | Effect::Note(_)
                    | Effect::Ask { .. }
                    | Effect::Open { .. }
                    | Effect::Close { .. }
                    | Effect::Tell { .. } => {}
                }
            }
            if done.is_empty() && !self.is_due() {
                return answered;
            }
            self.now = self.now + Duration::from_micros(50);
            for (token, bytes) in std::mem::take(&mut done) {
                self.node.handle(self.now, Event::Disk { token, result: Ok(bytes) }, &mut self.out);
            }
            self.node.handle(self.now, Event::Tick, &mut self.out);
        }
    }

    /// What came in together leaves with a tick.
    fn is_due(&self) -> bool {
        self.node.next_deadline().is_some_and(|due| due <= self.now)
    }
}

fn request(token: u64, request: Request, payload: Buf) -> Event {
    Event::Request { peer: PeerId::here(1), token, beside: Default::default(), request, payload }
}

fn put(counter: u64) -> (Event, ShardId) {
    let shard = ShardId { segment: SegmentId { volume: VOLUME, epoch: Epoch(1), counter }, index: 0 };
    let data = vec![0x33; SHARD_BLOCKS as usize * 4096];
    let block_crcs = block_crcs(&data);
    let geometry = Geometry::new(Layout::Mirror { copies: 2 }, SHARD_BLOCKS);
    let payload_crcs = block_crcs.clone();
    let header = ShardHeader {
        grid: GRID,
        shard,
        geometry,
        block_crcs,
        index: SegmentIndex::Meta,
        payload_crcs,
        sealed: false,
        packed: None,
    };
    let mut bytes = header.encode();
    let header_blocks = (bytes.len() / 4096) as u32;
    bytes.extend_from_slice(&data);
    let put = Request::PutShard { device: DEVICE, volume: VOLUME, epoch: Epoch(1), shard, header_blocks };
    (request(0, put, Buf::copy_from(&bytes)), shard)
}

fn main() {
    let measured = std::env::args().any(|argument| argument == "--bench");
    let rounds: u64 = if measured { 20_000 } else { 20 };
    let (mut bench, shards) = prepared(1, 0);
    print("8 KiB read", measure_reads(&mut bench, &shards, rounds), rounds, 0);
    let writes = bench.writes;
    print("8 KiB append", measure_appends(&mut bench, rounds), rounds, bench.writes - writes);
    measure_reactors(if measured { 7 } else { 1 }, rounds / 2);
}

/// With a ledger and shards.
fn prepared(reactors: u16, reactor: u16) -> (Bench, Vec<ShardId>) {
    let mut bench = Bench::new(reactors, reactor);
    let create = Request::CreateLedger {
        device: DEVICE,
        volume: VOLUME,
        epoch: Epoch(1),
        instance: InstanceId(1),
        ledger: LEDGER,
        legs: Vec::new(),
        rule: AckRule::flat(1),
    };
    assert_eq!(bench.run(vec![request(0, create, Buf::empty())]), 1);
    let shards: Vec<ShardId> = (0..SHARDS)
        .map(|counter| {
            let (event, shard) = put(counter);
            assert_eq!(bench.run(vec![event]), 1);
            shard
        })
        .collect();
    (bench, shards)
}

fn measure_reactors(pairs: usize, rounds: u64) {
    let work = |(mut bench, shards): (Bench, Vec<ShardId>)| {
        measure_reads(&mut bench, &shards, rounds);
        measure_appends(&mut bench, rounds);
    };
    let mut ratios: Vec<f64> = (0..pairs)
        .map(|_| {
            let (first, second) = (prepared(2, 0), prepared(2, 1));
            let start = std::time::Instant::now();
            std::thread::scope(|scope| {
                scope.spawn(|| work(first));
                scope.spawn(|| work(second));
            });
            let on_two = start.elapsed();
            let (first, second) = (prepared(2, 0), prepared(2, 1));
            let start = std::time::Instant::now();
            [first, second].into_iter().for_each(work);
            start.elapsed().as_secs_f64() / on_two.as_secs_f64()
        })
        .collect();
    ratios.sort_by(f64::total_cmp);
    let (least, middle, most) = (ratios[0], ratios[pairs / 2], ratios[pairs - 1]);
    println!(
        "two reactors with a device each: {middle:.2} times as much as one (middle of {pairs}; {least:.2} to {most:.2})"
    );
}

fn measure_reads(bench: &mut Bench, shards: &[ShardId], rounds: u64) -> Duration {
    let read = |round: u64, i: usize| {
        let shard = shards[(round as usize * 7 + i * 13) % shards.len()];
        let block = ((round * 31 + i as u64 * 2) % u64::from(SHARD_BLOCKS - 1)) as u32;
        request(
            i as u64,
            Request::ReadShard { device: DEVICE, shard, block, blocks: 2, checked: true, cached: true },
            Buf::empty(),
        )
    };
    for round in 0..200 {
        bench.run((0..DEPTH).map(|i| read(round, i)).collect());
    }
    bench.canned = Some(Buf::copy_from(&[0x33; 8192]));
    let start = std::time::Instant::now();
    for round in 0..rounds {
        let events = (0..DEPTH).map(|i| read(round, i)).collect();
        assert_eq!(black_box(bench.run(events)), DEPTH);
    }
    bench.canned = None;
    start.elapsed()
}

fn measure_appends(bench: &mut Bench, rounds: u64) -> Duration {
    let payload = BufMut::zeroed(8192).freeze();
    let crcs = block_crcs(&payload);
    let mut lsn = 0;
    let start = std::time::Instant::now();
    for _ in 0..rounds {
        let append = |i: usize| {
            let (lsn, acked) = (Lsn(lsn + 1 + i as u64), Lsn(lsn));
            let (header, crcs) = (vec![7; 12], crcs.clone());
            let (device, volume, epoch, ledger) = (DEVICE, VOLUME, Epoch(1), LEDGER);
            let append = Request::Append { device, volume, epoch, ledger, lsn, acked, header, crcs };
            request(i as u64, append, payload.clone())
        };
        assert_eq!(black_box(bench.run((0..DEPTH).map(append).collect())), DEPTH);
        lsn += DEPTH as u64;
        if lsn.is_multiple_of(64) {
            let (volume, epoch, upto) = (VOLUME, Epoch(1), Lsn(lsn - 32));
            let trim = Request::TrimLedger { device: DEVICE, volume, epoch, ledger: LEDGER, upto };
            bench.run(vec![request(0, trim, Buf::empty())]);
        }
    }
    start.elapsed()
}

fn print(what: &str, took: Duration, rounds: u64, writes: u64) {
    let count = rounds * DEPTH as u64;
    let each = took.as_secs_f64() * 1e6 / count as f64;
    println!("{what}: {each:.2} us each, {:.2} writes each", writes as f64 / count as f64);
}
