//! `holdfast task`: what goes on in the background.

use super::format::{print, print_json, print_table, table};
use crate::client;
use crate::grid::layout::GridDir;
use crate::protocol::TaskInfo;
use anyhow::Result;
use clap::{Args, Subcommand};
use std::time::Duration;

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
    /// The list every two seconds, until it is empty
    Watch,
}

pub fn run(args: TaskArgs, dir: &GridDir, json: bool) -> Result<()> {
    let watches = matches!(args.action, TaskAction::Watch);
    loop {
        let (tasks, silent) = client::tasks(dir)?;
        if json {
            print_json(&tasks)?
        } else {
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
