//! The first file system of the guest, made here: busybox, what makes and checks ext4, a few modules, and the guest's program.
//!
//! Nothing of a distribution's image is needed, so nothing but a kernel and a few programs has to be fetched.

use crate::atlas::net;
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What a Debian cloud kernel needs to see a virtio disk. What is built in has no file, and is left out.
const MODULES: [&str; 6] =
    ["virtio", "virtio_ring", "virtio_pci_legacy_dev", "virtio_pci_modern_dev", "virtio_pci", "virtio_blk"];

/// From this machine, with the libraries that they want.
const PROGRAMS: [&str; 2] = ["mke2fs", "e2fsck"];

/// What the guest does; its arguments stand on the kernel's command line.
const INIT: &str = include_str!("init.sh");

const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const LINK: u32 = 0o120_777;

/// Kernel and programs that `./x setup --guests` has unpacked.
pub struct Parts {
    pub kernel: PathBuf,
    busybox: PathBuf,
    modules: BTreeMap<&'static str, PathBuf>,
}

impl Parts {
    /// Looks into the directory that packages were unpacked to.
    pub fn find(dir: &Path) -> Result<Parts> {
        let missing =
            || format!("no guest's kernel and busybox in {}; `./x setup --guests` fetches them", dir.display());
        let kernel = first_in(&dir.join("boot"), |name| name.starts_with("vmlinuz-")).with_context(missing)?;
        let busybox = ["bin/busybox", "usr/bin/busybox"].map(|name| dir.join(name)).into_iter().find(|p| p.exists());
        let busybox = busybox.with_context(missing)?;
        let mut modules = BTreeMap::new();
        for root in [dir.join("lib/modules"), dir.join("usr/lib/modules")] {
            collect_modules(&root, &mut modules)?;
        }
        Ok(Parts { kernel, busybox, modules })
    }

    /// Writes the archive.
    pub fn pack(&self, output: &Path) -> Result<()> {
        let mut archive = Archive::default();
        for dir in ["bin", "dev", "proc", "sys", "mnt", "tmp", "m", "lib", "lib64", "lib/x86_64-linux-gnu"] {
            archive.add(dir, DIRECTORY, &[]);
        }
        archive.add_file("bin/busybox", &self.busybox)?;
        archive.add("bin/sh", LINK, b"busybox");
        for (name, path) in &self.modules {
            let packed = path.extension().is_some_and(|extension| extension == "xz");
            let bytes = match packed {
                true => std::process::Command::new("xz").arg("-dc").arg(path).output().context("no `xz`")?.stdout,
                false => std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?,
            };
            archive.add(&format!("m/{name}.ko"), PROGRAM, &bytes);
        }
        let mut libraries: Vec<String> = Vec::new();
        for program in PROGRAMS {
            let path = ["/usr/sbin", "/sbin"].map(|dir| Path::new(dir).join(program));
            let path = path.into_iter().find(|path| path.exists());
            let path = path.with_context(|| format!("no `{program}` (package e2fsprogs); `./x setup` installs it"))?;
            archive.add_file(&format!("bin/{program}"), &path)?;
            libraries.extend(libraries_of(&path)?);
        }
        libraries.sort_unstable();
        libraries.dedup();
        for library in libraries {
            archive.add_file(library.trim_start_matches('/'), Path::new(&library))?;
        }
        archive.add("init", PROGRAM, INIT.as_bytes());
        std::fs::write(output, archive.finish()).with_context(|| format!("cannot write {}", output.display()))
    }
}

/// Paths of the shared libraries that a program wants, the loader included.
fn libraries_of(program: &Path) -> Result<Vec<String>> {
    let text = net::run("ldd", &[&program.to_string_lossy()])?;
    let paths = text.split_whitespace().filter(|word| word.starts_with('/'));
    Ok(paths.map(str::to_string).collect())
}

fn first_in(dir: &Path, is_it: impl Fn(&str) -> bool) -> Option<PathBuf> {
    let entries = std::fs::read_dir(dir).ok()?.flatten();
    let mut paths: Vec<PathBuf> =
        entries.filter(|entry| is_it(&entry.file_name().to_string_lossy())).map(|entry| entry.path()).collect();
    paths.sort();
    paths.into_iter().next_back()
}

fn collect_modules(dir: &Path, found: &mut BTreeMap<&'static str, PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(dir).into_iter().flatten() {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let stem = name.split_once(".ko").map_or("", |(stem, _)| stem);
        if path.is_dir() && !path.is_symlink() {
            collect_modules(&path, found)?;
        } else if let Some(module) = MODULES.into_iter().find(|module| *module == stem) {
            found.insert(module, path);
        }
    }
    Ok(())
}

/// An archive in cpio's format `newc`, as kernels take it.
#[derive(Default)]
struct Archive {
    bytes: Vec<u8>,
    count: u32,
}

impl Archive {
    fn add_file(&mut self, name: &str, path: &Path) -> Result<()> {
        let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        ensure!(!bytes.is_empty(), "{} is empty", path.display());
        self.add(name, PROGRAM, &bytes);
        Ok(())
    }

    fn add(&mut self, name: &str, mode: u32, contents: &[u8]) {
        self.count += 1;
        // Number, mode, owner, group, links, time, size, two device numbers twice, the name's length, no checksum.
        let fields = [self.count, mode, 0, 0, 1, 0, contents.len() as u32, 0, 0, 0, 0, name.len() as u32 + 1, 0];
        self.bytes.extend(b"070701");
        for field in fields {
            self.bytes.extend(format!("{field:08x}").bytes());
        }
        self.bytes.extend(name.bytes().chain([0]));
        self.pad();
        self.bytes.extend(contents);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn finish(mut self) -> Vec<u8> {
        self.add("TRAILER!!!", 0, &[]);
        self.bytes
    }
}
