//! Snapshots and clones of a simulated volume: made, read, written to, rolled back to and dropped at random.
//!
//! What is read from a snapshot is judged as if it had been read at an instant between the asking for the snapshot and its
//! being told of. A clone has sectors of its own in the history, which begin with what its snapshot was seen to hold; a
//! rollback is one write of all of that.

use crate::swarm::{Run, VOLUME};
use crate::workload::{Area, Within};
use crate::world::MachineAt;
use holdfast_base::{HeadId, ObjectId, Prng, RequestToken, VolumeId};
use holdfast_volume::{Change, Event, Target};
use std::collections::BTreeMap;

/// Reads of a whole snapshot come in pieces of this many bytes.
const PIECE: u64 = 128 << 10;

/// Snapshots of one run: the checker bears so many reads at a time.
const ALL_MAX: u32 = 16;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Known {
    asked: u64,
    /// What it is of: the volume (0) or a clone.
    of: usize,
    /// When it was told of, and its layer. Without, it may be there or not.
    taken: Option<(u64, ObjectId)>,
    drop_asked: bool,
}

#[derive(Clone, Debug)]
struct KnownClone {
    snapshot: String,
    layer: ObjectId,
    asked_at: MachineAt,
    /// Without, it may be there or not.
    made: Option<HeadId>,
    drop_asked: bool,
    gone: bool,
}

/// What the guests' host knows of snapshots and clones.
pub(crate) struct Snapshots {
    prng: Prng,
    max: usize,
    clones_max: usize,
    known: BTreeMap<String, Known>,
    /// The first is number 1.
    clones: Vec<KnownClone>,
    rollbacks: Vec<(MachineAt, Change, RequestToken)>,
    next: u32,
}

impl Snapshots {
    pub(crate) fn new(seed: u64, max: usize, clones_max: usize) -> Snapshots {
        let prng = Prng::new(seed ^ 0x5eed_5a4e);
        let (known, clones, rollbacks) = (BTreeMap::new(), Vec::new(), Vec::new());
        Snapshots { prng, max, clones_max, known, clones, rollbacks, next: 0 }
    }

    fn clone_mut(&mut self, of: HeadId) -> Option<&mut KnownClone> {
        self.clones.iter_mut().find(|clone| clone.made == Some(of))
    }

    fn usable(&self) -> impl Iterator<Item = usize> {
        let is_usable = |clone: &KnownClone| clone.made.is_some() && !clone.drop_asked;
        self.clones.iter().enumerate().filter(move |(_, clone)| is_usable(clone)).map(|(i, _)| i + 1)
    }
}

fn id_of(number: usize) -> VolumeId {
    VolumeId(VOLUME.0 + number as u128)
}

impl Run {
    pub(crate) fn head(&self, number: usize) -> HeadId {
        if number == 0 {
            HeadId::VOLUME
        } else {
            self.snapshots.clones[number - 1].made.expect("a clone that was made")
        }
    }

    /// The volume (0) or a clone.
    pub(crate) fn area(&self, number: usize) -> Area {
        Area { target: Target::Head(self.head(number)), base: number as u64 * self.guests.size_bytes() }
    }

    /// The volume and all clones that stay.
    pub(crate) fn areas(&self) -> Vec<Area> {
        std::iter::once(0).chain(self.snapshots.usable()).map(|number| self.area(number)).collect()
    }

    /// Where the next request goes. An owner with a successor may not know the clones.
    pub(crate) fn draw_area(&mut self, at: MachineAt) -> Area {
        if self.snapshots.clones.is_empty() || self.is_late(at) || self.current != Some(at) {
            return Area::VOLUME;
        }
        let areas = self.areas();
        if self.snapshots.prng.chance(500) { Area::VOLUME } else { *self.snapshots.prng.pick(&areas) }
    }

    /// Asks for a snapshot of the volume (0) or a clone; returns its name.
    pub(crate) fn ask_snapshot(&mut self, at: MachineAt, of: usize) -> String {
        let name = self.next_snapshot_name();
        self.know_snapshot(&name, self.head(of));
        let change = Change::Snapshot { head: self.head(of), name: name.clone(), created_ms: 1 };
        self.world.tell(at, Event::Change(change));
        name
    }

    pub(crate) fn next_snapshot_name(&mut self) -> String {
        self.snapshots.next += 1;
        format!("s{}", self.snapshots.next - 1)
    }

    /// A snapshot is being asked for.
    pub(crate) fn know_snapshot(&mut self, name: &str, head: HeadId) {
        let clone = self.snapshots.clones.iter().position(|clone| clone.made == Some(head));
        let of = clone.map_or(0, |at| at + 1);
        let known = Known { asked: self.guests.history.now(), of, taken: None, drop_asked: false };
        self.snapshots.known.insert(name.to_string(), known);
    }

    pub(crate) fn expect_drop(&mut self, name: &str) {
        self.snapshots.known.get_mut(name).into_iter().for_each(|known| known.drop_asked = true);
    }

    /// It is not told of, and nobody let it go.
    pub(crate) fn is_missed(&self, name: &str) -> bool {
        self.snapshots.known.get(name).is_some_and(|known| known.taken.is_none())
    }

    /// The volume and all clones, where there is room for a snapshot of each.
    pub(crate) fn numbers_for_group(&self) -> Vec<usize> {
        let numbers: Vec<usize> = std::iter::once(0).chain(self.snapshots.usable()).collect();
        let there = self.snapshots.known.values().filter(|known| !known.drop_asked).count();
        let fits = there < self.snapshots.max && self.snapshots.next as usize + numbers.len() <= ALL_MAX as usize;
        if fits { numbers } else { Vec::new() }
    }

    pub(crate) fn ask_drop(&mut self, at: MachineAt, name: &str) {
        let known = self.snapshots.known.get_mut(name).expect("a snapshot that is known");
        known.drop_asked = true;
        let of = known.of;
        if let Some((_, layer)) = known.taken {
            self.guests.on_dropping_snapshot(layer);
        }
        let change = Change::DropSnapshot { head: self.head(of), name: name.to_string() };
        self.world.tell(at, Event::Change(change));
    }

    /// Asks for a clone; returns its number.
    pub(crate) fn ask_clone(&mut self, at: MachineAt, name: &str) -> usize {
        let (_, layer) = self.snapshots.known[name].taken.expect("a snapshot that was told of");
        let snapshot = name.to_string();
        let clone = KnownClone { snapshot, layer, asked_at: at, made: None, drop_asked: false, gone: false };
        self.snapshots.clones.push(clone);
        let number = self.snapshots.clones.len();
        let change = Change::Clone {
            of: layer,
            id: id_of(number),
            name: format!("clone{number}"),
            size_bytes: self.guests.size_bytes(),
        };
        self.world.tell(at, Event::Change(change));
        number
    }

    pub(crate) fn ask_drop_clone(&mut self, at: MachineAt, number: usize) {
        let area = self.area(number);
        self.guests.on_dropping(area);
        self.snapshots.clones[number - 1].drop_asked = true;
        for known in self.snapshots.known.values_mut().filter(|known| known.of == number) {
            known.drop_asked = true;
        }
        self.world.tell(at, Event::Change(Change::DropClone { head: self.head(number) }));
    }

    /// The contents of the snapshot must be known.
    pub(crate) fn ask_rollback(&mut self, at: MachineAt, number: usize, name: &str) -> RequestToken {
        let (_, layer) = self.snapshots.known[name].taken.expect("a snapshot that was told of");
        let token = self.guests.roll_back(at, self.area(number), layer);
        let change = Change::Rollback { head: self.head(number), name: name.to_string() };
        self.snapshots.rollbacks.push((at, change.clone(), token));
        self.world.tell(at, Event::Change(change));
        token
    }

    pub(crate) fn is_taken(&self, name: &str) -> bool {
        self.snapshots.known.get(name).is_some_and(|k| k.taken.is_some())
    }

    pub(crate) fn is_dropped(&self, name: &str) -> bool {
        !self.snapshots.known.contains_key(name)
    }

    pub(crate) fn is_made(&self, number: usize) -> bool {
        self.snapshots.clones[number - 1].made.is_some()
    }

    pub(crate) fn is_clone_dropped(&self, number: usize) -> bool {
        self.snapshots.clones[number - 1].gone
    }

    /// Snapshots that were told of and stay.
    pub(crate) fn snapshots_to_share(&self) -> Vec<String> {
        let stays = |known: &Known| known.taken.is_some() && !known.drop_asked;
        self.snapshots.known.iter().filter(|(_, known)| stays(known)).map(|(name, _)| name.clone()).collect()
    }

    /// Head and layer of a snapshot that was told of.
    pub(crate) fn snapshot_to_share(&self, name: &str) -> Option<(HeadId, ObjectId)> {
        let known = self.snapshots.known.get(name)?;
        Some((self.head(known.of), known.taken?.1))
    }

    // ---- what controllers tell ----

    pub(crate) fn on_changed(&mut self, at: MachineAt, change: &Change, target: Option<Target>) {
        let now = self.guests.history.now();
        match (change, target) {
            (Change::Snapshot { name, .. }, Some(Target::Snapshot(layer))) => {
                if let Some(known) = self.snapshots.known.get_mut(name) {
                    known.taken.get_or_insert((now, layer));
                }
                if self.snapshots.clones_max > 0 && !self.is_late(at) {
                    self.read_whole_snapshot(at, &name.clone());
                }
            }
            (Change::DropSnapshot { name, .. }, _) => {
                self.snapshots.known.remove(name);
            }
            (Change::Clone { id, .. }, Some(Target::Head(head))) => {
                let number = (id.0 - VOLUME.0) as usize;
                self.snapshots.clones[number - 1].made = Some(head);
            }
            (Change::DropClone { head }, _) => {
                let at = self.snapshots.clones.iter().position(|clone| clone.made == Some(*head));
                self.snapshots.clones[at.expect("a clone that was made")].gone = true;
                self.snapshots.known.retain(|_, known| Some(known.of) != at.map(|at| at + 1));
            }
            (Change::Rollback { .. }, _) => self.end_rollback(at, change, true),
            other => self.fail(format!("told of {other:?}")),
        }
    }

    pub(crate) fn on_change_refused(&mut self, at: MachineAt, change: &Change) {
        match change {
            // Neither taken nor under way, unless it had been told of before.
            Change::Snapshot { name, .. } => {
                if self.snapshots.known.get(name).is_some_and(|known| known.taken.is_none()) {
                    self.snapshots.known.remove(name);
                }
            }
            Change::DropClone { head } => {
                // The next owner is asked, at the end.
                if let Some(clone) = self.snapshots.clone_mut(*head) {
                    clone.gone = false;
                }
            }
            Change::Rollback { .. } => self.end_rollback(at, change, false),
            Change::DropSnapshot { .. } | Change::Clone { .. } | Change::ResizeClone { .. } => {}
        }
    }

    fn end_rollback(&mut self, at: MachineAt, change: &Change, is_done: bool) {
        let found = self.snapshots.rollbacks.iter().position(|(of, c, _)| *of == at && c == change);
        if let Some(found) = found {
            let (_, _, token) = self.snapshots.rollbacks.remove(found);
            self.guests.on_rolled_back(token, is_done);
        }
    }

    // ---- at random ----

    /// Now and then something is done with snapshots.
    pub(crate) fn act_on_snapshots(&mut self, at: MachineAt) {
        if self.snapshots.max == 0 || !self.snapshots.prng.chance(40) || self.is_late(at) {
            return;
        }
        let is_whole = |known: &Known| known.taken.is_some() && !known.drop_asked;
        let whole: Vec<String> =
            self.snapshots.known.iter().filter(|(_, known)| is_whole(known)).map(|(name, _)| name.clone()).collect();
        if whole.len() < self.snapshots.max && self.snapshots.next < ALL_MAX && self.snapshots.prng.chance(500) {
            let numbers: Vec<usize> = std::iter::once(0).chain(self.snapshots.usable()).collect();
            let of = *self.snapshots.prng.pick(&numbers);
            self.ask_snapshot(at, of);
        } else if self.snapshots.prng.chance(150) {
            self.drop_a_clone(at);
        } else if !whole.is_empty() {
            let name = self.snapshots.prng.pick(&whole).clone();
            self.act_on_snapshot(at, &name);
        }
    }

    fn act_on_snapshot(&mut self, at: MachineAt, name: &str) {
        let known = self.snapshots.known[name];
        let is_read = known.taken.is_some_and(|(_, layer)| self.guests.content(layer).is_some());
        match self.snapshots.prng.below(10) {
            0..3 if is_read || self.snapshots.clones.iter().all(|clone| clone.snapshot != name) => {
                self.ask_drop(at, name);
            }
            3..6 if self.snapshots.clones.len() < self.snapshots.clones_max => {
                self.ask_clone(at, name);
            }
            6 if is_read && self.snapshots.clones_max > 0 => {
                self.ask_rollback(at, known.of, name);
            }
            _ => {
                let size = self.guests.size_bytes();
                let offset = self.snapshots.prng.below(size / PIECE) * PIECE;
                self.read_snapshot(at, name, offset, PIECE.min(size - offset));
            }
        }
    }

    fn drop_a_clone(&mut self, at: MachineAt) {
        let numbers: Vec<usize> = self.snapshots.usable().collect();
        if numbers.is_empty() {
            return;
        }
        let number = *self.snapshots.prng.pick(&numbers);
        // What clones of its snapshots begin with must be known.
        let of_it = |name: &str| self.snapshots.known.get(name).is_some_and(|known| known.of == number);
        let mut others = self.snapshots.clones.iter().filter(|clone| of_it(&clone.snapshot));
        if others.all(|clone| self.guests.content(clone.layer).is_some()) {
            self.ask_drop_clone(at, number);
        }
    }

    fn read_whole_snapshot(&mut self, at: MachineAt, name: &str) {
        let size = self.guests.size_bytes();
        if self.snapshots.known.contains_key(name) {
            for offset in (0..size).step_by(PIECE as usize) {
                self.read_snapshot(at, name, offset, PIECE.min(size - offset));
            }
        }
    }

    /// Reads a part of a snapshot that was told of.
    pub(crate) fn read_snapshot(&mut self, at: MachineAt, name: &str, offset: u64, len: u64) -> RequestToken {
        let known = self.snapshots.known[name];
        let (told, layer) = known.taken.expect("a snapshot that was told of");
        let within = Within { invoked: known.asked, ended: Some(told) };
        self.read_layer(at, (layer, known.of), within, offset, len)
    }

    fn read_layer(
        &mut self,
        at: MachineAt,
        (layer, of): (ObjectId, usize),
        within: Within,
        offset: u64,
        len: u64,
    ) -> RequestToken {
        let target = Target::Snapshot(layer);
        let area = Area { target, base: of as u64 * self.guests.size_bytes() };
        let request = self.guests.ask_snapshot(at, area, within, offset, len);
        let token = request.token;
        self.world.request(at, target, request);
        token
    }

    // ---- at the end ----

    /// Which of the clones whose fate nobody heard are there.
    pub(crate) fn settle_clones(&mut self) {
        let at = self.current.expect("converged");
        let there = self.world.machine(at).expect("converged").status().clones;
        for i in 0..self.snapshots.clones.len() {
            let found = there.iter().find(|(_, clone)| clone.id == id_of(i + 1)).map(|(head, _)| *head);
            let clone = &mut self.snapshots.clones[i];
            match (found, clone.made) {
                (None, Some(_)) if !clone.drop_asked => {
                    let why = format!("clone {} is gone: {clone:?}", i + 1);
                    return self.fail(why);
                }
                (Some(head), Some(made)) if head != made || clone.gone => {
                    let why = format!("clone {} is {head:?}: {clone:?}", i + 1);
                    return self.fail(why);
                }
                (Some(head), None) if clone.asked_at != at => clone.made = Some(head),
                _ => {}
            }
        }
    }

    /// Clones began with what their snapshots hold.
    pub(crate) fn begin_clones(&mut self) -> Result<(), String> {
        let size = self.guests.size_bytes();
        for (i, clone) in self.snapshots.clones.iter().enumerate().filter(|(_, clone)| clone.made.is_some()) {
            let Some(content) = self.guests.content(clone.layer) else {
                return Err(format!("what clone {} began with was not read: {clone:?}", i + 1));
            };
            self.guests.history.begin_with((i as u64 + 1) * size, &content);
        }
        Ok(())
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
                        self.read_layer(at, (layer, known.of), within, offset, PIECE.min(size - offset));
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
            let change = Change::DropSnapshot { head: snapshot.head, name: snapshot.name };
            self.world.tell(at, Event::Change(change));
        }
        for (head, _) in status.clones {
            self.snapshots.clones.iter_mut().filter(|c| c.made == Some(head)).for_each(|c| c.drop_asked = true);
            self.world.tell(at, Event::Change(Change::DropClone { head }));
        }
        let none = |r: &Run| {
            let status = r.current.and_then(|at| r.world.machine(at)).map(holdfast_volume::Controller::status);
            status.is_some_and(|status| status.snapshots.is_empty() && status.clones.is_empty())
        };
        let until = self.world.now() + std::time::Duration::from_secs(60);
        if self.run_until(until, none)? { Ok(()) } else { Err("snapshots are not dropped".to_string()) }
    }
}
