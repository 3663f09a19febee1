//! Commands that mend: the program itself is given them, as an operator would, and each is shown.

use super::Site;
use crate::drill::stats::rounded;
use crate::drill::tools::{Running, sleep};
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::fs::{self, File};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Pace of looking whether a command has ended.
const LOOK_PACE: Duration = Duration::from_millis(10);

/// A command that was given.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Step {
    pub command: String,
    pub seconds: f64,
}

pub struct Steps<'a> {
    site: &'a Site,
    pub done: Vec<Step>,
}

impl<'a> Steps<'a> {
    pub fn new(site: &'a Site) -> Steps<'a> {
        Steps { site, done: Vec::new() }
    }

    /// Gives a command of this program, without its `--dir`; returns what it says.
    pub fn give(&mut self, words: &[&str]) -> Result<String> {
        let (begun, line) = (Instant::now(), shown(words));
        eprintln!("$ holdfast {line}");
        let said = give(self.site, words, Haste::Heeds)?;
        said.lines().for_each(|line| eprintln!("  {line}"));
        let seconds = rounded(begun.elapsed().as_secs_f64());
        self.done.push(Step { command: format!("holdfast {line}"), seconds });
        Ok(said)
    }

    /// A command that somebody has given on another machine.
    pub fn note(&mut self, machine: &str, line: &str, begun: Instant) {
        let seconds = rounded(begun.elapsed().as_secs_f64());
        self.done.push(Step { command: format!("{machine}# holdfast {line}"), seconds });
    }
}

/// A command line as it is typed.
fn shown(words: &[&str]) -> String {
    let quoted = |word: &&str| if word.contains(' ') { format!("'{word}'") } else { word.to_string() };
    words.iter().map(quoted).collect::<Vec<_>>().join(" ")
}

/// Whether an interrupt ends a command.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Haste {
    Heeds,
    /// It undoes what an interrupted drill has done.
    Undoes,
}

/// The same, unseen.
pub fn give(site: &Site, words: &[&str], haste: Haste) -> Result<String> {
    let line = shown(words);
    let program = std::env::current_exe().context("cannot tell where this program is")?;
    let [said, complaints] = ["step.out", "step.err"].map(|name| site.work.path().join(name));
    let create =
        |path| File::create(path).context("cannot write into the grid's directory; check space and permissions");
    let mut command = Command::new(program);
    command.args(words).arg("--dir").arg(site.dir.root());
    command.stdin(Stdio::null()).stdout(create(&said)?).stderr(create(&complaints)?);
    let mut running = Running::start(&mut command)?;
    let end = Instant::now() + site.mend_max;
    let status = loop {
        if let Some(status) = running.is_over()? {
            break status;
        }
        if Instant::now() >= end {
            bail!("`holdfast {line}` did not end within {} s", site.mend_max.as_secs());
        }
        match haste {
            Haste::Heeds => sleep(LOOK_PACE)?,
            Haste::Undoes => std::thread::sleep(LOOK_PACE),
        }
    };
    if !status.success() {
        let complaints = fs::read_to_string(&complaints).unwrap_or_default();
        bail!("`holdfast {line}` failed: {}", complaints.trim().trim_start_matches("holdfast: "));
    }
    Ok(fs::read_to_string(&said).unwrap_or_default())
}
