//! Filters before volumes in service, as operators add and remove them.

use super::control::ControlPlane;
use anyhow::Result;
use holdfast_api::{Code, VolumeInfo, refuse};
use holdfast_host::{FilterChange, FilterOutcome, Order};
use holdfast_layer::{LAYERS_MAX, LayerId, build};

impl ControlPlane {
    pub(super) fn add_layer(&self, name: &str, spec: &str) -> Result<VolumeInfo> {
        let layer = match build(spec) {
            Ok(layer) => layer,
            Err(error) => refuse!(
                Code::Invalid,
                "`{spec}` makes no layer: {error}; `holdfast volume layer kinds` tells what there is"
            ),
        };
        self.change_layers(name, FilterChange::Add(layer), None)
    }

    pub(super) fn remove_layer(&self, name: &str, layer: Option<u32>) -> Result<VolumeInfo> {
        self.change_layers(name, FilterChange::Remove(layer.map(LayerId)), layer)
    }

    fn change_layers(&self, name: &str, change: FilterChange, layer: Option<u32>) -> Result<VolumeInfo> {
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
                Code::Invalid,
                "volume {name} has as many layers as it can have ({LAYERS_MAX}), or as many requests under way; \
                 `holdfast volume layer list {name}`, and remove one first"
            ),
            FilterOutcome::Kept => refuse!(
                Code::State,
                "layer {} is the limit of volume {name}, which it keeps wherever it is served; `holdfast volume set {name} --limit \
                 none` takes it away",
                layer.map_or_else(String::new, |layer| layer.to_string())
            ),
            FilterOutcome::NoSuch => refuse!(
                Code::NotFound,
                "volume {name} has no layer {}; `holdfast volume layer list {name}` tells their numbers",
                layer.map_or_else(String::new, |layer| layer.to_string())
            ),
        }
    }
}
