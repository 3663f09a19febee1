//! What a filter is: the one trait, and what goes into it and comes out.

use holdfast_base::{BlockReply, BlockRequest, Effects, Instant};
use std::fmt;

/// What a filter hears.
#[derive(Clone, Debug)]
pub enum Event {
    /// From above. Its token is unlike those of all others that are above and not answered.
    Request(BlockRequest),
    /// From below, to what the filter has passed on: with the token that the filter gave it.
    Reply(BlockReply),
    /// [`Filter::next_deadline`] has passed. May come early and late.
    Tick,
    /// Let everything go now: pass it on, or answer it. Nothing but replies comes afterwards.
    Drain,
}

/// What a filter wants done, in this order.
#[derive(Clone, Debug)]
pub enum Effect {
    /// To what is below. The token is for the filter to choose, and comes back with the reply: most keep the one from above.
    Down(BlockRequest),
    /// To what is above, with the token from there.
    Up(BlockReply),
}

/// In what a filter differs from one that only passes on. By default in nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Nature {
    /// It is a tool for tests, that makes a volume worse than it is: people are warned while it is there.
    pub is_tool: bool,
    /// It answers with errors of its own.
    pub fails: bool,
    /// What is read may differ from what was written.
    pub alters: bool,
    /// It may hold requests until it is drained.
    pub hangs: bool,
}

impl Nature {
    /// Of several filters together.
    #[must_use]
    pub fn and(self, other: Nature) -> Nature {
        Nature {
            is_tool: self.is_tool | other.is_tool,
            fails: self.fails | other.fails,
            alters: self.alters | other.alters,
            hangs: self.hangs | other.hangs,
        }
    }
}

/// A filter of a volume: a machine between what is above and what is below. The laws are those of the [crate].
pub trait Filter: fmt::Debug + Send {
    fn handle(&mut self, now: Instant, event: Event, out: &mut Effects<Effect>);

    /// When it wants [`Event::Tick`].
    fn next_deadline(&self) -> Option<Instant>;

    /// What it was told, as [`build`](crate::build) takes it.
    fn spec(&self) -> &str;

    fn nature(&self) -> Nature {
        Nature::default()
    }

    /// What it did, since it was made, for people: `("delayed", 7)`.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}
