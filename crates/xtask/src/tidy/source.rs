//! A Rust file as the rules see it: code with comments and literals blanked out, paths named in it, functions, test parts.
//!
//! Not a parser: a scanner that knows comments, literals, braces and `use` trees, which is all the rules need. Blanked
//! text keeps its length and its line ends, so that offsets and line numbers stay those of the file.

use anyhow::{Context, Result};
use std::ops::Range;
use std::path::{Path, PathBuf};

pub struct Source {
    /// Relative to the workspace.
    pub path: PathBuf,
    pub text: String,
    /// The text with comments and the contents of literals blanked.
    pub code: String,
}

/// A path of identifiers as it stands in the code, `use` trees expanded: `std::time::Instant`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NamedPath {
    pub line: usize,
    pub path: String,
    pub at: usize,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Function {
    pub name: String,
    pub line: usize,
    pub lines: usize,
}

impl Source {
    pub fn read(root: &Path, path: &Path) -> Result<Source> {
        let text =
            std::fs::read_to_string(root.join(path)).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(Source::new(path, text))
    }

    pub fn new(path: &Path, text: String) -> Source {
        let code = blank(&text);
        Source { path: path.into(), text, code }
    }

    pub fn line_at(&self, offset: usize) -> usize {
        self.code.as_bytes()[..offset].iter().filter(|b| **b == b'\n').count() + 1
    }

    /// Parts of the file that exist in test builds only: what `#[cfg(test)]` stands before.
    pub fn test_spans(&self) -> Vec<Range<usize>> {
        self.cfg_test_items().into_iter().map(|(span, _)| span).collect()
    }

    /// Files of the modules that exist in test builds only.
    pub fn test_modules(&self) -> Vec<PathBuf> {
        let stem = self.path.file_stem().unwrap_or_default();
        let directory = self.path.parent().unwrap_or(Path::new(""));
        let owns_directory = stem == "mod" || stem == "lib" || stem == "main";
        let directory = if owns_directory { directory.to_path_buf() } else { directory.join(stem) };
        let names = self.cfg_test_items().into_iter().filter_map(|(_, module)| module);
        names.flat_map(|m| [directory.join(format!("{m}.rs")), directory.join(m).join("mod.rs")]).collect()
    }

    /// Items under `#[cfg(test)]`: their span, and the module's name where the item is `mod name;`.
    fn cfg_test_items(&self) -> Vec<(Range<usize>, Option<String>)> {
        let mut items = Vec::new();
        for (start, _) in self.code.match_indices("#[cfg(test)]") {
            let from = start + "#[cfg(test)]".len();
            let Some(stop) = self.code[from..].find(['{', ';']).map(|o| from + o) else { continue };
            let head = self.code[from..stop].trim();
            let is_block = self.code.as_bytes()[stop] == b'{';
            let end = if is_block { self.closing_brace(stop) } else { stop + 1 };
            let module = head.rsplit_once("mod ").filter(|_| !is_block).map(|(_, name)| name.trim().to_string());
            items.push((start..end, module));
        }
        items
    }

    /// Offset just after the brace that closes the one at `open`.
    fn closing_brace(&self, open: usize) -> usize {
        let mut depth = 0_usize;
        for (offset, byte) in self.code.bytes().enumerate().skip(open) {
            match byte {
                b'{' => depth += 1,
                b'}' => {
                    depth -= 1;
                    if depth == 0 {
                        return offset + 1;
                    }
                }
                _ => {}
            }
        }
        self.code.len()
    }

    pub fn identifiers(&self) -> impl Iterator<Item = (usize, &str)> {
        let bytes = self.code.as_bytes();
        let mut at = 0;
        std::iter::from_fn(move || {
            while at < bytes.len() && !is_word(bytes[at]) {
                at += 1;
            }
            let start = at;
            while at < bytes.len() && is_word(bytes[at]) {
                at += 1;
            }
            (start < at).then(|| (start, &self.code[start..at]))
        })
    }

    /// Every path of two or more names, and every leaf of every `use` tree.
    pub fn paths(&self) -> Vec<NamedPath> {
        let mut found = Vec::new();
        let mut inside_use = 0;
        for (at, word) in self.identifiers() {
            if at < inside_use {
                continue;
            }
            if word == "use" {
                let Some(end) = self.code[at..].find(';').map(|o| at + o) else { continue };
                for path in expand_use(&self.code[at + 3..end]) {
                    found.push(NamedPath { line: self.line_at(at), path, at });
                }
                inside_use = end;
            } else if !self.code[..at].ends_with("::") {
                let path = path_at(&self.code[at..]);
                if path.contains("::") {
                    found.push(NamedPath { line: self.line_at(at), path, at });
                }
            }
        }
        found
    }

    pub fn functions(&self) -> Vec<Function> {
        let mut found = Vec::new();
        let words: Vec<(usize, &str)> = self.identifiers().collect();
        for pair in words.windows(2) {
            let [(at, "fn"), (name_at, name)] = pair else { continue };
            // `fn(u8) -> u8` is a type: what follows is then no name but an argument.
            if !self.code[at + 2..*name_at].chars().all(char::is_whitespace) {
                continue;
            }
            let Some(open) = self.body_of(*name_at) else { continue };
            let line = self.line_at(*at);
            let lines = self.line_at(self.closing_brace(open) - 1) - line + 1;
            found.push(Function { name: (*name).to_string(), line, lines });
        }
        found
    }

    /// Functions with a parameter that is a tuple, taken apart where it is named.
    pub fn tuple_parameters(&self) -> Vec<String> {
        let words: Vec<(usize, &str)> = self.identifiers().collect();
        let mut found = Vec::new();
        for pair in words.windows(2) {
            let [(at, "fn"), (name_at, name)] = pair else { continue };
            let is_named = self.code[at + 2..*name_at].chars().all(char::is_whitespace);
            if is_named && takes_tuple_apart(parameters(&self.code[name_at + name.len()..])) {
                found.push((*name).to_string());
            }
        }
        found
    }

    /// Offset of the brace that opens the body of the function whose name is at `name_at`.
    fn body_of(&self, name_at: usize) -> Option<usize> {
        let mut depth = 0_i32;
        for (offset, byte) in self.code.bytes().enumerate().skip(name_at) {
            match byte {
                b'(' | b'[' => depth += 1,
                b')' | b']' => depth -= 1,
                b'{' if depth == 0 => return Some(offset),
                b';' if depth == 0 => return None,
                _ => {}
            }
        }
        None
    }
}

/// What stands between the parentheses that follow, behind generic parameters if there are any.
fn parameters(code: &str) -> &str {
    let (mut angles, mut parens, mut start) = (0_i32, 0_i32, None);
    let bytes = code.as_bytes();
    for (offset, byte) in code.bytes().enumerate() {
        match byte {
            b'<' if start.is_none() => angles += 1,
            b'>' if start.is_none() && bytes[offset - 1] != b'-' => angles -= 1,
            b'(' if angles == 0 => {
                start = start.or(Some(offset + 1));
                parens += 1;
            }
            b')' if angles == 0 => {
                parens -= 1;
                if parens == 0 {
                    return &code[start.unwrap_or(offset)..offset];
                }
            }
            _ => {}
        }
    }
    ""
}

/// Whether one of the parameters is a pattern of a tuple: `(a, b): (A, B)`.
fn takes_tuple_apart(parameters: &str) -> bool {
    let mut depth = 0_i32;
    for (offset, byte) in parameters.bytes().enumerate() {
        match byte {
            b'(' => depth += 1,
            b')' => {
                depth -= 1;
                let rest = parameters[offset + 1..].trim_start();
                if depth == 0 && rest.strip_prefix(':').is_some_and(|of| of.trim_start().starts_with('(')) {
                    return true;
                }
            }
            _ => {}
        }
    }
    false
}

fn is_word(byte: u8) -> bool {
    byte == b'_' || byte.is_ascii_alphanumeric()
}

/// The path that `code` starts with.
fn path_at(code: &str) -> String {
    let end = code.bytes().position(|b| !is_word(b) && b != b':').unwrap_or(code.len());
    let path = &code[..end];
    // A single colon ends it: `name: Type`.
    let mut stop = path.len();
    let bytes = path.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        if bytes[at] == b':' {
            if bytes.get(at + 1) != Some(&b':') || bytes.get(at + 2).is_none_or(|b| !is_word(*b)) {
                stop = at;
                break;
            }
            at += 1;
        }
        at += 1;
    }
    path[..stop].to_string()
}

/// The leaves of a `use` tree: `std::{fs, time::Instant as I}` gives `std::fs` and `std::time::Instant`.
fn expand_use(tree: &str) -> Vec<String> {
    let tree = tree.trim();
    let Some(open) = tree.find('{') else {
        let path = tree.split(" as ").next().unwrap_or(tree);
        return vec![path.chars().filter(|c| !c.is_whitespace()).collect()];
    };
    let prefix: String = tree[..open].chars().filter(|c| !c.is_whitespace()).collect();
    let inside = tree[open + 1..].trim_end().strip_suffix('}').unwrap_or(&tree[open + 1..]);
    let mut leaves = Vec::new();
    let (mut depth, mut start) = (0_i32, 0);
    for (offset, c) in inside.char_indices().chain([(inside.len(), ',')]) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                let part = inside[start..offset].trim();
                if !part.is_empty() {
                    leaves.extend(expand_use(part).into_iter().map(|leaf| joined(&prefix, &leaf)));
                }
                start = offset + 1;
            }
            _ => {}
        }
    }
    leaves
}

fn joined(prefix: &str, leaf: &str) -> String {
    if leaf == "self" { prefix.trim_end_matches("::").to_string() } else { format!("{prefix}{leaf}") }
}

/// What the scanner is inside of.
#[derive(Clone, Copy)]
enum Inside {
    Code,
    LineComment,
    BlockComment { depth: u32 },
    Literal { quote: u8 },
    RawString { hashes: usize },
}

/// Blanks comments and the contents of literals with spaces.
fn blank(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut inside = Inside::Code;
    let mut at = 0;
    while at < bytes.len() {
        let (next, keep, after) = step(bytes, at, inside);
        for byte in &bytes[at..next] {
            out.push(if keep || *byte == b'\n' { *byte } else { b' ' });
        }
        inside = after;
        at = next;
    }
    String::from_utf8(out).expect("multi-byte characters are blanked whole or kept whole")
}

/// One step from `at`: where the next begins, whether what lies between is code, and what the scanner is inside of then.
fn step(bytes: &[u8], at: usize, inside: Inside) -> (usize, bool, Inside) {
    let rest = &bytes[at..];
    match inside {
        Inside::Code => step_in_code(bytes, at),
        Inside::LineComment if rest[0] == b'\n' => (at + 1, true, Inside::Code),
        Inside::LineComment => (at + 1, false, inside),
        Inside::BlockComment { depth } if rest.starts_with(b"*/") => {
            let after = if depth == 1 { Inside::Code } else { Inside::BlockComment { depth: depth - 1 } };
            (at + 2, false, after)
        }
        Inside::BlockComment { depth } if rest.starts_with(b"/*") => {
            (at + 2, false, Inside::BlockComment { depth: depth + 1 })
        }
        Inside::BlockComment { .. } => (at + 1, false, inside),
        Inside::Literal { .. } if rest[0] == b'\\' => ((at + 2).min(bytes.len()), false, inside),
        Inside::Literal { quote } if rest[0] == quote => (at + 1, true, Inside::Code),
        Inside::Literal { .. } => (at + 1, false, inside),
        Inside::RawString { hashes } => {
            let closes = rest[0] == b'"' && rest[1..].iter().take(hashes).filter(|b| **b == b'#').count() == hashes;
            if closes { (at + 1 + hashes, true, Inside::Code) } else { (at + 1, false, inside) }
        }
    }
}

fn step_in_code(bytes: &[u8], at: usize) -> (usize, bool, Inside) {
    let rest = &bytes[at..];
    if rest.starts_with(b"//") {
        return (at + 2, false, Inside::LineComment);
    }
    if rest.starts_with(b"/*") {
        return (at + 2, false, Inside::BlockComment { depth: 1 });
    }
    let starts_word = at == 0 || !is_word(bytes[at - 1]) || matches!(bytes[at - 1], b'b' | b'c');
    if rest[0] == b'r' && starts_word {
        let hashes = rest[1..].iter().take_while(|b| **b == b'#').count();
        if rest.get(1 + hashes) == Some(&b'"') {
            return (at + 2 + hashes, true, Inside::RawString { hashes });
        }
    }
    match rest[0] {
        b'"' => (at + 1, true, Inside::Literal { quote: b'"' }),
        b'\'' if is_char_literal(rest) => (at + 1, true, Inside::Literal { quote: b'\'' }),
        _ => (at + 1, true, Inside::Code),
    }
}

/// Tells `'a'` from the lifetime `'a`.
fn is_char_literal(rest: &[u8]) -> bool {
    match rest.get(1) {
        Some(b'\\') => true,
        Some(first) if first.is_ascii() => rest.get(2) == Some(&b'\''),
        Some(_) => true,
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(text: &str) -> Source {
        Source::new(Path::new("crates/base/src/a.rs"), text.to_string())
    }

    #[test]
    fn comments_and_literals_are_blanked_and_offsets_stay() {
        let text = "let a = \"std::fs\"; // std::net\nlet b = r#\"std::\"env\"#; /* x /* y */ z */ let c = '\"'; fn f<'a>() {}";
        let s = source(text);
        assert_eq!(s.code.len(), text.len());
        assert!(!s.code.contains("std"));
        assert!(s.code.contains("fn f<'a>() {}"));
        assert_eq!(s.line_at(s.code.find("let c").expect("code is kept")), 2);
    }

    #[test]
    fn escapes_and_byte_strings_end_where_they_end() {
        let s = source(r#"let a = "\\"; let b = b"\""; let c = '\''; let d = 'é'; HashMap"#);
        assert!(s.code.contains("HashMap"));
        assert_eq!(s.code.matches("let").count(), 4);
    }

    #[test]
    fn use_trees_are_expanded_and_inline_paths_found() {
        let s = source("use std::{fs, time::{self, Instant as I}};\nfn f(x: std::net::TcpStream) { a::b(); }");
        let paths: Vec<String> = s.paths().into_iter().map(|p| p.path).collect();
        assert_eq!(paths, ["std::fs", "std::time", "std::time::Instant", "std::net::TcpStream", "a::b"]);
    }

    #[test]
    fn functions_are_measured_and_types_are_not_functions() {
        let s = source("struct A { f: fn(u8) -> u8 }\ntrait T { fn g(&self); }\nfn h(a: [u8; 3]) -> u8\n{\n  1\n}\n");
        assert_eq!(s.functions(), [Function { name: "h".into(), line: 3, lines: 4 }]);
    }

    #[test]
    fn parameters_that_are_taken_apart_are_found() {
        let s = source(
            "fn a((x, y): (u8, u8)) {}\nfn b<F: Fn((u8, u8)) -> bool>(f: F, xy: (u8, u8)) {}\nfn c(\n    &self,\n    \
             (x, (y, z)): (u8, (u8, u8)),\n) {\n    let d = |(x, y): (u8, u8)| x;\n}\nfn d() { e(|(x, y): (u8, u8)| x) }",
        );
        assert_eq!(s.tuple_parameters(), ["a", "c"]);
    }

    #[test]
    fn test_parts_are_told_apart() {
        let s =
            source("fn a() {}\n#[cfg(test)]\nmod tests { use std::fs; }\n#[cfg(test)]\npub mod harness;\nfn b() {}");
        let spans = s.test_spans();
        assert_eq!(spans.len(), 2);
        assert!(s.code[spans[0].clone()].contains("std::fs"));
        assert!(!spans.iter().any(|r| s.code[r.clone()].contains("fn b")));
        assert!(s.test_modules().contains(&PathBuf::from("crates/base/src/a/harness.rs")));
    }
}
