//! What a protocol owes the shell that reads a byte stream for it.

/// A sans-IO consumer of one direction of a byte stream.
///
/// The shell reads into a buffer of its own and passes the bytes to [`Inbound::on_bytes`]; while a large payload is
/// incoming, [`Inbound::sink`] names where its rest should land, so that the kernel can write it there directly.
pub trait Inbound {
    /// Takes all of `bytes`. A broken stream is remembered and reported by the protocol, not here.
    fn on_bytes(&mut self, bytes: &[u8]);

    /// The unfilled rest of a large payload, if one is being received. Its address stays valid, and nothing else
    /// touches it, until [`Inbound::on_filled`].
    fn sink(&mut self) -> Option<&mut [u8]>;

    /// `count` bytes have been written at the start of [`Inbound::sink`].
    fn on_filled(&mut self, count: usize);
}

/// Payload rests smaller than this are copied from the shell's buffer; larger ones go through the sink.
pub const SINK_BYTES_MIN: usize = 32 * 1024;
