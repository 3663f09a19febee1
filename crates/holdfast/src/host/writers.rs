//! Who may write to a volume: the shell around [`Writers`], and who a client is.
//!
//! Role: what is to change a volume, or a clone in it, waits here until its client may write, before it gets a place among
//! what is under way. Sessions come and go by a queue that is worked off in order, so that one is known before it asks.

use super::Host;
use super::catalog::Entry;
use super::commands::Command;
use super::control::ControlPlane;
use super::volumes::{Asker, Volume, Who};
use crate::logger;
use anyhow::Result;
use holdfast_base::{BlockError, BlockOp, BlockRequest, Effects, HeadId, Instant, Token, VolumeId};
use holdfast_format::portal::Client;
use holdfast_portal::{DeskEvent, SessionId, WriterEffect, WriterEvent, Writers};
use holdfast_runtime::reactor::Io;
use holdfast_volume::Target;
use std::collections::BTreeSet;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

/// How long a client that was refused is told of.
pub const REFUSED_SHOWN: Duration = Duration::from_secs(600);

/// A change that waits until its client may write.
pub struct HeldChange {
    session: SessionId,
    target: Target,
    asker: Asker,
    op: BlockOp,
}

/// The machine that the host runs on.
pub struct Machine {
    /// Names this start of it.
    start: Option<u128>,
    address: Option<IpAddr>,
}

impl Machine {
    pub fn own(address: Option<IpAddr>) -> Machine {
        let start = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok();
        let start = start.and_then(|id| uuid::Uuid::parse_str(id.trim()).ok()).map(|id| id.as_u128());
        Machine { start, address }
    }

    /// Who a client is, before it has shown a certificate: by a unix socket its process, by TCP its address.
    pub fn client(&self, peer: &str, address: Option<SocketAddr>, process: Option<u32>) -> Client {
        let ip = address.map(|address| address.ip().to_canonical());
        let own = [Some(Ipv4Addr::LOCALHOST.into()), Some(Ipv6Addr::LOCALHOST.into()), self.address];
        let is_own = ip.is_none() || own.contains(&ip);
        Client {
            label: peer.to_string(),
            name: None,
            machine: self.start.filter(|_| is_own),
            address: if is_own { self.address } else { ip },
            process: process.map(program_of),
        }
    }
}

/// Of a program that has divided itself (`fork`) and connects from each part, the first: its parts are one client. Another program
/// that it starts is another client, and so is what is not to be seen.
fn program_of(process: u32) -> u32 {
    let mut first = process;
    let Some(Process { mut parent, image }) = Process::look(process) else { return process };
    while let Some(above) = Process::look(parent).filter(|above| image.is_some() && above.image == image) {
        (first, parent) = (parent, above.parent);
    }
    first
}

struct Process {
    parent: u32,
    /// Where its stack and arguments begin: a part of a program has them from the whole, and a program that is started gets others.
    image: Option<[u64; 3]>,
}

impl Process {
    /// Of all that there is in `/proc`, `stat` alone waits for nothing, whatever the process does.
    fn look(process: u32) -> Option<Process> {
        let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        // Behind the name, which may have anything in it, comes the third field.
        let fields: Vec<&str> = stat[stat.rfind(')')? + 1..].split_whitespace().collect();
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        let image = [field(28)?, field(48)?, field(49)?];
        Some(Process {
            parent: u32::try_from(field(4)?).ok()?,
            image: Some(image).filter(|of| of.iter().all(|at| *at > 0)),
        })
    }
}

impl Volume {
    fn writers_of(&mut self, head: HeadId) -> &mut Writers {
        let shared = self.shared;
        self.writers.entry(head).or_insert_with(|| {
            let mut writers = Writers::default();
            writers.handle(Instant::ZERO, WriterEvent::Share(shared), &mut Effects::new());
            writers
        })
    }

    fn take_held(&mut self, is_it: impl Fn(&HeldChange) -> bool) -> Vec<HeldChange> {
        let found: Vec<Token> = self.held.iter().filter(|(_, held)| is_it(held)).map(|(token, _)| token).collect();
        found.into_iter().filter_map(|token| self.held.remove(token)).collect()
    }
}

impl Host {
    /// A session may ask from here on. Of snapshots nobody changes anything.
    pub(super) fn open_writer(
        &mut self,
        (at, target): (Token, Target),
        session: SessionId,
        client: Client,
        (wrote_at, is_fenced): (Option<Instant>, bool),
    ) {
        if let Target::Head(head) = target {
            self.writer_events.push_back((at, head, WriterEvent::Open { session, client, wrote_at, is_fenced }));
        }
    }

    pub(super) fn close_writer(&mut self, (at, target): (Token, Target), session: SessionId) {
        if let Target::Head(head) = target {
            self.writer_events.push_back((at, head, WriterEvent::Close { session }));
        }
    }

    /// A request of a session comes to its volume.
    pub(super) fn enter(
        &mut self,
        now: Instant,
        (at, target): (Token, Target),
        session: SessionId,
        (mut asker, op): (Asker, BlockOp),
        io: &mut Io,
    ) {
        let Some(volume) = self.volumes.table.get_mut(at) else { return };
        let Target::Head(head) = target else { return self.ask_volume(now, (at, target), (asker, op), io) };
        if !op.changes() {
            return self.ask_volume(now, (at, target), (asker, op), io);
        }
        if volume.held.is_full() {
            return self.answer(now, at, asker, Err(BlockError::Unavailable), io);
        }
        asker.changes = Some(head);
        let request = volume.held.insert(HeldChange { session, target, asker, op });
        self.writer_events.push_back((at, head, WriterEvent::Write { session, request }));
    }

    fn ask_volume(&mut self, now: Instant, (at, target): (Token, Target), (asker, op): (Asker, BlockOp), io: &mut Io) {
        let Some(volume) = self.volumes.table.get_mut(at) else { return };
        match volume.ask(asker) {
            Ok(token) => self.pass(now, at, target, BlockRequest { token, op }, io),
            Err(asker) => {
                if let Some(head) = asker.changes {
                    self.writer_events.push_back((at, head, WriterEvent::Done));
                }
                self.answer(now, at, asker, Err(BlockError::Unavailable), io);
            }
        }
    }

    /// A change that was passed is answered.
    pub(super) fn on_change_answered(&mut self, now: Instant, (at, head): (Token, HeadId), who: Who, is_done: bool) {
        if let Who::Client(session) = who
            && is_done
            && let Some(client) = self.clients.get_mut(session)
        {
            client.wrote_at = Some(now);
            self.portals.note_written(session, now);
        }
        self.writer_events.push_back((at, head, WriterEvent::Done));
    }

    pub(super) fn drive_writers(&mut self, now: Instant, at: Token, head: HeadId, event: WriterEvent, io: &mut Io) {
        let Some(volume) = self.volumes.table.get_mut(at) else { return };
        // What a session that has gone had waiting may be asked again elsewhere.
        let left = match &event {
            WriterEvent::Close { session } => volume.take_held(|held| held.session == *session),
            _ => Vec::new(),
        };
        let mut out = Effects::new();
        volume.writers_of(head).handle(now, event, &mut out);
        volume.deadline = volume.next_deadline();
        for held in left {
            self.answer(now, at, held.asker, Err(BlockError::Deposed), io);
        }
        for effect in out.take() {
            self.on_writer_effect(now, (at, head), effect, io);
        }
    }

    fn on_writer_effect(&mut self, now: Instant, (at, head): (Token, HeadId), effect: WriterEffect, io: &mut Io) {
        let Some(volume) = self.volumes.table.get_mut(at) else { return };
        match effect {
            WriterEffect::Pass { request } => {
                let Some(HeldChange { target, asker, op, .. }) = volume.held.remove(request) else { return };
                self.ask_volume(now, (at, target), (asker, op), io);
            }
            WriterEffect::Refuse { request } => {
                if let Some(held) = volume.held.remove(request) {
                    self.answer(now, at, held.asker, Err(BlockError::NotWriter), io);
                }
            }
            WriterEffect::Fenced { session: SessionId::Own(session) } => self.portals.note_fenced(session),
            WriterEffect::Fenced { session: SessionId::Guest(guest) } => {
                self.portals.desk_events.push_back(DeskEvent::Fenced { guest });
            }
            WriterEffect::Passed { from, to } => {
                let name = volume.name_of(head);
                logger::info(format_args!(
                    "volume {name}: {to} writes from here on; {from}, which did, has ended or is quiet, and can write again when it \
                     connects anew"
                ));
            }
            WriterEffect::Refused { client, holder } => {
                let name = volume.name_of(head);
                logger::warn(format_args!(
                    "volume {name}: {client} may not write, since {holder} does, and a volume has one writer at a time. End the one \
                     that should not; where both are meant to write, as in a cluster's file system, `holdfast volume export {} \
                     --shared` lets them",
                    volume.name
                ));
            }
        }
    }

    pub(super) fn tick_writers(&mut self, now: Instant, at: Token, io: &mut Io) {
        let Some(volume) = self.volumes.table.get(at) else { return };
        let is_due = |writers: &Writers| writers.next_deadline().is_some_and(|deadline| deadline <= now);
        let due: Vec<HeadId> = volume.writers.iter().filter(|(_, of)| is_due(of)).map(|(head, _)| *head).collect();
        for head in due {
            self.drive_writers(now, at, head, WriterEvent::Tick, io);
        }
    }

    /// The controller is gone: what waited may be asked of the next.
    pub(super) fn give_up_held(&mut self, now: Instant, at: Token, io: &mut Io) {
        let Some(volume) = self.volumes.table.get_mut(at) else { return };
        volume.writers.clear();
        for held in volume.take_held(|_| true) {
            self.answer(now, at, held.asker, Err(BlockError::Deposed), io);
        }
        self.writer_events.retain(|(of, ..)| *of != at);
    }

    /// Everybody may write to these.
    pub(super) fn set_shared(&mut self, shared: BTreeSet<VolumeId>) {
        self.volumes.shared = shared;
        for at in self.volumes.tokens() {
            let volume = self.volumes.table.get_mut(at).expect("listed");
            let is_shared = self.volumes.shared.contains(&volume.id);
            if std::mem::replace(&mut volume.shared, is_shared) != is_shared {
                let heads = volume.writers.keys().map(|head| (at, *head, WriterEvent::Share(is_shared)));
                self.writer_events.extend(heads);
            }
        }
    }
}

impl ControlPlane {
    /// Has the reactor know which volumes several clients may write to.
    pub(super) fn take_in_shared(&self) -> Result<()> {
        let volumes: BTreeSet<VolumeId> = self
            .records
            .view(|view| view.exports().filter(|(_, export)| export.shared).map(|(volume, _)| volume).collect());
        let mut told = self.shared_told();
        if told.as_ref() != Some(&volumes) {
            let next = volumes.clone();
            self.ask(|answer| Command::Shared { volumes, answer })?;
            *told = Some(next);
        }
        Ok(())
    }

    /// Whether several clients may write to a volume in service at a time.
    pub(super) fn set_shared(&self, entry: &Entry, shared: bool) -> Result<()> {
        self.catalog.change_export(entry.root.volume, |export| export.shared = shared)?;
        self.take_in_shared()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn another_program_is_another_client() {
        let own = std::process::id();
        let mut child = Command::new("sleep").arg("60").stdin(Stdio::null()).spawn().unwrap();
        assert_eq!(Process::look(child.id()).map(|child| child.parent), Some(own));
        assert_eq!(program_of(child.id()), child.id());
        // A shell that divides itself for what is in brackets.
        let mut shell =
            Command::new("sh").args(["-c", "(read line; true); true"]).stdin(Stdio::piped()).spawn().unwrap();
        let part = || {
            let of = |pid: &u32| Process::look(*pid).is_some_and(|part| part.parent == shell.id());
            let all = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
            all.into_iter().find(of)
        };
        let end = std::time::Instant::now() + Duration::from_secs(60);
        let part = loop {
            if let Some(part) = part() {
                break part;
            }
            assert!(std::time::Instant::now() < end, "the shell does not divide itself");
        };
        assert_eq!(program_of(part), shell.id());
        drop(shell.stdin.take());
        shell.wait().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_clients_paths_have_in_common_what_they_show() {
        let at = |address: &str| Some(address.parse::<SocketAddr>().unwrap());
        let address = Some("10.0.0.1".parse().unwrap());
        // No such processes.
        let (seven, eight) = (Some(u32::MAX - 7), Some(u32::MAX - 8));
        let (a, b) = (Machine { start: Some(1), address }, Machine { start: Some(2), address: None });
        let unix = a.client("unix, process 7", None, seven);
        assert!(unix.is(&a.client("x", at("127.0.0.1:5"), None)), "by TCP on the machine itself");
        assert!(unix.is(&a.client("x", at("10.0.0.1:5"), None)) && unix.is(&b.client("x", at("10.0.0.1:9"), None)));
        assert!(unix.is(&b.client("x", at("[::ffff:10.0.0.1]:9"), None)), "at another machine's host");
        for other in [
            a.client("unix, process 8", None, eight),
            a.client("x", at("10.0.0.2:5"), None),
            b.client("unix, process 7", None, seven),
            b.client("x", at("127.0.0.1:5"), None),
        ] {
            assert!(!unix.is(&other), "{other:?}");
        }
        let named = |machine: &Machine, from, name: &str| Client {
            name: Some(name.to_string()),
            ..machine.client("x", at(from), None)
        };
        assert!(named(&a, "10.0.0.7:1", "db").is(&named(&b, "10.0.1.7:1", "db")), "over two networks");
        assert!(!named(&a, "10.0.0.7:1", "db").is(&named(&a, "10.0.0.7:2", "web")));
    }
}
