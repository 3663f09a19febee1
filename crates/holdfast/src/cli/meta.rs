//! `holdfast meta …`: where a grid keeps its metadata, and how they get elsewhere.

use super::format::{print, print_json};
use crate::grid::layout::{EtcdMeta, GridDir, MetaConfig};
use crate::grid::metadata;
use anyhow::Result;
use clap::{Args, Subcommand};
use serde_json::json;
use std::path::PathBuf;

/// Options that name a cluster of etcd.
#[derive(Args, Clone, Debug)]
pub struct EtcdArgs {
    /// Keep the grid's metadata in etcd (tried with 3.4 to 3.7): all members' client URLs, for example http://10.0.0.1:2379
    #[arg(long, value_name = "URL,…", value_delimiter = ',')]
    etcd: Vec<String>,
    /// For members that use TLS: a directory with ca-cert.pem, and with client-cert.pem and client-key.pem if they ask
    #[arg(long, value_name = "DIR", requires = "etcd")]
    etcd_tls_dir: Option<PathBuf>,
}

impl EtcdArgs {
    pub fn config(self) -> Result<Option<MetaConfig>> {
        let tls_dir = self.etcd_tls_dir.map(std::path::absolute).transpose()?;
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
    /// Write all metadata of a grid that is down to a file, or to standard output
    Export { file: Option<PathBuf> },
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
