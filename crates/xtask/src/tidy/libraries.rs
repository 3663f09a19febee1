//! Libraries of others: their licences, where they come from, and those that are not wanted, as `deny.toml` says.
//!
//! The file is cargo-deny's, which takes minutes to build; what it says of these three is held against `Cargo.lock` here.

use super::Finding;
use crate::tools;
use anyhow::{Context, Result};
use serde_json::Value;
use spdx::{Expression, Licensee, ParseMode};
use std::path::Path;

const FILE: &str = "deny.toml";

/// What the file says.
struct Rules {
    targets: Vec<String>,
    allow: Vec<Licensee>,
    /// Each with the reason.
    deny: Vec<(String, String)>,
}

impl Rules {
    fn read(text: &str) -> Result<Rules> {
        let file: toml::Table = text.parse().with_context(|| format!("{FILE} is not TOML"))?;
        let list = |section: &str, key: &str| {
            let found = file.get(section).and_then(|section| section.get(key)).and_then(toml::Value::as_array);
            found.cloned().with_context(|| format!("{FILE} has no list {section}.{key}"))
        };
        let text = |value: &toml::Value| value.as_str().map(str::to_string).context("it is to be a text");
        let allow = |name: String| Licensee::parse(&name).with_context(|| format!("{FILE}: {name} is no licence"));
        let deny = |entry: &toml::Value| {
            let of = |key: &str| entry.get(key).map(text).transpose().map(Option::unwrap_or_default);
            Ok((of("crate")?, of("reason")?))
        };
        Ok(Rules {
            targets: list("graph", "targets")?.iter().map(text).collect::<Result<_>>()?,
            allow: list("licenses", "allow")?.iter().map(|name| allow(text(name)?)).collect::<Result<_>>()?,
            deny: list("bans", "deny")?.iter().map(deny).collect::<Result<_>>()?,
        })
    }

    /// Why a package may not be there.
    fn refuse(&self, name: &str, licence: Option<&str>, source: &str) -> Option<String> {
        if let Some((_, reason)) = self.deny.iter().find(|(of, _)| of == name) {
            return Some(format!("{name} is banned: {reason}"));
        }
        if !source.starts_with("registry+") {
            return Some(format!("{name} comes from {source}, and not from cargo's registry"));
        }
        let Some(licence) = licence else { return Some(format!("{name} names no licence")) };
        let Ok(parsed) = Expression::parse_mode(licence, ParseMode::LAX) else {
            return Some(format!("{name} has a licence that can't be read: {licence}"));
        };
        let is_allowed = |asked: &spdx::LicenseReq| self.allow.iter().any(|licence| licence.satisfies(asked));
        (!parsed.evaluate(is_allowed)).then(|| format!("{name} has a licence that {FILE} does not allow: {licence}"))
    }
}

pub fn check(root: &Path) -> Result<Vec<Finding>> {
    let text = std::fs::read_to_string(root.join(FILE)).with_context(|| format!("cannot read {FILE}"))?;
    let rules = Rules::read(&text)?;
    let mut command = tools::cargo_command();
    command.args(["metadata", "--format-version", "1", "--locked"]);
    command.args(rules.targets.iter().flat_map(|target| ["--filter-platform", target]));
    let metadata = tools::json_of(&mut command)?;
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
    let theirs = packages.iter().filter_map(|package| Some((package, package["source"].as_str()?)));
    let refused = theirs.filter_map(|(package, source)| {
        rules.refuse(package["name"].as_str().unwrap_or_default(), package["license"].as_str(), source)
    });
    let lock = Path::new("Cargo.lock");
    let mut findings: Vec<Finding> = refused.map(|text| Finding::error(lock, 0, text)).collect();
    // Ours are all of one licence, which the file takes for granted.
    let is_ours = |package: &&Value| package["source"].is_null();
    for package in packages.iter().filter(is_ours).filter(|package| package["license"] != "Apache-2.0") {
        findings.push(Finding::error(lock, 0, format!("{} does not say that it is Apache-2.0", package["name"])));
    }
    Ok(findings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn licences_bans_and_sources_are_judged() {
        let text = "graph.targets = []\nlicenses.allow = ['MIT', 'Apache-2.0 WITH LLVM-exception']\n\
                    [[bans.deny]]\ncrate = 'bad'\nreason = 'it is'\n";
        let rules = Rules::read(text).unwrap();
        let why =
            |name: &str, licence: Option<&str>, source: &str| rules.refuse(name, licence, source).unwrap_or_default();
        let registry = "registry+https://index";
        for licence in ["MIT", "MIT/Apache-2.0", "GPL-3.0-only OR MIT", "Apache-2.0 WITH LLVM-exception"] {
            assert_eq!(why("a", Some(licence), registry), "", "{licence}");
        }
        for licence in ["Apache-2.0", "GPL-3.0-only AND MIT", "Apache-2.0 / ISC", "Made-Up"] {
            assert!(why("a", Some(licence), registry).contains("a has a licence"), "{licence}");
        }
        assert!(why("a", None, registry).contains("no licence"));
        assert!(why("bad", Some("MIT"), registry).contains("it is"));
        assert!(why("a", Some("MIT"), "git+https://x").contains("comes from git+"));
        assert!(Rules::read("graph.targets = []").is_err());
    }
}
