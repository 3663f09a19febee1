//! Changes that are asked for again under the key of the first time are carried out once.
//!
//! Source: the header `Idempotency-Key` as draft-ietf-httpapi-idempotency-key-header-07 has it. A key that comes with another
//! request than before is refused; one whose request is under way waits for that; later its answer is given again.
//!
//! What may succeed the next time ([`passes`](crate::problem::passes)) is not kept: it is tried again. Nothing outlives the
//! host's process.
//!
//! Keys are each caller's own. Limits: [`KEPT_MAX`] keys with [`KEPT_BYTES_MAX`] of answers, each for [`KEPT_FOR`]. Of more the
//! oldest go of the caller who has the most.

use axum::body::Bytes;
use axum::http::StatusCode;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::watch;

const KEPT_MAX: usize = 1024;
/// An answer about a volume with many snapshots has some tens of kilobytes.
const KEPT_BYTES_MAX: usize = 8 << 20;

const KEPT_FOR: Duration = Duration::from_secs(24 * 3600);

/// Longest key that is taken.
pub const KEY_BYTES_MAX: usize = 128;

/// An answer.
#[derive(Clone, PartialEq, Debug)]
pub struct Kept {
    pub status: StatusCode,
    /// As JSON.
    pub body: Option<Bytes>,
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

impl Entry {
    /// Of the answer, once there is one.
    fn bytes(&self) -> Option<usize> {
        let kept = self.coming.borrow();
        kept.as_ref().map(|kept| kept.body.as_ref().map_or(0, Bytes::len))
    }
}

/// Who asked, and by which key.
type Key = (String, String);

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
    pub fn begin(&self, who: &str, key: &str, fingerprint: u64, now: Instant) -> Found {
        let mut entries = self.entries();
        let key = (who.to_string(), key.to_string());
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
        let is_full = |entries: &BTreeMap<Key, Entry>| {
            let bytes: usize = entries.values().filter_map(Entry::bytes).sum();
            entries.len() >= KEPT_MAX || bytes > KEPT_BYTES_MAX
        };
        if is_full(&entries) {
            entries.retain(|_, entry| is_of_use(entry));
        }
        while is_full(&entries) {
            let Some(next) = next_to_go(&entries) else { return Found::Full };
            entries.remove(&next);
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

/// The oldest answer of the caller who has the most.
fn next_to_go(entries: &BTreeMap<Key, Entry>) -> Option<Key> {
    let answered = || entries.iter().filter(|(_, entry)| entry.bytes().is_some());
    let mut count: BTreeMap<&String, usize> = BTreeMap::new();
    answered().for_each(|((who, _), _)| *count.entry(who).or_default() += 1);
    answered().max_by_key(|((who, _), entry)| (count[who], std::cmp::Reverse(entry.at))).map(|(key, _)| key.clone())
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
        let Found::New(sender, _) = retries.begin("operator a", "a", 1, now) else { panic!("it is new") };
        let Found::Known(coming) = retries.begin("operator a", "a", 1, now) else { panic!("it is under way") };
        assert!(matches!(retries.begin("operator a", "a", 2, now), Found::Differs));
        assert!(matches!(retries.begin("operator b", "a", 1, now), Found::New(..)), "keys are each one's own");
        sender.send_replace(Some(kept(false)));
        assert_eq!(*coming.borrow(), Some(kept(false)));
        drop(sender);
        assert!(matches!(retries.begin("operator a", "a", 1, now + KEPT_FOR / 2), Found::Known(_)));
        assert!(matches!(retries.begin("operator a", "a", 2, now + KEPT_FOR), Found::New(..)), "a day has passed");
    }

    #[test]
    fn what_may_succeed_the_next_time_is_tried_again() {
        let (retries, now) = (Retries::default(), Instant::now());
        let Found::New(sender, _) = retries.begin("operator a", "a", 1, now) else { panic!("it is new") };
        sender.send_replace(Some(kept(true)));
        assert!(matches!(retries.begin("operator a", "a", 1, now), Found::New(..)));
        let Found::New(sender, _) = retries.begin("operator a", "b", 1, now) else { panic!("it is new") };
        drop(sender);
        assert!(matches!(retries.begin("operator a", "b", 1, now), Found::New(..)), "who had it came to an end");
    }

    #[test]
    fn the_oldest_answer_goes_when_there_are_many() {
        let (retries, now) = (Retries::default(), Instant::now());
        let mut under_way = Vec::new();
        for n in 0..KEPT_MAX {
            let at = now + Duration::from_millis(n as u64);
            let Found::New(sender, _) = retries.begin("operator a", &n.to_string(), 1, at) else {
                panic!("{n} is new")
            };
            under_way.push(sender);
        }
        let late = now + Duration::from_secs(60);
        assert!(matches!(retries.begin("operator a", "more", 1, late), Found::Full));
        under_way[7].send_replace(Some(kept(false)));
        under_way[3].send_replace(Some(kept(false)));
        assert!(matches!(retries.begin("operator a", "more", 1, late), Found::New(..)));
        assert!(matches!(retries.begin("operator a", "7", 1, late), Found::Known(_)));
    }

    fn answered(retries: &Retries, who: &str, key: &str, bytes: usize, now: Instant) {
        let Found::New(sender, _) = retries.begin(who, key, 1, now) else { panic!("{key} is new") };
        sender.send_replace(Some(Kept { body: Some(vec![b'x'; bytes].into()), ..kept(false) }));
    }

    #[test]
    fn who_has_the_most_keeps_nobody_elses_out() {
        let (retries, now) = (Retries::default(), Instant::now());
        answered(&retries, "operator a", "first", 10, now);
        for n in 0..3 * KEPT_MAX {
            answered(&retries, "operator b", &n.to_string(), 10, now + Duration::from_millis(n as u64));
        }
        assert_eq!(retries.entries().len(), KEPT_MAX);
        let late = now + Duration::from_secs(60);
        assert!(matches!(retries.begin("operator a", "first", 1, late), Found::Known(_)));
    }

    #[test]
    fn large_answers_are_kept_as_far_as_there_is_room() {
        let (retries, now) = (Retries::default(), Instant::now());
        for n in 0..30 {
            answered(&retries, "operator a", &n.to_string(), 1 << 20, now + Duration::from_millis(n));
        }
        let bytes: usize = retries.entries().values().filter_map(Entry::bytes).sum();
        assert!(bytes <= KEPT_BYTES_MAX + (1 << 20), "{bytes}");
        assert!(matches!(retries.begin("operator a", "29", 1, now), Found::Known(_)));
    }
}
