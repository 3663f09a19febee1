//! The runbook is taken at its word: each event is brought about on a real grid, and what its row says is looked for
//! and done.
//!
//! The page is read, not copied: its phrases and commands are taken out of it, in their order, and each has to be
//! used. So a row without an event here, an event without a row, and a command that was added or changed there fail.
//!
//! Needs root, the programs of `./x setup`, and loop devices; what is not there is said, and its rows are left out.

mod disks;
mod machines;
mod one_machine;
mod page;
#[path = "../support/mod.rs"]
mod support;
mod time;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use support::{holdfast, text};

#[test]
fn each_row_of_the_page_is_played_and_no_other() {
    let played = [disks::ROWS, machines::ROWS, one_machine::ROWS, time::ROWS].concat();
    let titles = page::titles();
    let (of_page, of_tests): (BTreeSet<&str>, BTreeSet<&str>) =
        (titles.iter().map(String::as_str).collect(), played.iter().copied().collect());
    assert_eq!(of_page, of_tests);
    assert_eq!((titles.len(), played.len()), (of_page.len(), of_tests.len()), "each is there once");
}

/// Pages that show commands as examples: not the runbook, whose commands are given, nor decisions, nor what a program
/// wrote.
fn other_pages() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut pages = vec![root.join("README.md")];
    let docs = root.join("docs");
    for directory in [".", "operate", "integrate", "internals"] {
        let entries = std::fs::read_dir(docs.join(directory)).unwrap().map(|entry| entry.unwrap().path());
        pages.extend(
            entries.filter(|path| path.extension().is_some_and(|e| e == "md") && !path.ends_with("runbook.md")),
        );
    }
    pages
}

/// Commands of ours that a page shows as they are typed, without prompts, remarks and files that take what is
/// printed.
fn typed(page: &str) -> Vec<String> {
    // One that goes on in the next line is one.
    let page = page.replace("\\\n", " ");
    let blocks = page.split("```").skip(1).step_by(2).filter(|block| block.starts_with("console"));
    let lines = blocks.flat_map(str::lines).filter_map(|line| {
        let (prompt, typed) = line.split_once(['#', '$'])?;
        let is_prompt = prompt.chars().all(|c| c.is_ascii_alphanumeric());
        let end = [" #", " >"].iter().filter_map(|end| typed.find(end)).min().unwrap_or(typed.len());
        is_prompt.then(|| typed[..end].trim())
    });
    let commands = lines.flat_map(|line| line.split("&&")).flat_map(|part| part.split(" | ")).map(str::trim);
    // One that is put together by the shell is not taken apart here.
    let is_plain = |command: &&str| command.starts_with("holdfast ") && !command.contains("$(");
    commands.filter(is_plain).map(str::to_string).collect()
}

#[test]
fn each_command_that_other_pages_show_is_one_with_its_options() {
    let none = tempfile::tempdir().unwrap();
    let mut count = 0;
    for path in other_pages() {
        let page = path.display();
        for command in typed(&std::fs::read_to_string(&path).unwrap()) {
            count += 1;
            let words = command.split_whitespace().skip(1).filter(|word| *word != "…");
            let mut words: Vec<&str> = words.collect();
            // A directory that is there, and a token that is one, are another matter.
            for of_one_grid in ["--dir", "--join"] {
                if let Some(at) = words.iter().position(|word| *word == of_one_grid) {
                    words.drain(at..at + 2);
                }
            }
            // No grid is made: what is asked for is help. Nothing else finds one.
            if words.starts_with(&["grid", "up"]) {
                words.push("--help");
            }
            let output = holdfast().args(&words).env("HOLDFAST_DIR", none.path()).output().unwrap();
            let said = text(&output.stderr);
            assert!(!said.contains("try '--help'"), "{page}: {command}: {said}");
        }
    }
    assert!(count > 150, "{count} commands were found");
    assert!(!none.path().join("grid.json").exists());
}
