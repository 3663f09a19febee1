//! Who takes over a volume that fails over, and when.

use holdfast_base::{DeviceId, Effects, Epoch, GridId, Instant, LedgerId, MetaVersion, NodeId, VolumeId};
use holdfast_cluster::view::Record;
use holdfast_cluster::{Action, Change, Cluster, Config, Effect, Event, View};
use holdfast_format::geometry::Layout;
use holdfast_format::ledger::{AckRule, LedgerRef, Leg};
use holdfast_format::meta::{ExportRecord, decode, encode, export_key, host_key};
use holdfast_format::root::{Root, root_key};
use std::collections::BTreeSet;
use std::time::Duration;

const VOLUME: VolumeId = VolumeId(7);
const LEASE: Duration = Duration::from_secs(5);

/// One host of a grid: its records, its machine, and nodes that answer what they are set to.
struct Host {
    view: View,
    cluster: Cluster,
    now: Instant,
    revision: u64,
    /// Nodes that hear a host that is gone.
    hearing: BTreeSet<(NodeId, &'static str)>,
    /// Nodes that answer.
    nodes: BTreeSet<NodeId>,
    asked: Vec<String>,
    /// How often its map was to be read.
    reads: usize,
    taken: Option<ExportRecord>,
}

impl Host {
    /// Host `me` of a grid whose hosts a, b and c are there. The volume's log is on nodes 1, 2 and 3.
    fn new(me: &str, export: Option<ExportRecord>) -> Host {
        let leg = |n| Leg { node: NodeId(n), device: DeviceId(n.into()) };
        let id = LedgerId { epoch: Epoch(1), n: 0 };
        let open = LedgerRef { id, legs: (1..=3).map(leg).collect(), rule: AckRule::flat(1), sealed: None };
        let root = Root {
            epoch: Epoch(1),
            ledgers: vec![open],
            ..Root::new(GridId(1), VOLUME, "v", 1 << 30, Layout::DEFAULT)
        };
        let mut host = Host {
            view: View::new(None, None),
            cluster: Cluster::new(Config::new(me, LEASE)),
            now: Instant::ZERO,
            revision: 0,
            hearing: BTreeSet::new(),
            nodes: (1..=3).map(NodeId).collect(),
            asked: Vec::new(),
            reads: 0,
            taken: None,
        };
        host.put(&root_key(VOLUME), Some(root.encode()));
        ["a", "b", "c"].iter().for_each(|name| host.put(&host_key(name), Some(b"{\"home\":\"\"}".to_vec())));
        if let Some(export) = export {
            host.put(&export_key(VOLUME), Some(encode(&export)));
        }
        host.tell(Event::Store { is_right: true });
        host.run_for(Duration::from_secs(20));
        host
    }

    fn put(&mut self, key: &str, value: Option<Vec<u8>>) {
        self.revision += 1;
        let version = MetaVersion(self.revision);
        let record = value.map(|value| Record { key: key.to_string(), version, value: value.into() });
        self.view.apply(vec![Change { revision: self.revision, key: key.to_string(), record }]).unwrap();
        let changes = self.view.take_changes();
        self.tell(Event::Changed(changes));
    }

    fn lose(&mut self, host: &str) {
        self.put(&host_key(host), None);
    }

    fn tell(&mut self, event: Event) {
        let mut out = Effects::new();
        self.cluster.handle(self.now, &self.view, event, &mut out);
        for effect in out.drain().collect::<Vec<_>>() {
            match effect {
                Effect::AskNodes { host } => {
                    let hears = |node: &NodeId| self.hearing.iter().any(|(of, heard)| of == node && *heard == host);
                    let nodes = self.nodes.iter().copied().filter(|node| !hears(node)).collect();
                    self.asked.push(host.clone());
                    self.tell(Event::Silent { host, nodes });
                }
                Effect::Act { action: Action::Commit { writes, .. }, .. } => {
                    let value = writes.first().and_then(|(_, value)| value.clone()).expect("a record is written");
                    self.taken = Some(decode(&value).unwrap());
                }
                Effect::Act { action: Action::Read { .. }, .. } => self.reads += 1,
                Effect::Act { .. } | Effect::Granted { .. } => {}
            }
        }
    }

    fn run_for(&mut self, span: Duration) {
        let end = self.now + span;
        while self.now < end && self.taken.is_none() {
            self.now = self.now + Duration::from_millis(100);
            self.tell(Event::Tick);
        }
    }
}

fn served_by(host: &str) -> ExportRecord {
    ExportRecord { host: host.to_string(), failover: true, ..ExportRecord::default() }
}

#[test]
fn a_volume_is_taken_over_though_nodes_that_its_log_does_not_need_are_away() {
    for away in 0..5 {
        let mut host = Host::new("b", Some(served_by("a")));
        host.tell(Event::NodesAway((0..away).map(|n| NodeId(10 + n)).collect()));
        host.lose("a");
        host.run_for(Duration::from_secs(9));
        assert_eq!(host.taken.is_some(), away <= 1, "one that lacks fewer of {away} comes first");
        host.run_for(Duration::from_secs(9));
        assert_eq!(host.taken.expect("nobody else has come").host, "b");
    }
}

#[test]
fn a_volume_is_not_taken_over_by_whoever_reaches_too_little_of_its_log() {
    let mut host = Host::new("b", Some(served_by("a")));
    host.nodes = BTreeSet::from([NodeId(1)]);
    host.tell(Event::NodesAway(BTreeSet::from([NodeId(2), NodeId(3)])));
    host.lose("a");
    host.run_for(Duration::from_secs(60));
    assert_eq!(host.taken, None);
}

#[test]
fn a_volume_is_taken_over_that_is_given_to_a_host_which_is_gone_already() {
    for me in ["b", "c"] {
        let mut host = Host::new(me, None);
        host.lose("a");
        host.put(&export_key(VOLUME), Some(encode(&served_by("a"))));
        host.run_for(Duration::from_secs(30));
        assert!(host.taken.is_some(), "{me} waits for its turn for ever");
    }
}

#[test]
fn in_a_hand_over_both_hosts_must_be_silent() {
    let handed = ExportRecord { from: Some("a".to_string()), ..served_by("b") };
    let mut host = Host::new("c", Some(handed));
    host.hearing.extend([(NodeId(1), "a"), (NodeId(2), "a")]);
    host.lose("b");
    host.run_for(Duration::from_secs(30));
    assert_eq!(host.taken, None, "it may be serving");
    host.lose("a");
    host.run_for(Duration::from_secs(30));
    assert_eq!(host.taken, None, "it lacks the store, and no nodes");
    assert!(host.asked.iter().any(|name| name == "a"));
    host.hearing.clear();
    host.run_for(Duration::from_secs(30));
    assert_eq!(host.taken.map(|record| (record.host, record.from)), Some(("c".to_string(), None)));
}

#[test]
fn a_hand_over_waits_for_what_the_log_needs_and_for_nothing_else() {
    let handed = ExportRecord { from: Some("a".to_string()), ..served_by("b") };
    for (away, begins) in
        [(&[][..], true), (&[7, 8, 9], true), (&[3, 7, 8], true), (&[2, 3], false), (&[1, 2, 3], false)]
    {
        let mut host = Host::new("b", None);
        host.tell(Event::NodesAway(away.iter().copied().map(NodeId).collect()));
        host.put(&export_key(VOLUME), Some(encode(&handed)));
        host.run_for(Duration::from_secs(3));
        assert_eq!(host.reads > 0, begins, "without nodes {away:?}");
        host.tell(Event::NodesAway(BTreeSet::new()));
        host.run_for(Duration::from_secs(3));
        assert!(host.reads > 0, "they are back");
    }
}
