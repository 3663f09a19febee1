//! What the operator says of a device, noted in its superblocks.
//!
//! One copy after the other, each with the next sequence number: a crash leaves the old label or the new one.

use crate::api::{DiskError, FailReason};
use crate::io::{Client, Ctx, Io};
use crate::serving::Serving;
use holdfast_base::{Buf, MediaClass};
use holdfast_format::disk::Superblock;
use holdfast_format::wire::{Refusal, Reply};

/// A change of the superblock that is on its way to the media.
pub(crate) struct Label {
    pub client: Client,
    superblock: Superblock,
}

impl Serving {
    pub(crate) fn on_set_media(
        &mut self,
        ctx: &mut Ctx,
        client: Client,
        media: Option<MediaClass>,
    ) -> Result<(), Refusal> {
        if self.label.is_some() {
            return Err(Refusal::Busy);
        }
        let superblock = Superblock { media, sequence: self.superblock.sequence + 1, ..self.superblock };
        self.label = Some(Label { client, superblock });
        self.write_label(ctx, 1);
        Ok(())
    }

    fn write_label(&self, ctx: &mut Ctx, copy: u8) {
        let superblock = &self.label.as_ref().expect("a label under way").superblock;
        let offset = if copy == 0 { 0 } else { Superblock::second_offset(superblock.size_bytes) };
        ctx.write(offset, vec![Buf::copy_from(&superblock.encode())], true, Io::Label { copy });
    }

    pub(crate) fn on_label_written(
        &mut self,
        ctx: &mut Ctx,
        copy: u8,
        result: Result<Buf, DiskError>,
    ) -> Result<(), FailReason> {
        result.map_err(FailReason::TableWrite)?;
        if copy > 0 {
            self.write_label(ctx, copy - 1);
            return Ok(());
        }
        let Label { client, superblock } = self.label.take().expect("a label under way");
        self.superblock = superblock;
        ctx.reply(client, Reply::Done);
        Ok(())
    }
}
