//! Which floors are promised: no more than can be kept.
//!
//! All floors of a grid together are at most a part of what was measured by the least of its hosts, without one of the nodes:
//! a half, so that there is something for all who have none, and with more than two hosts one part in as many. For any host
//! may have to serve all volumes that have floors, and nodes have hosts take turns, so that it gets no more while all press.
//!
//! A floor counts reads and writes alike, and what was measured is seven reads to three writes; so floors that are used by
//! writes alone still come to less than 0.8 of what was measured, where two hosts or fewer are.

use std::fmt;

/// What there is to promise of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Capacity {
    /// Requests of 8 KiB a second, seven reads to three writes, without one node: of the host that does least.
    pub measured: u64,
    pub hosts: u64,
}

impl Capacity {
    /// All floors together at most.
    pub fn for_floors(self) -> u64 {
        self.measured / self.parts()
    }

    fn parts(self) -> u64 {
        self.hosts.max(2)
    }
}

/// Why a floor is not promised.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FloorRefused {
    NotMeasured { floor: u64 },
    TooMuch { floor: u64, others: u64, capacity: Capacity },
}

impl fmt::Display for FloorRefused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FloorRefused::NotMeasured { floor } => write!(
                f,
                "floor={floor} can't be promised before it is known what this grid can do; measure it: `holdfast qos measure`"
            ),
            FloorRefused::TooMuch { floor, others, capacity } => {
                let all = capacity.for_floors();
                let left = all.saturating_sub(*others);
                write!(
                    f,
                    "floor={floor} can't be promised: measured are {} requests a second without one node, one part in {} of that \
                     is {all}, floors of others are {others}, and {all} - {others} leaves {left}; ",
                    capacity.measured,
                    capacity.parts(),
                )?;
                match left {
                    0 => f.write_str("lower another floor (`holdfast qos list`)"),
                    left => write!(f, "ask for {left} at most, or lower another floor (`holdfast qos list`)"),
                }
            }
        }
    }
}

impl std::error::Error for FloorRefused {}

/// Whether a floor can be promised beside those of others.
///
/// # Errors
/// All together would be more than can be kept, or nothing was measured.
pub fn promise(floor: u64, others: u64, capacity: Option<Capacity>) -> Result<(), FloorRefused> {
    let capacity = capacity.ok_or(FloorRefused::NotMeasured { floor })?;
    if others.saturating_add(floor) > capacity.for_floors() {
        return Err(FloorRefused::TooMuch { floor, others, capacity });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floors_are_promised_up_to_half_and_refused_with_the_arithmetic() {
        let told = promise(100, 0, None).unwrap_err().to_string();
        assert!(told.contains("holdfast qos measure"), "{told}");
        let of = |hosts| Some(Capacity { measured: 22_000, hosts });
        assert_eq!(promise(9_000, 0, of(1)), Ok(()));
        let told = promise(3_000, 9_000, of(2)).unwrap_err().to_string();
        assert!(told.contains("one part in 2 of that is 11000"), "{told}");
        assert!(told.contains("11000 - 9000 leaves 2000; ask for 2000 at most"), "{told}");
        assert_eq!(promise(2_000, 9_000, of(2)), Ok(()));
        assert!(promise(u64::MAX, 1, of(1)).is_err());
    }

    #[test]
    fn of_more_hosts_each_has_its_part_of_the_nodes() {
        let of = |hosts| Some(Capacity { measured: 22_000, hosts });
        assert_eq!(promise(5_500, 0, of(4)), Ok(()));
        let told = promise(1, 5_500, of(4)).unwrap_err().to_string();
        assert!(told.contains("leaves 0; lower another floor"), "{told}");
        assert!(promise(1, 6_000, of(4)).unwrap_err().to_string().contains("leaves 0"), "hosts came since");
    }
}
