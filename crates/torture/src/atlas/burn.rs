//! Machines that are alike: the first burns, another one comes in its place, and then all of etcd is lost.
//!
//! ```text
//!   a, b, c    a host, a node with two devices, a member of etcd that goes by the grid's certificates
//!   d          comes when a has burnt: in its place, with its own node, and a member of etcd
//! ```
//! Burning is the end of all processes at once, and of the machine's directories. What is done about it is what the runbook has
//! (`docs/operate/runbook.md`): commands are given as they stand there, and what it says that one sees is waited for. Guests work
//! all the while, and hold every byte against the model; in the end everything is read twice.

use super::guests::{Control, Seen, VolumePlan};
use super::machine::{Machine, Part, Shape};
use super::net::Net;
use super::report::{Report, Row};
use super::site::{self, VolumeSpec};
use super::{ASK_AGAIN, LOOK_PACE, Options, WELL, WHOLE_MAX, say};
use crate::logs;
use anyhow::{Context, Result, bail, ensure};
use holdfast_lab::grid::make_key;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// What a run goes through, in words.
pub const PHASES: [&str; 6] = [
    "(none)         nothing, for comparison",
    "burn           the first machine burns",
    "export         what nobody serves is exported elsewhere, by command",
    "replace        another machine takes its place, with a member of etcd",
    "empty          all members of etcd lose what they hold; nothing stops",
    "recover        hosts are stopped, the metadata are made anew from what nodes hold, hosts are started",
];

/// Who is in the burnt machine's place.
const NEWCOMER: Part = Part::D;

/// How long what the runbook says may take to be seen.
const SEEN_MAX: Duration = Duration::from_secs(90);

/// How long a request may take while all hosts are stopped.
const RECOVERY_MAX: Duration = Duration::from_secs(300);

/// Copies of the metadata follow a change within half a minute.
const COPIES_LAG: Duration = Duration::from_secs(35);

/// How a volume is offered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Offer {
    /// By two hosts: this one has it in service, that one forwards to it.
    Twice(Part, Part),
    /// By one; any other one takes it over when that is lost.
    Auto(Part),
    /// By one, until somebody says otherwise.
    Once(Part),
}

const VOLUMES: [(VolumeSpec, Offer); 5] = [
    (VolumeSpec { name: "mirror2", layout: "mirror:2", is_encrypted: false }, Offer::Twice(Part::A, Part::B)),
    (VolumeSpec { name: "parity", layout: "parity:2+1", is_encrypted: false }, Offer::Twice(Part::A, Part::C)),
    (VolumeSpec { name: "sealed", layout: "mirror:2", is_encrypted: true }, Offer::Twice(Part::B, Part::A)),
    (VolumeSpec { name: "auto", layout: "mirror:2", is_encrypted: false }, Offer::Auto(Part::A)),
    (VolumeSpec { name: "plain", layout: "mirror:2", is_encrypted: false }, Offer::Once(Part::A)),
];

impl Offer {
    fn homes(self) -> [Part; 2] {
        match self {
            Offer::Twice(owner, forwarding) => [owner, forwarding],
            Offer::Auto(owner) | Offer::Once(owner) => [owner, owner],
        }
    }

    /// Whether its clients go on by themselves when a host is lost.
    fn is_safe(self) -> bool {
        !matches!(self, Offer::Once(_))
    }
}

/// Makes the grid, burns its first machine, and loses its etcd, under guests.
pub fn run(options: &Options, stopped: &AtomicBool) -> Result<Report> {
    let begun = Instant::now();
    let town = Town::build(options)?;
    let planned = VOLUMES.map(|(volume, offer)| VolumePlan {
        name: volume.name.to_string(),
        layout: volume.layout.to_string(),
        size_bytes: options.volume_mib << 20,
        homes: offer.homes(),
    });
    let mut complaints = Vec::new();
    let mut report = super::under_guests(options, &Part::FOUR, planned.to_vec(), |control, report| {
        let mut burn = Burn { options, town, control, stopped, before: Vec::new() };
        let done = burn.all(report);
        complaints = burn.town.complaints()?;
        done
    });
    report.failures.extend(complaints);
    report.took = begun.elapsed();
    Ok(report)
}

/// The machines, and what of them is there.
struct Town {
    net: Net,
    machines: Vec<Machine>,
    key: PathBuf,
    /// Client URLs of etcd's members.
    urls: String,
}

impl Town {
    fn build(options: &Options) -> Result<Town> {
        let net = Net::build(&options.dir)?;
        let machines = Part::FOUR.map(|part| Machine::new(part, Shape::FOUR, &options.binary, &options.dir));
        let key = options.dir.join("sealed.key");
        make_key(&key)?;
        let mut town = Town { net, machines: machines.into(), key, urls: urls(&Shape::FOUR.voters) };
        town.make_etcd()?;
        let size = format!("{}MiB", options.device_mib);
        for part in Shape::FOUR.voters {
            say(&format!("{part} {}", if part == Part::A { "makes the grid" } else { "joins" }));
            let mut line = town.up_line(part);
            line.extend(["--nodes", "1", "--devices", "2", "--device-size", &size].map(str::to_string));
            if part != Part::A {
                line.extend(["--join-file".to_string(), town.token(Part::A, part)?]);
            }
            town.holdfast(part, &line)?;
        }
        town.make_volumes(options.volume_mib)?;
        Ok(town)
    }

    /// Three members, by the files that the first machine makes for them.
    fn make_etcd(&mut self) -> Result<()> {
        say("three members of etcd by certificates of the grid");
        let members = Shape::FOUR.voters.map(member).join(" ");
        self.make_members(Part::A, &format!("grid etcd member {members}"))?;
        Shape::FOUR.voters.iter().try_for_each(|part| self.machine(*part).start_member())
    }

    /// Has members' files made at a machine, and puts them where each member is.
    fn make_members(&mut self, at: Part, line: &str) -> Result<()> {
        say(&format!("{at}# holdfast {line}"));
        let made = self.machine(at).json(&line.split(' ').collect::<Vec<_>>())?;
        for member in made["members"].as_array().context("members were made")? {
            let (name, dir) = (member["member"].as_str(), member["dir"].as_str());
            let (name, dir) =
                name.zip(dir).with_context(|| format!("a member has a name and a directory: {member}"))?;
            let part = Part::parse(name).with_context(|| format!("member {name} is on no machine"))?;
            copy_files(Path::new(dir), &self.machine(part).member_dir())?;
        }
        Ok(())
    }

    fn up_line(&self, part: Part) -> Vec<String> {
        let (address, nbd) = (part.address(), part.nbd());
        // The namespaces reach nobody else.
        let line = format!("grid up --etcd {} --name {part} --address {address} --nbd-tcp {nbd} --nbd-open", self.urls);
        line.split(' ').map(str::to_string).collect()
    }

    /// A token for a machine, in a file there.
    fn token(&mut self, at: Part, joining: Part) -> Result<String> {
        let token = self.give(at, "grid token")?;
        let file = self.key.with_file_name(format!("{joining}.token"));
        std::fs::write(&file, token).with_context(|| format!("cannot write {}", file.display()))?;
        Ok(file.display().to_string())
    }

    fn make_volumes(&mut self, volume_mib: u64) -> Result<()> {
        for (volume, offer) in VOLUMES {
            let (name, layout) = (volume.name, volume.layout);
            say(&format!("volume {name}: {layout}, {offer:?}"));
            let key = if volume.is_encrypted { format!(" --key-file {}", self.key.display()) } else { String::new() };
            let encrypt = if volume.is_encrypted { format!(" --encrypt{key}") } else { String::new() };
            let [owner, forwarding] = offer.homes();
            self.give(owner, &format!("volume create {name} --size {volume_mib}MiB --layout {layout}{encrypt}"))?;
            match offer {
                Offer::Twice(..) => drop(self.give(forwarding, &format!("volume export {name} --multipath{key}"))?),
                Offer::Auto(_) => drop(self.give(owner, &format!("volume export {name} --failover auto"))?),
                Offer::Once(_) => {}
            }
        }
        Ok(())
    }

    fn machine(&mut self, part: Part) -> &mut Machine {
        self.machines.iter_mut().find(|machine| machine.part == part).expect("there is one of each")
    }

    fn holdfast(&mut self, part: Part, line: &[String]) -> Result<String> {
        say(&format!("{part}# holdfast {}", line.join(" ")));
        self.machine(part).holdfast(&line.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Gives a command at a machine, as a line.
    fn give(&mut self, part: Part, line: &str) -> Result<String> {
        self.holdfast(part, &line.split(' ').map(str::to_string).collect::<Vec<_>>())
    }

    /// Waits until a command says all of this in one line.
    fn see(&mut self, part: Part, line: &str, words: &[&str]) -> Result<()> {
        let since = Instant::now();
        loop {
            let told = self.machine(part).told(&line.split(' ').collect::<Vec<_>>())?;
            let told = String::from_utf8_lossy(&[told.stdout, told.stderr].concat()).into_owned();
            if told.lines().any(|line| words.iter().all(|word| line.contains(word))) {
                say(&format!("{part}# holdfast {line}: … {} …", words.join(" … ")));
                return Ok(());
            }
            ensure!(since.elapsed() < SEEN_MAX, "`holdfast {line}` on {part} does not say {words:?} but:\n{told}");
            std::thread::sleep(LOOK_PACE);
        }
    }

    /// What of the grid is not whole, seen from these machines. A volume counts as whole once it was: where there is
    /// much to do a node is late now and then, is done without for a moment, and what it lacks is made up for.
    fn lacks(&mut self, there: &[Part], were_whole: &mut [bool; VOLUMES.len()]) -> Option<String> {
        let mut owners = VOLUMES.map(|_| 0);
        for part in there {
            if let Some(what) = self.machine(*part).missing() {
                return Some(what);
            }
            let status = match self.machine(*part).json(&["grid", "status"]) {
                Ok(status) => status,
                Err(error) => return Some(format!("{error:#}")),
            };
            if let Some(what) = site::lacks_of_nodes(&status, there.len()) {
                return Some(format!("host {part}: {what}"));
            }
            for ((volume, owners), was_whole) in VOLUMES.iter().zip(&mut owners).zip(&mut *were_whole) {
                let volumes = status["volumes"].as_array().into_iter().flatten();
                let Some(found) = volumes.into_iter().find(|found| found["name"] == volume.0.name) else { continue };
                if found["state"] != "open" {
                    continue;
                }
                *owners += 1;
                match site::lacks_of_volume(found) {
                    Some(what) if !*was_whole => return Some(format!("host {part}: {what}")),
                    _ => *was_whole = true,
                }
            }
        }
        let at = owners.iter().position(|owners| *owners != 1)?;
        Some(format!("volume {} is in service at {} hosts", VOLUMES[at].0.name, owners[at]))
    }

    fn complaints(&self) -> Result<Vec<String>> {
        let mut all = Vec::new();
        for machine in self.machines.iter().filter(|machine| machine.logs().exists()) {
            let errors = logs::errors(&machine.logs())?;
            all.extend(errors.into_iter().map(|line| format!("log of {}: {line}", machine.part)));
        }
        Ok(all)
    }
}

/// The thread that does all this to the grid.
struct Burn<'a> {
    options: &'a Options,
    town: Town,
    control: &'a Control,
    stopped: &'a AtomicBool,
    /// What volumes were when the metadata were lost.
    before: Vec<Value>,
}

impl Burn<'_> {
    fn all(&mut self, report: &mut Report) -> Result<()> {
        let there = Shape::FOUR.voters;
        self.wait_whole(&there).context("before anything happens")?;
        self.phase("(none)", report, |burn| burn.rest())?;
        self.phase("burn", report, Burn::burn)?;
        self.phase("export", report, Burn::export)?;
        let signing = self.signing()?;
        self.phase("replace", report, |burn| burn.replace(signing))?;
        self.phase("empty", report, |burn| burn.empty(signing))?;
        self.phase("recover", report, |burn| burn.recover(signing))?;
        for reader in 0..2 {
            say("everything is read back");
            super::sweep(self.control, reader, || self.check_going())?;
            report.verified_bytes += VOLUMES.len() as u64 * (self.options.volume_mib << 20);
        }
        Ok(())
    }

    fn phase(&mut self, name: &str, report: &mut Report, act: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        self.control.take_seen();
        self.control.note(format!("{name} begins"));
        say(&format!("== {name}"));
        let begun = Instant::now();
        let done = act(self).with_context(|| format!("in phase {name}"));
        let seen = self.control.take_seen();
        say(&format!("  {} failed; longest waits: {}", seen.failed(), waits(&seen)));
        report.rows.push(Row::new(name, None, (begun.elapsed(), Duration::ZERO), seen));
        ensure!(!self.control.mismatched(), "guests saw wrong bytes: stopped, so that what explains it stays");
        done
    }

    /// Everything of the first machine is gone at once.
    fn burn(&mut self) -> Result<()> {
        let town = &mut self.town;
        town.machine(Part::A).kill()?;
        town.machine(Part::A).remove()?;
        town.net.cut(Part::A)?;
        self.wait_served(Offer::is_safe)?;
        self.rest()
    }

    /// "A machine is dead", as far as volumes are concerned.
    fn export(&mut self) -> Result<()> {
        self.town.see(Part::B, "status", &["volume plain is served by nobody: its host, a, is gone"])?;
        self.town.see(Part::B, "status", &["node", "is down"])?;
        self.town.give(Part::B, "machine list")?;
        self.town.give(Part::B, "volume list")?;
        self.town.give(Part::B, "volume export plain")?;
        self.wait_served(|_| true)
    }

    /// A machine that has the authority's key, which the first one had.
    fn signing(&mut self) -> Result<Part> {
        let list = self.town.machine(Part::B).json(&["machine", "list"])?;
        let machines = list.as_array().context("machines are listed")?;
        let signs = machines.iter().find(|machine| machine["signs"] == true && machine["name"] != "a");
        let name = signs.and_then(|machine| machine["name"].as_str());
        name.and_then(Part::parse).context("no machine that is left has the key of the grid's authority")
    }

    /// "A member of etcd is lost", "It is replaced".
    fn replace(&mut self, signing: Part) -> Result<()> {
        self.town.see(Part::C, "machine list", &["machine a is gone"])?;
        self.town.make_members(signing, &format!("grid etcd member {} --replace a", member(NEWCOMER)))?;
        self.town.machine(NEWCOMER).start_member()?;
        let left = [Part::B, Part::C];
        for part in left {
            // The others refuse the dead one's certificate.
            let (from, to) = (self.town.machine(NEWCOMER).member_dir(), self.town.machine(part).member_dir());
            std::fs::copy(from.join("crl.der"), to.join("crl.der")).context("the list of what was taken back")?;
        }
        self.town.urls = urls(&[Part::B, Part::C, NEWCOMER]);
        self.town.give(signing, "machine remove a --dead")?;
        self.join(signing)?;
        let everyone = [Part::B, Part::C, NEWCOMER];
        self.offer(&everyone)?;
        let used = format!("grid etcd use {}", self.town.urls);
        for part in left {
            self.town.give(part, &used)?;
            self.down(part)?;
            self.town.give(part, "grid up")?;
            self.wait_served(|_| true)?;
        }
        self.wait_whole(&everyone)
    }

    fn join(&mut self, signing: Part) -> Result<()> {
        let file = self.town.token(signing, NEWCOMER)?;
        let mut line = self.town.up_line(NEWCOMER);
        for number in 0..2 {
            let path = self.town.key.with_file_name(format!("{NEWCOMER}-disk{number}"));
            let disk = std::fs::File::create(&path).and_then(|disk| disk.set_len(self.options.device_mib << 20));
            disk.with_context(|| format!("cannot make {}", path.display()))?;
            line.extend(["--device".to_string(), path.display().to_string()]);
        }
        line.extend(["--join-file".to_string(), file]);
        self.town.holdfast(NEWCOMER, &line).map(drop)
    }

    /// Volumes that two hosts offered are offered by two again, and guests are where theirs are.
    fn offer(&mut self, there: &[Part]) -> Result<()> {
        let mut homes = Vec::new();
        for (volume, offer) in VOLUMES {
            if let Offer::Twice(..) = offer {
                let key = if volume.is_encrypted {
                    format!(" --key-file {}", self.town.key.display())
                } else {
                    String::new()
                };
                self.town.give(NEWCOMER, &format!("volume export {} --multipath{key}", volume.name))?;
            }
            homes.extend(self.homes(volume.name, offer, there)?);
        }
        self.control.set_homes(homes);
        Ok(())
    }

    /// Where a volume's guests are to be: at the host that serves it, and where another forwards to it, at that.
    fn homes(&mut self, name: &str, offer: Offer, there: &[Part]) -> Result<[Part; 2]> {
        let shown = self.town.machine(there[0]).json(&["volume", "show", name])?;
        let owner = shown["host"].as_str().and_then(Part::parse);
        let owner = owner.with_context(|| format!("volume {name} is in service nowhere: {shown}"))?;
        let forwarding = match offer {
            Offer::Twice(..) if owner == NEWCOMER => offer.homes().into_iter().find(|part| *part != Part::A),
            Offer::Twice(..) => Some(NEWCOMER),
            Offer::Auto(_) | Offer::Once(_) => None,
        };
        Ok([owner, forwarding.unwrap_or(owner)])
    }

    /// What is to be the same again when the metadata are back.
    fn records(&mut self) -> Result<Vec<Value>> {
        let mut records = Vec::new();
        for (volume, _) in VOLUMES {
            let shown = self.town.machine(Part::B).json(&["volume", "show", volume.name])?;
            let kept = ["id", "size_bytes", "layout", "encrypted", "exported", "protected", "failover"];
            records.push(kept.map(|key| shown[key].clone()).into_iter().collect());
            let snapshots = self.town.machine(Part::B).json(&["snapshot", "list", volume.name])?;
            records.extend(snapshots.as_array().into_iter().flatten().map(|snapshot| snapshot["name"].clone()));
        }
        Ok(records)
    }

    /// All members lose what they hold, and begin anew at the same addresses.
    fn empty(&mut self, signing: Part) -> Result<()> {
        self.town.give(Part::B, "snapshot create mirror2 before")?;
        self.town.give(Part::B, "volume protect mirror2 on")?;
        // What is there a while before is in the copies that devices have.
        self.rest_for(COPIES_LAG)?;
        // Of this no copy tells, but nodes hold it.
        self.town.give(Part::C, "volume create late --size 16MiB --layout mirror:2")?;
        self.before = self.records()?;
        let there = [Part::B, Part::C, NEWCOMER];
        for part in there {
            self.town.machine(part).kill_etcd()?;
            std::fs::remove_dir_all(self.town.machine(part).member_data()).context("a member had data")?;
        }
        self.town.see(signing, "status", &["metadata", "out of reach"])?;
        let members = there.map(member).join(" ");
        self.town.make_members(signing, &format!("grid etcd member {members} --new-cluster"))?;
        there.iter().try_for_each(|part| self.town.machine(*part).start_member())?;
        for part in there {
            self.town.see(part, "status", &["it was emptied"])?;
        }
        self.rest()?;
        self.wait_served(|_| true)
    }

    /// "All of it is lost, emptied or set back".
    fn recover(&mut self, signing: Part) -> Result<()> {
        let there = [Part::B, Part::C, NEWCOMER];
        self.control.set_patience(RECOVERY_MAX);
        self.town.give(signing, "node list")?;
        there.iter().try_for_each(|part| self.down(*part))?;
        let shown = self.town.give(signing, "meta recover --replace")?;
        say(&shown);
        self.town.give(signing, "meta recover --replace --yes")?;
        for part in there {
            self.town.give(part, "grid up")?;
        }
        self.wait_served(|_| true)?;
        let mut homes = Vec::new();
        for (volume, offer) in VOLUMES {
            homes.extend(self.homes(volume.name, offer, &there)?);
        }
        self.control.set_homes(homes);
        self.wait_whole(&there)?;
        self.control.set_patience(self.options.patience);
        for part in there {
            self.town.see(part, "status", &["all is well"])?;
        }
        let now = self.records()?;
        ensure!(now == self.before, "volumes were recovered as {now:?}, and had been {:?}", self.before);
        self.town.see(Part::C, "volume list", &["late"])?;
        self.changes(signing)
    }

    /// What takes metadata works: a volume is made and deleted, a token given.
    fn changes(&mut self, signing: Part) -> Result<()> {
        self.town.give(NEWCOMER, "volume create after --size 16MiB --layout mirror:2")?;
        self.town.give(Part::B, "volume delete after")?;
        self.town.give(signing, "grid token").map(drop)
    }

    /// Stops a machine's host as the page says, and where clients are connected as the refusal does.
    fn down(&mut self, part: Part) -> Result<()> {
        match self.town.give(part, "grid down --host") {
            Err(error) if format!("{error:#}").contains("grid down --host --force") => {
                self.town.give(part, "grid down --host --force").map(drop)
            }
            done => done.map(drop),
        }
    }

    /// Waits until guests of such volumes are answered, wherever.
    fn wait_served(&self, which: impl Fn(Offer) -> bool) -> Result<()> {
        let since = Instant::now();
        let guests: Vec<usize> = (0..2 * VOLUMES.len()).filter(|guest| which(VOLUMES[guest / 2].1)).collect();
        while let Some(guest) = guests.iter().find(|guest| !self.control.is_served(**guest, WELL)) {
            let name = VOLUMES[guest / 2].0.name;
            ensure!(since.elapsed() < WHOLE_MAX, "volume {name} is not served {WHOLE_MAX:?} later");
            self.check_going()?;
            std::thread::sleep(LOOK_PACE);
        }
        say(&format!("  served after {:.1} s", since.elapsed().as_secs_f64()));
        Ok(())
    }

    /// Waits until all is redundant, and every guest at home.
    fn wait_whole(&mut self, there: &[Part]) -> Result<()> {
        let since = Instant::now();
        let (mut asked_at, mut were_whole): (Option<Instant>, _) = (None, [false; VOLUMES.len()]);
        loop {
            let mut lacks = self.town.lacks(there, &mut were_whole);
            if lacks.is_none() {
                if asked_at.is_none_or(|at| at.elapsed() > ASK_AGAIN) {
                    self.control.go_home();
                    asked_at = Some(Instant::now());
                }
                if self.control.is_well(WELL) {
                    say(&format!("  whole after {:.1} s", since.elapsed().as_secs_f64()));
                    return Ok(());
                }
                lacks = Some(format!("guests are not well; their paths lead to {:?}", self.control.at()));
            }
            if let Some(what) = lacks.filter(|_| since.elapsed() > WHOLE_MAX) {
                bail!("not whole {WHOLE_MAX:?} later: {what}");
            }
            self.check_going()?;
            std::thread::sleep(LOOK_PACE);
        }
    }

    fn rest(&self) -> Result<()> {
        self.rest_for(self.options.lasts)
    }

    fn rest_for(&self, time: Duration) -> Result<()> {
        super::rest(time, || self.check_going())
    }

    fn check_going(&self) -> Result<()> {
        super::check_going(self.control, self.stopped)
    }
}

/// The longest wait of each volume's guests.
fn waits(seen: &Seen) -> String {
    let longest = seen.longest.chunks(2).map(|pair| pair.iter().max().copied().unwrap_or_default());
    let told =
        VOLUMES.iter().zip(longest).map(|((volume, _), wait)| format!("{} {:.2} s", volume.name, wait.as_secs_f64()));
    told.collect::<Vec<_>>().join(", ")
}

fn member(part: Part) -> String {
    format!("{part}={}", part.address())
}

fn urls(parts: &[Part]) -> String {
    parts.iter().map(|part| format!("https://{}:2379", part.address())).collect::<Vec<_>>().join(",")
}

/// Copies what lies in a directory, as an operator does with a member's.
fn copy_files(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to).with_context(|| format!("cannot make {}", to.display()))?;
    let entries = std::fs::read_dir(from).with_context(|| format!("cannot list {}", from.display()))?;
    for entry in entries {
        let entry = entry?;
        std::fs::copy(entry.path(), to.join(entry.file_name()))?;
    }
    Ok(())
}
