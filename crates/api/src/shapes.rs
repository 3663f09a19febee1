//! How what `base` and `format` have of resources looks in the description of the HTTP interface. Nothing is made of these:
//! a test holds them against what is written.
#![allow(dead_code)]

use serde::Serialize;
use utoipa::ToSchema;

/// What a device is made of.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum MediaClass {
    Hdd,
    Ssd,
    Nvme,
}

/// Why a drive does not think itself well.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DriveTrouble {
    /// It expects to fail, and does not say why.
    ExpectsFailure,
    SpareLow,
    Unreliable,
    ReadOnly,
    BackupFailed,
    Temperature,
}

/// One drive's account of itself.
#[derive(Serialize, ToSchema)]
pub struct DriveReport {
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

/// A volume's tiers, besides its layout.
#[derive(Serialize, ToSchema)]
pub struct Tiers {
    /// Where what is written is born.
    #[schema(value_type = Option<Object>)]
    pub first: Option<()>,
    /// Media of what has left the first tier, or of everything where there is none.
    pub capacity: Option<MediaClass>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_format::{drive, tier};
    use serde_json::{Value, to_value};

    fn keys(value: impl Serialize) -> Vec<String> {
        let Value::Object(fields) = to_value(value).unwrap() else { panic!("no object") };
        fields.into_iter().map(|(key, _)| key).collect()
    }

    #[test]
    fn shapes_are_those_of_what_is_told() {
        let classes = [MediaClass::Hdd, MediaClass::Ssd, MediaClass::Nvme].map(|class| to_value(class).unwrap());
        assert_eq!(classes, holdfast_base::MediaClass::ALL.map(|class| to_value(class).unwrap()));
        let report = DriveReport {
            troubles: vec![
                DriveTrouble::ExpectsFailure,
                DriveTrouble::SpareLow,
                DriveTrouble::Unreliable,
                DriveTrouble::ReadOnly,
                DriveTrouble::BackupFailed,
                DriveTrouble::Temperature,
            ],
            worn_percent: Some(1),
            spare_percent: Some(2),
            celsius: Some(-3),
            media_errors: Some(4),
            hours: Some(5),
        };
        let told: drive::DriveReport = serde_json::from_value(to_value(&report).unwrap()).unwrap();
        assert_eq!(to_value(&told).unwrap(), to_value(&report).unwrap());
        assert_eq!(keys(tier::Tiers::default()), keys(Tiers { first: None, capacity: None }));
    }
}
