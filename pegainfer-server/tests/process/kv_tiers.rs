//! `--kv-offloading-size`: prompts that the KV cache evicted come back from host memory.

use crate::support::client::{get, post_ok, post_with};
use crate::support::process::{Process, pegainfer, run};
use crate::support::temp_dir::TempDir;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Bytes of 40 blocks of 16 tokens of the bundled model.
const CACHE: &str = "3932160";

fn serve(flags: &[&str]) -> Process {
    let always = ["serve", "--device", "cpu", "--threads", "2", "--kv-cache-memory", CACHE];
    Process::start(pegainfer().args(always).args(flags))
}

fn prompt(seed: u32) -> Vec<u32> {
    (0..330).map(|i| (seed * 997 + i * i * 7) % 4000).collect()
}

/// Four prompts of 20 blocks each, whose answers are these texts and whose prompts had these cached tokens.
fn round(server: &Process) -> (Vec<String>, Vec<u64>) {
    let answer = |seed: u32| -> Value {
        let body = json!({"prompt": prompt(seed), "max_tokens": 8, "temperature": 0, "ignore_eos": true});
        post_ok(server.address, "/v1/completions", &body)
    };
    let answers: Vec<Value> = (1..5).map(answer).collect();
    let text = |answer: &Value| answer["choices"][0]["text"].as_str().unwrap().to_owned();
    let cached = |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
    (answers.iter().map(text).collect(), answers.iter().map(cached).collect())
}

/// A metric of a server; metrics need no key.
fn metric(server: &Process, name: &str) -> f64 {
    let text = get(server.address, "/metrics").text();
    let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name} in {text}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[test]
fn evicted_prompts_are_loaded_and_the_answers_are_the_same() {
    let (with, without) = (serve(&["--kv-offloading-size", "64M"]), serve(&[]));
    let (expected, _) = round(&without);
    assert_eq!(round(&without).1, [0; 4], "four prompts do not fit");
    assert!(!get(without.address, "/metrics").text().contains("kv_offload"));
    let (first, cached) = round(&with);
    assert_eq!((&first, cached), (&expected, vec![0; 4]));
    for _ in 0..2 {
        assert_eq!(round(&with), (expected.clone(), vec![320; 4]));
    }
    assert!(metric(&with, "vllm:external_prefix_cache_hits_total") >= 6.0 * 320.0);
    assert!(metric(&with, "vllm:kv_offload_load_bytes_total") >= 6.0 * 20.0 * 98304.0);
    assert!(metric(&with, "vllm:kv_offload_cpu_cache_usage_perc") > 0.1);
    assert_eq!(metric(&with, "pegainfer:kv_offload_corrupt_blocks_total"), 0.0);
    assert_eq!(metric(&with, "vllm:kv_cache_usage_perc"), 0.0, "nothing is held");
}

/// Sends a completion to a server that may be killed meanwhile.
fn ask(address: SocketAddr, body: &str) -> std::io::Result<usize> {
    let mut stream = TcpStream::connect(address)?;
    let length = body.len();
    let head =
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close";
    write!(stream, "{head}\r\nContent-Length: {length}\r\n\r\n{body}")?;
    stream.read_to_end(&mut Vec::new())
}

/// Whatever was being written when the process was killed, a later one never takes a wrong byte from the file.
#[test]
fn a_killed_server_leaves_whole_blocks() {
    let dir = TempDir::new("kv-disk");
    let file = format!("{}:64M", dir.0.join("kv").display());
    let flags = ["--kv-offloading-size", "32M", "--kv-disk", &file];
    let (expected, _) = round(&serve(&[]));
    for milliseconds in [0, 5, 20, 60, 150, 300, 500, 800] {
        let mut server = serve(&flags);
        let address = server.address;
        let load = std::thread::spawn(move || {
            // Ends when the server does.
            for seed in (1..5).cycle().take(100) {
                let body = json!({"prompt": prompt(seed), "max_tokens": 8, "temperature": 0}).to_string();
                if ask(address, &body).is_err() {
                    return;
                }
            }
        });
        std::thread::sleep(Duration::from_millis(milliseconds));
        // A slow machine has written something, too, before the last one.
        let until = Instant::now() + Duration::from_secs(30);
        while milliseconds == 800 && Instant::now() < until {
            if metric(&server, "pegainfer:kv_disk_written_bytes_total") > 0.0 {
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        server.child.kill().unwrap();
        server.child.wait().unwrap();
        load.join().unwrap();
    }
    let server = serve(&flags);
    let (answers, cached) = round(&server);
    assert_eq!(answers, expected);
    assert!(cached.iter().any(|tokens| *tokens > 0), "something was written: {cached:?}");
    assert!(metric(&server, "pegainfer:kv_disk_read_bytes_total") > 0.0);
    assert_eq!(metric(&server, "pegainfer:kv_offload_corrupt_blocks_total"), 0.0);
    // Another round is in the file as a whole.
    round(&server);
    drop(server);
    let server = serve(&flags);
    assert_eq!(round(&server), (expected, vec![320; 4]));
}

/// Prompts of an API key are found by the same key after a restart, and by no other.
#[test]
fn blocks_of_a_key_are_found_by_that_key_after_a_restart() {
    let dir = TempDir::new("kv-keys");
    let keys = dir.0.join("keys");
    std::fs::write(&keys, "first-key-000000\nsecond-key-00000\n").unwrap();
    let file = format!("{}:64M", dir.0.join("kv").display());
    let flags = ["--kv-offloading-size", "32M", "--kv-disk", &file, "--api-key-file", keys.to_str().unwrap()];
    let body = json!({"prompt": prompt(1), "max_tokens": 2, "temperature": 0, "ignore_eos": true});
    let cached = |server: &Process, key: &str| {
        let response = post_with(server.address, "/v1/completions", ("Authorization", &format!("Bearer {key}")), &body);
        assert_eq!(response.status, 200);
        response.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0)
    };
    let server = serve(&flags);
    assert_eq!(cached(&server, "first-key-000000"), 0);
    let written = || metric(&server, "pegainfer:kv_disk_written_bytes_total");
    for _ in 0..100 {
        if written() >= 20.0 * 98304.0 {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(server);
    let server = serve(&flags);
    assert_eq!(cached(&server, "second-key-00000"), 0, "another key");
    assert_eq!(cached(&server, "first-key-000000"), 320);
}

#[test]
fn a_tier_that_cannot_be_is_refused_in_one_sentence() {
    for (size, why) in [("1k", "hold no block"), ("900000", "are available"), ("x", "unknown unit")] {
        let (code, _, errors) = run(pegainfer().args(["serve", "--device", "cpu", "--kv-offloading-size", size]));
        assert!(code != Some(0) && errors.contains(why), "{size}: {errors}");
        assert!(errors.contains("--kv-offloading-size"), "{size}: {errors}");
    }
}
