//! The deterministic simulator: real machines on simulated disks, connections, clocks and metadata.
//!
//! Everything in a run follows from one seed. [`world::World`] holds the grid; [`swarm`] draws a configuration and faults
//! from a seed and runs a workload on it, safety first, then liveness; [`checker`] judges every reply; [`scenario`] is
//! the hand-driven form in which scenarios are written. [`cluster`] has control planes alone, [`multi_host`] hosts
//! alone, and [`grid`] both.

pub mod checker;
pub mod cluster;
pub mod disk;
mod domain;
pub mod faults;
pub mod grid;
mod groups;
pub mod growth;
pub mod host;
pub mod idle;
pub mod ledger_client;
pub mod ledger_recovery;
pub mod ledger_run;
pub mod meta;
pub mod multi_host;
pub mod mutations;
pub mod neighbours;
pub mod net;
pub mod node;
pub mod plan;
mod recovery;
pub mod runner;
pub mod scenario;
pub mod secrecy;
mod separate;
pub mod service;
pub mod shards;
pub mod sight;
mod snapshots;
pub mod swarm;
pub mod trace;
pub mod why;
pub mod workload;
pub mod world;
