//! A grid's processes as services of systemd: the unit files, and the way to start and stop what they run.
//!
//! ```text
//! NAME.target             all of this machine's part of the grid: what is enabled
//! NAME-node@.service      one instance a node
//! NAME-drives.timer       asks drives how they are every ten minutes, with NAME-drives.service: where nodes have block devices
//! NAME-host.service       stops before the nodes: it empties its log into them
//! DIR/units.json          that systemd runs this grid: then nothing here starts or stops a process by itself
//! ```
//! The unit files name nodes and devices, so they are written anew when these change. For the grid in [`PACKAGED_DIR`] the
//! package has them without what it can't know; that stands in `UNIT.d/grid.conf` beside them.

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

/// In the grid's directory: which units run it.
const MARKER: &str = "units.json";

/// Where administrators put units.
pub const OUTPUT_DEFAULT: &str = "/etc/systemd/system";

/// Where the package has its units, the directory of the grid that they are for, and the program that they run.
const PACKAGED_UNITS: &str = "/usr/lib/systemd/system";
pub const PACKAGED_DIR: &str = "/var/lib/holdfast";
pub const PACKAGED_PROGRAM: &str = "/usr/bin/holdfast";

/// What names of units begin with, unless somebody says otherwise.
pub const NAME_DEFAULT: &str = "holdfast";

/// Where systemd looks for units, unless `SYSTEMD_UNIT_PATH` says otherwise.
const SEARCH_PATH: &[&str] =
    &[OUTPUT_DEFAULT, "/run/systemd/system", "/usr/local/lib/systemd/system", PACKAGED_UNITS, "/lib/systemd/system"];

/// Time to start in: a node opens its devices, the host reads the metadata. What comes later needs no bound.
const START_S: u64 = 60;

/// Beyond the program's own bounds for a stop, before systemd kills it.
const STOP_MARGIN_S: u64 = 10;

/// The files that a grid's services are written to.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Units {
    pub directory: PathBuf,
    pub name: String,
    /// The package's units run the grid, and these files tell them what they can't know.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub packaged: bool,
}

/// One file, not yet written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnitFile {
    pub path: PathBuf,
    pub text: String,
}

impl Units {
    /// Of these names, beside the package's where that has units for the grid.
    pub fn choose(dir: &GridDir, directory: PathBuf, name: String) -> Units {
        let mut units = Units { directory, name, packaged: true };
        let is_for_it = dir.root() == Path::new(PACKAGED_DIR) && units.name == NAME_DEFAULT;
        units.packaged = is_for_it && units.directory == Path::new(OUTPUT_DEFAULT) && units.target_path().exists();
        units
    }

    fn marker(dir: &GridDir) -> PathBuf {
        dir.root().join(MARKER)
    }

    /// The units that run the grid, if systemd does: as long as their files are there.
    pub fn of(dir: &GridDir) -> Option<Units> {
        let text = fs::read_to_string(Units::marker(dir)).ok()?;
        let units: Units = serde_json::from_str(&text).ok()?;
        units.target_path().exists().then_some(units)
    }

    fn target_path(&self) -> PathBuf {
        let directory = if self.packaged { Path::new(PACKAGED_UNITS) } else { &self.directory };
        directory.join(self.target())
    }

    fn drives_service(&self) -> String {
        format!("{}-drives.service", self.name)
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
        let mut files = if self.packaged { self.own_parts(&place, &nodes) } else { self.whole(&place, &nodes) };
        files.iter_mut().for_each(|file| file.path = self.directory.join(&file.path));
        Ok(files)
    }

    fn whole(&self, place: &Place, nodes: &[String]) -> Vec<UnitFile> {
        let mut files = vec![
            UnitFile::new(self.node_template(), self.node_text(place)),
            UnitFile::new(self.unit(Role::Host), self.host_text(place, nodes)),
            UnitFile::new(self.target(), self.target_text(place, nodes)),
        ];
        if place.has_drives() {
            files.push(UnitFile::new(self.drives_service(), drives_text(place)));
            files.push(UnitFile::new(self.drives_timer(), self.drives_timer_text(place)));
        }
        files
    }

    /// What the package's units can't know of a grid.
    fn own_parts(&self, place: &Place, nodes: &[String]) -> Vec<UnitFile> {
        let part = |unit: String, text: String| {
            UnitFile::new(format!("{unit}.d/grid.conf"), format!("{}{text}", place.header))
        };
        let writable = place.outside.iter().map(|dir| format!("ReadWritePaths={dir}\n")).collect::<String>();
        let node = format!("[Service]\n{}{writable}{}", place.user, place.devices());
        let host = format!("[Unit]\nAfter={}\n\n[Service]\n{}{}", nodes.join(" "), place.user, place.readers);
        let mut files = vec![
            part(self.node_template(), node),
            part(self.unit(Role::Host), host),
            part(self.target(), format!("[Unit]\n{}", self.wants(place, nodes))),
        ];
        if place.has_drives() {
            files.push(part(self.drives_service(), format!("[Service]\n{}", device_access(place))));
        }
        files
    }

    /// What the package has: each unit's name and text, for the grid in [`PACKAGED_DIR`] with the program of the package.
    pub fn of_package() -> Vec<UnitFile> {
        let units = Units { directory: PathBuf::new(), name: NAME_DEFAULT.to_string(), packaged: true };
        units.whole(&Place::of_package(), &[])
    }

    fn node_template(&self) -> String {
        format!("{}-node@.service", self.name)
    }

    fn wants(&self, place: &Place, nodes: &[String]) -> String {
        let timer = place.has_drives().then(|| self.drives_timer());
        let all: Vec<&str> = nodes.iter().map(String::as_str).chain(timer.as_deref()).collect();
        format!("Wants={} {}\n", self.unit(Role::Host), all.join(" "))
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
        for file in &files {
            let directory = file.path.parent().unwrap_or(&self.directory);
            fs::create_dir_all(directory).with_context(|| {
                format!("cannot make {}; run as root, or choose another --output", directory.display())
            })?;
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
        format!(
            "{}[Unit]\nDescription=Holdfast storage node %i of the grid in {}\n{}\n[Service]\n\
             ExecStart={} node --id %i --dir {}\n{}{}{}",
            place.header,
            place.dir,
            self.unit_section(place, ""),
            place.program,
            place.dir,
            service_section(stop),
            hardening(place, &place.outside),
            place.devices(),
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
            "PartOf={}\n{}\
             Wants=network-online.target\nAfter=network-online.target{after}\nRequiresMountsFor={}\n\
             # For ever: a grid that gives up helps nobody.\nStartLimitIntervalSec=0\n",
            self.target(),
            place.condition,
            place.dir
        )
    }

    fn target_text(&self, place: &Place, nodes: &[String]) -> String {
        let wants = if self.packaged { String::new() } else { self.wants(place, nodes) };
        format!(
            "{}[Unit]\nDescription=Holdfast: this machine's part of the grid in {}\n{}{wants}\n[Install]\n\
             WantedBy=multi-user.target\n",
            place.header, place.dir, place.condition
        )
    }

    fn drives_timer_text(&self, place: &Place) -> String {
        let every = drives::ASK_EVERY.as_secs();
        format!(
            "{}[Unit]\nDescription=Holdfast: asks the drives of the grid in {} how they are\nPartOf={}\n{}\n\
             [Timer]\nOnActiveSec=10\nOnUnitActiveSec={every}\n",
            place.header,
            place.dir,
            self.target(),
            place.condition,
        )
    }
}

impl UnitFile {
    fn new(name: String, text: String) -> UnitFile {
        UnitFile { path: name.into(), text }
    }
}

/// With what asking a drive takes, which nodes do without: raw commands to it.
fn drives_text(place: &Place) -> String {
    format!(
        "{}[Unit]\nDescription=Holdfast: what the drives of the grid in {} say of their health\n{}\n[Service]\n\
         Type=oneshot\nTimeoutStartSec=90\nExecStart={} --dir {} device health --save\n{}\
         # Raw commands to drives; a directory that is another user's.\n\
         CapabilityBoundingSet=CAP_SYS_RAWIO CAP_SYS_ADMIN CAP_DAC_OVERRIDE\nPrivateNetwork=yes\n\
         # The report is for nodes, which may be another user's.\nUMask=0022\n{}",
        place.header,
        place.dir,
        place.condition,
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
    /// Written without a grid: [`Units::of_package`].
    is_any: bool,
    header: String,
    /// Lines of the package: where to read, and that there has to be a grid.
    condition: String,
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
            is_any: false,
            header: header(dir),
            condition: String::new(),
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

    fn of_package() -> Place {
        Place {
            is_any: true,
            header: format!(
                "# Of the package holdfast, for the grid in {PACKAGED_DIR}; `holdfast grid units` says beside it what nodes and \
                 devices that has.\n"
            ),
            condition: format!("Documentation=man:holdfast(1)\nConditionPathExists={PACKAGED_DIR}/{MARKER}\n"),
            program: PACKAGED_PROGRAM.to_string(),
            dir: PACKAGED_DIR.to_string(),
            user: String::new(),
            block_devices: Vec::new(),
            outside: Vec::new(),
            readers: String::new(),
        }
    }

    /// Whether nodes have block devices, or may have.
    fn has_drives(&self) -> bool {
        self.is_any || !self.block_devices.is_empty()
    }

    /// Lines of a node's unit.
    fn devices(&self) -> String {
        match (self.is_any, self.has_drives()) {
            (true, _) => String::new(),
            (false, true) => device_access(self),
            (false, false) => "PrivateDevices=yes\n".to_string(),
        }
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
        let units = Units { directory: temp.path().join("units"), name: "lab".into(), packaged: false };
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
    fn what_the_package_has_and_what_a_grid_says_make_the_units_that_a_grid_writes_alone() {
        let temp = tempfile::tempdir().unwrap();
        let (dir, config) = grid(temp.path(), "/srv/disks/a.img");
        let of = |packaged| Units { directory: "/etc/units".into(), name: "holdfast".into(), packaged };
        let whole = of(false).files(&dir, &config).unwrap();
        let parts = of(true).files(&dir, &config).unwrap();
        let packaged = Units::of_package();
        let names: Vec<&str> = packaged.iter().map(|file| file.path.to_str().unwrap()).collect();
        let services = ["holdfast-node@.service", "holdfast-host.service", "holdfast.target"];
        assert_eq!(names[..3], services);
        assert_eq!(names[3..], ["holdfast-drives.service", "holdfast-drives.timer"]);
        for (at, name) in services.iter().enumerate() {
            assert_eq!(parts[at].path, Path::new("/etc/units").join(format!("{name}.d/grid.conf")));
            // Paths differ, and one of them waits for a grid.
            let lines = |texts: &[&str]| {
                let lines = texts.iter().flat_map(|text| text.lines());
                let all = lines.filter(|line| line.contains('=') && !line.starts_with('#'));
                let all =
                    all.filter(|line| !line.contains(temp.path().to_str().unwrap()) && !line.contains(PACKAGED_DIR));
                // A list may be told in parts.
                let words = all.flat_map(|line| line.split(['=', ' ']));
                words.map(str::to_string).collect::<std::collections::BTreeSet<_>>()
            };
            let of_parts = lines(&[&packaged[at].text, &parts[at].text]);
            let missing: Vec<_> = lines(&[&whole[at].text]).difference(&of_parts).cloned().collect();
            assert!(missing.is_empty(), "{name}: {missing:?}");
            assert!(packaged[at].text.contains("ConditionPathExists=/var/lib/holdfast/units.json\n"));
        }
        assert_eq!(values(&parts[0], "ReadWritePaths"), ["/srv/disks"]);
        assert_eq!(
            values(&parts[2], "Wants"),
            ["holdfast-host.service holdfast-node@1.service holdfast-node@2.service"]
        );
    }

    #[test]
    fn a_host_may_give_a_socket_to_the_group_of_readers() {
        let temp = tempfile::tempdir().unwrap();
        let (dir, config) = grid(temp.path(), "devices/a.img");
        let units = Units { directory: temp.path().join("units"), name: "lab".into(), packaged: false };
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
        let units = Units { directory: temp.path().join("units"), name: "lab".into(), packaged: false };
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
        let units = Units { directory: temp.path().join("units"), name: "lab".into(), packaged: false };
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
