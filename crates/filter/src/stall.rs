//! Hangs: from the first request that is chosen on, those of its kind are held, for a time or until the filter is removed.
//!
//! Role: a filter. When the time is over all are let go, in the order of their coming, and the filter only passes on. A change of
//! blocks that one which is held changes, too, is held with it, whatever its kind (law 9).

use crate::choice::{Choice, OpKind, PerKind, choice_takes, collide};
use crate::filter::{Effect, Event, Filter, Nature};
use crate::spec::{Fields, Kind, SpecError};
use holdfast_base::time::earliest;
use holdfast_base::time::span_of;
use holdfast_base::{BlockRequest, Effects, Instant};
use std::collections::VecDeque;
use std::time::Duration;

pub(crate) const KIND: Kind = Kind {
    name: "stall",
    about: "holds requests from the first one that is chosen on, and lets all go when the time is over",
    takes: choice_takes!("5s, or forever: until the filter is removed"),
    example: "stall:write=5s,flush=forever",
    build,
};

/// How long a kind of request hangs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Hang {
    For(Duration),
    Forever,
}

#[derive(Debug)]
pub struct Stall {
    spec: String,
    hangs: PerKind<Hang>,
    choice: Choice,
    /// For kinds of which one was chosen: until when they are held.
    until: PerKind<Instant>,
    held: VecDeque<BlockRequest>,
    stalled: u64,
}

fn build(fields: &mut Fields<'_>) -> Result<Box<dyn Filter>, SpecError> {
    let spec = fields.text();
    let hang = |text: &str| match text {
        "forever" => Some(Hang::Forever),
        text => span_of(text).filter(|span| !span.is_zero()).map(Hang::For),
    };
    let hangs = fields.per_kind("a time up to a day, 5s say, or forever", hang)?;
    let (until, held) = (PerKind::default(), VecDeque::new());
    Ok(Box::new(Stall { spec, hangs, choice: Choice::of(fields)?, until, held, stalled: 0 }))
}

/// No filter stands for so long.
const NEVER: Instant = Instant(u64::MAX);

impl Stall {
    fn on_request(&mut self, now: Instant, request: BlockRequest, out: &mut Effects<Effect>) {
        if let Some(hang) = self.hangs.get(&request.op).filter(|_| self.until.get(&request.op).is_none())
            && self.choice.takes(&request.op)
        {
            let until = match hang {
                Hang::For(span) => now + span,
                Hang::Forever => NEVER,
            };
            self.until.set(OpKind::of(&request.op), Some(until));
        }
        let is_stalled = self.until.get(&request.op).is_some_and(|until| until > now);
        self.stalled += u64::from(is_stalled);
        if is_stalled || self.held.iter().any(|held| collide(&held.op, &request.op)) {
            return self.held.push_back(request);
        }
        out.push(Effect::Down(request));
    }

    fn let_go(&mut self, is_due: impl Fn(Instant) -> bool, out: &mut Effects<Effect>) {
        for request in std::mem::take(&mut self.held) {
            let is_behind = self.held.iter().any(|held| collide(&held.op, &request.op));
            if !is_behind && self.until.get(&request.op).is_none_or(&is_due) {
                out.push(Effect::Down(request));
            } else {
                self.held.push_back(request);
            }
        }
    }
}

impl Filter for Stall {
    fn handle(&mut self, now: Instant, event: Event, out: &mut Effects<Effect>) {
        match event {
            Event::Request(request) => self.on_request(now, request, out),
            Event::Reply(reply) => out.push(Effect::Up(reply)),
            Event::Tick => self.let_go(|until| until <= now, out),
            Event::Drain => self.let_go(|_| true, out),
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        let ends = self.held.iter().map(|request| self.until.get(&request.op));
        ends.fold(None, earliest).filter(|until| *until < NEVER)
    }

    fn spec(&self) -> &str {
        &self.spec
    }

    fn nature(&self) -> Nature {
        Nature { is_tool: true, hangs: true, ..Nature::default() }
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![("stalled", self.stalled), ("held now", self.held.len() as u64)]
    }
}

#[cfg(test)]
mod tests {
    use crate::kit;
    use crate::spec::build;

    #[test]
    fn the_laws_hold() {
        kit::check(|_| vec![build("stall:write=50ms,read=20ms,every=5").unwrap()]);
        kit::check(|seed| vec![build(&format!("stall:flush=forever,share=0.1,seed={seed}")).unwrap()]);
    }
}
