//! One host as a machine: the sessions of its clients, the volumes that it has open, and all that lies between the two.
//!
//! Role: [`Host`] gets what front ends, nodes, other hosts, the metadata store and the control plane say, and pushes what it
//! wants of them ([`Event`], [`Effect`]). It does no I/O and knows no protocol. A front end is a module of the shell: it
//! turns bytes into requests of a session, and replies and [`News`] into bytes. The simulator drives this very machine.
//!
//! A request's way: session → forwarding ([`forward::Ingress`], where several hosts offer the volume) → right to write
//! ([`Writers`]) → its turn (`holdfast_qos`) → filters (`holdfast_filter`) → controller (`holdfast_volume`).
//!
//! Names: an **association** is who asks, over all its connections ([`holdfast_format::forward::Client`]); a **lane**
//! is one session of it. What must not be carried out twice, or by two at a time, is judged by association; order by
//! lane.

mod access;
mod admission;
mod event;
mod filters;
pub mod forward;
mod groups;
pub mod homes;
mod host;
mod inspections;
mod limits;
mod mutations;
#[cfg(feature = "simulated")]
pub mod observed;
mod offers;
mod orders;
mod packing;
pub mod planned;
mod remotes;
pub mod requests;
pub mod reservation;
mod sessions;
mod slow;
mod talk;
mod turns;
pub mod views;
mod volumes;
mod waiters;
mod write_gate;
mod writers;

pub use access::{Caller, Lists};
pub use admission::{Full, Handshakes, HostPlaces, Room, Source, Taken, Telling, node_peers};
pub use event::{
    Call, ChangeOutcome, CloseOutcome, DependentOutcome, Effect, Event, FilterChange, FilterOutcome, GroupMemberAt,
    GroupOrder, GroupOutcome, Level, News, OpenSpec, Order, Outcome, Ownership, PeerEffect, PeerEvent, Policy,
    ResizeOutcome, Wanted,
};
pub use forward::{LinkId, Peer};
pub use groups::{GroupId, Heard, Sibling};
pub use holdfast_qos::{Capacity, Figures, Isolation, Policy as QosPolicy, promise};
pub use holdfast_stages::{BOUNDS_US, Kind, NodeReport, Report, Spans, Stage, StageReport, Tally, Totals};
pub use host::{Config, Host};
pub use limits::{LIMIT, LimitError, Limits, policy_of};
pub use mutations::Mutations;
pub use offers::{Offer, Place};
pub use packing::{PackingFigures, PackingShare};
pub use sessions::{Connection, Denied, DeniedKind};
pub use slow::Waits;
pub use volumes::{
    Budget, Care, SESSIONS_MAX, VOLUMES_MAX, Volume, Wait, receiving_export, snapshot_export_name, split_export,
    split_ticket,
};
pub use writers::{ACTIVE_AFTER, QUIET, SessionId, WAIT_MAX, WriterEffect, WriterEvent, Writers, WritersView};
