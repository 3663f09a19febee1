//! The HTTP interface of a host.
//!
//! Role: a skin over [`holdfast_api`]. [`table::all`] is one table of what can be asked for: routes ([`serve`]) and their
//! description ([`described`]) come from it, so one can't be without the other. Each entry makes a [`Request`] of a path, a
//! query and a body, and shows a [`Response`] as a resource. Who carries requests out is behind [`Ask`].
//!
//! Invariants
//! 1. What comes to a path of the table is answered as the description has it; a body that is no JSON, too.
//! 2. A change that is asked for twice with one idempotency key is carried out once, while the host runs ([`retries`]).
//! 3. Every request is answered within its deadline; what is under way then goes on.
//! 4. Over the network each request is judged by a certificate or a token that is good then ([`door`]).
//!
//! [`Request`]: holdfast_api::Request
//! [`Response`]: holdfast_api::Response

mod answer;
mod bodies;
mod describe;
mod door;
mod endpoint;
mod events;
mod given;
mod intake;
mod listener;
mod local;
pub mod metrics;
mod problem;
mod retries;
mod seats;
mod serve;
pub mod table;
mod web;
mod words;

pub use axum::Router;
pub use describe::described;
pub use door::Caller;
pub use listener::{Limits, serve_local, serve_tls, serve_unix};
pub use local::local_router;
pub use serve::{Ask, Config, Shown, router};
