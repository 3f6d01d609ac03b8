//! Images that are refused: broken files, hostile ones, and images in wrong places. Each error names the part.

use super::*;
use crate::support::client::{get, with};

#[test]
fn broken_and_hostile_files_are_refused_by_name() {
    let server = server();
    let files = [
        ("aspect_201.png", "200 times"),
        ("bad_crc.png", "cannot be decoded"),
        ("bomb_30000x30000_bilevel.png", "30000 x 30000"),
        ("document.pdf", "PDF"),
        ("empty.png", "empty"),
        ("gif_65535.gif", "65535 x 65535"),
        ("header_only_60000x60000.png", "60000 x 60000"),
        ("tiff.tiff", "TIFF"),
        ("truncated.jpg", "incomplete"),
        ("truncated.png", "incomplete"),
        ("vector.svg", "SVG"),
        ("zero_width.png", "PNG"),
    ];
    for (file, words) in files {
        let bytes = fixture(&format!("refused/{file}"));
        let body = json!({"messages": [user("a"), user(json!([text("b"), part_of(&bytes)]))]});
        let (status, error) = refusal(&server, CHAT, &body);
        let message = error["message"].as_str().unwrap();
        assert_eq!((status, &error["param"], &error["code"]), (400, &json!("messages"), &json!("invalid_image")));
        assert!(message.starts_with("messages[1].content[1]: ") && message.contains(words), "{file}: {message}");
        let source = json!({"type": "base64", "media_type": "image/png", "data": base64(&bytes)});
        let body = json!({"messages": [user(json!([{"type": "image", "source": source}]))], "max_tokens": 1});
        let (status, error) = refusal(&server, MESSAGES, &body);
        let message = error["message"].as_str().unwrap();
        assert_eq!((status, &error["type"]), (400, &json!("invalid_request_error")));
        assert!(message.starts_with("messages[0].content[0]: ") && message.contains(words), "{file}: {message}");
        let part = json!({"type": "input_image", "image_url": data_url(&bytes)});
        let (status, error) = refusal(&server, RESPONSES, &json!({"input": [user(json!([part]))]}));
        let message = error["message"].as_str().unwrap();
        assert_eq!((status, &error["param"]), (400, &json!("input")));
        assert!(message.starts_with("input[0].content[0]: ") && message.contains(words), "{file}: {message}");
    }
    server.wait_idle();
    assert_eq!(get(server.address, "/health").status, 200);
}

#[test]
fn malformed_parts_of_chats_are_refused_by_name() {
    let server = server();
    let url = data_url(&fixture("sources/small.png"));
    let image = |fields: Value| json!({"type": "image_url", "image_url": fields});
    let parts = [
        (json!({"type": "image_url"}), "missing or empty"),
        (image(json!({})), "missing or empty"),
        (image(json!("")), "missing or empty"),
        (image(json!({"url": " "})), "missing or empty"),
        (image(json!({"url": 5})), "image_url.url"),
        (image(json!([])), "image_url"),
        (image(json!({"url": "http://127.0.0.1/a.png"})), "fetches no images"),
        (image(json!({"url": "HTTPS://example.com/a.png"})), "fetches no images"),
        (image(json!({"url": "file:///etc/passwd"})), "not a data URL"),
        (image(json!({"url": "ftp://a/b"})), "not a data URL"),
        (image(json!({"url": "/etc/passwd"})), "not a data URL"),
        (image(json!({"url": "data:image/png,abc"})), "not a data URL"),
        (image(json!({"url": "data:image/png;base64"})), "not a data URL"),
        (image(json!({"url": "data:image/png;base64,"})), "empty"),
        (image(json!({"url": "data:image/png;base64,%41%41"})), "invalid character"),
        (image(json!({"url": "data:image/png;base64,_-8="})), "URL-safe"),
        (image(json!({"url": "data:image/png;base64,AAAAA"})), "breaks off"),
        (image(json!({"url": "data:image/png;base64,AAAA"})), "no known format"),
        (image(json!({"url": url, "detail": "huge"})), "use low, high, original or auto"),
        (image(json!({"url": url, "detail": 1})), "image_url.detail"),
        (with(image(json!({"url": url})), json!({"uuid": "x"})), "uuid"),
        (json!({"type": "image_embeds", "image_embeds": "x"}), "image_embeds"),
        (json!({"type": "video_url", "video_url": {"url": "x"}}), "video_url"),
        (json!({"type": "input_audio", "input_audio": {}}), "input_audio"),
        (json!({"type": "file", "file": {}}), "file"),
        (json!({"type": "image", "image": url}), "\"image\""),
    ];
    for (part, words) in parts {
        let body = json!({"messages": [user(json!([text("a"), part]))]});
        let (status, error) = refusal(&server, CHAT, &body);
        let message = error["message"].as_str().unwrap();
        assert_eq!((status, &error["param"]), (400, &json!("messages")), "{part}: {message}");
        assert!(message.contains("messages[0].content[1]") && message.contains(words), "{part}: {message}");
    }
    let kwargs = [
        (json!({"min_pixels": 9_000_000}), "min_pixels is 9000000"),
        (json!({"max_pixels": 5}), "max_pixels is 5"),
        (json!({"max_pixels": 0}), "max_pixels"),
        (json!({"max_pixels": "a"}), "max_pixels"),
    ];
    for (kwargs, words) in kwargs {
        let messages = json!([user(json!([image(json!({"url": url}))]))]);
        let (status, error) = refusal(&server, CHAT, &json!({"messages": messages, "mm_processor_kwargs": kwargs}));
        assert!(status == 400 && error["message"].as_str().unwrap().contains(words), "{kwargs}: {error}");
    }
}

#[test]
fn malformed_parts_of_the_other_apis_are_refused_by_name() {
    let server = server();
    let url = data_url(&fixture("sources/small.png"));
    let sources = [
        (Value::Null, "source.type"),
        (json!({"type": "base64"}), "source.data"),
        (json!({"type": "base64", "data": 5}), "source.data"),
        (json!({"type": "url", "url": "https://example.com/a.png"}), "fetches no images"),
        (json!({"type": "url"}), "missing or empty"),
        (json!({"type": "file", "file_id": "x"}), "file as source"),
        (json!({"type": "content"}), "source.type"),
    ];
    for (source, words) in sources {
        let block = json!({"type": "image", "source": source});
        let result =
            json!({"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "a"}, block]});
        for (block, at) in [(block, "messages[0].content[1]"), (result, "messages[0].content[1].content[1]")] {
            let body = json!({"messages": [user(json!([text("a"), block]))], "max_tokens": 1});
            let (status, error) = refusal(&server, MESSAGES, &body);
            let message = error["message"].as_str().unwrap();
            assert!(status == 400 && message.starts_with(&format!("{at}: ")) && message.contains(words), "{message}");
        }
    }
    let parts = [
        (json!({"type": "input_image"}), "missing or empty"),
        (json!({"type": "input_image", "file_id": "file-1"}), "file_id"),
        (json!({"type": "input_image", "image_url": "https://a/b"}), "fetches no images"),
        (json!({"type": "input_image", "image_url": url, "detail": "tiny"}), "use low, high, original or auto"),
    ];
    for (part, words) in parts {
        let output = json!({"type": "function_call_output", "call_id": "c", "output": [part]});
        for (item, at) in [(user(json!([part])), "input[0].content[0]"), (output, "input[0].output[0]")] {
            let (status, error) = refusal(&server, RESPONSES, &json!({"input": [item]}));
            let message = error["message"].as_str().unwrap();
            assert!(status == 400 && message.starts_with(&format!("{at}: ")) && message.contains(words), "{message}");
        }
    }
}

#[test]
fn images_in_wrong_places_are_refused() {
    let mut options = Setup::default().options;
    options.limits.images.max_images = 2.try_into().unwrap();
    options.limits.images.max_image_bytes = 30_000;
    options.limits.images.max_image_pixels = 150_000;
    let server = server_with(&[], options);
    let small = || image("small.png");
    let refused = |path: &str, body: Value, words: &str| {
        let (status, error) = refusal(&server, path, &body);
        assert!(status == 400 && error["message"].as_str().unwrap().contains(words), "{words}: {error}");
    };
    let system = json!({"role": "system", "content": [small()]});
    refused(CHAT, json!({"messages": [system, user("a")]}), "messages[0].content[0]: a system message");
    let url = data_url(&fixture("sources/small.png"));
    let item = json!({"role": "developer", "content": [{"type": "input_image", "image_url": url}]});
    refused(RESPONSES, json!({"input": [item, user("a")]}), "input[0].content[0]: a system message");
    let three = json!([user(json!([small(), small()])), user(json!([small()]))]);
    refused(CHAT, json!({"messages": three}), "messages[1].content[0]: the request has more than 2 images");
    refused(CHAT, json!({"messages": [user(json!([image("wide.png")]))]}), "more than 30000 bytes");
    let halves = json!([user(json!([part_of(&fixture("sources/photo.jpg")), image("halves.jpg")]))]);
    refused(
        CHAT,
        json!({"messages": halves}),
        "messages[0].content[1]: the image has 560 x 336 pixels, more than 150000",
    );
    let truncated = json!({"messages": [user(json!([small()]))], "truncate_prompt_tokens": 20});
    refused(CHAT, truncated, "truncate_prompt_tokens");
    let tokens = json!({"messages": [user(json!([small()]))], "tokens": {"token_ids": [1, 2]}});
    refused(CHAT, tokens, "tokens cannot be combined");
    refused(CHAT, json!({"messages": [user("a")], "tokens": {"token_ids": [1, IMAGE]}}), "at position 1");
    refused("/v1/completions", json!({"prompt": [1, IMAGE]}), "at position 1");
    refused("/v1/completions", json!({"prompt": "a <|image_pad|>"}), "<|image_pad|> (4097)");
    refused("/inference/v1/generate", json!({"token_ids": [IMAGE], "sampling_params": {}}), "at position 0");
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"<|image_pad|>": {"type": "string"}}}}});
    refused(CHAT, json!({"messages": [user("a")], "tools": [tool]}), "1 image tokens");
}

#[test]
fn image_tokens_in_texts_are_plain_text() {
    let server = server();
    let literal = "say <|vision_start|><|image_pad|><|vision_end|><|video_pad|> again";
    let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": literal}}});
    let messages = json!([
        user(literal),
        {"role": "assistant", "content": literal, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": literal},
        user(json!([text(literal), image("small.png"), text(literal)])),
    ]);
    let tools = json!([{"type": "function", "function": {"name": "f", "description": literal}}]);
    let body = with(chat(messages), json!({"tools": tools, "max_tokens": 1}));
    let response = post_ok(server.address, CHAT, &body);
    let ids: Vec<u32> = serde_json::from_value(response["prompt_token_ids"].clone()).unwrap();
    let special: Vec<u32> = ids.iter().copied().filter(|id| (4097..=4100).contains(id)).collect();
    assert_eq!(special, [&[4099][..], &[IMAGE; 70], &[4100]].concat(), "only those of the image");
    let prompt = pegainfer_text::Tokenizer::load(&tiny()).unwrap().decode_all(&ids);
    assert_eq!(prompt.matches(literal).count(), 7, "{prompt}");
}

#[test]
fn a_template_that_shows_no_images_serves_only_text() {
    let dir = crate::support::temp_dir::TempDir::new("no-images");
    for file in std::fs::read_dir(tiny()).unwrap() {
        let path = file.unwrap().path();
        std::fs::copy(&path, dir.0.join(path.file_name().unwrap())).unwrap();
    }
    let template = "{% for message in messages %}{{ message.content }}{% endfor %}";
    std::fs::write(dir.0.join("chat_template.jinja"), template).unwrap();
    let args = Cli::parse_from(["pegainfer", "--device", "cpu"]).serve.engine;
    let engine = engine::load(&dir.0, &args).unwrap().handle;
    let server = TestServer::over(engine, Setup { model_dir: dir.0.clone(), ..Setup::default() });
    let models = get(server.address, "/v1/models").json();
    assert_eq!(models["data"][0]["input_modalities"], json!(["text"]));
    let (status, error) = refusal(&server, CHAT, &json!({"messages": [user(json!([image("small.png")]))]}));
    assert!(status == 400 && error["message"].as_str().unwrap().contains("reads only text"), "{error}");
}
