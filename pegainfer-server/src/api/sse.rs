//! Server-sent events: `data: {json}\n\n` for each chunk, `data: [DONE]\n\n` at the end, also after an error. The Responses
//! and Messages APIs name their events and send no `[DONE]`.

use super::delta::{Counts, Delta};
use super::generation::Generation;
use super::stream_options::StreamOptions;
use super::timings::Timings;
use super::wire::Usage;
use crate::error::ApiError;
use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt;
use futures_util::stream::{self, BoxStream, SelectAll, StreamExt};
use serde::Serialize;
use std::convert::Infallible;

/// Format of an endpoint's chunks.
pub trait ChunkWriter: Send + 'static {
    /// Writes the events of one delta. `usage` is put into the chunk unchanged.
    fn delta(&mut self, out: &mut Events, index: usize, delta: Delta, usage: Option<Option<Usage>>);
    /// Writes the events after the last delta with `include_usage` or `include_metrics`: in OpenAI's older APIs a chunk that
    /// has only token counts.
    fn usage(&mut self, out: &mut Events, usage: Usage, metrics: Option<Timings>);
    /// Writes the event of a failed generation.
    fn error(&mut self, out: &mut Events, error: &ApiError) {
        out.push_text(&error.body());
    }
    /// Writes the end of the stream.
    fn end(&mut self, out: &mut Events) {
        out.push_text("[DONE]");
    }
}

/// Bytes that are ready to be sent.
#[derive(Default)]
pub struct Events(Vec<u8>);

impl Events {
    /// Appends one event.
    pub fn push(&mut self, chunk: &impl Serialize) {
        self.0.extend_from_slice(b"data: ");
        // Writing our own plain structs to memory cannot fail.
        let _ = serde_json::to_writer(&mut self.0, chunk);
        self.0.extend_from_slice(b"\n\n");
    }

    /// Appends one event with a name.
    pub fn push_named(&mut self, name: &str, chunk: &impl Serialize) {
        self.0.extend_from_slice(format!("event: {name}\n").as_bytes());
        self.push(chunk);
    }

    fn push_text(&mut self, data: &str) {
        self.0.extend_from_slice(format!("data: {data}\n\n").as_bytes());
    }
}

/// Under load, events are coalesced up to this many bytes before they are handed to the connection.
const MAX_COALESCED: usize = 16 << 10;

type Item = (usize, Counts, Option<Timings>, Result<Delta, ApiError>);

struct SseStream<F> {
    deltas: SelectAll<BoxStream<'static, Item>>,
    counts: Vec<Counts>,
    timings: Option<Timings>,
    /// Number of choices of each prompt.
    n: usize,
    options: StreamOptions,
    writer: F,
    /// The delta that was awaited before the response began.
    first: Option<Item>,
    done: bool,
}

/// Responds with a stream of all choices, `n` of each prompt in a row. The head is sent with the first token, in one write;
/// a failure before it is an ordinary error response.
pub async fn respond<F: ChunkWriter>(
    generations: Vec<Generation>,
    n: usize,
    writer: F,
    options: StreamOptions,
) -> Result<Response, ApiError> {
    let counts = generations.iter().map(Generation::counts).collect();
    let mut deltas: SelectAll<_> = generations.into_iter().enumerate().map(deltas_of).collect();
    let first = deltas.next().await;
    if let Some((_, _, _, Err(error))) = first {
        return Err(error);
    }
    let sse = SseStream { deltas, counts, timings: None, n, options, writer, first, done: false };
    let bytes = stream::unfold(sse, |mut sse| async move {
        let bytes = sse.coalesce().await?;
        Some((Ok::<_, Infallible>(bytes), sse))
    });
    let headers = [(header::CONTENT_TYPE, "text/event-stream; charset=utf-8"), (header::CACHE_CONTROL, "no-cache")];
    Ok((headers, Body::from_stream(bytes)).into_response())
}

fn deltas_of((index, generation): (usize, Generation)) -> BoxStream<'static, Item> {
    stream::unfold(generation, move |mut generation| async move {
        let delta = generation.next().await?;
        Some(((index, generation.counts(), generation.timings(), delta), generation))
    })
    .boxed()
}

impl<F: ChunkWriter> SseStream<F> {
    /// Waits for a delta and appends those that are ready as well.
    async fn coalesce(&mut self) -> Option<Bytes> {
        if self.done {
            return None;
        }
        let mut out = Events::default();
        let mut next = match self.first.take() {
            Some(item) => Some(item),
            None => self.deltas.next().await,
        };
        loop {
            self.write(&mut out, next);
            if self.done || out.0.len() >= MAX_COALESCED {
                break;
            }
            match self.deltas.next().now_or_never() {
                Some(ready) => next = ready,
                None => break,
            }
        }
        Some(out.0.into())
    }

    fn write(&mut self, out: &mut Events, item: Option<Item>) {
        match item {
            Some((index, counts, timings, Ok(delta))) => {
                self.counts[index] = counts;
                self.timings = timings;
                let usage = if self.options.continuous_usage {
                    Some(Some(Usage::sum([counts], 1)))
                } else {
                    // With include_usage, OpenAI writes null in all chunks but the extra one.
                    self.options.include_usage.then_some(None)
                };
                self.writer.delta(out, index, delta, usage);
            }
            Some((_, _, _, Err(error))) => {
                self.writer.error(out, &error);
                self.end(out);
            }
            None => {
                if self.options.include_usage || self.timings.is_some() {
                    let usage = Usage::sum(self.counts.iter().copied(), self.n);
                    self.writer.usage(out, usage, self.timings);
                }
                self.end(out);
            }
        }
    }

    fn end(&mut self, out: &mut Events) {
        self.writer.end(out);
        self.done = true;
        // Dropping the generations cancels those that still run after an error.
        self.deltas.clear();
    }
}
