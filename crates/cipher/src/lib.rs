//! Encryption at rest: keys of ledgers and segments, made from a volume's key, and what is encrypted with them.
//!
//! Role: pure functions over the caller's bytes, like the erasure code. Nothing here draws entropy, keeps state between
//! calls, or knows where bytes go; the same key, position and bytes always give the same ciphertext.
//!
//! What is part of the format:
//!
//! | what | value |
//! | --- | --- |
//! | cipher | AES-256-GCM; nonce: 4 zero bytes, and the position as `u64`, little-endian |
//! | keys | HKDF-SHA256: extract from the volume's key with the salt "holdfast volume key 1", expand with what is below |
//! | of a ledger | "ledger", volume, epoch (`u64`), n (`u32`), instance of the opening; position: the LSN |
//! | of a segment | "segment", volume, epoch, counter (`u64`); position: the block's place in the payload |
//! | id of a volume's key | 16 bytes, expanded with "id" |
//! | of fingerprints in a sharing domain | expanded from the key of its store with "prints" |
//! | wrapped key | AES-256-GCM by the key-encrypting key, nonce random, associated data: "holdfast wrapped key 1", volume |
//! | of backups | see [`BackupKey`] and its module |
//!
//! All integers are little-endian, 128-bit ids too.
//!
//! Invariants
//! 1. A key and a position never seal two different plaintexts (protocol rule 21). That is the caller's to keep, by ids
//!    that are never used twice; the simulator checks it with [`Cipher::fingerprint`].
//! 2. Secrets are never shown: `Debug` of a key tells its id.
//!
//! Faults: bytes that differ from what was encrypted, or that were encrypted elsewhere, are told by `false` or `None`.

#![deny(unsafe_code)]

mod backup;

pub use backup::{BackupKey, digest};
use holdfast_base::{BLOCK_BYTES, InstanceId, LedgerId, Lsn, SegmentId, VolumeId};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, Tag, UnboundKey};
use ring::hkdf::{HKDF_SHA256, KeyType, Prk, Salt};
use std::fmt;

/// Of a volume's key, and of a key-encrypting key.
pub const KEY_BYTES: usize = 32;

pub const TAG_BYTES: usize = 16;

pub const NONCE_BYTES: usize = 12;

/// A wrapped key: the key, encrypted, and its tag.
pub const WRAPPED_BYTES: usize = KEY_BYTES + TAG_BYTES;

const SALT: &[u8] = b"holdfast volume key 1";
const WRAP_CONTEXT: &[u8] = b"holdfast wrapped key 1";

/// The secret itself: of a volume, or a key-encrypting key. Overwritten when it is dropped.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; KEY_BYTES]);

impl Secret {
    pub fn new(bytes: [u8; KEY_BYTES]) -> Secret {
        Secret(bytes)
    }

    /// Of a key file: 32 bytes, or 64 hexadecimal digits with white space around.
    pub fn parse(text: &[u8]) -> Option<Secret> {
        if let Ok(bytes) = text.try_into() {
            return Some(Secret(bytes));
        }
        let digits = text.trim_ascii();
        if digits.len() != 2 * KEY_BYTES || !digits.iter().all(u8::is_ascii_hexdigit) {
            return None;
        }
        let mut secret = Secret([0; KEY_BYTES]);
        for (byte, pair) in secret.0.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
        }
        Some(secret)
    }

    fn bytes(&self) -> &[u8; KEY_BYTES] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl Drop for Secret {
    fn drop(&mut self) {
        self.0 = [0; KEY_BYTES];
        // What is not read again may be left out by a compiler that doesn't know better.
        std::hint::black_box(&self.0);
    }
}

/// A length that HKDF is asked for.
struct Length(usize);

impl KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

/// The key of a volume and of those that share its segments, from which all others are made.
#[derive(Clone)]
pub struct VolumeKey {
    root: Prk,
    id: u128,
}

impl fmt::Debug for VolumeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VolumeKey({:032x})", self.id)
    }
}

impl VolumeKey {
    pub fn new(secret: &Secret) -> VolumeKey {
        let root = Salt::new(HKDF_SHA256, SALT).extract(secret.bytes());
        let mut id = [0; 16];
        expand(&root, &[b"id"], &mut id);
        VolumeKey { root, id: u128::from_le_bytes(id) }
    }

    /// Tells keys apart and reveals nothing of them: it stands in the volume's root record.
    pub fn id(&self) -> u128 {
        self.id
    }

    /// For entries of a ledger that one opening of the volume writes.
    pub fn of_ledger(&self, volume: VolumeId, ledger: LedgerId, instance: InstanceId) -> Cipher {
        self.derive(&[
            b"ledger",
            &volume.0.to_le_bytes(),
            &ledger.epoch.0.to_le_bytes(),
            &ledger.n.to_le_bytes(),
            &instance.0.to_le_bytes(),
        ])
    }

    /// For the payload blocks of a segment.
    pub fn of_segment(&self, segment: SegmentId) -> Cipher {
        self.derive(&[
            b"segment",
            &segment.volume.0.to_le_bytes(),
            &segment.epoch.0.to_le_bytes(),
            &segment.counter.to_le_bytes(),
        ])
    }

    /// For fingerprints of content, where this is the key of a sharing domain's store.
    pub fn print_key(&self) -> PrintKey {
        let mut secret = Secret([0; KEY_BYTES]);
        expand(&self.root, &[b"prints"], &mut secret.0);
        PrintKey(secret)
    }

    fn derive(&self, info: &[&[u8]]) -> Cipher {
        let mut secret = Secret([0; KEY_BYTES]);
        expand(&self.root, info, &mut secret.0);
        Cipher::new(&secret)
    }
}

fn expand(root: &Prk, info: &[&[u8]], into: &mut [u8]) {
    let okm = root.expand(info, Length(into.len())).expect("HKDF gives as many bytes as are asked for here");
    okm.fill(into).expect("the length is the one that was asked for");
}

/// The key of one ledger, or of one segment.
pub struct Cipher(LessSafeKey);

impl fmt::Debug for Cipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Cipher(..)")
    }
}

fn nonce_of(position: u64) -> Nonce {
    let mut nonce = [0; NONCE_BYTES];
    nonce[4..].copy_from_slice(&position.to_le_bytes());
    Nonce::assume_unique_for_key(nonce)
}

/// No position has this nonce.
const FINGERPRINT_NONCE: [u8; NONCE_BYTES] = [0xff; NONCE_BYTES];

impl Cipher {
    fn new(secret: &Secret) -> Cipher {
        let key = UnboundKey::new(&AES_256_GCM, secret.bytes()).expect("a key of the cipher's length");
        Cipher(LessSafeKey::new(key))
    }

    fn encrypt(&self, nonce: Nonce, bound: &[u8], bytes: &mut [u8]) -> [u8; TAG_BYTES] {
        let tag = self.0.seal_in_place_separate_tag(nonce, Aad::from(bound), bytes);
        tag.expect("far fewer bytes than the cipher bears").as_ref().try_into().expect("a tag's length")
    }

    /// Encrypts an entry's payload; `bound` is what it is bound to besides its LSN.
    pub fn encrypt_entry(&self, lsn: Lsn, bound: &[u8], payload: &mut [u8]) -> [u8; TAG_BYTES] {
        self.encrypt(nonce_of(lsn.0), bound, payload)
    }

    /// Decrypts an entry's payload; false, and bytes of no meaning, where it is not what was encrypted.
    pub fn decrypt_entry(&self, lsn: Lsn, bound: &[u8], tag: &[u8; TAG_BYTES], payload: &mut [u8]) -> bool {
        let (nonce, bound) = (nonce_of(lsn.0), Aad::from(bound));
        self.0.open_in_place_separate_tag(nonce, bound, Tag::from(*tag), payload, 0..).is_ok()
    }

    /// Encrypts whole blocks, the first of them at `position` of its segment. `checks` gets the head of each one's tag.
    pub fn encrypt_blocks(&self, position: u32, bytes: &mut [u8], checks: &mut Vec<u32>) {
        assert!(bytes.len().is_multiple_of(BLOCK_BYTES), "segments hold whole blocks");
        let blocks = (position..).zip(bytes.chunks_exact_mut(BLOCK_BYTES));
        checks.extend(blocks.map(|(at, block)| self.encrypt_unit(at, block)));
    }

    /// Decrypts whole blocks; false, and bytes of no meaning, where they don't fit the checks, if there are any.
    pub fn decrypt_blocks(&self, position: u32, bytes: &mut [u8], checks: Option<&[u32]>) -> bool {
        assert!(bytes.len().is_multiple_of(BLOCK_BYTES), "segments hold whole blocks");
        (position..).zip(bytes.chunks_exact_mut(BLOCK_BYTES)).enumerate().all(|(i, (at, block))| match checks {
            None => self.decrypt_unit(at, block, None),
            Some(checks) => checks.get(i).is_some_and(|check| self.decrypt_unit(at, block, Some(*check))),
        })
    }

    /// Encrypts a block or less, at `position` of its segment; gives the head of its tag.
    pub fn encrypt_unit(&self, position: u32, bytes: &mut [u8]) -> u32 {
        assert!(bytes.len() <= BLOCK_BYTES, "a unit of {} bytes", bytes.len());
        head_of(&self.encrypt(nonce_of(u64::from(position)), &[], bytes))
    }

    /// Decrypts a block or less; false, and bytes of no meaning, where it does not fit the check, if there is one.
    pub fn decrypt_unit(&self, position: u32, bytes: &mut [u8], check: Option<u32>) -> bool {
        // The key stream is the same in both directions; the tag of this says nothing.
        self.encrypt_unit(position, bytes);
        let Some(check) = check else { return true };
        let mut again = [0; BLOCK_BYTES];
        let again = &mut again[..bytes.len()];
        again.copy_from_slice(bytes);
        self.encrypt_unit(position, again) == check
    }

    /// The same for equal keys, another for others; it tells nothing of the key.
    pub fn fingerprint(&self) -> u128 {
        let mut zeroes = [0; 16];
        self.encrypt(Nonce::assume_unique_for_key(FINGERPRINT_NONCE), b"fingerprint", &mut zeroes);
        u128::from_le_bytes(zeroes)
    }
}

/// What content is fingerprinted with, to find what is alike: who has not the key learns nothing of what is.
#[derive(Clone, PartialEq, Eq)]
pub struct PrintKey(Secret);

impl PrintKey {
    pub fn new(bytes: [u8; KEY_BYTES]) -> PrintKey {
        PrintKey(Secret::new(bytes))
    }

    /// The first half of HMAC-SHA256 (RFC 2104): equal for equal bytes, and for others never seen to be.
    pub fn fingerprint_of(&self, bytes: &[u8]) -> u128 {
        let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, self.0.bytes());
        let tag = ring::hmac::sign(&key, bytes);
        u128::from_le_bytes(tag.as_ref()[..16].try_into().expect("32 bytes"))
    }
}

impl fmt::Debug for PrintKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PrintKey")
    }
}

fn head_of(tag: &[u8; TAG_BYTES]) -> u32 {
    u32::from_le_bytes(tag[..4].try_into().expect("four bytes"))
}

fn wrapping(kek: &Secret, volume: VolumeId) -> (LessSafeKey, Vec<u8>) {
    let key = UnboundKey::new(&AES_256_GCM, kek.bytes()).expect("a key of the cipher's length");
    (LessSafeKey::new(key), [WRAP_CONTEXT, &volume.0.to_le_bytes()].concat())
}

/// A volume's key as it is kept. The nonce must be random: a key-encrypting key wraps many.
pub fn wrap(kek: &Secret, volume: VolumeId, nonce: [u8; NONCE_BYTES], key: &Secret) -> [u8; WRAPPED_BYTES] {
    let (kek, bound) = wrapping(kek, volume);
    let mut bytes = *key.bytes();
    let nonce = Nonce::assume_unique_for_key(nonce);
    let tag = kek.seal_in_place_separate_tag(nonce, Aad::from(bound), &mut bytes).expect("a few bytes");
    let mut wrapped = [0; WRAPPED_BYTES];
    wrapped[..KEY_BYTES].copy_from_slice(&bytes);
    wrapped[KEY_BYTES..].copy_from_slice(tag.as_ref());
    wrapped
}

/// `None` where another key wrapped it, or for another volume, or it is damaged.
pub fn unwrap(kek: &Secret, volume: VolumeId, nonce: [u8; NONCE_BYTES], wrapped: &[u8]) -> Option<Secret> {
    let (kek, bound) = wrapping(kek, volume);
    let (key, tag) = wrapped.split_at_checked(KEY_BYTES)?;
    let mut plain = Secret(key.try_into().ok()?);
    let nonce = Nonce::assume_unique_for_key(nonce);
    kek.open_in_place_separate_tag(nonce, Aad::from(bound), tag.try_into().ok()?, &mut plain.0, 0..).ok()?;
    Some(plain)
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_base::Epoch;

    fn key(n: u8) -> VolumeKey {
        VolumeKey::new(&Secret::new([n; KEY_BYTES]))
    }

    #[test]
    fn every_part_of_an_id_makes_another_key() {
        let ledger = |epoch, n| LedgerId { epoch: Epoch(epoch), n };
        let segment = |volume, epoch, counter| SegmentId { volume: VolumeId(volume), epoch: Epoch(epoch), counter };
        let of_ledger = |key: &VolumeKey, v, l, i| key.of_ledger(VolumeId(v), l, InstanceId(i)).fingerprint();
        let of_segment = |key: &VolumeKey, id| key.of_segment(id).fingerprint();
        let prints = [
            of_ledger(&key(1), 1, ledger(1, 1), 1),
            of_ledger(&key(1), 2, ledger(1, 1), 1),
            of_ledger(&key(1), 1, ledger(2, 1), 1),
            of_ledger(&key(1), 1, ledger(1, 2), 1),
            of_ledger(&key(1), 1, ledger(1, 1), 2),
            of_ledger(&key(2), 1, ledger(1, 1), 1),
            of_segment(&key(1), segment(1, 1, 1)),
            of_segment(&key(1), segment(2, 1, 1)),
            of_segment(&key(1), segment(1, 2, 1)),
            of_segment(&key(1), segment(1, 1, 2)),
            of_segment(&key(2), segment(1, 1, 1)),
        ];
        let distinct: std::collections::BTreeSet<u128> = prints.into_iter().collect();
        assert_eq!(distinct.len(), prints.len());
        assert_eq!(of_segment(&key(1), segment(1, 1, 1)), prints[6]);
    }

    #[test]
    fn fingerprints_are_of_the_key() {
        let print = |n| key(n).print_key().fingerprint_of(b"content");
        assert_eq!(print(1), key(1).print_key().fingerprint_of(b"content"));
        assert_ne!(print(1), print(2));
        // Part of the format: hosts of a domain compare what each has made.
        assert_eq!(print(1), 308_453_777_139_515_553_367_184_703_107_724_383_700);
    }

    #[test]
    fn a_wrapped_key_is_had_with_the_same_key_for_the_same_volume_only() {
        let (kek, secret, nonce) = (Secret::new([7; 32]), Secret::new([9; 32]), [3; NONCE_BYTES]);
        let wrapped = wrap(&kek, VolumeId(5), nonce, &secret);
        assert_eq!(unwrap(&kek, VolumeId(5), nonce, &wrapped), Some(secret));
        assert_eq!(unwrap(&kek, VolumeId(6), nonce, &wrapped), None);
        assert_eq!(unwrap(&Secret::new([8; 32]), VolumeId(5), nonce, &wrapped), None);
        assert_eq!(unwrap(&kek, VolumeId(5), nonce, &wrapped[..40]), None);
        assert_eq!(unwrap(&kek, VolumeId(5), nonce, &[]), None);
    }

    #[test]
    fn secrets_are_not_shown() {
        let secret = Secret::new([0xab; KEY_BYTES]);
        let shown = format!("{secret:?} {:?} {:?}", VolumeKey::new(&secret), key(1).of_segment(SegmentId::default()));
        assert!(!shown.contains("171") && !shown.contains("abab"), "{shown}");
    }
}
