//! Which devices of this machine could be taken, and why the others can't: what the kernel uses them for, and what they hold.

use super::DEVICE_SIZE_MIN;
use super::layout::{GridConfig, GridDir};
use super::signatures::{self, Holding};
use anyhow::{Context, Result, bail};
use holdfast_api::{Code, refuse};
use holdfast_base::size::Size;
use holdfast_base::{BLOCK_BYTES, GridId};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use serde::Serialize;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Where the kernel tells of block devices.
const SYS_BLOCK: &str = "/sys/class/block";

/// What can be said of taking a device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case", tag = "verdict", content = "why")]
pub enum Verdict {
    Eligible,
    /// It holds something: only with `--force`, which destroys that.
    NotEmpty(String),
    Impossible(String),
}

/// A block device or a file.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Candidate {
    pub path: PathBuf,
    /// `disk`, `partition`, `loop`, …, or `file`.
    pub kind: String,
    pub size_bytes: u64,
    #[serde(flatten)]
    pub verdict: Verdict,
}

/// Of the grid that asks, if there is one.
#[derive(Default)]
pub struct Requester {
    grid: Option<GridId>,
    /// Devices that the grid has, with the node of each.
    own: Vec<(PathBuf, u32)>,
}

impl Requester {
    pub fn of(dir: &GridDir, config: &GridConfig) -> Result<Requester> {
        let devices = config.nodes.iter().flat_map(|node| node.devices.iter().map(move |device| (device, node.id)));
        let canonical = |path: PathBuf| fs::canonicalize(&path).unwrap_or(path);
        let own = devices.map(|(device, node)| (canonical(dir.device_path(device)), node)).collect();
        Ok(Requester { grid: Some(config.grid_id()?), own })
    }
}

/// All block devices, and files in the grid's directory of devices that it doesn't use.
pub fn all(dir: &GridDir, requester: &Requester) -> Result<Vec<Candidate>> {
    let entries = fs::read_dir(SYS_BLOCK).with_context(|| format!("cannot read {SYS_BLOCK}"))?;
    let mut names: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    // Drives without a medium, and loop devices without a file.
    let devices = names.iter().filter(|name| sys_number(name, "size").is_some_and(|sectors| sectors > 0));
    let mut paths: Vec<PathBuf> = devices.map(|name| Path::new("/dev").join(name.replace('!', "/"))).collect();
    let mut files: Vec<PathBuf> =
        fs::read_dir(dir.devices_dir()).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    files.retain(|path| !requester.own.iter().any(|(own, _)| own == path));
    files.sort();
    paths.extend(files);
    Ok(paths.iter().map(|path| examine(path, requester)).collect())
}

/// What can be said of one device or file.
pub fn examine(path: &Path, requester: &Requester) -> Candidate {
    let real = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    let mut candidate =
        Candidate { path: path.to_path_buf(), kind: "file".to_string(), size_bytes: 0, verdict: Verdict::Eligible };
    let impossible = |why: String| Verdict::Impossible(why);
    let metadata = match fs::metadata(&real) {
        Ok(metadata) => metadata,
        Err(error) => {
            candidate.verdict = impossible(format!("can't be examined: {error}"));
            return candidate;
        }
    };
    let name = metadata.file_type().is_block_device().then(|| sys_name(metadata.rdev())).flatten();
    candidate.size_bytes = match &name {
        Some(name) => sys_number(name, "size").unwrap_or(0) * 512,
        None => metadata.len(),
    };
    if let Some(name) = &name {
        candidate.kind = kind(name);
    } else if !metadata.is_file() {
        candidate.verdict = impossible("is neither a block device nor a file".to_string());
        return candidate;
    }
    let hindrance = hindrance(&real, name.as_deref(), metadata.rdev(), requester);
    candidate.verdict = match hindrance.or_else(|| too_small(candidate.size_bytes)) {
        Some(why) => impossible(why),
        None => {
            by_contents(&real, candidate.size_bytes, requester).unwrap_or_else(|error| impossible(format!("{error:#}")))
        }
    };
    candidate
}

/// Refuses a device that can't be taken, or, without `force`, one that is not empty.
pub fn check(path: &Path, requester: &Requester, force: bool) -> Result<Candidate> {
    let candidate = examine(path, requester);
    let shown = path.display();
    match &candidate.verdict {
        Verdict::Impossible(why) => refuse!(
            Code::Unsupported,
            "{shown} is not taken, and nothing was written to it: it {why}; `holdfast device list --eligible` shows what \
             can be taken"
        ),
        Verdict::NotEmpty(why) if !force => refuse!(
            Code::InUse,
            "{shown} is not taken, and nothing was written to it: it {why}. Choose another device; or, if what it holds \
             is not needed, add --force, which destroys it"
        ),
        _ => Ok(candidate),
    }
}

fn too_small(size_bytes: u64) -> Option<String> {
    (size_bytes < DEVICE_SIZE_MIN.0)
        .then(|| format!("is too small: it has {}, and a device has at least {DEVICE_SIZE_MIN}", Size(size_bytes)))
}

/// Uses that nothing overrides.
fn hindrance(path: &Path, name: Option<&str>, rdev: u64, requester: &Requester) -> Option<String> {
    if let Some((_, node)) = requester.own.iter().find(|(own, _)| own == path) {
        return Some(format!("is a device of node {node} of this grid already"));
    }
    let Some(name) = name else {
        return in_use(path);
    };
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    if let Some(at) = mounted_at(&mounts, path, rdev) {
        return Some(format!("is mounted at {at}"));
    }
    if is_swap(&swaps, path) {
        return Some("is used as swap space".to_string());
    }
    if sys_number(name, "ro") == Some(1) {
        return Some("is read-only".to_string());
    }
    if kind(name) == "memory" {
        return Some("is memory, not a disk".to_string());
    }
    if let Some(holder) = holders(name).first() {
        return Some(format!("is a part of {holder}"));
    }
    let partitions = partitions(name);
    if !partitions.is_empty() {
        return Some(format!("has partitions: {}", partitions.join(", ")));
    }
    let block = sys_number(name, "queue/logical_block_size").unwrap_or(0);
    if block > BLOCK_BYTES as u64 {
        return Some(format!("has logical blocks of {block} bytes, and at most {BLOCK_BYTES} are supported"));
    }
    in_use(path)
}

/// Whether a process has it for itself, a node for one; of block devices, whether the kernel has.
fn in_use(path: &Path) -> Option<String> {
    let is_block_device = fs::metadata(path).is_ok_and(|m| m.file_type().is_block_device());
    // Opened for reading only: others would be told that it was written.
    let exclusive = if is_block_device { OFlags::EXCL } else { OFlags::empty() };
    let opened = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC | exclusive, Mode::empty());
    let locked = opened.and_then(|fd| rustix::fs::flock(&fd, FlockOperation::NonBlockingLockShared));
    match locked {
        Ok(()) => None,
        Err(Errno::BUSY | Errno::WOULDBLOCK) => Some("is in use by another process".to_string()),
        Err(error) => Some(format!("can't be opened: {error}")),
    }
}

fn by_contents(path: &Path, size_bytes: u64, requester: &Requester) -> Result<Verdict> {
    let holding = signatures::examine(path, size_bytes)?;
    Ok(match &holding {
        Holding::Nothing => Verdict::Eligible,
        Holding::Grid(found) if requester.grid == Some(found.grid) => {
            Verdict::NotEmpty(format!("was a device of node {} of this grid", found.node))
        }
        other => Verdict::NotEmpty(other.to_string()),
    })
}

/// The kernel's name of a block device.
fn sys_name(rdev: u64) -> Option<String> {
    let (major, minor) = (rustix::fs::major(rdev), rustix::fs::minor(rdev));
    let real = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).ok()?;
    real.file_name().map(|name| name.to_string_lossy().into_owned())
}

fn sys_number(name: &str, file: &str) -> Option<u64> {
    fs::read_to_string(Path::new(SYS_BLOCK).join(name).join(file)).ok()?.trim().parse().ok()
}

fn kind(name: &str) -> String {
    let is =
        |prefix: &str| name.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    let kind = match () {
        () if Path::new(SYS_BLOCK).join(name).join("partition").exists() => "partition",
        () if is("loop") => "loop",
        () if is("zram") || is("ram") => "memory",
        () if is("dm-") => "mapped",
        () if is("md") => "array",
        () => "disk",
    };
    kind.to_string()
}

fn partitions(name: &str) -> Vec<String> {
    let entries = fs::read_dir(Path::new(SYS_BLOCK).join(name)).into_iter().flatten().flatten();
    let parts = entries.filter(|entry| entry.path().join("partition").exists());
    let mut names: Vec<String> = parts.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// What the kernel has built of it, by its readable name.
fn holders(name: &str) -> Vec<String> {
    let entries = fs::read_dir(Path::new(SYS_BLOCK).join(name).join("holders")).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .map(|holder| match fs::read_to_string(Path::new(SYS_BLOCK).join(&holder).join("dm/name")) {
            Ok(mapped) => format!("{} (/dev/mapper)", mapped.trim()),
            Err(_) => holder,
        })
        .collect();
    names.sort();
    names
}

/// By its number; file systems of several devices tell only a path.
fn mounted_at(mountinfo: &str, path: &Path, rdev: u64) -> Option<String> {
    let number = format!("{}:{}", rustix::fs::major(rdev), rustix::fs::minor(rdev));
    mountinfo.lines().find_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let fields: Vec<&str> = before.split(' ').collect();
        let source = after.split(' ').nth(1)?;
        let is_it = *fields.get(2)? == number || (source.starts_with("/dev/") && Path::new(source) == path);
        is_it.then(|| fields.get(4).map(|at| unescape(at))).flatten()
    })
}

fn is_swap(swaps: &str, path: &Path) -> bool {
    swaps
        .lines()
        .skip(1)
        .filter_map(|line| line.split_whitespace().next())
        .any(|source| Path::new(&unescape(source)) == path)
}

/// Blanks in paths are written in octal.
fn unescape(text: &str) -> String {
    text.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
}

/// Overwrites what would still be found at the end of a device that is taken by force; formatting does the beginning.
pub fn clear_end(path: &Path, size_bytes: u64) -> Result<()> {
    let block = BLOCK_BYTES as u64;
    let from = size_bytes.saturating_sub(signatures::TAIL_BYTES) / block * block;
    clear(path, from, size_bytes / block * block)
}

/// Overwrites both ends of a device that is the grid's no more, so that it counts as empty.
pub fn clear_ends(path: &Path, size_bytes: u64) -> Result<()> {
    clear(path, 0, signatures::HEAD_BYTES as u64)?;
    clear_end(path, size_bytes)
}

/// In few writes: a device that is removed may be one that takes long for each.
fn clear(path: &Path, from: u64, to: u64) -> Result<()> {
    let fd = signatures::open_unlocked(path, OFlags::RDWR)?;
    let failed = || format!("cannot write to {}; check `dmesg`", path.display());
    let zeroes = holdfast_base::BufMut::zeroed((to - from) as usize);
    let mut at = from;
    while at < to {
        let written = rustix::io::pwrite(&fd, &zeroes[(at - from) as usize..], at).with_context(failed)?;
        // What ends within a block is begun anew at that block.
        let whole = written / BLOCK_BYTES * BLOCK_BYTES;
        if whole == 0 {
            bail!("{} takes no more; check `dmesg`", path.display());
        }
        at += whole as u64;
    }
    rustix::fs::fsync(&fd).with_context(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_runtime::device;

    #[test]
    fn mounts_and_swaps_are_found() {
        let mounts = "22 1 254:0 / / rw - ext4 /dev/vda rw\n\
            30 22 0:45 /sub /srv/my\\040data rw,relatime shared:1 - btrfs /dev/sdb rw\n\
            31 22 8:17 / /boot rw - vfat /dev/sdb1 rw\n";
        let at = |path: &str, major, minor| mounted_at(mounts, Path::new(path), rustix::fs::makedev(major, minor));
        assert_eq!(at("/dev/vda", 254, 0), Some("/".to_string()));
        assert_eq!(at("/dev/sdb", 8, 16), Some("/srv/my data".to_string()));
        assert_eq!(at("/dev/sdb1", 8, 17), Some("/boot".to_string()));
        assert_eq!(at("/dev/sdc", 8, 32), None);
        let swaps = "Filename Type Size Used Priority\n/dev/sda2 partition 1000 0 -2\n";
        assert!(is_swap(swaps, Path::new("/dev/sda2")) && !is_swap(swaps, Path::new("/dev/sda")));
    }

    #[test]
    fn files_are_judged_by_size_use_and_contents() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("disk.img");
        let verdict = || examine(&path, &Requester::default()).verdict;
        assert!(matches!(verdict(), Verdict::Impossible(why) if why.contains("can't be examined")));
        let file = fs::File::create(&path).unwrap();
        file.set_len(1 << 20).unwrap();
        assert!(matches!(verdict(), Verdict::Impossible(why) if why.contains("too small: it has 1 MiB")));
        file.set_len(256 << 20).unwrap();
        assert_eq!(verdict(), Verdict::Eligible);
        let held = device::open(&path).unwrap();
        assert!(matches!(verdict(), Verdict::Impossible(why) if why.contains("in use by another process")));
        drop(held);
        // What another test is just starting may have it for a moment longer.
        let is_held = || matches!(verdict(), Verdict::Impossible(why) if why.contains("in use"));
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while is_held() {
            assert!(std::time::Instant::now() < end, "nobody holds it any more");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        fs::write(&path, vec![1; 1 << 20]).unwrap();
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(256 << 20).unwrap();
        assert!(matches!(verdict(), Verdict::NotEmpty(why) if why.contains("unknown kind")));
        let error = check(&path, &Requester::default(), false).unwrap_err().to_string();
        assert!(error.contains("nothing was written") && error.contains("--force"), "{error}");
        assert!(check(&path, &Requester::default(), true).is_ok());
        assert!(matches!(examine(temp.path(), &Requester::default()).verdict, Verdict::Impossible(_)));
    }
}
