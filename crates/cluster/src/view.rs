//! Every record of the grid in memory: kept by one watch, and by what this host writes itself.
//!
//! Invariants
//! 1. A key's record never goes back to an older state, in whatever order a listing, the watch and the host's own writes tell
//!    of it: each comes with a revision, and only a newer one counts.
//! 2. Of a store that was emptied, set back, or made anew nothing is taken in: all stays as it was ([`Doubt`]). What was seen of
//!    it in an earlier life counts too, as far as that was remembered ([`crate::beat`]).
//!
//! Limits: some kilobytes a volume; deleted keys are remembered until a listing or the watch has passed their deletion.

use crate::beat;
use holdfast_base::{Epoch, MetaVersion, NodeId, VolumeId};
use holdfast_format::ledger::{AckRule, Leg};
use holdfast_format::meta::{
    BEAT_KEY, BeatRecord, CLONE_SUFFIX, CloneRecord, EXPORT_SUFFIX, ExportRecord, HOST_PREFIX, HostRecord, ROOT_SUFFIX,
    VOLUME_PREFIX, decode,
};
use holdfast_format::root::Root;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Bound;
use std::sync::Arc;

/// A record as a listing or the watch tells of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Record {
    pub key: String,
    pub version: MetaVersion,
    pub value: Arc<[u8]>,
}

/// One change, in order of revisions.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Change {
    pub revision: u64,
    pub key: String,
    /// Nothing where it was deleted.
    pub record: Option<Record>,
}

/// Why a listing is not taken in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Doubt {
    /// It lacks the record that every store of a grid has.
    Emptied,
    /// That record is another one: the store was made anew, or filled from a copy.
    Another,
    /// Its revision or beat lies before what was seen, or a record is not what it was by then: it was set back to an older state.
    Older,
}

impl fmt::Display for Doubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Doubt::Emptied => "it was emptied: it lacks what every store of this grid has",
            Doubt::Another => "it is not the one that it was: it was filled from a copy, or set back and gone on with",
            Doubt::Older => "it was set back to an older state",
        })
    }
}

#[derive(Clone, Debug)]
struct Known {
    /// Nothing where it was deleted.
    record: Option<Record>,
    /// The revision of what is known: of the change, of the listing that lacks it, or of what was deleted.
    seen: u64,
    /// It was noted, as that many'th, and neither a listing nor the watch has told of it. Of a deletion the revision isn't known.
    noted: Option<u64>,
}

/// What was noted when a listing was asked for: that it has to have, if it is the store's that was written to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Asked(u64);

/// What is needed of a volume to say who serves it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Volume {
    pub name: String,
    pub epoch: Epoch,
    /// Nodes that its layout can do without.
    pub failures: u8,
    /// It is being deleted, or is not finished yet.
    pub is_gone: bool,
    /// It is the store of a sharing domain.
    pub is_store: bool,
    /// Where its log is written, and by which rule; absent where it was never opened, or is about to be.
    pub log: Option<(Vec<Leg>, AckRule)>,
}

impl Volume {
    /// Whether a host that none of these nodes hears writes the volume no more: where the others are no ack set.
    pub fn is_cut_off(&self, silent: &BTreeSet<NodeId>) -> bool {
        self.log.as_ref().is_none_or(|(legs, rule)| {
            let mask = legs.iter().enumerate().filter(|(_, leg)| silent.contains(&leg.node));
            rule.is_fence_set(legs, mask.fold(0, |mask, (i, _)| mask | 1 << i))
        })
    }

    /// Whether the volume's log can be recovered, and read and written, without these nodes, whatever else they hold.
    /// Of one whose log is not known that is not known.
    pub fn log_needs_none_of(&self, away: &BTreeSet<NodeId>) -> bool {
        self.log.as_ref().is_some_and(|(legs, rule)| {
            let there = legs.iter().enumerate().filter(|(_, leg)| !away.contains(&leg.node));
            let there = there.fold(0, |mask, (i, _)| mask | 1 << i);
            rule.is_fence_set(legs, there) && rule.is_ack_set(legs, there)
        })
    }
}

/// Which volumes' records have changed, and whether hosts have come or gone, since it was asked last.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    pub volumes: BTreeSet<VolumeId>,
    pub hosts: bool,
    /// Of everything else, by the part of the key before the first slash, with it.
    pub kinds: BTreeSet<String>,
}

impl Changes {
    pub fn is_empty(&self) -> bool {
        self.volumes.is_empty() && !self.hosts && self.kinds.is_empty()
    }
}

#[derive(Debug, Default)]
pub struct View {
    records: BTreeMap<String, Known>,
    /// Everything up to here was seen.
    upto: u64,
    volumes: BTreeMap<VolumeId, Volume>,
    exports: BTreeMap<VolumeId, (MetaVersion, ExportRecord)>,
    /// Of each clone, the volume that it is a part of.
    clones: BTreeMap<VolumeId, VolumeId>,
    /// Hosts that are there. Nothing of a record that this release can't read.
    hosts: BTreeMap<String, Option<HostRecord>>,
    /// There in every store of a grid, and always the same; without one any listing is taken in.
    mark: Option<String>,
    /// What it was when it was first seen.
    mark_value: Option<Arc<[u8]>>,
    /// How far the store had come when it was seen last, in an earlier life at first.
    beat: Option<BeatRecord>,
    /// A listing was taken in.
    is_filled: bool,
    /// The store is not the one that it was: nothing is taken in until a listing shows that it is again.
    doubt: Option<Doubt>,
    changes: Changes,
    /// How many notes there were.
    notes: u64,
}

impl View {
    /// `mark`: the key of a record that every listing of the grid's store has.
    /// `remembered`: how far the store had come, by what an earlier process saw of it.
    pub fn new(mark: Option<&str>, remembered: Option<BeatRecord>) -> View {
        View { mark: mark.map(str::to_string), beat: remembered, ..View::default() }
    }

    /// How far the store has come, for a later process to remember.
    pub fn beat(&self) -> Option<&BeatRecord> {
        self.beat.as_ref()
    }

    /// Everything up to this revision was seen.
    pub fn upto(&self) -> u64 {
        self.upto
    }

    /// Why nothing is taken in of what the store says.
    pub fn doubt(&self) -> Option<Doubt> {
        self.doubt
    }

    /// To be called when a listing is asked for.
    pub fn asking(&self) -> Asked {
        Asked(self.notes)
    }

    /// All that there is, as of one revision.
    pub fn replace(&mut self, asked: Asked, revision: u64, records: Vec<Record>) -> Result<(), Doubt> {
        let beat = beat_of(records.iter().find(|record| record.key == BEAT_KEY));
        let doubt = self.doubt_of(revision, &records, beat.as_ref());
        let was_in_doubt = std::mem::replace(&mut self.doubt, doubt).is_some();
        if let Some(doubt) = doubt {
            return Err(doubt);
        }
        if was_in_doubt {
            self.forget_notes();
        }
        self.beat = beat.or(self.beat.take());
        self.is_filled = true;
        self.forget_notes_of_another(asked, revision);
        let there: BTreeSet<String> = records.iter().map(|record| record.key.clone()).collect();
        for record in records {
            let key = record.key.clone();
            self.forget_foreign_note(&key, revision, record.version.0);
            self.take_in(&key, record.version.0, Some(record), false);
        }
        let gone = |(key, known): (&String, &Known)| {
            let is_there = known.record.is_some() || known.noted.is_some();
            (is_there && known.seen <= revision && !there.contains(key)).then(|| key.clone())
        };
        for key in self.records.iter().filter_map(gone).collect::<Vec<_>>() {
            self.take_in(&key, revision, None, false);
        }
        self.advance(revision);
        Ok(())
    }

    fn doubt_of(&mut self, revision: u64, records: &[Record], beat: Option<&BeatRecord>) -> Option<Doubt> {
        if let Some(mark) = &self.mark {
            let Some(found) = records.iter().find(|record| record.key == *mark) else { return Some(Doubt::Emptied) };
            if *self.mark_value.get_or_insert_with(|| found.value.clone()) != found.value {
                return Some(Doubt::Another);
            }
        }
        if let Some(doubt) = beat::doubt(self.beat.as_ref(), beat, !self.is_filled) {
            return Some(doubt);
        }
        let is_older = revision < self.upto || records.iter().any(|record| self.is_not_as_it_was(record));
        is_older.then_some(Doubt::Older)
    }

    /// A store that was set back gives the same revisions again, and goes past what was seen: records that it lacks or has
    /// otherwise, as of a revision up to which everything was seen, tell it from the right one.
    fn is_not_as_it_was(&self, record: &Record) -> bool {
        let version = record.version.0;
        match self.records.get(&record.key) {
            // What was noted may have been another store's.
            Some(known) if known.noted.is_some() => false,
            Some(Known { record: Some(known), seen, .. }) if *seen == version => known.value != record.value,
            _ => version <= self.upto,
        }
    }

    /// What was noted may have been done to the other store. Where it was not, and is newer than the listing, the watch tells of it.
    fn forget_notes(&mut self) {
        self.records.retain(|_, known| known.record.is_some() || known.noted.is_none());
        self.records.values_mut().filter(|known| known.noted.is_some()).for_each(|known| known.seen = 0);
    }

    /// Of what was noted before a listing was asked for, that has all, or a later state. What lies behind it was written to another
    /// store, whose revisions were higher.
    fn forget_notes_of_another(&mut self, Asked(asked): Asked, revision: u64) {
        let is_of_another = |known: &Known| known.noted.is_some_and(|number| number <= asked) && known.seen > revision;
        self.records.retain(|_, known| known.record.is_some() || !is_of_another(known));
        self.records.values_mut().filter(|known| is_of_another(known)).for_each(|known| known.seen = 0);
    }

    /// What was noted as written by a revision that the listing is of, and is not in it, was written to another store.
    fn forget_foreign_note(&mut self, key: &str, revision: u64, version: u64) {
        if let Some(known) = self.records.get_mut(key)
            && known.noted.is_some()
            && known.record.is_some()
            && (version + 1..=revision).contains(&known.seen)
        {
            known.seen = 0;
        }
    }

    /// What the watch tells, in order.
    pub fn apply(&mut self, changes: Vec<Change>) -> Result<(), Doubt> {
        let marked = changes.iter().find(|change| Some(&change.key) == self.mark.as_ref());
        if let Some(change) = marked
            && change.record.as_ref().map(|record| &record.value) != self.mark_value.as_ref()
        {
            self.doubt = Some(if change.record.is_some() { Doubt::Another } else { Doubt::Emptied });
        }
        // A listing may have gone past what the watch tells.
        for change in changes.iter().filter(|change| change.key == BEAT_KEY && change.revision > self.upto) {
            let found = beat_of(change.record.as_ref());
            let is_deleted = change.record.is_none() && self.beat.is_some();
            let why = || beat::doubt(self.beat.as_ref(), found.as_ref(), false);
            self.doubt = self.doubt.or_else(|| if is_deleted { Some(Doubt::Emptied) } else { why() });
            if self.doubt.is_none() {
                self.beat = found;
            }
        }
        if let Some(doubt) = self.doubt {
            return Err(doubt);
        }
        let Some(upto) = changes.last().map(|change| change.revision) else { return Ok(()) };
        for Change { revision, key, record } in changes {
            self.take_in(&key, revision, record, false);
        }
        self.advance(upto);
        Ok(())
    }

    /// This host has written a record, or found it so: before the watch tells.
    pub fn note(&mut self, record: Record) {
        let (key, version) = (record.key.clone(), record.version.0);
        self.take_in(&key, version, Some(record), true);
    }

    /// This host has deleted a record, which was at that version, or has found that it is gone by then.
    pub fn note_deleted(&mut self, key: &str, version: MetaVersion) {
        self.take_in(key, version.0, None, true);
    }

    pub fn take_changes(&mut self) -> Changes {
        std::mem::take(&mut self.changes)
    }

    pub fn get(&self, key: &str) -> Option<&Record> {
        self.records.get(key)?.record.as_ref()
    }

    /// Records under a prefix, in order of their keys.
    pub fn list<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = &'a Record> {
        let from = self.records.range::<str, _>((Bound::Included(prefix), Bound::Unbounded));
        from.take_while(move |(key, _)| key.starts_with(prefix)).filter_map(|(_, known)| known.record.as_ref())
    }

    pub fn volume(&self, volume: VolumeId) -> Option<&Volume> {
        self.volumes.get(&volume)
    }

    pub fn volumes(&self) -> impl Iterator<Item = VolumeId> {
        self.volumes.keys().copied()
    }

    /// Who serves the volume, by which version of the record.
    pub fn export(&self, volume: VolumeId) -> Option<&(MetaVersion, ExportRecord)> {
        self.exports.get(&volume)
    }

    /// Of the record that says who serves the volume.
    pub fn export_version(&self, volume: VolumeId) -> MetaVersion {
        self.export(volume).map_or(MetaVersion::ABSENT, |(version, _)| *version)
    }

    /// Volumes that are to be served somewhere.
    pub fn exports(&self) -> impl Iterator<Item = (VolumeId, &ExportRecord)> {
        self.exports.iter().map(|(volume, (_, export))| (*volume, export))
    }

    /// Clones, and the volumes that they are parts of.
    pub fn clones(&self) -> impl Iterator<Item = (VolumeId, VolumeId)> {
        self.clones.iter().map(|(clone, origin)| (*clone, *origin))
    }

    pub fn origin_of_clone(&self, clone: VolumeId) -> Option<VolumeId> {
        self.clones.get(&clone).copied()
    }

    pub fn has_host(&self, host: &str) -> bool {
        self.hosts.contains_key(host)
    }

    pub fn hosts(&self) -> &BTreeMap<String, Option<HostRecord>> {
        &self.hosts
    }

    fn advance(&mut self, upto: u64) {
        self.upto = self.upto.max(upto);
        let upto = self.upto;
        self.records.retain(|_, known| known.record.is_some() || known.noted.is_some() || known.seen > upto);
    }

    fn take_in(&mut self, key: &str, revision: u64, record: Option<Record>, is_noted: bool) {
        if let Some(known) = self.records.get_mut(key)
            && (known.seen, known.record.is_some(), is_noted) == (revision, record.is_some(), false)
        {
            // What was noted is told of.
            known.noted = None;
        }
        let known = self.records.get(key);
        let was_there = known.is_some_and(|known| known.record.is_some());
        // A deletion that is noted by the version that it deleted is newer than that version.
        let is_deleted_here = is_noted && record.is_none();
        let is_news =
            known.is_none_or(|known| known.seen < revision || known.seen == revision && was_there && is_deleted_here);
        let is_listed_as_gone =
            known.is_some_and(|known| known.noted.is_some() && record.is_none() && known.seen <= revision);
        if !is_news && !is_listed_as_gone {
            return;
        }
        if was_there || record.is_some() {
            self.index(key, record.as_ref());
        }
        self.notes += u64::from(is_noted);
        let noted = is_noted.then_some(self.notes);
        self.records.insert(key.to_string(), Known { record, seen: revision, noted });
    }

    /// What is looked up often is kept decoded.
    fn index(&mut self, key: &str, record: Option<&Record>) {
        if let Some(host) = key.strip_prefix(HOST_PREFIX) {
            match record {
                Some(record) => self.hosts.insert(host.to_string(), decode(&record.value).ok()),
                None => self.hosts.remove(host),
            };
            self.changes.hosts = true;
            return;
        }
        if let Some((volume, suffix)) = volume_of(key) {
            match suffix {
                ROOT_SUFFIX => self.index_root(volume, record),
                EXPORT_SUFFIX => {
                    let decoded = record.and_then(|r| Some((r.version, decode::<ExportRecord>(&r.value).ok()?)));
                    match decoded {
                        Some(export) => self.exports.insert(volume, export),
                        None => self.exports.remove(&volume),
                    };
                }
                CLONE_SUFFIX => {
                    let record = record.and_then(|r| decode::<CloneRecord>(&r.value).ok());
                    match record.and_then(|record| record.origin.parse().ok()) {
                        Some(origin) => self.clones.insert(volume, origin),
                        None => self.clones.remove(&volume),
                    };
                }
                _ => {}
            }
            self.changes.volumes.insert(volume);
            return;
        }
        let kind = key.split_inclusive('/').next().unwrap_or(key);
        if !self.changes.kinds.contains(kind) {
            self.changes.kinds.insert(kind.to_string());
        }
    }

    /// One that can't be read is as good as absent: nothing is done about that volume.
    fn index_root(&mut self, volume: VolumeId, record: Option<&Record>) {
        let root = record.and_then(|record| Root::decode(&record.value).ok());
        match root {
            Some(root) => {
                let (epoch, failures, is_gone) = (root.epoch, root.layout.failures(), root.deleted);
                let log = root.open_ledger().map(|open| (open.legs.clone(), open.rule));
                let is_store = root.is_store();
                self.volumes.insert(volume, Volume { name: root.name, epoch, failures, is_gone, is_store, log });
            }
            None => {
                self.volumes.remove(&volume);
            }
        }
    }
}

fn beat_of(record: Option<&Record>) -> Option<BeatRecord> {
    decode(&record?.value).ok()
}

/// The volume of a key like `volume/ID/…`, and what follows its id.
fn volume_of(key: &str) -> Option<(VolumeId, &str)> {
    let rest = key.strip_prefix(VOLUME_PREFIX)?;
    let (id, suffix) = rest.split_at_checked(rest.find('/')?)?;
    Some((id.parse().ok()?, suffix))
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_base::GridId;
    use holdfast_format::geometry::Layout;
    use holdfast_format::meta::{encode, export_key, host_key};
    use holdfast_format::root::root_key;

    fn record(key: &str, version: u64, value: &[u8]) -> Record {
        Record { key: key.to_string(), version: MetaVersion(version), value: value.into() }
    }

    fn put(key: &str, version: u64, value: &[u8]) -> Change {
        Change { revision: version, key: key.to_string(), record: Some(record(key, version, value)) }
    }

    fn deleted(key: &str, revision: u64) -> Change {
        Change { revision, key: key.to_string(), record: None }
    }

    fn value<'a>(view: &'a View, key: &str) -> Option<&'a [u8]> {
        view.get(key).map(|record| &*record.value)
    }

    #[test]
    fn what_was_noted_of_another_store_gives_way_to_a_listing_that_was_asked_for_later() {
        let mut view = View::new(None, None);
        view.replace(Asked::default(), 20, vec![record("a", 15, b"15"), record("b", 16, b"16")]).unwrap();
        // Written before anybody has noticed that the store is an emptied one whose revisions are higher.
        view.note(record("a", 865, b"865"));
        view.note(record("c", 866, b"866"));
        view.note_deleted("b", MetaVersion(867));
        let asked = view.asking();
        // Of the right one, and told of by no listing yet.
        view.note(record("d", 23, b"23"));
        view.replace(asked, 21, vec![record("a", 15, b"15"), record("b", 16, b"16")]).unwrap();
        assert_eq!((value(&view, "a"), value(&view, "b")), (Some(b"15".as_slice()), Some(b"16".as_slice())));
        assert_eq!((value(&view, "c"), value(&view, "d")), (None, Some(b"23".as_slice())));
        view.apply(vec![put("a", 22, b"22")]).unwrap();
        assert_eq!(value(&view, "a"), Some(b"22".as_slice()), "nor is what comes next taken for old");
    }

    #[test]
    fn what_was_remembered_counts_and_a_watch_may_lag_behind_a_listing() {
        let first = beat::begin(None, 9, 1);
        let [second, third] = [2, 3].map(|n| (1..n).fold(first.clone(), |beat, step| beat::next(&beat, step)));
        let at = |version, beat| record(BEAT_KEY, version, &encode(beat));
        let mut view = View::new(None, Some(second.clone()));
        assert_eq!(view.replace(Asked::default(), 5, vec![at(3, &first)]), Err(Doubt::Older));
        assert_eq!(view.replace(Asked::default(), 5, vec![]), Err(Doubt::Older));
        view.replace(Asked::default(), 9, vec![at(8, &third)]).unwrap();
        view.apply(vec![put(BEAT_KEY, 7, &encode(&second)), put(BEAT_KEY, 8, &encode(&third))]).unwrap();
        assert_eq!(view.beat(), Some(&third));
        assert_eq!(view.apply(vec![put(BEAT_KEY, 10, &encode(&second))]), Err(Doubt::Older));
        view.replace(Asked::default(), 10, vec![at(8, &third)]).unwrap();
        assert_eq!(view.apply(vec![deleted(BEAT_KEY, 11)]), Err(Doubt::Emptied), "all of them are about to go");
    }

    #[test]
    fn a_record_never_goes_back_whoever_tells_of_it_first() {
        let mut view = View::new(None, None);
        view.replace(Asked::default(), 5, vec![record("a", 3, b"3"), record("b", 5, b"5")]).unwrap();
        // Written here, and told by the watch later, together with what was before.
        view.note(record("a", 9, b"9"));
        view.apply(vec![put("a", 7, b"7"), put("c", 8, b"8")]).unwrap();
        assert_eq!((value(&view, "a"), value(&view, "c")), (Some(b"9".as_slice()), Some(b"8".as_slice())));
        view.apply(vec![put("a", 9, b"9")]).unwrap();
        // Deleted here at version 9, and told of 9 once more by a listing that is older than that.
        view.note_deleted("a", MetaVersion(9));
        assert_eq!(value(&view, "a"), None);
        view.replace(Asked::default(), 9, vec![record("a", 9, b"9"), record("b", 5, b"5"), record("c", 8, b"8")])
            .unwrap();
        assert_eq!(value(&view, "a"), None, "the listing is of before the deletion");
        view.apply(vec![put("c", 10, b"10")]).unwrap();
        view.replace(Asked::default(), 10, vec![record("a", 9, b"9"), record("b", 5, b"5"), record("c", 10, b"10")])
            .unwrap();
        assert_eq!(value(&view, "a"), None, "and so is this one");
        view.apply(vec![deleted("a", 11), put("a", 12, b"12")]).unwrap();
        assert_eq!(value(&view, "a"), Some(b"12".as_slice()));
        // A listing tells what is gone, and nothing of what came after it.
        view.note(record("d", 14, b"14"));
        view.replace(Asked::default(), 13, vec![record("a", 12, b"12")]).unwrap();
        assert_eq!((value(&view, "b"), value(&view, "c"), value(&view, "d")), (None, None, Some(b"14".as_slice())));
        assert_eq!(view.upto(), 13);
        assert_eq!(view.records.len(), 2, "what is gone is forgotten");
    }

    #[test]
    fn an_emptied_store_and_one_that_was_set_back_are_not_believed() {
        let mut view = View::new(Some("grid"), None);
        view.replace(Asked::default(), 5, vec![record("grid", 1, b"{}"), record("a", 3, b"3")]).unwrap();
        assert_eq!(view.replace(Asked::default(), 9, vec![]), Err(Doubt::Emptied));
        assert_eq!(view.replace(Asked::default(), 9, vec![record("a", 4, b"4")]), Err(Doubt::Emptied));
        assert_eq!(view.replace(Asked::default(), 4, vec![record("grid", 1, b"{}")]), Err(Doubt::Older));
        assert_eq!(
            view.replace(Asked::default(), 9, vec![record("grid", 8, b"{2}"), record("a", 9, b"9")]),
            Err(Doubt::Another)
        );
        assert_eq!((value(&view, "a"), view.upto()), (Some(b"3".as_slice()), 5));
        assert_eq!(
            view.apply(vec![put("a", 9, b"9")]),
            Err(Doubt::Another),
            "nor is what such a store tells after that"
        );
        view.replace(Asked::default(), 6, vec![record("grid", 1, b"{}"), record("a", 6, b"6")]).unwrap();
        assert_eq!((value(&view, "a"), view.doubt()), (Some(b"6".as_slice()), None), "the right one is back");
        assert_eq!(view.apply(vec![deleted("a", 7), deleted("grid", 8)]), Err(Doubt::Emptied));
        assert_eq!(value(&view, "a"), Some(b"6".as_slice()), "of a store that is being emptied nothing is believed");
    }

    #[test]
    fn a_store_that_was_set_back_and_goes_past_what_was_seen_is_not_believed() {
        let mut view = View::new(Some("grid"), None);
        let mark = || record("grid", 1, b"{}");
        view.replace(Asked::default(), 5, vec![mark(), record("a", 3, b"3"), record("b", 5, b"5")]).unwrap();
        view.apply(vec![deleted("b", 6)]).unwrap();
        // A record that was newer; one that was gone; one of the same revision that was another; one of before that is new.
        for other in [record("a", 2, b"2"), record("b", 5, b"5"), record("a", 3, b"x"), record("c", 4, b"4")] {
            assert_eq!(view.replace(Asked::default(), 9, vec![mark(), other]), Err(Doubt::Older));
        }
        view.replace(Asked::default(), 9, vec![mark(), record("a", 8, b"8"), record("c", 7, b"7")]).unwrap();
        assert_eq!((value(&view, "a"), value(&view, "c")), (Some(b"8".as_slice()), Some(b"7".as_slice())));
    }

    #[test]
    fn what_was_noted_of_another_store_goes_with_the_next_listing_of_the_right_one() {
        let mut view = View::new(Some("grid"), None);
        let mark = || record("grid", 1, b"{}");
        view.replace(Asked::default(), 5, vec![mark(), record("a", 3, b"3")]).unwrap();
        view.note(record("a", 12, b"12"));
        view.replace(Asked::default(), 11, vec![mark(), record("a", 3, b"3")]).unwrap();
        assert_eq!(value(&view, "a"), Some(b"12".as_slice()), "it may be newer than the listing");
        view.replace(Asked::default(), 12, vec![mark(), record("a", 3, b"3")]).unwrap();
        assert_eq!(value(&view, "a"), Some(b"3".as_slice()), "it was written elsewhere");
        // After a doubt nothing of what was noted is kept: a deletion, and what was written by a revision that is still to come.
        view.note_deleted("a", MetaVersion(3));
        view.note(record("b", 40, b"40"));
        assert_eq!(view.replace(Asked::default(), 8, vec![mark()]), Err(Doubt::Older));
        view.replace(Asked::default(), 13, vec![mark(), record("a", 3, b"3")]).unwrap();
        assert_eq!((value(&view, "a"), value(&view, "b")), (Some(b"3".as_slice()), None));
        view.note(record("a", 14, b"14"));
        view.apply(vec![put("a", 14, b"14")]).unwrap();
        assert_eq!(
            view.replace(Asked::default(), 15, vec![mark(), record("a", 3, b"3")]),
            Err(Doubt::Older),
            "what was told of is believed"
        );
    }

    #[test]
    fn what_has_changed_is_told_once_and_by_kind() {
        let mut view = View::new(None, None);
        let (id, other) = (VolumeId(7), VolumeId(8));
        let root = Root::new(GridId(1), id, "vm", 1 << 30, Layout::DEFAULT);
        let export = ExportRecord { host: "a".to_string(), ..ExportRecord::default() };
        view.apply(vec![
            put(&root_key(id), 1, &root.encode()),
            put(&export_key(id), 2, &encode(&export)),
            put(&export_key(other), 3, b"damaged"),
            put(&host_key("a"), 4, b"of a newer release"),
            put("limits/00", 5, b"{}"),
            put("revoked", 6, b"{}"),
        ])
        .unwrap();
        let changes = view.take_changes();
        assert_eq!((changes.volumes, changes.hosts), (BTreeSet::from([id, other]), true));
        assert_eq!(changes.kinds, BTreeSet::from(["limits/".to_string(), "revoked".to_string()]));
        assert_eq!(view.volume(id).map(|v| (v.name.as_str(), v.failures, v.is_gone)), Some(("vm", 1, false)));
        assert_eq!(view.export(id), Some(&(MetaVersion(2), export)));
        assert!(view.export(other).is_none() && view.has_host("a"));
        view.apply(vec![put(&root_key(id), 7, b"damaged"), deleted(&export_key(id), 8), deleted(&host_key("a"), 9)])
            .unwrap();
        assert!(view.volume(id).is_none() && view.export(id).is_none() && !view.has_host("a"));
        assert!(!view.take_changes().is_empty() && view.take_changes().is_empty());
    }
}
