//! A server with a scripted model, for `tools/agents-test`: it calls one tool, and answers with a text after the prompt
//! contains the result.
//!
//! Prints its address on the first line of stdout, and method, path and status of each request on stderr.

#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr, reason = "a test program")]

#[path = "../tests/support/mock.rs"]
#[allow(dead_code, reason = "the tests use the rest")]
mod mock;
#[path = "../tests/api/agents/scripted.rs"]
#[allow(dead_code, reason = "the tests use the rest")]
mod scripted;

use axum::extract::Request;
use axum::middleware::{self, Next};
use axum::response::Response;
use clap::Parser;
use mock::MockEngine;
use pegainfer_core::engine::{EngineConfig, EngineHandle};
use pegainfer_server::app::{App, Options};
use pegainfer_server::text_service::Checkpoint;
use pegainfer_text::Tokenizer;
use scripted::{Format, Reply};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::net::TcpListener;

/// Number of requests to answer.
const REQUESTS: usize = 1000;
/// Context length, larger than any agent's prompt.
const CONTEXT: usize = 262_144;

#[derive(Parser)]
struct Args {
    /// Tool to call first, and its arguments as a JSON object.
    #[arg(long, num_args = 2, value_names = ["NAME", "ARGUMENTS"])]
    call: Vec<String>,
    /// Text of every answer, for agents without tools.
    #[arg(long, conflicts_with = "call")]
    text: Option<String>,
    /// The answer after the tool's result.
    #[arg(long)]
    r#final: String,
    /// Port; 0 takes a free one.
    #[arg(long, default_value_t = 0)]
    port: u16,
}

/// The bundled checkpoint, for its tokenizer and template.
fn model_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/qwen3-tiny")
}

fn tokenizer() -> Tokenizer {
    Tokenizer::load(&model_dir()).unwrap()
}

/// The answer to a prompt.
fn reply(args: &Args, prompt: &str) -> Reply {
    let text = |content: &str| Reply { reasoning: "I know.".into(), content: content.into(), calls: vec![] };
    let [name, arguments] = args.call.as_slice() else { return text(args.text.as_ref().unwrap_or(&args.r#final)) };
    let offered = prompt.contains(&format!("\"name\": \"{name}\""));
    if !offered || prompt.contains("<tool_response>") {
        return text(&args.r#final);
    }
    let arguments: Value = serde_json::from_str(arguments).unwrap();
    Reply { reasoning: "I need a tool.".into(), content: String::new(), calls: vec![(name.clone(), arguments)] }
}

async fn log(request: Request, next: Next) -> Response {
    let line = format!("{} {}", request.method(), request.uri().path());
    let response = next.run(request).await;
    eprintln!("{line} {}", response.status().as_u16());
    response
}

#[tokio::main]
async fn main() {
    let args = Arc::new(Args::parse());
    let (engine, control) = MockEngine::replying("unscripted");
    for _ in 0..REQUESTS {
        let args = args.clone();
        control.script(move |prompt| reply(&args, prompt).text(Format::Json, prompt));
    }
    let engine = EngineHandle::spawn(engine.with_max_model_len(CONTEXT), EngineConfig::default()).unwrap();
    let checkpoint = Checkpoint::load(&model_dir()).unwrap();
    let app = App::new(engine, checkpoint, vec!["agent".into()], Options::default());
    let listener = TcpListener::bind(("127.0.0.1", args.port)).await.unwrap();
    println!("http://{}", listener.local_addr().unwrap());
    axum::serve(listener, app.router().layer(middleware::from_fn(log))).await.unwrap();
}
