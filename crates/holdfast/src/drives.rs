//! What drives say of their own health: asked of `smartctl` (smartmontools), which knows them all.
//!
//! ```text
//! DIR/drives.json    by path, what the drives of this machine said last; written by `holdfast device health --save`
//! ```
//! Asking a drive takes privileges that a node has no other use for. So a node under systemd has none, and reads the file, which
//! a unit of its own keeps up to date (`holdfast grid units`). A node without such a file asks by itself, and is told or not.
//!
//! Limits: a thread for each block device, so that a drive that hangs when it is asked keeps nothing else waiting.

use crate::grid::layout::write_durably;
use crate::logger;
use anyhow::{Context, Result};
use holdfast_format::drive::{DriveReport, DriveTrouble};
use holdfast_runtime::mailbox::Sender;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Weak;
use std::time::{Duration, Instant};

/// Where it is, if not where `PATH` says: that of users often leaves out what is for administrators.
const PROGRAMS: [&str; 2] = ["smartctl", "/usr/sbin/smartctl"];

/// How often a drive is asked.
pub const ASK_EVERY: Duration = Duration::from_secs(600);

/// What was written down counts for so long.
const FRESH_MAX: Duration = Duration::from_secs(3 * 600);

/// How often a node looks whether there is something new.
const LOOK_EVERY: Duration = Duration::from_secs(10);

const FILE: &str = "drives.json";

/// What the drive behind the device in this place says; `None` where nothing is known of it.
pub type Heard = (usize, Option<DriveReport>);

#[derive(Debug, Default, Serialize, Deserialize)]
struct Saved {
    drives: BTreeMap<PathBuf, DriveReport>,
}

/// Whether there can be a drive behind it that says something.
pub fn is_asked(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|m| m.file_type().is_block_device())
}

/// Asks the drive behind a block device. Waits as long as the drive makes it wait.
///
/// # Errors
/// Why nothing is known of it, in words that end a sentence.
pub fn ask(path: &Path) -> Result<DriveReport, String> {
    for program in PROGRAMS {
        let output = Command::new(program).args(["--json", "--info", "--health", "--attributes"]).arg(path).output();
        match output {
            Ok(output) => return report_of(&output.stdout),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(format!("`{program}` can't be run: {error}")),
        }
    }
    Err("there is no `smartctl` (package smartmontools)".to_string())
}

/// Of what `smartctl --json --info --health --attributes` prints.
fn report_of(said: &[u8]) -> Result<DriveReport, String> {
    let said: Value =
        serde_json::from_slice(said).map_err(|error| format!("`smartctl` says what is no JSON ({error})"))?;
    let nvme = &said["nvme_smart_health_information_log"];
    let passed = said["smart_status"]["passed"].as_bool();
    if passed.is_none() && nvme.is_null() {
        let messages = said["smartctl"]["messages"].as_array().into_iter().flatten();
        let why: Vec<&str> = messages.filter_map(|message| message["string"].as_str()).collect();
        return Err(match why.is_empty() {
            true => "it does not say how it is".to_string(),
            false => why.join("; "),
        });
    }
    let raw = |id: u64| {
        let attributes = said["ata_smart_attributes"]["table"].as_array()?;
        attributes.iter().find(|a| a["id"] == id)?["raw"]["value"].as_u64()
    };
    /// Sectors that could not be read lately, and those that could not when the drive looked by itself.
    const PENDING: u64 = 197;
    const UNCORRECTABLE: u64 = 198;
    let sectors = raw(PENDING).into_iter().chain(raw(UNCORRECTABLE)).reduce(|a, b| a.saturating_add(b));
    let first = |places: &[&Value]| places.iter().find_map(|place| place.as_u64());
    let worn = first(&[
        &said["endurance_used"]["current_percent"],
        &nvme["percentage_used"],
        &said["scsi_percentage_used_endurance_indicator"],
    ]);
    let spare = first(&[&said["spare_available"]["current_percent"], &nvme["available_spare"]]);
    let percent = |value: u64| u8::try_from(value).unwrap_or(u8::MAX);
    Ok(DriveReport {
        troubles: troubles(passed, nvme["critical_warning"].as_u64()),
        worn_percent: worn.map(percent),
        spare_percent: spare.map(percent),
        celsius: said["temperature"]["current"].as_i64().and_then(|t| i16::try_from(t).ok()),
        media_errors: nvme["media_errors"].as_u64().or(sectors),
        hours: said["power_on_time"]["hours"].as_u64(),
    })
}

/// Of the drive's own verdict and, if it is NVMe, its critical warnings.
fn troubles(passed: Option<bool>, critical: Option<u64>) -> Vec<DriveTrouble> {
    /// By bit; the sixth tells of memory that nobody here uses.
    const WARNINGS: [DriveTrouble; 5] = [
        DriveTrouble::SpareLow,
        DriveTrouble::Temperature,
        DriveTrouble::Unreliable,
        DriveTrouble::ReadOnly,
        DriveTrouble::BackupFailed,
    ];
    match critical {
        Some(bits) if bits != 0 => {
            let named = WARNINGS.iter().enumerate().filter(|(bit, _)| bits >> bit & 1 == 1);
            named.map(|(_, trouble)| *trouble).collect()
        }
        _ if passed == Some(false) => vec![DriveTrouble::ExpectsFailure],
        _ => Vec::new(),
    }
}

/// Writes down what drives said, for nodes that may not ask.
pub fn save(dir: &Path, drives: BTreeMap<PathBuf, DriveReport>) -> Result<()> {
    let text = serde_json::to_vec_pretty(&Saved { drives }).context("reports always encode")?;
    write_durably(&dir.join(FILE), &text)
}

/// What was written down of the drive; `None` where nothing was lately.
fn saved(dir: &Path, path: &Path) -> Option<Result<DriveReport, String>> {
    let file = dir.join(FILE);
    // Dated ahead it is from when the clock was wrong, and counts no longer than one that is as old.
    let age = fs::metadata(&file).ok()?.modified().ok()?.elapsed().unwrap_or_else(|ahead| ahead.duration());
    if age > FRESH_MAX {
        return None;
    }
    let said: Result<Saved, String> =
        fs::read(&file).map_err(|e| e.to_string()).and_then(|b| serde_json::from_slice(&b).map_err(|e| e.to_string()));
    Some(match said {
        Ok(mut said) => said.drives.remove(path).ok_or_else(|| format!("{} does not name it", file.display())),
        Err(error) => Err(format!("{} can't be read: {error}", file.display())),
    })
}

/// Has a node told, from a thread of its own, what the drive behind its device in `place` says, now and then, as long as the node
/// has the device.
pub fn follow(
    dir: Option<PathBuf>,
    place: usize,
    path: PathBuf,
    tell: Sender<Heard>,
    while_here: Weak<()>,
) -> Result<()> {
    let look = move || {
        let mut heard: Option<Result<DriveReport, String>> = None;
        let mut asked_at: Option<Instant> = None;
        while while_here.strong_count() > 0 {
            let found = match dir.as_deref().and_then(|dir| saved(dir, &path)) {
                Some(found) => found,
                None if asked_at.is_none_or(|at| at.elapsed() >= ASK_EVERY) => {
                    asked_at = Some(Instant::now());
                    ask(&path)
                }
                None => {
                    std::thread::sleep(LOOK_EVERY);
                    continue;
                }
            };
            note(&path, heard.as_ref(), &found);
            if heard.as_ref() != Some(&found) {
                // A full mailbox: it is told at the next change.
                let _ = tell.post((place, found.clone().ok()));
            }
            heard = Some(found);
            std::thread::sleep(LOOK_EVERY);
        }
    };
    std::thread::Builder::new().name("drive".to_string()).spawn(look).context("no thread for what drives say")?;
    Ok(())
}

fn note(path: &Path, before: Option<&Result<DriveReport, String>>, now: &Result<DriveReport, String>) {
    let troubles = |heard: &Result<DriveReport, String>| heard.as_ref().map(|r| r.troubles.clone()).ok();
    match now {
        Ok(report) if report.troubles.is_empty() && before.and_then(troubles).is_none_or(|t| t.is_empty()) => {}
        Ok(_) if before.map(troubles) == Some(troubles(now)) => {}
        Ok(report) if report.is_failing() => {
            logger::error(format_args!("the drive of {} {report}; replace it", path.display()));
        }
        Ok(report) => logger::warn(format_args!("the drive of {} {report}", path.display())),
        Err(why) if before == Some(now) => {}
        Err(why) => logger::info(format_args!("nothing is known of the health of {}'s drive: {why}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What smartctl 7.3 said of drives that QEMU 7.2 emulates; one NVMe drive after `smart_critical_warning` was set to 4.
    fn captured(name: &str) -> Result<DriveReport, String> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/drives").join(name);
        report_of(&fs::read(path).unwrap())
    }

    #[test]
    fn reports_are_read_as_smartctl_gives_them() {
        let nvme = captured("nvme-well.json").unwrap();
        let well = DriveReport {
            worn_percent: Some(0),
            spare_percent: Some(0),
            celsius: Some(50),
            media_errors: Some(0),
            hours: Some(0),
            ..DriveReport::default()
        };
        assert_eq!(nvme, well);
        let unreliable = captured("nvme-unreliable.json").unwrap();
        assert_eq!(unreliable, DriveReport { troubles: vec![DriveTrouble::Unreliable], ..well });
        assert!(unreliable.is_failing() && unreliable.to_string() == "has become unreliable");
        let ata = captured("ata-well.json").unwrap();
        assert_eq!(ata, DriveReport { celsius: Some(31), hours: Some(1), ..DriveReport::default() });
        assert_eq!(captured("virtio.json").unwrap_err(), "/dev/vda: Unable to detect device type");
        assert!(report_of(b"Segmentation fault").unwrap_err().contains("no JSON"));
    }

    #[test]
    fn troubles_are_named_and_a_hot_drive_is_not_thrown_away() {
        assert_eq!(troubles(Some(true), Some(0)), []);
        assert_eq!(troubles(Some(false), None), [DriveTrouble::ExpectsFailure]);
        assert_eq!(troubles(Some(false), Some(1 << 5)), [], "nobody uses that memory");
        assert_eq!(
            troubles(Some(false), Some(0b1_1001)),
            [DriveTrouble::SpareLow, DriveTrouble::ReadOnly, DriveTrouble::BackupFailed]
        );
        let hot = DriveReport { troubles: troubles(Some(false), Some(2)), ..DriveReport::default() };
        assert!(!hot.is_failing() && hot.to_string() == "is too hot or too cold");
    }

    #[test]
    fn sectors_that_ata_drives_gave_up_are_errors_of_their_media() {
        let said = |table: &str| {
            format!(r#"{{"smart_status":{{"passed":false}},"ata_smart_attributes":{{"table":[{table}]}}}}"#)
        };
        let report =
            report_of(said(r#"{"id":197,"raw":{"value":8}},{"id":198,"raw":{"value":1}}"#).as_bytes()).unwrap();
        assert_eq!((report.media_errors, report.is_failing()), (Some(9), true));
        assert_eq!(report_of(said("").as_bytes()).unwrap().media_errors, None);
    }

    #[test]
    fn what_was_written_down_counts_while_it_is_fresh() {
        let dir = tempfile::tempdir().unwrap();
        let path = Path::new("/dev/sda");
        assert!(saved(dir.path(), path).is_none());
        let report = DriveReport { hours: Some(5), ..DriveReport::default() };
        save(dir.path(), BTreeMap::from([(path.to_path_buf(), report.clone())])).unwrap();
        assert_eq!(saved(dir.path(), path), Some(Ok(report)));
        assert!(saved(dir.path(), Path::new("/dev/sdb")).unwrap().is_err());
        let file = fs::File::options().write(true).open(dir.path().join(FILE)).unwrap();
        file.set_modified(std::time::SystemTime::now() - 2 * FRESH_MAX).unwrap();
        assert!(saved(dir.path(), path).is_none());
        file.set_modified(std::time::SystemTime::now() + 2 * FRESH_MAX).unwrap();
        assert!(saved(dir.path(), path).is_none(), "written by a clock that was ahead");
        fs::write(dir.path().join(FILE), "half of it").unwrap();
        assert!(saved(dir.path(), path).unwrap().unwrap_err().contains("can't be read"));
    }
}
