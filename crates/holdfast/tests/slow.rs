//! `holdfast why slow` and floors on a grid of real processes: what holds requests up is what it names, and what is promised is
//! what was measured.

mod support;

use holdfast_lab::guest::{BLOCK, Guest};
use holdfast_lab::nbd::Command;
use support::Grid;

/// Eight writes at once.
fn hurry(guest: &mut Guest, byte: u8) {
    (0..8).for_each(|n| {
        guest.ask(Command::Write, n * BLOCK as u64, BLOCK, &[byte; BLOCK]);
    });
    (0..8).for_each(|_| assert_eq!(guest.answer().1, 0));
}

fn cause(grid: &Grid, kind: &str) -> String {
    let told = grid.json("why slow v1");
    told["verdicts"][kind]["cause"].as_str().unwrap_or_else(|| panic!("{told}")).to_string()
}

#[test]
fn what_holds_requests_up_is_named() {
    let grid = Grid::new(140);
    grid.up("--nodes 2 --devices 1");
    grid.ok("volume create v1 --size 16MiB --layout mirror:2 --limit iops=100,burst=1ms");
    assert!(grid.ok("why slow v1").contains("nothing was asked of it"));
    assert!(grid.fails("why slow v2").contains("no volume v2"));
    let mut guest = Guest::connect(&grid, "v1");
    (0..20).for_each(|round| hurry(&mut guest, round));
    let told = grid.ok("why slow v1 --requests");
    assert!(told.contains("verdict: its own limit holds it (iops=100,burst=1ms)"), "{told}");
    assert!(told.contains("write took") && told.contains("qos"), "{told}");
    assert_eq!(cause(&grid, "writes"), "limit");
    let top = grid.json("top --once");
    assert_eq!((top[0]["volume"].as_str(), top[0]["clients"].as_u64()), (Some("v1"), Some(1)), "{top}");
    assert!(top[0]["write_times"]["p50_us"].as_u64() > Some(5_000), "{top}");
    assert!(grid.ok("top --once --every 1").contains("WRITE P50"));

    // The step that it advises is one that can be taken.
    grid.ok("volume set v1 --limit none");
    grid.ok("volume filter add v1 delay:read=40ms");
    (0..30).for_each(|_| assert_eq!(guest.read(0), Ok(19)));
    let told = grid.json("why slow v1");
    assert_eq!(
        (cause(&grid, "reads").as_str(), told["slow"]["reads"]["count"].as_u64()),
        ("filter", Some(30)),
        "{told}"
    );
    assert!(grid.ok("why slow v1").contains("`holdfast volume filter remove v1` ends that"));
    grid.ok("volume filter remove v1");

    // Who is not served here has no figures, and is told where they are.
    drop(guest);
    grid.ok("volume unexport v1");
    assert!(grid.fails("why slow v1").contains("holdfast volume export v1"));
}

#[test]
fn floors_are_promised_of_what_was_measured() {
    let grid = Grid::new(141);
    grid.up("--nodes 3 --devices 1");
    assert!(grid.ok("qos list").contains("no floor can be promised: `holdfast qos measure`"));
    grid.ok("volume create v1 --size 16MiB");
    assert!(grid.fails("volume set v1 --qos floor=1").contains("`holdfast qos measure`"));
    assert!(grid.fails("volume create v2 --size 16MiB --qos floor=1").contains("`holdfast qos measure`"));
    assert!(grid.fails("volume show v2").contains("no volume v2"), "what is refused makes no volume");

    let told = grid.ok("qos measure --seconds 2 --volume-size 64MiB");
    assert!(told.contains("requests of 8 KiB a second") && told.contains("without node"), "{told}");
    let qos = grid.json("qos list");
    let (measured, all) = (qos["measured"][0]["iops"].as_u64().unwrap(), qos["for_floors"].as_u64().unwrap());
    assert!(measured > 10 && all == measured / 2, "{qos}");
    assert_eq!((qos["measured"][0]["nodes"].as_u64(), qos["hosts"].as_u64()), (Some(3), Some(1)), "{qos}");
    assert_eq!(grid.json("volume list").as_array().map(Vec::len), Some(1), "what it made is gone");

    let refused = grid.fails(&format!("volume set v1 --qos floor={}", all + 1));
    assert!(refused.contains(&format!("ask for {all} at most")), "{refused}");
    grid.ok(&format!("volume set v1 --qos floor={all},weight=200"));
    let refused = grid.fails("volume create v2 --size 16MiB --qos floor=1");
    assert!(refused.contains("leaves 0; lower another floor (`holdfast qos list`)"), "{refused}");
    assert!(grid.ok("qos list").contains("0 are left"));
    // A clone has the rest of the policy: nobody has counted a second floor.
    grid.ok("snapshot create v1 s1");
    grid.ok("volume clone v1@s1 c1");
    assert_eq!(grid.json("volume show c1")["limit"], "weight=200");
    let floor = grid.json("volume show v1")["limit"].as_str().map(str::to_string);
    assert_eq!(floor, Some(format!("floor={all},weight=200")));

    grid.ok("volume set v1 --qos floor=1");
    grid.ok(&format!("volume create v2 --size 16MiB --qos floor={}", all - 1));
    // In the trash it is promised on, for it may be had back.
    grid.ok("volume delete v2");
    assert!(grid.fails("volume set v1 --qos floor=2").contains("leaves 1; ask for 1 at most"));
    grid.ok("volume trash empty");
    grid.ok("volume set v1 --qos floor=2");
    grid.ok("volume set v1 --qos none");
    assert_eq!(grid.json("qos list")["floors"].as_array().map(Vec::len), Some(0));
}
