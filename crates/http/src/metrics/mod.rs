//! The page of metrics: `GET /metrics`, for Prometheus and what reads the same.
//!
//! Role: makes a text of what a host says of itself, at each scrape anew. Nothing is counted here but sums over volumes
//! that come and go ([`Sums`]), which are to go up only.
//!
//! Invariants
//! 1. Each part of the page is told within [`PART_WITHIN`], or left out: `holdfast_scrape_part_up` says which. The page
//!    itself never fails.
//! 2. A part that hangs has one thread, however often the page is asked for.
//! 3. However many volumes a host has, [`VOLUMES_MAX`] have series of their own, and [`DETAILED_MAX`] those of stages.

mod choice;
mod families;
mod grid;
mod host;
mod page;
mod sheet;
mod sums;
mod survey;
mod volumes;

#[cfg(test)]
mod examples;
#[cfg(test)]
mod tests;

pub use families::reference;
pub use survey::{Certificate, Survey, Times};

use crate::door::Caller;
use crate::problem::Problem;
use crate::serve::Ask;
use axum::extract::RawQuery;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse, Response as HttpResponse};
use axum::routing::get;
use axum::{Extension, Router};
use choice::{choose, detailed};
use holdfast_api::{Code, Error, HostStatus, Request, Response, Role};
use page::{Facts, Format, Part};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use sums::Sums;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio::time::error::Elapsed;

/// A part that takes longer is left out of the page. Some wait for the first one: twice that is below the time that
/// Prometheus gives a page unless it is told otherwise, 10 s.
const PART_WITHIN: Duration = Duration::from_secs(3);

/// Volumes with series of their own: those that are asked for, or else those that are not well and the busiest.
pub(crate) const VOLUMES_MAX: usize = 200;

/// Volumes among these with series by stage.
const DETAILED_MAX: usize = 20;

/// Pages that are written at a time: it is work for a processor that guests' requests need more.
const WRITTEN_MAX: usize = 2;

/// Makes pages.
struct Pages {
    ask: Arc<dyn Ask>,
    /// One for each part, by its number.
    turns: Vec<Arc<Semaphore>>,
    /// Of pages that are written.
    written: Arc<Semaphore>,
    sums: Mutex<Sums>,
}

/// The route, for a router of any state.
pub(crate) fn routes<S: Clone + Send + Sync + 'static>(ask: Arc<dyn Ask>) -> Router<S> {
    let turns = Part::ALL.iter().map(|_| Arc::new(Semaphore::new(1))).collect();
    let pages = Arc::new(Pages { ask, turns, written: Arc::new(Semaphore::new(WRITTEN_MAX)), sums: Mutex::default() });
    let answer = move |Extension(caller): Extension<Caller>, RawQuery(query): RawQuery, headers: HeaderMap| {
        let pages = Arc::clone(&pages);
        async move {
            match volumes_asked(&query.unwrap_or_default()) {
                Ok(asked) => pages.answer(caller.role, asked, format_of(&headers)).await,
                Err(error) => Problem::from(error).into_response(),
            }
        }
    };
    Router::new().route("/metrics", get(answer))
}

/// `volume=NAME`, as often as one likes.
fn volumes_asked(query: &str) -> Result<Vec<String>, Error> {
    let wrong = |why: String| Error::new(Code::Invalid, format!("{why}; ask for /metrics?volume=NAME&volume=NAME"));
    let fields: Vec<(String, String)> =
        serde_urlencoded::from_str(query).map_err(|why| wrong(format!("the query can't be read: {why}")))?;
    let name = |(key, name): (String, String)| match key.as_str() {
        "volume" => Ok(name),
        _ => Err(wrong(format!("nobody asks for `{key}` here"))),
    };
    fields.into_iter().map(name).collect()
}

/// OpenMetrics for who asks for it, as Prometheus does; else the older text, which more programs read.
fn format_of(headers: &HeaderMap) -> Format {
    let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let is_open = accepted.flat_map(|value| value.split(',')).any(|media| {
        media.split(';').next().is_some_and(|name| name.trim().eq_ignore_ascii_case("application/openmetrics-text"))
    });
    if is_open { Format::OpenMetrics } else { Format::Plain }
}

impl Pages {
    async fn answer(&self, role: Role, asked: Vec<String>, format: Format) -> HttpResponse {
        let facts = self.facts(role, asked).await;
        let turn = Arc::clone(&self.written).acquire_owned().await;
        let write = move || (page::text(facts, format), drop(turn)).0;
        let text = tokio::task::spawn_blocking(write).await.unwrap_or_default();
        let mut response = text.into_response();
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(format.content_type()));
        response
    }

    async fn facts(&self, role: Role, asked: Vec<String>) -> Facts {
        let loads = self.begin(Part::Loads, |ask| surveyed(ask)?.loads());
        let times = self.begin(Part::Times, |ask| surveyed(ask)?.times());
        let certificates = self.begin(Part::Certificates, |ask| surveyed(ask)?.certificates());
        let members = self.begin(Part::Metadata, |ask| surveyed(ask)?.members());
        let status = self.begin(Part::Status, move |ask| status_of(ask, role)).told().await.map(Arc::new);
        let of = status.clone();
        let findings = self.begin(Part::Findings, move |ask| surveyed(ask)?.findings(of.as_deref()));
        let of = status.clone();
        let tasks = self.begin(Part::Tasks, move |ask| match &of {
            Some(status) => surveyed(ask)?.tasks(status),
            None => Err(Error::new(Code::Unavailable, "the host does not say how it is")),
        });
        let loads = loads.told().await;
        let (chosen, left_out) = match &status {
            Some(status) => choose(&status.volumes, loads.as_deref().unwrap_or_default(), &asked),
            None => Default::default(),
        };
        let names = detailed(&chosen, loads.as_deref().unwrap_or_default(), !asked.is_empty());
        let slow = self.begin(Part::Stages, move |ask| surveyed(ask)?.slow(&names)).told().await;
        let sums = status.as_ref().map(|status| {
            let mut sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
            sums.add(&status.volumes);
            sums.all()
        });
        Facts {
            status,
            loads,
            slow,
            times: times.told().await,
            tasks: tasks.told().await,
            findings: findings.told().await,
            certificates: certificates.told().await,
            members: members.told().await,
            sums,
            chosen,
            left_out,
        }
    }

    /// Has a part told from now on; nothing comes where it can't be, or not in time.
    fn begin<T: Send + 'static>(
        &self,
        part: Part,
        tell: impl FnOnce(&dyn Ask) -> Result<T, Error> + Send + 'static,
    ) -> Coming<T> {
        let (ask, turn) = (Arc::clone(&self.ask), Arc::clone(&self.turns[part as usize]));
        let told = async move {
            let turn = turn.acquire_owned().await.ok()?;
            let telling = move || {
                let told = tell(&*ask);
                drop(turn);
                told
            };
            tokio::task::spawn_blocking(telling).await.ok()?.ok()
        };
        Coming(tokio::spawn(tokio::time::timeout(PART_WITHIN, told)))
    }
}

/// A part that is being told.
struct Coming<T>(JoinHandle<Result<Option<T>, Elapsed>>);

impl<T> Coming<T> {
    async fn told(self) -> Option<T> {
        self.0.await.ok()?.ok()?
    }
}

fn surveyed(ask: &dyn Ask) -> Result<&dyn Survey, Error> {
    ask.survey().ok_or_else(|| Error::new(Code::Unsupported, "this host tells nothing of its machine"))
}

fn status_of(ask: &dyn Ask, role: Role) -> Result<HostStatus, Error> {
    match ask.ask(role, Request::Status) {
        Response::Status(status) => Ok(*status),
        Response::Error { message, code } => Err(Error::new(code, message)),
        _ => Err(Error::new(Code::Failed, "the host's answer does not fit the request")),
    }
}
