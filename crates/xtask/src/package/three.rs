//! `./x package --three`: from the package to three machines with a guest that boots from a volume, by the pages of docs as
//! they stand.
//!
//! The machines are fresh systems of Debian 12 in directories, each booted by its own systemd in namespaces, with an address
//! and a disk. Pages are typed at the machine that the prompt names. Then the machine that serves the volume is gone at once:
//! another one serves it, and the guest is started there and reads what it had written.
//!
//! What pages leave to their reader is done here: files are copied from machine to machine, a token goes where it is wanted,
//! and the disk gets its name. The image that is imported is made before the clock runs, as others give theirs away.

mod guest;
mod leftovers;
mod site;

use super::{Place, tree};
use anyhow::{Context, Result, ensure};
use guest::Guest;
use holdfast_lab::page::{Typed, section};
use site::Site;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

const PROGRAMS: &[&str] =
    &["mmdebstrap", "systemd-nspawn", "nsenter", "nft", "ip", "losetup", "mke2fs", "extlinux", "qemu-img", "tar"];

/// Of the machines, as who installs a system has it; the package brings the rest.
const PACKAGES: &str = "systemd-sysv,dbus,procps,iproute2,ca-certificates";

const SUITE: &str = "bookworm";

/// A machine that is lost is taken out after seconds.
const PATIENCE: Duration = Duration::from_secs(120);

/// Takes away what a run has left in this place that was ended by a signal.
pub fn clear(place: &Place) -> Result<()> {
    if work(place).exists() { leftovers::clear() } else { Ok(()) }
}

fn work(place: &Place) -> PathBuf {
    place.out.join("build/three")
}

pub fn run(place: &Place) -> Result<()> {
    tree::check(&place.out, PROGRAMS)?;
    let work = work(place);
    fs::create_dir_all(&work)?;
    let image = work.join("debian-12.qcow2");
    guest::make_image(&work, &image)?;
    tree::make(SUITE, PACKAGES, &["chroot \"$1\" systemctl enable systemd-networkd"], &work.join("tree"))?;
    let mut site = Site::begin(&work, &place.deb())?;
    fs::copy(&image, site.path("a", "root/debian-12.qcow2")?).context("cannot copy the image")?;
    let done = act(&mut site);
    if done.is_err() {
        site.tell_why();
    }
    drop(site);
    fs::remove_dir_all(&work).with_context(|| format!("cannot remove {}", work.display()))?;
    done
}

fn act(site: &mut Site) -> Result<()> {
    let clock = Instant::now();
    let say = |what: &str| println!("three: {:>4} s: {what}", clock.elapsed().as_secs());
    let package = line("operate/install.md", "The package", "apt install")?;
    site.each(&package)?;
    say("the package is on three machines");
    grid(site)?;
    say("they are a grid, and etcd runs on all three");
    for command in commands("operate/install.md", "As services of systemd") {
        site.each(&command)?;
    }
    say("services of systemd run it");
    site.types("a", &line("integrate/import.md", "", "holdfast volume import debian-12.qcow2 vm1")?)?;
    site.types("a", &line("start.md", "Three machines", "holdfast volume export vm1 --failover auto")?)?;
    say("vm1 is a disk of Debian");
    let qemu = commands("integrate/qemu-libvirt.md", "QEMU, on the host's machine");
    let sum = boot(site, "a", &qemu, |guest| {
        say("the guest has its prompt");
        guest.types("head -c 20000000 /dev/urandom >/root/file && sync && sha256sum /root/file")
    })?;
    say("it has written a file, read it, and was shut down");
    site.lose("a")?;
    let end = Instant::now() + PATIENCE;
    let by = loop {
        if let Some(by) = ["b", "c"].into_iter().find(|at| site.serves(at, "vm1")) {
            break by;
        }
        ensure!(Instant::now() < end, "a is lost, and nobody else serves vm1");
        std::thread::sleep(Duration::from_millis(500));
    };
    say(&format!("machine a is lost, and {by} serves vm1"));
    let again = boot(site, by, &qemu, |guest| guest.types("sha256sum /root/file"))?;
    ensure!(again == sum, "the guest had written {sum}, and reads {again} at machine {by}");
    say(&format!("the guest was started at {by}, and its file is what it was"));
    Ok(())
}

/// The tutorial's part about three machines, to the list of them.
fn grid(site: &mut Site) -> Result<()> {
    let blocks = section("start.md", "Three machines");
    let begins = |at: usize, text: &str| blocks.get(at).is_some_and(|block| block[0].command.starts_with(text));
    ensure!(
        begins(0, "holdfast device list") && begins(1, "E=") && begins(2, "holdfast grid up"),
        "docs/start.md has other commands under `Three machines` than are known here"
    );
    let mut said = String::new();
    for typed in &blocks[0] {
        said += &site.types(&typed.at, &typed.command)?;
    }
    site.obeys("a", &said)?;
    for Typed { command, .. } in &blocks[1] {
        site.each(command)?;
    }
    // Members of etcd answer when they have found each other.
    site.types_until(&blocks[2][0].at, &blocks[2][0].command, PATIENCE)?;
    for typed in &blocks[2][1..] {
        site.types(&typed.at, &typed.command)?;
    }
    Ok(())
}

/// Types these commands at a machine; the last one is a guest, which does this and is shut down. Returns what it has said.
fn boot(site: &mut Site, at: &str, qemu: &[String], act: impl FnOnce(&mut Guest) -> Result<String>) -> Result<String> {
    let (last, before) = qemu.split_last().context("the page about QEMU starts none")?;
    for command in before {
        site.types(at, command)?;
    }
    let mut guest = Guest::boot(site.command(at, last)?)?;
    let said = act(&mut guest)?;
    guest.end()?;
    Ok(said)
}

/// What a page's section has typed, without prompts.
fn commands(page: &str, title: &str) -> Vec<String> {
    section(page, title).into_iter().flatten().map(|typed| typed.command).collect()
}

/// One command of them: the one that begins so.
fn line(page: &str, title: &str, begins: &str) -> Result<String> {
    let found = commands(page, title).into_iter().find(|command| command.starts_with(begins));
    found.with_context(|| format!("docs/{page} does not show `{begins}` under `{title}`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_have_what_is_typed() {
        assert!(line("operate/install.md", "The package", "apt install").unwrap().contains("holdfast_*_amd64.deb"));
        line("integrate/import.md", "", "holdfast volume import debian-12.qcow2 vm1").unwrap();
        line("start.md", "Three machines", "holdfast volume export vm1 --failover auto").unwrap();
        let qemu = commands("integrate/qemu-libvirt.md", "QEMU, on the host's machine");
        assert!(qemu.last().unwrap().starts_with("qemu-system-x86_64"));
        assert!(!commands("operate/install.md", "As services of systemd").is_empty());
    }
}
