//! Where a local grid keeps what, and the file that says what belongs to it.
//!
//! ```text
//! DIR/grid.json      what the program made: id, nodes, devices; written last when a grid is made, so that what it names exists
//! DIR/holdfast.toml  what the operator sets (see `config`)
//! DIR/grid.prepared  the id of a grid that is to be made here, whose authority is there already (see `etcd`)
//! DIR/grid.creating  there while a grid is being made or joined: what of it is there already (see `creating`)
//! DIR/grid.adding    devices that a command is just making, for the next one if it is cut short
//! DIR/grid.removing  devices that a command is just taking out, for the same (see `removing`)
//! DIR/machine.json   this machine's id among all that were ever of the grid (see `host::machines`)
//! DIR/removed        there where the machine was taken out of the grid: by whom, and what to do
//! DIR/grid.lock      held by `grid up` and `grid down`
//! DIR/devices/       node1-0.img …
//! DIR/meta.redb      the embedded metadata store, the host's alone; nothing where etcd keeps the metadata
//! DIR/nbd.sock       all exports
//! DIR/tls/           certificates of the links, where the grid has TLS (see `certs`)
//! DIR/control.sock   the host's control socket; reader.sock beside it where the setting `control.readers` names a group
//! DIR/keys.json      where this host gets keys of encrypted volumes, and no keys
//! DIR/logs/, DIR/run/   one log and one pid file a process
//! ```

use super::units::{PACKAGED_DIR, PACKAGED_PROGRAM};
use crate::config::HostSettings;
use crate::remote::Remote;
use anyhow::{Context, Result};
use holdfast_api::{Code, refuse};
pub use holdfast_format::meta::{DeviceConfig, NodeConfig};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs;
use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Version of the configuration file.
const CONFIG_VERSION: u32 = 1;

/// A unix socket's path has to fit its address structure.
const SOCKET_PATH_BYTES_MAX: usize = 107;

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GridConfig {
    pub version: u32,
    /// The grid's id; every device and greeting names it.
    pub grid: String,
    #[serde(default)]
    pub meta: MetaConfig,
    /// Hosts and nodes talk over TLS, and show each other certificates of the grid's own authority.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tls: bool,
    pub nodes: Vec<NodeConfig>,
    #[serde(default)]
    pub host: HostConfig,
}

/// Which store keeps the grid's metadata.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MetaConfig {
    /// A file in the grid's directory.
    #[default]
    Embedded,
    Etcd(EtcdMeta),
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EtcdMeta {
    /// One a member, for example `https://10.0.0.1:2379`.
    pub endpoints: Vec<String>,
    /// `ca-cert.pem`, and `client-cert.pem` with `client-key.pem` where the members ask for them. Without it members
    /// with `https://` go by the grid's own certificates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls_dir: Option<PathBuf>,
}

impl MetaConfig {
    /// An etcd that goes by the grid's own certificates.
    pub fn has_own_tls(&self) -> bool {
        let MetaConfig::Etcd(etcd) = self else { return false };
        etcd.tls_dir.is_none() && etcd.endpoints.iter().any(|endpoint| endpoint.starts_with("https://"))
    }
}

impl fmt::Display for MetaConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MetaConfig::Embedded => write!(f, "embedded"),
            MetaConfig::Etcd(etcd) => write!(f, "etcd at {}", etcd.endpoints.join(", ")),
        }
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HostConfig {
    /// Name of this host in root records.
    pub name: String,
    /// Where other hosts reach this one, on a machine that has no node to say it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<IpAddr>,
    // Settings from before there was a holdfast.toml: kept as they are, and read through [`GridDir::settings`] alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nbd_tcp: Option<SocketAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_dir: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub writeback_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub map_cache_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rebuild_after_s: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scrub_every_s: Option<u64>,
}

impl Default for HostConfig {
    fn default() -> HostConfig {
        HostConfig::named("local".to_string())
    }
}

impl HostConfig {
    pub fn named(name: String) -> HostConfig {
        HostConfig {
            name,
            address: None,
            nbd_tcp: None,
            tls_dir: None,
            writeback_bytes: None,
            map_cache_bytes: None,
            rebuild_after_s: None,
            scrub_every_s: None,
        }
    }
}

/// The directory of one grid.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GridDir {
    root: PathBuf,
    /// A host of it that is asked in place of this machine's.
    remote: Option<Arc<Remote>>,
}

impl GridDir {
    /// `--dir`, else `$HOLDFAST_DIR`, else `~/.holdfast/grid`. For the package's program that of its units, if there is no grid
    /// in the former, and one in this or it is root who asks.
    pub fn choose(dir: Option<&Path>) -> Result<GridDir> {
        let root = match (dir, std::env::var_os("HOLDFAST_DIR")) {
            (Some(dir), _) => dir.to_path_buf(),
            (None, Some(dir)) if !dir.is_empty() => PathBuf::from(dir),
            _ => {
                let home = std::env::var_os("HOME").filter(|home| !home.is_empty());
                match of_package_or(home.map(|home| PathBuf::from(home).join(".holdfast/grid"))) {
                    Some(root) => root,
                    None => refuse!(
                        Code::Invalid,
                        "cannot tell where the grid is: neither HOME nor HOLDFAST_DIR is set; give --dir DIR"
                    ),
                }
            }
        };
        let root = std::path::absolute(&root).with_context(|| format!("cannot use {} as --dir", root.display()))?;
        Ok(GridDir { root, remote: None })
    }

    /// Of a grid that this machine is no part of: what looks for it here finds nothing.
    pub fn elsewhere(remote: Remote) -> GridDir {
        GridDir { root: PathBuf::from("/nonexistent"), remote: Some(Arc::new(remote)) }
    }

    /// Refuses what a host elsewhere can't do.
    pub fn check_here(&self) -> Result<()> {
        if self.remote.is_some() {
            refuse!(
                Code::State,
                "this needs the grid's directory: give the command at a machine of the grid, without --at"
            );
        }
        Ok(())
    }

    pub fn remote(&self) -> Option<&Remote> {
        self.remote.as_deref()
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn config_path(&self) -> PathBuf {
        self.root.join("grid.json")
    }

    /// What the operator sets.
    pub fn settings_path(&self) -> PathBuf {
        self.root.join("holdfast.toml")
    }

    /// There while a grid is being made: what it names may be removed.
    pub fn creating_path(&self) -> PathBuf {
        self.root.join("grid.creating")
    }

    /// There before a grid is made whose etcd has to be there first.
    pub fn prepared_path(&self) -> PathBuf {
        self.root.join("grid.prepared")
    }

    /// There while devices are being made for a grid that is there, and until all know of them.
    pub fn adding_path(&self) -> PathBuf {
        self.root.join("grid.adding")
    }

    /// There while devices are being taken out, until all know of it.
    pub fn removing_path(&self) -> PathBuf {
        self.root.join("grid.removing")
    }

    /// There while devices are being replaced by others.
    pub fn replacing_path(&self) -> PathBuf {
        self.root.join("grid.replacing")
    }

    pub fn machine_path(&self) -> PathBuf {
        self.root.join("machine.json")
    }

    pub fn removed_path(&self) -> PathBuf {
        self.root.join("removed")
    }

    /// Why this machine is none of the grid's any more, if its host was told so.
    pub fn removed(&self) -> Option<String> {
        fs::read_to_string(self.removed_path()).ok()
    }

    pub fn lock_path(&self) -> PathBuf {
        self.root.join("grid.lock")
    }

    /// Certificates of the grid's links; NBD's are where the setting `nbd.tls_dir` says.
    pub fn tls_dir(&self) -> PathBuf {
        self.root.join("tls")
    }

    pub fn devices_dir(&self) -> PathBuf {
        self.root.join("devices")
    }

    pub fn meta_path(&self) -> PathBuf {
        self.root.join("meta.redb")
    }

    /// How far the metadata store had come when this machine's host saw it last.
    pub fn beat_path(&self) -> PathBuf {
        self.root.join("beat.json")
    }

    pub fn nbd_socket(&self) -> PathBuf {
        self.root.join("nbd.sock")
    }

    pub fn keys_path(&self) -> PathBuf {
        self.root.join("keys.json")
    }

    pub fn control_socket(&self) -> PathBuf {
        self.root.join("control.sock")
    }

    /// For those who may look, and change nothing.
    pub fn reader_socket(&self) -> PathBuf {
        self.root.join("reader.sock")
    }

    /// Of the HTTP interface, for all who may ask anything; who asks is told by the kernel.
    pub fn api_socket(&self) -> PathBuf {
        self.root.join("api.sock")
    }

    pub fn logs_dir(&self) -> PathBuf {
        self.root.join("logs")
    }

    pub fn run_dir(&self) -> PathBuf {
        self.root.join("run")
    }

    /// Absolute path of a device of the configuration.
    pub fn device_path(&self, device: &DeviceConfig) -> PathBuf {
        self.root.join(&device.path)
    }

    /// Refuses a directory whose sockets could not be bound.
    pub fn check_socket_paths(&self) -> Result<()> {
        let longest = self.control_socket();
        let len = longest.as_os_str().len();
        if len > SOCKET_PATH_BYTES_MAX {
            refuse!(
                Code::Invalid,
                "cannot keep a grid in {}: the path of its sockets would have {len} bytes and unix sockets allow \
                 {SOCKET_PATH_BYTES_MAX}; choose a shorter --dir",
                self.root.display()
            );
        }
        Ok(())
    }

    pub fn exists(&self) -> bool {
        self.config_path().exists()
    }

    /// The configuration of a grid that must exist.
    pub fn load(&self) -> Result<GridConfig> {
        self.check_here()?;
        let path = self.config_path();
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => refuse!(
                Code::NotFound,
                "there is no grid in {} (no grid.json); make one with `holdfast grid up`, or name its directory with \
                 --dir or HOLDFAST_DIR",
                self.root.display()
            ),
            Err(e) => return Err(e).with_context(|| format!("cannot read {}; check its permissions", path.display())),
        };
        let config: GridConfig = serde_json::from_str(&text)
            .with_context(|| format!("cannot use {}: mend it by hand, or restore a copy", path.display()))?;
        if config.version != CONFIG_VERSION {
            refuse!(
                Code::Unsupported,
                "{} has version {}, and this release knows {CONFIG_VERSION}; use the release that made it",
                path.display(),
                config.version
            );
        }
        Ok(config)
    }

    /// The operator's settings, checked, of the grid with this configuration.
    pub fn settings(&self, config: &GridConfig) -> Result<HostSettings> {
        crate::config::load(self, config)
    }

    /// Replaces the configuration in one step, durably.
    pub fn save(&self, config: &GridConfig) -> Result<()> {
        let mut text = serde_json::to_string_pretty(config).expect("our configuration always encodes");
        text.push('\n');
        write_durably(&self.config_path(), text.as_bytes())
    }
}

/// The package's directory where its program is asked, no grid is at home, and one is there or is to be root's.
fn of_package_or(home: Option<PathBuf>) -> Option<PathBuf> {
    let has_grid = |root: &Path| root.join("grid.json").exists();
    let is_packaged = || std::env::current_exe().is_ok_and(|program| program == Path::new(PACKAGED_PROGRAM));
    let packaged = Path::new(PACKAGED_DIR);
    // A grid that root makes is the machine's.
    let is_for_it = has_grid(packaged) || rustix::process::geteuid().is_root();
    let is_its = is_for_it && !home.as_deref().is_some_and(has_grid);
    if is_its && is_packaged() { Some(packaged.to_path_buf()) } else { home }
}

impl GridConfig {
    pub fn new(grid: String, nodes: Vec<NodeConfig>, host: HostConfig) -> GridConfig {
        GridConfig { version: CONFIG_VERSION, grid, meta: MetaConfig::default(), tls: false, nodes, host }
    }

    pub fn grid_id(&self) -> Result<holdfast_base::GridId> {
        self.grid.parse().context("the grid id in grid.json is damaged; restore a copy of the file")
    }

    /// Where this machine's part of the grid listens, if that was ever said.
    pub fn address(&self) -> Option<IpAddr> {
        self.nodes.first().map(|node| node.address.ip()).or(self.host.address)
    }

    pub fn node(&self, id: u32) -> Result<&NodeConfig> {
        if let Some(found) = self.nodes.iter().find(|n| n.id == id) {
            return Ok(found);
        }
        let ids: Vec<String> = self.nodes.iter().map(|n| n.id.to_string()).collect();
        let known = if ids.is_empty() {
            "none is known here".to_string()
        } else {
            format!("known here are {}", ids.join(", "))
        };
        refuse!(Code::NotFound, "there is no node {id}; {known}")
    }
}

/// Replaces a file: what was there stays until all of `bytes` is durable.
pub fn write_durably(path: &Path, bytes: &[u8]) -> Result<()> {
    Replacement::prepare(path, bytes)?.put()
}

/// Removes a file, if it is there.
pub fn remove_if_there(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(e).with_context(|| format!("cannot remove {}; check permissions", path.display()))
        }
        _ => Ok(()),
    }
}

/// As [`write_durably`], a file that only its owner may read.
pub fn write_secret(path: &Path, bytes: &[u8]) -> Result<()> {
    Replacement::prepare_secret(path, bytes)?.put()
}

/// Where a file is; one that is named alone is where the process is.
fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The new content of a file, durable beside it. Files that belong together are prepared before the first is put in place: what
/// can fail for want of space has been done by then.
pub struct Replacement {
    path: PathBuf,
    /// Renamed, or removed with this.
    beside: PathBuf,
}

impl Replacement {
    pub fn prepare(path: &Path, bytes: &[u8]) -> Result<Replacement> {
        Self::write(path, path.with_extension("new"), bytes, 0o666)
    }

    pub fn prepare_secret(path: &Path, bytes: &[u8]) -> Result<Replacement> {
        Self::write(path, path.with_extension("new-key"), bytes, 0o600)
    }

    /// One that was prepared by a process that was killed then, if there is any.
    pub fn left_beside(path: &Path) -> Option<Replacement> {
        let beside = path.with_extension("new");
        beside.exists().then(|| Replacement { path: path.to_path_buf(), beside })
    }

    pub fn bytes(&self) -> std::io::Result<String> {
        fs::read_to_string(&self.beside)
    }

    fn write(path: &Path, beside: PathBuf, bytes: &[u8], mode: u32) -> Result<Replacement> {
        let replacement = Replacement { path: path.to_path_buf(), beside };
        let beside = &replacement.beside;
        let write = || -> std::io::Result<()> {
            // One that a crash has left may be readable by others.
            let _ = fs::remove_file(beside);
            let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(beside)?;
            file.write_all(bytes)?;
            file.sync_all()
        };
        write().with_context(|| format!("cannot write {}; check space and permissions", path.display()))?;
        Ok(replacement)
    }

    pub fn put(self) -> Result<()> {
        let put = || -> std::io::Result<()> {
            fs::rename(&self.beside, &self.path)?;
            fs::File::open(directory_of(&self.path))?.sync_all()
        };
        put().with_context(|| format!("cannot replace {}; check permissions", self.path.display()))
    }
}

impl Drop for Replacement {
    fn drop(&mut self) {
        // What there was no room for takes none; what is in its place has another name.
        let _ = fs::remove_file(&self.beside);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_reads_back_and_a_missing_one_says_what_to_do() {
        let temp = tempfile::tempdir().unwrap();
        let dir = GridDir::choose(Some(temp.path())).unwrap();
        assert!(dir.load().unwrap_err().to_string().contains("holdfast grid up"));
        let node = NodeConfig { id: 1, address: "127.0.0.1:7501".parse().unwrap(), devices: Vec::new() };
        let config = GridConfig::new(holdfast_base::GridId(7).to_string(), vec![node], HostConfig::default());
        dir.save(&config).unwrap();
        assert_eq!(dir.load().unwrap(), config);
        assert!(config.node(2).unwrap_err().to_string().contains("no node 2; known here are 1"));
    }

    #[test]
    fn a_file_that_is_named_alone_is_made_durable_where_the_process_is() {
        assert_eq!(directory_of(Path::new("meta.json")), Path::new("."));
        assert_eq!(directory_of(Path::new("a/meta.json")), Path::new("a"));
        assert_eq!(directory_of(Path::new("/meta.json")), Path::new("/"));
    }

    #[test]
    fn a_file_that_could_not_be_replaced_stays_and_nothing_lies_beside_it() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("a.json");
        write_durably(&path, b"old").unwrap();
        drop(Replacement::prepare(&path, b"new, of two of which the other failed").unwrap());
        assert_eq!(fs::read(&path).unwrap(), b"old");
        write_secret(&path, b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 1);
    }
}
