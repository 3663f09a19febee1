//! Bodies and queries of requests. Fields that nobody knows are refused: a word that is written wrong does nothing else.

use crate::given::{Named, Only, reference};
use crate::words::{
    Absence, Compression, DevicePath, FilterSpec, FirstTierSize, Keep, KeyFile, Layout, Media, Name, Qos, Span,
    VolumeBytes,
};
use holdfast_api::{ClientsChange, Code, Error, KeySource, Request};
use holdfast_format::packing;
use holdfast_format::schedule::ScheduleRecord;
use holdfast_format::tier::{FirstTier, Tiers};
use serde::Deserialize;
use utoipa::openapi::schema::{AdditionalProperties, ArrayBuilder, OneOfBuilder};
use utoipa::openapi::{ObjectBuilder, RefOr, Schema, Type};
use utoipa::{IntoParams, PartialSchema, ToSchema};

/// Most entries of a list.
const LIST_MAX: usize = 1024;

fn key_of(file: Option<KeyFile>) -> Option<KeySource> {
    file.map(|KeyFile(path)| KeySource::File(path))
}

fn names_of(names: Vec<Name>) -> Vec<String> {
    names.into_iter().map(|Name(name)| name).collect()
}

/// How lists that [`some_of`] takes are described.
fn names() -> ArrayBuilder {
    let name = utoipa::openapi::Ref::from_schema_name(Name::name());
    ArrayBuilder::new().items(name).min_items(Some(1)).max_items(Some(LIST_MAX))
}

fn names_each_once() -> RefOr<Schema> {
    names().unique_items(true).description(Some("Each once")).into()
}

/// Of a list that has to have something in it.
fn some_of(what: &str, names: Vec<Name>) -> Result<Vec<String>, Error> {
    match names.len() {
        1..=LIST_MAX => Ok(names_of(names)),
        count => {
            let why = format!("{what} has {count} entries; give from 1 to {LIST_MAX}");
            Err(Error::new(Code::Invalid, why))
        }
    }
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FirstTierBody {
    pub layout: Layout,
    /// Any where none is named.
    pub media: Option<Media>,
    pub size: FirstTierSize,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TiersBody {
    /// Where what is written is born.
    #[schema(value_type = Option<FirstTierBody>)]
    pub first: Option<Only<FirstTierBody>>,
    /// Media of what has left it, or of everything.
    pub capacity: Option<Media>,
}

impl TiersBody {
    fn tiers(self) -> Tiers {
        let media = |media: Option<Media>| media.map(|Media(class)| class);
        let first = self.first.map(|Only(FirstTierBody { layout, media: of, size })| FirstTier {
            layout: layout.0,
            media: media(of),
            size: size.0,
        });
        Tiers { first, capacity: media(self.capacity) }
    }
}

fn tiers_of(tiers: Option<Only<TiersBody>>) -> Option<Tiers> {
    tiers.map(|Only(tiers)| tiers.tiers())
}

fn yes() -> bool {
    true
}

/// What the command line asks a host for, as an object with `op`.
#[derive(Deserialize)]
#[serde(transparent)]
pub struct CommandBody(Request);

impl CommandBody {
    /// # Errors
    /// It would have the host run a program: who asks from elsewhere is let do all to the grid, and not to its machines.
    pub fn request(self) -> Result<Request, Error> {
        let key = match &self.0 {
            Request::VolumeCreate { key, .. }
            | Request::VolumeExport { key, .. }
            | Request::SharingCreate { key, .. } => key.as_ref(),
            Request::VolumeRekey { key, .. } => Some(key),
            _ => None,
        };
        match key {
            Some(KeySource::Command(_)) => {
                let why = "a command that prints a key is given at a machine of the grid; take --key-file, a file of the host";
                Err(Error::new(Code::NotPermitted, why))
            }
            Some(KeySource::File(_)) | None => Ok(self.0),
        }
    }
}

impl PartialSchema for CommandBody {
    fn schema() -> RefOr<Schema> {
        let op = ObjectBuilder::new().schema_type(Type::String);
        ObjectBuilder::new()
            .description(Some("As `crates/api` has it; it may change with each release"))
            .property("op", op)
            .required("op")
            .into()
    }
}

impl ToSchema for CommandBody {
    fn name() -> std::borrow::Cow<'static, str> {
        "CommandBody".into()
    }
}

/// A volume to be made.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VolumeCreateBody {
    pub name: Name,
    pub size_bytes: VolumeBytes,
    pub layout: Layout,
    /// Offer it to clients at once.
    #[serde(default = "yes")]
    pub export: bool,
    /// Capacity is set aside for all of it.
    #[serde(default)]
    pub fixed: bool,
    #[serde(default = "yes")]
    pub checked_reads: bool,
    pub compression: Option<Compression>,
    #[schema(value_type = Option<TiersBody>)]
    pub tiers: Option<Only<TiersBody>>,
    /// It is encrypted, with a key that the one in this file of the host wraps.
    pub key_file: Option<KeyFile>,
    pub qos: Option<Qos>,
}

impl VolumeCreateBody {
    pub fn request(self) -> Request {
        Request::VolumeCreate {
            name: self.name.0,
            size_bytes: self.size_bytes.0,
            layout: self.layout.0.to_string(),
            export: self.export,
            fixed: self.fixed,
            checked_reads: self.checked_reads,
            compression: compression_of(self.compression),
            tiers: tiers_of(self.tiers).unwrap_or_default(),
            key: key_of(self.key_file),
            limit: self.qos.map(|Qos(words)| words),
        }
    }
}

fn compression_of(given: Option<Compression>) -> Option<packing::Compression> {
    given.map(|Compression(compression)| compression)
}

/// What of a volume is to change; what is left out stays.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VolumeSetBody {
    pub layout: Option<Layout>,
    pub fixed: Option<bool>,
    pub checked_reads: Option<bool>,
    pub compression: Option<Compression>,
    #[schema(value_type = Option<TiersBody>)]
    pub tiers: Option<Only<TiersBody>>,
    /// All of it anew.
    pub qos: Option<Qos>,
    /// The domain that it shares content in from here on, or `none`.
    pub sharing: Option<Name>,
}

impl VolumeSetBody {
    pub fn request(self, name: String) -> Request {
        Request::VolumeSet {
            name,
            layout: self.layout.map(|Layout(layout)| layout.to_string()),
            fixed: self.fixed,
            checked_reads: self.checked_reads,
            compression: compression_of(self.compression),
            tiers: tiers_of(self.tiers),
            limit: self.qos.map(|Qos(words)| words),
            sharing: self.sharing.map(|Name(name)| name),
        }
    }
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ResizeBody {
    pub size_bytes: VolumeBytes,
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
    pub name: Name,
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
    pub key_file: Option<KeyFile>,
}

impl ExportBody {
    pub fn request(self, name: String) -> Request {
        let ExportBody { takeover, multipath, shared, failover, key_file } = self;
        Request::VolumeExport { name, takeover, multipath, key: key_of(key_file), shared, failover }
    }
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HandoverBody {
    /// The host that shall have it in service.
    pub to: Name,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RekeyBody {
    /// With the key that its own is wrapped with from here on.
    pub key_file: KeyFile,
}

impl RekeyBody {
    pub fn request(self, name: String) -> Request {
        let KeyFile(path) = self.key_file;
        Request::VolumeRekey { name, key: KeySource::File(path) }
    }
}

/// Whom a volume is for, over TCP: one of these, by its word alone.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ClientsBody {
    /// These, too; where there was no list, these alone.
    Allow(Vec<Name>),
    /// These no more.
    Deny(Vec<Name>),
    /// Every client (`true`), or none (`false`).
    All(bool),
}

impl ClientsBody {
    pub fn request(self, name: String) -> Result<Request, Error> {
        let change = match self {
            ClientsBody::Allow(clients) => ClientsChange::Allow { clients: some_of("allow", clients)? },
            ClientsBody::Deny(clients) => ClientsChange::Deny { clients: some_of("deny", clients)? },
            ClientsBody::All(true) => ClientsChange::AllowAll,
            ClientsBody::All(false) => ClientsChange::DenyAll,
        };
        Ok(Request::VolumeClients { name, change })
    }
}

// What serde's derive takes, said so that nothing beside that fits: the derived one lets other words stand beside it.
impl PartialSchema for ClientsBody {
    fn schema() -> RefOr<Schema> {
        let alone = |word: &str, about: &str, what: RefOr<Schema>| {
            let object = ObjectBuilder::new().schema_type(Type::Object).description(Some(about));
            let object = object.property(word, what).required(word);
            object.additional_properties(Some(AdditionalProperties::<Schema>::FreeForm(false)))
        };
        let all = ObjectBuilder::new().schema_type(Type::Boolean).into();
        OneOfBuilder::new()
            .description(Some("Whom a volume is for, over TCP"))
            .item(alone("allow", "These, too; where there was no list, these alone", names().into()))
            .item(alone("deny", "These no more", names().into()))
            .item(alone("all", "Every client (`true`), or none (`false`)", all))
            .into()
    }
}

impl ToSchema for ClientsBody {
    fn schemas(into: &mut Vec<Named>) {
        reference::<Name>(into);
    }
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ScheduleBody {
    pub every: Span,
    pub keep: Keep,
}

impl ScheduleBody {
    pub fn request(self, name: String) -> Request {
        let schedule = ScheduleRecord::new(self.every.0, self.keep.0);
        Request::VolumeSchedule { name, schedule: Some(schedule) }
    }
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AnnouncementBody {
    #[serde(rename = "for")]
    pub lasts: Absence,
}

impl AnnouncementBody {
    pub fn request(self, name: String) -> Request {
        Request::MachineAnnounce { name, seconds: Some(self.lasts.0.seconds()) }
    }
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FilterBody {
    pub spec: FilterSpec,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SnapshotBody {
    pub name: Name,
}

/// Consistent snapshots of several volumes, of all or of none.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SnapshotGroupBody {
    /// Each once.
    #[schema(schema_with = names_each_once)]
    pub volumes: Vec<Name>,
    pub name: Name,
}

impl SnapshotGroupBody {
    pub fn request(self) -> Result<Request, Error> {
        Ok(Request::SnapshotGroup { volumes: some_of("volumes", self.volumes)?, name: self.name.0 })
    }
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CloneBody {
    pub name: Name,
    /// The snapshot's where it is left out.
    pub size_bytes: Option<VolumeBytes>,
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
        let size_bytes = size_bytes.map(|VolumeBytes(bytes)| bytes);
        Request::VolumeClone { source: format!("{volume}@{snapshot}"), name: name.0, size_bytes, separate, export }
    }
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RestoreBody {
    /// Another name than it had.
    pub name: Option<Name>,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReplaceBody {
    /// Of the new device; without it: a new file beside the grid's others.
    pub path: Option<DevicePath>,
    /// Although the new one holds something, which is destroyed.
    #[serde(default)]
    pub force: bool,
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
    /// Without one its node finds out.
    pub class: Option<Media>,
}

impl ClassBody {
    pub fn request(self, device: String) -> Request {
        Request::DeviceClass { device, class: self.class.map(|Media(class)| class) }
    }
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SharingCreateBody {
    pub name: Name,
    pub layout: Layout,
    pub compression: Option<Compression>,
    /// Its members are encrypted, too.
    pub key_file: Option<KeyFile>,
}

impl SharingCreateBody {
    pub fn request(self) -> Request {
        let compression = compression_of(self.compression).unwrap_or(packing::Compression::Auto);
        let (name, layout) = (self.name.0, self.layout.0.to_string());
        Request::SharingCreate { name, layout, compression, key: key_of(self.key_file) }
    }
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct DeviceQuery {
    /// Although it is not empty: what lies there is made again from the others.
    #[serde(default)]
    pub force: bool,
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
pub struct RoomQuery {
    /// What new volumes get of which nothing is said, where none is named.
    #[param(value_type = Layout, required = false)]
    pub layout: Option<Layout>,
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
