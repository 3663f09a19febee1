//! Before a hand-over: the new owner reads the map while the old one still serves.
//!
//! States of an opening that begins so: loading the root -> warming (the checkpoint that the root names is read) ->
//! filling (and goes into the map) -> warm, or unreadable ([`Notice::Warmed`]) -> as ever ([`crate::owner::opening`]),
//! from [`Event::Open`] on, which may come at any time.
//!
//! Nothing is claimed, fenced or written here, and nothing is taken on trust later: the opening finds the checkpoint
//! that it has to begin with by itself. Where that goes on from the runs that were read, only the others are. Runs
//! never change, and each is known by its place and checksum; the data of what lay in the log are put in when the log
//! is there.
//!
//! Faults: the old owner may delete what is being read, and a node may be away: the checkpoint can't be read, or not
//! for long. An opening then may be able to, since it knows a newer one from the log. Who waits decides.
//!
//! [`Event::Open`]: crate::Event::Open

use crate::api::{Effect, Notice, State, Warming};
use crate::controller::{Controller, Out};
use crate::map::{RunLeft, RunLoad, RunLoads, Unreadable};
use crate::owner::opening::Step;
use holdfast_format::record::{MetaPointer, SegmentNo};
use std::collections::VecDeque;

/// So many leaves, segments and pieces of the map are taken in at a time.
const FILL_AT_ONCE: usize = 1024;

/// What is being taken in.
#[derive(Debug, Default)]
pub(crate) struct Preload {
    left: VecDeque<RunLoad>,
    run: Option<RunLeft>,
    done: Vec<MetaPointer>,
}

/// What was.
#[derive(Debug)]
pub(crate) struct Preloaded {
    runs: Vec<MetaPointer>,
    first_own: SegmentNo,
}

impl Controller {
    pub(crate) fn begin_preload(&mut self, out: Out) {
        if self.state == State::Opening && self.opening.is_none() {
            self.start_opening(true, out);
        }
    }

    /// Whether nothing is claimed yet, since another host serves.
    pub fn is_warming(&self) -> bool {
        self.opening.as_ref().is_some_and(|opening| opening.warms)
    }

    /// How far that is; `None` where nothing is read so.
    pub fn warming(&self) -> Option<Warming> {
        let opening = self.opening.as_ref().filter(|opening| opening.warms)?;
        Some(match opening.step {
            Step::Filling => Warming::Filling,
            Step::Warm if self.preloaded.is_some() => Warming::Warm,
            Step::Warm => Warming::Unreadable,
            _ => Warming::Reading,
        })
    }

    /// The opening proper begins: of what is still being read nothing counts.
    pub(crate) fn end_preload(&mut self) {
        (self.opening, self.preload) = (None, None);
        if self.preloaded.is_none() && self.basis.is_known() {
            self.forget_map();
        }
        self.fetcher.clear();
    }

    pub(crate) fn warm(&mut self, out: Out) {
        self.step(Step::Warming);
        let runs = self.root().checkpoint.runs.clone();
        self.fetch_runs(runs, 0, out);
    }

    /// All runs are there: some of what they say goes into the map, since other volumes' guests wait meanwhile.
    pub(crate) fn fill_map(&mut self, out: Out) {
        self.step(Step::Filling);
        let mut filling = match self.preload.take() {
            Some(filling) => filling,
            None => {
                let runs = self.opening.as_mut().expect("opening").runs.take();
                Preload { left: runs.into(), ..Preload::default() }
            }
        };
        if filling.run.is_none() {
            let Some(next) = filling.left.pop_front() else { return self.on_preloaded(Some(filling.done), out) };
            let Ok(run) = next.read() else { return self.on_preloaded(None, out) };
            filling.run = Some(run);
            filling.done.push(next.pointer);
        }
        if let Some(run) = &mut filling.run {
            match self.map.load_some(run, FILL_AT_ONCE, &mut self.segments, &self.log) {
                Ok(true) => filling.run = None,
                Ok(false) => {}
                Err(Unreadable) => return self.on_preloaded(None, out),
            }
        }
        self.preload = Some(filling);
    }

    /// These runs are in the map, which are all; or something can't be read.
    pub(crate) fn on_preloaded(&mut self, runs: Option<Vec<MetaPointer>>, out: Out) {
        self.step(Step::Warm);
        self.opening.as_mut().expect("opening").runs = RunLoads::default();
        match runs {
            Some(runs) => self.preloaded = Some(Preloaded { runs, first_own: self.root().first_own() }),
            None => self.forget_map(),
        }
        out.push(Effect::Notice(Notice::Warmed));
    }

    /// How many of these runs, from the first on, the map is made of. Others that it was made of are taken out.
    pub(crate) fn use_preloaded(&mut self, runs: &[MetaPointer]) -> usize {
        let first_own = self.root().first_own();
        let Some(warmth) = self.preloaded.take() else { return 0 };
        let goes_on = runs.starts_with(&warmth.runs) || self.basis.config.mutations.warmth_fits_anything();
        if goes_on && warmth.first_own == first_own {
            return warmth.runs.len().min(runs.len());
        }
        self.forget_map();
        0
    }
}
