//! What a device looks like when it becomes ours, and how to tell whose it is.
//!
//! ```text
//! | superblock | unit table, twice | journal: units | slot table | data area … | superblock |
//! ```

use holdfast_base::{BLOCK_BYTES, Buf, BufMut, DeviceId, GridId, NodeId};
use holdfast_format::FormatError;
use holdfast_format::disk::{Areas, SLOT_BYTES, SLOTS_PER_BLOCK, SUPERBLOCK_BYTES, Superblock, UnitTable};
use std::fmt;

const BLOCK: u64 = BLOCK_BYTES as u64;

/// Fewest units of a journal: one open, one taken in advance, the reserve of two, and two for entries.
pub const UNITS_MIN: u32 = 6;

/// Most units: their table stays below 1 MiB, and start-up's look at every unit below a millisecond.
pub const UNITS_MAX: u32 = 16 * 1024;

/// Smallest unit: a batch of some entries.
pub const UNIT_BYTES_MIN: u32 = 32 << 10;

/// Largest unit: read in one piece when it is scanned or compacted.
pub const UNIT_BYTES_MAX: u32 = 16 << 20;

/// Zeroes of one write while formatting: handles on them share one run of memory.
const ZERO_BYTES: u64 = 1 << 20;

/// How the journal and the slot table of a new device are sized.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct JournalSizing {
    /// The journal, rounded down to whole units.
    pub journal_bytes: u64,
    /// No log entry may be larger than a unit.
    pub unit_bytes: u32,
    /// The slot table has a slot for every so many bytes of the data area.
    pub shard_bytes_mean: u32,
}

impl JournalSizing {
    /// An eighth of the device, from 64 MiB to 1 GiB (less only where the device is smaller than 512 MiB), in units of up
    /// to 4 MiB, of which there are at least 8; a slot for every 128 KiB.
    pub fn for_device(size_bytes: u64) -> JournalSizing {
        let eighth = size_bytes / 8;
        let journal_bytes = if eighth < 64 << 20 { eighth } else { eighth.min(1 << 30) };
        let mut unit_bytes = 4 << 20;
        while unit_bytes > UNIT_BYTES_MIN && journal_bytes / u64::from(unit_bytes) < 8 {
            unit_bytes /= 2;
        }
        JournalSizing { journal_bytes, unit_bytes, shard_bytes_mean: 128 << 10 }
    }
}

/// Why a device can't be formatted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FormatDeviceError {
    /// The device has no room for tables, journal and at least one slot block's worth of shards.
    TooSmall { size_bytes: u64, needed_bytes: u64 },
    /// Units of this size can't be used.
    UnitBytes { unit_bytes: u32 },
    /// The journal has too few or too many units.
    UnitCount { unit_count: u64 },
}

impl fmt::Display for FormatDeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FormatDeviceError::TooSmall { size_bytes, needed_bytes } => write!(
                f,
                "the device has {size_bytes} bytes, which is too small: with this journal it needs {needed_bytes} at least"
            ),
            FormatDeviceError::UnitBytes { unit_bytes } => write!(
                f,
                "journal units of {unit_bytes} bytes can't be used: give a multiple of {BLOCK_BYTES} from {UNIT_BYTES_MIN} \
                 to {UNIT_BYTES_MAX}"
            ),
            FormatDeviceError::UnitCount { unit_count } => write!(
                f,
                "a journal of {unit_count} units can't be used: give {UNITS_MIN} to {UNITS_MAX} (a larger or smaller \
                 journal, or other units)"
            ),
        }
    }
}

impl std::error::Error for FormatDeviceError {}

fn plan_areas(size_bytes: u64, sizing: JournalSizing) -> Result<Areas, FormatDeviceError> {
    let unit_bytes = sizing.unit_bytes;
    if !(UNIT_BYTES_MIN..=UNIT_BYTES_MAX).contains(&unit_bytes) || !unit_bytes.is_multiple_of(BLOCK_BYTES as u32) {
        return Err(FormatDeviceError::UnitBytes { unit_bytes });
    }
    let unit_count = sizing.journal_bytes / u64::from(unit_bytes);
    if !(u64::from(UNITS_MIN)..=u64::from(UNITS_MAX)).contains(&unit_count) {
        return Err(FormatDeviceError::UnitCount { unit_count });
    }
    let unit_count = unit_count as u32;
    let unit_table_bytes = UnitTable::encoded_bytes(unit_count) as u32;
    let unit_table_offset = SUPERBLOCK_BYTES as u64;
    let journal_offset = unit_table_offset + 2 * u64::from(unit_table_bytes);
    let slot_table_offset = journal_offset + u64::from(unit_bytes) * u64::from(unit_count);
    let end = Superblock::second_offset(size_bytes.max(BLOCK));
    let needed_bytes = slot_table_offset + 3 * BLOCK;
    if end < slot_table_offset + 2 * BLOCK {
        return Err(FormatDeviceError::TooSmall { size_bytes, needed_bytes });
    }
    let room = end - slot_table_offset;
    let mean = u64::from(sizing.shard_bytes_mean).max(2 * BLOCK);
    // Each slot stands for itself and the bytes that it describes.
    let slots = (room / (mean + SLOT_BYTES as u64)).max(1).next_multiple_of(u64::from(SLOTS_PER_BLOCK));
    let slot_count = slots.min(u64::from(u32::MAX / SLOTS_PER_BLOCK * SLOTS_PER_BLOCK)) as u32;
    let data_offset = slot_table_offset + u64::from(slot_count) * SLOT_BYTES as u64;
    if data_offset + BLOCK > end {
        return Err(FormatDeviceError::TooSmall { size_bytes, needed_bytes });
    }
    let data_blocks = (end - data_offset) / BLOCK;
    Ok(Areas {
        unit_table_offset,
        unit_table_bytes,
        unit_bytes,
        journal_offset,
        unit_count,
        slot_count,
        slot_table_offset,
        data_offset,
        data_blocks,
    })
}

/// The writes that make a device ours and empty: zeroes over tables and journal, the tables, and last the two superblocks.
///
/// Carry them out in order, with a flush before the last two and one after them: a device that lost power while it was
/// being formatted is then either not ours or whole. The journal is written once here, since unwritten extents of a file
/// would commit the file system's own journal at every batch; a block device may skip writes of zeroes between the first
/// and the last write, whose checksums are tied to this device's id anyway, except those over the slot table.
pub fn format_device(
    grid: GridId,
    node: NodeId,
    device: DeviceId,
    size_bytes: u64,
    sizing: JournalSizing,
) -> Result<Vec<(u64, Buf)>, FormatDeviceError> {
    let areas = plan_areas(size_bytes, sizing)?;
    let mut writes = Vec::new();
    let mut at = 0;
    while at < areas.data_offset {
        let len = ZERO_BYTES.min(areas.data_offset - at);
        writes.push((at, Buf::zeroes(len as usize)));
        at += len;
    }
    let units = vec![Default::default(); areas.unit_count as usize];
    let table = UnitTable { sequence: 1, next_generation: 1, seq_floor: 1, units };
    let mut copies = BufMut::new(2 * areas.unit_table_bytes as usize);
    let (first, second) = copies.split_at_mut(areas.unit_table_bytes as usize);
    table.encode_into(device, first);
    second.copy_from_slice(first);
    writes.push((areas.unit_table_offset, copies.freeze()));
    let size_bytes = size_bytes / BLOCK * BLOCK;
    let superblock = Superblock { grid, node, device, sequence: 1, size_bytes, flush_us: 0, media: None, areas };
    let bytes = Buf::copy_from(&superblock.encode());
    writes.push((Superblock::second_offset(size_bytes), bytes.clone()));
    writes.push((0, bytes));
    Ok(writes)
}

/// Notes in the superblocks, the last two of these writes, what a durable write of a block takes on the device.
pub fn note_flush_cost(writes: &mut [(u64, Buf)], flush_us: u32) {
    let start = writes.len().checked_sub(2).expect("formatting ends with two superblocks");
    for (_, bytes) in &mut writes[start..] {
        let superblock = Superblock::decode(bytes).expect("just made");
        *bytes = Buf::copy_from(&Superblock { flush_us, ..superblock }.encode());
    }
}

/// What the first block of a device may hold instead of a superblock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProbeError {
    /// Nothing but zeroes: a blank device.
    Blank,
    /// Something else: do not overwrite it unasked.
    Foreign,
    /// A superblock of ours that is damaged, or of a release that this one does not know.
    Unreadable(FormatError),
}

impl fmt::Display for ProbeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ProbeError::Blank => write!(f, "the device is blank"),
            ProbeError::Foreign => write!(f, "the device holds data that is not Holdfast's"),
            ProbeError::Unreadable(error) => write!(f, "the superblock can't be read: {error}"),
        }
    }
}

impl std::error::Error for ProbeError {}

/// Reads a superblock from the first block of a device, or from its last whole one, for tools that must know whose a
/// device is before a node opens it.
pub fn probe_superblock(bytes: &[u8]) -> Result<Superblock, ProbeError> {
    if bytes.iter().all(|b| *b == 0) {
        return Err(ProbeError::Blank);
    }
    Superblock::decode(bytes).map_err(|error| match error {
        FormatError::Magic | FormatError::Truncated => ProbeError::Foreign,
        other => ProbeError::Unreadable(other),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn format(size_bytes: u64, sizing: JournalSizing) -> Result<Superblock, FormatDeviceError> {
        let writes = format_device(GridId(1), NodeId(2), DeviceId(3), size_bytes, sizing)?;
        let (offset, bytes) = writes.last().expect("there are writes");
        assert_eq!(*offset, 0);
        Ok(probe_superblock(bytes).expect("its own superblock"))
    }

    #[test]
    fn areas_fill_the_device_at_every_size() {
        for size in [4 << 20, (4 << 20) + 5000, 64 << 20, 1 << 30, 10 << 30, 8_u64 << 40] {
            let sizing = JournalSizing::for_device(size);
            let areas = plan_areas(size, sizing).expect("room for everything");
            let end = areas.data_offset + areas.data_blocks * BLOCK;
            assert_eq!(end, Superblock::second_offset(size), "{size}");
            assert!(areas.journal_bytes() <= 1 << 30 && areas.unit_count >= 8, "{size}");
            let mean = areas.data_blocks * BLOCK / u64::from(areas.slot_count);
            assert!(mean <= 132 << 10, "{size}: a slot for every {mean} bytes");
        }
    }

    #[test]
    fn formatting_covers_all_before_the_data_and_ends_with_the_superblock() {
        let size = 4 << 20;
        let superblock = format(size, JournalSizing::for_device(size)).expect("large enough");
        assert_eq!((superblock.grid, superblock.node, superblock.device), (GridId(1), NodeId(2), DeviceId(3)));
        let writes = format_device(GridId(1), NodeId(2), DeviceId(3), size, JournalSizing::for_device(size)).unwrap();
        let mut covered = 0;
        for (offset, data) in &writes {
            if covered < superblock.areas.data_offset {
                assert_eq!(*offset, covered);
                covered += data.len() as u64;
            }
        }
        assert_eq!(covered, superblock.areas.data_offset);
    }

    #[test]
    fn the_cost_of_a_flush_is_kept_in_both_superblocks() {
        let size = 4 << 20;
        let mut writes =
            format_device(GridId(1), NodeId(2), DeviceId(3), size, JournalSizing::for_device(size)).expect("room");
        let before = probe_superblock(&writes.last().expect("there are writes").1).expect("its own superblock");
        note_flush_cost(&mut writes, 730);
        let noted = Superblock { flush_us: 730, ..before };
        assert!(writes.iter().rev().take(2).all(|(_, bytes)| probe_superblock(bytes) == Ok(noted)));
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused_with_what_would() {
        let sizing = JournalSizing::for_device(4 << 20);
        let error = format(520 << 10, sizing).unwrap_err();
        assert!(matches!(error, FormatDeviceError::TooSmall { .. }), "{error:?}");
        assert!(error.to_string().contains("at least"));
        let error = format(4 << 20, JournalSizing { unit_bytes: 5000, ..sizing }).unwrap_err();
        assert_eq!(error, FormatDeviceError::UnitBytes { unit_bytes: 5000 });
        let error = format(4 << 20, JournalSizing { journal_bytes: 64 << 10, ..sizing }).unwrap_err();
        assert!(matches!(error, FormatDeviceError::UnitCount { .. }), "{error:?}");
        assert!(format(100, JournalSizing::for_device(100)).is_err());
    }

    #[test]
    fn probing_tells_blank_from_foreign_from_damaged() {
        assert_eq!(probe_superblock(&[0; 4096]), Err(ProbeError::Blank));
        assert_eq!(probe_superblock(&[7; 4096]), Err(ProbeError::Foreign));
        let size = 4 << 20;
        let writes = format_device(GridId(1), NodeId(2), DeviceId(3), size, JournalSizing::for_device(size)).unwrap();
        let mut bytes = writes.last().unwrap().1.to_vec();
        bytes[100] ^= 1;
        assert_eq!(probe_superblock(&bytes), Err(ProbeError::Unreadable(FormatError::Checksum)));
    }
}
