//! The built binary as a child process.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// The binary, untouched by the environment's hub settings.
pub fn pegainfer() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pegainfer"));
    command.env_remove("HF_TOKEN").env_remove("HF_ENDPOINT").env_remove("HF_HOME");
    command
}

/// Runs to the end, which must come within a minute: exit code, standard output, standard error.
pub fn run(command: &mut Command) -> (Option<i32>, String, String) {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let id = child.id().to_string();
    let (done, waiting) = channel::<()>();
    let watchdog = std::thread::spawn(move || {
        if waiting.recv_timeout(Duration::from_secs(60)) == Err(RecvTimeoutError::Timeout) {
            let _ = Command::new("kill").args(["-KILL", &id]).status();
        }
    });
    let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
    drop(done);
    watchdog.join().unwrap();
    (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

/// A server that runs until the end of the test.
pub struct Process {
    pub child: Child,
    pub address: SocketAddr,
    /// Time from the start of the process to the log line that it is ready.
    pub ready: Duration,
    /// The rest of its log.
    pub log: BufReader<ChildStderr>,
}

impl Process {
    /// Starts `command` on a free port and waits until it is ready.
    pub fn start(command: &mut Command) -> Self {
        Self::start_on(0, command)
    }

    /// Starts `command` on this port and waits until it is ready.
    pub fn start_on(port: u16, command: &mut Command) -> Self {
        let started = Instant::now();
        let mut child = command.args(["--port", &port.to_string()]).stderr(Stdio::piped()).spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut seen = String::new();
        while log.read_line(&mut seen).unwrap() > 0 {
            if let Some((_, rest)) = seen.split_once("on http://") {
                let address = rest.split(',').next().unwrap().parse().unwrap();
                return Self { child, address, ready: started.elapsed(), log };
            }
        }
        panic!("the server ended with {:?}: {seen}", child.wait());
    }

    /// Sends a signal, as in `-TERM`.
    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").args([name, &self.child.id().to_string()]).status().unwrap();
        assert!(status.success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
