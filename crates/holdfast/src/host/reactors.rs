//! The reactors of a host, each with volumes and a host machine of its own: which has what, and the way to them.
//!
//! Role: a volume belongs to one reactor, with the clones in it, and so does every connection of a client to it. Clients
//! and other hosts come to the first one ([`FRONT`]); a client whose export is elsewhere is handed over before it has opened
//! it. Commands of the control plane go to the reactor of their volume, or to all, whose answers are put together. On the
//! way of a request there is no lock and no message between reactors.
//!
//! Reactors are to each other as hosts are: each goes by what records say of others' volumes. What all share is divided evenly.
//!
//! Limits: other hosts come to the first reactor alone, so a grid of several has one reactor a host.

use super::commands::{Answer, Command, LiveStatus};
use super::nbd::Arrival;
use holdfast_base::{ExportInfo, VolumeId};
use holdfast_host::{GroupOutcome, Order, Outcome, split_export, split_ticket};
use holdfast_runtime::mailbox::Sender;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Where clients and other hosts come.
pub const FRONT: usize = 0;

/// An export, and the volume or clone that it is of.
pub type Shown = (ExportInfo, VolumeId);

/// Where a volume is.
struct Home {
    reactor: usize,
    /// Orders to open it that are on their way there.
    coming: usize,
    /// It is in the reactor's table.
    is_there: bool,
    /// Of it and of clones in it.
    names: BTreeSet<String>,
    exports: Vec<Shown>,
}

pub struct Reactors {
    count: usize,
    posts: OnceLock<Vec<Sender<Command>>>,
    homes: Mutex<BTreeMap<VolumeId, Home>>,
}

/// The command is handed back to nobody: there was no room for it.
#[derive(Debug)]
pub struct Busy;

impl Reactors {
    pub fn new(count: usize) -> Reactors {
        Reactors { count, posts: OnceLock::new(), homes: Mutex::default() }
    }

    pub fn begin(&self, posts: Vec<Sender<Command>>) {
        assert_eq!(posts.len(), self.count);
        assert!(self.posts.set(posts).is_ok(), "they begin once");
    }

    pub fn count(&self) -> usize {
        self.count
    }

    fn homes(&self) -> MutexGuard<'_, BTreeMap<VolumeId, Home>> {
        self.homes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn post_to(&self, reactor: usize, command: Command) -> Result<(), Busy> {
        let posts = self.posts.get().ok_or(Busy)?;
        posts[reactor].post(command).map_err(|_| Busy)
    }

    /// All but the first are to end.
    pub fn stop_others(&self) {
        for reactor in 1..self.count {
            // One that takes nothing any more has ended.
            let _ = self.post_to(reactor, Command::Stop);
        }
    }

    // ---- where volumes are ----

    /// The reactor that a volume is opened on: where it is, or the one with the fewest.
    pub fn place(&self, volume: VolumeId, name: &str) -> usize {
        let mut homes = self.homes();
        let mut counts = vec![0_usize; self.count];
        homes.values().for_each(|home| counts[home.reactor] += 1);
        let fewest = (0..self.count).min_by_key(|reactor| counts[*reactor]).unwrap_or(FRONT);
        let home = homes.entry(volume).or_insert_with(|| Home {
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
    pub fn arrived(&self, volume: VolumeId) {
        let mut homes = self.homes();
        let Some(home) = homes.get_mut(&volume) else { return };
        home.coming = home.coming.saturating_sub(1);
        if home.coming == 0 && !home.is_there {
            homes.remove(&volume);
        }
    }

    /// A reactor has it, under these names, or has it no more.
    pub fn publish(&self, reactor: usize, volume: VolumeId, found: Option<(BTreeSet<String>, Vec<Shown>)>) {
        let mut homes = self.homes();
        let Some(home) = homes.get_mut(&volume).filter(|home| home.reactor == reactor) else { return };
        home.is_there = found.is_some();
        match found {
            Some((names, exports)) => (home.names, home.exports) = (names, exports),
            None if home.coming == 0 => drop(homes.remove(&volume)),
            None => home.exports.clear(),
        }
    }

    fn home(&self, volume: VolumeId) -> usize {
        self.homes().get(&volume).map_or(FRONT, |home| home.reactor)
    }

    /// Of a volume, a clone or a snapshot.
    fn home_of(&self, name: &str) -> usize {
        let name = split_export(split_ticket(name).0).0;
        self.homes().values().find(|home| home.names.contains(name)).map_or(FRONT, |home| home.reactor)
    }

    /// Where an export is, if another reactor has it than this one. The empty name is that of the only one there is.
    pub fn elsewhere(&self, reactor: usize, export: &str) -> Option<usize> {
        if self.count == 1 {
            return None;
        }
        let name = split_export(split_ticket(export).0).0;
        let homes = self.homes();
        let mut all = homes.values();
        let home = if name.is_empty() {
            all.next().filter(|home| home.exports.len() == 1 && homes.len() == 1)
        } else {
            all.find(|home| home.names.contains(name))
        };
        home.map(|home| home.reactor).filter(|at| *at != reactor)
    }

    /// What others have than this one.
    pub fn exports_elsewhere(&self, reactor: usize) -> Vec<Shown> {
        let homes = self.homes();
        homes.values().filter(|home| home.reactor != reactor).flat_map(|home| home.exports.clone()).collect()
    }

    /// Hands a client over; false where it can't be taken.
    pub fn hand_over(&self, reactor: usize, arrival: Box<Arrival>) -> bool {
        self.post_to(reactor, Command::Arrival(arrival)).is_ok()
    }

    // ---- commands ----

    /// Has the command carried out where it belongs.
    pub fn post(self: &Arc<Self>, command: Command) -> Result<(), Busy> {
        if self.count == 1 {
            return self.post_to(FRONT, command);
        }
        match command {
            Command::Order { order, answer } => self.post_order(order, answer),
            Command::Status { answer } => self.post_to_all(answer, merge_status, |answer| Command::Status { answer }),
            Command::Volume { name, answer } => self.post_to(self.home_of(&name), Command::Volume { name, answer }),
            Command::Anatomy { name, answer } => self.post_to(self.home_of(&name), Command::Anatomy { name, answer }),
            Command::Users { name, answer } => self.post_to(self.home_of(&name), Command::Users { name, answer }),
            Command::Uris { name, answer } => self.post_to(self.home_of(&name), Command::Uris { name, answer }),
            Command::Kin { known, answer } => {
                self.post_to_all(answer, concat, |answer| Command::Kin { known: known.clone(), answer })
            }
            Command::Weak { node, answer } => self.post_to_all(answer, concat, |answer| Command::Weak { node, answer }),
            Command::Losses { nodes, answer } => {
                self.post_to_all(answer, concat, |answer| Command::Losses { nodes: nodes.clone(), answer })
            }
            Command::LeftToDrain { answer } => {
                self.post_to_all(answer, sum_of_maps, |answer| Command::LeftToDrain { answer })
            }
            Command::Fixed { answer } => {
                let own = Arc::clone(self);
                let merge = move |parts: Vec<BTreeMap<VolumeId, _>>| {
                    let mut all = BTreeMap::new();
                    for (reactor, part) in parts.into_iter().enumerate() {
                        let counts = |volume: &VolumeId| own.home(*volume) == reactor;
                        all.extend(part.into_iter().filter(|(volume, _)| counts(volume)));
                    }
                    all
                };
                self.post_to_all(answer, merge, |answer| Command::Fixed { answer })
            }
            Command::Cut { node, cut, answer } => {
                let any = |parts: Vec<bool>| parts.contains(&true);
                self.post_to_all(answer, any, |answer| Command::Cut { node, cut, answer })
            }
            Command::Nodes { nodes, answer } => {
                self.post_to_all(answer, drop, |answer| Command::Nodes { nodes: nodes.clone(), answer })
            }
            Command::CutRevoked { answer } => self.post_to_all(answer, drop, |answer| Command::CutRevoked { answer }),
            Command::Through { volume, answer } => {
                let sum = |parts: Vec<usize>| parts.iter().sum();
                self.post_to_all(answer, sum, |answer| Command::Through { volume, answer })
            }
            command @ (Command::Claims { .. }
            | Command::Offers { .. }
            | Command::Address { .. }
            | Command::Call { .. }
            | Command::Arrival(_)
            | Command::Stop) => self.post_to(FRONT, command),
        }
    }

    fn post_order(self: &Arc<Self>, order: Box<Order>, answer: Answer<Outcome>) -> Result<(), Busy> {
        let to = match &*order {
            Order::Open { spec, .. } | Order::Warm { spec } => {
                let volume = spec.volume;
                let to = self.place(volume, &spec.name);
                return self.post_to(to, Command::Order { order, answer }).inspect_err(|_| self.arrived(volume));
            }
            Order::LetGo { volume } | Order::Dependent { origin: volume, .. } => self.home(*volume),
            Order::Close { name, .. }
            | Order::Receive { name, .. }
            | Order::Resize { name, .. }
            | Order::SetPolicy { name, .. }
            | Order::CheckReads { name, .. }
            | Order::Prepare { name }
            | Order::Change { volume: name, .. }
            | Order::Filters { volume: name, .. }
            | Order::Fork { volume: name, .. } => self.home_of(name),
            Order::SnapshotGroup { volumes, .. } => {
                let homes: BTreeSet<usize> = volumes.iter().map(|name| self.home_of(name)).collect();
                if homes.len() > 1 {
                    answer.tell(Outcome::Grouped(GroupOutcome::Apart));
                    return Ok(());
                }
                homes.into_iter().next().unwrap_or(FRONT)
            }
            Order::Offer { .. } | Order::AskToYield { .. } => FRONT,
            Order::Share(_)
            | Order::KeepSpare(_)
            | Order::Drain(_)
            | Order::SetFixed { .. }
            | Order::Near(_)
            | Order::Access { .. }
            | Order::TakeNoMore
            | Order::CloseAll => {
                let first = |parts: Vec<Outcome>| parts.into_iter().next().unwrap_or(Outcome::Done);
                return self.post_to_all(answer, first, |answer| {
                    let order = Box::new(copy_of(&order).expect("those above can be told several"));
                    Command::Order { order, answer }
                });
            }
        };
        self.post_to(to, Command::Order { order, answer })
    }

    fn post_to_all<T: Send + 'static>(
        &self,
        answer: Answer<T>,
        merge: impl FnOnce(Vec<T>) -> T + Send + 'static,
        command: impl Fn(Answer<T>) -> Command,
    ) -> Result<(), Busy> {
        let parts = (0..self.count).map(|_| None).collect();
        let gathered = Arc::new(Mutex::new(Gathered { parts, merge: Some(Box::new(merge)), whole: answer }));
        (0..self.count).try_for_each(|reactor| {
            let part: Box<dyn Fn(T) + Send> = {
                let gathered = Arc::clone(&gathered);
                Box::new(move |value| gather(&gathered, reactor, value))
            };
            self.post_to(reactor, command(Answer::Part(part)))
        })
    }
}

/// Answers of all reactors to one command, until all have come.
struct Gathered<T> {
    parts: Vec<Option<T>>,
    merge: Option<Merge<T>>,
    whole: Answer<T>,
}

type Merge<T> = Box<dyn FnOnce(Vec<T>) -> T + Send>;

fn gather<T>(gathered: &Mutex<Gathered<T>>, reactor: usize, value: T) {
    let mut gathered = gathered.lock().unwrap_or_else(PoisonError::into_inner);
    gathered.parts[reactor] = Some(value);
    if gathered.parts.iter().all(Option::is_some)
        && let Some(merge) = gathered.merge.take()
    {
        let parts = std::mem::take(&mut gathered.parts).into_iter().flatten().collect();
        gathered.whole.tell(merge(parts));
    }
}

impl<T> From<SyncSender<T>> for Answer<T> {
    fn from(sender: SyncSender<T>) -> Answer<T> {
        Answer::Whole(sender)
    }
}

/// Of orders that are for all reactors.
fn copy_of(order: &Order) -> Option<Order> {
    Some(match order {
        Order::Share(volumes) => Order::Share(volumes.clone()),
        Order::KeepSpare(keep) => Order::KeepSpare(*keep),
        Order::Drain(devices) => Order::Drain(devices.clone()),
        Order::SetFixed { volume, fixed } => Order::SetFixed { volume: *volume, fixed: fixed.clone() },
        Order::Near(nodes) => Order::Near(nodes.clone()),
        Order::Access { lists, limits } => Order::Access { lists: lists.clone(), limits: limits.clone() },
        Order::TakeNoMore => Order::TakeNoMore,
        Order::CloseAll => Order::CloseAll,
        _ => return None,
    })
}

fn concat<T>(parts: Vec<Vec<T>>) -> Vec<T> {
    parts.into_iter().flatten().collect()
}

fn sum_of_maps<K: Ord>(parts: Vec<BTreeMap<K, u64>>) -> BTreeMap<K, u64> {
    let mut all = BTreeMap::new();
    for (key, count) in parts.into_iter().flatten() {
        *all.entry(key).or_default() += count;
    }
    all
}

/// Links are told of as the first reactor has them; what volumes know of nodes and devices, from all.
fn merge_status(parts: Vec<LiveStatus>) -> LiveStatus {
    let mut parts = parts.into_iter();
    let mut all = parts.next().expect("there is a first reactor");
    for part in parts {
        all.volumes.extend(part.volumes);
        for (node, other) in all.nodes.iter_mut().zip(part.nodes).filter(|(node, other)| node.id == other.id) {
            node.suspect |= other.suspect;
            for (device, other) in node.devices.iter_mut().zip(other.devices).filter(|(d, o)| d.device == o.device) {
                device.left = device.left.zip(other.left).map(|(one, more)| one + more).or(device.left);
                device.slow_s = device.slow_s.max(other.slow_s);
                device.bypassed |= other.bypassed;
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::sync_channel;

    const A: VolumeId = VolumeId(1);
    const B: VolumeId = VolumeId(2);
    const C: VolumeId = VolumeId(3);

    fn shown(name: &str, volume: VolumeId) -> (BTreeSet<String>, Vec<Shown>) {
        let export = ExportInfo { name: name.to_string(), description: String::new(), size_bytes: 1, read_only: false };
        (BTreeSet::from([name.to_string()]), vec![(export, volume)])
    }

    #[test]
    fn volumes_are_spread_and_stay_where_they_are() {
        let reactors = Reactors::new(2);
        assert_eq!((reactors.place(A, "a"), reactors.place(B, "b")), (0, 1));
        assert_eq!(reactors.place(B, "b"), 1, "where it is");
        assert_eq!(reactors.place(C, "c"), 0);
        // One that could not be asked is nowhere; one that was asked twice is there until both have come.
        reactors.arrived(C);
        reactors.arrived(B);
        reactors.publish(1, B, Some(shown("b", B)));
        reactors.arrived(B);
        assert_eq!((reactors.home(C), reactors.home(B)), (FRONT, 1));
        assert_eq!(reactors.home_of("b@monday"), 1);
        reactors.publish(0, B, None);
        assert_eq!(reactors.home(B), 1, "another reactor does not know");
        reactors.publish(1, B, None);
        assert_eq!(reactors.home(B), FRONT);
    }

    #[test]
    fn a_volume_that_is_let_go_while_it_is_asked_for_anew_stays_where_it_comes() {
        let reactors = Reactors::new(2);
        reactors.place(A, "a");
        assert_eq!(reactors.place(B, "b"), 1);
        reactors.arrived(B);
        assert_eq!(reactors.place(B, "b"), 0, "it never came");
        let reactors = Reactors::new(2);
        reactors.place(A, "a");
        reactors.place(B, "b");
        reactors.publish(1, B, Some(shown("b", B)));
        reactors.arrived(B);
        assert_eq!(reactors.place(B, "b"), 1);
        reactors.publish(1, B, None);
        assert_eq!(reactors.home(B), 1);
        reactors.publish(1, B, Some(shown("b", B)));
        reactors.arrived(B);
        assert_eq!(reactors.home(B), 1);
    }

    #[test]
    fn an_export_of_another_reactor_is_found_there() {
        let reactors = Reactors::new(2);
        reactors.place(A, "a");
        reactors.place(B, "b");
        reactors.publish(0, A, Some(shown("a", A)));
        reactors.publish(1, B, Some(shown("b", B)));
        assert_eq!((reactors.elsewhere(0, "b@s"), reactors.elsewhere(1, "b")), (Some(1), None));
        assert_eq!((reactors.elsewhere(0, "a"), reactors.elsewhere(0, "no")), (None, None));
        assert_eq!(reactors.elsewhere(0, ""), None, "there are two");
        assert_eq!(reactors.exports_elsewhere(0).len(), 1);
        reactors.publish(0, A, None);
        reactors.arrived(A);
        assert_eq!(reactors.elsewhere(0, ""), Some(1), "the only one");
    }

    #[test]
    fn answers_are_put_together_when_all_have_come() {
        let (sender, receiver) = sync_channel(1);
        let merge: Merge<Vec<u32>> = Box::new(concat);
        let gathered =
            Mutex::new(Gathered { parts: vec![None, None], merge: Some(merge), whole: Answer::Whole(sender) });
        gather(&gathered, 1, vec![2]);
        assert!(receiver.try_recv().is_err());
        gather(&gathered, 0, vec![1]);
        assert_eq!(receiver.try_recv(), Ok(vec![1, 2]));
    }
}
