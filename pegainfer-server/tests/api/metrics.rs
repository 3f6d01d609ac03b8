//! The metrics, over real connections, with a scripted engine behind the real router.

use crate::support::client::{get, post, post_ok, send, with};
use crate::support::mock::MockEngine;
use crate::support::{TestServer, wait_until};
use pegainfer_server::app::Options;
use pegainfer_server::http::{ApiKeys, Secret};
use serde_json::{Value, json};
use std::time::Instant;

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
    // Series that have not counted anything are there, so that the first event is an increase.
    assert_eq!(value(&format!("vllm:request_success_total{{{labels},finished_reason=\"error\"}}")), 0.0);
    for reason in ["queue_full", "requests_per_key", "rpm", "tpm", "inflight_bytes", "unread_output", "draining"] {
        assert_eq!(value(&format!("vllm:admission_rejections_total{{{labels},reason=\"{reason}\"}}")), 0.0);
    }
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
    let info =
        format!("vllm:cache_config_info{{{labels},block_size=\"16\",cache_dtype=\"bf16\",num_gpu_blocks=\"64\"}}");
    assert_eq!(value(&info), 1.0);
    assert_eq!(value("vllm:request_params_n_count"), 2.0, "one for each request, not for each choice");
    assert_eq!(value("vllm:request_max_num_generation_tokens_count"), 2.0);
    assert_eq!(value("vllm:request_max_num_generation_tokens_sum"), 3.0 + 1.0);
    assert_eq!(value("vllm:iteration_tokens_total_sum"), 6.0 + 7.0);
    for (source, tokens) in [("local_compute", 3.0), ("local_cache_hit", 3.0)] {
        assert_eq!(value(&format!("vllm:prompt_tokens_by_source_total{{{labels},source=\"{source}\"}}")), tokens);
    }
    assert_eq!(value(&format!("vllm:num_requests_waiting_by_reason{{{labels},reason=\"capacity\"}}")), 0.0);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
    let started = value("process_start_time_seconds");
    assert!(started <= now + 1.0 && started > now - 3600.0, "{started} of {now}");
    assert!(value("process_resident_memory_bytes") > 1e6 && value("process_open_fds") >= 3.0);
    assert!(value("process_cpu_seconds_total") > 0.0);
}

#[test]
fn the_format_of_metrics_is_the_one_that_the_client_accepts() {
    let (server, _) = TestServer::replying(" a cat");
    let ask = |accept: &str| {
        let response = send(server.address, "GET", "/metrics", &[("Accept", accept)], b"");
        (response.header("content-type").unwrap().to_string(), response.text())
    };
    let (kind, text) = ask("text/plain;version=0.0.4, */*;q=0.1");
    assert_eq!(kind, "text/plain; version=0.0.4; charset=utf-8");
    let described = |kind: &str, text: &str| -> Vec<String> {
        let lines = text.lines().filter_map(|line| line.strip_prefix(&format!("# {kind} ")).map(str::to_string));
        lines.map(|line| line.split(' ').next().unwrap().to_string()).collect()
    };
    let names = described("TYPE", &text);
    assert_eq!(described("HELP", &text), names, "each family has a help text under its name");
    assert!(names.contains(&"vllm:prompt_tokens_total".to_string()) && !text.contains("# EOF"));
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let name = line.split(['{', ' ']).next().unwrap();
        let of = |family: &String| {
            ["", "_bucket", "_sum", "_count"].iter().any(|suffix| name == format!("{family}{suffix}"))
        };
        assert!(names.iter().any(of), "{name} has no type");
    }
    let (kind, text) = ask("application/openmetrics-text;version=1.0.0,text/plain;q=0.5");
    assert!(kind.starts_with("application/openmetrics-text") && text.ends_with("# EOF\n"));
}

#[test]
fn requests_are_counted_by_route_and_refusals_by_reason() {
    let (engine, _) = MockEngine::replying(" a cat");
    let keys = ApiKeys::load(&[Secret("k".into())], None).unwrap();
    let server = TestServer::with(engine, Options { api_keys: keys, max_body: Some(1000), ..Options::default() });
    let address = server.address;
    let headers = [("Content-Type", "application/json"), ("Authorization", "Bearer k")];
    let ask = |path: &str, headers: &[(&str, &str)], body: &str| {
        send(address, "POST", path, headers, body.as_bytes()).text();
    };
    ask(COMPLETIONS, &headers, r#"{"prompt": "x"}"#);
    ask(COMPLETIONS, &headers, r#"{"prompt": "x", "n": "?"}"#);
    ask(COMPLETIONS, &headers, &format!("\"{}\"", "x".repeat(2000)));
    ask(COMPLETIONS, &headers[..1], "{}");
    ask("/v1/models/a/b?secret", &headers, "");
    ask("/nothing/here", &headers, "");
    ask("/nothing/there", &headers, "");
    get(address, "/health").text();
    for file in ["/ui/app.js", "/ui/style.css"] {
        get(address, file).text();
    }
    let count = |labels: &str| {
        let text = get(address, "/metrics").text();
        let line = text.lines().find(|line| line.contains(labels)).map(str::to_string);
        line.map_or(0, |line| line.rsplit(' ').next().unwrap().parse().unwrap())
    };
    for (method, path, code, requests) in [
        ("POST", COMPLETIONS, 200, 1),
        ("POST", COMPLETIONS, 400, 1),
        ("POST", COMPLETIONS, 413, 1),
        ("POST", COMPLETIONS, 401, 1),
        ("POST", "/v1/models/{*name}", 405, 1),
        ("POST", "unmatched", 404, 2),
        ("GET", "/health", 200, 1),
        ("GET", "/ui/*", 200, 2),
    ] {
        let class = format!("{}xx", code / 100);
        let labels = format!("method=\"{method}\",handler=\"{path}\",status=\"{class}\",code=\"{code}\"}}");
        wait_until(&labels, || count(&labels) == requests);
    }
    for (reason, refusals) in [
        ("invalid_request", 1),
        ("body_too_large", 1),
        ("invalid_api_key", 1),
        ("method_not_allowed", 1),
        ("unknown_url", 2),
    ] {
        assert_eq!(
            count(&format!("pegainfer:refused_requests_total{{model_name=\"tiny\",engine=\"0\",reason=\"{reason}\"}}")),
            refusals,
            "{reason}"
        );
    }
    wait_until("the duration is counted", || {
        count(
            "http_request_duration_seconds_count{model_name=\"tiny\",engine=\"0\",method=\"POST\",handler=\"/v1/completions\"}",
        ) == 4
    });
    let text = get(address, "/metrics").text();
    assert!(!text.contains("nothing") && !text.contains("secret"), "no label is the client's text");
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

        // A stream has them in one more chunk, which always includes the token counts.
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
    ] {
        let refused = post(server.address, path, &body);
        assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("include_metrics")), "{body}");
    }
    assert_eq!(control.added(), before);
    let ignored = post(server.address, "/v1/responses", &json!({"input": "x", "include_metrics": true}));
    assert_eq!((ignored.status, ignored.header("x-ignored-fields")), (200, Some("include_metrics")));
}
