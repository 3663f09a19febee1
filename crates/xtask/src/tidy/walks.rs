//! Walks in docs/ARCHITECTURE.md: the way of a request by file and function, one file a line in a block marked `walk`.
//!
//! A walk names files and functions that exist, at most [`FILES_MAX`] files, and none more often than [`ENTRIES_MAX`]: who
//! has to jump further can't follow.

use super::Finding;
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::path::Path;

const PAGE: &str = "docs/ARCHITECTURE.md";
const FILES_MAX: usize = 25;
const ENTRIES_MAX: usize = 2;

/// Walks that the page has at least: of a write and of a read.
const WALKS_MIN: usize = 2;

pub fn check(root: &Path) -> Result<Vec<Finding>> {
    let page = std::fs::read_to_string(root.join(PAGE)).with_context(|| format!("cannot read {PAGE}"))?;
    let code_of = |path: &str| std::fs::read_to_string(root.join(path)).ok();
    Ok(check_page(&page, code_of).into_iter().map(|(line, text)| Finding::error(Path::new(PAGE), line, text)).collect())
}

/// Lines, from 1 on, and what is wrong there.
fn check_page(page: &str, code_of: impl Fn(&str) -> Option<String>) -> Vec<(usize, String)> {
    let mut wrong = Vec::new();
    let mut walks = 0;
    let mut entries: Option<BTreeMap<&str, usize>> = None;
    for (at, line) in page.lines().enumerate() {
        match (line, &mut entries) {
            ("```text walk", _) => entries = Some(BTreeMap::new()),
            ("```", Some(files)) => {
                walks += 1;
                if files.len() > FILES_MAX {
                    wrong.push((at + 1, format!("a walk over {} files, at most {FILES_MAX}", files.len())));
                }
                entries = None;
            }
            (line, Some(files)) if line.starts_with("crates/") => {
                let (path, functions) = line.split_once(' ').unwrap_or((line, ""));
                let count = files.entry(path).or_default();
                *count += 1;
                if *count > ENTRIES_MAX {
                    wrong.push((at + 1, format!("{path} is entered {count} times, at most {ENTRIES_MAX}")));
                }
                let code = code_of(path);
                wrong.extend(missing(path, functions, code.as_deref()).map(|text| (at + 1, text)));
            }
            _ => {}
        }
    }
    if walks < WALKS_MIN {
        wrong.push((0, format!("{walks} walks, at least {WALKS_MIN}")));
    }
    wrong
}

/// Functions stand before a colon, apart by commas.
fn missing(path: &str, functions: &str, code: Option<&str>) -> Option<String> {
    let Some(code) = code else { return Some(format!("a walk goes through {path}, which is not there")) };
    let names = functions.split(':').next().unwrap_or_default().split(',').map(str::trim);
    let lost: Vec<&str> = names.filter(|name| !has_function(code, name)).collect();
    (!lost.is_empty()).then(|| format!("{path} has no function {}", lost.join(", ")))
}

fn has_function(code: &str, name: &str) -> bool {
    !name.is_empty() && [format!("fn {name}("), format!("fn {name}<")].iter().any(|start| code.contains(start))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrong(lines: &[&str]) -> Vec<String> {
        let walk = format!("```text walk\n{}\n```\n", lines.join("\n"));
        let code_of = |path: &str| (path == "crates/a.rs").then(|| "fn one() {}\nfn two<A>() {}\n".to_string());
        check_page(&walk.repeat(WALKS_MIN), code_of).into_iter().map(|(_, text)| text).collect()
    }

    #[test]
    fn a_walk_names_what_there_is_and_turns_back_once() {
        assert_eq!(wrong(&["crates/a.rs   one, two: both", "the node:", "crates/a.rs   two"]), Vec::<String>::new());
        assert!(wrong(&["crates/a.rs   three"])[0].contains("no function three"));
        assert!(wrong(&["crates/b.rs   one"])[0].contains("not there"));
        assert!(wrong(&["crates/a.rs one"; 3])[0].contains("entered 3 times"));
        assert!(check_page("no walk", |_| None)[0].1.contains("0 walks"));
    }
}
