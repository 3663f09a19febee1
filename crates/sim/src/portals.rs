//! A grid of several hosts with portals: real controllers, portals and desks, simulated connections between hosts, and
//! clients that go from path to path.
//!
//! Role: the shells of the hosts, as far as it concerns who serves a volume, and an operator that hands it over and has it
//! taken over. Each client has a part of the volume for itself and never has two requests on the same sectors under way: so
//! any write that is carried out after its answer shows as a read that goes back.
//!
//! In a third of the runs layers stand before the controllers, which delay, stall and ration requests: what a layer holds when the
//! volume goes elsewhere, or its client does, must not come out late.
//!
//! A client changes its path when its connection ends, and now and then of its own accord, once its portal has what it sent.
//! What it then asks again is the same request, in the history one operation from first to last.

mod contend;

use crate::checker::SECTOR_BYTES;
use crate::workload::{Area, Guests, Mix, What};
use crate::world::{MachineAt, Output, World};
use contend::{Given, Held, identity, writers_of};
use holdfast_base::{
    BlockError, BlockOp, BlockReply, BlockRequest, Buf, Effects, InstanceId, Instant, MetaRequest, MetaVersion, NodeId,
    Prng, RequestToken, Slab, Token, VolumeId,
};
use holdfast_format::portal::{Answer, Ask, Client as Identity, Refusal};
use holdfast_format::root::{Root, root_key};
use holdfast_layer::{Effect as LayerEffect, Stack, StackEvent};
use holdfast_portal as portal;
use holdfast_portal::{Binding, Desk, DeskEffect, DeskEvent, LinkId, Portal, Route, SessionId, WriterEvent, Writers};
use holdfast_store as store;
use holdfast_volume::{Config, Controller, Event, Notice, State, Target, Warming};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

const VOLUME: VolumeId = VolumeId(0x9047a1);
const SECTOR: u64 = SECTOR_BYTES as u64;

/// A client that hears nothing for so long leaves its path, whoever may still read what it sent there.
const CLIENT_PATIENCE: Duration = Duration::from_millis(2 * portal::LAPSE.as_millis() as u64 + 1_000);

/// Pace of a host's comparing what it does with what the records say.
const KEEPER_PACE: Duration = Duration::from_millis(500);

/// Something may be due between hosts.
const WAKE: u64 = 7;

/// What a run is made of.
#[derive(Clone, Debug)]
pub struct PortalPlan {
    pub seed: u64,
    pub hosts: usize,
    pub clients: usize,
    /// Requests of all clients.
    pub requests: u32,
    /// Of a thousand looks at what may happen: how many bring something of the kind.
    pub crash: u32,
    pub hang: u32,
    pub cut: u32,
    pub reset: u32,
    pub slow: u32,
    pub node_hang: u32,
    pub jump: u32,
    pub take_over: u32,
    pub hand_over: u32,
    /// Of a thousand requests, so many come of another client than the one whose turn it is. Where it is not told all share the
    /// volume.
    pub contend: Option<u32>,
    /// Before the controllers, from above.
    pub layers: Vec<String>,
    /// A mistake that must be found: layers are not drained when the volume goes, and stand before its next opening with what they hold.
    pub keeps_layers: bool,
    pub mutations: portal::Mutations,
    pub of_controllers: holdfast_volume::Mutations,
}

impl PortalPlan {
    pub fn from_seed(seed: u64) -> PortalPlan {
        let mut prng = Prng::new(seed ^ 0x9047);
        let mut some = |most: u64| if prng.chance(600) { prng.below(most) as u32 } else { 0 };
        let (crash, hang, cut, reset, slow) = (some(20), some(25), some(25), some(60), some(30));
        let node_hang = some(60);
        let (jump, take_over, hand_over) = (some(40), some(20), some(30));
        PortalPlan {
            seed,
            hosts: prng.between(2, 3) as usize,
            clients: prng.between(1, 5) as usize,
            requests: prng.between(60, 200) as u32,
            crash,
            hang,
            cut,
            reset,
            slow,
            node_hang,
            jump,
            take_over,
            hand_over,
            contend: None,
            layers: draw_layers(seed),
            keeps_layers: false,
            mutations: portal::Mutations::default(),
            of_controllers: holdfast_volume::Mutations::default(),
        }
    }
}

/// Of its own numbers, so that plans without layers are what they were.
fn draw_layers(seed: u64) -> Vec<String> {
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

/// What a run came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PortalOutcome {
    pub trace_hash: u64,
    pub answered: u64,
    pub path_changes: u64,
    pub aborts: u64,
    pub openings: u64,
    pub handovers: u64,
    /// Requests that were in layers when these were drained or dropped.
    pub caught: u64,
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

/// A portal's connection to another host.
struct Conn {
    portal: usize,
    owner: usize,
    link: LinkId,
    to_owner: Pipe,
    to_portal: Pipe,
    portal_open: bool,
    owner_open: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Asker {
    /// And the earliest that its client may have sent it.
    Own(Token, Instant),
    Guest(Token),
    /// The layers before the controller.
    Layers,
}

/// Who may begin when what was asked before is done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Behind {
    Own(Token),
    Guest(Token),
}

/// One host's process.
struct Shell {
    up: bool,
    hangs_until: Option<Instant>,
    portal: Portal,
    desk: Desk,
    controller: Option<MachineAt>,
    /// Sessions of other hosts' portals that the controller serves.
    guests: BTreeSet<Token>,
    /// Who they are, from when they are bound on or wait for that.
    clients_of: BTreeMap<Token, (Identity, Option<Instant>, bool)>,
    /// Beside the controller.
    writers: Writers,
    held: Slab<Held>,
    /// Changes that are under way, by their names at the controller.
    given: BTreeMap<u64, Given>,
    /// Those that wait until it serves.
    binding: Vec<Token>,
    askers: Slab<(u64, Asker, RequestToken, BlockOp)>,
    /// Where layers stand before the controller.
    layers: Option<Stack>,
    /// As a host does it, for what layers hold: requests are numbered, and who must come behind some waits for these.
    under_way: BTreeSet<u64>,
    next_number: u64,
    behind: Vec<(u64, Behind)>,
    /// Asked to yield: answered when the controller is closed.
    yielding: Option<(LinkId, u64)>,
    /// Clients' sessions that wait until they may begin.
    arriving: Vec<Token>,
    /// What its sockets hold while it hangs.
    inbox: VecDeque<ToHost>,
}

#[derive(Clone, Debug)]
enum ToHost {
    Open { session: Token },
    Close { session: Token },
    Request { session: Token, request: BlockRequest },
    Route(Route),
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
    base: u64,
}

/// An operator's hand-over that is under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum HandOver {
    Preparing { to: usize },
    Warming { to: usize },
    Yielding { to: usize },
}

pub struct Street {
    plan: PortalPlan,
    world: World<Controller>,
    guests: Guests,
    prng: Prng,
    shells: Vec<Shell>,
    conns: Vec<Conn>,
    /// Ways between hosts that are cut, until then; and slow.
    cut: BTreeMap<(usize, usize), Instant>,
    slow: BTreeMap<(usize, usize), Instant>,
    clients: Vec<Client>,
    sessions: Slab<usize>,
    /// Who shall serve.
    owner: usize,
    /// What each host will be told of that, and when.
    news: Vec<(Instant, usize, usize)>,
    hand_over: Option<(HandOver, Instant)>,
    /// When the host that has it is asked.
    yield_at: Option<Instant>,
    take_over_at: Option<Instant>,
    /// A node that hangs, and until when.
    node_back: Option<(Instant, usize)>,
    next_link: u64,
    keeper_at: Instant,
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
    outcome: PortalOutcome,
    failure: Option<String>,
}

impl Street {
    fn new(plan: PortalPlan, verbose: bool) -> Street {
        let mut world = World::new(plan.seed, verbose);
        let mut prng = world.prng.fork();
        let sizing = store::JournalSizing { journal_bytes: 4 << 20, unit_bytes: 128 << 10, shard_bytes_mean: 16 << 10 };
        for n in 0..3 {
            let node =
                world.add_node(store::NodeConfig::new(world.grid, NodeId(n + 1), InstanceId(0)), sizing, &[24 << 20]);
            world.start_node(node);
        }
        let size_bytes = 512 << 10;
        let root = Root::new(world.grid, VOLUME, "vm", size_bytes, "mirror:2".parse().expect("a layout"));
        let (key, value) = (root_key(VOLUME), Some(root.encode()));
        world.meta.apply(&MetaRequest::Swap { key, expect: MetaVersion::ABSENT, value });
        let mut guests = Guests::new(prng.fork(), Mix::default(), size_bytes, 64 << 10, 0);
        guests.several_write = plan.contend.is_some();
        let hosts = plan.hosts;
        for _ in 0..hosts {
            world.add_host();
        }
        let part = size_bytes / plan.clients as u64 / SECTOR * SECTOR;
        let client = |n: usize| Client {
            path: None,
            connect_at: Instant::ZERO,
            pending: BTreeMap::new(),
            waits_since: Instant::ZERO,
            to_host: VecDeque::new(),
            base: n as u64 * part,
        };
        let clients = (0..plan.clients).map(client).collect();
        let mut street = Street {
            shells: (0..hosts).map(|n| Shell::new(&plan, n, 1)).collect(),
            clients,
            plan,
            guests,
            prng,
            conns: Vec::new(),
            cut: BTreeMap::new(),
            slow: BTreeMap::new(),
            sessions: Slab::new(1 << 20),
            owner: 0,
            news: Vec::new(),
            hand_over: None,
            yield_at: None,
            take_over_at: None,
            node_back: None,
            next_link: 1,
            keeper_at: Instant::ZERO,
            ask_at: Instant::ZERO,
            misfortune_at: Instant::ZERO,
            issued: 0,
            healing: false,
            turn: (0, Instant::ZERO),
            writer: None,
            wrote: BTreeSet::new(),
            followed: BTreeSet::new(),
            outcome: PortalOutcome {
                trace_hash: 0,
                answered: 0,
                path_changes: 0,
                aborts: 0,
                openings: 0,
                handovers: 0,
                caught: 0,
                refused: 0,
                passed_on: 0,
            },
            failure: None,
            world,
        };
        for host in 0..street.shells.len() {
            street.news.push((street.world.now(), host, 0));
        }
        street.world.wake_at(street.world.now(), WAKE);
        street
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

    // ---- a host's machines ----

    fn portal(&mut self, host: usize, event: portal::Event) {
        let mut out = Effects::new();
        let now = self.now();
        self.shells[host].portal.handle(now, event, &mut out);
        for effect in out.take() {
            self.on_portal_effect(host, effect);
        }
    }

    fn on_portal_effect(&mut self, host: usize, effect: portal::Effect) {
        match effect {
            portal::Effect::Submit { session, request, since } => {
                self.enter(host, SessionId::Own(session), Asker::Own(session, since), request)
            }
            portal::Effect::Reply { session, reply } => self.on_client_reply(session, reply),
            portal::Effect::Abort { session } => {
                self.trace(&[40, host as u64, session.0], || format!("h{host} ends session {session:?}"));
                self.outcome.aborts += 1;
                self.close_writer(host, SessionId::Own(session));
                self.on_path_lost(session);
            }
            portal::Effect::Send { peer, token, ask, payload } => {
                self.trace(&[41, host as u64, peer as u64, token], || format!("h{host} asks h{peer} #{token} {ask:?}"));
                if let Some(conn) = self.conns.iter().position(|c| c.portal == host && c.owner == peer && c.portal_open)
                {
                    self.put(conn, true, Parcel::Ask { token, ask }, payload);
                }
            }
            portal::Effect::Reconnect { peer } => self.close_from_portal(host, peer),
            portal::Effect::Told { .. } => self.on_told(host),
            portal::Effect::Trouble { peer, refusal } if refusal != Refusal::Superseded => {
                self.fail(format!("h{host} can't use h{peer}: {refusal:?}"));
            }
            portal::Effect::Trouble { .. } => {}
        }
    }

    fn desk(&mut self, host: usize, event: DeskEvent) {
        let mut out = Effects::new();
        let now = self.now();
        self.shells[host].desk.handle(now, event, &mut out);
        for effect in out.take() {
            self.on_desk_effect(host, effect);
        }
    }

    fn on_desk_effect(&mut self, host: usize, effect: DeskEffect) {
        match effect {
            DeskEffect::Answer { link, token, answer, payload } => {
                self.trace(&[42, host as u64, link.0, token], || {
                    format!("h{host} answers {link:?} #{token} {answer:?}")
                });
                if let Some(conn) = self.conns.iter().position(|c| c.link == link && c.owner_open) {
                    let payload = holdfast_base::buf::concat(&payload);
                    self.put(conn, false, Parcel::Answer { token, answer }, payload);
                }
            }
            DeskEffect::CloseLink { link } => {
                if let Some(conn) = self.conns.iter().position(|c| c.link == link) {
                    self.conns[conn].owner_open = false;
                    self.put(conn, false, Parcel::End, Buf::empty());
                }
            }
            DeskEffect::Bind { guest, client, wrote_at, is_fenced, .. } => {
                self.shells[host].clients_of.insert(guest, (client, wrote_at, is_fenced));
                // What is asked of an opening that hangs may be done by others before it begins to serve.
                match self.state(host) {
                    Some(State::Opening) => self.shells[host].binding.push(guest),
                    state => self.bind(host, guest, state == Some(State::Open)),
                }
            }
            DeskEffect::Unbind { guest } => {
                self.shells[host].guests.remove(&guest);
                let gone = self.close_writer(host, SessionId::Guest(guest));
                // The desk waits for each of them.
                for Held { asker, request, .. } in gone {
                    let reply = BlockReply { token: request.token, result: Err(BlockError::Deposed) };
                    self.tell_asker(host, asker, reply, request.token, request.op);
                }
            }
            DeskEffect::Submit { guest, request, block } => {
                self.enter(host, SessionId::Guest(guest), Asker::Guest(request), block);
            }
            DeskEffect::Admit { session } => self.begin(host, session),
            DeskEffect::Yield { link, token, .. } => match self.shells[host].controller {
                Some(at) => {
                    self.shells[host].yielding = Some((link, token));
                    if !self.plan.keeps_layers {
                        self.drive_layers(host, StackEvent::Drain);
                    }
                    self.world.tell(at, Event::Yield);
                }
                None => self.desk(host, DeskEvent::Yielded { link, token, refusal: Some(Refusal::NotOwner) }),
            },
        }
    }

    fn state(&self, host: usize) -> Option<State> {
        self.world.machine(self.shells[host].controller?).map(Controller::state)
    }

    /// A request to the host's controller; where there is none it is as if that had said so.
    fn submit(&mut self, host: usize, asker: Asker, request: BlockRequest) {
        let shell = &mut self.shells[host];
        let number = shell.next_number;
        shell.next_number += 1;
        shell.under_way.insert(number);
        let token = RequestToken(shell.askers.insert((number, asker, request.token, request.op.clone())).0);
        let request = BlockRequest { token, op: request.op };
        match shell.controller {
            Some(_) if shell.layers.is_some() && asker != Asker::Layers => {
                self.drive_layers(host, StackEvent::Request(request));
            }
            Some(at) => self.world.request(at, Target::VOLUME, request),
            None => self.on_controller_reply(host, BlockReply { token, result: Err(BlockError::Deposed) }),
        }
    }

    fn drive_layers(&mut self, host: usize, event: StackEvent) {
        let now = self.now();
        let Some(stack) = &mut self.shells[host].layers else { return };
        if matches!(event, StackEvent::Drain) {
            self.outcome.caught += stack.held() as u64;
        }
        let mut out = Effects::new();
        stack.handle(now, event, &mut out);
        if let Some(due) = stack.next_deadline() {
            self.world.wake_at(due.max(now), WAKE);
        }
        for effect in out.take() {
            match effect {
                LayerEffect::Down(request) => self.submit(host, Asker::Layers, request),
                LayerEffect::Up(reply) => self.on_controller_reply(host, reply),
            }
        }
    }

    /// The controller is gone, and layers with it: what they hold is answered as what it had.
    fn drop_layers(&mut self, host: usize) {
        let Some(stack) = self.shells[host].layers.take() else { return };
        self.outcome.caught += stack.held() as u64;
        if self.plan.keeps_layers {
            self.shells[host].layers = Some(stack);
        }
        for token in self.shells[host].askers.tokens() {
            let reply = BlockReply { token: RequestToken(token.0), result: Err(BlockError::Deposed) };
            self.on_controller_reply(host, reply);
        }
    }

    /// Whether anything is under way, where layers may hold it; then whoever it is waits for that.
    fn comes_behind(&mut self, host: usize, who: Behind) -> bool {
        let is_layered = !self.plan.layers.is_empty();
        let shell = &mut self.shells[host];
        if !is_layered || shell.under_way.is_empty() {
            return false;
        }
        shell.behind.push((shell.next_number, who));
        true
    }

    fn let_behind_begin(&mut self, host: usize) {
        let shell = &mut self.shells[host];
        let first = shell.under_way.first().copied().unwrap_or(u64::MAX);
        let clear: Vec<Behind> = shell.behind.extract_if(.., |(upto, _)| *upto <= first).map(|(_, who)| who).collect();
        for who in clear {
            match who {
                Behind::Own(session) => self.begin_now(host, session),
                Behind::Guest(guest) => {
                    let serves = self.state(host) == Some(State::Open);
                    self.bind_now(host, guest, serves);
                }
            }
        }
    }

    fn on_controller_reply(&mut self, host: usize, reply: BlockReply) {
        let Some((number, asker, token, op)) = self.shells[host].askers.remove(Token(reply.token.0)) else { return };
        self.shells[host].under_way.remove(&number);
        if let Asker::Own(session, _) = asker
            && op.changes()
            && reply.result.is_ok()
        {
            let now = self.now();
            self.shells[host].portal.note_written(session, now);
        }
        if let Some(given) = self.shells[host].given.remove(&number) {
            if reply.result.is_ok() {
                self.on_changed(host, given);
            }
            self.writers(host, WriterEvent::Done);
        }
        self.tell_asker(host, asker, reply, token, op);
        self.let_behind_begin(host);
    }

    fn tell_asker(&mut self, host: usize, asker: Asker, reply: BlockReply, token: RequestToken, op: BlockOp) {
        let is_elsewhere = matches!(reply.result, Err(BlockError::Deposed | BlockError::ShuttingDown));
        let reply = BlockReply { token, result: reply.result };
        match asker {
            Asker::Guest(request) => self.desk(host, DeskEvent::Reply { request, reply }),
            Asker::Own(session, since) if is_elsewhere => {
                self.portal(host, portal::Event::NotHere { session });
                self.portal(host, portal::Event::Request { session, request: BlockRequest { token, op }, since });
            }
            Asker::Own(session, _) => self.on_client_reply(session, reply),
            Asker::Layers => self.drive_layers(host, StackEvent::Reply(reply)),
        }
    }

    fn on_output(&mut self, output: Output) {
        let host_of = |s: &Street, at: MachineAt| s.shells.iter().position(|h| h.controller == Some(at));
        match output {
            Output::Reply { at, reply } => {
                if let Some(host) = host_of(self, at) {
                    self.on_controller_reply(host, reply);
                }
            }
            Output::Notice { at, notice } => {
                let Some(host) = host_of(self, at) else { return };
                match notice {
                    Notice::StateChanged(State::Deposed | State::Closed) => self.on_controller_gone(host),
                    Notice::StateChanged(State::Open) => {
                        self.open_own(host);
                        self.portal(host, portal::Event::Route { volume: VOLUME, route: Route::Here });
                        for guest in std::mem::take(&mut self.shells[host].binding) {
                            self.bind(host, guest, true);
                        }
                    }
                    Notice::Prepared => self.on_prepared(),
                    Notice::Warmed => self.on_warmed(host),
                    _ => {}
                }
            }
            Output::Wake(WAKE) => self.on_time(),
            Output::Wake(_) | Output::NodeNote { .. } | Output::Probed { .. } => {}
        }
    }

    /// The replies to what it was asked come before this is heard of, or with it.
    fn on_controller_gone(&mut self, host: usize) {
        while let Some(output) = self.world.outputs.pop_front() {
            self.on_output(output);
        }
        let Some(at) = self.shells[host].controller.take() else { return };
        self.world.detach(at);
        self.drop_held(host);
        self.drop_layers(host);
        self.unserve(host);
        if let Some((link, token)) = self.shells[host].yielding.take() {
            self.desk(host, DeskEvent::Yielded { link, token, refusal: None });
        }
        if self.owner == host {
            // Until it is known who follows.
            self.portal(host, portal::Event::Route { volume: VOLUME, route: Route::Nowhere });
        }
    }

    /// What portals have asked for of an opening that is gone is not the next one's.
    fn unserve(&mut self, host: usize) {
        for guest in std::mem::take(&mut self.shells[host].guests) {
            self.desk(host, DeskEvent::Unserved { guest });
        }
        for guest in std::mem::take(&mut self.shells[host].binding) {
            self.bind(host, guest, false);
        }
    }

    fn bind(&mut self, host: usize, guest: Token, serves: bool) {
        if !serves || !self.comes_behind(host, Behind::Guest(guest)) {
            self.bind_now(host, guest, serves);
        }
    }

    fn bind_now(&mut self, host: usize, guest: Token, serves: bool) {
        if serves {
            self.shells[host].guests.insert(guest);
            let (client, wrote_at, is_fenced) = self.shells[host].clients_of[&guest].clone();
            let session = SessionId::Guest(guest);
            self.writers(host, WriterEvent::Open { session, client, wrote_at, is_fenced });
        }
        let binding = if serves { Binding::Bound } else { Binding::Refused(Refusal::NotOwner) };
        self.desk(host, DeskEvent::Bound { guest, binding });
    }

    fn open(&mut self, host: usize) {
        self.begin_to_open(host, Event::Open);
    }

    fn is_warming(&self, host: usize) -> bool {
        self.shells[host].controller.and_then(|at| self.world.machine(at)).is_some_and(Controller::is_warming)
    }

    fn begin_to_open(&mut self, host: usize, begin: Event) {
        if let Some(before) = self.shells[host].controller {
            match self.state(host) {
                Some(State::Opening) => {
                    if self.is_warming(host) {
                        self.world.tell(before, begin);
                        self.portal(host, portal::Event::Route { volume: VOLUME, route: Route::Nowhere });
                    }
                    return;
                }
                Some(State::Open) => {
                    return self.portal(host, portal::Event::Route { volume: VOLUME, route: Route::Here });
                }
                _ => self.world.detach(before),
            }
            self.drop_held(host);
            self.drop_layers(host);
        }
        self.unserve(host);
        let (instance, seed) = (InstanceId(self.prng.next_u128()), self.prng.next_u64());
        let mut config = Config::new(self.world.grid, VOLUME, &format!("host{host}"), instance, seed);
        config.takeover = false;
        (config.writeback_bytes_max, config.map_cache_bytes_max) = (512 << 10, 128 << 10);
        (config.segment_payload_bytes, config.bypass_bytes_min) = (64 << 10, 32 << 10);
        config.destage_age_max = Duration::from_millis(100);
        config.mutations = self.plan.of_controllers;
        let warms = matches!(begin, Event::Warm);
        let at = self.world.attach_with(host, Controller::new(config), begin);
        self.shells[host].controller = Some(at);
        self.shells[host].layers = self.shells[host].layers.take().or_else(|| stack_of(&self.plan.layers));
        self.outcome.openings += 1;
        self.trace(&[43, host as u64], || format!("h{host} opens the volume"));
        if !warms {
            self.portal(host, portal::Event::Route { volume: VOLUME, route: Route::Nowhere });
        }
    }

    // ---- connections between hosts ----

    fn put(&mut self, conn: usize, to_owner: bool, parcel: Parcel, payload: Buf) {
        let now = self.now();
        let (portal, owner) = (self.conns[conn].portal, self.conns[conn].owner);
        let way = if to_owner { (portal, owner) } else { (owner, portal) };
        let slow = if self.slow.get(&way).is_some_and(|until| *until > now) { 100_000 } else { 0 };
        let late = Duration::from_micros(20 + slow + self.prng.below(80));
        let pipe = if to_owner { &mut self.conns[conn].to_owner } else { &mut self.conns[conn].to_portal };
        pipe.last_at = pipe.last_at.max(now + late);
        pipe.queue.push_back((pipe.last_at, parcel, payload));
        let at = pipe.last_at;
        self.world.wake_at(at, WAKE);
    }

    fn close_from_portal(&mut self, host: usize, peer: usize) {
        if let Some(conn) = self.conns.iter().position(|c| c.portal == host && c.owner == peer && c.portal_open) {
            self.conns[conn].portal_open = false;
            self.put(conn, true, Parcel::End, Buf::empty());
        }
    }

    fn deliver(&mut self) {
        let now = self.now();
        loop {
            let due = |c: &Conn, s: &Street| {
                let ready = |pipe: &Pipe, way, to: usize| {
                    pipe.queue.front().is_some_and(|(at, ..)| *at <= now)
                        && s.cut.get(&way).is_none_or(|until| *until <= now)
                        && (s.is_running(to) || !s.shells[to].up)
                };
                if ready(&c.to_owner, (c.portal, c.owner), c.owner) {
                    Some(true)
                } else if ready(&c.to_portal, (c.owner, c.portal), c.portal) {
                    Some(false)
                } else {
                    None
                }
            };
            let ready: Vec<(usize, bool)> =
                self.conns.iter().enumerate().filter_map(|(n, c)| Some((n, due(c, self)?))).collect();
            if ready.is_empty() {
                return self.conns.retain(|c| {
                    c.portal_open || c.owner_open || !c.to_owner.queue.is_empty() || !c.to_portal.queue.is_empty()
                });
            }
            // A process finds its sockets ready in any order.
            let (conn, to_owner) = ready[self.prng.below(ready.len() as u64) as usize];
            self.deliver_one(conn, to_owner);
        }
    }

    fn deliver_one(&mut self, n: usize, to_owner: bool) {
        let conn = &mut self.conns[n];
        let pipe = if to_owner { &mut conn.to_owner } else { &mut conn.to_portal };
        let (_, parcel, payload) = pipe.queue.pop_front().expect("it is ready");
        let (portal, owner, link) = (conn.portal, conn.owner, conn.link);
        let is_open = if to_owner { conn.owner_open } else { conn.portal_open };
        if !is_open {
            return;
        }
        match parcel {
            Parcel::Ask { token, ask } => self.desk(owner, DeskEvent::Ask { link, token, ask, payload }),
            Parcel::Answer { token, answer } => {
                self.portal(portal, portal::Event::Answer { peer: owner, token, answer, payload });
            }
            Parcel::End if to_owner => {
                conn.owner_open = false;
                self.desk(owner, DeskEvent::LinkDown { link });
            }
            Parcel::End => {
                conn.portal_open = false;
                self.portal(portal, portal::Event::Disconnected { peer: owner });
            }
        }
    }

    /// Every host keeps a connection to every other.
    fn connect(&mut self) {
        for portal in 0..self.shells.len() {
            for owner in 0..self.shells.len() {
                let is_cut = |way| self.cut.get(&way).is_some_and(|until| *until > self.now());
                let has = self.conns.iter().any(|c| c.portal == portal && c.owner == owner && c.portal_open);
                // The kernel accepts for a process that hangs.
                let can = self.is_running(portal) && self.shells[owner].up;
                if portal == owner || has || !can || is_cut((portal, owner)) || is_cut((owner, portal)) {
                    continue;
                }
                let link = LinkId(self.next_link);
                self.next_link += 1;
                self.conns.push(Conn {
                    portal,
                    owner,
                    link,
                    to_owner: Pipe::default(),
                    to_portal: Pipe::default(),
                    portal_open: true,
                    owner_open: true,
                });
                self.portal(portal, portal::Event::Connected { peer: owner });
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
                    ToHost::Route(_) => unreachable!("not a client's"),
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
            ToHost::Open { session } => {
                self.shells[host].arriving.push(session);
                self.desk(host, DeskEvent::Arrive { session });
            }
            ToHost::Close { session } => {
                self.shells[host].arriving.retain(|s| *s != session);
                self.close_writer(host, SessionId::Own(session));
                self.portal(host, portal::Event::Close { session });
            }
            ToHost::Request { session, request } => {
                let since = self.shells[host].portal.since(self.now());
                self.portal(host, portal::Event::Request { session, request, since });
            }
            ToHost::Route(route) => self.portal(host, portal::Event::Route { volume: VOLUME, route }),
        }
    }

    /// The export is opened: only now the client learns that it may ask.
    fn begin(&mut self, host: usize, session: Token) {
        if !self.comes_behind(host, Behind::Own(session)) {
            self.begin_now(host, session);
        }
    }

    fn begin_now(&mut self, host: usize, session: Token) {
        if !self.shells[host].arriving.contains(&session) {
            return;
        }
        self.shells[host].arriving.retain(|s| *s != session);
        let number = *self.sessions.get(Token(session.0 / 16)).expect("it was made");
        let (client, export) = (identity(number, session), "vm".to_string());
        if self.shells[host].controller.is_some() {
            let session = SessionId::Own(session);
            self.writers(host, WriterEvent::Open { session, client: client.clone(), wrote_at: None, is_fenced: false });
        }
        self.portal(host, portal::Event::Open { session, volume: VOLUME, export, client, wrote_at: None });
        let Some(client) = self.client_of(session) else { return };
        self.clients[client].waits_since = self.now();
        let pending: Vec<BlockRequest> = self.clients[client].pending.values().cloned().collect();
        for request in pending {
            self.client_sends(client, ToHost::Request { session, request });
        }
    }

    fn client_of(&self, session: Token) -> Option<usize> {
        self.clients.iter().position(|c| c.path.is_some_and(|(_, s)| s == session))
    }

    fn on_client_reply(&mut self, session: Token, reply: BlockReply) {
        let Some(client) = self.client_of(session) else { return };
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
        let part = self.guests.size_bytes() / self.clients.len() as u64;
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
        let at = MachineAt { host: n, machine: 0 };
        let request = self.guests.ask(at, Area::VOLUME, what, offset, len, false);
        self.issued += 1;
        // From the newest on: it leaves all of them at once.
        self.clients[n].waits_since = self.now();
        self.clients[n].pending.insert(request.token, request.clone());
        let is_begun = |s: &Street, host: usize, session| s.shells[host].portal.has(session);
        if let Some((host, session)) = self.clients[n].path
            && is_begun(self, host, session)
        {
            self.client_sends(n, ToHost::Request { session, request });
        }
    }

    // ---- what happens ----

    fn fail(&mut self, why: String) {
        self.failure.get_or_insert(why);
    }

    fn crash(&mut self, host: usize) {
        if !self.shells[host].up {
            return;
        }
        self.world.crash_host(host);
        // Who was followed where it served nobody knows any more.
        self.wrote.clear();
        self.followed.clear();
        let instance = self.prng.next_u64();
        self.shells[host] = Shell { up: false, ..Shell::new(&self.plan, host, instance) };
        // Its kernel ends its connections: what was sent before may still arrive, and then the end.
        for n in 0..self.conns.len() {
            if self.conns[n].portal == host && self.conns[n].portal_open {
                self.conns[n].portal_open = false;
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
        let back = self.now() + Duration::from_millis(self.prng.between(50, 3_000));
        self.news.push((back, host, usize::MAX));
        self.world.wake_at(back, WAKE);
        if self.owner == host {
            self.take_over_at = Some(self.now() + Duration::from_millis(self.prng.between(100, 6_000)));
        }
    }

    fn hang(&mut self, host: usize, span: Duration) {
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
        self.portal(host, portal::Event::Tick);
        self.desk(host, DeskEvent::Tick);
        if self.prng.chance(500) {
            self.deliver();
        }
        for what in std::mem::take(&mut self.shells[host].inbox) {
            self.on_to_host(host, what);
        }
    }

    /// From here on another host shall serve; each hears of it in its own time.
    fn decide(&mut self, owner: usize) {
        self.owner = owner;
        self.take_over_at = None;
        self.trace(&[44, owner as u64], || format!("h{owner} shall serve"));
        for host in 0..self.shells.len() {
            let at = self.now() + Duration::from_micros(if host == owner { 10 } else { 100 + self.prng.below(20_000) });
            self.news.push((at, host, owner));
            self.world.wake_at(at, WAKE);
        }
    }

    fn on_news(&mut self) {
        let now = self.now();
        let (due, rest): (Vec<_>, Vec<_>) = std::mem::take(&mut self.news).into_iter().partition(|(at, ..)| *at <= now);
        self.news = rest;
        for (_, host, owner) in due {
            if owner == usize::MAX {
                // It is back, and reads who serves.
                self.shells[host].up = true;
                self.world.start_host(host);
                self.news.push((now + Duration::from_millis(1), host, self.owner));
                self.world.wake_at(now + Duration::from_millis(1), WAKE);
            } else if !self.is_running(host) {
                if self.shells[host].up {
                    self.news.push((now + Duration::from_millis(5), host, owner));
                    self.world.wake_at(now + Duration::from_millis(5), WAKE);
                }
            } else if owner != self.owner {
                // Overtaken by newer news.
            } else if owner == host {
                self.open(host);
            } else {
                self.on_to_host(host, ToHost::Route(Route::At(owner)));
            }
        }
    }

    /// The owner's log is short: who follows asks it to yield.
    fn on_prepared(&mut self) {
        let Some((HandOver::Preparing { to }, _)) = self.hand_over else { return };
        if !self.is_running(to) {
            self.hand_over = None;
            return;
        }
        // Now and then it comes late: what was read by then is older than what it finds.
        match self.prng.below(3) {
            0 => self.ask_to_yield(to, Duration::ZERO),
            _ => {
                self.hand_over = Some((HandOver::Warming { to }, self.now() + Duration::from_secs(2)));
                self.begin_to_open(to, Event::Warm);
            }
        }
    }

    fn on_warmed(&mut self, host: usize) {
        if self.hand_over.is_some_and(|(step, _)| step == HandOver::Warming { to: host }) {
            let at = self.shells[host].controller.expect("it warms");
            if self.world.machine(at).and_then(|c: &Controller| c.warming()) == Some(Warming::Unreadable) {
                // The owner goes on.
                self.hand_over = None;
                self.shells[host].controller = None;
                self.world.detach(at);
                return self.unserve(host);
            }
            let late = if self.prng.chance(300) { self.prng.below(400) } else { 0 };
            self.ask_to_yield(host, Duration::from_millis(late));
        }
    }

    fn ask_to_yield(&mut self, to: usize, late: Duration) {
        let now = self.now();
        self.hand_over = Some((HandOver::Yielding { to }, now + late + Duration::from_secs(1)));
        self.yield_at = Some(now + late);
        self.world.wake_at(now + late, WAKE);
    }

    fn drive_hand_over(&mut self) {
        let now = self.now();
        if self.yield_at.take_if(|at| *at <= now).is_some()
            && let Some((HandOver::Yielding { to }, _)) = self.hand_over
            && self.is_running(to)
        {
            let peer = self.owner;
            self.portal(to, portal::Event::Ask { peer, ticket: 0, ask: Ask::Yield { volume: VOLUME } });
        }
        let Some((step, _)) = self.hand_over.take_if(|(_, until)| *until <= now) else { return };
        let (HandOver::Preparing { to } | HandOver::Warming { to } | HandOver::Yielding { to }) = step;
        // It finds that it is not to have the volume, now and then late.
        if self.is_warming(to) && self.owner != to && self.prng.chance(700) {
            let at = self.shells[to].controller.take().expect("it warms");
            self.world.detach(at);
            self.unserve(to);
        }
    }

    /// Whatever the old owner says: who follows takes over.
    fn on_told(&mut self, host: usize) {
        if self.hand_over.is_some_and(|(step, _)| step == HandOver::Yielding { to: host }) {
            self.hand_over = None;
            self.outcome.handovers += 1;
            self.decide(host);
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
                if (self.conns[n].portal, self.conns[n].owner) == (host, other) {
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
        if self.prng.chance(self.plan.hand_over)
            && self.hand_over.is_none()
            && self.is_running(host)
            && host != self.owner
            && let Some(at) = self.shells[self.owner].controller
        {
            self.hand_over = Some((HandOver::Preparing { to: host }, now + Duration::from_secs(16)));
            self.world.tell(at, Event::Prepare);
        }
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
            self.world.resume_node(node);
        }
        if self.keeper_at <= now {
            // Hosts compare what they do with what the records say.
            self.keeper_at = now + KEEPER_PACE;
            self.world.wake_at(self.keeper_at, WAKE);
            self.news.extend((0..self.shells.len()).map(|host| (now, host, self.owner)));
        }
        self.on_news();
        self.drive_hand_over();
        let is_gone = self.state(self.owner).is_none() && self.take_over_at.is_none();
        if is_gone && self.hand_over.is_none() && self.news.is_empty() {
            self.take_over_at = Some(now + Duration::from_millis(20));
            self.world.wake_at(now + Duration::from_millis(20), WAKE);
        }
        if self.take_over_at.is_some_and(|at| at <= now) {
            let up: Vec<usize> = (0..self.shells.len()).filter(|h| self.is_running(*h)).collect();
            if !up.is_empty() {
                let owner = up[self.prng.below(up.len() as u64) as usize];
                self.decide(owner);
            }
        }
        self.connect();
        self.connect_clients();
        self.deliver_to_hosts();
        self.deliver();
        for host in 0..self.shells.len() {
            if self.is_running(host) {
                if self.shells[host].layers.as_ref().and_then(Stack::next_deadline).is_some_and(|at| at <= now) {
                    self.drive_layers(host, StackEvent::Tick);
                }
                if self.shells[host].writers.next_deadline().is_some_and(|at| at <= now) {
                    self.writers(host, WriterEvent::Tick);
                }
                if self.shells[host].portal.next_deadline().is_some_and(|at| at <= now) {
                    self.portal(host, portal::Event::Tick);
                }
                if self.shells[host].desk.next_deadline().is_some_and(|at| at <= now) {
                    self.desk(host, DeskEvent::Tick);
                }
            }
        }
    }

    fn step(&mut self) -> Result<(), String> {
        if self.ask_at <= self.now() {
            self.ask_at = self.now() + Duration::from_micros(self.prng.between(100, 20_000));
            self.ask();
        }
        if self.misfortune_at <= self.now() {
            self.misfortune_at = self.now() + Duration::from_millis(self.prng.between(1, 20));
            self.misfortune();
        }
        // What has a deadline, and what clients do, is looked at often enough.
        let next = self.now() + Duration::from_millis(1);
        if self.world.next_at().is_none_or(|at| at > next) {
            self.world.wake_at(next, WAKE);
        }
        self.world.step();
        while let Some(output) = self.world.outputs.pop_front() {
            self.on_output(output);
        }
        self.failure.take().map_or(Ok(()), Err)
    }

    fn run(mut self) -> Result<PortalOutcome, String> {
        let end = self.now() + Duration::from_secs(120);
        while self.issued < self.plan.requests && self.now() < end {
            self.step()?;
        }
        self.heal();
        self.settle("requests are answered")?;
        // The whole volume is read back through one client more.
        for client in 0..self.clients.len() {
            let (base, part) = (self.clients[client].base, self.guests.size_bytes() / self.clients.len() as u64);
            let at = MachineAt { host: client, machine: 0 };
            let len = part / SECTOR * SECTOR;
            let request = self.guests.ask(at, Area::VOLUME, What::Read, base, len, false);
            self.clients[client].pending.insert(request.token, request.clone());
            if let Some((host, session)) = self.clients[client].path
                && self.shells[host].portal.has(session)
            {
                self.client_sends(client, ToHost::Request { session, request });
            }
        }
        self.settle("everything is read back")?;
        self.guests.history.check().map_err(|violation| format!("{violation:?}"))?;
        self.outcome.trace_hash = self.world.trace.hash();
        Ok(self.outcome)
    }

    fn heal(&mut self) {
        self.healing = true;
        self.cut.clear();
        self.slow.clear();
        if let Some((_, node)) = self.node_back.take() {
            self.world.resume_node(node);
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
                let views: Vec<_> = self
                    .clients
                    .iter()
                    .filter_map(|c| c.path.map(|(h, s)| (h, self.shells[h].portal.view(s))))
                    .collect();
                let states: Vec<_> = (0..self.shells.len()).map(|h| self.state(h)).collect();
                return Err(format!("{what}: not within 90 s: {pending:?} {views:?} owner {} {states:?}", self.owner));
            }
            self.step()?;
        }
        Ok(())
    }
}

fn stack_of(layers: &[String]) -> Option<Stack> {
    let mut stack = Stack::new(1 << 12);
    for spec in layers {
        let layer = holdfast_layer::build(spec).unwrap_or_else(|error| panic!("{spec}: {error}"));
        stack.add(layer).expect("a plan has few layers");
    }
    (!layers.is_empty()).then_some(stack)
}

/// Sessions are numbered so that a late parcel finds its host.
fn session_host(session: Token) -> usize {
    (session.0 % 16) as usize
}

impl Shell {
    fn new(plan: &PortalPlan, host: usize, instance: u64) -> Shell {
        let name = format!("host{host}");
        let grid = holdfast_base::GridId(0x1001);
        let mut portal = Portal::new(grid, &name, InstanceId(u128::from(instance)));
        let mut desk = Desk::new(grid, &name);
        portal.set_mutations(plan.mutations);
        desk.set_mutations(plan.mutations);
        Shell {
            up: true,
            hangs_until: None,
            portal,
            desk,
            controller: None,
            guests: BTreeSet::new(),
            clients_of: BTreeMap::new(),
            writers: writers_of(plan),
            held: Slab::new(1 << 16),
            given: BTreeMap::new(),
            binding: Vec::new(),
            askers: Slab::new(1 << 16),
            layers: None,
            under_way: BTreeSet::new(),
            next_number: 0,
            behind: Vec::new(),
            yielding: None,
            arriving: Vec::new(),
            inbox: VecDeque::new(),
        }
    }
}

/// One run of a plan.
pub fn run_portals(plan: PortalPlan, verbose: bool) -> Result<PortalOutcome, String> {
    Street::new(plan, verbose).run()
}
