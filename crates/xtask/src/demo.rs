//! `./x demo`: a four-node grid on this machine, films and a database through a node that hangs, and one page about it.
//!
//! The grid stays up afterwards; a second demo finds it and goes on with it.

use crate::{picture, tools};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

const NODES: u64 = 4;
const DEVICES: u64 = 2;
const VOLUMES: [&str; 3] = ["vm1", "vm2", "vm3"];

/// Devices of this size hold the drills' volumes several times over.
const DEVICE_MIB_WANTED: u64 = 2048;
/// With smaller ones the drills run out of space.
const DEVICE_MIB_MIN: u64 = 1024;

/// README shows it.
const PICTURE: &str = "docs/demo.svg";

struct Demo {
    binary: PathBuf,
    dir: PathBuf,
}

pub fn run(arguments: &[String]) -> Result<()> {
    let draws = arguments == ["--picture"];
    if !draws && !arguments.is_empty() {
        bail!("the demo takes no arguments but --picture; HOLDFAST_DIR says where its grid is made");
    }
    let begun = Instant::now();
    say("building the binary, optimised");
    let binary = tools::build_release()?;
    let demo = Demo { binary, dir: directory()? };
    demo.bring_up()?;
    demo.make_volumes()?;
    say("film drill: three films are made, stored, and played in real time while a node hangs");
    let film = demo.drill(&["--workload", "film", "--fault", "hang", "--seconds", "20"])?;
    say("oltp-8k drill: fio for 30 s, a node hangs at half time, comes back, and every block is read back");
    let oltp = demo.drill(&["--workload", "oltp-8k", "--fault", "hang", "--seconds", "30", "--volume-size", "1GiB"])?;
    println!("{}\n\n{}", page(&film, &oltp, begun.elapsed().as_secs()), what_next(&demo)?);
    if draws {
        std::fs::write(PICTURE, picture::svg(&oltp.report)?).with_context(|| format!("cannot write {PICTURE}"))?;
        say(&format!("{PICTURE} is drawn anew"));
    }
    if !(film.passed && oltp.passed) {
        bail!("a drill did not pass; the grid stays up, its logs are in {}", demo.dir.join("logs").display());
    }
    Ok(())
}

/// A person may wait minutes for the next line: each says what takes the time.
fn say(text: &str) {
    eprintln!("demo: {text}");
}

fn directory() -> Result<PathBuf> {
    if let Some(dir) = std::env::var_os("HOLDFAST_DIR").filter(|dir| !dir.is_empty()) {
        return Ok(PathBuf::from(dir));
    }
    let home = std::env::var_os("HOME").filter(|home| !home.is_empty());
    Ok(PathBuf::from(home.context("neither HOLDFAST_DIR nor HOME is set")?).join(".holdfast/demo"))
}

/// What a drill reported, and whether it was content.
struct Outcome {
    report: Value,
    passed: bool,
}

impl Demo {
    fn holdfast(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.binary);
        command.args(arguments).env("HOLDFAST_DIR", &self.dir);
        command
    }

    fn bring_up(&self) -> Result<()> {
        let exists = self.dir.join("grid.json").exists();
        if exists {
            let status = tools::json_of(&mut self.holdfast(&["grid", "status", "--json"]))?;
            let nodes = status["nodes"].as_array().map_or(0, Vec::len);
            let up = |part: &Value| part["state"] == "up";
            if up(&status["host"]) && status["nodes"].as_array().is_some_and(|nodes| nodes.iter().all(up)) {
                say(&format!("the grid in {} is up already, with {nodes} nodes", self.dir.display()));
                return Ok(());
            }
            say(&format!("bringing up the grid in {}", self.dir.display()));
            return tools::output_of(&mut self.holdfast(&["grid", "up"])).map(drop);
        }
        let size = device_mib(&self.dir)?;
        say(&format!("making a grid in {}: {NODES} nodes with {DEVICES} devices of {size} MiB", self.dir.display()));
        let (nodes, devices, size) = (NODES.to_string(), DEVICES.to_string(), format!("{size}MiB"));
        let arguments = ["grid", "up", "--nodes", &nodes, "--devices", &devices, "--device-size", &size];
        tools::output_of(&mut self.holdfast(&arguments)).map(drop)
    }

    fn make_volumes(&self) -> Result<()> {
        let listed = tools::json_of(&mut self.holdfast(&["volume", "list", "--json"]))?;
        let has = |name: &str| listed.as_array().is_some_and(|volumes| volumes.iter().any(|v| v["name"] == name));
        for name in VOLUMES.into_iter().filter(|name| !has(name)) {
            let arguments = ["volume", "create", name, "--size", "2GiB", "--layout", "parity:2+1"];
            tools::output_of(&mut self.holdfast(&arguments))?;
        }
        Ok(())
    }

    /// Runs a drill; one that did not pass still has a report.
    fn drill(&self, arguments: &[&str]) -> Result<Outcome> {
        let mut command = self.holdfast(&["drill", "node-loss", "--json"]);
        let output = command.args(arguments).stdin(Stdio::null()).stderr(Stdio::inherit()).output();
        let output = output.context("cannot start the drill")?;
        let text = String::from_utf8_lossy(&output.stdout);
        let report =
            serde_json::from_str(&text).with_context(|| format!("the drill gave no report ({})", output.status))?;
        Ok(Outcome { report, passed: output.status.success() })
    }
}

/// The wanted size, or what leaves a third of the free space to others.
fn device_mib(dir: &Path) -> Result<u64> {
    std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let text = tools::output_of(Command::new("df").args(["--output=avail", "-B1M"]).arg(dir))?;
    let free_mib: u64 = text.lines().last().unwrap_or_default().trim().parse().context("df gave no number")?;
    let fitting = free_mib * 2 / 3 / (NODES * DEVICES);
    if fitting < DEVICE_MIB_MIN {
        let wanted = DEVICE_MIB_MIN * NODES * DEVICES * 3 / 2;
        bail!(
            "{} has {free_mib} MiB free, and the demo needs {wanted}; set HOLDFAST_DIR to a place with more",
            dir.display()
        );
    }
    Ok(fitting.min(DEVICE_MIB_WANTED))
}

fn page(film: &Outcome, oltp: &Outcome, seconds: u64) -> String {
    let (f, o) = (&film.report, &oltp.report);
    let players = f["players"].as_array().map_or(&[][..], Vec::as_slice);
    let frames: u64 = players.iter().filter_map(|p| p["frames"].as_u64()).sum();
    let proof = &f["counter_proof"];
    let rejoin = |report: &Value, key: &str| seconds_of(&report["rejoin"][key]);
    let dash = || "-".to_string();
    let rows: Vec<[String; 3]> = vec![
        ["".into(), "three films".into(), "oltp-8k".into()],
        ["errors".into(), count(&f["errors"]), count(&o["errors"])],
        ["wrong blocks or frames".into(), count(&f["mismatches"]), count(&o["mismatches"])],
        ["frames lost".into(), format!("{} of {frames}", count(&f["lost_frames"])), dash()],
        ["blocks read back".into(), dash(), count(&o["blocks_verified"])],
        ["IOPS, healthy".into(), dash(), number(&o["healthy"]["iops"], 0)],
        ["IOPS retained, node out".into(), dash(), percent(&o["retained"])],
        ["IOPS retained, node back".into(), dash(), percent(&o["rejoin"]["iops_ratio"])],
        ["longest stall".into(), dash(), format!("{} ms", count(&o["longest_gap_ms"]))],
        ["slowest read".into(), dash(), format!("{} ms", number(&o["read_max_ms"], 1))],
        ["slowest write".into(), dash(), format!("{} ms", number(&o["write_max_ms"], 1))],
        ["return noticed after".into(), rejoin(f, "noticed_s"), rejoin(o, "noticed_s")],
        ["fully redundant after".into(), rejoin(f, "redundant_s"), rejoin(o, "redundant_s")],
    ];
    let table: Vec<String> = rows.iter().map(|[a, b, c]| format!("  {a:<26}{b:>16}{c:>16}")).collect();
    format!(
        "\nHoldfast demo: {NODES} nodes, volumes with parity 2+1, one node hung (SIGSTOP) half-way; {} s in all\n\n{}\n\n\
         The player counts: over a server stopped for {} s it lost {} of {} frames.",
        seconds,
        table.join("\n"),
        number(&proof["stopped_s"], 1),
        count(&proof["lost"]),
        count(&proof["frames"]),
    )
}

fn what_next(demo: &Demo) -> Result<String> {
    let shown = tools::json_of(&mut demo.holdfast(&["volume", "show", "vm1", "--json"]))?;
    let uri = shown["uris"][0].as_str().context("vm1 is served nowhere")?;
    let dir = demo.dir.display();
    let bin = demo.binary.parent().unwrap_or(Path::new(".")).display();
    Ok(format!(
        "The grid is up. Next:\n\n  \
         export HOLDFAST_DIR={dir} PATH={bin}:$PATH\n  \
         holdfast status\n  \
         nbdinfo '{uri}'\n  \
         holdfast node kill 2; holdfast status; holdfast node start 2\n  \
         holdfast drill node-loss --workload oltp-8k --fault kill --seconds 60\n  \
         holdfast grid down            # its data stays; `rm -r {dir}` removes it"
    ))
}

fn count(value: &Value) -> String {
    value.as_u64().map_or_else(|| "?".into(), |n| n.to_string())
}

fn number(value: &Value, digits: usize) -> String {
    value.as_f64().map_or_else(|| "?".into(), |n| format!("{n:.digits$}"))
}

fn percent(value: &Value) -> String {
    value.as_f64().map_or_else(|| "?".into(), |ratio| format!("{:.0} %", ratio * 100.0))
}

fn seconds_of(value: &Value) -> String {
    value.as_f64().map_or_else(|| "never".into(), |s| format!("{s:.1} s"))
}
