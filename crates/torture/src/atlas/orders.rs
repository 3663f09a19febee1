//! Commits the orders of [`super::order`]: change after change, each for a while, then all is mended and has to be whole.

use super::Atlas;
use super::fault::Kind;
use super::machine::{Part, wait_etcd, wait_etcd_majority};
use super::order::{Change, Order};
use super::report::{Report, Row};
use anyhow::{Context, Result};
use std::time::Instant;

/// What is lost just now.
#[derive(Default)]
struct Lost {
    machines: Vec<(Kind, Part)>,
    link: bool,
    /// Killed, back, and not started: that takes a majority of etcd.
    unstarted: Vec<Part>,
}

impl Lost {
    fn is_there(&self, part: Part) -> bool {
        self.machines.iter().all(|(_, lost)| *lost != part)
    }

    /// Members of etcd that are there and reach each other.
    fn majority(&self, voters: [Part; 3]) -> Option<Vec<Part>> {
        let there: Vec<Part> = voters.into_iter().filter(|part| self.is_there(*part)).collect();
        // Without the witness there is only the link between the two.
        let is_together = there.contains(&Part::W) || !self.link;
        (there.len() >= 2 && is_together).then_some(there)
    }
}

impl Atlas<'_> {
    pub(super) fn order(&mut self, order: &Order, report: &mut Report) -> Result<()> {
        self.control.take_seen();
        let begun = Instant::now();
        let mut lost = Lost::default();
        let mut changed = Ok(());
        for change in &order.0 {
            changed = self.change(*change, &mut lost).and_then(|()| self.rest(self.options.lasts));
            if changed.is_err() {
                break;
            }
        }
        // Also where the run is to end: nothing is left hung.
        let ended = Instant::now();
        self.control.note(format!("{order} ends"));
        if lost.link {
            self.change(Change::Link, &mut lost)?;
        }
        for (kind, part) in lost.machines.clone() {
            self.change(Change::Machine(kind, part), &mut lost)?;
        }
        changed?;
        wait_etcd(&self.options.happens.shape().voters)?;
        self.start_waiting(&mut lost)?;
        let whole = self.wait_whole();
        let times = (ended - begun, ended.elapsed());
        self.control.note(format!("all is whole after {order}"));
        self.note_row(Row::new(&order.to_string(), None, times, self.control.take_seen()), report);
        whole?;
        self.site.balance(0)
    }

    fn change(&mut self, change: Change, lost: &mut Lost) -> Result<()> {
        match change {
            Change::Link => {
                lost.link = !lost.link;
                self.control.note(format!("link {}", if lost.link { "is cut" } else { "is mended" }));
                self.site.net.set_apart(Part::HOSTS, lost.link)?;
            }
            Change::Machine(kind, part) if lost.is_there(part) => {
                self.control.note(format!("{}:{part} begins", kind.name()));
                self.commit(kind, part)?;
                lost.machines.push((kind, part));
            }
            Change::Machine(_, part) => {
                let at = lost.machines.iter().position(|(_, p)| *p == part).context("it is lost")?;
                let (kind, _) = lost.machines.remove(at);
                self.control.note(format!("{}:{part} ends", kind.name()));
                self.mend(kind, part)?;
                if kind == Kind::Kill && !lost.unstarted.contains(&part) {
                    lost.unstarted.push(part);
                }
            }
        }
        self.start_waiting(lost)
    }

    /// Starts what was killed and is back, once metadata can be changed.
    fn start_waiting(&mut self, lost: &mut Lost) -> Result<()> {
        let Some(members) = lost.majority(self.options.happens.shape().voters) else { return Ok(()) };
        let (now, later): (Vec<Part>, Vec<Part>) = lost.unstarted.iter().partition(|part| lost.is_there(**part));
        lost.unstarted = later;
        for part in now {
            wait_etcd_majority(&members)?;
            self.site.machine(part).start().with_context(|| format!("{part} does not come back"))?;
        }
        Ok(())
    }
}
