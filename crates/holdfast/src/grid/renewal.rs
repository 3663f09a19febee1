//! Certificates that are made anew long before they end, without a token: whoever asks shows the one that it has.
//!
//! ```text
//! a request:  what is wanted (names, and requests to sign), the host's certificate, its key's signature over what is wanted
//! ```
//! Invariants
//! 1. Only who has a host's key, and a certificate for it that is good now and not revoked, is given another for that host and
//!    for its machine's nodes. The metadata store, which carries request and answer, is trusted with neither.
//! 2. A request that somebody else sends once more gets certificates for the same keys: they help nobody but their owner.
//!
//! Running processes use new credentials from their next connection on ([`follow`]).

use super::certs::{Certificates, Leaf, now_s};
use super::join_client::{Asked, Signed};
use super::layout::{GridConfig, GridDir};
use super::token::{Answer, Wanted};
use super::{Lock, certs, etcd};
use crate::logger;
use anyhow::{Context, Result};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use holdfast_api::{Code, refuse};
use holdfast_base::GridId;
use holdfast_runtime::pki::{self, Role};
use holdfast_runtime::revoked::RevokedNow;
use holdfast_runtime::tls::link::{HostTls, ServerTls, holder_of};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Duration;

/// Pace of looking whether a process has other credentials.
const FOLLOW_PACE: Duration = Duration::from_secs(2);

/// What can't be used is tried again after so many looks: whoever is shown it may have to be told of it first.
const LOOKS_A_TRY: u32 = 30;

/// A certificate is made anew when less than one of so many parts of its time is left.
const PARTS: u64 = 3;

/// What a machine asks for whose certificates are to be made anew.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Renewal {
    wanted: Wanted,
    /// Of its host, in PEM.
    certificate: String,
    /// Of that one's key, in base64.
    signature: String,
}

impl Renewal {
    pub fn wanted(&self) -> &Wanted {
        &self.wanted
    }
}

fn signed_bytes(grid: GridId, wanted: &Wanted) -> Vec<u8> {
    let wanted = serde_json::to_string(wanted).expect("our records always encode");
    format!("holdfast renewal 1\ngrid {grid}\n{wanted}").into_bytes()
}

/// Whether certificates of this machine are to be made anew: some have used up most of their time.
pub fn is_due(certificates: &Certificates, config: &GridConfig) -> Result<bool> {
    Ok(are_due(&certificates.list(&certs::roles(config))?, now_s()))
}

/// Also what is not good yet, though the authority is: it was made while this machine's clock was ahead, and nobody accepts it.
pub(super) fn are_due(listed: &[Leaf], now: u64) -> bool {
    let has_begun = |leaf: &Leaf| leaf.begins <= now;
    let is_plausible = listed.iter().filter(|leaf| leaf.is_authority()).all(has_begun);
    let is_used_up = |leaf: &Leaf| leaf.expires.saturating_sub(now) < leaf.expires.saturating_sub(leaf.begins) / PARTS;
    is_plausible && listed.iter().filter(|leaf| leaf.renews()).any(|leaf| !has_begun(leaf) || is_used_up(leaf))
}

/// Makes a request for new keys; what it is asked with has to be good still.
pub fn ask(certificates: &Certificates, config: &GridConfig) -> Result<(Renewal, Asked)> {
    let (grid, name) = (certificates.grid(), &config.host.name);
    let asked = Asked::make(name, &certs::roles(config), config.meta.has_own_tls())?;
    let paths = certificates.paths(&Role::Host(name.clone()));
    let read = |path: &PathBuf| fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()));
    let signature = pki::sign_with(&read(&paths.key)?, &signed_bytes(grid, &asked.wanted))?;
    let (wanted, certificate) = (asked.wanted.clone(), read(&paths.certificate)?);
    Ok((Renewal { wanted, certificate, signature: URL_SAFE_NO_PAD.encode(signature) }, asked))
}

/// Signs what is asked for, where that is the machine's own: `nodes` are whose each is.
pub fn answer(
    certificates: &Certificates,
    (renewal, revoked): (&Renewal, &RevokedNow),
    nodes: &BTreeMap<u32, String>,
) -> Result<Answer> {
    let Renewal { wanted, certificate, signature } = renewal;
    let (grid, machine) = (certificates.grid(), &wanted.machine);
    let holder = holder_of(certificate, &certificates.ca(), grid, revoked)
        .map_err(|why| anyhow::anyhow!("machine {machine} asks for new certificates, but {why}"))?;
    let signature = URL_SAFE_NO_PAD.decode(signature).context("its request is no request")?;
    if holder != Role::Host(machine.clone())
        || !pki::is_signed_by(certificate, &signed_bytes(grid, wanted), &signature)?
    {
        refuse!(
            Code::NotPermitted,
            "a request for new certificates of machine {machine} was not made by its host; look who writes to the metadata store"
        );
    }
    if let Some(node) = wanted.nodes.keys().find(|node| nodes.get(node) != Some(machine)) {
        refuse!(Code::NotPermitted, "machine {machine} asks for a certificate of node {node}, which is not its own");
    }
    wanted.sign(certificates)
}

/// Fails where the certificate that a request was made with was taken back, by a list that was read since.
pub fn check_still_good(certificates: &Certificates, renewal: &Renewal, revoked: &RevokedNow) -> Result<()> {
    let Renewal { wanted, certificate, .. } = renewal;
    let holder = holder_of(certificate, &certificates.ca(), certificates.grid(), revoked);
    let machine = &wanted.machine;
    holder.map(drop).map_err(|why| anyhow::anyhow!("machine {machine} asks for new certificates, but {why}"))
}

/// Puts what was signed into its place.
pub fn take(dir: &GridDir, certificates: &Certificates, asked: Asked, signed: Answer) -> Result<()> {
    let _lock = Lock::take(dir)?;
    let signed = Signed::of(signed, &asked.wanted.machine)?;
    asked.put(certificates, &signed)
}

/// Makes new certificates where that can be done here.
pub fn sign_here(dir: &GridDir, certificates: &Certificates, config: &GridConfig) -> Result<()> {
    let _lock = Lock::take(dir)?;
    certificates.issue(&certs::roles(config))?;
    etcd::renew(dir, config)
}

/// Has a process use the credentials that lie in its place from then on, whoever puts others there.
pub fn follow(ways: HostTls, door: ServerTls) -> Result<()> {
    let paths = ways.paths().clone();
    let files = Files {
        what: "certificate".to_string(),
        paths: vec![paths.key, paths.certificate],
        advice: "`holdfast grid tls rotate` makes another",
    };
    files.follow(move || Ok(ways.reload().and_then(|()| door.reload())?))
}

/// Credentials in files that may be replaced while they are used.
pub struct Files {
    /// What log lines call them.
    pub what: String,
    pub paths: Vec<PathBuf>,
    /// Where others that lie there can't be used.
    pub advice: &'static str,
}

impl Files {
    /// When each was changed, also in who may read it, and how long it is; nothing of one that is not there.
    fn stamp(&self) -> Stamp {
        let of = |path: &PathBuf| {
            let found = fs::metadata(path).ok()?;
            Some(((found.ctime(), found.ctime_nsec()), found.len()))
        };
        self.paths.iter().map(of).collect()
    }

    /// Looks there now and then, from a thread of its own, and has others taken that lie there.
    pub fn follow(self, take: impl FnMut() -> Result<()> + Send + 'static) -> Result<()> {
        let mut follower = Follower { used: self.stamp(), told: None, files: self, take };
        let look = move || {
            loop {
                std::thread::sleep(FOLLOW_PACE);
                follower.look();
            }
        };
        std::thread::Builder::new().name("credentials".to_string()).spawn(look).context("no thread for credentials")?;
        Ok(())
    }
}

type Stamp = Vec<Option<((i64, i64), u64)>>;

struct Follower<F> {
    files: Files,
    used: Stamp,
    /// What could not be taken the last time, and how often it was looked at since.
    told: Option<(Stamp, u32)>,
    take: F,
}

impl<F: FnMut() -> Result<()>> Follower<F> {
    fn look(&mut self) {
        let found = self.files.stamp();
        if found == self.used {
            return;
        }
        let looks = self.told.as_ref().filter(|(told, _)| *told == found).map_or(0, |(_, looks)| *looks);
        if looks > 1 && !looks.is_multiple_of(LOOKS_A_TRY) {
            self.told = Some((found, looks + 1));
            return;
        }
        let Files { what, advice, .. } = &self.files;
        match (self.take)() {
            Ok(()) => {
                logger::info(format_args!("there is a new {what}: it counts from the next connection on"));
                self.used = found;
            }
            Err(error) => {
                // A key is in its place before its certificate is.
                if looks == 1 {
                    logger::error(format_args!(
                        "there is a new {what} that can't be used, and the old one is used on: {error:#}; {advice}"
                    ));
                }
                self.told = Some((found, looks + 1));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grid::layout::{HostConfig, MetaConfig, NodeConfig};
    use holdfast_runtime::revoked::Revoked;

    const GRID: GridId = GridId(7);
    const DAY: Duration = Duration::from_secs(24 * 3600);

    #[test]
    fn files_that_cannot_be_used_are_tried_again_now_and_then() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("certificate");
        let files = Files { what: "certificate".to_string(), paths: vec![path.clone()], advice: "put another there" };
        let mut tries = 0;
        let mut follower = Follower {
            used: files.stamp(),
            told: None,
            files,
            take: || {
                tries += 1;
                if tries == 4 { Ok(()) } else { Err(anyhow::anyhow!("it is not let in")) }
            },
        };
        fs::write(&path, "another").unwrap();
        (0..2 * LOOKS_A_TRY + 1).for_each(|_| follower.look());
        // Taken by then, and left alone.
        (0..LOOKS_A_TRY).for_each(|_| follower.look());
        assert!(follower.told.is_some() && follower.used == follower.files.stamp());
        assert_eq!(tries, 4);
    }

    /// Machine b, with node 2, whose certificates are good for so long; and machine a, which signs.
    struct Rig {
        temp: tempfile::TempDir,
        a: Certificates,
        b: Certificates,
        config: GridConfig,
    }

    impl Rig {
        fn new(valid: Duration) -> Rig {
            let temp = tempfile::tempdir().unwrap();
            let a = Certificates::in_dir(&temp.path().join("a/tls"), GRID);
            a.make_authority().unwrap();
            let b = Certificates::in_dir(&temp.path().join("b/tls"), GRID);
            b.put_ca(&a.ca_pem().unwrap()).unwrap();
            let node = NodeConfig { id: 2, address: "127.0.0.1:7502".parse().unwrap(), devices: Vec::new() };
            let host = HostConfig { name: "b".to_string(), ..HostConfig::default() };
            let (grid, meta) = (GRID.to_string(), MetaConfig::Embedded);
            let config = GridConfig { version: 1, grid, meta, tls: true, nodes: vec![node], host };
            let authority = a.authority().unwrap();
            for role in certs::roles(&config) {
                b.put(&role, &authority.issue_for(&role, valid).unwrap()).unwrap();
            }
            Rig { temp, a, b, config }
        }

        fn answer(&self, renewal: &Renewal, revoked: &RevokedNow) -> Result<Answer> {
            answer(&self.a, (renewal, revoked), &BTreeMap::from([(1, "a".to_string()), (2, "b".to_string())]))
        }
    }

    #[test]
    fn most_of_a_certificates_time_is_used_up_before_it_is_made_anew() {
        assert!(!is_due(&Rig::new(300 * DAY).b, &Rig::new(DAY).config).unwrap());
        // Good from a day before on: of eleven days ten are left, then of two one.
        let rig = Rig::new(10 * DAY);
        assert!(!is_due(&rig.b, &rig.config).unwrap());
        let rig = Rig::new(DAY / 4);
        assert!(is_due(&rig.b, &rig.config).unwrap());
    }

    #[test]
    fn what_was_made_by_a_clock_that_was_ahead_is_made_anew_when_it_is_right() {
        let rig = Rig::new(300 * DAY);
        rig.a.issue(&certs::roles(&rig.config)).unwrap();
        let listed = rig.a.list(&certs::roles(&rig.config)).unwrap();
        let now = now_s();
        assert!(!are_due(&listed, now));
        let ahead = |s: u64, leaf: &Leaf| Leaf { begins: leaf.begins + s, expires: leaf.expires + s, ..leaf.clone() };
        let early = |leaf: &Leaf| if leaf.renews() { ahead(3 * DAY.as_secs(), leaf) } else { leaf.clone() };
        let early: Vec<Leaf> = listed.iter().map(early).collect();
        assert!(are_due(&early, now), "nobody accepts it");
        assert!(!are_due(&early, now + 4 * DAY.as_secs()));
        assert!(!are_due(&listed, now - 2 * DAY.as_secs()), "a clock of before the grid is wrong itself");
        assert!(!are_due(&listed, 0));
    }

    #[test]
    fn who_has_a_good_certificate_gets_another_and_nobody_else() {
        let (rig, none) = (Rig::new(DAY / 4), RevokedNow::new(GRID));
        let (renewal, asked) = ask(&rig.b, &rig.config).unwrap();
        let signed = rig.answer(&renewal, &none).unwrap();
        let dir = GridDir::choose(Some(&rig.temp.path().join("b"))).unwrap();
        let forger = Rig::new(DAY);
        let forged = asked.wanted.sign(&forger.a).unwrap();
        let (_, other) = ask(&rig.b, &rig.config).unwrap();
        let why = take(&dir, &rig.b, other, forged).unwrap_err().to_string();
        assert!(why.contains("none of this grid's"), "{why}");
        assert!(is_due(&rig.b, &rig.config).unwrap(), "nothing was taken of it");
        take(&dir, &rig.b, asked, signed).unwrap();
        assert!(!is_due(&rig.b, &rig.config).unwrap());
        certs::roles(&rig.config).iter().for_each(|role| rig.b.check(role).unwrap());

        let why = |renewal: &Renewal, revoked: &RevokedNow| format!("{:#}", rig.answer(renewal, revoked).unwrap_err());
        let (good, _) = ask(&rig.b, &rig.config).unwrap();
        let mut other = good.clone();
        other.wanted.machine = "a".to_string();
        assert!(why(&other, &none).contains("was not made by its host"));
        let (mut other, fresh) = (good.clone(), ask(&rig.b, &rig.config).unwrap().0);
        other.wanted = fresh.wanted;
        assert!(why(&other, &none).contains("was not made by its host"), "the signature is of other keys");
        let mut config = rig.config.clone();
        config.nodes[0].id = 1;
        let (foreign, _) = ask(&rig.b, &config).unwrap();
        assert!(why(&foreign, &none).contains("node 1, which is not its own"));
        let stranger = Rig::new(DAY);
        let (strange, _) = ask(&stranger.b, &stranger.config).unwrap();
        assert!(why(&strange, &none).contains("not of this grid's authority"), "{}", why(&strange, &none));
        let mut list = Revoked::none(GRID);
        list.add(Role::Host("b".to_string()), now_s() + 60);
        let revoked = RevokedNow::new(GRID);
        assert!(revoked.replace(&list));
        assert!(why(&good, &revoked).contains("was revoked"));
        check_still_good(&rig.a, &good, &none).unwrap();
        let late = check_still_good(&rig.a, &good, &revoked).unwrap_err().to_string();
        assert!(late.contains("machine b") && late.contains("was revoked"), "{late}");
    }
}
