//! Resources that are answered with.

use crate::given::{Named, reference};
use axum::http::StatusCode;
use holdfast_api::{
    AlertArrival, HostStatus, MachineInfo, NodeInfo, Parts, QosInfo, Response, RoomInfo, SlowInfo, SnapshotInfo,
    TaskInfo, TrashInfo, VolumeInfo, VolumeSpace,
};
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;
use utoipa::openapi::{ObjectBuilder, RefOr, Schema, Type};

/// What one entry of the table answers with.
pub trait Answer: Sized {
    const STATUS: StatusCode = StatusCode::OK;

    /// Of what the host said; nothing where that does not fit.
    fn of(response: Response) -> Option<Self>;

    fn schema(into: &mut Vec<Named>) -> Option<RefOr<Schema>>;

    /// The body, if there is any.
    fn show(self) -> Option<Value>;
}

/// Nothing more than that it is done.
pub struct Done;

impl Answer for Done {
    const STATUS: StatusCode = StatusCode::NO_CONTENT;

    fn of(response: Response) -> Option<Done> {
        matches!(response, Response::Done).then_some(Done)
    }

    fn schema(_: &mut Vec<Named>) -> Option<RefOr<Schema>> {
        None
    }

    fn show(self) -> Option<Value> {
        None
    }
}

/// A resource that is there from now on.
pub struct Created<T>(T);

impl<T: Answer> Answer for Created<T> {
    const STATUS: StatusCode = StatusCode::CREATED;

    fn of(response: Response) -> Option<Created<T>> {
        T::of(response).map(Created)
    }

    fn schema(into: &mut Vec<Named>) -> Option<RefOr<Schema>> {
        T::schema(into)
    }

    fn show(self) -> Option<Value> {
        self.0.show()
    }
}

macro_rules! answers {
    ($($type:ty: $pattern:pat => $value:expr;)*) => {$(
        impl Answer for $type {
            fn of(response: Response) -> Option<$type> {
                match response {
                    $pattern => $value,
                    _ => None,
                }
            }

            fn schema(into: &mut Vec<Named>) -> Option<RefOr<Schema>> {
                Some(reference::<$type>(into))
            }

            fn show(self) -> Option<Value> {
                Some(serde_json::to_value(self).expect("our answers always encode"))
            }
        }
    )*};
}

/// What became of a test, by each way that is set.
#[derive(Serialize, ToSchema)]
pub struct Alerts {
    pub arrivals: Vec<AlertArrival>,
}

/// Volumes, by name.
#[derive(Serialize, ToSchema)]
pub struct Volumes {
    pub volumes: Vec<VolumeInfo>,
}

#[derive(Serialize, ToSchema)]
pub struct Snapshots {
    /// Oldest first.
    pub snapshots: Vec<SnapshotInfo>,
}

/// Nodes as the host sees them that was asked.
#[derive(Serialize, ToSchema)]
pub struct Nodes {
    pub nodes: Vec<NodeInfo>,
}

#[derive(Serialize, ToSchema)]
pub struct Machines {
    pub machines: Vec<MachineInfo>,
}

/// What is done in the background.
#[derive(Serialize, ToSchema)]
pub struct Tasks {
    pub tasks: Vec<TaskInfo>,
    /// Hosts that do not say what they do.
    pub silent: Vec<String>,
}

/// What open volumes hold.
#[derive(Serialize, ToSchema)]
pub struct Space {
    pub volumes: Vec<VolumeSpace>,
    /// Hosts that do not say it of theirs.
    pub silent: Vec<String>,
}

#[derive(Serialize, ToSchema)]
pub struct Trash {
    /// Those first that go first.
    pub trash: Vec<TrashInfo>,
}

/// Names of what is gone for good.
#[derive(Serialize, ToSchema)]
pub struct Names {
    pub names: Vec<String>,
}

/// A volume, from its guests down to devices.
#[derive(Serialize, ToSchema)]
pub struct Explained {
    pub volume: VolumeInfo,
    /// Of a volume that is open at the host that was asked.
    pub parts: Option<Parts>,
}

/// Where the time of a volume's requests goes.
#[derive(Serialize, ToSchema)]
pub struct Slow {
    pub volume: VolumeInfo,
    /// Of a volume that is in service at the host that was asked.
    pub slow: Option<SlowInfo>,
}

/// Of a machine that is to leave.
#[derive(Serialize, ToSchema)]
pub struct Leaving {
    /// What it waits for; nothing once the machine is out.
    pub waits: Option<String>,
    /// What to know beside that.
    pub notes: Vec<String>,
}

/// What the host told the command line, as an object with `reply`.
pub struct Told(Response);

impl Answer for Told {
    fn of(response: Response) -> Option<Told> {
        Some(Told(response))
    }

    fn schema(_: &mut Vec<Named>) -> Option<RefOr<Schema>> {
        let reply = ObjectBuilder::new().schema_type(Type::String);
        Some(ObjectBuilder::new().property("reply", reply).required("reply").into())
    }

    fn show(self) -> Option<Value> {
        Some(serde_json::to_value(self.0).expect("our answers always encode"))
    }
}

answers! {
    VolumeInfo: Response::Volume(volume) => Some(*volume);
    HostStatus: Response::Status(status) => Some(*status);
    QosInfo: Response::Qos(qos) => Some(*qos);
    RoomInfo: Response::Room(room) => Some(*room);
    Volumes: Response::Volumes { volumes } => Some(Volumes { volumes });
    Machines: Response::Machines { machines } => Some(Machines { machines });
    Alerts: Response::Alerts { arrivals } => Some(Alerts { arrivals });
    Tasks: Response::Tasks { tasks, silent } => Some(Tasks { tasks, silent });
    Space: Response::Space { volumes, silent } => Some(Space { volumes, silent });
    Trash: Response::Trash { trash } => Some(Trash { trash });
    Names: Response::Names { names } => Some(Names { names });
    Leaving: Response::Leaving { waits, notes } => Some(Leaving { waits, notes });
    Nodes: Response::Status(status) => Some(Nodes { nodes: status.nodes });
    Explained: Response::Explained { volume, parts } => {
        Some(Explained { volume: *volume, parts: parts.map(|parts| *parts) })
    };
    Slow: Response::Slow { volume, slow } => Some(Slow { volume: *volume, slow: slow.map(|slow| *slow) });
    Snapshots: Response::Volume(volume) => {
        Some(Snapshots { snapshots: volume.live.map(|live| live.snapshots).unwrap_or_default() })
    };
}
