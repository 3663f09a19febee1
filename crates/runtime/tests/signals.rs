//! Alone in its process, since signals are the process's.

mod support;

use holdfast_runtime::Event;
use holdfast_runtime::reactor::Config;
use support::run;

#[test]
fn a_request_to_end_is_an_event() {
    let seen = run(
        Config { handles_signals: true, ..Config::default() },
        |_| {
            // SAFETY: sends a signal to this very process, whose handler is in place.
            unsafe { libc::kill(libc::getpid(), libc::SIGTERM) };
            Vec::new()
        },
        |seen, event, io| {
            if let Event::Shutdown { signal } = event {
                seen.push(signal);
                io.stop();
            }
        },
    );
    assert_eq!(seen, [libc::SIGTERM]);
}
