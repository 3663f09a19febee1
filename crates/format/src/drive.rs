//! What a drive says of its own health.
//!
//! Source: NVM Express base specification 2.0, SMART / Health Information log (02h); ATA/ATAPI Command Set (ACS-4), SMART
//! RETURN STATUS and the attributes that vendors agree on; SCSI Primary Commands, informational exceptions.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Why a drive does not think itself well.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DriveTrouble {
    /// It expects to fail, and does not say why.
    ExpectsFailure,
    /// What it has in reserve for worn blocks is below its threshold.
    SpareLow,
    /// Errors of its media or within itself have made it unreliable.
    Unreliable,
    /// It takes no more writes.
    ReadOnly,
    /// What keeps its volatile memory over a power cut has failed: what it called durable may not be.
    BackupFailed,
    /// Too hot or too cold. It passes.
    Temperature,
}

impl DriveTrouble {
    /// A drive with this is to be replaced.
    pub fn is_final(self) -> bool {
        self != DriveTrouble::Temperature
    }
}

impl fmt::Display for DriveTrouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            DriveTrouble::ExpectsFailure => "expects to fail",
            DriveTrouble::SpareLow => "has too few spare blocks left",
            DriveTrouble::Unreliable => "has become unreliable",
            DriveTrouble::ReadOnly => "takes no more writes",
            DriveTrouble::BackupFailed => "would lose its volatile memory with its power",
            DriveTrouble::Temperature => "is too hot or too cold",
        })
    }
}

/// One drive's account of itself. What it does not tell is missing.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct DriveReport {
    /// Each at most once; none where it thinks itself well.
    pub troubles: Vec<DriveTrouble>,
    /// Of the writes that its vendor promises; may exceed 100.
    pub worn_percent: Option<u8>,
    /// Of the blocks that it has in reserve for worn ones.
    pub spare_percent: Option<u8>,
    pub celsius: Option<i16>,
    /// What it could not read, or expects not to, since it was made.
    pub media_errors: Option<u64>,
    pub hours: Option<u64>,
}

impl DriveReport {
    /// It is to be replaced.
    pub fn is_failing(&self) -> bool {
        self.troubles.iter().any(|trouble| trouble.is_final())
    }
}

/// What troubles it, or that nothing does.
impl fmt::Display for DriveReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.troubles.is_empty() {
            return f.write_str("is well");
        }
        for (at, trouble) in self.troubles.iter().enumerate() {
            write!(f, "{}{trouble}", if at == 0 { "" } else { ", and " })?;
        }
        Ok(())
    }
}
