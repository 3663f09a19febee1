//! Certificates for an etcd that is a grid's own: of its members, and of who is let in there, and as whom.
//!
//! ```text
//! key of a grid's authority
//!   as "Holdfast grid …"        hosts, nodes, clients of volumes
//!   as "Holdfast grid …, etcd"  ──> holdfast-etcd-member   members, to each other and to clients
//!                               ├──> host/NAME/SECONDS     a machine, from that second on
//!                               ├──> join/TOKEN/SECONDS    who holds a token, until then
//!                               └──> root                  who changes what all the others may
//! ```
//! Role: as the module above. etcd takes a certificate's common name for the name of its user.
//!
//! Invariants
//! 1. What one of both authorities has signed the other did not: issuers are told apart by name before any signature is
//!    looked at, so that a client of volumes does not get into etcd, and nobody of etcd's to a node. It is one key all
//!    the same: who can sign for the grid can sign for its etcd, wherever that key was copied to.
//! 2. No two certificates that were issued in different seconds name the same user: taking one back leaves later ones
//!    alone.
//! 3. Members have a name that no user has, which they ask of each other: no user passes for a member.

use super::{
    AUTHORITY_VALID, Authority, CertificateParams, CertificateSigningRequestParams, ExtendedKeyUsagePurpose, GridId,
    IsCa, Issuer, KeyPair, KeyUsagePurpose, LEAF_VALID, Pair, PkiError, PublicKeyData, SanType, authority_name,
    authority_params, date_time_ymd, now, params, params_at, random,
};
use rcgen::{CertificateRevocationListParams, KeyIdMethod, RevokedCertParams, SerialNumber};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;
use std::time::Duration;

/// Common name of all members of a grid's etcd.
pub const MEMBER: &str = "holdfast-etcd-member";

/// Number of a member's certificate.
pub type Serial = [u8; 16];

/// A number that no other certificate has. It is positive, and has no leading zeroes.
pub fn serial() -> Serial {
    let mut serial: Serial = random();
    serial[0] = serial[0] & 0x7f | 0x40;
    serial
}

/// A user of a grid's etcd; as text its name there.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum User {
    /// May do everything, and is nobody for long.
    Root,
    /// A machine's host and commands, by a certificate of that second since 1970.
    Host { name: String, issued_s: u64 },
    /// Who is about to join by this token.
    Joining { token: String, until_s: u64 },
}

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            User::Root => f.write_str("root"),
            User::Host { name, issued_s } => write!(f, "host/{name}/{issued_s}"),
            User::Joining { token, until_s } => write!(f, "join/{token}/{until_s}"),
        }
    }
}

/// A text that is no name of a user of ours.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoUser;

impl FromStr for User {
    type Err = NoUser;

    fn from_str(text: &str) -> Result<User, NoUser> {
        let parts: Vec<&str> = text.split('/').collect();
        let seconds = |text: &str| text.parse().map_err(|_| NoUser);
        let user = match parts.as_slice() {
            ["root"] => User::Root,
            ["host", name, at] if !name.is_empty() => User::Host { name: (*name).to_string(), issued_s: seconds(at)? },
            ["join", token, until] if !token.is_empty() => {
                User::Joining { token: (*token).to_string(), until_s: seconds(until)? }
            }
            _ => return Err(NoUser),
        };
        // One way to write each.
        if user.to_string() == text { Ok(user) } else { Err(NoUser) }
    }
}

fn etcd_authority(grid: GridId) -> CertificateParams {
    authority_params(&format!("{}, etcd", authority_name(grid)), AUTHORITY_VALID)
}

/// A machine's begins when its name says.
fn user_params(user: &User, valid: Duration) -> CertificateParams {
    match user {
        User::Host { issued_s, .. } => params_at(&user.to_string(), Duration::from_secs(*issued_s), valid),
        User::Root | User::Joining { .. } => params(&user.to_string(), valid),
    }
}

impl Authority {
    /// The certificate that members and users of the grid's etcd are judged by. Each that is made is as good as the
    /// others.
    pub fn etcd_ca(&self) -> Result<String, PkiError> {
        Ok(etcd_authority(self.grid).self_signed(self.issuer.key()).map_err(PkiError::Make)?.pem())
    }

    fn sign_for_etcd(
        &self,
        mut params: CertificateParams,
        usages: &[ExtendedKeyUsagePurpose],
        key: &impl PublicKeyData,
    ) -> Result<String, PkiError> {
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = usages.to_vec();
        params.use_authority_key_identifier_extension = true;
        let issuer = Issuer::new(etcd_authority(self.grid), self.issuer.key());
        Ok(params.signed_by(key, &issuer).map_err(PkiError::Make)?.pem())
    }

    /// A new key, and a certificate with this number for a member that others reach at this address.
    pub fn issue_etcd_member(&self, address: IpAddr, serial: &Serial) -> Result<Pair, PkiError> {
        let mut params = params(MEMBER, LEAF_VALID);
        params.serial_number = Some(SerialNumber::from_slice(serial));
        let loopback = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
        let others = loopback.into_iter().filter(|other| *other != address);
        params.subject_alt_names = [address].into_iter().chain(others).map(SanType::IpAddress).collect();
        let key = KeyPair::generate().map_err(PkiError::Make)?;
        let usages = [ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        Ok(Pair { certificate: self.sign_for_etcd(params, &usages, &key)?, key: key.serialize_pem() })
    }

    /// The list, in DER, of members' certificates that were taken back: for members, which go by numbers.
    pub fn etcd_members_revoked(&self, serials: &[Serial]) -> Result<Vec<u8>, PkiError> {
        let now = now();
        let at = |since: Duration| date_time_ymd(1970, 1, 1) + Duration::from_secs(since.as_secs());
        let revoked = |serial: &Serial| RevokedCertParams {
            serial_number: SerialNumber::from_slice(serial),
            revocation_time: at(now),
            reason_code: None,
            invalidity_date: None,
        };
        let list = CertificateRevocationListParams {
            this_update: at(now),
            next_update: at(now + AUTHORITY_VALID),
            crl_number: SerialNumber::from(now.as_secs()),
            issuing_distribution_point: None,
            revoked_certs: serials.iter().map(revoked).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let issuer = Issuer::new(etcd_authority(self.grid), self.issuer.key());
        Ok(list.signed_by(&issuer).map_err(PkiError::Make)?.der().to_vec())
    }

    /// A new key, and a certificate for a user, good for as long.
    pub fn issue_etcd_user(&self, user: &User, valid: Duration) -> Result<Pair, PkiError> {
        let key = KeyPair::generate().map_err(PkiError::Make)?;
        let params = user_params(user, valid);
        let certificate = self.sign_for_etcd(params, &[ExtendedKeyUsagePurpose::ClientAuth], &key)?;
        Ok(Pair { certificate, key: key.serialize_pem() })
    }

    /// A certificate of a user for the key behind a request, whatever that calls itself.
    pub fn answer_etcd_user(&self, user: &User, request: &str) -> Result<String, PkiError> {
        let request = CertificateSigningRequestParams::from_pem(request).map_err(PkiError::Request)?;
        let params = user_params(user, LEAF_VALID);
        self.sign_for_etcd(params, &[ExtendedKeyUsagePurpose::ClientAuth], &request.public_key)
    }
}

/// Whom etcd takes a certificate of its authority for, in PEM; its user is nobody elsewhere.
pub fn user_of_pem(pem: &str) -> Option<User> {
    let facts = super::Facts::of_pem(pem).ok()?;
    facts.subject.strip_prefix("CN=")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::super::{CertificateDer, Facts, PemObject, Role, request};
    use super::*;

    const GRID: GridId = GridId(7);

    #[test]
    fn users_read_back_and_odd_ones_do_not() {
        let host = User::Host { name: "a.b-c".into(), issued_s: 1_763_848_000 };
        for user in [User::Root, host, User::Joining { token: "0f".into(), until_s: 7 }] {
            assert_eq!(user.to_string().parse(), Ok(user));
        }
        for odd in ["", "root/", "host/a", "host//7", "host/a/07", "host/a/+7", "host/a/b/7", "client/a/7", MEMBER] {
            assert_eq!(odd.parse::<User>(), Err(NoUser), "{odd}");
        }
    }

    #[test]
    fn both_authorities_have_one_key_and_issuers_that_differ() {
        let (_, kept) = Authority::make(GRID).unwrap();
        let authority = Authority::load(GRID, &kept).unwrap();
        let user = User::Host { name: "a".into(), issued_s: 7 };
        let (_, request) = request().unwrap();
        let certificates = [
            authority.issue_etcd_user(&user, LEAF_VALID).unwrap().certificate,
            authority.answer_etcd_user(&user, &request).unwrap(),
            authority.issue_etcd_member("10.0.0.1".parse().unwrap(), &serial()).unwrap().certificate,
        ];
        let issuer = |pem: &str| {
            let der = CertificateDer::from_pem_slice(pem.as_bytes()).unwrap();
            x509_parser::parse_x509_certificate(&der).unwrap().1.issuer().to_string()
        };
        let ca = Facts::of_pem(&authority.etcd_ca().unwrap()).unwrap();
        let grids = Facts::of_pem(&kept.certificate).unwrap();
        assert_ne!(ca.subject, grids.subject);
        for certificate in &certificates {
            assert_eq!(issuer(certificate), ca.subject);
            assert_eq!(Facts::of_pem(certificate).unwrap().identity, None, "it speaks for nobody of the grid");
        }
        assert_eq!(certificates.each_ref().map(|pem| user_of_pem(pem)), [Some(user.clone()), Some(user), None]);
        let number = serial();
        let list = authority.etcd_members_revoked(&[number]).unwrap();
        assert!(list.windows(number.len()).any(|window| window == number));
        assert!(authority.etcd_members_revoked(&[]).is_ok());
        let client = authority.issue(&Role::Client("vm7".into())).unwrap().certificate;
        assert_eq!((issuer(&client), user_of_pem(&client)), (grids.subject, None));
    }
}
