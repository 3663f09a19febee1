//! Guests with two paths to their volume: what they ask is answered over one or the other, and held against the model.
//!
//! Role: one thread draws requests, sends them and judges answers; a path has two threads that move bytes, and one while it is
//! made. A guest uses one path at a time. It goes over to the next when its path ends, and of its own accord when it has heard
//! nothing for [`Plan::silence`] although it waits for something; what was not answered it asks again there, and goes on
//! waiting. That is all that a multipath client does, and what Holdfast asks of it (decision 0020).
//!
//! Invariants:
//! 1. Every request is answered without error, over some path, within [`Plan::patience`].
//! 2. What is read is what the model allows: a write counts as under way from its first sending to its only answer.

use super::machine::Part;
use super::path::Path;
use crate::cell::Version;
use crate::engine::{cells_of, request_bytes, see_cells};
use crate::history::History;
use crate::model::{Model, Request};
use crate::workload::{Drawn, Kind, REQUEST_BYTES_MAX, Workload};
use anyhow::{Context, Result, ensure};
use holdfast_base::Prng;
use holdfast_lab::nbd::{self, Command, Receiver, Reply};
use std::io::Write;
use std::net::SocketAddr;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Rounds of the loop happen at least this often.
const ROUND_MAX: Duration = Duration::from_millis(20);

/// Between two attempts to find a path.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// NBD's error for a server that is about to go: the path is at its end, the request is not.
const SHUTDOWN: u32 = 108;

/// Failures that are kept in words.
const FAILURES_MAX: usize = 20;

#[derive(Clone, Debug)]
pub struct VolumePlan {
    pub name: String,
    pub layout: String,
    pub size_bytes: u64,
    /// Where its guests are at home.
    pub homes: [Part; GUESTS_PER_VOLUME],
}

#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    /// Where hosts serve NBD, in the order in which paths are tried.
    pub servers: Vec<(Part, SocketAddr)>,
    pub volumes: Vec<VolumePlan>,
    /// Requests that a guest has under way.
    pub depth: usize,
    /// Requests that a guest begins in a second, at most.
    pub rate: f64,
    /// How long a guest that waits hears nothing before it leaves its path.
    pub silence: Duration,
    /// How long a request may take, over all paths.
    pub patience: Duration,
}

/// What guests saw since a fault began.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    pub requests: u64,
    pub errors: u64,
    pub mismatches: u64,
    /// Requests without an answer for longer than they may be.
    pub overdue: u64,
    /// Requests that were asked again over another path.
    pub repeated: u64,
    /// Paths that ended, and paths that were left because they were silent.
    pub ended: u64,
    pub left: u64,
    /// For each guest, the longest that it has waited for an answer, or for a path when its own had ended.
    pub longest: Vec<Duration>,
    /// The slowest of all answered requests, in words.
    pub slowest: Option<(Duration, String)>,
    /// What went wrong, in words.
    pub failures: Vec<String>,
}

impl Seen {
    pub fn failed(&self) -> u64 {
        self.errors + self.mismatches + self.overdue
    }

    fn add(&mut self, other: &Seen) {
        self.requests += other.requests;
        self.errors += other.errors;
        self.mismatches += other.mismatches;
        self.overdue += other.overdue;
        self.repeated += other.repeated;
        self.ended += other.ended;
        self.left += other.left;
        for (mine, theirs) in self.longest.iter_mut().zip(&other.longest) {
            *mine = (*mine).max(*theirs);
        }
        if other.slowest.as_ref().map(|(took, _)| *took) > self.slowest.as_ref().map(|(took, _)| *took) {
            self.slowest.clone_from(&other.slowest);
        }
        let room = FAILURES_MAX.saturating_sub(self.failures.len());
        self.failures.extend(other.failures.iter().take(room).cloned());
    }
}

/// What guests are to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Work {
    /// Draw requests.
    Load,
    /// Read everything, by this guest of each volume.
    Sweep(usize),
    /// Finish what is under way.
    Rest,
}

/// What the two threads tell each other: one runs guests, the other commits faults.
struct Board {
    seen: Seen,
    total: Seen,
    work: Work,
    /// Guests are to go back to the path that they prefer.
    go_home: bool,
    /// Of each guest: where its path is to go.
    homes: Vec<Part>,
    /// Of each guest: where its path goes, while it has one.
    at: Vec<Option<Part>>,
    /// Of each guest: how long the oldest request that is under way waits.
    oldest: Vec<Duration>,
    /// How long a request may take from now on.
    patience: Duration,
    under_way: usize,
    swept: bool,
    ends: bool,
    notes: Vec<String>,
}

/// The fault thread's side.
#[derive(Clone)]
pub struct Control {
    board: Arc<Mutex<Board>>,
}

impl Control {
    fn with<T>(&self, act: impl FnOnce(&mut Board) -> T) -> T {
        act(&mut self.board.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Puts a line into the history that explains failures.
    pub fn note(&self, text: impl Into<String>) {
        let text = text.into();
        self.with(|board| board.notes.push(text));
    }

    /// Begins to count anew; gives what was seen since the last time.
    pub fn take_seen(&self) -> Seen {
        self.with(|board| {
            let fresh = Seen { longest: vec![Duration::ZERO; board.seen.longest.len()], ..Seen::default() };
            let seen = std::mem::replace(&mut board.seen, fresh);
            board.total.add(&seen);
            seen
        })
    }

    pub fn total(&self) -> Seen {
        self.with(|board| {
            let mut total = board.total.clone();
            total.add(&board.seen);
            total
        })
    }

    pub fn failed(&self) -> bool {
        self.with(|board| board.seen.failed() + board.total.failed() > 0)
    }

    /// Some guest saw wrong bytes: what explains it should not be overwritten by further faults.
    pub fn mismatched(&self) -> bool {
        self.with(|board| board.seen.mismatches + board.total.mismatches > 0)
    }

    /// Has guests go back to the hosts that they prefer.
    pub fn go_home(&self) {
        self.with(|board| board.go_home = true);
    }

    /// Where each guest's path goes.
    pub fn at(&self) -> Vec<Option<Part>> {
        self.with(|board| board.at.clone())
    }

    /// All guests have the path that they prefer, and nothing waits for longer than that.
    pub fn is_well(&self, oldest: Duration) -> bool {
        self.with(|board| {
            let home = board.at.iter().zip(&board.homes).all(|(at, home)| *at == Some(*home));
            !board.go_home && home && board.oldest.iter().all(|waits| *waits < oldest)
        })
    }

    /// This guest has a path, whichever it is, and nothing waits for longer than that.
    pub fn is_served(&self, guest: usize, oldest: Duration) -> bool {
        self.with(|board| board.at[guest].is_some() && board.oldest[guest] < oldest)
    }

    /// Guests are at home elsewhere from now on.
    pub fn set_homes(&self, homes: Vec<Part>) {
        self.with(|board| board.homes = homes);
        self.go_home();
    }

    /// Requests may take that long from now on.
    pub fn set_patience(&self, patience: Duration) {
        self.with(|board| board.patience = patience);
    }

    pub fn set_work(&self, work: Work) {
        self.with(|board| {
            board.work = work;
            board.swept = false;
        });
    }

    /// Whether everything was read since [`Work::Sweep`] was ordered.
    pub fn swept(&self) -> bool {
        self.with(|board| board.swept)
    }

    pub fn is_idle(&self) -> bool {
        self.with(|board| board.under_way == 0)
    }

    pub fn ended(&self) -> bool {
        self.with(|board| board.ends)
    }

    pub fn end(&self) {
        self.with(|board| board.ends = true);
    }
}

/// Guests come in pairs: one at each host, of the same volume.
pub const GUESTS_PER_VOLUME: usize = 2;

enum Event {
    Made { path: u64, at: Part, stream: Path, receiver: Receiver<Path> },
    Reply { path: u64, reply: Reply, at: Instant },
    Ended { path: u64, why: Option<String> },
}

enum Link {
    /// A path is being looked for, under this number.
    Seeking(u64),
    Open {
        number: u64,
        at: Part,
        stream: Path,
        sender: mpsc::Sender<Vec<u8>>,
        heard: Instant,
    },
}

struct Guest {
    volume: usize,
    home: Part,
    link: Link,
    in_flight: Vec<usize>,
    next_at: Instant,
    /// Since when it has no path, which it did not leave of its own accord.
    cut_off: Option<Instant>,
    /// Waits until nothing is under way, to take another path.
    moves: bool,
    swept_to: u64,
}

struct Volume {
    plan: VolumePlan,
    model: Model,
    workload: Workload,
}

struct Flight {
    guest: usize,
    drawn: Drawn,
    version: Version,
    begun: Instant,
    /// Since when it waits over this path.
    sent: Instant,
    is_overdue: bool,
}

/// All guests, run by one thread.
pub struct Guests {
    plan: Plan,
    volumes: Vec<Volume>,
    guests: Vec<Guest>,
    flights: Vec<Option<Flight>>,
    free: Vec<usize>,
    events: mpsc::Receiver<Event>,
    events_in: mpsc::Sender<Event>,
    paths_made: u64,
    writes_drawn: u64,
    history: History,
    board: Arc<Mutex<Board>>,
    seen: Seen,
    work: Work,
}

impl Guests {
    /// Volumes must be fresh, which is all zeroes.
    pub fn new(plan: Plan) -> (Guests, Control) {
        let mut random = Prng::new(plan.seed);
        let (events_in, events) = mpsc::channel();
        let make = |plan: &VolumePlan| Volume {
            model: Model::new(cells_of(0, plan.size_bytes).end),
            workload: Workload::new(random.fork(), plan.size_bytes),
            plan: plan.clone(),
        };
        let volumes: Vec<Volume> = plan.volumes.iter().map(make).collect();
        let now = Instant::now();
        let count = volumes.len() * GUESTS_PER_VOLUME;
        let guest = |at: usize| Guest {
            volume: at / GUESTS_PER_VOLUME,
            home: volumes[at / GUESTS_PER_VOLUME].plan.homes[at % GUESTS_PER_VOLUME],
            link: Link::Seeking(0),
            in_flight: Vec::new(),
            next_at: now,
            cut_off: None,
            moves: false,
            swept_to: 0,
        };
        let at_home: Vec<Guest> = (0..count).map(guest).collect();
        let seen = Seen { longest: vec![Duration::ZERO; count], ..Seen::default() };
        let board = Board {
            seen: seen.clone(),
            total: seen.clone(),
            work: Work::Load,
            go_home: false,
            homes: at_home.iter().map(|guest| guest.home).collect(),
            at: vec![None; count],
            oldest: vec![Duration::ZERO; count],
            patience: plan.patience,
            under_way: 0,
            swept: false,
            ends: false,
            notes: Vec::new(),
        };
        let board = Arc::new(Mutex::new(board));
        let mut guests = Guests {
            plan,
            volumes,
            guests: at_home,
            flights: Vec::new(),
            free: Vec::new(),
            events,
            events_in,
            paths_made: 0,
            writes_drawn: 0,
            history: History::new(now),
            board: Arc::clone(&board),
            seen,
            work: Work::Load,
        };
        for at in 0..guests.guests.len() {
            guests.seek(at, guests.guests[at].home);
        }
        (guests, Control { board })
    }

    /// Runs until the fault thread says that it is over.
    pub fn run(mut self) -> Result<()> {
        loop {
            match self.events.recv_timeout(ROUND_MAX) {
                Ok(event) => self.on_event(event)?,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => unreachable!("guests keep a sender"),
            }
            while let Ok(event) = self.events.try_recv() {
                self.on_event(event)?;
            }
            if self.exchange() {
                return Ok(());
            }
            for at in 0..self.guests.len() {
                self.tend(at);
            }
        }
    }

    /// Tells the fault thread what was seen, and takes its orders. True when all is over.
    fn exchange(&mut self) -> bool {
        let now = Instant::now();
        let board = Arc::clone(&self.board);
        let mut board = board.lock().unwrap_or_else(PoisonError::into_inner);
        board.seen.add(&self.seen);
        let count = self.guests.len();
        self.seen = Seen { longest: vec![Duration::ZERO; count], ..Seen::default() };
        // Nothing is asked without a path, and whoever would ask waits.
        for (longest, guest) in board.seen.longest.iter_mut().zip(&self.guests) {
            let waited = guest.cut_off.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
            *longest = (*longest).max(waited);
        }
        // What still waits counts as long as it has waited.
        for flight in self.flights.iter().flatten() {
            let waited = now.saturating_duration_since(flight.begun);
            let longest = &mut board.seen.longest[flight.guest];
            *longest = (*longest).max(waited);
        }
        board.oldest.fill(Duration::ZERO);
        for flight in self.flights.iter().flatten() {
            let oldest = &mut board.oldest[flight.guest];
            *oldest = (*oldest).max(now.saturating_duration_since(flight.begun));
        }
        self.plan.patience = board.patience;
        board.under_way = self.flights.len() - self.free.len();
        for (at, guest) in board.at.iter_mut().zip(&self.guests) {
            *at = match &guest.link {
                Link::Open { at, .. } => Some(*at),
                Link::Seeking(_) => None,
            };
        }
        for note in board.notes.drain(..) {
            self.history.fault(&note);
        }
        if board.work != self.work {
            self.work = board.work;
            self.guests.iter_mut().for_each(|guest| guest.swept_to = 0);
        }
        if let Work::Sweep(reader) = self.work {
            // One guest of each volume reads: the other one has nothing to add.
            let mut readers = self.guests.iter().skip(reader).step_by(GUESTS_PER_VOLUME);
            board.swept = board.under_way == 0 && readers.all(|g| g.swept_to == self.volumes[g.volume].plan.size_bytes);
        }
        if board.go_home {
            for (home, guest) in board.homes.iter().zip(&mut self.guests) {
                guest.home = *home;
                guest.moves = !matches!(guest.link, Link::Open { at, .. } if at == *home);
            }
            board.go_home = false;
        }
        board.ends
    }

    fn on_event(&mut self, event: Event) -> Result<()> {
        match event {
            Event::Made { path, at, stream, receiver } => self.on_made(path, at, stream, receiver),
            Event::Reply { path, reply, at } => self.on_reply(path, reply, at),
            Event::Ended { path, why } => {
                let Some(guest) = self.guest_of(path) else { return Ok(()) };
                if let Some(why) = why {
                    self.fail(guest, format!("a server broke the protocol: {why}"));
                }
                self.seen.ended += 1;
                self.give_up(guest);
                Ok(())
            }
        }
    }

    /// The guest that uses the path of this number.
    fn guest_of(&self, path: u64) -> Option<usize> {
        self.guests.iter().position(|guest| match &guest.link {
            Link::Seeking(number) => *number == path,
            Link::Open { number, .. } => *number == path,
        })
    }

    /// Looks for a path: over this host, else over the next, until there is one.
    fn seek(&mut self, guest: usize, first: Part) {
        self.paths_made += 1;
        let path = self.paths_made;
        self.guests[guest].link = Link::Seeking(path);
        let plan = self.volumes[self.guests[guest].volume].plan.clone();
        let (events, board, servers) = (self.events_in.clone(), Arc::clone(&self.board), self.plan.servers.clone());
        let structured = guest.is_multiple_of(4);
        let begin = servers.iter().position(|(at, _)| *at == first).unwrap_or_default();
        let seek = move || {
            for (at, server) in servers.into_iter().cycle().skip(begin) {
                if board.lock().unwrap_or_else(PoisonError::into_inner).ends {
                    return;
                }
                let opened = Path::open(server, &plan.name, plan.size_bytes, structured);
                if let Ok((stream, receiver)) = opened.and_then(nbd::Client::split) {
                    // Nobody waits for it any more when all is over.
                    let _ = events.send(Event::Made { path, at, stream, receiver });
                    return;
                }
                std::thread::sleep(RETRY_PAUSE);
            }
        };
        // Without threads nothing here works, and the guest shows as one that waits.
        if let Err(error) = std::thread::Builder::new().name(format!("seek-{path}")).spawn(seek) {
            self.fail(guest, format!("cannot start a thread: {error}"));
        }
    }

    /// The path is at its end, or left: the next one is tried, and what was not answered is asked again there.
    fn give_up(&mut self, guest: usize) {
        let Link::Open { at, stream, .. } = &self.guests[guest].link else { return };
        stream.leave();
        let cut_off = Some(Instant::now()).filter(|_| self.work == Work::Load);
        let servers = &self.plan.servers;
        let after = servers.iter().position(|(part, _)| part == at).map_or(0, |place| place + 1);
        let next = servers[after % servers.len()].0;
        self.seek(guest, next);
        self.guests[guest].cut_off = cut_off;
    }

    fn on_made(&mut self, path: u64, at: Part, stream: Path, receiver: Receiver<Path>) -> Result<()> {
        let Some(guest) = self.guest_of(path) else { return Ok(()) };
        let (sender, outgoing) = mpsc::channel::<Vec<u8>>();
        let mut writes = stream.clone();
        let spawn = |name: String| std::thread::Builder::new().name(name);
        let send = move || {
            while let Ok(bytes) = outgoing.recv() {
                if writes.write_all(&bytes).is_err() {
                    break;
                }
            }
        };
        spawn(format!("send-{path}")).spawn(send).context("cannot start a thread")?;
        let events = self.events_in.clone();
        spawn(format!("receive-{path}")).spawn(move || receive(path, receiver, &events)).context("no thread")?;
        let heard = Instant::now();
        self.guests[guest].link = Link::Open { number: path, at, stream, sender, heard };
        self.guests[guest].moves = false;
        if let Some(since) = self.guests[guest].cut_off.take() {
            let longest = &mut self.seen.longest[guest];
            *longest = (*longest).max(heard.saturating_duration_since(since));
        }
        for slot in self.guests[guest].in_flight.clone() {
            self.seen.repeated += 1;
            self.transmit(slot);
        }
        Ok(())
    }

    fn on_reply(&mut self, path: u64, reply: Reply, at: Instant) -> Result<()> {
        let Some(guest) = self.guest_of(path) else { return Ok(()) };
        if let Link::Open { heard, .. } = &mut self.guests[guest].link {
            *heard = at;
        }
        let slot = reply.cookie.slot as usize;
        let known = self.flights.get(slot).and_then(Option::as_ref).is_some_and(|f| f.guest == guest);
        ensure!(known, "a server answered a request that was not asked over that path (slot {slot})");
        if reply.error == SHUTDOWN {
            self.seen.ended += 1;
            self.give_up(guest);
            return Ok(());
        }
        let flight = self.take(slot);
        let took = at.saturating_duration_since(flight.begun);
        self.seen.longest[guest] = self.seen.longest[guest].max(took);
        if self.seen.slowest.as_ref().is_none_or(|(slowest, _)| *slowest < took) {
            let (name, waited) = (&self.volumes[self.guests[guest].volume].plan.name, at - flight.sent);
            let text = format!("{:?} of {name}, guest {guest}, {waited:?} of it over its last path", flight.drawn);
            self.seen.slowest = Some((took, text));
        }
        self.guests[guest].in_flight.retain(|s| *s != slot);
        let model = &mut self.volumes[self.guests[guest].volume].model;
        if reply.error != 0 {
            match flight.drawn.kind {
                Kind::Flush => {}
                Kind::Read => model.lose_read(slot as Request),
                _ => model.lose_write(slot as Request),
            }
            self.note("failed", &flight);
            self.seen.errors += 1;
            let (error, message) = (reply.error, reply.message);
            self.fail(guest, format!("{:?} failed with error {error} {message} after {took:?}", flight.drawn));
            return Ok(());
        }
        match flight.drawn.kind {
            Kind::Flush => {}
            Kind::Read => self.check(slot, &flight, &reply),
            _ => {
                model.finish_write(slot as Request);
                self.note("done", &flight);
            }
        }
        Ok(())
    }

    /// Holds the bytes of a read against the model.
    fn check(&mut self, slot: usize, flight: &Flight, reply: &Reply) {
        let volume = self.guests[flight.guest].volume;
        let (offset, len) = (flight.drawn.offset, flight.drawn.len);
        let mut reading = self.volumes[volume].model.finish_read(slot as Request);
        let placed = reply.data_offset.is_none_or(|at| at == offset) && reply.data.len() as u64 == len;
        let found = match placed {
            true => see_cells(&mut reading, volume as u8, offset, &reply.data),
            false => Err((offset, format!("answered with {} bytes of {:?}", reply.data.len(), reply.data_offset))),
        };
        if let Err((at, why)) = found {
            self.seen.mismatches += 1;
            let history = self.history.about(volume as u8, at);
            self.fail(flight.guest, format!("mismatch at offset {at}, read at {offset}+{len}: {why}\n{history}"));
        }
    }

    fn take(&mut self, slot: usize) -> Flight {
        self.free.push(slot);
        self.flights[slot].take().expect("the slot is in use")
    }

    /// Keeps what went wrong, with who saw it.
    fn fail(&mut self, guest: usize, what: String) {
        let name = &self.volumes[self.guests[guest].volume].plan.name;
        let over = match &self.guests[guest].link {
            Link::Open { at, .. } => format!("over {at}"),
            Link::Seeking(_) => "without a path".to_string(),
        };
        let text = format!("volume {name}, guest {guest} {over}: {what}");
        // What explains a failure is a part of it, and would be told again by each later one.
        self.history.fault(text.lines().next().unwrap_or_default());
        eprintln!("atlas: {text}");
        if self.seen.failures.len() < FAILURES_MAX {
            self.seen.failures.push(text);
        }
    }

    fn note(&mut self, text: &'static str, flight: &Flight) {
        let Drawn { kind, offset, len } = flight.drawn;
        if kind.changes() {
            let volume = self.guests[flight.guest].volume as u8;
            self.history.request(text, volume, offset, len, flight.version.0);
        }
    }

    /// Sees to one guest: leaves a silent path, takes the one it prefers, sends what is due.
    fn tend(&mut self, at: usize) {
        let now = Instant::now();
        self.tell_overdue(at, now);
        let guest = &self.guests[at];
        let Link::Open { heard, sender, .. } = &guest.link else { return };
        let waits = guest.in_flight.iter().filter_map(|slot| self.flights[*slot].as_ref()).map(|f| f.sent).min();
        if waits.is_some_and(|sent| now.saturating_duration_since(sent.max(*heard)) > self.plan.silence) {
            self.seen.left += 1;
            self.history.fault(&format!("guest {at} leaves a silent path"));
            return self.give_up(at);
        }
        if guest.moves {
            if guest.in_flight.is_empty() {
                let _ = sender.send(nbd::encode(Command::Disconnect, false, 0, 0, 0, &[]));
                self.seek(at, self.guests[at].home);
            }
            return;
        }
        while self.guests[at].in_flight.len() < self.plan.depth {
            let Some(drawn) = self.next_request(at, now) else { break };
            self.begin(at, drawn);
        }
    }

    fn tell_overdue(&mut self, at: usize, now: Instant) {
        for slot in self.guests[at].in_flight.clone() {
            let patience = self.plan.patience;
            let Some(flight) = self.flights[slot].as_mut() else { continue };
            if !flight.is_overdue && now.saturating_duration_since(flight.begun) > patience {
                flight.is_overdue = true;
                let what = format!("{:?} is unanswered after {patience:?}", flight.drawn);
                self.seen.overdue += 1;
                self.fail(at, what);
            }
        }
    }

    fn next_request(&mut self, at: usize, now: Instant) -> Option<Drawn> {
        let guest = &mut self.guests[at];
        let volume = &mut self.volumes[guest.volume];
        match self.work {
            Work::Rest => None,
            Work::Load if now < guest.next_at => None,
            Work::Load => {
                let pause = Duration::from_secs_f64(1.0 / self.plan.rate);
                guest.next_at = (guest.next_at + pause).max(now.checked_sub(pause).unwrap_or(now));
                Some(volume.workload.draw())
            }
            Work::Sweep(reader) if at % GUESTS_PER_VOLUME != reader => None,
            Work::Sweep(_) => {
                let left = volume.plan.size_bytes - guest.swept_to;
                let drawn = Drawn { kind: Kind::Read, offset: guest.swept_to, len: left.min(REQUEST_BYTES_MAX / 2) };
                guest.swept_to += drawn.len;
                (drawn.len > 0).then_some(drawn)
            }
        }
    }

    fn begin(&mut self, guest: usize, drawn: Drawn) {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.flights.push(None);
            self.flights.len() - 1
        });
        let mut version = Version::ZEROES;
        if let Kind::Write { .. } = drawn.kind {
            self.writes_drawn += 1;
            version = Version::new(1, self.writes_drawn);
        }
        let cells = cells_of(drawn.offset, drawn.len);
        let model = &mut self.volumes[self.guests[guest].volume].model;
        match drawn.kind {
            Kind::Read => model.begin_read(slot as Request, cells),
            Kind::Flush => {}
            _ => model.begin_write(slot as Request, cells, version),
        }
        let now = Instant::now();
        let flight = Flight { guest, drawn, version, begun: now, sent: now, is_overdue: false };
        self.note("begun", &flight);
        self.flights[slot] = Some(flight);
        self.guests[guest].in_flight.push(slot);
        self.seen.requests += 1;
        self.transmit(slot);
    }

    /// Sends a request over the guest's path, for the first time or again.
    fn transmit(&mut self, slot: usize) {
        let Some(flight) = self.flights[slot].as_mut() else { return };
        flight.sent = Instant::now();
        let guest = &self.guests[flight.guest];
        let bytes = request_bytes(guest.volume as u8, slot as u32, flight.drawn, flight.version);
        if let Link::Open { sender, .. } = &guest.link {
            // A failure to send shows as the path's end on the receiving side.
            let _ = sender.send(bytes);
        }
    }
}

/// Passes on what comes over a path until it ends.
fn receive(path: u64, mut receiver: Receiver<Path>, events: &mpsc::Sender<Event>) {
    let why = loop {
        match receiver.receive() {
            Ok(Some(reply)) => {
                if events.send(Event::Reply { path, reply, at: Instant::now() }).is_err() {
                    return;
                }
            }
            Ok(None) => break None,
            // Of a machine that is gone, or can't be reached any more.
            Err(error) if error.downcast_ref::<std::io::Error>().is_some() => break None,
            Err(error) => break Some(format!("{error:#}")),
        }
    };
    let _ = events.send(Event::Ended { path, why });
}
