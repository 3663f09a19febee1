//! `holdfast why slow` on a grid of real processes: what holds requests up is what it names.

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
