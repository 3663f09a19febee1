//! All that the metadata store holds is lost under load, and comes back from the nodes.
//!
//! Embedded metadata are put aside: the host goes on with a file that nobody finds any more, as after `rm`. In etcd all records of
//! this grid are deleted but those by which hosts say that they are there, and nothing else: a recovery is to find hosts that are
//! still at work. Before, the records are exported.
//!
//! Faults: until a recovery is complete, what was put aside is the newest state that there is, and undoing puts it back, over
//! whatever a recovery that was cut short has left. Once it is complete nobody goes back.

use super::steps::{Haste, give};
use super::{Calamity, Site, Steps, check_unused};
use crate::client;
use crate::drill::tools::sleep;
use crate::grid::layout::{GridConfig, MetaConfig};
use crate::grid::{metadata, recovery};
use crate::host::meta;
use anyhow::{Context, Result, bail};
use clap::Args;
use holdfast_api::{Concern, Finding, MachineInfo};
use holdfast_format::meta::{EXPORT_SUFFIX, VOLUME_PREFIX};
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Copies are written within half a minute of a change; a machine that is busy takes longer.
const COPIED_WITHIN: Duration = Duration::from_secs(120);

const LOOK_PACE: Duration = Duration::from_secs(1);

/// Hosts that renew what they had are outrun.
const ROUNDS_MAX: usize = 20;

#[derive(Args, Clone, Debug)]
pub struct MetadataLossArgs {
    #[command(flatten)]
    pub common: super::EmergencyArgs,
    /// Although clients are connected to other volumes of this host: they wait, or get errors, while it is stopped
    #[arg(long)]
    pub with_clients: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Whole,
    Lost,
    Recovered,
}

pub struct MetadataLoss {
    with_clients: bool,
    stage: Stage,
    /// This machine's records, when the drill began.
    config: Option<GridConfig>,
    /// Other machines whose hosts are up.
    others: Vec<String>,
    /// The embedded file that was put aside.
    aside: PathBuf,
    exported: PathBuf,
}

impl MetadataLoss {
    pub fn new(with_clients: bool) -> MetadataLoss {
        let (aside, exported) = (PathBuf::new(), PathBuf::new());
        MetadataLoss { with_clients, stage: Stage::Whole, config: None, others: Vec::new(), aside, exported }
    }

    fn is_embedded(&self) -> bool {
        self.config.as_ref().is_some_and(|config| config.meta == MetaConfig::Embedded)
    }

    fn way_back(&self, site: &Site) -> String {
        if self.is_embedded() {
            let file = site.dir.meta_path();
            let (file, aside) = (file.display(), self.aside.display());
            return format!("where {file} is not there, `mv {aside} {file}`; then `holdfast grid up`");
        }
        format!(
            "`holdfast grid down --host` on each machine; `holdfast meta recover --yes` on one (what was exported is in {}, \
             for `meta recover --from`); `holdfast grid up` on each",
            self.exported.display()
        )
    }

    /// All records of the grid are deleted that do not end with a host.
    fn empty(&self, site: &Site) -> Result<()> {
        let config = self.config.as_ref().context("the drill has not looked at the grid yet")?;
        let store = meta::connect(&site.dir, config)?;
        for _ in 0..ROUNDS_MAX {
            let mut records = store.list("")?.records;
            records.retain(|record| record.lease.is_none());
            if records.is_empty() {
                return Ok(());
            }
            for record in records {
                // A record that a host has just changed is found again.
                store.swap(&record.key, record.version, None, None)?;
            }
        }
        match store.get(meta::GRID_KEY)? {
            None => Ok(()),
            Some(_) => bail!("hosts write records into {} as fast as they are deleted", config.meta),
        }
    }

    /// Other machines' hosts are to be stopped, too: nothing is recovered while one is at work.
    fn await_no_hosts(&self, site: &Site, steps: &mut Steps) -> Result<()> {
        let begun = Instant::now();
        let is_at_work = |error: &anyhow::Error| format!("{error:#}").contains("hosts are at work");
        let mut is_told = false;
        while let Some(error) = give(site, &["meta", "recover"], Haste::Heeds).err().filter(is_at_work) {
            if begun.elapsed() >= site.mend_max {
                return Err(error);
            }
            // The one that was just stopped may still be on its way out.
            if !is_told && !self.others.is_empty() {
                eprintln!("NOW, on {}: `holdfast grid down --host`. The drill waits", self.others.join(", "));
                is_told = true;
            }
            sleep(LOOK_PACE)?;
        }
        self.others.iter().for_each(|name| steps.note(name, "grid down --host", begun));
        Ok(())
    }

    /// Other machines' hosts are to be started, too.
    fn await_others(&self, site: &Site, steps: &mut Steps) -> Result<()> {
        if self.others.is_empty() {
            return Ok(());
        }
        eprintln!("NOW, on {}: `holdfast grid up`. The drill waits", self.others.join(", "));
        let begun = Instant::now();
        let is_up = |name: &String, machines: &[MachineInfo]| machines.iter().any(|m| m.up && m.name == *name);
        while !client::machines(&site.dir).is_ok_and(|all| self.others.iter().all(|name| is_up(name, &all))) {
            if begun.elapsed() >= site.mend_max {
                bail!("not all of the hosts on {} are up after {} s", self.others.join(", "), site.mend_max.as_secs());
            }
            sleep(LOOK_PACE)?;
        }
        self.others.iter().for_each(|name| steps.note(name, "grid up", begun));
        Ok(())
    }
}

/// Refuses where a recovery would not have everything back.
fn check_recoverable(site: &Site) -> Result<()> {
    let shown = give(site, &["meta", "recover", "--json"], Haste::Heeds)?;
    let shown: Value = serde_json::from_str(&shown).context("`meta recover --json` gives no JSON")?;
    let volumes = shown["volumes"].as_array().context("`meta recover` tells of no volumes")?;
    match volumes.iter().find(|volume| !volume["doubt"].is_null()) {
        Some(volume) => bail!("volume {} would only be found: {}", volume["name"], volume["doubt"]),
        None => Ok(()),
    }
}

impl Calamity for MetadataLoss {
    fn name(&self) -> &'static str {
        "metadata-loss"
    }

    fn check(&mut self, site: &Site) -> Result<()> {
        let status = site.status()?;
        check_unused(&status, self.with_clients)?;
        let config = site.dir.load()?;
        let machines = client::machines(&site.dir)?;
        let others = machines.into_iter().filter(|machine| machine.up && machine.name != config.host.name);
        self.others = others.map(|machine| machine.name).collect();
        (self.aside, self.exported) = (site.beside("meta.redb"), site.beside("meta.json"));
        self.config = Some(config);
        Ok(())
    }

    fn warning(&self) -> String {
        let others = match self.others.is_empty() {
            true => String::new(),
            false => format!("; on {} you are asked to stop the hosts, too", self.others.join(", ")),
        };
        format!("the grid's metadata are lost under load, and all hosts are stopped while they are recovered{others}")
    }

    /// Waits until devices have a copy of the records in which the drill's volume is in service.
    fn prepare(&mut self, site: &Site) -> Result<String> {
        metadata::export(&site.dir, Some(&self.exported))?;
        let volumes = client::volumes(&site.dir)?;
        let volume = volumes.iter().find(|volume| volume.name == site.volume);
        let id = &volume.with_context(|| format!("volume {} is gone", site.volume))?.id;
        let key = format!("{VOLUME_PREFIX}{id}{EXPORT_SUFFIX}");
        eprintln!("waiting until devices have a copy of the newest records, at most {} s", COPIED_WITHIN.as_secs());
        let end = Instant::now() + COPIED_WITHIN;
        while !recovery::newest_copy(&site.dir)?.is_some_and(|records| records.contains_key(&key)) {
            if Instant::now() >= end {
                bail!(
                    "no copy of the newest records is on devices after {} s, so that little could be recovered; the host's log \
                     says why",
                    COPIED_WITHIN.as_secs()
                );
            }
            sleep(LOOK_PACE)?;
        }
        Ok(self.way_back(site))
    }

    fn strike(&mut self, site: &Site) -> Result<String> {
        self.stage = Stage::Lost;
        if self.is_embedded() {
            let file = site.dir.meta_path();
            fs::rename(&file, &self.aside).with_context(|| format!("cannot put {} aside", file.display()))?;
            return Ok(format!("{} is gone (it is {})", file.display(), self.aside.display()));
        }
        self.empty(site)?;
        Ok("the records of the grid were deleted from etcd".to_string())
    }

    /// A host does not miss a file that it has open.
    fn is_told(&self) -> bool {
        !self.is_embedded()
    }

    fn is_told_by(&self, finding: &Finding) -> bool {
        finding.concern == Concern::Metadata
    }

    fn mend(&mut self, site: &Site, steps: &mut Steps) -> Result<()> {
        steps.give(&["grid", "down", "--host", "--force"])?;
        self.await_no_hosts(site, steps)?;
        steps.give(&["meta", "recover"])?;
        check_recoverable(site)?;
        steps.give(&["meta", "recover", "--yes"])?;
        self.stage = Stage::Recovered;
        steps.give(&["grid", "up"])?;
        self.await_others(site, steps)
    }

    fn undo(&mut self, site: &Site) -> Result<()> {
        let give = |words: &[&str]| give(site, words, Haste::Undoes);
        let redo = || -> Result<()> {
            if self.stage == Stage::Lost && self.is_embedded() && self.aside.exists() {
                // What a recovery has begun is nothing that a host has gone on with.
                fs::rename(&self.aside, site.dir.meta_path()).context("cannot put the metadata back")?;
            } else if self.stage == Stage::Lost && !self.is_embedded() {
                give(&["grid", "down", "--host", "--force"])?;
                give(&["meta", "recover", "--yes"])?;
            }
            give(&["grid", "up"]).map(drop)
        };
        redo().with_context(|| self.way_back(site))?;
        self.clear_up()
    }

    fn clear_up(&mut self) -> Result<()> {
        for path in [&self.aside, &self.exported].into_iter().filter(|path| path.exists()) {
            fs::remove_file(path).with_context(|| format!("cannot delete {}", path.display()))?;
        }
        Ok(())
    }
}
