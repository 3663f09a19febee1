//! `holdfast config …`: what can be set, whether it is right, and what is set.

use super::format::{print, print_json, print_table, table};
use crate::config::keys::{KEYS, Kind, Value};
use crate::config::{self, Origin, Setting};
use crate::grid::layout::{GridConfig, GridDir, HostConfig};
use anyhow::Result;
use clap::{Args, Subcommand};
use holdfast_api::{Code, Error, refuse};
use serde_json::json;
use std::path::{Path, PathBuf};

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    holdfast config explain                    all keys\n  \
    holdfast config explain memory.writeback   one of them\n  \
    holdfast config check                      is all right with the grid's holdfast.toml?\n  \
    holdfast config check new.toml             or with another file, before it is put there\n  \
    holdfast config show                       what is set, and where\n\n\
    The file is DIR/holdfast.toml. The host reads it when it starts, and doesn't start while something is wrong with it.")]
pub struct ConfigArgs {
    #[command(subcommand)]
    action: ConfigAction,
}

#[derive(Subcommand, Debug)]
enum ConfigAction {
    /// What can be set, and what it does
    Explain {
        /// A key, or a section
        key: Option<String>,
        /// As the page docs/reference/configuration.md
        #[arg(long, conflicts_with = "key")]
        markdown: bool,
    },
    /// Find what is wrong with a file of settings
    Check {
        /// By default the grid's
        file: Option<PathBuf>,
    },
    /// All settings as they are from the host's next start on, and where each is set
    Show,
}

pub fn run(args: ConfigArgs, dir: Option<&Path>, json: bool) -> Result<()> {
    match args.action {
        ConfigAction::Explain { key, markdown } => explain(key.as_deref(), markdown, json),
        ConfigAction::Check { file } => check(file, dir, json),
        ConfigAction::Show => show(&GridDir::choose(dir)?, json),
    }
}

fn explain(key: Option<&str>, markdown: bool, json: bool) -> Result<()> {
    if json {
        let chosen = KEYS.iter().filter(|k| key.is_none_or(|key| k.name == key || k.section() == key));
        let told = |k: &config::keys::Key| {
            json!({ "key": k.name, "takes": k.kind.text(), "default": (!k.default.is_empty()).then_some(k.default),
                "example": k.example, "what": k.brief, "more": k.more })
        };
        return print_json(&chosen.map(told).collect::<Vec<_>>());
    }
    if markdown {
        return print(config::markdown().trim_end());
    }
    let Some(key) = key else { return print(config::explain_keys()) };
    let text = config::explain_key(key);
    print(text.ok_or_else(|| {
        Error::new(Code::NotFound, format!("there is no key {key}; `holdfast config explain` lists all"))
    })?)
}

/// A file can be checked before there is a grid: then against none.
fn check(file: Option<PathBuf>, dir: Option<&Path>, json: bool) -> Result<()> {
    let dir = GridDir::choose(dir)?;
    let config = match (&file, dir.exists()) {
        (Some(_), false) => GridConfig::new(String::new(), Vec::new(), HostConfig::default()),
        _ => dir.load()?,
    };
    let path = file.unwrap_or_else(|| dir.settings_path());
    if !path.exists() && path != dir.settings_path() {
        refuse!(Code::Invalid, "there is no file {}; name the one to check", path.display());
    }
    let all = config::load_file(&path, &config)?;
    // The host starts with it, but does not do what it asks for.
    let exposure = config::settings(&all).exposure();
    if let (config::Exposure::Withheld(_), Some(why)) = (exposure, exposure.text()) {
        refuse!(Code::Invalid, "{}: {why}", path.display());
    }
    let set = all.iter().filter(|setting| matches!(setting.origin, Origin::File(_))).count();
    if json {
        return print_json(&json!({ "file": path, "right": true, "set": set }));
    }
    print(format_args!("{} is right; it sets {set} of {} keys", path.display(), KEYS.len()))
}

fn origin_text(origin: Origin) -> String {
    match origin {
        Origin::Default => "default".to_string(),
        Origin::Older => "grid.json, of an older release".to_string(),
        Origin::File(line) => format!("holdfast.toml, line {line}"),
    }
}

fn show(dir: &GridDir, json: bool) -> Result<()> {
    let all = config::load_file(&dir.settings_path(), &dir.load()?)?;
    let text = |setting: &Setting| setting.value.as_ref().map(Value::text);
    if json {
        let told = KEYS.iter().zip(&all).map(|(key, setting)| {
            let is_number = matches!(key.kind, Kind::Size(..) | Kind::Span(..));
            let number = setting.value.as_ref().filter(|_| is_number).map(Value::count);
            json!({ "key": key.name, "value": text(setting), "number": number, "from": origin_text(setting.origin) })
        });
        return print_json(&told.collect::<Vec<_>>());
    }
    let mut rows = table(&["KEY", "VALUE", "FROM"], &[]);
    for (key, setting) in KEYS.iter().zip(&all) {
        rows.add_row([
            key.name.to_string(),
            text(setting).unwrap_or_else(|| "not set".to_string()),
            origin_text(setting.origin),
        ]);
    }
    print_table(&rows)
}
