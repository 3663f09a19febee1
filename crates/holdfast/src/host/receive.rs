//! Snapshots as streams: what begins one, and volumes that take one in.
//!
//! A volume that takes in a stream is open, but not exported: one client, who knows a ticket, writes to it as the stream
//! says. At the end a snapshot is taken, which is a copy of the sender's. How far a stream has come is kept, so that it can
//! be gone on with after anything. What it may build on is found by the snapshot's id, never by its name.
//!
//! States of a volume: as it was -> takes in a stream <-> holds a part of one -> has the snapshot.

use super::catalog::{Settings, What, check_name};
use super::commands::Command;
use super::control::{ControlPlane, check_size};
use crate::nbd_client::Client;
use anyhow::{Context, Result, anyhow};
use holdfast_api::{Code, Error, Response, SnapshotInfo, VolumeInfo, VolumeState, refuse};
use holdfast_base::{ObjectId, VolumeId};
use holdfast_format::meta::{PartialStream, ReceivedRecord, SnapshotCopy};
use holdfast_format::stream::{BACKUP, Begin, IMAGE, STREAM_VERSION, SnapshotId};
use holdfast_format::tier::Tiers;
use holdfast_host::{CloseOutcome, Order, Wanted, receiving_export};
use holdfast_runtime::clock;
use std::time::{Duration, Instant};

/// How long a volume may take to open.
const OPEN_MAX: Duration = Duration::from_secs(30);

/// Bytes of a volume that are asked about at a time.
const ASKED_BYTES: u64 = 1 << 30;

fn token(partial: &PartialStream) -> String {
    let begin = &partial.begin;
    let from = begin.from.as_ref().map_or(String::new(), |(name, _)| format!("/from={name}"));
    format!("{}@{}{from}/at={}", begin.volume, begin.snapshot, partial.offset)
}

fn how_to_go_on(partial: &PartialStream, name: &str) -> String {
    let same = match partial.begin.volume.as_str() {
        IMAGE => Some(format!("`holdfast volume import IMAGE {name}`, of the same image")),
        BACKUP => Some(format!("`holdfast backup restore REPOSITORY BACKUP {name}`, of the same backup")),
        _ => None,
    };
    if let Some(same) = same {
        return format!("go on with {same}; `holdfast receive --abandon {name}` gives up what has come");
    }
    let token = token(partial);
    format!(
        "go on with `holdfast send --resume {token}` where it came from, into `holdfast receive {name}`; `holdfast receive \
         --abandon {name}` gives up what has come"
    )
}

/// Whether two streams are of the same snapshot, from the same one.
fn is_same(one: &Begin, other: &Begin) -> bool {
    let base = |begin: &Begin| begin.from.as_ref().map(|(_, id)| *id);
    one.id == other.id && base(one) == base(other)
}

impl ControlPlane {
    pub(super) fn send_begin(&self, volume: &str, snapshot: &str, from: Option<&str>, start: u64) -> Result<Begin> {
        let entry = self.catalog.find(volume)?;
        let info = self.show(volume)?;
        let snapshots = snapshots(&info)?;
        let received = self.catalog.received(entry.root.volume)?;
        let id = |name: &str| {
            let found = snapshots.iter().find(|s| s.name == name);
            let found = found.ok_or_else(|| {
                Error::new(Code::NotFound, format!("there is no {volume}@{name}; `holdfast snapshot list {volume}`"))
            });
            found.map(|snapshot| (snapshot, id_of(entry.root.volume, &received, snapshot)))
        };
        let (found, of) = id(snapshot)?;
        if start > found.size_bytes {
            refuse!(
                Code::Invalid,
                "{volume}@{snapshot} has {} bytes, and {start} lies behind its end",
                found.size_bytes
            );
        }
        let from = from.map(|name| id(name).map(|(_, id)| (name.to_string(), id))).transpose()?;
        if from.as_ref().is_some_and(|(_, id)| *id == of) {
            refuse!(Code::Invalid, "a stream from a snapshot to itself has nothing to tell; choose an earlier one");
        }
        Ok(Begin {
            version: STREAM_VERSION,
            volume: volume.to_string(),
            snapshot: snapshot.to_string(),
            id: of,
            from,
            size_bytes: found.size_bytes,
            layout: entry.root.layout,
            start,
        })
    }

    /// Gets a volume ready for a stream, and says under which export it is to be written.
    pub(super) fn receive_begin(&self, name: &str, begin: &Begin, layout: Option<&str>) -> Result<Response> {
        check_size(begin.size_bytes)?;
        check_name(&begin.snapshot)?;
        self.drop_orphan(name)?;
        let existing = self.catalog.all()?.into_iter().find(|entry| entry.name() == name);
        let volume = match &existing {
            Some(entry) if entry.clone.is_some() => {
                refuse!(Code::State, "{name} is a clone, a part of volume {}; receive into a volume", entry.root.name)
            }
            Some(entry) if entry.served_by.is_some() => refuse!(
                Code::State,
                "volume {name} is in service, and what clients see would change under them; `holdfast volume unexport \
                 {name}`, then again"
            ),
            Some(entry) => entry.root.volume,
            None => self.make_for(name, begin, layout)?,
        };
        let mut received = self.catalog.received(volume)?;
        let ticket = uuid::Uuid::new_v4().simple().to_string();
        self.open_for_stream(name, &ticket)?;
        let ready = self.check_stream(name, volume, begin, &mut received, &ticket);
        let ready = ready.and_then(|is_wanted| match is_wanted {
            true => self.fit_size(name, begin.size_bytes).map(|()| true),
            false => Ok(false),
        });
        if !matches!(ready, Ok(true)) {
            self.close_after_stream(name)?;
            return ready.map(|_| Response::Done);
        }
        Ok(Response::Receiving { export: receiving_export(name, &ticket), ticket })
    }

    fn make_for(&self, name: &str, begin: &Begin, layout: Option<&str>) -> Result<VolumeId> {
        if let Some((from, _)) = &begin.from {
            refuse!(
                Code::NotFound,
                "the stream builds on {0}@{from}, and there is no volume {name} that has it; receive the whole of it first: \
                 `holdfast send {0}@{from}`",
                begin.volume
            );
        }
        check_start(name, begin)?;
        let layout = self.check_layout(layout.unwrap_or(&begin.layout.to_string()))?;
        let what = What::guests(begin.size_bytes, layout, Tiers::default());
        let made = self.catalog.create(name, what, (Settings::default(), None), None, None)?;
        Ok(made.expect("nothing is set aside for it").root.volume)
    }

    fn open_for_stream(&self, name: &str, ticket: &str) -> Result<()> {
        let spec = self.keys.spec_of(&self.catalog.find(name)?)?;
        self.order(Order::Open { spec, exported: false })?;
        let patience = Instant::now() + OPEN_MAX;
        loop {
            let info = self.ask(|answer| Command::Volume { name: name.to_string(), answer })?;
            match info {
                Some(info) if info.state == VolumeState::InCare && info.live.is_some() => break,
                Some(info) if Instant::now() >= patience => {
                    let why = info.waits.unwrap_or_else(|| "it is still opening".to_string());
                    refuse!(Code::Unavailable, "volume {name} can't be opened: {why}; try again later");
                }
                None if Instant::now() >= patience => {
                    refuse!(Code::Changed, "volume {name} was closed meanwhile; try again")
                }
                _ => std::thread::sleep(Duration::from_millis(5)),
            }
        }
        let ticket = Some(ticket.to_string());
        match self.order(Order::Receive { name: name.to_string(), ticket })?.was() {
            true => Ok(()),
            false => refuse!(Code::Changed, "volume {name} was closed or exported meanwhile; try again"),
        }
    }

    /// Whether the stream is what comes next for the volume; then it is noted. It is not wanted where all of an image is
    /// there: who asks again was cut off behind its end.
    fn check_stream(
        &self,
        name: &str,
        volume: VolumeId,
        begin: &Begin,
        received: &mut ReceivedRecord,
        ticket: &str,
    ) -> Result<bool> {
        let info = self.show(name)?;
        let snapshots = snapshots(&info)?;
        received.copies.retain(|copy| snapshots.iter().any(|s| s.layer == copy.layer));
        let of_that_name = snapshots.iter().find(|s| s.name == begin.snapshot);
        match (&mut received.partial, of_that_name) {
            (Some(partial), _) if !is_same(&partial.begin, begin) => {
                refuse!(Code::State, "volume {name} holds a part of another stream; {}", how_to_go_on(partial, name));
            }
            (Some(partial), _) if begin.start > partial.offset => refuse!(
                Code::Invalid,
                "the stream begins at {}, and volume {name} has only what lies before {}; {}",
                begin.start,
                partial.offset,
                how_to_go_on(partial, name)
            ),
            (Some(partial), Some(_)) if !partial.is_ending => refuse!(
                Code::State,
                "volume {name} has a snapshot {} that is not of this stream; `holdfast receive --abandon {name}`, then delete it",
                begin.snapshot
            ),
            (Some(partial), None) if partial.offset > 0 && info.size_bytes != begin.size_bytes => refuse!(
                Code::State,
                "volume {name} has {} bytes and had {} when the stream came; `holdfast receive --abandon {name}`, then begin anew",
                info.size_bytes,
                begin.size_bytes
            ),
            (Some(_), Some(_)) => {
                self.finish_stream(volume, name, received)?;
                if begin.is_of_no_grid() {
                    return Ok(false);
                }
                refuse!(Code::Exists, "volume {name} has received {} already", begin.snapshot);
            }
            (Some(partial), None) => (partial.ticket, partial.is_ending) = (ticket.to_string(), false),
            (None, Some(found)) => {
                if begin.is_of_no_grid() && id_of(volume, received, found) == begin.id {
                    return Ok(false);
                }
                refuse!(
                    Code::Exists,
                    "volume {name} has a snapshot {} already; receive into another volume",
                    begin.snapshot
                )
            }
            (None, None) => {
                check_start(name, begin)?;
                self.check_base((name, volume), begin, received, &info, ticket)?;
                let begin = Begin { start: 0, ..begin.clone() };
                received.partial =
                    Some(PartialStream { begin, offset: 0, ticket: ticket.to_string(), is_ending: false });
            }
        }
        self.catalog.set_received(volume, Some(received))?;
        Ok(true)
    }

    /// The volume must be what the stream builds on, to the block.
    fn check_base(
        &self,
        (name, volume): (&str, VolumeId),
        begin: &Begin,
        received: &ReceivedRecord,
        info: &VolumeInfo,
        ticket: &str,
    ) -> Result<()> {
        let snapshots = snapshots(info)?;
        let Some((from, id)) = &begin.from else {
            if snapshots.is_empty() && self.is_unwritten(name, ticket, "base:allocation", 3)? {
                return Ok(());
            }
            refuse!(
                Code::Exists,
                "volume {name} is there, and a whole stream makes a new one; give another name, or delete it first"
            );
        };
        let Some(base) = snapshots.iter().find(|s| id_of(volume, received, s) == *id) else {
            refuse!(
                Code::NotFound,
                "the stream builds on {0}@{from}, and volume {name} has no copy of that; `holdfast snapshot list` on both \
                 grids shows what they have in common, or send the whole: `holdfast send {0}@{1}`",
                begin.volume,
                begin.snapshot
            );
        };
        // What was cut off of it is changed, too.
        let is_cut = info.size_bytes < base.size_bytes;
        if is_cut || !self.is_unwritten(name, ticket, &format!("holdfast:changed:{}", base.name), 0)? {
            refuse!(
                Code::State,
                "volume {name} was written to, or cut off, since its snapshot {0}, which the stream builds on; to give up what was \
                 written: `holdfast volume export {name}`, `holdfast snapshot rollback {name} {0}`, `holdfast volume \
                 unexport {name}`, then again",
                base.name
            );
        }
        Ok(())
    }

    /// Whether a metadata context says the same of the whole volume.
    fn is_unwritten(&self, name: &str, ticket: &str, context: &str, flags: u32) -> Result<bool> {
        let export = receiving_export(name, ticket);
        let client = Client::connect_for_status(&self.dir.nbd_socket(), &export, &[context]);
        let mut client = client.with_context(|| format!("cannot look into volume {name}"))?;
        let mut at = 0;
        while at < client.size_bytes() {
            let len = ASKED_BYTES.min(client.size_bytes() - at) as u32;
            let told = client.status(at, len).with_context(|| format!("cannot look into volume {name}"))?;
            if told[0].iter().any(|(_, said)| *said != flags) {
                return Ok(false);
            }
            at += told[0].iter().map(|(len, _)| len).sum::<u64>();
        }
        Ok(true)
    }

    fn fit_size(&self, name: &str, size_bytes: u64) -> Result<()> {
        if self.show(name)?.size_bytes == size_bytes {
            Ok(())
        } else {
            self.resize(name, size_bytes, (true, true)).map(drop)
        }
    }

    pub(super) fn receive_progress(&self, name: &str, ticket: &str, offset: u64) -> Result<()> {
        let volume = self.catalog.find(name)?.root.volume;
        let mut received = self.catalog.received(volume)?;
        partial_of(name, &mut received, ticket)?.offset = offset;
        self.catalog.set_received(volume, Some(&received))
    }

    pub(super) fn receive_end(&self, name: &str, ticket: &str, complete: bool) -> Result<()> {
        let volume = self.catalog.find(name)?.root.volume;
        let mut received = self.catalog.received(volume)?;
        let partial = partial_of(name, &mut received, ticket)?;
        if complete {
            let Begin { snapshot, size_bytes, .. } = partial.begin.clone();
            partial.is_ending = true;
            let info = self.show(name)?;
            if info.size_bytes != size_bytes || snapshots(&info)?.iter().any(|s| s.name == snapshot) {
                refuse!(
                    Code::Changed,
                    "volume {name} was changed meanwhile; `holdfast receive --abandon {name}`, then begin anew"
                );
            }
            self.catalog.set_received(volume, Some(&received))?;
            self.change(name, Wanted::Snapshot { name: snapshot, created_ms: clock::wall_ms() })?;
            self.finish_stream(volume, name, &mut received)?;
        }
        self.close_after_stream(name)
    }

    /// The snapshot is there: it is a copy from here on.
    fn finish_stream(&self, volume: VolumeId, name: &str, received: &mut ReceivedRecord) -> Result<()> {
        let info = self.show(name)?;
        if let Some(partial) = received.partial.take() {
            let made = snapshots(&info)?.iter().find(|s| s.name == partial.begin.snapshot);
            let made = made.with_context(|| format!("the snapshot of volume {name} was deleted meanwhile"))?;
            received.copies.push(SnapshotCopy { layer: made.layer, of: partial.begin.id });
        }
        self.catalog.set_received(volume, Some(received))
    }

    /// The volume becomes what it was before the stream.
    pub(super) fn receive_abandon(&self, name: &str) -> Result<()> {
        let volume = self.catalog.find(name)?.root.volume;
        let mut received = self.catalog.received(volume)?;
        let Some(partial) = &received.partial else {
            refuse!(Code::NotFound, "volume {name} holds no part of a stream; there is nothing to give up")
        };
        let Some((_, id)) = &partial.begin.from else {
            refuse!(Code::State, "volume {name} holds nothing but a part of a stream; `holdfast volume delete {name}`");
        };
        self.open_for_stream(name, &uuid::Uuid::new_v4().simple().to_string())?;
        let info = self.show(name)?;
        let base = snapshots(&info)?.iter().find(|s| id_of(volume, &received, s) == *id);
        let rolled_back = match base {
            Some(base) => self.roll_back(name, &base.name).map(drop),
            None => Err(anyhow!("volume {name} has lost the snapshot that the stream builds on; delete the volume")),
        };
        if rolled_back.is_ok() {
            received.partial = None;
            self.catalog.set_received(volume, Some(&received))?;
        }
        self.close_after_stream(name)?;
        rolled_back
    }

    /// Refuses what would change a volume under a stream.
    pub(super) fn check_no_stream(&self, name: &str) -> Result<()> {
        // One that is not there is missed by who looks for it.
        let Ok(entry) = self.catalog.find(name) else { return Ok(()) };
        match self.catalog.received(entry.root.volume)?.partial {
            Some(partial) => {
                refuse!(Code::State, "volume {name} holds a part of a stream; {}", how_to_go_on(&partial, name))
            }
            None => Ok(()),
        }
    }

    fn close_after_stream(&self, name: &str) -> Result<()> {
        self.order(Order::Receive { name: name.to_string(), ticket: None })?;
        match self.end_care(name)? {
            CloseOutcome::Closed | CloseOutcome::NotOpen | CloseOutcome::InUse(_) => Ok(()),
        }
    }

    pub(super) fn receive_state(&self, name: &str) -> Result<Option<String>> {
        let volume = self.catalog.find(name)?.root.volume;
        Ok(self.catalog.received(volume)?.partial.as_ref().map(token))
    }
}

/// A copy keeps the id of what it is a copy of.
fn id_of(volume: VolumeId, received: &ReceivedRecord, snapshot: &SnapshotInfo) -> SnapshotId {
    let copy = received.copies.iter().find(|copy| copy.layer == snapshot.layer);
    copy.map_or(SnapshotId { volume, layer: ObjectId(snapshot.layer) }, |copy| copy.of)
}

fn check_start(name: &str, begin: &Begin) -> Result<()> {
    if begin.start > 0 {
        refuse!(
            Code::Invalid,
            "the stream begins at {}, and volume {name} has nothing of what lies before; send it from its start: \
             `holdfast send {}@{}`",
            begin.start,
            begin.volume,
            begin.snapshot
        );
    }
    Ok(())
}

fn partial_of<'a>(name: &str, received: &'a mut ReceivedRecord, ticket: &str) -> Result<&'a mut PartialStream> {
    let ours = received.partial.as_mut().filter(|partial| partial.ticket == ticket);
    ours.with_context(|| format!("somebody else has begun to send to volume {name}, or it was deleted and made anew"))
}

fn snapshots(info: &VolumeInfo) -> Result<&[SnapshotInfo]> {
    match &info.live {
        Some(live) => Ok(&live.snapshots),
        None => refuse!(
            Code::State,
            "volume {0} is not in service; `holdfast volume export {0}`, then try again",
            info.name
        ),
    }
}
