//! What `holdfast why slow` says of faults that are made here, one after the other: see `holdfast_sim::why`.

use holdfast_host::{Budget, Kind};
use holdfast_sim::neighbours::{Grid, Home, Load, Neighbours};
use holdfast_verdict::{Cause, Verdict};
use std::time::Duration;

/// A fault, and what is to be said of it.
struct Fault {
    name: &'static str,
    grid: Grid,
    /// Reactors and policies of the volumes; that of the first is asked for.
    homes: &'static [(usize, &'static str)],
    kind: Kind,
    /// Makes it, and has guests ask.
    make: fn(&mut Neighbours),
    cause: Cause,
    /// Words that the sentence has.
    says: &'static [&'static str],
}

impl Fault {
    /// The sentence, and in which stages it finds the time.
    fn told(&self) -> (Verdict, String) {
        let homes: Vec<Home> = self.homes.iter().map(|(reactor, limit)| Home { reactor: *reactor, limit }).collect();
        let mut run = Neighbours::on(31, self.grid, &homes);
        (self.make)(&mut run);
        let told = run.why(0, self.kind).expect("requests were answered");
        (told, self.figures(&run))
    }

    fn figures(&self, run: &Neighbours) -> String {
        let slow = run.slow(0).expect("it is served");
        let kind = if self.kind == Kind::Read { slow.reads } else { slow.writes }.expect("there were some");
        let stages = kind.stages.iter().filter(|stage| stage.slow_us > 0 || stage.p99_us > 0);
        let stages = stages.map(|of| format!("{} {}/{}/{}", of.stage, of.p50_us, of.p99_us, of.slow_us));
        let nodes = kind.nodes.iter().map(|of| format!("node {} {}/{}", of.node, of.count, of.slow));
        let words: Vec<String> = stages.chain(nodes).collect();
        format!("{} of p50 {} us, p99 {} us: {}", kind.count, kind.p50_us, kind.p99_us, words.join(", "))
    }

    fn is_told_rightly(&self, told: &Verdict) -> bool {
        told.cause == self.cause && self.says.iter().all(|words| told.text.contains(words))
    }
}

/// Faults that may be told wrongly: one in twenty.
const WRONG_ONE_IN: usize = 20;

const SECOND: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

fn reads(volume: usize, in_flight: u64) -> Load {
    Load { volume, in_flight, bytes: 8 << 10, reads: true, at: 0, step: 1 }
}

fn writes(volume: usize, in_flight: u64) -> Load {
    Load { reads: false, ..reads(volume, in_flight) }
}

fn slow_disk(run: &mut Neighbours, node: usize) {
    run.world.nodes[node].disks[0].slowness = 80;
}

fn slow_disks(run: &mut Neighbours) {
    (0..run.world.nodes.len()).for_each(|node| slow_disk(run, node));
}

fn slow_way(run: &mut Neighbours, node: usize) {
    run.world.net.link_mut(0, node).slow = 10 * MS;
}

/// All disks take so many bytes a second.
fn narrow_disks(run: &mut Neighbours, bytes_per_second: u64) {
    let disks = run.world.nodes.iter_mut().flat_map(|node| &mut node.disks);
    disks.for_each(|disk| disk.bytes_per_second = Some(bytes_per_second));
}

/// The process of a node stands still for a moment, again and again.
fn stutter(run: &mut Neighbours, node: usize) {
    for _ in 0..20 {
        run.pass(100 * MS);
        run.world.pause_node(node);
        run.pass(100 * MS);
        run.world.resume_node(node);
    }
}

/// Of a volume that was filled before: there is nothing to read elsewhere.
fn read(run: &mut Neighbours, spoil: impl FnOnce(&mut Neighbours)) {
    run.fill(0);
    spoil(run);
    run.come(reads(0, 4));
    run.pass(4 * SECOND);
}

fn write(run: &mut Neighbours, spoil: impl FnOnce(&mut Neighbours)) {
    spoil(run);
    run.come(writes(0, 4));
    run.pass(4 * SECOND);
}

type Make = fn(&mut Neighbours);

fn fault(name: &'static str, kind: Kind, make: Make, cause: Cause, says: &'static [&'static str]) -> Fault {
    Fault { name, grid: Grid::default(), homes: &[(0, "")], kind, make, cause, says }
}

fn on(layout: &'static str, nodes: u32, fault: Fault) -> Fault {
    Fault { grid: Grid { layout, nodes, ..fault.grid }, ..fault }
}

const R: Kind = Kind::Read;
const W: Kind = Kind::Write;

fn at_devices() -> Vec<Fault> {
    let device = |name, kind, make: Make| fault(name, kind, make, Cause::Device, &["device 2/0 is slow"]);
    vec![
        device("a slow device, reads of a mirror", R, |run| read(run, |run| slow_disk(run, 1))),
        device("a slow device, writes of a mirror", W, |run| write(run, |run| slow_disk(run, 1))),
        on("parity:2+1", 3, device("a slow device, reads of parity", R, |run| read(run, |run| slow_disk(run, 1)))),
        on("parity:2+1", 3, device("a slow device, writes of parity", W, |run| write(run, |run| slow_disk(run, 1)))),
        on("mirror:2", 2, device("a slow device of two, writes", W, |run| write(run, |run| slow_disk(run, 1)))),
        fault("slow devices, reads", R, |run| read(run, slow_disks), Cause::Devices, &["all devices"]),
        fault("slow devices, writes", W, |run| write(run, slow_disks), Cause::Devices, &["all devices"]),
    ]
}

fn at_nodes() -> Vec<Fault> {
    let way = |name, kind, make: Make| fault(name, kind, make, Cause::Network, &["the way to node 3 and back"]);
    let two: Make = |run| {
        read(run, |run| {
            slow_way(run, 1);
            slow_way(run, 3);
        });
    };
    let hung: Make = |run| {
        run.come(writes(0, 4));
        run.pass(SECOND);
        run.world.pause_node(1);
        run.pass(4 * SECOND);
    };
    let stutters_read: Make = |run| {
        run.fill(0);
        run.come(reads(0, 4));
        stutter(run, 2);
    };
    let stutters_write: Make = |run| {
        run.come(writes(0, 4));
        stutter(run, 1);
    };
    let straggles: Make = |run| {
        run.come(writes(0, 16));
        run.pass(SECOND);
        run.world.nodes[1].disks[0].straggle_until = Some(run.world.now() + 300 * MS);
        run.pass(3 * SECOND);
    };
    vec![
        way("a slow way to a node, reads of a mirror", R, |run| read(run, |run| slow_way(run, 2))),
        on(
            "mirror:2",
            2,
            fault(
                "a slow way to a node, writes of a mirror",
                W,
                |run| write(run, |run| slow_way(run, 1)),
                Cause::Network,
                &["the way to node 2 and back"],
            ),
        ),
        on("parity:2+1", 3, way("a slow way to a node, reads of parity", R, |run| read(run, |run| slow_way(run, 2)))),
        on(
            "mirror:2",
            4,
            fault("a slow way to two nodes", R, two, Cause::Network, &["the way to nodes 2 and 4 and back"]),
        ),
        fault(
            "a slow way to all nodes",
            R,
            |run| read(run, |run| (0..3).for_each(|n| slow_way(run, n))),
            Cause::Network,
            &["the way to nodes and back"],
        ),
        on("mirror:2", 2, fault("a node that hangs, writes", W, hung, Cause::Node, &["node 2"])),
        fault("a node that hangs at times, reads", R, stutters_read, Cause::SecondRound, &["node 3"]),
        on("mirror:2", 2, fault("a node that hangs at times, writes", W, stutters_write, Cause::Node, &["node 2"])),
        on("mirror:2", 2, fault("a write that is late", W, straggles, Cause::EarlierWrites, &["node 2"])),
    ]
}

fn of_others() -> Vec<Fault> {
    let few = Grid { disk_in_flight: Some(2), ..Grid::default() };
    let beside: Make = |run| {
        run.fill(0);
        run.fill(1);
        slow_disks(run);
        run.come(reads(1, 256));
        run.pass(SECOND);
        run.come(reads(0, 24));
        run.pass(16 * SECOND);
    };
    let neighbour = |name| fault(name, R, beside, Cause::Neighbour, &["volume v1, which takes", "% of the requests"]);
    let two = &[(0, ""), (0, "")];
    let floor = fault("a neighbour's floor", R, beside, Cause::Floor, &["the floor of volume v1"]);
    let limit = |name, kind, make: Make| {
        let fault = fault(name, kind, make, Cause::Limit, &["iops=100,burst=1ms"]);
        Fault { homes: &[(0, "iops=100,burst=1ms")], ..fault }
    };
    let group: Make = |run| {
        run.come(writes(0, 4));
        run.are_mute = true;
        for n in 0..12 {
            run.pass(SECOND);
            run.take_group(&format!("s{n}"));
        }
        run.pass(SECOND);
    };
    let group = fault("a group of snapshots", W, group, Cause::Snapshots, &["a group of snapshots"]);
    vec![
        Fault { homes: two, grid: few, ..neighbour("a neighbour at the host") },
        Fault { homes: two, grid: Grid { isolation: None, ..few }, ..neighbour("a neighbour at nodes") },
        Fault { homes: &[(0, ""), (0, "floor=400")], grid: Grid { isolation: None, ..few }, ..floor },
        limit("its own limit, writes", W, |run| write(run, |_| {})),
        limit("its own limit, reads", R, |run| {
            run.come(reads(0, 8));
            run.pass(4 * SECOND);
        }),
        Fault { homes: &[(0, ""), (1, "")], grid: Grid { reactors: 2, ..Grid::default() }, ..group },
    ]
}

fn of_itself() -> Vec<Fault> {
    let grid = Grid::default();
    let hurry: Make = |run| {
        (0..3).for_each(|node| run.world.net.link_mut(0, node).slow = 2 * MS);
        run.come(Load { bytes: 64 << 10, step: 511, ..writes(0, 256) });
        run.pass(10 * SECOND);
    };
    let write_back = Budget { writeback_bytes: 2 << 20, ..grid.budget };
    let tight_log = Budget { writeback_bytes: 16 << 20, ..grid.budget };
    let scattered: Make = |run| {
        // Every other block is written, and the others are read: for that the leaf is all that is needed.
        let filler = run.come(Load { bytes: 4 << 10, step: 2, ..writes(0, 16) });
        run.pass(2 * SECOND);
        run.go(filler);
        // Until the leaves are where leaves lie.
        run.pass(40 * SECOND);
        slow_disks(run);
        run.come(Load { bytes: 4 << 10, at: 4 << 10, step: 514, ..reads(0, 4) });
        run.pass(4 * SECOND);
    };
    let large: Make = |run| {
        run.fill(0);
        narrow_disks(run, 100 << 20);
        run.come(Load { bytes: 1 << 20, ..reads(0, 96) });
        run.pass(10 * SECOND);
    };
    let small: Make = |run| {
        run.fill(0);
        (0..3).for_each(|node| run.world.net.link_mut(0, node).slow = MS);
        run.come(Load { bytes: 512, ..writes(0, 32) });
        run.pass(4 * SECOND);
    };
    let alone: Make = |run| {
        run.fill(0);
        run.come(reads(0, 1));
        run.pass(4 * SECOND);
    };
    vec![
        Fault {
            grid: Grid { budget: write_back, ..grid },
            ..fault("full write-back", W, hurry, Cause::WriteBack, &["memory.writeback"])
        },
        Fault {
            grid: Grid { journal_bytes: 32 << 20, ..grid },
            ..fault("a full journal", W, hurry, Cause::Journal, &["the fullest is that of device"])
        },
        Fault {
            grid: Grid { disk_bytes: 330 << 20, journal_bytes: 256 << 20, ..grid },
            ..fault("no room", W, hurry, Cause::Space, &["cleaner"])
        },
        Fault {
            grid: Grid {
                budget: tight_log,
                tune: |config| (config.fold_runs_min, config.map_cache_bytes_max) = (1, 4 << 10),
                ..grid
            },
            ..fault("a map that does not fit", R, scattered, Cause::Map, &["memory.map_cache"])
        },
        fault("reads of its own", R, large, Cause::OwnReads, &["32 MiB"]),
        fault("writes of parts of blocks", W, small, Cause::SmallWrites, &["less than a block"]),
        fault("one request at a time", R, alone, Cause::Guest, &["one request under way at a time"]),
        fault("nothing", R, |run| read(run, |_| {}), Cause::Nothing, &["nothing is slow"]),
    ]
}

#[test]
fn faults_are_told_rightly() {
    let faults: Vec<Fault> = [at_devices(), at_nodes(), of_others(), of_itself()].into_iter().flatten().collect();
    let mut wrong = 0;
    for fault in &faults {
        let (told, figures) = fault.told();
        let is_right = fault.is_told_rightly(&told);
        wrong += usize::from(!is_right);
        if !is_right {
            println!("    {figures}");
        }
        println!("{} {}: {:?}: {}", if is_right { "right" } else { "WRONG" }, fault.name, told.cause, told.text);
    }
    assert!(faults.len() >= 20 && wrong * WRONG_ONE_IN <= faults.len(), "{wrong} of {} are told wrongly", faults.len());
}
