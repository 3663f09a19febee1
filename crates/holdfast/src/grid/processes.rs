//! The processes of a local grid: started detached, known by pid files, signalled only after their identity is proven.
//!
//! A pid may be another process's by now. A pid file therefore keeps when its process started and what it was started
//! as; only where both still hold is the process ours.
//!
//! Faults: every process writes its own pid file before it does anything else, and ends where that can't be written. So
//! none lives on that no command knows, whatever becomes of who started it: a full file system, or a SIGKILL.

use super::layout::{GridDir, write_durably};
use super::units::Units;
use crate::daemon::NOTIFY_SOCKET;
use crate::logger;
use anyhow::{Context, Result, bail};
use holdfast_api::{Code, refuse};
use holdfast_base::size::Size;
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long a process that was started may take until its pid file names it: a moment, on a machine that has others.
const KNOWN_MAX: Duration = Duration::from_secs(30);

/// Pace of looking whether something has happened.
const LOOK_PACE: Duration = Duration::from_millis(10);

/// One of the grid's processes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    Node(u32),
    Host,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct PidFile {
    pid: u32,
    /// Clock ticks from boot to the start of the process.
    start_ticks: u64,
    command_line: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Running {
    pub pid: u32,
    /// Stopped by a signal (`holdfast node hang`).
    pub stopped: bool,
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Role::Node(id) => write!(f, "node {id}"),
            Role::Host => write!(f, "the host"),
        }
    }
}

impl Role {
    fn file_stem(self) -> String {
        match self {
            Role::Node(id) => format!("node{id}"),
            Role::Host => "host".to_string(),
        }
    }

    fn pid_path(self, dir: &GridDir) -> PathBuf {
        dir.run_dir().join(format!("{}.pid", self.file_stem()))
    }

    pub fn log_path(self, dir: &GridDir) -> PathBuf {
        dir.logs_dir().join(format!("{}.log", self.file_stem()))
    }

    fn arguments(self, dir: &GridDir) -> Vec<String> {
        let mut arguments = match self {
            Role::Node(id) => vec!["node".to_string(), "--id".to_string(), id.to_string()],
            Role::Host => vec!["host".to_string()],
        };
        arguments.extend(["--dir".to_string(), dir.root().display().to_string(), "--daemon".to_string()]);
        arguments
    }

    /// The running process, if it is ours.
    pub fn find(self, dir: &GridDir) -> Option<Running> {
        let text = fs::read_to_string(self.pid_path(dir)).ok()?;
        let file: PidFile = serde_json::from_str(&text).ok()?;
        let stat = Stat::read(file.pid)?;
        let shown = command_line(file.pid)?;
        // Empty while the kernel loads the program, and of a process that is dead but not yet reaped.
        let is_ours = stat.start_ticks == file.start_ticks && (shown == file.command_line || shown.is_empty());
        (is_ours && !stat.is_ending && !is_killed(file.pid))
            .then_some(Running { pid: file.pid, stopped: matches!(stat.state, 'T' | 't') })
    }

    /// Makes this very process known as the one in its role, whoever has started it.
    pub fn register(self, dir: &GridDir) -> Result<()> {
        let pid = std::process::id();
        if let Some(other) = self.find(dir).filter(|other| other.pid != pid) {
            refuse!(
                Code::Exists,
                "{self} is running already (process {}); `holdfast grid status` shows it, `holdfast grid down` stops it",
                other.pid
            );
        }
        let (stat, shown) = (Stat::read(pid), command_line(pid));
        let (stat, command_line) = stat.zip(shown).context("cannot read what /proc says of this process")?;
        let run_dir = dir.run_dir();
        fs::create_dir_all(&run_dir)
            .with_context(|| format!("cannot make {}; check permissions", run_dir.display()))?;
        // What a former process has waited for is nothing to this one.
        let _ = fs::remove_file(self.waits_path(dir));
        self.write_pid_file(dir, &PidFile { pid, start_ticks: stat.start_ticks, command_line })
    }

    fn write_pid_file(self, dir: &GridDir, file: &PidFile) -> Result<()> {
        let text = serde_json::to_string(file).expect("a pid file always encodes");
        let path = self.pid_path(dir);
        write_durably(&path, text.as_bytes())?;
        // Readers of the grid see by it what runs, whatever the mask of this process is.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).context("cannot let others read a pid file")
    }

    /// Starts the process: by systemd where that runs the grid, else detached from this one, its output in its log.
    pub fn start(self, dir: &GridDir) -> Result<Running> {
        let Some(units) = Units::of(dir) else { return self.spawn(dir) };
        units.start(self)?;
        // It has said that it is ready: it is known by now.
        self.find(dir).with_context(|| format!("{self} ended at once; see `journalctl -u {}`", units.unit(self)))
    }

    fn spawn(self, dir: &GridDir) -> Result<Running> {
        let log_path = self.log_path(dir);
        let log = fs::OpenOptions::new().create(true).append(true).open(&log_path);
        let log = log.with_context(|| format!("cannot write {}; check permissions", log_path.display()))?;
        let program = std::env::current_exe().context("cannot tell where this program is")?;
        // A rebuilt binary shows as deleted; the new one is in its place.
        let program = program.to_string_lossy().trim_end_matches(" (deleted)").to_string();
        let arguments = self.arguments(dir);
        // Where there is no room for this one, there is none for that of the process.
        self.write_pid_file(dir, &PidFile { pid: 0, start_ticks: 0, command_line: arguments.clone() })
            .with_context(|| format!("{self} is not started: commands would not know its process"))?;
        let child = Command::new(&program)
            .args(&arguments)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .current_dir("/")
            .env_remove(NOTIFY_SOCKET)
            .spawn()
            .with_context(|| format!("cannot start {program}"))?;
        self.wait_known(dir, child)
    }

    /// Waits until a process that was started has written its pid file.
    fn wait_known(self, dir: &GridDir, mut child: Child) -> Result<Running> {
        let pid = child.id();
        let mut ended = None;
        let known = || {
            ended = child.try_wait().ok().flatten();
            ended.is_some() || self.find(dir).is_some_and(|running| running.pid == pid)
        };
        let in_time = wait(KNOWN_MAX, known);
        if in_time && ended.is_none() {
            return Ok(Running { pid, stopped: false });
        }
        if !in_time {
            // It may still be about to: nobody must find it later.
            let _ = child.kill();
            let _ = child.wait();
        }
        let free = super::free_bytes(dir.root()).map_or_else(|_| "?".to_string(), |free| Size(free).to_string());
        bail!(
            "{self} ended at once, or could not write {}; {free} is free there. The end of {}:\n{}",
            self.pid_path(dir).display(),
            self.log_path(dir).display(),
            self.log_tail(dir)
        );
    }

    /// Sends a signal to the process, which must run.
    pub fn signal(self, dir: &GridDir, signal: Signal) -> Result<Running> {
        let Some(running) = self.find(dir) else {
            refuse!(Code::State, "{self} is not running; `holdfast grid status` shows what is");
        };
        let pid = Pid::from_raw(running.pid as i32).context("a pid file names process 0")?;
        kill_process(pid, signal).with_context(|| format!("cannot signal {self} (process {})", running.pid))?;
        Ok(running)
    }

    /// Says, for commands that can't ask this process yet, what it waits for before it serves.
    pub fn set_waits_for(self, dir: &GridDir, why: Option<&str>) {
        let path = self.waits_path(dir);
        let done = match why {
            Some(why) => write_durably(&path, why.as_bytes()),
            None => fs::remove_file(&path).or_else(|e| if path.exists() { Err(e.into()) } else { Ok(()) }),
        };
        if let Err(error) = done {
            // Its log says so, too.
            logger::warn(format_args!("commands are not told what {self} waits for: {error:#}"));
        }
    }

    /// What the process waits for before it serves, if it runs and has said so.
    pub fn waits_for(self, dir: &GridDir) -> Option<String> {
        self.find(dir).and_then(|_| fs::read_to_string(self.waits_path(dir)).ok())
    }

    fn waits_path(self, dir: &GridDir) -> PathBuf {
        dir.run_dir().join(format!("{}.waits", self.file_stem()))
    }

    /// True once the process is gone.
    pub fn wait_gone(self, dir: &GridDir, patience: Duration) -> bool {
        wait(patience, || self.find(dir).is_none())
    }

    pub fn forget(self, dir: &GridDir) {
        // Gone already is as good.
        let _ = fs::remove_file(self.pid_path(dir));
    }

    /// The end of the process's log.
    pub fn log_tail(self, dir: &GridDir) -> String {
        if let Some(units) = Units::of(dir) {
            return format!("(it is in systemd's journal: `journalctl -u {}`)", units.unit(self));
        }
        const TAIL_BYTES: u64 = 1500;
        let read = || -> std::io::Result<String> {
            let mut file = fs::File::open(self.log_path(dir))?;
            let len = file.metadata()?.len();
            file.seek(SeekFrom::Start(len.saturating_sub(TAIL_BYTES)))?;
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes)?;
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        };
        read()
            .unwrap_or_default()
            .lines()
            .rev()
            .take(8)
            .collect::<Vec<_>>()
            .into_iter()
            .rev()
            .collect::<Vec<_>>()
            .join("\n")
    }
}

/// Looks every few milliseconds until `is_so`; returns whether it came true in time.
pub fn wait(patience: Duration, mut is_so: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + patience;
    loop {
        if is_so() {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(LOOK_PACE);
    }
}

/// What /proc says of a process.
struct Stat {
    state: char,
    start_ticks: u64,
    /// Dead, or past the point of no return.
    is_ending: bool,
}

/// The kernel's mark of a task that is being taken down (`PF_EXITING`).
const FLAG_EXITING: u64 = 0x4;

/// A SIGKILL is on its way to the process: it runs no more of its own code.
fn is_killed(pid: u32) -> bool {
    let Ok(text) = fs::read_to_string(format!("/proc/{pid}/status")) else { return true };
    let pending = text.lines().filter_map(|line| line.strip_prefix("SigPnd:").or_else(|| line.strip_prefix("ShdPnd:")));
    let kill = 1 << (Signal::KILL.as_raw() - 1);
    pending.filter_map(|mask| u64::from_str_radix(mask.trim(), 16).ok()).any(|mask| mask & kill != 0)
}

impl Stat {
    fn read(pid: u32) -> Option<Stat> {
        let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name may hold anything; the fields proper begin behind the last bracket.
        let fields: Vec<&str> = text.get(text.rfind(')')? + 1..)?.split_whitespace().collect();
        let state = fields.first()?.chars().next()?;
        let flags: u64 = fields.get(6)?.parse().ok()?;
        let is_ending = matches!(state, 'Z' | 'X') || flags & FLAG_EXITING != 0;
        Some(Stat { state, start_ticks: fields.get(19)?.parse().ok()?, is_ending })
    }
}

fn command_line(pid: u32) -> Option<Vec<String>> {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    Some(text.split_terminator('\0').map(str::to_string).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pid_that_is_somebody_elses_now_is_not_ours() {
        let temp = tempfile::tempdir().unwrap();
        let dir = GridDir::choose(Some(temp.path())).unwrap();
        fs::create_dir(dir.run_dir()).unwrap();
        let pid = std::process::id();
        let mut file = PidFile {
            pid,
            start_ticks: Stat::read(pid).unwrap().start_ticks,
            command_line: command_line(pid).unwrap(),
        };
        let write =
            |file: &PidFile| fs::write(Role::Node(1).pid_path(&dir), serde_json::to_string(file).unwrap()).unwrap();
        write(&file);
        assert_eq!(Role::Node(1).find(&dir), Some(Running { pid, stopped: false }));
        file.start_ticks += 1;
        write(&file);
        assert_eq!(Role::Node(1).find(&dir), None);
        assert!(Role::Node(1).signal(&dir, Signal::CONT).unwrap_err().to_string().contains("not running"));
        assert_eq!(Role::Host.find(&dir), None);
    }
}
