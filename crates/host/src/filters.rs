//! Filters before the volumes of this host: see [`holdfast_filter`].
//!
//! Role: around [`Stack`]. Whoever asks a volume has a place among the requests under way until it is answered, whatever
//! filters do with the request. What they ask the controller has one there, too. So all that filters hold counts as under
//! way, and a session that must come behind it does ([`crate::requests::Barrier`]).
//!
//! Filters live as long as this host has the volume in service: they are in no record. They are drained before the volume
//! is closed or handed over, so that nothing comes out of them later; before that, what waits for its turn goes to them.
//! With a controller that is gone they are dropped, and what they held is answered as what the controller had.
//!
//! Limits: what filters may ask beyond what they are asked is kept free among the requests under way.

use crate::event::{ChangeOutcome, FilterChange, FilterOutcome};
use crate::host::{Host, Out, info, warn};
use crate::limits::LIMIT;
#[cfg(feature = "simulated")]
use crate::observed::Observation;
use crate::requests::{Origin, Requester};
use crate::volumes::Volume;
use holdfast_base::{BlockRequest, Effects, HeadId, Instant, Token, Urgency};
use holdfast_filter::{Effect, FILTERS_MAX, Filter, FilterId, OWN_MAX, Stack, StackEvent};
use holdfast_volume::controller::REQUESTS_MAX;
use holdfast_volume::{Event as VolumeEvent, State, Target};

impl Volume {
    fn stack_mut(&mut self, head: HeadId) -> Option<&mut Stack> {
        self.filters.iter_mut().find(|(of, _)| *of == head).map(|(_, stack)| stack)
    }

    /// Before it is changed in a way that nothing under way may follow.
    pub(crate) fn check_filters_are_clear(&self, head: HeadId) -> Result<(), ChangeOutcome> {
        if self.stack(head).is_some_and(|stack| stack.in_flight() > 0) {
            return Err(ChangeOutcome::Refused("filters hold requests of clients that are gone"));
        }
        Ok(())
    }

    pub(crate) fn add_filter(
        &mut self,
        head: HeadId,
        filter: Box<dyn Filter>,
        out: Out,
    ) -> Result<FilterId, FilterOutcome> {
        if !self.has_room_beside_filters(FILTERS_MAX * OWN_MAX) {
            return Err(FilterOutcome::TooMany);
        }
        let name = self.name_of(head);
        let (spec, is_tool) = (filter.spec().to_string(), filter.nature().is_tool);
        if self.stack_mut(head).is_none() {
            self.filters.push((head, Stack::new(REQUESTS_MAX)));
        }
        let Some(id) = self.stack_mut(head).and_then(|stack| stack.add(filter)) else {
            return Err(FilterOutcome::TooMany);
        };
        if is_tool {
            warn(
                out,
                format!(
                    "volume {name}: filter {id}, {spec}, makes it worse on purpose; `holdfast volume filter remove {name}` ends \
                     that"
                ),
            );
        } else {
            info(out, format!("volume {name}: filter {id}, {spec}, stands before it"));
        }
        Ok(id)
    }
}

impl Host {
    /// Gives a request that is under way to the controller, by the filters that stand before it.
    pub(crate) fn pass(
        &mut self,
        now: Instant,
        at: Token,
        target: Target,
        request: BlockRequest,
        urgency: Urgency,
        out: Out,
    ) {
        let Some(volume) = self.volumes.table.get_mut(at) else { return };
        let head = if let Target::Head(head) = target { volume.stack(head).map(|_| head) } else { None };
        volume.requests.passes(now, request.token, head.is_some());
        if let Some(head) = head {
            return self.drive_filters(now, at, head, StackEvent::Request(request), out);
        }
        self.drive(now, at, VolumeEvent::Request { target, request, urgency }, out);
    }

    pub(crate) fn drive_filters(&mut self, now: Instant, at: Token, head: HeadId, event: StackEvent, out: Out) {
        let Some(volume) = self.volumes.table.get_mut(at) else { return };
        let Some(stack) = volume.stack_mut(head) else { return };
        let mut effects = Effects::new();
        stack.handle(now, event, &mut effects);
        if stack.is_idle() {
            volume.filters.retain(|(of, _)| *of != head);
        }
        self.touch(at);
        for effect in effects.take() {
            match effect {
                Effect::Up(reply) => self.replies.push_back((at, reply)),
                Effect::Down(BlockRequest { token, op }) => {
                    let Some(volume) = self.volumes.table.get_mut(at) else { return };
                    let requester = Requester::Filters(head);
                    let origin = Origin { requester, token, op: None, since: now, came_at: now, changes: None };
                    let request = BlockRequest { token: volume.requests.admit(origin), op };
                    // What filters ask is another request, whoever asked them.
                    let (target, urgency) = (Target::Head(head), Urgency::Normal);
                    self.drive(now, at, VolumeEvent::Request { target, request, urgency }, out);
                }
            }
        }
    }

    fn filtered_heads(&self, at: Token) -> Vec<HeadId> {
        self.volumes.table.get(at).map_or(Vec::new(), |v| v.filters.iter().map(|(head, _)| *head).collect())
    }

    pub(crate) fn tick_filters(&mut self, now: Instant, at: Token, out: Out) {
        for head in self.filtered_heads(at) {
            self.drive_filters(now, at, head, StackEvent::Tick, out);
        }
    }

    /// The volume is about to be closed or handed over: all that filters hold goes to the controller before it hears of that.
    pub(crate) fn drain_filters(&mut self, now: Instant, at: Token, out: Out) {
        self.release_turns(now, at, None, out);
        if self.mutations.keeps_filters() {
            return;
        }
        for head in self.filtered_heads(at) {
            self.drain_filters_of(now, at, head, out);
        }
    }

    pub(crate) fn drain_filters_of(&mut self, now: Instant, at: Token, head: HeadId, out: Out) {
        self.release_turns(now, at, Some(head), out);
        if let Some(volume) = self.volumes.table.get_mut(at)
            && let Some(stack) = volume.stack_mut(head)
        {
            let count = stack.filters().len();
            #[cfg(feature = "simulated")]
            self.observed.note(Observation::Caught { requests: stack.held() });
            info(out, format!("volume {}: its filters ({count}) are drained, and gone", volume.name));
            self.drive_filters(now, at, head, StackEvent::Drain, out);
        }
    }

    /// The controller is gone: what filters hold has its origins among the requests under way, as all has.
    pub(crate) fn give_up_filters(&mut self, at: Token) {
        let Some(volume) = self.volumes.table.get_mut(at) else { return };
        let filters = std::mem::take(&mut volume.filters);
        #[cfg(feature = "simulated")]
        for (_, stack) in &filters {
            self.observed.note(Observation::Caught { requests: stack.held() });
        }
        if self.mutations.keeps_filters() {
            self.kept_filters.insert(volume.id, filters);
        }
    }

    pub(crate) fn change_filters(&mut self, now: Instant, name: &str, change: FilterChange, out: Out) -> FilterOutcome {
        let Some((at, head)) = self.volumes.find_open(name) else { return FilterOutcome::NotOpen };
        let serves = |v: &&mut Volume| v.exported && matches!(v.controller.state(), State::Opening | State::Open);
        let Some(volume) = self.volumes.table.get_mut(at).filter(serves) else { return FilterOutcome::NotOpen };
        match change {
            FilterChange::Add(filter) => {
                volume.add_filter(head, filter, out).map_or_else(|outcome| outcome, |_| FilterOutcome::Done)
            }
            FilterChange::Remove(id) => {
                if id == Some(LIMIT) && volume.id_of(head).is_some_and(|id| self.volumes.limits.contains_key(&id)) {
                    return FilterOutcome::IsLimit;
                }
                let stands: Vec<FilterId> = volume.stack(head).map_or(Vec::new(), Stack::standing);
                let asked = |of: &FilterId| id.is_none_or(|id| id == *of);
                let going: Vec<FilterId> = stands.into_iter().filter(asked).collect();
                if going.is_empty() && id.is_some() {
                    return FilterOutcome::NoSuch;
                }
                for id in going {
                    info(out, format!("volume {name}: filter {id} is removed"));
                    self.drive_filters(now, at, head, StackEvent::Remove(id), out);
                }
                FilterOutcome::Done
            }
        }
    }
}
