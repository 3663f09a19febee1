//! The gate before a volume: what is to change it waits here until its client may write.
//!
//! Role: around [`Writers`], before a request gets its place among those under way. Sessions come and go by a queue that is
//! worked off in order, so that one is known before it asks.

use crate::event::News;
use crate::forward::OwnerEvent;
use crate::host::{Host, Out, info, warn};
use crate::mutations::Mutations;
#[cfg(feature = "simulated")]
use crate::observed::Observation;
use crate::requests::{Origin, Requester};
use crate::turns::Waiting;
use crate::volumes::Volume;
use crate::writers::{SessionId, WriterEffect, WriterEvent, Writers};
use holdfast_base::{BlockError, BlockOp, BlockRequest, Effects, HeadId, Instant, Token, VolumeId};
use holdfast_format::forward::Client;
use holdfast_volume::Target;
use std::collections::BTreeSet;

/// A change that waits until its client may write.
pub(crate) struct HeldChange {
    session: SessionId,
    target: Target,
    origin: Origin,
    op: BlockOp,
}

impl Volume {
    fn writers_of(&mut self, head: HeadId, mutations: Mutations) -> &mut Writers {
        let shared = self.shared;
        self.writers.entry(head).or_insert_with(|| {
            let mut writers = Writers::default();
            writers.set_mutations(mutations);
            writers.handle(Instant::ZERO, WriterEvent::Share(shared), &mut Effects::new());
            writers
        })
    }

    fn take_held(&mut self, is_it: impl Fn(&HeldChange) -> bool) -> Vec<HeldChange> {
        let found: Vec<Token> = self.held.iter().filter(|(_, held)| is_it(held)).map(|(token, _)| token).collect();
        found.into_iter().filter_map(|token| self.held.remove(token)).collect()
    }
}

impl Host {
    /// A session may ask from here on. Of snapshots nobody changes anything.
    pub(crate) fn open_writer(
        &mut self,
        (at, target): (Token, Target),
        session: SessionId,
        client: Client,
        (wrote_at, is_fenced): (Option<Instant>, bool),
    ) {
        if let Target::Head(head) = target {
            self.writer_events.push_back((at, head, WriterEvent::Open { session, client, wrote_at, is_fenced }));
        }
    }

    pub(crate) fn close_writer(&mut self, (at, target): (Token, Target), session: SessionId) {
        if let Target::Head(head) = target {
            self.writer_events.push_back((at, head, WriterEvent::Close { session }));
        }
    }

    /// A request of a session comes to its volume.
    pub(crate) fn enter(
        &mut self,
        now: Instant,
        (at, target): (Token, Target),
        session: SessionId,
        (mut origin, op): (Origin, BlockOp),
        out: Out,
    ) {
        let Some(volume) = self.volumes.table.get_mut(at) else { return };
        let Target::Head(head) = target else {
            return self.ask_volume(now, (at, target), session, (origin, op), out);
        };
        if !op.changes() {
            return self.ask_volume(now, (at, target), session, (origin, op), out);
        }
        if volume.held.is_full() {
            return self.answer(now, at, origin, Err(BlockError::Unavailable), out);
        }
        origin.changes = Some(head);
        let request = volume.held.insert(HeldChange { session, target, origin, op });
        self.writer_events.push_back((at, head, WriterEvent::Write { session, request }));
    }

    fn ask_volume(
        &mut self,
        now: Instant,
        (at, target): (Token, Target),
        session: SessionId,
        (origin, op): (Origin, BlockOp),
        out: Out,
    ) {
        let has_room = self.turns.has_room();
        let Some(volume) = self.volumes.table.get_mut(at) else { return };
        match if has_room { volume.admit(origin) } else { Err(origin) } {
            Ok(token) => {
                let request = BlockRequest { token, op };
                self.take_turn(now, Waiting { at, target, session, request }, out);
            }
            Err(origin) => {
                if let Some(head) = origin.changes {
                    self.writer_events.push_back((at, head, WriterEvent::Done));
                }
                self.answer(now, at, origin, Err(BlockError::Unavailable), out);
            }
        }
    }

    /// A change that was passed is answered.
    pub(crate) fn on_change_answered(
        &mut self,
        now: Instant,
        (at, head): (Token, HeadId),
        origin: &Origin,
        is_done: bool,
    ) {
        #[cfg(feature = "simulated")]
        self.observed.note(Observation::Answered { requester: origin.requester, token: origin.token, is_done });
        if let Requester::Session(session) = origin.requester
            && is_done
        {
            self.note_written(session, now);
            self.forward.note_written(session, now);
        }
        self.writer_events.push_back((at, head, WriterEvent::Done));
    }

    pub(crate) fn drive_writers(&mut self, now: Instant, at: Token, head: HeadId, event: WriterEvent, out: Out) {
        let mutations = self.mutations;
        let Some(volume) = self.volumes.table.get_mut(at) else { return };
        // What a session that has gone had waiting may be asked again elsewhere.
        let left = match &event {
            WriterEvent::Close { session } => volume.take_held(|held| held.session == *session),
            _ => Vec::new(),
        };
        let mut effects = Effects::new();
        volume.writers_of(head, mutations).handle(now, event, &mut effects);
        self.touch(at);
        for held in left {
            self.answer(now, at, held.origin, Err(BlockError::Deposed), out);
        }
        for effect in effects.take() {
            self.on_writer_effect(now, (at, head), effect, out);
        }
    }

    fn on_writer_effect(&mut self, now: Instant, (at, head): (Token, HeadId), effect: WriterEffect, out: Out) {
        let Some(volume) = self.volumes.table.get_mut(at) else { return };
        match effect {
            WriterEffect::Pass { request } => {
                let Some(HeldChange { target, origin, op, session }) = volume.held.remove(request) else {
                    return;
                };
                #[cfg(feature = "simulated")]
                self.observed.note(Observation::Given { session, requester: origin.requester, token: origin.token });
                self.ask_volume(now, (at, target), session, (origin, op), out);
            }
            WriterEffect::Refuse { request } => {
                if let Some(held) = volume.held.remove(request) {
                    self.answer(now, at, held.origin, Err(BlockError::NotWriter), out);
                }
            }
            WriterEffect::Fenced { session: SessionId::Own(session) } => {
                self.forward.note_fenced(session);
                if let Some(to) = self.sessions.get(session).map(crate::sessions::Session::to) {
                    out.push(crate::Effect::News { to, news: News::Fenced });
                }
            }
            WriterEffect::Fenced { session: SessionId::Remote(remote) } => {
                self.forward.owner_events.push_back(OwnerEvent::Fenced { remote });
            }
            WriterEffect::Passed { from, to } => {
                #[cfg(feature = "simulated")]
                self.observed.note(Observation::PassedOn);
                let name = volume.name_of(head);
                info(
                    out,
                    format!(
                        "volume {name}: {to} writes from here on; {from}, which did, has ended or is quiet, and can write \
                         again when it connects anew"
                    ),
                );
            }
            WriterEffect::Refused { client, holder } => {
                let name = volume.name_of(head);
                warn(
                    out,
                    format!(
                        "volume {name}: {client} may not write, since {holder} does, and a volume has one writer at a time. \
                         End the one that should not; where both are meant to write, as in a cluster's file system, `holdfast \
                         volume export {} --shared` lets them",
                        volume.name
                    ),
                );
            }
        }
    }

    pub(crate) fn tick_writers(&mut self, now: Instant, at: Token, out: Out) {
        let Some(volume) = self.volumes.table.get(at) else { return };
        let is_due = |writers: &Writers| writers.next_deadline().is_some_and(|deadline| deadline <= now);
        let due: Vec<HeadId> = volume.writers.iter().filter(|(_, of)| is_due(of)).map(|(head, _)| *head).collect();
        for head in due {
            self.drive_writers(now, at, head, WriterEvent::Tick, out);
        }
    }

    /// The controller is gone: what waited may be asked of the next.
    pub(crate) fn give_up_held(&mut self, now: Instant, at: Token, out: Out) {
        let Some(volume) = self.volumes.table.get_mut(at) else { return };
        volume.writers.clear();
        for held in volume.take_held(|_| true) {
            self.answer(now, at, held.origin, Err(BlockError::Deposed), out);
        }
        self.writer_events.retain(|(of, ..)| *of != at);
    }

    /// Everybody may write to these.
    pub(crate) fn set_shared(&mut self, shared: BTreeSet<VolumeId>) {
        self.volumes.shared = shared;
        for at in self.volumes.tokens() {
            let volume = self.volumes.table.get_mut(at).expect("listed");
            let is_shared = self.volumes.shared.contains(&volume.id);
            if std::mem::replace(&mut volume.shared, is_shared) != is_shared {
                let heads = volume.writers.keys().map(|head| (at, *head, WriterEvent::Share(is_shared)));
                self.writer_events.extend(heads);
            }
        }
    }
}
