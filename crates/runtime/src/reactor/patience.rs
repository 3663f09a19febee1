//! Connections whose peer may stop reading for as long as it likes, while its kernel answers.
//!
//! Role: the kernel ends a connection when what was sent is acknowledged by nothing for `TCP_USER_TIMEOUT`, and counts a
//! peer whose window is closed among those, though it answers every probe. Where the application asks for patience that
//! time is moved on as long as probes are answered. The kernel stays the judge: it probes at the latest when the time is
//! over, and a peer that answers nothing for [`super::Config::peer_timeout`] and one pace of these looks is gone.
//!
//! Invariants
//! 1. A connection is looked at only while it has sent what is not acknowledged, so that an idle reactor sleeps.
//! 2. Time is added only by what has been heard since the last look, and taken back when the peer reads again.

use super::conn::State;
use super::table::index_of;
use super::{ConnId, Io, socket};
use holdfast_base::Instant;
use std::time::Duration;

/// Looks in one `peer_timeout`: several, so that answers are seen before the kernel's time is over.
const LOOKS_PER_TIMEOUT: u32 = 4;

/// What is known of a patient connection.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Patience {
    /// It is in the list of those to be looked at.
    is_watched: bool,
    /// Since when the peer takes nothing, its window being closed.
    closed_since: Option<Instant>,
}

impl Patience {
    /// The timeout that the kernel should have by now; none where it stays what it is.
    fn judge(&mut self, now: Instant, state: &SendState, timeout: Duration) -> Option<Duration> {
        if !state.window_is_closed() {
            return self.closed_since.take().map(|_| timeout);
        }
        let since = *self.closed_since.get_or_insert(now);
        // A peer that has not been heard of for so long is left to the kernel's judgement.
        let left = timeout.checked_sub(state.silence)?;
        // The kernel counts from when it found the window closed: up to one pace before that was seen here.
        Some(now.since(since) + left + timeout / LOOKS_PER_TIMEOUT)
    }
}

/// How what was sent fares.
#[derive(Clone, Copy, Debug)]
pub(super) struct SendState {
    /// Segments sent and not acknowledged.
    pub in_flight: u32,
    /// Bytes that the kernel has taken and not sent.
    pub unsent_bytes: u32,
    /// What the peer last said that it has room for.
    pub window_bytes: u32,
    /// Since the peer last acknowledged anything.
    pub silence: Duration,
}

impl SendState {
    fn is_done(&self) -> bool {
        self.in_flight == 0 && self.unsent_bytes == 0
    }

    /// Nothing can be sent but probes, or copies of what the peer had no room for.
    fn window_is_closed(&self) -> bool {
        !self.is_done() && (self.in_flight == 0 || self.window_bytes == 0)
    }
}

impl Io {
    /// Lets the peer of a TCP connection stop reading for as long as it likes: the connection ends only when its machine
    /// answers nothing. For peers whose slowness nobody but themselves has to bear.
    pub fn be_patient(&mut self, conn: ConnId) {
        if let Some((_, c)) = self.known(conn) {
            c.patience.get_or_insert_default();
        }
    }

    /// Bytes are given to the kernel: from here on the connection is looked at.
    pub(super) fn watch(&mut self, index: u32) {
        let Some(patience) = &mut self.conns.at(index).patience else { return };
        if !std::mem::replace(&mut patience.is_watched, true) {
            self.watched.push_back((crate::clock::now() + self.look_pace(), self.conns.token_at(index)));
        }
    }

    fn look_pace(&self) -> Duration {
        self.config.peer_timeout / LOOKS_PER_TIMEOUT
    }

    /// Looks at those whose turn it is.
    pub(super) fn look_at_watched(&mut self, now: Instant) {
        let timeout = self.config.peer_timeout;
        while let Some((_, token)) = self.watched.pop_front_if(|(at, _)| *at <= now) {
            let Some(c) = self.conns.get_mut(token).filter(|c| c.state != State::Dead) else { continue };
            let (Some(socket), Some(patience)) = (&c.socket, &mut c.patience) else { continue };
            patience.is_watched = false;
            // One that can't tell is judged by the kernel alone.
            let Ok(state) = socket::send_state(socket) else { continue };
            if let Some(timeout) = patience.judge(now, &state, timeout) {
                socket::set_peer_timeout(socket, timeout);
            }
            if c.is_sending || !state.is_done() {
                self.watch(index_of(token));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(16);

    fn at(seconds: u64) -> Instant {
        Instant::ZERO + Duration::from_secs(seconds)
    }

    fn state(in_flight: u32, unsent_bytes: u32, window_bytes: u32, silence: u64) -> SendState {
        SendState { in_flight, unsent_bytes, window_bytes, silence: Duration::from_secs(silence) }
    }

    #[test]
    fn a_closed_window_gets_time_while_probes_are_answered_and_a_moving_peer_none() {
        let mut patience = Patience::default();
        let seconds = |timeout: Option<Duration>| timeout.map(|t| t.as_secs());
        assert_eq!(patience.judge(at(1), &state(3, 100, 500, 0), TIMEOUT), None);
        assert_eq!(patience.judge(at(2), &state(3, 0, 500, 60), TIMEOUT), None, "lost data is the kernel's to judge");
        assert_eq!(seconds(patience.judge(at(4), &state(0, 100, 0, 1), TIMEOUT)), Some(16 - 1 + 4));
        assert_eq!(seconds(patience.judge(at(100), &state(0, 100, 0, 3), TIMEOUT)), Some(96 + 16 - 3 + 4));
        assert_eq!(seconds(patience.judge(at(104), &state(2, 100, 0, 7), TIMEOUT)), Some(100 + 16 - 7 + 4));
        assert_eq!(patience.judge(at(200), &state(0, 100, 0, 17), TIMEOUT), None, "nothing is heard of it any more");
        assert_eq!(patience.judge(at(210), &state(1, 0, 400, 0), TIMEOUT), Some(TIMEOUT), "it reads again");
        assert_eq!(patience.judge(at(220), &state(0, 0, 0, 0), TIMEOUT), None);
    }
}
