//! Groups of snapshots over several volumes: around [`holdfast_volume::Group`].
//!
//! Role: carries notices of the members' controllers to the group, and what it wants to them. A group is on one reactor;
//! members of others join it by messages ([`Sibling`]), and hear and tell by them. Where all are on one, all effects of
//! one event are carried out before a client's next request, so that the records of a group lie at one place in the order
//! of requests. Where they are not, answers to reads are held back, too.
//!
//! Messages from one reactor to another all arrive, in order. A controller that was gone when something was said to it is
//! told of as gone, so that a group that waits for it ends.

use crate::event::{Effect, GroupMemberAt, GroupOrder, GroupOutcome, Outcome};
use crate::host::{Host, Out};
use crate::reservation::ReservedVolume;
use holdfast_base::time::earliest;
use holdfast_base::{Effects, HeadId, Instant, QuiesceId, Slab, Token, VolumeId};
use holdfast_format::talk::Talk;
use holdfast_qos::{Share, Sums};
use holdfast_volume::{
    Event as VolumeEvent, GROUP_MAX, Group, GroupEffect, GroupEnd, GroupEvent, GroupMember, Notice, State, Why,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Groups under way. The control plane takes one at a time; some may still be undone.
const GROUPS_MAX: usize = 64;

/// Bits of a quiesce's number that say which reactor asks for it.
const QUIESCE_REACTOR_SHIFT: u32 = 48;

/// A group, as reactors know it that are not its own: that one's number, and the group's there.
pub type GroupId = (usize, Token);

/// What a group hears of a controller.
#[derive(Clone, Debug)]
pub enum Heard {
    Notice(Notice),
    Gone,
}

/// From one reactor of a host to another.
#[derive(Debug)]
pub enum Sibling {
    /// Joins these to the group, by their places in it: they are to have a snapshot of this name.
    Join {
        group: GroupId,
        members: Vec<(usize, String)>,
        name: String,
    },
    /// They are there: their places, controllers and heads.
    Joined {
        group: GroupId,
        members: Vec<(usize, Token, HeadId)>,
    },
    /// One of them can't have it, and none has joined.
    Refused {
        group: GroupId,
        outcome: GroupOutcome,
    },
    /// To a controller.
    Tell {
        group: GroupId,
        at: Token,
        event: VolumeEvent,
    },
    Heard {
        group: GroupId,
        at: Token,
        heard: Heard,
    },
    /// The group is over.
    Leave {
        group: GroupId,
    },
    /// What its volumes ask for, to the reactor that shares out the window; and its share, from that one.
    Sums(Box<Sums>),
    Share(Share),
    /// A fixed volume there owns so much.
    Owns {
        volume: VolumeId,
        reservation: ReservedVolume,
    },
    /// A volume there, or at another host, tells one that may be here something.
    Talk {
        from: VolumeId,
        to: VolumeId,
        talk: Box<Talk>,
    },
}

/// A controller, and the reactor that it is on.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Part {
    reactor: usize,
    at: Token,
}

enum Stage {
    /// Until it is known where each member is.
    Joining { found: Vec<Option<(Part, HeadId)>>, until: Instant },
    /// The controllers, by the numbers that the group knows them by.
    Running { group: Group, parts: Vec<Part> },
}

struct Running {
    stage: Stage,
    name: String,
    created_ms: u64,
    /// Of the members.
    names: Vec<String>,
    /// Reactors that take part, beside this one.
    others: BTreeSet<usize>,
    ticket: u64,
}

impl Running {
    fn next_deadline(&self) -> Option<Instant> {
        match &self.stage {
            Stage::Joining { until, .. } => Some(*until),
            Stage::Running { group, .. } => group.next_deadline(),
        }
    }
}

pub(crate) struct Groups {
    reactor: usize,
    running: Slab<Running>,
    /// Groups of other reactors that controllers here are a part of.
    joined: BTreeMap<GroupId, BTreeSet<Token>>,
    heard: VecDeque<(Token, Heard)>,
    next_quiesce: u64,
}

impl Groups {
    pub fn new(reactor: usize) -> Groups {
        let (joined, heard) = (BTreeMap::new(), VecDeque::new());
        Groups { reactor, running: Slab::new(GROUPS_MAX), joined, heard, next_quiesce: 1 }
    }

    fn are_any(&self) -> bool {
        !self.running.is_empty() || !self.joined.is_empty()
    }

    pub fn on_notice(&mut self, at: Token, notice: &Notice) {
        if self.are_any() {
            self.heard.push_back((at, Heard::Notice(notice.clone())));
        }
    }

    pub fn on_gone(&mut self, at: Token) {
        if self.are_any() {
            self.heard.push_back((at, Heard::Gone));
        }
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        self.running.iter().fold(None, |first, (_, running)| earliest(first, running.next_deadline()))
    }

    /// New to all controllers of the host.
    fn new_hold(&mut self) -> QuiesceId {
        let quiesce = QuiesceId((self.reactor as u64) << QUIESCE_REACTOR_SHIFT | self.next_quiesce);
        self.next_quiesce += 1;
        quiesce
    }
}

impl Host {
    /// Takes snapshots of one name of several volumes and clones in service: of all, or of none.
    pub(crate) fn begin_group(&mut self, now: Instant, ticket: u64, order: GroupOrder, out: Out) {
        let GroupOrder { members, name, created_ms } = order;
        if self.groups.running.is_full() {
            return out.push(Effect::Done { ticket, outcome: Outcome::Grouped(GroupOutcome::Busy) });
        }
        let own = self.groups.reactor;
        let mut by_reactor: BTreeMap<usize, Vec<(usize, String)>> = BTreeMap::new();
        for (place, GroupMemberAt { volume, reactor }) in members.iter().enumerate() {
            by_reactor.entry(*reactor).or_default().push((place, volume.clone()));
        }
        let tell = |outcome| Effect::Done { ticket, outcome: Outcome::Grouped(outcome) };
        // Nobody else hears of a group that can't be because of a member here.
        let joined = match self.members(by_reactor.remove(&own).unwrap_or_default(), &name) {
            Ok(joined) => joined,
            Err(outcome) => return out.push(tell(outcome)),
        };
        let (found, until) = (vec![None; members.len()], now + GROUP_MAX);
        let key = self.groups.running.insert(Running {
            stage: Stage::Joining { found, until },
            name: name.clone(),
            created_ms,
            names: members.into_iter().map(|member| member.volume).collect(),
            others: by_reactor.keys().copied().collect(),
            ticket,
        });
        for (reactor, members) in by_reactor {
            let message = Sibling::Join { group: (own, key), members, name: name.clone() };
            out.push(Effect::Sibling { reactor, message });
        }
        self.on_joined(now, key, own, joined, out);
    }

    /// Where these are; why not, of the first that can't have a snapshot of the name.
    fn members(&self, members: Vec<(usize, String)>, name: &str) -> Result<Vec<(usize, Token, HeadId)>, GroupOutcome> {
        let find = |(place, volume): (usize, String)| {
            let found = self.volumes.find_open(&volume);
            let found = found.and_then(|(at, head)| Some((at, head, self.volumes.table.get(at)?)));
            let found = found.filter(|(_, _, v)| v.controller.state() == State::Open);
            match found {
                None => Err(GroupOutcome::NotOpen(volume)),
                Some((_, head, open)) if open.snapshot(head, name).is_some() => Err(GroupOutcome::NameTaken(volume)),
                Some((at, head, _)) => Ok((place, at, head)),
            }
        };
        members.into_iter().map(find).collect()
    }

    fn on_joined(&mut self, now: Instant, key: Token, from: usize, members: Vec<(usize, Token, HeadId)>, out: Out) {
        let Some(running) = self.groups.running.get_mut(key) else { return };
        let Stage::Joining { found, .. } = &mut running.stage else { return };
        for (place, at, head) in members {
            found[place] = Some((Part { reactor: from, at }, head));
        }
        let Some(found) = found.iter().copied().collect::<Option<Vec<_>>>() else { return };
        let mut parts: Vec<Part> = Vec::new();
        let members = found.into_iter().map(|(part, head)| {
            let controller = parts.iter().position(|of| *of == part).unwrap_or_else(|| {
                parts.push(part);
                parts.len() - 1
            });
            GroupMember { controller, head, name: running.name.clone() }
        });
        let (members, created_ms, is_apart) = (members.collect(), running.created_ms, !running.others.is_empty());
        let group = Group::new(self.groups.new_hold(), members, created_ms);
        let group = if is_apart { group.with_reads() } else { group };
        self.groups.running.get_mut(key).expect("just seen").stage = Stage::Running { group, parts };
        self.drive_group(now, key, GroupEvent::Begin, out);
    }

    fn drive_group(&mut self, now: Instant, key: Token, event: GroupEvent, out: Out) {
        let Some(Running { stage: Stage::Running { group, parts }, .. }) = self.groups.running.get_mut(key) else {
            return;
        };
        let mut effects = Effects::new();
        group.handle(now, event, &mut effects);
        let (is_over, parts) = (group.is_over(), parts.clone());
        for effect in effects.take() {
            match effect {
                GroupEffect::Tell { controller, event } => {
                    let (Part { reactor, at }, own) = (parts[controller], self.groups.reactor);
                    if reactor == own {
                        self.drive_part(now, at, event, out);
                    } else {
                        let message = Sibling::Tell { group: (own, key), at, event };
                        out.push(Effect::Sibling { reactor, message });
                    }
                }
                GroupEffect::Over(end) => {
                    let running = self.groups.running.get(key).expect("it is dropped below");
                    let outcome = Outcome::Grouped(outcome_of(end, &running.names));
                    out.push(Effect::Done { ticket: running.ticket, outcome });
                }
            }
        }
        if is_over {
            self.drop_group(key, out);
        }
    }

    fn drive_part(&mut self, now: Instant, at: Token, event: VolumeEvent, out: Out) {
        if self.volumes.table.get(at).is_some() {
            self.drive(now, at, event, out);
        } else {
            self.groups.on_gone(at);
        }
    }

    /// Before it has begun.
    fn end_group(&mut self, key: Token, outcome: GroupOutcome, out: Out) {
        let Some(running) = self.groups.running.get(key) else { return };
        out.push(Effect::Done { ticket: running.ticket, outcome: Outcome::Grouped(outcome) });
        self.drop_group(key, out);
    }

    fn drop_group(&mut self, key: Token, out: Out) {
        let Some(running) = self.groups.running.remove(key) else { return };
        let group = (self.groups.reactor, key);
        for reactor in running.others {
            out.push(Effect::Sibling { reactor, message: Sibling::Leave { group } });
        }
    }

    /// Takes in what another reactor says.
    pub(crate) fn on_sibling(&mut self, now: Instant, from: usize, message: Sibling, out: Out) {
        match message {
            Sibling::Join { group, members, name } => {
                let message = match self.members(members, &name) {
                    Ok(members) => {
                        let controllers = members.iter().map(|(_, at, _)| *at).collect();
                        self.groups.joined.insert(group, controllers);
                        Sibling::Joined { group, members }
                    }
                    Err(outcome) => Sibling::Refused { group, outcome },
                };
                out.push(Effect::Sibling { reactor: from, message });
            }
            Sibling::Joined { group: (_, key), members } => self.on_joined(now, key, from, members, out),
            Sibling::Refused { group: (_, key), outcome } => self.end_group(key, outcome, out),
            Sibling::Tell { group, at, event } => {
                if self.groups.joined.get(&group).is_some_and(|parts| parts.contains(&at)) {
                    self.drive_part(now, at, event, out);
                }
            }
            Sibling::Heard { group: (_, key), at, heard } => {
                self.tell_group(now, key, Part { reactor: from, at }, heard, out)
            }
            Sibling::Sums(sums) => self.hear_sums(now, from, *sums, out),
            Sibling::Share(share) => self.take_share(now, share, out),
            Sibling::Leave { group } => drop(self.groups.joined.remove(&group)),
            Sibling::Talk { from, to, talk } => self.on_talk_of_sibling(now, from, to, talk, out),
            Sibling::Owns { volume, reservation } => self.on_owned_elsewhere(now, volume, reservation, out),
        }
    }

    fn tell_group(&mut self, now: Instant, key: Token, part: Part, heard: Heard, out: Out) {
        let Some(running) = self.groups.running.get(key) else { return };
        let parts = match &running.stage {
            Stage::Running { parts, .. } => parts,
            Stage::Joining { found, .. } => {
                let member = found.iter().position(|of| of.is_some_and(|(of, _)| of == part));
                let is_gone =
                    matches!(heard, Heard::Gone | Heard::Notice(Notice::StateChanged(State::Closed | State::Deposed)));
                if let Some(member) = member.filter(|_| is_gone) {
                    let volume = running.names[member].clone();
                    self.end_group(key, GroupOutcome::NotOpen(volume), out);
                }
                return;
            }
        };
        let Some(controller) = parts.iter().position(|of| *of == part) else { return };
        let event = match heard {
            Heard::Notice(notice) => GroupEvent::Notice { controller, notice },
            Heard::Gone => GroupEvent::Gone { controller },
        };
        self.drive_group(now, key, event, out);
    }

    /// Passes on one notice to the groups that its controller is a part of; false where there is none.
    pub(crate) fn settle_groups(&mut self, now: Instant, out: Out) -> bool {
        let Some((at, heard)) = self.groups.heard.pop_front() else { return false };
        for key in self.groups.running.tokens() {
            let part = Part { reactor: self.groups.reactor, at };
            self.tell_group(now, key, part, heard.clone(), out);
        }
        for (group, _) in self.groups.joined.iter().filter(|(_, parts)| parts.contains(&at)) {
            let message = Sibling::Heard { group: *group, at, heard: heard.clone() };
            out.push(Effect::Sibling { reactor: group.0, message });
        }
        true
    }

    pub(crate) fn tick_groups(&mut self, now: Instant, out: Out) {
        for key in self.groups.running.tokens() {
            let Some(running) = self.groups.running.get(key) else { continue };
            if running.next_deadline().is_none_or(|deadline| deadline > now) {
                continue;
            }
            match &running.stage {
                Stage::Running { .. } => self.drive_group(now, key, GroupEvent::Tick, out),
                Stage::Joining { found, .. } => {
                    let late = found.iter().position(Option::is_none).unwrap_or(0);
                    let volume = running.names[late].clone();
                    self.end_group(key, GroupOutcome::Failed { volume, why: Why::Late, left: Vec::new() }, out);
                }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Event, Order};
    use crate::homes::FRONT;
    use crate::host::Config;
    use std::time::Duration;

    const TICKET: u64 = 5;

    /// A group of volumes on these reactors is asked for; what the host wants then.
    fn asked(host: &mut Host, reactors: &[usize]) -> Vec<Effect> {
        let member =
            |(place, reactor): (usize, &usize)| GroupMemberAt { volume: format!("v{place}"), reactor: *reactor };
        let members = reactors.iter().enumerate().map(member).collect();
        let order = Order::SnapshotGroup(GroupOrder { members, name: "s".to_string(), created_ms: 1 });
        handled(host, Instant::ZERO, Event::Order { ticket: TICKET, order })
    }

    fn handled(host: &mut Host, now: Instant, event: Event) -> Vec<Effect> {
        let mut out = Effects::new();
        host.handle(now, event, &mut out);
        out.drain().collect()
    }

    /// What the group came to, and to whom something was said.
    fn in_short(effects: Vec<Effect>) -> (Option<GroupOutcome>, Vec<(usize, Sibling)>) {
        let (mut outcome, mut told) = (None, Vec::new());
        for effect in effects {
            match effect {
                Effect::Done { ticket: TICKET, outcome: Outcome::Grouped(end) } => outcome = Some(end),
                Effect::Sibling { reactor, message } => told.push((reactor, message)),
                other => panic!("a group that never began wants nothing else: {other:?}"),
            }
        }
        (outcome, told)
    }

    #[test]
    fn a_member_that_another_reactor_does_not_have_ends_the_group_for_all() {
        let mut hosts = [0, 1, 2].map(|reactor| Host::new(&Config::for_tests(reactor)));
        let (outcome, told) = in_short(asked(&mut hosts[FRONT], &[1, 2]));
        assert!(outcome.is_none() && told.len() == 2, "{outcome:?}, {told:?}");
        let (_, message) = told.into_iter().next().expect("there are two");
        let (_, answers) = in_short(handled(&mut hosts[1], Instant::ZERO, Event::Sibling { reactor: FRONT, message }));
        let Ok([(FRONT, message)]) = <[_; 1]>::try_from(answers) else { panic!("one answer") };
        let (outcome, told) =
            in_short(handled(&mut hosts[FRONT], Instant::ZERO, Event::Sibling { reactor: 1, message }));
        assert_eq!(outcome, Some(GroupOutcome::NotOpen("v0".to_string())));
        assert!(matches!(told[..], [(1, Sibling::Leave { .. }), (2, Sibling::Leave { .. })]), "{told:?}");
        assert!(hosts.iter().all(|host| !host.groups.are_any()));
    }

    #[test]
    fn a_group_that_can_t_be_because_of_a_member_here_is_nobody_else_s_business() {
        let mut host = Host::new(&Config::for_tests(FRONT));
        let (outcome, told) = in_short(asked(&mut host, &[0, 1, 2]));
        assert_eq!(outcome, Some(GroupOutcome::NotOpen("v0".to_string())));
        assert!(told.is_empty() && !host.groups.are_any(), "{told:?}");
    }

    #[test]
    fn a_controller_that_is_gone_before_it_is_told_anything_is_told_of() {
        let mut host = Host::new(&Config::for_tests(1));
        let (group, at) = ((FRONT, Token(9)), Token(4));
        host.groups.joined.insert(group, BTreeSet::from([at]));
        let event = VolumeEvent::Release { quiesce: QuiesceId(1) };
        let message = Sibling::Tell { group, at, event };
        let (_, told) = in_short(handled(&mut host, Instant::ZERO, Event::Sibling { reactor: FRONT, message }));
        assert!(matches!(told[..], [(FRONT, Sibling::Heard { heard: Heard::Gone, .. })]), "{told:?}");
        // The group's end of it: it has not begun yet.
        let mut front = Host::new(&Config::for_tests(FRONT));
        let (_, told) = in_short(asked(&mut front, &[1, 2]));
        let (_, Sibling::Join { group, .. }) = told[0] else { panic!("{told:?}") };
        let joined = Sibling::Joined { group, members: vec![(0, at, HeadId(0))] };
        let (outcome, _) = in_short(handled(&mut front, Instant::ZERO, Event::Sibling { reactor: 1, message: joined }));
        assert_eq!(outcome, None);
        let heard = Sibling::Heard { group, at, heard: Heard::Gone };
        let (outcome, told) =
            in_short(handled(&mut front, Instant::ZERO, Event::Sibling { reactor: 1, message: heard }));
        assert_eq!(outcome, Some(GroupOutcome::NotOpen("v0".to_string())));
        assert_eq!((told.len(), front.groups.are_any()), (2, false));
    }

    #[test]
    fn a_reactor_that_says_nothing_makes_the_group_late_and_its_late_answer_begins_nothing() {
        let mut host = Host::new(&Config::for_tests(FRONT));
        let (_, told) = in_short(asked(&mut host, &[1]));
        let [(1, Sibling::Join { group, .. })] = told[..] else { panic!("{told:?}") };
        let (outcome, _) = in_short(handled(&mut host, Instant::ZERO + GROUP_MAX / 2, Event::Tick));
        assert_eq!(outcome, None);
        let (outcome, told) = in_short(handled(&mut host, Instant::ZERO + GROUP_MAX, Event::Tick));
        let late = GroupOutcome::Failed { volume: "v0".to_string(), why: Why::Late, left: Vec::new() };
        assert!(outcome == Some(late) && matches!(told[..], [(1, Sibling::Leave { .. })]), "{told:?}");
        let message = Sibling::Joined { group, members: vec![(0, Token(1), HeadId(0))] };
        let now = Instant::ZERO + GROUP_MAX + Duration::from_millis(1);
        assert!(handled(&mut host, now, Event::Sibling { reactor: 1, message }).is_empty());
    }
}
