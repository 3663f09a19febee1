//! The only crate that does I/O: it carries events to the machines and carries out their effects.
//!
//! One [`reactor::Reactor`] per thread drives sockets, devices, timers and wake-ups through one io_uring; the
//! control plane runs on threads of its own and meets a reactor through [`mailbox`]es. Nothing here decides anything
//! about volumes, nodes or placement.

pub mod bearer;
pub mod clock;
pub mod device;
pub mod framed;
pub mod mailbox;
pub mod meta;
pub mod pki;
pub mod process;
pub mod reactor;
pub mod revoked;
pub mod signals;
pub mod tls;

pub use mailbox::Waker;
pub use reactor::{App, ConnId, Event, Io, Reactor};
