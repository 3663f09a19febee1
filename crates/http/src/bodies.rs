//! Bodies and queries of requests. Fields that nobody knows are refused: a word that is written wrong does nothing else.

use holdfast_api::{ClientsChange, Code, Error, KeySource, Request};
use holdfast_base::MediaClass;
use holdfast_format::packing::Compression;
use holdfast_format::schedule::ScheduleRecord;
use holdfast_format::tier::{FirstTier, Tiers};
use serde::Deserialize;
use std::path::PathBuf;
use std::str::FromStr;
use utoipa::{IntoParams, ToSchema};

/// A text that stands for something else.
fn parse<T: FromStr<Err: std::fmt::Display>>(what: &str, text: &str) -> Result<T, Error> {
    text.parse().map_err(|why| Error::new(Code::Invalid, format!("{what}: {why}")))
}

/// Absolute, at the host that is asked.
fn key_of(path: Option<PathBuf>) -> Result<Option<KeySource>, Error> {
    match path {
        Some(path) if !path.is_absolute() => {
            let why = format!("key_file {} is not absolute; give the whole path, as the host has it", path.display());
            Err(Error::new(Code::Invalid, why))
        }
        path => Ok(path.map(KeySource::File)),
    }
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FirstTierBody {
    /// As of a volume: `mirror:2`.
    pub layout: String,
    /// `nvme`, `ssd` or `hdd`; any where none is named.
    pub media: Option<String>,
    /// `10GiB`, or `20%` of the volume's size.
    pub size: String,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TiersBody {
    /// Where what is written is born.
    pub first: Option<FirstTierBody>,
    /// Media of what has left it, or of everything.
    pub capacity: Option<String>,
}

impl TiersBody {
    fn tiers(self) -> Result<Tiers, Error> {
        let class = |text: Option<String>| text.map(|text| parse::<MediaClass>("media", &text)).transpose();
        let first = self.first.map(|first| {
            let (layout, size) = (parse("layout of the first tier", &first.layout)?, parse("size of it", &first.size)?);
            Ok::<FirstTier, Error>(FirstTier { layout, media: class(first.media)?, size })
        });
        Ok(Tiers { first: first.transpose()?, capacity: class(self.capacity)? })
    }
}

fn yes() -> bool {
    true
}

/// A volume to be made.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VolumeCreateBody {
    pub name: String,
    /// Of whole blocks of 4096 bytes.
    pub size_bytes: u64,
    /// `mirror:2`, `parity:2+1` and so on.
    pub layout: String,
    /// Offer it to clients at once.
    #[serde(default = "yes")]
    pub export: bool,
    /// Capacity is set aside for all of it.
    #[serde(default)]
    pub fixed: bool,
    #[serde(default = "yes")]
    pub checked_reads: bool,
    /// `off`, `lz4` or `auto`.
    pub compression: Option<String>,
    pub tiers: Option<TiersBody>,
    /// It is encrypted, with a key that the one in this file of the host wraps.
    #[schema(value_type = Option<String>)]
    pub key_file: Option<PathBuf>,
    /// How its clients fare among others: `weight=400,limit=500/50MiB`.
    pub qos: Option<String>,
}

impl VolumeCreateBody {
    pub fn request(self) -> Result<Request, Error> {
        Ok(Request::VolumeCreate {
            name: self.name,
            size_bytes: self.size_bytes,
            layout: self.layout,
            export: self.export,
            fixed: self.fixed,
            checked_reads: self.checked_reads,
            compression: compression_of(self.compression)?,
            tiers: self.tiers.map(TiersBody::tiers).transpose()?.unwrap_or_default(),
            key: key_of(self.key_file)?,
            limit: self.qos,
        })
    }
}

fn compression_of(text: Option<String>) -> Result<Option<Compression>, Error> {
    text.map(|text| parse("compression", &text)).transpose()
}

/// What of a volume is to change; what is left out stays.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VolumeSetBody {
    pub layout: Option<String>,
    pub fixed: Option<bool>,
    pub checked_reads: Option<bool>,
    pub compression: Option<String>,
    pub tiers: Option<TiersBody>,
    /// All of it anew; `none` takes it away.
    pub qos: Option<String>,
    /// The domain that it shares content in from here on, or `none`.
    pub sharing: Option<String>,
}

impl VolumeSetBody {
    pub fn request(self, name: String) -> Result<Request, Error> {
        Ok(Request::VolumeSet {
            name,
            layout: self.layout,
            fixed: self.fixed,
            checked_reads: self.checked_reads,
            compression: compression_of(self.compression)?,
            tiers: self.tiers.map(TiersBody::tiers).transpose()?,
            limit: self.qos,
            sharing: self.sharing,
        })
    }
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ResizeBody {
    pub size_bytes: u64,
    /// Cut off the end, with the data there.
    #[serde(default)]
    pub shrink: bool,
    /// Although clients are connected.
    #[serde(default)]
    pub force: bool,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RenameBody {
    pub name: String,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ProtectBody {
    /// It is not deleted until that is taken back.
    pub protected: bool,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExportBody {
    /// Although another host that is up has it in service: clients of that host get errors.
    #[serde(default)]
    pub takeover: bool,
    /// Beside the host that has it in service.
    #[serde(default)]
    pub multipath: bool,
    /// Several clients may write at a time; as it was where that is left out.
    pub shared: Option<bool>,
    /// Any host takes it over when its own is gone; as it was where that is left out.
    pub failover: Option<bool>,
    /// Where the host gets the key of an encrypted volume from here on.
    #[schema(value_type = Option<String>)]
    pub key_file: Option<PathBuf>,
}

impl ExportBody {
    pub fn request(self, name: String) -> Result<Request, Error> {
        let ExportBody { takeover, multipath, shared, failover, key_file } = self;
        Ok(Request::VolumeExport { name, takeover, multipath, key: key_of(key_file)?, shared, failover })
    }
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HandoverBody {
    /// The host that shall have it in service.
    pub to: String,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RekeyBody {
    /// With the key that its own is wrapped with from here on.
    #[schema(value_type = String)]
    pub key_file: PathBuf,
}

impl RekeyBody {
    pub fn request(self, name: String) -> Result<Request, Error> {
        let key = key_of(Some(self.key_file))?.expect("there is one");
        Ok(Request::VolumeRekey { name, key })
    }
}

/// Whom a volume is for, over TCP.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ClientsBody {
    /// These, too; where there was no list, these alone.
    #[serde(default)]
    pub allow: Vec<String>,
    /// These no more.
    #[serde(default)]
    pub deny: Vec<String>,
    /// Every client (`true`), or none (`false`).
    pub all: Option<bool>,
}

impl ClientsBody {
    pub fn request(self, name: String) -> Result<Request, Error> {
        let change = match (self.all, self.allow.is_empty(), self.deny.is_empty()) {
            (Some(true), true, true) => ClientsChange::AllowAll,
            (Some(false), true, true) => ClientsChange::DenyAll,
            (None, false, true) => ClientsChange::Allow { clients: self.allow },
            (None, true, false) => ClientsChange::Deny { clients: self.deny },
            _ => {
                let why = "one of allow, deny and all is to be given; ask twice where two are wanted";
                return Err(Error::new(Code::Invalid, why));
            }
        };
        Ok(Request::VolumeClients { name, change })
    }
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ScheduleBody {
    /// `1h`, `15m`, `1d`.
    pub every: String,
    /// `24h,7d,4w`: of each of the last 24 hours that have any the newest, and so on.
    pub keep: String,
}

impl ScheduleBody {
    pub fn request(self, name: String) -> Result<Request, Error> {
        let schedule = ScheduleRecord::new(parse("every", &self.every)?, parse("keep", &self.keep)?);
        Ok(Request::VolumeSchedule { name, schedule: Some(schedule) })
    }
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FilterBody {
    /// `limit:iops=500`, `delay:read=10ms,share=0.1`.
    pub spec: String,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SnapshotBody {
    pub name: String,
}

/// Consistent snapshots of several volumes, of all or of none.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SnapshotGroupBody {
    pub volumes: Vec<String>,
    pub name: String,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CloneBody {
    pub name: String,
    /// The snapshot's where it is left out.
    pub size_bytes: Option<u64>,
    /// A volume of its own, which any host can serve.
    #[serde(default)]
    pub separate: bool,
    /// Of a separate one: put it into service at the host that is asked.
    #[serde(default)]
    pub export: bool,
}

impl CloneBody {
    pub fn request(self, volume: &str, snapshot: &str) -> Request {
        let CloneBody { name, size_bytes, separate, export } = self;
        Request::VolumeClone { source: format!("{volume}@{snapshot}"), name, size_bytes, separate, export }
    }
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RestoreBody {
    /// Another name than it had.
    pub name: Option<String>,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DrainBody {
    /// Let it take data again.
    #[serde(default)]
    pub cancel: bool,
    /// Although less may fail then.
    #[serde(default)]
    pub force: bool,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ClassBody {
    /// `nvme`, `ssd` or `hdd`; without one its node finds out.
    pub class: Option<String>,
}

impl ClassBody {
    pub fn request(self, device: String) -> Result<Request, Error> {
        let class = self.class.map(|text| parse("class", &text)).transpose()?;
        Ok(Request::DeviceClass { device, class })
    }
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SharingCreateBody {
    pub name: String,
    pub layout: String,
    /// `off`, `lz4` or `auto`.
    pub compression: Option<String>,
    /// Its members are encrypted, too.
    #[schema(value_type = Option<String>)]
    pub key_file: Option<PathBuf>,
}

impl SharingCreateBody {
    pub fn request(self) -> Result<Request, Error> {
        let compression = compression_of(self.compression)?.unwrap_or(Compression::Auto);
        Ok(Request::SharingCreate { name: self.name, layout: self.layout, compression, key: key_of(self.key_file)? })
    }
}

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
pub struct DeleteQuery {
    /// Cut off clients that are connected.
    #[serde(default)]
    pub force: bool,
    /// For good, past the trash.
    #[serde(default)]
    pub now: bool,
}

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
pub struct ForceQuery {
    /// Cut off clients that are connected.
    #[serde(default)]
    pub force: bool,
}

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
pub struct RemoveQuery {
    /// It is dead: at once, without its help.
    #[serde(default)]
    pub dead: bool,
    /// Although data is lost that only it has.
    #[serde(default)]
    pub accept_loss: bool,
}
