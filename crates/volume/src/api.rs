//! What goes into a controller and what comes out.

use crate::care::Sharing;
use crate::map::{CloneInfo, Snapshot};
use crate::segment::task::{Task, Worked};
use crate::space::TierUse;
use crate::space::claims::Claim;
use holdfast_base::{
    BlockReply, BlockRequest, Buf, DeviceId, Effects, Epoch, GridId, HeadId, InstanceId, Instant, Lsn, MetaReply,
    MetaRequest, NodeId, ObjectId, QuiesceId, RequestToken, ShardId, Urgency, VolumeId,
};
use holdfast_cipher::VolumeKey;
use holdfast_format::geometry::Layout;
use holdfast_format::ledger::Leg;
use holdfast_format::packing::Compression;
use holdfast_format::root::Root;
use holdfast_format::sharing::{Dependent, SegmentRanges};
use holdfast_format::talk::Talk;
use holdfast_format::tier::Tiers;
use holdfast_format::wire::{DeviceStat, NodeTimes, Reply, Request};
use holdfast_stages::Spans;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Settings of one controller. Sizes are bounds: memory, log and recovery never exceed what they say.
#[derive(Clone, Debug)]
pub struct Config {
    pub grid: GridId,
    pub volume: VolumeId,
    /// Name of this host, for the root record.
    pub host: String,
    /// Fresh for every opening: the nonce of this owner.
    pub instance: InstanceId,
    /// Seed of placement choices.
    pub seed: u64,
    /// Claim again when another opening was faster, rather than give way: who opened last shall have the volume.
    pub takeover: bool,
    /// Guests' reads are checked against their blocks' checksums. Metadata and what is moved always are.
    pub checked_reads: bool,
    /// How blocks are packed, where the volume's root has the feature for it.
    pub compression: Compression,
    /// Guests' writes leave what is not promised to them ([`crate::spare_bytes`]) free, too.
    pub keeps_spare: bool,
    /// The volume is not claimed if others have had it since this epoch: for who opens it only because nobody does.
    pub only_from: Option<Epoch>,
    /// What the volume is encrypted with; it must be the key that its root record names.
    pub key: Option<VolumeKey>,
    /// The store whose sharing domain the volume is in, and what that one is encrypted with: a domain is so as a whole, or not.
    pub store_key: Option<(VolumeId, VolumeKey)>,
    /// It is to be in no sharing domain: what it names of its store is copied back, and then its root forgets that.
    pub leaves_domain: bool,
    /// For a check: see [`Controller::take_encryptions`](crate::Controller::take_encryptions).
    pub notes_encryptions: bool,
    /// Log entries that may wait for destage (protocol rule 23).
    pub writeback_bytes_max: u64,
    /// Memory of clean map pages.
    pub map_cache_bytes_max: u64,
    /// Memory for what is read ahead of clients that read in order what lies scattered ([`crate::io::read_ahead`]);
    /// none where it is zero.
    pub read_ahead_bytes_max: u64,
    /// Blocks that a client must read in order first.
    pub read_ahead_after_blocks: u64,
    /// Payload of a full segment.
    pub segment_payload_bytes: u32,
    /// How long rests what looks for blocks to make smaller. Guests that have asked for nothing for so long are away.
    pub repack_every: Duration,
    /// Of a sharing domain's store: shorter runs of blocks that are alike are not worth a place of their own in the map.
    pub share_run_min: u32,
    /// What is fingerprinted while guests come and go: what is as old as this class of heat, or older.
    pub print_heat_min: u32,
    /// A segment of it that no member names is forgotten this long after it was offered last.
    pub forget_after: Duration,
    /// Of the store of a sharing domain: between two walks for segments of which little is named.
    pub vacate_every: Duration,
    /// A write at least this long becomes a segment directly.
    pub direct_bytes_min: u32,
    /// How long data may wait in the log when nothing presses.
    pub destage_age_max: Duration,
    /// Dead share (per mille) of a segment from which the cleaner wants it while the grid is nearly empty. The less is
    /// free, the lower.
    pub clean_dead_per_mille: u32,
    /// Segments that one step of a search for them looks at: guests don't wait for the whole table of a large volume.
    pub search_step: usize,
    /// Runs in the overlay of the map from which a checkpoint folds a batch of leaves.
    pub fold_runs_min: usize,
    /// Runs of leaves and overlay that maintenance goes through in one turn, while guests wait.
    pub slice_runs_max: usize,
    /// How long a node may be away before what it held is made again elsewhere.
    pub rebuild_after: Duration,
    /// How long a scrub of all shards takes.
    pub scrub_every: Duration,
    /// How often the map is walked and what it names counted anew, if that is not a twentieth of the time and more.
    pub audit_every: Duration,
    /// How long a device must be slow against its peers to be bypassed, and behave to be trusted again.
    pub slow_after: Duration,
    pub append_hedge_min: Duration,
    pub append_hedge_max: Duration,
    pub read_hedge_min: Duration,
    pub read_hedge_max: Duration,
    pub mutations: Mutations,
}

impl Config {
    pub fn new(grid: GridId, volume: VolumeId, host: &str, instance: InstanceId, seed: u64) -> Config {
        Config {
            grid,
            volume,
            host: host.to_string(),
            instance,
            seed,
            takeover: false,
            checked_reads: true,
            compression: Compression::Off,
            keeps_spare: false,
            only_from: None,
            key: None,
            store_key: None,
            leaves_domain: false,
            notes_encryptions: false,
            writeback_bytes_max: 256 << 20,
            map_cache_bytes_max: 64 << 20,
            read_ahead_bytes_max: 32 << 20,
            read_ahead_after_blocks: 128,
            segment_payload_bytes: 4 << 20,
            repack_every: Duration::from_secs(10),
            share_run_min: 8,
            print_heat_min: 1,
            forget_after: Duration::from_secs(600),
            vacate_every: Duration::from_secs(6 * 3600),
            direct_bytes_min: 1 << 20,
            destage_age_max: Duration::from_secs(5),
            clean_dead_per_mille: 850,
            search_step: 16_384,
            fold_runs_min: 4096,
            slice_runs_max: 4096,
            rebuild_after: Duration::from_secs(600),
            scrub_every: Duration::from_secs(14 * 24 * 3600),
            audit_every: Duration::from_secs(600),
            slow_after: Duration::from_secs(30),
            append_hedge_min: Duration::from_millis(10),
            append_hedge_max: Duration::from_millis(150),
            read_hedge_min: Duration::from_millis(2),
            read_hedge_max: Duration::from_millis(40),
            mutations: Mutations::default(),
        }
    }
}

holdfast_base::mutations! {
    /// Deliberate faults that the simulator must find; all off outside its mutation check. Each names the rule it breaks.
    pub struct Mutations {
        /// Rule 2: acknowledges with one copy fewer than the rule asks.
        ack_one_short,
        /// Rule 2: chooses two devices of one node as legs although two nodes are there.
        both_copies_on_one_node,
        /// Rule 4: a late acknowledgement completes a write after the seal was chosen.
        late_ack_after_freeze,
        /// Rule 5: recovery does not fence before it reads.
        skip_fence,
        /// Rule 8: reads are answered without a grant.
        read_without_grant,
        /// Rule 12: commits are applied without checking that the map still names the source.
        unconditional_repoint,
        /// Rule 15: the log is trimmed up to the last destaged entry, whatever the checkpoint covers.
        trim_past_commit,
        /// Rule 17: unreferenced shards are deleted although an append with unknown outcome may name them.
        clean_after_unknown_append,
        /// Hand-over: what was read before it is the beginning of whatever checkpoint there is then.
        preload_fits_anything,
        /// Snapshots: writes go on to the layer that was frozen.
        snapshot_stays_live,
        /// Snapshots: what a dropped one held for the layer above it is not merged into that.
        merge_forgets_below,
        /// A fold leaves what the old leaf named in the accounts.
        fold_keeps_old_counts,
        /// What the overlay hides is counted with every write over it.
        hides_twice,
        /// Rule 28: a store frees what was withdrawn on lists that members made before.
        frees_on_any_list,
        /// Rule 28: blocks of an offer are named that was made before the catalogue's last state.
        takes_old_offers,
        /// Rule 19: segments are freed although a volume that was made of this one names them.
        forgets_dependents,
        /// Groups of snapshots: answers are told while they should be held back.
        quiesce_tells,
        /// Rule 21: entries of all ledgers are encrypted with one key.
        one_key_for_all_ledgers,
        /// Rule 21: blocks of all segments are encrypted with one key.
        one_key_for_all_segments,
        /// Rule 21: in packed segments, the nonce of a raw unit counts blocks, and that of another granules.
        raw_units_by_block,
        /// Encryption: entries of the log are not.
        log_in_plain,
        /// Rule 1: a leg that doesn't know the ledger counts as one that lacks its entries.
        absent_leg_counts_as_lacking,
        /// Rule 27: a root is opened although legs know of a newer one.
        opens_older_root,
        /// Decision 0039: what is asked again, or elsewhere, has lost its class.
        hedge_forgets_class,
    }
}

#[derive(Clone, Debug)]
pub enum Event {
    /// Begin to open the volume. Requests may follow at once: they wait.
    Open,
    /// Another host serves it, and is about to hand it over: read what can be read before [`Event::Open`], and claim
    /// nothing. [`Notice::Preloaded`] when nothing more is.
    Preload,
    /// Destage everything, checkpoint, and stop (a clean close).
    Close,
    /// What came of [`Effect::Work`].
    Worked {
        job: u64,
        outcome: Worked,
    },
    /// What nodes are asked for it has its urgency.
    Request {
        target: Target,
        request: BlockRequest,
        urgency: Urgency,
    },
    /// A connection to the node is up and greeted. `boot` tells a restarted process from a re-connected one; `version`
    /// of the messages was agreed on.
    NodeUp {
        node: NodeId,
        boot: InstanceId,
        version: u32,
        devices: Vec<DeviceStat>,
    },
    /// The connection is gone: every request outstanding on it has an unknown outcome.
    NodeDown {
        node: NodeId,
    },
    /// Answer to [`Effect::Send`] with the same token, on a connection that is still the one it was sent on.
    Node {
        node: NodeId,
        token: u64,
        reply: Reply,
        /// What the node's part took, as far as it tells.
        times: Option<NodeTimes>,
        payload: Buf,
    },
    Meta {
        token: u64,
        reply: MetaReply,
    },
    /// Answered by [`Notice::Changed`] or [`Notice::Refused`].
    Change(Change),
    /// Hold back the answers of guests' writes, and of reads if asked: see [`crate::io::quiesce`]. Answered by
    /// [`Notice::Quiesced`], or at once by the end.
    Quiesce {
        quiesce: QuiesceId,
        with_reads: bool,
    },
    /// Tell what was held back; answered by [`Notice::QuiesceEnded`], unless that was told before.
    Release {
        quiesce: QuiesceId,
    },
    /// Heard by the host: a device of the node serves or serves no more, or has more room or less.
    Devices {
        node: NodeId,
        devices: Vec<DeviceStat>,
    },
    /// These devices are being drained, and no others.
    Drain {
        devices: BTreeSet<DeviceId>,
    },
    /// Make another volume of a snapshot of a head: the two share what there is (see `sharing`). Answered by
    /// [`Notice::DependentCreated`] or [`Notice::DependentRefused`]. What it names is recorded before this is asked
    /// for.
    CreateDependent {
        head: HeadId,
        snapshot: String,
        dependent: VolumeId,
        /// For its root record.
        name: String,
        /// Where it is to be larger than the snapshot.
        size_bytes: Option<u64>,
    },
    /// What a volume that was made of this one says it still names; `None` where there is no such volume any more.
    Dependent {
        volume: VolumeId,
        names: Option<SegmentRanges>,
    },
    /// What others own of the room that nodes have, and have not used yet; instead of what was told before.
    SetAside {
        claims: Vec<Claim>,
    },
    /// The volume is to be in the sharing domain of that store, which has this key where it is encrypted.
    SetSharing {
        store: VolumeId,
        key: Option<VolumeKey>,
    },
    /// It is to be in none any more; see [`Config::leaves_domain`].
    EndSharing,
    /// Of the owner of another volume; see [`Effect::Talk`].
    Talk {
        from: VolumeId,
        talk: Box<Talk>,
    },
    /// Change the volume's size.
    Resize {
        size_bytes: u64,
    },
    /// Nodes of this machine: what one of them holds a copy of is read there first. Instead of what was told before.
    LocalNodes {
        nodes: BTreeSet<NodeId>,
    },
    /// See [`Config::checked_reads`].
    CheckReads(bool),
    /// See [`Config::keeps_spare`].
    KeepSpare(bool),
    /// Change how the volume is written; what is there is written anew in the background.
    SetLayout {
        layout: Layout,
    },
    /// Pack blocks so from here on. Answered by [`Notice::CompressionSet`].
    SetCompression {
        compression: Compression,
    },
    /// Change where the volume's data lie, besides their layout. Answered by [`Notice::TiersSet`].
    SetTiers {
        tiers: Tiers,
    },
    /// Another host is about to take the volume over: empty the log as far as that can be done beside the service.
    /// Answered by [`Notice::Prepared`] or [`Notice::NotPrepared`].
    Prepare,
    /// It takes the volume over now: stop for good, and give up all grants. Ends with [`State::Closed`]; what guests
    /// wait for is answered by [`holdfast_base::BlockError::ShuttingDown`].
    Yield,
    /// A deadline passed.
    Tick,
}

/// What of a volume a request is for. A snapshot takes only reads and status requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Target {
    Head(HeadId),
    /// By its layer.
    Snapshot(ObjectId),
}

impl Target {
    /// The volume itself.
    pub const VOLUME: Target = Target::Head(HeadId::VOLUME);
}

/// What can be done to snapshots and clones.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change {
    /// Of a head; told with the snapshot's target.
    Snapshot {
        head: HeadId,
        name: String,
        /// Now, in milliseconds since 1970.
        created_ms: u64,
    },
    DropSnapshot {
        head: HeadId,
        name: String,
    },
    /// Of a snapshot, by its layer; told with the clone's target.
    Clone {
        of: ObjectId,
        id: VolumeId,
        name: String,
        /// At least the snapshot's.
        size_bytes: u64,
    },
    /// With its snapshots. What other clones need of it stays.
    DropClone {
        head: HeadId,
    },
    ResizeClone {
        head: HeadId,
        size_bytes: u64,
    },
    /// The head becomes what its snapshot is. Nobody may be writing to it, and it may not be smaller.
    Rollback {
        head: HeadId,
        name: String,
    },
}

/// Connections to a node come in two lanes, so that a 4 MiB shard doesn't delay a 4 KiB append.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lane {
    Fast,
    Bulk,
}

#[derive(Clone, Debug)]
pub enum Effect {
    /// Send to a node that is up. Requests of one lane arrive in order, or the connection goes down.
    Send {
        node: NodeId,
        lane: Lane,
        token: u64,
        request: Request,
        urgency: Urgency,
        payload: Vec<Buf>,
    },
    Reply(BlockReply),
    /// Where the time of a request went that is answered next.
    Took {
        token: RequestToken,
        spans: Spans,
    },
    /// Do this with these blocks, on another thread if there is one, and tell by [`Event::Worked`].
    Work {
        job: u64,
        task: Task,
        blocks: Vec<Buf>,
        /// What comes later is not waited for.
        until: Instant,
    },
    Meta {
        token: u64,
        request: MetaRequest,
    },
    /// To whoever has that volume open, if anybody has: it may be lost, and what it says be of no use any more.
    Talk {
        to: VolumeId,
        talk: Box<Talk>,
    },
    /// The connection has been silent for too long: drop it and connect again. `NodeDown` and `NodeUp` follow.
    Reconnect {
        node: NodeId,
    },
    Notice(Notice),
}

/// Where everything goes that is wanted of the world.
pub(crate) type Out<'a> = &'a mut Effects<Effect>;

/// Where an opening stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    Opening,
    Open,
    /// Another opening has a higher epoch; this one has stopped for good.
    Deposed,
    Closing,
    Closed,
}

/// How far an opening is that reads the map while another host serves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PreloadState {
    /// The root, or the checkpoint that it names.
    Reading,
    /// All is there, and is taken in.
    Applying,
    Done,
    /// The checkpoint that the root named could not be read. The root may name another one meanwhile.
    Unreadable,
}

/// Why a device is bypassed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SlowBecause {
    /// 99 of 100 operations take so long, and so long on its peers.
    Latency { p99_us: u32, peers_us: u32 },
    /// Operations on it failed, so many since its node was started.
    Errors { count: u64 },
}

impl fmt::Display for SlowBecause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |us: u32| f64::from(us) / 1000.0;
        match *self {
            SlowBecause::Latency { p99_us, peers_us } => {
                write!(f, "99 % of its operations take {:.1} ms, its peers' {:.1} ms", ms(p99_us), ms(peers_us))
            }
            SlowBecause::Errors { count } => write!(f, "it has reported {count} I/O errors"),
        }
    }
}

/// What happened, for logs and people.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Notice {
    StateChanged(State),
    /// The volume can't be opened now; the reason is shown, and the controller goes on trying.
    OpenWaits {
        why: &'static str,
    },
    /// Who is to serve the volume was decided anew before it was claimed: the opening has ended.
    NotClaimed,
    /// The metadata store lacks the volume's newest record; it serves on, and nothing that needs the store happens.
    /// Later, that the store has it again.
    StoreDoubted {
        is_doubted: bool,
    },
    /// Recovery is done: entries re-read, of them re-appended.
    Recovered {
        epoch: Epoch,
        last: Lsn,
        entries: u64,
        reappended: u64,
    },
    NodeSuspect {
        node: NodeId,
    },
    NodeTrusted {
        node: NodeId,
    },
    /// The device is an outlier among its peers: nothing new goes there where the volume can do without it.
    DeviceSlow {
        node: NodeId,
        device: DeviceId,
        because: SlowBecause,
    },
    DeviceTrusted {
        node: NodeId,
        device: DeviceId,
    },
    /// All shards of all segments are where they belong again.
    RedundancyRestored,
    Resized {
        size_bytes: u64,
    },
    /// What was in the log at [`Event::Prepare`] is in segments, and a checkpoint that the root names knows it.
    Prepared,
    /// That could not be reached in time: more of the log is left to the new owner.
    NotPrepared,
    /// Nothing more is read: `Controller::preload_state` tells what came of it.
    Preloaded,
    LayoutSet {
        layout: Layout,
    },
    /// Blocks are packed so from here on.
    CompressionSet {
        compression: Compression,
    },
    TiersSet {
        tiers: Tiers,
    },
    /// The change is complete and stays.
    Changed {
        change: Change,
        /// Of what was made.
        target: Option<Target>,
    },
    Refused {
        change: Change,
        why: &'static str,
    },
    /// From here on answers of writes are held back.
    Quiesced {
        quiesce: QuiesceId,
    },
    /// Told once for every quiesce that was asked for.
    QuiesceEnded {
        quiesce: QuiesceId,
        /// No write was answered from [`Notice::Quiesced`] to [`Event::Release`], by this owner or another one.
        whole: bool,
    },
    /// This root makes the volume; what it names stays until that is said to be gone.
    DependentCreated {
        dependent: VolumeId,
        root: Box<Root>,
    },
    DependentRefused {
        dependent: VolumeId,
        why: &'static str,
    },
    ShardDamaged {
        leg: Leg,
        shard: ShardId,
        /// At once; else a scrub finds it: while the volume opens, and of what belongs to the one that it was cloned
        /// from.
        repaired: bool,
    },
    /// The background audit found accounts that were wrong, and put them right: a bug.
    Miscounted {
        /// Segments of which more or less was thought to live than does.
        segments: u64,
        /// More was thought to be shadowed than is.
        shadowed: bool,
    },
    LedgerRolled {
        ledgers: usize,
    },
}

/// What `holdfast volume show` and the drill read. Counts since the opening.
#[derive(Clone, Debug)]
pub struct Status {
    pub state: State,
    pub epoch: Epoch,
    pub size_bytes: u64,
    pub layout: Layout,
    pub log_bytes: u64,
    pub mapped_blocks: u64,
    /// Of its own.
    pub segment_count: u64,
    /// What it shows of segments of another volume: its store's, or those of what it was made of.
    pub elsewhere_bytes: u64,
    /// Blocks that were named in a store since the volume was opened; of a store, that were copied into it.
    pub shared_blocks: u64,
    /// Segments with a shard on a device that is out, with fewer shards than their layout wants, or of a layout that is
    /// narrower than the volume's.
    pub degraded_segments: u64,
    /// Acknowledged entries in the log with fewer reachable copies than their rule.
    pub at_risk_entries: u64,
    /// It could be opened as it is if the metadata store were lost: copies of its root are where that takes them.
    pub is_recoverable: bool,
    pub suspect_nodes: Vec<NodeId>,
    /// By layer, oldest first.
    pub snapshots: Vec<(ObjectId, Snapshot)>,
    pub clones: Vec<(HeadId, CloneInfo)>,
    pub space: SpaceUse,
    /// Who sees what, when that was counted last; `None` before.
    pub sharing: Option<Arc<Sharing>>,
    /// Layers that are being merged or dropped.
    pub layers_going: u64,
    /// Shards and logs that are still on devices which are being drained.
    pub left_to_drain: Vec<(DeviceId, u64)>,
    /// Bytes that would even out the fullest device and the emptiest, while they are moved.
    pub left_to_balance_bytes: u64,
    pub tiers: Tiers,
    /// What the first tier holds, and what it did since the opening; `None` where there is none.
    pub first_tier: Option<TierUse>,
    /// Segments on media that the policy does not name; they are written anew when there is room.
    pub astray_segments: u64,
    /// Volumes that may name segments of this one.
    pub dependents: Vec<Dependent>,
    pub counters: Counters,
}

/// What a volume's segments take of devices, in bytes, without the headers of their shards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpaceUse {
    /// Of the volume, its clones and snapshots: named by the map as far as it is folded.
    pub data_bytes: u64,
    /// Overwritten, discarded or moved: the cleaner returns it.
    pub dead_bytes: u64,
    /// The same, but volumes that were made of this one may need it.
    pub kept_bytes: u64,
    /// Between packed units, and behind the last one.
    pub padding_bytes: u64,
    /// Copies beyond the first, parity, and what fills stripes up.
    pub redundancy_bytes: u64,
    /// Leaves of the map and checkpoints, with their copies.
    pub metadata_bytes: u64,
    /// What the data are as guests see them, and how much of them is in segments that are not packed: no sum has these.
    pub shown_bytes: u64,
    pub plain_bytes: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    pub reads: u64,
    pub read_bytes: u64,
    pub writes: u64,
    pub write_bytes: u64,
    pub append_hedges: u64,
    pub read_hedges: u64,
    /// Runs of blocks that one holder was asked for, and how many of these were on a node of this machine.
    pub shard_reads: u64,
    pub local_reads: u64,
    pub reconstructed_reads: u64,
    /// What guests' reads took of what had come with other blocks (see [`crate::io::read_ahead`]).
    pub ahead_bytes: u64,
    pub rolls: u64,
    pub segments_written: u64,
    pub segment_bytes_written: u64,
    pub direct_bytes: u64,
    /// Guests' data that left the log for segments; what was overwritten before did not.
    pub destaged_bytes: u64,
    pub segments_cleaned: u64,
    pub cleaned_bytes: u64,
    /// Of that: only to make them smaller.
    pub repacked_bytes: u64,
    pub segments_freed: u64,
    pub shards_deleted: u64,
    pub shards_rebuilt: u64,
    pub shards_moved: u64,
    /// Calls under way, nodes and devices that were gone through to tell who is late.
    pub calls_examined: u64,
    /// Of the rebuilt and the moved ones: by their new node itself, from other nodes, past this host.
    pub shards_made_by_nodes: u64,
    pub checkpoints: u64,
    pub checkpoint_bytes: u64,
    pub folds: u64,
    /// Times that the whole map was counted.
    pub audits: u64,
    /// Shards that were found damaged where they should lie.
    pub checksum_errors: u64,
    pub shards_scrubbed: u64,
}
