//! Whether volumes in service at other hosts could do without a node: asked and answered by records, since hosts have no
//! connections for this.
//!
//! ```text
//! question/HOST           (metadata, leased) what that host wants to know; only while it waits
//! answer/HOST/FROM        (metadata, leased) what a host has told the requester last
//! ```
//! A host of a release that answers no queries says nothing of the kind in its record, and is not asked.
//!
//! Role: a thread of its own answers, which waits for no lock: who asks may hold one that others wait for.
//!
//! Faults: a host that is there and does not answer may have anything in service, so nobody knows, and the requester is
//! told that. One whose lease has run out is not asked, though it may serve on while it does not reach the metadata
//! store.

use super::commands::Weakness;
use super::control::ControlPlane;
use super::meta::Meta;
use anyhow::{Context, Result};
use holdfast_api::{Code, refuse};
use holdfast_base::NodeId;
use holdfast_runtime::meta::Change;
use holdfast_volume::Question;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

const QUERY_PREFIX: &str = "question/";
const ANSWER_PREFIX: &str = "answer/";

/// How long a host may take. Shorter than the lease of one that hangs.
const ANSWER_MAX: Duration = Duration::from_secs(3);

const LOOK_PACE: Duration = Duration::from_millis(20);

/// How long one look waits for queries.
const LOOK_MAX: Duration = Duration::from_secs(5);

/// Pause before the store is asked again that did not answer.
const PAUSE: Duration = Duration::from_millis(500);

#[derive(Debug, Serialize, Deserialize)]
struct PeerQuery {
    id: String,
    /// What would be missing without it?
    node: u32,
}

#[derive(Debug, Serialize, Deserialize)]
struct PeerAnswer {
    /// Of the query.
    id: String,
    weak: Vec<Weakness>,
}

impl ControlPlane {
    /// What volumes lack that other hosts have in service, each with its host.
    pub(super) fn weak_elsewhere(&self, node: u32) -> Result<Vec<(String, Weakness)>> {
        let others = self.presence.hosts_that_answer()?;
        if others.is_empty() {
            return Ok(Vec::new());
        }
        let _alone = self.alone_at_peer_queries();
        let key = format!("{QUERY_PREFIX}{}", self.catalog.host());
        let id = uuid::Uuid::new_v4().to_string();
        let query = serde_json::to_vec(&PeerQuery { id: id.clone(), node }).expect("our records always encode");
        self.presence.keep(&key, Some(&query))?;
        let answers = self.await_answers(&id, others);
        // One that stays ends with the lease, and asks for nothing that anybody waits for.
        let _ = self.presence.keep(&key, None);
        answers
    }

    fn await_answers(&self, id: &str, mut silent: BTreeSet<String>) -> Result<Vec<(String, Weakness)>> {
        let end = Instant::now() + ANSWER_MAX;
        let mut weak = Vec::new();
        loop {
            for host in silent.clone() {
                if let Some(told) = self.presence.read(&format!("{ANSWER_PREFIX}{host}/{}", self.catalog.host()))?
                    && let Ok(told) = serde_json::from_slice::<PeerAnswer>(&told)
                    && told.id == id
                {
                    weak.extend(told.weak.into_iter().map(|weakness| (host.clone(), weakness)));
                    silent.remove(&host);
                }
            }
            if silent.is_empty() {
                return Ok(weak);
            }
            if Instant::now() >= end {
                // Of those that have gone meanwhile nobody knows more than of those that were gone before.
                let there = self.presence.hosts()?;
                let Some(host) = silent.iter().find(|host| there.contains_key(*host)) else { return Ok(weak) };
                refuse!(
                    Code::Unavailable,
                    "host {host} does not say how the volumes are that it has in service; see whether it hangs"
                );
            }
            std::thread::sleep(LOOK_PACE);
        }
    }

    /// Answers what other hosts have asked and ask, until something fails.
    fn answer_querys(&self, meta: &Meta) -> Result<std::convert::Infallible> {
        let listed = meta.list(QUERY_PREFIX)?;
        for record in &listed.records {
            self.answer_query(&record.key, &record.value)?;
        }
        let mut watch = meta.watch(QUERY_PREFIX, listed.revision.next())?;
        loop {
            for event in watch.next(LOOK_MAX)? {
                if let Change::Put(record) = &event.change {
                    self.answer_query(&event.key, &record.value)?;
                }
            }
        }
    }

    fn answer_query(&self, key: &str, query: &[u8]) -> Result<()> {
        let requester = key.strip_prefix(QUERY_PREFIX).filter(|requester| requester != self.catalog.host());
        let (Some(requester), Ok(query)) = (requester, serde_json::from_slice::<PeerQuery>(query)) else {
            return Ok(());
        };
        let weak = self.inspect(Question::WeakApartFrom(NodeId(query.node)))?;
        let told = serde_json::to_vec(&PeerAnswer { id: query.id, weak }).expect("our records always encode");
        self.presence.keep(&format!("{ANSWER_PREFIX}{}/{requester}", self.catalog.host()), Some(&told))
    }
}

pub(super) fn start(plane: Arc<ControlPlane>, meta: Meta) -> Result<()> {
    let answer = move || {
        loop {
            // Of a store that does not answer whoever looks after its health tells; who asks asks again.
            let Err(_) = plane.answer_querys(&meta);
            std::thread::sleep(PAUSE);
        }
    };
    std::thread::Builder::new()
        .name("peer-query".to_string())
        .spawn(answer)
        .context("no thread for queries of other hosts")?;
    Ok(())
}
