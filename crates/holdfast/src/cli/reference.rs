//! What is told of the command line elsewhere, out of its own definition: a page, man pages, completions; and other texts that
//! packages and pages have of this program.

use super::format::print;
use crate::grid::units::{UnitFile, Units};
use anyhow::{Context, Result};
use clap::{Args, Command};
use clap_complete::Shell;
use std::fs;
use std::path::{Path, PathBuf};

/// Columns of the help on the page.
const COLUMNS: usize = 100;

#[derive(Args, Debug)]
#[group(multiple = false)]
pub struct ReferenceArgs {
    /// The HTTP interface, as docs/reference/openapi.json
    #[arg(long)]
    http: bool,
    /// The page of metrics, as docs/reference/metrics.md
    #[arg(long)]
    metrics: bool,
    /// A man page for each command, written to a directory
    #[arg(long, value_name = "DIR")]
    man: Option<PathBuf>,
    /// What a shell needs to complete the command line
    #[arg(long, value_name = "SHELL")]
    completions: Option<Shell>,
    /// The package's units for systemd, written to a directory
    #[arg(long, value_name = "DIR")]
    units: Option<PathBuf>,
}

pub fn run(args: ReferenceArgs, root: Command) -> Result<()> {
    match args {
        ReferenceArgs { http: true, .. } => print(holdfast_http::described().trim_end()),
        ReferenceArgs { metrics: true, .. } => print(holdfast_http::metrics::reference().trim_end()),
        ReferenceArgs { man: Some(dir), .. } => man(root, &dir),
        ReferenceArgs { completions: Some(shell), .. } => complete(root, shell),
        ReferenceArgs { units: Some(dir), .. } => write_units(&dir),
        _ => print(markdown(root).trim_end()),
    }
}

/// `holdfast.1`, and `holdfast-VOLUME-CREATE.1` for each command below it.
fn man(root: Command, dir: &Path) -> Result<()> {
    fs::create_dir_all(dir)
        .and_then(|()| clap_mangen::generate_to(root, dir))
        .with_context(|| format!("cannot write man pages to {}; check space and permissions", dir.display()))
}

fn complete(mut root: Command, shell: Shell) -> Result<()> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut root, "holdfast", &mut text);
    print(String::from_utf8_lossy(&text).trim_end())
}

fn write_units(dir: &Path) -> Result<()> {
    let write = |UnitFile { path, text }| fs::write(dir.join(path), text);
    fs::create_dir_all(dir)
        .and_then(|()| Units::of_package().into_iter().try_for_each(write))
        .with_context(|| format!("cannot write units to {}; check space and permissions", dir.display()))
}

/// docs/reference/cli.md, whole.
fn markdown(root: Command) -> String {
    let mut text = String::from(
        "# Command line\n\n\
         <!-- Written by `holdfast reference`: change crates/holdfast/src/cli/, then write it anew. -->\n\n\
         Each command's `--help`. Most end with examples.\n",
    );
    let mut root = root.term_width(COLUMNS);
    root.build();
    section(&mut root, "holdfast", &mut text);
    text
}

fn section(command: &mut Command, name: &str, text: &mut String) {
    let help = command.render_long_help().to_string();
    let lines: Vec<&str> = help.lines().map(str::trim_end).collect();
    text.push_str(&format!("\n## {name}\n\n```text\n{}\n```\n", lines.join("\n").trim_end()));
    for inner in command.get_subcommands_mut() {
        if !inner.is_hide_set() && inner.get_name() != "help" {
            let name = format!("{name} {}", inner.get_name());
            section(inner, &name, text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use std::path::Path;

    #[test]
    fn the_page_about_the_command_line_is_what_help_says() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/cli.md");
        let page = std::fs::read_to_string(path).unwrap_or_default();
        let is_same = page == markdown(crate::Cli::command());
        assert!(is_same, "it is stale: `holdfast reference >docs/reference/cli.md` writes it anew");
    }
}
