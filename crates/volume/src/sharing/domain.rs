//! Sharing domains: volumes whose equal content a *store* has once, for all of them (protocol rule 28).
//!
//! Role: what a controller does for its parts of this, the [`Printer`](super::Printer), and a
//! [`Member`](super::Member) or a [`Store`](super::Store). They tell each other by [`Effect::Talk`], which may be lost.

use super::index::Seen;
use super::member::Opening;
use super::printer::by_position;
use super::store::{Heard, Sent, Unnamed};
use crate::api::{Effect, State};
use crate::care::{LiveRun, Returned};
use crate::controller::{Controller, Out};
use crate::log::window::Done;
use crate::map::Pins;
use crate::owner::root::Change;
use crate::segment::task::Task;
use crate::segment::writer::Aim;
use crate::space::Need;
use holdfast_base::{Buf, Epoch, HeadId, Instant, Key, Lba, Lsn, MetaReply, MetaRequest, MetaVersion, VolumeId};
use holdfast_cipher::{PrintKey, VolumeKey};
use holdfast_format::features::Feature;
use holdfast_format::record::{Record, SegmentNo, SharedSegment};
use holdfast_format::root::{Root, root_key};
use holdfast_format::sharing::{Dependent, Names, STORE_EPOCHS, SegmentRanges, dependent_key};
use holdfast_format::talk::{Offer, Print, Talk};
use std::collections::{BTreeSet, VecDeque};

/// In tokens of requests to the metadata store that are about sharing.
pub(crate) const META: u64 = 1 << 62;

/// Offers that are made in one turn.
const OFFERS_AT_ONCE: usize = 8;

/// Blocks of one message, so that nobody has to take many megabytes in one turn.
const SENT_AT_ONCE: usize = 256;

/// Segments that one message asks about.
const SLICE_MAX: usize = 2 * super::store::LOOKED_AT;

/// Runs of numbers in a member's record.
const RANGES_MAX: usize = 1024;

/// The parts.
#[derive(Debug, Default)]
pub(crate) struct Domain {
    pub(crate) printer: super::Printer,
    pub(crate) member: super::Member,
    pub(crate) store: super::Store,
    /// What members have published is looked at one by one.
    asks: VecDeque<VolumeId>,
    asked: Option<Asked>,
    asked_at: Instant,
    looked_at: Instant,
    hurried_at: Instant,
    looks_for_unnamed_at: Instant,
    /// Nobody names it, and what the store's map has of it no index tells: the map is walked.
    forgets: Option<SegmentNo>,
    token: u64,
}

/// A request of the store about one member, whose answer is awaited.
#[derive(Clone, Copy, Debug)]
struct Asked {
    token: u64,
    member: VolumeId,
    what: Ask,
}

/// What is wanted of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ask {
    /// It wants to be a member, and has perhaps left before: its record is to hold nothing.
    Joins,
    /// What its record says.
    Names,
    /// Whether its root has forgotten the store: this version of its record says that it has left.
    Root(MetaVersion),
}

impl Domain {
    fn is_at_rest(&self) -> bool {
        self.printer.is_at_rest() && self.member.is_at_rest() && self.store.is_at_rest()
    }

    /// Blocks that were named in a store, or gathered into this one.
    pub(crate) fn shared_blocks(&self) -> u64 {
        self.member.shared_blocks + self.store.gathered_blocks
    }

    pub(crate) fn verify(&self) {
        self.member.verify();
        self.store.verify();
    }
}

impl Controller {
    /// The volume is to be in the domain of that store.
    /// One that is in another domain already stays there.
    pub(crate) fn on_set_sharing(&mut self, store: VolumeId, key: Option<VolumeKey>) {
        self.basis.config.leaves_domain = false;
        if self.shared.domain.member.join(store) {
            // Another store knows nothing of what this one was told.
            self.shared.domain.printer.begin_anew();
        }
        // Perhaps before the root is read.
        let named = self.basis.known().and_then(|root| root.stores.first());
        if named.is_none_or(|of| of.volume == store) {
            self.basis.config.store_key = key.map(|key| (store, key));
        }
    }

    pub(crate) fn on_end_sharing(&mut self) {
        self.basis.config.leaves_domain = true;
        self.shared.domain.member.leave();
        self.shared.domain.printer.stop();
    }

    /// One that is to leave has not left yet.
    pub(crate) fn domain_is_at_rest(&self) -> bool {
        let leaves = self.basis.config.leaves_domain && !self.root().stores.is_empty();
        !leaves && self.shared.domain.is_at_rest()
    }

    /// The store of its domain, as its root says.
    pub fn store_named(&self) -> Option<VolumeId> {
        self.root().stores.first().map(|store| store.volume)
    }

    /// Whether what that store has can be read here: a domain is encrypted as a whole, or not.
    pub(crate) fn opens_store(&self, store: VolumeId) -> bool {
        let config = &self.basis.config;
        config.key.is_some() == config.store_key.as_ref().is_some_and(|(of, _)| *of == store)
    }

    /// The store of the domain that the volume is in, or else is to be in. A volume has one: its record in the metadata store,
    /// and what it says, are of that.
    fn store(&self) -> Option<VolumeId> {
        self.store_named().or_else(|| self.shared.domain.member.wanted.filter(|store| self.may_join(*store)))
    }

    /// Separate clones know of no stores.
    fn may_join(&self, store: VolumeId) -> bool {
        let root = self.root();
        let is_alone = root.dependents.is_empty() && root.origins.is_empty() && !self.shared.is_creating_any();
        is_alone && self.opens_store(store)
    }

    /// A store, or a member of one.
    pub(crate) fn is_in_domain(&self) -> bool {
        self.root().is_store() || self.shared.domain.member.wanted.is_some() || !self.root().stores.is_empty()
    }

    pub(crate) fn on_domain_serving(&mut self) {
        let last = Lsn(self.log.next_lsn().0 - 1);
        self.shared.domain.member.on_serving(last);
    }

    fn talk(&self, to: VolumeId, talk: Talk, out: Out) {
        out.push(Effect::Talk { to, talk: Box::new(talk) });
    }

    /// What is done by the way while the volume is open.
    pub(crate) fn drive_domain(&mut self, out: Out) {
        if self.state != State::Open {
            return;
        }
        // Perhaps of a domain that it has left.
        if self.shared.domain.printer.on_tick(&self.basis) {
            self.end_pass();
        }
        if !self.is_in_domain() {
            return;
        }
        if self.root().is_store() { self.drive_store(out) } else { self.drive_member(out) }
    }

    // ---- passes ----

    /// Whether a pass has begun that copies back what a volume names of a store: all, where it leaves that, or what the
    /// store vacates.
    pub(crate) fn returns_from_store(&mut self) -> bool {
        if self.root().is_store() {
            return self.walks_to_forget();
        }
        let leaves = self.basis.config.leaves_domain && self.segments.foreign().next().is_some();
        let misplaced = self.care.cleaner.take_of_store();
        self.on_vacate(&misplaced);
        let vacates = !self.shared.domain.member.returns.is_empty();
        if !leaves && !vacates || !self.may_move_data(Need::Choice) {
            return false;
        }
        let only = (!leaves).then(|| self.shared.domain.member.returns.clone());
        let (care, mut around) = self.care();
        let returned = care.cleaner.begin_walk(&mut around, only, Aim::Return);
        if returned == Returned::All {
            // What is named all the same the store asks for again.
            self.shared.domain.member.returns.clear();
        }
        returned == Returned::Begun
    }

    /// The same, of a segment of a store: whether the next leaves are looked through for what they name of it.
    fn walks_to_forget(&mut self) -> bool {
        let Some(no) = self.shared.domain.forgets else { return false };
        let (care, mut around) = self.care();
        let walked = care.cleaner.begin_walk(&mut around, Some(BTreeSet::from([no])), Aim::Forget);
        if walked == Returned::All {
            self.shared.domain.forgets = None;
        }
        walked == Returned::Begun
    }

    /// What the store vacates is to be copied back, as is what lies where it may not. One walk over the map at a time.
    fn on_vacate(&mut self, segments: &[SegmentNo]) {
        let returns = &mut self.shared.domain.member.returns;
        if returns.is_empty() && !segments.is_empty() {
            let named = segments.iter().take(SLICE_MAX).filter(|no| self.segments.get(**no).is_some());
            returns.extend(named.filter(|no| no.epoch >= STORE_EPOCHS));
            self.care.cleaner.return_from_start();
        }
    }

    /// Members are asked how much they name of a slice of segments, now and then.
    fn look_for_sparse(&mut self, out: Out) {
        if let Some(segments) = self.shared.domain.store.sparse.ask(&self.basis, &self.segments) {
            for of in &self.root().dependents {
                self.talk(of.volume, Talk::Count { segments: segments.clone() }, out);
            }
        }
    }

    /// A member names so much of segments: of the store's, or of its own.
    fn on_counted(&mut self, from: VolumeId, counts: &[(SegmentNo, u32)], out: Out) {
        let (own, counts): (Vec<_>, Vec<_>) = counts.iter().partition(|(no, _)| no.epoch < STORE_EPOCHS);
        self.shared.domain.store.on_own_counted(&self.basis, from, &own);
        if counts.is_empty() {
            return;
        }
        let segments = self.shared.domain.store.sparse.on_counted(from, &counts);
        if segments.is_empty() {
            return;
        }
        for no in &segments {
            self.shared.domain.store.offer_no_more(self.basis.volume(), *no);
        }
        for of in &self.root().dependents {
            self.talk(of.volume, Talk::Vacate { segments: segments.clone() }, out);
        }
    }

    /// The next pass that is about sharing, if one is due.
    pub(crate) fn next_sharing_pass(&mut self) -> Option<(SegmentNo, Aim)> {
        if !self.is_in_domain() || self.basis.config.leaves_domain || self.print_key().is_none() {
            return None;
        }
        if !self.root().is_store()
            && self.shared.domain.member.may_share()
            && self.uses(Feature::Stores)
            && let Some(segment) = self.shared.domain.member.next_take()
        {
            return Some((segment, Aim::Share));
        }
        let store = self.root().is_store();
        let is_walking = self.shared.domain.forgets.is_some();
        let looks = store && !is_walking && self.basis.now >= self.shared.domain.looks_for_unnamed_at;
        let (cleaner, shared) = (&mut self.care.cleaner, &mut self.shared.domain.store);
        if looks {
            match shared.unnamed(&self.basis, &self.segments, |no| cleaner.is_emptied(no)) {
                Unnamed::Found(segment) if cleaner.is_unreadable(segment) => {
                    cleaner.return_from_start();
                    self.shared.domain.forgets = Some(segment);
                }
                Unnamed::Found(segment) => return Some((segment, Aim::Forget)),
                Unnamed::More => {}
                Unnamed::Nothing => {
                    let pause = self.basis.config.forget_after / 10;
                    self.shared.domain.looks_for_unnamed_at = self.basis.now + pause;
                }
            }
        }
        if !store && !self.shared.domain.member.may_share() || !self.may_move_data(Need::Choice) {
            return None;
        }
        if self.shared.domain.printer.is_awaited() {
            return None;
        }
        let guests_are_away = store || self.basis.now.since(self.last_activity) >= self.basis.config.repack_every;
        let mut printer = std::mem::take(&mut self.shared.domain.printer);
        let (care, around) = self.care();
        let left_alone = |no| care.cleaner.is_unreadable(no) || care.cleaner.is_emptied(no);
        let found = printer.take(&around, left_alone, guests_are_away);
        self.shared.domain.printer = printer;
        found.map(|no| (no, Aim::Print))
    }

    /// What was printed is forgotten where it is needed.
    fn print_again(&mut self, no: SegmentNo) {
        if self.segments.get(no).is_some() {
            self.segments.set_printed(no, None);
            self.shared.domain.printer.again(no);
        }
    }

    fn end_pass(&mut self) {
        let (care, mut around) = self.care();
        if care.cleaner.aim().is_some_and(|aim| !aim.writes()) {
            care.cleaner.end_pass(&mut around);
        }
    }

    /// What equal content is found by. The key of an encrypted store tells it, and no message does.
    fn print_key(&self) -> Option<PrintKey> {
        let config = &self.basis.config;
        let (membership, key) = if self.root().is_store() {
            (self.shared.domain.store.membership(&self.basis), config.key.as_ref())
        } else {
            (*self.shared.domain.member.membership()?, config.store_key.as_ref().map(|(_, key)| key))
        };
        Some(key.map_or_else(|| PrintKey::new(membership.print_key), VolumeKey::print_key))
    }

    /// All that lives in a segment was read.
    pub(crate) fn on_seen(&mut self, runs: Vec<LiveRun>, blocks: &[Buf], out: Out) {
        let (Some(key), Some(segment)) = (self.print_key(), runs.first().map(|run| run.segment)) else {
            return self.end_pass();
        };
        let (job, until) = self.shared.domain.printer.begin(self.basis.now, segment, runs, blocks);
        out.push(Effect::Work { job, task: Task::Print(key), blocks: blocks.to_vec(), until });
    }

    pub(crate) fn on_printed(&mut self, job: u64, prints: Option<Vec<Print>>, out: Out) {
        let was_printing = self.shared.domain.printer.is_printing();
        let Some(printed) = self.shared.domain.printer.on_printed(self.basis.now, job, prints) else {
            if was_printing && !self.shared.domain.printer.is_printing() {
                self.end_pass();
                let mut printer = std::mem::take(&mut self.shared.domain.printer);
                printer.rest(&self.care().1);
                self.shared.domain.printer = printer;
            }
            return;
        };
        let segment = printed.segment;
        if self.basis.root().is_store() {
            self.shared.domain.store.on_own_printed(self.basis.volume(), printed);
        } else if let Some(of) = self.shared.domain.member.membership().filter(|_| !self.basis.config.leaves_domain) {
            let by_position = by_position(printed);
            let (store, prints) = (of.store.volume, by_position.values().copied().collect());
            self.shared.domain.printer.wait_for_word();
            self.shared.domain.member.remember(self.basis.now, segment, by_position);
            self.talk(store, Talk::Report { segment, prints }, out);
        } else {
            // Nobody was told of it.
            return self.end_pass();
        }
        self.segments.set_printed(segment, Some(self.shared.domain.printer.round()));
        self.end_pass();
    }

    /// What lives in a segment is known, and nothing of it is to be read.
    pub(crate) fn on_live_found(&mut self, aim: Aim, runs: &[LiveRun], out: Out) {
        if aim == Aim::Forget {
            // One record for each run; the pass is over with the last.
            let count = runs.len();
            for (i, run) in runs.iter().enumerate() {
                let done = if i + 1 == count { Done::PassOver } else { Done::Nothing };
                self.append_control(Record::Discard { key: Key(run.key), blocks: run.blocks() }, done, out);
            }
            if runs.is_empty() {
                self.end_pass();
            }
            return;
        }
        let are_crcs = self.basis.config.key.is_none();
        match self.shared.domain.member.share(runs, are_crcs) {
            Some(share) => {
                let lsn = self.append_control(Record::Share(Box::new(share)), Done::PassOver, out);
                self.shared.domain.member.on_shared(lsn);
            }
            None => self.end_pass(),
        }
    }

    /// The record of a pass is complete.
    pub(crate) fn on_pass_over(&mut self, out: Out) {
        self.end_pass();
        self.wants.free_dead();
        self.drive_domain(out);
    }

    // ---- a member ----

    fn drive_member(&mut self, out: Out) {
        let Some(store) = self.store() else { return };
        self.shared.domain.member.pace = self.basis.config.repack_every;
        self.shared.domain.member.takes_old_offers = self.basis.config.mutations.takes_old_offers();
        if self.basis.config.leaves_domain && self.says_that_it_left(store, out) {
            return;
        }
        if self.shared.domain.member.asks_to_join(self.basis.now) {
            self.talk(store, Talk::Join { member: self.basis.volume() }, out);
        }
        if !self.root().stores.iter().any(|of| of.volume == store) {
            return;
        }
        if let Some((segment, prints)) = self.shared.domain.member.report_again(self.basis.now) {
            self.talk(store, Talk::Report { segment, prints }, out);
        }
        let mut member = std::mem::take(&mut self.shared.domain.member);
        let request = member.publish(self.basis.now, self.opening_of(&member), || self.named_of_store(store));
        self.shared.domain.member = member;
        self.ask_meta(request, out);
    }

    fn opening_of(&self, member: &super::Member) -> Opening {
        Opening {
            member: self.basis.volume(),
            epoch: self.epoch(),
            durable: self.checkpointer.durable().lsn,
            changes: self.named_generation().1 + member.shares,
        }
    }

    fn ask_meta(&mut self, request: Option<MetaRequest>, out: Out) {
        if let Some(request) = request {
            self.shared.domain.token += 1;
            out.push(Effect::Meta { token: META | self.shared.domain.token, request });
        }
    }

    /// A member that is to leave, and names nothing of the store any more, says so; true where there is nothing else to do.
    /// Until then it publishes what it still names, if the store's word came before.
    fn says_that_it_left(&mut self, store: VolumeId, out: Out) -> bool {
        // Of a new opening this is the first word of it.
        self.shared.domain.member.leave();
        if self.segments.foreign().next().is_some() || !self.named_of_store(store).is_empty() {
            return self.shared.domain.member.membership().is_none();
        }
        let mut member = std::mem::take(&mut self.shared.domain.member);
        let request = member.say_that_it_left(self.basis.now, self.opening_of(&member), store);
        self.shared.domain.member = member;
        self.ask_meta(request, out);
        if self.shared.domain.member.has_left() {
            self.drive_root(out);
        } else {
            // What it has shared last is to be in one.
            self.wants.checkpoint |= self.checkpointer.durable().lsn < self.shared.domain.member.shared_at();
        }
        true
    }

    /// Whether the volume's root is to forget the store: its record says that it has left.
    fn wants_store_forgotten(&self) -> Option<Root> {
        let root = self.root();
        let has_left = self.basis.config.leaves_domain && self.shared.domain.member.has_left();
        (has_left && !root.stores.is_empty()).then(|| Root { stores: Vec::new(), ..root.clone() })
    }

    /// Which of the store's segments this volume may name, whatever becomes of it.
    fn named_of_store(&self, store: VolumeId) -> SegmentRanges {
        let mut named: Vec<SegmentNo> = self.segments.foreign().map(|(no, _)| no).collect();
        named.extend(self.checkpointer.condemned());
        named.retain(|no| self.root().owner_of(*no) == store);
        named.sort_unstable();
        SegmentRanges::holding(named.into_iter(), RANGES_MAX)
    }

    /// The volume's root is to name the store that its own names.
    pub(crate) fn wants_store_named(&self) -> Option<Root> {
        let of = self.shared.domain.member.membership()?;
        let root = self.root();
        if self.basis.config.leaves_domain || root.is_store() || !root.stores.is_empty() {
            return None;
        }
        // What the store has packed may be moved as it lies.
        let features = root.features.clone().with(Feature::Stores).with(Feature::Packed);
        Some(Root { features, stores: vec![of.store], ..root.clone() }).filter(Root::stores_are_valid)
    }

    // ---- the store ----

    fn drive_store(&mut self, out: Out) {
        let (now, own) = (self.basis.now, self.basis.volume());
        self.shared.domain.store.on_tick(&self.basis);
        self.send_offers(out);
        let live = self.map.layers().live(HeadId::VOLUME);
        let mapped_end = || live.map_or(0, |live| self.map.mapped_end(live));
        if let Some(work) = self.shared.domain.store.close(&self.basis, mapped_end) {
            self.write_segment(work, out);
        }
        self.withdraw_dead(out);
        self.look_for_sparse(out);
        if self.shared.domain.asked.is_some() && now.since(self.shared.domain.asked_at) < self.basis.config.repack_every
        {
            return;
        }
        self.shared.domain.asked = None;
        if let Some(member) = self.shared.domain.store.asking.pop_first() {
            let names = Names::of_nobody(self.shared.domain.store.catalogue(&self.basis));
            return self.publish_for(member, Ask::Joins, MetaVersion::ABSENT, &names, out);
        }
        self.look_at_members(out);
        let Some(member) = self.shared.domain.asks.pop_front() else { return };
        self.ask_meta_of(member, Ask::Names, MetaRequest::Get { key: dependent_key(own, member) }, out);
    }

    /// All of them are looked at now and then; those that are behind sooner, for a while.
    fn look_at_members(&mut self, out: Out) {
        let (now, every) = (self.basis.now, self.basis.config.repack_every);
        let domain = &mut self.shared.domain;
        let is_due = now.since(domain.looked_at) >= every;
        let is_hurried = domain.store.is_waiting_for_lists(now, every) && now.since(domain.hurried_at) >= every / 10;
        if !domain.asks.is_empty() || !is_due && !is_hurried {
            return;
        }
        domain.hurried_at = now;
        if is_due {
            domain.looked_at = now;
            domain.asks = self.basis.root().dependents.iter().map(|of| of.volume).collect();
        } else {
            domain.asks = domain.store.behind(&self.basis).into();
        }
        // Who has not published as of the newest state may not have heard of it.
        self.tell_catalogue(out);
    }

    /// One request at a time is under way.
    fn ask_meta_of(&mut self, member: VolumeId, what: Ask, request: MetaRequest, out: Out) {
        self.shared.domain.token += 1;
        let token = META | self.shared.domain.token;
        self.shared.domain.asked = Some(Asked { token, member, what });
        self.shared.domain.asked_at = self.basis.now;
        out.push(Effect::Meta { token, request });
    }

    /// Writes a record for a member that has not shared since it wants to be one. One owner of the store at a time does, so
    /// that what its root names then is what counts.
    fn publish_for(&mut self, member: VolumeId, what: Ask, expect: MetaVersion, names: &Names, out: Out) {
        let (key, value) = (dependent_key(self.basis.volume(), member), Some(names.encode()));
        let guard = Some(self.root_guard());
        self.ask_meta_of(member, what, MetaRequest::Swap { key, expect, value, guard }, out);
    }

    fn send_offers(&mut self, out: Out) {
        for _ in 0..OFFERS_AT_ONCE {
            let next = self.shared.domain.store.next_offer(&self.basis, &self.segments);
            let Some((member, segment, offer)) = next else { return };
            match offer {
                Ok(offer) => self.talk(member, Talk::Take { segment, offer: Box::new(offer) }, out),
                Err(own) => self.print_again(own),
            }
        }
    }

    /// What of the store's data its map names no more is offered no more.
    fn withdraw_dead(&mut self, out: Out) {
        self.shared.domain.store.settle(&self.segments);
        if self.shared.domain.store.withdraw(&self.basis, &self.segments) {
            self.tell_catalogue(out);
        }
    }

    fn tell_catalogue(&self, out: Out) {
        let catalogue = self.shared.domain.store.catalogue(&self.basis);
        for member in self.shared.domain.store.behind(&self.basis) {
            self.talk(member, Talk::Catalogue(catalogue), out);
        }
    }

    pub(crate) fn on_gathered(&mut self, id: u64, out: Out) {
        let Some((first, blocks)) = self.shared.domain.store.extent_of(id) else { return };
        let live = self.map.layers().live(HeadId::VOLUME).expect("every volume has a live layer");
        let pieces = self.map.resolve(Key::new(live, Lba(first)).0, blocks, &Pins::default()).unwrap_or_default();
        let runs: Vec<LiveRun> =
            pieces.into_iter().filter_map(|piece| LiveRun::of(piece.start, piece.value?)).collect();
        self.shared.domain.store.on_gathered(id, self.basis.volume(), &runs);
        self.send_offers(out);
    }

    /// These want to be members.
    pub(crate) fn wants_members(&self) -> Option<Root> {
        let joining = &self.shared.domain.store.joining;
        if joining.is_empty() || !self.root().is_store() {
            return None;
        }
        let mut root = self.root().clone();
        let upto = SegmentNo { epoch: Epoch(u64::MAX), counter: u64::MAX };
        root.dependents.extend(joining.iter().map(|volume| Dependent { volume: *volume, upto }));
        root.features = root.features.with(Feature::Stores);
        Some(root)
    }

    pub(crate) fn on_members_changed(&mut self, out: Out) {
        let joining = &self.shared.domain.store.joining;
        let named = self.basis.root().dependents.iter().map(|of| of.volume);
        // Who asked while the swap was under way is not among them.
        let joined: Vec<VolumeId> = named.filter(|member| joining.contains(member)).collect();
        self.shared.domain.store.keep_members(self.basis.root());
        joined.into_iter().for_each(|member| self.welcome(member, out));
    }

    fn welcome(&self, member: VolumeId, out: Out) {
        let membership = self.shared.domain.store.membership(&self.basis);
        self.talk(member, Talk::Joined { member, membership }, out);
    }

    // ---- what is told, and what comes back ----

    pub(crate) fn on_talk(&mut self, from: VolumeId, talk: Talk, out: Out) {
        if self.state != State::Open {
            return;
        }
        let is_member = self.root().dependents.iter().any(|of| of.volume == from);
        match talk {
            Talk::Join { member } if self.root().is_store() => {
                let is_named = self.root().dependents.iter().any(|of| of.volume == member);
                if is_named && !self.shared.domain.store.has_left(member) {
                    return self.welcome(member, out);
                }
                self.shared.domain.store.asking.insert(member);
                self.drive_domain(out);
            }
            Talk::Report { segment, prints } if self.root().is_store() && is_member => {
                let seen = Seen { volume: from, segment };
                let Heard { wanted, offers, unsure } = self.shared.domain.store.on_report(&self.basis, seen, &prints);
                self.talk(from, Talk::Heard { segment, wanted, offers }, out);
                if !unsure.is_empty() {
                    self.talk(from, Talk::Count { segments: unsure }, out);
                }
                self.send_offers(out);
            }
            Talk::Content { segment, prints, crcs, blocks } if self.root().is_store() && is_member => {
                let from = Seen { volume: from, segment };
                let sent = Sent { prints: &prints, crcs: &crcs, blocks: &blocks };
                self.shared.domain.store.on_content(self.basis.now, from, sent);
                self.drive_domain(out);
            }
            Talk::Counted { blocks } if self.root().is_store() && is_member => self.on_counted(from, &blocks, out),
            talk if self.root().is_store() => drop(talk),
            talk => self.on_store_said(from, talk, out),
        }
    }

    fn on_store_said(&mut self, store: VolumeId, talk: Talk, out: Out) {
        let is_ours = self.shared.domain.member.membership().is_some_and(|of| of.store.volume == store);
        let shares = is_ours && !self.basis.config.leaves_domain;
        match talk {
            Talk::Joined { member, membership }
                if member == self.basis.volume() && self.store() == Some(store) && membership.store.volume == store =>
            {
                self.shared.domain.member.on_joined(membership);
                self.drive_root(out);
            }
            Talk::Heard { segment, wanted, offers } if shares => {
                self.shared.domain.member.on_heard(segment, wanted.is_empty() && offers == 0);
                if !wanted.is_empty() {
                    self.send_content(store, segment, wanted, out);
                }
                self.shared.domain.printer.on_word(segment);
            }
            Talk::Take { segment, offer } if shares && self.may_take(&offer) => {
                if let Some(forgotten) = self.shared.domain.member.on_offer(segment, offer) {
                    self.print_again(forgotten);
                }
            }
            Talk::Count { segments } if is_ours => {
                let blocks = segments.iter().take(SLICE_MAX).map(|no| (*no, self.blocks_named_of(*no))).collect();
                self.talk(store, Talk::Counted { blocks }, out);
            }
            Talk::Vacate { segments } if shares => self.on_vacate(&segments),
            Talk::Catalogue(no) if is_ours => {
                self.shared.domain.member.hear(no);
                // The record waits for one.
                self.wants.checkpoint = true;
            }
            _ => {}
        }
    }

    /// What was moved away is named no more, though no checkpoint says so yet.
    fn blocks_named_of(&self, no: SegmentNo) -> u32 {
        let info = self.segments.get(no).filter(|_| !self.care.cleaner.is_emptied(no));
        info.map_or(0, |info| info.visible().blocks as u32)
    }

    /// Whether what is offered adds up, and lies as the volume's own data do: it would be copied back otherwise.
    fn may_take(&self, offer: &Offer) -> bool {
        let SharedSegment { segment, geometry, homes, .. } = &offer.shared;
        let is_stores = Some(self.root().owner_of(*segment)) == self.store();
        let topology = self.topology();
        is_stores && offer.is_valid() && topology.is_of_policy(geometry) && topology.crowded(geometry, homes).is_none()
    }

    fn send_content(&mut self, store: VolumeId, segment: SegmentNo, wanted: Vec<Print>, out: Out) {
        let Some(printed) = self.shared.domain.printer.last(segment) else {
            if self.shared.domain.member.tries_again(segment) {
                self.print_again(segment);
            }
            return;
        };
        let wanted: BTreeSet<Print> = wanted.into_iter().collect();
        let places = (0..printed.prints.len()).filter(|at| wanted.contains(&printed.prints[*at]));
        let places: Vec<usize> = places.collect();
        for places in places.chunks(SENT_AT_ONCE) {
            let (blocks, crcs) = printed.content(places);
            let prints = places.iter().map(|at| printed.prints[*at]).collect();
            self.talk(store, Talk::Content { segment, prints, crcs, blocks }, out);
        }
    }

    pub(crate) fn on_sharing_meta(&mut self, token: u64, reply: MetaReply, out: Out) {
        if self.state != State::Open {
            return;
        }
        if !self.root().is_store() {
            if token == META | self.shared.domain.token {
                let epoch = self.epoch();
                self.shared.domain.member.on_meta(epoch, reply);
                self.drive_domain(out);
            }
            return;
        }
        let Some(asked) = self.shared.domain.asked.take_if(|asked| asked.token == token) else { return };
        let Asked { member, what, .. } = asked;
        match (what, reply) {
            (Ask::Joins, MetaReply::Swapped { .. }) => self.on_may_join(member, out),
            (Ask::Root(version), MetaReply::Record { value, .. }) => self.on_root_of(member, version, value.as_deref()),
            (_, MetaReply::Record { version, value: Some(value) })
            | (_, MetaReply::Conflict { version, value: Some(value) }) => {
                if let Ok(names) = Names::decode(&value) {
                    self.on_record_of(member, what, version, names, out);
                }
            }
            _ => {}
        }
        self.drive_domain(out);
    }

    fn on_record_of(&mut self, member: VolumeId, what: Ask, version: MetaVersion, names: Names, out: Out) {
        if what != Ask::Joins {
            return self.on_published(member, version, names, out);
        }
        if names.has_left() {
            // What was said to it before counts for nothing any more.
            let names = Names::of_nobody(self.shared.domain.store.next_state(&self.basis));
            return self.publish_for(member, Ask::Joins, version, &names, out);
        }
        self.on_may_join(member, out);
        self.on_published(member, version, names, out);
    }

    /// A member that has left is named no more when its root names this store no more, or there is none.
    fn on_root_of(&mut self, member: VolumeId, version: MetaVersion, value: Option<&[u8]>) {
        let own = self.basis.volume();
        let names_it = |root: Root| root.stores.iter().any(|store| store.volume == own);
        if value.is_none_or(|bytes| Root::decode(bytes).is_ok_and(|root| !names_it(root))) {
            self.shared.domain.store.leaving = Some((member, version));
        }
    }

    /// A volume that wants to be a member has a record that holds nothing.
    fn on_may_join(&mut self, member: VolumeId, out: Out) {
        if !self.root().dependents.iter().any(|of| of.volume == member) {
            self.shared.domain.store.joining.insert(member);
            self.drive_root(out);
        }
    }

    /// A member's record says that, or the store's for it.
    fn on_published(&mut self, member: VolumeId, version: MetaVersion, names: Names, out: Out) {
        if !self.root().dependents.iter().any(|of| of.volume == member) {
            return;
        }
        if names.has_left() {
            self.ask_meta_of(member, Ask::Root(version), MetaRequest::Get { key: root_key(member) }, out);
        }
        if let Some(names) = self.shared.domain.store.names_for(&self.basis, &names) {
            self.publish_for(member, Ask::Names, version, &names, out);
        } else if self.shared.domain.store.on_names(member, names) {
            self.mark_kept();
        }
    }

    pub(crate) fn change_of_members(&self) -> Option<(Root, Change)> {
        let members = self.wants_members().map(|root| (root, Change::Members));
        let fewer = || self.wants_one_dismissed();
        let store = || Some((self.wants_store_forgotten().or_else(|| self.wants_store_named())?, Change::Store));
        members.or_else(fewer).or_else(store)
    }

    /// Who has left is named no more, if its record is still the one that says so.
    fn wants_one_dismissed(&self) -> Option<(Root, Change)> {
        let (member, version) = self.shared.domain.store.leaving?;
        let mut root = self.root().clone();
        root.dependents.retain(|of| of.volume != member);
        (root.dependents.len() < self.root().dependents.len()).then_some((root, Change::Dismiss { member, version }))
    }

    /// Its record was another one by then.
    pub(crate) fn on_not_dismissed(&mut self, member: VolumeId) {
        self.shared.domain.store.leaving = None;
        self.shared.domain.asks.push_back(member);
    }
}
