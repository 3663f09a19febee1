//! A grid's processes as services of systemd: the unit files, and the way to start and stop what they run.
//!
//! ```text
//! NAME.target             all of this machine's part of the grid: what is enabled
//! NAME-node@.service      one instance a node
//! NAME-drives.timer       asks drives how they are every ten minutes, with NAME-drives.service: where nodes have block devices
//! NAME-host.service       stops before the nodes: it empties its log into them
//! DIR/units.json          that systemd runs this grid: then nothing here starts or stops a process by itself
//! ```
//! The unit files name nodes and devices, so they are written anew when these change.

use super::layout::{GridConfig, GridDir, write_durably};
use super::processes::Role;
use super::{HOST_DOWN_MAX, NODE_DOWN_MAX};
use crate::drives;
use anyhow::{Context, Result, bail};
use holdfast_api::{Code, refuse};
use serde::{Deserialize, Serialize};
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where administrators put units.
pub const OUTPUT_DEFAULT: &str = "/etc/systemd/system";

/// Where systemd looks for units, unless `SYSTEMD_UNIT_PATH` says otherwise.
const SEARCH_PATH: &[&str] = &[
    OUTPUT_DEFAULT,
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
];

/// Time to start in: a node opens its devices, the host reads the metadata. What comes later needs no bound.
const START_S: u64 = 60;

/// Beyond the program's own bounds for a stop, before systemd kills it.
const STOP_MARGIN_S: u64 = 10;

/// The files that a grid's services are written to.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Units {
    pub directory: PathBuf,
    pub name: String,
}

/// One file, not yet written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnitFile {
    pub path: PathBuf,
    pub text: String,
}

impl Units {
    fn marker(dir: &GridDir) -> PathBuf {
        dir.root().join("units.json")
    }

    /// The units that run the grid, if systemd does: as long as their files are there.
    pub fn of(dir: &GridDir) -> Option<Units> {
        let text = fs::read_to_string(Units::marker(dir)).ok()?;
        let units: Units = serde_json::from_str(&text).ok()?;
        units.target_path().exists().then_some(units)
    }

    fn target_path(&self) -> PathBuf {
        self.directory.join(self.target())
    }

    fn drives_timer(&self) -> String {
        format!("{}-drives.timer", self.name)
    }

    pub fn target(&self) -> String {
        format!("{}.target", self.name)
    }

    pub fn unit(&self, role: Role) -> String {
        match role {
            Role::Node(id) => format!("{}-node@{id}.service", self.name),
            Role::Host => format!("{}-host.service", self.name),
        }
    }

    /// Whether systemd would find what is written there.
    pub fn is_searched(&self) -> bool {
        let given = std::env::var("SYSTEMD_UNIT_PATH").ok().filter(|path| !path.is_empty());
        match given {
            Some(path) => path.split(':').any(|dir| Path::new(dir) == self.directory),
            None => SEARCH_PATH.iter().any(|dir| Path::new(dir) == self.directory),
        }
    }

    /// All files, for the grid as it is now.
    pub fn files(&self, dir: &GridDir, config: &GridConfig) -> Result<Vec<UnitFile>> {
        let place = Place::of(dir, config)?;
        let nodes: Vec<String> = config.nodes.iter().map(|node| self.unit(Role::Node(node.id))).collect();
        let file = |name: String, text: String| UnitFile { path: self.directory.join(name), text };
        let mut files = vec![
            file(format!("{}-node@.service", self.name), self.node_text(&place)),
            file(self.unit(Role::Host), self.host_text(&place, &nodes)),
            file(self.target(), self.target_text(&place, &nodes)),
        ];
        if !place.block_devices.is_empty() {
            files.push(file(format!("{}-drives.service", self.name), drives_text(&place)));
            files.push(file(self.drives_timer(), self.drives_timer_text(&place)));
        }
        Ok(files)
    }

    /// Writes all files; from then on systemd runs the grid, if it finds them.
    pub fn write(&self, dir: &GridDir, config: &GridConfig) -> Result<Vec<UnitFile>> {
        let files = self.files(dir, config)?;
        let own = header(dir);
        for file in &files {
            let other = fs::read_to_string(&file.path).is_ok_and(|text| !text.starts_with(&own));
            if other {
                refuse!(
                    Code::Exists,
                    "{} is there already, and not of the grid in {}; choose another --name, or remove that file",
                    file.path.display(),
                    dir.root().display()
                );
            }
        }
        fs::create_dir_all(&self.directory).with_context(|| {
            format!("cannot make {}; run as root, or choose another --output", self.directory.display())
        })?;
        for file in &files {
            write_durably(&file.path, file.text.as_bytes())?;
        }
        if self.is_searched() {
            let marker = serde_json::to_string(self).expect("names always encode");
            write_durably(&Units::marker(dir), marker.as_bytes())?;
        }
        Ok(files)
    }

    pub fn start(&self, role: Role) -> Result<()> {
        self.systemctl(&["start", &self.unit(role)])
    }

    /// Returns once it is stopped.
    pub fn stop(&self, role: Role) -> Result<()> {
        self.systemctl(&["stop", &self.unit(role)])
    }

    fn systemctl(&self, arguments: &[&str]) -> Result<()> {
        let shown = format!("systemctl {}", arguments.join(" "));
        let output = Command::new("systemctl").args(arguments).output();
        let output = output.with_context(|| {
            format!(
                "cannot run `{shown}`: systemd runs this grid, since `holdfast grid units`. Where there is no systemd any more, \
                 remove {}",
                self.target_path().display()
            )
        })?;
        if !output.status.success() {
            bail!(
                "`{shown}` failed: {}; systemd runs this grid: see `systemctl status {}`, and `journalctl -u '{}-*'`",
                String::from_utf8_lossy(&output.stderr).trim(),
                self.target(),
                self.name
            );
        }
        Ok(())
    }

    fn node_text(&self, place: &Place) -> String {
        let stop = NODE_DOWN_MAX.as_secs() + STOP_MARGIN_S;
        let devices = match place.block_devices.is_empty() {
            true => "PrivateDevices=yes\n".to_string(),
            false => device_access(place),
        };
        format!(
            "{}[Unit]\nDescription=Holdfast storage node %i of the grid in {}\n{}\n[Service]\n\
             ExecStart={} node --id %i --dir {}\n{}{}{devices}",
            place.header,
            place.dir,
            self.unit_section(place, ""),
            place.program,
            place.dir,
            service_section(stop),
            hardening(place, &place.outside),
        )
    }

    fn host_text(&self, place: &Place, nodes: &[String]) -> String {
        let stop = HOST_DOWN_MAX.as_secs() + STOP_MARGIN_S;
        // Stopped in the other order: first the host.
        let after = nodes.iter().map(|node| format!(" {node}")).collect::<String>();
        format!(
            "{}[Unit]\nDescription=Holdfast host of the grid in {}\n{}\n[Service]\nExecStart={} host --dir {}\n{}{}{}\
             PrivateDevices=yes\n",
            place.header,
            place.dir,
            self.unit_section(place, &after),
            place.program,
            place.dir,
            service_section(stop),
            place.readers,
            hardening(place, &[]),
        )
    }

    fn unit_section(&self, place: &Place, after: &str) -> String {
        format!(
            "PartOf={}\n\
             Wants=network-online.target\nAfter=network-online.target{after}\nRequiresMountsFor={}\n\
             # For ever: a grid that gives up helps nobody.\nStartLimitIntervalSec=0\n",
            self.target(),
            place.dir
        )
    }

    fn target_text(&self, place: &Place, nodes: &[String]) -> String {
        let timer = if place.block_devices.is_empty() { String::new() } else { format!(" {}", self.drives_timer()) };
        format!(
            "{}[Unit]\nDescription=Holdfast: this machine's part of the grid in {}\nWants={} {}{timer}\n\n[Install]\n\
             WantedBy=multi-user.target\n",
            place.header,
            place.dir,
            self.unit(Role::Host),
            nodes.join(" ")
        )
    }

    fn drives_timer_text(&self, place: &Place) -> String {
        let every = drives::ASK_EVERY.as_secs();
        format!(
            "{}[Unit]\nDescription=Holdfast: asks the drives of the grid in {} how they are\nPartOf={}\n\n\
             [Timer]\nOnActiveSec=10\nOnUnitActiveSec={every}\n",
            place.header,
            place.dir,
            self.target(),
        )
    }
}

/// With what asking a drive takes, which nodes do without: raw commands to it.
fn drives_text(place: &Place) -> String {
    format!(
        "{}[Unit]\nDescription=Holdfast: what the drives of the grid in {} say of their health\n\n[Service]\n\
         Type=oneshot\nTimeoutStartSec=90\nExecStart={} --dir {} device health --save\n{}\
         # Raw commands to drives; a directory that is another user's.\n\
         CapabilityBoundingSet=CAP_SYS_RAWIO CAP_SYS_ADMIN CAP_DAC_OVERRIDE\nPrivateNetwork=yes\n\
         # The report is for nodes, which may be another user's.\nUMask=0022\n{}",
        place.header,
        place.dir,
        place.program,
        place.dir,
        device_access(place),
        confinement(place, &[]),
    )
}

fn device_access(place: &Place) -> String {
    let allowed = place.block_devices.iter().map(|path| format!("DeviceAllow={path} rw\n"));
    format!("DevicePolicy=closed\n{}", allowed.collect::<String>())
}

/// Writes the units anew where systemd runs the grid: nodes or devices have come or gone.
pub fn refresh(dir: &GridDir, config: &GridConfig) -> Result<()> {
    let Some(units) = Units::of(dir) else { return Ok(()) };
    units.write(dir, config).context("systemd's units are not up to date; run `holdfast grid units` again")?;
    units.systemctl(&["daemon-reload"])
}

/// What the files say of this machine.
struct Place {
    header: String,
    program: String,
    dir: String,
    /// Lines that name the user, if it isn't root.
    user: String,
    block_devices: Vec<String>,
    /// Directories of devices that are files elsewhere.
    outside: Vec<String>,
    /// A line for the host that lets it give a socket to the group of readers: without capabilities not even root may give it to a
    /// group that it is not in.
    readers: String,
}

impl Place {
    fn of(dir: &GridDir, config: &GridConfig) -> Result<Place> {
        let program = std::env::current_exe().context("cannot tell where this program is")?;
        let program = PathBuf::from(program.to_string_lossy().trim_end_matches(" (deleted)"));
        let owner = fs::metadata(dir.root()).with_context(|| format!("cannot examine {}", dir.root().display()))?;
        let mut place = Place {
            header: header(dir),
            program: plain(&program)?,
            dir: plain(dir.root())?,
            user: String::new(),
            block_devices: Vec::new(),
            outside: Vec::new(),
            // With a file that is wrong the host doesn't start, and says so.
            readers: dir
                .settings(config)
                .ok()
                .and_then(|settings| settings.readers)
                .map_or(String::new(), |group| format!("SupplementaryGroups={group}\n")),
        };
        for device in config.nodes.iter().flat_map(|node| &node.devices) {
            let path = dir.device_path(device);
            if fs::metadata(&path).is_ok_and(|m| m.file_type().is_block_device()) {
                place.block_devices.push(plain(&path)?);
            } else if !path.starts_with(dir.root()) {
                place.outside.push(plain(path.parent().unwrap_or(Path::new("/")))?);
            }
        }
        place.outside.sort();
        place.outside.dedup();
        if owner.uid() != 0 {
            let disk = if place.block_devices.is_empty() { "" } else { "SupplementaryGroups=disk\n" };
            place.user = format!("User={}\nGroup={}\n{disk}", owner.uid(), owner.gid());
        }
        Ok(place)
    }
}

fn header(dir: &GridDir) -> String {
    format!(
        "# Written by `holdfast grid units` for the grid in {}; it is written anew when nodes change.\n",
        dir.root().display()
    )
}

/// Paths stand in units as they are: what means something to systemd may not be in them.
fn plain(path: &Path) -> Result<String> {
    let text = path.to_string_lossy();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._+@:,=~-".contains(c);
    if let Some(odd) = text.chars().find(|c| !is_plain(*c)) {
        refuse!(
            Code::Invalid,
            "{text} can't stand in a unit of systemd, since it holds `{odd}`; choose a path of letters, digits and /._-, for \
             example by a symbolic link, and name that with --dir"
        );
    }
    Ok(text.into_owned())
}

fn service_section(stop_s: u64) -> String {
    format!(
        "Type=notify\nNotifyAccess=main\nRestart=always\nRestartSec=1\nTimeoutStartSec={START_S}\n\
         # Beyond the program's own bound, after which it is as good as a crash: nothing that was acknowledged is lost.\n\
         TimeoutStopSec={stop_s}\n\
         # Rings and buffers of io_uring, connections of many hosts, and not the first to be killed when memory is short.\n\
         LimitMEMLOCK=infinity\nLimitNOFILE=65536\nOOMScoreAdjust=-500\n"
    )
}

/// What neither nodes nor hosts need.
fn hardening(place: &Place, writable: &[String]) -> String {
    format!("{}CapabilityBoundingSet=\nUMask=0077\n{}", place.user, confinement(place, writable))
}

/// What nothing of ours needs. System calls are not filtered: filters of some releases of systemd lack io_uring.
fn confinement(place: &Place, writable: &[String]) -> String {
    let writable = writable.iter().map(|dir| format!(" {dir}")).collect::<String>();
    // What is in there would be hidden.
    let is_temporary = ["/tmp/", "/var/tmp/"].iter().any(|at| place.dir.starts_with(at));
    let private_tmp = if is_temporary { "" } else { "PrivateTmp=yes\n" };
    format!(
        "NoNewPrivileges=yes\nProtectSystem=strict\nProtectHome=read-only\n\
         ReadWritePaths={}{writable}\n{private_tmp}ProtectKernelTunables=yes\nProtectKernelModules=yes\n\
         ProtectKernelLogs=yes\nProtectControlGroups=yes\nProtectHostname=yes\nRestrictNamespaces=yes\n\
         RestrictRealtime=yes\nRestrictSUIDSGID=yes\nRestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK\n\
         LockPersonality=yes\nMemoryDenyWriteExecute=yes\nSystemCallArchitectures=native\n",
        place.dir
    )
}

#[cfg(test)]
mod tests {
    use super::super::layout::{DeviceConfig, HostConfig, NodeConfig};
    use super::*;

    fn grid(temp: &Path, device: &str) -> (GridDir, GridConfig) {
        let dir = GridDir::choose(Some(temp)).unwrap();
        let devices = vec![DeviceConfig { path: device.into(), device: "d".into(), size_bytes: 1 << 30 }];
        let node = |id| NodeConfig { id, address: "127.0.0.1:7500".parse().unwrap(), devices: devices.clone() };
        (dir, GridConfig::new(holdfast_base::GridId(7).to_string(), vec![node(1), node(2)], HostConfig::default()))
    }

    fn values<'t>(file: &'t UnitFile, key: &str) -> Vec<&'t str> {
        let lines = file.text.lines().filter_map(|line| line.split_once('='));
        lines.filter(|(name, _)| *name == key).map(|(_, value)| value).collect()
    }

    #[test]
    fn the_host_stops_before_the_nodes_and_all_with_the_target() {
        let temp = tempfile::tempdir().unwrap();
        let (dir, config) = grid(temp.path(), "devices/a.img");
        let units = Units { directory: temp.path().join("units"), name: "lab".into() };
        let [node, host, target] = &units.files(&dir, &config).unwrap()[..] else { panic!("three files") };
        assert!(values(host, "After")[0].ends_with(" lab-node@1.service lab-node@2.service"), "{}", host.text);
        assert_eq!(values(target, "Wants"), ["lab-host.service lab-node@1.service lab-node@2.service"]);
        for service in [node, host] {
            assert_eq!(values(service, "PartOf"), ["lab.target"]);
            assert_eq!(values(service, "Type"), ["notify"]);
            assert_eq!(values(service, "ReadWritePaths"), [temp.path().to_str().unwrap()]);
            assert_eq!(values(service, "PrivateDevices"), ["yes"]);
        }
        let stop: u64 = values(host, "TimeoutStopSec")[0].parse().unwrap();
        assert!(stop > HOST_DOWN_MAX.as_secs());
        assert!(values(node, "ExecStart")[0].contains(" node --id %i --dir "));
    }

    #[test]
    fn a_host_may_give_a_socket_to_the_group_of_readers() {
        let temp = tempfile::tempdir().unwrap();
        let (dir, config) = grid(temp.path(), "devices/a.img");
        let units = Units { directory: temp.path().join("units"), name: "lab".into() };
        let groups = || {
            let files = units.files(&dir, &config).unwrap();
            let of = |at: usize| values(&files[at], "SupplementaryGroups").join(" ");
            [of(0), of(1)]
        };
        assert_eq!(groups(), ["", ""]);
        fs::write(dir.settings_path(), "[control]\nreaders = 'ops'\n").unwrap();
        assert_eq!(groups(), ["", "ops"], "the host's alone");
    }

    #[test]
    fn devices_elsewhere_can_be_written_and_odd_paths_are_refused() {
        let temp = tempfile::tempdir().unwrap();
        let units = Units { directory: temp.path().join("units"), name: "lab".into() };
        let (dir, config) = grid(temp.path(), "/srv/disks/a.img");
        let files = units.files(&dir, &config).unwrap();
        assert!(values(&files[0], "ReadWritePaths")[0].ends_with(" /srv/disks"));
        let odd = temp.path().join("my grid");
        fs::create_dir(&odd).unwrap();
        let (dir, config) = grid(&odd, "a.img");
        assert!(units.files(&dir, &config).unwrap_err().to_string().contains("--dir"));
    }

    #[test]
    fn units_of_another_grid_are_left_alone() {
        let temp = tempfile::tempdir().unwrap();
        let units = Units { directory: temp.path().join("units"), name: "lab".into() };
        let (one, other) = (temp.path().join("one"), temp.path().join("other"));
        for path in [&one, &other] {
            fs::create_dir(path).unwrap();
        }
        let (dir, config) = grid(&one, "a.img");
        units.write(&dir, &config).unwrap();
        units.write(&dir, &config).unwrap();
        assert_eq!(Units::of(&dir), None, "systemd doesn't look there");
        let (dir, config) = grid(&other, "a.img");
        assert!(units.write(&dir, &config).unwrap_err().to_string().contains("--name"));
    }
}
