//! The root record of a volume in the metadata store: small, changed only by compare-and-swap, and only on changes of
//! ownership, ledger rolls, checkpoints that need it, and by the operator (resize, delete).

use crate::geometry::Layout;
use crate::ledger::LedgerRef;
use crate::record::Checkpoint;
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
}

/// Magic number and version in front of the record: "HFRT", 1.
const ROOT_MAGIC: [u8; 4] = *b"HFRT";
const ROOT_VERSION: u16 = 1;

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
        if version != ROOT_VERSION {
            return Err(FormatError::Version(version));
        }
        if header[6..10] != crc32c(body).to_le_bytes() {
            return Err(FormatError::Checksum);
        }
        from_postcard(body)
    }

    /// The ledger that takes appends, if the volume has been served yet.
    pub fn open_ledger(&self) -> Option<&LedgerRef> {
        self.ledgers.last().filter(|l| l.sealed.is_none())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
