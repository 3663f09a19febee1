//! An image of the OCI: the program, the libraries that it needs, certificates of the web's authorities. No shell.
//!
//! `mmdebstrap` unpacks packages of Debian 12 and runs none of their scripts; `umoci` makes the image's layout of it.

use super::{Place, VERSION};
use crate::tools;
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::Path;
use std::process::Command;

/// The system that the libraries are of.
const SUITE: &str = "bookworm";

/// Beside what the program's package depends on.
const MORE: &[&str] = &["ca-certificates"];

/// Directories of libraries' packages that no program reads.
const LEFT_OUT: &[&str] = &["usr/share/man", "usr/share/info", "usr/share/locale", "usr/share/lintian"];

/// The grid's directory in it.
const GRID: &str = "/var/lib/holdfast";

pub fn build(place: &Place) -> Result<()> {
    let work = place.out.join("build/image");
    let root = work.join("root");
    fs::create_dir_all(&work)?;
    unpack(place, &root)?;
    let layout = work.join("layout");
    let image = format!("{}:{VERSION}", layout.display());
    let created = tools::output_of(Command::new("date").args(["-u", "+%Y-%m-%dT%H:%M:%SZ", "-d"]).arg(at(place)))?;
    let umoci = |arguments: &[&str]| tools::run(Command::new("umoci").args(arguments).current_dir(&work));
    umoci(&["init", "--layout", "layout"])?;
    umoci(&["new", "--image", &image])?;
    umoci(&["insert", "--image", &image, "root", "/"])?;
    let settings = [
        "--config.entrypoint=/usr/bin/holdfast",
        "--config.cmd=--help",
        "--config.volume=/var/lib/holdfast",
        "--config.env=HOLDFAST_DIR=/var/lib/holdfast",
        "--config.env=PATH=/usr/bin",
        "--config.label=org.opencontainers.image.title=holdfast",
        "--config.label=org.opencontainers.image.licenses=Apache-2.0",
        &format!("--config.label=org.opencontainers.image.version={VERSION}"),
        &format!("--created={}", created.trim()),
        "--architecture=amd64",
        "--os=linux",
    ];
    umoci(&[&["config", "--image", &image][..], &settings].concat())?;
    umoci(&["gc", "--layout", "layout"])?;
    let tar = place.out.join(format!("holdfast-{VERSION}-oci.tar"));
    pack(place, &layout, &tar)?;
    check(&work, &tar)
}

fn at(place: &Place) -> String {
    format!("@{}", place.epoch)
}

/// The image's files.
fn unpack(place: &Place, root: &Path) -> Result<()> {
    let deb = place.deb();
    let depends = tools::output_of(Command::new("dpkg-deb").arg("--field").arg(&deb).arg("Depends"))?;
    // The libraries; what else it depends on is for its maintainer scripts.
    let names = depends.split(',').filter_map(|one| one.split_whitespace().next());
    let names = names.filter(|name| name.starts_with("lib")).chain(MORE.iter().copied());
    let include = names.collect::<Vec<_>>().join(",");
    let mut command = Command::new("mmdebstrap");
    command.args(["--quiet", "--variant=extract", &format!("--include={include}"), SUITE]).arg(root);
    tools::run(command.env("SOURCE_DATE_EPOCH", &place.epoch))?;
    tools::run(Command::new("dpkg-deb").arg("--extract").arg(&deb).arg(root))?;
    for left_out in LEFT_OUT {
        let _ = fs::remove_dir_all(root.join(left_out));
    }
    // What the packages' scripts would have done.
    let mut authorities = Vec::new();
    let directory = root.join("usr/share/ca-certificates/mozilla");
    let mut files = fs::read_dir(&directory)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    files.sort();
    for file in files {
        authorities.extend(fs::read(file)?);
    }
    fs::create_dir_all(root.join("etc/ssl/certs"))?;
    fs::write(root.join("etc/ssl/certs/ca-certificates.crt"), authorities)?;
    fs::write(root.join("etc/passwd"), "root:x:0:0:root:/root:/usr/sbin/nologin\n")?;
    fs::write(root.join("etc/group"), "root:x:0:\n")?;
    Ok(())
}

fn pack(place: &Place, layout: &Path, tar: &Path) -> Result<()> {
    let mut command = Command::new("tar");
    command.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", &format!("--mtime={}", at(place))]);
    tools::run(command.arg("-cf").arg(tar).arg("-C").arg(layout).arg("."))
}

/// Unpacks what was made, as an engine does, and runs it in there, without rights of this machine.
fn check(work: &Path, tar: &Path) -> Result<()> {
    let again = work.join("again");
    fs::create_dir_all(&again)?;
    tools::run(Command::new("tar").arg("-xf").arg(tar).arg("-C").arg(&again))?;
    let bundle = work.join("bundle");
    let image = format!("{}:{VERSION}", again.display());
    tools::run(Command::new("umoci").args(["unpack", "--rootless", "--image", &image]).arg(&bundle))?;
    let config: serde_json::Value = serde_json::from_slice(&fs::read(bundle.join("config.json"))?)?;
    let entry = config["process"]["args"][0].as_str().context("the image has no entry point")?;
    let inside = |arguments: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["--map-root-user", "--pid", "--fork", "--mount", "--root"]).arg(bundle.join("rootfs"));
        tools::output_of(command.arg(entry).args(arguments))
    };
    let said = inside(&["--version"])?;
    if said.trim() != format!("holdfast {VERSION}") {
        bail!("the image's program says `{}`, and is to be {VERSION}", said.trim());
    }
    let env = config["process"]["env"].as_array().into_iter().flatten();
    if !env.into_iter().any(|one| *one == format!("HOLDFAST_DIR={GRID}")) {
        bail!("the image has lost its settings: {}", config["process"]);
    }
    println!("package: the image runs `{}`", said.trim());
    Ok(())
}
