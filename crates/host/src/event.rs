//! Events that a host hears, and effects that it wants.

use crate::access::Lists;
use crate::forward::{LinkId, Peer};
use crate::groups::Sibling;
use crate::limits::Limits;
use crate::offers::Offer;
use crate::reservation::ReservedVolume;
use crate::views::Weakness;
use holdfast_base::{
    BlockReply, BlockRequest, Buf, DeviceId, Epoch, InstanceId, MetaReply, MetaRequest, MetaVersion, NodeId, Token,
    Urgency, VolumeId,
};
use holdfast_cipher::VolumeKey;
use holdfast_filter::{Filter, FilterId};
use holdfast_format::forward::{Answer, Ask, Refusal};
use holdfast_format::geometry::Layout;
use holdfast_format::packing::Compression;
use holdfast_format::root::Root;
use holdfast_format::sharing::SegmentRanges;
use holdfast_format::tier::Tiers;
use holdfast_format::wire::{DeviceStat, NodeTimes, Reply, Request};
use holdfast_volume::{Event as VolumeEvent, Lane, PreloadState, Question, Task, Why, Worked};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A call of a volume's controller: to a node, or to the metadata store.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Call {
    pub volume: Token,
    pub token: u64,
}

/// Happenings that a host is told of.
#[derive(Debug)]
pub enum Event {
    /// A connection to a node is up, and greeted.
    NodeUp {
        node: NodeId,
        boot: InstanceId,
        version: u32,
        devices: Vec<DeviceStat>,
    },
    NodeDown {
        node: NodeId,
    },
    /// What a node that is up says of its devices now.
    Devices {
        node: NodeId,
        devices: Vec<DeviceStat>,
    },
    /// Nodes that are down, or silent for a while.
    NodesAway(BTreeSet<NodeId>),
    Node {
        node: NodeId,
        call: Call,
        reply: Reply,
        times: Option<NodeTimes>,
        payload: Buf,
    },
    Meta {
        call: Call,
        reply: MetaReply,
    },
    /// What came of [`Effect::Work`].
    Worked {
        call: Call,
        outcome: Worked,
        /// That it took.
        cpu: Duration,
    },
    /// Of a client, in a session that [`crate::Host::open_session`] has opened.
    Request {
        session: Token,
        request: BlockRequest,
    },
    /// The client is gone.
    Close {
        session: Token,
    },
    Peer(PeerEvent),
    /// From another reactor of the host.
    Sibling {
        reactor: usize,
        message: Sibling,
    },
    /// From the control plane; answered by [`Effect::Done`] under the ticket.
    Order {
        ticket: u64,
        order: Order,
    },
    Tick,
}

/// News of other hosts.
#[derive(Clone, Debug)]
pub enum PeerEvent {
    /// A connection to the host is up.
    Connected {
        peer: Peer,
    },
    Disconnected {
        peer: Peer,
    },
    /// What it says to what this host has asked.
    Answer {
        peer: Peer,
        token: u64,
        answer: Answer,
        payload: Buf,
    },
    /// It asks this host something.
    Ask {
        link: LinkId,
        token: u64,
        ask: Ask,
        payload: Buf,
    },
    LinkDown {
        link: LinkId,
    },
}

/// Things that the control plane may want of volumes here.
#[derive(Debug)]
pub enum Order {
    /// Puts a volume into service; harmless where it is already.
    Open {
        spec: OpenSpec,
        /// For clients; otherwise for care.
        exported: bool,
    },
    /// Begins to read what another host is about to hand over, or goes on.
    Preload {
        spec: OpenSpec,
    },
    /// Drops a volume as it is, and cuts its clients off.
    LetGo {
        volume: VolumeId,
    },
    /// Takes a volume out of service.
    Close {
        name: String,
        /// Disconnect clients rather than refuse.
        force: bool,
        /// Drop the controller as it is: the volume is being deleted.
        discard: bool,
        /// Not where it is open for clients.
        only_care: bool,
    },
    /// Lets who knows the ticket bring a stream to a volume that is open for care, and nobody else any more.
    Receive {
        name: String,
        ticket: Option<String>,
    },
    Resize {
        name: String,
        size_bytes: u64,
        /// Make it smaller although clients know the larger size.
        force: bool,
    },
    SetPolicy {
        name: String,
        policy: Policy,
    },
    /// Whether clients' reads of a volume are checked.
    CheckReads {
        name: String,
        checked: bool,
    },
    /// The volume is to share its content by that store; its root says so when it does.
    SetSharing {
        name: String,
        store: VolumeId,
        key: Option<VolumeKey>,
    },
    /// It is to share its content with nobody any more; its root says so when all that it has is its own.
    EndSharing {
        name: String,
    },
    /// Volumes that several clients may write to at a time.
    Share(BTreeSet<VolumeId>),
    /// Whether clients' writes leave the spare free, too: hosts of older releases do.
    KeepSpare(bool),
    /// Of a volume in service, or a clone.
    Change {
        volume: String,
        wanted: Wanted,
    },
    Filters {
        volume: String,
        change: FilterChange,
    },
    /// Makes what a separate clone begins with, of a snapshot.
    CreateDependent {
        volume: String,
        snapshot: String,
        dependent: VolumeId,
        name: String,
        /// The snapshot's where it is missing.
        size_bytes: Option<u64>,
    },
    /// What a dependent names of its origin, to that; nothing where there is no such dependent any more.
    Dependent {
        origin: VolumeId,
        dependent: VolumeId,
        names: Option<SegmentRanges>,
    },
    /// Takes snapshots of several volumes in service, or clones, at one moment.
    SnapshotGroup(GroupOrder),
    /// What volumes in service lack, or would without some nodes.
    Inspect(Question),
    /// Has volumes leave these devices, and no others.
    Drain(BTreeSet<DeviceId>),
    /// A volume is fixed from here on, or no more.
    SetReservation {
        volume: VolumeId,
        reservation: Option<ReservedVolume>,
    },
    /// Nodes on this host's own machine, which its volumes read from first.
    LocalNodes(BTreeSet<NodeId>),
    /// Volumes that this host and others offer, and by which numbers it reaches these hosts.
    Offer {
        /// Which hosts serve volumes that those here may talk with.
        heard_at: BTreeMap<VolumeId, String>,
        offers: Vec<Offer>,
        hosts: Vec<(String, Peer)>,
    },
    /// Shortens the log of a volume that is served here.
    Prepare {
        name: String,
    },
    /// Asks another host to stop serving a volume.
    AskToYield {
        host: String,
        volume: VolumeId,
    },
    /// Which clients may have what from here on, and how much.
    Access {
        lists: Lists,
        limits: Limits,
    },
    /// Takes no session and opens no volume any more: the host is about to stop.
    TakeNoMore,
    /// Closes all volumes.
    CloseAll,
}

/// What is needed to open a volume, from its root record.
#[derive(Clone, Debug)]
pub struct OpenSpec {
    pub volume: VolumeId,
    /// It is the store of a sharing domain, which has no clients.
    pub is_store: bool,
    pub name: String,
    pub size_bytes: u64,
    pub layout: Layout,
    pub checked_reads: bool,
    pub compression: Compression,
    /// It is not opened if others have had it since: see [`holdfast_volume::Config::only_from`].
    pub only_from: Option<Epoch>,
    /// Version of the record of who serves it, as this was decided by it; it is claimed only while that is so.
    pub guard: Option<MetaVersion>,
    /// Of an encrypted one.
    pub key: Option<VolumeKey>,
    /// Of the store of its sharing domain, where it is in one and encrypted.
    pub store_key: Option<Box<(VolumeId, VolumeKey)>>,
    /// It is to leave that domain: see [`holdfast_volume::Config::leaves_domain`].
    pub leaves_domain: bool,
}

impl OpenSpec {
    /// Of a volume as its root says, whoever has claimed it.
    pub fn of(root: &Root, checked_reads: bool, compression: Compression, key: Option<VolumeKey>) -> OpenSpec {
        let Root { volume, size_bytes, layout, .. } = *root;
        OpenSpec {
            volume,
            is_store: root.is_store(),
            name: root.name.clone(),
            size_bytes,
            layout,
            checked_reads,
            compression,
            only_from: None,
            guard: None,
            key,
            store_key: None,
            leaves_domain: false,
        }
    }

    /// Whether an opening that was begun by the other is what this one asks for. Size and layout it reads itself.
    pub(crate) fn asks_for_same(&self, other: &OpenSpec) -> bool {
        let key_of = |spec: &OpenSpec| spec.key.as_ref().map(VolumeKey::id);
        let of = |spec: &OpenSpec| {
            let how = (spec.checked_reads, spec.compression);
            let store_key = spec.store_key.as_deref().map(|(store, key)| (*store, key.id()));
            (spec.volume, how, spec.only_from, key_of(spec), store_key)
        };
        of(self) == of(other)
    }
}

/// Where and how a volume's data lie, as far as it can be changed while it is used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Policy {
    Layout(Layout),
    Tiers(Tiers),
    Compression(Compression),
}

impl From<Policy> for VolumeEvent {
    fn from(policy: Policy) -> VolumeEvent {
        match policy {
            Policy::Layout(layout) => VolumeEvent::SetLayout { layout },
            Policy::Tiers(tiers) => VolumeEvent::SetTiers { tiers },
            Policy::Compression(compression) => VolumeEvent::SetCompression { compression },
        }
    }
}

/// What shall become of a volume's snapshots or of a clone.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Wanted {
    Snapshot {
        name: String,
        created_ms: u64,
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

/// What shall become of the filters of a volume or a clone.
pub enum FilterChange {
    /// Below those that are there.
    Add(Box<dyn Filter>),
    /// One, or all.
    Remove(Option<FilterId>),
}

impl std::fmt::Debug for FilterChange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            FilterChange::Add(filter) => write!(f, "Add({})", filter.spec()),
            FilterChange::Remove(filter) => write!(f, "Remove({filter:?})"),
        }
    }
}

/// What came of an order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// It is as it was wanted, or will be without more ado.
    Done,
    /// Whether it was done: by [`Order::SetPolicy`], [`Order::Prepare`] and [`Order::Receive`].
    Was(bool),
    /// How far reading beforehand is (`None` where the volume is opened already); nothing where it can't be opened here.
    Preload(Option<Option<PreloadState>>),
    Closed(CloseOutcome),
    Resized(ResizeOutcome),
    Changed(ChangeOutcome),
    Filtered(FilterOutcome),
    Dependent(DependentOutcome),
    Grouped(GroupOutcome),
    /// What the other host says; `None` where it can't be asked.
    Yielded(Option<Answer>),
    /// Of volumes that lack anything, or can't tell yet.
    Inspected(Vec<Weakness>),
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

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ChangeOutcome {
    Done,
    /// The volume is not in service, or went out of it.
    NotOpen,
    /// So many clients use it.
    InUse(usize),
    Refused(&'static str),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FilterOutcome {
    Done,
    NotOpen,
    TooMany,
    NoSuch,
    /// It is the volume's limit, which is set and taken away as such.
    IsLimit,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DependentOutcome {
    Made(Box<Root>),
    NotOpen,
    Refused(&'static str),
}

/// Snapshots of one name of several volumes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GroupOrder {
    pub members: Vec<GroupMemberAt>,
    pub name: String,
    /// Since 1970.
    pub created_ms: u64,
}

/// A volume or clone of a group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GroupMemberAt {
    pub volume: String,
    /// The reactor that it is on.
    pub reactor: usize,
}

/// What came of a group of snapshots. Members by their names.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum GroupOutcome {
    Done,
    NotOpen(String),
    /// The volume has a snapshot of that name.
    NameTaken(String),
    /// Too many are still being undone.
    Busy,
    Failed {
        volume: String,
        why: Why,
        /// Volumes whose snapshots may be there all the same.
        left: Vec<String>,
    },
}

/// News to a session: a front end tells its client what its protocol has a word for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum News {
    /// The export has this size now.
    SizeBytes(u64),
    /// Its volume is served here, by another host, or by nobody for the moment.
    Owner(Ownership),
    /// Another client writes from here on: this one's writes are refused.
    Fenced,
    /// A write found no room; or one found room again.
    IsFull(bool),
}

/// Who serves the volume of a session, as seen from its host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ownership {
    Here,
    Elsewhere,
    Nobody,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Level {
    Info,
    Warn,
    Error,
}

/// Wishes of a host.
#[derive(Debug)]
pub enum Effect {
    Send {
        node: NodeId,
        lane: Lane,
        call: Call,
        request: Request,
        urgency: Urgency,
        payload: Vec<Buf>,
    },
    /// Make the connections to the node anew.
    Reconnect {
        node: NodeId,
    },
    Meta {
        call: Call,
        request: MetaRequest,
    },
    /// Do this with these blocks, on another thread if there is one.
    Work {
        call: Call,
        task: Task,
        blocks: Vec<Buf>,
    },
    /// To a client; `to` is its front end's name for the session.
    Reply {
        to: Token,
        reply: BlockReply,
    },
    /// End a client's connection without an answer to anything: it may try again. The session is gone.
    Abort {
        to: Token,
        /// For the log, where a client is refused that was let in before.
        why: Option<String>,
    },
    News {
        to: Token,
        news: News,
    },
    Peer(PeerEffect),
    /// To another reactor of the host.
    Sibling {
        reactor: usize,
        message: Sibling,
    },
    /// Of an order.
    Done {
        ticket: u64,
        outcome: Outcome,
    },
    /// Something about what this host does with a volume may have changed.
    Changed {
        volume: VolumeId,
    },
    Log {
        level: Level,
        text: String,
    },
}

/// Wishes that concern other hosts.
#[derive(Debug)]
pub enum PeerEffect {
    Ask {
        peer: Peer,
        token: u64,
        ask: Ask,
        payload: Buf,
    },
    Answer {
        link: LinkId,
        token: u64,
        answer: Answer,
        payload: Vec<Buf>,
    },
    /// Read nothing of it any more.
    CloseLink {
        link: LinkId,
    },
    /// It is connected, but does not answer: make the connection anew.
    Reconnect {
        peer: Peer,
    },
    /// It can't be used as it is: somebody has to act.
    Trouble {
        peer: Peer,
        refusal: Refusal,
    },
}

impl Outcome {
    fn mismatch(&self, wanted: &str) -> ! {
        panic!("an order has an outcome of its kind: {wanted}, not {self:?}");
    }
}

/// A way to the outcome of one kind of order.
macro_rules! outcome {
    ($name:ident, $kind:ident, $of:ty) => {
        impl Outcome {
            /// # Panics
            /// It is of another kind of order.
            pub fn $name(self) -> $of {
                match self {
                    Outcome::$kind(of) => of,
                    other => other.mismatch(stringify!($kind)),
                }
            }
        }
    };
}

outcome!(was, Was, bool);
outcome!(preload, Preload, Option<Option<PreloadState>>);
outcome!(closed, Closed, CloseOutcome);
outcome!(resized, Resized, ResizeOutcome);
outcome!(changed, Changed, ChangeOutcome);
outcome!(inspected, Inspected, Vec<Weakness>);
outcome!(filtered, Filtered, FilterOutcome);
outcome!(dependent, Dependent, DependentOutcome);
outcome!(grouped, Grouped, GroupOutcome);
outcome!(yielded, Yielded, Option<Answer>);
