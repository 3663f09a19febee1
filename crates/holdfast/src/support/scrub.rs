//! Secrets taken out of texts that go to strangers: those that are known to lie on this machine, and all that looks like one.
//!
//! Too much is better than too little: a text of 64 hexadecimal digits goes, though it may be a sum and no key.

use crate::config::{HostSettings, keys};
use crate::grid::layout::{GridConfig, GridDir, MetaConfig};
use regex_lite::{Captures, Regex};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// Stands in place of a secret.
const GONE: &str = "[secret]";

/// Shorter texts are found by chance, and are no secrets worth the name.
const KNOWN_CHARS_MIN: usize = 5;

/// More than files of keys and passwords have.
const FILE_BYTES_MAX: u64 = 64 << 10;

/// Patterns of secrets, with what is put in their places.
const PATTERNS: &[(&str, &str)] = &[
    (r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\z)", "[private key]"),
    (r"hfjoin[0-9]_[A-Za-z0-9_-]+", "[join token]"),
    (r"holdfast-token\.[A-Za-z0-9_.-]+", "[token]"),
    (r"(?i)\b(bearer|basic) +[A-Za-z0-9+/=._~-]{6,}", "$1 [secret]"),
    (r"(?i)(authorization|cookie)(\\?[\x22']?\s*[:=]\s*\\?[\x22']?)[^\s\x22'\\]+( [^\s\x22'\\]+)?", "$1$2[secret]"),
    (r"key command `[^`]*`", "key command [secret]"),
    // A user's name stays, and the password goes.
    (r"([A-Za-z][A-Za-z0-9+.-]*://[^\s/:@\x22'`]*):[^\s/\x22'`]+@", "$1:[secret]@"),
    // An address of a webhook is a secret as a whole, but for its server.
    (r"(https?://[^\s/\x22'`?#\\]+)[/?#][^\s\x22'`\\]*", "$1/[secret]"),
    (
        r"(?i)(pass(?:word|wd|phrase)?|secret|token|api[_-]?key|private[_-]?key)(\\?[\x22']?\s*[=:]\s*\\?[\x22']?)[^\s\x22'`,;&\\]+",
        "$1$2[secret]",
    ),
    (r"\b[0-9A-Fa-f]{64,}\b", "[64 digits]"),
];

/// Takes secrets out of texts.
pub struct Scrubber {
    /// The longest first: one may hold another.
    known: Vec<String>,
    patterns: Vec<(Regex, &'static str)>,
}

impl Scrubber {
    /// With what this machine's part of a grid keeps secret, as far as its files tell.
    pub fn of(dir: &GridDir) -> Scrubber {
        let config = dir.load().ok();
        let settings = config.as_ref().and_then(|config| dir.settings(config).ok());
        let mut known = Vec::new();
        known.extend(of_settings_file(&dir.settings_path()));
        known.extend(settings.iter().flat_map(of_settings));
        known.extend(config.iter().flat_map(of_metadata));
        known.extend(of_key_sources(&dir.keys_path()));
        known.extend(of_directory(&dir.tls_dir()));
        Scrubber::with(known)
    }

    fn with(known: Vec<String>) -> Scrubber {
        // What makes an address a secret stands behind its server, and may stand somewhere without it.
        let parts =
            known.iter().filter_map(|text| text.split_once("://")).flat_map(|(_, rest)| rest.split('/').skip(1));
        let parts: Vec<String> = parts.map(str::to_string).collect();
        let known = known.into_iter().chain(parts);
        let mut known: Vec<String> = known.filter(|text| text.len() >= KNOWN_CHARS_MIN).collect();
        known.sort_by_key(|text| std::cmp::Reverse(text.len()));
        known.dedup();
        let compile = |(pattern, by): &(&str, &'static str)| (Regex::new(pattern).expect("tested: it compiles"), *by);
        Scrubber { known, patterns: PATTERNS.iter().map(compile).collect() }
    }

    pub fn scrub(&self, text: &str) -> String {
        let mut text = self.known.iter().fold(text.to_string(), |text, known| text.replace(known, GONE));
        for (pattern, by) in &self.patterns {
            let put = |found: &Captures<'_>| {
                let mut out = String::new();
                found.expand(by, &mut out);
                out
            };
            text = pattern.replace_all(&text, put).into_owned();
        }
        text
    }
}

fn of_settings(settings: &HostSettings) -> Vec<String> {
    let mut known = Vec::new();
    known.extend(settings.alerts.smtp_password_file.iter().flat_map(|path| of_file(path)));
    known.extend(settings.alerts.webhook.clone());
    known.extend(settings.server_dirs().flat_map(of_directory));
    known
}

/// The same of a file that is wrong, or of settings that were commented out: a line that names one of them holds a secret.
fn of_settings_file(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap_or_default();
    let secrets = keys::KEYS.iter().filter(|key| key.is_secret() || key.names_a_secret());
    let mut known = Vec::new();
    for key in secrets {
        for line in text.lines().filter(|line| line.contains(key.leaf())) {
            let values = line.split(['"', '\'']).skip(1).step_by(2).filter(|value| !value.is_empty());
            for value in values {
                match key.names_a_secret() {
                    true => known.extend(of_file(Path::new(value))),
                    false => known.push(value.to_string()),
                }
            }
        }
    }
    known
}

/// Passwords in addresses of etcd, and the keys by which it is reached.
fn of_metadata(config: &GridConfig) -> Vec<String> {
    let MetaConfig::Etcd(etcd) = &config.meta else { return Vec::new() };
    let password = |endpoint: &String| {
        let (user, _) = endpoint.split_once("://")?.1.split_once('@')?;
        user.split_once(':').map(|(_, password)| password.to_string())
    };
    let of_tls = etcd.tls_dir.iter().flat_map(|dir| of_directory(dir));
    etcd.endpoints.iter().filter_map(password).chain(of_tls).collect()
}

/// Keys of encrypted volumes that lie in files, and commands that get others.
fn of_key_sources(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap_or_default();
    let mut known = Vec::new();
    let mut waiting: Vec<Value> = serde_json::from_str(&text).into_iter().collect();
    while let Some(value) = waiting.pop() {
        match value {
            Value::Array(inner) => waiting.extend(inner),
            Value::Object(fields) => {
                let text_of = |name: &str| {
                    let found = fields.iter().find(|(field, _)| field.eq_ignore_ascii_case(name));
                    found.and_then(|(_, value)| value.as_str()).map(str::to_string)
                };
                known.extend(text_of("file").iter().flat_map(|path| of_file(Path::new(path))));
                if let Some(command) = text_of("command") {
                    // As it is, as JSON shows it, and what stands in it that is long and no path.
                    let words = command.split_whitespace().filter(|word| word.len() >= 8 && !word.contains('/'));
                    known.extend(words.map(str::to_string));
                    known.push(Value::from(command.clone()).to_string().trim_matches('"').to_string());
                    known.push(command);
                }
                waiting.extend(fields.into_iter().map(|(_, value)| value));
            }
            _ => {}
        }
    }
    known
}

/// All files of keys there.
fn of_directory(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let is_key = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
        name.ends_with(".key") || name.contains("key.pem") || name.contains("token") || name.contains("password")
    };
    entries.map(|entry| entry.path()).filter(is_key).flat_map(|path| of_file(&path)).collect()
}

/// The lines of a file whose whole content is a secret.
fn of_file(path: &Path) -> Vec<String> {
    let is_small = fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.len() <= FILE_BYTES_MAX);
    let bytes = if is_small { fs::read(path).unwrap_or_default() } else { Vec::new() };
    let text = String::from_utf8_lossy(&bytes);
    let lines = text.lines().map(str::trim).filter(|line| !line.starts_with("-----"));
    lines.map(str::to_string).chain(Some(text.trim().to_string())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_looks_like_a_secret_goes_and_the_rest_stays() {
        let scrubber = Scrubber::with(vec!["hunter2hunter2".into(), "abc".into()]);
        for (text, expected) in [
            ("password is hunter2hunter2, abc", "password is [secret], abc"),
            ("a hfjoin1_AQEB-x_y b", "a [join token] b"),
            ("Authorization: Bearer holdfast-token.abc_.def- x", "Authorization: [secret] x"),
            ("-----BEGIN EC PRIVATE KEY-----\nMII\n-----END EC PRIVATE KEY-----\nx", "[private key]\nx"),
            ("\"-----BEGIN PRIVATE KEY-----\\nMII", "\"[private key]"),
            ("smtps://ann:s3cret@mail:465", "smtps://ann:[secret]@mail:465"),
            ("smtps://ann@mail:465", "smtps://ann@mail:465"),
            ("\"https://chat.example.org/hooks/x1\"", "\"https://chat.example.org/[secret]\""),
            ("etcd at https://10.0.0.1:2379, x", "etcd at https://10.0.0.1:2379, x"),
            ("its key command `vault read -token=s.abc` fails", "its key command [secret] fails"),
            ("run --password=abcdef now", "run --password=[secret] now"),
            ("{\"token\": \"abcdef\"}", "{\"token\": \"[secret]\"}"),
            ("node 1: 10.0.0.1:7500 up", "node 1: 10.0.0.1:7500 up"),
        ] {
            assert_eq!(scrubber.scrub(text), expected, "{text}");
        }
        assert_eq!(scrubber.scrub(&"5a".repeat(32)), "[64 digits]");
        assert_eq!(scrubber.scrub(&"5a".repeat(16)), "5a".repeat(16), "an id");
    }
}
