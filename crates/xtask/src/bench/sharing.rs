//! `./x bench --sharing`: what a sharing domain saves of virtual machines' disks: of a fleet that was cloned from one disk
//! and then went its own ways, and of a machine that was installed anew like another.
//!
//! The disks are ext4 file systems with the files of this machine's packages, so this wants Debian or Ubuntu, root and loop
//! devices. Each disk of the fleet has the base, two of four sets of packages that others have, too, and a third that is its
//! own: packages, and texts and noise that are made for it.

use super::grid::{Grid, Shape, USUAL};
use super::paired::Run;
use crate::tools;
use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const VMS: usize = 10;
const DISK_MIB: u64 = 256;
const BASE_MIB: u64 = 52;
const COMMON: usize = 4;
const COMMON_MIB: u64 = 12;
const OWN_MIB: u64 = 24;
const TEXT_MIB: u64 = 12;
const NOISE_MIB: u64 = 12;

/// Packages that are larger are left out: a set is to be of many.
const PACKAGE_MIB_MAX: u64 = 8;

const SHAPE: Shape = Shape { device_mib: 3072, ..USUAL };
const LAYOUT: &str = "parity:2+1";

/// Nothing changes for so long: all is compared. The brief's hour is the most that it may take.
const STILL_FOR: Duration = Duration::from_secs(60);
const STILL_WITHIN: Duration = Duration::from_secs(3600);

pub fn run(arguments: &[String]) -> Result<()> {
    let run = Run::from(arguments, "./x bench --sharing")?;
    let dir = std::env::temp_dir().join(format!("holdfast-bench-{}-sharing", std::process::id()));
    let grid = Grid::make(&run.binary, dir, SHAPE, &[])?;
    let mut packages = Packages::of_this_machine()?;
    let base = packages.deal(BASE_MIB)?;
    let common: Vec<Vec<Package>> = (0..COMMON).map(|_| packages.deal(COMMON_MIB)).collect::<Result<_>>()?;
    println!("| disks | MiB written | taken, of that | beside that dead | seconds |\n| --- | --- | --- | --- | --- |");
    installed_twice(&grid, &[base.as_slice(), &common[0], &common[1]].concat())?;
    fleet(&grid, &mut packages, &base, &common)
}

/// One machine, and then another with the same packages in another order on a file system of its own.
fn installed_twice(grid: &Grid, packages: &[Package]) -> Result<()> {
    grid.run(&["sharing", "create", "twins", "--layout", LAYOUT])?;
    let (mut before, mut volumes) = (Taken::default(), vec!["twins".to_string()]);
    for name in ["first", "second"] {
        let disk = Disk::make(&grid.around().join(name))?;
        disk.unpack(&shuffled(packages, name))?;
        let written = disk.load(grid, name)?;
        let begun = Instant::now();
        grid.run(&["volume", "set", name, "--sharing", "twins"])?;
        volumes.push(name.to_string());
        let taken = taken_when_still(grid, &volumes)?;
        report(&format!("a machine, {name} of its kind"), written, taken.beside(before), begun);
        before = taken;
    }
    delete_all(grid, &volumes)
}

fn fleet(grid: &Grid, packages: &mut Packages, base: &[Package], common: &[Vec<Package>]) -> Result<()> {
    let golden = Disk::make(&grid.around().join("golden"))?;
    golden.unpack(base)?;
    let (mut written, mut volumes) = (0, Vec::new());
    let begun = Instant::now();
    for vm in 0..VMS {
        let name = format!("vm{vm}");
        let disk = golden.copy(&grid.around().join(&name))?;
        let own = packages.deal(OWN_MIB)?;
        let more = [common[vm % COMMON].as_slice(), &common[(vm + 1) % COMMON], &own].concat();
        disk.unpack(&shuffled(&more, &name))?;
        disk.make_own(vm)?;
        written += disk.load(grid, &name)?;
        volumes.push(name);
    }
    report("ten, packed", written, taken_when_still(grid, &volumes)?, begun);
    let begun = Instant::now();
    grid.run(&["sharing", "create", "fleet", "--layout", LAYOUT])?;
    for name in &volumes {
        grid.run(&["volume", "set", name, "--sharing", "fleet"])?;
    }
    volumes.push("fleet".to_string());
    report("ten, packed and shared", written, taken_when_still(grid, &volumes)?, begun);
    Ok(())
}

fn report(what: &str, written: u64, taken: Taken, begun: Instant) {
    let part = |bytes: i64| bytes as f64 / written as f64;
    let (needed, dead) = (part(taken.needed_bytes), part(taken.dead_bytes));
    println!("| {what} | {} | {needed:.3} | {dead:.3} | {} |", written >> 20, begun.elapsed().as_secs());
}

/// Members go first.
fn delete_all(grid: &Grid, volumes: &[String]) -> Result<()> {
    volumes.iter().rev().try_for_each(|name| grid.run(&["volume", "delete", name, "--now"]).map(drop))
}

/// What volumes take, before copies and parity.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
struct Taken {
    /// Data, what lies between packed blocks, and maps.
    needed_bytes: i64,
    /// It goes when room is needed.
    dead_bytes: i64,
}

impl Taken {
    fn beside(self, other: Taken) -> Taken {
        Taken { needed_bytes: self.needed_bytes - other.needed_bytes, dead_bytes: self.dead_bytes - other.dead_bytes }
    }

    fn of(grid: &Grid, volumes: &[String]) -> Result<Taken> {
        let mut sum = Taken::default();
        for name in volumes {
            let volume = grid.volume(name)?;
            let space = &volume["live"]["space"];
            let bytes = |key: &str| space[key].as_i64().with_context(|| format!("no {key} of volume {name}"));
            sum.needed_bytes += bytes("data_bytes")? + bytes("padding_bytes")? + bytes("metadata_bytes")?;
            sum.dead_bytes += bytes("dead_bytes")?;
        }
        Ok(sum)
    }
}

/// Once nothing changes any more.
fn taken_when_still(grid: &Grid, volumes: &[String]) -> Result<Taken> {
    let end = Instant::now() + STILL_WITHIN;
    let (mut last, mut since) = (Taken::of(grid, volumes)?, Instant::now());
    while since.elapsed() < STILL_FOR {
        ensure!(Instant::now() < end, "volumes still change after {} s", STILL_WITHIN.as_secs());
        std::thread::sleep(Duration::from_secs(2));
        let now = Taken::of(grid, volumes)?;
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
    Ok(last)
}

/// Its files, in the order in which it lists them.
type Package = Vec<PathBuf>;

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
fn shuffled(packages: &[Package], by: &str) -> Vec<Package> {
    let mut packages = packages.to_vec();
    packages.sort_by_cached_key(|files| {
        let first = files.first().map_or(&[][..], |file| file.as_os_str().as_bytes());
        mixed(&[by.as_bytes(), first].concat())
    });
    packages
}

/// The image of an ext4 file system, gone when it is dropped.
struct Disk(PathBuf);

impl Drop for Disk {
    fn drop(&mut self) {
        // What stays goes with the grid's directory.
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Disk {
    fn make(path: &Path) -> Result<Disk> {
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
    fn unpack(&self, packages: &[Package]) -> Result<()> {
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

    /// What no other machine has: a log, and a film.
    fn make_own(&self, vm: usize) -> Result<()> {
        let mounted = Mounted::at(&self.0)?;
        write_log(vm, std::fs::File::create(mounted.0.join("log"))?)?;
        let mut noise = std::fs::File::open("/dev/urandom")?.take(NOISE_MIB << 20);
        std::io::copy(&mut noise, &mut std::fs::File::create(mounted.0.join("film"))?)?;
        mounted.end()
    }

    /// Makes a volume of it; gives how many bytes of its blocks are not all zeroes.
    fn load(&self, grid: &Grid, name: &str) -> Result<u64> {
        let size = format!("{DISK_MIB}MiB");
        grid.run(&["volume", "create", name, "--size", &size, "--layout", LAYOUT, "--compress", "auto"])?;
        tools::run(Command::new("nbdcopy").arg("--request-size=65536").arg(&self.0).arg(grid.uri(name)))?;
        let all = std::fs::read(&self.0)?;
        Ok(all.chunks(4096).filter(|block| block.iter().any(|byte| *byte != 0)).map(|block| block.len() as u64).sum())
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
