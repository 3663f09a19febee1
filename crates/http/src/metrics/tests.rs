//! The page, of made-up answers.

use super::choice::choose;
use super::examples::{facts, volume};
use super::families::{ALL, reference};
use super::page::{Facts, Format, text};
use super::sums::Sums;
use super::{VOLUMES_MAX, volumes_asked};
use holdfast_api::{Neighbour, VolumeInfo};
use std::collections::BTreeSet;
use std::path::Path;

/// Value of a series on the page.
fn value<'a>(page: &'a str, series: &str) -> Option<&'a str> {
    page.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '))
}

fn series(page: &str) -> impl Iterator<Item = &str> {
    page.lines().filter(|line| !line.starts_with('#'))
}

fn names(page: &str) -> BTreeSet<&str> {
    series(page).map(|line| line.split(['{', ' ']).next().unwrap_or_default()).collect()
}

fn load(name: &str, per_second: u64) -> Neighbour {
    Neighbour { name: name.to_string(), per_second, depth_percent: 100, policy: None }
}

#[test]
fn a_thousand_volumes_fit_the_page() {
    let page = text(facts(1000), Format::OpenMetrics);
    assert!(page.len() <= 2 << 20, "{} bytes", page.len());
    let (all, of_one) = (series(&page).count(), series(&text(facts(1), Format::OpenMetrics)).count());
    assert!(all - of_one < 10_000, "{all} series, of one volume {of_one}");
    assert_eq!(series(&page).filter(|line| line.starts_with("holdfast_volume_size_bytes{")).count(), VOLUMES_MAX);
    assert_eq!(value(&page, "holdfast_scrape_volumes_left_out"), Some("800"));
    // The total is of all.
    assert_eq!(value(&page, "holdfast_reads_total"), Some((1000u64 << 40).to_string().as_str()));
    assert!(page.ends_with("# EOF\n"));
}

#[test]
fn each_family_is_on_the_page_once_and_has_series() {
    let page = text(facts(3), Format::OpenMetrics);
    let all: BTreeSet<String> = ALL.iter().flat_map(|family| family.series_names()).collect();
    let count = ALL.iter().map(|family| family.series_names().len()).sum::<usize>();
    assert_eq!(all.len(), count, "each has a name of its own");
    // Of what the examples have not, families are there without series.
    let without: Vec<&String> = all.iter().filter(|name| !names(&page).contains(name.as_str())).collect();
    assert!(without.is_empty(), "{without:?}");
    let unknown: Vec<&str> = names(&page).into_iter().filter(|name| !all.contains(*name)).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
    assert_eq!(page.matches("# TYPE ").count(), ALL.len());
    assert_eq!(page.matches("# HELP ").count(), ALL.len());
    let lines: BTreeSet<&str> = series(&page).map(|line| line.rsplit_once(' ').expect("a value").0).collect();
    assert_eq!(lines.len(), series(&page).count(), "no series is there twice");
}

#[test]
fn figures_are_in_seconds_and_bytes() {
    let page = text(facts(2), Format::Plain);
    for (series, expected) in [
        ("holdfast_host_uptime_seconds", "61.5"),
        ("holdfast_host_cpu_seconds_total", "2.5"),
        ("holdfast_host_longest_turn_seconds", "0.0015"),
        ("holdfast_capacity_full_in_seconds", "1771200.0"),
        ("holdfast_capacity_raw_bytes", "12000"),
        ("holdfast_capacity_used_bytes", "4800"),
        ("holdfast_capacity_writable_bytes", "6000"),
        ("holdfast_capacity_writable_max_bytes", "10800"),
        ("holdfast_space_saved_bytes", "400"),
        ("holdfast_space_bytes{use=\"dead\"}", "100"),
        ("holdfast_findings{severity=\"warning\",concern=\"data-at-risk\"}", "1"),
        ("holdfast_findings{severity=\"critical\",concern=\"service\"}", "0"),
        ("holdfast_nodes{state=\"cut\"}", "1"),
        ("holdfast_node_up{node=\"6\",machine=\"m6\"}", "0"),
        ("holdfast_volumes{state=\"open\"}", "2"),
        ("holdfast_volume_latency_seconds{volume=\"volume-with-a-name-0\",op=\"read\",percentile=\"99\"}", "0.004567"),
        ("holdfast_volume_queue_depth{volume=\"volume-with-a-name-0\"}", "1.5"),
        ("holdfast_volume_oldest_request_seconds{volume=\"volume-with-a-name-1\",op=\"read\"}", "1.5"),
        ("holdfast_task_left_seconds{task=\"drain device of node 299\",kind=\"drain\"}", "598"),
        (concat!("holdfast_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\",grid=\"demo\",host=\"m1\"}"), "1"),
    ] {
        assert_eq!(value(&page, series), Some(expected), "{series}");
    }
    assert!(value(&page, "holdfast_tasks{kind=\"drain\"}") == Some("299"));
    assert_eq!(page.matches("\nholdfast_task_left{").count(), 100);
}

/// Bounds as they are written, and how many are not above them.
fn buckets<'a>(page: &'a str, family: &str, labels: &str) -> Vec<(&'a str, u64)> {
    let (begin, has_all) = (format!("{family}_bucket{{"), |line: &&str| labels.split(',').all(|of| line.contains(of)));
    let bucket = |line: &'a str| {
        let bound = line.split_once("le=\"")?.1.split('"').next()?;
        Some((bound, line.rsplit_once(' ')?.1.parse().ok()?))
    };
    page.lines().filter(|line| line.starts_with(&begin)).filter(has_all).filter_map(bucket).collect()
}

#[test]
fn buckets_of_a_histogram_rise_to_its_count_and_are_written_alike() {
    let pages = [Format::OpenMetrics, Format::Plain].map(|format| text(facts(1), format));
    for (family, labels) in [
        ("holdfast_request_seconds", r#"op="read""#),
        ("holdfast_request_stage_seconds", r#"op="write",stage="node queue""#),
    ] {
        let all = pages.each_ref().map(|page| buckets(page, family, labels));
        assert_eq!(all[0], all[1]);
        let bounds: Vec<f64> = all[0].iter().map(|(bound, _)| bound.parse().expect("a bound")).collect();
        assert_eq!((bounds.len(), bounds.last()), (19, Some(&f64::INFINITY)));
        assert!(bounds.is_sorted() && all[0].is_sorted_by_key(|(_, count)| *count), "{all:?}");
        for page in &pages {
            let count = value(page, &format!("{family}_count{{{labels}}}")).and_then(|count| count.parse().ok());
            assert_eq!(count, all[0].last().map(|(_, count)| *count));
            assert!(value(page, &format!("{family}_sum{{{labels}}}")).is_some());
        }
    }
}

#[test]
fn labels_are_escaped() {
    for format in [Format::OpenMetrics, Format::Plain] {
        let page = text(facts(1), format);
        assert!(page.contains(r#"path="/srv/a \"b\" \\ c\nd",class="ssd"} 1"#), "{page}");
        assert!(page.lines().all(|line| line.starts_with("holdfast_") || line.starts_with("# ")));
    }
}

#[test]
fn what_could_not_be_told_is_said_and_the_rest_is_there() {
    let page = text(Facts::default(), Format::OpenMetrics);
    for part in ["status", "loads", "stages", "times", "tasks", "findings", "certificates", "metadata"] {
        assert_eq!(value(&page, &format!("holdfast_scrape_part_up{{part=\"{part}\"}}")), Some("0"));
    }
    assert_eq!(
        names(&page),
        BTreeSet::from(["holdfast_build_info", "holdfast_scrape_part_up", "holdfast_scrape_volumes_left_out"])
    );
    let page = text(Facts { tasks: None, slow: None, ..facts(1) }, Format::OpenMetrics);
    assert_eq!(value(&page, "holdfast_scrape_part_up{part=\"tasks\"}"), Some("0"));
    assert_eq!(value(&page, "holdfast_scrape_part_up{part=\"status\"}"), Some("1"));
    assert!(value(&page, "holdfast_metadata_up").is_some());
}

#[test]
fn the_busiest_are_chosen_and_those_that_are_not_safe_before_them() {
    let mut volumes: Vec<VolumeInfo> = (0..300).map(|n| volume(&format!("v{n:03}"))).collect();
    volumes[7].live.as_mut().unwrap().at_risk_entries = 1;
    volumes[8].live = None;
    volumes[9].clone_of = Some("v010".to_string());
    let loads: Vec<Neighbour> = (0..300).map(|n| load(&format!("v{n:03}"), n)).collect();
    let (chosen, left_out) = choose(&volumes, &loads, &[]);
    let names: Vec<&str> = chosen.iter().map(|volume| volume.name.as_str()).collect();
    assert_eq!((names.len(), names[0], names[1]), (VOLUMES_MAX, "v007", "v101"));
    assert_eq!(left_out, 98);
    let asked = ["v008", "v009", "v020", "none"].map(str::to_string);
    let (chosen, _) = choose(&volumes, &loads, &asked);
    assert_eq!(chosen.iter().map(|volume| volume.name.as_str()).collect::<Vec<_>>(), ["v008", "v009", "v020"]);
}

#[test]
fn a_sum_never_goes_down() {
    let mut sums = Sums::default();
    let reading = |name: &str, reads: u64| {
        let mut volume = volume(name);
        volume.live.as_mut().unwrap().counters.reads = reads;
        volume
    };
    let mut look = |volumes: &[VolumeInfo]| {
        sums.add(volumes);
        sums.all()[0]
    };
    assert_eq!(look(&[reading("a", 10), reading("b", 5)]), 15);
    assert_eq!(look(&[reading("a", 12)]), 17, "b is served elsewhere");
    assert_eq!(look(&[reading("a", 3), reading("b", 1)]), 21, "both were opened anew");
    let clone = VolumeInfo { clone_of: Some("a".to_string()), ..reading("c", 3) };
    assert_eq!(look(&[reading("a", 3), reading("b", 1), clone]), 21, "a clone shows its volume's");
}

#[test]
fn only_volumes_can_be_asked_for() {
    assert_eq!(volumes_asked("").unwrap(), [""; 0]);
    assert_eq!(volumes_asked("volume=a&volume=b%201").unwrap(), ["a", "b 1"]);
    let error = volumes_asked("volumes=a").unwrap_err();
    assert!(error.message.contains("?volume=NAME"), "{error}");
}

/// Text of a file of the repository.
fn file(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|why| panic!("{}: {why}", path.display()))
}

#[test]
fn the_list_of_metrics_is_of_those_that_there_are() {
    let is_same = file("docs/reference/metrics.md") == reference();
    assert!(is_same, "it is stale: `holdfast reference --metrics >docs/reference/metrics.md` writes it anew");
}

#[test]
fn whatever_board_and_rules_ask_for_is_on_the_page() {
    let all: BTreeSet<String> = ALL.iter().flat_map(|family| family.series_names()).collect();
    for path in [
        "integrations/prometheus/alerts.yml",
        "integrations/prometheus/alerts_test.yml",
        "integrations/grafana/holdfast.json",
    ] {
        let text = file(path);
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let asked: BTreeSet<&str> = words.filter(|word| word.starts_with("holdfast_")).collect();
        assert!(asked.len() > 10, "{path} asks for {asked:?}");
        let unknown: Vec<&&str> = asked.iter().filter(|name| !all.contains(**name)).collect();
        assert!(unknown.is_empty(), "{path} asks for {unknown:?}");
    }
}
