//! Snapshots by schedule, as operators give them and the metadata store has them.

use crate::meta::Other;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

const HOUR_MS: u64 = 3_600_000;

const COUNT_MAX: u64 = 10_000;

/// A text that is no span of time.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NoSpan(String);

impl fmt::Display for NoSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is no span: write a number from 1 to {COUNT_MAX} and s, m, h, d or w, for example 1h", self.0)
    }
}

impl std::error::Error for NoSpan {}

/// A span as people write it: `30s`, `15m` or `15 min`, `1h`, `1d`, `2w`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Span {
    count: u64,
    unit: char,
}

impl Span {
    /// Of the unit that it is given in.
    pub fn unit_ms(self) -> u64 {
        match self.unit {
            's' => 1000,
            'm' => 60_000,
            'h' => HOUR_MS,
            'd' => 24 * HOUR_MS,
            _ => 7 * 24 * HOUR_MS,
        }
    }

    /// Of that unit.
    pub fn count(self) -> u64 {
        self.count
    }

    pub fn ms(self) -> u64 {
        self.count * self.unit_ms()
    }

    pub fn seconds(self) -> u64 {
        self.ms() / 1000
    }
}

impl FromStr for Span {
    type Err = NoSpan;

    fn from_str(text: &str) -> Result<Span, NoSpan> {
        let wrong = || NoSpan(text.to_string());
        let (digits, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
        let unit = match unit.trim() {
            "s" => 's',
            "m" | "min" => 'm',
            "h" => 'h',
            "d" => 'd',
            "w" => 'w',
            _ => return Err(wrong()),
        };
        let count: u64 = digits.parse().map_err(|_| wrong())?;
        if count == 0 || count > COUNT_MAX {
            return Err(wrong());
        }
        Ok(Span { count, unit })
    }
}

impl TryFrom<String> for Span {
    type Error = NoSpan;

    fn try_from(text: String) -> Result<Span, NoSpan> {
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

impl Keep {
    /// Of things made at these times, latest first, in milliseconds since 1970: those that a rule keeps. The first is.
    pub fn keeps(&self, made_ms: &[u64]) -> Vec<bool> {
        let mut kept: Vec<bool> = (0..made_ms.len()).map(|at| at == 0).collect();
        for rule in &self.0 {
            let (mut count, mut last) = (0, None);
            for (made_ms, is_kept) in made_ms.iter().zip(&mut kept) {
                let period = made_ms / rule.unit_ms();
                // Against its neighbour only: a jump of the clock begins another period, and takes none from others.
                if count < rule.count() && last != Some(period) {
                    *is_kept = true;
                    (count, last) = (count + 1, Some(period));
                }
            }
        }
        kept
    }
}

impl FromStr for Keep {
    type Err = NoSpan;

    fn from_str(text: &str) -> Result<Keep, NoSpan> {
        Ok(Keep(text.split(',').map(str::parse).collect::<Result<_, _>>()?))
    }
}

impl fmt::Display for Keep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let spans: Vec<String> = self.0.iter().map(Span::to_string).collect();
        f.write_str(&spans.join(","))
    }
}

/// `schedule/ID`: how often a volume is snapshotted, and which of these snapshots are kept.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ScheduleRecord {
    pub every: Span,
    pub keep: Keep,
    #[serde(flatten)]
    pub other: Other,
}

impl ScheduleRecord {
    pub fn new(every: Span, keep: Keep) -> ScheduleRecord {
        ScheduleRecord { every, keep, other: Other::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_read_as_they_are_written_and_odd_ones_are_refused() {
        for odd in ["", "h", "1", "0h", "1y", "-1h", "99999h"] {
            assert!(odd.parse::<Span>().unwrap_err().to_string().contains("for example 1h"), "{odd}");
        }
        assert_eq!("24h,7d,4w".parse::<Keep>().unwrap().to_string(), "24h,7d,4w");
        assert_eq!("15 min".parse::<Span>().unwrap().seconds(), 900);
    }
}
