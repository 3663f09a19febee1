//! The packages of Debian, by debhelper from `packaging/debian`; then judged by lintian.

use super::{Place, VERSION, notes};
use crate::tools;
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::Path;
use std::process::Command;

/// What debhelper makes of `packaging/debian/control`, and is given to users.
const BUILT: [&str; 5] = [
    "holdfast_VERSION_amd64.deb",
    "holdfast-dbgsym_VERSION_amd64.deb",
    "holdfast-restore_VERSION_amd64.deb",
    "holdfast-restore-dbgsym_VERSION_amd64.deb",
    "holdfast-proxmox_VERSION_all.deb",
];

/// The C library of Ubuntu 22.04, the oldest system that a package is for.
const LIBC_MAX: (u32, u32) = (2, 35);

pub fn build(place: &Place, notes: &str) -> Result<()> {
    let debian = place.tree.join("debian");
    tools::run(Command::new("cp").arg("-r").arg("packaging/debian").arg(&debian))?;
    let control = fs::read_to_string(debian.join("control"))?;
    let maintainer = control.lines().find_map(|line| line.strip_prefix("Maintainer: "));
    let maintainer = maintainer.context("packaging/debian/control names no maintainer")?;
    let date = tools::output_of(tools::git().args(["log", "-1", "--format=%cD"]))?;
    fs::write(debian.join("changelog"), notes::debian(notes, VERSION, maintainer, date.trim()))?;
    let mut command = Command::new("dpkg-buildpackage");
    command.args(["--build=binary", "--no-sign"]).current_dir(&place.tree).env("SOURCE_DATE_EPOCH", &place.epoch);
    tools::run(&mut command)?;
    let built = place.tree.parent().context("a tree lies in a directory")?;
    judge(built)?;
    for name in BUILT {
        let name = name.replace("VERSION", VERSION);
        fs::copy(built.join(&name), place.out.join(&name)).with_context(|| format!("{name} was not built"))?;
    }
    check_libc(&place.deb())
}

/// No error, no warning; all the rest is shown with its count.
fn judge(built: &Path) -> Result<()> {
    let changes = built.join(format!("holdfast_{VERSION}_amd64.changes"));
    let mut command = Command::new("lintian");
    command.args(["--display-info", "--pedantic", "--show-overrides", "--fail-on", "none", "--no-tag-display-limit"]);
    // Who builds is often root.
    let said = tools::output_of(command.arg("--allow-root").arg(changes))?;
    print!("{said}");
    let count = |mark: &str| said.lines().filter(|line| line.starts_with(mark)).count();
    let (errors, warnings) = (count("E: "), count("W: "));
    println!(
        "lintian: {errors} errors, {warnings} warnings, {} hints, {} pedantic ones, {} overridden",
        count("I: "),
        count("P: "),
        count("O: ")
    );
    if errors + warnings > 0 {
        bail!("lintian finds fault with the packages");
    }
    Ok(())
}

/// What was built on a newer system does not start on an older one.
fn check_libc(deb: &Path) -> Result<()> {
    let depends = tools::output_of(Command::new("dpkg-deb").arg("--field").arg(deb).arg("Depends"))?;
    let needed = libc_of(&depends).with_context(|| format!("the package names no libc6: {depends}"))?;
    if needed > LIBC_MAX {
        bail!(
            "the package needs libc6 {}.{}, and is to do with {}.{}: build it on Debian 12",
            needed.0,
            needed.1,
            LIBC_MAX.0,
            LIBC_MAX.1
        );
    }
    println!("package: depends on {}", depends.trim());
    Ok(())
}

/// Of `libc6 (>= 2.34), libgcc-s1 (>= 4.2)`.
fn libc_of(depends: &str) -> Option<(u32, u32)> {
    let version = depends.split("libc6 (>= ").nth(1)?.split(')').next()?;
    let mut parts = version.split(['.', '-']).map(str::parse::<u32>);
    Some((parts.next()?.ok()?, parts.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_c_library_that_is_needed_is_read() {
        assert_eq!(libc_of("libc6 (>= 2.34), libgcc-s1 (>= 4.2)"), Some((2, 34)));
        assert_eq!(libc_of("libgcc-s1 (>= 4.2)"), None);
    }
}
