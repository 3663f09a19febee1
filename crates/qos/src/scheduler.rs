//! The scheduler of one reactor: decides which request of which tenant goes next, and how many are under way.

mod verify;

use crate::cost::{Cost, Kind};
use crate::heap::Heap;
use crate::latency::{Latencies, Samples, sort_of};
use crate::mutations::Mutations;
use crate::policy::Policy;
use crate::tenant::{Figures, Queued, Role, Tenant};
use crate::window::{Isolation, WHOLE, Window};
use holdfast_base::time::earliest;
use holdfast_base::{Effects, Instant, RequestToken, Slab, Token, Urgency};
use std::time::Duration;

/// Requests that wait or are under way: four of each of as many clients as a host takes.
pub const REQUESTS_MAX: usize = 64 << 10;

/// Volumes and clones that a reactor has open, and its care.
pub const TENANTS_MAX: usize = 16 << 10;

/// Requests of sparse tenants beyond the window.
pub const BEYOND_MAX: usize = 8;

/// A tenant's first request that has waited so long for others goes next; with what is under way before it, within a second.
pub const WAIT_MAX: Duration = Duration::from_millis(950);

/// What is under way for so long waits for something else than the machine: a node that is gone, or its volume's opening.
/// It does not count for the window any more, or one volume's trouble would be that of all.
const LATE: Duration = Duration::from_secs(1);

/// After a second tenant has asked, the window counts for so long.
const SHARED_FOR: Duration = Duration::from_secs(1);

const SECOND: Duration = Duration::from_secs(1);

/// Of others' weights, what a goal of latency leaves at least.
const LOWERED_MIN: u64 = WHOLE / 8;

/// Seconds at a time whose end is made up for after a rest: by then all weights are whole again.
const SECONDS_MAX: u64 = 32;

/// Names a tenant of one scheduler.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct TenantId(Token);

/// Names a request that is under way.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Slot(Token);

/// Who decides how much is under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Share {
    /// The scheduler, by the latency that it sees. Without a bound while one tenant is alone.
    #[default]
    Own,
    /// Others ([`crate::sharing`]): so many units here.
    Units(Cost),
    /// Others: a tenant is alone on the whole host.
    Unbounded,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// A tenant asks; it goes or is dropped, once. Callers keep room for it ([`Scheduler::has_room`]).
    Request {
        tenant: TenantId,
        kind: Kind,
        bytes: u64,
        token: RequestToken,
    },
    /// What was under way is answered.
    Done {
        slot: Slot,
    },
    /// It is over, and how long it took says nothing of the machine: it was held back, say.
    Ended {
        slot: Slot,
    },
    /// Who asked is gone. What waits is dropped, what is under way stays.
    Cancel {
        tenant: TenantId,
        token: RequestToken,
    },
    SetPolicy {
        tenant: TenantId,
        policy: Policy,
    },
    /// Drops what waits; the tenant is gone when the rest is done.
    Remove {
        tenant: TenantId,
    },
    SetShare {
        share: Share,
    },
    Tick,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effect {
    Go { token: RequestToken, slot: Slot, urgency: Urgency, waited: Duration },
    Drop { token: RequestToken },
}

/// What the host machine shares out by.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sums {
    /// Of tenants that waited for others since the last sums.
    pub waiting_weight: u64,
    /// That asked in the last second, or have something under way.
    pub active: u32,
    pub in_service: Cost,
    pub samples: Samples,
    pub was_full: bool,
    /// What goals of latency take of weights and window, in 1,024ths.
    pub tightened: u64,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Config {
    pub isolation: Isolation,
    pub mutations: Mutations,
}

/// Why a request goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Why {
    /// Nobody else is there.
    Alone,
    Waited,
    Floor,
    Weight,
}

#[derive(Clone, Copy, Debug)]
struct Serving {
    tenant: Token,
    queued: Queued,
    went_at: Instant,
    is_beyond: bool,
    /// It counts for nothing but its tenant any more.
    is_late: bool,
}

/// See the [crate's](crate) description.
#[derive(Debug)]
pub struct Scheduler {
    mutations: Mutations,
    tenants: Slab<Tenant>,
    serving: Slab<Serving>,
    queued: usize,
    in_service: Cost,
    beyond: usize,
    virtual_time: u128,
    /// Tenants that wait and may go: by start, by when their floor is due, and by how long their first one waits.
    by_start: Heap<u128>,
    by_floor: Heap<Instant>,
    by_wait: Heap<Instant>,
    /// Those of them that may go beyond the window, by start.
    sparse: Heap<u128>,
    /// Tenants that wait for their own limit, by when it lets the next one pass.
    limited: Heap<Instant>,
    share: Share,
    window: Window,
    latencies: Latencies,
    was_full: bool,
    last_seen: Option<Token>,
    shared_until: Instant,
    /// Nothing that is under way is late before, as far as that was not known.
    late_at: Instant,
    /// Tenants with a goal of latency, and what they leave of others' weights, in 1,024ths.
    goals: Vec<Token>,
    lowered: u64,
    second_ends: Instant,
}

impl Scheduler {
    pub fn new(config: Config) -> Scheduler {
        Scheduler {
            mutations: config.mutations,
            tenants: Slab::new(TENANTS_MAX),
            serving: Slab::new(REQUESTS_MAX),
            queued: 0,
            in_service: Cost::ZERO,
            beyond: 0,
            virtual_time: 0,
            by_start: Heap::default(),
            by_floor: Heap::default(),
            by_wait: Heap::default(),
            sparse: Heap::default(),
            limited: Heap::default(),
            share: Share::Own,
            window: Window::new(config.isolation),
            latencies: Latencies::default(),
            was_full: false,
            last_seen: None,
            shared_until: Instant::ZERO,
            late_at: Instant::ZERO,
            goals: Vec::new(),
            lowered: WHOLE,
            second_ends: Instant::ZERO,
        }
    }

    /// Takes a tenant in; `None` where there are [`TENANTS_MAX`] already.
    pub fn add(&mut self, policy: Policy, role: Role) -> Option<TenantId> {
        if self.tenants.is_full() {
            return None;
        }
        let tenant = self.tenants.insert(Tenant::new(policy, role));
        if policy.latency.is_some() {
            self.goals.push(tenant);
        }
        Some(TenantId(tenant))
    }

    /// Whether there is room for another request.
    pub fn has_room(&self) -> bool {
        self.queued + self.serving.len() < REQUESTS_MAX
    }

    pub fn handle(&mut self, now: Instant, event: Event, out: &mut Effects<Effect>) {
        self.end_seconds(now);
        match event {
            Event::Request { tenant, kind, bytes, token } => {
                let cost = Cost::of(kind, bytes);
                let queued = Queued { token, kind, bytes, cost, asked_at: now, was_held: false };
                self.on_request(now, tenant.0, queued, out);
            }
            Event::Done { slot } => self.on_done(now, slot.0, true),
            Event::Ended { slot } => self.on_done(now, slot.0, false),
            Event::Cancel { tenant, token } => self.drop_where(tenant.0, &mut |of| of == token, out),
            Event::SetPolicy { tenant, policy } => self.on_policy(tenant.0, policy),
            Event::Remove { tenant } => self.on_remove(tenant.0, out),
            Event::SetShare { share } => self.on_share(now, share),
            Event::Tick => {}
        }
        // After anything but a request that went at once there may be place for others.
        if !self.by_start.is_empty() || !self.limited.is_empty() {
            self.dispatch(now, out);
        }
    }

    /// When the limit of a tenant that waits lets its next request pass, or what others wait for is late.
    pub fn next_deadline(&self) -> Option<Instant> {
        let late_at = (!self.by_start.is_empty()).then_some(self.late_at);
        earliest(self.limited.first().map(|(at, _)| at), late_at)
    }

    /// Requests of all tenants that wait.
    pub fn waiting(&self) -> usize {
        self.queued
    }

    /// Drops what a tenant has waiting and `is_gone` names: of a session that ended, say.
    pub fn drop_waiting(
        &mut self,
        now: Instant,
        tenant: TenantId,
        mut is_gone: impl FnMut(RequestToken) -> bool,
        out: &mut Effects<Effect>,
    ) {
        self.drop_where(tenant.0, &mut is_gone, out);
        self.dispatch(now, out);
    }

    fn on_request(&mut self, now: Instant, id: Token, queued: Queued, out: &mut Effects<Effect>) {
        assert!(self.has_room(), "callers keep room for requests");
        let virtual_time = self.virtual_time;
        let Some(tenant) = self.tenants.get_mut(id).filter(|tenant| !tenant.is_leaving) else {
            return out.push(Effect::Drop { token: queued.token });
        };
        tenant.queue.push_back(queued);
        tenant.on_asked(now);
        self.queued += 1;
        let is_first = tenant.queue.len() == 1;
        if is_first {
            tenant.start = tenant.start.max(virtual_time);
        }
        self.see(now, id);
        if !is_first {
            return;
        }
        let is_free = !self.is_bounded(now) || queued.cost.is_zero();
        let tenant = self.tenants.get_mut(id).expect("just seen");
        if is_free && (tenant.allowance.is_unlimited() || tenant.allowance.free_at(now) <= now) {
            self.go(now, id, Why::Alone, out);
        } else {
            self.place(now, id);
        }
    }

    /// A tenant asks or is served. A second one within a second makes this shared.
    fn see(&mut self, now: Instant, id: Token) {
        if self.last_seen == Some(id) {
            return;
        }
        if self.last_seen.is_some() {
            if now >= self.shared_until && self.share == Share::Own {
                self.window.begin(now);
                self.latencies.clear();
                self.was_full = false;
            }
            self.shared_until = now + SHARED_FOR;
        }
        self.last_seen = Some(id);
    }

    fn is_bounded(&self, now: Instant) -> bool {
        match self.share {
            Share::Own => now < self.shared_until,
            Share::Units(_) => true,
            Share::Unbounded => false,
        }
    }

    fn is_full(&self, now: Instant) -> bool {
        self.is_bounded(now) && self.in_service >= self.window()
    }

    /// Units under way beyond which only sparse tenants' requests go. Of no meaning while a tenant is alone.
    pub fn window(&self) -> Cost {
        if let Share::Units(units) = self.share { units } else { self.window.units() }
    }

    /// Puts a tenant where it belongs, by its first request that waits.
    fn place(&mut self, now: Instant, id: Token) {
        let Some(tenant) = self.tenants.get_mut(id) else { return self.unplace(id) };
        if tenant.queue.is_empty() {
            return self.unplace(id);
        }
        let free_at = if tenant.allowance.is_unlimited() { now } else { tenant.allowance.free_at(now) };
        let has_floor = tenant.policy.floor.is_some();
        if free_at > now {
            tenant.queue[0].was_held = true;
            let floor_due = tenant.floor_due;
            self.unplace(id);
            self.limited.put(id, free_at);
            if self.mutations.floor_forgets_limit() && has_floor {
                self.by_floor.put(id, floor_due);
            }
            return;
        }
        let (start, floor_due, is_sparse) = (tenant.start, tenant.floor_due, tenant.is_sparse());
        self.limited.remove(id);
        self.by_start.put(id, start);
        self.by_wait.put(id, now);
        if has_floor {
            self.by_floor.put(id, floor_due);
        } else {
            self.by_floor.remove(id);
        }
        if is_sparse {
            self.sparse.put(id, start);
        } else {
            self.sparse.remove(id);
        }
    }

    /// The next dispatch finds the place of a tenant whose first request or policy is another one.
    fn place_anew(&mut self, id: Token) {
        self.unplace(id);
        if self.tenants.get(id).is_some_and(|tenant| !tenant.queue.is_empty()) {
            self.limited.put(id, Instant::ZERO);
        }
    }

    fn unplace(&mut self, id: Token) {
        self.by_start.remove(id);
        self.by_floor.remove(id);
        self.by_wait.remove(id);
        self.sparse.remove(id);
        self.limited.remove(id);
    }

    /// Has all go that may.
    fn dispatch(&mut self, now: Instant, out: &mut Effects<Effect>) {
        while let Some((_, id)) = self.limited.first().filter(|(at, _)| *at <= now) {
            self.place(now, id);
        }
        loop {
            while let Some((id, why)) = self.next(now) {
                self.go(now, id, why, out);
            }
            if self.by_start.is_empty() || self.late_at > now || !self.pass_over_late(now) {
                return;
            }
        }
    }

    /// Looks for what has become late. Whether there is any.
    fn pass_over_late(&mut self, now: Instant) -> bool {
        let (mut is_any, mut next) = (false, now + LATE);
        for token in self.serving.tokens() {
            let Some(serving) = self.serving.get_mut(token).filter(|serving| !serving.is_late) else { continue };
            if serving.went_at + LATE > now {
                next = next.min(serving.went_at + LATE);
                continue;
            }
            (is_any, serving.is_late) = (true, true);
            self.in_service -= serving.queued.cost;
            self.beyond -= usize::from(std::mem::take(&mut serving.is_beyond));
        }
        self.late_at = next;
        is_any
    }

    /// Whose first request goes next, if one does.
    fn next(&mut self, now: Instant) -> Option<(Token, Why)> {
        if self.is_full(now) {
            self.was_full |= !self.by_start.is_empty();
            return self.next_beyond().map(|id| (id, Why::Weight));
        }
        let waited = self.by_wait.first().filter(|(since, _)| now.since(*since) >= WAIT_MAX);
        let due = || self.by_floor.first().filter(|(due, _)| *due <= now);
        let by_weight = || self.by_start.first().map(|(_, id)| (id, Why::Weight));
        let of_floor = || due().map(|(_, id)| (id, Why::Floor));
        waited.map(|(_, id)| (id, Why::Waited)).or_else(of_floor).or_else(by_weight)
    }

    /// A sparse tenant that would be next if the window had room: it has had less than its share.
    fn next_beyond(&self) -> Option<Token> {
        let (start, id) = self.sparse.first().filter(|_| self.beyond < BEYOND_MAX)?;
        self.by_start.first().filter(|(least, _)| start <= *least).map(|_| id)
    }

    fn go(&mut self, now: Instant, id: Token, why: Why, out: &mut Effects<Effect>) {
        let is_beyond = self.is_full(now) && why != Why::Alone;
        let tenant = self.tenants.get_mut(id).expect("who goes is here");
        let is_sparse = tenant.is_sparse();
        let queued = tenant.queue.pop_front().expect("who goes has something waiting");
        tenant.has_waited |= why != Why::Alone && queued.asked_at < now && !queued.was_held;
        match why {
            Why::Alone | Why::Waited => {}
            Why::Floor => tenant.pay_floor(now, queued.kind, queued.cost),
            Why::Weight => {
                let goes_back = self.mutations.virtual_time_goes_back();
                self.virtual_time = if goes_back { tenant.start } else { self.virtual_time.max(tenant.start) };
                tenant.pay_weight(queued.cost, self.lowered);
                if self.mutations.weight_pays_floor() {
                    tenant.pay_floor(now, queued.kind, queued.cost);
                }
            }
        }
        let waited = tenant.on_went(now, &queued);
        let urgency = match tenant.role {
            Role::Care => Urgency::Care,
            Role::Guest if is_sparse => Urgency::Sparse,
            Role::Guest => Urgency::Normal,
        };
        self.queued -= 1;
        self.in_service += queued.cost;
        self.beyond += usize::from(is_beyond);
        let slot = Slot(self.serving.insert(Serving { tenant: id, queued, went_at: now, is_beyond, is_late: false }));
        out.push(Effect::Go { token: queued.token, slot, urgency, waited });
        if why != Why::Alone {
            self.see(now, id);
            self.place(now, id);
        }
    }

    fn on_done(&mut self, now: Instant, slot: Token, is_telling: bool) {
        let Some(Serving { tenant: id, queued, went_at, is_beyond, is_late }) = self.serving.remove(slot) else {
            return;
        };
        if !is_late {
            self.in_service -= queued.cost;
        }
        self.beyond -= usize::from(is_beyond);
        let tenant = self.tenants.get_mut(id).expect("a tenant stays while something of it is under way");
        tenant.on_done(&queued, now.since(queued.asked_at), is_telling);
        if tenant.is_leaving && tenant.in_service == 0 {
            self.tenants.remove(id);
        }
        if is_telling
            && !is_late
            && went_at >= self.window.fell_at()
            && let Some(sort) = sort_of(queued.kind, queued.bytes)
        {
            self.latencies.count(sort, now.since(went_at).as_nanos() as u64);
        }
        if self.share == Share::Own && self.is_bounded(now) && self.window.is_due(now, self.latencies.total()) {
            let (samples, was_full) = (self.latencies.take(), std::mem::take(&mut self.was_full));
            self.window.end_span(now, &samples, was_full, self.lowered, self.mutations);
        }
    }

    fn on_policy(&mut self, id: Token, policy: Policy) {
        let Some(tenant) = self.tenants.get_mut(id).filter(|tenant| !tenant.is_leaving) else { return };
        tenant.policy = policy;
        tenant.allowance = tenant.allowance.following(&policy);
        self.goals.retain(|of| *of != id);
        if policy.latency.is_some() {
            self.goals.push(id);
        }
        self.place_anew(id);
    }

    fn on_remove(&mut self, id: Token, out: &mut Effects<Effect>) {
        self.drop_where(id, &mut |_| true, out);
        self.goals.retain(|of| *of != id);
        let Some(tenant) = self.tenants.get_mut(id) else { return };
        tenant.is_leaving = true;
        if tenant.in_service == 0 {
            self.tenants.remove(id);
        }
    }

    fn on_share(&mut self, now: Instant, share: Share) {
        if share == Share::Own && self.share != Share::Own {
            self.window.begin(now);
            self.latencies.clear();
        }
        if let Share::Units(units) = share
            && units < self.window()
        {
            self.window.begin(now);
        }
        self.share = share;
    }

    fn drop_where(&mut self, id: Token, is_gone: &mut dyn FnMut(RequestToken) -> bool, out: &mut Effects<Effect>) {
        let Some(tenant) = self.tenants.get_mut(id) else { return };
        let (before, first) = (tenant.queue.len(), tenant.queue.front().map(|queued| queued.token));
        tenant.queue.retain(|queued| {
            let goes = is_gone(queued.token);
            if goes {
                out.push(Effect::Drop { token: queued.token });
            }
            !goes
        });
        let after = tenant.queue.len();
        let is_first_gone = first != tenant.queue.front().map(|queued| queued.token);
        self.queued -= before - after;
        if is_first_gone {
            self.place_anew(id);
        }
    }

    /// Looks at goals of latency at the end of each second. A rest counts as seconds in which none was missed.
    fn end_seconds(&mut self, now: Instant) {
        if now < self.second_ends {
            return;
        }
        let rested = now.since(self.second_ends).as_nanos() / SECOND.as_nanos();
        self.second_ends = now + SECOND;
        let mut is_missed = false;
        for id in &self.goals {
            is_missed |= self.tenants.get_mut(*id).is_some_and(Tenant::end_second);
        }
        if is_missed {
            self.lowered = (self.lowered * 7 / 10).max(LOWERED_MIN);
        }
        let well = u64::try_from(rested).unwrap_or(u64::MAX).min(SECONDS_MAX) + u64::from(!is_missed);
        for _ in 0..well {
            self.lowered = (self.lowered * 11 / 10 + 1).min(WHOLE);
        }
    }

    /// What was since the last sums.
    pub fn sums(&mut self, now: Instant) -> Sums {
        let mut sums = Sums { in_service: self.in_service, tightened: WHOLE - self.lowered, ..Sums::default() };
        for id in self.by_start.tenants() {
            if let Some(tenant) = self.tenants.get_mut(id) {
                tenant.has_waited = true;
            }
        }
        for id in self.tenants.tokens() {
            let Some(tenant) = self.tenants.get_mut(id) else { continue };
            if std::mem::take(&mut tenant.has_waited) {
                sums.waiting_weight += u64::from(tenant.policy.weight);
            }
            let has_asked = tenant.last_asked.is_some_and(|at| now.since(at) < SECOND);
            sums.active += u32::from(has_asked || tenant.in_flight() > 0);
        }
        sums.samples = self.latencies.take();
        sums.was_full = std::mem::take(&mut self.was_full);
        sums
    }

    pub fn figures(&self, tenant: TenantId) -> Option<Figures> {
        self.tenants.get(tenant.0).map(Tenant::figures)
    }

    /// What goals of latency leave of others' weights, in 1,024ths.
    pub fn lowered(&self) -> u64 {
        self.lowered
    }

    /// Never goes back.
    pub fn virtual_time(&self) -> u128 {
        self.virtual_time
    }

    /// Units under way.
    pub fn in_service(&self) -> Cost {
        self.in_service
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Asking {
        scheduler: Scheduler,
        out: Effects<Effect>,
        next: u64,
    }

    const NOW: Instant = Instant(5_000_000_000);

    /// With a window of eight units.
    fn asking() -> Asking {
        let mut asking = Asking { scheduler: Scheduler::new(Config::default()), out: Effects::new(), next: 0 };
        let share = Share::Units(Cost::units(8));
        asking.scheduler.handle(NOW, Event::SetShare { share }, &mut asking.out);
        asking
    }

    impl Asking {
        fn tenant(&mut self, policy: &str, role: Role) -> TenantId {
            self.scheduler.add(policy.parse().unwrap(), role).unwrap()
        }

        /// Classes of what goes, of so many that are asked.
        fn ask(&mut self, tenant: TenantId, kind: Kind, bytes: u64, count: usize) -> Vec<Urgency> {
            for _ in 0..count {
                let token = RequestToken(self.next);
                self.next += 1;
                self.scheduler.handle(NOW, Event::Request { tenant, kind, bytes, token }, &mut self.out);
                self.scheduler.verify(NOW);
            }
            let class = |effect| match effect {
                Effect::Go { urgency, .. } => Some(urgency),
                Effect::Drop { .. } => None,
            };
            self.out.take().into_iter().filter_map(class).collect()
        }
    }

    #[test]
    fn eight_small_requests_go_beyond_the_window_and_flushes_always() {
        let mut asking = asking();
        let noisy = asking.tenant("", Role::Guest);
        assert_eq!(asking.ask(noisy, Kind::Write, 1 << 20, 20).len(), 1, "66 units fill it");
        let few: Vec<TenantId> = (0..12).map(|_| asking.tenant("", Role::Guest)).collect();
        assert_eq!(asking.ask(few[11], Kind::Write, 128 << 10, 1), [], "it is not small");
        for tenant in &few[..BEYOND_MAX] {
            assert_eq!(asking.ask(*tenant, Kind::Write, 64 << 10, 1), [Urgency::Sparse]);
        }
        assert_eq!(asking.ask(few[8], Kind::Read, 512, 1), [], "eight are beyond it");
        assert_eq!(asking.ask(few[9], Kind::Flush, 0, 1), [Urgency::Sparse]);
        assert_eq!(asking.scheduler.figures(few[8]).map(|figures| figures.waiting), Some(1));
    }

    #[test]
    fn what_hangs_fills_the_window_for_a_second() {
        let mut asking = asking();
        let (hangs, waits) = (asking.tenant("", Role::Guest), asking.tenant("", Role::Guest));
        let token = RequestToken(99);
        let event = Event::Request { tenant: hangs, kind: Kind::Write, bytes: 1 << 20, token };
        asking.scheduler.handle(NOW, event, &mut asking.out);
        let Effect::Go { slot, .. } = asking.out.take()[0] else { panic!("the window was empty") };
        assert_eq!(asking.ask(waits, Kind::Write, 128 << 10, 2), [], "it is full, and they are not small");
        let late = NOW + LATE;
        assert_eq!(asking.scheduler.next_deadline(), Some(late));
        asking.scheduler.handle(late, Event::Tick, &mut asking.out);
        asking.scheduler.verify(late);
        assert!(matches!(asking.out.take()[..], [Effect::Go { .. }]), "one, which fills it anew");
        assert_eq!(asking.scheduler.in_service(), Cost::of(Kind::Write, 128 << 10));
        asking.scheduler.handle(late, Event::Done { slot }, &mut asking.out);
        asking.scheduler.verify(late);
        assert_eq!(asking.scheduler.figures(hangs).map(|figures| figures.in_service), Some(0));
    }

    #[test]
    fn care_is_never_sparse_and_many_in_flight_are_not() {
        let mut asking = asking();
        let care = asking.tenant("weight=20", Role::Care);
        assert_eq!(asking.ask(care, Kind::Read, 4096, 1), [Urgency::Care]);
        let noisy = asking.tenant("", Role::Guest);
        let classes = asking.ask(noisy, Kind::Read, 512, 7);
        assert_eq!((classes[0], classes[6]), (Urgency::Sparse, Urgency::Normal));
        assert_eq!(asking.ask(care, Kind::Read, 4096, 1), [], "the window is full");
    }

    #[test]
    fn what_waits_is_dropped_with_its_tenant_and_the_rest_is_counted_to_its_end() {
        let mut asking = asking();
        let noisy = asking.tenant("", Role::Guest);
        for n in 0..3 {
            let event = Event::Request { tenant: noisy, kind: Kind::Write, bytes: 1 << 20, token: RequestToken(n) };
            asking.scheduler.handle(NOW, event, &mut asking.out);
        }
        asking.scheduler.handle(NOW, Event::Remove { tenant: noisy }, &mut asking.out);
        let effects = asking.out.take();
        let [Effect::Go { slot, .. }, Effect::Drop { token: a }, Effect::Drop { token: b }] = effects[..] else {
            panic!("{effects:?}")
        };
        assert_eq!((a, b, asking.scheduler.in_service()), (RequestToken(1), RequestToken(2), Cost::units(66)));
        asking.scheduler.handle(NOW, Event::Done { slot }, &mut asking.out);
        assert_eq!((asking.scheduler.in_service(), asking.scheduler.figures(noisy)), (Cost::ZERO, None));
        asking.scheduler.verify(NOW);
    }
}
