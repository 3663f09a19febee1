//! Space: which nodes and devices there are for the volume by its policy, where new things go, and how much room is
//! left.
//!
//! [`Topology`] answers what follows from policy and devices, and changes nothing; [`Placer`] chooses homes and legs;
//! [`Room`] knows how much fits, [`Rotation`] what is to leave the first tier, [`Survey`] which segments lack
//! something, and [`Governor`] how fast they are made whole while guests are at work.

pub mod claims;
mod governor;
mod journals;
mod placement;
pub mod protect;
mod reserve;
mod room;
mod survey;
mod tiers;
mod topology;

pub(crate) use governor::{GUESTS_REST, Governor, Need};
pub(crate) use journals::{STAND_IN_PER_MILLE, fill_per_mille, is_roomy};
pub(crate) use placement::{Placer, Shape};
pub(crate) use reserve::Keep;
pub use reserve::{reserve_bytes, spare_bytes};
pub use room::DEAD_PER_MILLE_MIN;
pub(crate) use room::{LetIn, Room, movable_payload_bytes};
pub(crate) use survey::{Found, Survey, is_weak};
pub(crate) use tiers::Rotation;
pub use tiers::TierUse;
pub(crate) use topology::{Target, Topology};
