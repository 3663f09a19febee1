//! The table of keys as text: for the command line, for docs/reference/configuration.md, and as the file that a new
//! grid begins with.

use super::keys::{KEYS, Key, Value};

fn default_text(key: &Key) -> &'static str {
    if key.default.is_empty() { "not set" } else { key.default }
}

/// All keys, a line each.
pub fn explain_keys() -> String {
    let wide = KEYS.iter().map(|key| key.name.len()).max().unwrap_or(0);
    let line = |key: &Key| format!("{:wide$}  {} Default: {}.", key.name, key.brief, default_text(key));
    let lines: Vec<String> = KEYS.iter().map(line).collect();
    format!("{}\n\n`holdfast config explain KEY` tells more of one.", lines.join("\n"))
}

/// One key, or all of a section.
pub fn explain_key(name: &str) -> Option<String> {
    let chosen = KEYS.iter().filter(|key| key.name == name || key.section() == name || key.leaf() == name);
    let text = |key: &Key| {
        let (name, example) = (key.name, key.example);
        format!(
            "{name}: {}\n{}\n\n  takes      {}\n  default    {}\n  example    {name} = \"{example}\"",
            key.brief,
            plain(key.more),
            key.kind.text(),
            default_text(key)
        )
    };
    let texts: Vec<String> = chosen.map(text).collect();
    (!texts.is_empty()).then(|| texts.join("\n\n"))
}

/// Broken into lines that fit a terminal.
fn plain(text: &str) -> String {
    wrap(text, 100).join("\n")
}

fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("there is always one");
        if !line.is_empty() && line.len() + 1 + word.len() > width {
            lines.push(word.to_string());
        } else {
            let space = if line.is_empty() { "" } else { " " };
            line.push_str(space);
            line.push_str(word);
        }
    }
    lines
}

/// docs/reference/configuration.md, whole.
pub fn markdown() -> String {
    let mut text = String::from(
        "# Configuration\n\n\
         <!-- Written by `holdfast config explain --markdown`: change crates/holdfast/src/config/, then write it anew. -->\n\n\
         An operator's settings for one machine are in `holdfast.toml` in the grid's directory. All keys are\n\
         optional, and a file that isn't there is an empty one. `holdfast grid up` writes one with every key in a\n\
         comment when it makes a grid. The program's own records, such as the grid's id, its nodes and their\n\
         devices, are in `grid.json` beside it, which is not for editing.\n\n\
         ```console\n\
         $ holdfast config explain memory.writeback   # what a key does\n\
         $ holdfast config check                      # or `check FILE`: is all right with it? nothing is changed\n\
         $ holdfast config show                       # what is set, and where\n\
         ```\n\n\
         The host reads the file when it starts; so a change takes effect with `holdfast grid down` and `holdfast\n\
         grid up`, or with a restart of its service. With a file that is wrong it doesn't start: it says in which\n\
         line, what, why, and what to do. Nodes take only `cache.reads` from it, and start in any case. Values\n\
         are texts: sizes as `\"256 MiB\"`, in powers of 1024; times as `\"10 min\"`, with `s`, `min`, `h`, `d` or\n\
         `w`.\n\n\
         A `grid.json` of a release that had no `holdfast.toml` may hold settings in its part `host`. They count\n\
         where `holdfast.toml` says nothing; the old names are below.\n\n\
         | key | default | what |\n| --- | --- | --- |\n",
    );
    for key in KEYS {
        text.push_str(&format!("| `{}` | {} | {} |\n", key.name, default_text(key), key.brief));
    }
    for key in KEYS {
        let older = match key.older_name {
            "" => String::new(),
            name => format!(" In an older `grid.json`: `host.{name}`."),
        };
        let told = wrap(&format!("{} {}", key.brief, key.more), 118).join("\n");
        text.push_str(&format!(
            "\n## {}\n\n{told}\n\nTakes {}. Default: {}.{older}\n\n```toml\n{} = \"{}\"\n```\n",
            key.name,
            key.kind.text(),
            default_text(key),
            key.name,
            key.example
        ));
    }
    text
}

/// A new grid's file: what was chosen is set, the rest is in comments. It has whole names, and no headers of sections, so
/// that what is added at its end counts wherever it is written.
pub fn template(chosen: &[(&str, Value)]) -> String {
    let mut text = String::from(
        "# Settings of this machine's part of the grid; read when the host starts. All keys are optional.\n\
         # `holdfast config explain` tells of them, `holdfast config check` finds mistakes.\n",
    );
    let mut section = "";
    for key in KEYS {
        if key.section() != section {
            section = key.section();
            text.push('\n');
        }
        let chosen = chosen.iter().find(|(name, _)| *name == key.name).map(|(_, value)| value);
        text.push_str(&format!("# {}\n", key.brief));
        let value = chosen
            .map_or_else(|| if key.default.is_empty() { key.example } else { key.default }.to_string(), Value::text);
        let hash = if chosen.is_some() { "" } else { "# " };
        text.push_str(&format!("{hash}{} = {}\n", key.name, quoted(&value)));
    }
    text
}

/// A text as TOML has it.
fn quoted(text: &str) -> String {
    let escape = |c: char| match c {
        '"' | '\\' => format!("\\{c}"),
        c if c.is_control() => format!("\\u{:04x}", u32::from(c)),
        c => c.to_string(),
    };
    format!("\"{}\"", text.chars().map(escape).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::super::{file, keys::Kind};
    use super::*;
    use std::path::Path;

    #[test]
    fn a_new_file_sets_what_was_chosen_and_nothing_else() {
        let read = |text: &str| file::read(Path::new("f"), text).unwrap();
        assert_eq!(read(&template(&[])).len(), 0);
        let (tcp, dir) = (Kind::Address.parse("10.0.0.1:10809").unwrap(), Kind::Directory.parse("/a \"b\"").unwrap());
        let text = template(&[("nbd.tls_dir", dir.clone()), ("nbd.tcp", tcp.clone())]);
        let found: Vec<Value> = read(&text).into_values().map(|(value, _)| value).collect();
        assert_eq!(found, [tcp, dir]);
        let added = format!("{text}care.rebuild_after = \"20 min\"\ncontrol.readers = \"ops\"\n");
        assert_eq!(read(&added).len(), 4, "at the end, too");
        // All of them, uncommented, are right.
        let bare: String = template(&[])
            .lines()
            .map(|line| match line.strip_prefix("# ") {
                Some(rest) if rest.contains(" = ") => format!("{rest}\n"),
                _ => format!("{line}\n"),
            })
            .collect();
        assert_eq!(read(&bare).len(), KEYS.len());
    }

    #[test]
    fn the_page_about_configuration_is_what_the_table_says() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/configuration.md");
        let page = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            page == markdown(),
            "it is stale: `holdfast config explain --markdown >docs/reference/configuration.md` writes it anew"
        );
    }

    #[test]
    fn keys_are_explained_one_a_section_or_all() {
        assert!(explain_keys().lines().count() == KEYS.len() + 2);
        assert!(explain_key("memory.writeback").unwrap().contains("256 MiB"));
        assert!(explain_key("care").unwrap().contains("care.scrub_every: "));
        assert!(explain_key("colour").is_none());
    }
}
