//! What a run leaves behind that was ended by a signal: machines, their disks, the network. The next run takes it away.

use crate::package::tree;
use crate::tools;
use anyhow::{Context, Result, bail};
use holdfast_lab::process::{Signal, is_alive, signal, wait_gone};
use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::path::Path;
use std::process::Command;

/// The bridge, and the table of nft.
pub const NAME: &str = "hf-three";

const FORWARD: &str = "/proc/sys/net/ipv4/ip_forward";

/// Locked by a run. It holds whether packets were passed on before; a reboot takes it away, as all else that is left.
const RECORD: &str = "/run/holdfast-three";

/// Where runs have their files, in whatever tree.
const WORK: &str = "/package/build/three/";

/// Held while a run goes on. Its end takes the network away.
pub struct Record {
    file: File,
}

impl Record {
    /// Takes away what an earlier run has left, and lets this machine pass packets on. Fails while another run goes on.
    pub fn begin() -> Result<Record> {
        let mut record = Record { file: cleared()? };
        let forward = fs::read_to_string(FORWARD).context("cannot read whether packets are passed on")?;
        record.file.write_all(forward.as_bytes()).with_context(|| format!("cannot write {RECORD}"))?;
        fs::write(FORWARD, "1").context("cannot have packets passed on")?;
        Ok(record)
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        if let Err(error) = clear_network(&mut self.file) {
            eprintln!("three: {error:#}; the next run tries again");
        }
    }
}

/// Takes away what an earlier run has left. Fails while another one goes on.
pub fn clear() -> Result<()> {
    cleared().map(drop)
}

/// The record, locked and empty.
fn cleared() -> Result<File> {
    let mut options = File::options();
    let file = options.read(true).write(true).create(true).truncate(false).open(RECORD);
    let mut file = file.with_context(|| format!("cannot open {RECORD}"))?;
    if file.try_lock().is_err() {
        bail!("another run with three machines goes on here, and they have one network: wait for its end");
    }
    for pid in machines()? {
        // All that ran on a machine ends with its first process.
        for pid in tree::child_of(pid).into_iter().chain([pid]).filter(|pid| is_alive(*pid)) {
            let _ = signal(pid, Signal::KILL);
            wait_gone(pid)?;
        }
        println!("three: ended a machine that an earlier run had left");
    }
    let mounts = fs::read_to_string("/proc/self/mounts").context("cannot read what is mounted")?;
    for mounted in mounts.lines().filter_map(|line| line.split(' ').nth(1)).filter(|path| path.contains(WORK)) {
        tools::run(Command::new("umount").arg(mounted))?;
    }
    let list = ["--list", "--noheadings", "--raw", "--output", "NAME,BACK-FILE"];
    for device in disks_of(&tools::output_of(Command::new("losetup").args(list))?) {
        tools::run(Command::new("losetup").args(["--detach", device]))?;
    }
    clear_network(&mut file)?;
    Ok(file)
}

/// Takes away the bridge and the table, and has packets passed on as before.
fn clear_network(record: &mut File) -> Result<()> {
    if tools::output_of(Command::new("nft").args(["list", "tables"]))?.lines().any(|line| line.ends_with(NAME)) {
        tools::run(Command::new("nft").args(["delete", "table", "ip", NAME]))?;
    }
    if Path::new("/sys/class/net").join(NAME).exists() {
        tools::run(Command::new("ip").args(["link", "delete", NAME]))?;
    }
    let mut forward = String::new();
    record.rewind()?;
    record.read_to_string(&mut forward).with_context(|| format!("cannot read {RECORD}"))?;
    if !forward.is_empty() {
        fs::write(FORWARD, forward).context("cannot set again whether packets are passed on")?;
    }
    record.set_len(0)?;
    Ok(record.rewind()?)
}

/// What runs machines, by pid.
fn machines() -> Result<Vec<u32>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").context("cannot list processes")? {
        let path = entry?.path();
        let pid = path.file_name().and_then(|name| name.to_str()?.parse::<u32>().ok());
        // Others end meanwhile.
        let line = fs::read(path.join("cmdline")).unwrap_or_default();
        found.extend(pid.filter(|_| is_machine(&String::from_utf8_lossy(&line))));
    }
    Ok(found)
}

fn is_machine(line: &str) -> bool {
    let mut words = line.split('\0');
    let is_nspawn = words.next().is_some_and(|program| program.ends_with("systemd-nspawn"));
    is_nspawn && line.contains(&format!("\0--network-bridge={NAME}\0")) && words.any(|word| word.contains(WORK))
}

/// Loop devices whose files are a run's, or were; each line has a device and its file.
fn disks_of(list: &str) -> Vec<&str> {
    let lines = list.lines().filter_map(|line| line.split_once(' '));
    lines.filter(|(_, file)| file.contains(WORK)).map(|(device, _)| device).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_run_has_left_is_told_from_what_others_have() {
        let of = |program: &str, bridge: &str, tree: &str| {
            format!("{program}\0--boot\0--network-bridge={bridge}\0--directory\0{tree}\0")
        };
        assert!(is_machine(&of("systemd-nspawn", NAME, "/src/target/package/build/three/a")));
        assert!(!is_machine(&of("systemd-nspawn", "br0", "/src/target/package/build/three/a")));
        assert!(!is_machine(&of("systemd-nspawn", NAME, "/var/lib/machines/a")));
        assert!(!is_machine(&of("vi", NAME, "/src/target/package/build/three/a")) && !is_machine(""));
        let list =
            "/dev/loop0 /src/target/package/build/three/a.disk\\x20(deleted)\n/dev/loop1 /home/disk\n/dev/loop2 \n";
        assert_eq!(disks_of(list), ["/dev/loop0"]);
    }
}
