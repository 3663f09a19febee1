//! Volumes' roots from what devices hold, when the metadata store is lost: which of them are surely the newest, and which
//! are not.
//!
//! Each root that says more than where a checkpoint is was durable on an ack set of its open ledger's legs, and on a fence set
//! of those of the ledger that it sealed, before anything rested on it (protocol rule 27). So the newest copy is the root if
//! every device was asked, if an ack set of its open ledger's legs holds it, and if no device holds a ledger or a promise that
//! came after it. Anything less is a volume that was *found*: it is told of, nothing opens it, and so nothing of it is deleted,
//! until an operator says that it is to be taken as it is.
//!
//! A root that is taken gets an epoch above all that were ever promised, and with a random part: of two recoveries neither can be
//! taken for the other, and what comes back later from a device that was away is of an older epoch.

use holdfast_base::{DeviceId, Epoch, Lsn, VolumeId};
use holdfast_format::ledger::Leg;
use holdfast_format::record::SegmentNo;
use holdfast_format::root::Root;
use holdfast_format::sharing::Dependent;
use holdfast_format::wire::LedgerState;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// What one device holds of a volume.
#[derive(Clone, Debug)]
pub struct OnDevice {
    pub leg: Leg,
    pub promised: Epoch,
    pub ledgers: Vec<LedgerState>,
    pub root: HeldRoot,
}

#[derive(Clone, Debug)]
pub enum HeldRoot {
    None,
    Copy {
        sequence: u64,
        root: Box<Root>,
    },
    /// There is one, which can't be read.
    Damaged,
}

/// What all devices that answered hold, and which of the grid's did not.
#[derive(Clone, Debug, Default)]
pub struct Evidence {
    pub volumes: BTreeMap<VolumeId, Vec<OnDevice>>,
    pub asked: BTreeSet<DeviceId>,
    /// Devices of the grid that did not answer.
    pub unasked: BTreeSet<DeviceId>,
    /// Nothing says which devices the grid has: there may be others.
    pub is_partial: bool,
}

holdfast_base::mutations! {
    /// Deliberate mistakes, for the simulator.
    pub struct Mutations {
        /// Takes any root for the newest.
        accepts_older,
    }
}

/// Why a root may not be the newest.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Doubt {
    Unasked(usize),
    /// Only the copy of the records has a root, and no device anything of its log.
    Gone,
    /// It is not known which devices there are.
    Partial,
    /// Only the copy of the records has a root.
    NeverCopied,
    Damaged(DeviceId),
    TooFewCopies,
    Promised(Epoch),
    LaterLedger,
}

impl fmt::Display for Doubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Doubt::Unasked(1) => write!(f, "a device of the grid did not answer, and may hold a newer one"),
            Doubt::Unasked(count) => {
                write!(f, "{count} devices of the grid did not answer, and any may hold a newer one")
            }
            Doubt::Partial => {
                write!(f, "nothing says which nodes the grid has, and one that was not asked may hold a newer root")
            }
            Doubt::Gone => {
                write!(
                    f,
                    "no device holds anything of its log: it was deleted after the copy of the records was written, or lost"
                )
            }
            Doubt::NeverCopied => {
                write!(f, "no device holds a copy of its root: it was not opened since the grid has this release")
            }
            Doubt::Damaged(device) => write!(f, "the copy of its root on device {device} can't be read"),
            Doubt::TooFewCopies => write!(f, "too few devices hold the newest copy of its root"),
            Doubt::Promised(epoch) => {
                write!(f, "a device has promised epoch {}, of which no root is known", epoch.0)
            }
            Doubt::LaterLedger => write!(f, "a device holds a part of its log that its root does not know"),
        }
    }
}

/// A volume that there was.
#[derive(Clone, Debug)]
pub struct Recovered {
    /// As it is to be written: under an epoch above all others.
    pub root: Root,
    /// The epoch that it had.
    pub epoch: Epoch,
    /// Nothing where it is surely the newest.
    pub doubt: Option<Doubt>,
}

/// All volumes of which there is a root. `copied`: those of a copy of the grid's records. `random` is new for each recovery.
pub fn recover(
    evidence: &Evidence,
    copied: &BTreeMap<VolumeId, Root>,
    random: u32,
    mutations: Mutations,
) -> BTreeMap<VolumeId, Recovered> {
    let ids: BTreeSet<VolumeId> = evidence.volumes.keys().chain(copied.keys()).copied().collect();
    let mut all = BTreeMap::new();
    for id in ids {
        let held = evidence.volumes.get(&id).map_or(&[][..], Vec::as_slice);
        let Some((root, mut doubt)) = newest(held, copied.get(&id)) else { continue };
        let was_opened = root.epoch > Epoch(0) || !held.is_empty();
        let legs = root.open_ledger().into_iter().flat_map(|open| &open.legs).map(|leg| leg.device);
        let unasked: BTreeSet<DeviceId> =
            legs.filter(|device| !evidence.asked.contains(device)).chain(evidence.unasked.iter().copied()).collect();
        if !root.deleted && was_opened && !unasked.is_empty() {
            doubt = Some(Doubt::Unasked(unasked.len()));
        } else if !root.deleted && was_opened && evidence.is_partial {
            doubt = Some(Doubt::Partial);
        }
        let epoch = root.epoch;
        let promised = held.iter().map(|h| h.promised).max().unwrap_or_default();
        let root = Root { epoch: raised(epoch.max(promised), random), ..root };
        all.insert(id, Recovered { root, epoch, doubt: doubt.filter(|_| !mutations.accepts_older()) });
    }
    name_dependents(&mut all);
    all
}

/// The root with the highest epoch and sequence, and why it may not be the newest.
fn newest(held: &[OnDevice], copied: Option<&Root>) -> Option<(Root, Option<Doubt>)> {
    let copies = held.iter().filter_map(|h| match &h.root {
        HeldRoot::Copy { sequence, root } => Some(((root.epoch, *sequence), h.leg, &**root)),
        HeldRoot::None | HeldRoot::Damaged => None,
    });
    let Some((order, _, root)) = copies.clone().max_by_key(|(order, ..)| *order) else {
        let root = copied?.clone();
        let was_opened = root.epoch > Epoch(0) || !held.is_empty();
        let is_gone = held.iter().all(|h| h.ledgers.is_empty() && matches!(h.root, HeldRoot::None));
        let doubt = if is_gone { Doubt::Gone } else { Doubt::NeverCopied };
        return Some((root, was_opened.then_some(doubt)));
    };
    if let Some(copied) = copied.filter(|copied| copied.deleted || copied.epoch > root.epoch) {
        // Whatever devices hold of a volume that is being deleted: that goes on.
        return Some((copied.clone(), (!copied.deleted).then_some(Doubt::TooFewCopies)));
    }
    let on: BTreeSet<Leg> = copies.filter(|(other, ..)| *other == order).map(|(_, leg, _)| leg).collect();
    Some((root.clone(), doubt_of(root, &on, held)))
}

fn doubt_of(root: &Root, on: &BTreeSet<Leg>, held: &[OnDevice]) -> Option<Doubt> {
    if let Some(damaged) = held.iter().find(|h| matches!(h.root, HeldRoot::Damaged)) {
        return Some(Doubt::Damaged(damaged.leg.device));
    }
    let Some(open) = root.open_ledger() else { return Some(Doubt::TooFewCopies) };
    let holds = open.legs.iter().enumerate().filter(|(_, leg)| on.contains(leg));
    let mask = holds.fold(0, |mask, (i, _)| mask | 1 << i);
    if !open.rule.is_ack_set(&open.legs, mask) {
        return Some(Doubt::TooFewCopies);
    }
    let promised = held.iter().map(|h| h.promised).max().unwrap_or_default();
    if promised > root.epoch {
        return Some(Doubt::Promised(promised));
    }
    let later = held
        .iter()
        .flat_map(|h| &h.ledgers)
        .any(|state| state.ledger > open.id && state.last.max(state.trimmed) > Lsn::ZERO);
    later.then_some(Doubt::LaterLedger)
}

/// Above everything that was promised, and never the same twice.
fn raised(highest: Epoch, random: u32) -> Epoch {
    Epoch(((highest.0 >> 32) + 1 + u64::from(random & 0xf_ffff)) << 32)
}

/// A volume is named by what it was made of: a root that was copied before it was made does not. An origin speaks for what its
/// dependents name of its own origins, so the nearest that was found is enough, and an earlier one would never hear of its end.
/// The same goes for the store of a sharing domain and its members.
fn name_dependents(all: &mut BTreeMap<VolumeId, Recovered>) {
    let nearest = |recovered: &Recovered| {
        let root = &recovered.root;
        let origin = root.origins.iter().rev().find(|origin| all.contains_key(&origin.volume))?;
        let upto = SegmentNo { epoch: origin.upto, counter: u64::MAX };
        Some((origin.volume, Dependent { volume: root.volume, upto }))
    };
    let stores = |recovered: &Recovered| {
        let upto = SegmentNo { epoch: Epoch(u64::MAX), counter: u64::MAX };
        let member = Dependent { volume: recovered.root.volume, upto };
        let found = recovered.root.stores.iter().filter(|store| all.contains_key(&store.volume));
        found.map(|store| (store.volume, member)).collect::<Vec<_>>()
    };
    let there = all.values().filter(|recovered| !recovered.root.deleted);
    let named: Vec<_> = there.flat_map(|recovered| nearest(recovered).into_iter().chain(stores(recovered))).collect();
    for (origin, dependent) in named {
        let dependents = &mut all.get_mut(&origin).expect("found").root.dependents;
        if !dependents.iter().any(|known| known.volume == dependent.volume) {
            dependents.push(dependent);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_base::{GridId, InstanceId, LedgerId, NodeId};
    use holdfast_format::features::{Feature, Features};
    use holdfast_format::geometry::Layout;
    use holdfast_format::ledger::{AckRule, LedgerRef};
    use holdfast_format::sharing::{Origin, STORE_EPOCHS, Store};

    const VOLUME: VolumeId = VolumeId(7);

    fn leg(n: u32) -> Leg {
        Leg { node: NodeId(n), device: DeviceId(u128::from(n)) }
    }

    fn ledger_id(epoch: u64, n: u32) -> LedgerId {
        LedgerId { epoch: Epoch(epoch), n }
    }

    fn root(epoch: u64, n: u32, legs: &[u32]) -> Root {
        let open = LedgerRef {
            id: ledger_id(epoch, n),
            legs: legs.iter().map(|n| leg(*n)).collect(),
            rule: AckRule::flat(1),
            sealed: None,
        };
        Root {
            epoch: Epoch(epoch),
            instance: InstanceId(1),
            ledgers: vec![open],
            ..Root::new(GridId(1), VOLUME, "v", 1 << 20, Layout::DEFAULT)
        }
    }

    fn held(n: u32, copy: Option<(u64, Root)>) -> OnDevice {
        let promised = copy.as_ref().map_or(Epoch(0), |(_, root)| root.epoch);
        let state = |(_, root): &(u64, Root)| LedgerState {
            ledger: root.open_ledger().expect("open").id,
            sound: true,
            acked: Lsn(1),
            trimmed: Lsn(0),
            last: Lsn(2),
        };
        let ledgers = copy.iter().map(state).collect();
        let root = copy.map_or(HeldRoot::None, |(sequence, root)| HeldRoot::Copy { sequence, root: Box::new(root) });
        OnDevice { leg: leg(n), promised, ledgers, root }
    }

    fn judge(held: Vec<OnDevice>, copied: Option<Root>, unasked: &[u32]) -> Recovered {
        let unasked: BTreeSet<DeviceId> = unasked.iter().map(|n| leg(*n).device).collect();
        let asked = (1..=5).map(|n| leg(n).device).filter(|device| !unasked.contains(device)).collect();
        let volumes = BTreeMap::from([(VOLUME, held)]);
        let evidence = Evidence { volumes, asked, unasked, is_partial: false };
        let copied = copied.into_iter().map(|root| (VOLUME, root)).collect();
        recover(&evidence, &copied, 5, Mutations::default()).remove(&VOLUME).expect("there is a root")
    }

    #[test]
    fn the_newest_root_on_an_ack_set_is_taken_under_a_new_epoch() {
        let (old, new) = (root(3, 0, &[1, 2, 3]), root(3, 1, &[1, 2, 4]));
        let found = judge(
            vec![
                held(1, Some((2, new.clone()))),
                held(2, Some((2, new.clone()))),
                held(3, Some((1, old.clone()))),
                held(4, None),
            ],
            Some(old),
            &[],
        );
        assert_eq!((found.doubt, found.epoch), (None, Epoch(3)));
        assert_eq!(found.root.ledgers, new.ledgers);
        assert_eq!(found.root.epoch, Epoch(6 << 32));
        let again = judge(vec![held(1, Some((1, found.root.clone()))), held(2, Some((1, found.root)))], None, &[]);
        assert!(again.root.epoch > Epoch(6 << 32));
    }

    #[test]
    fn what_may_be_older_is_only_found() {
        let new = root(3, 1, &[1, 2, 4]);
        let kept = new.clone();
        let both = || vec![held(1, Some((2, kept.clone()))), held(2, Some((2, kept.clone())))];
        assert_eq!(judge(both(), None, &[]).doubt, None);
        assert_eq!(judge(both(), None, &[4]).doubt, Some(Doubt::Unasked(1)));
        let one = vec![held(1, Some((2, new.clone()))), held(2, None)];
        assert_eq!(judge(one, None, &[]).doubt, Some(Doubt::TooFewCopies));
        let mut promised = both();
        promised.push(OnDevice { promised: Epoch(4), ..held(4, None) });
        let judged = judge(promised, None, &[]);
        assert_eq!(judged.doubt, Some(Doubt::Promised(Epoch(4))));
        let mut later = both();
        later.push(held(4, Some((1, root(3, 2, &[4, 5])))));
        later[2].root = HeldRoot::None;
        assert_eq!(judge(later, None, &[]).doubt, Some(Doubt::LaterLedger));
        let mut damaged = both();
        damaged.push(OnDevice { root: HeldRoot::Damaged, ..held(4, None) });
        assert_eq!(judge(damaged, None, &[]).doubt, Some(Doubt::Damaged(leg(4).device)));
        assert_eq!(judge(vec![held(1, None)], Some(new.clone()), &[]).doubt, Some(Doubt::Gone));
        let uncopied = OnDevice { root: HeldRoot::None, ..held(1, Some((1, new.clone()))) };
        assert_eq!(judge(vec![uncopied], Some(new.clone()), &[]).doubt, Some(Doubt::NeverCopied));
        assert_eq!(judge(both(), Some(root(9, 0, &[1])), &[]).doubt, Some(Doubt::TooFewCopies));
        let never = Root { epoch: Epoch(0), ledgers: Vec::new(), ..new.clone() };
        assert_eq!(judge(Vec::new(), Some(never), &[4]).doubt, None, "nothing was ever written to it");
        let evidence = Evidence {
            volumes: BTreeMap::from([(VOLUME, both())]),
            asked: [1, 2, 4].map(|n| leg(n).device).into(),
            is_partial: true,
            ..Evidence::default()
        };
        let all = recover(&evidence, &BTreeMap::new(), 5, Mutations::default());
        assert_eq!(all[&VOLUME].doubt, Some(Doubt::Partial));
        let asked = [1, 2].map(|n| leg(n).device).into();
        let all = recover(&Evidence { asked, ..evidence }, &BTreeMap::new(), 5, Mutations::default());
        assert_eq!(all[&VOLUME].doubt, Some(Doubt::Unasked(1)), "a leg of its log that nobody knew of");
        let deleted = Root { deleted: true, ..new };
        let going = judge(both(), Some(deleted), &[]);
        assert!(going.root.deleted && going.doubt.is_none());
    }

    #[test]
    fn origins_name_what_was_made_of_them() {
        let of = |n, origins| {
            let root = Root { volume: VolumeId(n), origins, ..root(3, 1, &[1, 2]) };
            (VolumeId(n), vec![held(1, Some((1, root.clone()))), held(2, Some((1, root)))])
        };
        let origin = |volume: u64| Origin { upto: Epoch(volume + 1), volume: VolumeId(volume.into()) };
        let dependent = |volume, upto| Dependent {
            volume: VolumeId(volume),
            upto: SegmentNo { epoch: Epoch(upto), counter: u64::MAX },
        };
        // 3 was made of 2, 5 of 4, of which nothing was found; all come from 1.
        let all = [
            of(1, Vec::new()),
            of(2, vec![origin(1)]),
            of(3, vec![origin(1), origin(2)]),
            of(5, vec![origin(1), origin(4)]),
        ];
        let evidence = Evidence { volumes: BTreeMap::from(all), ..Evidence::default() };
        let all = recover(&evidence, &BTreeMap::new(), 0, Mutations::default());
        assert_eq!(all[&VolumeId(1)].root.dependents, [dependent(2, 2), dependent(5, 2)]);
        assert_eq!(all[&VolumeId(2)].root.dependents, [dependent(3, 3)]);
        // 7 is a member of the domain of 8, whose root is older.
        let stores = vec![Store { volume: VolumeId(8), first: STORE_EPOCHS, last: Epoch(u64::MAX) }];
        let features = Features::default().with(Feature::Stores);
        let member = Root { volume: VolumeId(7), stores, features, ..root(3, 1, &[1, 2]) };
        let member = (VolumeId(7), vec![held(1, Some((1, member.clone()))), held(2, Some((1, member)))]);
        let evidence = Evidence { volumes: BTreeMap::from([member, of(8, Vec::new())]), ..Evidence::default() };
        let all = recover(&evidence, &BTreeMap::new(), 0, Mutations::default());
        assert_eq!(all[&VolumeId(8)].root.dependents, [dependent(7, u64::MAX)]);
    }
}
