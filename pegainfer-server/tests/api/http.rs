//! Responses of the API over real connections, with a scripted engine behind the real router.

use crate::support::client::{get, post, post_ok, send, with};
use crate::support::mock::{EOS, MockEngine};
use crate::support::{Setup, TestServer, tokenizer};
use pegainfer_server::app::Options;
use serde_json::{Value, json};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn chat(content: &str) -> Value {
    json!({"messages": [{"role": "user", "content": content}]})
}

/// The text with its creation time replaced.
fn without_time(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("\"created\":") {
        let digits = rest[at + 10..].find(',').unwrap();
        out += &rest[..at];
        out += "\"created\":0";
        rest = &rest[at + 10 + digits..];
    }
    out + rest
}

#[test]
fn a_completion_has_the_shape_of_openai() {
    let (server, control) = TestServer::replying(" a cat");
    let body = json!({"prompt": "once", "max_tokens": 8, "request_id": "r1"});
    let response = without_time(&post(server.address, COMPLETIONS, &body).text());
    let prompt = control.last().prompt.len();
    assert_eq!(
        response,
        format!(
            r#"{{"id":"cmpl-r1","object":"text_completion","created":0,"model":"tiny","choices":[{{"index":0,"text":" a cat","logprobs":null,"finish_reason":"stop","stop_reason":null}}],"usage":{{"prompt_tokens":{prompt},"total_tokens":{},"completion_tokens":3,"prompt_tokens_details":{{"cached_tokens":{}}}}}}}"#,
            prompt + 3,
            prompt / 2
        )
    );
}

#[test]
fn a_chat_completion_has_the_shape_of_openai() {
    let (server, _) = TestServer::replying(" a cat");
    let response = post_ok(server.address, CHAT, &with(chat("hi"), json!({"model": "tiny"})));
    assert_eq!(response["object"], "chat.completion");
    assert!(response["id"].as_str().unwrap().starts_with("chatcmpl-"));
    let choice = json!({"index": 0, "message": {"role": "assistant", "content": " a cat"}, "logprobs": null,
        "finish_reason": "stop", "stop_reason": null});
    assert_eq!(response["choices"], json!([choice]));
}

#[test]
fn a_streamed_completion_is_exact_to_the_byte() {
    let (server, _) = TestServer::replying(" a cat");
    let body = json!({"prompt": "once", "max_tokens": 2, "stream": true, "request_id": "r1"});
    let response = post(server.address, COMPLETIONS, &body);
    assert_eq!(response.header("content-type"), Some("text/event-stream; charset=utf-8"));
    let expected = concat!(
        r#"data: {"id":"cmpl-r1","object":"text_completion","created":0,"model":"tiny","choices":[{"index":0,"text":" a","logprobs":null,"finish_reason":null,"stop_reason":null}]}"#,
        "\n\n",
        r#"data: {"id":"cmpl-r1","object":"text_completion","created":0,"model":"tiny","choices":[{"index":0,"text":" cat","logprobs":null,"finish_reason":"length","stop_reason":null}]}"#,
        "\n\ndata: [DONE]\n\n"
    );
    assert_eq!(without_time(&response.text()), expected);
}

#[test]
fn a_streamed_chat_is_exact_to_the_byte() {
    let (server, control) = TestServer::replying(" a");
    let options = json!({"stream": true, "request_id": "r1", "stream_options": {"include_usage": true}});
    let text = without_time(&post(server.address, CHAT, &with(chat("hi"), options)).text());
    let prompt = control.last().prompt.len();
    let head = r#"data: {"id":"chatcmpl-r1","object":"chat.completion.chunk","created":0,"model":"tiny","choices":["#;
    let expected = [
        format!(
            r#"{head}{{"index":0,"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null,"stop_reason":null}}],"usage":null}}"#
        ),
        format!(
            r#"{head}{{"index":0,"delta":{{"content":" a"}},"logprobs":null,"finish_reason":null,"stop_reason":null}}],"usage":null}}"#
        ),
        format!(
            r#"{head}{{"index":0,"delta":{{"content":""}},"logprobs":null,"finish_reason":"stop","stop_reason":null}}],"usage":null}}"#
        ),
        format!(
            r#"{head}],"usage":{{"prompt_tokens":{prompt},"total_tokens":{},"completion_tokens":2,"prompt_tokens_details":{{"cached_tokens":{}}},"completion_tokens_details":{{"reasoning_tokens":0}}}}}}"#,
            prompt + 2,
            prompt / 2
        ),
        "data: [DONE]".to_string(),
    ];
    assert_eq!(text, expected.map(|event| event + "\n\n").concat());
}

#[test]
fn continuous_usage_counts_on_every_chunk() {
    let (server, _) = TestServer::replying(" a cat sat");
    let options = json!({"prompt": [1, 2], "stream": true, "stream_options": {"continuous_usage_stats": true}});
    let events = post(server.address, COMPLETIONS, &options).events();
    let counts: Vec<_> = events.iter().map(|e| e["usage"]["completion_tokens"].as_u64().unwrap()).collect();
    assert_eq!(counts, [1, 2, 3, 4]);
    assert_eq!(events[0]["usage"]["prompt_tokens"], 2);
}

#[test]
fn a_stop_string_ends_the_text_before_it_and_cancels_the_rest() {
    let (server, control) = TestServer::replying(" one two three four five six seven eight nine ten");
    // Enough tokens for the match, not for the end: only the cancellation ends the request.
    control.allow(20);
    let body = json!({"prompt": "count", "max_tokens": 100, "stop": ["zzz", "ee fo"], "ignore_eos": true});
    let response = post_ok(server.address, COMPLETIONS, &body);
    let choice = &response["choices"][0];
    assert_eq!(choice["text"], " one two thr");
    assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!("stop"), &json!("ee fo")));
    assert!(response["usage"]["completion_tokens"].as_u64().unwrap() < 12, "{response}");
    server.wait_idle();
    assert_eq!(control.cancelled(), 1);
}

#[test]
fn a_stream_holds_back_what_may_become_a_stop_string_and_sends_a_chunk_for_every_token() {
    let (server, _) = TestServer::replying(" one two three");
    let body = json!({"prompt": "count", "max_tokens": 100, "stop": " two three four", "stream": true});
    let events = post(server.address, COMPLETIONS, &body).events();
    let texts: Vec<_> = events.iter().map(|e| e["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(texts.concat(), " one two three", "the text held back comes with the end");
    assert_eq!(texts[1], "", "held back");
    let plain = post_ok(server.address, COMPLETIONS, &with(body, json!({"stream": false})));
    assert_eq!(plain["usage"]["completion_tokens"], events.len());
}

#[test]
fn characters_are_never_cut() {
    let (server, _) = TestServer::replying("日本🎉é");
    let body = json!({"prompt": "x", "max_tokens": 100, "stream": true});
    let events = post(server.address, COMPLETIONS, &body).events();
    let texts: Vec<_> = events.iter().map(|e| e["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(texts.concat(), "日本🎉é");
    assert!(texts.len() > 5 && texts.contains(&""), "{texts:?}");
}

#[test]
fn stop_tokens_and_the_end_of_the_text() {
    let (server, control) = TestServer::replying(" a cat");
    let ids: Vec<u32> = vec![control_reply_token(&server)];
    let stop = post_ok(server.address, COMPLETIONS, &json!({"prompt": "x", "stop_token_ids": ids}));
    assert_eq!(stop["choices"][0]["text"], " a");
    assert_eq!(stop["choices"][0]["stop_reason"], ids[0]);
    let eos = post_ok(server.address, COMPLETIONS, &json!({"prompt": "x"}));
    assert_eq!(
        (&eos["choices"][0]["finish_reason"], &eos["choices"][0]["stop_reason"]),
        (&json!("stop"), &json!(null))
    );
    let ignored = post_ok(server.address, COMPLETIONS, &json!({"prompt": "x", "ignore_eos": true}));
    assert_eq!(ignored["choices"][0]["finish_reason"], "length");
    assert_eq!(ignored["usage"]["completion_tokens"], 16, "the default of completions");
    assert_eq!(control.last().max_tokens, 16);
}

/// The token id of " cat", from the server's /tokenize.
fn control_reply_token(server: &TestServer) -> u32 {
    let tokenizer = tokenizer();
    assert_eq!(get(server.address, "/health").status, 200);
    tokenizer.encode(" cat", false).unwrap()[0]
}

#[test]
fn parameters_reach_the_engine() {
    let (server, control) = TestServer::replying(" a");
    post_ok(server.address, COMPLETIONS, &json!({"prompt": "x"}));
    let defaults = control.last();
    let sampling = defaults.sampling;
    let from_checkpoint = (sampling.temperature(), sampling.top_k(), sampling.top_p(), sampling.min_p());
    assert_eq!(from_checkpoint, (0.6, 20, 0.95, 0.0), "generation_config.json");
    assert_eq!((defaults.logprobs, defaults.cache_salt, defaults.ignore_eos), (None, 0, false));
    post_ok(server.address, COMPLETIONS, &json!({"prompt": "x"}));
    assert_ne!(control.last().sampling.seed(), sampling.seed(), "no seed: a new one each time");

    let body = json!({"prompt": "x", "temperature": 0, "top_k": -1, "top_p": 0.5, "min_p": 0.1, "seed": -7,
        "max_tokens": 3, "max_completion_tokens": 4, "stop_token_ids": [7], "cache_salt": "s", "logprobs": 3});
    post_ok(server.address, COMPLETIONS, &body);
    let request = control.last();
    assert!(request.sampling.is_greedy());
    assert_eq!((request.sampling.top_k(), request.sampling.top_p(), request.sampling.min_p()), (0, 0.5, 0.1));
    assert_eq!((request.sampling.seed(), request.max_tokens), (-7i64 as u64, 4));
    assert_eq!((request.stop_token_ids, request.logprobs), (vec![7], Some(3)));
    let salt = request.cache_salt;
    assert_ne!(salt, 0);
    post_ok(server.address, COMPLETIONS, &json!({"prompt": "x", "cache_salt": "s"}));
    assert_eq!(control.last().cache_salt, salt);
    post_ok(server.address, COMPLETIONS, &json!({"prompt": "x", "cache_salt": "t"}));
    assert_ne!(control.last().cache_salt, salt);
}

#[test]
fn a_chat_may_use_the_rest_of_the_context() {
    let (server, control) = TestServer::replying(" a");
    post_ok(server.address, CHAT, &chat("hi"));
    let request = control.last();
    assert_eq!(request.max_tokens, 512 - request.prompt.len());
    let tokenizer = tokenizer();
    let prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";
    assert_eq!(*request.prompt, tokenizer.encode(prompt, false).unwrap());

    let open = json!({"chat_template_kwargs": {"enable_thinking": true}, "max_tokens": 5});
    post_ok(server.address, CHAT, &with(chat("hi"), open));
    assert_eq!(*control.last().prompt, tokenizer.encode(prompt.split("<think>").next().unwrap(), false).unwrap());
    assert_eq!(control.last().max_tokens, 5);
    let parts = json!([{"type": "text", "text": "hi"}]);
    post_ok(server.address, CHAT, &json!({"messages": [{"role": "user", "content": parts}]}));
    assert_eq!(control.last().prompt, request.prompt);
}

#[test]
fn null_means_absent_everywhere() {
    let (server, _) = TestServer::replying(" a");
    let nulls = json!({"model": null, "stop": null, "logprobs": null, "stream": null, "stream_options": null, "n": null,
        "seed": null, "temperature": null, "max_tokens": null, "echo": null, "tools": null, "unknown": null});
    let response = post(server.address, COMPLETIONS, &with(json!({"prompt": "x"}), nulls.clone()));
    assert_eq!((response.status, response.header("x-ignored-fields")), (200, None));
    let response = post(server.address, CHAT, &with(chat("x"), nulls));
    assert_eq!((response.status, response.header("x-ignored-fields")), (200, None));
}

#[test]
fn unknown_fields_are_named_in_a_header_and_refused_under_strict() {
    let (server, _) = TestServer::replying(" a");
    let body = json!({"prompt": "x", "foo": 1, "bar": {}, "user": "u", "n": 1});
    for stream in [false, true] {
        let response = post(server.address, COMPLETIONS, &with(body.clone(), json!({"stream": stream})));
        assert_eq!((response.status, response.header("x-ignored-fields")), (200, Some("foo, bar")));
    }
    let body = json!({"messages": [{"role": "user", "content": "x", "foo": 1}, {"role": "user", "content": "y", "foo": 2,
        "name": "u", "audio": null}], "tools": [{"type": "function", "function": {"name": "f", "bar": {}}}],
        "stream_options": {"baz": 1}, "stream": true});
    let listed = "stream_options.baz, messages[].foo, tools[].function.bar";
    assert_eq!(post(server.address, CHAT, &body).header("x-ignored-fields"), Some(listed), "at every level");
    let (engine, _) = MockEngine::replying(" a");
    let strict = TestServer::start(
        engine,
        Setup { options: Options { strict: true, ..Options::default() }, ..Setup::default() },
    );
    let response = post(strict.address, COMPLETIONS, &json!({"prompt": "x", "foo": 1}));
    assert_eq!(response.status, 400);
    let error = response.json();
    assert_eq!((&error["error"]["param"], &error["error"]["code"]), (&json!("foo"), &json!("unknown_parameter")));
    let nested = json!({"messages": [{"role": "user", "content": "x", "foo": 1}]});
    assert!(post(strict.address, CHAT, &nested).text().contains("unknown field messages[].foo"));
}

#[test]
fn models_health_and_version() {
    let (engine, _) = MockEngine::replying(" a");
    let names = vec!["a".to_string(), "org/b".to_string()];
    let server = TestServer::start(engine, Setup { names, ..Setup::default() });
    let list = get(server.address, "/v1/models").json();
    let ids: Vec<_> = list["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["a", "org/b"]);
    assert_eq!(list["data"][0]["max_model_len"], 512);
    assert_eq!(get(server.address, "/v1/models/org/b").json()["object"], "model");
    assert_eq!(get(server.address, "/v1/models/c").status, 404);
    for path in ["/health", "/ping", "/version", "/metrics"] {
        assert_eq!(get(server.address, path).status, 200, "{path}");
    }
    assert_eq!(send(server.address, "HEAD", "/metrics", &[], b"").status, 200);
    assert_eq!(send(server.address, "POST", "/ping", &[], b"").status, 200);
    let response = post_ok(server.address, COMPLETIONS, &json!({"prompt": "x", "model": "org/b"}));
    assert_eq!(response["model"], "org/b");
    let response = post_ok(server.address, COMPLETIONS, &json!({"prompt": "x"}));
    assert_eq!(response["model"], "a", "no model: the first name");
}

#[test]
fn the_end_of_text_token_is_counted_and_not_shown() {
    let (engine, _) = MockEngine::replying_ids(vec![EOS]);
    let server = TestServer::start(engine, Setup::default());
    let response = post_ok(server.address, COMPLETIONS, &json!({"prompt": "x"}));
    assert_eq!((&response["choices"][0]["text"], &response["usage"]["completion_tokens"]), (&json!(""), &json!(1)));
    let events = post(server.address, CHAT, &with(chat("x"), json!({"stream": true}))).events();
    assert_eq!(events.len(), 2, "role, then the token with the finish");
    assert_eq!(events[1]["choices"][0]["finish_reason"], "stop");
}
