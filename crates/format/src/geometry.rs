//! Layouts and the geometry of a segment: which block lies where in which shard.
//!
//! One construction: `copies` over an outer domain times a systematic `data + parity` code over an inner one. A mirror is
//! copies of a 1+0 code, plain parity is one copy of a k+m code; nested layouts are two copies of either.
//! Source: DESIGN's table of layouts; docs/FORMAT.md "Segment".

use crate::ledger::LEGS_MAX;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Most shards that a code may have (k + m).
pub const CODE_WIDTH_MAX: u8 = 16;

/// Blocks of one data shard that follow each other in the volume before the next shard's turn comes: 64 KiB, so that a
/// guest's 64 KiB read is one shard's work and a 1 MiB read is spread.
pub const STRIPE_BLOCKS: u32 = 16;

/// A volume's choice of redundancy.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Layout {
    Mirror {
        copies: u8,
    },
    Parity {
        data: u8,
        parity: u8,
    },
    /// Two copies in each of two fault domains, on devices of their own.
    NestedMirror,
    /// In each of two fault domains a copy that is coded over devices of their own.
    NestedParity {
        data: u8,
        parity: u8,
    },
    /// Copies on different devices, whichever nodes these are in: fault domains are devices.
    DeviceMirror {
        copies: u8,
    },
    /// Coded over different devices, whichever nodes these are in.
    DeviceParity {
        data: u8,
        parity: u8,
    },
}

impl Layout {
    pub const DEFAULT: Layout = Layout::Parity { data: 2, parity: 1 };

    /// Fault domains that may be lost without losing data.
    pub fn failures(self) -> u8 {
        match self {
            Layout::Mirror { copies } | Layout::DeviceMirror { copies } => copies - 1,
            Layout::Parity { parity, .. } | Layout::DeviceParity { parity, .. } => parity,
            // And at the same time a device of the other.
            Layout::NestedMirror | Layout::NestedParity { .. } => 1,
        }
    }

    /// Whether its fault domains are devices: a node may hold several shards of a segment.
    pub fn is_on_devices(self) -> bool {
        matches!(self, Layout::DeviceMirror { .. } | Layout::DeviceParity { .. })
    }

    /// The layout over nodes whose segments have the same shape. A segment does not record what its fault domains are:
    /// where its shards may lie follows from the volume's layout of today.
    pub fn shape(self) -> Layout {
        match self {
            Layout::DeviceMirror { copies } => Layout::Mirror { copies },
            Layout::DeviceParity { data, parity } => Layout::Parity { data, parity },
            over_nodes => over_nodes,
        }
    }

    /// Whether it is coded over devices inside fault domains, too.
    pub fn is_nested(self) -> bool {
        self.shards_a_domain() > 1
    }

    /// Shards of a segment in each of its fault domains, on different devices there.
    pub fn shards_a_domain(self) -> u8 {
        match self.shape() {
            Layout::NestedMirror => 2,
            Layout::NestedParity { data, parity } => data + parity,
            _ => 1,
        }
    }

    /// All shards of a segment.
    pub fn shard_count(self) -> u8 {
        self.width() * self.shards_a_domain()
    }

    /// Fault domains that one segment occupies.
    pub fn width(self) -> u8 {
        match self {
            Layout::Mirror { copies } | Layout::DeviceMirror { copies } => copies,
            Layout::Parity { data, parity } | Layout::DeviceParity { data, parity } => data + parity,
            Layout::NestedMirror | Layout::NestedParity { .. } => 2,
        }
    }

    /// Payload is divided by this.
    pub fn data_shards(self) -> u8 {
        match self {
            Layout::Mirror { .. } | Layout::NestedMirror | Layout::DeviceMirror { .. } => 1,
            Layout::Parity { data, .. } | Layout::NestedParity { data, .. } | Layout::DeviceParity { data, .. } => data,
        }
    }

    /// What to write while only `domains` fault domains are usable: the layout itself where it fits, else the widest
    /// mirror that keeps as much of its tolerance as the survivors allow. `None` with no domain at all.
    pub fn adapted_to(self, domains: usize) -> Option<Layout> {
        if domains >= usize::from(self.width()) {
            return Some(self);
        }
        let copies = usize::from(self.failures() + 1).min(domains);
        (copies > 0).then_some(Layout::Mirror { copies: copies as u8 })
    }

    /// What guests see of what devices hold, in 1/1000: 666 for `parity:2+1`.
    pub fn efficiency_per_mille(self) -> u32 {
        u32::from(self.data_shards()) * 1000 / u32::from(self.shard_count())
    }
}

/// Behind the name of a layout whose fault domains are devices.
const ON_DEVICES: &str = "@device";

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Layout::Mirror { copies } => write!(f, "mirror:{copies}"),
            Layout::Parity { data, parity } => write!(f, "parity:{data}+{parity}"),
            Layout::NestedMirror => f.write_str("nested-mirror"),
            Layout::NestedParity { data, parity } => write!(f, "nested-parity:{data}+{parity}"),
            Layout::DeviceMirror { .. } | Layout::DeviceParity { .. } => write!(f, "{}{ON_DEVICES}", self.shape()),
        }
    }
}

/// A text that names no layout; says what would.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParseLayoutError {
    text: String,
}

impl fmt::Display for ParseLayoutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "`{}` is not a layout: use mirror:2, mirror:3 or parity:K+M with K and M at least 1, M less than {LEGS_MAX} and K+M at most \
             {CODE_WIDTH_MAX}, for example parity:2+1; the same over devices, whichever nodes they are in, with \
             {ON_DEVICES} behind it, for example mirror:2{ON_DEVICES}; or, over the devices of two nodes, nested-mirror \
             or nested-parity:K+1",
            self.text
        )
    }
}

impl std::error::Error for ParseLayoutError {}

impl FromStr for Layout {
    type Err = ParseLayoutError;

    fn from_str(text: &str) -> Result<Layout, ParseLayoutError> {
        let error = || ParseLayoutError { text: text.to_string() };
        if text == "nested-mirror" {
            return Ok(Layout::NestedMirror);
        }
        if let Some(shape) = text.strip_suffix(ON_DEVICES) {
            return match shape.parse() {
                Ok(Layout::Mirror { copies }) => Ok(Layout::DeviceMirror { copies }),
                Ok(Layout::Parity { data, parity }) => Ok(Layout::DeviceParity { data, parity }),
                _ => Err(error()),
            };
        }
        let (kind, rest) = text.split_once(':').ok_or_else(error)?;
        match kind {
            "mirror" => {
                let copies: u8 = rest.parse().map_err(|_| error())?;
                if (2..=3).contains(&copies) { Ok(Layout::Mirror { copies }) } else { Err(error()) }
            }
            "parity" | "nested-parity" => {
                let (k, m) = rest.split_once('+').ok_or_else(error)?;
                let data: u8 = k.parse().map_err(|_| error())?;
                let parity: u8 = m.parse().map_err(|_| error())?;
                let width = u16::from(data) + u16::from(parity);
                let is_nested = kind == "nested-parity";
                let in_log = usize::from(parity) < LEGS_MAX;
                match data >= 1 && parity >= 1 && in_log && width <= u16::from(CODE_WIDTH_MAX) {
                    true if is_nested && data >= 2 && parity == 1 => Ok(Layout::NestedParity { data, parity }),
                    true if !is_nested => Ok(Layout::Parity { data, parity }),
                    _ => Err(error()),
                }
            }
            _ => Err(error()),
        }
    }
}

/// Shape of one segment.
///
/// The payload is cut into rows of `data * stripe` blocks; each row gives every data shard one stripe. The last row may
/// be short: its stripes are shortened evenly, so that a short segment wastes at most `data - 1` blocks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Geometry {
    /// Copies over the outer domain.
    pub copies: u8,
    /// Data shards of the inner code.
    pub data: u8,
    /// Parity shards of the inner code.
    pub parity: u8,
    /// Blocks of a full stripe.
    pub stripe_blocks: u32,
    /// Blocks of payload, at least one.
    pub payload_blocks: u32,
}

/// Where a payload block lies: position among the inner code's data shards, and block in that shard.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ShardBlock {
    pub position: u8,
    pub block: u32,
}

impl Geometry {
    pub fn new(layout: Layout, payload_blocks: u32) -> Geometry {
        assert!(payload_blocks > 0, "a segment has a payload");
        let (copies, data, parity) = match layout {
            Layout::Mirror { copies } | Layout::DeviceMirror { copies } => (copies, 1, 0),
            Layout::Parity { data, parity } | Layout::DeviceParity { data, parity } => (1, data, parity),
            // The parity of a single shard is another copy of it. So no plain mirror, however wide, has the same shape.
            Layout::NestedMirror => (2, 1, 1),
            Layout::NestedParity { data, parity } => (2, data, parity),
        };
        Geometry { copies, data, parity, stripe_blocks: STRIPE_BLOCKS, payload_blocks }
    }

    /// Refuses shapes that no writer makes (bytes from disk or wire).
    pub fn is_valid(&self) -> bool {
        self.copies >= 1
            && self.data >= 1
            && u16::from(self.data) + u16::from(self.parity) <= u16::from(CODE_WIDTH_MAX)
            && u16::from(self.copies) * (u16::from(self.data) + u16::from(self.parity)) <= 64
            && self.stripe_blocks >= 1
            && self.stripe_blocks.checked_mul(u32::from(self.data)).is_some()
            && self.payload_blocks >= 1
    }

    /// The layout that a segment of this shape has, over nodes.
    pub fn layout(&self) -> Layout {
        let Geometry { copies, data, parity, .. } = *self;
        match (copies, parity) {
            (copies, 0) => Layout::Mirror { copies },
            (2.., 1) if data == 1 => Layout::NestedMirror,
            (1, parity) => Layout::Parity { data, parity },
            (_, parity) => Layout::NestedParity { data, parity },
        }
    }

    /// Shards with one number lie in one fault domain, on devices of their own; those with different ones in different ones.
    pub fn domain_of(&self, shard_index: u8) -> u8 {
        shard_index / self.layout().shards_a_domain()
    }

    /// Shards of one copy.
    pub fn code_width(&self) -> u8 {
        self.data + self.parity
    }

    /// All shards.
    pub fn shard_count(&self) -> u8 {
        self.copies * self.code_width()
    }

    /// Position in the inner code of the shard with this index.
    pub fn position(&self, shard_index: u8) -> u8 {
        shard_index % self.code_width()
    }

    /// Shards, whichever they are, that may be lost: every copy must lose more than its parity before data is gone.
    pub fn failures(&self) -> u8 {
        self.copies * (self.parity + 1) - 1
    }

    pub fn row_blocks(&self) -> u32 {
        self.stripe_blocks * u32::from(self.data)
    }

    /// The last row is as long as the others.
    pub fn has_whole_rows(&self) -> bool {
        self.payload_blocks.is_multiple_of(self.row_blocks())
    }

    fn full_rows(&self) -> u32 {
        self.payload_blocks / self.row_blocks()
    }

    fn last_stripe(&self) -> u32 {
        (self.payload_blocks % self.row_blocks()).div_ceil(u32::from(self.data))
    }

    /// Blocks of every shard's data (parity shards are as long).
    pub fn shard_blocks(&self) -> u32 {
        self.full_rows() * self.stripe_blocks + self.last_stripe()
    }

    /// Where payload block `block` lies.
    pub fn locate(&self, block: u32) -> ShardBlock {
        assert!(block < self.payload_blocks, "block {block} beyond the payload's {}", self.payload_blocks);
        let row = block / self.row_blocks();
        let in_row = block % self.row_blocks();
        let stripe = if row < self.full_rows() { self.stripe_blocks } else { self.last_stripe() };
        ShardBlock { position: (in_row / stripe) as u8, block: row * self.stripe_blocks + in_row % stripe }
    }

    /// How many payload blocks from `block` on lie one after the other in its shard.
    pub fn run_from(&self, block: u32) -> u32 {
        let row = block / self.row_blocks();
        let in_row = block % self.row_blocks();
        let stripe = if row < self.full_rows() { self.stripe_blocks } else { self.last_stripe() };
        (stripe - in_row % stripe).min(self.payload_blocks - block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn layouts_read_back_and_bad_ones_say_why() {
        for text in [
            "mirror:2",
            "mirror:3",
            "parity:2+1",
            "parity:4+2",
            "parity:7+1",
            "parity:15+1",
            "nested-mirror",
            "nested-parity:3+1",
            "mirror:2@device",
            "parity:4+2@device",
        ] {
            let layout = text.parse::<Layout>().unwrap();
            assert_eq!(layout.to_string(), text);
            let geometry = Geometry::new(layout, 9);
            assert_eq!((geometry.layout(), geometry.shard_count()), (layout.shape(), layout.shard_count()));
            let domains: std::collections::BTreeSet<u8> =
                (0..layout.shard_count()).map(|i| geometry.domain_of(i)).collect();
            assert_eq!(domains.len(), usize::from(layout.width()));
        }
        for text in [
            "mirror:1",
            "mirror:4",
            "parity:0+1",
            "parity:2+0",
            "parity:12+5",
            "raid5",
            "parity:300+1",
            "",
            "nested-mirror:2",
            "nested-parity:1+1",
            "mirror:2@node",
            "nested-mirror@device",
            "mirror:2@device@device",
        ] {
            assert!(text.parse::<Layout>().unwrap_err().to_string().contains("for example parity:2+1"), "{text}");
        }
    }

    #[test]
    fn a_mirror_of_any_width_reads_back_as_one() {
        // What a layout of three parity shards keeps its map in.
        for copies in 1..=6 {
            assert_eq!(Geometry::new(Layout::Mirror { copies }, 5).layout(), Layout::Mirror { copies });
        }
    }

    #[test]
    fn two_survivors_of_2_plus_1_are_a_mirror() {
        let layout = Layout::DEFAULT;
        assert_eq!(layout.adapted_to(4), Some(layout));
        assert_eq!(layout.adapted_to(2), Some(Layout::Mirror { copies: 2 }));
        assert_eq!(layout.adapted_to(1), Some(Layout::Mirror { copies: 1 }));
        assert_eq!(layout.adapted_to(0), None);
        let wide = Layout::Parity { data: 4, parity: 2 };
        assert_eq!(wide.adapted_to(5), Some(Layout::Mirror { copies: 3 }));
    }

    #[test]
    fn failures_follow_from_shape() {
        assert_eq!(Geometry::new(Layout::Mirror { copies: 3 }, 10).failures(), 2);
        assert_eq!(Geometry::new(Layout::Parity { data: 4, parity: 2 }, 10).failures(), 2);
    }

    proptest! {
        #[test]
        fn every_payload_block_has_one_place_and_shards_fill_in_order(
            data in 1u8..=8, parity in 1u8..=3, payload in 1u32..2000,
        ) {
            let g = Geometry::new(Layout::Parity { data, parity }, payload);
            prop_assert!(g.is_valid());
            let mut filled = vec![0; usize::from(data)];
            for block in 0..payload {
                let at = g.locate(block);
                prop_assert!(at.position < data && at.block < g.shard_blocks());
                prop_assert_eq!(at.block, filled[usize::from(at.position)]);
                filled[usize::from(at.position)] += 1;
            }
            let places = u32::from(data) * g.shard_blocks();
            prop_assert!(places - payload < u32::from(data), "wastes {} blocks", places - payload);
            let (mut block, mut runs) = (0, 0);
            while block < payload {
                let run = g.run_from(block);
                let first = g.locate(block);
                for i in 0..run {
                    prop_assert_eq!(g.locate(block + i), ShardBlock { position: first.position, block: first.block + i });
                }
                block += run;
                runs += 1;
            }
            prop_assert!(runs <= payload);
        }
    }
}
