//! Destaging: data leaves the log as segments, sorted by address.
//!
//! Role: [`Destager`] finds what goes together into the next segment, and takes it out of the log for that; the controller
//! writes it, and says whether something has to go at once.
//!
//! It begins when a sixteenth of the write-back budget waits, of small budgets an eighth, half a segment at least (not
//! counting what was destaged and waits for a checkpoint to be trimmed: then all of it would go at once, and guests'
//! requests would wait behind it), when a quarter lies behind what waits first, and so can't be trimmed, or by age, or
//! when a node's journal fills, or when entries have lost copies (protocol rule 9), or when the volume closes.
//! Overwritten data is never destaged: it dies in the log.
//!
//! **Sweeps.** Each segment goes on in the volume where the last one ended, and round again, so that its blocks lie
//! close together ([`crate::io::read_ahead`]). By the time that a sweep comes round, as much has been written as it
//! found waiting twice over: an eighth of the budget, beyond which the log can't be trimmed. Where that grows (writes
//! that run ahead of a sweep keep it from what is older), and where something has to go, it goes by age.

use crate::api::Config;
use crate::log::window::Log;
use crate::map::{Map, Place};
use crate::segment::writer::{JobKind, Work};
use holdfast_base::{BLOCK_BYTES, BlockCrc, Buf, Key, Lsn};
use holdfast_format::record::{CommitExtent, Source};

/// Segments being destaged at a time.
pub(crate) const DESTAGES_MAX: usize = 4;

/// So many segments' worth of log is searched for what belongs together.
const SEGMENTS_LOOKED_AT: u64 = 8;

/// Part of the write-back budget that waits before destaging begins.
const WAITING_PART: u64 = 16;

/// Journal fill (in 1/255) from which the log is emptied whatever its budget says.
const JOURNAL_PRESSURE: u8 = 110;

/// What says that the log is to be emptied, beside what waits in it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Urge {
    /// Short segments are written rather than waited for.
    pub(crate) is_forced: bool,
    /// Of the fullest journal, in 1/255.
    pub(crate) journal_fill: u8,
    /// Segments under way.
    pub(crate) running: usize,
}

#[derive(Debug)]
struct Extent {
    key: u64,
    blocks: u64,
    lsn: Lsn,
    data: Buf,
    crcs: Vec<BlockCrc>,
}

#[derive(Debug, Default)]
pub(crate) struct Destager {
    /// Where the last segment of a sweep ended: of data that is not likely to die soon, and of data that is.
    cursors: [Key; 2],
}

impl Destager {
    /// The next segment's worth of the log, if it is time for one; its entries count as being destaged from here on.
    pub(crate) fn next(&mut self, config: &Config, log: &mut Log, map: &Map, urge: Urge) -> Option<Work> {
        let full = u64::from(config.segment_payload_bytes);
        let budget = config.writeback_bytes_max;
        let fills_journals = urge.journal_fill > JOURNAL_PRESSURE;
        let span = log.waiting_span();
        // Of a small budget an eighth: a segment is to be full.
        let wanted = (budget / WAITING_PART).max((budget / 8).min(full)).max(full / 2);
        let over = log.waiting_bytes() > wanted || span > budget / 4 || fills_journals;
        if !over && !urge.is_forced {
            return None;
        }
        // Half as much again as a sweep leaves behind it that is not kept from what is old.
        let is_overdue = span > budget * 3 / WAITING_PART;
        let sweeps = !urge.is_forced && !fills_journals && !is_overdue;
        let (entries, extents) = self.collect(log, map, full, sweeps);
        let bytes: u64 = extents.iter().map(|e| e.blocks * BLOCK_BYTES as u64).sum();
        if extents.is_empty() || bytes < full / 2 && !urge.is_forced && urge.running > 0 {
            return None;
        }
        for lsn in &entries {
            log.set_destaging(*lsn, true);
        }
        Some(work_of(entries, extents))
    }

    /// Live extents that nobody destages yet, up to one segment: of entries that are as likely to die soon as the
    /// oldest one, and of others what fills it up. `sweeps`: those first that come next in the volume after what went
    /// last; else the oldest.
    fn collect(&mut self, log: &mut Log, map: &Map, bytes_max: u64, sweeps: bool) -> (Vec<Lsn>, Vec<Extent>) {
        let mut entries = Vec::new();
        let mut extents = Vec::new();
        let mut bytes = 0;
        let from = log.next_to_destage();
        let is_hot = log.get(from).is_some_and(|e| e.is_hot);
        let mut left = SEGMENTS_LOOKED_AT * bytes_max / BLOCK_BYTES as u64;
        let candidates = log
            .iter_from(from)
            .take_while(|(lsn, _)| *lsn <= log.completed)
            .filter(|(_, e)| e.live_blocks > 0 && !e.destaging)
            .filter_map(|(lsn, e)| e.extent().map(|(key, blocks)| (lsn, key, blocks, e.live_blocks, e.is_hot)))
            .take_while(|(.., live_blocks, _)| {
                let is_looked_at = left > 0;
                left = left.saturating_sub(*live_blocks);
                is_looked_at
            });
        let (mut ordered, others): (Vec<_>, Vec<_>) = candidates.partition(|(.., hot)| *hot == is_hot);
        if sweeps {
            let from = self.cursors[usize::from(is_hot)].0;
            ordered.sort_by_key(|(_, key, ..)| key.0.wrapping_sub(from));
        }
        ordered.extend(others);
        for (lsn, key, blocks, live_blocks, hot) in ordered {
            let live_bytes = live_blocks * BLOCK_BYTES as u64;
            if bytes + live_bytes > bytes_max && bytes > 0 {
                break;
            }
            bytes += live_bytes;
            entries.push(lsn);
            if sweeps && hot == is_hot {
                self.cursors[usize::from(is_hot)] = Key(key.0 + u64::from(blocks));
            }
            for piece in map.overlay().pieces(key.0, u64::from(blocks)) {
                if let Some(Place::Log { lsn: at, data, crcs }) = piece.value.map(|m| m.place)
                    && at == lsn
                {
                    let crcs = crcs.as_slice().to_vec();
                    extents.push(Extent { key: piece.start, blocks: piece.len, lsn, data, crcs });
                }
            }
        }
        (entries, extents)
    }
}

fn work_of(entries: Vec<Lsn>, mut extents: Vec<Extent>) -> Work {
    extents.sort_by_key(|e| e.key);
    let mut work = Work::new(JobKind::Destage { entries });
    work.extents.reserve(extents.len());
    work.payload.reserve(extents.len());
    for Extent { key, blocks, lsn, data, crcs } in extents {
        work.extents.push(CommitExtent { key: Key(key), blocks: blocks as u32, source: Source::Log(lsn) });
        work.payload.push(data);
        work.crcs.extend(crcs);
    }
    work
}
