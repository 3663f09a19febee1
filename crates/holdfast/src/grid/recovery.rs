//! `holdfast meta recover`: the grid's metadata from what its nodes hold, when the store is lost.
//!
//! Two sources: the newest copy of the records that a device has ([`copies`]), and the newest root of each volume, from the legs
//! of its log. Which roots are surely the newest is decided by [`recover`]; the others are kept beside as found, and nothing opens
//! them before an operator says that they are to be taken.
//!
//! Faults: the store is marked while it is filled, as for an import; what was cut short is begun again. Nothing on nodes is
//! changed, so that a recovery can be repeated.

use super::certs::{Certificates, now_s};
use super::copies::{self, Way};
use super::layout::{GridConfig, GridDir, MetaConfig, NodeConfig};
use super::metadata::{self, Records, all_records, check_no_hosts, check_stopped, fill, from_hex, to_hex};
use super::node_client::NodeClient;
use super::revoked;
use crate::host::meta::{self, GRID_KEY, IMPORTING_KEY, Meta};
use anyhow::{Context, Result};
use holdfast_api::{Code, refuse};
use holdfast_base::{DeviceId, VolumeId};
use holdfast_cluster::recover::{Evidence, HeldRoot, Mutations, OnDevice, Recovered, recover};
use holdfast_format::copy;
use holdfast_format::ledger::Leg;
use holdfast_format::meta::{
    DELETING_PREFIX, FOUND_PREFIX, FoundRecord, MetadataFile, NAME_PREFIX, NODE_PREFIX, NameRecord, NodeRecord, Other,
    ROOT_SUFFIX, TRASH_PREFIX, TrashRecord, VOLUME_PREFIX, decode, encode, export_key, found_key, key_key, name_key,
    trash_key,
};
use holdfast_format::root::{Root, root_key};
use holdfast_runtime::pki;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// What an operator asks for.
pub struct Wanted {
    /// A file of `holdfast meta export` in the place of the copies on devices.
    pub from: Option<PathBuf>,
    /// Which of the copies on devices, in the place of the newest.
    pub copy: Option<u64>,
    /// There are no nodes but those that can be asked, although no copy says so.
    pub complete: bool,
    /// Nodes that neither this machine nor the copy knows.
    pub nodes: Vec<(u32, SocketAddr)>,
    /// Volumes that are taken although a newer root may be somewhere.
    pub accept: Vec<String>,
    /// Although the store holds metadata of this grid.
    pub replace: bool,
    /// Do it, and not only show it.
    pub yes: bool,
}

/// A volume, and what becomes of it.
#[derive(Clone, Debug, Serialize)]
pub struct VolumeReport {
    pub name: String,
    pub volume: String,
    pub size_bytes: u64,
    /// Why it is only found; nothing where it is as it was.
    pub doubt: Option<String>,
    pub accepted: bool,
    /// What an operator should know of it beside that: it is in no service, in the trash, or without its key.
    pub notes: Vec<String>,
}

/// What a recovery does, or did.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Where the records are from that are not about where data begin.
    pub copy: Option<String>,
    /// Copies that devices have, with the number of their records.
    pub copies: BTreeMap<u64, usize>,
    pub records: usize,
    pub nodes: Vec<String>,
    pub devices: usize,
    /// What could not be asked, and why.
    pub silent: Vec<String>,
    pub volumes: Vec<VolumeReport>,
    pub store: String,
    pub done: bool,
}

impl Report {
    pub fn found(&self) -> impl Iterator<Item = &VolumeReport> {
        self.volumes.iter().filter(|volume| volume.doubt.is_some() && !volume.accepted)
    }
}

/// The newest copy of the grid's records that a node of this machine has; hosts may run.
pub fn newest_copy(dir: &GridDir) -> Result<Option<Records>> {
    let config = dir.load()?;
    let mut survey = Survey::of(dir, &config)?;
    survey.ask(&config.nodes, &[]);
    survey.choose(None)?.map(|(_, file)| metadata::records_of(&file)).transpose()
}

/// Asks all nodes, says what there is, and fills the store with it if that is wanted.
pub fn run(dir: &GridDir, wanted: &Wanted) -> Result<Report> {
    let config = dir.load()?;
    check_stopped(dir)?;
    if let Some(report) = accept_later(dir, &config, wanted)? {
        return Ok(report);
    }
    let mut survey = Survey::of(dir, &config)?;
    for node in &config.nodes {
        if let Err(error) = super::start_node(dir, node.id, false) {
            survey.silent.push(format!("node {} was down, and could not be started: {error:#}", node.id));
        }
    }
    survey.ask(&config.nodes, &wanted.nodes);
    if let Some(path) = &wanted.from {
        let records = metadata::records_of(&read_file(path, &config)?)?;
        survey.ask(&nodes_of(&records), &[]);
        return recover_from(dir, &config, wanted, survey, (Some(path.display().to_string()), records));
    }
    // Nodes that a copy names may have newer ones.
    let mut chosen = survey.choose(wanted.copy)?;
    while let Some((number, file)) = chosen {
        let records = metadata::records_of(&file)?;
        survey.ask(&nodes_of(&records), &[]);
        chosen = survey.choose(wanted.copy)?;
        if chosen.as_ref().is_none_or(|(newest, _)| *newest == number) {
            let origin = Some(format!("copy {number} on a device"));
            return recover_from(dir, &config, wanted, survey, (origin, records));
        }
    }
    recover_from(dir, &config, wanted, survey, (None, Records::new()))
}

fn recover_from(
    dir: &GridDir,
    config: &GridConfig,
    wanted: &Wanted,
    mut survey: Survey,
    (origin, mut records): (Option<String>, Records),
) -> Result<Report> {
    let copied = roots_of(&records);
    let mut evidence = survey.evidence()?;
    evidence.is_partial = origin.is_none() && !wanted.complete;
    let random = u32::from_le_bytes(pki::random());
    let all = recover(&evidence, &copied, random, Mutations::default());
    let volumes = put_volumes(&mut records, all, &wanted.accept)?;
    let mut report = Report {
        copy: origin,
        copies: survey.copies.iter().map(|(number, file)| (*number, file.records.len())).collect(),
        records: records.len(),
        nodes: survey.nodes(),
        devices: survey.clients.values().map(|client| client.devices.len()).sum(),
        silent: survey.silent.clone(),
        volumes,
        store: config.meta.to_string(),
        done: false,
    };
    if let Some(meta) = store(dir, config, wanted)?.filter(|_| wanted.yes) {
        fill(&meta, &records, true).with_context(|| format!("metadata store {}", config.meta))?;
        if all_records(&meta)? != records {
            refuse!(
                Code::Changed,
                "{} changed while it was being filled: does a host use it? Stop all hosts, then try again",
                config.meta
            );
        }
        meta::complete(dir, &meta, config)?;
        report.done = true;
    }
    Ok(report)
}

/// The store to be filled: an empty one, or one that is to be replaced. Nothing where it is a file that is not there, or will be
/// put aside, and nothing is to be done yet.
fn store(dir: &GridDir, config: &GridConfig, wanted: &Wanted) -> Result<Option<Meta>> {
    let path = dir.meta_path();
    let is_file = config.meta == MetaConfig::Embedded;
    if is_file && !wanted.yes && (wanted.replace || !path.exists()) {
        return Ok(None);
    }
    if is_file && wanted.replace && path.exists() {
        // It may not be readable at all; what is left of it may be wanted by somebody.
        let aside = path.with_extension(format!("redb.before-{}", now_s()));
        std::fs::rename(&path, &aside).with_context(|| format!("cannot put {} aside", path.display()))?;
    }
    // Who gets in is no part of the metadata. An etcd that was emptied may have forgotten this machine.
    super::etcd::settle(dir, config)?;
    let meta = meta::connect(dir, config)?;
    check_no_hosts(&meta, &config.meta)?;
    let is_whole = meta.get(IMPORTING_KEY)?.is_none() && !all_records(&meta)?.is_empty();
    if is_whole && (is_file || meta.get(GRID_KEY)?.is_some()) && !wanted.replace {
        refuse!(
            Code::State,
            "the metadata store ({}) holds metadata of this grid, so nothing has to be recovered. If it was set back to an older \
             state, add --replace: what it holds is deleted then, and taken from the nodes",
            config.meta
        );
    }
    Ok(Some(meta))
}

fn read_file(path: &Path, config: &GridConfig) -> Result<MetadataFile> {
    let file = File::open(path).map_err(anyhow::Error::from).and_then(metadata::read_file);
    let file = file.with_context(|| format!("cannot use {}", path.display()))?;
    if file.grid != config.grid {
        refuse!(
            Code::Invalid,
            "{} is of grid {}, and this is grid {}; nothing was changed",
            path.display(),
            file.grid,
            config.grid
        );
    }
    Ok(file)
}

fn nodes_of(records: &Records) -> Vec<NodeConfig> {
    let of = |(key, value): (&String, &Vec<u8>)| {
        key.starts_with(NODE_PREFIX).then(|| decode::<NodeRecord>(value).ok()).flatten().map(|record| record.node)
    };
    records.iter().filter_map(of).collect()
}

fn roots_of(records: &Records) -> BTreeMap<VolumeId, Root> {
    let is_root = |key: &str| key.starts_with(VOLUME_PREFIX) && key.ends_with(ROOT_SUFFIX);
    let roots = records.iter().filter(|(key, _)| is_root(key)).filter_map(|(_, value)| Root::decode(value).ok());
    roots.map(|root| (root.volume, root)).collect()
}

/// What was asked of nodes.
struct Survey {
    way: Way,
    clients: BTreeMap<u32, NodeClient>,
    /// Nodes that were tried.
    tried: BTreeSet<(u32, SocketAddr)>,
    /// Of nodes that are known to be in the grid.
    devices: BTreeSet<DeviceId>,
    silent: Vec<String>,
    /// Copies of the records.
    copies: BTreeMap<u64, MetadataFile>,
}

impl Survey {
    fn of(dir: &GridDir, config: &GridConfig) -> Result<Survey> {
        let grid = config.grid_id()?;
        let certificates = Certificates::of(dir, grid);
        let load = || {
            let tls = certificates.load_host(&config.host.name)?;
            tls.revoked().replace(&revoked::load(&certificates.ca(), grid)?);
            anyhow::Ok(tls)
        };
        let way = Way { grid, host: config.host.name.clone(), tls: config.tls.then(load).transpose()? };
        let (clients, tried, devices) = (BTreeMap::new(), BTreeSet::new(), BTreeSet::new());
        Ok(Survey { way, clients, tried, devices, silent: Vec::new(), copies: BTreeMap::new() })
    }

    fn ask(&mut self, nodes: &[NodeConfig], others: &[(u32, SocketAddr)]) {
        let devices =
            nodes.iter().flat_map(|node| &node.devices).filter_map(|device| device.device.parse::<DeviceId>().ok());
        self.devices.extend(devices);
        let known = nodes.iter().map(|node| (node.id, node.address));
        for (node, address) in known.chain(others.iter().copied()) {
            if self.clients.contains_key(&node) || !self.tried.insert((node, address)) {
                continue;
            }
            match self.way.connect(node, address).and_then(|client| self.take(node, client)) {
                Ok(()) => self.silent.retain(|text| !text.starts_with(&format!("node {node} "))),
                Err(error) => self.silent.push(format!("{error:#}")),
            }
        }
    }

    fn take(&mut self, node: u32, mut client: NodeClient) -> Result<()> {
        self.devices.extend(client.devices.iter().map(|stat| stat.device));
        for (number, bytes) in copies::all(&mut client)? {
            if let Ok(file) = metadata::read_file(&bytes[..]) {
                self.copies.entry(number).or_insert(file);
            }
        }
        self.clients.insert(node, client);
        Ok(())
    }

    /// The newest copy, or the one that is wanted.
    fn choose(&self, wanted: Option<u64>) -> Result<Option<(u64, MetadataFile)>> {
        let chosen = match wanted {
            None => self.copies.iter().next_back(),
            Some(number) => {
                let found = self.copies.get_key_value(&number);
                Some(
                    found
                        .with_context(|| format!("no device has copy {number}; there are {:?}", self.copies.keys()))?,
                )
            }
        };
        Ok(chosen.map(|(number, file)| (*number, file.clone())))
    }

    /// Those that were asked.
    fn nodes(&self) -> Vec<String> {
        self.clients.iter().map(|(node, client)| format!("{node} at {}", client.address)).collect()
    }

    /// What all devices hold of volumes.
    fn evidence(&mut self) -> Result<Evidence> {
        let mut evidence = Evidence { unasked: self.devices.clone(), ..Evidence::default() };
        for (node, client) in &mut self.clients {
            if !client.knows_roots() {
                self.silent.push(format!("node {node} is of a release that keeps no copies of roots"));
                continue;
            }
            for device in client.serving() {
                match held_on(client, device) {
                    Ok(held) => {
                        evidence.unasked.remove(&device);
                        evidence.asked.insert(device);
                        held.into_iter().for_each(|(v, held)| evidence.volumes.entry(v).or_default().push(held));
                    }
                    Err(error) => self.silent.push(format!("node {node}, device {device}: {error:#}")),
                }
            }
        }
        for device in &evidence.unasked {
            if !self.silent.iter().any(|text| text.contains(&device.to_string())) {
                self.silent.push(format!("device {device} is out of reach"));
            }
        }
        Ok(evidence)
    }
}

fn held_on(client: &mut NodeClient, device: DeviceId) -> Result<Vec<(VolumeId, OnDevice)>> {
    let leg = Leg { node: client.node, device };
    let mut all = Vec::new();
    for held in client.volumes(device)? {
        if held.volume == copy::RECORDS_VOLUME {
            continue;
        }
        let root = match held.root {
            None => HeldRoot::None,
            Some(found) => {
                let shard = copy::root_copy_id(held.volume, found.epoch, found.sequence);
                let read = client.read_copy(device, shard).ok().and_then(|bytes| Root::decode(&bytes).ok());
                read.map_or(HeldRoot::Damaged, |root| HeldRoot::Copy { sequence: found.sequence, root: Box::new(root) })
            }
        };
        all.push((held.volume, OnDevice { leg, promised: held.promised, ledgers: held.ledgers, root }));
    }
    Ok(all)
}

/// Puts the volumes that there were into the records, those that are only found beside.
fn put_volumes(
    records: &mut Records,
    all: BTreeMap<VolumeId, Recovered>,
    accept: &[String],
) -> Result<Vec<VolumeReport>> {
    let mut reports = Vec::new();
    let mut unknown: BTreeSet<&str> = accept.iter().map(String::as_str).collect();
    for (volume, Recovered { root, doubt, .. }) in all {
        let id = volume.to_string();
        let was_deleted = root.deleted || records.contains_key(&format!("{DELETING_PREFIX}{id}"));
        let named = [root.name.as_str(), id.as_str()];
        let accepted = doubt.is_some() && accept.iter().any(|name| named.contains(&name.as_str()));
        unknown.retain(|name| !named.contains(name));
        let doubt = doubt.map(|doubt| doubt.to_string());
        if !was_deleted {
            let (name, size_bytes) = (root.name.clone(), root.size_bytes);
            let notes = Vec::new();
            reports.push(VolumeReport { name, volume: id, size_bytes, doubt: doubt.clone(), accepted, notes });
        }
        match doubt.filter(|_| !accepted && !was_deleted) {
            None => put_volume(records, &root),
            Some(why) => put_found(records, &root, why),
        }
    }
    if let Some(name) = unknown.first() {
        refuse!(Code::NotFound, "no volume {name} was found; nothing was changed");
    }
    renew_trash(records);
    let names = settle_names(records);
    describe(records, &names, &mut reports);
    Ok(reports)
}

/// Volumes are told of by the names that they have from here on, with what a copy of the records may have been too old for.
fn describe(records: &Records, names: &BTreeMap<VolumeId, String>, reports: &mut [VolumeReport]) {
    for report in reports.iter_mut().filter(|report| report.doubt.is_none() || report.accepted) {
        let Ok(volume) = report.volume.parse::<VolumeId>() else { continue };
        if let Some(name) = names.get(&volume) {
            report.name.clone_from(name);
        }
        let name = &report.name;
        let root = records.get(&root_key(volume)).and_then(|bytes| Root::decode(bytes).ok());
        if root.is_some_and(|root| root.key_id.is_some()) && !records.contains_key(&key_key(volume)) {
            report.notes.push(
                "its key is in no copy, and nobody can read it without: have it back with --replace --from FILE, where FILE is of a \
                 `holdfast meta export` since it was made"
                    .to_string(),
            );
        }
        if records.contains_key(&trash_key(volume)) {
            report.notes.push(format!("in the trash, for a day from now: `holdfast volume trash restore {name}`"));
        } else if !records.contains_key(&export_key(volume)) {
            report.notes.push(format!("not in service: `holdfast volume export {name}`"));
        }
    }
}

/// Whether a record says that the volume has a name.
fn is_name_of(root: &Root, key: &str, value: &[u8]) -> bool {
    key.starts_with(NAME_PREFIX) && decode::<NameRecord>(value).is_ok_and(|r| r.volume == root.volume.to_string())
}

/// The volume is as it was; [`settle_names`] gives it its name.
fn put_volume(records: &mut Records, root: &Root) {
    records.insert(root_key(root.volume), root.encode());
    records.remove(&found_key(root.volume));
}

/// Every volume gets the name that its root says: a copy of the records may be older than a renaming, and whoever asks for a
/// name must get the volume that is listed under it. Where two say the same, the one of which the copy knows it otherwise was
/// renamed since, and has it; the other gets a name of its own. Gives the names.
fn settle_names(records: &mut Records) -> BTreeMap<VolumeId, String> {
    let is_live = |root: &Root| {
        let id = root.volume;
        let is_going = records.contains_key(&format!("{DELETING_PREFIX}{id}"));
        !root.deleted && !is_going && !records.contains_key(&trash_key(id))
    };
    let mut roots: Vec<Root> = roots_of(records).into_values().filter(is_live).collect();
    let ids: BTreeSet<String> = roots.iter().map(|root| root.volume.to_string()).collect();
    let named = |(key, value): (&String, &Vec<u8>)| {
        let name = key.strip_prefix(NAME_PREFIX)?;
        let record: NameRecord = decode(value).ok().filter(|record: &NameRecord| ids.contains(&record.volume))?;
        Some((record.volume.clone(), (name.to_string(), record)))
    };
    let mut before: BTreeMap<String, (String, NameRecord)> = records.iter().filter_map(named).collect();
    records.retain(|key, value| named((key, value)).is_none());
    let was_renamed = |root: &Root| before.get(&root.volume.to_string()).is_some_and(|(name, _)| *name != root.name);
    roots.sort_by_key(|root| !was_renamed(root));
    let mut names = BTreeMap::new();
    for mut root in roots {
        let id = root.volume.to_string();
        if records.contains_key(&name_key(&root.name)) {
            root.name = format!("recovered-{id}");
            records.insert(root_key(root.volume), root.encode());
        }
        let record = before.remove(&id).map(|(_, record)| record).unwrap_or_else(|| NameRecord {
            volume: id,
            host: String::new(),
            origin: Some(String::new()),
            protected: false,
            other: Other::new(),
        });
        records.insert(name_key(&root.name), encode(&record));
        names.insert(root.volume, root.name);
    }
    names
}

/// What is in the trash by the copy may have been had back since. Under another name it surely was; what else is there stays
/// for a whole day more.
fn renew_trash(records: &mut Records) {
    let roots = roots_of(records);
    let was_renamed = |key: &str, record: &TrashRecord| {
        let root = key.strip_prefix(TRASH_PREFIX).and_then(|id| roots.get(&id.parse().ok()?));
        root.is_some_and(|root| root.name != record.name)
    };
    records.retain(|key, value| {
        let record = key.starts_with(TRASH_PREFIX).then(|| decode::<TrashRecord>(value).ok()).flatten();
        let Some(record) = record else { return true };
        let stays = !was_renamed(key, &record);
        *value = encode(&TrashRecord { minutes: 0, ..record });
        stays
    });
}

/// The volume is kept beside: without a root, a name, or a host that serves it.
fn put_found(records: &mut Records, root: &Root, why: String) {
    let record = FoundRecord {
        name: root.name.clone(),
        size_bytes: root.size_bytes,
        why,
        root: to_hex(&root.encode()),
        other: Other::new(),
    };
    records.retain(|key, value| !is_name_of(root, key, value));
    records.remove(&root_key(root.volume));
    records.remove(&export_key(root.volume));
    records.insert(found_key(root.volume), encode(&record));
}

/// Volumes that an earlier recovery has found are taken now, without asking nodes again.
fn accept_later(dir: &GridDir, config: &GridConfig, wanted: &Wanted) -> Result<Option<Report>> {
    if wanted.accept.is_empty() || wanted.replace {
        return Ok(None);
    }
    let Ok(meta) = meta::open(dir, config) else { return Ok(None) };
    let mut records = all_records(&meta)?;
    let found: Vec<FoundRecord> = records
        .iter()
        .filter(|(key, _)| key.starts_with(FOUND_PREFIX))
        .map(|(key, value)| decode(value).with_context(|| format!("metadata record {key} is damaged")))
        .collect::<Result<_>>()?;
    if found.is_empty() {
        return Ok(None);
    }
    check_no_hosts(&meta, &config.meta)?;
    let mut volumes = Vec::new();
    for name in &wanted.accept {
        let root_of = |record: &FoundRecord| from_hex(&record.root).and_then(|bytes| Root::decode(&bytes).ok());
        let roots = found.iter().filter_map(|record| Some((record, root_of(record)?)));
        let mut fitting = roots.filter(|(record, root)| record.name == *name || root.volume.to_string() == *name);
        let Some((record, root)) = fitting.next() else {
            refuse!(Code::NotFound, "no volume {name} was found; nothing was changed")
        };
        if fitting.next().is_some() {
            refuse!(
                Code::Invalid,
                "several volumes named {name} were found: name the one that is meant by its id; nothing was changed"
            );
        }
        put_volume(&mut records, &root);
        volumes.push(VolumeReport {
            name: record.name.clone(),
            volume: root.volume.to_string(),
            size_bytes: root.size_bytes,
            doubt: Some(record.why.clone()),
            accepted: true,
            notes: Vec::new(),
        });
    }
    let names = settle_names(&mut records);
    describe(&records, &names, &mut volumes);
    if wanted.yes {
        fill(&meta, &records, true)?;
        meta::complete(dir, &meta, config)?;
    }
    Ok(Some(Report {
        copy: None,
        copies: BTreeMap::new(),
        records: records.len(),
        nodes: Vec::new(),
        devices: 0,
        silent: Vec::new(),
        volumes,
        store: config.meta.to_string(),
        done: wanted.yes,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_base::GridId;
    use holdfast_format::geometry::Layout;

    fn root(volume: u128, name: &str) -> Root {
        Root::new(GridId(1), VolumeId(volume), name, 1 << 30, Layout::DEFAULT)
    }

    fn named(volume: u128, protected: bool) -> Vec<u8> {
        let (volume, host, origin) = (VolumeId(volume).to_string(), String::new(), Some(String::new()));
        encode(&NameRecord { volume, host, origin, protected, other: Other::new() })
    }

    /// Under which names which volumes can be found.
    fn names(records: &Records) -> Vec<(&str, VolumeId, bool)> {
        let name = |(key, value): (&'_ String, &Vec<u8>)| -> Option<(VolumeId, bool)> {
            key.strip_prefix(NAME_PREFIX)?;
            let record: NameRecord = decode(value).unwrap();
            Some((record.volume.parse().unwrap(), record.protected))
        };
        records
            .iter()
            .filter_map(|(key, value)| name((key, value)).map(|(id, is)| (&key[NAME_PREFIX.len()..], id, is)))
            .collect()
    }

    #[test]
    fn whoever_asks_for_a_name_gets_the_volume_that_is_called_so() {
        // By the copy 1 was a, 2 was b, 3 was c; since then a became web1, and b a. A clone is called x.
        let mut records = Records::from([
            (name_key("a"), named(1, true)),
            (name_key("b"), named(2, false)),
            (name_key("c"), named(3, false)),
            (name_key("x"), named(77, false)),
        ]);
        for root in [root(1, "web1"), root(2, "a"), root(3, "c"), root(4, "new"), root(5, "x")] {
            put_volume(&mut records, &root);
        }
        let told = settle_names(&mut records);
        let id = |volume| VolumeId(volume);
        let other = format!("recovered-{}", id(5));
        let expected = [
            ("a", id(2), false),
            ("c", id(3), false),
            ("new", id(4), false),
            (other.as_str(), id(5), false),
            ("web1", id(1), true),
            ("x", id(77), false),
        ];
        assert_eq!(names(&records), expected);
        for (volume, root) in roots_of(&records) {
            assert_eq!(told[&volume], root.name, "the root says the same");
        }
        let before = records.clone();
        settle_names(&mut records);
        assert_eq!(records, before, "it is settled");
    }

    #[test]
    fn of_two_with_one_name_the_one_that_was_renamed_has_it() {
        let mut records = Records::from([(name_key("a"), named(1, false)), (name_key("b"), named(2, false))]);
        put_volume(&mut records, &root(1, "a"));
        put_volume(&mut records, &root(2, "a"));
        settle_names(&mut records);
        let other = format!("recovered-{}", VolumeId(1));
        assert_eq!(names(&records), [("a", VolumeId(2), false), (other.as_str(), VolumeId(1), false)]);
    }

    #[test]
    fn what_is_in_the_trash_has_its_day_again_and_no_name() {
        let record = TrashRecord { name: "a".to_string(), taken_bytes: 7, minutes: 1439, other: Other::new() };
        let mut records = Records::from([(trash_key(VolumeId(1)), encode(&record))]);
        put_volume(&mut records, &root(1, "a"));
        renew_trash(&mut records);
        settle_names(&mut records);
        let kept: TrashRecord = decode(&records[&trash_key(VolumeId(1))]).unwrap();
        assert_eq!((kept.minutes, kept.taken_bytes), (0, 7));
        assert_eq!(names(&records), []);
        // It was had back as b since the copy.
        put_volume(&mut records, &root(1, "b"));
        renew_trash(&mut records);
        settle_names(&mut records);
        assert_eq!(names(&records), [("b", VolumeId(1), false)]);
        assert!(!records.contains_key(&trash_key(VolumeId(1))));
    }
}
