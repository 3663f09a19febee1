//! Three members of etcd on this machine, with their defaults, for grids that keep their metadata there.

use anyhow::{Context, Result, bail};
use holdfast_lab::process::{Signal, is_hung, signal};
use std::fs::File;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const MEMBERS: usize = 3;
const READY_MAX: Duration = Duration::from_secs(30);

/// All members; killed when this is dropped.
pub struct Cluster {
    members: Vec<Member>,
}

struct Member {
    client: SocketAddr,
    child: Child,
}

impl Drop for Member {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Cluster {
    /// Starts them on what `dir`, which need not exist, holds; returns when they have a leader.
    pub fn start(dir: &Path) -> Result<Cluster> {
        let ports = free_ports(2 * MEMBERS)?;
        let (clients, peers) = ports.split_at(MEMBERS);
        let url = |address: &SocketAddr| format!("http://{address}");
        let all: Vec<String> = peers.iter().enumerate().map(|(n, peer)| format!("m{n}={}", url(peer))).collect();
        let mut members = Vec::new();
        for (n, (client, peer)) in clients.iter().zip(peers).enumerate() {
            let dir = dir.join(format!("etcd-{n}"));
            std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
            let log = File::create(dir.join("log"))?;
            let mut command = Command::new("etcd");
            command.args(["--name", &format!("m{n}"), "--initial-cluster", &all.join(",")]);
            command.args(["--listen-client-urls", &url(client), "--advertise-client-urls", &url(client)]);
            command.args(["--listen-peer-urls", &url(peer), "--initial-advertise-peer-urls", &url(peer)]);
            command.arg("--data-dir").arg(dir.join("data"));
            command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
            let child = command.spawn().context("cannot start etcd; ./x setup fetches it")?;
            members.push(Member { client: *client, child });
        }
        let cluster = Cluster { members };
        let since = Instant::now();
        while cluster.leader().is_none() {
            if since.elapsed() > READY_MAX {
                bail!("etcd has no leader after {} s; its logs are in {}", READY_MAX.as_secs(), dir.display());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(cluster)
    }

    /// For `--etcd`.
    pub fn endpoints(&self) -> String {
        let urls: Vec<String> = self.members.iter().map(|member| format!("http://{}", member.client)).collect();
        urls.join(",")
    }

    /// The process of the member that says that it leads.
    pub fn leader(&self) -> Option<u32> {
        let leads = |member: &&Member| {
            metrics(member.client).is_ok_and(|text| text.lines().any(|line| line == "etcd_server_is_leader 1"))
        };
        self.members.iter().find(leads).map(|member| member.child.id())
    }

    pub fn pids(&self) -> Vec<u32> {
        self.members.iter().map(|member| member.child.id()).collect()
    }
}

/// Processes stopped in mid-air until this is dropped.
pub struct Hung(Vec<u32>);

impl Hung {
    pub fn strike(pids: Vec<u32>) -> Result<Hung> {
        pids.iter().try_for_each(|pid| signal(*pid, Signal::STOP))?;
        let hung = Hung(pids);
        let since = Instant::now();
        while !hung.0.iter().all(|pid| is_hung(*pid)) {
            if since.elapsed() > Duration::from_secs(5) {
                bail!("processes {:?} do not stop", hung.0);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(hung)
    }
}

impl Drop for Hung {
    fn drop(&mut self) {
        for pid in &self.0 {
            let _ = signal(*pid, Signal::CONT);
        }
    }
}

fn metrics(client: SocketAddr) -> Result<String> {
    let patience = Duration::from_secs(2);
    let mut stream = TcpStream::connect_timeout(&client, patience)?;
    stream.set_read_timeout(Some(patience))?;
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

/// All different; somebody else might take one before it is used.
fn free_ports(count: usize) -> Result<Vec<SocketAddr>> {
    let listeners: std::io::Result<Vec<TcpListener>> =
        (0..count).map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).collect();
    Ok(listeners?.iter().map(TcpListener::local_addr).collect::<std::io::Result<_>>()?)
}
