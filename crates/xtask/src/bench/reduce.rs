//! `./x bench --reduce`: what compression saves of this machine's own files, and what it costs, on volumes of one grid which
//! differ in that alone.

use super::grid::{Grid, Shape, USUAL};
use super::paired::{OLTP_8K, READ_8K, READ_8K_ALONE, READ_64K, Run, Target, WRITE_1M, compare, fill};
use crate::tools;
use anyhow::{Context, Result, bail};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const VOLUME_MIB: u64 = 512;
const CORPUS_MIB: u64 = 512;
const SHAPE: Shape = Shape { device_mib: 3072, ..USUAL };
const LAYOUT: &str = "parity:2+1";

/// Packed in these ways; the first is what the others are compared with.
const WAYS: [&str; 3] = ["off", "lz4", "auto"];

/// Half of each block is zeroes.
const HALF: &str = "--buffer_compress_percentage=50";

/// What guests write is packed when they rest: at most so long.
const PACKED_WITHIN: Duration = Duration::from_secs(3600);

pub fn run(arguments: &[String]) -> Result<()> {
    let run = Run::from(arguments, "./x bench --reduce")?;
    let dir = std::env::temp_dir().join(format!("holdfast-bench-{}-reduce", std::process::id()));
    let grid = Grid::make(&run.binary, dir, SHAPE, &[])?;
    stored(&grid)?;
    for (data, is_half) in [("half of which is zeroes", true), ("that nothing makes smaller", false)] {
        for way in WAYS {
            create(&grid, way, VOLUME_MIB, way)?;
        }
        let mut targets = WAYS.map(|way| Target::volume(way, &grid, way));
        if is_half {
            targets
                .iter_mut()
                .for_each(|target| target.arguments.extend([HALF.to_string(), "--refill_buffers=1".into()]));
        }
        targets.iter().try_for_each(|target| fill(target, VOLUME_MIB))?;
        println!("## Blocks {data}\n");
        compare(&targets, &[OLTP_8K, READ_8K, READ_8K_ALONE, READ_64K, WRITE_1M], &run, VOLUME_MIB, true)?;
        WAYS.iter().try_for_each(|way| grid.run(&["volume", "delete", way, "--now"]).map(drop))?;
    }
    Ok(())
}

fn create(grid: &Grid, name: &str, mib: u64, way: &str) -> Result<()> {
    let size = format!("{mib}MiB");
    grid.run(&["volume", "create", name, "--size", &size, "--layout", LAYOUT, "--compress", way]).map(drop)
}

/// Programs and texts of this machine, in each way; all that segments take counts, but copies and parity.
fn stored(grid: &Grid) -> Result<()> {
    let corpus = grid.around().join("corpus");
    make_corpus(&corpus)?;
    println!("## {CORPUS_MIB} MiB of this machine's files, as tar has them\n");
    println!(
        "| packed | stored, of what guests see | with maps | not packed | seconds |\n| --- | --- | --- | --- | --- |"
    );
    for way in &WAYS[1..] {
        let name = format!("corpus-{way}");
        create(grid, &name, CORPUS_MIB, way)?;
        tools::run(Command::new("nbdcopy").arg("--request-size=65536").arg(&corpus).arg(grid.uri(&name)))?;
        let begun = Instant::now();
        grid.settle()?;
        let space = packed(grid, &name)?;
        let bytes = |key: &str| space[key].as_f64().with_context(|| format!("no {key}"));
        let (shown, data) = (bytes("shown_bytes")?, bytes("data_bytes")? + bytes("padding_bytes")?);
        println!(
            "| {way} | {:.3} | {:.3} | {:.3} | {} |",
            data / shown,
            (data + bytes("metadata_bytes")?) / shown,
            bytes("plain_bytes")? / shown,
            begun.elapsed().as_secs()
        );
        grid.run(&["volume", "delete", &name, "--now"])?;
    }
    println!();
    Ok(())
}

/// When nothing more is packed.
pub(super) fn packed(grid: &Grid, name: &str) -> Result<serde_json::Value> {
    let end = Instant::now() + PACKED_WITHIN;
    let look = || -> Result<_> {
        let volume = grid.volume(name)?;
        let live = &volume["live"];
        Ok((live["counters"]["repacked_bytes"].as_u64(), live["space"].clone()))
    };
    let (mut last, mut since) = (look()?, Instant::now());
    while since.elapsed() < Duration::from_secs(30) {
        if Instant::now() >= end {
            bail!("{name} is still being packed after {} s", PACKED_WITHIN.as_secs());
        }
        std::thread::sleep(Duration::from_secs(1));
        let now = look()?;
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
    Ok(last.1)
}

fn make_corpus(path: &Path) -> Result<()> {
    let file = std::fs::File::create(path).with_context(|| format!("cannot make {}", path.display()))?;
    let mut tar = Command::new("tar")
        .args(["--sort=name", "-cf", "-", "-C", "/usr", "bin", "share", "lib"])
        .stderr(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run tar")?;
    let mut all = std::io::Read::take(tar.stdout.take().context("tar says nothing")?, CORPUS_MIB << 20);
    let copied = std::io::copy(&mut all, &mut &file);
    drop(all);
    tar.wait()?;
    if copied? < CORPUS_MIB << 20 {
        bail!("/usr has less than {CORPUS_MIB} MiB");
    }
    Ok(())
}
