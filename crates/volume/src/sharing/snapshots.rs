//! What is done to layers at somebody's wish: snapshots, clones, rollback. Each is one record in the log, so that it
//! costs the same at any size, and takes effect at its place in the log's order.
//!
//! **Snapshot**: freezes the live layer of a head; what is appended behind it is written to a new one. It holds what
//! was completed before it, in order (crash-consistent). Bulk writes that were under way are part of it, and it is told
//! as taken only when they are: until then nobody can have seen it without them.
//!
//! **Clone**: another head over a snapshot. **Rollback**: the head goes on from a snapshot; its live layer is dropped.
//!
//! States of each: asked for -> its record is in the log -> applied -> told.

use crate::api::{Change, Notice, Target};
use crate::controller::{Controller, Out};
use crate::log::window::Done;
use crate::map::{CloneInfo, Snapshot};
use holdfast_base::{BLOCK_BYTES, Buf, HeadId, Key, Lba, Lsn, ObjectId, VolumeId};
use holdfast_format::record::Record;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Snapshots of one volume and its clones at a time, and clones.
const SNAPSHOTS_MAX: usize = 1024;
const CLONES_MAX: usize = 1024;

/// A change that was asked for and is not told of yet.
#[derive(Debug)]
struct Asked {
    change: Change,
    /// Of a snapshot, its layer.
    layer: Option<ObjectId>,
    lsn: Lsn,
}

/// What a change comes to.
struct Planned {
    record: Record,
    /// The layer that a head writes to behind it.
    writing: Option<(HeadId, ObjectId)>,
    /// Of a snapshot, its layer.
    frozen: Option<ObjectId>,
    /// Follows the record.
    hidden: Option<Record>,
}

impl Planned {
    fn new(record: Record) -> Planned {
        Planned { record, writing: None, frozen: None, hidden: None }
    }
}

const NO_CLONE: &str = "the clone is not there";

#[derive(Debug, Default)]
pub(crate) struct Changes {
    /// The layers that what is appended now belongs to, where they differ from the applied live ones.
    writing: BTreeMap<HeadId, ObjectId>,
    asked: Vec<Asked>,
    newest_layer: ObjectId,
    newest_head: HeadId,
}

impl Changes {
    /// Not told of yet, or about to go: nobody is to read it.
    pub(crate) fn is_in_between(&self, layer: ObjectId, snapshot: &Snapshot) -> bool {
        self.asked.iter().any(|asked| match &asked.change {
            Change::Snapshot { .. } => asked.layer == Some(layer),
            Change::DropSnapshot { head, name } => *head == snapshot.head && *name == snapshot.name,
            Change::DropClone { head } => *head == snapshot.head,
            _ => false,
        })
    }

    /// What a head reads is not what it writes over: for a moment.
    pub(crate) fn is_rolling_back(&self, head: HeadId) -> bool {
        let is_it = |asked: &Asked| matches!(asked.change, Change::Rollback { head: of, .. } if of == head);
        self.asked.iter().any(is_it)
    }

    fn is_dropping(&self, head: HeadId) -> bool {
        self.asked.iter().any(|asked| asked.change == Change::DropClone { head })
    }
}

impl Controller {
    /// The layer that what a head writes from now on belongs to; `None` where the head is gone, or about to go.
    pub(crate) fn writing_layer(&self, head: HeadId) -> Option<ObjectId> {
        if self.changes.is_dropping(head) {
            return None;
        }
        self.changes.writing.get(&head).copied().or_else(|| self.map.layers().live(head))
    }

    pub(crate) fn write_key(&self, head: HeadId, block: u64) -> Option<Key> {
        Some(Key::new(self.writing_layer(head)?, Lba(block)))
    }

    /// Bytes of a head; `None` where it is gone, or about to go.
    pub(crate) fn head_bytes(&self, head: HeadId) -> Option<u64> {
        self.writing_layer(head)?;
        Some(self.map.layers().clone_of(head).map_or(self.root().size_bytes, |clone| clone.size_bytes))
    }

    pub(crate) fn on_change(&mut self, change: Change, out: Out) {
        let planned = match &change {
            Change::Snapshot { head, name, created_ms } => self.plan_snapshot(*head, name, *created_ms),
            Change::DropSnapshot { head, name } => {
                self.settled(*head, name).map(|layer| Planned::new(Record::DropSnapshot { layer }))
            }
            Change::Clone { of, id, name, size_bytes } => self.plan_clone(*of, *id, name, *size_bytes),
            Change::DropClone { head } => {
                self.is_clone(*head).map(|()| Planned::new(Record::DropClone { head: *head }))
            }
            Change::ResizeClone { head, size_bytes } => self.plan_resize(*head, *size_bytes),
            Change::Rollback { head, name } => self.plan_rollback(*head, name),
        };
        let planned = match planned {
            Ok(planned) => planned,
            Err(why) => return self.notice(Notice::Refused { change, why }, out),
        };
        // What bulk writes have been collected so far lies in front of it.
        self.flush_direct_writes(out);
        self.changes.writing.extend(planned.writing);
        let lsn = self.append(planned.record, Buf::empty(), Arc::from([]), Done::Nothing, out);
        self.changes.asked.push(Asked { change, layer: planned.frozen, lsn });
        if let Some(hidden) = planned.hidden {
            self.append(hidden, Buf::empty(), Arc::from([]), Done::Nothing, out);
        }
    }

    fn next_layer(&mut self) -> Result<ObjectId, &'static str> {
        let next = self.map.layers().layer_after(self.changes.newest_layer);
        let next = next.ok_or("the volume has had all the snapshots that it can have; copy it to a new one")?;
        self.changes.newest_layer = next;
        Ok(next)
    }

    fn plan_snapshot(&mut self, head: HeadId, name: &str, created_ms: u64) -> Result<Planned, &'static str> {
        let taking = |asked: &Asked| match &asked.change {
            Change::Snapshot { head, name, .. } => Some((*head, name.clone())),
            _ => None,
        };
        let taking: Vec<(HeadId, String)> = self.changes.asked.iter().filter_map(taking).collect();
        let frozen = self.writing_layer(head).ok_or(NO_CLONE)?;
        if self.map.layers().named(head, name).is_some() || taking.iter().any(|(of, n)| *of == head && n == name) {
            return Err("the volume has a snapshot of that name");
        }
        if self.map.layers().snapshots().count() + taking.len() >= SNAPSHOTS_MAX {
            return Err("the volume has 1024 snapshots");
        }
        let live = self.next_layer()?;
        let size_bytes = self.head_bytes(head).expect("a head that is there");
        let record = Record::Snapshot { head, frozen, live, name: name.to_string(), created_ms, size_bytes };
        let writing = (!self.basis.config.mutations.snapshot_stays_live()).then_some((head, live));
        Ok(Planned { writing, frozen: Some(frozen), ..Planned::new(record) })
    }

    /// The layer of a snapshot that is complete and stays.
    pub(crate) fn settled(&self, head: HeadId, name: &str) -> Result<ObjectId, &'static str> {
        let layer = self.map.layers().named(head, name).ok_or("the volume has no snapshot of that name")?;
        let snapshot = self.map.layers().snapshot(layer).expect("just found");
        if self.changes.is_in_between(layer, snapshot) { Err("the snapshot is coming or going") } else { Ok(layer) }
    }

    fn plan_clone(&mut self, of: ObjectId, id: VolumeId, name: &str, size_bytes: u64) -> Result<Planned, &'static str> {
        let snapshot = self.snapshots().find(|(layer, _)| *layer == of).map(|(_, s)| s.clone());
        let snapshot = snapshot.ok_or("there is no such snapshot")?;
        let is_asked = |asked: &Asked| matches!(&asked.change, Change::Clone { id: other, .. } if *other == id);
        if self.map.layers().clones().any(|(_, clone)| clone.id == id) || self.changes.asked.iter().any(is_asked) {
            return Err("the clone is there");
        }
        if self.map.layers().clones().count() >= CLONES_MAX {
            return Err("the volume has 1024 clones");
        }
        if size_bytes < snapshot.size_bytes {
            return Err("a clone is at least as large as its snapshot; make it smaller later");
        }
        let live = self.next_layer()?;
        let head = self.map.layers().head_after(self.changes.newest_head);
        self.changes.newest_head = head;
        let record = Record::Clone { of, head, live, id, name: name.to_string(), size_bytes };
        Ok(Planned { hidden: self.hide_beyond(live, of, snapshot.size_bytes), ..Planned::new(record) })
    }

    /// What `below` says behind the end of a snapshot is not part of it: a layer over it says zeroes there.
    fn hide_beyond(&mut self, live: ObjectId, below: ObjectId, size_bytes: u64) -> Option<Record> {
        let (end, mapped_end) = (size_bytes.div_ceil(BLOCK_BYTES as u64), self.map.mapped_end(below));
        (mapped_end > end).then(|| Record::Discard { key: Key::new(live, Lba(end)), blocks: mapped_end - end })
    }

    fn is_clone(&self, head: HeadId) -> Result<(), &'static str> {
        let is_there = self.map.layers().clone_of(head).is_some() && !self.changes.is_dropping(head);
        is_there.then_some(()).ok_or(NO_CLONE)
    }

    fn plan_resize(&mut self, head: HeadId, size_bytes: u64) -> Result<Planned, &'static str> {
        self.is_clone(head)?;
        if self.changes.asked.iter().any(|a| matches!(a.change, Change::ResizeClone { head: of, .. } if of == head)) {
            return Err("the clone is being resized");
        }
        let record = Record::ResizeClone { head, size_bytes };
        // What lies behind the end was cut off, if it was ever there; a snapshot may say more there than it shows.
        let shown = self.head_bytes(head).expect("a clone that is there").min(size_bytes);
        let live = self.writing_layer(head).expect("a clone that is there");
        let below = self.map.layers().live(head).expect("a clone that is there");
        Ok(Planned { hidden: self.hide_beyond(live, below, shown), ..Planned::new(record) })
    }

    fn plan_rollback(&mut self, head: HeadId, name: &str) -> Result<Planned, &'static str> {
        let size_bytes = self.head_bytes(head).ok_or(NO_CLONE)?;
        let to = self.settled(head, name)?;
        let snapshot = self.map.layers().snapshot(to).expect("just found").clone();
        if size_bytes < snapshot.size_bytes {
            return Err("the volume is smaller than the snapshot was; resize it to the snapshot's size first");
        }
        // A write of a part of a block would put back the rest of it as it was.
        if self.is_writing(head) {
            return Err("the volume is being written to; disconnect its clients first");
        }
        let live = self.next_layer()?;
        let hidden = self.hide_beyond(live, to, snapshot.size_bytes);
        Ok(Planned { writing: Some((head, live)), hidden, ..Planned::new(Record::Rollback { head, to, live }) })
    }

    /// Tells of changes that are complete: their record is applied, and of snapshots every bulk write of their layer
    /// and those below it.
    pub(crate) fn tell_of_changes(&mut self, out: Out) {
        let completed = self.log.completed;
        if self.changes.asked.iter().all(|asked| asked.lsn > completed) {
            return;
        }
        for asked in std::mem::take(&mut self.changes.asked) {
            let is_complete = asked.lsn <= completed && asked.layer.is_none_or(|layer| !self.is_writing_below(layer));
            if is_complete {
                self.care.audit.on_layers_changed(self.basis.now);
                self.tell_of(asked, out);
            } else {
                self.changes.asked.push(asked);
            }
        }
    }

    fn tell_of(&mut self, asked: Asked, out: Out) {
        let target = match &asked.change {
            Change::Snapshot { .. } => asked.layer.map(Target::Snapshot),
            Change::Clone { id, .. } => {
                let made = self.map.layers().clones().find(|(_, clone)| clone.id == *id);
                made.map(|(head, _)| Target::Head(head))
            }
            _ => None,
        };
        self.notice(Notice::Changed { change: asked.change, target }, out);
    }

    /// Whether bulk writes are on their way to a layer or one that it stands on.
    pub(crate) fn is_writing_below(&self, layer: ObjectId) -> bool {
        self.direct.layers().any(|of| self.map.layers().is_under(of, layer))
    }

    // ---- applying ----

    pub(crate) fn apply_snapshot(&mut self, frozen: ObjectId, live: ObjectId, snapshot: Snapshot) {
        let head = snapshot.head;
        let is_moved_on = !self.basis.config.mutations.snapshot_stays_live();
        self.map.layers_mut().freeze(frozen, live, snapshot, is_moved_on);
        self.is_applied(head, live);
    }

    /// The head writes to this layer, as far as its log is applied.
    fn is_applied(&mut self, head: HeadId, live: ObjectId) {
        if self.changes.writing.get(&head) == Some(&live) {
            self.changes.writing.remove(&head);
        }
    }

    pub(crate) fn apply_drop(&mut self, layer: ObjectId) {
        self.map.layers_mut().unname(layer);
        self.wants.fold = true;
    }

    pub(crate) fn apply_clone(&mut self, head: HeadId, of: ObjectId, live: ObjectId, clone: CloneInfo) {
        self.map.layers_mut().add_clone(head, of, live, clone);
    }

    pub(crate) fn apply_drop_clone(&mut self, head: HeadId) {
        self.map.layers_mut().drop_clone(head);
        self.changes.writing.remove(&head);
        self.wants.fold = true;
    }

    pub(crate) fn apply_rollback(&mut self, head: HeadId, to: ObjectId, live: ObjectId) {
        self.map.layers_mut().roll_back(head, to, live);
        self.is_applied(head, live);
        self.wants.fold = true;
    }
}
