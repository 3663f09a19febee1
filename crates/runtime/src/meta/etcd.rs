//! A metadata store in an etcd cluster (its third API; tried with etcd 3.4 to 3.7), shared by all hosts of a grid.
//!
//! Role: turns the trait's blocking calls into etcd's, on a small tokio runtime of its own. A record's version is the
//! revision of its last change (`mod_revision`), a swap is a transaction that compares it.
//!
//! Members are asked one at a time: the one that answered last, until it doesn't. Then all are probed at once, and the
//! first that can read through the cluster's leader is asked from there on. What only reads is asked again, there. A swap is
//! sent once: where its answer is missing, nobody knows its outcome (protocol rule 4), and a second copy would find the first one's work.
//! Whatever a member says that it has not begun, since users or roles were changed meanwhile, is asked again.
//!
//! Limits: [`CALL_MAX`] a call, [`AGAIN_MAX`] more where it only reads or was not begun, one page of [`LIST_PAGE`] records at a time.
//!
//! Faults: a watch whose member died can hang in silence, so one that has been silent for [`SILENCE_MAX`] asks for a
//! sign of life, and fails without it. Members without a leader are treated like absent ones.

mod admin;

pub use admin::{EtcdMember, Right};

use super::{
    Change, Commit, Compare, LeaseId, Listing, MetaError, MetaStore, Record, Revision, Swap, VALUE_BYTES_MAX, Watch,
    WatchEvent, Write, check_commit, check_size,
};
use etcd_client::{
    AlarmAction, AlarmType, Certificate, Client, Compare as EtcdCompare, CompareOp, ConnectOptions, Error, EventType,
    GetOptions, Identity, KeyValue, PutOptions, TlsOptions, Txn, TxnOp, TxnOpResponse, WatchOptions, WatchResponse,
    WatchStream,
};
use holdfast_base::MetaVersion;
use std::collections::VecDeque;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};
use thiserror::Error;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// How long a call may take: an election of etcd's default timing takes one to two seconds, and callers repeat.
const CALL_MAX: Duration = Duration::from_secs(2);

/// How long what only reads is asked again and again: a call that met an election, and one after it.
const AGAIN_MAX: Duration = Duration::from_secs(4);
const AGAIN_PACE: Duration = Duration::from_millis(100);

/// A member that is behind has taken in by then who may do what.
const NOT_BEGUN_PACE: Duration = Duration::from_millis(20);

/// How long a member may take to say that it can read through a leader.
const PROBE_MAX: Duration = Duration::from_secs(1);

/// After so long it is looked whether the member that was asked is out of reach, and another is not.
const SILENT_AFTER: Duration = Duration::from_millis(400);

/// How much longer than others a member may take to say so. One that does is slow, and waited for.
const BEHIND_MAX: Duration = Duration::from_millis(300);

const LOOK_PACE: Duration = Duration::from_millis(25);

/// How long a connection may take to come up.
const CONNECT_MAX: Duration = Duration::from_secs(1);

/// etcd closes connections that ping more often than each five seconds.
const PING_EVERY: Duration = Duration::from_secs(6);
const PING_MAX: Duration = Duration::from_secs(3);

/// A watch that hears nothing for so long asks whether it is still there, and waits for the answer as long again.
const SILENCE_MAX: Duration = Duration::from_secs(5);

/// Records of one answer: of the largest values, half of what a client takes in.
const LIST_PAGE: i64 = 64;
const ANSWER_BYTES_MAX: usize = 2 * LIST_PAGE as usize * VALUE_BYTES_MAX;

/// How to reach a cluster.
#[derive(Clone, Debug, Default)]
pub struct EtcdConfig {
    /// `http://` or `https://` with host and client port, one for each member.
    pub endpoints: Vec<String>,
    /// Put before every key: clusters may serve several grids, and others.
    pub prefix: String,
    pub tls: Option<EtcdTls>,
}

/// PEM texts.
#[derive(Clone)]
pub struct EtcdTls {
    /// Of the authority that signed the members' certificates.
    pub ca: Vec<u8>,
    /// Certificate and key that this client shows, if the cluster asks for them.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
}

impl std::fmt::Debug for EtcdTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "EtcdTls(identity: {})", self.identity.is_some())
    }
}

#[derive(Debug, Error)]
pub enum EtcdError {
    #[error("no endpoint of etcd is given; name at least one, for example http://10.0.0.1:2379")]
    NoEndpoint,
    #[error("{endpoint} can't be an endpoint of etcd: {why}; write it like https://10.0.0.1:2379")]
    BadEndpoint { endpoint: String, why: String },
    #[error("{endpoint} asks for TLS, and no certificate of its authority is given; name one as `ca`")]
    NoAuthority { endpoint: String },
    #[error("no member of etcd lets it in ({why}), and what was shown before they do let in")]
    NotLetIn { why: String },
    #[error("the runtime of the etcd client can't be started: {0}")]
    Runtime(#[from] std::io::Error),
}

/// A handle on one cluster; clones share it.
#[derive(Clone)]
pub struct EtcdStore(Arc<Shared>);

struct Shared {
    runtime: Runtime,
    endpoints: Vec<String>,
    /// One for each endpoint. They are replaced whole when something else is to be shown.
    members: RwLock<Arc<Vec<Client>>>,
    prefix: String,
    chosen: Mutex<Choice>,
}

/// Of a member that can read through a leader.
#[derive(Clone, Copy)]
enum Heard {
    Answer,
    /// Who asks may not.
    Refusal,
}

#[derive(Clone, Copy)]
struct Choice {
    member: usize,
    /// It answered when it was last asked.
    answers: bool,
}

impl EtcdStore {
    /// Prepares connections; a cluster that can't be reached shows at the first call.
    pub fn connect(config: &EtcdConfig) -> Result<EtcdStore, EtcdError> {
        if config.endpoints.is_empty() {
            return Err(EtcdError::NoEndpoint);
        }
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).thread_name("etcd").enable_all().build()?;
        let (endpoints, prefix) = (config.endpoints.clone(), config.prefix.clone());
        let members = RwLock::new(Arc::new(clients(&runtime, &endpoints, config.tls.as_ref())?));
        let chosen = Mutex::new(Choice { member: 0, answers: false });
        Ok(EtcdStore(Arc::new(Shared { runtime, endpoints, members, prefix, chosen })))
    }

    /// Shows this from the next call on, by connections of its own; calls and watches that are under way end on the old
    /// ones. Where no member lets it in, and one does by what was shown until now, all stays as it is.
    pub fn show(&self, tls: &EtcdTls) -> Result<(), EtcdError> {
        let Shared { runtime, endpoints, members, .. } = &*self.0;
        let next = clients(runtime, endpoints, Some(tls))?;
        let lets_in = |clients: &[Client]| runtime.block_on(self.0.lets_in(clients));
        if let Err(why) = lets_in(&next)
            && lets_in(&self.0.members()).is_ok()
        {
            return Err(EtcdError::NotLetIn { why });
        }
        *members.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(next);
        Ok(())
    }

    /// Which of the endpoints is asked at present, counted from zero.
    pub fn member(&self) -> usize {
        self.0.choice().member
    }
}

/// One for each endpoint.
fn clients(runtime: &Runtime, endpoints: &[String], tls: Option<&EtcdTls>) -> Result<Vec<Client>, EtcdError> {
    let client = |endpoint: &String| {
        let options = connect_options(endpoint, tls)?;
        let client = runtime.block_on(Client::connect([endpoint], Some(options)));
        client.map_err(|e| EtcdError::BadEndpoint { endpoint: endpoint.clone(), why: e.to_string() })
    };
    endpoints.iter().map(client).collect()
}

fn connect_options(endpoint: &str, tls: Option<&EtcdTls>) -> Result<ConnectOptions, EtcdError> {
    let bad = |why: &str| EtcdError::BadEndpoint { endpoint: endpoint.to_string(), why: why.to_string() };
    let options = ConnectOptions::new()
        .with_connect_timeout(CONNECT_MAX)
        .with_keep_alive(PING_EVERY, PING_MAX)
        .with_require_leader(true);
    if endpoint.starts_with("http://") {
        return Ok(options);
    }
    if !endpoint.starts_with("https://") {
        return Err(bad("it begins neither with http:// nor with https://"));
    }
    let Some(tls) = tls else { return Err(EtcdError::NoAuthority { endpoint: endpoint.to_string() }) };
    let mut with = TlsOptions::new().ca_certificate(Certificate::from_pem(&tls.ca));
    if let Some((certificate, key)) = &tls.identity {
        with = with.identity(Identity::from_pem(certificate, key));
    }
    Ok(options.with_tls(with))
}

impl Shared {
    fn members(&self) -> Arc<Vec<Client>> {
        Arc::clone(&self.members.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether a member lets in who asks by these clients; else why not.
    async fn lets_in(&self, clients: &[Client]) -> Result<(), String> {
        let mut probes = self.probe(clients);
        let mut why = String::new();
        while let Some(probe) = probes.join_next().await {
            match probe {
                Ok((_, Ok(Heard::Answer))) => return Ok(()),
                Ok((member, Ok(Heard::Refusal))) => why = format!("etcd's member {member} refuses it"),
                Ok((_, Err(told))) if why.is_empty() => why = told,
                Ok(_) | Err(_) => {}
            }
        }
        Err(why)
    }

    /// Runs one call at the member that answers. It is carried out once, however often it is not begun.
    fn call<T, F: Future<Output = Result<T, Error>>>(&self, call: impl Fn(Client) -> F) -> Result<T, MetaError> {
        let begun = Instant::now();
        self.runtime.block_on(async {
            loop {
                let member = self.choose().await?;
                match self.outwait(member, call(self.members()[member].clone())).await {
                    Ok(Ok(value)) => return Ok(value),
                    Ok(Err(error)) if is_not_begun(&error) && begun.elapsed() < AGAIN_MAX => {
                        sleep(NOT_BEGUN_PACE).await
                    }
                    Ok(Err(error)) => return Err(self.failed(member, &error)),
                    Err(silent) => {
                        let silent = silent.as_secs_f32();
                        return Err(unknown(&format!("etcd's member {member} was silent for {silent:.1} s")));
                    }
                }
            }
        })
    }

    /// As [`Shared::call`], for what may be asked twice: where the member that answered last does not, it goes to one that does, or
    /// will. While none has answered for longer, each call tries once: many may wait.
    fn read<T, F: Future<Output = Result<T, Error>>>(&self, call: impl Fn(Client) -> F) -> Result<T, MetaError> {
        let (begun, answered_last) = (Instant::now(), self.choice().answers);
        let is_worth_it = || answered_last && begun.elapsed() < AGAIN_MAX;
        loop {
            match self.call(&call) {
                Err(MetaError::Unknown { .. }) if is_worth_it() => std::thread::sleep(AGAIN_PACE),
                told => return told,
            }
        }
    }

    /// What a member answers; or for how long it was silent, when it is given up: at [`CALL_MAX`], or as soon as another member
    /// has answered and this one does not.
    async fn outwait<T>(&self, member: usize, asked: impl Future<Output = T>) -> Result<T, Duration> {
        let begun = Instant::now();
        let mut asked = std::pin::pin!(asked);
        if let Ok(done) = timeout(SILENT_AFTER, &mut asked).await {
            return Ok(done);
        }
        let (mut probes, mut answered_at) = (self.probe_all(), None);
        let mut is_slow = false;
        while begun.elapsed() < CALL_MAX {
            if let Ok(done) = timeout(LOOK_PACE, &mut asked).await {
                return Ok(done);
            }
            while let Some(probe) = probes.try_join_next() {
                match probe {
                    Ok((by, Ok(_))) if by == member => is_slow = true,
                    Ok((_, Ok(_))) => answered_at = answered_at.or(Some(Instant::now())),
                    Ok((_, Err(_))) | Err(_) => {}
                }
            }
            if !is_slow && answered_at.is_some_and(|at: Instant| at.elapsed() >= BEHIND_MAX) {
                break;
            }
        }
        self.set_answers(member, false);
        Err(begun.elapsed())
    }

    /// Asks all members to read through a leader.
    fn probe_all(&self) -> JoinSet<(usize, Result<Heard, String>)> {
        self.probe(&self.members())
    }

    fn probe(&self, clients: &[Client]) -> JoinSet<(usize, Result<Heard, String>)> {
        let mut probes = JoinSet::new();
        for (member, client) in clients.iter().enumerate() {
            let (mut client, key) = (client.clone(), format!("{}probe", self.prefix));
            probes.spawn(async move {
                let told = match timeout(PROBE_MAX, client.get(key, None)).await {
                    Ok(Ok(_)) => Ok(Heard::Answer),
                    // It has asked the leader by then.
                    Ok(Err(error)) if is_refused(&error) => Ok(Heard::Refusal),
                    Ok(Err(error)) => Err(format!("etcd's member {member}: {error}")),
                    Err(_) => Err(format!("etcd's member {member} is silent")),
                };
                (member, told)
            });
        }
        probes
    }

    /// What an error says of the member, and to the caller.
    fn failed(&self, member: usize, error: &Error) -> MetaError {
        if is_missing_lease(error) {
            return MetaError::LeaseGone;
        }
        if is_full(error) {
            return full();
        }
        if is_refused(error) {
            return MetaError::Refused;
        }
        self.set_answers(member, false);
        unknown(&error.to_string())
    }

    fn choice(&self) -> Choice {
        *self.chosen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_answers(&self, member: usize, answers: bool) {
        let mut choice = self.chosen.lock().unwrap_or_else(PoisonError::into_inner);
        if answers || choice.member == member {
            *choice = Choice { member, answers };
        }
    }

    /// The member that answered last, or the first to answer now.
    async fn choose(&self) -> Result<usize, MetaError> {
        let choice = self.choice();
        if choice.answers {
            return Ok(choice.member);
        }
        let mut probes = self.probe_all();
        let mut why = String::new();
        while let Some(probe) = probes.join_next().await {
            match probe {
                Ok((member, Ok(_))) => {
                    self.set_answers(member, true);
                    return Ok(member);
                }
                // Who says why tells more than who is silent.
                Ok((_, Err(told))) if why.is_empty() || !told.ends_with("silent") => why = told,
                Ok(_) | Err(_) => {}
            }
        }
        Err(unknown(&why))
    }

    fn full_key(&self, key: &str) -> Vec<u8> {
        [self.prefix.as_bytes(), key.as_bytes()].concat()
    }

    /// The key as the caller knows it; none of ours is anything but text.
    fn own_key(&self, full: &[u8]) -> Result<String, MetaError> {
        let key = full.strip_prefix(self.prefix.as_bytes()).and_then(|key| std::str::from_utf8(key).ok());
        key.map(str::to_string).ok_or_else(|| unknown("it holds keys under the grid's prefix that are not the grid's"))
    }

    fn record(&self, found: &KeyValue) -> Result<Record, MetaError> {
        Ok(Record {
            key: self.own_key(found.key())?,
            version: MetaVersion(found.mod_revision().cast_unsigned()),
            value: found.value().to_vec(),
            lease: (found.lease() != 0).then(|| LeaseId(found.lease().cast_unsigned())),
        })
    }
}

/// It refuses what writes then, until an operator has ended its alarm.
fn is_full(error: &Error) -> bool {
    matches!(error, Error::GRpcStatus(status) if status.message().contains("database space exceeded"))
}

/// The member has looked who asks, and lets others ask.
fn is_refused(error: &Error) -> bool {
    matches!(error, Error::GRpcStatus(status) if status.message().contains("permission denied"))
}

/// What is to be done was tried with etcd 3.4.
fn full() -> MetaError {
    let why = "etcd has no space left (alarm NOSPACE: its database has reached --quota-backend-bytes), so that metadata can be \
               read, and not changed. On a machine with etcdctl, with --endpoints=URL,... or what `holdfast grid etcd \
               access` prints: `etcdctl endpoint status -w json` shows the revision; then `etcdctl compact REVISION`, \
               `etcdctl defrag \
               --cluster`, `etcdctl alarm disarm`; where that is not enough start its members with a larger quota";
    MetaError::Unwritable { why: why.to_string() }
}

/// Users or roles were changed between the look at who asks and the work: members look at that before they do anything, and
/// all come to the same. Who asks again is seen as they are now.
fn is_not_begun(error: &Error) -> bool {
    matches!(error, Error::GRpcStatus(status) if status.message().contains("revision of auth store is old"))
}

fn unknown(why: &str) -> MetaError {
    MetaError::Unknown { why: why.to_string() }
}

/// etcd says so by the status "not found", or, for keep-alives, by a time to live of zero.
fn is_missing_lease(error: &Error) -> bool {
    match error {
        Error::GRpcStatus(status) => status.message().contains("lease not found"),
        Error::LeaseKeepAliveError(why) => why.contains("lease not found"),
        _ => false,
    }
}

impl MetaStore for EtcdStore {
    fn get(&self, key: &str) -> Result<Option<Record>, MetaError> {
        let full = self.0.full_key(key);
        let found = self.0.read(|mut client| {
            let full = full.clone();
            async move { client.get(full, None).await }
        })?;
        found.kvs().first().map(|kv| self.0.record(kv)).transpose()
    }

    fn list(&self, prefix: &str) -> Result<Listing, MetaError> {
        let from = self.0.full_key(prefix);
        let mut listing = Listing { revision: Revision(0), records: Vec::new() };
        let mut after: Option<Vec<u8>> = None;
        loop {
            let mut options = GetOptions::new().with_limit(LIST_PAGE);
            // All pages are of the revision that the first one has.
            let start = match &after {
                None => {
                    options = options.with_prefix();
                    from.clone()
                }
                Some(last) => {
                    let revision = listing.revision.0.cast_signed();
                    options = options.with_range(end_of(&from)).with_revision(revision);
                    [last.as_slice(), &[0]].concat()
                }
            };
            let page =
                self.0.read(|client| {
                    let (start, options) = (start.clone(), options.clone());
                    async move {
                        client.kv_client().max_decoding_message_size(ANSWER_BYTES_MAX).get(start, Some(options)).await
                    }
                })?;
            if after.is_none() {
                let revision = page.header().map_or(0, etcd_client::ResponseHeader::revision);
                listing.revision = Revision(revision.cast_unsigned());
            }
            for kv in page.kvs() {
                listing.records.push(self.0.record(kv)?);
            }
            after = page.kvs().last().map(|kv| kv.key().to_vec());
            if !page.more() || after.is_none() {
                return Ok(listing);
            }
        }
    }

    fn swap(
        &self,
        key: &str,
        expect: MetaVersion,
        value: Option<&[u8]>,
        lease: Option<LeaseId>,
    ) -> Result<Swap, MetaError> {
        check_size(key, value)?;
        let full = self.0.full_key(key);
        let options = lease.map(|lease| PutOptions::new().with_lease(lease.0.cast_signed()));
        let change = match value {
            Some(value) => vec![TxnOp::put(full.clone(), value, options)],
            None => vec![TxnOp::delete(full.clone(), None)],
        };
        let is_expected = EtcdCompare::mod_revision(full.clone(), CompareOp::Equal, expect.0.cast_signed());
        let txn = Txn::new().when([is_expected]).and_then(change).or_else([TxnOp::get(full, None)]);
        let done = self.0.call(|mut client| {
            let txn = txn.clone();
            async move { client.txn(txn).await }
        })?;
        if done.succeeded() {
            let revision = done.header().map_or(0, etcd_client::ResponseHeader::revision);
            let version = if value.is_some() { MetaVersion(revision.cast_unsigned()) } else { MetaVersion::ABSENT };
            return Ok(Swap::Done(version));
        }
        let found = done.op_responses().into_iter().next();
        let Some(TxnOpResponse::Get(found)) = found else { return Err(unknown("etcd's answer lacks the record")) };
        Ok(Swap::Conflict(found.kvs().first().map(|kv| self.0.record(kv)).transpose()?))
    }

    fn commit(&self, compares: &[Compare], writes: &[Write]) -> Result<Commit, MetaError> {
        check_commit(compares, writes)?;
        let full = |key: &str| self.0.full_key(key);
        let are_expected: Vec<EtcdCompare> = compares
            .iter()
            .map(|c| EtcdCompare::mod_revision(full(&c.key), CompareOp::Equal, c.version.0.cast_signed()))
            .collect();
        let changes: Vec<TxnOp> = writes
            .iter()
            .map(|Write { key, value, lease }| match value {
                Some(value) => {
                    let options = lease.map(|lease| PutOptions::new().with_lease(lease.0.cast_signed()));
                    TxnOp::put(full(key), value.as_slice(), options)
                }
                None => TxnOp::delete(full(key), None),
            })
            .collect();
        let looks: Vec<TxnOp> = compares.iter().map(|c| TxnOp::get(full(&c.key), None)).collect();
        let txn = Txn::new().when(are_expected).and_then(changes).or_else(looks);
        let done = self.0.call(|mut client| {
            let txn = txn.clone();
            async move { client.txn(txn).await }
        })?;
        if done.succeeded() {
            let revision = done.header().map_or(0, etcd_client::ResponseHeader::revision).cast_unsigned();
            let version = |write: &Write| write.value.as_ref().map_or(MetaVersion::ABSENT, |_| MetaVersion(revision));
            return Ok(Commit::Done(writes.iter().map(version).collect()));
        }
        let found = done.op_responses().into_iter().map(|response| match response {
            TxnOpResponse::Get(found) => found.kvs().first().map(|kv| self.0.record(kv)).transpose(),
            _ => Err(unknown("etcd's answer lacks a record")),
        });
        Ok(Commit::Conflict(found.collect::<Result<_, _>>()?))
    }

    fn grant(&self, ttl: Duration) -> Result<LeaseId, MetaError> {
        let seconds = ttl.as_millis().div_ceil(1000).max(1).try_into().unwrap_or(i64::MAX);
        let lease = self.0.call(|mut client| async move { client.lease_grant(seconds, None).await })?;
        Ok(LeaseId(lease.id().cast_unsigned()))
    }

    fn keep_alive(&self, lease: LeaseId) -> Result<(), MetaError> {
        // The first answer of the stream is awaited within; a lease that is gone is an error.
        self.0.read(|mut client| async move { client.lease_keep_alive(lease.0.cast_signed()).await }).map(drop)
    }

    fn revoke(&self, lease: LeaseId) -> Result<(), MetaError> {
        self.0.call(|mut client| async move { client.lease_revoke(lease.0.cast_signed()).await }).map(drop)
    }

    fn trouble(&self) -> Option<MetaError> {
        // Where roles of etcd keep alarms from this client, they are seen when something is to be written.
        let told = self.0.call(|mut client| async move { client.alarm(AlarmAction::Get, AlarmType::None, None).await });
        let is_raised = told.is_ok_and(|told| told.alarms().iter().any(|a| a.alarm() == AlarmType::Nospace));
        is_raised.then(full)
    }

    fn watch(&self, prefix: &str, from: Revision) -> Result<Box<dyn Watch>, MetaError> {
        let full = self.0.full_key(prefix);
        let options = WatchOptions::new().with_prefix().with_start_revision(from.0.max(1).cast_signed());
        let (client, stream) = self.0.call(|client| {
            let (full, options) = (full.clone(), options.clone());
            async move {
                let watching =
                    client.watch_client().max_decoding_message_size(ANSWER_BYTES_MAX).watch(full, Some(options)).await;
                watching.map(|stream| (client, stream))
            }
        })?;
        let heard_at = Instant::now();
        let watch = EtcdWatch {
            shared: Arc::clone(&self.0),
            _client: client,
            stream,
            from,
            heard_at,
            asked: false,
            waiting: VecDeque::new(),
            oldest: None,
        };
        Ok(Box::new(watch))
    }
}

/// The first key after all that begin with `prefix`.
fn end_of(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end;
        }
    }
    // Without one: etcd's sign for "to the last".
    vec![0]
}

struct EtcdWatch {
    shared: Arc<Shared>,
    /// Its connection stays, whatever calls use by now.
    _client: Client,
    stream: WatchStream,
    from: Revision,
    heard_at: Instant,
    /// For a sign of life, since then.
    asked: bool,
    waiting: VecDeque<WatchEvent>,
    oldest: Option<Revision>,
}

impl EtcdWatch {
    /// Waits for one message, at most until `end` or until silence means something.
    fn hear(&mut self, end: Instant) -> Result<(), MetaError> {
        let silent_at = self.heard_at + SILENCE_MAX * if self.asked { 2 } else { 1 };
        let wait = end.min(silent_at).saturating_duration_since(Instant::now());
        let shared = Arc::clone(&self.shared);
        let stream = &mut self.stream;
        let heard = shared.runtime.block_on(async { timeout(wait, stream.message()).await });
        match heard {
            Ok(Ok(Some(message))) => self.on_message(&message),
            Ok(Ok(None)) => Err(unknown("etcd ended the watch")),
            Ok(Err(error)) => Err(unknown(&error.to_string())),
            Err(_) if Instant::now() < silent_at => Ok(()),
            Err(_) if self.asked => Err(unknown("a watch of etcd fell silent")),
            Err(_) => {
                self.asked = true;
                let stream = &mut self.stream;
                let asked = shared.runtime.block_on(async { timeout(CALL_MAX, stream.request_progress()).await });
                asked.map_or_else(
                    |_| Err(unknown("a watch of etcd is stuck")),
                    |r| r.map_err(|e| unknown(&e.to_string())),
                )
            }
        }
    }

    fn on_message(&mut self, message: &WatchResponse) -> Result<(), MetaError> {
        (self.heard_at, self.asked) = (Instant::now(), false);
        if message.compact_revision() > 0 {
            let oldest = Revision(message.compact_revision().cast_unsigned());
            self.oldest = Some(oldest);
            return Err(MetaError::Compacted { wanted: self.from, oldest });
        }
        if message.canceled() {
            return Err(unknown(&format!("etcd ended the watch: {}", message.cancel_reason())));
        }
        for event in message.events() {
            let Some(kv) = event.kv() else { continue };
            let revision = Revision(kv.mod_revision().cast_unsigned());
            let change = match event.event_type() {
                EventType::Put => Change::Put(self.shared.record(kv)?),
                EventType::Delete => Change::Deleted,
            };
            self.waiting.push_back(WatchEvent { revision, key: self.shared.own_key(kv.key())?, change });
            self.from = revision.next();
        }
        Ok(())
    }
}

impl Watch for EtcdWatch {
    fn next(&mut self, wait: Duration) -> Result<Vec<WatchEvent>, MetaError> {
        if let Some(oldest) = self.oldest {
            return Err(MetaError::Compacted { wanted: self.from, oldest });
        }
        let end = Instant::now() + wait;
        loop {
            self.hear(end)?;
            if !self.waiting.is_empty() || Instant::now() >= end {
                return Ok(self.waiting.drain(..).collect());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_prefix_is_the_next_key_that_lacks_it() {
        assert_eq!(end_of(b"a/"), b"a0");
        assert_eq!(end_of(&[7, 255, 255]), [8]);
        assert_eq!(end_of(&[255]), [0]);
    }

    #[test]
    fn endpoints_that_can_t_be_used_say_why() {
        let connect = |endpoints: &[&str]| {
            let endpoints = endpoints.iter().map(ToString::to_string).collect();
            EtcdStore::connect(&EtcdConfig { endpoints, ..EtcdConfig::default() }).err().map(|e| e.to_string())
        };
        assert!(connect(&[]).expect("an error").contains("http://10.0.0.1:2379"));
        assert!(connect(&["10.0.0.1:2379"]).expect("an error").contains("neither with http://"));
        assert!(connect(&["https://10.0.0.1:2379"]).expect("an error").contains("`ca`"));
        assert_eq!(connect(&["http://127.0.0.1:1"]), None, "who isn't there shows at the first call");
    }

    #[test]
    fn a_cluster_that_is_not_there_is_an_unknown_outcome() {
        let endpoints = vec!["http://127.0.0.1:1".to_string()];
        let store = EtcdStore::connect(&EtcdConfig { endpoints, ..EtcdConfig::default() }).expect("prepared");
        assert!(matches!(store.get("x"), Err(MetaError::Unknown { .. })));
        assert_eq!(store.swap("", MetaVersion::ABSENT, None, None), Err(MetaError::TooLarge));
    }
}
