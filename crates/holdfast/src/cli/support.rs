//! `holdfast support`: one file that tells strangers of a grid what they need to find a fault.

use super::format::{print, print_json};
use crate::grid::layout::GridDir;
use crate::support;
use anyhow::Result;
use clap::Args;
use holdfast_runtime::clock;
use serde_json::json;
use std::path::PathBuf;

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    holdfast support                       writes holdfast-support-SECONDS.tar.gz here\n  \
    holdfast support --output /tmp/s.tar.gz\n\n\
    It holds states, findings, figures, settings, the last of all logs, and what the system says of memory, devices and units. \
    Passwords, keys, tokens, and addresses of webhooks are taken out. Names of volumes, machines and clients stay, and \
    addresses: look into it before you give it away. The host need not be up; give the command as root, or as the user that \
    runs the grid.")]
pub struct SupportArgs {
    /// The file, which must not be there yet [default: holdfast-support-SECONDS.tar.gz]
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

pub fn run(args: SupportArgs, dir: &GridDir, json: bool) -> Result<()> {
    dir.check_here()?;
    let default = || PathBuf::from(format!("holdfast-support-{}.tar.gz", clock::wall().as_secs()));
    let output = args.output.unwrap_or_else(default);
    let written = support::write(dir, &output)?;
    if json {
        let missing: Vec<_> = written.missing.iter().map(|(what, why)| json!({ "what": what, "why": why })).collect();
        return print_json(&json!({ "file": output, "parts": written.parts, "missing": missing }));
    }
    for (what, why) in &written.missing {
        print(format_args!("without {what}: {why}"))?;
    }
    print(format_args!("wrote {}, of {} parts", output.display(), written.parts.len()))?;
    print("secrets are taken out, names and addresses are not: look into it before you give it away")
}
