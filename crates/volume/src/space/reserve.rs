//! The reserve: what of a device new shards leave free, so that cleaning has somewhere to write to.

use crate::api::Config;
use holdfast_format::wire::DeviceStat;

/// Free share that guests' writes leave on a device: cleaning needs somewhere to write to.
const RESERVE_PER_MILLE: u64 = 20;

/// Share of a device that is not promised to guests beside the reserve (over-provisioning): as long as they don't take
/// it either, it holds what is dead, which makes cleaning cheap.
const SPARE_PER_MILLE: u64 = 20;

/// So many segments at least fit the reserve, if that is not more than a quarter of the device.
const RESERVE_SEGMENTS: u64 = 4;

/// What a new shard leaves of a device's reserve.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Keep {
    /// Guests' data leaves half of the reserve, and 1.5 % of the device.
    FromGuests,
    /// What the cleaner moves leaves a quarter of it, and 1 % of the device: it gives back more than it takes.
    FromCleaner,
    /// Metadata may take the last: without a checkpoint nothing is ever freed.
    Nothing,
}

impl Keep {
    pub(crate) fn bytes(self, config: &Config, stat: &DeviceStat) -> u64 {
        match self {
            Keep::FromGuests => (reserve(config, stat) / 2).max(stat.capacity_bytes * 15 / 1000),
            Keep::FromCleaner => (reserve(config, stat) / 4).max(stat.capacity_bytes / 100),
            Keep::Nothing => 0,
        }
    }
}

/// What guests' writes leave free there.
pub(crate) fn reserve(config: &Config, stat: &DeviceStat) -> u64 {
    reserve_bytes(config, stat.capacity_bytes)
}

/// What guests' writes leave free on a device of so many bytes.
pub fn reserve_bytes(config: &Config, capacity_bytes: u64) -> u64 {
    let segments = RESERVE_SEGMENTS * u64::from(config.segment_payload_bytes);
    let share = RESERVE_PER_MILLE + if config.keeps_spare { SPARE_PER_MILLE } else { 0 };
    (capacity_bytes * share / 1000).max(segments.min(capacity_bytes / 4))
}

/// What of a device of so many bytes is not promised to guests beside the reserve: those bytes hold what is dead.
pub fn spare_bytes(config: &Config, capacity_bytes: u64) -> u64 {
    let both = capacity_bytes * (RESERVE_PER_MILLE + SPARE_PER_MILLE) / 1000;
    both.saturating_sub(reserve_bytes(config, capacity_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::basis::tests::basis;
    use holdfast_base::DeviceId;
    use holdfast_format::wire::DeviceHealth;

    #[test]
    fn guests_leave_more_than_the_cleaner_and_metadata_takes_the_last() {
        let mut config = basis("mirror:2").config;
        let stat = DeviceStat { capacity_bytes: 1 << 40, ..DeviceStat::unknown(DeviceId(1), DeviceHealth::Serving) };
        let kept = |config: &Config| {
            [Keep::FromGuests, Keep::FromCleaner, Keep::Nothing].map(|keep| (keep.bytes(config, &stat) * 1000) >> 40)
        };
        assert_eq!(reserve_bytes(&config, 1 << 40), (1_u64 << 40) * 20 / 1000);
        assert_eq!(kept(&config), [14, 9, 0]);
        assert!(spare_bytes(&config, 1 << 40) > 0);
        config.keeps_spare = true;
        assert_eq!(reserve_bytes(&config, 1 << 40), (1_u64 << 40) * 40 / 1000);
        assert_eq!((kept(&config), spare_bytes(&config, 1 << 40)), ([19, 9, 0], 0));
    }

    #[test]
    fn some_segments_fit_the_reserve_of_a_small_device() {
        let config = basis("mirror:2").config;
        let four = 4 * u64::from(config.segment_payload_bytes);
        assert_eq!(reserve_bytes(&config, 400 << 20), four);
        assert_eq!(reserve_bytes(&config, 40 << 20), 10 << 20);
    }
}
