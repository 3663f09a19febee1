//! What is not well, as it comes and goes: server-sent events (HTML Living Standard, section 9.2).
//!
//! ```text
//! event: findings     what is not well now, all of it: once, first of all
//! event: raised       one finding that is new, or of another severity
//! event: cleared      one that is gone
//! ```
//! The host is looked at once a second for all who listen, and not at all while nobody does. Each listener is told what
//! has changed since it was told last, so one that is slow misses what came and went, and holds nothing up.

use crate::serve::Ask;
use axum::response::sse::Event;
use futures_util::stream::{Stream, unfold};
use holdfast_api::Finding;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::watch;

const LOOK_EVERY: Duration = Duration::from_secs(1);

type Findings = Arc<Vec<Finding>>;

/// What was seen last; nothing before the first look.
type Seen = watch::Receiver<Option<Findings>>;

/// Looks at the host while somebody listens.
#[derive(Clone, Default)]
pub struct Watch(Arc<Mutex<Option<watch::Sender<Option<Findings>>>>>);

impl Watch {
    fn subscribe(&self, ask: &Arc<dyn Ask>) -> Seen {
        let mut sender = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &*sender {
            Some(running) => running.subscribe(),
            None => {
                let (new, seen) = watch::channel(None);
                *sender = Some(new);
                tokio::spawn(look(self.clone(), Arc::clone(ask)));
                seen
            }
        }
    }

    /// The last listener is gone: the next one begins anew.
    fn ends(&self) -> bool {
        let mut sender = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_alone = sender.as_ref().is_none_or(|sender| sender.receiver_count() == 0);
        if is_alone {
            *sender = None;
        }
        is_alone
    }

    fn tell(&self, found: Findings) {
        if let Some(sender) = &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            sender.send_if_modified(|seen| {
                let is_news = seen.as_ref() != Some(&found);
                if is_news {
                    *seen = Some(found);
                }
                is_news
            });
        }
    }
}

async fn look(watch: Watch, ask: Arc<dyn Ask>) {
    while !watch.ends() {
        let asked = Arc::clone(&ask);
        // A look that fails changes nothing of what was seen.
        if let Ok(Ok(health)) = tokio::task::spawn_blocking(move || asked.health()).await {
            watch.tell(Arc::new(health.findings));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

struct Listener {
    seen: Seen,
    told: Option<Findings>,
    untold: VecDeque<Event>,
    is_let_in: Box<dyn Fn() -> bool + Send>,
}

/// What one listener is told, until it is let in no longer.
pub fn stream(
    watch: &Watch,
    ask: &Arc<dyn Ask>,
    is_let_in: Box<dyn Fn() -> bool + Send>,
) -> impl Stream<Item = Result<Event, Infallible>> + use<> {
    let seen = watch.subscribe(ask);
    let listener = Listener { seen, told: None, untold: VecDeque::new(), is_let_in };
    unfold(listener, |mut listener| async move {
        loop {
            if !(listener.is_let_in)() {
                return None;
            }
            if let Some(event) = listener.untold.pop_front() {
                return Some((Ok(event), listener));
            }
            // So who is not let in any more is told nothing, and is gone soon.
            let news = tokio::time::timeout(LOOK_EVERY, listener.seen.changed()).await;
            if matches!(news, Ok(Err(_))) {
                return None;
            }
            let now = listener.seen.borrow_and_update().clone();
            if let Some(now) = now {
                listener.untold = changes(listener.told.as_deref(), &now).into();
                listener.told = Some(now);
            }
        }
    })
}

/// What is to be told of `now` to who knows `before`.
fn changes(before: Option<&Vec<Finding>>, now: &[Finding]) -> Vec<Event> {
    let Some(before) = before else { return vec![event("findings", &now)] };
    let knows = |all: &[Finding], of: &Finding| {
        all.iter().any(|f| f.is_same(of) && (f.severity, f.announced) == (of.severity, of.announced))
    };
    let raised = now.iter().filter(|finding| !knows(before, finding)).map(|finding| event("raised", finding));
    let is_gone = |finding: &&Finding| !now.iter().any(|f| f.is_same(finding));
    let cleared = before.iter().filter(is_gone).map(|finding| event("cleared", finding));
    raised.chain(cleared).collect()
}

fn event(name: &str, of: &impl serde::Serialize) -> Event {
    Event::default().event(name).json_data(of).expect("our answers always encode")
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_api::{Concern, Severity};

    #[test]
    fn listeners_are_told_what_changed_since_they_were_told() {
        let of = |severity, about: &str, what: &str| Finding {
            severity,
            concern: Concern::Capacity,
            about: about.to_string(),
            what: what.to_string(),
            next: None,
            announced: false,
        };
        let [a, b, c] = ["a", "b", "c"].map(|about| of(Severity::Warning, about, "it is so"));
        let told = |before: Option<&Vec<Finding>>, now: &[Finding]| {
            changes(before, now).iter().map(|event| format!("{event:?}")).collect::<Vec<_>>()
        };
        let first = told(None, &[a.clone(), b.clone()]);
        assert!(first.len() == 1 && first[0].contains("findings") && first[0].contains("capacity"), "{first:?}");
        let second = told(Some(&vec![a.clone(), b.clone()]), &[b.clone(), c]);
        assert!(second.len() == 2 && second[0].contains("raised") && second[1].contains("cleared"), "{second:?}");
        let known = vec![a.clone(), b.clone()];
        assert!(told(Some(&known), &[b.clone(), a]).is_empty(), "in another order it is the same");
        let later = of(Severity::Warning, "a", "it is so for 2 s");
        assert!(told(Some(&known), &[later, b.clone()]).is_empty(), "a text that goes on is no news");
        let worse = told(Some(&known), &[of(Severity::Critical, "a", "it is so"), b]);
        assert!(worse.len() == 1 && worse[0].contains("raised"), "it is told once more when it is worse: {worse:?}");
        assert_eq!(told(None, &[]).len(), 1, "that all is well is told, too");
    }
}
