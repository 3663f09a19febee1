//! Which clients may have which volumes: who a client has shown to be, and the lists that say who is let in.
//!
//! ```text
//! clients/ID      (metadata) of a volume or clone: names of the clients that may have it over TCP
//! ```
//! A volume without a list is for every client that reaches it. Lists count for its snapshots, too; a clone has a list of its own,
//! which begins as that of what it was made of. Each host goes by them for its own clients, also for volumes that it only
//! passes on. Clients of the unix socket are this machine's administrator, and have everything.
//!
//! Invariant: a list is in the reactor before the volume that it restricts is offered there, and when it has changed those that may
//! not stay are cut off before the command that changed it is answered (other hosts hear of it by the metadata store).

use super::catalog::{Entry, check_name};
use super::control::ControlPlane;
use crate::logger;
use anyhow::Result;
use holdfast_api::{ClientsChange, Code, VolumeInfo, refuse};
use holdfast_base::{GridId, Instant, VolumeId};
use holdfast_host::{Caller, Order, Telling};
use holdfast_runtime::pki::{Identity, Role};
use std::collections::BTreeSet;

/// Clients that one list may name.
const CLIENTS_MAX: usize = 1024;

/// The client of a secured connection.
pub fn caller_of(grid: GridId, has_certificate: bool, identity: Option<Identity>) -> Caller {
    match identity {
        Some(Identity { grid: of, role: Role::Client(name) }) if of == grid => Caller::Client(name),
        None if !has_certificate => Caller::Unnamed,
        other => Caller::Other(other.map(|identity| identity.to_string())),
    }
}

/// Log of refusals, limited in its rate.
#[derive(Default, Debug)]
pub struct RefusalLog(Telling);

impl RefusalLog {
    pub fn note(&mut self, now: Instant, who: &str, why: &str) {
        let (untold, is_told) = self.0.come(now);
        if let Some(untold) = untold {
            logger::warn(format_args!("{untold} more clients were refused since, untold"));
        }
        if is_told {
            logger::warn(format_args!("client {who} is refused: {why}"));
        }
    }
}

impl ControlPlane {
    /// What the records say counts here from now on.
    pub(super) fn take_in_access(&self) -> Result<()> {
        let _alone = self.alone_at_access();
        let (lists, limits) = (self.catalog.clients()?, self.catalog.limits()?);
        self.order(Order::Access { lists, limits }).map(drop)
    }

    /// A clone is for whom its origin is for, and has its limit, until it is given others.
    pub(super) fn inherit_access(&self, origin: &Entry, clone: VolumeId) -> Result<()> {
        let list = self.catalog.clients()?.remove(&origin.id());
        self.catalog.change_clients(clone, |_| Ok(list.clone()))?;
        self.catalog.inherit_limit(origin.id(), clone)?;
        self.take_in_access()
    }

    /// Lets clients in, or no more. To be called alone.
    pub(super) fn set_clients(&self, name: &str, change: &ClientsChange) -> Result<VolumeInfo> {
        let entry = self.catalog.find(name)?;
        let named = match change {
            ClientsChange::Allow { clients } | ClientsChange::Deny { clients } => clients.as_slice(),
            ClientsChange::AllowAll | ClientsChange::DenyAll => &[],
        };
        named.iter().try_for_each(|client| check_name(client))?;
        self.catalog.change_clients(entry.id(), |list| changed(name, change, list))?;
        self.take_in_access()?;
        self.show(name)
    }
}

/// The list that follows from one; `None` is for every client.
fn changed(volume: &str, change: &ClientsChange, list: Option<BTreeSet<String>>) -> Result<Option<BTreeSet<String>>> {
    let list = match change {
        ClientsChange::AllowAll => return Ok(None),
        ClientsChange::DenyAll => BTreeSet::new(),
        ClientsChange::Allow { clients } => {
            list.unwrap_or_default().into_iter().chain(clients.iter().cloned()).collect()
        }
        ClientsChange::Deny { clients } => {
            let Some(mut list) = list else {
                refuse!(
                    Code::State,
                    "volume {volume} is for every client, so that one alone can't be taken out; say who may have it instead \
                     (`holdfast volume allow {volume} CLIENT...`), or that nobody may (`holdfast volume deny {volume} --all`)"
                );
            };
            if let Some(missing) = clients.iter().find(|client| !list.contains(*client)) {
                refuse!(
                    Code::NotFound,
                    "client {missing} is not one of those that may have volume {volume}; `holdfast volume show {volume}` \
                     names them"
                );
            }
            list.retain(|client| !clients.contains(client));
            list
        }
    };
    if list.len() > CLIENTS_MAX {
        refuse!(
            Code::State,
            "a volume names at most {CLIENTS_MAX} clients; give machines that share it a certificate of one name"
        );
    }
    Ok(Some(list))
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_base::NodeId;

    const GRID: GridId = GridId(7);

    fn list(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_string()).collect()
    }

    fn clients(names: &[&str]) -> Vec<String> {
        list(names).into_iter().collect()
    }

    #[test]
    fn whoever_is_not_on_the_list_is_refused_and_told_what_to_do() {
        let only_a = list(&["a"]);
        let of = |grid, role| caller_of(grid, true, Some(Identity { grid, role }));
        let refusal = |caller: &Caller| caller.refusal("v1", Some(&only_a));
        assert_eq!(refusal(&Caller::Local), None);
        assert_eq!(refusal(&of(GRID, Role::Client("a".into()))), None);
        assert!(refusal(&of(GRID, Role::Client("b".into()))).unwrap().contains("client b is not one of them"));
        let of_other = caller_of(GRID, true, Some(Identity { grid: GridId(8), role: Role::Client("a".into()) }));
        assert!(refusal(&of_other).unwrap().contains("client/a"));
        assert!(refusal(&of(GRID, Role::Host("a".into()))).unwrap().contains("host/a"));
        assert!(refusal(&caller_of(GRID, true, None)).unwrap().contains("names no client"));
        assert!(refusal(&caller_of(GRID, false, None)).unwrap().contains("ca-cert.pem"));
        let plain = refusal(&Caller::Plain).unwrap();
        assert!(plain.contains("nbd.tls_dir") && plain.contains("grid tls client"), "{plain}");
        assert!(
            of(GRID, Role::Client("a".into())).refusal("v1", Some(&list(&[]))).is_some(),
            "an empty list lets nobody in"
        );
        let without_list = |caller: Caller| caller.refusal("v1", None);
        assert_eq!(without_list(Caller::Plain), None);
        assert_eq!(without_list(caller_of(GRID, true, None)), None);
        assert!(without_list(of(GRID, Role::Node(NodeId(3)))).unwrap().contains("node/3"));
    }

    #[test]
    fn lists_grow_and_shrink_as_asked() {
        let allow = |names| ClientsChange::Allow { clients: clients(names) };
        let deny = |names| ClientsChange::Deny { clients: clients(names) };
        let after = |change: ClientsChange, before| changed("v1", &change, before);
        assert_eq!(after(allow(&["a", "b"]), None).unwrap(), Some(list(&["a", "b"])));
        assert_eq!(after(allow(&["c"]), Some(list(&["a"]))).unwrap(), Some(list(&["a", "c"])));
        assert_eq!(after(deny(&["a"]), Some(list(&["a"]))).unwrap(), Some(list(&[])), "it stays restricted");
        assert_eq!(after(ClientsChange::DenyAll, None).unwrap(), Some(list(&[])));
        assert_eq!(after(ClientsChange::AllowAll, Some(list(&["a"]))).unwrap(), None);
        let error = after(deny(&["a"]), None).unwrap_err().to_string();
        assert!(error.contains("for every client") && error.contains("volume allow v1"), "{error}");
        assert!(after(deny(&["x"]), Some(list(&["a"]))).unwrap_err().to_string().contains("client x"));
        let many: Vec<String> = (0..=CLIENTS_MAX).map(|n| format!("c{n}")).collect();
        assert!(after(ClientsChange::Allow { clients: many }, None).unwrap_err().to_string().contains("at most"));
    }
}
