//! What a drill says: one page for people, or one JSON document.

use super::film::{BUFFER_FRAMES, FilmReport};
use super::load::LoadReport;
use super::machine::Machine;
use super::rejoin::Rejoin;
use super::stats::{Sample, Stretch};
use crate::cli::format::{self, table};
use anyhow::Result;
use comfy_table::Table;
use serde::Serialize;

/// Samples drawn in a row of the chart.
const CHART_WIDTH: usize = 60;

pub fn print<T: Serialize>(json: bool, report: &T, page: impl FnOnce() -> String) -> Result<()> {
    if json { format::print_json(report) } else { format::print(page()) }
}

pub fn seconds(value: Option<f64>) -> String {
    value.map_or_else(|| "never".to_string(), |s| format!("{s:.1} s"))
}

fn percent(ratio: f64) -> String {
    format!("{:.1} %", ratio * 100.0)
}

pub fn verdict(passed: bool) -> &'static str {
    if passed { "passed" } else { "FAILED" }
}

/// Two columns: what, and how much.
pub fn list(rows: &[(&str, String)]) -> String {
    let lines: Vec<String> = rows.iter().map(|(name, value)| format!("{name:<32}{value}")).collect();
    lines.join("\n")
}

fn lines(table: &Table) -> String {
    let lines: Vec<String> = table.lines().map(|line| line.trim_end().to_string()).collect();
    lines.join("\n")
}

pub fn troubles(words: &[String]) -> String {
    words.iter().fold(String::new(), |text, word| format!("{text}! {word}\n"))
}

pub fn load_page(report: &LoadReport) -> String {
    format!(
        "{} on {}, queue depth {}: node {} out ({}) after {} of {} s: {}\n\n{}\n\n\
         Means leave out {} s on both sides of the loss; maxima and gaps leave out nothing.\n\n{}\n\n{}{}\n\
         To repeat the load on a volume that is exported:\n  {}",
        report.workload,
        report.layout,
        report.queue_depth,
        report.node,
        report.fault,
        report.seconds / 2,
        report.seconds,
        verdict(report.has_passed()),
        phases(report),
        report.margin_s,
        load_facts(report),
        chart(&report.figures.samples),
        troubles(&report.troubles),
        report.fio,
    )
}

/// What requests took in each stretch of a load.
fn stretch_table(stretches: &[(&str, &Stretch)]) -> Table {
    let mut table = table(&["", "IOPS", "mean ms", "p99 ms", "max ms"], &[1, 2, 3, 4]);
    for (name, stretch) in stretches {
        table.add_row([
            name.to_string(),
            format!("{:.0}", stretch.iops),
            format!("{:.3}", stretch.mean_ms),
            format!("{:.1}", stretch.p99_ms),
            format!("{:.1}", stretch.max_ms),
        ]);
    }
    table
}

pub fn stretches(stretches: &[(&str, &Stretch)]) -> String {
    lines(&stretch_table(stretches))
}

fn phases(report: &LoadReport) -> String {
    let mut table = stretch_table(&[("healthy", &report.figures.healthy), ("node out", &report.figures.degraded)]);
    let rejoin = &report.rejoin;
    let max_ms = rejoin.read_max_ms.max(rejoin.write_max_ms);
    table.add_row(["node returning", &format!("{:.0}", rejoin.iops), "", "", &format!("{max_ms:.1}")]);
    lines(&table)
}

fn load_facts(report: &LoadReport) -> String {
    let (figures, rejoin) = (&report.figures, &report.rejoin);
    let gap = format!("{} ms, begun {:+.2} s from the loss", figures.longest_gap_ms, figures.longest_gap_began_s);
    let mut facts = vec![
        ("errors", report.errors.to_string()),
        ("mismatches", format!("{} in {} blocks read back", report.mismatches, report.blocks_verified)),
        ("retained IOPS, node out", percent(figures.retained)),
        ("retained IOPS, node returning", format!("{} over {:.1} s", percent(rejoin.iops_ratio), rejoin.window_s)),
        ("longest gap", gap),
        ("longest gap of reads, of writes", format!("{} ms, {} ms", figures.read_gap_ms, figures.write_gap_ms)),
        ("slowest read, slowest write", format!("{:.1} ms, {:.1} ms", figures.read_max_ms, figures.write_max_ms)),
        ("longest gap, node returning", format!("{} ms", rejoin.longest_gap_ms)),
    ];
    facts.extend(rejoin_facts(&rejoin.rejoin));
    facts.push(("witness", format!("{} writes, {} reads", report.witness.writes, report.witness.reads)));
    facts.push(machine_fact(report.machine));
    list(&facts)
}

fn rejoin_facts(rejoin: &Rejoin) -> [(&'static str, String); 2] {
    let lacking = rejoin.degraded_segments;
    [
        ("return noticed after", seconds(rejoin.noticed_s)),
        ("fully redundant after", format!("{} ({lacking} segments lacked a shard)", seconds(rejoin.redundant_s))),
    ]
}

/// Pauses that are not the grid's.
pub fn machine_fact(machine: Machine) -> (&'static str, String) {
    let Machine { pause_max_ms, durable_write_max_ms } = machine;
    let text =
        format!("woke a thread {pause_max_ms:.0} ms late, wrote 4 KiB in {durable_write_max_ms:.0} ms, at worst");
    ("the machine meanwhile", text)
}

/// IOPS over time as one line of blocks.
pub fn chart(samples: &[Sample]) -> String {
    const LEVELS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let per_column = samples.len().div_ceil(CHART_WIDTH).max(1);
    let columns: Vec<u64> = samples
        .chunks(per_column)
        .map(|chunk| chunk.iter().map(|s| s.iops).sum::<u64>() / chunk.len() as u64)
        .collect();
    let Some(max) = columns.iter().copied().max().filter(|max| *max > 0) else { return String::new() };
    let line: String = columns.iter().map(|iops| LEVELS[((iops * 8).div_ceil(max)) as usize]).collect();
    let unit = if per_column == 1 { "second".to_string() } else { format!("{per_column} seconds") };
    format!("IOPS, a column a {unit}, up to {max}:\n{line}\n")
}

pub fn film_page(report: &FilmReport) -> String {
    let proof = &report.counter_proof;
    let shown = format!("{} of {} frames lost while a server stood {:.1} s", proof.lost, proof.frames, proof.stopped_s);
    let mut facts = vec![
        ("lost frames", report.lost_frames.to_string()),
        ("errors", report.errors.to_string()),
        ("artefacts and wrong blocks", report.mismatches.to_string()),
        ("shown to count", shown),
    ];
    facts.extend(rejoin_facts(&report.rejoin));
    facts.push(machine_fact(report.machine));
    format!(
        "three films on {}: node {} out ({}) after {} of {} s: {}\n\n{}\n\n{}\n{}",
        report.layout,
        report.node,
        report.fault,
        report.seconds / 2,
        report.seconds,
        verdict(report.has_passed()),
        players(report),
        list(&facts),
        troubles(&report.troubles),
    )
}

fn players(report: &FilmReport) -> String {
    let header = ["film", "frames", "shown", "lost", "artefacts", "fewest ready", "slowest read", "read ahead"];
    let mut table = table(&header, &[1, 2, 3, 4, 5, 6, 7]);
    for player in &report.players {
        table.add_row([
            player.film.clone(),
            player.frames.to_string(),
            player.shown.to_string(),
            player.lost.to_string(),
            player.artefacts.to_string(),
            format!("{} of {BUFFER_FRAMES}", player.ready_min),
            format!("{:.1} ms", player.slowest_read_ms),
            format!("{} frames", player.read_ahead_max),
        ]);
    }
    lines(&table)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(iops: &[u64]) -> Vec<Sample> {
        let mut timeline = super::super::stats::Timeline::new(u64::MAX, 0);
        for (second, count) in iops.iter().enumerate() {
            for i in 0..*count {
                let at_ms = second as u64 * 1000 + i * 1000 / count;
                let completion = super::super::stats::Completion { at_ms, latency_ns: 1_000_000, is_write: false };
                timeline.record(completion);
            }
        }
        timeline.figures().samples
    }

    #[test]
    fn a_chart_has_a_column_a_second_and_shows_a_stall() {
        let text = chart(&samples(&[100, 100, 0, 50, 100]));
        assert!(text.contains("██ ▄█"), "{text}");
        assert!(text.contains("up to 100"), "{text}");
        assert_eq!(chart(&[]), "");
    }

    #[test]
    fn long_runs_fit_the_page() {
        let text = chart(&samples(&[10; 600]));
        assert!(text.lines().nth(1).unwrap().chars().count() <= CHART_WIDTH, "{text}");
        assert!(text.contains("a column a 10 seconds"), "{text}");
    }
}
