//! A version's part of CHANGELOG.md: as notes of the release, and as the package's changelog.

use anyhow::{Context, Result, bail};

/// Text under the newest version's heading, which has to be `version`.
pub fn of_version(changelog: &str, version: &str) -> Result<String> {
    let headings = || changelog.lines().enumerate().filter(|(_, line)| line.starts_with("## "));
    let is_version = |line: &str| line.trim_start_matches("## ").starts_with(|c: char| c.is_ascii_digit());
    let (at, newest) = headings().find(|(_, line)| is_version(line)).context("CHANGELOG.md has no version")?;
    if newest.trim_start_matches("## ") != version {
        bail!("the newest version of CHANGELOG.md is `{newest}`, and that of Cargo.toml {version}: make them the same");
    }
    let is_further = |line: &&str| !line.starts_with("## ");
    let lines: Vec<&str> = changelog.lines().skip(at + 1).take_while(is_further).collect();
    let text = lines.join("\n").trim().to_string();
    if text.is_empty() {
        bail!("CHANGELOG.md says nothing of {version}");
    }
    Ok(text)
}

/// The page that goes with a release.
pub fn page(notes: &str, version: &str) -> String {
    format!(
        "# Holdfast {version}\n\n\
         Debian 12 and 13, Ubuntu 22.04 and 24.04, on x86-64: `apt install ./holdfast_{version}_amd64.deb`. Check what you \
         have by `sha256sum --check SHA256SUMS` before.\n\n{notes}\n"
    )
}

/// In the form of Debian, with `date` as RFC 5322 has it.
pub fn debian(notes: &str, version: &str, maintainer: &str, date: &str) -> String {
    let mut text = format!("holdfast ({version}) unstable; urgency=medium\n\n");
    for item in items(notes) {
        for (index, line) in wrapped(&item, 74).into_iter().enumerate() {
            text += &format!("  {} {line}\n", if index == 0 { "*" } else { " " });
        }
    }
    text + &format!("\n -- {maintainer}  {date}\n")
}

/// Items of all lists, each with the last heading or paragraph that ends in a colon before it.
fn items(notes: &str) -> Vec<String> {
    let mut items: Vec<String> = Vec::new();
    let (mut of, mut is_open) = (String::new(), false);
    for line in notes.lines().map(str::trim_end) {
        if let Some(item) = line.strip_prefix("- ") {
            items.push(if of.is_empty() { item.to_string() } else { format!("{of}: {item}") });
            is_open = true;
        } else if let Some(more) = line.strip_prefix("  ").filter(|_| is_open) {
            let last = items.last_mut().expect("an item is open");
            *last += &format!(" {}", more.trim());
        } else {
            is_open = false;
            let title = line.strip_suffix(':').or_else(|| line.strip_prefix("### "));
            of = title.map_or(of, str::to_string);
        }
    }
    items
}

fn wrapped(text: &str, columns: usize) -> Vec<String> {
    let mut lines: Vec<String> = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("there is a line");
        if line.is_empty() {
            line.push_str(word);
        } else if line.chars().count() + 1 + word.chars().count() <= columns {
            *line += &format!(" {word}");
        } else {
            lines.push(word.to_string());
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHANGELOG: &str = "# Changelog\n\n## Unreleased\n\n## 1.2.0\n\n### Added\n\nVolumes:\n\n- one\n  and two\n- three\n\n\
                             ## 1.1.0\n\n- old\n";

    #[test]
    fn a_version_is_the_newest_of_the_changelog_or_refused() {
        let notes = of_version(CHANGELOG, "1.2.0").unwrap();
        assert_eq!(notes, "### Added\n\nVolumes:\n\n- one\n  and two\n- three");
        assert!(of_version(CHANGELOG, "1.1.0").unwrap_err().to_string().contains("1.2.0"));
        assert!(of_version("# Changelog\n\n## 1.2.0\n\n## 1.1.0\n\n- old\n", "1.2.0").is_err());
    }

    #[test]
    fn debians_changelog_has_each_item() {
        let notes = of_version(CHANGELOG, "1.2.0").unwrap();
        let text = debian(&notes, "1.2.0", "M <m@m>", "Thu, 01 Jan 1970 00:00:00 +0000");
        let expected = "holdfast (1.2.0) unstable; urgency=medium\n\n  * Volumes: one and two\n  * Volumes: three\n\n \
                        -- M <m@m>  Thu, 01 Jan 1970 00:00:00 +0000\n";
        assert_eq!(text, expected);
        assert_eq!(wrapped("aa bb cc", 5), ["aa bb", "cc"]);
    }
}
