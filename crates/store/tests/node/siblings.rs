//! A node of two reactors: whoever asks one of them is answered for both.

use crate::support::*;
use holdfast_base::{Buf, Lsn, MediaClass};
use holdfast_format::wire::{DeviceHealth, Refusal, Reply, Request, WIRE};
use holdfast_store::{DeviceSlot, Event, FailReason, Held, Message, Notice, PeerId};
use std::time::Duration;

/// Reactor 0 has the first device, reactor 1 the second.
struct Pair([Rig; 2]);

impl Pair {
    fn new() -> Pair {
        let disks = [(MediaClass::Ssd, 4 << 20), (MediaClass::Ssd, 4 << 20)];
        let mut pair = Pair(
            [0, 1].map(|reactor| Rig::mixed(7, &disks, |config| (config.reactor, config.reactors) = (reactor, 2))),
        );
        pair.talk();
        pair
    }

    /// Has them hear what they told each other, until nobody says anything.
    fn talk(&mut self) {
        loop {
            self.0.iter_mut().for_each(Rig::settle);
            if self.0.iter().all(|rig| rig.told.is_empty()) {
                return;
            }
            for own in 0..2 {
                for (reactor, message) in std::mem::take(&mut self.0[own].told) {
                    self.0[usize::from(reactor)].event(Event::Told { reactor: own as u16, message });
                }
            }
        }
    }

    fn ask(&mut self, reactor: usize, request: Request) -> Reply {
        let token = self.0[reactor].send(request, Buf::empty());
        self.talk();
        self.0[reactor].replies.remove(&token).expect("it is answered where it was asked").0
    }
}

#[test]
fn a_request_for_a_device_of_the_other_reactor_is_answered_where_it_was_asked() {
    let mut pair = Pair::new();
    let on = |slot: usize, mut request: Request| {
        let (Request::CreateLedger { device: of, .. } | Request::Append { device: of, .. }) = &mut request else {
            unreachable!()
        };
        *of = device(slot);
        request
    };
    for asked in 0..2 {
        for slot in 0..2 {
            let volume = 10 + (2 * asked + slot) as u128;
            assert_eq!(pair.ask(asked, on(slot, create(volume, 1, 0))), Reply::Done, "{asked} {slot}");
            let (request, payload) = append(volume, 1, 0, 1, 0, 2);
            let token = pair.0[asked].send(on(slot, request), payload);
            pair.talk();
            let reply = pair.0[asked].replies.remove(&token).expect("answered").0;
            assert!(matches!(reply, Reply::Appended { lsn: Lsn(1), .. }), "{reply:?}");
            let held = pair.ask(asked, Request::ListVolumes { device: device(slot), after: None, count_max: 100 });
            let Reply::Volumes { volumes, .. } = held else { panic!("{held:?}") };
            assert!(volumes.iter().any(|held| held.volume.0 == volume), "{volumes:?}");
        }
    }
    let unknown = Request::ListVolumes { device: device(2), after: None, count_max: 1 };
    assert_eq!(pair.ask(0, unknown), Reply::Refused(Refusal::UnknownDevice));
}

#[test]
fn what_concerns_the_node_is_answered_for_both() {
    let mut pair = Pair::new();
    let hello = Request::Hello { versions: WIRE, grid: GRID, host: "a".to_string() };
    for asked in 0..2 {
        for request in [hello.clone(), Request::Stat] {
            let reply = pair.ask(asked, request);
            let (Reply::Hello { devices, .. } | Reply::Stat { devices }) = reply else { panic!("{reply:?}") };
            let devices: Vec<_> = devices.iter().map(|stat| (stat.device, stat.health)).collect();
            assert_eq!(devices, [(device(0), DeviceHealth::Serving), (device(1), DeviceHealth::Serving)]);
        }
        let devices = vec![(device(0), 0), (device(1), 1)];
        assert_eq!(pair.ask(asked, Request::Reactors), Reply::Reactors { count: 2, devices, passed_on: 0 });
    }
    // A connection that is to be at one of them has to be there.
    let host = || "b".to_string();
    assert_eq!(pair.ask(1, Request::Join { reactor: 0, host: host() }), Reply::Refused(Refusal::Invalid));
    assert_eq!(pair.ask(1, Request::Join { reactor: 1, host: host() }), Reply::Done);
    for asked in 0..2 {
        let reply = pair.ask(asked, Request::Heard { host: host() });
        assert!(matches!(reply, Reply::Heard { .. }), "{reply:?}");
    }
}

#[test]
fn of_a_device_that_both_have_one_reactor_keeps_it() {
    let mut pair = Pair::new();
    pair.0[1].event(added(0));
    pair.talk();
    assert_eq!(twice(&pair), [0, 1]);
    let devices = vec![(device(0), 0), (device(1), 1)];
    assert_eq!(pair.ask(1, Request::Reactors), Reply::Reactors { count: 2, devices, passed_on: 0 });
}

#[test]
fn a_ping_is_answered_when_all_reactors_are_alive() {
    let mut pair = Pair::new();
    for asked in 0..2 {
        let token = pair.0[asked].send(Request::Ping, Buf::empty());
        pair.0[asked].settle();
        assert!(!pair.0[asked].replies.contains_key(&token), "the other has not heard of it");
        pair.talk();
        assert_eq!(pair.0[asked].replies.remove(&token).expect("now it has").0, Reply::Pong);
    }
}

fn twice(pair: &Pair) -> [usize; 2] {
    let is_twice = |notice: &&Notice| matches!(notice, Notice::DeviceFailed { reason: FailReason::Twice, .. });
    pair.0.each_ref().map(|rig| rig.notices.iter().filter(is_twice).count())
}

fn added(slot: usize) -> Event {
    Event::AddDevice { slot: DeviceSlot(slot), size_bytes: 4 << 20, media: None, is_direct: true }
}

#[test]
fn a_copy_of_a_device_that_serves_does_not_take_its_place() {
    let mut pair = Pair::new();
    // By a lower number: what it holds may be old.
    pair.0[0].event(added(1));
    pair.talk();
    assert_eq!(twice(&pair), [1, 0]);
    let devices = vec![(device(0), 0), (device(1), 1)];
    assert_eq!(pair.ask(0, Request::Reactors), Reply::Reactors { count: 2, devices, passed_on: 0 });
    assert!(matches!(
        pair.ask(0, Request::ListVolumes { device: device(1), after: None, count_max: 1 }),
        Reply::Volumes { .. }
    ));
}

#[test]
fn a_device_that_is_expected_here_and_read_there_is_told_once() {
    let mut pair = Pair::new();
    pair.0[1].event(Event::ExpectDevice { slot: DeviceSlot(2), device: Some(device(0)) });
    pair.talk();
    for opened in [false, true] {
        if opened {
            pair.0[1].event(Event::NotOpened { slot: DeviceSlot(2), why: "it is gone".to_string() });
            pair.talk();
        }
        for asked in 0..2 {
            let Reply::Stat { devices } = pair.ask(asked, Request::Stat) else { panic!("it is told") };
            let devices: Vec<_> = devices.iter().map(|stat| (stat.device, stat.health)).collect();
            assert_eq!(devices, [(device(0), DeviceHealth::Serving), (device(1), DeviceHealth::Serving)]);
        }
    }
}

#[test]
fn a_device_that_a_sibling_reads_while_it_is_opened_anew_is_let_go() {
    let mut pair = Pair::new();
    pair.0[1].disks[1].fail_writes = true;
    let mut request = create(10, 1, 0);
    if let Request::CreateLedger { device: of, .. } = &mut request {
        *of = device(1);
    }
    assert_eq!(pair.ask(1, request), Reply::Refused(Refusal::DeviceFailed));
    pair.0[1].now = pair.0[1].now + Duration::from_secs(2);
    pair.0[1].event(Event::Tick);
    assert_eq!(pair.0[1].to_open, [DeviceSlot(1)]);
    let held = Held { device: device(1), is_read: true };
    pair.0[1].event(Event::Told { reactor: 0, message: Message::Devices(vec![held]) });
    assert_eq!(twice(&pair), [0, 1]);
    pair.0[1].event(added(1));
    pair.0[1].settle();
    assert_eq!(twice(&pair), [0, 1]);
}

#[test]
fn a_connection_that_is_gone_is_gone_for_the_other_reactor_once() {
    let mut pair = Pair::new();
    pair.ask(0, Request::ListVolumes { device: device(1), after: None, count_max: 1 });
    for gone in [1, 0] {
        pair.0[0].event(Event::PeerGone { peer: PeerId::here(1) });
        let told = std::mem::take(&mut pair.0[0].told);
        assert_eq!(told.iter().filter(|(_, message)| matches!(message, Message::Gone { conn: 1 })).count(), gone);
    }
}
