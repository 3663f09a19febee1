//! What the control plane asks of the reactor, and who waits for the answers.
//!
//! Role: each command carries the sending half of a one-shot channel. The reactor answers at once, or keeps the sender
//! in [`Waiters`] until what was asked has happened. It never blocks: a channel holds the one answer it gets.

use super::Host;
use super::access::Lists;
use super::family::{FamilyCommand, ForkOutcome};
use super::fixed::FixedVolume;
use super::groups::GroupOutcome;
use super::layers::{LayerChange, LayerOutcome};
use super::limits::Limits;
use super::portals::Offer;
use super::volumes::{OpenSpec, Volume};
use crate::logger;
use crate::resources;
use holdfast_api::{DeviceHealth, DeviceInfo, LinkState, NodeInfo, OutageInfo, Parts, VolumeInfo};
use holdfast_base::{DeviceId, HeadId, Instant, NodeId, Slab, Token, VolumeId};
use holdfast_format::drive::DriveReport;
use holdfast_format::geometry::Layout;
use holdfast_format::portal as wire;
use holdfast_format::tier::Tiers;
use holdfast_format::wire::{DeviceStat, DeviceTrouble, OpTimes, Reply, Request};
use holdfast_runtime::reactor::{Io, ListenError};
use holdfast_volume::{Change, Claim, Event as VolumeEvent, Notice, State, Target, Warming};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc::SyncSender;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Calls to nodes and changes of size that may be under way at a time.
const WAITERS_MAX: usize = 4096;

/// The sending half of a channel of capacity one.
pub type Answer<T> = SyncSender<T>;

/// Where and how a volume's data lie, as far as it can be changed while it is used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Policy {
    Layout(Layout),
    Tiers(Tiers),
}

impl From<Policy> for VolumeEvent {
    fn from(policy: Policy) -> VolumeEvent {
        match policy {
            Policy::Layout(layout) => VolumeEvent::SetLayout { layout },
            Policy::Tiers(tiers) => VolumeEvent::SetTiers { tiers },
        }
    }
}

pub enum Command {
    Status {
        answer: Answer<LiveStatus>,
    },
    Volume {
        name: String,
        answer: Answer<Option<VolumeInfo>>,
    },
    /// The parts of the volume, if it is open.
    Anatomy {
        name: String,
        answer: Answer<Option<Box<Parts>>>,
    },
    /// Puts a volume into service; harmless where it is already.
    Open {
        spec: OpenSpec,
        /// For clients; otherwise for care.
        exported: bool,
        answer: Answer<()>,
    },
    /// Begins to read what another host is about to hand over, or goes on; how far that is (`None` where the volume is opened
    /// already). Nothing where it can't be opened here.
    Warm {
        spec: OpenSpec,
        answer: Answer<Option<Option<Warming>>>,
    },
    /// Drops what there is of a volume, as it is, and cuts its clients off; answered when it is gone.
    LetGo {
        volume: VolumeId,
        answer: Answer<()>,
    },
    /// Closes a volume that is open for care only.
    EndCare {
        name: String,
        answer: Answer<CloseOutcome>,
    },
    /// A volume that is open, but not for clients, takes in a stream from who knows the ticket, and from nobody else any
    /// more; false where there is no such volume.
    Receive {
        name: String,
        ticket: Option<String>,
        answer: Answer<bool>,
    },
    /// Takes a volume out of service; answered when it is closed.
    Close {
        name: String,
        /// Disconnect clients rather than refuse.
        force: bool,
        /// Drop the controller as it is: the volume is being deleted.
        discard: bool,
        answer: Answer<CloseOutcome>,
    },
    /// Answered when the volume has the size.
    Resize {
        name: String,
        size_bytes: u64,
        /// Make it smaller although clients know the larger size.
        force: bool,
        answer: Answer<ResizeOutcome>,
    },
    /// Who is connected to a volume or clone, for people.
    Users {
        name: String,
        answer: Answer<Vec<String>>,
    },
    /// Answered when everything new is written so; false where the volume is not in service.
    SetPolicy {
        name: String,
        policy: Policy,
        answer: Answer<bool>,
    },
    /// Whether guests' reads of a volume are checked; harmless where it is not in service.
    CheckReads {
        name: String,
        checked: bool,
        answer: Answer<()>,
    },
    /// Volumes that several clients may write to at a time.
    Shared {
        volumes: BTreeSet<VolumeId>,
        answer: Answer<()>,
    },
    /// Whether guests' writes leave the spare free, too: hosts of older releases do.
    KeepSpare {
        keep: bool,
        answer: Answer<()>,
    },
    /// Of a volume in service, or a clone.
    Change {
        volume: String,
        wanted: Wanted,
        answer: Answer<ChangeOutcome>,
    },
    /// Of the layers before a volume in service, or a clone.
    Layers {
        volume: String,
        change: LayerChange,
        answer: Answer<LayerOutcome>,
    },
    /// Of volumes that share segments.
    Family(FamilyCommand),
    /// Consistent snapshots of several volumes in service, or clones.
    SnapshotGroup {
        volumes: Vec<String>,
        name: String,
        answer: Answer<GroupOutcome>,
    },
    Cut {
        node: NodeId,
        cut: bool,
        answer: Answer<bool>,
    },
    /// Volumes leave these devices, and no others.
    Drain {
        devices: BTreeSet<DeviceId>,
        answer: Answer<()>,
    },
    /// By device that is being drained: shards and logs of volumes in service that are still there.
    LeftToDrain {
        answer: Answer<BTreeMap<DeviceId, u64>>,
    },
    /// Volumes in service that lack something for another reason than this node's absence, or can't tell yet.
    Weak {
        node: NodeId,
        answer: Answer<Vec<Weakness>>,
    },
    /// Volumes in service with segments that could not be read without these nodes, or that can't tell yet.
    Losses {
        nodes: BTreeSet<NodeId>,
        answer: Answer<Vec<Weakness>>,
    },
    /// What is set aside for fixed volumes.
    Fixed {
        answer: Answer<BTreeMap<VolumeId, FixedVolume>>,
    },
    /// A volume is fixed from here on, or no more.
    SetFixed {
        id: VolumeId,
        fixed: Option<FixedVolume>,
        answer: Answer<()>,
    },
    /// What volumes own and have not used yet, beside one.
    Claims {
        beside: Option<VolumeId>,
        answer: Answer<Vec<Claim>>,
    },
    /// The volumes that this host and others offer, and where hosts are.
    Offers {
        offers: Vec<Offer>,
        hosts: Vec<(String, SocketAddr)>,
        answer: Answer<()>,
    },
    /// Answered when the log of a volume that is served here is short; false where it is not served here.
    Prepare {
        name: String,
        answer: Answer<bool>,
    },
    /// Asks another host to stop serving a volume; `None` where it can't be asked.
    AskToYield {
        host: String,
        volume: VolumeId,
        answer: Answer<Option<wire::Answer>>,
    },
    /// Which clients may have what from here on, and how much; answered when those that may not stay are cut off.
    Access {
        lists: Lists,
        limits: Limits,
        answer: Answer<()>,
    },
    /// Certificates were revoked: answered when their connections are ended.
    CutRevoked {
        answer: Answer<()>,
    },
    /// Clients of this host that use an offered volume.
    Through {
        volume: VolumeId,
        answer: Answer<usize>,
    },
    /// Where clients reach an export of this host.
    Uris {
        name: String,
        answer: Answer<Vec<String>>,
    },
    /// The grid has these nodes from here on.
    Nodes {
        nodes: Vec<(NodeId, SocketAddr)>,
        answer: Answer<()>,
    },
    /// This machine has this address now; gives where other hosts reach this one, if they may.
    Address {
        ip: IpAddr,
        answer: Answer<Result<Option<SocketAddr>, ListenError>>,
    },
    /// `None` where the node is out of reach, or the connection is lost on the way.
    Call {
        node: NodeId,
        request: Box<Request>,
        answer: Answer<Option<Reply>>,
    },
}

/// What a volume in service lacks.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Weakness {
    pub volume: String,
    /// It is not open yet, or not any more: nobody knows.
    pub unknown: bool,
    pub segments: u64,
    pub entries: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CloseOutcome {
    Closed,
    /// It was not in service.
    NotOpen,
    /// So many clients are connected.
    InUse(usize),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ResizeOutcome {
    Done,
    /// It was not in service, or went out of it.
    NotOpen,
    /// Clients are connected, and would lose the end of it.
    InUse,
}

/// What shall become of a volume's snapshots or of a clone.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Wanted {
    Snapshot {
        name: String,
    },
    DropSnapshot {
        name: String,
    },
    Rollback {
        snapshot: String,
    },
    Clone {
        snapshot: String,
        id: VolumeId,
        name: String,
        /// The snapshot's where it is missing.
        size_bytes: Option<u64>,
    },
    DropClone {
        /// Disconnect clients rather than refuse.
        force: bool,
    },
    ResizeClone {
        size_bytes: u64,
        /// Make it smaller although clients know the larger size.
        force: bool,
    },
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ChangeOutcome {
    Done,
    /// The volume is not in service, or went out of it.
    NotOpen,
    /// So many clients use it.
    InUse(usize),
    Refused(&'static str),
}

/// For the log.
pub fn change_text(change: &Change) -> String {
    match change {
        Change::Snapshot { name, .. } => format!("snapshot {name} is taken"),
        Change::DropSnapshot { name, .. } => format!("snapshot {name} is deleted; its space returns"),
        Change::Clone { name, .. } => format!("clone {name} is made"),
        Change::DropClone { head } => format!("clone {head} is deleted; its space returns"),
        Change::ResizeClone { head, size_bytes } => format!("clone {head} has {size_bytes} bytes now"),
        Change::Rollback { name, .. } => format!("rolled back to snapshot {name}"),
    }
}

/// The part of `status` that the reactor knows.
pub struct LiveStatus {
    pub uptime: Duration,
    pub nodes: Vec<NodeInfo>,
    pub volumes: Vec<VolumeInfo>,
}

pub struct Waiters {
    calls: Slab<Answer<Option<Reply>>>,
    resizes: Vec<(Token, u64, Answer<ResizeOutcome>)>,
    policies: Vec<(Token, Policy, Answer<bool>)>,
    closes: Vec<(Token, Answer<CloseOutcome>)>,
    changes: Vec<(Token, Change, Answer<ChangeOutcome>)>,
    pub(super) forks: Vec<(Token, VolumeId, Answer<ForkOutcome>)>,
}

impl Default for Waiters {
    fn default() -> Waiters {
        Waiters {
            calls: Slab::new(WAITERS_MAX),
            resizes: Vec::new(),
            policies: Vec::new(),
            closes: Vec::new(),
            changes: Vec::new(),
            forks: Vec::new(),
        }
    }
}

/// Who asked may have given up waiting; then nobody is told.
pub(super) fn tell<T>(answer: &Answer<T>, value: T) {
    let _ = answer.try_send(value);
}

impl Waiters {
    pub fn on_node_answer(&mut self, ticket: u64, reply: Option<Reply>) {
        if let Some(answer) = self.calls.remove(Token(ticket)) {
            tell(&answer, reply);
        }
    }

    pub fn on_resized(&mut self, at: Token, size_bytes: u64) {
        for (_, _, answer) in self.resizes.extract_if(.., |(volume, size, _)| *volume == at && *size == size_bytes) {
            tell(&answer, ResizeOutcome::Done);
        }
    }

    pub fn on_policy_set(&mut self, at: Token, policy: Policy) {
        for (_, _, answer) in self.policies.extract_if(.., |(volume, wanted, _)| *volume == at && *wanted == policy) {
            tell(&answer, true);
        }
    }

    pub fn on_change(&mut self, at: Token, change: &Change, outcome: &ChangeOutcome) {
        for (_, _, answer) in self.changes.extract_if(.., |(volume, of, _)| *volume == at && of == change) {
            tell(&answer, outcome.clone());
        }
    }

    /// What came of making a separate clone.
    pub fn on_fork_notice(&mut self, at: Token, notice: &Notice) {
        match notice {
            Notice::Forked { dependent, root } => {
                logger::info(format_args!("what separate clone {} begins with is written", root.name));
                self.on_forked(at, *dependent, &ForkOutcome::Made(root.clone()));
            }
            Notice::ForkRefused { dependent, why } => self.on_forked(at, *dependent, &ForkOutcome::Refused(why)),
            _ => {}
        }
    }

    fn on_forked(&mut self, at: Token, dependent: VolumeId, outcome: &ForkOutcome) {
        for (_, _, answer) in self.forks.extract_if(.., |(volume, id, _)| *volume == at && *id == dependent) {
            tell(&answer, outcome.clone());
        }
    }

    /// The volume went out of service: what became of the changes that were asked for, its next owner knows.
    pub fn on_changes_lost(&mut self, at: Token) {
        for (_, _, answer) in self.changes.extract_if(.., |(volume, _, _)| *volume == at) {
            tell(&answer, ChangeOutcome::NotOpen);
        }
        for (_, _, answer) in self.forks.extract_if(.., |(volume, _, _)| *volume == at) {
            tell(&answer, ForkOutcome::NotOpen);
        }
    }

    pub fn on_closed(&mut self, at: Token) {
        self.on_changes_lost(at);
        for (_, _, answer) in self.policies.extract_if(.., |(volume, _, _)| *volume == at) {
            tell(&answer, false);
        }
        for (_, answer) in self.closes.extract_if(.., |(volume, _)| *volume == at) {
            tell(&answer, CloseOutcome::Closed);
        }
        self.resizes.retain(|(volume, _, answer)| {
            if *volume == at {
                tell(answer, ResizeOutcome::NotOpen);
            }
            *volume != at
        });
    }
}

impl Host {
    /// The parts of a volume that is open; a clone's are those of the volume that it is in.
    fn parts_of(&self, name: &str) -> Option<Box<Parts>> {
        let (at, _) = self.volumes.find_open(name)?;
        self.volumes.table.get(at).map(|volume| Box::new(resources::parts(volume.controller.anatomy())))
    }

    pub(super) fn on_command(&mut self, now: Instant, command: Command, io: &mut Io) {
        match command {
            Command::Status { answer } => tell(&answer, self.live_status(now)),
            Command::Volume { name, answer } => {
                let found = self.volumes.find_open(&name);
                tell(&answer, found.and_then(|(at, head)| self.volumes.info(&name, at, head)));
            }
            Command::Anatomy { name, answer } => tell(&answer, self.parts_of(&name)),
            Command::EndCare { name, answer } => {
                let found = self.volumes.find_open(&name).and_then(|(at, _)| self.volumes.table.get(at));
                match found.is_some_and(|volume| !volume.exported) {
                    true => self.close(now, &name, (false, false), answer, io),
                    false => tell(&answer, CloseOutcome::NotOpen),
                }
            }
            Command::LetGo { volume, answer } => {
                self.let_go(now, volume, io);
                tell(&answer, ());
            }
            Command::Receive { name, ticket, answer } => tell(&answer, self.set_receiver(&name, ticket, io)),
            Command::Open { spec, exported, answer } => {
                self.open_if_closed(now, spec, (exported, VolumeEvent::Open), io);
                tell(&answer, ());
            }
            Command::Warm { spec, answer } => self.warm(now, spec, answer, io),
            Command::Close { name, force, discard, answer } => self.close(now, &name, (force, discard), answer, io),
            Command::Resize { name, size_bytes, force, answer } => {
                self.resize(now, &name, (size_bytes, force), answer, io);
            }
            Command::Users { name, answer } => tell(&answer, self.users(&name)),
            Command::SetPolicy { name, policy, answer } => {
                let Some((at, _)) = self.volumes.find_open(&name) else { return tell(&answer, false) };
                self.waiters.policies.push((at, policy, answer));
                self.drive(now, at, policy.into(), io);
            }
            Command::CheckReads { name, checked, answer } => {
                if let Some((at, _)) = self.volumes.find_open(&name) {
                    self.drive(now, at, VolumeEvent::CheckReads(checked), io);
                }
                tell(&answer, ());
            }
            Command::Shared { volumes, answer } => {
                self.set_shared(volumes);
                tell(&answer, ());
            }
            Command::KeepSpare { keep, answer } => {
                self.keep_spare(now, keep, io);
                tell(&answer, ());
            }
            Command::Change { volume, wanted, answer } => self.change(now, &volume, wanted, answer, io),
            Command::Layers { volume, change, answer } => {
                tell(&answer, self.change_layers(now, &volume, change, io));
            }
            Command::Family(command) => self.on_family_command(now, command, io),
            Command::SnapshotGroup { volumes, name, answer } => self.begin_group(now, volumes, &name, answer, io),
            Command::Drain { devices, answer } => {
                self.drain(now, devices, io);
                tell(&answer, ());
            }
            Command::Weak { node, answer } => tell(&answer, self.weak_volumes(node)),
            Command::Losses { nodes, answer } => tell(&answer, self.losses(&nodes)),
            Command::Fixed { answer } => tell(&answer, self.volumes.fixed.clone()),
            Command::SetFixed { id, fixed, answer } => {
                self.set_fixed(now, id, fixed, io);
                tell(&answer, ());
            }
            Command::Claims { beside, answer } => tell(&answer, self.volumes.claims_beside(beside)),
            Command::LeftToDrain { answer } => tell(&answer, self.left_to_drain()),
            Command::Nodes { nodes, answer } => {
                self.links.set_nodes(&nodes, now, io);
                self.look_who_is_near(now, &nodes, io);
                tell(&answer, ());
            }
            Command::Address { ip, answer } => tell(&answer, self.take_address(ip, io)),
            Command::Offers { offers, hosts, answer } => {
                self.set_offers(now, offers, &hosts, io);
                tell(&answer, ());
            }
            Command::Access { lists, limits, answer } => {
                self.set_access(now, lists, io);
                self.set_limits(now, limits, io);
                tell(&answer, ());
            }
            Command::CutRevoked { answer } => {
                self.cut_revoked(now, io);
                tell(&answer, ());
            }
            Command::Prepare { name, answer } => self.prepare(now, &name, answer, io),
            Command::AskToYield { host, volume, answer } => self.ask_host(&host, volume, answer),
            Command::Through { volume, answer } => tell(&answer, self.portals.sessions(volume)),
            Command::Uris { name, answer } => tell(&answer, self.volumes.uris(&name)),
            Command::Cut { node, cut, answer } => tell(&answer, self.links.set_cut(now, node, cut, io)),
            Command::Call { node, request, answer } => self.call(node, &request, answer, io),
        }
    }

    fn keep_spare(&mut self, now: Instant, keep: bool, io: &mut Io) {
        if std::mem::replace(&mut self.volumes.keeps_spare, keep) == keep {
            return;
        }
        for at in self.volumes.tokens() {
            self.drive(now, at, VolumeEvent::KeepSpare(keep), io);
        }
    }

    fn drain(&mut self, now: Instant, devices: BTreeSet<DeviceId>, io: &mut Io) {
        self.draining = devices.clone();
        for at in self.volumes.tokens() {
            self.drive(now, at, VolumeEvent::Drain { devices: devices.clone() }, io);
        }
    }

    fn set_fixed(&mut self, now: Instant, id: VolumeId, fixed: Option<FixedVolume>, io: &mut Io) {
        let before = self.volumes.fixed.remove(&id);
        let after = fixed.map(|fixed| before.map_or(fixed, |before| fixed.after(&before)));
        self.volumes.fixed.extend(after.map(|fixed| (id, fixed)));
        self.tell_claims(now, io);
    }

    fn call(&mut self, node: NodeId, request: &Request, answer: SyncSender<Option<Reply>>, io: &mut Io) {
        if self.waiters.calls.is_full() {
            return tell(&answer, None);
        }
        let ticket = self.waiters.calls.insert(answer);
        if !self.links.call(node, ticket.0, request, io) {
            self.waiters.on_node_answer(ticket.0, None);
        }
    }

    fn set_receiver(&mut self, name: &str, ticket: Option<String>, io: &mut Io) -> bool {
        let Some((at, HeadId::VOLUME)) = self.volumes.find_open(name) else { return false };
        match self.volumes.table.get_mut(at).filter(|volume| !volume.exported) {
            Some(volume) => volume.receiver = ticket,
            None => return false,
        }
        for session in self.clients.of_volume(at) {
            self.abort_client(session, io);
        }
        true
    }

    /// `begin` is told to a controller that has not begun to open.
    pub(super) fn open_if_closed(
        &mut self,
        now: Instant,
        spec: OpenSpec,
        (exported, begin): (bool, VolumeEvent),
        io: &mut Io,
    ) {
        if self.is_stopping() {
            return;
        }
        if let Some((at, _)) = self.volumes.find_open(&spec.name) {
            let is_over = |v: &Volume| matches!(v.controller.state(), State::Deposed | State::Closed);
            let of_use = |v: &&mut Volume| !is_over(v) && !v.is_in_the_way_of(&spec);
            if let Some(volume) = self.volumes.table.get_mut(at).filter(of_use) {
                volume.exported |= exported;
                self.locals_changed.push(spec.volume);
                return self.drive(now, at, begin, io);
            }
            self.on_volume_closed(now, at, io);
        }
        // Under the name that it had before, or in the trash, nobody uses it.
        let is_former = |at: &Token| self.volumes.table.get(*at).is_some_and(|v| !v.exported && v.name != spec.name);
        if let Some(at) = self.volumes.find_id(spec.volume).filter(is_former) {
            self.on_volume_closed(now, at, io);
        }
        if !self.volumes.table.is_full() {
            self.open_volume(now, spec, (exported, begin), io);
        }
    }

    fn close(
        &mut self,
        now: Instant,
        name: &str,
        (force, discard): (bool, bool),
        answer: Answer<CloseOutcome>,
        io: &mut Io,
    ) {
        let found = self.volumes.find_open(name).and_then(|(at, _)| Some((at, self.volumes.table.get(at)?)));
        let Some((at, volume)) = found else { return tell(&answer, CloseOutcome::NotOpen) };
        if volume.sessions() > 0 && !force {
            return tell(&answer, CloseOutcome::InUse(volume.sessions()));
        }
        let is_over = matches!(volume.controller.state(), State::Deposed | State::Closed);
        self.let_sessions_go(at, io);
        self.waiters.closes.push((at, answer));
        if discard || is_over {
            self.on_volume_closed(now, at, io);
        } else {
            self.drain_layers(now, at, io);
            self.drive(now, at, VolumeEvent::Close, io);
        }
    }

    fn let_go(&mut self, now: Instant, volume: VolumeId, io: &mut Io) {
        while let Some(at) = self.volumes.find_id(volume) {
            self.let_sessions_go(at, io);
            self.on_volume_closed(now, at, io);
        }
    }

    fn resize(
        &mut self,
        now: Instant,
        name: &str,
        (size_bytes, force): (u64, bool),
        answer: Answer<ResizeOutcome>,
        io: &mut Io,
    ) {
        let found = self.volumes.find_open(name);
        let found = found.and_then(|(at, head)| Some((at, head, self.volumes.table.get(at)?.size_bytes(head))));
        let Some((at, head, now_bytes)) = found else { return tell(&answer, ResizeOutcome::NotOpen) };
        if now_bytes == size_bytes {
            return tell(&answer, ResizeOutcome::Done);
        }
        if size_bytes < now_bytes && !force && self.users_of(at, head, Target::Head(head)) > 0 {
            return tell(&answer, ResizeOutcome::InUse);
        }
        self.waiters.resizes.push((at, size_bytes, answer));
        self.drive(now, at, VolumeEvent::Resize { size_bytes }, io);
    }

    fn change(&mut self, now: Instant, volume: &str, wanted: Wanted, answer: Answer<ChangeOutcome>, io: &mut Io) {
        let found = self.volumes.find_open(volume);
        let found =
            found.filter(|(at, _)| self.volumes.table.get(*at).is_some_and(|v| v.controller.state() == State::Open));
        let Some((at, head)) = found else { return tell(&answer, ChangeOutcome::NotOpen) };
        if matches!(wanted, Wanted::DropClone { force: true }) {
            for session in self.clients.of_head(at, head) {
                self.abort_client(session, io);
            }
            self.cut_guests_of(at, head);
        }
        match self.change_for(at, head, wanted) {
            Ok(change) => {
                if matches!(change, Change::DropClone { .. }) {
                    self.drain_layers_of(now, at, head, io);
                }
                self.waiters.changes.push((at, change.clone(), answer));
                self.drive(now, at, VolumeEvent::Change(change), io);
            }
            Err(outcome) => tell(&answer, outcome),
        }
    }

    /// What the controller is asked for, or why not.
    fn change_for(&self, at: Token, head: HeadId, wanted: Wanted) -> Result<Change, ChangeOutcome> {
        let volume = self.volumes.table.get(at).expect("a volume in service");
        let unused = |clients: usize| if clients > 0 { Err(ChangeOutcome::InUse(clients)) } else { Ok(()) };
        match wanted {
            Wanted::Snapshot { name } => {
                let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                Ok(Change::Snapshot { head, name, created_ms: since_1970.as_millis() as u64 })
            }
            Wanted::DropSnapshot { name } => {
                let found = volume.snapshot(head, &name);
                unused(found.map_or(0, |(layer, _)| self.users_of(at, head, Target::Snapshot(layer))))?;
                Ok(Change::DropSnapshot { head, name })
            }
            Wanted::Rollback { snapshot } => {
                unused(self.users_of(at, head, Target::Head(head)))?;
                volume.check_layers_are_clear(head)?;
                Ok(Change::Rollback { head, name: snapshot })
            }
            Wanted::Clone { snapshot, id, name, size_bytes } => {
                let found = volume.snapshot(head, &snapshot);
                let (of, found) = found.ok_or(ChangeOutcome::Refused("the volume has no snapshot of that name"))?;
                Ok(Change::Clone { of, id, name, size_bytes: size_bytes.unwrap_or(found.size_bytes) })
            }
            Wanted::DropClone { .. } => {
                unused(self.clients.of_head(at, head).len() + self.guests_of(at, head, None))?;
                Ok(Change::DropClone { head })
            }
            Wanted::ResizeClone { size_bytes, force } => {
                if size_bytes < volume.size_bytes(head) && !force {
                    unused(self.users_of(at, head, Target::Head(head)))?;
                }
                Ok(Change::ResizeClone { head, size_bytes })
            }
        }
    }

    /// Clients here and at other hosts' portals.
    fn users_of(&self, at: Token, head: HeadId, target: Target) -> usize {
        self.clients.of_target(at, target) + self.guests_of(at, head, Some(target))
    }

    /// The same by their names; of those at other hosts it is known how many they are.
    fn users(&self, name: &str) -> Vec<String> {
        let Some((at, head)) = self.volumes.find_open(name) else { return Vec::new() };
        let mut names = self.clients.names_of(at, Target::Head(head));
        match self.guests_of(at, head, Some(Target::Head(head))) {
            0 => {}
            1 => names.push("one at another host".to_string()),
            count => names.push(format!("{count} at other hosts")),
        }
        names
    }

    fn left_to_drain(&self) -> BTreeMap<DeviceId, u64> {
        let mut left: BTreeMap<DeviceId, u64> = self.draining.iter().map(|device| (*device, 0)).collect();
        for (_, volume) in self.volumes.table.iter() {
            for (device, count) in volume.controller.left_to_drain() {
                *left.entry(device).or_default() += count;
            }
        }
        left
    }

    fn weak_volumes(&self, node: NodeId) -> Vec<Weakness> {
        let weakness = |volume: &super::volumes::Volume| {
            let (segments, entries) = volume.controller.weak_apart_from(node);
            let unknown = matches!(volume.controller.state(), State::Opening | State::Closing);
            Weakness { volume: volume.name.clone(), unknown, segments, entries }
        };
        let all = self.volumes.table.iter().map(|(_, volume)| weakness(volume));
        all.filter(|w| w.unknown || w.segments + w.entries > 0).collect()
    }

    fn losses(&self, nodes: &BTreeSet<NodeId>) -> Vec<Weakness> {
        let loss = |volume: &super::volumes::Volume| {
            let segments = volume.controller.lost_without(nodes);
            let unknown = matches!(volume.controller.state(), State::Opening | State::Closing);
            Weakness { volume: volume.name.clone(), unknown, segments, entries: 0 }
        };
        self.volumes.table.iter().map(|(_, volume)| loss(volume)).filter(|w| w.unknown || w.segments > 0).collect()
    }

    /// Devices that volumes find slow: since when, and whether one does without them.
    fn slow_devices(&self) -> BTreeMap<DeviceId, (Instant, bool)> {
        let mut slow = BTreeMap::new();
        for (device, since, bypassed) in self.volumes.table.iter().flat_map(|(_, v)| v.controller.slow_devices()) {
            let (first, any) = slow.entry(device).or_insert((since, false));
            (*first, *any) = (since.min(*first), *any | bypassed);
        }
        slow
    }

    fn live_status(&self, now: Instant) -> LiveStatus {
        let (left, slow) = (self.left_to_drain(), self.slow_devices());
        let mut suspects: Vec<u32> = Vec::new();
        let volumes = self.volumes.infos();
        for volume in &volumes {
            suspects.extend(volume.live.iter().flat_map(|l| &l.suspect_nodes));
        }
        let nodes = self.links.views().map(|link| {
            let state = match (link.up, link.polls_missed) {
                (false, _) => LinkState::Down,
                (true, 0 | 1) => LinkState::Up,
                (true, _) => LinkState::Silent,
            };
            NodeInfo {
                id: link.node.0,
                address: link.address.to_string(),
                link: state,
                suspect: suspects.contains(&link.node.0),
                cut: link.cut,
                silent_ms: now.since(link.last_heard).as_millis() as u64,
                trouble: link.trouble.filter(|_| !link.up).map(str::to_string),
                wire: link.version,
                devices: link
                    .devices
                    .iter()
                    .map(|stat| {
                        let slow = slow.get(&stat.device).map(|(since, bypassed)| (now.since(*since), *bypassed));
                        let drive = link.drives.iter().find(|(device, _)| *device == stat.device);
                        let drive = drive.map(|(_, report)| report.clone());
                        let trouble = link.troubles.iter().find(|trouble| trouble.device == stat.device);
                        let info = self.device_info(stat, drive, left.get(&stat.device).copied(), slow);
                        with_trouble(info, trouble)
                    })
                    .collect(),
                machine: None,
                machine_gone: false,
                configured: Vec::new(),
            }
        });
        LiveStatus { uptime: now.since(self.started), nodes: nodes.collect(), volumes }
    }

    fn device_info(
        &self,
        stat: &DeviceStat,
        drive: Option<DriveReport>,
        left: Option<u64>,
        slow: Option<(Duration, bool)>,
    ) -> DeviceInfo {
        let told = |times: OpTimes| (times.samples > 0).then_some(times.p99_us);
        let (reserve_bytes, spare_bytes) = self.volumes.reserve_and_spare_bytes(stat.capacity_bytes);
        let reserve_bytes = reserve_bytes.min(stat.free_bytes);
        DeviceInfo {
            device: stat.device.to_string(),
            health: resources::device_health(stat.health),
            capacity_bytes: stat.capacity_bytes,
            free_bytes: stat.free_bytes,
            reserve_bytes,
            spare_bytes: spare_bytes.min(stat.free_bytes - reserve_bytes),
            journal_bytes: stat.journal_bytes,
            journal_used_bytes: stat.journal_used_bytes,
            shards: stat.shard_count,
            class: stat.media,
            class_set: stat.media_is_set,
            read_cache: stat.read_cache.map(resources::read_cache),
            drive,
            draining: left.is_some(),
            left,
            read_p99_us: told(stat.reads),
            write_p99_us: told(stat.writes),
            io_errors: stat.io_errors,
            flush_us: (stat.flush_us > 0).then_some(stat.flush_us),
            slow_s: slow.map(|(span, _)| span.as_secs()),
            bypassed: slow.is_some_and(|(_, bypassed)| bypassed),
            errors_within_s: None,
            retries: 0,
            outage: None,
        }
    }
}

fn with_trouble(info: DeviceInfo, trouble: Option<&DeviceTrouble>) -> DeviceInfo {
    let Some(trouble) = trouble else { return info };
    DeviceInfo {
        errors_within_s: trouble.last_error_ms.map(|ms| ms / 1000),
        retries: trouble.retries,
        outage: trouble.outage.as_ref().filter(|_| info.health == DeviceHealth::Failed).map(|outage| OutageInfo {
            seconds: outage.ms / 1000,
            why: outage.why.clone(),
            missing: outage.is_missing,
            tried: outage.is_tried,
        }),
        ..info
    }
}
