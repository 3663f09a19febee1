//! One machine: its processes, and what can be done to all of them at once.
//!
//! Role: starts real processes in the machine's namespace, by the command line as an operator would, and signals them. Everything of
//! a machine is hit together: the host, the node and the member of etcd that it has.

use super::net;
use anyhow::{Context, Result, ensure};
use holdfast_lab::grid::Grid;
use holdfast_lab::process::{self, Signal};
use holdfast_lab::program;
use serde_json::Value;
use std::fmt;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Where NBD is served over TCP.
const NBD_PORT: u16 = 10809;
const ETCD_CLIENT_PORT: u16 = 2379;
const ETCD_PEER_PORT: u16 = 2380;

/// What the configuration that `grid etcd member` makes names on a member's machine.
const MEMBER_FILES: &str = "/etc/holdfast-etcd";
const MEMBER_DATA: &str = "/var/lib/etcd";

/// How long a command may take, whatever it waits for.
const COMMAND_MAX: Duration = Duration::from_secs(100);

/// How long etcd may take to answer, once as many members are there as it needs.
const ETCD_MAX: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Part {
    H1,
    H2,
    N1,
    N2,
    N3,
    /// The witness: nothing but a member of etcd.
    W,
    /// Machines of which each has everything: a host, a node, and perhaps a member of etcd.
    A,
    B,
    C,
    D,
}

impl Part {
    pub const SIX: [Part; 6] = [Part::H1, Part::H2, Part::N1, Part::N2, Part::N3, Part::W];
    pub const FOUR: [Part; 4] = [Part::A, Part::B, Part::C, Part::D];
    pub const HOSTS: [Part; 2] = [Part::H1, Part::H2];

    pub fn name(self) -> &'static str {
        match self {
            Part::H1 => "h1",
            Part::H2 => "h2",
            Part::N1 => "n1",
            Part::N2 => "n2",
            Part::N3 => "n3",
            Part::W => "w",
            Part::A => "a",
            Part::B => "b",
            Part::C => "c",
            Part::D => "d",
        }
    }

    pub fn all() -> impl Iterator<Item = Part> {
        Part::SIX.into_iter().chain(Part::FOUR)
    }

    pub fn parse(text: &str) -> Option<Part> {
        Part::all().find(|part| part.name() == text)
    }

    pub fn address(self) -> Ipv4Addr {
        net::address_of(match self {
            Part::H1 => 1,
            Part::H2 => 2,
            Part::N1 => 11,
            Part::N2 => 12,
            Part::N3 => 13,
            Part::W => 21,
            Part::A => 31,
            Part::B => 32,
            Part::C => 33,
            Part::D => 34,
        })
    }

    pub fn is_host(self) -> bool {
        Part::HOSTS.contains(&self)
    }

    pub fn nbd(self) -> SocketAddr {
        SocketAddr::from((self.address(), NBD_PORT))
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Which machines have what. Clients go to [`Part::HOSTS`] in any case.
#[derive(PartialEq, Eq, Debug)]
pub struct Shape {
    /// Those with a storage node.
    pub nodes: &'static [Part],
    /// Those with a member of etcd: with any two of them metadata can be changed.
    pub voters: [Part; 3],
}

impl Shape {
    /// Two hosts, three nodes, a witness.
    pub const SIX: &'static Shape =
        &Shape { nodes: &[Part::N1, Part::N2, Part::N3], voters: [Part::N1, Part::N2, Part::W] };
    /// Two machines, each a host and a node, and a witness; the others are not used.
    pub const TWO: &'static Shape = &Shape { nodes: &[Part::H1, Part::H2], voters: [Part::H1, Part::H2, Part::W] };

    /// Machines that each have a host, a node and a member of etcd; the fourth comes in the first one's place.
    pub const FOUR: &'static Shape = &Shape { nodes: &Part::FOUR, voters: [Part::A, Part::B, Part::C] };

    /// The machines that are used: those with nodes first.
    pub fn parts(&self) -> Vec<Part> {
        let mut parts = self.nodes.to_vec();
        for part in Part::HOSTS.into_iter().chain(self.voters) {
            if !parts.contains(&part) {
                parts.push(part);
            }
        }
        parts
    }

    pub fn is_node(&self, part: Part) -> bool {
        self.nodes.contains(&part)
    }

    pub fn is_voter(&self, part: Part) -> bool {
        self.voters.contains(&part)
    }

    /// Client URLs of all members of etcd.
    pub fn endpoints(&self) -> String {
        self.voters.map(|part| format!("http://{}:{ETCD_CLIENT_PORT}", part.address())).join(",")
    }
}

pub struct Machine {
    pub part: Part,
    shape: &'static Shape,
    grid: Grid,
    etcd: Option<Child>,
}

impl Machine {
    pub fn new(part: Part, shape: &'static Shape, binary: &Path, dir: &Path) -> Machine {
        let space = format!("--net=/run/netns/{}", net::namespace(part.name()));
        let grid = Grid::new(binary, &dir.join(part.name()));
        Machine { part, shape, grid: grid.on(part.name(), &["nsenter", &space, "--"], COMMAND_MAX), etcd: None }
    }

    pub fn logs(&self) -> PathBuf {
        self.grid.logs()
    }

    /// Runs a command of Holdfast on this machine; its standard output.
    /// Gives the host so many reactors, and starts it anew.
    pub fn set_reactors(&self, count: usize) -> Result<()> {
        let settings = std::fs::OpenOptions::new().append(true).open(self.grid.path("holdfast.toml"));
        writeln!(settings.context("the grid's settings")?, "cpu.reactors = {count}")?;
        self.holdfast(&["grid", "down", "--host"])?;
        self.holdfast(&["grid", "up"]).map(drop)
    }

    pub fn holdfast(&self, arguments: &[&str]) -> Result<String> {
        self.grid.run(arguments)
    }

    /// The same, however it ends.
    pub fn told(&self, arguments: &[&str]) -> Result<Output> {
        self.grid.told(arguments)
    }

    pub fn json(&self, arguments: &[&str]) -> Result<Value> {
        self.grid.json(arguments)
    }

    fn inside(&self, program: &Path) -> Command {
        let mut command = self.grid.program(program);
        command.stdin(Stdio::null());
        command
    }

    /// Starts this machine's member of etcd, if it is to have one.
    pub fn start_etcd(&mut self) -> Result<()> {
        if !self.shape.is_voter(self.part) {
            return Ok(());
        }
        let program = program::find("etcd").context("there is no program `etcd`; `./x setup` fetches it")?;
        let dir = self.grid.path("etcd");
        std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let log = std::fs::File::options().create(true).append(true).open(dir.join("etcd.log"))?;
        let url = |part: Part, port: u16| format!("http://{}:{port}", part.address());
        let (client, peer) = (url(self.part, ETCD_CLIENT_PORT), url(self.part, ETCD_PEER_PORT));
        let cluster = self.shape.voters.map(|part| format!("{part}={}", url(part, ETCD_PEER_PORT))).join(",");
        let mut command = self.inside(&program);
        command.args(["--name", self.part.name(), "--initial-cluster", &cluster]);
        // A member that is cut off from the leader alone asks before it has all elect anew; later releases do so by default.
        command.arg("--pre-vote").arg("--data-dir").arg(dir.join("data"));
        command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
        command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        command.stdout(log.try_clone()?).stderr(log);
        self.spawn_etcd(command)
    }

    fn spawn_etcd(&mut self, mut command: Command) -> Result<()> {
        // Ctrl-C on the terminal is this program's to act on.
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        self.etcd = Some(command.spawn().context("cannot start etcd")?);
        Ok(())
    }

    /// Starts a member by the files that the grid has made for it, which lie here in the place of what they name.
    pub fn start_member(&mut self) -> Result<()> {
        let program = program::find("etcd").context("there is no program `etcd`; `./x setup` fetches it")?;
        let files = self.member_dir();
        let text = std::fs::read_to_string(files.join("etcd.env")).context("a member has no configuration")?;
        let text = text.replace(MEMBER_FILES, &files.display().to_string());
        let text = text.replace(MEMBER_DATA, &self.member_data().display().to_string());
        let log = std::fs::File::options().create(true).append(true).open(files.join("etcd.log"))?;
        let mut command = self.inside(&program);
        command.envs(text.lines().filter_map(|line| line.split_once('=')));
        command.stdout(log.try_clone()?).stderr(log);
        self.spawn_etcd(command)?;
        let end = Instant::now() + ETCD_MAX;
        while TcpStream::connect((self.part.address(), ETCD_CLIENT_PORT)).is_err() {
            ensure!(Instant::now() < end, "etcd on {} takes no connections; see its etcd.log", self.part);
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Where files of the machine's member of etcd are, and no others of the machine.
    pub fn member_dir(&self) -> PathBuf {
        self.grid.dir().with_extension("etcd")
    }

    pub fn member_data(&self) -> PathBuf {
        self.member_dir().join("data")
    }

    pub fn kill_etcd(&mut self) -> Result<()> {
        let Some(mut child) = self.etcd.take() else { return Ok(()) };
        child.kill().and_then(|()| child.wait()).map(drop).context("etcd can't be killed")
    }

    /// All of the machine's directories are gone.
    pub fn remove(&self) -> Result<()> {
        for dir in [self.grid.dir().to_path_buf(), self.member_dir()] {
            std::fs::remove_dir_all(&dir).with_context(|| format!("cannot remove {}", dir.display()))?;
        }
        Ok(())
    }

    /// Machines with a node have a host of their own, too.
    fn has_host(&self) -> bool {
        self.part.is_host() || self.shape.is_node(self.part)
    }

    /// Brings everything up that this machine is to have and that does not run.
    pub fn start(&mut self) -> Result<()> {
        if self.etcd.is_none() {
            self.start_etcd()?;
        }
        if self.has_host() {
            self.holdfast(&["grid", "up"])?;
        }
        Ok(())
    }

    /// Processes by what they are: the host's, the node's, etcd's.
    fn pids(&self) -> Vec<(String, u32)> {
        let etcd = self.etcd.as_ref().map(|child| ("etcd".to_string(), child.id()));
        self.grid.processes().into_iter().chain(etcd).collect()
    }

    fn signal(&self, signal: Signal) -> Result<Vec<u32>> {
        let pids = self.pids();
        ensure!(!pids.is_empty(), "no process runs on {}; its logs say why ({})", self.part, self.logs().display());
        for (role, pid) in &pids {
            process::signal(*pid, signal).with_context(|| format!("{role} of {}", self.part))?;
        }
        Ok(pids.into_iter().map(|(_, pid)| pid).collect())
    }

    /// Kills everything at once, as a machine that loses its power does.
    pub fn kill(&mut self) -> Result<()> {
        let pids = self.signal(Signal::KILL)?;
        if let Some(mut child) = self.etcd.take() {
            child.wait()?;
        }
        pids.into_iter().try_for_each(|pid| process::wait_gone(pid).with_context(|| format!("on {}", self.part)))
    }

    pub fn hang(&self) -> Result<()> {
        self.signal(Signal::STOP).map(drop)
    }

    pub fn resume(&self) -> Result<()> {
        self.signal(Signal::CONT).map(drop)
    }

    /// What has ended and should not have.
    pub fn missing(&mut self) -> Option<String> {
        let etcd = self.etcd.as_mut().and_then(|child| child.try_wait().ok().flatten());
        if let Some(status) = etcd {
            return Some(format!("etcd on {} has ended by itself ({status})", self.part));
        }
        let pids = self.pids();
        let wanted = [("host", self.has_host()), ("node", self.shape.is_node(self.part))];
        let is_there = |role: &str| pids.iter().any(|(name, _)| name.starts_with(role));
        let role = wanted.into_iter().find(|(role, is_wanted)| *is_wanted && !is_there(role))?.0;
        Some(format!("the {role} on {} has ended by itself; see {}", self.part, self.logs().display()))
    }
}

/// Waits until every one of these members says that it is well, which it does only with a leader.
pub fn wait_etcd(members: &[Part]) -> Result<()> {
    let end = Instant::now() + ETCD_MAX;
    for part in members {
        while let Err(error) = etcd_health(*part) {
            if Instant::now() > end {
                return Err(error.context(format!("etcd on {part} is not well after {ETCD_MAX:?}; see its etcd.log")));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
    Ok(())
}

/// Waits until two of these say so: where a link is cut the third may not hear of the leader.
pub fn wait_etcd_majority(members: &[Part]) -> Result<()> {
    let end = Instant::now() + ETCD_MAX;
    loop {
        let (well, ill): (Vec<_>, Vec<_>) = members.iter().map(|part| etcd_health(*part)).partition(Result::is_ok);
        match ill.into_iter().find_map(Result::err) {
            Some(error) if well.len() < 2 && Instant::now() > end => {
                return Err(error.context(format!("etcd has no majority after {ETCD_MAX:?}; see the etcd.log of each")));
            }
            Some(_) if well.len() < 2 => std::thread::sleep(Duration::from_millis(100)),
            _ => return Ok(()),
        }
    }
}

fn etcd_health(part: Part) -> Result<()> {
    let address = SocketAddr::from((part.address(), ETCD_CLIENT_PORT));
    let patience = Duration::from_secs(2);
    let mut stream = TcpStream::connect_timeout(&address, patience)?;
    stream.set_read_timeout(Some(patience))?;
    stream.write_all(b"GET /health HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    ensure!(answer.contains("\"health\":\"true\""), "etcd says: {}", answer.lines().last().unwrap_or_default());
    Ok(())
}
