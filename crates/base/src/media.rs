//! What a device is made of.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The class of a device's media, slower ones first: detected from what the kernel tells, or set by the operator.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MediaClass {
    Hdd,
    Ssd,
    Nvme,
}

impl MediaClass {
    pub const ALL: [MediaClass; 3] = [MediaClass::Hdd, MediaClass::Ssd, MediaClass::Nvme];
}

impl fmt::Display for MediaClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            MediaClass::Hdd => "hdd",
            MediaClass::Ssd => "ssd",
            MediaClass::Nvme => "nvme",
        })
    }
}

/// A text that names no class; says which there are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParseMediaError {
    text: String,
}

impl fmt::Display for ParseMediaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is not a class of media: use nvme, ssd or hdd", self.text)
    }
}

impl std::error::Error for ParseMediaError {}

impl FromStr for MediaClass {
    type Err = ParseMediaError;

    fn from_str(text: &str) -> Result<MediaClass, ParseMediaError> {
        let found = MediaClass::ALL.into_iter().find(|class| class.to_string() == text);
        found.ok_or_else(|| ParseMediaError { text: text.to_string() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_read_back_and_rise_with_speed() {
        for class in MediaClass::ALL {
            assert_eq!(class.to_string().parse(), Ok(class));
        }
        assert!(MediaClass::ALL.is_sorted());
        let error = "tape".parse::<MediaClass>().unwrap_err().to_string();
        assert!(error.contains("`tape`") && error.contains("nvme, ssd or hdd"), "{error}");
    }
}
