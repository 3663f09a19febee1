//! How much work of maintenance one turn has done: it goes in slices, so that guests' requests never wait for long. A
//! machine has no clock, so work is counted, in runs of leaves and overlay and what costs about as much.

use crate::basis::Basis;
use std::time::Duration;

/// Between two slices: what has come meanwhile has its turn.
pub(crate) const PAUSE: Duration = Duration::from_micros(500);

/// The most work that one part did in a turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Turn {
    pub runs: usize,
    /// Whose work it was.
    pub of: &'static str,
    /// What was done of that which goes in slices.
    pub sliced: usize,
}

impl Turn {
    fn note(&mut self, of: &'static str, runs: usize) {
        if runs > self.runs {
            (self.runs, self.of) = (runs, of);
        }
    }

    /// Runs that it may still go through.
    pub(crate) fn left(&self, basis: &Basis) -> usize {
        basis.config.slice_runs_max.saturating_sub(self.sliced)
    }

    /// The same, or a little where others have used it up: what has to be done comes to its end under any load.
    pub(crate) fn left_at_least(&self, basis: &Basis, least: usize) -> usize {
        self.left(basis).max(least)
    }

    /// So much more of a slice was done.
    pub(crate) fn slice(&mut self, of: &'static str, runs: usize) {
        self.sliced += runs;
        self.note(of, self.sliced);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_of_one_turn_add_up_and_the_largest_work_is_told() {
        let mut turn = Turn::default();
        turn.note("checkpoint", 5);
        turn.slice("fold", 4);
        assert_eq!((turn.runs, turn.of), (5, "checkpoint"));
        turn.slice("fold", 3);
        assert_eq!((turn.runs, turn.of, turn.sliced), (7, "fold", 7));
    }
}
