//! Clients that contend for the right to write, and what must hold of it at the volume.

use super::MultiHost;
use holdfast_base::Token;
use holdfast_format::forward::Client as Association;
use holdfast_host::SessionId;
use holdfast_host::observed::Observation;
use std::collections::BTreeSet;
use std::time::Duration;

/// A change that a volume was given: whose it is, and by which session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Given {
    pub(super) client: usize,
    pub(super) session: Token,
}

impl MultiHost {
    /// Looks at what has passed between the parts of a host.
    pub(super) fn note_observed(&mut self, host: usize) {
        let Some(at) = self.shells[host].machine else { return };
        let observed = self.world.machine_mut(at).map(|machine| machine.host.take_observed()).unwrap_or_default();
        for observation in observed {
            match observation {
                Observation::Given { session, requester, token } => {
                    if let Some((client, session)) = self.client_behind(host, session) {
                        self.check_alone(host, client);
                        self.shells[host].given.insert((requester, token), Given { client, session });
                    }
                }
                Observation::Answered { requester, token, is_done } => {
                    if let Some(given) = self.shells[host].given.remove(&(requester, token)).filter(|_| is_done) {
                        self.on_changed(host, given);
                    }
                }
                Observation::PassedOn => self.outcome.passed_on += 1,
                Observation::Caught { requests } => self.outcome.caught += requests as u64,
                Observation::Turned { is_dropped: true } => self.outcome.dropped += 1,
                Observation::Turned { is_dropped: false } => self.outcome.released += 1,
            }
        }
    }

    /// What a client is at the end that it connects to, whichever host serves it; nothing where the session is gone.
    fn client_behind(&self, host: usize, session: SessionId) -> Option<(usize, Token)> {
        let of = self.host(host)?;
        match session {
            SessionId::Own(token) => {
                let to = of.name_of(token)?;
                Some((*self.sessions.get(Token(to.0 / 16)).expect("it was made"), to))
            }
            SessionId::Remote(remote) => {
                let (client, session) = of.association_of(remote)?.label.split_once(' ').expect("as it was made");
                Some((client.parse().expect("a number"), Token(session.parse().expect("a number"))))
            }
        }
    }

    /// Nothing of two clients is under way at once.
    fn check_alone(&mut self, host: usize, client: usize) {
        let mut others = self.shells[host].given.values().filter(|given| given.client != client);
        if let Some(other) = others.next().copied().filter(|_| self.plan.contend.is_some()) {
            self.fail(format!("client {client} writes while a write of another is under way: {other:?}"));
        }
    }

    /// Nothing is done for a session that had written when another client followed, where it was served then.
    fn on_changed(&mut self, host: usize, Given { client, session }: Given) {
        if self.plan.contend.is_none() {
            return;
        }
        if self.writer.replace(client).is_some_and(|before| before != client)
            && let Some(of) = self.host(host)
        {
            let remotes = of.remote_sessions().into_iter();
            let remotes = remotes.filter_map(|remote| Some(self.client_behind(host, SessionId::Remote(remote))?.1));
            let served: BTreeSet<Token> = of.bound_sessions().into_iter().chain(remotes).collect();
            let lost: Vec<(usize, Token)> =
                self.wrote.iter().filter(|(of, session)| *of != client && served.contains(session)).copied().collect();
            self.followed.extend(lost);
        }
        self.wrote.insert((client, session));
        if self.followed.contains(&(client, session)) {
            self.fail(format!("client {client} writes in session {session:?} although another one followed it"));
        }
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

/// A client is a machine; its label tells the session, too.
pub(super) fn identity(client: usize, session: Token) -> Association {
    Association { label: format!("{client} {}", session.0), machine: Some(client as u128), ..Association::default() }
}
