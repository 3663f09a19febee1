//! What is packed on its way into a segment, by which codec, and until when that is waited for.
//!
//! The log never waits for a codec: what is not packed within `PACKING_MAX`, or is on its way when the log
//! fills or the volume closes, is written as it is.

use super::units::PackedPayload;
use super::writer::{JobKind, Work};
use crate::api::State;
use crate::controller::{Controller, Out};
use holdfast_base::Token;
use holdfast_format::features::Feature;
use holdfast_format::packing::Codec;

impl Controller {
    /// Writes a segment, once it is packed where it is to be.
    pub(crate) fn write_segment(&mut self, work: Work, out: Out) {
        if matches!(work.kind, JobKind::Direct { .. }) {
            self.counters.direct_bytes += work.bytes();
        }
        match self.codec_of(&work) {
            Some(codec) => self.writer.start_packing(&self.basis, work, codec, out),
            None => self.drive_writer(out, |writer, around, out| writer.start(around, work, out)),
        }
    }

    /// Data that leave the log of a volume whose blocks are packed. Encrypted volumes have none yet.
    fn codec_of(&self, work: &Work) -> Option<Codec> {
        let packs = self.root().features.has(Feature::Packed) && self.basis.config.key.is_none();
        let is_destaged = matches!(work.kind, JobKind::Destage { .. });
        (packs && is_destaged && !self.is_pressed()).then_some(Codec::Lz4)
    }

    /// The log is to be emptied: half of it waits to be written, or three quarters with what is on its way, or the volume
    /// closes.
    fn is_pressed(&self) -> bool {
        let (waiting_bytes, budget) = (self.log.waiting_bytes(), self.basis.config.writeback_bytes_max);
        let unwritten_bytes = waiting_bytes + self.writer.unwritten_destage_bytes();
        self.state != State::Open || waiting_bytes > budget / 2 || unwritten_bytes > budget / 4 * 3
    }

    /// One who serves no more writes nothing of it.
    pub(crate) fn on_packed(&mut self, job: Token, packed: Option<PackedPayload>, out: Out) {
        if !matches!(self.state, State::Open | State::Closing) {
            return;
        }
        self.drive_writer(out, |writer, around, out| writer.on_packed(around, job, packed, out));
    }

    pub(crate) fn end_packing(&mut self, out: Out) {
        let is_pressed = self.is_pressed();
        self.drive_writer(out, |writer, around, out| writer.end_packing(around, is_pressed, out));
    }
}
