//! Encryption at rest: what leaves the controller of an encrypted volume is encrypted, what comes back is opened.
//!
//! Role: called where entries go to legs and come back in recovery, and where payload goes into segments and is
//! fetched. Memory holds plaintext; what is encrypted is made from it anew for each ledger and each segment, so that
//! nodes, repair and moves see ciphertext only, and nothing that was encrypted for one place is ever put into another.
//!
//! Invariants
//! 1. A key and a position seal one plaintext (protocol rule 21). An entry's key is that of its ledger *and* of this
//!    opening, its position the LSN: a hedge sends the same bytes again, an entry that goes to another ledger is
//!    encrypted anew, and an opening that was undone shares no key with the next one of the same epoch. A segment's key
//!    is that of its id, which each attempt at writing it takes anew.
//! 2. Where the volume has a key, data without a seal is not accepted, neither from a leg nor from a shard.
//! 3. What others have written is opened with their key: an origin's is the volume's own, the store's of a sharing
//!    domain another.
//!
//! Not encrypted: records without payload (what was written where, discards, commits), leaves of the map, checkpoints.
//!
//! Faults: an entry that does not open counts as damaged on its leg, a block that does not open as a damaged shard.

use crate::api::Config;
use crate::log::window::Entry;
use crate::map::Crcs;
use crate::segment::fetch::verifies;
use crate::segment::units::{PackedPayload, Units};
use holdfast_base::{BlockCrc, Buf, BufMut, InstanceId, LedgerId, Lsn, SegmentId, block_crcs, crc32c};
use holdfast_cipher::{Cipher, VolumeKey};
use holdfast_format::packing::{BLOCK_GRANULES, GRANULE_BYTES, StoredLength, Unit};
use holdfast_format::record::SealedHeader;
use holdfast_format::wire::LogEntry;

/// An entry as a ledger's legs get it.
#[derive(Clone, Debug)]
pub struct Sent {
    ledger: LedgerId,
    pub(crate) header: Vec<u8>,
    pub(crate) payload: Buf,
    pub(crate) crcs: Vec<BlockCrc>,
}

/// That something was encrypted, for the check that no key and position ever encrypt two plaintexts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Encryption {
    /// Equal for equal keys.
    pub key: u128,
    pub position: u64,
    /// Of the plaintext, and of what else is bound to it.
    pub digest: (u32, u32),
}

/// Payload of a segment as its shards hold it.
pub(crate) struct EncryptedPayload {
    pub(crate) payload: Vec<Buf>,
    pub(crate) crcs: Vec<BlockCrc>,
    /// The heads of the blocks' tags, instead of checksums.
    pub(crate) checks: Vec<BlockCrc>,
}

fn ledger_cipher(config: &Config, key: &VolumeKey, ledger: LedgerId, instance: InstanceId) -> Cipher {
    if config.mutations.one_key_for_all_ledgers() {
        return key.of_ledger(config.volume, LedgerId::default(), InstanceId::default());
    }
    key.of_ledger(config.volume, ledger, instance)
}

/// What a segment is encrypted with: one of the store of the sharing domain is with that one's key.
/// `None` where nothing is encrypted.
fn segment_cipher(config: &Config, id: SegmentId) -> Option<Cipher> {
    let of_store = config.store_key.as_ref().filter(|(store, _)| *store == id.volume);
    let key = of_store.map(|(_, key)| key).or(config.key.as_ref())?;
    let one_for_all = config.mutations.one_key_for_all_segments();
    Some(key.of_segment(if one_for_all { SegmentId::default() } else { id }))
}

fn writable(bytes: &[u8]) -> BufMut {
    let mut copy = BufMut::new(bytes.len());
    copy.copy_from_slice(bytes);
    copy
}

/// An entry that a leg gave back, as it was before it was encrypted; `None` where it is not what was encrypted.
pub(crate) fn opened_entry(
    config: &Config,
    ledger: LedgerId,
    entry: LogEntry,
    payload: Buf,
) -> Option<(LogEntry, Buf)> {
    let Some(key) = &config.key else { return Some((entry, payload)) };
    if payload.is_empty() || config.mutations.log_in_plain() {
        return Some((entry, payload));
    }
    let header = SealedHeader::decode(&entry.header)?;
    let cipher = ledger_cipher(config, key, ledger, header.instance);
    let mut bytes = writable(&payload);
    if !cipher.decrypt_entry(entry.lsn, header.record, &header.tag, &mut bytes) {
        return None;
    }
    let (payload, record) = (bytes.freeze(), header.record.to_vec());
    Some((LogEntry { header: record, crcs: block_crcs(&payload), ..entry }, payload))
}

impl Sent {
    /// An entry as it goes to the legs of its ledger. It is encrypted there; what was encrypted is noted in
    /// `encryptions` where [`Config::notes_encryptions`] asks for that.
    pub(crate) fn of(config: &Config, lsn: Lsn, entry: &Entry, encryptions: &mut Vec<Encryption>) -> Sent {
        let is_encrypted = !entry.payload.is_empty() && !config.mutations.log_in_plain();
        let Some(key) = config.key.as_ref().filter(|_| is_encrypted) else { return as_it_is(entry) };
        let (ledger, instance) = (entry.ledger, config.instance);
        let cipher = ledger_cipher(config, key, ledger, instance);
        let mut bytes = writable(&entry.payload);
        let tag = cipher.encrypt_entry(lsn, &entry.header, &mut bytes);
        if config.notes_encryptions {
            let digest = (crc32c(&entry.payload), crc32c(&entry.header));
            encryptions.push(Encryption { key: cipher.fingerprint(), position: lsn.0, digest });
        }
        let header = SealedHeader { instance, tag, record: &entry.header }.encode();
        let payload = bytes.freeze();
        Sent { ledger, header, crcs: block_crcs(&payload), payload }
    }

    /// Whether it is encrypted for that ledger.
    pub(crate) fn is_for(&self, ledger: LedgerId) -> bool {
        self.ledger == ledger
    }
}

/// Payload for the shards of a segment of this id; `None` where the volume has no key.
pub(crate) fn encrypt_payload(
    config: &Config,
    id: SegmentId,
    payload: &[Buf],
    encryptions: &mut Vec<Encryption>,
) -> Option<EncryptedPayload> {
    let cipher = segment_cipher(config, id)?;
    let blocks = payload.iter().map(|bytes| bytes.len() / holdfast_base::BLOCK_BYTES).sum();
    let mut encrypted = EncryptedPayload {
        payload: Vec::with_capacity(payload.len()),
        crcs: Vec::with_capacity(blocks),
        checks: Vec::with_capacity(blocks),
    };
    for piece in payload {
        let position = encrypted.checks.len() as u32;
        if config.notes_encryptions {
            let key = cipher.fingerprint();
            let plain = block_crcs(piece).into_iter().zip(u64::from(position)..);
            encryptions.extend(plain.map(|(crc, position)| Encryption { key, position, digest: (crc, 0) }));
        }
        let mut bytes = writable(piece);
        cipher.encrypt_blocks(position, &mut bytes, &mut encrypted.checks);
        encrypted.crcs.extend(block_crcs(&bytes));
        encrypted.payload.push(bytes.freeze());
    }
    Some(encrypted)
}

/// The same of units, which lie in the payload: those of its granules. What is between them stays zero.
pub(crate) fn encrypt_units(
    config: &Config,
    id: SegmentId,
    packed: &PackedPayload,
    encryptions: &mut Vec<Encryption>,
) -> Option<(Buf, Vec<BlockCrc>)> {
    let cipher = segment_cipher(config, id)?;
    let mut bytes = writable(&packed.bytes);
    let mut checks = Vec::with_capacity(packed.lengths.len() as usize);
    for unit in packed.lengths.units_after(0) {
        let own = &mut bytes[unit.start as usize * GRANULE_BYTES..unit.end() as usize * GRANULE_BYTES];
        let position = position_of(config, unit.start, unit.length);
        if config.notes_encryptions {
            let (key, digest) = (cipher.fingerprint(), (crc32c(own), 0));
            encryptions.push(Encryption { key, position: position.into(), digest });
        }
        checks.push(cipher.encrypt_unit(position, own));
    }
    Some((bytes.freeze(), checks))
}

/// Of the nonce of a unit that starts at this granule of the payload. Unpacked segments count blocks: here nothing does.
fn position_of(config: &Config, start: u32, length: StoredLength) -> u32 {
    let by_block = config.mutations.raw_units_by_block() && length == StoredLength::RAW;
    if by_block { start / BLOCK_GRANULES } else { start }
}

/// What is wanted of a packed segment's blocks, from `block` on: the blocks that units are, or these as they lie.
pub(crate) fn open_units(
    config: &Config,
    id: SegmentId,
    block: u32,
    units: &Units,
    stored: &[u8],
    checks: Option<&Crcs>,
    as_they_lie: bool,
) -> Option<Buf> {
    let Some(cipher) = segment_cipher(config, id) else {
        let bytes = units.taken_from(stored)?;
        let blocks = units.opened(&bytes, false).filter(|blocks| verifies(blocks, checks))?;
        return Some(if as_they_lie { bytes } else { blocks });
    };
    let position = |unit: Unit| position_of(config, block * BLOCK_GRANULES + unit.start, unit.length);
    let bytes = units.decrypted(&cipher, position, stored, checks.map(Crcs::as_slice))?;
    let blocks = units.opened(&bytes, true)?;
    Some(if as_they_lie { bytes } else { blocks })
}

/// Blocks of a segment, checked and decrypted; `None` where they are not what was written.
pub(crate) fn decrypt_blocks(
    config: &Config,
    id: SegmentId,
    block: u32,
    bytes: Buf,
    checks: Option<&Crcs>,
) -> Option<Buf> {
    let Some(cipher) = segment_cipher(config, id) else { return verifies(&bytes, checks).then_some(bytes) };
    let mut plain = writable(&bytes);
    let checks = checks.map(Crcs::as_slice);
    cipher.decrypt_blocks(block, &mut plain, checks).then(|| plain.freeze())
}

fn as_it_is(entry: &Entry) -> Sent {
    Sent {
        ledger: entry.ledger,
        header: entry.header.clone(),
        payload: entry.payload.clone(),
        crcs: entry.crcs.to_vec(),
    }
}
