//! The host-side controller without I/O: single writer of one volume, straight to the nodes.
//!
//! Start reading at [`controller::Controller`].

pub mod api;

pub use api::{Config, Effect, Event, Lane, Mutations, Notice, State, Status};
