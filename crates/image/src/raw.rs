//! Raw images: bytes of a disk, one after the other, in a file or on a block device.

use crate::window::Window;
use crate::{Disk, Extent, Result};
use std::path::Path;

pub struct Raw(Window);

impl Raw {
    pub fn open(path: &Path) -> Result<Raw> {
        Window::whole(path).map(Raw)
    }
}

impl Disk for Raw {
    fn size_bytes(&self) -> u64 {
        self.0.len
    }

    fn extent(&mut self, offset: u64) -> Result<Extent> {
        let (len, is_data) = self.0.extent(offset)?;
        Ok(Extent { len, is_data })
    }

    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<()> {
        self.0.read(offset, into)
    }
}
