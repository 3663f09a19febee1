//! Programs that tests stand on, and programs that stand in for others.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The program's place in the search path.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(program)).find(|file| file.is_file())
}

/// The same of one that a test can't do without.
///
/// # Panics
///
/// Where it is not installed: a test that did not run has not passed.
pub fn needs(program: &str) -> PathBuf {
    find(program).unwrap_or_else(|| {
        panic!("there is no program `{program}` in PATH; `./x setup` brings it, and `./x test` has it in PATH")
    })
}

/// Says why a test does not run, for what this machine can't have: a right, a kind of device. `./x test` counts it as
/// skipped. A program that is only not installed is no reason: [`needs`].
pub fn skip(why: &str) {
    // Past the test harness, which keeps back what passing tests print, and on a line of its own.
    let _ = writeln!(std::io::stdout(), "\n{SKIPPED}{why}");
}

/// Lines of a test's output that begin so count as skipped tests.
pub const SKIPPED: &str = "skipped: ";

/// Writes a program, mode 0700.
///
/// Another process writes it: a file that this one has open for writing may be inherited by what another test is just
/// starting, and cannot be run meanwhile (ETXTBSY).
///
/// # Panics
///
/// Where it can't be written.
pub fn write(path: &Path, code: &str) {
    let mut install = Command::new("install");
    install.args(["-m", "700", "/dev/stdin"]).arg(path).stdin(Stdio::piped());
    let mut install = install.spawn().expect("`install` runs");
    let mut input = install.stdin.take().expect("its input is piped");
    input.write_all(code.as_bytes()).expect("it takes the text");
    drop(input);
    assert!(install.wait().is_ok_and(|status| status.success()), "{} is not written", path.display());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_found_where_it_is() {
        assert!(find("sh").is_some_and(|path| path.ends_with("sh")));
        assert_eq!(find("no-such-program"), None);
    }

    #[test]
    #[should_panic(expected = "no program `no-such-program` in PATH")]
    fn a_test_without_its_program_fails() {
        needs("no-such-program");
    }
}
