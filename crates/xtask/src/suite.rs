//! `./x test`: every part in order, each with its own output, and a table of parts with one sum at the end.
//!
//! A part that fails doesn't stop the others: one run tells everything that is wrong.

use crate::bench::Fleet;
use crate::{dashboard, tidy, tools};
use anyhow::{Context, Result, bail};
use holdfast_lab::program::SKIPPED;
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Tests that are parts of their own, since they take minutes: the swarm's 2,000 seeds, and the hunt for every mutation.
const LONG_TESTS: [&str; 2] = ["random_runs_are_sound_and_repeatable", "every_mutation_is_found"];

/// Machines whose disks are made of this one's packages, where there is none.
const FLEET: &str = "--fleet";

/// Minutes of torture in a test run.
const TORTURE_MINUTES: &str = "2";

/// Lines that are shown once more, at the end, of what a failed test printed: its panic comes last.
const LAST_LINES: usize = 12;

/// Tests counted in one part.
#[derive(Default)]
struct Count {
    passed: u64,
    failed: u64,
    skipped: u64,
    /// Said so while their program runs, whose sum is still to come.
    passed_but_skipped: u64,
    failures: Failures,
}

/// What the tests that failed printed last.
#[derive(Default)]
struct Failures {
    tests: Vec<(String, VecDeque<String>)>,
    /// The lines are those of the last one.
    is_listing: bool,
}

impl Failures {
    /// A line of cargo's tests: each that failed has `---- NAME stdout ----`, and under it all that it printed.
    fn hear(&mut self, line: &str) {
        let title = line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----"));
        if let Some(name) = title {
            self.tests.push((name.to_string(), VecDeque::new()));
            self.is_listing = true;
        } else if line == "failures:" {
            self.is_listing = false;
        } else if let Some((_, lines)) = self.tests.last_mut().filter(|_| self.is_listing && !line.trim().is_empty()) {
            lines.push_back(line.to_string());
            if lines.len() > LAST_LINES {
                lines.pop_front();
            }
        }
    }

    fn show(&self) {
        for (name, lines) in &self.tests {
            println!("\n== {name} failed; its last lines:");
            lines.iter().for_each(|line| println!("{line}"));
        }
    }
}

impl Count {
    /// A line of cargo's tests: the sum of a program, or a test that says that it did not run. That one has passed by
    /// its program's count, which comes later.
    fn hear(&mut self, line: &str) {
        self.failures.hear(line);
        if line.starts_with(SKIPPED) {
            self.skipped += 1;
            self.passed_but_skipped += 1;
        } else if let Some(result) = parse_result_line(line) {
            self.passed += result.passed.saturating_sub(std::mem::take(&mut self.passed_but_skipped));
            self.failed += result.failed;
            self.skipped += result.skipped;
        }
    }
}

struct Part {
    name: &'static str,
    what: &'static str,
    run: fn(&mut Count) -> Result<()>,
}

const PARTS: &[Part] = &[
    Part { name: "fmt", what: "sources are formatted", run: |_| tools::cargo(&["fmt", "--all", "--check"], &[]) },
    Part { name: "tidy", what: "house rules: crate edges, sans-IO, sizes, links, pages", run: |_| tidy::run() },
    Part { name: "clippy", what: "lints, warnings are errors", run: |_| clippy() },
    Part { name: "doc", what: "links in source comments resolve", run: |_| doc() },
    Part { name: "test", what: "unit, property, scenario and command-line tests", run: short_tests },
    Part { name: "sim", what: "simulator swarm, each seed twice", run: |count| long_test(count, LONG_TESTS[0]) },
    Part {
        name: "mutations",
        what: "the swarm finds each deliberate mistake",
        run: |count| long_test(count, LONG_TESTS[1]),
    },
    Part { name: "dashboard", what: "the dashboard in a real browser", run: dashboard_part },
    Part { name: "torture", what: "the real binary under kill -9 and SIGSTOP", run: |_| torture_part() },
];

/// Ubuntu has no Chromium but as a snap, which is not installed unasked.
fn dashboard_part(count: &mut Count) -> Result<()> {
    if dashboard::browser().is_none() {
        println!("{SKIPPED} there is no chromium here; install one, and `./x dashboard` runs it");
        count.skipped += 1;
        return Ok(());
    }
    let outcome = dashboard::run(&[]);
    *(if outcome.is_ok() { &mut count.passed } else { &mut count.failed }) += 1;
    outcome
}

pub fn run(wanted: &[String]) -> Result<()> {
    if wanted.iter().any(|w| w == "--list") {
        for part in PARTS {
            println!("{:10} {}", part.name, part.what);
        }
        return Ok(());
    }
    if let Some(unknown) = wanted.iter().find(|w| PARTS.iter().all(|p| p.name != w.as_str())) {
        bail!("no part '{unknown}'; ./x test --list names them");
    }
    let mut results = Vec::new();
    for part in PARTS.iter().filter(|p| is_chosen(p, wanted)) {
        println!("\n== {}: {}", part.name, part.what);
        let started = Instant::now();
        let mut count = Count::default();
        let outcome = (part.run)(&mut count);
        if let Err(error) = &outcome {
            println!("{}: {error:#}", part.name);
        }
        results.push((part, outcome.is_ok(), count, started.elapsed()));
    }
    summarise(&results)
}

fn is_chosen(part: &Part, wanted: &[String]) -> bool {
    wanted.is_empty() || wanted.iter().any(|w| w == part.name)
}

fn summarise(results: &[(&Part, bool, Count, Duration)]) -> Result<()> {
    results.iter().for_each(|(_, _, count, _)| count.failures.show());
    println!("\n== parts");
    let mut sum = Count::default();
    for (part, ok, count, took) in results {
        let verdict = if *ok { "ok" } else { "FAILED" };
        let tests = if count.passed + count.failed > 0 {
            format!("  {} passed, {} failed, {} skipped", count.passed, count.failed, count.skipped)
        } else {
            String::new()
        };
        println!("{:10} {verdict:7} {:>6.1} s{tests}", part.name, took.as_secs_f64());
        sum.skipped += count.skipped;
        sum.passed += count.passed;
        sum.failed += count.failed;
        // A part counts as one test; the part that counts its own fails once more only where none of its tests did.
        if *ok {
            sum.passed += u64::from(count.passed == 0);
        } else {
            sum.failed += u64::from(count.failed == 0);
        }
    }
    println!("{} passed, {} failed, {} skipped", sum.passed, sum.failed, sum.skipped);
    if sum.failed > 0 {
        bail!("not everything passed");
    }
    Ok(())
}

fn clippy() -> Result<()> {
    tools::cargo(&["clippy", "--workspace", "--all-targets", "--quiet", "--", "--deny", "warnings"], &[])
}

fn doc() -> Result<()> {
    let mut command = tools::cargo_command();
    command.args(["doc", "--workspace", "--no-deps", "--document-private-items", "--quiet"]);
    tools::run(command.env("RUSTDOCFLAGS", "--deny warnings --allow rustdoc::private_intra_doc_links"))
}

fn short_tests(count: &mut Count) -> Result<()> {
    let mut arguments = vec!["--no-fail-fast", "--"];
    for name in LONG_TESTS {
        arguments.extend(["--skip", name]);
    }
    cargo_test(count, &arguments)
}

/// One of the simulator's long tests, with what it says shown. The whole workspace is named, so that nothing is built anew.
fn long_test(count: &mut Count, name: &str) -> Result<()> {
    cargo_test(count, &["--test", "stories", "--", "--nocapture", name])
}

/// Runs cargo's tests with their output passing through, and counts from its closing lines.
fn cargo_test(count: &mut Count, arguments: &[&str]) -> Result<()> {
    let mut command = tools::cargo_command();
    command.args(["test", "--workspace"]).args(arguments).stdout(Stdio::piped());
    let mut child = command.spawn().context("cannot start cargo test")?;
    let lines = BufReader::new(child.stdout.take().expect("standard output is piped")).lines();
    for line in lines {
        let line = line?;
        writeln!(std::io::stdout(), "{line}")?;
        count.hear(&line);
    }
    let status = child.wait()?;
    if !status.success() {
        bail!("cargo test failed ({status})");
    }
    if count.passed == 0 {
        bail!("cargo test ran no test");
    }
    Ok(())
}

/// Reads `test result: ok. 12 passed; 0 failed; 1 ignored; …`.
fn parse_result_line(line: &str) -> Option<Count> {
    let rest = line.strip_prefix("test result: ")?;
    let (_, counts) = rest.split_once(". ")?;
    let number = |what: &str| {
        counts.split("; ").find_map(|part| part.strip_suffix(what)?.trim().parse::<u64>().ok()).unwrap_or(0)
    };
    Some(Count { passed: number("passed"), failed: number("failed"), skipped: number("ignored"), ..Count::default() })
}

/// `./x sim …`: the simulator with assertions kept; its own usage message says the rest.
pub fn simulate(arguments: &[String]) -> Result<()> {
    tools::build_checked(&["holdfast-sim"])?;
    tools::run(Command::new(tools::checked_program("holdfast-sim")).args(arguments))
}

fn torture_part() -> Result<()> {
    torture(&["--minutes".into(), TORTURE_MINUTES.into()])
}

/// `./x torture …`: against the binary with assertions kept, in a directory of its own under the target directory.
pub fn torture(arguments: &[String]) -> Result<()> {
    tools::build_checked(&["holdfast", "holdfast-torture"])?;
    let mut torture = Command::new(tools::checked_program("holdfast-torture"));
    torture.arg("--binary").arg(tools::checked_program("holdfast"));
    let Some(at) = arguments.iter().position(|argument| argument == FLEET) else {
        return tools::run(torture.args(arguments));
    };
    let images = std::env::temp_dir().join(format!("holdfast-fleet-{}", std::process::id()));
    std::fs::create_dir(&images).with_context(|| format!("cannot make {}", images.display()))?;
    let (before, after) = arguments.split_at(at);
    let outcome =
        Fleet::make(&images).and_then(|()| tools::run(torture.args(before).arg(FLEET).arg(&images).args(&after[1..])));
    std::fs::remove_dir_all(&images).with_context(|| format!("cannot remove {}", images.display()))?;
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_lines_of_cargo_test_are_counted() {
        let line = "test result: FAILED. 12 passed; 3 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.5s";
        let count = parse_result_line(line).expect("it is a closing line");
        assert_eq!((count.passed, count.failed, count.skipped), (12, 3, 1));
        assert!(parse_result_line("test foo ... ok").is_none());
        let mut count = Count::default();
        for line in ["skipped: no loop devices here", "test foo ... ok", line, line] {
            count.hear(line);
        }
        assert_eq!((count.passed, count.failed, count.skipped), (23, 6, 3), "a test that did not run has not passed");
    }

    #[test]
    fn what_a_failed_test_printed_last_is_kept() {
        let mut count = Count::default();
        let begin = ["test a ... ok", "test m::b ... FAILED", "", "failures:", "", "---- m::b stdout ----"];
        let printed: Vec<String> = (0..20).map(|n| format!("line {n}")).collect();
        let end = ["", "thread 'm::b' panicked at b.rs:1:", "it is so", "", "failures:", "    m::b", "not of it"];
        begin.into_iter().chain(printed.iter().map(String::as_str)).chain(end).for_each(|line| count.hear(line));
        let [(name, lines)] = &count.failures.tests[..] else { panic!("one test failed") };
        assert_eq!((name.as_str(), lines.len()), ("m::b", LAST_LINES));
        assert_eq!((lines[0].as_str(), lines[LAST_LINES - 1].as_str()), ("line 10", "it is so"));
    }
}
