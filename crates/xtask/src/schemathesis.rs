//! `./x schemathesis`: requests made from the description of the HTTP interface, right ones and wrong ones, to a grid that
//! is made for them. Each answer is held against the description.
//!
//! Two passes, each with a grid of its own: what leaves a grid whole, then what takes it apart. Schemathesis speaks TCP: a
//! port of this machine leads to the host's socket.

use crate::tools;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::io::{Read, Write, copy};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

const VERSION: &str = "4.32.5";

/// For each of what can be asked for; what is at the limits of the description comes beside.
const EXAMPLES: &str = "20";

/// A stream, which has no end that could be waited for: a test of its own listens to it (`tests/clients.rs`).
const ENDLESS: &str = "/v1/events";

/// What takes a grid apart, as a pattern of paths; so does each DELETE.
const DESTRUCTIVE: &str = "/(cut|drain|machines/)";

/// Statuses that answer a right request beside those that Schemathesis knows of: a key of another request is refused by
/// 422. A server's own errors are allowed where they say that something was away, of another release, or full. No schema
/// tells which tiers go with which layout and size: of a volume that is made they may be refused. Nor does one tell of a
/// request of the command line: these change with each release, so that most that are made up are none.
const CONFIG: &str = r#"
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "401", "403", "404", "409", "422", "501", "503", "507"]
[[operations]]
include-path = "/v1/volumes"
checks.positive_data_acceptance.expected-statuses = ["2xx", "400", "401", "403", "404", "409", "422", "501", "503", "507"]
[[operations]]
include-path = "/v1/requests"
checks.positive_data_acceptance.expected-statuses = ["2xx", "400", "401", "403", "404", "409", "422", "501", "503", "507"]
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", "501", "503", "507"]
"#;

struct Options {
    examples: String,
    seed: Option<String>,
}

pub fn run(arguments: &[String]) -> Result<()> {
    let options = options_of(arguments)?;
    // Of the version that the findings were mended with.
    let python = tools::python("schemathesis", &[&format!("schemathesis=={VERSION}")])?;
    let program = python.with_file_name("schemathesis");
    tools::build_checked(&["holdfast"])?;
    let work = tools::target_dir().join("schemathesis");
    let mut failed = Vec::new();
    for (name, choice) in [("whole", "exclude"), ("apart", "include")] {
        println!("schemathesis: what {} a grid {name}", if choice == "exclude" { "leaves" } else { "takes" });
        let grid = Grid::up(&work.join(name))?;
        if grid.fuzz(&program, &options, choice)? {
            failed.push(name);
        }
    }
    if !failed.is_empty() {
        bail!("findings in {}; reports and logs are in {}", failed.join(" and "), work.display());
    }
    Ok(())
}

fn options_of(arguments: &[String]) -> Result<Options> {
    let mut options = Options { examples: EXAMPLES.to_string(), seed: None };
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let value = rest.next().filter(|value| value.parse::<u128>().is_ok());
        match (argument.as_str(), value) {
            ("--examples", Some(count)) => options.examples.clone_from(count),
            ("--seed", Some(seed)) => options.seed = Some(seed.clone()),
            _ => bail!("`./x schemathesis` takes --examples N and --seed N"),
        }
    }
    Ok(options)
}

/// A grid with something of everything.
struct Grid {
    dir: PathBuf,
    work: PathBuf,
}

impl Drop for Grid {
    fn drop(&mut self) {
        let _ = self.holdfast(&["grid", "down", "--force"]).output();
    }
}

impl Grid {
    fn up(work: &Path) -> Result<Grid> {
        let grid = Grid { dir: work.join("grid"), work: work.to_path_buf() };
        if grid.dir.exists() {
            let _ = grid.holdfast(&["grid", "down", "--force"]).output();
        }
        if work.exists() {
            std::fs::remove_dir_all(work).with_context(|| format!("cannot empty {}", work.display()))?;
        }
        std::fs::create_dir_all(work)?;
        grid.key()?;
        grid.told("grid up --nodes 3 --devices 1 --device-size 1GiB")?;
        for volume in ["vm1", "vm2", "vm3", "old"] {
            grid.told(&format!("volume create {volume} --size 64MiB"))?;
        }
        for line in [
            "volume create m1 --size 64MiB --layout mirror:2",
            "snapshot create vm1 s1",
            "snapshot create vm1 s2",
            "snapshot create m1 s1",
            "volume clone vm1@s1 c1",
            "volume clone --separate vm1@s1 c2",
            "volume delete old",
        ] {
            grid.told(line)?;
        }
        Ok(grid)
    }

    /// A key that volumes may be encrypted with.
    fn key(&self) -> Result<()> {
        let path = self.key_path();
        std::fs::write(&path, "5a".repeat(32))?;
        Ok(std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?)
    }

    fn key_path(&self) -> PathBuf {
        self.work.join("key")
    }

    fn holdfast(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(tools::checked_program("holdfast"));
        command.arg("--dir").arg(&self.dir).args(arguments);
        command
    }

    fn told(&self, line: &str) -> Result<()> {
        let words: Vec<&str> = line.split(' ').collect();
        tools::output_of(&mut self.holdfast(&words)).map(drop)
    }

    fn look(&self, path: &str) -> Result<Value> {
        let mut stream = UnixStream::connect(self.dir.join("api.sock")).context("the host is gone")?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: host\r\nConnection: close\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        let (_, body) = text.split_once("\r\n\r\n").context("the host's answer has no end")?;
        serde_json::from_str(body).with_context(|| format!("{path} gave no JSON"))
    }

    /// Whether anything was found; `choice` is what is done with all that takes a grid apart.
    fn fuzz(&self, program: &Path, options: &Options, choice: &str) -> Result<bool> {
        let host = self.look("/v1/status")?["pid"].clone();
        let description = self.work.join("description.json");
        std::fs::write(&description, self.description()?.to_string())?;
        let config = self.work.join("schemathesis.toml");
        std::fs::write(&config, CONFIG)?;
        let url = format!("http://127.0.0.1:{}", forward(self.dir.join("api.sock"))?);
        let mut command = Command::new(program);
        // It leaves notes where it runs.
        command.current_dir(&self.work);
        command.arg("--config-file").arg(&config).arg("run").arg(&description).args(["--url", &url]);
        command.args(["--checks", "all", "--continue-on-failure", "--generation-database", "none"]);
        command.args(["--max-examples", &options.examples, "--request-timeout", "200", "--warnings", "off"]);
        command.args(["--max-response-time", "160"]);
        command.args(["--phases", "examples,coverage,fuzzing", "--output-sanitize", "false", "--report", "json"]);
        command.arg("--report-dir").arg(self.work.join("report"));
        command.args(options.seed.iter().flat_map(|seed| ["--seed", seed]));
        command.args([&format!("--{choice}-method"), "DELETE", &format!("--{choice}-path-regex"), DESTRUCTIVE]);
        if choice == "exclude" {
            command.args(["--exclude-path", ENDLESS]);
        }
        let is_well = command.status().context("cannot start Schemathesis")?.success();
        let is_same = self.look("/v1/status").is_ok_and(|status| status["pid"] == host);
        if !is_same {
            eprintln!("schemathesis: the host has ended; {} says why", self.dir.join("logs/host.log").display());
        }
        Ok(!is_well || !is_same)
    }

    /// The interface's own description, with names that there are beside all others, and whole examples where a pattern
    /// can't tell what makes sense.
    fn description(&self) -> Result<Value> {
        let mut all = tools::json_of(&mut self.holdfast(&["reference", "--http"]))?;
        let nodes = self.look("/v1/nodes")?;
        let devices = nodes["nodes"].as_array().into_iter().flatten().filter_map(|node| node["devices"].as_array());
        let devices: Vec<Value> = devices.flatten().map(|device| device["device"].clone()).collect();
        for (path, operations) in all["paths"].as_object_mut().context("there are no paths")? {
            for operation in operations.as_object_mut().into_iter().flat_map(|them| them.values_mut()) {
                let found = operation.get_mut("parameters").and_then(Value::as_array_mut);
                let Some(parameters) = found else { continue };
                // A key of one request refuses all others: one path is enough for it.
                parameters.retain(|of| of["in"] != "header" || path.ends_with("/protect"));
                for parameter in parameters.iter_mut().filter(|of| of["in"] == "path") {
                    let known = match parameter["name"].as_str() {
                        Some("volume") => json!(["vm1", "vm2", "vm3", "m1", "c1", "c2", "old"]),
                        Some("snapshot") => json!(["s1", "s2"]),
                        Some("node") => json!([1, 2, 3]),
                        Some("device") => json!(devices),
                        Some("filter") => json!([1]),
                        _ => json!(["local"]),
                    };
                    widen(&mut parameter["schema"], known);
                }
            }
        }
        let schemas = &mut all["components"]["schemas"];
        widen(&mut schemas["Name"], json!(["vm1", "vm2", "m1", "c1", "c2", "s3", "new", "local"]));
        widen(&mut schemas["Layout"], json!(["mirror:2", "mirror:3", "parity:2+1", "mirror:2@device"]));
        widen(&mut schemas["KeyFile"], json!([self.key_path()]));
        for name in ["Qos", "FilterSpec"] {
            schemas[name] = json!({ "enum": schemas[name]["examples"] });
        }
        Ok(all)
    }
}

/// These as well, and more often than they would come.
fn widen(schema: &mut Value, known: Value) {
    *schema = json!({ "anyOf": [{ "enum": known }, schema.take()] });
}

/// A port that leads to a socket, for as long as this process runs.
fn forward(socket: PathBuf) -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let port = listener.local_addr()?.port();
    std::thread::spawn(move || {
        for near in listener.incoming().flatten() {
            let Ok(far) = UnixStream::connect(&socket) else { continue };
            std::thread::spawn(move || carry(near, far));
        }
    });
    Ok(port)
}

fn carry(near: TcpStream, far: UnixStream) -> Option<()> {
    let (mut from, mut to) = (near.try_clone().ok()?, far.try_clone().ok()?);
    std::thread::spawn(move || {
        let _ = copy(&mut from, &mut to);
        to.shutdown(Shutdown::Write)
    });
    let _ = copy(&mut &far, &mut &near);
    near.shutdown(Shutdown::Both).ok()
}
