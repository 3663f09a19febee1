//! Keeps a volume below so many requests and bytes a second: what one guest may take from others.
//!
//! Role: a filter. Each request costs time: a thousandth of a second at 1000 a second, and the same for bytes. A request goes
//! down when what went before is paid for; what was not used for a while may be used at once, up to the burst. All wait in
//! one queue, in their order.
//!
//! Limits: it holds no more than what is under way above it.

use crate::choice::range_of;
use crate::filter::{Effect, Event, Filter};
use crate::spec::{self, Fields, Kind, SpecError};
use holdfast_base::time::span_of;
use holdfast_base::{BlockOp, BlockRequest, Effects, Instant};
use std::collections::VecDeque;
use std::time::Duration;

pub(crate) const KIND: Kind = Kind {
    name: "limit",
    about: "lets so many requests and bytes a second pass, the rest waits",
    takes: "iops, bytes (of reads and writes, a second), burst (the time whose unused share may follow at once; 1s)",
    example: "limit:iops=1000,bytes=50MiB,burst=2s",
    build,
};

/// What is spent of one good, as the moment at which all of it is paid for.
#[derive(Clone, Copy, Debug)]
struct Account {
    /// In a second.
    rate: u64,
    paid_at: Instant,
}

impl Account {
    fn pay(&mut self, now: Instant, burst: Duration, amount: u64) {
        let cost = u128::from(amount) * 1_000_000_000 / u128::from(self.rate);
        let cost = Duration::from_nanos(u64::try_from(cost).unwrap_or(u64::MAX));
        self.paid_at = self.paid_at.max(now - burst) + cost;
    }
}

#[derive(Debug)]
pub struct Limit {
    spec: String,
    requests: Option<Account>,
    bytes: Option<Account>,
    burst: Duration,
    queue: VecDeque<BlockRequest>,
    waited: u64,
}

fn build(fields: &mut Fields<'_>) -> Result<Box<dyn Filter>, SpecError> {
    let spec = fields.text();
    let rate = |rate: u64| (rate > 0).then_some(Account { rate, paid_at: Instant::ZERO });
    let count = |text: &str| text.parse().ok().and_then(rate);
    let requests = fields.parse("iops", "a number of requests a second, from 1 on", count)?;
    let bytes = fields.parse("bytes", spec::WANTS_BYTES, |text| spec::bytes(text).and_then(rate))?;
    if requests.is_none() && bytes.is_none() {
        return Err(fields.missing("iops or bytes, or both"));
    }
    let burst = fields.parse("burst", spec::WANTS_DURATION, span_of)?.unwrap_or(Duration::from_secs(1));
    Ok(Box::new(Limit { spec, requests, bytes, burst, queue: VecDeque::new(), waited: 0 }))
}

impl Limit {
    fn on_request(&mut self, now: Instant, request: BlockRequest, out: &mut Effects<Effect>) {
        self.queue.push_back(request);
        self.pass_on(now, out);
        // It is behind all others: if any wait, it does.
        self.waited += u64::from(!self.queue.is_empty());
    }

    /// When the next one may go.
    fn free_at(&self) -> Instant {
        let paid = |account: &Option<Account>| account.map_or(Instant::ZERO, |account| account.paid_at);
        paid(&self.requests).max(paid(&self.bytes))
    }

    fn pass_on(&mut self, now: Instant, out: &mut Effects<Effect>) {
        while self.free_at() <= now
            && let Some(request) = self.queue.pop_front()
        {
            let moved = match &request.op {
                op @ (BlockOp::Read(_) | BlockOp::Write { .. }) => range_of(op).map_or(0, |range| range.len),
                _ => 0,
            };
            if let Some(account) = &mut self.requests {
                account.pay(now, self.burst, 1);
            }
            if let Some(account) = &mut self.bytes {
                account.pay(now, self.burst, moved);
            }
            out.push(Effect::Down(request));
        }
    }
}

impl Filter for Limit {
    fn handle(&mut self, now: Instant, event: Event, out: &mut Effects<Effect>) {
        match event {
            Event::Request(request) => self.on_request(now, request, out),
            Event::Reply(reply) => out.push(Effect::Up(reply)),
            Event::Tick => self.pass_on(now, out),
            Event::Drain => self.queue.drain(..).for_each(|request| out.push(Effect::Down(request))),
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        (!self.queue.is_empty()).then(|| self.free_at())
    }

    fn spec(&self) -> &str {
        &self.spec
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![("waited", self.waited), ("waiting now", self.queue.len() as u64)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kit;
    use crate::spec::build;
    use holdfast_base::{ByteRange, RequestToken};

    #[test]
    fn the_laws_hold() {
        kit::check(|_| vec![build("limit:iops=2000,burst=1ms").unwrap()]);
        kit::check(|_| vec![build("limit:iops=900,bytes=1MiB,burst=5ms").unwrap(), build("delay:all=1ms").unwrap()]);
    }

    /// How many requests of so many bytes, all there from the start, have passed at each of the seconds.
    fn passed(spec: &str, len: u64, seconds: u64) -> Vec<usize> {
        let (mut limit, mut out) = (build(spec).unwrap(), Effects::new());
        let start = Instant::ZERO + Duration::from_secs(1000);
        for n in 0..10_000 {
            let op = BlockOp::Read(ByteRange::new(0, len));
            limit.handle(start, Event::Request(BlockRequest { token: RequestToken(n), op }), &mut out);
        }
        let mut passed = Vec::new();
        let mut sum = 0;
        for second in 0..seconds {
            let end = start + Duration::from_secs(second);
            while let Some(due) = limit.next_deadline().filter(|due| *due <= end) {
                limit.handle(due, Event::Tick, &mut out);
            }
            sum += out.take().len();
            passed.push(sum);
        }
        passed
    }

    #[test]
    fn what_passes_is_the_burst_and_then_the_rate() {
        assert_eq!(passed("limit:iops=100", 4096, 4), [101, 201, 301, 401]);
        assert_eq!(passed("limit:iops=100,burst=100ms", 4096, 3), [11, 111, 211]);
        assert_eq!(passed("limit:bytes=40KiB,burst=1s", 4096, 3), [11, 21, 31]);
        assert_eq!(passed("limit:iops=1000,bytes=40KiB", 4096, 3), [11, 21, 31], "the scarcer good counts");
    }
}
