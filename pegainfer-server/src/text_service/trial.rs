//! Compiles a grammar in a separate process first, which ends when it takes too much time or memory.
//!
//! llguidance checks its limits only between steps of very different length, and a thread cannot be ended from outside.
//! A process can: the server starts itself with a hidden command, which limits itself, compiles the grammar with the
//! 256 bytes as vocabulary, and reports. The same work is then known to end in the server's own process.

use super::priority::lower_priority;
use pegainfer_text::{GrammarError, compile_over_bytes};
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{ExitStatus, Output, Stdio};
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

/// Name of the hidden command.
pub const COMMAND: &str = "compile-grammar";
/// Address space of the process without the grammar: the program, stacks, the allocator's reserves.
#[cfg(unix)]
const PROGRAM: u64 = 256 << 20;
/// Wall-clock limit of the process, in multiples of its CPU time limit: on a busy machine it rarely runs.
const WALL_CLOCK: u32 = 10;
const MIB: u64 = 1 << 20;

/// Limits on compiling one grammar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GrammarLimits {
    /// Memory in bytes.
    pub memory: u64,
    /// CPU time, rounded up to seconds.
    pub time: Duration,
}

impl Default for GrammarLimits {
    fn default() -> Self {
        Self { memory: 256 << 20, time: Duration::from_secs(1) }
    }
}

impl GrammarLimits {
    fn seconds(self) -> u64 {
        self.time.as_secs_f64().ceil().max(1.0) as u64
    }

    /// Memory in MiB.
    pub(super) fn mebibytes(self) -> u32 {
        u32::try_from(self.memory.div_ceil(MIB)).unwrap_or(u32::MAX).max(1)
    }
}

/// Compiles grammars in separate processes, as a trial.
#[derive(Debug, Clone)]
pub struct GrammarTrial {
    /// The pegainfer program.
    pub program: PathBuf,
    /// Limits of the process.
    pub limits: GrammarLimits,
}

impl GrammarTrial {
    /// A trial that starts this program again.
    pub fn this_program(limits: GrammarLimits) -> std::io::Result<Self> {
        // The link leads to the running program even after an upgrade replaced its file.
        let program = if cfg!(target_os = "linux") { "/proc/self/exe".into() } else { std::env::current_exe()? };
        Ok(Self { program, limits })
    }

    /// Compiles the grammar in another process and returns its memory in MiB. Dropping the future ends the process.
    pub(super) async fn try_out(&self, lark: &str) -> Result<u32, GrammarError> {
        let busy = |e: std::io::Error| GrammarError::Busy(format!("no process can be started to compile it: {e}"));
        let [memory, seconds] = [self.limits.memory, self.limits.seconds()].map(|limit| limit.to_string());
        let mut child = Command::new(&self.program)
            .args([COMMAND, &memory, &seconds])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            // A backtrace would take longer than the work.
            .env("RUST_BACKTRACE", "0")
            .kill_on_drop(true)
            .spawn()
            .map_err(busy)?;
        let stdin = child.stdin.take();
        let work = async {
            if let Some(mut stdin) = stdin {
                // The exit status of a process that ended early says why.
                let _ = stdin.write_all(lark.as_bytes()).await;
            }
            child.wait_with_output().await
        };
        match tokio::time::timeout(self.limits.time * WALL_CLOCK, work).await {
            Ok(output) => self.outcome(&output.map_err(busy)?),
            Err(_) => Err(GrammarError::Busy("the machine is too busy to compile it".into())),
        }
    }

    fn outcome(&self, output: &Output) -> Result<u32, GrammarError> {
        let text = String::from_utf8_lossy(&output.stdout);
        match text.split_once(' ') {
            Some(("ok", mebibytes)) => Ok(mebibytes.trim().parse().unwrap_or(1)),
            Some(("error", error)) => Err(GrammarError::Invalid(error.trim_end().to_string())),
            Some(("busy", error)) => Err(GrammarError::Busy(error.trim_end().to_string())),
            _ => Err(match limit_of(output.status) {
                Some(Exceeded::Time) => GrammarError::Limit(format!(
                    "compiling it takes more than {} s of CPU time (--max-grammar-time)",
                    self.limits.seconds()
                )),
                Some(Exceeded::Memory) => GrammarError::Limit(format!(
                    "compiling it takes more than {} MiB of memory (--max-grammar-memory) or of stack",
                    self.limits.mebibytes()
                )),
                None => GrammarError::Busy(format!(
                    "the process that compiles it ended with {}; try again later",
                    output.status
                )),
            }),
        }
    }
}

/// A limit of the process.
enum Exceeded {
    Time,
    Memory,
}

/// The limit that ended a process. SIGXCPU comes from the limit of CPU time, and Rust aborts without memory or stack.
/// Other signals, such as SIGKILL on a machine without free memory, are not the grammar's fault.
#[cfg(unix)]
fn limit_of(status: ExitStatus) -> Option<Exceeded> {
    use rustix::process::Signal;
    use std::os::unix::process::ExitStatusExt;
    match Signal::from_named_raw(status.signal()?)? {
        Signal::XCPU => Some(Exceeded::Time),
        Signal::ABORT => Some(Exceeded::Memory),
        _ => None,
    }
}

#[cfg(not(unix))]
fn limit_of(_status: ExitStatus) -> Option<Exceeded> {
    None
}

/// The hidden command: compiles the grammar on standard input under these limits, and writes `ok MIB`, `error
/// SENTENCE`, or `busy SENTENCE` if the grammar is not at fault.
///
/// # Errors
/// The limits cannot be set, or the pipes are broken.
pub fn run(memory: u64, seconds: u64) -> std::io::Result<()> {
    limit_this_process(memory, seconds)?;
    lower_priority();
    let mut lark = String::new();
    std::io::stdin().read_to_string(&mut lark)?;
    let before = peak_memory();
    let compiled = compile_over_bytes(lark);
    let mebibytes = peak_memory().saturating_sub(before).div_ceil(MIB).max(1);
    let mut stdout = std::io::stdout();
    match compiled {
        Ok(()) => writeln!(stdout, "ok {mebibytes}"),
        Err(GrammarError::Busy(error)) => writeln!(stdout, "busy {error}"),
        Err(error) => writeln!(stdout, "error {error}"),
    }
}

#[cfg(unix)]
fn limit_this_process(memory: u64, seconds: u64) -> std::io::Result<()> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    crate::allocator::configure();
    // The soft limit of CPU time raises SIGXCPU, which tells the reason; the hard limit raises SIGKILL, which does not.
    let limits = [
        (Resource::As, memory + PROGRAM, memory + PROGRAM),
        (Resource::Cpu, seconds, seconds + 1),
        (Resource::Core, 0, 0),
    ];
    for (resource, soft, hard) in limits {
        let [current, maximum] =
            [soft, hard].map(|limit| Some(getrlimit(resource).maximum.map_or(limit, |maximum| limit.min(maximum))));
        setrlimit(resource, Rlimit { current, maximum })?;
    }
    Ok(())
}

#[cfg(not(unix))]
fn limit_this_process(_memory: u64, _seconds: u64) -> std::io::Result<()> {
    Ok(())
}

/// Peak of this process's resident memory in bytes; 0 on systems without `/proc`.
fn peak_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak =
        status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.split_whitespace().next()?.parse::<u64>().ok());
    peak.unwrap_or(0) * 1024
}
