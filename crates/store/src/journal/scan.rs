//! Finds the batches of one unit, each by itself, at every 4 KiB boundary: a hole ends nothing.

use crate::ledgers::Place;
use holdfast_base::{BLOCK_BYTES, DeviceId, LedgerId, Lsn, VolumeId};
use holdfast_format::FormatError;
use holdfast_format::disk::{
    BATCH_HEADER_BYTES, BatchHeader, BatchPlace, JournalRecord, LedgerRecord, PromiseRecord, RecordPlace, blocks_match,
};

#[derive(Debug)]
pub(crate) enum Scanned {
    Entry { volume: VolumeId, ledger: LedgerId, lsn: Lsn, acked: Lsn, place: Place },
    Ledger(LedgerRecord),
    Promise(PromiseRecord),
}

/// One batch whose header and records are intact.
#[derive(Debug)]
pub(crate) struct ScannedBatch {
    pub unit: u32,
    pub header: BatchHeader,
    pub records: Vec<Scanned>,
    /// False where the payload of some entry does not match; those entries are marked damaged.
    pub is_whole: bool,
}

/// Batches of a unit in their order, found in the whole of its bytes.
pub(crate) fn scan_unit(device: DeviceId, unit: u32, generation: u64, bytes: &[u8]) -> Vec<ScannedBatch> {
    assert!(bytes.len().is_multiple_of(BLOCK_BYTES), "a unit is whole blocks");
    let mut batches = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let place = BatchPlace { device, unit, generation, offset: at as u32 };
        match scan_batch(place, &bytes[at..]) {
            Ok(batch) => {
                at += batch.header.batch_bytes as usize;
                batches.push(batch);
            }
            Err(_) => at += BLOCK_BYTES,
        }
    }
    batches
}

fn scan_batch(at: BatchPlace, bytes: &[u8]) -> Result<ScannedBatch, FormatError> {
    let (header, records_bytes) = BatchHeader::decode(at, bytes)?;
    let place = RecordPlace { device: at.device, generation: at.generation };
    let mut records = Vec::with_capacity(header.record_count as usize);
    let mut is_whole = true;
    let mut record_at = 0;
    let mut payload_at = BatchHeader::head_bytes(header.records_bytes as usize);
    while record_at < records_bytes.len() {
        let (record, len) = JournalRecord::decode(place, &records_bytes[record_at..])?;
        records.push(match record {
            JournalRecord::Entry(entry) => {
                let payload_bytes = entry.crcs.len() * BLOCK_BYTES;
                let end = payload_at + payload_bytes;
                if end > header.batch_bytes as usize {
                    return Err(FormatError::Field("payload"));
                }
                let damaged = !blocks_match(&entry.crcs, &bytes[payload_at..end]);
                is_whole &= !damaged;
                let place = Place {
                    unit: at.unit,
                    record_at: at.offset + (BATCH_HEADER_BYTES + record_at) as u32,
                    record_bytes: len as u32,
                    payload_at: at.offset + payload_at as u32,
                    blocks: entry.crcs.len() as u16,
                    damaged,
                };
                payload_at = end;
                Scanned::Entry { volume: entry.volume, ledger: entry.ledger, lsn: entry.lsn, acked: entry.acked, place }
            }
            JournalRecord::Ledger(ledger) => Scanned::Ledger(ledger),
            JournalRecord::Promise(promise) => Scanned::Promise(promise),
        });
        record_at += len;
    }
    if records.len() != header.record_count as usize {
        return Err(FormatError::Field("record count"));
    }
    Ok(ScannedBatch { unit: at.unit, header, records, is_whole })
}
