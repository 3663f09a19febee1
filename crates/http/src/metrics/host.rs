//! The host: its process, what is not well, metadata, certificates, tasks.

use super::families as f;
use super::page::Facts;
use super::sheet::{Sheet, of_ms, of_us};
use holdfast_api::{Concern, Finding, Severity, TaskInfo, TaskKind};
use std::cmp::Reverse;
use std::fmt::Result;

/// Tasks with series of their own: those with most left.
const TASKS_MAX: usize = 100;

const SEVERITIES: [(Severity, &str); 2] = [(Severity::Warning, "warning"), (Severity::Critical, "critical")];

const CONCERNS: [(Concern, &str); 7] = [
    (Concern::Service, "service"),
    (Concern::DataAtRisk, "data-at-risk"),
    (Concern::Redundancy, "redundancy"),
    (Concern::Capacity, "capacity"),
    (Concern::Metadata, "metadata"),
    (Concern::Certificates, "certificates"),
    (Concern::Time, "time"),
];

pub fn write(facts: &Facts, sheet: &mut Sheet<'_>) -> Result {
    let status = facts.status.as_deref();
    let names = status.map_or(("", ""), |status| (&status.grid, &status.host));
    sheet.series(&f::BUILD, [([env!("CARGO_PKG_VERSION"), names.0, names.1], 1u64)])?;
    sheet.one(&f::UPTIME, status.map(|s| of_ms(s.uptime_ms)))?;
    sheet.one(&f::CPU, status.map(|s| of_ms(s.cpu_ms)))?;
    sheet.one(&f::PACKING_CPU, status.map(|s| of_ms(s.packing_cpu_ms)))?;
    sheet.one(&f::PACKING_REFUSED, status.map(|s| s.packing.refused_bytes))?;
    sheet.one(&f::RESIDENT, status.map(|s| s.resident_bytes))?;
    let turn = |turn: &holdfast_api::LongTurn| of_us(turn.took_us);
    sheet.one(&f::LONGEST_TURN, status.and_then(|s| s.longest_turn.as_ref()).map(turn))?;
    sheet.one(&f::CROSSINGS, status.map(|s| s.crossings))?;
    write_findings(facts.findings.as_deref(), sheet)?;
    sheet.one(&f::METADATA_UP, status.map(|s| s.metadata_trouble.is_none()))?;
    sheet.one(&f::METADATA_MEMBERS, facts.members)?;
    sheet.one(&f::UNREADABLE, status.map(|s| s.unreadable.len()))?;
    sheet.one(&f::FOUND, status.map(|s| s.found.len()))?;
    let certificates = facts.certificates.iter().flatten();
    sheet.series(&f::CERTIFICATE_END, certificates.map(|of| ([of.role.as_str()], of.ends_s)))?;
    write_tasks(facts.tasks.as_deref(), sheet)
}

fn write_findings(findings: Option<&[Finding]>, sheet: &mut Sheet<'_>) -> Result {
    let kinds = SEVERITIES.into_iter().flat_map(|severity| CONCERNS.map(|concern| (severity, concern)));
    let counts = findings.into_iter().flat_map(|findings| {
        kinds.clone().map(|((severity, text), (concern, about))| {
            let is_such = |of: &&Finding| of.severity == severity && of.concern == concern && !of.announced;
            let count = findings.iter().filter(is_such).count();
            ([text, about], count)
        })
    });
    sheet.series(&f::FINDINGS, counts)
}

fn write_tasks(tasks: Option<&[TaskInfo]>, sheet: &mut Sheet<'_>) -> Result {
    let counts = tasks.into_iter().flat_map(|tasks| {
        let kinds = TaskKind::ALL.iter();
        kinds.map(|kind| ([kind.text()], tasks.iter().filter(|task| task.kind == *kind).count()))
    });
    sheet.series(&f::TASKS, counts)?;
    let mut shown: Vec<&TaskInfo> = tasks.into_iter().flatten().collect();
    shown.sort_by_key(|task| Reverse(task.left));
    shown.truncate(TASKS_MAX);
    let labels =
        |task: &&'_ TaskInfo| -> [String; 3] { [task.name.clone(), task.kind.to_string(), task.unit.to_string()] };
    let labels: Vec<[String; 3]> = shown.iter().map(labels).collect();
    let whole = || shown.iter().zip(&labels).map(|(task, labels)| (*task, labels.each_ref().map(String::as_str)));
    sheet.series(&f::TASK_LEFT, whole().map(|(task, labels)| (labels, task.left)))?;
    sheet.series(&f::TASK_RATE, whole().map(|(task, labels)| (labels, task.per_second)))?;
    let timed = whole().filter_map(|(task, [name, kind, _])| Some(([name, kind], task.seconds_left?)));
    sheet.series(&f::TASK_TIME, timed)
}
