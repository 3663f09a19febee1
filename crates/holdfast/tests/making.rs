//! What a lost node held, and what leaves a node, is made by the nodes themselves, past the volume's host.

mod support;

use serde_json::Value;
use std::fs;
use support::{Grid, assert_volume_holds, etcd, has_nbdcopy, is_whole, nbdcopy, pattern, until};

fn counters(grid: &Grid) -> (u64, u64) {
    let counters = &grid.json("volume show v1")["live"]["counters"];
    let count = |key: &str| Value::as_u64(&counters[key]).expect("a number");
    (count("shards_rebuilt") + count("shards_moved"), count("shards_made_by_nodes"))
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
    grid.ok("node kill 2");
    until("what node 2 held is made again", || is_whole(grid, "v1") && counters(grid).0 > 0);
    let (all, by_nodes) = counters(grid);
    assert!(by_nodes > 0 && by_nodes * 2 > all, "{by_nodes} of {all} by nodes");
    grid.ok("node start 2");
    until("it is back", || grid.node_state(2) == "up" && is_whole(grid, "v1"));
    grid.ok("node drain 3");
    grid.ok("task watch");
    let (all_then, by_nodes_then) = counters(grid);
    assert!(by_nodes_then > by_nodes, "{by_nodes_then} of {all_then} by nodes, {by_nodes} of {all} before");
    grid.ok("node kill 3");
    assert_volume_holds(&grid.uri("v1"), &data, &scratch);
}

#[test]
fn nodes_make_shards_from_each_other() {
    if !has_nbdcopy() {
        return;
    }
    let grid = Grid::new(GRIDS);
    grid.up("--nodes 5 --devices 1");
    lose_and_drain(&grid);
}

#[test]
fn nodes_make_shards_from_each_other_over_tls() {
    let store = tempfile::tempdir().expect("a directory");
    if !has_nbdcopy() {
        return;
    }
    let Some(member) = etcd(store.path(), 47) else { return };
    let grid = Grid::new(GRIDS + 1);
    let endpoint = member.config().endpoint();
    grid.up(&format!("--nodes 5 --devices 1 --etcd {endpoint} --address 127.0.0.1 --name a"));
    assert_eq!(grid.json("status")["tls"], true);
    lose_and_drain(&grid);
}

/// Of ports.
const GRIDS: u16 = 47;
