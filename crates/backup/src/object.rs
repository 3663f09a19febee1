//! Objects as they are stored: compressed, encrypted where there is a key, and named by what they hold.

use crate::{Error, Result};
use holdfast_cipher::{BackupKey, NONCE_BYTES, TAG_BYTES, digest};
use rand_core::{OsRng, TryRngCore};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

const MAGIC: &[u8; 4] = b"HFB1";
const COMPRESSED: u8 = 1;
const ENCRYPTED: u8 = 2;

/// Magic, flags and length: what encryption binds.
const BOUND_BYTES: usize = 12;

pub const HEAD_BYTES: usize = BOUND_BYTES + NONCE_BYTES;

/// Of zstd: fast, and far from its worst.
const LEVEL: i32 = 1;

/// What an object holds at most, plain: a manifest of the largest volume.
pub const PLAIN_BYTES_MAX: usize = 32 << 20;

/// Of what an object holds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(pub [u8; 32]);

impl Name {
    /// Where a chunk of that name is stored.
    pub fn chunk(&self) -> String {
        format!("{}/{self}", folder(self.0[0]))
    }

    pub fn damaged(&self) -> String {
        format!("damaged/{self}")
    }
}

/// Of chunks whose names begin with that byte.
pub fn folder(first: u8) -> String {
    format!("chunks/{first:02x}")
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Name {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Name, String> {
        let wrong = || format!("`{text}` is no name of an object");
        let is_plain = text.len() == 64 && text.bytes().all(|c| c.is_ascii_digit() || (b'a'..=b'f').contains(&c));
        if !is_plain {
            return Err(wrong());
        }
        let mut name = [0; 32];
        for (at, byte) in name.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).map_err(|_| wrong())?;
        }
        Ok(Name(name))
    }
}

impl TryFrom<String> for Name {
    type Error = String;

    fn try_from(text: String) -> std::result::Result<Name, String> {
        text.parse()
    }
}

impl From<Name> for String {
    fn from(name: Name) -> String {
        name.to_string()
    }
}

/// Equal for equal bytes, and for others never seen to be.
pub fn name_of(key: Option<&BackupKey>, plain: &[u8]) -> Name {
    Name(key.map_or_else(|| digest(plain), |key| key.name_of(plain)))
}

/// The object that holds `plain`, at most [`PLAIN_BYTES_MAX`], whose name is known. It takes the place of what is in
/// `object`: memory that was used before costs less than new one.
pub fn seal(key: Option<&BackupKey>, name: &Name, plain: &[u8], object: &mut Vec<u8>) {
    assert!(plain.len() <= PLAIN_BYTES_MAX, "an object of {} bytes", plain.len());
    object.resize(HEAD_BYTES + zstd_safe::compress_bound(plain.len()), 0);
    object[..HEAD_BYTES].fill(0);
    object[..4].copy_from_slice(MAGIC);
    object[8..BOUND_BYTES].copy_from_slice(&(plain.len() as u32).to_le_bytes());
    match zstd_safe::compress(&mut object[HEAD_BYTES..], plain, LEVEL) {
        Ok(len) if len + len / 32 < plain.len() => {
            object[4] |= COMPRESSED;
            object.truncate(HEAD_BYTES + len);
        }
        _ => {
            object.truncate(HEAD_BYTES);
            object.extend_from_slice(plain);
        }
    }
    if let Some(key) = key {
        object[4] |= ENCRYPTED;
        let (head, body) = object.split_at_mut(HEAD_BYTES);
        let mut nonce = [0; NONCE_BYTES];
        OsRng.try_fill_bytes(&mut nonce).expect("the system gives random bytes");
        let tag = key.seal(&name.0, &head[..BOUND_BYTES], nonce, body);
        head[BOUND_BYTES..].copy_from_slice(&nonce);
        object.extend_from_slice(&tag);
    }
}

/// What the object of that name holds.
///
/// # Errors
/// [`Error::Damaged`]: it is not what was stored under that name.
pub fn open(key: Option<&BackupKey>, name: &Name, mut object: Vec<u8>) -> Result<Vec<u8>> {
    let damaged = |why: &str| Error::Damaged(format!("object {name} is damaged: {why}"));
    if object.len() < HEAD_BYTES || &object[..4] != MAGIC {
        return Err(damaged("it does not begin as one"));
    }
    let (head, body) = object.split_at_mut(HEAD_BYTES);
    let (flags, plain_bytes) =
        (head[4], u32::from_le_bytes(head[8..BOUND_BYTES].try_into().expect("4 bytes")) as usize);
    if flags & !(COMPRESSED | ENCRYPTED) != 0 || plain_bytes > PLAIN_BYTES_MAX {
        return Err(damaged("its head makes no sense"));
    }
    let body = match (flags & ENCRYPTED != 0, key) {
        (false, _) => body,
        (true, None) => return Err(damaged("it is encrypted, in a repository that is not")),
        (true, Some(key)) => {
            let Some((body, tag)) = body.split_last_chunk_mut::<TAG_BYTES>() else {
                return Err(damaged("it is cut short"));
            };
            let nonce = head[BOUND_BYTES..].try_into().expect("12 bytes");
            if !key.open(&name.0, &head[..BOUND_BYTES], nonce, *tag, body) {
                return Err(damaged("it does not decrypt"));
            }
            body
        }
    };
    let plain = if flags & COMPRESSED == 0 {
        body.to_vec()
    } else {
        let mut plain = vec![0; plain_bytes];
        let len = zstd_safe::decompress(&mut plain[..], body).map_err(|_| damaged("it does not decompress"))?;
        plain.truncate(len);
        plain
    };
    match plain.len() == plain_bytes && name_of(key, &plain) == *name {
        true => Ok(plain),
        false => Err(damaged("its content is not what its name says")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_cipher::Secret;
    use proptest::prelude::*;

    fn keys() -> [Option<BackupKey>; 2] {
        [None, Some(BackupKey::new(&Secret::new([5; 32])))]
    }

    proptest! {
        #[test]
        fn objects_open_as_they_were_and_hurt_ones_do_not(
            mut plain in proptest::collection::vec(any::<u8>(), 0..5000),
            filled in any::<bool>(),
            at in any::<proptest::sample::Index>(),
            flip in 1_u8..,
        ) {
            if filled {
                plain.fill(7);
            }
            for key in keys() {
                let name = name_of(key.as_ref(), &plain);
                let mut object = vec![77; 9];
                seal(key.as_ref(), &name, &plain, &mut object);
                prop_assert_eq!(&open(key.as_ref(), &name, object.clone()).unwrap(), &plain);
                let mut hurt = object.clone();
                let at = at.index(hurt.len());
                hurt[at] ^= flip;
                // Bytes that nothing depends on may be hurt; what is read is never other bytes.
                prop_assert!(open(key.as_ref(), &name, hurt).map_or(true, |found| found == plain));
                let cut = object[..at].to_vec();
                prop_assert!(open(key.as_ref(), &name, cut).map_or(true, |found| found == plain));
            }
        }

        #[test]
        fn any_bytes_end_with_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200), head in any::<bool>()) {
            let mut bytes = bytes;
            if head && bytes.len() > 12 {
                bytes[..4].copy_from_slice(MAGIC);
                bytes[4] &= 3;
                bytes[8..12].copy_from_slice(&100_u32.to_le_bytes());
            }
            for key in keys() {
                prop_assert!(open(key.as_ref(), &Name([1; 32]), bytes.clone()).is_err());
            }
        }
    }

    #[test]
    fn an_encrypted_object_shows_nothing() {
        let [_, key] = keys();
        let plain = b"a guest's secret ".repeat(100);
        let name = name_of(key.as_ref(), &plain);
        let mut object = Vec::new();
        seal(key.as_ref(), &name, &plain, &mut object);
        assert!(!object.windows(6).any(|bytes| bytes == b"secret"));
        assert_ne!(name, name_of(None, &plain));
        assert!(matches!(open(None, &name, object), Err(Error::Damaged(_))));
    }
}
