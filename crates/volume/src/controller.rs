//! The controller of one volume: its single writer, from the guest's request to the nodes.
//!
//! Role: gets guests' requests, nodes' answers and the metadata store's; sends to nodes, replies to guests. It judges
//! nodes by its own I/O; it never waits for a membership service, and for the metadata store only on changes of
//! ownership and ledger rolls.
//!
//! States: `Opening` (see [`crate::owner::opening`]) -> `Open` -> `Closing` -> `Closed`; from anywhere -> `Deposed`,
//! for good, when a node or the root record shows a higher epoch. `Open` -> `Closed` at once where another host takes
//! over (see [`crate::owner::handover`]).
//!
//! Invariants (numbers as in docs/ARCHITECTURE.md):
//! 1. An entry completes only with an ack set of the open ledger's legs, in LSN order, and is applied at that moment.
//! 2. Every record is applied by `apply`, live and in replay.
//! 3. Reads are answered only under unexpired grants of an ack set, or of legs that have heeded the owner since the
//!    read began.
//! 4. Segment shards are all durable before the commit record is appended.
//! 5. Nothing that the last durable checkpoint names is freed.
//!
//! Limits: the log window by `writeback_bytes_max` (writers are delayed from half of it on), leaves by
//! `map_cache_bytes_max`, calls by `CALLS_MAX`, requests by `REQUESTS_MAX`.
//!
//! Faults: a lost connection fails its calls with unknown outcome; appends are repeated (idempotent), shards are placed
//! elsewhere, reads are reconstructed. A stale epoch deposes. A bad checksum is read around and repaired.

pub(crate) use crate::api::Out;
use crate::api::{Config, Counters, Effect, Event, Lane, Notice, State, Target};
use crate::basis::Basis;
use crate::care::{Around, Care, CleanRead, Cleaned, Header, Looked, Made, Mover, Read, Walk, Walked, Wrong};
use crate::io::quiesce::Quiesce;
use crate::io::read::{ReadOp, ReadQueue};
use crate::io::read_ahead::ReadAhead;
use crate::io::write::Writes;
use crate::log::pressure::Pressure;
use crate::log::roll::Roll;
use crate::log::window::{Done, Log, WriteOp};
use crate::map::{
    Accounts, Brought, Checkpointer, CloneInfo, Leaf, LeafLoader, LeafNo, LeafWaiter, Map, Snapshot, checkpoint,
};
use crate::owner::copies::RootCopies;
use crate::owner::handover::Handover;
use crate::owner::opening::Opening;
use crate::owner::recovery::Preloaded;
use crate::owner::root::{Resizer, RootWriter};
use crate::peers::{
    Ask, Call, JUDGED_EVERY, Lags, PING_MAX, Peers, Purpose, STATE_EVERY, STATE_EVERY_IDLE, STATE_EVERY_REST, Worth,
};
use crate::rest::{Rest, TICK_REST};
use crate::segment::Segments;
use crate::segment::destage::{DESTAGES_MAX, Destager, Urge};
use crate::segment::direct::{DirectRun, DirectWrites};
use crate::segment::encrypt::Encryption;
use crate::segment::fetch::{self, FetchError, Fetcher, Recipient, Wanted};
use crate::segment::writer::{self, Aim, JobKind, Put, SegmentWriter, Wish, Written};
use crate::sharing::segments::SharedSegments;
use crate::sharing::snapshots::Changes;
use crate::space::claims::Claim;
use crate::space::{
    DEAD_PER_MILLE_MIN, Found, GUESTS_REST, Governor, LetIn, Need, Placer, Room, Rotation, Survey, Topology,
    movable_payload_bytes,
};
use crate::turn::Turn;
use crate::wants::Wants;
use holdfast_base::time::earliest;
use holdfast_base::{
    BLOCK_BYTES, BlockData, BlockError, BlockReply, BlockRequest, Buf, DeviceId, Epoch, HeadId, Instant, Key, NodeId,
    ObjectId, Prng, RequestToken, ShardId, Slab, Token, Urgency,
};
use holdfast_format::ledger::Leg;
use holdfast_format::record::SegmentNo;
use holdfast_format::root::Root;
use holdfast_format::wire::{DeviceStat, Refusal, Reply, Request};
use std::cell::Ref;
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Guests' requests in flight and waiting; frontends bound their sessions below this.
pub const REQUESTS_MAX: usize = 65_536;

/// While anything is in flight, deadlines are looked at this often: the finest hedge bound.
const TICK_BUSY: Duration = JUDGED_EVERY;

/// Otherwise this often, for work by age.
const TICK_IDLE: Duration = Duration::from_millis(500);

/// Hedges allowed: one in this many appends, beyond a first few.
const HEDGE_SHARE: u64 = 20;
const HEDGES_FREE: u64 = 64;

/// A tick this late means that this process stood still, not the nodes.
const TICK_LATE: Duration = Duration::from_millis(60);

pub struct Controller {
    pub(crate) basis: Basis,
    pub(crate) wants: Wants,
    pub(crate) state: State,
    pub(crate) rng: Prng,
    pub(crate) peers: Peers,
    pub(crate) root: RootWriter,
    pub(crate) copies: RootCopies,
    pub(crate) resizer: Resizer,
    pub(crate) opening: Option<Box<Opening>>,
    pub(crate) roll: Option<Roll>,
    pub(crate) rolled_at: Instant,
    pub(crate) next_ledger: u32,
    pub(crate) log: Log,
    destager: Destager,
    pub(crate) map: Map,
    pub(crate) rotation: Rotation,
    pub(crate) governor: Governor,
    pub(crate) loader: LeafLoader,
    pub(crate) segments: Segments,
    pub(crate) waiting: VecDeque<(Target, BlockRequest, Urgency)>,
    pub(crate) reads: Slab<ReadOp>,
    pub(crate) read_queue: ReadQueue,
    pub(crate) readahead: ReadAhead,
    pub(crate) awaiting_grant: Vec<Token>,
    pub(crate) fetcher: Fetcher,
    /// Empty between fetches: kept for its room.
    fetch_wishes: Vec<fetch::Wish>,
    pub(crate) writer: SegmentWriter,
    pub(crate) writes: Writes,
    pub(crate) write_ops: Slab<WriteOp>,
    pub(crate) direct: DirectWrites,
    pub(crate) pressure: Pressure,
    pub(crate) room: Room,
    pub(crate) survey: Survey,
    pub(crate) changes: Changes,
    pub(crate) quiesce: Option<Quiesce>,
    pub(crate) handover: Handover,
    pub(crate) preloaded: Option<Preloaded>,
    pub(crate) checkpointer: Checkpointer,
    pub(crate) care: Care,
    pub(crate) shared: SharedSegments,
    pub(crate) counters: Counters,
    pub(crate) encryptions: Vec<Encryption>,
    pub(crate) last_activity: Instant,
    /// When a volume that is being closed is left as it is.
    pub(crate) close_by: Option<Instant>,
    last_tick: Instant,
    was_busy: bool,
    rest: Rest,
    judge_from: Instant,
    pub(crate) turn: Turn,
}

impl Controller {
    pub fn new(config: Config) -> Controller {
        Controller {
            state: State::Opening,
            rng: Prng::new(config.seed),
            peers: Peers::default(),
            root: RootWriter::default(),
            copies: RootCopies::default(),
            resizer: Resizer::default(),
            opening: None,
            roll: None,
            rolled_at: Instant::ZERO,
            next_ledger: 0,
            log: Log::default(),
            destager: Destager::default(),
            map: Map::new(config.map_cache_bytes_max),
            rotation: Rotation::default(),
            governor: Governor::default(),
            loader: LeafLoader::default(),
            segments: Segments::default(),
            waiting: VecDeque::new(),
            reads: Slab::new(REQUESTS_MAX),
            read_queue: ReadQueue::default(),
            readahead: ReadAhead::default(),
            awaiting_grant: Vec::new(),
            fetcher: Fetcher::default(),
            fetch_wishes: Vec::new(),
            writer: SegmentWriter::default(),
            writes: Writes::default(),
            write_ops: Slab::new(REQUESTS_MAX),
            direct: DirectWrites::default(),
            pressure: Pressure::default(),
            room: Room::default(),
            survey: Survey::default(),
            changes: Changes::default(),
            quiesce: None,
            handover: Handover::None,
            preloaded: None,
            checkpointer: Checkpointer::default(),
            care: Care::default(),
            shared: SharedSegments::default(),
            counters: Counters::default(),
            encryptions: Vec::new(),
            last_activity: Instant::ZERO,
            close_by: None,
            last_tick: Instant::ZERO,
            was_busy: false,
            rest: Rest::default(),
            judge_from: Instant::ZERO,
            turn: Turn::default(),
            wants: Wants::default(),
            basis: Basis::new(config),
        }
    }

    /// Handles one event to completion; everything wanted of the world is in `out` afterwards.
    pub fn handle(&mut self, now: Instant, event: Event, out: Out) {
        self.basis.now = self.basis.now.max(now);
        (self.turn, self.basis.answer) = (Turn::default(), None);
        // Of the last two that is known when they are seen.
        if !matches!(event, Event::Tick | Event::Node { .. } | Event::Devices { .. }) {
            self.rest.stir(self.basis.now);
        }
        match event {
            Event::Open => self.begin_opening(out),
            Event::Preload => self.begin_preload(out),
            Event::Close => self.begin_closing(out),
            Event::Worked { job, outcome } => self.on_worked(job, outcome, out),
            Event::Request { target, request, urgency } => self.on_request(target, request, urgency, out),
            Event::NodeUp { node, version, devices, .. } => self.on_node_up(node, version, devices, out),
            Event::NodeDown { node } => self.on_node_down(node, out),
            Event::Node { node, token, reply, times, payload } => {
                if let Some(call) = self.peers.on_answer(self.basis.now, node, Token(token)) {
                    self.basis.answer = Some(self.answer_to(&call, times));
                    self.on_answer(call, reply, payload, out);
                }
            }
            Event::Meta { token, reply } => self.on_meta(token, reply, out),
            Event::Resize { size_bytes } => self.on_resize(size_bytes),
            Event::LocalNodes { nodes } => self.peers.set_local(nodes),
            Event::CheckReads(checked) => self.basis.config.checked_reads = checked,
            Event::KeepSpare(keep) => self.basis.config.keeps_spare = keep,
            Event::SetLayout { layout } => self.on_set_layout(layout),
            Event::SetTiers { tiers } => self.resizer.wanted_tiers = Some(tiers),
            Event::SetCompression { compression } => self.resizer.wanted_compression = Some(compression),
            Event::SetAside { claims } => self.on_set_aside(claims),
            Event::CreateDependent { head, snapshot, dependent, name, size_bytes } => {
                self.create_dependent((head, snapshot), (dependent, name), size_bytes, out);
            }
            Event::Dependent { volume, names } => self.on_dependent(volume, names),
            Event::EndSharing => self.on_end_sharing(),
            Event::SetSharing { store, key } => self.on_set_sharing(store, key),
            Event::Talk { from, talk } => self.on_talk(from, *talk, out),
            Event::Devices { node, devices } => self.on_devices(node, devices, out),
            Event::Drain { devices } => self.on_drain(devices, out),
            Event::Change(change) if self.state != State::Open => {
                self.notice(Notice::Refused { change, why: "the volume is not open" }, out);
            }
            Event::Change(change) => self.on_change(change, out),
            Event::Quiesce { quiesce, with_reads } => self.on_quiesce(quiesce, with_reads, out),
            Event::Release { quiesce } => self.on_release(quiesce, out),
            Event::Prepare => self.on_prepare(out),
            Event::Yield => self.on_yield(out),
            Event::Tick => self.on_tick(out),
        }
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        match self.state {
            State::Deposed | State::Closed => self.release_deadline(),
            _ => earliest(Some(self.tick_deadline()), self.slice_deadline()),
        }
    }

    /// When all is looked at.
    fn tick_deadline(&self) -> Instant {
        let pace = match (self.is_busy(), self.is_at_rest()) {
            (true, _) => TICK_BUSY,
            (false, true) => TICK_REST,
            (false, false) => TICK_IDLE,
        };
        let writes = earliest(self.direct.deadline(), self.writes.deadline());
        let scrub = self.care.scrubber.deadline().filter(|_| self.state == State::Open);
        let others = earliest(earliest(self.care.audit.deadline(), self.quiesce_deadline()), scrub);
        let tick = self.last_tick + pace;
        let packing = self.writer.packing_deadline();
        earliest(earliest(writes, packing), others).map_or(tick, |at| at.min(tick))
    }

    fn is_busy(&self) -> bool {
        !self.peers.is_idle()
            || !self.reads.is_empty()
            || !self.write_ops.is_empty()
            || self.opening.is_some()
            || !self.shared.is_idle()
            || self.is_awaited()
            || self.state == State::Open && self.care.cleaner.hurries_search(&self.room)
    }

    /// Whether nothing happens to the volume, and all that is left to do has a deadline or can wait.
    fn is_at_rest(&self) -> bool {
        self.rest.is_quiet(self.basis.now)
            && self.state == State::Open
            && !self.is_busy()
            && self.is_destaged()
            && !self.checkpointer.is_looking()
            && self.care.is_at_rest()
            && self.domain_is_at_rest()
            && self.peers.is_settled()
            && !self.lacks_copy()
            && !self.room.is_wanted()
            && !self.room.is_short()
            && !self.governor.is_at_work()
            && !self.root.is_at_work()
            && !self.resizer.is_wanted()
            && self.roll.is_none()
            && self.quiesce.is_none()
            && self.handover == Handover::None
    }

    /// Everything is where it stays: in segments, and named by a checkpoint.
    fn is_destaged(&self) -> bool {
        self.log.all_destaged()
            && self.writer.is_empty()
            && self.fetcher.is_empty()
            && self.wants == Wants::default()
            && self.checkpointer.is_idle()
            && !self.map.is_unfolded()
            && !self.map.layers().any_goes()
    }

    /// Snapshots that are complete and stay, by layer, oldest first.
    pub fn snapshots(&self) -> impl Iterator<Item = (ObjectId, &Snapshot)> {
        self.map.layers().snapshots().filter(|(layer, snapshot)| !self.changes.is_in_between(*layer, snapshot))
    }

    /// Clones that stay, by head.
    pub fn clones(&self) -> impl Iterator<Item = (HeadId, &CloneInfo)> {
        self.map.layers().clones().filter(|(head, _)| self.writing_layer(*head).is_some())
    }

    pub fn state(&self) -> State {
        self.state
    }

    /// Requests to nodes that are not answered yet.
    pub fn calls_under_way(&self) -> usize {
        self.peers.calls().len()
    }

    /// The most work of maintenance that was done in the last turn.
    pub fn last_turn(&self) -> Turn {
        self.turn
    }

    pub(crate) fn root(&self) -> &Root {
        self.basis.root()
    }

    pub(crate) fn epoch(&self) -> Epoch {
        self.root().epoch
    }

    pub fn is_encrypted(&self) -> bool {
        self.basis.config.key.is_some()
    }

    pub fn checks_reads(&self) -> bool {
        self.basis.config.checked_reads
    }

    pub fn size_bytes(&self) -> Option<u64> {
        self.basis.is_known().then(|| self.root().size_bytes)
    }

    pub fn layout(&self) -> Option<holdfast_format::geometry::Layout> {
        self.basis.is_known().then(|| self.root().layout)
    }

    pub(crate) fn set_state(&mut self, state: State, out: Out) {
        if self.state != state {
            self.state = state;
            out.push(Effect::Notice(Notice::StateChanged(state)));
        }
    }

    /// Sends to a node that is up. `None` (and nothing sent) where it is not, or too much is in flight.
    pub(crate) fn send(
        &mut self,
        node: NodeId,
        lane: Lane,
        purpose: Purpose,
        request: Request,
        payload: Vec<Buf>,
        out: Out,
    ) -> Option<Token> {
        self.peers.send(self.basis.now, Ask::new(node, lane, purpose, request, payload), out)
    }

    pub(crate) fn on_request(&mut self, of: Target, request: BlockRequest, urgency: Urgency, out: Out) {
        self.last_activity = self.basis.now;
        match (self.state, of) {
            (State::Open, target) => self.start_request(target, request, urgency, out),
            (State::Opening, _) => {
                if self.waiting.len() < REQUESTS_MAX {
                    self.waiting.push_back((of, request, urgency));
                } else {
                    self.reply(request.token, Err(BlockError::Unavailable), out);
                }
            }
            (State::Deposed, _) => self.reply(request.token, Err(BlockError::Deposed), out),
            (State::Closing | State::Closed, _) => self.reply(request.token, Err(BlockError::ShuttingDown), out),
        }
    }

    /// The map, and the accounts of what it names.
    pub(crate) fn map_and_accounts(&mut self) -> (&mut Map, Accounts<'_>) {
        let mutations = self.basis.config.mutations;
        let (segments, log, wants) = (&mut self.segments, &mut self.log, &mut self.wants);
        (&mut self.map, Accounts { segments, log, wants, audit: &mut self.care.audit, mutations })
    }

    /// As before anything was loaded.
    pub(crate) fn forget_map(&mut self) {
        self.map.forget_all();
        self.segments.reset(self.basis.root().own_numbers());
    }

    // ---- care ----

    /// The parts of care, and what they work with.
    pub(crate) fn care(&mut self) -> (&mut Care, Around<'_>) {
        let guests_are_at_work = self.guests_are_at_work();
        let around = Around {
            basis: &self.basis,
            peers: &mut self.peers,
            segments: &self.segments,
            map: &self.map,
            survey: &self.survey,
            room: &self.room,
            governor: &mut self.governor,
            rng: &mut self.rng,
            wants: &mut self.wants,
            counters: &mut self.counters,
            turn: &mut self.turn,
            guests_are_at_work,
        };
        (&mut self.care, around)
    }

    // ---- the map ----

    /// Has the checkpointer do something, and sees to what follows.
    pub(crate) fn drive_checkpointer<T>(
        &mut self,
        out: Out,
        act: impl FnOnce(&mut Checkpointer, &mut checkpoint::Around<'_>) -> T,
    ) -> T {
        let mut wishes = Vec::new();
        let mut around = checkpoint::Around {
            basis: &self.basis,
            state: self.state,
            peers: &self.peers,
            map: &mut self.map,
            segments: &mut self.segments,
            log: &mut self.log,
            wants: &mut self.wants,
            care: &mut self.care,
            room: &mut self.room,
            shared: &self.shared,
            handover: &self.handover,
            direct: &self.direct,
            counters: &mut self.counters,
            turn: &mut self.turn,
            wishes: &mut wishes,
        };
        let outcome = act(&mut self.checkpointer, &mut around);
        for wish in wishes {
            match wish {
                checkpoint::Wish::Load(leaves) => self.load_leaves(&leaves, LeafWaiter::Fold, out),
                checkpoint::Wish::Write(work) => self.write_segment(work, out),
                checkpoint::Wish::Append(record, done) => {
                    self.append_control(record, done, out);
                }
                checkpoint::Wish::Released => self.on_released(),
                checkpoint::Wish::Trim => self.trim(out),
            }
        }
        outcome
    }

    /// The next slices, if they are due.
    fn drive_slices(&mut self, out: Out) {
        self.drive_trim(out);
        self.survey.go_on(&self.basis, Topology::new(&self.basis, &self.peers), &self.segments, &mut self.turn);
        self.drive_checkpointer(out, Checkpointer::drive_slice);
        if self.care.cleaner.slice_deadline().is_some_and(|at| at <= self.basis.now) {
            self.find_live(out);
        }
        self.drive_sharing_slice(out);
    }

    fn slice_deadline(&self) -> Option<Instant> {
        if self.state == State::Opening {
            return self.opening.as_ref().and_then(|opening| opening.slice_deadline());
        }
        let of_parts = [
            self.survey.slice_deadline(),
            self.log.trims_at,
            self.checkpointer.slice_deadline(),
            self.care.slice_deadline().filter(|_| self.state == State::Open),
            self.shared.slice_deadline(),
        ];
        of_parts.into_iter().flatten().min()
    }

    fn on_leaves_part(&mut self, span: u64, part: u32, result: Result<Buf, FetchError>, out: Out) {
        let Brought { leaves, wanted } = self.loader.on_part(&self.map, &self.segments, span, part, result);
        for wanted in wanted {
            self.fetch(wanted, out);
        }
        for (no, leaf) in leaves {
            self.on_leaf(no, leaf, out);
        }
    }

    fn on_leaf(&mut self, no: LeafNo, leaf: Result<Leaf, FetchError>, out: Out) {
        let Some(load) = self.loader.end(no) else { return };
        let (map, mut accounts) = self.map_and_accounts();
        let (leaf, waiters) = map.take_in(no, load, leaf, &mut accounts);
        for waiter in waiters {
            let leaf = leaf.clone();
            match waiter {
                LeafWaiter::Read(op) => self.on_read_leaf(op, no, leaf, out),
                LeafWaiter::ReadAhead => {}
                LeafWaiter::Cleaner => self.on_cleaner_leaf(no, leaf, out),
                LeafWaiter::Fold => self.drive_checkpointer(out, |checkpointer, around| {
                    checkpointer.on_leaf(around, no, leaf);
                }),
                LeafWaiter::Audit => self.on_audit_leaf(no, leaf),
            }
        }
    }

    // ---- segments ----

    /// Has the writer do something, and sees to what follows.
    pub(crate) fn drive_writer<T>(
        &mut self,
        out: Out,
        act: impl FnOnce(&mut SegmentWriter, &mut writer::Around<'_>, Out) -> T,
    ) -> T {
        let mut wishes = Vec::new();
        let mut around = writer::Around {
            basis: &self.basis,
            peers: &mut self.peers,
            segments: &mut self.segments,
            rotation: &mut self.rotation,
            rng: &mut self.rng,
            counters: &mut self.counters,
            encryptions: &mut self.encryptions,
            wishes: &mut wishes,
        };
        let outcome = act(&mut self.writer, &mut around, out);
        for wish in wishes {
            match wish {
                Wish::Commit(job, record) => {
                    self.append_control(record, Done::Committed(job), out);
                }
                Wish::Durable(written) => self.on_metadata_durable(written, out),
                Wish::Abandon(no, homes) => {
                    let (record, done) = self.checkpointer.abandon(no, homes);
                    self.append_control(record, done, out);
                }
                Wish::Stray(leg, no, index) => self.care.repairer.note_stray((leg, no, index)),
                Wish::Degraded => self.care.repairer.note_degraded(),
                Wish::NotWorth(codec) => self.on_not_worth(codec),
            }
        }
        outcome
    }

    /// Has the fetcher do something, and sees to what follows.
    pub(crate) fn drive_fetcher(&mut self, out: Out, act: impl FnOnce(&mut Fetcher, &mut fetch::Around<'_>, Out)) {
        let mut wishes = std::mem::take(&mut self.fetch_wishes);
        let mut around = fetch::Around {
            basis: &self.basis,
            peers: &mut self.peers,
            segments: &self.segments,
            counters: &mut self.counters,
            wishes: &mut wishes,
        };
        act(&mut self.fetcher, &mut around, out);
        for wish in wishes.drain(..) {
            match wish {
                fetch::Wish::Deliver(to, result) => self.deliver(to, result, out),
                fetch::Wish::Degraded => self.care.repairer.note_degraded(),
                fetch::Wish::Damaged { segment, index, at, may_repair } => {
                    self.on_damaged((segment, index), at, may_repair, out);
                }
                fetch::Wish::Locate(segment, index) => self.want_shard(segment, index),
                fetch::Wish::AwaitLocation(segment, fetch) => self.wait_for_look(segment, fetch),
            }
        }
        self.fetch_wishes = wishes;
    }

    /// Has a run of a segment's blocks fetched.
    pub(crate) fn fetch(&mut self, wanted: Wanted, out: Out) {
        self.drive_fetcher(out, |fetcher, around, out| fetcher.start(around, wanted, out));
    }

    fn hedge_fetch(&mut self, fetch: Token, out: Out) {
        self.drive_fetcher(out, |fetcher, around, out| fetcher.hedge(around, fetch, out));
    }

    fn retry_stalled_fetches(&mut self, out: Out) {
        self.drive_fetcher(out, Fetcher::retry_stalled);
    }

    fn deliver(&mut self, to: Recipient, result: Result<Buf, FetchError>, out: Out) {
        match to {
            Recipient::Read { op, part } => self.on_read_part(op, part, result, out),
            Recipient::Ahead { segment, first } => self.on_ahead(segment, first, result, out),
            Recipient::Leaves { span, part } => self.on_leaves_part(span, part, result, out),
            Recipient::Run { at, part } => self.on_run_part(at, part, result, out),
            Recipient::Clean { job, part, .. } => self.on_clean_part(job, part, result, out),
            Recipient::Block { .. } => unreachable!("the fetcher puts blocks together"),
        }
    }

    fn on_put_lost(&mut self, put: Put, out: Out) {
        self.drive_writer(out, |writer, around, out| writer.on_put_lost(around, put, out));
    }

    fn replace_shards_on(&mut self, node: NodeId, out: Out) {
        self.drive_writer(out, |writer, around, out| writer.replace_on(around, node, out));
    }

    fn on_metadata_durable(&mut self, written: Written, out: Out) {
        let Written { kind, id, geometry, homes } = written;
        match kind {
            JobKind::Leaves => self.drive_checkpointer(out, |checkpointer, around| {
                checkpointer.on_leaves_durable(around, id.into());
            }),
            JobKind::Runs { part } => self.drive_checkpointer(out, |checkpointer, around| {
                checkpointer.on_runs_durable(around, part, id.into());
            }),
            JobKind::Dependent { part, .. } => self.on_dependent_durable(id, part, geometry, &homes),
            JobKind::Destage { .. } | JobKind::Clean { .. } | JobKind::Direct { .. } | JobKind::Gather { .. } => {
                unreachable!("data has a commit record")
            }
        }
    }

    /// Its commit record is in the log.
    pub(crate) fn on_segment_committed(&mut self, job: Token, out: Out) {
        let (kind, blocks, payload_bytes) = self.writer.on_committed(&mut self.segments, job);
        match kind {
            JobKind::Destage { entries } => {
                self.counters.destaged_bytes += blocks * BLOCK_BYTES as u64;
                entries.into_iter().for_each(|lsn| self.log.set_destaging(lsn, false));
            }
            JobKind::Clean { .. } => self.on_cleaned(blocks, payload_bytes, out),
            JobKind::Direct { writes } => self.on_direct_ended(writes, None, out),
            JobKind::Gather { id } => self.on_gathered(id, out),
            JobKind::Leaves | JobKind::Runs { .. } | JobKind::Dependent { .. } => {
                unreachable!("the writer has seen to that")
            }
        }
    }

    /// Parked segments get a place. Where there are nodes enough, and still no place, the grid is full: bulk writers hear
    /// of it, and other work waits for space.
    fn retry_parked_segments(&mut self, out: Out) {
        // While a pass waits no fold tells which segments are dead: it must not wait for the room they take.
        let shared = &self.shared;
        self.writer.drop_parked(|kind| match kind {
            JobKind::Dependent { volume, .. } => shared.is_creating(*volume),
            _ => true,
        });
        let parked = self.drive_writer(out, |writer, around, out| writer.retry_parked(around, out));
        if self.topology().layout_now().is_none() {
            return;
        }
        for (job, kind) in parked {
            match kind {
                JobKind::Direct { writes } if self.room_expected_at().is_none() => {
                    self.writer.give_up(job);
                    self.on_direct_ended(writes, Some(BlockError::NoSpace), out);
                }
                // Collected anew: of what it holds much may have been overwritten when there is room again.
                JobKind::Destage { entries } => {
                    self.writer.give_up(job);
                    self.log.destage_again(&entries);
                    self.room.on_destage_refused(self.basis.now);
                }
                JobKind::Clean { aim } => {
                    self.writer.give_up(job);
                    self.on_clean_refused(aim);
                }
                JobKind::Gather { id } => {
                    self.writer.give_up(job);
                    self.shared.domain.store.on_refused(id);
                }
                JobKind::Direct { .. } | JobKind::Leaves | JobKind::Runs { .. } | JobKind::Dependent { .. } => {}
            }
        }
    }

    fn drive_destage(&mut self, out: Out) {
        self.retry_parked_segments(out);
        if self.topology().layout_now().is_none() || !self.room.may_destage(self.basis.now) {
            return;
        }
        let mut running = self.writer.destages();
        while running < DESTAGES_MAX {
            let is_forced = self.destage_is_forced() || running == 0 && self.empties_log();
            let urge = Urge { is_forced, journal_fill: self.checkpointer.journal_fill(), running };
            let Some(work) = self.destager.next(&self.basis.config, &mut self.log, &self.map, urge) else { return };
            self.write_segment(work, out);
            running += 1;
        }
    }

    /// Age, lost copies, closing, or writes that wait for room: short segments are written rather than waited for.
    fn destage_is_forced(&mut self) -> bool {
        if self.state == State::Closing || self.room.is_short() || self.creation_waits() {
            return true;
        }
        let oldest = self.log.next_to_destage();
        oldest <= self.log.completed
            && self.log.get(oldest).is_some_and(|e| {
                self.basis.now.since(e.appended_at) >= self.basis.config.destage_age_max || self.is_at_risk(e)
            })
    }

    /// Whole blocks of a bulk write become a segment, with others that come in time.
    pub(crate) fn write_directly(&mut self, op: Token, first: Key, data: Buf, out: Out) {
        let segment_bytes = self.basis.config.segment_payload_bytes as usize;
        let (parts, full) = self.direct.add(self.basis.now, segment_bytes, op, first, &data);
        // One part stands for the write as a whole, and ends below: what is refused at once does not end it before.
        self.add_parts(parts, op);
        for work in full {
            self.write_segment(work, out);
        }
        if let Some(work) = self.direct.close_early() {
            self.write_segment(work, out);
        }
        self.on_write_part_done(op, out);
    }

    /// What has been collected goes out now.
    pub(crate) fn flush_direct_writes(&mut self, out: Out) {
        if let Some(work) = self.direct.close() {
            self.write_segment(work, out);
        }
    }

    /// A segment of bulk writes is a part of the volume, or there is no room for it.
    fn on_direct_ended(&mut self, runs: Vec<DirectRun>, error: Option<BlockError>, out: Out) {
        self.direct.on_segment_ended();
        for run in runs {
            self.direct.on_run_ended(run);
            match error {
                Some(error) => self.fail_write(run.0, error, out),
                None => self.on_write_part_done(run.0, out),
            }
        }
        if error.is_none()
            && let Some(work) = self.direct.close_early()
        {
            self.write_segment(work, out);
        }
    }

    /// What was encrypted since the last call, where [`Config::notes_encryptions`] asks for it.
    pub fn take_encryptions(&mut self) -> Vec<Encryption> {
        std::mem::take(&mut self.encryptions)
    }

    fn drive_repair(&mut self, out: Out) {
        if self.state != State::Open {
            return;
        }
        let is_in_use = self.basis.now.since(self.last_activity) <= Duration::from_secs(5);
        let pace = match (is_in_use, self.is_at_rest()) {
            (true, _) => STATE_EVERY,
            (false, false) => STATE_EVERY_IDLE,
            (false, true) => STATE_EVERY_REST,
        };
        self.peers.refresh_state(self.basis.now, pace, out);
        let (care, mut around) = self.care();
        care.repairer.drive(&mut around, out);
        care.drive_moves(&mut around, out);
        if self.care.repairer.looks_for_end(self.basis.now)
            && self.peers.all_are_inventoried()
            && self.degraded_segments() == 0
            && self.at_risk_entries() == 0
        {
            self.care.repairer.on_restored();
            self.notice(Notice::RedundancyRestored, out);
        }
    }

    /// A shard was made again, or moved. The next is not put off to the next tick.
    fn on_shard_made(&mut self, made: Made, out: Out) {
        match made {
            Made::Nothing => {}
            Made::InPlace => self.go_on_repairing(out),
            Made::Elsewhere(record, done) => {
                self.append_control(record, done, out);
            }
        }
    }

    fn go_on_repairing(&mut self, out: Out) {
        if self.state == State::Open {
            let (care, mut around) = self.care();
            care.repairer.start_repairs(&mut around, out);
            care.drive_moves(&mut around, out);
        }
    }

    pub(crate) fn on_rehomed(&mut self, repair: Token, shard: (SegmentNo, u8), former: Leg, out: Out) {
        let (care, mut around) = self.care();
        care.repairer.on_rehomed(&mut around, repair, shard, former);
        self.go_on_repairing(out);
    }

    fn on_repair_lost(&mut self, repair: Token) {
        let (care, mut around) = self.care();
        care.repairer.on_repair_lost(&mut around, repair);
    }

    fn on_inventory(&mut self, leg: Leg, after: Option<ShardId>, reply: Reply, out: Out) {
        let (care, mut around) = self.care();
        care.repairer.on_inventory(&mut around, leg, after, reply, out);
    }

    /// The free record of these segments is complete: their shards may go.
    pub(crate) fn on_freed(&mut self, segments: Vec<SegmentNo>, out: Out) {
        self.counters.segments_freed += segments.len() as u64;
        let freed = self.checkpointer.on_freed(segments);
        let (care, mut around) = self.care();
        care.repairer.on_freed(&mut around, freed, out);
    }

    pub(crate) fn on_damaged(&mut self, shard: (SegmentNo, u8), leg: Leg, may_repair: bool, out: Out) {
        // The host that serves a volume may have deleted what another one reads beforehand.
        if !self.is_preloading() {
            let (care, mut around) = self.care();
            care.repairer.on_damaged(&mut around, shard, leg, may_repair, out);
        }
    }

    fn drive_cleaner(&mut self, out: Out) {
        let may_begin = self.care.cleaner.is_idle() && !self.checkpointer.is_folding() && !self.shared.is_marking();
        if self.state != State::Open || !may_begin {
            return;
        }
        let movable_bytes = movable_payload_bytes(self.topology());
        let owed_bytes = self.care.cleaner.owed_bytes();
        // Begun at half of it, the checkpoint is done before the cleaner has to wait.
        self.wants.hurry |= owed_bytes > movable_bytes / 2;
        // Nor does a fold that the overlay needs find a pass under way.
        let lets_fold = self.wants.hurry
            && self.drive_checkpointer(out, |checkpointer, around| checkpointer.overlay_wants_fold(around));
        if owed_bytes > movable_bytes || lets_fold {
            return;
        }
        if self.care.cleaner.has_passed_since_fold()
            && self.drive_checkpointer(out, |checkpointer, around| checkpointer.fold_goes_first(around))
        {
            self.wants.fold = true;
            return;
        }
        // In turn, but where the first tier is about to overflow.
        let rotates_first = !self.care.cleaner.has_rotated() || self.rotation.is_full(self.topology());
        let (first, second) = if rotates_first { (Aim::Rotation, Aim::Room) } else { (Aim::Room, Aim::Rotation) };
        for aim in [first, second] {
            let victims = if aim == Aim::Rotation {
                self.take_leaving()
            } else {
                let (care, mut around) = self.care();
                care.cleaner.take_dead(&mut around, &care.repairer)
            };
            if !victims.is_empty() {
                return self.begin_pass(victims, aim, out);
            }
        }
        if self.returns_from_store() {
            return self.find_live(out);
        }
        // What is named elsewhere need not be packed.
        if let Some((no, aim)) = self.next_sharing_pass() {
            return self.begin_pass(vec![no], aim, out);
        }
        let Some(codec) = self.packs_at_rest() else { return };
        let victims = self.take_unpacked(codec);
        if !victims.is_empty() {
            self.begin_pass(victims, Aim::Packing(codec), out);
        }
    }

    fn begin_pass(&mut self, victims: Vec<SegmentNo>, aim: Aim, out: Out) {
        let (care, mut around) = self.care();
        care.cleaner.begin_pass(&mut around, victims, aim, out);
    }

    fn ask_header(&mut self, pass: u64, victim: usize, out: Out) {
        let (care, mut around) = self.care();
        care.cleaner.ask_header(&mut around, pass, victim, out);
    }

    fn on_header(&mut self, pass: u64, victim: usize, reply: &Reply, payload: &Buf, out: Out) {
        let (care, around) = self.care();
        match care.cleaner.on_header(&around, pass, victim, reply, payload) {
            Header::Nothing => {}
            Header::Unreadable(missing) => {
                if let Some((no, index)) = missing {
                    self.want_shard(no, index);
                }
                self.ask_header(pass, victim, out);
            }
            Header::All => self.find_live(out),
            Header::NotWorth(codec) => self.on_not_worth(Some(codec)),
        }
    }

    /// The next slice of the look-up for what lives in what is cleaned.
    pub(crate) fn find_live(&mut self, out: Out) {
        self.care.cleaner.slice_by(None);
        let (mut runs, runs_max) = (0, self.turn.left(&self.basis));
        let looked = self.care.cleaner.find_live(&mut self.map, runs_max, &mut runs);
        self.turn.slice("cleaner: what lives is looked up", runs);
        match looked {
            Looked::On => self.care.cleaner.slice_by(Some(self.basis.next_slice_at())),
            Looked::Needs(leaves) => self.load_leaves(&leaves, LeafWaiter::Cleaner, out),
            Looked::All if let Some((aim, runs)) = self.care.cleaner.found_live() => {
                self.on_live_found(aim, &runs, out)
            }
            Looked::All => {
                let (care, mut around) = self.care();
                care.cleaner.begin_reading(&mut around, &care.repairer);
                self.read_live(out);
            }
        }
    }

    fn on_cleaner_leaf(&mut self, no: LeafNo, leaf: Result<Arc<Leaf>, FetchError>, out: Out) {
        let (care, mut around) = self.care();
        if care.cleaner.on_leaf(&mut around, no, leaf) {
            self.find_live(out);
        }
    }

    fn read_live(&mut self, out: Out) {
        while let Some(CleanRead { pass, part, segment, run, crcs, units, opened }) = self.care.cleaner.next_read() {
            let (by, urgency) = (Recipient::Clean { job: pass, part, opened }, Urgency::Care);
            self.fetch(Wanted { by, urgency, segment, shape: None, run, crcs: Some(crcs), units }, out);
        }
    }

    pub(crate) fn on_clean_part(&mut self, pass: u64, part: u32, result: Result<Buf, FetchError>, out: Out) {
        let (care, mut around) = self.care();
        match care.cleaner.on_part(&mut around, pass, part, result) {
            Read::Nothing => {}
            Read::On => self.read_live(out),
            Read::All(work) => self.write_segment(work, out),
            Read::Seen(runs, blocks) => self.on_seen(runs, &blocks, out),
        }
    }

    fn on_cleaned(&mut self, blocks: u64, payload_bytes: u64, out: Out) {
        let (care, mut around) = self.care();
        let Cleaned { rotated, is_smaller, goes_on } = care.cleaner.on_cleaned(&mut around, blocks, payload_bytes);
        care.repacker.on_cleaned(is_smaller);
        if let Some(victims) = rotated {
            self.rotation.on_rotated(&self.segments, &victims, blocks * BLOCK_BYTES as u64);
        }
        if goes_on {
            self.drive_cleaner(out);
        }
    }

    fn drive_scrub(&mut self, out: Out) {
        if self.state == State::Open {
            let (care, mut around) = self.care();
            care.scrubber.drive(&mut around, out);
        }
    }

    fn on_scrubbed(&mut self, segment: SegmentNo, index: u8, reply: &Reply, out: Out) {
        let is_known = self.segments.get(segment).is_some();
        let (care, mut around) = self.care();
        if let Some(leg) = care.scrubber.on_scrubbed(&mut around, segment, index, reply) {
            self.on_damaged((segment, index), leg, true, out);
        }
        if is_known {
            self.drive_scrub(out);
        }
    }

    fn on_scrub_lost(&mut self, out: Out) {
        self.care.scrubber.on_lost();
        self.drive_scrub(out);
    }

    fn drive_audit(&mut self) {
        if self.state == State::Open {
            let (now, every) = (self.basis.now, self.basis.config.audit_every);
            self.care.audit.drive(now, every, self.log.completed, self.map.layers());
        }
    }

    /// Goes on with the audit that is under way, as far as what it needs is in memory.
    fn walk_map(&mut self, out: Out) {
        if self.state != State::Open {
            return self.care.audit.abandon();
        }
        let guests_are_at_work = self.guests_are_at_work();
        loop {
            let (basis, map, segments, turn) = (&self.basis, &self.map, &self.segments, &mut self.turn);
            match self.care.audit.walk(&mut Walk { basis, guests_are_at_work, map, segments, turn }) {
                Walked::Rests => return,
                Walked::Needs(leaf) => {
                    self.load_leaves(&[leaf], LeafWaiter::Audit, out);
                }
                Walked::All => return self.finish_audit(out),
            }
        }
    }

    fn on_audit_leaf(&mut self, no: LeafNo, leaf: Result<Arc<Leaf>, FetchError>) {
        let (now, is_busy) = (self.basis.now, self.guests_are_at_work());
        self.care.audit.on_leaf(now, is_busy, self.map.directory().get(no), no, leaf);
    }

    fn finish_audit(&mut self, out: Out) {
        let (now, every) = (self.basis.now, self.basis.config.audit_every);
        let heads: Vec<HeadId> = self.clones().map(|(head, _)| head).chain([HeadId::VOLUME]).collect();
        let wrong = self.care.audit.finish(now, every, &self.map, &self.segments, heads.into_iter());
        self.counters.audits += 1;
        if wrong == Wrong::default() {
            return;
        }
        let (segments, shadowed) = (wrong.live.len() as u64, wrong.shadows_too_much);
        self.notice(Notice::Miscounted { segments, shadowed }, out);
        self.map.forget_all_shadowed(&mut self.segments);
        for (no, live) in wrong.live {
            self.segments.set_live(no, live);
        }
        self.wants.free_dead();
    }

    fn on_drain(&mut self, devices: BTreeSet<DeviceId>, out: Out) {
        self.peers.set_draining(devices);
        self.care.mover = Mover::default();
        self.on_legs_changed(out);
    }

    // ---- what there is of nodes, devices and room ----

    pub(crate) fn topology(&self) -> Topology<'_> {
        Topology::new(&self.basis, &self.peers)
    }

    pub(crate) fn placer(&mut self) -> Placer<'_> {
        Placer::new(&self.basis, &mut self.peers, &mut self.rng)
    }

    /// Which segments lack something. The root is known.
    pub(crate) fn survey(&self) -> Ref<'_, Found> {
        self.survey.look(self.topology(), &self.segments)
    }

    fn on_set_aside(&mut self, claims: Vec<Claim>) {
        self.room.set_claims(claims);
        if matches!(self.state, State::Open | State::Closing) {
            self.look_for_room();
        }
    }

    fn look_for_room(&mut self) {
        let undestaged_bytes =
            self.log.waiting_bytes() + self.log.in_flight_bytes() + self.writer.unwritten_destage_bytes();
        let let_in = LetIn { undestaged_bytes, unplaced_bytes: self.unplaced_bytes() };
        self.room.look(Topology::new(&self.basis, &self.peers), let_in);
    }

    /// A guest's data finds no room: when to look again, if the cleaner is expected to make some.
    pub(crate) fn room_expected_at(&mut self) -> Option<Instant> {
        // Something is dead, or may turn out to be, or is on its way to be free.
        let may_be_made = self.segments.dead_per_mille() >= DEAD_PER_MILLE_MIN
            || self.map.is_unfolded()
            || self.map.layers().any_goes()
            || !self.log.all_destaged()
            || !self.checkpointer.is_idle()
            || self.checkpointer.is_freeing()
            || !self.care.cleaner.is_idle();
        self.room.expected_at(self.basis.now, may_be_made)
    }

    /// Guests' requests come before work that can wait.
    pub(crate) fn guests_are_at_work(&self) -> bool {
        self.basis.now.since(self.last_activity) < GUESTS_REST
    }

    /// Whether a shard may be made again, moved or re-coded now.
    pub(crate) fn may_move_data(&self, need: Need) -> bool {
        !self.guests_are_at_work()
            || self.care.repairer.has_few_at_work(need) && self.governor.admits(self.basis.now, need)
    }

    pub(crate) fn reply(&mut self, token: RequestToken, result: Result<BlockData, BlockError>, out: Out) {
        out.push(Effect::Reply(BlockReply { token, result }));
    }

    /// Another opening has a higher epoch: nothing is acknowledged or answered any more.
    pub(crate) fn depose(&mut self, out: Out) {
        if self.state == State::Deposed {
            return;
        }
        self.leave(State::Deposed, BlockError::Deposed, out);
    }

    /// Ends for good: whatever guests wait for is answered by the error. What was acknowledged lies in segments and
    /// log.
    pub(crate) fn leave(&mut self, end: State, error: BlockError, out: Out) {
        self.set_state(end, out);
        self.abandon_quiesce(error, out);
        self.abandon_creation(out);
        self.refuse_all(error, out);
    }

    /// Whatever guests wait for is answered by the error.
    pub(crate) fn refuse_all(&mut self, error: BlockError, out: Out) {
        self.opening = None;
        self.roll = None;
        self.readahead = ReadAhead::default();
        for token in self.reads.tokens() {
            if let Some(request) = self.reads.remove(token).and_then(|op| op.guest()) {
                self.reply(request, Err(error), out);
            }
        }
        for token in self.write_ops.tokens() {
            if let Some(op) = self.write_ops.remove(token) {
                self.reply(op.token, Err(error), out);
            }
        }
        let queued: Vec<BlockRequest> =
            self.waiting.drain(..).map(|(_, request, _)| request).chain(self.writes.drain()).collect();
        for request in queued {
            self.reply(request.token, Err(error), out);
        }
    }

    fn on_answer(&mut self, call: Call, reply: Reply, payload: Buf, out: Out) {
        if self.peers.reconsider(&self.basis, call.node, out) {
            self.on_legs_changed(out);
            self.retry_stalled_fetches(out);
        }
        if matches!(self.state, State::Deposed | State::Closed) {
            self.progress_release(usize::from(matches!(call.purpose, Purpose::Release)), out);
            return;
        }
        if let Reply::Refused(Refusal::StaleEpoch { promised }) = reply
            && promised >= self.epoch()
        {
            if self.state == State::Opening {
                self.ask_who_outbid(out);
            } else {
                self.depose(out);
            }
            return;
        }
        if !matches!(call.purpose, Purpose::Stat) {
            self.rest.stir(self.basis.now);
        }
        self.dispatch(call, reply, payload, out);
        self.progress(out);
    }

    /// A node, or who has asked it, tells how its devices are.
    fn on_devices(&mut self, node: NodeId, devices: Vec<DeviceStat>, out: Out) {
        if self.peers.on_stat(node, devices) {
            self.rest.stir(self.basis.now);
        }
        self.peers.judge_devices(&self.basis, out);
        self.on_legs_changed(out);
        if matches!(self.state, State::Open | State::Closing) {
            self.look_for_room();
        }
    }

    fn dispatch(&mut self, call: Call, reply: Reply, payload: Buf, out: Out) {
        let (node, sent_at) = (call.node, call.sent_at);
        match call.purpose {
            Purpose::Append { ledger, leg, lsn } => self.on_appended(ledger, leg, lsn, sent_at, &reply, out),
            Purpose::CreateLedger { ledger, leg } => self.on_ledger_created(ledger, leg, sent_at, &reply, out),
            Purpose::Fence { leg } => self.on_fenced(leg, &reply, out),
            Purpose::Knows { leg } => self.on_known(leg, &reply, out),
            Purpose::RecoverRead { ledger, leg } => self.on_recover_read(ledger, leg, reply, &payload, out),
            Purpose::Grant { leg, ledger } => self.on_granted(ledger, leg, sent_at, &reply, out),
            Purpose::PutShard { job, shard } => {
                self.drive_writer(out, |writer, around, out| {
                    writer.on_put(around, Put { job, shard, node }, &reply, out)
                });
            }
            Purpose::Fetch { fetch, shard } => self.drive_fetcher(out, |fetcher, around, out| {
                fetcher.on_fetched(around, fetch, shard, &reply, payload, out);
            }),
            Purpose::Header { cleaner, victim } => self.on_header(cleaner, victim, &reply, &payload, out),
            Purpose::RepairRead { repair, shard } => {
                let (care, mut around) = self.care();
                care.repairer.on_repair_read(&mut around, repair, shard, &reply, payload, out);
            }
            Purpose::RepairHeader { repair } => {
                let (care, mut around) = self.care();
                care.repairer.on_repair_header(&mut around, repair, &reply, &payload, out);
            }
            Purpose::RepairClear { repair } => {
                let (care, mut around) = self.care();
                care.repairer.on_repair_clear(&mut around, repair, &reply, out);
            }
            Purpose::RepairPut { repair } => {
                let (care, mut around) = self.care();
                let made = care.repairer.on_repair_put(&mut around, repair, &reply);
                self.on_shard_made(made, out);
            }
            Purpose::RepairMake { repair } => {
                let waited = self.basis.now.since(sent_at);
                let (care, mut around) = self.care();
                let made = care.repairer.on_repair_made(&mut around, repair, waited, &reply, out);
                self.on_shard_made(made, out);
            }
            Purpose::Inventory { device, after } => self.on_inventory(Leg { node, device }, after, reply, out),
            Purpose::LedgerInventory { leg } => self.on_ledger_inventory(leg, &reply, out),
            Purpose::DeleteShards { shards } => {
                let (care, mut around) = self.care();
                care.repairer.on_shards_deleted(&mut around, node, &shards, &reply);
            }
            Purpose::Scrub { segment, index } => self.on_scrubbed(segment, index, &reply, out),
            Purpose::Look { leg } => self.on_looked(leg, &reply, out),
            Purpose::PutRoot { leg, sequence } => self.on_root_put(leg, sequence, &reply, out),
            Purpose::Stat => {
                if let Reply::Stat { devices } = reply {
                    self.on_devices(node, devices, out);
                }
            }
            Purpose::Probe | Purpose::Forget | Purpose::Release => {}
        }
    }

    /// A call whose answer will never come, or came too late to wait for.
    pub(crate) fn on_call_lost(&mut self, call: Call, out: Out) {
        match call.purpose {
            Purpose::Append { ledger, leg, lsn } => self.on_append_lost(ledger, leg, lsn),
            Purpose::CreateLedger { ledger, leg } => self.on_create_lost(ledger, leg, out),
            Purpose::Fence { leg } => self.on_fence_lost(leg),
            Purpose::Knows { leg } => self.on_knows_lost(leg, out),
            Purpose::RecoverRead { ledger, leg } => self.on_recover_read_lost(ledger, leg, out),
            Purpose::Grant { leg, ledger } => self.on_grant_lost(ledger, leg),
            Purpose::PutShard { job, shard } => self.on_put_lost(Put { job, shard, node: call.node }, out),
            Purpose::Fetch { fetch, shard } => {
                self.drive_fetcher(out, |fetcher, around, out| fetcher.on_lost(around, fetch, shard, out));
            }
            Purpose::Header { cleaner, victim } => self.ask_header(cleaner, victim, out),
            Purpose::RepairRead { repair, .. }
            | Purpose::RepairHeader { repair }
            | Purpose::RepairClear { repair }
            | Purpose::RepairPut { repair } => self.on_repair_lost(repair),
            Purpose::RepairMake { repair } => {
                self.peers.on_not_made(call.node, self.basis.now);
                self.on_repair_lost(repair);
            }
            Purpose::Inventory { device, after } => {
                self.on_inventory(Leg { node: call.node, device }, after, Reply::Refused(Refusal::Busy), out);
            }
            Purpose::LedgerInventory { .. } => {}
            // The node will be asked what it holds when it is back.
            Purpose::DeleteShards { .. } => self.peers.recheck(self.basis.now, call.node),
            Purpose::Scrub { .. } => self.on_scrub_lost(out),
            Purpose::Look { leg } => self.on_look_lost(leg, out),
            Purpose::PutRoot { leg, sequence } => self.on_root_put_lost(leg, sequence, out),
            Purpose::Release => self.progress_release(1, out),
            Purpose::Stat | Purpose::Probe | Purpose::Forget => {}
        }
    }

    // ---- nodes that come, go and lag ----

    fn on_node_up(&mut self, node: NodeId, version: u32, devices: Vec<DeviceStat>, out: Out) {
        self.lose_calls(node, out);
        self.peers.on_up(self.basis.now, node, version, devices);
        self.peers.recheck(self.basis.now, node);
        self.on_legs_changed(out);
        self.retry_stalled_fetches(out);
        self.progress(out);
    }

    fn on_node_down(&mut self, node: NodeId, out: Out) {
        self.peers.on_down(self.basis.now, node);
        self.care.repairer.note_degraded();
        self.lose_calls(node, out);
        self.on_legs_changed(out);
        self.replace_shards_on(node, out);
        self.progress(out);
    }

    fn lose_calls(&mut self, node: NodeId, out: Out) {
        let lost: Vec<Token> = self.peers.owed_by(node).map(|(token, _)| token).collect();
        for token in lost {
            if let Some(call) = self.peers.lose(token) {
                self.on_call_lost(call, out);
            }
        }
    }

    /// What is over its bound is hedged, who is far over it is suspected.
    fn judge_calls(&mut self, out: Out) {
        let (writer, now) = (&self.writer, self.basis.now);
        let found = self.peers.judge_if_due(&self.basis, |purpose| writer.put_doublings(purpose));
        let Some(found) = found else { return };
        if found.is_unclear {
            // To tell a slow node from a host that stands still.
            for node in self.peers.ids() {
                self.peers.probe(now, node, out);
            }
        }
        for token in found.late {
            self.on_late(token, out);
        }
        for node in found.suspects {
            self.suspect(node, Worth::Spare, out);
        }
        for (node, (worth, since)) in found.doubted {
            self.doubt(node, worth, since, &found.lags, out);
        }
        self.peers.reconnect_silent(now, out);
    }

    /// A node that would be missed owes something since then. To do without it the log needs another rule, so the
    /// metadata store: it is done without only when it does not even answer a ping, and the store has answered since it
    /// fell silent.
    fn doubt(&mut self, node: NodeId, worth: Worth, since: Instant, lags: &Lags, out: Out) {
        let now = self.basis.now;
        self.peers.probe(now, node, out);
        let silent_since = self.peers.silent_since(node, since);
        if now.since(silent_since) >= PING_MAX {
            self.ask_store(silent_since, out);
        }
        if self.peers.is_hung(now, node, worth, silent_since, lags) && self.root.was_heard_since(silent_since) {
            self.suspect(node, worth, out);
        }
    }

    fn on_late(&mut self, token: Token, out: Out) {
        let Some((call, again)) = self.peers.note_late(token) else { return };
        match call.purpose {
            Purpose::Append { ledger, lsn, .. } => {
                let allowed =
                    self.counters.append_hedges * HEDGE_SHARE <= self.log.completed.0 + HEDGES_FREE * HEDGE_SHARE;
                if allowed {
                    self.hedge_append(ledger, lsn, out);
                }
            }
            Purpose::Fetch { fetch, .. } => {
                let allowed =
                    self.counters.read_hedges * HEDGE_SHARE <= self.counters.reads + HEDGES_FREE * HEDGE_SHARE;
                if allowed || !self.peers.is_usable(call.node) {
                    self.hedge_fetch(fetch, out);
                }
            }
            Purpose::PutShard { job, shard } if again => {
                self.on_put_lost(Put { job, shard, node: call.node }, out);
            }
            // Whether the node is alive decides: a busy disk is waited for, a hung process is not.
            Purpose::PutShard { .. } => self.peers.probe(self.basis.now, call.node, out),
            Purpose::CreateLedger { ledger, leg } => self.on_create_lost(ledger, leg, out),
            _ => self.opening_call_late(&call, out),
        }
    }

    fn suspect(&mut self, node: NodeId, judged_as: Worth, out: Out) {
        if !self.peers.suspect(&self.basis, node, judged_as, out) {
            return;
        }
        self.care.repairer.note_degraded();
        self.on_legs_changed(out);
        self.replace_shards_on(node, out);
        let fetch_of = |call: &Call| if let Purpose::Fetch { fetch, .. } = call.purpose { Some(fetch) } else { None };
        let fetches: Vec<Token> = self.peers.owed_by(node).filter_map(|(_, call)| fetch_of(call)).collect();
        for fetch in fetches {
            self.hedge_fetch(fetch, out);
        }
        let is_waited_for = |call: &Call| {
            matches!(call.purpose, Purpose::CreateLedger { .. } | Purpose::Fence { .. } | Purpose::RecoverRead { .. })
        };
        let owed = self.peers.owed_by(node).map(|(_, call)| call);
        let waited_for: Vec<Call> = owed.filter(|call| is_waited_for(call)).cloned().collect();
        for call in waited_for {
            self.on_call_lost(call, out);
        }
    }

    /// What may have become possible after any event.
    pub(crate) fn progress(&mut self, out: Out) {
        if self.state == State::Opening {
            self.progress_opening(out);
        }
        if matches!(self.state, State::Open | State::Closing) {
            self.complete_entries(out);
            self.tell_of_changes(out);
            self.progress_quiesce(out);
            self.admit_reads(out);
            self.unblock_writes(out);
            self.admit_writes(out);
            self.walk_map(out);
        }
        if self.state == State::Closing {
            self.progress_closing(out);
        }
    }

    fn on_tick(&mut self, out: Out) {
        let slept = self.basis.now.since(self.last_tick);
        self.last_tick = self.basis.now;
        let is_busy = self.is_busy();
        let pace = match (std::mem::replace(&mut self.was_busy, is_busy), self.rest.was_at_rest) {
            (true, _) => TICK_BUSY,
            (false, true) => TICK_REST,
            (false, false) => TICK_IDLE,
        };
        if slept > TICK_LATE + pace {
            // This process was stopped: answers wait in its sockets; judge nobody before they were read.
            self.judge_from = self.basis.now + TICK_BUSY * 5;
        }
        if matches!(self.state, State::Deposed | State::Closed) {
            return self.progress_release(0, out);
        }
        if self.basis.now >= self.judge_from {
            self.judge_calls(out);
        }
        self.peers.ask_after_opening_devices(self.basis.now, out);
        self.renew_grants(out);
        self.serve_granted_reads(out);
        self.rest_readahead();
        if let Some(work) = self.direct.close_late(self.basis.now) {
            self.write_segment(work, out);
        }
        self.ask_for_journal_room(out);
        self.end_packing(out);
        self.resend_in_flight(out);
        self.retry_stalled_fetches(out);
        self.drive_fetcher(out, Fetcher::retry_refused);
        if matches!(self.state, State::Open | State::Closing) {
            self.background(out);
        }
        self.progress(out);
        self.rest.was_at_rest = self.is_at_rest();
    }

    /// Everything that is done by the way while the volume is open.
    fn background(&mut self, out: Out) {
        self.look_for_room();
        self.governor.look(self.basis.now, self.care.repairer.is_at_work());
        self.wants.fold |= self.map.layers().any_goes();
        self.room.ask(self.basis.now, &mut self.peers, out);
        self.drive_handover(out);
        self.drive_roll(out);
        self.drive_destage(out);
        self.drive_creation(out);
        self.drive_slices(out);
        self.wants.checkpoint |= self.holds_lost_records();
        self.drive_checkpointer(out, Checkpointer::look_for_old_metadata);
        self.drive_checkpointer(out, Checkpointer::drive);
        self.drive_cleaner(out);
        self.drive_repair(out);
        self.drive_scrub(out);
        self.drive_audit();
        self.drive_look(out);
        self.drive_domain(out);
        self.drive_root(out);
        self.drive_copies(out);
    }

    /// Asserts what must hold between events (tests and the simulator).
    pub fn verify(&self) {
        self.peers.verify(self.basis.now);
        self.room.verify(self.basis.now);
        self.rotation.verify(&self.basis);
        self.governor.verify();
        self.segments.verify();
        self.map.verify();
        self.log.verify();
        self.care.verify();
        self.writer.verify();
        self.fetcher.verify();
        self.loader.verify();
        self.checkpointer.verify(&self.segments);
        self.direct.verify();
        self.shared.domain.verify();
        if self.basis.is_known() {
            self.survey.verify(self.topology(), &self.segments);
            assert_eq!(
                self.segments.own_numbers(),
                self.root().own_numbers(),
                "the table knows which segments are its own"
            );
        }
    }
}
