//! Logs that cannot be written: the server serves and stops as usual, and counts the lost lines.

use crate::support::client::{get, post, post_ok};
use crate::support::model_dir;
use crate::support::process::{Process, pegainfer};
use crate::support::temp_dir::TempDir;
use crate::support::wait_until;
use serde_json::{Value, json};
use std::fs::OpenOptions;
use std::io::Read;
use std::net::SocketAddr;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Serves `n` requests on a few connections at a time, with a log line for each.
fn complete(address: SocketAddr, n: usize) {
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..n / 8 {
                    post_ok(address, "/v1/completions", &json!({"prompt": "x", "max_tokens": 1}));
                }
            });
        }
    });
}

fn dropped_lines(address: SocketAddr) -> u64 {
    let metrics = get(address, "/metrics").text();
    let line = metrics.lines().find(|line| line.starts_with("pegainfer:log_lines_dropped_total{")).unwrap();
    line.rsplit(' ').next().unwrap().parse::<f64>().unwrap() as u64
}

/// Stops the server with SIGTERM, which has to take effect within seconds.
fn stop(server: &mut Process) -> Option<i32> {
    server.signal("-TERM");
    let started = Instant::now();
    let code = server.child.wait().unwrap().code();
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    code
}

#[test]
fn a_full_pipe_that_nobody_reads_stops_nothing() {
    let mut server = Process::start(&mut pegainfer());
    // A pipe holds 64 KiB, which is the log of about 350 requests.
    complete(server.address, 1000);
    assert_eq!(get(server.address, "/health").status, 200);
    assert_eq!(stop(&mut server), Some(0));
    let mut log = String::new();
    server.log.read_to_string(&mut log).unwrap();
    assert!(log.lines().count() > 100, "what the pipe could hold was written");
}

#[test]
fn a_closed_or_full_log_stops_nothing() {
    for full_disk in [false, true] {
        let sink: Stdio = if full_disk {
            OpenOptions::new().write(true).open("/dev/full").unwrap().into()
        } else {
            let (reader, writer) = std::io::pipe().unwrap();
            drop(reader);
            writer.into()
        };
        let mut server = Process::start_with_log(sink, &mut pegainfer());
        complete(server.address, 40);
        assert_eq!(get(server.address, "/health").status, 200);
        wait_until("each line is counted", || dropped_lines(server.address) >= 40);
        assert_eq!(stop(&mut server), Some(0));
    }
}

#[test]
fn each_request_is_one_line() {
    let mut server =
        Process::start(pegainfer().args(["--log-format", "json", "--log-level", "pegainfer_server=debug"]));
    let body = json!({"prompt": "Once", "max_tokens": 5, "ignore_eos": true, "n": 3});
    post_ok(server.address, "/v1/completions", &body);
    let messages = json!([{"role": "user", "content": "hi"}]);
    let stream = json!({"messages": messages, "max_tokens": 4, "ignore_eos": true, "stream": true});
    post(server.address, "/v1/chat/completions", &stream).text();
    assert_eq!(post(server.address, "/v1/completions", &json!({"prompt": 5})).status, 400);
    assert_eq!(get(server.address, "/nothing").status, 404);
    assert_eq!(stop(&mut server), Some(0));
    let mut log = String::new();
    server.log.read_to_string(&mut log).unwrap();
    let lines: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let requests: Vec<&Value> =
        lines.iter().map(|line| &line["kvs"]).filter(|kvs| kvs["request_id"].is_string()).collect();
    let of = |path: &str, status: u64| -> Vec<&Value> {
        requests.iter().filter(|kvs| kvs["path"] == path && kvs["status"] == status).copied().collect()
    };
    let [one] = of("/v1/completions", 200)[..] else { panic!("{requests:?}") };
    assert_eq!(
        (&one["choices"], &one["generated_tokens"], &one["finish_reason"]),
        (&json!(3), &json!(15), &json!("length"))
    );
    assert_eq!((&one["method"], &one["prompt_tokens"]), (&json!("POST"), &json!(1)), "choices share their prompt");
    for time in ["queued_ms", "first_token_ms", "per_token_ms", "total_ms"] {
        assert!(one[time].as_f64().unwrap() >= 0.0, "{time}: {one}");
    }
    let [streamed] = of("/v1/chat/completions", 200)[..] else { panic!("{requests:?}") };
    assert_eq!(streamed["generated_tokens"], 4);
    assert_eq!((of("/v1/completions", 400).len(), of("unmatched", 404).len()), (1, 1));
    assert!(!log.contains("/nothing"), "the log has the route, not the client's text");
}

/// Anyone may name a directory, and so the model in it.
#[test]
#[cfg(unix)]
fn the_name_of_a_model_is_harmless_in_the_log_and_in_the_metrics() {
    let dir = TempDir::new("hostile-name");
    let model = dir.0.join("m\n2026-11-28 00:00:00.000  INFO forged\x1b]0;PWN\x07\u{9b}\u{202e}");
    std::fs::create_dir(&model).unwrap();
    for entry in std::fs::read_dir(model_dir()).unwrap() {
        let entry = entry.unwrap();
        std::os::unix::fs::symlink(entry.path().canonicalize().unwrap(), model.join(entry.file_name())).unwrap();
    }
    let is_hostile = |c: char| c != '\n' && (c.is_control() || c == '\u{202e}');
    for format in ["text", "json"] {
        let log = dir.0.join(format);
        let sink = std::fs::File::create(&log).unwrap();
        let mut server = Process::start_with_log(
            sink.into(),
            pegainfer().args(["--threads", "1", "--log-format", format, "--model-path"]).arg(&model),
        );
        let metrics = get(server.address, "/metrics").text();
        assert!(!metrics.contains(is_hostile) && metrics.contains("forged"), "{metrics}");
        let models = get(server.address, "/v1/models").json();
        assert!(!models["data"][0]["id"].as_str().unwrap().contains(char::is_control), "{models}");
        assert_eq!(stop(&mut server), Some(0));
        let log = std::fs::read_to_string(&log).unwrap();
        assert!(log.contains("forged") && !log.contains(is_hostile), "{log:?}");
        for line in log.lines() {
            assert!(!line.starts_with("2026-11-28 00:00:00.000"), "{log}");
            assert!(format == "text" || serde_json::from_str::<Value>(line).is_ok(), "{line}");
        }
    }
}
