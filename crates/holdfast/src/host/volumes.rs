//! The volumes that this host has open: their controllers, and who asked what.
//!
//! Role: keeps the table. The host drives the controllers, since their effects touch links, sessions and metadata.
//!
//! Limits: [`VOLUMES_MAX`] open volumes, [`SESSIONS_MAX`] clients of each with its clones, so that requests stay below what a
//! controller takes.

use super::access::Lists;
use super::fixed::FixedVolume;
use super::limits::{Kept, Limits};
use super::writers::{HeldChange, REFUSED_SHOWN};
use crate::logger;
use crate::nbd_uri::Place;
use crate::resources;
use crate::size::Size;
use holdfast_api::{Integrity, Provisioning, SnapshotInfo, VolumeInfo, VolumeLive, VolumeState};
use holdfast_base::Instant;
use holdfast_base::time::earliest;
use holdfast_base::{
    BlockOp, Epoch, ExportInfo, GridId, HeadId, InstanceId, ObjectId, RequestToken, Slab, Token, VolumeId,
};
use holdfast_cipher::VolumeKey;
use holdfast_format::geometry::Layout;
use holdfast_frontend::nbd::Exports;
use holdfast_layer::Stack;
use holdfast_portal::Writers;
use holdfast_runtime::clock;
use holdfast_volume::controller::REQUESTS_MAX;
use holdfast_volume::{Claim, Config, Controller, Sharing, Snapshot, State};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

pub const VOLUMES_MAX: usize = 4096;

/// Clients of one volume and its clones at a time.
pub const SESSIONS_MAX: usize = 256;

/// Smallest share of the write-back budget and of the map cache: below, a volume could not keep a segment in the
/// making.
const WRITEBACK_SHARE_MIN: u64 = 16 << 20;
const MAP_CACHE_SHARE_MIN: u64 = 4 << 20;
/// What one volume gets of the memory for reading ahead: a window that holds several blocks of most segments.
const READ_AHEAD_SHARE_MAX: u64 = 32 << 20;

/// How long a volume may take to open before the log says why it does not.
const WAIT_TOLD_AFTER: Duration = Duration::from_secs(2);

/// Who waits for an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Who {
    /// A client of this host: its session.
    Client(Token),
    /// A portal elsewhere: the desk's name for the request.
    Guest(Token),
    /// The layers before this head of the volume.
    Layers(HeadId),
}

/// Where a request came from, and its name there.
#[derive(Clone, Debug)]
pub struct Asker {
    pub who: Who,
    pub token: RequestToken,
    /// What a client of this host asked: where its volume turns out to be served elsewhere it is asked there.
    pub op: Option<BlockOp>,
    /// The earliest that the client may have sent it.
    pub since: Instant,
    /// What of the volume it is to change.
    pub changes: Option<HeadId>,
}

/// Who may ask when what was asked before is done: a client that was cut off with a write under way may be back, and what it
/// then writes must come after that.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Behind {
    Client(Token),
    /// Of the portal.
    Session(Token),
    /// Of a portal elsewhere, and the export.
    Guest(Token, String),
}

/// What is needed to open a volume, from its root record.
#[derive(Clone, Debug)]
pub struct OpenSpec {
    pub volume: VolumeId,
    pub name: String,
    pub size_bytes: u64,
    pub layout: Layout,
    pub checked_reads: bool,
    /// It is not opened if others have had it since: see [`Config::only_from`].
    pub only_from: Option<Epoch>,
    /// Of an encrypted one.
    pub key: Option<VolumeKey>,
}

impl OpenSpec {
    /// Whether an opening that was begun by the other is what this one asks for. Size and layout it reads itself.
    fn asks_for_same(&self, other: &OpenSpec) -> bool {
        let key_of = |spec: &OpenSpec| spec.key.as_ref().map(VolumeKey::id);
        let of = |spec: &OpenSpec| (spec.volume, spec.checked_reads, spec.only_from, key_of(spec));
        of(self) == of(other)
    }
}

/// Why a volume is not open yet.
#[derive(Clone, Copy, Debug)]
pub struct Wait {
    pub why: &'static str,
    /// It is in the log.
    pub told: bool,
}

pub struct Volume {
    pub id: VolumeId,
    pub name: String,
    pub controller: Controller,
    /// Clients may use it; otherwise it is open for care.
    pub exported: bool,
    /// It takes in a stream, from the client that knows this.
    pub receiver: Option<String>,
    /// Before heads that have any: what is asked of them goes by these.
    pub(super) layers: Vec<(HeadId, Stack)>,
    /// Which of them are limits that the records tell of, and heads without one.
    pub(super) kept: BTreeMap<HeadId, Kept>,
    /// Who may write to which head, and what waits for that.
    pub(super) writers: BTreeMap<HeadId, Writers>,
    pub(super) held: Slab<HeldChange>,
    /// Everybody may.
    pub(super) shared: bool,
    askers: Slab<(u64, Asker)>,
    /// Requests are numbered as they come; those that are under way.
    next_number: u64,
    under_way: BTreeSet<u64>,
    /// Who waits for all below a number.
    behind: Vec<(u64, Behind)>,
    /// By head; clients of snapshots count, too.
    sessions: BTreeMap<HeadId, usize>,
    pub waits: Option<Wait>,
    pub deadline: Option<Instant>,
    opened_at: Instant,
    opened_by: OpenSpec,
    /// What it knows that others own.
    pub told_claims: Vec<Claim>,
    /// Another host has it, and clients have had time to hear of it.
    pub was_deposed: bool,
}

/// What all volumes of a host share.
#[derive(Clone, Debug)]
pub struct Budget {
    pub writeback_bytes: u64,
    pub map_cache_bytes: u64,
    pub read_ahead_bytes: u64,
}

/// How volumes are looked after.
#[derive(Clone, Copy, Debug)]
pub struct Care {
    /// What a node that is away for longer held is made again elsewhere.
    pub rebuild_after: Duration,
    /// Every shard is read and checked once in this time.
    pub scrub_every: Duration,
}

pub struct Volumes {
    pub table: Slab<Volume>,
    /// Also those that are not open.
    pub fixed: BTreeMap<VolumeId, FixedVolume>,
    /// Which clients may have what.
    pub access: Lists,
    /// How much clients may have of it.
    pub limits: Limits,
    /// Volumes that several clients may write to at a time.
    pub shared: BTreeSet<VolumeId>,
    /// Guests' writes leave the spare free, too; until it is known that every host here takes it.
    pub keeps_spare: bool,
    by_name: BTreeMap<String, (Token, HeadId)>,
    grid: GridId,
    host: String,
    budget: Budget,
    care: Care,
    /// Volumes that the budget is divided by: all exported ones, as far as known.
    expected: usize,
    /// Where clients connect.
    served_at: Vec<Place>,
}

impl Volumes {
    pub fn new(
        grid: GridId,
        host: &str,
        (budget, care): (Budget, Care),
        (fixed, access, limits): (BTreeMap<VolumeId, FixedVolume>, Lists, Limits),
        expected: usize,
        served_at: Vec<Place>,
    ) -> Volumes {
        Volumes {
            table: Slab::new(VOLUMES_MAX),
            fixed,
            access,
            limits,
            shared: BTreeSet::new(),
            keeps_spare: true,
            by_name: BTreeMap::new(),
            grid,
            host: host.to_string(),
            budget,
            care,
            expected,
            served_at,
        }
    }

    /// The volume in service that has the name, or a clone of that name.
    pub fn find_open(&self, name: &str) -> Option<(Token, HeadId)> {
        self.by_name.get(name).copied()
    }

    /// The id of the volume or clone of that name, where it is open.
    pub fn export_id(&self, name: &str) -> Option<VolumeId> {
        let (at, head) = self.find_open(name)?;
        self.table.get(at)?.id_of(head)
    }

    /// All volumes in service, and the clones in them.
    pub fn heads(&self) -> Vec<(Token, HeadId)> {
        self.by_name.values().copied().collect()
    }

    /// The open volume of that id.
    pub fn find_id(&self, volume: VolumeId) -> Option<Token> {
        self.table.iter().find(|(_, v)| v.id == volume).map(|(at, _)| at)
    }

    pub fn uris(&self, name: &str) -> Vec<String> {
        self.served_at.iter().map(|place| place.uri(name)).collect()
    }

    /// Puts a fresh controller into the table; the caller tells it about the nodes and opens it.
    pub fn insert(&mut self, now: Instant, spec: OpenSpec, exported: bool) -> Token {
        let random = uuid::Uuid::new_v4().as_u128();
        let mut config = Config::new(self.grid, spec.volume, &self.host, InstanceId(random), random as u64);
        // A controller's bounds are fixed when it opens, so the budget is divided by what is expected to be open.
        let shares = self.expected.max(self.table.len() + 1) as u64;
        config.writeback_bytes_max = (self.budget.writeback_bytes / shares).max(WRITEBACK_SHARE_MIN);
        config.map_cache_bytes_max = (self.budget.map_cache_bytes / shares).max(MAP_CACHE_SHARE_MIN);
        config.read_ahead_bytes_max = (self.budget.read_ahead_bytes / shares).min(READ_AHEAD_SHARE_MAX);
        config.checked_reads = spec.checked_reads;
        config.keeps_spare = self.keeps_spare;
        config.key = spec.key.clone();
        // Who shall have it the records say.
        config.takeover = false;
        config.only_from = spec.only_from;
        config.rebuild_after = self.care.rebuild_after;
        config.scrub_every = self.care.scrub_every;
        let token = self.table.insert(Volume {
            id: spec.volume,
            name: spec.name.clone(),
            controller: Controller::new(config),
            exported,
            receiver: None,
            layers: Vec::new(),
            kept: BTreeMap::new(),
            writers: BTreeMap::new(),
            held: Slab::new(REQUESTS_MAX),
            shared: self.shared.contains(&spec.volume),
            askers: Slab::new(REQUESTS_MAX),
            next_number: 0,
            under_way: BTreeSet::new(),
            behind: Vec::new(),
            sessions: BTreeMap::new(),
            waits: None,
            deadline: None,
            opened_at: now,
            opened_by: spec.clone(),
            told_claims: Vec::new(),
            was_deposed: false,
        });
        self.by_name.insert(spec.name, (token, HeadId::VOLUME));
        token
    }

    pub fn remove(&mut self, at: Token) -> Option<Volume> {
        let volume = self.table.remove(at)?;
        self.by_name.retain(|_, (of, _)| *of != at);
        Some(volume)
    }

    /// The clones of a volume are what its controller says.
    pub fn refresh_clones(&mut self, at: Token) {
        self.by_name.retain(|_, (of, head)| *of != at || *head == HeadId::VOLUME);
        let Some(volume) = self.table.get_mut(at) else { return };
        let mut there = BTreeSet::from([HeadId::VOLUME]);
        for (head, clone) in volume.controller.clones() {
            there.insert(head);
            // One whose making or deleting was cut short may bear the name of another.
            self.by_name.entry(clone.name.clone()).or_insert((at, head));
        }
        // Layers before a clone that is gone follow it, when they hold nothing.
        volume.layers.retain(|(head, stack)| there.contains(head) || stack.in_flight() > 0);
        volume.kept.retain(|head, _| there.contains(head));
        volume.writers.retain(|head, writers| there.contains(head) || !writers.is_idle());
    }

    /// What guests' data leaves free of a device, and what is not promised to it besides.
    pub fn reserve_and_spare_bytes(&self, capacity_bytes: u64) -> (u64, u64) {
        let mut config = Config::new(self.grid, VolumeId(0), &self.host, InstanceId(0), 0);
        config.keeps_spare = self.keeps_spare;
        (holdfast_volume::reserve_bytes(&config, capacity_bytes), holdfast_volume::spare_bytes(&config, capacity_bytes))
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        self.table.iter().filter_map(|(_, v)| v.deadline).min()
    }

    pub fn infos(&self) -> Vec<VolumeInfo> {
        self.by_name.iter().filter_map(|(name, (at, head))| self.info(name, *at, *head)).collect()
    }

    /// What is told of a volume that is open, or a clone in it.
    pub fn info(&self, name: &str, at: Token, head: HeadId) -> Option<VolumeInfo> {
        let volume = self.table.get(at)?;
        let mut info = volume.info(name, head, |export| self.uris(export));
        info.host = volume.exported.then(|| self.host.clone());
        let id = volume.id_of(head);
        info.only_for = id.and_then(|id| self.access.get(&id)).cloned();
        info.limit = id.and_then(|id| self.limits.get(&id)).cloned();
        if let Some(fixed) = self.fixed.get(&volume.id).filter(|_| head == HeadId::VOLUME) {
            info.provisioning = Provisioning::Fixed;
            info.set_aside_bytes = fixed.set_aside_bytes();
        }
        Some(info)
    }

    pub fn tokens(&self) -> Vec<Token> {
        self.table.tokens()
    }
}

impl Volume {
    /// Whether it is of no use for this opening: it is another volume of the name, or reads beforehand for another one.
    pub(super) fn is_in_the_way_of(&self, spec: &OpenSpec) -> bool {
        self.id != spec.volume || self.controller.is_warming() && !spec.asks_for_same(&self.opened_by)
    }

    /// Since it was opened, or begun to be read beforehand.
    pub(super) fn open_for(&self, now: Instant) -> Duration {
        now.since(self.opened_at)
    }

    /// Somebody asks; gives the name for the request, or the asker where more is under way than a controller takes.
    pub fn ask(&mut self, asker: Asker) -> Result<RequestToken, Asker> {
        if self.askers.is_full() || !self.layers.is_empty() && !self.has_room_beside_layers(2) {
            return Err(asker);
        }
        Ok(self.note_asker(asker))
    }

    /// For one whom room is kept for.
    pub(super) fn note_asker(&mut self, asker: Asker) -> RequestToken {
        self.under_way.insert(self.next_number);
        let token = self.askers.insert((self.next_number, asker));
        self.next_number += 1;
        RequestToken(token.0)
    }

    /// Whether so many more requests may come, beside those that layers may make of what they have.
    pub(super) fn has_room_beside_layers(&self, count: usize) -> bool {
        let kept: usize = self.layers.iter().map(|(_, stack)| stack.may_still_ask()).sum();
        self.askers.len() + kept + count <= REQUESTS_MAX
    }

    /// When the controller or a layer wants to be called again.
    pub fn next_deadline(&self) -> Option<Instant> {
        let layers = self.layers.iter().map(|(_, stack)| stack.next_deadline());
        let writers = self.writers.values().map(Writers::next_deadline);
        layers.chain(writers).fold(self.controller.next_deadline(), earliest)
    }

    /// A request is answered: who asked, and who may ask now.
    pub fn answered(&mut self, request: RequestToken) -> Option<(Asker, Vec<Behind>)> {
        let (number, asker) = self.askers.remove(Token(request.0))?;
        self.under_way.remove(&number);
        if self.behind.is_empty() {
            return Some((asker, Vec::new()));
        }
        let first = self.under_way.first().copied().unwrap_or(u64::MAX);
        let clear = self.behind.extract_if(.., |(upto, _)| *upto <= first).map(|(_, who)| who).collect();
        Some((asker, clear))
    }

    /// Whether anything is under way; then whoever it is waits for that.
    pub fn comes_behind(&mut self, who: Behind) -> bool {
        if self.under_way.is_empty() {
            return false;
        }
        self.behind.push((self.next_number, who));
        true
    }

    /// The controller is gone: what it was asked and has not answered, and who waited for that.
    pub fn give_up(&mut self) -> (Vec<RequestToken>, Vec<Behind>) {
        // What layers hold has its askers here, as all has.
        self.layers.clear();
        self.kept.clear();
        let behind = std::mem::take(&mut self.behind).into_iter().map(|(_, who)| who).collect();
        (self.askers.tokens().into_iter().map(|token| RequestToken(token.0)).collect(), behind)
    }

    /// Of the volume, or of a clone in it.
    pub(super) fn id_of(&self, head: HeadId) -> Option<VolumeId> {
        if head == HeadId::VOLUME {
            return Some(self.id);
        }
        self.controller.clones().find(|(of, _)| *of == head).map(|(_, clone)| clone.id)
    }

    /// Of the volume, or of a clone in it.
    pub(super) fn name_of(&self, head: HeadId) -> String {
        let clone = self.controller.clones().find(|(of, _)| *of == head).map(|(_, clone)| clone.name.clone());
        clone.unwrap_or_else(|| self.name.clone())
    }

    pub fn layout(&self) -> Layout {
        self.controller.layout().unwrap_or(self.opened_by.layout)
    }

    pub fn size_bytes(&self, head: HeadId) -> u64 {
        let clone = self.controller.clones().find(|(of, _)| *of == head).map(|(_, clone)| clone.size_bytes);
        clone.unwrap_or_else(|| self.controller.size_bytes().unwrap_or(self.opened_by.size_bytes))
    }

    /// Clients of the volume, its clones, and snapshots of both.
    pub fn sessions(&self) -> usize {
        self.sessions.values().sum()
    }

    pub fn sessions_of(&self, head: HeadId) -> usize {
        self.sessions.get(&head).copied().unwrap_or(0)
    }

    pub fn add_session(&mut self, head: HeadId) {
        *self.sessions.entry(head).or_default() += 1;
    }

    pub fn remove_session(&mut self, head: HeadId) {
        *self.sessions.get_mut(&head).expect("it was counted") -= 1;
    }

    pub fn export(&self, name: &str, head: HeadId) -> ExportInfo {
        let size_bytes = self.size_bytes(head);
        let what = if head == HeadId::VOLUME { "volume" } else { "clone" };
        ExportInfo {
            name: name.to_string(),
            description: format!("Holdfast {what}, {}, {}", Size(size_bytes), self.layout()),
            size_bytes,
            read_only: false,
        }
    }

    /// Whether clients may come: while it opens their requests wait.
    pub fn serves(&self) -> bool {
        self.exported && matches!(self.controller.state(), State::Opening | State::Open)
    }

    /// Whether this client may come.
    pub fn admits(&self, ticket: Option<&str>) -> bool {
        match ticket {
            None => self.serves(),
            ticket => self.receiver.as_deref() == ticket && self.controller.state() == State::Open,
        }
    }

    /// At the second look after another host has taken it over: what was asked has been answered by then.
    pub fn is_to_be_dropped(&mut self) -> bool {
        let is_deposed = self.controller.state() == State::Deposed;
        is_deposed && std::mem::replace(&mut self.was_deposed, is_deposed)
    }

    /// Logs, once, that the volume has not come up within a reasonable time, and why.
    pub fn tell_waiting(&mut self, now: Instant) {
        let is_late = self.open_for(now) >= WAIT_TOLD_AFTER && self.controller.state() == State::Opening;
        if let Some(wait) = self.waits.as_mut().filter(|w| is_late && !w.told) {
            wait.told = true;
            logger::warn(format_args!("volume {} can't be opened yet: {}", self.name, wait.why));
        }
    }

    fn snapshot_info(
        of: &str,
        (layer, snapshot): (ObjectId, Snapshot),
        sharing: Option<&Sharing>,
        uris_of: &impl Fn(&str) -> Vec<String>,
    ) -> SnapshotInfo {
        SnapshotInfo {
            layer: layer.0,
            shares: sharing.and_then(|s| s.snapshots.get(&layer)).map(|s| resources::shares(*s)),
            uris: uris_of(&export_of(of, &snapshot.name)),
            name: snapshot.name,
            created_ms: snapshot.created_ms,
            size_bytes: snapshot.size_bytes,
        }
    }

    pub fn snapshot(&self, head: HeadId, name: &str) -> Option<(ObjectId, &Snapshot)> {
        self.controller.snapshots().find(|(_, s)| s.head == head && s.name == name)
    }

    /// A snapshot of the volume or clone `of`: its layer, and what clients are told of it.
    pub fn snapshot_export(&self, of: &str, head: HeadId, name: &str) -> Option<(ObjectId, ExportInfo)> {
        let (layer, snapshot) = self.snapshot(head, name)?;
        let export = ExportInfo {
            name: export_of(of, name),
            description: format!("Holdfast snapshot, {}", Size(snapshot.size_bytes)),
            size_bytes: snapshot.size_bytes,
            read_only: true,
        };
        Some((layer, export))
    }

    /// `uris_of` tells where clients find an export.
    fn info(&self, name: &str, head: HeadId, uris_of: impl Fn(&str) -> Vec<String>) -> VolumeInfo {
        let status = self.controller.status();
        let is_open = matches!(status.state, State::Open | State::Closing);
        let clone = status.clones.iter().find(|(of, _)| *of == head).map(|(_, clone)| clone.id);
        let snapshots = status.snapshots.into_iter().filter(|(_, s)| s.head == head);
        let sharing = status.sharing.as_deref();
        let writers = self.writers.get(&head).map(Writers::view).unwrap_or_default();
        let now = clock::now();
        VolumeInfo {
            name: name.to_string(),
            id: clone.unwrap_or(self.id).to_string(),
            clone_of: clone.map(|_| self.name.clone()),
            size_bytes: self.size_bytes(head),
            layout: self.layout().to_string(),
            tiers: status.tiers,
            provisioning: Provisioning::Thin,
            set_aside_bytes: 0,
            integrity: integrity_of(self.controller.checks_reads()),
            encrypted: self.controller.is_encrypted(),
            exported: self.exported,
            protected: false,
            shared: self.shared,
            writer: writers.holder,
            refused_writer: writers.refused.filter(|(_, at)| now.since(*at) < REFUSED_SHOWN).map(|(client, _)| client),
            shares_with: None,
            needed_by: Vec::new(),
            host: None,
            orphaned: false,
            failover: false,
            portals: Vec::new(),
            only_for: None,
            limit: None,
            state: match self.exported || status.state == State::Deposed {
                true => state_of(status.state),
                false if self.controller.is_warming() => VolumeState::Warming,
                false => VolumeState::InCare,
            },
            waits: self.waits.filter(|_| status.state == State::Opening).map(|w| w.why.to_string()),
            warning: None,
            epoch: status.epoch.0,
            uris: if self.exported { uris_of(name) } else { Vec::new() },
            sessions: self.sessions_of(head),
            layers: self.layers_info(head),
            live: is_open.then(|| VolumeLive {
                log_bytes: status.log_bytes,
                unplaced_bytes: self.controller.unplaced_bytes(),
                mapped_bytes: status.mapped_blocks * holdfast_base::BLOCK_BYTES as u64,
                segments: status.segment_count,
                degraded_segments: status.degraded_segments,
                at_risk_entries: status.at_risk_entries,
                recoverable: status.is_recoverable,
                suspect_nodes: status.suspect_nodes.iter().map(|n| n.0).collect(),
                left_to_drain: status.left_to_drain.iter().map(|(_, count)| count).sum(),
                left_to_balance_bytes: status.left_to_balance_bytes,
                space: resources::space(status.space),
                shares: sharing.and_then(|s| s.heads.get(&head)).map(|s| resources::shares(*s)),
                held_by_snapshots_bytes: sharing.map_or(0, |s| s.held_by_snapshots_bytes).min(status.space.data_bytes),
                layers_going: status.layers_going,
                first_tier: status.first_tier.map(resources::first_tier),
                astray_segments: status.astray_segments,
                snapshots: snapshots.map(|s| Self::snapshot_info(name, s, sharing, &uris_of)).collect(),
                counters: resources::counters(status.counters),
            }),
        }
    }
}

pub fn provisioning_of(is_fixed: bool) -> Provisioning {
    if is_fixed { Provisioning::Fixed } else { Provisioning::Thin }
}

pub fn integrity_of(checked_reads: bool) -> Integrity {
    if checked_reads { Integrity::On } else { Integrity::Off }
}

/// Of a volume that clients may have here.
pub fn state_of(state: State) -> VolumeState {
    match state {
        State::Opening => VolumeState::Opening,
        State::Open => VolumeState::Open,
        State::Deposed => VolumeState::Deposed,
        State::Closing => VolumeState::Closing,
        State::Closed => VolumeState::Closed,
    }
}

/// Between the name of a volume and that of its snapshot, in the name of an export.
const OF: char = '@';

fn export_of(volume: &str, snapshot: &str) -> String {
    format!("{volume}{OF}{snapshot}")
}

/// Between the name of a volume that takes in a stream and the ticket of who brings it, in the name of an export.
const TO: char = '!';

/// Under which a volume takes in a stream.
pub fn receiving_export(volume: &str, ticket: &str) -> String {
    format!("{volume}{TO}{ticket}")
}

/// An export's name without the ticket that may follow it, and that.
pub fn split_ticket(export: &str) -> (&str, Option<&str>) {
    export.split_once(TO).map_or((export, None), |(export, ticket)| (export, Some(ticket)))
}

/// The volume that an export's name names, and the snapshot of it.
pub fn split_export(export: &str) -> (&str, Option<&str>) {
    export.split_once(OF).map_or((export, None), |(volume, snapshot)| (volume, Some(snapshot)))
}

impl Exports for Volumes {
    fn list(&self) -> Vec<ExportInfo> {
        let named = self.by_name.iter().filter_map(|(name, (at, head))| Some((name, self.table.get(*at)?, *head)));
        let snapshots = |v: &Volume, of: &str, head: HeadId| -> Vec<ExportInfo> {
            let names = v.controller.snapshots().filter(|(_, s)| s.head == head).map(|(_, s)| &s.name);
            names.filter_map(|name| Some(v.snapshot_export(of, head, name)?.1)).collect()
        };
        let serving = named.filter(|(_, v, _)| v.serves());
        serving
            .flat_map(|(name, v, head)| std::iter::once(v.export(name, head)).chain(snapshots(v, name, head)))
            .collect()
    }

    fn find(&self, name: &str) -> Option<ExportInfo> {
        let (export, ticket) = split_ticket(name);
        let (volume_name, snapshot) = split_export(export);
        let (at, head) = self.find_open(volume_name)?;
        let volume = self.table.get(at).filter(|v| v.admits(ticket))?;
        match snapshot {
            Some(snapshot) => volume.snapshot_export(volume_name, head, snapshot).map(|(_, export)| export),
            None => Some(volume.export(name, head)),
        }
    }

    /// Of the volume or clone, also for a snapshot of it.
    fn snapshots(&self, export: &str) -> Vec<(String, ObjectId)> {
        let (name, _) = split_export(split_ticket(export).0);
        let found = self.find_open(name).and_then(|(at, head)| Some((self.table.get(at)?, head)));
        let Some((volume, head)) = found else { return Vec::new() };
        let own = volume.controller.snapshots().filter(|(_, s)| s.head == head);
        own.map(|(layer, s)| (s.name.clone(), layer)).collect()
    }
}
