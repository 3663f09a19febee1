//! A small owner of one replicated log: enough of the ledger protocol to judge nodes without a controller.
//!
//! Role: takes writes as values, appends each as one entry, answers when it is committed. Takes over by fence, recovery,
//! re-append and one swap (protocol rules 2 to 6); rolls to a new ledger when too few legs are left. It keeps everything
//! in memory, destages nothing, and trims when told.
//!
//! States: `Reading` -> `Claiming` -> `Fencing` -> `Creating` -> `Sealing` -> `Open`; `Open` -> `Creating` for a roll; from
//! anywhere -> `Deposed`.

use crate::ledger_recovery::Recovery;
use crate::world::Machine;
use holdfast_base::{
    BLOCK_BYTES, BlockData, BlockError, BlockOp, BlockReply, Buf, BufMut, Effects, Epoch, InstanceId, Instant,
    LedgerId, Lsn, MetaReply, MetaRequest, MetaVersion, NodeId, RequestToken, Urgency, VolumeId, block_crcs,
};
use holdfast_format::ledger::{AckRule, LedgerRef, Leg};
use holdfast_format::root::{Root, root_key};
use holdfast_format::wire::{DeviceHealth, DeviceStat, Refusal, Reply, Request};
use holdfast_volume::{Effect, Event, Lane};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

const PACE: Duration = Duration::from_millis(5);
/// An append outstanding for longer goes to the standby legs too.
const HEDGE: Duration = Duration::from_millis(15);
/// A ledger without enough usable legs for so long is rolled.
const ROLL_AFTER: Duration = Duration::from_millis(60);
/// A call outstanding for longer breaks the connection.
const SILENCE: Duration = Duration::from_millis(400);
/// Entries in flight.
const WINDOW: usize = 16;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ClientState {
    Reading,
    Claiming,
    Fencing,
    Creating,
    Sealing,
    Open,
    Deposed,
}

/// Settings of a [`LedgerClient`].
#[derive(Clone, Debug)]
pub struct ClientConfig {
    pub volume: VolumeId,
    pub instance: InstanceId,
    pub failures: u8,
    /// Counts a leg that does not know the ledger as one that lacks its entries: breaks rule 1, for the mutation check.
    pub trust_absent_legs: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Purpose {
    Append { ledger: LedgerId, leg: usize, lsn: Lsn },
    Create { ledger: LedgerId, leg: usize },
    Fence { leg: Leg },
    Read { ledger: LedgerId, leg: Leg },
    Stat { node: NodeId },
    Forget,
}

struct Call {
    node: NodeId,
    sent_at: Instant,
    purpose: Purpose,
}

struct Entry {
    token: Option<RequestToken>,
    value: u64,
    blocks: usize,
    acks: u8,
    sent: u8,
    since: Instant,
}

/// The swap that is wanted until its outcome is known (protocol rule 4).
struct Swap {
    root: Root,
    expect: MetaVersion,
    token: u64,
    next_try: Instant,
}

pub struct LedgerClient {
    config: ClientConfig,
    pub state: ClientState,
    now: Instant,
    nodes: BTreeMap<NodeId, Vec<DeviceStat>>,
    calls: BTreeMap<u64, Call>,
    next_call: u64,
    version: MetaVersion,
    root: Option<Root>,
    swap: Option<Swap>,
    recovery: Recovery,
    ledger: Option<LedgerRef>,
    created: u8,
    create_since: Instant,
    next_ledger: u32,
    failed_devices: BTreeSet<Leg>,
    /// Ledgers that no root names any more, or never did.
    forgotten: BTreeSet<(Leg, LedgerId)>,
    unusable_since: Option<Instant>,
    in_flight: BTreeMap<Lsn, Entry>,
    queue: VecDeque<(RequestToken, u64, usize)>,
    /// Last LSN committed (in order).
    pub committed: Lsn,
    pub trimmed: Lsn,
    /// Everything committed and not trimmed, by LSN.
    pub log: BTreeMap<Lsn, u64>,
    /// Commits to tell the judge of: LSN and value, each before its reply.
    pub news: Vec<(Lsn, u64)>,
    pub rolls: u32,
    replies: Vec<RequestToken>,
    tick_at: Instant,
}

/// The bytes of a value: every word of every block names it.
pub fn payload_of(value: u64, blocks: usize) -> Buf {
    let mut buf = BufMut::new(blocks * BLOCK_BYTES);
    for (i, word) in buf.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&(value.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ i as u64).to_le_bytes());
    }
    buf.freeze()
}

impl LedgerClient {
    pub fn new(config: ClientConfig) -> LedgerClient {
        LedgerClient {
            state: ClientState::Reading,
            now: Instant::ZERO,
            nodes: BTreeMap::new(),
            calls: BTreeMap::new(),
            next_call: 1,
            version: MetaVersion::ABSENT,
            root: None,
            swap: None,
            recovery: Recovery::new(config.trust_absent_legs),
            ledger: None,
            created: 0,
            create_since: Instant::ZERO,
            next_ledger: 0,
            failed_devices: BTreeSet::new(),
            forgotten: BTreeSet::new(),
            unusable_since: None,
            in_flight: BTreeMap::new(),
            queue: VecDeque::new(),
            committed: Lsn::ZERO,
            trimmed: Lsn::ZERO,
            log: BTreeMap::new(),
            news: Vec::new(),
            rolls: 0,
            replies: Vec::new(),
            tick_at: Instant::ZERO,
            config,
        }
    }

    /// Where it stands, for failure reports.
    pub fn describe(&self) -> String {
        let (flying, queued, calls) = (self.in_flight.len(), self.queue.len(), self.calls.len());
        let nodes: Vec<NodeId> = self.nodes.keys().copied().collect();
        let known = self.recovery.describe();
        format!("{:?}, {flying} in flight, {queued} queued, {calls} calls, nodes {nodes:?}{known}", self.state)
    }

    fn send(&mut self, node: NodeId, request: Request, payload: Vec<Buf>, purpose: Purpose, out: &mut Effects<Effect>) {
        let token = self.next_call;
        self.next_call += 1;
        self.calls.insert(token, Call { node, sent_at: self.now, purpose });
        out.push(Effect::Send { node, lane: Lane::Fast, token, request, urgency: Urgency::Normal, payload });
    }

    fn calling(&self, purpose: Purpose) -> bool {
        self.calls.values().any(|c| c.purpose == purpose)
    }

    fn usable(&self, leg: Leg) -> bool {
        !self.failed_devices.contains(&leg)
            && self.nodes.get(&leg.node).is_some_and(|devices| {
                devices.iter().any(|d| d.device == leg.device && d.health != DeviceHealth::Failed)
            })
    }

    pub fn epoch(&self) -> Epoch {
        self.root().epoch
    }

    fn root(&self) -> &Root {
        self.root.as_ref().expect("the root was read")
    }

    fn read_root(&mut self, out: &mut Effects<Effect>) {
        let token = self.next_call;
        self.next_call += 1;
        out.push(Effect::Meta { token, request: MetaRequest::Get { key: root_key(self.config.volume) } });
    }

    fn want_swap(&mut self, root: Root, out: &mut Effects<Effect>) {
        self.swap = Some(Swap { root, expect: self.version, token: 0, next_try: self.now });
        self.drive_swap(out);
    }

    fn drive_swap(&mut self, out: &mut Effects<Effect>) {
        let (now, key, token) = (self.now, root_key(self.config.volume), self.next_call);
        let Some(swap) = self.swap.as_mut().filter(|s| s.token == 0 && s.next_try <= now) else { return };
        self.next_call += 1;
        swap.token = token;
        let request = MetaRequest::Swap { key, expect: swap.expect, value: Some(swap.root.encode()), guard: None };
        out.push(Effect::Meta { token, request });
    }

    fn on_meta(&mut self, token: u64, reply: MetaReply, out: &mut Effects<Effect>) {
        if self.state == ClientState::Deposed {
            return;
        }
        match reply {
            MetaReply::Unknown if self.state == ClientState::Reading => self.read_root(out),
            MetaReply::Unknown => {
                if let Some(swap) = self.swap.as_mut().filter(|s| s.token == token) {
                    swap.token = 0;
                    swap.next_try = self.now + PACE;
                }
            }
            MetaReply::Record { version, value } => self.on_record(version, value, out),
            MetaReply::Swapped { version } => {
                if let Some(swap) = self.swap.take_if(|s| s.token == token) {
                    self.on_swapped(version, swap.root, out);
                }
            }
            MetaReply::Conflict { version, value } => {
                if self.swap.as_ref().is_some_and(|s| s.token == token) {
                    self.on_conflict(version, value, out);
                }
            }
            MetaReply::GuardFailed { .. } => panic!("no swap of this client has a guard"),
        }
    }

    fn on_record(&mut self, version: MetaVersion, value: Option<Vec<u8>>, out: &mut Effects<Effect>) {
        if self.state != ClientState::Reading {
            return;
        }
        let root = Root::decode(&value.expect("the volume exists")).expect("a root record");
        self.version = version;
        self.claim(root, out);
    }

    fn claim(&mut self, mut root: Root, out: &mut Effects<Effect>) {
        self.state = ClientState::Claiming;
        root.epoch = root.epoch.next();
        root.instance = self.config.instance;
        self.want_swap(root, out);
    }

    fn on_conflict(&mut self, version: MetaVersion, value: Option<Vec<u8>>, out: &mut Effects<Effect>) {
        let swap = self.swap.take().expect("it conflicted");
        let current = Root::decode(&value.expect("the volume exists")).expect("a root record");
        if current == swap.root {
            self.on_swapped(version, current, out);
        } else if self.state == ClientState::Claiming && current.instance != self.config.instance {
            self.version = version;
            self.claim(current, out);
        } else {
            assert_ne!(current.instance, self.config.instance, "only this owner changes its own record");
            self.state = ClientState::Deposed;
        }
    }

    fn on_swapped(&mut self, version: MetaVersion, root: Root, out: &mut Effects<Effect>) {
        self.version = version;
        self.root = Some(root.clone());
        match self.state {
            ClientState::Claiming => {
                self.state = ClientState::Fencing;
                self.recovery.begin(&root);
            }
            ClientState::Sealing => {
                self.state = ClientState::Open;
                self.forget_ledgers(&root, out);
                self.complete();
            }
            other => unreachable!("a swap was won in state {other:?}"),
        }
        self.drive(out);
    }

    /// Ledgers that the new root does not name.
    fn forget_ledgers(&mut self, root: &Root, out: &mut Effects<Effect>) {
        let strays = std::mem::take(&mut self.recovery.strays);
        self.forgotten.extend(strays.into_iter().filter(|(_, id)| id.epoch < root.epoch));
        for ledger in std::mem::take(&mut self.recovery.dropped) {
            self.forgotten.extend(ledger.legs.iter().map(|leg| (*leg, ledger.id)));
        }
        let nodes: Vec<NodeId> = self.nodes.keys().copied().collect();
        for node in nodes {
            self.tidy(node, out);
        }
    }

    /// Tells a node again what it may have missed: ledgers to delete, and the trim point.
    fn tidy(&mut self, node: NodeId, out: &mut Effects<Effect>) {
        if self.state != ClientState::Open {
            return;
        }
        let (volume, epoch, upto) = (self.config.volume, self.root().epoch, self.trimmed);
        let forgotten: Vec<(Leg, LedgerId)> = self.forgotten.iter().filter(|(l, _)| l.node == node).copied().collect();
        for (leg, ledger) in forgotten {
            let request = Request::DeleteLedger { device: leg.device, volume, epoch, ledger };
            self.send(node, request, Vec::new(), Purpose::Forget, out);
        }
        for ledger in self.root().ledgers.clone() {
            for leg in ledger.legs.into_iter().filter(|l| l.node == node && self.usable(*l)).collect::<Vec<_>>() {
                let request = Request::TrimLedger { device: leg.device, volume, epoch, ledger: ledger.id, upto };
                self.send(node, request, Vec::new(), Purpose::Forget, out);
            }
        }
    }

    fn drive(&mut self, out: &mut Effects<Effect>) {
        self.drive_swap(out);
        match self.state {
            ClientState::Fencing => self.drive_fencing(out),
            ClientState::Creating => self.drive_creating(out),
            ClientState::Open => self.drive_open(out),
            _ => {}
        }
    }

    fn drive_fencing(&mut self, out: &mut Effects<Effect>) {
        let (volume, epoch, instance) = (self.config.volume, self.root().epoch, self.config.instance);
        let device_legs = |(n, ds): (&NodeId, &Vec<DeviceStat>)| {
            let node = *n;
            ds.iter().map(move |d| Leg { node, device: d.device }).collect::<Vec<_>>()
        };
        let others: BTreeSet<Leg> = self.nodes.iter().flat_map(device_legs).collect();
        for leg in self.recovery.legs_to_fence(&others) {
            if self.nodes.contains_key(&leg.node) && !self.calling(Purpose::Fence { leg }) {
                let request = Request::Fence { device: leg.device, volume, epoch, instance };
                self.send(leg.node, request, Vec::new(), Purpose::Fence { leg }, out);
            }
        }
        for (ledger, leg, from) in self.recovery.reads_wanted() {
            if self.usable(leg) && !self.calling(Purpose::Read { ledger, leg }) {
                let request = Request::ReadLog { device: leg.device, volume, ledger, from, bytes_max: 64 << 10 };
                self.send(leg.node, request, Vec::new(), Purpose::Read { ledger, leg }, out);
            }
        }
        if let Some(found) = self.recovery.finish() {
            self.log = found.log;
            self.committed = found.last;
            self.trimmed = found.trimmed;
            for (lsn, value, blocks) in found.reappend {
                let entry = Entry { token: None, value, blocks, acks: 0, sent: 0, since: self.now };
                self.in_flight.insert(lsn, entry);
            }
            self.start_ledger();
            self.drive(out);
        }
    }

    /// Chooses legs for a new ledger and freezes the old one: none of its acknowledgements counts any more.
    fn start_ledger(&mut self) {
        self.state = ClientState::Creating;
        if let Some(ledger) = self.ledger.take()
            && !self.root().ledgers.contains(&ledger)
        {
            self.forgotten.extend(ledger.legs.iter().map(|leg| (*leg, ledger.id)));
        }
        self.created = 0;
        self.create_since = self.now;
        for entry in self.in_flight.values_mut() {
            (entry.acks, entry.sent) = (0, 0);
        }
    }

    fn choose_legs(&self) -> Option<LedgerRef> {
        let rule = AckRule::flat(self.config.failures);
        let width = 2 * usize::from(self.config.failures) + 1;
        let mut legs = Vec::new();
        for (node, devices) in &self.nodes {
            let pick = |d: &&DeviceStat| {
                d.health != DeviceHealth::Failed
                    && !self.failed_devices.contains(&Leg { node: *node, device: d.device })
            };
            let serving: Vec<&DeviceStat> = devices.iter().filter(pick).collect();
            if !serving.is_empty() && legs.len() < width {
                let device = serving[self.next_ledger as usize % serving.len()].device;
                legs.push(Leg { node: *node, device });
            }
        }
        let id = LedgerId { epoch: self.root().epoch, n: self.next_ledger };
        rule.is_satisfiable(&legs).then_some(LedgerRef { id, legs, rule, sealed: None })
    }

    fn drive_creating(&mut self, out: &mut Effects<Effect>) {
        if self.ledger.is_some() && self.now.since(self.create_since) > SILENCE {
            // A leg does not answer: others are chosen, under a new id.
            self.start_ledger();
        }
        if self.ledger.is_none() {
            let Some(ledger) = self.choose_legs() else { return };
            self.create_since = self.now;
            self.next_ledger += 1;
            self.created = 0;
            self.ledger = Some(ledger);
        }
        let ledger = self.ledger.clone().expect("just chosen");
        let (volume, epoch, instance) = (self.config.volume, self.root().epoch, self.config.instance);
        for (i, leg) in ledger.legs.iter().enumerate() {
            let purpose = Purpose::Create { ledger: ledger.id, leg: i };
            if self.created >> i & 1 == 0 && self.usable(*leg) && !self.calling(purpose) {
                let (legs, rule) = (ledger.legs.clone(), ledger.rule);
                let device = leg.device;
                let request = Request::CreateLedger { device, volume, epoch, instance, ledger: ledger.id, legs, rule };
                self.send(leg.node, request, Vec::new(), purpose, out);
            }
        }
        if self.created.count_ones() as usize == ledger.legs.len() {
            self.send_appends(out);
            let on_ack_sets = |e: &Entry| ledger.rule.is_ack_set(&ledger.legs, e.acks);
            if self.in_flight.values().all(on_ack_sets) {
                self.seal(ledger, out);
            }
        }
    }

    fn seal(&mut self, ledger: LedgerRef, out: &mut Effects<Effect>) {
        self.state = ClientState::Sealing;
        let mut root = self.root().clone();
        if let Some(old) = root.ledgers.last_mut().filter(|l| l.sealed.is_none()) {
            old.sealed = Some(self.committed);
        }
        let trimmed = self.trimmed;
        // Trims may be lost with the power; what the root names from here on begins after this.
        root.checkpoint.lsn = trimmed;
        self.recovery.dropped = root.ledgers.extract_if(.., |l| l.sealed.is_some_and(|s| s <= trimmed)).collect();
        root.ledgers.push(ledger);
        root.serving = self.config.instance;
        self.want_swap(root, out);
    }

    fn drive_open(&mut self, out: &mut Effects<Effect>) {
        while self.in_flight.len() < WINDOW {
            let Some((token, value, blocks)) = self.queue.pop_front() else { break };
            let lsn = self.in_flight.last_key_value().map_or(self.committed, |(l, _)| *l).max(self.committed).next();
            let entry = Entry { token: Some(token), value, blocks, acks: 0, sent: 0, since: self.now };
            self.in_flight.insert(lsn, entry);
        }
        self.send_appends(out);
        let ledger = self.ledger.as_ref().expect("an open ledger");
        let mask = self.usable_mask(ledger);
        if ledger.rule.is_ack_set(&ledger.legs, mask) {
            self.unusable_since = None;
        } else {
            let since = *self.unusable_since.get_or_insert(self.now);
            if self.now.since(since) > ROLL_AFTER && self.choose_legs().is_some() {
                self.unusable_since = None;
                self.rolls += 1;
                self.start_ledger();
            }
        }
    }

    fn usable_mask(&self, ledger: &LedgerRef) -> u8 {
        ledger.legs.iter().enumerate().filter(|(_, l)| self.usable(**l)).fold(0, |m, (i, _)| m | 1 << i)
    }

    /// Each entry goes to as many usable legs as the rule asks for, and to all when it takes long.
    fn send_appends(&mut self, out: &mut Effects<Effect>) {
        let ledger = self.ledger.clone().expect("a ledger");
        let usable = self.usable_mask(&ledger);
        let (volume, epoch) = (self.config.volume, self.root().epoch);
        let lsns: Vec<Lsn> = self.in_flight.keys().copied().collect();
        for lsn in lsns {
            let entry = self.in_flight.get_mut(&lsn).expect("listed");
            let hedge = self.now.since(entry.since) > HEDGE;
            let mut wanted = usable & !entry.sent & !entry.acks;
            let have = (entry.sent | entry.acks).count_ones();
            while !hedge && wanted.count_ones() + have > u32::from(ledger.rule.copies) {
                wanted &= !(1 << (7 - wanted.leading_zeros()));
            }
            if wanted == 0 {
                continue;
            }
            entry.sent |= wanted;
            let (value, payload) = (entry.value, payload_of(entry.value, entry.blocks));
            let header = [value.to_le_bytes(), (entry.blocks as u64).to_le_bytes()].concat();
            for (i, leg) in ledger.legs.iter().enumerate().filter(|(i, _)| wanted >> i & 1 == 1) {
                let (device, acked, crcs) = (leg.device, self.committed, block_crcs(&payload));
                let header = header.clone();
                let request = Request::Append { device, volume, epoch, ledger: ledger.id, lsn, acked, header, crcs };
                let purpose = Purpose::Append { ledger: ledger.id, leg: i, lsn };
                self.send(leg.node, request, vec![payload.clone()], purpose, out);
            }
        }
    }

    fn on_answer(&mut self, token: u64, reply: Reply, payload: &Buf, out: &mut Effects<Effect>) {
        let Some(call) = self.calls.remove(&token) else { return };
        if self.state == ClientState::Deposed {
            return;
        }
        if let Reply::Refused(Refusal::StaleEpoch { .. }) = reply {
            self.state = ClientState::Deposed;
            return;
        }
        // What a node can't do now is asked again at the next tick.
        let refused = matches!(reply, Reply::Refused(_));
        match call.purpose {
            Purpose::Append { ledger, leg, lsn } => self.on_append(ledger, leg, lsn, &reply),
            Purpose::Create { ledger, leg } => self.on_create(ledger, leg, &reply),
            Purpose::Fence { leg } => self.recovery.on_fenced(leg, &reply),
            Purpose::Read { ledger, leg } => self.recovery.on_read(ledger, leg, reply, payload),
            Purpose::Stat { node } => {
                if let Reply::Stat { devices } = reply {
                    self.nodes.insert(node, devices);
                }
            }
            Purpose::Forget => {}
        }
        if self.state == ClientState::Open {
            self.complete();
        }
        if !refused {
            self.drive(out);
        }
    }

    fn on_append(&mut self, id: LedgerId, leg: usize, lsn: Lsn, reply: &Reply) {
        let Some(ledger) = self.ledger.as_ref().filter(|l| l.id == id) else { return };
        let device = ledger.legs[leg];
        let Some(entry) = self.in_flight.get_mut(&lsn) else { return };
        match reply {
            Reply::Appended { lsn: l, .. } => {
                assert_eq!(*l, lsn, "the answer names the entry");
                entry.acks |= 1 << leg;
            }
            Reply::Refused(Refusal::NoSpace | Refusal::Busy) => entry.sent &= !(1 << leg),
            Reply::Refused(_) => {
                self.failed_devices.insert(device);
            }
            other => panic!("an append was answered by {other:?}"),
        }
    }

    fn on_create(&mut self, id: LedgerId, leg: usize, reply: &Reply) {
        let Some(ledger) = self.ledger.as_ref().filter(|l| l.id == id) else { return };
        match reply {
            Reply::Done => self.created |= 1 << leg,
            Reply::Refused(Refusal::NoSpace | Refusal::Busy) => {}
            Reply::Refused(_) => {
                self.failed_devices.insert(ledger.legs[leg]);
                self.create_since = Instant::ZERO;
            }
            other => panic!("a ledger's creation was answered by {other:?}"),
        }
    }

    /// Entries complete in LSN order.
    fn complete(&mut self) {
        let ledger = self.ledger.as_ref().expect("an open ledger");
        while let Some(first) = self.in_flight.first_entry() {
            let lsn = *first.key();
            if !ledger.rule.is_ack_set(&ledger.legs, first.get().acks) {
                break;
            }
            let entry = first.remove();
            if lsn > self.committed {
                self.committed = lsn;
                self.log.insert(lsn, entry.value);
                self.news.push((lsn, entry.value));
                self.replies.extend(entry.token);
            }
        }
    }

    fn on_request(&mut self, token: RequestToken, op: BlockOp, out: &mut Effects<Effect>) {
        match op {
            BlockOp::Write { offset, data } => self.queue.push_back((token, offset, data.len() / BLOCK_BYTES)),
            BlockOp::Discard(range) => {
                self.trim(Lsn(range.offset).min(self.committed), out);
                self.replies.push(token);
            }
            other => panic!("a log takes writes and trims, not {other:?}"),
        }
        self.drive(out);
    }

    fn trim(&mut self, upto: Lsn, out: &mut Effects<Effect>) {
        if self.state != ClientState::Open || upto <= self.trimmed {
            return;
        }
        self.trimmed = upto;
        self.log = self.log.split_off(&upto.next());
        let nodes: Vec<NodeId> = self.nodes.keys().copied().collect();
        for node in nodes {
            self.tidy(node, out);
        }
    }

    fn on_node_down(&mut self, node: NodeId) {
        self.nodes.remove(&node);
        let lost: Vec<u64> = self.calls.iter().filter(|(_, c)| c.node == node).map(|(t, _)| *t).collect();
        for token in lost {
            let call = self.calls.remove(&token).expect("listed");
            if let Purpose::Append { ledger, leg, lsn } = call.purpose
                && self.ledger.as_ref().is_some_and(|l| l.id == ledger)
                && let Some(entry) = self.in_flight.get_mut(&lsn)
            {
                entry.sent &= !(1 << leg);
            }
        }
    }

    fn on_tick(&mut self, out: &mut Effects<Effect>) {
        self.tick_at = self.now + PACE;
        let silent = |c: &&Call| self.now.since(c.sent_at) > SILENCE;
        let nodes: BTreeSet<NodeId> = self.calls.values().filter(silent).map(|c| c.node).collect();
        for node in nodes {
            out.push(Effect::Reconnect { node });
        }
        if matches!(self.state, ClientState::Fencing | ClientState::Creating) {
            self.ask_after_devices(out);
        }
        self.drive(out);
    }

    /// Some may still have been opening when their node greeted.
    fn ask_after_devices(&mut self, out: &mut Effects<Effect>) {
        for node in self.nodes.keys().copied().collect::<Vec<_>>() {
            if !self.calling(Purpose::Stat { node }) {
                self.send(node, Request::Stat, Vec::new(), Purpose::Stat { node }, out);
            }
        }
    }
}

impl Machine for LedgerClient {
    fn handle(&mut self, now: Instant, event: Event, out: &mut Effects<Effect>) {
        self.now = now;
        match event {
            Event::Open => self.read_root(out),
            Event::Request { request, .. } => self.on_request(request.token, request.op, out),
            Event::NodeUp { node, devices, .. } => {
                self.failed_devices.retain(|l| l.node != node);
                self.nodes.insert(node, devices);
                self.tidy(node, out);
                self.drive(out);
            }
            Event::NodeDown { node } => {
                self.on_node_down(node);
                self.drive(out);
            }
            Event::Node { token, reply, payload, .. } => self.on_answer(token, reply, &payload, out),
            Event::Meta { token, reply } => self.on_meta(token, reply, out),
            Event::Tick => self.on_tick(out),
            other => panic!("a ledger client does not know {other:?}"),
        }
        for token in self.replies.drain(..) {
            out.push(Effect::Reply(BlockReply { token, result: Ok(BlockData::Done) }));
        }
        if self.state == ClientState::Deposed {
            let queued = self.queue.drain(..).map(|(token, ..)| token);
            let flying = std::mem::take(&mut self.in_flight).into_values().filter_map(|e| e.token);
            for token in flying.chain(queued) {
                out.push(Effect::Reply(BlockReply { token, result: Err(BlockError::Deposed) }));
            }
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        (self.state != ClientState::Deposed).then_some(self.tick_at)
    }
}
