//! Who asks: whoever runs the host, by the socket of this machine; others by a certificate or a token, over TLS.
//!
//! Each request is judged anew, so what was taken back counts for nothing on connections that stand, too.

use crate::serve::{Ask, Refusal, Shown, refused};
use axum::http::{HeaderMap, StatusCode, header};
use holdfast_api::{Code, Role};
use std::sync::Arc;
use tokio::net::UnixStream;

/// Who is at the other end of a connection.
#[derive(Clone, Debug)]
pub enum Peer {
    /// Of this machine.
    Local(Role),
    /// With the certificate that was shown, in DER.
    Remote(Option<Arc<[u8]>>),
}

impl Peer {
    /// Whoever runs the host, and root, may do all; others whom the socket lets in may look.
    pub fn of_unix(stream: &UnixStream) -> Peer {
        let may_do_all = |uid| uid == 0 || uid == rustix::process::geteuid().as_raw();
        let is_admin = stream.peer_cred().is_ok_and(|peer| may_do_all(peer.uid()));
        Peer::Local(if is_admin { Role::Admin } else { Role::Reader })
    }

    pub fn of_tls(certificate: Option<&[u8]>) -> Peer {
        Peer::Remote(certificate.map(Arc::from))
    }

    /// Who asks. A token that is shown counts, and not the certificate beside it.
    pub fn role(&self, ask: &dyn Ask, headers: &HeaderMap) -> Result<Role, Refusal> {
        let certificate = match self {
            Peer::Local(role) => return Ok(*role),
            Peer::Remote(certificate) => certificate,
        };
        if is_of_another_site(headers) {
            let why = "a page of another site asks; pages of this host alone may";
            return Err(refused(StatusCode::FORBIDDEN, Code::NotPermitted, why));
        }
        let shown = match (token(headers), certificate) {
            (Some(token), _) => Shown::Token(token),
            (None, Some(certificate)) => Shown::Certificate(certificate),
            (None, None) => {
                let why = "show a certificate of an operator or a reader, or send `Authorization: Bearer TOKEN`; \
                           `holdfast grid tls operator` makes both";
                return Err(refused(StatusCode::UNAUTHORIZED, Code::NotPermitted, why));
            }
        };
        ask.role_of(shown).map_err(|error| Refusal { status: StatusCode::UNAUTHORIZED, error })
    }
}

pub(crate) fn token(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

/// A browser says so, of a request that it would send with the user's certificate.
fn is_of_another_site(headers: &HeaderMap) -> bool {
    let text = |name| headers.get(name).map(|value: &axum::http::HeaderValue| value.to_str().unwrap_or_default());
    let origin = text(header::ORIGIN).map(|origin| origin.strip_prefix("https://").unwrap_or(origin));
    origin.is_some_and(|origin| Some(origin) != text(header::HOST))
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderName;

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
    }

    #[test]
    fn tokens_are_taken_from_the_header_that_is_made_for_them() {
        let of = |value| headers(&[(header::AUTHORIZATION, value)]);
        assert_eq!(token(&of("Bearer abc")), Some("abc"));
        assert_eq!(token(&of("bearer  abc ")), Some("abc"));
        assert_eq!((token(&of("Basic abc")), token(&of("Bearer")), token(&headers(&[]))), (None, None, None));
    }
}
