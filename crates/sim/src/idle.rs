//! A host with many volumes that nobody uses, on real nodes: how often their controllers are entered, and what they hear of
//! when something happens after all.

use crate::multi_host::machine::HostMachine;
use crate::world::{MachineAt, World};
use holdfast_base::{
    BlockOp, BlockRequest, Buf, InstanceId, Instant, MetaRequest, MetaVersion, NodeId, RequestToken, Token, VolumeId,
};
use holdfast_format::forward::Client as Association;
use holdfast_format::geometry::Layout;
use holdfast_format::root::{Root, root_key};
use holdfast_host::{
    Budget, Caller, Care, Connection, Effect, Event, Host, Isolation, Limits, Lists, OpenSpec, Order, Outcome,
    PackingShare, Room, Source,
};
use holdfast_store as store;
use holdfast_volume::State;
use std::collections::BTreeMap;
use std::time::Duration;

const SIZE_BYTES: u64 = 16 << 20;

/// Volumes have this time to open.
const OPEN_WITHIN: Duration = Duration::from_secs(30);

pub struct Idle {
    pub world: World<HostMachine>,
    at: MachineAt,
    /// Requests of guests, and those that were answered well.
    asked: u64,
    answered: u64,
    /// What came of orders with a ticket of their own.
    pub outcomes: BTreeMap<u64, Outcome>,
}

impl Idle {
    /// Three nodes, and one host that has opened so many volumes.
    pub fn new(seed: u64, volumes: u32) -> Idle {
        let mut world = World::new(seed, false);
        let sizing =
            store::JournalSizing { journal_bytes: 16 << 20, unit_bytes: 512 << 10, shard_bytes_mean: 16 << 10 };
        for n in 1..=3 {
            let config = store::NodeConfig::new(world.grid, NodeId(n), InstanceId(0));
            let node = world.add_node(config, sizing, &[256 << 20]);
            world.start_node(node);
        }
        let layout: Layout = "mirror:2".parse().expect("a layout");
        let names = (1..=volumes).map(|n| (VolumeId(u128::from(n)), format!("v{n}")));
        for (volume, name) in names.clone() {
            let root = Root::new(world.grid, volume, &name, SIZE_BYTES, layout);
            let (key, value) = (root_key(volume), Some(root.encode()));
            world.meta.apply(&MetaRequest::Swap { key, expect: MetaVersion::ABSENT, value, guard: None });
        }
        world.add_host();
        let host = Host::new(&holdfast_host::Config {
            reactor: holdfast_host::homes::FRONT,
            reactors: 1,
            grid: world.grid,
            name: "idle".to_string(),
            instance: InstanceId(1 << 64),
            budget: Budget { writeback_bytes: 64 << 20, map_cache_bytes: 64 << 20, read_ahead_bytes: 0 },
            care: Care { rebuild_after: Duration::from_secs(600), scrub_every: Duration::from_secs(14 * 86_400) },
            isolation: Some(Isolation::default()),
            packing: PackingShare::default(),
            room: Room { max: volumes as usize + 8, kept_for_local: 8 },
            expected_volumes: volumes as usize,
            mutations: holdfast_host::Mutations::default(),
            of_controllers: holdfast_volume::Mutations::default(),
            tune: |_| {},
        });
        let at = world.attach(0, HostMachine::new(host));
        let mut idle = Idle { world, at, asked: 0, answered: 0, outcomes: BTreeMap::new() };
        let access = Order::Access { lists: Lists::new(), limits: Limits::new() };
        idle.tell(Event::Order { ticket: u64::MAX, order: access });
        let shared = names.clone().map(|(volume, _)| volume).collect();
        idle.tell(Event::Order { ticket: u64::MAX, order: Order::Share(shared) });
        for (volume, name) in names {
            let root = Root::new(idle.world.grid, volume, &name, SIZE_BYTES, layout);
            let spec = OpenSpec::of(&root, true, Default::default(), None);
            idle.tell(Event::Order { ticket: u64::MAX, order: Order::Open { spec, exported: true } });
        }
        let late = idle.world.now() + OPEN_WITHIN;
        while idle.host().volumes().any(|volume| volume.controller().state() != State::Open) {
            assert!(idle.world.now() < late && idle.world.step(), "not all volumes open");
        }
        idle
    }

    pub fn host(&self) -> &Host {
        &self.world.machine(self.at).expect("it runs").host
    }

    pub fn tell(&mut self, event: Event) {
        self.world
            .with(self.at, |machine, now, out| machine.act(|host, effects| host.handle(now, event, effects), out));
        self.see_to();
    }

    /// A guest comes to each volume, writes to it, and goes when all is answered.
    pub fn write_to_all(&mut self, offset: u64, data: &Buf) {
        let names: Vec<String> = self.host().volumes().map(|volume| volume.name().to_string()).collect();
        let mut sessions = Vec::new();
        for (number, name) in names.iter().enumerate() {
            let (label, association) = (name.clone(), Association { label: name.clone(), ..Association::default() });
            let to = Token(number as u64);
            let connection = Connection { to, label, source: Source::Local, caller: Caller::Local, association };
            let opened = self.world.with(self.at, |machine, now, out| {
                machine.act(|host, effects| host.open_session(now, connection, name, effects), out)
            });
            let (session, _) = opened.expect("the host runs").expect("a guest may come");
            sessions.push(session);
            self.asked += 1;
            let op = BlockOp::Write { offset, data: data.clone() };
            self.tell(Event::Request { session, request: BlockRequest { token: RequestToken(self.asked), op } });
        }
        let late = self.world.now() + OPEN_WITHIN;
        while self.answered < self.asked {
            assert!(self.world.now() < late && self.world.step(), "not all writes are answered");
            self.see_to();
        }
        sessions.into_iter().for_each(|session| self.tell(Event::Close { session }));
    }

    /// What the host wants besides calls: answers count.
    fn see_to(&mut self) {
        while let Some(wish) = self.world.machine_mut(self.at).and_then(|machine| machine.wishes.pop_front()) {
            match wish {
                Effect::Reply { reply, .. } => {
                    assert!(reply.result.is_ok(), "{reply:?}");
                    self.answered += 1;
                }
                Effect::Done { ticket, outcome } if ticket != u64::MAX => {
                    let former = self.outcomes.insert(ticket, outcome);
                    assert!(former.is_none(), "an order is answered once");
                }
                _ => {}
            }
        }
    }

    /// Lets time pass. How often controllers were entered meanwhile, in all.
    pub fn pass(&mut self, span: Duration) -> u64 {
        let (before, until) = (self.host().entered(), self.world.now() + span);
        self.until(until, |_| false);
        self.host().entered() - before
    }

    /// Lets time pass until something is so, or it is late. Whether it is so.
    pub fn until(&mut self, late: Instant, is_so: impl Fn(&Host) -> bool) -> bool {
        while !is_so(self.host()) {
            if self.world.next_at().is_none_or(|at| at > late) {
                return false;
            }
            self.world.step();
            self.see_to();
        }
        true
    }
}
