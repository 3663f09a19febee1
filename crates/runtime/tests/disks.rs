//! The reactor over real files, timers and wake-ups.

mod support;

use holdfast_base::{Buf, BufMut, Instant};
use holdfast_runtime::mailbox::mailbox;
use holdfast_runtime::reactor::{Config, DeviceSlot, DiskFault, DiskToken};
use holdfast_runtime::{Event, Reactor, clock, device};
use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;
use support::{Script, pattern, run};

const DEVICE_BYTES: u64 = 8 << 20;

fn aligned(seed: u64, len: usize) -> Buf {
    let mut buf = BufMut::new(len);
    buf.copy_from_slice(&pattern(seed, len));
    buf.freeze()
}

fn open_device(reactor: &mut Reactor, dir: &std::path::Path) -> DeviceSlot {
    let path = dir.join("device");
    device::create_file(&path, DEVICE_BYTES, DEVICE_BYTES / 2).unwrap();
    reactor.io().add_device(device::open(&path).unwrap())
}

#[test]
fn writes_come_back_when_many_are_in_flight() {
    const OPS: u64 = 200;
    let dir = tempfile::tempdir().unwrap();
    let (slot, written, read) = run(
        Config::default(),
        |reactor| {
            let slot = open_device(reactor, dir.path());
            for n in 0..OPS {
                // Parts of one and of three buffers, durable and not.
                let bufs = if n.is_multiple_of(2) {
                    vec![aligned(n, 12288)]
                } else {
                    let whole = aligned(n, 12288);
                    vec![whole.slice(0..4096), whole.slice(4096..8192), whole.slice(8192..12288)]
                };
                reactor.io().write(slot, n * 12288, bufs, n.is_multiple_of(3), DiskToken(n));
            }
            assert_eq!(reactor.io().disk_operations(), OPS as usize);
            (slot, 0, BTreeMap::new())
        },
        |(slot, written, read), event, io| match event {
            Event::Written { token, result } => {
                result.unwrap();
                *written += 1;
                io.read(*slot, token.0 * 12288, 12288, token);
            }
            Event::Read { token, result } => {
                read.insert(token.0, result.unwrap());
                if read.len() == OPS as usize {
                    io.stop();
                }
            }
            other => panic!("{other:?}"),
        },
    );
    let _ = slot;
    assert_eq!(written, OPS);
    for (n, buf) in read {
        assert!(*buf == pattern(n, 12288)[..], "operation {n} read back changed");
    }
}

#[test]
fn a_discarded_range_reads_as_zeroes_and_bad_ranges_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let steps = run(
        Config::default(),
        |reactor| {
            let slot = open_device(reactor, dir.path());
            reactor.io().write(slot, 0, vec![aligned(1, 65536)], true, DiskToken(0));
            (slot, 0)
        },
        |(slot, steps), event, io| {
            *steps += 1;
            match event {
                Event::Written { token: DiskToken(0), result } => {
                    result.unwrap();
                    io.discard(*slot, 4096, 8192, DiskToken(1));
                }
                Event::Discarded { token: DiskToken(1), result } => {
                    result.unwrap();
                    io.read(*slot, 0, 65536, DiskToken(2));
                }
                Event::Read { token: DiskToken(2), result } => {
                    let (buf, want) = (result.unwrap(), pattern(1, 65536));
                    assert!(buf[..4096] == want[..4096] && buf[12288..] == want[12288..]);
                    assert!(buf[4096..12288].iter().all(|b| *b == 0));
                    io.read(*slot, DEVICE_BYTES - 4096, 8192, DiskToken(3));
                }
                Event::Read { token: DiskToken(3), result } => {
                    let error = result.unwrap_err();
                    assert_eq!(error.fault, DiskFault::OutOfRange);
                    assert!(error.to_string().contains("read of 8192 bytes"), "{error}");
                    io.remove_device(*slot);
                    io.stop();
                }
                other => panic!("{other:?}"),
            }
        },
    );
    assert_eq!(steps.1, 4);
}

#[test]
fn a_removed_device_ends_what_is_in_flight() {
    const OPS: u64 = 50;
    let dir = tempfile::tempdir().unwrap();
    let done = run(
        Config::default(),
        |reactor| {
            let slot = open_device(reactor, dir.path());
            for n in 0..OPS {
                reactor.io().read(slot, n * 4096, 4096, DiskToken(n));
            }
            reactor.io().remove_device(slot);
            0
        },
        |done, event, io| {
            let Event::Read { result, .. } = event else { panic!("{event:?}") };
            result.unwrap();
            *done += 1;
            if *done == OPS {
                io.stop();
            }
        },
    );
    assert_eq!(done, OPS);
    // The lock went with the device.
    device::open(&dir.path().join("device")).unwrap();
}

#[test]
fn a_file_cut_short_below_us_is_out_of_range() {
    let dir = tempfile::tempdir().unwrap();
    run(
        Config::default(),
        |reactor| {
            let slot = open_device(reactor, dir.path());
            let file = std::fs::OpenOptions::new().write(true).open(dir.path().join("device")).unwrap();
            file.set_len(8192).unwrap();
            reactor.io().read(slot, 4096, 8192, DiskToken(0));
        },
        |(), event, io| {
            let Event::Read { result, .. } = event else { panic!("{event:?}") };
            assert_eq!(result.unwrap_err().fault, DiskFault::OutOfRange);
            io.stop();
        },
    );
}

#[test]
fn a_reactor_dropped_with_operations_in_flight_waits_for_them() {
    let dir = tempfile::tempdir().unwrap();
    let mut reactor = Reactor::new(Config::default()).unwrap();
    let slot = open_device(&mut reactor, dir.path());
    for n in 0..64 {
        reactor.io().write(slot, n * 65536, vec![aligned(n, 65536)], true, DiskToken(n));
    }
    drop(reactor);
    device::open(&dir.path().join("device")).unwrap();
}

#[test]
fn deadlines_fire_in_order_and_not_before_their_time() {
    let mut reactor = Reactor::new(Config::default()).unwrap();
    let mut fired = Vec::new();
    let first = clock::now() + Duration::from_millis(2);
    let mut app = Script {
        on_event: |deadline: &mut Option<Instant>, event: Event<'_>, io: &mut holdfast_runtime::Io| {
            assert!(matches!(event, Event::Timer), "{event:?}");
            let due = deadline.expect("a timer has a deadline");
            assert!(io.now() >= due);
            fired.push(due);
            *deadline = (fired.len() < 5).then(|| due + Duration::from_micros(700));
            if deadline.is_none() {
                io.stop();
            }
        },
        deadline: Some(first),
    };
    reactor.run(&mut app).unwrap();
    assert_eq!(fired.len(), 5);
    assert!(fired.is_sorted());
}

#[test]
fn mail_from_other_threads_arrives_complete_and_in_order() {
    const EACH: u64 = 5000;
    let (threads, _, got) = run(
        Config { spin_max: Duration::from_micros(20), ..Config::default() },
        |reactor| {
            let (tx, rx) = mailbox(reactor.waker(), 64);
            let start = |sender: u64| {
                let tx = tx.clone();
                thread::spawn(move || {
                    for n in 0..EACH {
                        let mut message = (sender, n);
                        while let Err(full) = tx.post(message) {
                            message = full.0;
                            thread::yield_now();
                        }
                    }
                })
            };
            (vec![start(0), start(1)], rx, [0, 0])
        },
        |(_, rx, got), event, io| {
            assert!(matches!(event, Event::Wake), "{event:?}");
            for (sender, n) in rx.drain() {
                assert_eq!(got[sender as usize], n, "mail of one sender stays in order");
                got[sender as usize] += 1;
            }
            if *got == [EACH, EACH] {
                io.stop();
            }
        },
    );
    threads.into_iter().for_each(|t: thread::JoinHandle<()>| t.join().unwrap());
    assert_eq!(got, [EACH, EACH]);
}
