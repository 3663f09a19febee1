//! Ports for grids that are tried side by side, by one process or by many.
//!
//! They are handed out in blocks, below the range that the kernel hands out. A block is its taker's for as long as that
//! process runs, by a lock on a file that all takers on this machine share.

use std::fs::File;
use std::net::{Ipv4Addr, TcpStream};
use std::sync::{Mutex, PoisonError};

/// Ports of a block.
const BLOCK_PORTS: u16 = 16;
const PORTS_FROM: u16 = 12_000;
const BLOCKS: u16 = 1100;

/// Ports that nobody uses, for the `index`-th grid of this process: the first of a block.
pub fn free(index: u16, count: u16) -> u16 {
    free_at(Ipv4Addr::LOCALHOST, index, count)
}

/// The same at another address of this machine.
///
/// # Panics
///
/// Where none is left, or where more are wanted than a block has.
pub fn free_at(ip: Ipv4Addr, index: u16, count: u16) -> u16 {
    assert!(count <= BLOCK_PORTS, "a block has {BLOCK_PORTS} ports");
    let first = (std::process::id() % 110) as u16 * 10 + index;
    let blocks = (first..first + BLOCKS).map(|block| block % BLOCKS);
    // Whoever listens there now was left over. Asked by calling there: a listener of our own may be held for a moment
    // longer by what another test is just starting.
    let is_free = |base: &u16| (*base..base + BLOCK_PORTS).all(|port| TcpStream::connect((ip, port)).is_err());
    let mut bases = blocks.filter(|block| take(*block)).map(|block| PORTS_FROM + block * BLOCK_PORTS);
    bases.find(is_free).expect("free ports")
}

/// The first three numbers of addresses of this machine that nobody uses, with a dot behind them: any port there is free.
pub fn net() -> String {
    let block = (free(0, 1) - PORTS_FROM) / BLOCK_PORTS;
    format!("127.{}.{}.", 64 + block / 256, block % 256)
}

/// Takes a block, unless it is that of somebody who runs still.
fn take(block: u16) -> bool {
    static OURS: Mutex<Vec<File>> = Mutex::new(Vec::new());
    let dir = std::env::temp_dir().join(format!("holdfast-test-ports-{}", rustix::process::geteuid().as_raw()));
    std::fs::create_dir_all(&dir).expect("a directory for locks");
    let file = File::create(dir.join(block.to_string())).expect("a file to lock");
    let is_ours = file.try_lock().is_ok();
    if is_ours {
        OURS.lock().unwrap_or_else(PoisonError::into_inner).push(file);
    }
    is_ours
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_takers_have_the_same_block() {
        let (one, two) = (free(0, 4), free(0, 4));
        assert!(one.abs_diff(two) >= BLOCK_PORTS, "{one} and {two}");
        assert_ne!(net(), net());
    }
}
