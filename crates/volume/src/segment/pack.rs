//! What is packed on its way into a segment, by which codec, and until when that is waited for.
//!
//! The log never waits for a codec: what is not packed within `PACKING_MAX`, or is on its way when the log
//! fills or the volume closes, is written as it is.

use super::task::Worked;
use super::writer::{Aim, JobKind, Work};
use crate::api::{Effect, Notice, State};
use crate::care::{VICTIMS_MAX, blocks_max};
use crate::controller::{Controller, Out};
use crate::segment::Named;
use crate::segment::named::granules_of;
use crate::space::{Need, Topology};
use holdfast_base::{Lsn, Token};
use holdfast_format::features::Feature;
use holdfast_format::packing::{Codec, Compression};
use holdfast_format::record::SegmentNo;
use holdfast_format::wire::PACKED_SINCE;

impl Controller {
    /// Writes a segment, once it is packed where it is to be.
    pub(crate) fn write_segment(&mut self, work: Work, out: Out) {
        if matches!(work.kind, JobKind::Direct { .. }) {
            self.counters.direct_bytes += work.bytes();
        }
        match self.codec_of(&work) {
            Some(codec) => self.writer.start_packing(&self.basis, work, codec, out),
            None if work.worth_bytes.is_some() => self.on_not_worth(None),
            None => self.drive_writer(out, |writer, around, out| writer.start(around, work, out)),
        }
    }

    /// What follows is packed so. The root has the feature for it.
    pub(crate) fn compress(&mut self, compression: Compression, out: Out) {
        self.basis.config.compression = compression;
        out.push(Effect::Notice(Notice::CompressionSet { compression }));
    }

    pub fn compression(&self) -> Compression {
        self.basis.config.compression
    }

    /// Whether blocks are packed here: a node of an older release would refuse them.
    pub(crate) fn packs(&self) -> bool {
        self.basis.config.compression != Compression::Off
            && self.uses(Feature::Packed)
            && self.peers.all_speak(PACKED_SINCE)
    }

    /// Data that leave the log are packed by what is fast; what is moved, and is not packed yet, by what the volume is to
    /// have. Bulk writes are not: their client waits for them.
    fn codec_of(&self, work: &Work) -> Option<Codec> {
        let codec = match (&work.kind, self.basis.config.compression) {
            (JobKind::Clean { aim: Aim::Packing(codec) }, _) => *codec,
            // What dies soon does not pay for it.
            (JobKind::Destage { entries }, Compression::Auto) if self.is_hot(entries) => return None,
            (JobKind::Destage { .. }, _) | (JobKind::Clean { .. } | JobKind::Gather { .. }, Compression::Lz4) => {
                Codec::Lz4
            }
            (JobKind::Clean { .. } | JobKind::Gather { .. }, _) => Codec::Zstd,
            _ => return None,
        };
        (self.packs() && work.packed.is_none() && !self.is_pressed()).then_some(codec)
    }

    fn is_hot(&self, entries: &[Lsn]) -> bool {
        entries.first().and_then(|lsn| self.log.get(*lsn)).is_some_and(|entry| entry.is_hot)
    }

    // ---- what is packed later ----

    /// By what blocks are packed that were written as they are, or by what was fast, while that is in nobody's way; and
    /// not where it would be written anew as soon as devices are back.
    pub(crate) fn packs_at_rest(&mut self) -> Option<Codec> {
        if !self.packs() || self.root().is_store() || !self.topology().is_as_wanted() {
            self.care.repacker.stop();
            return None;
        }
        let codec = if self.basis.config.compression == Compression::Lz4 { Codec::Lz4 } else { Codec::Zstd };
        (!self.is_pressed() && self.may_move_data(Need::Choice)).then_some(codec)
    }

    pub(crate) fn take_unpacked(&mut self, codec: Codec) -> Vec<SegmentNo> {
        let guests_are_away = self.basis.now.since(self.last_activity) >= self.basis.config.repack_every;
        let (care, around) = self.care();
        care.repacker.take(&around, &care.cleaner, codec, guests_are_away)
    }

    /// The oldest segments of the first tier, if some are to leave it.
    pub(crate) fn take_leaving(&mut self) -> Vec<SegmentNo> {
        let guests_rest = !self.guests_are_at_work();
        let (topology, segments) = (Topology::new(&self.basis, &self.peers), &self.segments);
        let cleaner = &self.care.cleaner;
        let there = || -> Vec<SegmentNo> {
            let found = self.survey.look(topology, segments);
            found.first().iter().copied().filter(|no| !cleaner.is_emptied(*no)).collect()
        };
        self.rotation.measure(topology, segments, there, self.writer.placed_data());
        if self.room.is_wanted() || !self.rotation.is_due(topology, guests_rest) {
            return Vec::new();
        }
        if !self.rotation.is_full(topology) && !self.may_move_data(Need::Choice) {
            return Vec::new();
        }
        let payload_bytes = u64::from(self.basis.config.segment_payload_bytes);
        let room = Named { size: granules_of(payload_bytes), blocks: blocks_max(payload_bytes) };
        let readable = || {
            let mut found = there();
            found.retain(|no| !cleaner.is_unreadable(*no));
            found
        };
        self.rotation.take_oldest(topology, segments, room, VICTIMS_MAX, readable, |no| cleaner.is_emptied(no))
    }

    /// There is no room for what a pass moves. What makes room does not wait for one that only makes blocks smaller.
    pub(crate) fn on_clean_refused(&mut self, aim: Aim) {
        if matches!(aim, Aim::Packing(_)) {
            return self.on_not_worth(None);
        }
        let (care, mut around) = self.care();
        care.cleaner.on_refused(&mut around);
    }

    /// A pass that was to make blocks smaller ends: that codec does not, or nobody came to it, or there is no room.
    pub(crate) fn on_not_worth(&mut self, codec: Option<Codec>) {
        let (care, mut around) = self.care();
        let victims = care.cleaner.on_not_worth(&mut around);
        let Some(codec) = codec else { return care.repacker.rest(around.basis) };
        care.repacker.on_in_vain(around.basis);
        victims.into_iter().for_each(|no| self.segments.note_tried(no, codec));
    }

    /// The log is to be emptied: half of it waits to be written, or three quarters with what is on its way, or the volume
    /// closes.
    fn is_pressed(&self) -> bool {
        let (waiting_bytes, budget) = (self.log.waiting_bytes(), self.basis.config.writeback_bytes_max);
        let unwritten_bytes = waiting_bytes + self.writer.unwritten_destage_bytes();
        self.state != State::Open || waiting_bytes > budget / 2 || unwritten_bytes > budget / 4 * 3
    }

    /// One who serves no more makes nothing of it.
    pub(crate) fn on_worked(&mut self, job: u64, outcome: Worked, out: Out) {
        if !matches!(self.state, State::Open | State::Closing) {
            return;
        }
        match outcome {
            Worked::Packed(packed) => {
                self.drive_writer(out, |writer, around, out| writer.on_packed(around, Token(job), packed, out));
            }
            Worked::Printed(prints) => self.on_printed(job, prints, out),
        }
    }

    pub(crate) fn end_packing(&mut self, out: Out) {
        let is_pressed = self.is_pressed();
        self.drive_writer(out, |writer, around, out| writer.end_packing(around, is_pressed, out));
    }
}
