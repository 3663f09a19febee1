//! Choice of volumes that have series of their own.

use super::volumes::live_of;
use super::{DETAILED_MAX, VOLUMES_MAX};
use holdfast_api::{Neighbour, VolumeInfo};
use std::cmp::Reverse;
use std::collections::HashMap;

fn rates(loads: &[Neighbour]) -> HashMap<&str, u64> {
    loads.iter().map(|load| (load.name.as_str(), load.per_second)).collect()
}

/// Those that are asked for, or else the ones in service here: first those that are not as safe as they are to be, then
/// the busiest. Also how many in service are left out.
pub fn choose(volumes: &[VolumeInfo], loads: &[Neighbour], asked: &[String]) -> (Vec<VolumeInfo>, usize) {
    let rates = rates(loads);
    let served = volumes.iter().filter(|volume| live_of(volume).is_some());
    let mut chosen: Vec<&VolumeInfo> = match asked.is_empty() {
        true => served.clone().collect(),
        false => volumes.iter().filter(|volume| asked.contains(&volume.name)).collect(),
    };
    let is_unsafe = |volume: &VolumeInfo| {
        live_of(volume).is_some_and(|live| live.at_risk_entries > 0 || live.degraded_segments > 0 || !live.recoverable)
    };
    let rate = |volume: &VolumeInfo| rates.get(volume.name.as_str()).copied().unwrap_or(0);
    chosen.sort_by_key(|volume| Reverse((is_unsafe(volume), rate(volume))));
    chosen.truncate(VOLUMES_MAX);
    let mut chosen: Vec<VolumeInfo> = chosen.into_iter().cloned().collect();
    chosen.sort_by(|a, b| a.name.cmp(&b.name));
    let shown = chosen.iter().filter(|volume| live_of(volume).is_some()).count();
    (chosen, served.count() - shown)
}

/// The busiest of these: they have series by stage. One that nobody uses has none, unless it is asked for.
pub fn detailed(chosen: &[VolumeInfo], loads: &[Neighbour], is_asked: bool) -> Vec<String> {
    let rates = rates(loads);
    let rate = |volume: &VolumeInfo| rates.get(volume.name.as_str()).copied().unwrap_or(0);
    let mut busiest: Vec<&VolumeInfo> = chosen.iter().filter(|volume| is_asked || rate(volume) > 0).collect();
    busiest.sort_by_key(|volume| Reverse(rate(volume)));
    busiest.truncate(DETAILED_MAX);
    busiest.into_iter().map(|volume| volume.name.clone()).collect()
}
