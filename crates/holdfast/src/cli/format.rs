//! Tables for people, JSON for programs.

use anyhow::Result;
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;
use std::io::Write;

/// A table whose columns named in `right` are numbers.
pub fn table(header: &[&str], right: &[usize]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(header);
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        if right.contains(&index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

pub fn print(text: impl std::fmt::Display) -> Result<()> {
    // A reader that has seen enough (`| head`) is no error.
    match writeln!(std::io::stdout(), "{text}") {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(e.into()),
        _ => Ok(()),
    }
}

pub fn print_table(table: &Table) -> Result<()> {
    let lines: Vec<String> = table.lines().map(|line| line.trim_end().to_string()).collect();
    print(lines.join("\n"))
}

pub fn print_json<T: Serialize>(value: &T) -> Result<()> {
    print(serde_json::to_string_pretty(value)?)
}

/// What share of `whole` is not `free`.
pub fn percent_used(whole: u64, free: u64) -> String {
    if whole == 0 {
        "-".to_string()
    } else {
        format!("{:.0} %", whole.saturating_sub(free) as f64 * 100.0 / whole as f64)
    }
}
