//! Filters: what stands between the front ends of a volume and its controller, without I/O.
//!
//! A [`Filter`] is a machine that requests pass on their way down and replies on their way up. It may hold a request back,
//! answer it itself, make others of it, or change what passes. A [`Stack`] has the filters of a volume in their order, and
//! counts what crosses every edge. What a filter is told stands in a text, `delay:write=10ms,share=0.1`; [`build`] makes it.
//! A volume without filters has no stack: its requests go straight to the controller.
//!
//! A new filter is one module with one `impl Filter`, and a line in [`KINDS`]. `docs/internals/extending.md` builds one;
//! [`kit`] checks any against these laws.
//!
//! # Laws
//!
//! 1. **Every request is answered exactly once**, by an answer of its kind: front ends know a request by its answer, and
//!    sessions that come later wait for it. Asserted by the stack.
//! 2. **A change is done when below says so.** A filter says that a write, a discard or zeroes are done only after what is
//!    below has said so of all of it. Behind the controller's word stand copies on several nodes, a fenced epoch, and
//!    consistent groups of snapshots; a filter has none of these.
//! 3. **A flush is done when what it covers is safe**: all that was acknowledged before it came. To pass it on and wait for
//!    its answer is enough. Writes with FUA come as writes, and are safe when they are done.
//! 4. **What is answered is over.** Nothing that changes a block is passed on for a request after its answer: a client that
//!    was told of an error asks again, and the late write of the first attempt would undo what came after the second.
//! 5. **Data pass unaltered**, and an error is one that came from below, unless the filter says otherwise ([`Nature`]).
//! 6. **At [`Event::Drain`] everything that is held comes out**: passed on or answered within that event. It comes when the
//!    filter is removed, and before its volume is closed or handed over. Nothing is asked of the filter afterwards but to pass
//!    on replies; its timers are not heeded any more.
//! 7. **Bounded**: a filter has no more requests below it than there are above it, and [`OWN_MAX`]. Of what is above the
//!    front ends keep count. Asserted by the stack.
//! 8. **Time is an argument, chance a seed**: the same events give the same effects. After a tick the next deadline lies in
//!    the future.
//! 9. **Changes of the same blocks keep their order.** A client that gave up on a write, its connection ended, may write the
//!    same again over another connection that it has: the first attempt must not land after the second.
//!
//! What a filter holds counts as under way: the host lets nobody begin a session that must come behind it, and a volume is
//! closed or handed over after a drain. So a write that was delayed lands, if at all, before what its client does next to the
//! same blocks (protocol rule 22).

mod choice;
mod delay;
mod fail;
mod filter;
pub mod kit;
mod limit;
mod spec;
mod stack;
mod stall;

pub use choice::{Choice, OpKind, PerKind};
pub use delay::Delay;
pub use fail::Fail;
pub use filter::{Effect, Event, Filter, Nature};
pub use limit::Limit;
pub use spec::{Fields, KINDS, Kind, SpecError, build, is_limit};
pub use stack::{Edge, FILTERS_MAX, FilterId, FilterView, OWN_MAX, Stack, StackEvent};
pub use stall::Stall;
