//! Models with experts behind the API, on one rank, on two, and on two engines: reference texts, and the load of the
//! experts on `/metrics`.

use crate::support::client::{get, post_ok, post_with};
use crate::support::served::model_is_served;
use crate::support::{Setup, TestServer, model_dir};
use clap::Parser;
use pegainfer_models::args::EngineArgs;
use pegainfer_models::engine;
use pegainfer_server::cli::Cli;
use serde_json::{Value, json};
use std::path::Path;

const COMPLETIONS: &str = "/v1/completions";

/// A checkpoint, the crate that has its reference outputs, its routed experts, and those of a token.
const MODELS: &[(&str, &str, u64, u64)] = &[
    ("qwen3-moe-tiny", "pegainfer-qwen3-4b", 16, 4),
    #[cfg(feature = "qwen35")]
    ("qwen35-moe-tiny", "pegainfer-qwen35-4b", 8, 2),
];

fn server(model: &str, flags: &[&str]) -> TestServer {
    let dir = model_dir().with_file_name(model);
    let args: EngineArgs = Cli::parse_from(["pegainfer", "--device", "cpu"].iter().chain(flags)).serve.engine;
    let engine = engine::load(&dir, &args).unwrap();
    TestServer::over(engine.handle, Setup { max_queued: 1024, model_dir: dir, ..Setup::default() })
}

#[test]
fn they_are_served_as_every_model() {
    for (model, ..) in MODELS {
        model_is_served(&server(model, &[]));
    }
}

/// Number of tokens before the first one with a margin within bf16 noise.
fn certain_tokens(case: &Value) -> usize {
    let margins = case["margins"].as_array().unwrap();
    margins.iter().take_while(|margin| margin.as_f64().unwrap() > 0.1).count()
}

#[test]
fn ranks_and_engines_answer_as_the_reference() {
    for (model, family, ..) in MODELS {
        let name = format!("../{family}/tests/fixtures/{model}.json");
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
        let fixture: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let tokenizer = pegainfer_text::Tokenizer::load(&model_dir().with_file_name(model)).unwrap();
        for flags in [&[][..], &["--tensor-parallel-size", "2", "--check-ranks"], &["--data-parallel-size", "2"]] {
            let server = server(model, flags);
            let engines = server.engine.engines().len();
            let mut compared = 0;
            for (i, case) in fixture["cases"].as_array().unwrap().iter().enumerate() {
                let certain = certain_tokens(case);
                if certain == 0 {
                    continue;
                }
                let ids: Vec<u32> = serde_json::from_value(case["greedy_ids"].clone()).unwrap();
                let body =
                    json!({"prompt": case["prompt"], "max_tokens": certain, "temperature": 0, "ignore_eos": true});
                let engine = (i % engines).to_string();
                let answer = post_with(server.address, COMPLETIONS, ("X-data-parallel-rank", &engine), &body);
                let text = answer.json()["choices"][0]["text"].clone();
                assert_eq!(text, tokenizer.decode(&ids[..certain]), "{model} {flags:?} {}", case["name"]);
                compared += certain;
            }
            assert!(compared > 50, "{model}: only {compared} tokens of the fixture are certain");
        }
    }
}

/// Value of a series of engine 0 on `/metrics`.
fn value(server: &TestServer, series: &str) -> Option<f64> {
    let text = get(server.address, "/metrics").text();
    let is_wanted = |line: &&str| line.starts_with(&format!("{series}{{")) && line.contains("engine=\"0\"");
    text.lines().find(is_wanted).map(|line| line.rsplit_once(' ').unwrap().1.parse().unwrap())
}

#[test]
fn the_load_of_the_experts_is_counted_in_every_sixteenth_step() {
    for &(model, _, experts, per_token) in MODELS {
        for flags in [&[][..], &["--tensor-parallel-size", "2"]] {
            let server = server(model, flags);
            assert_eq!(value(&server, "pegainfer:expert_tokens_count"), None, "nothing is counted at start");
            let prompt = vec!["The dog and the cat went to the park."; 20].join(" ");
            let body = json!({"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": true});
            let usage = post_ok(server.address, COMPLETIONS, &body)["usage"].take();
            assert_eq!(usage["completion_tokens"], 40);
            // Steps 0, 16 and 32: the prompt, and two tokens.
            let tokens = usage["prompt_tokens"].as_u64().unwrap() + 2;
            let sum = value(&server, "pegainfer:expert_tokens_sum");
            assert_eq!(sum, Some((tokens * per_token) as f64), "{model} {flags:?}");
            assert_eq!(value(&server, "pegainfer:expert_tokens_count"), Some((3 * experts) as f64));
            let (ratios, sum) = ["count", "sum"]
                .map(|tail| value(&server, &format!("pegainfer:expert_load_ratio_{tail}")).unwrap())
                .into();
            assert!(ratios == 1.0 && (1.0..experts as f64).contains(&sum), "the prompt's: {ratios}, {sum}");
        }
    }
}

#[test]
fn a_model_without_experts_has_no_load_of_them() {
    let server = server("qwen3-tiny", &[]);
    post_ok(server.address, COMPLETIONS, &json!({"prompt": "Once", "max_tokens": 20}));
    assert_eq!(value(&server, "pegainfer:expert_tokens_count"), None);
}
