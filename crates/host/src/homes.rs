//! Which of a host's reactors has which volume, under which names; and which of them an order is for.
//!
//! A volume belongs to one reactor, with the clones in it. Orders about it go there; those about all volumes go to all.
//!
//! In a grid of one machine a volume that is opened goes to the reactor with the fewest ([`Spread::Fewest`]). Where
//! volumes go from host to host, the volume's id says which reactor of each host is its home ([`Spread::ById`]): so
//! every host knows where it is at every other, and clients whose requests are forwarded are where it will be opened.
//!
//! To each other reactors are as hosts are. Each that is not the first has a name of its own among other hosts, NAME#2
//! for the one of number 2 ([`link_name`]); no host's name has such a sign.
//!
//! Invariants: (1) while an order to open a volume is on its way, or the volume is in a reactor's table, it has that home and
//! no other; (2) what a reactor tells of a volume counts only if that is its home; (3) with [`Spread::ById`] a home never
//! changes.

use crate::event::{Order, Outcome};
use crate::offers::{Offer, Place};
use crate::volumes::{split_export, split_ticket};
use holdfast_base::{ExportInfo, VolumeId};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

/// Where clients and other hosts come, and what nobody has is looked for.
pub const FRONT: usize = 0;

/// Between a host's name and the number of its reactor.
const SIGN: char = '#';

/// An export, and the volume or clone that it is of.
pub type Shown = (ExportInfo, VolumeId);

/// Names of a volume and of clones in it, and what clients may open of them.
pub type Names = (BTreeSet<String>, Vec<Shown>);

/// How volumes are spread over the reactors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Spread {
    /// Each that is opened to the reactor with the fewest.
    Fewest,
    /// Each by its id, on every host.
    ById,
}

/// A host, and where each of its reactors is reached by others.
pub type HostAt = (String, Vec<SocketAddr>);

/// What one reactor offers together with other hosts, and which reactors of these it needs, by their names among hosts.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Share {
    pub offers: Vec<Offer>,
    pub hosts: Vec<(String, SocketAddr)>,
    pub heard_at: BTreeMap<VolumeId, String>,
}

/// What a host offers together with others, where those are, and which of them serve volumes that its own may talk with.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Offered {
    pub offers: Vec<Offer>,
    pub hosts: Vec<HostAt>,
    pub heard_at: BTreeMap<VolumeId, String>,
}

/// The reactor of a host with so many that is a volume's home, where volumes are spread by their ids.
pub fn home_of(volume: VolumeId, reactors: usize) -> usize {
    // Ids are drawn at random: see RFC 9562, 5.4.
    (volume.0 % reactors.max(1) as u128) as usize
}

/// What a reactor of a host is called among other hosts. Earlier releases know hosts of one.
pub fn link_name(host: &str, reactor: usize) -> String {
    if reactor == FRONT { host.to_string() } else { format!("{host}{SIGN}{reactor}") }
}

/// The host that a reactor is of.
pub fn host_of_link(name: &str) -> &str {
    name.split_once(SIGN).map_or(name, |(host, _)| host)
}

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
}

/// The homes of all volumes of a host.
pub struct Homes {
    reactors: usize,
    spread: Spread,
    volumes: BTreeMap<VolumeId, Home>,
    /// What is offered together with other hosts, by name: the volume that has it.
    offered: BTreeMap<String, (VolumeId, Shown)>,
    /// How many reactors other hosts have.
    others: BTreeMap<String, usize>,
}

fn base_name(export: &str) -> &str {
    split_export(split_ticket(export).0).0
}

impl Homes {
    pub fn new(reactors: usize, spread: Spread) -> Homes {
        assert!(reactors > 0, "a host has a reactor");
        let (offered, others) = (BTreeMap::new(), BTreeMap::new());
        Homes { reactors, spread, volumes: BTreeMap::new(), offered, others }
    }

    /// Takes in what is offered together with other hosts now; gives each reactor's share of it. Where others are heard all
    /// reactors are told: any may have a volume that talks with them.
    pub fn set_offers(&mut self, Offered { offers, hosts, heard_at }: Offered) -> Vec<Share> {
        self.others = hosts.iter().map(|(name, at)| (name.clone(), at.len())).collect();
        self.offered.clear();
        let mut shares = vec![Share::default(); self.reactors];
        for mut offer in offers {
            let volume = offer.volume;
            for (name, (id, size_bytes)) in &offer.exports {
                let export = crate::offers::forwarded(name, *size_bytes);
                self.offered.insert(name.clone(), (volume, (export, *id)));
            }
            if let Place::At(host) = &mut offer.place {
                *host = self.peer_of(host, volume);
            }
            let share = &mut shares[self.of(volume)];
            for (name, at) in &hosts {
                let reactor = home_of(volume, at.len());
                let needed = at.get(reactor).map(|address| (link_name(name, reactor), *address));
                share.hosts.extend(needed.filter(|needed| !share.hosts.contains(needed)));
            }
            share.offers.push(offer);
        }
        for (volume, host) in heard_at {
            let Some((_, at)) = hosts.iter().find(|(name, _)| *name == host) else { continue };
            let reactor = home_of(volume, at.len());
            let Some(address) = at.get(reactor) else { continue };
            let needed = (link_name(&host, reactor), *address);
            for share in &mut shares {
                if !share.hosts.contains(&needed) {
                    share.hosts.push(needed.clone());
                }
                share.heard_at.insert(volume, needed.0.clone());
            }
        }
        shares
    }

    /// What the reactor of another host is called that is a volume's home there.
    pub fn peer_of(&self, host: &str, volume: VolumeId) -> String {
        link_name(host, home_of(volume, self.others.get(host).copied().unwrap_or(1)))
    }

    /// The reactor that a volume is opened on; an order to open it is on its way there from here on.
    pub fn place(&mut self, volume: VolumeId, name: &str) -> usize {
        let reactor = match self.spread {
            Spread::Fewest => self.with_fewest(),
            Spread::ById => home_of(volume, self.reactors),
        };
        let home = self.volumes.entry(volume).or_insert_with(|| Home {
            reactor,
            coming: 0,
            is_there: false,
            names: BTreeSet::new(),
            exports: Vec::new(),
        });
        home.coming += 1;
        home.names.insert(name.to_string());
        home.reactor
    }

    fn with_fewest(&self) -> usize {
        let mut counts = vec![0_usize; self.reactors];
        self.volumes.values().for_each(|home| counts[home.reactor] += 1);
        (0..self.reactors).min_by_key(|reactor| counts[*reactor]).unwrap_or(FRONT)
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
        let unknown = match self.spread {
            Spread::Fewest => FRONT,
            Spread::ById => home_of(volume, self.reactors),
        };
        self.volumes.get(&volume).map_or(unknown, |home| home.reactor)
    }

    fn home_of_name(&self, name: &str) -> Option<usize> {
        let own = self.volumes.values().find(|home| home.names.contains(name)).map(|home| home.reactor);
        own.or_else(|| self.offered.get(name).map(|(volume, _)| self.of(*volume)))
    }

    /// Of a volume, a clone or a snapshot.
    pub fn of_name(&self, name: &str) -> usize {
        self.home_of_name(base_name(name)).unwrap_or(FRONT)
    }

    /// Where an export is, if another reactor has it than this one. The empty name is that of the only one there is.
    pub fn elsewhere(&self, reactor: usize, export: &str) -> Option<usize> {
        let name = base_name(export);
        let home = if name.is_empty() { self.only_one() } else { self.home_of_name(name) };
        home.filter(|at| *at != reactor)
    }

    /// Where the only export is that there is.
    fn only_one(&self) -> Option<usize> {
        let served = self.volumes.values().flat_map(|home| home.exports.iter().map(|(of, _)| (&of.name, home.reactor)));
        let offered = self.offered.iter().map(|(name, (volume, _))| (name, self.of(*volume)));
        let all: BTreeMap<&String, usize> = served.chain(offered).collect();
        all.values().next().copied().filter(|_| all.len() == 1)
    }

    /// What others have than this one, or offer together with other hosts.
    pub fn exports_elsewhere(&self, reactor: usize) -> Vec<Shown> {
        let served = self.volumes.values().filter(|home| home.reactor != reactor).flat_map(|home| home.exports.clone());
        let mut all: BTreeMap<String, Shown> = served.map(|shown| (shown.0.name.clone(), shown)).collect();
        for (name, (_, shown)) in self.offered.iter().filter(|(_, (volume, _))| self.of(*volume) != reactor) {
            all.entry(name.clone()).or_insert_with(|| shown.clone());
        }
        all.into_values().collect()
    }

    /// Says in an order which reactors it is about, as far as that is for the order to say.
    pub fn address(&self, order: &mut Order) {
        match order {
            Order::AskToYield { host, volume } => *host = self.peer_of(host, *volume),
            Order::SnapshotGroup(order) => {
                order.members.iter_mut().for_each(|member| member.reactor = self.of_name(&member.volume));
            }
            _ => {}
        }
    }

    /// Whom an order is for. One that opens a volume gives it a home.
    pub fn route(&mut self, order: &Order) -> Route {
        match order {
            Order::Open { spec, .. } | Order::Preload { spec } => {
                Route::Opens(spec.volume, self.place(spec.volume, &spec.name))
            }
            Order::LetGo { volume } | Order::Dependent { origin: volume, .. } | Order::AskToYield { volume, .. } => {
                Route::To(self.of(*volume))
            }
            Order::Close { name, .. }
            | Order::Receive { name, .. }
            | Order::Resize { name, .. }
            | Order::SetPolicy { name, .. }
            | Order::CheckReads { name, .. }
            | Order::SetSharing { name, .. }
            | Order::EndSharing { name }
            | Order::Prepare { name }
            | Order::Change { volume: name, .. }
            | Order::Filters { volume: name, .. }
            | Order::CreateDependent { volume: name, .. } => Route::To(self.of_name(name)),
            Order::SnapshotGroup(order) => Route::To(order.members.first().map_or(FRONT, |member| member.reactor)),
            Order::Offer { .. } => Route::To(FRONT),
            Order::Share(_)
            | Order::KeepSpare(_)
            | Order::Drain(_)
            | Order::SetReservation { .. }
            | Order::LocalNodes(_)
            | Order::Access { .. }
            | Order::Inspect(_)
            | Order::TakeNoMore
            | Order::CloseAll => Route::All,
        }
    }
}

impl Outcome {
    /// What all reactors say to an order that was for all of them.
    pub fn of_all(parts: Vec<Outcome>) -> Outcome {
        let mut parts = parts.into_iter();
        let mut whole = parts.next().unwrap_or(Outcome::Done);
        for part in parts {
            if let (Outcome::Inspected(all), Outcome::Inspected(weak)) = (&mut whole, part) {
                all.extend(weak);
            }
        }
        whole
    }
}

impl Order {
    /// The same again, of an order that is for all reactors.
    pub fn again(&self) -> Option<Order> {
        Some(match self {
            Order::Share(volumes) => Order::Share(volumes.clone()),
            Order::KeepSpare(keep) => Order::KeepSpare(*keep),
            Order::Drain(devices) => Order::Drain(devices.clone()),
            Order::SetReservation { volume, reservation } => {
                Order::SetReservation { volume: *volume, reservation: *reservation }
            }
            Order::LocalNodes(nodes) => Order::LocalNodes(nodes.clone()),
            Order::Access { lists, limits } => Order::Access { lists: lists.clone(), limits: limits.clone() },
            Order::Inspect(question) => Order::Inspect(question.clone()),
            Order::TakeNoMore => Order::TakeNoMore,
            Order::CloseAll => Order::CloseAll,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{GroupMemberAt, GroupOrder};

    const A: VolumeId = VolumeId(1);
    const B: VolumeId = VolumeId(2);
    const C: VolumeId = VolumeId(3);

    fn shown(name: &str, volume: VolumeId) -> (BTreeSet<String>, Vec<Shown>) {
        let export = ExportInfo { name: name.to_string(), description: String::new(), size_bytes: 1, read_only: false };
        (BTreeSet::from([name.to_string()]), vec![(export, volume)])
    }

    #[test]
    fn volumes_are_spread_and_stay_where_they_are() {
        let mut homes = Homes::new(2, Spread::Fewest);
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
        let mut homes = Homes::new(2, Spread::Fewest);
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
        let mut homes = Homes::new(2, Spread::Fewest);
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
    fn each_reactor_offers_what_is_at_home_there_and_knows_where_that_is_at_others() {
        let address = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let offer = |number: u128, place| Offer {
            volume: VolumeId(number),
            exports: BTreeMap::from([(format!("v{number}"), (VolumeId(number), 1))]),
            place,
        };
        let mut homes = Homes::new(2, Spread::ById);
        let at_other = || Place::At("other".to_string());
        let hosts =
            [("other".to_string(), vec![address(1), address(2), address(3)]), ("old".to_string(), vec![address(9)])];
        let offered = |offers, heard_at| Offered { offers, hosts: hosts.to_vec(), heard_at };
        let offers = vec![offer(4, at_other()), offer(5, at_other()), offer(8, Place::Here)];
        let shares = homes.set_offers(offered(offers, BTreeMap::from([(VolumeId(6), "other".to_string())])));
        let old = ("old".to_string(), address(9));
        assert_eq!(
            shares[0].hosts,
            [
                ("other#1".to_string(), address(2)),
                old.clone(),
                ("other#2".to_string(), address(3)),
                ("other".to_string(), address(1))
            ]
        );
        let store_at = ("other".to_string(), address(1));
        assert_eq!(shares[1].hosts, [("other#2".to_string(), address(3)), old, store_at.clone()]);
        assert!(shares.iter().all(|share| share.heard_at == BTreeMap::from([(VolumeId(6), "other".to_string())])));
        let placed = |share: &Share| share.offers.iter().map(|of| (of.volume.0, of.place.clone())).collect::<Vec<_>>();
        assert_eq!(placed(&shares[0]), [(4, Place::At("other#1".to_string())), (8, Place::Here)]);
        assert_eq!(placed(&shares[1]), [(5, Place::At("other#2".to_string()))]);
        assert_eq!((host_of_link("other#2"), host_of_link("old")), ("other", "old"));
        // A client of what another host serves goes where it is opened if it comes here.
        assert_eq!(
            (homes.elsewhere(0, "v5"), homes.elsewhere(1, "v5@s"), homes.elsewhere(1, "v4")),
            (Some(1), None, Some(0))
        );
        assert_eq!(homes.exports_elsewhere(0).len(), 1);
        assert_eq!(homes.place(VolumeId(5), "v5"), 1);
        let mut ask = Order::AskToYield { host: "other".to_string(), volume: VolumeId(8) };
        homes.address(&mut ask);
        assert!(matches!(&ask, Order::AskToYield { host, .. } if host == "other#2"));
        assert_eq!(homes.route(&ask), Route::To(0));
        assert_eq!(homes.peer_of("gone", VolumeId(8)), "gone");
        assert_eq!(homes.elsewhere(0, ""), None, "there are three");
        homes.set_offers(offered(vec![offer(7, at_other())], BTreeMap::new()));
        homes.place(VolumeId(9), "in-care");
        assert_eq!((homes.elsewhere(0, ""), homes.elsewhere(1, "")), (Some(1), None), "the only one that is shown");
        homes.set_offers(Offered::default());
        assert_eq!(homes.elsewhere(0, "v4"), None);
    }

    #[test]
    fn orders_go_to_their_volume_or_to_all() {
        let mut homes = Homes::new(2, Spread::Fewest);
        for (volume, name, reactor) in [(A, "a", 0), (B, "b", 1)] {
            homes.place(volume, name);
            homes.publish(reactor, volume, Some(shown(name, volume)));
            homes.arrived(volume);
        }
        let member = |name: &&str| GroupMemberAt { volume: name.to_string(), reactor: FRONT };
        let mut group = Order::SnapshotGroup(GroupOrder {
            members: ["b", "a"].iter().map(member).collect(),
            name: "s".to_string(),
            created_ms: 0,
        });
        assert_eq!(homes.route(&Order::Prepare { name: "b".to_string() }), Route::To(1));
        assert_eq!(homes.route(&Order::LetGo { volume: B }), Route::To(1));
        homes.address(&mut group);
        assert_eq!(homes.route(&group), Route::To(1), "where its first member is");
        let Order::SnapshotGroup(group) = group else { unreachable!() };
        assert_eq!(group.members.iter().map(|member| member.reactor).collect::<Vec<_>>(), [1, 0]);
        assert_eq!(homes.route(&Order::KeepSpare(true)), Route::All);
        assert!(Order::KeepSpare(true).again().is_some() && Order::LetGo { volume: B }.again().is_none());
    }
}
