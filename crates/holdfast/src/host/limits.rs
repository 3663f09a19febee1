//! Limits of volumes, as the records tell of them and operators set them.
//!
//! ```text
//! limits/ID      (metadata) of a volume or clone: what its limit is told
//! ```
//! A clone begins with that of what it was made of. A host keeps to it by the policy of a tenant; see [`holdfast_host`].
//! It is told in the words of the filter `limit`, since hosts of earlier releases keep to it by one.

use super::catalog::Entry;
use super::control::ControlPlane;
use anyhow::Result;
use holdfast_api::{Code, refuse};
use holdfast_filter::build;
use holdfast_host::policy_of;

/// What takes a limit away.
pub const NONE: &str = "none";

/// Words that no limit has: of a record that can't be read.
const UNREADABLE: &str = "";

/// What a record tells: one that is damaged, or of a later release, is the trouble of its volume alone.
pub fn words_of(record: Result<String>) -> String {
    record.unwrap_or_else(|_| UNREADABLE.to_string())
}

/// What an operator asks for: a limit, or that there be none.
pub fn parse(words: &str) -> Result<Option<String>> {
    if words == NONE {
        return Ok(None);
    }
    let error = match (policy_of(words), build(&format!("limit:{words}"))) {
        (Ok(_), Ok(_)) => return Ok(Some(words.to_string())),
        (Err(error), _) => error.to_string(),
        (_, Err(error)) => error.to_string(),
    };
    refuse!(Code::Invalid, "`{words}` is no limit: {error}; write it like iops=500,bytes=50MiB, or `{NONE}`")
}

impl ControlPlane {
    pub(super) fn set_limit(&self, entry: &Entry, limit: Option<&str>) -> Result<()> {
        self.catalog.set_limit(entry.id(), limit)?;
        self.take_in_access()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_told_in_the_words_of_its_layer() {
        assert_eq!(parse("iops=500,bytes=50MiB").unwrap().as_deref(), Some("iops=500,bytes=50MiB"));
        assert_eq!(parse("none").unwrap(), None);
        // The last ones make policies that earlier releases can't keep to.
        for wrong in ["", "iops=0", "500", "burst=1s", "ios=3", "limit=500", "iops=500,weight=7", "iops=5,burst=9/1s"] {
            let error = parse(wrong).unwrap_err().to_string();
            assert!(error.contains("iops=500,bytes=50MiB") && error.contains("none"), "{error}");
        }
        assert!(policy_of(UNREADABLE).is_err());
    }
}
