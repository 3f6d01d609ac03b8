//! Every bad request gets a response with one clear sentence in OpenAI's shape, and the server stays up.

use crate::support::client::{self, Response, post, post_ok, send, with};
use crate::support::mock::MockEngine;
use crate::support::{Setup, TestServer};
use serde_json::{Value, json};
use std::io::Write;

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn server() -> TestServer {
    TestServer::start(MockEngine::replying(" a").0, Setup::default())
}

/// Checks the status and the shape, and that `message` and `param` name the fault.
fn expect(response: Response, status: u16, message: &str, param: Option<&str>) {
    assert_eq!(response.header("content-type"), Some("application/json"));
    let got = response.status;
    let body = response.json();
    assert_eq!(got, status, "{body}");
    let error = body["error"].as_object().unwrap_or_else(|| panic!("no error in {body}"));
    assert_eq!(error.keys().collect::<Vec<_>>(), ["message", "type", "param", "code"]);
    let text = error["message"].as_str().unwrap();
    assert!(text.contains(message), "{text:?} should contain {message:?}");
    assert!(text.len() < 400 && !text.contains('\n'), "not one short sentence: {text:?}");
    assert_eq!(error["param"].as_str(), param, "{body}");
    let kind = if status >= 500 { "server_error" } else { "invalid_request_error" };
    assert_eq!(error["type"], kind);
}

fn still_up(server: &TestServer) {
    post_ok(server.address, COMPLETIONS, &json!({"prompt": "x"}));
    server.wait_idle();
}

#[test]
fn values_that_cannot_be_used_name_their_field() {
    let server = server();
    for (field, value, message) in [
        ("temperature", json!(-0.1), "temperature must be a number from 0 to 100"),
        ("temperature", json!(1e39), "temperature must be a number from 0 to 100"),
        ("temperature", json!("0.5"), "temperature must be a number, got \"0.5\""),
        ("top_p", json!(0), "top_p must be above 0 and at most 1"),
        ("top_p", json!(1.5), "top_p must be above 0 and at most 1"),
        ("top_p", json!([1]), "top_p must be a number, got a list"),
        ("min_p", json!(-1), "min_p must be a number from 0 to 1"),
        ("top_k", json!(-2), "top_k must be an integer from -1"),
        ("top_k", json!(1.5), "top_k must be an integer"),
        ("top_k", json!(1e18), "top_k must be an integer"),
        ("seed", json!(18446744073709551615u64), "seed must be an integer"),
        ("seed", json!(0.5), "seed must be an integer"),
        ("max_tokens", json!(0), "max_tokens must be an integer from 1"),
        ("max_tokens", json!(-1), "max_tokens must be an integer from 0"),
        ("max_tokens", json!(1e12), "max_tokens must be an integer from 0"),
        ("max_tokens", json!("5"), "max_tokens must be an integer from 0 to 2147483647, got \"5\""),
        ("max_completion_tokens", json!(0), "max_completion_tokens must be an integer from 1"),
        ("stop", json!(5), "stop must be a string or a list of strings"),
        ("stop", json!(["a", 5]), "stop must be a string or a list of strings, got 5"),
        ("stop", json!(""), "stop must not hold an empty string"),
        ("stop", json!(vec!["x"; 17]), "stop may hold at most 16 strings, got 17"),
        ("stop", json!("x".repeat(2000)), "at most 1024 bytes"),
        ("stop_token_ids", json!([4096]), "token id 4096 is not in the vocabulary of 4096 tokens"),
        ("stop_token_ids", json!([-1]), "stop_token_ids must hold token ids, got -1"),
        ("stop_token_ids", json!(5), "stop_token_ids must be a list, got 5"),
        ("ignore_eos", json!("yes"), "ignore_eos must be true or false"),
        ("stream", json!(1), "stream must be true or false, got 1"),
        ("stream_options", json!({"include_usage": true}), "only allowed together with \"stream\": true"),
        ("stream_options", json!([]), "stream_options must be an object"),
        ("model", json!(5), "model must be a string"),
        ("cache_salt", json!(""), "cache_salt must not be empty"),
        ("request_id", json!("a b"), "request_id must be 1 to 128 letters"),
        ("n", json!(0), "n must be an integer from 1 to 128, got 0"),
        ("n", json!(129), "n must be an integer from 1 to 128, got 129"),
        ("best_of", json!(2), "best_of must be equal to n, which is 1, got 2: choices are not ranked"),
        ("presence_penalty", json!(2.5), "presence_penalty must be a number from -2 to 2, got 2.5"),
        ("frequency_penalty", json!(-3), "frequency_penalty must be a number from -2 to 2, got -3"),
        ("frequency_penalty", json!("1"), "frequency_penalty must be a number, got \"1\""),
        ("repetition_penalty", json!(0), "repetition_penalty must be a number from 0.01 to 100, got 0"),
        ("logit_bias", json!([1]), "logit_bias must be an object, got a list"),
        ("logit_bias", json!({"1": "x"}), "logit_bias must hold numbers from -100 to 100, got \"x\""),
        ("logit_bias", json!({"1": 101}), "logit_bias must be made of numbers from -100 to 100, got 101"),
        ("logit_bias", json!({"a": 1}), "the keys of logit_bias must be token ids, got \"a\""),
        ("logit_bias", json!({"1": 1, "01": 2}), "the keys of logit_bias must be token ids, got \"01\""),
        ("logit_bias", json!({"+1": 1}), "the keys of logit_bias must be token ids, got \"+1\""),
        ("logit_bias", json!({"4096": 1}), "logit_bias must be made of token ids of the vocabulary, got 4096"),
        ("min_tokens", json!(-1), "min_tokens must be an integer from 0"),
        ("min_tokens", json!(2000), "min_tokens is 2000, but at most"),
        ("allowed_token_ids", json!(5), "allowed_token_ids must be a list, got 5"),
        ("allowed_token_ids", json!([]), "allowed_token_ids must be a list with a token that min_tokens and bad_words"),
        ("allowed_token_ids", json!([1.5]), "allowed_token_ids must hold token ids, got 1.5"),
        ("allowed_token_ids", json!([4096]), "allowed_token_ids must be made of token ids of the vocabulary, got 4096"),
        ("bad_words", json!("x"), "bad_words must be a list, got \"x\""),
        ("bad_words", json!([5]), "bad_words must hold strings, got 5"),
        ("bad_words", json!([" "]), "a bad word must have 1 to 128 bytes and not be blank"),
        ("bad_words", json!(vec!["x"; 129]), "bad_words may hold at most 128 words, got 129"),
        ("echo", json!("x"), "echo "),
        ("response_format", json!({"type": "xml"}), "response_format.type \"xml\" is not implemented"),
        ("guided_json", json!({}), "send json in structured_outputs"),
        ("unheard_of", json!({}), ""),
    ] {
        for (path, base) in
            [(COMPLETIONS, json!({"prompt": "x"})), (CHAT, json!({"messages": [{"role": "user", "content": "x"}]}))]
        {
            let mut body = base;
            body[field] = value.clone();
            let response = post(server.address, path, &body);
            if field == "unheard_of" {
                assert_eq!(response.header("x-ignored-fields"), Some("unheard_of"), "not silently dropped");
            } else {
                expect(response, 400, message, Some(field));
            }
        }
    }
    still_up(&server);
}

#[test]
fn prompts_that_cannot_be_used() {
    let server = server();
    let long = vec![5; 512];
    for (prompt, message) in [
        (json!(""), "the prompt is empty: send at least one token"),
        (json!([]), "the prompt is empty: send at least one token"),
        (json!([[]]), "the prompt is empty: send at least one token"),
        (json!(["a", ""]), "the prompt is empty: send at least one token"),
        (json!(null), "prompt is missing"),
        (json!(5), "prompt must be a string"),
        (json!({"a": 1}), "prompt must be a string"),
        (json!([1, "a"]), "prompt must hold token ids, got \"a\""),
        (json!(["a", [1]]), "prompt must be a string, a list of strings"),
        (json!([4096]), "token id 4096 is not in the vocabulary of 4096 tokens"),
        (json!([-1]), "prompt must hold token ids, got -1"),
        (json!([1.5]), "prompt must hold token ids, got 1.5"),
        (json!([99999999999u64]), "prompt must hold token ids, got 99999999999"),
        (json!(long), "maximum context length is 512 tokens. However, your prompt has 512 tokens."),
        (json!("word ".repeat(600)), "This model's maximum context length is 512 tokens. However, your prompt has"),
        (json!(vec!["a"; 300]), "prompt may hold at most 256 prompts, got 300"),
    ] {
        expect(post(server.address, COMPLETIONS, &json!({"prompt": prompt})), 400, message, Some("prompt"));
    }
    let body = json!({"prompt": [1, 2], "max_tokens": 511, "ignore_eos": true});
    let cut = post_ok(server.address, COMPLETIONS, &body);
    assert_eq!(cut["usage"]["completion_tokens"], 510, "max_tokens beyond the context is what is left of it");
    still_up(&server);
}

#[test]
fn conversations_that_cannot_be_used() {
    let server = server();
    let user = json!([{"role": "user", "content": "x"}]);
    for (fields, message, param) in [
        (json!({}), "messages is missing", "messages"),
        (json!({"messages": []}), "messages is empty", "messages"),
        (json!({"messages": "hi"}), "messages must be a list, got \"hi\"", "messages"),
        (json!({"messages": [{"role": "robot", "content": "x"}]}), "messages[0].role \"robot\" is unknown", "messages"),
        (
            json!({"messages": [{"role": "user", "content": "word ".repeat(600)}]}),
            "maximum context length is 512 tokens",
            "messages",
        ),
        (json!({"messages": user, "top_logprobs": 2}), "top_logprobs needs \"logprobs\": true", "top_logprobs"),
        (json!({"messages": user, "logprobs": 5}), "logprobs must be true or false", "logprobs"),
        (json!({"messages": user, "logprobs": true, "top_logprobs": 21}), "an integer from 0 to 20", "top_logprobs"),
        (
            json!({"messages": user, "chat_template_kwargs": {"messages": []}}),
            "must not hold messages",
            "chat_template_kwargs",
        ),
        (json!({"messages": user, "chat_template_kwargs": 5}), "must be an object", "chat_template_kwargs"),
        (json!({"messages": user, "tool_choice": "required"}), "forces a call: it needs tools", "tool_choice"),
        (json!({"messages": user, "prompt": "x"}), "prompt is not implemented by this endpoint", "prompt"),
    ] {
        expect(post(server.address, CHAT, &fields), 400, message, Some(param));
    }
    expect(
        post(server.address, COMPLETIONS, &json!({"prompt": "x", "logprobs": 21})),
        400,
        "0 to 20",
        Some("logprobs"),
    );
    expect(
        post(server.address, COMPLETIONS, &json!({"prompt": "x", "logprobs": true})),
        400,
        "0 to 20",
        Some("logprobs"),
    );
    still_up(&server);
}

#[test]
fn tools_that_cannot_be_used() {
    let server = server();
    let tools = |tool: Value| json!({"tools": [tool]});
    let function = |function: Value| tools(json!({"type": "function", "function": function}));
    let fine = json!([{"type": "function", "function": {"name": "f"}}]);
    let choice = |choice: Value| json!({"tools": fine, "tool_choice": choice});
    for (fields, message, param) in [
        (json!({"tools": 5}), "tools must be a list, got 5", "tools"),
        (tools(json!("f")), "tools[0] must be an object, got \"f\"", "tools"),
        (tools(json!({"function": {"name": "f"}})), "tools[0].type is missing", "tools"),
        (tools(json!({"type": "custom"})), "tools[0].type \"custom\" is not supported: only function is", "tools"),
        (tools(json!({"type": "function"})), "tools[0].function.name is missing", "tools"),
        (function(json!({"name": "a b"})), "tools[0].function.name must be 1 to 128 letters", "tools"),
        (function(json!({"name": "x".repeat(129)})), "tools[0].function.name must be 1 to 128 letters", "tools"),
        (function(json!({"name": "f", "parameters": "x"})), "parameters must be a JSON schema, got \"x\"", "tools"),
        (choice(json!("f")), "tool_choice must be none, auto, required or {\"type\": \"function\"", "tool_choice"),
        (choice(json!({"type": "custom"})), "tool_choice must be none, auto, required or", "tool_choice"),
        (
            choice(json!({"type": "function", "function": {"name": "g"}})),
            "tool_choice names \"g\", which is not among the tools",
            "tool_choice",
        ),
        (json!({"parallel_tool_calls": 1}), "parallel_tool_calls must be true or false", "parallel_tool_calls"),
        (json!({"include_reasoning": "no"}), "include_reasoning must be true or false", "include_reasoning"),
        (
            json!({"tools": fine, "tool_choice": "required", "add_generation_prompt": false}),
            "only with \"add_generation_prompt\": true",
            "tool_choice",
        ),
    ] {
        let body = with(json!({"messages": [{"role": "user", "content": "x"}]}), fields);
        expect(post(server.address, CHAT, &body), 400, message, Some(param));
    }
    let body = json!({"prompt": "x", "tools": fine});
    expect(post(server.address, COMPLETIONS, &body), 400, "tools is not implemented by this endpoint", Some("tools"));
    still_up(&server);
}

#[test]
fn bodies_that_are_not_json_objects() {
    let server = server();
    let json_type = [("Content-Type", "application/json; charset=utf-8")];
    let raw = |body: &[u8]| send(server.address, "POST", COMPLETIONS, &json_type, body);
    for (body, message) in [
        (&b"{\"prompt\": "[..], "the request body is not valid JSON: EOF"),
        (b"", "the request body is not valid JSON: EOF"),
        (b"{\"prompt\": \"x\", \"temperature\": NaN}", "not valid JSON"),
        (b"{\"prompt\": \"x\", \"temperature\": 1e999}", "not valid JSON: number out of range"),
        (b"{\"prompt\": \"\\ud800\"}", "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b"{\"prompt\": \"x\", \"n\": 1, \"n\": 2}", "not valid JSON: an object has the key \"n\" twice"),
        (b"{\"prompt\": \"x\", \"foo\": [{\"a\": 1, \"a\": 1}]}", "an object has the key \"a\" twice"),
        (b"{\"prompt\": \"\xff\xfe\"}", "not valid UTF-8 at byte 12"),
    ] {
        expect(raw(body), 400, message, None);
    }
    let lists = "[".repeat(100_000);
    expect(raw(format!("{{\"prompt\": {lists}").as_bytes()), 400, "not valid JSON: EOF", None);
    let deep = format!("{{\"prompt\": \"x\", \"tools\": {{\"a\": {lists}{}}}}}", "]".repeat(100_000));
    expect(raw(deep.as_bytes()), 400, "not valid JSON: recursion limit exceeded in tools", None);
    let form = [("Content-Type", "application/x-www-form-urlencoded")];
    let response = send(server.address, "POST", COMPLETIONS, &form, b"prompt=x");
    expect(response, 415, "Content-Type must be application/json, got application/x-www-form-urlencoded", None);
    expect(
        send(server.address, "POST", CHAT, &[], b"{}"),
        415,
        "Content-Type must be application/json, got none",
        None,
    );
    still_up(&server);
}

#[test]
fn a_body_of_ten_megabytes() {
    let server = server();
    let body = json!({"prompt": "x".repeat(10 << 20)});
    expect(
        post(server.address, COMPLETIONS, &body),
        413,
        "the request body is larger than the limit of 8388608 bytes (--max-body-size)",
        None,
    );
    // A client that asks first is refused before it sends.
    let headers = [("Content-Type", "application/json"), ("Expect", "100-continue")];
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{}: {}\r\n{}: {}\r\nContent-Length: 10485760\r\n\r\n",
        headers[0].0, headers[0].1, headers[1].0, headers[1].1
    );
    let mut stream = std::net::TcpStream::connect(server.address).unwrap();
    stream.write_all(head.as_bytes()).unwrap();
    expect(client::read_head(stream), 413, "larger than the limit", None);
    still_up(&server);
}

#[test]
fn unknown_places_methods_and_models() {
    let server = server();
    expect(send(server.address, "GET", "/v1/nothing", &[], b""), 404, "there is nothing at /v1/nothing", None);
    expect(send(server.address, "GET", CHAT, &[], b""), 405, "/v1/chat/completions does not take GET requests", None);
    expect(send(server.address, "DELETE", "/v1/models", &[], b""), 405, "does not take DELETE requests", None);
    let response = post(server.address, COMPLETIONS, &json!({"prompt": "x", "model": "gpt-7"}));
    expect(response, 404, "the model \"gpt-7\" does not exist; this server has: tiny", Some("model"));
    still_up(&server);
}

#[test]
fn large_values_are_not_echoed() {
    let server = server();
    let body = json!({"prompt": "x", "temperature": "9".repeat(100_000)});
    let text = post(server.address, COMPLETIONS, &body).text();
    assert!(text.len() < 400, "{} bytes of error", text.len());
    let mut body = json!({"prompt": "x"});
    body[&"k".repeat(100_000)] = json!(1);
    let response = post(server.address, COMPLETIONS, &body);
    assert!(response.header("x-ignored-fields").unwrap().len() < 400);
    let error: Value = post(server.address, COMPLETIONS, &json!({"prompt": "x", "model": "m".repeat(100_000)})).json();
    assert!(error.to_string().len() < 400);
}

fn gzip(text: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn compressed_bodies_count_as_what_they_become() {
    let limited = server();
    let send = |encoding: &str, body: &[u8]| {
        let headers = [("Content-Type", "application/json"), ("Content-Encoding", encoding)];
        client::send(limited.address, "POST", COMPLETIONS, &headers, body)
    };
    let body = json!({"prompt": "x"}).to_string();
    for encoding in ["gzip", "GZIP", "x-gzip"] {
        assert_eq!(send(encoding, &gzip(body.as_bytes())).status, 200, "{encoding}");
    }
    assert_eq!(send("identity", body.as_bytes()).status, 200);
    let bomb = gzip(&vec![b' '; 64 << 20]);
    assert!(bomb.len() < 1 << 20, "its own size is far below the limit");
    let before = std::time::Instant::now();
    expect(send("gzip", &bomb), 413, "the request body is larger than the limit of 8388608 bytes", None);
    assert!(before.elapsed().as_secs() < 5, "{:?}", before.elapsed());
    expect(send("gzip", body.as_bytes()), 400, "the request body is not the gzip that Content-Encoding names", None);
    let cut = gzip(body.as_bytes());
    expect(
        send("gzip", &cut[..cut.len() - 4]),
        400,
        "the request body is not the gzip that Content-Encoding names",
        None,
    );
    for encoding in ["br", "zstd", "gzip, gzip"] {
        expect(send(encoding, b"x"), 415, "Content-Encoding must be gzip, deflate or identity", None);
    }
    still_up(&limited);
}
