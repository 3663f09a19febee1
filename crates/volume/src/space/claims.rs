//! Claims: room on the nodes that others own and have not used yet, and what is left beside it.
//!
//! A stripe takes a shard of as many different nodes as its layout is wide, so what is owned is no plain number of
//! bytes: a claim says how much each of so many different nodes must be able to take. Claims are taken from the nodes
//! with the most room first, as shards are.

use holdfast_format::geometry::Layout;

/// So many different nodes must each take so many bytes, of a nested layout on several devices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Claim {
    pub width: u8,
    pub shard_bytes: u64,
}

impl Claim {
    /// Room for so many bytes of guests' data.
    pub fn of(layout: Layout, data_bytes: u64) -> Claim {
        let shard_bytes = data_bytes.div_ceil(u64::from(layout.data_shards()));
        if layout.is_on_devices() {
            // Of nodes any will do, also one alone.
            return Claim { width: 1, shard_bytes: shard_bytes.saturating_mul(u64::from(layout.shard_count())) };
        }
        Claim { width: layout.width(), shard_bytes: shard_bytes.saturating_mul(u64::from(layout.shards_a_domain())) }
    }

    /// Of all nodes together.
    pub fn raw_bytes(&self) -> u64 {
        self.shard_bytes.saturating_mul(u64::from(self.width))
    }
}

/// Takes a claim off what nodes have free: from those with the most, down to a level that is as high as it can be, and
/// of none more than one shard of every stripe. Returns how much found no place.
pub fn take(free_by_node: &mut [u64], claim: Claim) -> u64 {
    let wanted = u128::from(claim.width) * u128::from(claim.shard_bytes);
    let of_node = |free: u64, level: u64| free.saturating_sub(level).min(claim.shard_bytes);
    let above = |level: u64| free_by_node.iter().map(|free| u128::from(of_node(*free, level))).sum::<u128>();
    let missing = wanted.saturating_sub(above(0));
    let (mut level, mut too_high) = (0, free_by_node.iter().max().map_or(1, |most| most + 1));
    while too_high - level > 1 {
        let middle = level + (too_high - level) / 2;
        if above(middle) >= wanted { level = middle } else { too_high = middle }
    }
    for free in free_by_node.iter_mut() {
        *free -= of_node(*free, level);
    }
    missing.min(u128::from(u64::MAX)) as u64
}

/// Bytes of guests' data that fit: each stripe takes a shard of as many different nodes as the layout is wide.
pub fn writable(free_by_node: &[u64], layout: Layout) -> u64 {
    level(free_by_node, layout.width()) / u64::from(layout.shards_a_domain()) * u64::from(layout.data_shards())
}

/// The same, of devices with so many bytes free, by node, beside what others own. Of a nested layout a node's devices
/// take a shard each, so that large ones among small ones are of no use; of a layout over devices each device is a
/// place of its own.
pub fn writable_beside(free_by_device: &[Vec<u64>], claims: &[Claim], layout: Layout) -> u64 {
    let of_node: Vec<u64> = free_by_device.iter().map(|devices| devices.iter().sum()).collect();
    let mut left = of_node.clone();
    for claim in claims {
        take(&mut left, *claim);
    }
    // What others own of a node they own of each of its devices.
    let share = |of: u64, left: u64, sum: u64| (u128::from(of) * u128::from(left) / u128::from(sum.max(1))) as u64;
    let by_device = free_by_device
        .iter()
        .zip(left.iter().zip(&of_node))
        .map(|(devices, (left, sum))| devices.iter().map(|free| share(*free, *left, *sum)).collect::<Vec<u64>>());
    let each = layout.shards_a_domain();
    match layout.is_on_devices() {
        true => writable(&by_device.flatten().collect::<Vec<u64>>(), layout),
        false if each > 1 => {
            let of_node = by_device.map(|devices| level(&devices, each) * u64::from(each));
            writable(&of_node.collect::<Vec<u64>>(), layout)
        }
        false => writable(&left, layout),
    }
}

/// The most that one place of all stripes together may hold, if each stripe takes so many different ones.
fn level(free: &[u64], width: u8) -> u64 {
    let fits = |shard_bytes: u64| {
        let placed: u128 = free.iter().map(|free| u128::from((*free).min(shard_bytes))).sum();
        placed >= u128::from(width) * u128::from(shard_bytes)
    };
    let (mut low, mut high) = (0, free.iter().sum::<u64>() / u64::from(width) + 1);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if fits(middle) { low = middle } else { high = middle }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_base::Prng;

    #[test]
    fn what_can_be_written_is_bound_by_nodes_and_not_by_their_sum() {
        let parity: Layout = "parity:2+1".parse().unwrap();
        let mirror: Layout = "mirror:2".parse().unwrap();
        assert_eq!(writable(&[100, 100, 100], parity), 200);
        assert_eq!(writable(&[100, 100, 1000], parity), 200, "the third shard needs a third node");
        assert_eq!(writable(&[100, 100, 1000], mirror), 200);
        assert_eq!(writable(&[100, 100], parity), 0);
        assert_eq!(writable(&[60, 60, 60, 60], mirror), 120);
    }

    #[test]
    fn inside_a_node_and_over_devices_the_small_ones_decide() {
        let layout = |text: &str| text.parse::<Layout>().unwrap();
        let equal = [vec![100, 100], vec![100, 100]];
        assert_eq!(writable_beside(&equal, &[], layout("nested-mirror")), 100);
        assert_eq!(writable_beside(&[vec![100, 900], vec![100, 900]], &[], layout("nested-mirror")), 100);
        assert_eq!(writable_beside(&[vec![100, 60, 60], vec![200, 100, 100]], &[], layout("nested-mirror")), 110);
        assert_eq!(writable_beside(&[vec![100, 900]], &[], layout("mirror:2@device")), 100);
        assert_eq!(writable_beside(&equal, &[], layout("parity:3+1@device")), 300);
        assert_eq!(writable_beside(&[vec![100]], &[], layout("mirror:2@device")), 0);
        assert_eq!(writable_beside(&[vec![30, 70], vec![100]], &[], layout("mirror:2")), 100);
        let claim = Claim::of(layout("mirror:2@device"), 50);
        assert_eq!(writable_beside(&[vec![100, 100]], &[claim], layout("mirror:2@device")), 50);
    }

    #[test]
    fn a_claim_is_taken_from_the_nodes_with_the_most_room() {
        let mut free = [100, 300, 200];
        assert_eq!(take(&mut free, Claim { width: 2, shard_bytes: 100 }), 0);
        assert_eq!(free, [100, 200, 100]);
        let mut free = [100, 100, 1000];
        assert_eq!(take(&mut free, Claim { width: 3, shard_bytes: 100 }), 0, "each node once");
        assert_eq!(free, [0, 0, 900]);
        let mut free = [100, 50];
        assert_eq!(take(&mut free, Claim { width: 3, shard_bytes: 100 }), 150, "a node is away");
        assert_eq!(free, [0, 0]);
        let mut none: [u64; 0] = [];
        assert_eq!(take(&mut none, Claim { width: 2, shard_bytes: 5 }), 10);
    }

    /// Whatever is written to the emptiest nodes while something is left beside the claim, the claim still fits.
    #[test]
    fn what_is_left_beside_a_claim_can_be_written_without_touching_it() {
        let layouts = ["mirror:2", "mirror:3", "parity:2+1", "parity:3+1", "parity:4+2"];
        let mut rng = Prng::new(7);
        for _ in 0..500 {
            let nodes = 6 + rng.below(4) as usize;
            let mut free: Vec<u64> = (0..nodes).map(|_| 1000 + rng.below(100_000)).collect();
            let layout: Layout = layouts[rng.below(5) as usize].parse().unwrap();
            let owned = rng.below(writable(&free, layout) + 1);
            let claim = Claim::of(layout, owned / u64::from(layout.data_shards()) * u64::from(layout.data_shards()));
            let others: Layout = layouts[rng.below(5) as usize].parse().unwrap();
            loop {
                let mut left = free.clone();
                assert_eq!(take(&mut left, claim), 0, "{free:?} {claim:?}");
                let mut by_room: Vec<usize> = (0..nodes).collect();
                by_room.sort_by_key(|i| std::cmp::Reverse((free[*i], left[*i])));
                let chosen = &by_room[..usize::from(others.width())];
                let shard = chosen.iter().map(|i| left[*i]).min().unwrap().min(1 + rng.below(3000));
                if shard == 0 {
                    break;
                }
                chosen.iter().for_each(|i| free[*i] -= shard);
            }
        }
    }
}
