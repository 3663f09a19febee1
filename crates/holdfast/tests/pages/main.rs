//! What pages of the documentation show is typed here as it stands, block by block, into a shell of a fresh user, at the
//! machine that the prompt names.
//!
//! Each block of commands has to succeed to its end. What a block takes for granted (a volume of that name, a file) is
//! made before. What would take long is shortened, and what this machine has not got is replaced: both are said where it
//! is done.

mod integrate;
mod machines;
mod one_machine;
mod prometheus;
mod reader;
#[path = "../support/mod.rs"]
mod support;

use std::path::Path;

/// The tests that type pages.
const TYPISTS: [&str; 3] = [include_str!("integrate.rs"), include_str!("machines.rs"), include_str!("one_machine.rs")];

/// Each command of it is given by the tests of `runbook`.
const PLAYED: &str = "operate/runbook.md";

#[test]
fn each_page_for_users_is_typed_by_a_test() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let mut pages = vec!["../README.md".to_string(), "start.md".to_string()];
    for directory in ["operate", "integrate"] {
        let names = docs.join(directory).read_dir().unwrap().map(|entry| entry.unwrap().file_name());
        pages.extend(names.map(|name| format!("{directory}/{}", name.to_string_lossy())));
    }
    assert!(pages.len() > 15, "{pages:?}");
    // An opened page fails its test where a block is left over.
    let is_typed = |page: &String| TYPISTS.iter().any(|test| test.contains(&format!("Page::open(\"{page}\")")));
    pages.retain(|page| page != PLAYED && !is_typed(page));
    assert!(pages.is_empty(), "no test types {pages:?}");
}
