//! Commands of the control plane to the reactor, and who waits for the answers.
//!
//! Role: each command carries the sending half of a one-shot channel. The reactor answers at once, or keeps the sender
//! in [`Waiters`] until what was asked has happened. It never blocks: a channel holds the one answer it gets. What shall
//! become of volumes is an [`Order`] to the host machine.

use super::Shell;
use super::nbd::Arrival;
use holdfast_api::{
    DeviceHealth, DeviceInfo, LinkState, LongTurn, Neighbour, NodeInfo, OutageInfo, Parts, ProcessorInfo, SlowInfo,
    VolumeInfo,
};
use holdfast_base::{DeviceId, Instant, NodeId, Slab, Token, VolumeId};
use holdfast_format::wire::{DeviceTrouble, Reply, Request};
use holdfast_host::homes::Share;
use holdfast_host::reservation::ReservedVolume;
use holdfast_host::views::{self, Published, SharingView};
use holdfast_host::{Event as HostEvent, Order, Outcome, PackingFigures, Sibling, Totals};
use holdfast_runtime::reactor::{Io, ListenError};
use holdfast_verdict::resources;
use holdfast_verdict::told;
use holdfast_volume::Claim;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc::SyncSender;
use std::time::Duration;

/// Calls to nodes that may be under way at a time.
const WAITERS_MAX: usize = 4096;

/// Ticket of orders that nobody waits for.
const NOBODY: u64 = 0;

/// Where the one answer goes.
pub enum Answer<T> {
    /// To who asked: the sending half of a channel of capacity one.
    Whole(SyncSender<T>),
    /// To where those of all reactors are put together.
    Part(Box<dyn Fn(T) + Send>),
}

impl<T> Answer<T> {
    /// Who asked may have given up waiting; then nobody is told.
    pub fn tell(&self, value: T) {
        match self {
            Answer::Whole(sender) => drop(sender.try_send(value)),
            Answer::Part(gather) => gather(value),
        }
    }
}

pub enum Command {
    /// What shall become of volumes.
    Order {
        order: Box<Order>,
        answer: Answer<Outcome>,
    },
    Status {
        answer: Answer<LiveStatus>,
    },
    Volume {
        name: String,
        answer: Answer<Option<VolumeInfo>>,
    },
    /// The parts of the volume, if it is open.
    Anatomy {
        name: String,
        answer: Answer<Option<Box<Parts>>>,
    },
    /// Where the time of its requests goes, if it is in service.
    Slow {
        name: String,
        answer: Answer<Option<Box<SlowInfo>>>,
    },
    /// How busy volumes and clones were of late.
    Loads {
        answer: Answer<Vec<Neighbour>>,
    },
    /// All requests of guests since the host was started, by how long they took.
    Totals {
        answer: Answer<Box<Totals>>,
    },
    /// Who is connected to a volume or clone, for people.
    Users {
        name: String,
        answer: Answer<Vec<String>>,
    },
    /// Volumes that are open and share segments with others.
    Sharing {
        /// What is told of a volume in this generation is known already.
        known: Published,
        answer: Answer<Vec<SharingView>>,
    },
    Cut {
        node: NodeId,
        cut: bool,
        answer: Answer<bool>,
    },
    /// By device that is being drained: shards and logs of volumes in service that are still there.
    LeftToDrain {
        answer: Answer<BTreeMap<DeviceId, u64>>,
    },
    /// What is set aside for fixed volumes.
    Reservations {
        answer: Answer<BTreeMap<VolumeId, ReservedVolume>>,
    },
    /// What volumes own and have not used yet, beside one.
    Claims {
        beside: Option<VolumeId>,
        answer: Answer<Vec<Claim>>,
    },
    /// What the reactor offers together with other hosts: see [`super::reactors::Reactors::offer`].
    Offers {
        share: Share,
        answer: Answer<()>,
    },
    /// Certificates were revoked: answered when their connections are ended.
    CutRevoked {
        answer: Answer<()>,
    },
    /// Clients of this host that use an offered volume.
    Through {
        volume: VolumeId,
        answer: Answer<usize>,
    },
    /// Where clients reach an export of this host.
    Uris {
        name: String,
        answer: Answer<Vec<String>>,
    },
    /// The grid has these nodes from here on.
    Nodes {
        nodes: Vec<(NodeId, SocketAddr)>,
        answer: Answer<()>,
    },
    /// This machine has this address now; gives where other hosts reach the reactor, if they may.
    Address {
        ip: IpAddr,
        answer: Answer<Result<Vec<SocketAddr>, ListenError>>,
    },
    /// A client that another reactor has handed over.
    Arrival(Box<Arrival>),
    /// What another reactor's host machine says to this one's.
    Sibling {
        from: usize,
        message: Sibling,
    },
    /// The process is about to end.
    Stop,
    /// Another reactor has ended.
    Ended,
    /// `None` where the node is out of reach, or the connection is lost on the way.
    Call {
        node: NodeId,
        request: Box<Request>,
        answer: Answer<Option<Reply>>,
    },
}

/// What a volume in service lacks, as hosts tell each other: see [`views::Weakness`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Weakness {
    pub volume: String,
    pub unknown: bool,
    pub segments: u64,
    pub entries: u64,
}

impl From<views::Weakness> for Weakness {
    fn from(views::Weakness { volume, unknown, segments, entries }: views::Weakness) -> Weakness {
        Weakness { volume, unknown, segments, entries }
    }
}

/// The part of `status` that the reactor knows.
pub struct LiveStatus {
    pub uptime: Duration,
    pub nodes: Vec<NodeInfo>,
    pub volumes: Vec<VolumeInfo>,
    pub longest_turn: Option<LongTurn>,
    /// Of what packs blocks.
    pub packing_cpu: Duration,
    pub packing: PackingFigures,
}

/// Calls of the control plane that are under way: to nodes, and orders to the host.
pub struct Waiters {
    calls: Slab<Answer<Option<Reply>>>,
    /// By ticket, until what was wanted has happened: some never hear, since their volume stays open and something else was
    /// wanted since.
    orders: BTreeMap<u64, Answer<Outcome>>,
    next_ticket: u64,
}

impl Default for Waiters {
    fn default() -> Waiters {
        Waiters { calls: Slab::new(WAITERS_MAX), orders: BTreeMap::new(), next_ticket: NOBODY + 1 }
    }
}

impl Waiters {
    pub fn on_node_answer(&mut self, ticket: u64, reply: Option<Reply>) {
        if let Some(answer) = self.calls.remove(Token(ticket)) {
            answer.tell(reply);
        }
    }

    pub fn on_done(&mut self, ticket: u64, outcome: Outcome) {
        if let Some(answer) = self.orders.remove(&ticket) {
            answer.tell(outcome);
        }
    }
}

impl Shell {
    /// The parts of a volume that is open; a clone's are those of the volume that it is in.
    fn parts_of(&self, name: &str) -> Option<Box<Parts>> {
        let (volume, _) = self.host.find(name)?;
        Some(Box::new(resources::parts(volume.controller().anatomy())))
    }

    pub(super) fn on_command(&mut self, now: Instant, command: Command, io: &mut Io) {
        match command {
            Command::Order { order, answer } => {
                let opens = match &*order {
                    Order::Open { spec, .. } | Order::Preload { spec } => Some(spec.volume),
                    _ => None,
                };
                self.give_order(now, *order, answer);
                if let Some(volume) = opens {
                    self.own.publish(volume, &self.host);
                    self.own.arrived(volume);
                }
            }
            Command::Arrival(arrival) => self.on_arrival(now, *arrival, io),
            Command::Sibling { from, message } => {
                self.host.handle(now, HostEvent::Sibling { reactor: from, message }, &mut self.effects);
            }
            Command::Stop => self.begin_stop(now, io),
            // It was woken to see.
            Command::Ended => {}
            Command::Status { answer } => answer.tell(self.live_status(now, io)),
            Command::Volume { name, answer } => answer.tell(self.volume_info(&name)),
            Command::Anatomy { name, answer } => answer.tell(self.parts_of(&name)),
            Command::Slow { name, answer } => answer.tell(self.slow_of(now, &name, io)),
            Command::Loads { answer } => answer.tell(told::loads(&self.host, now)),
            Command::Totals { answer } => answer.tell(Box::new(self.host.totals().clone())),
            Command::Users { name, answer } => answer.tell(self.host.users(&name)),
            Command::Sharing { known, answer } => answer.tell(self.host.sharing(&known)),
            Command::Reservations { answer } => answer.tell(self.host.reservations().clone()),
            // What fixed volumes own every reactor knows, and one says.
            Command::Claims { beside, answer } if self.own.is_front() => answer.tell(self.host.claims_beside(beside)),
            Command::Claims { beside, answer } => answer.tell(self.host.unplaced_beside(beside)),
            Command::LeftToDrain { answer } => answer.tell(self.host.left_to_drain()),
            Command::Nodes { nodes, answer } => {
                self.links.set_nodes(&nodes, now, io);
                let local = self.local_of(&nodes);
                self.tell_host(now, Order::LocalNodes(local));
                answer.tell(());
            }
            Command::Address { ip, answer } => answer.tell(self.take_address(ip, io)),
            Command::Offers { share, answer } => {
                self.take_offers(now, share, io);
                answer.tell(());
            }
            Command::CutRevoked { answer } => {
                self.cut_revoked(now, io);
                answer.tell(());
            }
            Command::Through { volume, answer } => answer.tell(self.host.forwarded_sessions(volume)),
            Command::Uris { name, answer } => answer.tell(self.uris(&name)),
            Command::Cut { node, cut, answer } => answer.tell(self.links.set_cut(now, node, cut, io)),
            Command::Call { node, request, answer } => self.call(node, &request, answer, io),
        }
    }

    pub(super) fn take_offers(&mut self, now: Instant, share: Share, io: &mut Io) {
        let numbers = self.peers.set_wanted(now, &share.hosts, io);
        let hosts = share.hosts.into_iter().map(|(name, _)| name).zip(numbers).collect();
        self.tell_host(now, Order::Offer { offers: share.offers, hosts, heard_at: share.heard_at });
    }

    fn give_order(&mut self, now: Instant, order: Order, answer: Answer<Outcome>) {
        let ticket = self.waiters.next_ticket;
        self.waiters.next_ticket += 1;
        self.waiters.orders.insert(ticket, answer);
        self.host.handle(now, HostEvent::Order { ticket, order }, &mut self.effects);
    }

    /// An order that nobody waits for.
    pub(super) fn tell_host(&mut self, now: Instant, order: Order) {
        self.host.handle(now, HostEvent::Order { ticket: NOBODY, order }, &mut self.effects);
    }

    fn call(&mut self, node: NodeId, request: &Request, answer: Answer<Option<Reply>>, io: &mut Io) {
        if self.waiters.calls.is_full() {
            return answer.tell(None);
        }
        let ticket = self.waiters.calls.insert(answer);
        if !self.links.call(node, ticket.0, request, io) {
            self.waiters.on_node_answer(ticket.0, None);
        }
    }

    fn slow_of(&self, now: Instant, name: &str, io: &Io) -> Option<Box<SlowInfo>> {
        let slow = told::slow_of(&self.host, now, name)?;
        let processor = io.processor_share().map(|share| ProcessorInfo {
            busy_per_mille: share.busy_per_mille,
            waited_per_mille: share.waited_per_mille,
        });
        Some(Box::new(SlowInfo { processor, ..slow }))
    }

    fn live_status(&self, now: Instant, io: &Io) -> LiveStatus {
        let (left, slow) = (self.host.left_to_drain(), self.host.slow_devices());
        let mut suspects: Vec<u32> = Vec::new();
        let volumes = self.volume_infos();
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
                wire: link.version,
                reactors: link.version.map(|_| link.reactors as u32),
                passed_on: (link.reactors > 1).then_some(link.passed_on),
                devices: link
                    .devices
                    .iter()
                    .map(|stat| {
                        let slow = slow.get(&stat.device).map(|(since, bypassed)| (now.since(*since), *bypassed));
                        let drive = link.drives.iter().find(|(device, _)| *device == stat.device);
                        let drive = drive.map(|(_, report)| report.clone());
                        let trouble = link.troubles.iter().find(|trouble| trouble.device == stat.device);
                        let left = left.get(&stat.device).copied();
                        with_trouble(DeviceInfo { drive, ..told::device_of(&self.host, stat, left, slow) }, trouble)
                    })
                    .collect(),
                machine: None,
                machine_gone: false,
                configured: Vec::new(),
            }
        });
        let longest_turn = io.longest_turn().map(|turn| LongTurn {
            took_us: turn.took.as_micros() as u64,
            ago_ms: now.since(turn.began_at).as_millis() as u64,
            event: turn.event.to_string(),
            cause: turn.cause.clone(),
        });
        let (uptime, packing_cpu) = (now.since(self.started), self.packers.cpu());
        let packing = self.host.packing(now);
        LiveStatus { uptime, nodes: nodes.collect(), volumes, longest_turn, packing_cpu, packing }
    }
}

fn with_trouble(info: DeviceInfo, trouble: Option<&DeviceTrouble>) -> DeviceInfo {
    let Some(trouble) = trouble else { return info };
    DeviceInfo {
        errors_within_s: trouble.last_error_ms.map(|ms| ms / 1000),
        retries: trouble.retries,
        outage: trouble.outage.as_ref().filter(|_| info.health == DeviceHealth::Failed).map(|outage| OutageInfo {
            seconds: outage.ms / 1000,
            why: outage.why.clone(),
            missing: outage.is_missing,
            tried: outage.is_tried,
        }),
        ..info
    }
}
