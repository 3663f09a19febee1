//! VMDK ("Virtual Disk Format 5.0", VMware 2011): sparse and stream-optimised extents, and descriptors of several.

use crate::window::Window;
use crate::{Disk, Error, Extent, Result};
use flate2::read::ZlibDecoder;
use std::io::Read;
use std::path::Path;

pub const MAGIC: &[u8] = b"KDMV";

const SECTOR: u64 = 512;

/// Header flags.
const ZEROED_GRAINS: u32 = 1 << 2;
const COMPRESSED: u32 = 1 << 16;

/// Of the grain directory: it stands before the end, and a second header names it.
const AT_END: u64 = u64::MAX;

/// Of a grain, in sectors; VMware writes 128.
const GRAIN_SECTORS_MAX: u64 = 4096;

/// Entries of a table of grains, as the specification has it.
const TABLE_ENTRIES: u64 = 512;

/// Of a descriptor that is a file of its own.
const DESCRIPTOR_BYTES_MAX: u64 = 1 << 20;

const EXTENTS_MAX: usize = 4096;

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// What a header says, all in sectors.
struct Header {
    flags: u32,
    capacity: u64,
    grain: u64,
    descriptor: (u64, u64),
    directory: u64,
    is_deflated: bool,
}

impl Header {
    fn read(file: &Window, at: u64) -> Result<Header> {
        let mut bytes = [0; SECTOR as usize];
        file.read(at, &mut bytes)?;
        if !bytes.starts_with(MAGIC) {
            return Err(Error::damaged("a VMDK's header has no mark"));
        }
        let header = Header {
            flags: u32_at(&bytes, 8),
            capacity: u64_at(&bytes, 12),
            grain: u64_at(&bytes, 20),
            descriptor: (u64_at(&bytes, 28), u64_at(&bytes, 36)),
            directory: u64_at(&bytes, 56),
            is_deflated: u16::from_le_bytes([bytes[77], bytes[78]]) == 1,
        };
        let (version, entries) = (u32_at(&bytes, 4), u64::from(u32_at(&bytes, 44)));
        match () {
            () if !(1..=3).contains(&version) => Err(Error::other(&format!("a VMDK of version {version}"))),
            () if !header.grain.is_power_of_two() || !(8..=GRAIN_SECTORS_MAX).contains(&header.grain) => {
                Err(Error::damaged(format!("its grains are of {} sectors", header.grain)))
            }
            () if entries != TABLE_ENTRIES => Err(Error::damaged(format!("its tables have {entries} entries"))),
            () if header.capacity > crate::SIZE_BYTES_MAX / SECTOR => {
                Err(Error::damaged(format!("it claims to be of {} sectors", header.capacity)))
            }
            () if header.flags & COMPRESSED != 0 && !header.is_deflated => {
                Err(Error::other("a VMDK that is compressed in a way nobody has described"))
            }
            () => Ok(header),
        }
    }
}

/// One extent of grains.
pub struct Sparse {
    file: Window,
    header: Header,
    /// The table of grains that was read last, and which it is.
    table: Option<(u64, Vec<u32>)>,
    /// The grain that was unpacked last, and which it is.
    grain: Option<(u64, Vec<u8>)>,
}

enum Grain {
    Hole,
    At(u64),
}

impl Sparse {
    pub fn open(file: Window) -> Result<Sparse> {
        let mut header = Header::read(&file, 0)?;
        if header.directory == AT_END {
            // A marker, the second header, and the marker of the end, of a sector each.
            let at = file.len.checked_sub(2 * SECTOR).ok_or_else(|| Error::damaged("the file has no end"))?;
            header = Header::read(&file, at)?;
        }
        let (at, len) = header.descriptor;
        if len > 0 && at > 0 {
            let bytes = len.checked_mul(SECTOR).filter(|bytes| *bytes <= DESCRIPTOR_BYTES_MAX);
            let mut text = vec![0; bytes.ok_or_else(|| Error::damaged("its descriptor is too large"))? as usize];
            file.read(at.checked_mul(SECTOR).ok_or_else(|| Error::damaged("its descriptor is nowhere"))?, &mut text)?;
            check_alone(&String::from_utf8_lossy(&text))?;
        }
        Ok(Sparse { file, header, table: None, grain: None })
    }

    fn grain_bytes(&self) -> u64 {
        self.header.grain * SECTOR
    }

    fn find(&mut self, grain: u64) -> Result<Grain> {
        let (number, entry) = (grain / TABLE_ENTRIES, (grain % TABLE_ENTRIES) as usize);
        if self.table.as_ref().is_none_or(|(known, _)| *known != number) {
            self.table = Some((number, self.table(number)?));
        }
        let entry = self.table.as_ref().and_then(|(_, table)| table.get(entry).copied()).unwrap_or(0);
        Ok(match entry {
            0 => Grain::Hole,
            1 if self.header.flags & ZEROED_GRAINS != 0 => Grain::Hole,
            sector => Grain::At(u64::from(sector) * SECTOR),
        })
    }

    /// Empty where none of its grains is there.
    fn table(&self, number: u64) -> Result<Vec<u32>> {
        let wrong = || Error::damaged("its directory is nowhere");
        let at =
            self.header.directory.checked_mul(SECTOR).and_then(|at| at.checked_add(number * 4)).ok_or_else(wrong)?;
        let mut entry = [0; 4];
        self.file.read(at, &mut entry)?;
        let sector = u64::from(u32::from_le_bytes(entry));
        if sector == 0 {
            return Ok(Vec::new());
        }
        let mut bytes = vec![0; TABLE_ENTRIES as usize * 4];
        self.file.read(sector * SECTOR, &mut bytes)?;
        Ok(bytes.chunks_exact(4).map(|entry| u32_at(entry, 0)).collect())
    }

    /// Unpacks a grain: where it is in the disk, how many bytes follow, and these.
    fn unpack(&self, grain: u64, at: u64) -> Result<Vec<u8>> {
        let mut head = [0; 12];
        self.file.read(at, &mut head)?;
        let (sector, len) = (u64_at(&head, 0), u64::from(u32_at(&head, 8)));
        if sector != grain * self.header.grain {
            return Err(Error::damaged(format!(
                "at {at} is sector {sector}, and {} is wanted",
                grain * self.header.grain
            )));
        }
        if len > 2 * self.grain_bytes() + SECTOR {
            return Err(Error::damaged(format!("a grain takes {len} bytes")));
        }
        let mut packed = vec![0; len as usize];
        self.file.read(at + 12, &mut packed)?;
        let mut bytes = Vec::with_capacity(self.grain_bytes() as usize);
        ZlibDecoder::new(&packed[..])
            .take(self.grain_bytes())
            .read_to_end(&mut bytes)
            .map_err(|why| Error::damaged(format!("the grain at {at} can't be unpacked: {why}")))?;
        // The last one of a disk may be shorter.
        bytes.resize(self.grain_bytes() as usize, 0);
        Ok(bytes)
    }

    fn read_in(&mut self, grain: u64, from: u64, into: &mut [u8]) -> Result<()> {
        match self.find(grain)? {
            Grain::Hole => into.fill(0),
            Grain::At(at) if self.header.flags & COMPRESSED == 0 => self.file.read(at + from, into)?,
            Grain::At(at) => {
                if self.grain.as_ref().is_none_or(|(known, _)| *known != grain) {
                    self.grain = Some((grain, self.unpack(grain, at)?));
                }
                let from = from as usize;
                into.copy_from_slice(&self.grain.as_ref().expect("just set").1[from..from + into.len()]);
            }
        }
        Ok(())
    }
}

impl Disk for Sparse {
    fn size_bytes(&self) -> u64 {
        self.header.capacity * SECTOR
    }

    fn extent(&mut self, offset: u64) -> Result<Extent> {
        let bytes = self.grain_bytes();
        let grain = offset / bytes;
        let is_data = matches!(self.find(grain)?, Grain::At(_));
        let is_empty = self.table.as_ref().is_some_and(|(_, table)| table.is_empty());
        let next = if is_empty { (grain / TABLE_ENTRIES + 1) * TABLE_ENTRIES } else { grain + 1 };
        let end = (next * bytes).min(self.size_bytes());
        Ok(Extent { len: end - offset, is_data })
    }

    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<()> {
        let bytes = self.grain_bytes();
        let (mut at, mut rest) = (offset, into);
        while !rest.is_empty() {
            let here = ((bytes - at % bytes) as usize).min(rest.len());
            let (now, then) = rest.split_at_mut(here);
            self.read_in(at / bytes, at % bytes, now)?;
            (at, rest) = (at + here as u64, then);
        }
        Ok(())
    }
}

/// Extents one after the other.
struct Joined(Vec<Part>);

struct Part {
    /// Of the disk, in bytes.
    start: u64,
    len: u64,
    what: What,
}

enum What {
    Zeroes,
    /// From this offset of the file on.
    Flat(Window, u64),
    Sparse(Sparse),
}

/// The disk of a file that is a descriptor or an extent.
pub fn open(path: &Path) -> Result<Box<dyn Disk>> {
    let file = Window::whole(path)?;
    let mut mark = [0; 4];
    file.read(0, &mut mark)?;
    if mark == *MAGIC {
        return Ok(Box::new(Sparse::open(file)?));
    }
    if file.len > DESCRIPTOR_BYTES_MAX {
        return Err(Error::damaged("it is no VMDK"));
    }
    let mut text = vec![0; file.len as usize];
    file.read(0, &mut text)?;
    let text = String::from_utf8_lossy(&text).into_owned();
    check_alone(&text)?;
    Ok(Box::new(Joined::of(&text, path.parent().unwrap_or(Path::new(".")))?))
}

/// Refuses what changes another disk.
fn check_alone(descriptor: &str) -> Result<()> {
    let parent = descriptor.lines().find_map(|line| line.trim().strip_prefix("parentCID="));
    match parent.map(|id| id.trim().to_lowercase()) {
        None => Ok(()),
        Some(id) if id == "ffffffff" => Ok(()),
        Some(_) => Err(Error::other("a VMDK that stands on another one, of a snapshot")),
    }
}

impl Joined {
    fn of(text: &str, dir: &Path) -> Result<Joined> {
        let mut parts: Vec<Part> = Vec::new();
        let mut start = 0;
        for line in text.lines().map(str::trim).filter(|line| ["RW ", "RDONLY "].iter().any(|a| line.starts_with(a))) {
            let part = Joined::part(line, start, dir)?;
            start += part.len;
            parts.push(part);
            if parts.len() > EXTENTS_MAX || start > crate::SIZE_BYTES_MAX {
                return Err(Error::damaged("its descriptor names too much"));
            }
        }
        match parts.is_empty() {
            true => Err(Error::damaged("its descriptor names no extent")),
            false => Ok(Joined(parts)),
        }
    }

    /// `RW 4192256 SPARSE "name-s001.vmdk"`, `RW 8388608 FLAT "name-flat.vmdk" 0`, `RW 63 ZERO`
    fn part(line: &str, start: u64, dir: &Path) -> Result<Part> {
        let wrong = || Error::damaged(format!("its descriptor has `{line}`"));
        let mut words = line.splitn(4, ' ').skip(1);
        let sectors: u64 = words.next().and_then(|word| word.parse().ok()).ok_or_else(wrong)?;
        let len =
            sectors.checked_mul(SECTOR).filter(|len| (1..=crate::SIZE_BYTES_MAX).contains(len)).ok_or_else(wrong)?;
        let kind = words.next().ok_or_else(wrong)?;
        if kind == "ZERO" {
            return Ok(Part { start, len, what: What::Zeroes });
        }
        let rest = words.next().and_then(|rest| rest.trim().strip_prefix('"')).ok_or_else(wrong)?;
        let (name, rest) = rest.split_once('"').ok_or_else(wrong)?;
        if name.contains('/') || [".", ".."].contains(&name) || name.is_empty() {
            return Err(Error::Refused(format!("its descriptor names `{name}`; only files beside it are read")));
        }
        let file = Window::whole(&dir.join(name)).map_err(|why| {
            Error::Refused(format!("its extent {name} can't be read: {why}; put it beside the descriptor"))
        })?;
        let what = match kind {
            "FLAT" | "VMFS" => {
                let from = rest.trim().parse::<u64>().unwrap_or(0).checked_mul(SECTOR).ok_or_else(wrong)?;
                if from.checked_add(len).is_none_or(|end| end > file.len) {
                    return Err(Error::damaged(format!("its extent {name} is too short")));
                }
                What::Flat(file, from)
            }
            "SPARSE" => {
                let sparse = Sparse::open(file)?;
                if sparse.size_bytes() < len {
                    return Err(Error::damaged(format!("its extent {name} is too short")));
                }
                What::Sparse(sparse)
            }
            other => return Err(Error::other(&format!("a VMDK with an extent of the kind {other}"))),
        };
        Ok(Part { start, len, what })
    }

    fn at(&mut self, offset: u64) -> &mut Part {
        let found = self.0.partition_point(|part| part.start + part.len <= offset);
        &mut self.0[found]
    }
}

impl Disk for Joined {
    fn size_bytes(&self) -> u64 {
        self.0.last().map_or(0, |part| part.start + part.len)
    }

    fn extent(&mut self, offset: u64) -> Result<Extent> {
        let part = self.at(offset);
        let (from, left) = (offset - part.start, part.start + part.len - offset);
        let found = match &mut part.what {
            What::Zeroes => Extent { len: left, is_data: false },
            What::Flat(file, first) => {
                let (len, is_data) = file.extent(*first + from)?;
                Extent { len, is_data }
            }
            What::Sparse(sparse) => sparse.extent(from)?,
        };
        Ok(Extent { len: found.len.min(left), ..found })
    }

    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<()> {
        let (mut at, mut rest) = (offset, into);
        while !rest.is_empty() {
            let part = self.at(at);
            let (from, left) = (at - part.start, part.start + part.len - at);
            let here = usize::try_from(left).unwrap_or(usize::MAX).min(rest.len());
            let (now, then) = rest.split_at_mut(here);
            match &mut part.what {
                What::Zeroes => now.fill(0),
                What::Flat(file, first) => file.read(*first + from, now)?,
                What::Sparse(sparse) => sparse.read(from, now)?,
            }
            (at, rest) = (at + here as u64, then);
        }
        Ok(())
    }
}
