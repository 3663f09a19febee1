//! Nodes, devices and what they have room for.

use super::families::{self as f, Family};
use super::page::Facts;
use super::sheet::{Sheet, Value, of_ms, of_us};
use holdfast_api::{DeviceInfo, HostStatus, NodeInfo, NodeState, ReadCacheInfo, free_of, takers};
use std::fmt::Result;

const DAY_S: f64 = 86_400.0;

pub fn write(facts: &Facts, sheet: &mut Sheet<'_>) -> Result {
    let status = facts.status.as_deref();
    write_nodes(status, sheet)?;
    write_capacity(status, sheet)?;
    let rows: Vec<Row> = status.iter().flat_map(|status| &status.nodes).flat_map(Row::of_node).collect();
    write_devices(&rows, sheet)?;
    write_drives(&rows, sheet)
}

fn nodes(status: Option<&HostStatus>) -> impl Iterator<Item = &NodeInfo> + Clone {
    status.into_iter().flat_map(|status| &status.nodes)
}

fn write_nodes(status: Option<&HostStatus>, sheet: &mut Sheet<'_>) -> Result {
    let states = status.iter().flat_map(|_| NodeState::ALL);
    let count = |state: &NodeState| nodes(status).filter(|node| node.state() == *state).count();
    sheet.series(&f::NODES, states.map(|state| ([state.text()], count(state))))?;
    let named: Vec<(String, &NodeInfo)> = nodes(status).map(|node| (node.id.to_string(), node)).collect();
    let machine = |node: &NodeInfo| -> String { node.machine.clone().unwrap_or_default() };
    let machines: Vec<String> = named.iter().map(|(_, node)| machine(node)).collect();
    let up = named.iter().zip(&machines).map(|((id, node), machine)| ([&**id, &**machine], node.state().serves()));
    sheet.series(&f::NODE_UP, up)?;
    sheet.series(&f::NODE_SILENT, named.iter().map(|(id, node)| ([&**id], of_ms(node.silent_ms))))
}

fn write_capacity(status: Option<&HostStatus>, sheet: &mut Sheet<'_>) -> Result {
    let sum = |of: fn(&NodeInfo) -> u64| status.map(|_| nodes(status).map(of).sum::<u64>());
    let of_devices = |node: &NodeInfo, of: fn(&DeviceInfo) -> u64| -> u64 { node.devices.iter().map(of).sum() };
    sheet.one(&f::RAW, sum(|node| node.devices.iter().map(|device| device.capacity_bytes).sum()))?;
    sheet.one(&f::USED, status.map(|_| nodes(status).map(|node| of_devices(node, used)).sum::<u64>()))?;
    sheet.one(&f::RESERVE, sum(|node| node.devices.iter().map(|device| device.reserve_bytes).sum()))?;
    sheet.one(&f::WRITABLE, sum(|node| free_of(&node.devices).iter().sum()))?;
    let whole = |node: &NodeInfo| {
        takers(&node.devices).map(|device| device.capacity_bytes.saturating_sub(device.reserve_bytes)).sum()
    };
    sheet.one(&f::WRITABLE_MAX, sum(whole))?;
    sheet.one(&f::FULL_IN, status.and_then(|status| status.days_to_full).map(|days| days * DAY_S))
}

fn used(device: &DeviceInfo) -> u64 {
    device.capacity_bytes.saturating_sub(device.free_bytes)
}

/// A device, and its labels.
struct Row<'a> {
    node: String,
    path: String,
    device: &'a DeviceInfo,
}

impl Row<'_> {
    fn of_node(node: &NodeInfo) -> impl Iterator<Item = Row<'_>> {
        node.devices.iter().map(|device| {
            let known = node.configured.iter().find(|known| known.device == device.device);
            let path = known.map_or(String::new(), |known| known.path.display().to_string());
            Row { node: node.id.to_string(), path, device }
        })
    }

    fn labels(&self) -> [&str; 2] {
        [&self.node, &self.device.device]
    }
}

/// One series a device, of those that have something to say.
fn each<V: Into<Value>>(
    rows: &[Row<'_>],
    sheet: &mut Sheet<'_>,
    family: &Family,
    of: impl Fn(&DeviceInfo) -> Option<V>,
) -> Result {
    sheet.series(family, rows.iter().filter_map(|row| Some((row.labels(), of(row.device)?))))
}

fn write_devices(rows: &[Row<'_>], sheet: &mut Sheet<'_>) -> Result {
    let info = |row: &Row<'_>| row.device.class.map_or(String::new(), |class| class.to_string());
    let classes: Vec<String> = rows.iter().map(info).collect();
    let infos = rows.iter().zip(&classes).map(|(row, class)| {
        let [node, device] = row.labels();
        ([node, device, &row.path, class], 1u64)
    });
    sheet.series(&f::DEVICE_INFO, infos)?;
    let states = rows.iter().map(|row| {
        let [node, device] = row.labels();
        ([node, device, row.device.state().text()], 1u64)
    });
    sheet.series(&f::DEVICE_STATE, states)?;
    each(rows, sheet, &f::DEVICE_CAPACITY, |device| Some(device.capacity_bytes))?;
    each(rows, sheet, &f::DEVICE_USED, |device| Some(used(device)))?;
    each(rows, sheet, &f::DEVICE_JOURNAL, |device| Some(device.journal_used_bytes))?;
    each(rows, sheet, &f::DEVICE_JOURNAL_MAX, |device| Some(device.journal_bytes))?;
    each(rows, sheet, &f::DEVICE_SHARDS, |device| Some(device.shards))?;
    let latencies = rows.iter().flat_map(|row| {
        let [node, device] = row.labels();
        let took = [("read", row.device.read_p99_us), ("write", row.device.write_p99_us)];
        took.into_iter().filter_map(move |(op, us)| Some(([node, device, op, "99"], of_us(u64::from(us?)))))
    });
    sheet.series(&f::DEVICE_LATENCY, latencies)?;
    each(rows, sheet, &f::DEVICE_ERRORS, |device| Some(device.io_errors))?;
    each(rows, sheet, &f::DEVICE_RETRIES, |device| Some(device.retries))?;
    each(rows, sheet, &f::DEVICE_SLOW, |device| Some(device.slow_s.unwrap_or(0)))?;
    each(rows, sheet, &f::DEVICE_OUT, |device| Some(device.outage.as_ref().map_or(0, |outage| outage.seconds)))?;
    each(rows, sheet, &f::DEVICE_DRAINING, |device| Some(device.draining))
}

fn write_drives(rows: &[Row<'_>], sheet: &mut Sheet<'_>) -> Result {
    let share = |percent: u8| f64::from(percent) / 100.0;
    each(rows, sheet, &f::DRIVE_FAILING, |device| Some(device.drive.as_ref()?.is_failing()))?;
    each(rows, sheet, &f::DRIVE_WORN, |device| device.drive.as_ref()?.worn_percent.map(share))?;
    each(rows, sheet, &f::DRIVE_SPARE, |device| device.drive.as_ref()?.spare_percent.map(share))?;
    each(rows, sheet, &f::DRIVE_CELSIUS, |device| device.drive.as_ref()?.celsius.map(f64::from))?;
    each(rows, sheet, &f::DRIVE_ERRORS, |device| device.drive.as_ref()?.media_errors)?;
    let cache = |of: fn(&ReadCacheInfo) -> u64| move |device: &DeviceInfo| device.read_cache.as_ref().map(of);
    each(rows, sheet, &f::CACHE_HITS, cache(|cache| cache.hits))?;
    each(rows, sheet, &f::CACHE_MISSES, cache(|cache| cache.misses))?;
    each(rows, sheet, &f::CACHE_HELD, cache(|cache| cache.held_bytes))
}
