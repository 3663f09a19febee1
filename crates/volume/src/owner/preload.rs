//! Before a hand-over: the new owner reads the map while the old one still serves.
//!
//! States of an opening that begins so: loading the root -> preloading (the checkpoint that the root names is read) ->
//! applying (it goes into the map) -> preloaded, or unreadable ([`Notice::Preloaded`]) -> as ever
//! ([`crate::owner::opening`]), from [`Event::Open`] on, which may come at any time.
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

use crate::api::{Effect, Notice, PreloadState, State};
use crate::controller::{Controller, Out};
use crate::map::{RunLeft, RunLoad, RunLoads, Unreadable};
use crate::owner::opening::Step;
use holdfast_format::record::{MetaPointer, SegmentNo};
use std::collections::VecDeque;

/// So many leaves, segments and pieces of the map are taken in at a time.
const APPLY_AT_ONCE: usize = 1024;

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
    pub fn is_preloading(&self) -> bool {
        self.opening.as_ref().is_some_and(|opening| opening.is_preload)
    }

    /// How far that is; `None` where nothing is read so.
    pub fn preload_state(&self) -> Option<PreloadState> {
        let opening = self.opening.as_ref().filter(|opening| opening.is_preload)?;
        Some(match opening.step {
            Step::Applying => PreloadState::Applying,
            Step::Preloaded if self.preloaded.is_some() => PreloadState::Done,
            Step::Preloaded => PreloadState::Unreadable,
            _ => PreloadState::Reading,
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

    pub(crate) fn fetch_preload(&mut self, out: Out) {
        self.step(Step::Preloading);
        let runs = self.root().checkpoint.runs.clone();
        self.fetch_runs(runs, 0, out);
    }

    /// All runs are there: some of what they say goes into the map, since other volumes' guests wait meanwhile.
    pub(crate) fn apply_preload(&mut self, out: Out) {
        self.step(Step::Applying);
        let mut preload = match self.preload.take() {
            Some(preload) => preload,
            None => {
                let runs = self.opening.as_mut().expect("opening").runs.take();
                Preload { left: runs.into(), ..Preload::default() }
            }
        };
        if preload.run.is_none() {
            let Some(next) = preload.left.pop_front() else { return self.on_preloaded(Some(preload.done), out) };
            let Ok(run) = next.read() else { return self.on_preloaded(None, out) };
            preload.run = Some(run);
            preload.done.push(next.pointer);
        }
        if let Some(run) = &mut preload.run {
            match self.map.load_some(run, APPLY_AT_ONCE, &mut self.segments, &self.log) {
                Ok(true) => preload.run = None,
                Ok(false) => {}
                Err(Unreadable) => return self.on_preloaded(None, out),
            }
        }
        self.preload = Some(preload);
    }

    /// These runs are in the map, which are all; or something can't be read.
    pub(crate) fn on_preloaded(&mut self, runs: Option<Vec<MetaPointer>>, out: Out) {
        self.step(Step::Preloaded);
        self.opening.as_mut().expect("opening").runs = RunLoads::default();
        match runs {
            Some(runs) => self.preloaded = Some(Preloaded { runs, first_own: self.root().first_own() }),
            None => self.forget_map(),
        }
        out.push(Effect::Notice(Notice::Preloaded));
    }

    /// How many of these runs, from the first on, the map is made of. Others that it was made of are taken out.
    pub(crate) fn use_preloaded(&mut self, runs: &[MetaPointer]) -> usize {
        let first_own = self.root().first_own();
        let Some(preloaded) = self.preloaded.take() else { return 0 };
        let goes_on = runs.starts_with(&preloaded.runs) || self.basis.config.mutations.preload_fits_anything();
        if goes_on && preloaded.first_own == first_own {
            return preloaded.runs.len().min(runs.len());
        }
        self.forget_map();
        0
    }
}
