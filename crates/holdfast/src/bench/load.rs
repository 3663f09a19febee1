//! fio as the load of benchmarks: what many clients do at once, what came of it, and which CPU it cost.
//!
//! One process of fio plays all clients, each by a connection of its own. CPU of the host and of nodes is that of this machine's
//! processes; what others spend is not seen here.

use crate::drill::tools::output_of;
use crate::grid::layout::GridDir;
use crate::grid::processes::Role;
use crate::nbd_uri::of_socket;
use anyhow::{Context, Result, bail};
use holdfast_runtime::process;
use serde::Serialize;
use serde_json::Value;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Before figures count.
pub const WARM_UP_S: u64 = 10;

/// What one client reads and writes.
#[derive(Clone, Debug)]
pub enum Target {
    Volume(String),
    /// Of a volume, so many bytes from there on.
    Part {
        volume: String,
        offset: u64,
        bytes: u64,
    },
    /// A file, past the page cache.
    File(PathBuf),
}

impl Target {
    fn arguments(&self, socket: &Path) -> Vec<String> {
        match self {
            Target::Volume(name) => vec!["--ioengine=nbd".to_string(), format!("--uri={}", of_socket(socket, name))],
            Target::Part { volume, offset, bytes } => {
                let mut whole = Target::Volume(volume.clone()).arguments(socket);
                whole.extend([format!("--offset={offset}"), format!("--size={bytes}")]);
                whole
            }
            Target::File(path) => vec!["--ioengine=io_uring".to_string(), format!("--filename={}", path.display())],
        }
    }
}

/// What all clients do.
#[derive(Clone, Debug)]
pub struct Load {
    /// In fio's words.
    pub rw: &'static str,
    /// Of a mixture.
    pub read_percent: Option<u32>,
    /// In fio's words.
    pub block: String,
    /// Of blocks of several sizes, in fio's words: 4k/50:8k/50.
    pub split: Option<&'static str>,
    /// Requests in flight, of each thread of each client.
    pub depth: u32,
    pub threads: u32,
    pub span: Span,
    /// Of what is written, so much is as random bytes are.
    pub random_percent: u32,
    pub seed: u64,
}

#[derive(Clone, Copy, Debug)]
pub enum Span {
    /// After [`WARM_UP_S`], or as long if that is less.
    Seconds(u64),
    /// So much of each target, from its beginning.
    Bytes(u64),
}

impl Load {
    /// Everything once, in order.
    pub fn fill(bytes: u64) -> Load {
        let span = Span::Bytes(bytes);
        Load { rw: "write", block: "1m".to_string(), depth: 4, span, random_percent: 50, ..Load::random("1m", 4, 0) }
    }

    pub fn random(block: &str, depth: u32, seconds: u64) -> Load {
        Load {
            rw: "randread",
            read_percent: None,
            block: block.to_string(),
            split: None,
            depth,
            threads: 1,
            span: Span::Seconds(seconds),
            random_percent: 50,
            seed: 1,
        }
    }

    fn arguments(&self) -> Vec<String> {
        let mut arguments = vec![
            format!("--rw={}", self.rw),
            self.split.map_or(format!("--bs={}", self.block), |split| format!("--bssplit={split}")),
            format!("--iodepth={}", self.depth),
            format!("--numjobs={}", self.threads),
            format!("--randseed={}", self.seed),
            "--direct=1".to_string(),
            "--thread=1".to_string(),
            "--norandommap=1".to_string(),
            "--refill_buffers=1".to_string(),
            format!("--buffer_compress_percentage={}", 100 - self.random_percent),
            "--group_reporting=1".to_string(),
        ];
        arguments.extend(self.read_percent.map(|percent| format!("--rwmixread={percent}")));
        match self.span {
            Span::Seconds(seconds) => {
                let warm = WARM_UP_S.min(seconds);
                arguments.extend([
                    "--time_based=1".to_string(),
                    format!("--runtime={seconds}"),
                    format!("--ramp_time={warm}"),
                ]);
            }
            Span::Bytes(bytes) => arguments.push(format!("--io_size={bytes}")),
        }
        arguments
    }
}

/// One direction.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct Side {
    pub iops: f64,
    /// Of a second, over seconds.
    pub iops_sd: f64,
    pub megabytes: f64,
    pub mean_ms: f64,
    /// Over requests.
    pub sd_ms: f64,
    pub p99_ms: f64,
    /// Requests.
    pub count: f64,
}

/// What came of a load.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Done {
    pub reads: Side,
    pub writes: Side,
    /// CPU of a request, in microseconds: clients, this machine's host, its nodes.
    pub clients_us: f64,
    pub host_us: f64,
    pub nodes_us: f64,
    /// Of all CPU that the machine has.
    pub cpu_percent: f64,
    /// What to type to repeat it while its volumes are there.
    pub command: String,
}

impl Done {
    pub fn iops(&self) -> f64 {
        self.reads.iops + self.writes.iops
    }

    /// Of a second: independent directions.
    pub fn iops_sd(&self) -> f64 {
        self.reads.iops_sd.hypot(self.writes.iops_sd)
    }

    pub fn megabytes(&self) -> f64 {
        self.reads.megabytes + self.writes.megabytes
    }

    fn count(&self) -> f64 {
        (self.reads.count + self.writes.count).max(1.0)
    }

    pub fn mean_ms(&self) -> f64 {
        (self.reads.mean_ms * self.reads.count + self.writes.mean_ms * self.writes.count) / self.count()
    }

    /// Of reads and writes together, by their means and deviations.
    pub fn sd_ms(&self) -> f64 {
        let mean = self.mean_ms();
        let square = |side: &Side| side.count * (side.sd_ms.powi(2) + (side.mean_ms - mean).powi(2));
        ((square(&self.reads) + square(&self.writes)) / self.count()).sqrt()
    }

    /// Of the direction that is slower.
    pub fn p99_ms(&self) -> f64 {
        self.reads.p99_ms.max(self.writes.p99_ms)
    }

    /// Host and nodes.
    pub fn ours_us(&self) -> f64 {
        self.host_us + self.nodes_us
    }
}

/// CPU of this machine's host and nodes by now.
fn cpu_of(dir: &GridDir) -> Result<(Duration, Duration)> {
    let of = |role: Role| {
        let running = role.find(dir);
        running.and_then(|running| process::stats(running.pid).ok()).map_or(Duration::ZERO, |stats| stats.cpu())
    };
    let nodes = dir.load()?.nodes;
    Ok((of(Role::Host), nodes.iter().map(|node| of(Role::Node(node.id))).sum()))
}

/// Has a client at each of these targets do it, all at once.
///
/// # Errors
/// fio can't be run, or a request failed: then there is no figure.
pub fn run(dir: &GridDir, targets: &[Target], load: &Load) -> Result<Done> {
    let mut command = Command::new("fio");
    command.args(["--output-format=json", "--eta=never"]).args(load.arguments());
    for (n, target) in targets.iter().enumerate() {
        command.arg(format!("--name=client{n}")).args(target.arguments(&dir.nbd_socket()));
    }
    let line = line_of(&command);
    let (begun, before) = (Instant::now(), cpu_of(dir)?);
    let output = output_of(&mut command)?;
    let (took, after) = (begun.elapsed(), cpu_of(dir)?);
    let mut done = parse(&String::from_utf8_lossy(&output), took)?;
    // Processes are looked at from the load's start to its end; the first seconds are not among what is counted.
    let counted = match load.span {
        Span::Seconds(seconds) => seconds as f64 / (seconds + WARM_UP_S.min(seconds)) as f64,
        Span::Bytes(_) => 1.0,
    };
    let a_request = |spent: Duration| spent.as_secs_f64() * 1e6 * counted / done.count();
    let (host, nodes) = (after.0.saturating_sub(before.0), after.1.saturating_sub(before.1));
    (done.host_us, done.nodes_us) = (a_request(host), a_request(nodes));
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as f64;
    done.cpu_percent += (host + nodes).as_secs_f64() / took.as_secs_f64() / cores * 100.0;
    done.command = line;
    Ok(done)
}

fn line_of(command: &Command) -> String {
    command.get_args().fold("fio".to_string(), |mut line, argument| {
        let argument = argument.to_string_lossy();
        let quote = if argument.contains(['?', '&', ' ']) { "'" } else { "" };
        write!(line, " {quote}{argument}{quote}").expect("a text takes all");
        line
    })
}

/// All clients together, as fio reports on a group.
fn parse(text: &str, took: Duration) -> Result<Done> {
    let at = text.find('{').context("fio told nothing")?;
    let report: Value = serde_json::from_str(&text[at..]).context("fio's report is not JSON")?;
    let job = report.pointer("/jobs/0").context("fio's report has no job")?;
    let number = |of: &Value, at: &str| of.pointer(at).and_then(Value::as_f64).unwrap_or(0.0);
    if number(job, "/error") != 0.0 || number(job, "/total_err") != 0.0 {
        bail!(
            "requests failed (error {}); see `holdfast status`",
            number(job, "/error").max(number(job, "/first_error"))
        );
    }
    let side = |direction: &str| {
        let of = &job[direction];
        Side {
            iops: number(of, "/iops"),
            iops_sd: number(of, "/iops_stddev"),
            megabytes: number(of, "/bw_bytes") / 1e6,
            mean_ms: number(of, "/clat_ns/mean") / 1e6,
            sd_ms: number(of, "/clat_ns/stddev") / 1e6,
            p99_ms: number(of, "/clat_ns/percentile/99.000000") / 1e6,
            count: number(of, "/total_ios"),
        }
    };
    let mut done = Done { reads: side("read"), writes: side("write"), ..Done::default() };
    // fio tells shares of the time of all its threads together.
    let busy_s = (number(job, "/usr_cpu") + number(job, "/sys_cpu")) / 100.0 * number(job, "/job_runtime") / 1e3;
    done.clients_us = busy_s * 1e6 / done.count();
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as f64;
    done.cpu_percent = busy_s / took.as_secs_f64() / cores * 100.0;
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_read_and_errors_end_it() {
        let side = |iops: u32, mean_ns: u32| {
            format!(
                r#"{{"iops":{iops},"iops_stddev":3,"bw_bytes":2000000,"total_ios":{iops},
                    "clat_ns":{{"mean":{mean_ns},"stddev":1000000,"percentile":{{"99.000000":{mean_ns}}}}}}}"#
            )
        };
        let report = |error: u32| {
            format!(
                r#"fio: a remark
                {{"jobs":[{{"error":{error},"usr_cpu":10,"sys_cpu":15,"job_runtime":4000,
                 "read":{},"write":{}}}]}}"#,
                side(300, 2_000_000),
                side(100, 6_000_000)
            )
        };
        let done = parse(&report(0), Duration::from_secs(2)).unwrap();
        assert_eq!((done.iops(), done.megabytes(), done.mean_ms(), done.p99_ms()), (400.0, 4.0, 3.0, 6.0));
        assert_eq!(done.clients_us, 2500.0, "a second of 400 requests");
        // Of (300 x (1 + 1) + 100 x (1 + 9)) / 400.
        assert_eq!(done.sd_ms(), 2.0);
        assert!(parse(&report(5), Duration::from_secs(2)).unwrap_err().to_string().contains("error 5"));
        assert!(parse("fio: no", Duration::from_secs(2)).is_err());
    }

    #[test]
    fn a_load_is_what_fio_is_told() {
        let load = Load { read_percent: Some(70), rw: "randrw", ..Load::random("4k", 15, 30) };
        let told = load.arguments().join(" ");
        for part in ["--rw=randrw", "--bs=4k", "--iodepth=15", "--rwmixread=70", "--runtime=30", "--ramp_time=10"] {
            assert!(told.contains(part), "{told}");
        }
        assert!(Load::fill(1 << 20).arguments().join(" ").contains("--io_size=1048576"));
    }
}
