//! A server under attack: a child process with limited address space, watched from outside.
//!
//! [`AttackedServer::start`] measures the server next to ordinary load: a streaming client, long prompts, and a poller of
//! `/health`. [`AttackedServer::attack`] runs an attack in place of the prompts, then checks these conditions:
//!
//! - The ordinary client is served: every request gets 200. The 99th percentile of its inter-token latency (ITL) stays
//!   below one and a half times the ordinary value, or below 50 ms; that of its time to first token (TTFT) below three times the
//!   ordinary value, or a second.
//! - `/health` answers in 100 ms (99th percentile; three times the ordinary value on a busy machine).
//! - Resident memory stays below weights + KV + 1 GB, and no request ends the process.
//! - Five seconds after the attack, memory, open files, threads and the engine's gauges are back at their old values,
//!   and less than half of a core is busy.
//!
//! The times apply to an idle machine. If other processes take part of the CPU time, the bounds are larger by that
//! part.

use super::client::{get, post_with, send};
use super::process::{Process, pegainfer};
use super::usage::{CpuTime, Usage, busy, reset_peak, status};
use super::watch::{Figures, watch};
use super::{alone, wait_until};
use rustix::process::{Resource, Rlimit, setrlimit};
use serde_json::json;
use std::io::BufRead;
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// Address space of the server.
const ADDRESS_SPACE: u64 = 8 << 30;
/// KV pool of the server, in bytes: enough for 20 choices of 500 tokens next to an ordinary client.
const KV: u64 = 96 * MIB;
/// Tensor bytes of the bundled checkpoint.
const WEIGHTS: u64 = 18_852_992;
/// Resident memory that the server may use in addition to weights and KV cache.
const WORKING_MEMORY: u64 = 1 << 30;
/// Resident memory that may stay after an attack: caches of the tokenizer, and memory that the allocator keeps.
const KEPT: u64 = 256 * MIB;
/// Time after which no trace of an attack may be left.
const AFTERMATH: Duration = Duration::from_secs(5);
/// Fraction of a core that may be busy after an attack.
const BUSY: f64 = 0.5;
/// API key of the ordinary client, for servers with keys.
pub const KEY: &str = "ordinary";
/// Number of runs of an attack, in one of which the times must hold.
const RUNS: usize = 4;

/// A server that can be attacked.
pub struct AttackedServer {
    server: Process,
    /// Times next to ordinary load.
    ordinary: Figures,
    /// Resources of the idle server.
    before: Usage,
    log: Arc<Mutex<String>>,
    _alone: MutexGuard<'static, ()>,
}

impl AttackedServer {
    /// Starts a server with these flags.
    pub fn start(args: &[&str]) -> Self {
        Self::start_with(args, |_| {})
    }

    /// Like [`start`](Self::start), with other changes to the command.
    pub fn start_with(args: &[&str], change: impl FnOnce(&mut Command)) -> Self {
        let alone = alone();
        let mut command = pegainfer();
        command.args(["--kv-cache-memory", &KV.to_string()]).args(args);
        limit(&mut command, Resource::As, ADDRESS_SPACE);
        change(&mut command);
        let mut server = Process::start(&mut command);
        let log = drain_log(&mut server);
        // The first requests touch pages and build tables that are kept.
        use_kv_cache(server.address);
        let ordinary = ordinary_figures(server.address);
        wait_idle(server.address);
        let before = Usage::read(server.child.id());
        Self { server, ordinary, before, log, _alone: alone }
    }

    /// Address of the server.
    pub fn address(&self) -> SocketAddr {
        self.server.address
    }

    /// Process id of the server.
    pub fn pid(&self) -> u32 {
        self.server.child.id()
    }

    /// Runs `attack`, which returns when its last connection is closed, and checks all conditions. Other tests also use
    /// the cores, so times have to hold in one of a few runs, everything else in all.
    pub fn attack<R>(&mut self, name: &str, attack: impl Fn(SocketAddr) -> R) -> R {
        for run in 1.. {
            let (result, late) = self.attack_once(name, &attack);
            match late {
                None => return result,
                Some(late) => assert!(run < RUNS, "{name}: {late}"),
            }
            // Other processes may have begun since the start.
            self.ordinary = ordinary_figures(self.address());
        }
        unreachable!("the last run returns or panics")
    }

    /// One run, and the time that exceeded its bound.
    fn attack_once<R>(&mut self, name: &str, attack: impl Fn(SocketAddr) -> R) -> (R, Option<String>) {
        let (address, ordinary) = (self.address(), self.ordinary);
        reset_peak(self.pid());
        let mut result = None;
        let cpu = CpuTime::now(self.pid());
        let watched = watch(address, KEY, || result = Some(attack(address)));
        let slowdown = cpu.slowdown(self.pid());
        let over = Instant::now();
        self.check_alive(name);
        let peak = status(self.pid(), "VmHWM:") / MIB;
        let max_mib = (WEIGHTS + KV + WORKING_MEMORY) / MIB;
        println!("{name}: ordinary {ordinary:?}, attacked {:?}, {peak} MiB resident at most", watched.figures());
        assert!(peak < max_mib, "{name}: {peak} MiB were resident, at most {max_mib} are documented");
        assert!(watched.refused.is_empty(), "{name}: the ordinary client got {:?}", watched.refused);
        self.check_aftermath(name, over);
        (result.unwrap(), watched.late(ordinary, slowdown))
    }

    fn check_alive(&mut self, name: &str) {
        if let Some(status) = self.server.child.try_wait().unwrap() {
            panic!("{name}: the server ended with {status}: {}", self.log.lock().unwrap());
        }
    }

    fn check_aftermath(&mut self, name: &str, over: Instant) {
        let (pid, before) = (self.pid(), self.before);
        loop {
            let now = Usage::read(pid);
            let busy = busy(pid);
            if is_restored(now, before) && busy < BUSY && is_idle(self.address()) {
                break;
            }
            let waited = over.elapsed();
            assert!(
                waited < AFTERMATH,
                "{name}: {waited:?} after the attack {now:?} is left, it began with {before:?}, and {busy} of a core is busy"
            );
        }
        assert_eq!(get(self.address(), "/health").status, 200, "{name}");
    }
}

/// True if a process has nothing left that `before` did not have, except [`KEPT`] memory. Idle threads of the blocking
/// pool end after ten seconds.
fn is_restored(now: Usage, before: Usage) -> bool {
    now.resident < before.resident + KEPT && now.files <= before.files + 4 && now.threads <= before.threads + 16
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

/// Limits a resource of the process of `command`, such as its address space, so that an attack ends the process instead
/// of exhausting the machine.
pub fn limit(command: &mut Command, resource: Resource, max: u64) {
    let limit = move || {
        let limit = Rlimit { current: Some(max), maximum: Some(max) };
        setrlimit(resource, limit).map_err(std::io::Error::from)
    };
    // SAFETY: the closure makes one system call and allocates nothing.
    unsafe { command.pre_exec(limit) };
}

/// Runs `work` on `n` threads at once and returns the results in order.
pub fn together<R: Send>(n: usize, work: impl Fn(usize) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = (0..n).map(|i| scope.spawn(move || work(i))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Continuously reads the server's log, for the report of a failure.
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

/// Times next to prompts whose chunks are computed together with the client's tokens. All prompts differ, so that the
/// prefix cache has none of them.
fn ordinary_figures(address: SocketAddr) -> Figures {
    const PROMPTS: usize = 4;
    const TOKENS: usize = 2000;
    static FIRST: AtomicUsize = AtomicUsize::new(0);
    let authorization = format!("Bearer {KEY}");
    let prompts = || {
        for _ in 0..PROMPTS {
            let first = FIRST.fetch_add(1, Ordering::Relaxed);
            let prompt: Vec<usize> = (0..TOKENS).map(|at| 300 + (7 * first + at) % 1009).collect();
            let body = json!({"prompt": prompt, "max_tokens": 1});
            post_with(address, "/v1/completions", ("Authorization", &authorization), &body).text();
        }
    };
    watch(address, KEY, prompts).figures()
}

/// Fills the KV cache once with prompts that share no prefix. A virtual machine may get memory from its host only on
/// the first write, in 5 to 15 ms per 2 MiB, which is not a cost of the attack.
fn use_kv_cache(address: SocketAddr) {
    /// Tokens per prompt: few, because the time of attention grows with their square.
    const TOKENS: usize = 512;
    /// Capacity of the KV cache in tokens, at 6 KiB each.
    const CAPACITY: usize = (KV / (6 << 10)) as usize;
    let authorization = format!("Bearer {KEY}");
    for first in 0..CAPACITY.div_ceil(TOKENS) {
        let prompt: Vec<usize> = (0..TOKENS).map(|at| 100 + (first + at) % 100).collect();
        let body = json!({"prompt": prompt, "max_tokens": 1});
        post_with(address, "/v1/completions", ("Authorization", &authorization), &body).text();
    }
}
