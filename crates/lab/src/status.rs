//! A grid's state, and what it lacks of all its redundancy.

use anyhow::{Context, Result};
use serde_json::Value;

#[derive(Clone, Debug)]
pub struct Node {
    pub id: u32,
    pub state: String,
    pub pid: Option<u32>,
}

#[derive(Clone, Debug)]
pub struct Volume {
    pub name: String,
    pub state: String,
    pub degraded_segments: u64,
    pub at_risk_entries: u64,
    pub suspect_nodes: usize,
}

/// A grid's state as its command line tells it, as far as it matters to who waits for it to be whole.
#[derive(Clone, Debug)]
pub struct Status {
    pub host_state: String,
    pub host_pid: Option<u32>,
    pub nodes: Vec<Node>,
    pub volumes: Vec<Volume>,
}

impl Status {
    /// Reads what the command line told.
    pub fn parse(all: &Value) -> Result<Status> {
        let list = |key: &str| all[key].as_array().with_context(|| format!("no list '{key}'"));
        let word = |value: &Value, key: &str| {
            value[key].as_str().map(str::to_string).with_context(|| format!("no '{key}' in {value}"))
        };
        let pid = |value: &Value| value["pid"].as_u64().map(|pid| pid as u32);
        let node = |n: &Value| -> Result<Node> {
            let id = n["id"].as_u64().context("a node without an id")? as u32;
            Ok(Node { id, state: word(n, "state")?, pid: pid(n) })
        };
        let nodes: Vec<Node> = list("nodes")?.iter().map(node).collect::<Result<_>>()?;
        // A node that was taken out is away for good.
        let is_node = |id: &&Value| nodes.iter().any(|node| Some(u64::from(node.id)) == id.as_u64());
        let volume = |v: &Value| -> Result<Volume> {
            let live = &v["live"];
            // Absent while the volume is not open: then nothing may be taken for redundant.
            let number = |key: &str| live[key].as_u64().unwrap_or(u64::from(u32::MAX));
            Ok(Volume {
                name: word(v, "name")?,
                state: word(v, "state")?,
                degraded_segments: number("degraded_segments"),
                at_risk_entries: number("at_risk_entries"),
                suspect_nodes: live["suspect_nodes"]
                    .as_array()
                    .map_or(usize::MAX, |ids| ids.iter().filter(is_node).count()),
            })
        };
        Ok(Status {
            host_state: word(&all["host"], "state")?,
            host_pid: pid(&all["host"]),
            volumes: list("volumes")?.iter().map(volume).collect::<Result<_>>()?,
            nodes,
        })
    }

    /// What still keeps the grid from serving all its volumes.
    pub fn not_open(&self) -> Option<String> {
        if self.host_state != "up" {
            return Some(format!("the host is {}", self.host_state));
        }
        let volume = self.volumes.iter().find(|v| v.state != "open")?;
        Some(format!("volume {} is {}", volume.name, volume.state))
    }

    /// What still keeps the grid from having all its redundancy; `None` when nothing does.
    pub fn lacks(&self) -> Option<String> {
        if let Some(what) = self.not_open() {
            return Some(what);
        }
        if let Some(node) = self.nodes.iter().find(|n| n.state != "up") {
            return Some(format!("node {} is {}", node.id, node.state));
        }
        let is_lacking = |v: &&Volume| v.degraded_segments + v.at_risk_entries > 0 || v.suspect_nodes > 0;
        let volume = self.volumes.iter().find(is_lacking)?;
        Some(format!(
            "volume {}: {} degraded segments, {} entries at risk, {} suspect nodes",
            volume.name, volume.degraded_segments, volume.at_risk_entries, volume.suspect_nodes
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_status_tells_what_is_lacking() {
        let lacks = |degraded: u64, node: &str| {
            let live = json!({ "degraded_segments": degraded, "at_risk_entries": 0, "suspect_nodes": [] });
            let told = json!({
                "host": { "state": "up" },
                "nodes": [{ "id": 1, "state": node }],
                "volumes": [{ "name": "v", "state": "open", "live": live }],
            });
            Status::parse(&told).expect("it is a status").lacks()
        };
        assert_eq!(lacks(0, "up"), None);
        assert!(lacks(0, "hung").is_some_and(|what| what.contains("node 1 is hung")));
        assert!(lacks(3, "up").is_some_and(|what| what.contains("3 degraded")));
        assert!(Status::parse(&json!({})).is_err());
    }
}
