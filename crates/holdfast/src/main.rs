//! The one binary: storage node, host, local grid, volumes.
//!
//! Role: reads the command line and hands over. Everything that can go wrong ends here as one message on standard error
//! that says what, why, and what to do next.

mod alerts;
mod bench;
mod capacity;
mod cli;
mod client;
mod config;
mod daemon;
mod drill;
mod drives;
mod grid;
mod host;
mod link_tls;
mod logger;
mod nbd_client;
mod nbd_uri;
mod node;
mod overview;
mod protocol;
mod remote;
mod resources;
mod support;

use anyhow::Result;
use clap::{Args, CommandFactory, Parser, Subcommand};
use grid::layout::GridDir;
use holdfast_api::{Code, refuse};
use protocol::code_of;
use remote::{Remote, RemoteArgs};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;

/// A host's map is made of many small pieces that come and go between buffers: the C library's allocator left twice as much unused
/// between them as was in use (docs/decisions/0004).
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(Parser, Debug)]
#[command(
    name = "holdfast",
    version,
    about = "A storage grid: volumes that outlive the loss of any node",
    after_help = "Try it on this machine:\n  \
        holdfast grid up                          four storage nodes and a host\n  \
        holdfast volume create vm1 --size 4GiB    a volume over NBD, any node may fail\n  \
        holdfast node kill 2                      see for yourself\n  \
        holdfast status\n  \
        holdfast grid down\n\n\
        From elsewhere, by a host whose `api.tcp` is set (`holdfast config explain api.tcp`):\n  \
        holdfast --at https://10.0.0.1:8443 --token-file FILE --ca-file FILE status\n  \
        or with HOLDFAST_AT, HOLDFAST_TOKEN_FILE and HOLDFAST_CA_FILE"
)]
struct Cli {
    /// The grid's directory [default: $HOLDFAST_DIR, else ~/.holdfast/grid, or the package's /var/lib/holdfast]
    #[arg(long, global = true, value_name = "DIR")]
    dir: Option<PathBuf>,

    /// Answer in JSON
    #[arg(long, global = true)]
    json: bool,

    #[command(flatten)]
    remote: RemoteArgs,

    #[command(subcommand)]
    command: Command,
}

impl Cli {
    /// The grid that is meant.
    fn grid(&self) -> Result<GridDir> {
        match Remote::of(&self.remote)? {
            Some(remote) => Ok(GridDir::elsewhere(remote)),
            None => GridDir::choose(self.dir.as_deref()),
        }
    }

    /// Refuses to do at another machine what is done here.
    fn check_place(&self) -> Result<()> {
        if self.remote.is_meant() && !self.command.goes_elsewhere() {
            refuse!(
                Code::State,
                "this command is given at a machine of the grid, without --at; with --at there are volume, snapshot, space, \
                 status, top, why, qos, sharing, tier, task, device, machine and alerts"
            );
        }
        Ok(())
    }
}

impl Command {
    /// It asks a host, and needs nothing of the host's machine.
    fn goes_elsewhere(&self) -> bool {
        matches!(
            self,
            Command::Volume(_)
                | Command::Snapshot(_)
                | Command::Space(_)
                | Command::Status(_)
                | Command::Top(_)
                | Command::Why(_)
                | Command::Qos(_)
                | Command::Sharing(_)
                | Command::Tier(_)
                | Command::Task(_)
                | Command::Device(_)
                | Command::Machine(_)
                | Command::Alerts(_)
        )
    }
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Bring a grid on this machine up and down
    Grid(cli::grid::GridArgs),
    /// Make, clone, list, resize, delete and export volumes
    Volume(cli::volume::VolumeArgs),
    /// Take, list and delete snapshots of volumes, and roll back to them
    Snapshot(cli::snapshot::SnapshotArgs),
    /// Write a snapshot, or what changed since another one, to standard output
    Send(cli::transfer::SendArgs),
    /// Take what `holdfast send` writes in from standard input
    Receive(cli::transfer::ReceiveArgs),
    /// Copies of volumes in a directory or an S3 store, which no grid is needed to read
    Backup(cli::backup::BackupArgs),
    /// Which blocks of a volume or snapshot were written since another snapshot
    Changes(cli::transfer::ChangesArgs),
    /// What can still be written, and where the bytes are
    Space(cli::space::SpaceArgs),
    /// The busiest volumes, again and again
    Top(cli::top::TopArgs),
    /// Why a volume is slow
    Why(cli::why::WhyArgs),
    /// What the grid can do, and which floors of that are promised
    Qos(cli::qos::QosArgs),
    /// Domains of volumes whose equal content is stored once
    Sharing(cli::sharing::SharingArgs),
    /// The grid in a browser of this machine
    Dashboard(cli::dashboard::DashboardArgs),
    /// Whether people are told what is not well
    Alerts(cli::alerts::AlertsArgs),
    /// What first tiers hold, what leaves them, and how often they are read
    Tier(cli::tier::TierArgs),
    /// What the grid does right now, and what is not well
    Status(cli::status::StatusArgs),
    /// Add, drain and remove what data lies on
    Device(cli::device::DeviceArgs),
    /// The machines of a grid, from any of them; take one out
    Machine(cli::machine::MachineArgs),
    /// Move a grid's metadata between the embedded store and etcd
    Meta(cli::meta::MetaArgs),
    /// What is done in the background, and how it gets on
    Task(cli::task::TaskArgs),
    /// Add, drain and remove nodes of a local grid, make them fail and come back; or run a storage node
    Node(cli::node::NodeArgs),
    /// Lose a node, a disk, the host, the metadata or a machine under load, put it right, and verify everything
    Drill(drill::DrillArgs),
    /// The loads of published reports on this grid, beside what they say
    Bench(bench::BenchArgs),
    /// Write what a report of a fault needs to one file, without secrets
    Support(cli::support::SupportArgs),
    /// Settings of this machine: what they mean, whether they are right, what is set
    Config(cli::config::ConfigArgs),
    /// Run the host of a grid in the foreground: its controllers, NBD server and control socket
    #[command(after_help = "Example:\n  holdfast host --dir /data/grid\n\n`holdfast grid up` starts one by itself.")]
    Host(HostArgs),
    /// Print the command line as the page docs/reference/cli.md, or in other forms
    #[command(hide = true)]
    Reference(cli::reference::ReferenceArgs),
}

#[derive(Args, Debug)]
struct HostArgs {
    #[arg(long, hide = true)]
    daemon: bool,
}

fn main() -> ExitCode {
    // The allocator asks for huge pages where the system leaves that to programs. What is given back a page at a time then comes
    // anew two megabytes at a time, zeroed: more memory, and writes cost more. A kernel that knows of none refuses.
    let _ = rustix::thread::disable_transparent_huge_pages(true);
    let cli = Cli::parse();
    let is_json = cli.json;
    let (done, failure) = match &cli.command {
        Command::Status(args) => (
            cli.grid().and_then(|dir| cli::status::run_status(args, &dir, cli.json)),
            ExitCode::from(cli::status::UNKNOWN),
        ),
        _ => (run(cli).map(|()| ExitCode::SUCCESS), ExitCode::FAILURE),
    };
    done.unwrap_or_else(|error| {
        match is_json {
            true => eprintln!("{}", json!({ "error": { "code": code_of(&error), "message": format!("{error:#}") } })),
            false => eprintln!("holdfast: {error:#}"),
        }
        failure
    })
}

fn run(cli: Cli) -> Result<()> {
    cli.check_place()?;
    let grid = cli.grid();
    let dir = cli.dir.as_deref();
    match cli.command {
        Command::Grid(args) => cli::grid::run(args, &grid?, cli.json),
        Command::Volume(args) => cli::volume::run(args, &grid?, cli.json),
        Command::Snapshot(args) => cli::snapshot::run(args, &grid?, cli.json),
        Command::Send(args) => cli::transfer::send(args, &grid?, cli.json),
        Command::Receive(args) => cli::transfer::receive(&args, &grid?, cli.json),
        Command::Backup(args) => cli::backup::run(args, grid, cli.json),
        Command::Changes(args) => cli::transfer::changes(&args, &grid?, cli.json),
        Command::Space(args) => cli::space::run(&args, &grid?, cli.json),
        Command::Top(args) => cli::top::run(&args, &grid?, cli.json),
        Command::Why(args) => cli::why::run(&args, &grid?, cli.json),
        Command::Bench(args) => bench::run(args, &grid?, cli.json),
        Command::Qos(args) => cli::qos::run(args, &grid?, cli.json),
        Command::Dashboard(args) => cli::dashboard::run(&args, &grid?, cli.json),
        Command::Alerts(args) => cli::alerts::run(&args, &grid?, cli.json),
        Command::Sharing(args) => cli::sharing::run(args, &grid?, cli.json),
        Command::Tier(args) => cli::tier::run(&args, &grid?, cli.json),
        Command::Status(_) => unreachable!("it has exit codes of its own"),
        Command::Drill(args) => drill::run(args, &grid?, cli.json),
        Command::Device(args) => cli::device::run(args, &grid?, cli.json),
        Command::Machine(args) => cli::machine::run(&args, &grid?, cli.json),
        Command::Meta(args) => cli::meta::run(args, &grid?, cli.json),
        Command::Task(args) => cli::task::run(args, &grid?, cli.json),
        Command::Node(args) => cli::node::run(args, dir, cli.json),
        Command::Support(args) => cli::support::run(args, &grid?, cli.json),
        Command::Config(args) => cli::config::run(args, dir, cli.json),
        Command::Reference(args) => cli::reference::run(args, Cli::command()),
        Command::Host(args) => {
            let dir = grid?;
            daemon::begin(args.daemon)?;
            dir.load()?;
            grid::processes::Role::Host.register(&dir)?;
            host::run(&dir)
        }
    }
}
