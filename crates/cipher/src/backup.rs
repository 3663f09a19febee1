//! Keys of a backup repository, made from one secret.
//!
//! | what | value |
//! | --- | --- |
//! | keys | HKDF-SHA256: extract from the secret with the salt "holdfast backup key 1", expand with what is below |
//! | id of the key | 16 bytes, expanded with "id" |
//! | names of objects | HMAC-SHA256 of the plain bytes, its key expanded with "names"; without a key SHA-256 of them |
//! | an object | AES-256-GCM, its key expanded with "object" and the name, nonce random |
//!
//! Who has not the secret learns from names only which objects are equal.

use crate::{NONCE_BYTES, Secret, TAG_BYTES, expand};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, Prk, Salt};
use ring::hmac;
use std::fmt;

const SALT: &[u8] = b"holdfast backup key 1";

/// SHA-256 (FIPS 180-4).
pub fn digest(bytes: &[u8]) -> [u8; 32] {
    ring::digest::digest(&ring::digest::SHA256, bytes).as_ref().try_into().expect("32 bytes")
}

/// Of a repository.
#[derive(Clone)]
pub struct BackupKey {
    root: Prk,
    names: hmac::Key,
    id: u128,
}

impl BackupKey {
    pub fn new(secret: &Secret) -> BackupKey {
        let root = Salt::new(HKDF_SHA256, SALT).extract(secret.bytes());
        let (mut names, mut id) = ([0; 32], [0; 16]);
        expand(&root, &[b"names"], &mut names);
        expand(&root, &[b"id"], &mut id);
        BackupKey { root, names: hmac::Key::new(hmac::HMAC_SHA256, &names), id: u128::from_le_bytes(id) }
    }

    /// Tells keys apart and reveals nothing of them.
    pub fn id(&self) -> u128 {
        self.id
    }

    /// Equal for equal bytes, and for others never seen to be.
    pub fn name_of(&self, plain: &[u8]) -> [u8; 32] {
        hmac::sign(&self.names, plain).as_ref().try_into().expect("32 bytes")
    }

    /// Encrypts an object in place. The nonce must be random: an object may be made twice, compressed in another way.
    pub fn seal(&self, name: &[u8; 32], bound: &[u8], nonce: [u8; NONCE_BYTES], bytes: &mut [u8]) -> [u8; TAG_BYTES] {
        let sealed = self.of_object(name).seal_in_place_separate_tag(
            Nonce::assume_unique_for_key(nonce),
            Aad::from(bound),
            bytes,
        );
        sealed.expect("a bounded object").as_ref().try_into().expect("16 bytes")
    }

    /// Decrypts in place what [`Self::seal`] made; `false` where it is another object, or damaged.
    pub fn open(
        &self,
        name: &[u8; 32],
        bound: &[u8],
        nonce: [u8; NONCE_BYTES],
        tag: [u8; TAG_BYTES],
        bytes: &mut [u8],
    ) -> bool {
        let nonce = Nonce::assume_unique_for_key(nonce);
        self.of_object(name).open_in_place_separate_tag(nonce, Aad::from(bound), tag.into(), bytes, 0..).is_ok()
    }

    fn of_object(&self, name: &[u8; 32]) -> LessSafeKey {
        let mut key = [0; 32];
        expand(&self.root, &[b"object", name], &mut key);
        LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &key).expect("a key of the cipher's length"))
    }
}

impl fmt::Debug for BackupKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BackupKey({:032x})", self.id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_object_under_the_same_key_opens() {
        let key = |n| BackupKey::new(&Secret::new([n; 32]));
        let (plain, name) = (*b"what a guest wrote", key(1).name_of(b"what a guest wrote"));
        let mut bytes = plain;
        let nonce = [3; NONCE_BYTES];
        let tag = key(1).seal(&name, b"head", nonce, &mut bytes);
        assert_ne!(bytes, plain);
        let opens = |key: BackupKey, name: &[u8; 32], bound: &[u8], mut bytes: [u8; 18]| {
            key.open(name, bound, nonce, tag, &mut bytes) && bytes == plain
        };
        assert!(opens(key(1), &name, b"head", bytes));
        assert!(!opens(key(2), &name, b"head", bytes) && !opens(key(1), &[0; 32], b"head", bytes));
        assert!(!opens(key(1), &name, b"heap", bytes) && !opens(key(1), &name, b"head", plain));
        assert_ne!(key(1).name_of(b"a"), key(2).name_of(b"a"));
        assert_ne!(key(1).id(), key(2).id());
        assert_ne!(key(1).name_of(b"a"), digest(b"a"));
    }

    #[test]
    fn keys_are_bytes_or_digits() {
        assert!(Secret::parse(&[7; 32]) == Some(Secret::new([7; 32])));
        let digits = "07".repeat(32);
        assert!(Secret::parse(format!(" {digits}\n").as_bytes()) == Some(Secret::new([7; 32])));
        assert!(Secret::parse(&digits.as_bytes()[1..]).is_none() && Secret::parse(&[b'+'; 64]).is_none());
    }
}
