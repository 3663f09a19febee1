//! Alerts: which of what is not well is told, and when: not what passes by itself, and nothing twice.
//!
//! Role: a machine without I/O. A thread of the host drives it, and sends what it gives.
//!
//! ```text
//! seen -> stands for RAISE_AFTER of its severity -> raised -> away for CLEAR_AFTER -> cleared
//! ```
//! Invariants
//! 1. What was raised is cleared, once, and what was not raised never is. One that gets worse is raised once more.
//! 2. What comes of a machine that was announced to be away is not raised.
//! 3. A host that is not the one to tell keeps count all the same: when it is to, it raises what the other may have left
//!    untold ([`LEFT_UNTOLD`]), and nothing older. What the other may have raised it clears, though it passed meanwhile.

use holdfast_api::{Concern, Finding, Severity};
use holdfast_base::Instant;
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// From when on an other host may not have told of what it saw.
const LEFT_UNTOLD: Duration = Duration::from_secs(120);

/// How long something is away before it counts as gone.
const CLEAR_AFTER: Duration = Duration::from_secs(60);

/// Nodes that start anew, and hosts that hand volumes over, take less.
fn raise_after(severity: Severity) -> Duration {
    match severity {
        Severity::Warning => Duration::from_secs(60),
        Severity::Critical => Duration::from_secs(10),
    }
}

/// What became of a finding.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Became {
    Raised,
    Cleared,
    /// Nothing is wrong: somebody tries whether alerts arrive.
    Test,
}

/// What is told.
#[derive(Clone, PartialEq, Debug)]
pub struct Alert {
    pub became: Became,
    pub finding: Finding,
}

#[derive(Debug)]
struct Trouble {
    finding: Finding,
    /// Since when it is as bad as it is.
    since: Instant,
    raised: Option<Severity>,
    /// It stood for so long that the host that was to tell may have raised it.
    is_raised_elsewhere: bool,
    gone_since: Option<Instant>,
}

impl Trouble {
    /// By this host, or perhaps by the one that was to tell.
    fn is_raised(&self) -> bool {
        self.raised.is_some() || self.is_raised_elsewhere
    }
}

/// What was seen, and what of it was told.
#[derive(Debug, Default)]
pub struct Alerts {
    troubles: BTreeMap<(Concern, String), Trouble>,
}

impl Alerts {
    /// What is to be told, of what is not well now; by another host if `tells` is false.
    pub fn look(&mut self, now: Instant, findings: &[Finding], tells: bool) -> Vec<Alert> {
        for trouble in self.troubles.values_mut() {
            trouble.gone_since = trouble.gone_since.or(Some(now));
        }
        findings.iter().for_each(|finding| self.see(now, finding));
        let mut told = Vec::new();
        for trouble in self.troubles.values_mut().filter(|trouble| trouble.gone_since.is_none()) {
            let severity = trouble.finding.severity;
            let stands = now.since(trouble.since);
            let is_worse = trouble.raised.is_none_or(|raised| raised < severity);
            if !is_worse || trouble.finding.announced || stands < raise_after(severity) {
                continue;
            }
            trouble.is_raised_elsewhere |= !tells;
            if tells {
                told.push(Alert { became: Became::Raised, finding: trouble.finding.clone() });
            }
            if tells || stands >= raise_after(severity) + LEFT_UNTOLD {
                trouble.raised = Some(severity);
            }
        }
        self.troubles.retain(|_, trouble| {
            let is_gone = trouble.gone_since.is_some_and(|since| now.since(since) >= CLEAR_AFTER);
            let is_raised = trouble.is_raised();
            if is_gone && tells && is_raised {
                told.push(Alert { became: Became::Cleared, finding: trouble.finding.clone() });
            }
            // What nobody raised is forgotten at once.
            !is_gone && (trouble.gone_since.is_none() || is_raised)
        });
        told
    }

    fn see(&mut self, now: Instant, finding: &Finding) {
        let key = (finding.concern, finding.about.clone());
        // What was raised before it was announced is cleared when it is gone.
        if finding.announced && self.troubles.get(&key).is_none_or(|trouble| !trouble.is_raised()) {
            return;
        }
        let fresh = || Trouble {
            finding: finding.clone(),
            since: now,
            raised: None,
            is_raised_elsewhere: false,
            gone_since: None,
        };
        let trouble = self.troubles.entry(key).or_insert_with(fresh);
        if trouble.finding.severity < finding.severity {
            trouble.since = now;
        }
        (trouble.finding, trouble.gone_since) = (finding.clone(), None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(severity: Severity, about: &str) -> Finding {
        Finding {
            severity,
            concern: Concern::Redundancy,
            about: about.to_string(),
            what: "so".to_string(),
            next: None,
            announced: false,
        }
    }

    fn at(seconds: u64) -> Instant {
        Instant::ZERO + Duration::from_secs(seconds)
    }

    /// What is told at each second of these, by kind and name.
    fn told(
        alerts: &mut Alerts,
        seconds: std::ops::Range<u64>,
        findings: &[Finding],
        tells: bool,
    ) -> Vec<(u64, Became, String)> {
        let look = |second| {
            let told = alerts.look(at(second), findings, tells);
            told.into_iter().map(move |alert| (second, alert.became, alert.finding.about)).collect::<Vec<_>>()
        };
        seconds.flat_map(look).collect()
    }

    #[test]
    fn what_stands_is_raised_once_and_cleared_once() {
        let mut alerts = Alerts::default();
        let (a, b) = (finding(Severity::Warning, "a"), finding(Severity::Critical, "b"));
        let both = [b, a.clone()];
        let of = |second, became, name: &str| (second, became, name.to_string());
        let first = told(&mut alerts, 0..100, &both, true);
        assert_eq!(first, [of(10, Became::Raised, "b"), of(60, Became::Raised, "a")]);
        // It comes and goes, which nobody needs to hear.
        assert!(told(&mut alerts, 100..130, &[], true).is_empty());
        assert!(told(&mut alerts, 130..200, &both, true).is_empty());
        let last = told(&mut alerts, 200..300, &[a], true);
        assert_eq!(last, [of(260, Became::Cleared, "b")]);
    }

    #[test]
    fn what_passes_by_itself_is_not_told() {
        let mut alerts = Alerts::default();
        let a = [finding(Severity::Warning, "a")];
        assert!(told(&mut alerts, 0..59, &a, true).is_empty());
        assert!(told(&mut alerts, 59..200, &[], true).is_empty());
        assert!(told(&mut alerts, 200..259, &a, true).is_empty(), "it begins anew");
    }

    #[test]
    fn what_was_announced_is_not_told_before_that_is_over() {
        let mut alerts = Alerts::default();
        let [plain, announced] =
            [false, true].map(|announced| [Finding { announced, ..finding(Severity::Critical, "a") }]);
        assert!(told(&mut alerts, 0..300, &announced, true).is_empty());
        assert_eq!(told(&mut alerts, 300..320, &plain, true)[0].0, 310);
        assert!(told(&mut alerts, 320..500, &announced, true).is_empty(), "it is still there");
        assert_eq!(told(&mut alerts, 500..600, &[], true)[0].1, Became::Cleared);
        // Another host has raised it before somebody announced it.
        let mut late = Alerts::default();
        assert!(told(&mut late, 0..20, &plain, false).is_empty());
        assert!(told(&mut late, 20..200, &announced, true).is_empty(), "it stands");
        assert_eq!(told(&mut late, 200..300, &[], true)[0].1, Became::Cleared);
    }

    #[test]
    fn what_gets_worse_is_raised_once_more_and_what_gets_better_is_not() {
        let mut alerts = Alerts::default();
        let of = |severity| [finding(severity, "a")];
        assert_eq!(told(&mut alerts, 0..100, &of(Severity::Warning), true).len(), 1);
        assert_eq!(told(&mut alerts, 100..150, &of(Severity::Critical), true)[0].0, 110);
        assert!(told(&mut alerts, 150..300, &of(Severity::Warning), true).is_empty());
        assert_eq!(told(&mut alerts, 300..400, &[], true).len(), 1, "it is cleared once");
    }

    #[test]
    fn who_takes_over_tells_what_was_left_untold_and_nothing_older() {
        let (mut early, mut late) = (Alerts::default(), Alerts::default());
        let a = [finding(Severity::Critical, "a")];
        assert!(told(&mut early, 0..20, &a, false).is_empty());
        assert_eq!(told(&mut early, 20..30, &a, true).len(), 1);
        assert!(told(&mut late, 0..200, &a, false).is_empty());
        assert!(told(&mut late, 200..300, &a, true).is_empty());
        assert_eq!(told(&mut late, 300..400, &[], true).len(), 1, "that it is gone it tells");
    }

    #[test]
    fn what_the_other_may_have_raised_is_cleared_though_it_passed_meanwhile() {
        let a = [finding(Severity::Warning, "a")];
        let cleared = |stood: u64| {
            let mut late = Alerts::default();
            assert!(told(&mut late, 0..stood, &a, false).is_empty());
            assert!(told(&mut late, stood..stood + 10, &[], false).is_empty());
            told(&mut late, stood + 10..stood + 200, &[], true)
        };
        assert_eq!(cleared(90), [(150, Became::Cleared, "a".to_string())]);
        assert!(cleared(50).is_empty(), "nobody raised it");
    }
}
