//! The simulator from the command line: many seeds, one seed as a printed trace, or the search for a deliberate fault.

use holdfast_base::BLOCK_BYTES;
use holdfast_sim::cluster::{ClusterOutcome, ClusterPlan, run_cluster};
use holdfast_sim::grid::{GridPlan, run_grid};
use holdfast_sim::ledger_run::{LedgerPlan, run_ledgers};
use holdfast_sim::multi_host::{MultiHostOutcome, MultiHostPlan, run_multi_host};
use holdfast_sim::mutations::{self, MUTATIONS};
use holdfast_sim::plan::Plan;
use holdfast_sim::runner::{guarded, replay_command, run_seeds, twice};
use holdfast_sim::swarm::{Outcome, run_plan};
use std::fmt::Debug;
use std::process::ExitCode;
use std::time::Instant;

const USAGE: &str = "\
Usage: holdfast-sim --seeds N [--from S] [--jobs J] [--once] [KIND]   run seeds, each twice, or once
       holdfast-sim --seed S [--verbose] [KIND]  run one seed, with --verbose as a printed trace
       holdfast-sim --mutation NAME --seeds N [--from S]          expect a seed that finds the deliberate fault
       holdfast-sim --list-mutations
KIND: --ledgers, --multi-host, --cluster, or --grid; one volume's controllers and nodes without";

/// The spelling of earlier releases, accepted for one more.
const OLDER_MULTI_HOST: &str = "--portals";

#[derive(Default)]
struct Arguments {
    seeds: Option<u64>,
    seed: Option<u64>,
    from: u64,
    jobs: usize,
    verbose: bool,
    /// Nobody looks whether two runs of a seed are the same.
    once: bool,
    ledgers: bool,
    multi_host: bool,
    cluster: bool,
    grid: bool,
    mutation: Option<String>,
    list: bool,
}

fn parse() -> Result<Arguments, String> {
    let mut arguments = Arguments { jobs: 2, ..Arguments::default() };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut number = || -> Result<u64, String> {
            let value = words.next().ok_or_else(|| format!("{word} needs a number"))?;
            value.parse().map_err(|_| format!("{word} needs a number, not `{value}`"))
        };
        match word.as_str() {
            "--seeds" => arguments.seeds = Some(number()?),
            "--seed" => arguments.seed = Some(number()?),
            "--from" => arguments.from = number()?,
            "--jobs" => arguments.jobs = number()? as usize,
            "--verbose" => arguments.verbose = true,
            "--once" => arguments.once = true,
            "--ledgers" => arguments.ledgers = true,
            "--multi-host" | OLDER_MULTI_HOST => arguments.multi_host = true,
            "--cluster" => arguments.cluster = true,
            "--grid" => arguments.grid = true,
            "--mutation" => arguments.mutation = Some(words.next().ok_or("--mutation needs a name")?),
            "--list-mutations" => arguments.list = true,
            other => return Err(format!("`{other}` is not known")),
        }
    }
    Ok(arguments)
}

fn plan_of(seed: u64, mutation: Option<&mutations::Mutation>) -> Plan {
    let mut plan = Plan::from_seed(seed);
    if let Some(mutation) = mutation {
        mutation.apply(&mut plan);
    }
    plan
}

fn run_one(seed: u64, arguments: &Arguments, mutation: Option<&mutations::Mutation>) -> ExitCode {
    let result = if arguments.multi_host {
        let plan = MultiHostPlan::from_seed(seed);
        println!("{plan:#?}");
        guarded(seed, || run_multi_host(plan.clone(), arguments.verbose)).map(|o| format!("{o:#?}"))
    } else if arguments.cluster {
        let plan = ClusterPlan::from_seed(seed);
        println!("{plan:#?}");
        guarded(seed, || run_cluster(plan.clone(), arguments.verbose)).map(|o| format!("{o:#?}"))
    } else if arguments.grid {
        let plan = GridPlan::from_seed(seed);
        println!("{plan:#?}");
        guarded(seed, || run_grid(&plan, arguments.verbose)).map(|o| format!("{o:#?}"))
    } else if arguments.ledgers {
        let plan = LedgerPlan::from_seed(seed);
        println!("{plan:#?}");
        guarded(seed, || run_ledgers(plan.clone(), arguments.verbose)).map(|o| format!("{o:#?}"))
    } else {
        let plan = plan_of(seed, mutation);
        println!("{plan:#?}");
        guarded(seed, || run_plan(plan.clone(), arguments.verbose)).map(|o| format!("{o:#?}"))
    };
    match result {
        Ok(outcome) => {
            println!("seed {seed}: sound\n{outcome}");
            ExitCode::SUCCESS
        }
        Err(why) => {
            println!("seed {seed}: {why}");
            ExitCode::FAILURE
        }
    }
}

fn print_sums(outcomes: &[(u64, Outcome)]) {
    let sum = |f: fn(&Outcome) -> u64| outcomes.iter().map(|(_, o)| f(o)).sum::<u64>();
    println!(
        "  events {}, answered {}, refused {}, faults {}, openings {}, rolls {}, segments {} (cleaned {}, packed later {}), folds {}, \
         audits {}, shards rebuilt {}, encryptions {}, cache hits {}, shared {}, blocks read ahead {}",
        sum(|o| o.events),
        sum(|o| o.answered),
        sum(|o| o.refused),
        sum(|o| u64::from(o.faults)),
        sum(|o| u64::from(o.openings)),
        sum(|o| o.rolls),
        sum(|o| o.segments_written),
        sum(|o| o.segments_cleaned),
        sum(|o| o.repacked_bytes.div_ceil(1 << 16)),
        sum(|o| o.folds),
        sum(|o| o.audits),
        sum(|o| o.shards_rebuilt),
        sum(|o| o.encryptions),
        sum(|o| o.cache_hits),
        sum(|o| o.shared_blocks),
        sum(|o| o.ahead_bytes / BLOCK_BYTES as u64),
    );
}

fn print_multi_host_sums(outcomes: &[(u64, MultiHostOutcome)]) {
    let sum = |f: fn(&MultiHostOutcome) -> u64| outcomes.iter().map(|(_, o)| f(o)).sum::<u64>();
    println!(
        "  answered {}, paths {}, sessions ended {}, openings {}, hand-overs {}, caught in layers {}",
        sum(|o| o.answered),
        sum(|o| o.path_changes),
        sum(|o| o.aborts),
        sum(|o| o.openings),
        sum(|o| o.handovers),
        sum(|o| o.caught),
    );
}

fn print_cluster_sums(outcomes: &[(u64, ClusterOutcome)]) {
    let sum = |f: fn(&ClusterOutcome) -> u64| outcomes.iter().map(|(_, o)| f(o)).sum::<u64>();
    println!(
        "  events {}, faults {}, commands {}, actions {}, hand-overs {}, take-overs {}, conflicts {}, depositions {}, doubts {}",
        sum(|o| o.events),
        sum(|o| o.faults),
        sum(|o| o.commands),
        sum(|o| o.actions),
        sum(|o| o.handovers),
        sum(|o| o.take_overs),
        sum(|o| o.conflicts),
        sum(|o| o.depositions),
        sum(|o| o.doubts),
    );
}

fn checked<T: PartialEq + Debug>(
    arguments: &Arguments,
    seed: u64,
    run: impl Fn() -> Result<T, String>,
) -> Result<T, String> {
    if arguments.once { guarded(seed, run) } else { twice(seed, run) }
}

fn run_many(count: u64, arguments: &Arguments) -> ExitCode {
    let (from, jobs) = (arguments.from, arguments.jobs);
    let start = Instant::now();
    let findings = if arguments.multi_host {
        let run = |seed| checked(arguments, seed, || run_multi_host(MultiHostPlan::from_seed(seed), false));
        let (outcomes, findings) = run_seeds(from, count, jobs, false, run);
        print_multi_host_sums(&outcomes);
        findings
    } else if arguments.cluster {
        let run = |seed| checked(arguments, seed, || run_cluster(ClusterPlan::from_seed(seed), false));
        let (outcomes, findings) = run_seeds(from, count, jobs, false, run);
        print_cluster_sums(&outcomes);
        findings
    } else if arguments.grid {
        let run = |seed| checked(arguments, seed, || run_grid(&GridPlan::from_seed(seed), false));
        let (outcomes, findings) = run_seeds(from, count, jobs, false, run);
        print_multi_host_sums(&outcomes.iter().map(|(seed, o)| (*seed, o.hosts)).collect::<Vec<_>>());
        print_cluster_sums(&outcomes.iter().map(|(seed, o)| (*seed, o.control)).collect::<Vec<_>>());
        findings
    } else if arguments.ledgers {
        let run = |seed| checked(arguments, seed, || run_ledgers(LedgerPlan::from_seed(seed), false));
        run_seeds(from, count, jobs, false, run).1
    } else {
        let run = |seed| checked(arguments, seed, || run_plan(Plan::from_seed(seed), false));
        let (outcomes, findings) = run_seeds(from, count, jobs, false, run);
        print_sums(&outcomes);
        findings
    };
    for finding in &findings {
        let kind = match arguments {
            Arguments { ledgers: true, .. } => " --ledgers",
            Arguments { multi_host: true, .. } => " --multi-host",
            Arguments { cluster: true, .. } => " --cluster",
            Arguments { grid: true, .. } => " --grid",
            _ => "",
        };
        println!("seed {}: {}\n  replay: {}{kind}", finding.seed, finding.why, replay_command(finding.seed));
    }
    let times = if arguments.once { "once" } else { "twice" };
    println!("{count} seeds, each {times}, in {:.1} s: {} findings", start.elapsed().as_secs_f64(), findings.len());
    if findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn hunt(mutation: &mutations::Mutation, count: u64, arguments: &Arguments) -> ExitCode {
    match mutations::hunt(mutation, arguments.from, count, arguments.jobs) {
        Some(finding) => {
            println!("{} ({}) is found by seed {}: {}", mutation.name, mutation.rule, finding.seed, finding.why);
            ExitCode::SUCCESS
        }
        None => {
            println!("{} ({}) is not found by {count} seeds", mutation.name, mutation.rule);
            ExitCode::FAILURE
        }
    }
}

fn main() -> ExitCode {
    let arguments = match parse() {
        Ok(arguments) => arguments,
        Err(why) => {
            eprintln!("{why}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    if arguments.list {
        for mutation in MUTATIONS {
            println!("{} ({})", mutation.name, mutation.rule);
        }
        return ExitCode::SUCCESS;
    }
    let mutation = match arguments.mutation.as_deref().map(|name| (name, mutations::find(name))) {
        Some((name, None)) => {
            eprintln!("there is no mutation `{name}`: see --list-mutations");
            return ExitCode::from(2);
        }
        Some((_, found)) => found,
        None => None,
    };
    match (arguments.seed, arguments.seeds, mutation) {
        (Some(seed), None, _) => run_one(seed, &arguments, mutation),
        (None, Some(count), Some(mutation)) => hunt(mutation, count, &arguments),
        (None, Some(count), None) => run_many(count, &arguments),
        _ => {
            eprintln!("{USAGE}");
            ExitCode::from(2)
        }
    }
}
