//! Blocks of all kinds come back as they were; no unit whatsoever makes the packer panic, or stick.

use holdfast_base::{BLOCK_BYTES, Prng};
use holdfast_compress::{Packed, Packer, is_zero};
use holdfast_format::packing::{Codec, GRANULE_BYTES, StoredLength};
use proptest::prelude::*;

type Block = [u8; BLOCK_BYTES];

const WORDS: [&str; 12] =
    ["error", " ", "\n", "the ", "volume ", "10.0.0.", "attached", "2026-", "{\"id\":", "}, ", "\t", "GET /"];

/// Some kinds of what volumes hold.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Random,
    Text,
    Zero,
    /// Random up to somewhere, then all alike.
    Half(usize),
    /// Records of 16 bytes: a counter, and few bits of noise.
    Records,
    /// A short piece, again and again.
    Repeated(usize),
}

fn block(kind: Kind, seed: u64) -> Block {
    let mut prng = Prng::new(seed);
    let mut block = [0; BLOCK_BYTES];
    match kind {
        Kind::Zero => {}
        Kind::Random => block.fill_with(|| prng.below(256) as u8),
        Kind::Half(random) => {
            let fill = prng.below(256) as u8;
            block[..random].fill_with(|| prng.below(256) as u8);
            block[random..].fill(fill);
        }
        Kind::Text => {
            let mut at = 0;
            while at < BLOCK_BYTES {
                let number = prng.below(1000).to_string();
                let word = match prng.below(4) {
                    0 => number.as_str(),
                    _ => WORDS[prng.below(WORDS.len() as u64) as usize],
                };
                let len = word.len().min(BLOCK_BYTES - at);
                block[at..at + len].copy_from_slice(&word.as_bytes()[..len]);
                at += len;
            }
        }
        Kind::Records => {
            for (n, record) in block.chunks_mut(16).enumerate() {
                record[..8].copy_from_slice(&(seed.wrapping_add(n as u64)).to_le_bytes());
                record[12] = prng.below(16) as u8;
            }
        }
        Kind::Repeated(len) => {
            let piece: Vec<u8> = (0..len).map(|_| prng.below(256) as u8).collect();
            block.iter_mut().zip(piece.iter().cycle()).for_each(|(byte, of)| *byte = *of);
        }
    }
    block
}

fn blocks() -> impl Strategy<Value = Block> {
    let kind = prop_oneof![
        Just(Kind::Random),
        Just(Kind::Text),
        Just(Kind::Zero),
        (0..=BLOCK_BYTES).prop_map(Kind::Half),
        Just(Kind::Records),
        (1..2000usize).prop_map(Kind::Repeated),
    ];
    (kind, any::<u64>()).prop_map(|(kind, seed)| block(kind, seed))
}

fn codecs() -> impl Strategy<Value = Codec> {
    prop_oneof![Just(Codec::Lz4), Just(Codec::Zstd)]
}

fn packed(packer: &mut Packer, codec: Codec, block: &Block) -> Option<(StoredLength, Vec<u8>)> {
    match packer.pack(codec, block) {
        Packed::Raw => None,
        Packed::Unit { length, bytes } => Some((length, bytes.to_vec())),
    }
}

#[test]
fn each_kind_is_packed_where_that_is_worth_it() {
    let mut packer = Packer::new();
    let mut granules = |kind, codec| {
        let length = packed(&mut packer, codec, &block(kind, 5)).map(|(length, _)| length.granules());
        length.unwrap_or(64)
    };
    for codec in [Codec::Lz4, Codec::Zstd] {
        assert_eq!(granules(Kind::Random, codec), 64);
        assert_eq!(granules(Kind::Zero, codec), 1);
        assert!((32..40).contains(&granules(Kind::Half(BLOCK_BYTES / 2), codec)));
        assert!((10..50).contains(&granules(Kind::Text, codec)));
    }
    assert!(granules(Kind::Text, Codec::Zstd) < granules(Kind::Text, Codec::Lz4), "only zstd counts letters");
}

proptest! {
    #[test]
    fn blocks_come_back(blocks in proptest::collection::vec((blocks(), codecs()), 1..8)) {
        let mut packer = Packer::new();
        for (block, codec) in &blocks {
            prop_assert_eq!(is_zero(block), block.iter().all(|byte| *byte == 0));
            let Some((length, unit)) = packed(&mut packer, *codec, block) else { continue };
            prop_assert_eq!((length.codec(), length.granules() as usize * GRANULE_BYTES), (*codec, unit.len()));
            prop_assert!(unit.len() <= BLOCK_BYTES / 8 * 7);
            prop_assert!(packer.open(*codec, &unit) == Ok(block));
            let mut into = [1; BLOCK_BYTES];
            prop_assert_eq!(packer.open_into(*codec, &unit, &mut into), Ok(()));
            prop_assert!(&into == block);
            // What came before leaves no trace in the bytes.
            prop_assert_eq!(packed(&mut Packer::new(), *codec, block), Some((length, unit)));
        }
    }

    #[test]
    fn a_unit_that_was_cut_short_is_refused(block in blocks(), codec in codecs(), cut in 0.0f64..1.0) {
        let mut packer = Packer::new();
        if let Some((_, unit)) = packed(&mut packer, codec, &block) {
            let len = (cut * unit.len() as f64) as usize;
            prop_assert!(packer.open(codec, &unit[..len]).is_err());
            // Whole granules with an end that is right, too.
            let mut granules = unit[..len.next_multiple_of(GRANULE_BYTES)].to_vec();
            if granules.len() < unit.len() && let Some(last) = granules.last_mut() {
                *last = 1;
                prop_assert!(packer.open(codec, &granules).is_err());
            }
            prop_assert!(packer.open(codec, &unit) == Ok(&block), "and the next one is opened");
        }
    }

    #[test]
    fn flipped_bits_are_refused_or_give_a_block(
        block in blocks(),
        codec in codecs(),
        bits in proptest::collection::vec(any::<prop::sample::Index>(), 1..20),
    ) {
        let mut packer = Packer::new();
        if let Some((_, unit)) = packed(&mut packer, codec, &block) {
            let mut bad = unit.clone();
            for bit in bits {
                let bit = bit.index(unit.len() * 8);
                bad[bit / 8] ^= 1 << (bit % 8);
            }
            let mut guarded = [[7; BLOCK_BYTES]; 3];
            let opened = packer.open_into(codec, &bad, &mut guarded[1]);
            prop_assert!(guarded[0] == [7; BLOCK_BYTES] && guarded[2] == guarded[0], "bytes outside the block");
            prop_assert!(packer.open(codec, &bad).copied() == opened.map(|()| guarded[1]));
            prop_assert!(packer.open(codec, &unit) == Ok(&block), "and the next one is opened");
        }
    }

    #[test]
    fn any_bytes_are_refused_or_give_a_block(
        bytes in proptest::collection::vec(any::<u8>(), 0..600),
        granules in 0usize..70,
        filling in 0u8..70,
        codec in codecs(),
    ) {
        let mut unit = bytes;
        let cut = unit.len();
        unit.resize(granules * GRANULE_BYTES, 0);
        if cut < unit.len() {
            // An end that may be right, so that codecs get to see the rest.
            let rest = unit.len() - cut;
            let last = unit.last_mut().expect("it is longer");
            *last = if rest <= GRANULE_BYTES { rest as u8 } else { filling };
        }
        let mut packer = Packer::new();
        let mut guarded = [[7; BLOCK_BYTES]; 3];
        let opened = packer.open_into(codec, &unit, &mut guarded[1]);
        prop_assert!(guarded[0] == [7; BLOCK_BYTES] && guarded[2] == guarded[0], "bytes outside the block");
        let is_length = (1..=64).contains(&granules);
        prop_assert!(is_length || opened.is_err());
        let other = block(Kind::Text, 1);
        let (_, good) = packed(&mut packer, codec, &other).expect("text is worth it");
        prop_assert!(packer.open(codec, &good) == Ok(&other));
    }
}
