//! Volumes that this host has open: their controllers, their names, and what all of them share.
//!
//! Limits: [`VOLUMES_MAX`] open volumes, [`SESSIONS_MAX`] sessions of each with its clones, so that requests stay below what
//! a controller takes.

use crate::access::Lists;
use crate::event::OpenSpec;
use crate::limits::Limits;
use crate::requests::{Origin, Requests};
use crate::reservation::ReservedVolume;
use crate::slow::Recorded;
use crate::turns::Tenant;
use crate::write_gate::HeldChange;
use crate::writers::{Writers, WritersView};
use holdfast_base::size::Size;
use holdfast_base::time::earliest;
use holdfast_base::{ExportInfo, GridId, HeadId, InstanceId, Instant, ObjectId, RequestToken, Slab, Token, VolumeId};
use holdfast_filter::Stack;
use holdfast_format::geometry::Layout;
use holdfast_stages::Spans;
use holdfast_volume::controller::REQUESTS_MAX;
use holdfast_volume::{Claim, Config, Controller, Snapshot, State};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use std::time::Duration;

pub const VOLUMES_MAX: usize = 4096;

/// Sessions of one volume and its clones at a time.
pub const SESSIONS_MAX: usize = 256;

/// Smallest share of the write-back budget and of the map cache: below, a volume could not keep a segment in the
/// making.
const WRITEBACK_SHARE_MIN: u64 = 16 << 20;
const MAP_CACHE_SHARE_MIN: u64 = 4 << 20;

/// What one volume gets of the memory for reading ahead: a window that holds several blocks of most segments.
const READ_AHEAD_SHARE_MAX: u64 = 32 << 20;

/// How long a volume may take to open before the log says why it does not.
const WAIT_TOLD_AFTER: Duration = Duration::from_secs(2);

/// Why a volume is not open yet.
#[derive(Clone, Copy, Debug)]
pub struct Wait {
    pub why: &'static str,
    /// It is in the log.
    pub(crate) told: bool,
}

impl Wait {
    pub(crate) fn new(why: &'static str) -> Wait {
        Wait { why, told: false }
    }
}

/// One open volume, with the clones in it.
pub struct Volume {
    pub(crate) id: VolumeId,
    pub(crate) name: String,
    pub(crate) controller: Controller,
    /// Clients may use it; otherwise it is open for care.
    pub(crate) exported: bool,
    /// It takes in a stream, from the client that knows this.
    pub(crate) receiver: Option<String>,
    /// Before heads that have any: what is asked of them goes by these.
    pub(crate) filters: Vec<(HeadId, Stack)>,
    /// Whose turns count together: heads, and the snapshots of all.
    pub(crate) tenants: Vec<Tenant>,
    /// Where the time of requests went.
    pub(crate) recorded: Vec<Recorded>,
    /// Of what filters asked for and was answered in this moment, in that order.
    pub(crate) below_filters: VecDeque<(HeadId, Instant, Spans)>,
    /// When answers were held back last.
    pub(crate) quiesced_at: Option<Instant>,
    /// Who may write to which head, and what waits for that.
    pub(crate) writers: BTreeMap<HeadId, Writers>,
    pub(crate) held: Slab<HeldChange>,
    /// Everybody may.
    pub(crate) shared: bool,
    pub(crate) requests: Requests,
    /// By head; sessions of snapshots count, too.
    sessions: BTreeMap<HeadId, usize>,
    pub(crate) waits: Option<Wait>,
    /// When it is looked at next by the timers of its host.
    armed_at: Option<Instant>,
    opened_at: Instant,
    opened_by: OpenSpec,
    /// What it knows that others own.
    pub(crate) told_claims: Vec<Claim>,
    /// Another host has it, and clients have had time to hear of it.
    was_deposed: bool,
    /// Its last write found no room.
    pub(crate) is_full: bool,
}

/// What all volumes of a host share.
#[derive(Clone, Copy, Debug)]
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

pub(crate) struct Volumes {
    pub table: Slab<Volume>,
    /// Also those that are not open.
    pub reservations: BTreeMap<VolumeId, ReservedVolume>,
    /// Of those here, as other reactors have heard of it last.
    pub(crate) told_reservations: BTreeMap<VolumeId, ReservedVolume>,
    /// The host's other reactors.
    pub(crate) siblings: Vec<usize>,
    /// Which clients may have what.
    pub access: Lists,
    /// How much clients may have of it.
    pub limits: Limits,
    /// How often these have changed.
    pub limits_version: u64,
    /// Volumes that several clients may write to at a time.
    pub shared: BTreeSet<VolumeId>,
    /// Clients' writes leave the spare free, too; until it is known that every host here takes it.
    pub keeps_spare: bool,
    by_name: BTreeMap<String, (Token, HeadId)>,
    /// By volume, the soonest first. One that has put its deadline off leaves its entry, which is looked at in vain: so what
    /// happens to a busy volume costs nothing here.
    timers: BinaryHeap<Reverse<(Instant, Token)>>,
    grid: GridId,
    host: String,
    budget: Budget,
    care: Care,
    /// Volumes that the budget is divided by: all exported ones, as far as known.
    expected: usize,
    /// Of the next opening; no two openings have the same.
    next_instance: u128,
    pub mutations: holdfast_volume::Mutations,
    /// Changes a controller's configuration; for simulations of small volumes.
    pub tune: fn(&mut Config),
}

impl Volumes {
    pub fn new(config: &crate::Config) -> Volumes {
        Volumes {
            table: Slab::new(VOLUMES_MAX),
            reservations: BTreeMap::new(),
            told_reservations: BTreeMap::new(),
            siblings: (0..config.reactors).filter(|other| *other != config.reactor).collect(),
            access: Lists::new(),
            limits: Limits::new(),
            limits_version: 0,
            shared: BTreeSet::new(),
            keeps_spare: true,
            by_name: BTreeMap::new(),
            timers: BinaryHeap::new(),
            grid: config.grid,
            host: config.name.clone(),
            budget: config.budget,
            care: config.care,
            expected: config.expected_volumes,
            next_instance: config.instance.0,
            mutations: config.of_controllers,
            tune: config.tune,
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
    pub fn heads(&self) -> impl Iterator<Item = (&str, Token, HeadId)> {
        self.by_name.iter().map(|(name, (at, head))| (name.as_str(), *at, *head))
    }

    /// The open volume of that id.
    pub fn find_id(&self, volume: VolumeId) -> Option<Token> {
        self.table.iter().find(|(_, v)| v.id == volume).map(|(at, _)| at)
    }

    /// Puts a fresh controller into the table; the caller tells it about the nodes and opens it.
    pub fn insert(&mut self, now: Instant, spec: OpenSpec, exported: bool) -> Token {
        let instance = InstanceId(self.next_instance);
        self.next_instance = self.next_instance.wrapping_add(1);
        let mut config = Config::new(self.grid, spec.volume, &self.host, instance, instance.0 as u64);
        // A controller's bounds are fixed when it opens, so the budget is divided by what is expected to be open.
        let shares = self.expected.max(self.table.len() + 1) as u64;
        config.writeback_bytes_max = (self.budget.writeback_bytes / shares).max(WRITEBACK_SHARE_MIN);
        config.map_cache_bytes_max = (self.budget.map_cache_bytes / shares).max(MAP_CACHE_SHARE_MIN);
        config.read_ahead_bytes_max = (self.budget.read_ahead_bytes / shares).min(READ_AHEAD_SHARE_MAX);
        (config.checked_reads, config.compression) = (spec.checked_reads, spec.compression);
        config.keeps_spare = self.keeps_spare;
        (config.key, config.store_key) = (spec.key.clone(), spec.store_key.as_deref().cloned());
        config.leaves_domain = spec.leaves_domain;
        // Who shall have it the records say.
        config.takeover = false;
        config.only_from = spec.only_from;
        config.rebuild_after = self.care.rebuild_after;
        config.scrub_every = self.care.scrub_every;
        config.mutations = self.mutations;
        (self.tune)(&mut config);
        let mut controller = Controller::new(config);
        controller.guard_claim(spec.guard);
        let token = self.table.insert(Volume {
            id: spec.volume,
            name: spec.name.clone(),
            controller,
            exported,
            receiver: None,
            filters: Vec::new(),
            tenants: Vec::new(),
            recorded: Vec::new(),
            below_filters: VecDeque::new(),
            quiesced_at: None,
            writers: BTreeMap::new(),
            held: Slab::new(REQUESTS_MAX),
            shared: self.shared.contains(&spec.volume),
            requests: Requests::default(),
            sessions: BTreeMap::new(),
            waits: None,
            armed_at: None,
            opened_at: now,
            opened_by: spec.clone(),
            told_claims: Vec::new(),
            was_deposed: false,
            is_full: false,
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
        // Filters before a clone that is gone follow it, when they hold nothing.
        volume.filters.retain(|(head, stack)| there.contains(head) || stack.in_flight() > 0);
        volume.writers.retain(|head, writers| there.contains(head) || !writers.is_idle());
    }

    /// What clients' data leaves free of a device, and what is not promised to it besides.
    pub fn reserve_and_spare_bytes(&self, capacity_bytes: u64) -> (u64, u64) {
        let mut config = Config::new(self.grid, VolumeId(0), &self.host, InstanceId(0), 0);
        config.keeps_spare = self.keeps_spare;
        (holdfast_volume::reserve_bytes(&config, capacity_bytes), holdfast_volume::spare_bytes(&config, capacity_bytes))
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        self.timers.peek().map(|Reverse((at, _))| *at)
    }

    /// Something happened to a volume, and all of it is done: it may want to be looked at sooner.
    pub fn arm(&mut self, at: Token) {
        let Some(volume) = self.table.get_mut(at) else { return };
        let Some(due) = volume.next_deadline() else { return };
        if volume.armed_at.is_none_or(|armed_at| due < armed_at) {
            volume.armed_at = Some(due);
            self.timers.push(Reverse((due, at)));
        }
    }

    /// Volumes whose deadline has come, in the order of their deadlines; not armed any more.
    pub fn take_due(&mut self, now: Instant) -> Vec<Token> {
        let mut due = Vec::new();
        while let Some(Reverse((armed_at, at))) = self.timers.peek().copied().filter(|Reverse((at, _))| *at <= now) {
            self.timers.pop();
            let Some(volume) = self.table.get_mut(at).filter(|v| v.armed_at == Some(armed_at)) else { continue };
            volume.armed_at = None;
            match volume.next_deadline() {
                Some(deadline) if deadline <= now => due.push(at),
                _ => self.arm(at),
            }
        }
        due
    }

    pub fn tokens(&self) -> Vec<Token> {
        self.table.tokens()
    }

    /// Volumes, clones and snapshots that clients may come to.
    pub fn exports(&self) -> Vec<ExportInfo> {
        let named = self.heads().filter_map(|(name, at, head)| Some((name, self.table.get(at)?, head)));
        named.flat_map(|(name, volume, head)| volume.exports(name, head)).collect()
    }

    pub fn export(&self, name: &str) -> Option<ExportInfo> {
        let (export, ticket) = split_ticket(name);
        let (volume_name, snapshot) = split_export(export);
        let (at, head) = self.find_open(volume_name)?;
        let volume = self.table.get(at).filter(|v| v.admits(ticket))?;
        match snapshot {
            Some(snapshot) => volume.snapshot_export(volume_name, head, snapshot).map(|(_, export)| export),
            None => Some(volume.export(name, head)),
        }
    }

    /// Snapshots of the volume or clone, also for a snapshot of it.
    pub fn snapshots(&self, export: &str) -> Vec<(String, ObjectId)> {
        let (name, _) = split_export(split_ticket(export).0);
        let found = self.find_open(name).and_then(|(at, head)| Some((self.table.get(at)?, head)));
        let Some((volume, head)) = found else { return Vec::new() };
        let own = volume.controller.snapshots().filter(|(_, s)| s.head == head);
        own.map(|(layer, s)| (s.name.clone(), layer)).collect()
    }
}

/// What others may see of an open volume.
impl Volume {
    pub fn id(&self) -> VolumeId {
        self.id
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn controller(&self) -> &Controller {
        &self.controller
    }

    /// The store of a sharing domain, which has no clients.
    pub fn is_store(&self) -> bool {
        self.opened_by.is_store
    }

    /// Clients may use it; otherwise it is open for care.
    pub fn is_exported(&self) -> bool {
        self.exported
    }

    pub fn is_shared(&self) -> bool {
        self.shared
    }

    pub fn waits(&self) -> Option<Wait> {
        self.waits
    }

    /// Of the volume, or of a clone in it.
    pub fn id_of(&self, head: HeadId) -> Option<VolumeId> {
        if head == HeadId::VOLUME {
            return Some(self.id);
        }
        self.controller.clones().find(|(of, _)| *of == head).map(|(_, clone)| clone.id)
    }

    /// Of the volume, or of a clone in it.
    pub fn name_of(&self, head: HeadId) -> String {
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

    /// Sessions of the volume, its clones, and snapshots of both.
    pub fn sessions(&self) -> usize {
        self.sessions.values().sum()
    }

    pub fn sessions_of(&self, head: HeadId) -> usize {
        self.sessions.get(&head).copied().unwrap_or(0)
    }

    pub fn snapshot(&self, head: HeadId, name: &str) -> Option<(ObjectId, &Snapshot)> {
        self.controller.snapshots().find(|(_, s)| s.head == head && s.name == name)
    }

    pub fn writers_view(&self, head: HeadId) -> WritersView {
        self.writers.get(&head).map(Writers::view).unwrap_or_default()
    }

    /// The filters before a head, from above; and what the controller answers to them.
    pub fn stack(&self, head: HeadId) -> Option<&Stack> {
        self.filters.iter().find(|(of, _)| *of == head).map(|(_, stack)| stack)
    }
}

impl Volume {
    /// Whether it is of no use for this opening: it is another volume of the name, or reads beforehand for another one.
    pub(crate) fn is_in_the_way_of(&self, spec: &OpenSpec) -> bool {
        self.id != spec.volume || self.controller.is_preloading() && !spec.asks_for_same(&self.opened_by)
    }

    /// Since it was opened, or begun to be read beforehand.
    fn open_for(&self, now: Instant) -> Duration {
        now.since(self.opened_at)
    }

    /// Takes a request in; gives its name at the controller, or its origin back where more is under way than that takes.
    pub(crate) fn admit(&mut self, origin: Origin) -> Result<RequestToken, Origin> {
        if self.requests.count() >= REQUESTS_MAX || !self.filters.is_empty() && !self.has_room_beside_filters(2) {
            return Err(origin);
        }
        Ok(self.requests.admit(origin))
    }

    /// Whether so many more requests may come, beside those that filters may make of what they have.
    pub(crate) fn has_room_beside_filters(&self, count: usize) -> bool {
        let kept: usize = self.filters.iter().map(|(_, stack)| stack.may_still_ask()).sum();
        self.requests.count() + kept + count <= REQUESTS_MAX
    }

    /// When the controller, a filter or the right to write wants to be looked at again.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let filters = self.filters.iter().map(|(_, stack)| stack.next_deadline());
        let writers = self.writers.values().map(Writers::next_deadline);
        filters.chain(writers).fold(self.controller.next_deadline(), earliest)
    }

    pub(crate) fn add_session(&mut self, head: HeadId) {
        *self.sessions.entry(head).or_default() += 1;
    }

    pub(crate) fn remove_session(&mut self, head: HeadId) {
        *self.sessions.get_mut(&head).expect("it was counted") -= 1;
    }

    /// It under this name, and its snapshots; nothing where it does not serve.
    pub(crate) fn exports(&self, name: &str, head: HeadId) -> Vec<ExportInfo> {
        if !self.serves() {
            return Vec::new();
        }
        let snapshots = self.controller.snapshots().filter(|(_, snapshot)| snapshot.head == head);
        let snapshots = snapshots.filter_map(|(_, s)| Some(self.snapshot_export(name, head, &s.name)?.1));
        std::iter::once(self.export(name, head)).chain(snapshots).collect()
    }

    pub(crate) fn export(&self, name: &str, head: HeadId) -> ExportInfo {
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
    pub(crate) fn serves(&self) -> bool {
        self.exported && matches!(self.controller.state(), State::Opening | State::Open)
    }

    /// Whether this client may come.
    pub(crate) fn admits(&self, ticket: Option<&str>) -> bool {
        match ticket {
            None => self.serves(),
            ticket => self.receiver.as_deref() == ticket && self.controller.state() == State::Open,
        }
    }

    /// At the second look after another host has taken it over: what was asked has been answered by then.
    pub(crate) fn is_to_be_dropped(&mut self) -> bool {
        let is_deposed = self.controller.state() == State::Deposed;
        is_deposed && std::mem::replace(&mut self.was_deposed, is_deposed)
    }

    /// For the log, once: the volume has not come up within a reasonable time, and why.
    pub(crate) fn tell_waiting(&mut self, now: Instant) -> Option<String> {
        let is_late = self.open_for(now) >= WAIT_TOLD_AFTER && self.controller.state() == State::Opening;
        let wait = self.waits.as_mut().filter(|w| is_late && !w.told)?;
        wait.told = true;
        Some(format!("volume {} can't be opened yet: {}", self.name, wait.why))
    }

    /// A snapshot of the volume or clone `of`: its layer, and what clients are told of it.
    pub(crate) fn snapshot_export(&self, of: &str, head: HeadId, name: &str) -> Option<(ObjectId, ExportInfo)> {
        let (layer, snapshot) = self.snapshot(head, name)?;
        let export = ExportInfo {
            name: snapshot_export_name(of, name),
            description: format!("Holdfast snapshot, {}", Size(snapshot.size_bytes)),
            size_bytes: snapshot.size_bytes,
            read_only: true,
        };
        Some((layer, export))
    }
}

/// Between the name of a volume and that of its snapshot, in the name of an export.
const OF: char = '@';

/// The name under which clients find a snapshot.
pub fn snapshot_export_name(volume: &str, snapshot: &str) -> String {
    format!("{volume}{OF}{snapshot}")
}

/// Between the name of a volume that takes in a stream and the ticket of who brings it, in the name of an export.
const TO: char = '!';

/// The name under which a volume takes in a stream.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::Config as HostConfig;

    fn volumes() -> Volumes {
        Volumes::new(&HostConfig::for_tests(crate::homes::FRONT))
    }

    fn spec(volume: u128, name: &str) -> OpenSpec {
        OpenSpec {
            volume: VolumeId(volume),
            is_store: false,
            name: name.to_string(),
            size_bytes: 1 << 30,
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

    #[test]
    fn a_volume_is_due_once_at_its_deadline_however_often_it_was_armed() {
        let mut volumes = volumes();
        let a = volumes.insert(Instant::ZERO, spec(1, "v1"), true);
        let b = volumes.insert(Instant::ZERO, spec(2, "v2"), true);
        for at in [a, a, b, a] {
            volumes.arm(at);
        }
        let first = volumes.next_deadline().expect("a controller has one");
        assert!(first > Instant::ZERO && volumes.take_due(Instant::ZERO).is_empty());
        assert_eq!(volumes.take_due(first), [a, b]);
        assert_eq!((volumes.take_due(first), volumes.next_deadline()), (vec![], None), "until they are armed again");
        volumes.arm(b);
        assert!(volumes.next_deadline().is_some());
        volumes.remove(b);
        assert!(volumes.take_due(first).is_empty(), "one that is gone is never due");
    }

    #[test]
    fn no_two_openings_have_the_same_instance() {
        let mut volumes = volumes();
        let first = volumes.next_instance;
        volumes.insert(Instant::ZERO, spec(1, "v1"), true);
        volumes.insert(Instant::ZERO, spec(2, "v2"), true);
        assert_eq!(volumes.next_instance, first + 2);
    }

    #[test]
    fn names_of_exports_are_taken_apart() {
        assert_eq!(split_export("v1@s1"), ("v1", Some("s1")));
        assert_eq!(split_export("v1"), ("v1", None));
        assert_eq!(split_ticket(&receiving_export("v1", "t")), ("v1", Some("t")));
        assert_eq!(split_ticket("v1@s1"), ("v1@s1", None));
        assert_eq!(snapshot_export_name("v1", "s1"), "v1@s1");
    }
}
