//! Answers requests with errors: a volume with bad spots, for testing guests.
//!
//! Role: a filter. What it fails it does not pass on: a write that is told to have failed has changed nothing.

use crate::choice::{Choice, PerKind, choice_takes};
use crate::filter::{Effect, Event, Filter, Nature};
use crate::spec::{Fields, Kind, SpecError};
use holdfast_base::{BlockError, BlockReply, BlockRequest, Effects, Instant};

pub(crate) const KIND: Kind = Kind {
    name: "fail",
    about: "answers requests with an error, and does not pass them on",
    takes: choice_takes!("eio or enospc"),
    example: "fail:read=eio,write=enospc,every=100,range=0..1GiB",
    build,
};

#[derive(Debug)]
pub struct Fail {
    spec: String,
    errors: PerKind<BlockError>,
    choice: Choice,
    failed: u64,
}

fn build(fields: &mut Fields<'_>) -> Result<Box<dyn Filter>, SpecError> {
    let spec = fields.text();
    let error = |text: &str| match text {
        "eio" => Some(BlockError::Injected),
        "enospc" => Some(BlockError::NoSpace),
        _ => None,
    };
    let errors = fields.per_kind("eio or enospc", error)?;
    Ok(Box::new(Fail { spec, errors, choice: Choice::of(fields)?, failed: 0 }))
}

impl Fail {
    fn on_request(&mut self, request: BlockRequest, out: &mut Effects<Effect>) {
        match self.errors.get(&request.op).filter(|_| self.choice.takes(&request.op)) {
            None => out.push(Effect::Down(request)),
            Some(error) => {
                self.failed += 1;
                out.push(Effect::Up(BlockReply { token: request.token, result: Err(error) }));
            }
        }
    }
}

impl Filter for Fail {
    fn handle(&mut self, _: Instant, event: Event, out: &mut Effects<Effect>) {
        match event {
            Event::Request(request) => self.on_request(request, out),
            Event::Reply(reply) => out.push(Effect::Up(reply)),
            Event::Tick | Event::Drain => {}
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        None
    }

    fn spec(&self) -> &str {
        &self.spec
    }

    fn nature(&self) -> Nature {
        Nature { is_tool: true, fails: true, ..Nature::default() }
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![("failed", self.failed)]
    }
}

#[cfg(test)]
mod tests {
    use crate::kit;
    use crate::spec::build;

    #[test]
    fn the_laws_hold() {
        kit::check(|seed| vec![build(&format!("fail:all=eio,share=0.2,seed={seed}")).unwrap()]);
        kit::check(|_| vec![build("fail:write=enospc,read=eio,every=3").unwrap(), build("delay:all=1ms").unwrap()]);
    }
}
