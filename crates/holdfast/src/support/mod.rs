//! A bundle for a report of a fault: all that can be told of this machine's part of a grid, in one archive, without secrets.
//!
//! ```text
//! README.txt           what there is, and what could not be had, with the reason
//! version.txt          this program, the system
//! settings.txt         in force from the next start on; grid.json: nodes and devices
//! status.json          as `holdfast status --json`; findings.txt: what is not well
//! health.json, volumes.json, space.json, tasks.json, machines.json, trash.json, metrics.txt      the host's answers
//! logs/, journal.txt   the last of each log
//! units/               units of systemd, and how they are
//! processes/, directory.txt      the grid's processes and files
//! system/              memory, load, mounts, devices, the kernel's last messages
//! ```
//! Faults: what can't be told is named, and the rest is there: of a host that is down, or hangs, files tell.
//!
//! Secrets: files of keys and passwords are never a part, and all texts go through [`Scrubber`].

mod scrub;

use crate::client::{self, UNHURRIED};
use crate::config::keys::KEYS;
use crate::config::{self, Setting};
use crate::grid::layout::GridDir;
use crate::grid::roles;
use crate::grid::units::Units;
use crate::overview::gather;
use anyhow::{Context, Result, bail};
use flate2::Compression;
use flate2::write::GzEncoder;
use holdfast_api::{Request, Response};
use holdfast_format::wire::WIRE;
use holdfast_verdict::findings;
use scrub::Scrubber;
use serde::Serialize;
use std::fs;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Of each part; of a longer one the end is taken.
const PART_BYTES_MAX: u64 = 4 << 20;

/// Seconds that a program of the system may take.
const PROGRAM_SECONDS_MAX: &str = "20";

/// Files that the directory's list names at most.
const FILES_MAX: usize = 2000;

/// Texts of the kernel.
const SYSTEM: &[&str] = &[
    "/proc/meminfo",
    "/proc/loadavg",
    "/proc/uptime",
    "/proc/mounts",
    "/proc/partitions",
    "/proc/diskstats",
    "/proc/net/dev",
    "/proc/pressure/cpu",
    "/proc/pressure/io",
    "/proc/pressure/memory",
    "/proc/sys/fs/file-nr",
    "/proc/sys/kernel/io_uring_disabled",
    "/sys/devices/system/clocksource/clocksource0/current_clocksource",
];

/// Programs of the system, with the part's name.
const PROGRAMS: &[(&str, &[&str])] = &[
    (
        "system/devices.txt",
        &["lsblk", "--bytes", "--output", "NAME,SIZE,TYPE,FSTYPE,MODEL,ROTA,LOG-SEC,PHY-SEC,SCHED,MOUNTPOINT"],
    ),
    ("system/space.txt", &["df", "--all", "--block-size=1"]),
    ("system/kernel-log.txt", &["dmesg", "--time-format=iso"]),
    ("system/cpu.txt", &["lscpu"]),
    ("system/clock.txt", &["timedatectl", "show"]),
    (
        "system/packages.txt",
        &["dpkg-query", "--show", "holdfast*", "etcd-server", "qemu-system-x86", "smartmontools", "linux-image-*"],
    ),
];

/// What a bundle has in it.
pub struct Written {
    pub parts: Vec<String>,
    /// Parts that could not be had, each with the reason.
    pub missing: Vec<(String, String)>,
}

struct Bundle {
    archive: tar::Builder<GzEncoder<fs::File>>,
    scrubber: Scrubber,
    parts: Vec<String>,
    missing: Vec<(String, String)>,
}

/// Writes a bundle to a file that is not there yet, for its owner's eyes alone.
pub fn write(dir: &GridDir, output: &Path) -> Result<Written> {
    let file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(output);
    let file = file.with_context(|| {
        format!(
            "cannot write {}; name another file with --output, in a directory that you may write to",
            output.display()
        )
    })?;
    let done = fill(dir, file).with_context(|| format!("cannot write {}; check space", output.display()));
    if done.is_err() {
        let _ = fs::remove_file(output);
    }
    done
}

fn fill(dir: &GridDir, file: fs::File) -> Result<Written> {
    let archive = tar::Builder::new(GzEncoder::new(file, Compression::default()));
    let mut bundle = Bundle { archive, scrubber: Scrubber::of(dir), parts: Vec::new(), missing: Vec::new() };
    bundle.add("version.txt", Ok(versions()))?;
    bundle.add("settings.txt", settings(dir))?;
    bundle.add_file("grid.json", &dir.config_path())?;
    states(&mut bundle, dir)?;
    logs(&mut bundle, dir)?;
    units(&mut bundle, dir)?;
    processes(&mut bundle, dir)?;
    bundle.add("directory.txt", Ok(listing(dir)))?;
    for path in SYSTEM {
        let name = format!("system/{}", path.trim_start_matches('/').replace('/', "-"));
        bundle.add_file(&name, Path::new(path))?;
    }
    for (name, program) in PROGRAMS {
        bundle.add(name, said_by(program))?;
    }
    let readme = bundle.readme(dir);
    bundle.add("README.txt", Ok(readme))?;
    bundle.archive.into_inner()?.finish()?.sync_all()?;
    Ok(Written { parts: bundle.parts, missing: bundle.missing })
}

impl Bundle {
    /// A part, or why there is none.
    fn add(&mut self, name: &str, text: Result<String>) -> Result<()> {
        let text = match text {
            Ok(text) => text,
            Err(error) => {
                let why = self.scrubber.scrub(&format!("{error:#}"));
                self.missing.push((name.to_string(), why));
                return Ok(());
            }
        };
        let text = self.scrubber.scrub(&text);
        let mut header = tar::Header::new_gnu();
        header.set_size(text.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(holdfast_runtime::clock::wall().as_secs());
        let path = Path::new("holdfast-support").join(name);
        self.archive.append_data(&mut header, path, text.as_bytes())?;
        self.parts.push(name.to_string());
        Ok(())
    }

    fn add_file(&mut self, name: &str, path: &Path) -> Result<()> {
        self.add(name, end_of(path))
    }

    fn add_json<T: Serialize>(&mut self, name: &str, told: Result<T>) -> Result<()> {
        self.add(name, told.and_then(|told| Ok(serde_json::to_string_pretty(&told)?)))
    }

    fn readme(&self, dir: &GridDir) -> String {
        let mut text = format!(
            "Written by `holdfast support` for the grid in {}.\nPasswords, keys, tokens and addresses of webhooks are taken out. \
             Names of volumes, machines and clients stay, and addresses.\n\nThere is:\n",
            dir.root().display()
        );
        self.parts.iter().for_each(|part| text += &format!("  {part}\n"));
        if !self.missing.is_empty() {
            text += "\nThere is not:\n";
            self.missing.iter().for_each(|(what, why)| text += &format!("  {what}: {why}\n"));
        }
        text
    }
}

fn versions() -> String {
    let program = std::env::current_exe().map_or_else(|_| "?".to_string(), |path| path.display().to_string());
    let system = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let kernel = fs::read_to_string("/proc/version").unwrap_or_default();
    format!("holdfast {}, {program}\nversions of the messages: {WIRE}\n\n{kernel}\n{system}", env!("CARGO_PKG_VERSION"))
}

/// All settings in force; a file that is wrong can't be told as it is, since anything may be in it.
fn settings(dir: &GridDir) -> Result<String> {
    let all = config::load_file(&dir.settings_path(), &dir.load()?)?;
    let value = |key: &config::keys::Key, setting: &Setting| match &setting.value {
        Some(_) if key.is_secret() => "[secret]".to_string(),
        Some(value) => value.text(),
        None => "not set".to_string(),
    };
    let line = |(key, setting): (&config::keys::Key, &Setting)| {
        format!("{} = {} ({:?})\n", key.name, value(key, setting), setting.origin)
    };
    Ok(KEYS.iter().zip(&all).map(line).collect())
}

fn states(bundle: &mut Bundle, dir: &GridDir) -> Result<()> {
    let status = gather(dir);
    if let Ok(status) = &status {
        let lines: Vec<String> = findings::of(status).iter().map(|finding| format!("{finding}\n")).collect();
        bundle.add("findings.txt", Ok(if lines.is_empty() { "all is well\n".into() } else { lines.concat() }))?;
    }
    bundle.add_json("status.json", status)?;
    bundle.add_json("volumes.json", client::volumes(dir))?;
    bundle.add_json("trash.json", client::trash(dir))?;
    bundle.add_json("machines.json", client::machines(dir))?;
    bundle.add_json("space.json", client::space(dir))?;
    bundle.add_json("tasks.json", client::tasks(dir))?;
    let promised = match client::ask(dir, &Request::Qos, UNHURRIED) {
        Ok(Response::Error { message, .. }) => Err(anyhow::anyhow!(message)),
        told => told,
    };
    bundle.add_json("qos.json", promised)?;
    bundle.add("health.json", by_http(dir, "/v1/health"))?;
    bundle.add("metrics.txt", by_http(dir, "/metrics"))
}

/// What the host answers over its socket, whatever the status is.
fn by_http(dir: &GridDir, path: &str) -> Result<String> {
    let socket = dir.api_socket();
    let mut stream =
        UnixStream::connect(&socket).with_context(|| format!("cannot reach the host at {}", socket.display()))?;
    stream.set_read_timeout(Some(UNHURRIED))?;
    stream.set_write_timeout(Some(UNHURRIED))?;
    // Of HTTP 1.0: then the end of the answer is the end of the connection.
    write!(stream, "GET {path} HTTP/1.0\r\nHost: host\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.take(PART_BYTES_MAX).read_to_end(&mut answer).context("the host does not answer")?;
    let answer = String::from_utf8_lossy(&answer);
    let (head, body) = answer.split_once("\r\n\r\n").context("the host's answer has no end")?;
    let is_told = head.split(' ').nth(1).is_some_and(|status| ["200", "503"].contains(&status));
    if !is_told {
        bail!("the host answers {}", head.lines().next().unwrap_or_default());
    }
    Ok(body.to_string())
}

fn logs(bundle: &mut Bundle, dir: &GridDir) -> Result<()> {
    let mut paths: Vec<PathBuf> =
        fs::read_dir(dir.logs_dir()).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "log"));
    paths.sort();
    for path in paths {
        let name = format!("logs/{}", path.file_name().unwrap_or_default().to_string_lossy());
        bundle.add_file(&name, &path)?;
    }
    Ok(())
}

/// Where systemd runs the grid.
fn units(bundle: &mut Bundle, dir: &GridDir) -> Result<()> {
    let Some(units) = Units::of(dir) else { return Ok(()) };
    let all = format!("{}*", units.name);
    bundle.add("units/files.txt", said_by(&["systemctl", "--no-pager", "cat", &all]))?;
    bundle.add("units/states.txt", said_by(&["systemctl", "--no-pager", "--all", "--lines=0", "status", &all]))?;
    let journal = ["journalctl", "--no-pager", "--lines=20000", "--output=short-iso-precise", "--unit", &all];
    bundle.add("journal.txt", said_by(&journal))
}

fn processes(bundle: &mut Bundle, dir: &GridDir) -> Result<()> {
    let Ok(config) = dir.load() else { return Ok(()) };
    for role in roles(&config) {
        let Some(running) = role.find(dir) else { continue };
        let own = PathBuf::from(format!("/proc/{}", running.pid));
        let texts = ["status", "limits", "io", "sched"].map(|name| (name, end_of(&own.join(name))));
        let told = texts.into_iter().filter_map(|(name, text)| Some(format!("{name}:\n{}\n", text.ok()?)));
        let name = format!("processes/{}.txt", role.to_string().replace(' ', "-"));
        bundle.add(&name, Ok(told.collect()))?;
    }
    Ok(())
}

/// Names, sizes, rights and times of the files of the grid's directory.
fn listing(dir: &GridDir) -> String {
    let (mut lines, mut waiting) = (Vec::new(), vec![dir.root().to_path_buf()]);
    while let Some(path) = waiting.pop() {
        let mut entries: Vec<PathBuf> = fs::read_dir(&path).into_iter().flatten().flatten().map(|e| e.path()).collect();
        entries.sort();
        for entry in entries {
            let Ok(meta) = fs::symlink_metadata(&entry) else { continue };
            let (mode, owner, size) = (meta.mode(), meta.uid(), meta.len());
            lines.push(format!("{mode:06o} {owner:>5} {size:>15} {} {}\n", meta.mtime(), entry.display()));
            if meta.is_dir() {
                waiting.push(entry);
            }
        }
        if lines.len() >= FILES_MAX {
            lines.push("and others\n".to_string());
            break;
        }
    }
    lines.concat()
}

/// The end of a file, from the beginning of a line on.
fn end_of(path: &Path) -> Result<String> {
    let unreadable = || format!("cannot read {}", path.display());
    let mut file = fs::File::open(path).with_context(unreadable)?;
    let len = file.metadata().with_context(unreadable)?.len();
    let skipped = len.saturating_sub(PART_BYTES_MAX);
    file.seek(SeekFrom::Start(skipped)).with_context(unreadable)?;
    let mut bytes = Vec::new();
    file.take(PART_BYTES_MAX).read_to_end(&mut bytes).with_context(unreadable)?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    Ok(match skipped {
        0 => text,
        _ => text.split_once('\n').map_or(String::new(), |(_, rest)| rest.to_string()),
    })
}

/// All that a program says, within a time. One that is not there is a reason.
fn said_by(program: &[&str]) -> Result<String> {
    let mut command = Command::new("timeout");
    command.arg(PROGRAM_SECONDS_MAX).args(program).stdin(Stdio::null()).env("LC_ALL", "C");
    let output = command.output().with_context(|| format!("cannot run `{}`", program.join(" ")))?;
    let (said, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    // Some tell all they know, and that it is not well.
    if said.trim().is_empty() {
        bail!("`{}` says nothing ({}) {}", program.join(" "), output.status, error.trim());
    }
    let end = said.len().saturating_sub(PART_BYTES_MAX as usize);
    let end = (end..said.len()).find(|at| said.is_char_boundary(*at)).unwrap_or(said.len());
    Ok(said[end..].to_string())
}
