//! Keeps requests in flight over several connections, and holds every answer against the model.
//!
//! Role: the caller's thread draws requests, sends them and judges answers; two threads a connection move bytes. Faults
//! come from a thread of their own, which says through [`Control`] when the host is about to die and when it is back.
//!
//! Invariants:
//! 1. While the host lives, every request is answered without error, within [`STUCK_AFTER`].
//! 2. A connection closes only when the host was killed; its requests are then lost, not failed.
//! 3. What is read is what the model allows.

use crate::cell::{self, CELL_BYTES, Place, Version};
use crate::history::History;
use crate::model::{Model, Reading, Request};
use crate::workload::{Drawn, Kind, REQUEST_BYTES_MAX, Workload};
use anyhow::{Context, Result, bail, ensure};
use holdfast_base::Prng;
use holdfast_lab::nbd::{self, Client, Command, Reply};
use std::io::Write;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// A request that takes longer is taken for one that never ends. Far above what any fault here may cost.
pub const STUCK_AFTER: Duration = Duration::from_secs(30);

/// How long a host that was started again may keep clients waiting for their export.
const RECONNECT_MAX: Duration = Duration::from_secs(30);

/// Rounds of the loop happen at least this often.
const ROUND_MAX: Duration = Duration::from_millis(50);

#[derive(Clone, Debug)]
pub struct VolumePlan {
    pub socket: PathBuf,
    pub export: String,
    pub size_bytes: u64,
    pub connections: usize,
    /// What it holds at first, if that is not all zeroes. It is asked for as virtual machines of vmfleet do.
    pub image: Option<Arc<Vec<u8>>>,
}

#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    /// Requests in flight on each connection.
    pub depth: usize,
    pub volumes: Vec<VolumePlan>,
}

/// What a run did.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    pub requests: u64,
    pub reads: u64,
    pub writes: u64,
    pub trims: u64,
    pub flushes: u64,
    pub read_bytes: u64,
    pub written_bytes: u64,
    /// Requests whose answer went down with the host.
    pub lost: u64,
    pub longest: Duration,
    /// From the order to start the host to the last export being open again.
    pub longest_reopening: Duration,
}

enum Event {
    Reply { connection: u64, reply: Reply, at: Instant },
    Closed { connection: u64, why: Option<String> },
    HostGoing,
    HostBack { ordered: Instant },
    Fault(String),
}

/// The fault thread's way to tell the engine what it does.
#[derive(Clone)]
pub struct Control {
    events: mpsc::Sender<Event>,
    stopped: Arc<AtomicBool>,
}

impl Control {
    /// The host is about to be killed: closed connections are expected from now on.
    pub fn host_going(&self) {
        let _ = self.events.send(Event::HostGoing);
    }

    /// The host was started again, by an order given at `ordered`.
    pub fn host_back(&self, ordered: Instant) {
        let _ = self.events.send(Event::HostBack { ordered });
    }

    pub fn fault(&self, text: impl Into<String>) {
        let _ = self.events.send(Event::Fault(text.into()));
    }

    /// True once the run has failed: no point in going on.
    pub fn stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Sleeps, but not longer than the run lasts.
    pub fn rest(&self, time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end && !self.stopped() {
            thread::sleep(ROUND_MAX.min(end.saturating_duration_since(Instant::now())));
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum HostState {
    Up,
    /// Told that it will be killed; connections are closing.
    Going,
    /// Back, as of an order given then; connections are to be opened once the old ones are closed.
    Returning(Instant),
}

struct Connection {
    id: u64,
    volume: usize,
    structured: bool,
    sender: mpsc::Sender<Vec<u8>>,
    in_flight: usize,
    open: bool,
}

struct Volume {
    plan: VolumePlan,
    model: Model,
    workload: Workload,
}

struct Flight {
    connection: usize,
    volume: usize,
    drawn: Drawn,
    version: Version,
    sent: Instant,
}

/// Where requests come from.
#[derive(PartialEq, Eq)]
enum Source {
    Workload,
    /// A pass over every byte: next offset, by volume.
    Sweep(Vec<u64>),
    Nothing,
}

pub struct Engine {
    depth: usize,
    volumes: Vec<Volume>,
    connections: Vec<Connection>,
    flights: Vec<Option<Flight>>,
    free: Vec<usize>,
    events: mpsc::Receiver<Event>,
    events_in: mpsc::Sender<Event>,
    host: HostState,
    generation: u16,
    writes_drawn: u64,
    connections_made: u64,
    pub counts: Counts,
    pub history: History,
    source: Source,
}

/// The cells that a stretch of bytes touches.
pub fn cells_of(offset: u64, len: u64) -> Range<u32> {
    let cell = CELL_BYTES as u64;
    (offset / cell) as u32..(offset + len).div_ceil(cell) as u32
}

impl Engine {
    /// Connects to every volume of the plan; each must hold its image, or else be fresh, which is all zeroes.
    pub fn new(plan: Plan) -> Result<Engine> {
        let mut random = Prng::new(plan.seed);
        let (events_in, events) = mpsc::channel();
        let make = |volume: VolumePlan| Volume {
            model: Model::new((volume.size_bytes / CELL_BYTES as u64) as u32),
            workload: match volume.image {
                Some(_) => Workload::of_fleet(random.fork(), volume.size_bytes),
                None => Workload::new(random.fork(), volume.size_bytes),
            },
            plan: volume,
        };
        let mut engine = Engine {
            depth: plan.depth,
            volumes: plan.volumes.into_iter().map(make).collect(),
            connections: Vec::new(),
            flights: Vec::new(),
            free: Vec::new(),
            events,
            events_in,
            host: HostState::Up,
            generation: 1,
            writes_drawn: 0,
            connections_made: 0,
            counts: Counts::default(),
            history: History::new(Instant::now()),
            source: Source::Nothing,
        };
        engine.connect_all(Instant::now())?;
        Ok(engine)
    }

    /// Runs the workload until `faults` returns, then lets everything in flight finish.
    pub fn run<T: Send>(&mut self, faults: impl FnOnce(Control) -> Result<T> + Send) -> Result<T> {
        let stopped = Arc::new(AtomicBool::new(false));
        let control = Control { events: self.events_in.clone(), stopped: Arc::clone(&stopped) };
        self.source = Source::Workload;
        let outcome = thread::scope(|scope| {
            let faults = scope.spawn(move || faults(control));
            let mut worked = Ok(());
            while worked.is_ok() && !faults.is_finished() {
                worked = self.round();
            }
            stopped.store(true, Ordering::Relaxed);
            let committed = faults.join().map_err(|_| anyhow::anyhow!("the fault thread panicked"))?;
            match (worked, committed) {
                (Ok(()), committed) => committed,
                (Err(error), Ok(_)) => Err(error),
                (Err(error), Err(fault)) => {
                    Err(error.context(format!("the faults ended with: {fault:#}\nthe workload")))
                }
            }
        })?;
        self.source = Source::Nothing;
        self.drain()?;
        Ok(outcome)
    }

    /// Reads every byte of every volume and holds it against the model.
    pub fn sweep(&mut self) -> Result<()> {
        self.source = Source::Sweep(vec![0; self.volumes.len()]);
        loop {
            self.round()?;
            let Source::Sweep(at) = &self.source else { unreachable!("a sweep goes on until it is done") };
            if self.in_flight() == 0 && at.iter().zip(&self.volumes).all(|(at, v)| *at == v.plan.size_bytes) {
                break;
            }
        }
        self.source = Source::Nothing;
        let unsettled: usize = self.volumes.iter().map(|v| v.model.unsettled()).sum();
        ensure!(unsettled == 0, "{unsettled} cells are unsettled after everything was read: a fault of this program");
        Ok(())
    }

    /// Ends all connections, as a client that is done does.
    pub fn disconnect(&mut self) {
        for connection in self.connections.drain(..) {
            let _ = connection.sender.send(nbd::encode(Command::Disconnect, false, 0, 0, 0, &[]));
        }
    }

    /// Connects again after [`Engine::disconnect`].
    pub fn reconnect(&mut self) -> Result<()> {
        self.connect_all(Instant::now())
    }

    pub fn bytes(&self) -> u64 {
        self.volumes.iter().map(|v| v.plan.size_bytes).sum()
    }

    fn in_flight(&self) -> usize {
        self.flights.len() - self.free.len()
    }

    fn drain(&mut self) -> Result<()> {
        while self.in_flight() > 0 || self.host != HostState::Up {
            self.round()?;
        }
        Ok(())
    }

    /// Takes what has happened, then sends what may be sent.
    fn round(&mut self) -> Result<()> {
        match self.events.recv_timeout(ROUND_MAX) {
            Ok(event) => self.on_event(event)?,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => unreachable!("the engine keeps a sender"),
        }
        while let Ok(event) = self.events.try_recv() {
            self.on_event(event)?;
        }
        match self.host {
            HostState::Up => {
                self.check_stuck()?;
                self.top_up()?;
            }
            HostState::Going => {}
            HostState::Returning(ordered) => {
                if self.connections.iter().all(|c| !c.open) {
                    self.connect_all(ordered)?;
                    self.host = HostState::Up;
                }
            }
        }
        Ok(())
    }

    fn on_event(&mut self, event: Event) -> Result<()> {
        match event {
            Event::Reply { connection, reply, at } => self.on_reply(connection, reply, at),
            Event::Closed { connection, why } => self.on_closed(connection, why),
            Event::HostGoing => {
                ensure!(self.host == HostState::Up, "the host is killed once at a time");
                self.host = HostState::Going;
                Ok(())
            }
            Event::HostBack { ordered } => {
                self.host = HostState::Returning(ordered);
                Ok(())
            }
            Event::Fault(text) => {
                self.history.fault(&text);
                Ok(())
            }
        }
    }

    fn on_closed(&mut self, id: u64, why: Option<String>) -> Result<()> {
        let Some(index) = self.connections.iter().position(|c| c.id == id) else { return Ok(()) };
        if let Some(why) = why {
            bail!("the server broke the protocol: {why}");
        }
        ensure!(self.host != HostState::Up, "the server closed a connection, and nobody had killed it");
        self.connections[index].open = false;
        for slot in 0..self.flights.len() {
            if self.flights[slot].as_ref().is_some_and(|f| f.connection == index) {
                let flight = self.take(slot);
                self.counts.lost += 1;
                self.note("lost", &flight);
                let model = &mut self.volumes[flight.volume].model;
                match flight.drawn.kind {
                    Kind::Read => model.lose_read(slot as Request),
                    Kind::Flush => {}
                    _ => model.lose_write(slot as Request),
                }
            }
        }
        Ok(())
    }

    fn on_reply(&mut self, id: u64, reply: Reply, at: Instant) -> Result<()> {
        let slot = reply.cookie.slot as usize;
        let known =
            self.flights.get(slot).and_then(Option::as_ref).is_some_and(|f| self.connections[f.connection].id == id);
        ensure!(known, "the server answered a request that was not asked on that connection (slot {slot})");
        let flight = self.take(slot);
        let took = at.saturating_duration_since(flight.sent);
        self.counts.longest = self.counts.longest.max(took);
        self.connections[flight.connection].in_flight -= 1;
        let what = flight.drawn;
        if reply.error != 0 {
            self.note("failed", &flight);
            let history = self.history.about(flight.volume as u8, what.offset);
            bail!("{what:?} failed with error {} {} after {took:?}\n{history}", reply.error, reply.message);
        }
        match what.kind {
            Kind::Flush => {}
            Kind::Read => {
                let placed = reply.data_offset.is_none_or(|offset| offset == what.offset);
                ensure!(placed, "a read at {} was answered with bytes of {:?}", what.offset, reply.data_offset);
                self.check(slot, &flight, &reply.data)?;
            }
            _ => {
                self.note("done", &flight);
                self.volumes[flight.volume].model.finish_write(slot as Request);
            }
        }
        Ok(())
    }

    /// Holds the bytes of a read against the model.
    fn check(&mut self, slot: usize, flight: &Flight, data: &[u8]) -> Result<()> {
        let (offset, len) = (flight.drawn.offset, flight.drawn.len);
        ensure!(data.len() as u64 == len, "a read of {len} bytes was answered with {}", data.len());
        let image = self.volumes[flight.volume].plan.image.clone();
        let mut reading = self.volumes[flight.volume].model.finish_read(slot as Request);
        let seen = match &image {
            Some(image) => see_blocks(&mut reading, flight.volume as u8, image, offset, data),
            None => see_cells(&mut reading, flight.volume as u8, offset, data),
        };
        if let Err((begins, why)) = seen {
            let history = self.history.about(flight.volume as u8, begins);
            let export = &self.volumes[flight.volume].plan.export;
            bail!("mismatch: volume {export}, offset {begins}, read at {offset}+{len}: {why}\n{history}");
        }
        Ok(())
    }

    fn take(&mut self, slot: usize) -> Flight {
        self.free.push(slot);
        self.flights[slot].take().expect("the slot is in use")
    }

    fn note(&mut self, text: &'static str, flight: &Flight) {
        let Drawn { kind, offset, len } = flight.drawn;
        if kind.changes() {
            self.history.request(text, flight.volume as u8, offset, len, flight.version.0);
        }
    }

    fn check_stuck(&self) -> Result<()> {
        let now = Instant::now();
        for flight in self.flights.iter().flatten() {
            if now.saturating_duration_since(flight.sent) > STUCK_AFTER {
                let history = self.history.about(flight.volume as u8, flight.drawn.offset);
                bail!("{:?} is unanswered after {STUCK_AFTER:?}\n{history}", flight.drawn);
            }
        }
        Ok(())
    }

    fn top_up(&mut self) -> Result<()> {
        for index in 0..self.connections.len() {
            while self.connections[index].in_flight < self.depth {
                let Some(drawn) = self.next_request(self.connections[index].volume) else { break };
                self.send(index, drawn);
            }
        }
        Ok(())
    }

    fn next_request(&mut self, volume: usize) -> Option<Drawn> {
        match &mut self.source {
            Source::Nothing => None,
            Source::Workload => Some(self.volumes[volume].workload.draw()),
            Source::Sweep(at) => {
                let left = self.volumes[volume].plan.size_bytes - at[volume];
                let drawn = Drawn { kind: Kind::Read, offset: at[volume], len: left.min(REQUEST_BYTES_MAX / 2) };
                at[volume] += drawn.len;
                (drawn.len > 0).then_some(drawn)
            }
        }
    }

    fn send(&mut self, connection: usize, drawn: Drawn) {
        let volume = self.connections[connection].volume;
        let slot = self.free.pop().unwrap_or_else(|| {
            self.flights.push(None);
            self.flights.len() - 1
        });
        let mut version = Version::ZEROES;
        if let Kind::Write { .. } = drawn.kind {
            self.writes_drawn += 1;
            version = Version::new(self.generation, self.writes_drawn);
        }
        let bytes = request_bytes(volume as u8, slot as u32, drawn, version);
        let flight = Flight { connection, volume, drawn, version, sent: Instant::now() };
        let cells = cells_of(drawn.offset, drawn.len);
        match drawn.kind {
            Kind::Read => self.volumes[volume].model.begin_read(slot as Request, cells),
            Kind::Flush => {}
            _ => self.volumes[volume].model.begin_write(slot as Request, cells, version),
        }
        self.count(drawn);
        self.note("begun", &flight);
        self.flights[slot] = Some(flight);
        self.connections[connection].in_flight += 1;
        // A failure to send shows as a closed connection on the receiving side.
        let _ = self.connections[connection].sender.send(bytes);
    }

    fn count(&mut self, drawn: Drawn) {
        self.counts.requests += 1;
        match drawn.kind {
            Kind::Read => {
                self.counts.reads += 1;
                self.counts.read_bytes += drawn.len;
            }
            Kind::Write { .. } => {
                self.counts.writes += 1;
                self.counts.written_bytes += drawn.len;
            }
            Kind::Trim | Kind::WriteZeroes => self.counts.trims += 1,
            Kind::Flush => self.counts.flushes += 1,
        }
    }

    /// Opens every connection of the plan, old ones being closed; retries while the host may still be opening volumes.
    fn connect_all(&mut self, since: Instant) -> Result<()> {
        self.connections.clear();
        self.generation += 1;
        for volume in 0..self.volumes.len() {
            for number in 0..self.volumes[volume].plan.connections {
                let client = self.connect_one(volume, number % 2 == 0, since)?;
                self.add_connection(volume, client)?;
            }
        }
        self.counts.longest_reopening = self.counts.longest_reopening.max(since.elapsed());
        Ok(())
    }

    fn connect_one(&self, volume: usize, structured: bool, since: Instant) -> Result<Client> {
        let plan = &self.volumes[volume].plan;
        loop {
            match Client::connect(&plan.socket, &plan.export, structured) {
                Ok(client) => {
                    let size = client.size_bytes;
                    ensure!(
                        size == plan.size_bytes,
                        "export {} has {size} bytes, not {}",
                        plan.export,
                        plan.size_bytes
                    );
                    return Ok(client);
                }
                Err(error) if since.elapsed() > RECONNECT_MAX => {
                    return Err(error.context(format!("export {} does not open in {RECONNECT_MAX:?}", plan.export)));
                }
                Err(_) => thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    fn add_connection(&mut self, volume: usize, client: Client) -> Result<()> {
        self.connections_made += 1;
        let (id, structured) = (self.connections_made, client.structured);
        let (mut stream, mut receiver) = client.split()?;
        let (sender, outgoing) = mpsc::channel::<Vec<u8>>();
        let spawn = |name: String| thread::Builder::new().name(name);
        spawn(format!("send-{id}"))
            .spawn(move || {
                while let Ok(bytes) = outgoing.recv() {
                    if stream.write_all(&bytes).is_err() {
                        break;
                    }
                }
            })
            .context("cannot start a thread")?;
        let events = self.events_in.clone();
        spawn(format!("receive-{id}"))
            .spawn(move || {
                let why = loop {
                    match receiver.receive() {
                        Ok(Some(reply)) => {
                            if events.send(Event::Reply { connection: id, reply, at: Instant::now() }).is_err() {
                                return;
                            }
                        }
                        Ok(None) => break None,
                        Err(error) => break Some(format!("{error:#}")),
                    }
                };
                let _ = events.send(Event::Closed { connection: id, why });
            })
            .context("cannot start a thread")?;
        self.connections.push(Connection { id, volume, structured, sender, in_flight: 0, open: true });
        Ok(())
    }

    /// How many connections agreed on structured replies.
    pub fn structured_connections(&self) -> usize {
        self.connections.iter().filter(|c| c.structured).count()
    }
}

/// Holds what a read at `offset` returned against what was possible; else says at which offset it was not, and why.
pub fn see_cells(reading: &mut Reading<'_>, volume: u8, offset: u64, data: &[u8]) -> Result<(), (u64, String)> {
    let end = offset + data.len() as u64;
    for index in cells_of(offset, data.len() as u64) {
        let place = Place { volume, index };
        let begins = u64::from(index) * CELL_BYTES as u64;
        let (from, to) = (begins.max(offset), (begins + CELL_BYTES as u64).min(end));
        let bytes = &data[(from - offset) as usize..(to - offset) as usize];
        let found = if bytes.len() == CELL_BYTES {
            cell::read(place, bytes).map_err(|bad| bad.to_string()).and_then(|version| {
                reading.see(index, version).map_err(|m| format!("{:?}, possible were {:?}", m.found, m.possible))
            })
        } else {
            see_part(reading, place, (from - begins) as usize, bytes)
        };
        found.map_err(|why| (begins, why))?;
    }
    Ok(())
}

/// The same of whole cells of a volume that began as an image: in the model that stands for zeroes, which nobody writes there.
fn see_blocks(
    reading: &mut Reading<'_>,
    volume: u8,
    image: &[u8],
    offset: u64,
    data: &[u8],
) -> Result<(), (u64, String)> {
    let first = &image[offset as usize..][..data.len()];
    let cells = data.chunks_exact(CELL_BYTES).zip(first.chunks_exact(CELL_BYTES));
    for (index, (bytes, first)) in cells_of(offset, data.len() as u64).zip(cells) {
        let place = Place { volume, index };
        let found = match cell::read(place, bytes) {
            _ if bytes == first => Ok(Version::ZEROES),
            Ok(Version::ZEROES) => Err("zeroes that nobody wrote".to_string()),
            found => found.map_err(|bad| bad.to_string()),
        };
        let seen = found.and_then(|version| {
            reading.see(index, version).map_err(|m| format!("{:?}, possible were {:?}", m.found, m.possible))
        });
        seen.map_err(|why| (u64::from(index) * CELL_BYTES as u64, why))?;
    }
    Ok(())
}

/// A read that holds only some bytes of a cell: they must be those of one of its possible versions.
fn see_part(reading: &mut Reading<'_>, place: Place, from: usize, bytes: &[u8]) -> Result<(), String> {
    let possible = reading.possible(place.index);
    let mut whole = [0; CELL_BYTES];
    let matches = possible.iter().any(|version| {
        cell::fill(place, *version, &mut whole);
        whole[from..from + bytes.len()] == *bytes
    });
    if matches { Ok(()) } else { Err(format!("part of a cell that is none of {possible:?}")) }
}

/// A drawn request on the wire, with what a write of this version writes.
pub fn request_bytes(volume: u8, slot: u32, drawn: Drawn, version: Version) -> Vec<u8> {
    let Drawn { kind, offset, len } = drawn;
    let (command, fua) = match kind {
        Kind::Read => (Command::Read, false),
        Kind::Write { fua } => (Command::Write, fua),
        Kind::Trim => (Command::Trim, false),
        Kind::WriteZeroes => (Command::WriteZeroes, false),
        Kind::Flush => (Command::Flush, false),
    };
    let mut payload = Vec::new();
    if command == Command::Write {
        payload.resize(len as usize, 0);
        for (index, bytes) in cells_of(offset, len).zip(payload.chunks_exact_mut(CELL_BYTES)) {
            cell::fill(Place { volume, index }, version, bytes);
        }
    }
    nbd::encode(command, fua, slot, offset, len as u32, &payload)
}
