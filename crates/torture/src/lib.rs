//! Drives the real binary through kill -9, SIGSTOP and restarts, under a workload that knows what every byte must be.
//!
//! [`engine::Engine`] keeps many requests in flight over NBD and asks [`model::Model`] whether each answer could be true;
//! [`faults`] hits nodes and the host meanwhile, never more of them than the layouts tolerate. Every failure is a bug:
//! nothing that is done here may cost an error, a wrong byte or a long wait.
//!
//! [`atlas`] does the same to a grid over several machines, network namespaces of this one.
//!
//! A seed fixes what is drawn, not when the machine gets to it: a run is repeated, not replayed. The simulator replays.

pub mod atlas;
pub mod cell;
pub mod engine;
pub mod faults;
pub mod fleet;
pub mod guest;
pub mod history;
pub mod journey;
pub mod logs;
pub mod maintenance;
pub mod model;
pub mod workload;
