//! Every deliberate fault of the machines is found by the swarm: whoever breaks a protocol rule hears of it.

use holdfast_sim::mutations::{MUTATIONS, hunt};

const SEEDS_MAX: u64 = 4000;

#[test]
fn every_mutation_is_found() {
    let jobs = std::thread::available_parallelism().map_or(2, |n| n.get());
    let mut missed = Vec::new();
    for mutation in MUTATIONS {
        match hunt(mutation, 0, SEEDS_MAX, jobs) {
            Some(found) => println!("{} ({}): seed {}: {}", mutation.name, mutation.rule, found.seed, found.why),
            None => missed.push(mutation.name),
        }
    }
    assert!(missed.is_empty(), "not found within {SEEDS_MAX} seeds: {missed:?}");
}
