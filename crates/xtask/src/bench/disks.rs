//! Disks of virtual machines: ext4 file systems with the files of this machine's packages. So they want Debian or Ubuntu,
//! root and loop devices.
//!
//! A fleet has the base, two of four sets of packages that others have, too, and a third that is its own: packages, and texts
//! and noise that are made for it.

use crate::tools;
use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Machines of a fleet.
pub const VMS: usize = 10;
pub const DISK_MIB: u64 = 256;
pub const BASE_MIB: u64 = 52;
const COMMON: usize = 4;
const COMMON_MIB: u64 = 12;
const OWN_MIB: u64 = 24;
const TEXT_MIB: u64 = 12;
const NOISE_MIB: u64 = 12;

/// Packages that are larger are left out: a set is to be of many.
const PACKAGE_MIB_MAX: u64 = 8;

/// What machines of a fleet are made of.
pub struct Fleet {
    packages: Packages,
    base: Vec<Package>,
    common: Vec<Vec<Package>>,
}

impl Fleet {
    pub fn of_this_machine() -> Result<Fleet> {
        let mut packages = Packages::of_this_machine()?;
        let base = packages.deal(BASE_MIB)?;
        let common = (0..COMMON).map(|_| packages.deal(COMMON_MIB)).collect::<Result<_>>()?;
        Ok(Fleet { packages, base, common })
    }

    /// What one machine of its own has: the base, and two sets.
    pub fn installed(&self) -> Vec<Package> {
        [self.base.as_slice(), &self.common[0], &self.common[1]].concat()
    }

    /// The disk that all others begin as.
    pub fn golden(&self, path: &Path) -> Result<Disk> {
        let golden = Disk::make(path)?;
        golden.unpack(&self.base)?;
        Ok(golden)
    }

    /// One that went its own way.
    pub fn machine(&mut self, golden: &Disk, vm: usize, path: &Path) -> Result<Disk> {
        let disk = golden.copy(path)?;
        let own = self.packages.deal(OWN_MIB)?;
        let more = [self.common[vm % COMMON].as_slice(), &self.common[(vm + 1) % COMMON], &own].concat();
        disk.unpack(&shuffled(&more, &format!("vm{vm}")))?;
        disk.make_own(vm)?;
        Ok(disk)
    }

    /// The images of one: `golden.img`, and `vm0.img` and so on, which stay.
    pub fn make(dir: &Path) -> Result<()> {
        let mut fleet = Fleet::of_this_machine()?;
        let golden = fleet.golden(&dir.join("golden.img"))?;
        for vm in 0..VMS {
            fleet.machine(&golden, vm, &dir.join(format!("vm{vm}.img")))?.keep();
        }
        golden.keep();
        Ok(())
    }
}

/// Its files, in the order in which it lists them.
pub type Package = Vec<PathBuf>;

/// This machine's packages and how large they are, in an order that has nothing to do with their names.
struct Packages(Vec<(u64, Package)>);

impl Packages {
    fn of_this_machine() -> Result<Packages> {
        let info = Path::new("/var/lib/dpkg/info");
        let mut found = BTreeMap::new();
        for entry in std::fs::read_dir(info).with_context(|| format!("no packages: cannot read {}", info.display()))? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "list") {
                let (bytes, files) = files_of(&path)?;
                if (1..PACKAGE_MIB_MAX << 20).contains(&bytes) {
                    found.insert(mixed(path.as_os_str().as_bytes()), (bytes, files));
                }
            }
        }
        Ok(Packages(found.into_values().collect()))
    }

    /// So much of what was not dealt out yet.
    fn deal(&mut self, mib: u64) -> Result<Vec<Package>> {
        let (mut bytes, mut all) = (0, Vec::new());
        while bytes < mib << 20 {
            let Some((more, files)) = self.0.pop() else { bail!("this machine has too few packages") };
            bytes += more;
            all.push(files);
        }
        Ok(all)
    }
}

fn files_of(list: &Path) -> Result<(u64, Package)> {
    let (mut bytes, mut files) = (0, Vec::new());
    for line in std::fs::read_to_string(list)?.lines().filter(|line| line.starts_with("/usr/")) {
        if let Ok(meta) = std::fs::symlink_metadata(line)
            && meta.is_file()
        {
            bytes += meta.len();
            files.push(PathBuf::from(line));
        }
    }
    Ok((bytes, files))
}

/// FNV-1a, 64 bits, finished as in MurmurHash3: order without a meaning.
fn mixed(bytes: &[u8]) -> u64 {
    let hash = bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3));
    let hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash ^ (hash >> 33)
}

/// Packages in an order of the machine's own, as somebody installs them.
pub fn shuffled(packages: &[Package], by: &str) -> Vec<Package> {
    let mut packages = packages.to_vec();
    packages.sort_by_cached_key(|files| {
        let first = files.first().map_or(&[][..], |file| file.as_os_str().as_bytes());
        mixed(&[by.as_bytes(), first].concat())
    });
    packages
}

/// The image of an ext4 file system, gone when it is dropped.
pub struct Disk(PathBuf);

impl Drop for Disk {
    fn drop(&mut self) {
        // What stays goes with the grid's directory.
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Disk {
    pub fn make(path: &Path) -> Result<Disk> {
        std::fs::File::create(path)?.set_len(DISK_MIB << 20)?;
        // A disk of usual size has blocks of 4 KiB; one this small would have others.
        tools::run(Command::new("mke2fs").args(["-q", "-t", "ext4", "-b", "4096"]).arg(path))?;
        Ok(Disk(path.to_path_buf()))
    }

    fn copy(&self, path: &Path) -> Result<Disk> {
        tools::run(Command::new("cp").arg("--sparse=always").arg(&self.0).arg(path))?;
        Ok(Disk(path.to_path_buf()))
    }

    /// Copies files onto it, in that order.
    pub fn unpack(&self, packages: &[Package]) -> Result<()> {
        let mounted = Mounted::at(&self.0)?;
        let list = self.0.with_extension("list");
        let names: Vec<&[u8]> = packages.iter().flatten().map(|file| file.as_os_str().as_bytes()).collect();
        std::fs::write(&list, names.join(&0))?;
        let mut from = Command::new("tar")
            .args(["--no-recursion", "-P", "-cf", "-", "--null", "-T"])
            .arg(&list)
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot run tar")?;
        let packed = from.stdout.take().context("tar says nothing")?;
        let strip = "--transform=s,^/,,";
        tools::run(Command::new("tar").args(["-xf", "-", strip, "-C"]).arg(&mounted.0).stdin(packed))?;
        ensure!(from.wait()?.success(), "tar could not read all files");
        std::fs::remove_file(&list)?;
        mounted.end()
    }

    /// Moves all blocks that hold something to the beginning: it is no file system any more.
    pub fn close_up(&self) -> Result<()> {
        let all = std::fs::read(&self.0)?;
        let blocks = all.chunks(4096).filter(|block| block.iter().any(|byte| *byte != 0));
        let mut closed: Vec<u8> = blocks.flatten().copied().collect();
        closed.resize(all.len(), 0);
        Ok(std::fs::write(&self.0, closed)?)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    fn keep(self) {
        std::mem::forget(self);
    }

    /// What no other machine has: a log, and a film.
    fn make_own(&self, vm: usize) -> Result<()> {
        let mounted = Mounted::at(&self.0)?;
        write_log(vm, std::fs::File::create(mounted.0.join("log"))?)?;
        let mut noise = std::fs::File::open("/dev/urandom")?.take(NOISE_MIB << 20);
        std::io::copy(&mut noise, &mut std::fs::File::create(mounted.0.join("film"))?)?;
        mounted.end()
    }
}

fn write_log(vm: usize, file: std::fs::File) -> Result<()> {
    let mut log = std::io::BufWriter::new(file);
    let (mut seed, mut written) = (mixed(&[vm as u8]), 0);
    while written < TEXT_MIB << 20 {
        seed = mixed(&seed.to_le_bytes());
        let line = format!("vm{vm} request {:08x} took {} us of {}\n", seed as u32, seed >> 48, seed >> 40 & 0xff);
        log.write_all(line.as_bytes())?;
        written += line.len() as u64;
    }
    log.flush()?;
    Ok(())
}

struct Mounted(PathBuf);

impl Mounted {
    fn at(image: &Path) -> Result<Mounted> {
        let point = image.with_extension("mounted");
        std::fs::create_dir(&point)?;
        let mounted = tools::run(Command::new("mount").args(["-o", "loop"]).arg(image).arg(&point));
        if let Err(error) = mounted {
            std::fs::remove_dir(&point)?;
            return Err(error.context("a disk can't be mounted; run this as root, where loop devices are"));
        }
        Ok(Mounted(point))
    }

    fn end(self) -> Result<()> {
        tools::run(Command::new("umount").arg(&self.0))?;
        std::fs::remove_dir(&self.0)?;
        std::mem::forget(self);
        Ok(())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
        let _ = std::fs::remove_dir(&self.0);
    }
}
