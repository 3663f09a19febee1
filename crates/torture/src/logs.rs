//! What the processes of a grid logged: an error asks for a person, and nothing done here may need one.

use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::path::Path;

/// Warnings that faults of this kind may cause. Any other (a damaged shard, say) tells of a fault that was not made here.
const EXPECTED_WARNINGS: [&str; 8] = [
    "is late, and avoided",
    "is down:",
    "can't be opened yet",
    "devices are still being opened",
    // Of a host that was stopped in the middle.
    "has not finished its TLS handshake",
    "has not said what it is",
    "has opened no export",
    // Of this machine, not of what is done here.
    "open files, and takes",
];

/// Lines shown of each kind.
const SHOWN_MAX: usize = 20;

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Findings {
    /// Lines at level ERROR, panics, and warnings that nothing done here explains, with the name of their log.
    pub errors: Vec<String>,
    /// The other warnings, by their text without numbers, with how often each came.
    pub warnings: BTreeMap<String, u32>,
}

/// What is expected besides: warnings, and errors, with one of these words.
#[derive(Clone, Copy, Debug, Default)]
pub struct Expected {
    pub warnings: &'static [&'static str],
    pub errors: &'static [&'static str],
}

/// What a device tells when bits of it have flipped.
pub const OF_DAMAGE: Expected = Expected { warnings: &["damaged"], errors: &[] };

/// Reads every `*.log` in a directory.
pub fn scan(directory: &Path, also_expected: Expected) -> Result<Findings> {
    let mut findings = Findings::default();
    for (name, text) in logs_in(directory)? {
        read(&name, &text, also_expected, &mut findings);
    }
    Ok(findings)
}

/// Lines at level ERROR and panics of every `*.log` in a directory, whatever warnings there are.
pub fn errors(directory: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for (name, text) in logs_in(directory)? {
        let bad = text.lines().filter(|line| is_error(line)).map(|line| format!("{name}: {line}"));
        found.extend(bad.take(SHOWN_MAX));
    }
    Ok(found)
}

/// Names and contents.
fn logs_in(directory: &Path) -> Result<Vec<(String, String)>> {
    let mut logs = Vec::new();
    let entries = std::fs::read_dir(directory).with_context(|| format!("cannot list {}", directory.display()))?;
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "log") {
            let text = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            logs.push((name, String::from_utf8_lossy(&text).into_owned()));
        }
    }
    Ok(logs)
}

fn level(line: &str) -> &str {
    line.split_whitespace().nth(1).unwrap_or_default()
}

fn is_error(line: &str) -> bool {
    level(line) == "ERROR" || line.contains("panicked at")
}

fn read(name: &str, text: &str, also_expected: Expected, findings: &mut Findings) {
    let has_one = |line: &str, words: &[&str]| words.iter().any(|word| line.contains(word));
    for line in text.lines() {
        let is_warning = level(line) == "WARN";
        let is_expected = is_warning && (has_one(line, &EXPECTED_WARNINGS) || has_one(line, also_expected.warnings));
        let is_bad_error = is_error(line) && !has_one(line, also_expected.errors);
        let is_bad = is_bad_error || is_warning && !is_expected;
        if is_bad && findings.errors.len() < SHOWN_MAX {
            findings.errors.push(format!("{name}: {line}"));
        }
        if is_expected {
            let message = line.split_once("WARN").map_or("", |(_, message)| message.trim());
            *findings.warnings.entry(shape(message)).or_default() += 1;
        }
    }
}

/// The message with every word that holds a digit replaced: what makes two warnings the same.
fn shape(message: &str) -> String {
    let words = message.split_whitespace().map(|w| if w.contains(|c: char| c.is_ascii_digit()) { "#" } else { w });
    words.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_and_panics_are_found_and_warnings_counted() {
        let text = "2026-11-21T06:08:32.000Z INFO  node 1 of grid x listens\n\
            2026-11-21T06:08:32.000Z WARN  volume v: node 3 is late, and avoided\n\
            2026-11-21T06:08:33.000Z WARN  volume v: node 4 is late, and avoided\n\
            2026-11-21T06:08:33.000Z WARN  device 7: shard 3 is damaged\n\
            2026-11-21T06:08:33.000Z ERROR device 8 is out\n\
            thread 'main' panicked at src/x.rs:1:\n";
        let mut findings = Findings::default();
        read("node1.log", text, Expected::default(), &mut findings);
        assert_eq!(findings.errors.len(), 3, "{findings:?}");
        let mut others = Findings::default();
        read("node1.log", text, Expected { warnings: &["damaged"], errors: &["is out"] }, &mut others);
        assert_eq!(others.errors.len(), 1, "{others:?}");
        assert_eq!(findings.warnings.get("volume v: node # is late, and avoided"), Some(&2));
    }
}
