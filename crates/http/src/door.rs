//! Who asks: whoever runs the host, by the socket of this machine; others by a certificate or a token, over TLS.
//!
//! Each request is judged anew, so what was taken back counts for nothing on connections that stand, too. Nothing of a
//! request but its head is read before.

use crate::seats::Seat;
use crate::serve::{Ask, Refusal, Shown, refused};
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use holdfast_api::{Code, Role};
use std::sync::Arc;
use tokio::net::UnixStream;

/// Says of a request that a browser sends whether a page of the same host asks (W3C, Fetch Metadata).
const SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Who a request is from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Caller {
    pub role: Role,
    /// The same for all that one has been given: `operator ann`.
    pub who: Arc<str>,
}

impl Caller {
    pub fn new(role: Role, who: &str) -> Caller {
        Caller { role, who: who.into() }
    }

    /// Whoever runs the host, and root, may do all; others whom the socket lets in may look.
    pub fn of_unix(stream: &UnixStream) -> Caller {
        let may_do_all = |uid| uid == 0 || uid == rustix::process::geteuid().as_raw();
        match stream.peer_cred() {
            Ok(peer) if may_do_all(peer.uid()) => Caller::new(Role::Admin, &format!("user {}", peer.uid())),
            Ok(peer) => Caller::new(Role::Reader, &format!("user {}", peer.uid())),
            Err(_) => Caller::new(Role::Reader, "user unknown"),
        }
    }
}

/// Who is at the other end of a connection.
#[derive(Clone, Debug)]
pub enum Peer {
    /// Of this machine.
    Local(Caller),
    /// With the certificate that was shown, in DER.
    Remote { certificate: Option<Arc<[u8]>>, seat: Arc<Seat> },
}

impl Peer {
    pub fn of_tls(certificate: Option<&[u8]>, seat: &Arc<Seat>) -> Peer {
        Peer::Remote { certificate: certificate.map(Arc::from), seat: Arc::clone(seat) }
    }

    pub fn is_local(&self) -> bool {
        matches!(self, Peer::Local(_))
    }

    /// Somebody has shown who they are, as far as the connection's place goes.
    pub fn is_known(&self, who: &Arc<str>) {
        if let Peer::Remote { seat, .. } = self {
            seat.is_known(who);
        }
    }

    /// Who asks. A token that is shown counts, and not the certificate beside it.
    pub fn caller(&self, ask: &dyn Ask, headers: &HeaderMap) -> Result<Caller, Refusal> {
        let certificate = match self {
            Peer::Local(caller) => return Ok(caller.clone()),
            Peer::Remote { certificate, .. } => certificate,
        };
        if is_of_another_site(headers) {
            let why = "a page of another site asks; pages of this host alone may";
            return Err(refused(StatusCode::FORBIDDEN, Code::NotPermitted, why));
        }
        let shown = match (token(headers)?, certificate) {
            (Some(token), _) => Shown::Token(token),
            (None, Some(certificate)) => Shown::Certificate(certificate),
            (None, None) => {
                return Err(nobody(
                    "show a certificate of an operator or a reader, or send `Authorization: Bearer TOKEN`; \
                     `holdfast grid tls operator` makes both",
                ));
            }
        };
        let judged = ask.caller_of(shown).map_err(|error| Refusal { status: StatusCode::UNAUTHORIZED, error });
        judged.inspect(|caller| self.is_known(&caller.who))
    }
}

fn nobody(why: &str) -> Refusal {
    refused(StatusCode::UNAUTHORIZED, Code::NotPermitted, why)
}

/// The one that is sent, if any is. Who sends something else in its place is nobody, whatever the certificate says.
pub(crate) fn token(headers: &HeaderMap) -> Result<Option<&str>, Refusal> {
    let mut values = headers.get_all(header::AUTHORIZATION).iter();
    let Some(value) = values.next() else { return Ok(None) };
    let parts = value.to_str().ok().and_then(|text| text.split_once(' '));
    match parts.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer") && values.next().is_none()) {
        Some((_, token)) => Ok(Some(token.trim())),
        None => Err(nobody("there is one `Authorization`, and it is `Bearer TOKEN`: send that, or none")),
    }
}

/// A browser says so, of a request that it would send with the user's certificate.
fn is_of_another_site(headers: &HeaderMap) -> bool {
    let text = |name| headers.get(name).map(|value: &axum::http::HeaderValue| value.to_str().unwrap_or_default());
    let origin = text(header::ORIGIN).map(|origin| origin.strip_prefix("https://").unwrap_or(origin));
    // Images and scripts are asked for without an origin.
    let is_foreign = text(SITE).is_some_and(|site| !["same-origin", "none"].contains(&site));
    is_foreign || origin.is_some_and(|origin| Some(origin) != text(header::HOST))
}

#[cfg(test)]
mod tests {
    use super::*;
    fn headers(of: &[(HeaderName, &str)]) -> HeaderMap {
        of.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect()
    }

    #[test]
    fn pages_of_other_sites_are_told_by_their_origin() {
        let host = (header::HOST, "10.0.0.1:8443");
        let from = |origin| headers(&[host.clone(), (header::ORIGIN, origin)]);
        assert!(!is_of_another_site(&headers(std::slice::from_ref(&host))), "no browser");
        assert!(!is_of_another_site(&from("https://10.0.0.1:8443")));
        for foreign in ["https://10.0.0.1", "http://10.0.0.1:8443", "https://evil.example", "null", ""] {
            assert!(is_of_another_site(&from(foreign)), "{foreign}");
        }
        assert!(is_of_another_site(&headers(&[(header::ORIGIN, "https://a")])));
        let of_site = |site| is_of_another_site(&headers(&[host.clone(), (SITE, site)]));
        assert_eq!(
            ["none", "same-origin", "same-site", "cross-site", "x"].map(of_site),
            [false, false, true, true, true]
        );
    }

    #[test]
    fn tokens_are_taken_from_the_header_that_is_made_for_them() {
        let of = |values: &[&str]| {
            let mut all = HeaderMap::new();
            for value in values {
                all.append(header::AUTHORIZATION, value.parse().unwrap());
            }
            token(&all).map(|found| found.map(str::to_string)).map_err(|refusal| refusal.status)
        };
        let some = |token: &str| Ok(Some(token.to_string()));
        assert_eq!((of(&["Bearer abc"]), of(&["bearer  abc "]), of(&[])), (some("abc"), some("abc"), Ok(None)));
        for odd in [&["Basic abc"][..], &["Bearer"], &["Bearer\tabc"], &[""], &["Bearer a", "Bearer b"]] {
            assert_eq!(of(odd), Err(StatusCode::UNAUTHORIZED), "{odd:?}");
        }
    }
}
