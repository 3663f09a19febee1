//! Deliberate faults, for the simulator to find.

holdfast_base::mutations! {
    /// Of a host. All false outside of tests.
    pub struct Mutations {
        /// A session begins although others may have something under way.
        begins_at_once,
        /// A forwarding host goes on, and passes on what clients asked, however long it stood still or was cut off.
        never_lapses,
        /// An answer counts although the session was attached anew since.
        hears_old_answers,
        /// A client writes although another one does.
        lets_second_in,
        /// Filters are not drained when the volume goes, and stand before its next opening with what they hold.
        keeps_filters,
        /// What goes in its turn has no class at nodes.
        turn_forgets_class,
        /// Packing costs nothing of its share.
        packs_for_nothing,
    }
}
