//! Shards that a node makes from what other nodes hold.

use crate::support::*;
use holdfast_base::{BLOCK_BYTES, Buf, Epoch, NodeId, SegmentId, ShardId, VolumeId, block_crcs};
use holdfast_erasure::Code;
use holdfast_format::geometry::{Geometry, Layout};
use holdfast_format::segment::{SegmentIndex, ShardHeader};
use holdfast_format::wire::{MAKE_MS, Refusal, Reply, Request, ShardSource};
use holdfast_store::{AskToken, Event, PeerId};
use std::time::Duration;

/// Of a shard: three pieces, the last shorter.
const BLOCKS: u32 = 150;

/// A segment in `parity:2+1`, in memory.
struct Segment {
    layout: Layout,
    shards: Vec<Vec<u8>>,
}

impl Segment {
    fn coded() -> Segment {
        let bytes =
            |seed: u8| -> Vec<u8> { (0..BLOCKS as usize * BLOCK_BYTES).map(|i| (i / 7) as u8 ^ seed).collect() };
        let (first, second) = (bytes(3), bytes(120));
        let mut parity = vec![0; first.len()];
        Code::new(2, 1).unwrap().encode(&[&first, &second], &mut [&mut parity]);
        Segment { layout: Layout::Parity { data: 2, parity: 1 }, shards: vec![first, second, parity] }
    }

    fn mirrored() -> Segment {
        let shard = Segment::coded().shards.swap_remove(1);
        Segment { layout: Layout::Mirror { copies: 3 }, shards: vec![shard; 3] }
    }

    fn id(index: u8) -> ShardId {
        ShardId { segment: SegmentId { volume: VolumeId(5), epoch: Epoch(1), counter: 9 }, index }
    }

    fn header(&self, index: u8) -> Buf {
        let data_shards = self.layout.data_shards();
        let header = ShardHeader {
            grid: GRID,
            shard: Segment::id(index),
            geometry: Geometry::new(self.layout, BLOCKS * u32::from(data_shards)),
            block_crcs: block_crcs(&self.shards[usize::from(index)]),
            index: SegmentIndex::Meta,
            payload_crcs: self.shards[..usize::from(data_shards)]
                .iter()
                .flat_map(|shard| block_crcs(shard).to_vec())
                .collect(),
            sealed: false,
            packed: None,
        };
        Buf::copy_from(&header.encode())
    }

    /// Has the node make a shard from others; the token of the request.
    fn order(&self, rig: &mut Rig, index: u8, header_of: u8, sources: &[u8]) -> u64 {
        let source = |index: &u8| ShardSource {
            index: *index,
            node: NodeId(20 + u32::from(*index)),
            address: None,
            device: device(7),
        };
        let request = Request::MakeShard {
            device: device(0),
            volume: VolumeId(5),
            epoch: Epoch(1),
            shard: Segment::id(index),
            header_of,
            sources: sources.iter().map(source).collect(),
        };
        rig.send(request, self.header(header_of))
    }

    /// Answers as the other nodes would, the last question first, until there are no more.
    fn tell_all(&self, rig: &mut Rig) {
        while let Some(ask) = rig.asks.pop() {
            self.tell(rig, ask);
        }
    }

    fn tell(&self, rig: &mut Rig, (node, token, request): (NodeId, AskToken, Request)) {
        let Request::ReadShard { device: asked, shard, block, blocks, checked: true, .. } = request else {
            panic!("{request:?}")
        };
        assert_eq!((asked, node), (device(7), NodeId(20 + u32::from(shard.index))));
        assert_eq!(shard, Segment::id(shard.index));
        let bytes = &self.shards[usize::from(shard.index)][block as usize * BLOCK_BYTES..];
        tell(rig, token, blocks, &bytes[..blocks as usize * BLOCK_BYTES]);
    }
}

fn tell(rig: &mut Rig, token: AskToken, blocks: u32, bytes: &[u8]) {
    let answer = Some((Reply::Shard { blocks }, Buf::copy_from(bytes)));
    rig.event(Event::PeerAnswered { token, answer });
}

fn answer(rig: &mut Rig, token: u64) -> Reply {
    while !rig.replies.contains_key(&token) {
        assert!(rig.complete_any() || rig.tick(), "it is never answered");
    }
    rig.replies.remove(&token).unwrap().0
}

#[test]
fn any_shard_follows_from_enough_others() {
    let (coded, mirrored) = (Segment::coded(), Segment::mirrored());
    let cases: [(&Segment, u8, u8, &[u8]); 6] = [
        (&coded, 0, 1, &[1, 2]),
        (&coded, 1, 0, &[2, 0]),
        (&coded, 2, 1, &[0, 1]),
        // A move: of one that is somewhere else.
        (&coded, 1, 1, &[1]),
        (&coded, 2, 0, &[2]),
        (&mirrored, 2, 0, &[1]),
    ];
    for (segment, index, header_of, sources) in cases {
        let mut rig = Rig::small(40);
        let token = segment.order(&mut rig, index, header_of, sources);
        assert_eq!(rig.asks.len(), 2 * sources.len(), "of two pieces");
        segment.tell_all(&mut rig);
        assert_eq!(answer(&mut rig, token), Reply::Done);
        let data = &segment.shards[usize::from(index)];
        assert_eq!(rig.read_shard(Segment::id(index), 0, BLOCKS).as_ref(), Ok(data));
        rig.restart(Crash::Power);
        assert_eq!(rig.read_shard(Segment::id(index), 0, BLOCKS).as_ref(), Ok(data));
        rig.settle();
    }
}

#[test]
fn a_source_that_is_refused_lost_or_cut_short_ends_it() {
    let segment = Segment::coded();
    let cut = Buf::copy_from(&segment.shards[1][..BLOCK_BYTES]);
    for answers in
        [None, Some((Reply::Refused(Refusal::Checksum), Buf::empty())), Some((Reply::Shard { blocks: 1 }, cut))]
    {
        let mut rig = Rig::small(41);
        let token = segment.order(&mut rig, 0, 1, &[1, 2]);
        let first = rig.asks.remove(0).1;
        rig.event(Event::PeerAnswered { token: first, answer: answers });
        assert_eq!(answer(&mut rig, token), Reply::Refused(Refusal::Busy));
        // What comes later finds nothing, and nothing was put.
        segment.tell_all(&mut rig);
        rig.settle();
        assert!(rig.list(5).is_empty());
    }
}

#[test]
fn nothing_is_put_after_its_time() {
    let segment = Segment::coded();
    let mut rig = Rig::small(42);
    let begun = rig.now;
    let token = segment.order(&mut rig, 0, 1, &[1, 2]);
    // All but the last answer.
    let last = rig.asks.remove(0);
    segment.tell_all(&mut rig);
    assert_eq!(answer(&mut rig, token), Reply::Refused(Refusal::Busy));
    assert!(rig.now.since(begun) >= Duration::from_millis(MAKE_MS));
    segment.tell(&mut rig, last);
    rig.settle();
    assert!(rig.list(5).is_empty());
}

#[test]
fn orders_that_make_no_sense_are_refused() {
    let segment = Segment::coded();
    let mut rig = Rig::small(43);
    for (index, header_of, sources) in [
        (0, 1, &[][..]),
        (0, 1, &[1]),
        (0, 1, &[1, 1]),
        (0, 1, &[0, 1]),
        (3, 1, &[1, 2]),
        (0, 1, &[1, 2, 2]),
        (0, 1, &[1, 3]),
    ] {
        let token = segment.order(&mut rig, index, header_of, sources);
        assert_eq!(answer(&mut rig, token), Reply::Refused(Refusal::Invalid), "{index} of {sources:?}");
    }
    // The header area of another shard than it is said to be.
    let request = Request::MakeShard {
        device: device(0),
        volume: VolumeId(5),
        epoch: Epoch(1),
        shard: Segment::id(0),
        header_of: 2,
        sources: vec![ShardSource { index: 0, node: NodeId(20), address: None, device: device(7) }],
    };
    assert_eq!(rig.call_with(request.clone(), segment.header(1)).0, Reply::Refused(Refusal::Invalid));
    let Request::MakeShard { volume, epoch, shard, header_of, sources, .. } = request else { unreachable!() };
    let elsewhere = Request::MakeShard { device: device(9), volume, epoch, shard, header_of, sources };
    assert_eq!(rig.call_with(elsewhere, segment.header(2)).0, Reply::Refused(Refusal::UnknownDevice));
    assert!(rig.asks.is_empty());
}

/// What lies there may be damaged; it is for the owner to have it deleted first, once it has all of the new one.
#[test]
fn what_lies_there_is_not_replaced() {
    let segment = Segment::coded();
    let mut rig = Rig::small(47);
    for expected in [Reply::Done, Reply::Refused(Refusal::Busy)] {
        let token = segment.order(&mut rig, 0, 1, &[1, 2]);
        segment.tell_all(&mut rig);
        assert_eq!(answer(&mut rig, token), expected);
    }
}

/// Otherwise the shard of a volume that is gone would stay for ever.
#[test]
fn nothing_is_put_after_its_deletion_or_the_end_of_who_wanted_it() {
    let segment = Segment::coded();
    let volume = VolumeId(5);
    let drop = Request::DropVolume { device: device(0), volume, epoch: Epoch(1) };
    let delete = Request::DeleteShards { device: device(0), volume, epoch: Epoch(1), shards: vec![Segment::id(0)] };
    for request in [Some(drop), Some(delete), None] {
        let mut rig = Rig::small(48);
        segment.order(&mut rig, 0, 1, &[1, 2]);
        match request {
            Some(request) => assert_eq!(rig.call(request), Reply::Done),
            None => rig.event(Event::PeerGone { peer: PeerId::here(1) }),
        }
        segment.tell_all(&mut rig);
        rig.settle();
        assert!(rig.list(5).is_empty());
    }
}

/// One data shard and parity: what it is computed from is one shard of another position.
#[test]
fn a_code_with_one_data_shard_is_computed_too() {
    let data = Segment::coded().shards.swap_remove(0);
    let (mut first, mut second) = (vec![0; data.len()], vec![0; data.len()]);
    Code::new(1, 2).unwrap().encode(&[&data], &mut [&mut first, &mut second]);
    let segment = Segment { layout: Layout::Parity { data: 1, parity: 2 }, shards: vec![data, first, second] };
    for (index, source) in [(0, 1), (0, 2), (1, 0), (2, 1), (2, 0)] {
        let mut rig = Rig::small(49);
        let token = segment.order(&mut rig, index, source, &[source]);
        segment.tell_all(&mut rig);
        assert_eq!(answer(&mut rig, token), Reply::Done);
        assert_eq!(rig.read_shard(Segment::id(index), 0, BLOCKS).as_ref(), Ok(&segment.shards[usize::from(index)]));
    }
}

#[test]
fn what_was_moved_has_to_be_what_its_header_says() {
    let segment = Segment::coded();
    let mut rig = Rig::small(44);
    let token = segment.order(&mut rig, 1, 1, &[1]);
    let ask = rig.asks.remove(0).1;
    let mut bytes = segment.shards[1][..64 * BLOCK_BYTES].to_vec();
    bytes[5000] ^= 1;
    tell(&mut rig, ask, 64, &bytes);
    segment.tell_all(&mut rig);
    assert_eq!(answer(&mut rig, token), Reply::Refused(Refusal::Checksum));
    assert!(rig.list(5).is_empty());
}

/// A promise that was made while sources were on their way counts.
#[test]
fn a_deposed_owner_has_nothing_put() {
    let segment = Segment::coded();
    let mut rig = Rig::small(45);
    let token = segment.order(&mut rig, 0, 1, &[1, 2]);
    rig.fence(5, 2);
    segment.tell_all(&mut rig);
    assert_eq!(answer(&mut rig, token), Reply::Refused(Refusal::StaleEpoch { promised: Epoch(2) }));
    assert!(rig.list(5).is_empty());
}

#[test]
fn no_more_are_made_at_a_time_than_memory_is_there_for() {
    let segment = Segment::coded();
    let mut rig = Rig::small(46);
    let tokens: Vec<u64> = (0..9).map(|_| segment.order(&mut rig, 0, 1, &[1, 2])).collect();
    assert_eq!(answer(&mut rig, tokens[8]), Reply::Refused(Refusal::Busy));
    segment.tell_all(&mut rig);
    for token in &tokens[..8] {
        assert_eq!(answer(&mut rig, *token), Reply::Done);
    }
    let again = segment.order(&mut rig, 1, 0, &[0, 2]);
    segment.tell_all(&mut rig);
    assert_eq!(answer(&mut rig, again), Reply::Done);
}
