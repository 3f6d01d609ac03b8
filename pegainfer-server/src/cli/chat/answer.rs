//! One answer: sends the request and prints its server-sent events as they arrive.

use super::conversation::Conversation;
use super::screen::Screen;
use super::stats::{AnswerStats, Usage};
use crate::cli::local_server::LocalServer;
use anyhow::{Context, Result};
use axum::body::{Body, BodyDataStream, to_bytes};
use axum::response::Response;
use futures_util::StreamExt;
use serde::Deserialize;
use serde_json::Value;
use std::time::Instant;

/// Maximum bytes of an error response.
const MAX_ERROR: usize = 1 << 20;

/// How a request ended.
pub(super) enum Outcome {
    /// An answer, which may have been stopped.
    Answered {
        text: String,
        /// `None` for a stopped answer.
        stats: Option<AnswerStats>,
    },
    /// An error, with its message.
    Refused(String),
}

/// Requests the next message and prints it. Ctrl-C stops it: dropping the stream cancels the request.
pub(super) async fn run(server: &LocalServer, conversation: &Conversation, screen: &mut Screen) -> Result<Outcome> {
    let start = Instant::now();
    let interrupt = tokio::signal::ctrl_c();
    tokio::pin!(interrupt);
    let post = server.post("/v1/chat/completions", conversation.request()?);
    let response = tokio::select! {
        biased;
        result = &mut interrupt => {
            result.context("Ctrl-C cannot be handled")?;
            return Ok(Outcome::Refused("stopped before the answer began".into()));
        }
        response = post => response?,
    };
    if !response.status().is_success() {
        return Ok(Outcome::Refused(error_message(response).await));
    }
    let mut events = Events::from(response.into_body());
    let (mut text, mut end, mut first, mut usage) = (String::new(), None, None, None);
    loop {
        let event = tokio::select! {
            biased;
            result = &mut interrupt => {
                result.context("Ctrl-C cannot be handled")?;
                end = Some("stopped".to_owned());
                break;
            }
            event = events.next() => event?,
        };
        let Some(chunk) = event else { break };
        if let Some(error) = chunk.error {
            screen.end(None)?;
            return Ok(Outcome::Refused(message_of(&error)));
        }
        usage = chunk.usage.or(usage);
        for choice in chunk.choices {
            let Delta { reasoning, content } = choice.delta;
            let (reasoning, content) = (reasoning.unwrap_or_default(), content.unwrap_or_default());
            if !(reasoning.is_empty() && content.is_empty()) {
                first.get_or_insert_with(|| start.elapsed());
            }
            screen.reasoning(&reasoning)?;
            screen.content(&content)?;
            text += &content;
            if choice.finish_reason.as_deref() == Some("length") {
                end = Some(
                    "the maximum number of tokens is reached: --max-tokens, --max-model-len, or /reset".to_owned(),
                );
            }
        }
    }
    screen.end(end.as_deref())?;
    let stats = usage.map(|usage| AnswerStats { usage, first: first.unwrap_or_default(), total: start.elapsed() });
    Ok(Outcome::Answered { text, stats })
}

async fn error_message(response: Response) -> String {
    let status = response.status();
    let body = to_bytes(response.into_body(), MAX_ERROR).await.unwrap_or_default();
    match serde_json::from_slice::<Value>(&body) {
        Ok(value) => message_of(&value["error"]),
        Err(_) => status.to_string(),
    }
}

fn message_of(error: &Value) -> String {
    error["message"].as_str().map_or_else(|| error.to_string(), str::to_owned)
}

/// The shown fields of a chunk of the stream.
#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<ChunkChoice>,
    /// Only in the last chunk.
    usage: Option<Usage>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct ChunkChoice {
    delta: Delta,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Delta {
    reasoning: Option<String>,
    content: Option<String>,
}

/// The server-sent events of a body.
struct Events {
    stream: BodyDataStream,
    /// Bytes of an incomplete line.
    text: Vec<u8>,
}

impl Events {
    /// The next chunk; `None` at the end.
    async fn next(&mut self) -> Result<Option<Chunk>> {
        loop {
            while let Some(end) = self.text.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.text.drain(..=end).collect();
                // Other lines are empty, or comments that keep connections open.
                match line.trim_ascii().strip_prefix(b"data: ") {
                    Some(b"[DONE]") => return Ok(None),
                    Some(json) => {
                        return Ok(Some(serde_json::from_slice(json).context("the stream is not valid JSON")?));
                    }
                    None => {}
                }
            }
            let Some(bytes) = self.stream.next().await else { return Ok(None) };
            self.text.extend_from_slice(&bytes.context("the stream broke off")?);
        }
    }
}

impl From<Body> for Events {
    fn from(body: Body) -> Self {
        Self { stream: body.into_data_stream(), text: Vec::new() }
    }
}
