//! Wishes: what parts of a controller want of its checkpoints. Any part may say so, at any time; the checkpointer reads
//! them at its next turn, and takes each back when it is met.

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Wants {
    /// Something was applied that the newest run does not contain.
    pub(crate) checkpoint: bool,
    /// Leaves are to take in what the overlay says over them: only then all that is dead is known.
    pub(crate) fold: bool,
    /// Segments are dead that the next checkpoint frees.
    pub(crate) free: bool,
    /// The cleaner waits for that.
    pub(crate) hurry: bool,
    /// A part of the durable checkpoint lost a shard for good: everything is written anew, elsewhere.
    pub(crate) rewrite: bool,
}

impl Wants {
    /// Segments are dead, and perhaps no write follows that would bring a checkpoint.
    pub(crate) fn free_dead(&mut self) {
        (self.free, self.checkpoint) = (true, true);
    }

    /// What is dead now is about to be freed, and then the state to be written. What is applied from here on may have
    /// come too late for that, and is wanted anew.
    pub(crate) fn on_condemning(&mut self) {
        (self.checkpoint, self.free) = (false, false);
    }

    /// The state as of now is being written.
    pub(crate) fn on_captured(&mut self) {
        self.hurry = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capture_meets_what_it_frees_and_leaves_folds_and_rewrites_wanted() {
        let mut wants = Wants { fold: true, rewrite: true, hurry: true, ..Wants::default() };
        wants.free_dead();
        assert!(wants.free && wants.checkpoint);
        wants.on_condemning();
        wants.on_captured();
        assert_eq!(wants, Wants { fold: true, rewrite: true, ..Wants::default() });
    }

    #[test]
    fn what_dies_between_the_look_for_dead_segments_and_the_capture_wants_another_one() {
        let mut wants = Wants::default();
        wants.on_condemning();
        wants.free_dead();
        wants.on_captured();
        assert_eq!(wants, Wants { free: true, checkpoint: true, ..Wants::default() });
        // An overwrite or a discard says only that something was applied.
        wants.on_condemning();
        wants.checkpoint = true;
        wants.on_captured();
        assert!(wants.checkpoint, "what it killed is to be looked for again");
    }
}
