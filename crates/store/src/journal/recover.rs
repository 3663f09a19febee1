//! From the batches that the scan found to the state of the device: what is held, what is lost, what never was.
//!
//! A unit holds a contiguous range of batch numbers. Which of them must be there:
//!
//! | number | missing or unreadable means |
//! | --- | --- |
//! | in a unit whose end the table knows | damage: all of that unit was durable when the table was written |
//! | up to the watermark (the highest that any batch carries) | damage: it was durable, and may have been acknowledged |
//! | above the watermark | it never became durable: nothing was lost, and nothing of it counts |
//! | marked void in the table | an earlier opening found so already |
//!
//! Damage makes ledgers unsound that may have had entries there, for good: all that existed when the lost batch was
//! written. If the lost batch may have held promises, the device serves reads only (protocol rule 6); the batches after it
//! tell whether it held control records.

use crate::fence::Promise;
use crate::journal::BATCH_WINDOW_MAX;
use crate::journal::scan::{Scanned, ScannedBatch};
use crate::journal::units::{UnitState, Units};
use crate::ledgers::{ControlKey, Inserted, Ledger, LedgerKey, Life, Volumes};
use holdfast_base::{DeviceId, Lsn};
use holdfast_format::disk::{Areas, UnitTable};
use std::collections::BTreeSet;

pub(crate) struct Recovered {
    pub volumes: Volumes,
    pub units: Units,
    pub next_seq: u64,
    /// Durable batches that can't be read any more.
    pub lost: u64,
    /// Ledgers that are unsound because of it and whose records don't say so yet.
    pub newly_unsound: Vec<LedgerKey>,
    pub promises_lost: bool,
    pub damaged_entries: Vec<(LedgerKey, Lsn)>,
}

/// Numbers of the batches that are lost.
struct Survey {
    lost: Vec<u64>,
    watermark: u64,
}

/// Sorts the batches into what counts and what never was, and closes every unit's range for the table.
fn survey(units: &mut Units, batches: &mut Vec<ScannedBatch>) -> Survey {
    batches.sort_by_key(|b| b.header.seq);
    let watermark = batches.iter().map(|b| b.header.watermark).max().unwrap_or(0);
    let mut lost = Vec::new();
    let mut in_use: Vec<u32> = (0..units.units.len() as u32).filter(|u| units.get(*u).entry.generation > 0).collect();
    in_use.sort_by_key(|u| units.get(*u).entry.generation);
    for &unit in &in_use {
        if let Some(batch) = batches.iter().find(|b| b.unit == unit) {
            units.get_mut(unit).entry.first_seq = batch.header.unit_first_seq;
        }
    }
    for (i, &unit) in in_use.iter().enumerate() {
        let successor = in_use[i + 1..].iter().map(|u| units.get(*u).entry.first_seq).find(|seq| *seq > 0);
        let entry = &mut units.get_mut(unit).entry;
        if entry.first_seq == 0 {
            continue;
        }
        let seen: BTreeSet<u64> =
            batches.iter().filter(|b| b.unit == unit && !entry.is_void(b.header.seq)).map(|b| b.header.seq).collect();
        let durable_end =
            if entry.end_seq > 0 { entry.end_seq } else { successor.unwrap_or(u64::MAX).min(watermark + 1) };
        let lost_here = lost.len();
        lost.extend((entry.first_seq..durable_end).filter(|seq| !seen.contains(seq) && !entry.is_void(*seq)));
        let is_evidence = lost.len() > lost_here;
        if entry.end_seq == 0 {
            // Above the watermark a batch counts if all of it is there; the others are void from now on.
            let torn = |seq: u64| batches.iter().any(|b| b.header.seq == seq && !b.is_whole);
            let last = seen.last().copied().unwrap_or(entry.first_seq - 1);
            let end = (last + 1).max(durable_end.max(entry.first_seq));
            let above = entry.first_seq.max(watermark + 1);
            let void: Vec<u64> = (above..end).filter(|seq| !seen.contains(seq) || torn(*seq)).collect();
            entry.void_base = above;
            entry.void_bits = void.iter().filter(|s| **s - above < 64).fold(0, |bits, seq| bits | 1 << (seq - above));
            entry.end_seq = end;
        }
        units.get_mut(unit).is_evidence = is_evidence;
    }
    batches.retain(|b| !units.get(b.unit).entry.is_void(b.header.seq));
    Survey { lost, watermark }
}

/// Whether a lost batch provably held no control records: a later one of its time says so.
fn held_no_control(batches: &[ScannedBatch], lost: u64) -> bool {
    let from = batches.partition_point(|b| b.header.seq <= lost);
    batches[from..]
        .iter()
        .take_while(|b| b.header.seq - lost <= 64)
        .any(|b| b.header.control_bits >> (b.header.seq - 1 - lost) & 1 == 0)
}

/// Applies control records in order: the latest of each subject counts.
fn apply_control(volumes: &mut Volumes, units: &mut Units, batches: &[ScannedBatch]) {
    for batch in batches {
        for record in &batch.records {
            match record {
                Scanned::Entry { .. } => {}
                Scanned::Promise(p) => {
                    let volume = volumes.by_id.entry(p.volume).or_default();
                    if p.epoch >= volume.promise.epoch {
                        volume.promise = Promise { epoch: p.epoch, instance: p.instance };
                        volume.promise_unit = Some(batch.unit);
                    }
                }
                Scanned::Ledger(l) => {
                    let ledgers = &mut volumes.by_id.entry(l.volume).or_default().ledgers;
                    let seq = batch.header.seq;
                    let created_seq = if l.created_seq == 0 { seq } else { l.created_seq };
                    ledgers.insert(l.ledger, Ledger::recovered(l, batch.unit, created_seq));
                    units.get_mut(batch.unit).ledgers.entry((l.volume, l.ledger)).or_insert(Lsn::ZERO);
                }
            }
        }
    }
    for (id, volume) in &volumes.by_id {
        if let Some(unit) = volume.promise_unit {
            units.get_mut(unit).controls.insert(ControlKey::Promise(*id));
        }
        for (ledger, state) in &volume.ledgers {
            let unit = state.control_unit.expect("it comes from a record");
            units.get_mut(unit).controls.insert(ControlKey::Ledger((*id, *ledger)));
        }
    }
}

/// Puts entries of living ledgers into the index; later copies first, so that moved entries are found in their new place.
fn apply_entries(volumes: &mut Volumes, units: &mut Units, batches: &[ScannedBatch]) {
    for batch in batches.iter().rev() {
        for record in &batch.records {
            let Scanned::Entry { volume, ledger, lsn, acked, place } = record else { continue };
            let key = (*volume, *ledger);
            let held = units.get_mut(batch.unit).ledgers.entry(key).or_insert(Lsn::ZERO);
            *held = (*held).max(*lsn);
            let Some(state) = volumes.ledger_mut(key).filter(|l| l.life == Life::Live) else { continue };
            state.acked = state.acked.max(*acked);
            match state.insert(*lsn, *place) {
                Inserted::New => units.get_mut(place.unit).add_live(place),
                Inserted::Replaced(old) => {
                    units.get_mut(old.unit).drop_live(&old);
                    units.get_mut(place.unit).add_live(place);
                }
                Inserted::NotNeeded => {}
            }
        }
    }
    for unit in &units.units {
        for key in unit.ledgers.keys() {
            if let Some(ledger) = volumes.ledger_mut(*key) {
                ledger.unit_refs += 1;
            }
        }
    }
}

/// `stops_at_hole`: the deliberate mistake of ending the scan at the first batch that is missing.
pub(crate) fn recover(
    device: DeviceId,
    areas: Areas,
    (table, good_copy): (&UnitTable, usize),
    mut batches: Vec<ScannedBatch>,
    stops_at_hole: bool,
) -> Recovered {
    let mut units = Units::new(device, areas, table, good_copy);
    let last_seen = batches.iter().map(|b| b.header.seq).max().unwrap_or(0);
    let Survey { lost, watermark } = survey(&mut units, &mut batches);
    if stops_at_hole {
        let hole = batches.windows(2).position(|w| w[0].unit == w[1].unit && w[1].header.seq != w[0].header.seq + 1);
        batches.truncate(hole.map_or(batches.len(), |at| at + 1));
    }
    let mut volumes = Volumes::default();
    apply_control(&mut volumes, &mut units, &batches);
    apply_entries(&mut volumes, &mut units, &batches);
    let mut newly_unsound = Vec::new();
    if let Some(last_lost) = lost.iter().max() {
        for (id, volume) in &mut volumes.by_id {
            for (ledger, state) in &mut volume.ledgers {
                if state.is_live() && !state.unsound && state.created_seq < *last_lost {
                    state.unsound = true;
                    newly_unsound.push((*id, *ledger));
                }
            }
        }
    }
    let damaged = |key: LedgerKey, ledger: &Ledger| {
        ledger.entries.iter().filter(|(_, p)| p.damaged).map(|(lsn, _)| (key, *lsn)).collect::<Vec<_>>()
    };
    let damaged_entries = volumes
        .by_id
        .iter()
        .flat_map(|(v, volume)| volume.ledgers.iter().flat_map(|(l, state)| damaged((*v, *l), state)));
    let damaged_entries = damaged_entries.collect();
    assert!(
        units.units.iter().all(|u| u.state == UnitState::Free || u.entry.generation > 0),
        "used units have generations"
    );
    // A gap that no window of batches in flight could have crossed: numbers are never used twice.
    let next_seq = table.seq_floor.max(last_seen + 1).max(watermark + 1) + 2 * BATCH_WINDOW_MAX;
    Recovered {
        promises_lost: lost.iter().any(|seq| !held_no_control(&batches, *seq)),
        lost: lost.len() as u64,
        volumes,
        units,
        next_seq,
        newly_unsound,
        damaged_entries,
    }
}
