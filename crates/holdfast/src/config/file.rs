//! Reading of `holdfast.toml`: all that is wrong with it is found at once, each with its line.

use super::keys::{ELSEWHERE, KEYS, Key, Kind, Value};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use toml::de::{DeTable, DeValue};

/// What is wrong in one place of the file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Complaint {
    pub line: usize,
    pub what: String,
    pub next: String,
}

/// All that is wrong with a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConfigError {
    pub path: PathBuf,
    pub complaints: Vec<Complaint>,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, complaint) in self.complaints.iter().enumerate() {
            let newline = if n == 0 { "" } else { "\n" };
            let Complaint { line, what, next } = complaint;
            write!(f, "{newline}{}, line {line}: {what}; {next}", self.path.display())?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigError {}

/// What a file sets: by the key's place in the table, with the line.
pub type Found = BTreeMap<usize, (Value, usize)>;

struct Reader<'t> {
    text: &'t str,
    found: Found,
    complaints: Vec<Complaint>,
}

/// Reads the text of a file.
pub fn read(path: &Path, text: &str) -> Result<Found, ConfigError> {
    let mut reader = Reader { text, found: Found::new(), complaints: Vec::new() };
    match DeTable::parse(text) {
        Ok(table) => reader.walk("", table.get_ref()),
        Err(error) => {
            let at = error.span().unwrap_or(0..0);
            let what = format!("this is not TOML: {}", error.message().trim().replace('\n', ", "));
            reader.complain(&at, what, "write KEY = \"VALUE\", as `holdfast config explain` shows it".to_string());
        }
    }
    if reader.complaints.is_empty() {
        return Ok(reader.found);
    }
    reader.complaints.sort_by_key(|complaint| complaint.line);
    Err(ConfigError { path: path.to_path_buf(), complaints: reader.complaints })
}

impl Reader<'_> {
    fn line(&self, at: &Range<usize>) -> usize {
        self.text.as_bytes()[..at.start.min(self.text.len())].iter().filter(|byte| **byte == b'\n').count() + 1
    }

    fn complain(&mut self, at: &Range<usize>, what: String, next: String) {
        let line = self.line(at);
        self.complaints.push(Complaint { line, what, next });
    }

    fn walk(&mut self, prefix: &str, table: &DeTable<'_>) {
        for (name, value) in table.iter() {
            let full =
                if prefix.is_empty() { name.get_ref().to_string() } else { format!("{prefix}.{}", name.get_ref()) };
            let is_section = KEYS.iter().any(|key| key.section() == full);
            match (KEYS.iter().position(|key| key.name == full), value.get_ref()) {
                (Some(at), value_found) => self.take(at, value_found, &value.span()),
                (None, DeValue::Table(inner)) if is_section => self.walk(&full, inner),
                (None, _) if is_section => {
                    let next = format!("write `[{full}]` in a line of its own, and its keys below");
                    self.complain(&name.span(), format!("{full} is a section and has no value"), next);
                }
                // What is elsewhere is said of the outermost name that has a reason.
                (None, DeValue::Table(inner)) if !inner.is_empty() && elsewhere(&full).is_none() => {
                    self.walk(&full, inner)
                }
                (None, _) => {
                    let (what, next) = unknown(&full);
                    self.complain(&name.span(), what, next);
                }
            }
        }
    }

    fn take(&mut self, at: usize, value: &DeValue<'_>, span: &Range<usize>) {
        let key = &KEYS[at];
        let text = match value {
            DeValue::String(text) => text.to_string(),
            DeValue::Integer(number) if matches!(key.kind, Kind::Threads(_)) => number.as_str().to_string(),
            other => {
                let what = format!("{} is {}, and has to be a text: {}", key.name, kind_of(other), key.kind.text());
                return self.complain(span, what, advice(key));
            }
        };
        match key.kind.parse(&text) {
            Ok(value) => {
                let line = self.line(span);
                self.found.insert(at, (value, line));
            }
            Err(why) => self.complain(span, format!("{} can't be used: {why}", key.name), advice(key)),
        }
    }
}

fn advice(key: &Key) -> String {
    format!("write for example {} = \"{}\"; see `holdfast config explain {}`", key.leaf(), key.example, key.name)
}

fn kind_of(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a text",
        DeValue::Integer(_) | DeValue::Float(_) => "a number without a unit",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a section",
    }
}

fn elsewhere(name: &str) -> Option<&'static str> {
    ELSEWHERE.iter().find(|(key, _)| *key == name).map(|(_, why)| *why)
}

/// What to say of a name that is no key.
fn unknown(name: &str) -> (String, String) {
    let all = "`holdfast config explain` lists all keys".to_string();
    if let Some(why) = elsewhere(name) {
        return (format!("{name} is not set in this file: {why}"), "remove the line".to_string());
    }
    let what = format!("{name} is no key of this file");
    let leaf = name.rsplit('.').next().unwrap_or(name);
    let older = KEYS.iter().find(|key| key.older_name == leaf && key.leaf() != leaf);
    let moved = older.or_else(|| KEYS.iter().find(|key| key.leaf() == leaf));
    let near = || KEYS.iter().min_by_key(|key| distance(key.name, name)).filter(|key| distance(key.name, name) <= 3);
    match moved.or_else(near) {
        Some(key) => {
            (what, format!("{} is meant, perhaps: it is `{}` in section [{}]", key.name, key.leaf(), key.section()))
        }
        None => (what, all),
    }
}

/// How many letters have to be changed, added or removed to get from one to the other.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let changed = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complaints(text: &str) -> String {
        read(Path::new("/g/holdfast.toml"), text).unwrap_err().to_string()
    }

    #[test]
    fn what_is_set_is_found_with_its_line() {
        let text = "# mine\n[memory]\nwriteback = \"1 GiB\"\n\n[care]\nscrub_every = \"14d\"\n";
        let found = read(Path::new("f"), text).unwrap();
        let told: Vec<(&str, String, usize)> =
            found.iter().map(|(at, (value, line))| (KEYS[*at].name, value.text(), *line)).collect();
        assert_eq!(told, [("memory.writeback", "1 GiB".into(), 3), ("care.scrub_every", "14 d".into(), 6)]);
        assert_eq!(read(Path::new("f"), "memory.writeback = '1 GiB'").unwrap().len(), 1);
        assert_eq!(read(Path::new("f"), "").unwrap().len(), 0);
    }

    #[test]
    fn all_that_is_wrong_is_told_with_its_line_and_what_to_do() {
        let text =
            complaints("[memory]\nwriteback = 256\n[nbd]\ntpc = \"1.2.3.4:5\"\n[care]\nrebuild_after = \"2 y\"\n");
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert!(
            lines[0].starts_with("/g/holdfast.toml, line 2: memory.writeback is a number without a unit"),
            "{text}"
        );
        assert!(lines[0].contains("write for example writeback = \"1 GiB\""), "{text}");
        assert!(lines[1].contains("line 4: nbd.tpc is no key") && lines[1].contains("nbd.tcp is meant"), "{text}");
        assert!(lines[2].contains("line 6") && lines[2].contains("is no span"), "{text}");
    }

    #[test]
    fn names_of_older_releases_and_of_other_places_are_known() {
        assert!(complaints("writeback_bytes = 5").contains("memory.writeback is meant"));
        assert!(complaints("[host]\nname = 'a'").contains("line 2: host.name is not set in this file"));
        assert!(complaints("[tls]\nx = 1").contains("grid up --tls"));
        assert!(complaints("writeback = '1 GiB'").contains("in section [memory]"));
        assert!(complaints("colour = 'red'").contains("lists all keys"));
        assert!(complaints("memory = 5").contains("is a section"));
    }

    #[test]
    fn what_is_no_toml_is_told_with_its_line() {
        let text = complaints("[memory]\nwriteback = 1 GiB\n");
        assert!(text.contains("line 2: this is not TOML"), "{text}");
        assert!(complaints("[nbd]\ntcp = '1.2.3.4:5'\ntcp = '1.2.3.4:6'").contains("line 3"));
    }
}
