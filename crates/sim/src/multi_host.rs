//! Runs of several hosts that offer one volume: the real [`Host`]s with their controllers, simulated connections between
//! them, and clients that go from path to path.
//!
//! Role: the shells of the hosts. Who serves is decided by an [`operator`] that hands the volume over and has it taken over, or by
//! the hosts' control planes ([`planned`]), and then there are several volumes. Each client has a part of a volume for itself,
//! and never two requests on the same sectors under way. So any write that is carried out after its answer shows as a read
//! that goes back.
//!
//! In a third of the runs filters stand before the controllers, which delay, stall and ration requests: what a filter holds when the
//! volume goes elsewhere, or its client does, must not come out late.
//!
//! A client changes its path when its connection ends, and now and then of its own accord, once its ingress has what it
//! sent. What it then asks again is the same request, in the history one operation from first to last.

mod contend;
pub(crate) mod machine;
mod operator;
pub(crate) mod planned;

use crate::checker::SECTOR_BYTES;
use crate::cluster::name_of;
use crate::disk::Crash;
use crate::plan::{disk_in_flight_max, node_reactors};
use crate::workload::{Area, Guests, Mix, What};
use crate::world::{MachineAt, Output, World};
use contend::{Given, identity};
use holdfast_base::{
    BlockError, BlockOp, BlockReply, BlockRequest, Buf, Effects, InstanceId, Instant, MetaRequest, MetaVersion, NodeId,
    Prng, RequestToken, Slab, Token, VolumeId,
};
use holdfast_format::forward::{Answer, Ask, Refusal};
use holdfast_format::root::{Root, root_key};
use holdfast_host::forward::LAPSE;
use holdfast_host::homes::FRONT;
use holdfast_host::requests::Requester;
use holdfast_host::{
    Budget, Caller, Care, Connection, Effect, Event, Host, Isolation, Limits, LinkId, Lists, OpenSpec, Order, Outcome,
    PackingShare, PeerEffect, PeerEvent, Room, Sibling, Source,
};
use holdfast_qos::{Cost, Share};
use holdfast_store as store;
use holdfast_volume::{Effect as VolumeEffect, State, Target};
use machine::HostMachine;
use operator::{NAME, Operator, PRELOAD, PREPARE, VOLUME, YIELD};
use planned::HostReport;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// Of every volume.
pub(crate) const SIZE_BYTES: u64 = 512 << 10;

const SECTOR: u64 = SECTOR_BYTES as u64;

/// A client that hears nothing for so long leaves its path, whoever may still read what it sent there.
const CLIENT_PATIENCE: Duration = Duration::from_millis(2 * LAPSE.as_millis() as u64 + 1_000);

/// Pace of a host's comparing what it does with what the records say.
const ASSIGNMENT_PACE: Duration = Duration::from_millis(500);

/// Of the window, for a reactor of several.
pub(crate) const SHARE_MIN: Cost = Cost::units(8);

/// Something may be due between hosts.
const WAKE: u64 = 7;

/// Ticket of orders whose outcome nobody goes by.
pub(crate) const OTHER: u64 = 0;

/// What a run is made of.
#[derive(Clone, Debug)]
pub struct MultiHostPlan {
    pub seed: u64,
    pub hosts: usize,
    pub clients: usize,
    /// Requests of all clients.
    pub requests: u32,
    /// One comes no later after the one before.
    pub ask_within_us: u64,
    /// Pace of looking what is due.
    pub look_every: Duration,
    /// Of a thousand looks at what may happen: how many bring something of the kind.
    pub crash: u32,
    pub hang: u32,
    pub cut: u32,
    pub reset: u32,
    pub slow: u32,
    pub node_hang: u32,
    pub node_crash: u32,
    pub jump: u32,
    pub take_over: u32,
    pub hand_over: u32,
    /// Of a thousand requests, so many come of another client than the one whose turn it is. Where it is not told all share the
    /// volume.
    pub contend: Option<u32>,
    /// Before the controllers, from above.
    pub filters: Vec<String>,
    /// Of every volume; empty for none.
    pub limit: String,
    /// Hosts are as one reactor of several whose share of the window is the least.
    pub small_share: bool,
    pub mutations: holdfast_host::Mutations,
    pub of_controllers: holdfast_volume::Mutations,
}

impl MultiHostPlan {
    /// Of hosts whose control planes decide; nothing goes wrong by itself.
    pub fn planned(seed: u64, hosts: usize, volumes: usize) -> MultiHostPlan {
        MultiHostPlan {
            seed,
            hosts,
            clients: 2 * volumes,
            requests: 600,
            ask_within_us: 120_000,
            look_every: Duration::from_millis(5),
            crash: 0,
            hang: 0,
            cut: 0,
            reset: 0,
            slow: 0,
            node_hang: 0,
            node_crash: 0,
            jump: 0,
            take_over: 0,
            hand_over: 0,
            contend: None,
            filters: Vec::new(),
            limit: String::new(),
            small_share: false,
            mutations: holdfast_host::Mutations::default(),
            of_controllers: holdfast_volume::Mutations::default(),
        }
    }

    pub fn from_seed(seed: u64) -> MultiHostPlan {
        let mut prng = Prng::new(seed ^ 0x9047);
        let mut some = |most: u64| if prng.chance(600) { prng.below(most) as u32 } else { 0 };
        let (crash, hang, cut, reset, slow) = (some(20), some(25), some(25), some(60), some(30));
        let node_hang = some(60);
        let (jump, take_over, hand_over) = (some(40), some(20), some(30));
        let (limit, small_share) = draw_turns(seed);
        MultiHostPlan {
            seed,
            hosts: prng.between(2, 3) as usize,
            clients: prng.between(1, 5) as usize,
            requests: prng.between(60, 200) as u32,
            ask_within_us: 20_000,
            look_every: Duration::from_millis(1),
            crash,
            hang,
            cut,
            reset,
            slow,
            node_hang,
            node_crash: 0,
            jump,
            take_over,
            hand_over,
            contend: None,
            filters: draw_filters(seed),
            limit,
            small_share,
            mutations: holdfast_host::Mutations::default(),
            of_controllers: holdfast_volume::Mutations::default(),
        }
    }
}

/// Of its own numbers, so that plans without filters are what they were.
fn draw_filters(seed: u64) -> Vec<String> {
    let mut prng = Prng::new(seed ^ 0x1a7e5);
    let count = if prng.chance(333) { prng.between(1, 3) } else { 0 };
    let some = [
        "delay:write=1ms..80ms,share=0.3",
        "delay:all=0ms..20ms,share=0.5",
        "delay:write=500ms..9s,share=0.02",
        "stall:write=3s,every=40",
        "stall:all=14s,every=90",
        "limit:iops=400,burst=20ms",
    ];
    let with_seed = |spec: &str, seed: u64| match spec.starts_with("limit") {
        true => spec.to_string(),
        false => format!("{spec},seed={seed}"),
    };
    (0..count).map(|_| with_seed(prng.pick::<&str>(&some), prng.next_u64())).collect()
}

/// Whether requests wait for their turn, and why: of its own numbers, too.
fn draw_turns(seed: u64) -> (String, bool) {
    let mut prng = Prng::new(seed ^ 0x7a2_115);
    let some = ["iops=60,burst=1ms", "iops=200,burst=20ms", "bytes=256KiB,burst=10ms", "iops=90,burst=40/5s,weight=3"];
    let limit = if prng.chance(300) { prng.pick::<&str>(&some).to_string() } else { String::new() };
    (limit, prng.chance(400))
}

/// What a run came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MultiHostOutcome {
    pub trace_hash: u64,
    pub answered: u64,
    pub path_changes: u64,
    pub aborts: u64,
    pub openings: u64,
    pub handovers: u64,
    /// Requests that were in filters when these were drained or dropped.
    pub caught: u64,
    /// Requests that waited for their turn and were dropped with their session or their controller; and those that went since
    /// the volume was about to.
    pub dropped: u64,
    pub released: u64,
    /// Writes that were refused since another client writes, and how often the right to write has passed on.
    pub refused: u64,
    pub passed_on: u64,
}

#[derive(Clone, Debug)]
enum Parcel {
    Ask { token: u64, ask: Ask },
    Answer { token: u64, answer: Answer },
    End,
}

/// One direction of a connection: in order, late, and held up where the way is cut.
#[derive(Default)]
struct Pipe {
    queue: VecDeque<(Instant, Parcel, Buf)>,
    last_at: Instant,
}

/// An ingress's connection to another host.
struct Conn {
    ingress: usize,
    owner: usize,
    link: LinkId,
    to_owner: Pipe,
    to_ingress: Pipe,
    ingress_open: bool,
    owner_open: bool,
}

/// One host's process.
struct Shell {
    up: bool,
    hangs_until: Option<Instant>,
    machine: Option<MachineAt>,
    /// The host's sessions, by what clients call them.
    opened: BTreeMap<Token, Token>,
    /// Changes that are under way at the volume: whose they are.
    given: BTreeMap<(Requester, RequestToken), Given>,
    /// What its sockets hold while it hangs.
    inbox: VecDeque<ToHost>,
}

#[derive(Clone, Debug)]
enum ToHost {
    Open { session: Token },
    Close { session: Token },
    Request { session: Token, request: BlockRequest },
}

struct Client {
    /// Its host, and its session there.
    path: Option<(usize, Token)>,
    connect_at: Instant,
    pending: BTreeMap<RequestToken, BlockRequest>,
    /// Since then it waits for an answer.
    waits_since: Instant,
    /// What it has sent and its host has not got yet.
    to_host: VecDeque<(Instant, ToHost)>,
    /// Which volume it has a part of, and where.
    served: usize,
    base: u64,
}

/// A volume, and the name under which clients find it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Served {
    pub volume: VolumeId,
    pub name: String,
}

pub struct MultiHost {
    plan: MultiHostPlan,
    world: World<HostMachine>,
    guests: Guests,
    prng: Prng,
    shells: Vec<Shell>,
    conns: Vec<Conn>,
    /// Ways between hosts that are cut, until then; and slow.
    cut: BTreeMap<(usize, usize), Instant>,
    slow: BTreeMap<(usize, usize), Instant>,
    clients: Vec<Client>,
    sessions: Slab<usize>,
    volumes: Vec<Served>,
    operator: Operator,
    /// For control planes, which decide in the operator's place.
    told: Option<VecDeque<HostReport>>,
    /// A node that hangs, and until when.
    node_back: Option<(Instant, usize)>,
    next_link: u64,
    ask_at: Instant,
    misfortune_at: Instant,
    issued: u32,
    healing: bool,
    /// Whose turn it is to write, and until when; of runs in which clients contend.
    turn: (usize, Instant),
    /// Who was the last to change the volume, and sessions whose client another one has followed since they wrote.
    writer: Option<usize>,
    wrote: BTreeSet<(usize, Token)>,
    followed: BTreeSet<(usize, Token)>,
    outcome: MultiHostOutcome,
    failure: Option<String>,
}

impl MultiHost {
    fn new(plan: MultiHostPlan, verbose: bool) -> MultiHost {
        let mut run = MultiHost::with_volumes(plan, vec![Served { volume: VOLUME, name: NAME.to_string() }], verbose);
        let (key, value) = (root_key(VOLUME), Some(run.fresh_root(&run.volumes[0]).encode()));
        run.world.meta.apply(&MetaRequest::Swap { key, expect: MetaVersion::ABSENT, value, guard: None });
        run.start_all();
        run.begin_operating();
        run
    }

    /// Without roots, and no host has started.
    fn with_volumes(plan: MultiHostPlan, volumes: Vec<Served>, verbose: bool) -> MultiHost {
        let mut world = World::new(plan.seed, verbose);
        let mut prng = world.prng.fork();
        let sizing = store::JournalSizing { journal_bytes: 4 << 20, unit_bytes: 128 << 10, shard_bytes_mean: 16 << 10 };
        for n in 0..3 {
            let mut config = store::NodeConfig::new(world.grid, NodeId(n + 1), InstanceId(0));
            config.disk_in_flight_max = disk_in_flight_max(plan.seed);
            config.reactors = node_reactors(plan.seed);
            let node = world.add_node(config, sizing, &[24 << 20]);
            world.start_node(node);
        }
        // In the history volumes stand one behind another.
        let mut guests = Guests::new(prng.fork(), Mix::default(), SIZE_BYTES, 64 << 10, volumes.len() as u64 - 1);
        guests.several_write = plan.contend.is_some();
        let hosts = plan.hosts;
        for _ in 0..hosts {
            world.add_host();
        }
        let part = part_bytes(plan.clients, volumes.len());
        let client = |n: usize| Client {
            path: None,
            connect_at: Instant::ZERO,
            pending: BTreeMap::new(),
            waits_since: Instant::ZERO,
            to_host: VecDeque::new(),
            served: n % volumes.len(),
            base: (n / volumes.len()) as u64 * part,
        };
        let clients = (0..plan.clients).map(client).collect();
        let mut run = MultiHost {
            shells: (0..hosts).map(|_| Shell::default()).collect(),
            clients,
            plan,
            guests,
            prng,
            conns: Vec::new(),
            cut: BTreeMap::new(),
            slow: BTreeMap::new(),
            sessions: Slab::new(1 << 20),
            volumes,
            operator: Operator::default(),
            told: None,
            node_back: None,
            next_link: 1,
            ask_at: Instant::ZERO,
            misfortune_at: Instant::ZERO,
            issued: 0,
            healing: false,
            turn: (0, Instant::ZERO),
            writer: None,
            wrote: BTreeSet::new(),
            followed: BTreeSet::new(),
            outcome: MultiHostOutcome {
                trace_hash: 0,
                answered: 0,
                path_changes: 0,
                aborts: 0,
                openings: 0,
                handovers: 0,
                caught: 0,
                refused: 0,
                passed_on: 0,
                dropped: 0,
                released: 0,
            },
            failure: None,
            world,
        };
        run.world.wake_at(run.world.now(), WAKE);
        run
    }

    fn start_all(&mut self) {
        for host in 0..self.shells.len() {
            self.start(host);
        }
    }

    fn fresh_root(&self, served: &Served) -> Root {
        let layout = "mirror:2".parse().expect("a layout");
        Root::new(self.world.grid, served.volume, &served.name, SIZE_BYTES, layout)
    }

    fn now(&self) -> Instant {
        self.world.now()
    }

    fn trace(&mut self, words: &[u64], text: impl FnOnce() -> String) {
        let now = self.world.now();
        self.world.trace.event(now, words, text);
    }

    fn is_running(&self, host: usize) -> bool {
        self.shells[host].up && self.shells[host].hangs_until.is_none()
    }

    // ---- hosts ----

    /// The host's process begins.
    fn start(&mut self, host: usize) {
        let of = Host::new(&holdfast_host::Config {
            reactor: holdfast_host::homes::FRONT,
            reactors: 1,
            grid: self.world.grid,
            name: name_of(host),
            instance: InstanceId(self.prng.next_u128()),
            budget: Budget { writeback_bytes: 1 << 20, map_cache_bytes: 1 << 20, read_ahead_bytes: 0 },
            care: Care { rebuild_after: Duration::from_secs(600), scrub_every: Duration::from_secs(14 * 86_400) },
            isolation: Some(Isolation::default()),
            packing: PackingShare::default(),
            room: Room { max: 64, kept_for_local: 8 },
            expected_volumes: self.volumes.len(),
            mutations: self.plan.mutations,
            of_controllers: self.plan.of_controllers,
            tune,
        });
        let at = self.world.attach(host, HostMachine::new(of));
        self.shells[host].machine = Some(at);
        self.act(host, |host, _, _| host.observe());
        if self.plan.contend.is_none() {
            self.order(host, OTHER, Order::Share(self.volumes.iter().map(|served| served.volume).collect()));
        }
        let limited = self.volumes.iter().filter(|_| !self.plan.limit.is_empty());
        let limits: Limits = limited.map(|served| (served.volume, self.plan.limit.clone())).collect();
        self.order(host, OTHER, Order::Access { lists: Lists::new(), limits });
        if self.plan.small_share {
            let message = Sibling::Share(Share::Units(SHARE_MIN));
            self.tell(host, Event::Sibling { reactor: FRONT, message });
        }
    }

    fn host(&self, host: usize) -> Option<&Host> {
        Some(&self.world.machine(self.shells[host].machine?)?.host)
    }

    /// Has a host do something, and sees to what follows.
    fn act<T>(&mut self, host: usize, act: impl FnOnce(&mut Host, Instant, &mut Effects<Effect>) -> T) -> Option<T> {
        let at = self.shells[host].machine?;
        self.world.with(at, |machine, now, out: &mut Effects<VolumeEffect>| {
            machine.act(|host, effects| act(host, now, effects), out)
        })
    }

    fn tell(&mut self, host: usize, event: Event) {
        self.act(host, |host, now, out| host.handle(now, event, out));
        self.see_to(host);
    }

    pub(crate) fn order(&mut self, host: usize, ticket: u64, order: Order) {
        self.tell(host, Event::Order { ticket, order });
    }

    /// Carries out what a host wants, in order.
    fn see_to(&mut self, host: usize) {
        loop {
            self.note_observed(host);
            let Some(at) = self.shells[host].machine else { return };
            let Some(wish) = self.world.machine_mut(at).and_then(|machine| machine.wishes.pop_front()) else { return };
            self.on_wish(host, wish);
        }
    }

    fn on_wish(&mut self, host: usize, wish: Effect) {
        match wish {
            Effect::Reply { to, reply } => self.on_client_reply(to, reply),
            Effect::Abort { to, .. } => {
                self.trace(&[40, host as u64, to.0], || format!("h{host} ends session {to:?}"));
                self.outcome.aborts += 1;
                self.shells[host].opened.remove(&to);
                self.on_path_lost(to);
            }
            Effect::Peer(effect) => self.on_peer_effect(host, effect),
            Effect::Done { ticket, outcome } if self.told.is_some() => {
                if ticket != OTHER {
                    self.tell_planes(HostReport::Done { host, ticket, outcome });
                }
            }
            Effect::Done { ticket: PREPARE, outcome: Outcome::Was(true) } => self.on_prepared(),
            Effect::Done { ticket: PRELOAD, outcome } => self.on_preload(host, outcome.preload()),
            Effect::Done { ticket: YIELD, .. } => self.on_yielded(host),
            Effect::Changed { volume } => {
                self.trace(&[45, host as u64], || format!("h{host} does otherwise"));
                self.tell_planes(HostReport::Changed { host, volume });
            }
            Effect::Log { text, .. } => self.trace(&[46, host as u64], || format!("h{host}: {text}")),
            Effect::Done { .. } | Effect::News { .. } => {}
            Effect::Sibling { .. } => unreachable!("a host of one reactor"),
            Effect::Send { .. } | Effect::Meta { .. } | Effect::Work { .. } | Effect::Reconnect { .. } => {
                unreachable!("the world has taken calls out")
            }
        }
    }

    fn on_peer_effect(&mut self, host: usize, effect: PeerEffect) {
        match effect {
            PeerEffect::Ask { peer, token, ask, payload } => {
                self.trace(&[41, host as u64, peer as u64, token], || format!("h{host} asks h{peer} #{token} {ask:?}"));
                if let Some(conn) =
                    self.conns.iter().position(|c| c.ingress == host && c.owner == peer && c.ingress_open)
                {
                    self.put(conn, true, Parcel::Ask { token, ask }, payload);
                }
            }
            PeerEffect::Answer { link, token, answer, payload } => {
                self.trace(&[42, host as u64, link.0, token], || {
                    format!("h{host} answers {link:?} #{token} {answer:?}")
                });
                if let Some(conn) = self.conns.iter().position(|c| c.link == link && c.owner_open) {
                    let payload = holdfast_base::buf::concat(&payload);
                    self.put(conn, false, Parcel::Answer { token, answer }, payload);
                }
            }
            PeerEffect::CloseLink { link } => {
                if let Some(conn) = self.conns.iter().position(|c| c.link == link) {
                    self.conns[conn].owner_open = false;
                    self.put(conn, false, Parcel::End, Buf::empty());
                }
            }
            PeerEffect::Reconnect { peer } => self.close_from_ingress(host, peer),
            PeerEffect::Trouble { peer, refusal } if refusal != Refusal::Superseded => {
                self.fail(format!("h{host} can't use h{peer}: {refusal:?}"));
            }
            PeerEffect::Trouble { .. } => {}
        }
    }

    fn state(&self, host: usize) -> Option<State> {
        self.host(host)?.find_id(VOLUME).map(|volume| volume.controller().state())
    }

    fn is_preloading(&self, host: usize) -> bool {
        let volume = self.host(host).and_then(|host| host.find_id(VOLUME));
        volume.is_some_and(|volume| volume.controller().is_preloading())
    }

    fn spec(&self) -> OpenSpec {
        OpenSpec {
            volume: VOLUME,
            is_store: false,
            name: NAME.to_string(),
            size_bytes: SIZE_BYTES,
            layout: "mirror:2".parse().expect("a layout"),
            checked_reads: true,
            compression: Default::default(),
            only_from: None,
            guard: None,
            key: None,
            store_key: None,
            leaves_domain: false,
        }
    }

    fn on_output(&mut self, output: Output) {
        match output {
            Output::Wake(WAKE) => self.on_time(),
            Output::Meta { at, token, request } => self.tell_planes(HostReport::Meta { at, token, request }),
            _ => {}
        }
    }

    // ---- connections between hosts ----

    fn put(&mut self, conn: usize, to_owner: bool, parcel: Parcel, payload: Buf) {
        let now = self.now();
        let (ingress, owner) = (self.conns[conn].ingress, self.conns[conn].owner);
        let way = if to_owner { (ingress, owner) } else { (owner, ingress) };
        let slow = if self.slow.get(&way).is_some_and(|until| *until > now) { 100_000 } else { 0 };
        let late = Duration::from_micros(20 + slow + self.prng.below(80));
        let pipe = if to_owner { &mut self.conns[conn].to_owner } else { &mut self.conns[conn].to_ingress };
        pipe.last_at = pipe.last_at.max(now + late);
        pipe.queue.push_back((pipe.last_at, parcel, payload));
        let at = pipe.last_at;
        self.world.wake_at(at, WAKE);
    }

    fn close_from_ingress(&mut self, host: usize, peer: usize) {
        if let Some(conn) = self.conns.iter().position(|c| c.ingress == host && c.owner == peer && c.ingress_open) {
            self.conns[conn].ingress_open = false;
            self.put(conn, true, Parcel::End, Buf::empty());
        }
    }

    fn deliver(&mut self) {
        let now = self.now();
        loop {
            let due = |c: &Conn, s: &MultiHost| {
                let ready = |pipe: &Pipe, way, to: usize| {
                    pipe.queue.front().is_some_and(|(at, ..)| *at <= now)
                        && s.cut.get(&way).is_none_or(|until| *until <= now)
                        && (s.is_running(to) || !s.shells[to].up)
                };
                if ready(&c.to_owner, (c.ingress, c.owner), c.owner) {
                    Some(true)
                } else if ready(&c.to_ingress, (c.owner, c.ingress), c.ingress) {
                    Some(false)
                } else {
                    None
                }
            };
            let ready: Vec<(usize, bool)> =
                self.conns.iter().enumerate().filter_map(|(n, c)| Some((n, due(c, self)?))).collect();
            if ready.is_empty() {
                return self.conns.retain(|c| {
                    c.ingress_open || c.owner_open || !c.to_owner.queue.is_empty() || !c.to_ingress.queue.is_empty()
                });
            }
            // A process finds its sockets ready in any order.
            let (conn, to_owner) = ready[self.prng.below(ready.len() as u64) as usize];
            self.deliver_one(conn, to_owner);
        }
    }

    fn deliver_one(&mut self, n: usize, to_owner: bool) {
        let conn = &mut self.conns[n];
        let pipe = if to_owner { &mut conn.to_owner } else { &mut conn.to_ingress };
        let (_, parcel, payload) = pipe.queue.pop_front().expect("it is ready");
        let (ingress, owner, link) = (conn.ingress, conn.owner, conn.link);
        let is_open = if to_owner { conn.owner_open } else { conn.ingress_open };
        if !is_open {
            return;
        }
        match parcel {
            Parcel::Ask { token, ask } => {
                self.tell(owner, Event::Peer(PeerEvent::Ask { link, token, ask, payload }));
            }
            Parcel::Answer { token, answer } => {
                self.tell(ingress, Event::Peer(PeerEvent::Answer { peer: owner, token, answer, payload }));
            }
            Parcel::End if to_owner => {
                conn.owner_open = false;
                self.tell(owner, Event::Peer(PeerEvent::LinkDown { link }));
            }
            Parcel::End => {
                conn.ingress_open = false;
                self.tell(ingress, Event::Peer(PeerEvent::Disconnected { peer: owner }));
            }
        }
    }

    /// Every host keeps a connection to every other.
    fn connect(&mut self) {
        for ingress in 0..self.shells.len() {
            for owner in 0..self.shells.len() {
                let is_cut = |way| self.cut.get(&way).is_some_and(|until| *until > self.now());
                let has = self.conns.iter().any(|c| c.ingress == ingress && c.owner == owner && c.ingress_open);
                // The kernel accepts for a process that hangs.
                let can = self.is_running(ingress) && self.shells[owner].up;
                if ingress == owner || has || !can || is_cut((ingress, owner)) || is_cut((owner, ingress)) {
                    continue;
                }
                let link = LinkId(self.next_link);
                self.next_link += 1;
                self.conns.push(Conn {
                    ingress,
                    owner,
                    link,
                    to_owner: Pipe::default(),
                    to_ingress: Pipe::default(),
                    ingress_open: true,
                    owner_open: true,
                });
                self.tell(ingress, Event::Peer(PeerEvent::Connected { peer: owner }));
            }
        }
    }

    // ---- clients ----

    fn client_sends(&mut self, client: usize, what: ToHost) {
        let at = self.now() + Duration::from_micros(20 + self.prng.below(60));
        let queue = &mut self.clients[client].to_host;
        let at = queue.back().map_or(at, |(last, _)| at.max(*last));
        queue.push_back((at, what));
        self.world.wake_at(at, WAKE);
    }

    /// What clients have sent reaches their hosts; one that hangs has it in its sockets.
    fn deliver_to_hosts(&mut self) {
        let now = self.now();
        for n in 0..self.clients.len() {
            while self.clients[n].to_host.front().is_some_and(|(at, _)| *at <= now) {
                let (_, what) = self.clients[n].to_host.pop_front().expect("just seen");
                let session = match &what {
                    ToHost::Open { session } | ToHost::Close { session } | ToHost::Request { session, .. } => *session,
                };
                let host = session_host(session);
                if self.is_running(host) {
                    self.on_to_host(host, what);
                } else if self.shells[host].up {
                    self.shells[host].inbox.push_back(what);
                }
            }
        }
    }

    fn on_to_host(&mut self, host: usize, what: ToHost) {
        match what {
            ToHost::Open { session } => self.open_session(host, session),
            ToHost::Close { session } => {
                if let Some(session) = self.shells[host].opened.remove(&session) {
                    self.tell(host, Event::Close { session });
                }
            }
            ToHost::Request { session, request } => {
                if let Some(session) = self.shells[host].opened.get(&session).copied() {
                    self.tell(host, Event::Request { session, request });
                }
            }
        }
    }

    /// A client opens the export: it may ask at once, whenever what it asks is carried out.
    fn open_session(&mut self, host: usize, to: Token) {
        let client = *self.sessions.get(Token(to.0 / 16)).expect("it was made");
        let association = identity(client, to);
        let (label, source) = (association.label.clone(), Source::Local);
        let connection = Connection { to, label, source, caller: Caller::Local, association };
        let name = self.volumes[self.clients[client].served].name.clone();
        let opened = self.act(host, |host, now, out| host.open_session(now, connection, &name, out));
        match opened {
            Some(Ok((session, _))) => {
                self.shells[host].opened.insert(to, session);
                if let Some(client) = self.client_of(to) {
                    self.clients[client].waits_since = self.now();
                    let pending: Vec<BlockRequest> = self.clients[client].pending.values().cloned().collect();
                    for request in pending {
                        self.client_sends(client, ToHost::Request { session: to, request });
                    }
                }
            }
            // It tries again.
            Some(Err(_)) | None => self.on_path_lost(to),
        }
        self.see_to(host);
    }

    fn view(&self, host: usize, session: Token) -> Option<holdfast_host::forward::SessionView> {
        self.host(host)?.session_view(*self.shells[host].opened.get(&session)?)
    }

    fn client_of(&self, session: Token) -> Option<usize> {
        self.clients.iter().position(|c| c.path.is_some_and(|(_, s)| s == session))
    }

    fn on_client_reply(&mut self, session: Token, reply: BlockReply) {
        let Some(client) = self.client_of(session) else { return };
        if self.told.is_some() && reply.result.as_ref().is_err_and(|why| *why == BlockError::Deposed) {
            // Of a volume that only its host offers: it connects anew, and asks again.
            self.on_path_lost(session);
            return self.on_to_host(session_host(session), ToHost::Close { session });
        }
        if self.clients[client].pending.remove(&reply.token).is_none() {
            return self.fail(format!("client {client} was answered twice: {reply:?}"));
        }
        self.outcome.answered += 1;
        let is_refused = matches!(reply.result, Err(BlockError::NotWriter));
        self.outcome.refused += u64::from(is_refused);
        if let Err(why) = &reply.result
            && (*why != BlockError::NotWriter || self.plan.contend.is_none())
        {
            return self.fail(format!("client {client} got an error: {why}"));
        }
        if let Err(why) = self.guests.on_reply(reply) {
            self.fail(why);
        }
        if is_refused && self.clients[client].pending.is_empty() {
            // It begins anew, as a machine that is started again.
            self.leave(client);
        }
    }

    fn on_path_lost(&mut self, session: Token) {
        if let Some(client) = self.client_of(session) {
            self.clients[client].path = None;
            // What it had sent is not read by anybody any more.
            self.clients[client].to_host.clear();
            let pause = Duration::from_micros(self.prng.below(5_000));
            self.clients[client].connect_at = self.now() + pause;
            self.world.wake_at(self.now() + pause, WAKE);
        }
    }

    fn connect_clients(&mut self) {
        let now = self.now();
        for n in 0..self.clients.len() {
            let Client { path, pending, waits_since, .. } = &self.clients[n];
            if let Some((_, session)) =
                path.filter(|_| !pending.is_empty() && now.since(*waits_since) > CLIENT_PATIENCE)
            {
                self.on_path_lost(session);
            }
        }
        for n in 0..self.clients.len() {
            if self.clients[n].path.is_some() || self.clients[n].connect_at > now {
                continue;
            }
            let up: Vec<usize> = (0..self.shells.len()).filter(|h| self.is_running(*h)).collect();
            if up.is_empty() {
                continue;
            }
            let host = up[self.prng.below(up.len() as u64) as usize];
            let number = self.sessions.insert(n);
            let session = Token(number.0 * 16 + host as u64);
            self.clients[n].path = Some((host, session));
            self.clients[n].waits_since = now;
            self.outcome.path_changes += 1;
            self.client_sends(n, ToHost::Open { session });
        }
    }

    fn ask(&mut self) {
        if self.issued >= self.plan.requests || self.healing {
            return;
        }
        let n = self.whose_turn();
        if self.clients[n].pending.len() >= 4 {
            return;
        }
        let part = part_bytes(self.clients.len(), self.volumes.len());
        let bulk = self.prng.chance(150);
        let len = if bulk { 32 << 10 } else { self.prng.between(1, 8) * SECTOR };
        let len = len.min(part / SECTOR * SECTOR);
        let offset = self.clients[n].base + self.prng.below((part - len) / SECTOR / 4 + 1) * SECTOR;
        let overlaps = |op: &BlockOp| {
            let (at, l) = match op {
                BlockOp::Write { offset, data } => (*offset, data.len() as u64),
                BlockOp::Read(r) | BlockOp::Discard(r) | BlockOp::WriteZeroes(r) => (r.offset, r.len),
                _ => return false,
            };
            at < offset + len && offset < at + l
        };
        if self.clients[n].pending.values().any(|r| overlaps(&r.op)) {
            return;
        }
        let what =
            *self.prng.pick(&[What::Read, What::Read, What::Write(0), What::Write(0), What::Write(0), What::Discard]);
        self.issued += 1;
        self.client_asks(n, what, offset, len);
    }

    fn client_asks(&mut self, n: usize, what: What, offset: u64, len: u64) {
        let at = MachineAt { host: n, machine: 0 };
        let area = Area { target: Target::VOLUME, base: self.clients[n].served as u64 * SIZE_BYTES };
        let request = self.guests.ask(at, area, what, offset, len, false);
        // From the newest on: it leaves all of them at once.
        self.clients[n].waits_since = self.now();
        self.clients[n].pending.insert(request.token, request.clone());
        if let Some((host, session)) = self.clients[n].path
            && self.shells[host].opened.contains_key(&session)
        {
            self.client_sends(n, ToHost::Request { session, request });
        }
    }

    // ---- what happens ----

    fn fail(&mut self, why: String) {
        self.failure.get_or_insert(why);
    }

    fn crash(&mut self, host: usize) {
        if self.shells[host].up {
            self.end_process(host);
            self.on_crashed(host);
        }
    }

    fn end_process(&mut self, host: usize) {
        self.world.crash_host(host);
        // Who was followed where it served nobody knows any more.
        self.wrote.clear();
        self.followed.clear();
        self.shells[host] = Shell { up: false, ..Shell::default() };
        // Its kernel ends its connections: what was sent before may still arrive, and then the end.
        for n in 0..self.conns.len() {
            if self.conns[n].ingress == host && self.conns[n].ingress_open {
                self.conns[n].ingress_open = false;
                self.put(n, true, Parcel::End, Buf::empty());
            }
            if self.conns[n].owner == host && self.conns[n].owner_open {
                self.conns[n].owner_open = false;
                self.put(n, false, Parcel::End, Buf::empty());
            }
        }
        for n in 0..self.clients.len() {
            if let Some((_, session)) = self.clients[n].path.filter(|(h, _)| *h == host) {
                self.on_path_lost(session);
            }
        }
    }

    /// It is back.
    fn begin_process(&mut self, host: usize) {
        self.shells[host].up = true;
        self.world.start_host(host);
        self.start(host);
    }

    pub(crate) fn hang(&mut self, host: usize, span: Duration) {
        if self.is_running(host) {
            self.world.pause_host(host);
            self.shells[host].hangs_until = Some(self.now() + span);
            self.world.wake_at(self.now() + span, WAKE);
        }
    }

    fn resume(&mut self, host: usize) {
        self.shells[host].hangs_until = None;
        self.world.resume_host(host);
        // Timers that passed meanwhile, and then the sockets: clients' or hosts' first.
        self.tell(host, Event::Tick);
        if self.prng.chance(500) {
            self.deliver();
        }
        for what in std::mem::take(&mut self.shells[host].inbox) {
            self.on_to_host(host, what);
        }
    }

    fn misfortune(&mut self) {
        if self.healing {
            return;
        }
        let host = self.prng.below(self.shells.len() as u64) as usize;
        let other = (host + 1 + self.prng.below(self.shells.len() as u64 - 1) as usize) % self.shells.len();
        let now = self.now();
        let span = *self.prng.pick(&[20, 200, 2_000, 8_000, 14_000]);
        let span = Duration::from_millis(self.prng.between(span / 2, span));
        // Longer than any client waits, now and then.
        let span = if self.prng.chance(150) { span + Duration::from_secs(30) } else { span };
        if self.prng.chance(self.plan.crash) {
            self.crash(host);
        }
        if self.prng.chance(self.plan.hang) {
            self.hang(host, span);
        }
        if self.prng.chance(self.plan.node_hang) {
            let node = self.prng.below(3) as usize;
            let until = now + Duration::from_millis(self.prng.between(5, 120));
            if self.node_back.is_none() {
                self.world.pause_node(node);
                self.node_back = Some((until, node));
                self.world.wake_at(until, WAKE);
            }
        }
        if self.plan.node_crash > 0 && self.node_back.is_none() && self.prng.chance(self.plan.node_crash) {
            let node = self.prng.below(3) as usize;
            let until = now + Duration::from_millis(self.prng.between(5, 1_500));
            let kind = if self.prng.chance(500) { Crash::Power } else { Crash::Process };
            self.world.crash_node(node, kind);
            self.node_back = Some((until, node));
            self.world.wake_at(until, WAKE);
        }
        if self.prng.chance(self.plan.cut) {
            self.cut.insert((host, other), now + span);
            if self.prng.chance(500) {
                self.cut.insert((other, host), now + span);
            }
            self.world.wake_at(now + span, WAKE);
        }
        if self.prng.chance(self.plan.slow) {
            self.slow.insert((host, other), now + span);
        }
        if self.prng.chance(self.plan.reset) {
            for n in 0..self.conns.len() {
                if (self.conns[n].ingress, self.conns[n].owner) == (host, other) {
                    let keep = self.prng.below(self.conns[n].to_owner.queue.len() as u64 + 1) as usize;
                    self.conns[n].to_owner.queue.truncate(keep);
                    self.put(n, true, Parcel::End, Buf::empty());
                    self.put(n, false, Parcel::End, Buf::empty());
                }
            }
        }
        if self.prng.chance(self.plan.jump) {
            self.jump();
        }
        if self.prng.chance(self.plan.take_over) && self.is_running(host) {
            self.decide(host);
        }
        self.hand_over_now_and_then(host);
    }

    /// A client leaves its path of its own accord, once that has what it sent.
    fn jump(&mut self) {
        let n = self.prng.below(self.clients.len() as u64) as usize;
        self.leave(n);
    }

    fn leave(&mut self, n: usize) {
        let Some((host, session)) = self.clients[n].path else { return };
        if self.clients[n].to_host.is_empty() && self.is_running(host) {
            self.on_path_lost(session);
            self.on_to_host(host, ToHost::Close { session });
        }
    }

    fn on_time(&mut self) {
        let now = self.now();
        for host in 0..self.shells.len() {
            if self.shells[host].hangs_until.is_some_and(|until| until <= now) {
                self.resume(host);
            }
        }
        if let Some((_, node)) = self.node_back.take_if(|(until, _)| *until <= now) {
            self.node_returns(node);
        }
        if self.told.is_none() {
            self.operate();
        }
        self.connect();
        self.connect_clients();
        self.deliver_to_hosts();
        self.deliver();
    }

    fn step(&mut self) -> Result<(), String> {
        if self.ask_at <= self.now() {
            self.ask_at = self.now() + Duration::from_micros(self.prng.between(100, self.plan.ask_within_us));
            self.ask();
        }
        if self.misfortune_at <= self.now() {
            self.misfortune_at = self.now() + Duration::from_millis(self.prng.between(1, 20));
            self.misfortune();
        }
        self.look_soon();
        self.world.step();
        for host in 0..self.shells.len() {
            self.see_to(host);
        }
        while let Some(output) = self.world.outputs.pop_front() {
            self.on_output(output);
        }
        self.failure.take().map_or(Ok(()), Err)
    }

    fn node_returns(&mut self, node: usize) {
        if self.world.nodes[node].is_up() {
            self.world.resume_node(node);
        } else {
            self.world.start_node(node);
        }
    }

    /// What has a deadline, and what clients do, is looked at often enough.
    fn look_soon(&mut self) {
        let next = self.now() + self.plan.look_every;
        if self.world.next_at().is_none_or(|at| at > next) {
            self.world.wake_at(next, WAKE);
        }
    }

    fn run(mut self) -> Result<MultiHostOutcome, String> {
        let end = self.now() + Duration::from_secs(120);
        while self.issued < self.plan.requests && self.now() < end {
            self.step()?;
        }
        self.heal();
        self.settle("requests are answered")?;
        self.read_back();
        self.settle("everything is read back")?;
        self.guests.history.check().map_err(|violation| format!("{violation:?}"))?;
        self.outcome.trace_hash = self.world.trace.hash();
        Ok(self.outcome)
    }

    /// Everything is read, each part by its client.
    pub(crate) fn read_back(&mut self) {
        let part = part_bytes(self.clients.len(), self.volumes.len());
        for client in 0..self.clients.len() {
            self.client_asks(client, What::Read, self.clients[client].base, part);
        }
    }

    pub(crate) fn heal(&mut self) {
        self.healing = true;
        self.cut.clear();
        self.slow.clear();
        if let Some((_, node)) = self.node_back.take() {
            self.node_returns(node);
        }
        for host in 0..self.shells.len() {
            if self.shells[host].hangs_until.is_some() {
                self.resume(host);
            }
        }
    }

    fn settle(&mut self, what: &str) -> Result<(), String> {
        let end = self.now() + Duration::from_secs(90);
        while self.clients.iter().any(|c| !c.pending.is_empty()) {
            if self.now() > end {
                let pending: Vec<_> =
                    self.clients.iter().map(|c| (c.path, c.pending.keys().collect::<Vec<_>>())).collect();
                let views: Vec<_> =
                    self.clients.iter().filter_map(|c| c.path.map(|(h, s)| (h, self.view(h, s)))).collect();
                let states: Vec<_> = (0..self.shells.len()).map(|h| self.state(h)).collect();
                return Err(format!(
                    "{what}: not within 90 s: {pending:?} {views:?} owner {} {states:?}",
                    self.operator.owner
                ));
            }
            self.step()?;
        }
        Ok(())
    }
}

/// Of a volume, that each of its clients has.
fn part_bytes(clients: usize, volumes: usize) -> u64 {
    SIZE_BYTES / clients.div_ceil(volumes) as u64 / SECTOR * SECTOR
}

/// Small volumes with little memory: everything that takes long elsewhere happens soon.
fn tune(config: &mut holdfast_volume::Config) {
    (config.writeback_bytes_max, config.map_cache_bytes_max) = (512 << 10, 128 << 10);
    (config.segment_payload_bytes, config.direct_bytes_min) = (64 << 10, 32 << 10);
    config.destage_age_max = Duration::from_millis(100);
}

/// Sessions are numbered so that a late parcel finds its host.
fn session_host(session: Token) -> usize {
    (session.0 % 16) as usize
}

impl Default for Shell {
    fn default() -> Shell {
        Shell {
            up: true,
            hangs_until: None,
            machine: None,
            opened: BTreeMap::new(),
            given: BTreeMap::new(),
            inbox: VecDeque::new(),
        }
    }
}

/// One run of a plan.
pub fn run_multi_host(plan: MultiHostPlan, verbose: bool) -> Result<MultiHostOutcome, String> {
    MultiHost::new(plan, verbose).run()
}
