//! Groups of snapshots of a simulated volume and its clones, by the machine that hosts drive, whose host forgets it now and
//! then. While a controller holds back answers, an answer to a write is a bug.
//!
//! All members have one controller here. That a group over several is consistent is tested in `volume/tests/groups.rs`.

use crate::swarm::{Run, WAKE_GROUP};
use crate::world::MachineAt;
use holdfast_base::{BlockReply, Effects, Prng, QuiesceId};
use holdfast_volume::{Change, Event, Group, GroupEffect, GroupEnd, GroupEvent, GroupMember, Notice};
use std::collections::BTreeSet;

struct Running {
    at: MachineAt,
    group: Group,
    names: Vec<String>,
}

pub(crate) struct Groups {
    prng: Prng,
    /// Groups are taken at random.
    enabled: bool,
    running: Option<Running>,
    next_quiesce: u64,
    /// Controllers that hold back answers.
    held: BTreeSet<MachineAt>,
    /// What the last group came to.
    pub(crate) end: Option<GroupEnd>,
}

impl Groups {
    pub(crate) fn new(seed: u64, enabled: bool) -> Groups {
        let prng = Prng::new(seed ^ 0x6709);
        Groups { prng, enabled, running: None, next_quiesce: 1, held: BTreeSet::new(), end: None }
    }
}

impl Run {
    /// Begins a group of the volume (0) and clones; returns the names of its snapshots.
    pub(crate) fn ask_group(&mut self, at: MachineAt, numbers: &[usize]) -> Vec<String> {
        let names: Vec<String> = numbers.iter().map(|_| self.next_snapshot_name()).collect();
        let member = |(number, name): (&usize, &String)| GroupMember {
            controller: 0,
            head: self.head(*number),
            name: name.clone(),
        };
        let members = numbers.iter().zip(&names).map(member).collect();
        let quiesce = QuiesceId(self.groups.next_quiesce);
        self.groups.next_quiesce += 1;
        self.groups.end = None;
        self.groups.running = Some(Running { at, group: Group::new(quiesce, members, 1), names: names.clone() });
        self.drive_group(GroupEvent::Begin);
        names
    }

    fn drive_group(&mut self, event: GroupEvent) {
        let now = self.world.now();
        let Some(running) = &mut self.groups.running else { return };
        let (at, mut out) = (running.at, Effects::new());
        running.group.handle(now, event, &mut out);
        let (deadline, names) = (running.group.next_deadline(), running.names.clone());
        if running.group.is_over() {
            self.groups.running = None;
        } else if let Some(deadline) = deadline {
            self.world.wake_at(deadline, WAKE_GROUP);
        }
        for effect in out.take() {
            match effect {
                GroupEffect::Tell { event, .. } => {
                    if let Event::Change(change) = &event {
                        self.note_asked(change);
                    }
                    self.world.tell(at, event);
                }
                GroupEffect::Over(end) => {
                    if end == GroupEnd::Taken && names.iter().any(|name| self.is_missed(name)) {
                        self.fail(format!("a group of {names:?} lacks one"));
                    }
                    self.groups.end = Some(end);
                }
            }
        }
    }

    fn note_asked(&mut self, change: &Change) {
        match change {
            Change::Snapshot { head, name, .. } => self.know_snapshot(name, *head),
            Change::DropSnapshot { name, .. } => self.expect_drop(name),
            other => panic!("a group does not ask for {other:?}"),
        }
    }

    pub(crate) fn on_group_notice(&mut self, at: MachineAt, notice: &Notice) {
        match notice {
            Notice::Quiesced { .. } => {
                self.groups.held.insert(at);
            }
            Notice::QuiesceEnded { .. } => {
                self.groups.held.remove(&at);
            }
            _ => {}
        }
        if self.groups.running.as_ref().is_none_or(|running| running.at != at) {
            return;
        }
        if self.groups.enabled && self.groups.prng.chance(30) {
            self.groups.running = None;
            return;
        }
        self.drive_group(GroupEvent::Notice { controller: 0, notice: notice.clone() });
    }

    pub(crate) fn on_group_time(&mut self) {
        let deadline = self.groups.running.as_ref().and_then(|running| running.group.next_deadline());
        if deadline.is_some_and(|deadline| deadline <= self.world.now()) {
            self.drive_group(GroupEvent::Tick);
        }
    }

    /// Machines have been dropped.
    pub(crate) fn on_group_loss(&mut self) {
        if self.groups.running.as_ref().is_some_and(|running| self.world.machine(running.at).is_none()) {
            self.drive_group(GroupEvent::Gone { controller: 0 });
        }
    }

    /// An answer to a write says that it is done.
    pub(crate) fn check_held(&mut self, at: MachineAt, reply: &BlockReply) {
        if reply.result.is_ok() && self.groups.held.contains(&at) && self.guests.is_write(reply.token) {
            self.fail(format!("{at:?} answered a write while it held answers back: {reply:?}"));
        }
    }

    /// Now and then a group is taken of the volume and some of its clones.
    pub(crate) fn act_on_groups(&mut self, at: MachineAt) {
        if !self.groups.enabled || self.groups.running.is_some() || !self.groups.prng.chance(30) || self.is_late(at) {
            return;
        }
        let mut numbers = self.numbers_for_group();
        numbers.retain(|number| *number == 0 || self.groups.prng.chance(700));
        if !numbers.is_empty() {
            self.ask_group(at, &numbers);
        }
    }
}
