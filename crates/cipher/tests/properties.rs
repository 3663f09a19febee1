//! What is encrypted is had again, and only where and as it was encrypted.

use holdfast_base::{BLOCK_BYTES, Epoch, InstanceId, LedgerId, Lsn, SegmentId, VolumeId};
use holdfast_cipher::{KEY_BYTES, Secret, VolumeKey};
use proptest::prelude::*;

fn key(n: u8) -> VolumeKey {
    VolumeKey::new(&Secret::new([n; KEY_BYTES]))
}

fn segment(counter: u64) -> SegmentId {
    SegmentId { volume: VolumeId(1), epoch: Epoch(2), counter }
}

fn blocks(count: usize, seed: u8) -> Vec<u8> {
    (0..count * BLOCK_BYTES).map(|i| (i / 7) as u8 ^ seed).collect()
}

proptest! {
    #[test]
    fn blocks_open_from_any_place_of_their_run(count in 1_usize..9, first in 0_u32..5000, seed: u8, from in 0_usize..9) {
        let plain = blocks(count, seed);
        let cipher = key(1).of_segment(segment(3));
        let (mut encrypted, mut checks) = (plain.clone(), Vec::new());
        cipher.encrypt_blocks(first, &mut encrypted, &mut checks);
        prop_assert_eq!(checks.len(), count);
        prop_assert!(encrypted.chunks(16).zip(plain.chunks(16)).all(|(a, b)| a != b));
        let from = from % count;
        let mut part = encrypted[from * BLOCK_BYTES..].to_vec();
        prop_assert!(cipher.decrypt_blocks(first + from as u32, &mut part, Some(&checks[from..])));
        prop_assert_eq!(&part, &plain[from * BLOCK_BYTES..]);
        let mut unchecked = encrypted.clone();
        prop_assert!(cipher.decrypt_blocks(first, &mut unchecked, None));
        prop_assert_eq!(unchecked, plain);
    }

    #[test]
    fn what_was_changed_or_moved_is_refused(seed: u8, at in 0..BLOCK_BYTES, bit in 0_u8..8) {
        let cipher = key(1).of_segment(segment(3));
        let (mut encrypted, mut checks) = (blocks(1, seed), Vec::new());
        cipher.encrypt_blocks(10, &mut encrypted, &mut checks);
        let opens = |cipher: &holdfast_cipher::Cipher, position, bytes: &[u8]| {
            cipher.decrypt_blocks(position, &mut bytes.to_vec(), Some(&checks))
        };
        prop_assert!(opens(&cipher, 10, &encrypted));
        prop_assert!(!opens(&cipher, 11, &encrypted));
        prop_assert!(!opens(&key(1).of_segment(segment(4)), 10, &encrypted));
        prop_assert!(!opens(&key(2).of_segment(segment(3)), 10, &encrypted));
        encrypted[at] ^= 1 << bit;
        prop_assert!(!opens(&cipher, 10, &encrypted));
    }

    #[test]
    fn an_entry_is_bound_to_its_ledger_opening_lsn_and_record(seed: u8, lsn: u64, at in 0..BLOCK_BYTES) {
        let ledger = LedgerId { epoch: Epoch(4), n: 1 };
        let cipher = |n, instance| key(1).of_ledger(VolumeId(1), LedgerId { n, ..ledger }, InstanceId(instance));
        let plain = blocks(1, seed);
        let mut encrypted = plain.clone();
        let tag = cipher(1, 1).encrypt_entry(Lsn(lsn), b"record", &mut encrypted);
        let opens = |cipher: holdfast_cipher::Cipher, lsn, record: &[u8], bytes: &[u8]| {
            let mut bytes = bytes.to_vec();
            cipher.decrypt_entry(Lsn(lsn), record, &tag, &mut bytes).then_some(bytes)
        };
        prop_assert_eq!(opens(cipher(1, 1), lsn, b"record", &encrypted), Some(plain));
        prop_assert_eq!(opens(cipher(1, 1), lsn ^ 1, b"record", &encrypted), None);
        prop_assert_eq!(opens(cipher(1, 1), lsn, b"other", &encrypted), None);
        prop_assert_eq!(opens(cipher(2, 1), lsn, b"record", &encrypted), None);
        prop_assert_eq!(opens(cipher(1, 2), lsn, b"record", &encrypted), None);
        encrypted[at] ^= 1;
        prop_assert_eq!(opens(cipher(1, 1), lsn, b"record", &encrypted), None);
    }
}
