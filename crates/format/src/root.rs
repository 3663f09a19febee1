//! The root record of a volume in the metadata store: small, changed only by compare-and-swap, and only on changes of
//! ownership, ledger rolls, checkpoints that need it, and by the operator (resize, delete).

use crate::family::{Dependent, Origin};
use crate::geometry::Layout;
use crate::ledger::LedgerRef;
use crate::record::{Checkpoint, SegmentNo};
use crate::tier::Tiers;
use crate::{FormatError, from_postcard, to_postcard};
use holdfast_base::{Epoch, GridId, InstanceId, Lsn, VolumeId, crc32c};
use serde::{Deserialize, Serialize};

/// Key of a volume's root record.
pub fn root_key(volume: VolumeId) -> String {
    format!("volume/{volume}/root")
}

/// Prefix of all volumes' keys.
pub const ROOT_PREFIX: &str = "volume/";

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Root {
    pub grid: GridId,
    pub volume: VolumeId,
    pub name: String,
    pub size_bytes: u64,
    pub layout: Layout,
    /// Epoch of the last opening; no two openings share one.
    pub epoch: Epoch,
    /// The opening that holds `epoch`: the nonce of its swaps (protocol rule 4).
    pub instance: InstanceId,
    /// Name of the host that opened it, for people.
    pub owner: String,
    /// The opening whose ledger is the open one: an owner that has not yet finished its take-over serves nothing.
    pub serving: InstanceId,
    /// Ledgers that recovery reads, oldest first; at most one is unsealed, and it is the last.
    pub ledgers: Vec<LedgerRef>,
    /// A checkpoint to start from; a newer one may be named by a record in the log.
    pub checkpoint: Checkpoint,
    /// Log entries up to here are needed no more, whatever legs and ledgers still hold.
    pub trimmed: Lsn,
    /// Set when the operator deleted the volume: nobody opens it again, its space is being returned.
    pub deleted: bool,
    /// Volumes whose segments this one names besides its own, by rising epochs.
    pub origins: Vec<Origin>,
    /// Volumes that may name segments of this one, or of its origins.
    pub dependents: Vec<Dependent>,
    /// The id of the key that the volume and its family are encrypted with.
    pub key_id: Option<u128>,
    pub tiers: Tiers,
}

/// Magic number and version in front of the record: "HFRT", 4.
const ROOT_MAGIC: [u8; 4] = *b"HFRT";
const ROOT_VERSION: u16 = 4;

/// Before there were tiers: the record ends in front of them.
const ROOT_VERSION_UNTIERED: u16 = 3;

/// Before there was encryption: the record ends in front of the key's id.
const ROOT_VERSION_PLAIN: u16 = 2;

/// Before there were families: the record ends in front of them.
const ROOT_VERSION_ALONE: u16 = 1;

impl Root {
    /// A new, empty volume that nobody has opened.
    pub fn new(grid: GridId, volume: VolumeId, name: &str, size_bytes: u64, layout: Layout) -> Root {
        Root {
            grid,
            volume,
            name: name.to_string(),
            size_bytes,
            layout,
            epoch: Epoch(0),
            instance: InstanceId(0),
            owner: String::new(),
            serving: InstanceId(0),
            ledgers: Vec::new(),
            checkpoint: Checkpoint::default(),
            trimmed: Lsn::ZERO,
            deleted: false,
            origins: Vec::new(),
            dependents: Vec::new(),
            key_id: None,
            tiers: Tiers::default(),
        }
    }

    /// Magic, version, checksum of the body, body.
    pub fn encode(&self) -> Vec<u8> {
        let body = to_postcard(self);
        let mut bytes = Vec::with_capacity(body.len() + 10);
        bytes.extend_from_slice(&ROOT_MAGIC);
        bytes.extend_from_slice(&ROOT_VERSION.to_le_bytes());
        bytes.extend_from_slice(&crc32c(&body).to_le_bytes());
        bytes.extend_from_slice(&body);
        bytes
    }

    pub fn decode(bytes: &[u8]) -> Result<Root, FormatError> {
        let (header, body) = bytes.split_at_checked(10).ok_or(FormatError::Truncated)?;
        if header[..4] != ROOT_MAGIC {
            return Err(FormatError::Magic);
        }
        let version = u16::from_le_bytes([header[4], header[5]]);
        // No lists, no key, no tiers.
        let missing: &[u8] = match version {
            ROOT_VERSION => &[],
            ROOT_VERSION_UNTIERED => &[0; 2],
            ROOT_VERSION_PLAIN => &[0; 3],
            ROOT_VERSION_ALONE => &[0; 5],
            _ => return Err(FormatError::Version(version)),
        };
        if header[6..10] != crc32c(body).to_le_bytes() {
            return Err(FormatError::Checksum);
        }
        from_postcard(&[body, missing].concat())
    }

    /// The volume that a segment with this number belongs to.
    pub fn volume_of(&self, no: SegmentNo) -> VolumeId {
        self.origins.iter().find(|origin| no.epoch <= origin.upto).map_or(self.volume, |origin| origin.volume)
    }

    /// The lowest number that a segment of the volume itself may have.
    pub fn first_own(&self) -> SegmentNo {
        self.origins.last().map_or_else(SegmentNo::default, |o| SegmentNo { epoch: o.upto.next(), counter: 0 })
    }

    /// The ledger that takes appends, if the volume has been served yet.
    pub fn open_ledger(&self) -> Option<&LedgerRef> {
        self.ledgers.last().filter(|l| l.sealed.is_none())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tier::{FirstTier, TierSize};
    use holdfast_base::MediaClass;

    #[test]
    fn a_root_reads_back_and_damage_is_seen() {
        let root = Root::new(GridId(1), VolumeId(2), "vm1", 1 << 30, Layout::DEFAULT);
        let mut bytes = root.encode();
        assert_eq!(Root::decode(&bytes), Ok(root));
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        assert_eq!(Root::decode(&bytes), Err(FormatError::Checksum));
        assert_eq!(Root::decode(&bytes[..5]), Err(FormatError::Truncated));
    }

    #[test]
    fn a_record_from_before_families_encryption_or_tiers_reads_as_one_without() {
        let root = Root::new(GridId(1), VolumeId(2), "vm1", 1 << 30, Layout::DEFAULT);
        for (version, missing_bytes) in [(1, 5), (2, 3), (3, 2)] {
            let mut bytes = root.encode();
            bytes.truncate(bytes.len() - missing_bytes);
            bytes[4] = version;
            let crc = crc32c(&bytes[10..]);
            bytes[6..10].copy_from_slice(&crc.to_le_bytes());
            assert_eq!(Root::decode(&bytes), Ok(root.clone()));
        }
        let first = FirstTier { layout: Layout::Mirror { copies: 2 }, media: None, size: TierSize::PerMille(100) };
        let tiers = Tiers { first: Some(first), capacity: Some(MediaClass::Hdd) };
        let encrypted = Root { key_id: Some(u128::MAX - 5), tiers, ..root };
        assert_eq!(Root::decode(&encrypted.encode()), Ok(encrypted));
    }

    #[test]
    fn a_segments_number_tells_whose_it_is() {
        let mut root = Root::new(GridId(1), VolumeId(3), "vm1", 1 << 30, Layout::DEFAULT);
        let no = |epoch| SegmentNo { epoch: Epoch(epoch), counter: 7 };
        assert_eq!(root.volume_of(no(0)), VolumeId(3));
        let origin = |upto, volume| Origin { upto: Epoch(upto), volume: VolumeId(volume) };
        root.origins = vec![origin(4, 1), origin(9, 2)];
        let owners: Vec<u128> = [0, 4, 5, 9, 10].map(|epoch| root.volume_of(no(epoch)).0).to_vec();
        assert_eq!(owners, [1, 1, 2, 2, 3]);
        assert!(root.first_own() > no(9) && root.first_own() < no(10));
    }
}
