//! The host-side controller without I/O: single writer of one volume, straight to the nodes.
//!
//! Start reading at [`controller::Controller`].

mod anatomy;
pub mod api;
mod append;
mod apply;
mod basis;
mod bypass;
mod checkpoint;
pub mod claims;
mod cleaner;
pub mod controller;
mod copies;
mod destage;
mod directory;
mod domains;
mod family;
mod fetch;
mod governor;
pub mod group;
mod handover;
mod heat;
mod hidden;
pub mod hold;
mod job;
mod layers;
mod leafload;
mod loading;
mod log;
mod map;
mod mark;
mod merge;
mod moves;
mod opening;
mod peers;
mod placement;
mod pressure;
pub mod protect;
mod rangemap;
mod read;
mod readahead;
mod repair;
mod reserve;
mod resize;
mod resolve;
mod roll;
mod root;
mod scrub;
mod sealing;
mod segments;
mod sharing;
mod snapshots;
mod space;
mod survey;
mod tiers;
mod wants;
mod warming;
mod write;

pub use anatomy::{Anatomy, CacheParts, DeviceParts, LegParts, LogParts, SegmentParts};
pub use api::{
    Change, Config, Counters, Effect, Event, Lane, Mutations, Notice, SlowBecause, SpaceUse, State, Status, Target,
    Warming,
};
pub use claims::Claim;
pub use controller::Controller;
pub use group::{Group, GroupEffect, GroupEnd, GroupEvent, GroupMember, Why};
pub use layers::{CloneInfo, Snapshot};
pub use mark::Sharing;
pub use reserve::{reserve_bytes, spare_bytes};
pub use sealing::Seal;
pub use sharing::Shares;
pub use space::DEAD_PER_MILLE_MIN;
pub use tiers::TierUse;
