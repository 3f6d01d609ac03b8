//! Request tracing: one span for each stage, written to files for Perfetto or sent to an OpenTelemetry collector.
//!
//! # Layout
//! - [`Tracer`]: decides which requests are traced, and hands their spans to a writer thread.
//! - [`Trace`]: the spans of one request. [`ChoiceTrace`]: the spans of one of its choices, with the engine's
//!   timestamps.
//! - [`steps`]: engine steps as a trace, and files of slow ones.
//! - [`ChromeFiles`]: writes files. [`Otlp`]: sends to an OpenTelemetry collector.
//!
//! Spans are `fastrace` records, so any of its reporters can take them. `fastrace`'s collector is not used: span times
//! come from the engine's events, not from when the front end polled them. A request that is not traced costs one test
//! of an `Option` per stage.

mod choice;
mod chrome;
mod otlp;
pub mod steps;

pub use choice::{ChoiceTrace, Stages};
pub use chrome::ChromeFiles;
pub use otlp::Otlp;

use crate::error::ApiError;
use crate::flush::flush;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method};
use axum::response::{IntoResponse, Response};
use fastrace::collector::{EventRecord, Reporter, SpanContext, SpanId, SpanRecord, TraceId};
use std::borrow::Cow;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Request header of admins: 1 traces this request, 0 does not.
const TRACE_HEADER: HeaderName = HeaderName::from_static("x-trace");
/// Response header with the id of the trace.
const TRACE_ID_HEADER: HeaderName = HeaderName::from_static("x-trace-id");
/// Maximum number of traces waiting to be written; more are dropped.
const MAX_WAITING: usize = 1024;
/// Maximum size in bytes of traces waiting to be written; more are dropped.
const MAX_WAITING_BYTES: usize = 64 << 20;
/// Maximum number of spans given to a reporter in one call.
const MAX_BATCH: usize = 512;
/// Maximum time that the shutdown waits for the last traces.
const FLUSH: Duration = Duration::from_secs(2);

/// Attribute of the root span: HTTP status of the response.
const HTTP_STATUS: &str = "http.response.status_code";
/// Attribute of the root span of a failed request: the status, or `stream` if an event of a stream reported the
/// failure. A refusal (4xx) is not a server error, as in OpenTelemetry's conventions.
const ERROR: &str = "error.type";

/// Attributes of a span: names and values.
pub type Properties = Vec<(Cow<'static, str>, Cow<'static, str>)>;

enum Message {
    Spans { spans: Vec<SpanRecord>, bytes: usize },
    Flush(SyncSender<()>),
}

/// Traces waiting to be written.
#[derive(Debug, Default)]
struct Backlog {
    bytes: AtomicUsize,
    /// True if a trace was dropped because too many waited.
    overflowed: AtomicBool,
}

/// Decides which requests are traced, and passes their spans to the writer thread.
pub struct Tracer {
    writer: SyncSender<Message>,
    backlog: Arc<Backlog>,
    /// Fraction of the requests without an `x-trace` header that are traced.
    sampling_ratio: f64,
    seen: AtomicU64,
    /// The same moment on both clocks: monotonic, and nanoseconds of Unix time.
    epoch: (Instant, u64),
}

impl fmt::Debug for Tracer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tracer({})", self.sampling_ratio)
    }
}

impl Tracer {
    /// Starts the writer thread. Traces a fraction `sampling_ratio` (0 to 1) of the requests, evenly spread, and
    /// requests that ask for it.
    pub fn start(reporters: Vec<Box<dyn Reporter>>, sampling_ratio: f64) -> std::io::Result<Arc<Self>> {
        let (writer, spans) = sync_channel(MAX_WAITING);
        let backlog = Arc::new(Backlog::default());
        let shared = backlog.clone();
        std::thread::Builder::new().name("trace".into()).spawn(move || write(reporters, &spans, &shared))?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let epoch = (Instant::now(), now.as_nanos() as u64);
        Ok(Arc::new(Self { writer, backlog, sampling_ratio, seen: AtomicU64::new(0), epoch }))
    }

    /// Waits until all traces so far are written, at most for [`FLUSH`].
    pub fn flush(&self) {
        // The operator should not wait longer.
        if !flush(&self.writer, Message::Flush, FLUSH) {
            log::warn!("the last traces are not written: the disk or the collector takes longer than {FLUSH:?}");
        }
    }

    /// Hands a trace to the writer. If the writer falls behind (a slow disk), traces are dropped instead of delaying
    /// requests.
    fn send(&self, spans: Vec<SpanRecord>) {
        let bytes = spans.iter().map(|span| size_of_val(span) + size_of_val(span.events.as_slice())).sum();
        let waiting = self.backlog.bytes.fetch_add(bytes, Ordering::Relaxed);
        if waiting + bytes <= MAX_WAITING_BYTES && self.writer.try_send(Message::Spans { spans, bytes }).is_ok() {
            return;
        }
        self.backlog.bytes.fetch_sub(bytes, Ordering::Relaxed);
        if !self.backlog.overflowed.swap(true, Ordering::Relaxed) {
            log::warn!("traces are dropped, because the disk or the collector is too slow for them");
        }
    }

    /// Starts a trace if this request is sampled, or asks for one and may (`decides`).
    fn begin(self: &Arc<Self>, headers: &HeaderMap, name: &str, decides: bool) -> Result<Option<Arc<Trace>>, ApiError> {
        let sampled = match headers.get(TRACE_HEADER).filter(|_| decides).map(HeaderValue::as_bytes) {
            None => self.sample_next(),
            Some(b"0") => false,
            Some(b"1") => true,
            Some(_) => return Err(ApiError::invalid("x-trace", "x-trace must be 0 or 1")),
        };
        if !sampled {
            return Ok(None);
        }
        let given = headers.get("traceparent").and_then(|value| value.to_str().ok());
        let parent = given.and_then(SpanContext::decode_w3c_traceparent);
        let parent = parent.unwrap_or_else(|| SpanContext::new(TraceId::random(), SpanId::default()));
        let request_id = headers.get("x-request-id").and_then(|value| value.to_str().ok()).unwrap_or_default();
        Ok(Some(Arc::new(Trace {
            tracer: self.clone(),
            context: SpanContext::new(parent.trace_id, SpanId::random()),
            parent: parent.span_id,
            name: name.to_string(),
            request_id: request_id.to_string(),
            started: Instant::now(),
            status: AtomicU16::new(0),
            failed: AtomicBool::new(false),
            spans: Mutex::new(Vec::new()),
        })))
    }

    /// True if the next request is sampled: for `sampling_ratio` of the calls, evenly spread.
    fn sample_next(&self) -> bool {
        let seen = self.seen.fetch_add(1, Ordering::Relaxed) as f64;
        ((seen + 1.0) * self.sampling_ratio).floor() > (seen * self.sampling_ratio).floor()
    }

    fn unix_ns(&self, at: Instant) -> u64 {
        let (instant, unix_ns) = self.epoch;
        match at.checked_duration_since(instant) {
            Some(after) => unix_ns + after.as_nanos() as u64,
            None => unix_ns - (instant - at).as_nanos() as u64,
        }
    }
}

/// Writer thread: forwards waiting spans in batches, because a collector takes one request per batch.
fn write(mut reporters: Vec<Box<dyn Reporter>>, messages: &Receiver<Message>, backlog: &Backlog) {
    while let Ok(first) = messages.recv() {
        let (mut spans, mut size, mut waiting) = (Vec::new(), 0, None);
        for message in std::iter::once(first).chain(messages.try_iter()) {
            match message {
                Message::Spans { spans: more, bytes } => {
                    spans.extend(more);
                    size += bytes;
                }
                Message::Flush(done) => waiting = Some(done),
            }
            if waiting.is_some() || spans.len() >= MAX_BATCH {
                break;
            }
        }
        if !spans.is_empty() {
            reporters.iter_mut().for_each(|reporter| reporter.report(spans.clone()));
            backlog.bytes.fetch_sub(size, Ordering::Relaxed);
        }
        if let Some(done) = waiting {
            // The receiver may have timed out.
            let _ = done.send(());
        }
    }
}

/// The spans of one request. Dropping the last reference ends the request and sends its spans to the writer.
pub struct Trace {
    tracer: Arc<Tracer>,
    /// Context of the request's root span.
    context: SpanContext,
    /// The caller's span, from `traceparent`; 0 if there is none.
    parent: SpanId,
    name: String,
    request_id: String,
    started: Instant,
    /// HTTP status of the response; 0 before the response.
    status: AtomicU16,
    /// True if a choice failed.
    failed: AtomicBool,
    spans: Mutex<Vec<SpanRecord>>,
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Trace({})", self.context.trace_id)
    }
}

impl Trace {
    /// Adds a stage that ends now. It began at the end of the previous stage, or at the start of the request.
    pub fn stage(&self, name: &'static str) {
        let mut spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = spans.last().map(|span| span.begin_time_unix_ns + span.duration_ns);
        let begin_time_unix_ns = ended.unwrap_or_else(|| self.tracer.unix_ns(self.started));
        let duration_ns = self.tracer.unix_ns(Instant::now()).saturating_sub(begin_time_unix_ns);
        spans.push(SpanRecord { begin_time_unix_ns, duration_ns, ..self.record(name) });
    }

    fn add(&self, name: &'static str, from: Instant, to: Instant, properties: Properties, events: Vec<EventRecord>) {
        let begin_time_unix_ns = self.tracer.unix_ns(from);
        let duration_ns = (to - from).as_nanos() as u64;
        let span = SpanRecord { begin_time_unix_ns, duration_ns, properties, events, ..self.record(name) };
        self.spans.lock().unwrap_or_else(PoisonError::into_inner).push(span);
    }

    fn record(&self, name: impl Into<Cow<'static, str>>) -> SpanRecord {
        SpanRecord {
            trace_id: self.context.trace_id,
            span_id: SpanId::random(),
            parent_id: self.context.span_id,
            name: name.into(),
            ..SpanRecord::default()
        }
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        let name = std::mem::take(&mut self.name);
        let status = *self.status.get_mut();
        let mut properties: Properties = vec![("request_id".into(), std::mem::take(&mut self.request_id).into())];
        if status > 0 {
            properties.push((HTTP_STATUS.into(), status.to_string().into()));
        }
        if status >= 500 || *self.failed.get_mut() {
            properties.push((ERROR.into(), if status >= 500 { status.to_string() } else { "stream".into() }.into()));
        }
        let root = SpanRecord {
            span_id: self.context.span_id,
            parent_id: self.parent,
            begin_time_unix_ns: self.tracer.unix_ns(self.started),
            duration_ns: self.started.elapsed().as_nanos() as u64,
            properties,
            ..self.record(name)
        };
        let mut spans = vec![root];
        spans.append(self.spans.get_mut().unwrap_or_else(PoisonError::into_inner));
        self.tracer.send(spans);
    }
}

/// Permission to decide whether a request is traced, an extension of the request.
#[derive(Debug, Clone, Copy)]
pub struct MayTrace;

/// Middleware: starts a trace for each sampled API request, and sends its id to the client.
pub async fn attach(
    tracer: Option<&Arc<Tracer>>,
    mut request: Request,
    next: impl AsyncFnOnce(Request) -> Response,
) -> Response {
    let path = request.uri().path();
    let Some(tracer) = tracer.filter(|_| path.starts_with("/v1/") && request.method() == Method::POST) else {
        return next(request).await;
    };
    let decides = request.extensions().get::<MayTrace>().is_some();
    let trace = match tracer.begin(request.headers(), path, decides) {
        Ok(Some(trace)) => trace,
        Ok(None) => return next(request).await,
        Err(error) => return error.into_response(),
    };
    let id = HeaderValue::try_from(trace.context.trace_id.to_string());
    request.extensions_mut().insert(trace.clone());
    let mut response = next(request).await;
    trace.status.store(response.status().as_u16(), Ordering::Relaxed);
    if let Ok(id) = id {
        response.headers_mut().insert(TRACE_ID_HEADER, id);
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampling_is_spread_evenly_and_a_header_overrides_it() {
        let tracer = Tracer::start(vec![], 0.25).unwrap();
        let traced: Vec<bool> = (0..8).map(|_| tracer.sample_next()).collect();
        assert_eq!(traced, [false, false, false, true, false, false, false, true]);
        let asked = |value: &'static str, decides| {
            let headers = HeaderMap::from_iter([(TRACE_HEADER, HeaderValue::from_static(value))]);
            tracer.begin(&headers, "test", decides).map(|trace| trace.is_some())
        };
        assert!(asked("1", true).unwrap());
        assert!(!asked("0", true).unwrap());
        assert!(asked("yes", true).is_err());
        let tracer = Tracer::start(vec![], 0.0).unwrap();
        let headers = HeaderMap::from_iter([(TRACE_HEADER, HeaderValue::from_static("1"))]);
        assert!(tracer.begin(&headers, "test", false).unwrap().is_none(), "only those who may decide");
    }

    #[test]
    fn a_caller_s_trace_is_continued() {
        let tracer = Tracer::start(vec![], 1.0).unwrap();
        let parent = HeaderValue::from_static("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
        let headers = HeaderMap::from_iter([(HeaderName::from_static("traceparent"), parent)]);
        let trace = tracer.begin(&headers, "test", false).unwrap().unwrap();
        assert_eq!(trace.context.trace_id.to_string(), "0af7651916cd43dd8448eb211c80319c");
        assert_eq!(trace.parent, SpanId(0xb7ad_6b71_6920_3331));
    }
}
