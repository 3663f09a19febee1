//! What a process costs, from /proc: for `status` and the benches.

use std::time::Duration;
use std::{fs, io};

/// CPU time and resident memory of one process at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ProcessStats {
    pub cpu_user: Duration,
    pub cpu_system: Duration,
    pub resident_bytes: u64,
    pub threads: u32,
}

impl ProcessStats {
    pub fn cpu(&self) -> Duration {
        self.cpu_user + self.cpu_system
    }
}

/// Reads the stats of `pid`.
pub fn stats(pid: u32) -> io::Result<ProcessStats> {
    parse(&fs::read_to_string(format!("/proc/{pid}/stat"))?)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("/proc/{pid}/stat has an unknown form")))
}

/// Stats of the calling process.
pub fn own_stats() -> io::Result<ProcessStats> {
    stats(std::process::id())
}

/// CPU time of the calling thread.
pub fn thread_cpu() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

/// What the kernel counts of a thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ThreadStats {
    /// It had a processor.
    pub ran: Duration,
    /// It could have gone on, and had none.
    pub waited: Duration,
}

/// Of the calling thread; `None` where the kernel does not count.
pub fn thread_stats() -> Option<ThreadStats> {
    parse_thread(&fs::read_to_string("/proc/thread-self/schedstat").ok()?)
}

fn parse_thread(schedstat: &str) -> Option<ThreadStats> {
    let mut nanos = schedstat.split_whitespace().map(str::parse);
    let mut next = || nanos.next()?.ok().map(Duration::from_nanos);
    Some(ThreadStats { ran: next()?, waited: next()? })
}

fn parse(stat: &str) -> Option<ProcessStats> {
    // The command's name may hold spaces and brackets; the fields proper start after the last one.
    let fields: Vec<&str> = stat.get(stat.rfind(')')? + 1..)?.split_whitespace().collect();
    let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
    let ticks_per_second = rustix::param::clock_ticks_per_second();
    let ticks = |count: u64| Duration::from_nanos(count * (1_000_000_000 / ticks_per_second));
    Some(ProcessStats {
        cpu_user: ticks(number(11)?),
        cpu_system: ticks(number(12)?),
        threads: number(17)? as u32,
        resident_bytes: number(21)? * rustix::param::page_size() as u64,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_thread_ran_and_waited_is_read() {
        let (ran, waited) = (Duration::from_nanos(1_940_744), Duration::from_nanos(17_601));
        assert_eq!(parse_thread("1940744 17601 2\n"), Some(ThreadStats { ran, waited }));
        assert_eq!([parse_thread("1940744"), parse_thread("")], [None; 2]);
    }

    #[test]
    fn a_stat_line_with_an_odd_name_is_read() {
        let line = "7 (a) b) S 1 7 7 0 -1 4194560 1 2 3 4 250 50 0 0 20 0 3 0 100 1000 16 18446744073709551615";
        let stats = parse(line).unwrap();
        let tick = Duration::from_secs(1) / rustix::param::clock_ticks_per_second() as u32;
        assert_eq!(stats.cpu_user, tick * 250);
        assert_eq!(stats.cpu_system, tick * 50);
        assert_eq!(stats.threads, 3);
        assert_eq!(stats.resident_bytes, 16 * rustix::param::page_size() as u64);
        assert!(parse("nothing").is_none());
    }

    #[test]
    fn this_process_has_memory() {
        assert!(own_stats().unwrap().resident_bytes > 0);
        assert!(stats(u32::MAX).is_err());
    }
}
