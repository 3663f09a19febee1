//! What an opening rests on, and how long whoever hands a volume over is asked.

use holdfast_base::{Effects, GridId, Instant, MetaVersion, VolumeId};
use holdfast_cluster::assign::REACH_MAX;
use holdfast_cluster::view::Record;
use holdfast_cluster::{Action, Change, Cluster, Config, Effect, Event, Local, Outcome, Reading, View};
use holdfast_format::geometry::Layout;
use holdfast_format::meta::{ExportRecord, encode, export_key, host_key};
use holdfast_format::root::{Root, root_key};
use std::time::Duration;

const VOLUME: VolumeId = VolumeId(7);

/// Host a of a grid of two.
struct Host {
    view: View,
    cluster: Cluster,
    now: Instant,
    revision: u64,
    /// With the time at which they began.
    openings: Vec<(Instant, MetaVersion)>,
    asked: usize,
}

impl Host {
    fn new(export: &ExportRecord) -> Host {
        let mut host = Host {
            view: View::new(None, None),
            cluster: Cluster::new(Config::new("a", Duration::from_secs(5))),
            now: Instant::ZERO,
            revision: 0,
            openings: Vec::new(),
            asked: 0,
        };
        host.put(&root_key(VOLUME), Root::new(GridId(1), VOLUME, "v", 1 << 30, Layout::DEFAULT).encode());
        for name in ["a", "b"] {
            host.put(&host_key(name), b"{\"home\":\"\"}".to_vec());
        }
        host.tell(Event::Store { is_right: true });
        host.decide(export);
        host
    }

    fn put(&mut self, key: &str, value: Vec<u8>) -> MetaVersion {
        self.revision += 1;
        let version = MetaVersion(self.revision);
        let record = Some(Record { key: key.to_string(), version, value: value.into() });
        self.view.apply(vec![Change { revision: self.revision, key: key.to_string(), record }]).unwrap();
        let changes = self.view.take_changes();
        self.tell(Event::Changed(changes));
        version
    }

    fn decide(&mut self, export: &ExportRecord) -> MetaVersion {
        self.put(&export_key(VOLUME), encode(export))
    }

    fn local(&mut self, local: Option<Local>) {
        self.tell(Event::Local { volume: VOLUME, local });
    }

    /// Maps are read at once, and nobody can be asked.
    fn tell(&mut self, event: Event) {
        let mut out = Effects::new();
        self.cluster.handle(self.now, &self.view, event, &mut out);
        for effect in out.drain().collect::<Vec<_>>() {
            let Effect::Act { id, action } = effect else { continue };
            let outcome = match action {
                Action::Open { by, .. } => {
                    self.openings.push((self.now, by));
                    Outcome::Done
                }
                Action::Read { .. } => Outcome::Reading(Reading::Read),
                Action::AskToYield { .. } => {
                    self.asked += 1;
                    Outcome::Asked(false)
                }
                _ => Outcome::Done,
            };
            self.tell(Event::Outcome { id, outcome });
        }
    }

    fn run_for(&mut self, span: Duration) {
        let end = self.now + span;
        while self.now < end {
            self.now = self.now + Duration::from_millis(10);
            self.tell(Event::Tick);
        }
    }

    fn rests_on(&self) -> Vec<MetaVersion> {
        self.openings.iter().map(|(_, by)| *by).collect()
    }
}

fn here() -> ExportRecord {
    ExportRecord { host: "a".to_string(), ..ExportRecord::default() }
}

#[test]
fn an_opening_under_way_rests_on_the_newest_record_that_asks_for_it() {
    let mut host = Host::new(&here());
    let first = MetaVersion(host.revision);
    host.local(Some(Local::Opening));
    host.run_for(Duration::from_secs(5));
    assert_eq!(host.rests_on(), [first], "it is begun once");
    let second = host.decide(&ExportRecord { shared: true, ..here() });
    host.run_for(Duration::from_secs(5));
    assert_eq!(host.rests_on(), [first, second]);
    // Handed over, it is another opening: whoever has it is asked first.
    host.decide(&ExportRecord { from: Some("b".to_string()), ..here() });
    host.run_for(Duration::from_secs(5));
    assert_eq!(host.rests_on(), [first, second]);
}

#[test]
fn who_hands_over_is_asked_anew_after_a_command_has_held_the_volume() {
    let mut host = Host::new(&ExportRecord { from: Some("b".to_string()), ..here() });
    host.local(Some(Local::Reading));
    host.run_for(REACH_MAX / 2);
    assert!(host.asked > 0 && host.openings.is_empty());
    host.tell(Event::Hold { volume: VOLUME, ticket: 1 });
    host.run_for(REACH_MAX);
    host.tell(Event::Release { volume: VOLUME });
    let (released, before) = (host.now, host.asked);
    host.run_for(2 * REACH_MAX);
    assert!(host.asked > before, "it may be reached by now");
    assert!(host.openings[0].0.since(released) >= REACH_MAX, "as long as before");
}
