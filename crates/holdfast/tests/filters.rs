//! Filters before volumes of a grid of real processes: what clients see of them, and that they come and go under load.

mod support;

use holdfast_lab::guest::{BLOCK, Guest};
use holdfast_lab::nbd::Command;
use holdfast_runtime::meta::member::Member;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use support::{Grid, etcd, until};
use tempfile::TempDir;

fn made(index: u16) -> Grid {
    let grid = Grid::new(index);
    grid.up("--nodes 2 --devices 1");
    grid.ok("volume create v1 --size 16MiB --layout mirror:2");
    grid
}

/// Two hosts with nodes beside the first.
struct Pair {
    a: Grid,
    b: Grid,
    _member: Member,
    _store: TempDir,
}

impl Pair {
    /// `None` without etcd.
    fn new(index: u16, last: u8) -> Pair {
        let store = tempfile::tempdir().unwrap();
        let member = etcd(store.path(), last);
        let endpoint = member.config().endpoint();
        let (a, b) = (Grid::new(index), Grid::new(index + 1));
        a.up(&format!("--nodes 2 --devices 1 --etcd {endpoint} --address 127.0.0.1 --name a"));
        let token = a.ok("grid token").trim().to_string();
        b.up(&format!("--nodes 0 --etcd {endpoint} --address 127.0.0.1 --name b --join {token}"));
        until("both hosts see all nodes", || (1..=2).all(|n| a.node_state(n) == "up" && b.node_state(n) == "up"));
        Pair { a, b, _member: member, _store: store }
    }
}

/// What is told of the filter in this place.
fn filter(grid: &Grid, n: usize) -> serde_json::Value {
    grid.json("volume filter list v1")["filters"][n].clone()
}

#[test]
fn what_makes_no_filter_is_refused_and_the_rest_is_told_of() {
    let grid = made(120);
    for (line, parts) in [
        (
            "add v1 dealy:read=1ms",
            &["there is no filter `dealy`", "delay, fail, stall, limit", "volume filter kinds"][..],
        ),
        ("add v1 delay:reed=1ms,read=1ms", &["`reed` says delay nothing", "it takes read"]),
        ("add v1 delay:read=10", &["read=10 can't be used", "10ms"]),
        ("add v1 fail:read=eio,share=1.5", &["share=1.5"]),
        ("add v1 limit:burst=1s", &["iops or bytes"]),
        ("add v2 delay:read=1ms", &["v2"]),
        ("remove v1 7", &["no filter 7", "volume filter list v1"]),
    ] {
        let error = grid.fails(&format!("volume filter {line}"));
        assert!(parts.iter().all(|part| error.contains(part)), "{line}: {error}");
    }
    assert_eq!(grid.ok("volume layer kinds"), grid.ok("volume filter kinds"), "the former spelling");
    assert!(grid.ok("volume filter list v1").contains("has no filters"));
    let kinds = grid.ok("volume filter kinds");
    let help = grid.ok("volume filter --help");
    for kind in grid.json("volume filter kinds").as_array().unwrap() {
        let name = kind["name"].as_str().unwrap();
        assert!(kinds.contains(kind["example"].as_str().unwrap()) && help.contains(&format!("{name}:")), "{name}");
    }
    for _ in 0..16 {
        grid.ok("volume filter add v1 limit:iops=100000");
    }
    assert!(grid.fails("volume filter add v1 limit:iops=1").contains("as many filters as it can have (16)"));
    assert!(!grid.ok("status").contains("worse on purpose"), "a limit is none");
    grid.ok("volume filter remove v1");
    assert!(grid.json("volume show v1")["filters"].is_null());
    grid.ok("volume unexport v1");
    assert!(grid.fails("volume filter add v1 delay:read=1ms").contains("volume export v1"));
}

#[test]
fn filters_come_and_go_while_a_client_reads_and_writes() {
    let grid = made(121);
    let (is_over, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            let mut guest = Guest::connect(&grid, "v1");
            for round in 0_u64.. {
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                // Eight at a time, over two MiB.
                let at = |n: u64| (round * 8 + n) % 512 * BLOCK as u64;
                let byte = (round / 64 + 1) as u8;
                let mut asked: Vec<u32> =
                    (0..8).map(|n| guest.ask(Command::Write, at(n), BLOCK, &[byte; BLOCK])).collect();
                asked.push(guest.ask(Command::Flush, 0, 0, &[]));
                let mut answered: Vec<u32> = Vec::new();
                for _ in &asked {
                    let (cookie, error) = guest.answer();
                    assert_eq!(error, 0, "round {round}");
                    answered.push(cookie);
                }
                answered.sort_unstable();
                assert_eq!(answered, asked, "each once");
                assert_eq!(guest.read(at(round % 8)), Ok(byte), "round {round}");
                rounds.fetch_add(1, Ordering::Relaxed);
            }
        });
        let goes_on = || {
            let before = rounds.load(Ordering::Relaxed);
            until("the client goes on", || load.is_finished() || rounds.load(Ordering::Relaxed) > before + 20);
            assert!(!load.is_finished(), "the client has failed");
        };
        goes_on();
        grid.ok("volume filter add v1 delay:write=1ms..4ms,share=0.5");
        grid.ok("volume filter add v1 limit:iops=100000,bytes=1GiB");
        grid.ok("volume filter add v1 delay:read=2ms,flush=3ms,every=2");
        goes_on();
        until("writes and reads are delayed", || {
            let delayed = |n| filter(&grid, n)["counters"]["delayed"].as_u64().unwrap();
            load.is_finished() || (delayed(0) > 50 && delayed(2) > 20)
        });
        let drawn = grid.ok("volume explain v1");
        for part in ["front end", "1: delay:write=1ms..4ms,share=0.5", "2: limit:iops", "3: delay:read", "controller"] {
            assert!(drawn.contains(part), "{part}: {drawn}");
        }
        let order =
            ["front end", "1: delay", "2: limit", "3: delay", "controller"].map(|part| drawn.find(part).unwrap());
        assert!(order.is_sorted() && drawn.contains(" delayed, ") && drawn.contains(" in flight"), "{drawn}");
        let status = grid.ok("status");
        assert!(
            status.contains("volume v1 is made worse on purpose, by delay:write=1ms..4ms,share=0.5 and"),
            "{status}"
        );
        // One in the middle of others, the first, and all.
        grid.ok("volume filter remove v1 2");
        goes_on();
        grid.ok("volume filter remove v1 1");
        goes_on();
        grid.ok("volume filter add v1 delay:all=0ms..1ms");
        goes_on();
        grid.ok("volume filter remove v1");
        until("they are gone", || grid.json("volume show v1")["filters"].is_null());
        goes_on();
        is_over.store(true, Ordering::Relaxed);
        load.join().unwrap();
    });
    let drawn = grid.ok("volume explain v1");
    assert!(!drawn.contains("worse on purpose") && !drawn.contains("delay:"), "{drawn}");
}

#[test]
fn errors_reach_the_client_and_change_nothing() {
    let grid = made(122);
    let mut guest = Guest::connect(&grid, "v1");
    assert_eq!((guest.write(0, 1), guest.write(BLOCK as u64, 1)), (0, 0));
    grid.ok("volume filter add v1 fail:write=eio,range=0..4096");
    assert_eq!(guest.write(0, 2), 5, "EIO");
    assert_eq!(guest.write(BLOCK as u64, 2), 0, "out of the range");
    assert_eq!(guest.read(0), Ok(1), "nothing was changed");
    grid.ok("volume filter add v1 fail:write=enospc,every=3");
    let errors: Vec<u32> = (0..6).map(|n| guest.write(BLOCK as u64 * 2, n)).collect();
    assert_eq!(errors, [0, 0, 28, 0, 0, 28], "ENOSPC");
    let (first, second) = (filter(&grid, 0), filter(&grid, 1));
    assert_eq!((&first["counters"]["failed"], &first["above"]["errors"]), (&1.into(), &3.into()), "{first}");
    assert_eq!((&second["counters"]["failed"], &second["above"]["errors"]), (&2.into(), &2.into()), "{second}");
    grid.ok("volume filter remove v1");
    assert_eq!((guest.write(0, 3), guest.read(0)), (0, Ok(3)));
}

#[test]
fn what_hangs_is_let_go_and_who_comes_later_comes_behind_it() {
    let grid = made(123);
    let mut guest = Guest::connect(&grid, "v1");
    assert_eq!(guest.write(0, 1), 0);
    grid.ok("volume filter add v1 stall:write=forever");
    let written = guest.ask(Command::Write, 0, BLOCK, &[2; BLOCK]);
    until("the write hangs", || filter(&grid, 0)["counters"]["held now"] == 1);
    let read = guest.ask(Command::Read, 0, BLOCK, &[]);
    assert_eq!(guest.answer(), (read, 0), "a read overtakes it");
    assert_eq!(guest.block(), 1);
    assert_eq!(filter(&grid, 0)["above"]["in_flight"], 1);
    grid.ok("volume filter remove v1 1");
    assert_eq!(guest.answer(), (written, 0));
    assert_eq!(guest.read(0), Ok(2));

    // Its client goes, and another one comes: what that reads is behind the write.
    grid.ok("volume filter add v1 stall:write=forever");
    guest.ask(Command::Write, 0, BLOCK, &[3; BLOCK]);
    until("the write hangs", || filter(&grid, 0)["counters"]["held now"] == 1);
    drop(guest);
    until("the client is gone", || grid.json("volume show v1")["sessions"] == 0);
    let mut guest = Guest::connect(&grid, "v1");
    let read = guest.ask(Command::Read, 0, BLOCK, &[]);
    assert_eq!(filter(&grid, 0)["above"]["requests"], 1, "the read waits, and has not come so far");
    grid.ok("snapshot create v1 s1");
    let refusal = grid.fails("snapshot rollback v1 s1");
    assert!(refusal.contains("connected"), "{refusal}");
    grid.ok("volume filter remove v1");
    assert_eq!(guest.answer(), (read, 0));
    assert_eq!(guest.block(), 3);

    // A volume that is closed lets go of what filters hold, and of the filters.
    grid.ok("volume filter add v1 stall:write=forever");
    guest.ask(Command::Write, 0, BLOCK, &[4; BLOCK]);
    until("the write hangs", || filter(&grid, 0)["counters"]["held now"] == 1);
    drop(guest);
    until("the client is gone", || grid.json("volume show v1")["sessions"] == 0);
    let refusal = grid.fails("snapshot rollback v1 s1");
    assert!(refusal.contains("filters hold requests"), "{refusal}");
    grid.ok("volume unexport v1");
    grid.ok("volume export v1");
    assert!(grid.json("volume show v1")["filters"].is_null());
    let mut guest = Guest::connect(&grid, "v1");
    assert_eq!(guest.read(0), Ok(4), "it came before the close");

    // Nor do they outlive their host.
    grid.ok("volume filter add v1 delay:read=1ms");
    drop(guest);
    grid.ok("grid down");
    grid.ok("grid up");
    assert!(grid.json("volume show v1")["filters"].is_null());
}

#[test]
fn what_filters_hold_is_done_when_the_volume_is_handed_over() {
    let Pair { a, b, .. } = &Pair::new(124, 61);
    a.ok("volume create v1 --size 16MiB --layout mirror:2");
    b.ok("volume export v1 --multipath");
    let (mut near, mut far) = (Guest::connect(a, "v1"), Guest::connect(b, "v1"));
    assert_eq!((near.write(0, 1), far.write(BLOCK as u64, 1)), (0, 0));
    // It is put where the volume is served.
    b.ok("volume filter add v1 delay:read=1ms");
    assert_eq!(filter(a, 0)["spec"], "delay:read=1ms");
    a.ok("volume filter remove v1 1");
    a.ok("volume filter add v1 stall:write=forever");
    let written =
        (near.ask(Command::Write, 0, BLOCK, &[2; BLOCK]), far.ask(Command::Write, BLOCK as u64, BLOCK, &[2; BLOCK]));
    until("both writes hang, also that of the forwarded client", || filter(a, 0)["counters"]["held now"] == 2);
    a.ok("volume handover v1 --to b");
    assert_eq!((near.answer(), far.answer()), ((written.0, 0), (written.1, 0)));
    assert_eq!((far.read(0), near.read(BLOCK as u64)), (Ok(2), Ok(2)));
    assert!([a, b].iter().all(|grid| grid.json("volume show v1")["filters"].is_null()));
}

/// Eight writes at once.
fn hurry(guest: &mut Guest, byte: u8) {
    let asked: Vec<u32> = (0..8).map(|n| guest.ask(Command::Write, n * BLOCK as u64, BLOCK, &[byte; BLOCK])).collect();
    let mut answers: Vec<(u32, u32)> = asked.iter().map(|_| guest.answer()).collect();
    answers.sort_unstable();
    assert_eq!(answers, asked.iter().map(|cookie| (*cookie, 0)).collect::<Vec<_>>());
}

/// The volume has this limit, and some of what it was asked had to wait.
fn check_limited(grid: &Grid, limit: &str) {
    let filter = filter(grid, 0);
    assert_eq!((&filter["spec"], &filter["kept"]), (&format!("limit:{limit}").into(), &true.into()), "{filter}");
    assert_eq!(grid.json("volume show v1")["limit"], limit);
    assert!(filter["counters"]["waited"].as_u64() > Some(0), "{filter}");
}

#[test]
fn a_limit_is_kept_with_its_volume_and_goes_with_it_to_other_hosts() {
    let Pair { a, b, .. } = &Pair::new(126, 62);
    let error = a.fails("volume create v1 --size 16MiB --layout mirror:2 --limit 500");
    assert!(error.contains("`500` is no limit") && error.contains("iops=500,bytes=50MiB"), "{error}");
    assert!(a.fails("volume show v1").contains("no volume v1"), "nothing is made of it");
    a.ok("volume create v1 --size 16MiB --layout mirror:2 --limit iops=200,burst=1ms");

    // It is there before the first request; what does not fit waits, and all of it comes.
    let mut near = Guest::connect(a, "v1");
    hurry(&mut near, 1);
    check_limited(a, "iops=200,burst=1ms");
    let drawn = a.ok("volume explain v1");
    assert!(drawn.contains("kept with the volume"), "{drawn}");

    // What ends filters leaves it: it is no filter of the moment.
    let error = a.fails("volume filter remove v1 0");
    assert!(error.contains("volume set v1 --limit none"), "{error}");
    a.ok("volume filter add v1 delay:flush=1ms");
    a.ok("volume filter remove v1");
    check_limited(a, "iops=200,burst=1ms");
    assert!(filter(a, 1).is_null());
    // The former spelling.
    b.ok("volume export v1 --portal");
    a.ok("volume handover v1 --to b");
    hurry(&mut near, 2);
    check_limited(b, "iops=200,burst=1ms");

    // Each host may change it, whoever serves the volume; and one that starts anew goes by it.
    a.ok("volume set v1 --limit bytes=1MiB,burst=1ms");
    until("b has heard of it", || filter(b, 0)["spec"] == "limit:bytes=1MiB,burst=1ms");
    drop(near);
    a.ok("volume unexport v1");
    b.ok("grid down --force");
    b.ok("grid up");
    until("it is open again", || b.json("volume show v1")["state"] == "open");
    let mut near = Guest::connect(b, "v1");
    hurry(&mut near, 3);
    check_limited(b, "bytes=1MiB,burst=1ms");

    // A clone begins with it, and has its own from there on.
    b.ok("snapshot create v1 s1");
    b.ok("volume clone v1@s1 c1");
    assert_eq!(b.json("volume show c1")["limit"], "bytes=1MiB,burst=1ms");
    let mut of_clone = Guest::connect(b, "c1");
    hurry(&mut of_clone, 4);
    drop(of_clone);
    until("the clone is left", || b.json("volume show c1")["sessions"] == 0);
    b.ok("volume set c1 --limit none");
    assert!(b.fails("volume set c1 --limit none --integrity off").contains("is a clone"));
    assert!(b.json("volume show c1")["limit"].is_null());
    b.ok("volume delete c1");
    check_limited(b, "bytes=1MiB,burst=1ms");
    // A policy that says more than a limit is kept, too.
    assert!(a.fails("volume set v1 --qos floor=5,limit=200").contains("holdfast qos measure"));
    let said = a.ok("volume set v1 --qos weight=400,limit=200,burst=20/5s");
    assert!(said.contains("has weight=400,limit=200,burst=20/5s"), "{said}");
    until("b has heard of it", || filter(b, 0)["spec"] == "qos:weight=400,limit=200,burst=20/5s");
    hurry(&mut near, 5);
    let shown = b.ok("volume show v1");
    assert!(shown.lines().any(|line| line.starts_with("qos") && line.contains("weight=400")), "{shown}");
    b.ok("volume set v1 --limit none");
    assert!(b.json("volume show v1")["filters"].is_null());
    assert_eq!(near.read(0), Ok(5));
}
