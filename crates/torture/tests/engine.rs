//! The checker against servers whose faults are known: it must be content with a sound one and find out the others.

use anyhow::ensure;
use holdfast_lab::program::needs;
use holdfast_torture::engine::{Counts, Engine, Plan, VolumePlan};
use std::path::Path;
use std::process::{Child, Command};
use std::sync::mpsc;
use std::time::{Duration, Instant};

const SIZE_BYTES: u64 = 64 << 20;

/// nbdkit on a socket, killed with the test.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// nbdkit dies with the thread that started it (`PR_SET_PDEATHSIG`), so that thread stays.
fn spawn_for_good(mut command: Command) -> Child {
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || {
        tell.send(command.spawn().expect("nbdkit starts")).expect("the caller waits");
        loop {
            std::thread::park();
        }
    });
    told.recv().expect("nbdkit starts")
}

fn start(socket: &Path, arguments: &[&str]) -> Server {
    let _ = std::fs::remove_file(socket);
    let mut command = Command::new(needs("nbdkit"));
    command.args(["-f", "-U"]).arg(socket).args(arguments);
    let child = spawn_for_good(command);
    let since = Instant::now();
    while !socket.exists() {
        assert!(since.elapsed() < Duration::from_secs(60), "nbdkit makes its socket");
        std::thread::sleep(Duration::from_millis(10));
    }
    Server(child)
}

fn plan(socket: &Path) -> Plan {
    let volume = VolumePlan {
        socket: socket.into(),
        export: String::new(),
        size_bytes: SIZE_BYTES,
        connections: 3,
        image: None,
    };
    Plan { seed: 7, depth: 8, volumes: vec![volume] }
}

/// Keeps requests in flight until so much was done; all of it is answered then.
fn run_until(engine: &mut Engine, is_enough: impl Fn(&Counts) -> bool) -> anyhow::Result<()> {
    let since = Instant::now();
    while !is_enough(&engine.counts) {
        ensure!(since.elapsed() < Duration::from_secs(60), "not within a minute: {:?}", engine.counts);
        run_for(engine, Duration::from_millis(500))?;
    }
    Ok(())
}

fn run_for(engine: &mut Engine, time: Duration) -> anyhow::Result<()> {
    engine.run(|control| {
        control.rest(time);
        Ok(())
    })
}

/// Long enough for a fault to show on a machine that has much else to do; the run ends with what is found.
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn a_sound_server_passes() {
    let temp = tempfile::tempdir().expect("a temporary directory");
    let socket = temp.path().join("s");
    let _server = start(&socket, &["memory", "64M"]);
    let mut engine = Engine::new(plan(&socket)).expect("connects");
    assert_eq!(engine.structured_connections(), 2, "two of three ask for structured replies");
    run_until(&mut engine, |counts| counts.requests > 1000 && counts.trims > 10).expect("nothing is wrong");
    engine.sweep().expect("nothing is wrong");
}

#[test]
fn a_server_that_forgets_writes_is_found_out() {
    let temp = tempfile::tempdir().expect("a temporary directory");
    let socket = temp.path().join("s");
    let _server = start(&socket, &["null", "64M"]);
    let mut engine = Engine::new(plan(&socket)).expect("connects");
    let error = run_for(&mut engine, PATIENCE).expect_err("all writes are lost").to_string();
    assert!(error.contains("mismatch") && error.contains("zeroes"), "{error}");
}

#[test]
fn errors_and_stalls_are_found_out() {
    let temp = tempfile::tempdir().expect("a temporary directory");
    let socket = temp.path().join("s");
    let _server = start(&socket, &["--filter=error", "memory", "64M", "error-rate=1%", "error=EIO"]);
    let mut engine = Engine::new(plan(&socket)).expect("connects");
    let error = run_for(&mut engine, PATIENCE).expect_err("one request in a hundred fails").to_string();
    assert!(error.contains("failed with error 5"), "{error}");
}

/// Has writes take a while, so that some are in flight whenever the server is killed.
const SLOW: [&str; 2] = ["--filter=delay", "delay-write=5ms"];

/// Kills the server in the middle and starts it again on `arguments`.
fn kill_and_restart(arguments: &[&str]) -> anyhow::Result<()> {
    let temp = tempfile::tempdir()?;
    let file = temp.path().join("disk");
    std::fs::File::create(&file)?.set_len(SIZE_BYTES)?;
    let file = file.to_str().expect("a plain path").to_string();
    let arguments: Vec<&str> = arguments.iter().map(|a| if *a == "FILE" { file.as_str() } else { a }).collect();
    let socket = temp.path().join("s");
    let mut server = start(&socket, &arguments);
    let mut engine = Engine::new(plan(&socket))?;
    // There is something to be lost.
    run_until(&mut engine, |counts| counts.writes > 100)?;
    let mut kill = || {
        engine.run(|control| {
            std::thread::sleep(Duration::from_millis(200));
            control.host_going();
            server.0.kill()?;
            server.0.wait()?;
            let ordered = Instant::now();
            server = start(&socket, &arguments);
            control.host_back(ordered);
            Ok(())
        })?;
        let requests = engine.counts.requests;
        run_until(&mut engine, |counts| counts.requests > requests + 100)?;
        Ok::<_, anyhow::Error>(engine.counts.lost)
    };
    // On a busy machine all that was asked may just have been answered.
    let mut lost = kill()?;
    for _ in 0..9 {
        lost = if lost > 0 { lost } else { kill()? };
    }
    assert!(lost > 0, "requests were in flight");
    engine.sweep()
}

#[test]
fn a_server_that_keeps_its_bytes_may_be_killed() {
    // One request at a time, whosever it is: a read of the page cache sees half of a cell that is just being
    // written, which no volume does. By itself the filter lets requests of several connections go side by side.
    kill_and_restart(&["--filter=noparallel", SLOW[0], "file", "FILE", "serialize=all-requests", SLOW[1]])
        .expect("the page cache outlives the process");
}

#[test]
fn a_server_that_loses_its_bytes_may_not() {
    let error =
        kill_and_restart(&[SLOW[0], "memory", "64M", SLOW[1]]).expect_err("memory dies with the process").to_string();
    assert!(error.contains("mismatch"), "{error}");
}
