//! Orders of operators for volumes that several hosts offer: to offer them, and to hand them over.

use super::catalog::Entry;
use super::commands::Command;
use super::control::ControlPlane;
use anyhow::Result;
use holdfast_api::{Code, VolumeInfo, VolumeState, refuse};
use holdfast_base::VolumeId;
use holdfast_cluster::exports::{HandOver, InVain, SERVED_MAX, UNSERVED_MAX};
use holdfast_host::Order;
use holdfast_runtime::clock;
use std::time::Duration;

/// How long the log of a volume may take to be emptied, as far as that can be done beside its service, before the volume is
/// handed over with what there is.
const PREPARE_MAX: Duration = Duration::from_secs(15);

/// How often it is seen whether the other host is still there.
const LOOK_EVERY: Duration = Duration::from_millis(200);

impl ControlPlane {
    /// This host offers a volume that another one serves; where none does it serves it itself.
    pub(super) fn export_multipath(&self, name: &str) -> Result<VolumeInfo> {
        let entry = self.catalog.find(name)?;
        let Some(host) = entry.served_by.clone() else { return self.export(name, false) };
        self.check_can_reach(&entry, &host)?;
        if !self.catalog.add_offers(entry.root.volume, &[&host, self.catalog.host()])? {
            return self.export(name, false);
        }
        self.publish_offers()?;
        self.show(name)
    }

    /// Refuses where hosts could not connect to each other.
    fn check_can_reach(&self, entry: &Entry, host: &str) -> Result<()> {
        let hosts = self.presence.hosts()?;
        for name in [host, self.catalog.host().as_str()] {
            if hosts.get(name).is_some_and(Vec::is_empty) {
                refuse!(
                    Code::Unavailable,
                    "volume {} can't be offered by several hosts: host {name} can't be reached by others; its machine needs a node, or \
                     to have been given an --address when it joined, and the grid has to be one with etcd",
                    entry.root.name
                );
            }
        }
        Ok(())
    }

    pub(super) fn end_offer(&self, entry: &Entry, force: bool) -> Result<VolumeInfo> {
        let count = self.clients_through(entry);
        if count > 0 && !force {
            refuse!(
                Code::InUse,
                "volume {} stays offered here: clients are connected ({count}); disconnect first, or add --force to cut them off",
                entry.name()
            );
        }
        self.catalog.end_offer(entry.root.volume)?;
        self.publish_offers()?;
        self.show(entry.name())
    }

    /// Has another host serve a volume that this one serves, without a pause that clients would notice.
    pub(super) fn hand_over(&self, name: &str, to: &str) -> Result<VolumeInfo> {
        let entry = self.catalog.find(name)?;
        if let Some((_, clone)) = &entry.clone {
            refuse!(
                Code::State,
                "{} is a clone, a part of volume {1}, and goes with it: hand over {1}",
                clone.name,
                entry.root.name
            );
        }
        if !self.catalog.is_here(&entry) {
            self.catalog.check_not_elsewhere(&entry)?;
            refuse!(
                Code::State,
                "volume {name} is not in service; `holdfast volume export {name}` on host {to} has it served there"
            );
        }
        if to == self.catalog.host() {
            return self.show(name);
        }
        self.check_no_stream(name)?;
        if !self.presence.hosts()?.contains_key(to) {
            let up: Vec<String> = self.presence.hosts()?.into_keys().collect();
            refuse!(Code::NotFound, "there is no host {to}, or it is down; these are up: {}", up.join(", "));
        }
        self.check_can_reach(&entry, to)?;
        self.check_could_serve(name, to)?;
        let volume = entry.root.volume;
        self.catalog.add_offers(volume, &[to, self.catalog.host()])?;
        self.publish_offers()?;
        let asked = name.to_string();
        // What is left in the log then is recovered by the other.
        let _ = self.order_within(PREPARE_MAX, Order::Prepare { name: asked });
        self.catalog.hand_over(volume, to)?;
        // The sessions here shall know where they go before they have to.
        self.publish_offers()?;
        self.await_served(name, volume, to)
    }

    /// Until the other host has the volume in service; else this one takes it back.
    fn await_served(&self, name: &str, volume: VolumeId, to: &str) -> Result<VolumeInfo> {
        let mut looked = clock::now();
        let mut under_way = HandOver::begun(looked);
        let why = loop {
            let entry = self.catalog.find(name)?;
            if entry.handed_from.is_none() {
                self.publish_offers()?;
                let host = entry.served_by.unwrap_or_default();
                if host != to {
                    refuse!(
                        Code::Unavailable,
                        "host {to} did not take volume {name} over, which is in service at host {host}; is {to} well?"
                    );
                }
                return self.show(name);
            }
            if clock::now().since(looked) >= LOOK_EVERY {
                looked = clock::now();
                let is_there = self.records.view(|view| view.has_host(to));
                let asked = name.to_string();
                let info = self.ask(|answer| Command::Volume { name: asked, answer })?;
                let serves = info.is_some_and(|info| info.state == VolumeState::Open);
                match under_way.look(looked, is_there, serves) {
                    None => {}
                    Some(InVain::Gone) => break "it is gone".to_string(),
                    Some(InVain::Unopened) => {
                        break format!("it was not open there {} s after it was closed here", UNSERVED_MAX.as_secs());
                    }
                    Some(InVain::Unread) => break format!("it was not read there within {} s", SERVED_MAX.as_secs()),
                }
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        self.catalog.take_back(volume, to)?;
        self.publish_offers()?;
        refuse!(
            Code::Unavailable,
            "host {to} could not take volume {name} over ({why}), and this one goes on; does {to} reach all nodes, and the key \
             of an encrypted volume? Its log tells"
        )
    }

    /// Clients of this host that use a volume of another one.
    pub(super) fn clients_through(&self, entry: &Entry) -> usize {
        let volume = entry.root.volume;
        self.ask(|answer| Command::Through { volume, answer }).unwrap_or_default()
    }

    /// Where clients reach a volume of another host through this one.
    pub(super) fn offer_uris(&self, entry: &Entry) -> Vec<String> {
        if !self.catalog.is_offered(entry) {
            return Vec::new();
        }
        self.ask(|answer| Command::Uris { name: entry.name().to_string(), answer }).unwrap_or_default()
    }
}
