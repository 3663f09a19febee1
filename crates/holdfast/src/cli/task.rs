//! `holdfast task`: what goes on in the background.

use super::format::{print, print_json, print_table, table};
use super::progress::{Bars, Progress, Unit};
use crate::client;
use crate::grid::layout::GridDir;
use anyhow::Result;
use clap::{Args, Subcommand};
use holdfast_api::TaskInfo;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Where nobody looks at a terminal.
const TOLD_EVERY: Duration = Duration::from_secs(5);

/// Between two looks.
const PACE: Duration = Duration::from_secs(2);

#[derive(Args, Debug)]
#[command(after_help = "Example:\n  holdfast task watch     until nothing is left to do")]
pub struct TaskArgs {
    #[command(subcommand)]
    action: TaskAction,
}

#[derive(Subcommand, Debug)]
enum TaskAction {
    /// What is done now, at all hosts: repairs, drains, evening devices out, merges of deleted snapshots, deletions
    List,
    /// How they get on, until nothing is left to do: bars on a terminal; elsewhere the list every five seconds, or with --json
    /// every two
    Watch,
}

pub fn run(args: TaskArgs, dir: &GridDir, json: bool) -> Result<()> {
    let watches = matches!(args.action, TaskAction::Watch);
    let bars = Bars::new(json || !watches);
    let mut shown: BTreeMap<String, Progress> = BTreeMap::new();
    let mut told_at: Option<Instant> = None;
    loop {
        let (tasks, silent) = client::tasks(dir)?;
        if !watches {
            super::volume::warn_of_store(client::status(dir)?.metadata_trouble.as_ref());
        }
        shown.retain(|name, _| tasks.iter().any(|task| task.name == *name));
        if json {
            print_json(&tasks)?
        } else if bars.are_seen() && !tasks.is_empty() {
            for task in &tasks {
                let bar = shown.entry(task.name.clone());
                bar.or_insert_with(|| bars.begin(&task.name, Unit::Of(task.unit.text()), task.left))
                    .set_left(task.left);
            }
        } else if !watches || tasks.is_empty() || told_at.is_none_or(|at| at.elapsed() >= TOLD_EVERY) {
            told_at = Some(Instant::now());
            print_tasks(&tasks)?;
            silent.iter().try_for_each(|host| print(format_args!("host {host} does not say what it does")))?;
        }
        if !watches || tasks.is_empty() {
            return Ok(());
        }
        std::thread::sleep(PACE);
    }
}

fn print_tasks(tasks: &[TaskInfo]) -> Result<()> {
    if tasks.is_empty() {
        return print("nothing is being done in the background but cleaning and scrubbing");
    }
    let mut rows = table(&["TASK", "LEFT", "RATE", "TIME LEFT"], &[1, 2, 3]);
    for task in tasks {
        let time = task.seconds_left.map_or("-".to_string(), |s| format!("{} s", s));
        let rate = if task.per_second > 0.0 { format!("{:.1}/s", task.per_second) } else { "-".to_string() };
        rows.add_row([task.name.clone(), format!("{} {}", task.left, task.unit), rate, time]);
    }
    print_table(&rows)
}
