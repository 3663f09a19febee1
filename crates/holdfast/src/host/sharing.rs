//! Sharing domains: who makes their stores, and who takes volumes into one. What stores and members do is theirs
//! (`holdfast_volume`'s `sharing::domain`).
//!
//! A store is a volume that no client reaches, with epochs of its own. A volume is in its domain when its root names it.

use super::catalog::{Entry, Settings, What};
use super::control::ControlPlane;
use super::keys::NewKey;
use anyhow::Result;
use holdfast_api::{Code, KeySource, SIZE_BYTES_MAX, VolumeInfo, refuse};
use holdfast_format::features::Feature;
use holdfast_format::packing::Compression;
use holdfast_format::root::Root;
use holdfast_format::tier::Tiers;
use holdfast_host::{Order, split_export};
use std::time::{Duration, Instant};

/// A store answers whoever asks to be a member within seconds, wherever it is.
const JOIN_MAX: Duration = Duration::from_secs(30);
/// The domain that a volume is in which is in none.
pub(super) const NO_DOMAIN: &str = "none";

const JOIN_PACE: Duration = Duration::from_millis(200);

impl ControlPlane {
    /// Refuses what would change a store behind its members' backs, or means nothing for it.
    pub(super) fn check_no_store(&self, export: &str) -> Result<()> {
        // One that is not there is missed by who looks for it.
        match self.catalog.find(split_export(export).0) {
            Ok(entry) if entry.root.is_store() => refuse!(
                Code::State,
                "volume {} is the store of a sharing domain: it has no clients, and its size and content are its members'; \
                 name one of those (`holdfast sharing list`)",
                entry.name()
            ),
            _ => Ok(()),
        }
    }

    /// Makes the store of a new domain, and takes it into service. To be called alone.
    pub(super) fn create_store(
        &self,
        name: &str,
        layout: &str,
        compression: Compression,
        key: Option<&KeySource>,
    ) -> Result<VolumeInfo> {
        if name == NO_DOMAIN {
            refuse!(Code::Invalid, "a domain can't be named {NO_DOMAIN}: that is how a volume leaves one");
        }
        let layout = self.check_layout(layout)?;
        self.drop_orphan(name)?;
        self.check_compression(compression)?;
        let settings = Settings { compression, ..Settings::default() };
        let key = key.map(NewKey::make).transpose()?;
        let store = Some(self.catalog.take_store_epochs()?);
        let what = What { size_bytes: SIZE_BYTES_MAX, layout, tiers: Tiers::default(), store };
        let made = self.catalog.create(name, what, (settings, None), key.as_ref(), None)?;
        let made = made.expect("nothing is set aside for it");
        let mut warning = None;
        if let Some(key) = &key {
            self.keys.on_made(made.root.volume, key)?;
            warning = self.key_warning(name, layout);
        }
        Ok(VolumeInfo { warning, ..self.export(name, false)? })
    }

    /// Has a volume in service here leave its sharing domain: what it has in the store is copied back, and then its root
    /// forgets that. To be called alone.
    pub(super) fn end_sharing(&self, entry: &Entry) -> Result<()> {
        let name = entry.name();
        if entry.root.is_store() {
            refuse!(
                Code::State,
                "volume {name} is the store of a sharing domain; its members leave it (`holdfast volume set MEMBER \
                 --sharing {NO_DOMAIN}`), and then it can be deleted"
            );
        }
        if entry.served_by.is_none() {
            refuse!(Code::State, "volume {name} is not in service; `holdfast volume export {name}`, then try again");
        }
        // Who opens it next goes on with it.
        let leaves = !entry.root.stores.is_empty();
        self.catalog.change_settings(entry.root.volume, |settings| settings.leaves_domain = leaves)?;
        self.order(Order::EndSharing { name: name.to_string() }).map(drop)
    }

    /// Has a volume in service here share its content by a store. To be called alone.
    pub(super) fn share_by(&self, entry: &Entry, store: &str) -> Result<()> {
        let (name, store) = (entry.name(), self.catalog.find(store)?);
        if let Some(of) = entry.root.stores.first() {
            if of.volume != store.root.volume {
                refuse!(
                    Code::State,
                    "volume {name} is in another sharing domain; `holdfast volume set {name} --sharing {NO_DOMAIN}` takes it out, \
                     and when `holdfast volume show {name}` tells of none any more, try again"
                );
            }
            if !entry.is_leaving() {
                return Ok(());
            }
        }
        check_fits(entry, &store)?;
        let store_volume = store.root.volume;
        let key = entry.root.key_id.map(|_| self.keys.of_store(entry, store_volume)).transpose()?;
        let features = entry.root.features.clone().with(Feature::Stores).with(Feature::Packed);
        self.catalog.check_can_serve(&Root { features, ..entry.root.clone() })?;
        self.catalog.change_settings(entry.root.volume, |settings| settings.leaves_domain = false)?;
        self.order(Order::SetSharing { name: name.to_string(), store: store_volume, key })?;
        let late = Instant::now() + JOIN_MAX;
        while !self.catalog.is_member(entry.root.volume)? {
            if Instant::now() > late {
                refuse!(
                    Code::Unavailable,
                    "store {0} does not answer, and volume {name} is not in its domain yet; it asks on for as long as it is in \
                     service here. `holdfast volume show {0}` tells how the store is",
                    store.name()
                );
            }
            std::thread::sleep(JOIN_PACE);
        }
        Ok(())
    }
}

/// Refuses what can't change while a volume is in a domain: segments of the store have one shape, in one place.
pub(super) fn check_stays(entry: &Entry) -> Result<()> {
    if entry.root.is_store() {
        refuse!(
            Code::State,
            "volume {} is the store of a sharing domain, whose layout stays as it is; make another domain, and have members \
             leave this one (`holdfast volume set MEMBER --sharing {NO_DOMAIN}`) for that",
            entry.name()
        );
    }
    if !entry.root.stores.is_empty() {
        refuse!(
            Code::State,
            "volume {0} is in a sharing domain, where layout, tiers and provisioning stay as they are; `holdfast volume set {0} \
             --sharing {NO_DOMAIN}` takes it out, and when `holdfast volume show {0}` tells of none any more, try again",
            entry.name()
        );
    }
    Ok(())
}

fn check_fits(entry: &Entry, store: &Entry) -> Result<()> {
    let (name, of) = (entry.name(), store.name());
    if !store.root.is_store() {
        refuse!(Code::State, "volume {of} is no store of a sharing domain; `holdfast sharing list` shows those");
    }
    let why = if entry.root.is_store() {
        Some("it is the store of a sharing domain itself".to_string())
    } else if entry.root.key_id.is_some() && store.root.key_id.is_none() {
        Some(
            "it is encrypted, and the store would have what it holds as it is; `holdfast sharing create NAME --encrypt` makes \
             another domain"
                .to_string(),
        )
    } else if entry.root.key_id.is_none() && store.root.key_id.is_some() {
        Some(
            "the store is encrypted, and the volume is not; `holdfast sharing create NAME` makes another domain"
                .to_string(),
        )
    } else if !entry.root.origins.is_empty() || !entry.root.dependents.is_empty() {
        Some("it shares its data with separate clones already".to_string())
    } else if entry.root.layout != store.root.layout {
        let (own, stores) = (entry.root.layout, store.root.layout);
        Some(format!(
            "its layout is {own}, and the store's {stores}; `holdfast volume set {name} --layout {stores}` changes it"
        ))
    } else if entry.settings.reservation.is_some() {
        Some(format!(
            "it is fixed, and would not own what the store has; `holdfast volume set {name} --provisioning thin`"
        ))
    } else if entry.root.tiers != Tiers::default() {
        Some(format!("it has tiers; `holdfast volume set {name} --first-tier none --media any` ends them"))
    } else {
        None
    };
    if let Some(why) = why {
        refuse!(Code::State, "volume {name} can't be in the domain of store {of}: {why}");
    }
    if store.served_by.is_none() {
        refuse!(Code::State, "store {of} is not in service; `holdfast volume export {of}`, then try again");
    }
    if entry.served_by.is_none() {
        refuse!(Code::State, "volume {name} is not in service; `holdfast volume export {name}`, then try again");
    }
    Ok(())
}
