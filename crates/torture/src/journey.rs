//! A grid that grows from one node to six and shrinks to one again, under the checking workload: at each stop the volume goes
//! over to another layout, and then what that promises to bear is lost for a while.

use crate::engine::Control;
use crate::maintenance;
use anyhow::{Context, Result, ensure};
use holdfast_lab::grid::{Grid, NodeAction};
use std::time::{Duration, Instant};

/// Everything is redundant again, or a node is empty, within this.
const STOP_MAX: Duration = Duration::from_secs(300);

/// How long what is lost stays away, and how long a stop lasts.
const AWAY: Duration = Duration::from_secs(2);

const LOOK_PACE: Duration = Duration::from_millis(200);

/// What is done next.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// `volume set` with these two words, and then the layout is this one.
    Set(&'static str, &'static str, &'static str),
    AddNode,
    /// The node is emptied and taken out.
    RemoveNode(u32),
    /// These nodes are killed, and back after a while.
    Lose(&'static [u32]),
    KillHost,
}

use Step::{AddNode, KillHost, Lose, RemoveNode, Set};

const STEPS: [Step; 32] = [
    Set("--protect", "device", "mirror:2@device"),
    Lose(&[1]),
    KillHost,
    AddNode,
    Set("--protect", "node", "mirror:2"),
    Lose(&[1]),
    Set("--protect", "node+device", "nested-mirror"),
    Lose(&[2]),
    AddNode,
    Set("--protect", "node", "parity:2+1"),
    Lose(&[3]),
    KillHost,
    AddNode,
    AddNode,
    AddNode,
    Set("--protect", "node+device", "parity:4+2"),
    Lose(&[2, 5]),
    KillHost,
    Set("--layout", "parity:2+1", "parity:2+1"),
    RemoveNode(6),
    RemoveNode(5),
    RemoveNode(4),
    Lose(&[1]),
    Set("--layout", "nested-mirror", "nested-mirror"),
    RemoveNode(3),
    Lose(&[1]),
    Set("--layout", "mirror:2", "mirror:2"),
    Lose(&[2]),
    Set("--layout", "mirror:2@device", "mirror:2@device"),
    RemoveNode(2),
    Lose(&[1]),
    KillHost,
];

pub struct Journey<'a> {
    pub grid: &'a Grid,
    pub control: Control,
    pub volume: &'a str,
}

impl Journey<'_> {
    /// Returns how many steps were done, and how long the longest wait for redundancy took.
    ///
    /// # Errors
    ///
    /// What is refused, or does not come back within [`STOP_MAX`], with the step.
    pub fn run(self) -> Result<(usize, Duration)> {
        let mut longest = Duration::ZERO;
        for (number, step) in STEPS.iter().enumerate() {
            if self.control.stopped() {
                return Ok((number, longest));
            }
            self.control.fault(format!("step {number}: {step:?}"));
            println!("journey: {step:?}");
            let took = self.take(*step).with_context(|| format!("step {number}, {step:?}"))?;
            longest = longest.max(took);
        }
        Ok((STEPS.len(), longest))
    }

    fn take(&self, step: Step) -> Result<Duration> {
        match step {
            Set(option, value, layout) => {
                self.grid.run(&["volume", "set", self.volume, option, value])?;
                let now = self.grid.volume(self.volume)?["layout"].clone();
                ensure!(now == layout, "{option} {value} gave {now}, not {layout}");
            }
            AddNode => drop(self.grid.run(&["node", "add"])?),
            RemoveNode(node) => {
                let node = node.to_string();
                self.grid.run(&["node", "drain", &node])?;
                self.retry(|| self.grid.run(&["node", "remove", &node]).map(drop))?;
            }
            Lose(nodes) => {
                nodes.iter().try_for_each(|node| self.grid.node(NodeAction::Kill, *node))?;
                self.control.rest(AWAY);
                nodes.iter().try_for_each(|node| self.grid.node(NodeAction::Start, *node))?;
            }
            KillHost => {
                self.control.host_going();
                self.grid.kill_host()?;
                let ordered = Instant::now();
                self.grid.up()?;
                self.grid.wait_open(STOP_MAX)?;
                self.control.host_back(ordered);
            }
        }
        let since = Instant::now();
        maintenance::wait_whole(self.grid, &self.control)?;
        let took = since.elapsed();
        self.control.rest(AWAY);
        Ok(took)
    }

    /// Until it succeeds, the engine stops, or [`STOP_MAX`] is over.
    fn retry(&self, mut attempt: impl FnMut() -> Result<()>) -> Result<()> {
        let since = Instant::now();
        loop {
            match attempt() {
                Ok(()) => return Ok(()),
                Err(_) if self.control.stopped() => return Ok(()),
                Err(error) if since.elapsed() > STOP_MAX => return Err(error),
                Err(_) => std::thread::sleep(LOOK_PACE),
            }
        }
    }
}
