//! The house rules, checked: which crate may import which, whose libraries may come in, what decides without I/O stays
//! without it, sizes, links, words of pages.
//!
//! Errors fail the run; warnings are printed and count nothing. The rules are in [`rules`], what they read in [`source`].

mod docs;
mod edges;
mod libraries;
mod pages;
mod ratchet;
mod rules;
mod shares;
mod source;
mod walks;

use crate::tools;
use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Level {
    Warning,
    Error,
}

/// One rule broken in one place.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Finding {
    level: Level,
    path: PathBuf,
    /// 1-based; 0 stands for the file as a whole.
    line: usize,
    text: String,
}

impl Finding {
    fn error(path: &Path, line: usize, text: impl Into<String>) -> Finding {
        Finding { level: Level::Error, path: path.into(), line, text: text.into() }
    }

    fn warning(path: &Path, line: usize, text: impl Into<String>) -> Finding {
        Finding { level: Level::Warning, path: path.into(), line, text: text.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let level = if self.level == Level::Error { "error" } else { "warning" };
        write!(f, "{level}: {}", self.path.display())?;
        if self.line > 0 {
            write!(f, ":{}", self.line)?;
        }
        write!(f, ": {}", self.text)
    }
}

pub fn run() -> Result<()> {
    let root = tools::root();
    let mut findings = edges::check()?;
    findings.extend(libraries::check(root)?);
    let mut files = Vec::new();
    collect(root, Path::new("crates"), "rs", &mut files)?;
    let sources = files.iter().map(|path| source::Source::read(root, path)).collect::<Result<Vec<_>>>()?;
    let tests_only: BTreeSet<PathBuf> = sources.iter().flat_map(source::Source::test_modules).collect();
    let numbers = docs::protocol_rule_numbers(root)?;
    for source in &sources {
        findings.extend(rules::check(source, tests_only.contains(&source.path)));
        findings.extend(docs::check_rule_references(source, &numbers));
    }
    findings.extend(ratchet::check(&sources));
    findings.extend(docs::check(root)?);
    findings.extend(walks::check(root)?);
    let shares = shares::Shares::count(&sources, &tests_only);
    findings.extend(shares.check());
    println!("{}", shares.text());
    report(&findings, sources.len())
}

fn report(findings: &[Finding], files: usize) -> Result<()> {
    for finding in findings {
        println!("{finding}");
    }
    let errors = findings.iter().filter(|f| f.level == Level::Error).count();
    println!("tidy: {files} source files, {errors} errors, {} warnings", findings.len() - errors);
    if errors > 0 {
        bail!("tidy found {errors} errors");
    }
    Ok(())
}

/// All files below `directory` (relative to `root`) whose name ends in `.extension`, sorted.
fn collect(root: &Path, directory: &Path, extension: &str, into: &mut Vec<PathBuf>) -> Result<()> {
    let full = root.join(directory);
    let entries = std::fs::read_dir(&full).with_context(|| format!("cannot list {}", full.display()))?;
    let mut paths: Vec<PathBuf> = entries.map(|e| e.map(|e| e.path())).collect::<Result<_, _>>()?;
    paths.sort();
    for path in paths {
        let relative = path.strip_prefix(root).expect("entries lie below the root").to_path_buf();
        if path.is_dir() {
            if path.file_name().is_some_and(|name| name != "target") {
                collect(root, &relative, extension, into)?;
            }
        } else if path.extension().is_some_and(|e| e == extension) {
            into.push(relative);
        }
    }
    Ok(())
}
