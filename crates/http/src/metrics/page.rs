//! The text of the page.

use super::families as f;
use super::sheet::Sheet;
use super::sums::All;
use super::{Certificate, Times, grid, host, volumes};
use holdfast_api::{Finding, HostStatus, Neighbour, SlowInfo, TaskInfo, VolumeInfo};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, prometheus_text, text};
use prometheus_client::registry::Registry;
use std::sync::Arc;

/// A part of the page that is told, or not, by itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    Status,
    Loads,
    Stages,
    Times,
    Tasks,
    Findings,
    Certificates,
    Metadata,
}

impl Part {
    /// In the order of their numbers.
    pub const ALL: [Part; 8] = [
        Part::Status,
        Part::Loads,
        Part::Stages,
        Part::Times,
        Part::Tasks,
        Part::Findings,
        Part::Certificates,
        Part::Metadata,
    ];

    fn text(self) -> &'static str {
        match self {
            Part::Status => "status",
            Part::Loads => "loads",
            Part::Stages => "stages",
            Part::Times => "times",
            Part::Tasks => "tasks",
            Part::Findings => "findings",
            Part::Certificates => "certificates",
            Part::Metadata => "metadata",
        }
    }
}

/// All that the page is made of; a part that could not be told is missing.
#[derive(Debug, Default)]
pub struct Facts {
    pub status: Option<Arc<HostStatus>>,
    pub loads: Option<Vec<Neighbour>>,
    pub slow: Option<Vec<(String, SlowInfo)>>,
    pub times: Option<Vec<Times>>,
    pub tasks: Option<Vec<TaskInfo>>,
    pub findings: Option<Vec<Finding>>,
    pub certificates: Option<Vec<Certificate>>,
    /// Members of the metadata store that the host is told of.
    pub members: Option<usize>,
    pub sums: Option<All>,
    /// Volumes with series of their own, by name.
    pub chosen: Vec<VolumeInfo>,
    /// Others in service here.
    pub left_out: usize,
}

impl Facts {
    fn has(&self, part: Part) -> bool {
        match part {
            Part::Status => self.status.is_some(),
            Part::Loads => self.loads.is_some(),
            Part::Stages => self.slow.is_some(),
            Part::Times => self.times.is_some(),
            Part::Tasks => self.tasks.is_some(),
            Part::Findings => self.findings.is_some(),
            Part::Certificates => self.certificates.is_some(),
            Part::Metadata => self.members.is_some(),
        }
    }
}

/// Form in which the page is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// The text format of Prometheus, 0.0.4.
    Plain,
}

impl Format {
    pub fn content_type(self) -> &'static str {
        match self {
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Format::Plain => prometheus_text::CONTENT_TYPE,
        }
    }
}

#[derive(Debug)]
struct Page(Facts);

impl Collector for Page {
    fn encode(&self, encoder: DescriptorEncoder) -> Result<(), std::fmt::Error> {
        let (facts, mut sheet) = (&self.0, Sheet::new(encoder));
        sheet.series(&f::PART_UP, Part::ALL.map(|part| ([part.text()], facts.has(part))))?;
        sheet.one(&f::LEFT_OUT, Some(facts.left_out))?;
        host::write(facts, &mut sheet)?;
        grid::write(facts, &mut sheet)?;
        volumes::write(facts, &mut sheet)
    }
}

/// The whole page.
pub fn text(facts: Facts, format: Format) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Page(facts)));
    let mut page = String::new();
    let written = match format {
        Format::OpenMetrics => text::encode(&mut page, &registry),
        Format::Plain => prometheus_text::encode(&mut page, &registry),
    };
    written.expect("a text can always be written to");
    page
}
