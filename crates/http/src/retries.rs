//! Changes that are asked for again under the key of the first time are carried out once.
//!
//! Source: the header `Idempotency-Key` as draft-ietf-httpapi-idempotency-key-header-07 has it. A key that comes with another
//! request than before is refused; one whose request is under way waits for that; later its answer is given again.
//!
//! What may succeed the next time ([`passes`](crate::problem::passes)) is not kept: it is tried again. Nothing outlives the
//! host's process.
//!
//! Limits: [`KEPT_MAX`] keys, each for [`KEPT_FOR`].

use axum::http::StatusCode;
use holdfast_api::Role;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::watch;

const KEPT_MAX: usize = 1024;
const KEPT_FOR: Duration = Duration::from_secs(24 * 3600);

/// Longest key that is taken.
pub const KEY_BYTES_MAX: usize = 128;

/// An answer.
#[derive(Clone, PartialEq, Debug)]
pub struct Kept {
    pub status: StatusCode,
    pub body: Option<Value>,
    /// The same request may succeed the next time.
    pub passes: bool,
}

/// Where an answer comes.
pub type Coming = watch::Receiver<Option<Kept>>;

struct Entry {
    /// Of the request that came first.
    fingerprint: u64,
    at: Instant,
    coming: Coming,
}

/// Who asked, and by which key.
type Key = (bool, String);

#[derive(Default)]
pub struct Retries(Mutex<BTreeMap<Key, Entry>>);

/// What is to be done with a request.
pub enum Found {
    /// Carry it out, and say here what came of it.
    New(watch::Sender<Option<Kept>>, Coming),
    /// It is carried out, or was.
    Known(Coming),
    /// The key is that of another request.
    Differs,
    /// Too many are under way.
    Full,
}

impl Retries {
    pub fn begin(&self, role: Role, key: &str, fingerprint: u64, now: Instant) -> Found {
        let mut entries = self.entries();
        let key = (role == Role::Admin, key.to_string());
        let is_of_use = |entry: &Entry| match &*entry.coming.borrow() {
            // Of one that ended without an answer nothing is known.
            None => entry.coming.has_changed().is_ok(),
            Some(kept) => !kept.passes && now.saturating_duration_since(entry.at) < KEPT_FOR,
        };
        match entries.get(&key) {
            Some(entry) if is_of_use(entry) && entry.fingerprint != fingerprint => return Found::Differs,
            Some(entry) if is_of_use(entry) => return Found::Known(entry.coming.clone()),
            _ => {}
        }
        entries.remove(&key);
        if entries.len() >= KEPT_MAX {
            entries.retain(|_, entry| is_of_use(entry));
        }
        if entries.len() >= KEPT_MAX {
            let answered = entries.iter().filter(|(_, entry)| entry.coming.borrow().is_some());
            let Some(oldest) = answered.min_by_key(|(_, entry)| entry.at).map(|(key, _)| key.clone()) else {
                return Found::Full;
            };
            entries.remove(&oldest);
        }
        let (sender, coming) = watch::channel(None);
        entries.insert(key, Entry { fingerprint, at: now, coming: coming.clone() });
        Found::New(sender, coming)
    }

    /// Nothing is left half-done in it by a panic.
    fn entries(&self) -> MutexGuard<'_, BTreeMap<Key, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(passes: bool) -> Kept {
        Kept { status: StatusCode::OK, body: None, passes }
    }

    #[test]
    fn one_key_is_one_request() {
        let (retries, now) = (Retries::default(), Instant::now());
        let Found::New(sender, _) = retries.begin(Role::Admin, "a", 1, now) else { panic!("it is new") };
        let Found::Known(coming) = retries.begin(Role::Admin, "a", 1, now) else { panic!("it is under way") };
        assert!(matches!(retries.begin(Role::Admin, "a", 2, now), Found::Differs));
        assert!(matches!(retries.begin(Role::Reader, "a", 2, now), Found::New(..)), "keys are each one's own");
        sender.send_replace(Some(kept(false)));
        assert_eq!(*coming.borrow(), Some(kept(false)));
        drop(sender);
        assert!(matches!(retries.begin(Role::Admin, "a", 1, now + KEPT_FOR / 2), Found::Known(_)));
        assert!(matches!(retries.begin(Role::Admin, "a", 2, now + KEPT_FOR), Found::New(..)), "a day has passed");
    }

    #[test]
    fn what_may_succeed_the_next_time_is_tried_again() {
        let (retries, now) = (Retries::default(), Instant::now());
        let Found::New(sender, _) = retries.begin(Role::Admin, "a", 1, now) else { panic!("it is new") };
        sender.send_replace(Some(kept(true)));
        assert!(matches!(retries.begin(Role::Admin, "a", 1, now), Found::New(..)));
        let Found::New(sender, _) = retries.begin(Role::Admin, "b", 1, now) else { panic!("it is new") };
        drop(sender);
        assert!(matches!(retries.begin(Role::Admin, "b", 1, now), Found::New(..)), "who had it came to an end");
    }

    #[test]
    fn the_oldest_answer_goes_when_there_are_many() {
        let (retries, now) = (Retries::default(), Instant::now());
        let mut under_way = Vec::new();
        for n in 0..KEPT_MAX {
            let at = now + Duration::from_millis(n as u64);
            let Found::New(sender, _) = retries.begin(Role::Admin, &n.to_string(), 1, at) else { panic!("{n} is new") };
            under_way.push(sender);
        }
        let late = now + Duration::from_secs(60);
        assert!(matches!(retries.begin(Role::Admin, "more", 1, late), Found::Full));
        under_way[7].send_replace(Some(kept(false)));
        under_way[3].send_replace(Some(kept(false)));
        assert!(matches!(retries.begin(Role::Admin, "more", 1, late), Found::New(..)));
        assert!(matches!(retries.begin(Role::Admin, "7", 1, late), Found::Known(_)));
    }
}
