//! Trace files under adverse conditions: a size limit, and headers of clients that are not admins.

use crate::support::client::{get, post_with};
use crate::support::process::{Process, pegainfer};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

fn trace_dir(name: &str) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("pegainfer-traces-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    dir
}

/// Sends traced requests of 128 choices, with 400 KB of trace each.
fn send_traced(server: &Process, requests: usize) {
    let body = json!({"prompt": "x", "n": 128, "max_tokens": 1});
    for _ in 0..requests {
        assert_eq!(post_with(server.address, "/v1/completions", ("x-trace", "1"), &body).status, 200);
    }
}

/// Sizes of the files. Checks that each is a JSON list.
fn sizes(dir: &Path) -> Vec<usize> {
    let files = std::fs::read_dir(dir).unwrap().map(|entry| std::fs::read(entry.unwrap().path()).unwrap());
    files.map(|text| serde_json::from_slice::<Vec<Value>>(&text).map(|_| text.len()).unwrap()).collect()
}

/// Stops the server, which writes the last traces, with exit code 0.
fn stop(mut server: Process) {
    server.signal("-TERM");
    assert_eq!(server.child.wait().unwrap().code(), Some(0));
}

#[test]
fn trace_files_stay_below_their_limit() {
    let dir = trace_dir("limit");
    let flags = ["--admin-local", "--trace-sampling-ratio", "0", "--trace-max-bytes", "2M", "--trace-dir"];
    let server = Process::start(pegainfer().args(flags).arg(&dir));
    send_traced(&server, 12);
    stop(server);
    let total: usize = sizes(&dir).iter().sum();
    assert!((1 << 20..=2 << 20).contains(&total), "{:?}", sizes(&dir));
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn a_file_that_cannot_grow_stays_valid_and_the_server_goes_on() {
    let dir = trace_dir("ulimit");
    // This limit of the file size truncates writes like a full file system.
    let binary = pegainfer().get_program().to_os_string();
    let mut command = Command::new("bash");
    command.args(["-c", "ulimit -f 600; exec \"$@\"", "bash"]).arg(binary);
    // The bundled model would be written to a larger file.
    command.arg("--model-path").arg(crate::support::model_dir());
    command.args(["--admin-local", "--trace-sampling-ratio", "0", "--trace-dir"]).arg(&dir);
    let server = Process::start(&mut command);
    send_traced(&server, 4);
    assert_eq!(get(server.address, "/health").status, 200);
    stop(server);
    let sizes = sizes(&dir);
    assert!(sizes.len() == 1 && sizes[0] > 300_000 && sizes[0] <= 600 << 10, "{sizes:?}");
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn only_admins_decide_what_is_traced() {
    let dir = trace_dir("rights");
    let flags = ["--trace-sampling-ratio", "0", "--api-key", "k", "--admin-key", "a", "--trace-dir"];
    let server = Process::start(pegainfer().args(flags).arg(&dir));
    let body = json!({"prompt": "x", "max_tokens": 1}).to_string();
    let trace = |key: &str| {
        let headers = [("Content-Type", "application/json"), ("x-api-key", key), ("x-trace", "1")];
        let response =
            crate::support::client::send(server.address, "POST", "/v1/completions", &headers, body.as_bytes());
        (response.status, response.header("x-trace-id").is_some())
    };
    assert_eq!((trace("k"), trace("a")), ((200, false), (200, true)));
    stop(server);
    std::fs::remove_dir_all(dir).unwrap();
}
