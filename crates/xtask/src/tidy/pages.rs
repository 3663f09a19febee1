//! Rules for the text of pages: words of a page, columns, dates, length and beginning of sentences.

use super::Finding;
use std::path::Path;

/// Words at most of a page, or of each page of a directory.
const WORDS_MAX: &[(&str, usize)] = &[
    ("README.md", 700),
    ("CHANGELOG.md", 1200),
    ("CONTRIBUTING.md", 600),
    ("KNOWN_ISSUES.md", 600),
    ("SECURITY.md", 600),
    ("docs/ARCHITECTURE.md", 1500),
    ("docs/FORMAT.md", 4300),
    ("docs/FORMAT-disk.md", 2000),
    ("docs/PROTOCOL.md", 2600),
    ("docs/concepts.md", 1500),
    ("docs/start.md", 1200),
    ("docs/performance.md", 900),
    ("docs/resilience.md", 900),
    ("docs/operation.md", 200),
    ("docs/operate/runbook.md", 1500),
    ("docs/operate/", 800),
    ("docs/integrate/", 600),
    ("docs/internals/", 1200),
];

const COLUMNS_MAX: usize = 120;
const SENTENCE_WORDS_MAX: usize = 30;

/// Words that a sentence does not begin with: it says what it is about.
const BAD_BEGINNINGS: &[&str] = &["What", "Whether", "How", "Of", "Where", "It"];

/// Decisions stand as they were taken.
const LEFT_ALONE: &str = "docs/decisions/";

/// Pages that a program writes out of its own texts: their code is not wrapped here.
const GENERATED: &[&str] = &["docs/reference/cli.md", "docs/reference/configuration.md", "docs/reference/metrics.md"];

pub fn check(path: &Path, text: &str) -> Vec<Finding> {
    let name = path.to_string_lossy();
    if name.starts_with(LEFT_ALONE) {
        return Vec::new();
    }
    let mut findings = Vec::new();
    let mut error = |line, text: String| findings.push(Finding::error(path, line, text));
    let is_generated = GENERATED.contains(&&*name);
    for (at, line) in text.lines().enumerate() {
        let columns = line.chars().count();
        if columns > COLUMNS_MAX && !is_generated {
            error(at + 1, format!("{columns} columns, at most {COLUMNS_MAX}"));
        }
        if line.split(|c: char| !c.is_ascii_digit() && c != '-').any(is_date) {
            error(at + 1, "a date: figures with dates stand in results/".to_string());
        }
    }
    let page = Page::of(text);
    if let Some((_, most)) = WORDS_MAX.iter().find(|(of, _)| *of == name || (of.ends_with('/') && name.starts_with(of)))
        && page.words > *most
    {
        error(0, format!("{} words, at most {most}", page.words));
    }
    for (line, sentence) in page.passages.iter().flat_map(|(line, passage)| sentences(passage).map(|s| (*line, s))) {
        let count = words(&sentence);
        let begin: String = sentence.chars().take(60).collect();
        if count > SENTENCE_WORDS_MAX {
            error(line, format!("a sentence of {count} words, at most {SENTENCE_WORDS_MAX}: {begin}"));
        }
        let first: &str = sentence.trim_start_matches(|c: char| !c.is_alphanumeric());
        if BAD_BEGINNINGS.contains(&first.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default()) {
            error(line, format!("a sentence begins with a word that says nothing: {begin}"));
        }
    }
    findings
}

fn is_date(text: &str) -> bool {
    let parts: Vec<usize> = text.split('-').map(str::len).collect();
    parts == [4, 2, 2] && text.starts_with("20")
}

/// Words of a text: what has a letter or a digit.
fn words(text: &str) -> usize {
    text.split_whitespace().filter(|word| word.contains(char::is_alphanumeric)).count()
}

/// Prose of a page, without code and comments.
#[derive(Default)]
struct Page {
    words: usize,
    /// Paragraphs, items and cells, each with its first line.
    passages: Vec<(usize, String)>,
}

impl Page {
    fn of(text: &str) -> Page {
        let mut page = Page::default();
        // Whether the next line goes on with the last passage.
        let mut open = false;
        for (number, line) in super::docs::prose(text) {
            let line = line.trim();
            if line.starts_with("<!--") {
                continue;
            }
            page.words += words(line);
            let is_title = line.starts_with('#') || is_bold(line);
            if line.is_empty() || is_title {
                open = false;
            } else if let Some(row) = line.strip_prefix('|') {
                page.passages.extend(row.split('|').map(|cell| (number, cell.trim().to_string())));
                open = false;
            } else if let Some(item) = item(line) {
                page.passages.push((number, item.to_string()));
                open = true;
            } else if let Some((_, passage)) = page.passages.last_mut().filter(|_| open) {
                passage.push(' ');
                passage.push_str(line);
            } else {
                page.passages.push((number, line.to_string()));
                open = true;
            }
        }
        page
    }
}

/// A line that is all in bold is a title.
fn is_bold(line: &str) -> bool {
    line.strip_prefix("**").and_then(|rest| rest.strip_suffix("**")).is_some_and(|inner| !inner.contains("**"))
}

/// An item of a list, without its mark.
fn item(line: &str) -> Option<&str> {
    let (mark, rest) = line.split_once(' ')?;
    let is_number = mark.strip_suffix('.').is_some_and(|n| !n.is_empty() && n.chars().all(|c| c.is_ascii_digit()));
    (matches!(mark, "-" | "*") || is_number).then_some(rest)
}

/// Sentences of a passage, in which a code span or a link's target is one word, or none.
fn sentences(passage: &str) -> impl Iterator<Item = String> {
    let mut plain = String::new();
    for (index, part) in passage.split('`').enumerate() {
        plain.push_str(if index % 2 == 1 { "Code" } else { part });
    }
    let mut found = Vec::new();
    let mut sentence = String::new();
    for word in without_targets(&plain).split_whitespace() {
        let begins = word.trim_start_matches(['"', '(', '*', '[', '_']).starts_with(|c: char| c.is_uppercase());
        let is_end = sentence.trim_end_matches(['"', ')', '*', ']', '_', ' ']).ends_with(['.', '?', '!']);
        if begins && is_end {
            found.push(std::mem::take(&mut sentence));
        }
        sentence.push_str(word);
        sentence.push(' ');
    }
    found.push(sentence);
    found.into_iter()
}

/// `[text](target)` as `text`.
fn without_targets(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("](") {
        out.push_str(before);
        rest = after.split_once(')').map_or("", |(_, rest)| rest);
    }
    (out + rest).replace('[', "")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errors(path: &str, text: &str) -> Vec<String> {
        check(Path::new(path), text).into_iter().map(|finding| finding.text).collect()
    }

    #[test]
    fn words_columns_and_dates_have_bounds() {
        assert_eq!(errors("README.md", &"word\n\n".repeat(700)).len(), 0);
        assert_eq!(errors("README.md", &"word\n\n".repeat(701)), ["701 words, at most 700"]);
        assert_eq!(errors("docs/operate/a.md", &"word\n\n".repeat(801)).len(), 1);
        assert_eq!(errors("docs/operate/runbook.md", &"word\n\n".repeat(801)).len(), 0);
        let code = format!("```console\n{}\n```\n", "word\n".repeat(900));
        assert_eq!(errors("README.md", &code).len(), 0);
        assert_eq!(errors("docs/a.md", &"x".repeat(121)), ["121 columns, at most 120"]);
        assert_eq!(errors("docs/a.md", &"é".repeat(120)).len(), 0);
        assert_eq!(errors("docs/a.md", concat!("On 2026", "-11-26.")).len(), 1);
        assert_eq!(errors("docs/decisions/a.md", concat!("On 2026", "-11-26.")).len(), 0);
    }

    #[test]
    fn sentences_are_told_apart_and_counted() {
        let of = |text: &str| sentences(text).map(|s| s.trim().to_string()).collect::<Vec<_>>();
        assert_eq!(of("One `a b.`. Two [c d](e.md) 3.4 f."), ["One Code.", "Two c d 3.4 f."]);
        assert_eq!(of("(One.) **Two.** three"), ["(One.)", "**Two.** three"]);
        let long = format!("{}\n{}.\n", "word ".repeat(15), "word ".repeat(16));
        assert_eq!(errors("docs/a.md", &long).len(), 1);
        assert_eq!(errors("docs/a.md", &long.replace('\n', "\n\n")).len(), 0);
        assert_eq!(errors("docs/a.md", &format!("| {} | {} |\n", "w ".repeat(20), "w ".repeat(20))).len(), 0);
    }

    #[test]
    fn sentences_begin_with_what_they_are_about() {
        assert_eq!(errors("docs/a.md", "It is so.").len(), 1);
        assert_eq!(errors("docs/a.md", "- *Whether* it is.").len(), 1);
        assert_eq!(errors("docs/a.md", "**It is back**\n\nItems of it.\n").len(), 0);
    }
}
