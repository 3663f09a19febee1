//! Who may come to a port, and who has to go: one policy for clients of volumes, for hosts at a node, and for hosts at
//! a host.
//!
//! Role: decides, and has no connections. Who comes stands in line ([`Handshakes`]) until it has shown what it is, and
//! then takes a place ([`Room`]). Both are shared by sources, so that one machine that comes a thousand times is in
//! nobody's way but its own.
//!
//! Invariants
//! 1. Who stands in line is pushed out only by its own source's newcomers, while no other source has as many in line.
//! 2. No source has more places than are left free: one alone gets half of them, two a third each, and there is always
//!    room for one more.
//! 3. What is kept for this machine's administrator nobody else gets.
//! 4. All places together need fewer descriptors than the process may have, by what its own links, disks and control
//!    need.

use crate::homes::FRONT;
use holdfast_base::{Instant, Token};
use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::Duration;

/// Those in line that belong to this machine's administrator, and are never pushed out: tools that come at the same
/// moment.
const LOCAL_HANDSHAKES_KEPT: usize = 32;

/// Whose connections count together.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Source {
    /// A unix socket of this machine.
    Local,
    /// An address; of IPv6 its network of 64 bits, since one machine has as many addresses in that as it likes.
    At(IpAddr),
}

impl Source {
    /// Of a connection from that address, or by a unix socket.
    pub fn of(address: Option<SocketAddr>) -> Source {
        match address.map(|address| address.ip().to_canonical()) {
            None => Source::Local,
            Some(IpAddr::V6(ip)) => Source::At(IpAddr::V6(Ipv6Addr::from_bits(ip.to_bits() & !u128::from(u64::MAX)))),
            Some(ip) => Source::At(ip),
        }
    }
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Source::Local => f.write_str("this machine"),
            Source::At(IpAddr::V6(ip)) => write!(f, "{ip}/64"),
            Source::At(ip) => write!(f, "{ip}"),
        }
    }
}

/// Connections that have not shown yet what they are, oldest first, and until when they have to.
#[derive(Debug)]
pub struct Handshakes {
    max: usize,
    line: VecDeque<(Token, Source, Instant)>,
    counts: BTreeMap<Source, usize>,
}

impl Handshakes {
    pub fn new(max: usize) -> Handshakes {
        Handshakes { max, line: VecDeque::new(), counts: BTreeMap::new() }
    }

    /// Somebody has come, and has until then; gives who is pushed out for that: the oldest of the source that has most
    /// in line.
    pub fn come(&mut self, who: Token, source: Source, until: Instant) -> Option<Token> {
        self.line.push_back((who, source, until));
        *self.counts.entry(source).or_default() += 1;
        if self.line.len() <= self.max {
            return None;
        }
        let is_kept = |(source, count): (&Source, &usize)| *source == Source::Local && *count <= LOCAL_HANDSHAKES_KEPT;
        let most = self.counts.iter().filter(|of| !is_kept(*of)).map(|(_, count)| *count).max()?;
        let goes = |source: &Source| self.counts[source] == most && !is_kept((source, &most));
        let (who, ..) = *self.line.iter().find(|(_, source, _)| goes(source))?;
        self.leave(who);
        Some(who)
    }

    /// Somebody is not in line any more: through, or gone. Whether it was.
    pub fn leave(&mut self, who: Token) -> bool {
        let Some(at) = self.line.iter().position(|(waiting, ..)| *waiting == who) else { return false };
        let (_, source, _) = self.line.remove(at).expect("just seen");
        let count = self.counts.get_mut(&source).expect("whoever is in line is counted");
        *count -= 1;
        if *count == 0 {
            self.counts.remove(&source);
        }
        true
    }

    /// The oldest that should be through by now, and is not; it is in line no more.
    pub fn overdue(&mut self, now: Instant) -> Option<Token> {
        let (who, _, until) = *self.line.front()?;
        (until <= now).then(|| {
            self.leave(who);
            who
        })
    }

    /// When the oldest is overdue.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.line.front().map(|(_, _, until)| *until)
    }
}

/// Refusals that are told of in [`TOLD_SPAN`]: enough to see what happens, too few to fill a disk.
const TOLD_MAX: u32 = 30;
const TOLD_SPAN: Duration = Duration::from_secs(60);

/// Which refusals are told of: not each, where they come all the time.
#[derive(Debug)]
pub struct Telling {
    told: u32,
    untold: u64,
    again_at: Instant,
}

impl Default for Telling {
    fn default() -> Telling {
        Telling { told: 0, untold: 0, again_at: Instant::ZERO }
    }
}

impl Telling {
    /// There is another one. Gives how many were left untold, where it is time to say that, and whether this one is told of.
    pub fn come(&mut self, now: Instant) -> (Option<u64>, bool) {
        let mut untold = None;
        if self.again_at <= now {
            untold = Some(self.untold).filter(|count| *count > 0);
            *self = Telling { again_at: now + TOLD_SPAN, ..Telling::default() };
        }
        let is_told = self.told < TOLD_MAX;
        if is_told {
            self.told += 1;
        } else {
            self.untold += 1;
        }
        (untold, is_told)
    }
}

/// Places that whoever has them may keep.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Room {
    pub max: usize,
    /// Of these, for [`Source::Local`] alone.
    pub kept_for_local: usize,
}

/// Who has places in a room.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Taken {
    /// By the source that wants another one.
    pub own: usize,
    pub local: usize,
    pub all: usize,
}

impl Taken {
    /// Of these places, as the source sees them.
    pub fn of(source: Source, places: impl Iterator<Item = Source>) -> Taken {
        places.fold(Taken::default(), |taken, of| Taken {
            own: taken.own + usize::from(of == source),
            local: taken.local + usize::from(of == Source::Local),
            all: taken.all + 1,
        })
    }
}

/// Why there is no place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Full {
    /// None is left.
    All,
    /// The rest is kept for others.
    Share,
}

impl Room {
    pub fn admits(&self, source: Source, taken: Taken) -> Result<(), Full> {
        if source == Source::Local {
            return if taken.all < self.max { Ok(()) } else { Err(Full::All) };
        }
        match self.free(taken) {
            0 => Err(Full::All),
            free if taken.own >= free => Err(Full::Share),
            _ => Ok(()),
        }
    }

    /// Places that anybody may have.
    pub fn free(&self, taken: Taken) -> usize {
        let in_reserve = taken.local.min(self.kept_for_local);
        (self.max - self.kept_for_local).saturating_sub(taken.all - in_reserve)
    }
}

/// How a host divides its descriptors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HostPlaces {
    /// Clients that have opened an export.
    pub sessions: Room,
    /// Clients that have not yet, at the reactor that all come to; and at another one, where they finish.
    pub handshakes: usize,
    pub handshakes_elsewhere: usize,
    /// Connections of other hosts to one reactor, with those in their handshake.
    pub links: usize,
    /// Connections of each port that are closed already, but still have to send what is queued.
    pub closing: usize,
    /// Connections of each way to the HTTP interface, the socket of this machine and the port.
    pub http: usize,
}

/// Clients of a host at a time: as many virtual machines as a large rack runs.
const SESSIONS_MAX: usize = 4096;

/// An eighth is kept for the unix socket, by which this machine's guests and its administrator come.
const LOCAL_KEPT_PART: usize = 8;

/// Clients that come at the same moment after an outage; each has a session of some KiB, and with TLS some tens.
const CLIENT_HANDSHAKES_MAX: usize = 1024;

/// Two of each of 128 hosts (an old one may not have ended yet), and as many in their handshake.
const HOST_LINKS_MAX: usize = 512;

/// However few descriptors there are: two of one host.
const LINKS_MIN: usize = 2;

/// Ended connections that linger for two seconds each.
const CLOSING_MAX: usize = 512;

/// Of programs and browsers that look after a grid, and ask by several connections each.
const HTTP_MAX: usize = 256;
const HTTP_MIN: usize = 4;

/// Ways to the HTTP interface; at each one more may wait for a place.
const HTTP_WAYS: usize = 2;

/// What a host needs for itself: two lanes to each of 256 nodes, connections to 128 hosts, 256 control connections,
/// metadata.
const HOST_OWN_MAX: usize = 1024;

/// What a reactor of a node needs for itself: devices and what looks after them, and 256 nodes that it asks.
const NODE_OWN_MAX: usize = 512;

/// Peers of a reactor of a node at a time: two lanes of 2,000 reactors of hosts.
const NODE_PEERS_MAX: usize = 4096;

impl HostPlaces {
    /// Of so many descriptors, for so many reactors; of a small number each gets a part.
    pub fn of(descriptors: usize, reactors: usize) -> HostPlaces {
        let own = (HOST_OWN_MAX * reactors).min(descriptors * 3 / 8);
        let links = HOST_LINKS_MAX.min(descriptors / 16 / reactors).max(LINKS_MIN);
        let closing = CLOSING_MAX.min(descriptors / 32 / reactors);
        let http = HTTP_MAX.min(descriptors / 32).max(HTTP_MIN);
        // Clients come to one port, and other hosts to one of each reactor.
        let others = own + links * reactors + (1 + reactors) * closing + HTTP_WAYS * (http + 1);
        let clients = descriptors.saturating_sub(others);
        let handshakes = CLIENT_HANDSHAKES_MAX.min(clients / 8).max(1);
        let handshakes_elsewhere = (handshakes / reactors).max(1);
        let max = SESSIONS_MAX.min(clients.saturating_sub(handshakes + handshakes_elsewhere * (reactors - 1)));
        let sessions = Room { max, kept_for_local: max / LOCAL_KEPT_PART };
        HostPlaces { sessions, handshakes, handshakes_elsewhere, links, closing, http }
    }

    /// As the reactor of that number has them.
    pub fn at(self, reactor: usize) -> HostPlaces {
        let handshakes = if reactor == FRONT { self.handshakes } else { self.handshakes_elsewhere };
        HostPlaces { handshakes, ..self }
    }

    /// There is room for fewer clients than a host takes.
    pub fn is_short(&self) -> bool {
        self.sessions.max < SESSIONS_MAX
    }

    /// Connections of the port that clients come to, at most.
    pub fn clients(&self) -> usize {
        self.sessions.max + self.handshakes
    }

    /// Connections of a port that other hosts come to, at most.
    pub fn of_hosts(&self) -> usize {
        self.links + self.closing
    }
}

/// Peers that each reactor of a node with so many descriptors takes: those that are through, and those in line. A host
/// connects to each of them.
pub fn node_peers(descriptors: usize, reactors: usize) -> usize {
    NODE_PEERS_MAX.min((descriptors - (NODE_OWN_MAX * reactors).min(descriptors / 2)) / reactors)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(n: u8) -> Source {
        Source::of(Some(SocketAddr::from(([10, 0, 0, n], 5000))))
    }

    fn seconds(n: u64) -> Instant {
        Instant::ZERO + Duration::from_secs(n)
    }

    #[test]
    fn who_fills_the_line_pushes_out_itself() {
        let mut line = Handshakes::new(100);
        assert_eq!(line.come(Token(1000), at(2), seconds(30)), None);
        assert_eq!(line.come(Token(1001), Source::Local, seconds(30)), None);
        for n in 0..98 {
            assert_eq!(line.come(Token(n), at(1), seconds(30)), None);
        }
        for n in 98..500 {
            assert_eq!(line.come(Token(n), at(1), seconds(31)), Some(Token(n - 98)), "its own oldest goes");
        }
        assert_eq!(line.come(Token(1002), at(3), seconds(31)), Some(Token(402)));
        assert!(line.leave(Token(1000)) && !line.leave(Token(1000)));
        assert_eq!(line.next_deadline(), Some(seconds(30)));
        assert_eq!(line.overdue(seconds(29)), None);
        assert_eq!(line.overdue(seconds(30)), Some(Token(1001)));
    }

    #[test]
    fn refusals_that_come_all_the_time_are_counted_and_told_of_later() {
        let mut telling = Telling::default();
        let told = (0..100).filter(|_| telling.come(seconds(1)).1).count();
        assert_eq!(told, TOLD_MAX as usize);
        assert_eq!(telling.come(seconds(60)), (None, false));
        assert_eq!(telling.come(seconds(61)), (Some(71), true));
        assert_eq!(telling.come(seconds(200)), (None, true), "nothing was left untold");
    }

    #[test]
    fn a_line_of_many_origins_pushes_out_the_oldest_but_none_of_this_machine() {
        let mut line = Handshakes::new(100);
        for n in 0..LOCAL_HANDSHAKES_KEPT as u64 {
            assert_eq!(line.come(Token(1000 + n), Source::Local, seconds(1)), None);
        }
        for n in 0..68 {
            assert_eq!(line.come(Token(n), at(n as u8), seconds(1)), None);
        }
        for n in 68..200 {
            assert_eq!(line.come(Token(n), at(n as u8), seconds(1)), Some(Token(n - 68)));
        }
        // More than is kept, and nobody has as many: one of them goes.
        assert_eq!(line.come(Token(2000), Source::Local, seconds(1)), Some(Token(1000)));
    }

    #[test]
    fn an_origin_has_no_more_places_than_are_free() {
        let room = Room { max: 256, kept_for_local: 32 };
        let mut places: Vec<Source> = Vec::new();
        let enter = |places: &mut Vec<Source>, source: Source| {
            let mut count = 0;
            while room.admits(source, Taken::of(source, places.iter().copied())).is_ok() {
                places.push(source);
                count += 1;
            }
            count
        };
        assert_eq!(enter(&mut places, at(1)), 112, "half of what is not kept");
        assert_eq!(enter(&mut places, at(2)), 56);
        assert_eq!(enter(&mut places, at(3)), 28);
        assert_eq!(room.admits(at(1), Taken::of(at(1), places.iter().copied())), Err(Full::Share));
        assert_eq!(enter(&mut places, Source::Local), 256 - 196, "all that is left, and what is kept");
        assert_eq!(room.admits(Source::Local, Taken::of(Source::Local, places.iter().copied())), Err(Full::All));
        assert_eq!(room.admits(at(9), Taken::of(at(9), places.iter().copied())), Err(Full::All));
        places.retain(|source| *source != at(1));
        assert!(enter(&mut places, at(9)) > 0);
    }

    #[test]
    fn an_origin_is_an_address_or_a_network_of_64_bits() {
        let of = |text: &str| Source::of(Some(text.parse().unwrap()));
        assert_eq!(of("[2001:db8::1]:1"), of("[2001:db8::ffff:2]:2"));
        assert_ne!(of("[2001:db8::1]:1"), of("[2001:db8:0:1::1]:1"));
        assert_eq!(of("[::ffff:10.0.0.1]:1"), at(1));
        assert_ne!(at(1), at(2));
        assert_eq!(Source::of(None), Source::Local);
        assert_eq!(of("[2001:db8::1]:1").to_string(), "2001:db8::/64");
    }

    #[test]
    fn places_need_fewer_descriptors_than_there_are() {
        let few = [(64, 1), (64, 2), (256, 7), (1024, 7), (1024, 32), (4096, 64)];
        let many = [4096, 65_536, 1 << 20].into_iter().flat_map(|n| [(n, 1), (n, 7), (n, 64)]);
        for (descriptors, reactors) in few.into_iter().chain(many) {
            let places = HostPlaces::of(descriptors, reactors);
            // Handshakes and other hosts' connections are of each reactor, and so are the latter's ports.
            let of_each = |reactor: usize| places.at(reactor).handshakes + places.of_hosts();
            let http = HTTP_WAYS * (places.http + 1);
            let used = places.sessions.max + (0..reactors).map(of_each).sum::<usize>() + places.closing + http;
            let own = (HOST_OWN_MAX * reactors).min(descriptors * 3 / 8);
            assert!(used + own <= descriptors, "{places:?} of {descriptors} for {reactors}");
            assert!(places.sessions.max > places.sessions.kept_for_local, "{places:?}");
            assert!(places.links >= LINKS_MIN && places.handshakes >= places.handshakes_elsewhere, "{places:?}");
            assert!(places.handshakes_elsewhere > 0, "{places:?}");
            let own = (NODE_OWN_MAX * reactors).min(descriptors / 2);
            assert!(node_peers(descriptors, reactors) * reactors + own <= descriptors);
        }
        let places = HostPlaces::of(65_536, 1);
        assert_eq!((places.sessions.max, places.handshakes, places.links, places.http), (4096, 1024, 512, 256));
        assert!(!places.is_short() && HostPlaces::of(1024, 1).is_short());
        assert_eq!(node_peers(65_536, 1), NODE_PEERS_MAX);
        // Two lanes of each reactor of eight hosts of 128 cores come to each of as many reactors as such a node may have.
        assert!((1..=32).all(|reactors| node_peers(65_536, reactors) >= 2 * 64 * 8));
    }
}
