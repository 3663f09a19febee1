//! qcow2, by `imago`.

use crate::{Disk, Error, Extent, Result};
use imago::file::File;
use imago::format::access::Mapping;
use imago::{DenyImplicitOpenGate, FormatAccess, FormatDriverBuilder, Storage, StorageOpenOptions};
use std::path::Path;

pub struct Qcow2(FormatAccess<File>);

impl Qcow2 {
    /// # Errors
    /// It stands on another image: that is not opened unasked.
    pub fn open(path: &Path) -> Result<Qcow2> {
        let file = File::open(StorageOpenOptions::new().filename(path))?;
        let image = imago::qcow2::Qcow2::<File>::builder(file).open(DenyImplicitOpenGate::default());
        let image = image.map_err(|why| {
            Error::Refused(format!(
                "the qcow2 can't be opened: {why}. Of one that stands on another image or is encrypted make one that \
                 does not: `qemu-img convert -O qcow2 IMAGE NEW.qcow2`"
            ))
        })?;
        Ok(Qcow2(FormatAccess::new(image)))
    }
}

impl Disk for Qcow2 {
    fn size_bytes(&self) -> u64 {
        self.0.size()
    }

    fn extent(&mut self, offset: u64) -> Result<Extent> {
        let (mapping, len) = self.0.get_mapping(offset, self.0.size() - offset)?;
        let is_data = !matches!(mapping, Mapping::Zero { .. } | Mapping::Eof { .. });
        match len {
            0 => Err(Error::damaged(format!("nothing is said of offset {offset}"))),
            len => Ok(Extent { len, is_data }),
        }
    }

    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<()> {
        Ok(self.0.read(into, offset)?)
    }
}
