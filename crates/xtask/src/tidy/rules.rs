//! Rules for Rust files.

use super::Finding;
use super::source::Source;
use std::path::Path;

const FILE_LINES_MAX: usize = 1500;
const FUNCTION_LINES_MAX: usize = 70;

/// Crates that decide without I/O: state machines that take the time as an argument.
const SANS_IO: &[&str] = &[
    "api", "base", "cipher", "cluster", "compress", "erasure", "format", "frontend", "filter", "host", "qos", "sim",
    "stages", "store", "verdict", "volume",
];

/// Sources in those crates that are shells, not machines: the simulator's program reports, counts seconds, and runs seeds
/// side by side.
const SHELLS: &[&str] = &["crates/sim/src/bin/", "crates/sim/src/runner.rs"];

/// What a machine may not name: clocks, files, sockets (addresses are data), threads, the environment, an executor.
const FORBIDDEN_PATHS: &[&str] = &[
    "std::time::Instant",
    "std::time::SystemTime",
    "std::time::UNIX_EPOCH",
    "std::time::*",
    "std::fs",
    "std::net::TcpStream",
    "std::net::TcpListener",
    "std::net::UdpSocket",
    "std::net::ToSocketAddrs",
    "std::net::*",
    "std::os",
    "std::thread",
    "std::process",
    "std::env",
    "std::io",
    "std::sync::mpsc",
    "std::sync::Condvar",
    "std::sync::Mutex",
    "std::sync::RwLock",
    "tokio",
    "async_std",
    "rand",
];

/// Modules that may not be imported under their own name: what comes through it would not be seen here.
const FORBIDDEN_ALIASES: &[&str] = &["std", "std::net", "std::time", "std::sync", "std::*"];

/// Names without a path. The order of a `HashMap` differs from run to run, and a run must follow from its seed alone.
const FORBIDDEN_NAMES: &[&str] = &["HashMap", "HashSet", "RandomState", "async", "await"];

/// A machine says nothing; the simulator around it may print its trace.
const PRINTING: &[&str] = &["println", "eprintln", "print", "eprint"];

/// Where `unsafe` may stand, besides tests and benches (an allocator that counts, say).
const UNSAFE_ALLOWED: &[&str] = &["crates/base/src/buf.rs", "crates/erasure/src/kernel/", "crates/runtime/"];

/// What must not be left behind, anywhere.
const LEFT_BEHIND: &[&str] = &["todo", "unimplemented", "dbg"];

pub fn check(source: &Source, is_test_module: bool) -> Vec<Finding> {
    let mut findings = Vec::new();
    check_sizes(source, &mut findings);
    check_header(source, &mut findings);
    check_left_behind(source, &mut findings);
    check_unsafe(source, &mut findings);
    if is_machine(&source.path) && !is_test_module {
        check_machine(source, &mut findings);
    }
    findings
}

fn starts_with_any(path: &Path, prefixes: &[&str]) -> bool {
    let path = path.to_string_lossy();
    prefixes.iter().any(|prefix| path.starts_with(prefix))
}

fn is_machine(path: &Path) -> bool {
    SANS_IO.iter().any(|name| path.starts_with(format!("crates/{name}/src"))) && !starts_with_any(path, SHELLS)
}

fn check_sizes(source: &Source, findings: &mut Vec<Finding>) {
    let lines = source.text.lines().count();
    if lines > FILE_LINES_MAX {
        let text = format!("{lines} lines, at most {FILE_LINES_MAX}: this is more than one module");
        findings.push(Finding::error(&source.path, 0, text));
    }
    for function in source.functions().into_iter().filter(|f| f.lines > FUNCTION_LINES_MAX) {
        let text = format!("fn {} has {} lines, aim for {FUNCTION_LINES_MAX}", function.name, function.lines);
        findings.push(Finding::warning(&source.path, function.line, text));
    }
}

/// Every module says in its first lines what it owns. A file of tests speaks for itself.
fn check_header(source: &Source, findings: &mut Vec<Finding>) {
    let in_src = source.path.components().any(|c| c.as_os_str() == "src");
    let is_tests = source.path.file_stem().is_some_and(|stem| stem == "tests");
    let begins = source.text.trim_start().starts_with("//!");
    if in_src && !is_tests && !begins {
        findings.push(Finding::error(&source.path, 1, "no module comment (//!) saying what it owns and promises"));
    }
}

fn check_left_behind(source: &Source, findings: &mut Vec<Finding>) {
    for (at, word) in source.identifiers() {
        if LEFT_BEHIND.contains(&word) && source.code[at + word.len()..].starts_with('!') {
            findings.push(Finding::error(&source.path, source.line_at(at), format!("{word}! left behind")));
        }
    }
    // Split, so that this line is not its own finding.
    let marks = [concat!("FIX", "ME"), concat!("TO", "DO"), concat!("XX", "X")];
    for (number, line) in source.text.lines().enumerate() {
        let words = || line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        if let Some(mark) = marks.iter().find(|mark| words().any(|word| word == **mark)) {
            findings.push(Finding::error(&source.path, number + 1, format!("{mark} left behind")));
        }
    }
}

fn check_unsafe(source: &Source, findings: &mut Vec<Finding>) {
    let is_test = source.path.components().any(|c| matches!(c.as_os_str().to_str(), Some("tests" | "benches")));
    let allowed = is_test || starts_with_any(&source.path, UNSAFE_ALLOWED);
    let lines: Vec<&str> = source.text.lines().collect();
    for (at, _) in source.identifiers().filter(|(_, word)| *word == "unsafe") {
        let line = source.line_at(at);
        if !allowed {
            findings.push(Finding::error(
                &source.path,
                line,
                "unsafe outside base::buf, the erasure kernels and runtime",
            ));
        }
        let opens_block = source.code[at + "unsafe".len()..].trim_start().starts_with('{');
        if allowed && !is_test && opens_block && !has_safety_comment(&lines, line) {
            findings.push(Finding::error(&source.path, line, "an unsafe block without a SAFETY comment above it"));
        }
    }
}

/// Whether the comment over the statement that `line` (1-based) belongs to says why the block is sound.
fn has_safety_comment(lines: &[&str], line: usize) -> bool {
    const STATEMENT_LINES_MAX: usize = 4;
    let before = lines[..line - 1].iter().rev();
    let mut comment_seen = false;
    for (distance, text) in before.map(|l| l.trim()).enumerate() {
        if text.starts_with("//") {
            comment_seen = true;
            if text.contains("SAFETY:") {
                return true;
            }
        } else if comment_seen || distance >= STATEMENT_LINES_MAX {
            return false;
        }
    }
    false
}

fn check_machine(source: &Source, findings: &mut Vec<Finding>) {
    let tests = source.test_spans();
    let is_test = |at: usize| tests.iter().any(|span| span.contains(&at));
    for named in source.paths().into_iter().filter(|p| !is_test(p.at)) {
        let path = named.path.replacen("core::", "std::", 1);
        let under = |prefix: &&&str| path == **prefix || path.starts_with(&format!("{prefix}::"));
        let is_alias = FORBIDDEN_ALIASES.contains(&path.as_str());
        if is_alias || FORBIDDEN_PATHS.iter().find(under).is_some() {
            let text = format!("{path} in a machine: time, I/O and threads belong to the shell");
            findings.push(Finding::error(&source.path, named.line, text));
        }
    }
    for (at, word) in source.identifiers().filter(|(at, _)| !is_test(*at)) {
        let prints = PRINTING.contains(&word) && !source.path.starts_with("crates/sim");
        if prints || FORBIDDEN_NAMES.contains(&word) {
            let text = format!("{word} in a machine: every run must follow from its seed, without waiting or printing");
            findings.push(Finding::error(&source.path, source.line_at(at), text));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errors(path: &str, text: &str) -> Vec<String> {
        check(&Source::new(Path::new(path), text.to_string()), false).into_iter().map(|f| f.text).collect()
    }

    #[test]
    fn machines_may_not_name_clocks_files_or_hash_maps() {
        let path = "crates/volume/src/a.rs";
        assert_eq!(errors(path, "//! A.\nuse std::time::Duration;\n"), Vec::<String>::new());
        assert_eq!(errors(path, "//! A.\nuse std::{time::Instant, fs};\n").len(), 2);
        assert_eq!(errors(path, "//! A.\nuse std::time;\n").len(), 1);
        assert_eq!(errors(path, "//! A.\nuse std::collections::HashMap;\n").len(), 1);
        assert_eq!(errors(path, "//! A.\nasync fn f() {}\n").len(), 1);
        assert_eq!(errors(path, "//! A.\n#[cfg(test)]\nmod tests { use std::fs; }\n").len(), 0);
        assert_eq!(errors("crates/runtime/src/a.rs", "//! A.\nuse std::fs;\n").len(), 0);
        assert_eq!(errors("crates/sim/src/bin/b.rs", "//! A.\nuse std::time::Instant;\n").len(), 0);
    }

    #[test]
    fn unsafe_needs_a_place_and_a_reason() {
        let block = "//! A.\nfn f() {\n    // SAFETY: it is.\n    let x = unsafe { g() };\n}\n";
        assert!(errors("crates/runtime/src/a.rs", block).is_empty());
        assert_eq!(errors("crates/volume/src/a.rs", block).len(), 1);
        assert_eq!(errors("crates/runtime/src/a.rs", "//! A.\nfn f() {\n    unsafe { g() }\n}\n").len(), 1);
    }

    #[test]
    fn headers_sizes_and_leftovers_are_seen() {
        assert_eq!(errors("crates/base/src/a.rs", "fn f() {}\n").len(), 1);
        assert_eq!(errors("crates/base/src/a/tests.rs", "fn f() {}\n").len(), 0);
        assert_eq!(errors("crates/base/src/a.rs", &format!("//! A.\nfn f() {{ {}!() }}\n", "todo")).len(), 1);
        assert_eq!(errors("crates/base/src/a.rs", &format!("//! A.\n// {}: later\n", concat!("FIX", "ME"))).len(), 1);
        assert_eq!(errors("crates/base/src/a.rs", &format!("//! A.\n{}", "\n".repeat(1500))).len(), 1);
        let long = format!("//! A.\nfn f() {{\n{}}}\n", "    g();\n".repeat(70));
        assert_eq!(errors("crates/base/src/a.rs", &long).len(), 1);
    }
}
