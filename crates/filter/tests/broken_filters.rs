//! The kit's own test: filters with one mistake each, every one of which it must find.

use holdfast_base::{BlockData, BlockError, BlockOp, BlockReply, BlockRequest, Buf, Effects, Instant, RequestToken};
use holdfast_filter::{Effect, Event, Filter, Nature, OWN_MAX, kit};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A filter that only passes on, but for one thing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mistake {
    None,
    LosesAReply,
    LosesARequest,
    AnswersTwice,
    AnswersOfTheWrongKind,
    AcknowledgesFlushesEarly,
    AcknowledgesWritesEarly,
    AcknowledgesDiscardsItself,
    AltersWrites,
    AltersReads,
    SwapsReads,
    FailsWithoutSayingSo,
    KeepsAtDrain,
    PassesOnAfterTheAnswer,
    AsksWithoutBound,
    WantsTicksInThePast,
    NeverGoesOn,
    GoesByWhatIsOutside,
    LetsWritesOvertake,
}

#[derive(Debug)]
struct Broken {
    mistake: Mistake,
    seen: u64,
    held: Vec<BlockRequest>,
    held_since: Instant,
    last_read: Option<Vec<Buf>>,
}

/// Unlike all that come from above.
const OWN: RequestToken = RequestToken(u64::MAX);

static OUTSIDE: AtomicU64 = AtomicU64::new(0);

fn done(request: &BlockRequest) -> Effect {
    Effect::Up(BlockReply { token: request.token, result: Ok(BlockData::Done) })
}

impl Broken {
    fn on_request(&mut self, now: Instant, request: BlockRequest, out: &mut Effects<Effect>) {
        self.seen += 1;
        let is_tenth = self.seen.is_multiple_of(10);
        match (self.mistake, &request.op) {
            (Mistake::LosesARequest, _) if is_tenth => {}
            (Mistake::AnswersTwice, BlockOp::Prefetch(_)) => {
                out.push(done(&request));
                out.push(Effect::Down(request));
            }
            (Mistake::AnswersOfTheWrongKind, BlockOp::Read(_)) if is_tenth => out.push(done(&request)),
            (Mistake::AcknowledgesFlushesEarly, BlockOp::Flush)
            | (Mistake::AcknowledgesWritesEarly, BlockOp::Write { .. })
            | (Mistake::AcknowledgesDiscardsItself, BlockOp::Discard(_)) => {
                out.push(done(&request));
                // The answer of this one is swallowed below.
                out.push(Effect::Down(BlockRequest { token: OWN, op: request.op }));
            }
            (Mistake::AltersWrites, BlockOp::Write { offset, data }) if is_tenth => {
                let mut bytes = data.to_vec();
                bytes[100] ^= 1;
                let op = BlockOp::Write { offset: *offset, data: Buf::copy_from(&bytes) };
                out.push(Effect::Down(BlockRequest { token: request.token, op }));
            }
            (Mistake::FailsWithoutSayingSo, _) if is_tenth => {
                out.push(Effect::Up(BlockReply { token: request.token, result: Err(BlockError::Injected) }));
            }
            (Mistake::KeepsAtDrain | Mistake::NeverGoesOn, _) if is_tenth => self.held.push(request),
            (Mistake::LetsWritesOvertake, BlockOp::Write { .. }) if is_tenth => {
                self.held_since = now;
                self.held.push(request);
            }
            (Mistake::PassesOnAfterTheAnswer, BlockOp::Write { .. }) if is_tenth => {
                out.push(Effect::Up(BlockReply { token: request.token, result: Err(BlockError::Injected) }));
                self.held_since = now;
                self.held.push(request);
            }
            (Mistake::AsksWithoutBound, BlockOp::Read(_)) => {
                for n in 0..2 * OWN_MAX as u64 {
                    let op = request.op.clone();
                    out.push(Effect::Down(BlockRequest { token: RequestToken(1_000_000 + n), op }));
                }
                out.push(Effect::Down(request));
            }
            (Mistake::GoesByWhatIsOutside, BlockOp::Prefetch(_))
                if OUTSIDE.fetch_add(1, Ordering::Relaxed).is_multiple_of(7) =>
            {
                out.push(done(&request));
            }
            _ => out.push(Effect::Down(request)),
        }
    }

    fn on_reply(&mut self, mut reply: BlockReply, out: &mut Effects<Effect>) {
        self.seen += 1;
        let is_tenth = self.seen.is_multiple_of(10);
        match self.mistake {
            Mistake::LosesAReply if is_tenth => return,
            Mistake::AltersReads if is_tenth => {
                if let Ok(BlockData::Data(parts)) = &mut reply.result {
                    parts[0] = Buf::zeroes(parts[0].len());
                }
            }
            // Whole sectors, that were true of another place.
            Mistake::SwapsReads => {
                if let Ok(BlockData::Data(parts)) = &mut reply.result {
                    let before = self.last_read.replace(parts.clone());
                    if let Some(before) = before.filter(|before| before.len() == parts.len()) {
                        *parts = before;
                    }
                }
            }
            _ => {}
        }
        let is_own = reply.token == OWN || (1_000_000..2_000_000).contains(&reply.token.0);
        if !is_own {
            out.push(Effect::Up(reply));
        }
    }
}

impl Filter for Broken {
    fn handle(&mut self, now: Instant, event: Event, out: &mut Effects<Effect>) {
        match event {
            Event::Request(request) => self.on_request(now, request, out),
            Event::Reply(reply) => self.on_reply(reply, out),
            Event::Tick if self.mistake == Mistake::PassesOnAfterTheAnswer => {
                let late = self.held.drain(..).map(|request| BlockRequest { token: OWN, op: request.op });
                late.for_each(|request| out.push(Effect::Down(request)));
            }
            Event::Tick | Event::Drain if self.mistake == Mistake::LetsWritesOvertake => {
                self.held.drain(..).for_each(|request| out.push(Effect::Down(request)));
            }
            Event::Drain if self.mistake == Mistake::NeverGoesOn => {
                self.held.drain(..).for_each(|request| out.push(Effect::Down(request)));
            }
            Event::Tick | Event::Drain => {}
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        match self.mistake {
            Mistake::WantsTicksInThePast => Some(Instant::ZERO),
            Mistake::PassesOnAfterTheAnswer | Mistake::LetsWritesOvertake if !self.held.is_empty() => {
                Some(self.held_since + Duration::from_millis(5))
            }
            _ => None,
        }
    }

    fn spec(&self) -> &str {
        "broken"
    }

    fn nature(&self) -> Nature {
        let fails = self.mistake == Mistake::PassesOnAfterTheAnswer;
        // It may hold what it likes, until it is drained.
        let hangs = self.mistake == Mistake::KeepsAtDrain;
        Nature { fails, hangs, ..Nature::default() }
    }
}

fn finding(mistake: Mistake) -> Option<String> {
    kit::first_finding(|_| {
        let broken = Broken { mistake, seen: 0, held: Vec::new(), held_since: Instant::ZERO, last_read: None };
        vec![Box::new(broken)]
    })
}

#[test]
fn a_filter_that_only_passes_on_breaks_no_law() {
    assert_eq!(finding(Mistake::None), None);
}

#[test]
fn every_mistake_is_found_and_named() {
    let expected = [
        (Mistake::LosesAReply, "law 1"),
        (Mistake::LosesARequest, "law 1"),
        (Mistake::AnswersTwice, "answers what it was not asked, or twice"),
        (Mistake::AnswersOfTheWrongKind, "was asked for"),
        (Mistake::AcknowledgesFlushesEarly, "law 3"),
        (Mistake::AcknowledgesWritesEarly, "law 2"),
        (Mistake::AcknowledgesDiscardsItself, "law 2"),
        (Mistake::AltersWrites, "law 2"),
        (Mistake::AltersReads, "law 5"),
        (Mistake::SwapsReads, "law 5"),
        (Mistake::FailsWithoutSayingSo, "law 5"),
        (Mistake::KeepsAtDrain, "keeps"),
        (Mistake::PassesOnAfterTheAnswer, "law 4"),
        (Mistake::AsksWithoutBound, "asks"),
        (Mistake::WantsTicksInThePast, "wants a tick"),
        (Mistake::NeverGoesOn, "law 1"),
        (Mistake::GoesByWhatIsOutside, "law 8"),
        (Mistake::LetsWritesOvertake, "law 9"),
    ];
    let misjudged: Vec<String> = expected
        .into_iter()
        .filter_map(|(mistake, part)| match finding(mistake) {
            None => Some(format!("{mistake:?} is not found")),
            Some(found) => (!found.contains(part)).then(|| format!("{mistake:?}: {found}")),
        })
        .collect();
    assert!(misjudged.is_empty(), "{misjudged:#?}");
}
