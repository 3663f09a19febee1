//! The list of revoked certificates in a machine's directory, beside the certificates: `DIR/tls/revoked`.
//!
//! The machine's host gets it from the metadata store, and puts it there when it is newer than the one that is. Nodes look
//! there alone, and so need no metadata store for it. Both look who has signed it.

use super::certs::{Certificates, now_s};
use super::layout::write_durably;
use crate::logger;
use anyhow::{Context, Result};
use holdfast_base::GridId;
use holdfast_runtime::Waker;
use holdfast_runtime::revoked::{Revoked, RevokedNow};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// Longest wait for the end of a second; a clock may be set back meanwhile.
const SECOND_MAX: Duration = Duration::from_secs(2);

/// Waits until a second is over in which certificates were revoked. Who knows of that dates others later
/// (`Authority::issue_s`); another machine that signs may not have heard of it yet.
pub fn outlast(second_s: u64) {
    let end = Instant::now() + SECOND_MAX;
    while now_s() <= second_s && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Pace of looking.
const PACE: Duration = Duration::from_secs(1);

/// Beside the authority's certificate.
pub fn path_beside(ca: &Path) -> PathBuf {
    ca.with_file_name("revoked")
}

fn read(ca: &Path) -> Result<Option<String>> {
    let path = path_beside(ca);
    match fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e).with_context(|| format!("cannot read {}", path.display())),
    }
}

/// The list beside an authority's certificate; without a file there is nothing on it.
pub fn load(ca: &Path, grid: GridId) -> Result<Revoked> {
    let Some(text) = read(ca)? else { return Ok(Revoked::none(grid)) };
    let authority = fs::read_to_string(ca).with_context(|| format!("cannot read {}", ca.display()))?;
    Revoked::verify(&text, grid, &authority).with_context(|| {
        let path = path_beside(ca);
        format!(
            "{} can't be used; restore it, or remove it and start this machine's host, which writes it anew",
            path.display()
        )
    })
}

/// The text of it.
pub fn text(certificates: &Certificates) -> Result<Option<String>> {
    read(&certificates.ca())
}

/// Puts a list there that was verified, for this machine's nodes and the next start.
pub fn keep(certificates: &Certificates, text: &str) -> Result<()> {
    write_durably(&path_beside(&certificates.ca()), text.as_bytes())
}

/// Looks there now and then, from a thread of its own, and wakes the reactor when there is a newer list.
pub fn follow(ca: PathBuf, grid: GridId, now: RevokedNow, wakers: Vec<Waker>) -> Result<()> {
    let path = path_beside(&ca);
    let stamp = move || -> Option<(SystemTime, u64)> {
        let found = fs::metadata(&path).ok()?;
        Some((found.modified().ok()?, found.len()))
    };
    let (mut seen, mut told) = (None, None);
    let look = move || {
        loop {
            std::thread::sleep(PACE);
            let found = stamp();
            if found == seen {
                continue;
            }
            match load(&ca, grid).inspect(|_| seen = found) {
                Ok(list) if now.replace(&list) => {
                    logger::info(format_args!(
                        "certificates are revoked: version {} of the list counts",
                        list.version()
                    ));
                    wakers.iter().for_each(Waker::wake);
                }
                Ok(_) => {}
                Err(error) => {
                    if told != found {
                        logger::error(format_args!(
                            "what was revoked before counts still, and nothing more: {error:#}"
                        ));
                    }
                    told = found;
                }
            }
        }
    };
    std::thread::Builder::new()
        .name("revoked".to_string())
        .spawn(look)
        .context("no thread for revoked certificates")?;
    Ok(())
}
