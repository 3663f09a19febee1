//! The shards of a segment: what each of them holds of the payload, and the parity over them.

use holdfast_base::{BLOCK_BYTES, BlockCrc, Buf, BufMut, block_crcs, crc32c};
use holdfast_erasure::Code;
use holdfast_format::geometry::Geometry;

/// Of each shard of one copy: its blocks, and their checksums.
pub(super) type ShardPieces = Vec<(Vec<Buf>, Vec<BlockCrc>)>;

/// What the shards of one copy hold of a payload, and of the checksums of its blocks.
pub(super) fn pieces_of(payload: Vec<Buf>, crcs: Vec<BlockCrc>, geometry: &Geometry) -> ShardPieces {
    match geometry.parity {
        0 => vec![(gathered(payload), crcs)],
        _ => code_shards(&payload, &crcs, geometry),
    }
}

/// Handles beyond this many are gathered into one: a send takes no more, and small pieces cost more than a copy.
const HANDLES_MAX: usize = 64;

fn gathered(handles: Vec<Buf>) -> Vec<Buf> {
    if handles.len() > HANDLES_MAX { vec![holdfast_base::buf::concat(&handles)] } else { handles }
}

/// Data shards by stripes, then parity over them.
fn code_shards(payload: &[Buf], all_crcs: &[BlockCrc], geometry: &Geometry) -> ShardPieces {
    let mut pieces: ShardPieces = vec![Default::default(); usize::from(geometry.data)];
    let mut block = 0_u32;
    for buf in payload {
        let mut at = 0;
        while at < buf.len() {
            // A shard's blocks come in order.
            let run = geometry.run_from(block).min(((buf.len() - at) / BLOCK_BYTES) as u32);
            let (handles, crcs) = &mut pieces[usize::from(geometry.locate(block).position)];
            let end = at + run as usize * BLOCK_BYTES;
            handles.push(buf.slice(at..end));
            crcs.extend_from_slice(&all_crcs[block as usize..(block + run) as usize]);
            at = end;
            block += run;
        }
    }
    for (handles, crcs) in &mut pieces {
        let padding = geometry.shard_blocks() as usize - crcs.len();
        if padding > 0 {
            handles.push(Buf::zeroes(padding * BLOCK_BYTES));
            crcs.extend(std::iter::repeat_n(zero_block_crc(), padding));
        }
        *handles = gathered(std::mem::take(handles));
    }
    let shards: Vec<&[Buf]> = pieces.iter().map(|(handles, _)| &handles[..]).collect();
    let parities = parity_shards(&shards, geometry);
    pieces.extend(parities.into_iter().map(|(parity, crcs)| (vec![parity], crcs)));
    pieces
}

/// The parity shards over data shards of equal length, each in any number of pieces.
fn parity_shards(shards: &[&[Buf]], geometry: &Geometry) -> Vec<(Buf, Vec<BlockCrc>)> {
    let shard_bytes = geometry.shard_blocks() as usize * BLOCK_BYTES;
    let code = Code::new(geometry.data, geometry.parity).expect("geometries in use are valid");
    let mut parities: Vec<BufMut> = (0..geometry.parity).map(|_| BufMut::new(shard_bytes)).collect();
    let mut crcs = vec![Vec::with_capacity(geometry.shard_blocks() as usize); parities.len()];
    let mut rests: Vec<Pieces<'_>> = shards.iter().map(|handles| Pieces::new(handles)).collect();
    let mut at = 0;
    while at < shard_bytes {
        // In steps that the cache holds until they are summed.
        let longest = rests.iter().map(Pieces::run_bytes).min().expect("a code has data shards");
        let end = at + longest.min(geometry.stripe_blocks as usize * BLOCK_BYTES);
        let sources: Vec<&[u8]> = rests.iter_mut().map(|rest| rest.take(end - at)).collect();
        let mut targets: Vec<&mut [u8]> = parities.iter_mut().map(|p| &mut p[at..end]).collect();
        code.encode(&sources, &mut targets);
        for (target, crcs) in targets.iter().zip(&mut crcs) {
            crcs.extend(block_crcs(target));
        }
        at = end;
    }
    parities.into_iter().map(BufMut::freeze).zip(crcs).collect()
}

/// Handles read one after the other.
struct Pieces<'a> {
    handles: &'a [Buf],
    /// Bytes of the first handle that were taken.
    taken: usize,
}

impl<'a> Pieces<'a> {
    fn new(handles: &'a [Buf]) -> Pieces<'a> {
        Pieces { handles, taken: 0 }
    }

    /// Bytes that lie next to each other from here on.
    fn run_bytes(&self) -> usize {
        self.handles.first().map_or(0, |h| h.len() - self.taken)
    }

    fn take(&mut self, count: usize) -> &'a [u8] {
        let first = &self.handles[0];
        let bytes = &first[self.taken..self.taken + count];
        self.taken += count;
        if self.taken == first.len() {
            self.handles = &self.handles[1..];
            self.taken = 0;
        }
        bytes
    }
}

fn zero_block_crc() -> BlockCrc {
    static CRC: std::sync::OnceLock<BlockCrc> = std::sync::OnceLock::new();
    *CRC.get_or_init(|| crc32c(&[0; BLOCK_BYTES]))
}
