//! Whatever comes in whatever order: a request goes or is dropped, once, and the scheduler's invariants hold after each event.

use holdfast_base::{Effects, Instant, RequestToken};
use holdfast_qos::scheduler::{Effect, Event};
use holdfast_qos::{Config, Cost, Kind, Policy, Role, Scheduler, Share, Slot, TenantId};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

#[derive(Clone, Debug)]
enum Step {
    Request { tenant: usize, kind: u8, bytes: u64 },
    Done { nth: usize, is_telling: bool },
    Cancel { nth: usize },
    DropSession { tenant: usize, odd: bool },
    Policy { tenant: usize, policy: usize },
    Replace { tenant: usize },
    Share { share: u8 },
    Wait { micros: u64 },
    Sums,
}

const POLICIES: [&str; 7] = [
    "",
    "weight=1",
    "weight=1000,floor=3000",
    "limit=200,burst=1ms",
    "floor=100,limit=500/1M,burst=20/5s",
    "latency=1ms,weight=7",
    "limit=/64K,burst=1ms",
];

fn step() -> impl Strategy<Value = Step> {
    let bytes = prop_oneof![Just(0), Just(4096), Just(65_536), Just(1 << 20), Just(32 << 20)];
    prop_oneof![
        10 => (0..4_usize, 0..4_u8, bytes).prop_map(|(tenant, kind, bytes)| Step::Request { tenant, kind, bytes }),
        8 => any::<(usize, bool)>().prop_map(|(nth, is_telling)| Step::Done { nth, is_telling }),
        1 => any::<usize>().prop_map(|nth| Step::Cancel { nth }),
        1 => (0..4_usize, any::<bool>()).prop_map(|(tenant, odd)| Step::DropSession { tenant, odd }),
        1 => (0..4_usize, 0..POLICIES.len()).prop_map(|(tenant, policy)| Step::Policy { tenant, policy }),
        1 => (0..4_usize).prop_map(|tenant| Step::Replace { tenant }),
        1 => (0..4_u8).prop_map(|share| Step::Share { share }),
        4 => (0..2_000_000_u64).prop_map(|micros| Step::Wait { micros: micros * micros / 2_000_000 }),
        1 => Just(Step::Sums),
    ]
}

/// A scheduler, and what was seen of each request.
struct Watched {
    scheduler: Scheduler,
    now: Instant,
    tenants: Vec<TenantId>,
    waiting: BTreeMap<RequestToken, TenantId>,
    under_way: Vec<(RequestToken, Slot)>,
    told: BTreeSet<RequestToken>,
    next_token: u64,
    virtual_time: u128,
}

fn policy(index: usize) -> Policy {
    POLICIES[index].parse().unwrap()
}

impl Watched {
    fn new() -> Watched {
        let mut scheduler = Scheduler::new(Config::default());
        let role = |n| if n == 3 { Role::Care } else { Role::Guest };
        let tenants = (0..4).map(|n| scheduler.add(policy(n), role(n)).unwrap()).collect();
        let now = Instant(1_000_000_000);
        let (waiting, under_way, told) = (BTreeMap::new(), Vec::new(), BTreeSet::new());
        Watched { scheduler, now, tenants, waiting, under_way, told, next_token: 0, virtual_time: 0 }
    }

    fn handle(&mut self, event: Event) {
        let mut out = Effects::new();
        self.scheduler.handle(self.now, event, &mut out);
        self.look(out);
    }

    fn look(&mut self, mut out: Effects<Effect>) {
        for effect in out.take() {
            let (Effect::Go { token, .. } | Effect::Drop { token }) = effect;
            assert!(self.told.insert(token), "{token:?} is told twice");
            assert!(self.waiting.remove(&token).is_some(), "{token:?} was not asked");
            if let Effect::Go { slot, .. } = effect {
                self.under_way.push((token, slot));
            }
        }
        self.scheduler.verify(self.now);
        assert!(self.scheduler.virtual_time() >= self.virtual_time);
        self.virtual_time = self.scheduler.virtual_time();
        let known: usize =
            self.tenants.iter().filter_map(|of| self.scheduler.figures(*of)).map(|figures| figures.waiting).sum();
        assert_eq!(known, self.waiting.len(), "nothing that waits is lost");
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Request { tenant, kind, bytes } => {
                let kind = [Kind::Read, Kind::Write, Kind::Discard, Kind::Flush][kind as usize];
                let (tenant, token) = (self.tenants[tenant], RequestToken(self.next_token));
                self.next_token += 1;
                self.waiting.insert(token, tenant);
                self.handle(Event::Request { tenant, kind, bytes, token });
            }
            Step::Done { nth, is_telling } if !self.under_way.is_empty() => {
                let (_, slot) = self.under_way.swap_remove(nth % self.under_way.len());
                self.handle(if is_telling { Event::Done { slot } } else { Event::Ended { slot } });
                self.handle(Event::Done { slot });
            }
            Step::Cancel { nth } if !self.waiting.is_empty() => {
                let nth = nth % self.waiting.len();
                let (token, tenant) = self.waiting.iter().nth(nth).map(|(token, of)| (*token, *of)).unwrap();
                self.handle(Event::Cancel { tenant, token });
                assert!(!self.waiting.contains_key(&token));
            }
            Step::DropSession { tenant, odd } => {
                let (tenant, mut out) = (self.tenants[tenant], Effects::new());
                let is_gone = |token: RequestToken| (token.0 % 2 == 1) == odd;
                self.scheduler.drop_waiting(self.now, tenant, is_gone, &mut out);
                self.look(out);
                assert!(!self.waiting.iter().any(|(token, of)| *of == tenant && is_gone(*token)));
            }
            Step::Policy { tenant, policy: index } => {
                self.handle(Event::SetPolicy { tenant: self.tenants[tenant], policy: policy(index) });
            }
            Step::Replace { tenant } => {
                let old = self.tenants[tenant];
                self.tenants[tenant] = self.scheduler.add(policy(tenant), Role::Guest).unwrap();
                self.handle(Event::Remove { tenant: old });
                // Late words to it are heard by nobody.
                let token = RequestToken(self.next_token);
                self.next_token += 1;
                self.waiting.insert(token, old);
                self.handle(Event::Request { tenant: old, kind: Kind::Read, bytes: 1, token });
                self.handle(Event::SetPolicy { tenant: old, policy: policy(2) });
            }
            Step::Share { share } => {
                let units = Share::Units(Cost::units(20));
                let share = [Share::Own, Share::Unbounded, units, Share::Units(Cost::units(8))][share as usize];
                self.handle(Event::SetShare { share });
            }
            Step::Wait { micros } => {
                self.now = self.now + Duration::from_micros(micros);
                self.handle(Event::Tick);
            }
            Step::Sums => {
                let sums = self.scheduler.sums(self.now);
                assert_eq!(sums.in_service, self.scheduler.in_service());
                self.scheduler.verify(self.now);
            }
            Step::Done { .. } | Step::Cancel { .. } => {}
        }
    }

    /// All that is under way is answered, and limits let pass in time.
    fn finish(&mut self) {
        for _ in 0..100_000 {
            while let Some((_, slot)) = self.under_way.pop() {
                self.handle(Event::Done { slot });
            }
            let Some(at) = self.scheduler.next_deadline() else { break };
            self.now = self.now.max(at);
            self.handle(Event::Tick);
        }
        assert!(self.waiting.is_empty() && self.under_way.is_empty(), "all is told in the end");
        assert_eq!(self.told.len() as u64, self.next_token);
        assert_eq!(self.scheduler.in_service(), Cost::ZERO);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn each_request_is_told_once(steps in prop::collection::vec(step(), 0..400)) {
        let mut watched = Watched::new();
        steps.into_iter().for_each(|step| watched.step(step));
        watched.finish();
    }

    #[test]
    fn a_policy_is_what_its_text_says(
        floor in prop::option::of(1..1_000_u64),
        weight in 1..=1000_u32,
        iops in prop::option::of(1_000..(1_u64 << 40)),
        bytes in prop::option::of(1..(1_u64 << 40)),
        more in prop::option::of(1..10_000_u64),
        seconds in 1..100_u64,
        latency in prop::option::of(10..60_000_000_u64),
    ) {
        let burst = match more.filter(|_| iops.is_some()) {
            Some(more) => holdfast_qos::Burst::Credits { more, most: Duration::from_secs(seconds) },
            None if iops.or(bytes).is_some() => holdfast_qos::Burst::Span(Duration::from_millis(seconds)),
            None => Policy::default().burst,
        };
        let latency = latency.map(Duration::from_micros);
        let policy = Policy { floor, weight, iops, bytes, burst, latency };
        prop_assert_eq!(policy.to_string().parse::<Policy>(), Ok(policy));
    }
}
