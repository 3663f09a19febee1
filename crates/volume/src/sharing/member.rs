//! A member of a sharing domain: what it tells the store of what it holds, and what it names of the store's segments in
//! place of its own (protocol rule 28).
//!
//! States: alone -> asking (the store's root is to name this volume) -> joined (the volume's own root names the store) ->
//! publishing (what it names is in its record of the metadata store) -> sharing.
//!
//! **The record** says which of the store's segments the volume names, as of which state of the store's catalogue. It is
//! written by compare-and-swap, and never over one of a later epoch of the volume. Nothing is shared before the first one
//! of an opening is written: from then on no owner before it writes one.
//!
//! **To leave** it takes no offers, and the cleaner copies back what it names. When a checkpoint is durable in which nothing is
//! named, its record says that it has left; then its root forgets the store. It is no member again before the store has
//! taken that record back: what the store said earlier counts for nothing.
//!
//! **A state of the catalogue** is taken on when it is heard of. From then on nothing is named that was offered in an
//! earlier one. A record tells it when a checkpoint is durable that has all that was shared before.
//!
//! Limits: prints of [`REPORTED_MAX`] segments are kept; for others the store's offer is of no use, and they are printed
//! again. Messages may be lost: what is asked for is asked again.

use super::printer::ByPosition;
use crate::care::LiveRun;
use holdfast_base::{BlockCrc, Epoch, Instant, Key, Lsn, MetaReply, MetaRequest, MetaVersion, VolumeId};
use holdfast_format::record::{SegmentNo, Share, SharedExtent, SharedRun, Source};
use holdfast_format::sharing::{CatalogueNo, NOBODY, Names, SegmentRanges, dependent_key};
use holdfast_format::talk::{Membership, Offer, Print};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

// In rests of the printer's walk ([`Config::repack_every`](crate::Config::repack_every)), which are ten seconds:

/// What nobody answers is asked again ten times in one.
const ASKS: u32 = 10;

/// That other segments are named is told so long after the last time.
const CHANGED_AFTER: u32 = 6;

/// Segments whose prints are kept.
const REPORTED_MAX: usize = 256;

/// Offers that wait: a store sends them faster than they are taken where it has much that is alike.
const TAKES_MAX: usize = 64;

/// A report of which something may come yet is told again after a third of one, so often at most.
const AGAINS: u32 = 3;
const TRIES_MAX: u8 = 5;

/// A segment is read again so often at most because its store was late to say what it wants.
const LATE_MAX: u8 = 16;

/// What was told of a segment.
#[derive(Debug)]
struct Reported {
    /// What is not named in the store yet.
    prints: ByPosition,
    at: Instant,
    tries: u8,
    /// How often its blocks were wanted when they were gone.
    times_late: u8,
    /// Nothing comes of it: the store has heard, wants nothing, and has nothing to offer.
    is_settled: bool,
}

/// Where its record in the metadata store stands.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
enum Record {
    #[default]
    Unknown,
    /// Asked for, or being written.
    Asked { at: Instant, names: Option<Names>, changes: u64 },
    /// Its version, and what it says where this opening wrote it.
    Known { version: MetaVersion, names: Option<Names> },
}

#[derive(Debug, Default)]
pub(crate) struct Member {
    /// The store of the domain that the volume is to be in.
    pub(crate) wanted: Option<VolumeId>,
    membership: Option<Membership>,
    asked_at: Option<Instant>,
    /// Taken on, with the last record that may have shared in an earlier one.
    catalogue: Option<(CatalogueNo, Lsn)>,
    record: Record,
    /// This opening has written it.
    has_published: bool,
    /// It leaves its domain, or did in this opening.
    leaves: bool,
    has_once_left: bool,
    reported: BTreeMap<SegmentNo, Reported>,
    order: VecDeque<SegmentNo>,
    takes: VecDeque<(SegmentNo, Box<Offer>)>,
    /// What lives in its segment is being looked up.
    taking: Option<(SegmentNo, Box<Offer>)>,
    /// The store vacates these: what is named of them is being copied back.
    pub(crate) returns: BTreeSet<SegmentNo>,
    /// When it was published last, and as of how many changes.
    told: (Instant, u64),
    /// The metadata store is not asked before.
    not_before: Instant,
    pub(crate) pace: Duration,
    /// See [`Mutations`](crate::Mutations).
    pub(crate) takes_old_offers: bool,
    /// Of the last record that shares.
    shared_at: Lsn,
    pub(crate) shared_blocks: u64,
    /// Records that shared.
    pub(crate) shares: u64,
}

/// What a member publishes for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Opening {
    pub(crate) member: VolumeId,
    pub(crate) epoch: Epoch,
    /// A checkpoint is durable that has all up to there.
    pub(crate) durable: Lsn,
    /// Another number when what is named may be something else.
    pub(crate) changes: u64,
}

/// What is to be asked of the metadata store.
pub(crate) type MetaAsk = Option<MetaRequest>;

impl Member {
    pub(crate) fn is_at_rest(&self) -> bool {
        let nothing_comes = self.reported.values().all(|of| of.is_settled || of.tries >= TRIES_MAX);
        self.takes.is_empty()
            && self.returns.is_empty()
            && nothing_comes
            && !matches!(self.record, Record::Asked { .. })
    }

    pub(crate) fn membership(&self) -> Option<&Membership> {
        self.membership.as_ref()
    }

    /// The volume is open: whatever its log has, it may have shared up to there.
    pub(crate) fn on_serving(&mut self, last: Lsn) {
        self.shared_at = last;
    }

    /// Whether to ask the store to be named, now.
    pub(crate) fn asks_to_join(&mut self, now: Instant) -> bool {
        let is_due = self.membership.is_none() && self.asked_at.is_none_or(|at| now.since(at) >= self.pace / ASKS);
        if is_due {
            self.asked_at = Some(now);
        }
        is_due
    }

    /// It is to leave.
    pub(crate) fn leave(&mut self) {
        (self.leaves, self.has_once_left, self.wanted, self.taking) = (true, true, None, None);
        // Nothing comes of what it told; and all is copied back.
        self.takes.clear();
        self.returns.clear();
        self.reported.clear();
        self.order.clear();
    }

    /// It is to be a member; of which one that was about to leave is sure only when it has written its record again, since a
    /// swap that was under way may still win. True where it was about to leave, or had left, perhaps another store: of this one
    /// it knows nothing.
    pub(crate) fn join(&mut self, store: VolumeId) -> bool {
        self.wanted = Some(store);
        let has_left = std::mem::take(&mut self.leaves);
        if has_left {
            (self.membership, self.has_published, self.record) = (None, false, Record::Unknown);
            self.catalogue = None;
        }
        has_left
    }

    pub(crate) fn on_joined(&mut self, membership: Membership) {
        self.membership = Some(membership);
        self.hear(membership.catalogue);
    }

    /// The catalogue has come to that state.
    pub(crate) fn hear(&mut self, no: CatalogueNo) {
        // Not before its own record is known: that may tell of a later one.
        if let Some((known, since)) = &mut self.catalogue
            && no > *known
        {
            let is_of_another_owner = no.epoch > known.epoch;
            (*known, *since) = (no, self.shared_at);
            if is_of_another_owner {
                self.tell_again();
            }
        }
    }

    /// The store has another owner, who was told of nothing yet.
    fn tell_again(&mut self) {
        for of in self.reported.values_mut() {
            (of.is_settled, of.tries) = (false, 0);
        }
    }

    // ---- the record ----

    /// What is to be asked of the metadata store next, if anything. `names`: of the store, at least.
    pub(crate) fn publish(&mut self, now: Instant, of: Opening, names: impl FnOnce() -> SegmentRanges) -> MetaAsk {
        let Opening { member, epoch, durable, changes } = of;
        let membership = self.membership.as_ref()?;
        let key = dependent_key(membership.store.volume, member);
        let Record::Known { version, names: said } = &self.record else { return self.ask_for_record(now, key) };
        let (catalogue, since) = self.catalogue.filter(|_| now >= self.not_before)?;
        if said.as_ref().is_some_and(Names::has_left) {
            return None;
        }
        let (version, is_known) = (*version, self.has_published);
        let is_said = is_known && said.as_ref().is_some_and(|said| said.catalogue >= catalogue);
        let (told_at, told) = self.told;
        let are_others = changes != told && now.since(told_at) >= self.pace * CHANGED_AFTER;
        if is_said && !are_others || durable < since {
            return None;
        }
        let names = Names { epoch, catalogue, ranges: names() };
        let value = Some(names.encode());
        self.record = Record::Asked { at: now, names: Some(names), changes };
        Some(MetaRequest::Swap { key, expect: version, value, guard: None })
    }

    /// Each is answered; one that takes long is not asked again at once, since then its answer would be late for ever.
    fn ask_for_record(&mut self, now: Instant, key: String) -> MetaAsk {
        let is_asked = matches!(self.record, Record::Asked { at, .. } if now.since(at) < self.pace);
        if is_asked || now < self.not_before {
            return None;
        }
        self.record = Record::Asked { at: now, names: None, changes: self.told.1 };
        Some(MetaRequest::Get { key })
    }

    /// What is to be asked so that its record at that store says that it has left: it names nothing, and a checkpoint says
    /// so.
    pub(crate) fn say_that_it_left(&mut self, now: Instant, of: Opening, store: VolumeId) -> MetaAsk {
        let key = dependent_key(store, of.member);
        let Record::Known { version, names } = &self.record else { return self.ask_for_record(now, key) };
        if of.durable < self.shared_at || now < self.not_before || names.as_ref().is_some_and(Names::has_left) {
            return None;
        }
        let (expect, names) = (*version, Names::of_one_that_left(of.epoch));
        let value = Some(names.encode());
        self.record = Record::Asked { at: now, names: Some(names), changes: of.changes };
        Some(MetaRequest::Swap { key, expect, value, guard: None })
    }

    /// Its record says so.
    pub(crate) fn has_left(&self) -> bool {
        let said = matches!(&self.record, Record::Known { names: Some(names), .. } if names.has_left());
        self.leaves && said
    }

    /// An answer; `epoch` is this opening's.
    pub(crate) fn on_meta(&mut self, epoch: Epoch, reply: MetaReply) {
        let Record::Asked { at, names: asked, changes } = &mut self.record else { return };
        let (at, changes) = (*at, *changes);
        match reply {
            MetaReply::Swapped { version } => {
                let names = asked.take();
                self.has_published = names.is_some();
                self.told = (at, changes);
                self.record = Record::Known { version, names };
            }
            MetaReply::Record { version, value } | MetaReply::Conflict { version, value } => {
                let found = value.as_deref().map(Names::decode);
                let said = found.and_then(Result::ok);
                if said.as_ref().is_some_and(|said| said.epoch > epoch) {
                    // A later opening has the volume: this one shares nothing any more.
                    return self.know_nothing(at);
                }
                let heard = self.membership.as_ref().map(|membership| membership.catalogue);
                let is_no_member =
                    |said: &Names| said.has_left() || said.epoch == NOBODY && heard < Some(said.catalogue);
                if !self.leaves && said.as_ref().is_some_and(is_no_member) {
                    // The store's word is older than that: it is to say anew that its root names this volume.
                    return self.know_nothing(at);
                }
                let newest = said.as_ref().filter(|said| !said.has_left()).map(|said| said.catalogue).max(heard);
                if self.catalogue.is_none() {
                    self.catalogue = newest.map(|no| (no, self.shared_at));
                } else if let Some(no) = newest {
                    self.hear(no);
                }
                // An opening before this one may have said that: nothing was shared since.
                let names = said.filter(|said| said.epoch == epoch || said.has_left());
                // The swap has won, and nobody heard; or it is one from before it was about to leave.
                self.has_published |= names.is_some() && !self.has_once_left;
                self.record = Record::Known { version, names };
            }
            MetaReply::GuardFailed { .. } | MetaReply::Unknown => {
                self.record = Record::Unknown;
                self.not_before = at + self.pace / ASKS;
            }
        }
    }

    fn know_nothing(&mut self, asked_at: Instant) {
        (self.membership, self.has_published, self.record) = (None, false, Record::Unknown);
        self.not_before = asked_at + self.pace / ASKS;
    }

    /// Whether anything may be shared: the first record of this opening is written.
    pub(crate) fn may_share(&self) -> bool {
        self.membership.is_some() && self.has_published && !self.leaves
    }

    // ---- what is shared ----

    /// What is told of it is kept for what the store has to say.
    pub(crate) fn remember(&mut self, now: Instant, segment: SegmentNo, prints: ByPosition) {
        let times_late = self.reported.get(&segment).map_or(0, |before| before.times_late);
        let reported = Reported { prints, at: now, tries: 0, times_late, is_settled: false };
        if self.reported.insert(segment, reported).is_none() {
            self.order.push_back(segment);
        }
        while self.order.len() > REPORTED_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.reported.remove(&oldest);
        }
    }

    /// The store has heard of a segment, and so much follows.
    pub(crate) fn on_heard(&mut self, segment: SegmentNo, is_all: bool) {
        if let Some(reported) = self.reported.get_mut(&segment) {
            reported.is_settled = is_all;
        }
    }

    /// Whether it is worth to print a segment again of whose blocks the store has told too late that it wants them.
    pub(crate) fn tries_again(&mut self, segment: SegmentNo) -> bool {
        let reported = self.reported.get_mut(&segment).filter(|of| of.times_late < LATE_MAX);
        reported.map(|of| of.times_late += 1).is_some()
    }

    /// A report that is to be told again.
    pub(crate) fn report_again(&mut self, now: Instant) -> Option<(SegmentNo, Vec<Print>)> {
        let pace = self.pace;
        let is_due = |of: &Reported| !of.is_settled && of.tries < TRIES_MAX && now.since(of.at) >= pace / AGAINS;
        let (segment, of) = self.reported.iter_mut().find(|(_, of)| is_due(of))?;
        (of.tries, of.at) = (of.tries + 1, now);
        Some((*segment, of.prints.values().copied().collect()))
    }

    /// An offer of the store. A segment that is to be printed first, if its prints are forgotten.
    pub(crate) fn on_offer(&mut self, segment: SegmentNo, offer: Box<Offer>) -> Option<SegmentNo> {
        self.hear(offer.catalogue);
        if !self.reported.contains_key(&segment) {
            return Some(segment);
        }
        if self.takes.len() < TAKES_MAX {
            self.takes.push_back((segment, offer));
        }
        None
    }

    /// Whether what was offered then may still be named.
    fn is_current(&self, offer: &Offer) -> bool {
        self.takes_old_offers || self.catalogue.is_some_and(|(known, _)| offer.catalogue >= known)
    }

    /// The next segment with blocks that the store has.
    pub(crate) fn next_take(&mut self) -> Option<SegmentNo> {
        while let Some((segment, offer)) = self.takes.pop_front() {
            if self.is_current(&offer) && self.reported.contains_key(&segment) {
                self.taking = Some((segment, offer));
                return Some(segment);
            }
        }
        None
    }

    /// What lives in it is known: what of that the store's segments have, in one record. `are_crcs`: the map's checksums
    /// are of the blocks, and none of what is encrypted.
    pub(crate) fn share(&mut self, runs: &[LiveRun], are_crcs: bool) -> Option<Share> {
        let (segment, offer) = self.taking.take().filter(|(_, offer)| self.is_current(offer))?;
        let prints = &mut self.reported.get_mut(&segment)?.prints;
        let share = shared_of(segment, runs, prints, &offer, are_crcs);
        let offered: BTreeSet<&Print> = offer.prints.iter().collect();
        prints.retain(|_, fingerprint| !offered.contains(fingerprint));
        self.shared_blocks += share.extents.iter().map(|extent| u64::from(extent.blocks)).sum::<u64>();
        Some(share).filter(|share| !share.extents.is_empty())
    }

    pub(crate) fn shared_at(&self) -> Lsn {
        self.shared_at
    }

    /// The record that shares has this LSN.
    pub(crate) fn on_shared(&mut self, lsn: Lsn) {
        self.shared_at = self.shared_at.max(lsn);
        self.shares += 1;
    }

    pub(crate) fn verify(&self) {
        assert_eq!(self.order.len(), self.reported.len(), "prints are kept of what is in order");
        assert!(self.takes.len() <= TAKES_MAX && self.order.len() <= REPORTED_MAX);
    }
}

/// A block that lives: its key, where it lies, and its checksum.
type Block = (u64, u32, BlockCrc);

fn blocks_of(run: &LiveRun) -> impl Iterator<Item = Block> {
    let crcs = run.crcs.as_slice().to_vec();
    run.positions().into_iter().zip(crcs).enumerate().map(|(i, (position, crc))| (run.key + i as u64, position, crc))
}

/// A run of blocks that the store has, one behind the other in both.
struct Alike {
    key: u64,
    source: Source,
    /// Of the offer's blocks, the first.
    at: u32,
    blocks: u32,
}

/// Extents of what lives that the offered segment has, too.
fn shared_of(segment: SegmentNo, runs: &[LiveRun], prints: &ByPosition, offer: &Offer, are_crcs: bool) -> Share {
    let offered: BTreeMap<Print, u32> = offer.prints.iter().copied().zip(0..).collect();
    let mut alike: Vec<Alike> = Vec::new();
    for run in runs {
        let is_packed = run.is_packed();
        // The block behind the run that is being put together.
        let mut next = None;
        for (key, position, crc) in blocks_of(run) {
            let found = prints.get(&position).and_then(|fingerprint| offered.get(fingerprint)).copied();
            let found = found.filter(|at| !are_crcs || offer.crcs[*at as usize] == crc);
            // Where a packed unit was, lengths of the store's don't tell: each is an extent by itself.
            match (found, alike.last_mut().filter(|_| found.is_some() && next == found && !is_packed)) {
                (_, Some(last)) => last.blocks += 1,
                (Some(at), None) => {
                    let source = match is_packed {
                        true => Source::Packed { segment, granule: position },
                        false => Source::Segment { segment, block: position },
                    };
                    alike.push(Alike { key, source, at, blocks: 1 });
                }
                (None, None) => {}
            }
            next = found.map(|at| at + 1);
        }
    }
    let starts: Vec<u32> = match &offer.run {
        SharedRun::Plain { block } => (*block..).take(offer.prints.len()).collect(),
        SharedRun::Packed { granule, lengths } => lengths.units_after(*granule).map(|unit| unit.start).collect(),
    };
    let extent = |Alike { key, source, at, blocks }: Alike| {
        let (start, range) = (starts[at as usize], at as usize..(at + blocks) as usize);
        let run = match &offer.run {
            SharedRun::Plain { .. } => SharedRun::Plain { block: start },
            SharedRun::Packed { lengths, .. } => {
                SharedRun::Packed { granule: start, lengths: lengths.slice(u64::from(at), u64::from(blocks)) }
            }
        };
        let (segment, crcs) = (offer.shared.segment, offer.crcs[range].to_vec());
        SharedExtent { key: Key(key), blocks, source, segment, run, crcs }
    };
    Share { segments: vec![offer.shared.clone()], extents: alike.into_iter().map(extent).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::{Crcs, Stored};
    use holdfast_base::DeviceId;
    use holdfast_base::NodeId;
    use holdfast_format::geometry::{Geometry, Layout};
    use holdfast_format::ledger::Leg;
    use holdfast_format::packing::{StoredLength, StoredLengths};
    use holdfast_format::record::SharedSegment;
    use holdfast_format::sharing::{STORE_EPOCHS, Store};

    const SEGMENT: SegmentNo = SegmentNo { epoch: Epoch(3), counter: 7 };
    const PACE: Duration = Duration::from_secs(10);

    fn no(counter: u64) -> CatalogueNo {
        CatalogueNo { epoch: STORE_EPOCHS, counter }
    }

    fn opening(epoch: u64, durable: u64, changes: u64) -> Opening {
        Opening { member: VolumeId(3), epoch: Epoch(epoch), durable: Lsn(durable), changes }
    }

    fn at(seconds: u64) -> Instant {
        Instant::ZERO + Duration::from_secs(1000 + seconds)
    }

    fn offer(catalogue: u64, prints: &[u128]) -> Box<Offer> {
        let homes = [1, 2].map(|n| Leg { node: NodeId(n), device: DeviceId(1) }).to_vec();
        let segment = SegmentNo { epoch: STORE_EPOCHS, counter: 40 };
        let shared =
            SharedSegment { segment, geometry: Geometry::new(Layout::Mirror { copies: 2 }, 32), homes, units: None };
        let crcs = (0..prints.len() as u32).map(|i| 100 + i).collect();
        let prints = prints.iter().copied().map(Print).collect();
        Box::new(Offer { catalogue: no(catalogue), shared, run: SharedRun::Plain { block: 4 }, prints, crcs })
    }

    fn run(key: u64, stored: Stored, crcs: &[u32]) -> LiveRun {
        LiveRun { key, segment: SEGMENT, stored, crcs: Crcs::new(crcs) }
    }

    /// A member that has published, and knows this state of the catalogue.
    fn member(catalogue: u64) -> Member {
        let mut member = Member { wanted: Some(VolumeId(7)), pace: PACE, ..Member::default() };
        let store = Store { volume: VolumeId(7), first: STORE_EPOCHS, last: Epoch(u64::MAX) };
        member.on_joined(Membership { store, print_key: [1; 32], catalogue: no(catalogue) });
        let me = opening(5, 9, 0);
        let names = SegmentRanges::default;
        let asked = member.publish(at(0), me, names);
        assert!(matches!(asked, Some(MetaRequest::Get { .. })) && !member.may_share());
        member.on_meta(Epoch(5), MetaReply::Record { version: MetaVersion::ABSENT, value: None });
        let written = member.publish(at(0), me, names);
        let Some(MetaRequest::Swap { value: Some(value), .. }) = written else { panic!("{written:?}") };
        assert_eq!(Names::decode(&value).map(|names| names.catalogue), Ok(no(catalogue)));
        assert!(!member.may_share(), "nobody has heard yet whether it is written");
        member.on_meta(Epoch(5), MetaReply::Swapped { version: MetaVersion(4) });
        assert!(member.may_share());
        member
    }

    #[test]
    fn runs_that_are_alike_become_extents_and_packed_ones_one_for_each_block() {
        let prints: ByPosition = (10..16).map(|i| (i, Print(u128::from(i)))).collect();
        let offer = offer(0, &[11, 12, 13, 99, 15]);
        let plain = run(500, Stored::Plain { block: 10 }, &[0, 100, 101, 7, 0, 104]);
        let share = shared_of(SEGMENT, std::slice::from_ref(&plain), &prints, &offer, true);
        let of = |extent: &SharedExtent| (extent.key.0, extent.blocks, extent.source, extent.run.clone());
        let from = |block| Source::Segment { segment: SEGMENT, block };
        let expected =
            [(501, 2, from(11), SharedRun::Plain { block: 4 }), (505, 1, from(15), SharedRun::Plain { block: 8 })];
        assert_eq!(share.extents.iter().map(of).collect::<Vec<_>>(), expected, "one has another checksum");
        let trusted = shared_of(SEGMENT, &[plain], &prints, &offer, false);
        assert_eq!(trusted.extents[0].blocks, 3);
        let lengths = StoredLengths::new([StoredLength::RAW; 3]);
        let prints: ByPosition = [(64, Print(11)), (128, Print(12)), (192, Print(13))].into();
        let packed = run(500, Stored::Packed { granule: 64, lengths }, &[100, 101, 102]);
        let share = shared_of(SEGMENT, &[packed], &prints, &offer, true);
        let from = |granule| Source::Packed { segment: SEGMENT, granule };
        let sources: Vec<Source> = share.extents.iter().map(|extent| extent.source).collect();
        assert_eq!(sources, [from(64), from(128), from(192)]);
    }

    #[test]
    fn an_offer_of_an_earlier_state_is_not_taken_nor_one_whose_prints_are_forgotten() {
        let mut member = member(5);
        let prints = || -> ByPosition { [(10, Print(11))].into() };
        assert_eq!(member.on_offer(SEGMENT, offer(5, &[11])), Some(SEGMENT), "it is to be printed again");
        member.remember(at(1), SEGMENT, prints());
        assert_eq!(member.on_offer(SEGMENT, offer(4, &[11])), None);
        assert_eq!(member.next_take(), None, "what was withdrawn since may be in it");
        assert_eq!(member.on_offer(SEGMENT, offer(5, &[11])), None);
        member.hear(no(6));
        assert_eq!(member.next_take(), None);
        assert_eq!(member.on_offer(SEGMENT, offer(6, &[11])), None);
        assert_eq!(member.next_take(), Some(SEGMENT));
        // It is heard of another state while it is looked what lives.
        member.hear(no(7));
        assert_eq!(member.share(&[run(5, Stored::Plain { block: 10 }, &[100])], true), None);
        member.on_offer(SEGMENT, offer(7, &[11]));
        assert_eq!(member.next_take(), Some(SEGMENT));
        let share = member.share(&[run(5, Stored::Plain { block: 10 }, &[100])], true);
        assert_eq!(share.map(|share| share.extents.len()), Some(1));
        member.verify();
    }

    #[test]
    fn an_answer_of_the_metadata_store_may_take_long() {
        let mut member = Member { pace: PACE, ..Member::default() };
        let store = Store { volume: VolumeId(7), first: STORE_EPOCHS, last: Epoch(u64::MAX) };
        member.on_joined(Membership { store, print_key: [1; 32], catalogue: no(2) });
        let mut publish = |at| member.publish(at, opening(7, 9, 0), SegmentRanges::default);
        assert!(publish(at(0)).is_some());
        assert!(publish(at(9)).is_none(), "what is asked anew makes the first answer one that nobody waits for");
        assert!(publish(at(10)).is_some());
    }

    #[test]
    fn a_state_is_published_when_a_checkpoint_has_what_was_shared_before() {
        let mut member = member(5);
        member.on_shared(Lsn(20));
        member.hear(no(6));
        let publish =
            |member: &mut Member, durable| member.publish(at(9), opening(5, durable, 0), SegmentRanges::default);
        assert!(publish(&mut member, 19).is_none());
        let Some(MetaRequest::Swap { value: Some(value), .. }) = publish(&mut member, 20) else { panic!("it is due") };
        assert_eq!(Names::decode(&value).map(|names| names.catalogue), Ok(no(6)));
    }

    #[test]
    fn a_record_of_a_later_opening_ends_sharing_and_one_of_an_earlier_tells_its_state() {
        let names =
            |epoch, counter| Names { epoch: Epoch(epoch), catalogue: no(counter), ranges: SegmentRanges::default() };
        let mut later = member(5);
        assert!(later.publish(at(99), opening(5, 9, 1), SegmentRanges::default).is_some());
        let value = Some(names(6, 5).encode());
        later.on_meta(Epoch(5), MetaReply::Conflict { version: MetaVersion(9), value });
        assert!(!later.may_share() && later.membership().is_none());
        let mut after = Member { pace: PACE, ..Member::default() };
        let store = Store { volume: VolumeId(7), first: STORE_EPOCHS, last: Epoch(u64::MAX) };
        after.on_joined(Membership { store, print_key: [1; 32], catalogue: no(2) });
        after.publish(at(0), opening(7, 9, 0), SegmentRanges::default);
        after.on_meta(Epoch(7), MetaReply::Record { version: MetaVersion(4), value: Some(names(6, 8).encode()) });
        after.remember(at(1), SEGMENT, [(10, Print(11))].into());
        after.on_offer(SEGMENT, offer(7, &[11]));
        assert_eq!(after.next_take(), None, "its last owner had heard of the eighth");
        assert!(!after.may_share(), "nobody before it is kept from writing yet");
    }

    #[test]
    fn who_leaves_says_so_when_a_checkpoint_does_and_comes_back_when_the_store_has_heard() {
        let mut member = member(5);
        member.on_shared(Lsn(20));
        member.leave();
        assert!(!member.may_share());
        let (store, me) = (VolumeId(7), |durable| opening(5, durable, 0));
        assert!(member.say_that_it_left(at(9), me(19), store).is_none(), "what it shared last is in no checkpoint");
        let said = member.say_that_it_left(at(9), me(20), store);
        let Some(MetaRequest::Swap { expect, value: Some(left), .. }) = said else { panic!("{said:?}") };
        assert!(expect == MetaVersion(4) && Names::decode(&left).is_ok_and(|names| names.has_left()));
        assert!(!member.has_left());
        member.on_meta(Epoch(5), MetaReply::Swapped { version: MetaVersion(5) });
        assert!(member.has_left() && member.say_that_it_left(at(10), me(20), store).is_none());
        // It is to be one again: a word from before is not believed.
        member.join(store);
        assert!(member.asks_to_join(at(20)));
        let of = Store { volume: store, first: STORE_EPOCHS, last: Epoch(u64::MAX) };
        let joined = |catalogue| Membership { store: of, print_key: [1; 32], catalogue: no(catalogue) };
        let mut tries = |heard, seconds, says: &Names| {
            member.on_joined(joined(heard));
            let asked = member.publish(at(seconds), me(20), SegmentRanges::default);
            assert!(matches!(asked, Some(MetaRequest::Get { .. })), "{asked:?}");
            let value = Some(says.encode());
            member.on_meta(Epoch(5), MetaReply::Record { version: MetaVersion(6), value });
            member.membership().is_some()
        };
        assert!(!tries(9, 20, &Names::of_one_that_left(Epoch(5))), "the store has not taken it back");
        assert!(!tries(5, 30, &Names::of_nobody(no(6))), "that was said before it was");
        assert!(tries(6, 40, &Names::of_nobody(no(6))));
        assert!(!member.may_share());
        assert!(matches!(
            member.publish(at(41), me(20), SegmentRanges::default),
            Some(MetaRequest::Swap { expect: MetaVersion(6), .. })
        ));
        member.on_meta(Epoch(5), MetaReply::Swapped { version: MetaVersion(7) });
        assert!(member.may_share());
    }

    #[test]
    fn who_is_to_stay_after_all_shares_when_its_record_is_another_one() {
        let mut member = member(5);
        member.leave();
        assert!(member.say_that_it_left(at(9), opening(5, 9, 0), VolumeId(7)).is_some());
        member.on_meta(Epoch(5), MetaReply::Unknown);
        member.join(VolumeId(7));
        let of = Store { volume: VolumeId(7), first: STORE_EPOCHS, last: Epoch(u64::MAX) };
        member.on_joined(Membership { store: of, print_key: [1; 32], catalogue: no(5) });
        assert!(member.publish(at(20), opening(5, 9, 0), SegmentRanges::default).is_some());
        // What it said before it was about to leave: the other swap may still win.
        let names = Names { epoch: Epoch(5), catalogue: no(5), ranges: SegmentRanges::default() };
        let value = Some(names.encode());
        member.on_meta(Epoch(5), MetaReply::Record { version: MetaVersion(4), value });
        assert!(!member.may_share());
        let again = member.publish(at(21), opening(5, 9, 0), SegmentRanges::default);
        assert!(matches!(again, Some(MetaRequest::Swap { expect: MetaVersion(4), .. })), "{again:?}");
        member.on_meta(Epoch(5), MetaReply::Swapped { version: MetaVersion(5) });
        assert!(member.may_share());
    }

    #[test]
    fn a_report_is_told_again_until_nothing_comes_of_it() {
        let mut member = member(5);
        member.remember(at(0), SEGMENT, [(10, Print(11))].into());
        assert!(member.report_again(at(1)).is_none());
        assert!(member.report_again(at(5)).is_some_and(|(of, prints)| of == SEGMENT && prints == [Print(11)]));
        member.on_heard(SEGMENT, true);
        assert!(member.report_again(at(50)).is_none() && member.is_at_rest());
        // Its blocks are wanted when they are gone, again and again.
        assert_eq!((0..100).filter(|_| member.tries_again(SEGMENT)).count(), usize::from(LATE_MAX));
        for other in 0..REPORTED_MAX as u64 {
            member.remember(at(1), SegmentNo { counter: 100 + other, ..SEGMENT }, ByPosition::new());
        }
        assert_eq!(member.on_offer(SEGMENT, offer(5, &[11])), Some(SEGMENT), "the oldest is forgotten");
        member.verify();
    }
}
