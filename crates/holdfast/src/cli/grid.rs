//! `holdfast grid …`: a grid comes up, goes down, and gets what its machines need of it.

use super::format::{print, print_json};
use super::status::{print_findings, print_grid};
use super::tls::{TlsArgs, TokenArgs};
use crate::grid::address::Wanted;
use crate::grid::layout::{DeviceConfig, GridConfig, GridDir, MetaConfig};
use crate::grid::processes::Role;
use crate::grid::token::{self, Join};
use crate::grid::{self, UpOptions, UpOutcome};
use crate::overview::{gather, nbd_warning};
use anyhow::{Context, Result};
use clap::{Args, Subcommand, ValueEnum};
use holdfast_base::size::Size;
use holdfast_verdict::findings;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    holdfast grid up                             four nodes with two devices each, in ~/.holdfast/grid\n  \
    holdfast grid up --dir /data/grid --nodes 3 --devices 1 --device-size 2GiB\n  \
    holdfast grid up --etcd http://10.0.0.9:2379 --name a --address 10.0.0.1               the first of several machines\n  \
    holdfast grid up --etcd http://10.0.0.9:2379 --name b --address 10.0.0.2 --join TOKEN  the next one, with\n\
    \x20                                              a token of `holdfast grid token` on the first\n  \
    holdfast grid up --device /dev/nvme0n1 --device /dev/nvme1n1   one node on empty devices\n  \
    holdfast grid status\n  \
    holdfast grid down                           everything stops; `holdfast grid up` goes on where it was\n\n\
    A grid's directory holds all of it: configuration, devices, metadata, logs. HOLDFAST_DIR names one for all commands.")]
pub struct GridArgs {
    #[command(subcommand)]
    action: GridAction,
}

#[derive(Subcommand, Debug)]
enum GridAction {
    /// Bring the grid up; make it first if there is none
    Up(Box<UpArgs>),
    /// Stop all processes of the grid; its data stays
    Down {
        /// The host alone: this machine's nodes go on
        #[arg(long)]
        host: bool,
        /// Although clients are connected
        #[arg(long)]
        force: bool,
    },
    /// Processes and devices of the grid
    Status,
    /// Give this machine's nodes and host another address, or other ports: its nodes are restarted one after the other
    Address(AddressArgs),
    /// Print a token that lets one machine join a grid with TLS, or renew its certificates
    Token(TokenArgs),
    /// The certificates of this machine
    Tls(TlsArgs),
    /// An etcd that goes by the grid's own certificates: its members, and who gets in
    Etcd(super::etcd::EtcdCommand),
    /// Write units for systemd, which then runs this machine's part of the grid
    Units(super::units::UnitsArgs),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Switch {
    On,
    Off,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    holdfast grid address 10.0.0.5            the machine has another address: nodes and host use it, all hosts learn of it\n  \
    holdfast grid address --port 7600         its nodes listen on ports from 7600 on\n\n\
    Works on a grid that is up, where clients go on, and on one that is down.")]
struct AddressArgs {
    /// Address of this machine that the other machines of the grid can reach
    #[arg(value_name = "IP", required_unless_present = "port")]
    address: Option<IpAddr>,
    /// First of the nodes' ports
    #[arg(long)]
    port: Option<u16>,
    /// Restart nodes although data that is not fully redundant now is less so meanwhile
    #[arg(long)]
    force: bool,
}

#[derive(Args, Debug)]
struct UpArgs {
    /// Storage nodes [default: 4]
    #[arg(long)]
    nodes: Option<u32>,
    /// Devices of each node [default: 2]
    #[arg(long)]
    devices: Option<u32>,
    /// Size of each device, all of it allocated at once [default: 8GiB, or less: all together take two thirds of what is free]
    #[arg(long)]
    device_size: Option<Size>,
    /// A block device, or a file that is there, for the only node, any number of times; it has to be empty
    #[arg(long = "device", value_name = "PATH", conflicts_with_all = ["devices", "device_size"])]
    paths: Vec<PathBuf>,
    /// Although a device that is named holds something, which is destroyed
    #[arg(long, requires = "paths")]
    force: bool,
    /// First of the nodes' ports on 127.0.0.1 [default: the first free range from 7500 on]
    #[arg(long)]
    port: Option<u16>,
    /// Serve NBD over TCP as well, for example on 127.0.0.1:10809; other machines' clients need --tls-dir, or
    /// --nbd-open
    #[arg(long, value_name = "ADDR:PORT")]
    nbd_tcp: Option<SocketAddr>,
    /// Serve other machines without TLS: everybody who reaches the address can read, overwrite and discard every volume
    #[arg(long, requires = "nbd_tcp", conflicts_with = "tls_dir")]
    nbd_open: bool,
    /// Secure NBD over TCP with server-cert.pem and server-key.pem of this directory; with a ca-cert.pem beside
    /// them, clients need a certificate of that CA
    #[arg(long, value_name = "DIR", requires = "nbd_tcp")]
    tls_dir: Option<PathBuf>,
    #[command(flatten)]
    etcd: super::meta::EtcdArgs,
    /// Name of this machine's host, unlike all others of the grid [default: local]
    #[arg(long)]
    name: Option<String>,
    /// Address that the nodes listen on, where all hosts reach them [default: 127.0.0.1]
    #[arg(long, value_name = "IP")]
    address: Option<IpAddr>,
    /// Become a part of a grid whose metadata are in etcd, rather than make one: a token of `holdfast grid token`, or
    /// where that grid has no TLS its id
    #[arg(long, value_name = "TOKEN|GRID", requires = "etcd", requires = "name")]
    join: Option<Join>,
    /// The token in a file, or `-` for standard input, where the list of processes does not show it
    #[arg(long, value_name = "FILE", requires = "etcd", requires = "name", conflicts_with = "join")]
    join_file: Option<PathBuf>,
    /// Whether a grid that is made has TLS between its hosts and nodes [default: on with --etcd and --address, else off]
    #[arg(long, value_enum, conflicts_with_all = ["join", "join_file"])]
    tls: Option<Switch>,
}

impl UpArgs {
    fn options(self) -> Result<UpOptions> {
        let of_file = |file: &PathBuf| {
            token::read(file).with_context(|| format!("cannot take what to join from {}", file.display()))
        };
        let of_file = self.join_file.as_ref().map(of_file).transpose()?;
        Ok(UpOptions {
            nodes: self.nodes,
            devices: self.devices,
            device_size: self.device_size,
            paths: self.paths,
            force: self.force,
            port: self.port,
            nbd_tcp: self.nbd_tcp,
            tls_dir: self.tls_dir.map(std::path::absolute).transpose()?,
            meta: self.etcd.config()?,
            name: self.name,
            address: self.address,
            join: self.join.or(of_file),
            nbd_open: self.nbd_open,
            tls: self.tls.map(|tls| tls == Switch::On),
        })
    }
}

pub fn run(args: GridArgs, dir: &GridDir, json: bool) -> Result<()> {
    match args.action {
        GridAction::Up(args) => {
            let outcome = grid::up(dir, &args.options()?)?;
            if json {
                return print_json(&gather(dir)?);
            }
            print(what_is_up(&outcome, dir))?;
            for node in &outcome.hung {
                print(format_args!("node {node} hangs; `holdfast node resume {node}` lets it go on"))?;
            }
            if let Some(warning) = nbd_warning(dir, &outcome.config) {
                print(warning)?;
            }
            print(format_args!("next: {}", what_next(&outcome.config)))
        }
        GridAction::Down { host, force } => {
            let part = if host { grid::Part::Host } else { grid::Part::All };
            let stopped = grid::down(dir, part, force)?;
            if json {
                return print_json(&serde_json::json!({ "stopped": stopped }));
            }
            print(match stopped.is_empty() {
                true => "nothing was running".to_string(),
                false => format!("stopped: {}; `holdfast grid up` goes on", stopped.join(", ")),
            })
        }
        GridAction::Status => {
            let status = gather(dir)?;
            if json {
                return print_json(&status);
            }
            print_findings(&findings::of(&status))?;
            print_grid(&status)
        }
        GridAction::Address(args) => change_address(&args, dir, json),
        GridAction::Token(args) => super::tls::token(&args, dir, json),
        GridAction::Tls(args) => super::tls::run(args, dir, json),
        GridAction::Etcd(args) => super::etcd::run(args, dir, json),
        GridAction::Units(args) => super::units::run(args, dir, json),
    }
}

fn what_is_up(outcome: &UpOutcome, dir: &GridDir) -> String {
    let (grid, place) = (&outcome.config.grid, dir.root().display());
    if outcome.started.is_empty() {
        return format!("grid {grid} in {place} is up already; nothing was started");
    }
    let made = if outcome.created { "made and " } else { "" };
    let devices: Vec<&DeviceConfig> = outcome.config.nodes.iter().flat_map(|node| &node.devices).collect();
    let of = match devices.first().filter(|_| outcome.created) {
        Some(device) => {
            let count = devices.len();
            format!(", with {count} {} of {}", if count == 1 { "device" } else { "devices" }, Size(device.size_bytes))
        }
        None => String::new(),
    };
    format!("grid {grid} is {made}up in {place}: {} started{of}", outcome.started.join(", "))
}

/// What there is to do on a grid with these nodes: a volume needs two devices.
fn what_next(config: &GridConfig) -> &'static str {
    let devices: usize = config.nodes.iter().map(|node| node.devices.len()).sum();
    if devices == 1 && config.meta == MetaConfig::Embedded {
        "`holdfast node add`, since a volume's data are kept on two devices at least; `holdfast status`"
    } else {
        "`holdfast volume create NAME --size 4GiB`, `holdfast status`"
    }
}

fn change_address(args: &AddressArgs, dir: &GridDir, json: bool) -> Result<()> {
    let before = dir.load()?.address();
    let wanted = Wanted { ip: args.address, port: args.port, force: args.force };
    let is_changed = grid::address::change(dir, &wanted, |step| {
        if !json {
            let _ = print(step);
        }
    })?;
    if json {
        return print_json(&serde_json::json!({ "changed": is_changed }));
    }
    if !is_changed {
        return print("all of that is so already");
    }
    let config = dir.load()?;
    let tcp = dir.settings(&config).ok().and_then(|settings| settings.nbd_tcp);
    let is_left = |tcp: &SocketAddr| args.address.is_some() && Some(tcp.ip()) == before;
    if let Some(tcp) = tcp.filter(is_left) {
        let path = dir.settings_path();
        print(format_args!(
            "NBD is still served on {tcp}: change nbd.tcp in {}, then restart the host",
            path.display()
        ))?;
    }
    print(match Role::Host.find(dir) {
        Some(_) => "this machine's part of the grid is there now; `holdfast status` shows it",
        None => "`holdfast grid up` brings this machine's part of the grid up there",
    })
}
