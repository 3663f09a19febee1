//! Separate clones of a simulated volume: volumes of their own, each with an owner of its own on any host, which share the
//! segments of the volume that they were made of (see `holdfast_volume`'s `sharing::segments`), and clones of these.
//!
//! Each has one guest that asks for one thing at a time, so that what a sector may hold is a short list. What it holds at
//! first is learned by reading, and compared in the end with what the snapshot was seen to hold.

use crate::checker::{self, REPEATED, SECTOR_BYTES, Version};
use crate::secrecy::store_key_of;
use crate::swarm::{Run, VOLUME, WAKE_SEPARATE};
use crate::workload::What;
use crate::world::{MachineAt, Output};
use holdfast_base::buf::{concat, total_len};
use holdfast_base::{
    BlockData, BlockError, BlockOp, BlockReply, BlockRequest, BufMut, ByteRange, HeadId, MetaRequest, MetaVersion,
    ObjectId, Prng, RequestToken, VolumeId,
};
use holdfast_format::root::{Root, root_key};
use holdfast_format::sharing::SegmentRanges;
use holdfast_volume::{Change, Controller, Event, Notice, State, Target};
use std::collections::BTreeMap;
use std::time::Duration;

const SECTOR: u64 = SECTOR_BYTES as u64;
const BLOCK: u64 = holdfast_base::BLOCK_BYTES as u64;

/// Between two looks of the operator at all members.
const PACE: Duration = Duration::from_millis(15);

/// Reads of a whole member come in pieces of this many bytes.
const PIECE: u64 = 128 << 10;

/// Tokens of requests to members; those of the volume's guests are lower.
const TOKENS: u64 = 1 << 40;

/// Versions that members' guests write; those of the volume's guests are lower.
const VERSIONS: Version = 1 << 31;

/// Versions that members of a domain write.
const ALIKE: Version = 3 << 30;

/// What a sector may hold.
#[derive(Clone, Debug)]
enum Sector {
    /// What its snapshot held, which nobody has read yet, or what was written since, perhaps.
    Unread {
        written: Vec<Version>,
    },
    Known(Vec<Version>),
}

#[derive(Clone, Debug)]
struct Pending {
    token: RequestToken,
    what: What,
    offset: u64,
    len: u64,
}

/// Where a member stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// Of this controller.
    Asked(MachineAt),
    Made,
    /// Dropped, or it never came to be.
    Gone,
}

struct Member {
    stage: Stage,
    /// The volume (0), or another member.
    origin: usize,
    /// Of the volume's snapshot that it was made of.
    layer: Option<ObjectId>,
    sectors: Vec<Sector>,
    /// What was read before anything was written there.
    initial: BTreeMap<usize, Version>,
    pending: Option<Pending>,
    /// The newest opening.
    at: Option<MachineAt>,
    /// A snapshot of it, and what that holds.
    snapshot: Option<(String, Option<Vec<Sector>>)>,
    /// It is being rolled back to that.
    rolls_back: bool,
    /// What it said last that it names.
    record: Option<SegmentRanges>,
    /// It has no guest: others share its content.
    is_store: bool,
    /// The store of its domain.
    store: Option<usize>,
    /// It is to be in that no more.
    leaves: bool,
}

impl Member {
    fn new(stage: Stage, origin: usize, layer: Option<ObjectId>, sectors: Vec<Sector>) -> Member {
        Member {
            stage,
            origin,
            layer,
            sectors,
            initial: BTreeMap::new(),
            pending: None,
            at: None,
            snapshot: None,
            rolls_back: false,
            record: None,
            is_store: false,
            store: None,
            leaves: false,
        }
    }
}

pub(crate) struct SeparateClones {
    prng: Prng,
    max: usize,
    /// The first is number 1.
    members: Vec<Member>,
    machines: BTreeMap<MachineAt, usize>,
    next_token: u64,
    next_version: Version,
    next_name: u32,
    /// Offers of stores that are on their way for as long as a scenario wants, if it does.
    pub(crate) held_offers: Option<Vec<(VolumeId, Event)>>,
    /// What stores and members tell each other takes that long, at least.
    pub(crate) talk_takes: Duration,
    /// The store of the first volume's domain.
    pub(crate) store_of_first: Option<usize>,
}

pub(crate) fn id_of(number: usize) -> VolumeId {
    VolumeId(VOLUME.0 + 0x1_0000 * number as u128)
}

impl SeparateClones {
    pub(crate) fn new(seed: u64, max: usize) -> SeparateClones {
        let prng = Prng::new(seed ^ 0xfa_3117);
        SeparateClones {
            prng,
            max,
            members: Vec::new(),
            machines: BTreeMap::new(),
            next_token: TOKENS,
            next_version: VERSIONS,
            next_name: 0,
            held_offers: None,
            talk_takes: Duration::ZERO,
            store_of_first: None,
        }
    }

    pub(crate) fn all_machines(&self) -> impl Iterator<Item = MachineAt> {
        self.machines.keys().copied()
    }

    pub(crate) fn number_at(&self, at: MachineAt) -> Option<usize> {
        self.machines.get(&at).copied()
    }

    fn get(&mut self, number: usize) -> &mut Member {
        &mut self.members[number - 1]
    }

    /// A volume of its own with nothing in it; returns its number.
    pub(crate) fn add_fresh(&mut self, size_bytes: u64, is_store: bool) -> usize {
        let sectors = vec![Sector::Known(vec![0]); (size_bytes / SECTOR) as usize];
        self.members.push(Member { is_store, ..Member::new(Stage::Made, 0, None, sectors) });
        self.members.len()
    }

    pub(crate) fn count(&self) -> usize {
        self.members.len()
    }

    pub(crate) fn any_host(&mut self, hosts: usize) -> usize {
        self.prng.below(hosts as u64) as usize
    }

    pub(crate) fn set_store(&mut self, number: usize, store: usize) {
        let member = self.get(number);
        (member.store, member.leaves) = (Some(store), false);
    }

    pub(crate) fn set_leaving(&mut self, number: usize) {
        self.get(number).leaves = true;
    }

    pub(crate) fn at_of(&self, volume: VolumeId) -> Option<MachineAt> {
        self.live().find(|(number, _)| id_of(*number) == volume).and_then(|(_, member)| member.at)
    }

    /// Whether a message is lost, as so many of a thousand are, and how long it takes.
    pub(crate) fn fate_of_talk(&mut self, lost: u32) -> (bool, u64) {
        let us_max = match self.prng.below(10) {
            0..6 => 4_000,
            6..8 => 200_000,
            _ => 3_000_000,
        };
        (self.prng.chance(lost), self.prng.between(30, us_max))
    }

    fn live(&self) -> impl Iterator<Item = (usize, &Member)> {
        self.members.iter().enumerate().filter(|(_, m)| m.stage == Stage::Made).map(|(i, m)| (i + 1, m))
    }

    /// Those that own machines on a host lose them.
    fn on_host_gone(&mut self, host: usize) {
        self.machines.retain(|at, _| at.host != host);
        for member in &mut self.members {
            if member.at.is_some_and(|at| at.host == host) {
                (member.at, member.pending) = (None, None);
            }
            if matches!(member.stage, Stage::Asked(at) if at.host == host) {
                member.stage = Stage::Gone;
            }
        }
    }
}

impl Member {
    fn range(&self, offset: u64, len: u64) -> std::ops::Range<usize> {
        (offset / SECTOR) as usize..((offset + len) / SECTOR) as usize
    }

    fn may_hold(&mut self, offset: u64, len: u64, version: Version) {
        for i in self.range(offset, len) {
            match &mut self.sectors[i] {
                Sector::Unread { written } => written.push(version),
                Sector::Known(versions) => versions.push(version),
            }
        }
    }

    /// A rollback has an end: with its outcome, or without one that anybody knows.
    fn end_rollback(&mut self, is_done: Option<bool>) {
        let held = self.snapshot.as_ref().and_then(|(_, held)| held.clone());
        let Some(held) = held.filter(|_| std::mem::take(&mut self.rolls_back)) else { return };
        match is_done {
            Some(true) => self.sectors = held,
            Some(false) => {}
            None => {
                for (sector, held) in self.sectors.iter_mut().zip(held) {
                    match (sector, held) {
                        (Sector::Known(now) | Sector::Unread { written: now }, Sector::Known(held)) => now.extend(held),
                        (Sector::Unread { written }, Sector::Unread { written: held }) => written.extend(held),
                        // It may hold again what nobody has read.
                        (known @ Sector::Known(_), Sector::Unread { mut written }) => {
                            if let Sector::Known(now) = known {
                                written.append(now);
                            }
                            *known = Sector::Unread { written };
                        }
                    }
                }
            }
        }
    }

    fn holds(&mut self, offset: u64, len: u64, version: Version) {
        for i in self.range(offset, len) {
            self.sectors[i] = Sector::Known(vec![version]);
        }
    }

    fn was_read(&mut self, sector: usize, version: Version) -> Result<(), String> {
        match &self.sectors[sector] {
            Sector::Known(versions) if !versions.contains(&version) => {
                return Err(format!("sector {sector} holds {version}, and should one of {versions:?}"));
            }
            Sector::Unread { written } if !written.contains(&version) => {
                self.initial.insert(sector, version);
            }
            _ => {}
        }
        self.sectors[sector] = Sector::Known(vec![version]);
        Ok(())
    }
}

impl Run {
    // ---- what scenarios and chance ask for ----

    /// Asks for a separate clone of a snapshot of the volume or a clone; returns its number, from 1 on.
    pub(crate) fn ask_separate(&mut self, at: MachineAt, name: &str) -> usize {
        let (head, layer) = self.snapshot_to_share(name).expect("a snapshot that was told of");
        let sectors = vec![Sector::Unread { written: Vec::new() }; (self.guests.size_bytes() / SECTOR) as usize];
        self.create_separate(at, 0, (head, name.to_string()), Some(layer), sectors)
    }

    /// Asks for a clone of the newest snapshot of a member.
    pub(crate) fn ask_separate_of_member(&mut self, number: usize) -> Option<usize> {
        let member = self.separate.get(number);
        let (Some(at), Some((name, Some(sectors)))) = (member.at, member.snapshot.clone()) else { return None };
        Some(self.create_separate(at, number, (HeadId::VOLUME, name), None, sectors))
    }

    fn create_separate(
        &mut self,
        at: MachineAt,
        origin: usize,
        (head, snapshot): (HeadId, String),
        layer: Option<ObjectId>,
        sectors: Vec<Sector>,
    ) -> usize {
        self.separate.members.push(Member::new(Stage::Asked(at), origin, layer, sectors));
        let number = self.separate.members.len();
        if number == 1 {
            self.begin_separate_time();
        }
        let (dependent, name) = (id_of(number), format!("member{number}"));
        self.world.tell(at, Event::CreateDependent { head, snapshot, dependent, name, size_bytes: None });
        number
    }

    pub(crate) fn begin_separate_time(&mut self) {
        self.world.wake_at(self.world.now() + PACE, WAKE_SEPARATE);
    }

    pub(crate) fn is_member_made(&self, number: usize) -> bool {
        self.separate.members[number - 1].stage == Stage::Made
    }

    pub(crate) fn is_member_gone(&self, number: usize) -> bool {
        self.separate.members[number - 1].stage == Stage::Gone
    }

    pub(crate) fn member_at(&self, number: usize) -> Option<MachineAt> {
        self.separate.members[number - 1].at
    }

    pub(crate) fn is_member_idle(&self, number: usize) -> bool {
        let member = &self.separate.members[number - 1];
        member.pending.is_none() && !member.rolls_back
    }

    pub(crate) fn is_member_open(&self, number: usize) -> bool {
        self.member_at(number).and_then(|at| self.world.machine(at)).is_some_and(|c| c.state() == State::Open)
    }

    /// Another opening of a member begins on this host.
    pub(crate) fn open_member(&mut self, number: usize, host: usize) {
        if !self.world.hosts[host].is_up() {
            return;
        }
        let replaced = |(at, of): (&MachineAt, &usize)| (at.host == host && *of == number).then_some(*at);
        for at in self.separate.machines.iter().filter_map(replaced).collect::<Vec<_>>() {
            self.separate.machines.remove(&at);
            self.world.detach(at);
        }
        let mut config = self.config_of(id_of(number), host);
        let Member { is_store, store, leaves, .. } = self.separate.members[number - 1];
        if self.plan.encrypted {
            let key = store_key_of(self.plan.seed);
            match store {
                Some(store) => config.store_key = Some((id_of(store), key)),
                None if is_store => config.key = Some(key),
                None => {}
            }
        }
        config.leaves_domain = leaves;
        let at = self.world.attach(host, Controller::new(config));
        let draining = self.draining();
        if !draining.is_empty() {
            self.world.tell(at, Event::Drain { devices: draining });
        }
        self.separate.machines.insert(at, number);
        if let Some(store) = store.filter(|_| !leaves) {
            self.tell_store(at, store);
        }
        let member = self.separate.get(number);
        // What the old owner was asked for may happen or not.
        (member.at, member.pending) = (Some(at), None);
        member.end_rollback(None);
        if member.snapshot.as_ref().is_some_and(|(_, held)| held.is_none()) {
            member.snapshot = None;
        }
    }

    /// A request to a member that has none under way.
    pub(crate) fn ask_member(&mut self, number: usize, what: What, offset: u64, len: u64) {
        let version = match what {
            What::Write(version) if version > 0 => version,
            _ => self.separate.next_version,
        };
        let token = RequestToken(self.separate.next_token);
        self.separate.next_token += 1;
        let member = self.separate.get(number);
        let at = member.at.expect("a member that somebody has open");
        assert!(member.pending.is_none(), "a member is asked for one thing at a time");
        let range = ByteRange::new(offset, len);
        let op = match what {
            What::Read => BlockOp::Read(range),
            What::Discard => {
                member.may_hold(offset, len, 0);
                BlockOp::Discard(range)
            }
            What::Write(_) => {
                let mut data = BufMut::new(len as usize);
                checker::fill(&mut data, offset / SECTOR, version);
                member.may_hold(offset, len, version);
                BlockOp::Write { offset, data: data.freeze() }
            }
            other => panic!("members are not asked for {other:?}"),
        };
        let what = if matches!(what, What::Write(_)) { What::Write(version) } else { what };
        member.pending = Some(Pending { token, what, offset, len });
        self.separate.next_version += 1;
        self.world.request(at, Target::VOLUME, BlockRequest { token, op });
    }

    /// It is not needed any more.
    pub(crate) fn drop_member(&mut self, number: usize) {
        let of_it = |(at, of): (&MachineAt, &usize)| (*of == number).then_some(*at);
        for at in self.separate.machines.iter().filter_map(of_it).collect::<Vec<_>>() {
            self.separate.machines.remove(&at);
            self.world.detach(at);
        }
        let member = self.separate.get(number);
        (member.stage, member.at, member.pending) = (Stage::Gone, None, None);
        if member.store.is_some() {
            self.delete_root(number);
        }
    }

    // ---- what comes back ----

    pub(crate) fn on_member_output(&mut self, number: usize, at: MachineAt, output: Output) {
        let is_current = self.separate.get(number).at == Some(at);
        match output {
            Output::Reply { reply, .. } if is_current => {
                if let Err(why) = self.on_member_reply(number, reply) {
                    self.fail(format!("member {number}: {why}"));
                }
            }
            Output::Notice { notice: Notice::StateChanged(State::Deposed | State::Closed), .. } => {
                self.separate.machines.remove(&at);
                self.world.detach(at);
                if is_current {
                    let member = self.separate.get(number);
                    (member.at, member.pending) = (None, None);
                }
            }
            Output::Notice { notice: Notice::Miscounted { segments, shadowed }, .. } => {
                self.fail(format!("member {number} had {segments} segments miscounted; too much shadowed: {shadowed}"));
            }
            Output::Notice { notice: Notice::Changed { change: Change::Snapshot { name, .. }, .. }, .. } => {
                let member = self.separate.get(number);
                let held = member.sectors.clone();
                if let Some((of, content)) = member.snapshot.as_mut().filter(|_| is_current)
                    && *of == name
                {
                    *content = Some(held);
                }
            }
            Output::Notice { notice: Notice::Changed { change: Change::Rollback { .. }, .. }, .. } if is_current => {
                self.separate.get(number).end_rollback(Some(true));
            }
            Output::Notice { notice: Notice::Refused { change, .. }, .. } if is_current => {
                let member = self.separate.get(number);
                member.snapshot.take_if(|(_, content)| content.is_none());
                if matches!(change, Change::Rollback { .. }) {
                    member.end_rollback(Some(false));
                }
            }
            Output::Notice { notice, .. } => self.on_separate_notice(at, &notice),
            _ => {}
        }
    }

    /// Of any controller: a clone was made, or not.
    pub(crate) fn on_separate_notice(&mut self, at: MachineAt, notice: &Notice) {
        let number_of = |of: VolumeId| ((of.0 - VOLUME.0) / 0x1_0000) as usize;
        match notice {
            Notice::DependentCreated { dependent, root } => {
                let number = number_of(*dependent);
                if self.separate.get(number).stage != Stage::Asked(at) {
                    return;
                }
                assert_eq!(Root::decode(&root.encode()).as_ref(), Ok(&**root));
                let (key, value) = (root_key(*dependent), Some(root.encode()));
                self.world.meta.apply(&MetaRequest::Swap { key, expect: MetaVersion::ABSENT, value, guard: None });
                self.separate.get(number).stage = Stage::Made;
                let host = self.separate.prng.below(self.world.hosts.len() as u64) as usize;
                self.open_member(number, host);
            }
            Notice::DependentRefused { dependent, .. } => {
                let member = self.separate.get(number_of(*dependent));
                if member.stage == Stage::Asked(at) {
                    member.stage = Stage::Gone;
                }
            }
            _ => {}
        }
    }

    fn on_member_reply(&mut self, number: usize, reply: BlockReply) -> Result<(), String> {
        let (overwhelmed, space_may_end) = (self.guests.overwhelmed, self.guests.space_may_end);
        let member = self.separate.get(number);
        let Some(pending) = member.pending.take_if(|pending| pending.token == reply.token) else { return Ok(()) };
        match (reply.result, pending.what) {
            (Ok(BlockData::Done), What::Write(version)) => member.holds(pending.offset, pending.len, version),
            (Ok(BlockData::Done), What::Discard) => member.holds(pending.offset, pending.len, 0),
            (Ok(BlockData::Data(parts)), What::Read) => {
                if total_len(&parts) as u64 != pending.len {
                    return Err(format!("{pending:?} was answered by {} bytes", total_len(&parts)));
                }
                let first = (pending.offset / SECTOR) as usize;
                for (i, sector) in concat(&parts).chunks_exact(SECTOR_BYTES).enumerate() {
                    let version = checker::decode(sector, (first + i) as u64)
                        .ok_or_else(|| format!("{pending:?} got bytes that nobody wrote at sector {}", first + i))?;
                    member.was_read(first + i, version)?;
                }
            }
            (Err(BlockError::Deposed | BlockError::ShuttingDown), _) => {}
            (Err(BlockError::Unavailable), _) if overwhelmed => {}
            (Err(BlockError::NoSpace), What::Write(_) | What::Discard) if space_may_end => {}
            (other, _) => return Err(format!("{pending:?} was answered by {other:?}")),
        }
        Ok(())
    }

    pub(crate) fn on_separate_host_gone(&mut self, host: usize) {
        self.separate.on_host_gone(host);
    }

    // ---- the operator, now and then ----

    pub(crate) fn on_separate_time(&mut self, healing: bool) {
        self.world.wake_at(self.world.now() + PACE, WAKE_SEPARATE);
        self.give_up_separate();
        self.tell_origins();
        let live: Vec<usize> = self.separate.live().map(|(number, _)| number).collect();
        for number in live {
            if self.separate.get(number).at.is_none() {
                let host = self.separate.prng.below(self.world.hosts.len() as u64) as usize;
                self.open_member(number, host);
            } else if !healing && (self.separate.max > 0 || self.plan.sharing) {
                self.act_on_member(number);
            }
        }
    }

    /// Owners that were asked and are not there any more have made nothing.
    fn give_up_separate(&mut self) {
        for i in 0..self.separate.members.len() {
            if let Stage::Asked(at) = self.separate.members[i].stage
                && self.world.machine(at).is_none_or(|c| matches!(c.state(), State::Deposed | State::Closed))
            {
                self.separate.members[i].stage = Stage::Gone;
            }
        }
    }

    /// Origins hear what their dependents say, or said some time ago; stores, which members are gone.
    fn tell_origins(&mut self) {
        for i in 0..self.separate.members.len() {
            let Member { stage, store, .. } = self.separate.members[i];
            if let Some(at) = store.filter(|_| stage == Stage::Gone).and_then(|store| self.member_at(store)) {
                self.world.tell(at, Event::Dependent { volume: id_of(i + 1), names: None });
            }
            let (stage, origin) = (self.separate.members[i].stage, self.separate.members[i].origin);
            if matches!(stage, Stage::Asked(_)) || !self.separate.prng.chance(400) {
                continue;
            }
            let owner = if origin == 0 { self.current } else { self.separate.members[origin - 1].at };
            if stage == Stage::Made {
                let machine = self.separate.members[i].at.and_then(|at| self.world.machine(at));
                if let Some((volume, names)) = machine.and_then(Controller::named_of_origin) {
                    let origin = if origin == 0 { VOLUME } else { id_of(origin) };
                    assert_eq!(volume, origin, "a member knows what it was made of");
                    self.separate.members[i].record = Some(names);
                }
            }
            let names = self.separate.members[i].record.clone().filter(|_| stage == Stage::Made);
            if let Some(at) = owner.filter(|_| names.is_some() || stage == Stage::Gone) {
                self.world.tell(at, Event::Dependent { volume: id_of(i + 1), names });
            }
        }
    }

    fn act_on_member(&mut self, number: usize) {
        let size = self.guests.size_bytes();
        let draw = self.separate.prng.below(1000);
        if self.separate.members[number - 1].is_store {
            if draw < 30 && self.separate.prng.below(self.plan.domain_calm) == 0 {
                let host = self.separate.any_host(self.world.hosts.len());
                self.open_member(number, host);
            }
            return;
        }
        let is_origin = self.separate.live().any(|(_, member)| member.origin == number)
            || self.separate.members.iter().any(|m| m.origin == number && matches!(m.stage, Stage::Asked(_)));
        let is_calm = self.separate.get(number).store.is_some() && self.separate.prng.below(self.plan.domain_calm) != 0;
        if draw < 8 && !is_origin && !is_calm {
            return self.drop_member(number);
        }
        if draw < 30 && !is_calm {
            let host = self.separate.prng.below(self.world.hosts.len() as u64) as usize;
            return self.open_member(number, host);
        }
        if !self.is_member_idle(number) || !self.is_member_open(number) {
            return;
        }
        if let Some(store) = self.separate.get(number).store.filter(|_| draw >= 990 && !is_calm) {
            // Members leave, and come back.
            return match self.separate.get(number).leaves {
                true => self.put_into_domain(number, store),
                false => self.take_out_of_domain(number),
            };
        }
        let has_room = self.separate.members.len() < self.separate.max;
        let snapshot = self.separate.get(number).snapshot.clone();
        match (draw, snapshot) {
            (30..70, None) => self.snapshot_member(number),
            (70..200, Some((_, Some(_)))) if has_room => {
                self.ask_separate_of_member(number);
            }
            (200..206, Some((name, Some(_)))) if !is_origin => self.act_on_snapshot_of(number, name),
            // What is asked for now might be part of the snapshot or not.
            (_, Some((_, None))) => {}
            _ => {
                let is_alike = self.separate.get(number).store.is_some();
                let mut what = match self.separate.prng.below(10) {
                    0..5 => What::Read,
                    // Of few versions, so that others hold the same, or it itself does elsewhere.
                    5..9 if is_alike => What::Write(*self.separate.prng.pick(&[ALIKE, ALIKE + 1, REPEATED])),
                    5..9 => What::Write(0),
                    _ => What::Discard,
                };
                // As long as the guests' that are not bulk: a journal's units are small here.
                let mut len = self.separate.prng.between(1, 12) * BLOCK;
                let mut offset = self.separate.prng.below((size - len) / BLOCK + 1) * BLOCK;
                if is_alike && self.separate.prng.chance(800) {
                    // Where others write the same, too.
                    let part = if what == What::Write(REPEATED) { size } else { size.min(1 << 20) };
                    (offset, len) = (offset % part / (8 * BLOCK) * (8 * BLOCK), 8 * BLOCK);
                }
                let written = self.guests.written.as_ref().filter(|written| is_alike && !written.is_empty());
                if let (What::Write(_), Some(written)) = (what, written)
                    && self.separate.prng.chance(400)
                {
                    // What the first volume was to hold.
                    let (at, bytes, version) = written[self.separate.prng.below(written.len() as u64) as usize];
                    (offset, len, what) = (at, bytes, What::Write(version));
                }
                self.ask_member(number, what, offset, len);
            }
        }
    }

    pub(crate) fn has_member_snapshot(&self, number: usize) -> bool {
        matches!(self.separate.members[number - 1].snapshot, Some((_, Some(_))))
    }

    pub(crate) fn snapshot_member(&mut self, number: usize) {
        let name = format!("m{}", self.separate.next_name);
        self.separate.next_name += 1;
        let member = self.separate.get(number);
        member.snapshot = Some((name.clone(), None));
        let at = member.at.expect("an open member");
        self.world.tell(at, Event::Change(Change::Snapshot { head: HeadId::VOLUME, name, created_ms: 1 }));
    }

    /// It is rolled back to its snapshot, or that is dropped.
    fn act_on_snapshot_of(&mut self, number: usize, name: String) {
        let (rolls_back, head) = (self.separate.prng.chance(600), HeadId::VOLUME);
        let member = self.separate.get(number);
        let at = member.at.expect("an open member");
        member.rolls_back = rolls_back;
        let change = match rolls_back {
            true => Change::Rollback { head, name },
            false => {
                member.snapshot = None;
                Change::DropSnapshot { head, name }
            }
        };
        self.world.tell(at, Event::Change(change));
    }

    /// Now and then a separate clone is made of one of the volume's snapshots.
    pub(crate) fn act_on_separate(&mut self, at: MachineAt) {
        if self.separate.members.len() >= self.separate.max || !self.separate.prng.chance(60) || self.is_late(at) {
            return;
        }
        let names = self.snapshots_to_share();
        if !names.is_empty() {
            let name = self.separate.prng.pick(&names).clone();
            self.ask_separate(at, &name);
        }
    }

    // ---- at the end ----

    /// Open, answered, and with full redundancy of what is their own.
    pub(crate) fn are_members_whole(&self) -> bool {
        self.separate.live().all(|(_, member)| {
            let machine = member.at.and_then(|at| self.world.machine(at)).filter(|c| c.state() == State::Open);
            machine.inspect(|controller| controller.verify());
            let status = machine.map(Controller::status);
            status.is_some_and(|s| s.degraded_segments == 0 && s.at_risk_entries == 0)
                && member.pending.is_none()
                && !member.rolls_back
        })
    }

    /// Where members stand, for a person who looks into a finding.
    pub(crate) fn members_text(&self) -> String {
        let text = |(number, member): (usize, &Member)| {
            let status = member.at.and_then(|at| self.world.machine(at)).map(Controller::status);
            format!("; member {number} at {:?}: {:?}, {status:?}", member.at, member.pending)
        };
        self.separate.live().map(text).collect()
    }

    /// Reads every member, and compares what it began with with what its snapshot was seen to hold.
    pub(crate) fn read_members_back(&mut self) -> Result<(), String> {
        let live: Vec<usize> = self.separate.live().map(|(number, _)| number).collect();
        for number in live {
            if self.separate.members[number - 1].is_store {
                self.check_member_leaks(number)?;
                continue;
            }
            self.read_member(number)?;
            let member = &self.separate.members[number - 1];
            let content = member.layer.and_then(|layer| self.guests.content_so_far(layer));
            for (sector, version) in &member.initial {
                let held = content.and_then(|content| content[*sector]);
                if held.is_some_and(|held| held != *version) {
                    return Err(format!("member {number} began with {version} in sector {sector}, not with {held:?}"));
                }
            }
            self.check_member_leaks(number)?;
        }
        Ok(())
    }

    /// Reads all of a member, piece by piece.
    pub(crate) fn read_member(&mut self, number: usize) -> Result<(), String> {
        let size = self.guests.size_bytes();
        for offset in (0..size).step_by(PIECE as usize) {
            let until = self.world.now() + Duration::from_secs(60);
            if !self.run_until(until, |r| r.is_member_idle(number) && r.is_member_open(number))? {
                let status = self.member_at(number).and_then(|at| self.world.machine(at)).map(Controller::status);
                return Err(format!("member {number} does not answer: {status:?}"));
            }
            self.ask_member(number, What::Read, offset, PIECE.min(size - offset));
        }
        let until = self.world.now() + Duration::from_secs(60);
        match self.run_until(until, |r| r.is_member_idle(number))? {
            true => Ok(()),
            false => Err(format!("member {number} does not answer")),
        }
    }

    fn check_member_leaks(&mut self, number: usize) -> Result<(), String> {
        let until = self.world.now() + Duration::from_secs(60);
        loop {
            self.take_stock_of(id_of(number));
            let machine = self.member_at(number).and_then(|at| self.world.machine(at));
            let own = machine.map(|c| c.status().segment_count);
            if own == Some(self.held.len() as u64) {
                return Ok(());
            }
            if self.world.now() > until {
                let held: Vec<_> = self.held.keys().collect();
                return Err(format!("leak: member {number} has {own:?} segments of its own, held are {held:?}"));
            }
            self.run_until(self.world.now() + Duration::from_millis(500), |_| false)?;
        }
    }

    /// Members go, and with them what is kept for them.
    pub(crate) fn drop_members(&mut self) -> Result<(), String> {
        for number in 1..=self.separate.members.len() {
            self.drop_member(number);
        }
        let none = |r: &Run| {
            let status = r.current.and_then(|at| r.world.machine(at)).map(Controller::status);
            status.is_some_and(|status| status.dependents.is_empty())
        };
        let until = self.world.now() + Duration::from_secs(60);
        if self.run_until(until, none)? {
            return Ok(());
        }
        let status = self.current.and_then(|at| self.world.machine(at)).map(Controller::status);
        Err(format!("members are not forgotten: {:?}", status.map(|status| status.dependents)))
    }
}
