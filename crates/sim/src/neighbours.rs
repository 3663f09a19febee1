//! Guests of several volumes of one host, which keep requests under way all the time: who waits for whom, by counts of the
//! host's schedulers, and of what nodes answer ([`crate::service`]).
//!
//! Role: the shell of a host with one or several reactors, or of as many hosts, on the same nodes.

use crate::multi_host::SHARE_MIN;
use crate::multi_host::machine::HostMachine;
use crate::service::Service;
use crate::world::{MachineAt, World};
use holdfast_base::{
    BlockOp, BlockRequest, Buf, ByteRange, InstanceId, MetaRequest, MetaVersion, NodeId, RequestToken, Token, VolumeId,
};
use holdfast_format::features::Feature;
use holdfast_format::forward::Client as Association;
use holdfast_format::geometry::Layout;
use holdfast_format::packing::Compression;
use holdfast_format::root::{Root, root_key};
use holdfast_host::{
    Budget, Caller, Care, Connection, Effect, Event, Figures, GroupMemberAt, GroupOrder, Host, Isolation, Kind, Limits,
    Lists, OpenSpec, Order, PackingShare, Report, Room, Sibling, Source,
};
use holdfast_qos::Share;
use holdfast_store as store;
use holdfast_volume::State;
use std::collections::BTreeMap;
use std::time::Duration;

const SIZE_BYTES: u64 = 64 << 20;

/// Of all that is written.
const CONTENT: u8 = 7;

/// Volumes have this time to open.
const OPEN_WITHIN: Duration = Duration::from_secs(30);

/// A volume of a run.
#[derive(Clone, Copy, Debug)]
pub struct Home {
    pub reactor: usize,
    /// What its limit is told; empty for none.
    pub limit: &'static str,
}

/// What a guest does all the time.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    pub volume: usize,
    pub in_flight: u64,
    pub bytes: u64,
    pub reads: bool,
    /// Where the first is, and from each to the next, in requests: one is in order.
    pub at: u64,
    pub step: u64,
}

struct Guest {
    load: Load,
    session: Token,
    asked: u64,
    answered: u64,
}

/// What volumes are on.
#[derive(Clone, Copy)]
pub struct Grid {
    /// Of one host, or hosts of one reactor each.
    pub reactors: usize,
    pub are_hosts: bool,
    pub isolation: Option<Isolation>,
    /// Operations that a disk of a node takes at a time, if not as many as usual.
    pub disk_in_flight: Option<usize>,
    pub rebuild_after: Duration,
    pub mutations: holdfast_host::Mutations,
    /// How volumes are packed from the start.
    pub compression: Compression,
    pub packing: PackingShare,
    pub layout: &'static str,
    pub nodes: u32,
    /// Of the one disk of a node.
    pub disk_bytes: u64,
    pub journal_bytes: u64,
    pub budget: Budget,
    /// What controllers are told besides.
    pub tune: fn(&mut holdfast_volume::Config),
}

impl Default for Grid {
    fn default() -> Grid {
        Grid {
            reactors: 1,
            are_hosts: false,
            isolation: Some(Isolation::default()),
            disk_in_flight: None,
            rebuild_after: Duration::from_secs(600),
            mutations: holdfast_host::Mutations::default(),
            compression: Compression::Off,
            packing: PackingShare::default(),
            layout: "mirror:2",
            nodes: 3,
            disk_bytes: 4 << 30,
            journal_bytes: 1 << 30,
            budget: Budget { writeback_bytes: 1 << 30, map_cache_bytes: 64 << 20, read_ahead_bytes: 0 },
            tune: |_| {},
        }
    }
}

pub struct Neighbours {
    pub world: World<HostMachine>,
    reactors: Vec<MachineAt>,
    homes: Vec<Home>,
    guests: BTreeMap<Token, Guest>,
    next_guest: u64,
    /// They ask again when they are answered.
    is_busy: bool,
    /// What reactors hear of a group of snapshots is not told to the one that takes it.
    pub are_mute: bool,
    /// Sums and shares that went from reactor to reactor.
    pub sums: u64,
    pub shares: u64,
}

fn name_of(volume: usize) -> String {
    format!("v{volume}")
}

/// A volume's id.
pub fn id_of(volume: usize) -> VolumeId {
    VolumeId(volume as u128 + 1)
}

impl Neighbours {
    /// Three nodes, and a host with so many reactors that has opened these volumes.
    pub fn new(seed: u64, reactors: usize, homes: &[Home]) -> Neighbours {
        Neighbours::isolated(seed, reactors, homes, Some(Isolation::default()))
    }

    /// The same, of volumes that are so far isolated from each other.
    pub fn isolated(seed: u64, reactors: usize, homes: &[Home], isolation: Option<Isolation>) -> Neighbours {
        Neighbours::on(seed, Grid { reactors, isolation, ..Grid::default() }, homes)
    }

    pub fn on(seed: u64, grid: Grid, homes: &[Home]) -> Neighbours {
        let Grid { reactors, are_hosts, isolation, rebuild_after, .. } = grid;
        let mut world = World::new(seed, false);
        Neighbours::start_nodes(&mut world, grid);
        (0..if are_hosts { reactors } else { 1 }).for_each(|_| _ = world.add_host());
        let machines = (0..reactors).map(|reactor| {
            let config = holdfast_host::Config {
                reactor: if are_hosts { 0 } else { reactor },
                reactors: if are_hosts { 1 } else { reactors },
                grid: world.grid,
                name: if are_hosts { format!("host{reactor}") } else { "host".to_string() },
                instance: InstanceId((reactor as u128 + 1) << 64),
                budget: grid.budget,
                care: Care { rebuild_after, scrub_every: Duration::from_secs(14 * 86_400) },
                isolation,
                packing: grid.packing,
                room: Room { max: 64, kept_for_local: 8 },
                expected_volumes: homes.len(),
                mutations: grid.mutations,
                of_controllers: holdfast_volume::Mutations::default(),
                tune: grid.tune,
            };
            HostMachine::new(Host::new(&config))
        });
        let machines: Vec<HostMachine> = machines.collect();
        let host_of = |reactor| if are_hosts { reactor } else { 0 };
        let attached = machines.into_iter().enumerate();
        let reactors = attached.map(|(reactor, machine)| world.attach(host_of(reactor), machine)).collect();
        let mut run = Neighbours {
            world,
            reactors,
            homes: homes.to_vec(),
            guests: BTreeMap::new(),
            next_guest: 0,
            is_busy: true,
            are_mute: false,
            sums: 0,
            shares: 0,
        };
        run.open_all(grid);
        run
    }

    fn start_nodes(world: &mut World<HostMachine>, grid: Grid) {
        let sizing =
            store::JournalSizing { journal_bytes: grid.journal_bytes, unit_bytes: 1 << 20, shard_bytes_mean: 64 << 10 };
        for n in 1..=grid.nodes {
            let mut config = store::NodeConfig::new(world.grid, NodeId(n), InstanceId(0));
            config.disk_in_flight_max = grid.disk_in_flight.unwrap_or(config.disk_in_flight_max);
            let node = world.add_node(config, sizing, &[grid.disk_bytes]);
            world.start_node(node);
        }
    }

    fn open_all(&mut self, grid: Grid) {
        let Grid { are_hosts, compression, .. } = grid;
        let layout: Layout = grid.layout.parse().expect("a layout");
        let limits: Limits = self
            .homes
            .iter()
            .enumerate()
            .filter(|(_, home)| !home.limit.is_empty())
            .map(|(volume, home)| (id_of(volume), home.limit.to_string()))
            .collect();
        for reactor in 0..self.reactors.len() {
            self.order(reactor, Order::Access { lists: Lists::new(), limits: limits.clone() });
            let own = (0..self.homes.len()).filter(|volume| !are_hosts || self.homes[*volume].reactor == reactor);
            self.order(reactor, Order::Share(own.map(id_of).collect()));
        }
        for (volume, home) in self.homes.clone().into_iter().enumerate() {
            let (id, name) = (id_of(volume), name_of(volume));
            let mut root = Root::new(self.world.grid, id, &name, SIZE_BYTES, layout);
            if compression != Compression::Off {
                root.features = root.features.with(Feature::Packed);
            }
            let (key, value) = (root_key(id), Some(root.encode()));
            self.world.meta.apply(&MetaRequest::Swap { key, expect: MetaVersion::ABSENT, value, guard: None });
            let spec = OpenSpec::of(&root, true, compression, None);
            self.order(home.reactor, Order::Open { spec, exported: true });
        }
        let late = self.world.now() + OPEN_WITHIN;
        let is_open = |run: &Neighbours, volume: usize| {
            let found = run.host(run.homes[volume].reactor).find(&name_of(volume));
            found.is_some_and(|(volume, _)| volume.controller().state() == State::Open)
        };
        while !(0..self.homes.len()).all(|volume| is_open(self, volume)) {
            assert!(self.world.now() < late && self.world.step(), "not all volumes open");
            self.see_to();
        }
    }

    /// How many there are; of hosts with one each, as many hosts.
    pub fn reactors(&self) -> usize {
        self.reactors.len()
    }

    pub fn host(&self, reactor: usize) -> &Host {
        &self.world.machine(self.reactors[reactor]).expect("it runs").host
    }

    /// The first reactor gets the least share of the window.
    pub fn give_least_share(&mut self) {
        let message = Sibling::Share(Share::Units(SHARE_MIN));
        self.tell(0, Event::Sibling { reactor: 0, message });
    }

    /// The host that has a volume, and what it is called there.
    pub fn home_of(&self, volume: usize) -> (&Host, String) {
        (self.host(self.homes[volume].reactor), name_of(volume))
    }

    /// CPU time of a reactor's worker so far.
    pub fn worked(&self, reactor: usize) -> Duration {
        self.world.machine(self.reactors[reactor]).expect("it runs").worked
    }

    /// How a volume fares among others.
    pub fn figures(&self, volume: usize) -> Figures {
        self.host(self.homes[volume].reactor).figures(&name_of(volume)).unwrap_or_default()
    }

    /// Requests of a guest that were answered.
    pub fn answered(&self, guest: Token) -> u64 {
        self.guests[&guest].answered
    }

    /// Has snapshots of that name taken of all volumes, at one instant.
    pub fn take_group(&mut self, name: &str) {
        let member = |(volume, home): (usize, &Home)| GroupMemberAt { volume: name_of(volume), reactor: home.reactor };
        let members = self.homes.iter().enumerate().map(member).collect();
        self.order(0, Order::SnapshotGroup(GroupOrder { members, name: name.to_string(), created_ms: 0 }));
        self.see_to();
    }

    fn order(&mut self, reactor: usize, order: Order) {
        self.tell(reactor, Event::Order { ticket: u64::MAX, order });
    }

    fn tell(&mut self, reactor: usize, event: Event) {
        self.world.with(self.reactors[reactor], |machine, now, out| {
            machine.act(|host, effects| host.handle(now, event, effects), out);
        });
    }

    /// A guest comes, and has its requests under way from here on.
    pub fn come(&mut self, load: Load) -> Token {
        let to = Token(self.next_guest);
        self.next_guest += 1;
        let (label, reactor) = (format!("guest {}", to.0), self.homes[load.volume].reactor);
        let association = Association { label: label.clone(), ..Association::default() };
        let connection = Connection { to, label, source: Source::Local, caller: Caller::Local, association };
        let opened = self.world.with(self.reactors[reactor], |machine, now, out| {
            machine.act(|host, effects| host.open_session(now, connection, &name_of(load.volume), effects), out)
        });
        let (session, _) = opened.expect("the host runs").expect("a guest may come");
        self.guests.insert(to, Guest { load, session, asked: 0, answered: 0 });
        (0..load.in_flight).for_each(|_| self.ask(to));
        self.see_to();
        to
    }

    /// Writes all of a volume, in what goes to segments at once.
    pub fn fill(&mut self, volume: usize) {
        let bytes = 1 << 20;
        let guest = self.come(Load { volume, in_flight: 8, bytes, reads: false, at: 0, step: 1 });
        while self.answered(guest) < SIZE_BYTES / bytes {
            self.pass(Duration::from_millis(10));
        }
        self.go(guest);
        // Then nothing of it counts any more.
        self.pass(Duration::from_secs(3));
    }

    /// Where requests of a volume spent their time of late.
    pub fn stages(&self, volume: usize, kind: Kind) -> Report {
        let took =
            self.host(self.homes[volume].reactor).took(self.world.now(), &name_of(volume)).expect("it is served");
        let [reads, writes] = took;
        match kind {
            Kind::Read => reads,
            Kind::Write => writes,
        }
        .expect("there were some")
    }

    /// From here on what nodes answer is counted.
    pub fn count_service(&mut self) {
        self.world.service = Some(Service::default());
    }

    pub fn service(&self) -> &Service {
        self.world.service.as_ref().expect("it is counted")
    }

    /// A guest goes, whatever it has under way.
    pub fn go(&mut self, guest: Token) {
        let Guest { load, session, .. } = self.guests.remove(&guest).expect("it is there");
        self.tell(self.homes[load.volume].reactor, Event::Close { session });
        self.see_to();
    }

    fn ask(&mut self, to: Token) {
        let guest = self.guests.get_mut(&to).expect("it is there");
        let Load { volume, bytes, reads, at, step, .. } = guest.load;
        let range = ByteRange { offset: (at + guest.asked * step * bytes) % SIZE_BYTES, len: bytes };
        let op = match reads {
            true => BlockOp::Read(range),
            false => BlockOp::Write { offset: range.offset, data: Buf::copy_from(&vec![CONTENT; bytes as usize]) },
        };
        let request = BlockRequest { token: RequestToken(guest.asked), op };
        guest.asked += 1;
        let session = guest.session;
        self.tell(self.homes[volume].reactor, Event::Request { session, request });
    }

    fn see_to(&mut self) {
        for reactor in 0..self.reactors.len() {
            let at = self.reactors[reactor];
            while let Some(wish) = self.world.machine_mut(at).and_then(|machine| machine.wishes.pop_front()) {
                match wish {
                    Effect::Reply { to, reply } => {
                        assert!(reply.result.is_ok(), "{reply:?}");
                        if let Some(guest) = self.guests.get_mut(&to) {
                            guest.answered += 1;
                            if self.is_busy {
                                self.ask(to);
                            }
                        }
                    }
                    Effect::Sibling { message: Sibling::Heard { .. }, .. } if self.are_mute => {}
                    Effect::Sibling { reactor: to, message } => {
                        self.sums += u64::from(matches!(message, Sibling::Sums(_)));
                        self.shares += u64::from(matches!(message, Sibling::Share(_)));
                        self.tell(to, Event::Sibling { reactor, message });
                    }
                    _ => {}
                }
            }
        }
    }

    /// Lets so much time pass.
    pub fn pass(&mut self, span: Duration) {
        let until = self.world.now() + span;
        while self.world.next_at().is_some_and(|at| at <= until) {
            self.world.step();
            self.see_to();
        }
    }

    /// Nobody asks any more, and all that was asked is answered.
    pub fn rest(&mut self) {
        self.is_busy = false;
        let late = self.world.now() + OPEN_WITHIN;
        while self.guests.values().any(|guest| guest.answered < guest.asked) {
            assert!(self.world.now() < late && self.world.step(), "not all is answered");
            self.see_to();
        }
    }
}
