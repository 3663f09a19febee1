//! The metadata store is lost, or set back to an older state: protocol rule 27.

use holdfast_format::root::{Root, root_key};
use holdfast_sim::plan::Plan;
use holdfast_sim::scenario::{Cluster, Setup};
use holdfast_sim::swarm::VOLUME;
use holdfast_sim::world::MachineAt;
use holdfast_volume::State;

#[test]
fn rule_27_a_root_that_was_set_back_is_not_opened() {
    // The log is rolled, and written to; then the store is set back to where it does not know of it. Whoever opens by that
    // record would seal the older ledger, and delete the one that holds what came after.
    // The mistake is seen for what it is.
    let mistaken = |plan: &mut Plan| plan.volume_mutations.opens_older_root = true;
    let mut cluster = Setup::long_destage(27).nodes(4).with(mistaken).start();
    let (taker, ..) = set_back(&mut cluster);
    assert_ne!(cluster.state(taker), Some(State::Opening), "nothing keeps it from claiming the volume");

    let mut cluster = Setup::long_destage(27).nodes(4).start();
    let (taker, before, newest) = set_back(&mut cluster);
    assert_eq!(cluster.state(taker), Some(State::Opening), "it claims nothing");
    assert_eq!(cluster.root(), before);
    cluster.world().meta.put(&root_key(VOLUME), newest.encode());
    cluster.until("the volume is open", |s| s.state(taker) == Some(State::Open));
    cluster.read(0, 16);
    cluster.start_host(0);
    cluster.finish();
}

/// Rolls the log, sets the store back to before, and has another host open the volume: which, and both roots.
fn set_back(cluster: &mut Cluster) -> (MachineAt, Root, Root) {
    cluster.write(0, 8);
    let (before, legs) = (cluster.root(), cluster.leg_nodes());
    cluster.crash_node(legs[0]);
    cluster.until("the log is rolled", |s| s.root().ledgers.last() != before.ledgers.last());
    cluster.write(8, 8);
    let newest = cluster.root();
    assert_eq!(newest.epoch, before.epoch, "a roll keeps its epoch");
    cluster.start_node(legs[0]);
    cluster.pass_ms(300);
    cluster.crash_host(0);
    cluster.world().meta.put(&root_key(VOLUME), before.encode());
    let taker = cluster.open_on(1);
    cluster.pass_ms(3000);
    (taker, before, newest)
}

#[test]
fn rule_27_what_was_acknowledged_is_there_when_the_store_is_lost() {
    for roll in [false, true] {
        let mut cluster = Setup::long_destage(28).nodes(4).start();
        cluster.write(0, 8);
        if roll {
            let (before, node) = (cluster.root(), cluster.leg_nodes()[0]);
            cluster.crash_node(node);
            cluster.until("the log is rolled", |s| s.root().ledgers.last() != before.ledgers.last());
            cluster.start_node(node);
            cluster.pass_ms(300);
        }
        cluster.write(8, 8);
        let epoch = cluster.root().epoch;
        assert!(cluster.status().is_recoverable);
        assert!(cluster.lose_metadata(), "all nodes are there");
        cluster.until("the volume is open", |s| s.serving().is_some());
        assert!(cluster.root().epoch.0 > epoch.0 + (1 << 32));
        cluster.read(0, 16);
        cluster.write(16, 8);
        assert!(cluster.lose_metadata(), "and again");
        cluster.until("the volume is open", |s| s.serving().is_some());
        cluster.read(0, 24);
        cluster.finish();
    }
}

#[test]
fn rule_27_with_a_node_away_nothing_is_taken_for_the_newest() {
    let mut cluster = Setup::long_destage(29).start();
    cluster.write(0, 8);
    let node = cluster.leg_nodes()[0];
    cluster.crash_node(node);
    cluster.pass_ms(300);
    assert!(!cluster.lose_metadata(), "that node may hold a newer root");
    cluster.start_node(node);
    cluster.until("the volume is open", |s| s.serving().is_some());
    cluster.read(0, 8);
    cluster.finish();
}
