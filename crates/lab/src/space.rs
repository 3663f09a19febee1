//! What volumes take, and when that has come to rest: for drills and benchmarks of reduction.

use crate::grid::Grid;
use anyhow::{Context, Result, ensure};
use std::time::{Duration, Instant};

/// Nothing changes for so long: all is packed, and shared. A walk that compares rests for ten seconds.
const STILL_FOR: Duration = Duration::from_secs(60);
const STILL_WITHIN: Duration = Duration::from_secs(3600);

/// What volumes take, before copies and parity.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Taken {
    /// Data, what lies between packed blocks, and maps.
    pub needed_bytes: i64,
    /// It goes when room is needed.
    pub dead_bytes: i64,
}

impl Taken {
    pub fn beside(self, other: Taken) -> Taken {
        Taken { needed_bytes: self.needed_bytes - other.needed_bytes, dead_bytes: self.dead_bytes - other.dead_bytes }
    }

    pub fn of(grid: &Grid, volumes: &[String]) -> Result<Taken> {
        let mut sum = Taken::default();
        for name in volumes {
            let volume = grid.volume(name)?;
            let space = &volume["live"]["space"];
            let bytes = |key: &str| space[key].as_i64().with_context(|| format!("no {key} of volume {name}"));
            sum.needed_bytes += bytes("data_bytes")? + bytes("padding_bytes")? + bytes("metadata_bytes")?;
            sum.dead_bytes += bytes("dead_bytes")?;
        }
        Ok(sum)
    }

    /// Once nothing changes any more.
    ///
    /// # Errors
    /// Volumes still change after an hour, or one can't be asked.
    pub fn when_still(grid: &Grid, volumes: &[String]) -> Result<Taken> {
        let end = Instant::now() + STILL_WITHIN;
        let (mut last, mut since) = (Taken::of(grid, volumes)?, Instant::now());
        while since.elapsed() < STILL_FOR {
            ensure!(Instant::now() < end, "volumes still change after {} s", STILL_WITHIN.as_secs());
            std::thread::sleep(Duration::from_secs(2));
            let now = Taken::of(grid, volumes)?;
            if now != last {
                (last, since) = (now, Instant::now());
            }
        }
        Ok(last)
    }
}
