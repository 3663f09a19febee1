//! Where each byte of the grid is, and what can still be written.

use holdfast_api::{
    Capacity, DeviceInfo, GridStatus, SavedSpace, SpaceUse, UsedSpace, VolumeSpace, WritableSpace, promised_of, takers,
};
use holdfast_base::size::Size;
use holdfast_format::geometry::Layout;
use holdfast_volume::Claim;
use holdfast_volume::claims::writable_beside;
use holdfast_volume::protect::{Protect, bears, choose, lacks};

fn writable(layout: Layout, bytes: u64) -> WritableSpace {
    WritableSpace { layout: layout.to_string(), bytes, efficiency: efficiency(layout), bears: bears(layout) }
}

/// Of what devices hold, what guests see.
pub fn efficiency(layout: Layout) -> f64 {
    f64::from(layout.data_shards()) / f64::from(layout.shard_count())
}

/// Fixed volumes, with their layouts and what is set aside for them; also for those in the trash.
fn set_aside(status: &GridStatus) -> impl Iterator<Item = (String, &str, u64)> {
    let served = status.volumes.iter().map(|v| (v.name.clone(), v.layout.as_str(), v.set_aside_bytes));
    let trash = status.trash.iter();
    let trash = trash.map(|t| (format!("{} (in the trash)", t.name), t.layout.as_str(), t.set_aside_bytes));
    served.chain(trash).filter(|(_, _, bytes)| *bytes > 0)
}

/// What guests can write in a layout beside what fixed volumes own.
pub fn writable_now(status: &GridStatus, layout: Layout) -> u64 {
    let free: Vec<Vec<u64>> = status.nodes.iter().map(|n| promised_of(&n.devices)).collect();
    let own = |(_, layout, bytes): (String, &str, u64)| {
        let layout = layout.parse::<Layout>().ok()?;
        let width = if layout.is_on_devices() { 1 } else { layout.width() };
        Some(Claim { width, shard_bytes: bytes / u64::from(width) })
    };
    let claims: Vec<Claim> = set_aside(status).filter_map(own).collect();
    writable_beside(&free, &claims, layout)
}

/// Layouts that nodes and devices allow, of the usual ones, and of those that rules choose.
fn layouts_of(status: &GridStatus) -> Vec<Layout> {
    let by_node: Vec<usize> = status.nodes.iter().map(|node| takers(&node.devices).count()).collect();
    let mut layouts: Vec<Layout> = LAYOUTS.iter().map(|layout| layout.parse().expect("a layout")).collect();
    let chosen: Vec<Layout> = Protect::ALL.iter().filter_map(|rule| choose(*rule, &by_node).ok()).collect();
    layouts.extend(chosen.into_iter().filter(|layout| !LAYOUTS.contains(&layout.to_string().as_str())));
    layouts.dedup();
    layouts.retain(|layout| lacks(*layout, &by_node).is_none());
    layouts
}

/// Layouts that `space` tells of.
const LAYOUTS: [&str; 10] = [
    "mirror:2@device",
    "parity:2+1@device",
    "mirror:2",
    "mirror:3",
    "parity:2+1",
    "parity:3+1",
    "parity:4+2",
    "nested-mirror",
    "nested-parity:2+1",
    "nested-parity:3+1",
];

/// Nothing of a volume of which nothing is packed.
fn saved_of(volume: &str, space: &SpaceUse) -> Option<SavedSpace> {
    let SpaceUse { data_bytes, padding_bytes, shown_bytes, plain_bytes, .. } = *space;
    let stored_bytes = data_bytes + padding_bytes;
    let saved = SavedSpace { volume: volume.to_string(), shown_bytes, stored_bytes, plain_bytes };
    (plain_bytes < shown_bytes).then_some(saved)
}

pub fn saved_text(saved: &SavedSpace) -> String {
    let ratio = saved.stored_bytes as f64 / saved.shown_bytes.max(1) as f64;
    let (shown, stored, plain) = (Size(saved.shown_bytes), Size(saved.stored_bytes), Size(saved.plain_bytes));
    format!("{shown} of data take {stored} ({ratio:.2}); {plain} of them are not packed")
}

/// What packing does to a volume's data, before copies and parity; nothing where none of them are packed.
pub fn packed_text(space: &SpaceUse) -> Option<String> {
    saved_of("", space).map(|saved| saved_text(&saved))
}

/// The same of all volumes together that have something packed.
pub fn all_packed_text(volumes: impl Iterator<Item = VolumeSpace>) -> Option<String> {
    let saved = volumes.filter_map(|of| saved_of("", &of.space));
    let sum = |a: SavedSpace, b: SavedSpace| SavedSpace {
        shown_bytes: a.shown_bytes + b.shown_bytes,
        stored_bytes: a.stored_bytes + b.stored_bytes,
        plain_bytes: a.plain_bytes + b.plain_bytes,
        ..a
    };
    saved.reduce(sum).map(|saved| saved_text(&saved))
}

/// Of devices that nobody has told of, for they are away, nothing but what is known of others counts.
pub fn account(status: &GridStatus, held: Vec<VolumeSpace>, silent: Vec<String>) -> Capacity {
    let devices = || status.nodes.iter().flat_map(|n| &n.devices);
    let is_told = |id: &String| devices().any(|device| device.device == *id && device.capacity_bytes > 0);
    let configured = status.nodes.iter().flat_map(|node| &node.configured).filter(|device| is_told(&device.device));
    let raw_bytes: u64 = configured.map(|device| device.size_bytes).sum();
    let sum = |f: fn(&DeviceInfo) -> u64| devices().map(f).sum::<u64>();
    let (capacity, free) = (sum(|d| d.capacity_bytes), sum(|d| d.free_bytes));
    let (reserve_bytes, mut spare_bytes) = (sum(|d| d.reserve_bytes), sum(|d| d.spare_bytes));
    let mut used = UsedSpace::default();
    for live in &held {
        let (volume, held_bytes) = (live, live.held_by_snapshots_bytes);
        used.data.push((volume.name.clone(), live.space.data_bytes.saturating_sub(held_bytes)));
        if held_bytes > 0 {
            used.snapshots.push((volume.name.clone(), held_bytes));
        }
        if live.space.kept_bytes > 0 {
            used.kept.push((volume.name.clone(), live.space.kept_bytes));
        }
        if live.space.elsewhere_bytes > 0 {
            used.elsewhere.push((volume.name.clone(), live.space.elsewhere_bytes));
        }
        used.dead_bytes += live.space.dead_bytes;
        used.padding_bytes += live.space.padding_bytes;
        used.redundancy_bytes += live.space.redundancy_bytes;
        used.metadata_bytes += live.space.metadata_bytes;
    }
    let data: u64 = used.data.iter().chain(&used.snapshots).chain(&used.kept).map(|(_, bytes)| bytes).sum();
    used.trash_volumes = status.trash.len();
    used.trash_bytes = status.trash.iter().map(|trashed| trashed.taken_bytes).sum();
    used.saved = held.iter().filter_map(|held| saved_of(&held.name, &held.space)).collect();
    let beside = used.padding_bytes + used.redundancy_bytes + used.metadata_bytes;
    let known = data + used.dead_bytes + beside + used.trash_bytes;
    used.other_bytes = (capacity - free) as i64 - known as i64;
    let mut free_bytes = free - reserve_bytes - spare_bytes;
    let mut aside = Vec::new();
    let mut missing_bytes = 0;
    for (name, _, bytes) in set_aside(status) {
        let there = bytes.min(free_bytes + spare_bytes);
        // What fixed volumes own may lie in what is not promised to others.
        let of_spare = there.saturating_sub(free_bytes);
        (free_bytes, spare_bytes) = (free_bytes - (there - of_spare), spare_bytes - of_spare);
        missing_bytes += bytes - there;
        aside.push((name, there));
    }
    let of = |layout: Layout| writable(layout, writable_now(status, layout));
    Capacity {
        raw_bytes,
        overhead_bytes: raw_bytes.saturating_sub(capacity),
        used_bytes: capacity - free,
        reserve_bytes,
        spare_bytes,
        set_aside: aside,
        missing_bytes,
        free_bytes,
        days_to_full: status.days_to_full,
        reclaimable_bytes: held.iter().map(|volume| volume.reclaimable_bytes).sum(),
        used,
        writable: layouts_of(status).into_iter().map(of).collect(),
        volumes: held,
        silent,
    }
}
