//! What nodes answer of shards: a read that is to be checked brings what was put, or a refusal (invariant 8). So does one
//! that is not, but for what a disk was made to damage.
//!
//! Role: the world shows it every request that a node's process takes and every reply that leaves it.

use holdfast_base::{BlockCrc, DeviceId, ShardId, block_crcs};
use holdfast_format::wire::{Reply, Request};
use holdfast_store::PeerId;
use std::collections::BTreeMap;

struct Asked {
    device: DeviceId,
    shard: ShardId,
    block: u32,
    checked: bool,
}

#[derive(Default)]
pub struct ShardWitness {
    /// Checksums of the blocks of every shard that was ever put: an id never has two contents.
    put: BTreeMap<ShardId, Vec<BlockCrc>>,
    asked: BTreeMap<(PeerId, u64), Asked>,
    broken: Option<String>,
}

impl ShardWitness {
    pub fn on_request(&mut self, peer: PeerId, token: u64, request: &Request, payload: &[u8]) {
        match request {
            Request::PutShard { shard, header_blocks, .. } => {
                let header_bytes = *header_blocks as usize * holdfast_base::BLOCK_BYTES;
                if let Some(data) = payload.get(header_bytes..) {
                    self.put.entry(*shard).or_insert_with(|| block_crcs(data));
                }
            }
            Request::ReadShard { device, shard, block, checked, .. } => {
                let asked = Asked { device: *device, shard: *shard, block: *block, checked: *checked };
                self.asked.insert((peer, token), asked);
            }
            _ => {}
        }
    }

    /// `may_lie` tells whether bytes that come from a device of the node unchecked may be wrong.
    pub fn on_reply(
        &mut self,
        (peer, token): (PeerId, u64),
        reply: &Reply,
        payload: &[u8],
        may_lie: impl FnOnce(DeviceId) -> bool,
    ) {
        let Some(Asked { device, shard, block, checked }) = self.asked.remove(&(peer, token)) else { return };
        let Reply::Shard { blocks } = reply else { return };
        let known = self.put.get(&shard).and_then(|crcs| crcs.get(block as usize..(block + blocks) as usize));
        if known != Some(&block_crcs(payload)) && (checked || !may_lie(device)) {
            let what = format!("a node answered blocks {block}+{blocks} of {shard:?} by bytes that were not put");
            self.broken.get_or_insert(what);
        }
    }

    pub fn take_broken(&mut self) -> Option<String> {
        self.broken.take()
    }
}
