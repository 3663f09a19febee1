//! One tenant: its policy, what it has waiting and under way, and the tags by which it is chosen.

use crate::allowance::Allowance;
use crate::cost::{Cost, Kind, floor_nanos};
use crate::policy::Policy;
use crate::window::WHOLE;
use holdfast_base::{Instant, RequestToken};
use std::collections::VecDeque;
use std::time::Duration;

/// In flight at most in the last second, of a tenant that is sparse: one queue of a guest that waits for each answer.
const SPARSE_IN_FLIGHT_MAX: usize = 4;

/// Of a request that may go beyond the window: a write of 64 KiB.
const SPARSE_COST_MAX: Cost = Cost::units(6);

/// Of a floor that was not asked for, so much may follow.
const FLOOR_BEHIND_MAX: Duration = Duration::from_millis(50);

const SECOND: Duration = Duration::from_secs(1);

/// Cost over weight, so that a small request of the largest weight still counts: virtual time has no unit.
const VIRTUAL_SCALE: u128 = 1 << 10;

/// Whose requests these are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    Guest,
    /// What keeps volumes well: cleaner, rebuild, gather. Never sparse.
    Care,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Queued {
    pub token: RequestToken,
    pub kind: Kind,
    pub bytes: u64,
    pub cost: Cost,
    pub asked_at: Instant,
    /// Its tenant's limit held it, or what was before it.
    pub was_held: bool,
}

impl Queued {
    /// Bytes that a limit counts.
    pub fn moved(&self) -> u64 {
        if matches!(self.kind, Kind::Read | Kind::Write) { self.bytes } else { 0 }
    }
}

/// Most requests in flight at once, of this second and the one before.
#[derive(Clone, Copy, Debug, Default)]
struct Peak {
    now: usize,
    before: usize,
    ends_at: Instant,
}

impl Peak {
    fn see(&mut self, now: Instant, in_flight: usize) {
        if self.ends_at <= now {
            self.before = if now.since(self.ends_at) < SECOND { self.now } else { 0 };
            self.now = 0;
            self.ends_at = now + SECOND;
        }
        self.now = self.now.max(in_flight);
    }

    fn most(&self) -> usize {
        self.now.max(self.before)
    }
}

/// A second's requests against a goal of latency.
#[derive(Clone, Copy, Debug, Default)]
struct Watch {
    done: u64,
    late: u64,
    /// Of the floor's second.
    floor_nanos: u64,
    is_missed: bool,
}

/// What tenants are shown by.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Figures {
    pub waiting: usize,
    pub in_service: usize,
    /// Since the tenant is here: requests that went, those that waited before, and all they waited.
    pub went: u64,
    pub waited: u64,
    pub waited_sum: Duration,
    /// The longest of these waits that was not for the tenant's own limit.
    pub waited_max: Duration,
    /// Of those that waited, how many the tenant's own limit held.
    pub held_by_limit: u64,
    /// A goal of latency that was missed in the last second.
    pub misses_goal: bool,
}

#[derive(Debug)]
pub(crate) struct Tenant {
    pub role: Role,
    pub policy: Policy,
    pub allowance: Allowance,
    pub queue: VecDeque<Queued>,
    pub in_service: usize,
    /// When its floor is due again.
    pub floor_due: Instant,
    /// In virtual time: where the next request starts, which is where the last one ended.
    pub start: u128,
    pub last_asked: Option<Instant>,
    /// Something of it waited for others since the last sums.
    pub has_waited: bool,
    /// Goes when nothing of it is under way any more.
    pub is_leaving: bool,
    peak: Peak,
    watch: Watch,
    figures: Figures,
}

impl Tenant {
    pub fn new(policy: Policy, role: Role) -> Tenant {
        Tenant {
            role,
            policy,
            allowance: Allowance::default().following(&policy),
            queue: VecDeque::new(),
            in_service: 0,
            floor_due: Instant::ZERO,
            start: 0,
            last_asked: None,
            has_waited: false,
            is_leaving: false,
            peak: Peak::default(),
            watch: Watch::default(),
            figures: Figures::default(),
        }
    }

    pub fn in_flight(&self) -> usize {
        self.queue.len() + self.in_service
    }

    pub fn figures(&self) -> Figures {
        let (waiting, in_service) = (self.queue.len(), self.in_service);
        Figures { waiting, in_service, misses_goal: self.watch.is_missed, ..self.figures }
    }

    /// It asks for another one, which is counted already.
    pub fn on_asked(&mut self, now: Instant) {
        self.last_asked = Some(now);
        self.peak.see(now, self.in_flight());
    }

    /// Whether its first request may go beyond the window once it is its turn: there are few, and it is small.
    pub fn is_sparse(&self) -> bool {
        self.role == Role::Guest
            && self.peak.most() <= SPARSE_IN_FLIGHT_MAX
            && self.queue.front().is_none_or(|first| first.cost <= SPARSE_COST_MAX)
    }

    /// A floor pays for this request.
    pub fn pay_floor(&mut self, now: Instant, kind: Kind, cost: Cost) {
        if let Some(floor) = self.policy.floor {
            let nanos = Duration::from_nanos(floor_nanos(kind, cost, floor));
            self.floor_due = self.floor_due.max(now - FLOOR_BEHIND_MAX) + nanos;
        }
    }

    /// The weight pays for it; of others' weights so much is left, in 1,024ths.
    pub fn pay_weight(&mut self, cost: Cost, lowered: u64) {
        let lowered = if self.watch.is_missed { WHOLE } else { lowered };
        let weight = u128::from(self.policy.weight) * u128::from(lowered);
        self.start += u128::from(cost.0) * VIRTUAL_SCALE * u128::from(WHOLE) / weight;
    }

    pub fn on_went(&mut self, now: Instant, queued: &Queued) -> Duration {
        let waited = now.since(queued.asked_at);
        self.figures.went += 1;
        if waited > Duration::ZERO || queued.was_held {
            self.figures.waited += 1;
            self.figures.waited_sum += waited;
            self.figures.held_by_limit += u64::from(queued.was_held);
            if !queued.was_held {
                self.figures.waited_max = self.figures.waited_max.max(waited);
            }
        }
        self.allowance.pay(now, queued.moved());
        self.in_service += 1;
        waited
    }

    /// One is done, so long after it was asked for, where that tells something.
    pub fn on_done(&mut self, queued: &Queued, took: Duration, is_telling: bool) {
        self.in_service -= 1;
        let Some(goal) = self.policy.latency.filter(|_| is_telling) else { return };
        if let Some(floor) = self.policy.floor {
            let nanos = floor_nanos(queued.kind, queued.cost, floor);
            self.watch.floor_nanos = self.watch.floor_nanos.saturating_add(nanos);
        }
        // Time that it owes to its own limit is nobody else's fault.
        if !queued.was_held {
            self.watch.done += 1;
            self.watch.late += u64::from(took > goal);
        }
    }

    /// A second has ended. Whether it missed its goal, having asked for no more than others have to leave it.
    pub fn end_second(&mut self) -> bool {
        let Watch { done, late, floor_nanos, .. } = std::mem::take(&mut self.watch);
        let is_within_floor = self.policy.floor.is_some() && u128::from(floor_nanos) <= SECOND.as_nanos();
        let is_modest = self.peak.most() <= SPARSE_IN_FLIGHT_MAX || is_within_floor;
        self.watch.is_missed = self.policy.latency.is_some() && late * 100 > done && is_modest;
        self.watch.is_missed
    }
}
