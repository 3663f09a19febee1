//! Requests of a volume that are under way: where each came from, and the ordering barrier for clients that reconnect.
//!
//! Invariants
//! 1. A request has its origin here from its admission until it is answered, whatever filters do with it.
//! 2. Whoever waits at the barrier goes on when all that was under way as it came is answered, in the order of coming.
//!
//! Limits: [`REQUESTS_MAX`] requests, as many as a controller takes.

use holdfast_base::{BlockOp, HeadId, Instant, RequestToken, Slab, Token};
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
    /// What of the volume it is to change.
    pub changes: Option<HeadId>,
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
    origins: Slab<(u64, Origin)>,
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
        let token = self.origins.insert((self.next_number, origin));
        self.next_number += 1;
        RequestToken(token.0)
    }

    /// Ends a request: where it came from, and who goes on now.
    pub fn answered(&mut self, request: RequestToken) -> Option<(Origin, Vec<Barrier>)> {
        let (number, origin) = self.origins.remove(Token(request.0))?;
        self.under_way.remove(&number);
        if self.waiting.is_empty() {
            return Some((origin, Vec::new()));
        }
        let first = self.under_way.first().copied().unwrap_or(u64::MAX);
        let clear = self.waiting.extract_if(.., |(upto, _)| *upto <= first).map(|(_, who)| who).collect();
        Some((origin, clear))
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
        Origin { requester, token, op: None, since: Instant::ZERO, changes: None }
    }

    #[test]
    fn who_waits_goes_on_when_all_that_was_before_it_is_answered() {
        let mut requests = Requests::default();
        assert!(!requests.waits(Barrier::Session(Token(1))), "nothing is under way");
        let (a, b) = (requests.admit(origin(1)), requests.admit(origin(2)));
        assert!(requests.waits(Barrier::Session(Token(1))));
        let c = requests.admit(origin(3));
        assert!(requests.waits(Barrier::Forwarded(Token(2))));
        assert_eq!(requests.answered(b).map(|(origin, clear)| (origin.token, clear)), Some((RequestToken(2), vec![])));
        // What came after the first does not hold it up.
        assert_eq!(requests.answered(a).map(|(_, clear)| clear), Some(vec![Barrier::Session(Token(1))]));
        assert_eq!(requests.answered(c).map(|(_, clear)| clear), Some(vec![Barrier::Forwarded(Token(2))]));
        assert!(requests.answered(c).is_none(), "an answer counts once");
    }

    #[test]
    fn nobody_waits_for_a_controller_that_is_gone() {
        let mut requests = Requests::default();
        let a = requests.admit(origin(1));
        assert!(requests.waits(Barrier::Session(Token(1))));
        assert_eq!(requests.give_up(), (vec![a], vec![Barrier::Session(Token(1))]));
        assert_eq!(requests.answered(a).map(|(_, clear)| clear), Some(vec![]));
    }
}
