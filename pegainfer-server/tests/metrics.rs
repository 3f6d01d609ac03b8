//! The metrics, over real connections, with a scripted engine behind the real router.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use serde_json::{Value, json};
use std::time::Instant;
use support::TestServer;
use support::client::{get, post, post_ok, with};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn chat(content: &str) -> Value {
    json!({"messages": [{"role": "user", "content": content}]})
}

#[test]
fn metrics_add_up() {
    let (server, _) = TestServer::replying(" a cat");
    post_ok(server.address, COMPLETIONS, &json!({"prompt": [[1, 2], [3, 4]]}));
    post_ok(server.address, COMPLETIONS, &json!({"prompt": [5, 6], "max_tokens": 1}));
    server.wait_idle();
    let text = get(server.address, "/metrics").text();
    let value = |line: &str| -> f64 {
        let found = text.lines().find(|l| l.starts_with(line)).unwrap_or_else(|| panic!("no {line} in {text}"));
        found.rsplit(' ').next().unwrap().parse().unwrap()
    };
    let labels = "model_name=\"tiny\",engine=\"0\"";
    assert_eq!(value(&format!("vllm:request_success_total{{{labels},finished_reason=\"stop\"}}")), 2.0);
    assert_eq!(value(&format!("vllm:request_success_total{{{labels},finished_reason=\"length\"}}")), 1.0);
    assert_eq!(value(&format!("vllm:prompt_tokens_total{{{labels}}}")), 6.0);
    assert_eq!(value(&format!("vllm:generation_tokens_total{{{labels}}}")), 7.0);
    assert_eq!(value("vllm:request_generation_tokens_sum"), 7.0);
    assert_eq!(value("vllm:request_prompt_tokens_sum"), 6.0);
    assert_eq!(value("vllm:time_to_first_token_seconds_count"), 3.0);
    assert_eq!(value("vllm:inter_token_latency_seconds_count"), 4.0);
    assert_eq!(value("vllm:request_time_per_output_token_seconds_count"), 2.0, "one token has no time per token");
    assert_eq!(value("vllm:e2e_request_latency_seconds_count"), 3.0);
    assert_eq!(value("vllm:request_queue_time_seconds_count"), 3.0);
    for phase in ["prefill", "decode", "inference"] {
        assert_eq!(value(&format!("vllm:request_{phase}_time_seconds_count")), 3.0);
    }
    assert_eq!(value("vllm:request_params_max_tokens_sum"), 16.0 + 16.0 + 1.0);
    assert_eq!(value("vllm:prompt_tokens_cached_total"), 3.0);
    assert_eq!(value("vllm:num_requests_running"), 0.0);
    assert_eq!(value("vllm:num_requests_waiting"), 0.0);
    assert_eq!(value("vllm:kv_cache_usage_perc"), 0.0);
    let info = format!("vllm:cache_config_info{{{labels},block_size=\"16\",num_gpu_blocks=\"64\"}}");
    assert_eq!(value(&info), 1.0);
    assert!(text.ends_with("# EOF\n"));
}

#[test]
fn metrics_tell_where_the_time_went() {
    let (server, control) = TestServer::replying(" a b c d");
    const STAGES: [&str; 4] = ["tokenize_time_ms", "queue_time_ms", "time_to_first_token_ms", "generation_time_ms"];
    for (path, body) in [(COMPLETIONS, json!({"prompt": "x"})), (CHAT, chat("x"))] {
        let started = Instant::now();
        let plain = post_ok(server.address, path, &with(body.clone(), json!({"include_metrics": true})));
        let total = started.elapsed().as_secs_f64() * 1e3;
        let metrics = &plain["metrics"];
        let stages = STAGES.map(|name| metrics[name].as_f64().unwrap_or_else(|| panic!("{name}: {metrics}")));
        assert!(stages.iter().all(|ms| *ms >= 0.0) && stages.iter().sum::<f64>() <= total, "{metrics} of {total} ms");
        let tokens = plain["usage"]["completion_tokens"].as_f64().unwrap();
        let mean = metrics["mean_itl_ms"].as_f64().unwrap() * (tokens - 1.0);
        assert!((mean - stages[3]).abs() < 0.01, "{metrics}");
        assert!(metrics["tokens_per_second"].as_f64().unwrap() > 0.0 && metrics["detokenize_time_ms"].is_f64());

        // A stream has them in one more chunk, which always has the token counts, too.
        for options in [json!(null), json!({"include_usage": true})] {
            let fields = json!({"include_metrics": true, "stream": true, "stream_options": options});
            let events = post(server.address, path, &with(body.clone(), fields)).events();
            let (last, others) = events.split_last().unwrap();
            assert_eq!((&last["choices"], &last["usage"]["completion_tokens"]), (&json!([]), &json!(tokens as u64)));
            let keys = |metrics: &Value| metrics.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
            assert_eq!(keys(&last["metrics"]), keys(metrics));
            assert!(others.iter().all(|chunk| chunk.get("metrics").is_none()));
        }
        assert!(post_ok(server.address, path, &body).get("metrics").is_none());
    }
    let before = control.added();
    for (path, body) in [
        (COMPLETIONS, json!({"prompt": ["x", "y"], "include_metrics": true})),
        (CHAT, with(chat("x"), json!({"n": 2, "include_metrics": true}))),
        ("/v1/responses", json!({"input": "x", "include_metrics": true})),
    ] {
        let refused = post(server.address, path, &body);
        assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("include_metrics")), "{body}");
    }
    assert_eq!(control.added(), before);
}
