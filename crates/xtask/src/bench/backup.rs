//! `./x bench --backup`: how fast a volume of which everything changed is backed up and restored, beside reading it in
//! order. The repository is a directory on the same disk, so its writes are in the figure.

use super::grid::{Grid, USUAL};
use super::paired::Run;
use crate::tools;
use anyhow::{Context, Result};
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

const MIB: u64 = 1024;
const LAYOUT: &str = "parity:2+1";

pub fn run(arguments: &[String]) -> Result<()> {
    let run = Run::from(arguments, "./x bench --backup")?;
    let dir = std::env::temp_dir().join(format!("holdfast-bench-{}-backup", std::process::id()));
    let grid = Grid::make(&run.binary, dir, USUAL, &[])?;
    let path = |name: &str| grid.around().join(name).display().to_string();
    let (repository, source, image) = (path("repository"), path("source"), path("image"));
    std::fs::create_dir(&repository)?;
    grid.run(&["backup", "init", &repository])?;
    grid.run(&["volume", "create", "v1", "--size", &format!("{MIB}MiB"), "--layout", LAYOUT])?;
    let uri = grid.uri("v1");
    println!("## {MIB} MiB that changed, of {LAYOUT}, {} rounds\n", run.rounds);
    println!("| data | read in order | backed up | of reading | restored to a file | of reading |");
    println!("| --- | --- | --- | --- | --- | --- |");
    // The first backup is of all; those that are measured read what changed since.
    fill(Path::new(&source), 1, 0)?;
    write(&source, &uri)?;
    grid.run(&["backup", "create", &repository, "v1"])?;
    for (name, random_of_16) in [("random", 16), ("half random", 8)] {
        let mut seconds = [Vec::new(), Vec::new(), Vec::new()];
        for round in 0..run.rounds {
            fill(Path::new(&source), round as u64 + 2, 16 - random_of_16)?;
            write(&source, &uri)?;
            grid.settle()?;
            seconds[0].push(timed(|| tools::run(Command::new("nbdcopy").arg(&uri).arg("null:")))?);
            let told = timed(|| {
                let told = grid.json(&["backup", "create", &repository, "v1"])?;
                let read = told["backups"][0]["read_bytes"].as_u64().context("no figure of what was read")?;
                anyhow::ensure!(read == MIB << 20 && !told["backups"][0]["since"].is_null(), "{told}");
                Ok(())
            })?;
            seconds[1].push(told);
            seconds[2]
                .push(timed(|| grid.run(&["backup", "restore", &repository, "v1", "--image", &image]).map(drop))?);
            tools::run(Command::new("cmp").args([&source, &image]))?;
            std::fs::remove_file(&image)?;
        }
        let [reading, backing, restoring] = seconds.map(middle);
        let rate = |seconds: f64| MIB as f64 / seconds;
        println!(
            "| {name} | {:.0} MiB/s | {:.0} MiB/s | {:.2} | {:.0} MiB/s | {:.2} |",
            rate(reading),
            rate(backing),
            reading / backing,
            rate(restoring),
            reading / restoring
        );
    }
    Ok(())
}

fn middle(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

fn timed(what: impl FnOnce() -> Result<()>) -> Result<f64> {
    let begun = Instant::now();
    what()?;
    Ok(begun.elapsed().as_secs_f64())
}

fn write(source: &str, uri: &str) -> Result<()> {
    tools::run(Command::new("nbdcopy").args(["--flush", source, uri]))
}

/// Other bytes for each seed; of every 16 bytes that many are alike.
fn fill(path: &Path, seed: u64, alike: usize) -> Result<()> {
    let mut file = std::fs::File::create(path)?;
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut piece = vec![0_u8; 1 << 20];
    for _ in 0..MIB {
        for word in piece.chunks_mut(16) {
            for half in word.chunks_mut(8) {
                // xorshift64* (Vigna, 2016).
                state ^= state >> 12;
                state ^= state << 25;
                state ^= state >> 27;
                half.copy_from_slice(&state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes());
            }
            word[..alike].fill(7);
        }
        file.write_all(&piece)?;
    }
    file.sync_all()?;
    Ok(())
}
