//! How many operations a device has at a time while guests read one by one beside others.
//!
//! Role: a part of the queue of a device ([`crate::device_queue`]). What a device has been given goes in an order of its
//! own, which nobody who is in a hurry can pass; what waits here is in order of urgency. A device with more under way than
//! it needs does not do more, and each operation takes longer.
//!
//! Method: a sparse read that took longer than thrice the shortest of late, and a little, takes a quarter off the depth; one
//! that did not adds to it, where more wants to go. Additive increase and multiplicative decrease as in Chiu and Jain (1989),
//! on delay as in TCP Vegas (Brakmo 1994). Now and then the device has next to nothing for some reads, so that the shortest
//! is that of a device, not of a queue, as in BBR (Cardwell 2016).
//!
//! Invariants
//! 1. The depth is between [`DEPTH_MIN`] and what the device may have at all, and that is it where no sparse read was done
//!    within [`SPARSE_FOR`].
//! 2. It is cut once in the time that a read takes: what is under way was given before.

use holdfast_base::Instant;
use std::time::Duration;

/// A device that has fewer at a time does less, whatever it is.
const DEPTH_MIN: u32 = 4;

/// So long after a sparse read the next one is expected.
const SPARSE_FOR: Duration = Duration::from_millis(100);

/// Larger ones take their time because of their size.
const READ_BYTES_MAX: u32 = 64 << 10;

/// The shortest read is that of this span and the one before it: what else the device does changes.
const SHORTEST_OF: Duration = Duration::from_secs(5);

/// For so many reads of a span the device has next to nothing else.
const PROBES: u32 = 8;

/// Allowed beside thrice the shortest: a processor has else to do.
const SLACK: Duration = Duration::from_micros(250);

/// Good reads that add one to the depth.
const GOOD_FOR_ONE: u32 = 4;

#[derive(Debug)]
pub(crate) struct Depth {
    max: u32,
    depth: u32,
    good: u32,
    sparse_at: Option<Instant>,
    cut_at: Instant,
    /// Of this span, and of the one before.
    shortest: [Option<Duration>; 2],
    span_began: Instant,
    probes: u32,
}

impl Depth {
    /// At most `max`, of which there is one at least.
    pub(crate) fn new(max: usize) -> Depth {
        let max = u32::try_from(max).unwrap_or(u32::MAX);
        let (cut_at, span_began) = (Instant::ZERO, Instant::ZERO);
        Depth { max, depth: max, good: 0, sparse_at: None, cut_at, shortest: [None; 2], span_began, probes: 0 }
    }

    /// Operations that the device may have now.
    #[inline]
    pub(crate) fn now(&self, now: Instant) -> usize {
        let is_sparse = self.sparse_at.is_some_and(|at| now.since(at) < SPARSE_FOR);
        let depth = match self.probes {
            _ if !is_sparse => self.max,
            0 => self.depth,
            _ => self.least(),
        };
        depth as usize
    }

    /// A sparse read of `bytes` is done that the device had for `took`. `in_flight`: operations that it has; `wants_more`:
    /// others wait for a place.
    pub(crate) fn on_sparse_read(
        &mut self,
        now: Instant,
        bytes: u32,
        took: Duration,
        in_flight: usize,
        wants_more: bool,
    ) {
        self.sparse_at = Some(now);
        if bytes > READ_BYTES_MAX {
            return;
        }
        let shortest = self.shortest(now, took);
        if self.probes > 0 {
            self.probes -= 1;
        } else if took > 3 * shortest + SLACK {
            if now.since(self.cut_at) >= took {
                let had = self.depth.min(u32::try_from(in_flight).unwrap_or(u32::MAX));
                self.depth = (had - had / 4).min(self.depth.saturating_sub(1)).max(self.least());
                self.cut_at = now;
            }
            self.good = 0;
        } else if wants_more {
            self.good += 1;
            if self.good == GOOD_FOR_ONE {
                self.depth = self.max.min(self.depth + 1);
                self.good = 0;
            }
        }
    }

    fn least(&self) -> u32 {
        DEPTH_MIN.min(self.max)
    }

    fn shortest(&mut self, now: Instant, took: Duration) -> Duration {
        if self.shortest[0].is_none() || now.since(self.span_began) >= SHORTEST_OF {
            self.shortest = [None, self.shortest[0]];
            self.span_began = now;
            self.probes = PROBES;
        }
        let shortest = self.shortest[0].map_or(took, |shortest| shortest.min(took));
        self.shortest[0] = Some(shortest);
        self.shortest[1].map_or(shortest, |before| before.min(shortest))
    }

    pub(crate) fn verify(&self) {
        assert!((self.least()..=self.max).contains(&self.depth), "{self:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_base::Prng;

    /// A device that does so many operations of `each_us` at a time, and no more: a sparse read comes behind what it has.
    fn settles_at(places: u64, each_us: u64, max: usize) -> (usize, Depth, Instant) {
        let (mut depth, mut now, mut prng) = (Depth::new(max), Instant::ZERO + Duration::from_secs(9), Prng::new(1));
        let (mut sum, mut count) = (0, 0);
        for n in 0..20_000 {
            let has = depth.now(now);
            let waits = (has as u64).saturating_sub(places) * each_us / places;
            let took = Duration::from_micros(waits + each_us * prng.between(80, 120) / 100);
            now = now + took;
            depth.on_sparse_read(now, 4096, took, has, true);
            depth.verify();
            if n > 2000 {
                (sum, count) = (sum + has, count + 1);
            }
        }
        (sum / count, depth, now)
    }

    #[test]
    fn a_device_has_what_it_does_at_a_time_and_about_as_much_again() {
        for (places, each_us) in [(8, 100), (32, 80), (1, 5000), (4, 1000)] {
            let (depth, ..) = settles_at(places, each_us, 256);
            let places = places as usize;
            assert!((places..=5 * places + 4).contains(&depth), "{depth} of a device that does {places}");
        }
    }

    #[test]
    fn who_reads_no_more_leaves_the_device_to_the_others() {
        let (_, depth, now) = settles_at(2, 400, 64);
        assert!(depth.now(now + SPARSE_FOR / 2) < 64);
        assert_eq!(depth.now(now + SPARSE_FOR), 64);
        assert_eq!(Depth::new(64).now(now), 64);
    }

    #[test]
    fn a_device_that_became_slower_is_not_starved_for_ever() {
        let (_, mut depth, mut now) = settles_at(8, 100, 64);
        let slow = Duration::from_millis(3);
        for _ in 0..10 {
            now = now + slow;
            depth.on_sparse_read(now, 4096, slow, 4, true);
        }
        assert_eq!(depth.now(now), DEPTH_MIN as usize);
        for _ in 0..6000 {
            now = now + slow;
            depth.on_sparse_read(now, 4096, slow, 4, true);
        }
        assert_eq!(depth.now(now), 64, "that is what it does now");
    }

    #[test]
    fn large_reads_and_a_device_that_has_one_at_a_time_tell_nothing() {
        let (mut depth, now) = (Depth::new(1), Instant::ZERO + Duration::from_secs(1));
        for ms in [1, 50, 1, 50] {
            depth.on_sparse_read(now, 4096, Duration::from_millis(ms), 1, true);
            depth.verify();
        }
        let mut depth = Depth::new(64);
        for ms in [1, 50, 1, 50] {
            depth.on_sparse_read(now, 1 << 20, Duration::from_millis(ms), 64, true);
        }
        assert_eq!(depth.now(now), 64);
    }
}
