//! What is done to layers at somebody's wish: snapshots, clones, rollback. Each is one record in the log, so that it costs
//! the same at any size, and takes effect at its place in the log's order.
//!
//! **Snapshot**: freezes the live layer of a head; what is appended behind it is written to a new one. It holds what was
//! completed before it, in order (crash-consistent). Bulk writes that were under way are part of it, and it is told as taken
//! only when they are: until then nobody can have seen it without them.
//!
//! **Clone**: another head over a snapshot. **Rollback**: the head goes on from a snapshot; its live layer is dropped.
//!
//! States of each: asked for -> its record is in the log -> applied -> told.

use crate::api::{Change, Notice};
use crate::controller::{Controller, Out};
use crate::layers::{CloneInfo, Snapshot};
use crate::log::Done;
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
        self.changes.writing.get(&head).copied().or_else(|| self.layers.live(head))
    }

    pub(crate) fn write_key(&self, head: HeadId, block: u64) -> Option<Key> {
        Some(Key::new(self.writing_layer(head)?, Lba(block)))
    }

    /// Bytes of a head; `None` where it is gone, or about to go.
    pub(crate) fn head_bytes(&self, head: HeadId) -> Option<u64> {
        self.writing_layer(head)?;
        Some(self.layers.clone_of(head).map_or(self.root().size_bytes, |clone| clone.size_bytes))
    }

    pub(crate) fn on_change(&mut self, change: Change, out: Out) {
        let result = match change.clone() {
            Change::Snapshot { head, name, created_ms } => self.take_snapshot(change, head, name, created_ms, out),
            Change::DropSnapshot { head, name } => self.drop_snapshot(change, head, &name, out),
            Change::Clone { of, id, size_bytes } => self.make_clone(change, of, id, size_bytes, out),
            Change::DropClone { head } => self.drop_clone(change, head, out),
            Change::ResizeClone { head, size_bytes } => self.resize_clone(change, head, size_bytes, out),
            Change::Rollback { head, name } => self.roll_back(change, head, &name, out),
        };
        if let Err((change, why)) = result {
            self.notice(Notice::Refused { change, why }, out);
        }
    }

    fn log_change(&mut self, change: Change, record: Record, layer: Option<ObjectId>, out: Out) {
        let lsn = self.append(record, Buf::empty(), Arc::from([]), Done::Nothing, out);
        self.changes.asked.push(Asked { change, layer, lsn });
    }

    fn next_layer(&mut self) -> Result<ObjectId, &'static str> {
        let next = self.layers.layer_after(self.changes.newest_layer);
        let next = next.ok_or("the volume has had all the snapshots that it can have; copy it to a new one")?;
        self.changes.newest_layer = next;
        Ok(next)
    }

    fn take_snapshot(
        &mut self,
        change: Change,
        head: HeadId,
        name: String,
        created_ms: u64,
        out: Out,
    ) -> Result<(), (Change, &'static str)> {
        let refuse = |why| Err((change.clone(), why));
        let is_asked = |asked: &Asked| matches!(&asked.change, Change::Snapshot { .. });
        let taking = self.changes.asked.iter().filter(|a| is_asked(a)).count();
        let is_taken =
            self.layers.named(head, &name).is_some()
                || self.changes.asked.iter().any(
                    |a| matches!(&a.change, Change::Snapshot { head: h, name: n, .. } if *h == head && *n == name),
                );
        let (Some(frozen), Some(size_bytes)) = (self.writing_layer(head), self.head_bytes(head)) else {
            return refuse("the clone is not there");
        };
        if is_taken {
            return refuse("the volume has a snapshot of that name");
        }
        if self.layers.snapshots().count() + taking >= SNAPSHOTS_MAX {
            return refuse("the volume has 1024 snapshots");
        }
        let live = match self.next_layer() {
            Ok(live) => live,
            Err(why) => return refuse(why),
        };
        // What bulk writes have been collected so far lies in front of the snapshot.
        self.flush_bypass(out);
        let record = Record::Snapshot { head, frozen, live, name, created_ms, size_bytes };
        if !self.config.mutations.snapshot_stays_live {
            self.changes.writing.insert(head, live);
        }
        self.log_change(change, record, Some(frozen), out);
        Ok(())
    }

    /// The layer of a snapshot that is complete and stays.
    fn settled(&self, head: HeadId, name: &str) -> Result<ObjectId, &'static str> {
        let layer = self.layers.named(head, name).ok_or("the volume has no snapshot of that name")?;
        let snapshot = self.layers.snapshot(layer).expect("just found");
        if self.changes.is_in_between(layer, snapshot) { Err("the snapshot is coming or going") } else { Ok(layer) }
    }

    fn drop_snapshot(
        &mut self,
        change: Change,
        head: HeadId,
        name: &str,
        out: Out,
    ) -> Result<(), (Change, &'static str)> {
        match self.settled(head, name) {
            Ok(layer) => self.log_change(change, Record::DropSnapshot { layer }, None, out),
            Err(why) => return Err((change, why)),
        }
        Ok(())
    }

    fn make_clone(
        &mut self,
        change: Change,
        of: ObjectId,
        id: VolumeId,
        size_bytes: u64,
        out: Out,
    ) -> Result<(), (Change, &'static str)> {
        let Some(snapshot) = self.snapshots().find(|(layer, _)| *layer == of).map(|(_, s)| s.clone()) else {
            return Err((change, "there is no such snapshot"));
        };
        let is_asked = |asked: &Asked| matches!(&asked.change, Change::Clone { id: other, .. } if *other == id);
        if self.layers.clones().any(|(_, clone)| clone.id == id) || self.changes.asked.iter().any(is_asked) {
            return Err((change, "the clone is there"));
        }
        if self.layers.clones().count() >= CLONES_MAX {
            return Err((change, "the volume has 1024 clones"));
        }
        if size_bytes < snapshot.size_bytes {
            return Err((change, "a clone is at least as large as its snapshot; make it smaller later"));
        }
        let live = match self.next_layer() {
            Ok(live) => live,
            Err(why) => return Err((change, why)),
        };
        let head = self.layers.head_after(self.changes.newest_head);
        self.changes.newest_head = head;
        self.log_change(change, Record::Clone { of, head, live, id, size_bytes }, None, out);
        self.hide_beyond(live, of, snapshot.size_bytes, out);
        Ok(())
    }

    /// What `below` says behind the end of a snapshot is not part of it: a layer over it says zeroes there.
    fn hide_beyond(&mut self, live: ObjectId, below: ObjectId, size_bytes: u64, out: Out) {
        let (end, mapped_end) = (size_bytes.div_ceil(BLOCK_BYTES as u64), self.mapped_end(below));
        if mapped_end > end {
            let record = Record::Discard { key: Key::new(live, Lba(end)), blocks: mapped_end - end };
            self.append(record, Buf::empty(), Arc::from([]), Done::Nothing, out);
        }
    }

    fn is_clone(&self, head: HeadId) -> Result<(), &'static str> {
        let is_there = self.layers.clone_of(head).is_some() && !self.changes.is_dropping(head);
        is_there.then_some(()).ok_or("the clone is not there")
    }

    fn drop_clone(&mut self, change: Change, head: HeadId, out: Out) -> Result<(), (Change, &'static str)> {
        if let Err(why) = self.is_clone(head) {
            return Err((change, why));
        }
        self.flush_bypass(out);
        self.log_change(change, Record::DropClone { head }, None, out);
        Ok(())
    }

    fn resize_clone(
        &mut self,
        change: Change,
        head: HeadId,
        size_bytes: u64,
        out: Out,
    ) -> Result<(), (Change, &'static str)> {
        if let Err(why) = self.is_clone(head) {
            return Err((change, why));
        }
        if self.changes.asked.iter().any(|a| matches!(a.change, Change::ResizeClone { head: h, .. } if h == head)) {
            return Err((change, "the clone is being resized"));
        }
        // What lies behind the end was cut off, if it was ever there; a snapshot may say more there than it shows.
        let shown = self.head_bytes(head).expect("a clone that is there").min(size_bytes);
        self.log_change(change, Record::ResizeClone { head, size_bytes }, None, out);
        let (live, below) = (self.writing_layer(head), self.layers.live(head));
        if let (Some(live), Some(below)) = (live, below) {
            self.hide_beyond(live, below, shown, out);
        }
        Ok(())
    }

    fn roll_back(&mut self, change: Change, head: HeadId, name: &str, out: Out) -> Result<(), (Change, &'static str)> {
        let Some(size_bytes) = self.head_bytes(head) else { return Err((change, "the clone is not there")) };
        let to = match self.settled(head, name) {
            Ok(to) => to,
            Err(why) => return Err((change, why)),
        };
        let snapshot = self.layers.snapshot(to).expect("just found").clone();
        if size_bytes < snapshot.size_bytes {
            return Err((
                change,
                "the volume is smaller than the snapshot was; resize it to the snapshot's size first",
            ));
        }
        // A write of a part of a block would put back the rest of it as it was.
        if self.is_writing(head) {
            return Err((change, "the volume is being written to; disconnect its clients first"));
        }
        let live = match self.next_layer() {
            Ok(live) => live,
            Err(why) => return Err((change, why)),
        };
        self.changes.writing.insert(head, live);
        self.log_change(change, Record::Rollback { head, to, live }, None, out);
        self.hide_beyond(live, to, snapshot.size_bytes, out);
        Ok(())
    }

    /// Tells of changes that are complete: their record is applied, and of snapshots every bulk write of their layer and
    /// those below it.
    pub(crate) fn tell_of_changes(&mut self, out: Out) {
        let completed = self.log.completed;
        if self.changes.asked.iter().all(|asked| asked.lsn > completed) {
            return;
        }
        for asked in std::mem::take(&mut self.changes.asked) {
            let is_complete = asked.lsn <= completed && asked.layer.is_none_or(|layer| !self.is_writing_below(layer));
            if is_complete {
                self.tell_of(asked, out);
            } else {
                self.changes.asked.push(asked);
            }
        }
    }

    fn tell_of(&mut self, asked: Asked, out: Out) {
        let target = match &asked.change {
            Change::Snapshot { .. } => asked.layer.map(crate::api::Target::Snapshot),
            Change::Clone { id, .. } => {
                let made = self.layers.clones().find(|(_, clone)| clone.id == *id);
                made.map(|(head, _)| crate::api::Target::Head(head))
            }
            _ => None,
        };
        self.notice(Notice::Changed { change: asked.change, target }, out);
    }

    /// Whether bulk writes are on their way to a layer or one that it stands on.
    pub(crate) fn is_writing_below(&self, layer: ObjectId) -> bool {
        self.bypass.layers().any(|of| self.layers.is_under(of, layer))
    }

    // ---- applying ----

    pub(crate) fn apply_snapshot(&mut self, frozen: ObjectId, live: ObjectId, snapshot: Snapshot) {
        let head = snapshot.head;
        let is_moved_on = !self.config.mutations.snapshot_stays_live;
        self.layers.freeze(frozen, live, snapshot, is_moved_on);
        self.is_applied(head, live);
    }

    /// The head writes to this layer, as far as its log is applied.
    fn is_applied(&mut self, head: HeadId, live: ObjectId) {
        if self.changes.writing.get(&head) == Some(&live) {
            self.changes.writing.remove(&head);
        }
    }

    pub(crate) fn apply_drop(&mut self, layer: ObjectId) {
        self.layers.unname(layer);
        self.checkpointer.fold_wanted = true;
    }

    pub(crate) fn apply_clone(&mut self, head: HeadId, of: ObjectId, live: ObjectId, clone: CloneInfo) {
        self.layers.add_clone(head, of, live, clone);
    }

    pub(crate) fn apply_drop_clone(&mut self, head: HeadId) {
        self.layers.drop_clone(head);
        self.changes.writing.remove(&head);
        self.checkpointer.fold_wanted = true;
    }

    pub(crate) fn apply_rollback(&mut self, head: HeadId, to: ObjectId, live: ObjectId) {
        self.layers.roll_back(head, to, live);
        self.is_applied(head, live);
        self.checkpointer.fold_wanted = true;
    }
}
