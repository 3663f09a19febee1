//! Protection rules: what a volume shall bear, and the layout that does so on the nodes and devices that there are.
//!
//! A rule chooses once, when it is asked: a grid that grows has no volumes rewritten by itself. Of the layouts that
//! bear what is asked it takes the one that leaves most of the raw capacity; of equals the one that bears more, then
//! the simpler. A code with one parity shard leaves a fault domain spare as soon as there are four, and one with two as
//! soon as there are seven: what is lost is made again there at once. Codes have at most [`DATA_MAX`] data shards: with
//! more, a short read of a lost shard takes too many others.

use holdfast_format::geometry::Layout;
use std::fmt;
use std::str::FromStr;

/// Most data shards that a rule chooses.
pub const DATA_MAX: usize = 8;

/// What may be lost at a time with everything still there.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Protect {
    /// A device, wherever it is.
    Device,
    /// A node with all its devices.
    Node,
    /// A node, and at the same time a device of another one.
    NodeAndDevice,
}

impl Protect {
    /// The least first.
    pub const ALL: [Protect; 3] = [Protect::Device, Protect::Node, Protect::NodeAndDevice];

    /// The most that a layout keeps to.
    pub fn of(layout: Layout) -> Protect {
        match layout {
            Layout::NestedMirror | Layout::NestedParity { .. } => Protect::NodeAndDevice,
            _ if layout.is_on_devices() => Protect::Device,
            _ if layout.failures() > 1 => Protect::NodeAndDevice,
            _ => Protect::Node,
        }
    }
}

impl fmt::Display for Protect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Protect::Device => "device",
            Protect::Node => "node",
            Protect::NodeAndDevice => "node+device",
        })
    }
}

impl FromStr for Protect {
    type Err = String;

    fn from_str(text: &str) -> Result<Protect, String> {
        let found = Protect::ALL.into_iter().find(|rule| rule.to_string() == text);
        found.ok_or_else(|| format!("`{text}` is no rule: use device, node or node+device"))
    }
}

/// What a layout bears the loss of, for people.
pub fn bears(layout: Layout) -> String {
    let failures = layout.failures();
    match layout {
        Layout::NestedMirror | Layout::NestedParity { .. } => {
            "a node, and at the same time a device of the other".to_string()
        }
        _ if layout.is_on_devices() && failures == 1 => "any device, but not its node".to_string(),
        _ if layout.is_on_devices() => format!("any {failures} devices, but not their node"),
        _ if failures == 1 => "any node".to_string(),
        _ => format!("any {failures} nodes"),
    }
}

/// The layout that bears the loss, on nodes with so many devices each; devices that take nothing new don't count.
///
/// # Errors
///
/// A sentence that says what would be needed.
pub fn choose(rule: Protect, devices_by_node: &[usize]) -> Result<Layout, String> {
    let mut by_node: Vec<usize> = devices_by_node.iter().copied().filter(|devices| *devices > 0).collect();
    by_node.sort_unstable_by_key(|devices| std::cmp::Reverse(*devices));
    let (nodes, devices) = (by_node.len(), by_node.iter().sum::<usize>());
    let mut found: Vec<Layout> = Vec::new();
    match rule {
        Protect::Device => {
            found.extend(choose(Protect::Node, &by_node));
            found.extend(over(devices, 1).map(on_devices));
        }
        Protect::Node => found.extend(over(nodes, 1)),
        Protect::NodeAndDevice => {
            found.extend(over(nodes, 2));
            // The other of the two nodes of a segment may be any.
            found.extend(by_node.get(1).and_then(|devices| nested(*devices)));
        }
    }
    // The first of equals.
    let best = found
        .into_iter()
        .reduce(|best, other| if other.efficiency_per_mille() > best.efficiency_per_mille() { other } else { best });
    best.ok_or_else(|| needed(rule, nodes, devices))
}

/// What a new volume gets of which nothing is said where there are too few nodes for the usual layout: the rule that bears
/// most there, and what it chooses. Nothing where there are enough, or where no rule can be followed.
pub fn for_few(devices_by_node: &[usize]) -> Option<(Protect, Layout)> {
    lacks(Layout::DEFAULT, devices_by_node)?;
    let chosen = |rule| choose(rule, devices_by_node).ok().map(|layout| (rule, layout));
    [Protect::Node, Protect::Device].into_iter().find_map(chosen)
}

/// The layout over so many fault domains that bears the loss of so many of them: one or two.
fn over(domains: usize, failures: u8) -> Option<Layout> {
    let m = usize::from(failures);
    if domains <= m {
        return None;
    }
    let spare = usize::from(domains > 3 * m);
    let data = (domains - spare - m).min(DATA_MAX);
    match data {
        // Copies are as good as a code of one data shard, and simpler.
        0 | 1 => Some(Layout::Mirror { copies: failures + 1 }),
        data => Some(Layout::Parity { data: data as u8, parity: failures }),
    }
}

fn on_devices(layout: Layout) -> Layout {
    match layout {
        Layout::Mirror { copies } => Layout::DeviceMirror { copies },
        Layout::Parity { data, parity } => Layout::DeviceParity { data, parity },
        other => other,
    }
}

/// The nested layout for two nodes of so many devices each.
fn nested(devices: usize) -> Option<Layout> {
    match over(devices, 1)? {
        Layout::Parity { data, parity } => Some(Layout::NestedParity { data, parity }),
        _ => Some(Layout::NestedMirror),
    }
}

/// What a layout wants and nodes with so many devices each don't have: in words, and how much of it is there.
pub fn lacks(layout: Layout, devices_by_node: &[usize]) -> Option<(String, usize)> {
    let (width, each) = (usize::from(layout.width()), usize::from(layout.shards_a_domain()));
    let fitting = devices_by_node.iter().filter(|devices| **devices >= each).count();
    let (wants, has) = match layout.is_on_devices() {
        true => (format!("{width} devices"), devices_by_node.iter().sum()),
        false if each > 1 => (format!("{width} nodes of {each} devices"), fitting),
        false => (format!("{width} nodes"), fitting),
    };
    (has < width).then_some((wants, has))
}

fn needed(rule: Protect, nodes: usize, devices: usize) -> String {
    let (node_s, device_s) = (if nodes == 1 { "" } else { "s" }, if devices == 1 { "" } else { "s" });
    let has = format!("this grid has {nodes} node{node_s} with {devices} device{device_s} that take data");
    let wants = match rule {
        Protect::Device => "two devices: add one (`holdfast device add NODE`)",
        Protect::Node => {
            "two nodes: add one (`holdfast node add`), or choose --protect device, which bears no loss of the node"
        }
        Protect::NodeAndDevice => {
            "two nodes of two devices each, or three nodes: add devices (`holdfast device add NODE`) or nodes (`holdfast node \
             add`), or choose --protect node"
        }
    };
    format!("--protect {rule} needs {wants}; {has}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(rule: &str, by_node: &[usize]) -> String {
        choose(rule.parse().unwrap(), by_node).map_or_else(|why| why, |layout| layout.to_string())
    }

    #[test]
    fn the_table_of_rules() {
        let table: [(&[usize], &str, &str, &str); 14] = [
            (&[2], "mirror:2@device", "needs two nodes", "needs two nodes of two"),
            (&[3], "parity:2+1@device", "needs two nodes", "needs two nodes of two"),
            (&[4], "parity:2+1@device", "needs two nodes", "needs two nodes of two"),
            (&[6], "parity:4+1@device", "needs two nodes", "needs two nodes of two"),
            (&[1, 1], "mirror:2", "mirror:2", "needs two nodes of two"),
            (&[2, 2], "parity:2+1@device", "mirror:2", "nested-mirror"),
            (&[3, 3], "parity:4+1@device", "mirror:2", "nested-parity:2+1"),
            (&[5, 9], "parity:8+1@device", "mirror:2", "nested-parity:3+1"),
            (&[1, 1, 1], "parity:2+1", "parity:2+1", "mirror:3"),
            (&[6, 6, 6], "parity:8+1@device", "parity:2+1", "nested-parity:4+1"),
            (&[1; 4], "parity:2+1", "parity:2+1", "parity:2+2"),
            (&[2; 5], "parity:8+1@device", "parity:3+1", "parity:3+2"),
            (&[1; 6], "parity:4+1", "parity:4+1", "parity:4+2"),
            (&[1; 7], "parity:5+1", "parity:5+1", "parity:4+2"),
        ];
        for (by_node, device, node, both) in table {
            for (rule, wanted) in [("device", device), ("node", node), ("node+device", both)] {
                let chosen = chosen(rule, by_node);
                assert!(chosen.contains(wanted), "{rule} on {by_node:?}: {chosen}, not {wanted}");
            }
        }
        assert!(chosen("device", &[1, 0]).contains("needs two devices"));
        assert!(chosen("node", &[5, 0]).contains("this grid has 1 node with 5 devices"));
        assert!("rack".parse::<Protect>().is_err());
    }

    #[test]
    fn what_is_missing_is_said_in_the_layouts_own_terms() {
        let lacks = |layout: &str, by_node: &[usize]| lacks(layout.parse().unwrap(), by_node);
        assert_eq!(lacks("mirror:3@device", &[2]), Some(("3 devices".to_string(), 2)));
        assert_eq!(lacks("nested-mirror", &[2, 1]), Some(("2 nodes of 2 devices".to_string(), 1)));
        assert_eq!(lacks("parity:2+1", &[9, 9]), Some(("3 nodes".to_string(), 2)));
        assert_eq!(lacks("parity:2+1@device", &[2, 1]), None);
    }

    /// What is chosen fits, and bears what was asked.
    #[test]
    fn what_is_chosen_bears_what_was_asked() {
        for nodes in 0..=14_usize {
            for devices in 0..=12_usize {
                let by_node = vec![devices; nodes];
                for rule in Protect::ALL {
                    let Ok(layout) = choose(rule, &by_node) else { continue };
                    let domains = if layout.is_on_devices() { nodes * devices } else { nodes };
                    assert!(usize::from(layout.width()) <= domains, "{rule} {by_node:?}: {layout}");
                    assert!(usize::from(layout.shards_a_domain()) <= devices, "{rule} {by_node:?}: {layout}");
                    assert!(rule == Protect::Device || !layout.is_on_devices());
                    assert!(rule != Protect::NodeAndDevice || layout.is_nested() || layout.failures() == 2);
                    assert_eq!(layout.to_string().parse(), Ok(layout));
                    assert_eq!(lacks(layout, &by_node), None);
                }
            }
        }
    }
}
