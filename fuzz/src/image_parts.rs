//! Property of images in requests: any part gets success or a refusal that names it, never a 500. The prompt has one
//! run of image tokens for each image, and all APIs count the same number of tokens.

use crate::images::{base64, seeds as files};
use crate::server::{IMAGE_TOKEN, post_image, read_accepted};
use serde_json::{Value, json};

/// Checks an input: the first byte selects the API, the rest is the list of parts of a user's message as JSON.
pub fn check(data: &[u8]) {
    let Some((&first, parts)) = data.split_first() else { return };
    let shown = || String::from_utf8_lossy(parts).into_owned();
    if serde_json::from_slice::<Value>(parts).is_err() {
        return;
    }
    let body = |head: &str, tail: &str| [head.as_bytes(), parts, tail.as_bytes()].concat();
    let chat = || body(r#"{"max_tokens":1,"messages":[{"role":"user","content":"#, "}]}");
    match first % 4 {
        0 => check_chat(&chat(), &shown),
        1 => is_answer("/v1/messages", &chat(), "messages[0]", &shown),
        2 => {
            let responses = body(r#"{"max_output_tokens":1,"input":[{"role":"user","content":"#, "}]}");
            is_answer("/v1/responses", &responses, "input[0]", &shown);
        }
        _ => {
            let head = r#"{"max_tokens":1,"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"a","content":"#;
            is_answer("/v1/messages", &body(head, "}]}]}"), "messages[0]", &shown);
        }
    }
}

/// Posts a body; checks a refusal.
fn is_answer(path: &str, body: &[u8], place: &str, shown: &dyn Fn() -> String) {
    let (status, response) = post_image(path, body);
    if status.as_u16() == 200 {
        return;
    }
    assert!(status.is_client_error() && response.len() < 2000, "{path} {}: {status} {response}", shown());
    let error: Value = serde_json::from_str(&response).unwrap_or_else(|e| panic!("{e}: {}", shown()));
    let message = error["error"]["message"].as_str().unwrap_or_else(|| panic!("{}: {response}", shown()));
    if error["error"]["code"] == "invalid_image" {
        assert!(message.contains(place) || message.contains("image tokens"), "{}: {message}", shown());
    }
}

fn check_chat(body: &[u8], shown: &dyn Fn() -> String) {
    is_answer("/v1/chat/completions", body, "messages[0]", shown);
    let Some(request) = read_accepted(body, &shown) else { return };
    let count = json!({"messages": request["messages"]}).to_string();
    is_answer("/tokenize", count.as_bytes(), "messages[0]", shown);
    let (status, answer) = post_image("/v1/chat/completions", body);
    if status.as_u16() != 200 {
        return;
    }
    let (status, counted) = post_image("/tokenize", count.as_bytes());
    let [answer, counted] = [answer, counted].map(|text| serde_json::from_str::<Value>(&text).unwrap_or_default());
    assert_eq!(answer["usage"]["prompt_tokens"], counted["count"], "{}: {status}", shown());
    let tokens: Vec<u64> = counted["tokens"].as_array().into_iter().flatten().filter_map(Value::as_u64).collect();
    let runs = tokens.chunk_by(|a, b| a == b).filter(|run| run[0] == u64::from(IMAGE_TOKEN)).count();
    let parts = request["messages"][0]["content"].as_array().into_iter().flatten();
    assert_eq!(runs, parts.filter(|part| part["type"] == "image_url").count(), "{}", shown());
}

/// Parts of each API with the smallest files.
pub fn seeds() -> Vec<Vec<u8>> {
    let text = json!({"type": "text", "text": "a <|image_pad|> b"});
    let of_file = |file: Vec<u8>| {
        let data = base64(&file);
        let url = format!("data:image/png;base64,{data}");
        let source = json!({"type": "base64", "media_type": "image/png", "data": data});
        let image = json!({"type": "image", "source": source});
        [
            (0, json!([text, {"type": "image_url", "image_url": {"url": url, "detail": "low"}}])),
            (0, json!([{"type": "image_url", "image_url": url}, {"type": "image_url", "image_url": url}, text])),
            (1, json!([image, text])),
            (
                2,
                json!([{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": url, "detail": "auto"}]),
            ),
            (3, json!([text, image])),
        ]
    };
    let others = [
        (0, json!([{"type": "image_url", "image_url": {"url": "https://a/b.png", "detail": "high"}}])),
        (1, json!([{"type": "image", "source": {"type": "url", "url": "data:;base64,AAAA"}}])),
        (2, json!([{"type": "input_image", "file_id": "a"}])),
        (3, json!([{"type": "image", "source": {"type": "file", "file_id": "a"}}])),
        (0, json!("a <|vision_start|><|image_pad|><|vision_end|>")),
    ];
    let small = files().into_iter().filter(|file| (1..1000).contains(&file.len()));
    let seeds = small.flat_map(of_file).chain(others);
    seeds.map(|(api, parts)| [vec![api], parts.to_string().into_bytes()].concat()).collect()
}
