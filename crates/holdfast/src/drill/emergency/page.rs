//! The report of a drill as a page for people.

use super::EmergencyReport;
use crate::drill::report::{chart, list, machine_fact, seconds, stretches, troubles, verdict};

pub fn page(report: &EmergencyReport) -> String {
    let told = report.told.clone().unwrap_or_else(|| "nothing of it".to_string());
    let steps: Vec<String> =
        report.steps.iter().map(|step| format!("  {}   # {:.1} s", step.command, step.seconds)).collect();
    format!(
        "{} on {} under {} clients, after {} of {} s: {}\n{}\n`holdfast status` said: {told}\n\n\
         What guests saw, up to the end:\n{}\n\n{}\n\n{}{}\nWhat put it right:\n{}",
        report.drill,
        report.layout,
        report.clients,
        report.seconds / 2,
        report.seconds,
        verdict(report.has_passed()),
        report.harm,
        stretches(&[("before", &report.figures.healthy), ("since", &report.figures.degraded)]),
        facts(report),
        chart(&report.figures.samples),
        troubles(&report.troubles),
        steps.join("\n"),
    )
}

fn facts(report: &EmergencyReport) -> String {
    let (figures, testimony) = (&report.figures, &report.testimony);
    let gap = format!("{} ms, begun {:+.2} s from the loss", figures.longest_gap_ms, figures.longest_gap_began_s);
    let volumes = match report.volumes_changed.is_empty() {
        true => format!("{} are as they were", report.volumes),
        false => format!("{} are as they were, not: {}", report.volumes, report.volumes_changed.join(", ")),
    };
    list(&[
        ("errors", report.errors.to_string()),
        (
            "mismatches",
            format!("{} in {} reads, {} blocks at the end", report.mismatches, testimony.reads, report.blocks_verified),
        ),
        ("longest time without an answer", gap),
        ("slowest read, slowest write", format!("{:.1} ms, {:.1} ms", testimony.read_max_ms, testimony.write_max_ms)),
        ("connections made anew", testimony.reconnections.to_string()),
        ("all well after", format!("{} of mending", seconds(report.whole_s))),
        ("volumes of the grid", volumes),
        machine_fact(report.machine),
    ])
}
