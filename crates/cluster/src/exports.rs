//! What commands do to the record that says which host serves a volume, and how long a hand-over is waited for.
//!
//! Role: pure functions of a record and of what a host sees. Whoever carries a command out swaps the record by compare-and-swap, and
//! asks here again where others were faster.

use holdfast_base::Instant;
use holdfast_format::meta::ExportRecord;
use std::time::Duration;

/// How long the other host may take to have the volume in service: it reads the map first, and this one serves meanwhile.
pub const SERVED_MAX: Duration = Duration::from_secs(30);

/// How long of that nobody may serve it: well below what clients' paths outlast.
pub const UNSERVED_MAX: Duration = Duration::from_secs(7);

/// From here on the host has the volume in service.
pub fn claimed(found: Option<ExportRecord>, me: &str) -> ExportRecord {
    ExportRecord { host: me.to_string(), from: None, ..found.unwrap_or_default() }
}

/// From here on another host shall serve what this one does: it asks this one to yield.
pub fn handed_over(found: ExportRecord, me: &str, to: &str) -> ExportRecord {
    if found.host != me {
        return found;
    }
    ExportRecord { host: to.to_string(), from: Some(me.to_string()), ..found }
}

/// The other host could not serve it: this one goes on.
pub fn taken_back(found: ExportRecord, me: &str, to: &str) -> ExportRecord {
    if found.host != to || found.from.as_deref() != Some(me) {
        return found;
    }
    ExportRecord { host: me.to_string(), from: None, ..found }
}

/// The host offers it no more. Where one host is left, the list is cleared.
pub fn without_offer(mut found: ExportRecord, me: &str) -> ExportRecord {
    found.offered_by.remove(me);
    if found.offered_by.iter().all(|host| *host == found.host) {
        found.offered_by.clear();
    }
    found
}

/// A host that is none of the grid's any more neither serves nor offers the volume; nothing where it had it in service, and no
/// other one is to take it over.
pub fn without_host(mut found: ExportRecord, host: &str) -> Option<ExportRecord> {
    found.offered_by.remove(host);
    found.from = found.from.filter(|from| from != host);
    let is_ended = found.host == host && !found.failover && found.offered_by.is_empty();
    (!is_ended).then_some(found)
}

/// Whether this host may end the service: another's claim stays.
pub fn may_end(found: &ExportRecord, me: &str) -> bool {
    found.host.is_empty() || found.host == me
}

/// A hand-over, as the host sees it that hands over.
#[derive(Clone, Copy, Debug)]
pub struct HandOver {
    since: Instant,
    unserved_since: Option<Instant>,
}

/// Why a host takes back what it was handing over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InVain {
    /// The other host is gone.
    Gone,
    /// It was closed here, and not opened there for [`UNSERVED_MAX`].
    Unopened,
    /// It was not read there within [`SERVED_MAX`].
    Unread,
}

impl HandOver {
    pub fn begun(now: Instant) -> HandOver {
        HandOver { since: now, unserved_since: None }
    }

    /// Whether it is in vain, as far as is seen now: whether the other host is there, and this one serves.
    pub fn look(&mut self, now: Instant, is_there: bool, serves: bool) -> Option<InVain> {
        self.unserved_since = if serves { None } else { self.unserved_since.or(Some(now)) };
        let is_unserved = self.unserved_since.is_some_and(|since| now.since(since) >= UNSERVED_MAX);
        match (is_there, is_unserved) {
            (false, _) => Some(InVain::Gone),
            (_, true) => Some(InVain::Unopened),
            _ => (now.since(self.since) >= SERVED_MAX).then_some(InVain::Unread),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn export(host: &str, from: Option<&str>) -> ExportRecord {
        let offered_by = BTreeSet::from(["a".to_string(), "b".to_string()]);
        ExportRecord { host: host.to_string(), offered_by, from: from.map(str::to_string), ..ExportRecord::default() }
    }

    #[test]
    fn only_who_serves_hands_over_and_only_what_it_handed_over_is_taken_back() {
        let handed = handed_over(export("a", None), "a", "b");
        assert_eq!(handed, export("b", Some("a")));
        assert_eq!(handed_over(export("b", None), "a", "b"), export("b", None));
        assert_eq!(taken_back(handed.clone(), "a", "b"), export("a", None));
        for other in [export("b", None), export("c", Some("a")), export("b", Some("c"))] {
            assert_eq!(taken_back(other.clone(), "a", "b"), other);
        }
        assert_eq!(claimed(Some(handed), "c"), export("c", None));
        assert!(may_end(&export("a", None), "a") && !may_end(&export("b", Some("a")), "a"));
    }

    #[test]
    fn an_offer_by_one_host_alone_is_none() {
        assert_eq!(without_offer(export("a", None), "b").offered_by, BTreeSet::new());
        assert_eq!(without_offer(export("c", None), "b").offered_by, BTreeSet::from(["a".to_string()]));
        assert_eq!(without_host(export("a", Some("b")), "b").map(|left| left.from), Some(None));
        assert_eq!(without_host(ExportRecord { offered_by: BTreeSet::new(), ..export("a", None) }, "a"), None);
    }

    #[test]
    fn a_hand_over_is_in_vain_when_nobody_serves_for_long_or_it_takes_too_long() {
        let at = |seconds| Instant::ZERO + Duration::from_secs(seconds);
        let mut begun = HandOver::begun(at(0));
        assert_eq!(begun.look(at(1), true, false), None);
        assert_eq!(begun.look(at(2), true, true), None, "it is served again");
        assert_eq!(begun.look(at(3), true, false), None);
        assert_eq!(begun.look(at(9), true, false), None);
        assert_eq!(begun.look(at(10), true, false), Some(InVain::Unopened));
        assert_eq!(begun.look(at(11), false, true), Some(InVain::Gone));
        assert_eq!(begun.look(at(30), true, true), Some(InVain::Unread));
    }
}
