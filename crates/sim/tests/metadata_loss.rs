//! The metadata store is lost, or set back to an older state: protocol rule 27.

use holdfast_format::root::{Root, root_key};
use holdfast_sim::plan::Plan;
use holdfast_sim::stage::{Scenery, Stage};
use holdfast_sim::swarm::VOLUME;
use holdfast_sim::world::MachineAt;
use holdfast_volume::State;

#[test]
fn rule_27_a_root_that_was_set_back_is_not_opened() {
    // The log is rolled, and written to; then the store is set back to where it does not know of it. Whoever opens by that
    // record would seal the older ledger, and delete the one that holds what came after.
    // The mistake is seen for what it is.
    let mistaken = |plan: &mut Plan| plan.volume_mutations.opens_older_root = true;
    let mut stage = Scenery::long_destage(27).nodes(4).with(mistaken).raise();
    let (taker, ..) = set_back(&mut stage);
    assert_ne!(stage.state(taker), Some(State::Opening), "nothing keeps it from claiming the volume");

    let mut stage = Scenery::long_destage(27).nodes(4).raise();
    let (taker, before, newest) = set_back(&mut stage);
    assert_eq!(stage.state(taker), Some(State::Opening), "it claims nothing");
    assert_eq!(stage.root(), before);
    stage.world().meta.put(&root_key(VOLUME), newest.encode());
    stage.until("the volume is open", |s| s.state(taker) == Some(State::Open));
    stage.read(0, 16);
    stage.start_host(0);
    stage.finish();
}

/// Rolls the log, sets the store back to before, and has another host open the volume: which, and both roots.
fn set_back(stage: &mut Stage) -> (MachineAt, Root, Root) {
    stage.write(0, 8);
    let (before, legs) = (stage.root(), stage.leg_nodes());
    stage.crash_node(legs[0]);
    stage.until("the log is rolled", |s| s.root().ledgers.last() != before.ledgers.last());
    stage.write(8, 8);
    let newest = stage.root();
    assert_eq!(newest.epoch, before.epoch, "a roll keeps its epoch");
    stage.start_node(legs[0]);
    stage.pass_ms(300);
    stage.crash_host(0);
    stage.world().meta.put(&root_key(VOLUME), before.encode());
    let taker = stage.open_on(1);
    stage.pass_ms(3000);
    (taker, before, newest)
}

#[test]
fn rule_27_what_was_acknowledged_is_there_when_the_store_is_lost() {
    for roll in [false, true] {
        let mut stage = Scenery::long_destage(28).nodes(4).raise();
        stage.write(0, 8);
        if roll {
            let (before, node) = (stage.root(), stage.leg_nodes()[0]);
            stage.crash_node(node);
            stage.until("the log is rolled", |s| s.root().ledgers.last() != before.ledgers.last());
            stage.start_node(node);
            stage.pass_ms(300);
        }
        stage.write(8, 8);
        let epoch = stage.root().epoch;
        assert!(stage.status().is_recoverable);
        assert!(stage.lose_metadata(), "all nodes are there");
        stage.until("the volume is open", |s| s.serving().is_some());
        assert!(stage.root().epoch.0 > epoch.0 + (1 << 32));
        stage.read(0, 16);
        stage.write(16, 8);
        assert!(stage.lose_metadata(), "and again");
        stage.until("the volume is open", |s| s.serving().is_some());
        stage.read(0, 24);
        stage.finish();
    }
}

#[test]
fn rule_27_with_a_node_away_nothing_is_taken_for_the_newest() {
    let mut stage = Scenery::long_destage(29).raise();
    stage.write(0, 8);
    let node = stage.leg_nodes()[0];
    stage.crash_node(node);
    stage.pass_ms(300);
    assert!(!stage.lose_metadata(), "that node may hold a newer root");
    stage.start_node(node);
    stage.until("the volume is open", |s| s.serving().is_some());
    stage.read(0, 8);
    stage.finish();
}
