//! Cost of a start: time to ready, and resident memory in addition to weights and KV.

use crate::support::alone;
use crate::support::client::post_ok;
use crate::support::process::{Process, pegainfer};
use serde_json::json;
use std::time::Duration;

const MIB: u64 = 1 << 20;
/// KV pool of the server under test.
const KV: u64 = 32 * MIB;
/// Tensor bytes of models/qwen3-tiny.
const WEIGHTS: u64 = 18_852_992;

fn start() -> Process {
    Process::start(pegainfer().args(["--kv-cache-memory", &KV.to_string(), "--log-level", "info"]))
}

fn resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

#[test]
fn ready_in_a_third_of_a_second() {
    let _alone = alone();
    // Other processes also use the cores, so the best of a few starts counts.
    let best = (0..5).map(|_| start().ready).min().unwrap();
    println!("ready after {:.0} ms", best.as_secs_f64() * 1e3);
    assert!(best < Duration::from_millis(300), "ready after {best:?}");
}

#[test]
fn memory_is_weights_and_kv_and_little_else() {
    let _alone = alone();
    let server = start();
    let fresh = resident(server.child.id());
    let prompts: Vec<String> =
        (0..64).map(|i| format!("Story number {i}: {}", "once upon a time ".repeat(40))).collect();
    let body = json!({"prompt": prompts, "max_tokens": 8, "logprobs": 5, "ignore_eos": true});
    let response = post_ok(server.address, "/v1/completions", &body);
    assert_eq!(response["usage"]["completion_tokens"], 64 * 8);
    let used = resident(server.child.id());
    println!("resident: {} MiB after the start, {} MiB after 64 requests", fresh / MIB, used / MIB);
    assert!(used < WEIGHTS + KV + 150 * MIB, "{} MiB are resident", used / MIB);
}
