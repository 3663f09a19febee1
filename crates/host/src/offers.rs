//! Offers of this host: volumes that clients reach here wherever their owner is.
//!
//! Role: around [`Ingress`] and [`OwnerEnd`]. What the records say of who serves what comes as [`Offer`]s from the control
//! plane; whether a volume is served here its controller tells. Volumes that only one host offers have nothing to do with
//! this. The sessions of other hosts are in [`crate::remotes`].

use crate::event::{Effect, Outcome, Ownership, PeerEffect, PeerEvent};
use crate::forward::{
    Ingress, IngressEffect, IngressEvent, OwnerEffect, OwnerEnd, OwnerEvent, Peer, Route, SessionView,
};
use crate::homes::{host_of_link, link_name};
use crate::host::{Asked, Host, Out};
use crate::remotes::{Introduced, Remote};
use crate::requests::Barrier;
use holdfast_base::time::earliest;
use holdfast_base::{BlockRequest, Effects, ExportInfo, Instant, Slab, Token, VolumeId};
use holdfast_format::forward::Ask;
use holdfast_volume::State;
use std::collections::{BTreeMap, VecDeque};

/// Questions to other hosts at a time.
const PEER_QUERIES_MAX: usize = 256;

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

/// An export that is offered, as clients see it while another host serves it.
pub fn forwarded(name: &str, size_bytes: u64) -> ExportInfo {
    let description = "Holdfast volume, through another host".to_string();
    ExportInfo { name: name.to_string(), description, size_bytes, read_only: false }
}

pub(crate) struct Forward {
    ingress: Ingress,
    owner: OwnerEnd,
    ingress_effects: Effects<IngressEffect>,
    owner_effects: Effects<OwnerEffect>,
    pub events: VecDeque<IngressEvent>,
    pub owner_events: VecDeque<OwnerEvent>,
    offers: BTreeMap<VolumeId, Offer>,
    /// Numbers of hosts that volumes may be at.
    pub hosts: BTreeMap<String, Peer>,
    /// Hosts that serve volumes with which those here may talk.
    pub heard_at: BTreeMap<VolumeId, String>,
    pub remotes: BTreeMap<Token, Remote>,
    /// From when they ask for an export.
    pub introduced: BTreeMap<Token, Introduced>,
    /// Remote sessions that wait until the volume serves, and what they want.
    pub binding: Vec<(Token, String)>,
    pub yielding: Vec<(Token, crate::LinkId, u64)>,
    /// Tickets of orders, by those of queries.
    peer_queries: Slab<u64>,
    /// Whom these waited for is done.
    pub cleared: VecDeque<Barrier>,
}

impl Forward {
    pub fn new(config: &crate::Config) -> Forward {
        let mut ingress = Ingress::new(config.grid, &link_name(&config.name, config.reactor), config.instance);
        let mut owner = OwnerEnd::new(config.grid, &config.name);
        ingress.set_mutations(config.mutations);
        owner.set_mutations(config.mutations);
        Forward {
            ingress,
            owner,
            ingress_effects: Effects::new(),
            owner_effects: Effects::new(),
            events: VecDeque::new(),
            owner_events: VecDeque::new(),
            offers: BTreeMap::new(),
            hosts: BTreeMap::new(),
            heard_at: BTreeMap::new(),
            remotes: BTreeMap::new(),
            introduced: BTreeMap::new(),
            binding: Vec::new(),
            yielding: Vec::new(),
            peer_queries: Slab::new(PEER_QUERIES_MAX),
            cleared: VecDeque::new(),
        }
    }

    /// Takes in what another host says.
    pub fn hear(&mut self, event: PeerEvent) {
        match event {
            PeerEvent::Connected { peer } => self.events.push_back(IngressEvent::Connected { peer }),
            PeerEvent::Disconnected { peer } => self.events.push_back(IngressEvent::Disconnected { peer }),
            PeerEvent::Answer { peer, token, answer, payload } => {
                self.events.push_back(IngressEvent::Answer { peer, token, answer, payload });
            }
            PeerEvent::Ask { link, token, ask, payload } => {
                self.owner_events.push_back(OwnerEvent::Ask { link, token, ask, payload });
            }
            PeerEvent::LinkDown { link } => self.owner_events.push_back(OwnerEvent::LinkDown { link }),
        }
    }

    /// The earliest that a client may have sent what is read of it now.
    pub fn since(&self, now: Instant) -> Instant {
        self.ingress.since(now)
    }

    /// When the last write of a session was answered, and whether its client was followed, as far as it is forwarded.
    pub fn standing(&self, session: Token) -> (Option<Instant>, bool) {
        (self.ingress.wrote_at(session), self.ingress.is_fenced(session))
    }

    pub fn note_fenced(&mut self, session: Token) {
        self.ingress.note_fenced(session);
    }

    /// A write of a session whose volume is served here was answered.
    pub fn note_written(&mut self, session: Token, now: Instant) {
        self.ingress.note_written(session, now);
    }

    pub fn is_offered(&self, volume: VolumeId) -> bool {
        self.offers.contains_key(&volume)
    }

    /// An export that is offered, but not served here, as clients see it.
    pub fn export(&self, name: &str) -> Option<(VolumeId, ExportInfo)> {
        let (volume, (_, size)) = self.offers.values().find_map(|o| Some((o.volume, *o.exports.get(name)?)))?;
        Some((volume, forwarded(name, size)))
    }

    /// The id of an offered volume or clone.
    pub fn export_id(&self, name: &str) -> Option<VolumeId> {
        self.offers.values().find_map(|o| o.exports.get(name)).map(|(id, _)| *id)
    }

    pub fn exports(&self) -> impl Iterator<Item = ExportInfo> {
        self.offers.values().flat_map(|o| o.exports.keys()).filter_map(|name| Some(self.export(name)?.1))
    }

    fn sessions_of(&self, volume: VolumeId) -> Vec<Token> {
        self.ingress.sessions_of(volume).collect()
    }

    pub fn tick(&mut self, now: Instant) {
        if self.ingress.next_deadline().is_some_and(|at| at <= now) {
            self.events.push_back(IngressEvent::Tick);
        }
        if self.owner.next_deadline().is_some_and(|at| at <= now) {
            self.owner_events.push_back(OwnerEvent::Tick);
        }
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        earliest(self.ingress.next_deadline(), self.owner.next_deadline())
    }
}

impl Host {
    /// Sessions of this host's clients that use an offered volume.
    pub fn forwarded_sessions(&self, volume: VolumeId) -> usize {
        self.forward.ingress.sessions_of(volume).count()
    }

    /// How a forwarded session stands.
    pub fn session_view(&self, session: Token) -> Option<SessionView> {
        self.forward.ingress.view(session)
    }

    /// Works off one thing; false where there is none.
    pub(crate) fn settle_forward(&mut self, now: Instant, out: Out) -> bool {
        if let Some(event) = self.forward.events.pop_front() {
            let mut effects = std::mem::take(&mut self.forward.ingress_effects);
            self.forward.ingress.handle(now, event, &mut effects);
            for effect in effects.drain() {
                self.on_ingress_effect(now, effect, out);
            }
            self.forward.ingress_effects = effects;
        } else if let Some(event) = self.forward.owner_events.pop_front() {
            let mut effects = std::mem::take(&mut self.forward.owner_effects);
            self.forward.owner.handle(now, event, &mut effects);
            for effect in effects.drain() {
                self.on_owner_effect(now, effect, out);
            }
            self.forward.owner_effects = effects;
        } else if let Some(who) = self.forward.cleared.pop_front() {
            match who {
                Barrier::Session(session) => self.on_session_clear(now, session, out),
                Barrier::Forwarded(session) => self.begin_forwarded(session, out),
                Barrier::Remote(remote, export) => self.bind_remote_now(remote, export, out),
            }
        } else {
            return false;
        }
        true
    }

    fn on_ingress_effect(&mut self, now: Instant, effect: IngressEffect, out: Out) {
        match effect {
            IngressEffect::Submit { session, request, since } => {
                if self.bind_here(session) {
                    return self.submit_bound(now, session, Asked { request, since, came_at: now }, out);
                }
                // It is being opened or closed again, or a clone is gone.
                self.forward.events.push_back(IngressEvent::NotHere { session });
                self.forward.events.push_back(IngressEvent::Request { session, request, since });
            }
            IngressEffect::Reply { session, reply } => self.reply_to(session, reply, out),
            IngressEffect::Abort { session } => {
                crate::host::warn(
                    out,
                    "a client's connection is ended: its volume is out of reach, or not offered here any more"
                        .to_string(),
                );
                self.abort_session(session, None, out);
            }
            IngressEffect::Send { peer, token, ask, payload } => {
                out.push(Effect::Peer(PeerEffect::Ask { peer, token, ask, payload }));
            }
            IngressEffect::Reconnect { peer } => out.push(Effect::Peer(PeerEffect::Reconnect { peer })),
            IngressEffect::Answered { ticket, answer } => {
                if let Some(ticket) = self.forward.peer_queries.remove(Token(ticket)) {
                    out.push(Effect::Done { ticket, outcome: Outcome::Yielded(answer) });
                }
            }
            IngressEffect::Trouble { peer, refusal } => {
                out.push(Effect::Peer(PeerEffect::Trouble { peer, refusal }));
            }
        }
    }

    fn on_owner_effect(&mut self, now: Instant, effect: OwnerEffect, out: Out) {
        match effect {
            OwnerEffect::Answer { link, token, answer, payload } => {
                out.push(Effect::Peer(PeerEffect::Answer { link, token, answer, payload }));
            }
            OwnerEffect::CloseLink { link } => out.push(Effect::Peer(PeerEffect::CloseLink { link })),
            OwnerEffect::Bind { remote, host, export, client, wrote_at, is_fenced } => {
                let host = host_of_link(&host).to_string();
                self.forward.introduced.insert(remote, Introduced { host, client, wrote_at, is_fenced });
                self.bind_remote(remote, export, out);
            }
            OwnerEffect::Unbind { remote } => self.forget_remote(remote),
            OwnerEffect::Submit { remote, request, block } => self.submit_remote(now, remote, (request, block), out),
            OwnerEffect::Admit { session } => self.admit_forwarded(session, out),
            OwnerEffect::Yield { link, token, volume } => self.begin_yield(now, volume, (link, token), out),
            OwnerEffect::Told { from, to, payload } => self.on_talk_of_host(now, from, to, &payload, out),
        }
    }

    /// The controller beside a forwarded session has stopped: what it was asked is asked again, here or elsewhere.
    pub(crate) fn hand_back(&mut self, session: Token, request: BlockRequest, since: Instant) {
        self.unbind_here(session);
        self.forward.events.push_back(IngressEvent::NotHere { session });
        self.forward.events.push_back(IngressEvent::Request { session, request, since });
    }

    // ---- volumes come and go ----

    /// What the records say now.
    pub(crate) fn set_offers(&mut self, offers: Vec<Offer>, hosts: Vec<(String, Peer)>, out: Out) {
        self.forward.hosts = hosts.into_iter().collect();
        let offers: BTreeMap<VolumeId, Offer> = offers.into_iter().map(|offer| (offer.volume, offer)).collect();
        let before = std::mem::replace(&mut self.forward.offers, offers);
        for volume in before.keys().filter(|volume| !self.forward.is_offered(**volume)).copied().collect::<Vec<_>>() {
            self.end_offer(volume);
        }
        for volume in self.forward.offers.keys().copied().collect::<Vec<_>>() {
            if !before.contains_key(&volume) {
                self.forward_sessions_of(volume);
            }
            self.route(volume);
            if before.get(&volume).map(|offer| &offer.place) != Some(&self.forward.offers[&volume].place) {
                self.tell_owner(volume, self.ownership(volume), out);
            }
        }
    }

    /// Only one host has it from here on: where that is this one, its sessions are its own again.
    fn end_offer(&mut self, volume: VolumeId) {
        if self.serves(volume) {
            let is_ours = |host: &mut Host, s: Token| host.forward.ingress.is_here(s) && host.bind_here(s);
            let own: Vec<Token> = self.forward.sessions_of(volume);
            for session in own.into_iter().filter(|s| is_ours(self, *s)).collect::<Vec<_>>() {
                self.forward.events.push_back(IngressEvent::Close { session });
                self.stop_forwarding(session);
            }
        }
        self.forward.events.push_back(IngressEvent::Route { volume, route: Route::Closed });
    }

    pub(crate) fn serves(&self, volume: VolumeId) -> bool {
        let found = self.volumes.find_id(volume).and_then(|at| self.volumes.table.get(at));
        found.is_some_and(|v| v.exported && v.controller.state() == State::Open)
    }

    /// Tells [`Ingress`] where the volume is: here, where that is so, whatever the records say.
    pub(crate) fn route(&mut self, volume: VolumeId) {
        let Some(offer) = self.forward.offers.get(&volume) else { return };
        let route = match &offer.place {
            _ if self.serves(volume) => Route::Here,
            Place::Here => Route::Nowhere,
            Place::At(host) => self.forward.hosts.get(host).map_or(Route::Nowhere, |peer| Route::At(*peer)),
        };
        self.forward.events.push_back(IngressEvent::Route { volume, route });
    }

    fn ownership(&self, volume: VolumeId) -> Ownership {
        match self.forward.offers.get(&volume).map(|offer| &offer.place) {
            _ if self.serves(volume) => Ownership::Here,
            Some(Place::At(_)) => Ownership::Elsewhere,
            _ => Ownership::Nobody,
        }
    }

    /// A volume serves here from now on.
    pub(crate) fn on_serving(&mut self, at: Token, out: Out) {
        let Some(volume) = self.volumes.table.get(at).map(|v| v.id) else { return };
        self.route(volume);
        for session in self.forward.sessions_of(volume) {
            self.bind_here(session);
        }
        for (remote, export) in std::mem::take(&mut self.forward.binding) {
            self.bind_remote(remote, export, out);
        }
        self.tell_owner(volume, Ownership::Here, out);
    }

    /// A controller is gone, and its volume's entry with it.
    pub(crate) fn on_unserved(&mut self, at: Token, volume: VolumeId, out: Out) {
        self.unserve_remotes(at, out);
        for (_, link, token) in self.forward.yielding.extract_if(.., |(yields, ..)| *yields == at) {
            self.forward.owner_events.push_back(OwnerEvent::Yielded { link, token, refusal: None });
        }
        self.waiters.on_prepared(at, false, out);
        self.route(volume);
        self.tell_owner(volume, self.ownership(volume), out);
    }

    /// Asks another host to yield a volume; nothing where it can't be asked.
    pub(crate) fn ask_to_yield(&mut self, ticket: u64, host: &str, volume: VolumeId, out: Out) {
        let peer = self.forward.hosts.get(host).copied();
        let Some(peer) = peer.filter(|_| !self.forward.peer_queries.is_full()) else {
            return out.push(Effect::Done { ticket, outcome: Outcome::Yielded(None) });
        };
        let ticket = self.forward.peer_queries.insert(ticket).0;
        self.forward.events.push_back(IngressEvent::Ask { peer, ticket, ask: Ask::Yield { volume } });
    }
}
