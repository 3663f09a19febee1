//! What a seed stands for: the grid, the volume, the faults and the work of one run.
//!
//! Sizes are small on purpose, so that a few hundred requests reach everything: ledger rolls, destage, short segments,
//! the cleaner, checkpoints and their folds, full journals.

use crate::disk::DiskFaults;
use crate::faults::Weights;
use crate::workload::Mix;
use holdfast_base::{MediaClass, Prng};
use holdfast_format::geometry::Layout;
use holdfast_format::packing::Compression;
use holdfast_format::tier::{FirstTier, TierSize, Tiers};
use holdfast_store as store;
use holdfast_volume as volume;
use std::time::Duration;

/// What a run stresses; chosen by its seed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Profile {
    /// Nothing fails: whatever goes wrong here is plain wrong.
    Calm,
    /// A bit of everything.
    Mixed,
    /// Owners change all the time, and old ones go on sending.
    Takeovers,
    /// Little room in the log, many overwrites and discards, owners that crash.
    Trims,
    /// Disks are swapped for blank ones while owners crash.
    BlankDisks,
    /// The lights go out.
    PowerLoss,
    /// The disks of one node lie.
    SilentDamage,
    /// Nodes, links and disks that are slow or silent rather than dead.
    Gray,
    /// The metadata store is slow, absent, or does not say.
    Metadata,
    /// Disks too small for the work.
    Full,
    /// Owners die while one leg lags behind, and another that doesn't is out as well.
    Ambush,
    /// The disks of one node come back blank under their ids, while nodes that remember stand still.
    Amnesia,
}

pub const PROFILES: [Profile; 12] = [
    Profile::Calm,
    Profile::Mixed,
    Profile::Takeovers,
    Profile::Trims,
    Profile::BlankDisks,
    Profile::PowerLoss,
    Profile::SilentDamage,
    Profile::Gray,
    Profile::Metadata,
    Profile::Full,
    Profile::Ambush,
    Profile::Amnesia,
];

/// Longer than any node is away.
const NEVER: Duration = Duration::from_secs(3600);

/// Everything that a run is made from.
#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub profile: Profile,
    pub layout: Layout,
    pub nodes: usize,
    pub disks: usize,
    pub hosts: usize,
    pub disk_bytes: u64,
    pub sizing: store::JournalSizing,
    /// Small ones put more journal batches in flight at a time.
    pub batch_records_max: usize,
    /// Operations that a disk gets at a time.
    pub disk_in_flight_max: usize,
    /// Reactors of a node, each with some of its disks.
    pub node_reactors: u16,
    /// Memory for what is read ahead.
    pub read_ahead_bytes: u64,
    /// Segments that a step of the cleaner's search looks at: in some runs fewer than the table has.
    pub search_step: usize,
    pub volume_bytes: u64,
    pub writeback_bytes: u64,
    pub segment_bytes: u32,
    pub direct_bytes: u32,
    pub map_cache_bytes: u64,
    pub destage_age: Duration,
    pub clean_dead_per_mille: u32,
    pub scrub_every: Duration,
    /// A volume's map is counted anew this often.
    pub audit_every: Duration,
    /// How long a disk must be slow to be bypassed: disks are slow for up to 0.8 s.
    pub slow_after: Duration,
    /// Most snapshots at a time.
    pub snapshots_max: usize,
    /// Most clones of snapshots in a run.
    pub clones_max: usize,
    /// Most separate clones in a run, and clones of these.
    pub separate_max: usize,
    /// There is a sharing domain: a store, and one to three volumes that often hold the same.
    pub sharing: bool,
    /// The first volume is a member, too: with its snapshots, clones and hand-overs.
    pub first_shares: bool,
    /// Owners of stores and members change, and members leave, this much less often than those of other volumes.
    pub domain_calm: u64,
    /// What nobody names is forgotten by a store after so long.
    pub forget_after: Duration,
    /// Groups of snapshots are taken now and then.
    pub groups: bool,
    /// Disks are drained now and then.
    pub drains: bool,
    /// The layout is changed now and then.
    pub relayouts: bool,
    /// Each host has the node of its own number beside it.
    pub local: bool,
    /// Nodes have disks of different classes, and this share of the fast ones is for copies of what is read; zero where there is
    /// no read cache.
    pub read_cache_per_mille: u32,
    /// Its volumes are encrypted.
    pub encrypted: bool,
    /// How its volumes' blocks are packed, and whether they are from the start, or from some time on.
    pub compression: Compression,
    pub packs_at_once: bool,
    /// Of each disk of a node; of the others nothing is known.
    pub media: Vec<MediaClass>,
    /// Of the volume.
    pub tiers: Tiers,
    /// Nodes are away for up to 1.5 s.
    pub rebuild_after: Duration,
    pub fold_runs: usize,
    pub slice_runs: usize,
    pub requests: u32,
    pub depth: usize,
    pub think_us: u64,
    pub mix: Mix,
    pub weights: Weights,
    /// Mean time between two faults.
    pub fault_pace: Duration,
    pub rotten: Option<DiskFaults>,
    /// Hosts greet nodes whose devices are still opening.
    pub greet_early: bool,
    /// Hosts and nodes are of two releases.
    pub mixed: bool,
    /// Half-way through all hosts die and the metadata store is lost.
    pub loses_metadata: bool,
    pub recover_mutations: holdfast_cluster::recover::Mutations,
    pub volume_mutations: volume::Mutations,
    pub store_mutations: store::Mutations,
}

/// Few in most runs, so that operations wait in the node and pass each other there.
pub fn disk_in_flight_max(seed: u64) -> usize {
    *Prng::new(seed ^ 0xdeb7).pick(&[1, 2, 4, 16, 64])
}

/// In most runs one, as on small machines.
pub fn node_reactors(seed: u64) -> u16 {
    *Prng::new(seed ^ 0x4ac7).pick(&[1, 1, 1, 2, 3])
}

impl Plan {
    pub fn from_seed(seed: u64) -> Plan {
        let mut prng = Prng::new(seed);
        let profile = *prng.pick(&PROFILES);
        let layout = match prng.below(10) {
            0..4 => Layout::Parity { data: 2, parity: 1 },
            4..7 => Layout::Mirror { copies: 2 },
            7..9 => Layout::Mirror { copies: 3 },
            _ => Layout::Parity { data: 4, parity: 2 },
        };
        let nodes_min = u64::from(layout.width()).max(u64::from(layout.failures()) + 2);
        let packs = Prng::new(seed ^ 0x9ac4ed).chance(333);
        // What is packed has whole rows: segments have some of them, whatever the layout. Full grids are too small for that.
        let rows = if packs && profile != Profile::Full { 4 } else { 1 };
        let segment_bytes = (64 << 10 << prng.below(3)) * rows;
        let mut plan = Plan {
            seed,
            profile,
            layout,
            nodes: prng.between(nodes_min, nodes_min + if nodes_min < 5 { 2 } else { 1 }) as usize,
            disks: prng.between(1, 2) as usize,
            hosts: 2,
            disk_bytes: 24 << 20,
            sizing: store::JournalSizing {
                journal_bytes: prng.between(3, 6) << 20,
                unit_bytes: 64 << 10 << prng.below(3),
                shard_bytes_mean: 16 << 10,
            },
            volume_bytes: 1 << 20 << prng.below(3),
            writeback_bytes: 512 << 10 << prng.below(3),
            compression: match packs {
                true => *Prng::new(seed ^ 0x25cd).pick(&[Compression::Lz4, Compression::Auto]),
                false => Compression::Off,
            },
            packs_at_once: Prng::new(seed ^ 0x25ce).chance(600),
            segment_bytes,
            direct_bytes: segment_bytes / 2,
            map_cache_bytes: 64 << 10 << prng.below(4),
            destage_age: Duration::from_millis(prng.between(10, 400)),
            clean_dead_per_mille: prng.between(150, 600) as u32,
            snapshots_max: *Prng::new(seed ^ 0x0a11).pick(&[0, 0, 1, 3]),
            clones_max: *Prng::new(seed ^ 0xc10e).pick(&[0, 1, 3]),
            separate_max: *Prng::new(seed ^ 0xfa31).pick(&[0, 0, 2, 4]),
            sharing: Prng::new(seed ^ 0x5a4e).chance(300),
            domain_calm: *Prng::new(seed ^ 0xca15).pick(&[1, 10, 100]),
            first_shares: Prng::new(seed ^ 0x5a4f).chance(500),
            forget_after: *Prng::new(seed ^ 0xf049e7).pick(&[
                Duration::from_millis(20),
                Duration::from_millis(300),
                Duration::from_secs(12),
            ]),
            groups: Prng::new(seed ^ 0x6709).chance(400),
            drains: Prng::new(seed ^ 0xd5a1).chance(300),
            relayouts: Prng::new(seed ^ 0x1a70).chance(250),
            local: Prng::new(seed ^ 0x4ea2).chance(300),
            read_cache_per_mille: *Prng::new(seed ^ 0xcac4e).pick(&[0, 0, 0, 20, 100, 400]),
            encrypted: Prng::new(seed ^ 0x5ec2).chance(300),
            media: Vec::new(),
            tiers: Tiers::default(),
            audit_every: *Prng::new(seed ^ 0x3a7c).pick(&[Duration::from_millis(200), Duration::from_secs(2), NEVER]),
            scrub_every: *Prng::new(seed ^ 0x5c2b).pick(&[Duration::from_millis(500), Duration::from_secs(5), NEVER]),
            rebuild_after: *Prng::new(!seed).pick(&[Duration::from_millis(200), Duration::from_secs(1), NEVER]),
            slow_after: *Prng::new(seed ^ 0x510).pick(&[Duration::from_millis(60), Duration::from_secs(30)]),
            fold_runs: 8 << prng.below(6),
            slice_runs: *Prng::new(seed ^ 0x511ce).pick(&[1, 64, 4096]),
            batch_records_max: *prng.pick(&[1, 4, 512]),
            disk_in_flight_max: disk_in_flight_max(seed),
            node_reactors: node_reactors(seed),
            read_ahead_bytes: *Prng::new(seed ^ 0xa4ead).pick(&[0, 64 << 10, 256 << 10, 1 << 20]),
            search_step: *Prng::new(seed ^ 0x5ea4c).pick(&[4, 16, 2_048]),
            requests: prng.between(120, 320) as u32,
            depth: prng.between(1, 12) as usize,
            think_us: prng.between(50, 4_000),
            mix: Mix::default(),
            weights: Weights::default(),
            fault_pace: Duration::from_millis(prng.between(15, 150)),
            rotten: None,
            greet_early: seed % 2 == 1,
            mixed: Prng::new(seed ^ 0x3e1ea5e).chance(300),
            loses_metadata: Prng::new(seed ^ 0x1057).chance(300),
            recover_mutations: holdfast_cluster::recover::Mutations::default(),
            volume_mutations: volume::Mutations::default(),
            store_mutations: store::Mutations::default(),
        };
        plan.nest(Prng::new(seed ^ 0x4e57));
        plan.lay_over_devices(Prng::new(seed ^ 0xdef1));
        plan.tier(Prng::new(seed ^ 0x71e4));
        plan.apply_profile(&mut prng);
        if plan.read_cache_per_mille > 0 {
            plan.read_again();
        }
        if Prng::new(seed ^ 0x5e90).chance(250) {
            plan.mix = Mix { read: 2 * plan.mix.read, in_order: 800, ..plan.mix };
        }
        plan.relayouts &= plan.profile != Profile::Full;
        if plan.relayouts {
            // For a while it lies there twice.
            plan.disk_bytes += 3 * plan.volume_bytes;
        }
        plan.leave_out_what_does_not_fit();
        plan
    }

    /// What the grid, or the profile, has no room for.
    fn leave_out_what_does_not_fit(&mut self) {
        let plan = self;
        plan.drains &= plan.domains() > usize::from(plan.layout.width()) && plan.profile != Profile::Full;
        plan.groups &= plan.snapshots_max > 0 && plan.profile != Profile::Full;
        if plan.snapshots_max == 0 || plan.profile == Profile::Full {
            plan.separate_max = 0;
        }
        plan.sharing &= plan.profile != Profile::Full && !plan.loses_metadata;
        // Members keep their layout, and have no separate clones.
        plan.first_shares &=
            plan.sharing && plan.separate_max == 0 && !plan.relayouts && plan.tiers == Tiers::default();
        if plan.sharing {
            plan.disk_bytes += 12 * plan.volume_bytes;
            // Content has to be written, to cool and to be told of: guests take their time.
            plan.think_us = plan.think_us.max(1_000) * 12;
        }
        if plan.profile != Profile::Full {
            // Each may hold the whole volume once more.
            let at_once = if plan.groups { 1 + plan.clones_max } else { 0 };
            plan.disk_bytes +=
                3 * (plan.snapshots_max + plan.clones_max + plan.separate_max + at_once) as u64 * plan.volume_bytes;
        }
    }

    /// One in eight has a nested layout, on two nodes or three.
    fn nest(&mut self, mut prng: Prng) {
        if prng.chance(125) {
            self.layout = *prng.pick(&[Layout::NestedMirror, Layout::NestedParity { data: 2, parity: 1 }]);
            self.nodes = prng.between(2, 3) as usize;
            self.disks = usize::from(self.layout.shards_a_domain()) + prng.below(2) as usize;
        }
    }

    /// One in four has a first tier: on the same media, or a mirror on flash before disks.
    fn tier(&mut self, mut prng: Prng) {
        if !prng.chance(250) {
            return;
        }
        let is_nested = self.layout.is_nested();
        let copies = self.layout.failures() + 1;
        let layout = match self.layout {
            _ if is_nested => Layout::NestedMirror,
            of if of.is_on_devices() => Layout::DeviceMirror { copies },
            _ => Layout::Mirror { copies },
        };
        let is_hybrid = prng.chance(600);
        if layout == self.layout && !is_hybrid {
            return;
        }
        let size = TierSize::PerMille(*prng.pick(&[60, 200, 500]));
        let mut first = FirstTier { layout, media: None, size };
        if is_hybrid {
            let flash = match layout.is_on_devices() {
                true => usize::from(copies).div_ceil(self.nodes),
                false => usize::from(layout.shards_a_domain()),
            };
            let disks = self.disks.max(usize::from(self.layout.shards_a_domain()));
            self.disks = flash + disks;
            self.media = [vec![MediaClass::Ssd; flash], vec![MediaClass::Hdd; disks]].concat();
            first.media = Some(MediaClass::Ssd);
            self.tiers.capacity = prng.chance(800).then_some(MediaClass::Hdd);
        }
        self.tiers.first = prng.chance(900).then_some(first);
    }

    /// One in eight of the others has a layout over devices, on one node to three.
    fn lay_over_devices(&mut self, mut prng: Prng) {
        if !self.layout.is_nested() && prng.chance(125) {
            self.layout = *prng.pick(&[
                Layout::DeviceMirror { copies: 2 },
                Layout::DeviceMirror { copies: 2 },
                Layout::DeviceMirror { copies: 3 },
                Layout::DeviceParity { data: 2, parity: 1 },
                Layout::DeviceParity { data: 2, parity: 2 },
            ]);
            self.nodes = *prng.pick(&[1, 1, 2, 3]);
            let least = usize::from(self.layout.width()).div_ceil(self.nodes);
            self.disks = least + prng.below(3) as usize;
        }
    }

    /// Two disks a node at least, and guests that read the same again and again; disks that lie do so more often, for what is
    /// written for a cache is little.
    fn read_again(&mut self) {
        self.disks = self.disks.max(2);
        self.requests = self.requests * 3 / 2;
        if let Some(faults) = &mut self.rotten {
            (faults.lost_write, faults.misdirected_write) = (8 * faults.lost_write, 8 * faults.misdirected_write);
        }
        self.mix = Mix { read: 2 * self.mix.read, hot: self.mix.hot.max(800), ..self.mix };
    }

    fn apply_profile(&mut self, prng: &mut Prng) {
        let mixed = Weights::mixed();
        match self.profile {
            Profile::Calm => {}
            Profile::Mixed => self.weights = mixed,
            Profile::Takeovers => {
                let (takeover, host_hang, host_crash, host_isolated) = (40, 15, 10, 10);
                self.weights =
                    Weights { takeover, host_hang, host_crash, host_isolated, hang: 5, slow_link: 5, ..mixed };
                self.fault_pace = self.fault_pace.min(Duration::from_millis(60));
            }
            Profile::Trims => {
                self.writeback_bytes = 256 << 10;
                self.destage_age = Duration::from_millis(prng.between(5, 40));
                self.mix = Mix { discard: 12, zeroes: 8, bulk: 40, hot: 850, ..self.mix };
                self.weights = Weights { host_crash: 20, takeover: 10, grid_power: 5, crash: 5, ..Weights::default() };
                self.volume_bytes = 1 << 20;
            }
            Profile::BlankDisks => {
                self.weights = Weights {
                    blank_disk: 20,
                    takeover: 15,
                    host_crash: 15,
                    slow_disk: 10,
                    beyond: 8,
                    ..Weights::default()
                };
                self.fault_pace = self.fault_pace.min(Duration::from_millis(80));
                self.destage_age *= 4;
            }
            Profile::PowerLoss => self.weights = Weights { grid_power: 20, power: 15, host_crash: 8, ..mixed },
            Profile::SilentDamage => {
                self.weights =
                    Weights { rot: 40, takeover: 8, host_crash: 8, grid_power: 5, reset: 5, ..Weights::default() };
                let (lost_write, misdirected_write) = (prng.below(20) as u32, prng.below(20) as u32);
                self.rotten = Some(DiskFaults {
                    read_error: prng.below(8) as u32,
                    write_error: 0,
                    lost_write,
                    misdirected_write,
                });
                if Prng::new(self.seed ^ 0x11e5).chance(700) {
                    self.read_cache_per_mille = 400;
                }
            }
            Profile::Gray => {
                let (hang, one_way, slow_disk, stuck_disk, slow_link) = (15, 12, 12, 15, 10);
                let (glitch, reset) = (8, 5);
                self.weights =
                    Weights { hang, one_way, slow_disk, stuck_disk, slow_link, glitch, reset, ..Weights::default() };
            }
            Profile::Metadata => {
                let (meta_outage, meta_unknown, crash, hang, takeover) = (15, 25, 20, 10, 20);
                self.weights = Weights { meta_outage, meta_unknown, crash, hang, takeover, host_crash: 10, ..mixed };
            }
            Profile::Full => {
                self.disk_bytes = 7 << 20;
                self.sizing.journal_bytes = 3 << 20;
                self.sizing.unit_bytes = 64 << 10;
                self.volume_bytes = 8 << 20;
                self.mix = Mix { bulk: 250, discard: 10, hot: 200, ..self.mix };
                self.weights = Weights { crash: 10, host_crash: 5, takeover: 5, ..Weights::default() };
            }
            Profile::Ambush => self.lay_ambushes(),
            Profile::Amnesia => self.forget_disks(),
        }
    }

    fn lay_ambushes(&mut self) {
        let (takeover, grid_power, reset, slow_disk) = (3, 2, 3, 3);
        self.weights = Weights { ambush: 40, takeover, grid_power, reset, slow_disk, ..Weights::default() };
        self.fault_pace = self.fault_pace.min(Duration::from_millis(60));
        self.think_us = self.think_us.min(1_000);
        self.requests *= 2;
        self.destage_age *= 4;
    }

    fn forget_disks(&mut self) {
        // What leaves the rotten node as the only one, the loss of power say, puts the log there alone.
        self.weights = Weights { amnesia: 30, takeover: 8, host_crash: 8, ..Weights::default() };
        self.rotten = Some(DiskFaults::default());
        self.fault_pace = self.fault_pace.min(Duration::from_millis(80));
        self.destage_age *= 4;
    }

    /// Fault domains of the grid.
    pub fn domains(&self) -> usize {
        if self.layout.is_on_devices() { self.nodes * self.disks } else { self.nodes }
    }

    /// Whether writes may run out of space.
    pub fn space_may_end(&self) -> bool {
        self.profile == Profile::Full
    }
}
