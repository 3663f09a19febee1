//! Keys and ciphertext as they are on disk: these vectors never change.
//!
//! They were made by another implementation: HKDF, AES and GCM written out after RFC 5869, FIPS 197 and SP 800-38D, which
//! gives these documents' own test vectors.

use holdfast_base::{BLOCK_BYTES, Epoch, InstanceId, LedgerId, Lsn, SegmentId, VolumeId};
use holdfast_cipher::{Secret, VolumeKey, unwrap, wrap};

const VOLUME: VolumeId = VolumeId(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10);
const KEY_ID: u128 = 235651389475994300587641058516578646849;

fn secret() -> Secret {
    Secret::new(std::array::from_fn(|i| i as u8 + 1))
}

fn block() -> Vec<u8> {
    (0..BLOCK_BYTES).map(|i| (i * 7 + 3) as u8).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[test]
fn blocks_of_a_segment() {
    let key = VolumeKey::new(&secret());
    assert_eq!(key.id(), KEY_ID);
    let cipher = key.of_segment(SegmentId { volume: VOLUME, epoch: Epoch(7), counter: 9 });
    for (position, head, tail, check) in [
        (
            0,
            "9bacda490609cc272f03c76ed5381b3108acb15a1905d595b83befb2e0713f81",
            "be13996e80947b9887be41c03485cfec",
            2_858_194_748,
        ),
        (
            300,
            "b54fcb35918cd1fb72047584becad43f6e459834a154e08dcabc9de842905332",
            "63e2d72354204ed4d1ebcc41017a08bc",
            4_026_786_787,
        ),
    ] {
        let (mut bytes, mut checks) = (block(), Vec::new());
        cipher.encrypt_blocks(position, &mut bytes, &mut checks);
        assert_eq!((hex(&bytes[..32]).as_str(), hex(&bytes[BLOCK_BYTES - 16..]).as_str()), (head, tail));
        assert_eq!(checks, [check]);
        assert!(cipher.decrypt_blocks(position, &mut bytes, Some(&[check])));
        assert_eq!(bytes, block());
    }
}

#[test]
fn a_unit_of_a_packed_segment() {
    let cipher = VolumeKey::new(&secret()).of_segment(SegmentId { volume: VOLUME, epoch: Epoch(7), counter: 9 });
    let mut bytes = block()[..192].to_vec();
    let check = cipher.encrypt_unit(300, &mut bytes);
    assert_eq!(hex(&bytes[..32]), "b54fcb35918cd1fb72047584becad43f6e459834a154e08dcabc9de842905332");
    assert_eq!((hex(&bytes[176..]).as_str(), check), ("6e706e87fed84c6be946cfe3171f05a1", 4_099_583_101));
    assert!(
        !cipher.decrypt_unit(301, &mut bytes.clone(), Some(check)) && cipher.decrypt_unit(300, &mut bytes, Some(check))
    );
    assert_eq!(bytes, block()[..192]);
}

#[test]
fn an_entry_of_a_ledger() {
    let ledger = LedgerId { epoch: Epoch(7), n: 2 };
    let cipher = VolumeKey::new(&secret()).of_ledger(VOLUME, ledger, InstanceId(0xab_cdef));
    let mut bytes = block();
    let tag = cipher.encrypt_entry(Lsn(123_456_789), b"record", &mut bytes);
    assert_eq!(hex(&bytes[..32]), "68a366526b9fd3c0c2276602f01fc43f11842ad01a951d5577a52b2432cf741c");
    assert_eq!(hex(&bytes[BLOCK_BYTES - 16..]), "8ec68ef655b98bc4072f1b3a4bea60e7");
    assert_eq!(hex(&tag), "a0b333191784ed49a2fb310727715946");
    assert!(cipher.decrypt_entry(Lsn(123_456_789), b"record", &tag, &mut bytes));
    assert_eq!(bytes, block());
}

#[test]
fn a_wrapped_key() {
    let (kek, nonce) = (Secret::new(std::array::from_fn(|i| i as u8 + 200)), std::array::from_fn(|i| i as u8));
    let wrapped = wrap(&kek, VOLUME, nonce, &secret());
    let golden = "d9237ced069d43c4dfe83db556e4df99c4a818d9f9e7ac451821b7d51b964d411e4b450bf1a86f6ff95508e814dfd3d7";
    assert_eq!(hex(&wrapped), golden);
    assert_eq!(unwrap(&kek, VOLUME, nonce, &wrapped), Some(secret()));
}
