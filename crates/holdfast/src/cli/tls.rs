//! `holdfast grid token` and `holdfast grid tls …`: letting machines in, and the certificates of this one.

use super::format::{print, print_json, print_table, table};
use crate::client;
use crate::grid::authority;
use crate::grid::certs::{Certificates, fingerprint_text, now_s, roles};
use crate::grid::etcd::Door;
use crate::grid::grow;
use crate::grid::layout::{GridConfig, GridDir};
use crate::grid::processes::Role;
use crate::grid::revoked;
use crate::grid::token::{self, Valid};
use crate::host::catalog::check_name;
use crate::host::signer;
use crate::logger::date;
use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use holdfast_api::{Code, Request, refuse};
use holdfast_format::schedule::Span;
use holdfast_runtime::bearer::Bearer;
use holdfast_runtime::pki::{self, Identity};
use serde_json::json;
use std::io::Read;
use std::path::PathBuf;
use std::time::Duration;

/// Of a token, unless it is said.
const BEARER_VALID: Duration = Duration::from_secs(90 * 24 * 3600);

/// Clocks of machines that are kept right differ by less.
const CLOCKS_DIFFER: Duration = Duration::from_secs(60);

/// Twenty-four words are shorter by far.
const PHRASE_BYTES_MAX: u64 = 4096;

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    a$ holdfast grid token\n  \
    b$ holdfast grid up --etcd http://10.0.0.9:2379 --name b --address 10.0.0.2 --join TOKEN\n\n  \
    a$ holdfast grid token --for b              for a machine of the grid that needs certificates again; then one of\n  \
    b$ holdfast grid tls rotate --token TOKEN\n  \
    b$ holdfast node add --token TOKEN\n\n\
    A machine that has the key of the grid's authority (`holdfast machine list`) gives tokens out, and its host signs what is asked for \
    with them: it has to be up then. A token \
    holds a secret: whoever has it can join, until it is used.")]
pub struct TokenArgs {
    /// How long it is good for: a number and m, h or d, up to 7d
    #[arg(long, default_value = "1h", value_name = "TIME")]
    valid: Valid,
    /// For a machine that is of the grid already, rather than for a new one
    #[arg(long = "for", value_name = "NAME")]
    renews: Option<String>,
}

#[derive(Args, Debug)]
#[command(
    after_help = "Examples, for volumes that only certain clients may have, on a machine that signs (`holdfast machine list`):\n  \
    holdfast grid tls server 10.0.0.1 --out /etc/holdfast/nbd-tls     then set nbd.tcp and nbd.tls_dir in holdfast.toml\n  \
    holdfast grid tls client vm7                                      its files are for vm7's machine\n  \
    holdfast volume allow db vm7\n  \
    nbdinfo 'nbds://10.0.0.1:10809/db?tls-certificates=/etc/pki/vm7'\n\n\
    Certificates are good for two years. Hosts make those of their machines anew when a third of that is left, of \
    their NBD servers, too; `holdfast status` warns when one has less than 30 days left. New ones count from the next \
    connection on. Clients' are made anew by hand."
)]
pub struct TlsArgs {
    #[command(subcommand)]
    action: TlsAction,
}

#[derive(Subcommand, Debug)]
enum TlsAction {
    /// This machine's certificates, for whom they speak and when they end
    Show,
    /// Make new keys and certificates for this machine's host and nodes
    Rotate {
        #[command(flatten)]
        token: token::TokenArgs,
    },
    /// The key that signs: a copy of it for another machine, so that the loss of the first one changes nothing
    Authority {
        #[command(subcommand)]
        action: AuthorityAction,
    },
    /// Sign a certificate for a client of volumes: what nbdinfo, qemu and others take as a directory of TLS credentials
    Client {
        /// What `holdfast volume allow` knows it by
        name: String,
        /// Directory for ca-cert.pem, client-cert.pem and client-key.pem; by default tls/clients/NAME in the grid's
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
    /// Let somebody in at the HTTP interface (`api.tcp`), by a certificate, or by a token: to do all, or to look
    Operator {
        /// What the host's log and `grid tls revoke` know them by
        name: String,
        /// They may look, and change nothing
        #[arg(long)]
        reader: bool,
        /// Print a token, for what takes no certificate: sent as `Authorization: Bearer TOKEN`
        #[arg(long, conflicts_with = "out")]
        token: bool,
        /// How long the token is good for: a number and m, h or d, up to 730d [default: 90d]
        #[arg(long, requires = "token", value_name = "TIME")]
        valid: Option<Span>,
        /// Directory for ca-cert.pem, client-cert.pem and client-key.pem; by default tls/operators/NAME in the grid's
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
    /// Take back all certificates and tokens that someone was given by now: connections end, and no new ones are let in
    ///
    /// Of a machine that was stolen: its host and each of its nodes. One that is issued later is good: `holdfast grid tls client`,
    /// or `holdfast grid token --for MACHINE` and `holdfast grid tls rotate` there. Nodes hear of it by the host of their machine.
    Revoke {
        /// host/NAME, node/NUMBER, client/NAME, operator/NAME or reader/NAME
        #[arg(value_name = "ROLE/NAME")]
        who: String,
    },
    /// Sign a certificate for a host's servers, for nbd.tls_dir and api.tls_dir: clients of this grid are asked for theirs then
    Server {
        /// Addresses and names that clients reach the host by
        #[arg(required = true, value_name = "ADDRESS")]
        names: Vec<String>,
        /// Directory for ca-cert.pem, server-cert.pem and server-key.pem; by default nbd-tls in the grid's
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
}

#[derive(Subcommand, Debug)]
enum AuthorityAction {
    /// Write it to a file: whoever has that can let anybody in; carry it by hand, and delete it, or keep it in a safe place
    Export { file: PathBuf },
    /// Have this machine of the grid sign as well: with such a file, or with the words of `phrase` on standard input
    Import {
        #[arg(required_unless_present = "phrase", conflicts_with = "phrase")]
        file: Option<PathBuf>,
        /// Twenty-four words, on standard input
        #[arg(long)]
        phrase: bool,
    },
    /// Have another machine sign as well: the key goes from host to host over TLS
    Give {
        /// As `holdfast machine list` has it
        machine: String,
    },
    /// Make its certificate anew before it ends, over the same key: all that was signed stays good
    ///
    /// Machines take it by themselves. Clients of volumes and members of etcd have copies, which are to be replaced
    /// before the old one ends.
    Renew,
    /// Print the key as twenty-four words, to be kept on paper: with them any machine of the grid can sign, should all be lost that do
    Phrase,
}

/// Prints a token, alone on standard output.
pub fn token(args: &TokenArgs, dir: &GridDir, json: bool) -> Result<()> {
    let token = signer::give_out(dir, args.valid, args.renews.as_deref())?;
    if json {
        let valid_s = args.valid.0.as_secs();
        return print_json(&json!({ "token": token.to_string(), "id": token.id(), "valid_s": valid_s }));
    }
    print(&token)?;
    if Role::Host.find(dir).is_none() {
        // Standard output is the token alone.
        eprintln!("note: this machine's host is down, and has to be up to sign: `holdfast grid up`");
    }
    Ok(())
}

fn with_tls(dir: &GridDir) -> Result<(GridConfig, Certificates)> {
    let config = dir.load()?;
    if !config.tls {
        refuse!(
            Code::State,
            "the grid in {} has no TLS; it is chosen when a grid is made (`grid up --tls on`)",
            dir.root().display()
        );
    }
    let certificates = Certificates::of(dir, config.grid_id()?);
    Ok((config, certificates))
}

fn authority(action: &AuthorityAction, dir: &GridDir, json: bool) -> Result<()> {
    let (_, certificates) = with_tls(dir)?;
    match action {
        AuthorityAction::Export { file } => {
            signer::export_authority(&certificates, file)?;
            if json {
                return print_json(&json!({ "file": file }));
            }
            print(format_args!(
                "the key of the grid's authority is in {}: on another machine `holdfast grid tls authority import FILE`, then delete \
                 the file, or keep it in a safe place",
                file.display()
            ))
        }
        AuthorityAction::Import { file, .. } => {
            match file {
                Some(file) => signer::import_authority(&certificates, file)?,
                None => {
                    let mut words = String::new();
                    std::io::stdin().take(PHRASE_BYTES_MAX).read_to_string(&mut words).context("no words came")?;
                    certificates.put_authority_phrase(&words)?;
                }
            }
            if json {
                return print_json(&json!({ "signs": true }));
            }
            print("this machine has the key of the grid's authority, and signs")
        }
        AuthorityAction::Give { machine } => {
            client::done(dir, &Request::AuthorityGive { to: machine.clone() })?;
            if json {
                return print_json(&json!({ "machine": machine, "signs": true }));
            }
            print(format_args!("machine {machine} has the key of the grid's authority, and signs"))
        }
        AuthorityAction::Renew => renew_authority(dir, &certificates, json),
        AuthorityAction::Phrase => {
            let phrase = certificates.authority_phrase()?;
            if json {
                return print_json(&json!({ "phrase": phrase }));
            }
            print(phrase)?;
            eprintln!(
                "note: whoever has these words can let anybody into the grid. Write them down, and keep them off the grid's machines; \
                 `holdfast grid tls authority import --phrase` takes them"
            );
            Ok(())
        }
    }
}

fn renew_authority(dir: &GridDir, certificates: &Certificates, json: bool) -> Result<()> {
    let end = || anyhow::Ok(pki::Facts::of_pem(&certificates.ca_pem()?)?.not_after);
    let before = end()?;
    authority::renew(dir, certificates)?;
    let after = end()?;
    if json {
        return print_json(&json!({ "old_expires": before, "expires": after }));
    }
    print(format_args!(
        "the authority's certificate is good until {}, over the same key: what it has signed stays good, and all \
         machines take it by themselves, while their hosts are up. Before {}, when the old one ends, give clients of \
         volumes {} as ca-cert.pem, and members of an etcd of the grid's own ca.pem of `holdfast grid etcd member \
         NAME=ADDRESS`, with a restart",
        date(after),
        date(before),
        certificates.ca().display()
    ))
}

/// `holdfast grid tls …`.
pub fn run(args: TlsArgs, dir: &GridDir, json: bool) -> Result<()> {
    match args.action {
        TlsAction::Show => show(dir, json),
        TlsAction::Authority { action } => authority(&action, dir, json),
        TlsAction::Client { name, out } => issue_client(&name, out, dir, json),
        TlsAction::Operator { name, reader, token, valid, out } => {
            check_name(&name)?;
            let role = if reader { pki::Role::Reader(name) } else { pki::Role::Operator(name) };
            match token {
                true => print_bearer(role, valid, dir, json),
                false => issue_operator(&role, out, dir, json),
            }
        }
        TlsAction::Revoke { who } => revoke(&who, dir, json),
        TlsAction::Server { names, out } => server(&names, out, dir, json),
        TlsAction::Rotate { token } => {
            let (config, _) = with_tls(dir)?;
            let roles = roles(&config);
            grow::rotate(dir, &config, &roles, token.token()?.as_ref())?;
            let names: Vec<String> = roles.iter().map(ToString::to_string).collect();
            if json {
                return print_json(&json!({ "renewed": names, "used_after_restart": false }));
            }
            print(format_args!(
                "new certificates: {}. Each process uses its own from its next connection on",
                names.join(", ")
            ))
        }
    }
}

/// Only where the authority's key is.
fn that_sign(dir: &GridDir) -> Result<Certificates> {
    let (_, certificates) = with_tls(dir)?;
    if !certificates.has_authority() {
        refuse!(
            Code::NotPermitted,
            "{} has no key of the grid's authority, so that nothing can be signed here. Do it on a machine that has it \
             (`holdfast machine list`), and copy the files",
            certificates.root().display()
        );
    }
    Ok(certificates)
}

fn absolute(out: Option<PathBuf>, default: PathBuf) -> Result<PathBuf> {
    let out = out.unwrap_or(default);
    std::path::absolute(&out).with_context(|| format!("cannot use {} as --out", out.display()))
}

fn issue_client(name: &str, out: Option<PathBuf>, dir: &GridDir, json: bool) -> Result<()> {
    check_name(name)?;
    let certificates = that_sign(dir)?;
    let out = absolute(out, certificates.client_dir(name))?;
    certificates.issue_client(&pki::Role::Client(name.to_string()), &out)?;
    if json {
        return print_json(&json!({ "client": name, "dir": out }));
    }
    print(format_args!(
        "client {name}: its certificate and key are in {0}. Move them to its machine: who has client-key.pem is client {name}. \
         `holdfast volume allow VOLUME {name}` lets it in; it connects to nbds://HOST:PORT/VOLUME?tls-certificates=DIR",
        out.display()
    ))
}

fn issue_operator(role: &pki::Role, out: Option<PathBuf>, dir: &GridDir, json: bool) -> Result<()> {
    let certificates = that_sign(dir)?;
    let out = absolute(out, certificates.paths(role).certificate.with_file_name(""))?;
    certificates.issue_client(role, &out)?;
    if json {
        return print_json(&json!({ "role": role.to_string(), "dir": out }));
    }
    print(format_args!(
        "{role}: certificate and key are in {0}. Who has client-key.pem is {role}: `curl --cacert {0}/ca-cert.pem --cert \
         {0}/client-cert.pem --key {0}/client-key.pem https://HOST:PORT/v1/health`",
        out.display()
    ))
}

/// Prints a token, alone on standard output.
fn print_bearer(role: pki::Role, valid: Option<Span>, dir: &GridDir, json: bool) -> Result<()> {
    let certificates = that_sign(dir)?;
    let valid = valid.map_or(BEARER_VALID, |valid| Duration::from_secs(valid.seconds()));
    if valid > pki::LEAF_VALID || valid.is_zero() {
        refuse!(
            Code::Invalid,
            "a token is good for 730 days at most, and for a second at least; choose another --valid"
        );
    }
    let token = Bearer::issue(&certificates.authority()?, certificates.grid(), role.clone(), valid)?;
    if json {
        return print_json(&json!({ "role": role.to_string(), "token": token, "valid_s": valid.as_secs() }));
    }
    print(token)
}

/// What a person is given may be dated by the clock of another machine that signs. Machines get theirs from whichever host
/// signs, which may not have heard of the list yet: what it gives is to count.
fn ahead_s(role: &pki::Role) -> u64 {
    match role {
        pki::Role::Operator(_) | pki::Role::Reader(_) | pki::Role::Client(_) => CLOCKS_DIFFER.as_secs(),
        pki::Role::Host(_) | pki::Role::Node(_) => 0,
    }
}

fn revoke(who: &str, dir: &GridDir, json: bool) -> Result<()> {
    let certificates = that_sign(dir)?;
    let grid = certificates.grid();
    let Ok(identity) = format!("holdfast://{grid}/{who}").parse::<Identity>() else {
        refuse!(
            Code::Invalid,
            "`{who}` names nobody who has a certificate; write host/NAME, node/NUMBER, client/NAME, operator/NAME or reader/NAME"
        );
    };
    let config = dir.load()?;
    if identity.role == pki::Role::Host(config.host.name.clone()) {
        refuse!(
            Code::State,
            "{who} is this machine's own host, which signs: it would shut itself out. Renew its certificate with `holdfast grid \
             tls rotate` instead"
        );
    }
    let mut list = revoked::load(&certificates.ca(), grid)?;
    let revoked_s = now_s();
    list.add(identity.role.clone(), revoked_s + ahead_s(&identity.role));
    client::done(dir, &Request::TlsRevoke { list: list.sign(&certificates.authority()?)? })?;
    if let Some(door) = Door::of(dir, &config)? {
        door.sync(&list, |_| false).context("nodes and hosts go by it; etcd is told later, by the host that signs")?;
    }
    // Who asks for another certificate when this has returned is to get one that counts, at whichever machine.
    revoked::outlast(revoked_s);
    if json {
        return print_json(&json!({ "revoked": who, "version": list.version() }));
    }
    print(format_args!(
        "certificates of {who} that were issued until now are good for nothing: this host goes by it, others and their nodes as \
         soon as they hear of it"
    ))
}

fn server(names: &[String], out: Option<PathBuf>, dir: &GridDir, json: bool) -> Result<()> {
    let certificates = that_sign(dir)?;
    let out = absolute(out, dir.root().join("nbd-tls"))?;
    certificates.issue_server(names, &out)?;
    if json {
        return print_json(&json!({ "names": names, "dir": out }));
    }
    print(format_args!(
        "a server's certificate for {} is in {1}. On that host write nbd.tls_dir = \"{1}\" into holdfast.toml, beside nbd.tcp, \
         or api.tls_dir beside api.tcp, and restart the host, unless it says so already: then it uses the certificate \
         from the next connection on, and makes it anew by itself where it may write there. Clients need one of \
         `holdfast grid tls client`, operators one of `holdfast grid tls operator`",
        names.join(", "),
        out.display()
    ))
}

fn show(dir: &GridDir, json: bool) -> Result<()> {
    let (config, certificates) = with_tls(dir)?;
    let listed = certificates.list(&roles(&config))?;
    let authority = fingerprint_text(&certificates.fingerprint()?);
    let revoked = revoked::load(&certificates.ca(), certificates.grid())?;
    if json {
        let signs = certificates.has_authority();
        let revoked: Vec<_> =
            revoked.entries().map(|(role, until)| json!({ "role": role.to_string(), "issued_until": until })).collect();
        let shown = json!({
            "authority_sha256": authority, "signs": signs, "certificates": listed, "revoked": revoked
        });
        return print_json(&shown);
    }
    let mut rows = table(&["ROLE", "EXPIRES", "DAYS", "SUBJECT", "FILE"], &[2]);
    for leaf in &listed {
        rows.add_row([
            leaf.role.clone(),
            date(leaf.expires),
            leaf.days_left.to_string(),
            leaf.subject.clone(),
            leaf.file.display().to_string(),
        ]);
    }
    print_table(&rows)?;
    for (role, until) in revoked.entries() {
        print(format_args!("revoked: certificates of {role} that were issued until {}", date(until)))?;
    }
    print(format_args!("SHA-256 of the authority: {authority}"))?;
    print(match certificates.has_authority() {
        true => "this machine has its key, and can sign",
        false => "this machine does not have its key: another one signs",
    })
}
