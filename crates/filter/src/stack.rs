//! The filters of a volume in their order: owns the names of requests between them, and counts what crosses every edge.
//!
//! Role: the shell gives it what front ends ask and what the controller answers, and carries out its effects, which are
//! those of one large filter.
//!
//! Requests are renamed at every edge. A filter so chooses names as it likes, may ask on its own, and may stand above another
//! one of its kind; and a filter that is put between two others gets no answers to what was asked before.
//!
//! States of a filter: standing → leaving ([`StackEvent::Remove`], [`StackEvent::Drain`]: drained, no requests come to it) →
//! gone, when all that it had passed on is answered.
//!
//! Invariants (asserted: a filter that breaks one has a bug that would cost data)
//! 1. A filter answers what it was asked, once, by an answer of the kind that was asked for (law 1).
//! 2. A filter that is leaving holds nothing but what is below it (law 6).
//! 3. A filter has at most [`OWN_MAX`] requests more below it than above it (law 7).
//! 4. After a tick a filter's deadline lies in the future (law 8).
//!
//! Limits: [`FILTERS_MAX`] filters; requests from above as the shell was told by [`Stack::new`], which keeps count.

use crate::filter::{Effect, Event, Filter, Nature};
use holdfast_base::buf::total_len;
use holdfast_base::time::earliest;
use holdfast_base::{BlockData, BlockOp, BlockReply, BlockRequest, Effects, Instant, RequestToken, Slab, Token};
use std::collections::VecDeque;
use std::fmt;

/// Filters of one stack: each costs every request some work, and some memory.
pub const FILTERS_MAX: usize = 16;

/// What a filter may ask beyond what it was asked: a few requests at a time may be cut in pieces.
pub const OWN_MAX: usize = 16;

/// Names a filter of a stack; never used again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct FilterId(pub u32);

impl fmt::Display for FilterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

#[derive(Debug)]
pub enum StackEvent {
    /// Of a front end; the answer bears the same token.
    Request(BlockRequest),
    /// From below, to an [`Effect::Down`].
    Reply(BlockReply),
    Tick,
    /// The filter shall go.
    Remove(FilterId),
    /// All shall go: the volume is about to be closed or handed over. What comes afterwards passes straight through.
    Drain,
}

/// What has crossed an edge, the upper one of a filter or that of the controller.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Edge {
    pub requests: u64,
    /// Payload of writes.
    pub bytes_down: u64,
    /// Errors included.
    pub replies: u64,
    /// Payload of reads.
    pub bytes_up: u64,
    pub errors: u64,
}

impl Edge {
    pub fn in_flight(&self) -> u64 {
        self.requests - self.replies
    }

    fn down(&mut self, op: &BlockOp) {
        self.requests += 1;
        if let BlockOp::Write { data, .. } = op {
            self.bytes_down += data.len() as u64;
        }
    }

    fn up(&mut self, reply: &BlockReply) {
        self.replies += 1;
        match &reply.result {
            Ok(BlockData::Data(parts)) => self.bytes_up += total_len(parts) as u64,
            Ok(_) => {}
            Err(_) => self.errors += 1,
        }
    }
}

/// What is told of a filter.
#[derive(Clone, Debug)]
pub struct FilterView {
    pub id: FilterId,
    pub spec: String,
    pub nature: Nature,
    pub is_leaving: bool,
    /// Between it and what is above it.
    pub above: Edge,
    pub counters: Vec<(&'static str, u64)>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    Front,
    Filter(FilterId),
    Below,
}

/// What an answer must be like.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Wanted {
    Done,
    Data { len: u64 },
    Status,
}

impl Wanted {
    fn of(op: &BlockOp) -> Wanted {
        match op {
            BlockOp::Read(range) => Wanted::Data { len: range.len },
            BlockOp::Status(_) | BlockOp::Changes { .. } => Wanted::Status,
            BlockOp::Write { .. }
            | BlockOp::Flush
            | BlockOp::Discard(_)
            | BlockOp::WriteZeroes(_)
            | BlockOp::Prefetch(_) => Wanted::Done,
        }
    }

    fn is(self, data: &BlockData) -> bool {
        match (self, data) {
            (Wanted::Done, BlockData::Done) | (Wanted::Status, BlockData::Status(_)) => true,
            (Wanted::Data { len }, BlockData::Data(parts)) => total_len(parts) as u64 == len,
            _ => false,
        }
    }
}

/// A request on an edge.
struct UnderWay {
    from: Place,
    /// What who asked calls it.
    name: RequestToken,
    to: Place,
    wanted: Wanted,
}

struct Slot {
    id: FilterId,
    filter: Box<dyn Filter>,
    above: Edge,
    below_in_flight: usize,
    is_leaving: bool,
}

/// A law that a filter has broken.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Breach(pub String);

pub struct Stack {
    slots: Vec<Slot>,
    next_id: u32,
    under_way: Slab<UnderWay>,
    front_in_flight: usize,
    below: Edge,
    work: VecDeque<(FilterId, Event)>,
    effects: Effects<Effect>,
}

impl Stack {
    /// So many requests may come from above at a time.
    pub fn new(requests_max: usize) -> Stack {
        let capacity = (requests_max + FILTERS_MAX * OWN_MAX) * (FILTERS_MAX + 1);
        Stack {
            slots: Vec::new(),
            next_id: 1,
            under_way: Slab::new(capacity),
            front_in_flight: 0,
            below: Edge::default(),
            work: VecDeque::new(),
            effects: Effects::new(),
        }
    }

    /// Puts a filter below all others; `None` where there are too many.
    pub fn add(&mut self, filter: Box<dyn Filter>) -> Option<FilterId> {
        if self.slots.len() >= FILTERS_MAX {
            return None;
        }
        let id = FilterId(self.next_id);
        self.next_id += 1;
        self.slots.push(Slot { id, filter, above: Edge::default(), below_in_flight: 0, is_leaving: false });
        Some(id)
    }

    pub fn handle(&mut self, now: Instant, event: StackEvent, out: &mut Effects<Effect>) {
        if let Err(Breach(why)) = self.try_handle(now, event, out) {
            panic!("{why}");
        }
    }

    pub(crate) fn try_handle(
        &mut self,
        now: Instant,
        event: StackEvent,
        out: &mut Effects<Effect>,
    ) -> Result<(), Breach> {
        match event {
            StackEvent::Request(request) => {
                self.front_in_flight += 1;
                self.send(Place::Front, request, out)?;
            }
            StackEvent::Reply(reply) => self.answer(Place::Below, reply, out)?,
            StackEvent::Tick => self.tick(now, out)?,
            StackEvent::Remove(id) => self.drain_one(now, id, out)?,
            StackEvent::Drain => {
                // From above: what comes out of one goes through those below it, which are drained next.
                for id in self.slots.iter().map(|slot| slot.id).collect::<Vec<_>>() {
                    self.drain_one(now, id, out)?;
                    self.settle(now, out)?;
                }
            }
        }
        self.settle(now, out)
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        let standing = self.slots.iter().filter(|slot| !slot.is_leaving);
        standing.fold(None, |first, slot| earliest(first, slot.filter.next_deadline()))
    }

    /// No filter is left, and nothing under way.
    pub fn is_idle(&self) -> bool {
        self.slots.is_empty() && self.under_way.is_empty()
    }

    /// From above, downwards.
    pub fn filters(&self) -> Vec<FilterView> {
        let view = |slot: &Slot| FilterView {
            id: slot.id,
            spec: slot.filter.spec().to_string(),
            nature: slot.filter.nature(),
            is_leaving: slot.is_leaving,
            above: slot.above,
            counters: slot.filter.counters(),
        };
        self.slots.iter().map(view).collect()
    }

    /// Between the lowest filter and what is below all.
    pub fn below(&self) -> Edge {
        self.below
    }

    /// Of front ends.
    pub fn in_flight(&self) -> usize {
        self.front_in_flight
    }

    /// Requests that are with filters, and nothing of them below.
    pub fn held(&self) -> usize {
        let held = |slot: &Slot| (slot.above.in_flight() as usize).saturating_sub(slot.below_in_flight);
        self.slots.iter().map(held).sum()
    }

    /// Those that are not about to go.
    pub fn standing(&self) -> Vec<FilterId> {
        self.slots.iter().filter(|slot| !slot.is_leaving).map(|slot| slot.id).collect()
    }

    pub fn nature(&self) -> Nature {
        self.slots.iter().fold(Nature::default(), |all, slot| all.and(slot.filter.nature()))
    }

    /// How many requests more than there are may go down for those that have come: what the shell keeps room for.
    pub fn may_still_ask(&self) -> usize {
        (self.front_in_flight + self.slots.len() * OWN_MAX).saturating_sub(self.below.in_flight() as usize)
    }

    fn at(&self, id: FilterId) -> Option<usize> {
        self.slots.iter().position(|slot| slot.id == id)
    }

    /// The filter that takes what `from` sends down.
    fn next_after(&self, from: Place) -> Place {
        let first = match from {
            Place::Front => 0,
            Place::Filter(id) => self.at(id).map_or(self.slots.len(), |at| at + 1),
            Place::Below => self.slots.len(),
        };
        self.slots[first..].iter().find(|slot| !slot.is_leaving).map_or(Place::Below, |slot| Place::Filter(slot.id))
    }

    fn send(&mut self, from: Place, request: BlockRequest, out: &mut Effects<Effect>) -> Result<(), Breach> {
        if let Place::Filter(id) = from {
            let at = self.at(id).expect("a filter stays while anything is under way");
            let slot = &mut self.slots[at];
            slot.below_in_flight += 1;
            if slot.below_in_flight as u64 > slot.above.in_flight() + OWN_MAX as u64 {
                let (asks, has) = (slot.below_in_flight, slot.above.in_flight());
                return Err(breach(slot, &format!("asks {asks} at a time for {has} that it was asked")));
            }
        }
        let to = self.next_after(from);
        let wanted = Wanted::of(&request.op);
        let token = self.under_way.insert(UnderWay { from, name: request.token, to, wanted });
        self.edge(to).down(&request.op);
        let request = BlockRequest { token: RequestToken(token.0), op: request.op };
        match to {
            Place::Filter(id) => self.work.push_back((id, Event::Request(request))),
            Place::Below | Place::Front => out.push(Effect::Down(request)),
        }
        Ok(())
    }

    /// The edge above a place.
    fn edge(&mut self, place: Place) -> &mut Edge {
        match place {
            Place::Filter(id) => {
                let at = self.at(id).expect("a filter stays while anything is under way");
                &mut self.slots[at].above
            }
            Place::Below | Place::Front => &mut self.below,
        }
    }

    fn answer(&mut self, by: Place, reply: BlockReply, out: &mut Effects<Effect>) -> Result<(), Breach> {
        let token = Token(reply.token.0);
        let asked = self.under_way.get(token).filter(|asked| asked.to == by);
        let fits = |wanted: Wanted| reply.result.as_ref().map_or(true, |data| wanted.is(data));
        match asked {
            None => return Err(self.breach_of(by, &format!("answers what it was not asked, or twice: {reply:?}"))),
            Some(asked) if !fits(asked.wanted) => {
                let wanted = asked.wanted;
                return Err(self.breach_of(by, &format!("was asked for {wanted:?} and answers {reply:?}")));
            }
            Some(_) => {}
        }
        let UnderWay { from, name, .. } = self.under_way.remove(token).expect("just seen");
        self.edge(by).up(&reply);
        let reply = BlockReply { token: name, result: reply.result };
        match from {
            Place::Filter(id) => {
                let at = self.at(id).expect("a filter stays while anything is under way");
                self.slots[at].below_in_flight -= 1;
                self.work.push_back((id, Event::Reply(reply)));
            }
            Place::Front | Place::Below => {
                self.front_in_flight -= 1;
                out.push(Effect::Up(reply));
            }
        }
        Ok(())
    }

    fn breach_of(&self, by: Place, why: &str) -> Breach {
        match by {
            Place::Filter(id) => breach(&self.slots[self.at(id).expect("a filter that has just spoken")], why),
            Place::Below | Place::Front => Breach(format!("what is below the filters {why}")),
        }
    }

    /// Gives an event to a filter, and carries out what it wants.
    fn enter(&mut self, now: Instant, id: FilterId, event: Event, out: &mut Effects<Effect>) -> Result<(), Breach> {
        let Some(at) = self.at(id) else { return Ok(()) };
        let mut effects = std::mem::take(&mut self.effects);
        self.slots[at].filter.handle(now, event, &mut effects);
        for effect in effects.drain() {
            match effect {
                Effect::Down(request) => self.send(Place::Filter(id), request, out)?,
                Effect::Up(reply) => self.answer(Place::Filter(id), reply, out)?,
            }
        }
        self.effects = effects;
        Ok(())
    }

    fn drain_one(&mut self, now: Instant, id: FilterId, out: &mut Effects<Effect>) -> Result<(), Breach> {
        let Some(at) = self.at(id).filter(|at| !self.slots[*at].is_leaving) else { return Ok(()) };
        self.slots[at].is_leaving = true;
        self.enter(now, id, Event::Drain, out)
    }

    fn tick(&mut self, now: Instant, out: &mut Effects<Effect>) -> Result<(), Breach> {
        for id in self.slots.iter().filter(|slot| !slot.is_leaving).map(|slot| slot.id).collect::<Vec<_>>() {
            let deadline = |stack: &Stack| stack.at(id).and_then(|at| stack.slots[at].filter.next_deadline());
            if deadline(self).is_none_or(|due| due > now) {
                continue;
            }
            self.enter(now, id, Event::Tick, out)?;
            if let Some(due) = deadline(self).filter(|due| *due <= now) {
                return Err(self.breach_of(Place::Filter(id), &format!("wants a tick at {due:?}, and it is {now:?}")));
            }
            self.settle(now, out)?;
        }
        Ok(())
    }

    /// Works off what filters want of each other, and lets go those that have nothing left.
    fn settle(&mut self, now: Instant, out: &mut Effects<Effect>) -> Result<(), Breach> {
        while let Some((id, event)) = self.work.pop_front() {
            self.enter(now, id, event, out)?;
        }
        let keeps = |slot: &&Slot| slot.is_leaving && slot.above.in_flight() > 0 && slot.below_in_flight == 0;
        if let Some(slot) = self.slots.iter().find(keeps) {
            return Err(breach(slot, &format!("keeps {} requests although it was drained", slot.above.in_flight())));
        }
        self.slots.retain(|slot| !slot.is_leaving || slot.above.in_flight() > 0 || slot.below_in_flight > 0);
        Ok(())
    }
}

fn breach(slot: &Slot, why: &str) -> Breach {
    Breach(format!("filter {} ({}) {why}", slot.id, slot.filter.spec()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_base::{BlockError, Buf, ByteRange};

    /// Passes on, and keeps what is odd until it is drained.
    #[derive(Debug, Default)]
    struct KeepsOdd {
        kept: Vec<BlockRequest>,
    }

    impl Filter for KeepsOdd {
        fn handle(&mut self, _: Instant, event: Event, out: &mut Effects<Effect>) {
            match event {
                Event::Request(request) => match &request.op {
                    BlockOp::Read(range) if range.len % 2 == 1 => self.kept.push(request),
                    _ => out.push(Effect::Down(request)),
                },
                Event::Reply(reply) => out.push(Effect::Up(reply)),
                Event::Tick => {}
                Event::Drain => self.kept.drain(..).for_each(|request| out.push(Effect::Down(request))),
            }
        }

        fn next_deadline(&self) -> Option<Instant> {
            None
        }

        fn spec(&self) -> &str {
            "keeps-odd"
        }
    }

    struct Bench {
        stack: Stack,
        out: Effects<Effect>,
    }

    impl Bench {
        fn new(filters: usize) -> Bench {
            let mut stack = Stack::new(64);
            for _ in 0..filters {
                stack.add(Box::<KeepsOdd>::default()).expect("room");
            }
            Bench { stack, out: Effects::new() }
        }

        /// What went down, and what came up.
        fn tell(&mut self, event: StackEvent) -> (Vec<BlockRequest>, Vec<BlockReply>) {
            self.stack.handle(Instant::ZERO, event, &mut self.out);
            let (mut down, mut up) = (Vec::new(), Vec::new());
            for effect in self.out.take() {
                match effect {
                    Effect::Down(request) => down.push(request),
                    Effect::Up(reply) => up.push(reply),
                }
            }
            (down, up)
        }

        fn read(&mut self, token: u64, len: u64) -> Vec<BlockRequest> {
            let op = BlockOp::Read(ByteRange::new(0, len));
            self.tell(StackEvent::Request(BlockRequest { token: RequestToken(token), op })).0
        }

        fn reply(&mut self, to: &BlockRequest) -> Vec<BlockReply> {
            let BlockOp::Read(range) = to.op else { panic!("only reads are asked here") };
            let data = BlockData::Data(vec![Buf::zeroes(range.len as usize)]);
            self.tell(StackEvent::Reply(BlockReply { token: to.token, result: Ok(data) })).1
        }
    }

    #[test]
    fn replies_find_back_by_filters_that_come_and_go() {
        let mut bench = Bench::new(1);
        let first = bench.read(7, 2);
        assert!(bench.read(8, 3).is_empty(), "it is kept");
        let second = bench.stack.add(Box::<KeepsOdd>::default()).expect("room");
        let later = bench.read(9, 4);
        // The new filter was not there when the first was asked.
        assert_eq!(bench.reply(&first[0])[0].token, RequestToken(7));
        assert_eq!(bench.stack.filters()[1].above.requests, 1);
        // The first goes, and what it kept is kept by the next one.
        let first_id = bench.stack.filters()[0].id;
        assert!(bench.tell(StackEvent::Remove(first_id)).0.is_empty());
        assert_eq!(bench.stack.filters()[1].above.in_flight(), 2);
        assert!(bench.stack.filters()[0].is_leaving);
        let (down, _) = bench.tell(StackEvent::Remove(second));
        assert_eq!(down.len(), 1);
        assert_eq!(bench.reply(&down[0])[0].token, RequestToken(8));
        assert_eq!(bench.stack.filters().len(), 2, "a reply is to come");
        assert_eq!(bench.reply(&later[0])[0].token, RequestToken(9));
        assert!(bench.stack.is_idle());
        assert_eq!(bench.stack.below().requests, 3);
        assert_eq!(bench.stack.below().bytes_up, 9);
    }

    #[test]
    fn a_drain_lets_everything_out_and_the_rest_passes() {
        let mut bench = Bench::new(3);
        assert!(bench.read(1, 1).is_empty());
        assert_eq!(bench.stack.may_still_ask(), 1 + 3 * OWN_MAX);
        let (down, up) = bench.tell(StackEvent::Drain);
        assert!(down.len() == 1 && up.is_empty());
        assert_eq!(bench.read(2, 1).len(), 1, "nobody keeps it any more");
        let failed = BlockReply { token: down[0].token, result: Err(BlockError::Deposed) };
        let (_, up) = bench.tell(StackEvent::Reply(failed));
        assert_eq!((up[0].token, up[0].result.as_ref().err()), (RequestToken(1), Some(&BlockError::Deposed)));
        assert_eq!(bench.stack.below().errors, 1);
        assert!(bench.stack.filters().is_empty());
    }

    #[test]
    fn there_are_no_more_filters_than_the_bound() {
        let mut bench = Bench::new(FILTERS_MAX);
        assert!(bench.stack.add(Box::<KeepsOdd>::default()).is_none());
    }
}
