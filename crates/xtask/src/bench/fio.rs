//! fio as the load of both benchmarks: the same arguments, and an error where fio saw one.

use crate::tools;
use anyhow::{Result, bail};
use serde_json::Value;
use std::process::Command;

/// 8 KiB, 60 % reads, 90 % random, 16 in flight.
pub const OLTP_8K: &[&str] = &["--rw=randrw", "--rwmixread=60", "--percentage_random=90", "--bs=8k", "--iodepth=16"];

pub const RANDOM_READ_8K: &[&str] = &["--rw=randread", "--bs=8k", "--iodepth=16"];

pub const MIXED_8K: &[&str] = &["--rw=randrw", "--rwmixread=70", "--bs=8k", "--iodepth=16"];

/// Everything once; fio's buffers are random, so nothing is gained by squeezing them.
pub const FILL: &[&str] = &["--rw=write", "--bs=1m", "--iodepth=4"];

pub fn command(size_mib: u64) -> Command {
    let mut command = Command::new("fio");
    command.args(["--name=bench", "--output-format=json", "--direct=1", "--randrepeat=0", "--norandommap=1"]);
    command.arg(format!("--size={size_mib}m"));
    command
}

pub fn nbd(uri: &str) -> [String; 2] {
    ["--ioengine=nbd".to_string(), format!("--uri={uri}")]
}

pub fn timed(seconds: u64) -> [String; 2] {
    ["--time_based=1".to_string(), format!("--runtime={seconds}")]
}

/// Runs the command to its end; the report of its one job.
pub fn report_of(command: &mut Command, target: &str) -> Result<Value> {
    let mut report = tools::json_of(command)?;
    let job = report["jobs"][0].take();
    if job["error"].as_i64() != Some(0) {
        bail!("fio on {target} ended with error {}", job["error"]);
    }
    Ok(job)
}

/// Of both directions together.
pub fn sum(job: &Value, key: &str) -> f64 {
    ["read", "write"].iter().filter_map(|d| job[d][key].as_f64()).sum()
}
