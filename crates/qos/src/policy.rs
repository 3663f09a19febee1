//! A tenant's policy, and its text: `floor=2000,weight=400,limit=5000/100M,burst=3000/60s,latency=2ms`.
//!
//! `iops=5000,bytes=100MiB` is the limit in the words of the filter that was there before, and is read, too.

use holdfast_base::size::Size;
use holdfast_base::time::span_of;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Longest text: it stands in lists and in a record.
const TEXT_LEN_MAX: usize = 400;

pub const WEIGHT_DEFAULT: u32 = 100;
pub const WEIGHT_MAX: u32 = 1000;

/// Unused limit that may follow at once, if nothing is said.
pub const BURST_DEFAULT: Duration = Duration::from_secs(1);

/// A rate that no machine has, so that sums of them fit.
const RATE_MAX: u64 = 1 << 40;

/// Beyond the limit, what a tenant may ask that asked less before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Burst {
    /// Of unused time, so much may follow at once: `burst=2s`.
    Span(Duration),
    /// Each second below the limit saves one in which so many requests more may pass, up to so many seconds: `burst=3000/60s`.
    Credits { more: u64, most: Duration },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Policy {
    /// Requests of 8 KiB a second that it gets if it asks for them.
    pub floor: Option<u64>,
    /// Share of what floors leave, to others' weights; 1 to [`WEIGHT_MAX`].
    pub weight: u32,
    /// Requests a second at most.
    pub iops: Option<u64>,
    /// Bytes read and written a second at most.
    pub bytes: Option<u64>,
    pub burst: Burst,
    /// Of 100 requests one may take longer.
    pub latency: Option<Duration>,
}

impl Default for Policy {
    fn default() -> Policy {
        let burst = Burst::Span(BURST_DEFAULT);
        Policy { floor: None, weight: WEIGHT_DEFAULT, iops: None, bytes: None, burst, latency: None }
    }
}

/// Why a text makes no policy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PolicyError {
    UnknownKey { key: String },
    Twice { key: String },
    NoValue { key: String },
    Bad { key: String, value: String, wants: &'static str },
    FloorOverLimit { floor: u64, iops: u64 },
    BurstWithoutLimit { burst: String, wants: &'static str },
    TooLong,
}

impl fmt::Display for PolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PolicyError::UnknownKey { key } => write!(
                f,
                "`{key}` is nothing that a policy says; it takes floor, weight, limit, burst and latency, for example \
                 floor=2000,weight=400,limit=5000/100M"
            ),
            PolicyError::Twice { key } => write!(f, "`{key}` is said twice; leave one of them"),
            PolicyError::NoValue { key } => write!(f, "`{key}` has no value; write {key}=VALUE"),
            PolicyError::Bad { key, value, wants } => write!(f, "{key}={value} can't be used: it wants {wants}"),
            PolicyError::FloorOverLimit { floor, iops } => write!(
                f,
                "floor={floor} promises more than limit={iops} lets pass; lower the floor to {iops} or raise the limit to {floor}"
            ),
            PolicyError::BurstWithoutLimit { burst, wants } => {
                write!(f, "burst={burst} goes beyond a limit, and there is none; add {wants}, or leave the burst out")
            }
            PolicyError::TooLong => {
                write!(f, "a policy is told in at most {TEXT_LEN_MAX} characters; leave out what is default")
            }
        }
    }
}

impl std::error::Error for PolicyError {}

const WANTS_COUNT: &str = "a number of requests a second, from 1 on";
const WANTS_WEIGHT: &str = "a number from 1 to 1000; 100 is what a volume has that says nothing";
const WANTS_LIMIT: &str = "requests a second, bytes a second after a slash, or both: 5000, /100M or 5000/100M";
const WANTS_BYTES: &str = "bytes a second, for example 512KiB or 100M";
const WANTS_BURST: &str = "a time, for example 2s, or requests a second beyond the limit and for how long: 3000/60s";
const WANTS_LATENCY: &str = "a time from 10us to a minute, for example 500us or 2ms";

const LATENCY_MIN: Duration = Duration::from_micros(10);
const LATENCY_MAX: Duration = Duration::from_secs(60);

impl FromStr for Policy {
    type Err = PolicyError;

    /// An empty text is the policy of a tenant that nothing is said of.
    fn from_str(text: &str) -> Result<Policy, PolicyError> {
        if text.len() > TEXT_LEN_MAX {
            return Err(PolicyError::TooLong);
        }
        let mut fields = Fields::of(text)?;
        let mut policy = Policy {
            floor: fields.parse("floor", WANTS_COUNT, rate)?,
            weight: fields.parse("weight", WANTS_WEIGHT, weight)?.unwrap_or(WEIGHT_DEFAULT),
            ..Policy::default()
        };
        (policy.iops, policy.bytes) = fields.parse("limit", WANTS_LIMIT, limit)?.unwrap_or_default();
        for (key, taken) in [("iops", policy.iops.is_some()), ("bytes", policy.bytes.is_some())] {
            if taken && fields.pairs.iter().any(|(other, _)| *other == key) {
                return Err(PolicyError::Twice { key: key.to_string() });
            }
        }
        policy.iops = policy.iops.or(fields.parse("iops", WANTS_COUNT, rate)?);
        policy.bytes = policy.bytes.or(fields.parse("bytes", WANTS_BYTES, bytes)?);
        let burst = fields.parse("burst", WANTS_BURST, burst)?;
        policy.burst = burst.unwrap_or(Burst::Span(BURST_DEFAULT));
        let goal = |text: &str| span_of(text).filter(|span| (LATENCY_MIN..=LATENCY_MAX).contains(span));
        policy.latency = fields.parse("latency", WANTS_LATENCY, goal)?;
        if let Some((key, _)) = fields.pairs.first() {
            return Err(PolicyError::UnknownKey { key: (*key).to_string() });
        }
        policy.check(burst)?;
        Ok(policy)
    }
}

impl Policy {
    /// `burst` as it was told.
    fn check(&self, burst: Option<Burst>) -> Result<(), PolicyError> {
        if let (Some(floor), Some(iops)) = (self.floor, self.iops)
            && floor > iops
        {
            return Err(PolicyError::FloorOverLimit { floor, iops });
        }
        let wants = match burst {
            Some(Burst::Span(_)) if self.iops.is_none() && self.bytes.is_none() => "limit=5000",
            Some(Burst::Credits { .. }) if self.iops.is_none() => "a limit of requests, limit=5000",
            _ => return Ok(()),
        };
        Err(PolicyError::BurstWithoutLimit { burst: self.burst.to_string(), wants })
    }
}

impl fmt::Display for Burst {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Burst::Span(span) => f.write_str(&text_of_span(*span)),
            Burst::Credits { more, most } => write!(f, "{more}/{}", text_of_span(*most)),
        }
    }
}

/// The shortest text that makes this policy; empty for the default.
impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut comma = "";
        let mut say = |key: &str, value: String| {
            let said = write!(f, "{comma}{key}={value}");
            comma = ",";
            said
        };
        if let Some(floor) = self.floor {
            say("floor", floor.to_string())?;
        }
        if self.weight != WEIGHT_DEFAULT {
            say("weight", self.weight.to_string())?;
        }
        match (self.iops, self.bytes) {
            (None, None) => {}
            (Some(iops), None) => say("limit", iops.to_string())?,
            (None, Some(bytes)) => say("limit", format!("/{}", text_of_bytes(bytes)))?,
            (Some(iops), Some(bytes)) => say("limit", format!("{iops}/{}", text_of_bytes(bytes)))?,
        }
        if self.burst != Burst::Span(BURST_DEFAULT) {
            say("burst", self.burst.to_string())?;
        }
        if let Some(latency) = self.latency {
            say("latency", text_of_span(latency))?;
        }
        Ok(())
    }
}

/// Keys and values that nobody has taken yet.
struct Fields<'a> {
    pairs: Vec<(&'a str, &'a str)>,
}

impl<'a> Fields<'a> {
    fn of(text: &'a str) -> Result<Fields<'a>, PolicyError> {
        let mut pairs: Vec<(&str, &str)> = Vec::new();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (key, value) = part.split_once('=').unwrap_or((part, ""));
            if value.is_empty() {
                return Err(PolicyError::NoValue { key: key.to_string() });
            }
            if pairs.iter().any(|(other, _)| *other == key) {
                return Err(PolicyError::Twice { key: key.to_string() });
            }
            pairs.push((key, value));
        }
        Ok(Fields { pairs })
    }

    fn parse<T>(
        &mut self,
        key: &str,
        wants: &'static str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>, PolicyError> {
        let Some(at) = self.pairs.iter().position(|(of, _)| *of == key) else { return Ok(None) };
        let (_, value) = self.pairs.remove(at);
        let bad = || PolicyError::Bad { key: key.to_string(), value: value.to_string(), wants };
        parse(value).map(Some).ok_or_else(bad)
    }
}

fn rate(text: &str) -> Option<u64> {
    text.parse().ok().filter(|rate| (1..=RATE_MAX).contains(rate))
}

fn weight(text: &str) -> Option<u32> {
    text.parse().ok().filter(|weight| (1..=WEIGHT_MAX).contains(weight))
}

fn bytes(text: &str) -> Option<u64> {
    text.parse::<Size>().ok().map(|size| size.0).filter(|rate| (1..=RATE_MAX).contains(rate))
}

fn limit(text: &str) -> Option<(Option<u64>, Option<u64>)> {
    match text.split_once('/') {
        None => Some((Some(rate(text)?), None)),
        Some(("", of_bytes)) => Some((None, Some(bytes(of_bytes)?))),
        Some((iops, of_bytes)) => Some((Some(rate(iops)?), Some(bytes(of_bytes)?))),
    }
}

fn burst(text: &str) -> Option<Burst> {
    match text.split_once('/') {
        None => Some(Burst::Span(span_of(text)?)),
        Some((more, most)) => {
            let most = span_of(most).filter(|most| *most >= Duration::from_secs(1))?;
            Some(Burst::Credits { more: rate(more)?, most })
        }
    }
}

fn text_of_span(span: Duration) -> String {
    match span.as_micros() {
        micros if micros % 1_000_000 == 0 => format!("{}s", micros / 1_000_000),
        micros if micros % 1_000 == 0 => format!("{}ms", micros / 1_000),
        micros => format!("{micros}us"),
    }
}

fn text_of_bytes(bytes: u64) -> String {
    let units = [("G", 30), ("M", 20), ("K", 10)];
    let unit = units.into_iter().find(|(_, shift)| bytes.is_multiple_of(1 << shift));
    unit.map_or(bytes.to_string(), |(name, shift)| format!("{}{name}", bytes >> shift))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(text: &str) -> Policy {
        text.parse().unwrap()
    }

    #[test]
    fn policies_are_read_and_printed() {
        let text = "floor=2000,weight=400,limit=5000/100M,burst=3000/60s,latency=2ms";
        let all = Policy {
            floor: Some(2000),
            weight: 400,
            iops: Some(5000),
            bytes: Some(100 << 20),
            burst: Burst::Credits { more: 3000, most: Duration::from_secs(60) },
            latency: Some(Duration::from_millis(2)),
        };
        assert_eq!(policy(text), all);
        assert_eq!(all.to_string(), text);
        assert_eq!(policy(""), Policy::default());
        assert_eq!(Policy::default().to_string(), "");
        assert_eq!(policy("iops=500, bytes=50MiB ,burst=2s").to_string(), "limit=500/50M,burst=2s");
        assert_eq!(policy("limit=/1500,burst=100ms").to_string(), "limit=/1500,burst=100ms");
        assert_eq!(policy("limit=7,bytes=1KiB"), policy("limit=7/1K"));
    }

    #[test]
    fn what_is_wrong_is_said_with_what_to_do() {
        let told = |text: &str| text.parse::<Policy>().unwrap_err().to_string();
        for (text, word) in [
            ("wieght=4", "floor, weight, limit, burst and latency"),
            ("weight=0", "1 to 1000"),
            ("weight=1001", "1 to 1000"),
            ("floor=0", "from 1 on"),
            ("floor=many", "from 1 on"),
            ("floor=99999999999999", "from 1 on"),
            ("floor", "floor=VALUE"),
            ("floor=1,floor=2", "twice"),
            ("limit=5,iops=5", "twice"),
            ("limit=5000/", "5000/100M"),
            ("limit=/0", "5000/100M"),
            ("limit=5,burst=3000/", "3000/60s"),
            ("limit=5,burst=3000/10ms", "3000/60s"),
            ("latency=1us", "2ms"),
            ("latency=2h", "2ms"),
            ("floor=3000,limit=2000", "lower the floor to 2000 or raise the limit to 3000"),
            ("burst=2s", "add limit=5000"),
            ("limit=/1M,burst=3000/60s", "limit of requests"),
        ] {
            assert!(told(text).contains(word), "{text}: {}", told(text));
        }
        assert!(told(&"x".repeat(401)).contains("400"));
    }
}
