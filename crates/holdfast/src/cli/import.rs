//! `holdfast volume import`: a disk image becomes a volume.

use super::fill::{NewVolume, Parts, Untold, how_to_connect};
use super::format::{print, print_json};
use super::protect::Redundancy;
use super::transfer::told;
use crate::grid::layout::GridDir;
use anyhow::{Context, Result};
use clap::Args;
use holdfast_api::{Code, Error};
use holdfast_base::size::Size;
use holdfast_base::{BLOCK_BYTES, ObjectId, VolumeId};
use holdfast_cipher::PrintKey;
use holdfast_format::stream::{IMAGE, Part, SnapshotId};
use holdfast_image::{Disk, Format, detect, open};
use serde_json::json;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Instant;

/// Read at a time.
const WINDOW_BYTES: u64 = 1 << 20;

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    holdfast volume import debian-12.qcow2 vm1\n  \
    holdfast volume import appliance.ova app --disk appliance-disk1.vmdk --layout mirror:3\n  \
    holdfast volume import /dev/sdx old-server --format raw --no-export\n\n\
    Zeroes and holes take no space. If it breaks off, the same command goes on; `holdfast receive --abandon NAME` and \
    `holdfast volume delete NAME` give up what has come.")]
pub struct Import {
    /// raw, qcow2, VMDK or OVA; no file that it names is opened, but extents of a VMDK beside it
    image: PathBuf,
    name: String,
    /// raw, qcow2, vmdk or ova, if its first bytes do not tell
    #[arg(long)]
    format: Option<Format>,
    /// Of an OVA with several disks
    #[arg(long, value_name = "FILE")]
    disk: Option<String>,
    #[command(flatten)]
    redundancy: Redundancy,
    /// Only make it; `holdfast volume export` offers it to clients later
    #[arg(long)]
    no_export: bool,
}

impl Import {
    pub fn run(&self, dir: &GridDir, json: bool) -> Result<()> {
        dir.check_here()?;
        let begun = Instant::now();
        let of_image = |error| Error::new(Code::Invalid, format!("{}: {error}", self.image.display()));
        let format = self.format.map_or_else(|| detect(&self.image), Ok).map_err(of_image)?;
        let disk = open(&self.image, format, self.disk.as_deref()).map_err(of_image)?;
        let name = &self.name;
        let size_bytes = disk.size_bytes();
        let volume = NewVolume {
            name,
            redundancy: &self.redundancy,
            origin: IMAGE,
            snapshot: "import",
            id: self.id(format)?,
            size_bytes,
            what: format!("importing {} to {name}", self.image.display()),
            broken: format!("what has come of {} is kept, and the same command goes on", self.image.display()),
            no_export: self.no_export,
        };
        let (totals, uris) = volume.fill(dir, json, |start| Ok(Reading::new(disk, start)))?;
        let size_bytes = size_bytes.next_multiple_of(BLOCK_BYTES as u64);
        if json {
            let data_bytes = totals.data_bytes;
            return print_json(&json!({ "name": name, "format": format.to_string(), "size_bytes": size_bytes,
                "data_bytes": data_bytes, "uris": uris }));
        }
        let (size, told) = (Size(size_bytes), told(totals, begun.elapsed()));
        print(format_args!("volume {name} ({size}) is made of a {format}: {told}; {}", how_to_connect(name, &uris)))
    }

    /// Names the image as it is now: another one, or one that was changed, is not gone on with.
    fn id(&self, format: Format) -> Result<SnapshotId> {
        let path = self.image.canonicalize()?;
        let about = path.metadata()?;
        let text = format!(
            "{}\n{format}\n{:?}\n{}\n{}\n{}",
            path.display(),
            self.disk,
            about.size(),
            about.mtime(),
            about.mtime_nsec()
        );
        let named = PrintKey::new([0; 32]).fingerprint_of(text.as_bytes());
        Ok(SnapshotId { volume: VolumeId(named), layer: ObjectId(0) })
    }
}

/// The data of a disk, as parts of a stream.
struct Reading {
    disk: Box<dyn Disk>,
    /// Up to here it was read.
    at: u64,
    untold: Untold,
}

impl Reading {
    fn new(disk: Box<dyn Disk>, start: u64) -> Reading {
        Reading { disk, at: start - start % BLOCK_BYTES as u64, untold: Untold::default() }
    }

    /// A hole, or a window of whole blocks.
    fn read_on(&mut self) -> Result<()> {
        let left = self.disk.size_bytes() - self.at;
        let extent = self.disk.extent(self.at)?;
        let (block, is_last) = (BLOCK_BYTES as u64, extent.len >= left);
        let hole = if is_last { left } else { extent.len - extent.len % block };
        if !extent.is_data && hole > 0 {
            self.at += hole;
            return Ok(());
        }
        let len = WINDOW_BYTES.min(left);
        // Behind the end of the disk its last block has zeroes.
        let mut window = self.untold.space();
        window.clear();
        window.resize(len.next_multiple_of(block) as usize, 0);
        self.disk.read(self.at, &mut window[..len as usize])?;
        self.untold.put(self.at, window);
        self.at += len;
        Ok(())
    }
}

impl Parts for Reading {
    fn next(&mut self, into: &mut Vec<u8>) -> Result<Part> {
        loop {
            if let Some(part) = self.untold.next(into) {
                return Ok(part);
            }
            if self.at >= self.disk.size_bytes() {
                return Ok(self.untold.end());
            }
            self.read_on().with_context(|| format!("the image can't be read at {}", self.at))?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_image::Extent;

    /// Data where a byte of the list is not zero, a hole of its own for the rest.
    struct Listed(Vec<u8>);

    impl Disk for Listed {
        fn size_bytes(&self) -> u64 {
            self.0.len() as u64
        }

        fn extent(&mut self, offset: u64) -> holdfast_image::Result<Extent> {
            let rest = &self.0[offset as usize..];
            let is_data = rest[0] != 0;
            Ok(Extent { len: rest.iter().take_while(|byte| (**byte != 0) == is_data).count() as u64, is_data })
        }

        fn read(&mut self, offset: u64, into: &mut [u8]) -> holdfast_image::Result<()> {
            into.copy_from_slice(&self.0[offset as usize..offset as usize + into.len()]);
            Ok(())
        }
    }

    fn read_all(bytes: &[u8], start: u64) -> (Vec<u8>, u64) {
        let mut reading = Reading::new(Box::new(Listed(bytes.to_vec())), start);
        let mut found = vec![0; bytes.len().next_multiple_of(BLOCK_BYTES)];
        let (mut piece, mut told) = (Vec::new(), 0);
        loop {
            match reading.next(&mut piece).unwrap() {
                Part::Data { offset } => {
                    assert!(offset >= told && offset % BLOCK_BYTES as u64 == 0 && piece.len() % BLOCK_BYTES == 0);
                    found[offset as usize..offset as usize + piece.len()].copy_from_slice(&piece);
                    told = offset + piece.len() as u64;
                }
                Part::End(totals) => return (found, totals.data_bytes),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn data_are_told_in_whole_blocks_and_zeroes_are_not() {
        let mut bytes = vec![0; (3 << 20) + 700];
        for range in
            [5..6, 4096..8192, 100_000..300_001, (1 << 20) - 1..(1 << 20) + 1, (3 << 20) + 699..(3 << 20) + 700]
        {
            bytes[range].fill(7);
        }
        let (found, data) = read_all(&bytes, 0);
        assert!(found[..bytes.len()] == bytes[..] && found[bytes.len()..].iter().all(|byte| *byte == 0));
        // 100,000 to 300,001 touches 50 blocks.
        assert_eq!(data, (2 + 50 + 2 + 1) * 4096);
        let (rest, data) = read_all(&bytes, (1 << 20) + 100);
        assert_eq!(data, 2 * 4096, "from the block on that holds the offset");
        assert!(rest[1 << 20..bytes.len()] == bytes[1 << 20..]);
        assert_eq!(read_all(&vec![0; 10_000], 0).1, 0);
    }
}
