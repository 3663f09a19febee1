//! `./x bench`: what guests get, beside the raw file and qemu-nbd. What something costs: `--maintenance` background
//! care, `--tls` TLS between host and nodes, `--encrypt` encryption at rest, `--reduce` compression, and what that
//! saves, `--nested` nested layouts beside a mirror. `--backup` is backups beside reading in order. `--sharing` is what a
//! sharing domain saves and costs. `--noisy` is what a guest feels of its neighbour, by `qos.isolation`. `--diskspd` is
//! many threads on three nodes beside the raw file;
//! `--etcd` what a grid that keeps its metadata in etcd does when a node, or etcd, or both hang, and when a volume
//! changes hands.
//!
//! Every run makes grids of its own, and takes them down with all their files, however it ends.

mod backup;
mod disks;
mod diskspd;
mod encrypt;
mod etcd;
mod fio;
mod grid;
mod guests;
mod hosts;
mod latency;
mod load;
mod machine;
mod maintenance;
mod nested;
mod noisy;
mod paired;
mod reduce;
mod report;
mod sharing;
mod tls;

pub use disks::Fleet;

use anyhow::Result;

/// The spelling of earlier releases, accepted for one more.
const OLDER_MAINTENANCE: &str = "--care";

pub fn run(arguments: &[String]) -> Result<()> {
    match arguments.split_first() {
        Some((first, rest)) if first == "--maintenance" || first == OLDER_MAINTENANCE => maintenance::run(rest),
        Some((first, rest)) if first == "--backup" => backup::run(rest),
        Some((first, rest)) if first == "--tls" => tls::run(rest),
        Some((first, rest)) if first == "--encrypt" => encrypt::run(rest),
        Some((first, rest)) if first == "--nested" => nested::run(rest),
        Some((first, rest)) if first == "--noisy" => noisy::run(rest),
        Some((first, rest)) if first == "--reduce" => reduce::run(rest),
        Some((first, rest)) if first == "--sharing" => sharing::run(rest),
        Some((first, rest)) if first == "--diskspd" => diskspd::run(rest),
        Some((first, rest)) if first == "--etcd" => hosts::run(rest),
        _ => guests::run(arguments),
    }
}
