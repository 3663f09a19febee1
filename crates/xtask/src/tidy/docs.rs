//! Rules for documents: links, headings they point at, files they name, and the protocol rules that comments cite.

use super::source::Source;
use super::{Finding, collect, pages};
use crate::figures;
use anyhow::{Context, Result};
use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

/// Where the protocol's rules are numbered.
const PROTOCOL: &str = "docs/PROTOCOL.md";

/// Pages outside of `docs/`.
const AT_THE_TOP: &[&str] = &["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "KNOWN_ISSUES.md", "SECURITY.md"];

/// What an inline code span must begin with to be read as the name of a file here.
const NAMED_FILES: &[&str] = &["crates/", "docs/", "results/", ".ci/"];

pub fn check(root: &Path) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for path in documents(root)? {
        let text =
            std::fs::read_to_string(root.join(&path)).with_context(|| format!("cannot read {}", path.display()))?;
        check_document(root, &path, &text, &mut findings);
        findings.extend(pages::check(&path, &text));
    }
    for (path, _) in figures::stale(root)? {
        findings.push(Finding::error(
            &path,
            0,
            "tables are not those of results/: `./x docs figures` writes them anew",
        ));
    }
    Ok(findings)
}

fn documents(root: &Path) -> Result<Vec<PathBuf>> {
    let mut files: Vec<PathBuf> = AT_THE_TOP.iter().map(PathBuf::from).collect();
    if root.join("docs").is_dir() {
        collect(root, Path::new("docs"), "md", &mut files)?;
    }
    files.retain(|path| root.join(path).exists());
    Ok(files)
}

fn check_document(root: &Path, path: &Path, text: &str, findings: &mut Vec<Finding>) {
    for (number, line) in prose(text) {
        for target in links(&line) {
            if let Err(why) = resolve(root, path, &target) {
                findings.push(Finding::error(path, number, format!("link to {target}: {why}")));
            }
        }
        for span in line.split('`').skip(1).step_by(2) {
            let name = span.split([' ', ':', '#']).next().unwrap_or_default();
            let is_pattern = name.contains(['*', '{', '<', '…']) || name.contains("...");
            if NAMED_FILES.iter().any(|p| name.starts_with(p)) && !is_pattern && !root.join(name).exists() {
                findings.push(Finding::error(path, number, format!("there is no {name}")));
            }
        }
    }
}

/// Lines outside fenced code blocks, with their numbers.
pub fn prose(text: &str) -> Vec<(usize, String)> {
    let mut fenced = false;
    let mut lines = Vec::new();
    for (number, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced {
            lines.push((number + 1, line.to_string()));
        }
    }
    lines
}

/// Targets of `[text](target)`.
fn links(line: &str) -> Vec<String> {
    let mut targets = Vec::new();
    let mut rest = line;
    while let Some(at) = rest.find("](") {
        rest = &rest[at + 2..];
        let Some(end) = rest.find(')') else { break };
        targets.push(rest[..end].to_string());
        rest = &rest[end..];
    }
    targets
}

fn resolve(root: &Path, from: &Path, target: &str) -> Result<(), String> {
    if target.contains("://") || target.starts_with("mailto:") {
        return Ok(());
    }
    let (file, heading) = target.split_once('#').map_or((target, None), |(file, heading)| (file, Some(heading)));
    let path =
        if file.is_empty() { from.to_path_buf() } else { normal(&from.parent().unwrap_or(Path::new("")).join(file)) };
    let full = root.join(&path);
    if !full.exists() {
        return Err("there is no such file".into());
    }
    let Some(heading) = heading else { return Ok(()) };
    let text = std::fs::read_to_string(&full).map_err(|e| e.to_string())?;
    let found =
        prose(&text).iter().any(|(_, line)| line.starts_with('#') && slug(line.trim_start_matches('#')) == heading);
    if found { Ok(()) } else { Err("the file has no such heading".into()) }
}

/// The path without `..` and `.`, which would not need the directories in between to exist.
fn normal(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => {
                out.pop();
            }
            Component::CurDir => {}
            other => out.push(other),
        }
    }
    out
}

/// A heading as an anchor: lower case, spaces to dashes, punctuation dropped.
fn slug(heading: &str) -> String {
    let kept = heading.trim().chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
}

/// Numbers of the rules in the protocol document: its headings and list items `N. **…`.
pub fn protocol_rule_numbers(root: &Path) -> Result<BTreeSet<u32>> {
    let path = root.join(PROTOCOL);
    if !path.exists() {
        return Ok(BTreeSet::new());
    }
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {PROTOCOL}"))?;
    let number = |line: &str| line.trim_start_matches('#').trim_start().split_once(". ")?.0.parse::<u32>().ok();
    Ok(prose(&text).iter().filter_map(|(_, line)| number(line)).collect())
}

/// Comments cite rules by number: `protocol rule 4`, `protocol rules 6 and 25`.
pub fn check_rule_references(source: &Source, known: &BTreeSet<u32>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (line_index, line) in source.text.lines().enumerate() {
        for number in cited_rules(line) {
            if !known.contains(&number) {
                let text = format!("protocol rule {number} is not in {PROTOCOL}");
                findings.push(Finding::error(&source.path, line_index + 1, text));
            }
        }
    }
    findings
}

fn cited_rules(line: &str) -> Vec<u32> {
    let mut cited = Vec::new();
    let lower = line.to_ascii_lowercase();
    for (at, mark) in lower.match_indices("protocol rule") {
        let rest = lower[at + mark.len()..].trim_start_matches('s').trim_start();
        for word in rest.split([' ', ',']).filter(|w| !w.is_empty()) {
            let digits = word.trim_end_matches(|c: char| !c.is_ascii_digit());
            match digits.parse::<u32>() {
                Ok(number) => cited.push(number),
                Err(_) if word == "and" || word == "to" => continue,
                Err(_) => break,
            }
            if digits.len() < word.len() {
                break;
            }
        }
    }
    cited
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cited_rules_are_read() {
        assert_eq!(cited_rules("/// (protocol rules 6 and 25)."), [6, 25]);
        assert_eq!(cited_rules("// Protocol rule 11: stale bytes"), [11]);
        assert_eq!(cited_rules("// protocol rules 1, 4 and 11 hold 7 times"), [1, 4, 11]);
        assert!(cited_rules("// the protocol rules").is_empty());
    }

    #[test]
    fn links_and_anchors_are_read() {
        assert_eq!(links("see [a](b.md#c-d) and [e](https://f)"), ["b.md#c-d", "https://f"]);
        assert_eq!(slug(" Write path: log, then segments"), "write-path-log-then-segments");
        assert_eq!(normal(Path::new("docs/decisions/../FORMAT.md")), Path::new("docs/FORMAT.md"));
    }
}
