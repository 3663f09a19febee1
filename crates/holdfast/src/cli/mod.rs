//! The command line: what can be asked, and how answers look.

pub mod config;
pub mod device;
pub mod etcd;
pub mod explain;
pub mod filter;
pub mod format;
pub mod grid;
pub mod machine;
pub mod meta;
pub mod node;
pub mod progress;
pub mod protect;
pub mod reference;
pub mod sharing;
pub mod snapshot;
pub mod space;
pub mod status;
pub mod task;
pub mod tier;
pub mod tls;
pub mod top;
pub mod transfer;
pub mod trash;
pub mod units;
pub mod volume;
pub mod why;
