//! Who decides which host serves the volume, where no control plane does: it hands the volume over and has it taken over, now and
//! then without need, and tells each host of it in that host's own time.

use super::{ASSIGNMENT_PACE, MultiHost, OTHER, SIZE_BYTES, WAKE, name_of};
use holdfast_base::{Instant, VolumeId};
use holdfast_host::{FilterChange, Offer, Order, Place};
use holdfast_volume::{PreloadState, State};
use std::collections::BTreeMap;
use std::time::Duration;

/// The volume that it decides about.
pub(super) const VOLUME: VolumeId = VolumeId(0x9047a1);
/// The name under which clients find it.
pub(super) const NAME: &str = "vm";

/// Pace of asking how far reading beforehand is.
const PRELOAD_PACE: Duration = Duration::from_millis(20);

/// Tickets of orders whose outcome it goes by.
pub(super) const PREPARE: u64 = 1;
pub(super) const PRELOAD: u64 = 2;
pub(super) const YIELD: u64 = 3;

/// A hand-over that is under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum HandOver {
    Preparing { to: usize },
    Preloading { to: usize },
    Yielding { to: usize },
}

/// What it has decided, and is about to.
#[derive(Debug, Default)]
pub(super) struct Operator {
    /// Who shall serve.
    pub(super) owner: usize,
    /// What each host will be told of that, and when.
    news: Vec<(Instant, usize, usize)>,
    hand_over: Option<(HandOver, Instant)>,
    /// When the host that has it is asked.
    yield_at: Option<Instant>,
    /// When the host that follows is asked how far it is with reading beforehand.
    preload_at: Option<Instant>,
    take_over_at: Option<Instant>,
    assigned_at: Instant,
}

impl MultiHost {
    pub(super) fn begin_operating(&mut self) {
        let now = self.now();
        self.operator.news.extend((0..self.shells.len()).map(|host| (now, host, 0)));
    }

    /// A host has crashed: it is back in a while, and another one may be told to serve.
    pub(super) fn on_crashed(&mut self, host: usize) {
        let back = self.now() + Duration::from_millis(self.prng.between(50, 3_000));
        self.operator.news.push((back, host, usize::MAX));
        self.world.wake_at(back, WAKE);
        if self.operator.owner == host {
            self.operator.take_over_at = Some(self.now() + Duration::from_millis(self.prng.between(100, 6_000)));
        }
    }

    pub(super) fn hand_over_now_and_then(&mut self, host: usize) {
        let owner = self.operator.owner;
        if self.prng.chance(self.plan.hand_over)
            && self.operator.hand_over.is_none()
            && self.is_running(host)
            && host != owner
            && self.is_running(owner)
            && self.state(owner).is_some()
        {
            self.operator.hand_over = Some((HandOver::Preparing { to: host }, self.now() + Duration::from_secs(16)));
            self.order(owner, PREPARE, Order::Prepare { name: NAME.to_string() });
        }
    }

    pub(super) fn operate(&mut self) {
        let now = self.now();
        if self.operator.assigned_at <= now {
            // Hosts compare what they do with what the records say.
            self.operator.assigned_at = now + ASSIGNMENT_PACE;
            self.world.wake_at(now + ASSIGNMENT_PACE, WAKE);
            let owner = self.operator.owner;
            self.operator.news.extend((0..self.shells.len()).map(|host| (now, host, owner)));
        }
        self.on_news();
        self.drive_hand_over();
        let is_gone = self.state(self.operator.owner).is_none() && self.operator.take_over_at.is_none();
        if is_gone && self.operator.hand_over.is_none() && self.operator.news.is_empty() {
            self.operator.take_over_at = Some(now + Duration::from_millis(20));
            self.world.wake_at(now + Duration::from_millis(20), WAKE);
        }
        if self.operator.take_over_at.is_some_and(|at| at <= now) {
            let up: Vec<usize> = (0..self.shells.len()).filter(|h| self.is_running(*h)).collect();
            if !up.is_empty() {
                let owner = up[self.prng.below(up.len() as u64) as usize];
                self.decide(owner);
            }
        }
    }

    /// The host is to serve the volume; harmless where it does.
    pub(super) fn open(&mut self, host: usize) {
        let was = self.state(host).filter(|_| !self.is_preloading(host));
        self.order(host, OTHER, Order::Open { spec: self.spec(), exported: true });
        if matches!(was, None | Some(State::Deposed | State::Closed)) {
            self.outcome.openings += 1;
            self.trace(&[43, host as u64], || format!("h{host} opens the volume"));
        }
        // An opening has its filters before the first request.
        let has_any = self.host(host).and_then(|h| h.find(NAME)).is_some_and(|(v, head)| v.stack(head).is_some());
        if !has_any && was != Some(State::Open) {
            for spec in self.plan.filters.clone() {
                let filter = holdfast_filter::build(&spec).unwrap_or_else(|error| panic!("{spec}: {error}"));
                let change = FilterChange::Add(filter);
                self.order(host, OTHER, Order::Filters { volume: NAME.to_string(), change });
            }
        }
    }

    /// The host hears who is to serve.
    pub(super) fn offer(&mut self, host: usize, owner: usize) {
        let place = if host == owner { Place::Here } else { Place::At(name_of(owner)) };
        let exports = BTreeMap::from([(NAME.to_string(), (VOLUME, SIZE_BYTES))]);
        let offers = vec![Offer { volume: VOLUME, exports, place }];
        let hosts = (0..self.shells.len()).filter(|n| *n != host).map(|n| (name_of(n), n)).collect();
        self.order(host, OTHER, Order::Offer { offers, hosts, heard_at: BTreeMap::new() });
    }

    /// From here on another host shall serve; each hears of it in its own time.
    pub(super) fn decide(&mut self, owner: usize) {
        self.operator.owner = owner;
        self.operator.take_over_at = None;
        self.trace(&[44, owner as u64], || format!("h{owner} shall serve"));
        for host in 0..self.shells.len() {
            let at = self.now() + Duration::from_micros(if host == owner { 10 } else { 100 + self.prng.below(20_000) });
            self.operator.news.push((at, host, owner));
            self.world.wake_at(at, WAKE);
        }
    }

    pub(super) fn on_news(&mut self) {
        let now = self.now();
        let (due, rest): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.operator.news).into_iter().partition(|(at, ..)| *at <= now);
        self.operator.news = rest;
        for (_, host, owner) in due {
            if owner == usize::MAX {
                // It is back, and reads who serves.
                self.begin_process(host);
                self.operator.news.push((now + Duration::from_millis(1), host, self.operator.owner));
                self.world.wake_at(now + Duration::from_millis(1), WAKE);
            } else if !self.is_running(host) {
                if self.shells[host].up {
                    self.operator.news.push((now + Duration::from_millis(5), host, owner));
                    self.world.wake_at(now + Duration::from_millis(5), WAKE);
                }
            } else if owner != self.operator.owner {
                // Overtaken by newer news.
            } else {
                self.offer(host, owner);
                if owner == host {
                    self.open(host);
                }
            }
        }
    }

    /// The owner's log is short: who follows asks it to yield.
    pub(super) fn on_prepared(&mut self) {
        let Some((HandOver::Preparing { to }, _)) = self.operator.hand_over else { return };
        if !self.is_running(to) {
            self.operator.hand_over = None;
            return;
        }
        // Now and then it comes late: what was read by then is older than what it finds.
        match self.prng.below(3) {
            0 => self.ask_to_yield(to, Duration::ZERO),
            1 => {
                self.order(to, OTHER, Order::Preload { spec: self.spec() });
                let late = self.lateness();
                self.ask_to_yield(to, late);
            }
            _ => {
                self.operator.hand_over = Some((HandOver::Preloading { to }, self.now() + Duration::from_secs(2)));
                self.operator.preload_at = Some(self.now());
            }
        }
    }

    /// How far reading beforehand is, as the host says that follows.
    pub(super) fn on_preload(&mut self, host: usize, found: Option<Option<PreloadState>>) {
        if self.operator.hand_over.is_none_or(|(step, _)| step != (HandOver::Preloading { to: host })) {
            return;
        }
        match found {
            Some(Some(PreloadState::Reading | PreloadState::Applying)) => {
                self.operator.preload_at = Some(self.now() + PRELOAD_PACE);
                self.world.wake_at(self.now() + PRELOAD_PACE, WAKE);
            }
            Some(Some(PreloadState::Unreadable)) => {
                // The owner goes on.
                self.operator.hand_over = None;
                self.order(host, OTHER, Order::LetGo { volume: VOLUME });
            }
            Some(None | Some(PreloadState::Done)) | None => {
                let late = if self.prng.chance(300) { self.lateness() } else { Duration::ZERO };
                self.ask_to_yield(host, late);
            }
        }
    }

    /// Meanwhile the owner may have written its map anew.
    fn lateness(&mut self) -> Duration {
        let most = *self.prng.pick(&[200, 400, 400, 4_000]);
        Duration::from_millis(self.prng.below(most))
    }

    fn ask_to_yield(&mut self, to: usize, late: Duration) {
        let now = self.now();
        self.operator.hand_over = Some((HandOver::Yielding { to }, now + late + Duration::from_secs(1)));
        self.operator.yield_at = Some(now + late);
        self.world.wake_at(now + late, WAKE);
    }

    pub(super) fn drive_hand_over(&mut self) {
        let now = self.now();
        if self.operator.preload_at.take_if(|at| *at <= now).is_some()
            && let Some((HandOver::Preloading { to }, _)) = self.operator.hand_over
            && self.is_running(to)
        {
            self.order(to, PRELOAD, Order::Preload { spec: self.spec() });
        }
        if self.operator.yield_at.take_if(|at| *at <= now).is_some()
            && let Some((HandOver::Yielding { to }, _)) = self.operator.hand_over
            && self.is_running(to)
        {
            let host = name_of(self.operator.owner);
            self.order(to, YIELD, Order::AskToYield { host, volume: VOLUME });
        }
        let Some((step, _)) = self.operator.hand_over.take_if(|(_, until)| *until <= now) else { return };
        let (HandOver::Preparing { to } | HandOver::Preloading { to } | HandOver::Yielding { to }) = step;
        // It finds that it is not to have the volume, now and then late.
        if self.is_running(to) && self.is_preloading(to) && self.operator.owner != to && self.prng.chance(700) {
            self.order(to, OTHER, Order::LetGo { volume: VOLUME });
        }
    }

    /// Whatever the old owner says: who follows takes over.
    pub(super) fn on_yielded(&mut self, host: usize) {
        if self.operator.hand_over.is_some_and(|(step, _)| step == HandOver::Yielding { to: host }) {
            self.operator.hand_over = None;
            self.outcome.handovers += 1;
            self.decide(host);
        }
    }
}
