//! The page of metrics, of a grid that is at work; and what is made for it, by the tools of Prometheus.

mod support;

use holdfast_lab::guest::Guest;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use support::{Grid, nbdcopy, needs, pattern, text, until};

const WRITTEN: usize = 4 << 20;

/// What curl says of a path of the socket, with more arguments.
fn asked(grid: &Grid, target: &str, more: &[&str]) -> String {
    let mut command = Command::new(needs("curl"));
    command.args(["-sS", "--max-time", "60", "--unix-socket"]).arg(grid.path("api.sock")).args(more);
    let output = command.arg(format!("http://host{target}")).output().expect("it runs");
    assert!(output.status.success(), "{target}: {}", text(&output.stderr));
    text(&output.stdout)
}

fn page(grid: &Grid) -> String {
    asked(grid, "/metrics", &[])
}

/// Of a series; nothing where there is none.
fn value(page: &str, series: &str) -> Option<f64> {
    page.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok())
}

fn promtool(arguments: &[&str], input: &str) -> String {
    let mut command = Command::new(needs("promtool"));
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("it runs");
    let mut stdin = child.stdin.take().expect("its input is piped");
    let input = input.to_string();
    let writes = std::thread::spawn(move || stdin.write_all(input.as_bytes()));
    let output = child.wait_with_output().expect("it ends");
    let _ = writes.join();
    let said = [text(&output.stdout), text(&output.stderr)].concat();
    assert!(output.status.success(), "promtool {arguments:?}: {said}");
    said
}

/// Has the parser of Prometheus read an OpenMetrics page; what it takes in by this way has times.
fn check_open(page: &str, dir: &Path) {
    let timed = |line: &str| if line.starts_with('#') { format!("{line}\n") } else { format!("{line} 1700000000\n") };
    let (from, into) = (dir.join("page"), dir.join("blocks"));
    fs::write(&from, page.lines().map(timed).collect::<String>()).expect("written");
    let paths = [&from, &into].map(|path| path.to_str().expect("a path"));
    promtool(&["tsdb", "create-blocks-from", "openmetrics", paths[0], paths[1]], "");
}

/// Of requests of both kinds: buckets end with the count, and each stage counts as many as there were.
fn check_histograms(page: &str) {
    for op in ["read", "write"] {
        let all = value(page, &format!("holdfast_request_seconds_count{{op=\"{op}\"}}")).expect("it is there");
        assert!(all >= 1.0, "there was a {op}: {page}");
        let ends: Vec<f64> = page
            .lines()
            .filter(|line| line.starts_with("holdfast_request_") && line.contains(&format!("op=\"{op}\"")))
            .filter(|line| line.contains("_count{") || line.contains("le=\"+Inf\""))
            .map(|line| line.rsplit_once(' ').and_then(|(_, count)| count.parse().ok()).expect("a count"))
            .collect();
        assert!(ends.len() > 20 && ends.iter().all(|count| *count == all), "{op}: {ends:?}, not {all}");
        let seconds = |series: &str| -> f64 {
            let is_of = |line: &&str| line.starts_with(series) && line.contains(&format!("op=\"{op}\""));
            let values = page.lines().filter(is_of).filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok());
            values.sum()
        };
        let (whole, stages) =
            (seconds("holdfast_request_seconds_sum{"), seconds("holdfast_request_stage_seconds_sum{"));
        assert!((whole - stages).abs() < 1e-6, "{op}: {whole} s, by stage {stages} s");
        // What is in memory still is read in no time.
        assert!(op == "read" || whole > 0.0, "{page}");
    }
}

#[test]
fn the_page_of_metrics_tells_what_clients_do_and_what_is_not_well() {
    let grid = Grid::new(11);
    grid.up("--nodes 3 --devices 1");
    grid.ok("volume create v1 --size 16MiB --layout mirror:2");
    let before = page(&grid);
    for part in ["status", "loads", "stages", "times", "tasks", "findings", "certificates", "metadata"] {
        assert_eq!(value(&before, &format!("holdfast_scrape_part_up{{part=\"{part}\"}}")), Some(1.0), "{part}");
    }
    let written = "holdfast_volume_written_bytes_total{volume=\"v1\"}";
    assert_eq!(value(&before, written), Some(0.0));
    assert_eq!(value(&before, "holdfast_nodes{state=\"up\"}"), Some(3.0));
    let file = grid.path("pattern");
    pattern(&file, WRITTEN);
    nbdcopy(file.to_str().expect("a path"), &grid.uri("v1"));
    let mut guest = Guest::connect(&grid, "v1");
    assert_eq!(guest.write(8 << 20, 7), 0);
    let after = page(&grid);
    for series in [written, "holdfast_written_bytes_total"] {
        let bytes = value(&after, series).expect("it is there");
        assert!(bytes >= WRITTEN as f64, "{series}: {bytes}");
    }
    assert!(value(&after, "holdfast_volume_writes_total{volume=\"v1\"}") > Some(1.0));
    assert!(
        after.contains("holdfast_volume_latency_seconds{volume=\"v1\",op=\"write\",percentile=\"99\"} 0."),
        "{after}"
    );
    assert!(after.contains("holdfast_volume_stage_seconds{volume=\"v1\",op=\"write\",stage=\"leg device\""), "{after}");
    assert_eq!(guest.read(8 << 20), Ok(7));
    check_histograms(&page(&grid));
    drop(guest);

    // Those that are asked for; the sums stay.
    let none = asked(&grid, "/metrics?volume=v2", &[]);
    assert_eq!((value(&none, written), value(&none, "holdfast_scrape_volumes_left_out")), (None, Some(1.0)));
    assert!(value(&none, "holdfast_written_bytes_total") >= Some(WRITTEN as f64));
    assert!(asked(&grid, "/metrics?name=v1", &[]).contains("\"invalid\""));

    // What is out of service takes nothing out of the sums.
    grid.ok("volume unexport v1");
    until("it is closed", || value(&page(&grid), "holdfast_volumes{state=\"open\"}") == Some(0.0));
    assert!(value(&page(&grid), "holdfast_written_bytes_total") >= Some(WRITTEN as f64));
    grid.ok("volume export v1");

    grid.ok("node kill 3");
    until("the page tells", || {
        let page = page(&grid);
        let warned = value(&page, "holdfast_findings{severity=\"warning\",concern=\"redundancy\"}");
        page.contains("\nholdfast_node_up{node=\"3\"")
            && warned > Some(0.0)
            && page.contains("holdfast_nodes{state=\"down\"} 1")
    });
    let open =
        asked(&grid, "/metrics", &["-i", "-H", "Accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5"]);
    let (head, open) = open.split_once("\r\n\r\n").expect("a head");
    assert!(head.to_lowercase().contains("content-type: application/openmetrics-text"), "{head}");
    assert!(open.ends_with("# EOF\n"));
    check_open(open, grid.dir.path());
    assert_eq!(promtool(&["check", "metrics"], &page(&grid)), "", "nothing to mend");
}

fn integration(name: &str) -> String {
    let path: PathBuf = [env!("CARGO_MANIFEST_DIR"), "..", "..", "integrations", "prometheus", name].iter().collect();
    path.to_str().expect("a path").to_string()
}

#[test]
fn rules_are_right_and_raise_what_they_are_to() {
    let checked = promtool(&["check", "rules", &integration("alerts.yml")], "");
    assert!(checked.contains("SUCCESS"), "{checked}");
    let tested = promtool(&["test", "rules", &integration("alerts_test.yml")], "");
    assert!(tested.contains("SUCCESS"), "{tested}");
}
