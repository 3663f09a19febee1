//! The storage node without I/O: it appends to ledgers, keeps shards, and fences old writers, and knows nothing else.
//!
//! [`Node`] is the machine; the shell (or the simulator) passes it requests and disk completions and carries out its
//! effects. Every device of a node is a world of its own: journal, ledgers, promises and shards of a device live on that
//! device, and its failure is its own (protocol rules 6 and 25).

mod api;
mod cache;
mod completion;
mod dealing;
mod depth;
mod device;
mod device_queue;
mod fence;
mod hosts;
mod io;
mod journal;
mod labels;
mod layout;
mod ledgers;
mod line;
mod log_read;
mod meter;
mod node;
mod open;
mod outage;
mod peer_rebuild;
mod serving;
mod shards;
mod siblings;
pub mod signatures;

pub use api::{
    AskToken, DeviceSlot, DiskError, DiskToken, Effect, Event, FailReason, Mutations, Next, NodeConfig, Notice, PeerId,
};
pub use dealing::{Dealing, Named};
pub use layout::{FormatDeviceError, JournalSizing, ProbeError, format_device, note_flush_cost, probe_superblock};
pub use node::Node;
pub use siblings::{Held, Message};
