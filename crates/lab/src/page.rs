//! Blocks of commands of a page, each with the machine at which it is typed.

use std::fs;
use std::path::Path;

/// A command, in a line or in several.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Typed {
    /// The machine that the prompt names; empty where the page has one.
    pub at: String,
    pub command: String,
}

/// The blocks of commands of a page, in its order, each with the title over it. All have to be taken.
pub struct Page {
    name: &'static str,
    blocks: std::vec::IntoIter<(String, Vec<Typed>)>,
}

impl Page {
    pub fn open(name: &'static str) -> Page {
        Page { name, blocks: blocks(name).into_iter() }
    }

    /// The next one, which begins so.
    pub fn lines(&mut self, begins: &str) -> Vec<Typed> {
        let (_, block) = self.blocks.next().unwrap_or_else(|| panic!("{} has no other block", self.name));
        let is_it = block.first().is_some_and(|typed| typed.command.starts_with(begins));
        assert!(is_it, "{}: this is not the block that begins with `{begins}`: {block:?}", self.name);
        block
    }

    /// The same of a block for one machine.
    pub fn block(&mut self, begins: &str) -> String {
        let lines = self.lines(begins);
        assert!(lines.iter().all(|typed| typed.at == lines[0].at), "{}: of several machines: {lines:?}", self.name);
        lines.into_iter().map(|typed| typed.command).collect::<Vec<_>>().join("\n")
    }

    /// Leaves what is under this title, to the end, to another test.
    pub fn leave_from(mut self, title: &str) {
        let next = self.blocks.next();
        assert!(next.as_ref().is_some_and(|(of, _)| of == title), "{}: {next:?} is not under {title}", self.name);
        self.blocks = Vec::new().into_iter();
    }

    /// Goes on under this title: another test has typed what is before.
    pub fn begin_from(&mut self, title: &str) {
        let blocks: Vec<_> = self.blocks.by_ref().skip_while(|(of, _)| of != title).collect();
        self.blocks = blocks.into_iter();
    }
}

/// All blocks of a page under this title: for who types it and not the rest of the page.
pub fn section(name: &str, title: &str) -> Vec<Vec<Typed>> {
    let found: Vec<_> = blocks(name).into_iter().filter(|(of, _)| of == title).map(|(_, block)| block).collect();
    assert!(!found.is_empty(), "{name} shows no commands under `{title}`");
    found
}

/// Each block of commands in `docs/NAME`, with the title over it.
fn blocks(name: &str) -> Vec<(String, Vec<Typed>)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name);
    let page = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let (mut blocks, mut title) = (Vec::new(), String::new());
    for (index, part) in page.split("```").enumerate() {
        if index % 2 == 0 {
            let mut titles = part.lines().rev().filter_map(|line| line.strip_prefix("## "));
            title = titles.next().map_or(title, str::to_string);
        } else if let Some(block) = part.strip_prefix("console\n") {
            blocks.push((title.clone(), commands_of(block)));
        }
    }
    blocks
}

/// Blocks of a page that are files or texts of that kind, in its order.
pub fn blocks_of(name: &str, kind: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name);
    let page = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let blocks = page.split("```").skip(1).step_by(2);
    blocks.filter_map(|block| Some(block.strip_prefix(kind)?.strip_prefix('\n')?.to_string())).collect()
}

impl Drop for Page {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert_eq!(self.blocks.next(), None, "{} has more", self.name);
        }
    }
}

/// What a prompt is followed by, and the machine that it names.
fn prompted(line: &str) -> Option<(&str, &str)> {
    let (at, typed) = line.split_once(['$', '#'])?;
    let is_name = at.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    typed.strip_prefix(' ').filter(|_| is_name).map(|typed| (at, typed))
}

/// What is typed, without prompts and without what is printed.
fn commands_of(block: &str) -> Vec<Typed> {
    let mut commands: Vec<Typed> = Vec::new();
    let mut goes_on = false;
    for line in block.lines() {
        if let Some(last) = commands.last_mut().filter(|_| goes_on) {
            last.command = format!("{}\n{line}", last.command);
        } else if let Some((at, typed)) = prompted(line) {
            commands.push(Typed { at: at.to_string(), command: typed.to_string() });
        }
        goes_on = commands.last().is_some_and(|last| match last.command.contains("<<END") {
            true => line != "END",
            false => line.ends_with('\\'),
        });
    }
    commands
}

#[test]
fn commands_are_what_follows_a_prompt() {
    let typed = |at: &str, command: &str| Typed { at: at.into(), command: command.into() };
    let block = "$ one \\\n   two\nprinted # by it\na# three\n# cat >x <<END\n[a]\n# b\nEND\nvm7# four\n";
    let expected = [
        typed("", "one \\\n   two"),
        typed("a", "three"),
        typed("", "cat >x <<END\n[a]\n# b\nEND"),
        typed("vm7", "four"),
    ];
    assert_eq!(commands_of(block), expected);
}
