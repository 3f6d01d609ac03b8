//! Property of the endpoints: any body gets success or a refusal with a reason, never a 500 and never an incomplete
//! stream. A stream carries the same text as the response that is not streamed.

use crate::server::{post, read_accepted};
use serde_json::{Map, Value, json};

const PATHS: [&str; 10] = [
    "/v1/completions",
    "/v1/chat/completions",
    "/tokenize",
    "/detokenize",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/inference/v1/generate",
    "/v1/completions/render",
    "/v1/chat/completions/render",
];
/// The paths that stream.
const STREAMS: [&str; 3] = ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate"];

/// Checks an input: the first byte selects the endpoint, the rest is the body.
pub fn check(data: &[u8]) {
    let Some((&first, body)) = data.split_first() else { return };
    let path = PATHS[first as usize % PATHS.len()];
    let (status, response) = post(path, body);
    let shown = || format!("{path} {}: {status} {response}", String::from_utf8_lossy(body));
    if status.as_u16() != 200 {
        assert!(status.is_client_error(), "{}", shown());
        let error: Value = serde_json::from_str(&response).unwrap_or_else(|e| panic!("{e}: {}", shown()));
        assert!(error["error"]["message"].as_str().is_some_and(|message| !message.is_empty()), "{}", shown());
        assert!(response.len() < 2000, "a refusal repeats the request: {}", shown());
        return;
    }
    let Some(request) = read_accepted(body, &shown) else { return };
    if !STREAMS.contains(&path) || request["stream"] != true {
        serde_json::from_str::<Value>(&response).unwrap_or_else(|e| panic!("{e}: {}", shown()));
        return;
    }
    let streamed = collect(&response).unwrap_or_else(|e| panic!("{e}: {}", shown()));
    let mut plain = request.as_object().cloned().unwrap_or_default();
    plain.shift_remove("stream");
    plain.shift_remove("stream_options");
    let (status, response) = post(path, Value::from(plain).to_string().as_bytes());
    let whole: Value = serde_json::from_str(&response).unwrap_or_else(|e| panic!("{e}: {status} {}", shown()));
    let choices = whole["choices"].as_array().unwrap_or_else(|| panic!("{status} {whole}: {}", shown()));
    assert_eq!(choices.len(), streamed.len(), "{}", shown());
    for (choice, streamed) in choices.iter().zip(&streamed) {
        assert_eq!(&summary(choice), streamed, "{}", shown());
    }
}

/// Text, reasoning, calls, finish reason and token ids of a choice.
fn summary(choice: &Value) -> [String; 5] {
    let message = if choice["message"].is_object() { &choice["message"] } else { choice };
    let text = |name: &str| message[name].as_str().unwrap_or_default().to_string();
    let calls = message["tool_calls"].as_array().into_iter().flatten();
    let calls = calls.map(|call| {
        format!("{}{}", call["function"]["name"], call["function"]["arguments"].as_str().unwrap_or_default())
    });
    let content = text("content") + &text("text");
    [content, text("reasoning"), calls.collect(), choice["finish_reason"].to_string(), token_ids(choice)]
}

/// The token ids of a choice or a part of it, if it has any.
fn token_ids(choice: &Value) -> String {
    choice["token_ids"].as_array().into_iter().flatten().map(|id| format!(" {id}")).collect()
}

/// Joins the chunks of a stream into one summary per choice.
fn collect(response: &str) -> Result<Vec<[String; 5]>, String> {
    let events = response.strip_suffix("data: [DONE]\n\n").ok_or("no [DONE]")?;
    let mut choices: Vec<[String; 5]> = Vec::new();
    // On a busy machine a stream may wait so long that the server sends a keep-alive comment.
    for event in events.split_terminator("\n\n").filter(|event| !event.starts_with(':')) {
        let json = event.strip_prefix("data: ").ok_or_else(|| format!("{event:?} is not an event"))?;
        let chunk: Value = serde_json::from_str(json).map_err(|e| e.to_string())?;
        if chunk["error"].is_object() {
            return Err("the stream broke off".into());
        }
        for choice in chunk["choices"].as_array().ok_or("a chunk without choices")? {
            let index = choice["index"].as_u64().ok_or("no index")? as usize;
            choices.resize_with(choices.len().max(index + 1), Default::default);
            add(&mut choices[index], choice);
        }
    }
    Ok(choices)
}

fn add(sum: &mut [String; 5], choice: &Value) {
    let delta = if choice["delta"].is_object() { &choice["delta"] } else { choice };
    let text = |name: &str| delta[name].as_str().unwrap_or_default();
    sum[0] += text("content");
    sum[0] += text("text");
    sum[4] += &token_ids(choice);
    sum[1] += text("reasoning");
    for call in delta["tool_calls"].as_array().into_iter().flatten() {
        if call["function"]["name"].is_string() {
            sum[2] += &call["function"]["name"].to_string();
        }
        sum[2] += call["function"]["arguments"].as_str().unwrap_or_default();
    }
    if !choice["finish_reason"].is_null() {
        assert!(sum[3].is_empty(), "a choice ended twice");
        sum[3] = choice["finish_reason"].to_string();
    }
}

/// Bodies with every field of the endpoints.
pub fn seeds() -> Vec<Vec<u8>> {
    let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": [1, \"a\"]}}\n</tool_call>";
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]);
    let user = |content: Value| json!([{"role": "user", "content": content}]);
    let bodies = [
        (0, json!({"prompt": "Once upon a time", "max_tokens": 20, "stream": true, "stop": ["upon", "e"], "n": 2})),
        (
            0,
            json!({"prompt": ["a", "é🎉"], "max_tokens": 9, "logprobs": 3, "stream": true, "seed": -1,
            "stream_options": {"include_usage": true, "continuous_usage_stats": true}}),
        ),
        (
            0,
            json!({"prompt": [[1, 2, 300, 4000], [200, 201]], "ignore_eos": true, "max_tokens": 8, "min_tokens": 2,
            "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "logit_bias": {"5": -100}}),
        ),
        (
            0,
            json!({"prompt": [220, 130, 131, 4095], "stop_token_ids": [131], "stream": true, "max_tokens": 30,
            "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5, "user": "u", "cache_salt": "s"}),
        ),
        (1, json!({"messages": user(json!("<think>\nhm\n</think>\n\nHello")), "stream": true, "max_tokens": 60})),
        (
            1,
            json!({"messages": user(json!(call)), "tools": tools, "stream": true, "logprobs": true, "top_logprobs": 2}),
        ),
        (
            1,
            json!({"messages": user(json!([{"type": "text", "text": "x"}])), "tools": tools, "n": 2,
            "tool_choice": {"type": "function", "function": {"name": "f"}}, "max_completion_tokens": 9}),
        ),
        (
            1,
            json!({"messages": [{"role": "system", "content": "s"}, {"role": "assistant", "content": null, "tool_calls":
            [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "4"}], "chat_template_kwargs": {"enable_thinking": false}}),
        ),
        (2, json!({"prompt": "Once <|im_end|> upon", "add_special_tokens": true, "return_token_strs": true})),
        (2, json!({"messages": user(json!("hi")), "add_generation_prompt": false})),
        (3, json!({"tokens": [1, 2, 3, 4095]})),
        (4, json!({"input": ["a", "é🎉"], "dimensions": 2, "encoding_format": "base64", "truncate_prompt_tokens": 5})),
        (4, json!({"input": [[1, 2], [4095]], "use_activation": false, "priority": 1, "user": "u"})),
        (5, json!({"query": "a", "documents": ["b", {"text": "<|im_end|>"}], "top_n": 1, "return_documents": true})),
        (5, json!({"query": "a", "texts": ["b"], "raw_scores": true, "truncate": true, "max_tokens_per_doc": 1})),
        (6, json!({"text_1": "a", "text_2": ["b", "c"]})),
        (
            7,
            json!({"token_ids": [1, 2, 300], "model": "tiny", "stream": true, "stream_options": {"include_usage": true},
            "return_token_ids": true, "cache_salt": "s", "features": {"mm_hashes": {"image": []}}, "sampling_params":
            {"n": 2, "max_tokens": 9, "temperature": 0.5, "seed": 1, "logprobs": 2, "stop_token_ids": [131]}}),
        ),
        (
            7,
            json!({"token_ids": [220, 130], "output_mode": "text", "sampling_params": {"max_tokens": 5, "stop": ["e"],
            "prompt_logprobs": 1, "structured_outputs": {"choice": ["a", "b"]}, "output_kind": 2, "foo": null}}),
        ),
        (
            8,
            json!({"prompt": ["a", "é🎉"], "max_tokens": 9, "seed": -1, "bad_words": ["x"], "logit_bias": {"5": -100}}),
        ),
        (
            9,
            json!({"messages": user(json!("hi")), "tools": tools, "tool_choice": "required", "stream": true,
            "response_format": {"type": "json_object"}}),
        ),
        (1, json!({"messages": user(json!("hi")), "tokens": {"token_ids": [1, 2, 4095]}, "max_tokens": 5})),
    ];
    bodies.into_iter().map(|(path, body)| [vec![path], body.to_string().into_bytes()].concat()).collect()
}

/// An object as a body, for targets that build requests.
pub fn object(entries: impl IntoIterator<Item = (&'static str, Value)>) -> Vec<u8> {
    let entries: Map<String, Value> = entries.into_iter().map(|(name, value)| (name.to_string(), value)).collect();
    Value::from(entries).to_string().into_bytes()
}
