//! The reactors of a host, each with volumes and a host machine of its own: which has what, and the way to them.
//!
//! Role: a volume belongs to one reactor, with the clones in it, and so does every connection of a client to it. Clients
//! and other hosts come to the first one ([`FRONT`]); a client whose export is elsewhere is handed over before it has opened
//! it. Commands of the control plane go to the reactor of their volume, or to all, whose answers are put together. On the
//! way of a request there is no lock and no message between reactors.
//!
//! Reactors are to each other as hosts are: each goes by what records say of others' volumes. What all share is divided evenly.
//!
//! Other hosts come to the reactor that is a volume's home: each listens for them on a port of its own.

use super::commands::{Answer, Command, LiveStatus};
use super::nbd::Arrival;
use holdfast_base::VolumeId;
pub use holdfast_host::homes::FRONT;
use holdfast_host::homes::{Homes, Offered, Route, Shown, Spread};
use holdfast_host::{Host, Order, Outcome, Sibling, Totals};
use holdfast_runtime::mailbox::{Full, Sender};
use holdfast_runtime::reactor::ListenError;
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// A reactor that has taken nothing for so many pauses stands still.
const ROOM_TRIES: u32 = 1000;
const ROOM_PAUSE: Duration = Duration::from_millis(1);

pub struct Reactors {
    count: usize,
    posts: OnceLock<Vec<Sender<Command>>>,
    homes: Mutex<Homes>,
    /// Held while all are told something: it comes in the same order to each.
    posting: Mutex<()>,
    crossings: AtomicU64,
    /// Those but the first that have ended.
    ended: AtomicUsize,
}

/// One of the reactors, and the others as it sees them.
pub struct Own {
    number: usize,
    all: Arc<Reactors>,
    /// What others had no room for, and is told once they have.
    untold: VecDeque<(usize, Sibling)>,
    has_ended: bool,
}

impl Own {
    pub fn new(number: usize, all: &Arc<Reactors>) -> Own {
        Own { number, all: Arc::clone(all), untold: VecDeque::new(), has_ended: false }
    }

    /// What one does for all is done by it.
    pub fn is_front(&self) -> bool {
        self.number == FRONT
    }

    /// Where an export is, if another reactor has it.
    pub fn elsewhere(&self, export: &str) -> Option<usize> {
        if self.all.count == 1 { None } else { self.all.homes().elsewhere(self.number, export) }
    }

    /// What other reactors have, or offer together with other hosts.
    pub fn exports_elsewhere(&self) -> Vec<Shown> {
        if self.all.count == 1 { Vec::new() } else { self.all.homes().exports_elsewhere(self.number) }
    }

    /// Hands a client over; false where it can't be taken.
    pub fn hand_over(&self, reactor: usize, arrival: Box<Arrival>) -> bool {
        self.all.post_to(reactor, Command::Arrival(arrival)).is_ok()
    }

    /// Says something to another reactor's host machine, after what it was told before.
    pub fn tell(&mut self, reactor: usize, message: Sibling) {
        self.untold.push_back((reactor, message));
        self.tell_rest();
    }

    /// Tells what others had no room for.
    pub fn tell_rest(&mut self) {
        while let Some((reactor, message)) = self.untold.pop_front() {
            self.all.crossings.fetch_add(1, Ordering::Relaxed);
            let posts = self.all.posts.get().expect("whoever says something has begun");
            let command = Command::Sibling { from: self.number, message };
            if let Err(Full(Command::Sibling { message, .. })) = posts[reactor].post(command) {
                return self.untold.push_front((reactor, message));
            }
        }
    }

    /// Tells the others which names a volume has here.
    pub fn publish(&self, volume: VolumeId, host: &Host) {
        if self.all.count > 1 {
            self.all.homes().publish(self.number, volume, host.shown(volume));
        }
    }

    /// An order to open it has come.
    pub fn arrived(&self, volume: VolumeId) {
        if self.all.count > 1 {
            self.all.homes().arrived(volume);
        }
    }

    /// It has closed its volumes, and ends; the first is woken by it.
    pub fn end(&mut self) {
        if !self.is_front() && !std::mem::replace(&mut self.has_ended, true) {
            self.all.ended.fetch_add(1, Ordering::SeqCst);
            let _ = self.all.post_to(FRONT, Command::Ended);
        }
    }

    /// The first ends last: clients and other hosts come to it.
    pub fn may_end(&self) -> bool {
        !self.is_front() || self.all.ended.load(Ordering::SeqCst) + 1 == self.all.count
    }

    /// The first has all others end with it.
    pub fn stop_others(&self) {
        if self.is_front() {
            self.all.stop_others();
        }
    }
}

/// The command is handed back to nobody: there was no room for it.
#[derive(Debug)]
pub struct Busy;

impl Reactors {
    pub fn new(count: usize, spread: Spread) -> Reactors {
        Reactors {
            count,
            posts: OnceLock::new(),
            homes: Mutex::new(Homes::new(count, spread)),
            posting: Mutex::new(()),
            crossings: AtomicU64::new(0),
            ended: AtomicUsize::new(0),
        }
    }

    pub fn begin(&self, posts: Vec<Sender<Command>>) {
        assert_eq!(posts.len(), self.count);
        assert!(self.posts.set(posts).is_ok(), "they begin once");
    }

    pub fn count(&self) -> usize {
        self.count
    }

    /// Messages between reactors and looks at [`Homes`], so far.
    pub fn crossings(&self) -> u64 {
        self.crossings.load(Ordering::Relaxed)
    }

    pub(super) fn homes(&self) -> MutexGuard<'_, Homes> {
        self.crossings.fetch_add(1, Ordering::Relaxed);
        self.homes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn post_to(&self, reactor: usize, command: Command) -> Result<(), Busy> {
        self.crossings.fetch_add(1, Ordering::Relaxed);
        let posts = self.posts.get().ok_or(Busy)?;
        posts[reactor].post(command).map_err(|_| Busy)
    }

    /// All but the first are to end. One that has much to do takes it a little later.
    fn stop_others(&self) {
        for reactor in 1..self.count {
            // One that stands still ends with the process.
            let _ = self.post_in_time(reactor, Command::Stop);
        }
    }

    /// Waits for room. One that has none for long stands still.
    fn post_in_time(&self, reactor: usize, mut command: Command) -> Result<(), Busy> {
        let posts = self.posts.get().ok_or(Busy)?;
        for _ in 0..ROOM_TRIES {
            self.crossings.fetch_add(1, Ordering::Relaxed);
            match posts[reactor].post(command) {
                Ok(()) => return Ok(()),
                Err(Full(back)) => command = back,
            }
            std::thread::sleep(ROOM_PAUSE);
        }
        Err(Busy)
    }

    // ---- commands ----

    /// Has the command carried out where it belongs.
    pub fn post(self: &Arc<Self>, command: Command) -> Result<(), Busy> {
        match command {
            Command::Order { mut order, answer } => {
                self.homes().address(&mut order);
                self.post_order(order, answer)
            }
            command if self.count == 1 => self.post_to(FRONT, command),
            Command::Status { answer } => self.post_to_all(answer, merge_status, |answer| Command::Status { answer }),
            Command::Volume { name, answer } => {
                self.post_to(self.homes().of_name(&name), Command::Volume { name, answer })
            }
            Command::Loads { answer } => self.post_to_all(answer, concat, |answer| Command::Loads { answer }),
            Command::Totals { answer } => self.post_to_all(answer, sum_of_totals, |answer| Command::Totals { answer }),
            Command::Slow { name, answer } => self.post_to(self.homes().of_name(&name), Command::Slow { name, answer }),
            Command::Anatomy { name, answer } => {
                self.post_to(self.homes().of_name(&name), Command::Anatomy { name, answer })
            }
            Command::Users { name, answer } => {
                self.post_to(self.homes().of_name(&name), Command::Users { name, answer })
            }
            Command::Uris { name, answer } => self.post_to(self.homes().of_name(&name), Command::Uris { name, answer }),
            Command::Sharing { known, answer } => {
                self.post_to_all(answer, concat, |answer| Command::Sharing { known: known.clone(), answer })
            }
            Command::LeftToDrain { answer } => {
                self.post_to_all(answer, sum_of_maps, |answer| Command::LeftToDrain { answer })
            }
            Command::Reservations { answer } => {
                let own = Arc::clone(self);
                let merge = move |parts: Vec<BTreeMap<VolumeId, _>>| {
                    let mut all = BTreeMap::new();
                    for (reactor, part) in parts.into_iter().enumerate() {
                        let counts = |volume: &VolumeId| own.homes().of(*volume) == reactor;
                        all.extend(part.into_iter().filter(|(volume, _)| counts(volume)));
                    }
                    all
                };
                self.post_to_all(answer, merge, |answer| Command::Reservations { answer })
            }
            Command::Claims { beside, answer } => {
                self.post_to_all(answer, concat, |answer| Command::Claims { beside, answer })
            }
            Command::Cut { node, cut, answer } => {
                let any = |parts: Vec<bool>| parts.contains(&true);
                self.post_to_all(answer, any, |answer| Command::Cut { node, cut, answer })
            }
            Command::Nodes { nodes, answer } => {
                self.post_to_all(answer, drop, |answer| Command::Nodes { nodes: nodes.clone(), answer })
            }
            Command::Address { ip, answer } => {
                let all = |parts: Vec<Result<Vec<SocketAddr>, ListenError>>| {
                    parts.into_iter().collect::<Result<Vec<_>, _>>().map(concat)
                };
                self.post_to_all(answer, all, |answer| Command::Address { ip, answer })
            }
            Command::CutRevoked { answer } => self.post_to_all(answer, drop, |answer| Command::CutRevoked { answer }),
            Command::Through { volume, answer } => {
                let sum = |parts: Vec<usize>| parts.iter().sum();
                self.post_to_all(answer, sum, |answer| Command::Through { volume, answer })
            }
            command @ (Command::Offers { .. }
            | Command::Call { .. }
            | Command::Arrival(_)
            | Command::Sibling { .. }
            | Command::Ended
            | Command::Stop) => self.post_to(FRONT, command),
        }
    }

    /// Tells all reactors what this host offers together with others.
    pub fn offer(self: &Arc<Self>, offered: Offered, answer: Answer<()>) -> Result<(), Busy> {
        let mut shares = self.homes().set_offers(offered).into_iter();
        self.post_to_all(answer, drop, |answer| {
            let share = shares.next().expect("there is a share for each reactor");
            Command::Offers { share, answer }
        })
    }

    fn post_order(&self, order: Box<Order>, answer: Answer<Outcome>) -> Result<(), Busy> {
        if self.count == 1 {
            return self.post_to(FRONT, Command::Order { order, answer });
        }
        // In a line of its own: what is posted must not find it locked.
        let route = self.homes().route(&order);
        match route {
            Route::To(reactor) => self.post_to(reactor, Command::Order { order, answer }),
            Route::Opens(volume, reactor) => {
                let posted = self.post_to(reactor, Command::Order { order, answer });
                posted.inspect_err(|_| self.homes().arrived(volume))
            }
            Route::All => self.post_to_all(answer, Outcome::of_all, |answer| {
                let order = Box::new(order.again().expect("what is for all can be told several times"));
                Command::Order { order, answer }
            }),
        }
    }

    /// Has all of them carry it out, or none where the first has no room: the others are waited for.
    fn post_to_all<T: Send + 'static>(
        &self,
        answer: Answer<T>,
        merge: impl FnOnce(Vec<T>) -> T + Send + 'static,
        mut command: impl FnMut(Answer<T>) -> Command,
    ) -> Result<(), Busy> {
        let parts = (0..self.count).map(|_| None).collect();
        let gathered = Arc::new(Mutex::new(Gathered { parts, merge: Some(Box::new(merge)), whole: answer }));
        let _one_at_a_time = self.posting.lock().unwrap_or_else(PoisonError::into_inner);
        let mut post = |reactor: usize| {
            let part: Box<dyn Fn(T) + Send> = {
                let gathered = Arc::clone(&gathered);
                Box::new(move |value| gather(&gathered, reactor, value))
            };
            let command = command(Answer::Part(part));
            if reactor == FRONT { self.post_to(FRONT, command) } else { self.post_in_time(reactor, command) }
        };
        post(FRONT)?;
        // Where one has no room the others are told all the same.
        let others = (FRONT + 1..self.count).map(post);
        others.fold(Ok(()), Result::and)
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

fn sum_of_totals(parts: Vec<Box<Totals>>) -> Box<Totals> {
    let mut all = Box::<Totals>::default();
    parts.iter().for_each(|part| all.add(part));
    all
}

/// Links are told of as the first reactor has them; what volumes know of nodes and devices, from all.
fn merge_status(parts: Vec<LiveStatus>) -> LiveStatus {
    let mut parts = parts.into_iter();
    let mut all = parts.next().expect("there is a first reactor");
    for part in parts {
        all.volumes.extend(part.volumes);
        all.packing_cpu += part.packing_cpu;
        all.packing = all.packing.and(part.packing);
        let turns = [all.longest_turn.take(), part.longest_turn].into_iter().flatten();
        all.longest_turn = turns.max_by_key(|turn| turn.took_us);
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
    use holdfast_runtime::mailbox::mailbox;
    use holdfast_runtime::reactor::{Config, Reactor};
    use std::sync::mpsc::sync_channel;

    #[test]
    fn a_command_for_all_waits_for_a_reactor_that_has_no_room_just_now() {
        let reactor = Reactor::new(Config::default()).expect("a reactor");
        let (posts, taken): (Vec<_>, Vec<_>) = (0..2).map(|_| mailbox(reactor.waker(), 1)).unzip();
        let reactors = Arc::new(Reactors::new(2, Spread::Fewest));
        reactors.begin(posts);
        reactors.post_to(1, Command::Ended).expect("it is empty");
        let (sender, _receiver) = sync_channel(1);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(20 * ROOM_PAUSE);
                assert!(matches!(taken[1].drain().pop_front(), Some(Command::Ended)));
            });
            reactors.post(Command::CutRevoked { answer: Answer::Whole(sender) }).expect("there is room in time");
        });
        for receiver in &taken {
            assert!(matches!(receiver.drain().pop_front(), Some(Command::CutRevoked { .. })), "each has it");
        }
        // Where the first has none nobody is told.
        reactors.post_to(FRONT, Command::Ended).expect("it is empty");
        let (sender, _receiver) = sync_channel(1);
        assert!(reactors.post(Command::CutRevoked { answer: Answer::Whole(sender) }).is_err());
        assert!(taken[1].drain().is_empty());
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
