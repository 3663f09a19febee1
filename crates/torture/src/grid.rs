//! A local grid of the real binary, driven as a person would: by its command line.

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub struct Grid {
    binary: PathBuf,
    dir: PathBuf,
    /// Of volumes, where they are encrypted.
    key: Option<PathBuf>,
}

/// How large a fresh grid is.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub nodes: u32,
    pub devices: u32,
    pub device_mib: u64,
    /// Hosts and nodes talk over TLS.
    pub tls: bool,
    /// Volumes are encrypted.
    pub encrypt: bool,
}

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

/// A file with a key. Which one makes no difference here. Beside the grid's files, whose directory is to be empty.
fn make_key(dir: &Path) -> Result<PathBuf> {
    use std::os::unix::fs::OpenOptionsExt;
    let path = dir.with_extension("key");
    let mut options = std::fs::OpenOptions::new();
    let file = options.write(true).create(true).truncate(true).mode(0o600).open(&path);
    let written = file.and_then(|file| std::io::Write::write_all(&mut &file, &[0x5a; 32]));
    written.with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

impl Grid {
    /// Makes a grid in an empty directory and brings it up.
    pub fn create(binary: &Path, dir: &Path, shape: Shape) -> Result<Grid> {
        let key = shape.encrypt.then(|| make_key(dir)).transpose()?;
        let grid = Grid { binary: binary.into(), dir: dir.into(), key };
        let (nodes, devices) = (shape.nodes.to_string(), shape.devices.to_string());
        let size = format!("{}MiB", shape.device_mib);
        let tls = if shape.tls { "on" } else { "off" };
        grid.run(&["grid", "up", "--nodes", &nodes, "--devices", &devices, "--device-size", &size, "--tls", tls])?;
        Ok(grid)
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn nbd_socket(&self) -> PathBuf {
        self.dir.join("nbd.sock")
    }

    /// Starts whatever of the grid is not running, and waits until it serves.
    pub fn up(&self) -> Result<()> {
        self.run(&["grid", "up"]).map(drop)
    }

    /// Begins to do so: while a node hangs, the command waits for it, and volumes are served meanwhile.
    pub fn begin_up(&self) -> Result<ComingUp> {
        let mut command = self.command(&["grid", "up"]);
        let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
        Ok(ComingUp(child.with_context(|| format!("cannot run {}", self.binary.display()))?))
    }

    /// Waits until every volume is open.
    pub fn wait_open(&self, patience: Duration) -> Result<()> {
        let since = Instant::now();
        loop {
            let what = match self.status() {
                Ok(status) => match status.not_open() {
                    None => return Ok(()),
                    Some(what) => what,
                },
                Err(error) => error.to_string(),
            };
            ensure!(since.elapsed() < patience, "{patience:?} after the host was started: {what}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn down(&self) -> Result<()> {
        self.run(&["grid", "down", "--force"]).map(drop)
    }

    pub fn create_volume(&self, name: &str, size_bytes: u64, layout: &str) -> Result<()> {
        let size = format!("{}MiB", size_bytes >> 20);
        let mut line = vec!["volume", "create", name, "--size", &size, "--layout", layout];
        let key = self.key.as_ref().map(|key| key.to_string_lossy());
        line.extend(key.as_deref().into_iter().flat_map(|key| ["--encrypt", "--key-file", key]));
        self.run(&line).map(drop)
    }

    /// `volume set` with one option.
    pub fn set_volume(&self, name: &str, option: &str, value: &str) -> Result<()> {
        self.run(&["volume", "set", name, option, value]).map(drop)
    }

    pub fn layout_of(&self, volume: &str) -> Result<String> {
        Ok(self.shown(volume)?["layout"].as_str().unwrap_or_default().to_string())
    }

    /// Shards that were found damaged since the volume was opened.
    pub fn damage_found(&self, volume: &str) -> Result<u64> {
        self.counter(volume, "checksum_errors")
    }

    /// Bytes of reads that came with others, ahead of them, since the volume was opened.
    pub fn read_ahead_bytes(&self, volume: &str) -> Result<u64> {
        self.counter(volume, "ahead_bytes")
    }

    fn counter(&self, volume: &str, name: &str) -> Result<u64> {
        let shown = self.shown(volume)?;
        let found = shown["live"]["counters"][name].as_u64();
        found.with_context(|| format!("`holdfast volume show` tells nothing of {name} of volume {volume}"))
    }

    fn shown(&self, volume: &str) -> Result<Value> {
        let text = self.run(&["volume", "show", volume, "--json"])?;
        serde_json::from_str(&text).context("`holdfast volume show --json` is no JSON")
    }

    /// Sets one setting of the host, and nothing else; the grid is down and up again afterwards.
    pub fn set_host_setting(&self, key: &str, value: &str) -> Result<()> {
        self.down()?;
        let path = self.dir.join("holdfast.toml");
        std::fs::write(&path, format!("{key} = \"{value}\"\n"))
            .with_context(|| format!("cannot write {}", path.display()))?;
        self.up()
    }

    /// The file of a node's first device.
    pub fn device_file(&self, node: u32) -> PathBuf {
        self.dir.join(format!("devices/node{node}-0.img"))
    }

    pub fn add_node(&self) -> Result<()> {
        self.run(&["node", "add"]).map(drop)
    }

    /// Begins to empty a node.
    pub fn drain_node(&self, node: u32) -> Result<()> {
        self.run(&["node", "drain", &node.to_string()]).map(drop)
    }

    /// Takes an empty node out of the grid.
    pub fn remove_node(&self, node: u32) -> Result<()> {
        self.run(&["node", "remove", &node.to_string()]).map(drop)
    }

    pub fn node(&self, action: NodeAction, node: u32) -> Result<()> {
        self.run(&["node", action.word(), &node.to_string()]).map(drop)
    }

    pub fn status(&self) -> Result<Status> {
        let text = self.run(&["grid", "status", "--json"])?;
        Status::parse(&text)
            .with_context(|| format!("`holdfast grid status --json` printed something unexpected:\n{text}"))
    }

    /// Kills the host process at once.
    pub fn kill_host(&self) -> Result<()> {
        let status = self.status()?;
        let Some(pid) = status.host_pid else { bail!("there is no host process to kill") };
        kill(pid)?;
        wait_gone(pid)
    }

    /// Kills every process of the grid at once, as a power cut does to programs.
    pub fn kill_everything(&self) -> Result<()> {
        let status = self.status()?;
        let pids: Vec<u32> = status.nodes.iter().filter_map(|n| n.pid).chain(status.host_pid).collect();
        for pid in &pids {
            kill(*pid)?;
        }
        pids.into_iter().try_for_each(wait_gone)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.binary);
        command.args(arguments).env("HOLDFAST_DIR", &self.dir).stdin(Stdio::null());
        command
    }

    fn run(&self, arguments: &[&str]) -> Result<String> {
        let shown = || format!("`holdfast {}`", arguments.join(" "));
        let output =
            self.command(arguments).output().with_context(|| format!("cannot run {}", self.binary.display()))?;
        if !output.status.success() {
            bail!("{} failed ({}): {}", shown(), output.status, String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
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

fn kill(pid: u32) -> Result<()> {
    let pid = Pid::from_raw(pid as i32).context("a process with id 0")?;
    kill_process(pid, Signal::KILL).context("cannot kill a process of the grid")
}

fn wait_gone(pid: u32) -> Result<()> {
    let since = Instant::now();
    while is_alive(pid) {
        if since.elapsed() > Duration::from_secs(10) {
            bail!("process {pid} outlives its SIGKILL by ten seconds");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Whether the process runs; one that only waits to be reaped does not.
fn is_alive(pid: u32) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

#[derive(Clone, Debug)]
pub struct Node {
    pub id: u32,
    pub state: String,
    pub pid: Option<u32>,
}

#[derive(Clone, Debug)]
pub struct Volume {
    pub name: String,
    pub state: String,
    pub degraded_segments: u64,
    pub at_risk_entries: u64,
    pub suspect_nodes: usize,
}

/// What `holdfast status --json` says, as far as it matters here.
#[derive(Clone, Debug)]
pub struct Status {
    pub host_state: String,
    pub host_pid: Option<u32>,
    pub nodes: Vec<Node>,
    pub volumes: Vec<Volume>,
}

impl Status {
    fn parse(text: &str) -> Result<Status> {
        let all: Value = serde_json::from_str(text)?;
        let list = |key: &str| all[key].as_array().with_context(|| format!("no list '{key}'"));
        let word = |value: &Value, key: &str| {
            value[key].as_str().map(str::to_string).with_context(|| format!("no '{key}' in {value}"))
        };
        let pid = |value: &Value| value["pid"].as_u64().map(|pid| pid as u32);
        let node = |n: &Value| -> Result<Node> {
            let id = n["id"].as_u64().context("a node without an id")? as u32;
            Ok(Node { id, state: word(n, "state")?, pid: pid(n) })
        };
        let nodes: Vec<Node> = list("nodes")?.iter().map(node).collect::<Result<_>>()?;
        // A node that was taken out is away for good.
        let is_node = |id: &&Value| nodes.iter().any(|node| Some(u64::from(node.id)) == id.as_u64());
        let volume = |v: &Value| -> Result<Volume> {
            let live = &v["live"];
            // Absent while the volume is not open: then nothing may be taken for redundant.
            let number = |key: &str| live[key].as_u64().unwrap_or(u64::from(u32::MAX));
            Ok(Volume {
                name: word(v, "name")?,
                state: word(v, "state")?,
                degraded_segments: number("degraded_segments"),
                at_risk_entries: number("at_risk_entries"),
                suspect_nodes: live["suspect_nodes"]
                    .as_array()
                    .map_or(usize::MAX, |ids| ids.iter().filter(is_node).count()),
            })
        };
        Ok(Status {
            host_state: word(&all["host"], "state")?,
            host_pid: pid(&all["host"]),
            volumes: list("volumes")?.iter().map(volume).collect::<Result<_>>()?,
            nodes,
        })
    }

    /// What still keeps the grid from serving all its volumes.
    pub fn not_open(&self) -> Option<String> {
        if self.host_state != "up" {
            return Some(format!("the host is {}", self.host_state));
        }
        let volume = self.volumes.iter().find(|v| v.state != "open")?;
        Some(format!("volume {} is {}", volume.name, volume.state))
    }

    /// What still keeps the grid from having all its redundancy; `None` when nothing does.
    pub fn lacks(&self) -> Option<String> {
        if let Some(what) = self.not_open() {
            return Some(what);
        }
        if let Some(node) = self.nodes.iter().find(|n| n.state != "up") {
            return Some(format!("node {} is {}", node.id, node.state));
        }
        let is_lacking = |v: &&Volume| v.degraded_segments + v.at_risk_entries > 0 || v.suspect_nodes > 0;
        let volume = self.volumes.iter().find(is_lacking)?;
        Some(format!(
            "volume {}: {} degraded segments, {} entries at risk, {} suspect nodes",
            volume.name, volume.degraded_segments, volume.at_risk_entries, volume.suspect_nodes
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_tells_what_is_lacking() {
        let text = |degraded: u64, node: &str| {
            format!(
                r#"{{"host":{{"state":"up","pid":5}},"nodes":[{{"id":1,"state":"{node}","pid":6}}],
                "volumes":[{{"name":"v","state":"open","live":{{"degraded_segments":{degraded},"at_risk_entries":0,
                "suspect_nodes":[]}}}}]}}"#
            )
        };
        assert_eq!(Status::parse(&text(0, "up")).expect("it parses").lacks(), None);
        assert!(
            Status::parse(&text(0, "hung")).expect("it parses").lacks().is_some_and(|l| l.contains("node 1 is hung"))
        );
        assert!(Status::parse(&text(3, "up")).expect("it parses").lacks().is_some_and(|l| l.contains("3 degraded")));
        assert!(Status::parse("{}").is_err());
    }
}
