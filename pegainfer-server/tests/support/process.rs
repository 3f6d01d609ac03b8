//! The built binary as a child process.

use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// The binary, untouched by the environment's hub settings and keys.
pub fn pegainfer() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pegainfer"));
    command.env_remove("HF_TOKEN").env_remove("HF_ENDPOINT").env_remove("HF_HOME");
    command.env_remove("HF_HUB_CACHE").env_remove("HF_TOKEN_PATH").env_remove("SSL_CERT_FILE");
    command.env_remove("PEGAINFER_API_KEY").env_remove("PEGAINFER_ADMIN_KEY");
    command
}

/// Runs to the end, at most a minute. Returns exit code, standard output and standard error.
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
    /// Time from the start of the process to its ready log line.
    pub ready: Duration,
    /// The rest of its log; empty if the test redirects it.
    pub log: Box<dyn BufRead + Send>,
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
                return Self { child, address, ready: started.elapsed(), log: Box::new(log) };
            }
        }
        panic!("the server ended with {:?}: {seen}", child.wait());
    }

    /// Starts `command` on a free port with its log going to `sink`, and waits until it accepts connections.
    pub fn start_with_log(sink: Stdio, command: &mut Command) -> Self {
        let started = Instant::now();
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let mut child = command.args(["--port", &address.port().to_string()]).stderr(sink).spawn().unwrap();
        while TcpStream::connect(address).is_err() {
            assert!(
                started.elapsed() < Duration::from_secs(30) && child.try_wait().unwrap().is_none(),
                "it does not listen"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        Self { child, address, ready: started.elapsed(), log: Box::new(std::io::empty()) }
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
