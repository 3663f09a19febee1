//! Disk images of other systems, read.
//!
//! Role: [`open`] says what an image is and gives its [`Disk`]: a size, where there is data, and the data. Nothing is
//! written. qcow2 is read by `imago`, the envelope of an OVA by `tar`; VMDK ([`vmdk`]) is read here, for no library reads
//! compressed ones.
//!
//! Invariants
//! 1. An image is hostile input: whatever is in it, reading ends with an error or with data, and takes memory that does
//!    not depend on what the image claims.
//! 2. No file is opened that was not named, but extents of a VMDK beside its descriptor, by plain names.

mod error;
mod ova;
mod qcow2;
mod raw;
mod vmdk;
mod window;

pub use error::{Error, Result};
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::str::FromStr;

/// A disk larger than this is refused: 256 TiB.
pub const SIZE_BYTES_MAX: u64 = 1 << 48;

/// What an image holds.
pub trait Disk {
    /// In bytes.
    fn size_bytes(&self) -> u64;

    /// How many bytes from `offset` on are alike, at least one and up to the end, and whether they may be other than zero.
    /// `offset` lies before the end.
    ///
    /// # Errors
    /// The image is damaged, or can't be read.
    fn extent(&mut self, offset: u64) -> Result<Extent>;

    /// Reads bytes that lie before the end.
    ///
    /// # Errors
    /// The image is damaged, or can't be read.
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<()>;
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    pub len: u64,
    pub is_data: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    Raw,
    Qcow2,
    Vmdk,
    Ova,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Format::Raw => "raw",
            Format::Qcow2 => "qcow2",
            Format::Vmdk => "vmdk",
            Format::Ova => "ova",
        })
    }
}

impl FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Format, String> {
        let all = [Format::Raw, Format::Qcow2, Format::Vmdk, Format::Ova];
        let found = all.into_iter().find(|format| format.to_string() == text);
        found.ok_or_else(|| format!("`{text}` is no format: raw, qcow2, vmdk or ova"))
    }
}

/// What the image is by its first bytes. What has no mark of a format may be a raw image by its name alone.
///
/// # Errors
/// It can't be read, is of a format that is not read here, or may be anything.
pub fn detect(path: &Path) -> Result<Format> {
    let mut head = Vec::new();
    File::open(path)?.take(512).read_to_end(&mut head)?;
    let is = |at: usize, mark: &[u8]| head.get(at..at + mark.len()) == Some(mark);
    let name = path.file_name().map(|name| name.to_string_lossy().to_lowercase()).unwrap_or_default();
    let ends = |all: &[&str]| all.iter().any(|end| name.ends_with(end));
    Ok(match () {
        () if is(0, b"QFI\xfb") => Format::Qcow2,
        () if is(0, vmdk::MAGIC) || is(0, b"# Disk DescriptorFile") => Format::Vmdk,
        () if is(257, b"ustar") && ends(&[".ova"]) => Format::Ova,
        () if is(0, b"COWD") => return Err(Error::other("a VMDK of an old ESX (COWD)")),
        () if is(0, b"vhdxfile") => return Err(Error::other("a VHDX")),
        () if is(0, b"conectix") => return Err(Error::other("a VHD")),
        () if is(64, &[0x7f, 0x10, 0xda, 0xbe]) => return Err(Error::other("a VDI")),
        () if is(0, &[0x1f, 0x8b]) || is(0, b"\xfd7zXZ") || is(0, &[0x28, 0xb5, 0x2f, 0xfd]) => {
            return Err(Error::Refused("it is compressed as a whole; unpack it first".to_string()));
        }
        () if ends(&[".raw", ".img", ".iso", ".bin"]) => Format::Raw,
        () => {
            let why = "nothing tells what it is; say so with --format raw, qcow2, vmdk or ova";
            return Err(Error::Refused(why.to_string()));
        }
    })
}

/// The disk of an image. `disk` is the one that is meant of an OVA with several.
///
/// # Errors
/// It can't be read as that, or needs what is not there.
pub fn open(path: &Path, format: Format, disk: Option<&str>) -> Result<Box<dyn Disk>> {
    if disk.is_some() && format != Format::Ova {
        return Err(Error::Refused(format!("a {format} has one disk; leave --disk out")));
    }
    let disk: Box<dyn Disk> = match format {
        Format::Raw => Box::new(raw::Raw::open(path)?),
        Format::Qcow2 => Box::new(qcow2::Qcow2::open(path)?),
        Format::Vmdk => vmdk::open(path)?,
        Format::Ova => Box::new(vmdk::Sparse::open(ova::disk(path, disk)?)?),
    };
    match disk.size_bytes() {
        0 => Err(Error::Refused("the disk has no bytes".to_string())),
        1..=SIZE_BYTES_MAX => Ok(disk),
        large => Err(Error::Damaged(format!("it claims to be of {large} bytes"))),
    }
}
