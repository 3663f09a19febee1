//! How full a device's journal is: what decides where ledgers go, beside media and fault domains.

use holdfast_format::wire::DeviceStat;

/// A journal that has less than this free is no place for a new ledger while there are others.
const ROOMY_PER_MILLE: u64 = 500;

/// Up to here it is one still for a ledger whose leg is full.
pub(crate) const STAND_IN_PER_MILLE: u64 = 900;

/// Fill of a journal, in 1/1000, with so many bytes more.
pub(crate) fn fill_per_mille(stat: &DeviceStat, more: u64) -> u64 {
    (stat.journal_used_bytes + more) * 1000 / stat.journal_bytes.max(1)
}

/// Whether a new ledger's leg would find room there.
pub(crate) fn is_roomy(stat: &DeviceStat) -> bool {
    fill_per_mille(stat, 0) < ROOMY_PER_MILLE
}

/// Ranks journals for a new ledger, better ones first: roomy, good enough to stand in, and the rest.
pub(crate) fn crowding(stat: &DeviceStat) -> u8 {
    match fill_per_mille(stat, 0) {
        0..ROOMY_PER_MILLE => 0,
        ROOMY_PER_MILLE..STAND_IN_PER_MILLE => 1,
        _ => 2,
    }
}

/// Sixteenths of a journal that are free: what differs by less is as good.
pub(crate) fn free_sixteenths(stat: &DeviceStat) -> u64 {
    stat.journal_bytes.saturating_sub(stat.journal_used_bytes) * 16 / stat.journal_bytes.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::tests::{leg, stat};

    #[test]
    fn journals_are_ranked_by_what_they_can_take() {
        let filled = |per_mille: u64| {
            let empty = DeviceStat { journal_bytes: 1000, ..stat(leg(1, 0)) };
            DeviceStat { journal_used_bytes: per_mille, ..empty }
        };
        assert_eq!([0, 499, 500, 899, 900].map(|fill| crowding(&filled(fill))), [0, 0, 1, 1, 2]);
        assert!(is_roomy(&filled(499)) && !is_roomy(&filled(500)));
        assert_eq!([0, 500, 1000].map(|fill| free_sixteenths(&filled(fill))), [16, 8, 0]);
        assert_eq!(fill_per_mille(&filled(500), 250), 750);
    }
}
