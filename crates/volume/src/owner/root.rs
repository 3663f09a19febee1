//! The root record: read, and changed by one compare-and-swap at a time.
//!
//! Protocol rule 4: every swap carries this opening's nonce (the record's `instance`). After an unknown outcome the
//! same swap is repeated on the same version until it wins, or until the record shows what we proposed (won), or
//! another opening's higher epoch (deposed). Reading the old version proves nothing. A record that is gone, or of an
//! epoch that was followed, deposes nobody: the store is not the one that it was.
//!
//! A claim may be guarded ([`Controller::guard_claim`]): it takes place only while the record of who serves the volume is
//! the one that the opening was decided by. Where it is another one the opening ends: who decided it looks anew.

use crate::api::{Effect, Notice, State};
use crate::controller::{Controller, Out};
use crate::log::window::Done;
use crate::sharing::META;
use holdfast_base::{
    BLOCK_BYTES, BlockError, Buf, HeadId, Instant, Lsn, MetaGuard, MetaReply, MetaRequest, MetaVersion, VolumeId,
};
use holdfast_cipher::VolumeKey;
use holdfast_format::FormatError;
use holdfast_format::features::{Feature, Features};
use holdfast_format::geometry::Layout;
use holdfast_format::meta::export_key;
use holdfast_format::packing::Compression;
use holdfast_format::record::Record;
use holdfast_format::root::{Root, root_key};
use holdfast_format::sharing::dependent_key;
use holdfast_format::tier::Tiers;
use std::sync::Arc;
use std::time::Duration;

/// Features of the format that volumes which this release serves may use.
pub const FEATURES_SERVED: &[Feature] = &[Feature::Packed, Feature::Stores];

macro_rules! not_served {
    ($feature:literal) => {
        concat!(
            "the volume uses feature ",
            $feature,
            " of the format, which this release does not serve: use the one that turned it on, or a newer one"
        )
    };
}

/// Why a volume that uses these can't be opened.
fn why_not_served(features: &Features) -> Option<&'static str> {
    let feature = features.needed().filter_map(Feature::of).find(|feature| !FEATURES_SERVED.contains(feature))?;
    Some(match feature {
        Feature::WideKeys => not_served!("1 (wide keys)"),
        Feature::Packed => not_served!("2 (packed)"),
        Feature::Heads => not_served!("3 (heads)"),
        Feature::Replies => not_served!("4 (replies)"),
        Feature::Stores => not_served!("5 (stores)"),
    })
}

/// Why the record is being changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Change {
    /// Raise the epoch: first step of a take-over.
    Claim,
    /// Undo that: the record turned out to be older than what nodes know.
    Unclaim,
    /// Name the new owner's ledger: last step of a take-over.
    Serve,
    Roll,
    /// Refresh the checkpoint and drop ledgers that hold nothing any more.
    Tidy,
    Resize,
    Layout,
    Tiers,
    /// Blocks may be packed from here on, and are, in this way.
    Compression(Compression),
    /// Name a volume that is being made of this one.
    Dependent,
    /// Such a volume is gone.
    Unname,
    /// Name members of a store.
    Members,
    /// Name one of them no more, as long as this version of its record is there, by which it has left.
    Dismiss {
        member: VolumeId,
        version: MetaVersion,
    },
    /// Name the store of the domain that the volume is in, or name it no more.
    Store,
}

#[derive(Debug)]
struct Proposal {
    root: Root,
    change: Change,
    /// What the last request of a claim was guarded by.
    guard: Option<MetaVersion>,
}

impl Proposal {
    /// The record that decides on it, besides the root.
    fn guarded_by(&self, volume: VolumeId) -> Option<MetaGuard> {
        match self.change {
            Change::Dismiss { member, version } => Some(MetaGuard { key: dependent_key(volume, member), version }),
            _ => self.guard.map(|version| MetaGuard { key: export_key(volume), version }),
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct RootWriter {
    version: MetaVersion,
    /// Of the record of who serves the volume, as the opening was decided by it.
    guard: Option<MetaVersion>,
    proposal: Option<Proposal>,
    /// Token of the request whose answer counts.
    token: u64,
    retry_at: Option<Instant>,
    /// The swap has won, and takes effect when copies of the root are where they are needed.
    won: Option<MetaVersion>,
    /// The last swap found a record that can't be the store's newest.
    is_doubted: bool,
    tidied_at: Instant,
    /// When that request was sent.
    sent_at: Instant,
    /// Whether the store is there: when it was asked last, in which request if that is not answered, and when the
    /// youngest request was sent that it has answered.
    asked_at: Instant,
    asked: Option<u64>,
    asks: u64,
    /// In a row.
    asks_lost: u32,
    heard_at: Instant,
}

/// Pause before a swap with unknown outcome is repeated.
const RETRY_AFTER: Duration = Duration::from_millis(20);

/// Pause before a store is tried again that lacks the volume's record, or has an older one.
const DOUBT_FOR: Duration = Duration::from_secs(1);

/// The store is asked at most this often whether it is there.
const ASK_EVERY: Duration = Duration::from_millis(200);

/// In tokens of such requests, which nothing else waits for.
const ASK: u64 = 1 << 63;

/// What it was asked counts as lost after this long, and what is asked then after twice as long, up to 32 s: whoever
/// asks on while the store hangs lets questions pile up, and what matters waits behind them when it is back.
const ASK_LOST: Duration = Duration::from_secs(1);
const ASK_LOST_DOUBLINGS_MAX: u32 = 5;

/// The record is tidied at most this often.
const TIDY_EVERY: Duration = Duration::from_secs(2);

impl RootWriter {
    pub(crate) fn is_swapping(&self) -> bool {
        self.proposal.is_some()
    }

    /// It is being changed, or read, or will be.
    pub(crate) fn is_at_work(&self) -> bool {
        self.proposal.is_some() || self.won.is_some() || self.retry_at.is_some()
    }

    /// The metadata store has answered what it was asked since then.
    pub(crate) fn was_heard_since(&self, then: Instant) -> bool {
        self.heard_at > then
    }
}

/// Changes of size, layout, tiers and compression that were asked for.
///
/// What lies beyond the end reads as zeroes if the volume ever reaches there again: the end is discarded when it is cut
/// off, when an opening finds something behind it (its predecessor died in between), and before a volume grows over it.
/// States of growing: asked for -> the discard is in the log -> it is applied -> the root names the new size.
#[derive(Debug, Default)]
pub(crate) struct Resizer {
    wanted_bytes: Option<u64>,
    wanted_layout: Option<Layout>,
    pub(crate) wanted_tiers: Option<Tiers>,
    pub(crate) wanted_compression: Option<Compression>,
    /// The discard that a growing volume waits for.
    cutting: Option<Lsn>,
}

impl Resizer {
    pub(crate) fn is_wanted(&self) -> bool {
        let is_policy_wanted =
            self.wanted_layout.is_some() || self.wanted_tiers.is_some() || self.wanted_compression.is_some();
        self.wanted_bytes.is_some() || is_policy_wanted
    }
}

impl Controller {
    /// From here on the volume is claimed only while its export record is at this version; with none, whatever it is.
    pub fn guard_claim(&mut self, guard: Option<MetaVersion>) {
        self.root.guard = guard;
    }

    pub(crate) fn load_root(&mut self, out: Out) {
        self.root.proposal = None;
        self.root.won = None;
        self.root.token += 1;
        self.root.sent_at = self.basis.now;
        let request = MetaRequest::Get { key: root_key(self.basis.config.volume) };
        out.push(Effect::Meta { token: self.root.token, request });
    }

    /// Reads the record again after a while: the store is not the one that it should be.
    pub(crate) fn load_root_later(&mut self) {
        self.root.retry_at = Some(self.basis.now + DOUBT_FOR);
    }

    /// Looks whether the metadata store is there, if it was not heard since then.
    pub(crate) fn ask_store(&mut self, since: Instant, out: Out) {
        let is_lost = self.root.asked.is_some();
        let pause = if is_lost { ASK_LOST * (1 << self.root.asks_lost) } else { ASK_EVERY };
        let is_due = !self.root.was_heard_since(since) && self.basis.now.since(self.root.asked_at) >= pause;
        let is_in_service = matches!(self.state, State::Open | State::Closing);
        if !is_due || !is_in_service || self.root.is_swapping() || self.root.retry_at.is_some() {
            return;
        }
        self.root.asks += 1;
        self.root.asks_lost = if is_lost { (self.root.asks_lost + 1).min(ASK_LOST_DOUBLINGS_MAX) } else { 0 };
        let token = ASK | self.root.asks;
        (self.root.asked, self.root.asked_at) = (Some(token), self.basis.now);
        out.push(Effect::Meta { token, request: MetaRequest::Get { key: root_key(self.basis.config.volume) } });
    }

    /// Starts a swap to `root`. Only one is in flight.
    pub(crate) fn swap_root(&mut self, root: Root, change: Change, out: Out) {
        assert!(self.root.proposal.is_none(), "one root swap at a time");
        self.copy_root(&root, change, out);
        self.root.proposal = Some(Proposal { root, change, guard: None });
        self.send_swap(out);
    }

    /// For swaps of other records that rest on this owner's root.
    pub(crate) fn root_guard(&self) -> MetaGuard {
        MetaGuard { key: root_key(self.basis.config.volume), version: self.root.version }
    }

    fn send_swap(&mut self, out: Out) {
        let volume = self.basis.config.volume;
        let proposal = self.root.proposal.as_mut().expect("a swap is wanted");
        proposal.guard = self.root.guard.filter(|_| proposal.change == Change::Claim);
        let request = MetaRequest::Swap {
            key: root_key(volume),
            expect: self.root.version,
            value: Some(proposal.root.encode()),
            guard: proposal.guarded_by(volume),
        };
        self.root.token += 1;
        self.root.sent_at = self.basis.now;
        self.root.retry_at = None;
        out.push(Effect::Meta { token: self.root.token, request });
    }

    pub(crate) fn on_meta(&mut self, token: u64, reply: MetaReply, out: Out) {
        if token & ASK == 0 && token & META != 0 {
            return self.on_sharing_meta(token, reply, out);
        }
        let was_asked = self.root.asked == Some(token);
        if !was_asked && token != self.root.token || matches!(self.state, State::Deposed | State::Closed) {
            return;
        }
        if !matches!(reply, MetaReply::Unknown) {
            let sent_at = if was_asked { self.root.asked_at } else { self.root.sent_at };
            self.root.heard_at = self.root.heard_at.max(sent_at);
        }
        if was_asked {
            // What it says is known, or comes out with the next swap.
            self.root.asked = None;
            return self.drive_roll(out);
        }
        match (reply, self.root.proposal.take()) {
            (MetaReply::Unknown, proposal) => {
                self.root.proposal = proposal;
                self.root.retry_at = Some(self.basis.now + RETRY_AFTER);
            }
            (MetaReply::Swapped { version }, Some(proposal)) => self.on_won(version, proposal, out),
            (MetaReply::Conflict { version, value }, Some(proposal)) => {
                self.on_swap_conflict(version, value.as_deref(), proposal, out);
            }
            (MetaReply::GuardFailed { version, value }, Some(proposal)) => {
                self.on_guard_failed(version, value.as_deref(), proposal, out);
            }
            (MetaReply::Record { version, value }, None) => self.on_root_loaded(version, value.as_deref(), out),
            (_, proposal) => self.root.proposal = proposal,
        }
        self.progress(out);
    }

    fn on_won(&mut self, version: MetaVersion, proposal: Proposal, out: Out) {
        self.root.proposal = Some(proposal);
        self.root.won = Some(version);
        self.finish_swap(out);
    }

    /// A swap that has won takes effect once copies of the root are where they are needed.
    pub(crate) fn finish_swap(&mut self, out: Out) {
        let Some(version) = self.root.won else { return };
        if matches!(self.state, State::Deposed | State::Closed) {
            return;
        }
        if self.awaits_copies() {
            return;
        }
        self.root.won = None;
        let proposal = self.root.proposal.take().expect("it has won");
        self.on_swapped(version, proposal, out);
    }

    fn on_swapped(&mut self, version: MetaVersion, proposal: Proposal, out: Out) {
        self.root.version = version;
        if std::mem::take(&mut self.root.is_doubted) {
            out.push(Effect::Notice(Notice::StoreDoubted { is_doubted: false }));
        }
        let old = self.basis.replace_root(proposal.root);
        self.delete_dropped_ledgers(old.as_ref(), out);
        match proposal.change {
            Change::Claim => self.on_claimed(out),
            Change::Serve => self.on_serving(out),
            Change::Roll => self.on_rolled(out),
            Change::Tidy | Change::Unclaim => {}
            Change::Unname => self.on_dependents_changed(),
            Change::Dependent => self.on_dependent_named(out),
            Change::Members | Change::Dismiss { .. } => self.on_members_changed(out),
            Change::Store => self.drive_domain(out),
            Change::Layout => {
                self.care.repairer.note_degraded();
                out.push(Effect::Notice(Notice::LayoutSet { layout: self.root().layout }));
            }
            Change::Tiers => out.push(Effect::Notice(Notice::TiersSet { tiers: self.root().tiers })),
            Change::Compression(compression) => self.compress(compression, out),
            Change::Resize => {
                self.cut_off_end(out);
                out.push(Effect::Notice(Notice::Resized { size_bytes: self.root().size_bytes }));
            }
        }
    }

    /// A lost swap alone deposes nobody: only a higher epoch does.
    fn on_swap_conflict(&mut self, version: MetaVersion, value: Option<&[u8]>, proposal: Proposal, out: Out) {
        let seen = value.and_then(|bytes| Root::decode(bytes).ok());
        let is_claim = proposal.change == Change::Claim;
        let (before, own) = (self.root().epoch, self.root().instance);
        match seen {
            Some(root) if root == proposal.root => self.on_won(version, proposal, out),
            Some(_) if is_claim && self.basis.config.takeover => self.load_root(out),
            // The owner that is to be followed has changed its record once more, for a roll or a checkpoint.
            Some(root) if is_claim && root.epoch == before => self.load_root(out),
            // The same epoch under another nonce: one of two stores gave it out twice, and one of the two has to stop.
            Some(root) if root.epoch > before || root.epoch == before && root.instance != own => self.depose(out),
            _ => self.doubt_store(proposal, out),
        }
    }

    /// Who serves the volume is decided anew: it is claimed no more, and nobody deposed. A version never comes back, so a
    /// claim that is still on its way loses too; one that was guarded by an absent record may win, and then raises no
    /// more than the epoch.
    fn on_guard_failed(&mut self, version: MetaVersion, value: Option<&[u8]>, proposal: Proposal, out: Out) {
        match value.map(Root::decode) {
            // It had won, while the guard held.
            Some(Ok(root)) if root == proposal.root => self.on_won(version, proposal, out),
            Some(Ok(root)) if root.epoch < self.root().epoch => self.doubt_store(proposal, out),
            None => self.doubt_store(proposal, out),
            // Its record is another one: it is looked at anew. Who has deposed this owner shows with the next swap.
            Some(_) if let Change::Dismiss { member, .. } = proposal.change => {
                self.on_not_dismissed(member);
                self.copy_root(&self.root().clone(), Change::Members, out);
            }
            // It was decided anew for this host.
            Some(_) if proposal.guard != self.root.guard => self.load_root(out),
            // Or for another one, perhaps of a later release.
            Some(_) => {
                out.push(Effect::Notice(Notice::NotClaimed));
                self.leave(State::Closed, BlockError::Deposed, out);
            }
        }
    }

    /// The record is gone, can't be read, or is one that this opening has followed: the store was emptied, or set back.
    /// Such a store decides nothing. What is open serves on, and the swap is repeated until the right one is back.
    fn doubt_store(&mut self, proposal: Proposal, out: Out) {
        self.root.proposal = Some(proposal);
        self.root.retry_at = Some(self.basis.now + DOUBT_FOR);
        if !std::mem::replace(&mut self.root.is_doubted, true) {
            out.push(Effect::Notice(Notice::StoreDoubted { is_doubted: true }));
        }
        self.opening_waits(
            "the metadata store lacks the volume's newest record: it was emptied, or set back to an older state",
            out,
        );
    }

    fn on_root_loaded(&mut self, version: MetaVersion, value: Option<&[u8]>, out: Out) {
        let Some(bytes) = value else {
            self.root.retry_at = Some(self.basis.now + DOUBT_FOR);
            return self.opening_waits("the metadata store has no such volume", out);
        };
        match Root::decode(bytes) {
            Ok(root) if root.deleted => self.opening_waits("the volume was deleted", out),
            Ok(root) if let Some(why) = why_not_served(&root.features) => {
                self.root.retry_at = Some(self.basis.now + DOUBT_FOR);
                self.opening_waits(why, out);
            }
            Ok(root) if root.key_id != self.basis.config.key.as_ref().map(VolumeKey::id) => {
                // Nothing is read without it, and nothing may be written with another, or in plain.
                self.opening_waits("the volume's key is not the one that it is encrypted with", out);
            }
            Ok(root) if root.stores.first().is_some_and(|of| !self.opens_store(of.volume)) => {
                self.opening_waits("the key of its sharing domain's store is not there, and it is encrypted", out);
            }
            Ok(root) if self.is_outbid() => self.on_outbid(&root, out),
            Ok(root) if self.basis.config.only_from.is_some_and(|epoch| epoch != root.epoch) => self.depose(out),
            Ok(root) => {
                self.root.version = version;
                if !self.basis.is_known() {
                    self.segments.reset(root.own_numbers());
                }
                self.basis.replace_root(root);
                self.on_root_known(out);
            }
            Err(error) => {
                self.root.retry_at = Some(self.basis.now + DOUBT_FOR);
                let is_newer = matches!(error, FormatError::Version(_) | FormatError::Feature(_));
                let why = match is_newer {
                    true => "the volume's root record is of a newer release: use that one, or a later",
                    false => "the volume's root record can't be read",
                };
                self.opening_waits(why, out);
            }
        }
    }

    /// Repeats what had no answer, and tidies the record now and then.
    pub(crate) fn drive_root(&mut self, out: Out) {
        self.finish_swap(out);
        if self.root.retry_at.is_some_and(|at| at <= self.basis.now) {
            self.root.retry_at = None;
            if self.root.proposal.is_some() {
                self.send_swap(out)
            } else {
                self.load_root(out)
            }
            return;
        }
        if self.state != State::Open || self.root.is_swapping() || self.roll_is_swapping() {
            return;
        }
        if self.swap_for_sharing(out) {
            return;
        }
        if let Some((root, change)) = self.change_of_members() {
            return self.swap_root(root, change, out);
        }
        if self.resizer.is_wanted() {
            self.drive_resize(out);
        } else if self.notes_checkpoint()
            || self.basis.now.since(self.root.tidied_at) >= TIDY_EVERY && self.has_dead_ledgers()
        {
            self.root.tidied_at = self.basis.now;
            let root = self.tidied_root();
            self.swap_root(root, Change::Tidy, out);
        }
    }

    fn has_dead_ledgers(&self) -> bool {
        self.root().ledgers.iter().any(|l| l.sealed.is_some_and(|sealed| sealed <= self.log.trimmed))
    }

    /// The record with the newest durable checkpoint and without ledgers that are trimmed whole.
    pub(crate) fn tidied_root(&self) -> Root {
        let mut root = self.root().clone();
        root.checkpoint = self.checkpointer.durable().clone();
        let trimmed = self.log.trimmed;
        root.trimmed = trimmed;
        root.ledgers.retain(|l| l.sealed.is_none_or(|sealed| sealed > trimmed));
        root
    }

    // ---- size, layout, tiers and compression ----

    pub(crate) fn on_resize(&mut self, size_bytes: u64) {
        self.resizer.wanted_bytes = Some(size_bytes);
    }

    /// From the swap on everything is written in the new layout; the cleaner writes anew what is there (see
    /// `wants_recode`), folds the map, and the ledger is rolled if it tolerates less.
    pub(crate) fn on_set_layout(&mut self, layout: Layout) {
        self.resizer.wanted_layout = Some(layout);
    }

    /// The next step of a change of size or layout; no root swap is under way.
    pub(crate) fn drive_resize(&mut self, out: Out) {
        if let Some(layout) = self.resizer.wanted_layout.take() {
            let root = Root { layout, ..self.root().clone() };
            return self.swap_root(root, Change::Layout, out);
        }
        if let Some(tiers) = self.resizer.wanted_tiers.take() {
            let root = Root { tiers, ..self.root().clone() };
            return self.swap_root(root, Change::Tiers, out);
        }
        if let Some(compression) = self.resizer.wanted_compression.take() {
            let features = self.root().features.clone();
            if compression == Compression::Off || features.has(Feature::Packed) {
                return self.compress(compression, out);
            }
            let root = Root { features: features.with(Feature::Packed), ..self.root().clone() };
            return self.swap_root(root, Change::Compression(compression), out);
        }
        let Some(size_bytes) = self.resizer.wanted_bytes else { return };
        if self.resizer.cutting.is_some_and(|lsn| lsn > self.log.completed) {
            return;
        }
        if size_bytes > self.root().size_bytes && self.resizer.cutting.is_none() {
            self.resizer.cutting = self.cut_off_end(out);
            if self.resizer.cutting.is_some() {
                return;
            }
        }
        (self.resizer.wanted_bytes, self.resizer.cutting) = (None, None);
        let root = Root { size_bytes, ..self.root().clone() };
        self.swap_root(root, Change::Resize, out);
    }

    /// Discards what the map names behind the end, if there is anything; returns the discard's LSN.
    pub(crate) fn cut_off_end(&mut self, out: Out) -> Option<Lsn> {
        let end = self.root().size_bytes / BLOCK_BYTES as u64;
        let mapped_end = self.map.mapped_end(self.map.layers().live(HeadId::VOLUME)?);
        if mapped_end <= end {
            return None;
        }
        let record = Record::Discard { key: self.write_key(HeadId::VOLUME, end)?, blocks: mapped_end - end };
        Some(self.append(record, Buf::empty(), Arc::from([]), Done::Nothing, out))
    }
}
