//! Machines a, b and c on a network of this machine, 10.0.0.0/24, and who goes from one to the other.

use super::leftovers::{NAME as BRIDGE, Record};
use crate::package::tree;
use crate::tools;
use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Others' packages come over this machine.
const NAT: &str = "table ip hf-three { chain out { type nat hook postrouting priority 100; \
                   ip saddr 10.0.0.0/24 oifname != \"hf-three\" masquerade; }; }";

/// Bytes of a machine's disk.
const DISK: u64 = 6 << 30;

/// What the page calls it.
const DISK_ON_PAGE: &str = "/dev/disk/by-id/nvme-…";
const DISK_HERE: &str = "/dev/disk/by-id/nvme-disk1";

/// `status` says by its code that not all is well.
const SHELL: &str = "set -e -o pipefail\nholdfast() { command holdfast \"$@\" || [ \"$1\" = status ]; }";

/// Of a boot, and of any command; on a machine with two cores none took 20 s.
const PATIENCE: Duration = Duration::from_secs(300);

pub struct Site {
    machines: BTreeMap<String, Machine>,
    token: String,
    /// Last, since its cables are plugged into it.
    _net: Record,
}

struct Machine {
    tree: PathBuf,
    /// Its first process.
    leader: u32,
    nspawn: Child,
    device: String,
    /// What was set in its shell.
    profile: String,
}

impl Site {
    /// Boots three machines with an empty disk and the package's file each.
    pub fn begin(work: &Path, deb: &Path) -> Result<Site> {
        let net = connect()?;
        let mut site = Site { machines: BTreeMap::new(), token: String::new(), _net: net };
        for (index, name) in ["a", "b", "c"].into_iter().enumerate() {
            let machine = Machine::boot(work, name, index + 1, deb).with_context(|| format!("machine {name}"))?;
            site.machines.insert(name.to_string(), machine);
        }
        let boots = "systemctl is-system-running --wait; ip route | grep -q default";
        for name in ["a", "b", "c"] {
            site.types_until(name, boots, PATIENCE)?;
            // As udev does it where it runs.
            let device = site.at(name)?.device.clone();
            site.types(name, &format!("mkdir -p /dev/disk/by-id && ln -s {device} {DISK_HERE}"))?;
        }
        Ok(site)
    }

    fn at(&self, name: &str) -> Result<&Machine> {
        self.machines.get(name).with_context(|| format!("there is no machine {name}"))
    }

    /// A file of a machine.
    pub fn path(&self, name: &str, path: &str) -> Result<PathBuf> {
        Ok(self.at(name)?.tree.join(path))
    }

    /// What types that at a machine.
    pub fn command(&self, name: &str, script: &str) -> Result<Command> {
        let machine = self.at(name)?;
        let script = script.replace(DISK_ON_PAGE, DISK_HERE).replace("TOKEN", &self.token);
        Ok(tree::inside(machine.leader, &format!("{SHELL}\n{}{script}", machine.profile)))
    }

    /// Returns all that it said, and whether it succeeded.
    fn tries(&self, name: &str, script: &str) -> Result<(String, bool)> {
        let mut command = self.command(name, &format!("exec 2>&1\n{script}"))?;
        let output = command.stdin(Stdio::null()).output().context("cannot enter a machine")?;
        Ok((String::from_utf8_lossy(&output.stdout).into_owned(), output.status.success()))
    }

    /// It has to succeed. What it sets stays set at this machine.
    pub fn types(&mut self, name: &str, script: &str) -> Result<String> {
        let (said, is_done) = self.tries(name, script)?;
        ensure!(is_done, "at {name}: {script}\nfailed: {said}");
        if script.starts_with("holdfast grid token") {
            let token = said.split_whitespace().find(|word| word.starts_with("hfjoin"));
            self.token = token.with_context(|| format!("{script} prints no token: {said}"))?.to_string();
        }
        let is_set = script.split_once('=').is_some_and(|(name, _)| name.chars().all(|c| c.is_ascii_uppercase()));
        if let Some(machine) = self.machines.get_mut(name).filter(|_| is_set) {
            machine.profile += &format!("{script}\n");
        }
        Ok(said)
    }

    /// The same at all machines, one after the other.
    pub fn each(&mut self, script: &str) -> Result<()> {
        let names: Vec<String> = self.machines.keys().cloned().collect();
        names.iter().try_for_each(|name| self.types(name, script).map(drop))
    }

    /// Types it until it succeeds.
    pub fn types_until(&self, name: &str, script: &str, patience: Duration) -> Result<()> {
        let end = Instant::now() + patience;
        loop {
            let (said, is_done) = self.tries(name, script)?;
            if is_done {
                return Ok(());
            }
            ensure!(Instant::now() < end, "at {name}: {script}\nis refused: {said}");
            std::thread::sleep(Duration::from_millis(300));
        }
    }

    /// Does what `holdfast grid etcd member` at machine `from` has said: files go to each member's machine, and there commands
    /// are given.
    pub fn obeys(&mut self, from: &str, said: &str) -> Result<()> {
        let mut at = String::new();
        for line in said.lines() {
            let member = line.strip_prefix("member ").and_then(|rest| rest.split_once(": copy "));
            if let Some((name, rest)) = member {
                let (what, to) = rest.split_once(" to its machine as ").context("no place is named")?;
                let to = to.split(';').next().unwrap_or_default();
                let inside = |path: &str| path.trim_start_matches('/').to_string();
                let (what, to) = (self.path(from, &inside(what))?, self.path(name, &inside(to))?);
                tools::run(Command::new("cp").arg("-r").arg(what).arg(to))?;
                at = name.to_string();
            } else if let Some(command) = line.strip_prefix("  ").filter(|_| !at.is_empty()) {
                self.types(&at, command)?;
            }
        }
        ensure!(!at.is_empty(), "it names no member: {said}");
        Ok(())
    }

    /// The machine has no power from now on.
    pub fn lose(&mut self, name: &str) -> Result<()> {
        self.machines.remove(name).map(drop).with_context(|| format!("there is no machine {name}"))
    }

    /// The host at this machine serves the volume.
    pub fn serves(&self, at: &str, volume: &str) -> bool {
        let shown = self.tries(at, &format!("holdfast volume show {volume} --json"));
        shown.is_ok_and(|(said, _)| said.contains("\"state\": \"open\""))
    }

    /// What units say, for who looks why it failed.
    pub fn tell_why(&self) {
        let look = "systemctl --no-pager --failed; holdfast status; journalctl -b --no-pager -u 'holdfast*' -u etcd | tail -20";
        for name in self.machines.keys() {
            if let Ok((said, _)) = self.tries(name, look) {
                eprintln!("at {name}:\n{said}");
            }
        }
    }
}

impl Machine {
    fn boot(work: &Path, name: &str, number: usize, deb: &Path) -> Result<Machine> {
        let tree = work.join(name);
        tools::run(Command::new("cp").arg("-a").arg(work.join("tree")).arg(&tree))?;
        fs::write(tree.join("etc/hostname"), format!("{name}\n"))?;
        fs::write(tree.join("etc/machine-id"), "")?;
        let network = format!("[Match]\nName=host0\n[Network]\nAddress=10.0.0.{number}/24\nGateway=10.0.0.254\n");
        fs::write(tree.join("etc/systemd/network/10-host0.network"), network)?;
        // Where the page has it.
        let package = tree.join("root/target/package");
        fs::create_dir_all(&package)?;
        fs::copy(deb, package.join(deb.file_name().context("a package has a name")?))?;
        let disk = work.join(format!("{name}.disk"));
        fs::File::create(&disk)?.set_len(DISK)?;
        let device =
            tools::output_of(Command::new("losetup").args(["--find", "--show"]).arg(&disk))?.trim().to_string();
        let log = fs::File::create(work.join(format!("{name}.log")))?;
        let mut command = Command::new("systemd-nspawn");
        command.args([
            "--quiet",
            "--boot",
            "--register=no",
            "--keep-unit",
            "--console=pipe",
            "--resolv-conf=replace-host",
        ]);
        command.arg(format!("--machine=hf-{name}")).arg(format!("--network-bridge={BRIDGE}"));
        command.arg(format!("--bind={device}")).arg("--directory").arg(&tree);
        let nspawn = command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).spawn();
        let nspawn = nspawn.context("cannot start systemd-nspawn")?;
        let mut machine = Machine { tree, leader: 0, nspawn, device, profile: String::new() };
        machine.leader = machine.first_process(&work.join(format!("{name}.log")))?;
        Ok(machine)
    }

    fn first_process(&mut self, log: &Path) -> Result<u32> {
        let end = Instant::now() + PATIENCE;
        loop {
            // Before it is systemd, it is a fork of what starts it.
            let found = tree::child_of(self.nspawn.id());
            let runs =
                |pid: &u32| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "systemd");
            if let Some(pid) = found.filter(runs) {
                return Ok(pid);
            }
            if self.nspawn.try_wait()?.is_some() || Instant::now() > end {
                bail!("it does not boot: {}", fs::read_to_string(log).unwrap_or_default());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // With the first process all others of its namespace end.
        if self.leader != 0 {
            let _ = Command::new("kill").args(["-KILL", &self.leader.to_string()]).status();
        } else {
            let _ = self.nspawn.kill();
        }
        let _ = self.nspawn.wait();
        let _ = Command::new("losetup").args(["--detach", &self.device]).status();
    }
}

/// A bridge, and the way out.
fn connect() -> Result<Record> {
    let record = Record::begin()?;
    let addresses = tools::output_of(Command::new("ip").args(["-brief", "-4", "address"]))?;
    ensure!(
        !addresses.contains(" 10.0.0."),
        "this machine has an address of 10.0.0.0/24, as the pages' machines have:\n{addresses}"
    );
    let ip = |arguments: &[&str]| tools::run(Command::new("ip").args(arguments));
    ip(&["link", "add", BRIDGE, "type", "bridge"])?;
    ip(&["address", "add", "10.0.0.254/24", "dev", BRIDGE])?;
    ip(&["link", "set", BRIDGE, "up"])?;
    tools::run(Command::new("nft").arg(NAT))?;
    Ok(record)
}
