//! Quality of service: which tenant's request goes next, how many are under way, and what is promised.
//!
//! Role: a machine between all that asks volumes of a reactor and their controllers. A *tenant* is what a policy names: a
//! volume, a clone, the care of volumes. A request waits here until it *goes*; from then on it is under way, and this only
//! counts it until it is *done*. One that waits can be dropped without a trace. It has no clock and does no I/O.
//!
//! The rules, in the order in which a request is looked for while less is under way than the [window](scheduler) allows:
//!
//! 1. A tenant's first request that has waited for others for nearly a second.
//! 2. The tenant whose *floor* is due longest. Each request makes the next one due 1/floor later. What a weight gave does not
//!    count for the floor; what the floor gave does not count for the weight.
//! 3. Start-time fair queueing: of all the tenant with the least *start*. Virtual time is the start of what went last, and
//!    each request moves its tenant's start on by cost over weight. Who comes back starts at virtual time: rest is no credit.
//!
//! While the window is full, up to eight requests go beyond it: of *sparse* tenants, which had at most four requests in flight
//! in the last second, and only if it is their turn by rule 3. Limits hold before all of this. While one tenant is alone there
//! is no window, and none of it is computed.
//!
//! Invariants: in `scheduler/verify.rs`, each with its assertion. And: a request goes or is dropped, once; virtual time never
//! goes back.
//!
//! Limits: [`scheduler::REQUESTS_MAX`] requests, whose callers look for room first; [`scheduler::TENANTS_MAX`] tenants.
//! Nothing is allocated for a request once queues have been as long as they get.
//!
//! # Where the rules differ from the published ones
//!
//! `tests/bars.rs` runs them against a machine in virtual time. What a simpler rule would do:
//!
//! - *A second's wait counts from when a request is its tenant's first.* From its arrival, every request of a deep queue would
//!   be over it, and order would be that of arrival whatever the weights.
//!   950 ms are waited, so that with what is under way before it a request goes within a second.
//! - *Rules 1 and 2 leave start and virtual time alone.* A tenant of little weight that waited has a start far ahead; virtual
//!   time that jumped there would shut out all who wait.
//! - *Virtual time is the largest start so far*, not the last one: who waited for a limit has a start of long ago.
//! - *Less than its share has who would be next by rule 3.* Against virtual time itself a sparse tenant is ahead after one
//!   request beside a neighbour whose requests are of a megabyte, since virtual time moves a megabyte at a time.
//! - *Only small requests go beyond the window*, up to a write of 64 KiB: four writes of a megabyte are few in flight as well.
//! - *Floors of latency are looked for* ([window](Isolation)), and are by kind and size of request.
//! - *A goal of latency tightens the window as well.* Lower weights of others are nothing to a sparse tenant, which waits for
//!   nobody here; what it waits for is what others have under way.

mod allowance;
mod cost;
mod floors;
mod heap;
mod latency;
mod mutations;
mod policy;
pub mod scheduler;
pub mod sharing;
mod tenant;
mod window;

pub use cost::{Cost, FLOOR_BYTES, Kind};
pub use floors::{Capacity, FloorRefused, promise};
pub use latency::{Sample, Samples};
pub use mutations::Mutations;
pub use policy::{Burst, Policy, PolicyError};
pub use scheduler::{Config, Effect, Event, Scheduler, Share, Slot, Sums, TenantId};
pub use sharing::Sharing;
pub use tenant::{Figures, Role};
pub use window::Isolation;
