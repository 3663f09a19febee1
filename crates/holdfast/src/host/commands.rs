//! What the control plane asks of the reactor, and who waits for the answers.
//!
//! Role: each command carries the sending half of a one-shot channel. The reactor answers at once, or keeps the sender
//! in [`Waiters`] until what was asked has happened. It never blocks: a channel holds the one answer it gets.

use super::Host;
use super::volumes::OpenSpec;
use crate::protocol::{DeviceInfo, LinkState, NodeInfo, VolumeInfo};
use holdfast_base::{Instant, NodeId, Slab, Token};
use holdfast_format::wire::{DeviceHealth, DeviceStat, Reply, Request};
use holdfast_runtime::reactor::Io;
use holdfast_volume::{Event as VolumeEvent, State};
use std::sync::mpsc::SyncSender;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Calls to nodes and changes of size that may be under way at a time.
const WAITERS_MAX: usize = 4096;

/// The sending half of a channel of capacity one.
pub type Answer<T> = SyncSender<T>;

pub enum Command {
    Status {
        answer: Answer<LiveStatus>,
    },
    Volume {
        name: String,
        answer: Answer<Option<VolumeInfo>>,
    },
    /// Puts a volume into service; harmless where it is already.
    Open {
        spec: OpenSpec,
        answer: Answer<()>,
    },
    /// Takes a volume out of service; answered when it is closed.
    Close {
        name: String,
        /// Disconnect clients rather than refuse.
        force: bool,
        /// Drop the controller as it is: the volume is being deleted.
        discard: bool,
        answer: Answer<CloseOutcome>,
    },
    /// Answered with the size that the volume then has.
    Resize {
        name: String,
        size_bytes: u64,
        answer: Answer<Option<u64>>,
    },
    /// Takes a snapshot of a volume in service, or drops one.
    Snapshot {
        volume: String,
        name: String,
        drop: bool,
        answer: Answer<SnapshotOutcome>,
    },
    Cut {
        node: NodeId,
        cut: bool,
        answer: Answer<bool>,
    },
    /// `None` where the node is out of reach, or the connection is lost on the way.
    Call {
        node: NodeId,
        request: Box<Request>,
        answer: Answer<Option<Reply>>,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CloseOutcome {
    Closed,
    /// It was not in service.
    NotOpen,
    /// So many clients are connected.
    InUse(usize),
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SnapshotOutcome {
    Done,
    /// The volume is not in service, or went out of it.
    NotOpen,
    /// So many clients read it.
    InUse(usize),
    Refused(&'static str),
}

/// The part of `status` that the reactor knows.
pub struct LiveStatus {
    pub uptime: Duration,
    pub nodes: Vec<NodeInfo>,
    pub volumes: Vec<VolumeInfo>,
}

pub struct Waiters {
    calls: Slab<Answer<Option<Reply>>>,
    resizes: Vec<(Token, u64, Answer<Option<u64>>)>,
    closes: Vec<(Token, Answer<CloseOutcome>)>,
    /// (volume, snapshot)
    snapshots: Vec<(Token, String, Answer<SnapshotOutcome>)>,
}

impl Default for Waiters {
    fn default() -> Waiters {
        Waiters { calls: Slab::new(WAITERS_MAX), resizes: Vec::new(), closes: Vec::new(), snapshots: Vec::new() }
    }
}

/// Who asked may have given up waiting; then nobody is told.
fn tell<T>(answer: &Answer<T>, value: T) {
    let _ = answer.try_send(value);
}

impl Waiters {
    pub fn on_node_answer(&mut self, ticket: u64, reply: Option<Reply>) {
        if let Some(answer) = self.calls.remove(Token(ticket)) {
            tell(&answer, reply);
        }
    }

    pub fn on_resized(&mut self, at: Token, size_bytes: u64) {
        for (_, _, answer) in self.resizes.extract_if(.., |(volume, size, _)| *volume == at && *size == size_bytes) {
            tell(&answer, Some(size_bytes));
        }
    }

    pub fn on_snapshot(&mut self, at: Token, name: &str, outcome: &SnapshotOutcome) {
        for (_, _, answer) in self.snapshots.extract_if(.., |(volume, of, _)| *volume == at && of == name) {
            tell(&answer, outcome.clone());
        }
    }

    /// The volume went out of service: whether the snapshots that were asked for are there, its next owner knows.
    pub fn on_snapshots_lost(&mut self, at: Token) {
        for (_, _, answer) in self.snapshots.extract_if(.., |(volume, _, _)| *volume == at) {
            tell(&answer, SnapshotOutcome::NotOpen);
        }
    }

    pub fn on_closed(&mut self, at: Token) {
        self.on_snapshots_lost(at);
        for (_, answer) in self.closes.extract_if(.., |(volume, _)| *volume == at) {
            tell(&answer, CloseOutcome::Closed);
        }
        self.resizes.retain(|(volume, _, answer)| {
            if *volume == at {
                tell(answer, None);
            }
            *volume != at
        });
    }
}

impl Host {
    pub(super) fn on_command(&mut self, now: Instant, command: Command, io: &mut Io) {
        match command {
            Command::Status { answer } => tell(&answer, self.live_status(now)),
            Command::Volume { name, answer } => {
                let volume = self.volumes.find_open(&name).and_then(|at| self.volumes.table.get(at));
                tell(&answer, volume.map(|v| v.info(|export| self.volumes.uris(export))));
            }
            Command::Open { spec, answer } => {
                self.open_if_closed(now, spec, io);
                tell(&answer, ());
            }
            Command::Close { name, force, discard, answer } => self.close(now, &name, (force, discard), answer, io),
            Command::Resize { name, size_bytes, answer } => self.resize(now, &name, size_bytes, answer, io),
            Command::Snapshot { volume, name, drop, answer } => self.snapshot(now, &volume, name, drop, answer, io),
            Command::Cut { node, cut, answer } => tell(&answer, self.links.set_cut(now, node, cut, io)),
            Command::Call { node, request, answer } => {
                if self.waiters.calls.is_full() {
                    return tell(&answer, None);
                }
                let ticket = self.waiters.calls.insert(answer);
                if !self.links.call(node, ticket.0, &request, io) {
                    self.waiters.on_node_answer(ticket.0, None);
                }
            }
        }
    }

    fn open_if_closed(&mut self, now: Instant, spec: OpenSpec, io: &mut Io) {
        if self.is_stopping() {
            return;
        }
        if let Some(at) = self.volumes.find_open(&spec.name) {
            let state = self.volumes.table.get(at).map(|v| v.controller.state());
            if !matches!(state, Some(State::Deposed | State::Closed)) {
                return;
            }
            self.on_volume_closed(at, io);
        }
        if !self.volumes.table.is_full() {
            self.open_volume(now, spec, io);
        }
    }

    fn close(
        &mut self,
        now: Instant,
        name: &str,
        (force, discard): (bool, bool),
        answer: Answer<CloseOutcome>,
        io: &mut Io,
    ) {
        let found = self.volumes.find_open(name).and_then(|at| Some((at, self.volumes.table.get(at)?)));
        let Some((at, volume)) = found else { return tell(&answer, CloseOutcome::NotOpen) };
        if volume.sessions > 0 && !force {
            return tell(&answer, CloseOutcome::InUse(volume.sessions));
        }
        let is_over = matches!(volume.controller.state(), State::Deposed | State::Closed);
        for session in self.clients.of_volume(at) {
            self.abort_client(session, io);
        }
        self.waiters.closes.push((at, answer));
        if discard || is_over {
            self.on_volume_closed(at, io);
        } else {
            self.drive(now, at, VolumeEvent::Close, io);
        }
    }

    fn resize(&mut self, now: Instant, name: &str, size_bytes: u64, answer: Answer<Option<u64>>, io: &mut Io) {
        let Some(at) = self.volumes.find_open(name) else { return tell(&answer, None) };
        if self.volumes.table.get(at).is_some_and(|v| v.size_bytes() == size_bytes) {
            return tell(&answer, Some(size_bytes));
        }
        self.waiters.resizes.push((at, size_bytes, answer));
        self.drive(now, at, VolumeEvent::Resize { size_bytes }, io);
    }

    fn snapshot(
        &mut self,
        now: Instant,
        volume: &str,
        name: String,
        drop: bool,
        answer: Answer<SnapshotOutcome>,
        io: &mut Io,
    ) {
        let found = self.volumes.find_open(volume).and_then(|at| Some((at, self.volumes.table.get(at)?)));
        let Some((at, open)) = found.filter(|(_, v)| v.controller.state() == State::Open) else {
            return tell(&answer, SnapshotOutcome::NotOpen);
        };
        let readers = open.snapshot_export(&name).map_or(0, |(layer, _)| self.clients.of_snapshot(at, layer));
        if drop && readers > 0 {
            return tell(&answer, SnapshotOutcome::InUse(readers));
        }
        self.waiters.snapshots.push((at, name.clone(), answer));
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let event = if drop {
            VolumeEvent::DropSnapshot { name }
        } else {
            VolumeEvent::Snapshot { name, created_ms: since_1970.as_millis() as u64 }
        };
        self.drive(now, at, event, io);
    }

    fn live_status(&self, now: Instant) -> LiveStatus {
        let mut suspects: Vec<u32> = Vec::new();
        let volumes = self.volumes.infos();
        for volume in &volumes {
            suspects.extend(volume.live.iter().flat_map(|l| &l.suspect_nodes));
        }
        let nodes = self.links.views().map(|link| {
            let state = match (link.up, link.polls_missed) {
                (false, _) => LinkState::Down,
                (true, 0 | 1) => LinkState::Up,
                (true, _) => LinkState::Silent,
            };
            NodeInfo {
                id: link.node.0,
                address: link.address.to_string(),
                link: state,
                suspect: suspects.contains(&link.node.0),
                cut: link.cut,
                silent_ms: now.since(link.last_heard).as_millis() as u64,
                trouble: link.trouble.filter(|_| !link.up).map(str::to_string),
                devices: link.devices.iter().map(device_info).collect(),
            }
        });
        LiveStatus { uptime: now.since(self.started), nodes: nodes.collect(), volumes }
    }
}

fn device_info(stat: &DeviceStat) -> DeviceInfo {
    let health = match stat.health {
        DeviceHealth::Opening => "opening",
        DeviceHealth::Serving => "serving",
        DeviceHealth::Failed => "failed",
    };
    DeviceInfo {
        device: stat.device.to_string(),
        health: health.to_string(),
        capacity_bytes: stat.capacity_bytes,
        free_bytes: stat.free_bytes,
        journal_bytes: stat.journal_bytes,
        journal_used_bytes: stat.journal_used_bytes,
        shards: stat.shard_count,
    }
}
