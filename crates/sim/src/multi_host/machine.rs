//! A [`Host`] as the world drives it: calls of its controllers by one number, and what it wants besides for the run to see to.

use crate::world::Machine;
use holdfast_base::{Effects, Instant, NodeId, Slab, Token};
use holdfast_host::{Call, Effect, Event, Host};
use holdfast_volume::{Effect as VolumeEffect, Event as VolumeEvent, Worked};
use std::collections::VecDeque;
use std::time::Duration;

/// Calls under way, of all volumes of a host.
const CALLS_MAX: usize = 1 << 20;

pub struct HostMachine {
    pub host: Host,
    /// To nodes, or to the metadata store.
    calls: Slab<(Option<NodeId>, Call)>,
    effects: Effects<Effect>,
    /// All but calls.
    pub wishes: VecDeque<Effect>,
    /// CPU time of its worker.
    pub worked: Duration,
}

impl HostMachine {
    pub fn new(host: Host) -> HostMachine {
        HostMachine {
            host,
            calls: Slab::new(CALLS_MAX),
            effects: Effects::new(),
            wishes: VecDeque::new(),
            worked: Duration::ZERO,
        }
    }

    /// Has the host do something that is no event.
    pub fn act<T>(
        &mut self,
        act: impl FnOnce(&mut Host, &mut Effects<Effect>) -> T,
        out: &mut Effects<VolumeEffect>,
    ) -> T {
        let mut effects = std::mem::take(&mut self.effects);
        let done = act(&mut self.host, &mut effects);
        for effect in effects.drain() {
            match effect {
                Effect::Send { node, lane, call, request, urgency, payload } => {
                    let token = self.calls.insert((Some(node), call)).0;
                    out.push(VolumeEffect::Send { node, lane, token, request, urgency, payload });
                }
                Effect::Meta { call, request } => {
                    let token = self.calls.insert((None, call)).0;
                    out.push(VolumeEffect::Meta { token, request });
                }
                Effect::Work { call, task, blocks } => {
                    let job = self.calls.insert((None, call)).0;
                    // The host has seen to when; the world tells of it at some time.
                    out.push(VolumeEffect::Work { job, task, blocks, until: Instant(u64::MAX) });
                }
                Effect::Reconnect { node } => out.push(VolumeEffect::Reconnect { node }),
                wish => self.wishes.push_back(wish),
            }
        }
        self.effects = effects;
        done
    }

    fn event_of(&mut self, event: VolumeEvent) -> Option<Event> {
        let calls = &mut self.calls;
        let mut call = |token| calls.remove(Token(token)).map(|(_, call)| call);
        Some(match event {
            // The process begins; nothing is open in it.
            VolumeEvent::Open => return None,
            VolumeEvent::NodeUp { node, boot, version, devices } => Event::NodeUp { node, boot, version, devices },
            VolumeEvent::NodeDown { node } => {
                // Nobody answers these any more.
                for token in calls.tokens() {
                    if calls.get(token).is_some_and(|(of, _)| *of == Some(node)) {
                        calls.remove(token);
                    }
                }
                Event::NodeDown { node }
            }
            VolumeEvent::Node { node, token, reply, times, payload } => {
                Event::Node { node, call: call(token)?, reply, times, payload }
            }
            VolumeEvent::Meta { token, reply } => Event::Meta { call: call(token)?, reply },
            VolumeEvent::Worked { job, outcome } => {
                let cpu = cpu_of(&outcome);
                self.worked += cpu;
                Event::Worked { call: call(job)?, cpu, outcome }
            }
            VolumeEvent::Tick => Event::Tick,
            other => unreachable!("the world tells a host no such thing: {other:?}"),
        })
    }
}

/// As much as a block takes, and now and then far more.
fn cpu_of(outcome: &Worked) -> Duration {
    let blocks = match outcome {
        Worked::Packed(packed) => packed.as_ref().map_or(100, |packed| packed.lengths.len()),
        Worked::Printed(prints) => prints.as_ref().map_or(0, |prints| prints.len() as u64),
    };
    Duration::from_micros(blocks * if blocks.is_multiple_of(7) { 100 } else { 8 })
}

impl Machine for HostMachine {
    fn handle(&mut self, now: Instant, event: VolumeEvent, out: &mut Effects<VolumeEffect>) {
        if let Some(event) = self.event_of(event) {
            self.act(|host, effects| host.handle(now, event, effects), out);
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.host.next_deadline()
    }

    fn verify(&self) {
        self.host.volumes().for_each(|volume| volume.controller().verify());
        self.host.verify();
    }
}
