//! Protocol servers without I/O: state machines that turn a client's bytes into block requests, and replies into bytes.
//!
//! One module a protocol. A shell (the runtime, the simulator, an example) owns the socket and the volume; a session
//! here owns what the protocol says must happen between them.

pub mod nbd;
