//! Snapshots of a simulated volume: taken, read and dropped at random; what is read from one is judged as if it had been read
//! at an instant between the asking for the snapshot and its being told of.

use crate::swarm::Run;
use crate::workload::Within;
use crate::world::MachineAt;
use holdfast_base::{ObjectId, Prng, RequestToken};
use holdfast_volume::Event;
use std::collections::BTreeMap;

/// Reads of a whole snapshot come in pieces of this many bytes.
const PIECE: u64 = 128 << 10;

/// Snapshots of one run: the checker bears so many reads at a time.
const ALL_MAX: u32 = 16;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Known {
    asked: u64,
    /// When it was told of, and its layer. Without, it may be there or not.
    taken: Option<(u64, ObjectId)>,
    drop_asked: bool,
}

/// What the guests' host knows of snapshots.
pub(crate) struct Snapshots {
    prng: Prng,
    max: usize,
    known: BTreeMap<String, Known>,
    next: u32,
}

impl Snapshots {
    pub(crate) fn new(seed: u64, max: usize) -> Snapshots {
        Snapshots { prng: Prng::new(seed ^ 0x5eed_5a4e), max, known: BTreeMap::new(), next: 0 }
    }

    pub(crate) fn on_taken(&mut self, name: &str, layer: ObjectId, now: u64) {
        if let Some(known) = self.known.get_mut(name) {
            known.taken.get_or_insert((now, layer));
        }
    }

    /// Neither taken nor under way, unless it had been told of before.
    pub(crate) fn on_refused(&mut self, name: &str) {
        if self.known.get(name).is_some_and(|known| known.taken.is_none()) {
            self.known.remove(name);
        }
    }

    pub(crate) fn on_dropped(&mut self, name: &str) {
        self.known.remove(name);
    }
}

impl Run {
    /// Asks for a snapshot; returns its name.
    pub(crate) fn ask_snapshot(&mut self, at: MachineAt) -> String {
        let name = format!("s{}", self.snapshots.next);
        self.snapshots.next += 1;
        let known = Known { asked: self.guests.history.now(), taken: None, drop_asked: false };
        self.snapshots.known.insert(name.clone(), known);
        self.world.tell(at, Event::Snapshot { name: name.clone(), created_ms: 1 });
        name
    }

    pub(crate) fn ask_drop(&mut self, at: MachineAt, name: &str) {
        if let Some(known) = self.snapshots.known.get_mut(name) {
            known.drop_asked = true;
        }
        self.world.tell(at, Event::DropSnapshot { name: name.to_string() });
    }

    pub(crate) fn is_taken(&self, name: &str) -> bool {
        self.snapshots.known.get(name).is_some_and(|k| k.taken.is_some())
    }

    pub(crate) fn is_dropped(&self, name: &str) -> bool {
        !self.snapshots.known.contains_key(name)
    }

    /// Now and then something is done with snapshots.
    pub(crate) fn act_on_snapshots(&mut self, at: MachineAt) {
        if self.snapshots.max == 0 || !self.snapshots.prng.chance(40) || self.is_late(at) {
            return;
        }
        let is_whole = |known: &Known| known.taken.is_some() && !known.drop_asked;
        let whole: Vec<String> =
            self.snapshots.known.iter().filter(|(_, known)| is_whole(known)).map(|(name, _)| name.clone()).collect();
        if whole.len() < self.snapshots.max && self.snapshots.next < ALL_MAX && self.snapshots.prng.chance(500) {
            self.ask_snapshot(at);
        } else if !whole.is_empty() {
            let name = self.snapshots.prng.pick(&whole).clone();
            if self.snapshots.prng.chance(400) {
                self.ask_drop(at, &name);
            } else {
                let size = self.guests.size_bytes();
                let offset = self.snapshots.prng.below(size / PIECE) * PIECE;
                self.read_snapshot(at, &name, offset, PIECE.min(size - offset));
            }
        }
    }

    /// Reads a part of a snapshot that was told of.
    pub(crate) fn read_snapshot(&mut self, at: MachineAt, name: &str, offset: u64, len: u64) -> RequestToken {
        let known = self.snapshots.known[name];
        let (told, layer) = known.taken.expect("a snapshot that was told of");
        self.read_layer(at, layer, Within { invoked: known.asked, ended: Some(told) }, offset, len)
    }

    fn read_layer(&mut self, at: MachineAt, layer: ObjectId, within: Within, offset: u64, len: u64) -> RequestToken {
        let request = self.guests.ask_snapshot(at, within, offset, len);
        let token = request.token;
        self.world.tell(at, Event::SnapshotRequest { layer, request });
        token
    }

    /// Every snapshot that was told of is there and holds what it should; what may be there holds what it may.
    pub(crate) fn read_snapshots_back(&mut self) -> Result<(), String> {
        let at = self.current.expect("converged");
        let status = self.world.machine(at).expect("converged").status();
        for (name, known) in self.snapshots.known.clone() {
            let found = status.snapshots.iter().find(|(_, s)| s.name == name).map(|(layer, _)| *layer);
            match (found, known.taken) {
                (None, Some(_)) if !known.drop_asked => return Err(format!("snapshot {name} is gone: {status:?}")),
                (Some(layer), Some((_, told))) if layer != told => {
                    return Err(format!("snapshot {name} is layer {layer:?}, and was {told:?}"));
                }
                (Some(layer), _) => {
                    let within = Within { invoked: known.asked, ended: known.taken.map(|(told, _)| told) };
                    let size = self.guests.size_bytes();
                    for offset in (0..size).step_by(PIECE as usize) {
                        self.read_layer(at, layer, within, offset, PIECE.min(size - offset));
                    }
                }
                (None, _) => {}
            }
        }
        self.converge("read the snapshots back")
    }

    pub(crate) fn drop_all_snapshots(&mut self) -> Result<(), String> {
        let at = self.current.expect("converged");
        let status = self.world.machine(at).expect("converged").status();
        for (_, snapshot) in status.snapshots {
            self.ask_drop(at, &snapshot.name);
        }
        let none = |r: &Run| {
            let machine = r.current.and_then(|at| r.world.machine(at));
            machine.is_some_and(|c| c.status().snapshots.is_empty())
        };
        let until = self.world.now() + std::time::Duration::from_secs(60);
        if self.run_until(until, none)? { Ok(()) } else { Err("snapshots are not dropped".to_string()) }
    }
}
