//! Devices of this machine, as resources of the API.

use crate::grid::layout::DeviceConfig;
use holdfast_api::ConfiguredDevice;

pub fn configured(device: &DeviceConfig) -> ConfiguredDevice {
    let DeviceConfig { path, device, size_bytes } = device.clone();
    ConfiguredDevice { path, device, size_bytes }
}

/// What [`configured`] tells of.
pub fn device_config(device: ConfiguredDevice) -> DeviceConfig {
    let ConfiguredDevice { path, device, size_bytes } = device;
    DeviceConfig { path, device, size_bytes }
}
