//! A grid of the real binary, or one machine's part of one, driven as a person would: by its command line.
//!
//! Role: gives commands about one directory, reads their JSON, finds the processes that belong to the directory. It is
//! told whether to bring all down in the end; the directory is its maker's to remove.

use crate::process::{self, Signal};
use crate::status::Status;
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

const LOOK_PACE: Duration = Duration::from_millis(20);

/// The size of a fresh grid.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub nodes: u64,
    /// Of each node.
    pub devices: u64,
    pub device_mib: u64,
}

/// A fault of a node, or the end of one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NodeAction {
    Kill,
    Start,
    Hang,
    Resume,
    Cut,
    Mend,
}

impl NodeAction {
    fn word(self) -> &'static str {
        match self {
            NodeAction::Kill => "kill",
            NodeAction::Start => "start",
            NodeAction::Hang => "hang",
            NodeAction::Resume => "resume",
            NodeAction::Cut => "cut",
            NodeAction::Mend => "mend",
        }
    }
}

/// A machine that commands are given on, where it is another one than this.
struct Elsewhere {
    name: String,
    /// Words before a program that have it run there.
    words: Vec<String>,
}

pub struct Grid {
    binary: PathBuf,
    dir: PathBuf,
    elsewhere: Option<Elsewhere>,
    /// Time that a command may take.
    command_max: Option<Duration>,
    /// Of volumes, where they are encrypted.
    key: Option<PathBuf>,
    is_ended: bool,
}

impl Drop for Grid {
    fn drop(&mut self) {
        if self.is_ended && self.dir.join("grid.json").exists() {
            // Who looks for a reason finds it in the logs.
            let _ = self.command(&["grid", "down", "--force"]).output();
        }
    }
}

impl Grid {
    /// A grid that this binary has made in this directory, or will.
    pub fn new(binary: &Path, dir: &Path) -> Grid {
        let (binary, dir) = (binary.into(), dir.into());
        Grid { binary, dir, elsewhere: None, command_max: None, key: None, is_ended: false }
    }

    /// Commands are given on this machine, behind these words, and take so long at most.
    pub fn on(mut self, name: &str, words: &[&str], command_max: Duration) -> Grid {
        let words = words.iter().map(|word| word.to_string()).collect();
        self.elsewhere = Some(Elsewhere { name: name.into(), words });
        self.command_max = Some(command_max);
        self
    }

    /// Volumes are encrypted with the key in this file.
    pub fn encrypted(mut self, key: PathBuf) -> Grid {
        self.key = Some(key);
        self
    }

    /// The grid is brought down when this is dropped.
    pub fn ended(mut self) -> Grid {
        self.is_ended = true;
        self
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    pub fn logs(&self) -> PathBuf {
        self.dir.join("logs")
    }

    pub fn nbd_socket(&self) -> PathBuf {
        self.dir.join("nbd.sock")
    }

    /// For clients on this machine.
    pub fn uri(&self, volume: &str) -> String {
        format!("nbd+unix:///{volume}?socket={}", self.nbd_socket().display())
    }

    pub fn host_log(&self) -> Result<String> {
        let path = self.logs().join("host.log");
        std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    }

    /// The file of a node's first device.
    pub fn device_file(&self, node: u32) -> PathBuf {
        self.dir.join(format!("devices/node{node}-0.img"))
    }
}

/// Commands.
impl Grid {
    /// A program that is to run where the grid's machine is.
    pub fn program(&self, program: &Path) -> Command {
        let words = self.elsewhere.as_ref().map(|elsewhere| elsewhere.words.as_slice());
        let Some((first, rest)) = words.and_then(<[String]>::split_first) else { return Command::new(program) };
        let mut command = Command::new(first);
        command.args(rest).arg(program);
        command
    }

    /// A command of ours about this grid.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.program(&self.binary);
        command.args(arguments).env("HOLDFAST_DIR", &self.dir).stdin(Stdio::null());
        command
    }

    /// Runs a command, however it ends.
    pub fn told(&self, arguments: &[&str]) -> Result<Output> {
        let shown = || self.shown(arguments);
        let mut command = self.command(arguments);
        let Some(command_max) = self.command_max else {
            return command.output().with_context(|| format!("cannot run {}", shown()));
        };
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().with_context(|| format!("cannot run {}", shown()))?;
        let (pid, (tell, heard)) = (child.id(), mpsc::channel());
        // Somebody has to listen meanwhile: pipes are short.
        std::thread::spawn(move || tell.send(child.wait_with_output()));
        match heard.recv_timeout(command_max) {
            Ok(output) => output.with_context(|| format!("cannot hear {}", shown())),
            Err(_) => {
                process::signal(pid, Signal::KILL)?;
                bail!("{} is not done after {command_max:?}; logs are in {}", shown(), self.logs().display())
            }
        }
    }

    /// Runs a command that must succeed; its standard output.
    pub fn run(&self, arguments: &[&str]) -> Result<String> {
        let output = self.told(arguments)?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            bail!("{} failed ({}): {}", self.shown(arguments), output.status, said.trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Runs a command that must succeed and tell JSON.
    pub fn json(&self, arguments: &[&str]) -> Result<Value> {
        let text = self.run(&[arguments, &["--json"]].concat())?;
        serde_json::from_str(&text).with_context(|| format!("{} gave no JSON: {text}", self.shown(arguments)))
    }

    fn shown(&self, arguments: &[&str]) -> String {
        let place = self.elsewhere.as_ref().map(|elsewhere| format!(" on {}", elsewhere.name));
        format!("`holdfast {}`{}", arguments.join(" "), place.unwrap_or_default())
    }

    /// Makes the grid in an empty directory, with these options of `grid up` besides, and brings it up.
    pub fn make(&self, shape: Shape, options: &[&str]) -> Result<()> {
        let Shape { nodes, devices, device_mib } = shape;
        let (nodes, devices, size) = (nodes.to_string(), devices.to_string(), format!("{device_mib}MiB"));
        let up = ["grid", "up", "--nodes", &nodes, "--devices", &devices, "--device-size", &size];
        self.run(&[&up, options].concat()).map(drop)
    }

    /// Starts whatever of the grid is not running, and waits until it serves.
    pub fn up(&self) -> Result<()> {
        self.run(&["grid", "up"]).map(drop)
    }

    /// Begins to do so: while a node hangs, the command waits for it, and volumes are served meanwhile.
    pub fn begin_up(&self) -> Result<ComingUp> {
        let child = self.command(&["grid", "up"]).stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
        Ok(ComingUp(child.with_context(|| format!("cannot run {}", self.binary.display()))?))
    }

    /// Ends the grid, although clients are connected.
    pub fn down(&self) -> Result<()> {
        self.run(&["grid", "down", "--force"]).map(drop)
    }

    /// Waits until every volume is open.
    pub fn wait_open(&self, patience: Duration) -> Result<()> {
        let since = Instant::now();
        loop {
            let what = match self.state() {
                Ok(status) => match status.not_open() {
                    None => return Ok(()),
                    Some(what) => what,
                },
                Err(error) => error.to_string(),
            };
            ensure!(since.elapsed() < patience, "{patience:?} after the host was started: {what}");
            std::thread::sleep(LOOK_PACE);
        }
    }

    /// All that `grid status` tells.
    pub fn status(&self) -> Result<Value> {
        self.json(&["grid", "status"])
    }

    /// The part of it that tells what is lacking.
    pub fn state(&self) -> Result<Status> {
        let told = self.status()?;
        Status::parse(&told).with_context(|| format!("`holdfast grid status` tells something unexpected: {told}"))
    }

    /// All that `volume show` tells.
    pub fn volume(&self, name: &str) -> Result<Value> {
        self.json(&["volume", "show", name])
    }

    /// A counter of a volume, since it was opened.
    pub fn counter(&self, volume: &str, name: &str) -> Result<u64> {
        let found = self.volume(volume)?["live"]["counters"][name].as_u64();
        found.with_context(|| format!("`holdfast volume show` tells nothing of {name} of volume {volume}"))
    }

    pub fn create_volume(&self, name: &str, size_mib: u64, layout: &str) -> Result<()> {
        let size = format!("{size_mib}MiB");
        let mut line = vec!["volume", "create", name, "--size", &size, "--layout", layout];
        let key = self.key.as_ref().map(|key| key.to_string_lossy());
        line.extend(key.as_deref().into_iter().flat_map(|key| ["--encrypt", "--key-file", key]));
        self.run(&line).map(drop)
    }

    /// Does this to a node.
    pub fn node(&self, action: NodeAction, node: u32) -> Result<()> {
        self.run(&["node", action.word(), &node.to_string()]).map(drop)
    }

    /// Sets one setting of the host, and nothing else; the grid is down and up again afterwards.
    pub fn set_host_setting(&self, key: &str, value: &str) -> Result<()> {
        self.down()?;
        let path = self.path("holdfast.toml");
        std::fs::write(&path, format!("{key} = \"{value}\"\n"))
            .with_context(|| format!("cannot write {}", path.display()))?;
        self.up()
    }
}

/// Processes.
impl Grid {
    /// Those that run, by what they are: `host`, `node2`.
    pub fn processes(&self) -> Vec<(String, u32)> {
        let dir = std::path::absolute(&self.dir).unwrap_or_else(|_| self.dir.clone());
        let mut found = Vec::new();
        for entry in std::fs::read_dir(dir.join("run")).into_iter().flatten().flatten() {
            let Some(pid) = pid_in(&entry.path()).filter(|pid| process::is_of(*pid, &dir)) else { continue };
            found.push((entry.path().file_stem().unwrap_or_default().to_string_lossy().into_owned(), pid));
        }
        found
    }

    /// The process of the host (`host`), or of a node (`node2`).
    pub fn pid(&self, role: &str) -> Result<u32> {
        let found = self.processes().into_iter().find(|(of, _)| of == role);
        found.map(|(_, pid)| pid).with_context(|| format!("{role} does not run; logs are in {}", self.logs().display()))
    }

    /// Kills the host process at once.
    pub fn kill_host(&self) -> Result<()> {
        process::kill(&[self.pid("host")?])
    }

    /// Kills every process of the grid at once, as a power cut does to programs.
    pub fn kill_everything(&self) -> Result<()> {
        let pids: Vec<u32> = self.processes().into_iter().map(|(_, pid)| pid).collect();
        process::kill(&pids)
    }
}

fn pid_in(file: &Path) -> Option<u32> {
    let told: Value = serde_json::from_slice(&std::fs::read(file).ok()?).ok()?;
    u32::try_from(told["pid"].as_u64()?).ok()
}

/// A `holdfast grid up` that has begun.
pub struct ComingUp(Child);

impl ComingUp {
    /// Waits for its end, which must be a good one.
    pub fn finish(self) -> Result<()> {
        let output = self.0.wait_with_output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "`holdfast grid up` failed ({}): {}", output.status, said.trim());
        Ok(())
    }
}

/// Writes a key for encrypted volumes; which one makes no difference to who only looks for bytes.
pub fn make_key(path: &Path) -> Result<()> {
    let file = std::fs::File::options().write(true).create(true).truncate(true).mode(0o600).open(path);
    let written = file.and_then(|file| std::io::Write::write_all(&mut &file, &[0x5a; 32]));
    written.with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_given_in_the_place_of_the_grid() {
        let grid = Grid::new(Path::new("echo"), Path::new("/nowhere"));
        assert_eq!(grid.run(&["grid", "status"]).expect("echo succeeds").trim(), "grid status");
        let grid = grid.on("h1", &["env", "LC_ALL=C"], Duration::from_secs(60));
        assert_eq!(grid.run(&["volume list"]).expect("so does this").trim(), "volume list");
        let error = grid.json(&["volume", "list"]).expect_err("that is no JSON").to_string();
        assert!(error.starts_with("`holdfast volume list` on h1 gave no JSON"), "{error}");
        assert!(grid.processes().is_empty() && grid.pid("host").is_err());
    }

    #[test]
    fn a_command_that_hangs_is_ended() {
        let grid = Grid::new(Path::new("600"), Path::new("/nowhere"));
        let grid = grid.on("h1", &["sleep"], Duration::from_millis(50));
        let error = grid.run(&[]).expect_err("it takes too long").to_string();
        assert!(error.contains("is not done after 50ms"), "{error}");
    }
}
