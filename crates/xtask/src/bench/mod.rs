//! `./x bench`: what guests get, beside the raw file and qemu-nbd.
//!
//! Every run makes a grid of its own, and takes it down with all its files, however it ends.

mod fio;
mod grid;
mod guests;

pub use guests::run;
