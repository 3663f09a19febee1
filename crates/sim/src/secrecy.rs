//! Checks on encrypted volumes: no key and position ever seal two plaintexts, and no disk holds what guests wrote.
//!
//! Role: [`Encryptions`] hears of everything that controllers encrypt, over the whole run and all owners.
//! [`plain_sector`] looks through a disk for the pattern that every sector of the guests has, whatever its version and
//! address.

use crate::checker::is_pattern;
use crate::disk::Disk;
use crate::world::World;
use holdfast_cipher::{KEY_BYTES, Secret, VolumeKey};
use holdfast_volume::{Controller, Encryption};
use std::collections::BTreeMap;

/// What was encrypted, by key and position.
#[derive(Debug, Default)]
pub struct Encryptions {
    seen: BTreeMap<(u128, u64), (u32, u32)>,
    broken: Option<String>,
}

impl Encryptions {
    pub fn note(&mut self, encryption: Encryption) {
        let first = *self.seen.entry((encryption.key, encryption.position)).or_insert(encryption.digest);
        if first != encryption.digest {
            self.broken.get_or_insert_with(|| {
                format!("key {:x} and position {} have sealed two plaintexts", encryption.key, encryption.position)
            });
        }
    }

    pub fn take_broken(&mut self) -> Option<String> {
        self.broken.take()
    }

    pub fn count(&self) -> u64 {
        self.seen.len() as u64
    }
}

/// The key of a run's volumes.
pub fn key_of(seed: u64) -> VolumeKey {
    key_from(0x5e, seed)
}

/// Of the store of a sharing domain among them.
pub fn store_key_of(seed: u64) -> VolumeKey {
    key_from(0xa7, seed)
}

fn key_from(fill: u8, seed: u64) -> VolumeKey {
    let mut bytes = [fill; KEY_BYTES];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    VolumeKey::new(&Secret::new(bytes))
}

/// Where a disk holds a sector as a guest wrote it.
fn plain_sector(disk: &Disk) -> Option<u64> {
    disk.find_sector(is_pattern)
}

/// Node, disk and sector of anything that guests wrote and a disk shows.
pub fn find_plain(world: &World<Controller>) -> Option<(usize, usize, u64)> {
    let disks = world.nodes.iter().enumerate().flat_map(|(n, node)| node.disks.iter().enumerate().map(move |d| (n, d)));
    disks.into_iter().find_map(|(node, (slot, disk))| Some((node, slot, plain_sector(disk)?)))
}
