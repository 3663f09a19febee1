//! How long requests take from *go* to *done*: medians by kind and size.
//!
//! By kind and size, since a mixture that changes moves the median of all without any queue: a megabyte takes longer than
//! 4 KiB, and a write longer than a read.

use crate::cost::Kind;

/// Reads and writes, up to 16 KiB, up to 128 KiB, and above.
pub const SORTS: usize = 6;

/// Eight to a doubling, from 256 ns to 134 s.
const BUCKETS: usize = 224;

/// Of one sort of requests in one span.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sample {
    pub median_nanos: u64,
    pub count: u64,
}

pub type Samples = [Sample; SORTS];

/// Sort of a request whose time says something of queues.
pub(crate) fn sort_of(kind: Kind, bytes: u64) -> Option<usize> {
    let size = usize::from(bytes > 16 << 10) + usize::from(bytes > 128 << 10);
    match kind {
        Kind::Read => Some(size),
        Kind::Write => Some(size + 3),
        Kind::Discard | Kind::Flush => None,
    }
}

/// Counts of one span.
#[derive(Debug)]
pub(crate) struct Latencies {
    counts: Box<[[u32; BUCKETS]; SORTS]>,
    total: u64,
}

impl Default for Latencies {
    fn default() -> Latencies {
        Latencies { counts: Box::new([[0; BUCKETS]; SORTS]), total: 0 }
    }
}

fn bucket_of(nanos: u64) -> usize {
    let ticks = nanos >> 8;
    if ticks < 8 {
        return ticks as usize;
    }
    let exponent = ticks.ilog2() as usize;
    let step = (ticks >> (exponent - 3)) as usize & 7;
    ((exponent - 2) * 8 + step).min(BUCKETS - 1)
}

/// The middle of a bucket.
fn nanos_of(bucket: usize) -> u64 {
    if bucket < 8 {
        return ((bucket as u64) << 8) + 128;
    }
    let (exponent, step) = (bucket / 8 + 2, bucket as u64 % 8);
    ((2 * (8 + step) + 1) << (exponent - 3)) << 7
}

impl Latencies {
    pub fn count(&mut self, sort: usize, nanos: u64) {
        let count = &mut self.counts[sort][bucket_of(nanos)];
        *count = count.saturating_add(1);
        self.total += 1;
    }

    pub fn total(&self) -> u64 {
        self.total
    }

    /// Medians of what was counted; begins anew.
    pub fn take(&mut self) -> Samples {
        let samples = std::array::from_fn(|sort| sample(&self.counts[sort]));
        self.clear();
        samples
    }

    pub fn clear(&mut self) {
        if self.total > 0 {
            self.counts.iter_mut().for_each(|counts| counts.fill(0));
            self.total = 0;
        }
    }
}

fn sample(counts: &[u32; BUCKETS]) -> Sample {
    let total: u64 = counts.iter().map(|count| u64::from(*count)).sum();
    let mut seen = 0;
    let median = counts.iter().position(|count| {
        seen += u64::from(*count);
        seen > 0 && 2 * seen >= total
    });
    Sample { median_nanos: median.map_or(0, nanos_of), count: total }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_follow_each_other_and_hold_their_middle() {
        for bucket in 0..BUCKETS {
            assert_eq!(bucket_of(nanos_of(bucket)), bucket);
        }
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
        for nanos in (1..10_000_000).step_by(997) {
            let middle = nanos_of(bucket_of(nanos));
            assert!(nanos.abs_diff(middle) <= nanos / 15 + 128, "{nanos} in the bucket of {middle}");
        }
    }

    #[test]
    fn each_sort_has_a_median_of_its_own() {
        let mut latencies = Latencies::default();
        let (small, large) = (sort_of(Kind::Read, 4096).unwrap(), sort_of(Kind::Write, 1 << 20).unwrap());
        for n in 1..=101 {
            latencies.count(small, n * 1_000_000);
            latencies.count(large, 1_000_000_000);
        }
        assert_eq!((latencies.total(), sort_of(Kind::Flush, 0)), (202, None));
        let samples = latencies.take();
        assert_eq!(samples[small].count, 101);
        assert!(samples[small].median_nanos.abs_diff(51_000_000) < 51_000_000 / 15);
        assert!(samples[large].median_nanos.abs_diff(1_000_000_000) < 1_000_000_000 / 15);
        assert_eq!(latencies.take(), Samples::default());
    }
}
