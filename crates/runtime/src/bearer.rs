//! Tokens by which callers of the HTTP interface are known that have no certificate: browsers, and programs that take no
//! keys. The grid's authority signs them, so every host can judge one, and nobody keeps a list.
//!
//! ```text
//! holdfast-token.BODY.SIGNATURE            both in base64 (RFC 4648, section 5), without filling
//! BODY:  holdfast bearer 1
//!        holdfast://0f6c…/reader/prometheus
//!        1763848000 1795384000             when it was issued, and until when it is good, in seconds since 1970
//! ```
//! Whoever holds it is who it names, so it goes over TLS alone. It is taken back like a certificate: by a list that has
//! its name ([`Revoked`](crate::revoked::Revoked)).

use crate::pki::{Authority, EARLIER, Identity, PkiError, Role, is_signed_by};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use holdfast_base::GridId;
use std::time::Duration;
use thiserror::Error;

const PREFIX: &str = "holdfast-token";
const FIRST_LINE: &str = "holdfast bearer 1";

/// Longest token that is looked at.
pub const BEARER_BYTES_MAX: usize = 1024;

/// Why a text is no token to go by.
#[derive(Debug, Error)]
pub enum BearerError {
    #[error("it is no token of Holdfast's, or a part of one")]
    Form,
    #[error("it is of grid {0}, which is another one")]
    Grid(GridId),
    #[error("this grid's authority has not signed it")]
    Signature,
    #[error("it has ended")]
    Ended,
    #[error(
        "it was made more than a day ahead of this machine's clock: set the clocks right, here or where it was made"
    )]
    Ahead,
    #[error(transparent)]
    Pki(#[from] PkiError),
}

/// Whom a token names.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Bearer {
    pub identity: Identity,
    /// Seconds since 1970.
    pub issued_s: u64,
    pub until_s: u64,
}

impl Bearer {
    /// A token for `role`, good for so long from now on.
    ///
    /// # Errors
    /// The authority can't sign, or its clock is behind what was taken back of that name.
    pub fn issue(authority: &Authority, grid: GridId, role: Role, valid: Duration) -> Result<String, PkiError> {
        let issued_s = authority.issue_s(&role)?;
        let bearer = Bearer { identity: Identity { grid, role }, issued_s, until_s: issued_s + valid.as_secs() };
        let body = bearer.body();
        let signature = authority.seal(body.as_bytes())?;
        Ok(format!("{PREFIX}.{}.{}", URL_SAFE_NO_PAD.encode(body), URL_SAFE_NO_PAD.encode(signature)))
    }

    fn body(&self) -> String {
        format!("{FIRST_LINE}\n{}\n{} {}\n", self.identity, self.issued_s, self.until_s)
    }

    /// Whom it names, where the authority has signed it, whose certificate in PEM is `ca`, and it is good at `now_s`,
    /// in seconds since 1970. Whether it was taken back is another question.
    ///
    /// # Errors
    /// It counts for nothing.
    pub fn verify(text: &str, grid: GridId, ca: &str, now_s: u64) -> Result<Bearer, BearerError> {
        let parts = || {
            let (body, signature) = text.strip_prefix(PREFIX)?.strip_prefix('.')?.split_once('.')?;
            let [body, signature] = [body, signature].map(|part| URL_SAFE_NO_PAD.decode(part).ok());
            Some((String::from_utf8(body?).ok()?, signature?))
        };
        let (body, signature) =
            Some(text).filter(|text| text.len() <= BEARER_BYTES_MAX).and_then(|_| parts()).ok_or(BearerError::Form)?;
        let bearer = Bearer::parse(&body).ok_or(BearerError::Form)?;
        if bearer.identity.grid != grid {
            return Err(BearerError::Grid(bearer.identity.grid));
        }
        if !is_signed_by(ca, body.as_bytes(), &signature)? {
            return Err(BearerError::Signature);
        }
        // As a certificate is that was issued then: good from a day before on.
        if bearer.issued_s > now_s.saturating_add(EARLIER.as_secs()) {
            return Err(BearerError::Ahead);
        }
        if bearer.until_s <= now_s { Err(BearerError::Ended) } else { Ok(bearer) }
    }

    fn parse(body: &str) -> Option<Bearer> {
        let mut lines = body.lines();
        let (first, identity, times) = (lines.next()?, lines.next()?, lines.next()?);
        let (issued, until) = times.split_once(' ')?;
        let bearer =
            Bearer { identity: identity.parse().ok()?, issued_s: issued.parse().ok()?, until_s: until.parse().ok()? };
        // One way to write each.
        (first == FIRST_LINE && bearer.body() == body).then_some(bearer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRID: GridId = GridId(0x77);
    const DAY: Duration = Duration::from_secs(86_400);

    #[test]
    fn a_token_names_whom_it_was_made_for_while_it_is_good() {
        let (authority, pair) = Authority::make(GRID).unwrap();
        let role = Role::Reader("prometheus".into());
        let text = Bearer::issue(&authority, GRID, role.clone(), DAY).unwrap();
        assert!(text.len() < BEARER_BYTES_MAX && text.bytes().all(|b| b.is_ascii_graphic()), "{text}");
        let now_s = authority.issue_s(&role).unwrap();
        let bearer = Bearer::verify(&text, GRID, &pair.certificate, now_s).unwrap();
        assert_eq!(bearer.identity.role, role);
        assert!(bearer.issued_s.abs_diff(now_s) < 60 && bearer.until_s == bearer.issued_s + 86_400);
        let later = Bearer::verify(&text, GRID, &pair.certificate, bearer.until_s);
        assert!(matches!(later, Err(BearerError::Ended)), "{later:?}");
        let at = |now_s| Bearer::verify(&text, GRID, &pair.certificate, now_s);
        assert!(at(bearer.issued_s - 86_400).is_ok(), "clocks differ");
        let before = at(bearer.issued_s - 86_401);
        assert!(matches!(before, Err(BearerError::Ahead)), "{before:?}");
    }

    #[test]
    fn what_anybody_else_made_or_changed_is_refused() {
        let (authority, pair) = Authority::make(GRID).unwrap();
        let (other, _) = Authority::make(GRID).unwrap();
        let role = Role::Reader("a".into());
        let verify = |text: &str| Bearer::verify(text, GRID, &pair.certificate, 0).unwrap_err();
        let forged = Bearer::issue(&other, GRID, role.clone(), DAY).unwrap();
        assert!(matches!(verify(&forged), BearerError::Signature));
        let foreign = Bearer::issue(&authority, GridId(0x78), role.clone(), DAY).unwrap();
        assert!(matches!(verify(&foreign), BearerError::Grid(GridId(0x78))));
        let text = Bearer::issue(&authority, GRID, role, DAY).unwrap();
        let (head, signature) = text.rsplit_once('.').unwrap();
        let body = URL_SAFE_NO_PAD.decode(head.rsplit_once('.').unwrap().1).unwrap();
        let raised = String::from_utf8(body).unwrap().replace("/reader/", "/operator/");
        let raised = format!("{PREFIX}.{}.{signature}", URL_SAFE_NO_PAD.encode(raised));
        assert!(matches!(verify(&raised), BearerError::Signature));
        // A list of what is revoked is signed by the same key, and is no token.
        let list = crate::revoked::Revoked::none(GRID).sign(&authority).unwrap();
        let cut = [head, "", "holdfast-token", "holdfast-token..", "a.b.c", &text[1..], &list, &"x".repeat(5000)];
        for odd in cut {
            assert!(matches!(verify(odd), BearerError::Form), "{odd}");
        }
        assert!(Bearer::verify(&format!("{text}="), GRID, &pair.certificate, 0).is_err());
    }
}
