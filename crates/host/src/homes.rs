//! Which of a host's reactors has which volume, under which names; and which of them an order is for.
//!
//! A volume belongs to one reactor, with the clones in it. One that is opened goes to the reactor with the fewest, and stays
//! there. Orders about it go there; those about all volumes go to all.
//!
//! Invariants: (1) while an order to open a volume is on its way, or the volume is in a reactor's table, it has that home and
//! no other; (2) what a reactor tells of a volume counts only if that is its home.

use crate::event::Order;
use crate::volumes::{split_export, split_ticket};
use holdfast_base::{ExportInfo, VolumeId};
use std::collections::{BTreeMap, BTreeSet};

/// Where clients and other hosts come, and what nobody has is looked for.
pub const FRONT: usize = 0;

/// An export, and the volume or clone that it is of.
pub type Shown = (ExportInfo, VolumeId);

/// Names of a volume and of clones in it, and what clients may open of them.
pub type Names = (BTreeSet<String>, Vec<Shown>);

struct Home {
    reactor: usize,
    /// Orders to open it that are on their way there.
    coming: usize,
    /// It is in the reactor's table.
    is_there: bool,
    names: BTreeSet<String>,
    exports: Vec<Shown>,
}

/// Whom an order is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Route {
    To(usize),
    /// The order of a volume that is opened: it has arrived when [`Homes::arrived`] is called.
    Opens(VolumeId, usize),
    All,
    /// Its volumes belong to several reactors, and it can be carried out by one alone.
    Apart,
}

/// The homes of all volumes of a host.
pub struct Homes {
    reactors: usize,
    volumes: BTreeMap<VolumeId, Home>,
}

fn base_name(export: &str) -> &str {
    split_export(split_ticket(export).0).0
}

impl Homes {
    pub fn new(reactors: usize) -> Homes {
        assert!(reactors > 0, "a host has a reactor");
        Homes { reactors, volumes: BTreeMap::new() }
    }

    /// The reactor that a volume is opened on; an order to open it is on its way there from here on.
    pub fn place(&mut self, volume: VolumeId, name: &str) -> usize {
        let mut counts = vec![0_usize; self.reactors];
        self.volumes.values().for_each(|home| counts[home.reactor] += 1);
        let fewest = (0..self.reactors).min_by_key(|reactor| counts[*reactor]).unwrap_or(FRONT);
        let home = self.volumes.entry(volume).or_insert_with(|| Home {
            reactor: fewest,
            coming: 0,
            is_there: false,
            names: BTreeSet::new(),
            exports: Vec::new(),
        });
        home.coming += 1;
        home.names.insert(name.to_string());
        home.reactor
    }

    /// An order to open it has come, or will not.
    pub fn arrived(&mut self, volume: VolumeId) {
        let Some(home) = self.volumes.get_mut(&volume) else { return };
        home.coming = home.coming.saturating_sub(1);
        if home.coming == 0 && !home.is_there {
            self.volumes.remove(&volume);
        }
    }

    /// A reactor has it, under these names, or has it no more.
    pub fn publish(&mut self, reactor: usize, volume: VolumeId, found: Option<Names>) {
        let Some(home) = self.volumes.get_mut(&volume).filter(|home| home.reactor == reactor) else { return };
        home.is_there = found.is_some();
        match found {
            Some((names, exports)) => (home.names, home.exports) = (names, exports),
            None if home.coming == 0 => drop(self.volumes.remove(&volume)),
            None => home.exports.clear(),
        }
    }

    pub fn of(&self, volume: VolumeId) -> usize {
        self.volumes.get(&volume).map_or(FRONT, |home| home.reactor)
    }

    /// Of a volume, a clone or a snapshot.
    pub fn of_name(&self, name: &str) -> usize {
        let name = base_name(name);
        self.volumes.values().find(|home| home.names.contains(name)).map_or(FRONT, |home| home.reactor)
    }

    /// Where an export is, if another reactor has it than this one. The empty name is that of the only one there is.
    pub fn elsewhere(&self, reactor: usize, export: &str) -> Option<usize> {
        let name = base_name(export);
        let mut homes = self.volumes.values();
        let home = if name.is_empty() {
            homes.next().filter(|home| home.exports.len() == 1 && self.volumes.len() == 1)
        } else {
            homes.find(|home| home.names.contains(name))
        };
        home.map(|home| home.reactor).filter(|at| *at != reactor)
    }

    /// What others have than this one.
    pub fn exports_elsewhere(&self, reactor: usize) -> Vec<Shown> {
        self.volumes.values().filter(|home| home.reactor != reactor).flat_map(|home| home.exports.clone()).collect()
    }

    /// Whom an order is for. One that opens a volume gives it a home.
    pub fn route(&mut self, order: &Order) -> Route {
        match order {
            Order::Open { spec, .. } | Order::Warm { spec } => {
                Route::Opens(spec.volume, self.place(spec.volume, &spec.name))
            }
            Order::LetGo { volume } | Order::Dependent { origin: volume, .. } => Route::To(self.of(*volume)),
            Order::Close { name, .. }
            | Order::Receive { name, .. }
            | Order::Resize { name, .. }
            | Order::SetPolicy { name, .. }
            | Order::CheckReads { name, .. }
            | Order::Prepare { name }
            | Order::Change { volume: name, .. }
            | Order::Filters { volume: name, .. }
            | Order::Fork { volume: name, .. } => Route::To(self.of_name(name)),
            Order::SnapshotGroup { volumes, .. } => {
                let homes: BTreeSet<usize> = volumes.iter().map(|name| self.of_name(name)).collect();
                if homes.len() > 1 { Route::Apart } else { Route::To(homes.first().copied().unwrap_or(FRONT)) }
            }
            Order::Offer { .. } | Order::AskToYield { .. } => Route::To(FRONT),
            Order::Share(_)
            | Order::KeepSpare(_)
            | Order::Drain(_)
            | Order::SetFixed { .. }
            | Order::Near(_)
            | Order::Access { .. }
            | Order::TakeNoMore
            | Order::CloseAll => Route::All,
        }
    }
}

impl Order {
    /// The same again, of an order that is for all reactors.
    pub fn again(&self) -> Option<Order> {
        Some(match self {
            Order::Share(volumes) => Order::Share(volumes.clone()),
            Order::KeepSpare(keep) => Order::KeepSpare(*keep),
            Order::Drain(devices) => Order::Drain(devices.clone()),
            Order::SetFixed { volume, fixed } => Order::SetFixed { volume: *volume, fixed: *fixed },
            Order::Near(nodes) => Order::Near(nodes.clone()),
            Order::Access { lists, limits } => Order::Access { lists: lists.clone(), limits: limits.clone() },
            Order::TakeNoMore => Order::TakeNoMore,
            Order::CloseAll => Order::CloseAll,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: VolumeId = VolumeId(1);
    const B: VolumeId = VolumeId(2);
    const C: VolumeId = VolumeId(3);

    fn shown(name: &str, volume: VolumeId) -> (BTreeSet<String>, Vec<Shown>) {
        let export = ExportInfo { name: name.to_string(), description: String::new(), size_bytes: 1, read_only: false };
        (BTreeSet::from([name.to_string()]), vec![(export, volume)])
    }

    #[test]
    fn volumes_are_spread_and_stay_where_they_are() {
        let mut homes = Homes::new(2);
        assert_eq!((homes.place(A, "a"), homes.place(B, "b")), (0, 1));
        assert_eq!(homes.place(B, "b"), 1, "where it is");
        assert_eq!(homes.place(C, "c"), 0);
        // One that could not be asked is nowhere; one that was asked twice is there until both have come.
        homes.arrived(C);
        homes.arrived(B);
        homes.publish(1, B, Some(shown("b", B)));
        homes.arrived(B);
        assert_eq!((homes.of(C), homes.of(B)), (FRONT, 1));
        assert_eq!(homes.of_name("b@monday"), 1);
        homes.publish(0, B, None);
        assert_eq!(homes.of(B), 1, "another reactor does not know");
        homes.publish(1, B, None);
        assert_eq!(homes.of(B), FRONT);
    }

    #[test]
    fn a_volume_that_is_let_go_while_it_is_asked_for_anew_stays_where_it_comes() {
        let mut homes = Homes::new(2);
        homes.place(A, "a");
        assert_eq!(homes.place(B, "b"), 1);
        homes.publish(1, B, Some(shown("b", B)));
        homes.arrived(B);
        assert_eq!(homes.place(B, "b"), 1);
        homes.publish(1, B, None);
        assert_eq!(homes.of(B), 1);
        homes.publish(1, B, Some(shown("b", B)));
        homes.arrived(B);
        assert_eq!(homes.of(B), 1);
    }

    #[test]
    fn an_export_of_another_reactor_is_found_there() {
        let mut homes = Homes::new(2);
        homes.place(A, "a");
        homes.place(B, "b");
        homes.publish(0, A, Some(shown("a", A)));
        homes.publish(1, B, Some(shown("b", B)));
        assert_eq!((homes.elsewhere(0, "b@s"), homes.elsewhere(1, "b")), (Some(1), None));
        assert_eq!((homes.elsewhere(0, "a"), homes.elsewhere(0, "no")), (None, None));
        assert_eq!(homes.elsewhere(0, ""), None, "there are two");
        assert_eq!(homes.exports_elsewhere(0).len(), 1);
        homes.publish(0, A, None);
        homes.arrived(A);
        assert_eq!(homes.elsewhere(0, ""), Some(1), "the only one");
    }

    #[test]
    fn orders_go_to_their_volume_or_to_all() {
        let mut homes = Homes::new(2);
        for (volume, name, reactor) in [(A, "a", 0), (B, "b", 1)] {
            homes.place(volume, name);
            homes.publish(reactor, volume, Some(shown(name, volume)));
            homes.arrived(volume);
        }
        let group = |names: &[&str]| Order::SnapshotGroup {
            volumes: names.iter().map(|name| name.to_string()).collect(),
            name: "s".to_string(),
            created_ms: 0,
        };
        assert_eq!(homes.route(&Order::Prepare { name: "b".to_string() }), Route::To(1));
        assert_eq!(homes.route(&Order::LetGo { volume: B }), Route::To(1));
        assert_eq!((homes.route(&group(&["b", "b"])), homes.route(&group(&["a", "b"]))), (Route::To(1), Route::Apart));
        assert_eq!(homes.route(&Order::KeepSpare(true)), Route::All);
        assert!(Order::KeepSpare(true).again().is_some() && Order::LetGo { volume: B }.again().is_none());
    }
}
