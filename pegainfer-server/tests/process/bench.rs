//! `pegainfer bench` on the bundled checkpoint: token counts are exact, with and without HTTP.

use crate::support::mock::MockEngine;
use crate::support::process::{pegainfer, run};
use crate::support::temp_dir::TempDir;
use crate::support::{Setup, TestServer, model_dir};
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use clap::Parser;
use pegainfer_bench::bench::args::Workload;
use pegainfer_bench::bench::bench;
use pegainfer_bench::bench::command::{BenchArgs, BenchCommand};
use pegainfer_bench::bench::report::Report;
use pegainfer_server::cli::{Cli, Command, InProcess};
use serde_json::{Value, json};

pub const CPU: [&str; 6] = ["--device", "cpu", "--read-gbs", "10", "--peak-tflops", "1"];

pub fn workload(flags: &[&str]) -> Workload {
    match Cli::parse_from(["pegainfer", "bench"].iter().chain(flags).chain(&CPU)).into_command() {
        Command::Bench(BenchArgs { command: BenchCommand::Workload(workload) }) => workload,
        _ => panic!("{flags:?} is not bench"),
    }
}

pub fn report(flags: &[&str]) -> Report {
    bench(&workload(flags), &InProcess).unwrap()
}

/// Path of a trace among the fixtures.
fn trace(name: &str) -> String {
    format!("{}/../pegainfer-bench/tests/fixtures/traces/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// Serves `app` on a free port. Returns its URL.
pub fn serve_app(app: Router) -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            listener.set_nonblocking(true).unwrap();
            axum::serve(tokio::net::TcpListener::from_std(listener).unwrap(), app).await.unwrap();
        });
    });
    format!("http://{address}")
}

/// A server that refuses unknown fields, as OpenAI's does, and generates two tokens per request. Returns its URL.
pub fn strict_server() -> String {
    let completions = |Json(body): Json<Value>| async move {
        let unknown = ["cache_salt", "ignore_eos"].into_iter().find(|name| body.get(name).is_some());
        if let Some(name) = unknown {
            let message = format!("Unrecognized request argument supplied: {name}");
            return (StatusCode::BAD_REQUEST, json!({"error": {"message": message}}).to_string());
        }
        let chunk = r#"data: {"choices":[{"text":"x"}]}"#;
        let usage = r#"data: {"choices":[],"usage":{"completion_tokens":2}}"#;
        (StatusCode::OK, format!("{chunk}\n\n{chunk}\n\n{usage}\n\ndata: [DONE]\n\n"))
    };
    let models = || async { Json(json!({"data": [{"id": "m"}]})) };
    serve_app(Router::new().route("/v1/completions", post(completions)).route("/v1/models", get(models)))
}

/// Generated tokens and all tokens of every run of a row, computed from its rates.
fn tokens(report: &Report, row: usize) -> Vec<(f64, f64)> {
    let count = |rate: f64, wall: f64| (rate * wall).round();
    let runs = report.rows[row].runs.iter();
    runs.map(|r| (count(r.output_tok_s, r.wall_s), count(r.total_tok_s, r.wall_s))).collect()
}

#[test]
fn poisson_arrivals_over_loopback_http_count_every_token() {
    let report = report(&[
        "serve",
        "--qps",
        "200,50",
        "--requests",
        "12",
        "--prompt-len",
        "24",
        "--output-len",
        "7",
        "--runs",
        "2",
    ]);
    assert_eq!(report.rows.len(), 2);
    for row in 0..2 {
        assert_eq!(tokens(&report, row), [(84.0, 84.0 + 288.0); 2]);
        let median = &report.rows[row].median;
        assert_eq!((median.requests, median.failed, median.cached_tokens), (24, 0, 0.0));
        assert!(median.ttft_ms.p50 > 0.0 && median.tpot_ms.p50 > 0.0 && median.ttft_ms.p99 >= median.ttft_ms.p50);
        // Twelve arrivals at 50 a second are spread over about a quarter of a second.
        assert!(row == 0 || median.wall_s > 0.05, "{}", median.wall_s);
    }
}

#[test]
fn the_second_pass_over_a_prompt_finds_its_prefix() {
    let report = report(&["prefix", "--prompt-len", "100,200", "--requests", "2", "--runs", "2"]);
    let names: Vec<&str> = report.rows.iter().map(|row| row.name.as_str()).collect();
    assert_eq!(names, ["cold", "cached", "cold", "cached"]);
    let cached: Vec<f64> = report.rows.iter().map(|row| row.median.cached_tokens).collect();
    // Complete blocks of 16 tokens. The last prompt token is always computed.
    assert_eq!(cached, [0.0, 96.0, 0.0, 192.0]);
    assert!(report.rows[1].limits.ttft_ms.value < report.rows[0].limits.ttft_ms.value);
}

#[test]
fn throughput_runs_closed_loops_and_bursts() {
    let flags = ["throughput", "--concurrency", "1,3", "--burst", "70", "--prompt-len", "8", "--output-len", "3"];
    let report = report(&[&flags[..], &["--requests", "4", "--runs", "1", "--load-format", "dummy"]].concat());
    let names: Vec<&str> = report.rows.iter().map(|row| row.name.as_str()).collect();
    assert_eq!(names, ["concurrency 1", "concurrency 3", "burst of 70"]);
    for (row, requests) in [4, 12, 70].into_iter().enumerate() {
        assert_eq!(report.rows[row].median.requests, requests);
        assert_eq!(tokens(&report, row), [((3 * requests) as f64, (11 * requests) as f64)]);
    }
}

#[test]
fn the_roofline_counts_the_engines_of_the_target() {
    let engines = |flags: &[&str]| {
        let lengths = ["--prompt-len", "8", "--output-len", "3", "--requests", "8", "--runs", "1"];
        let report = report(&[flags, &lengths].concat());
        assert_eq!(report.rows[0].median.failed, 0);
        report.roofline.engines
    };
    assert_eq!(engines(&["throughput", "--concurrency", "4"]), 1);
    assert_eq!(engines(&["throughput", "--concurrency", "4", "--data-parallel-size", "2"]), 2);
    // Over HTTP, as `/load` says.
    assert_eq!(engines(&["serve", "--qps", "100", "--data-parallel-size", "2"]), 2);
    let server = strict_server();
    let model = model_dir();
    let url = ["throughput", "--concurrency", "4", "--model-path", model.to_str().unwrap(), "--url", &server];
    assert_eq!(engines(&url), 1, "other servers do not say");
    assert_eq!(engines(&[&url[..], &["--data-parallel-size", "3"]].concat()), 3);
}

#[test]
fn a_running_server_is_measured_with_many_concurrent_requests() {
    let (engine, control) = MockEngine::replying("one two three");
    let server = TestServer::start(engine.with_max_num_seqs(768), Setup { max_queued: 1024, ..Setup::default() });
    let (url, model) = (format!("http://{}/v1/", server.address), model_dir());
    let flags = ["throughput", "--url", &url, "--model-path", model.to_str().unwrap(), "--burst", "768", "--runs", "1"];
    let report = report(&[&flags[..], &["--prompt-len", "32", "--output-len", "5"]].concat());
    let median = &report.rows[0].median;
    assert_eq!((median.requests, median.failed), (768, 0));
    assert_eq!(tokens(&report, 0), [(3840.0, 3840.0 + 768.0 * 32.0)]);
    assert_eq!(median.cached_tokens, 16.0, "the mock's half");
    // All requests of the run share a salt, after the warm-up.
    let added = control.added.lock().unwrap();
    assert_eq!(added.len(), 64 + 768);
    assert!(added[0].cache_salt != 0 && added.iter().all(|request| request.cache_salt == added[0].cache_salt));
    assert!(added.iter().all(|request| request.ignore_eos && request.max_tokens == 5));
}

#[test]
fn a_trace_is_replayed_with_its_lengths_and_prefixes() {
    let file = trace("bailian.jsonl");
    let report = report(&["replay", &file, "--speed", "20,40", "--runs", "2"]);
    let names: Vec<&str> = report.rows.iter().map(|row| row.name.as_str()).collect();
    assert_eq!(names, ["speed 20", "speed 40"]);
    for (row, wall) in [(0, 14.886 / 20.0), (1, 14.886 / 40.0)] {
        // 13 + 8 + 21 + 5 generated, 40 + 36 + 70 + 20 in prompts.
        assert_eq!(tokens(&report, row), [(47.0, 47.0 + 166.0); 2]);
        let median = &report.rows[row].median;
        assert_eq!((median.requests, median.failed, median.stopped_early), (8, 0, 0));
        assert_eq!((median.prompt_tokens, median.output_tokens), (41.5, 11.75));
        assert!(median.wall_s >= wall, "{} of {wall} s", median.wall_s);
        // The session's second request begins like its first one, with new tokens in each run. The second session may
        // be too early.
        for run in &report.rows[row].runs {
            assert!([8.0, 16.0].contains(&run.cached_tokens), "{}", run.cached_tokens);
        }
    }
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!((&json["target"], &json["rows"][0]["arrivals"]), (&json!("http inside the process"), &json!("trace")));
    let summary = json!({"file": file, "format": "Qwen-Bailian", "time": "timestamp, seconds", "requests": 4,
        "skipped": 0, "too_long": 0, "seconds": 14.886});
    assert_eq!(json["trace"], summary);
    assert!(
        report.table().contains("Qwen-Bailian, 4 requests in 14.9 s (from timestamp, seconds)"),
        "{}",
        report.table()
    );
}

#[test]
fn requests_beyond_the_context_are_left_out() {
    let report = report(&["replay", &trace("mooncake.jsonl"), "--speed", "100", "--max-model-len", "1100"]);
    let trace = report.trace.as_ref().unwrap();
    assert_eq!((trace.requests, trace.too_long, report.rows[0].median.requests), (2, 1, 6));
    assert!(report.table().contains("1 longer than the context"), "{}", report.table());
    let short = ["replay", &trace_of_one(), "--max-model-len", "20"];
    let error = format!("{:#}", bench(&workload(&short), &InProcess).unwrap_err());
    assert!(error.contains("are longer than the context of 20 tokens"), "{error}");
}

/// A trace whose only request has 24 tokens.
fn trace_of_one() -> String {
    let file = std::env::temp_dir().join(format!("pegainfer-bench-one-{}.csv", std::process::id()));
    std::fs::write(&file, "Timestamp,Request tokens,Response tokens\n5,20,4\n6,0,4\n").unwrap();
    file.to_str().unwrap().to_owned()
}

#[test]
fn sessions_wait_for_their_responses() {
    let dir = TempDir::new("bench-sessions");
    let file = dir.0.join("trace.jsonl");
    // The second request arrives a millisecond after the first one, or 1.2 seconds after its end.
    let lines = [
        r#"{"session_id": "a", "timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}"#,
        r#"{"session_id": "a", "timestamp": 1, "delay": 1200, "input_length": 700, "output_length": 3, "hash_ids": [1, 3]}"#,
    ];
    std::fs::write(&file, lines.join("\n")).unwrap();
    let flags = ["replay", file.to_str().unwrap(), "--speed", "2", "--runs", "1"];
    let open = report(&flags);
    let sessions = report(&[&flags[..], &["--sessions"]].concat());
    let (open, sessions) = (&open.rows[0].median, &sessions.rows[0].median);
    assert!(sessions.wall_s >= 0.6, "{}", sessions.wall_s);
    assert!(open.wall_s < sessions.wall_s, "{} {}", open.wall_s, sessions.wall_s);
    assert_eq!(sessions.cached_tokens, 256.0, "a block of 512 tokens is found by the second of two requests");
}

#[test]
fn a_server_without_ignore_eos_is_measured_without_it() {
    let (url, model) = (strict_server(), model_dir());
    let file = trace("azure-2023.csv");
    let flags = ["replay", &file, "--url", &url, "--model-path", model.to_str().unwrap(), "--speed", "100"];
    let report = report(&[&flags[..], &["--runs", "2", "--requests", "3"]].concat());
    let median = &report.rows[0].median;
    assert_eq!((median.requests, median.failed, median.stopped_early, median.output_tokens), (6, 0, 6, 2.0));
    assert!(report.table().contains("6 of 6 stopped before their length"), "{}", report.table());
}

#[test]
fn a_file_that_is_no_trace_is_refused_before_anything_is_loaded() {
    let error = |file: &str| {
        format!("{:#}", bench(&workload(&["replay", file, "--model-path", "/nowhere"]), &InProcess).unwrap_err())
    };
    assert!(error(&trace("none.csv")).contains("none.csv cannot be read"));
    let unknown = error(&format!("{}/Cargo.toml", env!("CARGO_MANIFEST_DIR")));
    assert!(
        unknown.contains("Cargo.toml is not a known trace") && unknown.contains("Mooncake: JSON Lines"),
        "{unknown}"
    );
}

#[test]
fn unmeasurable_targets_are_reported() {
    let error = |flags: &[&str]| format!("{:#}", bench(&workload(flags), &InProcess).unwrap_err());
    let many = error(&["throughput", "--concurrency", "65"]);
    assert_eq!(many, "a concurrency of 65 needs --max-num-seqs 65: otherwise requests wait for each other");
    assert!(error(&["latency", "--url", "http://127.0.0.1:9"]).contains("Name it with --model-path"));
    let model = model_dir();
    let at = |url: &str| error(&["latency", "--model-path", model.to_str().unwrap(), "--url", url]);
    assert!(at("ftp://x").contains("must begin with http:// or https://"));
    let refused = at("http://127.0.0.1:9");
    assert!(refused.starts_with("the server at http://127.0.0.1:9 cannot be measured: no connection"), "{refused}");
    let long = error(&["latency", "--prompt-len", "8000", "--output-len", "2"]);
    assert!(long.contains("all 1 requests failed: the prompt has 8000 tokens"), "{long}");
    let (engine, control) = MockEngine::replying("x");
    control.allow(0);
    control.fail.store(true, std::sync::atomic::Ordering::SeqCst);
    let server = TestServer::start(engine, Setup::default());
    let broken = at(&format!("http://{}", server.address));
    assert!(broken.contains("all 1 requests failed: HTTP 500"), "{broken}");
}

#[test]
fn the_table_has_a_line_for_each_pass_and_a_dash_for_what_was_not_measured() {
    let report = report(&["prefix", "--prompt-len", "40", "--output-len", "1", "--requests", "2", "--runs", "1"]);
    let table = report.table();
    let line = |name: &str| table.lines().find(|line| line.starts_with(name)).unwrap().split('|').collect::<Vec<_>>();
    let (cold, cached) = (line("cold"), line("cached"));
    assert_eq!(cold[0].split_whitespace().collect::<Vec<_>>(), ["cold", "40", "1", "0"]);
    assert_eq!(cached[0].split_whitespace().collect::<Vec<_>>(), ["cached", "40", "1", "32"]);
    assert!(cold[1].trim_end().ends_with(" c") || cold[1].trim_end().ends_with(" m"), "{table}");
    assert_eq!(cold[2].split_whitespace().collect::<Vec<_>>(), ["-", "-", "-", "-"], "one token has no TPOT");
    assert!(table.contains("memory 10.0 GB/s (as given); compute 1.000 TFLOP/s (as given)"), "{table}");
}

#[test]
fn json_and_svg_are_written() {
    let dir = std::env::temp_dir().join(format!("pegainfer-bench-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let svg = dir.join("sweep.svg");
    let mut command = pegainfer();
    command.args(["bench", "latency", "--prompt-len", "16,48", "--output-len", "1,4", "--runs", "1", "--json", "-"]);
    let (code, stdout, stderr) = run(command.args(CPU).arg("--svg").arg(&svg));
    let plot = std::fs::read_to_string(&svg).unwrap_or_default();
    let _ = std::fs::remove_dir_all(&dir);
    assert_eq!(code, Some(0), "{stderr}");
    let (code, nothing, stderr) = run(pegainfer().args(["bench", "latency", "--json"]).arg(dir.join("x/y.json")));
    assert_eq!((code, nothing.as_str()), (Some(1), ""));
    assert!(stderr.contains("y.json cannot be written"), "{stderr}");
    let json: Value = serde_json::from_str(&stdout).unwrap();
    assert!(json.get("trace").is_none());
    let lengths = |row: &Value| (row["prompt_len"].as_u64().unwrap(), row["output_len"].as_u64().unwrap());
    let rows = json["rows"].as_array().unwrap();
    assert_eq!(rows.iter().map(lengths).collect::<Vec<_>>(), [(16, 1), (16, 4), (48, 1), (48, 4)]);
    // A single token has no TPOT.
    assert!(rows[0]["median"]["tpot_ms"]["p50"].is_null() && rows[1]["median"]["tpot_ms"]["p50"].is_f64());
    assert_eq!(json["roofline"]["read_bytes_s"], 1e10);
    assert_eq!(rows[1]["limits"]["tpot_ms"]["by"], "memory");
    // TTFT: p50, p99 and limit of two lines of two points. TPOT: the measured half is missing where it has no value.
    assert_eq!(plot.matches("<circle").count(), 12 + 8, "{plot}");
}
