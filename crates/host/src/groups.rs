//! Groups of snapshots over several volumes: around [`holdfast_volume::Group`].
//!
//! Role: carries notices of the members' controllers to the group, and what it wants to them. All effects of one event are
//! carried out before a client's next request, so that the records of a group lie at one place in the order of requests.

use crate::event::{Effect, GroupOutcome, Outcome};
use crate::host::{Host, Out};
use holdfast_base::time::earliest;
use holdfast_base::{Effects, HeadId, HoldId, Instant, Slab, Token};
use holdfast_volume::{Group, GroupEffect, GroupEnd, GroupEvent, GroupMember, Notice, State};
use std::collections::VecDeque;

/// Groups under way. The control plane takes one at a time; some may still be undone.
const GROUPS_MAX: usize = 64;

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
    ticket: u64,
}

pub(crate) struct Groups {
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
    pub(crate) fn begin_group(
        &mut self,
        now: Instant,
        (ticket, created_ms): (u64, u64),
        (volumes, name): (Vec<String>, &str),
        out: Out,
    ) {
        let tell = |outcome, out: Out| out.push(Effect::Done { ticket, outcome: Outcome::Grouped(outcome) });
        if self.groups.running.is_full() {
            return tell(GroupOutcome::Busy, out);
        }
        let mut at: Vec<Token> = Vec::new();
        let mut members = Vec::with_capacity(volumes.len());
        for volume in &volumes {
            let (token, head) = match self.member(volume, name) {
                Ok(found) => found,
                Err(outcome) => return tell(outcome, out),
            };
            let controller = at.iter().position(|of| *of == token).unwrap_or_else(|| {
                at.push(token);
                at.len() - 1
            });
            members.push(GroupMember { controller, head, name: name.to_string() });
        }
        let hold = HoldId(self.groups.next_hold);
        self.groups.next_hold += 1;
        let group = Group::new(hold, members, created_ms);
        let key = self.groups.running.insert(Running { group, at, names: volumes, ticket });
        self.drive_group(now, key, GroupEvent::Begin, out);
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

    fn drive_group(&mut self, now: Instant, key: Token, event: GroupEvent, out: Out) {
        let Some(running) = self.groups.running.get_mut(key) else { return };
        let mut effects = Effects::new();
        running.group.handle(now, event, &mut effects);
        for effect in effects.take() {
            let running = self.groups.running.get(key).expect("it is dropped below");
            match effect {
                GroupEffect::Tell { controller, event } => {
                    let at = running.at[controller];
                    self.drive(now, at, event, out);
                }
                GroupEffect::Over(end) => {
                    let outcome = Outcome::Grouped(outcome_of(end, &running.names));
                    out.push(Effect::Done { ticket: running.ticket, outcome });
                }
            }
        }
        if self.groups.running.get(key).is_some_and(|running| running.group.is_over()) {
            self.groups.running.remove(key);
        }
    }

    /// Passes on one notice to the groups that its controller is a part of; false where there is none.
    pub(crate) fn settle_groups(&mut self, now: Instant, out: Out) -> bool {
        let Some((at, heard)) = self.groups.heard.pop_front() else { return false };
        for key in self.groups.running.tokens() {
            let running = self.groups.running.get(key);
            let Some(controller) = running.and_then(|r| r.at.iter().position(|of| *of == at)) else { continue };
            let event = match &heard {
                Heard::Notice(notice) => GroupEvent::Notice { controller, notice: notice.clone() },
                Heard::Gone => GroupEvent::Gone { controller },
            };
            self.drive_group(now, key, event, out);
        }
        true
    }

    pub(crate) fn tick_groups(&mut self, now: Instant, out: Out) {
        for key in self.groups.running.tokens() {
            let is_due = |r: &Running| r.group.next_deadline().is_some_and(|deadline| deadline <= now);
            if self.groups.running.get(key).is_some_and(is_due) {
                self.drive_group(now, key, GroupEvent::Tick, out);
            }
        }
    }
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
