//! Places of connections: who gets one where all are taken, and from whom.
//!
//! Role: a table without I/O. A connection holds a [`Seat`] and leaves when that says so.
//!
//! Invariants
//! 1. Who has not shown who they are keeps nobody out: the next one gets such a connection's place, of the address that has
//!    the most of these the one that is there longest.
//! 2. Where all are known, the caller that has the most gives one on which no request is under way.
//! 3. No request of somebody known that is worked at is cut off for the sake of another.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// Between looks for a place while every connection has a request under way.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// Who holds a connection.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Holder {
    /// Nobody known: from this address, of IPv6 from this network.
    Stranger(IpAddr),
    Known(Arc<str>),
}

impl Holder {
    /// One machine has as many addresses of its network as it likes.
    pub fn stranger(from: IpAddr) -> Holder {
        Holder::Stranger(match from.to_canonical() {
            IpAddr::V6(ip) => IpAddr::V6((u128::from(ip) >> 64 << 64).into()),
            ip => ip,
        })
    }
}

#[derive(Debug)]
struct Taken {
    holder: Holder,
    under_way: usize,
    /// Rises with each connection that comes, and each request that ends.
    rests_since: u64,
    is_leaving: bool,
    leave: Arc<Notify>,
}

#[derive(Debug, Default)]
struct Table {
    taken: BTreeMap<u64, Taken>,
    moment: u64,
}

impl Table {
    fn next(&mut self) -> u64 {
        self.moment += 1;
        self.moment
    }

    /// Has one connection leave, if there is one that may.
    fn clear_one(&mut self) {
        let may_leave = |taken: &Taken| match taken.holder {
            Holder::Stranger(_) => true,
            Holder::Known(_) => taken.under_way == 0,
        };
        let mut count: BTreeMap<&Holder, usize> = BTreeMap::new();
        self.taken.values().for_each(|taken| *count.entry(&taken.holder).or_default() += 1);
        let staying = self.taken.iter().filter(|(_, taken)| !taken.is_leaving && may_leave(taken));
        let rank = |(_, taken): &(&u64, &Taken)| {
            let is_stranger = matches!(taken.holder, Holder::Stranger(_));
            (is_stranger, count[&taken.holder], std::cmp::Reverse(taken.rests_since))
        };
        let Some(number) = staying.max_by_key(rank).map(|(number, _)| *number) else { return };
        let taken = self.taken.get_mut(&number).expect("it was just found");
        taken.is_leaving = true;
        taken.leave.notify_one();
    }
}

type Shared = Arc<Mutex<Table>>;

/// Nothing is left half-done in it by a panic.
fn lock(table: &Shared) -> MutexGuard<'_, Table> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

/// All places of a socket.
pub struct Seats {
    free: Arc<Semaphore>,
    table: Shared,
}

impl Seats {
    pub fn new(max: usize) -> Seats {
        Seats { free: Arc::new(Semaphore::new(max)), table: Shared::default() }
    }

    /// A place for the next connection, once there is one.
    pub async fn take(&self, holder: Holder) -> Seat {
        let place = loop {
            if let Ok(place) = Arc::clone(&self.free).try_acquire_owned() {
                break place;
            }
            lock(&self.table).clear_one();
            let place = tokio::time::timeout(LOOK_AGAIN, Arc::clone(&self.free).acquire_owned()).await;
            if let Ok(place) = place {
                break place.expect("it is never closed");
            }
        };
        let leave = Arc::new(Notify::new());
        let mut table = lock(&self.table);
        let number = table.next();
        let taken = Taken { holder, under_way: 0, rests_since: number, is_leaving: false, leave: Arc::clone(&leave) };
        table.taken.insert(number, taken);
        drop(table);
        Seat { table: Arc::clone(&self.table), number, leave, _place: place }
    }
}

/// One connection's place, until it is dropped.
#[derive(Debug)]
pub struct Seat {
    table: Shared,
    number: u64,
    leave: Arc<Notify>,
    _place: OwnedSemaphorePermit,
}

impl Seat {
    /// With the moment that it is.
    fn change(&self, change: impl FnOnce(&mut Taken, u64)) {
        let mut table = lock(&self.table);
        let moment = table.next();
        change(table.taken.get_mut(&self.number).expect("it is there as long as this is"), moment);
    }

    /// Somebody has shown who they are.
    pub fn is_known(&self, who: &Arc<str>) {
        self.change(|taken, _| taken.holder = Holder::Known(Arc::clone(who)));
    }

    /// A request came.
    pub fn begins(&self) {
        self.change(|taken, _| taken.under_way += 1);
    }

    /// One is answered.
    pub fn rests(&self) {
        self.change(|taken, moment| (taken.under_way, taken.rests_since) = (taken.under_way - 1, moment));
    }

    /// Ends when the place is another's.
    pub async fn left(&self) {
        self.leave.notified().await;
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        lock(&self.table).taken.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    fn from(machine: u8) -> Holder {
        Holder::stranger(IpAddr::V4(Ipv4Addr::new(10, 0, 0, machine)))
    }

    fn known(name: &str) -> Holder {
        Holder::Known(name.into())
    }

    fn run(test: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(test);
    }

    /// Which of these are told to leave, when one more comes.
    async fn leaves(seats: &Seats, all: &[Seat]) -> Vec<usize> {
        let asked = tokio::time::timeout(Duration::ZERO, seats.take(from(99))).await;
        assert!(asked.is_err(), "all places are taken");
        let table = lock(&seats.table);
        let is_leaving = |seat: &Seat| table.taken[&seat.number].is_leaving;
        all.iter().enumerate().filter(|(_, seat)| is_leaving(seat)).map(|(at, _)| at).collect()
    }

    async fn seated(seats: &Seats, holders: impl IntoIterator<Item = Holder>) -> Vec<Seat> {
        let mut all = Vec::new();
        for holder in holders {
            all.push(seats.take(holder).await);
        }
        all
    }

    #[test]
    fn strangers_go_first_and_of_the_address_that_has_the_most() {
        run(async {
            let seats = Seats::new(6);
            let holders = [from(1), known("ann"), from(2), from(2), known("ann"), known("ann")];
            let mut all = seated(&seats, holders).await;
            assert_eq!(leaves(&seats, &all).await, [2], "the older one of machine 2");
            assert_eq!(leaves(&seats, &all).await, [2, 3], "machine 2 has two still, while the first is leaving");
            assert_eq!(leaves(&seats, &all).await, [0, 2, 3]);
            assert_eq!(leaves(&seats, &all).await, [0, 1, 2, 3], "then one of a caller that rests");
            all.remove(2);
            seats.take(from(1)).await;
        });
    }

    #[test]
    fn of_those_who_are_known_the_one_with_the_most_gives_what_rests() {
        run(async {
            let seats = Seats::new(5);
            let all = seated(&seats, [known("ann"), known("bob"), known("bob"), known("bob"), from(1)]).await;
            all[4].is_known(&"carl".into());
            all[1].begins();
            // It has answered one meanwhile, so the third rests longest.
            all[2].begins();
            all[2].rests();
            assert_eq!(leaves(&seats, &all).await, [3]);
            assert_eq!(leaves(&seats, &all).await, [2, 3]);
            assert_eq!(leaves(&seats, &all).await, [0, 2, 3], "what is under way at the second goes on");
        });
    }

    #[test]
    fn who_is_told_to_leave_hears_it_and_its_place_is_the_next_ones() {
        run(async {
            let seats = Seats::new(1);
            let first = seats.take(from(1)).await;
            let goes = async move {
                first.left().await;
                drop(first);
            };
            let (second, ()) = futures_util::future::join(seats.take(known("ann")), goes).await;
            assert_eq!(lock(&seats.table).taken.len(), 1);
            drop(second);
            assert!(lock(&seats.table).taken.is_empty());
        });
    }

    #[test]
    fn one_machine_is_one_stranger() {
        let of = |text: &str| Holder::stranger(text.parse().unwrap());
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:2"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:10.0.0.1"), from(1));
    }
}
