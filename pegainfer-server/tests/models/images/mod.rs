//! Images behind every API: prompts and answers of the reference, counts, the prefix cache, and refusals.

mod answers;
mod counts;
mod refusals;
mod remote;

use crate::support::client::{post, post_ok};
use crate::support::{Setup, TestServer};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use clap::Parser;
use pegainfer_models::engine;
use pegainfer_server::app::Options;
use pegainfer_server::cli::Cli;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

const CHAT: &str = "/v1/chat/completions";
const MESSAGES: &str = "/v1/messages";
const RESPONSES: &str = "/v1/responses";
/// The image token of the test model.
const IMAGE: u32 = 4097;

fn tiny() -> PathBuf {
    crate::support::model_dir().with_file_name("qwen35-vl-tiny")
}

fn server() -> TestServer {
    server_with(&[], Setup::default().options)
}

fn server_with(flags: &[&str], options: Options) -> TestServer {
    let args = Cli::parse_from([&["pegainfer", "--device", "cpu"], flags].concat()).serve.engine;
    let engine = engine::load(&tiny(), &args).unwrap().handle;
    TestServer::over(engine, Setup { options, model_dir: tiny(), ..Setup::default() })
}

/// The bytes of a fixture of the crate for images.
fn fixture(file: &str) -> Vec<u8> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pegainfer-images/tests/fixtures");
    std::fs::read(dir.join(file)).unwrap()
}

fn base64(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

fn data_url(bytes: &[u8]) -> String {
    format!("data:image/png;base64,{}", base64(bytes))
}

/// A part of a chat completion with an image of the fixtures.
fn image(file: &str) -> Value {
    part_of(&fixture(&format!("sources/{file}")))
}

fn part_of(bytes: &[u8]) -> Value {
    json!({"type": "image_url", "image_url": {"url": data_url(bytes)}})
}

fn text(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

fn user(content: impl Into<Value>) -> Value {
    json!({"role": "user", "content": content.into()})
}

/// A greedy chat that also reports the ids of its prompt.
fn chat(messages: Value) -> Value {
    json!({"messages": messages, "max_tokens": 40, "temperature": 0, "return_token_ids": true})
}

/// Token ids of a chat's prompt.
fn prompt_ids(server: &TestServer, messages: Value) -> Vec<u32> {
    let mut body = chat(messages);
    body["max_tokens"] = 1.into();
    let response = post_ok(server.address, CHAT, &body);
    serde_json::from_value(response["prompt_token_ids"].clone()).unwrap()
}

/// Status and error of a request.
fn refusal(server: &TestServer, path: &str, body: &Value) -> (u16, Value) {
    let response = post(server.address, path, body);
    (response.status, response.json()["error"].clone())
}
