//! Access to volumes: who a client has shown to be, and the lists that say who is let in.
//!
//! A volume without a list is for every client that reaches it. Lists count for its snapshots, too; a clone has a list of its
//! own. Each host goes by them for its own clients, also for volumes that it only forwards. Clients of the unix socket are this
//! machine's administrator, and have everything.
//!
//! Invariant: a list is here before the volume that it restricts is offered, and those that may not stay are cut off as soon
//! as it has changed.

use holdfast_base::VolumeId;
use std::collections::{BTreeMap, BTreeSet};

/// By volume or clone.
pub type Lists = BTreeMap<VolumeId, BTreeSet<String>>;

/// Who a client is, as far as it has shown.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Caller {
    /// It came by the unix socket.
    Local,
    /// By TCP, without TLS.
    Plain,
    /// Over TLS, without a certificate: none is asked for.
    Unnamed,
    /// Its certificate is sound, and speaks for another than a client of this grid; whom, where it is of a grid.
    Other(Option<String>),
    /// A client of this grid, by its name.
    Client(String),
}

impl Caller {
    pub fn name(&self) -> Option<&str> {
        match self {
            Caller::Client(name) => Some(name),
            Caller::Local | Caller::Plain | Caller::Unnamed | Caller::Other(_) => None,
        }
    }

    /// Why it may not have an export with this list, or with none: what, why, and what to do. Who shows a host's or a node's
    /// certificate may have none: these use volumes in other ways.
    pub fn refusal(&self, export: &str, list: Option<&BTreeSet<String>>) -> Option<String> {
        let how = "connect with a client certificate of this grid (`holdfast grid tls client NAME` makes one)";
        let why = match self {
            Caller::Local => return None,
            Caller::Other(Some(identity)) => {
                return Some(format!(
                    "export {export} is for clients, and this one's certificate is of {identity}; {how}"
                ));
            }
            _ if list.is_none() => return None,
            Caller::Client(name) if list.is_some_and(|list| list.contains(name)) => return None,
            Caller::Client(name) => {
                return Some(format!(
                    "export {export} is for certain clients, and client {name} is not one of them; `holdfast volume allow` lets \
                     it in"
                ));
            }
            Caller::Plain => format!(
                "this connection has no TLS; set nbd.tls_dir of the host to a directory with server-cert.pem, server-key.pem \
                 and ca-cert.pem (`holdfast grid tls server`), and {how}"
            ),
            Caller::Unnamed => format!(
                "the host asks clients for no certificates; put the authority's ca-cert.pem into its nbd.tls_dir, and {how}"
            ),
            Caller::Other(None) => format!("this client's certificate names no client of this grid; {how}"),
        };
        Some(format!("export {export} is for certain clients, and {why}"))
    }
}
