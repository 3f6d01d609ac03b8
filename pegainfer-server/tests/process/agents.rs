//! `pegainfer bench agents` on the bundled checkpoint, and against a server with the rules of OpenAI's.

use crate::bench::serve_app;
use crate::support::process::{pegainfer, run};
use crate::support::temp_dir::TempDir;
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use clap::Parser;
use pegainfer_bench::bench::agents::measure;
use pegainfer_bench::bench::agents::report::Report;
use pegainfer_bench::bench::command::{BenchArgs, BenchCommand};
use pegainfer_server::cli::{Cli, Command, InProcess};
use serde_json::{Value, json};
use std::collections::HashSet;
use std::sync::{Arc, Mutex};

fn measured(flags: &[&str]) -> anyhow::Result<Report> {
    match Cli::parse_from(["pegainfer", "bench", "agents"].iter().chain(flags)).into_command() {
        Command::Bench(BenchArgs { command: BenchCommand::Agents(args) }) => measure(&args, &InProcess),
        _ => panic!("{flags:?} is not bench agents"),
    }
}

/// Lengths that the bundled checkpoint's context of 4,096 tokens can have.
const SHORT: [&str; 8] =
    ["--system-tokens", "2000", "--turn-tokens", "190", "--answer-tokens", "10", "--grow-to", "3000"];

#[test]
fn sessions_find_their_earlier_turns_and_their_subagents_the_system_prompt() {
    let drafts = r#"{"method": "ngram", "num_speculative_tokens": 3}"#;
    let flags = ["--device", "cpu", "--sessions", "2", "--subagents", "2", "--verify", "--verify-every", "2"];
    let all = [&flags[..], &SHORT, &["--think-time", "0.01", "--speculative-config", drafts]].concat();
    let report = measured(&all).unwrap();
    // Two sessions of six turns, each with two sub-agents of two turns.
    assert_eq!((report.session_turns, report.failed, report.turns.len()), (6, 0, 2 * 6 + 2 * 2 * 2));
    for turn in &report.turns {
        assert_eq!((turn.output_tokens, turn.tpot_ms.is_some()), (10, true), "{turn:?}");
        let expected = 2000 + 200 * turn.turn + 190;
        // The model's own calls have other lengths than those of the script, and the question at the end is short.
        let tolerance = if turn.turn == 5 { 500 } else { 70 * (turn.turn + 1) };
        assert!(turn.prompt_tokens.abs_diff(expected) < tolerance, "{turn:?}");
        let recomputed = turn.recomputed().unwrap();
        if turn.turn > 0 {
            // The answer, the empty reasoning before it, and less than a block of 16 tokens.
            assert!(turn.known_tokens > 2000 && (1..45).contains(&recomputed), "{turn:?}");
        } else if turn.subagent.is_some() {
            assert!(turn.cached_tokens.unwrap() > 1900, "{turn:?}");
        }
    }
    let names: Vec<&str> = report.rows.iter().map(|row| row.name.as_str()).collect();
    let sub = ["sub-agent turn 1", "sub-agent turn 2"];
    assert_eq!(names, [&["turn 1", "turn 2", "turn 3", "turn 4", "turn 5", "turn 6"][..], &sub].concat());
    // Turns 2, 4 and 6 of both sessions, without their cached prefixes.
    let exactness = report.exactness.as_ref().unwrap();
    assert_eq!((exactness.compared, exactness.equal, exactness.not_compared), (6, 6, 0), "{exactness:?}");
}

#[test]
fn lengths_that_cannot_be_are_refused() {
    let error = |flags: &[&str]| format!("{:#}", measured(&[&["--device", "cpu"][..], flags].concat()).err().unwrap());
    assert!(error(&[]).contains("context of 4096 tokens is too short: --grow-to and --answer-tokens need 20200"));
    assert!(error(&["--grow-to", "13000"]).contains("three turns after the system prompt need 14400 tokens"));
    let overhead = error(&[&SHORT[..], &["--system-tokens", "20"]].concat()[2..]);
    assert!(overhead.contains("--system-tokens 20 is too short: the tool definitions"), "{overhead}");
}

/// What is wrong with a chat by the rules of OpenAI's server.
fn refusal(body: &Value, takes_salt: bool) -> Option<&'static str> {
    if !takes_salt && body.get("cache_salt").is_some() {
        return Some("Unrecognized request argument supplied: cache_salt");
    }
    let mut open = HashSet::new();
    for message in body["messages"].as_array()? {
        let id = message["tool_call_id"].as_str().unwrap_or_default();
        match message["role"].as_str()? {
            "tool" if !open.remove(id) => return Some("a tool message must follow its call"),
            "tool" => {}
            _ if !open.is_empty() => return Some("a call has no result"),
            _ => {
                let calls = message["tool_calls"].as_array().into_iter().flatten();
                open = calls.map(|call| call["id"].as_str().unwrap()).collect();
            }
        }
    }
    None
}

/// The answer of [`wordy_server`]: tokens are words.
fn wordy_answer(body: &Value, takes_salt: bool, is_new: bool) -> (StatusCode, String) {
    if let Some(message) = refusal(body, takes_salt) {
        return (StatusCode::BAD_REQUEST, json!({"error": {"message": message}}).to_string());
    }
    let text = body["messages"].to_string();
    let word = text.split_once("code word is ").map_or("", |(_, rest)| rest.split('.').next().unwrap());
    let answer = format!("It is {word}, {}", if is_new { "surely" } else { "perhaps" });
    let prompt = text.split_whitespace().count();
    let details = if takes_salt { json!({"cached_tokens": if is_new { 0 } else { prompt / 2 }}) } else { Value::Null };
    let usage = json!({"prompt_tokens": prompt, "completion_tokens": 4, "prompt_tokens_details": details});
    let events = [
        json!({"choices": [{"delta": {"role": "assistant", "content": ""}}]}),
        json!({"choices": [{"delta": {"content": answer}}]}),
        json!({"choices": [{"delta": {}, "finish_reason": "length"}]}),
        json!({"choices": [], "usage": usage}),
    ];
    let events: String = events.iter().map(|event| format!("data: {event}\n\n")).collect();
    (StatusCode::OK, events + "data: [DONE]\n\n")
}

/// A server whose tokens are words. It knows the code word, and ends its answers differently if the salt is new: a bug
/// of its prefix cache.
fn wordy_server(takes_salt: bool) -> String {
    let salts: Arc<Mutex<HashSet<String>>> = Arc::default();
    let chat = move |Json(body): Json<Value>| {
        let is_new = salts.lock().unwrap().insert(body["cache_salt"].to_string());
        std::future::ready(wordy_answer(&body, takes_salt, is_new))
    };
    let models = || async { Json(json!({"data": [{"id": "wordy"}]})) };
    serve_app(Router::new().route("/v1/chat/completions", post(chat)).route("/v1/models", get(models)))
}

#[test]
fn a_wrong_prefix_cache_is_found() {
    let (url, dir) = (wordy_server(true), TempDir::new("bench-agents"));
    let file = dir.0.join("agents.json");
    let mut flags = vec!["bench", "agents", "--url", &url, "--verify", "--json", file.to_str().unwrap()];
    flags.extend(SHORT);
    let (code, table, stderr) = run(pegainfer().args(&flags));
    assert_eq!(code, Some(0), "{stderr}");
    let json: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!((&json["workload"], &json["model"], &json["failed"]), (&json!("agents"), &json!("wordy"), &json!(0)));
    assert_eq!((&json["needles_found"], &json["exactness"]["equal"]), (&json!(4), &json!(0)), "{table}");
    assert!(table.contains("Needle: 4 of 4 sessions named the code word"), "{table}");
    assert!(table.contains("Exactness: 0 of 4 answers are the same without the prefix cache.\n"), "{table}");
    assert!(table.contains("First difference: session 1, turn 6, after "), "{table}");
    assert!(table.contains("with the cache:    \"perhaps\"\n  without the cache: \"surely\"\n"), "{table}");
    // Half of each prompt is cached: the rest of what was known is computed again.
    let turn = &json["turns"][3];
    let count = |field: &str| turn[field].as_u64().unwrap();
    assert_eq!(count("cached_tokens"), count("prompt_tokens") / 2);
    assert_eq!(count("known_tokens"), json["turns"][2]["prompt_tokens"].as_u64().unwrap() + 4);
    flags.push("--verify-strict");
    let (code, _, stderr) = run(pegainfer().args(&flags));
    assert_eq!(code, Some(1));
    assert!(stderr.contains("an answer differs without the prefix cache"), "{stderr}");
}

#[test]
fn a_server_without_salts_and_cached_tokens_is_measured_without_them() {
    let url = wordy_server(false);
    let flags = ["--url", &url, "--verify", "--sessions", "1", "--text-tools", "--distinct-systems"];
    let report = measured(&[&flags[..], &SHORT].concat()).unwrap();
    let table = report.table();
    assert_eq!((report.failed, report.needles_found, report.total.computed_tokens), (0, 1, None));
    let line = table.lines().find(|line| line.starts_with("turn 2")).unwrap();
    assert_eq!(line.split('|').next_back().unwrap().split_whitespace().collect::<Vec<_>>(), ["n/a"; 3]);
    assert!(table.contains("1 could not be compared: the server refuses the field cache_salt."), "{table}");
}
