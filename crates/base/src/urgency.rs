//! How urgent a request is to a node: its class.

/// Decided where a request begins, by who waits for it; a request that is sent again, or elsewhere, keeps it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Urgency {
    /// Of a guest that asks for little, a few at a time.
    Sparse,
    #[default]
    Normal,
    /// Nobody waits for it: it keeps data whole, or makes room.
    Care,
}
