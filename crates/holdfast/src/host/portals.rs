//! Portals of this host: volumes that clients reach here wherever their owner is.
//!
//! Role: the shell around [`Portal`] and [`Desk`]. What the records say of who serves what comes as [`Offer`]s from the
//! control plane; whether a volume is served here its controller tells. A session of an offered volume is the portal's; while
//! the volume is served here its requests go straight to the controller. Volumes that only one host offers have nothing
//! to do with this.

use super::Host;
use super::commands::{Answer, tell};
use super::nbd::Held;
use super::peers::{PeerEvent, Peers};
use super::volumes::{Asker, Behind, OpenSpec, SESSIONS_MAX, Volume, Who, split_export};
use crate::logger;
use holdfast_base::time::earliest;
use holdfast_base::{
    BlockError, BlockReply, BlockRequest, Effects, ExportInfo, GridId, HeadId, InstanceId, Instant, Slab, Token,
    VolumeId,
};
use holdfast_format::portal::{self as wire, Ask, Client as Identity, PORTAL, Refusal};
use holdfast_portal::{Binding, Desk, DeskEffect, DeskEvent, Effect, Event, LinkId, Portal, Route, SessionId};
use holdfast_runtime::reactor::Io;
use holdfast_volume::{Event as VolumeEvent, State, Target, Warming};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::SocketAddr;

/// Questions to other hosts at a time.
const QUESTIONS_MAX: usize = 256;

/// Where the records say that a volume is served.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Place {
    Here,
    /// By the host of this name.
    At(String),
}

/// A volume that this host offers, and others do, too.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Offer {
    pub volume: VolumeId,
    /// The volume and its clones, with their ids and sizes in bytes.
    pub exports: BTreeMap<String, (VolumeId, u64)>,
    pub place: Place,
}

/// Of a portal elsewhere, bound to a volume here.
struct Guest {
    volume: Token,
    target: Target,
    head: HeadId,
}

/// Whose client that is, who it is, when its last write was answered, and whether it was followed.
struct Introduced {
    host: String,
    client: Identity,
    wrote_at: Option<Instant>,
    is_fenced: bool,
}

pub struct Portals {
    portal: Portal,
    desk: Desk,
    pub peers: Peers,
    effects: Effects<Effect>,
    desk_effects: Effects<DeskEffect>,
    pub events: VecDeque<Event>,
    pub desk_events: VecDeque<DeskEvent>,
    offers: BTreeMap<VolumeId, Offer>,
    /// Numbers of hosts that volumes may be at.
    hosts: BTreeMap<String, usize>,
    guests: HashMap<Token, Guest>,
    /// From when they ask for an export.
    introduced: HashMap<Token, Introduced>,
    /// Guests that wait until the volume serves, and what they want.
    binding: Vec<(Token, String)>,
    yielding: Vec<(Token, LinkId, u64)>,
    questions: Slab<Answer<Option<wire::Answer>>>,
    preparing: Vec<(Token, Answer<bool>)>,
    /// What these waited for is done.
    pub cleared: VecDeque<Behind>,
}

impl Portals {
    pub fn new(grid: GridId, host: &str, peers: Peers) -> Portals {
        let instance = InstanceId(uuid::Uuid::new_v4().as_u128());
        Portals {
            portal: Portal::new(grid, host, instance),
            desk: Desk::new(grid, host),
            peers,
            effects: Effects::new(),
            desk_effects: Effects::new(),
            events: VecDeque::new(),
            desk_events: VecDeque::new(),
            offers: BTreeMap::new(),
            hosts: BTreeMap::new(),
            guests: HashMap::new(),
            introduced: HashMap::new(),
            binding: Vec::new(),
            yielding: Vec::new(),
            questions: Slab::new(QUESTIONS_MAX),
            preparing: Vec::new(),
            cleared: VecDeque::new(),
        }
    }

    /// The earliest that a client may have sent what is read of it now.
    pub fn since(&self, now: Instant) -> Instant {
        self.portal.since(now)
    }

    /// When the last write of a session was answered, and whether its client was followed, as far as it is the portal's.
    pub fn standing(&self, session: Token) -> (Option<Instant>, bool) {
        (self.portal.wrote_at(session), self.portal.is_fenced(session))
    }

    pub fn note_fenced(&mut self, session: Token) {
        self.portal.note_fenced(session);
    }

    /// A write of a session whose volume is served here was answered.
    pub fn note_written(&mut self, session: Token, now: Instant) {
        self.portal.note_written(session, now);
    }

    pub fn is_offered(&self, volume: VolumeId) -> bool {
        self.offers.contains_key(&volume)
    }

    /// An export that is offered, but not served here, as clients see it.
    pub fn export(&self, name: &str) -> Option<(VolumeId, ExportInfo)> {
        let (volume, (_, size)) = self.offers.values().find_map(|o| Some((o.volume, *o.exports.get(name)?)))?;
        let description = "Holdfast volume, through a portal".to_string();
        Some((volume, ExportInfo { name: name.to_string(), description, size_bytes: size, read_only: false }))
    }

    /// The id of an offered volume or clone.
    pub fn export_id(&self, name: &str) -> Option<VolumeId> {
        self.offers.values().find_map(|o| o.exports.get(name)).map(|(id, _)| *id)
    }

    /// Clients of this host that use an offered volume.
    pub fn sessions(&self, volume: VolumeId) -> usize {
        self.portal.sessions_of(volume).count()
    }

    pub fn exports(&self) -> impl Iterator<Item = ExportInfo> {
        self.offers.values().flat_map(|o| o.exports.keys()).filter_map(|name| Some(self.export(name)?.1))
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        earliest(earliest(self.portal.next_deadline(), self.desk.next_deadline()), self.peers.next_deadline())
    }
}

impl Host {
    /// Works off one thing; false where there is none.
    pub(super) fn settle_portals(&mut self, now: Instant, io: &mut Io) -> bool {
        if let Some(event) = self.portals.peers.events.pop_front() {
            self.on_peer_event(event);
        } else if let Some(event) = self.portals.events.pop_front() {
            let mut effects = std::mem::take(&mut self.portals.effects);
            self.portals.portal.handle(now, event, &mut effects);
            for effect in effects.drain() {
                self.on_portal_effect(now, effect, io);
            }
            self.portals.effects = effects;
        } else if let Some(event) = self.portals.desk_events.pop_front() {
            let mut effects = std::mem::take(&mut self.portals.desk_effects);
            self.portals.desk.handle(now, event, &mut effects);
            for effect in effects.drain() {
                self.on_desk_effect(now, effect, io);
            }
            self.portals.desk_effects = effects;
        } else if let Some(who) = self.portals.cleared.pop_front() {
            match who {
                Behind::Client(session) => self.on_client_clear(now, session, io),
                Behind::Session(session) => self.begin(session, io),
                Behind::Guest(guest, export) => self.bind_guest_now(guest, export),
            }
        } else {
            return false;
        }
        true
    }

    pub(super) fn tick_portals(&mut self, now: Instant, io: &mut Io) {
        self.portals.peers.on_time(now, io);
        if self.portals.portal.next_deadline().is_some_and(|at| at <= now) {
            self.portals.events.push_back(Event::Tick);
        }
        if self.portals.desk.next_deadline().is_some_and(|at| at <= now) {
            self.portals.desk_events.push_back(DeskEvent::Tick);
        }
    }

    fn on_peer_event(&mut self, event: PeerEvent) {
        let Portals { events, desk_events, peers, .. } = &mut self.portals;
        match event {
            PeerEvent::Connected { peer } => events.push_back(Event::Connected { peer }),
            PeerEvent::Disconnected { peer } => events.push_back(Event::Disconnected { peer }),
            PeerEvent::Answer { peer, token, answer, payload } => {
                if matches!(answer, wire::Answer::Hello { .. }) {
                    peers.is_well(peer);
                }
                events.push_back(Event::Answer { peer, token, answer, payload });
            }
            PeerEvent::Ask { link, token, ask, payload } => {
                let named = match &ask {
                    Ask::Hello { host, .. } => peers.is_from(link, host),
                    _ => true,
                };
                // Who shows one host's certificate and calls itself another is neither.
                let ask = if named { ask } else { Ask::Ping };
                desk_events.push_back(DeskEvent::Ask { link, token, ask, payload });
            }
            PeerEvent::LinkDown { link } => desk_events.push_back(DeskEvent::LinkDown { link }),
        }
    }

    fn on_portal_effect(&mut self, now: Instant, effect: Effect, io: &mut Io) {
        match effect {
            Effect::Submit { session, request, since } => self.submit_here(now, session, (request, since), io),
            Effect::Reply { session, reply } => self.on_session_reply(session, reply, io),
            Effect::Abort { session } => {
                logger::warn(format_args!(
                    "a client's connection is ended: its volume is out of reach, or not offered here any more"
                ));
                self.abort_client(session, io);
            }
            Effect::Send { peer, token, ask, payload } => self.portals.peers.ask(peer, token, &ask, payload, io),
            Effect::Reconnect { peer } => {
                self.portals.peers.tell_trouble(peer, "it is connected, but does not answer");
                self.portals.peers.reconnect(now, peer, false, io);
            }
            Effect::Told { ticket, answer } => {
                if let Some(asker) = self.portals.questions.remove(Token(ticket)) {
                    tell(&asker, answer);
                }
            }
            Effect::Trouble { peer, refusal } => {
                let apart;
                let why = match refusal {
                    Refusal::Version(its) => {
                        apart = its.apart_from(PORTAL);
                        &apart
                    }
                    Refusal::Grid => "it is of another grid: check the addresses",
                    Refusal::Superseded => "it has a newer connection of this host",
                    Refusal::NotOwner | Refusal::Unknown | Refusal::Full => "it has refused the greeting",
                };
                self.portals.peers.tell_trouble(peer, why);
                self.portals.peers.reconnect(now, peer, refusal != Refusal::Superseded, io);
            }
        }
    }

    fn on_desk_effect(&mut self, now: Instant, effect: DeskEffect, io: &mut Io) {
        match effect {
            DeskEffect::Answer { link, token, answer, payload } => {
                self.portals.peers.answer(link, token, &answer, &payload, io);
            }
            DeskEffect::CloseLink { link } => self.portals.peers.close_link(link, io),
            DeskEffect::Bind { guest, host, export, client, wrote_at, is_fenced } => {
                self.portals.introduced.insert(guest, Introduced { host, client, wrote_at, is_fenced });
                self.bind_guest(guest, export);
            }
            DeskEffect::Unbind { guest } => self.forget_guest(guest),
            DeskEffect::Submit { guest, request, block } => self.submit_guest(now, guest, request, block, io),
            DeskEffect::Admit { session } => self.admit(session, io),
            DeskEffect::Yield { link, token, volume } => self.begin_yield(now, volume, (link, token), io),
        }
    }

    // ---- sessions of this host ----

    /// A client has opened an export of an offered volume: it may begin when others have passed on what they had.
    pub(super) fn arrive(&mut self, session: Token) {
        self.portals.desk_events.push_back(DeskEvent::Arrive { session });
    }

    /// Others have passed on what they had; what was asked here before is waited for, too.
    fn admit(&mut self, session: Token, io: &mut Io) {
        let Some(Held::Arriving { volume, .. }) = self.clients.get_mut(session).map(|client| &client.held) else {
            return;
        };
        let at = self.volumes.find_id(*volume);
        let open = at.and_then(|at| self.volumes.table.get_mut(at));
        if !open.is_some_and(|volume| volume.comes_behind(Behind::Session(session))) {
            self.begin(session, io);
        }
    }

    fn begin(&mut self, session: Token, io: &mut Io) {
        let Some(client) = self.clients.get_mut(session) else { return };
        let Held::Arriving { volume, export, requests } = std::mem::take(&mut client.held) else { return };
        if !self.portals.is_offered(volume) {
            // Meanwhile only one host has it; the client may find out which.
            return self.abort_client(session, io);
        }
        let (client, wrote_at) = (client.identity.clone(), client.wrote_at);
        let events = &mut self.portals.events;
        events.push_back(Event::Open { session, volume, export, client, wrote_at });
        events.extend(requests.into_iter().map(|(request, since)| Event::Request { session, request, since }));
        if self.serves(volume) {
            self.bind_here(session);
        }
    }

    /// The portal's session is served here.
    fn submit_here(&mut self, now: Instant, session: Token, (request, since): (BlockRequest, Instant), io: &mut Io) {
        if self.bind_here(session) {
            return self.submit_local(now, session, request, since, io);
        }
        // It is being opened or closed again, or a clone is gone.
        self.portals.events.push_back(Event::NotHere { session });
        self.portals.events.push_back(Event::Request { session, request, since });
    }

    /// The controller beside the portal has stopped: what it was asked is asked again, here or elsewhere.
    pub(super) fn hand_back(&mut self, session: Token, request: BlockRequest, since: Instant) {
        self.unbind_here(session);
        self.portals.events.push_back(Event::NotHere { session });
        self.portals.events.push_back(Event::Request { session, request, since });
    }

    // ---- sessions of other hosts' portals ----

    fn bind_guest(&mut self, guest: Token, export: String) {
        let found = self.volumes.find_open(split_export(&export).0);
        let open = found.and_then(|(at, _)| self.volumes.table.get_mut(at));
        let behind = Behind::Guest(guest, export.clone());
        if !open.is_some_and(|volume| volume.comes_behind(behind)) {
            self.bind_guest_now(guest, export);
        }
    }

    /// What was asked before is done.
    fn bind_guest_now(&mut self, guest: Token, export: String) {
        // One that has gone meanwhile is told of all the same.
        let introduced = self.portals.introduced.get(&guest);
        let known = introduced.map(|of| (of.host.clone(), of.client.clone(), (of.wrote_at, of.is_fenced)));
        let (host, client, standing) = known.unwrap_or_default();
        let (name, snapshot) = split_export(&export);
        let found = self.volumes.find_open(name);
        let volume = found.and_then(|(at, head)| Some((at, head, self.volumes.table.get(at)?)));
        let binding = match volume.filter(|(_, _, v)| v.exported || v.controller.is_warming()) {
            // What is asked of an opening that hangs may be done by others before it serves.
            Some((_, _, volume)) if volume.controller.state() == State::Opening => {
                return self.portals.binding.push((guest, export));
            }
            Some((_, _, volume)) if volume.sessions() >= SESSIONS_MAX => Binding::Refused(Refusal::Full),
            Some((at, head, volume)) if volume.controller.state() == State::Open => {
                let layer = snapshot.map(|snapshot| volume.snapshot(head, snapshot).map(|(layer, _)| layer));
                match layer {
                    Some(None) => Binding::Refused(Refusal::Unknown),
                    layer => {
                        let target = layer.flatten().map_or(Target::Head(head), Target::Snapshot);
                        logger::info(format_args!("host {host} opens {export} for a client"));
                        self.portals.guests.insert(guest, Guest { volume: at, target, head });
                        self.volumes.table.get_mut(at).expect("just found").add_session(head);
                        self.open_writer((at, target), SessionId::Guest(guest), client, standing);
                        Binding::Bound
                    }
                }
            }
            _ => Binding::Refused(Refusal::NotOwner),
        };
        if binding != Binding::Bound {
            self.portals.introduced.remove(&guest);
        }
        self.portals.desk_events.push_back(DeskEvent::Bound { guest, binding });
    }

    fn forget_guest(&mut self, guest: Token) {
        self.portals.introduced.remove(&guest);
        let Some(Guest { volume: at, head, target }) = self.portals.guests.remove(&guest) else { return };
        if let Some(volume) = self.volumes.table.get_mut(at) {
            volume.remove_session(head);
        }
        self.close_writer((at, target), SessionId::Guest(guest));
    }

    fn submit_guest(&mut self, now: Instant, guest: Token, request: Token, block: BlockRequest, io: &mut Io) {
        let found = self.portals.guests.get(&guest).map(|g| (g.volume, g.target));
        let Some((at, target)) = found.filter(|(at, _)| self.volumes.table.get(*at).is_some()) else {
            let reply = BlockReply { token: block.token, result: Err(BlockError::Deposed) };
            return self.portals.desk_events.push_back(DeskEvent::Reply { request, reply });
        };
        let asker = Asker { who: Who::Guest(request), token: block.token, op: None, since: now, changes: None };
        self.enter(now, (at, target), SessionId::Guest(guest), (asker, block.op), io);
    }

    // ---- volumes come and go ----

    /// What the records say now.
    pub(super) fn set_offers(&mut self, now: Instant, offers: Vec<Offer>, hosts: &[(String, SocketAddr)], io: &mut Io) {
        let numbers = self.portals.peers.set_wanted(now, hosts, io);
        self.portals.hosts = hosts.iter().map(|(name, _)| name.clone()).zip(numbers).collect();
        let offers: BTreeMap<VolumeId, Offer> = offers.into_iter().map(|offer| (offer.volume, offer)).collect();
        let before = std::mem::replace(&mut self.portals.offers, offers);
        for volume in before.keys().filter(|volume| !self.portals.is_offered(**volume)).copied().collect::<Vec<_>>() {
            self.end_offer(volume);
        }
        for volume in self.portals.offers.keys().copied().collect::<Vec<_>>() {
            if !before.contains_key(&volume) {
                self.take_over_sessions(volume);
            }
            self.route(volume);
        }
    }

    /// Sessions of a volume that is offered from here on are the portal's.
    fn take_over_sessions(&mut self, volume: VolumeId) {
        let Some(at) = self.volumes.find_id(volume) else { return };
        for session in self.clients.of_volume(at) {
            let Some(client) = self.clients.get_mut(session) else { continue };
            let Some(export) = client.give_to_portal() else { continue };
            let (client, wrote_at) = (client.identity.clone(), client.wrote_at);
            self.portals.events.push_back(Event::Open { session, volume, export, client, wrote_at });
        }
    }

    /// Only one host has it from here on: where that is this one, its sessions are its own again.
    fn end_offer(&mut self, volume: VolumeId) {
        if self.serves(volume) {
            let own: Vec<Token> = self.portals.portal.sessions_of(volume).collect();
            let is_ours = |host: &mut Host, s: Token| host.portals.portal.is_here(s) && host.bind_here(s);
            for session in own.into_iter().filter(|s| is_ours(self, *s)).collect::<Vec<_>>() {
                self.portals.events.push_back(Event::Close { session });
                if let Some(client) = self.clients.get_mut(session) {
                    client.take_from_portal();
                }
            }
        }
        self.portals.events.push_back(Event::Route { volume, route: Route::Closed });
    }

    fn serves(&self, volume: VolumeId) -> bool {
        let found = self.volumes.find_id(volume).and_then(|at| self.volumes.table.get(at));
        found.is_some_and(|v| v.exported && v.controller.state() == State::Open)
    }

    /// Tells the portal where the volume is: here, where that is so, whatever the records say.
    fn route(&mut self, volume: VolumeId) {
        let Some(offer) = self.portals.offers.get(&volume) else { return };
        let route = match &offer.place {
            _ if self.serves(volume) => Route::Here,
            Place::Here => Route::Nowhere,
            Place::At(host) => self.portals.hosts.get(host).map_or(Route::Nowhere, |peer| Route::At(*peer)),
        };
        self.portals.events.push_back(Event::Route { volume, route });
    }

    /// A volume serves here from now on.
    pub(super) fn on_serving(&mut self, at: Token) {
        let Some(volume) = self.volumes.table.get(at).map(|v| v.id) else { return };
        self.route(volume);
        let sessions: Vec<Token> = self.portals.portal.sessions_of(volume).collect();
        for session in sessions {
            self.bind_here(session);
        }
        for (guest, export) in std::mem::take(&mut self.portals.binding) {
            self.bind_guest(guest, export);
        }
    }

    /// Sessions of other hosts' portals that use a head, its snapshots included, or only one target.
    pub(super) fn guests_of(&self, at: Token, head: HeadId, target: Option<Target>) -> usize {
        let uses = |g: &&Guest| g.volume == at && g.head == head && target.is_none_or(|target| g.target == target);
        self.portals.guests.values().filter(uses).count()
    }

    /// Cuts sessions of other hosts' portals off that use a head.
    pub(super) fn cut_guests_of(&mut self, at: Token, head: HeadId) {
        let uses = |g: &Guest| g.volume == at && g.head == head;
        let using: Vec<Token> = self.portals.guests.iter().filter(|(_, g)| uses(g)).map(|(t, _)| *t).collect();
        for guest in using {
            self.forget_guest(guest);
            self.portals.desk_events.push_back(DeskEvent::Unserved { guest });
        }
    }

    /// A controller is gone, and its volume's entry with it.
    pub(super) fn on_unserved(&mut self, at: Token, volume: VolumeId) {
        let of_it = |guest: &Guest| guest.volume == at;
        let gone: Vec<Token> = self.portals.guests.iter().filter(|(_, g)| of_it(g)).map(|(t, _)| *t).collect();
        for guest in gone {
            self.portals.guests.remove(&guest);
            self.portals.introduced.remove(&guest);
            self.portals.desk_events.push_back(DeskEvent::Unserved { guest });
        }
        for (guest, export) in std::mem::take(&mut self.portals.binding) {
            self.bind_guest(guest, export);
        }
        for (_, link, token) in self.portals.yielding.extract_if(.., |(yields, ..)| *yields == at) {
            self.portals.desk_events.push_back(DeskEvent::Yielded { link, token, refusal: None });
        }
        for (_, answer) in self.portals.preparing.extract_if(.., |(prepares, _)| *prepares == at) {
            tell(&answer, false);
        }
        self.route(volume);
    }

    // ---- hand-over ----

    fn begin_yield(&mut self, now: Instant, volume: VolumeId, (link, token): (LinkId, u64), io: &mut Io) {
        let at = self.volumes.find_id(volume).filter(|_| self.serves(volume));
        let Some(at) = at else {
            let refusal = Some(Refusal::NotOwner);
            return self.portals.desk_events.push_back(DeskEvent::Yielded { link, token, refusal });
        };
        logger::info(format_args!("volume {volume} is handed over"));
        self.portals.yielding.push((at, link, token));
        self.drain_layers(now, at, io);
        self.drive(now, at, VolumeEvent::Yield, io);
    }

    /// Empties a volume's log as far as that can be done beside its service; false where it is not served here.
    pub(super) fn prepare(&mut self, now: Instant, name: &str, answer: Answer<bool>, io: &mut Io) {
        let found = self.volumes.find_open(name).filter(|(at, _)| {
            self.volumes.table.get(*at).is_some_and(|v| v.exported && v.controller.state() == State::Open)
        });
        let Some((at, _)) = found else { return tell(&answer, false) };
        self.portals.preparing.push((at, answer));
        self.drive(now, at, VolumeEvent::Prepare, io);
    }

    pub(super) fn on_prepared(&mut self, at: Token) {
        for (_, answer) in self.portals.preparing.extract_if(.., |(prepares, _)| *prepares == at) {
            tell(&answer, true);
        }
    }

    /// Reads what another host is about to hand over.
    pub(super) fn warm(&mut self, now: Instant, spec: OpenSpec, answer: Answer<Option<Option<Warming>>>, io: &mut Io) {
        let volume = spec.volume;
        self.open_if_closed(now, spec, (false, VolumeEvent::Warm), io);
        let found = self.volumes.find_id(volume).and_then(|at| self.volumes.table.get(at));
        // With more nodes away than its layout bears, the log's being there is not all that it takes.
        let lacks = |volume: &Volume| {
            let away = &self.nodes_away;
            away.len() > usize::from(volume.layout().failures()) && volume.controller.lost_without(away) > 0
        };
        let warming = |volume: &Volume| match volume.controller.warming() {
            Some(Warming::Warm) if lacks(volume) => Some(Warming::Unreadable),
            warming => warming,
        };
        tell(&answer, found.map(warming));
    }

    /// Asks another host to yield a volume; `None` where it can't be asked.
    pub(super) fn ask_host(&mut self, host: &str, volume: VolumeId, answer: Answer<Option<wire::Answer>>) {
        let peer = self.portals.hosts.get(host).copied();
        let Some(peer) = peer.filter(|_| !self.portals.questions.is_full()) else { return tell(&answer, None) };
        let ticket = self.portals.questions.insert(answer).0;
        self.portals.events.push_back(Event::Ask { peer, ticket, ask: Ask::Yield { volume } });
    }
}
