//! Routes, and what is the same for all of them: who asks, bodies, keys, deadlines.

use crate::describe::{ACCESS, CAPACITY, EVENTS, HEALTH, described};
use crate::door::{Caller, Peer};
use crate::endpoint::Endpoint;
use crate::events::{self, Watch};
use crate::given::Path;
use crate::intake::{Intake, ROOM_BYTES, Whole};
use crate::metrics;
use crate::problem::{Problem, ask_again, passes, status_of};
use crate::retries::{Coming, Found, KEY_BYTES_MAX, Kept, Retries};
use crate::table;
use crate::web;
use axum::body::{Body, Bytes};
use axum::extract::rejection::RawPathParamsRejection;
use axum::extract::{ConnectInfo, RawPathParams, RawQuery, Request as HttpRequest, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn, from_fn_with_state, map_response};
use axum::response::sse::{KeepAlive, Sse};
use axum::response::{IntoResponse, Response as HttpResponse};
use axum::routing::{MethodFilter, MethodRouter, get};
use axum::{Extension, Json, Router};
use holdfast_api::{Capacity, Code, Error, Health, Kind, Request, Response, Role};
use serde::Serialize;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use utoipa::ToSchema;

/// By which a change is known again.
pub const KEY: &str = "Idempotency-Key";

/// How long a request's body may take to come, beside what it takes to answer.
const BODY_WITHIN: Duration = Duration::from_secs(30);

/// How often a listener hears that the host is there, where nothing else is to be told.
const ALIVE_EVERY: Duration = Duration::from_secs(15);

/// By what a caller from the network is known.
#[derive(Clone, Copy, Debug)]
pub enum Shown<'a> {
    /// In DER; whom the grid's authority did not sign has shown none.
    Certificate(&'a [u8]),
    Token(&'a str),
}

/// Carries requests out.
pub trait Ask: Send + Sync + 'static {
    /// Blocks until it is done. Refuses what is not for who asks.
    fn ask(&self, role: Role, request: Request) -> Response;

    /// The grid as this host has it, and what is not well. Blocks for as long as a look at memory takes.
    ///
    /// # Errors
    /// The host can't tell.
    fn health(&self) -> Result<Health, Error>;

    /// Where each byte is. Blocks for as long as it takes to ask all hosts.
    ///
    /// # Errors
    /// The host can't tell.
    fn capacity(&self) -> Result<Capacity, Error>;

    /// What the page of metrics has beside what can be asked for.
    fn survey(&self) -> Option<&dyn metrics::Survey> {
        None
    }

    /// Who a caller from the network is, and what they may do, going by what is good now.
    ///
    /// # Errors
    /// Who is shown is nobody of this grid's, or counts for nothing any more.
    fn caller_of(&self, shown: Shown<'_>) -> Result<Caller, Error>;
}

/// How long answers may take, and how many are worked at.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    pub look_within: Duration,
    pub change_within: Duration,
    pub at_a_time: usize,
}

impl Default for Config {
    fn default() -> Config {
        Config { look_within: Duration::from_secs(15), change_within: Duration::from_secs(150), at_a_time: 64 }
    }
}

struct Shared {
    ask: Arc<dyn Ask>,
    config: Config,
    retries: Retries,
    room: Arc<Semaphore>,
    intake: Intake,
    watch: Watch,
}

/// All routes.
pub fn router(ask: Arc<dyn Ask>, config: Config) -> Router {
    let room = Arc::new(Semaphore::new(config.at_a_time));
    let page = metrics::routes(Arc::clone(&ask));
    let (retries, intake, watch) = Default::default();
    let shared = Arc::new(Shared { ask, config, retries, room, intake, watch });
    let description = Bytes::from(described());
    let describes = move || {
        let text = description.clone();
        async move { ([(header::CONTENT_TYPE, "application/json")], text) }
    };
    let mut router = Router::new()
        .route(HEALTH, get(health))
        .route(EVENTS, get(events))
        .route(CAPACITY, get(capacity))
        .route(ACCESS, get(access))
        .merge(page);
    let mut endpoints = table::all();
    while !endpoints.is_empty() {
        let path = endpoints[0].path;
        let (here, others): (Vec<Endpoint>, Vec<Endpoint>) = endpoints.into_iter().partition(|of| of.path == path);
        router = router.route(path, here.into_iter().fold(MethodRouter::new(), with));
        endpoints = others;
    }
    router
        .route_layer(from_fn_with_state(Arc::clone(&shared), let_in))
        .route("/v1/openapi.json", get(describes))
        .merge(web::routes())
        .fallback(|| async {
            refused(
                StatusCode::NOT_FOUND,
                Code::NotFound,
                "there is nothing here; /v1/openapi.json lists what there is",
            )
        })
        .method_not_allowed_fallback(|| async {
            refused(
                StatusCode::METHOD_NOT_ALLOWED,
                Code::Invalid,
                "this is not done here; /v1/openapi.json lists what is",
            )
        })
        .layer(from_fn(move |request, next| within(config.change_within + BODY_WITHIN, request, next)))
        .layer(map_response(plainly))
        .with_state(shared)
}

/// Whoever sends a body drop by drop has no connection for ever.
async fn within(time: Duration, request: HttpRequest, next: Next) -> HttpResponse {
    match tokio::time::timeout(time, next.run(request)).await {
        Ok(response) => response,
        Err(_) => {
            let why = "the request did not come within its time; send it anew";
            refused(StatusCode::REQUEST_TIMEOUT, Code::Invalid, why).into_response()
        }
    }
}

/// Passes on what comes from somebody known, with who that is: before the body is read.
async fn let_in(State(shared): State<Arc<Shared>>, mut request: HttpRequest, next: Next) -> HttpResponse {
    let Some(ConnectInfo(peer)) = request.extensions().get::<ConnectInfo<Peer>>() else {
        let why = "the host does not know who asks";
        return refused(StatusCode::UNAUTHORIZED, Code::NotPermitted, why).into_response();
    };
    match peer.caller(&*shared.ask, request.headers()) {
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(refusal) => refusal.into_response(),
    }
}

/// Browsers neither keep an answer, unless it says that they may, nor take it for something else.
async fn plainly(mut response: HttpResponse) -> HttpResponse {
    let headers = response.headers_mut();
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    response
}

async fn health(
    State(shared): State<Arc<Shared>>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Extension(caller): Extension<Caller>,
) -> HttpResponse {
    whole(&shared, &peer, caller.role, |ask| ask.health()).await
}

async fn capacity(
    State(shared): State<Arc<Shared>>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Extension(caller): Extension<Caller>,
) -> HttpResponse {
    whole(&shared, &peer, caller.role, |ask| ask.capacity()).await
}

/// Of the grid as a whole, for whoever may look.
async fn whole<T: Serialize + Send + 'static>(
    shared: &Arc<Shared>,
    peer: &Peer,
    role: Role,
    look: impl FnOnce(&dyn Ask) -> Result<T, Error> + Send + 'static,
) -> HttpResponse {
    let looked = async {
        let place = place(shared, peer, role)?;
        let ask = Arc::clone(&shared.ask);
        // Such an answer is long: it is written where it was made, and what it was made of does not wait for anybody.
        let text = |found: T| Bytes::from(serde_json::to_vec(&found).expect("our answers always encode"));
        let looked = tokio::task::spawn_blocking(move || (look(&*ask).map(text), drop(place)).0);
        match tokio::time::timeout(shared.config.look_within, looked).await {
            Ok(Ok(found)) => found,
            Ok(Err(_)) => Err(Error::new(Code::Failed, "the host failed at this; its log has more")),
            Err(_) => Err(Error::new(Code::Unavailable, "the host takes too long to look; ask again")),
        }
    };
    let is_json = [(header::CONTENT_TYPE, "application/json")];
    looked.await.map_or_else(|error| Problem::from(error).into_response(), |text| (is_json, text).into_response())
}

/// What who asks may do.
#[derive(Serialize, ToSchema)]
pub struct Access {
    pub role: Role,
}

async fn access(Extension(caller): Extension<Caller>) -> HttpResponse {
    Json(Access { role: caller.role }).into_response()
}

async fn events(
    State(shared): State<Arc<Shared>>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    headers: HeaderMap,
) -> HttpResponse {
    let judge = Arc::clone(&shared);
    let is_let_in = Box::new(move || peer.caller(&*judge.ask, &headers).is_ok());
    let stream = events::stream(&shared.watch, &shared.ask, is_let_in);
    Sse::new(stream).keep_alive(KeepAlive::new().interval(ALIVE_EVERY)).into_response()
}

/// Share of all that is for others. Readers have a quarter, the network half: whoever runs the host gets in.
fn kept_of(all: usize, peer: &Peer, role: Role) -> usize {
    match role {
        Role::Reader => all * 3 / 4,
        Role::Admin if peer.is_local() => 0,
        Role::Admin => all / 2,
    }
}

/// A place to work at a request.
fn place(shared: &Arc<Shared>, peer: &Peer, role: Role) -> Result<OwnedSemaphorePermit, Error> {
    let full = || Error::new(Code::Unavailable, "the host answers as many as it can; ask again");
    let kept = kept_of(shared.config.at_a_time, peer, role);
    let is_full = shared.room.available_permits() <= kept;
    if is_full { Err(full()) } else { Arc::clone(&shared.room).try_acquire_owned().map_err(|_| full()) }
}

fn with(router: MethodRouter<Arc<Shared>>, endpoint: Endpoint) -> MethodRouter<Arc<Shared>> {
    let filter = MethodFilter::try_from(endpoint.method.clone()).expect("a method that routes have");
    let endpoint = Arc::new(endpoint);
    let handler = move |State(shared): State<Arc<Shared>>,
                        ConnectInfo(peer): ConnectInfo<Peer>,
                        Extension(caller): Extension<Caller>,
                        path: Result<RawPathParams, RawPathParamsRejection>,
                        RawQuery(query): RawQuery,
                        headers: HeaderMap,
                        body: Body| {
        let of = |path: RawPathParams| path.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
        let path = path.map(|path| Path::new(of(path)));
        let given = Given { peer, caller, path, query: query.unwrap_or_default(), headers, body };
        handle(shared, Arc::clone(&endpoint), given)
    };
    router.on(filter, handler)
}

struct Given {
    peer: Peer,
    caller: Caller,
    path: Result<Path, RawPathParamsRejection>,
    query: String,
    headers: HeaderMap,
    body: Body,
}

/// What is answered in place of a resource.
pub(crate) struct Refusal {
    pub status: StatusCode,
    pub error: Error,
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Refusal {
        Refusal { status: status_of(error.code), error }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> HttpResponse {
        let mut response = Problem::from(self.error).into_response();
        *response.status_mut() = self.status;
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// Of a request that makes no sense in a way that HTTP has a status of its own for.
pub(crate) fn refused(status: StatusCode, code: Code, message: impl Into<String>) -> Refusal {
    Refusal { status, error: Error::new(code, message) }
}

async fn handle(shared: Arc<Shared>, endpoint: Arc<Endpoint>, given: Given) -> HttpResponse {
    match carry_out(&shared, &endpoint, given).await {
        Ok(Kept { status, body, passes }) => {
            let is_json = [(header::CONTENT_TYPE, "application/json")];
            let response = body.map_or_else(|| status.into_response(), |body| (status, is_json, body).into_response());
            if passes { ask_again(response) } else { response }
        }
        Err(refusal) => refusal.into_response(),
    }
}

async fn carry_out(shared: &Arc<Shared>, endpoint: &Arc<Endpoint>, mut given: Given) -> Result<Kept, Refusal> {
    let Caller { role, who } = given.caller.clone();
    let body = body_of(shared, endpoint, &mut given).await?;
    let path = match &given.path {
        Ok(path) => path,
        Err(why) => return Err(Error::new(Code::Invalid, format!("the path can't be read: {why}")).into()),
    };
    let request = endpoint.request(path, &given.query, body.bytes())?;
    drop(body);
    role.check(&request)?;
    let is_look = request.kind() == Kind::Look;
    let key = key_of(&given.headers)?.filter(|_| !is_look);
    let (sender, coming) = match &key {
        None => {
            let (sender, coming) = watch::channel(None);
            (Some(sender), coming)
        }
        Some(key) => match shared.retries.begin(&who, key, fingerprint(&request), Instant::now()) {
            Found::New(sender, coming) => (Some(sender), coming),
            Found::Known(coming) => (None, coming),
            Found::Differs => {
                let why = format!("{KEY} `{key}` was that of another request; take another key for this one");
                return Err(refused(StatusCode::UNPROCESSABLE_ENTITY, Code::Invalid, why));
            }
            Found::Full => {
                let why = "too many changes are under way; ask again later";
                return Err(Error::new(Code::Unavailable, why).into());
            }
        },
    };
    if let Some(sender) = sender {
        begin(shared, endpoint, place(shared, &given.peer, role)?, (role, request), sender);
    }
    let patience = if is_look { shared.config.look_within } else { shared.config.change_within };
    Ok(await_answer(coming, patience).await?)
}

async fn body_of(shared: &Shared, endpoint: &Endpoint, given: &mut Given) -> Result<Whole, Refusal> {
    let media = given.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let is_json = media.split(';').next().is_some_and(|media| media.trim().eq_ignore_ascii_case("application/json"));
    let kept = kept_of(ROOM_BYTES, &given.peer, given.caller.role);
    let body = shared.intake.read(std::mem::take(&mut given.body), endpoint.takes_json && is_json, kept).await?;
    if endpoint.takes_json && !is_json {
        let why = "the body has to be JSON: send `Content-Type: application/json`";
        return Err(refused(StatusCode::UNSUPPORTED_MEDIA_TYPE, Code::Invalid, why));
    }
    Ok(body)
}

fn key_of(headers: &HeaderMap) -> Result<Option<String>, Error> {
    let mut values = headers.get_all(KEY).iter();
    let Some(value) = values.next() else { return Ok(None) };
    let is_right = |key: &&str| (1..=KEY_BYTES_MAX).contains(&key.len()) && key.bytes().all(|b| b.is_ascii_graphic());
    match value.to_str().ok().filter(is_right).filter(|_| values.next().is_none()) {
        Some(key) => Ok(Some(key.to_string())),
        None => {
            let why = format!("there is one {KEY}, of 1 to {KEY_BYTES_MAX} letters, digits and signs; a UUID will do");
            Err(Error::new(Code::Invalid, why))
        }
    }
}

fn fingerprint(request: &Request) -> u64 {
    let mut hasher = DefaultHasher::new();
    serde_json::to_string(request).expect("our requests always encode").hash(&mut hasher);
    hasher.finish()
}

/// It goes on to its end, whoever waits for it.
fn begin(
    shared: &Arc<Shared>,
    endpoint: &Arc<Endpoint>,
    place: OwnedSemaphorePermit,
    (role, request): (Role, Request),
    sender: watch::Sender<Option<Kept>>,
) {
    let (ask, endpoint) = (Arc::clone(&shared.ask), Arc::clone(endpoint));
    tokio::task::spawn_blocking(move || {
        let text = |body: serde_json::Value| Bytes::from(body.to_string());
        let kept = match endpoint.show(ask.ask(role, request)) {
            Ok(body) => Kept { status: endpoint.status, body: body.map(text), passes: false },
            Err(error) => {
                let (status, passes) = (status_of(error.code), passes(error.code));
                let body = serde_json::to_value(Problem::from(error)).expect("our answers always encode");
                Kept { status, body: Some(text(body)), passes }
            }
        };
        drop(place);
        sender.send_replace(Some(kept));
    });
}

async fn await_answer(mut coming: Coming, patience: Duration) -> Result<Kept, Error> {
    let waited = tokio::time::timeout(patience, coming.wait_for(Option::is_some)).await;
    match waited {
        Ok(Ok(kept)) => Ok(kept.clone().expect("it was waited for")),
        Ok(Err(_)) => Err(Error::new(Code::Failed, "the host failed at this; its log has more")),
        Err(_) => {
            let why = format!(
                "this takes longer than {} s, and goes on; ask again with the same {KEY}, or look at what became of it",
                patience.as_secs()
            );
            Err(Error::new(Code::Unavailable, why))
        }
    }
}
