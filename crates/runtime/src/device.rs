//! Devices: block devices, or files that stand for one. Creating, opening exclusively, and telling what they are.
//!
//! Role: set-up only; reads and writes go through the reactor ([`crate::reactor::Io::add_device`]).
//!
//! Faults: two processes on one device would destroy it, so opening takes an exclusive advisory lock, which the kernel
//! drops with the process however it dies.

use holdfast_base::{BufMut, MediaClass};
use rustix::fs::{FallocateFlags, FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Alignment of every offset, length and buffer given to a device.
pub const ALIGN_BYTES: u64 = 4096;

/// Bytes written at a time when a file is created: large enough to stream, small enough to need no special memory.
const FILL_BYTES: usize = 1 << 20;

const BLKGETSIZE64: libc::c_ulong = 0x8008_1272;
const BLKSSZGET: libc::c_ulong = 0x1268;

/// Why a device could not be created or opened: what failed, why, and what to do.
#[derive(Debug, Error)]
pub enum DeviceError {
    #[error(
        "cannot create {path}: {needed_bytes} bytes are wanted and {free_bytes} are free on its file system; \
         free some space, or choose a smaller size"
    )]
    NoSpace { path: PathBuf, needed_bytes: u64, free_bytes: u64 },
    #[error("cannot create {path}: it exists already; open it as it is, or remove it first if its data is not needed")]
    Exists { path: PathBuf },
    #[error(
        "cannot open {path}: another process uses it, or it is mounted; stop that process (`fuser -v {path}` names \
         it) or unmount it (`findmnt {path}`)"
    )]
    InUse { path: PathBuf },
    #[error("cannot open {path}: it does not exist; check the path, or create it first")]
    NotFound { path: PathBuf },
    #[error("cannot open {path}: permission denied; run as a user who may read and write it")]
    Denied { path: PathBuf },
    #[error("cannot use {path}: it is neither a regular file nor a block device; give the path of one")]
    NotADevice { path: PathBuf },
    #[error(
        "cannot use {path}: its logical blocks have {block_bytes} bytes, and at most {ALIGN_BYTES} are supported; \
         reformat it to 512-byte or 4096-byte blocks"
    )]
    BlockSize { path: PathBuf, block_bytes: u64 },
    #[error("cannot {step} {path}: {errno}; check the file system and the kernel log (`dmesg`)")]
    System { step: &'static str, path: PathBuf, errno: Errno },
}

/// An open device, locked against every other process.
#[derive(Debug)]
pub struct Device {
    fd: OwnedFd,
    path: PathBuf,
    size_bytes: u64,
    is_block_device: bool,
    is_direct: bool,
    media: Option<MediaClass>,
}

impl Device {
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Usable bytes: a multiple of [`ALIGN_BYTES`].
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    pub fn is_block_device(&self) -> bool {
        self.is_block_device
    }

    /// False where the file system has no O_DIRECT (some memory and overlay file systems): the page cache then holds a
    /// second copy, and durable writes still reach the media before they complete.
    pub fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// What the kernel says of the disk below, if it can be found.
    pub fn media(&self) -> Option<MediaClass> {
        self.media
    }

    pub(crate) fn raw_fd(&self) -> i32 {
        self.fd.as_raw_fd()
    }
}

/// Creates the file `path` of `size_bytes`, all of it allocated, and its first `written_bytes` (the journal) written
/// with zeroes: a durable write to an extent that was never written would commit the file system's own journal too.
/// A file that can't be completed is removed again.
pub fn create_file(path: &Path, size_bytes: u64, written_bytes: u64) -> Result<(), DeviceError> {
    assert!(size_bytes.is_multiple_of(ALIGN_BYTES), "a device of {size_bytes} bytes is not whole blocks");
    assert!(written_bytes.is_multiple_of(ALIGN_BYTES) && written_bytes <= size_bytes, "prefix of {written_bytes}");
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let fd = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR).map_err(|errno| match errno {
        Errno::EXIST => DeviceError::Exists { path: path.into() },
        Errno::NOENT => DeviceError::NotFound { path: path.parent().unwrap_or(path).into() },
        errno => open_error(path, "create", errno),
    })?;
    fill(&fd, path, size_bytes, written_bytes).inspect_err(|_| {
        // What can't be removed stays as an incomplete file; the error that matters is the first.
        let _ = fs::remove_file(path);
    })
}

fn fill(fd: &OwnedFd, path: &Path, size_bytes: u64, written_bytes: u64) -> Result<(), DeviceError> {
    let failed = |step, errno| match errno {
        Errno::NOSPC | Errno::DQUOT | Errno::FBIG => {
            let free_bytes = rustix::fs::fstatvfs(fd).map_or(0, |s| s.f_bavail * s.f_frsize);
            DeviceError::NoSpace { path: path.into(), needed_bytes: size_bytes, free_bytes }
        }
        errno => DeviceError::System { step, path: path.into(), errno },
    };
    if size_bytes > 0 {
        match rustix::fs::fallocate(fd, FallocateFlags::empty(), 0, size_bytes) {
            Ok(()) => {}
            Err(Errno::OPNOTSUPP) => rustix::fs::ftruncate(fd, size_bytes).map_err(|e| failed("size", e))?,
            Err(errno) => return Err(failed("allocate", errno)),
        }
    }
    let zeroes = BufMut::zeroed(FILL_BYTES);
    let mut at = 0;
    while at < written_bytes {
        let len = (written_bytes - at).min(FILL_BYTES as u64) as usize;
        at += rustix::io::pwrite(fd, &zeroes[..len], at).map_err(|e| failed("write zeroes to", e))? as u64;
    }
    rustix::fs::fsync(fd).map_err(|e| failed("flush", e))
}

/// Opens `path` for the reactor: O_DIRECT where possible, locked exclusively, measured.
pub fn open(path: &Path) -> Result<Device, DeviceError> {
    let mut flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOATIME;
    if fs::metadata(path).is_ok_and(|m| m.file_type().is_block_device()) {
        // Of a block device this means: not while it is mounted or part of something else.
        flags |= OFlags::EXCL;
    }
    let (fd, is_direct) = open_direct(path, flags)?;
    let stat = rustix::fs::fstat(&fd).map_err(|e| open_error(path, "examine", e))?;
    let is_block_device = match FileType::from_raw_mode(stat.st_mode) {
        FileType::BlockDevice => true,
        FileType::RegularFile => false,
        _ => return Err(DeviceError::NotADevice { path: path.into() }),
    };
    rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive).map_err(|errno| match errno {
        Errno::WOULDBLOCK => DeviceError::InUse { path: path.into() },
        errno => DeviceError::System { step: "lock", path: path.into(), errno },
    })?;
    let (size_bytes, disk) = if is_block_device {
        let block_bytes = ioctl_number(&fd, BLKSSZGET, path)? & u64::from(u32::MAX);
        if block_bytes > ALIGN_BYTES {
            return Err(DeviceError::BlockSize { path: path.into(), block_bytes });
        }
        (ioctl_number(&fd, BLKGETSIZE64, path)?, stat.st_rdev)
    } else {
        (stat.st_size as u64, stat.st_dev)
    };
    let size_bytes = size_bytes - size_bytes % ALIGN_BYTES;
    let media = media_of(rustix::fs::major(disk), rustix::fs::minor(disk));
    Ok(Device { fd, path: path.into(), size_bytes, is_block_device, is_direct, media })
}

/// What the kernel says of the disk below a path, without opening it; `None` where it can't be found.
pub fn media_at(path: &Path) -> Option<MediaClass> {
    let stat = rustix::fs::stat(path).ok()?;
    let is_block_device = FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice;
    let disk = if is_block_device { stat.st_rdev } else { stat.st_dev };
    media_of(rustix::fs::major(disk), rustix::fs::minor(disk))
}

fn open_direct(path: &Path, flags: OFlags) -> Result<(OwnedFd, bool), DeviceError> {
    let mut flags = flags | OFlags::DIRECT;
    loop {
        match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(fd) => return Ok((fd, flags.contains(OFlags::DIRECT))),
            // Only the owner of a file may ask for it to be read without noting the time.
            Err(Errno::PERM) if flags.contains(OFlags::NOATIME) => flags.remove(OFlags::NOATIME),
            Err(Errno::INVAL) if flags.contains(OFlags::DIRECT) => flags.remove(OFlags::DIRECT),
            Err(errno) => return Err(open_error(path, "open", errno)),
        }
    }
}

fn open_error(path: &Path, step: &'static str, errno: Errno) -> DeviceError {
    let path = path.to_path_buf();
    match errno {
        Errno::NOENT => DeviceError::NotFound { path },
        Errno::ACCESS | Errno::PERM | Errno::ROFS => DeviceError::Denied { path },
        Errno::BUSY => DeviceError::InUse { path },
        Errno::ISDIR => DeviceError::NotADevice { path },
        errno => DeviceError::System { step, path, errno },
    }
}

/// An ioctl that stores one number (of 4 or 8 bytes; the upper half is zero then).
fn ioctl_number(fd: &OwnedFd, request: libc::c_ulong, path: &Path) -> Result<u64, DeviceError> {
    let mut value = 0_u64;
    // SAFETY: both requests used here store at most eight bytes at the address given.
    if unsafe { libc::ioctl(fd.as_raw_fd(), request, &raw mut value) } < 0 {
        let errno = Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO);
        return Err(DeviceError::System { step: "measure", path: path.into(), errno });
    }
    Ok(value)
}

/// Looks the disk up in /sys; a partition's own directory lacks the queue, its parent's has it.
fn media_of(major: u32, minor: u32) -> Option<MediaClass> {
    let disk = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).ok()?;
    let (disk, rotational) = [disk.as_path(), disk.parent()?]
        .into_iter()
        .find_map(|dir| fs::read_to_string(dir.join("queue/rotational")).ok().map(|text| (dir.to_path_buf(), text)))?;
    let name = disk.file_name()?.to_string_lossy().into_owned();
    Some(match rotational.trim() {
        _ if name.starts_with("nvme") => MediaClass::Nvme,
        "0" => MediaClass::Ssd,
        _ => MediaClass::Hdd,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_created_file_opens_once_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("device");
        create_file(&path, 1 << 20, 64 << 10).unwrap();
        assert!(matches!(create_file(&path, 4096, 0), Err(DeviceError::Exists { .. })));
        let device = open(&path).unwrap();
        assert_eq!(device.size_bytes(), 1 << 20);
        assert!(!device.is_block_device());
        assert!(matches!(open(&path), Err(DeviceError::InUse { .. })));
        drop(device);
        open(&path).unwrap();
    }

    #[test]
    fn what_is_no_device_is_refused_with_a_reason() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(open(dir.path()), Err(DeviceError::NotADevice { .. })));
        assert!(matches!(open(&dir.path().join("none")), Err(DeviceError::NotFound { .. })));
        assert!(matches!(create_file(&dir.path().join("a/b"), 4096, 0), Err(DeviceError::NotFound { .. })));
    }

    #[test]
    fn a_file_larger_than_its_file_system_is_not_left_behind() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("device");
        let error = create_file(&path, 1 << 50, 0).unwrap_err();
        assert!(matches!(error, DeviceError::NoSpace { .. }), "{error}");
        assert!(!path.exists());
    }
}
