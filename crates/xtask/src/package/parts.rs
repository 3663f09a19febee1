//! All that a package installs: the program, and what it writes of itself; pages; what it is made of.

use super::{Place, VERSION};
use crate::tools;
use anyhow::{Context, Result};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Pages for who has no sources at hand.
const PAGES: &[&str] = &[
    "README.md",
    "KNOWN_ISSUES.md",
    "SECURITY.md",
    "docs/start.md",
    "docs/concepts.md",
    "docs/operation.md",
    "docs/operate",
    "docs/integrate",
    "docs/reference",
];

/// What writes the list of what the program is made of.
const CYCLONEDX: &str = "0.5.9";

/// Files of a library that are its licence.
const LICENCES: &[&str] = &["LICENSE", "LICENCE", "COPYING", "NOTICE", "UNLICENSE"];

pub fn stage(place: &Place, program: &Path) -> Result<()> {
    let stage = place.stage();
    fs::copy(program, stage.join("holdfast"))?;
    let restore = program.with_file_name("holdfast-restore");
    fs::copy(&restore, stage.join("holdfast-restore"))?;
    fs::write(stage.join("holdfast-restore.1"), tools::output_of(Command::new(&restore).arg("man"))?)?;
    let holdfast = |arguments: &[&str], what: &str| {
        let mut command = Command::new(program);
        tools::output_of(command.arg("reference").args(arguments).arg(stage.join(what)).current_dir(&stage))
    };
    holdfast(&["--man"], "man")?;
    holdfast(&["--units"], "units")?;
    let completions = stage.join("completions");
    fs::create_dir_all(&completions)?;
    for (shell, file) in [("bash", "holdfast"), ("zsh", "_holdfast"), ("fish", "holdfast.fish")] {
        let text = tools::output_of(Command::new(program).args(["reference", "--completions", shell]))?;
        fs::write(completions.join(file), text)?;
    }
    let others = [
        ("integrations/grafana", "grafana"),
        ("integrations/prometheus", "prometheus"),
        ("integrations/proxmox/perl", "proxmox"),
    ];
    for (from, to) in others {
        tools::run(Command::new("cp").arg("-r").arg(from).arg(stage.join(to)))?;
    }
    let doc = stage.join("doc");
    fs::create_dir_all(&doc)?;
    tools::run(Command::new("cp").arg("-r").args(PAGES).arg(&doc))?;
    let packages = in_the_program()?;
    fs::write(doc.join("third-party.txt"), licences(&packages)?)?;
    let list = place.out.join(format!("holdfast-{VERSION}.cdx.json"));
    cyclonedx(place, &list)?;
    fs::copy(&list, doc.join("holdfast.cdx.json"))?;
    Ok(())
}

/// Libraries of the dashboard, each with its licence.
const VENDORED: &str = "crates/http/web/vendor";

/// Packages whose code is in the program, without what only builds or tests it, as `cargo metadata` tells of them.
fn in_the_program() -> Result<Vec<Value>> {
    let mut command = tools::cargo_command();
    command.args(["metadata", "--format-version", "1", "--locked", "--filter-platform", "x86_64-unknown-linux-gnu"]);
    let metadata = tools::json_of(&mut command)?;
    let list = |of: &Value| of.as_array().cloned().unwrap_or_default();
    let text = |of: &Value| of.as_str().unwrap_or_default().to_string();
    let nodes: BTreeMap<String, Value> =
        list(&metadata["resolve"]["nodes"]).into_iter().map(|node| (text(&node["id"]), node)).collect();
    let packages: BTreeMap<String, Value> =
        list(&metadata["packages"]).into_iter().map(|package| (text(&package["id"]), package)).collect();
    let mut waiting: Vec<String> =
        packages.values().filter(|package| package["name"] == "holdfast").map(|package| text(&package["id"])).collect();
    let mut found = BTreeSet::new();
    while let Some(id) = waiting.pop() {
        if !found.insert(id.clone()) {
            continue;
        }
        for dependency in list(&nodes[&id]["deps"]) {
            let is_in_it = list(&dependency["dep_kinds"]).iter().any(|kind| kind["kind"].is_null());
            waiting.extend(is_in_it.then(|| text(&dependency["pkg"])));
        }
    }
    found.iter().map(|id| packages.get(id).cloned().with_context(|| format!("cargo does not tell of {id}"))).collect()
}

/// Texts of the licences of others' libraries, each once, with those that come under it.
fn licences(packages: &[Value]) -> Result<String> {
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut list = String::from("Libraries in the program that are others' work:\n\n");
    for package in packages.iter().filter(|package| !package["source"].is_null()) {
        let name = format!("{} {}", word(&package["name"]), word(&package["version"]));
        list += &format!("  {name}: {}\n", word(&package["license"]));
        let manifest = Path::new(package["manifest_path"].as_str().unwrap_or_default());
        let directory = manifest.parent().context("a manifest without a directory")?;
        for entry in fs::read_dir(directory).with_context(|| format!("cannot list {}", directory.display()))? {
            let path = entry?.path();
            let file = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_uppercase();
            if path.is_file() && LICENCES.iter().any(|begin| file.starts_with(begin)) {
                let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
                texts.entry(text.trim().to_string()).or_default().push(name.clone());
            }
        }
    }
    for entry in fs::read_dir(VENDORED).with_context(|| format!("cannot list {VENDORED}"))? {
        let path = entry?.path();
        if let Some(name) = path.file_name().and_then(|name| name.to_str()?.strip_prefix("LICENSE-")) {
            list += &format!("  {name}, in the dashboard\n");
            texts.entry(fs::read_to_string(&path)?.trim().to_string()).or_default().push(name.to_string());
        }
    }
    let rule = "-".repeat(80);
    let told = texts.iter().map(|(text, names)| format!("\n{rule}\n{}:\n\n{text}\n", names.join(", ")));
    Ok(list + &told.collect::<String>())
}

fn word(value: &Value) -> &str {
    value.as_str().unwrap_or("not said")
}

/// What the program is made of, by `cargo-cyclonedx`; it is built the first time.
fn cyclonedx(place: &Place, to: &Path) -> Result<()> {
    let tool = tools::cargo_tool("cargo-cyclonedx", CYCLONEDX)?;
    let name = format!("holdfast-{VERSION}.cdx");
    let mut command = Command::new(tool);
    command.args(["cyclonedx", "--format", "json", "--spec-version", "1.5", "--target", "x86_64-unknown-linux-gnu"]);
    command.args(["--no-build-deps", "--override-filename", &name, "--manifest-path"]);
    command.arg("crates/holdfast/Cargo.toml").current_dir(tools::root()).env("SOURCE_DATE_EPOCH", &place.epoch);
    let done = tools::run(&mut command);
    // It writes one for each crate of the workspace, beside its manifest.
    for entry in fs::read_dir("crates")? {
        let written = entry?.path().join(format!("{name}.json"));
        if written.starts_with("crates/holdfast") {
            done.is_ok().then(|| fs::copy(&written, to)).transpose()?;
        }
        let _ = fs::remove_file(&written);
    }
    done
}
