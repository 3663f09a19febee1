//! All keys of `holdfast.toml`, in one table: it drives reading, checking, explaining and docs/configuration.md.

use super::HostSettings;
use crate::grid::layout::HostConfig;
use crate::host::schedule::Span;
use crate::size::Size;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// How a value is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A number of bytes between these.
    Size(u64, u64),
    /// A number of seconds between these.
    Span(u64, u64),
    /// An address of this machine with a port.
    Address,
    /// An absolute path.
    Directory,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Value {
    Size(Size),
    Span(Duration),
    Address(SocketAddr),
    Directory(PathBuf),
}

/// One key.
pub struct Key {
    pub name: &'static str,
    pub kind: Kind,
    /// As it would be written; empty where there is none.
    pub default: &'static str,
    pub example: &'static str,
    /// One sentence.
    pub brief: &'static str,
    /// What is worth knowing before it is changed.
    pub more: &'static str,
    /// Its name among `host` in the `grid.json` of releases that had no `holdfast.toml`.
    pub older_name: &'static str,
    /// What such a `grid.json` says.
    pub older: fn(&HostConfig) -> Option<Value>,
    pub put: fn(&mut HostSettings, Value),
}

const MIB: u64 = 1 << 20;
const YEAR_S: u64 = 365 * 24 * 3600;

/// By section, as in the file.
pub const KEYS: &[Key] = &[
    Key {
        name: "nbd.tcp",
        kind: Kind::Address,
        default: "",
        example: "10.0.0.1:10809",
        brief: "Address and port on which volumes are served over NBD by TCP, besides the unix socket.",
        more: "By default there is only the unix socket `nbd.sock` in the grid's directory. Who can reach the port can read and \
               write every volume, unless `nbd.tls_dir` is set with a `ca-cert.pem`. Several hosts of a grid each have an \
               address of their own. `holdfast grid up --nbd-tcp` sets it when the grid is made.",
        older_name: "nbd_tcp",
        older: |host| host.nbd_tcp.map(Value::Address),
        put: |settings, value| settings.nbd_tcp = value.address(),
    },
    Key {
        name: "nbd.tls_dir",
        kind: Kind::Directory,
        default: "",
        example: "/etc/holdfast/nbd-tls",
        brief: "Directory with the certificates that secure NBD over TCP.",
        more: "It holds `server-cert.pem` and `server-key.pem`. With a `ca-cert.pem` beside them, clients need a certificate of \
               that authority. It says nothing about the links between hosts and nodes: these have certificates of the grid's \
               own (`holdfast grid tls show`). Needs `nbd.tcp`.",
        older_name: "tls_dir",
        older: |host| host.tls_dir.clone().map(Value::Directory),
        put: |settings, value| settings.tls_dir = value.directory(),
    },
    Key {
        name: "memory.writeback",
        kind: Kind::Size(MIB, MIB << 20),
        default: "256 MiB",
        example: "1 GiB",
        brief: "Memory of the host for log entries that have not become segments yet, over all volumes.",
        more: "More of it makes segments larger and overwritten blocks cheaper, and recovery after a crash of the host longer: it \
               reads as much from the nodes. Writers are slowed from half of it on. Volumes share it equally.",
        older_name: "writeback_bytes",
        older: |host| host.writeback_bytes.map(|bytes| Value::Size(Size(bytes))),
        put: |settings, value| settings.writeback_bytes = value.count(),
    },
    Key {
        name: "memory.map_cache",
        kind: Kind::Size(MIB, MIB << 20),
        default: "64 MiB",
        example: "256 MiB",
        brief: "Memory of the host for parts of volumes' maps that are in use, over all volumes.",
        more: "A read of a block whose part of the map is not in memory costs one more read from the nodes. Volumes share it \
               equally.",
        older_name: "map_cache_bytes",
        older: |host| host.map_cache_bytes.map(|bytes| Value::Size(Size(bytes))),
        put: |settings, value| settings.map_cache_bytes = value.count(),
    },
    Key {
        name: "care.rebuild_after",
        kind: Kind::Span(1, YEAR_S),
        default: "10 min",
        example: "1 h",
        brief: "Time after which what an absent node or a slow device held is made again elsewhere.",
        more: "Until then volumes are read and written without it, less redundant than promised. Shorter means less time at risk; \
               longer means no needless copying for a node that is restarted or moved. `holdfast node stop` counts it, too.",
        older_name: "rebuild_after_s",
        older: |host| host.rebuild_after_s.map(|seconds| Value::Span(Duration::from_secs(seconds.max(1)))),
        put: |settings, value| settings.rebuild_after = Duration::from_secs(value.count()),
    },
    Key {
        name: "care.scrub_every",
        kind: Kind::Span(1, YEAR_S),
        default: "14 d",
        example: "7 d",
        brief: "Time in which every shard is read and checked once.",
        more: "Damage that nobody reads is found no later than this. A shorter time costs device reads all the while.",
        older_name: "scrub_every_s",
        older: |host| host.scrub_every_s.map(|seconds| Value::Span(Duration::from_secs(seconds.max(1)))),
        put: |settings, value| settings.scrub_every = Duration::from_secs(value.count()),
    },
];

/// Keys that one might look for here, and why they are not here.
pub const ELSEWHERE: &[(&str, &str)] = &[
    ("name", "a host's name is chosen by `holdfast grid up --name` and stays: certificates and volumes name it"),
    ("host.name", "a host's name is chosen by `holdfast grid up --name` and stays: certificates and volumes name it"),
    ("grid", "the grid's id is made with it and stands in grid.json"),
    ("nodes", "nodes and devices are added by `holdfast node add` and `holdfast device add`, and stand in grid.json"),
    ("meta", "the metadata store is chosen by `holdfast grid up --etcd` or `holdfast meta import`"),
    ("tls", "TLS between hosts and nodes is chosen by `holdfast grid up --tls`, when a grid is made"),
];

impl Key {
    pub fn section(&self) -> &'static str {
        self.name.split_once('.').map_or("", |(section, _)| section)
    }

    /// Its name within its section.
    pub fn leaf(&self) -> &'static str {
        self.name.split_once('.').map_or(self.name, |(_, leaf)| leaf)
    }
}

impl Kind {
    /// What may be written.
    pub fn text(self) -> String {
        match self {
            Kind::Size(from, to) => format!("a size from {} to {}", Size(from), Size(to)),
            Kind::Span(from, to) => format!("a time from {} to {}", span_text(from), span_text(to)),
            Kind::Address => "an address with a port".to_string(),
            Kind::Directory => "an absolute path".to_string(),
        }
    }

    /// The value that `text` stands for, or what is wrong with it.
    pub fn parse(self, text: &str) -> Result<Value, String> {
        let in_range = |count: u64, from: u64, to: u64| match (from..=to).contains(&count) {
            true => Ok(count),
            false => Err(format!("`{text}` is out of range: it is {}", self.text())),
        };
        match self {
            Kind::Size(from, to) => {
                let size: Size = text.parse().map_err(|e: crate::size::ParseSizeError| e.to_string())?;
                in_range(size.0, from, to).map(|bytes| Value::Size(Size(bytes)))
            }
            Kind::Span(from, to) => {
                let span: Span = text.parse().map_err(|e: anyhow::Error| e.to_string())?;
                in_range(span.seconds(), from, to).map(|seconds| Value::Span(Duration::from_secs(seconds)))
            }
            Kind::Address => {
                let wrong = |_| format!("`{text}` is no IP address with a port");
                text.parse().map(Value::Address).map_err(wrong)
            }
            Kind::Directory if text.starts_with('/') => Ok(Value::Directory(PathBuf::from(text))),
            Kind::Directory => Err(format!("`{text}` is no absolute path: it has to begin with /")),
        }
    }
}

impl Value {
    /// Bytes or seconds.
    pub fn count(&self) -> u64 {
        match self {
            Value::Size(size) => size.0,
            Value::Span(span) => span.as_secs(),
            Value::Address(_) | Value::Directory(_) => unreachable!("the table puts only numbers where numbers go"),
        }
    }

    fn address(self) -> Option<SocketAddr> {
        match self {
            Value::Address(address) => Some(address),
            _ => unreachable!("the table puts only addresses where addresses go"),
        }
    }

    fn directory(self) -> Option<PathBuf> {
        match self {
            Value::Directory(path) => Some(path),
            _ => unreachable!("the table puts only paths where paths go"),
        }
    }

    /// As it is written in the file, without quotes.
    pub fn text(&self) -> String {
        match self {
            // Sizes that print rounded are written exactly.
            Value::Size(size) if size.to_string().parse() == Ok(*size) => size.to_string(),
            Value::Size(size) => size.0.to_string(),
            Value::Span(span) => span_text(span.as_secs()),
            Value::Address(address) => address.to_string(),
            Value::Directory(path) => path.display().to_string(),
        }
    }
}

/// A time in the largest unit of which it is a multiple.
fn span_text(seconds: u64) -> String {
    let units = [(86_400, "d"), (3600, "h"), (60, "min")];
    let (unit, name) = units.into_iter().find(|(unit, _)| seconds.is_multiple_of(*unit)).unwrap_or((1, "s"));
    format!("{} {name}", seconds / unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sound() {
        for key in KEYS {
            assert!(key.name.split('.').count() == 2, "{}: every key is in a section", key.name);
            assert!(key.brief.ends_with('.') && key.more.ends_with('.'), "{}", key.name);
            for text in [key.default, key.example].into_iter().filter(|text| !text.is_empty()) {
                let value = key.kind.parse(text).unwrap();
                assert_eq!(value.text(), text, "{}: it is told as it is written", key.name);
                (key.put)(&mut HostSettings::default(), value);
            }
        }
        let sections: Vec<&str> = KEYS.iter().map(Key::section).collect();
        let mut sorted = sections.clone();
        sorted.dedup();
        let distinct: std::collections::BTreeSet<&str> = sections.iter().copied().collect();
        assert_eq!(sorted.len(), distinct.len(), "keys of a section stand together");
    }

    #[test]
    fn values_are_checked() {
        let size = Kind::Size(MIB, 10 * MIB);
        assert_eq!(size.parse("2 MiB"), Ok(Value::Size(Size(2 * MIB))));
        assert!(size.parse("2 GiB").unwrap_err().contains("from 1 MiB to 10 MiB"));
        assert!(size.parse("much").unwrap_err().contains("8GiB"));
        let span = Kind::Span(1, 3600);
        for (text, seconds) in [("10 min", 600), ("10m", 600), ("90 s", 90), ("1h", 3600)] {
            assert_eq!(span.parse(text), Ok(Value::Span(Duration::from_secs(seconds))), "{text}");
        }
        assert!(span.parse("2 d").unwrap_err().contains("from 1 s to 1 h"));
        assert!(span.parse("soon").is_err() && span.parse("0 s").is_err());
        assert!(Kind::Address.parse("10.0.0.1").is_err() && Kind::Directory.parse("tls").is_err());
    }
}
