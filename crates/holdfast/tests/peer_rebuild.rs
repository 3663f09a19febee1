//! What a lost node held, and what leaves a node, is made by the nodes themselves, past the volume's host.

mod support;

use serde_json::Value;
use std::fs;
use support::{Grid, assert_volume_holds, etcd, is_whole, nbdcopy, pattern, until};

fn counters(grid: &Grid) -> (u64, u64) {
    let counters = &grid.json("volume show v1")["live"]["counters"];
    let count = |key: &str| Value::as_u64(&counters[key]).expect("a number");
    (count("shards_rebuilt") + count("shards_moved"), count("shards_made_by_nodes"))
}

/// What is lacking when something was done to a node other nodes make. The host makes what they are late with, on a
/// busy machine: then it is done to the next one, too. What is enough of all, made by nodes?
fn nodes_make(grid: &Grid, nodes: &[u64], is_enough: impl Fn(u64, u64) -> bool, lose: impl Fn(u64)) {
    let mut told = Vec::new();
    for node in nodes {
        let before = counters(grid);
        lose(*node);
        let after = counters(grid);
        let (all, by_nodes) = (after.0 - before.0, after.1 - before.1);
        if is_enough(by_nodes, all) {
            return;
        }
        told.push((by_nodes, all));
    }
    panic!("by nodes, and all: {told:?}");
}

/// A node goes for good, then another one is drained; data are as they were.
fn lose_and_drain(grid: &Grid) {
    grid.ok("grid down");
    fs::write(grid.path("holdfast.toml"), "care.rebuild_after = \"1 s\"\n").expect("written");
    grid.ok("grid up");
    grid.ok("volume create v1 --size 64MiB --layout parity:2+1");
    let (data, scratch) = (grid.path("data"), grid.path("scratch"));
    pattern(&data, 48 << 20);
    nbdcopy(data.to_str().expect("text"), &grid.uri("v1"));
    let are_most = |by_nodes: u64, all: u64| by_nodes > 0 && by_nodes * 2 > all;
    nodes_make(grid, &[2, 4, 5, 1], are_most, |node| {
        grid.ok(&format!("node kill {node}"));
        let before = counters(grid).0;
        until("what the node held is made again", || is_whole(grid, "v1") && counters(grid).0 > before);
        grid.ok(&format!("node start {node}"));
        until("it is back", || grid.node_state(node) == "up" && is_whole(grid, "v1"));
    });
    let are_some = |by_nodes: u64, _all: u64| by_nodes > 0;
    nodes_make(grid, &[3, 4], are_some, |node| {
        grid.ok(&format!("node drain {node}"));
        grid.ok("task watch");
    });
    grid.ok("node kill 3");
    assert_volume_holds(&grid.uri("v1"), &data, &scratch);
}

#[test]
fn nodes_make_shards_from_each_other() {
    let grid = Grid::new(GRIDS);
    grid.up("--nodes 5 --devices 1");
    lose_and_drain(&grid);
}

#[test]
fn nodes_make_shards_from_each_other_over_tls() {
    let store = tempfile::tempdir().expect("a directory");
    let member = etcd(store.path(), 47);
    let grid = Grid::new(GRIDS + 1);
    let endpoint = member.config().endpoint();
    grid.up(&format!("--nodes 5 --devices 1 --etcd {endpoint} --address 127.0.0.1 --name a"));
    assert_eq!(grid.json("status")["tls"], true);
    lose_and_drain(&grid);
}

/// Of ports.
const GRIDS: u16 = 47;
