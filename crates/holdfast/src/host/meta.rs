//! The metadata store as this host uses it: from control-plane threads directly, from the reactor through a service,
//! since a swap waits for a disk or a network.

use super::catalog::Catalog;
use super::machines;
use crate::daemon::outwait;
use crate::grid::beat;
use crate::grid::certs::Certificates;
use crate::grid::etcd;
use crate::grid::layout::{EtcdMeta, GridConfig, GridDir, MetaConfig};
use crate::grid::processes::Role;
use crate::grid::renewal::Files;
use crate::logger;
use anyhow::{Context, Result, bail};
use holdfast_api::{Code, refuse};
use holdfast_base::{MetaReply, MetaVersion};
use holdfast_runtime::mailbox::{self, Receiver};
use holdfast_runtime::meta::{
    EtcdConfig, EtcdStore, EtcdTls, LocalStore, MetaError, MetaService, MetaStore, MetaTicket, OpenError, Swap,
};
use holdfast_runtime::tls::link::LinkPaths;
use holdfast_runtime::tls::why_unusable_pem;
use holdfast_runtime::{Waker, clock};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Requests of controllers, and their answers, that may wait.
pub const CALLS_MAX: usize = 1 << 16;

/// Requests of controllers that are with the store at a time. Those of one record are served in the order in which they
/// were asked.
const CALLS_AT_A_TIME: usize = 16;

pub type Meta = Arc<dyn MetaStore>;

/// In a store that several grids may share: this one's metadata are here.
pub const GRID_KEY: &str = "grid";

/// There while a store is being filled, and when the grid has moved to another one.
pub const IMPORTING_KEY: &str = "importing";

/// What `--etcd-tls-dir` holds.
const CA: &str = "ca-cert.pem";
const CERTIFICATE: &str = "client-cert.pem";
const KEY: &str = "client-key.pem";

/// How often the store is asked whether it answers.
const LOOK_PACE: Duration = Duration::from_secs(1);

/// The store that the configuration names, whose grid was made before.
pub fn open(dir: &GridDir, config: &GridConfig) -> Result<Meta> {
    open_with(dir, config, None)
}

/// As [`open`], by what a token gives to show etcd, if it does.
pub fn open_with(dir: &GridDir, config: &GridConfig, access: Option<EtcdTls>) -> Result<Meta> {
    Ok(open_store(dir, config, access)?.meta())
}

/// A store that was opened.
enum Store {
    File(Meta),
    Etcd(EtcdStore),
}

impl Store {
    fn meta(&self) -> Meta {
        match self {
            Store::File(meta) => Arc::clone(meta),
            Store::Etcd(store) => Arc::new(store.clone()),
        }
    }
}

fn open_store(dir: &GridDir, config: &GridConfig, access: Option<EtcdTls>) -> Result<Store> {
    if config.meta == MetaConfig::Embedded && !dir.meta_path().exists() {
        refuse!(
            Code::Unavailable,
            "the grid's metadata, {}, are gone. Restore the file if it is somewhere; else `holdfast meta recover` makes it anew from \
             what the nodes hold",
            dir.meta_path().display()
        );
    }
    let store = connect_with(dir, config, access)?;
    let meta = store.meta();
    let is_known = match outwait(|| meta.get(GRID_KEY), |_| true) {
        Err(MetaError::Refused) => {
            let catalog = Catalog::new(meta.clone(), config.grid_id()?, &config.host.name);
            // It may read as much as that, and is told more by it.
            if let Ok(Some(why)) = machines::why_no_member(dir, config, &catalog) {
                bail!(why);
            }
            return Err(MetaError::Refused.into());
        }
        found => found?.is_some(),
    };
    if matches!(config.meta, MetaConfig::Etcd(_)) && !is_known {
        bail!(
            "{} knows nothing of grid {}: is it another cluster, or was it emptied? Correct `meta` in {}, or have the \
             grid's metadata back from its nodes with `holdfast meta recover`",
            config.meta,
            config.grid,
            dir.config_path().display()
        );
    }
    if meta.get(IMPORTING_KEY)?.is_some() {
        refuse!(
            Code::Unavailable,
            "the metadata in {} are not the grid's: an import was cut short, or the grid has moved to another store. Repeat \
             `holdfast meta import`, or correct `meta` in {}",
            config.meta,
            dir.config_path().display()
        );
    }
    Ok(store)
}

/// Whether it is the store that doesn't answer, or not to this machine, rather than what it holds.
pub fn is_away(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(MetaError::Unknown { .. } | MetaError::Refused))
}

/// As [`open`], and waits for a store of other machines until it answers: data of volumes is out of reach as long, and nobody
/// gets it back sooner by starting this host again and again. What lies later where its certificates are it is shown
/// then.
pub fn await_open(dir: &GridDir, config: &GridConfig) -> Result<Meta> {
    let mut told = String::new();
    loop {
        match open_store(dir, config, None) {
            Err(error) if is_away(&error) && config.meta != MetaConfig::Embedded => {
                let why = format!("{error:#}");
                if why != told {
                    logger::warn(format_args!("the host waits for {}: {why}", config.meta));
                    Role::Host.set_waits_for(dir, Some(&why));
                    told = why;
                }
                std::thread::sleep(LOOK_PACE);
            }
            opened => {
                Role::Host.set_waits_for(dir, None);
                let store = opened?;
                if let Store::Etcd(etcd) = &store {
                    show_later(dir, config, etcd.clone())?;
                }
                return Ok(store.meta());
            }
        }
    }
}

/// Writes a record that nobody else writes, whose key was never there before: again while nobody knows whether it is
/// there, for a while.
pub fn put_new(meta: &Meta, key: &str, value: &[u8]) -> Result<()> {
    let swapped = outwait(
        || meta.swap(key, MetaVersion::ABSENT, Some(value), None),
        |error| matches!(error, MetaError::Unknown { .. }),
    )?;
    match swapped {
        Swap::Done(_) => Ok(()),
        // It was there the time before.
        Swap::Conflict(Some(found)) if found.value == value => Ok(()),
        Swap::Conflict(_) => refuse!(Code::Changed, "record {key} is there already"),
    }
}

/// Has etcd shown others, when the files are replaced that hold what it is shown.
fn show_later(dir: &GridDir, config: &GridConfig, store: EtcdStore) -> Result<()> {
    let MetaConfig::Etcd(etcd) = &config.meta else { return Ok(()) };
    let (paths, advice) = match &etcd.tls_dir {
        Some(dir) => ([CA, CERTIFICATE, KEY].map(|name| dir.join(name)), "put the files there that go together"),
        None if config.meta.has_own_tls() => {
            let LinkPaths { ca, certificate, key } = etcd::paths(&Certificates::of(dir, config.grid_id()?));
            ([ca, certificate, key], "`holdfast grid tls rotate` makes another")
        }
        None => return Ok(()),
    };
    let files = Files { what: "certificate for etcd".to_string(), paths: paths.to_vec(), advice };
    let (dir, config) = (dir.clone(), config.clone());
    files.follow(move || {
        let tls = tls_of(&dir, &config, None)?;
        Ok(tls.map_or(Ok(()), |tls| store.show(&tls))?)
    })
}

/// From here on the store serves no host, until it is complete.
pub fn begin_import(meta: &Meta) -> Result<()> {
    // It may have been begun before.
    meta.swap(IMPORTING_KEY, MetaVersion::ABSENT, Some(b"{}"), None)?;
    Ok(())
}

/// The store that the configuration names, whatever it holds.
pub fn connect(dir: &GridDir, config: &GridConfig) -> Result<Meta> {
    Ok(connect_with(dir, config, None)?.meta())
}

/// Put before all keys of a grid in etcd.
pub fn etcd_prefix(grid: &str) -> String {
    format!("holdfast/{grid}/")
}

fn connect_with(dir: &GridDir, config: &GridConfig, access: Option<EtcdTls>) -> Result<Store> {
    match &config.meta {
        MetaConfig::Embedded => open_file(&dir.meta_path()).map(Store::File),
        MetaConfig::Etcd(EtcdMeta { endpoints, .. }) => {
            let (endpoints, prefix) = (endpoints.clone(), etcd_prefix(&config.grid));
            let tls = tls_of(dir, config, access)?;
            Ok(Store::Etcd(EtcdStore::connect(&EtcdConfig { endpoints, prefix, tls })?))
        }
    }
}

/// What etcd is shown.
fn tls_of(dir: &GridDir, config: &GridConfig, access: Option<EtcdTls>) -> Result<Option<EtcdTls>> {
    let MetaConfig::Etcd(etcd) = &config.meta else { return Ok(None) };
    match (&etcd.tls_dir, access) {
        (Some(dir), _) => load_tls(dir).map(Some),
        (None, Some(access)) => Ok(Some(access)),
        (None, None) if config.meta.has_own_tls() => etcd::load(dir, config).map(Some),
        (None, None) => Ok(None),
    }
}

/// From here on the store is this grid's.
pub fn complete(dir: &GridDir, meta: &Meta, config: &GridConfig) -> Result<()> {
    beat::begin(dir, meta)?;
    if matches!(config.meta, MetaConfig::Etcd(_)) {
        // It may be so already.
        meta.swap(GRID_KEY, MetaVersion::ABSENT, Some(b"{}"), None)?;
    }
    if let Some(importing) = meta.get(IMPORTING_KEY)? {
        meta.swap(IMPORTING_KEY, importing.version, None, None)?;
    }
    Ok(())
}

/// The embedded store: one file, which no other process may have open.
fn open_file(path: &Path) -> Result<Meta> {
    let open = || LocalStore::open(path, Arc::new(clock::now));
    let store = outwait(open, |e| matches!(e, OpenError::InUse { .. })).with_context(|| {
        format!(
            "{} (where it is damaged, `holdfast meta recover --replace` makes it anew from what the nodes hold)",
            path.display()
        )
    })?;
    // One that is another user's is theirs to guard.
    let _ = std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600));
    Ok(Arc::new(store))
}

fn load_tls(dir: &Path) -> Result<EtcdTls> {
    let read = |name: &str| {
        let path = dir.join(name);
        std::fs::read(&path).with_context(|| format!("cannot read {}, which the metadata store needs", path.display()))
    };
    let shows = dir.join(CERTIFICATE).exists();
    let identity = shows.then(|| anyhow::Ok((read(CERTIFICATE)?, read(KEY)?))).transpose()?;
    if let Some(why) = identity.as_ref().and_then(|(certificate, key)| why_unusable_pem(certificate, key)) {
        refuse!(
            Code::Unavailable,
            "the key in {}, which the metadata store needs, can't be used: {why}",
            dir.join(KEY).display()
        );
    }
    Ok(EtcdTls { ca: read(CA)?, identity })
}

/// Whether the store answers, as a thread of its own finds out: who only wants to tell does not wait for it.
#[derive(Clone)]
pub struct Health(Arc<Mutex<Option<Trouble>>>);

struct Trouble {
    since: Instant,
    why: String,
}

impl Health {
    /// `tell`: whether it answers, each time that it was asked.
    pub fn watch(meta: Meta, tell: impl Fn(bool) + Send + 'static) -> Result<Health> {
        let health = Health(Arc::default());
        let found = health.clone();
        let look = move || {
            loop {
                let silence = meta.get(GRID_KEY).err();
                tell(silence.is_none());
                found.note(silence.or_else(|| meta.trouble()).map(|error| error.to_string()));
                std::thread::sleep(LOOK_PACE);
            }
        };
        std::thread::Builder::new().name("metadata-health".to_string()).spawn(look)?;
        Ok(health)
    }

    fn note(&self, trouble: Option<String>) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match (&mut *known, trouble) {
            (None, None) => {}
            (None, Some(why)) => {
                logger::warn(format_args!("{why}. Data is served on; ownership and quorums can't change meanwhile"));
                *known = Some(Trouble { since: Instant::now(), why });
            }
            (Some(trouble), None) => {
                let seconds = trouble.since.elapsed().as_secs();
                logger::info(format_args!("the metadata store answers again, after {seconds} s"));
                *known = None;
            }
            (Some(trouble), Some(why)) => trouble.why = why,
        }
    }

    /// That the store is out of reach and why, if that is known: goes on after "is".
    pub fn trouble(&self) -> Option<String> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.as_ref().map(|t| {
            let seconds = t.since.elapsed().as_secs();
            format!(
                "out of reach for {seconds} s: {}. Data is served on; changes of ownership and of quorum wait",
                t.why
            )
        })
    }
}

/// The reactor's way to the store.
pub struct MetaClient {
    pub service: MetaService,
    pub answers: Receiver<(MetaTicket, MetaReply)>,
}

impl MetaClient {
    pub fn start(meta: Meta, waker: Waker) -> Result<MetaClient> {
        let (sender, answers) = mailbox::mailbox(waker, CALLS_MAX);
        let service = MetaService::start(meta, CALLS_AT_A_TIME, CALLS_MAX, move |ticket, reply| {
            if sender.post((ticket, reply)).is_err() {
                logger::error(format_args!("{CALLS_MAX} answers of the metadata store wait: the host stands still"));
            }
        })?;
        Ok(MetaClient { service, answers })
    }
}
