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
//! **A state of the catalogue** is taken on when it is heard of. From then on nothing is named that was offered in an
//! earlier one. A record tells it when a checkpoint is durable that has all that was shared before.
//!
//! Limits: prints of [`REPORTED_MAX`] segments are kept; for others the store's offer is of no use, and they are printed
//! again. Messages may be lost: what is asked for is asked again every [`ASK_EVERY`].

use super::print::ByPosition;
use crate::care::LiveRun;
use holdfast_base::{BlockCrc, Epoch, Instant, Key, Lsn, MetaReply, MetaRequest, MetaVersion, VolumeId};
use holdfast_format::record::{SegmentNo, Share, SharedExtent, SharedRun, Source};
use holdfast_format::sharing::{CatalogueNo, Names, SegmentRanges, dependent_key};
use holdfast_format::talk::{Membership, Offer, Print};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// What nobody answers is asked again.
const ASK_EVERY: Duration = Duration::from_secs(1);

/// That fewer segments are named is told so long after the last time, at most; and after so many rests of walks.
const FEWER_AFTER: Duration = Duration::from_secs(60);
const FEWER_PACES: u32 = 6;

/// Segments whose prints are kept: eight mebibytes, with a thousand blocks in each.
const REPORTED_MAX: usize = 256;

/// Offers that wait: a store sends them faster than they are taken where it has much that is alike.
const TAKES_MAX: usize = 64;

/// A report of which something may come yet is told again after this long, so often at most.
const AGAIN_AFTER: Duration = Duration::from_secs(3);
const TRIES_MAX: u8 = 5;

/// What was told of a segment.
#[derive(Debug)]
struct Reported {
    /// What is not named in the store yet.
    prints: ByPosition,
    at: Instant,
    tries: u8,
    /// Nothing comes of it: the store has heard, wants nothing, and has nothing to offer.
    is_settled: bool,
}

/// Where its record in the metadata store stands.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
enum Record {
    #[default]
    Unknown,
    /// Asked for, or being written.
    Asked { at: Instant, names: Option<Names> },
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
    reported: BTreeMap<SegmentNo, Reported>,
    order: VecDeque<SegmentNo>,
    takes: VecDeque<(SegmentNo, Box<Offer>)>,
    /// What lives in its segment is being looked up.
    taking: Option<(SegmentNo, Box<Offer>)>,
    /// When it was published last, and as of which release of segments.
    told: (Instant, u64),
    pub(crate) pace: Duration,
    /// Of the last record that shares.
    shared_at: Lsn,
    pub(crate) shared_blocks: u64,
}

/// What is to be asked of the metadata store.
pub(crate) type MetaAsk = Option<MetaRequest>;

impl Member {
    pub(crate) fn is_at_rest(&self) -> bool {
        let nothing_comes = self.reported.values().all(|of| of.is_settled || of.tries >= TRIES_MAX);
        self.takes.is_empty() && nothing_comes && !matches!(self.record, Record::Asked { .. })
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
        let is_due = self.membership.is_none() && self.asked_at.is_none_or(|at| now.since(at) >= ASK_EVERY);
        if is_due {
            self.asked_at = Some(now);
        }
        is_due
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
            (*known, *since) = (no, self.shared_at);
        }
    }

    // ---- the record ----

    /// What is to be asked of the metadata store next, if anything. `names`: of the store, as a durable checkpoint of
    /// this LSN has it, at least. `released` is another number when they may have become fewer.
    pub(crate) fn publish(
        &mut self,
        now: Instant,
        (member, epoch): (VolumeId, Epoch),
        (durable, released): (Lsn, u64),
        names: impl FnOnce() -> SegmentRanges,
    ) -> MetaAsk {
        let membership = self.membership.as_ref()?;
        let key = dependent_key(membership.store.volume, member);
        let (version, said) = match &self.record {
            Record::Asked { at, .. } if now.since(*at) < ASK_EVERY => return None,
            Record::Unknown | Record::Asked { .. } => {
                self.record = Record::Asked { at: now, names: None };
                return Some(MetaRequest::Get { key });
            }
            Record::Known { version, names } => (*version, names),
        };
        let (catalogue, since) = self.catalogue?;
        let is_said = said.as_ref().is_some_and(|said| said.catalogue >= catalogue);
        let (told_at, told) = self.told;
        let are_fewer = released != told && now.since(told_at) >= FEWER_AFTER.min(self.pace * FEWER_PACES);
        if is_said && !are_fewer || durable < since {
            return None;
        }
        self.told = (now, released);
        let names = Names { epoch, catalogue, ranges: names() };
        let value = Some(names.encode());
        self.record = Record::Asked { at: now, names: Some(names) };
        Some(MetaRequest::Swap { key, expect: version, value, guard: None })
    }

    /// An answer; `epoch` is this opening's.
    pub(crate) fn on_meta(&mut self, epoch: Epoch, reply: MetaReply) {
        let Record::Asked { names: asked, .. } = &mut self.record else { return };
        match reply {
            MetaReply::Swapped { version } => {
                let names = asked.take();
                self.has_published = names.is_some();
                self.record = Record::Known { version, names };
            }
            MetaReply::Record { version, value } | MetaReply::Conflict { version, value } => {
                let found = value.as_deref().map(Names::decode);
                let said = found.and_then(Result::ok);
                if said.as_ref().is_some_and(|said| said.epoch > epoch) {
                    // A later opening has the volume: this one shares nothing any more.
                    (self.membership, self.has_published) = (None, false);
                    self.record = Record::Unknown;
                    return;
                }
                let heard = self.membership.as_ref().map(|membership| membership.catalogue);
                let newest = said.as_ref().map(|said| said.catalogue).max(heard);
                if self.catalogue.is_none() {
                    self.catalogue = newest.map(|no| (no, self.shared_at));
                } else if let Some(no) = newest {
                    self.hear(no);
                }
                let names = said.filter(|said| said.epoch == epoch);
                self.record = Record::Known { version, names };
            }
            MetaReply::GuardFailed { .. } | MetaReply::Unknown => self.record = Record::Unknown,
        }
    }

    /// Whether anything may be shared: the first record of this opening is written.
    pub(crate) fn may_share(&self) -> bool {
        self.membership.is_some() && self.has_published
    }

    // ---- what is shared ----

    /// What is told of it is kept for what the store has to say.
    pub(crate) fn remember(&mut self, now: Instant, segment: SegmentNo, prints: ByPosition) {
        let tries = self.reported.get(&segment).map_or(0, |before| before.tries);
        let reported = Reported { prints, at: now, tries, is_settled: false };
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

    /// A report that is to be told again.
    pub(crate) fn report_again(&mut self, now: Instant) -> Option<(SegmentNo, Vec<Print>)> {
        let is_due = |of: &Reported| !of.is_settled && of.tries < TRIES_MAX && now.since(of.at) >= AGAIN_AFTER;
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
        self.catalogue.is_some_and(|(known, _)| offer.catalogue >= known)
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
    pub(crate) fn share(&mut self, runs: &[LiveRun], are_crcs: bool, takes_old_offers: bool) -> Option<Share> {
        let (segment, offer) = self.taking.take()?;
        if !self.is_current(&offer) && !takes_old_offers {
            return None;
        }
        let prints = &mut self.reported.get_mut(&segment)?.prints;
        let share = shared_of(segment, runs, prints, &offer, are_crcs);
        let offered: BTreeSet<&Print> = offer.prints.iter().collect();
        prints.retain(|_, print| !offered.contains(print));
        self.shared_blocks += share.extents.iter().map(|extent| u64::from(extent.blocks)).sum::<u64>();
        Some(share).filter(|share| !share.extents.is_empty())
    }

    /// The record that shares has this LSN.
    pub(crate) fn on_shared(&mut self, lsn: Lsn) {
        self.shared_at = self.shared_at.max(lsn);
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
            let found = prints.get(&position).and_then(|print| offered.get(print)).copied();
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
