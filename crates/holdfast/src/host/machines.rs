//! Machines of the grid: which there are, and how one leaves it for good.
//!
//! ```text
//! machine/NAME         (metadata) what a machine's host has told of it at its last start
//! removed/ID           (metadata) there for ever once a machine has left: with its nodes; nobody gets their numbers
//! DIR/machine.json     this machine's id
//! DIR/removed          there when its host has found it among those that have left
//! ```
//! A machine that is there leaves in three steps, each of which can be repeated: its devices are emptied, it is found
//! to hold nothing that is needed, it is out. One that is dead is out at once, and what it held is made again. Out is
//! what one transaction says: its nodes' records go, the one that it has left comes, and where there is TLS the list
//! of revoked certificates names it. What follows from that can be done again by the next attempt.
//!
//! Faults: a machine that comes back after it was taken for dead finds itself among those that have left, says so and
//! ends; the others let its host in no more (its certificates are revoked), and ask none of its nodes anything.

use super::catalog::{Catalog, REVOKED_KEY};
use super::commands::{Command, LiveStatus, Weakness};
use super::control::ControlPlane;
use super::errands::Errand;
use super::presence::home_of;
use super::signer;
use crate::grid::certs::{Certificates, now_s, roles};
use crate::grid::etcd::Door;
use crate::grid::layout::{GridConfig, GridDir, NodeConfig, write_durably};
use crate::grid::revoked;
use crate::logger;
use crate::resources;
use anyhow::{Context, Result, bail};
use holdfast_api::{ANNOUNCED_S_MAX, Announcement, Code, Error, LinkState, MachineInfo, MachineNode, Response, refuse};
use holdfast_base::{DeviceId, MetaVersion, NodeId};
use holdfast_format::meta::{
    MACHINE_PREFIX, MachineRecord, Other, RemovedNode, RemovedRecord, decode, encode, host_key, machine_key, node_key,
    removed_key,
};
use holdfast_host::Order;
use holdfast_runtime::meta::{Commit, Compare, Write};
use holdfast_runtime::pki::Role;
use holdfast_volume::Question;
use rustix::process::{Signal, getpid, kill_process};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Records of nodes that go in the very transaction in which their machine does. Those of more count for nothing from
/// then on, and go after it.
const NODES_AT_ONCE: usize = 50;

/// Attempts at a transaction that others race for.
const COMMITS_MAX: usize = 8;

/// How long the host that signs may take to have a machine leave.
const REMOVAL_MAX: Duration = Duration::from_secs(120);

/// How long volumes that are being opened are waited for, and how often it is looked.
const OPENING_MAX: Duration = Duration::from_secs(15);
const LOOK_PACE: Duration = Duration::from_millis(200);

/// How long another host may take to say what its volumes would lose.
const QUESTION_MAX: Duration = Duration::from_secs(5);

/// Pause before a host that has found itself removed ends: whoever asked for that hears the answer first.
const LAST_WORDS: Duration = Duration::from_secs(1);

#[derive(Serialize, Deserialize)]
struct MachineFile {
    id: String,
}

/// This machine, as far as records can tell of it.
struct Own {
    id: Option<String>,
    name: String,
    home: String,
    devices: BTreeSet<String>,
}

impl Own {
    fn of(dir: &GridDir, config: &GridConfig) -> Result<Own> {
        let id = read_id(dir)?;
        let devices = config.nodes.iter().flat_map(|node| &node.devices).map(|device| device.device.clone());
        Ok(Own { id, name: config.host.name.clone(), home: home_of(dir), devices: devices.collect() })
    }

    /// A directory that was made anew in the same place is another machine.
    fn is(&self, removed: &RemovedRecord) -> bool {
        let is_it = match (&self.id, &removed.id) {
            (Some(own), Some(removed)) => own == removed,
            // Of an earlier release, which gave no ids.
            (None, None) => self.name == removed.name && Some(&self.home) == removed.home.as_ref(),
            // One that is just joining has no id yet.
            (None, Some(_)) | (Some(_), None) => false,
        };
        is_it || removed.nodes.iter().flat_map(|node| &node.devices).any(|device| self.devices.contains(device))
    }
}

fn read_id(dir: &GridDir) -> Result<Option<String>> {
    let path = dir.machine_path();
    match fs::read(&path) {
        Ok(bytes) => {
            let file: MachineFile = serde_json::from_slice(&bytes)
                .with_context(|| format!("{} is damaged; restore a copy of it, or remove it", path.display()))?;
            Ok(Some(file.id))
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e).with_context(|| format!("cannot read {}", path.display())),
    }
}

/// Fails where this machine was taken out of the grid, and notes it for commands.
pub fn check_member(dir: &GridDir, config: &GridConfig, catalog: &Catalog) -> Result<()> {
    why_no_member(dir, config, catalog)?.map_or(Ok(()), |why| bail!(why))
}

/// Why this machine is none of the grid's any more, if it was taken out; noted for commands.
pub fn why_no_member(dir: &GridDir, config: &GridConfig, catalog: &Catalog) -> Result<Option<String>> {
    let own = Own::of(dir, config)?;
    let Some((_, record)) = catalog.removed()?.into_iter().find(|(_, removed)| own.is(removed)) else {
        return Ok(None);
    };
    let why = format!(
        "this machine, {}, was taken out of grid {} at {} by host {}: nothing that it holds is used any more, and \
         no host or node of the grid has to do with it. Stop what still runs here with `holdfast grid down`, and \
         move {} away; then it can join as a new machine (`holdfast grid up --join`)",
        record.name,
        config.grid,
        logger::moment(record.removed_s),
        record.by,
        dir.root().display()
    );
    write_durably(&dir.removed_path(), why.as_bytes())?;
    Ok(Some(why))
}

/// Tells the others of this machine.
pub(super) fn announce(
    dir: &GridDir,
    config: &GridConfig,
    catalog: &Catalog,
    address: Option<SocketAddr>,
) -> Result<()> {
    let id = match read_id(dir)? {
        Some(id) => id,
        None => {
            let id = uuid::Uuid::new_v4().to_string();
            write_durably(&dir.machine_path(), &encode(&MachineFile { id: id.clone() }))?;
            id
        }
    };
    let grid = config.grid_id()?;
    let certificates = config.tls.then(|| Certificates::of(dir, grid));
    // One that can't be read is told of where it is used.
    let leaves = certificates.as_ref().and_then(|certificates| certificates.list(&roles(config)).ok());
    let record = MachineRecord {
        id,
        home: home_of(dir),
        address: address.map(|address| address.to_string()),
        release: env!("CARGO_PKG_VERSION").to_string(),
        started_s: now_s(),
        gone_s: None,
        certificates_end_s: leaves.and_then(|leaves| leaves.iter().map(|leaf| leaf.expires).min()),
        signs: certificates.is_some_and(|certificates| certificates.has_authority()),
        announced_until_s: None,
        other: Other::new(),
    };
    catalog.update(&machine_key(&config.host.name), |found| {
        // What others have said of it stays.
        let found = found.and_then(|bytes| decode::<MachineRecord>(bytes).ok());
        let (announced_until_s, other) = found.map_or_else(Default::default, |f| (f.announced_until_s, f.other));
        Ok(Some(Some(encode(&MachineRecord { announced_until_s, other, ..record.clone() }))))
    })
}

fn announced_until(record: &MachineRecord) -> Option<u64> {
    let now_s = now_s();
    record.announced_until_s.filter(|until_s| (now_s + 1..=now_s + ANNOUNCED_S_MAX).contains(until_s))
}

/// A machine as records show it.
struct Facts {
    name: String,
    record: Option<(MetaVersion, MachineRecord)>,
    nodes: Vec<(MetaVersion, NodeConfig)>,
    /// Its host says that it is there.
    is_up: bool,
}

impl ControlPlane {
    /// Until when this machine's certificates are good has changed, or whether it signs.
    pub(super) fn note_certificates(&self, config: &GridConfig) -> Result<()> {
        let leaves = self.revocations.certificates.list(&roles(config))?;
        let (end, signs) =
            (leaves.iter().map(|leaf| leaf.expires).min(), self.revocations.certificates.has_authority());
        self.catalog.update(&machine_key(&config.host.name), |found| {
            let found = found.and_then(|bytes| decode::<MachineRecord>(bytes).ok());
            Ok(found.map(|found| Some(encode(&MachineRecord { certificates_end_s: end, signs, ..found }))))
        })
    }
}

impl Facts {
    fn node_ids(&self) -> BTreeSet<NodeId> {
        self.nodes.iter().map(|(_, node)| NodeId(node.id)).collect()
    }

    fn devices(&self) -> Vec<String> {
        self.nodes.iter().flat_map(|(_, node)| &node.devices).map(|device| device.device.clone()).collect()
    }

    fn removed(&self, by: &str, made_good: bool) -> RemovedRecord {
        let nodes = self.nodes.iter().map(|(_, node)| RemovedNode {
            node: node.id,
            devices: node.devices.iter().map(|device| device.device.clone()).collect(),
            other: Other::new(),
        });
        let record = self.record.as_ref().map(|(_, record)| record);
        RemovedRecord {
            name: self.name.clone(),
            id: record.map(|record| record.id.clone()),
            home: record.map(|record| record.home.clone()),
            nodes: nodes.collect(),
            removed_s: now_s(),
            by: by.to_string(),
            made_good: made_good || self.nodes.is_empty(),
            other: Other::new(),
        }
    }
}

impl Catalog {
    pub(super) fn machine_records(&self) -> Result<BTreeMap<String, (MetaVersion, MachineRecord)>> {
        let listed = self.known().list(MACHINE_PREFIX)?.records.into_iter();
        // One that can't be read says nothing.
        let records = listed
            .filter_map(|l| Some((l.key[MACHINE_PREFIX.len()..].to_string(), (l.version, decode(&l.value).ok()?))));
        Ok(records.collect())
    }

    /// All machines of which there is a record of any kind.
    fn machines(&self, hosts: &BTreeSet<String>) -> Result<BTreeMap<String, Facts>> {
        let records = self.machine_records()?;
        let nodes = self.node_records()?;
        let served: Vec<String> = self.all()?.into_iter().filter_map(|entry| entry.served_by).collect();
        let of_nodes = nodes.iter().map(|(_, machine, _)| machine);
        let names: BTreeSet<&String> = records.keys().chain(of_nodes).chain(hosts).chain(&served).collect();
        let facts = |name: &String| Facts {
            name: name.clone(),
            record: records.get(name).cloned(),
            nodes: nodes
                .iter()
                .filter(|(_, m, _)| m == name)
                .map(|(version, _, node)| (*version, node.clone()))
                .collect(),
            is_up: hosts.contains(name),
        };
        Ok(names.into_iter().map(|name| (name.clone(), facts(name))).collect())
    }
}

/// What volumes at one host have left on devices that are to be empty.
#[derive(Serialize, Deserialize)]
pub(super) struct Left {
    pub devices: BTreeMap<String, u64>,
    /// A volume is being opened, and says nothing yet.
    pub unknown: bool,
}

impl ControlPlane {
    pub(super) fn hosts_there(&self) -> BTreeSet<String> {
        self.records.view(|view| view.hosts().keys().cloned().collect())
    }

    /// All machines of the grid, as far as anybody knows.
    pub(super) fn machines(&self) -> Result<Vec<MachineInfo>> {
        let live = self.live()?;
        let entries = self.catalog.all()?;
        let served = |name: &String| {
            let own = entries.iter().filter(|entry| entry.clone.is_none() && entry.served_by.as_ref() == Some(name));
            own.map(|entry| entry.name().to_string()).collect()
        };
        let info = |facts: Facts| {
            let record = facts.record.as_ref().map(|(_, record)| record);
            let node = |(_, node): &(MetaVersion, NodeConfig)| {
                let told = live.nodes.iter().find(|told| told.id == node.id);
                MachineNode {
                    id: node.id,
                    address: node.address.to_string(),
                    link: told.map_or(LinkState::Down, |told| told.link),
                    wire: told.and_then(|told| told.wire),
                }
            };
            MachineInfo {
                up: facts.is_up,
                since_s: record
                    .and_then(|r| if facts.is_up { (r.started_s > 0).then_some(r.started_s) } else { r.gone_s }),
                address: record.and_then(|record| record.address.clone()),
                release: record.map(|record| record.release.clone()).filter(|release| !release.is_empty()),
                certificates_end_s: record.and_then(|record| record.certificates_end_s),
                signs: record.is_some_and(|record| record.signs),
                announced_until_s: record.and_then(announced_until),
                nodes: facts.nodes.iter().map(node).collect(),
                volumes: served(&facts.name),
                name: facts.name,
            }
        };
        Ok(self.catalog.machines(&self.hosts_there())?.into_values().map(info).collect())
    }

    /// Says that a machine will be away for so long, or is back before its time.
    pub(super) fn announce(&self, name: &str, seconds: Option<u64>) -> Result<()> {
        if !self.catalog.machine_records()?.contains_key(name) {
            refuse!(Code::NotFound, "the grid has no machine {name}; `holdfast machine list` shows them");
        }
        if seconds.is_some_and(|seconds| !(1..=ANNOUNCED_S_MAX).contains(&seconds)) {
            refuse!(Code::Invalid, "a machine is announced to be away for a second to thirty days");
        }
        let announced_until_s = seconds.map(|seconds| now_s() + seconds);
        self.catalog.update(&machine_key(name), |found| {
            let found = found.and_then(|bytes| decode::<MachineRecord>(bytes).ok());
            Ok(found.map(|found| Some(encode(&MachineRecord { announced_until_s, ..found }))))
        })
    }

    /// Machines that are to be away now, as somebody has said, and until when.
    pub(super) fn announced(&self) -> Result<Vec<Announcement>> {
        let records = self.catalog.machine_records()?.into_iter();
        let announced = |(machine, (_, record))| Some(Announcement { machine, until_s: announced_until(&record)? });
        Ok(records.filter_map(announced).collect())
    }

    /// Hosts that were there and are not any more, and the other way round: since when, for whoever looks later.
    pub(super) fn note_absences(&self) -> Result<()> {
        let hosts = self.hosts_there();
        for (name, (_, record)) in self.catalog.machine_records()? {
            let is_gone = !hosts.contains(&name);
            if record.gone_s.is_some() == is_gone {
                continue;
            }
            let note = |found: Option<&[u8]>| {
                let found = found.and_then(|bytes| decode::<MachineRecord>(bytes).ok());
                let news = found.filter(|found| found.id == record.id && found.gone_s == record.gone_s);
                Ok(news.map(|found| Some(encode(&MachineRecord { gone_s: is_gone.then(now_s), ..found }))))
            };
            self.catalog.update(&machine_key(&name), note)?;
        }
        Ok(())
    }

    /// Whether this machine was taken out of the grid: then nothing that it holds is anybody's.
    pub(super) fn is_removed(&self) -> Result<bool> {
        Ok(why_no_member(&self.dir, &self.dir.load()?, &self.catalog)?.is_some())
    }

    /// Ends this host where its machine was taken out of the grid.
    pub(super) fn leave_if_removed(&self) -> Result<()> {
        let config = self.dir.load()?;
        let Some(why) = why_no_member(&self.dir, &config, &self.catalog)? else { return Ok(()) };
        logger::error(format_args!("{why}"));
        std::thread::sleep(LAST_WORDS);
        kill_process(getpid(), Signal::TERM).context("this host can't end itself")
    }

    /// Has the host that signs do it, where there is TLS and that is another one; `None` where this one is to, or to
    /// say why not.
    pub(super) fn pass_removal_on(&self, name: &str, dead: bool, accept_loss: bool) -> Option<Result<Response>> {
        if !self.config().tls || self.revocations.certificates.has_authority() {
            return None;
        }
        let signing = self.catalog.machine_records().ok()?.into_iter().filter(|(_, (_, record))| record.signs);
        let mut signing: Vec<String> = signing.map(|(signer, _)| signer).filter(|signer| signer != name).collect();
        let there = self.hosts_there();
        signing.sort_by_key(|signer| !there.contains(signer));
        let signer = signing.into_iter().next()?;
        if !there.contains(&signer) {
            let why = format!(
                "machine {name} stays in the grid: its certificates are to be revoked, by host {signer}, which has \
                 the key of the grid's authority and is gone; bring that up (`holdfast grid up` there)"
            );
            return Some(Err(Error::new(Code::Unavailable, why).into()));
        }
        let errand = Errand::RemoveMachine { name: name.to_string(), dead, accept_loss };
        let done = self.send_errand(&signer, &errand, REMOVAL_MAX).and_then(|done| done);
        Some(done.and_then(|told| serde_json::from_value(told).context("that host's answer makes no sense")))
    }

    /// Takes a machine out of the grid for good, or goes on with it. To be called alone.
    pub(super) fn remove_machine(&self, name: &str, dead: bool, accept_loss: bool) -> Result<Response> {
        self.records.sync()?;
        let mut machines = self.catalog.machines(&self.hosts_there())?;
        let names = machines.keys().cloned().collect::<Vec<_>>().join(", ");
        let Some(facts) = machines.remove(name) else {
            // What follows from its removal may have been cut short.
            let removed = self.catalog.removed()?.into_iter().map(|(_, record)| record).filter(|r| r.name == name);
            let Some(record) = removed.max_by_key(|record| record.removed_s) else {
                refuse!(Code::NotFound, "this grid has no machine {name}; its machines are {names}");
            };
            return Ok(Response::Leaving { waits: None, notes: self.follow_removal(&record)? });
        };
        self.check_may_leave(&facts, machines.values().any(|other| other.is_up))?;
        if dead {
            self.check_dead(&facts)?;
            if !accept_loss {
                self.check_losses(&facts)?;
            }
        } else if let Some(waits) = self.empty_machine(&facts)? {
            return Ok(Response::Leaving { waits: Some(waits), notes: Vec::new() });
        }
        let has_key = facts.record.as_ref().is_some_and(|(_, record)| record.signs);
        let record = self.commit_removal(facts, dead)?;
        logger::warn(format_args!("machine {name} is taken out of the grid"));
        let mut notes = self.follow_removal(&record)?;
        if has_key {
            notes.push(format!(
                "machine {name} has a copy of the key of the grid's authority still, and who has that lets anybody in: \
                 delete tls/ca.key of its grid's directory before others get that machine or its disks"
            ));
        }
        Ok(Response::Leaving { waits: None, notes })
    }

    fn check_may_leave(&self, facts: &Facts, is_another_up: bool) -> Result<()> {
        let name = &facts.name;
        let config = self.config();
        let signs_here = self.revocations.certificates.has_authority();
        let signs = facts.record.as_ref().is_some_and(|(_, record)| record.signs);
        // Another that has it, and is there, signs from then on.
        let is_signed_elsewhere = signs_here && *name != config.host.name;
        if config.tls && !is_signed_elsewhere && (signs || signs_here) {
            refuse!(
                Code::State,
                "machine {name} has the key of the grid's authority, and this one has not: without it no machine could \
                 join any more, and no certificate be revoked. Bring a copy of it to another machine, and remove {name} \
                 there: `holdfast grid tls authority export FILE` on {name}, or a copy that was taken while it lived, and \
                 `holdfast grid tls authority import FILE`"
            );
        }
        if config.tls && !signs_here {
            refuse!(
                Code::State,
                "machine {name} stays in the grid: its certificates are to be revoked, and no machine has said that \
                 it has the key of the grid's authority; run this command on the grid's first machine"
            );
        }
        if !is_another_up {
            refuse!(
                Code::Unavailable,
                "machine {name} is the only one that is up: nothing would be left; `holdfast grid down` stops it"
            );
        }
        Ok(())
    }

    /// Refuses what is there after all.
    fn check_dead(&self, facts: &Facts) -> Result<()> {
        let name = &facts.name;
        if facts.is_up {
            refuse!(
                Code::State,
                "machine {name} is not dead: its host says that it is there. `holdfast machine remove {name}` \
                 without --dead empties it first"
            );
        }
        let live = self.live()?;
        let answers = live
            .nodes
            .iter()
            .find(|node| node.link != LinkState::Down && facts.nodes.iter().any(|(_, own)| own.id == node.id));
        if let Some(node) = answers {
            refuse!(
                Code::State,
                "machine {name} is not dead: its node {} answers. Start its host (`holdfast grid up` there), then \
                 `holdfast machine remove {name}` without --dead empties it; or stop what runs there",
                node.id
            );
        }
        Ok(())
    }

    /// What volumes in service here would lose without these nodes.
    pub(super) fn losses_here(&self, nodes: &BTreeSet<NodeId>) -> Result<Vec<Weakness>> {
        self.inspect(Question::Lost(nodes.clone()))
    }

    /// What volumes in service anywhere would lose without these nodes.
    fn losses_everywhere(&self, nodes: &BTreeSet<NodeId>) -> Result<Vec<Weakness>> {
        let mut losses = self.losses_here(nodes)?;
        for host in self.presence.hosts_that_run_errands()? {
            let errand = Errand::Losses { nodes: nodes.iter().map(|node| node.0).collect() };
            let told = self.send_errand(&host, &errand, QUESTION_MAX).and_then(|done| done).with_context(|| {
                format!("host {host} does not say what its volumes would lose; mend that, or add --accept-loss")
            })?;
            losses.extend(serde_json::from_value::<Vec<Weakness>>(told).context("a host's answer makes no sense")?);
        }
        Ok(losses)
    }

    /// Refuses where volumes have data that can be read nowhere else.
    fn check_losses(&self, facts: &Facts) -> Result<()> {
        let nodes = facts.node_ids();
        if nodes.is_empty() {
            return Ok(());
        }
        // The volumes of a host that has just died may be opening elsewhere.
        let patience = Instant::now() + OPENING_MAX;
        let losses = loop {
            let losses = self.losses_everywhere(&nodes)?;
            if !losses.iter().any(|loss| loss.unknown) || Instant::now() > patience {
                break losses;
            }
            std::thread::sleep(LOOK_PACE);
        };
        let mut told: Vec<String> = losses.iter().map(describe_loss).collect();
        told.extend(self.doubtful_volumes(facts)?);
        if told.is_empty() {
            return Ok(());
        }
        refuse!(
            Code::Redundancy,
            "machine {0} stays in the grid, since its devices may have what nothing else has: {1}. Bring the \
             machine back, or what else is away; or, if it is lost, add --accept-loss: what only it has can't be \
             read any more, ever",
            facts.name,
            told.join("; ")
        );
    }

    /// Volumes that nobody has open, as far as their layouts alone don't say that they can do without the machine.
    fn doubtful_volumes(&self, facts: &Facts) -> Result<Vec<String>> {
        let (live, hosts) = (self.live()?, self.hosts_there());
        let away = |node: &&holdfast_api::NodeInfo| {
            node.link == LinkState::Down && !facts.nodes.iter().any(|(_, own)| own.id == node.id)
        };
        let others_away: Vec<_> = live.nodes.iter().filter(away).collect();
        let lost_nodes = facts.nodes.len() + others_away.len();
        let known = self.config();
        let devices = |id: u32| known.nodes.iter().find(|node| node.id == id).map_or(0, |node| node.devices.len());
        let lost_devices = facts.devices().len() + others_away.iter().map(|node| devices(node.id)).sum::<usize>();
        let is_open = |host: &Option<String>| host.as_ref().is_some_and(|host| hosts.contains(host));
        let closed = self.catalog.all_strictly()?.into_iter().filter(|e| e.clone.is_none() && !is_open(&e.served_by));
        let told = closed.filter_map(|entry| {
            let layout = entry.root.layout;
            let lost = if layout.is_on_devices() { lost_devices } else { lost_nodes };
            let is_spared = lost <= usize::from(layout.failures());
            (!is_spared).then(|| {
                format!(
                    "volume {0} ({layout}) is in service nowhere, and bears the loss of {1}; `holdfast volume \
                     export {0}` opens it, and what it lacks is known then",
                    entry.name(),
                    layout.failures()
                )
            })
        });
        Ok(told.collect())
    }

    /// Has everything moved off the machine; gives what that waits for.
    fn empty_machine(&self, facts: &Facts) -> Result<Option<String>> {
        let name = &facts.name;
        if !facts.is_up {
            refuse!(
                Code::State,
                "machine {name} does not say that it is there: start its host (`holdfast grid up` there), so that \
                 it can be emptied; if it is dead for good, add --dead"
            );
        }
        let entries = self.catalog.all_strictly()?;
        let served: Vec<&str> = entries
            .iter()
            .filter(|e| e.clone.is_none() && e.served_by.as_ref() == Some(name))
            .map(|e| e.name())
            .collect();
        if let Some(volume) = served.first() {
            refuse!(
                Code::State,
                "machine {name} stays in the grid: its host has {} in service; `holdfast volume handover {volume} \
                 --to HOST` moves a volume to another host, `holdfast volume unexport {volume}` takes it out of \
                 service",
                served.join(", ")
            );
        }
        let devices = facts.devices();
        if devices.is_empty() {
            return Ok(None);
        }
        let draining = self.catalog.draining()?;
        if devices.iter().any(|device| device.parse::<DeviceId>().is_ok_and(|device| !draining.contains(&device))) {
            self.drain(&devices, false, false).with_context(|| format!("machine {name} stays in the grid"))?;
            return Ok(Some(format!("the devices of machine {name} are being emptied")));
        }
        Ok(self.check_removable(&devices, false).err().map(|error| format!("{error:#}")))
    }

    /// From here on the machine is none of the grid's.
    fn commit_removal(&self, mut facts: Facts, dead: bool) -> Result<RemovedRecord> {
        let name = facts.name.clone();
        for _ in 0..COMMITS_MAX {
            let record = facts.removed(self.catalog.host(), !dead);
            let key = removed_key(record.id.as_deref().unwrap_or(&uuid::Uuid::new_v4().to_string()));
            let (mut compares, mut writes) = (Vec::new(), Vec::new());
            let compare = |key: &str, version| Compare { key: key.to_string(), version };
            let write = |key: &str, value: Option<Vec<u8>>| Write { key: key.to_string(), value, lease: None };
            for (version, node) in facts.nodes.iter().take(NODES_AT_ONCE) {
                compares.push(compare(&node_key(node.id), *version));
                writes.push(write(&node_key(node.id), None));
            }
            compares.push(compare(&key, MetaVersion::ABSENT));
            writes.push(write(&key, Some(encode(&record))));
            if let Some((version, _)) = &facts.record {
                compares.push(compare(&machine_key(&name), *version));
                writes.push(write(&machine_key(&name), None));
            }
            if dead {
                compares.push(compare(&host_key(&name), MetaVersion::ABSENT));
            }
            if let Some((version, list)) = self.revoking(&facts, record.removed_s)? {
                compares.push(compare(REVOKED_KEY, version));
                writes.push(write(REVOKED_KEY, Some(list)));
            }
            if let Commit::Done(_) = self.catalog.store().commit(&compares, &writes)? {
                return Ok(record);
            }
            self.records.sync()?;
            let found = self.catalog.machines(&self.hosts_there())?.remove(&name);
            facts = found.with_context(|| format!("machine {name} was taken out by somebody else meanwhile"))?;
            if dead {
                self.check_dead(&facts)?;
            }
        }
        refuse!(Code::State, "machine {name} stays in the grid: its records change all the time; try again")
    }

    /// The list of revoked certificates with those of the machine on it, and the version of the record that it
    /// replaces.
    fn revoking(&self, facts: &Facts, until_s: u64) -> Result<Option<(MetaVersion, Vec<u8>)>> {
        if self.revocations.lists.is_empty() {
            return Ok(None);
        }
        self.take_in_revoked()?;
        let certificates = &self.revocations.certificates;
        let version = self.catalog.store().get(REVOKED_KEY)?.map_or(MetaVersion::ABSENT, |found| found.version);
        let mut list = revoked::load(&certificates.ca(), certificates.grid())?;
        list.add(Role::Host(facts.name.clone()), until_s);
        facts.node_ids().into_iter().for_each(|node| list.add(Role::Node(node), until_s));
        Ok(Some((version, list.sign(&certificates.authority()?)?.into_bytes())))
    }

    /// What follows from a removal; gives what an operator should know of it.
    fn follow_removal(&self, record: &RemovedRecord) -> Result<Vec<String>> {
        let name = &record.name;
        self.take_in_revoked()?;
        for removed in &record.nodes {
            self.catalog.update(&node_key(removed.node), |found| Ok(found.map(|_| None)))?;
            for device in removed.devices.iter().filter_map(|device| device.parse().ok()) {
                self.catalog.set_draining(device, false)?;
                self.catalog.set_kept(device, false)?;
            }
        }
        let mut notes = Vec::new();
        if let Err(error) = self.shut_out_of_etcd() {
            notes.push(format!(
                "etcd still lets machine {name} in, as far as is known: {error:#}. The host that signs goes on \
                 trying; its log says when it is done"
            ));
        }
        // Another machine may have the name by now; the host of this one may still be there for a moment.
        let of_nodes = self.catalog.node_machines()?;
        let is_taken =
            of_nodes.values().any(|machine| machine == name) || self.catalog.machine_records()?.contains_key(name);
        if !is_taken {
            let mut ended = Vec::new();
            for entry in self.catalog.all()?.iter().filter(|entry| entry.clone.is_none()) {
                if self.catalog.forget_host(entry.root.volume, name)? {
                    ended.push(entry.name().to_string());
                }
            }
            if let Some(first) = ended.first() {
                notes.push(format!(
                    "nobody has {} in service any more, as its host had; `holdfast volume export {first}` has this \
                     one serve it",
                    ended.join(", ")
                ));
            }
            signer::forget_machine(&self.revocations.certificates, name)?;
        }
        self.use_nodes(self.catalog.nodes()?)?;
        let devices = self.catalog.draining()?;
        self.order(Order::Drain(devices))?;
        if !self.revocations.lists.is_empty() {
            revoked::outlast(record.removed_s);
        }
        Ok(notes)
    }

    /// Has etcd let in nobody whose certificates were revoked.
    fn shut_out_of_etcd(&self) -> Result<()> {
        let certificates = &self.revocations.certificates;
        let Some(door) = Door::of(&self.dir, &self.dir.load()?)? else { return Ok(()) };
        door.sync(&revoked::load(&certificates.ca(), certificates.grid())?, |_| false)
    }

    /// Why something that is still needed may lie on a device that can't be looked at, if so.
    pub(super) fn who_may_need(&self, device: &str) -> Result<Option<String>> {
        let (hosts, entries) = (self.hosts_there(), self.catalog.all_strictly()?);
        let is_closed = |entry: &&super::catalog::Entry| {
            entry.clone.is_none() && !entry.served_by.as_ref().is_some_and(|host| hosts.contains(host))
        };
        let closed: Vec<&str> = entries.iter().filter(is_closed).map(|entry| entry.name()).collect();
        if let Some(first) = closed.first() {
            return Ok(Some(format!(
                "nobody knows what {} have there, which are in service nowhere; `holdfast volume export {first}` \
                 opens one",
                closed.join(", ")
            )));
        }
        for host in hosts.iter().filter(|host| *host != self.catalog.host()) {
            let told = self.send_errand(host, &Errand::Left, QUESTION_MAX)??;
            let left: Left = serde_json::from_value(told).context("a host's answer makes no sense")?;
            if left.unknown || left.devices.get(device).is_some_and(|count| *count > 0) {
                return Ok(Some(format!("volumes at host {host} still need what lay there, which is made again")));
            }
        }
        Ok(self.left_here()?.unknown.then(|| "a volume is just being opened".to_string()))
    }

    /// What is left on devices that are to be empty, as volumes that are open here say.
    pub(super) fn left_here(&self) -> Result<Left> {
        let unknown = self.losses_here(&BTreeSet::new())?.iter().any(|weakness| weakness.unknown);
        let left = self.ask(|answer| Command::LeftToDrain { answer })?;
        Ok(Left { devices: left.into_iter().map(|(device, count)| (device.to_string(), count)).collect(), unknown })
    }

    /// Notes of removed machines that nothing is missing of what they held, where that is so. Volumes that nobody serves had
    /// nothing left to do when the steward last looked after them.
    pub(super) fn settle_removed(&self) -> Result<()> {
        let open: Vec<_> = self.catalog.removed()?.into_iter().filter(|(_, removed)| !removed.made_good).collect();
        let hosts = self.hosts_there();
        let is_asked = |entry: &super::catalog::Entry| entry.served_by.as_ref().is_none_or(|host| hosts.contains(host));
        if !self.catalog.all_strictly()?.iter().filter(|entry| entry.clone.is_none()).all(is_asked) {
            return Ok(());
        }
        let mut all = vec![self.left_here()?];
        for host in hosts.iter().filter(|host| *host != self.catalog.host()) {
            let told = self.send_errand(host, &Errand::Left, QUESTION_MAX)??;
            all.push(serde_json::from_value(told).context("a host's answer makes no sense")?);
        }
        for (key, removed) in open {
            let devices: BTreeSet<&String> = removed.nodes.iter().flat_map(|node| &node.devices).collect();
            let lacks = |left: &Left| left.unknown || left.devices.iter().any(|(d, n)| *n > 0 && devices.contains(d));
            if all.iter().any(lacks) {
                continue;
            }
            self.catalog.update(&key, |found| {
                let found = found.map(decode::<RemovedRecord>).transpose()?;
                Ok(found.map(|found| Some(encode(&RemovedRecord { made_good: true, ..found }))))
            })?;
            logger::info(format_args!("all that machine {} held is made again: it was taken out before", removed.name));
        }
        Ok(())
    }
}

fn describe_loss(loss: &Weakness) -> String {
    let Weakness { volume, unknown, segments, .. } = loss;
    match unknown {
        true => format!("volume {volume} is being opened, or can't be"),
        false => format!("volume {volume} has {segments} segments that can't be read without it"),
    }
}

/// What is known of nodes beyond what they say themselves.
impl ControlPlane {
    pub(super) fn place_nodes(&self, live: &mut LiveStatus) -> Result<()> {
        let (machines, config, hosts) = (self.catalog.node_machines()?, self.config(), self.hosts_there());
        for node in &mut live.nodes {
            node.machine = machines.get(&node.id).cloned();
            node.machine_gone = node.machine.as_ref().is_some_and(|machine| !hosts.contains(machine));
            let own = config.nodes.iter().find(|known| known.id == node.id);
            node.configured = own.iter().flat_map(|own| &own.devices).map(resources::configured).collect();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::meta::Meta;
    use super::*;
    use crate::grid::layout::DeviceConfig;
    use holdfast_base::GridId;
    use holdfast_runtime::clock;
    use holdfast_runtime::meta::LocalStore;
    use std::sync::Arc;

    fn removed(id: Option<&str>, devices: &[&str]) -> RemovedRecord {
        let devices = devices.iter().map(|device| (*device).to_string()).collect();
        RemovedRecord {
            name: "b".to_string(),
            id: id.map(str::to_string),
            home: Some("m:/d".to_string()),
            nodes: vec![RemovedNode { node: 3, devices, other: Other::new() }],
            removed_s: 7,
            by: "a".to_string(),
            made_good: false,
            other: Other::new(),
        }
    }

    fn own(id: Option<&str>, home: &str, devices: &[&str]) -> Own {
        let devices = devices.iter().map(|device| (*device).to_string()).collect();
        Own { id: id.map(str::to_string), name: "b".to_string(), home: home.to_string(), devices }
    }

    #[test]
    fn a_machine_is_known_by_its_id_or_its_devices_and_by_its_place_only_while_it_has_none() {
        assert!(own(Some("1"), "m:/d", &[]).is(&removed(Some("1"), &["x"])));
        assert!(!own(Some("2"), "m:/d", &["y"]).is(&removed(Some("1"), &["x"])), "made anew in the same place");
        assert!(own(Some("2"), "m:/e", &["x"]).is(&removed(Some("1"), &["x"])), "a device knows its grid");
        assert!(!own(None, "m:/d", &["y"]).is(&removed(Some("1"), &["x"])), "it joins in the same place");
        assert!(own(None, "m:/d", &[]).is(&removed(None, &[])), "of an older release");
        assert!(
            !own(None, "m:/e", &[]).is(&removed(None, &[])) && !own(Some("2"), "m:/d", &[]).is(&removed(None, &[]))
        );
    }

    #[test]
    fn nodes_of_a_removed_machine_are_none_whatever_it_writes_and_their_numbers_are_nobodys() {
        let meta: Meta = Arc::new(LocalStore::in_memory(Arc::new(clock::now)));
        let [a, b] = ["a", "b"].map(|name| Catalog::new(meta.clone(), GridId(7), name));
        let device = DeviceId(9).to_string();
        let devices = vec![DeviceConfig { path: "d".into(), device: device.clone(), size_bytes: 1 << 30 }];
        let node = |id| NodeConfig { id, address: "127.0.0.1:7501".parse().unwrap(), devices: devices.clone() };
        let numbers = || a.nodes().unwrap().iter().map(|node| node.id).collect::<Vec<_>>();
        let [first, second] = [&a, &b].map(|catalog| catalog.add_node(node).unwrap());
        assert_eq!((numbers(), a.next_node().unwrap()), (vec![1, 2], 3));
        let removed = |made_good| RemovedRecord { made_good, ..removed(None, &[&device]) };
        let with_node = |made_good| {
            let mut record = removed(made_good);
            record.nodes[0].node = 2;
            encode(&record)
        };
        a.update(&removed_key("x"), |_| Ok(Some(Some(with_node(false))))).unwrap();
        assert_eq!((numbers(), a.next_node().unwrap()), (vec![1], 3), "its record is still there");
        assert!(b.set_own_nodes(&[second]).unwrap_err().to_string().contains("taken out of the grid"));
        assert_eq!(a.draining().unwrap(), BTreeSet::from([DeviceId(9)]));
        a.update(&node_key(2), |_| Ok(Some(None))).unwrap();
        a.update(&removed_key("x"), |_| Ok(Some(Some(with_node(true))))).unwrap();
        assert_eq!((a.draining().unwrap(), a.next_node().unwrap()), (BTreeSet::new(), 3));
        // Numbers of nodes that leave while their machine stays are not used again either; those of one that never
        // came are.
        let third = a.add_node(node).unwrap();
        a.set_own_nodes(std::slice::from_ref(&first)).unwrap();
        assert_eq!((third.id, a.next_node().unwrap()), (3, 4));
        b.add_node(node).unwrap();
        b.give_back_nodes().unwrap();
        assert_eq!((numbers(), a.next_node().unwrap()), (vec![1], 4));
    }
}
