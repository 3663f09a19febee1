//! When the node has heard of each host: whoever would take a volume over asks whether its host still reaches the node.
//!
//! Invariant: a host is never said to be silent for longer than the node has listened without a pause of its own. What came
//! while the node's process stood still is read after that, and may be read after the question.
//!
//! Limits: [`HOSTS_MAX`] hosts that are gone are remembered; of one that is forgotten it is told that nothing was heard.

use crate::api::PeerId;
use crate::line::HostTag;
use holdfast_base::Instant;
use std::collections::BTreeMap;
use std::time::Duration;

/// A node that nothing happened to for so long may have stood still: each host asks it something every second.
const STOOD_STILL: Duration = Duration::from_millis(1500);

const HOSTS_MAX: usize = 1024;

struct Greeted {
    host: String,
    tag: HostTag,
    /// When something came last.
    heard: Instant,
}

#[derive(Default)]
pub(crate) struct Hosts {
    /// Since then it has listened.
    since: Instant,
    last_event: Instant,
    /// Connections by what they said of themselves.
    peers: BTreeMap<PeerId, Greeted>,
    /// Hosts whose connections have ended.
    gone: BTreeMap<String, Instant>,
}

impl Hosts {
    /// Something happens to the node.
    pub fn on_event(&mut self, now: Instant) {
        if now.since(self.last_event) > STOOD_STILL {
            self.since = now;
        }
        self.last_event = now;
    }

    pub fn on_hello(&mut self, now: Instant, peer: PeerId, host: &str) {
        let (host, tag) = (host.to_string(), HostTag::of(host));
        self.peers.insert(peer, Greeted { host, tag, heard: now });
    }

    /// Which host asks; of who did not greet nothing is known.
    pub fn on_request(&mut self, now: Instant, peer: PeerId) -> HostTag {
        let Some(greeted) = self.peers.get_mut(&peer) else { return HostTag::default() };
        greeted.heard = now;
        greeted.tag
    }

    pub fn on_gone(&mut self, peer: PeerId) {
        let Some(Greeted { host, heard, .. }) = self.peers.remove(&peer) else { return };
        let known = self.gone.entry(host).or_default();
        *known = heard.max(*known);
        if self.gone.len() > HOSTS_MAX
            && let Some(oldest) = self.gone.iter().min_by_key(|(_, heard)| **heard).map(|(host, _)| host.clone())
        {
            self.gone.remove(&oldest);
        }
    }

    /// For how long nothing has come from the host, as far as this node can say.
    pub fn silent_for(&self, now: Instant, host: &str) -> Duration {
        let heard = self.peers.values().filter(|of| of.host == host).map(|of| of.heard);
        let heard = heard.chain(self.gone.get(host).copied()).max();
        now.since(heard.unwrap_or_default().max(self.since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Instant {
        Instant::ZERO + Duration::from_millis(ms)
    }

    fn listen(hosts: &mut Hosts, from_ms: u64, to_ms: u64) {
        (from_ms..=to_ms).step_by(500).for_each(|ms| hosts.on_event(at(ms)));
    }

    #[test]
    fn a_host_is_silent_since_its_last_request_over_any_of_its_connections() {
        let mut hosts = Hosts::default();
        listen(&mut hosts, 10_000, 20_000);
        assert_eq!(hosts.silent_for(at(20_000), "a"), Duration::from_secs(10), "it has listened for no longer");
        hosts.on_hello(at(20_000), PeerId::here(1), "a");
        hosts.on_hello(at(20_500), PeerId::here(2), "a");
        hosts.on_hello(at(21_000), PeerId::here(3), "b");
        hosts.on_request(at(22_000), PeerId::here(1));
        listen(&mut hosts, 20_500, 25_000);
        assert_eq!(hosts.silent_for(at(25_000), "a"), Duration::from_secs(3));
        hosts.on_gone(PeerId::here(1));
        hosts.on_gone(PeerId::here(2));
        assert_eq!(hosts.silent_for(at(25_000), "a"), Duration::from_secs(3), "it is known although it is gone");
        assert_eq!(hosts.silent_for(at(25_000), "b"), Duration::from_secs(4));
    }

    #[test]
    fn a_node_that_stood_still_has_heard_nobody_be_silent() {
        let mut hosts = Hosts::default();
        listen(&mut hosts, 0, 5_000);
        hosts.on_hello(at(5_000), PeerId::here(1), "a");
        // What the host has sent meanwhile is still to be read.
        hosts.on_event(at(60_000));
        assert_eq!(hosts.silent_for(at(60_000), "a"), Duration::ZERO);
    }

    #[test]
    fn only_so_many_are_remembered() {
        let mut hosts = Hosts::default();
        for n in 0..=HOSTS_MAX as u64 {
            hosts.on_hello(at(n), PeerId::here(n), &format!("h{n}"));
            hosts.on_gone(PeerId::here(n));
        }
        assert_eq!(hosts.gone.len(), HOSTS_MAX);
        assert!(!hosts.gone.contains_key("h0"));
    }
}
