//! How much of a volume its clients may ask for: a `limit` layer that belongs to the volume, wherever it is served.
//!
//! ```text
//! limits/ID      (metadata) of a volume or clone: what its limit is told
//! ```
//! Unlike other layers it is there before the first request, at every host that has the volume in service, until an operator
//! changes it. A clone begins with that of what it was made of. Clients that come by portals of other hosts go through it, too.
//!
//! A request that comes looks whether the layer is as the records say: so it is put back after a drain that did not end the
//! service, and a volume that just opens needs no step of its own.

use super::Host;
use super::catalog::Entry;
use super::control::ControlPlane;
use crate::logger;
use anyhow::Result;
use holdfast_api::{Code, refuse};
use holdfast_base::{HeadId, Instant, Token, VolumeId};
use holdfast_layer::{Layer, LayerId, SpecError, StackEvent, build};
use holdfast_runtime::reactor::Io;
use std::collections::BTreeMap;

/// By volume or clone: what its limit is told, `iops=500,bytes=50MiB` say.
pub type Limits = BTreeMap<VolumeId, String>;

/// What takes a limit away.
pub const NONE: &str = "none";

/// Words that no limit has: of a record that can't be read.
const UNREADABLE: &str = "";

/// What was last seen to of a volume or clone: its limit as it was told, if any, and the layer, where the words make one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Kept {
    id: VolumeId,
    words: Option<String>,
    pub layer: Option<LayerId>,
}

/// What a record tells: one that is damaged, or of a later release, is the trouble of its volume alone.
pub fn words_of(record: Result<String>) -> String {
    record.unwrap_or_else(|_| UNREADABLE.to_string())
}

fn layer_of(words: &str) -> Result<Box<dyn Layer>, SpecError> {
    build(&format!("limit:{words}"))
}

/// What an operator asks for: a limit, or that there be none.
pub fn parse(words: &str) -> Result<Option<String>> {
    if words == NONE {
        return Ok(None);
    }
    match layer_of(words) {
        Ok(_) => Ok(Some(words.to_string())),
        Err(error) => {
            refuse!(Code::Invalid, "`{words}` is no limit: {error}; write it like iops=500,bytes=50MiB, or `{NONE}`")
        }
    }
}

impl Host {
    /// These limits count from here on.
    pub(super) fn set_limits(&mut self, now: Instant, limits: Limits, io: &mut Io) {
        if self.volumes.limits == limits {
            return;
        }
        self.volumes.limits = limits;
        for (at, head) in self.volumes.heads() {
            self.keep_to_limit(now, at, head, io);
        }
    }

    /// Sees to it that the limit of a volume or clone is as the records say.
    pub(super) fn keep_to_limit(&mut self, now: Instant, at: Token, head: HeadId, io: &mut Io) {
        let Some(volume) = self.volumes.table.get_mut(at).filter(|volume| volume.serves()) else { return };
        let limits = &self.volumes.limits;
        let kept = volume.kept.get(&head);
        if kept.is_some_and(|kept| kept.words.as_ref() == limits.get(&kept.id)) {
            return;
        }
        let Some(id) = kept.map(|kept| kept.id).or_else(|| volume.id_of(head)) else { return };
        let words = limits.get(&id).cloned();
        if let Some(Kept { layer: Some(former), .. }) = volume.kept.remove(&head) {
            self.drive_layers(now, at, head, StackEvent::Remove(former), io);
        }
        let Some(volume) = self.volumes.table.get_mut(at) else { return };
        let layer = match words.as_deref().map(layer_of).transpose() {
            // Where there is no room for it the next request tries again.
            Ok(layer) => match layer.map(|layer| volume.add_layer(head, layer)).transpose() {
                Ok(layer) => layer,
                Err(_) => return,
            },
            Err(error) => {
                let (name, words) = (volume.name_of(head), words.as_deref().unwrap_or_default());
                logger::warn(format_args!("volume {name}: this release can't keep to its limit `{words}`: {error}"));
                None
            }
        };
        volume.kept.insert(head, Kept { id, words, layer });
    }
}

impl ControlPlane {
    pub(super) fn set_limit(&self, entry: &Entry, limit: Option<&str>) -> Result<()> {
        self.catalog.set_limit(entry.id(), limit)?;
        self.take_in_access()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_told_in_the_words_of_its_layer() {
        assert_eq!(parse("iops=500,bytes=50MiB").unwrap().as_deref(), Some("iops=500,bytes=50MiB"));
        assert_eq!(parse("none").unwrap(), None);
        for wrong in ["", "iops=0", "500", "burst=1s", "ios=3"] {
            let error = parse(wrong).unwrap_err().to_string();
            assert!(error.contains("iops=500,bytes=50MiB") && error.contains("none"), "{error}");
        }
        assert!(layer_of(UNREADABLE).is_err());
    }
}
