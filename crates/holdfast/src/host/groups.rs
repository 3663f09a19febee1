//! Groups of snapshots over several volumes: the shell around [`holdfast_volume::Group`].
//!
//! Role: carries notices of the members' controllers to the group, and what it wants to them. All effects of one event are
//! carried out before a client's next request, so that the records of a group lie at one place in the order of requests.

use super::Host;
use super::catalog::{Entry, check_name};
use super::commands::{Answer, Command, tell};
use super::control::{CHANGE_MAX, ControlPlane, ask};
use anyhow::{Result, bail};
use holdfast_api::{Code, VolumeInfo, refuse};
use holdfast_base::time::earliest;
use holdfast_base::{Effects, HeadId, HoldId, Instant, Slab, Token};
use holdfast_runtime::reactor::Io;
use holdfast_volume::{Group, GroupEffect, GroupEnd, GroupEvent, GroupMember, Notice, State, Why};
use std::collections::VecDeque;
use std::time::{SystemTime, UNIX_EPOCH};

/// Groups under way. The control plane takes one at a time; some may still be undone.
const GROUPS_MAX: usize = 64;

/// What the control plane hears of a group. Members by their names.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum GroupOutcome {
    Done,
    NotOpen(String),
    /// The volume has a snapshot of that name.
    NameTaken(String),
    /// Too many are still being undone.
    Busy,
    Failed {
        volume: String,
        why: Why,
        /// Volumes whose snapshots may be there all the same.
        left: Vec<String>,
    },
}

enum Heard {
    Notice(Notice),
    Gone,
}

struct Running {
    group: Group,
    /// The controllers, by the numbers that the group knows them by.
    at: Vec<Token>,
    /// Of the members.
    names: Vec<String>,
    answer: Answer<GroupOutcome>,
}

pub struct Groups {
    running: Slab<Running>,
    heard: VecDeque<(Token, Heard)>,
    next_hold: u64,
}

impl Groups {
    pub fn new() -> Groups {
        Groups { running: Slab::new(GROUPS_MAX), heard: VecDeque::new(), next_hold: 1 }
    }

    pub fn on_notice(&mut self, at: Token, notice: &Notice) {
        if !self.running.is_empty() {
            self.heard.push_back((at, Heard::Notice(notice.clone())));
        }
    }

    pub fn on_gone(&mut self, at: Token) {
        if !self.running.is_empty() {
            self.heard.push_back((at, Heard::Gone));
        }
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        self.running.iter().fold(None, |first, (_, running)| earliest(first, running.group.next_deadline()))
    }
}

impl Host {
    /// Takes snapshots of one name of several volumes and clones in service: of all, or of none.
    pub(super) fn begin_group(
        &mut self,
        now: Instant,
        volumes: Vec<String>,
        name: &str,
        answer: Answer<GroupOutcome>,
        io: &mut Io,
    ) {
        if self.groups.running.is_full() {
            return tell(&answer, GroupOutcome::Busy);
        }
        let mut at: Vec<Token> = Vec::new();
        let mut members = Vec::with_capacity(volumes.len());
        for volume in &volumes {
            let (token, head) = match self.member(volume, name) {
                Ok(found) => found,
                Err(outcome) => return tell(&answer, outcome),
            };
            let controller = at.iter().position(|of| *of == token).unwrap_or_else(|| {
                at.push(token);
                at.len() - 1
            });
            members.push(GroupMember { controller, head, name: name.to_string() });
        }
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let hold = HoldId(self.groups.next_hold);
        self.groups.next_hold += 1;
        let group = Group::new(hold, members, since_1970.as_millis() as u64);
        let key = self.groups.running.insert(Running { group, at, names: volumes, answer });
        self.drive_group(now, key, GroupEvent::Begin, io);
    }

    fn member(&self, volume: &str, name: &str) -> Result<(Token, HeadId), GroupOutcome> {
        let found = self.volumes.find_open(volume).and_then(|(at, head)| Some((at, head, self.volumes.table.get(at)?)));
        let found = found.filter(|(_, _, v)| v.controller.state() == State::Open);
        let (at, head, open) = found.ok_or_else(|| GroupOutcome::NotOpen(volume.to_string()))?;
        if open.snapshot(head, name).is_some() {
            Err(GroupOutcome::NameTaken(volume.to_string()))
        } else {
            Ok((at, head))
        }
    }

    fn drive_group(&mut self, now: Instant, key: Token, event: GroupEvent, io: &mut Io) {
        let Some(running) = self.groups.running.get_mut(key) else { return };
        let mut effects = Effects::new();
        running.group.handle(now, event, &mut effects);
        for effect in effects.take() {
            let running = self.groups.running.get(key).expect("it is dropped below");
            match effect {
                GroupEffect::Tell { controller, event } => {
                    let at = running.at[controller];
                    self.drive(now, at, event, io);
                }
                GroupEffect::Over(end) => tell(&running.answer, outcome_of(end, &running.names)),
            }
        }
        if self.groups.running.get(key).is_some_and(|running| running.group.is_over()) {
            self.groups.running.remove(key);
        }
    }

    /// Passes on one notice to the groups that its controller is a part of; false where there is none.
    pub(super) fn settle_groups(&mut self, now: Instant, io: &mut Io) -> bool {
        let Some((at, heard)) = self.groups.heard.pop_front() else { return false };
        for key in self.groups.running.tokens() {
            let running = self.groups.running.get(key);
            let Some(controller) = running.and_then(|r| r.at.iter().position(|of| *of == at)) else { continue };
            let event = match &heard {
                Heard::Notice(notice) => GroupEvent::Notice { controller, notice: notice.clone() },
                Heard::Gone => GroupEvent::Gone { controller },
            };
            self.drive_group(now, key, event, io);
        }
        true
    }

    pub(super) fn tick_groups(&mut self, now: Instant, io: &mut Io) {
        for key in self.groups.running.tokens() {
            let is_due = |r: &Running| r.group.next_deadline().is_some_and(|deadline| deadline <= now);
            if self.groups.running.get(key).is_some_and(is_due) {
                self.drive_group(now, key, GroupEvent::Tick, io);
            }
        }
    }
}

impl ControlPlane {
    pub(super) fn snapshot_group(&self, volumes: &[String], name: &str) -> Result<Vec<VolumeInfo>> {
        check_name(name)?;
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
        let volumes: Vec<String> = entries.iter().map(|entry| entry.name().to_string()).collect();
        let command = |answer| Command::SnapshotGroup { volumes, name: name.to_string(), answer };
        match ask(&self.reactor, CHANGE_MAX, command)? {
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
                Code::Invalid,
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

fn outcome_of(end: GroupEnd, names: &[String]) -> GroupOutcome {
    match end {
        GroupEnd::Taken => GroupOutcome::Done,
        GroupEnd::Failed { member, why, left } => {
            let left = left.into_iter().map(|of| names[of].clone()).collect();
            GroupOutcome::Failed { volume: names[member].clone(), why, left }
        }
    }
}
