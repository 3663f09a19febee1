//! Work on blocks that takes too long for a reactor: whoever has a thread to spare does it.
//!
//! What it comes to follows from the task and the blocks alone.

use crate::segment::units::{NotPacked, PackedPayload, Way, pack_blocks};
use holdfast_base::{BLOCK_BYTES, Buf};
use holdfast_cipher::PrintKey;
use holdfast_format::talk::Print;

/// What is to be done with blocks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Task {
    Pack(Way),
    /// Fingerprints of each, under this key.
    Print(PrintKey),
}

/// What came of it.
#[derive(Clone, Debug)]
pub enum Worked {
    Packed(Result<PackedPayload, NotPacked>),
    /// Nothing, where nobody came to it.
    Printed(Option<Vec<Print>>),
}

impl Task {
    /// Does it. `blocks`: whole blocks, in pieces of any length.
    pub fn work(&self, blocks: &[Buf]) -> Worked {
        match self {
            Task::Pack(way) => Worked::Packed(pack_blocks(*way, blocks)),
            Task::Print(key) => {
                let each = blocks.iter().flat_map(|piece| piece.chunks_exact(BLOCK_BYTES));
                Worked::Printed(Some(each.map(|block| Print(key.fingerprint_of(block))).collect()))
            }
        }
    }

    /// As nobody came to it.
    pub fn not_done(&self) -> Worked {
        match self {
            Task::Pack(_) => Worked::Packed(Err(NotPacked::NotTried)),
            Task::Print(_) => Worked::Printed(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_have_prints_in_their_order_however_they_are_cut() {
        let bytes: Vec<u8> = (0..3 * BLOCK_BYTES).map(|i| (i / 7) as u8).collect();
        let task = Task::Print(PrintKey::new([7; 32]));
        let prints = |pieces: &[Buf]| match task.work(pieces) {
            Worked::Printed(Some(prints)) => prints,
            other => panic!("{other:?}"),
        };
        let whole = prints(&[Buf::copy_from(&bytes)]);
        let (one, rest) = bytes.split_at(BLOCK_BYTES);
        assert_eq!((whole.len(), &whole), (3, &prints(&[Buf::copy_from(one), Buf::copy_from(rest)])));
        assert!(whole[0] != whole[1] && whole[1] != whole[2]);
        assert!(matches!(task.not_done(), Worked::Printed(None)));
    }
}
