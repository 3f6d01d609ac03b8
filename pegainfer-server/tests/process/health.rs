//! `pegainfer health` and `pegainfer doctor`.

use crate::support::client::post_unread;
use crate::support::process::{Process, pegainfer, run};
use crate::support::temp_dir::TempDir;
use crate::support::{hub::Hub, wait_until};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Stdio;

fn health(pid: u32) -> (Option<i32>, String, String) {
    run(pegainfer().args(["health", "--pid", &pid.to_string()]))
}

#[test]
fn the_health_check_finds_the_server_with_any_port_and_tls() {
    let mut plain = Process::start_with_log(Stdio::null(), pegainfer().args(["--threads", "1"]));
    let fixture = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tls").join(name);
    let mut tls = pegainfer();
    tls.args(["serve", "--host", "0.0.0.0", "--tls-cert"])
        .arg(fixture("cert.pem"))
        .arg("--tls-key")
        .arg(fixture("key.pem"));
    let tls = Process::start_with_log(Stdio::null(), &mut tls);
    for server in [&plain, &tls] {
        let (code, _, stderr) = health(server.child.id());
        assert_eq!((code, stderr.as_str()), (Some(0), ""));
    }
    // It drains as long as a request is open.
    let body = json!({"prompt": "x", "max_tokens": 4000, "ignore_eos": true, "stream": true});
    let open = post_unread(plain.address, "/v1/completions", &body);
    std::thread::sleep(std::time::Duration::from_millis(200));
    plain.signal("-TERM");
    wait_until("the server drains", || {
        let (code, _, stderr) = health(plain.child.id());
        code == Some(1) && stderr.contains("/health answers 503: draining")
    });
    drop(open);
    plain.child.wait().unwrap();
    let (code, _, stderr) = health(plain.child.id());
    assert!(code == Some(1) && stderr.contains("cannot be looked at"), "{stderr}");
    let (code, _, stderr) = health(std::process::id());
    assert!(code == Some(1) && stderr.contains("is not pegainfer"), "{stderr}");
}

#[test]
fn doctor_is_content_with_a_healthy_machine_without_a_gpu() {
    let home = TempDir::new("doctor");
    let hub = Hub::start(BTreeMap::new());
    let doctor = |endpoint: &str, args: &[&str]| {
        let mut command = pegainfer();
        command.arg("doctor").args(args).env("HF_HOME", &home.0).env("HF_ENDPOINT", endpoint);
        // A build with kernels finds no GPU either.
        command.env("CUDA_VISIBLE_DEVICES", "");
        run(&mut command)
    };
    let endpoint = format!("http://{}", hub.address);
    let (code, stdout, stderr) = doctor(&endpoint, &["--hub", "--port", "0"]);
    assert_eq!(code, Some(0), "{stdout}{stderr}");
    for line in
        ["build: pegainfer ", "CPU: ", "memory: ", "models: weights of up to ", "cache: ", "hub: ", "port: ", "GPU: "]
    {
        assert!(stdout.lines().any(|found| found.starts_with(line)), "{line} is missing: {stdout}");
    }
    let cache = format!("cache: {}, 0 models, ", home.0.join("hub").display());
    assert!(stdout.contains(&cache) && stdout.contains(&format!("hub: {endpoint} answers in ")), "{stdout}");
    assert!(stdout.ends_with("ok\n"), "{stdout}");
    let asked = hub.seen().len();
    let (code, stdout, _) = doctor(&endpoint, &[]);
    assert_eq!((code, hub.seen().len()), (Some(0), asked), "the hub is asked only by --hub");
    assert!(stdout.contains("was not asked (--hub asks it)"), "{stdout}");
    let (code, stdout, stderr) = doctor("http://127.0.0.1:1", &["--hub"]);
    assert_eq!((code, stderr.as_str()), (Some(1), "error: the report names 1 problem\n"));
    assert!(stdout.contains("hub: PROBLEM: http://127.0.0.1:1 cannot be reached: "), "{stdout}");
    let (code, _, stderr) = doctor(&endpoint, &["--gpu", "0"]);
    assert!(code == Some(1) && stderr.starts_with("error: no op was checked: "), "{stderr}");
}
