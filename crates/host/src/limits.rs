//! Policies of tenants: how a volume's clients fare among others, and how much of it they may ask for. The scheduler keeps to
//! them ([`crate::turns`]).
//!
//! A policy belongs to the volume, at every host that has it in service, until an operator changes it. Sessions of other hosts
//! count, too. Reads of snapshots don't.
//!
//! A request that comes looks whether its tenant's policy is as the records say. So a volume that just opens, and a clone that
//! was just made, need no step of their own.

use crate::host::{Host, Out, warn};
use crate::turns::Tenant;
use crate::volumes::Volume;
use holdfast_base::{HeadId, Instant, Token, VolumeId};
use holdfast_filter::FilterId;
use holdfast_qos::{Policy, PolicyError, TenantId, scheduler};
use std::collections::BTreeMap;
use std::fmt;

/// By volume or clone: what its policy is told, `iops=500,bytes=50MiB` or `weight=400` say.
pub type Limits = BTreeMap<VolumeId, String>;

/// The limit's number among what stands before a volume. Those of filters begin at 1.
pub const LIMIT: FilterId = FilterId(0);

/// Why words make no policy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LimitError {
    Policy(PolicyError),
    Nothing,
}

impl fmt::Display for LimitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LimitError::Policy(error) => error.fmt(f),
            LimitError::Nothing => f.write_str("it says nothing; add a limit, a weight or a goal of latency"),
        }
    }
}

impl std::error::Error for LimitError {}

/// The policy that words tell.
///
/// # Errors
/// They make none, or are none at all.
pub fn policy_of(words: &str) -> Result<Policy, LimitError> {
    if !words.contains(|c: char| c.is_alphanumeric()) {
        Err(LimitError::Nothing)
    } else {
        words.parse().map_err(LimitError::Policy)
    }
}

impl Host {
    /// These limits count from here on.
    pub(crate) fn set_limits(&mut self, now: Instant, limits: Limits, out: Out) {
        if self.volumes.limits == limits {
            return;
        }
        let has_floor = |words: &String| policy_of(words).is_ok_and(|policy| policy.floor.is_some());
        self.see_to_floors(now, limits.values().any(has_floor), out);
        self.volumes.limits = limits;
        self.volumes.limits_version += 1;
        // What waits by a former one has no request that would look.
        let tenants = |volume: &Volume| volume.tenants.iter().map(|tenant| tenant.head).collect::<Vec<_>>();
        let all: Vec<_> = self.volumes.table.iter().map(|(at, volume)| (at, tenants(volume))).collect();
        for (at, head) in all.into_iter().flat_map(|(at, heads)| heads.into_iter().map(move |head| (at, head))) {
            self.keep_to_limit(now, at, head, out);
        }
    }

    /// The limit of a volume or clone, as it was told.
    pub fn limit_of(&self, id: VolumeId) -> Option<&str> {
        self.volumes.limits.get(&id).map(String::as_str)
    }

    /// Clients that may have a volume or clone, where not all may.
    pub fn clients_of(&self, id: VolumeId) -> Option<&std::collections::BTreeSet<String>> {
        self.volumes.access.get(&id)
    }

    /// Sees to it that a tenant is there, and its policy as the records say; `None` where there are too many.
    pub(crate) fn keep_to_limit(
        &mut self,
        now: Instant,
        at: Token,
        head: Option<HeadId>,
        out: Out,
    ) -> Option<TenantId> {
        let volume = self.volumes.table.get(at)?;
        // Of a clone it is not known while its volume opens; who brings a stream is not limited.
        let id = head.filter(|_| volume.serves()).and_then(|head| volume.id_of(head));
        let seen = (head.is_none() || id.is_some()).then_some(self.volumes.limits_version);
        let words = id.and_then(|id| self.volumes.limits.get(&id)).cloned();
        let before = volume.tenant(head).cloned();
        if let Some(before) = before.as_ref().filter(|before| before.words == words) {
            let id = before.id;
            self.tenant_mut(at, head)?.seen = seen;
            return Some(id);
        }
        let policy = words.as_deref().map_or(Ok(Policy::default()), policy_of).unwrap_or_else(|error| {
            tell_unreadable(volume, head, (words.as_deref().unwrap_or_default(), &error), out);
            Policy::default()
        });
        if let Some(Tenant { id, .. }) = before {
            let tenant = self.tenant_mut(at, head)?;
            (tenant.words, tenant.seen) = (words, seen);
            self.drive_turns(now, scheduler::Event::SetPolicy { tenant: id, policy }, out);
            return Some(id);
        }
        let id = self.turns.add_tenant(policy)?;
        self.volumes.table.get_mut(at)?.tenants.push(Tenant { head, id, words, seen });
        Some(id)
    }

    fn tenant_mut(&mut self, at: Token, head: Option<HeadId>) -> Option<&mut Tenant> {
        self.volumes.table.get_mut(at)?.tenants.iter_mut().find(|tenant| tenant.head == head)
    }
}

fn tell_unreadable(volume: &Volume, head: Option<HeadId>, (words, error): (&str, &LimitError), out: Out) {
    let name = volume.name_of(head.unwrap_or(HeadId::VOLUME));
    warn(out, format!("volume {name}: this release can't keep to its policy `{words}`: {error}"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_says_something() {
        let policy = policy_of("iops=500,bytes=50MiB").expect("a limit");
        assert_eq!((policy.iops, policy.bytes), (Some(500), Some(50 << 20)));
        assert_eq!(policy_of("weight=7").expect("a weight").weight, 7);
        for words in ["", "burst=1s", "iops=0", "500"] {
            assert!(policy_of(words).is_err(), "{words}");
        }
    }
}
