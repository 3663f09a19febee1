//! What is slow: where the time of requests goes, for each volume and each clone in it.
//!
//! A request's time begins as it comes to its host. It waits behind what was asked before its client connected anew, for the
//! right to write, for its turn, and for filters; what the controller does with it the controller tells. What is left is the
//! rest. Reads of snapshots count for nobody, nor do requests that end in an error, nor those that move no data.
//!
//! Through filters a request has another name below. What was answered below in a moment is told of what passes up in it, in
//! the same order: of a filter that holds answers back nothing is known but that it did.

use crate::host::Host;
use crate::requests::{Origin, Requester, Way};
use crate::turns::Waiting;
use crate::volumes::Volume;
use holdfast_base::{BlockOp, HeadId, Instant, Token};
use holdfast_stages::{Kind, Recorder, Report, Stage, Totals};
use std::time::Duration;

const KINDS: [Kind; 2] = [Kind::Read, Kind::Write];

/// Counts of waits are looked at again after this.
const WAITS_PACE: Duration = Duration::from_secs(60);

/// How many requests waited for their turn, and how many of these their own limit held.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Waits {
    pub waited: u64,
    pub held_by_limit: u64,
}

/// A head that was asked for something.
pub(crate) struct Recorded {
    pub head: HeadId,
    recorder: Box<Recorder>,
    /// Since it is in service: at `looked_at`, and one look before.
    waits: [Waits; 2],
    looked_at: Instant,
}

impl Volume {
    fn recorder(&self, head: HeadId) -> Option<&Recorder> {
        self.recorded.iter().find(|of| of.head == head).map(|of| &*of.recorder)
    }

    /// Of reads, and of writes: what half of them took in the last minute or two at most, and 99 of 100. Of a volume those of
    /// its clones are among them.
    pub fn times(&self, now: Instant, head: HeadId) -> [Option<(Duration, Duration)>; 2] {
        let is_of = |of: &&Recorded| head == HeadId::VOLUME || of.head == head;
        KINDS.map(|kind| Recorder::times(self.recorded.iter().filter(is_of).map(|of| &*of.recorder), now, kind))
    }

    /// Requests a second, and how many are under way at a time, in the mean.
    fn load(&self, now: Instant, head: HeadId) -> (f64, f64) {
        let Some(recorder) = self.recorder(head) else { return (0.0, 0.0) };
        let times = KINDS.map(|kind| Recorder::times(std::iter::once(recorder), now, kind));
        let rates = KINDS.map(|kind| recorder.per_second(now, kind));
        let busy = rates.iter().zip(times).map(|(rate, times)| rate * times.map_or(0.0, |(p50, _)| p50.as_secs_f64()));
        (rates.iter().sum(), busy.sum())
    }
}

impl Host {
    /// A guest's request comes to wait for its turn.
    pub(crate) fn note_asked(&mut self, now: Instant, waiting: &Waiting, head: Option<HeadId>) {
        let kind = match &waiting.request.op {
            BlockOp::Read(_) => Kind::Read,
            BlockOp::Write { .. } | BlockOp::Discard(_) | BlockOp::WriteZeroes(_) => Kind::Write,
            BlockOp::Flush | BlockOp::Prefetch(_) | BlockOp::Status(_) | BlockOp::Changes { .. } => return,
        };
        let Some(head) = head else { return };
        if let Some(volume) = self.volumes.table.get_mut(waiting.at) {
            volume.requests.asked(now, waiting.request.token, head, kind);
        }
    }

    /// A request is answered well.
    pub(crate) fn note_took(&mut self, now: Instant, at: Token, origin: &Origin, way: &Way) {
        let Some(volume) = self.volumes.table.get_mut(at) else { return };
        if let Requester::Filters(head) = origin.requester {
            volume.below_filters.retain(|(_, at, _)| *at == now);
            volume.below_filters.extend(way.spans.map(|spans| (head, now, spans)));
            return;
        }
        let Some((asked_at, head, kind)) = way.asked else { return };
        let mut below = || {
            let place = volume.below_filters.iter().position(|(of, at, _)| (*of, *at) == (head, now))?;
            volume.below_filters.remove(place).map(|(.., spans)| spans)
        };
        let known = if way.by_filters { below() } else { way.spans };
        let mut spans = known.unwrap_or_default();
        spans.add(Stage::Order, asked_at.since(origin.came_at));
        spans.add(Stage::Qos, way.went_at.unwrap_or(asked_at).since(asked_at));
        let took = now.since(origin.came_at);
        #[cfg(feature = "simulated")]
        assert!(
            way.by_filters || u128::from(spans.total_us()) <= took.as_micros(),
            "stages add up to more than {took:?}: {spans:?}"
        );
        spans.fill_up(took, if way.by_filters { Stage::Filters } else { Stage::Rest });
        self.totals.count(kind, &spans);
        self.record(now, at, head, |recorder| recorder.record(now, kind, &spans));
    }

    fn record(&mut self, now: Instant, at: Token, head: HeadId, add: impl FnOnce(&mut Recorder)) {
        let Some(volume) = self.volumes.table.get_mut(at) else { return };
        let found = volume.recorded.iter().position(|of| of.head == head);
        let place = found.unwrap_or_else(|| {
            let (recorder, waits) = (Box::default(), [Waits::default(); 2]);
            volume.recorded.push(Recorded { head, recorder, waits, looked_at: now });
            volume.recorded.len() - 1
        });
        add(&mut volume.recorded[place].recorder);
        if now.since(volume.recorded[place].looked_at) < WAITS_PACE {
            return;
        }
        let waits = self.waits_of(at, head);
        if let Some(of) = self.volumes.table.get_mut(at).map(|volume| &mut volume.recorded[place]) {
            (of.waits, of.looked_at) = ([waits, of.waits[0]], now);
        }
    }

    /// Since the head is in service.
    fn waits_of(&self, at: Token, head: HeadId) -> Waits {
        let tenant = self.volumes.table.get(at).and_then(|volume| volume.tenant(Some(head)));
        let figures = tenant.map_or_else(Default::default, |tenant| self.turns.figures(tenant.id));
        Waits { waited: figures.waited, held_by_limit: figures.held_by_limit }
    }

    /// Reads, and writes, of a volume or clone in the last minute or two; `None` where it is not in service here.
    pub fn took(&self, now: Instant, name: &str) -> Option<[Option<Report>; 2]> {
        let (volume, head) = self.find(name)?;
        Some(KINDS.map(|kind| volume.recorder(head)?.report(now, kind)))
    }

    /// Reads, and writes, of a volume or clone that have had their turn and are not answered: how many, and for how long the
    /// first of them is under way. Requests that hang count nowhere else.
    pub fn under_way(&self, now: Instant, name: &str) -> [(u64, Duration); 2] {
        let Some((volume, head)) = self.find(name) else { return Default::default() };
        KINDS.map(|kind| {
            let (count, since) = volume.requests.on_their_way(head, kind);
            (count, since.map_or(Duration::ZERO, |since| now.since(since)))
        })
    }

    /// How many waited for their turn in the last minute or two.
    pub fn waits(&self, name: &str) -> Waits {
        let Some((at, head)) = self.volumes.find_open(name) else { return Waits::default() };
        let now = self.waits_of(at, head);
        let recorded = self.volumes.table.get(at).and_then(|volume| volume.recorded.iter().find(|of| of.head == head));
        let before = recorded.map_or_else(Waits::default, |of| of.waits[1]);
        // A tenant that was made anew counts from zero.
        Waits {
            waited: now.waited.saturating_sub(before.waited),
            held_by_limit: now.held_by_limit.saturating_sub(before.held_by_limit),
        }
    }

    /// Volumes and clones that were asked for something of late: requests a second, and how many are under way at a time.
    pub fn loads(&self, now: Instant) -> Vec<(String, f64, f64)> {
        let load = |(name, volume, head): (&str, &Volume, HeadId)| {
            let (rate, depth) = volume.load(now, head);
            (rate > 0.0).then(|| (name.to_string(), rate, depth))
        };
        self.heads().filter_map(load).collect()
    }

    /// All requests of guests since this was made, those of volumes that are gone among them.
    pub fn totals(&self) -> &Totals {
        &self.totals
    }

    /// Whether volumes wait for each other here, and not for their own limits alone.
    pub fn has_window(&self) -> bool {
        self.turns.has_window()
    }
}
