//! Devices of the host's own machine that come and go: what `holdfast device` does, asked for by whoever has no shell there.

use super::control::ControlPlane;
use crate::grid::grow::{self, Source};
use anyhow::Result;
use holdfast_api::{Code, Response, refuse};
use std::path::PathBuf;

impl ControlPlane {
    pub(super) fn replace_device(&self, device: &str, path: Option<PathBuf>, force: bool) -> Result<Response> {
        let source = match path {
            Some(path) if path.is_absolute() => Source::Path { path, force },
            Some(path) => refuse!(Code::Invalid, "{} is not a whole path; it begins with /", path.display()),
            None => Source::File(None),
        };
        grow::replace_device(&self.dir, &device.to_string(), &source).map(|_| Response::Done)
    }

    pub(super) fn remove_device(&self, device: &str, force: bool) -> Result<Response> {
        let removed = grow::remove_devices(&self.dir, &[device.to_string()], force)?;
        Ok(Response::Leaving { waits: None, notes: removed.notes })
    }
}
