//! Opening a volume: take-over, recovery, and the first ledger of the new owner. Also the clean close.
//!
//! Steps, each begun when the one before is done:
//!
//! ```text
//! Loading      read the root record
//! Reaching     wait until a fence set of the open ledger, and legs for a new one, are within reach; ask legs what they know, and
//!              go no further where that is newer than the root: the metadata store was set back
//! Claiming     swap: epoch + 1, our nonce. From here on the old owner is deposed at the root
//! Gathering    fence every leg; delete there what earlier openings left behind without getting to their swap; read what
//!              sound legs hold after the trim point; decide where the log ends
//! Recovering   the log, the newest checkpoint's runs, and replay of what follows it, in slices: see [`super::recovery`]
//! Creating     the new ledger, durably on all its legs; what earlier openings left goes from those that were not fenced
//! Reappending  what lacks copies, under its original LSNs; wait out the old owner's read grants
//! Serving      swap: old ledger sealed at the end, new one open. Only then is anything answered
//! ```
//!
//! Protocol rules 1, 2, 5, 6, 8. Where answers don't suffice, opening waits and says so; it never truncates.

use crate::api::{Effect, Lane, Notice, State};
use crate::controller::{Controller, Out};
use crate::log::window::Entry;
use crate::map::RunLoads;
use crate::owner::recovery::Recovery;
use crate::owner::root::Change;
use crate::peers::{Call, Purpose};
use crate::segment::encrypt::opened_entry;
use holdfast_base::{BLOCK_BYTES, BlockError, Buf, Instant, LedgerId, Lsn, NodeId, VolumeId};
use holdfast_format::ledger::{LedgerRef, Leg};
use holdfast_format::root::Root;
use holdfast_format::wire::{HeldVolume, LedgerState, LogEntry, Refusal, Reply, Request};
use std::collections::{BTreeMap, BTreeSet, VecDeque, btree_map};
use std::time::Duration;

/// How long opening waits for more nodes than it needs.
const REACH_GRACE: Duration = Duration::from_millis(150);

/// How long it waits for answers of more legs than it needs.
const FENCE_GRACE: Duration = Duration::from_millis(60);

/// Refused fences and failed reads are repeated this often.
const RETRY_EVERY: Duration = Duration::from_millis(20);

/// How long closing may take.
const CLOSING_MAX: Duration = Duration::from_secs(10);

/// Log bytes asked of a leg at a time.
const READ_BYTES: u32 = 4 << 20;

/// Entries, and bytes of them, that are on their way to the new ledger at a time: as much as one turn may send.
const REAPPENDS_MAX: usize = 256;
const REAPPEND_BYTES_MAX: u64 = 1 << 20;

/// Why opening waits where the store was set back.
const OLDER: &str = "the metadata are older than what nodes know of the volume: have the newest back (`holdfast meta recover --replace`)";

/// Why opening waits where a leg takes neither the new ledger nor copies.
const NO_ROOM: &str = "a journal has no room for a copy of the volume's log";

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Step {
    Loading,
    /// See [`crate::owner::recovery`].
    Preloading,
    Applying,
    Preloaded,
    Reaching,
    Claiming,
    Gathering,
    Recovering,
    Creating,
    Reappending,
    Serving,
}

/// An entry that legs hold.
#[derive(Debug)]
pub(crate) struct Found {
    pub(super) entry: LogEntry,
    pub(super) payload: Buf,
    /// Which legs of which ledger hold it.
    pub(super) holders: BTreeMap<LedgerId, u8>,
}

#[derive(Debug, PartialEq, Eq, Clone, Copy)]
enum ReadState {
    Asking(Lsn),
    Done,
    Failed,
}

#[derive(Debug)]
pub(crate) struct Opening {
    pub(crate) step: Step,
    pub(crate) is_preload: bool,
    since: Instant,
    /// Legs that were asked what they know; true once they have answered, or never will.
    knows: BTreeMap<Leg, bool>,
    /// The root that legs knew of something newer than.
    doubted: Option<Root>,
    fence_asked: BTreeSet<Leg>,
    /// Legs that were busy (their device is being opened), and when they and failed reads are asked again.
    busy: BTreeSet<Leg>,
    /// When nodes were last asked whether they are there.
    asked_who_at: Option<Instant>,
    retry_at: Instant,
    /// Legs that have promised our epoch, and what they hold: the old ledgers', and later the new one's.
    fenced: BTreeMap<Leg, Vec<LedgerState>>,
    grants_until: Instant,
    reads: BTreeMap<(LedgerId, Leg), ReadState>,
    found: BTreeMap<Lsn, Found>,
    damaged: BTreeSet<(LedgerId, Leg, Lsn)>,
    pub(super) end: Lsn,
    pub(crate) runs: RunLoads,
    pub(super) recovery: Recovery,
    /// When that goes on.
    pub(super) slice_at: Option<Instant>,
    /// Some of the map was read before it began.
    pub(super) was_preloaded: bool,
    new: Option<LedgerRef>,
    created: u8,
    /// From there on entries are yet to be looked at, whether they are to be appended anew.
    choosing: Option<Lsn>,
    reappending: VecDeque<Lsn>,
    reappended: u64,
    /// A leg has refused a copy, or a ledger: until then none is sent.
    reappend_at: Instant,
    /// A node has promised a higher epoch than ours: the root will say to whom.
    outbid: bool,
    /// The root as it was.
    before_claim: Option<Root>,
    waits: Option<&'static str>,
}

impl Opening {
    /// The ledger that is to be the new one.
    pub(crate) fn new_ledger(&self) -> Option<LedgerId> {
        self.new.as_ref().map(|new| new.id)
    }

    /// When the next slice is due.
    pub(crate) fn slice_deadline(&self) -> Option<Instant> {
        self.slice_at.filter(|_| !self.outbid)
    }
}

impl Controller {
    pub(crate) fn begin_opening(&mut self, out: Out) {
        if self.is_preloading() {
            self.end_preload();
        }
        if self.state == State::Opening && self.opening.is_none() {
            self.start_opening(false, out);
        }
    }

    pub(crate) fn start_opening(&mut self, is_preload: bool, out: Out) {
        self.opening = Some(Box::new(Opening {
            step: Step::Loading,
            is_preload,
            since: self.basis.now,
            knows: BTreeMap::new(),
            doubted: None,
            fence_asked: BTreeSet::new(),
            busy: BTreeSet::new(),
            asked_who_at: None,
            retry_at: Instant::ZERO,
            fenced: BTreeMap::new(),
            grants_until: Instant::ZERO,
            reads: BTreeMap::new(),
            found: BTreeMap::new(),
            damaged: BTreeSet::new(),
            end: Lsn::ZERO,
            runs: RunLoads::default(),
            recovery: Recovery::default(),
            slice_at: None,
            was_preloaded: false,
            new: None,
            created: 0,
            choosing: None,
            reappending: VecDeque::new(),
            reappended: 0,
            reappend_at: Instant::ZERO,
            outbid: false,
            before_claim: None,
            waits: None,
        }));
        self.load_root(out);
    }

    pub(crate) fn step(&mut self, step: Step) {
        if let Some(opening) = &mut self.opening {
            opening.step = step;
            opening.since = self.basis.now;
            opening.slice_at = None;
        }
    }

    /// Says, once, why opening doesn't get on. While a root in doubt is looked at again, that is what it waits for.
    pub(crate) fn opening_waits(&mut self, why: &'static str, out: Out) {
        if let Some(opening) = &mut self.opening
            && opening.waits != Some(why)
            && !(opening.step == Step::Reaching && opening.doubted.is_some() && opening.waits == Some(OLDER))
        {
            opening.waits = Some(why);
            out.push(Effect::Notice(Notice::OpenWaits { why }));
        }
    }

    pub(crate) fn on_root_known(&mut self, out: Out) {
        if self.is_preloading() {
            return self.fetch_preload(out);
        }
        self.step(Step::Reaching);
        let found = self.root().clone();
        if let Some(opening) = &mut self.opening {
            opening.knows.clear();
            opening.doubted.take_if(|doubted| *doubted != found);
        }
        self.progress_opening(out);
    }

    pub(crate) fn progress_opening(&mut self, out: Out) {
        let Some(opening) = &self.opening else { return };
        if opening.outbid {
            return self.drive_root(out);
        }
        match opening.step {
            Step::Loading | Step::Claiming | Step::Serving => self.drive_root(out),
            Step::Reaching => self.reach(out),
            Step::Gathering => self.gather(out),
            Step::Preloading | Step::Preloaded => {}
            Step::Applying | Step::Recovering => self.recover(out),
            Step::Creating => self.create_first_ledger(out),
            Step::Reappending => self.reappend(out),
        }
    }

    pub(crate) fn is_outbid(&self) -> bool {
        self.opening.as_ref().is_some_and(|opening| opening.outbid)
    }

    /// A node refuses us for a higher epoch: the root says whose that is.
    pub(crate) fn ask_who_outbid(&mut self, out: Out) {
        let Some(opening) = self.opening.as_mut().filter(|opening| !opening.outbid) else { return };
        opening.outbid = true;
        self.load_root(out);
    }

    /// Nobody promises an epoch that no root had. Where the root still is ours it was set back. Were its epoch raised
    /// again and again, an opening would come to fence and delete what was acknowledged since: the claim is undone.
    pub(crate) fn on_outbid(&mut self, root: &Root, out: Out) {
        if root.instance != self.basis.config.instance {
            return self.depose(out);
        }
        let before = self.opening.as_mut().and_then(|opening| opening.before_claim.take());
        if let Some(before) = before {
            self.swap_root(before, Change::Unclaim, out);
        }
        self.opening_waits(OLDER, out);
    }

    fn old_ledgers(&self) -> Vec<LedgerRef> {
        self.root().ledgers.clone()
    }

    // ---- reaching and claiming ----

    fn reach(&mut self, out: Out) {
        self.ask_who_is_there(out);
        if let Some(open) = self.root().open_ledger().cloned() {
            let mut up = 0;
            for (i, leg) in open.legs.iter().enumerate() {
                if self.has_answered(leg.node) {
                    up |= 1 << i;
                }
            }
            if !open.rule.is_fence_set(&open.legs, up) {
                return self.opening_waits("too few nodes that hold the volume's log are within reach", out);
            }
        }
        self.ask_what_legs_know(out);
        let all_up = self.old_ledgers().iter().flat_map(|l| &l.legs).all(|leg| self.peers.is_usable(leg.node));
        let width = usize::from(self.root().layout.width());
        let waited = self.basis.now.since(self.opening.as_ref().expect("opening").since) >= REACH_GRACE;
        let all_known = self.opening.as_ref().expect("opening").knows.values().all(|is_answered| *is_answered);
        if !waited && (!all_up || !all_known || self.topology().domain_count() < width) {
            return;
        }
        if self.placer().choose_legs().is_none() {
            return self.opening_waits("too few nodes are within reach to write a log", out);
        }
        self.step(Step::Claiming);
        self.opening.as_mut().expect("opening").before_claim = Some(self.root().clone());
        let root = Root {
            epoch: self.root().epoch.next(),
            instance: self.basis.config.instance,
            owner: self.basis.config.host.clone(),
            ..self.root().clone()
        };
        self.swap_root(root, Change::Claim, out);
    }

    /// Legs of the open ledger, where their nodes understand the question.
    fn ask_what_legs_know(&mut self, out: Out) {
        let legs = self.root().open_ledger().map(|open| open.legs.clone()).unwrap_or_default();
        for leg in legs {
            if self.opening.as_ref().expect("opening").knows.contains_key(&leg) || !self.peers.is_usable(leg.node) {
                continue;
            }
            let after = self.basis.config.volume.0.checked_sub(1).map(VolumeId);
            let request = Request::ListVolumes { device: leg.device, after, count_max: 1 };
            if self.peers.understands(leg.node, &request)
                && self.send(leg.node, Lane::Fast, Purpose::Knows { leg }, request, Vec::new(), out).is_some()
            {
                self.opening.as_mut().expect("opening").knows.insert(leg, false);
            }
        }
    }

    pub(crate) fn on_known(&mut self, leg: Leg, reply: &Reply, out: Out) {
        let Some(opening) = self.opening.as_mut().filter(|opening| opening.step == Step::Reaching) else { return };
        opening.knows.insert(leg, true);
        if let Reply::Volumes { volumes, .. } = reply
            && volumes.iter().any(|held| held.volume == self.basis.config.volume && is_newer(held, self.root()))
            && !self.basis.config.mutations.opens_older_root()
        {
            return self.doubt_root(out);
        }
        self.progress_opening(out);
    }

    pub(crate) fn on_knows_lost(&mut self, leg: Leg, out: Out) {
        if let Some(opening) = &mut self.opening {
            opening.knows.insert(leg, true);
        }
        self.progress_opening(out);
    }

    /// Nothing is claimed by a root that is not the newest. It is read again: another host may have claimed the volume
    /// since it was. If not, the store was set back, and is looked at now and then.
    fn doubt_root(&mut self, out: Out) {
        self.step(Step::Loading);
        let found = self.root().clone();
        let doubted = self.opening.as_mut().and_then(|opening| opening.doubted.replace(found));
        if doubted.as_ref() != Some(self.root()) {
            return self.load_root(out);
        }
        self.load_root_later();
        self.opening_waits(OLDER, out);
    }

    /// A connection that looks whole may lead nowhere: only an answer to something asked since counts (rule 5).
    fn has_answered(&self, node: NodeId) -> bool {
        let since = self.opening.as_ref().expect("opening").since;
        self.peers.is_usable(node) && self.peers.has_answered_since(node, since)
    }

    /// Once a tick: an answer of this very moment may be to something asked before.
    fn ask_who_is_there(&mut self, out: Out) {
        let now = self.basis.now;
        let opening = self.opening.as_mut().expect("opening");
        if opening.asked_who_at == Some(now) {
            return;
        }
        opening.asked_who_at = Some(now);
        for node in self.peers.ids() {
            if !self.has_answered(node) {
                self.peers.probe(self.basis.now, node, out);
            }
        }
    }

    pub(crate) fn on_claimed(&mut self, out: Out) {
        self.next_ledger = 0;
        self.segments.restart_numbers();
        self.step(Step::Gathering);
        self.gather(out);
    }

    // ---- gathering ----

    fn gather(&mut self, out: Out) {
        self.retry_refused();
        self.ask_fences(out);
        self.ask_reads(out);
        if self.gathering_goes_on() {
            return;
        }
        match self.find_end() {
            Ok(end) => {
                let opening = self.opening.as_mut().expect("opening");
                opening.end = end;
                let found = std::mem::take(&mut opening.found);
                self.begin_recovery(found, out);
            }
            Err(why) => self.opening_waits(why, out),
        }
    }

    /// Legs that were busy, and reads that failed, have another chance now and then.
    fn retry_refused(&mut self) {
        let now = self.basis.now;
        let opening = self.opening.as_mut().expect("opening");
        if opening.retry_at > now {
            return;
        }
        opening.retry_at = now + RETRY_EVERY;
        for leg in std::mem::take(&mut opening.busy) {
            opening.fence_asked.remove(&leg);
        }
        opening.reads.retain(|_, state| *state != ReadState::Failed);
    }

    fn ask_fences(&mut self, out: Out) {
        let legs: BTreeSet<Leg> = self.old_ledgers().iter().flat_map(|l| l.legs.iter().copied()).collect();
        for leg in legs {
            let opening = self.opening.as_ref().expect("opening");
            if opening.fenced.contains_key(&leg)
                || opening.fence_asked.contains(&leg)
                || !self.peers.is_usable(leg.node)
            {
                continue;
            }
            if self.basis.config.mutations.skip_fence() {
                self.pretend_fenced(leg);
                continue;
            }
            let request = Request::Fence {
                device: leg.device,
                volume: self.basis.config.volume,
                epoch: self.epoch(),
                instance: self.basis.config.instance,
            };
            if self.send(leg.node, Lane::Fast, Purpose::Fence { leg }, request, Vec::new(), out).is_some() {
                self.opening.as_mut().expect("opening").fence_asked.insert(leg);
            }
        }
    }

    /// The mutation "recovery does not fence": reads as if every leg had been fenced.
    fn pretend_fenced(&mut self, leg: Leg) {
        let states = self
            .old_ledgers()
            .iter()
            .filter(|l| l.legs.contains(&leg))
            .map(|l| LedgerState {
                ledger: l.id,
                sound: true,
                acked: Lsn::ZERO,
                trimmed: self.root().trimmed,
                last: Lsn(u64::MAX),
            })
            .collect();
        self.opening.as_mut().expect("opening").fenced.insert(leg, states);
    }

    pub(crate) fn on_fenced(&mut self, leg: Leg, reply: &Reply, out: Out) {
        let now = self.basis.now;
        let Some(opening) = &mut self.opening else { return };
        match reply {
            Reply::Fenced { grant_left_ms, ledgers } => {
                opening.grants_until = opening.grants_until.max(now + Duration::from_millis(*grant_left_ms));
                opening.fenced.insert(leg, ledgers.clone());
                opening.fence_asked.remove(&leg);
                // An opening that left ledgers and died can't name them any more since ours has claimed a higher epoch,
                // and this leg takes nothing from it any more. They go now: there may be no room for our own beside
                // them.
                let ours = opening.new_ledger();
                self.delete_unnamed_ledgers(leg, ledgers, ours, out);
            }
            Reply::Refused(Refusal::Busy) => {
                opening.busy.insert(leg);
            }
            // A leg that can't be fenced is absent. It, too, is asked again now and then: its device may come back.
            _ => {
                opening.busy.insert(leg);
                self.peers.on_device_failed(leg);
            }
        }
        self.progress_opening(out);
    }

    pub(crate) fn on_fence_lost(&mut self, leg: Leg) {
        if let Some(opening) = &mut self.opening {
            opening.fence_asked.remove(&leg);
        }
    }

    /// Everything up to here is needed no more, by what root and legs say.
    pub(super) fn trim_floor(&self) -> Lsn {
        let opening = self.opening.as_ref().expect("opening");
        let states = opening.fenced.values().flatten().map(|s| s.trimmed).max();
        states.unwrap_or(Lsn::ZERO).max(self.root().trimmed)
    }

    fn open_fence_set_reached(&self) -> bool {
        let Some(open) = self.root().open_ledger() else { return true };
        let opening = self.opening.as_ref().expect("opening");
        let mut mask = 0;
        for (i, leg) in open.legs.iter().enumerate() {
            if opening.fenced.contains_key(leg) {
                mask |= 1 << i;
            }
        }
        open.rule.is_fence_set(&open.legs, mask)
    }

    fn ask_reads(&mut self, out: Out) {
        if !self.open_fence_set_reached() {
            return;
        }
        let from = self.trim_floor().next();
        for ledger in self.old_ledgers() {
            for leg in &ledger.legs {
                let opening = self.opening.as_ref().expect("opening");
                let key = (ledger.id, *leg);
                let state = opening.fenced.get(leg).and_then(|s| s.iter().find(|s| s.ledger == ledger.id));
                let (Some(state), false) = (state, opening.reads.contains_key(&key)) else { continue };
                let nothing = state.last < from;
                let opening = self.opening.as_mut().expect("opening");
                if nothing {
                    opening.reads.insert(key, ReadState::Done);
                } else {
                    opening.reads.insert(key, ReadState::Asking(from));
                    self.ask_read(ledger.id, *leg, from, out);
                }
            }
        }
    }

    fn ask_read(&mut self, ledger: LedgerId, leg: Leg, from: Lsn, out: Out) {
        let request = Request::ReadLog {
            device: leg.device,
            volume: self.basis.config.volume,
            ledger,
            from,
            bytes_max: READ_BYTES,
        };
        let purpose = Purpose::RecoverRead { ledger, leg };
        if self.send(leg.node, Lane::Bulk, purpose, request, Vec::new(), out).is_none() {
            self.fail_read(ledger, leg);
        }
    }

    fn fail_read(&mut self, ledger: LedgerId, leg: Leg) {
        if let Some(opening) = &mut self.opening {
            opening.reads.insert((ledger, leg), ReadState::Failed);
        }
    }

    pub(crate) fn on_recover_read(&mut self, ledger: LedgerId, leg: Leg, reply: Reply, payload: &Buf, out: Out) {
        let Some(reference) = self.old_ledgers().into_iter().find(|l| l.id == ledger) else { return };
        let Some(opening) = &mut self.opening else { return };
        let Reply::LogEntries { entries, damaged, more } = reply else {
            self.fail_read(ledger, leg);
            return self.progress_opening(out);
        };
        let bit = 1 << reference.legs.iter().position(|l| *l == leg).expect("a leg of this ledger");
        opening.damaged.extend(damaged.iter().map(|lsn| (ledger, leg, *lsn)));
        let mut last = damaged.iter().copied().max().unwrap_or(Lsn::ZERO);
        let mut at = 0;
        for entry in entries {
            let len = entry.crcs.len() * BLOCK_BYTES;
            let bytes = payload.slice(at..at + len);
            at += len;
            last = last.max(entry.lsn);
            // Beyond its seal a ledger holds nothing, whatever its legs do.
            if reference.sealed.is_some_and(|sealed| entry.lsn > sealed) {
                continue;
            }
            let found = match opening.found.entry(entry.lsn) {
                btree_map::Entry::Occupied(found) => found.into_mut(),
                btree_map::Entry::Vacant(place) => {
                    let lsn = entry.lsn;
                    let Some((entry, payload)) = opened_entry(&self.basis.config, ledger, entry, bytes) else {
                        opening.damaged.insert((ledger, leg, lsn));
                        continue;
                    };
                    place.insert(Found { entry, payload, holders: BTreeMap::new() })
                }
            };
            *found.holders.entry(ledger).or_insert(0) |= bit;
        }
        if more && last > Lsn::ZERO {
            opening.reads.insert((ledger, leg), ReadState::Asking(last.next()));
            self.ask_read(ledger, leg, last.next(), out);
        } else {
            opening.reads.insert((ledger, leg), ReadState::Done);
        }
        self.progress_opening(out);
    }

    pub(crate) fn on_recover_read_lost(&mut self, ledger: LedgerId, leg: Leg, out: Out) {
        self.fail_read(ledger, leg);
        self.progress_opening(out);
    }

    /// Answers are still awaited that may matter.
    fn gathering_goes_on(&self) -> bool {
        let opening = self.opening.as_ref().expect("opening");
        if !self.open_fence_set_reached() {
            return true;
        }
        let waited = self.basis.now.since(opening.since) >= FENCE_GRACE;
        let fencing = !opening.fence_asked.is_empty() && !waited;
        fencing || opening.reads.values().any(|r| matches!(r, ReadState::Asking(_)))
    }

    /// The last LSN that counts: everything up to it is there, the next was provably never acknowledged.
    fn find_end(&self) -> Result<Lsn, &'static str> {
        let opening = self.opening.as_ref().expect("opening");
        let ledgers = &self.root().ledgers;
        // Of a ledger that the root does not name, nothing was ever acknowledged (rule 3): an opening that did not get
        // as far as its swap has appended there what it had found.
        let is_named = |id| ledgers.iter().any(|l| l.id == id);
        let named = opening.fenced.values().flatten().filter(|s| is_named(s.ledger));
        let acked = named.map(|s| s.acked).max().unwrap_or(Lsn::ZERO);
        let sealed = ledgers.iter().filter_map(|l| l.sealed).max().unwrap_or(Lsn::ZERO);
        let floor = self.trim_floor();
        let must_reach = acked.max(sealed).max(floor);
        let follows = |end: Lsn, lsn: &Lsn| if *lsn == end.next() { Ok(*lsn) } else { Err(end) };
        let found = opening.found.range(floor.next()..).map(|(lsn, _)| lsn);
        let (Ok(end) | Err(end)) = found.into_iter().try_fold(floor, follows);
        if end < must_reach {
            return Err("acknowledged log entries are only on nodes that are out of reach");
        }
        match self.proved_unacknowledged(end.next()) {
            true => Ok(end),
            false => Err("too few sound nodes answer to tell where the log ends"),
        }
    }

    fn proved_unacknowledged(&self, lsn: Lsn) -> bool {
        let Some(open) = self.root().open_ledger() else { return true };
        let opening = self.opening.as_ref().expect("opening");
        let mut lacking = 0;
        for (i, leg) in open.legs.iter().enumerate() {
            let Some(states) = opening.fenced.get(leg) else { continue };
            let state = states.iter().find(|s| s.ledger == open.id);
            let sound = state.is_some_and(|s| s.sound);
            let read = opening.reads.get(&(open.id, *leg)) == Some(&ReadState::Done);
            let damaged = opening.damaged.contains(&(open.id, *leg, lsn));
            let blank = state.is_none() && self.basis.config.mutations.absent_leg_counts_as_lacking();
            if blank || sound && read && !damaged {
                lacking |= 1 << i;
            }
        }
        open.rule.proves_unacknowledged(&open.legs, lacking)
    }

    // ---- the new ledger ----

    pub(super) fn create_first_ledger(&mut self, out: Out) {
        let opening = self.opening.as_ref().expect("opening");
        if opening.new.is_some() || self.basis.now < opening.reappend_at {
            return;
        }
        let Some(new) = self.new_ledger_ref() else {
            return self.opening_waits("too few nodes are within reach to write a log", out);
        };
        let opening = self.opening.as_mut().expect("opening");
        opening.new = Some(new.clone());
        opening.created = 0;
        self.clear_legs(&new, out);
        if !self.create_ledger(&new, out) {
            self.opening.as_mut().expect("opening").new = None;
        }
    }

    /// What earlier openings left goes from the new ledger's legs, too, before anything is copied there. Those that
    /// were fenced have told what they hold, and of a new volume there is no log that could have been copied. Once
    /// something was refused all are asked: this opening may have left something as well.
    fn clear_legs(&mut self, new: &LedgerRef, out: Out) {
        let opening = self.opening.as_ref().expect("opening");
        let (was_refused, is_new) = (opening.reappend_at > Instant::ZERO, self.root().ledgers.is_empty());
        let is_asked = |leg: &&Leg| was_refused || !is_new && !opening.fenced.contains_key(leg);
        for leg in new.legs.iter().filter(is_asked).copied().collect::<Vec<_>>() {
            self.list_ledgers(leg, out);
        }
    }

    /// A leg of the new ledger tells what it holds.
    pub(crate) fn note_held(&mut self, leg: Leg, ledgers: &[LedgerState]) {
        if let Some(opening) = &mut self.opening {
            opening.fenced.insert(leg, ledgers.to_vec());
        }
    }

    pub(crate) fn on_first_ledger_created(&mut self, ledger: LedgerId, leg: u8, reply: &Reply, out: Out) {
        let Some(opening) = &mut self.opening else { return };
        let Some(new) = opening.new.clone().filter(|n| n.id == ledger) else { return };
        if *reply != Reply::Done {
            opening.reappend_at = self.basis.now + RETRY_EVERY;
            if *reply == Reply::Refused(Refusal::NoSpace) {
                self.opening_waits(NO_ROOM, out);
            }
            self.give_up_ledger(out);
            self.on_leg_refused_creation(new.legs[usize::from(leg)], reply);
            return;
        }
        opening.created |= 1 << leg;
        if u32::from(opening.created) == (1_u32 << new.legs.len()) - 1 && opening.step == Step::Creating {
            self.open_ledger(&new);
            self.step(Step::Reappending);
            let opening = self.opening.as_mut().expect("opening");
            (opening.choosing, opening.reappending) = (Some(self.log.first()), VecDeque::new());
            self.on_legs_changed(out);
            self.reappend(out);
        }
    }

    pub(crate) fn on_first_ledger_lost(&mut self, ledger: LedgerId, _leg: u8, _out: Out) {
        if let Some(opening) = &mut self.opening
            && opening.step == Step::Creating
            && opening.new.as_ref().is_some_and(|n| n.id == ledger)
        {
            opening.new = None;
        }
    }

    /// Entries that fewer answering legs hold than their rule asks are appended anew, and those that were appended to a
    /// ledger that was given up since. They are looked for in slices: true when all are known.
    fn choose_reappends(&mut self) -> bool {
        let (now, left) = (self.basis.now, self.recovers_at_once());
        let opening = self.opening.as_mut().expect("opening");
        let Some(from) = opening.choosing else { return true };
        if opening.slice_at.is_some_and(|at| at > now) {
            return false;
        }
        let new = self.log.open.as_ref().expect("just created").id;
        let next = Lsn(from.0.saturating_add(left as u64)).min(self.log.next_lsn());
        let some = self.log.iter_from(from).take_while(|(lsn, _)| *lsn < next);
        let lacking: Vec<Lsn> = some.filter(|(_, e)| self.is_to_be_copied(e)).map(|(lsn, _)| lsn).collect();
        self.turn.slice("opening: what lacks copies is looked for", (next.0 - from.0) as usize);
        for lsn in &lacking {
            self.log.give_to(*lsn, new);
        }
        let (is_done, at) = (next == self.log.next_lsn(), self.basis.next_slice_at());
        let opening = self.opening.as_mut().expect("opening");
        opening.reappended += lacking.len() as u64;
        opening.reappending.extend(lacking);
        opening.choosing = (!is_done).then_some(next);
        opening.slice_at = (!is_done).then_some(at);
        is_done
    }

    fn is_to_be_copied(&self, entry: &Entry) -> bool {
        !self.root().ledgers.iter().any(|ledger| ledger.id == entry.ledger) || self.is_at_risk(entry)
    }

    fn reappend(&mut self, out: Out) {
        let open = self.log.open.as_ref().expect("created");
        if open.preferred == 0 {
            // Its legs are gone again: begin with another ledger.
            self.give_up_ledger(out);
            self.step(Step::Creating);
            return self.create_first_ledger(out);
        }
        let (rule, legs, preferred) = (open.rule, open.legs.clone(), open.preferred);
        if !self.choose_reappends() {
            return;
        }
        let mut unsent = Vec::new();
        let opening = self.opening.as_mut().expect("opening");
        while let Some(lsn) = opening.reappending.front() {
            let entry = self.log.get(*lsn).expect("in the window");
            if !rule.is_ack_set(&legs, entry.have) {
                break;
            }
            let lsn = opening.reappending.pop_front().expect("just seen");
            self.log.get_mut(lsn).expect("in the window").encrypted = None;
        }
        let may_send = self.basis.now >= opening.reappend_at;
        let mut bytes = 0;
        for lsn in opening.reappending.iter().take(REAPPENDS_MAX).filter(|_| may_send) {
            let entry = self.log.get(*lsn).expect("in the window");
            if entry.sent & preferred != preferred {
                unsent.push(*lsn);
            }
            bytes += entry.size_bytes();
            if bytes >= REAPPEND_BYTES_MAX {
                break;
            }
        }
        let done = opening.reappending.is_empty() && self.basis.now >= opening.grants_until;
        for lsn in unsent {
            self.send_entry(lsn, 0, out);
        }
        if done && !self.root.is_swapping() {
            self.serve(out);
        }
    }

    /// The ledger that was to be the new one never will be: it takes no room where it can be reached.
    fn give_up_ledger(&mut self, out: Out) {
        let Some(new) = self.opening.as_mut().and_then(|opening| opening.new.take()) else { return };
        for leg in new.legs.into_iter().filter(|leg| self.peers.is_usable(leg.node)).collect::<Vec<_>>() {
            self.delete_ledger(leg, new.id, out);
        }
    }

    /// A leg has no room for a copy, or no time: it is asked again, not at once. Where others have room, another ledger
    /// is begun.
    pub(crate) fn on_reappend_refused(&mut self, (ledger, leg): (LedgerId, u8), refusal: Refusal, out: Out) {
        // Once the root is to name the ledger it is not given up.
        let Some(opening) = self.opening.as_mut().filter(|o| o.step == Step::Reappending) else { return };
        let is_paused = self.basis.now < opening.reappend_at;
        opening.reappend_at = self.basis.now + RETRY_EVERY;
        if refusal != Refusal::NoSpace || is_paused {
            return;
        }
        // What was to be deleted may not have been: connections break, and nodes are busy.
        let (ours, fenced) = (opening.new_ledger(), opening.fenced.clone());
        for (leg, ledgers) in &fenced {
            self.delete_unnamed_ledgers(*leg, ledgers, ours, out);
        }
        self.note_journal_fill(ledger, leg, u8::MAX);
        if self.finds_roomier_legs() {
            self.give_up_ledger(out);
            return self.step(Step::Creating);
        }
        self.opening_waits(NO_ROOM, out);
    }

    fn serve(&mut self, out: Out) {
        self.step(Step::Serving);
        let opening = self.opening.as_ref().expect("opening");
        let (end, new) = (opening.end, opening.new.clone().expect("created"));
        let mut root = self.root().clone();
        if let Some(open) = root.ledgers.last_mut().filter(|l| l.sealed.is_none()) {
            open.sealed = Some(end);
        }
        root.trimmed = self.log.trimmed;
        // Those of which everything was copied are needed no more, and fill journals.
        let holds = |ledger: &LedgerRef| self.log.held().any(|(id, _, count)| id == ledger.id && count > 0);
        root.ledgers.retain(|l| l.sealed.is_none_or(|sealed| sealed > root.trimmed) && holds(l));
        root.ledgers.push(new);
        root.serving = self.basis.config.instance;
        root.checkpoint = self.checkpointer.durable().clone();
        self.swap_root(root, Change::Serve, out);
    }

    pub(crate) fn on_serving(&mut self, out: Out) {
        let opening = self.opening.take().expect("opening");
        let named = self.root().open_ledger().map(|ledger| ledger.id);
        assert_eq!(named, self.log.open.as_ref().map(|open| open.id), "what takes appends is what the root names");
        self.basis.opened_at = self.basis.now;
        self.shared.on_serving(&self.basis);
        self.on_domain_serving();
        self.set_state(State::Open, out);
        self.survey.begin(&self.basis);
        let entries = self.log.len() as u64;
        let notice =
            Notice::Recovered { epoch: self.epoch(), last: opening.end, entries, reappended: opening.reappended };
        self.notice(notice, out);
        self.care.repairer.note_degraded();
        self.checkpointer.rest(self.basis.now);
        self.last_activity = self.basis.now;
        self.on_legs_changed(out);
        self.cut_off_end(out);
        for (of, request, urgency) in std::mem::take(&mut self.waiting) {
            self.on_request(of, request, urgency, out);
        }
    }

    /// While opening, a hung node is left out rather than waited for.
    pub(crate) fn opening_call_late(&mut self, call: &Call, out: Out) {
        if self.opening.is_none() {
            return;
        }
        if let Purpose::RecoverRead { ledger, leg } = call.purpose
            && !self.peers.is_usable(call.node)
        {
            self.on_recover_read_lost(ledger, leg, out);
        }
    }

    // ---- closing ----

    pub(crate) fn begin_closing(&mut self, out: Out) {
        match self.state {
            State::Open => {
                self.abandon_creation(out);
                self.close_by = Some(self.basis.now + CLOSING_MAX);
                self.set_state(State::Closing, out);
                self.end_quiesce(false, out);
                self.progress(out);
            }
            State::Opening => self.leave(State::Closed, BlockError::ShuttingDown, out),
            State::Closing | State::Closed | State::Deposed => {}
        }
    }

    /// Closed once everything is destaged and a checkpoint covers it: a clean volume's log is empty. Where that can't
    /// be, on a full grid or with too few nodes, the log keeps the rest for the next owner, as after a crash.
    pub(crate) fn progress_closing(&mut self, out: Out) {
        let quiet = self.write_ops.is_empty() && self.writes.is_empty() && self.reads.is_empty();
        let destaged = self.log.first_undestaged() > self.log.completed;
        let idle = self.writer.is_empty() && self.direct.is_empty() && self.checkpointer.is_idle();
        let is_trimmed = self.log.trims_at.is_none();
        let is_clean = quiet && destaged && is_trimmed && idle && !self.wants.checkpoint && self.log.in_flight() == 0;
        if is_clean || self.close_by.is_some_and(|by| by <= self.basis.now) {
            self.leave(State::Closed, BlockError::ShuttingDown, out);
        }
    }
}

/// Whether a leg knows of something that came after the root. An epoch is promised, and a root of it copied, only after
/// the root has it; and in an epoch a ledger takes entries only after the root names it.
fn is_newer(held: &HeldVolume, root: &Root) -> bool {
    let known = held.root.map_or(held.promised, |copy| copy.epoch.max(held.promised));
    let later = |open: &LedgerRef| {
        held.ledgers
            .iter()
            .any(|l| l.ledger.epoch == open.id.epoch && l.ledger > open.id && l.last.max(l.trimmed) > Lsn::ZERO)
    };
    known > root.epoch || root.open_ledger().is_some_and(later)
}
