//! Requests of a volume that are under way: where each came from, and the ordering barrier for clients that reconnect.
//!
//! Invariants
//! 1. A request has its origin here from its admission until it is answered, however long it waits for its turn, and
//!    whatever filters do with it.
//! 2. Whoever waits at the barrier goes on when all that was under way as it came is answered, in the order of coming.
//!
//! Limits: [`REQUESTS_MAX`] requests, as many as a controller takes.

use holdfast_base::{BlockOp, HeadId, Instant, RequestToken, Slab, Token};
use holdfast_qos::Slot;
use holdfast_stages::{Kind, Spans};
use holdfast_volume::controller::REQUESTS_MAX;
use std::collections::BTreeSet;

/// Who waits for an answer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Requester {
    /// A session of this host.
    Session(Token),
    /// A session of another host: the owner end's name for the request.
    Remote(Token),
    /// The filters before this head of the volume.
    Filters(HeadId),
}

/// Where a request came from, and its name there.
#[derive(Clone, Debug)]
pub struct Origin {
    pub requester: Requester,
    pub token: RequestToken,
    /// Of a session of this host: where its volume turns out to be served elsewhere it is asked there.
    pub op: Option<BlockOp>,
    /// The earliest that the client may have sent it.
    pub since: Instant,
    /// When it came to this host, or to the owner if another host passed it on.
    pub came_at: Instant,
    /// What of the volume it is to change.
    pub changes: Option<HeadId>,
}

/// It has had its turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Turn {
    pub slot: Slot,
    pub went_at: Instant,
    /// It changes something.
    pub changes: bool,
}

/// Where a request was before and after the controller had it.
#[derive(Clone, Debug, Default)]
pub struct Way {
    /// Of a guest: since when it waits for its turn, and what is asked of which head.
    pub asked: Option<(Instant, HeadId, Kind)>,
    pub went_at: Option<Instant>,
    /// Filters have it then.
    pub by_filters: bool,
    /// What the controller tells.
    pub spans: Option<Spans>,
}

/// A request that is answered.
#[derive(Debug)]
pub struct Answered {
    pub origin: Origin,
    pub way: Way,
    /// Where the scheduler counts it.
    pub turn: Option<Turn>,
    /// Who goes on now.
    pub clear: Vec<Barrier>,
}

#[derive(Debug)]
struct UnderWay {
    number: u64,
    origin: Origin,
    turn: Option<Turn>,
    way: Way,
}

/// Who goes on when what was asked before is done. A client that was cut off with a write under way may be back, and what it
/// then writes must come after that.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Barrier {
    /// A session that is not forwarded.
    Session(Token),
    /// One that may be.
    Forwarded(Token),
    /// A session of another host, and the export.
    Remote(Token, String),
}

/// Requests under way, and who waits for them.
#[derive(Debug)]
pub struct Requests {
    origins: Slab<UnderWay>,
    /// In the order of their coming.
    next_number: u64,
    under_way: BTreeSet<u64>,
    /// Each waits for all below its number.
    waiting: Vec<(u64, Barrier)>,
}

impl Default for Requests {
    fn default() -> Requests {
        Requests { origins: Slab::new(REQUESTS_MAX), next_number: 0, under_way: BTreeSet::new(), waiting: Vec::new() }
    }
}

impl Requests {
    pub fn count(&self) -> usize {
        self.origins.len()
    }

    /// Takes a request in; gives its name at the controller. Callers keep room for it.
    pub fn admit(&mut self, origin: Origin) -> RequestToken {
        self.under_way.insert(self.next_number);
        let token = self.origins.insert(UnderWay { number: self.next_number, origin, turn: None, way: Way::default() });
        self.next_number += 1;
        RequestToken(token.0)
    }

    /// It has its turn, and counts for the scheduler until it is answered.
    pub fn went(&mut self, request: RequestToken, turn: Turn) {
        if let Some(of) = self.origins.get_mut(Token(request.0)) {
            of.turn = Some(turn);
        }
    }

    /// It comes to wait for its turn.
    pub fn asked(&mut self, now: Instant, request: RequestToken, head: HeadId, kind: Kind) {
        if let Some(of) = self.origins.get_mut(Token(request.0)) {
            of.way.asked = Some((now, head, kind));
        }
    }

    /// It goes on, whether that counts or not.
    pub fn passes(&mut self, now: Instant, request: RequestToken, by_filters: bool) {
        if let Some(of) = self.origins.get_mut(Token(request.0)) {
            (of.way.went_at, of.way.by_filters) = (Some(now), by_filters);
        }
    }

    /// Where its time went in the controller, which answers it next.
    pub fn took(&mut self, request: RequestToken, spans: Spans) {
        if let Some(of) = self.origins.get_mut(Token(request.0)) {
            of.way.spans = Some(spans);
        }
    }

    /// Of a head's requests of that kind that go on, unanswered: how many, and since when the first of them does.
    pub fn on_their_way(&self, head: HeadId, kind: Kind) -> (u64, Option<Instant>) {
        let is_of = |way: &Way| way.asked.is_some_and(|(_, of, what)| (of, what) == (head, kind));
        let own = self.origins.iter().filter(|(_, of)| is_of(&of.way)).filter_map(|(_, of)| of.way.went_at);
        own.fold((0, None), |(count, first), at| (count + 1, Some(first.map_or(at, |first: Instant| first.min(at)))))
    }

    /// Whether the request is here, and has had no turn that counts.
    pub fn waits_for_turn(&self, request: RequestToken) -> bool {
        self.origins.get(Token(request.0)).is_some_and(|of| of.turn.is_none())
    }

    /// Ends a request.
    pub fn answered(&mut self, request: RequestToken) -> Option<Answered> {
        let UnderWay { number, origin, turn, way } = self.origins.remove(Token(request.0))?;
        self.under_way.remove(&number);
        if self.waiting.is_empty() {
            return Some(Answered { origin, way, turn, clear: Vec::new() });
        }
        let first = self.under_way.first().copied().unwrap_or(u64::MAX);
        let clear = self.waiting.extract_if(.., |(upto, _)| *upto <= first).map(|(_, who)| who).collect();
        Some(Answered { origin, way, turn, clear })
    }

    /// Has somebody wait for what is under way; false where nothing is.
    pub fn waits(&mut self, who: Barrier) -> bool {
        if self.under_way.is_empty() {
            return false;
        }
        self.waiting.push((self.next_number, who));
        true
    }

    /// Lets all at the barrier go, and names the requests that nobody will answer any more: the controller is gone.
    pub fn give_up(&mut self) -> (Vec<RequestToken>, Vec<Barrier>) {
        let waiting = std::mem::take(&mut self.waiting).into_iter().map(|(_, who)| who).collect();
        (self.origins.tokens().into_iter().map(|token| RequestToken(token.0)).collect(), waiting)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(n: u64) -> Origin {
        let (requester, token) = (Requester::Session(Token(n)), RequestToken(n));
        Origin { requester, token, op: None, since: Instant::ZERO, came_at: Instant::ZERO, changes: None }
    }

    #[test]
    fn who_waits_goes_on_when_all_that_was_before_it_is_answered() {
        let mut requests = Requests::default();
        assert!(!requests.waits(Barrier::Session(Token(1))), "nothing is under way");
        let (a, b) = (requests.admit(origin(1)), requests.admit(origin(2)));
        assert!(requests.waits(Barrier::Session(Token(1))));
        let c = requests.admit(origin(3));
        assert!(requests.waits(Barrier::Forwarded(Token(2))));
        let answered = requests.answered(b).map(|Answered { origin, clear, .. }| (origin.token, clear));
        assert_eq!(answered, Some((RequestToken(2), vec![])));
        // What came after the first does not hold it up.
        assert_eq!(requests.answered(a).map(|answered| answered.clear), Some(vec![Barrier::Session(Token(1))]));
        assert_eq!(requests.answered(c).map(|answered| answered.clear), Some(vec![Barrier::Forwarded(Token(2))]));
        assert!(requests.answered(c).is_none(), "an answer counts once");
    }

    #[test]
    fn nobody_waits_for_a_controller_that_is_gone() {
        let mut requests = Requests::default();
        let a = requests.admit(origin(1));
        assert!(requests.waits(Barrier::Session(Token(1))));
        assert_eq!(requests.give_up(), (vec![a], vec![Barrier::Session(Token(1))]));
        assert_eq!(requests.answered(a).map(|answered| answered.clear), Some(vec![]));
    }
}
