//! Peer rebuild: at the order of a volume's owner the node reads from other nodes what gives a shard that is lost, or
//! is to move here, and puts it on one of its devices, as if the owner had sent it. So what is made again does not pass
//! through the owner's host. Sources are read in pieces, [`PIECES_AHEAD`] at a time: guests' requests to any of the
//! nodes wait behind one piece, not behind a shard.
//!
//! States of a rebuild: waiting for pieces → put (from then on an ordinary put) | refused (a source was refused, is
//! lost, or late; the order makes no sense). A refusal means that nothing was put: the owner may do it in another way.
//!
//! Invariants
//! 1. Nothing is put later than [`MAKE_MS`] after the order came, nor when who gave it is gone.
//! 2. Nothing is put after a request of the same owner that deletes it, or drops its volume.
//!
//! Limits: [`REBUILDS_MAX`] at a time; more are refused as `Busy`.

use crate::api::{AskToken, Effect, PeerId};
use crate::io::Client;
use crate::node::Node;
use holdfast_base::{
    BLOCK_BYTES, BlockCrc, Buf, BufMut, DeviceId, Effects, Epoch, Instant, ShardId, Slab, Token, VolumeId,
};
use holdfast_base::{block_crcs, buf};
use holdfast_erasure::Code;
use holdfast_format::segment::ShardHeader;
use holdfast_format::wire::{MAKE_MS, Refusal, Reply, Request, ShardSource};
use std::collections::VecDeque;
use std::time::Duration;

/// Each holds a shard, and pieces of its sources.
const REBUILDS_MAX: usize = 8;

/// What is asked of a source at a time.
const PIECE_BLOCKS: u32 = 64;

/// Pieces of a shard that are asked for and not made yet.
const PIECES_AHEAD: usize = 2;

/// Sources of all that are being made: more shards than any code has.
const ASKS_MAX: usize = REBUILDS_MAX * PIECES_AHEAD * u8::MAX as usize;

/// What the owner wants, from a [`Request::MakeShard`].
struct Order {
    client: Client,
    device: DeviceId,
    volume: VolumeId,
    epoch: Epoch,
    shard: ShardId,
}

struct PeerRebuild {
    order: Order,
    /// Of the shard `header_of`.
    header: ShardHeader,
    sources: Vec<ShardSource>,
    /// The shard's data, as far as it is made.
    data: BufMut,
    crcs: Vec<BlockCrc>,
    /// What is asked for next.
    next_block: u32,
    pieces: VecDeque<Piece>,
    until: Instant,
}

/// The same blocks of each source.
struct Piece {
    block: u32,
    blocks: u32,
    got: Vec<Option<Buf>>,
}

/// What a question to another node is for.
struct Ask {
    rebuild: Token,
    block: u32,
    source: usize,
}

pub(crate) struct PeerRebuilds {
    rebuilds: Slab<PeerRebuild>,
    asks: Slab<Ask>,
}

impl PeerRebuilds {
    pub fn new() -> PeerRebuilds {
        PeerRebuilds { rebuilds: Slab::new(REBUILDS_MAX), asks: Slab::new(ASKS_MAX) }
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        self.rebuilds.iter().map(|(_, rebuild)| rebuild.until).min()
    }

    /// Ends it; answers that are still to come find nothing.
    fn remove(&mut self, token: Token) -> Option<PeerRebuild> {
        let asked: Vec<Token> = self.asks.iter().filter(|(_, ask)| ask.rebuild == token).map(|(ask, _)| ask).collect();
        for ask in asked {
            self.asks.remove(ask);
        }
        self.rebuilds.remove(token)
    }
}

impl Node {
    /// Takes a [`Request::MakeShard`].
    pub(crate) fn on_make(
        &mut self,
        now: Instant,
        client: Client,
        request: Request,
        header: &Buf,
        out: &mut Effects<Effect>,
    ) {
        let Request::MakeShard { device, volume, epoch, shard, header_of, sources } = request else {
            unreachable!("the caller has looked")
        };
        let order = Order { client, device, volume, epoch, shard };
        let header = ShardHeader::decode(ShardId { index: header_of, ..shard }, header).ok();
        let header = header.filter(|header| suffices(header, shard, &sources));
        let refusal = match (self.find(now, device), header) {
            (Err(refusal), _) => refusal,
            (Ok(_), None) => Refusal::Invalid,
            // Whether it is sound nobody has looked; and who replaces it has to have all of the new one before.
            (Ok(slot), _) if self.devices[&slot].has_shard(shard) => Refusal::Busy,
            (Ok(_), Some(_)) if self.rebuilds.rebuilds.is_full() => Refusal::Busy,
            (Ok(_), Some(header)) => return self.begin_rebuild(now, order, header, sources, out),
        };
        refuse(&order, refusal, out);
    }

    fn begin_rebuild(
        &mut self,
        now: Instant,
        order: Order,
        header: ShardHeader,
        sources: Vec<ShardSource>,
        out: &mut Effects<Effect>,
    ) {
        let blocks = header.geometry.shard_blocks() as usize;
        let token = self.rebuilds.rebuilds.insert(PeerRebuild {
            order,
            header,
            sources,
            data: BufMut::new(blocks * BLOCK_BYTES),
            crcs: Vec::with_capacity(blocks),
            next_block: 0,
            pieces: VecDeque::new(),
            until: now + Duration::from_millis(MAKE_MS),
        });
        for _ in 0..PIECES_AHEAD {
            self.ask_for_piece(token, out);
        }
    }

    /// Asks all sources for the next piece, if there is one.
    fn ask_for_piece(&mut self, token: Token, out: &mut Effects<Effect>) {
        let PeerRebuilds { rebuilds, asks } = &mut self.rebuilds;
        let rebuild = rebuilds.get_mut(token).expect("the caller has seen it");
        let block = rebuild.next_block;
        let blocks = (rebuild.header.geometry.shard_blocks() - block).min(PIECE_BLOCKS);
        if blocks == 0 {
            return;
        }
        rebuild.next_block += blocks;
        rebuild.pieces.push_back(Piece { block, blocks, got: vec![None; rebuild.sources.len()] });
        for (source, ShardSource { index, node, address, device }) in rebuild.sources.iter().enumerate() {
            let shard = ShardId { index: *index, ..rebuild.order.shard };
            let request = Request::ReadShard { device: *device, shard, block, blocks, checked: true, cached: false };
            let ask = AskToken(asks.insert(Ask { rebuild: token, block, source }).0);
            out.push(Effect::Ask { node: *node, address: address.clone(), token: ask, request });
        }
    }

    /// Another node has answered, or never will.
    pub(crate) fn on_peer_answered(
        &mut self,
        now: Instant,
        token: AskToken,
        answer: Option<(Reply, Buf)>,
        out: &mut Effects<Effect>,
    ) {
        let Some(Ask { rebuild: token, block, source }) = self.rebuilds.asks.remove(Token(token.0)) else { return };
        let rebuild = self.rebuilds.rebuilds.get_mut(token).expect("its questions end with it");
        let piece = rebuild.pieces.iter_mut().find(|piece| piece.block == block).expect("it waits for this answer");
        match answer {
            Some((Reply::Shard { .. }, bytes)) if bytes.len() == piece.blocks as usize * BLOCK_BYTES => {
                piece.got[source] = Some(bytes);
            }
            _ => return self.give_up_rebuild(token, out),
        }
        while let Some(piece) = rebuild.pieces.pop_front_if(|piece| piece.got.iter().all(Option::is_some)) {
            if rebuild.take(piece).is_none() {
                let rebuild = self.rebuilds.remove(token).expect("just seen");
                return refuse(&rebuild.order, Refusal::Invalid, out);
            }
        }
        if rebuild.crcs.len() == rebuild.header.geometry.shard_blocks() as usize {
            let rebuild = self.rebuilds.remove(token).expect("just seen");
            return self.put_rebuilt(now, rebuild, out);
        }
        for _ in rebuild.pieces.len()..PIECES_AHEAD {
            self.ask_for_piece(token, out);
        }
    }

    fn put_rebuilt(&mut self, now: Instant, rebuild: PeerRebuild, out: &mut Effects<Effect>) {
        let PeerRebuild { order, header, data, crcs, .. } = rebuild;
        if header.shard == order.shard && header.block_crcs != crcs {
            // It is said what it was, and it is not that.
            return refuse(&order, Refusal::Checksum, out);
        }
        let Order { client, device, volume, epoch, shard } = order;
        let header = ShardHeader { shard, block_crcs: crcs, ..header }.encode();
        let header_blocks = (header.len() / BLOCK_BYTES) as u32;
        let payload = buf::concat(&[Buf::copy_from(&header), data.freeze()]);
        self.on_request(now, client, Request::PutShard { device, volume, epoch, shard, header_blocks }, payload, out);
    }

    /// Gives up what a request makes pointless: shards of a volume that is dropped, or that are deleted.
    pub(crate) fn give_up_rebuilds_for(&mut self, request: &Request, out: &mut Effects<Effect>) {
        let is_over = |order: &Order| match request {
            Request::DropVolume { device, volume, .. } => order.device == *device && order.volume == *volume,
            Request::DeleteShards { device, shards, .. } => order.device == *device && shards.contains(&order.shard),
            _ => false,
        };
        self.give_up_where(is_over, out);
    }

    /// Who wanted these is gone, and would not hear of them.
    pub(crate) fn give_up_rebuilds_of(&mut self, peer: PeerId, out: &mut Effects<Effect>) {
        self.give_up_where(|order| order.client.peer == peer, out);
    }

    fn give_up_where(&mut self, is_over: impl Fn(&Order) -> bool, out: &mut Effects<Effect>) {
        let over: Vec<Token> = self
            .rebuilds
            .rebuilds
            .iter()
            .filter(|(_, rebuild)| is_over(&rebuild.order))
            .map(|(token, _)| token)
            .collect();
        for token in over {
            self.give_up_rebuild(token, out);
        }
    }

    fn give_up_rebuild(&mut self, token: Token, out: &mut Effects<Effect>) {
        if let Some(rebuild) = self.rebuilds.remove(token) {
            refuse(&rebuild.order, Refusal::Busy, out);
        }
    }

    /// Gives up what has waited for too long.
    pub(crate) fn end_late_rebuilds(&mut self, now: Instant, out: &mut Effects<Effect>) {
        let is_late = |rebuild: &PeerRebuild| rebuild.until <= now;
        let late: Vec<Token> =
            self.rebuilds.rebuilds.iter().filter(|(_, rebuild)| is_late(rebuild)).map(|(token, _)| token).collect();
        for token in late {
            self.give_up_rebuild(token, out);
        }
    }
}

fn refuse(order: &Order, refusal: Refusal, out: &mut Effects<Effect>) {
    order.client.reply(Reply::Refused(refusal), Vec::new(), out);
}

/// Whether the shard follows from these.
fn suffices(header: &ShardHeader, shard: ShardId, sources: &[ShardSource]) -> bool {
    let geometry = &header.geometry;
    if !geometry.is_valid() || shard.index >= geometry.shard_count() {
        return false;
    }
    let width = geometry.code_width();
    let is_twin =
        |source: &ShardSource| source.index < geometry.shard_count() && source.index % width == shard.index % width;
    if let [only] = sources
        && is_twin(only)
    {
        return true;
    }
    let is_fellow = |source: &ShardSource| source.index / width == shard.index / width && source.index != shard.index;
    let is_once = |(at, source): (usize, &ShardSource)| sources[..at].iter().all(|other| other.index != source.index);
    geometry.parity > 0
        && sources.len() == usize::from(geometry.data)
        && sources.iter().all(is_fellow)
        && sources.iter().enumerate().all(is_once)
}

impl PeerRebuild {
    /// Makes the blocks that follow from a piece of each source; `None` where they don't.
    fn take(&mut self, piece: Piece) -> Option<()> {
        let geometry = &self.header.geometry;
        let (width, want) = (geometry.code_width(), self.order.shard.index % geometry.code_width());
        let positions = self.sources.iter().map(|source| source.index % width);
        let got: Vec<(u8, &[u8])> = positions.zip(piece.got.iter().flatten().map(|bytes| &**bytes)).collect();
        let from = piece.block as usize * BLOCK_BYTES;
        let bytes = &mut self.data[from..from + piece.blocks as usize * BLOCK_BYTES];
        match got[..] {
            [(position, twin)] if position == want => bytes.copy_from_slice(twin),
            _ => Code::new(geometry.data, geometry.parity).ok()?.reconstruct(&got, want, bytes).ok()?,
        }
        self.crcs.extend_from_slice(&block_crcs(bytes));
        Some(())
    }
}
