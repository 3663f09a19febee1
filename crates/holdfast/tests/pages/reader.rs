//! Users who have read nothing but the page, and their machines.

use crate::support::{program, text};
use holdfast_lab::page::Typed;
use holdfast_lab::ports;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What fails ends a block, and so does each part of a pipe. But `status` says by its code that not all is well.
const SHELL: &str = r#"set -e -o pipefail
holdfast() { command holdfast "$@" || [ "$1" = status ]; }"#;

/// Grids that begin at the same moment choose the same ports.
static BEGINNING: Mutex<()> = Mutex::new(());

/// Directories of a machine that are directories in its user's home here.
const DIRECTORIES: [&str; 7] = ["/srv/", "/root/", "/etc/", "/mnt/", "/backup/", "/var/lib/", "/usr/local/bin/"];

/// An empty disk, of which the page says that its name goes on.
const DISK: &str = "/dev/disk/by-id/nvme-…";

/// Reads its disk as QEMU would; no machine boots from it.
pub const QEMU: &str = r#"#!/bin/bash
objects=()
while [ $# -gt 0 ]; do
    case "$1" in
        -object) objects+=(--object "$2") ;;
        -drive) uri=${2#file=}; exec qemu-img info "${uri%%,format=*}" ;;
        -blockdev) exec qemu-img info "${objects[@]}" --image-opts "$2" ;;
    esac
    shift
done
exit 1
"#;

/// Runs what units say, and etcd by its settings: what systemd would do of it.
const SYSTEMCTL: &str = r#"#!/bin/bash
[ "$1" = daemon-reload ] && exit 0
[ "$2" = --no-block ] && set -- "$1" "$3"
[ "$1 $2" = "enable --now" ] && set -- start "$3"
pid_of() {
    case "$1" in
        *node@*) f="$dir/run/node$instance.pid" ;;
        *host*) f="$dir/run/host.pid" ;;
        etcd) cat "$HOME/etcd.pid" 2>/dev/null; return 0 ;;
    esac
    sed -n 's/.*"pid":\([0-9]*\).*/\1/p' "$f" 2>/dev/null
}
act() {
    local instance=$(echo "$2" | sed -n 's/.*@\(.*\)\.service/\1/p') file="$SYSTEMD_UNIT_PATH/$2"
    [ -z "$instance" ] || file="${file%@*}@.service"
    if [ "$2" != etcd ]; then
        line=$(sed -n 's/^ExecStart=//p' "$file" | sed "s/%i/$instance/")
        dir=$(echo "$line" | sed -n 's/.*--dir \([^ ]*\).*/\1/p')
    fi
    case "$1" in
        start)
            if [ "$2" = etcd ]; then
                sed "s,/etc/,$HOME/etc/,; s,/var/lib/,$HOME/var/lib/," "$HOME/etc/default/etcd" >"$HOME/etcd.env"
                set -a; . "$HOME/etcd.env"; set +a
                mkdir -p "$HOME/var/lib/etcd"
                setsid etcd </dev/null >>"$HOME/etcd.log" 2>&1 &
                echo $! >"$HOME/etcd.pid"
                return
            fi
            rm -f "$dir/run/${instance:+node}${instance:-host}.pid"
            setsid $line </dev/null >/dev/null 2>>"$HOME/journal" &
            for i in $(seq 2400); do [ -n "$(pid_of "$2")" ] && break; sleep 0.05; done
            # A host is started when it takes commands.
            [ -z "$instance" ] || return 0
            for i in $(seq 600); do HOLDFAST_DIR="$dir" holdfast volume list >/dev/null 2>&1 && break; sleep 0.1; done ;;
        stop)
            local pid=$(pid_of "$2")
            [ -n "$pid" ] && kill "$pid" 2>/dev/null
            for i in $(seq 2400); do [ -n "$pid" ] && kill -0 "$pid" 2>/dev/null || break; sleep 0.05; done ;;
    esac
}
units_of() {
    case "$1" in
        *.target) sed -n 's/^Wants=//p' "$SYSTEMD_UNIT_PATH/$1" | tr ' ' '\n' | grep 'service$' ;;
        *) echo "$1" ;;
    esac
}
for unit in $(units_of "$2"); do
    case "$1" in
        restart) act stop "$unit"; act start "$unit" ;;
        start | stop) act "$1" "$unit" ;;
        *) echo "systemctl $*: not known here" >&2; exit 1 ;;
    esac
done
exit 0
"#;

/// A machine, and who sits at it.
pub struct Reader {
    pub home: tempfile::TempDir,
    replaced: Vec<(String, String)>,
    /// What was set in the shell.
    profile: String,
    disks: usize,
}

impl Reader {
    pub fn new() -> Reader {
        let home = tempfile::Builder::new().prefix("hf").tempdir().unwrap();
        let mut reader = Reader { home, replaced: Vec::new(), profile: String::new(), disks: 0 };
        for directory in DIRECTORIES {
            let here = format!("{}{directory}", reader.home.path().display());
            fs::create_dir_all(&here).unwrap();
            reader.has(directory, &here);
        }
        let units = reader.path("units").display().to_string();
        reader.has("holdfast grid units", &format!("holdfast grid units --output {units}"));
        fs::create_dir(reader.path("bin")).unwrap();
        reader.has_program("systemctl", SYSTEMCTL);
        reader
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    /// Where a page has the first, this machine has the second.
    pub fn has(&mut self, page: &str, here: &str) {
        self.replaced.retain(|(of, _)| of != page);
        self.replaced.insert(0, (page.to_string(), here.to_string()));
    }

    /// A program in place of that of the system.
    pub fn has_program(&self, name: &str, code: &str) {
        program(&self.path("bin").join(name), code);
    }

    /// What is put where the page says, as it would be there.
    pub fn here(&mut self, script: &str) -> String {
        let mut script =
            self.replaced.iter().fold(script.to_string(), |script, (page, here)| script.replace(page, here));
        while script.contains(DISK) {
            // A file is as good as a disk, and this machine has no other.
            let path = self.path(&format!("disk{}", self.disks));
            fs::File::create(&path).unwrap().set_len(1 << 30).unwrap();
            script = script.replacen(DISK, &path.display().to_string(), 1);
            self.disks += 1;
        }
        script
    }

    fn shell(&self, script: &str) -> Command {
        let own = Path::new(env!("CARGO_BIN_EXE_holdfast")).parent().unwrap().display();
        let mut command = Command::new("timeout");
        command
            .args(["300", "bash", "-c", &format!("{SHELL}\n{}\n{script}\nwait", self.profile)])
            .env("PATH", format!("{}:{own}:{}", self.path("bin").display(), std::env::var("PATH").unwrap()))
            .env("HOME", self.home.path())
            .env("SYSTEMD_UNIT_PATH", self.path("units"))
            .env_remove("HOLDFAST_DIR")
            .current_dir(self.home.path())
            .stdin(Stdio::null());
        command
    }

    /// Types it, however it ends.
    pub fn tries(&mut self, script: &str) -> Output {
        let script = self.here(script);
        let _alone = script.contains("grid up").then(|| BEGINNING.lock().unwrap_or_else(PoisonError::into_inner));
        let output = self.shell(&script).output().unwrap();
        eprintln!("{script}\n{}{}", text(&output.stdout), text(&output.stderr));
        output
    }

    /// Types it; it has to succeed.
    pub fn types(&mut self, script: &str) -> String {
        let output = self.tries(script);
        let said = text(&output.stdout) + &text(&output.stderr);
        assert!(output.status.success(), "{script}: {}: {said}", output.status);
        let is_set =
            |line: &&str| line.starts_with("export ") || line.split_once('=').is_some_and(|(name, _)| is_name(name));
        let set: Vec<&str> = script.lines().filter(is_set).collect();
        let set = self.here(&format!("{}\n", set.join("\n")));
        self.profile += &set;
        said
    }

    /// Types it until it succeeds: it is refused for a while.
    pub fn types_until(&mut self, script: &str) {
        let end = Instant::now() + Duration::from_secs(120);
        while !self.tries(script).status.success() {
            assert!(Instant::now() < end, "{script} is refused");
            std::thread::sleep(Duration::from_millis(300));
        }
    }

    /// Loses its power.
    pub fn dies(&self) {
        let dir = format!("{}/", self.home.path().display());
        let _ = self.shell("kill -9 $(cat etcd.pid) && rm etcd.pid").output();
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let line = text(&fs::read(entry.path().join("cmdline")).unwrap_or_default());
            let is_ours =
                line.split('\0').next().is_some_and(|first| first.ends_with("holdfast")) && line.contains(&dir);
            if is_ours {
                let _ = Command::new("kill").arg("-9").arg(entry.file_name()).output();
            }
        }
    }
}

fn is_name(word: &str) -> bool {
    !word.is_empty() && word.chars().all(|c| c.is_ascii_uppercase() || c == '_')
}

impl Drop for Reader {
    fn drop(&mut self) {
        // No grid goes on, whatever its directory is, nor does a member of etcd.
        self.dies();
    }
}

/// Machines with addresses of their own, and who goes from one to the other.
pub struct Site {
    machines: BTreeMap<String, Reader>,
    net: String,
}

impl Site {
    pub fn new(names: &[&str]) -> Site {
        let mut site = Site { machines: BTreeMap::new(), net: ports::net() };
        names.iter().for_each(|name| site.add(name));
        site
    }

    /// Another machine, which knows nothing.
    pub fn add(&mut self, name: &str) {
        let mut reader = Reader::new();
        reader.has("10.0.0.", &self.net);
        self.machines.insert(name.to_string(), reader);
    }

    pub fn at(&mut self, name: &str) -> &mut Reader {
        self.machines.get_mut(name).unwrap_or_else(|| panic!("there is no machine {name}"))
    }

    pub fn all(&mut self) -> impl Iterator<Item = &mut Reader> {
        self.machines.values_mut()
    }

    /// The same on each machine, in the order of their names.
    pub fn has(&mut self, page: &str, here: &str) {
        self.all().for_each(|reader| reader.has(page, here));
    }

    /// Types each command where its prompt says, or at a; all have to succeed.
    pub fn types(&mut self, block: &[Typed]) -> String {
        let mut said = String::new();
        for typed in block {
            if !typed.command.contains("# on each machine") {
                said += &self.types_one(typed);
                continue;
            }
            for reader in self.all().filter(|reader| reader.path(".holdfast/grid/grid.json").exists()) {
                said += &reader.types(&typed.command);
            }
        }
        said
    }

    pub fn types_one(&mut self, typed: &Typed) -> String {
        let at = if typed.at.is_empty() { "a" } else { &typed.at };
        eprintln!("at {at}:");
        let said = self.at(at).types(&typed.command);
        if typed.command.starts_with("holdfast grid token") {
            // It is taken to where it is wanted, as a word or as a file.
            let token = said.split_whitespace().find(|word| word.starts_with("hfjoin")).expect("a token").to_string();
            self.has("TOKEN", &token);
            for reader in self.all() {
                fs::write(reader.path("FILE"), &token).unwrap();
            }
        }
        said
    }

    /// Does what `grid etcd member` at machine `from` has said, at each member's machine.
    pub fn obeys(&mut self, from: &str, said: &str) {
        let mut at = String::new();
        let is_one_dead =
            said.contains("copy crl.der of the new member's directory to /etc/holdfast-etcd on their machines");
        for line in said.lines() {
            let member = line.strip_prefix("member ").and_then(|rest| rest.split_once(": copy "));
            if let Some((name, rest)) = member.filter(|(name, _)| !name.contains(' ')) {
                let (what, to) = rest.split_once(" to its machine as ").expect("a place");
                let to = to.split(';').next().unwrap();
                at = name.to_string();
                let machine = self.at(&at);
                // These are for a whole system.
                ["apt", "chown"].iter().for_each(|tool| machine.has_program(tool, "#!/bin/sh\n"));
                assert!(what.starts_with(&self.at(from).home.path().display().to_string()), "{what}");
                if is_one_dead {
                    let has = |machine: &&mut Reader| machine.path("etc/holdfast-etcd/crl.der").exists();
                    for other in self.all().filter(has) {
                        other.types(&format!("cp {what}/crl.der /etc/holdfast-etcd/"));
                    }
                }
                let machine = self.at(&at);
                machine.types(&format!("mkdir -p /etc/default && rm -rf {to} && cp -r {what} {to}"));
            } else if let Some(command) = line.strip_prefix("  ").filter(|_| !at.is_empty()) {
                self.at(&at).types(command);
            }
        }
        assert!(!at.is_empty(), "it names no member: {said}");
    }
}
