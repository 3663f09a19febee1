//! The plugin for Proxmox VE: its methods against real grids, under Perl's taint mode, as PVE calls them. What of PVE itself
//! they stand on is in `integrations/proxmox/t/lib`.
//!
//! Needs the programs `perl`, `perlcritic`, `qemu-io` and `etcd`; `./x` sees to them.

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;
use support::{Grid, etcd, needs, text, until};

fn plugin() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../integrations/proxmox")
}

/// Runs one of its tests, which has to pass in all that it looks at.
fn passes(test: &str, told: &[(&str, &Path)]) {
    needs("qemu-io");
    let mut command = Command::new(needs("perl"));
    command.current_dir(plugin()).args(["-T", "-It/lib", "-Iperl", &format!("t/{test}.t")]);
    command.envs(told.iter().copied());
    let output = command.output().expect("it runs");
    let said = text(&output.stdout);
    let is_planned = said.lines().any(|line| line.starts_with("1.."));
    assert!(output.status.success() && is_planned, "{test}.t: {said}{}", text(&output.stderr));
}

#[test]
fn its_sources_have_no_gross_faults() {
    let mut command = Command::new(needs("perlcritic"));
    let output = command.current_dir(plugin()).args(["--gentle", "perl", "t"]).output().expect("it runs");
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
}

#[test]
fn what_disks_are_called_is_known_without_a_grid() {
    passes("names", &[]);
}

#[test]
fn disks_are_made_used_and_deleted() {
    let grid = Grid::new(70);
    grid.up("--nodes 3 --devices 1");
    passes("disks", &[("HOLDFAST_DIR", grid.dir())]);
}

#[test]
fn an_interrupted_call_is_given_again() {
    let grid = Grid::new(71);
    grid.up("--nodes 3 --devices 1");
    passes("interrupted", &[("HOLDFAST_DIR", grid.dir())]);
}

/// Two machines of one grid, the second without a node.
fn two_nodes(index: u16, endpoint: &str) -> (Grid, Grid) {
    let (a, b) = (Grid::new(index), Grid::new(index + 1));
    a.up(&format!("--nodes 3 --devices 1 --etcd {endpoint} --address 127.0.0.1 --name a"));
    let token = a.ok("grid token").trim().to_string();
    b.up(&format!("--nodes 0 --etcd {endpoint} --address 127.0.0.1 --name b --join {token}"));
    until("both hosts see all nodes", || (1..=3).all(|n| a.node_state(n) == "up" && b.node_state(n) == "up"));
    (a, b)
}

#[test]
fn disks_follow_their_machines_to_other_nodes() {
    let store = tempfile::tempdir().expect("a directory");
    let member = etcd(store.path(), 70);
    let (a, b) = two_nodes(72, &member.config().endpoint());
    passes("nodes", &[("HOLDFAST_DIR_A", a.dir()), ("HOLDFAST_DIR_B", b.dir())]);
}

#[test]
fn disks_of_a_node_that_is_lost_are_had_elsewhere() {
    let store = tempfile::tempdir().expect("a directory");
    let member = etcd(store.path(), 71);
    let (a, b) = two_nodes(74, &member.config().endpoint());
    let host = a.pid("host").expect("it runs").to_string();
    passes("lost", &[("HOLDFAST_DIR_A", a.dir()), ("HOLDFAST_DIR_B", b.dir()), ("HOLDFAST_HOST", Path::new(&host))]);
}
