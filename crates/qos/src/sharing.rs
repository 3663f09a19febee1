//! What the reactors of one host share: the window.
//!
//! Role: every 100 ms it hears the sums of each reactor and tells each its share. Nothing else crosses reactors; no request
//! waits for it. A reactor that is not heard of has the share that it had.
//!
//! The window is one for the host, since its reactors are in front of the same nodes and on the same cores. Reactors where
//! tenants wait have it by the weights of these. One where nothing waits may use as much as it uses.

use crate::cost::Cost;
use crate::latency::{Sample, Samples};
use crate::mutations::Mutations;
use crate::scheduler::{Share, Sums};
use crate::window::{Isolation, SPAN, WHOLE, WINDOW_MIN, Window};
use holdfast_base::{Effects, Instant};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// What a reactor has seen since its last sums.
    Sums {
        reactor: usize,
        sums: Sums,
    },
    Tick,
}

/// To be told to the reactor of that number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Effect {
    pub reactor: usize,
    pub share: Share,
}

/// The coordinator of one host.
#[derive(Debug)]
pub struct Sharing {
    reactors: Vec<Sums>,
    window: Window,
    next_at: Option<Instant>,
}

impl Sharing {
    pub fn new(reactors: usize, isolation: Isolation) -> Sharing {
        assert!(reactors > 0, "a host has a reactor");
        Sharing { reactors: vec![Sums::default(); reactors], window: Window::new(isolation), next_at: None }
    }

    pub fn handle(&mut self, now: Instant, event: Event, out: &mut Effects<Effect>) {
        match event {
            Event::Sums { reactor, sums } => self.on_sums(now, reactor, sums),
            Event::Tick => {
                if self.next_at.is_some_and(|at| at <= now) {
                    self.share_out(now, out);
                }
            }
        }
    }

    /// When shares are told next; `None` while all reactors rest.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.next_at
    }

    pub fn window(&self) -> Cost {
        self.window.units()
    }

    fn on_sums(&mut self, now: Instant, reactor: usize, sums: Sums) {
        let before = &mut self.reactors[reactor];
        // Nothing is lost of what was heard since shares were told last.
        let samples = std::array::from_fn(|sort| merged(before.samples[sort], sums.samples[sort]));
        *before = Sums { samples, was_full: before.was_full || sums.was_full, ..sums };
        if self.next_at.is_none() && sums.active > 0 {
            self.next_at = Some(now + SPAN);
            self.window.begin(now);
        }
    }

    fn share_out(&mut self, now: Instant, out: &mut Effects<Effect>) {
        let active: u32 = self.reactors.iter().map(|sums| sums.active).sum();
        self.next_at = (active > 0).then(|| now + SPAN);
        if active <= 1 {
            for (reactor, sums) in self.reactors.iter_mut().enumerate() {
                (sums.samples, sums.was_full) = (Samples::default(), false);
                out.push(Effect { reactor, share: Share::Unbounded });
            }
            return self.window.begin(now);
        }
        let mut samples = Samples::default();
        for sums in &self.reactors {
            samples = std::array::from_fn(|sort| merged(samples[sort], sums.samples[sort]));
        }
        if self.window.is_due(now, samples.iter().map(|sample| sample.count).sum()) {
            let was_full = self.reactors.iter().any(|sums| sums.was_full);
            let tightened = self.reactors.iter().map(|sums| sums.tightened).max().unwrap_or_default();
            self.window.end_span(now, &samples, was_full, WHOLE - tightened.min(WHOLE), Mutations::default());
            for sums in &mut self.reactors {
                (sums.samples, sums.was_full) = (Samples::default(), false);
            }
        }
        self.tell(out);
    }

    /// By waiting weight, of what reactors leave where nothing waits.
    fn tell(&self, out: &mut Effects<Effect>) {
        let units = self.window.units();
        let weight: u64 = self.reactors.iter().map(|sums| sums.waiting_weight).sum();
        let at_rest = self.reactors.iter().filter(|sums| sums.waiting_weight == 0);
        let used = at_rest.fold(Cost::ZERO, |sum, sums| sum + sums.in_service);
        let left = units.saturating_sub(used);
        let even = Cost(units.0 / self.reactors.len() as u64);
        for (reactor, sums) in self.reactors.iter().enumerate() {
            let share = if sums.waiting_weight == 0 {
                even
            } else {
                Cost((u128::from(left.0) * u128::from(sums.waiting_weight) / u128::from(weight)) as u64)
            };
            out.push(Effect { reactor, share: Share::Units(share.max(WINDOW_MIN)) });
        }
    }
}

/// One sample for two: its median is their mean, by how many each has.
fn merged(a: Sample, b: Sample) -> Sample {
    let count = a.count + b.count;
    if count == 0 {
        return Sample::default();
    }
    let sum = u128::from(a.median_nanos) * u128::from(a.count) + u128::from(b.median_nanos) * u128::from(b.count);
    Sample { median_nanos: (sum / u128::from(count)) as u64, count }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sums(waiting_weight: u64, active: u32, in_service: u64) -> Sums {
        Sums {
            waiting_weight,
            active,
            in_service: Cost::units(in_service),
            was_full: waiting_weight > 0,
            ..Sums::default()
        }
    }

    fn shares(sharing: &mut Sharing, now: Instant, of: &[Sums]) -> Vec<Share> {
        let mut out = Effects::new();
        for (reactor, sums) in of.iter().enumerate() {
            sharing.handle(now, Event::Sums { reactor, sums: *sums }, &mut out);
        }
        let at = sharing.next_deadline().expect("somebody is active");
        sharing.handle(at, Event::Tick, &mut out);
        out.take().into_iter().map(|effect| effect.share).collect()
    }

    #[test]
    fn the_window_is_shared_out_by_waiting_weight() {
        let mut sharing = Sharing::new(3, Isolation::Balanced);
        let window = sharing.window();
        let told = shares(&mut sharing, Instant(5), &[sums(100, 1, 10), sums(300, 2, 10), sums(0, 1, 4)]);
        let part = |n: u64| Share::Units(Cost((window.0 - Cost::units(4).0) * n / 4));
        assert_eq!(told, [part(1), part(3), Share::Units(Cost(window.0 / 3))]);
    }

    #[test]
    fn who_is_alone_on_the_host_has_no_window_and_rest_is_quiet() {
        let mut sharing = Sharing::new(2, Isolation::Balanced);
        assert_eq!(sharing.next_deadline(), None);
        assert_eq!(shares(&mut sharing, Instant(5), &[sums(0, 1, 300), sums(0, 0, 0)]), [Share::Unbounded; 2]);
        let told = shares(&mut sharing, Instant(500_000_000), &[sums(0, 0, 0), sums(0, 0, 0)]);
        assert_eq!((told, sharing.next_deadline()), (vec![Share::Unbounded; 2], None));
    }
}
