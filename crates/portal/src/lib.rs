//! Portals: a client reaches a volume at any host that offers it, wherever the host is that owns it, and keeps its
//! connection while the owner changes.
//!
//! Role: two machines, one for each end, and [`Writers`], which says which client may write to a volume. [`Portal`]
//! has the sessions of the clients of its host: what they ask it gives to
//! the controller beside it, or to the host that owns the volume, or holds until one of the two can take it. [`Desk`] has the
//! sessions that other hosts' portals have attached, and gives what comes to its host's controllers. Neither judges who owns
//! a volume: that is the epoch's business (protocol rules 5 and 8), and where to ask they are told.
//!
//! Invariants (protocol rule 22)
//! 1. A request that a client was not told anything about may be carried out more than once, as with every multipath; once it
//!    was answered, or its session ended, it never is.
//! 2. A portal ends a session no earlier than nothing of it can be carried out any more: its owner has confirmed that, or
//!    refuses by now what the portal had sent.
//! 3. A portal that stood still, or was cut off, for longer than its sessions live ends them before it looks at anything that
//!    they have sent: their clients may have gone to another path.

mod desk;
mod portal;
mod writers;

pub use desk::{Binding, Desk, DeskEffect, DeskEvent, LinkId};
pub use portal::{Effect, Event, LAPSE, Portal, Route, SessionView};
pub use writers::{ACTIVE_AFTER, QUIET, SessionId, WAIT_MAX, WriterEffect, WriterEvent, Writers, WritersView};

use holdfast_base::{BlockOp, Buf, crc32c};
use holdfast_format::portal::Op;

/// Deliberate faults, for the simulator to find. All false outside of tests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Mutations {
    /// A session begins although others may have something under way.
    pub begins_at_once: bool,
    /// A portal goes on, and passes on what clients asked, however long it stood still or was cut off.
    pub never_lapses: bool,
    /// An answer counts although the session was attached anew since.
    pub hears_old_answers: bool,
    /// A client writes although another one does.
    pub lets_second_in: bool,
}

/// A request as it travels, and its payload.
fn travelling(op: &BlockOp) -> (Op, Buf) {
    match op {
        BlockOp::Write { offset, data } => (Op::Write { offset: *offset, crc: crc32c(data) }, data.clone()),
        BlockOp::Read(range) => (Op::Read((*range).into()), Buf::empty()),
        BlockOp::Flush => (Op::Flush, Buf::empty()),
        BlockOp::Discard(range) => (Op::Discard((*range).into()), Buf::empty()),
        BlockOp::WriteZeroes(range) => (Op::WriteZeroes((*range).into()), Buf::empty()),
        BlockOp::Prefetch(range) => (Op::Prefetch((*range).into()), Buf::empty()),
        BlockOp::Status(range) => (Op::Status((*range).into()), Buf::empty()),
        BlockOp::Changes { range, since } => (Op::Changes { range: (*range).into(), since: *since }, Buf::empty()),
    }
}

/// What has travelled; `None` where its payload is damaged.
fn arrived(op: Op, payload: Buf) -> Option<BlockOp> {
    Some(match op {
        Op::Write { offset, crc } => {
            if crc32c(&payload) != crc {
                return None;
            }
            BlockOp::Write { offset, data: payload }
        }
        Op::Read(range) => BlockOp::Read(range.into()),
        Op::Flush => BlockOp::Flush,
        Op::Discard(range) => BlockOp::Discard(range.into()),
        Op::WriteZeroes(range) => BlockOp::WriteZeroes(range.into()),
        Op::Prefetch(range) => BlockOp::Prefetch(range.into()),
        Op::Status(range) => BlockOp::Status(range.into()),
        Op::Changes { range, since } => BlockOp::Changes { range: range.into(), since },
    })
}
