//! What the owner of a store and those of its members tell each other, so that content is shared.
//!
//! All of it is hints: it may be lost, come twice, or come late, and whoever sends it asks again. What a member does on a
//! hint is right by the map and by numbers of the store's catalogue, not by when it came (protocol rule 28).

use crate::record::{SegmentNo, SharedRun, SharedSegment};
use crate::sharing::{CatalogueNo, STORE_EPOCHS, Store};
use crate::{FormatError, from_postcard, to_postcard};
use holdfast_base::{BlockCrc, VolumeId};
use serde::{Deserialize, Serialize};

/// A keyed fingerprint of a block: equal ones are of equal blocks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct Print(pub u128);

/// What a store tells a member that it names.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Membership {
    pub store: Store,
    /// What blocks are fingerprinted with, where the store is not encrypted.
    pub print_key: [u8; 32],
    pub catalogue: CatalogueNo,
}

/// A segment of a store, whose blocks may be named.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Offer {
    /// The state of the catalogue that it is offered in: who knows a later one takes it no more.
    pub catalogue: CatalogueNo,
    pub shared: SharedSegment,
    /// All of its blocks.
    pub run: SharedRun,
    pub prints: Vec<Print>,
    pub crcs: Vec<BlockCrc>,
}

impl Offer {
    /// A fingerprint and a checksum for each block, all of which lie in the segment.
    pub fn is_valid(&self) -> bool {
        let blocks = self.prints.len();
        self.shared.is_valid()
            && self.crcs.len() == blocks
            && self.run.lies_in(&self.shared.geometry, blocks as u64)
            && self.catalogue.epoch >= STORE_EPOCHS
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Talk {
    // ---- of a member ----
    /// This volume wants to be one.
    Join { member: VolumeId },
    /// What lives in a segment of its own, in its order. Told again until nothing comes of it.
    Report { segment: SegmentNo, prints: Vec<Print> },
    /// What was wanted of one.
    Content {
        segment: SegmentNo,
        prints: Vec<Print>,
        crcs: Vec<BlockCrc>,
        #[serde(with = "whole")]
        blocks: Vec<u8>,
    },
    // ---- of the store ----
    /// The store's root names that member.
    Joined { member: VolumeId, membership: Membership },
    /// The report was heard. Content of it is wanted, and offers follow, so many.
    Heard { segment: SegmentNo, wanted: Vec<Print>, offers: u32 },
    /// Blocks of that segment of the member are in one of the store.
    Take { segment: SegmentNo, offer: Box<Offer> },
    /// The catalogue's newest state.
    Catalogue(CatalogueNo),
    /// How much is named of these is to be told: segments of the store, or of the member's own.
    Count { segments: Vec<SegmentNo> },
    // ---- of a member ----
    /// Blocks that it names of each.
    Counted { blocks: Vec<(SegmentNo, u32)> },
    // ---- of the store ----
    /// What is named of these is to be copied back, since it is little: the store gathers anew what is alike.
    Vacate { segments: Vec<SegmentNo> },
}

/// Bytes in one go: the same on the wire as one by one, and megabytes of them keep no guest waiting.
mod whole {
    use serde::de::{Deserializer, Error, Visitor};
    use serde::ser::Serializer;

    struct Bytes;

    impl Visitor<'_> for Bytes {
        type Value = Vec<u8>;

        fn expecting(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            to.write_str("bytes")
        }

        fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Vec<u8>, E> {
            Ok(bytes.to_vec())
        }
    }

    pub(super) fn serialize<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(bytes)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
        from.deserialize_bytes(Bytes)
    }
}

/// Version byte in front.
const VERSION: u8 = 1;

impl Talk {
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![VERSION];
        bytes.extend_from_slice(&to_postcard(self));
        bytes
    }

    pub fn decode(bytes: &[u8]) -> Result<Talk, FormatError> {
        let (version, body) = bytes.split_first().ok_or(FormatError::Truncated)?;
        if *version != VERSION {
            return Err(FormatError::Version(u16::from(*version)));
        }
        from_postcard(body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::{Geometry, Layout};
    use crate::ledger::Leg;
    use holdfast_base::{DeviceId, Epoch, NodeId};

    #[test]
    fn blocks_lie_in_a_message_as_they_are_behind_their_length() {
        let blocks: Vec<u8> = (0..=255).cycle().take(8192).collect();
        let segment = SegmentNo { epoch: Epoch(4), counter: 9 };
        let talk =
            Talk::Content { segment, prints: vec![Print(1), Print(2)], crcs: vec![3, 4], blocks: blocks.clone() };
        let head = [VERSION, 2, 4, 9, 2, 1, 2, 2, 3, 4, 0x80, 0x40];
        assert_eq!(talk.encode(), [head.as_slice(), &blocks].concat());
    }

    #[test]
    fn what_is_told_reads_back_and_damage_is_seen() {
        let segment = SegmentNo { epoch: Epoch(4), counter: 9 };
        let catalogue = CatalogueNo { epoch: STORE_EPOCHS, counter: 3 };
        let store = Store { volume: VolumeId(7), first: STORE_EPOCHS, last: Epoch(u64::MAX) };
        let shared =
            SharedSegment { segment, geometry: Geometry::new(Layout::DEFAULT, 32), homes: Vec::new(), units: None };
        let prints = vec![Print(u128::MAX), Print(0)];
        let run = SharedRun::Plain { block: 5 };
        let offer = Offer { catalogue, shared, run, prints: prints.clone(), crcs: vec![1, 2] };
        for talk in [
            Talk::Join { member: VolumeId(3) },
            Talk::Report { segment, prints: prints.clone() },
            Talk::Content { segment, prints, crcs: vec![1, 2], blocks: vec![7; 8192] },
            Talk::Joined { member: VolumeId(3), membership: Membership { store, print_key: [9; 32], catalogue } },
            Talk::Heard { segment, wanted: vec![Print(4)], offers: 3 },
            Talk::Take { segment, offer: Box::new(offer) },
            Talk::Catalogue(catalogue),
            Talk::Count { segments: vec![segment] },
            Talk::Counted { blocks: vec![(segment, 7)] },
            Talk::Vacate { segments: vec![segment, segment] },
        ] {
            let bytes = talk.encode();
            assert_eq!(Talk::decode(&bytes), Ok(talk));
            assert!(Talk::decode(&bytes[..bytes.len() - 1]).is_err());
        }
        let homes = [1, 2].map(|n| Leg { node: NodeId(n), device: DeviceId(1) }).to_vec();
        let geometry = Geometry::new(Layout::Mirror { copies: 2 }, 32);
        let shared =
            SharedSegment { segment: SegmentNo { epoch: STORE_EPOCHS, counter: 9 }, geometry, homes, units: None };
        let good = Offer {
            catalogue,
            shared,
            run: SharedRun::Plain { block: 30 },
            prints: vec![Print(4), Print(5)],
            crcs: vec![1, 2],
        };
        assert!(good.is_valid());
        assert!(!Offer { crcs: vec![1], ..good.clone() }.is_valid());
        assert!(!Offer { run: SharedRun::Plain { block: 31 }, ..good.clone() }.is_valid());
        assert!(!Offer { run: SharedRun::Plain { block: u32::MAX }, ..good.clone() }.is_valid());
        let own = SharedSegment { segment, ..good.shared.clone() };
        assert!(!Offer { shared: own, ..good }.is_valid());
        assert_eq!(Talk::decode(&[]), Err(FormatError::Truncated));
        assert_eq!(Talk::decode(&[2, 0]), Err(FormatError::Version(2)));
    }
}
