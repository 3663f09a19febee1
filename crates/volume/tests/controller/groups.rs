//! Groups of snapshots over two volumes, each with a controller and nodes of its own, whose answers take time, as do the
//! messages between the group and the controllers: as on two reactors of a host. Guests write in chains: each write is
//! issued, to either volume, when the one before it is answered, or when it is read. What the two snapshots hold together
//! must be a beginning of every chain.

use crate::support::*;
use holdfast_base::{
    BLOCK_BYTES, BlockData, BlockOp, Buf, ByteRange, Effects, HeadId, Instant, ObjectId, Prng, QuiesceId, buf,
};
use holdfast_format::geometry::Layout;
use holdfast_volume::quiesce::QUIESCE_MAX;
use holdfast_volume::{Change, Event, Group, GroupEffect, GroupEnd, GroupEvent, GroupMember, Notice, Target, Why};
use std::collections::BTreeMap;
use std::time::Duration;

const BLOCK: u64 = BLOCK_BYTES as u64;

/// Blocks of a slot: each write has one to itself, and some fill it, which makes them bulk writes.
const SLOT_BLOCKS: u64 = 20;
const CHAINS: usize = 3;
const WRITES_MAX: u64 = 60;
const SIZE: u64 = CHAINS as u64 * WRITES_MAX * SLOT_BLOCKS * BLOCK;

const NAME: &str = "monday";

enum Message {
    Tell(usize, Event),
    Heard(usize, Notice),
}

#[derive(Default)]
struct Chain {
    /// To which volume each write went.
    went: Vec<usize>,
    waits_for: Option<(usize, u64)>,
    /// A read of what was written last.
    look: Option<u64>,
    not_before: Option<Instant>,
}

/// When a chain's next write is issued.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Follows {
    /// After the answer to the one before it.
    Answers,
    /// After that was read: what was not answered may be seen.
    Reads,
}

/// What a group holds back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Holds {
    Nothing,
    Writes,
    All,
}

/// What goes wrong in a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Trouble {
    None,
    /// A message takes long, mostly longer than a quiesce lasts, and the group's own timer is late, too.
    Lag,
    /// The second volume has a snapshot of the name.
    NameTaken,
    Close,
}

struct Run {
    worlds: [World; 2],
    now: Instant,
    prng: Prng,
    messages: BTreeMap<(Instant, u64), Message>,
    /// Of messages to each volume, and from it: they stay in order.
    last_due: [[Instant; 2]; 2],
    sent: u64,
    /// The message, by number, that takes long.
    lagging: Option<u64>,
    timer_late: Duration,
    chains: Vec<Chain>,
    follows: Follows,
    group: Group,
    begins_at: Option<Instant>,
    end: Option<GroupEnd>,
}

fn offset_of(chain: usize, k: u64) -> u64 {
    (chain as u64 * WRITES_MAX + k) * SLOT_BLOCKS * BLOCK
}

impl Run {
    fn new(seed: u64, trouble: Trouble, holds: Holds, follows: Follows) -> Run {
        let world = |number: u64| {
            let mut world = World::new(seed * 2 + number, 3, Layout::Mirror { copies: 2 }, SIZE);
            let mut bounds = config(0, 0);
            bounds.mutations.quiesce_tells = holds == Holds::Nothing;
            bounds.writeback_bytes_max = 8 << 20;
            world.config = Some(bounds);
            world.open();
            world.settle(Duration::from_millis(10));
            world
        };
        let mut worlds = [world(0), world(1)];
        if trouble == Trouble::NameTaken {
            let change = Change::Snapshot { head: HeadId::VOLUME, name: NAME.to_string(), created_ms: 1 };
            worlds[1].change(change).expect("a snapshot");
        }
        let mut prng = Prng::new(seed ^ 0x6709);
        worlds.iter_mut().for_each(|world| {
            world.slow = Some(prng.fork());
            world.notices.clear();
        });
        let now = worlds[0].now.max(worlds[1].now);
        let member = |controller| GroupMember { controller, head: HeadId::VOLUME, name: NAME.to_string() };
        let is_lagging = trouble == Trouble::Lag;
        let group = Group::new(QuiesceId(1), vec![member(0), member(1)], 2);
        Run {
            worlds,
            now,
            messages: BTreeMap::new(),
            last_due: [[now; 2]; 2],
            sent: 0,
            lagging: is_lagging.then(|| prng.below(12)),
            timer_late: if is_lagging { Duration::from_secs(prng.below(6)) } else { Duration::ZERO },
            chains: (0..CHAINS).map(|_| Chain::default()).collect(),
            follows,
            group: if holds == Holds::All { group.with_reads() } else { group },
            begins_at: Some(now + Duration::from_micros(prng.below(20_000))),
            end: None,
            prng,
        }
    }

    fn send(&mut self, direction: usize, volume: usize, message: Message) {
        let mut delay = Duration::from_micros(self.prng.between(10, 3_000));
        if self.lagging == Some(self.sent) {
            delay = Duration::from_millis(self.prng.between(500, 4_000));
        }
        let last = &mut self.last_due[direction][volume];
        *last = (*last).max(self.now + delay);
        self.messages.insert((*last, self.sent), message);
        self.sent += 1;
    }

    fn drive_group(&mut self, event: GroupEvent) {
        let mut out = Effects::new();
        self.group.handle(self.now, event, &mut out);
        for effect in out.take() {
            match effect {
                GroupEffect::Tell { controller, event } => self.send(0, controller, Message::Tell(controller, event)),
                GroupEffect::Over(end) => assert!(self.end.replace(end).is_none(), "told once"),
            }
        }
    }

    fn group_at(&self) -> Option<Instant> {
        self.begins_at.or(self.group.next_deadline().map(|deadline| deadline + self.timer_late))
    }

    /// Lets the next thing happen.
    fn step(&mut self) {
        let message_at = self.messages.first_key_value().map(|((at, _), _)| *at);
        let thinking = self.chains.iter().filter_map(|chain| chain.not_before);
        let all = self.worlds.iter().map(World::next_at).chain(message_at).chain(self.group_at()).chain(thinking);
        self.now = all.min().expect("a controller has a deadline").max(self.now);
        let now = self.now;
        self.worlds.iter_mut().for_each(|world| world.step_to(now));
        if self.group_at().is_some_and(|at| at <= now) {
            let event = if self.begins_at.take().is_some() { GroupEvent::Begin } else { GroupEvent::Tick };
            self.drive_group(event);
        }
        while let Some(first) = self.messages.first_entry().filter(|first| first.key().0 <= now) {
            match first.remove() {
                Message::Tell(volume, event) => self.worlds[volume].push(event),
                Message::Heard(controller, notice) => {
                    self.drive_group(GroupEvent::Notice { controller, notice });
                }
            }
        }
        for volume in 0..2 {
            for notice in std::mem::take(&mut self.worlds[volume].notices) {
                self.send(1, volume, Message::Heard(volume, notice));
            }
        }
        (0..CHAINS).for_each(|chain| self.go_on(chain));
    }

    /// Whether the chain's last write was answered, or read.
    fn is_seen(&mut self, number: usize, volume: usize, token: u64) -> bool {
        let (world, chain) = (&mut self.worlds[volume], &mut self.chains[number]);
        if self.follows == Follows::Answers {
            return world.replies.remove(&token).is_some();
        }
        let k = chain.went.len() as u64 - 1;
        if let Some(look) = chain.look {
            match world.replies.remove(&look) {
                None => return false,
                Some(Ok(BlockData::Data(parts))) if buf::concat(&parts)[600] == k as u8 + 1 => {
                    chain.look = None;
                    return true;
                }
                Some(_) => {}
            }
        }
        chain.look = Some(world.request(BlockOp::Read(ByteRange::new(offset_of(number, k), BLOCK))));
        false
    }

    /// The chain's next write, once the one before it is seen.
    fn go_on(&mut self, number: usize) {
        if let Some((volume, token)) = self.chains[number].waits_for {
            if !self.is_seen(number, volume, token) {
                return;
            }
            self.chains[number].waits_for = None;
            let pause = if self.prng.chance(300) { self.prng.below(500) } else { 0 };
            self.chains[number].not_before = Some(self.now + Duration::from_micros(pause));
        }
        let chain = &mut self.chains[number];
        let k = chain.went.len() as u64;
        if chain.not_before.is_some_and(|at| at > self.now) {
            return;
        }
        chain.not_before = None;
        if k == WRITES_MAX {
            return;
        }
        let volume = self.prng.below(2) as usize;
        let (from, len) = match self.prng.below(10) {
            0..2 => (0, SLOT_BLOCKS * BLOCK),
            2..4 => (512, 512),
            _ => (0, BLOCK),
        };
        let data = Buf::copy_from(&vec![k as u8 + 1; len as usize]);
        let token = self.worlds[volume].request(BlockOp::Write { offset: offset_of(number, k) + from, data });
        chain.went.push(volume);
        chain.waits_for = Some((volume, token));
    }

    fn snapshots(&self, volume: usize) -> Vec<ObjectId> {
        let named = self.worlds[volume].controller.snapshots().filter(|(_, s)| s.name == NAME);
        named.map(|(layer, _)| layer).collect()
    }

    /// How many writes of each chain the group holds; an error where that is no beginning of it.
    fn check_taken(&mut self) -> Result<Vec<usize>, String> {
        let layers: Vec<ObjectId> = (0..2).flat_map(|volume| self.snapshots(volume)).collect();
        assert_eq!(layers.len(), 2, "both are there");
        let mut counts = Vec::new();
        for number in 0..CHAINS {
            let went = std::mem::take(&mut self.chains[number].went);
            let mut held = Vec::new();
            for (k, volume) in went.into_iter().enumerate() {
                let at = offset_of(number, k as u64);
                let block = self.worlds[volume].read_of(Target::Snapshot(layers[volume]), at, BLOCK);
                assert!(block[600] == 0 || block[600] == k as u8 + 1, "nothing else was written there");
                held.push(block[600] != 0);
            }
            let count = held.iter().take_while(|held| **held).count();
            if held[count..].contains(&true) {
                return Err(format!("of chain {number} the group holds {held:?}"));
            }
            counts.push(count);
        }
        Ok(counts)
    }
}

/// How many writes the group holds; `None` where it failed, as it may.
fn run(seed: u64, trouble: Trouble, holds: Holds, follows: Follows) -> Result<Option<usize>, String> {
    let mut run = Run::new(seed, trouble, holds, follows);
    let close_at = run.now + Duration::from_micros(run.prng.below(40_000));
    let mut closed = trouble != Trouble::Close;
    while !run.group.is_over() {
        if !closed && run.now >= close_at {
            closed = true;
            run.worlds[1].push(Event::Close);
        }
        run.step();
    }
    for _ in 0..50 {
        run.step();
    }
    let end = run.end.clone().expect("a group that is over told its end");
    run.worlds.iter_mut().for_each(World::end_slow);
    if trouble == Trouble::Close {
        // What the group holds is there for the next owner.
        run.worlds[1].open();
    }
    match end {
        GroupEnd::Taken => run.check_taken().map(|counts| Some(counts.into_iter().sum())),
        GroupEnd::Failed { member, why, left } => {
            assert!(run.snapshots(0).is_empty(), "seed {seed}: nothing is taken");
            assert!(trouble != Trouble::None, "seed {seed}: member {member} failed for no reason: {why}");
            let there = run.snapshots(1).len();
            match trouble {
                Trouble::NameTaken => {
                    assert_eq!((member, why, there), (1, Why::Refused("the volume has a snapshot of that name"), 1));
                }
                Trouble::Close => assert!(left.contains(&1) || there == 0, "seed {seed}: it is named: {left:?}"),
                _ => assert_eq!((there, left), (0, Vec::new()), "seed {seed}"),
            }
            Ok(None)
        }
    }
}

fn outcomes(seeds: std::ops::Range<u64>, trouble: Trouble) -> Vec<Option<usize>> {
    outcomes_of(seeds, trouble, Holds::Writes, Follows::Answers)
}

fn outcomes_of(seeds: std::ops::Range<u64>, trouble: Trouble, holds: Holds, follows: Follows) -> Vec<Option<usize>> {
    let fails = |seed, why| panic!("seed {seed}, {trouble:?}, {holds:?}, {follows:?}: {why}");
    seeds.map(|seed| run(seed, trouble, holds, follows).unwrap_or_else(|why| fails(seed, why))).collect()
}

fn quiesce_ends(world: &World) -> Vec<bool> {
    let end = |notice: &Notice| match notice {
        Notice::QuiesceEnded { whole, .. } => Some(*whole),
        _ => None,
    };
    world.notices.iter().filter_map(end).collect()
}

#[test]
fn a_hold_keeps_answers_of_writes_and_nothing_else() {
    let mut world = World::new(1, 3, Layout::Mirror { copies: 2 }, SIZE);
    world.push(Event::Quiesce { quiesce: QuiesceId(1), with_reads: false });
    let write = |world: &mut World| world.request(BlockOp::Write { offset: 0, data: Buf::copy_from(&[7; 4096]) });
    let held = write(&mut world);
    let flush = world.request(BlockOp::Flush);
    let beyond = world.request(BlockOp::Discard(ByteRange::new(SIZE, BLOCK)));
    world.settle(Duration::from_millis(100));
    assert_eq!(world.read(0, BLOCK), [7; 4096], "the write is done");
    assert!(world.replies.contains_key(&flush) && world.replies.contains_key(&beyond));
    assert!(!world.replies.contains_key(&held));
    world.push(Event::Quiesce { quiesce: QuiesceId(2), with_reads: false });
    assert_eq!(quiesce_ends(&world), [false], "one quiesce at a time");
    world.push(Event::Release { quiesce: QuiesceId(1) });
    assert_eq!(quiesce_ends(&world), [false, true]);
    world.wait(held);
    // Its host has forgotten it.
    world.push(Event::Quiesce { quiesce: QuiesceId(3), with_reads: false });
    let held = write(&mut world);
    world.settle(QUIESCE_MAX / 2);
    assert!(!world.replies.contains_key(&held));
    world.settle(QUIESCE_MAX / 2);
    assert_eq!(quiesce_ends(&world), [false, true, false]);
    world.wait(held);
    world.push(Event::Release { quiesce: QuiesceId(3) });
    assert_eq!(quiesce_ends(&world).len(), 3, "the end is told once");
}

#[test]
fn a_hold_of_an_owner_that_may_have_a_successor_is_not_whole() {
    for comes_back in [true, false] {
        let mut world = World::new(2, 3, Layout::Mirror { copies: 2 }, SIZE);
        world.push(Event::Quiesce { quiesce: QuiesceId(1), with_reads: false });
        (0..3).for_each(|i| world.node_hangs(i));
        // Grants have run out.
        world.settle(QUIESCE_MAX * 3 / 7);
        world.push(Event::Release { quiesce: QuiesceId(1) });
        world.settle(QUIESCE_MAX * 3 / 7);
        assert_eq!(quiesce_ends(&world), [false; 0]);
        if comes_back {
            (0..3).for_each(|i| world.node_resumes(i));
        }
        world.settle(QUIESCE_MAX);
        assert_eq!(quiesce_ends(&world), [comes_back]);
    }
}

#[test]
fn a_group_holds_a_beginning_of_every_chain_of_writes() {
    let counts = outcomes(0..60, Trouble::None);
    assert!(counts.iter().all(Option::is_some));
    assert!(counts.iter().filter(|count| **count > Some(9)).count() > 20, "it is taken in the midst: {counts:?}");
}

#[test]
fn where_reads_are_held_back_too_it_holds_a_beginning_of_what_was_read() {
    let counts = outcomes_of(0..60, Trouble::None, Holds::All, Follows::Reads);
    assert!(counts.iter().filter(|count| **count > Some(9)).count() > 20, "it is taken in the midst: {counts:?}");
    let counts = outcomes_of(1000..1100, Trouble::Lag, Holds::All, Follows::Reads);
    let taken = counts.iter().flatten().count();
    assert!((1..counts.len()).contains(&taken), "both happens: {counts:?}");
}

#[test]
fn a_group_whose_holds_run_out_is_undone_or_consistent() {
    let counts = outcomes(1000..1200, Trouble::Lag);
    let taken = counts.iter().flatten().count();
    assert!((1..counts.len()).contains(&taken), "both happens: {counts:?}");
}

#[test]
fn a_group_of_a_volume_that_is_closed_is_undone_or_consistent() {
    let counts = outcomes(200..230, Trouble::Close);
    let taken = counts.iter().flatten().count();
    assert!((1..counts.len()).contains(&taken), "both happens: {counts:?}");
}

#[test]
fn a_name_that_one_member_has_is_refused_and_nothing_is_taken() {
    assert!(outcomes(300..306, Trouble::NameTaken).iter().all(Option::is_none));
}

#[test]
fn without_holding_back_answers_it_would_not_be_consistent() {
    for (holds, follows) in [(Holds::Nothing, Follows::Answers), (Holds::Writes, Follows::Reads)] {
        let found = (0..60).filter(|seed| run(*seed, Trouble::None, holds, follows).is_err()).count();
        assert!(found > 0, "a deliberate fault that this test must find: {holds:?}, {follows:?}");
        println!("{holds:?}, {follows:?}: found by {found} of 60 seeds");
    }
}
