//! `holdfast why slow` and floors on a grid of real processes: what holds requests up is what it names, and what is promised is
//! what was measured.

mod support;

use holdfast_lab::guest::{BLOCK, Guest};
use holdfast_lab::nbd::Command;
use holdfast_lab::process::{Signal, signal};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::process::{Child, Stdio};
use std::sync::{PoisonError, RwLock};
use support::{Grid, until};

/// Whoever crowds a processor is alone.
static PROCESSORS: RwLock<()> = RwLock::new(());

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
    let _beside_others = PROCESSORS.read().unwrap_or_else(PoisonError::into_inner);
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
fn a_write_that_hangs_is_told_of_with_the_node_that_it_waits_for() {
    let _beside_others = PROCESSORS.read().unwrap_or_else(PoisonError::into_inner);
    let grid = Grid::new(143);
    grid.up("--nodes 2 --devices 1");
    grid.ok("volume create v1 --size 16MiB --layout mirror:2");
    let mut guest = Guest::connect(&grid, "v1");
    assert_eq!(guest.write(0, 1), 0);
    let node = grid.pid("node2").expect("it runs");
    signal(node, Signal::STOP).expect("stopped");
    // One device is left without that node: it is waited for.
    let asked = guest.ask(Command::Write, 0, BLOCK, &[2; BLOCK]);
    until("the node is named", || cause(&grid, "writes") == "node");
    let told = grid.ok("why slow v1");
    signal(node, Signal::CONT).expect("it goes on");
    assert!(told.contains("verdict: a write is not answered for") && told.contains("waited for node 2,"), "{told}");
    assert_eq!(guest.answer(), (asked, 0));
}

/// Programs that keep a processor busy; they end with it.
struct Others(Vec<Child>);

impl Drop for Others {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn pid_of(id: u32) -> Pid {
    Pid::from_raw(id as i32).expect("a process has a number")
}

/// Has all threads of a process, and so many others, share the first processor that this one may use.
fn crowd(process: u32, others: usize) -> Others {
    let may_use = sched_getaffinity(None).expect("Linux tells");
    let mut one = CpuSet::new();
    one.set((0..CpuSet::MAX_CPU).find(|cpu| may_use.is_set(*cpu)).expect("this runs on one"));
    for thread in std::fs::read_dir(format!("/proc/{process}/task")).expect("it runs") {
        let id = thread.expect("a thread").file_name().to_string_lossy().parse().expect("its number");
        match sched_setaffinity(Some(pid_of(id)), &one) {
            // It has ended meanwhile.
            Err(rustix::io::Errno::SRCH) => {}
            set => set.expect("it is ours"),
        }
    }
    let busy = |_| {
        let mut shell = std::process::Command::new("sh");
        let child = shell.args(["-c", "while :; do :; done"]).stdin(Stdio::null()).spawn().expect("a shell");
        sched_setaffinity(Some(pid_of(child.id())), &one).expect("it is ours");
        child
    };
    Others((0..others).map(busy).collect())
}

#[test]
fn how_much_a_host_waits_for_a_processor_is_told() {
    let _alone = PROCESSORS.write().unwrap_or_else(PoisonError::into_inner);
    let grid = Grid::new(142);
    grid.up("--nodes 3 --devices 1");
    grid.ok("volume create v1 --size 64MiB --layout mirror:2");
    let mut guest = Guest::connect(&grid, "v1");
    let host = grid.pid("host").expect("it runs");
    let others = crowd(host, 8);
    // From one request to the next the host has slept, and has to wait anew.
    for n in 0..400 {
        assert_eq!(guest.write(n * BLOCK as u64, 7), 0);
    }
    let told = grid.json("why slow v1");
    drop(others);
    // What comes of it for requests is the kernel's affair: see the tests of verdicts for what is said then.
    assert!(told["slow"]["processor"]["waited_per_mille"].as_u64() > Some(20), "{told}");
    assert!(told["slow"]["processor"]["busy_per_mille"].as_u64() > Some(0), "{told}");
}

#[test]
fn floors_are_promised_of_what_was_measured() {
    let _beside_others = PROCESSORS.read().unwrap_or_else(PoisonError::into_inner);
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
