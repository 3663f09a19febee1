//! The certificate of a host's NBD server, where the grid's authority has signed it: made anew like the host's own, for
//! the same names.
//!
//! ```text
//! a request:  the machine, a request to sign, the server's certificate; over all of it signatures of that one's
//!             key, and of the host's, whose certificate is there as well
//! ```
//! Invariants
//! 1. Who is given another certificate has the key of one for the very names, which is good still. It is a host of the
//!    grid, whose certificate is good and not revoked.
//! 2. A certificate that another authority has signed is its owner's to renew, and so is the authority that clients are
//!    judged by, unless it is the grid's.

use super::certs::{Certificates, go_together, lasts, now_s, replace_pair, server_paths};
use super::layout::{GridDir, write_durably};
use super::{Lock, renewal};
use anyhow::{Context, Result};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use holdfast_api::{Code, refuse};
use holdfast_base::GridId;
use holdfast_runtime::pki::{self, Facts, LEAF_VALID, Pair, Role, is_same_authority, server_names};
use holdfast_runtime::revoked::RevokedNow;
use holdfast_runtime::tls::link::{LinkPaths, holder_of};
use rustix::fs::Access;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::Path;

/// What a host asks for.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ServerRenewal {
    machine: String,
    /// To sign, in PEM.
    request: String,
    /// The server's certificate, in PEM, and a signature of its key in base64.
    server: String,
    server_signature: String,
    /// The same of the host.
    host: String,
    host_signature: String,
}

impl ServerRenewal {
    fn signed_bytes(&self, grid: GridId) -> Vec<u8> {
        let ServerRenewal { machine, request, server, .. } = self;
        format!("holdfast server renewal 1\ngrid {grid}\nmachine {machine}\n{request}\n{server}").into_bytes()
    }
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// The server's names, where it is the grid's authority that has signed.
fn names(certificates: &Certificates, paths: &LinkPaths) -> Result<Option<Vec<String>>> {
    Ok(server_names(&read(&paths.certificate)?, &certificates.ca_pem()?))
}

/// Clients are judged by a certificate of the grid's authority that ends before the one that is there now.
fn has_old_authority(certificates: &Certificates, paths: &LinkPaths) -> Result<bool> {
    let (own, other) = (certificates.ca_pem()?, fs::read_to_string(&paths.ca).unwrap_or_default());
    Ok(own != other && is_same_authority(&own, &other) && lasts(&own)? > lasts(&other)?)
}

/// Whether a host is to see to what lies in the directory that `nbd.tls_dir` names: not where it may not write there.
pub fn is_due(certificates: &Certificates, dir: &Path) -> Result<bool> {
    let paths = server_paths(dir);
    let may_write = rustix::fs::access(dir, Access::WRITE_OK).is_ok();
    Ok(may_write && (has_old_authority(certificates, &paths)? || has_used_up(certificates, dir)?))
}

fn has_used_up(certificates: &Certificates, dir: &Path) -> Result<bool> {
    let is_ours = names(certificates, &server_paths(dir))?.is_some();
    Ok(is_ours && renewal::are_due(&certificates.list_server(dir)?, now_s()))
}

/// Sees to it: `sign` gets another certificate where this machine can't make it.
pub fn renew(
    (grid_dir, machine): (&GridDir, &str),
    certificates: &Certificates,
    dir: &Path,
    sign: impl FnOnce(&ServerRenewal) -> Result<String>,
) -> Result<()> {
    let paths = server_paths(dir);
    if has_old_authority(certificates, &paths)? {
        write_durably(&paths.ca, certificates.ca_pem()?.as_bytes())?;
    }
    let Some(names) = names(certificates, &paths)?.filter(|_| has_used_up(certificates, dir).unwrap_or(false)) else {
        return Ok(());
    };
    let pair = match certificates.has_authority() {
        true => certificates.authority()?.issue_server(&names, LEAF_VALID)?,
        false => {
            let (renewal, key) = ask(certificates, machine, &paths)?;
            Pair { certificate: pki::only_certificate(&sign(&renewal)?)?, key }
        }
    };
    if server_names(&pair.certificate, &certificates.ca_pem()?).as_ref() != Some(&names) {
        refuse!(
            Code::NotPermitted,
            "what was signed for this host's server is not for its names, or none of this grid's"
        );
    }
    if !go_together(&pair.certificate, &pair.key) {
        refuse!(Code::NotPermitted, "what was signed for this host's server is for another key");
    }
    let _lock = Lock::take(grid_dir)?;
    replace_pair(&paths, &pair)
}

fn ask(certificates: &Certificates, machine: &str, paths: &LinkPaths) -> Result<(ServerRenewal, String)> {
    let (key, request) = pki::request()?;
    let host = certificates.paths(&Role::Host(machine.to_string()));
    let mut renewal = ServerRenewal {
        machine: machine.to_string(),
        request,
        server: read(&paths.certificate)?,
        server_signature: String::new(),
        host: read(&host.certificate)?,
        host_signature: String::new(),
    };
    let bytes = renewal.signed_bytes(certificates.grid());
    let seal = |path: &Path| anyhow::Ok(URL_SAFE_NO_PAD.encode(pki::sign_with(&read(path)?, &bytes)?));
    (renewal.server_signature, renewal.host_signature) = (seal(&paths.key)?, seal(&host.key)?);
    Ok((renewal, key))
}

/// Fails where who asks is no host that may be given anything, going by the list as it is now.
pub fn check_host(certificates: &Certificates, renewal: &ServerRenewal, revoked: &RevokedNow) -> Result<()> {
    let ServerRenewal { machine, host, .. } = renewal;
    let holder = holder_of(host, &certificates.ca(), certificates.grid(), revoked);
    let holder =
        holder.map_err(|why| anyhow::anyhow!("machine {machine} asks for an NBD server's certificate, but {why}"))?;
    if holder != Role::Host(machine.clone()) {
        refuse!(Code::NotPermitted, "{holder} asks for an NBD server's certificate in the name of machine {machine}");
    }
    Ok(())
}

/// Signs for the names that the server has.
pub fn answer(certificates: &Certificates, renewal: &ServerRenewal, revoked: &RevokedNow) -> Result<String> {
    let ServerRenewal { machine, request, server, host, .. } = renewal;
    check_host(certificates, renewal, revoked)?;
    let bytes = renewal.signed_bytes(certificates.grid());
    let is_signed = |pem: &str, signature: &str| -> Result<bool> {
        let signature = URL_SAFE_NO_PAD.decode(signature).context("its request is no request")?;
        Ok(pki::is_signed_by(pem, &bytes, &signature)?)
    };
    if !is_signed(host, &renewal.host_signature)? || !is_signed(server, &renewal.server_signature)? {
        refuse!(
            Code::NotPermitted,
            "a request for a certificate of the NBD server of machine {machine} was not made by it; look who writes \
             to the metadata store"
        );
    }
    let Some(names) = server_names(server, &certificates.ca_pem()?) else {
        refuse!(
            Code::NotPermitted,
            "machine {machine} asks for a certificate in the place of one that is no NBD server's of this grid"
        );
    };
    if Facts::of_pem(server)?.not_after <= now_s() {
        refuse!(
            Code::NotPermitted,
            "the certificate of the NBD server of machine {machine} has ended, and renews nothing: `holdfast grid tls \
             server {} --out DIR` where the authority's key is makes another, whose files go to that machine",
            names.join(" ")
        );
    }
    Ok(certificates.authority()?.answer_server(&names, request)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_runtime::pki::Authority;
    use holdfast_runtime::revoked::Revoked;
    use std::cell::Cell;
    use std::path::PathBuf;
    use std::time::Duration;

    const GRID: GridId = GridId(7);
    const DAY: Duration = Duration::from_secs(24 * 3600);
    const NAMES: [&str; 2] = ["10.0.0.2", "vmhost-2.example.org"];

    /// Machine b, whose NBD server has a certificate for so long; and machine a, which signs.
    struct Rig {
        temp: tempfile::TempDir,
        a: Certificates,
        b: Certificates,
    }

    impl Rig {
        fn new(valid: Duration) -> Rig {
            let temp = tempfile::tempdir().unwrap();
            let [a, b] = ["a", "b"].map(|name| Certificates::in_dir(&temp.path().join(name).join("tls"), GRID));
            a.make_authority_for(DAY).unwrap();
            b.put_ca(&a.ca_pem().unwrap()).unwrap();
            let rig = Rig { temp, a, b };
            let role = Role::Host("b".to_string());
            rig.b.put(&role, &rig.a.authority().unwrap().issue(&role).unwrap()).unwrap();
            rig.a.issue_server(&NAMES.map(str::to_string), &rig.dir()).unwrap();
            rig.show(&rig.a.authority().unwrap(), valid);
            rig
        }

        fn dir(&self) -> PathBuf {
            self.temp.path().join("nbd-tls")
        }

        fn show(&self, by: &Authority, valid: Duration) {
            let pair = by.issue_server(&NAMES.map(str::to_string), valid).unwrap();
            replace_pair(&server_paths(&self.dir()), &pair).unwrap();
        }

        fn ask(&self) -> ServerRenewal {
            ask(&self.b, "b", &server_paths(&self.dir())).unwrap().0
        }

        fn renew(&self, sign: impl FnOnce(&ServerRenewal) -> Result<String>) -> Result<()> {
            let dir = GridDir::choose(Some(&self.temp.path().join("b"))).unwrap();
            renew((&dir, "b"), &self.b, &self.dir(), sign)
        }

        fn refusal(&self, renewal: &ServerRenewal, revoked: &RevokedNow) -> String {
            format!("{:#}", answer(&self.a, renewal, revoked).unwrap_err())
        }
    }

    #[test]
    fn a_server_gets_another_certificate_for_its_names_when_most_of_its_time_is_used_up() {
        let (rig, none) = (Rig::new(300 * DAY), RevokedNow::new(GRID));
        assert!(!is_due(&rig.b, &rig.dir()).unwrap());
        rig.show(&rig.a.authority().unwrap(), DAY / 4);
        assert!(is_due(&rig.b, &rig.dir()).unwrap());
        let paths = server_paths(&rig.dir());
        let before = read(&paths.certificate).unwrap();
        rig.renew(|_| Ok(before.clone())).unwrap_err();
        assert_eq!(read(&paths.certificate).unwrap(), before, "what is for another key is not taken");
        rig.renew(|renewal| answer(&rig.a, renewal, &none)).unwrap();
        assert!(!is_due(&rig.b, &rig.dir()).unwrap());
        let after = read(&paths.certificate).unwrap();
        assert!(after != before && go_together(&after, &read(&paths.key).unwrap()));
        assert_eq!(server_names(&after, &rig.a.ca_pem().unwrap()), Some(NAMES.map(str::to_string).to_vec()));
        // The user's own is the user's.
        let (other, _) = Authority::make(GRID).unwrap();
        rig.show(&other, DAY / 4);
        assert!(!is_due(&rig.b, &rig.dir()).unwrap());
    }

    #[test]
    fn nobody_is_given_a_certificate_for_names_that_he_has_none_for() {
        let (rig, none) = (Rig::new(DAY / 4), RevokedNow::new(GRID));
        let good = rig.ask();
        answer(&rig.a, &good, &none).unwrap();
        let of_another = ServerRenewal { machine: "c".to_string(), ..good.clone() };
        assert!(rig.refusal(&of_another, &none).contains("in the name of machine c"));
        let other_key = ServerRenewal { request: rig.ask().request, ..good.clone() };
        assert!(rig.refusal(&other_key, &none).contains("was not made by it"));
        // A certificate is no secret; its key is.
        rig.show(&rig.a.authority().unwrap(), DAY / 4);
        let without_key =
            ServerRenewal { server: read(&server_paths(&rig.dir()).certificate).unwrap(), ..good.clone() };
        assert!(rig.refusal(&without_key, &none).contains("was not made by it"));
        let (other, _) = Authority::make(GRID).unwrap();
        rig.show(&other, DAY / 4);
        assert!(rig.refusal(&rig.ask(), &none).contains("no NBD server's of this grid"));
        rig.show(&rig.a.authority().unwrap(), Duration::ZERO);
        assert!(rig.refusal(&rig.ask(), &none).contains("has ended"));
        let mut list = Revoked::none(GRID);
        list.add(Role::Host("b".to_string()), now_s() + 60);
        let revoked = RevokedNow::new(GRID);
        assert!(revoked.replace(&list));
        assert!(rig.refusal(&good, &revoked).contains("was revoked"));
    }

    #[test]
    fn the_authority_that_clients_are_judged_by_follows_where_it_is_the_grids() {
        let rig = Rig::new(300 * DAY);
        rig.a.renew_authority().unwrap();
        assert!(rig.b.take_renewed(&rig.a.ca_pem().unwrap()).unwrap() && is_due(&rig.b, &rig.dir()).unwrap());
        let was_asked = Cell::new(false);
        rig.renew(|_| {
            was_asked.set(true);
            anyhow::bail!("nobody is there")
        })
        .unwrap();
        let ca = server_paths(&rig.dir()).ca;
        assert_eq!(read(&ca).unwrap(), rig.a.ca_pem().unwrap());
        assert!(!was_asked.get() && !is_due(&rig.b, &rig.dir()).unwrap());
        let other = Certificates::in_dir(&rig.temp.path().join("c"), GRID);
        other.make_authority().unwrap();
        write_durably(&ca, other.ca_pem().unwrap().as_bytes()).unwrap();
        assert!(!is_due(&rig.b, &rig.dir()).unwrap(), "the user's own");
    }
}
