//! Fresh systems in directories, by `mmdebstrap`: what an administrator has who has just installed one, without a compiler.

use crate::tools;
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Releases of Ubuntu; all others are Debian's.
const UBUNTU: &[&str] = &["jammy", "noble"];

/// Keys that Ubuntu's archive is signed with, the one of 2018 (F6ECB3762474EDA9D21B7022871920D1991BC93C) among them. No package
/// of Debian has them, so they come from that archive, and only this file is taken.
const UBUNTU_KEYS: (&str, &str) = (
    "usr/share/keyrings/ubuntu-archive-keyring.gpg",
    "80a36b0a6de2f69f49d2df75ef473ccde121e9e190b9ea01d20a4f63778d5c31",
);

/// Answers that somebody gives who sits at a terminal; and lists of packages, as any system has them that is in use.
const APT: &str = "echo 'APT::Get::Assume-Yes \"true\";' >\"$1\"/etc/apt/apt.conf.d/90yes";

/// A compiler would hide what a package lacks.
const NO_COMPILER: &str = "! chroot \"$1\" sh -c 'command -v cc || command -v cargo'";

/// Makes the system `suite` with these packages in the directory `root`; each hook is a line of shell with the root as `$1`.
pub fn make(suite: &str, packages: &str, hooks: &[&str], root: &Path) -> Result<()> {
    let mut command = Command::new("mmdebstrap");
    command.args(["--quiet", "--variant=apt", "--skip=cleanup/apt", &format!("--include={packages}")]);
    for hook in [APT, NO_COMPILER].iter().chain(hooks) {
        command.arg(format!("--customize-hook={hook}"));
    }
    if UBUNTU.contains(&suite) {
        let keys = ubuntu_keys(&root.with_extension("keys"))?;
        command.arg("--components=main,universe").arg(format!("--keyring={}", keys.display()));
    }
    tools::run(command.arg(suite).arg(root).env("DEBIAN_FRONTEND", "noninteractive"))
}

/// Unpacks the keys and looks whether they are the right ones. Nothing else of that directory is used.
fn ubuntu_keys(work: &Path) -> Result<PathBuf> {
    let (file, sum) = UBUNTU_KEYS;
    let mut command = Command::new("mmdebstrap");
    command.args(["--quiet", "--variant=extract", "--include=ubuntu-keyring"]);
    for option in ["Acquire::AllowInsecureRepositories", "APT::Get::AllowUnauthenticated"] {
        command.arg(format!("--aptopt={option} \"true\""));
    }
    tools::run(command.arg("noble").arg(work))?;
    let keys = work.join(file);
    let said = tools::output_of(Command::new("sha256sum").arg(&keys))?;
    if said.split_whitespace().next() != Some(sum) {
        bail!("{} is not the file of keys that is known here: it has the sum {said}", keys.display());
    }
    Ok(keys)
}

/// A command in the booted or started system whose first process is `leader`, as root at home; `script` is for bash.
pub fn inside(leader: u32, script: &str) -> Command {
    let mut command = Command::new("nsenter");
    command.args(["--target", &leader.to_string(), "--mount", "--uts", "--ipc", "--net", "--pid", "--root", "--wd"]);
    command.args(["env", "-i", "HOME=/root", "TERM=dumb", "LANG=C.UTF-8", PATH, "bash", "-lc"]);
    command.arg(format!("cd\n{script}"));
    command
}

const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The first process that `parent` has started, once there is one.
pub fn child_of(parent: u32) -> Option<u32> {
    let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).ok()?;
    children.split_whitespace().next()?.parse().ok()
}

/// Room for three systems, their disks and a guest.
const ROOM_GIB: u64 = 12;

/// Refuses to go on where something is missing, there is too little room in `place`, or the user is not root.
pub fn check(place: &Path, programs: &[&str]) -> Result<()> {
    let missing: Vec<&str> =
        programs.iter().copied().filter(|program| holdfast_lab::program::find(program).is_none()).collect();
    if !missing.is_empty() {
        bail!("there is no {} in PATH; `./x package` installs what is missing, by apt", missing.join(", "));
    }
    let who = tools::output_of(Command::new("id").arg("-u")).context("cannot tell who asks")?;
    if who.trim() != "0" {
        bail!("systems are started in directories by root alone: give this as root");
    }
    let room = tools::output_of(Command::new("df").args(["--output=avail", "-B1G"]).arg(place))?;
    let room: u64 = room.split_whitespace().last().and_then(|word| word.parse().ok()).context("df tells no room")?;
    if room < ROOM_GIB {
        bail!("{room} GiB are free in {}, and systems take {ROOM_GIB}: make room there", place.display());
    }
    Ok(())
}
