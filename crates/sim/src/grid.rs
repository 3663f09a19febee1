//! Whole grids: the control planes of [`crate::cluster`] decide what the hosts of [`crate::multi_host`] serve, from real controllers
//! over real nodes; clients go on through hand-overs and take-overs, and what they read is checked.
//!
//! The metadata store is one: records and roots are in it, with all of its misfortunes.

use crate::cluster::{ClusterOutcome, ClusterPlan, Grid, volume_id};
use crate::multi_host::{MultiHost, MultiHostOutcome, MultiHostPlan, Served};
use holdfast_base::Prng;
use std::time::Duration;

/// What a run is made of.
#[derive(Clone, Debug)]
pub struct GridPlan {
    pub control: ClusterPlan,
    pub hosts: MultiHostPlan,
}

impl GridPlan {
    /// Nothing goes wrong.
    pub fn quiet(seed: u64, hosts: usize, volumes: usize) -> GridPlan {
        GridPlan {
            control: ClusterPlan::quiet(seed, hosts, volumes),
            hosts: MultiHostPlan::planned(seed, hosts, volumes),
        }
    }

    pub fn from_seed(seed: u64) -> GridPlan {
        let mut prng = Prng::new(seed ^ 0x641d);
        let (hosts, volumes) = (prng.between(2, 3) as usize, prng.between(1, 4) as usize);
        let quiet = GridPlan::quiet(seed, hosts, volumes);
        let control = ClusterPlan {
            hosts,
            volumes,
            duration: Duration::from_secs(prng.between(5, 25)),
            stays_down: false,
            emptied: 0,
            older: 0,
            deletion: 0,
            unreadable: 0,
            ..ClusterPlan::from_seed(seed)
        };
        let mut some = |most: u64| if prng.chance(500) { prng.between(1, most) as u32 } else { 0 };
        let (node_hang, node_crash, reset, slow, jump) = (some(40), some(8), some(20), some(10), some(20));
        GridPlan { control, hosts: MultiHostPlan { node_hang, node_crash, reset, slow, jump, ..quiet.hosts } }
    }
}

/// What a run came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GridOutcome {
    pub control: ClusterOutcome,
    pub hosts: MultiHostOutcome,
}

/// A grid of real hosts, for scenarios.
pub fn grid_of(plan: &GridPlan, verbose: bool) -> Grid {
    let served = |number: usize| Served { volume: volume_id(number), name: format!("vm{number}") };
    let volumes = (0..plan.control.volumes).map(served).collect();
    let hosts = MultiHost::planned(plan.hosts.clone(), volumes, verbose);
    Grid::over(plan.control.clone(), Some(Box::new(hosts)), verbose)
}

/// One run of a plan: faults and commands for a while, then everything must come to be as the records say, and clients go on.
pub fn run_grid(plan: &GridPlan, verbose: bool) -> Result<GridOutcome, String> {
    let mut grid = grid_of(plan, verbose);
    grid.run()?;
    let hosts = grid.of_hosts().expect("they are real");
    Ok(GridOutcome { control: grid.outcome, hosts })
}
