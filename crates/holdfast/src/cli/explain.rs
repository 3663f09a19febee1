//! `holdfast volume explain`: a volume drawn from its clients down to devices, with what passes from part to part.

use super::filter;
use super::format::{print, print_json};
use crate::capacity::packed_text;
use crate::client;
use crate::grid::layout::GridDir;
use anyhow::Result;
use holdfast_api::{Code, DeviceInfo, LegParts, NodeInfo, Parts, Request, Response, VolumeInfo, VolumeLive, refuse};
use holdfast_base::size::Size;
use serde_json::json;

/// Width of the names of parts.
const NAME_WIDE: usize = 11;

/// Lines of the drawing: a part has a name, what passes to the next stands beside an arrow.
#[derive(Default)]
struct Drawing {
    lines: Vec<String>,
}

impl Drawing {
    fn part(&mut self, name: &str, text: &str) {
        self.lines.push(format!("{name:NAME_WIDE$}{text}"));
    }

    fn more(&mut self, text: &str) {
        self.part("", text);
    }

    /// What passes on at the same arrow as what follows.
    fn line(&mut self, text: &str) {
        self.part("  │", text);
    }

    /// What passes on, since the volume was opened.
    fn edge(&mut self, texts: &[String]) {
        for text in texts {
            self.line(text);
        }
        self.lines.push("  ▼".to_string());
    }
}

pub fn run(name: &str, dir: &GridDir, json: bool) -> Result<()> {
    let answer = client::ask(dir, &Request::VolumeExplain { name: name.to_string() }, client::UNHURRIED)?;
    let Response::Explained { volume, parts } = answer else {
        refuse!(
            Code::Unsupported,
            "the host gave an answer that this program does not know; it is of another release: restart it"
        );
    };
    super::volume::warn_of(&volume);
    // A node that the volume doesn't use is no part of it.
    let all = client::status(dir)?.nodes;
    let uses = |node: &NodeInfo| parts.as_ref().is_some_and(|parts| uses(parts, node.id));
    let nodes: Vec<NodeInfo> = all.into_iter().filter(|node| uses(node)).collect();
    if json {
        return print_json(&json!({ "volume": volume, "parts": parts, "nodes": nodes }));
    }
    print(draw(&volume, parts.as_deref(), &nodes).join("\n"))
}

fn uses(parts: &Parts, node: u32) -> bool {
    let legs = parts.log.open.iter().flat_map(|open| &open.legs).map(|leg| leg.node);
    parts.devices.iter().map(|device| device.node).chain(legs).any(|used| used == node)
}

fn draw(volume: &VolumeInfo, parts: Option<&Parts>, nodes: &[NodeInfo]) -> Vec<String> {
    let mut drawing = Drawing::default();
    let host = volume.host.as_ref().map_or("in service nowhere".to_string(), |host| format!("at host {host}"));
    let size = Size(volume.size_bytes);
    drawing.part(
        "volume",
        &format!("{}: {size}, {}, {}, {host}, epoch {}", volume.name, volume.layout, volume.state, volume.epoch),
    );
    if let Some(of) = &volume.clone_of {
        drawing.more(&format!("a clone in volume {of}, whose cache, log and segments are told of below"));
    }
    let (Some(live), Some(parts)) = (&volume.live, parts) else {
        let why = volume.waits.clone().unwrap_or_else(|| "only the host that has it open can tell more".to_string());
        drawing.more(&format!("it is {}: {why}", volume.state));
        return drawing.lines;
    };
    drawing.lines.push(String::new());
    draw_front(&mut drawing, volume, live, parts);
    draw_log(&mut drawing, live, parts);
    draw_tier(&mut drawing, volume, live);
    draw_layout(&mut drawing, live, parts);
    draw_nodes(&mut drawing, parts, nodes);
    drawing.lines.push(String::new());
    drawing.lines.push("Beside arrows: counts since the volume was opened. The rest is as of now.".to_string());
    if has_filters(volume) {
        drawing.lines.push("Above a filter: counts since it was added.".to_string());
    }
    drawing.lines
}

fn draw_front(drawing: &mut Drawing, volume: &VolumeInfo, live: &VolumeLive, parts: &Parts) {
    let c = &live.counters;
    drawing.part("front end", &format!("NBD, {} connected", count(volume.sessions as u64, "client")));
    volume.uris.iter().for_each(|uri| drawing.more(uri));
    if volume.only_for.is_some() {
        drawing.more(&format!("for {}", super::volume::whom_for(volume)));
    }
    draw_filters(drawing, volume);
    drawing.edge(&[format!(
        "{} ({}), {} ({})",
        count(c.reads, "read"),
        Size(c.read_bytes),
        count(c.writes, "write"),
        Size(c.write_bytes)
    )]);
    let (cache, max) = (Size(parts.map_cache_bytes), Size(parts.map_cache_bytes_max));
    drawing.part(
        "controller",
        &format!(
            "map: {} mapped, {cache} of {max} cached, {} to it in memory; reads checked: {}",
            Size(live.mapped_bytes),
            count(parts.map_changes, "change"),
            volume.integrity
        ),
    );
    let (reads, writes) = (count(parts.reads_in_flight, "read"), count(parts.writes_in_flight, "write"));
    drawing.more(&format!("{} of what was read came with other blocks, ahead of its reads", Size(c.ahead_bytes)));
    drawing.more(&format!("in flight: {reads}, {writes}; {} waiting", count(parts.waiting, "request")));
    drawing.edge(&[format!(
        "{} appended, {} to a standby too; {} past the log",
        Size(parts.log.appended_bytes),
        count(c.append_hedges, "hedge"),
        Size(c.direct_bytes)
    )]);
}

/// More than a limit stands before the volume.
fn has_filters(volume: &VolumeInfo) -> bool {
    volume.filters.iter().any(|filters| filters.filters.iter().any(|part| !part.kept))
}

/// What stands between clients and the controller, with what crossed the edges since the filters were added.
fn draw_filters(drawing: &mut Drawing, volume: &VolumeInfo) {
    let Some(filters) = volume.filters.as_deref() else { return };
    for part in filters.filters.iter().filter(|part| part.kept) {
        let name = part.spec.split(':').next().unwrap_or_default();
        drawing.part(name, &format!("{}, kept with the volume", part.spec));
        drawing.more(&filter::counters_text(&part.counters));
    }
    if !has_filters(volume) {
        return;
    }
    for part in filters.filters.iter().filter(|part| !part.kept) {
        drawing.edge(&[filter::edge_text(&part.above)]);
        let leaving = if part.leaving { ", going" } else { "" };
        drawing.part("filter", &format!("{}: {}{leaving}", part.id, part.spec));
        if !part.counters.is_empty() {
            drawing.more(&filter::counters_text(&part.counters));
        }
        if part.tool {
            drawing.more("it makes the volume worse on purpose");
        }
    }
    drawing.line(&filter::edge_text(&filters.below));
}

fn draw_log(drawing: &mut Drawing, live: &VolumeLive, parts: &Parts) {
    let (c, log) = (&live.counters, &parts.log);
    drawing.part(
        "log",
        &format!("{} in memory, {} of {}", count(log.entries, "entry"), Size(log.bytes), Size(log.bytes_max)),
    );
    drawing.more(&format!(
        "acknowledged up to entry {}, trimmed up to {}; at risk: {}",
        log.completed_lsn,
        log.trimmed_lsn,
        count(live.at_risk_entries, "entry")
    ));
    match &log.open {
        None => drawing.more("no ledger takes appends now"),
        Some(open) => {
            let (copies, nodes) = (count(open.copies.into(), "leg"), count(open.nodes.into(), "node"));
            let ledgers = count(log.ledgers, "ledger");
            let places = if open.nodes == 0 { "any nodes".to_string() } else { nodes };
            drawing.more(&format!("{ledgers}; in the open one, {}, {copies} in {places} acknowledge", open.id));
            let last = open.legs.len().saturating_sub(1);
            for (n, leg) in open.legs.iter().enumerate() {
                drawing.more(&leg_line(leg, n == last));
            }
        }
    }
    drawing.edge(&[
        format!(
            "{} written ({}), {} being written; {} of ledgers",
            count(c.segments_written, "segment"),
            Size(c.segment_bytes_written),
            parts.jobs,
            count(c.rolls, "roll")
        ),
        format!(
            "{} ({}); {} cleaned ({}), {} freed",
            count(c.checkpoints, "checkpoint"),
            Size(c.checkpoint_bytes),
            count(c.segments_cleaned, "segment"),
            Size(c.cleaned_bytes),
            c.segments_freed
        ),
    ]);
}

fn leg_line(leg: &LegParts, is_last: bool) -> String {
    let branch = if is_last { "└─" } else { "├─" };
    format!("{branch} node {} {}: {}, holds {}", leg.node, leg.device, leg.state, count(leg.entries, "entry"))
}

/// Where data are born before they come to lie in the volume's layout, if anywhere.
fn draw_tier(drawing: &mut Drawing, volume: &VolumeInfo, live: &VolumeLive) {
    let (Some(first), Some(used)) = (volume.tiers.first, live.first_tier) else { return };
    drawing.part("first tier", &format!("{first}: {} of {} filled", Size(used.bytes), Size(used.bytes_max)));
    drawing.edge(&[format!(
        "{} born here, {} past it; {} moved on, by age",
        Size(used.born_bytes),
        Size(used.passed_bytes),
        Size(used.rotated_bytes)
    )]);
}

fn draw_layout(drawing: &mut Drawing, live: &VolumeLive, parts: &Parts) {
    let c = &live.counters;
    if parts.segments.is_empty() {
        drawing.part("layout", "no segments yet: all that was written is in the log");
    }
    for (n, part) in parts.segments.iter().enumerate() {
        let text = format!(
            "{} of {} as {}: {}, {} on devices",
            count(part.segments, "segment"),
            part.kind,
            part.layout,
            count(part.shards, "shard"),
            Size(part.bytes)
        );
        drawing.part(if n == 0 { "layout" } else { "" }, &text);
    }
    let space = &live.space;
    drawing.more(&format!(
        "of it {} data, {} dead, {} redundancy; {} degraded",
        Size(space.data_bytes),
        Size(space.dead_bytes),
        Size(space.redundancy_bytes),
        count(live.degraded_segments, "segment")
    ));
    if let Some(packed) = packed_text(space) {
        drawing.more(&packed);
    }
    drawing.edge(&[
        format!(
            "{} to other shards; {} computed",
            count(c.read_hedges, "read hedge"),
            count(c.reconstructed_reads, "read")
        ),
        format!(
            "shards: {} rebuilt, {} moved ({} by nodes), {} scrubbed, {} deleted; {}",
            c.shards_rebuilt,
            c.shards_moved,
            c.shards_made_by_nodes,
            c.shards_scrubbed,
            c.shards_deleted,
            count(c.checksum_errors, "checksum error")
        ),
    ]);
}

fn draw_nodes(drawing: &mut Drawing, parts: &Parts, nodes: &[NodeInfo]) {
    if nodes.is_empty() {
        drawing.part("nodes", "none holds anything of it");
    }
    for (n, node) in nodes.iter().enumerate() {
        let text = format!("node {} at {}: {}", node.id, node.address, node.state());
        drawing.part(if n == 0 { "nodes" } else { "" }, &text);
        let held: Vec<_> = parts.devices.iter().filter(|part| part.node == node.id).collect();
        for (i, part) in held.iter().enumerate() {
            let branch = if i + 1 == held.len() { "└─" } else { "├─" };
            let told = node.devices.iter().find(|device| device.device == part.device);
            drawing.more(&format!("{branch} {}: {}, {}", part.device, count(part.shards, "shard"), Size(part.bytes)));
            let indent = if i + 1 == held.len() { "  " } else { "│ " };
            drawing.more(&format!("{indent} {}", device_text(told)));
        }
    }
}

/// What its node says of a device, for all volumes together.
fn device_text(told: Option<&DeviceInfo>) -> String {
    let Some(device) = told else { return "its node tells nothing of it now".to_string() };
    let millis = |us: Option<u32>| us.map_or("-".to_string(), |us| format!("{:.2} ms", f64::from(us) / 1000.0));
    format!(
        "{}, {} free of {}, reads {}, writes {}, {}",
        device.state(),
        Size(device.free_bytes),
        Size(device.capacity_bytes),
        millis(device.read_p99_us),
        millis(device.write_p99_us),
        count(device.io_errors, "error")
    )
}

/// `1 shard`, `2 shards`, `3 entries`.
fn count(number: u64, what: &str) -> String {
    match (number, what.strip_suffix('y')) {
        (1, _) => format!("1 {what}"),
        (_, Some(stem)) => format!("{number} {stem}ies"),
        (_, None) => format!("{number} {what}s"),
    }
}
