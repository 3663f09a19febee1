//! A group of snapshots of several volumes and clones that hold a state which could have been at one instant: if a
//! write was acknowledged before another was issued, to whatever member, then a group that holds the second holds the
//! first.
//!
//! Role: gets what the members' controllers notice, and tells them what to do. It knows a controller by the number that
//! the shell gave it; several members may share one. Events of one controller arrive in the order in which they were
//! told, and so do its notices.
//!
//! ```text
//! quiescing --every controller is quiet-->  taking   --every snapshot is taken-->  letting go  --every quiesce ended
//! whole-->  over
//!    |                                      |                                        |
//!    +-- a refusal, a quiesce that ended, a controller that is gone, GROUP_MAX ---------+-->  undoing  -->  over
//! ```
//!
//! Why it holds: let the group hold write 2, and write 1 have been answered before 2 was issued. Then 1 was answered
//! before the record behind 2 was appended. At that instant every controller held its answers, 1's too: since a time
//! before its own record was appended, and until later than this one was. So 1 was answered before its controller held,
//! and lies in front of its record. A quiesce that ended too early says so ([`Notice::QuiesceEnded`]), at whatever
//! time, and the group is undone.
//!
//! What a guest *reads* of a write that was not answered yet: where all controllers are driven by one thread, it carries
//! out the effects of one event before it takes another request, so all records are appended at one place in the order of
//! requests. Where they are not, reads' answers are held back, too ([`Group::with_reads`]): what was read of a member
//! after its record is heard when all records are appended.
//!
//! Invariants: (1) [`GroupEffect::Over`] is told once; (2) a group that is told as taken has every snapshot, under
//! those that ended whole; (3) every quiesce that was asked for is released; (4) of a group that failed every snapshot
//! is dropped that its controller tells of, also after the end was told.
//!
//! Faults: a host that crashes leaves what was taken by then. A controller that is gone before it could drop its
//! snapshot may leave that; [`GroupEnd::Failed`] names it.

use crate::api::{Change, Event, Notice, State};
use holdfast_base::{Effects, HeadId, Instant, QuiesceId};
use std::fmt;
use std::time::Duration;

/// A group that takes longer is undone: guests wait meanwhile. Shorter than [`crate::io::quiesce::QUIESCE_MAX`].
pub const GROUP_MAX: Duration = Duration::from_millis(500);

/// How long the end of a failed group is put off until all of it is undone.
const UNDO_MAX: Duration = Duration::from_secs(10);

/// A snapshot that is to be taken.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GroupMember {
    pub controller: usize,
    pub head: HeadId,
    pub name: String,
}

#[derive(Clone, Debug)]
pub enum GroupEvent {
    Begin,
    Notice {
        controller: usize,
        notice: Notice,
    },
    /// It will tell nothing any more.
    Gone {
        controller: usize,
    },
    /// A deadline passed.
    Tick,
}

#[derive(Clone, Debug)]
pub enum GroupEffect {
    Tell { controller: usize, event: Event },
    Over(GroupEnd),
}

/// What a group came to. Members by their place.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum GroupEnd {
    Taken,
    Failed {
        /// The first that did not do its part.
        member: usize,
        why: Why,
        /// Those whose snapshots may be there all the same, now or later.
        left: Vec<usize>,
    },
}

/// Why a member did not do its part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Why {
    Refused(&'static str),
    /// Its answers were not held back all the time: it is being closed, or another group has it.
    NotHeld,
    /// Its controller is gone, or has lost the volume.
    Gone,
    /// Not within [`GROUP_MAX`].
    Late,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Why::Refused(why) => f.write_str(why),
            Why::NotHeld => f.write_str("its answers could not be held back for long enough, or it is being closed"),
            Why::Gone => f.write_str("it went out of service"),
            Why::Late => write!(f, "it did not take its snapshot within {} ms", GROUP_MAX.as_millis()),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Quiescing,
    Taking,
    LettingGo,
    Undoing,
    Over,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum QuiesceState {
    Asked,
    Quiesced,
    Ended,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SnapshotState {
    /// Not asked for, refused, or dropped again.
    None,
    Asked,
    Taken,
    Dropping,
    /// Nobody tells any more what became of it.
    Unknown,
}

#[derive(Debug)]
struct Holder {
    controller: usize,
    state: QuiesceState,
    is_released: bool,
}

pub struct Group {
    quiesce: QuiesceId,
    with_reads: bool,
    created_ms: u64,
    members: Vec<(GroupMember, SnapshotState)>,
    holders: Vec<Holder>,
    stage: Stage,
    deadline: Option<Instant>,
    failure: Option<(usize, Why)>,
    is_told: bool,
}

type Out<'a> = &'a mut Effects<GroupEffect>;

impl Group {
    /// `quiesce` must be new to all controllers.
    pub fn new(quiesce: QuiesceId, members: Vec<GroupMember>, created_ms: u64) -> Group {
        assert!(!members.is_empty(), "a group has members");
        let mut controllers: Vec<usize> = members.iter().map(|member| member.controller).collect();
        controllers.sort_unstable();
        controllers.dedup();
        let holder = |controller| Holder { controller, state: QuiesceState::Asked, is_released: false };
        Group {
            quiesce,
            with_reads: false,
            created_ms,
            members: members.into_iter().map(|member| (member, SnapshotState::None)).collect(),
            holders: controllers.into_iter().map(holder).collect(),
            stage: Stage::Quiescing,
            deadline: None,
            failure: None,
            is_told: false,
        }
    }

    /// Holds back what guests read as well: the controllers are not all driven by one thread.
    #[must_use]
    pub fn with_reads(self) -> Group {
        Group { with_reads: true, ..self }
    }

    pub fn handle(&mut self, now: Instant, event: GroupEvent, out: Out) {
        match event {
            GroupEvent::Begin => self.begin(now, out),
            GroupEvent::Notice { controller, notice } => self.on_notice(now, controller, &notice, out),
            GroupEvent::Gone { controller } => self.on_gone(now, controller, out),
            GroupEvent::Tick => self.on_tick(now, out),
        }
        self.progress(out);
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Nothing more will come of it.
    pub fn is_over(&self) -> bool {
        self.stage == Stage::Over
    }

    fn begin(&mut self, now: Instant, out: Out) {
        self.deadline = Some(now + GROUP_MAX);
        for holder in &self.holders {
            let event = Event::Quiesce { quiesce: self.quiesce, with_reads: self.with_reads };
            out.push(GroupEffect::Tell { controller: holder.controller, event });
        }
    }

    fn snapshot_of(&self, member: &GroupMember) -> Change {
        Change::Snapshot { head: member.head, name: member.name.clone(), created_ms: self.created_ms }
    }

    fn drop_of(member: &GroupMember) -> Change {
        Change::DropSnapshot { head: member.head, name: member.name.clone() }
    }

    fn on_notice(&mut self, now: Instant, controller: usize, notice: &Notice, out: Out) {
        match notice {
            Notice::Quiesced { quiesce } if *quiesce == self.quiesce => {
                self.holder(controller).filter(|h| h.state == QuiesceState::Asked).into_iter().for_each(|holder| {
                    holder.state = QuiesceState::Quiesced;
                });
            }
            Notice::QuiesceEnded { quiesce, whole } if *quiesce == self.quiesce => {
                self.holder(controller).into_iter().for_each(|holder| holder.state = QuiesceState::Ended);
                if !whole {
                    self.fail(now, self.first_of(controller), Why::NotHeld, out);
                }
            }
            Notice::Changed { change, .. } => self.on_changed(controller, change, out),
            Notice::Refused { change, why } => self.on_refused(now, controller, change, why, out),
            Notice::StateChanged(State::Deposed | State::Closed) => self.on_gone(now, controller, out),
            _ => {}
        }
    }

    fn holder(&mut self, controller: usize) -> Option<&mut Holder> {
        self.holders.iter_mut().find(|holder| holder.controller == controller)
    }

    fn first_of(&self, controller: usize) -> usize {
        self.members.iter().position(|(member, _)| member.controller == controller).unwrap_or(0)
    }

    fn on_changed(&mut self, controller: usize, change: &Change, out: Out) {
        for i in 0..self.members.len() {
            let (member, state) = &self.members[i];
            if member.controller != controller {
                continue;
            }
            if *state == SnapshotState::Asked && *change == self.snapshot_of(member) {
                self.members[i].1 = SnapshotState::Taken;
                if self.failure.is_some() {
                    self.drop_snapshot(i, out);
                }
            } else if *state != SnapshotState::None && *change == Self::drop_of(member) {
                self.members[i].1 = SnapshotState::None;
            }
        }
    }

    fn on_refused(&mut self, now: Instant, controller: usize, change: &Change, why: &'static str, out: Out) {
        for i in 0..self.members.len() {
            let (member, state) = &self.members[i];
            if member.controller != controller {
                continue;
            }
            if *state == SnapshotState::Asked && *change == self.snapshot_of(member) {
                self.members[i].1 = SnapshotState::None;
                self.fail(now, i, Why::Refused(why), out);
            } else if *state == SnapshotState::Dropping && *change == Self::drop_of(member) {
                self.members[i].1 = SnapshotState::Unknown;
            }
        }
    }

    fn on_gone(&mut self, now: Instant, controller: usize, out: Out) {
        for (member, state) in &mut self.members {
            if member.controller == controller && *state != SnapshotState::None {
                *state = SnapshotState::Unknown;
            }
        }
        if let Some(holder) = self.holder(controller) {
            holder.state = QuiesceState::Ended;
            self.fail(now, self.first_of(controller), Why::Gone, out);
        }
    }

    fn on_tick(&mut self, now: Instant, out: Out) {
        if self.deadline.is_none_or(|deadline| deadline > now) {
            return;
        }
        if self.failure.is_none() {
            self.fail(now, self.latest(), Why::Late, out);
        } else {
            self.deadline = None;
            self.tell_failure(out);
        }
    }

    /// A member that the others wait for.
    fn latest(&self) -> usize {
        let waits = |controller: usize| {
            let holder = self.holders.iter().find(|holder| holder.controller == controller);
            holder.is_some_and(|holder| match self.stage {
                Stage::Quiescing => holder.state == QuiesceState::Asked,
                _ => holder.state != QuiesceState::Ended,
            })
        };
        let is_late = |(member, state): &(GroupMember, SnapshotState)| match self.stage {
            Stage::Taking => *state == SnapshotState::Asked,
            _ => waits(member.controller),
        };
        self.members.iter().position(is_late).unwrap_or(0)
    }

    /// From here on the group is undone. Only the first failure counts.
    fn fail(&mut self, now: Instant, member: usize, why: Why, out: Out) {
        if self.failure.is_some() || self.stage == Stage::Over {
            return;
        }
        self.failure = Some((member, why));
        self.stage = Stage::Undoing;
        self.deadline = Some(now + UNDO_MAX);
        self.release(out);
        for i in 0..self.members.len() {
            if self.members[i].1 == SnapshotState::Taken {
                self.drop_snapshot(i, out);
            }
        }
    }

    fn drop_snapshot(&mut self, i: usize, out: Out) {
        let (member, state) = &mut self.members[i];
        *state = SnapshotState::Dropping;
        out.push(GroupEffect::Tell { controller: member.controller, event: Event::Change(Self::drop_of(member)) });
    }

    fn release(&mut self, out: Out) {
        for holder in self.holders.iter_mut().filter(|h| h.state != QuiesceState::Ended && !h.is_released) {
            holder.is_released = true;
            out.push(GroupEffect::Tell {
                controller: holder.controller,
                event: Event::Release { quiesce: self.quiesce },
            });
        }
    }

    /// The next step, where everything that it waits for has come.
    fn progress(&mut self, out: Out) {
        match self.stage {
            Stage::Quiescing if self.holders.iter().all(|holder| holder.state == QuiesceState::Quiesced) => {
                self.stage = Stage::Taking;
                for i in 0..self.members.len() {
                    let (member, _) = &self.members[i];
                    let event = Event::Change(self.snapshot_of(member));
                    out.push(GroupEffect::Tell { controller: member.controller, event });
                    self.members[i].1 = SnapshotState::Asked;
                }
            }
            Stage::Taking if self.members.iter().all(|(_, state)| *state == SnapshotState::Taken) => {
                self.stage = Stage::LettingGo;
                self.release(out);
            }
            Stage::LettingGo if self.holders.iter().all(|holder| holder.state == QuiesceState::Ended) => {
                (self.stage, self.deadline, self.is_told) = (Stage::Over, None, true);
                out.push(GroupEffect::Over(GroupEnd::Taken));
            }
            Stage::Undoing if self.is_undone() => {
                self.tell_failure(out);
                (self.stage, self.deadline) = (Stage::Over, None);
            }
            Stage::Quiescing | Stage::Taking | Stage::LettingGo | Stage::Undoing | Stage::Over => {}
        }
    }

    fn is_undone(&self) -> bool {
        let is_settled = |state| matches!(state, SnapshotState::None | SnapshotState::Unknown);
        let is_ended = |holder: &Holder| holder.state == QuiesceState::Ended;
        self.members.iter().all(|(_, state)| is_settled(*state)) && self.holders.iter().all(is_ended)
    }

    fn tell_failure(&mut self, out: Out) {
        let (member, why) = self.failure.expect("a group that is undone has failed");
        if !std::mem::replace(&mut self.is_told, true) {
            let may_be_left = |i: &usize| self.members[*i].1 != SnapshotState::None;
            let left = (0..self.members.len()).filter(may_be_left).collect();
            out.push(GroupEffect::Over(GroupEnd::Failed { member, why, left }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUIESCE: QuiesceId = QuiesceId(7);

    struct Driven {
        group: Group,
        now: Instant,
        out: Effects<GroupEffect>,
        told: Vec<(usize, Event)>,
        end: Option<GroupEnd>,
    }

    impl Driven {
        /// One member for each controller that is named.
        fn begin(controllers: &[usize]) -> Driven {
            let member = |(i, controller): (usize, &usize)| GroupMember {
                controller: *controller,
                head: HeadId(i as u32),
                name: "monday".to_string(),
            };
            let group = Group::new(QUIESCE, controllers.iter().enumerate().map(member).collect(), 5);
            let (now, out) = (Instant(1_000), Effects::new());
            let mut driven = Driven { group, now, out, told: Vec::new(), end: None };
            driven.handle(GroupEvent::Begin);
            driven
        }

        fn handle(&mut self, event: GroupEvent) {
            self.group.handle(self.now, event, &mut self.out);
            for effect in self.out.take() {
                match effect {
                    GroupEffect::Tell { controller, event } => self.told.push((controller, event)),
                    GroupEffect::Over(end) => assert!(self.end.replace(end).is_none(), "the end is told once"),
                }
            }
        }

        fn hear(&mut self, controller: usize, notice: Notice) {
            self.handle(GroupEvent::Notice { controller, notice });
        }

        fn pass(&mut self, span: Duration) {
            self.now = self.now + span;
            self.handle(GroupEvent::Tick);
        }

        fn hold(&mut self, controllers: &[usize]) {
            controllers.iter().for_each(|c| self.hear(*c, Notice::Quiesced { quiesce: QUIESCE }));
        }

        fn snapshot(head: u32) -> Change {
            Change::Snapshot { head: HeadId(head), name: "monday".to_string(), created_ms: 5 }
        }

        fn take(&mut self, controller: usize, head: u32) {
            self.hear(controller, Notice::Changed { change: Self::snapshot(head), target: None });
        }

        fn end_hold(&mut self, controller: usize, whole: bool) {
            self.hear(controller, Notice::QuiesceEnded { quiesce: QUIESCE, whole });
        }

        fn dropped(&mut self, controller: usize, head: u32) {
            let change = Change::DropSnapshot { head: HeadId(head), name: "monday".to_string() };
            self.hear(controller, Notice::Changed { change, target: None });
        }

        /// What was told since this was asked last, in short.
        fn told(&mut self) -> Vec<String> {
            let short = |(controller, event): (usize, Event)| match event {
                Event::Quiesce { quiesce: QUIESCE, .. } => format!("hold {controller}"),
                Event::Release { quiesce: QUIESCE } => format!("release {controller}"),
                Event::Change(Change::Snapshot { head, .. }) => format!("take {controller}.{}", head.0),
                Event::Change(Change::DropSnapshot { head, .. }) => format!("drop {controller}.{}", head.0),
                other => panic!("a group does not tell {other:?}"),
            };
            std::mem::take(&mut self.told).into_iter().map(short).collect()
        }

        fn failed(&self, member: usize, why: Why, left: &[usize]) {
            assert_eq!(self.end, Some(GroupEnd::Failed { member, why, left: left.to_vec() }));
        }
    }

    #[test]
    fn all_hold_before_any_is_taken_and_all_are_taken_before_any_lets_go() {
        let mut group = Driven::begin(&[0, 1, 0]);
        assert_eq!(group.told(), ["hold 0", "hold 1"], "a controller of two members holds once");
        group.hold(&[1]);
        assert_eq!(group.told(), [""; 0]);
        group.hold(&[0]);
        assert_eq!(group.told(), ["take 0.0", "take 1.1", "take 0.2"]);
        group.take(0, 2);
        group.take(1, 1);
        assert_eq!(group.told(), [""; 0]);
        group.take(0, 0);
        assert_eq!(group.told(), ["release 0", "release 1"]);
        group.end_hold(1, true);
        assert_eq!(group.end, None);
        group.end_hold(0, true);
        assert_eq!(group.end, Some(GroupEnd::Taken));
        assert!(group.group.is_over() && group.group.next_deadline().is_none());
    }

    #[test]
    fn a_refusal_undoes_what_was_taken_and_leaves_what_was_there() {
        let mut group = Driven::begin(&[0, 1, 2]);
        group.hold(&[0, 1, 2]);
        group.take(0, 0);
        group.told();
        group.hear(1, Notice::Refused { change: Driven::snapshot(1), why: "of that name" });
        assert_eq!(group.told(), ["release 0", "release 1", "release 2", "drop 0.0"]);
        // Its record was on the way.
        group.take(2, 2);
        assert_eq!(group.told(), ["drop 2.2"]);
        (0..3).for_each(|controller| group.end_hold(controller, true));
        group.dropped(0, 0);
        assert_eq!(group.end, None);
        group.dropped(2, 2);
        group.failed(1, Why::Refused("of that name"), &[]);
        assert!(group.group.is_over());
    }

    #[test]
    fn a_hold_that_ended_early_undoes_the_group_even_after_all_are_taken() {
        let mut group = Driven::begin(&[0, 1]);
        group.hold(&[0, 1]);
        group.take(0, 0);
        group.take(1, 1);
        group.told();
        // Its deadline passed while the release was on its way.
        group.end_hold(0, false);
        assert_eq!(group.told(), ["drop 0.0", "drop 1.1"]);
        group.end_hold(1, true);
        group.dropped(0, 0);
        group.dropped(1, 1);
        group.failed(0, Why::NotHeld, &[]);
    }

    #[test]
    fn who_is_late_is_named_and_what_it_takes_later_is_dropped() {
        let mut group = Driven::begin(&[0, 1]);
        group.pass(GROUP_MAX / 2);
        group.hold(&[0, 1]);
        group.take(0, 0);
        group.told();
        group.pass(GROUP_MAX / 2);
        assert_eq!(group.told(), ["release 0", "release 1", "drop 0.0"]);
        group.end_hold(0, true);
        group.end_hold(1, true);
        group.dropped(0, 0);
        assert_eq!(group.end, None);
        group.pass(UNDO_MAX);
        group.failed(1, Why::Late, &[1]);
        assert!(!group.group.is_over());
        group.take(1, 1);
        assert_eq!(group.told(), ["drop 1.1"]);
        group.dropped(1, 1);
        assert!(group.group.is_over());
    }

    #[test]
    fn a_controller_that_is_gone_may_leave_its_snapshot() {
        let mut group = Driven::begin(&[0, 1]);
        group.hold(&[0, 1]);
        group.take(0, 0);
        group.told();
        group.hear(0, Notice::StateChanged(State::Deposed));
        assert_eq!(group.told(), ["release 1"]);
        group.hear(1, Notice::Refused { change: Driven::snapshot(1), why: "the volume is not open" });
        group.end_hold(1, true);
        group.failed(0, Why::Gone, &[0]);
        let mut group = Driven::begin(&[0, 1]);
        group.handle(GroupEvent::Gone { controller: 1 });
        group.end_hold(0, true);
        group.failed(1, Why::Gone, &[]);
        assert_eq!(group.told(), ["hold 0", "hold 1", "release 0"]);
    }
}
