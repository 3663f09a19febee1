//! The end of a volume, one transaction after the other, each planned from the records as they are.
//!
//! ```text
//! deleting/ID ──> root: deleted, epoch raised; key, name … gone ──> all devices have dropped it ──> no record is left
//!      └──> kept: others need it
//! ```
//! From the second state there is no way back: a device is asked only then.

use crate::steward::{Change, Compares, Writes};
use crate::view::{Record, View};
use holdfast_base::{Epoch, InstanceId, MetaVersion, VolumeId, crc32c};
use holdfast_format::meta::{
    DeletingRecord, NameRecord, Other, decode, deleting_key, encode, found_key, name_key, records_of,
};
use holdfast_format::root::{GIVEN_UP, Root, root_key};

/// Records that one transaction deletes beside those that say how far it is.
const AT_ONCE: usize = 40;

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// Of this volume, which may be one that was being made of the other.
    Commit(VolumeId, Change, Compares, Writes),
    /// Every device drops it; then what is left goes.
    Drop { epoch: Epoch, finish: (Compares, Writes) },
    /// The root record can't be read: nothing is done about the volume.
    Unreadable,
}

/// Volumes that need what this one holds.
pub fn needed_by(view: &View, root: &Root) -> Vec<VolumeId> {
    // One that a recovery has found, and nobody has accepted, may be had back yet.
    let lives = |volume: &VolumeId| {
        view.volume(*volume).is_some_and(|known| !known.is_gone) || view.get(&found_key(*volume)).is_some()
    };
    root.dependents.iter().map(|of| of.volume).filter(lives).collect()
}

/// What is next about a volume whose deletion was begun.
pub fn next(view: &View, volume: VolumeId, deleting: &DeletingRecord, version: MetaVersion) -> Step {
    let (root_at, own) = (root_key(volume), (deleting_key(&deleting.volume), version));
    let Some(record) = view.get(&root_at) else {
        let compares = vec![own.clone(), (root_at, MetaVersion::ABSENT)];
        return Step::Commit(volume, Change::Finish, compares, vec![(own.0, None)]);
    };
    let Ok(root) = Root::decode(&record.value) else { return Step::Unreadable };
    let mut compares = vec![own.clone(), (root_at.clone(), record.version)];
    if root.deleted {
        let (more, gone) = leftovers(view, volume, deleting);
        if !gone.is_empty() {
            compares.extend(more);
            return Step::Commit(volume, Change::Forget, compares, gone);
        }
        return Step::Drop { epoch: root.epoch, finish: (compares, vec![(root_at, None), (own.0, None)]) };
    }
    if !needed_by(view, &root).is_empty() {
        return Step::Commit(volume, Change::KeepIt, compares, vec![(own.0, None)]);
    }
    if let Some(step) = root.dependents.iter().find_map(|of| end_creation(view, of.volume)) {
        return step;
    }
    // One that can't be read may need it.
    if root.dependents.iter().any(|of| view.get(&root_key(of.volume)).is_some() && view.volume(of.volume).is_none()) {
        return Step::Unreadable;
    }
    let gone = Root { deleted: true, epoch: root.epoch.next(), instance: instance_of(&root, version), ..root };
    let (more, mut writes) = leftovers(view, volume, deleting);
    compares.extend(more);
    writes.push((root_at, Some(gone.encode())));
    Step::Commit(volume, Change::Delete, compares, writes)
}

/// Nobody's, so that whoever has it open finds itself deposed.
fn instance_of(root: &Root, version: MetaVersion) -> InstanceId {
    let mark = crc32c(&[&root.instance.0.to_le_bytes()[..], &version.0.to_le_bytes()].concat());
    InstanceId(root.instance.0 ^ (u128::from(mark) << 64 | 1))
}

/// One that is being made of it is not finished: naming it would change the record of the one that goes.
fn end_creation(view: &View, volume: VolumeId) -> Option<Step> {
    let (key, deleting) = (root_key(volume), deleting_key(&volume.to_string()));
    let record = view.get(&key)?;
    let root = Root::decode(&record.value).ok().filter(Root::is_placeholder)?;
    let begun = DeletingRecord { volume: volume.to_string(), name: root.name.clone(), other: Other::new() };
    let known = view.get(&deleting).map_or(MetaVersion::ABSENT, |record| record.version);
    let compares = vec![(key.clone(), record.version), (deleting.clone(), known)];
    let given_up = Root { epoch: GIVEN_UP, ..root };
    let writes = vec![(key, Some(given_up.encode())), (deleting, Some(encode(&begun)))];
    Some(Step::Commit(volume, Change::EndCreation, compares, writes))
}

/// All that the records say of the volume beside its root, first of all its key: from then on nobody can read what devices hold
/// of it.
fn leftovers(view: &View, volume: VolumeId, deleting: &DeletingRecord) -> (Compares, Writes) {
    let (prefix, keys) = records_of(volume);
    let root = root_key(volume);
    let own = view.list(&prefix).filter(|record| record.key != root);
    let others = keys.iter().filter_map(|key| view.get(key));
    let is_its = |record: &&Record| decode::<NameRecord>(&record.value).is_ok_and(|n| n.volume == deleting.volume);
    let name = view.get(&name_key(&deleting.name)).filter(is_its);
    let all = own.chain(others).chain(name).take(AT_ONCE);
    all.map(|record| ((record.key.clone(), record.version), (record.key.clone(), None))).unzip()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::View;
    use holdfast_base::GridId;
    use holdfast_format::geometry::Layout;
    use holdfast_format::meta::SETTINGS_PREFIX;
    use holdfast_format::record::SegmentNo;
    use holdfast_format::sharing::Dependent;

    const ORIGIN: VolumeId = VolumeId(1);
    const CLONE: VolumeId = VolumeId(2);

    fn root(volume: VolumeId, epoch: u64, dependents: &[VolumeId]) -> Root {
        let upto = SegmentNo::default();
        let dependents = dependents.iter().map(|volume| Dependent { volume: *volume, upto }).collect();
        Root { epoch: Epoch(epoch), dependents, ..Root::new(GridId(1), volume, "vm", 1 << 30, Layout::DEFAULT) }
    }

    fn deleting() -> DeletingRecord {
        DeletingRecord { volume: ORIGIN.to_string(), name: "vm".to_string(), other: Other::new() }
    }

    /// Records, each at the version of its place.
    fn view(records: &[(String, Vec<u8>)]) -> View {
        let mut view = View::new(None, None);
        for (at, (key, value)) in records.iter().enumerate() {
            let version = MetaVersion(at as u64 + 1);
            view.note(Record { key: key.clone(), version, value: value.as_slice().into() });
        }
        view
    }

    fn step(records: &[(String, Vec<u8>)]) -> Step {
        next(&view(records), ORIGIN, &deleting(), MetaVersion(9))
    }

    fn change(step: &Step) -> Option<(VolumeId, Change)> {
        match step {
            Step::Commit(volume, change, ..) => Some((*volume, *change)),
            _ => None,
        }
    }

    fn at(root: &Root) -> (String, Vec<u8>) {
        (root_key(root.volume), root.encode())
    }

    #[test]
    fn everything_goes_in_one_transaction_and_devices_are_asked_after_it() {
        let named = |volume: VolumeId| format!("{{\"volume\":\"{volume}\"}}").into_bytes();
        let records = [
            at(&root(ORIGIN, 4, &[])),
            (format!("volume/{ORIGIN}/key"), b"k".to_vec()),
            (format!("{SETTINGS_PREFIX}{ORIGIN}"), b"{}".to_vec()),
            (name_key("vm"), named(ORIGIN)),
        ];
        let Step::Commit(ORIGIN, Change::Delete, compares, writes) = step(&records) else {
            panic!("{:?}", step(&records))
        };
        assert_eq!(compares.len(), 5, "each is compared, and the record of the deletion");
        let gone: Vec<&str> = writes.iter().filter(|(_, value)| value.is_none()).map(|(key, _)| key.as_str()).collect();
        assert_eq!(gone, [records[1].0.as_str(), records[2].0.as_str(), "name/vm"]);
        let written = writes.iter().find_map(|(_, value)| value.as_ref()).unwrap();
        let after = Root::decode(written).unwrap();
        assert!(after.deleted && after.epoch == Epoch(5) && after.instance != root(ORIGIN, 4, &[]).instance);
        let Step::Drop { epoch: Epoch(5), finish } = step(&[at(&after)]) else { panic!("it can't be had back") };
        assert_eq!(finish.1.len(), 2);
        assert_eq!(change(&step(&[at(&after), records[1].clone()])), Some((ORIGIN, Change::Forget)));
        assert_eq!(change(&step(&[])), Some((ORIGIN, Change::Finish)), "only the record of the deletion is left");
        // Another volume has the name by now.
        let taken = [at(&root(ORIGIN, 4, &[])), (name_key("vm"), named(CLONE))];
        let Step::Commit(_, Change::Delete, _, writes) = step(&taken) else { panic!("it goes all the same") };
        assert_eq!(writes.len(), 1);
    }

    #[test]
    fn what_others_need_is_kept() {
        let origin = at(&root(ORIGIN, 4, &[CLONE]));
        assert_eq!(change(&step(&[origin.clone(), at(&root(CLONE, 1, &[]))])), Some((ORIGIN, Change::KeepIt)));
        let found = (found_key(CLONE), b"{}".to_vec());
        assert_eq!(change(&step(&[origin.clone(), found])), Some((ORIGIN, Change::KeepIt)), "it may be accepted yet");
        assert_eq!(step(&[origin.clone(), (root_key(CLONE), b"?".to_vec())]), Step::Unreadable);
        assert_eq!(step(&[(root_key(ORIGIN), b"?".to_vec())]), Step::Unreadable);
        let gone = Root { deleted: true, ..root(CLONE, 3, &[]) };
        assert_eq!(change(&step(&[origin.clone(), at(&gone)])), Some((ORIGIN, Change::Delete)));
        assert_eq!(change(&step(&[origin])), Some((ORIGIN, Change::Delete)));
    }

    #[test]
    fn one_that_is_being_made_of_it_is_not_finished() {
        let begun = Root { deleted: true, ..root(CLONE, 0, &[]) };
        let found = step(&[at(&root(ORIGIN, 4, &[CLONE])), at(&begun)]);
        let Step::Commit(CLONE, Change::EndCreation, compares, writes) = found else { panic!("{found:?}") };
        assert_eq!(compares.len(), 2);
        let after = Root::decode(writes[0].1.as_ref().unwrap()).unwrap();
        assert!(after.deleted && after.epoch == GIVEN_UP);
        assert!(writes[1].0.starts_with("deleting/"), "and what devices have of it by then goes too");
        assert_eq!(change(&step(&[at(&root(ORIGIN, 4, &[CLONE])), at(&after)])), Some((ORIGIN, Change::Delete)));
    }
}
