//! What a benchmark says: tables with the report's figures beside them, ratios with their goals, and the machine.

use crate::cli::format;
use anyhow::Result;
use comfy_table::Table;
use serde::Serialize;
use serde_json::Value;

/// A ratio, or another figure that compares across machines, and what is wanted of it.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Goal {
    pub name: String,
    pub value: f64,
    pub wanted: Wanted,
    /// What the report had.
    pub report: Option<f64>,
}

#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Wanted {
    AtLeast(f64),
    AtMost(f64),
    /// For reading.
    Nothing,
}

impl Goal {
    pub fn at_least(name: impl Into<String>, value: f64, least: f64, report: Option<f64>) -> Goal {
        Goal { name: name.into(), value, wanted: Wanted::AtLeast(least), report }
    }

    pub fn at_most(name: impl Into<String>, value: f64, most: f64, report: Option<f64>) -> Goal {
        Goal { name: name.into(), value, wanted: Wanted::AtMost(most), report }
    }

    pub fn told(name: impl Into<String>, value: f64, report: Option<f64>) -> Goal {
        Goal { name: name.into(), value, wanted: Wanted::Nothing, report }
    }

    pub fn is_met(&self) -> bool {
        match self.wanted {
            Wanted::AtLeast(least) => self.value >= least,
            Wanted::AtMost(most) => self.value <= most,
            Wanted::Nothing => true,
        }
    }

    fn line(&self) -> String {
        let wanted = match self.wanted {
            Wanted::AtLeast(least) => {
                format!("goal: at least {least}, {}", if self.is_met() { "met" } else { "MISSED" })
            }
            Wanted::AtMost(most) => format!("goal: at most {most}, {}", if self.is_met() { "met" } else { "MISSED" }),
            Wanted::Nothing => String::new(),
        };
        let report = self.report.map_or(String::new(), |report| format!("the report: {report}"));
        let beside: Vec<String> = [wanted, report].into_iter().filter(|text| !text.is_empty()).collect();
        let beside = if beside.is_empty() { String::new() } else { format!(" ({})", beside.join("; ")) };
        format!("{:<44}{:>9.3}{beside}", self.name, self.value)
    }
}

/// One of them, whole.
pub struct Report {
    pub title: String,
    /// Each with what stands above it.
    pub tables: Vec<(String, Table)>,
    pub goals: Vec<Goal>,
    pub remarks: Vec<String>,
    /// All figures, for programs.
    pub figures: Value,
    pub machine: String,
}

impl Report {
    pub fn missed(goals: &[Goal]) -> Vec<String> {
        goals.iter().filter(|goal| !goal.is_met()).map(|goal| format!("{} is {:.3}", goal.name, goal.value)).collect()
    }

    pub fn print(&self, json: bool) -> Result<()> {
        if json {
            let (title, goals, machine) = (&self.title, &self.goals, &self.machine);
            let (figures, remarks) = (&self.figures, &self.remarks);
            return format::print_json(&serde_json::json!({
                "title": title, "figures": figures, "goals": goals, "remarks": remarks, "machine": machine,
            }));
        }
        format::print(format!("{}\n{}", self.title, self.machine))?;
        for (above, table) in &self.tables {
            format::print(format!("\n{above}"))?;
            format::print_table(table)?;
        }
        format::print("")?;
        self.goals.iter().try_for_each(|goal| format::print(goal.line()))?;
        self.remarks.iter().try_for_each(format::print)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goals_are_met_or_missed_and_say_so() {
        let goals = [
            Goal::at_least("of bare", 0.5, 0.864, Some(0.864)),
            Goal::at_most("CPU", 2.0, 3.0, None),
            Goal::told("growth", 1.0, None),
        ];
        assert_eq!(Report::missed(&goals), ["of bare is 0.500"]);
        assert!(goals[0].line().ends_with("(goal: at least 0.864, MISSED; the report: 0.864)"), "{}", goals[0].line());
        assert!(goals[1].line().ends_with("(goal: at most 3, met)"), "{}", goals[1].line());
        assert!(goals[2].line().ends_with("1.000"));
    }
}
