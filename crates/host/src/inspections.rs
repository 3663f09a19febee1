//! Inspections: what volumes in service would lack without some nodes, as the control plane asks before it takes nodes
//! away, and what a volume lacks that is read for a hand-over. They go slice by slice, between which guests have their
//! turn, one inspection after the other.
//!
//! States of one: volumes are looked at, each to its end -> all that are there were -> answered.
//!
//! Invariants: (1) each is answered once. (2) A volume that is there when it is answered was looked at since it came, or
//! is called unknown.

use crate::event::{Effect, Outcome};
use crate::host::{Host, Out};
use crate::views::{Weakness, is_unknown};
use crate::volumes::{Volume, Volumes};
use holdfast_base::{Instant, Token, VolumeId};
use holdfast_volume::{Inspection, PreloadState, Question};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// A slice: so many segments, of which a volume counts as a few, and a pause behind it.
const SLICE: usize = 2048;
const SEGMENTS_A_VOLUME: usize = 16;
const PAUSE: Duration = Duration::from_micros(500);

/// What an order waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Purpose {
    /// What all volumes here lack.
    Volumes,
    /// Whether one that is read for a hand-over could be read to its end.
    Preload(VolumeId),
}

impl Purpose {
    /// What is known of it so far would not be all that there is.
    fn is_of(self, volume: &Volume) -> bool {
        match self {
            Purpose::Volumes => !is_unknown(volume),
            Purpose::Preload(id) => volume.id() == id,
        }
    }
}

#[derive(Debug)]
struct Running {
    ticket: u64,
    question: Question,
    purpose: Purpose,
    /// Volumes that are to be looked at, the last one first.
    todo: Vec<Token>,
    /// How far that one is.
    at: Inspection,
    /// Segments found, by volume that was looked at to its end.
    found: BTreeMap<Token, u64>,
}

/// Those that are under way, the first of which goes on.
#[derive(Debug, Default)]
pub(crate) struct Inspections {
    running: VecDeque<Running>,
    slice_at: Option<Instant>,
}

impl Inspections {
    pub fn next_deadline(&self) -> Option<Instant> {
        self.slice_at
    }
}

impl Running {
    /// Takes up to so many segments from what is left of a slice; true when all was looked at.
    fn look(&mut self, volumes: &Volumes, left: &mut usize) -> bool {
        while *left > 0 {
            let Some(token) = self.todo.last().copied() else {
                let is_todo =
                    |(token, of): &(Token, &Volume)| self.purpose.is_of(of) && !self.found.contains_key(token);
                self.todo = volumes.table.iter().filter(is_todo).map(|(token, _)| token).collect();
                if self.todo.is_empty() {
                    return true;
                }
                continue;
            };
            let volume = volumes.table.get(token).filter(|volume| self.purpose.is_of(volume));
            let before = self.at.looked_at();
            let is_over = volume.is_none_or(|volume| volume.controller.inspect(&self.question, &mut self.at, *left));
            *left = left.saturating_sub((self.at.looked_at() - before).max(SEGMENTS_A_VOLUME));
            if is_over {
                self.todo.pop();
                let found = std::mem::take(&mut self.at).found();
                if volume.is_some() {
                    self.found.insert(token, found);
                }
            }
        }
        false
    }

    fn outcome(&self, volumes: &Volumes) -> Outcome {
        let found = |token: &Token| self.found.get(token).copied().unwrap_or(0);
        if let Purpose::Preload(id) = self.purpose {
            let of = |token: Token| match volumes.table.get(token)?.controller.preload_state() {
                Some(PreloadState::Done) if found(&token) > 0 => Some(PreloadState::Unreadable),
                state => state,
            };
            return Outcome::Preload(volumes.find_id(id).map(of));
        }
        let weakness = |(token, volume): (Token, &Volume)| {
            let entries = match self.question {
                Question::WeakApartFrom(node) => volume.controller.at_risk_apart_from(Some(node)),
                Question::Lost(_) => 0,
            };
            let (volume, unknown) = (volume.name().to_string(), is_unknown(volume));
            Weakness { volume, unknown, segments: found(&token), entries }
        };
        let weak = volumes.table.iter().map(weakness).filter(|w| w.unknown || w.segments + w.entries > 0);
        Outcome::Inspected(weak.collect())
    }
}

impl Host {
    /// Begins with it at once: most are over within one slice.
    pub(crate) fn inspect(&mut self, now: Instant, ticket: u64, purpose: Purpose, question: Question, out: Out) {
        let (todo, at, found) = (Vec::new(), Inspection::default(), BTreeMap::new());
        self.inspections.running.push_back(Running { ticket, question, purpose, todo, at, found });
        if self.inspections.slice_at.is_none() {
            self.go_on_inspecting(now, out);
        }
    }

    pub(crate) fn tick_inspections(&mut self, now: Instant, out: Out) {
        if self.inspections.slice_at.is_some_and(|at| at <= now) {
            self.go_on_inspecting(now, out);
        }
    }

    fn go_on_inspecting(&mut self, now: Instant, out: Out) {
        let Inspections { running, slice_at } = &mut self.inspections;
        let mut left = SLICE;
        while let Some(first) = running.front_mut() {
            if !first.look(&self.volumes, &mut left) {
                *slice_at = Some(now + PAUSE);
                return;
            }
            out.push(Effect::Done { ticket: first.ticket, outcome: first.outcome(&self.volumes) });
            running.pop_front();
        }
        *slice_at = None;
    }
}
