//! Stories and runs of a simulated grid.
//!
//! One program: each more is compiled and linked by itself.

mod absence;
mod cluster;
mod devices;
mod grid;
mod idle;
mod ledgers;
mod locality;
mod metadata_loss;
mod multi_host;
mod mutations;
mod neighbours;
mod nested;
mod scenarios;
mod separate_clones;
mod sharing;
mod sight;
mod stalls;
mod swarm;
mod tiers;
mod two_nodes;
mod verdicts;
