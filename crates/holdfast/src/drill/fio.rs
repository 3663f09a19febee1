//! fio as the load, so that anyone can repeat it: the job, its run, its logs.
//!
//! Role: builds the command line, starts it, waits for it or stops it, reads what it wrote. What a job's writes prove is
//! the business of [`super::history`].
//!
//! Faults: a job that ends early, or doesn't end, counts as an error and leaves the logs that it managed to write.

use super::stats::Completion;
use super::tools::{Running, check_interrupt, sleep};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// What a job may take beyond its time: a stall that lasts longer is an error.
const OVERTIME_MAX: Duration = Duration::from_secs(120);

/// How long fio may take until its first request.
const START_TIME_MAX: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pattern {
    /// Every block once, so that each has a first version.
    Fill,
    /// 8 KiB, 60 % read, 90 % random and 10 % sequential, aligned to 8 KiB.
    Oltp8k,
    /// 64 KiB sequential read.
    SeqRead64k,
    /// 8 KiB, 70 % read, random: of this floors are promised.
    Floor8k,
}

/// One run of fio.
#[derive(Clone, Debug)]
pub struct Job {
    pub name: &'static str,
    pub pattern: Pattern,
    pub uri: String,
    pub size_bytes: u64,
    pub queue_depth: u32,
    /// Ignored by [`Pattern::Fill`].
    pub seconds: u64,
    pub seed: u64,
}

impl Job {
    /// The load itself: what to type to repeat it on any volume.
    fn load_arguments(&self) -> Vec<String> {
        let mut arguments = vec![
            format!("--name={}", self.name),
            "--ioengine=nbd".to_string(),
            format!("--uri={}", self.uri),
            format!("--size={}", self.size_bytes),
            format!("--randseed={}", self.seed),
        ];
        let pattern: &[&str] = match self.pattern {
            Pattern::Fill => &["--rw=write", "--bs=1M"],
            Pattern::Oltp8k => &[
                "--rw=randrw",
                "--rwmixread=60",
                "--percentage_random=90",
                "--bs=8k",
                "--blockalign=8k",
                "--norandommap=1",
            ],
            Pattern::SeqRead64k => &["--rw=read", "--bs=64k"],
            Pattern::Floor8k => &["--rw=randrw", "--rwmixread=70", "--bs=8k", "--norandommap=1"],
        };
        arguments.extend(pattern.iter().map(ToString::to_string));
        arguments.push(format!("--iodepth={}", self.queue_depth));
        if self.pattern != Pattern::Fill {
            // Without the larger io_size fio starts over, with the same numbers, each time that it has gone through.
            arguments.extend(["--io_size=1000T", "--time_based=1"].map(str::to_string));
            arguments.push(format!("--runtime={}", self.seconds));
        }
        if matches!(self.pattern, Pattern::Fill | Pattern::Oltp8k) {
            let verify = [
                "--verify=crc32c",
                "--verify_interval=8k",
                "--do_verify=0",
                "--verify_state_save=0",
                "--serialize_overlap=1",
            ];
            arguments.extend(verify.map(str::to_string));
        }
        arguments
    }

    /// What makes it tell everything.
    fn log_arguments(&self) -> Vec<String> {
        vec![
            // One process: nothing is left behind when it is killed.
            "--thread=1".to_string(),
            "--clocksource=clock_gettime".to_string(),
            format!("--write_iolog={}.iolog", self.name),
            format!("--write_lat_log={}", self.name),
            "--log_unix_epoch=1".to_string(),
            "--disable_slat=1".to_string(),
            "--disable_clat=1".to_string(),
            "--continue_on_error=io".to_string(),
            "--output-format=json".to_string(),
            format!("--output={}.json", self.name),
        ]
    }

    /// The command line, for people.
    pub fn command_line(&self) -> String {
        let arguments = self.load_arguments().into_iter().chain(self.log_arguments());
        arguments.fold("fio".to_string(), |line, argument| {
            let quoted = argument.contains(['?', '&', ' ']);
            if quoted { format!("{line} '{argument}'") } else { format!("{line} {argument}") }
        })
    }

    /// Starts fio in `dir`, where its logs go, and returns once it has issued requests.
    pub fn start(&self, dir: &Path) -> Result<RunningJob> {
        let complaints_path = dir.join(format!("{}.err", self.name));
        let complaints = File::create(&complaints_path)
            .with_context(|| format!("cannot create {}; check space and permissions", complaints_path.display()))?;
        let mut command = Command::new("fio");
        command
            .args(self.load_arguments())
            .args(self.log_arguments())
            .current_dir(dir)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(complaints);
        let running = Running::start(&mut command)?;
        let mut job = RunningJob { job: self.clone(), dir: dir.to_path_buf(), running, started: Instant::now() };
        job.wait_for_requests()?;
        Ok(job)
    }

    /// Runs fio to its end.
    pub fn run(&self, dir: &Path, time_max: Duration) -> Result<Outcome> {
        let mut job = self.start(dir)?;
        let status = job.running.wait_at_most(time_max);
        job.outcome(status.map(|_| ()))
    }
}

pub struct RunningJob {
    job: Job,
    dir: PathBuf,
    running: Running,
    pub started: Instant,
}

/// What a job left.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub errors: u64,
    /// fio's own words, if there were errors.
    pub complaints: String,
    pub iolog: PathBuf,
    pub latency_log: PathBuf,
}

impl RunningJob {
    /// fio flushes its log of requests every few dozen of them.
    fn wait_for_requests(&mut self) -> Result<()> {
        let iolog = self.dir.join(format!("{}.iolog", self.job.name));
        let deadline = Instant::now() + START_TIME_MAX;
        loop {
            let over = self.running.is_over()?;
            if fs::metadata(&iolog).is_ok_and(|meta| meta.len() > 0) {
                self.started = Instant::now();
                return Ok(());
            }
            if let Some(status) = over {
                bail!("fio ended before it began ({status}): {}", self.complaints());
            }
            if Instant::now() >= deadline {
                bail!("fio issued nothing for {} s: {}", START_TIME_MAX.as_secs(), self.complaints());
            }
            sleep(Duration::from_millis(5))?;
        }
    }

    fn complaints(&self) -> String {
        let text = fs::read_to_string(self.dir.join(format!("{}.err", self.job.name))).unwrap_or_default();
        text.lines().map(str::trim).filter(|line| !line.is_empty()).take(3).collect::<Vec<_>>().join("; ")
    }

    /// Waits until the job's time is over.
    pub fn finish(mut self) -> Result<Outcome> {
        let left = Duration::from_secs(self.job.seconds).saturating_sub(self.started.elapsed());
        let status = self.running.wait_at_most(left + OVERTIME_MAX);
        self.outcome(status.map(|_| ()))
    }

    /// Ends a job before its time, as Ctrl-C would: what is in flight is waited for, logs are written.
    pub fn stop(mut self) -> Result<Outcome> {
        // A job that has failed is over already; its outcome tells.
        let _ = self.running.signal(rustix::process::Signal::INT);
        let status = self.running.wait_at_most(OVERTIME_MAX);
        self.outcome(status.map(|_| ()))
    }

    fn outcome(&self, ended: Result<()>) -> Result<Outcome> {
        check_interrupt()?;
        let name = self.job.name;
        let words = self.complaints();
        let (errors, complaints) = match ended.and_then(|()| self.failures()) {
            Ok((0, _)) => (0, String::new()),
            Ok((errors, first)) => (errors, format!("{first}; {words}")),
            Err(error) => (1, format!("{error:#}; {words}")),
        };
        Ok(Outcome {
            errors,
            complaints: complaints.trim_end_matches("; ").to_string(),
            iolog: self.dir.join(format!("{name}.iolog")),
            latency_log: self.dir.join(format!("{name}_lat.1.log")),
        })
    }

    fn failures(&self) -> Result<(u64, String)> {
        let path = self.dir.join(format!("{}.json", self.job.name));
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read fio's result {}", path.display()))?;
        failures(&text)
    }
}

/// How many errors fio counted, at least one if it gave up, and what the first one was.
fn failures(text: &str) -> Result<(u64, String)> {
    // Remarks, as the one on being interrupted, stand before the document.
    let at = text.find("\n{").map_or(0, |at| at + 1);
    let document: Value = serde_json::from_str(&text[at..]).context("fio's result is not JSON")?;
    let job = document.pointer("/jobs/0").context("fio's result has no job")?;
    let number = |name: &str| job.get(name).and_then(Value::as_u64).unwrap_or(0);
    let count = number("total_err").max(u64::from(number("error") != 0));
    let first = match i32::try_from(number("first_error").max(number("error"))) {
        Ok(code) => std::io::Error::from_raw_os_error(code).to_string(),
        Err(_) => "fio gave up".to_string(),
    };
    Ok((count, first))
}

/// Reads a log of latencies: `Unix ms, latency ns, direction, bytes, …` a line.
pub fn read_latency_log(path: &Path, mut take: impl FnMut(Completion)) -> Result<()> {
    let file = File::open(path).with_context(|| format!("cannot open fio's log {}", path.display()))?;
    let mut lines = BufReader::with_capacity(1 << 20, file);
    let mut line = String::new();
    loop {
        line.clear();
        if lines.read_line(&mut line).with_context(|| format!("cannot read {}", path.display()))? == 0 {
            return Ok(());
        }
        let completion = parse_latency(&line)
            .with_context(|| format!("fio's log {} has the line `{}`", path.display(), line.trim()))?;
        if let Some(completion) = completion {
            take(completion);
        }
    }
}

/// `None` for a direction that is neither read nor write.
fn parse_latency(line: &str) -> Result<Option<Completion>> {
    let mut fields = line.split(',').map(str::trim);
    let mut number = |what: &str| -> Result<u64> {
        fields.next().and_then(|field| field.parse().ok()).with_context(|| format!("no {what}"))
    };
    let (at_ms, latency_ns, direction) = (number("time")?, number("latency")?, number("direction")?);
    Ok((direction <= 1).then_some(Completion { at_ms, latency_ns, is_write: direction == 1 }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(pattern: Pattern) -> Job {
        Job {
            name: "load",
            pattern,
            uri: "nbd+unix:///v?socket=/tmp/nbd.sock".to_string(),
            size_bytes: 1 << 30,
            queue_depth: 16,
            seconds: 60,
            seed: 7,
        }
    }

    #[test]
    fn the_jobs_are_those_of_the_requirements() {
        let line = job(Pattern::Oltp8k).command_line();
        for part in
            ["--rwmixread=60", "--percentage_random=90", "--bs=8k", "--blockalign=8k", "--iodepth=16", "--runtime=60"]
        {
            assert!(line.contains(part), "{line}");
        }
        assert!(line.contains("'--uri=nbd+unix:///v?socket=/tmp/nbd.sock'"), "{line}");
        let line = job(Pattern::SeqRead64k).command_line();
        assert!(line.contains("--rw=read --bs=64k") && !line.contains("verify"), "{line}");
        assert!(!job(Pattern::Fill).command_line().contains("runtime"));
    }

    #[test]
    fn latency_lines_are_read() {
        let read = parse_latency("1795242380239, 5146108, 0, 8192, 0\n").unwrap();
        assert_eq!(read, Some(Completion { at_ms: 1_795_242_380_239, latency_ns: 5_146_108, is_write: false }));
        assert!(parse_latency("1, 2, 1, 8192, 0, 0").unwrap().unwrap().is_write);
        assert_eq!(parse_latency("1, 2, 2, 8192").unwrap(), None);
        assert!(parse_latency("1, 2").is_err());
        assert!(parse_latency("a, 2, 1").is_err());
    }

    #[test]
    fn errors_are_counted_and_giving_up_is_one() {
        let document = |job: &str| format!("\nfio: terminating on signal 2\n{{ \"jobs\": [ {{ {job} }} ] }}\n");
        assert_eq!(failures(&document(r#""error": 0, "total_err": 0"#)).unwrap().0, 0);
        let (count, first) = failures(&document(r#""error": 5, "total_err": 12, "first_error": 5"#)).unwrap();
        assert!(count == 12 && first.contains("os error 5"), "{first}");
        let gave_up = failures(&document(r#""error": 4294967295, "total_err": 0"#)).unwrap();
        assert_eq!(gave_up, (1, "fio gave up".to_string()));
        assert!(failures("fio: went wrong").is_err());
    }
}
