//! `./x bench --sharing`: what a sharing domain saves of virtual machines' disks: of a fleet that was cloned from one disk
//! and then went its own ways, and of a machine that was installed anew like another. And what its guest pays for that.
//!
//! What the disks hold: see [`disks`](super::disks).

use super::disks::{DISK_MIB, Disk, Fleet, Package, VMS, shuffled};
use super::grid::{Grid, Shape, USUAL};
use super::paired::{OLTP_8K, READ_8K, READ_64K, Run, Target, compare};
use crate::tools;
use anyhow::Result;
use holdfast_lab::space::Taken;
use std::process::Command;
use std::time::Instant;

const SHAPE: Shape = Shape { device_mib: 3072, ..USUAL };
const LAYOUT: &str = "parity:2+1";

pub fn run(arguments: &[String]) -> Result<()> {
    let run = Run::from(arguments, "./x bench --sharing")?;
    let dir = std::env::temp_dir().join(format!("holdfast-bench-{}-sharing", std::process::id()));
    let grid = Grid::make(&run.binary, dir, SHAPE, &[])?;
    let made_of = Fleet::of_this_machine()?;
    let packages = made_of.installed();
    println!("## A machine that shares all of its disk with another, beside the same one in no domain\n");
    costs(&grid, &packages, &run)?;
    println!("## What is saved\n");
    println!("| disks | MiB written | taken, of that | beside that dead | seconds |\n| --- | --- | --- | --- | --- |");
    installed_twice(&grid, &packages)?;
    fleet(&grid, made_of)
}

/// One machine, and then another with the same packages in another order on a file system of its own.
fn installed_twice(grid: &Grid, packages: &[Package]) -> Result<()> {
    grid.run(&["sharing", "create", "twins", "--layout", LAYOUT])?;
    let (mut before, mut volumes) = (Taken::default(), vec!["twins".to_string()]);
    for name in ["first", "second"] {
        let disk = Disk::make(&grid.around().join(name))?;
        disk.unpack(&shuffled(packages, name))?;
        let written = load(&disk, grid, name)?;
        let begun = Instant::now();
        grid.run(&["volume", "set", name, "--sharing", "twins"])?;
        volumes.push(name.to_string());
        let taken = Taken::when_still(grid, &volumes)?;
        report(&format!("a machine, {name} of its kind"), written, taken.beside(before), begun);
        before = taken;
    }
    delete_all(grid, &volumes)
}

/// Both hold the same, and are packed. Of disks only blocks that hold something are taken: holes cost nothing to read.
fn costs(grid: &Grid, packages: &[Package], run: &Run) -> Result<()> {
    grid.run(&["sharing", "create", "alike", "--layout", LAYOUT])?;
    let mut written = 0;
    for (name, order, is_member) in [("apart", "one", false), ("twin", "other", true), ("member", "one", true)] {
        let disk = Disk::make(&grid.around().join(name))?;
        disk.unpack(&shuffled(packages, order))?;
        disk.close_up()?;
        written = load(&disk, grid, name)?;
        if is_member {
            grid.run(&["volume", "set", name, "--sharing", "alike"])?;
        }
    }
    let volumes = ["alike", "twin", "member", "apart"].map(str::to_string);
    Taken::when_still(grid, &volumes)?;
    let targets = [Target::volume("apart", grid, "apart"), Target::volume("in a domain", grid, "member")];
    compare(&targets, &[READ_8K, READ_64K, OLTP_8K], run, written >> 20, true)?;
    delete_all(grid, &volumes)
}

fn fleet(grid: &Grid, mut made_of: Fleet) -> Result<()> {
    let golden = made_of.golden(&grid.around().join("golden"))?;
    let (mut written, mut volumes) = (0, Vec::new());
    let begun = Instant::now();
    for vm in 0..VMS {
        let name = format!("vm{vm}");
        let disk = made_of.machine(&golden, vm, &grid.around().join(&name))?;
        written += load(&disk, grid, &name)?;
        volumes.push(name);
    }
    report("ten, packed", written, Taken::when_still(grid, &volumes)?, begun);
    let begun = Instant::now();
    grid.run(&["sharing", "create", "fleet", "--layout", LAYOUT])?;
    for name in &volumes {
        grid.run(&["volume", "set", name, "--sharing", "fleet"])?;
    }
    volumes.push("fleet".to_string());
    report("ten, packed and shared", written, Taken::when_still(grid, &volumes)?, begun);
    Ok(())
}

/// Makes a volume of it; gives how many bytes of its blocks are not all zeroes.
fn load(disk: &Disk, grid: &Grid, name: &str) -> Result<u64> {
    let size = format!("{DISK_MIB}MiB");
    grid.run(&["volume", "create", name, "--size", &size, "--layout", LAYOUT, "--compress", "auto"])?;
    tools::run(Command::new("nbdcopy").arg("--request-size=65536").arg(disk.path()).arg(grid.uri(name)))?;
    let all = std::fs::read(disk.path())?;
    Ok(all.chunks(4096).filter(|block| block.iter().any(|byte| *byte != 0)).map(|block| block.len() as u64).sum())
}

fn report(what: &str, written: u64, taken: Taken, begun: Instant) {
    let part = |bytes: i64| bytes as f64 / written as f64;
    let (needed, dead) = (part(taken.needed_bytes), part(taken.dead_bytes));
    println!("| {what} | {} | {needed:.3} | {dead:.3} | {} |", written >> 20, begun.elapsed().as_secs());
}

/// Members go first.
fn delete_all(grid: &Grid, volumes: &[String]) -> Result<()> {
    volumes.iter().rev().try_for_each(|name| grid.run(&["volume", "delete", name, "--now"]).map(drop))
}
