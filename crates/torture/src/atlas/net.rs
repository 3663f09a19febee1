//! Six machines on one Ethernet, as network namespaces: what links them, and what can be done to a link.
//!
//! ```text
//!   hfatlas-h1   hfatlas-h2   hfatlas-n1   hfatlas-n2   hfatlas-n3   hfatlas-w
//!      eth0         eth0         eth0         eth0         eth0        eth0
//!        |            |            |            |            |           |        veth pairs
//!      p-h1         p-h2         p-n1         p-n2         p-n3        p-w
//!   ---+------------+------------+------------+------------+-----------+---      bridge br0, with the clients' address
//!                                 hfatlas-net
//! ```
//! Everything lies in namespaces of its own, so nothing of the machine that this runs on is touched: no interface, address
//! or rule. A machine whose link is to be slow or one-way is taken off the bridge, and a [`Wire`] goes between.

use super::machine::Part;
use super::wire::{Passage, Wire};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Namespaces of this program, and no others, begin so.
const PREFIX: &str = "hfatlas-";

/// Holds the bridge; clients run here.
pub const HUB: &str = "net";

/// Where clients are. An address block for tests of networks (RFC 2544), and in a namespace of our own besides.
const HUB_ADDRESS: &str = "198.18.0.254/24";

/// Waited for a link or a device to be there.
const SETTLE_MAX: std::time::Duration = std::time::Duration::from_secs(5);

/// The namespace's name for a machine, or for the [`HUB`].
pub fn namespace(name: &str) -> String {
    format!("{PREFIX}{name}")
}

/// Runs a command that must succeed; its standard output.
pub fn run(program: &str, arguments: &[&str]) -> Result<String> {
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot start `{program}`; is it installed? (`./x setup`)"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("`{program} {}` failed ({}): {}", arguments.join(" "), output.status, said.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn ip(arguments: &[&str]) -> Result<String> {
    run("ip", arguments)
}

/// Namespaces of this program that are there, of this run or of one that was killed.
fn ours() -> Result<Vec<String>> {
    let text = ip(&["netns", "list"])?;
    let names = text.lines().filter_map(|line| line.split_whitespace().next());
    Ok(names.filter(|name| name.starts_with(PREFIX)).map(str::to_string).collect())
}

/// Ends every process in this program's namespaces, and removes these. Nothing else can be in them.
pub fn remove() -> Result<()> {
    for name in ours()? {
        let pids = ip(&["netns", "pids", &name])?;
        for pid in pids.split_whitespace().filter_map(|pid| pid.parse().ok()) {
            if let Some(pid) = rustix::process::Pid::from_raw(pid) {
                // It may have ended meanwhile.
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
        ip(&["netns", "del", &name])?;
    }
    Ok(())
}

/// Makes the namespaces, from outside of all of them.
pub fn make() -> Result<()> {
    for name in Part::all().map(Part::name).chain([HUB]) {
        ip(&["netns", "add", &namespace(name)])
            .context("network namespaces can't be made: this has to run as root, on a kernel that has them")?;
    }
    Ok(())
}

/// The Ethernet, seen from the hub.
pub struct Net {
    /// Device nodes of wires lie here.
    dir: PathBuf,
    wires: BTreeMap<Part, Wire>,
}

impl Net {
    /// Links the machines; runs in the hub.
    pub fn build(dir: &Path) -> Result<Net> {
        ip(&["link", "set", "lo", "up"])?;
        // A fixed address: that of a bridge otherwise changes with its ports.
        ip(&["link", "add", "br0", "address", "02:00:00:00:00:fe", "type", "bridge"])?;
        ip(&["addr", "add", HUB_ADDRESS, "dev", "br0"])?;
        ip(&["link", "set", "br0", "up"])?;
        for part in Part::all() {
            let (port, space) = (port(part), namespace(part.name()));
            let address = format!("{}/24", part.address());
            ip(&["link", "add", &port, "type", "veth", "peer", "name", "eth0", "netns", &space])?;
            ip(&["link", "set", &port, "master", "br0", "up"])?;
            ip(&["-n", &space, "addr", "add", &address, "dev", "eth0"])?;
            ip(&["-n", &space, "link", "set", "lo", "up"])?;
            ip(&["-n", &space, "link", "set", "eth0", "up"])?;
        }
        Ok(Net { dir: dir.into(), wires: BTreeMap::new() })
    }

    /// Pulls the cable: the machine's own end loses its carrier, too.
    pub fn cut(&self, part: Part) -> Result<()> {
        ip(&["link", "set", &port(part), "down"]).map(drop)
    }

    pub fn mend(&self, part: Part) -> Result<()> {
        ip(&["link", "set", &port(part), "up"]).map(drop)
    }

    /// Two machines don't reach each other, and reach all others; or each other, too, again.
    pub fn set_apart(&self, parts: [Part; 2], are_apart: bool) -> Result<()> {
        let how = if are_apart { "on" } else { "off" };
        parts
            .iter()
            .try_for_each(|part| ip(&["link", "set", &port(*part), "type", "bridge_slave", "isolated", how]).map(drop))
    }

    /// Puts a wire between the machine and the bridge, through which frames go as told.
    pub fn divert(&mut self, part: Part, passage: Passage) -> Result<()> {
        let name = part.name();
        let (near, far) = (format!("t-{name}"), format!("u-{name}"));
        let (inner, outer) = (format!("r-{name}"), format!("b-{name}"));
        ip(&["link", "add", &inner, "type", "veth", "peer", "name", &outer])?;
        ip(&["link", "set", &inner, "up"])?;
        ip(&["link", "set", &port(part), "nomaster"])?;
        let machine = self.tap(&near, &port(part))?;
        let bridge = self.tap(&far, &inner)?;
        self.wires.insert(part, Wire::begin(&machine, &bridge, passage)?);
        ip(&["link", "set", &outer, "master", "br0", "up"]).map(drop)
    }

    /// Takes the wire out again.
    pub fn restore(&mut self, part: Part) -> Result<()> {
        let Some(wire) = self.wires.remove(&part) else { return Ok(()) };
        let name = part.name();
        wire.end();
        ip(&["link", "del", &format!("t-{name}")])?;
        // Its peer and what stands on it go with it.
        ip(&["link", "del", &format!("r-{name}")])?;
        ip(&["link", "set", &port(part), "master", "br0"]).map(drop)
    }

    /// Has a character device give and take what passes an interface; gives its path.
    fn tap(&self, name: &str, below: &str) -> Result<PathBuf> {
        ip(&["link", "add", name, "link", below, "type", "macvtap", "mode", "passthru"])
            .context("faults of the kinds slow, deaf and mute need the kernel's macvtap; leave them out with --only")?;
        ip(&["link", "set", name, "up"])?;
        let end = std::time::Instant::now() + SETTLE_MAX;
        let number = loop {
            match device_number(name) {
                Ok(number) => break number,
                Err(error) if std::time::Instant::now() > end => return Err(error),
                Err(_) => std::thread::sleep(std::time::Duration::from_millis(10)),
            }
        };
        let path = self.dir.join(name);
        let _ = std::fs::remove_file(&path);
        let (kind, mode) = (rustix::fs::FileType::CharacterDevice, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR);
        rustix::fs::mknodat(rustix::fs::CWD, &path, kind, mode, number)
            .with_context(|| format!("cannot make the device node {}", path.display()))?;
        Ok(path)
    }
}

/// The machine's port of the bridge.
fn port(part: Part) -> String {
    format!("p-{}", part.name())
}

/// Major and minor number of an interface's character device. Its node in /dev might be that of another namespace.
fn device_number(name: &str) -> Result<u64> {
    let links: Value = serde_json::from_str(&ip(&["-j", "link", "show", "dev", name])?)?;
    let index = links[0]["ifindex"].as_u64().with_context(|| format!("interface {name} has no number"))?;
    let path = format!("/sys/class/net/{name}/macvtap/tap{index}/dev");
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let parts = text.trim().split_once(':').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    let (major, minor) = parts.with_context(|| format!("{path} holds no device number"))?;
    Ok(rustix::fs::makedev(major, minor))
}

/// Where a machine is.
pub fn address_of(last: u8) -> Ipv4Addr {
    Ipv4Addr::new(198, 18, 0, last)
}
