//! The node's machine, driven by hand.
//!
//! One program: each more is compiled and linked by itself.

mod cached;
mod crashes;
mod damage;
mod extents;
mod peer_rebuild;
mod queue;
mod requests;
mod siblings;
mod space;
mod support;
