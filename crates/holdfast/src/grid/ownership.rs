//! Whose a device is: probed before anything is written to it, and made ours only when it holds nothing.

use super::signatures::{self, Holding, open_unlocked};
use crate::node::fresh_device_id;
use anyhow::{Context, Result, bail};
use holdfast_api::{Code, refuse};
use holdfast_base::buf::ALIGN_BYTES;
use holdfast_base::{BLOCK_BYTES, Buf, BufMut, DeviceId, GridId, NodeId};
use holdfast_format::disk::Superblock;
use holdfast_runtime::device::Device;
use holdfast_store::{JournalSizing, ProbeError, format_device, note_flush_cost, probe_superblock};
use rustix::fs::OFlags;
use rustix::io::ReadWriteFlags;
use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Instant;

/// Durable writes of a block that tell what one costs: the one in the middle counts.
const FLUSHES_MEASURED: usize = 33;

/// What the first and last block of a device say.
pub fn probe(path: &Path, size_bytes: u64) -> Result<Result<Superblock, ProbeError>> {
    let fd = open_unlocked(path, OFlags::RDONLY)?;
    let first = read_block(&fd, path, 0)?;
    match probe_superblock(&first) {
        Ok(superblock) => Ok(Ok(superblock)),
        Err(error) if size_bytes < 2 * BLOCK_BYTES as u64 => Ok(Err(error)),
        // The second copy decides where the first was lost.
        Err(error) => {
            let last = read_block(&fd, path, Superblock::second_offset(size_bytes))?;
            Ok(probe_superblock(&last).map_err(|_| error))
        }
    }
}

fn read_block(fd: &OwnedFd, path: &Path, offset: u64) -> Result<BufMut> {
    let mut block = BufMut::zeroed(BLOCK_BYTES);
    let count = rustix::io::pread(fd, &mut block[..], offset)
        .with_context(|| format!("cannot read {} at {offset}; check `dmesg`", path.display()))?;
    block[count..].fill(0);
    Ok(block)
}

/// What an opened device is to its node.
pub enum Claim {
    Ours,
    /// It was blank, and is this one from here on.
    Formatted(DeviceId),
}

/// Checks that an opened device is this node's, or makes it so where it is blank and that was asked for.
pub fn claim(device: &Device, (grid, node): (GridId, NodeId), format_blank: bool) -> Result<Claim> {
    let path = device.path();
    let shown = path.display();
    let unusable = match probe(path, device.size_bytes())? {
        Ok(found) => return check_owner(path, &found, grid, node).map(|()| Claim::Ours),
        Err(ProbeError::Blank) if format_blank => {
            let holding = signatures::examine(path, device.size_bytes())?;
            if holding != Holding::Nothing {
                bail!(not_ours(path, &holding));
            }
            let id = fresh_device_id();
            return format(path, device.size_bytes(), grid, node, id).map(|()| Claim::Formatted(id));
        }
        Err(ProbeError::Blank) => format!(
            "device {shown} is blank; if it shall be node {node}'s, add --format-blank (in a local grid: `holdfast node \
             start {node} --format-blank` while the node is down)"
        ),
        Err(ProbeError::Foreign) => not_ours(path, &signatures::examine(path, device.size_bytes())?),
        Err(error @ ProbeError::Unreadable(_)) => format!(
            "device {shown}: {error}; nothing was written to it. It is damaged, or another release's: start the node \
             with that release, or replace the device"
        ),
    };
    bail!(unusable)
}

fn not_ours(path: &Path, holding: &Holding) -> String {
    let shown = path.display();
    format!(
        "device {shown} {holding}, which is not Holdfast's, or both of its superblocks are damaged; nothing was written to it. \
         Choose another device; or, if its data is not needed, clear it (`wipefs --all {shown}`, `dd if=/dev/zero of={shown} bs=1M \
         count=1 conv=notrunc`) and start the node with --format-blank"
    )
}

/// Refuses a device of another grid or node.
pub fn check_owner(path: &Path, found: &Superblock, grid: GridId, node: NodeId) -> Result<()> {
    if found.grid != grid {
        refuse!(
            Code::State,
            "device {} belongs to grid {}, not to {grid}; nothing was written to it. Start it in its own grid, or name \
             another device",
            path.display(),
            found.grid
        );
    }
    if found.node != node {
        refuse!(
            Code::State,
            "device {} belongs to node {} of this grid, not to node {node}; nothing was written to it. Give it to \
             node {}",
            path.display(),
            found.node,
            found.node
        );
    }
    Ok(())
}

/// Writes an empty device's tables: last of all, behind a flush, the superblocks, which keep what a flush cost here.
///
/// Faults: as for [`format_device`]; what is written to measure lies in a journal of which nothing is read.
pub fn format(path: &Path, size_bytes: u64, grid: GridId, node: NodeId, device: DeviceId) -> Result<()> {
    let mut writes = format_device(grid, node, device, size_bytes, JournalSizing::for_device(size_bytes))
        .with_context(|| format!("cannot format {}", path.display()))?;
    let (_, last) = writes.last().context("formatting ends with a superblock")?;
    let journal_offset = probe_superblock(last).context("a superblock that was just made")?.areas.journal_offset;
    let fd = open_unlocked(path, OFlags::RDWR)?;
    let failed = || format!("cannot format {}; check `dmesg`", path.display());
    let superblocks = writes.len() - 2;
    write_all(&fd, &writes[..superblocks]).with_context(failed)?;
    rustix::fs::fsync(&fd).with_context(failed)?;
    let flush_us = measure_flush(&fd, journal_offset).with_context(failed)?;
    note_flush_cost(&mut writes, flush_us);
    write_all(&fd, &writes[superblocks..]).with_context(failed)?;
    rustix::fs::fsync(&fd).with_context(failed)
}

fn write_all(fd: &OwnedFd, writes: &[(u64, Buf)]) -> rustix::io::Result<()> {
    for (offset, bytes) in writes {
        assert!(bytes.as_ptr().addr().is_multiple_of(ALIGN_BYTES), "format writes are aligned");
        let mut done = 0;
        while done < bytes.len() {
            done += rustix::io::pwrite(fd, &bytes[done..], offset + done as u64)?;
        }
    }
    Ok(())
}

/// Microseconds that a durable write of a block takes, one after the other, in a journal that holds nothing yet.
fn measure_flush(fd: &OwnedFd, journal_offset: u64) -> rustix::io::Result<u32> {
    let block = BufMut::zeroed(BLOCK_BYTES);
    let mut took: Vec<u32> = Vec::with_capacity(FLUSHES_MEASURED);
    for i in 0..FLUSHES_MEASURED {
        // A journal has at least six units of 32 KiB.
        let offset = journal_offset + (i * BLOCK_BYTES) as u64;
        let start = Instant::now();
        rustix::io::pwritev2(fd, &[IoSlice::new(&block)], offset, ReadWriteFlags::DSYNC)?;
        took.push(start.elapsed().as_micros().clamp(1, u128::from(u32::MAX)) as u32);
    }
    took.sort_unstable();
    Ok(took[FLUSHES_MEASURED / 2])
}
