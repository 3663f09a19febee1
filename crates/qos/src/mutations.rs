//! Deliberate faults, for tests and the simulator to find.

holdfast_base::mutations! {
    /// Of a scheduler. All false outside of tests.
    pub struct Mutations {
        /// Virtual time is that of the last request that went, even if that is less than it was.
        virtual_time_goes_back,
        /// A tenant that got something by its weight has got that of its floor.
        weight_pays_floor,
        /// By its floor a tenant gets what its limit forbids.
        floor_forgets_limit,
        /// The window grows, and never falls.
        window_never_falls,
    }
}
