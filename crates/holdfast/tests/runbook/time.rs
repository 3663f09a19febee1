//! What shows only with time: a grid whose processes are told another time than it is.

use crate::page::{Book, Machine};
use crate::support::{assert_volume_holds, nbdcopy, pattern, program};
use holdfast_lab::guest::Guest;
use holdfast_lab::nbd::Command;
use std::fs;
use std::path::{Path, PathBuf};

pub const ROWS: &[&str] = &["The pool is 80 % full", "A clock jumps"];

/// The library of faketime.
pub fn library() -> PathBuf {
    let places = fs::read_dir("/usr/lib").unwrap().filter_map(|entry| Some(entry.ok()?.path()));
    let found = places.map(|dir| dir.join("faketime/libfaketime.so.1")).find(|path| path.exists());
    found.expect("there is no faketime, and this test needs it: `./x setup`")
}

/// A clock that is told by a file.
pub struct Clock(PathBuf);

impl Clock {
    /// From here on what this machine runs of ours goes by it; time spans stay what they are.
    pub fn of(machine: &Machine, library: &Path) -> Clock {
        let clock = Clock(machine.path("clock"));
        clock.set("+0");
        let wrapper = format!(
            "#!/bin/sh\nexport LD_PRELOAD={} FAKETIME_TIMESTAMP_FILE={} FAKETIME_NO_CACHE=1 \
             FAKETIME_DONT_FAKE_MONOTONIC=1\nexec {} \"$@\"\n",
            library.display(),
            clock.0.display(),
            env!("CARGO_BIN_EXE_holdfast"),
        );
        program(&machine.path("holdfast"), &wrapper);
        // Shows the time, and sets the clock right.
        let tool = format!("#!/bin/sh\n[ \"$*\" = 'set-ntp true' ] && echo +0 >{}\ndate\n", clock.0.display());
        program(&machine.path("timedatectl"), &tool);
        clock
    }

    pub fn set(&self, offset: &str) {
        // At once: nobody sees half of it.
        let new = self.0.with_extension("new");
        fs::write(&new, format!("{offset}\n")).unwrap();
        fs::rename(&new, &self.0).unwrap();
    }
}

#[test]
fn rows_about_time() {
    let library = library();
    let mut book = Book::of(ROWS);
    let m = Machine::new(2);
    let clock = Clock::of(&m, &library);
    clock.set("-7h");
    m.ok(&format!("holdfast grid up --port {} --nodes 2 --devices 1 --device-size 256MiB", m.grid.port));
    for volume in ["v", "old"] {
        m.ok(&format!("holdfast volume create {volume} --size 16MiB"));
    }
    let (data, scratch) = (m.path("data"), m.path("scratch"));
    let write = |len: usize, volume: &str| {
        pattern(&data, len);
        nbdcopy(data.to_str().unwrap(), &m.grid.uri(volume));
    };
    let is_well = || {
        m.is_well();
        assert_volume_holds(&m.grid.uri("v"), &data, &scratch);
    };
    m.sees("holdfast meta export", "\"trend\"");

    let mut row = book.open("The pool is 80 % full");
    write(1 << 20, "old");
    write(1 << 20, "v");
    m.ok("holdfast snapshot create v before");
    write(2 << 20, "v");
    m.ok("holdfast volume delete old");
    // Large writes go past the log, whose entries take nothing that counts.
    m.ok("holdfast volume create grows --size 16MiB");
    let mut guest = Guest::connect(&m.grid, "grows");
    for at in 0..4 {
        let told = guest.ask(Command::Write, at << 20, 1 << 20, &[7; 1 << 20]);
        assert_eq!(guest.answer(), (told, 0));
    }
    drop(guest);
    clock.set("+0");
    row.seen(&m, &[]);
    row.checked(&m, &[]);
    row.done(&m, &[]);
    row.done(&m, &[("VOLUME", "v"), ("NAME", "before")]);
    row.done(&m, &[("NODE", "1"), ("PATH", &m.disk("disk", 1 << 30))]);
    is_well();
    drop(row);

    let mut row = book.open("A clock jumps");
    clock.set("+365d");
    m.ok("holdfast snapshot create v ahead");
    write(3 << 20, "v");
    clock.set("+90d");
    row.seen(&m, &[]);
    row.checked(&m, &[]);
    row.done(&m, &[]);
    row.done(&m, &[("VOLUME", "v"), ("NAME", "ahead")]);
    is_well();
    drop(row);
    book.end();
}
