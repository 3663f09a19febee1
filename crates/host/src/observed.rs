//! Happenings between the parts of a host, for checks of the simulator.

use crate::requests::Requester;
use crate::writers::SessionId;
use holdfast_base::{RequestToken, Token};

/// A change on its way to a controller. A requester and a token name one that is under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Observation {
    /// Its client may write: it is given to the volume.
    Given { session: SessionId, requester: Requester, token: RequestToken },
    /// The volume has answered.
    Answered { requester: Requester, token: RequestToken, is_done: bool },
    /// The right to write has passed on.
    PassedOn,
    /// Filters held so many requests when they were drained, or dropped with a controller that is gone.
    Caught { requests: usize },
    /// One that waited for its turn was dropped, or given to its volume since that is about to go.
    Turned { is_dropped: bool },
}

#[derive(Debug, Default)]
pub(crate) struct Observed {
    /// Since they were last taken; nothing where nobody asked for them.
    noted: Option<Vec<Observation>>,
    /// How often controllers were given an event.
    pub entered: u64,
}

impl Observed {
    pub fn note(&mut self, observation: Observation) {
        if let Some(noted) = &mut self.noted {
            noted.push(observation);
        }
    }
}

impl crate::Host {
    /// Notes what happens from here on, for [`crate::Host::take_observed`].
    pub fn observe(&mut self) {
        self.observed.noted.get_or_insert_default();
    }

    /// Since the last call.
    pub fn take_observed(&mut self) -> Vec<Observation> {
        self.observed.noted.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// How often controllers were given an event.
    pub fn entered(&self) -> u64 {
        self.observed.entered
    }

    /// The front end's names of sessions that are bound to a volume here.
    pub fn bound_sessions(&self) -> Vec<Token> {
        self.sessions.iter().filter(|(_, session)| session.at().is_some()).map(|(_, session)| session.to()).collect()
    }

    /// The front end's name of a session.
    pub fn name_of(&self, session: Token) -> Option<Token> {
        self.sessions.get(session).map(crate::sessions::Session::to)
    }
}
