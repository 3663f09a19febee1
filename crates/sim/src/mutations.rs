//! The deliberate faults of the machines, by name, for the check that the simulator finds each.

use crate::cluster::{ClusterPlan, run_cluster};
use crate::multi_host::{MultiHostPlan, run_multi_host};
use crate::plan::Plan;
use crate::runner::{Finding, guarded, run_seeds};
use crate::swarm::run_plan;

/// A switch in a machine that breaks one protocol rule.
#[derive(Clone, Copy)]
pub struct Mutation {
    pub name: &'static str,
    pub rule: &'static str,
    apply: Apply,
}

/// Which kind of run the machine is in.
#[derive(Clone, Copy)]
enum Apply {
    Swarm(fn(&mut Plan)),
    MultiHost(fn(&mut MultiHostPlan)),
    Cluster(fn(&mut ClusterPlan)),
}

macro_rules! mutation {
    ($machine:ident . $switch:ident, $rule:literal) => {
        Mutation { name: stringify!($switch), rule: $rule, apply: Apply::Swarm(|plan| plan.$machine.$switch = true) }
    };
    (cluster: $whose:ident . $switch:ident, $rule:literal) => {
        Mutation { name: stringify!($switch), rule: $rule, apply: Apply::Cluster(|p| p.$whose.$switch = true) }
    };
    (multi_host: $switch:ident, $rule:literal) => {
        Mutation { name: stringify!($switch), rule: $rule, apply: Apply::MultiHost(|p| p.mutations.$switch = true) }
    };
}

pub const MUTATIONS: &[Mutation] = &[
    mutation!(volume_mutations.ack_one_short, "rule 2"),
    mutation!(volume_mutations.both_copies_on_one_node, "rule 2"),
    mutation!(volume_mutations.late_ack_after_freeze, "rule 4"),
    mutation!(volume_mutations.skip_fence, "rule 5"),
    mutation!(volume_mutations.read_without_grant, "rule 8"),
    mutation!(volume_mutations.unconditional_repoint, "rule 12"),
    mutation!(volume_mutations.trim_past_commit, "rule 15"),
    mutation!(volume_mutations.clean_after_unknown_append, "rule 17"),
    mutation!(volume_mutations.absent_leg_counts_as_lacking, "rule 1"),
    mutation!(volume_mutations.snapshot_stays_live, "decision 0009"),
    mutation!(volume_mutations.merge_forgets_below, "decision 0009"),
    mutation!(volume_mutations.fold_keeps_old_counts, "decision 0005"),
    mutation!(volume_mutations.hides_twice, "decision 0005"),
    mutation!(volume_mutations.forgets_dependents, "rule 19"),
    mutation!(volume_mutations.frees_on_any_list, "rule 28"),
    mutation!(volume_mutations.quiesce_tells, "rule 14"),
    mutation!(volume_mutations.one_key_for_all_ledgers, "rule 21"),
    mutation!(volume_mutations.one_key_for_all_segments, "rule 21"),
    mutation!(volume_mutations.raw_units_by_block, "rule 21"),
    mutation!(volume_mutations.log_in_plain, "decision 0019"),
    mutation!(store_mutations.skip_fence_check, "rule 6"),
    mutation!(store_mutations.ack_before_durable, "invariant 1, rule 11"),
    mutation!(store_mutations.promise_not_persisted, "rule 6"),
    mutation!(store_mutations.scan_stops_at_hole, "rule 11"),
    mutation!(store_mutations.blank_says_dont_have, "rule 1"),
    mutation!(store_mutations.reopens_under_writes, "rule 25"),
    mutation!(store_mutations.cached_read_unverified, "decision 0022"),
    mutation!(store_mutations.deletion_keeps_cached, "decision 0022"),
    mutation!(recover_mutations.accepts_older, "rule 27"),
    mutation!(multi_host: begins_at_once, "rule 22"),
    mutation!(multi_host: never_lapses, "rule 22"),
    mutation!(multi_host: hears_old_answers, "rule 22"),
    mutation!(cluster: mutations.fails_over_on_lease_alone, "decision 0014"),
    mutation!(cluster: mutations.leaves_absence_out, "decision 0014"),
    mutation!(cluster: mutations.leaves_version_out, "decision 0014"),
    mutation!(cluster: mutations.believes_any_store, "cluster, invariant 2"),
    mutation!(cluster: mutations.forgets_what_is_under_way, "cluster, invariant 1"),
    mutation!(cluster: mutations.holds_at_once, "cluster, invariant 1"),
    mutation!(cluster: mutations.forgets_holds, "cluster, invariant 1"),
    mutation!(cluster: upkeep.believes_old_looks, "upkeep, invariant 2"),
    mutation!(cluster: upkeep.begins_twice, "upkeep, invariant 1"),
    mutation!(cluster: mutations.takes_from_who_is_heard, "decision 0014"),
    mutation!(cluster: duties.drops_before_it_is_marked, "steward, invariant 2"),
    mutation!(cluster: duties.finishes_early, "steward"),
    mutation!(cluster: duties.gives_up_without_comparing, "steward"),
    mutation!(cluster: duties.counts_looks, "steward, invariant 4"),
    mutation!(cluster: duties.acts_in_doubt, "steward, invariant 1"),
    mutation!(cluster: duties.all_are_stewards, "steward, invariant 1"),
    mutation!(cluster: mistakes.conflict_deposes, "rule 5"),
    mutation!(cluster: mistakes.leaves_compares_out, "decision 0014"),
    mutation!(cluster: mistakes.believes_any_listing, "view, invariant 2"),
    mutation!(cluster: mistakes.forgets_the_beat, "beat"),
    mutation!(cluster: mistakes.claims_whatever, "decision 0014"),
    mutation!(cluster: mistakes.carries_out_late, "decision 0014"),
];

impl Mutation {
    /// Breaks the rule in a plan of the swarm; false where it is about another kind of run.
    pub fn apply(&self, plan: &mut Plan) -> bool {
        match self.apply {
            Apply::Swarm(apply) => {
                apply(plan);
                true
            }
            Apply::MultiHost(_) | Apply::Cluster(_) => false,
        }
    }
}

pub fn find(name: &str) -> Option<&'static Mutation> {
    MUTATIONS.iter().find(|m| m.name == name)
}

/// One run, with the fault or without.
fn run_one(mutation: &Mutation, seed: u64, is_applied: bool) -> Result<(), String> {
    match mutation.apply {
        Apply::Swarm(apply) => {
            let mut plan = Plan::from_seed(seed);
            if is_applied {
                apply(&mut plan);
            }
            guarded(seed, || run_plan(plan, false)).map(drop)
        }
        Apply::MultiHost(apply) => {
            let mut plan = MultiHostPlan::from_seed(seed);
            if is_applied {
                apply(&mut plan);
            }
            guarded(seed, || run_multi_host(plan, false)).map(drop)
        }
        Apply::Cluster(apply) => {
            let mut plan = ClusterPlan::from_seed(seed);
            if is_applied {
                apply(&mut plan);
            }
            guarded(seed, || run_cluster(plan, false)).map(drop)
        }
    }
}

/// One run with the fault. What goes wrong without it as well is not its finding.
fn run_with(mutation: &Mutation, seed: u64) -> Result<(), String> {
    let Err(why) = run_one(mutation, seed, true) else { return Ok(()) };
    match run_one(mutation, seed, false) {
        Ok(()) => Err(why),
        Err(_) => Ok(()),
    }
}

/// Looks for a seed that finds the fault.
pub fn hunt(mutation: &Mutation, from: u64, count: u64, jobs: usize) -> Option<Finding> {
    let (_, findings) = run_seeds(from, count, jobs, true, |seed| run_with(mutation, seed));
    findings.into_iter().next()
}
