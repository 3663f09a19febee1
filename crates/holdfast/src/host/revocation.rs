//! Certificates that are taken back: a host takes the signed list from the metadata store, gives it to this machine's nodes by a
//! file, and cuts off who is on it.
//!
//! ```text
//! revoked      (metadata) the list, signed by the grid's authority (see `holdfast_runtime::revoked`)
//! ```
//! The metadata store is not trusted with it: a list that the authority has not signed counts for nothing, and an older one is
//! replaced by the newest that this host knows.

use super::Shell;
use super::commands::Command;
use super::control::ControlPlane;
use super::presence::check_take_operators;
use crate::grid::certs::Certificates;
use crate::grid::revoked;
use crate::logger;
use anyhow::{Context, Result};
use holdfast_api::{Code, refuse};
use holdfast_base::Instant;
use holdfast_runtime::framed::REVOKED;
use holdfast_runtime::reactor::Io;
use holdfast_runtime::revoked::{Revoked, RevokedNow};
use holdfast_runtime::tls::link::HostTls;

/// Where the lists are that this process goes by.
pub struct Revocations {
    pub certificates: Certificates,
    /// Of its links to nodes and hosts, and of its door for hosts.
    pub lists: Vec<RevokedNow>,
}

impl Revocations {
    /// The list that counts, where the grid has TLS.
    pub fn known(&self) -> Option<Revoked> {
        self.lists.first().map(RevokedNow::get)
    }

    /// What a host connects with, by the list that counts now.
    pub fn load_host(&self, name: &str) -> Result<HostTls> {
        let ways = self.certificates.load_host(name)?;
        if let Some(list) = self.known() {
            ways.revoked().replace(&list);
        }
        Ok(ways)
    }

    fn verify(&self, text: &[u8]) -> Result<Revoked> {
        let text = std::str::from_utf8(text).context("it is no text")?;
        Ok(Revoked::verify(text, self.certificates.grid(), &self.certificates.ca_pem()?)?)
    }

    /// Goes by a list from here on; false where it is not newer.
    pub fn replace(&self, list: &Revoked) -> bool {
        self.lists.iter().map(|now| now.replace(list)).fold(false, |any, is_newer| any | is_newer)
    }
}

impl ControlPlane {
    /// What the record says counts here from now on, where it is newer; else the record is put right.
    pub(super) fn take_in_revoked(&self) -> Result<()> {
        let _alone = self.alone_at_access();
        let Some(known) = self.revocations.known() else { return Ok(()) };
        let found = self.catalog.revoked()?;
        let list = match found.as_deref().map(|text| self.revocations.verify(text)).transpose() {
            Ok(list) => list,
            Err(error) => {
                logger::error(format_args!(
                    "the list of revoked certificates in the metadata store can't be used: {error:#}; look who writes there"
                ));
                None
            }
        };
        let Some(list) = list.filter(|list| list.version() >= known.version()) else {
            let own = revoked::text(&self.revocations.certificates)?;
            let Some(own) = own else { return Ok(()) };
            let version = self.revocations.verify(own.as_bytes())?.version();
            // Not over a newer one that has come since.
            let is_newer = |found: &[u8]| self.revocations.verify(found).is_ok_and(|found| found.version() > version);
            return self.catalog.set_revoked(|found| match found.filter(|found| is_newer(found)) {
                Some(found) => Ok(found.to_vec()),
                None => Ok(own.clone().into_bytes()),
            });
        };
        if list.version() > known.version() {
            let text = String::from_utf8_lossy(&found.unwrap_or_default()).into_owned();
            // It counts first, and is cut by; then it is written down.
            self.revocations.replace(&list);
            logger::info(format_args!("certificates are revoked: version {} of the list counts", list.version()));
            let cut = self.ask(|answer| Command::CutRevoked { answer });
            revoked::keep(&self.revocations.certificates, &text)?;
            cut?;
        }
        Ok(())
    }

    /// Goes by the list that the store has now, whatever this host has heard of it.
    pub(super) fn look_who_is_revoked(&self) -> Result<()> {
        self.records.sync()?;
        self.take_in_revoked()
    }

    /// A newer list. To be called alone.
    pub(super) fn revoke(&self, text: &str) -> Result<()> {
        let Some(known) = self.revocations.known() else {
            refuse!(Code::State, "the grid has no TLS, and so no certificates to revoke");
        };
        let list = self.revocations.verify(text.as_bytes()).context("this list can't be used")?;
        if list.names_operators() && !known.names_operators() {
            check_take_operators(&self.presence.hosts_without_operators()?, &self.live()?.nodes)?;
        }
        self.catalog.set_revoked(|found| {
            // One that can't be read is none.
            let found = found.and_then(|found| self.revocations.verify(found).ok());
            if found.is_some_and(|found| found.version() >= list.version()) {
                refuse!(Code::Changed, "somebody else has revoked certificates meanwhile; try again");
            }
            Ok(text.as_bytes().to_vec())
        })?;
        self.take_in_revoked()
    }
}

impl Shell {
    /// Ends connections with whom is on the list.
    pub(super) fn cut_revoked(&mut self, now: Instant, io: &mut Io) {
        self.links.cut_revoked(now, io);
        self.peers.cut_revoked(now, io);
        for session in self.clients.tokens() {
            if self.clients.is_revoked(session) {
                let peer = self.clients.peer_of(session);
                self.clients.refusals.note(now, &peer, &format!("{REVOKED}; it was connected, and is cut off"));
                self.abort_client(session, io);
            }
        }
    }
}
