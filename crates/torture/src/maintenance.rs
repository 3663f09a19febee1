//! Maintenance of data under the checking workload: a volume goes over to other layouts and back, and bits of a device
//! flip until scrubs find no more damage.

use crate::engine::Control;
use anyhow::{Context, Result, ensure};
use holdfast_base::{BLOCK_BYTES, BufMut, Prng};
use holdfast_lab::grid::{Grid, NodeAction};
use rustix::fs::OFlags;
use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

/// Everything is in its new layout, or whole again, within this.
const CARE_MAX: Duration = Duration::from_secs(300);

const LOOK_PACE: Duration = Duration::from_millis(200);

/// Counts shards of a volume that were found damaged.
const DAMAGE: &str = "checksum_errors";

/// How long a layout is written to before the next one.
const STAY: Duration = Duration::from_secs(5);

/// A volume of `parity:2+1` on six nodes becomes each of these in turn.
pub const LAYOUTS: [&str; 3] = ["mirror:2", "parity:4+2", "parity:2+1"];

/// How long each took, from the command to all of it being there.
///
/// # Errors
///
/// What is refused, or is not done within [`CARE_MAX`], with the layout.
pub fn change_layouts(grid: &Grid, control: &Control, volume: &str) -> Result<Vec<(&'static str, Duration)>> {
    let mut took = Vec::new();
    control.rest(STAY);
    for layout in LAYOUTS {
        control.fault(format!("volume set --layout {layout}"));
        let since = Instant::now();
        grid.run(&["volume", "set", volume, "--layout", layout])?;
        let now = grid.volume(volume)?["layout"].clone();
        ensure!(now == layout, "the volume is {now}, not {layout}");
        wait_whole(grid, control).with_context(|| format!("on the way to {layout}"))?;
        took.push((layout, since.elapsed()));
        control.rest(STAY);
    }
    Ok(took)
}

/// What came of flipped bits.
#[derive(Clone, Copy, Debug)]
pub struct Damage {
    pub bits: u64,
    /// Of shards that were found damaged.
    pub found: u64,
    /// From the flips to the end of the first tour that found nothing.
    pub took: Duration,
}

/// Flips so many bits at random places of a device, all but its first 64 KiB, and waits until nothing is found for longer than
/// a scrub's tour takes.
///
/// # Errors
///
/// No damage is found at all, or still some after [`CARE_MAX`].
pub fn flip_bits(
    grid: &Grid,
    control: &Control,
    (volume, device): (&str, &Path),
    (bits, tour): (u64, Duration),
    random: &mut Prng,
) -> Result<Damage> {
    const SPARED: u64 = 64 << 10;
    control.rest(STAY);
    let before = grid.counter(volume, DAMAGE)?;
    control.fault(format!("{bits} bits of {} flip", device.display()));
    let since = Instant::now();
    // Past the page cache, as the node writes: where the two meet the kernel gives the node an I/O error.
    let file = OpenOptions::new().read(true).write(true).custom_flags(OFlags::DIRECT.bits() as i32).open(device);
    let file = file.with_context(|| format!("cannot open {}", device.display()))?;
    let len = file.metadata().context("a device tells no length")?.len();
    let mut block = BufMut::new(BLOCK_BYTES);
    for _ in 0..bits {
        let at = random.between(SPARED, len - 1);
        let (from, byte) = (at - at % BLOCK_BYTES as u64, at as usize % BLOCK_BYTES);
        file.read_exact_at(&mut block, from).context("cannot read from a device")?;
        block[byte] ^= 1 << random.below(8);
        file.write_all_at(&block, from).context("cannot write to a device")?;
    }
    file.sync_all().context("cannot write to a device")?;
    let (mut found, mut found_at) = (0, Instant::now());
    // The tour that is under way may have passed a place already.
    while found_at.elapsed() < tour * 2 && !control.stopped() {
        ensure!(since.elapsed() < CARE_MAX, "damage is still found {} s after bits flipped", CARE_MAX.as_secs());
        std::thread::sleep(LOOK_PACE);
        let now = grid.counter(volume, DAMAGE)?.saturating_sub(before);
        if now > found {
            (found, found_at) = (now, Instant::now());
        }
    }
    ensure!(found > 0 || control.stopped(), "no scrub has found any of the damage");
    wait_whole(grid, control)?;
    Ok(Damage { bits, found, took: since.elapsed() })
}

/// Kills a node and lets the workload go on without it.
pub fn lose(grid: &Grid, control: &Control, node: u32) -> Result<()> {
    control.fault(format!("node {node} is killed"));
    grid.node(NodeAction::Kill, node)?;
    control.rest(STAY);
    Ok(())
}

/// Until all is in the layout that it should be in, with all its copies, or the engine stops.
pub(crate) fn wait_whole(grid: &Grid, control: &Control) -> Result<()> {
    let since = Instant::now();
    while let Some(what) = grid.state()?.lacks() {
        if control.stopped() {
            break;
        }
        ensure!(since.elapsed() < CARE_MAX, "after {} s: {what}", CARE_MAX.as_secs());
        std::thread::sleep(LOOK_PACE);
    }
    Ok(())
}
