//! Siblings: a node of several reactors is as many machines, each with some of its devices, under one name.
//!
//! Role: hosts that know which reactor has a device ask there. Whoever does not is answered all the same: a request for a
//! device of a sibling is passed on to it, and what concerns the whole node is asked of all and put together.
//!
//! Invariants:
//! 1. What is passed on is answered exactly once, as the sibling answers each request once, and nothing said among
//!    siblings is lost or overtaken.
//! 2. Who reads a device id that a sibling is known to have lets its own device go: the other serves. Of two that have read
//!    one before they heard of each other, the one of the higher number does.
//!
//! Limits: [`PASSED_ON_MAX`] requests and [`QUESTIONS_MAX`] questions unanswered; more are refused as `Busy`.

use crate::api::{Effect, PeerId};
use crate::device::Surroundings;
use crate::io::Client;
use crate::line::Whose;
use crate::node::Node;
use holdfast_base::{Buf, DeviceId, Effects, Instant, Slab, Token};
use holdfast_format::wire::{NodeTimes, Refusal, Reply, Request};
use std::collections::BTreeSet;

const PASSED_ON_MAX: usize = 4096;
const QUESTIONS_MAX: usize = 1024;

/// What one machine of a node tells another.
#[derive(Clone, Debug)]
pub enum Message {
    /// The devices that it has, all of them.
    Devices(Vec<Held>),
    /// A request of one of its connections, for a device of the other.
    Request {
        conn: u64,
        token: u64,
        whose: Whose,
        asked_at: Option<Instant>,
        request: Box<Request>,
        payload: Buf,
    },
    Reply {
        conn: u64,
        token: u64,
        reply: Box<Reply>,
        times: Option<NodeTimes>,
        payload: Vec<Buf>,
    },
    /// Such a connection is closed.
    Gone {
        conn: u64,
    },
    /// Of the whole node.
    Question {
        question: Token,
        request: Box<Request>,
    },
    Answer {
        question: Token,
        reply: Box<Reply>,
    },
}

/// A device of a sibling.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Held {
    pub device: DeviceId,
    /// Its superblock says so; else it is only expected.
    pub is_read: bool,
}

/// A question of the whole node, until all have answered.
struct Question {
    client: Client,
    /// Of each reactor, in order.
    replies: Vec<Option<Reply>>,
}

pub(crate) struct Siblings {
    own: u16,
    /// What each has, by its number; of this one nothing.
    held: Vec<Vec<Held>>,
    questions: Slab<Question>,
    /// Requests passed on and not answered, and in all.
    unanswered: usize,
    passed_on: u64,
    /// Connections by the siblings that have had requests of theirs.
    known_to: BTreeSet<(u64, u16)>,
    /// What is here is to be told to them.
    is_changed: bool,
}

impl Siblings {
    pub fn new(own: u16, count: u16) -> Siblings {
        assert!(own < count, "reactor {own} of {count}");
        let held = vec![Vec::new(); usize::from(count)];
        let (questions, known_to) = (Slab::new(QUESTIONS_MAX), BTreeSet::new());
        Siblings { own, held, questions, unanswered: 0, passed_on: 0, known_to, is_changed: false }
    }

    fn is_alone(&self) -> bool {
        self.held.len() == 1
    }

    fn others(&self) -> impl Iterator<Item = u16> + use<> {
        let own = self.own;
        (0..self.held.len() as u16).filter(move |reactor| *reactor != own)
    }

    /// Who has that device, or is said to.
    fn home(&self, device: DeviceId, is_read: bool) -> Option<u16> {
        let has = |held: &Vec<Held>| held.iter().any(|held| held.device == device && held.is_read == is_read);
        self.held.iter().position(has).map(|reactor| reactor as u16)
    }

    /// Whether one of them has read this id.
    pub fn has_read(&self, device: DeviceId) -> bool {
        self.home(device, true).is_some()
    }

    /// Whether one of a lower number has.
    fn is_lower_one_s(&self, device: DeviceId) -> bool {
        self.home(device, true).is_some_and(|reactor| reactor < self.own)
    }

    pub fn passed_on(&self) -> u64 {
        self.passed_on
    }

    pub fn on_changed(&mut self) {
        self.is_changed = !self.is_alone();
    }
}

impl Node {
    /// Tells siblings which devices are here, if that has changed.
    pub(crate) fn tell_devices(&mut self, out: &mut Effects<Effect>) {
        if !std::mem::take(&mut self.siblings.is_changed) {
            return;
        }
        let devices = self.held();
        for reactor in self.siblings.others() {
            out.push(Effect::Tell { reactor, message: Message::Devices(devices.clone()) });
        }
    }

    fn held(&self) -> Vec<Held> {
        let read = self.slots.iter().map(|(device, _)| Held { device: *device, is_read: true });
        let is_expected = |device: &DeviceId| self.slots.iter().all(|(known, _)| known != device);
        let expected = self.devices.values().filter(|device| device.id().is_none()).filter_map(|d| d.expected());
        read.chain(expected.filter(is_expected).map(|device| Held { device, is_read: false })).collect()
    }

    /// The sibling that a request for this device is for. What is here comes before what is only expected elsewhere.
    pub(crate) fn elsewhere(&self, device: DeviceId, here: Refusal) -> Option<u16> {
        let expected = || self.siblings.home(device, false).filter(|_| here == Refusal::UnknownDevice);
        self.siblings.home(device, true).or_else(expected)
    }

    /// Has a sibling answer it.
    pub(crate) fn pass_on(
        &mut self,
        client: Client,
        reactor: u16,
        request: Request,
        payload: Buf,
        out: &mut Effects<Effect>,
    ) {
        let Client { peer, token, whose, asked_at } = client;
        // What a sibling has passed on was here a moment ago, and goes no further.
        if peer.sibling.is_some() || self.siblings.unanswered == PASSED_ON_MAX {
            return client.reply(Reply::Refused(Refusal::Busy), Vec::new(), out);
        }
        self.siblings.unanswered += 1;
        self.siblings.passed_on += 1;
        self.siblings.known_to.insert((peer.conn, reactor));
        let request = Box::new(request);
        let message = Message::Request { conn: peer.conn, token, whose, asked_at, request, payload };
        out.push(Effect::Tell { reactor, message });
    }

    /// Siblings that have requests of this connection hear that it is gone.
    pub(crate) fn tell_gone(&mut self, peer: PeerId, out: &mut Effects<Effect>) {
        for reactor in self.siblings.others() {
            if self.siblings.known_to.remove(&(peer.conn, reactor)) {
                out.push(Effect::Tell { reactor, message: Message::Gone { conn: peer.conn } });
            }
        }
    }

    /// What this node answers as a whole: `own` is this machine's part.
    pub(crate) fn ask_siblings(&mut self, client: Client, request: &Request, own: Reply, out: &mut Effects<Effect>) {
        // A ping is answered when all are alive: who asks owes a request to any of them.
        let is_whole = matches!(own, Reply::Refused(_) | Reply::Done);
        if self.siblings.is_alone() || is_whole {
            return client.reply(own, Vec::new(), out);
        }
        if self.siblings.questions.is_full() {
            return client.reply(Reply::Refused(Refusal::Busy), Vec::new(), out);
        }
        let mut replies = vec![None; self.siblings.held.len()];
        replies[usize::from(self.siblings.own)] = Some(own);
        let question = self.siblings.questions.insert(Question { client, replies });
        let request = match request {
            // Who greets this one has not greeted them.
            Request::Hello { .. } => &Request::Stat,
            request => request,
        };
        for reactor in self.siblings.others() {
            let message = Message::Question { question, request: Box::new(request.clone()) };
            out.push(Effect::Tell { reactor, message });
        }
    }

    /// Which reactor has which device, as far as this one knows.
    pub(crate) fn reactors(&self) -> Reply {
        let own = self.slots.iter().map(|(device, _)| (*device, self.siblings.own));
        let others = (0_u16..).zip(&self.siblings.held).flat_map(|(reactor, held)| {
            held.iter().filter(|held| held.is_read).map(move |held| (held.device, reactor))
        });
        let mut devices: Vec<(DeviceId, u16)> = own.chain(others).collect();
        devices.sort_unstable();
        devices.dedup_by_key(|(device, _)| *device);
        Reply::Reactors { count: self.siblings.held.len() as u16, devices, passed_on: self.siblings.passed_on }
    }

    /// A connection that is for devices of that reactor has come to it.
    pub(crate) fn on_join(&mut self, now: Instant, peer: PeerId, reactor: u16, host: &str) -> Reply {
        if reactor != self.siblings.own {
            return Reply::Refused(Refusal::Invalid);
        }
        self.hosts.on_hello(now, peer, host);
        Reply::Done
    }

    pub(crate) fn on_told(&mut self, now: Instant, reactor: u16, message: Message, out: &mut Effects<Effect>) {
        let peer_of = |conn| PeerId { conn, sibling: Some(reactor) };
        match message {
            Message::Devices(devices) => self.on_held_elsewhere(now, reactor, devices, out),
            Message::Request { conn, token, whose, asked_at, request, payload } => {
                let client = Client { peer: peer_of(conn), token, whose, asked_at };
                self.on_request(now, client, *request, payload, out);
            }
            Message::Gone { conn } => self.give_up_rebuilds_of(peer_of(conn), out),
            Message::Reply { conn, token, reply, times, payload } => {
                self.siblings.unanswered -= 1;
                out.push(Effect::Reply { peer: PeerId::here(conn), token, reply: *reply, times, payload });
            }
            Message::Question { question, request } => {
                let reply = Box::new(self.own_answer(now, None, &request, out));
                out.push(Effect::Tell { reactor, message: Message::Answer { question, reply } });
            }
            Message::Answer { question, reply } => self.on_part(reactor, question, *reply, out),
        }
    }

    fn on_held_elsewhere(&mut self, now: Instant, reactor: u16, devices: Vec<Held>, out: &mut Effects<Effect>) {
        self.siblings.held[usize::from(reactor)] = devices;
        let lost = self.slots.iter().filter(|(device, _)| self.siblings.is_lower_one_s(*device));
        for slot in lost.map(|(_, slot)| *slot).collect::<Vec<_>>() {
            let mut around = Surroundings { now, config: &self.config, out, fresh: &mut self.fresh };
            self.devices.get_mut(&slot).expect("its id was read").fail_as_twice(&mut around);
            self.slots.retain(|(_, known)| *known != slot);
            self.siblings.on_changed();
            self.look_at_roles(now, out);
        }
    }

    fn on_part(&mut self, reactor: u16, question: Token, reply: Reply, out: &mut Effects<Effect>) {
        let asked = self.siblings.questions.get_mut(question).expect("each sibling answers it once");
        asked.replies[usize::from(reactor)] = Some(reply);
        if asked.replies.iter().all(Option::is_some) {
            let Question { client, replies } = self.siblings.questions.remove(question).expect("just seen");
            client.reply(put_together(usize::from(self.siblings.own), replies), Vec::new(), out);
        }
    }

    /// Asserts that what was passed on and asked adds up.
    pub(crate) fn verify_siblings(&self) {
        assert!(self.siblings.unanswered <= PASSED_ON_MAX);
        assert!(self.siblings.is_alone() || !self.siblings.is_changed, "siblings are told at once");
        let is_open = |question: &Question| question.replies.iter().any(Option::is_none);
        assert!(self.siblings.questions.iter().all(|(_, question)| is_open(question)));
    }
}

/// One answer of the parts that all reactors have given, in the order of their numbers.
fn put_together(own: usize, replies: Vec<Option<Reply>>) -> Reply {
    let mut replies: Vec<Reply> = replies.into_iter().flatten().collect();
    let mut whole = replies[own].clone();
    match &mut whole {
        Reply::Hello { devices, .. } | Reply::Stat { devices } => {
            let of = |reply: Reply| match reply {
                Reply::Hello { devices, .. } | Reply::Stat { devices } => devices,
                _ => Vec::new(),
            };
            *devices = replies.drain(..).flat_map(of).collect();
        }
        Reply::Drives { drives } => {
            let of = |reply| if let Reply::Drives { drives } = reply { drives } else { Vec::new() };
            *drives = replies.drain(..).flat_map(of).collect();
        }
        Reply::Troubles { troubles } => {
            let of = |reply| if let Reply::Troubles { troubles } = reply { troubles } else { Vec::new() };
            *troubles = replies.drain(..).flat_map(of).collect();
        }
        Reply::Heard { ms } => {
            let of = |reply: &Reply| if let Reply::Heard { ms } = reply { *ms } else { 0 };
            *ms = replies.iter().map(of).min().expect("its own is among them");
        }
        Reply::Pong => {}
        // As the one that was asked has it; they all know the same.
        Reply::Reactors { passed_on, .. } => {
            let of = |reply: &Reply| if let Reply::Reactors { passed_on, .. } = reply { *passed_on } else { 0 };
            *passed_on = replies.iter().map(of).sum();
        }
        other => unreachable!("{other:?} is answered by one reactor"),
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_silent_since_any_reactor_has_heard_of_it() {
        let replies = [7, 3, 5].map(|ms| Some(Reply::Heard { ms })).to_vec();
        assert_eq!(put_together(2, replies), Reply::Heard { ms: 3 });
    }
}
