//! Gauges and counters of the process, under the names of Prometheus' client libraries.

use crate::logging;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use std::fmt;

/// Reads the state of the process at each scrape.
#[derive(Debug)]
pub(super) struct ProcessCollector;

impl Collector for ProcessCollector {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        let counter = ConstCounter::new(logging::dropped_lines());
        let help = "Log lines that were lost because standard error was full, closed or slow";
        let name = "pegainfer:log_lines_dropped";
        counter.encode(encoder.encode_descriptor(name, help, None, counter.metric_type())?)?;
        let Some(process) = Process::read() else { return Ok(()) };
        let counter = ConstCounter::new(process.cpu_seconds);
        let help = "CPU time of the process, in user and system mode";
        counter.encode(encoder.encode_descriptor("process_cpu_seconds", help, None, counter.metric_type())?)?;
        for (name, help, value) in [
            ("process_resident_memory_bytes", "Resident memory of the process", process.resident),
            ("process_virtual_memory_bytes", "Virtual memory of the process", process.virtual_memory),
            ("process_start_time_seconds", "Start of the process, in Unix time", process.started),
            ("process_open_fds", "Open files of the process, connections included", process.open_files),
            ("process_max_fds", "Limit of open files", process.max_files),
        ] {
            let gauge = ConstGauge::new(value);
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        Ok(())
    }
}

struct Process {
    cpu_seconds: f64,
    resident: f64,
    virtual_memory: f64,
    started: f64,
    open_files: f64,
    max_files: f64,
}

#[cfg(target_os = "linux")]
impl Process {
    /// The state in `/proc`; `None` if that is not mounted.
    fn read() -> Option<Self> {
        let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
        // The fields after the process name, which may contain spaces. The first one is the third of proc(5).
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        let field = |number: usize| fields.get(number - 3)?.parse::<f64>().ok();
        let ticks = rustix::param::clock_ticks_per_second() as f64;
        let uptime: f64 = std::fs::read_to_string("/proc/uptime").ok()?.split(' ').next()?.parse().ok()?;
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).ok()?.as_secs_f64();
        let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        Some(Self {
            cpu_seconds: (field(14)? + field(15)?) / ticks,
            resident: field(24)? * rustix::param::page_size() as f64,
            virtual_memory: field(23)?,
            started: now - uptime + field(22)? / ticks,
            open_files: std::fs::read_dir("/proc/self/fd").ok()?.count() as f64,
            max_files: files.map_or(f64::INFINITY, |files| files as f64),
        })
    }
}

#[cfg(not(target_os = "linux"))]
impl Process {
    fn read() -> Option<Self> {
        None
    }
}
