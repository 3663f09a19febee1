//! What nodes are asked says for whom: a guest's class goes with each request for it, whichever node gets it and however
//! often; what keeps data whole is care.

use crate::support::*;
use holdfast_base::Urgency;
use holdfast_format::geometry::Layout;
use holdfast_format::wire::Request;
use std::time::Duration;

const LAYOUT: Layout = Layout::Parity { data: 2, parity: 1 };

/// A volume of a sparse guest: what was asked of nodes for a write and for reads, each of which had to be hedged.
fn asked_with_hedges(forgets: bool) -> (Vec<Urgency>, Vec<Urgency>) {
    let mut world = World::new(3, 4, LAYOUT, 4 << 20);
    let mut bounds = config(3, 0);
    bounds.mutations.hedge_forgets_class = forgets;
    world.config = Some(bounds);
    world.open();
    world.write_all(0, 1 << 20);
    world.settle(Duration::from_secs(12));
    world.urgency = Urgency::Sparse;
    let mut found = (Vec::new(), Vec::new());
    for hung in 0..4 {
        world.nodes[hung].hang_appends = true;
        world.nodes[hung].hang_shard_reads = true;
        world.asked = Some(Vec::new());
        let write = world.write_op(0, 8192);
        world.wait(write);
        for at in 0..16 {
            world.read((at << 16) + 8192, 4096);
        }
        for (request, urgency) in world.asked.take().expect("it was noted") {
            match request {
                Request::Append { crcs, .. } if !crcs.is_empty() => found.0.push(urgency),
                Request::ReadShard { .. } => found.1.push(urgency),
                _ => {}
            }
        }
        world.nodes[hung].hang_appends = false;
        world.nodes[hung].hang_shard_reads = false;
        world.span(Duration::from_secs(3));
    }
    let counters = world.controller.status().counters;
    assert!(counters.append_hedges > 0 && counters.read_hedges > 0, "{counters:?}");
    found
}

#[test]
fn what_is_asked_for_a_sparse_guest_is_sparse_and_so_are_hedges() {
    let (appends, reads) = asked_with_hedges(false);
    assert!(appends.len() > 8 && reads.len() > 64, "{} appends, {} reads", appends.len(), reads.len());
    let is_sparse = |urgency: &Urgency| *urgency == Urgency::Sparse;
    assert!(appends.iter().all(is_sparse) && reads.iter().all(is_sparse), "{appends:?} {reads:?}");
    let (appends, reads) = asked_with_hedges(true);
    assert!(!appends.iter().all(is_sparse) && !reads.iter().all(is_sparse), "a hedge without a class is seen");
}

#[test]
fn what_nobody_waits_for_is_care() {
    let mut world = World::new(4, 4, LAYOUT, 4 << 20);
    world.clean_dead_per_mille = 100;
    world.open();
    world.urgency = Urgency::Sparse;
    world.asked = Some(Vec::new());
    world.write_all(0, 3 << 20);
    for round in 0..8 {
        world.write_all(round << 18, 3 << 16);
        world.settle(Duration::from_secs(12));
    }
    let asked = world.asked.take().expect("it was noted");
    let of = |is_it: fn(&Request) -> bool| {
        let mut found: Vec<Urgency> = asked.iter().filter(|(request, _)| is_it(request)).map(|(_, u)| *u).collect();
        found.sort();
        found.dedup();
        found
    };
    assert_eq!(of(|request| matches!(request, Request::DeleteShards { .. })), [Urgency::Care]);
    let puts = of(|request| matches!(request, Request::PutShard { .. }));
    assert_eq!(
        puts,
        [Urgency::Normal, Urgency::Care],
        "the log is emptied for guests, segments are cleaned for nobody"
    );
}
