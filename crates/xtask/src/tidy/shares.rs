//! Shares of production lines: what the simulator drives, and what the shell is.
//!
//! Lines count without tests, of crates that nodes, hosts and their command line are made of. Both bounds are ratchets:
//! they follow what was reached, and are never loosened.

use super::Finding;
use super::source::Source;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Crates whose code the simulator runs.
const DRIVEN: [&str; 13] = [
    "base", "cipher", "cluster", "compress", "erasure", "filter", "format", "host", "qos", "stages", "store",
    "verdict", "volume",
];

/// Crates that do I/O, or stand around what does.
const SHELL: [&str; 2] = ["holdfast", "runtime"];

/// Crates that no user runs.
const TOOLS: [&str; 4] = ["lab", "sim", "torture", "xtask"];

/// Crates of commands alone: what they read and write is no grid's, and models of their own test them.
const APART: [&str; 2] = ["backup", "image"];

/// Of a thousand production lines. Wanted: 650 and 300.
const DRIVEN_MIN: usize = 520;
const SHELL_MAX: usize = 406;

/// Production lines by crate.
pub struct Shares(BTreeMap<String, usize>);

impl Shares {
    pub fn count(sources: &[Source], tests_only: &BTreeSet<PathBuf>) -> Shares {
        let mut lines = BTreeMap::new();
        for source in sources.iter().filter(|source| !tests_only.contains(&source.path)) {
            let Some(name) = crate_of(&source.path) else { continue };
            let tests: usize = source.test_spans().iter().map(|span| source.code[span.clone()].lines().count()).sum();
            *lines.entry(name).or_default() += source.code.lines().count().saturating_sub(tests);
        }
        Shares(lines)
    }

    fn of(&self, crates: &[&str]) -> usize {
        crates.iter().filter_map(|name| self.0.get(*name)).sum()
    }

    fn permille(&self, crates: &[&str]) -> usize {
        let all: usize = self.0.values().sum();
        self.of(crates) * 1000 / all.max(1)
    }

    /// One line for people.
    pub fn text(&self) -> String {
        let all: usize = self.0.values().sum();
        format!(
            "{all} production lines: the simulator drives {:.1} %, the shell is {:.1} %",
            self.permille(&DRIVEN) as f64 / 10.0,
            self.permille(&SHELL) as f64 / 10.0
        )
    }

    pub fn check(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        let (driven, shell) = (self.permille(&DRIVEN), self.permille(&SHELL));
        if driven < DRIVEN_MIN {
            let text = format!("the simulator drives {driven} of 1,000 production lines, and did {DRIVEN_MIN}");
            findings.push(Finding::error(Path::new("crates"), 0, text));
        }
        if shell > SHELL_MAX {
            let text = format!("the shell is {shell} of 1,000 production lines, and was {SHELL_MAX}");
            findings.push(Finding::error(Path::new("crates"), 0, text));
        }
        findings
    }
}

/// Of a file below `crates/NAME/src`, where users run what is made of it.
fn crate_of(path: &Path) -> Option<String> {
    let mut parts = path.components().map(|part| part.as_os_str().to_string_lossy());
    let (_, name, place) = (parts.next()?, parts.next()?, parts.next()?);
    let is_counted = !TOOLS.contains(&name.as_ref()) && !APART.contains(&name.as_ref());
    (place == "src" && is_counted).then(|| name.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(path: &str, lines: usize) -> Source {
        let tests = "#[cfg(test)]\nmod tests {\n    fn t() {}\n}\n";
        Source::new(Path::new(path), format!("{}{tests}", "fn f() {}\n".repeat(lines)))
    }

    #[test]
    fn tests_and_tools_count_nothing() {
        let sources = [
            source("crates/volume/src/a.rs", 30),
            source("crates/holdfast/src/b.rs", 10),
            source("crates/holdfast/tests/c.rs", 500),
            source("crates/sim/src/d.rs", 500),
        ];
        let shares = Shares::count(&sources, &BTreeSet::new());
        let lines = shares.of(&DRIVEN) + shares.of(&SHELL);
        assert!((40..44).contains(&lines), "{lines}");
        assert!((740..760).contains(&shares.permille(&DRIVEN)), "{}", shares.text());
    }

    #[test]
    fn a_share_that_got_worse_is_an_error() {
        let shell = Shares(BTreeMap::from([("holdfast".to_string(), 90), ("volume".to_string(), 10)]));
        assert_eq!(shell.check().len(), 2);
        let machines = Shares(BTreeMap::from([("holdfast".to_string(), 10), ("volume".to_string(), 90)]));
        assert_eq!(machines.check(), []);
    }
}
