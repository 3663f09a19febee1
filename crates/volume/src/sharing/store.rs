//! A store: a volume without clients, whose blocks the members of its sharing domain name in place of their own (protocol
//! rule 28). Its owner finds what is alike, has it copied once, and offers it; it is in the way of no read and no write.
//!
//! **What is alike** it learns from reports: prints of all that lives in a segment of a member. The [`PrintIndex`] tells
//! which were seen before. Runs of them are wanted of whoever reported last, who has just read them.
//!
//! **A segment of the store** is what was wanted, in the order of its runs, so that a file stays in one piece. It is
//! written as bulk writes are, and packed. Then it is offered to all who reported any of it. The store's own segments are
//! printed as members' are: so it learns what it has when it is opened.
//!
//! **What nobody names** goes. A segment of which the store's map names nothing any more is *withdrawn*: from the next
//! state of the catalogue on it is offered to nobody. It is freed when each member has published, in that state or a
//! later one, a list without it ([`Store::may_be_named`]). Of what little is named of see [`Sparse`](super::Sparse).
//!
//! **For a member that has never shared** the store publishes: it writes the first record before its root names the
//! member, and later ones over its own. So a volume that asked to be a member, and was never opened again, holds nothing.
//!
//! Limits: those of the index; prints of [`LISTS_MAX`] segments; one segment's worth of content is gathered.

use super::index::{PrintIndex, Seen};
use super::printer::Printed;
use crate::basis::Basis;
use crate::care::LiveRun;
use crate::map::Stored;
use crate::segment::writer::{JobKind, Work};
use crate::segment::{Kind, SegmentInfo, Segments};
use holdfast_base::{BLOCK_BYTES, BlockCrc, Buf, Instant, Key, MetaVersion, VolumeId, block_crcs};
use holdfast_format::packing::StoredLengths;
use holdfast_format::record::{CommitExtent, SegmentNo, SharedRun, SharedSegment, Source};
use holdfast_format::root::Root;
use holdfast_format::sharing::{CatalogueNo, NOBODY, Names, STORE_SPAN, Store as StoreOf};
use holdfast_format::talk::{Membership, Offer, Print};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;
use std::time::Duration;

/// Prints of so many segments are kept.
const LISTS_MAX: usize = 256;

/// Content that was gathered is written after a fifth of the rest of a walk, however little it is.
const GATHERS: u32 = 5;

/// For so many rests of a walk after something was withdrawn the store looks often whether members have heard of that.
const HURRIES: u32 = 12;

/// That a segment of a member lives is believed for so many rests of a walk: until all that it may be alike with was told
/// again, one after the other.
const BELIEVED: u32 = 12;

/// Offers that wait for the prints of their segment.
const DUE_MAX: usize = 4096;

/// Segments that are looked at in one go for whether anybody names them, or whether they are dead.
pub(crate) const LOOKED_AT: usize = 128;

/// A segment of the store, as it is offered.
#[derive(Debug)]
struct List {
    run: SharedRun,
    prints: Vec<Print>,
    crcs: Vec<BlockCrc>,
}

/// A member, a segment of it, and one of the store that has some of that.
type Due = (VolumeId, SegmentNo, SegmentNo);

/// What comes of looking for a segment that nobody names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Unnamed {
    Found(SegmentNo),
    /// So far there is none.
    More,
    Nothing,
}

/// Content that is being gathered into a segment.
#[derive(Debug, Default)]
struct Content {
    blocks: Vec<Buf>,
    prints: Vec<Print>,
    crcs: Vec<BlockCrc>,
    from: BTreeSet<Seen>,
    since: Option<Instant>,
}

/// Content as a member sends it: a fingerprint and a checksum a block.
pub(crate) struct Sent<'a> {
    pub(crate) prints: &'a [Print],
    pub(crate) crcs: &'a [BlockCrc],
    pub(crate) blocks: &'a [u8],
}

/// What comes of a report.
#[derive(Debug)]
pub(crate) struct Heard {
    pub(crate) wanted: Vec<Print>,
    /// Something may come yet.
    pub(crate) offers: u32,
    /// How much the member names of these segments of its own it is to be asked.
    pub(crate) unsure: Vec<SegmentNo>,
}

#[derive(Debug, Default)]
pub(crate) struct Store {
    counter: u64,
    index: PrintIndex,
    lists: BTreeMap<SegmentNo, List>,
    order: VecDeque<SegmentNo>,
    content: Content,
    /// Asked for, of whom, and when that was.
    wanted: BTreeMap<Print, (Seen, Instant)>,
    wanted_looked_at: Instant,
    /// What has come and is not in a segment yet.
    coming: BTreeSet<Print>,
    gathering: BTreeMap<u64, (Content, u64)>,
    next_gather: u64,
    /// The first block of its address space that nothing was ever put at, since the volume was opened.
    next_block: Option<u64>,
    due: VecDeque<Due>,
    is_due: BTreeSet<Due>,
    /// Of these the store's segment is to be printed first.
    unlisted: BTreeSet<Due>,
    /// These want to be members, and need a record first.
    pub(crate) asking: BTreeSet<VolumeId>,
    /// These have one: the root is to name them.
    pub(crate) joining: BTreeSet<VolumeId>,
    pub(crate) sparse: super::Sparse,
    /// It has left, says this version of its record: the root is to name it no more.
    pub(crate) leaving: Option<(VolumeId, MetaVersion)>,
    published: BTreeMap<VolumeId, Names>,
    withdrawn: BTreeMap<SegmentNo, CatalogueNo>,
    withdrawn_at: Instant,
    /// Up to there it was looked what is dead, and what of that is gone.
    withdrawn_to: Option<SegmentNo>,
    settled_to: Option<SegmentNo>,
    offered_at: BTreeMap<SegmentNo, Instant>,
    /// Up to there it was looked for segments that nobody names.
    looked_to: Option<SegmentNo>,
    pub(crate) gathered_blocks: u64,
}

impl Store {
    pub(crate) fn is_at_rest(&self) -> bool {
        self.content.blocks.is_empty()
            && self.gathering.is_empty()
            && self.due.is_empty()
            && self.asking.is_empty()
            && self.joining.is_empty()
    }

    /// What a member is told.
    pub(crate) fn membership(&self, basis: &Basis) -> Membership {
        let (volume, epoch) = (basis.volume(), basis.epoch());
        // Each store has so many epochs of its own (see `Store` of the format).
        let first = holdfast_base::Epoch(epoch.0 & !(STORE_SPAN - 1));
        let store = StoreOf { volume, first, last: holdfast_base::Epoch(first.0 + (STORE_SPAN - 1)) };
        Membership { store, print_key: print_key_of(volume), catalogue: self.catalogue(basis) }
    }

    pub(crate) fn catalogue(&self, basis: &Basis) -> CatalogueNo {
        CatalogueNo { epoch: basis.epoch(), counter: self.counter }
    }

    /// The catalogue comes to its next state.
    pub(crate) fn next_state(&mut self, basis: &Basis) -> CatalogueNo {
        self.counter += 1;
        self.catalogue(basis)
    }

    /// What its record said when it was looked at.
    pub(crate) fn has_left(&self, member: VolumeId) -> bool {
        self.published.get(&member).is_some_and(Names::has_left)
    }

    // ---- what is alike ----

    /// A member has so much in a segment: what of it is wanted, and how many offers follow. What is on its way from another
    /// counts as one, and what it is to be asked about: the member tells of it again.
    pub(crate) fn on_report(&mut self, basis: &Basis, seen: Seen, prints: &[Print]) -> Heard {
        let least = (basis.config.share_run_min / self.index.rate()).max(1);
        let found = self.index.look_up(basis.now, seen, prints, least as usize);
        for no in &found.stored {
            self.make_due(seen.volume, seen.segment, *no);
        }
        let gap_max = self.index.rate();
        // The first block of each run, and how many it has.
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for at in found.alike {
            match runs.last_mut() {
                Some((first, count)) if at - (*first + *count) < gap_max => *count = at + 1 - *first,
                _ => runs.push((at, 1)),
            }
        }
        let long = runs.iter().filter(|(_, count)| *count >= basis.config.share_run_min);
        let alike = long.flat_map(|(first, count)| &prints[*first as usize..(first + count) as usize]);
        let is_anothers = |fingerprint: &Print| self.wanted.get(fingerprint).is_some_and(|(of, _)| *of != seen);
        let is_on_its_way = |fingerprint: &&Print| self.coming.contains(fingerprint) || is_anothers(fingerprint);
        let (on_its_way, wanted): (Vec<&Print>, Vec<&Print>) = alike.partition(is_on_its_way);
        let wanted: Vec<Print> = wanted.into_iter().copied().collect();
        let is_more_to_come = !on_its_way.is_empty() || !found.unsure.is_empty();
        let offers = found.stored.len() as u32 + u32::from(is_more_to_come);
        self.wanted.extend(wanted.iter().map(|fingerprint| (*fingerprint, (seen, basis.now))));
        Heard { wanted, offers, unsure: found.unsure }
    }

    /// A member names so much of segments of its own: what it tells of others is not moved from those that live.
    pub(crate) fn on_own_counted(&mut self, basis: &Basis, member: VolumeId, counts: &[(SegmentNo, u32)]) {
        for (segment, count) in counts {
            let seen = Seen { volume: member, segment: *segment };
            match *count {
                0 => self.index.forget(seen),
                _ => self.index.believe(seen, basis.now + basis.config.repack_every * BELIEVED),
            }
        }
    }

    /// Blocks that were wanted. What is not what it should be is left.
    pub(crate) fn on_content(&mut self, now: Instant, from: Seen, sent: Sent<'_>) {
        let Sent { prints, crcs, blocks } = sent;
        let is_whole = blocks.len() == prints.len() * BLOCK_BYTES && crcs.len() == prints.len();
        if !is_whole || block_crcs(blocks) != crcs {
            return;
        }
        for ((fingerprint, crc), block) in prints.iter().zip(crcs).zip(blocks.chunks_exact(BLOCK_BYTES)) {
            // Once is enough: it may be on its way already, or twice in what has come.
            let is_wanted = self.wanted.remove(fingerprint).is_some() && !self.index.is_stored(*fingerprint);
            if !is_wanted || !self.coming.insert(*fingerprint) {
                continue;
            }
            self.content.blocks.push(Buf::copy_from(block));
            self.content.prints.push(*fingerprint);
            self.content.crcs.push(*crc);
        }
        if !self.content.blocks.is_empty() {
            self.content.from.insert(from);
            self.content.since.get_or_insert(now);
        }
    }

    /// What was gathered, where it is enough, or has waited for long enough. `first`: of its address space what nothing
    /// was ever put at.
    pub(crate) fn close(&mut self, basis: &Basis, first: impl FnOnce() -> u64) -> Option<Work> {
        let payload_blocks = basis.config.segment_payload_bytes as usize / BLOCK_BYTES;
        let is_full = self.content.blocks.len() >= payload_blocks;
        let is_late =
            self.content.since.is_some_and(|since| basis.now.since(since) >= basis.config.repack_every / GATHERS);
        if !is_full && !is_late {
            return None;
        }
        let count = self.content.blocks.len().min(payload_blocks);
        let block = *self.next_block.get_or_insert_with(first);
        let end = block + count as u64;
        if end * BLOCK_BYTES as u64 > basis.root().size_bytes {
            // Every address was used once.
            let unplaced = std::mem::take(&mut self.content);
            self.have_come(&unplaced.prints);
            return None;
        }
        let rest = Content {
            blocks: self.content.blocks.split_off(count),
            prints: self.content.prints.split_off(count),
            crcs: self.content.crcs.split_off(count),
            from: self.content.from.clone(),
            since: Some(basis.now),
        };
        let content = std::mem::replace(&mut self.content, rest);
        if self.content.blocks.is_empty() {
            self.content = Content::default();
        }
        self.next_block = Some(end);
        let id = self.next_gather;
        self.next_gather += 1;
        let extents = vec![CommitExtent { key: Key(block), blocks: count as u32, source: Source::Direct }];
        let (payload, crcs) = (content.blocks.clone(), content.crcs.clone());
        self.gathering.insert(id, (content, block));
        Some(Work { extents, payload, crcs, ..Work::new(JobKind::Gather { id }) })
    }

    /// There is no room for it.
    pub(crate) fn on_refused(&mut self, id: u64) {
        if let Some((content, _)) = self.gathering.remove(&id) {
            self.have_come(&content.prints);
        }
    }

    /// They are in a segment, or will be in none.
    fn have_come(&mut self, prints: &[Print]) {
        for fingerprint in prints {
            self.coming.remove(fingerprint);
        }
    }

    /// The first block, and how many, of what was gathered.
    pub(crate) fn extent_of(&self, id: u64) -> Option<(u64, u64)> {
        self.gathering.get(&id).map(|(content, block)| (*block, content.prints.len() as u64))
    }

    /// It is a part of the store: there. All who have it hear of that.
    pub(crate) fn on_gathered(&mut self, id: u64, own: VolumeId, runs: &[LiveRun]) {
        let Some((content, _)) = self.gathering.remove(&id) else { return };
        self.have_come(&content.prints);
        let segment = self.keep_list(runs, &content.prints);
        self.gathered_blocks += content.prints.len() as u64;
        let Some(segment) = segment else { return };
        let holders = self.index.store(Seen { volume: own, segment }, &content.prints);
        for Seen { volume, segment: of_member } in holders.into_iter().chain(content.from) {
            self.make_due(volume, of_member, segment);
        }
    }

    /// One of the store's own segments was printed.
    pub(crate) fn on_own_printed(&mut self, own: VolumeId, printed: &Printed) {
        if !self.is_offered(printed.segment) {
            return;
        }
        if let Some(segment) = self.keep_list(&printed.runs, &printed.prints) {
            let listed: Vec<_> = self.unlisted.extract_if(.., |(_, _, of)| *of == segment).collect();
            listed.into_iter().for_each(|(member, of_member, of)| self.make_due(member, of_member, of));
            let holders = self.index.store(Seen { volume: own, segment }, &printed.prints);
            for Seen { volume, segment: of_member } in holders {
                self.make_due(volume, of_member, segment);
            }
        }
    }

    /// Keeps what a segment holds, if that is one run.
    fn keep_list(&mut self, runs: &[LiveRun], prints: &[Print]) -> Option<SegmentNo> {
        let segment = runs.first()?.segment;
        let run = one_run(runs)?;
        let crcs = runs.iter().flat_map(|run| run.crcs.as_slice().iter().copied()).collect();
        if self.lists.insert(segment, List { run, prints: prints.to_vec(), crcs }).is_none() {
            self.order.push_back(segment);
        }
        while self.order.len() > LISTS_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.lists.remove(&oldest);
        }
        Some(segment)
    }

    fn is_offered(&self, no: SegmentNo) -> bool {
        !self.withdrawn.contains_key(&no) && !self.sparse.is_vacated(no)
    }

    /// It is to be as if it were not there, for whoever tells of what it has.
    pub(crate) fn offer_no_more(&mut self, own: VolumeId, no: SegmentNo) {
        self.offered_at.remove(&no);
        self.lists.remove(&no);
        self.order.retain(|of| *of != no);
        self.unlisted.retain(|(_, _, of)| *of != no);
        self.index.forget(Seen { volume: own, segment: no });
    }

    fn make_due(&mut self, member: VolumeId, segment: SegmentNo, stored: SegmentNo) {
        let due = (member, segment, stored);
        if self.due.len() + self.unlisted.len() < DUE_MAX && self.is_due.insert(due) {
            self.due.push_back(due);
        }
    }

    /// The next offer, and whom it is for; or a segment of the store's own that is to be printed first.
    pub(crate) fn next_offer(
        &mut self,
        basis: &Basis,
        segments: &Segments,
    ) -> Option<(VolumeId, SegmentNo, Result<Offer, SegmentNo>)> {
        while let Some(due) = self.due.pop_front() {
            self.is_due.remove(&due);
            let (member, of_member, segment) = due;
            let info = segments.get(segment).filter(|info| info.is_visible());
            let is_member = basis.root().dependents.iter().any(|of| of.volume == member);
            let (Some(info), true) = (info, is_member && self.is_offered(segment)) else { continue };
            let Some(List { run, prints, crcs }) = self.lists.get(&segment) else {
                self.unlisted.insert(due);
                return Some((member, of_member, Err(segment)));
            };
            self.offered_at.insert(segment, basis.now);
            let (geometry, homes, units) = (info.geometry, info.homes.clone(), info.units);
            let shared = SharedSegment { segment, geometry, homes, units };
            let offer = Offer {
                catalogue: self.catalogue(basis),
                shared,
                run: run.clone(),
                prints: prints.clone(),
                crcs: crcs.clone(),
            };
            return Some((member, of_member, Ok(offer)));
        }
        None
    }

    // ---- what nobody names ----

    /// Data of which nothing is in the store's map any more are offered to nobody from the next state on. True where that
    /// makes one. A few are looked at in one go, since what a closed member may name stays for long.
    pub(crate) fn withdraw(&mut self, basis: &Basis, segments: &Segments) -> bool {
        let dead: Vec<SegmentNo> = segments.unseen_after(self.withdrawn_to).take(LOOKED_AT).collect();
        self.withdrawn_to = dead.get(LOOKED_AT - 1).copied();
        let is_data = |no: &SegmentNo| segments.get(*no).is_some_and(|info| info.kind == Kind::Data);
        let is_new = |no: &SegmentNo| is_data(no) && !self.withdrawn.contains_key(no);
        let new: Vec<SegmentNo> = dead.into_iter().filter(is_new).collect();
        if new.is_empty() {
            return false;
        }
        self.withdrawn_at = basis.now;
        let catalogue = self.next_state(basis);
        for no in new {
            self.withdrawn.insert(no, catalogue);
            self.offer_no_more(basis.volume(), no);
        }
        true
    }

    /// What was wanted and did not come may be asked for again.
    pub(crate) fn on_tick(&mut self, basis: &Basis) {
        let patience = basis.config.repack_every;
        if basis.now.since(self.wanted_looked_at) >= patience / 2 {
            self.wanted_looked_at = basis.now;
            self.wanted.retain(|_, (_, at)| basis.now.since(*at) < patience);
        }
    }

    /// Whether members are soon to say what they name. One that is out of service won't.
    pub(crate) fn is_waiting_for_lists(&self, now: Instant, rest: Duration) -> bool {
        !self.withdrawn.is_empty() && now.since(self.withdrawn_at) < rest * HURRIES
    }

    /// What is gone needs no word any more.
    pub(crate) fn settle(&mut self, segments: &Segments) {
        let from = self.settled_to.map_or(Bound::Unbounded, Bound::Excluded);
        let ahead = self.withdrawn.range((from, Bound::Unbounded)).take(LOOKED_AT).map(|(no, _)| *no);
        let ahead: Vec<SegmentNo> = ahead.collect();
        self.settled_to = ahead.get(LOOKED_AT - 1).copied();
        for no in ahead.iter().filter(|no| segments.get(**no).is_none()) {
            self.withdrawn.remove(no);
        }
        self.unlisted.retain(|(_, _, no)| segments.get(*no).is_some());
    }

    /// The catalogue's newest state, where somebody waits for members to know it.
    fn newest(&self, basis: &Basis) -> Option<CatalogueNo> {
        (!self.withdrawn.is_empty()).then(|| self.catalogue(basis))
    }

    /// Members that have not published as of the catalogue's newest state, where somebody waits for that; and those that know
    /// of no state of this owner's, which they have told of nothing.
    pub(crate) fn behind(&self, basis: &Basis) -> Vec<VolumeId> {
        let newest = self.newest(basis);
        let is_behind = |volume: &VolumeId| {
            let names = self.published.get(volume);
            let knows_another =
                |names: &Names| names.epoch != NOBODY && !names.has_left() && names.catalogue.epoch < basis.epoch();
            newest.is_some_and(|no| names.is_none_or(|names| names.catalogue < no)) || names.is_some_and(knows_another)
        };
        basis.root().dependents.iter().map(|of| of.volume).filter(is_behind).collect()
    }

    /// What is to be said for a member whose record says that, if it has never shared, and is behind.
    pub(crate) fn names_for(&self, basis: &Basis, found: &Names) -> Option<Names> {
        let newest = self.newest(basis)?;
        (found.epoch == NOBODY && found.catalogue < newest).then(|| Names::of_nobody(self.catalogue(basis)))
    }

    /// A member has published that. True where it is news.
    pub(crate) fn on_names(&mut self, member: VolumeId, names: Names) -> bool {
        let is_news = self.published.get(&member) != Some(&names);
        self.published.insert(member, names);
        is_news
    }

    pub(crate) fn keep_members(&mut self, root: &Root) {
        let is_member = |volume: &VolumeId| root.dependents.iter().any(|of| of.volume == *volume);
        self.published.retain(|member, _| is_member(member));
        self.leaving = self.leaving.filter(|(member, _)| is_member(member));
        self.asking.retain(|member| !is_member(member));
        self.joining.retain(|member| !is_member(member));
    }

    /// Whether a member may name the segment, now or later.
    pub(crate) fn may_be_named(&self, basis: &Basis, no: SegmentNo) -> bool {
        let members = &basis.root().dependents;
        match self.withdrawn.get(&no) {
            None => !members.is_empty(),
            Some(_) if basis.config.mutations.frees_on_any_list() => {
                members.iter().any(|of| self.published.get(&of.volume).is_some_and(|names| names.ranges.contains(no)))
            }
            Some(since) => members.iter().any(|of| {
                let names = self.published.get(&of.volume);
                names.is_none_or(|names| names.catalogue < *since || names.ranges.contains(no))
            }),
        }
    }

    /// A segment that no member names, as far as they have published, and that was offered to nobody for long. A few are
    /// looked at in one go.
    pub(crate) fn unnamed(
        &mut self,
        basis: &Basis,
        segments: &Segments,
        is_left_alone: impl Fn(SegmentNo) -> bool,
    ) -> Unnamed {
        let members = &basis.root().dependents;
        let is_named = |no: SegmentNo| {
            let may_name = |names: Option<&Names>| names.is_none_or(|names| names.ranges.contains(no));
            members.iter().any(|of| may_name(self.published.get(&of.volume)))
        };
        let is_old = |no: &SegmentNo| {
            let since = self.offered_at.get(no).copied().unwrap_or(basis.opened_at);
            basis.now.since(since) >= basis.config.forget_after
        };
        let is_data = |info: &SegmentInfo| info.kind == Kind::Data && info.is_visible();
        let (mut looked_to, mut ahead) = (self.looked_to, segments.own_after(self.looked_to));
        let is_it = |(no, info): (SegmentNo, &SegmentInfo)| {
            looked_to = Some(no);
            (is_data(info) && is_old(&no) && !is_named(no) && !is_left_alone(no)).then_some(no)
        };
        let found = ahead.by_ref().take(LOOKED_AT).find_map(is_it);
        let is_over = found.is_none() && ahead.next().is_none();
        self.looked_to = looked_to.filter(|_| !is_over);
        match found {
            Some(no) => Unnamed::Found(no),
            None if is_over => Unnamed::Nothing,
            None => Unnamed::More,
        }
    }

    pub(crate) fn verify(&self) {
        assert_eq!(self.order.len(), self.lists.len(), "lists are in order");
        assert!(self.due.iter().all(|due| self.is_due.contains(due)) && self.is_due.len() == self.due.len());
        assert_eq!(self.content.blocks.len(), self.content.prints.len());
        let gathered = self.gathering.values().map(|(content, _)| content.prints.len());
        let coming = self.content.prints.len() + gathered.sum::<usize>();
        assert_eq!(coming, self.coming.len(), "nothing is gathered twice");
        self.index.verify();
    }
}

/// Of a store: the same for all of its owners, so that what was printed once is known by all. It is no secret, and needs
/// not be one: prints leave no host, and who knows the key still can't make two blocks that have one.
fn print_key_of(volume: VolumeId) -> [u8; 32] {
    let mut key = *b"holdfast print key 1............";
    key[16..].copy_from_slice(&volume.0.to_le_bytes());
    key
}

/// Runs that follow each other in their segment, as one.
fn one_run(runs: &[LiveRun]) -> Option<SharedRun> {
    let first = runs.first()?;
    match &first.stored {
        Stored::Plain { block } => {
            let mut end = *block;
            for run in runs {
                let Stored::Plain { block } = run.stored else { return None };
                if block != end || run.segment != first.segment {
                    return None;
                }
                end += run.blocks() as u32;
            }
            Some(SharedRun::Plain { block: *block })
        }
        Stored::Packed { granule, .. } => {
            let (mut all, mut end) = (Vec::new(), None);
            for run in runs {
                let Stored::Packed { granule, lengths } = &run.stored else { return None };
                let expected = end.map(|end| lengths.iter().next().map_or(end, |length| length.start_after(end)));
                if expected.is_some_and(|expected| expected != *granule) || run.segment != first.segment {
                    return None;
                }
                all.extend(lengths.iter());
                end = Some(lengths.end_from(*granule));
            }
            Some(SharedRun::Packed { granule: *granule, lengths: StoredLengths::new(all) })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::Crcs;
    use crate::peers::tests::leg;
    use crate::segment::tests::info;
    use holdfast_base::Epoch;
    use holdfast_format::sharing::{Dependent, STORE_EPOCHS};

    fn seen(volume: u128) -> Seen {
        Seen { volume: VolumeId(volume), segment: SegmentNo { epoch: Epoch(1), counter: 0 } }
    }

    /// What is wanted, and how many offers follow.
    fn heard(store: &mut Store, basis: &Basis, seen: Seen, prints: &[Print]) -> (Vec<Print>, u32) {
        let Heard { wanted, offers, unsure } = store.on_report(basis, seen, prints);
        assert!(unsure.is_empty());
        (wanted, offers)
    }

    #[test]
    fn what_a_volume_has_twice_is_wanted_once_it_has_told_that_both_live() {
        let (mut store, basis) = (Store::default(), crate::basis::tests::basis("mirror:2"));
        let prints: Vec<Print> = (1..=20).map(Print).collect();
        let own = |counter| Seen { segment: SegmentNo { counter, ..seen(1).segment }, ..seen(1) };
        assert_eq!(heard(&mut store, &basis, own(1), &prints), (Vec::new(), 0), "it is new");
        let told = store.on_report(&basis, own(2), &prints);
        assert_eq!((told.wanted.len(), told.offers, told.unsure), (0, 1, vec![own(1).segment]));
        store.on_own_counted(&basis, VolumeId(1), &[(own(1).segment, 20)]);
        assert_eq!(heard(&mut store, &basis, own(2), &prints), (prints.clone(), 0));
        // It was moved on from there.
        store.on_own_counted(&basis, VolumeId(1), &[(own(1).segment, 0)]);
        assert_eq!(heard(&mut store, &basis, own(3), &prints), (Vec::new(), 0));
        store.verify();
    }

    #[test]
    fn what_is_offered_no_more_waits_for_no_prints() {
        let (mut store, mut basis) = (Store::default(), crate::basis::tests::basis("mirror:2"));
        let (member, of_member) = (VolumeId(3), seen(3).segment);
        let stored = SegmentNo { epoch: STORE_EPOCHS, counter: 1 };
        let dependents = vec![Dependent { volume: member, upto: stored }];
        basis.replace_root(Root { dependents, ..basis.root().clone() });
        let mut segments = Segments::default();
        segments.insert(stored, info(100, 20, &[leg(1, 0), leg(2, 0)]));
        for _ in 0..2 {
            store.make_due(member, of_member, stored);
            let next = store.next_offer(&basis, &segments);
            assert!(matches!(next, Some((_, _, Err(no))) if no == stored), "its prints are to be known first");
        }
        assert_eq!(store.unlisted.len(), 1);
        store.offer_no_more(basis.volume(), stored);
        assert!(store.unlisted.is_empty());
        store.verify();
    }

    #[test]
    fn what_is_on_its_way_from_one_is_not_wanted_of_another_who_tells_of_it_again() {
        let (mut store, mut basis) = (Store::default(), crate::basis::tests::basis("mirror:2"));
        let prints: Vec<Print> = (1..=20).map(Print).collect();
        let blocks = vec![7; prints.len() * BLOCK_BYTES];
        let crcs = block_crcs(&blocks);
        assert_eq!(heard(&mut store, &basis, seen(1), &prints), (Vec::new(), 0), "it is new");
        assert_eq!(heard(&mut store, &basis, seen(2), &prints), (prints.clone(), 0));
        assert_eq!(heard(&mut store, &basis, seen(3), &prints), (Vec::new(), 1), "it was asked of another");
        let sent = || Sent { prints: &prints, crcs: &crcs, blocks: &blocks };
        store.on_content(basis.now, seen(2), sent());
        assert_eq!(heard(&mut store, &basis, seen(3), &prints), (Vec::new(), 1), "it has come");
        store.on_content(basis.now, seen(3), sent());
        assert_eq!(store.content.blocks.len(), prints.len());
        store.verify();
        basis.now = basis.now + basis.config.repack_every;
        assert!(store.close(&basis, || 0).is_some());
        assert_eq!(heard(&mut store, &basis, seen(3), &prints), (Vec::new(), 1), "it is being written");
        store.verify();
        store.on_refused(0);
        assert_eq!(heard(&mut store, &basis, seen(3), &prints), (prints.clone(), 0), "there was no room for it");
        store.verify();
    }

    const STORED: SegmentNo = SegmentNo { epoch: STORE_EPOCHS, counter: 7 };

    /// A table with so many segments that are dead.
    fn dead(count: u64) -> Segments {
        let mut segments = Segments::default();
        for counter in 0..count {
            segments.insert(SegmentNo { counter, ..STORED }, info(32, 0, &[leg(1, 0), leg(2, 0)]));
        }
        segments
    }

    #[test]
    fn what_is_dead_is_withdrawn_a_few_at_a_time_and_all_of_it() {
        let (mut store, basis) = (Store::default(), crate::basis::tests::basis("mirror:2"));
        let (all, each) = (10 * LOOKED_AT as u64 + 5, LOOKED_AT);
        let mut segments = dead(all);
        let slices = |store: &mut Store, segments: &Segments| {
            let so_many = |store: &mut Store| {
                store.settle(segments);
                let before = store.withdrawn.len();
                store.withdraw(&basis, segments);
                store.withdrawn.len() - before
            };
            (0..11).map(|_| so_many(store)).collect::<Vec<usize>>()
        };
        assert_eq!(slices(&mut store, &segments), [each, each, each, each, each, each, each, each, each, each, 5]);
        assert_eq!((store.withdrawn.len() as u64, store.counter), (all, 11));
        (0..all).for_each(|counter| drop(segments.remove(SegmentNo { counter, ..STORED })));
        slices(&mut store, &segments);
        assert!(store.withdrawn.is_empty() && store.newest(&basis).is_none(), "nobody waits for what is gone");
    }

    #[test]
    fn what_was_withdrawn_while_it_was_printed_is_in_no_index() {
        let (mut store, basis) = (Store::default(), crate::basis::tests::basis("mirror:2"));
        let prints: Vec<Print> = (1..=4).map(Print).collect();
        let run = |segment| LiveRun {
            key: 0,
            segment,
            stored: Stored::Plain { block: 0 },
            crcs: Crcs::new([1; 4].as_slice()),
        };
        let printed = |segment| Printed::of(segment, vec![run(segment)], prints.clone());
        assert!(store.withdraw(&basis, &dead(8)));
        store.on_own_printed(basis.volume(), &printed(STORED));
        assert!(!store.index.is_stored(prints[0]), "content would never be wanted again");
        store.on_own_printed(basis.volume(), &printed(SegmentNo { counter: 8, ..STORED }));
        assert!(store.index.is_stored(prints[0]));
        store.verify();
    }

    #[test]
    fn a_member_that_stays_away_is_not_asked_often_for_ever() {
        let (mut store, mut basis) = (Store::default(), crate::basis::tests::basis("mirror:2"));
        let rest = basis.config.repack_every;
        basis.now = basis.now + 50 * rest;
        assert!(!store.is_waiting_for_lists(basis.now, rest), "nothing is withdrawn");
        assert!(store.withdraw(&basis, &dead(1)));
        assert!(store.is_waiting_for_lists(basis.now + rest, rest));
        assert!(!store.is_waiting_for_lists(basis.now + 20 * rest, rest), "who has not said it by then says it later");
    }

    #[test]
    fn the_store_speaks_for_those_alone_that_have_never_shared() {
        let (mut store, basis) = (Store::default(), crate::basis::tests::basis("mirror:2"));
        let never = Names::of_nobody(store.catalogue(&basis));
        assert_eq!(store.names_for(&basis, &never), None, "nobody waits for it");
        assert!(store.withdraw(&basis, &dead(1)));
        let said = store.names_for(&basis, &never).expect("it is behind");
        assert_eq!((said.epoch, said.catalogue), (NOBODY, store.catalogue(&basis)));
        assert_eq!(store.names_for(&basis, &said), None);
        let shares = Names { epoch: Epoch(1), ..never };
        assert_eq!(store.names_for(&basis, &shares), None, "it speaks for itself");
    }
}
