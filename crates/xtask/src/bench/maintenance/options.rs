//! What `./x bench --maintenance` may be told; the defaults fit two cores and 40 GiB of free disk.

use super::PARTS;
use anyhow::{Context, Result, bail};
use std::path::PathBuf;

/// The spelling of earlier releases, accepted for one more.
const OLDER_FULL: &str = "brim";

const USAGE: &str =
    "usage: ./x bench --maintenance [--only snapshots|rebuild|map|recovery|overwrite|packed|skewed|full]...
  [--json] [--dir DIR] [--binary FILE]
  [--seconds N] [--rounds N]                      of each job that is compared with another
  [--device-gib N]                                each of the grid's eight devices has at least that much
  snapshots: [--small-gib N] [--large-gib N] [--repeats N] [--load-seconds N] [--generations N]
  rebuild:   [--rebuild-gib N] [--grace-seconds N] [--rebuild-seconds-max N]
  map:       [--map-gib N]
  overwrite, packed, skewed: [--overwrite-device-gib N] [--overwrite-seconds N]   each of four devices; the last two thirds count
  recovery:  [--recovery-gib N] [--log-seconds-max N] [--log-block-kib N]
  recovery, overwrite, packed, skewed: [--writeback-gib N]                the host's write-back budget, which bounds the log
sizes may be fractions; without --binary the release build of this tree is made and used";

pub struct Options {
    /// All parts if empty.
    pub only: Vec<String>,
    pub json: bool,
    pub dir: Option<PathBuf>,
    pub binary: Option<PathBuf>,
    pub seconds: u64,
    pub rounds: u64,
    pub small_mib: u64,
    pub large_mib: u64,
    pub repeats: u64,
    pub load_seconds: u64,
    pub generations: u64,
    pub rebuild_mib: u64,
    /// A load before the loss runs as long.
    pub grace_seconds: u64,
    pub rebuild_seconds_max: u64,
    pub map_mib: u64,
    pub recovery_mib: u64,
    pub log_seconds_max: u64,
    pub log_block_kib: u64,
    pub writeback_mib: Option<u64>,
    pub overwrite_device_mib: u64,
    pub overwrite_seconds: u64,
    pub device_mib_min: u64,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            only: Vec::new(),
            json: false,
            dir: None,
            binary: None,
            seconds: 10,
            rounds: 5,
            small_mib: 1024,
            large_mib: 16384,
            repeats: 5,
            load_seconds: 60,
            generations: 100,
            rebuild_mib: 4096,
            grace_seconds: 30,
            rebuild_seconds_max: 600,
            map_mib: 2048,
            recovery_mib: 4096,
            log_seconds_max: 60,
            log_block_kib: 4,
            writeback_mib: None,
            overwrite_device_mib: 2048,
            overwrite_seconds: 300,
            device_mib_min: 512,
        }
    }
}

pub fn parse(arguments: &[String]) -> Result<Options> {
    let mut options = Options::default();
    let mut words = arguments.iter();
    while let Some(word) = words.next() {
        if word == "--help" {
            bail!("{USAGE}");
        }
        if word == "--json" {
            options.json = true;
            continue;
        }
        let value = words.next().with_context(|| format!("{word} is not an option, or needs a value\n{USAGE}"))?;
        match word.as_str() {
            "--only" if value == OLDER_FULL => options.only.push("full".to_string()),
            "--only" if PARTS.iter().any(|(name, _, _)| name == value) => options.only.push(value.clone()),
            "--dir" => options.dir = Some(value.into()),
            "--binary" => options.binary = Some(value.into()),
            _ => set_number(&mut options, word, value)?,
        }
    }
    Ok(options)
}

fn set_number(options: &mut Options, word: &str, value: &str) -> Result<()> {
    let number: f64 = value.parse().ok().filter(|n| *n > 0.0).with_context(|| format!("{word}: {value}?\n{USAGE}"))?;
    let (count, mib) = (number.ceil() as u64, (number * 1024.0).ceil() as u64);
    match word {
        "--seconds" => options.seconds = count,
        "--rounds" => options.rounds = count,
        "--small-gib" => options.small_mib = mib,
        "--large-gib" => options.large_mib = mib,
        "--repeats" => options.repeats = count,
        "--load-seconds" => options.load_seconds = count,
        "--generations" => options.generations = count,
        "--rebuild-gib" => options.rebuild_mib = mib,
        "--grace-seconds" => options.grace_seconds = count,
        "--rebuild-seconds-max" => options.rebuild_seconds_max = count,
        "--map-gib" => options.map_mib = mib,
        "--recovery-gib" => options.recovery_mib = mib,
        "--log-seconds-max" => options.log_seconds_max = count,
        "--log-block-kib" => options.log_block_kib = count,
        "--writeback-gib" => options.writeback_mib = Some(mib),
        "--overwrite-device-gib" => options.overwrite_device_mib = mib,
        "--overwrite-seconds" => options.overwrite_seconds = count,
        "--device-gib" => options.device_mib_min = mib,
        _ => bail!("no option {word}\n{USAGE}"),
    }
    Ok(())
}
