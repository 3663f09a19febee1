//! `holdfast volume`: make, show, resize, rename, delete, export.

use super::format::{print, print_json, print_table, table};
use super::protect::{self, Redundancy};
use super::snapshot::share;
use super::tier::TierFlags;
use crate::capacity::packed_text;
use crate::client;
use crate::grid::layout::GridDir;
use anyhow::{Context, Result};
use clap::{Args, Subcommand, ValueEnum};
use holdfast_api::{ClientsChange, Code, KeySource, Request, Unreadable, VolumeInfo, VolumeLive, VolumeState, refuse};
use holdfast_base::size::Size;
use holdfast_filter::is_limit;
use holdfast_format::geometry::Layout;
use holdfast_format::packing::Compression;
use holdfast_format::tier::Tiers;
use holdfast_volume::protect::Protect;
use serde_json::json;
use std::path::PathBuf;

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    holdfast volume create vm1 --size 4GiB\n  \
    holdfast volume create scratch --size 512MiB --layout mirror:2\n  \
    holdfast volume plan                       what each --protect rule means here, and what it leaves\n  \
    holdfast volume create safe --size 1GiB --protect node+device --dry-run\n  \
    holdfast volume create db --size 2GiB --provisioning fixed   others never take the space that it has yet to write\n  \
    holdfast volume create vault --size 2GiB --encrypt --key-file /root/vault.key   only who has the key can read it\n  \
    holdfast volume rekey vault --key-file /root/new.key\n  \
    holdfast volume list\n  \
    holdfast volume explain vm1                drawn from its clients down to devices\n  \
    holdfast volume xml vm1 --dev vdb          a disk for libvirt, for `virsh attach-device`\n  \
    holdfast volume filter add vm1 delay:read=10ms,share=0.1   for testing guests (`holdfast volume filter --help`)\n  \
    nbdinfo \"$(holdfast volume show vm1 --json | jq -r '.uris[0]')\"\n  \
    holdfast volume resize vm1 --size 8GiB     clients see it when they connect anew\n  \
    holdfast volume clone golden@v1 vm2        golden@v1 is a snapshot: `holdfast snapshot create golden v1`\n  \
    holdfast volume clone golden@v1 vm3 --separate --no-export     for another host to export\n  \
    holdfast volume set vm1 --layout mirror:3  in any direction that the nodes allow\n  \
    holdfast volume create vm4 --size 100GiB --first-tier mirror:2,ssd,20% --media hdd\n  \
    \x20                                            written to flash, moved to disks by age (`holdfast tier show`)\n  \
    holdfast volume set vm4 --first-tier none\n  \
    holdfast volume set vm1 --limit iops=500,bytes=50MiB\n  \
    holdfast volume set db --qos weight=400,latency=2ms\n  \
    holdfast volume set vm1 --protect node     after a node was added\n  \
    holdfast volume export web1 --failover auto   any host takes it over when its own is lost\n  \
    holdfast volume export ocfs --shared       several clients write at a time; else a second one is refused\n  \
    holdfast volume allow db vm7 vm8           only these clients may have it over TCP (`holdfast grid tls --help`)\n  \
    holdfast volume deny db vm8                it is cut off, if it is connected\n  \
    holdfast volume rename vm1 web1            while no client is connected\n  \
    holdfast volume protect db on              it is not deleted until that is taken back\n  \
    holdfast volume delete scratch             into the trash, for a day: `holdfast volume trash list`\n  \
    holdfast volume trash restore scratch\n  \
    holdfast volume delete scratch --now       for good")]
pub struct VolumeArgs {
    #[command(subcommand)]
    action: VolumeAction,
}

#[derive(Subcommand, Debug)]
enum VolumeAction {
    /// Make a volume, and export it
    Create(Create),
    /// Make a volume of a disk image
    Import(super::import::Import),
    /// Make a writable clone of a snapshot, at once, whatever its size; both share what neither overwrites
    Clone {
        /// VOLUME@SNAPSHOT
        source: String,
        name: String,
        /// Larger than the snapshot, for example 40GiB; the file system on it has to be grown by the guest
        #[arg(long)]
        size: Option<Size>,
        /// A volume of its own, which any host can serve, with a log of its own; what neither overwrites is there once all
        /// the same. It begins with the snapshots that its own was taken after
        #[arg(long)]
        separate: bool,
        /// Of a separate one: only make it; `holdfast volume export` offers it to clients later, at any host
        #[arg(long, requires = "separate")]
        no_export: bool,
    },
    /// All volumes of the grid
    List,
    /// Which layout each protection rule chooses on this grid, and what that leaves of the raw capacity
    Plan,
    /// One volume, with its counters
    Show { name: String },
    /// What a volume consists of, from its clients down to devices, and what passes from part to part
    Explain { name: String },
    /// Print a volume as a disk for libvirt: `<disk>`, for `virsh attach-device` and `virsh edit`
    ///
    /// Its serial number comes from the volume's id, so that it is the same at every host.
    Xml(super::libvirt::XmlArgs),
    /// Change a volume's size; clients see it when they connect anew
    Resize {
        name: String,
        #[arg(long)]
        size: Size,
        /// Cut off the end of the volume, with the data there; not while clients are connected
        #[arg(long)]
        shrink: bool,
        /// Cut it off although clients are connected: they go on with the larger size until they connect anew, and get
        /// errors behind the new end
        #[arg(long, requires = "shrink")]
        force: bool,
    },
    /// Change how a volume is kept, while it is used
    Set(Set),
    /// Give a volume another name, while no client is connected; where it is in service it is closed for a moment
    Rename { name: String, new: String },
    /// Have a volume or clone deleted by nobody, until that is taken back
    Protect {
        name: String,
        #[arg(value_enum)]
        protection: Switch,
    },
    /// Delete a volume with its data and its snapshots: it goes into the trash for a day, and its name is free at once. A clone that
    /// is a part of a volume is deleted for good
    Delete {
        name: String,
        /// Cut off clients that are connected
        #[arg(long)]
        force: bool,
        /// For good, past the trash
        #[arg(long)]
        now: bool,
    },
    /// Deleted volumes: have them back, or return their space
    Trash(super::trash::TrashArgs),
    /// Offer a volume to clients, now and after every start of the grid
    Export {
        name: String,
        /// Although another host that is up has it in service: clients of that host get errors
        #[arg(long, conflicts_with = "multipath")]
        takeover: bool,
        /// Beside the host that has it in service: what clients ask here goes there, and if that host is lost this one takes over
        #[arg(long, alias = "portal")]
        multipath: bool,
        /// Let several clients write at a time, as to a cluster's file system; `--shared off`: one, which is what a volume has unless told
        /// otherwise. Counts until the volume is out of service
        #[arg(long, value_enum, num_args = 0..=1, default_missing_value = "on")]
        shared: Option<Switch>,
        /// `auto`: any host of the grid takes the volume over when its own is gone and the nodes of the volume hear no more of that;
        /// `off`, which is what a volume has unless told otherwise: it waits for its host, or for an operator. Counts until the volume is
        /// out of service
        #[arg(long, value_enum)]
        failover: Option<Failover>,
        /// Where this host gets the key of an encrypted volume from here on
        #[command(flatten)]
        key: WrappingKey,
    },
    /// Let only certain clients have a volume over TCP: those that are named now, beside those that were before
    ///
    /// Clients show who they are by certificates of the grid's authority (`holdfast grid tls client`), so the hosts' NBD servers have
    /// to ask for them (`holdfast grid tls server`). Over TCP without TLS nobody gets such a volume. Its snapshots go with
    /// it, and clones begin with its list. The unix socket is the machine's administrator's, who has every volume.
    Allow(Clients),
    /// Let clients have a volume no more; who is connected is cut off
    ///
    /// With --all nobody gets it over TCP.
    Deny(Clients),
    /// Have another host serve a volume, while clients use it: those of this host go on through it
    Handover {
        name: String,
        /// The host that shall have it in service
        #[arg(long, value_name = "HOST")]
        to: String,
    },
    /// Put filters between a volume's clients and its controller: delays, errors and hangs for testing guests, limits
    #[command(alias = "layer")]
    Filter(super::filter::FilterArgs),
    /// Wrap the key of an encrypted volume with another one, while it is used; no data is written anew. The former one is needed for
    /// it once more, and opens only separate clones then, which have wrappings of their own
    Rekey {
        name: String,
        #[command(flatten)]
        key: WrappingKey,
    },
    /// Take a volume out of service; its data stays
    Unexport {
        name: String,
        /// Cut off clients that are connected
        #[arg(long)]
        force: bool,
    },
}

/// Whom a volume is for.
#[derive(Args, Debug)]
struct Clients {
    name: String,
    /// Names of clients
    #[arg(value_name = "CLIENT", required_unless_present = "all")]
    clients: Vec<String>,
    /// Every client
    #[arg(long, conflicts_with = "clients")]
    all: bool,
}

impl Clients {
    fn run(self, allow: bool, dir: &GridDir, json: bool) -> Result<()> {
        let change = match (allow, self.all) {
            (true, true) => ClientsChange::AllowAll,
            (false, true) => ClientsChange::DenyAll,
            (true, false) => ClientsChange::Allow { clients: self.clients },
            (false, false) => ClientsChange::Deny { clients: self.clients },
        };
        let volume = client::volume(dir, &Request::VolumeClients { name: self.name, change })?;
        show(&volume, format!("volume {} is for {}", volume.name, whom_for(&volume)), json)
    }
}

fn writers_of(volume: &VolumeInfo) -> String {
    let writer = volume.writer.as_deref();
    match (volume.shared, writer, &volume.refused_writer) {
        (true, ..) => "several at a time (`--shared`)".to_string(),
        (false, None, _) => "one at a time; none yet".to_string(),
        (false, Some(writer), None) => format!("one at a time, now {writer}"),
        (false, Some(writer), Some(refused)) => format!("one at a time, now {writer}; {refused} was refused"),
    }
}

/// Over TCP.
pub fn whom_for(volume: &VolumeInfo) -> String {
    match &volume.only_for {
        None => "every client that reaches its host".to_string(),
        Some(clients) if clients.is_empty() => "no client over TCP, only for the unix socket".to_string(),
        Some(clients) => {
            let names: Vec<&str> = clients.iter().map(String::as_str).collect();
            format!("clients {} alone, by their certificates", names.join(", "))
        }
    }
}

/// What a volume is made with.
#[derive(Args, Debug)]
struct Create {
    name: String,
    /// Bytes that clients see, for example 4GiB; space is taken only for what is written
    #[arg(long)]
    size: Size,
    #[command(flatten)]
    redundancy: Redundancy,
    /// Show what the layout bears and what it leaves of the raw capacity, and make nothing
    #[arg(long)]
    dry_run: bool,
    /// Take space as it is written, or set all of it aside now, and a sixteenth for what is overwritten
    #[arg(long, default_value = "thin")]
    provisioning: Provisioning,
    /// Check what is read against its checksums; `off` saves the CPU, and hands out what disks damage until a scrub finds
    /// it. Checksums are kept, and metadata is checked, either way
    #[arg(long, default_value = "on")]
    integrity: Integrity,
    /// Make blocks smaller where that saves something: off, lz4 (fast), or auto (lz4 for what leaves the log, zstd for what
    /// is moved later). Data are packed when they leave the log, by a thread that guests don't wait for
    #[arg(long, default_value = "off")]
    compress: Compression,
    #[command(flatten)]
    tiers: TierFlags,
    /// Encrypt what clients write, in the log and in segments, with a key of the volume's own (AES-256-GCM). Clones share it.
    /// Needs --key-file or --key-command
    #[arg(long, requires = "key")]
    encrypt: bool,
    #[command(flatten)]
    key: WrappingKey,
    /// How its clients fare among others, and what they may have of it: weight=400 (to 100, what others have), limit=500/50MiB
    /// (requests and bytes a second, or one of them: 500, /50MiB), burst=2s (what was not used for that time may follow at
    /// once; 1s unless told) or burst=300/60s, latency=2ms (one request in 100 may take longer). Wherever it is served, and
    /// by whichever host clients come. `--limit iops=500,bytes=50MiB` is read, too
    #[arg(long, visible_alias = "limit", value_name = "POLICY")]
    qos: Option<String>,
    /// Only make it; `holdfast volume export` offers it to clients later
    #[arg(long)]
    no_export: bool,
}

/// What of a volume is to change.
#[derive(Args, Debug)]
#[command(override_usage = "holdfast volume set <NAME> --SETTING VALUE...")]
#[command(group(clap::ArgGroup::new("change").required(true).multiple(true)
    .args(["layout", "protect", "provisioning", "integrity", "compress", "first_tier", "media", "qos", "sharing"])))]
struct Set {
    name: String,
    /// As for `volume create`; what is there is written anew in the background
    #[arg(long, conflicts_with = "protect")]
    layout: Option<Layout>,
    /// As for `volume create`: what shall be survived, on the nodes and devices that there are now
    #[arg(long)]
    protect: Option<Protect>,
    /// Show what the layout bears and what it leaves of the raw capacity, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// As for `volume create`
    #[arg(long)]
    provisioning: Option<Provisioning>,
    /// As for `volume create`
    #[arg(long)]
    integrity: Option<Integrity>,
    /// As for `volume create`; what is packed stays so, and is read as before, when it is `off`
    #[arg(long)]
    compress: Option<Compression>,
    #[command(flatten)]
    tiers: TierFlags,
    /// As for `volume create`, also of a clone; all of it is said anew, and `none` takes it away
    #[arg(long, visible_alias = "limit", value_name = "POLICY")]
    qos: Option<String>,
    /// Share content by the store of this domain from here on (`holdfast sharing`), or of `none`
    #[arg(long, value_name = "DOMAIN", conflicts_with = "dry_run")]
    sharing: Option<String>,
}

/// The key that a volume's own is wrapped with. It is not kept: the host gets it again whenever the volume is opened.
#[derive(Args, Debug)]
#[group(id = "key", multiple = false)]
pub(super) struct WrappingKey {
    /// File with the key that the volume's own key is wrapped with: 32 bytes or 64 hexadecimal digits, to be read by nobody else
    /// (`openssl rand -hex 32`). Without it the volume can't be opened: keep a copy elsewhere
    #[arg(long)]
    key_file: Option<PathBuf>,
    /// Command that prints that key; the host runs it in a shell whenever it opens the volume
    #[arg(long)]
    key_command: Option<String>,
}

impl WrappingKey {
    fn source(self) -> Result<Option<KeySource>> {
        let absolute = |path: PathBuf| {
            std::path::absolute(&path).with_context(|| format!("cannot use {} as --key-file", path.display()))
        };
        let file = self.key_file.map(absolute).transpose()?.map(KeySource::File);
        Ok(file.or(self.key_command.map(KeySource::Command)))
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Provisioning {
    Thin,
    Fixed,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Integrity {
    On,
    Off,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Switch {
    On,
    Off,
}

/// What becomes of a volume whose host is lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Failover {
    Auto,
    Off,
}

impl Create {
    fn run(self, dir: &GridDir, json: bool) -> Result<()> {
        if self.dry_run {
            return protect::show_one(dir, json, &self.redundancy, Some(self.size.0));
        }
        let key = key_of_new(self.key, self.encrypt)?;
        let layout = said(self.redundancy.settle_new(dir)?, json)?.unwrap_or(Layout::DEFAULT);
        let request = Request::VolumeCreate {
            name: self.name,
            size_bytes: self.size.0,
            layout: layout.to_string(),
            export: !self.no_export,
            fixed: self.provisioning == Provisioning::Fixed,
            checked_reads: self.integrity == Integrity::On,
            // Not told where nobody asks for it: an older host would refuse the word.
            compression: (self.compress != Compression::Off).then_some(self.compress),
            tiers: self.tiers.applied_to(Tiers::default()),
            key,
            limit: self.qos,
        };
        let volume = client::volume(dir, &request)?;
        let text = format!("volume {} ({}, {}) is made{}", volume.name, self.size, volume.layout, how_to_use(&volume));
        show(&volume, text, json)
    }
}

impl Set {
    fn run(self, dir: &GridDir, json: bool) -> Result<()> {
        let redundancy = Redundancy { layout: self.layout, protect: self.protect };
        if self.dry_run {
            if redundancy.layout.is_none() && redundancy.protect.is_none() {
                refuse!(Code::Invalid, "--dry-run shows what a layout means; say which, by --layout or --protect");
            }
            return protect::show_one(dir, json, &redundancy, None);
        }
        let layout = said(redundancy.settle(dir)?, json)?;
        let fixed = self.provisioning.map(|p| p == Provisioning::Fixed);
        let checked_reads = self.integrity.map(|i| i == Integrity::On);
        let tiers = self.tiers.change(&self.name, dir)?;
        let layout_name = layout.map(|l| l.to_string());
        let has_policy = self.qos.is_some();
        let (name, compression, limit, sharing) = (self.name, self.compress, self.qos, self.sharing.clone());
        let request =
            Request::VolumeSet { name, layout: layout_name, fixed, checked_reads, compression, tiers, limit, sharing };
        let volume = client::volume(dir, &request)?;
        let tiers = tiers.map(|tiers| super::tier::what_was_set(&volume.name, tiers));
        let policy = has_policy.then(|| match &volume.limit {
            Some(words) if is_limit(words) => {
                format!("volume {} is limited to {words}, wherever it is served", volume.name)
            }
            Some(words) => format!("volume {} has {words}, wherever it is served", volume.name),
            None => format!("volume {} has no limit, and what others have", volume.name),
        });
        let packed = compression.map(|compression| match compression {
            Compression::Off => format!("volume {} is written as it is from here on", volume.name),
            other => format!("volume {} is packed from here on, by {other}", volume.name),
        });
        let set = what_was_set(&volume, layout, fixed, checked_reads);
        let shares = self.sharing.map(|store| what_it_shares(&volume, &store));
        let said: Vec<String> = tiers.into_iter().chain(set).chain(packed).chain(policy).chain(shares).collect();
        show(&volume, said.join("\n"), json)
    }
}

fn what_it_shares(volume: &VolumeInfo, store: &str) -> String {
    let name = &volume.name;
    match &volume.sharing {
        Some(of) if volume.leaves_domain => {
            format!(
                "volume {name} leaves domain {of}: what it has there is copied back in the background; when that is done, \
                 `holdfast volume show {name}` tells of it no more"
            )
        }
        Some(_) => format!("volume {name} shares its content in domain {store}"),
        None => format!("volume {name} is in no sharing domain"),
    }
}

/// What is to be said beside an answer goes where it is in nobody's way.
pub fn warn_of(volume: &VolumeInfo) {
    if let Some(warning) = &volume.warning {
        eprintln!("warning: {warning}");
    }
}

/// What is shown may be of before.
pub fn warn_of_store(trouble: Option<&String>) {
    if let Some(trouble) = trouble {
        eprintln!("warning: the metadata store is {trouble}. This is what the host of this machine knows");
    }
}

pub(super) fn show(volume: &VolumeInfo, text: String, json: bool) -> Result<()> {
    warn_of(volume);
    if json { print_json(volume) } else { print(text) }
}

pub fn run(args: VolumeArgs, dir: &GridDir, json: bool) -> Result<()> {
    let show = |volume: &VolumeInfo, text: String| show(volume, text, json);
    match args.action {
        VolumeAction::Create(create) => create.run(dir, json),
        VolumeAction::Import(import) => import.run(dir, json),
        VolumeAction::Clone { source, name, size, separate, no_export } => {
            let (size_bytes, export) = (size.map(|s| s.0), !no_export);
            let request = Request::VolumeClone { source: source.clone(), name, size_bytes, separate, export };
            let volume = client::volume(dir, &request)?;
            let size = Size(volume.size_bytes);
            show(&volume, format!("clone {} of {source} ({size}) is made{}", volume.name, how_to_use(&volume)))
        }
        VolumeAction::List => {
            let status = client::status(dir)?;
            warn_of_store(status.metadata_trouble.as_ref());
            if json {
                return print_json(&status.volumes);
            }
            print_list(&status.volumes)?;
            super::trash::print_trash_count(&status.trash)?;
            print_unreadable(&status.unreadable)
        }
        VolumeAction::Show { name } => {
            let volume = client::volume(dir, &Request::VolumeShow { name })?;
            warn_of(&volume);
            if json { print_json(&volume) } else { print_one(&volume) }
        }
        VolumeAction::Xml(args) => super::libvirt::run(&args, dir, json),
        VolumeAction::Explain { name } => super::explain::run(&name, dir, json),
        VolumeAction::Resize { name, size, shrink, force } => {
            let volume = client::volume(dir, &Request::VolumeResize { name, size_bytes: size.0, shrink, force })?;
            let mut text = format!(
                "volume {} has {} now; clients see it when they connect anew",
                volume.name,
                Size(volume.size_bytes)
            );
            if force && volume.sessions > 0 {
                text.push_str(&format!(
                    ". {} that are connected know the larger size, and get errors behind the end: have them do so",
                    volume.sessions
                ));
            }
            show(&volume, text)
        }
        VolumeAction::Filter(args) => super::filter::run(args, dir, json),
        VolumeAction::Plan => protect::show_plan(dir, json),
        VolumeAction::Set(set) => set.run(dir, json),
        VolumeAction::Rename { name, new } => {
            let volume = client::volume(dir, &Request::VolumeRename { name: name.clone(), new })?;
            show(&volume, format!("volume {name} is called {} now", volume.name))
        }
        VolumeAction::Protect { name, protection } => {
            let protected = protection == Switch::On;
            let volume = client::volume(dir, &Request::VolumeProtect { name, protected })?;
            let how = if protected { "protected: it is not deleted until that is off" } else { "not protected" };
            show(&volume, format!("volume {} is {how}", volume.name))
        }
        VolumeAction::Delete { name, force, now } => delete(dir, json, name, (force, now)),
        VolumeAction::Trash(args) => super::trash::run(args, dir, json),
        VolumeAction::Handover { name, to } => {
            let volume = client::volume(dir, &Request::VolumeHandover { name, to })?;
            let host = volume.host.as_deref().unwrap_or_default();
            show(&volume, format!("volume {} is in service at host {host}", volume.name))
        }
        VolumeAction::Allow(clients) => clients.run(true, dir, json),
        VolumeAction::Deny(clients) => clients.run(false, dir, json),
        VolumeAction::Rekey { name, key } => {
            let (volume, text) = rekey(dir, name, key)?;
            show(&volume, text)
        }
        VolumeAction::Export { name, takeover, multipath, shared, failover, key } => {
            let (key, shared) = (key.source()?, shared.map(|shared| shared == Switch::On));
            let failover = failover.map(|failover| failover == Failover::Auto);
            let volume =
                client::volume(dir, &Request::VolumeExport { name, takeover, multipath, key, shared, failover })?;
            let who = if volume.shared { ", to several writers at a time" } else { "" };
            show(&volume, format!("volume {} is exported{who}{}", volume.name, how_to_use(&volume)))
        }
        VolumeAction::Unexport { name, force } => {
            let volume = client::volume(dir, &Request::VolumeUnexport { name, force })?;
            show(
                &volume,
                format!("volume {} is out of service; `holdfast volume export {0}` brings it back", volume.name),
            )
        }
    }
}

fn delete(dir: &GridDir, json: bool, name: String, (force, now): (bool, bool)) -> Result<()> {
    let before = client::volume(dir, &Request::VolumeShow { name: name.clone() });
    client::done(dir, &Request::VolumeDelete { name: name.clone(), force, now })?;
    if json {
        return print_json(&json!({ "name": name, "done": true }));
    }
    let trashed = client::trash(dir).unwrap_or_default();
    let id = before.as_ref().map(|volume| volume.id.clone()).unwrap_or_default();
    match trashed.iter().find(|trashed| trashed.id == id) {
        Some(trashed) => print(format_args!(
            "volume {name} is in the trash, and goes {}; `holdfast volume trash restore {name}` brings it back, `holdfast volume \
             trash empty {name}` returns its space at once",
            super::trash::when(trashed.minutes_left)
        )),
        None => {
            let key = before.ok().map_or("", |volume| what_becomes_of_the_key(&volume));
            print(format_args!(
                "volume {name} is deleted{key}; its space returns in the background (`holdfast status`)"
            ))
        }
    }
}

/// Tells people what a rule has chosen, before it is done.
pub(super) fn said(settled: Option<(Layout, Option<String>)>, json: bool) -> Result<Option<Layout>> {
    let Some((layout, sentence)) = settled else { return Ok(None) };
    if let Some(sentence) = sentence.filter(|_| !json) {
        print(sentence)?;
    }
    Ok(Some(layout))
}

pub(super) fn key_of_new(key: WrappingKey, encrypt: bool) -> Result<Option<KeySource>> {
    let key = key.source()?;
    if key.is_some() && !encrypt {
        refuse!(Code::Invalid, "a key is for an encrypted volume; add --encrypt, or leave the key out");
    }
    Ok(key)
}

fn rekey(dir: &GridDir, name: String, key: WrappingKey) -> Result<(VolumeInfo, String)> {
    let Some(key) = key.source()? else {
        refuse!(
            Code::Invalid,
            "say which key the volume's own is to be wrapped with: --key-file FILE or --key-command CMD"
        );
    };
    let volume = client::volume(dir, &Request::VolumeRekey { name, key })?;
    let text = format!(
        "the key of volume {} is wrapped with the new one; the former one opens it no more. Separate clones, and what \
         `holdfast meta export` wrote before, still go by the former",
        volume.name
    );
    Ok((volume, text))
}

fn what_was_set(
    volume: &VolumeInfo,
    layout: Option<Layout>,
    fixed: Option<bool>,
    checked_reads: Option<bool>,
) -> Option<String> {
    let name = &volume.name;
    let layout = layout.map(|layout| {
        format!("volume {name} is written as {layout} from here on; what is there follows (`holdfast task watch`)")
    });
    let fixed = fixed.map(|is_fixed| match is_fixed {
        true => format!("volume {name} is fixed: {} of devices are set aside for it", Size(volume.set_aside_bytes)),
        false => format!("volume {name} is thin: it takes space as it is written"),
    });
    let checked = checked_reads.map(|is_checked| match is_checked {
        true => format!("what is read of volume {name} is checked against its checksums"),
        false => format!("what is read of volume {name} is not checked; a scrub still finds damage"),
    });
    let said: Vec<String> = layout.into_iter().chain(fixed).chain(checked).collect();
    (!said.is_empty()).then(|| said.join("\n"))
}

fn what_becomes_of_the_key(volume: &VolumeInfo) -> &'static str {
    match (volume.encrypted, &volume.clone_of, &volume.shares_with) {
        (false, ..) => "",
        (true, Some(_), _) => " (its volume keeps the key)",
        (true, None, Some(_)) => ", and its copy of the shared key destroyed",
        (true, None, None) => ", and its key destroyed: what devices still hold of it can't be read any more",
    }
}

fn how_to_use(volume: &VolumeInfo) -> String {
    match (volume.state, volume.uris.first()) {
        (VolumeState::Open | VolumeState::Forwarding, Some(uri)) => format!("; connect to {uri}"),
        (_, Some(uri)) => {
            let why = volume.waits.as_deref().unwrap_or("its log is being read");
            format!("; it is still opening ({why}), at {uri}")
        }
        (_, None) => format!("; `holdfast volume export {}` offers it to clients", volume.name),
    }
}

pub fn print_unreadable(unreadable: &[Unreadable]) -> Result<()> {
    unreadable.iter().try_for_each(|u| print(format_args!("volume {} can't be served by this host: {}", u.name, u.why)))
}

pub fn print_list(volumes: &[VolumeInfo]) -> Result<()> {
    if volumes.is_empty() {
        return print("no volumes yet; make one with `holdfast volume create NAME --size 4GiB`");
    }
    let mut rows = table(
        &["VOLUME", "STATE", "SIZE", "LAYOUT", "MAPPED", "LOG", "DEGRADED", "AT RISK", "CLIENTS"],
        &[2, 4, 5, 6, 7, 8],
    );
    for volume in volumes {
        // A clone's figures are its volume's.
        let own = volume.live.as_ref().filter(|_| volume.clone_of.is_none());
        let live = |f: &dyn Fn(&holdfast_api::VolumeLive) -> String| own.map_or("-".to_string(), f);
        rows.add_row([
            volume.clone_of.as_ref().map_or(volume.name.clone(), |of| format!("{} (clone in {of})", volume.name)),
            volume.state.to_string(),
            Size(volume.size_bytes).to_string(),
            volume.layout.clone(),
            live(&|l| Size(l.mapped_bytes).to_string()),
            live(&|l| Size(l.log_bytes).to_string()),
            live(&|l| l.degraded_segments.to_string()),
            live(&|l| l.at_risk_entries.to_string()),
            volume.sessions.to_string(),
        ]);
    }
    print_table(&rows)?;
    for volume in volumes {
        if volume.only_for.is_some() {
            print(format_args!("volume {} is for {}", volume.name, whom_for(volume)))?;
        }
        if let Some(why) = &volume.waits {
            print(format_args!("volume {} can't be opened yet: {why}", volume.name))?;
        }
        if volume.orphaned && volume.clone_of.is_none() {
            print(format_args!(
                "volume {0} is served by nobody: its host, {1}, is gone; `holdfast volume export {0}` has this one \
                 serve it",
                volume.name,
                volume.host.as_deref().unwrap_or("-")
            ))?;
        }
        if let Some(refused) = &volume.refused_writer {
            let writer = volume.writer.as_deref().unwrap_or("nobody now");
            print(format_args!(
                "volume {}: {refused} was refused to write; {writer} does. End the one that should not; `holdfast volume export {0} \
                 --shared` lets both",
                volume.name
            ))?;
        }
        super::filter::warning(volume).map_or(Ok(()), print)?;
    }
    Ok(())
}

fn print_one(volume: &VolumeInfo) -> Result<()> {
    let mut rows = table(&["", ""], &[]);
    rows.set_header(Vec::<String>::new());
    let mut row = |name: &str, value: String| {
        rows.add_row([name.to_string(), value]);
    };
    row("volume", volume.name.clone());
    row("id", volume.id.clone());
    if let Some(of) = &volume.clone_of {
        row("clone in", format!("{of}, whose figures these are"));
    }
    if let Some(of) = &volume.shares_with {
        row("shares data of", of.clone());
    }
    if !volume.needed_by.is_empty() {
        row("holds data for", volume.needed_by.join(", "));
    }
    if volume.is_store {
        row("is", "the store of a sharing domain".to_string());
    }
    if let Some(store) = &volume.sharing {
        let leaving = if volume.leaves_domain { ", until what it has there is copied back" } else { "" };
        row("shares content by", format!("{store}{leaving}"));
    }
    row("state", volume.state.to_string());
    if let Some(why) = &volume.waits {
        row("waits", why.clone());
    }
    row("size", Size(volume.size_bytes).to_string());
    row("layout", volume.layout.clone());
    super::tier::rows(volume, &mut row);
    row(
        "provisioning",
        match volume.provisioning {
            holdfast_api::Provisioning::Fixed => {
                format!("fixed ({} of devices are set aside)", Size(volume.set_aside_bytes))
            }
            other => other.to_string(),
        },
    );
    row("integrity", volume.integrity.to_string());
    row("compression", if volume.compression.is_empty() { "off" } else { &volume.compression }.to_string());
    row("encrypted", if volume.encrypted { "yes" } else { "no" }.to_string());
    if volume.protected {
        row("protected", format!("yes, until `holdfast volume protect {} off`", volume.name));
    }
    if let Some(schedule) = &volume.schedule {
        row("snapshots", format!("every {}; kept are {}", schedule.every, schedule.keep));
    }
    row("exported", volume.host.as_ref().map_or("no".to_string(), |host| format!("by host {host}")));
    if !volume.offered_by.is_empty() {
        row("offered by", format!("hosts {}", volume.offered_by.join(", ")));
    }
    if volume.failover {
        row("failover", "auto: any host takes it over when its own is lost".to_string());
    }
    for uri in &volume.uris {
        row("connect to", uri.clone());
    }
    row("for", whom_for(volume));
    if let Some(words) = &volume.limit {
        let unreadable = "none: its record can't be read by this release".to_string();
        let name = if words.is_empty() || is_limit(words) { "limit" } else { "qos" };
        row(name, if words.is_empty() { unreadable } else { words.clone() });
    }
    row("clients", volume.sessions.to_string());
    row("writers", writers_of(volume));
    for filter in volume.filters.iter().flat_map(|filters| &filters.filters).filter(|filter| !filter.kept) {
        row("filter", format!("{}: {}", filter.id, filter.spec));
    }
    row("epoch", volume.epoch.to_string());
    if let Some(live) = &volume.live {
        if live.space.elsewhere_bytes > 0 {
            let with = volume.sharing.as_ref().or(volume.shares_with.as_ref());
            let with = with.map_or("another volume", String::as_str);
            row("shared", format!("{} of its data lie with {with}", Size(live.space.elsewhere_bytes)));
        }
        if let Some(packed) = packed_text(&live.space) {
            row("packed", packed);
        }
        live_rows(live, &mut row);
    }
    print_table(&rows)
}

/// Where holders of copies are on several machines it tells how local reads are.
fn local_text(c: &holdfast_api::Counters) -> String {
    format!("{} of {} shard reads from this machine's nodes", c.local_reads, c.shard_reads)
}

fn live_rows(live: &VolumeLive, row: &mut impl FnMut(&str, String)) {
    let c = &live.counters;
    row("mapped", Size(live.mapped_bytes).to_string());
    if live.shares.is_some() {
        row("referenced", share(live.shares, |s| s.referenced_bytes));
        row("exclusive", share(live.shares, |s| s.exclusive_bytes));
    }
    row("log", Size(live.log_bytes).to_string());
    row("segments", format!("{} ({} degraded)", live.segments, live.degraded_segments));
    row("at risk", format!("{} log entries", live.at_risk_entries));
    if !live.suspect_nodes.is_empty() {
        let nodes: Vec<String> = live.suspect_nodes.iter().map(u32::to_string).collect();
        row("avoids nodes", nodes.join(", "));
    }
    row("reads", format!("{} ({})", c.reads, Size(c.read_bytes)));
    row("local", local_text(c));
    row("writes", format!("{} ({})", c.writes, Size(c.write_bytes)));
    row(
        "hedges",
        format!("{} appends, {} reads; {} reads reconstructed", c.append_hedges, c.read_hedges, c.reconstructed_reads),
    );
    row("read ahead", format!("{} of {} read", Size(c.ahead_bytes), Size(c.read_bytes)));
    row(
        "written",
        format!(
            "{} segments ({}): {} of guests from the log, {} past it",
            c.segments_written,
            Size(c.segment_bytes_written),
            Size(c.destaged_bytes),
            Size(c.direct_bytes)
        ),
    );
    row("cleaned", format!("{} segments ({}), {} freed", c.segments_cleaned, Size(c.cleaned_bytes), c.segments_freed));
    if c.repacked_bytes > 0 {
        row("packed later", format!("{} of that", Size(c.repacked_bytes)));
    }
    row(
        "repaired",
        format!(
            "{} shards rebuilt, {} checksum errors, {} shards scrubbed",
            c.shards_rebuilt, c.checksum_errors, c.shards_scrubbed
        ),
    );
    row("checkpoints", format!("{} ({})", c.checkpoints, Size(c.checkpoint_bytes)));
}
