//! Applying log records: the one place where a volume changes, live and in replay.

use crate::controller::Controller;
use crate::map::{CloneInfo, Crcs, Mapped, Place, Snapshot};
use holdfast_base::Lsn;
use holdfast_format::record::{Record, SegmentNo};

impl Controller {
    /// Applies the completed entry `lsn`.
    pub(crate) fn apply(&mut self, lsn: Lsn) {
        let entry = self.log.get_mut(lsn).expect("a completed entry is in the window");
        let record = match &entry.record {
            Record::Write { key, blocks } => Record::Write { key: *key, blocks: *blocks },
            _ => std::mem::replace(&mut entry.record, Record::Noop),
        };
        match record {
            Record::Write { key, blocks } => {
                let place = Place::Log {
                    lsn,
                    data: entry.payload.clone(),
                    crcs: Crcs::new(std::sync::Arc::clone(&entry.crcs)),
                };
                let is_hot = self.map.judge_heat(key.0, u64::from(blocks), &self.segments);
                self.log.get_mut(lsn).expect("just seen").is_hot = is_hot;
                self.log.set_live(lsn, |_| u64::from(blocks));
                self.map_to(key.0, u64::from(blocks), Mapped { place, stamp: lsn });
            }
            Record::Discard { key, blocks } => self.map_to(key.0, blocks, Mapped { place: Place::Zero, stamp: lsn }),
            Record::Commit(commit) => {
                let (map, mut accounts) = self.map_and_accounts();
                map.apply_commit(&commit, None, lsn, &mut accounts);
            }
            Record::CommitPacked(packed) => {
                let (map, mut accounts) = self.map_and_accounts();
                map.apply_commit(&packed.commit, Some(&packed.lengths), lsn, &mut accounts);
            }
            Record::Free { segments } => return self.apply_free(&segments),
            Record::Rehome { segment, homes } => self.segments.rehome(segment, &homes),
            Record::Snapshot { head, frozen, live, name, created_ms, size_bytes } => {
                self.apply_snapshot(frozen, live, Snapshot { name, head, created_ms, size_bytes });
            }
            Record::DropSnapshot { layer } => self.apply_drop(layer),
            Record::Clone { of, head, live, id, name, size_bytes } => {
                self.apply_clone(head, of, live, CloneInfo { id, name, size_bytes });
            }
            Record::DropClone { head } => self.apply_drop_clone(head),
            Record::ResizeClone { head, size_bytes } => self.map.layers_mut().resize_clone(head, size_bytes),
            Record::Rollback { head, to, live } => self.apply_rollback(head, to, live),
            Record::Checkpoint(_) | Record::Noop => return,
            later @ (Record::Share(_)
            | Record::Catalogue(_)
            | Record::Head { .. }
            | Record::WriteReplied { .. }
            | Record::Replied(_)
            | Record::Attribute { .. }) => {
                panic!("entry {lsn} is of feature {:?}, and no volume that uses it is opened", later.feature())
            }
        }
        self.wants.checkpoint = true;
        self.map.set_unfolded();
    }

    fn map_to(&mut self, start: u64, blocks: u64, mapped: Mapped) {
        let (map, mut accounts) = self.map_and_accounts();
        map.map_to(start, blocks, mapped, &mut accounts);
    }

    fn apply_free(&mut self, segments: &[SegmentNo]) {
        for no in segments {
            if let Some(info) = self.segments.get(*no) {
                assert!(!info.is_visible(), "{no:?} is freed while the map names it");
                self.segments.remove(*no);
            }
            self.segments.settle(*no);
        }
    }
}
