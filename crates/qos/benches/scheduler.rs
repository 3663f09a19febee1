//! What the scheduler costs: nanoseconds for a request and its end, by tenants that all have something waiting.
//!
//! `cargo bench -p holdfast-qos`. Run in any other way it does a little of each, to show that it still works.

use holdfast_base::{Effects, Instant, RequestToken};
use holdfast_qos::scheduler::{Effect, Event};
use holdfast_qos::{Config, Kind, Role, Scheduler, Slot, TenantId};
use std::collections::VecDeque;
use std::hint::black_box;

/// Of each tenant, in flight at a time.
const DEPTH: usize = 32;

/// Goes through so many requests of so many tenants; virtual time goes on by 2 us with each.
fn requests(count: u64, tenants: usize) {
    let mut scheduler = Scheduler::new(Config::default());
    let policy = |n| if n % 4 == 0 { "floor=1000" } else { "limit=1000000/100G,burst=10s" };
    let add = |n| scheduler.add(policy(n).parse().expect("it is right"), Role::Guest).expect("there is room");
    let tenants: Vec<TenantId> = (0..tenants).map(add).collect();
    let (mut under_way, mut out): (VecDeque<(Slot, usize)>, Effects<Effect>) = (VecDeque::new(), Effects::new());
    let mut now = Instant(1_000_000_000);
    let mut ask = VecDeque::from_iter((0..tenants.len() * DEPTH).map(|n| n % tenants.len()));
    for n in 0..count {
        now.0 += 2_000;
        if let Some((slot, tenant)) = under_way.pop_front().filter(|_| ask.is_empty()) {
            scheduler.handle(now, Event::Done { slot }, &mut out);
            ask.push_back(tenant);
        }
        if let Some(tenant) = ask.pop_front() {
            let token = RequestToken(n * tenants.len() as u64 + tenant as u64);
            let (tenant, kind) = (tenants[tenant], Kind::Read);
            scheduler.handle(now, Event::Request { tenant, kind, bytes: 8192, token }, &mut out);
        }
        for effect in out.drain() {
            if let Effect::Go { token, slot, .. } = effect {
                under_way.push_back((slot, (token.0 % tenants.len() as u64) as usize));
            }
        }
    }
    black_box(&scheduler);
}

fn main() {
    let is_bench = std::env::args().any(|arg| arg == "--bench");
    let count: u64 = if is_bench { 5_000_000 } else { 10_000 };
    for tenants in [1, 2, 16, 256] {
        requests(count / 10, tenants);
        let begin = std::time::Instant::now();
        requests(count, tenants);
        println!("{tenants:>4} tenants: {:>4} ns a request", begin.elapsed().as_nanos() as u64 / count);
    }
}
