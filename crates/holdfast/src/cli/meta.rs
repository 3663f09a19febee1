//! `holdfast meta …`: where a grid keeps its metadata, and how they get elsewhere.

use super::format::{print, print_json};
use crate::grid::layout::{EtcdMeta, GridDir, MetaConfig};
use crate::grid::{beat, metadata, recovery};
use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use holdfast_api::{Code, refuse};
use holdfast_base::size::Size;
use serde_json::json;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Options that name a cluster of etcd.
#[derive(Args, Clone, Debug)]
pub struct EtcdArgs {
    /// Keep the grid's metadata in etcd (tried with 3.4 to 3.7): all members' client URLs, for example http://10.0.0.1:2379
    #[arg(long, value_name = "URL,…", value_delimiter = ',')]
    etcd: Vec<String>,
    /// For members with TLS by other certificates than the grid's own: a directory with ca-cert.pem, and with
    /// client-cert.pem and client-key.pem if they ask
    #[arg(long, value_name = "DIR")]
    etcd_tls_dir: Option<PathBuf>,
}

impl EtcdArgs {
    /// With these, where none are named by --etcd.
    pub fn or_endpoints(self, endpoints: Vec<String>) -> EtcdArgs {
        if self.etcd.is_empty() { EtcdArgs { etcd: endpoints, ..self } } else { self }
    }

    pub fn config(self) -> Result<Option<MetaConfig>> {
        let tls_dir = self.etcd_tls_dir.map(std::path::absolute).transpose()?;
        if tls_dir.is_some() && self.etcd.is_empty() {
            refuse!(Code::Invalid, "--etcd-tls-dir says how members are reached; name them with --etcd");
        }
        let etcd = EtcdMeta { endpoints: self.etcd, tls_dir };
        Ok((!etcd.endpoints.is_empty()).then_some(MetaConfig::Etcd(etcd)))
    }
}

#[derive(Args, Debug)]
#[command(after_help = "From the embedded store to etcd, and back:\n  \
    holdfast grid down\n  \
    holdfast meta export meta.json\n  \
    holdfast meta import meta.json --etcd http://10.0.0.1:2379,http://10.0.0.2:2379,http://10.0.0.3:2379\n  \
    holdfast grid up\n\n  \
    holdfast grid down\n  \
    holdfast meta export meta.json\n  \
    holdfast meta import meta.json --embedded\n\n\
    Metadata say which volumes there are and where their data begin; the data stay where they are. Import what was exported \
    last: older metadata know nothing of what was written since, and open no volume that has been opened since.")]
pub struct MetaArgs {
    #[command(subcommand)]
    action: MetaAction,
}

#[derive(Subcommand, Debug)]
enum MetaAction {
    /// Write all metadata of a grid to a file, or to standard output; only what was exported with all hosts stopped can be imported
    Export { file: Option<PathBuf> },
    /// Have the metadata back from what the grid's nodes hold, when their store is lost, emptied or damaged
    Recover {
        /// A file of `holdfast meta export`, in the place of the copies that devices have
        #[arg(long, value_name = "FILE")]
        from: Option<PathBuf>,
        /// Another copy than the newest that a device has, by its number
        #[arg(long, value_name = "NUMBER", conflicts_with = "from")]
        copy: Option<u64>,
        /// Although no copy says which nodes the grid has: those that are asked are all
        #[arg(long)]
        complete: bool,
        /// A node that neither this machine nor a copy knows, for example 4=10.0.0.4:7420
        #[arg(long = "node", value_name = "NUMBER=ADDRESS", value_parser = node_at)]
        nodes: Vec<(u32, SocketAddr)>,
        /// Take this volume as it was found, although a newer state of it may be on what could not be asked: that is lost then
        #[arg(long, value_name = "VOLUME")]
        accept: Vec<String>,
        /// Although the store holds metadata of this grid: they are deleted
        #[arg(long)]
        replace: bool,
        /// Do it; without this it is only shown
        #[arg(long)]
        yes: bool,
    },
    /// Go on with a metadata store that this machine does not believe, as it is; with all hosts stopped
    Believe {
        /// Do it; without this it is only shown
        #[arg(long)]
        yes: bool,
    },
    /// Put exported metadata into a store, and use that from then on
    Import {
        file: PathBuf,
        #[command(flatten)]
        etcd: EtcdArgs,
        /// Keep the metadata in a file of the grid's directory
        #[arg(long, conflicts_with = "etcd")]
        embedded: bool,
        /// Although the store holds other metadata of this grid: they are deleted
        #[arg(long)]
        replace: bool,
    },
}

pub fn run(args: MetaArgs, dir: &GridDir, json: bool) -> Result<()> {
    match args.action {
        MetaAction::Export { file } => {
            let records = metadata::export(dir, file.as_deref())?;
            let Some(file) = file else { return Ok(()) };
            if json {
                return print_json(&json!({ "records": records, "file": file }));
            }
            print(format_args!("{records} records are in {}", file.display()))
        }
        MetaAction::Recover { from, copy, complete, nodes, accept, replace, yes } => {
            let wanted = recovery::Wanted { from, copy, complete, nodes, accept, replace, yes };
            let report = recovery::run(dir, &wanted)?;
            if json { print_json(&report) } else { print_recovery(&report) }
        }
        MetaAction::Believe { yes } => {
            let believed = beat::believe(dir, yes)?;
            if json { print_json(&believed) } else { print_believed(&believed) }
        }
        MetaAction::Import { file, etcd, embedded, replace } => {
            let to = etcd.config()?.or(embedded.then_some(MetaConfig::Embedded));
            let imported = metadata::import(dir, &file, to, replace)?;
            if json {
                return print_json(&imported);
            }
            print(format_args!(
                "{} records are in the store: {}. `holdfast grid up` uses it",
                imported.records, imported.store
            ))
        }
    }
}

fn node_at(text: &str) -> Result<(u32, SocketAddr)> {
    let parts = text.split_once('=').context("write the node's number and address, for example 4=10.0.0.4:7420")?;
    let number = parts.0.parse().with_context(|| format!("{} is no number of a node", parts.0))?;
    Ok((number, parts.1.parse().with_context(|| format!("{} is no address with a port", parts.1))?))
}

fn print_believed(believed: &beat::Believed) -> Result<()> {
    let store = &believed.store;
    match (&believed.doubt, believed.done) {
        (None, _) => print(format_args!("the metadata store ({store}) is believed; there is nothing to do")),
        (Some(why), true) => print(format_args!(
            "the metadata store ({store}) is gone on with as it is, although {why}; `holdfast grid up` on each machine uses it"
        )),
        (Some(why), false) => print(format_args!(
            "the metadata store ({store}) is not believed: {why}. What was changed since then, it does not know: volumes that were \
             made, names, keys, settings, machines. `holdfast meta recover --replace` has more of that. To go on with it as it is, \
             add --yes"
        )),
    }
}

fn print_recovery(report: &recovery::Report) -> Result<()> {
    if let Some(copy) = &report.copy {
        print(format_args!("{} records from {copy}", report.records))?;
    } else if !report.nodes.is_empty() {
        print(
            "no copy of the grid's records was found: settings, schedules, clients and keys would not be restored. Try it from another \
             machine of the grid, name nodes with --node, or say with --complete that there are no others",
        )?;
    }
    if report.copies.len() > 1 {
        let copies: Vec<String> =
            report.copies.iter().map(|(number, len)| format!("{number} ({len} records)")).collect();
        print(format_args!("copies on devices: {}; --copy takes another than the newest", copies.join(", ")))?;
    }
    if !report.nodes.is_empty() {
        print(format_args!("{} devices were asked, of nodes {}", report.devices, report.nodes.join(", ")))?;
    }
    for silent in &report.silent {
        print(format_args!("not asked: {silent}"))?;
    }
    for volume in &report.volumes {
        let size = Size(volume.size_bytes);
        match (&volume.doubt, volume.accepted) {
            (None, _) => {
                let notes = volume.notes.iter().map(|note| format!("; {note}")).collect::<String>();
                print(format_args!("{} ({size}): as it was{notes}", volume.name))?
            }
            (Some(why), true) => {
                print(format_args!("{} ({size}): taken as it was found, although {why}", volume.name))?
            }
            (Some(why), false) => {
                print(format_args!("{} ({size}, id {}): only found: {why}", volume.name, volume.volume))?
            }
        }
    }
    let found = report.found().count();
    if found > 0 {
        print(format_args!(
            "kept as found: {found}. Nothing opens such a volume, and nothing of it is deleted. Bring back what was not asked \
             and recover again (`holdfast meta recover --replace`), or take one as it is with `holdfast meta recover --accept VOLUME`"
        ))?;
    }
    match report.done {
        true => {
            let embedded = report.store == MetaConfig::Embedded.to_string();
            let place = if embedded { "this machine's meta.redb" } else { &report.store };
            print(format_args!("the metadata are in {place}; `holdfast grid up` on each machine uses them"))
        }
        false => print("nothing was changed; add --yes to do it"),
    }
}
