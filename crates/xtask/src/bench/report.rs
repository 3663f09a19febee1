//! What a part found: for each goal what was measured, as a table for people or as JSON.

use serde_json::{Value, json};

pub struct Report {
    name: &'static str,
    title: &'static str,
    rows: Vec<Row>,
    remarks: Vec<String>,
}

struct Row {
    what: String,
    /// Empty: only told.
    goal: String,
    measured: Option<f64>,
    unit: &'static str,
    reached: Option<bool>,
}

impl Report {
    pub fn new(name: &'static str, title: &'static str) -> Report {
        Report { name, title, rows: Vec::new(), remarks: Vec::new() }
    }

    /// A figure that has no goal of its own.
    pub fn told(&mut self, what: impl Into<String>, measured: f64, unit: &'static str) {
        let (what, goal) = (what.into(), String::new());
        self.rows.push(Row { what, goal, measured: Some(measured), unit, reached: None });
    }

    pub fn judged(
        &mut self,
        what: impl Into<String>,
        goal: impl Into<String>,
        (measured, unit): (f64, &'static str),
        reached: bool,
    ) {
        let (what, goal) = (what.into(), goal.into());
        self.rows.push(Row { what, goal, measured: Some(measured), unit, reached: Some(reached) });
    }

    /// A goal about which nothing can be said, and why.
    pub fn unmeasured(&mut self, what: impl Into<String>, goal: impl Into<String>, why: &str) {
        let (what, goal) = (what.into(), goal.into());
        self.remark(format!("{what}: not measured: {why}"));
        self.rows.push(Row { what, goal, measured: None, unit: "", reached: None });
    }

    pub fn remark(&mut self, text: impl Into<String>) {
        self.remarks.push(text.into());
    }

    pub fn print(&self) {
        println!("### {}\n\n| what | goal | measured | reached |\n| --- | --- | --- | --- |", self.title);
        for row in &self.rows {
            let goal = if row.goal.is_empty() { "–" } else { &row.goal };
            let measured = row.measured.map_or_else(|| "not measured".to_string(), |m| shown(m, row.unit));
            let reached = row.reached.map_or("–", |r| if r { "yes" } else { "no" });
            println!("| {} | {goal} | {measured} | {reached} |", row.what);
        }
        println!();
        for remark in &self.remarks {
            println!("{remark}\n");
        }
    }
}

pub fn json(reports: &[Report]) -> Value {
    let row =
        |r: &Row| json!({"what": r.what, "goal": r.goal, "measured": r.measured, "unit": r.unit, "reached": r.reached});
    let report =
        |r: &Report| json!({"part": r.name, "rows": r.rows.iter().map(row).collect::<Vec<_>>(), "remarks": r.remarks});
    reports.iter().map(report).collect()
}

/// Three digits that count, or all before the point.
fn shown(value: f64, unit: &str) -> String {
    let digits = match value.abs() {
        v if v >= 100.0 || v == 0.0 => 0,
        v if v >= 10.0 => 1,
        _ => 2,
    };
    format!("{value:.digits$} {unit}").trim_end().to_string()
}
