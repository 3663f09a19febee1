//! What a host answers: one of these to each request.

use crate::{
    AlertArrival, Code, HostStatus, MachineInfo, Parts, QosInfo, RoomInfo, SlowInfo, TaskInfo, TrashInfo, VolumeInfo,
    VolumeSpace,
};
use holdfast_format::meta::MetadataFile;
use holdfast_format::stream::Begin;
use serde::{Deserialize, Serialize};

/// The answer to one request, as an object with `reply`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "kebab-case")]
pub enum Response {
    Done,
    Status(Box<HostStatus>),
    Volume(Box<VolumeInfo>),
    Explained {
        volume: Box<VolumeInfo>,
        /// Of a volume that is open here.
        parts: Option<Box<Parts>>,
    },
    Slow {
        volume: Box<VolumeInfo>,
        /// Of a volume that is in service here.
        slow: Option<Box<SlowInfo>>,
    },
    Volumes {
        volumes: Vec<VolumeInfo>,
    },
    Trash {
        trash: Vec<TrashInfo>,
    },
    Names {
        names: Vec<String>,
    },
    Tasks {
        tasks: Vec<TaskInfo>,
        /// Hosts that do not say what they do.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        silent: Vec<String>,
    },
    Space {
        volumes: Vec<VolumeSpace>,
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        silent: Vec<String>,
    },
    MayStop {
        /// Why not now.
        why: Option<String>,
        /// Nor ever, as the grid is.
        never: bool,
    },
    Room(Box<RoomInfo>),
    Qos(Box<QosInfo>),
    Alerts {
        arrivals: Vec<AlertArrival>,
    },
    Machines {
        machines: Vec<MachineInfo>,
    },
    Leaving {
        /// What it waits for; nothing once the machine is out.
        waits: Option<String>,
        /// What to know beside that.
        notes: Vec<String>,
    },
    Metadata {
        file: Box<MetadataFile>,
    },
    Begin(Box<Begin>),
    Receiving {
        /// Under which name the volume takes writes meanwhile.
        export: String,
        ticket: String,
    },
    /// The rest of a stream: what `holdfast send --resume` takes.
    Resume {
        token: Option<String>,
    },
    /// What, why, and the next command.
    Error {
        message: String,
        /// What kind of thing stood in the way; older hosts say none.
        #[serde(default)]
        code: Code,
    },
}

impl From<VolumeInfo> for Response {
    fn from(info: VolumeInfo) -> Response {
        Response::Volume(Box::new(info))
    }
}
