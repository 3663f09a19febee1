//! Addresses of this machine's part of a grid: which will do, and how they change.
//!
//! States of a change, node by node: asked about (the host says that data can do without it) -> grid.json names its new address
//! -> restarted, and in use by the host. One that was not running is only named anew. What a command that was cut short has done
//! stays; the next one goes on with the rest.

use super::grow::{self, health_of, wait_until_used};
use super::layout::{GridConfig, GridDir, MetaConfig};
use super::processes::Role;
use super::{Lock, check_port, units};
use crate::client;
use crate::host::{catalog::Catalog, presence};
use anyhow::{Context, Result};
use holdfast_api::{Code, DeviceHealth, LinkState, Request, refuse};
use holdfast_runtime::meta::MetaStore;
use std::fs;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::Arc;

/// Flags of an address in `/proc/net/if_inet6` that is good on one link only.
const SCOPE_LINK: u8 = 0x20;

/// Addresses of this machine, those first that others can reach.
pub fn own_addresses() -> Vec<IpAddr> {
    let (v4, v6) = (fs::read_to_string("/proc/net/fib_trie"), fs::read_to_string("/proc/net/if_inet6"));
    let mut found: Vec<IpAddr> = v4_addresses(&v4.unwrap_or_default());
    found.extend(v6_addresses(&v6.unwrap_or_default()));
    found.sort_by_key(|ip| (ip.is_loopback(), ip.is_ipv6(), *ip));
    found.dedup();
    found
}

/// What `/proc/net/fib_trie` calls local: `|-- ADDRESS`, and below it `/32 host LOCAL`.
fn v4_addresses(text: &str) -> Vec<IpAddr> {
    let mut found = Vec::new();
    let mut last = None;
    for line in text.lines().map(str::trim) {
        if let Some(address) = line.strip_prefix("|-- ") {
            last = address.parse::<IpAddr>().ok();
        } else if line == "/32 host LOCAL" {
            found.extend(last);
        }
    }
    found
}

/// `/proc/net/if_inet6`: 32 digits, index, length of the prefix, scope, flags, name.
fn v6_addresses(text: &str) -> Vec<IpAddr> {
    let parse = |line: &str| {
        let mut fields = line.split_whitespace();
        let address = u128::from_str_radix(fields.next()?, 16).ok()?;
        let scope = u8::from_str_radix(fields.nth(2)?, 16).ok()?;
        (scope != SCOPE_LINK).then_some(IpAddr::V6(Ipv6Addr::from(address)))
    };
    text.lines().filter_map(parse).collect()
}

fn listed(addresses: &[IpAddr]) -> String {
    addresses.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(", ")
}

/// Those of this machine that would do, in words.
fn those_that_do() -> String {
    let own = own_addresses();
    let far: Vec<IpAddr> = own.iter().copied().filter(|ip| !ip.is_loopback()).collect();
    match far.is_empty() {
        true => format!("it has {}, which only it can reach itself", listed(&own)),
        false => format!("it has {}", listed(&far)),
    }
}

/// Refuses what nobody can be told to connect to, or what isn't this machine's.
pub fn check_own(ip: IpAddr) -> Result<()> {
    if ip.is_unspecified() {
        refuse!(
            Code::Invalid,
            "{ip} stands for all addresses, and is none that hosts and nodes can be reached at; name one of this machine: {}",
            those_that_do()
        );
    }
    match TcpListener::bind((ip, 0)) {
        Ok(_) => Ok(()),
        Err(e) if e.kind() == ErrorKind::AddrNotAvailable || ip.is_multicast() => {
            refuse!(Code::Invalid, "{ip} is no address of this machine: {}", those_that_do())
        }
        Err(e) => Err(e)
            .with_context(|| format!("cannot listen on {ip}; of this machine it is known that {}", those_that_do())),
    }
}

/// Refuses an address from which, or at which, other machines of the grid can't be reached.
pub fn check_among(ip: IpAddr, others: impl IntoIterator<Item = IpAddr>) -> Result<()> {
    let Some(other) = others.into_iter().find(|other| other.is_loopback() != ip.is_loopback()) else { return Ok(()) };
    if ip.is_loopback() {
        refuse!(
            Code::Invalid,
            "{ip} can be reached from this machine alone, and another one of the grid is at {other}; name an address of this \
             machine that it can reach: {}",
            those_that_do()
        );
    }
    refuse!(
        Code::Unavailable,
        "another machine of the grid is at {other}, which can't be reached from here; give it one that can first, on that \
         machine: `holdfast grid address ADDRESS`"
    );
}

/// Where other machines' nodes and hosts are, as the metadata say.
pub fn of_others(meta: &Arc<dyn MetaStore>, config: &GridConfig) -> Result<Vec<IpAddr>> {
    let catalog = Catalog::new(meta.clone(), config.grid_id()?, &config.host.name);
    let machines = catalog.node_machines()?;
    let is_elsewhere = |id: u32| machines.get(&id).is_some_and(|machine| *machine != config.host.name);
    let nodes = catalog.nodes()?.into_iter().filter(|node| is_elsewhere(node.id)).map(|node| node.address.ip());
    let hosts = presence::host_addresses(meta)?.into_iter().filter(|(name, _)| *name != config.host.name);
    Ok(nodes.chain(hosts.flat_map(|(_, addresses)| addresses).map(|address| address.ip())).collect())
}

/// What a machine's part of the grid is to have.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    pub ip: Option<IpAddr>,
    /// Of the first node; the others' follow.
    pub port: Option<u16>,
    /// Although data is less redundant while a node is restarted than it is to be.
    pub force: bool,
}

/// Gives this machine's nodes and host another address, or other ports. `tell` hears of each step. Returns whether anything had
/// to be done.
pub fn change(dir: &GridDir, wanted: &Wanted, mut tell: impl FnMut(String)) -> Result<bool> {
    let _lock = Lock::take(dir)?;
    let mut config = dir.load()?;
    let places = places(&config, wanted)?;
    let moved: Vec<(u32, SocketAddr)> =
        places.into_iter().filter(|(id, place)| config.node(*id).is_ok_and(|node| node.address != *place)).collect();
    let host = wanted.ip.filter(|ip| config.host.address.is_some_and(|now| now != *ip));
    if moved.is_empty() && host.is_none() {
        return Ok(false);
    }
    check(dir, &config, wanted.ip, &moved)?;
    let is_served = match Role::Host.find(dir) {
        Some(process) if process.stopped => {
            refuse!(Code::Unavailable, "the host hangs (process {}); end that, or let it go on", process.pid)
        }
        found => found.is_some(),
    };
    config.host.address = host.or(config.host.address);
    for (id, place) in moved {
        move_node(dir, &mut config, (id, place), is_served, wanted.force)?;
        tell(format!("node {id} is at {place}"));
    }
    dir.save(&config)?;
    units::refresh(dir, &config)?;
    if is_served {
        client::done(dir, &Request::GridReload)?;
    }
    Ok(true)
}

/// The addresses that nodes are to have.
fn places(config: &GridConfig, wanted: &Wanted) -> Result<Vec<(u32, SocketAddr)>> {
    let place = |(index, node): (usize, &super::NodeConfig)| {
        let port = match wanted.port {
            Some(first) => {
                first.checked_add(index as u16).context("there is no port above 65535; choose a smaller --port")?
            }
            None => node.address.port(),
        };
        Ok((node.id, SocketAddr::new(wanted.ip.unwrap_or(node.address.ip()), port)))
    };
    config.nodes.iter().enumerate().map(place).collect()
}

/// Refuses what could not be completed.
fn check(dir: &GridDir, config: &GridConfig, ip: Option<IpAddr>, moved: &[(u32, SocketAddr)]) -> Result<()> {
    if let Some(ip) = ip {
        check_own(ip)?;
    }
    if let (Some(ip), MetaConfig::Etcd(_)) = (ip, &config.meta) {
        let meta = crate::host::meta::open(dir, config)?;
        check_among(ip, of_others(&meta, config)?)?;
    }
    for (id, place) in moved {
        let other = config.nodes.iter().find(|node| node.id != *id && node.address == *place);
        if let Some(other) = other.filter(|other| Role::Node(other.id).find(dir).is_some()) {
            refuse!(
                Code::Invalid,
                "port {} is node {}'s: choose ports that none of the nodes has now",
                place.port(),
                other.id
            );
        }
        check_port(*place)?;
    }
    Ok(())
}

fn move_node(
    dir: &GridDir,
    config: &mut GridConfig,
    (id, place): (u32, SocketAddr),
    is_served: bool,
    force: bool,
) -> Result<()> {
    let is_running = Role::Node(id).find(dir).is_some();
    // What the host can't reach is missed already.
    let is_used = || -> Result<bool> {
        let told = client::status(dir)?.nodes;
        Ok(told.iter().any(|node| node.id == id && node.link != LinkState::Down))
    };
    if is_running && is_served && !force && is_used()? {
        client::done(dir, &Request::CheckStop { node: id }).with_context(|| {
            format!("node {id} is not restarted at {place} now; repeat the command when nothing is missing")
        })?;
    }
    let node = config.nodes.iter_mut().find(|node| node.id == id).expect("it was there when places were chosen");
    node.address = place;
    dir.save(config)?;
    if !is_running {
        return Ok(());
    }
    // Of devices that were out before nobody knows when they are back.
    let devices = config.node(id)?.devices.iter().map(|device| device.device.clone());
    let used: Vec<String> =
        devices.filter(|device| health_of(dir, id, device) == Some(DeviceHealth::Serving)).collect();
    grow::restart(dir, config, id)?;
    if is_served {
        client::done(dir, &Request::GridReload)?;
        used.iter().try_for_each(|device| wait_until_used(dir, id, device))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_this_machine_are_found() {
        let trie = "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 0.0.0.0\n        /0 universe UNICAST\nLocal:\n  |-- 10.1.2.3\n     \
            /32 host LOCAL\n  |-- 10.1.2.255\n     /32 link BROADCAST\n  |-- 127.0.0.1\n     /32 host LOCAL\n";
        assert_eq!(listed(&v4_addresses(trie)), "10.1.2.3, 127.0.0.1");
        let inet6 = "00000000000000000000000000000001 01 80 10 80       lo\n\
            fe800000000000000042acfffe110002 02 40 20 80     eth0\nfd000000000000000000000000000005 02 40 00 80     eth0\n";
        assert_eq!(listed(&v6_addresses(inet6)), "::1, fd00::5");
        assert!(own_addresses().contains(&"127.0.0.1".parse().unwrap()), "{:?}", own_addresses());
    }

    #[test]
    fn addresses_that_nobody_can_reach_are_refused() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        for odd in ["0.0.0.0", "::"] {
            assert!(check_own(ip(odd)).unwrap_err().to_string().contains("stands for all addresses"), "{odd}");
        }
        // Of a range that is for examples.
        let typo = check_own(ip("192.0.2.77")).unwrap_err().to_string();
        assert!(typo.contains("no address of this machine: it has "), "{typo}");
        check_own(ip("127.0.0.1")).unwrap();
        check_own(ip("127.0.5.1")).unwrap();
        check_among(ip("127.0.0.2"), [ip("127.0.0.1")]).unwrap();
        check_among(ip("10.0.0.2"), [ip("10.0.0.1")]).unwrap();
        check_among(ip("10.0.0.2"), []).unwrap();
        assert!(check_among(ip("127.0.0.1"), [ip("10.0.0.1")]).unwrap_err().to_string().contains("this machine alone"));
        assert!(check_among(ip("10.0.0.2"), [ip("127.0.0.1")]).unwrap_err().to_string().contains("grid address"));
    }
}
