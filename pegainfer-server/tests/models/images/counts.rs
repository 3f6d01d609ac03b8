//! Counts of image tokens, sizes that requests ask for, and the prefix cache.

use super::*;
use crate::support::client::{get, with};
use pegainfer_bench::recording::Prompts;
use pegainfer_server::record::Recorder;

fn cached(response: &Value) -> u64 {
    response["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

#[test]
fn all_counts_agree() {
    let server = server();
    let messages = json!([user(json!([text("a"), image("small.png"), image("wide.png"), text("b")]))]);
    let body = json!({"messages": messages, "max_tokens": 1});
    let usage = post_ok(server.address, CHAT, &body)["usage"].clone();
    assert_eq!(usage["prompt_tokens_details"]["multimodal_tokens"], 70 + 64);
    let tokenized = post_ok(server.address, "/tokenize", &json!({"messages": messages}));
    assert_eq!(tokenized["count"], usage["prompt_tokens"]);
    let rendered = post_ok(server.address, "/v1/chat/completions/render", &body);
    assert_eq!(rendered["token_ids"], tokenized["tokens"]);
    let ids: Vec<u32> = serde_json::from_value(rendered["token_ids"].clone()).unwrap();
    let features = &rendered["features"];
    let placeholders = features["mm_placeholders"]["image"].as_array().unwrap();
    assert_eq!(placeholders.len(), 2);
    for (placeholder, tokens) in placeholders.iter().zip([70, 64]) {
        let offset = placeholder["offset"].as_u64().unwrap() as usize;
        assert_eq!(placeholder["length"], tokens);
        assert!(ids[offset..offset + tokens].iter().all(|id| *id == IMAGE) && ids[offset - 1] != IMAGE);
    }
    let hashes = features["mm_hashes"]["image"].as_array().unwrap();
    assert!(hashes.len() == 2 && hashes[0] != hashes[1] && hashes[0].as_str().unwrap().len() == 64, "{hashes:?}");
    let text_only = json!({"messages": [user("a")]});
    assert_eq!(post_ok(server.address, "/v1/chat/completions/render", &text_only)["features"], Value::Null);
    let usage = post_ok(server.address, CHAT, &text_only)["usage"].clone();
    assert!(usage["prompt_tokens_details"].get("multimodal_tokens").is_none(), "{usage}");
}

#[test]
fn the_same_image_is_found_in_the_prefix_cache() {
    let server = server();
    let ask = |file: &str| {
        let messages = json!([user(json!([image(file), text("What do you see?")]))]);
        post_ok(server.address, CHAT, &with(chat(messages), json!({"max_tokens": 2})))
    };
    let [cold, warm] = [ask("small.png"), ask("small.png")];
    let prompt = cold["usage"]["prompt_tokens"].as_u64().unwrap();
    let block = server.engine.limits().block_size as u64;
    assert_eq!((cached(&cold), cached(&warm)), (0, (prompt - 1) / block * block));
    assert_eq!(cold["choices"][0]["message"], warm["choices"][0]["message"]);
    // Another image of the same size begins in the first block.
    assert_eq!(cached(&ask("photo.jpg")), 0);
}

#[test]
fn choices_of_one_prompt_share_its_images() {
    let server = server();
    let messages = json!([user(json!([image("small.png"), text("What do you see?")]))]);
    let response = post_ok(server.address, CHAT, &with(chat(messages), json!({"n": 3})));
    let choices = response["choices"].as_array().unwrap();
    assert!(choices.len() == 3 && choices.iter().all(|choice| choice["message"] == choices[0]["message"]));
    assert_eq!(response["usage"]["prompt_tokens_details"]["multimodal_tokens"], 70);
}

/// The header of a GIF, which has no pixels.
fn header(width: u16, height: u16) -> Vec<u8> {
    [&b"GIF89a"[..], &width.to_le_bytes(), &height.to_le_bytes(), &[0, 0, 0]].concat()
}

#[test]
fn detail_and_areas_limit_the_tokens_and_counting_decodes_nothing() {
    let server = server();
    let count = |fields: Value, more: Value| {
        let image = with(json!({"url": data_url(&header(2000, 1000))}), fields);
        let messages = json!([user(json!([{"type": "image_url", "image_url": image}]))]);
        let tokens = post_ok(server.address, "/tokenize", &with(json!({"messages": messages}), more))["tokens"].clone();
        let ids: Vec<u32> = serde_json::from_value(tokens).unwrap();
        ids.into_iter().filter(|id| *id == IMAGE).count()
    };
    let full = 62 * 31;
    for (detail, tokens) in [("auto", full), ("high", full), ("original", full), ("low", 22 * 11)] {
        assert_eq!(count(json!({"detail": detail}), json!({})), tokens, "{detail}");
    }
    assert_eq!(count(json!({"detail": null}), json!({"mm_processor_kwargs": null})), full);
    assert_eq!(count(json!({}), json!({"mm_processor_kwargs": {"max_pixels": 100_352}})), 14 * 7);
    assert_eq!(count(json!({}), json!({"mm_processor_kwargs": {"min_pixels": 4_000_000}})), 89 * 45);
    let messages = json!([user(json!([part_of(&header(2000, 1000))]))]);
    let (status, error) = refusal(&server, CHAT, &json!({"messages": messages}));
    assert_eq!((status, &error["code"]), (400, &json!("invalid_image")), "{error}");
}

#[test]
fn the_flag_scales_images_down() {
    let mut options = Setup::default().options;
    options.limits.images.max_image_tokens = 32.try_into().unwrap();
    let server = server_with(&[], options);
    let ids = prompt_ids(&server, json!([user(json!([image("small.png")]))]));
    let tokens = ids.iter().filter(|id| **id == IMAGE).count();
    assert!((16..=32).contains(&tokens), "{tokens}");
}

#[test]
fn models_say_what_they_read() {
    let modalities =
        |server: &TestServer| get(server.address, "/v1/models").json()["data"][0]["input_modalities"].clone();
    assert_eq!(modalities(&server()), json!(["text", "image"]));
    let text_only = server_with(&["--language-model-only"], Setup::default().options);
    assert_eq!(modalities(&text_only), json!(["text"]));
    let messages = json!([user(json!([image("small.png")]))]);
    let (status, error) = refusal(&text_only, CHAT, &json!({"messages": messages}));
    assert_eq!((status, &error["code"]), (400, &json!("unsupported_parameter")));
    assert!(error["message"].as_str().unwrap().contains("this model reads only text"), "{error}");
    let kwargs = json!({"messages": [user("a")], "mm_processor_kwargs": {"max_pixels": 5000}});
    assert_eq!(refusal(&text_only, CHAT, &kwargs).1["param"], "mm_processor_kwargs");
}

#[test]
fn recordings_have_the_images_of_a_prompt() {
    let dir = crate::support::temp_dir::TempDir::new("recorded-images");
    let file = dir.0.join("requests.jsonl");
    let recorder = Recorder::create(&file, Prompts::Ids, "tiny", 1 << 20).unwrap();
    let server = server_with(&[], Options { recorder: Some(recorder.clone()), ..Options::default() });
    let messages = json!([user(json!([image("small.png"), image("wide.png")]))]);
    post_ok(server.address, CHAT, &json!({"messages": messages, "max_tokens": 1, "n": 2}));
    server.wait_idle();
    recorder.flush();
    let lines = std::fs::read_to_string(&file).unwrap();
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let images: Vec<usize> = lines
        .iter()
        .filter(|line| line.get("add").is_some())
        .map(|line| line["images"].as_array().map_or(0, Vec::len))
        .collect();
    assert_eq!(images, [2, 0], "the second choice refers to the first one");
    let read = pegainfer_bench::traces::Trace::read(&file).unwrap();
    let prompts: Vec<Vec<u32>> = read.requests.iter().map(|request| request.prompt(1 << 31, 1)).collect();
    assert!(prompts.len() == 2 && prompts[0] == prompts[1] && !prompts[0].contains(&IMAGE), "{prompts:?}");
}
