//! `pegainfer run-batch`: results, kill and resume, refusals.

use crate::support::process::{pegainfer, run};
use crate::support::temp_dir::TempDir;
use crate::support::wait_until;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};

fn run_batch(dir: &Path) -> Command {
    let mut command = pegainfer();
    command.args(["run-batch", "--threads", "2", "-i"]).arg(dir.join("in.jsonl")).arg("-o").arg(dir.join("out.jsonl"));
    command
}

fn request(custom_id: &str, url: &str, body: &Value) -> String {
    json!({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).to_string()
}

fn write_requests(dir: &Path, requests: &[String]) {
    std::fs::write(dir.join("in.jsonl"), requests.join("\n")).unwrap();
}

/// The results by custom_id. Each must appear once and have the fields of OpenAI's format.
fn results(dir: &Path) -> BTreeMap<String, Value> {
    let text = std::fs::read_to_string(dir.join("out.jsonl")).unwrap();
    assert!(text.ends_with('\n'), "{text}");
    let mut results = BTreeMap::new();
    for line in text.lines() {
        let result: Value = serde_json::from_str(line).unwrap();
        let fields: Vec<&String> = result.as_object().unwrap().keys().collect();
        assert_eq!(fields, ["id", "custom_id", "response", "error"]);
        assert!(result["id"].as_str().unwrap().starts_with("batch_req_"), "{line}");
        let id = result["custom_id"].as_str().unwrap().to_owned();
        assert!(results.insert(id, result).is_none(), "doubled: {line}");
    }
    results
}

#[test]
fn each_endpoint_answers_and_errors_are_responses() {
    let dir = TempDir::new("batch");
    let question = "What is the capital of France?";
    let messages = json!([{"role": "user", "content": question}]);
    write_requests(
        &dir.0,
        &[
            request("chat", "/v1/chat/completions", &json!({"messages": messages, "temperature": 0})),
            String::new(),
            request("text", "/v1/completions", &json!({"prompt": "Once", "max_tokens": 3, "ignore_eos": true})),
            request("responses", "/v1/responses", &json!({"input": question, "temperature": 0})),
            request("refused", "/v1/chat/completions", &json!({"messages": messages, "temperature": -1})),
            request("choices", "/v1/completions", &json!({"prompt": "Once", "max_tokens": 1, "n": 8})),
            request(
                "json",
                "/v1/chat/completions",
                &json!({"messages": messages, "response_format": {"type": "json_object"}, "max_tokens": 4}),
            ),
        ],
    );
    let (code, stdout, stderr) = run(&mut run_batch(&dir.0));
    assert_eq!((code, stdout.as_str()), (Some(0), ""), "{stderr}");
    assert!(
        stderr.contains("6 results are in ") && stderr.contains("1 of this run with a status other than 200"),
        "{stderr}"
    );
    let results = results(&dir.0);
    let response = |id: &str| results[id]["response"].clone();
    let answer = "The capital of France is Paris.";
    assert_eq!(response("chat")["body"]["choices"][0]["message"]["content"], answer);
    assert_eq!(response("responses")["body"]["output"][0]["content"][0]["text"], answer);
    assert_eq!(response("text")["body"]["usage"]["completion_tokens"], 3);
    assert_eq!(response("choices")["body"]["choices"].as_array().unwrap().len(), 8);
    for (id, result) in &results {
        assert_eq!(result["error"], Value::Null);
        assert_eq!(result["response"]["status_code"], if id == "refused" { 400 } else { 200 });
        assert!(!result["response"]["request_id"].as_str().unwrap().is_empty(), "{result}");
    }
    let message = response("refused")["body"]["error"]["message"].clone();
    assert!(message.as_str().unwrap().starts_with("temperature must be"), "{message}");
}

/// Starts a run and waits until it has written more lines than `lines`.
fn start(dir: &Path, lines: usize) -> Child {
    let child = run_batch(dir).args(["--concurrency", "2"]).stderr(Stdio::piped()).spawn().unwrap();
    wait_until("there are results", || count(dir) > lines);
    child
}

fn count(dir: &Path) -> usize {
    std::fs::read(dir.join("out.jsonl")).map_or(0, |text| text.iter().filter(|byte| **byte == b'\n').count())
}

#[test]
fn a_killed_run_goes_on_without_a_lost_or_doubled_line() {
    const REQUESTS: usize = 48;
    let dir = TempDir::new("batch-kill");
    let body = json!({"prompt": "Once upon a time", "max_tokens": 100, "ignore_eos": true});
    let requests: Vec<String> = (0..REQUESTS).map(|i| request(&format!("r{i}"), "/v1/completions", &body)).collect();
    write_requests(&dir.0, &requests);

    let mut killed = start(&dir.0, 2);
    killed.kill().unwrap();
    killed.wait().unwrap();
    let after_kill = count(&dir.0);
    assert!(after_kill < REQUESTS, "{after_kill} requests were done before it was killed");
    // A line that was cut off by the kill.
    let path = dir.0.join("out.jsonl");
    let mut text = std::fs::read_to_string(&path).unwrap();
    text.truncate(text.trim_end().len() - 10);
    std::fs::write(&path, text).unwrap();

    let stopped = start(&dir.0, after_kill + 1);
    let terminate = Command::new("kill").args(["-TERM", &stopped.id().to_string()]).status().unwrap();
    assert!(terminate.success());
    let output = stopped.wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    let after_stop = count(&dir.0);
    assert!(after_stop < REQUESTS, "it was done before the signal");
    let expected =
        format!("error: stopped with {after_stop} of {REQUESTS} results; the same command continues with the others");
    assert_eq!((output.status.code(), stderr.lines().last()), (Some(1), Some(expected.as_str())));

    let (code, _, stderr) = run(&mut run_batch(&dir.0));
    assert_eq!(code, Some(0), "{stderr}");
    let results = results(&dir.0);
    assert_eq!(results.len(), REQUESTS);
    assert!(results.values().all(|result| result["response"]["status_code"] == 200));
    let before = std::fs::read(&path).unwrap();
    let (code, _, stderr) = run(&mut run_batch(&dir.0));
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stderr.contains("all 48 results are in "), "{stderr}");
    assert_eq!(std::fs::read(&path).unwrap(), before);
}

#[test]
fn files_that_cannot_be_used_are_refused_before_the_model_is_loaded() {
    let dir = TempDir::new("batch-bad");
    let body = json!({"prompt": "x"});
    let good = request("a", "/v1/completions", &body);
    let refused = |requests: &[String]| {
        write_requests(&dir.0, requests);
        let (code, stdout, stderr) = run(run_batch(&dir.0).args(["--max-body-size", "1K"]));
        assert_eq!((code, stdout.as_str(), stderr.lines().count()), (Some(1), "", 1), "{stderr}");
        stderr.trim_end().replace(dir.0.to_str().unwrap(), "DIR")
    };
    assert_eq!(refused(&[]), "error: DIR/in.jsonl has no request");
    let error = refused(&[good.clone(), good.clone()]);
    assert_eq!(error, "error: DIR/in.jsonl, line 2: custom_id \"a\" is already on line 1");
    let error = refused(&[good.clone(), request("b", "/v1/embeddings", &body)]);
    assert!(error.starts_with("error: DIR/in.jsonl, line 2: url must be one of "), "{error}");
    let long = json!({"prompt": "x".repeat(70_000)});
    let error = refused(&[request("a", "/v1/completions", &long)]);
    assert!(error.ends_with("line 1: it has more than 66560 bytes; --max-body-size allows more"), "{error}");
    std::fs::write(dir.0.join("out.jsonl"), "{\"id\":\"batch_req_1\",\"custom_id\":\"other\"}\n").unwrap();
    let error = refused(&[good]);
    let expected = "DIR/out.jsonl has results of requests that DIR/in.jsonl does not have: give another --output-file";
    assert_eq!(error, format!("error: {expected}"));
}

/// Both are read or refused within the time of a test. Neither loses a request.
#[test]
#[cfg(target_os = "linux")]
fn a_pipe_is_an_input_and_a_device_is_no_output() {
    let dir = TempDir::new("batch-pipe");
    let body = json!({"prompt": "Once", "max_tokens": 2, "ignore_eos": true});
    let requests = ["a", "b", "c"].map(|id| request(id, "/v1/completions", &body)).join("\n");
    let through_pipe = |output: &Path, text: &str| {
        let mut command = pegainfer();
        command.args(["run-batch", "--threads", "2", "-i", "/dev/stdin", "-o"]).arg(output);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // The command may refuse its files before it reads.
        let _ = child.stdin.take().unwrap().write_all(text.as_bytes());
        let output = child.wait_with_output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, stderr) = through_pipe(&dir.0.join("out.jsonl"), &requests);
    assert!(code == Some(0) && stderr.contains("3 results are in "), "{code:?} {stderr}");
    assert_eq!(results(&dir.0).keys().collect::<Vec<_>>(), ["a", "b", "c"]);
    // An error on a later line names the line, as in a file.
    let (code, stderr) = through_pipe(&dir.0.join("other.jsonl"), &format!("{requests}\nx"));
    assert!(code == Some(1) && stderr.contains("/dev/stdin, line 4: it is not a request"), "{code:?} {stderr}");
    let fifo = dir.0.join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    for output in [Path::new("/dev/full"), Path::new("/dev/null"), &fifo, &dir.0] {
        let (code, stderr) = through_pipe(output, &requests);
        let is_refused = stderr.contains(&format!("error: {} is not a regular file", output.display()));
        assert!(code == Some(1) && is_refused && stderr.lines().count() == 1, "{code:?} {stderr}");
    }
    let (code, stderr) = run_with_output(&dir.0, "{");
    assert!(code == Some(1) && stderr.contains("line 1 is not a result"), "{stderr}");
}

/// Runs with an existing file of results, which must not be changed.
fn run_with_output(dir: &Path, text: &str) -> (Option<i32>, String) {
    write_requests(dir, &[request("a", "/v1/completions", &json!({"prompt": "x", "max_tokens": 1}))]);
    std::fs::write(dir.join("out.jsonl"), text).unwrap();
    let (code, _, stderr) = run(&mut run_batch(dir));
    assert_eq!(std::fs::read_to_string(dir.join("out.jsonl")).unwrap(), text);
    (code, stderr)
}
