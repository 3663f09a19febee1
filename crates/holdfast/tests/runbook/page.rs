//! The page, and how its rows are played: each phrase is seen, each command is given, once and in its order.

use crate::support::{Grid, text};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// What commands begin with: every code span of a row is a command.
const PROGRAMS: [&str; 9] = ["holdfast", "etcdctl", "systemctl", "timedatectl", "fstrim", "kill", "mv", "rm", "tail"];

/// How long an event may take to be seen, and to be over.
const PATIENCE: Duration = Duration::from_secs(180);

/// A command, and what it is to say.
#[derive(Clone, Debug)]
struct Step {
    command: String,
    phrases: Vec<String>,
}

/// One event of the page.
#[derive(Clone, Debug)]
struct Row {
    seen: Vec<Step>,
    check: Vec<Step>,
    act: Vec<Step>,
}

/// Rows of the page by their titles, in its order.
fn rows() -> Vec<(String, Row)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/operate/runbook.md");
    let page = std::fs::read_to_string(path).unwrap();
    let mut rows: Vec<(String, Row)> = Vec::new();
    let mut items: Vec<String> = Vec::new();
    let mut begin = |title: Option<&str>, items: &mut Vec<String>| {
        if let Some((title, row)) = rows.last_mut() {
            let named = |name: &str| {
                let found = items.iter().find_map(|item| item.strip_prefix(name));
                steps(found.unwrap_or_else(|| panic!("the row \"{title}\" has no {name}")))
            };
            *row = Row { seen: named("Seen:"), check: named("Check:"), act: named("Do:") };
        }
        items.clear();
        if let Some(title) = title {
            rows.push((title.replace('`', ""), Row { seen: Vec::new(), check: Vec::new(), act: Vec::new() }));
        }
    };
    for line in page.lines() {
        let title = line.strip_prefix("**").and_then(|rest| rest.strip_suffix("**"));
        if title.is_some() {
            begin(title, &mut items);
        } else if let Some(item) = line.strip_prefix("- ") {
            items.push(item.to_string());
        } else if let Some((more, item)) = line.strip_prefix("  ").zip(items.last_mut()) {
            item.push(' ');
            item.push_str(more);
        }
    }
    begin(None, &mut items);
    rows
}

/// The commands of an item, each with the phrases in quotation marks that come after it.
fn steps(item: &str) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let mut rest = item;
    while let Some(at) = rest.find(['`', '"']) {
        let mark = rest[at..].chars().next().unwrap();
        let (span, after) = rest[at + 1..].split_once(mark).unwrap_or_else(|| panic!("{mark} has no end: {item}"));
        rest = after;
        if mark == '"' {
            let step = steps.last_mut().unwrap_or_else(|| panic!("no command says \"{span}\": {item}"));
            step.phrases.push(span.to_string());
        } else {
            let program = span.split(' ').next().unwrap();
            assert!(PROGRAMS.contains(&program), "`{span}` is no command: {item}");
            steps.push(Step { command: span.to_string(), phrases: Vec::new() });
        }
    }
    steps
}

pub fn titles() -> Vec<String> {
    rows().into_iter().map(|(title, _)| title).collect()
}

/// A machine of a test's grid, at which an operator sits.
pub struct Machine {
    pub grid: Grid,
    /// Programs that stand in for others come first there; and whatever else lies about.
    pub desk: tempfile::TempDir,
}

/// What words in capitals stand for.
pub type Fill<'a> = &'a [(&'a str, &'a str)];

impl Machine {
    pub fn new(index: u16) -> Machine {
        Machine { grid: Grid::new(index), desk: tempfile::Builder::new().prefix("hf").tempdir().unwrap() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.desk.path().join(name)
    }

    /// A disk that nobody has used; its path.
    pub fn disk(&self, name: &str, size: u64) -> String {
        let path = self.path(name);
        std::fs::File::create(&path).unwrap().set_len(size).unwrap();
        path.display().to_string()
    }

    /// Gives a command as an operator does who works at this machine.
    pub fn gives(&self, line: &str) -> Output {
        let own = Path::new(env!("CARGO_BIN_EXE_holdfast")).parent().unwrap().display();
        let path = format!("{}:{own}:{}", self.desk.path().display(), std::env::var("PATH").unwrap());
        let mut command = Command::new("timeout");
        command.args(["180", "sh", "-c", line]).env("PATH", path).env("HOLDFAST_DIR", self.grid.dir.path());
        command.stdin(std::process::Stdio::null()).output().unwrap()
    }

    /// The same, of one that must succeed.
    pub fn ok(&self, line: &str) -> String {
        let output = self.gives(line);
        assert!(output.status.success(), "{line}: {}", said(&output));
        said(&output)
    }

    /// The same, again while etcd has not seen its members connected for the 5 s that it wants.
    fn does(&self, line: &str) -> String {
        let end = Instant::now() + PATIENCE;
        loop {
            let output = self.gives(line);
            if output.status.success() || !said(&output).contains("unhealthy cluster") || Instant::now() > end {
                assert!(output.status.success(), "{line}: {}", said(&output));
                return said(&output);
            }
            std::thread::sleep(Duration::from_millis(500));
        }
    }

    /// Waits until the command says that.
    pub fn sees(&self, line: &str, phrase: &str) {
        let end = Instant::now() + PATIENCE;
        loop {
            let said = said(&self.gives(line));
            if holds(&said, phrase) {
                return;
            }
            assert!(Instant::now() < end, "`{line}` does not say \"{phrase}\": {said}");
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// Waits until all is well.
    pub fn is_well(&self) {
        let end = Instant::now() + PATIENCE;
        loop {
            let output = self.gives("holdfast status");
            if output.status.success() {
                return;
            }
            assert!(Instant::now() < end, "not all is well: {}", said(&output));
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

/// Where a test that fails was, and when.
fn tell(what: &str) {
    static BEGIN: OnceLock<Instant> = OnceLock::new();
    eprintln!("{:4} s {what}", BEGIN.get_or_init(Instant::now).elapsed().as_secs());
}

/// Of a node (`node2`), or of the `host`.
pub fn pid(grid: &Grid, process: &str) -> String {
    grid.pid(process).unwrap().to_string()
}

fn said(output: &Output) -> String {
    text(&output.stdout) + &text(&output.stderr)
}

/// Whether a line has the parts of the phrase, in this order.
fn holds(said: &str, phrase: &str) -> bool {
    let has = |line: &str| {
        let mut rest = line;
        phrase.split('…').all(|part| {
            let Some((_, after)) = rest.split_once(part.trim()) else { return false };
            rest = after;
            true
        })
    };
    said.lines().any(has)
}

/// The command, with what its words in capitals stand for.
fn filled(command: &str, fill: Fill) -> String {
    let is_of_word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    let (mut line, mut rest) = (String::new(), command);
    while let Some(next) = rest.chars().next() {
        let is_begin = next.is_ascii_uppercase() && !line.chars().next_back().is_some_and(is_of_word);
        let len = rest.find(|c: char| !c.is_ascii_uppercase() && c != '_').unwrap_or(rest.len());
        if !is_begin || len < 2 {
            line.push(next);
            rest = &rest[next.len_utf8()..];
            continue;
        }
        let word = if rest.starts_with("NODE/N") { "NODE/N" } else { &rest[..len] };
        let value = fill.iter().find_map(|(of, value)| (*of == word).then_some(*value));
        line.push_str(value.unwrap_or_else(|| panic!("nothing is known of {word}: {command}")));
        rest = &rest[word.len()..];
    }
    line
}

/// A row that is being played: to its end, or the test fails.
pub struct Play {
    title: String,
    seen: std::vec::IntoIter<(String, String)>,
    check: std::vec::IntoIter<Step>,
    act: std::vec::IntoIter<Step>,
}

impl Play {
    fn of(title: &str, row: Row) -> Play {
        tell(&format!("== {title}"));
        let phrases = |step: Step| {
            // Where nothing is quoted it is looked all the same.
            let phrases = if step.phrases.is_empty() { vec![String::new()] } else { step.phrases };
            phrases.into_iter().map(move |phrase| (step.command.clone(), phrase))
        };
        let seen: Vec<(String, String)> = row.seen.into_iter().flat_map(phrases).collect();
        let is_silent = [&row.check, &row.act].into_iter().flatten().all(|step| step.phrases.is_empty());
        assert!(is_silent, "{title}: what is in quotation marks is looked for where the event is seen");
        Play {
            title: title.to_string(),
            seen: seen.into_iter(),
            check: row.check.into_iter(),
            act: row.act.into_iter(),
        }
    }

    /// Looks until the next of the phrases can be read.
    pub fn seen(&mut self, at: &Machine, fill: Fill) {
        let (command, phrase) = self.seen.next().unwrap_or_else(|| panic!("{}: nothing else is seen", self.title));
        at.sees(&filled(&command, fill), &phrase);
    }

    /// Looks where the page says, at all places.
    pub fn checked(&mut self, at: &Machine, fill: Fill) {
        for step in self.check.by_ref() {
            let line = filled(&step.command, fill);
            let output = at.gives(&line);
            // A state that is not well is told all the same.
            let is_told = line == "holdfast status" || line.starts_with("etcdctl");
            assert!(output.status.success() || is_told, "{}: {line}: {}", self.title, said(&output));
        }
    }

    /// Gives the next command, which has to succeed.
    pub fn done(&mut self, at: &Machine, fill: Fill) -> String {
        self.done_at_each(&[at], fill)
    }

    /// The same, of one that the page has at several machines.
    pub fn done_at_each(&mut self, machines: &[&Machine], fill: Fill) -> String {
        let step = self.act.next().unwrap_or_else(|| panic!("{}: nothing else is to be done", self.title));
        let line = filled(&step.command, fill);
        tell(&format!("# {line}"));
        let said: String = machines.iter().map(|at| at.does(&line)).collect();
        said.lines().for_each(|line| tell(&format!("  {line}")));
        said
    }
}

impl Drop for Play {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let left = (self.seen.next(), self.check.next(), self.act.next());
            let is_all = left.0.is_none() && left.1.is_none() && left.2.is_none();
            assert!(is_all, "{}: this was left out: {left:?}", self.title);
        }
    }
}

/// Rows that one test plays.
pub struct Book(BTreeMap<String, Row>);

impl Book {
    pub fn of(titles: &[&str]) -> Book {
        let mut all: BTreeMap<String, Row> = rows().into_iter().collect();
        let take = |title: &&str| {
            let row = all.remove(*title).unwrap_or_else(|| panic!("the page has no row \"{title}\""));
            (title.to_string(), row)
        };
        Book(titles.iter().map(take).collect())
    }

    pub fn open(&mut self, title: &str) -> Play {
        let row = self.0.remove(title).unwrap_or_else(|| panic!("\"{title}\" is none of these rows, or was played"));
        Play::of(title, row)
    }

    pub fn end(self) {
        assert!(self.0.is_empty(), "rows were not played: {:?}", self.0.keys());
    }
}
