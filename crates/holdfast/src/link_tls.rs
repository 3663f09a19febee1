//! The door of a node or a host, where others come and show who they are.
//!
//! Role: says who stands at the door, and who is let in. What they send is the business of their `Framed` connection.
//!
//! States of a connection at a door: at the door → in (its handshake is done, or without TLS its first message has
//! come, see [`Door::let_in`]) or gone (refused, overdue, or pushed out by newer ones).
//!
//! Limits: at most [`HANDSHAKES_MAX`] connections at the door, each for [`HANDSHAKE_MAX`] and with what
//! `tls::HANDSHAKE_BYTES_MAX` lets it send; lines of log as [`Telling`] allows. Where the door is full the
//! oldest of the source that has most at it is pushed out: real hosts are through within milliseconds, and who only
//! holds a place is not.

use crate::logger;
use holdfast_base::{Instant, Token};
use holdfast_host::{Handshakes, Room, Source, Taken, Telling};
use holdfast_runtime::framed::Secured;
use holdfast_runtime::tls::TlsError;
use holdfast_runtime::tls::link::ServerTls;
use std::time::Duration;

/// How long a handshake may take: a few round trips, and what a busy host adds.
pub const HANDSHAKE_MAX: Duration = Duration::from_secs(5);

/// Both lanes of 256 hosts that come at once; 128 MiB at the very worst.
pub const HANDSHAKES_MAX: usize = 512;

/// What is said to who is pushed out.
pub const PUSHED_OUT: &str = "too many connections have not shown what they are, most of them from its address, and it is the \
                              oldest of these; check what it is that connects";

/// Where hosts come to a node or to another host, and show who they are.
pub struct Door {
    /// Where links have TLS.
    tls: Option<ServerTls>,
    waiting: Handshakes,
    telling: Telling,
}

impl Door {
    /// A door with nobody at it, and room for some.
    pub fn new(tls: Option<ServerTls>, room: usize) -> Door {
        let waiting = Handshakes::new(room.min(HANDSHAKES_MAX));
        Door { tls, waiting, telling: Telling::default() }
    }

    /// This side of a session, where links have TLS.
    pub fn begin(&self) -> Result<Option<Box<Secured>>, TlsError> {
        let Some(tls) = &self.tls else { return Ok(None) };
        Ok(Some(Secured::new(tls.accept()?, tls.revoked().clone())))
    }

    /// Somebody has come, and has until then; gives who is pushed out for that.
    pub fn come(&mut self, who: Token, source: Source, until: Instant) -> Option<Token> {
        self.waiting.come(who, source, until)
    }

    /// Somebody is not at the door any more: in, or gone. Whether it was.
    pub fn let_in(&mut self, who: Token) -> bool {
        self.waiting.leave(who)
    }

    /// The oldest that should be in by now, and is not.
    pub fn overdue(&mut self, now: Instant) -> Option<Token> {
        self.waiting.overdue(now)
    }

    /// What is wrong with one that is overdue.
    pub fn lateness(&self) -> String {
        let seconds = HANDSHAKE_MAX.as_secs();
        let what = if self.tls.is_some() { "finished its TLS handshake, and spoken" } else { "said what it is" };
        format!("it has not {what} within {seconds} s; check what it is that connects")
    }

    /// When the oldest is overdue.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.waiting.next_deadline()
    }

    /// Why somebody who has shown what it is finds no room among those that are in.
    pub fn why_no_room(max: usize, source: Source, others: impl Iterator<Item = Source>) -> Option<String> {
        let taken = Taken::of(source, others);
        Room { max, kept_for_local: 0 }.admits(source, taken).err()?;
        let Taken { own, all, .. } = taken;
        Some(format!("{all} connections are open, {own} of them from {source}, and what is left is kept for others"))
    }

    /// Tells who was refused, and why; not each time where that happens all the time.
    pub fn tell(&mut self, now: Instant, who: &str, why: &str) {
        let (untold, is_told) = self.telling.come(now);
        if let Some(untold) = untold {
            logger::warn(format_args!("refused {untold} more connections since, untold"));
        }
        if is_told {
            logger::warn(format_args!("refused a connection from {who}: {why}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grid::certs::Certificates;
    use holdfast_base::{GridId, NodeId};
    use holdfast_runtime::pki::Role;

    #[test]
    fn a_full_door_pushes_out_the_oldest_and_who_is_late_is_named_once() {
        let temp = tempfile::tempdir().unwrap();
        let certificates = Certificates::in_dir(&temp.path().join("tls"), GridId(7));
        certificates.make_authority().unwrap();
        let role = Role::Node(NodeId(1));
        certificates.issue(std::slice::from_ref(&role)).unwrap();
        let tls = ServerTls::load(&certificates.paths(&role), GridId(7), role.clone()).unwrap();
        let mut door = Door::new(Some(tls), 2 * HANDSHAKES_MAX);
        let source = Source::of(Some(([10, 0, 0, 1], 9).into()));
        let at = |n: u64| Instant::ZERO + Duration::from_millis(n);
        let count = HANDSHAKES_MAX as u64;
        for n in 0..count {
            assert_eq!(door.come(Token(n), source, at(1000 + n)), None);
        }
        door.let_in(Token(0));
        assert_eq!(door.come(Token(count), source, at(1000 + count)), None);
        assert_eq!(door.come(Token(count + 1), source, at(1001 + count)), Some(Token(1)));
        assert_eq!(door.next_deadline(), Some(at(1002)));
        assert_eq!(door.overdue(at(1001)), None);
        assert_eq!(door.overdue(at(1003)), Some(Token(2)));
        assert_eq!(door.overdue(at(1003)), Some(Token(3)));
        assert_eq!(door.overdue(at(1003)), None);
    }
}
