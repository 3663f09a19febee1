//! Reads that stay on the reader's own machine, while what is there answers.

use holdfast_base::NodeId;
use holdfast_sim::scenario::{Cluster, Setup};
use holdfast_volume::Event;
use std::collections::BTreeSet;
use std::time::Duration;

/// The host, and this node, are one machine.
fn start_beside(seed: u64, layout: &str, (nodes, disks): (usize, usize), local: usize) -> Cluster {
    let mut cluster = Setup::new(seed).layout(layout).nodes(nodes).disks(disks).start();
    let owner = cluster.owner();
    let nodes = BTreeSet::from([NodeId(local as u32 + 1)]);
    cluster.world().tell(owner, Event::LocalNodes { nodes });
    for block in (0..512).step_by(16) {
        cluster.write(block, 16);
    }
    // From then on it is read from shards, not from the log.
    cluster.until("everything is destaged", |s| s.status().log_bytes < 4096 && s.status().degraded_segments == 0);
    cluster
}

/// Shard reads, and how many of them were local, of reading everything once.
fn read_all(cluster: &mut Cluster) -> (u64, u64) {
    let before = cluster.status().counters;
    for block in (0..512).step_by(16) {
        cluster.read(block, 16);
    }
    let after = cluster.status().counters;
    (after.shard_reads - before.shard_reads, after.local_reads - before.local_reads)
}

#[test]
fn what_has_a_copy_on_this_machine_is_read_there() {
    for (i, layout) in ["mirror:2", "nested-mirror", "nested-parity:2+1"].into_iter().enumerate() {
        for local in 0..2 {
            let seed = 2600 + 2 * i as u64 + local as u64;
            let mut cluster = start_beside(seed, layout, (2, 3), local);
            let (all, of_local) = read_all(&mut cluster);
            assert!(all > 0 && of_local == all, "{layout}: {of_local} of {all}");
            cluster.finish();
        }
    }
}

#[test]
fn with_more_nodes_than_copies_what_is_local_is_read_locally_and_the_rest_elsewhere() {
    let mut cluster = start_beside(2610, "mirror:2", (4, 1), 2);
    let (all, of_local) = read_all(&mut cluster);
    assert!(of_local > 0 && of_local < all, "{of_local} of {all}");
    cluster.finish();
}

#[test]
fn a_local_node_that_hangs_or_is_lost_costs_a_hedge_and_no_more() {
    let mut cluster = start_beside(2620, "nested-mirror", (2, 2), 0);
    cluster.world().pause_node(0);
    let (began, hedges) = (cluster.now(), cluster.status().counters.read_hedges);
    cluster.read(0, 16);
    assert!(cluster.now().since(began) < Duration::from_millis(200), "the read waited for the node that hangs");
    assert!(cluster.status().counters.read_hedges > hedges);
    cluster.world().resume_node(0);
    cluster.pass_ms(400);
    cluster.crash_node(0);
    cluster.pass_ms(50);
    let (all, of_local) = read_all(&mut cluster);
    assert!(all > 0 && of_local == 0, "{of_local} of {all}");
    cluster.start_node(0);
    cluster.until("everything is whole again", Cluster::is_whole);
    let (all, of_local) = read_all(&mut cluster);
    assert_eq!(all, of_local);
    cluster.finish();
}
