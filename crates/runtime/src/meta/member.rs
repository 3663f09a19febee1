//! An etcd member of one's own, as a child process: for tests, which need real clusters that can be hurt.
//!
//! It lives as long as its handle. It needs the program `etcd` in the search path: whoever tests without it says so.

use rustix::process::{Pid, Signal, kill_process};
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long a member may take until it listens.
const START_MAX: Duration = Duration::from_secs(60);

/// What a member is told.
#[derive(Clone, Debug)]
pub struct MemberConfig {
    pub name: String,
    /// Its data and log are kept here.
    pub dir: PathBuf,
    pub client: SocketAddr,
    pub peer: SocketAddr,
    /// Names and peer addresses of all members, its own included.
    pub cluster: Vec<(String, SocketAddr)>,
    pub tls: Option<MemberTls>,
    /// Its database takes no more than that; by default etcd's 2 GiB.
    pub quota_bytes: Option<u64>,
}

/// PEM files of a member that serves clients over TLS, and only those who show a certificate of the same authority.
#[derive(Clone, Debug)]
pub struct MemberTls {
    pub ca: PathBuf,
    pub certificate: PathBuf,
    pub key: PathBuf,
}

/// A running member.
#[derive(Debug)]
pub struct Member {
    config: MemberConfig,
    child: Child,
}

/// Where the program is, if it is installed.
pub fn program() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join("etcd")).find(|file| file.is_file())
}

impl MemberConfig {
    /// A member that is a cluster by itself.
    pub fn alone(dir: &Path, client: SocketAddr, peer: SocketAddr) -> MemberConfig {
        let name = "m0".to_string();
        MemberConfig {
            cluster: vec![(name.clone(), peer)],
            name,
            dir: dir.to_path_buf(),
            client,
            peer,
            tls: None,
            quota_bytes: None,
        }
    }

    pub fn endpoint(&self) -> String {
        format!("{}://{}", if self.tls.is_some() { "https" } else { "http" }, self.client)
    }
}

impl Member {
    /// Starts it, on what its directory holds, if anything.
    pub fn start(config: MemberConfig) -> io::Result<Member> {
        let program = program().ok_or_else(|| io::Error::other("there is no program `etcd` in PATH"))?;
        std::fs::create_dir_all(&config.dir)?;
        let log = std::fs::File::options().create(true).append(true).open(config.dir.join("log"))?;
        let peer_url = format!("http://{}", config.peer);
        let cluster: Vec<String> = config.cluster.iter().map(|(name, peer)| format!("{name}=http://{peer}")).collect();
        let mut command = Command::new(program);
        command.args(["--name", &config.name, "--initial-cluster", &cluster.join(",")]);
        command.arg("--data-dir").arg(config.dir.join("data"));
        command.args(["--listen-client-urls", &config.endpoint(), "--advertise-client-urls", &config.endpoint()]);
        command.args(["--listen-peer-urls", &peer_url, "--initial-advertise-peer-urls", &peer_url]);
        if let Some(quota) = config.quota_bytes {
            command.args(["--quota-backend-bytes", &quota.to_string()]);
        }
        if let Some(tls) = &config.tls {
            command.arg("--cert-file").arg(&tls.certificate).arg("--key-file").arg(&tls.key);
            command.arg("--client-cert-auth").arg("--trusted-ca-file").arg(&tls.ca);
        }
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = command.spawn()?;
        Ok(Member { config, child })
    }

    /// Waits until it takes connections; of a cluster, start the others first.
    pub fn wait(&mut self) -> io::Result<()> {
        let end = Instant::now() + START_MAX;
        while std::net::TcpStream::connect_timeout(&self.config.client, Duration::from_millis(100)).is_err() {
            let ended = self.child.try_wait()?;
            if ended.is_some() || Instant::now() > end {
                let log = std::fs::read_to_string(self.config.dir.join("log")).unwrap_or_default();
                return Err(io::Error::other(format!("etcd did not come up ({ended:?}): {log}")));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    pub fn config(&self) -> &MemberConfig {
        &self.config
    }

    /// Stops it in mid-air, as a machine that hangs, until [`Member::resume`].
    pub fn hang(&self) -> io::Result<()> {
        self.signal(Signal::STOP)
    }

    pub fn resume(&self) -> io::Result<()> {
        self.signal(Signal::CONT)
    }

    /// Ends it at once, and gives back how it can be started anew.
    pub fn kill(self) -> MemberConfig {
        self.config.clone()
    }

    fn signal(&self, signal: Signal) -> io::Result<()> {
        let pid = Pid::from_raw(self.child.id().cast_signed()).expect("a child has an id");
        Ok(kill_process(pid, signal)?)
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
