//! Serves the machines' metadata requests on threads of its own, since a store blocks.
//!
//! Limits: `queue_max` requests waiting for each thread; one more is answered `Unknown` at once, as by a store that does not answer.

use super::{Commit, Compare, MetaError, MetaStore, Record, Swap, Write};
use holdfast_base::{MetaGuard, MetaReply, MetaRequest, MetaVersion, crc32c};
use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

/// The requester's name for a request; comes back with the reply.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct MetaTicket(pub u64);

type Answer = dyn Fn(MetaTicket, MetaReply) + Send + Sync;

/// A queue before a store for each thread. Requests of one key are served in the order in which they were asked.
pub struct MetaService {
    /// By thread; none when it ends.
    requests: Vec<SyncSender<(MetaTicket, MetaRequest)>>,
    answer: Arc<Answer>,
    threads: Vec<JoinHandle<()>>,
}

impl MetaService {
    /// Starts `threads` threads on `store`. `answer` is called on them (or on the requester's), and typically posts to
    /// the requester's mailbox.
    pub fn start(
        store: Arc<dyn MetaStore>,
        threads: usize,
        queue_max: usize,
        answer: impl Fn(MetaTicket, MetaReply) + Send + Sync + 'static,
    ) -> std::io::Result<MetaService> {
        assert!(threads > 0, "a service without threads serves nobody");
        let answer: Arc<Answer> = Arc::new(answer);
        let mut service = MetaService { requests: Vec::new(), answer: Arc::clone(&answer), threads: Vec::new() };
        for _ in 0..threads {
            let (requests, queue) = sync_channel(queue_max);
            let (store, answer) = (Arc::clone(&store), Arc::clone(&answer));
            let work = move || serve(&*store, &queue, &*answer);
            service.threads.push(thread::Builder::new().name("metadata".into()).spawn(work)?);
            service.requests.push(requests);
        }
        Ok(service)
    }

    /// Queues a request; never blocks.
    pub fn request(&self, ticket: MetaTicket, request: MetaRequest) {
        let key = match &request {
            MetaRequest::Get { key } | MetaRequest::Swap { key, .. } => key,
        };
        let place = crc32c(key.as_bytes()) as usize % self.requests.len();
        if self.requests[place].try_send((ticket, request)).is_err() {
            (self.answer)(ticket, MetaReply::Unknown);
        }
    }
}

impl Drop for MetaService {
    /// Serves what is queued, then ends.
    fn drop(&mut self) {
        self.requests.clear();
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so already.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for MetaService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MetaService({} threads)", self.threads.len())
    }
}

fn serve(store: &dyn MetaStore, queue: &Receiver<(MetaTicket, MetaRequest)>, answer: &Answer) {
    while let Ok((ticket, request)) = queue.recv() {
        answer(ticket, reply(store, request).unwrap_or(MetaReply::Unknown));
    }
}

fn reply(store: &dyn MetaStore, request: MetaRequest) -> Result<MetaReply, MetaError> {
    Ok(match request {
        MetaRequest::Get { key } => {
            let (version, value) = parts(store.get(&key)?);
            MetaReply::Record { version, value }
        }
        MetaRequest::Swap { key, expect, value, guard: None } => {
            match store.swap(&key, expect, value.as_deref(), None)? {
                Swap::Done(version) => MetaReply::Swapped { version },
                Swap::Conflict(found) => {
                    let (version, value) = parts(found);
                    MetaReply::Conflict { version, value }
                }
            }
        }
        MetaRequest::Swap { key, expect, value, guard: Some(guard) } => {
            let compares = [Compare { key: key.clone(), version: expect }, guard.into()];
            let write = Write { key, value, lease: None };
            match store.commit(&compares, &[write])? {
                Commit::Done(versions) => MetaReply::Swapped { version: versions[0] },
                Commit::Conflict(found) => lost(&compares, found),
            }
        }
    })
}

impl From<MetaGuard> for Compare {
    fn from(MetaGuard { key, version }: MetaGuard) -> Compare {
        Compare { key, version }
    }
}

/// What a guarded swap has lost to: the record comes first of both.
fn lost(compares: &[Compare], found: Vec<Option<Record>>) -> MetaReply {
    let versions = found.iter().map(|found| found.as_ref().map_or(MetaVersion::ABSENT, |record| record.version));
    let does_guard_hold = versions.zip(compares).skip(1).all(|(version, compare)| version == compare.version);
    let (version, value) = parts(found.into_iter().next().flatten());
    match does_guard_hold {
        true => MetaReply::Conflict { version, value },
        false => MetaReply::GuardFailed { version, value },
    }
}

fn parts(record: Option<Record>) -> (MetaVersion, Option<Vec<u8>>) {
    record.map_or((MetaVersion::ABSENT, None), |r| (r.version, Some(r.value)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meta::LocalStore;
    use std::sync::Mutex;
    use std::sync::mpsc::channel;

    #[test]
    fn requests_are_answered_through_the_callback() {
        let store = Arc::new(LocalStore::in_memory(Arc::new(crate::clock::now)));
        let (tx, rx) = channel();
        let service = MetaService::start(store, 1, 16, move |ticket, reply| tx.send((ticket, reply)).unwrap()).unwrap();
        let swap = |expect, value: Option<&[u8]>| MetaRequest::Swap {
            key: "k".into(),
            expect,
            value: value.map(<[u8]>::to_vec),
            guard: None,
        };
        service.request(MetaTicket(1), swap(MetaVersion::ABSENT, Some(b"a")));
        service.request(MetaTicket(2), swap(MetaVersion::ABSENT, Some(b"b")));
        service.request(MetaTicket(3), MetaRequest::Get { key: "k".into() });
        service.request(MetaTicket(4), swap(MetaVersion(1), None));
        service.request(MetaTicket(5), MetaRequest::Get { key: "k".into() });
        let (key, expect, value, guard) = (String::new(), MetaVersion(0), None, None);
        service.request(MetaTicket(6), MetaRequest::Swap { key, expect, value, guard });
        drop(service);
        let (version, value) = (MetaVersion(1), Some(b"a".to_vec()));
        let want = [
            MetaReply::Swapped { version },
            MetaReply::Conflict { version, value: value.clone() },
            MetaReply::Record { version, value },
            MetaReply::Swapped { version: MetaVersion::ABSENT },
            MetaReply::Record { version: MetaVersion::ABSENT, value: None },
            MetaReply::Unknown,
        ];
        let got: Vec<_> = rx.iter().collect();
        assert_eq!(got.len(), want.len());
        for (n, ((ticket, reply), want)) in got.into_iter().zip(want).enumerate() {
            assert_eq!((ticket, reply), (MetaTicket(n as u64 + 1), want));
        }
    }

    #[test]
    fn a_guarded_swap_tells_what_it_has_lost_to() {
        let store = LocalStore::in_memory(Arc::new(crate::clock::now));
        let decide = |expect| match store.swap("export", expect, Some(b"h"), None) {
            Ok(Swap::Done(version)) => version,
            other => panic!("{other:?}"),
        };
        let claim = |expect, guard| {
            let guard = Some(MetaGuard { key: "export".into(), version: guard });
            let (key, value) = ("root".into(), Some(b"r".to_vec()));
            reply(&store, MetaRequest::Swap { key, expect, value, guard }).unwrap()
        };
        let found = |reply| match reply {
            MetaReply::Swapped { version } => ("swapped", version),
            MetaReply::Conflict { version, .. } => ("conflict", version),
            MetaReply::GuardFailed { version, .. } => ("guard", version),
            other => panic!("{other:?}"),
        };
        let decided = decide(MetaVersion::ABSENT);
        assert_eq!(found(claim(MetaVersion::ABSENT, MetaVersion::ABSENT)), ("guard", MetaVersion::ABSENT));
        let first = MetaVersion(decided.0 + 1);
        assert_eq!(found(claim(MetaVersion::ABSENT, decided)), ("swapped", first));
        assert_eq!(found(claim(MetaVersion::ABSENT, decided)), ("conflict", first));
        let anew = decide(decided);
        assert_eq!(found(claim(first, decided)), ("guard", first), "though the record is the one expected");
        assert_eq!(found(claim(MetaVersion::ABSENT, decided)), ("guard", first), "whatever the record is");
        assert_eq!(found(claim(first, anew)), ("swapped", MetaVersion(anew.0 + 1)));
    }

    #[test]
    fn a_full_queue_answers_at_once() {
        let store = Arc::new(LocalStore::in_memory(Arc::new(crate::clock::now)));
        let (go, wait) = channel::<()>();
        let (tx, rx) = channel();
        let wait = Mutex::new(wait);
        let me = thread::current().id();
        let service = MetaService::start(store, 1, 1, move |ticket, reply| {
            tx.send((ticket, reply)).unwrap();
            if thread::current().id() != me {
                wait.lock().unwrap().recv().unwrap();
            }
        })
        .unwrap();
        let get = || MetaRequest::Get { key: "k".into() };
        service.request(MetaTicket(1), get());
        assert_eq!(rx.recv().unwrap().0, MetaTicket(1));
        service.request(MetaTicket(2), get());
        service.request(MetaTicket(3), get());
        assert_eq!(rx.recv().unwrap(), (MetaTicket(3), MetaReply::Unknown));
        go.send(()).unwrap();
        go.send(()).unwrap();
        drop(service);
        assert_eq!(rx.recv().unwrap().0, MetaTicket(2));
    }
}
