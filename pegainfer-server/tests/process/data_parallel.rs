//! `--data-parallel-size`: several engines in one process.

use crate::support::client::{get, post_ok, post_with, read_head, write};
use crate::support::process::{Process, pegainfer, run};
use crate::support::temp_dir::TempDir;
use serde_json::{Value, json};
use std::collections::BTreeMap;

const COMPLETIONS: &str = "/v1/completions";
const RANK: &str = "X-data-parallel-rank";

fn serve(flags: &[&str]) -> Process {
    Process::start(pegainfer().args(["serve", "--device", "cpu", "--threads", "2"]).args(flags))
}

#[test]
fn two_engines_give_the_same_tokens_and_one_may_be_lost() {
    let server = serve(&["--dp", "2", "--lose-engine", "1:40"]);
    let body = json!({"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0, "ignore_eos": true});
    let text = |rank: &str| {
        let response = post_with(server.address, COMPLETIONS, (RANK, rank), &body);
        assert_eq!(response.status, 200);
        response.json()["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    assert_eq!(text("0"), text("1"));
    assert_eq!(post_with(server.address, COMPLETIONS, (RANK, "2"), &body).status, 400);
    // Engine 1 is lost after 40 steps, in the middle of the second of these.
    let long =
        json!({"prompt": "x", "max_tokens": 100, "temperature": 0, "ignore_eos": true, "stream": true}).to_string();
    let streams = ["0", "1"].map(|rank| {
        let headers = [(RANK, rank), ("Content-Type", "application/json")];
        read_head(write(server.address, "POST", COMPLETIONS, &headers, long.as_bytes())).text()
    });
    let failed = streams.each_ref().map(|stream| stream.contains("its device is lost"));
    assert_eq!(failed, [false, true], "{streams:?}");
    assert!(streams[0].matches("\"text\"").count() >= 100, "{}", streams[0]);
    let health = get(server.address, "/health");
    assert_eq!(
        (health.status, health.text()),
        (200, "engine 1 of 2 has stopped: its device is lost, as a test asks for\n".to_owned())
    );
    assert!(get(server.address, "/metrics").text().contains("pegainfer:engines_healthy{model_name=\"qwen3-tiny\"} 1"));
    for _ in 0..3 {
        post_ok(server.address, COMPLETIONS, &body);
    }
}

#[test]
fn a_server_exits_when_its_last_engine_is_lost() {
    let mut server = serve(&["--lose-engine", "0:10"]);
    let body = json!({"prompt": "x", "max_tokens": 100, "ignore_eos": true, "stream": true}).to_string();
    let headers = [("Content-Type", "application/json")];
    let stream = read_head(write(server.address, "POST", COMPLETIONS, &headers, body.as_bytes())).text();
    assert!(stream.contains("its device is lost"), "open requests are answered: {stream}");
    let status = server.child.wait().unwrap();
    assert_eq!(status.code(), Some(1));
}

#[test]
fn the_schedule_of_each_engine_is_recorded_and_replayed() {
    let dir = TempDir::new("data-parallel-schedule");
    let file = dir.0.join("requests.jsonl");
    let recording = ["--record", file.to_str().unwrap(), "--record-prompts", "ids", "--record-steps"];
    let mut server = serve(&[&["--data-parallel-size", "2"], &recording[..]].concat());
    let address = server.address;
    std::thread::scope(|scope| {
        for i in 0..12 {
            let body = json!({"prompt": format!("The number {i} is"), "max_tokens": 10 + i, "ignore_eos": true});
            scope.spawn(move || post_ok(address, COMPLETIONS, &body));
        }
    });
    server.signal("-TERM");
    server.child.wait().unwrap();
    let lines = std::fs::read_to_string(&file).unwrap();
    let mut plans: BTreeMap<u64, usize> = BTreeMap::new();
    for line in lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()) {
        if line.get("plan").is_some() {
            *plans.entry(line["engine_number"].as_u64().unwrap_or(0)).or_default() += 1;
        }
    }
    assert!(plans.len() == 2 && plans.values().all(|plans| *plans > 10), "{plans:?}");
    let (code, out, err) = run(pegainfer().arg("replay").arg(&file).arg("--schedule"));
    assert_eq!(code, Some(0), "{out}{err}");
    assert!(out.contains("engine 1: ") && out.matches("were planned as recorded").count() == 2, "{out}");
    let flags = ["--check", "--device", "cpu", "--data-parallel-size", "2"];
    let (code, out, err) = run(pegainfer().arg("replay").arg(&file).args(flags));
    assert_eq!(code, Some(0), "{out}{err}");
}

#[test]
fn wrong_numbers_of_engines_are_refused() {
    let refused = |flags: &[&str]| {
        let (code, _, err) = run(pegainfer().args(["serve", "--port", "0"]).args(flags));
        assert_eq!(code, Some(1), "{flags:?}: {err}");
        err
    };
    let lost = refused(&["--device", "cpu", "--data-parallel-size", "2", "--lose-engine", "2:1"]);
    assert!(lost.contains("engines are counted from 0 to 1"), "{lost}");
    let (code, _, err) = run(pegainfer().args(["serve", "--data-parallel-size", "0"]));
    assert!(code == Some(2) && err.contains("--data-parallel-size"), "{err}");
    let file = TempDir::new("data-parallel-ledger");
    let out = file.0.join("ledger.jsonl");
    let flags = ["--device", "cpu", "--data-parallel-size", "2"];
    let (code, _, err) = run(pegainfer().arg("ledger").args(flags).arg("--out").arg(&out));
    assert!(code != Some(0) && err.contains("--data-parallel-size"), "{err}");
}
