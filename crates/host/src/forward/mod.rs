//! Forwarding between hosts: a client reaches a volume at any host that offers it, wherever the host is that owns it, and
//! keeps its connection while the owner changes.
//!
//! Role: two machines, one for each end. [`Ingress`] has the sessions of the clients of its host. What they ask it gives to
//! the controller beside it, or to the host that owns the volume, or holds until one of the two can take it. [`OwnerEnd`] has
//! the sessions that other hosts have attached, and gives what comes to its host's controllers. Neither judges who owns a
//! volume: that is the epoch's business (protocol rules 5 and 8), and where to ask they are told.
//!
//! Invariants (protocol rule 22)
//! 1. A request that a client was not told anything about may be carried out more than once, as with every multipath; once it
//!    was answered, or its session ended, it never is.
//! 2. A forwarding host ends a session no earlier than nothing of it can be carried out any more. Its owner has confirmed
//!    that, or refuses by now what the forwarding host had sent.
//! 3. A forwarding host may have stood still, or been cut off, for longer than its sessions live. Then it ends them before it
//!    looks at anything that they have sent: their clients may have gone to another path.

mod ingress;
mod owner;

pub use ingress::{Effect as IngressEffect, Event as IngressEvent, Ingress, LAPSE, Peer, Route, SessionView};
pub use owner::{Binding, LinkId, OwnerEffect, OwnerEnd, OwnerEvent};

use holdfast_base::{BlockOp, Buf, crc32c};
use holdfast_format::forward::Op;
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
