//! `--kv-events-config` with a model that reads images: names and extra keys of blocks with images.

use super::kv_events::{Known, serve, sources};
use crate::support::client::{post_ok, post_with};
use crate::support::process::Process;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

const CHAT: &str = "/v1/chat/completions";
/// The image token of the test model.
const IMAGE: u64 = 4097;
/// Two images of 70 tokens, which look alike to who sees tokens only.
const FILES: [&str; 2] = ["sources/small.png", "sources/photo.jpg"];

/// A message with an image between two texts.
fn body(file: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pegainfer-images/tests/fixtures").join(file);
    let url = format!("data:;base64,{}", STANDARD.encode(std::fs::read(path).unwrap()));
    let text = |text: &str| json!({"type": "text", "text": text});
    let image = json!({"type": "image_url", "image_url": {"url": url}});
    let content = [text(&"Look at this. ".repeat(12)), image, text(&"What do you see? ".repeat(12))];
    json!({"messages": [{"role": "user", "content": content}], "max_tokens": 1})
}

/// Token ids of the prompt, and the hash of its image.
fn rendered(server: &Process, file: &str) -> (Vec<u64>, String) {
    let rendered = post_ok(server.address, "/v1/chat/completions/render", &body(file));
    let ids = serde_json::from_value(rendered["token_ids"].clone()).unwrap();
    (ids, rendered["features"]["mm_hashes"]["image"][0].as_str().unwrap().to_owned())
}

fn ask(server: &Process, rank: &str, file: &str) {
    assert_eq!(post_with(server.address, CHAT, ("X-data-parallel-rank", rank), &body(file)).status, 200);
}

#[test]
fn blocks_are_named_by_their_images_in_every_engine() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/qwen35-vl-tiny");
    let flags = ["--data-parallel-size", "2", "--model-path", model.to_str().unwrap()];
    // Few batches, so that a late subscriber reads a dump.
    let server = serve(&json!({"buffer_steps": 2}), &flags);
    for (rank, files) in [("0", FILES), ("1", [FILES[1], FILES[0]])] {
        for file in files {
            ask(&server, rank, file);
            std::thread::sleep(Duration::from_millis(100));
        }
    }
    std::thread::sleep(Duration::from_millis(200));
    let [first, second] = [0, 1].map(|rank| Known::replay(&sources(&server)[rank]));
    assert_eq!((&first.blocks, &first.extra_keys), (&second.blocks, &second.extra_keys));

    let prompts = FILES.map(|file| rendered(&server, file));
    let [(ids, _), (other, _)] = &prompts;
    assert!(ids == other && prompts[0].1 != prompts[1].1, "the images differ, and nothing else");
    let start = ids.iter().position(|id| *id == IMAGE).unwrap();
    let end = ids.iter().rposition(|id| *id == IMAGE).unwrap() + 1;
    let size = first.blocks.values().map(Vec::len).min().unwrap();
    let full = ids.len() / size * size;
    assert!(start > size && full > end + size, "blocks of {size} in {full} tokens, the image in {start}..{end}");
    for at in (0..full).step_by(size) {
        let hashes: Vec<u64> =
            first.blocks.iter().filter(|(_, text)| **text == ids[..at + size]).map(|b| *b.0).collect();
        // The text before the images is the same.
        assert_eq!(hashes.len(), if at + size <= start { 1 } else { 2 }, "the block at {at}");
        let mut keys: Vec<_> = hashes.iter().filter_map(|hash| first.extra_keys.get(hash).cloned()).collect();
        keys.sort_by_key(|keys| keys[0][0] != prompts[0].1);
        let own = prompts.iter().map(|(_, hash)| json!([[hash, start as i64 - at as i64]]));
        let expected: Vec<Value> = own.filter(|_| at < end && at + size > start).collect();
        assert_eq!(keys, expected, "the block at {at}");
    }
}
