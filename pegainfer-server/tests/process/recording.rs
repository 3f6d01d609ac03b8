//! `serve --record` and `pegainfer replay` with the bundled model.

use crate::support::client::{post, post_ok, post_unread, with};
use crate::support::process::{Process, pegainfer, run};
use crate::support::temp_dir::TempDir;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::Path;

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";
/// Number of requests of the long test. Requests with two choices count twice in the file.
const REQUESTS: usize = 96;
/// Kinds of requests, see [`request`].
const KINDS: usize = 8;

/// A recorded schedule.
const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/schedule.jsonl");
/// KV cache of the test's server, smaller than its requests need together.
const KV: &str = "2688K";
/// Number of requests with a recorded schedule.
const SCHEDULED: usize = 24;

/// A server that records to `file`.
fn recording(file: &Path, flags: &[&str]) -> Process {
    let mut command = pegainfer();
    command.args(["serve", "--device", "cpu", "--threads", "2", "--record"]).arg(file).args(flags);
    Process::start(&mut command)
}

/// Stops a server and returns the lines of its recording.
fn finish(mut server: Process, file: &Path) -> Vec<Value> {
    server.signal("-TERM");
    assert!(server.child.wait().unwrap().success());
    let text = std::fs::read_to_string(file).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn replay(file: &Path, flags: &[&str]) -> (Option<i32>, String, String) {
    run(pegainfer().arg("replay").arg(file).args(["--device", "cpu"]).args(flags))
}

/// Sends request `i` of kind `i` modulo [`KINDS`], and waits for its response; two kinds do not wait.
fn request(address: SocketAddr, i: usize) {
    let messages = json!([{"role": "user", "content": format!("Tell me about cat number {i}.")}]);
    let chat = |fields: Value| with(json!({"messages": messages, "max_tokens": 24}), fields);
    let text = |fields: Value| with(json!({"prompt": format!("Once, {i} cats"), "max_tokens": 24}), fields);
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["name", "age"], "properties": {
        "name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 1, "maximum": 30}}});
    let format = json!({"type": "json_schema", "json_schema": {"name": "cat", "schema": schema}});
    let thinking = json!({"enable_thinking": true});
    match i % KINDS {
        0 => drop(post_ok(address, COMPLETIONS, &text(json!({"temperature": 0})))),
        1 => drop(post_ok(address, COMPLETIONS, &text(json!({"temperature": 1.0})))),
        2 => drop(post_ok(address, CHAT, &chat(json!({"response_format": format, "max_tokens": 100})))),
        3 => {
            let fields = json!({"n": 2, "frequency_penalty": 0.8, "logit_bias": {"100": 2.5}, "min_tokens": 4});
            drop(post_ok(address, COMPLETIONS, &text(with(fields, json!({"top_p": 0.9, "min_p": 0.02})))));
        }
        // The stop string ends it within one or two tokens.
        4 => drop(post_ok(address, COMPLETIONS, &text(json!({"stop": ["a", "e"], "top_k": 50})))),
        5 => {
            // The client leaves in the middle.
            let mut response = post(address, COMPLETIONS, &text(json!({"stream": true, "max_tokens": 400})));
            drop((response.chunk(), response.chunk()));
        }
        6 => drop(post_unread(address, CHAT, &chat(json!({"max_tokens": 300})))),
        _ => {
            let fields =
                json!({"chat_template_kwargs": thinking, "thinking_token_budget": 5, "response_format": format});
            drop(post_ok(address, CHAT, &chat(with(fields, json!({"max_tokens": 100, "cache_salt": "s"})))));
        }
    }
}

#[test]
fn recorded_requests_give_the_same_tokens_again() {
    let dir = TempDir::new("recording");
    let file = dir.0.join("requests.jsonl");
    let server = recording(&file, &["--record-prompts", "ids"]);
    let address = server.address;
    std::thread::scope(|scope| {
        for thread in 0..KINDS {
            scope.spawn(move || (thread..REQUESTS).step_by(KINDS).for_each(|i| request(address, i)));
        }
    });
    let lines = finish(server, &file);
    assert_eq!((&lines[0]["record"], &lines[0]["prompts"]), (&json!(2), &json!("ids")), "{}", lines[0]);
    let ends: Vec<&Value> = lines.iter().filter(|line| line.get("end").is_some()).collect();
    let reasons = |name: &str| ends.iter().filter(|end| end["reason"] == name).count();
    let [stopped, long, cancelled] = ["stop", "length", "cancelled"].map(reasons);
    assert!(stopped > 10 && long > 10 && cancelled > 10, "{stopped} {long} {cancelled}");
    assert!(ends.len() > 86 && lines.iter().any(|line| line["parameters"]["grammar"].is_string()));
    for threads in ["1", "2"] {
        let (code, out, err) = replay(&file, &["--check", "--threads", threads]);
        let all = format!("{0} of {0} requests gave the recorded ones, 0 had not ended", ends.len());
        assert!(code == Some(0) && out.contains(&all), "{out}{err}");
    }
    // A request with a changed prompt, and one without an end.
    let mut full = ends.iter().filter(|end| end["reason"] == "length").map(|end| end["end"].clone());
    let (other, open) = (full.next().unwrap(), full.next().unwrap());
    let mut changed = lines.clone();
    changed.retain(|line| line.get("end") != Some(&open));
    changed.iter_mut().filter(|line| line["add"] == other).for_each(|line| line["ids"] = json!([1, 2, 3]));
    let text: String = changed.iter().map(|line| format!("{line}\n")).collect();
    std::fs::write(&file, text).unwrap();
    let (code, out, err) = replay(&file, &["--check"]);
    assert!(
        code == Some(1) && err.contains("requests gave different tokens") && out.contains("1 had not ended"),
        "{out}{err}"
    );
    assert_eq!(replay(&file, &[]).0, Some(0), "only --check fails");
}

#[test]
fn hashes_tell_prefixes_and_nothing_else() {
    let dir = TempDir::new("hashes");
    let file = dir.0.join("requests.jsonl");
    let server = recording(&file, &[]);
    let long = "Once upon a time there was a cat who lived in a small house by the sea. ".repeat(4);
    for end in ["It slept on the roof all day long. ", "It sang to the moon every night. "].map(|end| end.repeat(4)) {
        let body = json!({"prompt": format!("{long}{end}"), "max_tokens": 40, "ignore_eos": true});
        post_ok(server.address, COMPLETIONS, &body);
    }
    let lines = finish(server, &file);
    let of = |key: &str| lines.iter().filter(|line| line.get(key).is_some()).collect::<Vec<_>>();
    let (adds, ends) = (of("add"), of("end"));
    assert_eq!((adds.len(), ends.len()), (2, 2), "{lines:?}");
    let hashes = |line: &Value| line["hashes"].as_array().unwrap().clone();
    let [first, second] = [0, 1].map(|i| hashes(adds[i]));
    assert!(first.len() > 3 && first[..3] == second[..3] && first != second, "{first:?} {second:?}");
    assert!(hashes(ends[0]).len() >= 2, "{}", ends[0]);
    assert!(adds.iter().all(|line| line.get("ids").is_none() && line.get("parameters").is_none()));
    let (code, _, err) = replay(&file, &[]);
    assert!(code == Some(1) && err.contains("record with --record-prompts ids"), "{err}");
    // As load, a recording with hashes has the lengths and shared prefixes of its requests.
    let mut bench = pegainfer();
    bench.args(["bench", "replay"]).arg(&file).args(["--device", "cpu", "--read-gbs", "10", "--peak-tflops", "1"]);
    let (code, out, err) = run(bench.args(["--runs", "1", "--json", "-"]));
    assert_eq!(code, Some(0), "{err}");
    let report: Value = serde_json::from_str(&out).unwrap();
    let median = &report["rows"][0]["median"];
    let shared = hashes(adds[0]).iter().zip(hashes(adds[1])).take_while(|(a, b)| *a == b).count() * 16;
    assert_eq!((&median["requests"], &median["output_tokens"]), (&json!(2), &json!(40.0)), "{report}");
    assert_eq!(median["cached_tokens"], shared as f64 / 2.0, "{report}");
    let (code, _, err) = run(pegainfer().args(["serve", "--port", "0", "--record"]).arg(&file));
    assert!(code == Some(1) && err.contains("cannot be created") && err.contains("exists"), "{err}");
    std::fs::write(&file, "{}\n").unwrap();
    let (code, _, err) = replay(&file, &[]);
    assert!(code == Some(1) && err.contains("is not a recording"), "{err}");
}

/// Records the schedule of a run in `file`: mixed prompts and cancels, too few KV blocks for all of them, chunked
/// prefill.
fn record_schedule(file: &Path) -> Vec<Value> {
    let flags = ["--record-prompts", "ids", "--record-steps", "--kv-cache-memory", KV, "--max-num-seqs", "8"];
    let budget = ["--max-num-batched-tokens", "96", "--mixed-step-token-budget", "32"];
    let server = recording(file, &[&flags[..], &budget[..]].concat());
    let address = server.address;
    let story = "Once upon a time there was a cat who lived in a small house by the sea. ".repeat(3);
    std::thread::scope(|scope| {
        for thread in 0..KINDS {
            scope.spawn(move || (thread..SCHEDULED).step_by(KINDS).for_each(|i| request(address, i)));
        }
        for i in 0..4 {
            let body = json!({"prompt": format!("{story}{i}"), "max_tokens": 200, "ignore_eos": true});
            let logprobs = if i == 3 { json!({"prompt_logprobs": 0}) } else { json!({}) };
            scope.spawn(move || post_ok(address, COMPLETIONS, &with(body, logprobs)));
        }
    });
    finish(server, file)
}

#[test]
fn a_served_schedule_replays_without_the_model() {
    let dir = TempDir::new("schedule");
    let file = dir.0.join("requests.jsonl");
    let lines = record_schedule(&file);
    let (code, out, err) = replay(&file, &["--schedule"]);
    assert!(code == Some(0) && out.contains("were planned as recorded"), "{out}{err}");
    assert!(!out.contains(" 0 preemptions") && !out.contains(" 0 cached"), "the run is too easy: {out}");
    let of = |kind: &str| lines.iter().filter(|line| line.get(kind).is_some()).count();
    assert!(of("plan") > 50 && of("commit") > 50 && of("cancel") > 0 && of("engine") == 1, "{out}");
    assert_eq!(replay(&file, &["--check"]).0, Some(0), "the requests can be replayed, too");
    // A step with another plan, and missing lines.
    let at = lines.iter().rposition(|line| line["plan"]["hash"].is_string()).unwrap();
    let mut changed = lines.clone();
    changed[at]["plan"]["rows"][0][1] = json!(77);
    let write =
        |lines: &[Value]| std::fs::write(&file, lines.iter().map(|line| format!("{line}\n")).collect::<String>());
    write(&changed).unwrap();
    let (code, _, err) = replay(&file, &["--schedule"]);
    let step = format!("step {} differs: row 0 was request", lines[at]["plan"]["n"]);
    assert!(code == Some(1) && err.contains(&step) && err.contains("with 77 tokens"), "{err}");
    changed.insert(at, json!({"gap": 2}));
    write(&changed).unwrap();
    let (code, out, err) = replay(&file, &["--schedule"]);
    assert!(code == Some(0) && err.contains("2 lines after step"), "{out}{err}");
    changed.retain(|line| line.get("engine").is_none());
    write(&changed).unwrap();
    let (code, _, err) = replay(&file, &["--schedule"]);
    assert!(code == Some(1) && err.contains("has no schedule"), "{err}");
}

#[test]
fn a_schedule_of_hashes_or_drafts_is_not_recorded() {
    let dir = TempDir::new("no-schedule");
    let file = dir.0.join("requests.jsonl");
    let serve = |flags: &[&str]| {
        run(pegainfer().args(["serve", "--port", "0", "--record-steps", "--record"]).arg(&file).args(flags))
    };
    let (code, _, err) = serve(&[]);
    assert!(code == Some(1) && err.contains("give --record-prompts ids"), "{err}");
    let drafts = r#"{"method": "ngram", "num_speculative_tokens": 4}"#;
    let (code, _, err) = serve(&["--record-prompts", "ids", "--speculative-config", drafts]);
    assert!(code == Some(1) && err.contains("drafts are not recorded"), "{err}");
    assert!(!file.exists());
}

/// A scheduler change that plans other steps needs another fixture: `cargo test --release -p pegainfer-server --test
/// process recording -- --ignored` records it.
#[test]
fn a_recorded_schedule_is_planned_again() {
    let (code, out, err) = replay(Path::new(FIXTURE), &["--schedule"]);
    assert!(code == Some(0) && out.contains("were planned as recorded"), "{out}{err}");
}

#[test]
#[ignore = "writes the fixture of a_recorded_schedule_is_planned_again"]
fn record_the_fixture() {
    let _ = std::fs::remove_file(FIXTURE);
    record_schedule(Path::new(FIXTURE));
}

/// A request with a long prompt and many choices takes the space of one prompt.
#[test]
fn choices_share_the_prompt_of_the_first_one() {
    let dir = TempDir::new("recorded-choices");
    let prompt = "a ".repeat(300);
    for prompts in ["ids", "hashes"] {
        let file = dir.0.join(prompts);
        let server = recording(&file, &["--record-prompts", prompts]);
        let body = json!({"prompt": [&prompt, "Once"], "n": 8, "max_tokens": 2, "temperature": 1, "ignore_eos": true});
        post_ok(server.address, COMPLETIONS, &body);
        let lines = finish(server, &file);
        let text = std::fs::read_to_string(&file).unwrap();
        let adds: Vec<&Value> = lines.iter().filter(|line| line.get("add").is_some()).collect();
        let whole = adds.iter().filter(|line| line.get("choice_of").is_none()).count();
        assert_eq!((adds.len(), whole), (16, 2), "{text}");
        let first = adds.iter().map(|line| line.to_string().len()).max().unwrap();
        assert!(text.len() < 2 * first + 8_000, "{prompts}: {} bytes, {first} for the prompt", text.len());
        let mut bench = pegainfer();
        bench.args(["bench", "replay"]).arg(&file).args(["--device", "cpu", "--read-gbs", "10", "--peak-tflops", "1"]);
        let (code, out, err) = run(bench.args(["--runs", "1", "--json", "-"]));
        assert_eq!(code, Some(0), "{err}");
        let report: Value = serde_json::from_str(&out).unwrap();
        assert_eq!(report["rows"][0]["median"]["requests"], 16, "{report}");
    }
    let (code, out, err) = replay(&dir.0.join("ids"), &["--check"]);
    assert!(code == Some(0) && out.contains("16 of 16 requests gave the recorded ones"), "{out}{err}");
    // Without the line that contains the prompt, the others are an error that says so.
    let file = dir.0.join("ids");
    let text = std::fs::read_to_string(&file).unwrap();
    let rest: Vec<&str> = text.lines().filter(|line| !line.contains("\"ids\":[")).collect();
    std::fs::write(&file, rest.join("\n")).unwrap();
    let (code, _, err) = replay(&file, &[]);
    assert!(code == Some(1) && err.contains("the line of request 0, which has the prompt of 1, is missing"), "{err}");
}

#[test]
fn a_recording_that_ends_early_is_seen() {
    let dir = TempDir::new("recording-ends");
    let file = dir.0.join("requests.jsonl");
    let server = recording(&file, &["--record-prompts", "lengths", "--record-max-bytes", "1K"]);
    let ended = |expected: u32| {
        let metrics = crate::support::client::get(server.address, "/metrics").text();
        let series = metrics.lines().find(|line| line.starts_with("pegainfer:recordings_ended_total{")).unwrap();
        series.ends_with(&format!(" {expected}"))
    };
    assert!(ended(0));
    for _ in 0..10 {
        post_ok(server.address, COMPLETIONS, &json!({"prompt": "x", "max_tokens": 1}));
    }
    crate::support::wait_until("the recording has ended", || ended(1));
    let lines = finish(server, &file);
    assert!(lines.len() > 5 && std::fs::metadata(&file).unwrap().len() <= 1024, "whole lines: {lines:?}");
}
