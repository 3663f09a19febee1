//! `holdfast sharing`: domains of volumes whose equal content is stored once.

use super::format::{print, print_json, print_table, table};
use super::protect::Redundancy;
use super::volume::{WrappingKey, key_of_new};
use crate::client;
use crate::grid::layout::GridDir;
use anyhow::Result;
use clap::{Args, Subcommand};
use holdfast_api::{Request, VolumeInfo};
use holdfast_format::geometry::Layout;
use holdfast_format::packing::Compression;

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    holdfast sharing create guests --layout mirror:2     a domain, and its store\n  \
    holdfast volume set vm1 --sharing guests             vm1 shares what it has alike with others there\n  \
    holdfast sharing list\n\n\
    Content is compared in the background, some time after it was written; reads and writes never wait for the store. A\n\
    volume has the store's layout, and is encrypted if the store is. `holdfast volume set VOLUME --sharing none` takes it\n\
    out: what it has in the store is copied back. `holdfast volume delete NAME` deletes a store without members.")]
pub struct SharingArgs {
    #[command(subcommand)]
    action: SharingAction,
}

#[derive(Subcommand, Debug)]
enum SharingAction {
    /// Make a domain: a store, which is a volume that no client reaches
    Create {
        name: String,
        #[command(flatten)]
        redundancy: Redundancy,
        /// How blocks of the store are packed: off, lz4 or auto
        #[arg(long, default_value = "auto", value_name = "HOW")]
        compress: Compression,
        /// Encrypt what members share, with a key of the store's own. All members are encrypted, and their hosts have this key,
        /// too. Needs --key-file or --key-command
        #[arg(long, requires = "key")]
        encrypt: bool,
        #[command(flatten)]
        key: WrappingKey,
    },
    /// The domains, and their members
    List,
}

pub fn run(args: SharingArgs, dir: &GridDir, json: bool) -> Result<()> {
    match args.action {
        SharingAction::Create { name, redundancy, compress, encrypt, key } => {
            let layout = super::volume::said(redundancy.settle_new(dir)?, json)?.unwrap_or(Layout::DEFAULT);
            let (layout, compression) = (layout.to_string(), compress);
            let key = key_of_new(key, encrypt)?;
            let volume = client::volume(dir, &Request::SharingCreate { name, layout, compression, key })?;
            let text = format!(
                "sharing domain {0} ({1}) is made; `holdfast volume set VOLUME --sharing {0}` takes a volume into it",
                volume.name, volume.layout
            );
            super::volume::show(&volume, text, json)
        }
        SharingAction::List => list(dir, json),
    }
}

fn list(dir: &GridDir, json: bool) -> Result<()> {
    let mut stores: Vec<VolumeInfo> = client::volumes(dir)?.into_iter().filter(|volume| volume.is_store).collect();
    for store in &mut stores {
        *store = client::volume(dir, &Request::VolumeShow { name: store.name.clone() })?;
    }
    if json {
        return print_json(&stores);
    }
    if stores.is_empty() {
        return print("there is no sharing domain; `holdfast sharing create NAME` makes one");
    }
    let mut rows = table(&["DOMAIN", "LAYOUT", "HOST", "MEMBERS"], &[]);
    for store in stores {
        let members = if store.needed_by.is_empty() { "none".to_string() } else { store.needed_by.join(", ") };
        rows.add_row([store.name, store.layout, store.host.unwrap_or_default(), members]);
    }
    print_table(&rows)
}
