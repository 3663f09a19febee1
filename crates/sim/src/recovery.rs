//! The metadata store is lost: all hosts die, every node is asked what it holds, and the volumes' roots come from that.
//!
//! Where each of them is surely the newest the store is filled with them, and the run goes on: what guests were told before
//! must hold after it. Where one is not, the store is found again as it was.

use crate::swarm::Run;
use holdfast_base::{BLOCK_BYTES, Buf, DeviceId, Epoch, VolumeId};
use holdfast_cluster::recover::{Evidence, HeldRoot, OnDevice, recover};
use holdfast_format::copy;
use holdfast_format::ledger::Leg;
use holdfast_format::root::{ROOT_PREFIX, Root, root_key};
use holdfast_format::wire::{self, DeviceHealth, HeldVolume, Reply, Request};
use std::collections::BTreeMap;
use std::time::Duration;

/// Nodes that run answer within this.
const ANSWERED_WITHIN: Duration = Duration::from_secs(5);

/// What is asked of nodes, and what they have answered.
#[derive(Default)]
pub(crate) struct Recovery {
    next_token: u64,
    lists: BTreeMap<u64, Leg>,
    roots: BTreeMap<u64, (Leg, HeldVolume, wire::HeldRoot)>,
    /// Roots to be read: their nodes, and which.
    wanted: Vec<(Leg, HeldVolume, wire::HeldRoot)>,
    evidence: Evidence,
}

impl Run {
    pub(crate) fn lose_metadata(&mut self) -> Result<(), String> {
        self.recovery = Some(Recovery::default());
        for host in 0..self.world.hosts.len() {
            self.crash_host(host);
        }
        let pause = Duration::from_millis(self.recovery_prng.below(300));
        self.run_until(self.world.now() + pause, |_| false)?;
        self.take_evidence()?;
        let evidence = self.recovery.take().expect("begun").evidence;
        self.refill(&evidence);
        for host in 0..self.world.hosts.len() {
            if !self.world.hosts[host].is_up() {
                self.world.start_host(host);
            }
        }
        self.open_somewhere();
        Ok(())
    }

    fn take_evidence(&mut self) -> Result<(), String> {
        let until = self.world.now() + ANSWERED_WITHIN;
        for node in 0..self.world.nodes.len() {
            let (id, now) = (self.world.nodes[node].id, self.world.now());
            let is_asked = !self.world.nodes[node].is_paused()
                && self.world.nodes[node].config.wire.newest >= Request::ROOTS_SINCE;
            let stats = if is_asked { self.world.nodes[node].stats(now) } else { Vec::new() };
            let serving: Vec<DeviceId> =
                stats.iter().filter(|s| s.health == DeviceHealth::Serving).map(|s| s.device).collect();
            let recovery = self.recovery.as_mut().expect("begun");
            for slot in serving.len()..self.world.nodes[node].disks.len() {
                recovery.evidence.unasked.insert(DeviceId(u128::MAX - (node as u128) * 100 - slot as u128));
            }
            for device in serving {
                let recovery = self.recovery.as_mut().expect("begun");
                recovery.next_token += 1;
                let token = recovery.next_token;
                recovery.lists.insert(token, Leg { node: id, device });
                self.world.probe(node, token, Request::ListVolumes { device, after: None, count_max: 1000 });
            }
        }
        loop {
            self.read_wanted();
            let recovery = self.recovery.as_mut().expect("begun");
            if recovery.lists.is_empty() && recovery.roots.is_empty() && recovery.wanted.is_empty() {
                return Ok(());
            }
            if self.world.now() >= until {
                let silent = recovery.lists.values().chain(recovery.roots.values().map(|(leg, ..)| leg));
                let silent: Vec<DeviceId> = silent.map(|leg| leg.device).collect();
                recovery.evidence.unasked.extend(silent);
                return Ok(());
            }
            self.world.wake_at(until, 0);
            self.step()?;
        }
    }

    fn read_wanted(&mut self) {
        while let Some((leg, held, root)) = self.recovery.as_mut().and_then(|r| r.wanted.pop()) {
            let recovery = self.recovery.as_mut().expect("begun");
            recovery.next_token += 1;
            let token = recovery.next_token;
            let shard = copy::root_copy_id(held.volume, root.epoch, root.sequence);
            recovery.roots.insert(token, (leg, held, root));
            let request = Request::ReadShard {
                device: leg.device,
                shard,
                block: 0,
                blocks: root.blocks,
                checked: true,
                cached: false,
            };
            self.world.probe(leg.node.0 as usize - 1, token, request);
        }
    }

    pub(crate) fn on_evidence(&mut self, token: u64, reply: Reply, payload: &Buf) {
        let recovery = self.recovery.as_mut().expect("only then is it asked for");
        if let Some(leg) = recovery.lists.remove(&token) {
            let Reply::Volumes { volumes, more: false } = reply else {
                recovery.evidence.unasked.insert(leg.device);
                return;
            };
            recovery.evidence.asked.insert(leg.device);
            for held in volumes {
                match held.root {
                    Some(root) => recovery.wanted.push((leg, held, root)),
                    None => recovery.note(leg, held, HeldRoot::None),
                }
            }
        } else if let Some((leg, held, root)) = recovery.roots.remove(&token) {
            let found = match reply {
                Reply::Shard { blocks } if payload.len() == blocks as usize * BLOCK_BYTES => {
                    copy::decode(payload).and_then(Root::decode).ok()
                }
                _ => None,
            };
            let copy = |found| HeldRoot::Copy { sequence: root.sequence, root: Box::new(found) };
            recovery.note(leg, held, found.map_or(HeldRoot::Damaged, copy));
        }
    }

    /// Fills the store anew, or leaves it as it was where any volume may have a newer root.
    fn refill(&mut self, evidence: &Evidence) {
        let mut before = self.world.meta.empty();
        let is_root = |key: &String| key.starts_with(ROOT_PREFIX) && key.ends_with("/root");
        let roots: Vec<Root> =
            before.iter().filter(|(key, _)| is_root(key)).map(|(_, v)| Root::decode(v).expect("a root")).collect();
        // A copy of the records that is old: volumes that were not opened yet.
        let copied: BTreeMap<VolumeId, Root> =
            roots.iter().filter(|root| root.epoch == Epoch(0)).map(|root| (root.volume, root.clone())).collect();
        let random = self.recovery_prng.next_u64() as u32;
        let all = recover(evidence, &copied, random, self.plan.recover_mutations);
        let is_whole = roots.iter().all(|root| all.get(&root.volume).is_some_and(|r| r.doubt.is_none()));
        if is_whole {
            self.recovered += 1;
            before.retain(|key, _| !is_root(key));
            before.extend(all.values().map(|r| (root_key(r.root.volume), r.root.encode())));
        } else {
            self.found += 1;
        }
        for (key, value) in before {
            self.world.meta.put(&key, value);
        }
    }
}

impl Recovery {
    fn note(&mut self, leg: Leg, held: HeldVolume, root: HeldRoot) {
        let HeldVolume { volume, promised, ledgers, .. } = held;
        self.evidence.volumes.entry(volume).or_default().push(OnDevice { leg, promised, ledgers, root });
    }
}
