//! One writer at a time: which client may change a volume, over all its paths.
//!
//! A virtual machine that is started twice must not corrupt its disk. So one client has the right to write, whichever of
//! its sessions it uses. It takes it by its first write; connecting and reading are free. Who a client is says [`Client`].
//!
//! States of the right: nobody's -> (a write) -> a client's -> (it has ended, or is quiet, and another one writes) -> that one's.
//!
//! **Another client's write waits** until the one that has the right has nothing under way, and has no session any more or
//! has been quiet for [`QUIET`]. It is refused when that has not come within [`WAIT_MAX`], and at once when who has the right
//! goes on writing although the other one has waited for [`ACTIVE_AFTER`]: a machine that has moved away has stopped by then.
//!
//! **Who has lost the right does not get it back** in a session that it had by then. It has in memory what the disk was
//! before, and would write by that. A session that it opens later is as good as anybody's.
//!
//! Role: beside the controller of the host that serves the volume, one for each disk in it. Sessions are this host's clients',
//! and those of other hosts' ingresses. Of a session that was somewhere else before its ingress tells how long ago it
//! has written: who wrote last has the right, as far as nobody has written here.
//!
//! Invariants
//! 1. What is under way is one client's, and that one has the right.
//! 2. When the right passes on, nothing of the former client is under way, and nothing of its sessions is passed on later.
//! 3. What was asked is passed or refused once, or forgotten with its session.
//!
//! Limits: who asks bounds what waits. Shared volumes: whatever comes is passed, and nobody has the right.

use crate::Mutations;
use holdfast_base::time::earliest;
use holdfast_base::{Effects, Instant, Token};
use holdfast_format::forward::Client;
use std::collections::BTreeMap;
use std::time::Duration;

/// Who has not written for so long, and has nothing under way, may be followed.
pub const QUIET: Duration = Duration::from_secs(5);

/// How long a write waits for the right at most: a little longer than that.
pub const WAIT_MAX: Duration = Duration::from_secs(6);

/// What comes of the other client after a write has waited for so long was not on its way: it goes on writing.
pub const ACTIVE_AFTER: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum SessionId {
    /// Of a client of this host.
    Own(Token),
    /// Of another host's ingress.
    Remote(Token),
}

#[derive(Clone, Debug)]
pub enum WriterEvent {
    /// A session may ask from here on.
    Open {
        session: SessionId,
        client: Client,
        /// When its last write was answered, somewhere.
        wrote_at: Option<Instant>,
        /// Another client has followed it, there.
        is_fenced: bool,
    },
    Close {
        session: SessionId,
    },
    /// It asks for a change.
    Write {
        session: SessionId,
        request: Token,
    },
    /// A change that was passed is answered.
    Done,
    /// Whether everybody may write.
    Share(bool),
    Tick,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum WriterEffect {
    Pass {
        request: Token,
    },
    Refuse {
        request: Token,
    },
    /// The session's client was followed: its ingress is to know.
    Fenced {
        session: SessionId,
    },
    /// For the log: the right has passed on, from a client that had it.
    Passed {
        from: String,
        to: String,
    },
    /// For the log: a client's write is refused. Told once for a client and who has the right.
    Refused {
        client: String,
        holder: String,
    },
}

type Out<'a> = &'a mut Effects<WriterEffect>;

struct Session {
    client: Client,
    /// The right has passed on from its client.
    is_fenced: bool,
}

struct Holder {
    client: Client,
    /// Its last write was asked, or answered.
    wrote_at: Instant,
    /// Here, and not only told of.
    has_written: bool,
}

struct Waiting {
    session: SessionId,
    request: Token,
    since: Instant,
}

/// What is told of it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct WritersView {
    /// Who has the right.
    pub holder: Option<String>,
    /// Who was refused last, and when.
    pub refused: Option<(String, Instant)>,
}

#[derive(Default)]
pub struct Writers {
    now: Instant,
    is_shared: bool,
    sessions: BTreeMap<SessionId, Session>,
    holder: Option<Holder>,
    under_way: usize,
    waiting: Vec<Waiting>,
    /// Client and holder, and when.
    refused: Option<(String, String, Instant)>,
    mutations: Mutations,
}

impl Writers {
    pub fn set_mutations(&mut self, mutations: Mutations) {
        self.mutations = mutations;
    }

    /// Handles one event to completion; everything wanted of the world is in `out` afterwards.
    pub fn handle(&mut self, now: Instant, event: WriterEvent, out: Out) {
        self.now = self.now.max(now);
        match event {
            WriterEvent::Open { session, client, wrote_at, is_fenced } => {
                self.on_open(session, client, (wrote_at, is_fenced), out);
            }
            WriterEvent::Close { session } => {
                self.sessions.remove(&session);
                // Nobody waits for an answer.
                self.waiting.retain(|waiting| waiting.session != session);
            }
            WriterEvent::Write { session, request } => self.on_write(session, request, out),
            WriterEvent::Done => {
                self.under_way = self.under_way.checked_sub(1).expect("what is answered was passed");
                let now = self.now;
                self.holder.iter_mut().for_each(|holder| holder.wrote_at = now);
            }
            WriterEvent::Share(is_shared) => self.on_share(is_shared, out),
            WriterEvent::Tick => {}
        }
        self.settle(out);
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        let first = self.waiting.iter().map(|waiting| waiting.since + WAIT_MAX).min()?;
        let quiet = self.holder.as_ref().filter(|_| self.under_way == 0).map(|holder| holder.wrote_at + QUIET);
        earliest(Some(first), quiet)
    }

    /// Nothing is told to it any more, and nobody waits.
    pub fn is_idle(&self) -> bool {
        self.sessions.is_empty() && self.under_way == 0
    }

    pub fn view(&self) -> WritersView {
        let refused = self.refused.as_ref().map(|(client, _, at)| (client.clone(), *at));
        WritersView { holder: self.holder.as_ref().map(|holder| holder.client.label.clone()), refused }
    }

    fn on_open(
        &mut self,
        session: SessionId,
        client: Client,
        (wrote_at, was_fenced): (Option<Instant>, bool),
        out: Out,
    ) {
        let mut is_fenced = was_fenced && !self.is_shared;
        if let Some(at) = wrote_at.filter(|_| !self.is_shared && !was_fenced) {
            match &mut self.holder {
                Some(holder) if holder.client.is(&client) => holder.wrote_at = holder.wrote_at.max(at),
                Some(holder) if holder.has_written || holder.wrote_at >= at => is_fenced = true,
                // Of whom that is will show.
                _ if self.under_way > 0 => {}
                _ => self.pass_on(client.clone(), at, out),
            }
        }
        if is_fenced {
            out.push(WriterEffect::Fenced { session });
        }
        self.sessions.insert(session, Session { client, is_fenced });
    }

    fn on_write(&mut self, id: SessionId, request: Token, out: Out) {
        if self.is_shared || self.mutations.lets_second_in() {
            return self.pass(request, out);
        }
        let Some(session) = self.sessions.get(&id) else { return out.push(WriterEffect::Refuse { request }) };
        if session.is_fenced {
            let client = session.client.label.clone();
            return self.refuse(client, request, out);
        }
        match &mut self.holder {
            Some(holder) if holder.client.is(&session.client) => {
                holder.client.learn(&session.client);
                self.pass(request, out);
                self.refuse_waiting(ACTIVE_AFTER, out);
            }
            // Who waits came before.
            _ => self.waiting.push(Waiting { session: id, request, since: self.now }),
        }
    }

    fn on_share(&mut self, is_shared: bool, out: Out) {
        if std::mem::replace(&mut self.is_shared, is_shared) == is_shared {
            return;
        }
        // Whoever wrote beside others may not know what they wrote, and who goes on alone begins as everybody does.
        (self.holder, self.refused) = (None, None);
        self.sessions.values_mut().for_each(|session| session.is_fenced = false);
        if is_shared {
            for Waiting { request, .. } in std::mem::take(&mut self.waiting) {
                self.pass(request, out);
            }
        }
    }

    fn pass(&mut self, request: Token, out: Out) {
        self.under_way += 1;
        if let Some(holder) = &mut self.holder {
            (holder.wrote_at, holder.has_written) = (self.now, true);
        }
        out.push(WriterEffect::Pass { request });
    }

    fn refuse(&mut self, client: String, request: Token, out: Out) {
        out.push(WriterEffect::Refuse { request });
        let holder = self.holder.as_ref().map_or(String::new(), |holder| holder.client.label.clone());
        if self.refused.as_ref().is_none_or(|(c, h, _)| (c, h) != (&client, &holder)) {
            out.push(WriterEffect::Refused { client: client.clone(), holder: holder.clone() });
        }
        self.refused = Some((client, holder, self.now));
    }

    /// Those that have waited for so long.
    fn refuse_waiting(&mut self, for_span: Duration, out: Out) {
        let now = self.now;
        for Waiting { session, request, .. } in
            self.waiting.extract_if(.., |waiting| waiting.since + for_span <= now).collect::<Vec<_>>()
        {
            let client = self.sessions[&session].client.label.clone();
            self.refuse(client, request, out);
        }
    }

    fn may_write(&self, session: SessionId) -> bool {
        let session = &self.sessions[&session];
        !session.is_fenced && self.holder.as_ref().is_some_and(|holder| holder.client.is(&session.client))
    }

    fn is_free(&self) -> bool {
        let Some(holder) = &self.holder else { return self.under_way == 0 };
        let is_there = || self.sessions.values().any(|session| holder.client.is(&session.client) && !session.is_fenced);
        self.under_way == 0 && (holder.wrote_at + QUIET <= self.now || !is_there())
    }

    /// Another client has the right from here on.
    fn pass_on(&mut self, client: Client, wrote_at: Instant, out: Out) {
        assert_eq!(self.under_way, 0, "nothing of who had the right is under way");
        let holder = Holder { client: client.clone(), wrote_at, has_written: false };
        let Some(before) = self.holder.replace(holder) else { return };
        for (id, session) in &mut self.sessions {
            if !session.is_fenced && before.client.is(&session.client) && !client.is(&session.client) {
                session.is_fenced = true;
                out.push(WriterEffect::Fenced { session: *id });
            }
        }
        out.push(WriterEffect::Passed { from: before.client.label, to: client.label });
    }

    /// Lets those write that may by now, and refuses those that have waited for too long.
    fn settle(&mut self, out: Out) {
        if self.waiting.is_empty() {
            return;
        }
        if self.is_free() {
            let client = self.sessions[&self.waiting[0].session].client.clone();
            self.pass_on(client, self.now, out);
        }
        while let Some(at) = self.waiting.iter().position(|waiting| self.may_write(waiting.session)) {
            let Waiting { session, request, .. } = self.waiting.remove(at);
            if let Some(holder) = &mut self.holder {
                holder.client.learn(&self.sessions[&session].client);
            }
            self.pass(request, out);
        }
        self.refuse_waiting(WAIT_MAX, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_base::Prng;
    use std::collections::BTreeSet;
    use std::net::{IpAddr, Ipv4Addr};

    fn machine(n: u8) -> Client {
        let address = Some(IpAddr::V4(Ipv4Addr::new(10, 0, 0, n)));
        Client { label: format!("m{n}"), address, ..Client::default() }
    }

    #[derive(Default)]
    struct Scene {
        writers: Writers,
        now: Instant,
        requests: u64,
    }

    /// What became of a write.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    enum Fate {
        Passed,
        Refused,
        Waits,
    }

    impl Scene {
        fn tell(&mut self, event: WriterEvent) -> Vec<WriterEffect> {
            let mut out = Effects::new();
            self.writers.handle(self.now, event, &mut out);
            out.take()
        }

        fn open(&mut self, n: u64, client: Client) -> SessionId {
            let session = SessionId::Own(Token(n));
            self.tell(WriterEvent::Open { session, client, wrote_at: None, is_fenced: false });
            session
        }

        fn ask(&mut self, session: SessionId) -> Fate {
            self.requests += 1;
            let request = Token(self.requests);
            let effects = self.tell(WriterEvent::Write { session, request });
            if effects.contains(&WriterEffect::Pass { request }) {
                Fate::Passed
            } else if effects.contains(&WriterEffect::Refuse { request }) {
                Fate::Refused
            } else {
                Fate::Waits
            }
        }

        /// Asks, and is answered at once where it is passed.
        fn write(&mut self, session: SessionId) -> Fate {
            let fate = self.ask(session);
            if fate == Fate::Passed {
                self.tell(WriterEvent::Done);
            }
            fate
        }

        fn after(&mut self, span: Duration) -> Vec<WriterEffect> {
            self.now = self.now + span;
            self.tell(WriterEvent::Tick)
        }
    }

    fn passed(effects: &[WriterEffect]) -> usize {
        effects.iter().filter(|effect| matches!(effect, WriterEffect::Pass { .. })).count()
    }

    fn refused(effects: &[WriterEffect]) -> usize {
        effects.iter().filter(|effect| matches!(effect, WriterEffect::Refuse { .. })).count()
    }

    #[test]
    fn a_second_client_is_refused_while_the_first_goes_on() {
        let mut scene = Scene::default();
        let (one, two) = (scene.open(1, machine(1)), scene.open(2, machine(2)));
        assert_eq!((scene.write(one), scene.write(two)), (Fate::Passed, Fate::Waits));
        // What was on its way when the other began says nothing.
        scene.now = scene.now + ACTIVE_AFTER / 2;
        assert_eq!(scene.write(one), Fate::Passed);
        assert_eq!(scene.writers.view().refused, None);
        scene.now = scene.now + ACTIVE_AFTER;
        scene.requests += 1;
        let effects = scene.tell(WriterEvent::Write { session: one, request: Token(77) });
        assert_eq!((passed(&effects), refused(&effects)), (1, 1));
        assert!(effects.contains(&WriterEffect::Refused { client: "m2".to_string(), holder: "m1".to_string() }));
        scene.tell(WriterEvent::Done);
        let view = scene.writers.view();
        assert_eq!((view.holder.as_deref(), view.refused.map(|(who, _)| who)), (Some("m1"), Some("m2".to_string())));
    }

    #[test]
    fn one_that_has_ended_is_followed_when_what_it_asked_is_done() {
        let mut scene = Scene::default();
        let (one, two) = (scene.open(1, machine(1)), scene.open(2, machine(2)));
        assert_eq!(scene.ask(one), Fate::Passed);
        scene.tell(WriterEvent::Close { session: one });
        assert_eq!(scene.ask(two), Fate::Waits, "the first one's write may still land");
        let effects = scene.tell(WriterEvent::Done);
        assert_eq!(passed(&effects), 1);
        assert!(effects.contains(&WriterEffect::Passed { from: "m1".to_string(), to: "m2".to_string() }));
    }

    /// As a machine moves: the target is connected and reads, the source stops and stays connected for a while.
    #[test]
    fn a_quiet_one_is_followed_and_its_sessions_write_no_more() {
        let mut scene = Scene::default();
        let (source, target) = (scene.open(1, machine(1)), scene.open(2, machine(2)));
        scene.write(source);
        scene.now = scene.now + Duration::from_millis(50);
        assert_eq!(scene.ask(target), Fate::Waits);
        assert_eq!(scene.writers.next_deadline(), Some(Instant::ZERO + QUIET));
        assert_eq!(passed(&scene.after(QUIET - Duration::from_millis(51))), 0);
        assert_eq!(passed(&scene.after(Duration::from_millis(1))), 1);
        scene.tell(WriterEvent::Done);
        // However long the target is quiet: the source has in memory what the disk was.
        scene.after(10 * QUIET);
        assert_eq!(scene.write(source), Fate::Refused);
        // So it is where the volume is served later, whoever comes first there.
        let mut next = Scene::default();
        let client = machine(1);
        next.tell(WriterEvent::Open { session: source, client, wrote_at: Some(Instant::ZERO), is_fenced: true });
        assert_eq!(next.write(source), Fate::Refused);
        // It may begin anew.
        let again = scene.open(3, machine(1));
        assert_eq!((scene.write(again), scene.write(source)), (Fate::Passed, Fate::Refused));
        assert_eq!(scene.write(target), Fate::Refused);
    }

    #[test]
    fn who_waits_for_one_that_hangs_with_a_write_under_way_is_refused_in_time() {
        let mut scene = Scene::default();
        let (one, two) = (scene.open(1, machine(1)), scene.open(2, machine(2)));
        scene.ask(one);
        assert_eq!(scene.ask(two), Fate::Waits);
        assert_eq!(scene.writers.next_deadline(), Some(scene.now + WAIT_MAX));
        let effects = scene.after(WAIT_MAX);
        assert_eq!((passed(&effects), refused(&effects)), (0, 1));
        assert_eq!(scene.writers.next_deadline(), None);
        // One whose session ends while it waits is forgotten.
        assert_eq!(scene.ask(two), Fate::Waits);
        scene.tell(WriterEvent::Close { session: two });
        assert_eq!((scene.tell(WriterEvent::Done), scene.after(2 * QUIET)), (vec![], vec![]));
    }

    #[test]
    fn all_paths_of_a_client_are_one() {
        let mut scene = Scene::default();
        let unix = |process| Client { machine: Some(7), process: Some(process), ..machine(1) };
        let named = |n| Client { name: Some("db1".to_string()), ..machine(n) };
        let (a, b, tcp) = (scene.open(1, unix(11)), scene.open(2, unix(11)), scene.open(3, machine(1)));
        // By TCP first: from which of the machine's processes is known when one shows.
        assert_eq!([tcp, a, b, tcp].map(|path| scene.write(path)), [Fate::Passed; 4]);
        let other = scene.open(4, unix(12));
        assert_eq!(scene.write(other), Fate::Waits, "another process of the machine is another client");
        let mut scene = Scene::default();
        let (a, b) = (scene.open(1, named(1)), scene.open(2, named(2)));
        assert_eq!([a, b, a].map(|path| scene.write(path)), [Fate::Passed; 3], "by its name, wherever it comes from");
        let other = scene.open(3, Client { name: Some("db2".to_string()), ..machine(1) });
        assert_eq!(scene.write(other), Fate::Waits);
    }

    #[test]
    fn what_is_shared_is_everybodys() {
        let mut scene = Scene::default();
        let (one, two) = (scene.open(1, machine(1)), scene.open(2, machine(2)));
        scene.ask(one);
        assert_eq!(scene.ask(two), Fate::Waits);
        assert_eq!(passed(&scene.tell(WriterEvent::Share(true))), 1);
        assert_eq!((scene.ask(one), scene.ask(two)), (Fate::Passed, Fate::Passed));
        assert_eq!(scene.tell(WriterEvent::Share(false)), []);
        assert_eq!(scene.ask(two), Fate::Waits, "what was under way is done first");
        (0..4).for_each(|_| drop(scene.tell(WriterEvent::Done)));
        assert_eq!(scene.write(one), Fate::Waits);
        assert_eq!(scene.writers.view().holder.as_deref(), Some("m2"));
    }

    /// The volume is at another host from here on: ingresses bring their sessions in any order.
    #[test]
    fn after_a_hand_over_who_wrote_last_has_the_right() {
        for order in [[0, 1], [1, 0]] {
            let mut scene = Scene { now: Instant::ZERO + Duration::from_secs(1_000), ..Scene::default() };
            for n in order {
                let (session, client) = (SessionId::Remote(Token(n)), machine(n as u8));
                let wrote_at = Some(scene.now - Duration::from_secs([60, 2][n as usize]));
                scene.tell(WriterEvent::Open { session, client, wrote_at, is_fenced: false });
            }
            assert_eq!(scene.write(SessionId::Remote(Token(0))), Fate::Refused);
            assert_eq!(scene.write(SessionId::Remote(Token(1))), Fate::Passed);
            // Where somebody has written, what is told of is of before.
            let (session, client) = (SessionId::Remote(Token(2)), machine(2));
            let wrote_at = Some(scene.now);
            scene.tell(WriterEvent::Open { session, client, wrote_at, is_fenced: false });
            assert_eq!(scene.write(session), Fate::Refused);
        }
    }

    #[test]
    fn of_any_clients_one_writes_at_a_time_and_those_that_were_followed_never_again() {
        let (mut passes, mut refusals) = (0, 0);
        for seed in 0..2_000 {
            let mut random = Prng::new(seed);
            let mut scene = Scene::default();
            let mut open: BTreeMap<SessionId, u8> = BTreeMap::new();
            let mut asked: BTreeMap<Token, SessionId> = BTreeMap::new();
            let mut under_way: Vec<u8> = Vec::new();
            let mut writer: Option<u8> = None;
            // Sessions whose client was followed.
            let mut former: BTreeSet<SessionId> = BTreeSet::new();
            for n in 0..300 {
                scene.now = scene.now + Duration::from_millis(random.below(1_500));
                let sessions: Vec<SessionId> = open.keys().copied().collect();
                let effects = match random.below(10) {
                    0 => {
                        let (session, client) = (SessionId::Own(Token(n)), random.below(3) as u8);
                        open.insert(session, client);
                        scene.tell(WriterEvent::Open {
                            session,
                            client: machine(client),
                            wrote_at: None,
                            is_fenced: false,
                        })
                    }
                    1 if !sessions.is_empty() => {
                        let session = *random.pick(&sessions);
                        open.remove(&session);
                        asked.retain(|_, of| *of != session);
                        scene.tell(WriterEvent::Close { session })
                    }
                    2..=5 if !sessions.is_empty() => {
                        let session = *random.pick(&sessions);
                        scene.requests += 1;
                        let request = Token(scene.requests);
                        asked.insert(request, session);
                        scene.tell(WriterEvent::Write { session, request })
                    }
                    6..=8 if !under_way.is_empty() => {
                        under_way.pop();
                        scene.tell(WriterEvent::Done)
                    }
                    _ => scene.tell(WriterEvent::Tick),
                };
                for effect in effects {
                    match effect {
                        WriterEffect::Pass { request } => {
                            let session = asked.remove(&request).expect("once, of a session that is there");
                            let client = open[&session];
                            if writer.replace(client).is_some_and(|before| before != client) {
                                let left = open.iter().filter(|(_, of)| **of != client).map(|(session, _)| *session);
                                former.extend(left.filter(|session| scene.writers.sessions[session].is_fenced));
                            }
                            assert!(!former.contains(&session), "seed {seed}: {client} writes by what was");
                            assert!(under_way.iter().all(|of| *of == client), "seed {seed}: two write at once");
                            under_way.push(client);
                            passes += 1;
                        }
                        WriterEffect::Refuse { request } => {
                            asked.remove(&request).expect("once, of a session that is there");
                            refusals += 1;
                        }
                        WriterEffect::Fenced { .. } | WriterEffect::Passed { .. } | WriterEffect::Refused { .. } => {}
                    }
                }
                let late = scene.writers.waiting.iter().any(|waiting| waiting.since + WAIT_MAX <= scene.now);
                assert!(!late, "seed {seed}: somebody waits for longer than that");
            }
        }
        assert!(passes > 10_000 && refusals > 1_000, "{passes} passed, {refusals} refused");
    }
}
