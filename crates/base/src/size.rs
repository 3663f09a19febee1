//! Sizes as people write and read them: `8GiB`, `512MiB`, `10G`.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A number of bytes with a human form. Suffixes are powers of 1024, with or without `iB` or `B`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Size(pub u64);

/// A text that is not a size; says what would be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ParseSizeError {
    text: String,
}

impl fmt::Display for ParseSizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is not a size: write a number with a unit, for example 512MiB, 8GiB, 10G or 1.5TiB", self.text)
    }
}

impl std::error::Error for ParseSizeError {}

const UNITS: [(&str, u32); 6] = [("", 0), ("K", 10), ("M", 20), ("G", 30), ("T", 40), ("P", 50)];

impl FromStr for Size {
    type Err = ParseSizeError;

    fn from_str(text: &str) -> Result<Size, ParseSizeError> {
        let error = || ParseSizeError { text: text.to_string() };
        let trimmed = text.trim();
        let at = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(at);
        let unit = unit.trim().to_ascii_uppercase();
        let unit = unit.strip_suffix("IB").or_else(|| unit.strip_suffix('B')).unwrap_or(&unit);
        let (_, shift) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(error)?;
        if let Ok(whole) = number.parse::<u64>() {
            return whole.checked_mul(1 << shift).map(Size).ok_or_else(error);
        }
        let fraction: f64 = number.parse().map_err(|_| error())?;
        let bytes = fraction * (1_u64 << shift) as f64;
        if !bytes.is_finite() || bytes < 0.0 || bytes >= u64::MAX as f64 {
            return Err(error());
        }
        Ok(Size(bytes as u64))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, shift) = UNITS.iter().rev().find(|(_, shift)| self.0 >= 1 << shift).unwrap_or(&UNITS[0]);
        let text = if *shift == 0 {
            format!("{} B", self.0)
        } else if self.0.is_multiple_of(1 << shift) {
            format!("{} {name}iB", self.0 >> shift)
        } else {
            format!("{:.1} {name}iB", self.0 as f64 / (1_u64 << shift) as f64)
        };
        f.pad(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usual_spellings_are_read() {
        for (text, bytes) in [
            ("8GiB", 8 << 30),
            ("512MiB", 512 << 20),
            ("10G", 10 << 30),
            ("1.5TiB", 3 << 39),
            ("64 kib", 64 << 10),
            ("4096", 4096),
            ("100B", 100),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in ["", "GiB", "-1G", "12Q", "99999999999T", "1..5G"] {
            let error = text.parse::<Size>().unwrap_err();
            assert!(error.to_string().contains("8GiB"), "{text}");
        }
    }

    #[test]
    fn sizes_print_short() {
        assert_eq!(Size(8 << 30).to_string(), "8 GiB");
        assert_eq!(Size(1_610_612_736).to_string(), "1.5 GiB");
        assert_eq!(Size(12).to_string(), "12 B");
        assert_eq!(Size(0).to_string(), "0 B");
    }
}
