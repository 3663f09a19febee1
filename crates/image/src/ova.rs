//! OVA: a tar file of a description and disks (DMTF DSP0243, section 5.3). Its disks are VMDKs.

use crate::window::Window;
use crate::{Error, Result};
use std::fs::File;
use std::path::Path;

/// More entries than a machine's disks, its description and signatures are; beyond it nothing is looked for.
const ENTRIES_MAX: usize = 1000;

/// The disk of that name, or the only one.
pub fn disk(path: &Path, wanted: Option<&str>) -> Result<Window> {
    let mut archive = tar::Archive::new(File::open(path)?);
    let mut found: Vec<(String, u64, u64)> = Vec::new();
    for entry in archive.entries_with_seek()?.take(ENTRIES_MAX) {
        let entry = entry?;
        let name = entry.path()?.to_string_lossy().into_owned();
        if entry.header().entry_type().is_file() && name.to_lowercase().ends_with(".vmdk") {
            found.push((name, entry.raw_file_position(), entry.size()));
        }
    }
    let names = found.iter().map(|(name, ..)| name.as_str()).collect::<Vec<_>>().join(", ");
    let chosen = match (wanted, found.len()) {
        (_, 0) => return Err(Error::Refused("there is no disk (*.vmdk) in it; is it an OVA?".to_string())),
        (None, 1) => found.pop(),
        (None, _) => {
            return Err(Error::Refused(format!("it has several disks; choose one with --disk: {names}")));
        }
        (Some(wanted), _) => found.into_iter().find(|(name, ..)| name == wanted),
    };
    let Some((_, start, len)) = chosen else {
        return Err(Error::Refused(format!("it has no such disk; there are {names}")));
    };
    Ok(Window::part(File::open(path)?, start, len))
}
