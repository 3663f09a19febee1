//! Ratchets: counts of what is to become less. None may grow; one that has gone down is lowered here, so that it stays
//! down.

use super::Finding;
use super::source::Source;
use std::path::Path;

struct Ratchet {
    /// Where it is counted.
    within: &'static str,
    what: &'static str,
    most: usize,
    count: fn(&Source) -> usize,
}

const RATCHETS: &[Ratchet] = &[
    Ratchet {
        within: "crates/volume/src",
        what: "files with `impl Controller`: parts own their fields, and name no controller",
        most: 18,
        count: |source| usize::from(source.code.contains("\nimpl Controller {")),
    },
    Ratchet {
        within: "crates",
        what: "functions that take a tuple apart among their parameters: give it a name",
        most: 86,
        count: |source| source.tuple_parameters().len(),
    },
];

pub fn check(sources: &[Source]) -> Vec<Finding> {
    RATCHETS.iter().filter_map(|ratchet| compare(ratchet, sources)).collect()
}

fn compare(ratchet: &Ratchet, sources: &[Source]) -> Option<Finding> {
    let within = sources.iter().filter(|source| source.path.starts_with(ratchet.within));
    let found: usize = within.map(|source| (ratchet.count)(source)).sum();
    let text = match found.cmp(&ratchet.most) {
        std::cmp::Ordering::Equal => return None,
        std::cmp::Ordering::Greater => format!("{found} {}; at most {}", ratchet.what, ratchet.most),
        std::cmp::Ordering::Less => {
            format!("{found} {}; lower the ratchet from {} in tidy/ratchet.rs", ratchet.what, ratchet.most)
        }
    };
    Some(Finding::error(Path::new(ratchet.within), 0, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratchet_neither_grows_nor_stays_where_it_was() {
        let ratchet = |most| Ratchet { most, ..RATCHETS[0] };
        let source = |path, text: &str| Source::new(Path::new(path), text.to_string());
        let sources = [
            source("crates/volume/src/a.rs", "//! A.\nimpl Controller {\n}\nimpl Controller {\n}\n"),
            source("crates/volume/src/b.rs", "//! B.\n// impl Controller {\n"),
            source("crates/store/src/c.rs", "//! C.\nimpl Controller {\n}\n"),
        ];
        assert!(compare(&ratchet(1), &sources).is_none());
        assert!(compare(&ratchet(0), &sources).is_some_and(|finding| finding.text.contains("at most 0")));
        assert!(compare(&ratchet(2), &sources).is_some_and(|finding| finding.text.contains("lower the ratchet")));
    }
}
