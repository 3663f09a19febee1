//! The root record of a volume in the metadata store: small, changed only by compare-and-swap, and only on changes of
//! ownership, ledger rolls, checkpoints that need it, and by the operator (resize, delete).

use crate::features::{Feature, Features};
use crate::geometry::Layout;
use crate::ledger::LedgerRef;
use crate::record::{Checkpoint, SegmentNo};
use crate::sharing::{Dependent, Origin, STORE_EPOCHS, Store};
use crate::tier::Tiers;
use crate::{FormatError, from_postcard, split_postcard, to_postcard};
use holdfast_base::{Epoch, GridId, InstanceId, KeyWidth, Lsn, VolumeId, crc32c};
use serde::{Deserialize, Serialize};
use std::ops::Bound;

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
    /// The id of the key that the volume and those that share segments with it are encrypted with.
    pub key_id: Option<u128>,
    pub tiers: Tiers,
    /// Stores whose segments this one may name, by rising epochs.
    pub stores: Vec<Store>,
    /// In front of all else in the body: who can't read the rest is to know why.
    #[serde(skip)]
    pub features: Features,
}

/// Numbers of a volume's own segments.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OwnNumbers {
    pub first: SegmentNo,
    /// In front of it; a store's have no end.
    pub end: Option<SegmentNo>,
}

impl OwnNumbers {
    pub fn contains(&self, no: SegmentNo) -> bool {
        no >= self.first && self.end.is_none_or(|end| no < end)
    }

    /// Where they end.
    pub fn bound(&self) -> Bound<SegmentNo> {
        self.end.map_or(Bound::Unbounded, Bound::Excluded)
    }
}

/// Magic number and version in front of the record: "HFRT", 5.
const ROOT_MAGIC: [u8; 4] = *b"HFRT";
pub const ROOT_VERSION: u16 = 5;

/// Before there were features: the record begins behind them, and ends in front of the stores.
const ROOT_VERSION_FEATURELESS: u16 = 4;

/// Before there were tiers: the record ends in front of them.
const ROOT_VERSION_UNTIERED: u16 = 3;

/// Before there was encryption: the record ends in front of the key's id.
const ROOT_VERSION_PLAIN: u16 = 2;

/// Before volumes shared segments: the record ends in front of them.
const ROOT_VERSION_ALONE: u16 = 1;

/// Epoch of a volume whose making was given up: above that of everything that nodes may have of it, or get yet.
pub const GIVEN_UP: Epoch = Epoch(u64::MAX >> 1);

impl Root {
    /// Of a volume that is being made.
    pub fn is_placeholder(&self) -> bool {
        self.deleted && self.epoch == Epoch(0)
    }

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
            stores: Vec::new(),
            features: Features::default(),
        }
    }

    /// The oldest version of the record that says all of this one: hosts of the release that it came with, and of all
    /// later ones, can serve the volume.
    pub fn version(&self) -> u16 {
        if !self.features.is_empty() || !self.stores.is_empty() {
            ROOT_VERSION
        } else if self.tiers != Tiers::default() || self.layout.is_on_devices() {
            ROOT_VERSION_FEATURELESS
        } else if self.key_id.is_some() {
            ROOT_VERSION_UNTIERED
        } else if !self.origins.is_empty() || !self.dependents.is_empty() {
            ROOT_VERSION_PLAIN
        } else {
            ROOT_VERSION_ALONE
        }
    }

    /// Magic, version, checksum of the body, body.
    pub fn encode(&self) -> Vec<u8> {
        let version = self.version();
        let mut body = match version {
            ROOT_VERSION => to_postcard(&self.features),
            _ => Vec::new(),
        };
        body.extend_from_slice(&to_postcard(self));
        body.truncate(body.len() - missing(version).expect("a version of ours").len());
        let mut bytes = Vec::with_capacity(body.len() + 10);
        bytes.extend_from_slice(&ROOT_MAGIC);
        bytes.extend_from_slice(&version.to_le_bytes());
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
        let missing = missing(version).ok_or(FormatError::Version(version))?;
        if header[6..10] != crc32c(body).to_le_bytes() {
            return Err(FormatError::Checksum);
        }
        if version < ROOT_VERSION {
            return from_postcard(&[body, missing].concat());
        }
        let (features, body): (Features, &[u8]) = split_postcard(body)?;
        features.check()?;
        let root = Root { features, ..from_postcard(body)? };
        match root.stores_are_valid() {
            true => Ok(root),
            false => Err(FormatError::Field("stores")),
        }
    }

    /// Refuses lists that no writer makes (bytes from the metadata store, or from a device).
    pub fn stores_are_valid(&self) -> bool {
        let are_apart = self.stores.windows(2).all(|pair| pair[0].last < pair[1].first);
        let are_above = self.stores.iter().all(|store| STORE_EPOCHS <= store.first && store.first <= store.last);
        are_apart && are_above && (self.stores.is_empty() || self.features.has(Feature::Stores))
    }

    /// The volume that a segment with this number belongs to.
    pub fn owner_of(&self, no: SegmentNo) -> VolumeId {
        let store = self.stores.iter().find(|store| (store.first..=store.last).contains(&no.epoch));
        if let Some(store) = store {
            return store.volume;
        }
        self.origins.iter().find(|origin| no.epoch <= origin.upto).map_or(self.volume, |origin| origin.volume)
    }

    /// Whether a segment with this number is a store's that this volume shares content of.
    pub fn is_stores(&self, no: SegmentNo) -> bool {
        !self.is_store() && no.epoch >= STORE_EPOCHS
    }

    /// The lowest number that a segment of the volume itself may have.
    pub fn first_own(&self) -> SegmentNo {
        self.origins.last().map_or_else(SegmentNo::default, |o| SegmentNo { epoch: o.upto.next(), counter: 0 })
    }

    /// Whether it is a store, whose content others share.
    pub fn is_store(&self) -> bool {
        self.epoch >= STORE_EPOCHS
    }

    /// Numbers of segments that are the volume's own: above those of its origins, and below those of stores.
    pub fn own_numbers(&self) -> OwnNumbers {
        let end = SegmentNo { epoch: STORE_EPOCHS, counter: 0 };
        OwnNumbers { first: self.first_own(), end: (!self.is_store()).then_some(end) }
    }

    /// How its keys are divided.
    pub fn key_width(&self) -> KeyWidth {
        match self.features.has(Feature::WideKeys) {
            true => KeyWidth::Wide,
            false => KeyWidth::Narrow,
        }
    }

    /// The ledger that takes appends, if the volume has been served yet.
    pub fn open_ledger(&self) -> Option<&LedgerRef> {
        self.ledgers.last().filter(|l| l.sealed.is_none())
    }
}

/// What a body of that version ends in front of: no lists, no key, no tiers, no stores.
fn missing(version: u16) -> Option<&'static [u8]> {
    match version {
        ROOT_VERSION => Some(&[]),
        ROOT_VERSION_FEATURELESS => Some(&[0; 1]),
        ROOT_VERSION_UNTIERED => Some(&[0; 3]),
        ROOT_VERSION_PLAIN => Some(&[0; 4]),
        ROOT_VERSION_ALONE => Some(&[0; 6]),
        _ => None,
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
    fn a_record_is_written_in_the_oldest_version_that_says_all_of_it() {
        let root = Root::new(GridId(1), VolumeId(2), "vm1", 1 << 30, Layout::DEFAULT);
        let dependent = Dependent { volume: VolumeId(3), upto: SegmentNo::default() };
        let sharing = Root { dependents: vec![dependent], ..root.clone() };
        let sealed = Root { key_id: Some(7), ..sharing.clone() };
        let over_devices = Root { layout: Layout::DeviceMirror { copies: 2 }, ..root.clone() };
        let packed = Root { features: Features::default().with(Feature::Packed), ..root.clone() };
        let wide = Root { features: packed.features.clone().with(Feature::WideKeys), ..root.clone() };
        assert_eq!((packed.key_width(), wide.key_width()), (KeyWidth::Narrow, KeyWidth::Wide));
        for (version, root) in [(1, &root), (2, &sharing), (3, &sealed), (4, &over_devices), (5, &packed)] {
            let bytes = root.encode();
            assert_eq!((bytes[4], root.version()), (version as u8, version));
            assert_eq!(Root::decode(&bytes).as_ref(), Ok(root));
        }
        let mut newer = root.encode();
        newer[4] = ROOT_VERSION as u8 + 1;
        assert_eq!(Root::decode(&newer), Err(FormatError::Version(ROOT_VERSION + 1)));
        let first = FirstTier { layout: Layout::Mirror { copies: 2 }, media: None, size: TierSize::PerMille(100) };
        let tiers = Tiers { first: Some(first), capacity: Some(MediaClass::Hdd) };
        let encrypted = Root { key_id: Some(u128::MAX - 5), tiers, ..root };
        assert_eq!(Root::decode(&encrypted.encode()), Ok(encrypted));
    }

    #[test]
    fn a_feature_that_is_not_known_is_told_whatever_the_rest_of_the_record_says() {
        let root = Root::new(GridId(1), VolumeId(2), "vm1", 1 << 30, Layout::DEFAULT);
        let encoded = |body: &[u8]| {
            let mut bytes = Root { features: Features::default().with(Feature::Heads), ..root.clone() }.encode();
            bytes.truncate(6);
            [&bytes[..], &crc32c(body).to_le_bytes(), body].concat()
        };
        assert_eq!(Root::decode(&encoded(&[1, 77, 0xff])), Err(FormatError::Feature(77)));
        assert_eq!(Root::decode(&encoded(&[2, 3, 1])), Err(FormatError::Field("features")));
        assert_eq!(Root::decode(&encoded(&[1, 3])), Err(FormatError::Field("postcard body")));
        assert!(Root::decode(&encoded(&[])).is_err() && Root::decode(&encoded(&[0xff; 12])).is_err());
        let told = FormatError::Feature(77).to_string();
        assert!(told.starts_with("feature 77 of the format") && told.contains("newer"), "{told}");
    }

    #[test]
    fn stores_are_apart_above_all_others_and_a_feature() {
        let store = |first, last| Store { volume: VolumeId(7), first: Epoch(first), last: Epoch(last) };
        let at = STORE_EPOCHS.0;
        let root = Root::new(GridId(1), VolumeId(2), "vm1", 1 << 30, Layout::DEFAULT);
        let root = Root { features: Features::default().with(Feature::Stores), ..root };
        let with = |stores: &[Store]| Root { stores: stores.to_vec(), ..root.clone() };
        for good in [&[][..], &[store(at, at)], &[store(at, at + 4), store(at + 5, u64::MAX)]] {
            assert_eq!(Root::decode(&with(good).encode()), Ok(with(good)));
        }
        for bad in [&[store(at - 1, at)][..], &[store(at + 1, at)], &[store(at, at + 4), store(at + 4, at + 5)]] {
            assert_eq!(Root::decode(&with(bad).encode()), Err(FormatError::Field("stores")));
        }
        let unsaid = Root { features: Features::default(), ..with(&[store(at, at)]) };
        assert_eq!(Root::decode(&unsaid.encode()), Err(FormatError::Field("stores")));
    }

    #[test]
    fn a_segments_number_tells_whose_it_is() {
        let mut root = Root::new(GridId(1), VolumeId(3), "vm1", 1 << 30, Layout::DEFAULT);
        let no = |epoch| SegmentNo { epoch: Epoch(epoch), counter: 7 };
        assert_eq!(root.owner_of(no(0)), VolumeId(3));
        let origin = |upto, volume| Origin { upto: Epoch(upto), volume: VolumeId(volume) };
        root.origins = vec![origin(4, 1), origin(9, 2)];
        let owners: Vec<u128> = [0, 4, 5, 9, 10].map(|epoch| root.owner_of(no(epoch)).0).to_vec();
        assert_eq!(owners, [1, 1, 2, 2, 3]);
        let store = |first, last, volume| Store { volume: VolumeId(volume), first: Epoch(first), last: Epoch(last) };
        let at = STORE_EPOCHS.0;
        root.stores = vec![store(at, at + 9, 7), store(at + 20, u64::MAX, 8)];
        let owners: Vec<u128> = [4, at - 1, at, at + 9, at + 10, at + 20].map(|e| root.owner_of(no(e)).0).to_vec();
        assert_eq!(owners, [1, 3, 7, 7, 3, 8]);
        assert!(root.first_own() > no(9) && root.first_own() < no(10));
        let own = root.own_numbers();
        assert!(!own.contains(no(9)) && own.contains(no(10)) && own.contains(no(at - 1)) && !own.contains(no(at)));
        let store = Root { epoch: Epoch(at + 3), origins: Vec::new(), stores: Vec::new(), ..root };
        assert!(store.is_store() && store.own_numbers().contains(no(at)));
    }
}
