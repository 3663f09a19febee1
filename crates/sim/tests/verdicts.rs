//! What `holdfast why slow` says of faults that are made here, one after the other: see `holdfast_sim::why`.

use holdfast_host::Kind;
use holdfast_sim::neighbours::{Grid, Home, Load, Neighbours};
use holdfast_verdict::{Cause, Verdict};
use std::time::Duration;

/// A fault, and what is to be said of it.
struct Fault {
    name: &'static str,
    grid: Grid,
    /// Policies of the volumes; that of the first is asked for.
    policies: &'static [&'static str],
    kind: Kind,
    /// Makes it, and has guests ask.
    make: fn(&mut Neighbours),
    cause: Cause,
    /// Words that the sentence has.
    says: &'static [&'static str],
}

impl Fault {
    fn told(&self) -> Verdict {
        let homes: Vec<Home> = self.policies.iter().map(|limit| Home { reactor: 0, limit }).collect();
        let mut run = Neighbours::on(31, self.grid, &homes);
        (self.make)(&mut run);
        run.why(0, self.kind).expect("requests were answered")
    }

    fn is_told_rightly(&self, told: &Verdict) -> bool {
        told.cause == self.cause && self.says.iter().all(|words| told.text.contains(words))
    }
}

/// Faults that may be told wrongly: one in twenty.
const WRONG_ONE_IN: usize = 20;

const SECOND: Duration = Duration::from_secs(1);

fn reads(volume: usize, in_flight: u64) -> Load {
    Load { volume, in_flight, bytes: 8 << 10, reads: true }
}

fn writes(volume: usize, in_flight: u64) -> Load {
    Load { volume, in_flight, bytes: 8 << 10, reads: false }
}

fn slow_disk(run: &mut Neighbours, node: usize) {
    run.world.nodes[node].disks[0].slowness = 80;
}

fn slow_way(run: &mut Neighbours, node: usize) {
    run.world.net.link_mut(0, node).slow = Duration::from_millis(10);
}

/// On these nodes: of a volume that was filled before, for there is nothing to read elsewhere.
fn read_with(run: &mut Neighbours, spoil: impl FnOnce(&mut Neighbours)) {
    run.fill(0);
    spoil(run);
    run.come(reads(0, 4));
    run.pass(4 * SECOND);
}

fn write_with(run: &mut Neighbours, spoil: impl FnOnce(&mut Neighbours)) {
    spoil(run);
    run.come(writes(0, 4));
    run.pass(4 * SECOND);
}

fn faults() -> Vec<Fault> {
    let (grid, policies, kind) = (Grid::default(), &[""][..], Kind::Read);
    let base = |name, make: fn(&mut Neighbours), cause, says| Fault { name, grid, policies, kind, make, cause, says };
    let wrote = |fault: Fault| Fault { kind: Kind::Write, ..fault };
    vec![
        base("a slow device, reads", |run| read_with(run, |run| slow_disk(run, 1)), Cause::Device, &["device 2/0"]),
        wrote(base(
            "a slow device, writes",
            |run| write_with(run, |run| slow_disk(run, 1)),
            Cause::Device,
            &["device 2/0"],
        )),
        base(
            "a slow way to a node, reads",
            |run| read_with(run, |run| slow_way(run, 2)),
            Cause::Network,
            &["the way to nodes"],
        ),
        wrote(Fault {
            policies: &["iops=100,burst=1ms"],
            ..base("its own limit, writes", |run| write_with(run, |_| {}), Cause::Limit, &["iops=100"])
        }),
        base("nothing", |run| read_with(run, |_| {}), Cause::Nothing, &["nothing is slow"]),
    ]
}

#[test]
fn faults_are_told_rightly() {
    let faults = faults();
    let told: Vec<Verdict> = faults.iter().map(Fault::told).collect();
    let mut right = 0;
    for (fault, told) in faults.iter().zip(&told) {
        let is_right = fault.is_told_rightly(told);
        right += usize::from(is_right);
        let mark = if is_right { "right" } else { "WRONG" };
        println!("{mark} {}: {:?}: {}", fault.name, told.cause, told.text);
    }
    let wrong = faults.len() - right;
    assert!(wrong * WRONG_ONE_IN <= faults.len(), "{wrong} of {} are told wrongly", faults.len());
}
