//! What `doctor` reports on any machine: CPU, memory, cache, hub and port.

use anyhow::Result;
use indicatif::DecimalBytes;
use pegainfer_core::host_memory;
use pegainfer_core::isa::Isa;
use pegainfer_hub::Hub;
use pegainfer_models::args::EngineArgs;
use pegainfer_models::weight_memory::WeightMemory;
use std::fs;
use std::io::ErrorKind;
use std::net::TcpListener;
use std::path::Path;
use std::thread::available_parallelism;
use std::time::Duration;

/// Maximum time for each part of the question to the hub.
const HUB_TIMEOUT: Duration = Duration::from_secs(5);

/// A line of the report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    name: &'static str,
    /// What was found, or what is wrong and what to do.
    found: Result<String, String>,
}

impl Finding {
    fn new(name: &'static str, found: Result<String, String>) -> Self {
        Self { name, found }
    }

    /// True if the user has to do something.
    pub fn is_problem(&self) -> bool {
        self.found.is_err()
    }

    /// The line.
    pub fn line(&self) -> String {
        match &self.found {
            Ok(found) => format!("{}: {found}\n", self.name),
            Err(problem) => format!("{}: PROBLEM: {problem}\n", self.name),
        }
    }
}

/// The report. The hub is asked only if `asks_hub`, because it may be out of reach on purpose.
pub fn findings(args: &EngineArgs, port: u16, asks_hub: bool) -> Vec<Finding> {
    let hub = Hub::from_env();
    vec![
        Finding::new("CPU", Ok(cpu())),
        Finding::new("memory", memory()),
        Finding::new("models", models(args)),
        Finding::new("cache", cache(&hub)),
        Finding::new(
            "hub",
            if asks_hub { answer(hub) } else { Ok(format!("{} was not asked (--hub asks it)", hub.endpoint)) },
        ),
        Finding::new("port", Ok(port_state(port))),
    ]
}

fn cpu() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let model = model.map_or(std::env::consts::ARCH, |(_, name)| name.trim());
    let cores = available_parallelism().map_or(1, usize::from);
    let plural = if cores == 1 { "" } else { "s" };
    let slow = if Isa::best() == Isa::Portable { ", which are slow: this CPU has no AVX2 or NEON" } else { "" };
    format!("{model}, {cores} core{plural}, {} kernels{slow}", Isa::best())
}

fn memory() -> Result<String, String> {
    match host_memory::total().zip(host_memory::available()) {
        Some((total, available)) => Ok(format!("{}, {} of it available", DecimalBytes(total), DecimalBytes(available))),
        None => Ok("unknown on this system".to_owned()),
    }
}

/// Sizes of the models that fit the default device.
fn models(args: &EngineArgs) -> Result<String, String> {
    let memory = WeightMemory::chosen(args).map_err(|error| format!("{error:#}"))?;
    let capacity = memory.map_or_else(|| "unknown".to_owned(), |memory| memory.capacity());
    Ok(format!("{capacity}; pegainfer fit MODEL says it of one"))
}

/// The cache directory, which has to be writable, its models and its disk.
fn cache(hub: &Hub) -> Result<String, String> {
    let dir = hub.cache.display();
    let problem = |error: std::io::Error| format!("{dir} cannot be used: {error}; set HF_HOME to a directory of yours");
    let models = hub.cached().map_err(problem)?.len();
    writable(&hub.cache).map_err(problem)?;
    let free = hub.free_bytes().map_or_else(|| "unknown".to_owned(), |free| DecimalBytes(free).to_string());
    Ok(format!("{dir}, {models} models, {free} free"))
}

/// Checks that files can be created in `dir`, or in the first of its parents that exists.
fn writable(dir: &Path) -> std::io::Result<()> {
    let parent = dir.ancestors().find(|dir| dir.is_dir()).ok_or(ErrorKind::NotFound)?;
    tempfile::tempfile_in(parent).map(drop)
}

fn answer(mut hub: Hub) -> Result<String, String> {
    if hub.offline {
        return Ok("HF_HUB_OFFLINE is set".to_owned());
    }
    (hub.timeouts.connect, hub.timeouts.read) = (HUB_TIMEOUT, HUB_TIMEOUT);
    let took = hub.ping().map_err(|error| format!("{error}; check network and proxy"))?;
    let token = if hub.token.is_some() { "with a token" } else { "without a token" };
    Ok(format!("{} answers in {:.2} s, {token}", hub.endpoint, took.as_secs_f64()))
}

/// Whether the server could listen. A port in use is no problem: another server may be the reason.
fn port_state(port: u16) -> String {
    match TcpListener::bind(("127.0.0.1", port)) {
        Ok(_) => format!("{port} is free"),
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            format!("{port} is in use: stop the program that has it, or give another --port")
        }
        Err(error) => format!("{port} cannot be used: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_in_use_is_told() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(port_state(port).starts_with(&format!("{port} is in use")));
        drop(listener);
        assert_eq!(port_state(port), format!("{port} is free"));
    }

    #[test]
    fn a_cache_that_is_not_there_yet_is_writable_if_its_parent_is() {
        let parent = tempfile::tempdir().unwrap();
        let hub = |cache: &Path| Hub { cache: cache.to_owned(), ..Hub::from_env() };
        let found = cache(&hub(&parent.path().join("a/b"))).unwrap();
        assert!(found.contains("/a/b, 0 models, ") && found.ends_with("B free"), "{found}");
        assert!(!parent.path().join("a").exists(), "the check created it");
        let file = parent.path().join("file");
        fs::write(&file, "").unwrap();
        let problem = cache(&hub(&file)).unwrap_err();
        assert!(
            problem.contains("cannot be used: ") && problem.ends_with("set HF_HOME to a directory of yours"),
            "{problem}"
        );
        assert!(Finding::new("cache", Err(problem)).line().starts_with("cache: PROBLEM: "));
    }
}
