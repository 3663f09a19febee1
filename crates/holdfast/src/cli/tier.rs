//! `holdfast tier`, and the flags of `holdfast volume` that choose a volume's tiers.

use super::format::{print, print_json, print_table, table};
use crate::client;
use crate::grid::layout::GridDir;
use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use holdfast_api::{Code, FirstTierUse, Request, VolumeInfo, refuse};
use holdfast_base::MediaClass;
use holdfast_base::size::Size;
use holdfast_format::tier::{FirstTier, TierSize, Tiers};
use serde::Serialize;
use std::time::{Duration, Instant};

/// Size of a first tier where none is named.
const SIZE_DEFAULT: TierSize = TierSize::PerMille(200);

/// Rates are taken over this long.
const RATE_SPAN: Duration = Duration::from_secs(1);

#[derive(Args, Debug)]
#[command(after_help = "Example:\n  \
    holdfast tier show\n\n\
    Takes a second, for the rates. FILL: what the first tier holds, of what it may. IN and OUT: what is born there and what \
    moves on to the capacity tier; what is overwritten before it is moved dies there and never moves. MOVED: of what was \
    born since the volume was opened. PAST IT: written straight to the capacity tier, since the first was full or its media \
    were away. HITS: of what clients read of devices, what came from the first tier.\n\n\
    From a quarter of fill on data move on, oldest first, the faster the fuller it is; while clients rest, down to a quarter.")]
pub struct TierArgs {
    #[command(subcommand)]
    action: TierAction,
}

#[derive(Subcommand, Debug)]
enum TierAction {
    /// Fill, movement and hits of volumes' first tiers
    Show {
        /// Of this volume only
        volume: Option<String>,
    },
}

/// What chooses a volume's tiers.
#[derive(Args, Debug)]
pub struct TierFlags {
    /// Where what is written is born: a layout, and by commas a class of media and a size, for example mirror:2,ssd,20% or
    /// mirror:2,80GiB; the size is of clients' data, 20 % of the volume where none is given. What lives longest there moves on to
    /// the volume's own layout. `none`: there is no such tier
    #[arg(long, value_name = "TIER", conflicts_with = "dry_run", value_parser = parse_first_tier)]
    first_tier: Option<Wanted<FirstTier>>,
    /// The class of media that data lie on when they have left the first tier, or from the beginning where there is none: nvme,
    /// ssd, hdd, or any. `holdfast device list` tells which there are
    #[arg(long, value_name = "MEDIA", conflicts_with = "dry_run", value_parser = parse_media)]
    media: Option<Wanted<MediaClass>>,
}

/// Something, or expressly nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Wanted<T>(Option<T>);

fn parse_media(text: &str) -> Result<Wanted<MediaClass>, String> {
    match text {
        "any" => Ok(Wanted(None)),
        _ => text.parse().map(|media| Wanted(Some(media))).map_err(|error| format!("{error}, or any")),
    }
}

fn parse_first_tier(text: &str) -> Result<Wanted<FirstTier>, String> {
    if text == "none" {
        return Ok(Wanted(None));
    }
    let mut parts = text.split(',').map(str::trim);
    let layout = parts.next().unwrap_or_default().parse().map_err(|error| format!("{error}"))?;
    let mut first = FirstTier { layout, media: None, size: SIZE_DEFAULT };
    for part in parts {
        if let Ok(media) = part.parse() {
            first.media = Some(media);
        } else if part.ends_with('%') {
            first.size = part.parse().map_err(|error| format!("`{part}`: {error}"))?;
        } else {
            let why = |_| {
                format!("`{part}` is neither a class of media (nvme, ssd, hdd), nor a share (20%), nor a size (80GiB)")
            };
            first.size = TierSize::Bytes(part.parse::<Size>().map_err(why)?.0);
        }
    }
    Ok(Wanted(Some(first)))
}

impl TierFlags {
    /// These tiers, with what the flags say changed.
    pub fn applied_to(&self, mut tiers: Tiers) -> Tiers {
        if let Some(Wanted(first)) = self.first_tier {
            tiers.first = first;
        }
        if let Some(Wanted(media)) = self.media {
            tiers.capacity = media;
        }
        tiers
    }

    /// What a volume's tiers become, if the flags change any.
    pub fn change(&self, name: &str, dir: &GridDir) -> Result<Option<Tiers>> {
        if self.first_tier.is_none() && self.media.is_none() {
            return Ok(None);
        }
        let volume = client::volume(dir, &Request::VolumeShow { name: name.to_string() })?;
        Ok(Some(self.applied_to(volume.tiers)))
    }
}

/// What was done, for who asked for it.
pub fn what_was_set(name: &str, tiers: Tiers) -> String {
    let lies = tiers.capacity.map_or(String::new(), |media| format!(" on {media}"));
    match tiers.first {
        Some(first) => format!(
            "what is written to volume {name} is born in {first}, and moves on{} by age (`holdfast tier show`)",
            if lies.is_empty() { String::new() } else { lies.replace(" on ", " to ") }
        ),
        None => format!(
            "volume {name} has no first tier; its data lie{}",
            if lies.is_empty() { " on any media" } else { &lies }
        ),
    }
}

/// Lines of `holdfast volume show`.
pub fn rows(volume: &VolumeInfo, row: &mut impl FnMut(&str, String)) {
    let Tiers { first, capacity } = volume.tiers;
    if let Some(media) = capacity {
        row("media", media.to_string());
    }
    let Some(first) = first else { return };
    let used = volume.live.as_ref().and_then(|live| live.first_tier);
    let fill = used.map_or(String::new(), |used| format!(" ({})", fill_text(&used)));
    row("first tier", format!("{first}{fill}"));
}

fn percent(part: u64, of: u64) -> String {
    if of == 0 { "-".to_string() } else { format!("{:.0} %", part as f64 * 100.0 / of as f64) }
}

fn fill_text(used: &FirstTierUse) -> String {
    format!("{} of {}, {}", Size(used.bytes), Size(used.bytes_max), percent(used.bytes, used.bytes_max))
}

/// One volume's first tier, over a span of time.
#[derive(Clone, PartialEq, Debug, Serialize)]
struct Shown {
    volume: String,
    first_tier: String,
    capacity_tier: String,
    #[serde(flatten)]
    used: FirstTierUse,
    /// Bytes a second, of the last second.
    born_per_second: f64,
    rotated_per_second: f64,
    astray_segments: u64,
}

pub fn run(args: &TierArgs, dir: &GridDir, json: bool) -> Result<()> {
    let TierAction::Show { volume } = &args.action;
    let (before, began) = (tiered(dir, volume.as_deref())?, Instant::now());
    if !before.is_empty() {
        std::thread::sleep(RATE_SPAN);
    }
    let after = tiered(dir, volume.as_deref())?;
    let seconds = began.elapsed().as_secs_f64();
    let shown: Vec<Shown> = after.iter().filter_map(|after| shown(&before, after, seconds)).collect();
    if json {
        return print_json(&shown);
    }
    if shown.is_empty() {
        return print(
            "no volume in service here has a first tier; give one to a volume with `holdfast volume set NAME --first-tier \
             mirror:2`",
        );
    }
    let mut rows = table(
        &["VOLUME", "FIRST TIER", "CAPACITY TIER", "FILL", "IN/s", "OUT/s", "MOVED", "PAST IT", "HITS"],
        &[3, 4, 5, 6, 7, 8],
    );
    for tier in &shown {
        let used = &tier.used;
        rows.add_row([
            tier.volume.clone(),
            tier.first_tier.clone(),
            tier.capacity_tier.clone(),
            fill_text(used),
            Size(tier.born_per_second as u64).to_string(),
            Size(tier.rotated_per_second as u64).to_string(),
            percent(used.rotated_bytes, used.born_bytes),
            Size(used.passed_bytes).to_string(),
            percent(used.read_first_bytes, used.read_bytes),
        ]);
    }
    print_table(&rows)?;
    for tier in shown.iter().filter(|tier| tier.astray_segments > 0) {
        print(format_args!(
            "volume {}: {} segments lie on other media than its tiers name; they are written anew as there is room",
            tier.volume, tier.astray_segments
        ))?;
    }
    Ok(())
}

/// Volumes in service here that have a first tier.
fn tiered(dir: &GridDir, only: Option<&str>) -> Result<Vec<VolumeInfo>> {
    if let Some(name) = only {
        let volume = client::live_volume(dir, name)?;
        if volume.tiers.first.is_none() {
            refuse!(
                Code::State,
                "volume {name} has no first tier; `holdfast volume set {name} --first-tier mirror:2` gives it one"
            );
        }
        volume.live.as_ref().with_context(|| {
            format!("volume {name} is not in service here; ask its host, or `holdfast volume export {name}` first")
        })?;
        return Ok(vec![volume]);
    }
    let is_tiered =
        |volume: &VolumeInfo| volume.clone_of.is_none() && volume.live.as_ref().is_some_and(|l| l.first_tier.is_some());
    Ok(client::volumes(dir)?.into_iter().filter(is_tiered).collect())
}

fn shown(before: &[VolumeInfo], after: &VolumeInfo, seconds: f64) -> Option<Shown> {
    let use_of = |volume: &VolumeInfo| volume.live.as_ref().and_then(|live| live.first_tier);
    let used = use_of(after)?;
    let then = before.iter().find(|volume| volume.id == after.id).and_then(use_of).unwrap_or(used);
    let rate = |of: fn(&FirstTierUse) -> u64| of(&used).saturating_sub(of(&then)) as f64 / seconds;
    let media = after.tiers.capacity.map_or(String::new(), |media| format!(" on {media}"));
    Some(Shown {
        volume: after.name.clone(),
        first_tier: after.tiers.first?.to_string(),
        capacity_tier: format!("{}{media}", after.layout),
        used,
        born_per_second: rate(|used| used.born_bytes),
        rotated_per_second: rate(|used| used.rotated_bytes),
        astray_segments: after.live.as_ref().map_or(0, |live| live.astray_segments),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiers_are_read_in_any_order_of_their_parts() {
        let layout = "mirror:2".parse().unwrap();
        let first = |media, size| Ok(Wanted(Some(FirstTier { layout, media, size })));
        assert_eq!(parse_first_tier("mirror:2"), first(None, SIZE_DEFAULT));
        assert_eq!(parse_first_tier("mirror:2,ssd,30%"), first(Some(MediaClass::Ssd), TierSize::PerMille(300)));
        assert_eq!(parse_first_tier("mirror:2, 80GiB, nvme"), first(Some(MediaClass::Nvme), TierSize::Bytes(80 << 30)));
        assert_eq!(parse_first_tier("none"), Ok(Wanted(None)));
        for (wrong, why) in [("mirror", "not a layout"), ("mirror:2,tape", "class of media"), ("mirror:2,99%", "90 %")]
        {
            let error = parse_first_tier(wrong).unwrap_err();
            assert!(error.contains(why), "{wrong}: {error}");
        }
        assert_eq!(parse_media("any"), Ok(Wanted(None)));
        assert!(parse_media("tape").unwrap_err().contains("any"));
    }
}
