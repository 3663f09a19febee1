//! Stages of a request, and how long it was in each.

use crate::recorder::Kind;
use holdfast_base::{Instant, NodeId};
use std::time::Duration;

macro_rules! stages {
    ($($stage:ident $name:literal $about:literal,)*) => {
        /// Where a request is.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
        #[repr(u8)]
        pub enum Stage { $(#[doc = $about] $stage,)* }

        impl Stage {
            pub const ALL: &[Stage] = &[$(Stage::$stage,)*];

            pub fn name(self) -> &'static str {
                match self { $(Stage::$stage => $name,)* }
            }

            /// As requests of that kind call it: a write's nodes are legs of the log.
            pub fn name_in(self, kind: Kind) -> &'static str {
                match (self, kind) {
                    (Stage::Queue, Kind::Write) => "leg queue",
                    (Stage::Device, Kind::Write) => "leg device",
                    _ => self.name(),
                }
            }

            /// What a request does there, or waits for.
            pub fn about(self) -> &'static str {
                match self { $(Stage::$stage => $about,)* }
            }
        }
    };
}

stages! {
    Order "order" "who connected anew waits for what was asked before",
    Qos "qos" "its turn: the volume's own limit, or others",
    Filters "filters" "filters that stand before the volume",
    Room "room" "others of the volume that are read, 32 MiB at a time",
    Held "held" "others of the volume that are written, as many as may be under way",
    WriteBack "write-back" "room in memory for what is in the log and not in segments yet",
    Journal "journal" "room in the journals of the legs",
    Space "space" "room in the grid, which the cleaner makes",
    Blocks "blocks" "the rest of a block that is written in part",
    Map "map" "a leaf of the map that is not in memory",
    Nodes "nodes" "nodes write segments, or do not tell where they spend time",
    SecondRound "second round" "other nodes are asked, as the first did not answer well or in time",
    Queue "node queue" "its turn at a node, behind others that ask the same device",
    Device "device" "the device of a node",
    Network "network" "the way to a node and back, and what processes at both ends have else to do",
    Earlier "earlier" "what was written before it is not durable yet",
    Grant "grant" "nodes let this host answer reads again",
    Snapshots "snapshots" "a group of snapshots, which holds answers back until all volumes have theirs",
    Rest "rest" "everything else: a volume that opens, a host that is busy, the way back",
}

const STAGES: usize = Stage::ALL.len();

/// Microseconds by stage.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Spans {
    us: [u32; STAGES],
    /// The node that was waited for longest, and how long.
    node: Option<(NodeId, u32)>,
}

fn us_of(span: Duration) -> u32 {
    u32::try_from(span.as_micros()).unwrap_or(u32::MAX)
}

impl Spans {
    pub fn add(&mut self, stage: Stage, span: Duration) {
        let us = &mut self.us[stage as usize];
        *us = us.saturating_add(us_of(span));
    }

    /// That long it waited for a node.
    pub fn wait_for(&mut self, node: NodeId, span: Duration) {
        if self.node.is_none_or(|(_, longest)| longest < us_of(span)) {
            self.node = Some((node, us_of(span)));
        }
    }

    /// The node that was waited for longest, and how many microseconds.
    pub fn node(&self) -> Option<(NodeId, u64)> {
        self.node.map(|(node, us)| (node, us.into()))
    }

    pub fn us(&self, stage: Stage) -> u64 {
        self.us[stage as usize].into()
    }

    pub fn total_us(&self) -> u64 {
        self.us.iter().map(|us| u64::from(*us)).sum()
    }

    /// What is missing of all that a request took was spent there.
    pub fn fill_up(&mut self, took: Duration, stage: Stage) {
        let known = Duration::from_micros(self.total_us());
        self.add(stage, took.saturating_sub(known));
    }
}

/// The way of one request: each mark ends a stage.
#[derive(Clone, Copy, Debug)]
pub struct Trail {
    spans: Spans,
    since: Instant,
}

impl Trail {
    pub fn new(now: Instant) -> Trail {
        Trail { spans: Spans::default(), since: now }
    }

    /// Since the last mark it was there. Marks that are older than the last one say nothing.
    pub fn mark(&mut self, now: Instant, stage: Stage) {
        if now > self.since {
            self.spans.add(stage, now.since(self.since));
            self.since = now;
        }
    }

    /// The same, of a stage in which a node is waited for.
    pub fn mark_for(&mut self, now: Instant, stage: Stage, node: Option<NodeId>) {
        if let Some(node) = node.filter(|_| now > self.since) {
            self.spans.wait_for(node, now.since(self.since));
        }
        self.mark(now, stage);
    }

    /// Since the last mark that node had it, which tells what it waited there and what the device took; the rest was the way.
    pub fn mark_node(&mut self, now: Instant, node: NodeId, told: Option<(Duration, Duration)>) {
        let Some((queue, device)) = told else { return self.mark_for(now, Stage::Nodes, Some(node)) };
        // It may have joined what was asked for others before, and waited for less than that took.
        let span = now.max(self.since).since(self.since);
        let device = device.min(span);
        let queue = queue.min(span - device);
        self.spans.wait_for(node, span);
        self.spans.add(Stage::Device, device);
        self.spans.add(Stage::Queue, queue);
        self.since = self.since + device + queue;
        self.mark(now, Stage::Network);
    }

    pub fn spans(&self) -> &Spans {
        &self.spans
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_node_tells_is_split_off_and_no_more_than_there_was() {
        let (at, us) = (|us: u64| Instant(us * 1000), Duration::from_micros);
        let split = |told| {
            let mut trail = Trail::new(at(100));
            trail.mark_node(at(1_100), NodeId(3), told);
            assert_eq!(trail.spans().node(), Some((NodeId(3), 1_000)));
            assert_eq!(trail.spans().total_us(), 1_000);
            [Stage::Queue, Stage::Device, Stage::Network, Stage::Nodes].map(|stage| trail.spans().us(stage))
        };
        assert_eq!(split(Some((us(200), us(500)))), [200, 500, 300, 0]);
        assert_eq!(split(Some((us(700), us(800)))), [200, 800, 0, 0]);
        assert_eq!(split(Some((us(1), us(9_000)))), [0, 1_000, 0, 0]);
        assert_eq!(split(None), [0, 0, 0, 1_000]);
    }

    #[test]
    fn the_node_that_was_waited_for_longest_is_kept() {
        let at = |us: u64| Instant(us * 1000);
        let mut trail = Trail::new(at(0));
        trail.mark_for(at(300), Stage::SecondRound, Some(NodeId(2)));
        trail.mark_node(at(400), NodeId(1), None);
        trail.mark_for(at(900), Stage::Earlier, None);
        assert_eq!(trail.spans().node(), Some((NodeId(2), 300)));
        trail.mark_for(at(1_300), Stage::Earlier, Some(NodeId(4)));
        trail.mark_for(at(1_200), Stage::Earlier, Some(NodeId(5)));
        assert_eq!(trail.spans().node(), Some((NodeId(4), 400)));
    }

    #[test]
    fn stages_add_up_to_what_a_request_took() {
        let at = |us: u64| Instant(us * 1000);
        let mut trail = Trail::new(at(10));
        trail.mark(at(15), Stage::Room);
        trail.mark(at(15), Stage::Map);
        trail.mark(at(12), Stage::Held);
        trail.mark(at(40), Stage::Nodes);
        let mut spans = *trail.spans();
        assert_eq!(
            (spans.us(Stage::Room), spans.us(Stage::Map), spans.us(Stage::Held), spans.us(Stage::Nodes)),
            (5, 0, 0, 25)
        );
        spans.fill_up(Duration::from_micros(100), Stage::Rest);
        assert_eq!((spans.us(Stage::Rest), spans.total_us()), (70, 100));
        spans.fill_up(Duration::from_micros(50), Stage::Rest);
        assert_eq!(spans.total_us(), 100, "what is known is not taken back");
        spans.add(Stage::Grant, Duration::MAX);
        assert_eq!(spans.us(Stage::Grant), u64::from(u32::MAX));
    }
}
