//! What is on a device: nothing, a grid's data, or something of somebody else's, by its marks in well-known places.
//!
//! A device counts as empty only where its first MiB and its end hold nothing but zeroes: what leaves no known mark there is
//! still somebody's data.

use crate::{ProbeError, probe_superblock};
use holdfast_base::BLOCK_BYTES;
use holdfast_format::disk::Superblock;
use std::fmt;

/// All marks but those at the end lie in here, and the first blocks of most file systems' data.
pub const HEAD_BYTES: usize = 1 << 20;

/// Copies at the end: a partition table's, superblocks of md.
pub const TAIL_BYTES: u64 = 128 << 10;

/// What a device holds.
#[derive(Clone, PartialEq, Debug)]
pub enum Holding {
    Nothing,
    /// A superblock of ours.
    Grid(Box<Superblock>),
    /// A superblock of ours that can't be used, and why.
    Unreadable(String),
    /// Something with a name.
    Foreign(String),
    Unknown,
}

impl fmt::Display for Holding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Holding::Nothing => write!(f, "is empty"),
            Holding::Grid(found) => write!(f, "belongs to node {} of grid {}", found.node, found.grid),
            Holding::Unreadable(why) => write!(f, "has a superblock of Holdfast's that can't be used: {why}"),
            Holding::Foreign(name) => write!(f, "holds {name}"),
            Holding::Unknown => write!(f, "holds data of an unknown kind"),
        }
    }
}

/// A mark: bytes at an offset from the beginning.
struct Mark(usize, &'static [u8], &'static str);

/// The first that fits counts: what is more telling stands first.
const MARKS: &[Mark] = &[
    Mark(0, b"XFSB", "an XFS file system"),
    Mark(0x10040, b"_BHRfS_M", "a btrfs file system"),
    Mark(0x400, &[0x10, 0x20, 0xf5, 0xf2], "an F2FS file system"),
    Mark(3, b"NTFS    ", "an NTFS file system"),
    Mark(3, b"EXFAT   ", "an exFAT file system"),
    Mark(82, b"FAT32   ", "a FAT file system"),
    Mark(54, b"FAT16   ", "a FAT file system"),
    Mark(54, b"FAT12   ", "a FAT file system"),
    Mark(32_769, b"CD001", "an ISO 9660 file system"),
    Mark(0, b"hsqs", "a squashfs file system"),
    Mark(0, b"LUKS\xba\xbe", "an encrypted volume (LUKS)"),
    Mark(4086, b"SWAPSPACE2", "swap space"),
    Mark(4086, b"SWAP-SPACE", "swap space"),
    Mark(4096 + 24, &[0xc6, 0x85, 0x73, 0xf6, 0x4e, 0x1a, 0x45, 0xca], "a part of a bcache"),
    Mark(4096, &MD_MAGIC, "a part of an md array"),
    Mark(0, &MD_MAGIC, "a part of an md array"),
    Mark(0, b"bluestore block device", "an OSD of Ceph"),
    Mark(0, b"QFI\xfb", "a qcow2 image"),
    Mark(512, b"EFI PART", "a partition table (GPT)"),
    Mark(4096, b"EFI PART", "a partition table (GPT)"),
];

const MD_MAGIC: [u8; 4] = [0xfc, 0x4e, 0x2b, 0xa9];

/// The last sector of the first 512 bytes: a partition table of the old kind, or a boot sector without one.
const BOOT_MARK: Mark = Mark(510, &[0x55, 0xaa], "a partition table (MBR)");

impl Mark {
    fn fits(&self, head: &[u8]) -> bool {
        head.get(self.0..).is_some_and(|rest| rest.starts_with(self.1))
    }
}

/// What a device of this size holds, by its first [`HEAD_BYTES`] and what lies from `tail_offset` on to its end.
pub fn judge(head: &[u8], tail: &[u8], tail_offset: u64, size_bytes: u64) -> Holding {
    let second = || {
        let at = Superblock::second_offset(size_bytes).checked_sub(tail_offset)? as usize;
        tail.get(at..).map(probe_superblock)
    };
    let first = head.get(..BLOCK_BYTES).map(probe_superblock);
    // As a node does: the second copy counts where the first was lost.
    match first {
        Some(Ok(found)) => return Holding::Grid(Box::new(found)),
        Some(Err(error)) if size_bytes >= 2 * BLOCK_BYTES as u64 => match (second(), error) {
            (Some(Ok(found)), _) => return Holding::Grid(Box::new(found)),
            (_, error @ ProbeError::Unreadable(_)) => return Holding::Unreadable(error.to_string()),
            _ => {}
        },
        _ => {}
    }
    let named = MARKS.iter().find(|mark| mark.fits(head)).map(|mark| mark.2.to_string());
    let named = named.or_else(|| extended(head)).or_else(|| lvm(head)).or_else(|| zfs(head));
    let named = named.or_else(|| at_the_end(tail, tail_offset, size_bytes));
    let named = named.or_else(|| BOOT_MARK.fits(head).then(|| BOOT_MARK.2.to_string()));
    let is_blank = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0);
    match named {
        Some(name) => Holding::Foreign(name),
        None if is_blank(head) && is_blank(tail) => Holding::Nothing,
        None => Holding::Unknown,
    }
}

/// ext2, ext3 and ext4 have one mark, and tell of what they use.
fn extended(head: &[u8]) -> Option<String> {
    const JOURNAL: u8 = 0x04;
    const EXTENTS: u8 = 0x40;
    if head.get(1080..1082)? != [0x53, 0xef] {
        return None;
    }
    let (compatible, incompatible) = (head.get(1024 + 0x5c)?, head.get(1024 + 0x60)?);
    let name = match () {
        () if incompatible & EXTENTS != 0 => "an ext4 file system",
        () if compatible & JOURNAL != 0 => "an ext3 file system",
        () => "an ext2 file system",
    };
    Some(name.to_string())
}

/// The label is in one of the first four sectors.
fn lvm(head: &[u8]) -> Option<String> {
    let is_label =
        |sector: &[u8]| sector.starts_with(b"LABELONE") && sector.get(24..).is_some_and(|t| t.starts_with(b"LVM2"));
    head.chunks(512).take(4).any(is_label).then(|| "a physical volume of LVM".to_string())
}

/// Its superblocks stand in a ring behind the first 128 KiB of each label.
fn zfs(head: &[u8]) -> Option<String> {
    const UBERBLOCK: u64 = 0x00ba_b10c;
    let ring = head.get(128 << 10..256 << 10)?;
    let is_one = |block: &[u8]| {
        let number = u64::from_le_bytes(block[..8].try_into().expect("eight bytes"));
        number == UBERBLOCK || number.swap_bytes() == UBERBLOCK
    };
    ring.chunks(1024).any(is_one).then(|| "a part of a ZFS pool".to_string())
}

/// md of older formats, and the second copy of a partition table.
fn at_the_end(tail: &[u8], tail_offset: u64, size_bytes: u64) -> Option<String> {
    let at = |offset: u64| tail.get(usize::try_from(offset.checked_sub(tail_offset)?).ok()?..);
    let sectors = size_bytes / 512;
    let places = [sectors.checked_sub(16).map(|s| (s & !7) * 512), (size_bytes & !0xffff).checked_sub(0x1_0000)];
    if places.into_iter().flatten().filter_map(at).any(|bytes| bytes.starts_with(&MD_MAGIC)) {
        return Some("a part of an md array".to_string());
    }
    let last = size_bytes.checked_sub(512).and_then(at)?;
    last.starts_with(b"EFI PART").then(|| "the second copy of a partition table (GPT)".to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 8 << 20;

    fn told(marks: &[(u64, &[u8])]) -> String {
        let mut device = vec![0; SIZE as usize];
        for (offset, bytes) in marks {
            device[*offset as usize..][..bytes.len()].copy_from_slice(bytes);
        }
        let tail = SIZE - TAIL_BYTES;
        judge(&device[..HEAD_BYTES], &device[tail as usize..], tail, SIZE).to_string()
    }

    #[test]
    fn what_is_known_is_named_and_what_is_not_is_no_emptiness() {
        assert_eq!(told(&[]), "is empty");
        for mark in MARKS.iter().chain([&BOOT_MARK]) {
            assert_eq!(told(&[(mark.0 as u64, mark.1)]), format!("holds {}", mark.2));
        }
        assert_eq!(told(&[(1080, &[0x53, 0xef]), (1024 + 0x60, &[0x40])]), "holds an ext4 file system");
        assert_eq!(told(&[(1080, &[0x53, 0xef])]), "holds an ext2 file system");
        assert_eq!(told(&[(512, b"LABELONE"), (512 + 24, b"LVM2 001")]), "holds a physical volume of LVM");
        assert_eq!(told(&[(130 << 10, &0x00ba_b10c_u64.to_le_bytes())]), "holds a part of a ZFS pool");
        assert_eq!(told(&[(SIZE - 8192, &MD_MAGIC)]), "holds a part of an md array");
        assert_eq!(told(&[(SIZE - 0x1_0000, &MD_MAGIC)]), "holds a part of an md array");
        assert!(told(&[(SIZE - 512, b"EFI PART")]).contains("second copy"));
        // A protective MBR stands before a GPT.
        assert_eq!(told(&[(510, &[0x55, 0xaa]), (512, b"EFI PART")]), "holds a partition table (GPT)");
        assert_eq!(told(&[(70_000, &[1])]), "holds data of an unknown kind");
        assert_eq!(told(&[(SIZE - 1, &[1])]), "holds data of an unknown kind");
    }
}
