//! The control plane of a host, as a machine: from the grid's records and what is known here to what is done next.
//!
//! ```text
//! metadata store ──watch──> View ──changes──┐
//! the host: volumes, nodes, clock ──────────┼──> Cluster ──actions──> executor ──outcomes──> Cluster
//! commands that work on a volume (holds) ───┘
//! ```
//! [`view::View`] holds every record in memory, kept by one watch. [`assign::plan`] is a pure function of it: what a host
//! does next about one volume, by what is there and not by what has happened. [`machine::Cluster`] asks it again whenever
//! something has changed, and keeps at most one action a volume under way.
//!
//! Every action may come late, twice, or not at all: what changes records compares the versions that it was planned by, and
//! what works on the host is left out where the record has changed since ([`Cluster::is_current`]), and planned anew from what the
//! host then says. An opening claims only if nobody has since the view's newest epoch. An executor carries actions out and
//! chooses nothing.
//!
//! [`steward::Steward`] is a machine of its own beside it: what one host does for the whole grid. [`upkeep::Upkeep`] is another: what
//! each host does as time goes by for what it has.

pub mod assign;
pub mod beat;
pub mod deletion;
pub mod exports;
pub mod forecast;
pub mod machine;
pub mod recover;
pub mod schedule;
pub mod steward;
pub mod upkeep;
pub mod view;

pub use assign::{Local, Reading};
pub use machine::{Action, ActionId, Cluster, Config, Effect, Event, Outcome, SILENT_FOR};
pub use steward::Steward;
pub use upkeep::Upkeep;
pub use view::{Change, Changes, View};
