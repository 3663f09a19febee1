//! Holds requests back for a while before they go down: a slow volume, for testing guests.
//!
//! Role: a filter. What is delayed is passed on when its time has come, in the order of these times; so requests overtake
//! each other, as they may, but for changes of the same blocks: one waits for those that came before it (law 9).
//!
//! Limits: it holds no more than what is under way above it.

use crate::choice::{Choice, PerKind, choice_takes, collide};
use crate::filter::{Effect, Event, Filter, Nature};
use crate::spec::{Fields, Kind, SpecError};
use holdfast_base::time::span_of;
use holdfast_base::{BlockOp, BlockRequest, Effects, Instant};
use std::collections::BTreeMap;
use std::time::Duration;

pub(crate) const KIND: Kind = Kind {
    name: "delay",
    about: "passes requests on after a time, or one drawn from a span",
    takes: choice_takes!("10ms, or 1ms..20ms"),
    example: "delay:read=10ms,write=1ms..20ms,share=0.1",
    build,
};

/// From the shortest to the longest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Span {
    least: Duration,
    most: Duration,
}

#[derive(Debug)]
pub struct Delay {
    spec: String,
    spans: PerKind<Span>,
    choice: Choice,
    /// By the time at which they go on, and the order of their coming.
    held: BTreeMap<(Instant, u64), BlockRequest>,
    came: u64,
    delayed: u64,
}

fn build(fields: &mut Fields<'_>) -> Result<Box<dyn Filter>, SpecError> {
    let spec = fields.text();
    let spans =
        fields.per_kind("a time up to a day, 10ms say, or from the shortest to the longest, 1ms..20ms", span)?;
    Ok(Box::new(Delay { spec, spans, choice: Choice::of(fields)?, held: BTreeMap::new(), came: 0, delayed: 0 }))
}

fn span(text: &str) -> Option<Span> {
    let (least, most) = text.split_once("..").unwrap_or((text, text));
    let (least, most) = (span_of(least)?, span_of(most)?);
    (least <= most).then_some(Span { least, most })
}

impl Delay {
    fn on_request(&mut self, now: Instant, request: BlockRequest, out: &mut Effects<Effect>) {
        let wait = self.wait_of(&request.op);
        self.delayed += u64::from(wait.is_some());
        let before = self.held.iter().filter(|(_, held)| collide(&held.op, &request.op)).map(|((at, _), _)| *at).max();
        let Some(at) = wait.map(|wait| now + wait).max(before) else { return out.push(Effect::Down(request)) };
        self.came += 1;
        self.held.insert((at, self.came), request);
    }

    /// How long it is to wait, if at all.
    fn wait_of(&mut self, op: &BlockOp) -> Option<Duration> {
        let span = self.spans.get(op)?;
        if !self.choice.takes(op) {
            return None;
        }
        let micros = self.choice.prng.between(span.least.as_micros() as u64, span.most.as_micros() as u64);
        Some(Duration::from_micros(micros)).filter(|wait| !wait.is_zero())
    }

    fn pass_on_until(&mut self, now: Instant, out: &mut Effects<Effect>) {
        while let Some(first) = self.held.first_entry().filter(|first| first.key().0 <= now) {
            out.push(Effect::Down(first.remove()));
        }
    }
}

impl Filter for Delay {
    fn handle(&mut self, now: Instant, event: Event, out: &mut Effects<Effect>) {
        match event {
            Event::Request(request) => self.on_request(now, request, out),
            Event::Reply(reply) => out.push(Effect::Up(reply)),
            Event::Tick => self.pass_on_until(now, out),
            Event::Drain => self.pass_on_until(Instant(u64::MAX), out),
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.held.first_key_value().map(|((at, _), _)| *at)
    }

    fn spec(&self) -> &str {
        &self.spec
    }

    fn nature(&self) -> Nature {
        Nature { is_tool: true, ..Nature::default() }
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![("delayed", self.delayed), ("held now", self.held.len() as u64)]
    }
}

#[cfg(test)]
mod tests {
    use crate::kit;
    use crate::spec::build;

    #[test]
    fn the_laws_hold() {
        kit::check(|seed| vec![build(&format!("delay:read=1ms..9ms,write=5ms,share=0.5,seed={seed}")).unwrap()]);
        kit::check(|_| vec![build("delay:all=0ms..3ms").unwrap(), build("delay:flush=20ms,every=2").unwrap()]);
    }
}
