//! What every other crate speaks in: ids, units, block requests and replies, checksums, buffers, virtual instants.
//!
//! Nothing here does I/O, reads a clock or draws entropy. The machines (`holdfast-store`, `holdfast-volume`, the
//! frontends) and the shell that drives them (`holdfast-runtime`, or the simulator) meet in these types.

pub mod block;
pub mod buf;
pub mod checksum;
pub mod effects;
pub mod ids;
pub mod media;
pub mod meta;
pub mod mutations;
pub mod prng;
pub mod size;
pub mod slab;
pub mod stream;
pub mod time;
pub mod units;
pub mod urgency;

pub use block::{
    BlockData, BlockError, BlockOp, BlockReply, BlockRequest, ByteRange, ExportInfo, RequestToken, StatusExtent,
};
pub use buf::{Buf, BufMut};
pub use checksum::{BlockCrc, block_crcs, crc32c, seeded_crc32c};
pub use effects::Effects;
pub use ids::{
    AssociationId, DeviceId, Epoch, GridId, HeadId, InstanceId, LedgerId, Lsn, NodeId, ObjectId, QuiesceId, SegmentId,
    ShardId, VolumeId,
};
pub use media::MediaClass;
pub use meta::{MetaGuard, MetaReply, MetaRequest, MetaVersion};
pub use prng::Prng;
pub use slab::{Slab, Token};
pub use time::Instant;
pub use units::{BLOCK_BYTES, Key, KeyWidth, Lba, OBJECT_BLOCKS_MAX, nonzero_runs};
pub use urgency::Urgency;
