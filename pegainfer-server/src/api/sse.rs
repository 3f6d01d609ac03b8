//! Server-sent events: `data: {json}\n\n` for each chunk, and `data: [DONE]\n\n` at the end, even after an error. The
//! Responses and Messages APIs name their events and send no `[DONE]`.
//!
//! A stream shows that it is alive, because proxies and clients close a connection that is silent for a minute. Its
//! head is sent before a long prefill ends, and comments follow while no token arrives.

use super::body::Submitted;
use super::delta::{Counts, Delta};
use super::generation::Generation;
use super::large_response::INLINE;
use super::response_size;
use super::state::{AppState, over_budget};
use super::stream_head::Timer;
use super::timings::Timings;
use super::wire::Usage;
use crate::api_style::ApiStyle;
use crate::error::ApiError;
use crate::metrics::Choices;
use crate::output::{Outbox, ResponseShare};
use crate::tenant::Tenant;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt;
use futures_util::stream::{self, BoxStream, SelectAll, StreamExt};
use http_body_util::StreamBody;
use hyper::body::Frame;
use serde::Serialize;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Format of an endpoint's chunks.
pub trait ChunkWriter: Send + 'static {
    /// Adds the headers of the response.
    fn headers(headers: &mut HeaderMap) {
        stream_headers(headers);
    }
    /// The last frame of a stream that lost its writer. Only OpenAI's older APIs and gRPC have items so large that
    /// writing them can fail.
    fn lost(error: &ApiError) -> Frame<Bytes> {
        Frame::data(error_event(ApiStyle::OpenAi, error))
    }
    /// The trailers after the last event, in APIs that have any.
    fn trailers(&mut self) -> Option<HeaderMap> {
        None
    }
    /// Writes the beginning of a stream, if there is no delta yet. `usage` has the prompt tokens.
    fn begin(&mut self, _out: &mut Events, _usage: Usage) {}
    /// Writes the events of one delta. `counts` are its choice's tokens so far.
    fn delta(&mut self, out: &mut Events, index: usize, delta: Delta, counts: Counts);
    /// Writes the events after the last delta. `usage` counts the tokens of all choices.
    fn finish(&mut self, out: &mut Events, usage: Usage, metrics: Option<Timings>);
    /// Writes the event of a failed generation.
    fn error(&mut self, out: &mut Events, error: &ApiError) {
        out.push(&error.openai());
    }
    /// Writes the end of the stream, after [`finish`](Self::finish) or [`error`](Self::error).
    fn end(&mut self, out: &mut Events) {
        out.push_done();
    }
    /// Writes a keep-alive event while nothing else is sent.
    fn keep_alive(&mut self, out: &mut Events) {
        out.push_comment("keep-alive");
    }
}

/// Bytes that are ready to send.
#[derive(Default)]
pub struct Events(Vec<u8>);

impl Events {
    /// Appends one event.
    pub fn push(&mut self, chunk: &impl Serialize) {
        self.0.extend_from_slice(b"data: ");
        // Writing plain structs to memory cannot fail.
        let _ = serde_json::to_writer(&mut self.0, chunk);
        self.0.extend_from_slice(b"\n\n");
    }

    /// Appends one event with a name.
    pub fn push_named(&mut self, name: &str, chunk: &impl Serialize) {
        for part in ["event: ", name, "\n"] {
            self.0.extend_from_slice(part.as_bytes());
        }
        self.push(chunk);
    }

    /// Appends bytes that are no event of text.
    pub fn push_bytes(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        write(&mut self.0);
    }

    /// All events as text.
    #[cfg(test)]
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).unwrap()
    }

    fn push_comment(&mut self, text: &str) {
        self.0.extend_from_slice(format!(": {text}\n\n").as_bytes());
    }

    fn push_done(&mut self) {
        self.0.extend_from_slice(b"data: [DONE]\n\n");
    }
}

/// Under load, events are coalesced up to this many bytes before they are handed to the connection.
const MAX_COALESCED: usize = 16 << 10;

type Item = (usize, Counts, Option<Timings>, Result<Delta, ApiError>);

struct SseStream<F> {
    state: Arc<AppState>,
    tenant: Tenant,
    outbox: Option<Arc<Outbox>>,
    deltas: SelectAll<BoxStream<'static, Item>>,
    counts: Vec<Counts>,
    timings: Option<Timings>,
    /// Number of choices of each prompt.
    n: usize,
    writer: F,
    /// Results of the choices, for the log line of a failed stream.
    choices: Option<Arc<Choices>>,
    /// The next item, if it is known: a delta, or the end of all choices.
    pending: Option<Option<Item>>,
    /// True if that is the first item, and nothing has been written.
    silent: bool,
    keep_alive: Duration,
    last_write: Instant,
    /// Ends at `last_write` + `keep_alive` or earlier. It is reset only after it has ended, not for every token.
    timer: Timer,
    done: bool,
}

/// Responds with a stream of all choices, `n` consecutive ones per prompt. The head is sent with the first token, in
/// one write, or when the timer ends. A failure before that is an ordinary error response.
pub async fn respond<F: ChunkWriter>(
    state: Arc<AppState>,
    submitted: Submitted,
    generations: Vec<Generation>,
    n: usize,
    writer: F,
) -> Result<Response, ApiError> {
    let Submitted { mut timer, choices } = submitted;
    let counts = generations.iter().map(Generation::counts).collect();
    let tenant = generations.first().map(Generation::tenant).unwrap_or_default();
    let outbox = generations.first().and_then(Generation::outbox).cloned();
    let mut deltas: SelectAll<_> = generations.into_iter().enumerate().map(deltas_of).collect();
    let first = tokio::select! {
        biased;
        first = deltas.next() => Some(first),
        () = timer.as_mut() => None,
    };
    if let Some(Some((_, _, _, Err(error)))) = first {
        return Err(error);
    }
    let (keep_alive, last_write) = (state.options.keep_alive_interval, Instant::now());
    let sse = SseStream {
        state,
        tenant,
        outbox,
        deltas,
        counts,
        timings: None,
        n,
        writer,
        choices,
        silent: first.is_none(),
        pending: first,
        keep_alive,
        last_write,
        timer,
        done: false,
    };
    let frames = stream::unfold(Some(sse), |sse| async move {
        let mut sse = sse?;
        if sse.done {
            return sse.writer.trailers().map(|trailers| (Ok::<_, Infallible>(Frame::trailers(trailers)), None));
        }
        Some(match sse.coalesce().await {
            Ok((bytes, sse)) => (Ok(Frame::data(bytes)), Some(sse)),
            Err(error) => (Ok(F::lost(&error)), None),
        })
    });
    let mut response = Body::new(StreamBody::new(frames)).into_response();
    F::headers(response.headers_mut());
    Ok(response)
}

/// Adds the headers of a stream.
pub fn stream_headers(headers: &mut HeaderMap) {
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // nginx collects a response before forwarding it, unless told otherwise.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
}

/// True if a response is a stream of events.
pub fn is_stream(headers: &HeaderMap) -> bool {
    headers.get(header::CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"))
}

/// The last event of a stream that its endpoint could not begin or continue.
pub fn error_event(style: ApiStyle, error: &ApiError) -> Bytes {
    let mut out = Events::default();
    match style {
        ApiStyle::Anthropic => out.push_named("error", &error.anthropic(None)),
        ApiStyle::Responses => out.push_named("error", &error.responses_event()),
        // A gRPC call ends with trailers instead.
        ApiStyle::OpenAi | ApiStyle::Grpc => {
            out.push(&error.openai());
            out.push_done();
        }
    }
    out.0.into()
}

/// Resolves when the client has to be probed.
async fn probed(outbox: Option<&Outbox>) {
    match outbox {
        Some(outbox) => outbox.probed().await,
        None => std::future::pending().await,
    }
}

/// Bytes of an item.
fn size(item: &Option<Item>) -> u64 {
    match item {
        Some((_, _, _, Ok(delta))) => response_size::delta_bytes(delta),
        _ => 0,
    }
}

fn deltas_of((index, generation): (usize, Generation)) -> BoxStream<'static, Item> {
    stream::unfold(generation, move |mut generation| async move {
        let delta = generation.next().await?;
        Some(((index, generation.counts(), generation.timings(), delta), generation))
    })
    .boxed()
}

impl<F: ChunkWriter> SseStream<F> {
    /// Waits for something to send, and appends everything that is ready. After an error the stream is gone, along with
    /// the thread that was to write it.
    async fn coalesce(mut self) -> Result<(Bytes, Self), ApiError> {
        let mut out = Events::default();
        if std::mem::take(&mut self.silent) {
            self.writer.begin(&mut out, Usage::sum(self.counts.iter().copied(), self.n));
            self.writer.keep_alive(&mut out);
        }
        // Some deltas send nothing: some APIs send an argument only when it is complete.
        while out.0.is_empty() && !self.done {
            let next = match self.pending.take() {
                Some(pending) => Some(pending),
                None => self.next().await,
            };
            match next {
                Some(item) if size(&item) > INLINE => return self.write_large(item).await,
                Some(item) => self.write_ready(&mut out, item),
                None => {
                    self.writer.keep_alive(&mut out);
                    self.last_write = Instant::now();
                }
            }
        }
        self.last_write = Instant::now();
        Ok((out.0.into(), self))
    }

    /// Writes a large item off the async threads. It holds a share of the output budget until its bytes go to the
    /// connection.
    async fn write_large(mut self, item: Option<Item>) -> Result<(Bytes, Self), ApiError> {
        let (state, bytes, mut share) = (self.state.clone(), size(&item) as usize, ResponseShare::default());
        let (mut out, choices) = (Events::default(), self.choices.clone());
        if let Err(error) = state.output.grow(&mut share, self.tenant, bytes) {
            self.fail(&mut out, &over_budget(&error, &state));
            return Ok((out.0.into(), self));
        }
        let written = state.work(self.tenant, bytes, move |_| {
            self.write(&mut out, item);
            self.last_write = Instant::now();
            ((out.0.into(), self), share)
        });
        let written = written.await.map(|(written, _share)| written);
        written.inspect_err(|error| choices.iter().for_each(|choices| choices.failed(error)))
    }

    /// The next item; `None` if none arrives within the interval, or if the client has to be probed first.
    async fn next(&mut self) -> Option<Option<Item>> {
        loop {
            tokio::select! {
                biased;
                item = self.deltas.next() => return Some(item),
                () = self.timer.as_mut() => {}
                () = probed(self.outbox.as_deref()) => return None,
            }
            let due = self.last_write + self.keep_alive;
            if due <= Instant::now() {
                return None;
            }
            self.timer.as_mut().reset(due.into());
        }
    }

    /// Writes an item and all ready items after it, up to a large one.
    fn write_ready(&mut self, out: &mut Events, mut item: Option<Item>) {
        loop {
            self.write(out, item);
            if self.done || out.0.len() >= MAX_COALESCED {
                return;
            }
            match self.deltas.next().now_or_never() {
                Some(ready) if size(&ready) > INLINE => return self.pending = Some(ready),
                Some(ready) => item = ready,
                None => return,
            }
        }
    }

    fn write(&mut self, out: &mut Events, item: Option<Item>) {
        match item {
            Some((index, counts, timings, Ok(delta))) => {
                self.counts[index] = counts;
                self.timings = timings;
                self.writer.delta(out, index, delta, counts);
            }
            Some((_, _, _, Err(error))) => self.fail(out, &error),
            None => {
                let usage = Usage::sum(self.counts.iter().copied(), self.n);
                self.writer.finish(out, usage, self.timings);
                self.end(out);
            }
        }
    }

    fn fail(&mut self, out: &mut Events, error: &ApiError) {
        if let Some(choices) = &self.choices {
            choices.failed(error);
        }
        self.writer.error(out, error);
        self.end(out);
    }

    fn end(&mut self, out: &mut Events) {
        self.writer.end(out);
        self.done = true;
        // Dropping the generations cancels those that still run after an error.
        self.deltas.clear();
    }
}
