//! Turns: what is asked of the volumes of a reactor goes to them when it is its turn.
//!
//! Role: around [`Scheduler`], between the right to write ([`crate::write_gate`]) and filters. A volume is a tenant, and so
//! is each clone in it; reads of its snapshots are another one, without a limit. Sessions of other hosts have their turns
//! here, where the volume is served, and nowhere else.
//!
//! What waits has its place among the requests under way of its volume ([`crate::requests`]), so that a session that must
//! come behind it does, and in its order within the tenant. The controller and filters don't know of it. It is dropped with
//! the session that asked, and with the controller; a volume that is closed or handed over has all of it first.
//!
//! Once a request has gone, the scheduler counts it until it is answered. It does not where something else than the machine
//! makes it wait: the volume is not open, a filter stands before it, or the controller holds writes back.
//!
//! Reactors of one host share the window: each tells sums to the first one, which tells shares ([`Sharing`]). A host of one
//! reactor has none of that.
//!
//! Where volumes are not isolated there is no window, unless a policy of the grid promises a floor: without one a floor is a
//! word. Then volumes of all hosts are isolated as is [default](Isolation), for all use the same nodes.
//!
//! Invariants: (1) each request that waits here has a place in its volume, and no turn there; (2) it goes or is answered,
//! once. Both in [`Host::verify`].
//!
//! Limits: [`REQUESTS_MAX`] requests of all volumes that wait or have gone; more are refused as those are that a controller
//! has no room for. Beyond [`TENANTS_MAX`](holdfast_qos::scheduler::TENANTS_MAX) tenants nobody waits.

use crate::event::Effect;
use crate::groups::Sibling;
use crate::homes::FRONT;
use crate::host::{Host, Out};
#[cfg(feature = "simulated")]
use crate::observed::Observation;
use crate::requests::Turn;
use crate::volumes::Volume;
use crate::writers::SessionId;
use holdfast_base::time::earliest;
use holdfast_base::{
    BlockError, BlockOp, BlockReply, BlockRequest, Effects, HeadId, Instant, RequestToken, Slab, Token, Urgency,
};
use holdfast_qos::scheduler::{self, REQUESTS_MAX};
use holdfast_qos::{Config, Figures, Isolation, Kind, Scheduler, Share, Sharing, Slot, Sums, TenantId, sharing};
use holdfast_volume::{State, Target};
use std::collections::VecDeque;
use std::time::Duration;

/// Pace of telling sums.
const SUMS_PACE: Duration = Duration::from_millis(100);

/// A request that waits for its turn.
pub(crate) struct Waiting {
    pub at: Token,
    pub target: Target,
    pub session: SessionId,
    pub request: BlockRequest,
}

/// What is gone, and what it has waiting with it.
pub(crate) enum Left {
    Session {
        at: Token,
        session: SessionId,
    },
    /// Some clones may be.
    Clones {
        at: Token,
    },
}

/// A volume, a clone in it, or its snapshots, as the scheduler knows it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Tenant {
    /// None of the snapshots.
    pub head: Option<HeadId>,
    pub id: TenantId,
    /// Its limit as it was told, and which of the limits that is of.
    pub words: Option<String>,
    pub seen: Option<u64>,
}

/// The scheduler of a reactor, and what waits for it.
pub(crate) struct Turns {
    scheduler: Scheduler,
    effects: Effects<scheduler::Effect>,
    waiting: Slab<Waiting>,
    pub left: VecDeque<Left>,
    /// Gone, and not counted.
    uncounted: Vec<Slot>,
    /// What is dropped goes to its volume.
    releases: bool,
    driven_at: Instant,
    reactor: usize,
    reactors: usize,
    isolation: Isolation,
    /// There is a window, whatever policies say.
    is_isolated: bool,
    has_window: bool,
    /// Of the first of several reactors, while there is a window.
    sharing: Option<Sharing>,
    sums_at: Option<Instant>,
}

impl Turns {
    pub fn new(config: &crate::Config) -> Turns {
        let isolation = config.isolation.unwrap_or_default();
        let mut turns = Turns {
            scheduler: Scheduler::new(Config { isolation, ..Config::default() }),
            effects: Effects::new(),
            waiting: Slab::new(REQUESTS_MAX),
            left: VecDeque::new(),
            uncounted: Vec::new(),
            releases: false,
            driven_at: Instant::ZERO,
            reactor: config.reactor,
            reactors: config.reactors,
            isolation,
            is_isolated: config.isolation.is_some(),
            has_window: false,
            sharing: None,
            sums_at: None,
        };
        let share = turns.set_window(turns.is_isolated);
        turns.scheduler.handle(Instant::ZERO, scheduler::Event::SetShare { share }, &mut Effects::new());
        turns
    }

    /// From here on there is a window, or none; gives the share to begin with.
    fn set_window(&mut self, has_window: bool) -> Share {
        self.has_window = has_window;
        let shares_out = self.is_shared() && self.reactor == FRONT;
        self.sharing = shares_out.then(|| Sharing::new(self.reactors, self.isolation));
        if !self.is_shared() {
            self.sums_at = None;
        }
        if has_window { Share::Own } else { Share::Unbounded }
    }

    /// With other reactors.
    fn is_shared(&self) -> bool {
        self.has_window && self.reactors > 1
    }

    /// Tenants share one.
    pub fn has_window(&self) -> bool {
        self.has_window
    }

    /// Whether there is room for another request.
    pub fn has_room(&self) -> bool {
        self.scheduler.has_room()
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        let own = earliest(self.scheduler.next_deadline(), self.sums_at);
        earliest(own, self.sharing.as_ref().and_then(Sharing::next_deadline))
    }

    pub fn add_tenant(&mut self, policy: holdfast_qos::Policy) -> Option<TenantId> {
        self.scheduler.add(policy, holdfast_qos::Role::Guest)
    }

    /// How a tenant fares.
    pub fn figures(&self, tenant: TenantId) -> Figures {
        self.scheduler.figures(tenant).unwrap_or_default()
    }
}

/// What a request costs by.
fn kind_of(op: &BlockOp) -> (Kind, u64) {
    match op {
        BlockOp::Read(range) => (Kind::Read, range.len),
        BlockOp::Write { data, .. } => (Kind::Write, data.len() as u64),
        BlockOp::Flush => (Kind::Flush, 0),
        _ => (Kind::Discard, 0),
    }
}

impl Volume {
    pub(crate) fn tenant(&self, head: Option<HeadId>) -> Option<&Tenant> {
        self.tenants.iter().find(|tenant| tenant.head == head)
    }

    /// Something else than the machine makes requests wait: those that change something, or all.
    fn is_held(&self, changes: bool) -> bool {
        let controller = &self.controller;
        let holds = controller.is_quiesced() || changes && controller.holds_writes();
        holds || controller.state() != State::Open || !self.filters.is_empty()
    }
}

impl Host {
    /// A request that has its place in its volume waits for its turn, which may be now.
    pub(crate) fn take_turn(&mut self, now: Instant, waiting: Waiting, out: Out) {
        let head = if let Target::Head(head) = waiting.target { Some(head) } else { None };
        self.note_asked(now, &waiting, head);
        self.packing.note_guest(now);
        let Some(tenant) = self.tenant_of(now, waiting.at, head, out) else {
            return self.pass(now, waiting.at, waiting.target, waiting.request, Urgency::Normal, out);
        };
        let (kind, bytes) = kind_of(&waiting.request.op);
        let token = self.turns.waiting.insert(waiting);
        if self.turns.is_shared() && self.turns.sums_at.is_none() {
            self.turns.sums_at = Some(now + SUMS_PACE);
        }
        let event = scheduler::Event::Request { tenant, kind, bytes, token: RequestToken(token.0) };
        self.drive_turns(now, event, out);
    }

    fn tenant_of(&mut self, now: Instant, at: Token, head: Option<HeadId>, out: Out) -> Option<TenantId> {
        let tenant = self.volumes.table.get(at)?.tenant(head);
        if let Some(tenant) = tenant.filter(|tenant| tenant.seen == Some(self.volumes.limits_version)) {
            return Some(tenant.id);
        }
        self.keep_to_limit(now, at, head, out)
    }

    pub(crate) fn drive_turns(&mut self, now: Instant, event: scheduler::Event, out: Out) {
        let mut event = Some(event);
        while let Some(next) = event {
            let mut effects = std::mem::take(&mut self.turns.effects);
            self.turns.scheduler.handle(now, next, &mut effects);
            self.carry_out_turns(now, effects, out);
            event = self.turns.uncounted.pop().map(|slot| scheduler::Event::Ended { slot });
        }
    }

    fn carry_out_turns(&mut self, now: Instant, mut effects: Effects<scheduler::Effect>, out: Out) {
        self.turns.driven_at = now;
        for effect in effects.drain() {
            #[cfg(feature = "simulated")]
            if matches!(effect, scheduler::Effect::Drop { .. }) {
                self.observed.note(Observation::Turned { is_dropped: !self.turns.releases });
            }
            let (scheduler::Effect::Go { token, .. } | scheduler::Effect::Drop { token }) = effect;
            let waiting = self.turns.waiting.remove(Token(token.0)).expect("what waits is told once");
            match effect {
                scheduler::Effect::Go { slot, urgency, .. } => self.on_turn(now, waiting, slot, urgency, out),
                scheduler::Effect::Drop { .. } if self.turns.releases => {
                    self.pass(now, waiting.at, waiting.target, waiting.request, Urgency::Normal, out);
                }
                scheduler::Effect::Drop { .. } => {
                    let reply = BlockReply { token: waiting.request.token, result: Err(BlockError::Deposed) };
                    self.replies.push_back((waiting.at, reply));
                }
            }
        }
        self.turns.effects = effects;
    }

    fn on_turn(&mut self, now: Instant, waiting: Waiting, slot: Slot, urgency: Urgency, out: Out) {
        let Waiting { at, target, request, .. } = waiting;
        let volume = self.volumes.table.get_mut(at).expect("what waits is dropped with its volume");
        let changes = request.op.changes();
        if volume.is_held(changes) {
            self.turns.uncounted.push(slot);
        } else {
            volume.requests.went(request.token, Turn { slot, went_at: now, changes });
        }
        let urgency = if self.mutations.turn_forgets_class() { Urgency::Normal } else { urgency };
        self.pass(now, at, target, request, urgency, out);
    }

    /// A request that has gone is answered.
    pub(crate) fn end_turn(&mut self, now: Instant, at: Token, turn: Turn, out: Out) {
        let Turn { slot, went_at, changes } = turn;
        let was_held = self
            .volumes
            .table
            .get(at)
            .is_none_or(|volume| volume.is_held(changes) || volume.quiesced_at.is_some_and(|at| went_at <= at));
        let event = if was_held { scheduler::Event::Ended { slot } } else { scheduler::Event::Done { slot } };
        self.drive_turns(now, event, out);
    }

    // ---- what is gone ----

    /// Drops what nobody waits for any more.
    pub(crate) fn settle_left(&mut self, now: Instant, out: Out) -> bool {
        let Some(left) = self.turns.left.pop_front() else { return false };
        match left {
            Left::Session { at, session } => self.drop_of_session(now, at, session, out),
            Left::Clones { at } => {
                let Some(volume) = self.volumes.table.get_mut(at) else { return true };
                let heads: Vec<HeadId> = volume.controller.clones().map(|(head, _)| head).collect();
                let is_there = |head: HeadId| head == HeadId::VOLUME || heads.contains(&head);
                volume.recorded.retain(|of| is_there(of.head));
                let gone = volume.tenants.extract_if(.., |tenant| tenant.head.is_some_and(|head| !is_there(head)));
                for tenant in gone.collect::<Vec<_>>() {
                    self.drive_turns(now, scheduler::Event::Remove { tenant: tenant.id }, out);
                }
            }
        }
        true
    }

    fn drop_of_session(&mut self, now: Instant, at: Token, session: SessionId, out: Out) {
        let Some(volume) = self.volumes.table.get(at) else { return };
        let waits = |tenant: &&Tenant| self.turns.figures(tenant.id).waiting > 0;
        for tenant in volume.tenants.iter().filter(waits).map(|tenant| tenant.id).collect::<Vec<_>>() {
            let Turns { scheduler, waiting, effects, .. } = &mut self.turns;
            let mut effects = std::mem::take(effects);
            let is_its = |token: RequestToken| {
                let of = waiting.get(Token(token.0)).expect("it waits");
                (of.at, of.session) == (at, session)
            };
            scheduler.drop_waiting(now, tenant, is_its, &mut effects);
            self.carry_out_turns(now, effects, out);
        }
    }

    /// The controller is gone: what waited for it is told what all is told that it had.
    pub(crate) fn drop_turns(&mut self, now: Instant, at: Token, out: Out) {
        let tenants = self.volumes.table.get_mut(at).map(|volume| std::mem::take(&mut volume.tenants));
        for tenant in tenants.unwrap_or_default() {
            self.drive_turns(now, scheduler::Event::Remove { tenant: tenant.id }, out);
        }
    }

    /// The volume, or a clone, is about to be closed, handed over or dropped: all that waits goes to it first, whatever its limit is.
    pub(crate) fn release_turns(&mut self, now: Instant, at: Token, head: Option<HeadId>, out: Out) {
        while self.settle_left(now, out) {}
        let Some(volume) = self.volumes.table.get_mut(at) else { return };
        let of_it = |tenant: &mut Tenant| head.is_none() || tenant.head == head;
        let tenants: Vec<Tenant> = volume.tenants.extract_if(.., of_it).collect();
        self.turns.releases = true;
        for tenant in tenants {
            self.drive_turns(now, scheduler::Event::Remove { tenant: tenant.id }, out);
        }
        self.turns.releases = false;
    }

    // ---- reactors ----

    pub(crate) fn tick_turns(&mut self, now: Instant, out: Out) {
        if self.turns.scheduler.next_deadline().is_some_and(|at| at <= now) {
            self.drive_turns(now, scheduler::Event::Tick, out);
        }
        if self.turns.sums_at.is_some_and(|at| at <= now) {
            let sums = self.turns.scheduler.sums(now);
            // The last one says that it rests.
            self.turns.sums_at = (sums.active > 0).then_some(now + SUMS_PACE);
            if self.turns.reactor == FRONT {
                self.hear_sums(now, FRONT, sums, out);
            } else {
                out.push(Effect::Sibling { reactor: FRONT, message: Sibling::Sums(Box::new(sums)) });
            }
        }
        self.drive_sharing(now, sharing::Event::Tick, out);
    }

    pub(crate) fn hear_sums(&mut self, now: Instant, reactor: usize, sums: Sums, out: Out) {
        self.drive_sharing(now, sharing::Event::Sums { reactor, sums }, out);
    }

    fn drive_sharing(&mut self, now: Instant, event: sharing::Event, out: Out) {
        let Some(sharing) = &mut self.turns.sharing else { return };
        let mut effects = Effects::new();
        sharing.handle(now, event, &mut effects);
        for sharing::Effect { reactor, share } in effects.take() {
            if reactor == FRONT {
                self.take_share(now, share, out);
            } else {
                out.push(Effect::Sibling { reactor, message: Sibling::Share(share) });
            }
        }
    }

    pub(crate) fn take_share(&mut self, now: Instant, share: Share, out: Out) {
        // It may come late, when there is no window any more.
        if self.turns.has_window {
            self.drive_turns(now, scheduler::Event::SetShare { share }, out);
        }
    }

    /// Somebody is promised a floor, or nobody.
    pub(crate) fn see_to_floors(&mut self, now: Instant, are_there: bool, out: Out) {
        let has_window = self.turns.is_isolated || are_there;
        if has_window != self.turns.has_window {
            let share = self.turns.set_window(has_window);
            self.drive_turns(now, scheduler::Event::SetShare { share }, out);
        }
    }

    // ---- what others may see ----

    /// How a volume or a clone fares among others, since it is in service here; nothing before its first request.
    pub fn figures(&self, name: &str) -> Option<Figures> {
        let (volume, head) = self.find(name)?;
        volume.tenant(Some(head)).map(|tenant| self.turns.figures(tenant.id))
    }

    /// # Panics
    /// An invariant of the module or of the scheduler does not hold.
    pub(crate) fn verify_turns(&self) {
        self.turns.scheduler.verify(self.turns.driven_at);
        assert_eq!(self.turns.waiting.len(), self.turns.scheduler.waiting(), "what waits for its turn");
        for (_, waiting) in self.turns.waiting.iter() {
            let volume = self.volumes.table.get(waiting.at).expect("what waits is dropped with its volume");
            assert!(volume.requests.waits_for_turn(waiting.request.token), "what waits has a place, and no turn");
        }
    }
}
