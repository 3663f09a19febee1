//! The two clocks: monotonic, for machines and timers, and wall, for leases that outlive a process.

use holdfast_base::Instant;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The monotonic clock of this machine, which every thread and process of it shares.
pub fn now() -> Instant {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Instant(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64)
}

/// Time since 1970; zero where the machine's clock stands before that.
pub fn wall() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// The same in milliseconds.
pub fn wall_ms() -> u64 {
    wall().as_millis() as u64
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_clock_does_not_go_back() {
        let a = super::now();
        assert!(super::now() >= a);
        assert!(super::wall().as_secs() > 1_600_000_000);
    }
}
