//! The controller's machine, driven by hand.
//!
//! One program: each more is compiled and linked by itself.

mod encryption;
mod groups;
mod handing_over;
mod ideal;
mod integrity;
mod layers;
mod map_memory;
mod packing;
mod partial_zeroes;
mod read_ahead;
mod room;
mod root_races;
mod searching;
mod slices;
mod support;
mod urgency;
