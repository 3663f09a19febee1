//! In steady state a request costs no allocation, however many tenants there are.

use holdfast_base::{Effects, Instant, RequestToken};
use holdfast_qos::scheduler::{Effect, Event};
use holdfast_qos::{Config, Cost, Kind, Role, Scheduler, Share, Slot, TenantId};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::VecDeque;

thread_local! {
    /// By this thread: the harness has others.
    static ALLOCATED: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: all is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.set(ALLOCATED.get() + 1);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn nothing_is_allocated_for_a_request() {
    for count in [1, 100] {
        let mut scheduler = Scheduler::new(Config::default());
        let policies = ["", "weight=7", "floor=100,weight=3", "limit=100000/1G,burst=10/5s", "latency=1ms"];
        let policy = |n: usize| policies[n % policies.len()].parse().unwrap();
        let tenants: Vec<TenantId> = (0..count).map(|n| scheduler.add(policy(n), Role::Guest).unwrap()).collect();
        let (mut under_way, mut out) = (VecDeque::with_capacity(80 * count), Effects::new());
        // A window that grows needs room for more that is under way.
        let share = if count > 1 { Share::Units(Cost::units(64)) } else { Share::Unbounded };
        scheduler.handle(Instant::ZERO, Event::SetShare { share }, &mut out);
        let (mut now, mut steady) = (Instant(1_000_000_000), 0);
        // Eighty of each are in flight: whose request is done asks again.
        let mut next = Vec::from_iter((0..80 * count).map(|n| n % count));
        for n in 0..100_000 {
            now.0 += 2_000;
            let of = next.pop().unwrap_or_else(|| {
                let (slot, of): (Slot, usize) = under_way.pop_front().expect("something is under way");
                scheduler.handle(now, Event::Done { slot }, &mut out);
                of
            });
            let token = RequestToken((n * count + of) as u64);
            scheduler.handle(
                now,
                Event::Request { tenant: tenants[of], kind: Kind::Read, bytes: 8192, token },
                &mut out,
            );
            for effect in out.drain() {
                if let Effect::Go { slot, token, .. } = effect {
                    under_way.push_back((slot, token.0 as usize % count));
                }
            }
            if n == 50_000 {
                steady = ALLOCATED.get();
            }
        }
        assert!(scheduler.has_room() && steady > 0);
        assert_eq!(ALLOCATED.get() - steady, 0, "with {count} tenants");
    }
}
