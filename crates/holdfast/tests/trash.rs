//! Names of volumes: another one, one that is kept from being deleted, and the trash, by a real grid.

mod support;

use serde_json::Value;
use support::{Grid, assert_volume_holds, nbdcopy, pattern, until};

const LEN: usize = 4 << 20;

fn trash(grid: &Grid) -> Vec<Value> {
    grid.json("volume trash list").as_array().unwrap().clone()
}

#[test]
fn a_volume_is_renamed_protected_deleted_and_had_back() {
    let grid = Grid::new(5);
    grid.up("--nodes 3 --devices 1");
    grid.ok("volume create vm --size 16MiB");
    let id = grid.json("volume show vm")["id"].clone();
    let (original, scratch) = (grid.path("original"), grid.path("scratch"));
    pattern(&original, LEN);
    let holds = |name: &str| {
        assert_volume_holds(&grid.uri(name), &original, &scratch);
    };
    nbdcopy(original.to_str().unwrap(), &grid.uri("vm"));
    grid.ok("snapshot create vm monday");
    another_name(&grid, &id);
    holds("web");

    grid.ok("volume protect web on");
    assert!(grid.ok("volume show web").contains("protected"));
    for line in ["volume delete web", "volume delete web --now --force"] {
        assert!(grid.fails(line).contains("volume protect web off"));
    }
    grid.ok("volume protect web off");
    let told = grid.ok("volume delete web");
    assert!(told.contains("goes in about 24 h") && told.contains("trash restore web"), "{told}");
    assert!(grid.fails("volume export web").contains("no volume web"));
    assert!(grid.ok("volume list").contains("in the trash, one volume"));
    assert!(grid.ok("status").contains("in the trash, one volume"));
    assert_eq!(grid.json("status")["volumes"], serde_json::json!([]));
    let [of] = &trash(&grid)[..] else { panic!("it is there") };
    // The minutes that pass meanwhile are counted.
    let minutes = of["minutes_left"].as_u64().unwrap();
    assert!(of["id"] == id && (1430..=1440).contains(&minutes), "{of}");
    assert!(of["taken_bytes"].as_u64() > Some(0), "{of}");
    assert!(grid.ok("space why").contains("in the trash, one volume"));

    its_data_are_cared_for(&grid);
    // Its name is another volume's meanwhile.
    grid.ok("volume create web --size 8MiB");
    assert!(grid.fails("volume trash restore web").contains("--as NEW"));
    assert!(grid.ok("volume trash restore web --as old").contains("volume export old"));
    assert!(trash(&grid).is_empty());
    grid.ok("volume export old");
    holds("old");
    let snapshot = grid.uri("old").replace("/old", "/old@monday");
    assert_volume_holds(&snapshot, &original, &scratch);
    assert_eq!(grid.json("volume show old")["id"], id);

    several_of_one_name(&grid);
}

fn another_name(grid: &Grid, id: &Value) {
    grid.ok("volume create other --size 8MiB --no-export");
    assert!(grid.fails("volume rename vm other").contains("there is a volume other"));
    assert!(grid.fails("volume rename nobody web").contains("no volume nobody"));
    assert!(grid.fails("volume rename vm a/b").contains("can't be a name"));
    assert!(grid.ok("volume rename vm web").contains("is called web now"));
    let web = grid.json("volume show web");
    assert_eq!((&web["id"], &web["state"], &web["name"]), (id, &"open".into(), &"web".into()), "{web}");
    assert!(grid.fails("volume show vm").contains("no volume vm"));
    // One that is not in service stays so.
    grid.ok("volume rename other another");
    assert_eq!(grid.json("volume show another")["state"], "closed");
    grid.ok("volume delete another --now");
    assert!(trash(grid).is_empty());
}

/// A node whose devices leave takes nothing of it with it, and the trash is there after a restart.
fn its_data_are_cared_for(grid: &Grid) {
    grid.ok("node add --devices 1 --device-size 256MiB");
    grid.ok("node drain 1");
    until("the steward has moved what is in the trash", || {
        let status = grid.json("status");
        let node = status["nodes"].as_array().unwrap().iter().find(|n| n["id"] == 1).unwrap().clone();
        node["devices"][0]["shards"] == 0
    });
    until("and its log", || grid.run("node remove 1").status.success());
    grid.ok("grid down");
    grid.ok("grid up");
    assert_eq!(trash(grid).len(), 1);
}

fn several_of_one_name(grid: &Grid) {
    grid.ok("volume delete web");
    grid.ok("volume create web --size 8MiB --provisioning fixed");
    let owned = grid.json("volume show web")["set_aside_bytes"].clone();
    grid.ok("volume delete web");
    let several = trash(grid);
    assert_eq!(several.len(), 2);
    let fixed = several.iter().find(|of| of["set_aside_bytes"] != 0).expect("what is set aside stays so");
    assert_eq!(fixed["set_aside_bytes"], owned);
    assert!(grid.json("space")["set_aside"][0][0].as_str().unwrap().contains("in the trash"));
    let ids: Vec<&str> = several.iter().map(|of| of["id"].as_str().unwrap()).collect();
    let refused = grid.fails("volume trash empty web");
    assert!(ids.iter().all(|id| refused.contains(id)), "{refused}");
    assert!(grid.ok(&format!("volume trash empty {}", ids[0])).contains("for good: web"));
    assert!(grid.ok("volume trash empty").contains("for good: web"));
    assert!(grid.ok("volume trash empty").contains("the trash is empty"));
    until("their space is back", || grid.json("status")["deleting"] == serde_json::json!([]));
    assert_eq!(grid.json("space")["set_aside"], serde_json::json!([]));
    assert_eq!(grid.json("volume list").as_array().unwrap().len(), 1);
}
