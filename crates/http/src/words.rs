//! Texts and numbers of bodies that stand for something: each has one pattern, or limits, in the description, and what does
//! not fit these is refused before anybody is asked.

use holdfast_api::{ANNOUNCED_S_MAX, NAME_BYTES_MAX, SIZE_BYTES_MAX, SIZE_BYTES_MIN, is_name};
use holdfast_base::size::Size;
use holdfast_base::{BLOCK_BYTES, MediaClass};
use holdfast_format::geometry;
use holdfast_format::packing;
use holdfast_format::schedule;
use holdfast_format::tier::TierSize;
use serde::de::{Error, Unexpected, Visitor};
use serde::{Deserialize, Deserializer};
use std::fmt::{self, Display};
use std::path::PathBuf;
use std::str::FromStr;
use utoipa::openapi::schema::{AnyOfBuilder, KnownFormat};
use utoipa::openapi::{ObjectBuilder, RefOr, Schema, SchemaFormat, Type};
use utoipa::{PartialSchema, ToSchema};

/// Longest path that Linux takes, without the zero at its end.
const PATH_BYTES_MAX: usize = 4095;

/// Longest words of a policy or a filter.
const SPEC_BYTES_MAX: usize = 400;

/// Spans of a schedule that keep snapshots.
const KEEPS_MAX: usize = 16;

macro_rules! words {
    ($($(#[doc = $about:literal])+ $name:ident($value:ty): $read:path, [$($pattern:expr),+], $examples:expr;)*) => {$(
        $(#[doc = $about])+
        #[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
        #[serde(try_from = "String")]
        pub struct $name(pub $value);

        impl TryFrom<String> for $name {
            type Error = String;

            fn try_from(text: String) -> Result<$name, String> {
                $read(&text).map($name)
            }
        }

        impl PartialSchema for $name {
            fn schema() -> RefOr<Schema> {
                text([$($about.trim()),+].join(" "), [$(String::from($pattern)),+], $examples)
            }
        }

        impl ToSchema for $name {}
    )*};
}

words! {
    /// A volume, a snapshot, a host, a client: letters, digits, `-`, `_` and `.`, beginning with a letter or digit.
    Name(String): name, [format!("^[A-Za-z0-9][A-Za-z0-9._-]{{0,{}}}$", NAME_BYTES_MAX - 1)], ["vm1"];

    /// How data outlive losses: over nodes, with `@device` over devices, or over the devices of two nodes (`nested-`).
    Layout(geometry::Layout): exactly, [layout_pattern(), NESTED], ["mirror:2", "parity:2+1"];

    /// `nvme`, `ssd` or `hdd`.
    Media(MediaClass): exactly, ["^(nvme|ssd|hdd)$"], ["ssd"];

    /// `off`, `lz4` or `auto`.
    Compression(packing::Compression): exactly, ["^(off|lz4|auto)$"], ["auto"];

    /// A time of seconds, minutes, hours, days or weeks.
    Span(schedule::Span): exactly, [format!("^{SPAN}$")], ["1h", "15m"];

    /// A time of at most thirty days.
    Absence(schedule::Span): absence, [ABSENCE], ["30m", "2h"];

    /// Of each of so many hours, days and so on that have any snapshot the newest is kept.
    Keep(schedule::Keep): keep, [format!("^{SPAN}(,{SPAN}){{0,{}}}$", KEEPS_MAX - 1)], ["24h,7d,4w"];

    /// A share of the volume's size, or bytes.
    FirstTierSize(TierSize): tier_size, ["^(([1-9]|[1-8][0-9]|90)%|[1-9][0-9]{0,5}([KMGT]i)?B)$"], ["20%", "10GiB"];

    /// An absolute path, as the host that is asked has it.
    KeyFile(PathBuf): whole_path, [format!("^/[^\\x00]{{0,{}}}$", PATH_BYTES_MAX - 1)], ["/etc/holdfast/key"];

    /// A block device of the host's machine, or a file that is there.
    DevicePath(PathBuf): whole_path, [format!("^/[^\\x00]{{0,{}}}$", PATH_BYTES_MAX - 1)], ["/dev/sdx"];

    /// How clients of a volume fare among others: `weight=400,limit=500/50MiB`; `none` takes it away.
    Qos(String): spec, [format!("^[!-~]{{1,{SPEC_BYTES_MAX}}}$")], ["none", "iops=500,bytes=50MiB", "weight=400,limit=500"];

    /// A filter, as `holdfast volume filter kinds` tells them.
    FilterSpec(String): spec, [format!("^[!-~]{{1,{SPEC_BYTES_MAX}}}$")], ["limit:iops=500", "delay:read=10ms,share=0.1"];
}

/// A text of one of these patterns.
fn text<const N: usize, const M: usize>(about: String, of: [String; N], examples: [&str; M]) -> RefOr<Schema> {
    let one = |pattern| ObjectBuilder::new().schema_type(Type::String).pattern(Some(pattern));
    let mut patterns: Vec<ObjectBuilder> = of.into_iter().map(one).collect();
    if N == 1 {
        return patterns.remove(0).description(Some(about)).examples(examples).into();
    }
    let any = patterns.into_iter().fold(AnyOfBuilder::new(), AnyOfBuilder::item);
    any.description(Some(about)).examples(examples).into()
}

const SPAN: &str = "([1-9][0-9]{0,3}|10000)[smhdw]";

/// At most thirty days.
const ABSENCE: &str =
    "^(([1-9][0-9]{0,3}|10000)[sm]|([1-9][0-9]?|[1-6][0-9]{2}|7[01][0-9]|720)h|([1-9]|[12][0-9]|30)d|[1-4]w)$";

fn layout_pattern() -> String {
    // Of up to sixteen shards seven are parity at most.
    let widths = r"[1-9]\+[1-7]|10\+[1-6]|11\+[1-5]|12\+[1-4]|13\+[1-3]|14\+[12]|15\+1";
    format!("^(mirror:[23]|parity:({widths}))(@device)?$")
}

const NESTED: &str = r"^nested-(mirror|parity:([2-9]|1[0-5])\+1)$";

fn name(text: &str) -> Result<String, String> {
    let wrong = || format!("`{text}` can't be a name: up to {NAME_BYTES_MAX} letters, digits, `-`, `_` and `.`");
    is_name(text).then(|| text.to_string()).ok_or_else(wrong)
}

/// As it is written, and in no other way: `+2` is a number to some.
fn exactly<T: FromStr<Err: Display> + Display>(text: &str) -> Result<T, String> {
    let read: T = text.parse().map_err(|why: T::Err| why.to_string())?;
    let shown = read.to_string();
    if shown == text { Ok(read) } else { Err(format!("`{text}` is written `{shown}`")) }
}

fn absence(text: &str) -> Result<schedule::Span, String> {
    let span: schedule::Span = exactly(text)?;
    let is_short = span.seconds() <= ANNOUNCED_S_MAX;
    is_short.then_some(span).ok_or_else(|| format!("`{text}` is longer than thirty days"))
}

fn keep(text: &str) -> Result<schedule::Keep, String> {
    match text.split(',').count() {
        count if count > KEEPS_MAX => Err(format!("there are {count} spans; {KEEPS_MAX} are the most")),
        _ => exactly(text),
    }
}

fn tier_size(text: &str) -> Result<TierSize, String> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let is_plain = digits.bytes().all(|b| b.is_ascii_digit()) && !digits.starts_with('0') && digits.len() <= 6;
    match &text[digits.len()..] {
        "%" if is_plain => text.parse().map_err(|why: <TierSize as FromStr>::Err| why.to_string()),
        "B" | "KiB" | "MiB" | "GiB" | "TiB" if is_plain => {
            text.parse().map(|Size(bytes)| TierSize::Bytes(bytes)).map_err(|why| why.to_string())
        }
        _ => Err(format!("`{text}` is no size of a tier: write 20% or 10GiB")),
    }
}

fn whole_path(text: &str) -> Result<PathBuf, String> {
    let is_path = text.starts_with('/') && !text.contains('\0') && text.chars().count() <= PATH_BYTES_MAX;
    let wrong = || format!("`{text}` is not absolute, or too long; give the whole path, as the host has it");
    is_path.then(|| PathBuf::from(text)).ok_or_else(wrong)
}

/// What it says is for the host to read.
fn spec(text: &str) -> Result<String, String> {
    let is_plain = (1..=SPEC_BYTES_MAX).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic());
    let wrong = || format!("write up to {SPEC_BYTES_MAX} letters, digits and signs, without spaces");
    is_plain.then(|| text.to_string()).ok_or_else(wrong)
}

/// Bytes of a volume: whole blocks, from 1 MiB to 1 PiB.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VolumeBytes(pub u64);

impl<'de> Deserialize<'de> for VolumeBytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<VolumeBytes, D::Error> {
        deserializer.deserialize_any(VolumeBytesVisitor)
    }
}

struct VolumeBytesVisitor;

impl Visitor<'_> for VolumeBytesVisitor {
    type Value = VolumeBytes;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number of bytes")
    }

    fn visit_u64<E: Error>(self, bytes: u64) -> Result<VolumeBytes, E> {
        bytes.try_into().map_err(E::custom)
    }

    /// `1048576.0` and `1e9` are whole numbers, as JSON has them. All up to the largest size are told exactly.
    fn visit_f64<E: Error>(self, bytes: f64) -> Result<VolumeBytes, E> {
        let is_whole = bytes.fract() == 0.0 && (0.0..=SIZE_BYTES_MAX as f64).contains(&bytes);
        match is_whole {
            true => self.visit_u64(bytes as u64),
            false => Err(E::invalid_value(Unexpected::Float(bytes), &self)),
        }
    }
}

impl TryFrom<u64> for VolumeBytes {
    type Error = String;

    fn try_from(bytes: u64) -> Result<VolumeBytes, String> {
        let is_right = (SIZE_BYTES_MIN..=SIZE_BYTES_MAX).contains(&bytes) && bytes.is_multiple_of(BLOCK_BYTES as u64);
        let wrong =
            || format!("{bytes} bytes: a volume has from 1 MiB to 1 PiB, in whole blocks of {BLOCK_BYTES} bytes");
        is_right.then_some(VolumeBytes(bytes)).ok_or_else(wrong)
    }
}

impl PartialSchema for VolumeBytes {
    fn schema() -> RefOr<Schema> {
        let number = ObjectBuilder::new()
            .schema_type(Type::Integer)
            .format(Some(SchemaFormat::KnownFormat(KnownFormat::Int64)))
            .description(Some("Bytes of a volume: whole blocks, from 1 MiB to 1 PiB"));
        let limits = number.minimum(Some(SIZE_BYTES_MIN)).maximum(Some(SIZE_BYTES_MAX));
        limits.multiple_of(Some(BLOCK_BYTES as u64)).examples([1_u64 << 30]).into()
    }
}

impl ToSchema for VolumeBytes {}

#[cfg(test)]
mod tests {
    use super::*;

    /// That these are what their patterns say a run of `./x schemathesis` finds out, with many more.
    #[test]
    fn what_is_written_in_another_way_is_refused() {
        let layouts = ["mirror:2", "parity:15+1", "parity:9+7@device", "nested-mirror", "nested-parity:15+1"];
        assert!(layouts.into_iter().all(|text| Layout::try_from(text.to_string()).is_ok()));
        for odd in ["", "mirror:+2", "mirror:02", "mirror:2 ", "parity:10+7", "parity:2+8", "nested-parity:1+1"] {
            assert!(Layout::try_from(odd.to_string()).is_err(), "{odd}");
        }
        for (text, is_right) in [("90%", true), ("91%", false), ("0%", false), ("07GiB", false), ("999999TiB", true)] {
            assert_eq!(FirstTierSize::try_from(text.to_string()).is_ok(), is_right, "{text}");
        }
        let ten = FirstTierSize::try_from("10GiB".to_string());
        assert_eq!(ten, Ok(FirstTierSize(TierSize::Bytes(10 << 30))));
        for (text, is_right) in [("1h", true), ("15 min", false), ("01h", false), ("10000w", true), ("10001s", false)] {
            assert_eq!(Span::try_from(text.to_string()).is_ok(), is_right, "{text}");
        }
        assert!(Keep::try_from(["1h"; KEEPS_MAX].join(",")).is_ok());
        assert!(Keep::try_from(["1h"; KEEPS_MAX + 1].join(",")).is_err());
        for (text, is_right) in [("/etc/key", true), ("etc/key", false), ("/a\0b", false), ("", false)] {
            assert_eq!(KeyFile::try_from(text.to_string()).is_ok(), is_right, "{text:?}");
        }
        for (bytes, is_right) in [(1 << 20, true), ((1 << 20) + 1, false), (0, false), (u64::MAX, false)] {
            assert_eq!(VolumeBytes::try_from(bytes).is_ok(), is_right, "{bytes}");
        }
        for (text, is_right) in [("1048576.0", true), ("1.048576e9", true), ("1048576.5", false), ("1e99", false)] {
            assert_eq!(serde_json::from_str::<VolumeBytes>(text).is_ok(), is_right, "{text}");
        }
    }
}
