//! Clients that contend for the right to write, and what must hold of it: as [`super::Street`] has it beside controllers.

use super::{Asker, PortalPlan, Street, VOLUME, WAKE};
use holdfast_base::{BlockError, BlockReply, BlockRequest, Effects, Instant, Token};
use holdfast_format::portal::Client as Identity;
use holdfast_portal::{DeskEvent, SessionId, WriterEffect, WriterEvent, Writers};
use std::collections::BTreeSet;
use std::time::Duration;

/// A change that waits until its client may write.
pub(super) struct Held {
    pub(super) session: SessionId,
    pub(super) asker: Asker,
    pub(super) request: BlockRequest,
}

/// A change that a controller was given: whose it is, and by which session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Given {
    pub(super) client: usize,
    pub(super) session: Token,
}

impl Street {
    pub(super) fn writers(&mut self, host: usize, event: WriterEvent) {
        let mut out = Effects::new();
        let now = self.now();
        self.shells[host].writers.handle(now, event, &mut out);
        if let Some(due) = self.shells[host].writers.next_deadline() {
            self.world.wake_at(due.max(now), WAKE);
        }
        for effect in out.take() {
            match effect {
                WriterEffect::Pass { request } => {
                    let held = self.shells[host].held.remove(request).expect("it was held");
                    self.on_given(host, held);
                }
                WriterEffect::Refuse { request } => {
                    let Held { asker, request, .. } = self.shells[host].held.remove(request).expect("it was held");
                    let (token, op) = (request.token, request.op);
                    self.tell_asker(host, asker, BlockReply { token, result: Err(BlockError::NotWriter) }, token, op);
                }
                WriterEffect::Fenced { session: SessionId::Own(session) } => {
                    self.shells[host].portal.note_fenced(session)
                }
                WriterEffect::Fenced { session: SessionId::Guest(guest) } => {
                    self.desk(host, DeskEvent::Fenced { guest });
                }
                WriterEffect::Passed { .. } => self.outcome.passed_on += 1,
                WriterEffect::Refused { .. } => {}
            }
        }
    }

    /// What changes the volume waits until its client may write.
    pub(super) fn enter(&mut self, host: usize, session: SessionId, asker: Asker, request: BlockRequest) {
        if !request.op.changes() || self.shells[host].controller.is_none() {
            return self.submit(host, asker, request);
        }
        let request = self.shells[host].held.insert(Held { session, asker, request });
        self.writers(host, WriterEvent::Write { session, request });
    }

    /// What a client is at the end that it connects to, whichever host serves it.
    pub(super) fn client_behind(&self, host: usize, session: SessionId) -> (usize, Token) {
        let label = match session {
            SessionId::Own(token) => return (*self.sessions.get(Token(token.0 / 16)).expect("it was made"), token),
            SessionId::Guest(guest) => &self.shells[host].clients_of[&guest].0.label,
        };
        let (client, session) = label.split_once(' ').expect("as it was made");
        (client.parse().expect("a number"), Token(session.parse().expect("a number")))
    }

    /// Nothing of two clients is under way at once.
    pub(super) fn on_given(&mut self, host: usize, held: Held) {
        let (client, session) = self.client_behind(host, held.session);
        let mut others = self.shells[host].given.values().filter(|given| given.client != client);
        if let Some(other) = others.next().copied().filter(|_| self.plan.contend.is_some()) {
            self.fail(format!("client {client} writes while a write of another is under way: {other:?}"));
        }
        let number = self.shells[host].next_number;
        self.shells[host].given.insert(number, Given { client, session });
        self.submit(host, held.asker, held.request);
    }

    /// Nothing is done for a session that had written when another client followed, where it was served then.
    pub(super) fn on_changed(&mut self, host: usize, Given { client, session }: Given) {
        if self.plan.contend.is_none() {
            return;
        }
        if self.writer.replace(client).is_some_and(|before| before != client) {
            let shell = &self.shells[host];
            let guests = shell.guests.iter().map(|guest| self.client_behind(host, SessionId::Guest(*guest)).1);
            let served: BTreeSet<Token> = shell
                .portal
                .sessions_of(VOLUME)
                .filter(|session| shell.portal.is_here(*session))
                .chain(guests)
                .collect();
            let lost = self.wrote.iter().filter(|(of, session)| *of != client && served.contains(session));
            self.followed.extend(lost);
        }
        self.wrote.insert((client, session));
        if self.followed.contains(&(client, session)) {
            self.fail(format!("client {client} writes in session {session:?} although another one followed it"));
        }
    }

    /// What waited for the right to write has no controller any more; the next one knows nobody.
    pub(super) fn drop_held(&mut self, host: usize) {
        let shell = &mut self.shells[host];
        shell.writers = writers_of(&self.plan);
        shell.given.clear();
        for token in shell.held.tokens() {
            let Held { asker, request, .. } = self.shells[host].held.remove(token).expect("listed");
            let reply = BlockReply { token: request.token, result: Err(BlockError::Deposed) };
            self.tell_asker(host, asker, reply, request.token, request.op);
        }
    }

    /// The volume serves here: so do its portal's sessions.
    pub(super) fn open_own(&mut self, host: usize) {
        let own: Vec<Token> = self.shells[host].portal.sessions_of(VOLUME).collect();
        for session in own {
            let portal = &self.shells[host].portal;
            let (wrote_at, is_fenced) = (portal.wrote_at(session), portal.is_fenced(session));
            let number = *self.sessions.get(Token(session.0 / 16)).expect("it was made");
            let client = identity(number, session);
            self.writers(host, WriterEvent::Open { session: SessionId::Own(session), client, wrote_at, is_fenced });
        }
    }

    /// Gives what had waited for the right to write.
    pub(super) fn close_writer(&mut self, host: usize, session: SessionId) -> Vec<Held> {
        let held = self.shells[host].held.iter().filter(|(_, held)| held.session == session);
        let gone: Vec<Token> = held.map(|(token, _)| token).collect();
        self.writers(host, WriterEvent::Close { session });
        gone.into_iter().filter_map(|token| self.shells[host].held.remove(token)).collect()
    }

    /// Who asks. Where clients contend one has its turn for a while, and now and then another one comes between.
    pub(super) fn whose_turn(&mut self) -> usize {
        let any = self.prng.below(self.clients.len() as u64) as usize;
        let Some(contend) = self.plan.contend else { return any };
        if self.turn.1 <= self.now() {
            self.turn = (any, self.now() + Duration::from_millis(self.prng.between(500, 9_000)));
        }
        if self.prng.chance(contend) { any } else { self.turn.0 }
    }
}

pub(super) fn writers_of(plan: &PortalPlan) -> Writers {
    let mut writers = Writers::default();
    writers.set_mutations(plan.mutations);
    writers.handle(Instant::ZERO, WriterEvent::Share(plan.contend.is_none()), &mut Effects::new());
    writers
}

/// A client is a machine; its label tells the session, too.
pub(super) fn identity(client: usize, session: Token) -> Identity {
    Identity { label: format!("{client} {}", session.0), machine: Some(client as u128), ..Identity::default() }
}
