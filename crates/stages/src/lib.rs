//! Where the time of requests goes.
//!
//! Role: a request has a [`Trail`], which each part that it passes marks; what lies between two marks is a *stage*. The
//! [`Recorder`] of a volume keeps how long stages took in the last minute or two, for reads and writes, and what of it the
//! slowest requests spent where. No clock, no I/O.
//!
//! Figures: a histogram has eight counters to each doubling, from a microsecond to 134 s, so that what it tells is at most
//! an eighth too large. A minute's requests are counted in one window while the one before it is kept: figures are of
//! between one and two minutes.
//!
//! **The slow ones** are the slowest in a hundred, by what was counted so far, and all that took about as long. Of these the
//! sums of each stage are kept. What a stage has of the slow is what they spent there beyond the median of all: a stage in
//! which all requests are for long makes none of them slow.
//!
//! **The node** that a request waited for longest is kept with it, whether it answered in the end or another one did for it.
//!
//! [`Totals`] are the same of all volumes together since the host was started, with fewer bounds.
//!
//! Invariant: stages of a request add up to what it took, [`Stage::Rest`] has what nobody marked.

mod histogram;
mod recorder;
mod totals;
mod trail;

pub use histogram::Histogram;
pub use recorder::{Kind, NodeReport, Recorder, Report, SLOWEST_MAX, Slow, StageReport};
pub use totals::{BOUNDS_US, Tally, Totals};
pub use trail::{Spans, Stage, Trail};
