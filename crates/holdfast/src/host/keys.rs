//! Keys of encrypted volumes: made, wrapped, kept, and had again when a volume is opened.
//!
//! A volume's own key is random and never changes; it is kept in the metadata store only wrapped, by a key-encrypting key
//! that an operator has in a file or gets by a command. This host keeps neither: it knows where the key-encrypting key is to be had, reads it when
//! a volume is opened, and forgets it.
//!
//! ```text
//! volume/ID/key   the wrapped key, and where its key-encrypting key was when it was wrapped
//! DIR/keys.json   of this host: where else it is to be had here, and which commands its operator has named
//! ```
//!
//! A file that the record names is read by any host. A command that it names is run only where the same was given to this very
//! host, over its control socket: who can write to the metadata store must not be able to run commands on hosts.
//!
//! Faults: a key that can't be had, or is the wrong one, keeps its volume closed and says why; it is tried again, commands less
//! often than files.

use super::catalog::{Catalog, Entry};
use super::control::ControlPlane;
use crate::grid::layout::{GridDir, write_secret};
use crate::logger;
use crate::protocol;
use anyhow::{Context, Result, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use holdfast_api::{Code, Error, KeySource, VolumeInfo, refuse};
use holdfast_base::VolumeId;
use holdfast_cipher::{NONCE_BYTES, Secret, VolumeKey, unwrap, wrap};
use holdfast_format::meta::{KEY_VERSION, KeyRecord, Other};
use holdfast_host::OpenSpec;
use holdfast_runtime::pki::random;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A command that gives no key within this does not give one.
const COMMAND_MAX: Duration = Duration::from_secs(10);

/// Between two attempts with a command that gave none.
const COMMAND_PACE: Duration = Duration::from_secs(30);

/// More than any key, with a line's end.
const KEY_TEXT_MAX: u64 = 4096;

fn wrapping(kek: &Secret, volume: VolumeId, key: &Secret, source: &KeySource) -> KeyRecord {
    let nonce: [u8; NONCE_BYTES] = random();
    let wrapped = BASE64.encode(wrap(kek, volume, nonce, key));
    let (nonce, source) = (BASE64.encode(nonce), source.clone());
    KeyRecord { version: KEY_VERSION, nonce, wrapped, source, other: Other::new() }
}

/// `None` where the key-encrypting key is another.
fn unwrapped(record: &KeyRecord, kek: &Secret, volume: VolumeId) -> Result<Option<Secret>> {
    let damaged = || format!("metadata record volume/{volume}/key is damaged");
    if record.version != KEY_VERSION {
        refuse!(
            Code::Unsupported,
            "metadata record volume/{volume}/key has version {}, which this host does not know",
            record.version
        );
    }
    let nonce = BASE64.decode(&record.nonce).ok().and_then(|nonce| nonce.try_into().ok()).with_context(damaged)?;
    let wrapped = BASE64.decode(&record.wrapped).with_context(damaged)?;
    Ok(unwrap(kek, volume, nonce, &wrapped))
}

/// What a new volume is to be encrypted with.
pub struct NewKey {
    secret: Secret,
    kek: Secret,
    source: KeySource,
}

impl NewKey {
    /// A random one.
    pub fn make(source: &KeySource) -> Result<NewKey> {
        Ok(NewKey { secret: Secret::new(random()), kek: fetch_new(source)?, source: source.clone() })
    }

    pub fn id(&self) -> u128 {
        VolumeKey::new(&self.secret).id()
    }

    pub fn record(&self, volume: VolumeId) -> KeyRecord {
        wrapping(&self.kek, volume, &self.secret, &self.source)
    }
}

/// Where this host gets the key-encrypting key of one wrapping.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct LocalSource {
    /// The wrapping's nonce: after the next one this is out of date.
    nonce: String,
    source: KeySource,
}

#[derive(Debug)]
struct Trouble {
    why: String,
    retry_at: Instant,
}

pub struct Keys {
    catalog: Catalog,
    path: PathBuf,
    /// Volumes that could not be opened for want of their keys.
    troubles: Mutex<BTreeMap<VolumeId, Trouble>>,
}

impl Keys {
    pub fn new(dir: &GridDir, catalog: Catalog) -> Keys {
        Keys { catalog, path: dir.keys_path(), troubles: Mutex::default() }
    }

    fn troubles(&self) -> MutexGuard<'_, BTreeMap<VolumeId, Trouble>> {
        self.troubles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why a volume's key could not be had, when it was tried last.
    pub fn trouble(&self, volume: VolumeId) -> Option<String> {
        self.troubles().get(&volume).map(|trouble| trouble.why.clone())
    }

    /// Those whose keys could not be had.
    pub fn locked(&self) -> Result<Vec<Entry>> {
        let ids: BTreeSet<VolumeId> = self.troubles().keys().copied().collect();
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        // One may be deleted meanwhile, or in the trash.
        let (entries, _) = self.catalog.survey()?;
        Ok(entries.into_iter().filter(|entry| entry.clone.is_none() && ids.contains(&entry.root.volume)).collect())
    }

    /// What is needed to open the volume, its key included.
    pub fn spec_of(&self, entry: &Entry) -> Result<OpenSpec> {
        let volume = entry.root.volume;
        match self.spec_with_keys(entry) {
            Ok(spec) => {
                self.troubles().remove(&volume);
                Ok(spec)
            }
            Err(error) => {
                let why = format!("{error:#}");
                let retry_at = Instant::now() + if error.is::<CommandFailed>() { COMMAND_PACE } else { Duration::ZERO };
                let former = self.troubles().insert(volume, Trouble { why: why.clone(), retry_at });
                if former.is_none_or(|former| former.why != why) {
                    logger::error(format_args!("{why}"));
                }
                Err(error)
            }
        }
    }

    /// The same for who tries again and again: `None` where there is nothing to be had, which was said before.
    pub fn spec_now_and_then(&self, entry: &Entry) -> Option<OpenSpec> {
        let is_early = self.troubles().get(&entry.root.volume).is_some_and(|t| Instant::now() < t.retry_at);
        if is_early { None } else { self.spec_of(entry).ok() }
    }

    fn spec_with_keys(&self, entry: &Entry) -> Result<OpenSpec> {
        let key = self.secret_of(entry, None)?.map(|(secret, _)| VolumeKey::new(&secret));
        let store = entry.root.stores.first().filter(|_| key.is_some()).map(|of| of.volume);
        let mut spec = entry.spec(key);
        if let Some(store) = store {
            spec.store_key = Some(Box::new((store, self.of_store(entry, store)?)));
        }
        Ok(spec)
    }

    /// The key of the store by which an encrypted volume shares its content.
    pub fn of_store(&self, entry: &Entry, store: VolumeId) -> Result<VolumeKey> {
        let name = &entry.root.name;
        let why = || format!("volume {name} shares its content in an encrypted domain, and stays closed");
        let found = self.catalog.entry(store)?.with_context(|| format!("volume {store} is gone")).with_context(why)?;
        let secret = self.secret_of(&found, None).with_context(why)?;
        let (secret, _) =
            secret.with_context(|| format!("volume {} is not encrypted", found.root.name)).with_context(why)?;
        Ok(VolumeKey::new(&secret))
    }

    /// The key of an encrypted volume, and what wraps it.
    fn secret_of(&self, entry: &Entry, source: Option<&KeySource>) -> Result<Option<(Secret, NewKey)>> {
        let Some(key_id) = entry.root.key_id else { return Ok(None) };
        let (volume, name) = (entry.root.volume, &entry.root.name);
        let Some(record) = self.catalog.key(volume)? else {
            refuse!(
                Code::State,
                "volume {name} is encrypted, and its key is not in the metadata store: where the metadata were recovered, have it \
                 back from a file of `holdfast meta export` that has it (`holdfast meta recover --replace --from FILE`, with all hosts \
                 stopped). Where a deletion of the volume was cut short, `holdfast volume delete {name} --now` ends that"
            );
        };
        let source = match source {
            Some(source) => source.clone(),
            None => self.source_of(name, volume, &record)?,
        };
        let found = fetch(&source).and_then(|kek| {
            let secret = unwrapped(&record, &kek, volume)?.filter(|secret| VolumeKey::new(secret).id() == key_id);
            let wrong = || format!("what the {source} gives is not the key that the volume's key was wrapped with");
            Ok((secret.with_context(wrong)?, kek))
        });
        let (secret, kek) = found.map_err(|error| locked(name, &source, &error))?;
        Ok(Some((secret.clone(), NewKey { secret, kek, source })))
    }

    /// Where the key-encrypting key is to be had at this host.
    fn source_of(&self, name: &str, volume: VolumeId, record: &KeyRecord) -> Result<KeySource> {
        let local = self.local()?.remove(&volume.to_string());
        match (local, record.source.clone()) {
            (Some(local), _) if local.nonce == record.nonce => Ok(local.source),
            (_, file @ KeySource::File(_)) => Ok(file),
            (Some(local), command) if local.source == command => Ok(local.source),
            (_, KeySource::Command(command)) => refuse!(
                Code::State,
                "volume {name} is encrypted and stays closed: its key comes from a command that nobody has named at this host, and \
                 which is not run for that reason; `holdfast volume export {name} --key-command '{command}'` here names it"
            ),
        }
    }

    fn local(&self) -> Result<BTreeMap<String, LocalSource>> {
        match std::fs::read(&self.path) {
            Ok(bytes) => serde_json::from_slice(&bytes).with_context(|| {
                format!(
                    "{} is damaged; remove it, and name keys anew with `holdfast volume export`",
                    self.path.display()
                )
            }),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(BTreeMap::new()),
            Err(error) => Err(error).with_context(|| format!("cannot read {}", self.path.display())),
        }
    }

    /// To be called alone.
    fn set_local(&self, volume: VolumeId, source: Option<LocalSource>) -> Result<()> {
        let mut all = self.local()?;
        let id = volume.to_string();
        if all.get(&id) == source.as_ref() {
            return Ok(());
        }
        all.remove(&id);
        all.extend(source.map(|source| (id, source)));
        write_secret(&self.path, &serde_json::to_vec_pretty(&all)?)
            .with_context(|| format!("cannot write {}", self.path.display()))
    }

    /// This host gets the key from there.
    fn use_here(&self, volume: VolumeId, source: &KeySource) -> Result<()> {
        let record = self.catalog.key(volume)?;
        let local = record.map(|record| LocalSource { nonce: record.nonce, source: source.clone() });
        self.set_local(volume, local)
    }

    /// A volume was made with a new key.
    pub fn on_made(&self, volume: VolumeId, key: &NewKey) -> Result<()> {
        self.use_here(volume, &key.source)
    }

    /// From here on this host gets the key from there, if it is to be had there.
    pub fn name_source(&self, entry: &Entry, source: &KeySource) -> Result<()> {
        if self.secret_of(entry, Some(source))?.is_none() {
            refuse!(
                Code::State,
                "volume {} is not encrypted, and needs no key; try again without one",
                entry.root.name
            );
        }
        self.use_here(entry.root.volume, source)
    }

    /// The key of a volume for one that is made of it.
    pub fn for_dependent(&self, origin: &Entry) -> Result<Option<NewKey>> {
        Ok(self.secret_of(origin, None)?.map(|(_, key)| key))
    }

    /// Wraps the volume's key anew. What is written stays as it is.
    pub fn wrap_anew(&self, entry: &Entry, source: &KeySource) -> Result<()> {
        let (volume, name) = (entry.root.volume, &entry.root.name);
        let new_kek = fetch_new(source)?;
        let Some((secret, _)) = self.secret_of(entry, None)? else {
            refuse!(
                Code::State,
                "volume {name} is not encrypted; make an encrypted one (`holdfast volume create NEW --encrypt`) and copy it there"
            );
        };
        let record = wrapping(&new_kek, volume, &secret, source);
        self.catalog.replace_key(volume, &record)?;
        self.use_here(volume, source)
    }

    /// The volume is gone.
    pub fn forget(&self, volume: VolumeId) -> Result<()> {
        self.troubles().remove(&volume);
        self.set_local(volume, None)
    }
}

impl ControlPlane {
    /// A clone has the key of its volume, which is the one to be named.
    pub(super) fn rekey(&self, name: &str, source: &KeySource) -> Result<VolumeInfo> {
        let entry = self.catalog.find(name)?;
        if entry.clone.is_some() {
            refuse!(
                Code::State,
                "{name} is a clone, a part of volume {0}; `holdfast volume rekey {0}` is for both",
                entry.root.name
            );
        }
        self.keys.wrap_anew(&entry, source)?;
        logger::info(format_args!("the key of volume {name} is wrapped anew, with that of the {source}"));
        let warning = self.key_warning(name, entry.root.layout);
        Ok(VolumeInfo { warning, ..self.show(name)? })
    }
}

/// Why a volume is not opened, and what to do.
fn locked(name: &str, source: &KeySource, error: &anyhow::Error) -> anyhow::Error {
    let again = match source {
        KeySource::File(_) => "put it there",
        KeySource::Command(_) => "see to it that the command gives it",
    };
    let why = format!(
        "volume {name} is encrypted, and stays closed with all its data until its key is to be had: {error:#}; {again}, or say where \
         else it is: `holdfast volume export {name} --key-file FILE`"
    );
    match source {
        KeySource::File(_) => Error::new(protocol::code_of(error), why).into(),
        KeySource::Command(_) => CommandFailed(why).into(),
    }
}

/// A command gave no key. Told apart, since it is not run again at once.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct CommandFailed(String);

/// For what is to be wrapped with it from here on.
fn fetch_new(source: &KeySource) -> Result<Secret> {
    fetch(source).context(
        "there is no key to wrap the volume's with; `(umask 077; openssl rand -hex 32 > FILE)` makes one, and --key-file FILE names it",
    )
}

/// Gets a key-encrypting key.
fn fetch(source: &KeySource) -> Result<Secret> {
    match source {
        KeySource::File(path) => {
            let text = read_file(path)?;
            parse(&text).with_context(|| format!("{source} holds no key"))
        }
        KeySource::Command(command) => {
            run(command).and_then(|text| parse(&text)).with_context(|| format!("{source} gives no key"))
        }
    }
}

fn read_file(path: &Path) -> Result<Vec<u8>> {
    let unread = |why: std::io::Error| {
        let code = if why.kind() == ErrorKind::NotFound { Code::NotFound } else { Code::State };
        Error::new(code, format!("cannot read key file {}: {why}", path.display()))
    };
    // A pipe without anybody at its other end is not waited for.
    let at_once = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let file = std::fs::OpenOptions::new().read(true).custom_flags(at_once).open(path).map_err(unread)?;
    let found = file.metadata().map_err(unread)?;
    if !found.is_file() {
        refuse!(Code::State, "key file {} is no regular file; name one that holds a key", path.display());
    }
    if found.mode() & 0o077 != 0 {
        refuse!(
            Code::State,
            "key file {0} can be read by others (mode {1:03o}), so its key is no secret; `chmod 600 {0}`, or better make a new \
             key",
            path.display(),
            found.mode() & 0o777
        );
    }
    let mut text = Vec::new();
    file.take(KEY_TEXT_MAX).read_to_end(&mut text).map_err(unread)?;
    Ok(text)
}

fn parse(text: &[u8]) -> Result<Secret> {
    let Some(secret) = Secret::parse(text) else {
        refuse!(
            Code::State,
            "a key is 32 bytes, or 64 hexadecimal digits, and this is neither ({} bytes); `openssl rand -hex 32` gives one",
            text.len()
        )
    };
    Ok(secret)
}

/// What the command prints, if it ends well and soon. It is ended with all that it has started where it does not.
fn run(command: &str) -> Result<Vec<u8>> {
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", command]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = shell.spawn().context("it can't be started")?;
    let end = |pid: u32| {
        if let Some(group) = rustix::process::Pid::from_raw(pid as i32) {
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        }
    };
    let (out, err) = (child.stdout.take().expect("piped"), child.stderr.take().expect("piped"));
    let reader = |stream: Box<dyn Read + Send>| {
        std::thread::spawn(move || {
            let mut text = Vec::new();
            let _ = stream.take(KEY_TEXT_MAX).read_to_end(&mut text);
            text
        })
    };
    let (out, err) = (reader(Box::new(out)), reader(Box::new(err)));
    let until = Instant::now() + COMMAND_MAX;
    let status = loop {
        match child.try_wait()? {
            Some(status) => break status,
            None if Instant::now() >= until => {
                end(child.id());
                let _ = child.wait();
                bail!("it has not ended within {} s", COMMAND_MAX.as_secs());
            }
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    // What it has left behind may hold the pipes open.
    end(child.id());
    let text = out.join().unwrap_or_default();
    if !status.success() {
        let said = err.join().unwrap_or_default();
        let said = String::from_utf8_lossy(&said);
        let said = said.lines().next().unwrap_or("nothing");
        bail!("it ended with {status} and said: {said}");
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(dir: &Path, name: &str, text: &[u8], mode: u32) -> KeySource {
        use std::os::unix::fs::PermissionsExt;
        let path = dir.join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        KeySource::File(path)
    }

    #[test]
    fn a_key_is_bytes_or_digits_and_nobody_elses_to_read() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let raw = fetch(&file(dir, "raw", &[0xab; 32], 0o600)).unwrap();
        let digits = format!(" {}\n", "aB".repeat(32));
        assert_eq!(fetch(&file(dir, "digits", digits.as_bytes(), 0o400)).unwrap(), raw);
        assert_eq!(fetch(&KeySource::Command(format!("echo {digits}"))).unwrap(), raw);
        let refused = |source: &KeySource| format!("{:#}", fetch(source).unwrap_err());
        assert!(refused(&file(dir, "open", &[1; 32], 0o644)).contains("chmod 600"));
        assert!(refused(&file(dir, "group", &[1; 32], 0o640)).contains("chmod 600"));
        for text in [&b""[..], &[1; 31], &[1; 33], "g".repeat(64).as_bytes(), "+1".repeat(32).as_bytes()] {
            assert!(refused(&file(dir, "odd", text, 0o600)).contains("64 hexadecimal digits"));
        }
        assert!(refused(&KeySource::File(dir.join("none"))).contains("cannot read key file"));
        let made = NewKey::make(&KeySource::File(dir.join("none"))).map(|_| ()).unwrap_err();
        assert!(format!("{made:#}").contains("openssl rand"));
        assert!(refused(&KeySource::File(dir.to_path_buf())).contains("no regular file"));
    }

    #[test]
    fn a_command_that_fails_says_why() {
        let refused = |command: &str| format!("{:#}", fetch(&KeySource::Command(command.to_string())).unwrap_err());
        assert!(refused("echo no such token >&2; exit 3").contains("no such token"));
        assert!(refused("true").contains("0 bytes"));
        // What it leaves behind is not waited for: it would say more.
        assert!(refused("(sleep 60; echo y) & echo x").contains("2 bytes"));
    }

    #[test]
    fn a_record_opens_with_its_key_for_its_volume() {
        let source = KeySource::File(PathBuf::from("/k"));
        let (kek, other) = (Secret::new([1; 32]), Secret::new([2; 32]));
        let key = NewKey { secret: Secret::new([3; 32]), kek: kek.clone(), source };
        let record = key.record(VolumeId(5));
        assert_eq!(unwrapped(&record, &kek, VolumeId(5)).unwrap(), Some(Secret::new([3; 32])));
        assert_eq!(unwrapped(&record, &other, VolumeId(5)).unwrap(), None);
        assert_eq!(unwrapped(&record, &kek, VolumeId(6)).unwrap(), None);
        let later = KeyRecord { version: 9, ..record };
        assert!(unwrapped(&later, &kek, VolumeId(5)).unwrap_err().to_string().contains("version 9"));
    }
}
