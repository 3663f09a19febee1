//! The command line as a page: the help of every command, in the order of `--help`.

use clap::Command;

/// Columns of the help on the page.
const COLUMNS: usize = 100;

/// docs/reference/cli.md, whole.
pub fn markdown(root: Command) -> String {
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
