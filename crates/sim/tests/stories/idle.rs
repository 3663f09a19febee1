//! Volumes that nobody uses: they cost next to nothing, and still notice what concerns them.

use holdfast_base::{BufMut, NodeId};
use holdfast_format::wire::{DeviceHealth, DeviceStat};
use holdfast_host::{Event, Host, Order};
use holdfast_sim::disk::Crash;
use holdfast_sim::idle::Idle;
use holdfast_volume::{Question, Status};
use std::time::Duration;

const VOLUMES: u32 = 30;

const MINUTE: Duration = Duration::from_secs(60);

fn statuses(host: &Host) -> impl Iterator<Item = Status> {
    host.volumes().map(|volume| volume.controller().status())
}

/// With some data in each, some of it written twice, which has come to rest.
fn rested(seed: u64) -> Idle {
    let mut idle = Idle::new(seed, VOLUMES);
    let mut data = BufMut::zeroed(64 << 10);
    data.fill(7);
    let data = data.freeze();
    for offset in [0, 1 << 20, 0] {
        idle.write_to_all(offset, &data);
        idle.pass(Duration::from_secs(10));
    }
    idle.pass(30 * MINUTE);
    assert!(statuses(idle.host()).all(|status| status.segment_count > 0 && status.suspect_nodes.is_empty()));
    idle
}

#[test]
fn an_idle_volume_is_entered_a_few_times_a_minute() {
    for seed in 0..3 {
        let mut idle = rested(seed);
        let times = idle.pass(4 * MINUTE) / u64::from(VOLUMES);
        assert!(times <= 32, "each of {VOLUMES} volumes was entered {times} times in four minutes");
    }
}

#[test]
fn idle_volumes_notice_at_once_that_a_node_is_gone() {
    let mut idle = rested(7);
    idle.world.crash_node(1, Crash::Process);
    let late = idle.world.now() + Duration::from_secs(1);
    assert!(idle.until(late, |host| statuses(host).all(|status| status.suspect_nodes.len() == 1)));
    idle.world.start_node(1);
    let late = idle.world.now() + Duration::from_secs(20);
    assert!(idle.until(late, |host| statuses(host).all(|status| status.suspect_nodes.is_empty())));
    idle.pass(2 * MINUTE);
    let times = idle.pass(4 * MINUTE) / u64::from(VOLUMES);
    assert!(times <= 32, "they come to rest again: each was entered {times} times in four minutes");
}

#[test]
fn idle_volumes_are_told_of_devices_that_fail_or_fill_and_of_nothing_else() {
    let mut idle = rested(8);
    let node = &idle.world.nodes[0];
    let (id, mut devices) = (node.id, node.stats(idle.world.now()));
    let usable = |host: &Host| -> Vec<bool> {
        let legs = host.volumes().flat_map(|volume| volume.controller().anatomy().log.legs);
        legs.filter(|leg| leg.leg.node == id).map(|leg| leg.is_usable).collect()
    };
    let mut tell = |idle: &mut Idle, change: fn(&mut DeviceStat)| {
        change(&mut devices[0]);
        let (event, before) = (Event::Devices { node: id, devices: devices.clone() }, idle.host().entered());
        idle.tell(event);
        idle.host().entered() - before
    };
    // Its greeting came before it had looked at its devices.
    tell(&mut idle, |_| {});
    assert_eq!(tell(&mut idle, |stat| stat.shard_count += 1), 0);
    assert_eq!(tell(&mut idle, |stat| stat.free_bytes -= stat.capacity_bytes / 100), u64::from(VOLUMES));
    assert_eq!(usable(idle.host()), [true; VOLUMES as usize]);
    assert_eq!(tell(&mut idle, |stat| stat.health = DeviceHealth::Failed), u64::from(VOLUMES));
    assert_eq!(usable(idle.host()), [false; VOLUMES as usize]);
}

#[test]
fn what_would_be_lost_without_nodes_is_looked_for_slice_by_slice() {
    const MANY: u32 = 150;
    let mut idle = Idle::new(5, MANY);
    let mut data = BufMut::zeroed(64 << 10);
    data.fill(7);
    idle.write_to_all(0, &data.freeze());
    idle.pass(Duration::from_secs(30));
    let lost = |idle: &mut Idle, ticket: u64, nodes: &[u32]| {
        let question = Question::Lost(nodes.iter().map(|n| NodeId(*n)).collect());
        idle.tell(Event::Order { ticket, order: Order::Inspect(question) });
        let in_one_go = idle.outcomes.contains_key(&ticket);
        idle.pass(Duration::from_secs(1));
        (in_one_go, idle.outcomes.remove(&ticket).expect("it is answered").inspected())
    };
    let (in_one_go, of_all) = lost(&mut idle, 1, &[1, 2, 3]);
    assert!(!in_one_go, "guests have their turn meanwhile");
    assert_eq!(of_all.len(), MANY as usize);
    assert!(of_all.iter().all(|volume| volume.segments > 0 && !volume.unknown), "{of_all:?}");
    assert_eq!(lost(&mut idle, 2, &[3]), (false, Vec::new()), "there are two copies");
    // One that goes meanwhile, and one that comes.
    let question = Question::Lost([1, 2, 3].map(NodeId).into());
    idle.tell(Event::Order { ticket: 3, order: Order::Inspect(question) });
    let close = Order::Close { name: "v7".to_string(), force: true, discard: false, only_care: false };
    idle.tell(Event::Order { ticket: 4, order: close });
    idle.pass(Duration::from_secs(10));
    let told = idle.outcomes.remove(&3).expect("it is answered").inspected();
    assert!(told.iter().all(|volume| volume.segments > 0 || volume.unknown && volume.volume == "v7"), "{told:?}");
    assert!(told.len() + 1 >= MANY as usize);
}
