//! Answers to images, through every API.

use super::*;
use pegainfer_text::Tokenizer;

/// A case of the reference whose greedy tokens are outside the noise of bf16 until the answer ends.
struct Case {
    prompt_ids: Vec<u32>,
    text: String,
}

fn case(name: &str) -> Case {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = path.join("../pegainfer-qwen35-4b/tests/fixtures/vision/qwen35-vl-tiny.json");
    let fixture: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let case = fixture["cases"].as_array().unwrap().iter().find(|case| case["name"] == name).unwrap().clone();
    let ids: Vec<u32> = serde_json::from_value(case["greedy_ids"].clone()).unwrap();
    // The ends of texts and turns.
    let end = ids.iter().position(|id| [4087, 4089].contains(id)).unwrap_or(ids.len());
    let text = Tokenizer::load(&tiny()).unwrap().decode(&ids[..end]);
    Case { prompt_ids: serde_json::from_value(case["prompt_ids"].clone()).unwrap(), text }
}

/// Messages of the cases, in the form of chat completions.
fn messages(name: &str) -> Value {
    let assistant = |text: &str| json!({"role": "assistant", "content": text});
    match name {
        "one_small" => json!([user(json!([image("small.png"), text("What do you see?")]))]),
        "one_tall_gray" => json!([user(json!([image("tall_gray.png"), text("What do you see?")]))]),
        "one_halves" => json!([user(json!([image("halves.jpg"), text("What do you see?")]))]),
        "two_images" => json!([user(json!([image("small.png"), image("photo.jpg"), text("Which one is bigger?")]))]),
        "text_between" => json!([user(json!([
            text("First "),
            image("tall_gray.png"),
            text(" then "),
            image("alpha.png"),
            text(" Tell me a story.")
        ]))]),
        "two_turns" => json!([
            user(json!([image("alpha.png"), text("Tell me a story.")])),
            assistant("Once upon a time, there was a little girl named Lily."),
            user(json!([text("And this one?"), image("wide.png")])),
        ]),
        _ => json!([
            {"role": "system", "content": "You are a helpful assistant."},
            user(json!([image("small.png")])),
            assistant("I see a picture."),
            user(json!([text("What is the capital of France?")])),
        ]),
    }
}

const ANSWERED: [&str; 4] = ["one_small", "one_tall_gray", "two_turns", "second_turn_text"];

#[test]
fn chats_have_the_prompts_and_answers_of_the_reference() {
    let server = server();
    for name in ["one_halves", "two_images", "text_between"] {
        assert_eq!(prompt_ids(&server, messages(name)), case(name).prompt_ids, "{name}");
    }
    for name in ANSWERED {
        let case = case(name);
        let body = chat(messages(name));
        let plain = post_ok(server.address, CHAT, &body);
        assert_eq!(plain["prompt_token_ids"], json!(case.prompt_ids), "{name}");
        assert_eq!(plain["choices"][0]["message"]["content"], case.text, "{name}");
        let images = case.prompt_ids.iter().filter(|id| **id == IMAGE).count();
        assert_eq!(plain["usage"]["prompt_tokens"], case.prompt_ids.len());
        assert_eq!(plain["usage"]["prompt_tokens_details"]["multimodal_tokens"], images);
        let stream = json!({"stream": true, "stream_options": {"include_usage": true}});
        let events = post(server.address, CHAT, &crate::support::client::with(body, stream)).events();
        let deltas = events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str());
        assert_eq!(deltas.collect::<String>(), case.text, "{name}");
        assert_eq!(events.last().unwrap()["usage"]["prompt_tokens_details"]["multimodal_tokens"], images);
    }
    server.wait_idle();
}

/// A message in Anthropic's form, where the system prompt is not a message.
fn anthropic(message: &Value) -> Value {
    let mut message = message.clone();
    for part in message["content"].as_array_mut().into_iter().flatten() {
        if let Some(url) = part["image_url"]["url"].as_str() {
            let data = url.split_once(',').unwrap().1;
            *part = json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}});
        }
    }
    message
}

/// A message in the form of the Responses API.
fn response_item(message: &Value) -> Value {
    let mut message = message.clone();
    for part in message["content"].as_array_mut().into_iter().flatten() {
        match part["image_url"]["url"].as_str() {
            Some(url) => *part = json!({"type": "input_image", "image_url": url, "detail": "auto"}),
            None => part["type"] = "input_text".into(),
        }
    }
    message
}

#[test]
fn the_other_apis_answer_as_chats() {
    let server = server();
    for name in ANSWERED {
        let (case, messages) = (case(name), messages(name));
        let messages = messages.as_array().unwrap();
        let is_system = |message: &&Value| message["role"] == "system";
        let system = messages.iter().find(is_system).map(|message| message["content"].clone());
        let turns: Vec<Value> = messages.iter().filter(|message| !is_system(message)).map(anthropic).collect();
        let mut body = json!({"messages": turns, "max_tokens": 40, "temperature": 0});
        body["system"] = system.unwrap_or_default();
        let answer = post_ok(server.address, MESSAGES, &body);
        assert_eq!(answer["content"][0]["text"], case.text, "{name}");
        assert_eq!(answer["usage"]["input_tokens"].as_u64().unwrap() + cached(&answer), case.prompt_ids.len() as u64);
        let items: Vec<Value> = messages.iter().map(response_item).collect();
        let body = json!({"input": items, "max_output_tokens": 40, "temperature": 0});
        let answer = post_ok(server.address, RESPONSES, &body);
        assert_eq!(answer["output"][0]["content"][0]["text"], case.text, "{name}");
        assert_eq!(answer["usage"]["input_tokens"], case.prompt_ids.len());
    }
}

/// Cached tokens, which Anthropic's API does not count among the input tokens.
fn cached(answer: &Value) -> u64 {
    answer["usage"]["cache_read_input_tokens"].as_u64().unwrap_or_default()
}

#[test]
fn images_in_results_of_tools_are_read_in_every_api() {
    let server = server();
    let call = json!({"id": "c", "type": "function", "function": {"name": "shot", "arguments": "{}"}});
    let messages = json!([
        user("Look."),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [text("Here:"), image("small.png")]},
    ]);
    let ids = prompt_ids(&server, messages);
    let prompt = Tokenizer::load(&tiny()).unwrap().decode_all(&ids);
    let pads = "<|image_pad|>".repeat(70);
    assert!(prompt.contains(&format!("<tool_response>\nHere:<|vision_start|>{pads}<|vision_end|>")), "{prompt}");
    let data = base64(&fixture("sources/small.png"));
    let source = json!({"type": "base64", "media_type": "image/jpeg", "data": data});
    let result = json!([{"type": "text", "text": "Here:"}, {"type": "image", "source": source}]);
    let turns = json!([
        user("Look."),
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "shot", "input": {}}]},
        user(json!([{"type": "tool_result", "tool_use_id": "c", "content": result}])),
    ]);
    let count = post_ok(server.address, "/v1/messages/count_tokens", &json!({"messages": turns}));
    assert_eq!(count["input_tokens"], ids.len());
    let url = data_url(&fixture("sources/small.png"));
    let output = json!([{"type": "input_text", "text": "Here:"}, {"type": "input_image", "image_url": url}]);
    let items = json!([
        user("Look."),
        {"type": "function_call", "call_id": "c", "name": "shot", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": output},
    ]);
    let answer = post_ok(server.address, RESPONSES, &json!({"input": items, "max_output_tokens": 1}));
    assert_eq!(answer["usage"]["input_tokens"], ids.len());
}

#[test]
fn odd_files_are_read_and_an_image_url_may_be_a_string() {
    let server = server();
    for file in ["alpha_lossless.webp", "animated.gif", "cmyk.jpg", "exif_rotated.jpg", "jpeg_named.png", "lossy.webp"]
    {
        let ids = prompt_ids(&server, json!([user(json!([part_of(&fixture(&format!("odd/{file}")))]))]));
        assert!(ids.contains(&IMAGE), "{file}");
    }
    let part = json!({"type": "image_url", "image_url": data_url(&fixture("sources/small.png"))});
    assert_eq!(
        prompt_ids(&server, json!([user(json!([part, text("What do you see?")]))])),
        case("one_small").prompt_ids
    );
}
