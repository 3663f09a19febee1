//! The runbook says what can be done: each command in it exists, with its options.

mod support;

use std::collections::BTreeSet;
use std::path::Path;
use support::*;

/// Code spans of a page that are commands of ours; they may go on in the next line.
fn commands(page: &str) -> BTreeSet<String> {
    let spans = page.split('`').skip(1).step_by(2).map(|span| span.split_whitespace().collect::<Vec<_>>().join(" "));
    spans.filter(|span| span.starts_with("holdfast ")).collect()
}

#[test]
fn every_command_of_the_runbook_is_one_with_its_options() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/operate/runbook.md");
    let page = std::fs::read_to_string(path).unwrap();
    let commands = commands(&page);
    assert!(commands.len() > 20, "{commands:?}");
    for command in commands {
        let words: Vec<&str> = command.split(' ').skip(1).collect();
        // What it acts on is in capitals.
        let is_named =
            |word: &&&str| word.chars().all(|c| c.is_ascii_lowercase() || c == '-') && !word.starts_with("--");
        let path: Vec<&str> = words.iter().take_while(is_named).copied().collect();
        let help = holdfast().args(&path).arg("--help").output().unwrap();
        let told = text(&help.stdout);
        assert!(help.status.success(), "{command}: {}", text(&help.stderr));
        for option in words.iter().filter(|word| word.starts_with("--")) {
            assert!(told.contains(option), "{command}: {option} is no option of it");
        }
        let wants = words.iter().filter(|word| word.chars().next().is_some_and(char::is_uppercase)).count();
        assert!(wants == 0 || told.contains('<') || told.contains('['), "{command}: it takes nothing");
    }
}
