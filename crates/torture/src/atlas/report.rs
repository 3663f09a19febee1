//! What a run of the atlas found: a table for people, and the same as JSON.

use super::fault::Fault;
use super::guests::{GUESTS_PER_VOLUME, Seen};
use super::machine::Part;
use serde_json::{Value, json};
use std::time::Duration;

/// One fault, or one other phase of a run, and what guests saw of it.
pub struct Row {
    pub name: String,
    pub expectation: String,
    /// Of a fault.
    pub lasted: Duration,
    /// From its end until everything was redundant and every guest was back at its own host.
    pub whole_after: Duration,
    /// What was waited for last, until then.
    pub lacked: Option<String>,
    /// The longest wait of guests whose own host was hit; none where no host was.
    pub longest_at_hit: Option<Duration>,
    pub longest_elsewhere: Duration,
    pub seen: Seen,
}

impl Row {
    /// `fault` where it was one of the atlas, for what is expected of it and whom it hits.
    pub fn new(name: &str, fault: Option<&Fault>, (lasted, whole_after): (Duration, Duration), seen: Seen) -> Row {
        let (mut at_hit, mut elsewhere) = (None, Duration::ZERO);
        for (guest, longest) in seen.longest.iter().enumerate() {
            let host = Part::HOSTS[guest % GUESTS_PER_VOLUME];
            match fault.is_some_and(|fault| fault.hits(host)) {
                true => at_hit = Some(at_hit.unwrap_or(Duration::ZERO).max(*longest)),
                false => elsewhere = elsewhere.max(*longest),
            }
        }
        let expectation = fault.map_or("data go on", Fault::expectation).to_string();
        Row {
            name: name.to_string(),
            expectation,
            lasted,
            whole_after,
            lacked: None,
            longest_at_hit: at_hit,
            longest_elsewhere: elsewhere,
            seen,
        }
    }

    /// The longest wait of any guest, by volume.
    fn by_volume(&self, volumes: &[(String, String)]) -> Value {
        let longest = self.seen.longest.chunks(GUESTS_PER_VOLUME).map(|pair| pair.iter().max().copied());
        let seconds = longest.map(|longest| json!(longest.unwrap_or_default().as_secs_f64()));
        volumes.iter().map(|(name, _)| name.clone()).zip(seconds).collect::<serde_json::Map<_, _>>().into()
    }

    fn json(&self, volumes: &[(String, String)]) -> Value {
        let seen = &self.seen;
        json!({
            "longest_stall_by_volume_s": self.by_volume(volumes),
            "slowest_request": seen.slowest.as_ref().map(|(_, what)| what),
            "fault": self.name,
            "expected": self.expectation,
            "lasted_s": self.lasted.as_secs_f64(),
            "waited_last_for": self.lacked,
            "whole_after_s": self.whole_after.as_secs_f64(),
            "longest_stall_s": self.longest_elsewhere.max(self.longest_at_hit.unwrap_or_default()).as_secs_f64(),
            "longest_stall_at_hit_host_s": self.longest_at_hit.map(|d| d.as_secs_f64()),
            "longest_stall_elsewhere_s": self.longest_elsewhere.as_secs_f64(),
            "requests": seen.requests,
            "repeated_over_another_path": seen.repeated,
            "paths_ended": seen.ended,
            "silent_paths_left": seen.left,
            "errors": seen.errors,
            "mismatches": seen.mismatches,
            "overdue": seen.overdue,
            "failures": seen.failures,
        })
    }
}

/// Everything about a run.
pub struct Report {
    pub seed: u64,
    pub volumes: Vec<(String, String)>,
    pub rows: Vec<Row>,
    pub total: Seen,
    /// Bytes that were read back in the end, over all hosts together.
    pub verified_bytes: u64,
    /// What keeps the run from having passed, besides what guests saw.
    pub failures: Vec<String>,
    pub took: Duration,
}

impl Report {
    pub fn passed(&self) -> bool {
        self.failures.is_empty() && self.total.failed() == 0 && self.verified_bytes > 0
    }

    pub fn json(&self) -> Value {
        let volume = |(name, layout): &(String, String)| json!({ "name": name, "layout": layout });
        json!({
            "passed": self.passed(),
            "seed": self.seed,
            "took_s": self.took.as_secs_f64(),
            "volumes": self.volumes.iter().map(volume).collect::<Vec<_>>(),
            "faults": self.rows.iter().map(|row| row.json(&self.volumes)).collect::<Vec<_>>(),
            "requests": self.total.requests,
            "errors": self.total.errors,
            "mismatches": self.total.mismatches,
            "overdue": self.total.overdue,
            "verified_bytes": self.verified_bytes,
            "failures": self.failures,
        })
    }

    /// The table, and one line below it.
    pub fn text(&self) -> String {
        let mut text = format!(
            "{:<18} {:>7} {:>12} {:>12} {:>7} {:>9} {:>8} {:>7} {:>7} {:>9}\n",
            "fault", "lasted", "stall at its", "stall", "whole", "requests", "repeated", "errors", "wrong", "overdue"
        );
        text += &format!("{:<18} {:>7} {:>12} {:>12} {:>7}\n", "", "s", "own host, s", "elsewhere, s", "after s");
        for row in &self.rows {
            let at_hit = row.longest_at_hit.map_or("-".to_string(), |d| format!("{:.2}", d.as_secs_f64()));
            let seen = &row.seen;
            text += &format!(
                "{:<18} {:>7.1} {:>12} {:>12.2} {:>7.1} {:>9} {:>8} {:>7} {:>7} {:>9}\n",
                row.name,
                row.lasted.as_secs_f64(),
                at_hit,
                row.longest_elsewhere.as_secs_f64(),
                row.whole_after.as_secs_f64(),
                seen.requests,
                seen.repeated,
                seen.errors,
                seen.mismatches,
                seen.overdue
            );
        }
        for failure in self.failures.iter().chain(&self.total.failures) {
            text += &format!("FAILED: {failure}\n");
        }
        let verdict = if self.passed() { "passed" } else { "FAILED" };
        text += &format!(
            "atlas {verdict}: seed {}, {} phases in {:.0} s, {} requests, {} errors, {} mismatches, {} overdue, {} MiB \
             read back through both hosts",
            self.seed,
            self.rows.len(),
            self.took.as_secs_f64(),
            self.total.requests,
            self.total.errors,
            self.total.mismatches,
            self.total.overdue,
            self.verified_bytes >> 20,
        );
        text
    }
}
