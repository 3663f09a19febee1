//! `./x package --install`: the packages on each system that it is for, brought in by apt; and what the tutorial shows on one
//! machine, typed by a user without rights.
//!
//! The systems are directories on this machine's kernel, with a network of loopback alone and without systemd running.

use super::{Place, VERSION, tree};
use crate::tools;
use anyhow::{Context, Result, bail};
use holdfast_lab::page;
use std::fs;
use std::process::Command;

/// What pages claim.
const SYSTEMS: &[&str] = &["bookworm", "trixie", "jammy", "noble"];

/// Beside what the package depends on: a client of volumes, and who types.
const PACKAGES: &str = "adduser,bash,libnbd-bin,procps,qemu-utils";

const PAGE: &str = "start.md";

/// The page's grid would take all the room that there is.
const SMALL: (&str, &str) = ("holdfast grid up", "holdfast grid up --device-size 1GiB");

pub fn run(place: &Place) -> Result<()> {
    tree::check(&place.out, &["mmdebstrap", "systemd-nspawn"])?;
    let work = place.out.join("build/systems");
    fs::create_dir_all(&work)?;
    let blocks = page::section(PAGE, "A grid on one machine");
    let typed = blocks.iter().flatten().map(|typed| format!("{}\n", typed.command)).collect::<String>();
    if !typed.contains(SMALL.0) || !typed.contains("volume create vm1") {
        bail!("docs/{PAGE} shows no grid and no vm1 on one machine any more:\n{typed}");
    }
    let script = include_str!("../../../../packaging/trial/system.sh");
    fs::write(work.join("system.sh"), script)?;
    fs::write(work.join("page.sh"), typed.replace(SMALL.0, SMALL.1))?;
    for suite in SYSTEMS {
        try_system(place, suite).with_context(|| format!("on {suite}"))?;
    }
    Ok(())
}

fn try_system(place: &Place, suite: &str) -> Result<()> {
    let work = place.out.join("build/systems");
    let root = work.join(suite);
    let copy = format!(
        "copy-in {} {} {} {} /root",
        place.deb().display(),
        place.out.join(format!("holdfast-restore_{VERSION}_amd64.deb")).display(),
        work.join("system.sh").display(),
        work.join("page.sh").display()
    );
    // Installed as an administrator does it, dependencies and all.
    let install = "chroot \"$1\" sh -c 'apt-get install -q --no-install-recommends /root/holdfast*.deb'";
    tree::make(suite, PACKAGES, &[&copy, install], &root)?;
    let mut command = Command::new("timeout");
    command.args([
        "600",
        "systemd-nspawn",
        "--quiet",
        "--register=no",
        "--keep-unit",
        "--as-pid2",
        "--private-network",
    ]);
    command.args(["--console=pipe", "--resolv-conf=off", "--timezone=off"]).arg("--directory").arg(&root);
    let said = tools::output_of(command.args(["/bin/bash", "/root/system.sh"]));
    fs::remove_dir_all(&root).with_context(|| format!("cannot remove {}", root.display()))?;
    said?.lines().filter(|line| line.starts_with("install: ")).for_each(|line| println!("{line}"));
    Ok(())
}
