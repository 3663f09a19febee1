//! Groups of snapshots over several volumes, as operators ask for them.

use super::catalog::{Entry, check_name};
use super::control::{CHANGE_MAX, ControlPlane};
use anyhow::{Result, bail};
use holdfast_api::{Code, VolumeInfo, refuse};
use holdfast_host::homes::FRONT;
use holdfast_host::{GroupMemberAt, GroupOrder, GroupOutcome, Order};
use holdfast_runtime::clock;
use holdfast_volume::Why;

impl ControlPlane {
    pub(super) fn snapshot_group(&self, volumes: &[String], name: &str) -> Result<Vec<VolumeInfo>> {
        check_name(name)?;
        if volumes.is_empty() {
            refuse!(Code::Invalid, "a group of no volumes has nothing to take; name those that belong together");
        }
        let twice = volumes.iter().enumerate().find(|(i, volume)| volumes[..*i].contains(volume));
        if let Some((_, volume)) = twice {
            refuse!(
                Code::Invalid,
                "volume {volume} is named twice, and a group has one snapshot of each; name it once"
            );
        }
        let entries: Vec<Entry> = volumes.iter().map(|volume| self.catalog.find(volume)).collect::<Result<_>>()?;
        self.snapshot_fixed_all(&entries, &|| self.take_group(&entries, name))?;
        volumes.iter().map(|volume| self.show(volume)).collect()
    }

    fn snapshot_fixed_all(&self, entries: &[Entry], take: &dyn Fn() -> Result<()>) -> Result<()> {
        match entries.split_first() {
            Some((first, rest)) => self.snapshot_fixed(first, || self.snapshot_fixed_all(rest, take)),
            None => take(),
        }
    }

    fn take_group(&self, entries: &[Entry], name: &str) -> Result<()> {
        let members = entries.iter().map(|entry| GroupMemberAt { volume: entry.name().to_string(), reactor: FRONT });
        let created_ms = clock::wall_ms();
        let order = Order::SnapshotGroup(GroupOrder { members: members.collect(), name: name.to_string(), created_ms });
        match self.order_within(CHANGE_MAX, order)?.grouped() {
            GroupOutcome::Done => Ok(()),
            GroupOutcome::NotOpen(volume) => {
                let origin = entries.iter().find(|entry| entry.name() == volume).map_or(&volume, |e| &e.root.name);
                refuse!(
                    Code::State,
                    "nothing is taken: volume {volume} is not in service; `holdfast volume export {origin}`, then try \
                     again"
                )
            }
            GroupOutcome::NameTaken(volume) => refuse!(
                Code::Exists,
                "nothing is taken: volume {volume} has a snapshot of that name; choose another one, or `holdfast \
                 snapshot delete {volume} {name}`"
            ),
            GroupOutcome::Busy => {
                refuse!(
                    Code::Unavailable,
                    "nothing is taken: earlier groups are still being undone; `holdfast status` shows what waits"
                )
            }
            GroupOutcome::Failed { volume, why, left } => bail!("{}", failure_text(&volume, why, &left, name)),
        }
    }
}

fn failure_text(volume: &str, why: Why, left: &[String], name: &str) -> String {
    let failed = format!("the group is undone, since of volume {volume} there could be no snapshot: {why}");
    if left.is_empty() {
        return format!("{failed}; `holdfast volume show {volume}` shows how it is, then try again");
    }
    let deletes: Vec<String> = left.iter().map(|of| format!("`holdfast snapshot delete {of} {name}`")).collect();
    format!("{failed}; a part of it may be left: once its volume is in service, {}", deletes.join(" and "))
}
