//! `holdfast grid etcd …`: an etcd that goes by the grid's own certificates.

use super::format::{print, print_json};
use super::meta::EtcdArgs;
use crate::grid::etcd;
use crate::grid::etcd_members::{self, Change, Made, Outcome, Places, Wanted};
use crate::grid::layout::{GridDir, MetaConfig};
use crate::grid::processes::Role;
use crate::grid::token;
use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use holdfast_api::{Code, refuse};
use serde_json::json;
use std::path::PathBuf;

#[derive(Args, Debug)]
#[command(after_help = "Before there is a grid, on its first machine:\n  \
    holdfast grid etcd member a=10.0.0.1 b=10.0.0.2 w=10.0.0.9    three members; then what it prints, on each \
    machine\n  \
    holdfast grid up --etcd https://10.0.0.1:2379,https://10.0.0.2:2379,https://10.0.0.9:2379 --name a --address \
    10.0.0.1\n\n\
    Later, where the key of the grid's authority is:\n  \
    holdfast grid etcd member x=10.0.0.8 --replace w    another member in the place of a dead one\n  \
    holdfast grid etcd member w=10.0.0.9                another certificate for a member that is there\n  \
    holdfast grid etcd member a=10.0.0.1 b=10.0.0.2 w=10.0.0.9 --new-cluster    all have lost what they held\n  \
    holdfast grid etcd access                           let etcdctl in as root, for a day\n\n\
    On each machine whose list of members is to change:\n  \
    holdfast grid etcd use https://10.0.0.1:2379,https://10.0.0.2:2379,https://10.0.0.8:2379")]
pub struct EtcdCommand {
    #[command(subcommand)]
    action: EtcdAction,
}

#[derive(Subcommand, Debug)]
enum EtcdAction {
    /// Make members' certificates and their whole configuration; of a cluster that is there, add members or replace a
    /// dead one
    Member(MemberArgs),
    /// Have this machine use these members; its host does from its next start on
    Use {
        #[command(flatten)]
        etcd: EtcdArgs,
        /// All members' client URLs
        #[arg(value_name = "URL,…", value_delimiter = ',', conflicts_with = "etcd", required_unless_present = "etcd")]
        endpoints: Vec<String>,
        #[command(flatten)]
        token: token::TokenArgs,
    },
    /// Print what lets etcdctl in as root, for a day, in the form of a shell
    Access {
        /// Directory for ca.pem, root.pem and root.key; by default tls/etcd-root in the grid's
        #[arg(long, value_name = "DIR")]
        to: Option<PathBuf>,
    },
}

#[derive(Args, Debug)]
struct MemberArgs {
    /// Each member's name and address, for example a=10.0.0.1; a port behind it is its clients', the next one its
    /// peers' [default: 2379]
    #[arg(required = true, value_name = "NAME=ADDRESS")]
    members: Vec<Wanted>,
    /// The member that is dead, and whose place the new one takes
    #[arg(long, value_name = "NAME")]
    replace: Option<String>,
    /// All members have lost what they held: these are a new cluster, at the addresses that the old one had
    #[arg(long, conflicts_with = "replace")]
    new_cluster: bool,
    /// Directory for a directory of each member; by default tls/etcd in the grid's
    #[arg(long, value_name = "DIR")]
    to: Option<PathBuf>,
    /// Where members' machines will have these files
    #[arg(long, value_name = "DIR", default_value = "/etc/holdfast-etcd")]
    files: PathBuf,
    /// Where members' machines will have their data: a new directory in there
    #[arg(long, value_name = "DIR", default_value = "/var/lib/etcd")]
    data: PathBuf,
}

pub fn run(args: EtcdCommand, dir: &GridDir, json: bool) -> Result<()> {
    match args.action {
        EtcdAction::Member(args) => member(args, dir, json),
        EtcdAction::Use { etcd, endpoints, token } => use_members(etcd, endpoints, &token, dir, json),
        EtcdAction::Access { to } => access(to, dir, json),
    }
}

fn member(args: MemberArgs, dir: &GridDir, json: bool) -> Result<()> {
    let out = args.to.map(std::path::absolute).transpose().context("--to can't be used")?;
    let places = Places { files: args.files, data: args.data };
    let change = match args.replace {
        Some(dead) => Change::Replace(dead),
        None if args.new_cluster => Change::Anew,
        None => Change::Add,
    };
    let outcome = etcd_members::make(dir, &args.members, &change, &places, out.as_deref())?;
    if json {
        let made = |made: &Made| {
            json!({
                "member": made.name, "url": made.client_url, "dir": made.dir, "environment": made.environment
            })
        };
        let made: Vec<_> = outcome.made.iter().map(made).collect();
        return print_json(&json!({ "members": made, "removed": outcome.removed }));
    }
    if let Some(removed) = &outcome.removed {
        let refuse = match outcome.is_taken_back {
            true => format!(
                "Have the others refuse its certificate, too: copy {} of the new member's directory to {} on their \
                 machines",
                etcd_members::REVOKED,
                places.files.display()
            ),
            false => "Its certificate was signed elsewhere, and is not among those that the others refuse".to_string(),
        };
        print(format_args!("member {removed} is not a member of the grid's etcd any more. {refuse}"))?;
    }
    outcome.made.iter().try_for_each(|made| print_member(made, &places))?;
    print_next(&outcome)
}

fn print_member(made: &Made, places: &Places) -> Result<()> {
    let (name, from, to) = (&made.name, made.dir.display(), places.files.display());
    let Some(environment) = &made.environment else {
        return print(format_args!(
            "member {name} has another certificate in {from}. Copy member.pem and member.key to {to} on its machine, \
             for the user etcd (`chown etcd: {to}/*`); it uses them for new connections at once\n"
        ));
    };
    print(format_args!(
        "member {name}: copy {from} to its machine as {to}; then there, as root:\n  \
         apt install etcd-server\n  \
         systemctl stop etcd\n  \
         chown -R etcd: {to}\n  \
         cp {to}/etcd.env /etc/default/etcd\n  \
         systemctl start --no-block etcd\n\
         That file says:\n\n{environment}"
    ))
}

fn print_next(outcome: &Outcome) -> Result<()> {
    let urls: Vec<&str> = outcome.made.iter().map(|made| made.client_url.as_str()).collect();
    let is_added = outcome.made.iter().any(|made| made.environment.is_some());
    if outcome.is_anew && !outcome.is_new {
        return print(
            "next, when these members run: on each machine `holdfast grid down --host`; here `holdfast meta recover \
             --replace`, which shows what would come back, and with --yes does it; on each machine `holdfast grid up`",
        );
    }
    match (outcome.is_new, is_added) {
        (true, _) => print(format_args!(
            "next, when these members run: `holdfast grid up --etcd {} --name NAME --address ADDRESS …` in this \
             directory",
            urls.join(",")
        )),
        (false, true) => print(format_args!(
            "next, when it runs, where {} is not among a machine's --etcd: `holdfast grid etcd use` there with all \
             members' URLs, then `holdfast grid down --host` and `holdfast grid up`",
            urls.join(",")
        )),
        (false, false) => Ok(()),
    }
}

fn use_members(
    etcd: EtcdArgs,
    endpoints: Vec<String>,
    token: &token::TokenArgs,
    dir: &GridDir,
    json: bool,
) -> Result<()> {
    let Some(MetaConfig::Etcd(wanted)) = etcd.or_endpoints(endpoints).config()? else {
        refuse!(Code::Invalid, "name all members, for example https://10.0.0.1:2379,https://10.0.0.2:2379");
    };
    let config = etcd::use_members(dir, wanted, token.token()?.as_ref())?;
    if json {
        return print_json(&json!({ "store": config.meta.to_string() }));
    }
    let next = match Role::Host.find(dir) {
        Some(_) => ", its host from its next start on: `holdfast grid down --host`, `holdfast grid up`",
        None => "",
    };
    print(format_args!("this machine uses {}{next}", config.meta))
}

fn access(to: Option<PathBuf>, dir: &GridDir, json: bool) -> Result<()> {
    let to = to.map(std::path::absolute).transpose().context("--to can't be used")?;
    let access = etcd::access(dir, to)?;
    if json {
        return print_json(&json!({ "endpoints": access.endpoints, "dir": access.dir }));
    }
    let file = |name: &str| access.dir.join(name).display().to_string();
    print(format_args!(
        "export ETCDCTL_API=3\nexport ETCDCTL_ENDPOINTS={}\nexport ETCDCTL_CACERT={}\nexport ETCDCTL_CERT={}\nexport \
         ETCDCTL_KEY={}",
        access.endpoints.join(","),
        file("ca.pem"),
        file("root.pem"),
        file("root.key")
    ))
}
