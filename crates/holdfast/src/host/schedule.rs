//! Snapshots by schedule, and which of them are kept.
//!
//! ```text
//! schedule/ID            (metadata) how often, and what is kept
//! ```
//! Role: a thread of its own looks every few seconds which volumes in service are due. Its snapshots are called
//! `auto-` and the time; others are never deleted by it. It keeps no state: what is due follows from the snapshots that are there.
//!
//! Faults: a clock may be wrong for a while, in either direction. Snapshots are therefore in the order in which they were taken
//! (that of their layers), whatever their dates say; one that is dated ahead holds up none, and makes no other one old.

use super::commands::Wanted;
use super::control::ControlPlane;
use crate::logger;
use crate::protocol::SnapshotInfo;
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Pace of looking.
const PACE: Duration = Duration::from_secs(2);

const PREFIX: &str = "auto-";

const HOUR_MS: u64 = 3_600_000;

/// Clocks of hosts that are kept right differ by less.
const SKEW_MS: u64 = 60_000;

/// A span as people write it: `30s`, `15m` or `15 min`, `1h`, `1d`, `2w`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Span {
    count: u64,
    unit: char,
}

impl Span {
    fn unit_ms(self) -> u64 {
        match self.unit {
            's' => 1000,
            'm' => 60_000,
            'h' => HOUR_MS,
            'd' => 24 * HOUR_MS,
            _ => 7 * 24 * HOUR_MS,
        }
    }

    fn ms(self) -> u64 {
        self.count * self.unit_ms()
    }

    pub fn seconds(self) -> u64 {
        self.ms() / 1000
    }
}

impl FromStr for Span {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Span> {
        let wrong = || format!("`{text}` is no span: write a number and s, m, h, d or w, for example 1h");
        let (digits, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
        let unit = match unit.trim() {
            "s" => 's',
            "m" | "min" => 'm',
            "h" => 'h',
            "d" => 'd',
            "w" => 'w',
            _ => bail!(wrong()),
        };
        let count: u64 = digits.parse().ok().with_context(wrong)?;
        if count == 0 || count > 10_000 {
            bail!("{}; from 1 to 10000", wrong());
        }
        Ok(Span { count, unit })
    }
}

impl TryFrom<String> for Span {
    type Error = anyhow::Error;

    fn try_from(text: String) -> Result<Span> {
        text.parse()
    }
}

impl From<Span> for String {
    fn from(span: Span) -> String {
        span.to_string()
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.count, self.unit)
    }
}

/// `24h,7d,4w`: of each of the last 24 hours that have any the newest, and so on.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Keep(Vec<Span>);

impl FromStr for Keep {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Keep> {
        Ok(Keep(text.split(',').map(str::parse).collect::<Result<_>>()?))
    }
}

impl fmt::Display for Keep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let spans: Vec<String> = self.0.iter().map(Span::to_string).collect();
        f.write_str(&spans.join(","))
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Schedule {
    pub every: Span,
    pub keep: Keep,
}

impl Schedule {
    fn is_due(&self, snapshots: &[SnapshotInfo], now_ms: u64) -> bool {
        let Some(newest) = newest(snapshots) else { return true };
        is_ahead(newest, now_ms) || now_ms.saturating_sub(newest.created_ms) >= self.every.ms()
    }

    /// Names of those that no rule keeps. The newest always stays.
    fn superfluous(&self, snapshots: &[SnapshotInfo]) -> Vec<String> {
        let mut latest_first: Vec<&SnapshotInfo> = ours(snapshots).collect();
        latest_first.sort_by_key(|s| std::cmp::Reverse(s.layer));
        let mut kept: BTreeSet<&str> = latest_first.first().map(|s| s.name.as_str()).into_iter().collect();
        for rule in &self.keep.0 {
            let (mut count, mut last) = (0, None);
            for snapshot in &latest_first {
                let period = snapshot.created_ms / rule.unit_ms();
                // Against its neighbour only: a jump of the clock begins another period, and takes none from others.
                if count < rule.count && last != Some(period) {
                    kept.insert(&snapshot.name);
                    (count, last) = (count + 1, Some(period));
                }
            }
        }
        latest_first.iter().filter(|s| !kept.contains(s.name.as_str())).map(|s| s.name.clone()).collect()
    }
}

fn newest(snapshots: &[SnapshotInfo]) -> Option<&SnapshotInfo> {
    ours(snapshots).max_by_key(|s| s.layer)
}

/// More than hosts' clocks may differ: the clock was wrong then, or is now.
fn is_ahead(snapshot: &SnapshotInfo, now_ms: u64) -> bool {
    snapshot.created_ms > now_ms.saturating_add(SKEW_MS)
}

fn ours(snapshots: &[SnapshotInfo]) -> impl Iterator<Item = &SnapshotInfo> {
    snapshots.iter().filter(|s| s.name.starts_with(PREFIX))
}

/// `auto-` and the time in UTC, to the second.
fn name_at(now_ms: u64) -> String {
    let seconds = now_ms / 1000;
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    format!("{PREFIX}{year:04}{month:02}{day:02}-{:02}{:02}{:02}", rest / 3600, rest / 60 % 60, rest % 60)
}

/// Year, month and day of a day since 1970 (the proleptic Gregorian calendar in eras of 400 years).
fn civil(days: u64) -> (u64, u64, u64) {
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    (year_of_era + era * 400 + u64::from(month <= 2), month, day)
}

pub(super) fn start(plane: Arc<ControlPlane>) -> Result<()> {
    let look = move || loop {
        std::thread::sleep(PACE);
        if let Err(error) = plane.follow_schedules() {
            logger::warn(format_args!("snapshots by schedule: {error:#}"));
        }
    };
    std::thread::Builder::new().name("schedule".to_string()).spawn(look).context("no thread for schedules")?;
    Ok(())
}

impl ControlPlane {
    fn follow_schedules(&self) -> Result<()> {
        for (id, schedule) in self.catalog.schedules()? {
            let Some(entry) = self.catalog.entry(id)?.filter(|entry| !entry.root.deleted) else { continue };
            let name = entry.name().to_string();
            let _alone = self.alone();
            // What is open for care or a stream is nobody's to look at.
            if !self.catalog.entry(id)?.is_some_and(|entry| self.catalog.is_here(&entry)) {
                continue;
            }
            let Some(live) = self.show(&name)?.live else { continue };
            let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let now_ms = since_1970.as_millis() as u64;
            if schedule.is_due(&live.snapshots, now_ms) {
                if let Some(ahead) = newest(&live.snapshots).filter(|newest| is_ahead(newest, now_ms)) {
                    logger::warn(format_args!(
                        "snapshot {name}@{} is dated ahead of this machine's clock: that was wrong when it was taken, or is now \
                         (`timedatectl` shows whether it is kept right); the schedule goes on",
                        ahead.name
                    ));
                }
                self.change(&name, Wanted::Snapshot { name: name_at(now_ms) })
                    .with_context(|| format!("volume {name} gets no snapshot"))?;
            }
            for old in schedule.superfluous(&live.snapshots) {
                // One that is being read is deleted another time.
                let _ = self.change(&name, Wanted::DropSnapshot { name: old });
            }
        }
        Ok(())
    }

    /// Has a volume snapshotted by schedule, or ends that.
    pub(super) fn set_schedule(&self, name: &str, schedule: Option<&Schedule>) -> Result<()> {
        let entry = self.catalog.find(name)?;
        self.catalog.set_schedule(entry.id(), schedule)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(layer: usize, created_ms: u64) -> SnapshotInfo {
        let (name, layer) = (name_at(created_ms), layer as u32);
        SnapshotInfo { name, layer, created_ms, size_bytes: 1, uris: Vec::new(), shares: None }
    }

    /// Taken in this order, by what the clock said then.
    fn taken(times_ms: &[u64]) -> Vec<SnapshotInfo> {
        times_ms.iter().enumerate().map(|(layer, created_ms)| at(layer, *created_ms)).collect()
    }

    #[test]
    fn each_rule_keeps_the_newest_of_its_periods() {
        let schedule = Schedule { every: "1h".parse().unwrap(), keep: "3h,2d".parse().unwrap() };
        // Every half an hour for four days.
        let start = 20_000 * 24 * HOUR_MS;
        let all: Vec<u64> = (0..4 * 48).map(|i| start + i * HOUR_MS / 2).collect();
        let all = taken(&all);
        let dropped = schedule.superfluous(&all);
        let kept: Vec<u64> = all.iter().filter(|s| !dropped.contains(&s.name)).map(|s| s.created_ms - start).collect();
        let half = HOUR_MS / 2;
        // The last of the third day; of the fourth day the last of three hours.
        assert_eq!(kept, [143 * half, 187 * half, 189 * half, 191 * half]);
        assert_eq!(schedule.superfluous(&all[..1]), Vec::<String>::new());
        let mut others = all.clone();
        others.iter_mut().for_each(|s| s.name = format!("mine-{}", s.created_ms));
        assert_eq!(schedule.superfluous(&others), Vec::<String>::new(), "what it didn't take stays");
    }

    #[test]
    fn a_snapshot_is_due_when_the_newest_is_old_enough() {
        let schedule = Schedule { every: "15m".parse().unwrap(), keep: "3h".parse().unwrap() };
        assert!(schedule.is_due(&[], 5));
        let taken = taken(&[HOUR_MS, 2 * HOUR_MS]);
        assert!(!schedule.is_due(&taken, 2 * HOUR_MS + 14 * 60_000));
        assert!(schedule.is_due(&taken, 2 * HOUR_MS + 15 * 60_000));
    }

    #[test]
    fn a_clock_that_was_wrong_for_a_while_holds_up_no_snapshot() {
        let schedule = Schedule { every: "15m".parse().unwrap(), keep: "3h".parse().unwrap() };
        let (now, year, quarter) = (20_000 * 24 * HOUR_MS, 365 * 24 * HOUR_MS, HOUR_MS / 4);
        let ahead = taken(&[now - HOUR_MS, now + year]);
        assert!(schedule.is_due(&ahead, now), "what is dated in a year says nothing of today");
        let goes_on = taken(&[now - HOUR_MS, now + year, now]);
        assert!(!schedule.is_due(&goes_on, now + quarter - 1));
        assert!(schedule.is_due(&goes_on, now + quarter));
        // The other host's clock is a little ahead of this one's.
        assert!(!schedule.is_due(&taken(&[now + 1000]), now));
        let behind = taken(&[now, 0]);
        assert!(!schedule.is_due(&behind, quarter - 1));
        assert!(schedule.is_due(&behind, now));
    }

    #[test]
    fn a_clock_that_was_wrong_for_a_while_has_no_snapshot_deleted_early() {
        let schedule = Schedule { every: "1h".parse().unwrap(), keep: "4h".parse().unwrap() };
        let (start, year) = (20_000 * 24 * HOUR_MS, 365 * 24 * HOUR_MS);
        for jumped in [start + year, 0] {
            // Two hours by a wrong clock, between hours by the right one.
            let mut times = vec![start, start + HOUR_MS, jumped, jumped + HOUR_MS];
            let kept = |times: &[u64]| {
                let all = taken(times);
                let dropped = schedule.superfluous(&all);
                all.iter().filter(|s| !dropped.contains(&s.name)).map(|s| s.layer).collect::<Vec<_>>()
            };
            assert_eq!(kept(&times), [0, 1, 2, 3]);
            times.extend([start + 4 * HOUR_MS, start + 5 * HOUR_MS]);
            assert_eq!(kept(&times), [2, 3, 4, 5], "always those that were taken last");
            times.extend([start + 6 * HOUR_MS, start + 7 * HOUR_MS]);
            assert_eq!(kept(&times), [4, 5, 6, 7]);
        }
    }

    #[test]
    fn names_tell_the_time_and_odd_spans_are_refused() {
        assert_eq!(name_at(0), "auto-19700101-000000");
        assert_eq!(name_at(1_709_208_000_000), "auto-20240229-120000");
        assert_eq!(name_at(1_795_305_599_000), "auto-20261121-235959");
        for odd in ["", "h", "1", "0h", "1y", "-1h", "99999h"] {
            assert!(odd.parse::<Span>().unwrap_err().to_string().contains("for example 1h"), "{odd}");
        }
        assert_eq!("24h,7d,4w".parse::<Keep>().unwrap().to_string(), "24h,7d,4w");
    }
}
