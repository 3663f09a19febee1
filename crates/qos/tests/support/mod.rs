//! A machine in virtual time: guests that keep so many requests in flight, schedulers, and servers behind them.
//!
//! A request is cut into pieces of 64 KiB; each takes one of the servers for a while, and the request is done when all are.
//! Pieces that find no server wait, in order of arrival or with those of class *sparse* first, as nodes are to do it.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use holdfast_base::{Effects, Instant, Prng, RequestToken, Urgency};
use holdfast_qos::scheduler::{Effect, Event};
use holdfast_qos::sharing::Event as SharingEvent;
use holdfast_qos::{Config, Cost, Kind, Policy, Role, Scheduler, Sharing, Slot, TenantId};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::time::Duration;

pub const SECOND: u64 = 1_000_000_000;
const PIECE_BYTES: u64 = 64 << 10;

/// What a server takes for a unit.
const UNIT_NANOS: u64 = 256_000;

pub fn at_ms(ms: u64) -> Instant {
    Instant(SECOND + ms * 1_000_000)
}

/// How long a piece takes of a server.
#[derive(Clone, Copy, Debug)]
pub enum Service {
    Fixed,
    /// Seven tenths always, the rest exponential: the p99 of one alone is 1.7 times the mean.
    Random,
}

#[derive(Clone, Copy, Debug)]
pub struct Machine {
    pub servers: usize,
    pub service: Service,
    /// Pieces of class *sparse* first.
    pub is_ordered: bool,
    /// All that is asked goes at once.
    pub is_unmanaged: bool,
}

/// Some 50,000 reads of 8 KiB a second, 320 us each.
pub const FLASH: Machine = Machine { servers: 16, service: Service::Random, is_ordered: false, is_unmanaged: false };

#[derive(Clone, Debug)]
pub struct Guest {
    pub policy: &'static str,
    pub depth: usize,
    pub kind: Kind,
    pub bytes: u64,
    /// In milliseconds, when it asks; always if empty.
    pub awake: Vec<(u64, u64)>,
    pub reactor: usize,
    /// Another guest, whose tenant it is as well.
    pub tenant_of: Option<usize>,
}

pub fn guest(policy: &'static str, depth: usize, kind: Kind, bytes: u64) -> Guest {
    Guest { policy, depth, kind, bytes, awake: Vec::new(), reactor: 0, tenant_of: None }
}

impl Guest {
    pub fn awake(mut self, spans: &[(u64, u64)]) -> Guest {
        self.awake = spans.to_vec();
        self
    }

    pub fn on(mut self, reactor: usize) -> Guest {
        self.reactor = reactor;
        self
    }

    pub fn tenant_of(mut self, other: usize) -> Guest {
        self.tenant_of = Some(other);
        self
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Done {
    asked_at: Instant,
    done_at: Instant,
}

struct Asked {
    guest: usize,
    asked_at: Instant,
    went: Option<Slot>,
    pieces_left: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Happens {
    PieceDone { token: u64 },
    Wakes { guest: usize },
    Tick { reactor: usize },
    Share,
}

pub struct Model {
    machine: Machine,
    guests: Vec<Guest>,
    tenants: Vec<TenantId>,
    schedulers: Vec<Scheduler>,
    sharing: Option<Sharing>,
    /// Whether invariants are asserted: not where something is wrong on purpose.
    is_verified: bool,
    prng: Prng,
    now: Instant,
    agenda: BinaryHeap<Reverse<(Instant, u64, Happens)>>,
    came: u64,
    asked: BTreeMap<u64, Asked>,
    next_token: u64,
    in_flight: Vec<usize>,
    idle_servers: usize,
    pieces: [VecDeque<(u64, u64)>; 2],
    done: Vec<Vec<Done>>,
    longest_wait: Vec<Duration>,
    virtual_time: Vec<u128>,
    pub virtual_time_went_back: bool,
    pub windows: Vec<(Instant, u64)>,
}

impl Model {
    pub fn new(machine: Machine, config: Config, guests: Vec<Guest>) -> Model {
        let reactors = guests.iter().map(|guest| guest.reactor + 1).max().unwrap_or(1);
        let mut schedulers: Vec<Scheduler> = (0..reactors).map(|_| Scheduler::new(config)).collect();
        let mut tenants: Vec<TenantId> = Vec::new();
        for guest in &guests {
            let policy: Policy = guest.policy.parse().expect("policies of tests are right");
            let own =
                |schedulers: &mut Vec<Scheduler>| schedulers[guest.reactor].add(policy, Role::Guest).expect("room");
            let tenant = guest.tenant_of.map(|of| tenants[of]).unwrap_or_else(|| own(&mut schedulers));
            tenants.push(tenant);
        }
        let count = guests.len();
        let mut model = Model {
            machine,
            tenants,
            schedulers,
            sharing: (reactors > 1).then(|| Sharing::new(reactors, config.isolation)),
            is_verified: config.mutations == holdfast_qos::Mutations::default(),
            prng: Prng::new(7),
            now: at_ms(0),
            agenda: BinaryHeap::new(),
            came: 0,
            asked: BTreeMap::new(),
            next_token: 0,
            in_flight: vec![0; count],
            idle_servers: machine.servers,
            pieces: Default::default(),
            done: vec![Vec::new(); count],
            longest_wait: vec![Duration::ZERO; count],
            virtual_time: vec![0; reactors],
            virtual_time_went_back: false,
            windows: Vec::new(),
            guests,
        };
        for index in 0..count {
            let starts: Vec<u64> = model.guests[index].awake.iter().map(|(from, _)| *from).collect();
            for from in if starts.is_empty() { vec![0] } else { starts } {
                model.plan(at_ms(from), Happens::Wakes { guest: index });
            }
        }
        if model.sharing.is_some() {
            model.plan(at_ms(100), Happens::Share);
        }
        model
    }

    fn plan(&mut self, at: Instant, what: Happens) {
        self.came += 1;
        self.agenda.push(Reverse((at, self.came, what)));
    }

    /// Until so many milliseconds after the start.
    pub fn run(mut self, ms: u64) -> Model {
        while let Some(Reverse((at, _, what))) = self.agenda.pop().filter(|Reverse((at, ..))| *at < at_ms(ms)) {
            self.now = at;
            match what {
                Happens::PieceDone { token } => self.on_piece_done(token),
                Happens::Wakes { guest } => self.ask(guest),
                Happens::Tick { reactor } => self.drive(reactor, Event::Tick),
                Happens::Share => self.on_share(),
            }
        }
        self.now = at_ms(ms);
        self
    }

    fn is_awake(&self, guest: usize) -> bool {
        let awake = &self.guests[guest].awake;
        awake.is_empty() || awake.iter().any(|(from, to)| (at_ms(*from)..at_ms(*to)).contains(&self.now))
    }

    /// As many as it keeps in flight.
    fn ask(&mut self, index: usize) {
        while self.is_awake(index) && self.in_flight[index] < self.guests[index].depth {
            let token = self.next_token;
            self.next_token += 1;
            self.in_flight[index] += 1;
            let asked = Asked { guest: index, asked_at: self.now, went: None, pieces_left: 0 };
            self.asked.insert(token, asked);
            let Guest { kind, bytes, reactor, .. } = self.guests[index];
            if self.machine.is_unmanaged {
                self.start(token, None, Urgency::Normal);
            } else {
                let (tenant, token) = (self.tenants[index], RequestToken(token));
                self.drive(reactor, Event::Request { tenant, kind, bytes, token });
            }
        }
    }

    fn drive(&mut self, reactor: usize, event: Event) {
        let mut out = Effects::new();
        let scheduler = &mut self.schedulers[reactor];
        scheduler.handle(self.now, event, &mut out);
        if self.is_verified && self.came.is_multiple_of(16) {
            scheduler.verify(self.now);
        }
        self.virtual_time_went_back |= scheduler.virtual_time() < self.virtual_time[reactor];
        self.virtual_time[reactor] = scheduler.virtual_time();
        let units = scheduler.window().whole_units();
        if reactor == 0 && self.windows.last().is_none_or(|(_, last)| *last != units) {
            self.windows.push((self.now, units));
        }
        if let Some(at) = scheduler.next_deadline() {
            self.plan(at.max(self.now), Happens::Tick { reactor });
        }
        for effect in out.take() {
            match effect {
                Effect::Go { token, slot, urgency, .. } => self.start(token.0, Some(slot), urgency),
                Effect::Drop { .. } => panic!("nobody left"),
            }
        }
    }

    fn on_share(&mut self) {
        self.plan(self.now + Duration::from_millis(100), Happens::Share);
        let mut out = Effects::new();
        let mut sharing = self.sharing.take().expect("several reactors share");
        for reactor in 0..self.schedulers.len() {
            let sums = self.schedulers[reactor].sums(self.now);
            sharing.handle(self.now, SharingEvent::Sums { reactor, sums }, &mut out);
        }
        sharing.handle(self.now, SharingEvent::Tick, &mut out);
        self.sharing = Some(sharing);
        for effect in out.take() {
            self.drive(effect.reactor, Event::SetShare { share: effect.share });
        }
    }

    fn start(&mut self, token: u64, slot: Option<Slot>, urgency: Urgency) {
        let asked = self.asked.get_mut(&token).expect("what goes was asked, and once");
        assert!(asked.pieces_left == 0 && asked.went.is_none(), "what goes was not told before");
        let bytes = self.guests[asked.guest].bytes;
        let wait = self.now.since(asked.asked_at);
        self.longest_wait[asked.guest] = self.longest_wait[asked.guest].max(wait);
        asked.went = slot;
        asked.pieces_left = bytes.div_ceil(PIECE_BYTES).max(1);
        let queue = usize::from(!(self.machine.is_ordered && urgency == Urgency::Sparse));
        for piece in 0..asked.pieces_left {
            self.pieces[queue].push_back((token, (bytes - piece * PIECE_BYTES).min(PIECE_BYTES)));
        }
        self.serve();
    }

    fn serve(&mut self) {
        while self.idle_servers > 0 {
            let Some((token, bytes)) = self.pieces.iter_mut().find_map(VecDeque::pop_front) else { return };
            self.idle_servers -= 1;
            let kind = self.guests[self.asked[&token].guest].kind;
            // What costs twice as much takes twice as long.
            let mean = Cost::of(kind, bytes).0 * UNIT_NANOS / Cost::UNIT.0;
            let nanos = match self.machine.service {
                Service::Fixed => mean,
                Service::Random => {
                    let uniform = (self.prng.below(1 << 32) + 1) as f64 / (1_u64 << 32) as f64;
                    (mean as f64 * (0.7 - 0.3 * uniform.ln())) as u64
                }
            };
            self.plan(self.now + Duration::from_nanos(nanos), Happens::PieceDone { token });
        }
    }

    fn on_piece_done(&mut self, token: u64) {
        self.idle_servers += 1;
        self.serve();
        let asked = self.asked.get_mut(&token).expect("pieces are of something");
        asked.pieces_left -= 1;
        if asked.pieces_left > 0 {
            return;
        }
        let Asked { guest, asked_at, went, .. } = self.asked.remove(&token).expect("just seen");
        self.done[guest].push(Done { asked_at, done_at: self.now });
        self.in_flight[guest] -= 1;
        if let Some(slot) = went {
            self.drive(self.guests[guest].reactor, Event::Done { slot });
        }
        self.ask(guest);
    }

    /// Completions a second, of each second from one on.
    pub fn by_second(&self, guest: usize, from: u64) -> Vec<u64> {
        let end = self.now.since(at_ms(0)).as_secs();
        let mut counts = vec![0; (end - from) as usize];
        for done in &self.done[guest] {
            let second = done.done_at.since(at_ms(0)).as_secs();
            if (from..end).contains(&second) {
                counts[(second - from) as usize] += 1;
            }
        }
        counts
    }

    /// Completions in a span of milliseconds, as a rate a second.
    pub fn rate(&self, guest: usize, from_ms: u64, to_ms: u64) -> f64 {
        let span = at_ms(from_ms)..at_ms(to_ms);
        let count = self.done[guest].iter().filter(|done| span.contains(&done.done_at)).count();
        count as f64 * 1000.0 / (to_ms - from_ms) as f64
    }

    /// In microseconds, of what was asked in the span.
    pub fn percentile(&self, guest: usize, percent: f64, from_ms: u64, to_ms: u64) -> f64 {
        let span = at_ms(from_ms)..at_ms(to_ms);
        let of_span = self.done[guest].iter().filter(|done| span.contains(&done.asked_at));
        let mut took: Vec<u64> = of_span.map(|done| done.done_at.since(done.asked_at).as_nanos() as u64).collect();
        took.sort_unstable();
        let index = ((took.len() as f64 * percent / 100.0) as usize).min(took.len().saturating_sub(1));
        took.get(index).map_or(f64::INFINITY, |nanos| *nanos as f64 / 1000.0)
    }

    /// From being asked for to *go*; of what never went as well.
    pub fn longest_wait(&self, guest: usize) -> Duration {
        let waiting = self.asked.values().filter(|asked| asked.guest == guest && asked.went.is_none());
        let waits = waiting.map(|asked| self.now.since(asked.asked_at));
        waits.max().unwrap_or_default().max(self.longest_wait[guest])
    }

    pub fn cost_of(&self, guest: usize) -> f64 {
        let Guest { kind, bytes, .. } = self.guests[guest];
        Cost::of(kind, bytes).0 as f64 / Cost::UNIT.0 as f64
    }

    pub fn scheduler(&self, reactor: usize) -> &Scheduler {
        &self.schedulers[reactor]
    }
}
