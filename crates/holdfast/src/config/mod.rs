//! Settings of one machine's part of a grid: `DIR/holdfast.toml`, which an operator writes.
//!
//! What the program itself has made (the grid's id, names, nodes, devices) is in `grid.json`, see [`crate::grid::layout`].
//! A `grid.json` of an older release may hold settings, too: they count where the TOML says nothing.

mod explain;
pub mod file;
pub mod keys;

use crate::alerts::Targets;
use crate::grid::layout::{GridConfig, GridDir};
use anyhow::{Context, Result};
pub use explain::{explain_key, explain_keys, markdown, template};
pub use file::ConfigError;
use file::{Complaint, Found};
use holdfast_base::size::Size;
use holdfast_host::Isolation;
use keys::{KEYS, Value};
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// All settings, each set or by its default.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct HostSettings {
    pub nbd_tcp: Option<SocketAddr>,
    /// Certificates (`ca-cert.pem`, `server-cert.pem`, `server-key.pem`) for NBD over TCP.
    pub tls_dir: Option<PathBuf>,
    /// Where the HTTP interface is served over TLS, with its certificates.
    pub api_tcp: Option<SocketAddr>,
    pub api_tls_dir: Option<PathBuf>,
    /// Whom the host tells what is not well.
    pub alerts: Targets,
    /// NBD over TCP may be open to everybody.
    pub nbd_open: bool,
    pub writeback_bytes: u64,
    pub map_cache_bytes: u64,
    pub read_ahead_bytes: u64,
    /// Of the host.
    pub reactors: usize,
    /// Of a node; `None` where it is to choose.
    pub node_reactors: Option<u32>,
    /// Of volumes of the host from each other.
    pub isolation: Option<Isolation>,
    /// Of the machine's CPU for packing blocks, in per cent; zero is none.
    pub packing_percent: u32,
    /// The same, while guests rest.
    pub packing_idle_percent: u32,
    pub rebuild_after: Duration,
    pub scrub_every: Duration,
    /// Of nodes; zero is none.
    pub read_cache_percent: u32,
    /// The group whose members may look at the grid.
    pub readers: Option<String>,
    /// A second machine is given the key of the grid's authority.
    pub authority_spread: bool,
}

/// Who can reach volumes over TCP by these settings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Exposure {
    /// Nobody, this machine, or clients over TLS.
    Guarded,
    /// Everybody who reaches the address, as the settings say.
    Open(SocketAddr),
    /// It would be everybody, which nothing says: the address is not served.
    Withheld(SocketAddr),
}

impl HostSettings {
    /// Where certificates of this host's servers are, each once.
    pub fn server_dirs(&self) -> impl Iterator<Item = &Path> {
        let nbd = self.tls_dir.as_deref();
        nbd.into_iter().chain(self.api_tls_dir.as_deref().filter(move |dir| Some(*dir) != nbd))
    }

    pub fn exposure(&self) -> Exposure {
        match self.nbd_tcp {
            Some(address) if self.tls_dir.is_none() && !address.ip().to_canonical().is_loopback() => {
                match self.nbd_open {
                    true => Exposure::Open(address),
                    false => Exposure::Withheld(address),
                }
            }
            _ => Exposure::Guarded,
        }
    }
}

impl Exposure {
    /// What an operator has to know, and can do.
    pub fn text(self) -> Option<String> {
        let anybody = "everybody who reaches that address";
        match self {
            Exposure::Guarded => None,
            Exposure::Open(address) => Some(format!(
                "NBD on {address} is open, as nbd.open says: {anybody} can read, overwrite and discard every volume that is not for \
                 certain clients alone; nbd.tls_dir would secure it"
            )),
            Exposure::Withheld(address) => Some(format!(
                "NBD is not served on {address}, as nbd.tcp asks for: without TLS {anybody} could read, overwrite and discard \
                 volumes. Set nbd.tls_dir (`holdfast grid tls server`), or nbd.open = \"on\" where only machines that may do all of that \
                 reach it; then restart the host"
            )),
        }
    }
}

/// Where a setting comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Origin {
    Default,
    /// `grid.json`, written by an older release.
    Older,
    /// `holdfast.toml`, in this line.
    File(usize),
}

/// One setting as it is in force from the host's next start on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Setting {
    pub value: Option<Value>,
    pub origin: Origin,
}

/// The settings of the grid in `dir`; refused where anything is wrong with them.
pub fn load(dir: &GridDir, config: &GridConfig) -> Result<HostSettings> {
    load_file(&dir.settings_path(), config).map(|all| settings(&all))
}

/// As [`load`], from any file, each with its origin, in the order of the table.
pub fn load_file(path: &Path, config: &GridConfig) -> Result<Vec<Setting>> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(e) => return Err(e).with_context(|| format!("cannot read {}; check its permissions", path.display())),
    };
    let found = file::read(path, &text)?;
    let all = merge(&found, config);
    let complaints = contradictions(&found, &all, config, memory_bytes());
    match complaints.is_empty() {
        true => Ok(all),
        false => Err(ConfigError { path: path.to_path_buf(), complaints }.into()),
    }
}

fn merge(found: &Found, config: &GridConfig) -> Vec<Setting> {
    let setting = |(at, key): (usize, &keys::Key)| {
        if let Some((value, line)) = found.get(&at) {
            return Setting { value: Some(value.clone()), origin: Origin::File(*line) };
        }
        if let Some(value) = (key.older)(&config.host) {
            return Setting { value: Some(value), origin: Origin::Older };
        }
        let default =
            (!key.default.is_empty()).then(|| key.kind.parse(key.default).expect("tested: defaults are right"));
        Setting { value: default, origin: Origin::Default }
    };
    KEYS.iter().enumerate().map(setting).collect()
}

pub fn settings(all: &[Setting]) -> HostSettings {
    let mut settings = HostSettings::default();
    for (key, setting) in KEYS.iter().zip(all) {
        if let Some(value) = setting.value.clone() {
            (key.put)(&mut settings, value);
        }
    }
    settings
}

/// What is right by itself, and not together. Only what the file sets is complained of: an older release accepted the rest.
fn contradictions(found: &Found, all: &[Setting], config: &GridConfig, memory: Option<u64>) -> Vec<Complaint> {
    let line = |name: &str| KEYS.iter().position(|key| key.name == name).and_then(|at| found.get(&at)).map(|(_, l)| *l);
    let settings = settings(all);
    let mut complaints = Vec::new();
    if let (Some(line), None) = (line("nbd.tls_dir"), settings.nbd_tcp) {
        let what = "nbd.tls_dir is set, and nbd.tcp is not: it secures NBD over TCP, which is not served".to_string();
        complaints.push(Complaint { line, what, next: "set nbd.tcp, too, or remove nbd.tls_dir".to_string() });
    }
    let dirs = [("nbd.tls_dir", &settings.tls_dir), ("api.tls_dir", &settings.api_tls_dir)];
    complaints.extend(dirs.into_iter().filter_map(|(key, dir)| about_server(key, line(key)?, dir.as_deref()?)));
    let alerts = &settings.alerts;
    let lacks = [("alerts.mail_from", &alerts.mail_from), ("alerts.mail_to", &alerts.mail_to)];
    if let (Some(line), Some((key, _))) = (line("alerts.smtp"), lacks.into_iter().find(|(_, set)| set.is_none())) {
        let what = format!("alerts.smtp is set, and {key} is not: mail has a sender and receivers");
        complaints.push(Complaint { line, what, next: format!("set {key}, too, or remove alerts.smtp") });
    }
    let is_plain = |url: &String| url.starts_with("smtp://") && !url.contains("tls=required");
    if let (Some(line), true) = (line("alerts.smtp_password_file"), alerts.smtp.as_ref().is_some_and(is_plain)) {
        let what = "alerts.smtp has no TLS, and a password would go over the network as it is".to_string();
        let next = "write smtps://USER@SERVER:465, or smtp://USER@SERVER:587?tls=required".to_string();
        complaints.push(Complaint { line, what, next });
    }
    if let Some(line) = line("api.tcp") {
        let next = "`holdfast grid tls server ADDRESS --out DIR` makes what api.tls_dir is to name";
        let lacks = if settings.api_tls_dir.is_none() {
            Some(("api.tcp is set, and api.tls_dir is not: over the network there is HTTP with TLS alone", next))
        } else if !config.tls {
            let next = "remove api.tcp; `api.sock` in the grid's directory can be reached by ssh";
            Some((
                "api.tcp is set, and this grid has no authority that callers could be known by (`grid up --tls on`)",
                next,
            ))
        } else {
            None
        };
        complaints.extend(lacks.map(|(what, next)| Complaint { line, what: what.to_string(), next: next.to_string() }));
    }
    if let (Some(line), Some(address)) = (line("nbd.tcp"), settings.nbd_tcp) {
        let is_taken = |n: &&crate::grid::layout::NodeConfig| {
            n.address.port() == address.port() && (n.address.ip() == address.ip() || address.ip().is_unspecified())
        };
        if let Some(node) = config.nodes.iter().find(is_taken) {
            let what = format!("nbd.tcp is {address}, and there node {} of this grid listens", node.id);
            complaints.push(Complaint { line, what, next: "choose another port; NBD's own is 10809".to_string() });
        }
    }
    let wanted = settings.writeback_bytes.saturating_add(settings.map_cache_bytes);
    let at = line("memory.writeback").into_iter().chain(line("memory.map_cache")).min();
    if let (Some(line), Some(memory)) = (at, memory.filter(|memory| wanted > *memory)) {
        let (wanted, memory) = (Size(wanted), Size(memory));
        let what =
            format!("memory.writeback and memory.map_cache together are {wanted}, and this machine has {memory}");
        complaints.push(Complaint { line, what, next: "choose smaller ones".to_string() });
    }
    complaints.sort_by_key(|complaint| complaint.line);
    complaints
}

/// What is wrong with a directory that one of these keys names.
fn about_server(key: &str, line: usize, dir: &Path) -> Option<Complaint> {
    let missing = ["server-cert.pem", "server-key.pem"].into_iter().find(|name| !dir.join(name).exists());
    if let Some(name) = missing {
        let what = format!("{key} can't be used: there is no {}", dir.join(name).display());
        return Some(Complaint { line, what, next: "put it there, or name another directory".to_string() });
    }
    let what = format!("{key} can't be used: {}", why_unusable(dir)?);
    Some(Complaint { line, what, next: "`holdfast grid tls server` makes a pair that is right".to_string() })
}

/// What the host would say of these certificates; who only looks at the grid perhaps may not read them.
fn why_unusable(dir: &Path) -> Option<String> {
    let is_kept_secret = |e: &std::io::Error| e.kind() == std::io::ErrorKind::PermissionDenied;
    if fs::File::open(dir.join("server-key.pem")).is_err_and(|e| is_kept_secret(&e)) {
        return None;
    }
    crate::host::tls::load(dir).err().map(|error| format!("{error:#}"))
}

/// Memory of this machine, if it can be told.
fn memory_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grid::layout::{HostConfig, NodeConfig};

    fn grid(older: &str) -> GridConfig {
        let host: HostConfig = serde_json::from_str(older).unwrap();
        let node = NodeConfig { id: 1, address: "10.0.0.1:7500".parse().unwrap(), devices: Vec::new() };
        GridConfig::new(holdfast_base::GridId(7).to_string(), vec![node], host)
    }

    fn load_text(text: &str, config: &GridConfig) -> Result<HostSettings> {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("holdfast.toml");
        fs::write(&path, text).unwrap();
        load_file(&path, config).map(|all| settings(&all))
    }

    #[test]
    fn the_file_counts_before_an_older_grid_json_and_that_before_defaults() {
        let all_older = r#"{"name": "a", "nbd_tcp": "10.0.0.1:10809", "tls_dir": null, "writeback_bytes": 5242880,
            "map_cache_bytes": 12345678, "rebuild_after_s": 0, "scrub_every_s": 2}"#;
        let older = load_text("[memory]\nwriteback = '1 GiB'\n", &grid(all_older)).unwrap();
        let (defaults, none) = (load_text("", &grid("{}")).unwrap(), grid(r#"{"name": "a"}"#));
        assert_eq!((older.writeback_bytes, older.map_cache_bytes), (1 << 30, 12_345_678));
        assert_eq!((older.rebuild_after.as_secs(), older.scrub_every.as_secs()), (1, 2), "0 meant 1 before");
        assert_eq!(older.nbd_tcp, Some("10.0.0.1:10809".parse().unwrap()));
        assert_eq!((defaults.writeback_bytes, defaults.map_cache_bytes), (256 << 20, 64 << 20));
        assert_eq!((defaults.rebuild_after.as_secs(), defaults.scrub_every.as_secs()), (600, 14 * 86_400));
        assert_eq!(load_file(Path::new("/nowhere/holdfast.toml"), &none).map(|all| settings(&all)).unwrap(), defaults);
    }

    #[test]
    fn other_machines_are_served_without_tls_only_where_the_settings_say_so() {
        let exposure = |text: &str| load_text(text, &grid("{}")).unwrap().exposure();
        let address = "10.0.0.1:10809".parse().unwrap();
        assert_eq!(exposure(""), Exposure::Guarded);
        assert_eq!(exposure("[nbd]\ntcp = '127.0.0.1:10809'"), Exposure::Guarded);
        assert_eq!(exposure("[nbd]\ntcp = '[::1]:10809'"), Exposure::Guarded);
        assert_eq!(exposure("[nbd]\ntcp = '10.0.0.1:10809'"), Exposure::Withheld(address));
        assert_eq!(exposure("[nbd]\ntcp = '10.0.0.1:10809'\nopen = 'on'"), Exposure::Open(address));
        assert!(matches!(exposure("[nbd]\ntcp = '0.0.0.0:10809'"), Exposure::Withheld(_)));
        let secured = HostSettings { nbd_tcp: Some(address), tls_dir: Some("/tls".into()), ..HostSettings::default() };
        assert_eq!(secured.exposure(), Exposure::Guarded);
        // An older release served it.
        let older = load_text("", &grid(r#"{"nbd_tcp": "10.0.0.1:10809"}"#)).unwrap();
        let text = older.exposure().text().unwrap();
        assert!(text.contains("nbd.open = \"on\"") && text.contains("nbd.tls_dir"), "{text}");
    }

    #[test]
    fn what_contradicts_is_refused() {
        let refused = |text: &str| load_text(text, &grid("{}")).unwrap_err().to_string();
        let error = refused("[nbd]\ntls_dir = '/nowhere'");
        assert!(error.contains("line 2: nbd.tls_dir is set, and nbd.tcp is not"), "{error}");
        assert!(error.contains("no /nowhere/server-cert.pem"), "{error}");
        let error = refused("[nbd]\ntcp = '0.0.0.0:7500'");
        assert!(error.contains("node 1 of this grid listens"), "{error}");
        let error = refused("[api]\ntcp = '10.0.0.1:8443'");
        assert!(error.contains("line 2: api.tcp is set, and api.tls_dir is not"), "{error}");
        let error = refused("[api]\ntcp = '10.0.0.1:8443'\ntls_dir = '/nowhere'");
        assert!(error.contains("no /nowhere/server-cert.pem") && error.contains("grid up --tls on"), "{error}");
        let error = refused("[alerts]\nsmtp = 'smtp://a@mail:25'\nsmtp_password_file = '/p'");
        assert!(error.contains("alerts.mail_from is not") && error.contains("a password would go"), "{error}");
        let error = refused("[alerts]\nwebhook = 'ftp://a'\nmail_to = 'ann, bob'");
        assert!(error.contains("https:// or http://"), "{error}");
        let error = refused("[memory]\nwriteback = '1 TiB'\nmap_cache = '1 TiB'");
        assert!(error.contains("line 2: ") && error.contains("2 TiB"), "{error}");
        // An older release took it so.
        assert!(load_text("", &grid(r#"{"tls_dir": "/nowhere"}"#)).is_ok());
    }
}
