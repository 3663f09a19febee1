//! Ledgers: legs, and the rule by which they acknowledge, fence and prove absence.
//!
//! Source: docs/decisions "The log protocol": a ledger records a rule, not a count.

use holdfast_base::{DeviceId, LedgerId, Lsn, NodeId};
use serde::{Deserialize, Serialize};

/// One replica of a ledger: a device, by its id, and the node that holds it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct Leg {
    pub node: NodeId,
    pub device: DeviceId,
}

/// Most legs a ledger may have: 2f+1 for f = 3 and room for nested rules; subsets fit a byte.
pub const LEGS_MAX: usize = 8;

/// When an entry is acknowledged: on at least `copies` legs, shared out evenly over `domains` different nodes: each of so
/// many nodes holds its share at least. With no domains: on so many devices, whichever nodes they are in.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct AckRule {
    pub copies: u8,
    pub domains: u8,
}

impl AckRule {
    /// The rule for `failures` tolerated domains: that many and one copies, each in a domain of its own.
    pub fn flat(failures: u8) -> AckRule {
        AckRule { copies: failures + 1, domains: failures + 1 }
    }

    /// The rule for `failures` tolerated devices, wherever these are: that many and one copies.
    pub fn on_devices(failures: u8) -> AckRule {
        AckRule { copies: failures + 1, domains: 0 }
    }

    /// The rule for a node and a device of another one at the same time: two devices in each of two nodes.
    pub const NESTED: AckRule = AckRule { copies: 4, domains: 2 };

    /// Whether whatever it acknowledges bears as much as what `other` does.
    pub fn is_at_least(self, other: AckRule) -> bool {
        self.copies >= other.copies && self.domains >= other.domains
    }

    /// Whether entries that lie on the legs in `mask` (bit i for leg i) are acknowledged.
    pub fn is_ack_set(self, legs: &[Leg], mask: u8) -> bool {
        if self.domains == 0 {
            return (mask & all(legs)).count_ones() >= u32::from(self.copies);
        }
        let share = usize::from(self.copies.div_ceil(self.domains));
        let on = |i: &usize| mask >> i & 1 == 1;
        let held = |node: NodeId, upto: usize| (0..upto).filter(on).filter(|i| legs[*i].node == node).count();
        // Where a node has come to its share it counts, once.
        let comes_to_it = |i: &usize| held(legs[*i].node, i + 1) == share;
        (0..legs.len()).filter(on).filter(comes_to_it).count() >= usize::from(self.domains)
    }

    /// Whether fencing the legs in `mask` is enough: the others contain no ack set, so nobody else can complete a write.
    pub fn is_fence_set(self, legs: &[Leg], mask: u8) -> bool {
        !self.is_ack_set(legs, all(legs) & !mask)
    }

    /// Whether an entry that the legs in `lacking` provably lack was never acknowledged: they meet every ack set.
    pub fn proves_unacknowledged(self, legs: &[Leg], lacking: u8) -> bool {
        !self.is_ack_set(legs, all(legs) & !lacking)
    }

    /// Whether the rule can be met by these legs at all.
    pub fn is_satisfiable(self, legs: &[Leg]) -> bool {
        self.copies >= 1 && legs.len() <= LEGS_MAX && self.is_ack_set(legs, all(legs))
    }
}

fn all(legs: &[Leg]) -> u8 {
    assert!(legs.len() <= LEGS_MAX, "{} legs", legs.len());
    ((1_u16 << legs.len()) - 1) as u8
}

/// A ledger as the root record names it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LedgerRef {
    pub id: LedgerId,
    pub legs: Vec<Leg>,
    pub rule: AckRule,
    /// The last LSN that counts, where the ledger is sealed; whatever legs hold beyond it does not exist.
    pub sealed: Option<Lsn>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn legs(nodes: &[u32]) -> Vec<Leg> {
        nodes.iter().enumerate().map(|(i, n)| Leg { node: NodeId(*n), device: DeviceId(i as u128) }).collect()
    }

    #[test]
    fn three_legs_two_in_use() {
        let legs = legs(&[1, 2, 3]);
        let rule = AckRule::flat(1);
        assert!(rule.is_ack_set(&legs, 0b011) && rule.is_ack_set(&legs, 0b110) && !rule.is_ack_set(&legs, 0b001));
        assert!(rule.is_fence_set(&legs, 0b101) && !rule.is_fence_set(&legs, 0b100));
        assert!(rule.proves_unacknowledged(&legs, 0b011) && !rule.proves_unacknowledged(&legs, 0b010));
    }

    #[test]
    fn two_devices_of_one_node_are_not_two_domains() {
        let legs = legs(&[1, 1, 2]);
        assert!(!AckRule::flat(1).is_ack_set(&legs, 0b011));
        assert!(AckRule { copies: 2, domains: 1 }.is_ack_set(&legs, 0b011));
        assert!(AckRule::flat(1).is_ack_set(&legs, 0b101));
    }

    #[test]
    fn over_devices_any_of_them_count() {
        let legs = legs(&[1, 1, 2]);
        let rule = AckRule::on_devices(1);
        assert!(rule.is_ack_set(&legs, 0b011) && rule.is_ack_set(&legs, 0b101) && !rule.is_ack_set(&legs, 0b100));
        assert!(rule.is_fence_set(&legs, 0b110) && !rule.is_fence_set(&legs, 0b010));
        assert!(rule.is_satisfiable(&legs) && !AckRule { copies: 0, domains: 0 }.is_satisfiable(&legs));
        assert!(AckRule::flat(1).is_at_least(rule) && !rule.is_at_least(AckRule::flat(1)));
    }

    #[test]
    fn nested_is_two_devices_in_each_of_two_nodes() {
        let legs = legs(&[1, 2, 1, 2, 1, 2]);
        let rule = AckRule::NESTED;
        assert!(rule.is_ack_set(&legs, 0b001111) && rule.is_ack_set(&legs, 0b110011));
        assert!(!rule.is_ack_set(&legs, 0b010111), "three on one and one on the other");
        // A node and a device of the other are gone: what is left was part of every acknowledgement.
        assert!(rule.is_fence_set(&legs, 0b101000) && rule.proves_unacknowledged(&legs, 0b101000));
        assert!(!rule.is_fence_set(&legs, 0b100000));
        assert!(rule.is_at_least(AckRule::flat(1)) && !AckRule::flat(1).is_at_least(rule));
    }

    proptest! {
        /// The two facts on which recovery rests: a fence set meets every ack set, and what is proved unacknowledged by
        /// some legs lies on no ack set.
        #[test]
        fn fence_sets_meet_ack_sets(
            nodes in proptest::collection::vec(1u32..4, 1..6), copies in 1u8..4, domains in 0u8..4, a: u8, b: u8,
        ) {
            let legs = legs(&nodes);
            let rule = AckRule { copies, domains };
            let (a, b) = (a & all(&legs), b & all(&legs));
            if rule.is_ack_set(&legs, a) && rule.is_fence_set(&legs, b) {
                prop_assert!(a & b != 0);
            }
            if rule.proves_unacknowledged(&legs, b) && a & b == 0 {
                prop_assert!(!rule.is_ack_set(&legs, a));
            }
        }
    }
}
