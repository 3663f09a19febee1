//! Clients of this machine's host: who one is beside other clients, over all its connections.

use holdfast_format::forward::Client;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// The machine that the host runs on.
pub struct Machine {
    /// Names this start of it.
    start: Option<u128>,
    address: Option<IpAddr>,
}

impl Machine {
    pub fn own(address: Option<IpAddr>) -> Machine {
        let start = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok();
        let start = start.and_then(|id| uuid::Uuid::parse_str(id.trim()).ok()).map(|id| id.as_u128());
        Machine { start, address }
    }

    /// Who a client is, before it has shown a certificate: by a unix socket its process, by TCP its address.
    pub fn client(&self, peer: &str, address: Option<SocketAddr>, process: Option<u32>) -> Client {
        let ip = address.map(|address| address.ip().to_canonical());
        let own = [Some(Ipv4Addr::LOCALHOST.into()), Some(Ipv6Addr::LOCALHOST.into()), self.address];
        let is_own = ip.is_none() || own.contains(&ip);
        Client {
            label: peer.to_string(),
            name: None,
            machine: self.start.filter(|_| is_own),
            address: if is_own { self.address } else { ip },
            process: process.map(program_of),
        }
    }
}

/// Of a program that has divided itself (`fork`) and connects from each part, the first: its parts are one client. Another program
/// that it starts is another client, and so is what is not to be seen.
fn program_of(process: u32) -> u32 {
    let mut first = process;
    let Some(Process { mut parent, image }) = Process::look(process) else { return process };
    while let Some(above) = Process::look(parent).filter(|above| image.is_some() && above.image == image) {
        (first, parent) = (parent, above.parent);
    }
    first
}

struct Process {
    parent: u32,
    /// Where its stack and arguments begin: a part of a program has them from the whole, and a program that is started gets others.
    image: Option<[u64; 3]>,
}

impl Process {
    /// Of all that there is in `/proc`, `stat` alone waits for nothing, whatever the process does.
    fn look(process: u32) -> Option<Process> {
        let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        // Behind the name, which may have anything in it, comes the third field.
        let fields: Vec<&str> = stat[stat.rfind(')')? + 1..].split_whitespace().collect();
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        let image = [field(28)?, field(48)?, field(49)?];
        Some(Process {
            parent: u32::try_from(field(4)?).ok()?,
            image: Some(image).filter(|of| of.iter().all(|at| *at > 0)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};
    use std::time::Duration;

    #[test]
    fn another_program_is_another_client() {
        let own = std::process::id();
        let mut child = Command::new("sleep").arg("60").stdin(Stdio::null()).spawn().unwrap();
        assert_eq!(Process::look(child.id()).map(|child| child.parent), Some(own));
        assert_eq!(program_of(child.id()), child.id());
        // A shell that divides itself for what is in brackets.
        let mut shell =
            Command::new("sh").args(["-c", "(read line; true); true"]).stdin(Stdio::piped()).spawn().unwrap();
        let part = || {
            let of = |pid: &u32| Process::look(*pid).is_some_and(|part| part.parent == shell.id());
            let all = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
            all.into_iter().find(of)
        };
        let end = std::time::Instant::now() + Duration::from_secs(60);
        let part = loop {
            if let Some(part) = part() {
                break part;
            }
            assert!(std::time::Instant::now() < end, "the shell does not divide itself");
        };
        assert_eq!(program_of(part), shell.id());
        drop(shell.stdin.take());
        shell.wait().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_clients_paths_have_in_common_what_they_show() {
        let at = |address: &str| Some(address.parse::<SocketAddr>().unwrap());
        let address = Some("10.0.0.1".parse().unwrap());
        // No such processes.
        let (seven, eight) = (Some(u32::MAX - 7), Some(u32::MAX - 8));
        let (a, b) = (Machine { start: Some(1), address }, Machine { start: Some(2), address: None });
        let unix = a.client("unix, process 7", None, seven);
        assert!(unix.is(&a.client("x", at("127.0.0.1:5"), None)), "by TCP on the machine itself");
        assert!(unix.is(&a.client("x", at("10.0.0.1:5"), None)) && unix.is(&b.client("x", at("10.0.0.1:9"), None)));
        assert!(unix.is(&b.client("x", at("[::ffff:10.0.0.1]:9"), None)), "at another machine's host");
        for other in [
            a.client("unix, process 8", None, eight),
            a.client("x", at("10.0.0.2:5"), None),
            b.client("unix, process 7", None, seven),
            b.client("x", at("127.0.0.1:5"), None),
        ] {
            assert!(!unix.is(&other), "{other:?}");
        }
        let named = |machine: &Machine, from, name: &str| Client {
            name: Some(name.to_string()),
            ..machine.client("x", at(from), None)
        };
        assert!(named(&a, "10.0.0.7:1", "db").is(&named(&b, "10.0.1.7:1", "db")), "over two networks");
        assert!(!named(&a, "10.0.0.7:1", "db").is(&named(&a, "10.0.0.7:2", "web")));
    }
}
