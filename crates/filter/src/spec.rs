//! Filters in words: `delay:read=10ms,share=0.1` is a kind of filter, and what it is told.

use crate::choice::{OpKind, PerKind};
use crate::filter::Filter;
use holdfast_base::ByteRange;
use std::fmt;

/// Longest text: it is shown in lists.
const TEXT_LEN_MAX: usize = 400;

/// A kind of filter that there is.
pub struct Kind {
    pub name: &'static str,
    /// One line.
    pub about: &'static str,
    /// What it can be told, for people.
    pub takes: &'static str,
    pub example: &'static str,
    pub build: fn(&mut Fields<'_>) -> Result<Box<dyn Filter>, SpecError>,
}

/// All kinds. A new one is a module and a line here.
pub const KINDS: &[Kind] = &[crate::delay::KIND, crate::fail::KIND, crate::stall::KIND, crate::limit::KIND];

/// Why a text makes no filter.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SpecError {
    UnknownKind { name: String },
    UnknownKey { kind: &'static str, key: String, takes: &'static str },
    Twice { key: String },
    NoValue { key: String },
    Missing { kind: &'static str, what: &'static str },
    Bad { key: String, value: String, wants: &'static str },
    TooLong,
}

impl fmt::Display for SpecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SpecError::UnknownKind { name } => {
                let names: Vec<&str> = KINDS.iter().map(|kind| kind.name).collect();
                write!(f, "there is no filter `{name}`; there are {}", names.join(", "))
            }
            SpecError::UnknownKey { kind, key, takes } => write!(f, "`{key}` says {kind} nothing; it takes {takes}"),
            SpecError::Twice { key } => write!(f, "`{key}` is said twice"),
            SpecError::NoValue { key } => write!(f, "`{key}` has no value; write {key}=VALUE"),
            SpecError::Missing { kind, what } => write!(f, "{kind} has to be told {what}"),
            SpecError::Bad { key, value, wants } => write!(f, "{key}={value} can't be used: it wants {wants}"),
            SpecError::TooLong => write!(f, "a filter is told in at most {TEXT_LEN_MAX} characters"),
        }
    }
}

impl std::error::Error for SpecError {}

/// What stands behind the colon; every key has to be taken by the filter that is made.
pub struct Fields<'a> {
    kind: &'static Kind,
    text: &'a str,
    pairs: Vec<(&'a str, &'a str)>,
}

/// Whether these are words of a limit, `iops=500,bytes=50MiB` say.
pub fn is_limit(words: &str) -> bool {
    build(&format!("limit:{words}")).is_ok()
}

/// Makes a filter from what it is told.
pub fn build(text: &str) -> Result<Box<dyn Filter>, SpecError> {
    let text = text.trim();
    if text.len() > TEXT_LEN_MAX {
        return Err(SpecError::TooLong);
    }
    let (name, rest) = text.split_once(':').unwrap_or((text, ""));
    let kind = KINDS.iter().find(|kind| kind.name == name);
    let kind = kind.ok_or_else(|| SpecError::UnknownKind { name: name.to_string() })?;
    let mut fields = Fields { kind, text, pairs: Vec::new() };
    for part in rest.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let (key, value) = part.split_once('=').unwrap_or((part, ""));
        if value.is_empty() {
            return Err(SpecError::NoValue { key: key.to_string() });
        }
        if fields.pairs.iter().any(|(other, _)| *other == key) {
            return Err(SpecError::Twice { key: key.to_string() });
        }
        fields.pairs.push((key, value));
    }
    let built = (kind.build)(&mut fields);
    // Who misspells a key hears of that, rather than of what is missing therefore.
    let is_known = |key: &str| kind.takes.split(|c: char| !c.is_ascii_alphanumeric()).any(|word| word == key);
    if let Err(error) = &built
        && let Some((key, _)) = fields.pairs.iter().find(|(key, _)| !is_known(key))
        && matches!(error, SpecError::Missing { .. })
    {
        return Err(SpecError::UnknownKey { kind: kind.name, key: (*key).to_string(), takes: kind.takes });
    }
    let filter = built?;
    match fields.pairs.first() {
        None => Ok(filter),
        Some((key, _)) => Err(SpecError::UnknownKey { kind: kind.name, key: (*key).to_string(), takes: kind.takes }),
    }
}

impl<'a> Fields<'a> {
    /// The whole text.
    pub fn text(&self) -> String {
        self.text.to_string()
    }

    /// A value as it stands.
    pub fn take(&mut self, key: &str) -> Option<&'a str> {
        let at = self.pairs.iter().position(|(of, _)| *of == key)?;
        Some(self.pairs.remove(at).1)
    }

    /// A value that `parse` understands.
    pub fn parse<T>(
        &mut self,
        key: &str,
        wants: &'static str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>, SpecError> {
        let Some(value) = self.take(key) else { return Ok(None) };
        let bad = || SpecError::Bad { key: key.to_string(), value: value.to_string(), wants };
        parse(value).map(Some).ok_or_else(bad)
    }

    /// By kind of request; `all` is for every kind that is not named. At least one has to be.
    pub fn per_kind<T: Copy>(
        &mut self,
        wants: &'static str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<PerKind<T>, SpecError> {
        let all = self.parse("all", wants, &parse)?;
        let mut found = PerKind::default();
        for kind in OpKind::ALL {
            found.set(kind, self.parse(kind.name(), wants, &parse)?.or(all));
        }
        if found.is_empty() {
            return Err(SpecError::Missing { kind: self.kind.name, what: "what to do with which requests" });
        }
        Ok(found)
    }

    /// What can't be done without.
    pub fn missing(&self, what: &'static str) -> SpecError {
        SpecError::Missing { kind: self.kind.name, what }
    }
}

pub const WANTS_DURATION: &str = "a time up to a day, for example 500us, 10ms or 2s";

pub const WANTS_BYTES: &str = "a number of bytes, for example 4096, 512KiB or 1GiB";

/// `4096`, `512KiB`, `50MiB`, `1GiB`.
pub fn bytes(text: &str) -> Option<u64> {
    let at = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(at);
    let shift = match unit {
        "" | "B" => 0,
        "K" | "KiB" => 10,
        "M" | "MiB" => 20,
        "G" | "GiB" => 30,
        "T" | "TiB" => 40,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// `0..1GiB`: from, and up to without.
pub fn range(text: &str) -> Option<ByteRange> {
    let (from, to) = text.split_once("..")?;
    let (from, to) = (bytes(from)?, bytes(to)?);
    (from < to).then(|| ByteRange::new(from, to - from))
}

/// `0.25`, in millionths; above nothing and up to all.
pub fn share(text: &str) -> Option<u32> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let is_number = |part: &str| part.bytes().all(|b| b.is_ascii_digit());
    if !is_number(whole) || !is_number(fraction) || whole.len() > 1 || fraction.len() > 6 {
        return None;
    }
    let millionths: u32 = format!("{whole}{fraction:0<6}").parse().ok()?;
    (1..=1_000_000).contains(&millionths).then_some(millionths)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_example_makes_a_filter_that_says_what_it_was_told() {
        for kind in KINDS {
            let filter = build(kind.example).unwrap_or_else(|error| panic!("{}: {error}", kind.example));
            assert_eq!(filter.spec(), kind.example);
            assert!(kind.example.starts_with(&format!("{}:", kind.name)));
        }
    }

    #[test]
    fn what_makes_no_filter_is_refused_with_the_reason() {
        let refused = |text: &str, part: &str| {
            let error = build(text).expect_err(text).to_string();
            assert!(error.contains(part), "{text}: {error}");
        };
        refused("dealy:read=1ms", "there are delay, fail, stall, limit");
        refused("delay:raed=1ms,read=1ms", "`raed` says delay nothing; it takes read");
        refused("fail:rd=eio,share=0.1", "`rd` says fail nothing; it takes read");
        refused("delay:share=0.1", "has to be told what to do");
        refused("delay:read", "write read=VALUE");
        refused("delay:read=1ms,read=2ms", "said twice");
        refused("delay:read=1", "read=1 can't be used: it wants a time");
        refused("delay:read=2ms..1ms", "wants a time");
        refused("delay:", "has to be told what to do");
        refused("delay", "has to be told what to do");
        refused("delay:read=1ms,share=2", "share=2");
        refused("delay:read=1ms,share=0", "share=0");
        refused("delay:read=1ms,every=0", "every=0");
        refused("delay:read=1ms,share=0.5,every=2", "share or every");
        refused("delay:read=1ms,range=5..5", "range=5..5");
        refused("fail:write=ouch", "eio or enospc");
        refused("limit:burst=1s", "iops");
        refused("limit:iops=0", "iops=0");
        refused(&format!("delay:read={}ms", "1".repeat(500)), "at most 400");
    }

    #[test]
    fn numbers_are_read_as_people_write_them() {
        assert_eq!((bytes("4K"), bytes("1GiB"), bytes("7")), (Some(4096), Some(1 << 30), Some(7)));
        assert_eq!((bytes("x"), bytes("1XiB"), bytes("99999999T")), (None, None, None));
        assert_eq!(range("4K..8K"), Some(ByteRange::new(4096, 4096)));
        assert_eq!(
            (share("0.1"), share("1"), share("1.0"), share("0.000001")),
            (Some(100_000), Some(1_000_000), Some(1_000_000), Some(1))
        );
        assert_eq!((share("1.1"), share("0.0000001"), share(""), share("-1"), share("10")), Default::default());
    }
}
