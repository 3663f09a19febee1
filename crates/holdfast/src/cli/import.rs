//! `holdfast volume import`: a disk image becomes a volume.
//!
//! The image is told as a stream, like that of `holdfast send`: what has come is kept when it breaks off, and the same
//! command goes on.

use super::format::{print, print_json};
use super::protect::Redundancy;
use super::transfer::{Taking, Wanted, resume_token, told};
use crate::client;
use crate::grid::layout::GridDir;
use anyhow::{Context, Result};
use clap::Args;
use holdfast_api::{Code, Error, Request};
use holdfast_base::size::Size;
use holdfast_base::{BLOCK_BYTES, ObjectId, VolumeId};
use holdfast_cipher::PrintKey;
use holdfast_format::geometry::Layout;
use holdfast_format::stream::{Begin, IMAGE, Part, STREAM_VERSION, SnapshotId, Totals};
use holdfast_image::{Disk, Format, detect, open};
use serde_json::json;
use std::collections::VecDeque;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Instant;

/// Read at a time.
const WINDOW_BYTES: u64 = 1 << 20;

/// What has come is a snapshot of that name until the volume is in service.
const SNAPSHOT: &str = "import";

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
        // A volume that is not there has no part of anything.
        let token = resume_token(dir, name).ok().flatten();
        let start = token.map(|token| token.parse::<Wanted>()).transpose().map_err(anyhow::Error::msg)?;
        let layout = match start {
            Some(_) => None,
            None => super::volume::said(self.redundancy.settle_new(dir)?, json)?,
        };
        let begin = Begin {
            version: STREAM_VERSION,
            volume: IMAGE.to_string(),
            snapshot: SNAPSHOT.to_string(),
            id: self.id(format)?,
            from: None,
            size_bytes: disk.size_bytes().next_multiple_of(BLOCK_BYTES as u64),
            layout: layout.unwrap_or(Layout::DEFAULT),
            start: start.map_or(0, |wanted| wanted.start),
        };
        let mut told_of = Reading::new(disk, begin.start);
        let what = format!("importing {} to {name}", self.image.display());
        let broken = format!("what has come of {} is kept, and the same command goes on", self.image.display());
        let layout = layout.map(|layout| layout.to_string());
        let taking = Taking { name, layout, begin: &begin, what, broken, json };
        let totals = taking.run(dir, &mut |into| told_of.next(into))?;
        let uris = self.put_into_service(dir)?;
        if json {
            let size_bytes = begin.size_bytes;
            let data_bytes = totals.data_bytes;
            return print_json(&json!({ "name": name, "format": format.to_string(), "size_bytes": size_bytes,
                "data_bytes": data_bytes, "uris": uris }));
        }
        let how = uris.first().map_or_else(
            || format!("`holdfast volume export {name}` offers it to clients"),
            |uri| format!("connect to {uri}"),
        );
        let size = Size(begin.size_bytes);
        print(format_args!("volume {name} ({size}) is made of a {format}: {}; {how}", told(totals, begun.elapsed())))
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

    /// Where clients connect; nowhere if it is not to be exported. The snapshot that tells that all has come goes, for it
    /// would hold all that guests overwrite.
    fn put_into_service(&self, dir: &GridDir) -> Result<Vec<String>> {
        if self.no_export {
            return Ok(Vec::new());
        }
        let (name, volume) = (self.name.clone(), self.name.clone());
        let export =
            Request::VolumeExport { name, takeover: false, multipath: false, key: None, shared: None, failover: None };
        let exported = client::volume(dir, &export)?;
        client::done(dir, &Request::SnapshotDelete { volume, name: SNAPSHOT.to_string() })?;
        Ok(exported.uris)
    }
}

/// The data of a disk, as parts of a stream.
struct Reading {
    disk: Box<dyn Disk>,
    /// Up to here it was read.
    at: u64,
    /// What was read last, and begins at this offset.
    window: Vec<u8>,
    window_at: u64,
    /// Of it, in whole blocks: what is to be told.
    untold: VecDeque<Range<usize>>,
    data_bytes: u64,
}

impl Reading {
    fn new(disk: Box<dyn Disk>, start: u64) -> Reading {
        let at = start - start % BLOCK_BYTES as u64;
        Reading { disk, at, window: Vec::new(), window_at: 0, untold: VecDeque::new(), data_bytes: 0 }
    }

    fn next(&mut self, into: &mut Vec<u8>) -> Result<Part> {
        loop {
            if let Some(range) = self.untold.pop_front() {
                let offset = self.window_at + range.start as u64;
                into.clear();
                into.extend_from_slice(&self.window[range]);
                self.data_bytes += into.len() as u64;
                return Ok(Part::Data { offset });
            }
            if self.at >= self.disk.size_bytes() {
                return Ok(Part::End(Totals { data_bytes: self.data_bytes, zeroes_bytes: 0 }));
            }
            self.read_on().with_context(|| format!("the image can't be read at {}", self.at))?;
        }
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
        self.window.clear();
        self.window.resize(len.next_multiple_of(block) as usize, 0);
        self.disk.read(self.at, &mut self.window[..len as usize])?;
        self.window_at = self.at;
        self.untold = data_in(&self.window).into();
        self.at += len;
        Ok(())
    }
}

/// Blocks that are not zero alone, those that follow each other together.
fn data_in(window: &[u8]) -> Vec<Range<usize>> {
    let mut found: Vec<Range<usize>> = Vec::new();
    for (number, block) in window.chunks(BLOCK_BYTES).enumerate() {
        let at = number * BLOCK_BYTES;
        match found.last_mut() {
            _ if block.iter().all(|byte| *byte == 0) => {}
            Some(last) if last.end == at => last.end += block.len(),
            _ => found.push(at..at + block.len()),
        }
    }
    found
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
