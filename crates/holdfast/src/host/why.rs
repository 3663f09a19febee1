//! Why a volume's requests are slow, as the host has it that serves them.

use super::commands::Command;
use super::control::ControlPlane;
use anyhow::Result;
use holdfast_api::{NodeInfo, Request, Response, Role, SlowInfo, VerdictInfo, VolumeInfo};
use holdfast_verdict::{Facts, Verdict, told};

impl ControlPlane {
    pub(super) fn why_slow(&self, name: &str) -> Result<Response> {
        let volume = Box::new(self.show(name)?);
        let mut slow = self.ask(|answer| Command::Slow { name: name.to_string(), answer })?;
        if let Some(slow) = &mut slow {
            slow.others = told::others(self.ask(|answer| Command::Loads { answer })?, name);
            let nodes = match self.asked(Role::Admin, Request::Status) {
                Response::Status(status) => status.nodes,
                _ => Vec::new(),
            };
            (slow.read_verdict, slow.write_verdict) =
                (verdict(&volume, slow, &nodes, false), verdict(&volume, slow, &nodes, true));
        }
        Ok(Response::Slow { volume, slow })
    }
}

fn verdict(volume: &VolumeInfo, slow: &SlowInfo, nodes: &[NodeInfo], writes: bool) -> Option<VerdictInfo> {
    let filters = volume.filters.as_ref().map_or(&[][..], |filters| &filters.filters);
    let facts = Facts { name: &volume.name, limit: volume.limit.as_deref(), filters, slow, nodes, writes };
    holdfast_verdict::of(facts).map(|Verdict { cause, text }| {
        let word = serde_json::to_value(cause).expect("causes are words");
        VerdictInfo { cause: word.as_str().unwrap_or_default().to_string(), text }
    })
}
