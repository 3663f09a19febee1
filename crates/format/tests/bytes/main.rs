//! The format's bytes: golden ones, and hostile ones.
//!
//! One program: each more is compiled and linked by itself.

mod golden;
mod golden_meta;
mod hostile;
mod hostile_records;
