//! Hosts whose control planes decide what they serve: these carry out what is planned, and tell what came of it.
//!
//! The metadata store is the control planes' own: what controllers ask of it is told, too, and answered from there.

use super::{Client, MultiHost, MultiHostOutcome, MultiHostPlan, Served, WAKE};
use crate::world::MachineAt;
use holdfast_base::{Instant, MetaReply, MetaRequest, NodeId, VolumeId};
use holdfast_format::root::Root;
use holdfast_host::{Event, Order, Outcome, Volume};
use std::collections::{BTreeSet, VecDeque};

/// What control planes hear of the hosts.
#[derive(Debug)]
pub(crate) enum HostReport {
    Done {
        host: usize,
        ticket: u64,
        outcome: Outcome,
    },
    /// Something about what the host does with a volume may have changed.
    Changed {
        host: usize,
        volume: VolumeId,
    },
    Meta {
        at: MachineAt,
        token: u64,
        request: MetaRequest,
    },
}

impl MultiHost {
    pub(crate) fn planned(plan: MultiHostPlan, volumes: Vec<Served>, verbose: bool) -> MultiHost {
        let mut run = MultiHost::with_volumes(plan, volumes, verbose);
        run.told = Some(VecDeque::new());
        run.world.meta_is_elsewhere = true;
        run.start_all();
        run
    }

    /// Of the volumes, as they are made.
    pub(crate) fn roots(&self) -> Vec<Root> {
        self.volumes.iter().map(|served| self.fresh_root(served)).collect()
    }

    pub(super) fn tell_planes(&mut self, told: HostReport) {
        if let Some(all) = &mut self.told {
            all.push_back(told);
        }
    }

    pub(crate) fn take_reports(&mut self) -> VecDeque<HostReport> {
        self.told.as_mut().map(std::mem::take).unwrap_or_default()
    }

    pub(crate) fn take_failure(&mut self) -> Option<String> {
        self.failure.take()
    }

    /// The clock is the control planes'.
    pub(crate) fn advance(&mut self, now: Instant) {
        self.world.now = self.world.now.max(now);
    }

    pub(crate) fn next_at(&mut self) -> Option<Instant> {
        self.look_soon();
        self.world.next_at()
    }

    /// Lets the next event happen.
    pub(crate) fn step_planned(&mut self) {
        if let Err(why) = self.step() {
            self.fail(why);
        }
    }

    // ---- what is planned ----

    pub(crate) fn give(&mut self, host: usize, ticket: u64, order: Order) {
        if matches!(order, Order::Open { .. }) {
            self.outcome.openings += 1;
        }
        self.order(host, ticket, order);
    }

    pub(crate) fn volume(&self, host: usize, volume: VolumeId) -> Option<&Volume> {
        self.host(host)?.find_id(volume)
    }

    pub(crate) fn answer_meta(&mut self, at: MachineAt, token: u64, reply: MetaReply) {
        self.world.meta_replies(at, token, reply);
        self.see_to(at.host);
    }

    pub(crate) fn tell_nodes_away(&mut self, host: usize, away: BTreeSet<NodeId>) {
        self.tell(host, Event::NodesAway(away));
    }

    // ---- what goes wrong ----

    pub(crate) fn begin(&mut self, host: usize) {
        if !self.shells[host].up {
            self.begin_process(host);
        }
    }

    pub(crate) fn end(&mut self, host: usize) {
        if self.shells[host].up {
            self.end_process(host);
        }
    }

    pub(crate) fn go_on(&mut self, host: usize) {
        if self.shells[host].hangs_until.is_some() {
            self.resume(host);
        }
    }

    pub(crate) fn cut_peers(&mut self, one: usize, other: usize, until: Instant) {
        self.cut.insert((one, other), until);
        self.cut.insert((other, one), until);
        self.world.wake_at(until, WAKE);
    }

    /// The host reaches the first so many nodes no more; the others it does.
    pub(crate) fn cut_nodes(&mut self, host: usize, count: usize) {
        for node in 0..self.world.nodes.len() {
            if node < count {
                self.world.block(host, node, true, true);
            } else {
                self.world.unblock(host, node);
            }
        }
    }

    // ---- what clients see ----

    pub(crate) fn are_answered(&self) -> bool {
        self.clients.iter().all(|client| client.pending.is_empty())
    }

    /// Which clients wait: with the host that each is connected to.
    pub(crate) fn waiting(&self) -> Vec<(usize, Option<usize>)> {
        let host = |client: &Client| client.path.map(|(host, _)| host);
        let all = self.clients.iter().enumerate();
        all.filter(|(_, client)| !client.pending.is_empty()).map(|(n, client)| (n, host(client))).collect()
    }

    pub(crate) fn check_history(&mut self) -> Result<(), String> {
        self.guests.history.check().map_err(|violation| format!("{violation:?}"))
    }

    pub(crate) fn outcome(&self) -> MultiHostOutcome {
        MultiHostOutcome { trace_hash: self.world.trace.hash(), ..self.outcome }
    }
}
