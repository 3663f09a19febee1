//! What is true of a scheduler after each event, for tests.
//!
//! 1. A tenant with something waiting is in one place: it waits for its limit, or for others. One with nothing is in none.
//! 2. Counts are those of what waits and what is under way.
//! 3. Nothing waits that may go.
//! 4. The window, what is beyond it, and what goals leave of weights are within their bounds.

use super::{BEYOND_MAX, LOWERED_MIN, REQUESTS_MAX, Scheduler, Share};
use crate::cost::Cost;
use crate::window::{WHOLE, WINDOW_MAX, WINDOW_MIN};
use holdfast_base::Instant;

impl Scheduler {
    /// # Panics
    /// One of the above is not so.
    pub fn verify(&self, now: Instant) {
        self.verify_places();
        self.verify_counts();
        self.verify_nothing_waits_for_nothing(now);
        assert!(self.beyond <= BEYOND_MAX, "{} requests beyond the window", self.beyond);
        assert!((LOWERED_MIN..=WHOLE).contains(&self.lowered), "weights are lowered to {}", self.lowered);
        if self.share == Share::Own {
            assert!((WINDOW_MIN..=WINDOW_MAX).contains(&self.window()), "a window of {:?}", self.window());
        }
    }

    fn verify_places(&self) {
        for (id, tenant) in self.tenants.iter() {
            let is_waiting = !tenant.queue.is_empty();
            let for_others = self.by_start.key_of(id);
            let for_limit = self.limited.key_of(id);
            assert_eq!(usize::from(is_waiting), usize::from(for_others.is_some()) + usize::from(for_limit.is_some()));
            assert!(for_others.is_none_or(|start| start == tenant.start), "a tenant stands by its start");
            assert_eq!(self.by_wait.key_of(id).is_some(), for_others.is_some());
            let due = for_others.and(tenant.policy.floor).map(|_| tenant.floor_due);
            assert_eq!(self.by_floor.key_of(id), due, "a floor is due when it is");
            assert!(self.sparse.key_of(id).is_none_or(|start| for_others == Some(start)));
            assert!(!tenant.is_leaving || !is_waiting && tenant.in_service > 0, "who leaves has something under way");
        }
        for heap in [&self.by_start, &self.sparse] {
            assert!(heap.tenants().all(|id| self.tenants.get(id).is_some()), "who waits is here");
        }
    }

    fn verify_counts(&self) {
        let queued: usize = self.tenants.iter().map(|(_, tenant)| tenant.queue.len()).sum();
        assert_eq!(queued, self.queued, "requests that wait");
        assert!(queued + self.serving.len() <= REQUESTS_MAX, "more requests than there is room for");
        let in_service: usize = self.tenants.iter().map(|(_, tenant)| tenant.in_service).sum();
        assert_eq!(in_service, self.serving.len(), "requests under way");
        let counted = self.serving.iter().filter(|(_, serving)| !serving.is_late);
        let units = counted.fold(Cost::ZERO, |sum, (_, serving)| sum + serving.queued.cost);
        assert_eq!(units, self.in_service, "units under way");
        let beyond = self.serving.iter().filter(|(_, serving)| serving.is_beyond).count();
        assert_eq!(beyond, self.beyond, "requests beyond the window");
    }

    fn verify_nothing_waits_for_nothing(&self, now: Instant) {
        assert!(self.limited.first().is_none_or(|(at, _)| at > now), "a limit that lets pass");
        if !self.is_full(now) {
            assert!(self.by_start.is_empty(), "a tenant waits though the window has room");
        } else {
            assert_eq!(self.next_beyond(), None, "a sparse tenant waits though it may go");
        }
    }
}
