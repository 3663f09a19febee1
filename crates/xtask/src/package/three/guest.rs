//! A guest with Debian 12, of which all that is known is its disk and its first serial line.

use crate::package::tree;
use crate::tools;
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

const SUITE: &str = "bookworm";

const PACKAGES: &str = "systemd-sysv,linux-image-cloud-amd64,initramfs-tools";

/// Anybody at the serial line gets in: it has no network.
const HOOKS: &[&str] = &["chroot \"$1\" passwd --delete root", "echo guest >\"$1\"/etc/hostname"];

const LOADER: &str = "DEFAULT linux\nLABEL linux\n  KERNEL /vmlinuz\n  INITRD /initrd.img\n  \
                      APPEND root=/dev/vda rw console=ttyS0 quiet\n";

/// An emulated processor on a busy machine is slow; this one took 19 s to its prompt.
const PATIENCE: Duration = Duration::from_secs(600);

/// What the shell's prompt ends in.
const PROMPT: &str = "root@guest:~# ";

/// A disk that boots, as qcow2: a file system without partitions, whose first sector loads the kernel.
pub fn make_image(work: &Path, image: &Path) -> Result<()> {
    let (root, raw, mounted) = (work.join("guest"), work.join("guest.raw"), work.join("mounted"));
    tree::make(SUITE, PACKAGES, HOOKS, &root)?;
    fs::create_dir_all(root.join("boot/extlinux"))?;
    fs::write(root.join("boot/extlinux/extlinux.conf"), LOADER)?;
    // The loader knows no newer features of ext4.
    let mut make = Command::new("mke2fs");
    tools::run(make.args(["-q", "-t", "ext4", "-O", "^64bit,^metadata_csum", "-d"]).arg(&root).arg(&raw).arg("2G"))?;
    fs::create_dir_all(&mounted)?;
    tools::run(Command::new("mount").args(["-o", "loop"]).arg(&raw).arg(&mounted))?;
    let installed = tools::run(Command::new("extlinux").arg("--install").arg(mounted.join("boot/extlinux")));
    tools::run(Command::new("umount").arg(&mounted))?;
    installed?;
    tools::run(Command::new("qemu-img").args(["convert", "-f", "raw", "-O", "qcow2"]).arg(&raw).arg(image))?;
    fs::remove_file(raw)?;
    fs::remove_dir_all(root).context("cannot remove the guest's tree")
}

pub struct Guest {
    qemu: Child,
    keys: ChildStdin,
    screen: Receiver<Vec<u8>>,
    said: String,
}

impl Guest {
    /// Starts it, and logs in.
    pub fn boot(mut qemu: Command) -> Result<Guest> {
        let mut qemu = qemu.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("cannot start a guest")?;
        let (keys, mut out) = (qemu.stdin.take().context("keys")?, qemu.stdout.take().context("a screen")?);
        let (sender, screen) = channel();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(len @ 1..) = out.read(&mut bytes) {
                if sender.send(bytes[..len].to_vec()).is_err() {
                    return;
                }
            }
        });
        let mut guest = Guest { qemu, keys, screen, said: String::new() };
        guest.wait_for("login: ")?;
        guest.enter("root")?;
        guest.wait_for(PROMPT)?;
        Ok(guest)
    }

    /// Types a command, which has to succeed; returns its last line.
    pub fn types(&mut self, command: &str) -> Result<String> {
        // What is typed is shown, too, and must not look like the answer.
        self.enter(&format!("{command} && echo well''done"))?;
        let said = self.wait_for("welldone")?;
        self.wait_for(PROMPT)?;
        let last = said.lines().rev().map(str::trim).find(|line| !line.is_empty());
        Ok(last.unwrap_or_default().to_string())
    }

    pub fn end(mut self) -> Result<()> {
        self.enter("poweroff")?;
        self.wait_for("Power down")?;
        ensure!(self.qemu.wait()?.success(), "QEMU ended with an error");
        Ok(())
    }

    fn enter(&mut self, line: &str) -> Result<()> {
        self.keys
            .write_all(format!("{line}\n").as_bytes())
            .and_then(|()| self.keys.flush())
            .context("the guest is gone")
    }

    /// Waits until this is on the screen; returns what was there before it.
    fn wait_for(&mut self, text: &str) -> Result<String> {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some((before, after)) = self.said.split_once(text) {
                let (before, after) = (before.to_string(), after.to_string());
                self.said = after;
                return Ok(before);
            }
            match self.screen.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(bytes) => self.said += &String::from_utf8_lossy(&bytes),
                Err(RecvTimeoutError::Timeout) => bail!("the guest does not show `{text}`, but: {}", self.said),
                Err(RecvTimeoutError::Disconnected) => {
                    bail!("the guest ended, and did not show `{text}`: {}", self.said)
                }
            }
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}
