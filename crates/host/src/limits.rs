//! Limits: how much of a volume its clients may ask for, by a `limit` filter that belongs to the volume wherever it is served.
//!
//! Unlike other filters it is there before the first request, at every host that has the volume in service, until an operator
//! changes it. Sessions of other hosts go through it, too.
//!
//! A request that comes looks whether the filter is as the records say. So it is put back after a drain that did not end the
//! service, and a volume that just opens needs no step of its own.

use crate::host::{Host, Out, warn};
use crate::volumes::Volume;
use holdfast_base::{HeadId, Instant, Token, VolumeId};
use holdfast_filter::{Filter, FilterId, SpecError, StackEvent, build};
use std::collections::BTreeMap;

/// By volume or clone: what its limit is told, `iops=500,bytes=50MiB` say.
pub type Limits = BTreeMap<VolumeId, String>;

/// What was last seen to of a volume or clone: its limit as it was told, if any, and the filter, where the words make one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct AppliedLimit {
    id: VolumeId,
    words: Option<String>,
    filter: Option<FilterId>,
}

impl AppliedLimit {
    pub fn filter(&self) -> Option<FilterId> {
        self.filter
    }
}

/// The filter that keeps to a limit.
///
/// # Errors
/// The words make no limit.
pub fn filter_of(words: &str) -> Result<Box<dyn Filter>, SpecError> {
    build(&format!("limit:{words}"))
}

impl Host {
    /// These limits count from here on.
    pub(crate) fn set_limits(&mut self, now: Instant, limits: Limits, out: Out) {
        if self.volumes.limits == limits {
            return;
        }
        self.volumes.limits = limits;
        for (at, head) in self.volumes.heads().map(|(_, at, head)| (at, head)).collect::<Vec<_>>() {
            self.keep_to_limit(now, at, head, out);
        }
    }

    /// The limit of a volume or clone, as it was told.
    pub fn limit_of(&self, id: VolumeId) -> Option<&str> {
        self.volumes.limits.get(&id).map(String::as_str)
    }

    /// Clients that may have a volume or clone, where not all may.
    pub fn clients_of(&self, id: VolumeId) -> Option<&std::collections::BTreeSet<String>> {
        self.volumes.access.get(&id)
    }

    /// Sees to it that the limit of a volume or clone is as the records say.
    pub(crate) fn keep_to_limit(&mut self, now: Instant, at: Token, head: HeadId, out: Out) {
        let Some(volume) = self.volumes.table.get_mut(at).filter(|volume| volume.serves()) else { return };
        let limits = &self.volumes.limits;
        let applied = volume.applied_limits.get(&head);
        if applied.is_some_and(|applied| applied.words.as_ref() == limits.get(&applied.id)) {
            return;
        }
        let Some(id) = applied.map(|applied| applied.id).or_else(|| volume.id_of(head)) else { return };
        let words = limits.get(&id).cloned();
        if let Some(AppliedLimit { filter: Some(former), .. }) = volume.applied_limits.remove(&head) {
            self.drive_filters(now, at, head, StackEvent::Remove(former), out);
        }
        let Some(volume) = self.volumes.table.get_mut(at) else { return };
        let filter = match words.as_deref().map(filter_of).transpose() {
            // Where there is no room for it the next request tries again.
            Ok(filter) => match filter.map(|filter| volume.add_filter(head, filter, out)).transpose() {
                Ok(filter) => filter,
                Err(_) => return,
            },
            Err(error) => {
                tell_unreadable(volume, head, (words.as_deref().unwrap_or_default(), &error), out);
                None
            }
        };
        volume.applied_limits.insert(head, AppliedLimit { id, words, filter });
    }
}

fn tell_unreadable(volume: &Volume, head: HeadId, (words, error): (&str, &SpecError), out: Out) {
    let name = volume.name_of(head);
    warn(out, format!("volume {name}: this release can't keep to its limit `{words}`: {error}"));
}
