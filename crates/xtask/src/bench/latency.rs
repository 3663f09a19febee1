//! Latencies of single requests, from fio's logs, by the time at which they were completed.

use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;

pub const SECOND_MS: u64 = 1000;

#[derive(Clone, Copy)]
pub struct Completion {
    /// Since 1970.
    pub at_ms: u64,
    pub us: f64,
}

/// How long the requests of a phase took.
pub struct Spread {
    pub p99_us: f64,
    /// Of the seconds' own p99.
    pub median_second_us: f64,
    pub worst_second_us: f64,
    pub per_second: f64,
}

/// A line: milliseconds, nanoseconds taken, direction, size, offset.
pub fn read_log(path: &Path) -> Result<Vec<Completion>> {
    let file = std::fs::File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut completions = Vec::new();
    for line in BufReader::new(file).lines() {
        let line = line?;
        let mut fields = line.split(", ");
        // fio may have been stopped in the middle of a line.
        let (Some(Ok(at_ms)), Some(Ok(ns))) = (fields.next().map(str::parse), fields.next().map(str::parse::<f64>))
        else {
            continue;
        };
        completions.push(Completion { at_ms, us: ns / 1e3 });
    }
    Ok(completions)
}

/// `None` where there is nothing.
pub fn p99_us<'a>(completions: impl IntoIterator<Item = &'a Completion>) -> Option<f64> {
    let mut values: Vec<f64> = completions.into_iter().map(|c| c.us).collect();
    values.sort_by(f64::total_cmp);
    let index = (values.len() * 99).div_ceil(100).checked_sub(1)?;
    values.get(index).copied()
}

/// The completions of `from_ms..to_ms`; `None` where no whole second lies in there, or a second has no completions.
pub fn spread(completions: &[Completion], from_ms: u64, to_ms: u64) -> Option<Spread> {
    let seconds = to_ms.checked_sub(from_ms)? / SECOND_MS;
    let mut by_second: BTreeMap<u64, Vec<Completion>> = BTreeMap::new();
    for completion in completions.iter().filter(|c| (from_ms..from_ms + seconds * SECOND_MS).contains(&c.at_ms)) {
        by_second.entry((completion.at_ms - from_ms) / SECOND_MS).or_default().push(*completion);
    }
    let p99s: Vec<f64> = by_second.values().filter_map(p99_us).collect();
    let all = by_second.values().flatten();
    Some(Spread {
        per_second: all.clone().count() as f64 / seconds as f64,
        p99_us: p99_us(all)?,
        median_second_us: median(&p99s)?,
        worst_second_us: p99s.iter().copied().fold(0.0, f64::max),
    })
}

pub fn median(values: &[f64]) -> Option<f64> {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

pub fn max(values: &[f64]) -> f64 {
    values.iter().copied().fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_is_cut_into_seconds() {
        let at = |at_ms: u64, us: f64| Completion { at_ms, us };
        let mut completions: Vec<Completion> = (0..1000).map(|i| at(5000 + i, 10.0)).collect();
        completions.extend((0..1000).map(|i| at(6000 + i, if i < 20 { 500.0 } else { 10.0 })));
        completions.push(at(7000, 9000.0));
        let spread = spread(&completions, 5000, 7000).unwrap();
        assert_eq!((spread.p99_us, spread.worst_second_us, spread.per_second), (10.0, 500.0, 1000.0));
        assert!(super::spread(&completions, 5000, 5999).is_none());
        assert!(super::spread(&completions, 9000, 11000).is_none());
    }
}
