//! The package on a machine of its own: Debian 12 with its systemd, in QEMU. The page about installing is typed there as it
//! stands; then a volume is written and read, the machine is started again, the package brought in once more and purged.
//!
//! The machine tells of itself over its second serial line, a line `trial: …` for each step.

use super::Place;
use crate::tools;
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

const SUITE: &str = "bookworm";

/// Of the machine, beside the package and what that takes. `qemu-utils` writes to a volume and reads it.
const PACKAGES: &str =
    "systemd-sysv,udev,dbus,linux-image-cloud-amd64,initramfs-tools,qemu-utils,procps,bash-completion";

/// What is typed, a prompt a line, from here.
const PAGE: &str = "docs/operate/install.md";

/// Of a boot with all that is done there; a machine with two cores that did nothing else took two minutes.
const SECONDS_MAX: &str = "1800";

/// Bytes of each of its disks.
const DISK: u64 = 2 << 30;

pub fn run(place: &Place) -> Result<()> {
    let work = place.out.join("build/trial");
    fs::create_dir_all(&work)?;
    let (root, system) = (work.join("root"), work.join("system.img"));
    let script = work.join("trial.sh");
    fs::write(&script, script_of(&fs::read_to_string(PAGE)?)?)?;
    bootstrap(place, &root, &script)?;
    // Room for what the machine writes.
    tools::run(Command::new("mke2fs").args(["-q", "-t", "ext4", "-d"]).arg(&root).arg(&system).arg("3G"))?;
    for disk in ["a.img", "b.img"] {
        fs::File::create(work.join(disk))?.set_len(DISK)?;
    }
    for boot in ["first", "second"] {
        let said = boot_up(&work, &root, &system, boot)?;
        let expected = format!("trial: {boot} boot is well");
        if !said.contains(&expected) {
            let lines: Vec<&str> = said.lines().collect();
            let last = &lines[lines.len().saturating_sub(40)..];
            bail!("the machine did not say `{expected}`; the end of what it said:\n{}", last.join("\n"));
        }
        said.lines().filter(|line| line.contains("trial: ")).for_each(|line| println!("{}", line.trim()));
    }
    Ok(())
}

fn bootstrap(place: &Place, root: &Path, script: &Path) -> Result<()> {
    let mut command = Command::new("mmdebstrap");
    let deb = place.deb();
    command.args(["--quiet", "--variant=apt", &format!("--include={PACKAGES}")]);
    command.arg(format!("--customize-hook=copy-in {} {} /root", deb.display(), script.display()));
    command.arg(format!("--customize-hook=copy-in {} /etc/systemd/system", "packaging/trial/trial.service"));
    // Installed as an administrator does it, dependencies and all.
    command.arg(
        "--customize-hook=chroot \"$1\" sh -c 'apt-get install -y -q --no-install-recommends /root/holdfast_*.deb'",
    );
    command.arg("--customize-hook=chroot \"$1\" systemctl enable trial.service");
    command
        .arg("--customize-hook=echo trial >\"$1\"/etc/hostname; echo /dev/vda / ext4 defaults 0 1 >\"$1\"/etc/fstab");
    tools::run(command.arg(SUITE).arg(root))
}

/// Returns all that the trial said.
fn boot_up(work: &Path, root: &Path, system: &Path, boot: &str) -> Result<String> {
    let find = |begin: &str| -> Result<std::path::PathBuf> {
        let entries = fs::read_dir(root.join("boot"))?.flatten();
        let found = entries.map(|entry| entry.path());
        let is_it =
            |path: &std::path::PathBuf| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(begin));
        found.into_iter().find(is_it).with_context(|| format!("the machine has no {begin} in /boot"))
    };
    let console = work.join(format!("{boot}.log"));
    let mut command = Command::new("timeout");
    // Emulated: machines that build are often virtual ones themselves, where less than all of KVM works.
    command.args([SECONDS_MAX, "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2"]);
    command.args(["-m", "2048", "-display", "none", "-no-reboot", "-net", "none", "-kernel"]).arg(find("vmlinuz-")?);
    command.arg("-initrd").arg(find("initrd.img-")?);
    command.args(["-append", &format!("root=/dev/vda rw console=ttyS0 panic=1 quiet trial={boot}")]);
    // The system has the first, where it asks for a login.
    command.arg("-serial").arg(format!("file:{}", work.join(format!("{boot}-system.log")).display()));
    command.arg("-serial").arg(format!("file:{}", console.display()));
    for (index, path) in [system, &work.join("a.img"), &work.join("b.img")].into_iter().enumerate() {
        let drive = format!("file={},format=raw,if=none,id=d{index},cache=unsafe", path.display());
        command.args(["-drive", &drive, "-device", &format!("virtio-blk-pci,drive=d{index},serial=disk{index}")]);
    }
    tools::run(command.stdin(Stdio::null()))?;
    Ok(String::from_utf8_lossy(&fs::read(console)?).into_owned())
}

/// The trial, with the commands of the page's section about one machine and of the one about systemd in it.
fn script_of(page: &str) -> Result<String> {
    let typed = |title: &str| -> Result<String> {
        let section = page.split("\n## ").find(|section| section.starts_with(title));
        let section = section.with_context(|| format!("{PAGE} has no section `{title}`"))?;
        let block = section.split("```console\n").nth(1).and_then(|rest| rest.split("```").next());
        let block = block.with_context(|| format!("{PAGE} shows no commands under `{title}`"))?;
        let lines = block.lines().filter_map(|line| line.strip_prefix("# "));
        Ok(lines.map(|line| format!("{line}\n")).collect())
    };
    let mut commands = typed("One machine")? + &typed("As services of systemd")?;
    for disk in ["virtio-disk1", "virtio-disk2"] {
        commands = commands.replacen("nvme-…", disk, 1);
    }
    if commands.contains('…') {
        bail!("{PAGE} names more disks than the machine has");
    }
    Ok(include_str!("../../../../packaging/trial/trial.sh").replace("@PAGE@\n", &commands))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_trial_types_the_page() {
        let page = fs::read_to_string(tools::root().join(PAGE)).unwrap();
        let script = script_of(&page).unwrap();
        assert!(script.contains("--device /dev/disk/by-id/virtio-disk1 --device /dev/disk/by-id/virtio-disk2"));
        assert!(script.contains("\nholdfast grid units\n") && !script.contains("@PAGE@"), "{script}");
    }
}
