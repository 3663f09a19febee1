//! `holdfast volume trash`: what was deleted, and can be had back for a day.

use super::format::{print, print_json, print_table, table};
use crate::client;
use crate::grid::layout::GridDir;
use anyhow::Result;
use clap::{Args, Subcommand};
use holdfast_api::{Request, TrashInfo};
use holdfast_base::size::Size;
use serde_json::json;

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    holdfast volume trash list\n  \
    holdfast volume trash restore vm1 --as vm1-old\n  \
    holdfast volume trash empty vm1\n  \
    holdfast volume trash empty                all of it\n\n\
    A volume stays for a day, as far as hosts have seen it pass; where devices are nearly full the one goes first that was\n\
    deleted first. Nobody serves it meanwhile, and its data are cared for; what is set aside for a fixed one stays so.")]
pub struct TrashArgs {
    #[command(subcommand)]
    action: TrashAction,
}

#[derive(Subcommand, Debug)]
enum TrashAction {
    /// What is in the trash, and when it goes
    List,
    /// Have a volume back, out of service
    Restore {
        /// By the name that it had, or by its id
        #[arg(value_name = "NAME|ID")]
        volume: String,
        /// Under another name: its own may be another volume's by now
        #[arg(long = "as", value_name = "NEW")]
        name: Option<String>,
    },
    /// Return the space of one volume, or of all that are in the trash, at once
    Empty {
        #[arg(value_name = "NAME|ID")]
        volume: Option<String>,
    },
}

pub fn run(args: TrashArgs, dir: &GridDir, json: bool) -> Result<()> {
    match args.action {
        TrashAction::List => {
            let trash = client::trash(dir)?;
            if json { print_json(&trash) } else { print_trash(&trash) }
        }
        TrashAction::Restore { volume, name } => {
            let volume = client::volume(dir, &Request::TrashRestore { volume, name })?;
            if json {
                return print_json(&volume);
            }
            print(format_args!("volume {0} is back; `holdfast volume export {0}` offers it to clients", volume.name))
        }
        TrashAction::Empty { volume } => {
            let names = client::empty_trash(dir, volume)?;
            if json {
                return print_json(&json!({ "deleted": names }));
            }
            print(match names.is_empty() {
                true => "the trash is empty".to_string(),
                false => format!("deleted for good: {}; their space returns in the background", names.join(", ")),
            })
        }
    }
}

fn print_trash(trash: &[TrashInfo]) -> Result<()> {
    if trash.is_empty() {
        return print("the trash is empty");
    }
    let mut rows = table(&["VOLUME", "SIZE", "LAYOUT", "HOLDS", "GOES", "ID"], &[1, 3]);
    for of in trash {
        let holds = Size(of.taken_bytes + of.set_aside_bytes).to_string();
        let row = [of.name.clone(), Size(of.size_bytes).to_string(), of.layout.clone(), holds];
        rows.add_row(row.into_iter().chain([when(of.minutes_left), of.id.clone()]));
    }
    print_table(&rows)
}

/// Where there is any.
pub fn print_trash_count(trash: &[TrashInfo]) -> Result<()> {
    match trash.len() {
        0 => Ok(()),
        count => print(format_args!("in the trash, {}: `holdfast volume trash list`", volumes(count))),
    }
}

pub fn volumes(count: usize) -> String {
    if count == 1 { "one volume".to_string() } else { format!("{count} volumes") }
}

/// When it goes, if devices don't become full before.
pub fn when(minutes_left: u64) -> String {
    match minutes_left {
        0 => "now".to_string(),
        1 => "in about a minute".to_string(),
        2..60 => format!("in about {minutes_left} min"),
        _ => format!("in about {} h", (minutes_left + 30) / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn when_it_goes_is_told_roughly() {
        let told = [1440, 1439, 95, 59, 1, 0].map(when);
        let as_expected =
            ["in about 24 h", "in about 24 h", "in about 2 h", "in about 59 min", "in about a minute", "now"];
        assert_eq!(told, as_expected);
    }
}
