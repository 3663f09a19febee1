//! A grid's metadata as a file, and their way from one store to another.
//!
//! Faults: while a record says that it is being filled a store serves no host, so also when that was cut short; the same
//! import goes on where it was. The configuration names the new store only when it holds everything; the old one is marked
//! in the same way then, since nobody may go on with it.

use super::etcd;
use super::layout::{GridConfig, GridDir, MetaConfig, write_secret};
use super::processes::Role;
use crate::client;
use crate::host::meta::{self, GRID_KEY, IMPORTING_KEY, Meta};
use crate::host::presence;
use anyhow::{Context, Result};
use holdfast_api::{Code, refuse};
use holdfast_base::{MetaVersion, crc32c};
use holdfast_format::meta::{BEAT_KEY, MetadataFile};
use holdfast_runtime::meta::{Record, Swap};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

/// What a store has for itself, and no copy of what it holds.
const OF_THE_STORE: [&str; 3] = [GRID_KEY, IMPORTING_KEY, BEAT_KEY];

/// By key.
pub type Records = BTreeMap<String, Vec<u8>>;

pub fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn from_hex(hex: &str) -> Option<Vec<u8>> {
    let byte = |hex: &[u8]| u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok();
    hex.as_bytes().chunks(2).map(byte).collect::<Option<_>>().filter(|_| hex.len().is_multiple_of(2))
}

/// What an import did.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Imported {
    pub records: usize,
    pub store: String,
}

/// As a file of `holdfast meta export`.
pub fn file_of(grid: &str, records: &Records, while_running: bool) -> MetadataFile {
    MetadataFile {
        version: MetadataFile::VERSION,
        grid: grid.to_string(),
        while_running,
        crc32c: checksum(records),
        records: records.iter().map(|(key, value)| (key.clone(), to_hex(value))).collect(),
    }
}

/// What a file holds.
pub fn records_of(file: &MetadataFile) -> Result<Records> {
    let value = |(key, hex): (&String, &String)| {
        Ok((key.clone(), from_hex(hex).with_context(|| format!("record {key} is damaged"))?))
    };
    let mut records: Records = file.records.iter().map(value).collect::<Result<_>>()?;
    if checksum(&records) != file.crc32c {
        refuse!(Code::Invalid, "its checksum is wrong: it was changed or damaged");
    }
    // A release that does not know one of them has written it, too.
    records.retain(|key, _| !OF_THE_STORE.contains(&&**key));
    Ok(records)
}

pub fn read_file(mut from: impl Read) -> Result<MetadataFile> {
    let mut text = String::new();
    from.read_to_string(&mut text)?;
    let file: MetadataFile = serde_json::from_str(&text).context("it is no file of `holdfast meta export`")?;
    if file.version != MetadataFile::VERSION {
        refuse!(Code::Unsupported, "it has version {}, and this release knows {}", file.version, MetadataFile::VERSION);
    }
    Ok(file)
}

fn checksum(records: &BTreeMap<String, Vec<u8>>) -> u32 {
    let parts = records.iter().flat_map(|(key, value)| {
        let lens = [key.len() as u64, value.len() as u64].map(u64::to_le_bytes).concat();
        [lens, key.clone().into_bytes(), value.clone()]
    });
    crc32c(&parts.flatten().collect::<Vec<u8>>())
}

/// While a host runs its records change under the reader's hands, and it goes on with the store that it knows.
pub fn check_stopped(dir: &GridDir) -> Result<()> {
    if let Some(host) = Role::Host.find(dir) {
        refuse!(
            Code::State,
            "the grid's host is running (process {}); stop it with `holdfast grid down --host`, which leaves the nodes as they \
             are, then try again",
            host.pid
        );
    }
    Ok(())
}

/// All records but those that end with a host's lease.
fn list(meta: &Meta) -> Result<BTreeMap<String, Record>> {
    let records = meta.list("")?.records.into_iter();
    Ok(records.filter(|r| r.lease.is_none() && !OF_THE_STORE.contains(&&*r.key)).map(|r| (r.key.clone(), r)).collect())
}

/// What the grid's store holds, as of one moment, apart from what ends with a host.
pub fn all_records(meta: &Meta) -> Result<Records> {
    Ok(list(meta)?.into_iter().map(|(key, record)| (key, record.value)).collect())
}

/// Writes everything that the grid's store holds to a file, or to standard output. While the grid's host runs it is asked.
pub fn export(dir: &GridDir, to: Option<&Path>) -> Result<usize> {
    let config = dir.load()?;
    let file = if Role::Host.find(dir).is_some() {
        client::metadata(dir)?
    } else {
        let meta = meta::open(dir, &config)?;
        let is_at_work = check_no_hosts(&meta, &config.meta).is_err();
        file_of(&config.grid, &all_records(&meta)?, is_at_work)
    };
    let records = records_of(&file)?;
    let mut text = serde_json::to_string_pretty(&file).expect("it encodes");
    text.push('\n');
    match to {
        // It holds wrapped keys, and who may have what.
        Some(path) => write_secret(path, text.as_bytes())?,
        None => std::io::Write::write_all(&mut std::io::stdout(), text.as_bytes())?,
    }
    Ok(records.len())
}

/// Puts what a file holds into a store, and makes that the grid's.
pub fn import(dir: &GridDir, from: &Path, to: Option<MetaConfig>, replace: bool) -> Result<Imported> {
    let config = dir.load()?;
    check_stopped(dir)?;
    let file = std::fs::File::open(from).map_err(anyhow::Error::from).and_then(read_file);
    let file = file.with_context(|| format!("cannot use {}", from.display()))?;
    if file.grid != config.grid {
        refuse!(
            Code::Invalid,
            "{} is of grid {}, and the grid in {} is {}; nothing was changed",
            from.display(),
            file.grid,
            dir.root().display(),
            config.grid
        );
    }
    if file.while_running {
        refuse!(
            Code::Invalid,
            "{0} was taken while the grid was running, and volumes have gone on since: their data begin where it does not say. \
             Nothing was changed. `holdfast meta recover --from {0}` takes from it what is not in the data itself, and the rest \
             from the nodes; to move to another store, export with all hosts stopped",
            from.display()
        );
    }
    let records = records_of(&file).with_context(|| format!("cannot use {}", from.display()))?;
    let next = GridConfig { meta: to.unwrap_or_else(|| config.meta.clone()), ..config.clone() };
    let is_moving = next.meta != config.meta;
    if is_moving && !replace {
        check_newest(dir, &config, &records)?;
    }
    etcd::settle(dir, &next)?;
    let meta = meta::connect(dir, &next)?;
    check_no_hosts(&meta, &next.meta)?;
    fill(&meta, &records, replace).with_context(|| format!("metadata store {}", next.meta))?;
    let held: BTreeMap<String, Vec<u8>> = list(&meta)?.into_iter().map(|(key, r)| (key, r.value)).collect();
    if held != records {
        refuse!(
            Code::Changed,
            "{} changed while it was being filled: does another host use it? The grid still has its old store",
            next.meta
        );
    }
    meta::complete(dir, &meta, &next)?;
    dir.save(&next)?;
    if is_moving {
        // It holds what is old from here on. Where it can't be reached it is left as it is.
        let _ = meta::connect(dir, &config).and_then(|old| meta::begin_import(&old));
    }
    Ok(Imported { records: records.len(), store: next.meta.to_string() })
}

/// Other machines' hosts go on with the store that they know. A file that could be opened has no other one, whatever lease a
/// host has left in it that was killed.
pub fn check_no_hosts(meta: &Meta, store: &MetaConfig) -> Result<()> {
    if *store == MetaConfig::Embedded {
        return Ok(());
    }
    let hosts: Vec<String> = presence::live_hosts(meta)?.into_iter().collect();
    if !hosts.is_empty() {
        refuse!(Code::State, "hosts are at work with {store}: {}; stop all hosts of the grid first", hosts.join(", "));
    }
    Ok(())
}

/// Older metadata would make nodes drop what was written since.
fn check_newest(dir: &GridDir, config: &GridConfig, records: &BTreeMap<String, Vec<u8>>) -> Result<()> {
    let advice = "add --replace if that is lost, and what it held besides";
    let present = meta::open(dir, config).with_context(|| format!("the grid's store can't be asked; {advice}"))?;
    check_no_hosts(&present, &config.meta)?;
    let held: BTreeMap<String, Vec<u8>> = list(&present)?.into_iter().map(|(key, r)| (key, r.value)).collect();
    if held != *records {
        refuse!(
            Code::State,
            "the grid's store ({}) holds other metadata than the file: export them anew; {advice}",
            config.meta
        );
    }
    Ok(())
}

pub fn fill(meta: &Meta, records: &BTreeMap<String, Vec<u8>>, replace: bool) -> Result<()> {
    let held = list(meta)?;
    let other = held.values().find(|r| records.get(&r.key) != Some(&r.value));
    if let Some(other) = other.filter(|_| !replace) {
        refuse!(
            Code::State,
            "it holds other metadata of this grid already, for example {}; nothing was changed. If what it holds is old, add \
             --replace",
            other.key
        );
    }
    meta::begin_import(meta)?;
    for key in held.keys().filter(|key| !records.contains_key(*key)) {
        set(meta, key, held[key].version, None)?;
    }
    for (key, value) in records {
        let found = held.get(key);
        if found.is_none_or(|r| r.value != *value) {
            set(meta, key, found.map_or(MetaVersion::ABSENT, |r| r.version), Some(value))?;
        }
    }
    Ok(())
}

fn set(meta: &Meta, key: &str, expect: MetaVersion, value: Option<&[u8]>) -> Result<()> {
    match meta.swap(key, expect, value, None)? {
        Swap::Done(_) => Ok(()),
        Swap::Conflict(_) => {
            refuse!(Code::Changed, "record {key} was changed meanwhile: does another host use this store?")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_runtime::clock;
    use holdfast_runtime::meta::{LocalStore, MetaStore};
    use std::sync::Arc;

    fn store() -> Meta {
        Arc::new(LocalStore::in_memory(Arc::new(clock::now)))
    }

    fn records(of: &[(&str, &[u8])]) -> BTreeMap<String, Vec<u8>> {
        of.iter().map(|(key, value)| (key.to_string(), value.to_vec())).collect()
    }

    #[test]
    fn a_file_reads_back_and_a_changed_one_is_refused() {
        let held = records(&[("a", &[0, 255, 7]), ("b/c", b"")]);
        let file = file_of("g", &held, false);
        let text = serde_json::to_string(&file).unwrap();
        assert_eq!(records_of(&read_file(text.as_bytes()).unwrap()).unwrap(), held);
        for (from, to) in [("00ff07", "00ff08"), ("00ff07", "00ff0"), ("\"a\"", "\"x\""), ("00ff07", "00fg07")] {
            let file = read_file(text.replace(from, to).as_bytes()).unwrap();
            assert!(records_of(&file).is_err(), "{from} -> {to}");
        }
        assert!(read_file("{}".as_bytes()).is_err());
        let of_an_older_release =
            file_of("g", &records(&[("a", &[0, 255, 7]), ("b/c", b""), (BEAT_KEY, b"{}")]), false);
        assert_eq!(records_of(&of_an_older_release).unwrap(), held, "which store it was is no part of what it holds");
    }

    #[test]
    fn a_store_is_filled_where_it_holds_nothing_else() {
        let meta = store();
        let wanted = records(&[("a", b"1"), ("b", b"2")]);
        fill(&meta, &records(&[("a", b"1")]), false).unwrap();
        fill(&meta, &wanted, false).expect("what was begun goes on");
        set(&meta, "old", MetaVersion::ABSENT, Some(b"x")).unwrap();
        let refused = fill(&meta, &wanted, false).unwrap_err().to_string();
        assert!(refused.contains("--replace") && refused.contains("old"), "{refused}");
        fill(&meta, &wanted, true).unwrap();
        let held: BTreeMap<_, _> = list(&meta).unwrap().into_iter().map(|(key, r)| (key, r.value)).collect();
        assert_eq!(held, wanted);
    }

    #[test]
    fn what_a_lease_holds_stays_behind() {
        let store = LocalStore::in_memory(Arc::new(clock::now));
        let lease = store.grant(std::time::Duration::from_secs(60)).unwrap();
        store.swap("host/a", MetaVersion::ABSENT, Some(b"here"), Some(lease)).unwrap();
        let meta: Meta = Arc::new(store);
        assert_eq!(list(&meta).unwrap(), BTreeMap::new());
    }
}
