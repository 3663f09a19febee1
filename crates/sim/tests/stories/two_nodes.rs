//! Two machines and a witness: all orders in which machine A, machine B, the witness and the link between A and B are lost
//! and come back.
//!
//! A machine is a node of two disks, a host, and one of three votes of the metadata store; the witness is the third. Whoever
//! is with a second vote reaches the metadata; two machines whose link is cut reach each other's votes through the witness.
//! After each change the volume must be served wherever two votes are together with a node that has all data, and
//! everything that any owner ever answered is judged at the end: two writers, or a lost write, would show.

use holdfast_sim::scenario::{Cluster, Setup};
use holdfast_volume::State;
use std::collections::BTreeSet;
use std::time::Duration;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Change {
    A,
    B,
    Witness,
    Link,
    /// The other host takes the volume over on command, where that can be.
    TakeOver,
}

const CHANGES: [Change; 5] = [Change::A, Change::B, Change::Witness, Change::Link, Change::TakeOver];

struct Machines {
    cluster: Cluster,
    up: [bool; 2],
    witness: bool,
    link: bool,
    owner: usize,
    /// Nodes that have all data.
    fresh: BTreeSet<usize>,
}

impl Machines {
    fn new(seed: u64, layout: &str) -> Machines {
        let mut cluster = Setup::new(seed).layout(layout).nodes(2).disks(2).start();
        cluster.write(0, 64);
        cluster.until("everything is whole", is_whole);
        Machines { cluster, up: [true; 2], witness: true, link: true, owner: 0, fresh: BTreeSet::from([0, 1]) }
    }

    /// Whether a machine is together with a second vote.
    fn has_quorum(&self, machine: usize) -> bool {
        self.up[machine] && (self.witness || self.link && self.up[1 - machine])
    }

    fn reaches(&self, host: usize) -> BTreeSet<usize> {
        (0..2).filter(|node| self.up[*node] && (*node == host || self.link)).collect()
    }

    fn can_serve(&self, host: usize) -> bool {
        self.has_quorum(host) && self.reaches(host).intersection(&self.fresh).next().is_some()
    }

    fn change(&mut self, change: Change) {
        match change {
            Change::A | Change::B => self.toggle(usize::from(change == Change::B)),
            Change::Witness => self.witness = !self.witness,
            Change::Link => {
                self.link = !self.link;
                for host in 0..2 {
                    match self.link {
                        true => self.cluster.world().unblock(host, 1 - host),
                        false => self.cluster.world().block(host, 1 - host, true, true),
                    }
                }
            }
            Change::TakeOver => {
                let other = 1 - self.owner;
                if self.can_serve(other) {
                    self.cluster.open_on(other);
                    self.owner = other;
                }
            }
        }
        for host in 0..2 {
            self.cluster.world().hosts[host].meta_quorum = self.has_quorum(host);
        }
        self.follow();
    }

    fn toggle(&mut self, machine: usize) {
        self.up[machine] = !self.up[machine];
        if self.up[machine] {
            self.cluster.start_node(machine);
            self.cluster.start_host(machine);
        } else {
            self.cluster.crash_node(machine);
            self.cluster.crash_host(machine);
        }
    }

    /// Who shall have the volume now, and what is asked of it.
    fn follow(&mut self) {
        if !self.up[self.owner] || !self.cluster.is_anybody_there() {
            let Some(next) = (0..2).find(|host| self.can_serve(*host)) else { return self.cluster.pass_ms(400) };
            self.owner = next;
            self.cluster.open_on(next);
        }
        if !self.can_serve(self.owner) {
            return self.cluster.pass_ms(400);
        }
        self.cluster.until("the volume is served", |s| s.serving().is_some());
        self.cluster.write(7, 40);
        self.cluster.write(200, 3);
        self.cluster.read(0, 256);
        self.fresh = self.reaches(self.owner);
        if self.fresh.len() == 2 {
            self.cluster.until("everything is whole", is_whole);
            // The nodes have yet to hear which entries, of the time when one was out, are needed no more.
            self.cluster.pass_ms(5);
        }
    }
}

fn is_whole(cluster: &Cluster) -> bool {
    let status = cluster.status();
    status.state == State::Open && status.degraded_segments == 0 && status.at_risk_entries == 0
}

fn all_orders(layout: &str, length: u32) {
    for number in 0..CHANGES.len().pow(length) {
        let order: Vec<Change> = (0..length).map(|i| CHANGES[number / CHANGES.len().pow(i) % CHANGES.len()]).collect();
        let run = || {
            let mut machines = Machines::new(7_000 + number as u64, layout);
            order.iter().for_each(|change| machines.change(*change));
            machines.cluster.pass(Duration::from_millis(50));
            (0..2)
                .filter(|machine| !machines.up[*machine])
                .collect::<Vec<_>>()
                .into_iter()
                .for_each(|m| machines.toggle(m));
            (0..2).for_each(|host| machines.cluster.world().hosts[host].meta_quorum = true);
            (0..2).for_each(|host| machines.cluster.world().unblock(host, 1 - host));
            if !machines.cluster.is_anybody_there() {
                machines.cluster.open_on(0);
            }
            machines.cluster.finish();
        };
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
        assert!(ended.is_ok(), "{layout}: {order:?}");
    }
}

#[test]
fn mirrors_of_two_machines_and_a_witness_are_served_through_all_orders_of_loss() {
    all_orders("mirror:2", 4);
}

#[test]
fn nested_mirrors_are_served_through_all_orders_of_loss() {
    all_orders("nested-mirror", 4);
}

/// `cargo test --profile sim -p holdfast-sim --test stories -- --ignored two_nodes`
#[test]
#[ignore = "takes many minutes"]
fn longer_orders_of_loss() {
    all_orders("mirror:2", 6);
}
