//! `./x ansible`: the role for machines of a grid, by its own tools, and on two machines that are directories of this one.
//!
//! The role makes a grid on the first and has the second join, with metadata in an etcd of their own; a second run has to
//! change nothing. systemd and packages are left out: this machine is not to be changed.

use crate::tools;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

const CORE: &str = "ansible-core==2.19.14";
const LINT: &str = "ansible-lint==26.10.1";

/// Where examples of user data are.
const USER_DATA: &str = "integrations/cloud-init";

const ETCD_MAX: Duration = Duration::from_secs(30);

pub fn run() -> Result<()> {
    let python = tools::python("ansible", &[CORE, LINT])?;
    let tools = python.parent().context("a program is in a directory")?.to_path_buf();
    let ansible = tools::root().join("integrations/ansible");
    let playbook = |arguments: &[&str]| {
        let mut command = Command::new(tools.join("ansible-playbook"));
        command.current_dir(&ansible).args(arguments).arg("site.yml");
        command
    };
    tools::run(&mut playbook(&["-i", "inventory.yml", "--syntax-check"]))?;
    let mut lint = Command::new(tools.join("ansible-lint"));
    let path = format!("{}:{}", tools.display(), std::env::var("PATH")?);
    tools::run(lint.env("PATH", path).current_dir(&ansible).args(["--offline", "--strict", "."]))?;
    check_user_data()?;
    tools::build_checked(&["holdfast"])?;
    let site = Site::new(&tools)?;
    let inventory = site.inventory()?;
    for round in ["makes a grid of two machines", "changes nothing the second time"] {
        println!("ansible: the role {round}");
        let mut command = playbook(&["-i", &inventory.to_string_lossy()]);
        let said = tools::output_of(command.env("PATH", site.path()?).env("ANSIBLE_NOCOLOR", "1"))?;
        let recap: Vec<&str> = said.lines().filter(|line| line.contains(" changed=")).collect();
        let changed = recap.iter().filter(|line| !line.contains(" changed=0 ")).count();
        let wanted = if round.starts_with("makes") { 2 } else { 0 };
        ensure!(recap.len() == 2 && changed == wanted, "{wanted} machines were to be changed: {said}");
    }
    let machines = tools::json_of(site.holdfast("a").args(["machine", "list", "--json"]))?;
    let names: Vec<&str> = machines.as_array().into_iter().flatten().filter_map(|m| m["name"].as_str()).collect();
    ensure!(names == ["a", "b"], "the grid has other machines: {machines}");
    println!("2 passed, 0 failed");
    Ok(())
}

/// By cloud-init's own schema, on machines that have it: as a package it would take part in their next start.
fn check_user_data() -> Result<()> {
    if Command::new("cloud-init").arg("--version").output().is_err() {
        println!("ansible: user data skipped: no cloud-init here");
        return Ok(());
    }
    for entry in fs::read_dir(tools::root().join(USER_DATA))? {
        tools::run(Command::new("cloud-init").args(["schema", "--config-file"]).arg(entry?.path()))?;
    }
    Ok(())
}

/// Two machines of one grid, and what they stand on; gone with this.
struct Site {
    dir: PathBuf,
    python: PathBuf,
    etcd: Child,
    endpoint: String,
}

impl Drop for Site {
    fn drop(&mut self) {
        for name in ["b", "a"] {
            let _ = self.holdfast(name).args(["grid", "down", "--force"]).output();
        }
        let _ = self.etcd.kill();
        let _ = self.etcd.wait();
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// A port that nobody listens at now.
fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

impl Site {
    fn new(tools: &Path) -> Result<Site> {
        // Sockets' paths are short.
        let dir = std::env::temp_dir().join(format!("holdfast-ansible-{}", std::process::id()));
        fs::create_dir_all(&dir)?;
        let (client, peer) = (free_port()?, free_port()?);
        let [endpoint, peers] = [client, peer].map(|port| format!("http://127.0.0.1:{port}"));
        let log = fs::File::create(dir.join("etcd.log"))?;
        let mut command = Command::new("etcd");
        command.arg("--data-dir").arg(dir.join("etcd")).args([
            "--name",
            "m",
            "--initial-cluster",
            &format!("m={peers}"),
        ]);
        command.args(["--listen-client-urls", &endpoint, "--advertise-client-urls", &endpoint]);
        command.args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers]);
        let etcd = command.stdout(log.try_clone()?).stderr(log).spawn();
        let etcd = etcd.context("there is no program `etcd` in PATH; `./x setup` fetches it")?;
        let site = Site { dir, python: tools.join("python"), etcd, endpoint };
        let end = Instant::now() + ETCD_MAX;
        while TcpStream::connect(("127.0.0.1", client)).is_err() {
            ensure!(Instant::now() < end, "etcd does not listen; see {}", site.dir.join("etcd.log").display());
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(site)
    }

    fn grid(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn holdfast(&self, name: &str) -> Command {
        let mut command = Command::new(tools::checked_program("holdfast"));
        command.env("HOLDFAST_DIR", self.grid(name));
        command
    }

    fn path(&self) -> Result<String> {
        let program = tools::checked_program("holdfast");
        let dir = program.parent().context("a program is in a directory")?;
        Ok(format!("{}:{}", dir.display(), std::env::var("PATH")?))
    }

    fn inventory(&self) -> Result<PathBuf> {
        let path = self.dir.join("inventory.yml");
        let host = |name: &str| format!("    {name}: {{holdfast_dir: {}}}\n", self.grid(name).display());
        let vars = [
            ("ansible_connection", "local".to_string()),
            ("ansible_python_interpreter", self.python.display().to_string()),
            ("ansible_become", "false".to_string()),
            ("holdfast_etcd", self.endpoint.clone()),
            ("holdfast_address", "127.0.0.1".to_string()),
            ("holdfast_systemd", "false".to_string()),
            ("holdfast_options", "[--nodes, '1', --devices, '1', --device-size, 128MiB]".to_string()),
        ];
        let vars: String = vars.into_iter().map(|(key, value)| format!("    {key}: {value}\n")).collect();
        fs::write(&path, format!("holdfast:\n  vars:\n{vars}  hosts:\n{}{}", host("a"), host("b")))?;
        Ok(path)
    }
}
