//! The endpoints and headers that routers use: rendered prompts, token ids in and out, requests that only a cache
//! serves, loads.

use crate::support::client::{get, post, post_ok, post_with, read_head, with, write};
use crate::support::mock::{EOS, MockEngine};
use crate::support::{Setup, TestServer, tags_template, tokenizer, wait_until};
use pegainfer_server::app::Options;
use serde_json::{Value, json};
use std::time::Duration;

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";
const GENERATE: &str = "/inference/v1/generate";
const PREFER: (&str, &str) = ("Prefer", "if-available");

fn hello() -> Value {
    json!([{"role": "user", "content": "What is the capital of France?"}])
}

fn weather() -> Value {
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    json!([{"type": "function", "function": {"name": "weather", "parameters": parameters}}])
}

/// The token ids of a list.
fn ids(list: &Value) -> Vec<u32> {
    list.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

#[test]
fn a_rendered_completion_has_the_tokens_and_parameters_of_the_request() {
    let (server, control) = TestServer::replying(" a cat");
    let body = json!({"prompt": ["Once upon a time", "The dog"], "temperature": 0.5, "seed": 7, "stop": "x", "n": 2,
        "stop_token_ids": [9], "logprobs": 3, "logit_bias": {"5": -100}, "bad_words": ["cat"], "cache_salt": "s",
        "min_tokens": 2, "user": "u", "request_id": "r1"});
    let rendered = post_ok(server.address, "/v1/completions/render", &body);
    assert_eq!(control.added(), 0, "nothing is generated");
    let rendered = rendered.as_array().unwrap();
    let expected = ["Once upon a time", "The dog"].map(|text| tokenizer().encode(text, true).unwrap());
    assert_eq!(rendered.iter().map(|one| ids(&one["token_ids"])).collect::<Vec<_>>(), expected);
    let params = &rendered[0]["sampling_params"];
    for (name, value) in [
        ("temperature", json!(0.5)),
        ("top_p", json!(0.95)),
        ("seed", json!(7)),
        ("n", json!(2)),
        ("stop", json!(["x"])),
        ("stop_token_ids", json!([9])),
        ("max_tokens", json!(16)),
        ("min_tokens", json!(2)),
        ("logprobs", json!(3)),
        ("logit_bias", json!({"5": -100.0})),
        ("bad_words", json!(["cat"])),
        ("skip_special_tokens", json!(true)),
        ("structured_outputs", json!(null)),
    ] {
        assert_eq!(params[name], value, "{name} of {params}");
    }
    let first = &rendered[0];
    assert_eq!((&first["request_id"], &first["model"]), (&json!("cmpl-r1"), &json!("tiny")));
    assert_eq!((&first["cache_salt"], &first["kv_transfer_params"]), (&json!("s"), &json!(null)));
    post_ok(server.address, COMPLETIONS, &json!({"prompt": "Once upon a time"}));
    assert_eq!(control.last().prompt[..], ids(&first["token_ids"]), "the request has these tokens");
}

#[test]
fn rendered_messages_run_as_the_chat_would() {
    let server = TestServer::bundled();
    for fields in [
        json!({"temperature": 0}),
        json!({"temperature": 1, "seed": 3, "max_tokens": 9, "repetition_penalty": 1.3, "logprobs": true}),
        json!({"temperature": 0, "structured_outputs": {"choice": ["yes", "no"]}}),
        json!({"seed": 1, "tools": weather(), "tool_choice": "required", "parallel_tool_calls": false}),
        json!({"temperature": 0, "max_tokens": 5, "truncate_prompt_tokens": 6, "n": 2}),
    ] {
        let body = with(json!({"messages": hello(), "return_token_ids": true}), fields);
        let rendered = post_ok(server.address, "/v1/chat/completions/render", &body);
        let chat = post_ok(server.address, CHAT, &body);
        assert_eq!(rendered["token_ids"], chat["prompt_token_ids"], "{body}");
        let generated = post_ok(server.address, GENERATE, &rendered);
        let tokens = |response: &Value| -> Vec<Value> {
            response["choices"].as_array().unwrap().iter().map(|choice| choice["token_ids"].clone()).collect()
        };
        assert_eq!(tokens(&generated), tokens(&chat), "{body}: {rendered}");
        assert_eq!(generated["usage"]["completion_tokens"], chat["usage"]["completion_tokens"]);
        // The same prompt by its ids, with the output of the chat.
        let body = with(body, json!({"tokens": {"token_ids": rendered["token_ids"], "features": {}}}));
        let sent = post_ok(server.address, CHAT, &body);
        assert_eq!(sent["prompt_token_ids"], rendered["token_ids"], "{body}");
        let named = |response: &Value| response["choices"][0]["message"]["tool_calls"][0]["function"].clone();
        let content = |response: &Value| response["choices"][0]["message"]["content"].clone();
        assert_eq!((tokens(&sent), named(&sent), content(&sent)), (tokens(&chat), named(&chat), content(&chat)));
    }
}

#[test]
fn a_render_is_refused_like_its_request() {
    let (server, _control) = TestServer::replying("x");
    let long = "word ".repeat(900);
    for (path, body) in [
        (COMPLETIONS, json!({"prompt": long})),
        (COMPLETIONS, json!({"prompt": "x", "temperature": -1})),
        (COMPLETIONS, json!({"prompt": [5000]})),
        (COMPLETIONS, json!({"prompt": "x", "model": "other"})),
        (COMPLETIONS, json!({"prompt": "x", "suffix": "y"})),
        (COMPLETIONS, json!({"prompt": "x", "structured_outputs": {"json": 5}})),
        (CHAT, json!({"messages": [{"role": "user", "content": long}]})),
        (CHAT, json!({"messages": []})),
        (CHAT, json!({"messages": hello(), "tokens": {}})),
    ] {
        let [request, render] = [path.to_owned(), format!("{path}/render")].map(|path| {
            let response = post(server.address, &path, &body);
            (response.status, response.json()["error"].clone())
        });
        assert!((400..500).contains(&request.0), "{path} {body}: {request:?}");
        assert_eq!(render, request, "{path} {body}");
    }
    let too_many = json!({"prompt": "x", "n": 129});
    assert_eq!(post(server.address, "/v1/completions/render", &too_many).status, 400);
}

#[test]
fn parameters_that_cannot_be_rendered_are_reported() {
    let (engine, _control) = MockEngine::replying("x");
    let server = TestServer::start(engine, Setup { model_dir: tags_template().0.clone(), ..Setup::default() });
    let body = json!({"messages": hello(), "structured_outputs": {"choice": ["a", "b"]}, "foo": 1});
    let response = post(server.address, "/v1/chat/completions/render", &body);
    let reported = response.header("x-ignored-fields").unwrap_or_default().to_owned();
    let rendered = response.json();
    let is_after_reasoning = rendered["sampling_params"]["structured_outputs"].is_null();
    assert!(is_after_reasoning, "{rendered}");
    assert_eq!(reported, "foo, structured_outputs");
}

#[test]
fn tokens_come_in_and_go_out() {
    let (server, control) = TestServer::replying(" a cat sat");
    let reply = [tokenizer().encode(" a cat sat", false).unwrap(), vec![EOS]].concat();
    let body = json!({"token_ids": [1, 2, 300], "request_id": "r1", "sampling_params": {"temperature": 0.25, "n": 2}});
    let whole = post_ok(server.address, GENERATE, &body);
    assert_eq!(whole["request_id"], "generate-tokens-r1");
    assert_eq!((&whole["model"], &whole["kv_transfer_params"]), (&json!("tiny"), &json!(null)));
    for (index, choice) in whole["choices"].as_array().unwrap().iter().enumerate() {
        assert_eq!((&choice["index"], &choice["finish_reason"]), (&json!(index), &json!("stop")));
        assert_eq!(choice["token_ids"], json!(reply));
        assert_eq!((choice.get("text"), &choice["logprobs"]), (None, &json!(null)));
    }
    assert_eq!(whole["usage"]["completion_tokens"], 2 * reply.len());
    let request = control.last();
    assert_eq!((&request.prompt[..], request.sampling.temperature()), (&[1, 2, 300][..], 0.25));
    assert_eq!(request.max_tokens, 512 - 3, "the rest of the context");

    let options = json!({"stream": true, "stream_options": {"include_usage": true}});
    let events = post(server.address, GENERATE, &with(body.clone(), options)).events();
    for index in 0..2 {
        let of_choice: Vec<&Value> =
            events.iter().map(|event| &event["choices"][0]).filter(|choice| choice["index"] == index).collect();
        let tokens: Vec<u32> = of_choice.iter().flat_map(|choice| ids(&choice["token_ids"])).collect();
        assert_eq!((tokens, &of_choice.last().unwrap()["finish_reason"]), (reply.clone(), &json!("stop")));
    }
    let last = events.last().unwrap();
    assert_eq!((&last["choices"], &last["usage"]), (&json!([]), &whole["usage"]));

    let fields =
        json!({"output_mode": "text", "return_token_ids": true, "sampling_params": {"logprobs": 1, "stop": "at"}});
    let text = post_ok(server.address, GENERATE, &with(body.clone(), fields.clone()));
    assert_eq!((&text["choices"][0]["text"], &text["prompt_token_ids"]), (&json!(" a c"), &json!([1, 2, 300])));
    let token = &text["choices"][0]["logprobs"]["content"][0];
    assert_eq!((&token["token"], token["top_logprobs"].as_array().unwrap().len()), (&json!(" a"), 1));
    let events = post(server.address, GENERATE, &with(body, with(fields, json!({"stream": true})))).events();
    let streamed: String = events.iter().map(|event| event["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!((streamed.as_str(), &events[0]["prompt_token_ids"]), (" a c", &json!([1, 2, 300])));
    let by_id = json!({"token_ids": [1], "sampling_params": {"logprobs": 0, "max_tokens": 1, "prompt_logprobs": null}});
    let by_id = post_ok(server.address, GENERATE, &by_id);
    assert_eq!(by_id["choices"][0]["logprobs"]["content"][0]["token"], format!("token_id:{}", reply[0]));
}

#[test]
fn bad_token_requests_are_refused_by_name() {
    let (server, control) = TestServer::replying("x");
    for (body, param, words) in [
        (json!({}), "token_ids", "missing or empty"),
        (json!({"token_ids": []}), "token_ids", "missing or empty"),
        (json!({"token_ids": [1, 4096]}), "token_ids", "not in the vocabulary"),
        (json!({"token_ids": [-1]}), "token_ids", "token ids"),
        (json!({"token_ids": vec![1; 600]}), "token_ids", "maximum context length"),
        (
            json!({"token_ids": [1], "sampling_params": 5}),
            "sampling_params",
            "sampling_params must be an object, got 5",
        ),
        (json!({"token_ids": [1], "sampling_params": {"n": 0}}), "sampling_params", "sampling_params.n must be"),
        (json!({"token_ids": [1], "sampling_params": {"top_p": 2}}), "top_p", "top_p"),
        (
            json!({"token_ids": [1], "sampling_params": {"length_penalty": 2}}),
            "sampling_params.length_penalty",
            "not implemented",
        ),
        (json!({"token_ids": [1], "features": {"mm_hashes": {"image": ["a"]}}}), "features", "without images"),
        (
            json!({"token_ids": [1], "kv_transfer_params": {"do_remote_decode": true}}),
            "kv_transfer_params",
            "not implemented",
        ),
        (json!({"token_ids": [1], "stream_options": {}}), "stream_options", "only allowed"),
        (json!({"token_ids": [1], "output_mode": "x"}), "output_mode", "tokens or text"),
    ] {
        let response = post(server.address, GENERATE, &body);
        let status = response.status;
        let error = response.json()["error"].clone();
        assert_eq!((status, &error["param"]), (400, &json!(param)), "{body}: {error}");
        assert!(error["message"].as_str().unwrap().contains(words), "{body}: {error}");
    }
    for (tokens, words) in [
        (json!({"token_ids": []}), "missing or empty"),
        (json!({"token_ids": [1, 4096]}), "not in the vocabulary"),
        (json!([1]), "must be an object"),
    ] {
        let response = post(server.address, CHAT, &json!({"messages": hello(), "tokens": tokens}));
        let status = response.status;
        let error = response.json()["error"].clone();
        assert_eq!((status, &error["param"]), (400, &json!("tokens")), "{tokens}: {error}");
        assert!(error["message"].as_str().unwrap().contains(words), "{tokens}: {error}");
    }
    assert_eq!(control.added(), 0);
    // Parameters of vLLM's that change nothing, and others.
    let params =
        json!({"output_kind": 2, "skip_clone": true, "detokenize": false, "top_k": null, "priority": 1, "foo": 1});
    let response = post(server.address, GENERATE, &json!({"token_ids": [1], "sampling_params": params, "bar": 2}));
    assert_eq!(response.status, 200);
    let reported = "sampling_params.foo, sampling_params.priority, bar";
    assert_eq!(response.header("x-ignored-fields"), Some(reported));
}

#[test]
fn calls_and_reasoning_after_sent_tokens_are_parsed() {
    let prompt = tokenizer().encode("<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n", false).unwrap();
    let call = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Bern\"}}\n</tool_call>";
    let (server, control) = TestServer::replying(call);
    let body =
        |fields: Value| with(json!({"messages": hello(), "tools": weather(), "tokens": {"token_ids": prompt}}), fields);
    let response = post_ok(server.address, CHAT, &body(json!({})));
    let called = &response["choices"][0]["message"]["tool_calls"][0]["function"];
    assert_eq!(called, &json!({"name": "weather", "arguments": "{\"city\": \"Bern\"}"}), "{response}");
    assert_eq!(control.last().prompt[..], prompt, "the messages are not rendered");
    // A forced call begins in the prompt, once.
    control.script(|_| " {\"city\": \"Bern\"}}\n</tool_call>".into());
    let choice = json!({"type": "function", "function": {"name": "weather"}});
    let response = post_ok(server.address, CHAT, &body(json!({"tool_choice": choice})));
    assert_eq!(response["choices"][0]["message"]["tool_calls"][0]["function"]["name"], "weather", "{response}");
    let forced = control.last().prompt.to_vec();
    assert_eq!((&forced[..prompt.len()], forced.len() > prompt.len()), (&prompt[..], true));
    control.script(|_| " {\"city\": \"Bern\"}}\n</tool_call>".into());
    let again = body(json!({"tool_choice": choice, "tokens": {"token_ids": forced}}));
    let response = post_ok(server.address, CHAT, &again);
    assert_eq!(response["choices"][0]["message"]["tool_calls"][0]["function"]["name"], "weather", "{response}");
    assert_eq!(control.last().prompt[..], forced);
}

#[test]
fn a_request_may_ask_to_be_served_from_the_cache() {
    let server = TestServer::bundled();
    let prompt = "The dog and the cat went to the park. ".repeat(9);
    let bodies = [
        (COMPLETIONS, json!({"prompt": prompt, "max_tokens": 2, "n": 3})),
        (CHAT, json!({"messages": [{"role": "user", "content": prompt}], "max_tokens": 2, "stream": true})),
        ("/v1/responses", json!({"input": format!("1 {prompt}"), "max_output_tokens": 16})),
        ("/v1/messages", json!({"messages": [{"role": "user", "content": format!("2 {prompt}")}], "max_tokens": 2})),
        (
            GENERATE,
            json!({"token_ids": tokenizer().encode(&format!("3 {prompt}"), false).unwrap(), "sampling_params": {"max_tokens": 2}}),
        ),
    ];
    for (path, body) in &bodies {
        let refused = post_with(server.address, path, PREFER, body);
        assert_eq!((refused.status, refused.header("preference-applied")), (412, None), "{path}");
        let error = refused.json()["error"].clone();
        assert!(error["message"].as_str().unwrap().contains("not in the prefix cache: "), "{path} {error}");
        if *path != "/v1/messages" {
            assert_eq!(error["code"], "prefix_not_cached", "{path}");
        }
        server.wait_idle();
        assert_eq!(post(server.address, path, body).status, 200, "{path}");
        server.wait_idle();
        let served = post_with(server.address, path, ("Prefer", "wait=9, If-Available"), body);
        assert_eq!((served.status, served.header("preference-applied")), (200, Some("if-available")), "{path}");
        drop(served.text());
    }
    let longer = json!({"prompt": format!("{prompt}{prompt}"), "max_tokens": 2});
    assert_eq!(post_with(server.address, COMPLETIONS, PREFER, &longer).status, 412);
    let other = with(bodies[0].1.clone(), json!({"cache_salt": "s"}));
    assert_eq!(post_with(server.address, COMPLETIONS, PREFER, &other).status, 412);
    let short = post_with(server.address, COMPLETIONS, PREFER, &json!({"prompt": "x", "max_tokens": 2}));
    assert_eq!(short.status, 200, "less than a block is always computed");
    let plain = post_with(server.address, COMPLETIONS, ("Prefer", "respond-async"), &bodies[0].1);
    assert_eq!((plain.status, plain.header("preference-applied")), (200, None));
    let metrics = get(server.address, "/metrics").text();
    assert!(metrics.contains("reason=\"prefix_not_cached\"} 7\n"), "{metrics}");
}

#[test]
fn a_conditional_stream_has_its_status_first() {
    // Its head is not sent before its prompt is looked up.
    let (engine, _control) = MockEngine::replying("x");
    let dir = crate::support::endless_template("conditional-stream");
    let server = TestServer::start(engine, Setup { model_dir: dir.0.clone(), ..Setup::default() });
    let body = json!({"messages": hello(), "stream": true}).to_string();
    let headers = [PREFER, ("Content-Type", "application/json")];
    let stream = write(server.address, "POST", CHAT, &headers, body.as_bytes());
    stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    let refused = read_head(stream);
    assert_eq!(refused.status, 400);
    assert!(refused.text().contains("chat template"));
}

#[test]
fn the_loads_of_all_engines() {
    let (engines, controls): (Vec<_>, Vec<_>) = (0..2).map(|_| MockEngine::replying(" a cat")).unzip();
    let engines = engines.into_iter().map(|engine| engine.with_max_num_seqs(2)).collect();
    let server = TestServer::start_all(engines, Setup { options: Options::default(), ..Setup::default() });
    controls.iter().for_each(|control| control.allow(0));
    let headers = [("X-data-parallel-rank", "1"), ("Content-Type", "application/json")];
    let send = |token: u32| {
        let body = json!({"prompt": vec![token; 40], "max_tokens": 3}).to_string();
        write(server.address, "POST", COMPLETIONS, &headers, body.as_bytes())
    };
    let streams: Vec<_> = (1..4).map(send).collect();
    wait_until("two run", || server.engine.stats().running == 2 && server.engine.stats().waiting == 1);
    for path in ["/v1/loads?include=core,queues", "/loads"] {
        let loads = get(server.address, path).json();
        assert_eq!((&loads["dp_rank_count"], &loads["loads"][0]["num_total_reqs"]), (&json!(2), &json!(0)));
        let load = &loads["loads"][1];
        for (name, value) in [
            ("dp_rank", json!(1)),
            ("model", json!("tiny")),
            ("num_running_reqs", json!(2)),
            ("num_waiting_reqs", json!(1)),
            ("num_total_reqs", json!(3)),
            ("num_waiting_uncached_tokens", json!(120)),
            ("num_used_tokens", json!(32)),
            ("num_total_tokens", json!(152)),
            ("max_total_num_tokens", json!(1024)),
            ("token_usage", json!(2.0 / 64.0)),
            ("max_running_requests", json!(2)),
        ] {
            assert_eq!(load[name], value, "{name} of {load}");
        }
        assert!(loads["timestamp"].as_str().unwrap().ends_with('Z'), "smg reads no numbers: {loads}");
        let sum = &loads["aggregate"];
        assert_eq!((&sum["total_reqs"], &sum["total_tokens"]), (&json!(3), &json!(152)), "{sum}");
    }
    controls.iter().for_each(|control| control.allow(usize::MAX));
    drop(streams);
}

#[test]
fn metrics_have_their_older_names() {
    let (server, _control) = TestServer::replying(" a cat sat");
    post_ok(server.address, COMPLETIONS, &json!({"prompt": "x"}));
    server.wait_idle();
    let text = get(server.address, "/metrics").text();
    let value = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(&format!("{name}{{")));
        line.unwrap_or_else(|| panic!("no {name} in {text}")).rsplit(' ').next().unwrap().to_owned()
    };
    for (older, name) in [
        ("vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc"),
        ("vllm:time_per_output_token_seconds_count", "vllm:inter_token_latency_seconds_count"),
    ] {
        assert_eq!(value(older), value(name));
    }
    assert_eq!(value("vllm:time_per_output_token_seconds_count"), "3");
}
