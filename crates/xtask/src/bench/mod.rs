//! `./x bench`: what guests get, beside the raw file and qemu-nbd; with `--care`, what background care costs and takes;
//! with `--tls`, what TLS between host and nodes costs; with `--encrypt`, what encryption at rest does; with `--nested` nested
//! layouts beside a mirror, with `--diskspd` many threads on three nodes beside the raw file.
//!
//! Every run makes grids of its own, and takes them down with all their files, however it ends.

mod care;
mod diskspd;
mod encrypt;
mod fio;
mod grid;
mod guests;
mod nested;
mod tls;
mod turns;

use anyhow::Result;

pub fn run(arguments: &[String]) -> Result<()> {
    match arguments.split_first() {
        Some((first, rest)) if first == "--care" => care::run(rest),
        Some((first, rest)) if first == "--tls" => tls::run(rest),
        Some((first, rest)) if first == "--encrypt" => encrypt::run(rest),
        Some((first, rest)) if first == "--nested" => nested::run(rest),
        Some((first, rest)) if first == "--diskspd" => diskspd::run(rest),
        _ => guests::run(arguments),
    }
}
