//! Which crate may import which: decisions below, I/O in one place, the simulator never on the runtime.

use super::Finding;
use crate::tools;
use anyhow::{Context, Result};
use std::path::Path;

struct Allowed {
    name: &'static str,
    /// Crates of this workspace.
    ours: &'static [&'static str],
    /// Crates from elsewhere, where the list is closed: what decides must not be able to reach clock, disk or network,
    /// and what `xtask` stands on is to be few.
    theirs: Option<&'static [&'static str]>,
}

const EDGES: &[Allowed] = &[
    Allowed { name: "holdfast-base", ours: &[], theirs: Some(&["crc-fast", "serde"]) },
    Allowed { name: "holdfast-erasure", ours: &[], theirs: Some(&["thiserror"]) },
    Allowed { name: "holdfast-cipher", ours: &["holdfast-base"], theirs: Some(&["ring"]) },
    Allowed { name: "holdfast-format", ours: &["holdfast-base"], theirs: Some(&["postcard", "serde", "serde_json"]) },
    Allowed {
        name: "holdfast-compress",
        ours: &["holdfast-base", "holdfast-format"],
        theirs: Some(&["lz4_flex", "thiserror", "zstd-safe"]),
    },
    Allowed { name: "holdfast-api", ours: &["holdfast-base", "holdfast-format"], theirs: Some(&["serde", "utoipa"]) },
    Allowed { name: "holdfast-http", ours: &["holdfast-api", "holdfast-base", "holdfast-format"], theirs: None },
    Allowed { name: "holdfast-image", ours: &[], theirs: Some(&["flate2", "imago", "rustix", "tar", "thiserror"]) },
    Allowed {
        name: "holdfast-backup",
        ours: &["holdfast-base", "holdfast-cipher", "holdfast-format"],
        theirs: Some(&[
            "clap",
            "clap_mangen",
            "jiff",
            "rand_core",
            "rustix",
            "rusty-s3",
            "serde",
            "serde_json",
            "thiserror",
            "ureq",
            "uuid",
            "zstd-safe",
        ]),
    },
    Allowed { name: "holdfast-cluster", ours: &["holdfast-base", "holdfast-format"], theirs: Some(&[]) },
    Allowed {
        name: "holdfast-volume",
        ours: &[
            "holdfast-base",
            "holdfast-cipher",
            "holdfast-compress",
            "holdfast-format",
            "holdfast-erasure",
            "holdfast-stages",
        ],
        theirs: Some(&["postcard", "serde", "thiserror"]),
    },
    Allowed {
        name: "holdfast-store",
        ours: &["holdfast-base", "holdfast-format", "holdfast-erasure"],
        theirs: Some(&["postcard", "serde", "thiserror"]),
    },
    Allowed { name: "holdfast-frontend", ours: &["holdfast-base"], theirs: Some(&["thiserror"]) },
    Allowed { name: "holdfast-filter", ours: &["holdfast-base"], theirs: Some(&[]) },
    Allowed { name: "holdfast-qos", ours: &["holdfast-base"], theirs: Some(&[]) },
    Allowed { name: "holdfast-stages", ours: &["holdfast-base"], theirs: Some(&[]) },
    Allowed {
        name: "holdfast-host",
        ours: &[
            "holdfast-base",
            "holdfast-cipher",
            "holdfast-cluster",
            "holdfast-format",
            "holdfast-filter",
            "holdfast-qos",
            "holdfast-stages",
            "holdfast-volume",
        ],
        theirs: Some(&[]),
    },
    Allowed {
        name: "holdfast-verdict",
        ours: &[
            "holdfast-api",
            "holdfast-base",
            "holdfast-filter",
            "holdfast-format",
            "holdfast-host",
            "holdfast-volume",
        ],
        theirs: Some(&["serde"]),
    },
    Allowed { name: "holdfast-runtime", ours: &["holdfast-base", "holdfast-format"], theirs: None },
    Allowed {
        name: "holdfast-sim",
        ours: &[
            "holdfast-api",
            "holdfast-base",
            "holdfast-cipher",
            "holdfast-cluster",
            "holdfast-format",
            "holdfast-filter",
            "holdfast-host",
            "holdfast-qos",
            "holdfast-store",
            "holdfast-verdict",
            "holdfast-volume",
            "holdfast-erasure",
        ],
        theirs: Some(&["postcard", "serde"]),
    },
    Allowed {
        name: "holdfast",
        ours: &[
            "holdfast-api",
            "holdfast-backup",
            "holdfast-base",
            "holdfast-cipher",
            "holdfast-cluster",
            "holdfast-erasure",
            "holdfast-format",
            "holdfast-frontend",
            "holdfast-filter",
            "holdfast-host",
            "holdfast-http",
            "holdfast-image",
            "holdfast-runtime",
            "holdfast-store",
            "holdfast-verdict",
            "holdfast-volume",
        ],
        theirs: None,
    },
    Allowed { name: "holdfast-lab", ours: &[], theirs: Some(&["anyhow", "rustix", "serde_json"]) },
    Allowed { name: "holdfast-torture", ours: &["holdfast-base", "holdfast-format", "holdfast-lab"], theirs: None },
    Allowed { name: "xtask", ours: &["holdfast-lab"], theirs: None },
];

pub fn check() -> Result<Vec<Finding>> {
    let mut command = tools::cargo_command();
    command.args(["metadata", "--format-version", "1", "--no-deps"]);
    let metadata = tools::json_of(&mut command)?;
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
    let names: Vec<&str> = packages.iter().filter_map(|p| p["name"].as_str()).collect();
    let mut findings = Vec::new();
    for package in packages {
        let name = package["name"].as_str().context("a package without a name")?;
        let manifest = Path::new(package["manifest_path"].as_str().unwrap_or_default());
        let manifest = manifest.strip_prefix(tools::root()).unwrap_or(manifest);
        let Some(allowed) = EDGES.iter().find(|a| a.name == name) else {
            findings.push(Finding::error(
                manifest,
                0,
                format!("crate {name} has no line in the table of allowed edges"),
            ));
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let (Some(to), kind) = (dependency["name"].as_str(), dependency["kind"].as_str()) else { continue };
            let features = dependency["features"].as_array().into_iter().flatten();
            let features: Vec<&str> = features.filter_map(|feature| feature.as_str()).collect();
            let refused = refuse(allowed, to, names.contains(&to), kind);
            for text in refused.into_iter().chain(refuse_features(name, to, &features, kind)) {
                findings.push(Finding::error(manifest, 0, text));
            }
        }
    }
    Ok(findings)
}

/// Why `allowed` may not depend on `to`. Tests may use any outside crate, but no more of ours than the crate itself.
fn refuse(allowed: &Allowed, to: &str, is_ours: bool, kind: Option<&str>) -> Option<String> {
    let name = allowed.name;
    if is_ours {
        // Its own tests may switch on what the simulator does.
        if to == name && kind == Some("dev") {
            return None;
        }
        // What drives the binary is for the tests of the binary, not in it.
        if name == "holdfast" && to == "holdfast-lab" && kind == Some("dev") {
            return None;
        }
        return (!allowed.ours.contains(&to)).then(|| format!("{name} may not import {to}"));
    }
    let theirs = allowed.theirs?;
    (kind.is_none() && !theirs.contains(&to)).then(|| format!("{name} has a closed list and may not depend on {to}"))
}

/// Why it may not switch these features of `to` on: what users run has no deliberate faults in it.
fn refuse_features(name: &str, to: &str, features: &[&str], kind: Option<&str>) -> Option<String> {
    let is_refused = features.contains(&"simulated") && name != "holdfast-sim" && kind != Some("dev");
    is_refused.then(|| format!("{name} may not switch on the deliberate faults of {to}: only the simulator does"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forbidden_edges_are_refused_and_allowed_ones_are_not() {
        let volume = EDGES.iter().find(|a| a.name == "holdfast-volume").expect("volume has a line");
        assert!(refuse(volume, "holdfast-runtime", true, None).is_some());
        assert!(refuse(volume, "holdfast-store", true, Some("dev")).is_some());
        assert!(refuse(volume, "holdfast-format", true, None).is_none());
        assert!(refuse(volume, "tokio", false, None).is_some());
        assert!(refuse(volume, "proptest", false, Some("dev")).is_none());
        assert!(refuse(volume, "holdfast-volume", true, Some("dev")).is_none());
        let holdfast = EDGES.iter().find(|a| a.name == "holdfast").expect("holdfast has a line");
        assert!(refuse(holdfast, "holdfast-lab", true, Some("dev")).is_none());
        assert!(refuse(holdfast, "holdfast-lab", true, None).is_some());
    }

    #[test]
    fn deliberate_faults_are_for_the_simulator_and_tests() {
        assert!(refuse_features("holdfast", "holdfast-volume", &["simulated"], None).is_some());
        assert!(refuse_features("holdfast", "holdfast-volume", &[], None).is_none());
        assert!(refuse_features("holdfast-sim", "holdfast-volume", &["simulated"], None).is_none());
        assert!(refuse_features("holdfast-store", "holdfast-store", &["simulated"], Some("dev")).is_none());
    }
}
