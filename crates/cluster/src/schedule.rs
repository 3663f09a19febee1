//! Which snapshots are due, and which are kept: by those that are there.
//!
//! A clock may be wrong for a while, in either direction. Snapshots are therefore in the order in which they were taken (that
//! of their layers), whatever their dates say; one that is dated ahead holds up none, and makes no other one old.

use holdfast_format::schedule::ScheduleRecord;

/// Of names of snapshots by schedule; others are never deleted by one.
pub const PREFIX: &str = "auto-";

/// Clocks of hosts that are kept right differ by less.
pub const SKEW_MS: u64 = 60_000;

/// A snapshot as its volume has it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Snapshot {
    pub name: String,
    /// They rise as snapshots are taken.
    pub layer: u32,
    /// By the clock of the host that took it, since 1970.
    pub created_ms: u64,
}

/// Whether another one is to be taken now.
pub fn is_due(schedule: &ScheduleRecord, snapshots: &[Snapshot], now_ms: u64) -> bool {
    let Some(newest) = newest(snapshots) else { return true };
    is_ahead(newest, now_ms) || now_ms.saturating_sub(newest.created_ms) >= schedule.every.ms()
}

/// Names of those that no rule keeps. The newest always stays.
pub fn superfluous(schedule: &ScheduleRecord, snapshots: &[Snapshot]) -> Vec<String> {
    let mut latest_first: Vec<&Snapshot> = ours(snapshots).collect();
    latest_first.sort_by_key(|s| std::cmp::Reverse(s.layer));
    let made_ms: Vec<u64> = latest_first.iter().map(|s| s.created_ms).collect();
    let kept = schedule.keep.keeps(&made_ms);
    latest_first.iter().zip(kept).filter(|(_, is_kept)| !is_kept).map(|(s, _)| s.name.clone()).collect()
}

/// The one that was taken last by schedule, where it is dated further ahead than clocks may differ: the clock was wrong then, or
/// is now.
pub fn ahead(snapshots: &[Snapshot], now_ms: u64) -> Option<&Snapshot> {
    newest(snapshots).filter(|newest| is_ahead(newest, now_ms))
}

/// The one that was taken last by schedule.
pub fn newest(snapshots: &[Snapshot]) -> Option<&Snapshot> {
    ours(snapshots).max_by_key(|s| s.layer)
}

fn is_ahead(snapshot: &Snapshot, now_ms: u64) -> bool {
    snapshot.created_ms > now_ms.saturating_add(SKEW_MS)
}

fn ours(snapshots: &[Snapshot]) -> impl Iterator<Item = &Snapshot> {
    snapshots.iter().filter(|s| s.name.starts_with(PREFIX))
}

/// `auto-` and the time in UTC, to the second.
pub fn name_at(now_ms: u64) -> String {
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

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR_MS: u64 = 3_600_000;

    fn at(layer: usize, created_ms: u64) -> Snapshot {
        Snapshot { name: name_at(created_ms), layer: layer as u32, created_ms }
    }

    fn schedule(every: &str, keep: &str) -> ScheduleRecord {
        ScheduleRecord::new(every.parse().unwrap(), keep.parse().unwrap())
    }

    /// Taken in this order, by what the clock said then.
    fn taken(times_ms: &[u64]) -> Vec<Snapshot> {
        times_ms.iter().enumerate().map(|(layer, created_ms)| at(layer, *created_ms)).collect()
    }

    #[test]
    fn each_rule_keeps_the_newest_of_its_periods() {
        let schedule = schedule("1h", "3h,2d");
        // Every half an hour for four days.
        let start = 20_000 * 24 * HOUR_MS;
        let all: Vec<u64> = (0..4 * 48).map(|i| start + i * HOUR_MS / 2).collect();
        let all = taken(&all);
        let dropped = superfluous(&schedule, &all);
        let kept: Vec<u64> = all.iter().filter(|s| !dropped.contains(&s.name)).map(|s| s.created_ms - start).collect();
        let half = HOUR_MS / 2;
        // The last of the third day; of the fourth day the last of three hours.
        assert_eq!(kept, [143 * half, 187 * half, 189 * half, 191 * half]);
        assert_eq!(superfluous(&schedule, &all[..1]), Vec::<String>::new());
        let mut others = all.clone();
        others.iter_mut().for_each(|s| s.name = format!("mine-{}", s.created_ms));
        assert_eq!(superfluous(&schedule, &others), Vec::<String>::new(), "what it didn't take stays");
    }

    #[test]
    fn a_snapshot_is_due_when_the_newest_is_old_enough() {
        let schedule = schedule("15m", "3h");
        assert!(is_due(&schedule, &[], 5));
        let taken = taken(&[HOUR_MS, 2 * HOUR_MS]);
        assert!(!is_due(&schedule, &taken, 2 * HOUR_MS + 14 * 60_000));
        assert!(is_due(&schedule, &taken, 2 * HOUR_MS + 15 * 60_000));
    }

    #[test]
    fn a_clock_that_was_wrong_for_a_while_holds_up_no_snapshot() {
        let schedule = schedule("15m", "3h");
        let (now, year, quarter) = (20_000 * 24 * HOUR_MS, 365 * 24 * HOUR_MS, HOUR_MS / 4);
        let ahead = taken(&[now - HOUR_MS, now + year]);
        assert!(is_due(&schedule, &ahead, now), "what is dated in a year says nothing of today");
        let goes_on = taken(&[now - HOUR_MS, now + year, now]);
        assert!(!is_due(&schedule, &goes_on, now + quarter - 1));
        assert!(is_due(&schedule, &goes_on, now + quarter));
        // The other host's clock is a little ahead of this one's.
        assert!(!is_due(&schedule, &taken(&[now + 1000]), now));
        let behind = taken(&[now, 0]);
        assert!(!is_due(&schedule, &behind, quarter - 1));
        assert!(is_due(&schedule, &behind, now));
    }

    #[test]
    fn a_clock_that_was_wrong_for_a_while_has_no_snapshot_deleted_early() {
        let schedule = schedule("1h", "4h");
        let (start, year) = (20_000 * 24 * HOUR_MS, 365 * 24 * HOUR_MS);
        for jumped in [start + year, 0] {
            // Two hours by a wrong clock, between hours by the right one.
            let mut times = vec![start, start + HOUR_MS, jumped, jumped + HOUR_MS];
            let kept = |times: &[u64]| {
                let all = taken(times);
                let dropped = superfluous(&schedule, &all);
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
    fn names_tell_the_time() {
        assert_eq!(name_at(0), "auto-19700101-000000");
        assert_eq!(name_at(1_709_208_000_000), "auto-20240229-120000");
        assert_eq!(name_at(1_795_305_599_000), "auto-20261121-235959");
    }
}
