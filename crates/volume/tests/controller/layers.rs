//! Maps with snapshots, clones, rollbacks and changes of size, against arrays: whatever is done, in any order, with owners
//! that crash in between, every head and every snapshot reads as its array says, and space comes back.

use crate::support::*;
use holdfast_base::{BLOCK_BYTES, BlockData, BlockOp, Buf, ByteRange, HeadId, ObjectId, Prng, VolumeId};
use holdfast_format::geometry::Layout;
use holdfast_format::segment::{SegmentIndex, ShardHeader};
use holdfast_volume::{Change, Event, Notice, Shares, Target};
use std::collections::BTreeMap;
use std::time::Duration;

const BLOCK: u64 = BLOCK_BYTES as u64;

/// Blocks of the volume at first: leaves of the map are 512 long, so that it has several, and one that is cut short.
const BLOCKS: u64 = 1400;

/// What each block was written with last; zero for zeroes.
type Array = Vec<u32>;

#[derive(Clone, Debug)]
struct Frozen {
    head: HeadId,
    name: String,
    array: Array,
}

/// The naive map, beside the real one.
struct Model {
    world: World,
    prng: Prng,
    heads: BTreeMap<HeadId, Array>,
    snapshots: BTreeMap<ObjectId, Frozen>,
    next: u32,
    /// Something was deleted.
    dropped: bool,
}

impl Model {
    fn new(seed: u64) -> Model {
        let layout =
            if seed.is_multiple_of(2) { Layout::Mirror { copies: 2 } } else { Layout::Parity { data: 2, parity: 1 } };
        let mut world = World::new(seed, 3, layout, BLOCKS * BLOCK);
        // The cleaner moves what snapshots hold.
        world.clean_dead_per_mille = 100;
        world.open();
        Model {
            world,
            prng: Prng::new(seed),
            heads: BTreeMap::from([(HeadId::VOLUME, vec![0; BLOCKS as usize])]),
            snapshots: BTreeMap::new(),
            next: 1,
            dropped: false,
        }
    }

    fn any_head(&mut self) -> HeadId {
        let heads: Vec<HeadId> = self.heads.keys().copied().collect();
        *self.prng.pick(&heads)
    }

    fn any_snapshot(&mut self) -> Option<ObjectId> {
        let layers: Vec<ObjectId> = self.snapshots.keys().copied().collect();
        (!layers.is_empty()).then(|| *self.prng.pick(&layers))
    }

    fn fresh(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    /// A range of blocks of an array of this length; now and then a long one.
    fn draw(&mut self, blocks: u64) -> (u64, u64) {
        let len_max = if self.prng.chance(200) { blocks } else { 40.min(blocks) };
        let len = self.prng.between(1, len_max);
        (self.prng.below(blocks - len + 1), len)
    }

    fn write(&mut self) {
        let head = self.any_head();
        let blocks = self.heads[&head].len() as u64;
        let (first, len) = self.draw(blocks);
        let value = self.fresh();
        let len = len.min(if self.prng.chance(200) { 120 } else { 8 });
        let data = Buf::copy_from(&bytes_of(&vec![value; len as usize]));
        self.do_to(head, BlockOp::Write { offset: first * BLOCK, data });
        self.heads.get_mut(&head).expect("a head")[first as usize..(first + len) as usize].fill(value);
    }

    fn discard(&mut self) {
        let head = self.any_head();
        let blocks = self.heads[&head].len() as u64;
        let (first, len) = self.draw(blocks);
        self.do_to(head, BlockOp::Discard(ByteRange::new(first * BLOCK, len * BLOCK)));
        self.heads.get_mut(&head).expect("a head")[first as usize..(first + len) as usize].fill(0);
    }

    fn do_to(&mut self, head: HeadId, op: BlockOp) {
        let token = self.world.request_to(Target::Head(head), op);
        self.world.wait(token);
    }

    fn change(&mut self, change: Change) -> Option<Target> {
        let shown = format!("{change:?}");
        self.world.change(change).unwrap_or_else(|why| panic!("{shown} is refused: {why}"))
    }

    fn snapshot(&mut self) {
        let head = self.any_head();
        let name = format!("s{}", self.fresh());
        let made = self.change(Change::Snapshot { head, name: name.clone(), created_ms: 0 });
        let Some(Target::Snapshot(layer)) = made else { panic!("{made:?} is no snapshot") };
        let array = self.heads[&head].clone();
        assert!(self.snapshots.insert(layer, Frozen { head, name, array }).is_none(), "{layer:?} was there before");
    }

    fn drop_snapshot(&mut self) {
        let Some(layer) = self.any_snapshot() else { return };
        let Frozen { head, name, .. } = self.snapshots.remove(&layer).expect("just picked");
        self.change(Change::DropSnapshot { head, name });
    }

    fn clone_snapshot(&mut self) {
        let Some(of) = self.any_snapshot() else { return };
        let mut array = self.snapshots[&of].array.clone();
        let more = if self.prng.chance(300) { self.prng.below(1000) } else { 0 };
        array.resize(array.len() + more as usize, 0);
        let id = VolumeId(u128::from(self.fresh()));
        let made =
            self.change(Change::Clone { of, id, name: "clone".to_string(), size_bytes: array.len() as u64 * BLOCK });
        let Some(Target::Head(head)) = made else { panic!("{made:?} is no clone") };
        assert!(self.heads.insert(head, array).is_none(), "{head:?} was there before");
    }

    fn drop_clone(&mut self) {
        let head = self.any_head();
        if head != HeadId::VOLUME {
            self.change(Change::DropClone { head });
            self.heads.remove(&head);
            self.snapshots.retain(|_, frozen| frozen.head != head);
        }
    }

    fn resize(&mut self) {
        let head = self.any_head();
        let blocks = self.prng.between(200, 2000);
        self.resize_to(head, blocks);
    }

    fn resize_to(&mut self, head: HeadId, blocks: u64) {
        let size_bytes = blocks * BLOCK;
        if head == HeadId::VOLUME {
            self.world.push(Event::Resize { size_bytes });
            self.world.run_until(|w| w.controller.size_bytes() == Some(size_bytes));
        } else {
            self.change(Change::ResizeClone { head, size_bytes });
        }
        self.heads.get_mut(&head).expect("a head").resize(blocks as usize, 0);
    }

    fn roll_back(&mut self) {
        let Some(to) = self.any_snapshot() else { return };
        let Frozen { head, name, array } = self.snapshots[&to].clone();
        if self.heads[&head].len() < array.len() {
            self.resize_to(head, array.len() as u64);
        }
        let size = self.heads[&head].len();
        self.change(Change::Rollback { head, name });
        let mut array = array;
        array.resize(size, 0);
        self.heads.insert(head, array);
    }

    fn check(&mut self) {
        let heads = self.heads.iter().map(|(head, array)| (Target::Head(*head), array.clone()));
        let snapshots = self.snapshots.iter().map(|(layer, frozen)| (Target::Snapshot(*layer), frozen.array.clone()));
        for (target, array) in heads.chain(snapshots).collect::<Vec<_>>() {
            let blocks = array.len() as u64;
            let (first, len) = if self.prng.chance(200) { (0, blocks) } else { self.draw(blocks) };
            let read = self.world.read_of(target, first * BLOCK, len * BLOCK);
            let wanted = &array[first as usize..(first + len) as usize];
            let seen: Vec<u32> = read.chunks_exact(BLOCK_BYTES).map(value_of).collect();
            assert_eq!(seen, wanted, "{target:?}, blocks from {first} on");
        }
    }

    /// What is told of sharing, once it was counted, is what counting in the arrays gives.
    fn check_shares(&mut self) {
        // A round, a rest of at most ten minutes, and another.
        self.world.span(Duration::from_secs(700));
        let sharing = self.world.controller.status().sharing.expect("counted");
        let heads = self.heads.iter().map(|(head, array)| (Target::Head(*head), array));
        let snapshots = self.snapshots.iter().map(|(layer, frozen)| (Target::Snapshot(*layer), &frozen.array));
        let all: Vec<(Target, &Array)> = heads.chain(snapshots).collect();
        let is_data = |array: &Array, block: usize| array[block] != 0;
        for (target, array) in &all {
            // No two writes have the same value.
            let sees = |other: &Array, block: usize| other.get(block) == Some(&array[block]);
            let alone = |block: usize| !all.iter().any(|(of, other)| of != target && sees(other, block));
            let data: Vec<usize> = (0..array.len()).filter(|block| is_data(array, *block)).collect();
            let exclusive = data.iter().filter(|block| alone(**block)).count();
            let expected =
                Shares { referenced_bytes: data.len() as u64 * BLOCK, exclusive_bytes: exclusive as u64 * BLOCK };
            let told = match target {
                Target::Head(head) => sharing.heads[head],
                Target::Snapshot(layer) => sharing.snapshots[layer],
            };
            assert_eq!(told, expected, "{target:?}");
        }
        let of_heads = |block: usize, value: u32| self.heads.values().any(|array| array.get(block) == Some(&value));
        let mut held: Vec<(usize, u32)> = Vec::new();
        for frozen in self.snapshots.values() {
            let data = (0..frozen.array.len()).filter(|block| is_data(&frozen.array, *block));
            held.extend(
                data.map(|block| (block, frozen.array[block])).filter(|(block, value)| !of_heads(*block, *value)),
            );
        }
        held.sort_unstable();
        held.dedup();
        let (told, held) = (sharing.held_by_snapshots_bytes, held.len() as u64 * BLOCK);
        // A state that others branch off keeps what nobody sees of it.
        let is_right = if self.dropped { told >= held } else { told == held };
        assert!(is_right, "held by snapshots alone: {told} instead of {held}");
    }

    /// Blocks of a state that may differ from what a snapshot holds.
    fn changes(&mut self, target: Target, since: ObjectId, first: u64, blocks: u64) -> Vec<u64> {
        let range = ByteRange::new(first * BLOCK, blocks * BLOCK);
        let token = self.world.request_to(target, BlockOp::Changes { range, since });
        let answer = self.world.answer(token, Duration::from_secs(10)).1.expect("answered").expect("done");
        let BlockData::Status(extents) = answer else { panic!("{answer:?} is no status") };
        let each = extents.iter().flat_map(|extent| (0..extent.len / BLOCK).map(|_| extent.set));
        let set: Vec<bool> = each.collect();
        assert_eq!(set.len() as u64, blocks, "every block is told of once");
        (first..).zip(set).filter_map(|(block, is_set)| is_set.then_some(block)).collect()
    }

    /// What is not told as changed is the same, of any two states.
    fn check_changes(&mut self) {
        let Some(since) = self.any_snapshot() else { return };
        let then = self.snapshots[&since].array.clone();
        let (target, now) = match self.any_snapshot() {
            Some(layer) if self.prng.chance(500) => (Target::Snapshot(layer), self.snapshots[&layer].array.clone()),
            _ => {
                let head = self.any_head();
                (Target::Head(head), self.heads[&head].clone())
            }
        };
        let changed = self.changes(target, since, 0, now.len() as u64);
        let is_same = |block: &usize| now[*block] == then.get(*block).copied().unwrap_or(0);
        let told = |block: &usize| changed.binary_search(&(*block as u64)).is_ok();
        let untold = (0..now.len()).find(|block| !is_same(block) && !told(block));
        assert_eq!(untold, None, "{target:?} since {since:?}: a change is not told");
    }

    fn step(&mut self) {
        match self.prng.below(100) {
            0..45 => self.write(),
            45..53 => self.discard(),
            53..62 => self.snapshot(),
            62..68 => self.drop_snapshot(),
            68..74 => self.clone_snapshot(),
            74..77 => self.drop_clone(),
            77..80 => self.roll_back(),
            80..83 => self.resize(),
            83..86 => self.world.open(),
            _ => {
                let ms = *self.prng.pick(&[1, 100, 1000, 8000]);
                self.world.span(Duration::from_millis(ms));
            }
        }
    }

    /// Everything is let go of: nothing is left of it.
    fn empty(mut self) {
        for head in self.heads.keys().copied().filter(|head| *head != HeadId::VOLUME).collect::<Vec<_>>() {
            self.change(Change::DropClone { head });
            self.snapshots.retain(|_, frozen| frozen.head != head);
        }
        for Frozen { head, name, .. } in std::mem::take(&mut self.snapshots).into_values() {
            self.change(Change::DropSnapshot { head, name });
        }
        let blocks = self.heads[&HeadId::VOLUME].len() as u64;
        self.do_to(HeadId::VOLUME, BlockOp::Discard(ByteRange::new(0, blocks * BLOCK)));
        self.world.run_until(|w| w.controller.status().mapped_blocks == 0);
        self.world.span(Duration::from_secs(20));
        let is_data = |(shard, (header_blocks, bytes)): (&holdfast_base::ShardId, &(u32, Buf))| {
            let header = ShardHeader::decode(*shard, &bytes[..*header_blocks as usize * BLOCK_BYTES]).unwrap();
            matches!(header.index, SegmentIndex::Data(_))
        };
        for node in &self.world.nodes {
            assert_eq!(node.shards.iter().filter(|shard| is_data(*shard)).count(), 0, "data is left on {:?}", node.id);
        }
        let status = self.world.controller.status();
        assert_eq!((status.snapshots, status.clones), (vec![], vec![]));
    }
}

/// A block holds its value all over.
fn bytes_of(values: &[u32]) -> Vec<u8> {
    values.iter().map(|value| value.to_le_bytes().repeat(BLOCK_BYTES / 4)).collect::<Vec<_>>().concat()
}

fn value_of(block: &[u8]) -> u32 {
    let value = u32::from_le_bytes(block[..4].try_into().unwrap());
    assert!(block.chunks_exact(4).all(|word| word == value.to_le_bytes()), "a block is torn");
    value
}

#[test]
fn maps_with_layers_read_like_arrays() {
    for seed in 0..60 {
        let mut model = Model::new(seed);
        for _ in 0..250 {
            model.step();
            if model.prng.chance(150) {
                model.check();
                model.check_changes();
            }
        }
        model.world.open();
        model.check();
        model.empty();
    }
}

#[test]
fn sharing_is_told_as_it_is() {
    for seed in 0..12 {
        let mut model = Model::new(seed);
        for round in 0..3 {
            for _ in 0..60 {
                let below = if round == 0 { 88 } else { 100 };
                model.dropped |= round > 0;
                match model.prng.below(below) {
                    0..55 => model.write(),
                    55..62 => model.discard(),
                    62..74 => model.snapshot(),
                    74..79 => model.clone_snapshot(),
                    79..88 => model.world.span(Duration::from_secs(2)),
                    88..94 => model.drop_snapshot(),
                    94..97 => model.drop_clone(),
                    _ => model.roll_back(),
                }
            }
            if round == 1 {
                model.world.open();
            }
            model.check_shares();
        }
        assert!(model.world.controller.status().counters.audits > 0);
        model.empty();
    }
}

#[test]
fn the_audit_finds_what_is_miscounted_and_puts_it_right() {
    let layout = Layout::Mirror { copies: 2 };
    let mut world = World::new(3, 3, layout, BLOCKS * BLOCK);
    (world.clean_dead_per_mille, world.miscounts) = (1000, true);
    let mut config = config(1, 1);
    config.mutations.fold_keeps_old_counts = true;
    world.config = Some(config);
    world.open();
    for _ in 0..3 {
        world.write_all(0, BLOCKS * BLOCK);
        world.span(Duration::from_secs(20));
    }
    let space = |world: &World| world.controller.status().space;
    assert!(space(&world).data_bytes > BLOCKS * BLOCK, "what was overwritten counts as data: {:?}", space(&world));
    world.span(Duration::from_secs(1300));
    assert!(world.notices.iter().any(|n| matches!(n, Notice::Miscounted { .. })), "{:?}", world.notices);
    assert_eq!(space(&world).data_bytes, BLOCKS * BLOCK);
}

#[test]
fn clones_of_clones_read_through_a_hundred_generations() {
    let mut model = Model::new(1);
    let mut head = HeadId::VOLUME;
    for generation in 0..100 {
        let at = generation * 13;
        model.do_to(head, BlockOp::Write { offset: at * BLOCK, data: Buf::copy_from(&bytes_of(&[at as u32 + 1; 3])) });
        model.heads.get_mut(&head).unwrap()[at as usize..at as usize + 3].fill(at as u32 + 1);
        let name = "base".to_string();
        let made = model.change(Change::Snapshot { head, name: name.clone(), created_ms: 0 });
        let Some(Target::Snapshot(of)) = made else { panic!("{made:?} is no snapshot") };
        let array = model.heads[&head].clone();
        let id = VolumeId(u128::from(generation) + 100);
        let made = model.change(Change::Clone { of, id, name: "clone".to_string(), size_bytes: BLOCKS * BLOCK });
        model.snapshots.insert(of, Frozen { head, name, array: array.clone() });
        let Some(Target::Head(clone)) = made else { panic!("{made:?} is no clone") };
        model.heads.insert(clone, array);
        head = clone;
    }
    model.check();
    model.world.span(Duration::from_secs(30));
    model.world.open();
    model.check();
    model.empty();
}

#[test]
fn changes_are_what_was_written_between_and_no_more() {
    let mut model = Model::new(4);
    let head = HeadId::VOLUME;
    let take = |model: &mut Model, name: &str| {
        let made = model.change(Change::Snapshot { head, name: name.to_string(), created_ms: 0 });
        let Some(Target::Snapshot(layer)) = made else { panic!("{made:?} is no snapshot") };
        layer
    };
    let write = |model: &mut Model, at: u64, count: usize| {
        model.do_to(head, BlockOp::Write { offset: at * BLOCK, data: Buf::copy_from(&bytes_of(&vec![7; count])) });
    };
    write(&mut model, 0, 600);
    let a = take(&mut model, "a");
    write(&mut model, 510, 4);
    model.do_to(head, BlockOp::Discard(ByteRange::new(20 * BLOCK, 2 * BLOCK)));
    let b = take(&mut model, "b");
    write(&mut model, 1000, 1);
    let c = take(&mut model, "c");
    write(&mut model, 511, 1);
    let (of_b, of_c) = (vec![20, 21, 510, 511, 512, 513], vec![20, 21, 510, 511, 512, 513, 1000]);
    let check = |model: &mut Model, b: Option<ObjectId>| {
        for (target, since, expected) in [
            (b.map(Target::Snapshot), Some(a), &of_b),
            // Backwards it is the same.
            (Some(Target::Snapshot(a)), b, &of_b),
            (Some(Target::Snapshot(c)), Some(a), &of_c),
            (Some(Target::VOLUME), b, &vec![511, 1000]),
            (Some(Target::VOLUME), Some(c), &vec![511]),
            (Some(Target::VOLUME), Some(a), &of_c),
            (Some(Target::Snapshot(c)), Some(c), &vec![]),
        ] {
            let (Some(target), Some(since)) = (target, since) else { continue };
            assert_eq!(&model.changes(target, since, 0, BLOCKS), expected, "{target:?} since {since:?}");
        }
    };
    check(&mut model, Some(b));
    model.world.span(Duration::from_secs(30));
    model.world.open();
    check(&mut model, Some(b));
    // What lies between is merged, and told of all the same.
    model.change(Change::DropSnapshot { head, name: "b".to_string() });
    check(&mut model, None);
    model.world.span(Duration::from_secs(30));
    check(&mut model, None);
    assert_eq!(model.world.controller.status().layers_going, 0, "merged by now");
    // From another branch: what either has written.
    model.change(Change::Rollback { head, name: "a".to_string() });
    write(&mut model, 5, 1);
    let expected: Vec<u64> = [5].into_iter().chain(of_c.iter().copied()).collect();
    assert_eq!(model.changes(Target::VOLUME, c, 0, BLOCKS), expected);
    assert_eq!(model.changes(Target::VOLUME, a, 0, BLOCKS), [5]);
    assert_eq!(model.changes(Target::VOLUME, c, 15, 500), [20, 21, 510, 511, 512, 513]);
}

#[test]
fn what_can_not_be_done_is_refused_with_a_reason() {
    let mut model = Model::new(2);
    let head = HeadId::VOLUME;
    let name = || "one".to_string();
    let refused = |model: &mut Model, change: Change| model.world.change(change).expect_err("it can't be done");
    let made = model.change(Change::Snapshot { head, name: name(), created_ms: 0 });
    let Some(Target::Snapshot(of)) = made else { panic!("{made:?} is no snapshot") };
    let why = refused(&mut model, Change::Snapshot { head, name: name(), created_ms: 0 });
    assert!(why.contains("of that name"), "{why}");
    let why = refused(&mut model, Change::Clone { of, id: VolumeId(5), name: name(), size_bytes: BLOCK });
    assert!(why.contains("at least as large"), "{why}");
    let why = refused(&mut model, Change::DropClone { head });
    assert!(why.contains("not there"), "{why}");
    let why = refused(&mut model, Change::Rollback { head, name: "two".to_string() });
    assert!(why.contains("no snapshot"), "{why}");
    model.resize_to(head, 100);
    let why = refused(&mut model, Change::Rollback { head, name: name() });
    assert!(why.contains("resize it"), "{why}");
    // Nobody has read the outcome of this write yet.
    let write = model.world.request(BlockOp::Write { offset: 1, data: Buf::copy_from(&[1]) });
    model.world.wait(write);
    let clone = model.change(Change::Clone { of, id: VolumeId(5), name: name(), size_bytes: BLOCKS * BLOCK });
    let why = refused(&mut model, Change::Clone { of, id: VolumeId(5), name: name(), size_bytes: BLOCKS * BLOCK });
    assert!(why.contains("is there"), "{why}");
    // What is asked of a clone that is gone is answered.
    let Some(Target::Head(clone)) = clone else { panic!("{clone:?} is no clone") };
    model.change(Change::DropClone { head: clone });
    let read = model.world.request_to(Target::Head(clone), BlockOp::Read(ByteRange::new(0, BLOCK)));
    let answer = model.world.answer(read, Duration::from_secs(1)).1.expect("answered");
    assert_eq!(answer.unwrap_err(), holdfast_base::BlockError::Unavailable);
}
