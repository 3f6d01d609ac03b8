//! A server under attack: a child process with limited address space, watched from the outside.
//!
//! [`Target::start`] measures the quiet server. [`Target::attack`] runs an attack beside an ordinary streaming client and a
//! poller of `/health`, then checks what must hold:
//!
//! - The ordinary client is served: every request gets 200, and the 99th percentile of its inter-token latency (ITL) stays
//!   below three times the quiet value, or below 50 ms.
//! - `/health` answers in 100 ms (99th percentile; three times the quiet value on a machine that has other work).
//! - Resident memory stays below weights + KV + 1 GB, and no request made the process end.
//! - Five seconds after the attack, memory, open files, threads and the engine's gauges are back where they were.

use super::client::{get, post, send};
use super::process::{Process, pegainfer};
use super::wait_until;
use serde_json::json;
use std::io::BufRead;
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// Address space of the server.
const ADDRESS_SPACE: u64 = 8 << 30;
/// KV pool of the server, in bytes.
const KV: u64 = 256 * MIB;
/// Tensor bytes of the bundled checkpoint.
const WEIGHTS: u64 = 18_852_992;
/// Resident memory that the server may use besides weights and KV cache.
const WORKING_MEMORY: u64 = 1 << 30;
/// Time after which nothing of an attack may be left.
const AFTERMATH: Duration = Duration::from_secs(5);
/// Least time for which the server is watched, so that percentiles mean something.
const WATCHED: Duration = Duration::from_millis(1500);

/// A server that can be attacked.
pub struct Target {
    server: Process,
    quiet: Figures,
    before: Usage,
    log: Arc<Mutex<String>>,
}

impl Target {
    /// Starts a server with these flags and measures it while nobody attacks it.
    pub fn start(args: &[&str]) -> Self {
        let mut command = pegainfer();
        command.args(["--kv-cache-memory", &KV.to_string()]).args(args);
        Self::start_command(&mut command)
    }

    /// Like [`start`](Self::start), with a command that has its flags.
    pub fn start_command(command: &mut Command) -> Self {
        limit_address_space(command);
        let mut server = Process::start(command);
        let log = drain_log(&mut server);
        // The first requests touch pages and build tables that stay.
        watch(server.address, || std::thread::sleep(WATCHED / 3));
        let quiet = watch(server.address, || {}).figures();
        wait_idle(server.address);
        let before = Usage::of(server.child.id());
        Self { server, quiet, before, log }
    }

    /// Address of the server.
    pub fn address(&self) -> SocketAddr {
        self.server.address
    }

    /// Process id of the server.
    pub fn pid(&self) -> u32 {
        self.server.child.id()
    }

    /// Runs `attack`, which returns when its last connection is closed, and checks everything.
    pub fn attack<R>(&mut self, name: &str, attack: impl FnOnce(SocketAddr) -> R) -> R {
        let address = self.address();
        reset_peak(self.pid());
        let mut result = None;
        let watched = watch(address, || result = Some(attack(address)));
        let over = Instant::now();
        self.check_alive(name);
        let peak = status(self.pid(), "VmHWM:") / MIB;
        let most = (WEIGHTS + KV + WORKING_MEMORY) / MIB;
        println!("{name}: quiet {:?}, attacked {:?}, {peak} MiB resident at most", self.quiet, watched.figures());
        assert!(peak < most, "{name}: {peak} MiB were resident, at most {most} are documented");
        watched.check(name, self.quiet);
        self.check_aftermath(name, over);
        result.unwrap()
    }

    fn check_alive(&mut self, name: &str) {
        if let Some(status) = self.server.child.try_wait().unwrap() {
            panic!("{name}: the server ended with {status}: {}", self.log.lock().unwrap());
        }
    }

    fn check_aftermath(&mut self, name: &str, over: Instant) {
        let (pid, before) = (self.pid(), self.before);
        loop {
            let now = Usage::of(pid);
            if now.is_back_to(before) && is_idle(self.address()) {
                break;
            }
            let waited = over.elapsed();
            assert!(
                waited < AFTERMATH,
                "{name}: {waited:?} after the attack {now:?} is left, it began with {before:?}"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(get(self.address(), "/health").status, 200, "{name}");
    }
}

/// What a process has at one time.
#[derive(Debug, Clone, Copy)]
struct Usage {
    resident: u64,
    files: usize,
    threads: u64,
}

impl Usage {
    fn of(pid: u32) -> Self {
        let files = std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
        Self { resident: status(pid, "VmRSS:"), files, threads: status(pid, "Threads:") / 1024 }
    }

    /// Whether nothing is left that `before` did not have. KV pages and the caches of the tokenizer and the allocator, which
    /// are bounded, may have been touched since; idle threads of the blocking pool end by themselves after ten seconds.
    fn is_back_to(self, before: Self) -> bool {
        self.resident < before.resident + KV + 128 * MIB
            && self.files <= before.files + 4
            && self.threads <= before.threads + 16
    }
}

/// A number of `/proc/PID/status`: bytes, or a count times 1,024.
fn status(pid: u32, field: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let number = text.lines().find_map(|line| line.strip_prefix(field)?.split_whitespace().next()?.parse().ok());
    number.unwrap_or(0u64) * 1024
}

/// Lets `VmHWM`, the peak of the resident memory, begin again.
fn reset_peak(pid: u32) {
    std::fs::write(format!("/proc/{pid}/clear_refs"), "5").unwrap();
}

/// Percentiles, 99th of each.
#[derive(Debug, Clone, Copy)]
struct Figures {
    itl: Duration,
    health: Duration,
}

/// What the ordinary client and the poller saw.
#[derive(Default)]
struct Watched {
    gaps: Vec<Duration>,
    health: Vec<Duration>,
    refused: Vec<u16>,
}

impl Watched {
    fn figures(&self) -> Figures {
        Figures { itl: percentile(&self.gaps), health: percentile(&self.health) }
    }

    fn check(&self, name: &str, quiet: Figures) {
        let Figures { itl, health } = self.figures();
        assert!(self.refused.is_empty(), "{name}: the ordinary client got {:?}", self.refused);
        assert!(itl < (3 * quiet.itl).max(Duration::from_millis(50)), "{name}: ITL {itl:?}, quiet {:?}", quiet.itl);
        let most = (3 * quiet.health).max(Duration::from_millis(100));
        assert!(health < most, "{name}: /health took {health:?}, quiet {:?}", quiet.health);
    }
}

fn percentile(times: &[Duration]) -> Duration {
    let mut times = times.to_vec();
    times.sort_unstable();
    times.get((times.len() * 99).div_ceil(100).saturating_sub(1)).copied().unwrap_or_default()
}

/// Watches the server while `work` runs and for at least [`WATCHED`].
fn watch(address: SocketAddr, work: impl FnOnce()) -> Watched {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let client = scope.spawn(|| stream_until(address, &stop));
        let poller = scope.spawn(|| poll_until(address, &stop));
        let began = Instant::now();
        // A panic of the attack must not leave the watchers running.
        let worked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        std::thread::sleep(WATCHED.saturating_sub(began.elapsed()));
        stop.store(true, Ordering::SeqCst);
        let (gaps, refused) = client.join().unwrap();
        let health = poller.join().unwrap();
        if let Err(panic) = worked {
            std::panic::resume_unwind(panic);
        }
        Watched { gaps, health, refused }
    })
}

/// An ordinary client: one short stream after the other. Returns the times between its tokens, and refusals.
fn stream_until(address: SocketAddr, stop: &AtomicBool) -> (Vec<Duration>, Vec<u16>) {
    let body = json!({"prompt": "Once upon a time", "max_tokens": 100, "ignore_eos": true, "stream": true});
    let (mut gaps, mut refused) = (vec![], vec![]);
    while !stop.load(Ordering::SeqCst) {
        let mut response = post(address, "/v1/completions", &body);
        if response.status != 200 {
            refused.push(response.status);
            continue;
        }
        let mut last = None;
        while response.chunk().is_some() {
            let now = Instant::now();
            if let Some(last) = last.replace(now) {
                gaps.push(now - last);
            }
        }
    }
    (gaps, refused)
}

/// Asks `/health` every 20 ms. Returns the times that it took.
fn poll_until(address: SocketAddr, stop: &AtomicBool) -> Vec<Duration> {
    let mut times = vec![];
    while !stop.load(Ordering::SeqCst) {
        let began = Instant::now();
        assert_eq!(get(address, "/health").status, 200);
        times.push(began.elapsed());
        std::thread::sleep(Duration::from_millis(20));
    }
    times
}

/// A gauge or counter of `/metrics`, summed over its labels.
pub fn metric(address: SocketAddr, name: &str) -> f64 {
    let text = get(address, "/metrics").text();
    let samples = text.lines().filter(|line| line.starts_with(name) && line.as_bytes().get(name.len()) == Some(&b'{'));
    samples.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
}

fn is_idle(address: SocketAddr) -> bool {
    ["vllm:num_requests_running", "vllm:num_requests_waiting"].iter().all(|name| metric(address, name) == 0.0)
}

fn wait_idle(address: SocketAddr) {
    wait_until("the server is idle", || is_idle(address));
}

/// Sends a JSON text and returns the status and the body of the response.
pub fn post_text(address: SocketAddr, path: &str, json: &str) -> (u16, String) {
    let response = send(address, "POST", path, &[("Content-Type", "application/json")], json.as_bytes());
    (response.status, response.text())
}

/// Lets the process of `command` have 8 GB of address space, so that what would exhaust a machine ends it.
fn limit_address_space(command: &mut Command) {
    use rustix::process::{Resource, Rlimit, setrlimit};
    let limit = || {
        let limit = Rlimit { current: Some(ADDRESS_SPACE), maximum: Some(ADDRESS_SPACE) };
        setrlimit(Resource::As, limit).map_err(std::io::Error::from)
    };
    // SAFETY: the closure makes one system call and allocates nothing.
    unsafe { command.pre_exec(limit) };
}

/// Reads the log of the server all the time, for the report of a failure.
fn drain_log(server: &mut Process) -> Arc<Mutex<String>> {
    let log = Arc::new(Mutex::new(String::new()));
    let (mut reader, seen) = (std::mem::replace(&mut server.log, Box::new(std::io::empty())), log.clone());
    std::thread::spawn(move || {
        let mut line = String::new();
        while reader.read_line(&mut line).is_ok_and(|n| n > 0) {
            let mut seen = seen.lock().unwrap();
            // Only the end matters.
            if seen.len() > 64 << 10 {
                seen.clear();
            }
            seen.push_str(&std::mem::take(&mut line));
        }
    });
    log
}
