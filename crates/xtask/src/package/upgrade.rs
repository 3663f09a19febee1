//! `./x package --upgrade`: a grid of the release before is brought to this one under load, back, and to this one again, with
//! the real programs of both. What was written is compared after each step.
//!
//! Then a volume is packed, which the release before does not know: there it is refused, and all else is served.

use crate::tools;
use anyhow::{Context, Result, bail, ensure};
use holdfast_lab::grid::{Grid, Shape};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Stands for the release before, since none has a tag yet: the last commit that knows neither packed volumes, nor nodes of
/// several reactors. It speaks versions 5 to 12 of the messages, and reads root records up to version 4.
const BEFORE: &str = "a20e4889";

/// What it says of a volume that is packed.
const REFUSAL: &str = "uses feature 2 (packed) of the format, which this release does not serve";

const MIB: usize = 1 << 20;

/// A volume comes up in seconds.
const PATIENCE: Duration = Duration::from_secs(120);

/// Three nodes for `parity:2+1`.
const SHAPE: Shape = Shape { nodes: 3, devices: 1, device_mib: 1024 };

pub fn run(now: &Path) -> Result<()> {
    let before = program_of_before()?;
    let work = tools::target_dir().join("upgrade");
    if work.exists() {
        fs::remove_dir_all(&work)?;
    }
    let trial = Trial::begin(&work, &before)?;
    trial.step("written by the release before", |_| Ok(()))?;

    trial.put(now)?;
    trial.under_load(|| trial.restart_nodes())?;
    trial.step("its host serves with nodes of this release", |_| Ok(()))?;
    trial.restart_host()?;
    trial.step("host and nodes are of this release", |trial| trial.write("a", 24 * MIB))?;

    trial.put(&before)?;
    trial.under_load(|| trial.restart_nodes())?;
    trial.restart_host()?;
    trial.step("all are of the release before again", |trial| trial.write("a", 8 * MIB))?;

    trial.put(now)?;
    trial.under_load(|| trial.restart_nodes())?;
    trial.restart_host()?;
    trial.grid.run(&["volume", "set", "a", "--compress", "lz4"])?;
    trial.step("and of this one, with a volume that is packed", |trial| trial.write("a", 16 * MIB))?;
    trial.refused_by(&before)?;
    // The host first: nodes are restarted in turn once all volumes are open.
    trial.put(now)?;
    trial.restart_host()?;
    trial.restart_nodes()?;
    trial.step("of this one again, after the refusal", |_| Ok(()))
}

/// Built from its own sources, once.
fn program_of_before() -> Result<PathBuf> {
    let dir = tools::target_dir().join("tools").join(format!("holdfast-{BEFORE}"));
    let program = dir.join("holdfast");
    if program.exists() {
        return Ok(program);
    }
    let sources = dir.join("sources");
    fs::create_dir_all(&sources)?;
    let mut archive = tools::git();
    let mut archive = archive.args(["archive", BEFORE]).stdout(Stdio::piped()).spawn()?;
    let text = archive.stdout.take().context("its output is piped")?;
    tools::run(Command::new("tar").arg("-x").arg("-C").arg(&sources).stdin(text))?;
    ensure!(archive.wait()?.success(), "these sources have no commit {BEFORE}: fetch all of their history");
    let mut command = tools::cargo_command();
    command.args(["build", "--release", "--locked", "--package", "holdfast", "--bin", "holdfast"]);
    tools::run(command.current_dir(&sources).env("CARGO_TARGET_DIR", dir.join("build")))?;
    fs::copy(dir.join("build/release/holdfast"), &program)?;
    fs::remove_dir_all(dir.join("build"))?;
    fs::remove_dir_all(&sources)?;
    Ok(program)
}

struct Trial {
    grid: Grid,
    work: PathBuf,
    /// The program in its place.
    program: PathBuf,
}

impl Trial {
    /// A grid with two volumes, of which one has a snapshot.
    fn begin(work: &Path, before: &Path) -> Result<Trial> {
        fs::create_dir_all(work.join("bin"))?;
        let program = work.join("bin/holdfast");
        fs::copy(before, &program)?;
        let grid = Grid::new(&program, &work.join("grid")).ended();
        let trial = Trial { grid, work: work.to_path_buf(), program };
        trial.grid.make(SHAPE, &[])?;
        trial.grid.create_volume("a", 64, "parity:2+1")?;
        trial.grid.create_volume("b", 32, "mirror:2")?;
        for (name, size) in [("a", 64 * MIB), ("b", 32 * MIB)] {
            fs::write(trial.file(name), vec![0; size])?;
            trial.write(name, size)?;
        }
        trial.grid.run(&["snapshot", "create", "a", "first"])?;
        fs::copy(trial.file("a"), trial.file("a@first"))?;
        trial.write("a", 32 * MIB)?;
        Ok(trial)
    }

    /// As the volume is to be.
    fn file(&self, name: &str) -> PathBuf {
        self.work.join(format!("{name}.expected"))
    }

    /// Other bytes for the beginning of a volume: half of each block can be packed.
    fn write(&self, name: &str, len: usize) -> Result<()> {
        let path = self.file(name);
        let mut expected = fs::read(&path)?;
        let mut state = u64::from(expected[0]) * 2 + 0x9e37_79b9_7f4a_7c15;
        for (at, byte) in expected[..len].iter_mut().enumerate() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            *byte = if at % 4096 < 2048 { (state >> 33) as u8 } else { (at / 4096) as u8 };
        }
        fs::write(&path, expected)?;
        copy(&path.display().to_string(), &self.grid.uri(name))
    }

    /// Does something, and compares all volumes and the snapshot with what they are to hold.
    fn step(&self, what: &str, act: impl FnOnce(&Trial) -> Result<()>) -> Result<()> {
        act(self).context(what.to_string())?;
        self.compare(&["a", "b", "a@first"]).context(what.to_string())?;
        println!("upgrade: {what}: all is as it was written");
        Ok(())
    }

    fn compare(&self, names: &[&str]) -> Result<()> {
        for name in names {
            let found = self.work.join("found");
            let _ = fs::remove_file(&found);
            copy(&self.grid.uri(name), &found.display().to_string())?;
            ensure!(fs::read(&found)? == fs::read(self.file(name))?, "{name} holds other bytes than were written");
        }
        Ok(())
    }

    /// As an update of the package does: what runs goes on with the old one.
    fn put(&self, program: &Path) -> Result<()> {
        let beside = self.work.join("bin/new");
        fs::copy(program, &beside)?;
        Ok(fs::rename(beside, &self.program)?)
    }

    fn restart_nodes(&self) -> Result<()> {
        self.grid.run(&["node", "restart", "--rolling", "--patience", "300"]).map(drop)
    }

    fn restart_host(&self) -> Result<()> {
        self.grid.run(&["grid", "down", "--host"])?;
        self.grid.up()?;
        self.grid.wait_open(PATIENCE)
    }

    /// A client writes the same to a volume again and again meanwhile, and sees no error.
    fn under_load(&self, act: impl FnOnce() -> Result<()>) -> Result<()> {
        let (from, to) = (self.file("b").display().to_string(), self.grid.uri("b"));
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let load = scope.spawn(|| {
                let mut copies = 0;
                while !is_over.load(Ordering::Relaxed) {
                    copy(&from, &to)?;
                    copies += 1;
                }
                Ok::<u32, anyhow::Error>(copies)
            });
            let done = act();
            is_over.store(true, Ordering::Relaxed);
            let copies = load.join().expect("a load does not panic").context("a client had an error meanwhile")?;
            println!("upgrade: nodes were restarted while a volume was written {copies} times");
            done
        })
    }

    /// The release before serves what it knows, and says why it does not serve the rest.
    fn refused_by(&self, before: &Path) -> Result<()> {
        self.put(before)?;
        self.restart_nodes()?;
        self.grid.run(&["grid", "down", "--host"])?;
        // It waits for all volumes, and ends with why one does not come; the host is up.
        let refusal = self.grid.up().err().map(|error| format!("{error:#}")).unwrap_or_default();
        for _ in 0..600 {
            let status = self.grid.status()?;
            let volumes = status["volumes"].as_array().cloned().unwrap_or_default();
            let of = |name: &str| volumes.iter().find(|volume| volume["name"] == name).cloned().unwrap_or_default();
            let (a, b) = (of("a"), of("b"));
            let is_told = refusal.contains(REFUSAL) || status.to_string().contains(REFUSAL);
            if b["state"] == "open" && a["state"] != "open" && is_told {
                self.compare(&["b"])?;
                println!(
                    "upgrade: the release before serves b, and not a, which uses what it does not know: {REFUSAL}"
                );
                return Ok(());
            }
            ensure!(a["state"] != "open", "the release before serves a volume that it can't know");
            std::thread::sleep(Duration::from_millis(200));
        }
        bail!("the release before does not say why it refuses a: {}", self.grid.status()?)
    }
}

fn copy(from: &str, to: &str) -> Result<()> {
    tools::output_of(Command::new("nbdcopy").args([from, to])).map(drop)
}
