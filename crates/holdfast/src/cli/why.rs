//! `holdfast why slow`: where the time of a volume's requests goes, and what makes the slow ones slow.

use super::format::{print, print_json, table};
use crate::client;
use crate::grid::layout::GridDir;
use anyhow::Result;
use clap::{Args, Subcommand};
use holdfast_api::{Code, Request, Response, SlowInfo, SlowKind, VerdictInfo, refuse};
use holdfast_verdict::ms;
use serde_json::{Value, json};

#[derive(Args, Debug)]
pub struct WhyArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand, Debug)]
enum What {
    /// Where the time of a volume's requests goes, and what makes the slow ones slow
    #[command(after_help = "Examples:\n  \
        holdfast why slow vm7\n  \
        holdfast why slow vm7 --json\n\n\
        Of the last one to two minutes, as its host saw them; always counted. The slow ones are the slowest in a\n\
        hundred.")]
    Slow {
        volume: String,
        /// Also the slowest requests, stage by stage
        #[arg(long)]
        requests: bool,
    },
}

pub fn run(args: &WhyArgs, dir: &GridDir, json: bool) -> Result<()> {
    let What::Slow { volume: name, requests } = &args.what;
    let answer = client::ask(dir, &Request::VolumeSlow { name: name.clone() }, client::UNHURRIED)?;
    let Response::Slow { volume, slow } = answer else {
        refuse!(
            Code::Unsupported,
            "the host gave an answer that this program does not know; it is of another release: restart it"
        );
    };
    let Some(slow) = slow else {
        let whose = volume.host.as_ref().map_or_else(
            || format!("no host has it in service: `holdfast volume export {name}`"),
            |host| format!("host {host} has it, and counts: ask there"),
        );
        refuse!(Code::State, "volume {name} is not in service here, so that nothing was counted; {whose}");
    };
    let kinds = [("reads", &slow.reads, &slow.read_verdict), ("writes", &slow.writes, &slow.write_verdict)];
    let found = kinds.into_iter().filter_map(|(name, kind, verdict)| Some((name, kind.as_ref(), verdict.as_ref()?)));
    let found: Vec<Found> = found.collect();
    if json {
        return print_json(&as_json(name, &slow, &found));
    }
    if found.is_empty() {
        return print(format!("{name}: nothing was asked of it in the last two minutes"));
    }
    found.iter().try_for_each(|(what, kind, verdict)| {
        kind.map_or(Ok(()), |kind| show(name, what, kind, *requests))?;
        print(format!("verdict: {}\n", verdict.text))
    })
}

/// Of one kind of requests: figures of those that were answered, if any were, and the sentence.
type Found<'a> = (&'a str, Option<&'a SlowKind>, &'a VerdictInfo);

fn as_json(name: &str, slow: &SlowInfo, found: &[Found]) -> Value {
    let verdicts: serde_json::Map<String, Value> =
        found.iter().map(|(what, _, verdict)| ((*what).to_string(), json!(verdict))).collect();
    json!({ "volume": name, "slow": slow, "verdicts": verdicts })
}

fn show(name: &str, what: &str, kind: &SlowKind, requests: bool) -> Result<()> {
    let rate = kind.count as f64 * 1000.0 / kind.over_ms.max(1) as f64;
    print(format!(
        "{name} {what}, last {} s: {rate:.0} a second, p50 {}, p99 {}",
        kind.over_ms.div_ceil(1000),
        ms(kind.p50_us),
        ms(kind.p99_us)
    ))?;
    let mut rows = table(&["  stage", "p50", "p99", "of the slow", "what"], &[1, 2, 3]);
    for stage in kind.stages.iter().filter(|stage| stage.p99_us > 0 || stage.slow_us > 0) {
        rows.add_row([
            format!("  {}", stage.stage),
            ms(stage.p50_us),
            ms(stage.p99_us),
            format!("{} %", stage.slow_per_mille / 10),
            stage.about.clone(),
        ]);
    }
    super::format::print_table(&rows)?;
    if requests {
        for slow in &kind.slowest {
            let stages: Vec<String> = slow.stages.iter().map(|(stage, us)| format!("{stage} {}", ms(*us))).collect();
            let ago = slow.ago_ms as f64 / 1000.0;
            print(format!(
                "  {} took {}, {ago:.1} s ago: {}{}",
                &what[..what.len() - 1],
                ms(slow.took_us),
                stages.join(", "),
                slow.node.map_or(String::new(), |node| format!("; node {node} longest"))
            ))?;
        }
    }
    Ok(())
}
