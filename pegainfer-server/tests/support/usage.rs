//! Resources of a process, from `/proc`.

use std::time::{Duration, Instant};

/// Resources of a process at one time.
#[derive(Debug, Clone, Copy)]
pub struct Usage {
    /// Resident memory in bytes.
    pub resident: u64,
    /// Open files.
    pub files: usize,
    pub threads: u64,
}

impl Usage {
    /// Resources of process `pid`.
    pub fn read(pid: u32) -> Self {
        let files = std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
        Self { resident: status(pid, "VmRSS:"), files, threads: status(pid, "Threads:") / 1024 }
    }
}

/// CPU time so far, in clock ticks.
pub struct CpuTime {
    /// Ticks of all cores, including idle time.
    total: u64,
    /// Busy ticks of all cores.
    busy: u64,
    /// Ticks of the server and of this process.
    own: u64,
}

impl CpuTime {
    /// The CPU time so far, for the server with this process id.
    pub fn now(server: u32) -> Self {
        let text = std::fs::read_to_string("/proc/stat").unwrap();
        let cores = text.lines().next().unwrap().split_whitespace().skip(1).take(8);
        let ticks: Vec<u64> = cores.map(|field| field.parse().unwrap()).collect();
        // user, nice, system, idle, iowait, ...
        let (total, idle) = (ticks.iter().sum::<u64>(), ticks[3] + ticks[4]);
        Self { total, busy: total - idle, own: process_ticks(server) + process_ticks(std::process::id()) }
    }

    /// How much longer work took since then because other processes used part of the CPU time; 1 without such
    /// processes.
    pub fn slowdown(&self, server: u32) -> f64 {
        let now = Self::now(server);
        let total = (now.total - self.total).max(1) as f64;
        let others = (now.busy - self.busy).saturating_sub(now.own - self.own) as f64;
        1.0 / (1.0 - others / total).max(0.05)
    }
}

/// Fraction of a core that a process takes, over a tenth of a second.
pub fn busy(pid: u32) -> f64 {
    /// Clock ticks per second, the same on every Linux.
    const TICKS: f64 = 100.0;
    let (began, before) = (Instant::now(), process_ticks(pid));
    std::thread::sleep(Duration::from_millis(100));
    process_ticks(pid).saturating_sub(before) as f64 / TICKS / began.elapsed().as_secs_f64()
}

/// User and system time of a process.
fn process_ticks(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The process name, in brackets, may contain spaces.
    let fields = text.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace();
    fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum()
}

/// A number of `/proc/PID/status`: bytes, or a count times 1,024.
pub fn status(pid: u32, field: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let number = text.lines().find_map(|line| line.strip_prefix(field)?.split_whitespace().next()?.parse().ok());
    number.unwrap_or(0u64) * 1024
}

/// Resets `VmHWM`, the peak of the resident memory.
pub fn reset_peak(pid: u32) {
    std::fs::write(format!("/proc/{pid}/clear_refs"), "5").unwrap();
}
