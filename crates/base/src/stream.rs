//! What a protocol owes the shell that reads a byte stream for it.

use crate::buf::BufMut;

/// A sans-IO consumer of one direction of a byte stream.
///
/// The shell reads into a buffer of its own and passes the bytes to [`Inbound::on_bytes`]; while a large payload is
/// incoming, [`Inbound::take_sink`] lends its buffer, so that the kernel can write the rest there directly.
pub trait Inbound {
    /// Takes all of `bytes`. A broken stream is remembered and reported by the protocol, not here.
    fn on_bytes(&mut self, bytes: &[u8]);

    /// Lends the buffer of a large payload that is being received, and how many of its bytes are there. Until it is
    /// given back all bytes of the stream belong in it, and none to [`Inbound::on_bytes`].
    fn take_sink(&mut self) -> Option<(BufMut, usize)>;

    /// The buffer lent comes back, with its first `filled` bytes in place.
    fn give_sink(&mut self, buf: BufMut, filled: usize);
}

/// Payload rests smaller than this are copied from the shell's buffer; larger ones go through the sink.
pub const SINK_BYTES_MIN: usize = 32 * 1024;
