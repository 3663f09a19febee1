//! Filters before volumes in service, as operators add and remove them.

use super::control::ControlPlane;
use anyhow::Result;
use holdfast_api::{Code, VolumeInfo, refuse};
use holdfast_filter::{FILTERS_MAX, FilterId, build};
use holdfast_host::{FilterChange, FilterOutcome, Order};

impl ControlPlane {
    pub(super) fn add_filter(&self, name: &str, spec: &str) -> Result<VolumeInfo> {
        let filter = match build(spec) {
            Ok(filter) => filter,
            Err(error) => refuse!(
                Code::Invalid,
                "`{spec}` makes no filter: {error}; `holdfast volume filter kinds` tells what there is"
            ),
        };
        self.change_filters(name, FilterChange::Add(filter), None)
    }

    pub(super) fn remove_filter(&self, name: &str, filter: Option<u32>) -> Result<VolumeInfo> {
        self.change_filters(name, FilterChange::Remove(filter.map(FilterId)), filter)
    }

    fn change_filters(&self, name: &str, change: FilterChange, filter: Option<u32>) -> Result<VolumeInfo> {
        self.catalog.find(name)?;
        match self.order(Order::Filters { volume: name.to_string(), change })?.filtered() {
            FilterOutcome::Done => self.show(name),
            FilterOutcome::NotOpen => {
                refuse!(
                    Code::State,
                    "volume {name} is not in service here; `holdfast volume export {name}`, then try again"
                )
            }
            FilterOutcome::TooMany => refuse!(
                Code::State,
                "volume {name} has as many filters as it can have ({FILTERS_MAX}), or as many requests under way; \
                 `holdfast volume filter list {name}`, and remove one first"
            ),
            FilterOutcome::IsLimit => refuse!(
                Code::State,
                "{} is the limit of volume {name}, which it keeps wherever it is served; `holdfast volume set {name} --limit \
                 none` takes it away",
                holdfast_host::LIMIT.0
            ),
            FilterOutcome::NoSuch => refuse!(
                Code::NotFound,
                "volume {name} has no filter {}; `holdfast volume filter list {name}` tells their numbers",
                filter.map_or_else(String::new, |filter| filter.to_string())
            ),
        }
    }
}
