//! What is asked of a volume: requests drawn from a seed, hot and cold, small and large, aligned and not; and beside them
//! clients that read it in order, from one end to the other, with writes just before them.

use crate::cell::CELL_BYTES;
use holdfast_base::Prng;

const CELL: u64 = CELL_BYTES as u64;
const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;

/// Longest request: twice the size from which writes bypass the log.
pub const REQUEST_BYTES_MAX: u64 = 2 * MIB;

/// Part of the volume that half of all requests go to, so that they meet.
const HOT_BYTES: u64 = 4 * MIB;

/// Longest write to a volume that a database lies on, as one in two does: then what was written side by side lies apart.
const DATABASE_BYTES_MAX: u64 = 8 * KIB;

/// What clients that read in order ask for at a time, each its own.
const IN_ORDER: [u64; 2] = [64 * KIB, 16 * KIB];

/// How far before one of them a write comes that is to meet what was read ahead for it.
const BEFORE_BYTES: u64 = 2 * MIB;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Read,
    Write { fua: bool },
    Trim,
    WriteZeroes,
    Flush,
}

impl Kind {
    pub fn changes(self) -> bool {
        matches!(self, Kind::Write { .. } | Kind::Trim | Kind::WriteZeroes)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Drawn {
    pub kind: Kind,
    pub offset: u64,
    pub len: u64,
}

/// Draws requests for one volume.
pub struct Workload {
    random: Prng,
    size_bytes: u64,
    /// Blocks of 4 KiB at random, seven reads to three writes.
    is_of_fleet: bool,
    write_bytes_max: u64,
    /// Where the sequential stream is.
    stream_at: u64,
    /// Where clients that read in order are.
    in_order_at: [u64; IN_ORDER.len()],
}

impl Workload {
    pub fn new(mut random: Prng, size_bytes: u64) -> Workload {
        assert!(size_bytes >= 2 * REQUEST_BYTES_MAX, "a volume of {size_bytes} bytes is too small for this workload");
        let write_bytes_max = if random.chance(500) { DATABASE_BYTES_MAX } else { REQUEST_BYTES_MAX };
        let in_order_at = [0, size_bytes / 2];
        Workload { random, size_bytes, is_of_fleet: false, write_bytes_max, stream_at: 0, in_order_at }
    }

    /// What a virtual machine of vmfleet asks for.
    pub fn of_fleet(random: Prng, size_bytes: u64) -> Workload {
        Workload { is_of_fleet: true, ..Workload::new(random, size_bytes) }
    }

    pub fn draw(&mut self) -> Drawn {
        if self.is_of_fleet {
            let kind = if self.random.chance(700) { Kind::Read } else { Kind::Write { fua: false } };
            let (len, blocks) = (4 * KIB, self.size_bytes / (4 * KIB));
            return Drawn { kind, offset: self.random.below(blocks) * len, len };
        }
        let kind = self.kind();
        if kind == Kind::Flush {
            return Drawn { kind, offset: 0, len: 0 };
        }
        if kind == Kind::Read && self.random.chance(600) {
            return self.read_in_order();
        }
        let len = self.len(kind);
        let offset = self.offset(kind, len);
        assert!(len > 0 && offset + len <= self.size_bytes, "{kind:?} of {len} bytes at {offset} leaves the volume");
        Drawn { kind, offset, len }
    }

    fn kind(&mut self) -> Kind {
        match self.random.below(100) {
            0..45 => Kind::Read,
            45..93 => Kind::Write { fua: self.random.chance(100) },
            93..96 => Kind::Trim,
            96..99 => Kind::WriteZeroes,
            _ => Kind::Flush,
        }
    }

    fn read_in_order(&mut self) -> Drawn {
        let client = self.random.below(IN_ORDER.len() as u64) as usize;
        let offset = self.in_order_at[client];
        let len = IN_ORDER[client].min(self.size_bytes - offset);
        self.in_order_at[client] = (offset + len) % self.size_bytes;
        Drawn { kind: Kind::Read, offset, len }
    }

    /// Mostly what databases and file systems send; some larger, some that bypass the log; one in five of no round size.
    fn len(&mut self, kind: Kind) -> u64 {
        let whole = match self.random.below(100) {
            0..70 => *self.random.pick(&[4 * KIB, 8 * KIB, 8 * KIB, 16 * KIB]),
            70..94 => *self.random.pick(&[32 * KIB, 64 * KIB, 128 * KIB]),
            94..98 => 512 * KIB,
            _ => *self.random.pick(&[MIB, REQUEST_BYTES_MAX]),
        };
        let whole = if matches!(kind, Kind::Write { .. }) { whole.min(self.write_bytes_max) } else { whole };
        if !self.random.chance(200) {
            return whole;
        }
        match kind {
            Kind::Read => self.random.between(1, whole),
            _ => self.random.between(1, whole / CELL) * CELL,
        }
    }

    fn offset(&mut self, kind: Kind, len: u64) -> u64 {
        let room = self.size_bytes - len;
        let at = match self.random.below(10) {
            0..5 => self.random.below(HOT_BYTES.min(room) + 1),
            5 => {
                let at = if self.stream_at > room { 0 } else { self.stream_at };
                self.stream_at = at + len;
                at
            }
            6 if kind != Kind::Read => {
                (self.random.pick(&self.in_order_at) + self.random.below(BEFORE_BYTES)).min(room)
            }
            _ => self.random.below(room + 1),
        };
        let step = match (kind, self.random.below(10)) {
            (Kind::Read, 0) => 1,
            (_, 0..2) => CELL,
            (_, 2) => 512,
            _ => 4 * KIB,
        };
        at - at % step
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_stay_inside_and_come_in_all_kinds() {
        let mut workload = Workload::new(Prng::new(1), 64 * MIB);
        let (mut unaligned, mut large, mut kinds, mut turns) = (0, 0, [0; 5], 0);
        for _ in 0..10_000 {
            let drawn = workload.draw();
            kinds[match drawn.kind {
                Kind::Read => 0,
                Kind::Write { .. } => 1,
                Kind::Trim => 2,
                Kind::WriteZeroes => 3,
                Kind::Flush => 4,
            }] += 1;
            if drawn.kind.changes() {
                assert_eq!((drawn.offset % CELL, drawn.len % CELL), (0, 0));
            }
            unaligned += u32::from(!drawn.offset.is_multiple_of(4096));
            large += u32::from(drawn.len >= MIB);
            turns += u32::from(drawn.kind == Kind::Read && drawn.offset == 0 && IN_ORDER.contains(&drawn.len));
        }
        assert!(kinds.iter().all(|n| *n > 50), "{kinds:?}");
        assert!(unaligned > 1000 && large > 50, "{unaligned} unaligned, {large} large");
        assert!(turns > 1, "nobody reads all of it in order");
    }
}
