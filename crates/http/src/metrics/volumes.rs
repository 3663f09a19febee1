//! Volumes: all together, and some by themselves.

use super::families::{self as f, Family};
use super::page::Facts;
use super::sheet::{Sheet, Value, of_us};
use super::sums::{COUNTED, Counted};
use holdfast_api::{
    HostStatus, Neighbour, SlowInfo, SlowKind, SpaceUse, Times, UnderWayInfo, VolumeInfo, VolumeLive, VolumeState,
};
use std::collections::HashMap;
use std::fmt::Result;

const OPS: [&str; 2] = ["read", "write"];

/// Figures of a volume in service here; a clone's figures are its volume's.
pub fn live_of(volume: &VolumeInfo) -> Option<&VolumeLive> {
    volume.live.as_ref().filter(|_| volume.clone_of.is_none())
}

pub fn write(facts: &Facts, sheet: &mut Sheet<'_>) -> Result {
    let status = facts.status.as_deref();
    write_counts(status, sheet)?;
    write_redundancy(status, sheet)?;
    write_space(status, sheet)?;
    for (at, (family, _)) in COUNTED.iter().enumerate() {
        sheet.one(family, facts.sums.map(|sums| sums[at]))?;
    }
    let times = || facts.times.iter().flatten();
    let whole = times().filter(|times| times.stage.is_none());
    sheet.histograms(&f::REQUEST, whole.map(|times| ([times.op], times)))?;
    let stages = times().filter_map(|times| Some(([times.op, times.stage?], times)));
    sheet.histograms(&f::REQUEST_STAGE, stages)?;
    write_each(&facts.chosen, sheet)?;
    write_times(facts, sheet)?;
    write_slow(facts.slow.as_deref().unwrap_or_default(), sheet)
}

fn all(status: Option<&HostStatus>) -> impl Iterator<Item = &VolumeInfo> + Clone {
    status.into_iter().flat_map(|status| &status.volumes)
}

fn lives(status: Option<&HostStatus>) -> impl Iterator<Item = &VolumeLive> + Clone {
    all(status).filter_map(live_of)
}

fn write_counts(status: Option<&HostStatus>, sheet: &mut Sheet<'_>) -> Result {
    let states = status.iter().flat_map(|_| VolumeState::ALL);
    let count = |state: &VolumeState| all(status).filter(|volume| volume.state == *state).count();
    sheet.series(&f::VOLUMES, states.map(|state| ([state.text()], count(state))))?;
    let told = |count: usize| status.map(|_| count);
    sheet.one(&f::SESSIONS, told(all(status).map(|volume| volume.sessions).sum()))?;
    sheet.one(&f::WAITING, told(all(status).filter(|volume| volume.waits.is_some()).count()))?;
    let is_orphaned = |volume: &&VolumeInfo| volume.orphaned && volume.clone_of.is_none();
    sheet.one(&f::ORPHANED, told(all(status).filter(is_orphaned).count()))?;
    sheet.one(&f::DELETING, status.map(|status| status.deleting.len()))?;
    sheet.one(&f::TRASH, status.map(|status| status.trash.len()))?;
    sheet.one(&f::TRASH_TAKEN, status.map(|status| status.trash.iter().map(|of| of.taken_bytes).sum::<u64>()))
}

fn write_redundancy(status: Option<&HostStatus>, sheet: &mut Sheet<'_>) -> Result {
    let count = |is: fn(&VolumeLive) -> bool| status.map(|_| lives(status).filter(|live| is(live)).count());
    let sum = |of: fn(&VolumeLive) -> u64| status.map(|_| lives(status).map(of).sum::<u64>());
    sheet.one(&f::DEGRADED_VOLUMES, count(|live| live.degraded_segments > 0))?;
    sheet.one(&f::AT_RISK_VOLUMES, count(|live| live.at_risk_entries > 0))?;
    sheet.one(&f::LACKING_VOLUMES, count(|live| !live.recoverable))?;
    sheet.one(&f::DEGRADED, sum(|live| live.degraded_segments))?;
    sheet.one(&f::AT_RISK, sum(|live| live.at_risk_entries))?;
    sheet.one(&f::TO_DRAIN, sum(|live| live.left_to_drain))?;
    sheet.one(&f::TO_BALANCE, sum(|live| live.left_to_balance_bytes))?;
    sheet.one(&f::SEGMENTS, sum(|live| live.segments))?;
    sheet.one(&f::LOG, sum(|live| live.log_bytes))?;
    sheet.one(&f::UNPLACED, sum(|live| live.unplaced_bytes))
}

/// Their sum is what is taken.
fn uses(space: &SpaceUse) -> [(&'static str, u64); 6] {
    [
        ("data", space.data_bytes),
        ("dead", space.dead_bytes),
        ("kept", space.kept_bytes),
        ("padding", space.padding_bytes),
        ("redundancy", space.redundancy_bytes),
        ("metadata", space.metadata_bytes),
    ]
}

fn write_space(status: Option<&HostStatus>, sheet: &mut Sheet<'_>) -> Result {
    let mut sums = uses(&SpaceUse::default());
    for live in lives(status) {
        for (sum, (_, bytes)) in sums.iter_mut().zip(uses(&live.space)) {
            sum.1 += bytes;
        }
    }
    let sums = status.iter().flat_map(|_| sums);
    sheet.series(&f::SPACE, sums.map(|(of, bytes)| ([of], bytes)))?;
    let sum = |of: fn(&SpaceUse) -> u64| status.map(|_| lives(status).map(|live| of(&live.space)).sum::<u64>());
    sheet.one(&f::SHOWN, sum(|space| space.shown_bytes))?;
    let saved = |space: &SpaceUse| space.shown_bytes.saturating_sub(space.data_bytes + space.padding_bytes);
    sheet.one(&f::SAVED, sum(saved))?;
    sheet.one(&f::SHARED, sum(|space| space.elsewhere_bytes))
}

/// One series a volume, of those that are in service here.
fn each<V: Into<Value>>(
    chosen: &[VolumeInfo],
    sheet: &mut Sheet<'_>,
    family: &Family,
    of: impl Fn(&VolumeLive) -> V,
) -> Result {
    let served = chosen.iter().filter_map(|volume| Some((volume.name.as_str(), live_of(volume)?)));
    sheet.series(family, served.map(|(name, live)| ([name], of(live))))
}

fn write_each(chosen: &[VolumeInfo], sheet: &mut Sheet<'_>) -> Result {
    let info = |volume: &'_ VolumeInfo| {
        let compression = if volume.compression.is_empty() { "off" } else { &volume.compression };
        [volume.name.clone(), volume.layout.clone(), volume.state.to_string(), compression.to_string()]
    };
    let infos: Vec<[String; 4]> = chosen.iter().map(info).collect();
    sheet.series(&f::VOLUME_INFO, infos.iter().map(|labels| (labels.each_ref().map(String::as_str), 1u64)))?;
    sheet.series(&f::VOLUME_SIZE, chosen.iter().map(|volume| ([volume.name.as_str()], volume.size_bytes)))?;
    sheet.series(&f::VOLUME_SESSIONS, chosen.iter().map(|volume| ([volume.name.as_str()], volume.sessions)))?;
    let counters: [Counted; 6] = [
        (&f::VOLUME_READS, |c| c.reads),
        (&f::VOLUME_READ_BYTES, |c| c.read_bytes),
        (&f::VOLUME_WRITES, |c| c.writes),
        (&f::VOLUME_WRITE_BYTES, |c| c.write_bytes),
        (&f::VOLUME_RECONSTRUCTED, |c| c.reconstructed_reads),
        (&f::VOLUME_CHECKSUM_ERRORS, |c| c.checksum_errors),
    ];
    for (family, of) in counters {
        each(chosen, sheet, family, |live| of(&live.counters))?;
    }
    each(chosen, sheet, &f::VOLUME_DEGRADED, |live| live.degraded_segments)?;
    each(chosen, sheet, &f::VOLUME_AT_RISK, |live| live.at_risk_entries)?;
    each(chosen, sheet, &f::VOLUME_LOG, |live| live.log_bytes)?;
    each(chosen, sheet, &f::VOLUME_UNPLACED, |live| live.unplaced_bytes)?;
    let spaces = chosen.iter().filter_map(|volume| Some((volume.name.as_str(), live_of(volume)?)));
    let spaces = spaces.flat_map(|(name, live)| uses(&live.space).map(|(of, bytes)| ([name, of], bytes)));
    sheet.series(&f::VOLUME_SPACE, spaces)?;
    each(chosen, sheet, &f::VOLUME_SHOWN, |live| live.space.shown_bytes)
}

/// Rates, depths and latencies of the chosen ones.
fn write_times(facts: &Facts, sheet: &mut Sheet<'_>) -> Result {
    let loads = facts.loads.as_deref().unwrap_or_default();
    let by_name: HashMap<&str, &Neighbour> = loads.iter().map(|load| (load.name.as_str(), load)).collect();
    let loads: Vec<&Neighbour> =
        facts.chosen.iter().filter_map(|volume| by_name.get(volume.name.as_str()).copied()).collect();
    sheet.series(&f::VOLUME_RATE, loads.iter().map(|load| ([load.name.as_str()], load.per_second)))?;
    let depths = loads.iter().map(|load| ([load.name.as_str()], load.depth_percent as f64 / 100.0));
    sheet.series(&f::VOLUME_DEPTH, depths)?;
    let times = facts.chosen.iter().flat_map(|volume| {
        let told = volume.live.as_ref().map_or([None; 2], |live| [live.read_times, live.write_times]);
        OPS.into_iter().zip(told).filter_map(|(op, times)| Some((volume.name.as_str(), op, times?)))
    });
    let times = times.flat_map(|(name, op, Times { p50_us, p99_us })| {
        [([name, op, "50"], of_us(p50_us)), ([name, op, "99"], of_us(p99_us))]
    });
    sheet.series(&f::VOLUME_LATENCY, times)
}

fn write_slow(slow: &[(String, SlowInfo)], sheet: &mut Sheet<'_>) -> Result {
    let kinds = |slow: &'_ SlowInfo| -> [Option<SlowKind>; 2] { [slow.reads.clone(), slow.writes.clone()] };
    let kinds: Vec<(&str, [Option<SlowKind>; 2])> =
        slow.iter().map(|(name, slow)| (name.as_str(), kinds(slow))).collect();
    let stages = kinds.iter().flat_map(|(name, kinds)| {
        OPS.into_iter().zip(kinds).flat_map(move |(op, kind)| {
            kind.iter().flat_map(|kind| &kind.stages).flat_map(move |stage| {
                let of = |share, us| ([*name, op, stage.stage.as_str(), share], of_us(us));
                [of("50", stage.p50_us), of("99", stage.p99_us)]
            })
        })
    });
    sheet.series(&f::VOLUME_STAGE, stages)?;
    let under_way = slow.iter().flat_map(|(name, slow)| {
        OPS.into_iter()
            .zip([slow.reads_under_way, slow.writes_under_way])
            .map(move |(op, of)| ([name.as_str(), op], of))
    });
    sheet
        .series(&f::VOLUME_IN_FLIGHT, under_way.clone().map(|(labels, UnderWayInfo { count, .. })| (labels, count)))?;
    sheet.series(&f::VOLUME_OLDEST, under_way.map(|(labels, of)| (labels, of_us(of.oldest_us))))?;
    let waited = slow.iter().flat_map(|(name, slow)| {
        let others = slow.waited.saturating_sub(slow.held_by_limit);
        [([name.as_str(), "others"], others), ([name.as_str(), "limit"], slow.held_by_limit)]
    });
    sheet.series(&f::VOLUME_WAITED, waited)
}
