//! A server whose last engine is lost is started again by Kubernetes and by systemd. The tests play both, with the settings
//! of the files in tools/deploy.

use crate::support::client::{get, post_ok, read_head, write};
use crate::support::process::pegainfer;
use crate::support::temp_dir::TempDir;
use crate::support::wait_until;
use serde_json::json;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixDatagram;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Maximum time from the loss of the engine to a server that is ready again.
const MAX_OUTAGE: Duration = Duration::from_secs(30);
/// Pause of a kubelet before it starts a container again, which it also leaves out the first time.
const BACK_OFF: Duration = Duration::from_secs(10);

/// The engine is lost after some steps.
const LOST_AFTER: [&str; 2] = ["--lose-engine", "0:10"];
/// The engine does not end the step after these, and is noticed soon.
const STUCK_AFTER: [&str; 4] = ["--lose-engine", "0:10:stuck", "--step-deadline", "1"];

fn deploy_file(name: &str) -> String {
    std::fs::read_to_string(format!("{}/../tools/deploy/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

/// The server on this port.
fn server(port: u16) -> Command {
    let mut command = pegainfer();
    command.args(["serve", "--device", "cpu", "--threads", "1", "--port", &port.to_string()]).stderr(Stdio::null());
    command
}

fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// Sends a request that outlives the engine.
fn lose_engine(address: SocketAddr) {
    let body = json!({"prompt": "x", "max_tokens": 100, "ignore_eos": true, "stream": true}).to_string();
    let headers = [("Content-Type", "application/json")];
    let stream = read_head(write(address, "POST", "/v1/completions", &headers, body.as_bytes())).text();
    assert!(stream.contains("its device is lost"), "{stream}");
}

/// Ends the process with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A probe of the manifest.
struct Probe {
    path: String,
    period: Duration,
    failures: u32,
    /// Time between SIGTERM and SIGKILL, if the probe names one.
    grace: Option<Duration>,
}

impl Probe {
    /// The probe `name` of tools/deploy/kubernetes.yaml.
    fn read(name: &str) -> Self {
        let manifest = deploy_file("kubernetes.yaml");
        let (_, probe) = manifest.split_once(&format!("{name}:\n")).unwrap();
        let own: Vec<&str> = probe.lines().take_while(|line| line.starts_with("            ")).collect();
        let own = own.join("\n");
        let value = |key: &str| {
            let (_, rest) = own.split_once(&format!("{key}: "))?;
            Some(rest.split([',', '\n']).next().unwrap().to_owned())
        };
        let seconds = |key: &str| Some(Duration::from_secs(value(key)?.parse().unwrap()));
        Self {
            path: value("path").unwrap(),
            period: seconds("periodSeconds").unwrap(),
            failures: value("failureThreshold").unwrap().parse().unwrap(),
            grace: seconds("terminationGracePeriodSeconds"),
        }
    }

    fn succeeds(&self, address: SocketAddr) -> bool {
        TcpStream::connect(address).is_ok() && get(address, &self.path).status == 200
    }
}

/// The part of a kubelet that watches one container.
struct Kubelet {
    address: SocketAddr,
    container: Running,
    startup: Probe,
    readiness: Probe,
    liveness: Probe,
}

impl Kubelet {
    fn start(address: SocketAddr, command: &mut Command) -> Self {
        let container = Running(command.spawn().unwrap());
        let [startup, readiness, liveness] = ["startupProbe", "readinessProbe", "livenessProbe"].map(Probe::read);
        let kubelet = Self { address, container, startup, readiness, liveness };
        kubelet.wait_for(&kubelet.startup);
        kubelet.wait_for(&kubelet.readiness);
        kubelet
    }

    /// Probes until one succeeds.
    fn wait_for(&self, probe: &Probe) {
        for _ in 0..probe.failures {
            if probe.succeeds(self.address) {
                return;
            }
            std::thread::sleep(probe.period);
        }
        panic!("{} did not succeed within {} probes", probe.path, probe.failures);
    }

    /// Waits until the container has exited, or the liveness probe has failed too often; then it is to be restarted.
    fn wait_for_failure(&mut self) -> String {
        let (mut failed, mut probed) = (0, Instant::now());
        loop {
            if let Some(status) = self.container.0.try_wait().unwrap() {
                return format!("exited with {status}");
            }
            if probed.elapsed() >= self.liveness.period {
                failed = if self.liveness.succeeds(self.address) { 0 } else { failed + 1 };
                probed = Instant::now();
            }
            if failed == self.liveness.failures {
                return "not live".to_owned();
            }
            // A kubelet is told of an exit by the container runtime.
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Stops the container as after a failed liveness probe: `preStop`, SIGTERM, and SIGKILL at the end of the grace period.
    fn stop(&mut self) {
        let manifest = deploy_file("kubernetes.yaml");
        let (_, pause) = manifest.split_once("preStop: {sleep: {seconds: ").unwrap();
        let pause = Duration::from_secs(pause.split('}').next().unwrap().parse().unwrap());
        let killed_at = Instant::now() + self.liveness.grace.unwrap();
        std::thread::sleep(pause);
        signal(&self.container.0, "-TERM");
        while self.container.0.try_wait().unwrap().is_none() && Instant::now() < killed_at {
            std::thread::sleep(Duration::from_millis(100));
        }
        self.container.0.kill().unwrap();
        self.container.0.wait().unwrap();
    }
}

fn signal(child: &Child, signal: &str) {
    assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
}

/// Sends a request whose step never ends, and leaves it open.
fn hang_engine(address: SocketAddr) -> TcpStream {
    let body = json!({"prompt": "x", "max_tokens": 100, "ignore_eos": true, "stream": true}).to_string();
    let open = write(address, "POST", "/v1/completions", &[("Content-Type", "application/json")], body.as_bytes());
    wait_until("health reports the engine", || get(address, "/health").status == 503);
    assert_eq!(get(address, "/health").text(), "the engine makes no progress");
    open
}

#[test]
fn kubernetes_restarts_a_server_whose_engine_hangs() {
    let address = free_address();
    let mut kubelet = Kubelet::start(address, server(address.port()).args(STUCK_AFTER));
    let _open = hang_engine(address);
    let noticed = Instant::now();
    assert!(!kubelet.readiness.succeeds(address));
    assert_eq!(kubelet.wait_for_failure(), "not live");
    kubelet.stop();
    let kubelet = Kubelet::start(address, &mut server(address.port()));
    // The first restart has no pause.
    assert!(noticed.elapsed() < MAX_OUTAGE, "{:?}", noticed.elapsed());
    post_ok(kubelet.address, "/v1/completions", &json!({"prompt": "x", "max_tokens": 2}));
}

#[test]
fn kubernetes_restarts_a_server_that_lost_its_engine() {
    let address = free_address();
    let mut kubelet = Kubelet::start(address, server(address.port()).args(LOST_AFTER));
    assert!(kubelet.readiness.succeeds(address) && kubelet.liveness.succeeds(address));
    lose_engine(address);
    let lost = Instant::now();
    assert_eq!(kubelet.wait_for_failure(), "exited with exit status: 1");
    let kubelet = Kubelet::start(address, &mut server(address.port()));
    let outage = lost.elapsed() + BACK_OFF;
    assert!(outage < MAX_OUTAGE, "{outage:?}");
    post_ok(kubelet.address, "/v1/completions", &json!({"prompt": "x", "max_tokens": 2}));
}

#[test]
fn the_watchdog_of_systemd_ends_a_server_whose_engine_hangs() {
    let unit = deploy_file("pegainfer.service");
    let setting = |name: &str| unit.lines().find_map(|line| line.strip_prefix(name)).unwrap().to_owned();
    let watchdog = Duration::from_secs(setting("WatchdogSec=").parse().unwrap());
    // The test waits a tenth of the unit's time.
    let interval = watchdog / 10;
    let dir = TempDir::new("watchdog");
    let path = dir.0.join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(interval)).unwrap();
    let message = || {
        let mut bytes = [0; 256];
        let length = socket.recv(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes[..length]).trim().to_owned())
    };
    let address = free_address();
    let mut command = server(address.port());
    command.args(STUCK_AFTER).env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", interval.as_micros().to_string());
    let mut running = Running(command.spawn().unwrap());
    wait_until("the server is ready", || message().as_deref() == Some("READY=1"));
    assert_eq!(message().as_deref(), Some("WATCHDOG=1"));
    let _open = hang_engine(address);
    // Those before the engine was noticed.
    while message().is_some() {}
    let silent = Instant::now();
    // systemd sends SIGABRT, at the latest so long after the last message, and starts the unit again.
    signal(&running.0, "-ABRT");
    assert!(running.0.wait().unwrap().code().is_none(), "ended by the signal");
    assert!(silent.elapsed() < Duration::from_secs(5), "{:?}", silent.elapsed());
    let pause = Duration::from_secs(setting("RestartSec=").parse().unwrap());
    assert!(watchdog + pause < MAX_OUTAGE, "{watchdog:?} of the unit and {pause:?}");
}

#[test]
fn systemd_restarts_a_server_that_lost_its_engine() {
    let unit = deploy_file("pegainfer.service");
    let setting = |name: &str| unit.lines().find_map(|line| line.strip_prefix(name)).unwrap().to_owned();
    assert_eq!((setting("Type="), setting("Restart=")), ("notify".to_owned(), "on-failure".to_owned()));
    let pause = Duration::from_secs(setting("RestartSec=").parse().unwrap());
    let dir = TempDir::new("systemd");
    let path = dir.0.join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let message = || {
        let mut bytes = [0; 256];
        let length = socket.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..length]).trim().to_owned()
    };
    let address = free_address();
    let start = |flags: &[&str]| {
        let mut command = server(address.port());
        let running = Running(command.args(flags).env("NOTIFY_SOCKET", &path).spawn().unwrap());
        assert_eq!(message(), "READY=1");
        running
    };
    let mut unit = start(&LOST_AFTER);
    lose_engine(address);
    let lost = Instant::now();
    assert_eq!(message(), "STOPPING=1");
    // on-failure: any exit code but 0.
    assert_eq!(unit.0.wait().unwrap().code(), Some(1));
    std::thread::sleep(pause);
    let _again = start(&[]);
    let outage = lost.elapsed();
    assert!(outage < MAX_OUTAGE, "{outage:?}");
    post_ok(address, "/v1/completions", &json!({"prompt": "x", "max_tokens": 2}));
}
