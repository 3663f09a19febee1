//! Tiers: which class of media a volume's data lie on, and whether what is written is born somewhere else than it ends.
//!
//! Without any, data are born in the volume's layout, on any media. A **first tier** takes what is written in a layout and on
//! a class of its own, a mirror on flash say, up to a size; what lives longest there moves on to the volume's own layout, the
//! **capacity tier**. (Microsoft's mirror-accelerated parity is a first tier `mirror:2` before `parity:2+1` on the same media.)

use crate::geometry::Layout;
use holdfast_base::MediaClass;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Smallest first tier: sixteen full segments; less would be full all the time.
pub const FIRST_TIER_BYTES_MIN: u64 = 64 << 20;

/// How much a first tier may hold, of guests' data.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum TierSize {
    Bytes(u64),
    /// Of the volume's size, in 1/1000.
    PerMille(u32),
}

impl TierSize {
    /// Bytes of guests' data, for a volume of that size.
    pub fn bytes(self, volume_bytes: u64) -> u64 {
        match self {
            TierSize::Bytes(bytes) => bytes,
            TierSize::PerMille(share) => (u128::from(volume_bytes) * u128::from(share) / 1000) as u64,
        }
    }
}

impl fmt::Display for TierSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            TierSize::Bytes(bytes) if bytes.is_multiple_of(1 << 30) => write!(f, "{}GiB", bytes >> 30),
            TierSize::Bytes(bytes) if bytes.is_multiple_of(1 << 20) => write!(f, "{}MiB", bytes >> 20),
            TierSize::Bytes(bytes) => write!(f, "{bytes}"),
            TierSize::PerMille(share) if share.is_multiple_of(10) => write!(f, "{}%", share / 10),
            TierSize::PerMille(share) => write!(f, "{}.{}%", share / 10, share % 10),
        }
    }
}

/// Where what is written is born.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FirstTier {
    pub layout: Layout,
    /// Any where none is named.
    pub media: Option<MediaClass>,
    pub size: TierSize,
}

impl FirstTier {
    /// Whether what it holds outlives as much as what is in that layout.
    pub fn bears(&self, layout: Layout) -> bool {
        self.layout.failures() >= layout.failures()
            && (self.layout.is_nested() || !layout.is_nested())
            && self.layout.is_on_devices() == layout.is_on_devices()
    }
}

impl fmt::Display for FirstTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.layout)?;
        if let Some(media) = self.media {
            write!(f, " on {media}")?;
        }
        write!(f, ", {}", self.size)
    }
}

/// A volume's tiers, besides its layout.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Tiers {
    pub first: Option<FirstTier>,
    /// Media of what has left the first tier, or of everything where there is none. Any where none is named.
    pub capacity: Option<MediaClass>,
}

impl Tiers {
    /// Whether these go together with a layout of the capacity tier.
    pub fn check(&self, layout: Layout, volume_bytes: u64) -> Result<(), TierError> {
        let Some(first) = &self.first else { return Ok(()) };
        if !first.bears(layout) {
            return Err(TierError::Weaker { first: first.layout, capacity: layout });
        }
        let is_same_media = first.media.is_none() || self.capacity.is_none() || first.media == self.capacity;
        if first.layout == layout && is_same_media {
            return Err(TierError::Same { layout });
        }
        let bytes = first.size.bytes(volume_bytes);
        if bytes < FIRST_TIER_BYTES_MIN {
            return Err(TierError::Small { bytes });
        }
        Ok(())
    }
}

/// Why tiers don't go together, and what would.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TierError {
    Weaker { first: Layout, capacity: Layout },
    Same { layout: Layout },
    Small { bytes: u64 },
}

impl fmt::Display for TierError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TierError::Weaker { first, capacity } => write!(
                f,
                "a first tier of {first} bears less than the volume's {capacity} does: what was just written would be lost \
                 first; use one that bears as many failures, for example {}",
                if capacity.is_nested() {
                    "nested-mirror".to_string()
                } else {
                    format!("mirror:{}", capacity.failures() + 1)
                }
            ),
            TierError::Same { layout } => write!(
                f,
                "both tiers would be {layout} on the same media, and moving data from one to the other would be for \
                 nothing; name another layout, or classes of media for both"
            ),
            TierError::Small { bytes } => write!(
                f,
                "a first tier of {bytes} bytes would be full all the time; give it {} MiB at least",
                FIRST_TIER_BYTES_MIN >> 20
            ),
        }
    }
}

impl std::error::Error for TierError {}

/// A text that is no share; says what is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ParseShareError;

impl fmt::Display for ParseShareError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a share is a number from 1 % to 90 %, for example 20%")
    }
}

impl std::error::Error for ParseShareError {}

/// Parses shares (`20%`); sizes in bytes are for whoever knows their units.
impl FromStr for TierSize {
    type Err = ParseShareError;

    fn from_str(text: &str) -> Result<TierSize, ParseShareError> {
        let share: u32 = text.strip_suffix('%').and_then(|n| n.trim().parse().ok()).ok_or(ParseShareError)?;
        if (1..=90).contains(&share) { Ok(TierSize::PerMille(share * 10)) } else { Err(ParseShareError) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOLUME: u64 = 100 << 30;

    fn first(layout: &str, media: Option<MediaClass>) -> Tiers {
        let size = TierSize::PerMille(200);
        Tiers { first: Some(FirstTier { layout: layout.parse().unwrap(), media, size }), capacity: None }
    }

    #[test]
    fn tiers_that_go_together_are_told_from_those_that_do_not() {
        let parity: Layout = "parity:2+1".parse().unwrap();
        let wide: Layout = "parity:4+2".parse().unwrap();
        let nested: Layout = "nested-parity:2+1".parse().unwrap();
        assert_eq!(Tiers::default().check(parity, VOLUME), Ok(()));
        assert_eq!(first("mirror:2", None).check(parity, VOLUME), Ok(()));
        assert_eq!(first("nested-mirror", None).check(nested, VOLUME), Ok(()));
        let weaker = first("mirror:2", None).check(wide, VOLUME).unwrap_err().to_string();
        assert!(weaker.contains("mirror:3"), "{weaker}");
        let weaker = first("mirror:3", None).check(nested, VOLUME).unwrap_err().to_string();
        assert!(weaker.contains("nested-mirror"), "{weaker}");
        assert_eq!(first("parity:2+1", None).check(parity, VOLUME), Err(TierError::Same { layout: parity }));
        let flash = first("parity:2+1", Some(MediaClass::Ssd));
        assert_eq!(flash.check(parity, VOLUME), Err(TierError::Same { layout: parity }));
        assert_eq!(Tiers { capacity: Some(MediaClass::Hdd), ..flash }.check(parity, VOLUME), Ok(()));
        assert!(matches!(first("mirror:2", None).check(parity, 256 << 20), Err(TierError::Small { .. })));
    }

    #[test]
    fn sizes_are_bytes_or_shares_of_the_volume() {
        assert_eq!("20%".parse(), Ok(TierSize::PerMille(200)));
        assert_eq!(TierSize::PerMille(200).bytes(VOLUME), 20 << 30);
        assert_eq!(TierSize::Bytes(7).bytes(VOLUME), 7);
        for wrong in ["", "0%", "95%", "20", "x%", "%"] {
            assert!(wrong.parse::<TierSize>().is_err(), "{wrong}");
        }
        let shown: Vec<String> =
            [TierSize::PerMille(200), TierSize::PerMille(5), TierSize::Bytes(80 << 30), TierSize::Bytes(300 << 20)]
                .iter()
                .map(TierSize::to_string)
                .collect();
        assert_eq!(shown, ["20%", "0.5%", "80GiB", "300MiB"]);
    }
}
