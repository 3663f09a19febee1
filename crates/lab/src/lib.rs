//! The one harness that drives the real binary, for torture, atlas, guest, benchmarks and the command's own tests.
//!
//! [`grid::Grid`] gives commands as a person would, reads what they tell as JSON, and ends what it was told to end.
//! [`nbd`] is a client of volumes that knows the protocol from its text, not from the server. [`guest::Guest`] is a test's
//! way to ask it. [`page::Page`] is what a page of docs has its reader type. Programs of others that a test stands on are
//! looked for by [`program::needs`], which fails without them.
//!
//! Nothing that users run imports this, and this imports nothing of it: few dependencies, since `xtask` is compiled first.
//! So `holdfast drill`, which users run, keeps a client and a view of the grid of its own.

pub mod grid;
pub mod guest;
pub mod nbd;
pub mod page;
pub mod ports;
pub mod process;
pub mod program;
pub mod space;
pub mod status;
