//! Lines on standard error, for people and for the torture runs: INFO what happened, WARN what heals by itself but
//! should be known, ERROR what a person must act on. Nothing on the I/O path logs.

use std::fmt;
use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Level {
    Info,
    Warn,
    Error,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Level::Info => "INFO ",
            Level::Warn => "WARN ",
            Level::Error => "ERROR",
        })
    }
}

pub fn log(level: Level, text: fmt::Arguments<'_>) {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let line = format!("{} {level} {}\n", utc(since.as_secs(), since.subsec_millis()), one_line(text.to_string()));
    // Where standard error is gone there is nobody left to tell.
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// What is told of has names in it, and parts of what strangers sent: none of them begins a line, or moves a terminal's cursor.
fn one_line(text: String) -> String {
    if !text.contains(char::is_control) {
        return text;
    }
    let mut line = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() { line.extend(c.escape_default()) } else { line.push(c) }
    }
    line
}

pub fn info(text: fmt::Arguments<'_>) {
    log(Level::Info, text);
}

pub fn warn(text: fmt::Arguments<'_>) {
    log(Level::Warn, text);
}

pub fn error(text: fmt::Arguments<'_>) {
    log(Level::Error, text);
}

/// Of several who see the same, one tells.
#[derive(Clone, Copy)]
pub struct Voice {
    tells: bool,
}

impl Voice {
    pub fn new(tells: bool) -> Voice {
        Voice { tells }
    }

    fn log(self, level: Level, text: fmt::Arguments<'_>) {
        if self.tells {
            log(level, text);
        }
    }

    pub fn info(self, text: fmt::Arguments<'_>) {
        self.log(Level::Info, text);
    }

    pub fn warn(self, text: fmt::Arguments<'_>) {
        self.log(Level::Warn, text);
    }

    pub fn error(self, text: fmt::Arguments<'_>) {
        self.log(Level::Error, text);
    }
}

/// The day in UTC of a time in seconds since 1970.
pub fn date(seconds: u64) -> String {
    utc(seconds, 0)[..10].to_string()
}

/// The same, with the time of day.
pub fn moment(seconds: u64) -> String {
    let text = utc(seconds, 0);
    format!("{} {} UTC", &text[..10], &text[11..16])
}

/// RFC 3339 in UTC. Days to a date as in Howard Hinnant's `civil_from_days`.
fn utc(seconds: u64, millis: u32) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let shifted = days + 719_468;
    let era = shifted / 146_097;
    let day_of_era = shifted % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
}

#[cfg(test)]
mod tests {
    use super::{one_line, utc};

    #[test]
    fn nobody_writes_a_line_of_their_own() {
        let told = one_line("volume a\n2026-11-30T00:00:00.000Z ERROR b\u{1b}[2J\u{9b}ü is gone".to_string());
        assert_eq!(told, "volume a\\n2026-11-30T00:00:00.000Z ERROR b\\u{1b}[2J\\u{9b}ü is gone");
        assert_eq!(one_line("`ü` is \"so\"".to_string()), "`ü` is \"so\"");
    }

    #[test]
    fn dates_are_right_over_leap_years() {
        assert_eq!(utc(0, 7), "1970-01-01T00:00:00.007Z");
        assert_eq!(super::date(951_782_400), "2000-02-29");
        assert_eq!(super::moment(1_795_241_312), "2026-11-21 06:08 UTC");
        assert_eq!(utc(951_782_400, 0), "2000-02-29T00:00:00.000Z");
        assert_eq!(utc(1_795_241_312, 0), "2026-11-21T06:08:32.000Z");
    }
}
