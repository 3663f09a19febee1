//! Policies of volumes, their limits above all, as the records tell of them and operators set them.
//!
//! ```text
//! limits/ID      (metadata) of a volume or clone: what its policy is told
//! ```
//! A clone begins with that of what it was made of. A host keeps to it by the policy of a tenant; see [`holdfast_host`].
//! Where the words of the filter `limit` say all of it, it is told in these, since hosts of earlier releases keep to it by
//! one. Else they are told what of it they can keep to.

use super::catalog::Entry;
use super::control::ControlPlane;
use anyhow::Result;
use holdfast_api::{Code, refuse};
use holdfast_filter::is_limit;
use holdfast_format::meta::{LimitRecord, Other};
use holdfast_host::{QosPolicy, policy_of};

/// What takes a policy away.
pub const NONE: &str = "none";

/// Words that no policy has: of a record that can't be read.
const UNREADABLE: &str = "";

/// A limit of requests that never holds anybody: a host of an earlier release can't be told that there is none.
const UNLIMITED: &str = "iops=1000000000";

/// What a record tells: one that is damaged, or of a later release, is the trouble of its volume alone.
pub fn words_of(record: Result<LimitRecord>) -> String {
    match record {
        Err(_) => UNREADABLE.to_string(),
        // A host of an earlier release changes the limit alone: then that is what was asked for last.
        Ok(LimitRecord { limit, qos, .. }) => qos.filter(|words| record_of(words).limit == limit).unwrap_or(limit),
    }
}

/// The record of words that make a policy.
pub fn record_of(words: &str) -> LimitRecord {
    let told = |limit: &str, qos: Option<&str>| LimitRecord {
        limit: limit.to_string(),
        qos: qos.map(str::to_string),
        other: Other::new(),
    };
    if is_limit(words) {
        return told(words, None);
    }
    let policy = words.parse::<QosPolicy>().unwrap_or_default();
    let (iops, bytes) = (policy.iops.map(|iops| format!("iops={iops}")), policy.bytes.map(|b| format!("bytes={b}")));
    let limit = [iops, bytes].into_iter().flatten().collect::<Vec<_>>().join(",");
    told(if is_limit(&limit) { &limit } else { UNLIMITED }, Some(words))
}

/// What an operator asks for: a policy, or that there be none.
pub fn parse(words: &str) -> Result<Option<LimitRecord>> {
    if words == NONE {
        return Ok(None);
    }
    match policy_of(words) {
        Ok(_) => Ok(Some(record_of(words))),
        Err(error) => refuse!(
            Code::Invalid,
            "`{words}` is no limit and no policy: {error}; write it like iops=500,bytes=50MiB or weight=400,limit=500, or `{NONE}`"
        ),
    }
}

/// What takes the place of a record; one that can't be read is replaced: so a limit of a later release can be had away.
pub fn after(found: Option<&[u8]>, limit: &LimitRecord) -> LimitRecord {
    let before = found.and_then(|bytes| holdfast_format::meta::decode::<LimitRecord>(bytes).ok());
    LimitRecord { other: before.map(|before| before.other).unwrap_or_default(), ..limit.clone() }
}

/// What a policy promises.
pub fn floor_of(words: &str) -> Option<u64> {
    policy_of(words).ok()?.floor
}

pub fn floor_of_record(record: &LimitRecord) -> Option<u64> {
    floor_of(&words_of(Ok(record.clone())))
}

/// All of a policy but its floor; nothing where that is nothing.
pub fn without_floor(record: LimitRecord) -> Option<LimitRecord> {
    let words = words_of(Ok(record.clone()));
    match policy_of(&words) {
        Ok(policy) if policy.floor.is_some() => {
            let rest = QosPolicy { floor: None, ..policy };
            (rest != QosPolicy::default()).then(|| LimitRecord { other: record.other, ..record_of(&rest.to_string()) })
        }
        _ => Some(record),
    }
}

impl ControlPlane {
    pub(super) fn set_limit(&self, entry: &Entry, limit: Option<&LimitRecord>) -> Result<()> {
        match limit.and_then(|limit| Some((limit, floor_of_record(limit)?))) {
            Some((limit, floor)) => self.promise_floor(entry, floor, limit)?,
            None => self.catalog.set_limit(entry.id(), limit)?,
        }
        self.take_in_access()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_is_told_to_older_hosts_as_far_as_they_can_keep_to_it() {
        let told = |words: &str| parse(words).unwrap().map(|record| (record.limit, record.qos));
        let older = |limit: &str, words: &str| Some((limit.to_string(), Some(words.to_string())));
        assert_eq!(told("iops=500,bytes=50MiB"), Some(("iops=500,bytes=50MiB".to_string(), None)));
        assert_eq!(told("none"), None);
        assert_eq!(told("weight=7"), older(UNLIMITED, "weight=7"));
        assert_eq!(told("iops=500,weight=7"), older("iops=500", "iops=500,weight=7"));
        assert_eq!(told("limit=5/1M,burst=9/1s"), older("iops=5,bytes=1048576", "limit=5/1M,burst=9/1s"));
        assert!([UNLIMITED, "iops=5,bytes=1048576"].into_iter().all(is_limit));
        for wrong in ["", ",", "iops=0", "500", "burst=1s", "ios=3", "weight=0", "latency=1h"] {
            let error = parse(wrong).unwrap_err().to_string();
            assert!(error.contains("iops=500,bytes=50MiB") && error.contains("none"), "{error}");
        }
        assert_eq!(told("floor=100"), older(UNLIMITED, "floor=100"));
        assert!(policy_of(UNREADABLE).is_err());
    }

    #[test]
    fn a_clone_begins_with_the_policy_of_its_origin_but_for_the_floor() {
        let rest = |words: &str| without_floor(record_of(words)).map(|record| words_of(Ok(record)));
        assert_eq!(rest("floor=100"), None);
        assert_eq!(rest("floor=100,weight=7").as_deref(), Some("weight=7"));
        assert_eq!(rest("floor=100,limit=500").as_deref(), Some("limit=500"));
        assert_eq!(rest("iops=500").as_deref(), Some("iops=500"));
        let unreadable = LimitRecord { limit: "later".into(), qos: None, other: Other::new() };
        assert_eq!(without_floor(unreadable.clone()), Some(unreadable));
    }

    #[test]
    fn a_record_tells_all_of_a_policy_or_nothing() {
        let words = |record: LimitRecord| words_of(Ok(record));
        assert_eq!(words(record_of("weight=7,limit=5")), "weight=7,limit=5");
        assert_eq!(words(record_of("iops=5")), "iops=5");
        let older = LimitRecord { limit: "iops=9".into(), ..record_of("weight=7,limit=5") };
        assert_eq!(words(older), "iops=9", "what a host of an earlier release has set since");
        assert_eq!(words_of(Err(anyhow::anyhow!("damaged"))), UNREADABLE);
    }
}
