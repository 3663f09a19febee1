//! The demo's database drill as a picture: requests a second while a node hangs and returns.

use anyhow::{Context, Result};
use serde_json::Value;
use std::fmt::Write;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 250.0;
const LEFT: f64 = 60.0;
const TOP: f64 = 50.0;
const BOTTOM: f64 = 215.0;

/// In the second load the node returns after so many seconds.
const RETURNS_AFTER_S: f64 = 2.0;

/// An SVG of a report of `holdfast drill node-loss --workload oltp-8k --json`.
pub fn svg(report: &Value) -> Result<String> {
    let first = rates(&report["samples"])?;
    let second = rates(&report["rejoin"]["samples"])?;
    let lost = report["seconds"].as_f64().context("the report has no seconds")? / 2.0;
    let returns = first.len() as f64 + RETURNS_AFTER_S;
    let all = [first, second].concat();
    let most = all.iter().copied().fold(1.0, f64::max);
    let step = (WIDTH - LEFT - 10.0) / all.len() as f64;
    let at = |second: f64| LEFT + second * step;
    let height = |rate: f64| (BOTTOM - TOP) * rate / most;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>\n"
    );
    let (from, to) = (at(lost), at(returns));
    let wide = to - from;
    writeln!(
        out,
        "<rect x=\"{from:.1}\" y=\"{TOP}\" width=\"{wide:.1}\" height=\"{}\" fill=\"#f3d9d2\"/>",
        BOTTOM - TOP
    )?;
    for (second, rate) in all.iter().enumerate() {
        let (x, high) = (at(second as f64) + 1.0, height(*rate));
        let (y, wide) = (BOTTOM - high, step - 2.0);
        writeln!(out, "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{wide:.1}\" height=\"{high:.1}\" fill=\"#34648a\"/>")?;
    }
    let mut text = |x: f64, y: f64, anchor: &str, words: &str| {
        writeln!(out, "<text x=\"{x:.1}\" y=\"{y}\" text-anchor=\"{anchor}\" fill=\"#222222\">{words}</text>")
    };
    let stall = report["longest_gap_ms"].as_u64().context("the report has no longest gap")?;
    let errors = report["errors"].as_u64().context("the report has no errors")?;
    text(LEFT, 20.0, "start", "A database load (oltp-8k) on parity 2+1 over four nodes, one of which hangs")?;
    text(from, 42.0, "start", "node hangs")?;
    text(to, 42.0, "start", "node returns")?;
    text(LEFT - 6.0, TOP + 10.0, "end", &format!("{most:.0}"))?;
    text(LEFT - 6.0, BOTTOM, "end", "0")?;
    let below = format!("requests each second; longest stall {stall} ms, {errors} errors, every block read back");
    text(LEFT, 238.0, "start", &below)?;
    Ok(out + "</svg>\n")
}

fn rates(samples: &Value) -> Result<Vec<f64>> {
    let samples = samples.as_array().context("the report has no samples")?;
    samples.iter().map(|sample| sample["iops"].as_f64().context("a sample has no rate")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn each_second_is_a_bar_and_the_loss_is_shaded() {
        let samples = |rates: &[u64]| rates.iter().map(|r| json!({ "iops": r })).collect::<Vec<_>>();
        let report = json!({ "samples": samples(&[10, 20, 5, 20]), "rejoin": { "samples": samples(&[20, 20, 20]) },
            "seconds": 4, "longest_gap_ms": 54, "errors": 0 });
        let text = svg(&report).unwrap();
        assert_eq!(text.matches("<rect").count(), 2 + 7, "{text}");
        assert!(text.contains("longest stall 54 ms, 0 errors"), "{text}");
        assert!(svg(&json!({})).is_err());
    }
}
