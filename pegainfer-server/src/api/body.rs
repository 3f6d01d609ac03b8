//! Reads a request body: bounded in size and time, within the memory budget.

use super::content_encoding::Decoder;
use super::hold::Hold;
use super::json_size::ValueCounter;
use super::prefer;
use super::state::{ApiOptions, AppState, over_budget};
use super::stream_head::{StreamHead, Timer, head_timer};
use crate::allowed::Allowed;
use crate::budget::{BodyBuffer, BodyShare};
use crate::error::ApiError;
use crate::lifecycle::Deadline;
use crate::metrics::Choices;
use crate::output::Outbox;
use crate::rates::Meter;
use crate::tenant::Tenant;
use crate::trace::Trace;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use futures_util::StreamExt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::{Instant as Clock, timeout_at};

/// Maximum number of bytes of an oversized body that are read and discarded before the refusal: many clients read no
/// response before they have sent everything.
const MAX_DISCARD: usize = 64 << 20;

/// Bytes of a body that are decoded before the task yields to others.
const MAX_DECODED: usize = 64 << 10;

/// Everything of a request except its body.
#[derive(Debug, Clone)]
pub struct RequestContext {
    /// Headers of the request.
    pub headers: HeaderMap,
    /// Trace that records the stages of the request.
    pub trace: Option<Arc<Trace>>,
    /// Results of the choices, for the log line of the request.
    pub choices: Option<Arc<Choices>>,
    /// When the whole body had arrived.
    pub received: Instant,
    /// When the request is cancelled.
    pub deadline: Option<Deadline>,
    /// Tenant of the request.
    pub tenant: Tenant,
    /// Output that the client has not read yet; `None` for a request without a connection.
    pub outbox: Option<Arc<Outbox>>,
    /// Counts the tokens of the request, if its key has rates.
    pub meter: Option<Arc<Meter>>,
    /// The models and adapters that its key may use.
    pub allowed: Allowed,
    /// Memory and turns that the request holds until its prompt is tokenized.
    pub hold: Hold,
    head: Option<StreamHead>,
}

impl RequestContext {
    /// Announces a stream with this value of `x-ignored-fields`, so that its head may be sent early. The status of a
    /// request that wants to be served from the cache is not known before it is submitted.
    pub fn announce_stream(&self, ignored: Option<&HeaderValue>) {
        if let Some(head) = self.head.as_ref().filter(|_| !prefer::only_if_cached(&self.headers)) {
            head.announce(self.received, ignored);
        }
    }

    /// Says what a stream whose head was sent early waits for.
    pub fn announce_wait(&self, what: String) {
        if let Some(head) = &self.head {
            head.announce_wait(what);
        }
    }

    /// Called when the engine has the request; drops the rest of the context. If the response is a stream, the handler
    /// sends its head from now on.
    pub fn submitted(self) -> Submitted {
        let timer = self.head.and_then(|head| head.take_timer()).unwrap_or_else(|| head_timer(self.received));
        Submitted { timer, choices: self.choices }
    }
}

/// Parts of a request that its response needs.
pub struct Submitted {
    /// Ends when the head of a stream is due.
    pub timer: Timer,
    /// Results of the choices, for the log line of the request.
    pub choices: Option<Arc<Choices>>,
}

/// Time over which the rate of a body is measured, or the client timeout if that is shorter.
const RATE_WINDOW: Duration = Duration::from_secs(10);
/// Larger bodies are parsed off the async threads: a thousand of them at once would stop every stream for a second.
const INLINE: usize = 16 << 10;

/// A complete body and its share of the memory budget.
#[derive(Debug)]
pub struct RawBody {
    bytes: Vec<u8>,
    _share: BodyShare,
    hold: Hold,
}

impl Deref for RawBody {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl RawBody {
    /// Parses the body, a large one off the async threads, and frees it.
    pub async fn parse<T: Send + 'static>(
        self,
        state: &AppState,
        parse: impl FnOnce(&[u8]) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        if self.len() <= INLINE {
            return parse(&self);
        }
        let hold = self.hold.clone();
        hold.work(state, move |_| parse(&self)).await?
    }
}

/// Reads the headers and the body of a JSON request.
pub async fn read(request: Request, state: &AppState) -> Result<(RequestContext, RawBody), ApiError> {
    let content_type = request.headers().get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or("none");
    let essence = content_type.split(';').next().unwrap_or_default().trim();
    if !essence.eq_ignore_ascii_case("application/json") {
        let message =
            format!("Content-Type must be application/json, got {}", crate::error::truncate_for_error(content_type));
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
    }
    read_counted(request, state, |_, values| values).await
}

/// Reads the headers and the body of a request of any content type. `count` gives the number of values in the body, of
/// which each may take as much memory as a JSON value; its second argument is the number in JSON.
pub async fn read_counted(
    request: Request,
    state: &AppState,
    count: impl FnOnce(&[u8], usize) -> usize,
) -> Result<(RequestContext, RawBody), ApiError> {
    let (mut parts, body) = request.into_parts();
    let trace: Option<Arc<Trace>> = parts.extensions.remove();
    let deadline: Option<Deadline> = parts.extensions.remove();
    let tenant = parts.extensions.remove().unwrap_or_default();
    let Received { body, counter } = receive(body, tenant, &parts.headers, state).await?;
    let (bytes, share) = body.finish();
    let values = count(&bytes, counter.values());
    let hold = Hold::begin(tenant, bytes.len(), values, state).await?;
    if let Some(trace) = &trace {
        trace.stage("receive");
    }
    let (choices, head, meter) = (parts.extensions.remove(), parts.extensions.remove(), parts.extensions.remove());
    let (outbox, allowed) = (parts.extensions.remove(), parts.extensions.remove().unwrap_or_default());
    let (headers, received) = (parts.headers, Instant::now());
    let raw = RawBody { bytes, _share: share, hold: hold.clone() };
    let context =
        RequestContext { headers, trace, choices, received, deadline, tenant, outbox, meter, allowed, hold, head };
    Ok((context, raw))
}

/// A complete body.
struct Received {
    body: BodyBuffer,
    counter: ValueCounter,
}

async fn receive(body: Body, tenant: Tenant, headers: &HeaderMap, state: &AppState) -> Result<Received, ApiError> {
    let (options, limit) = (&state.options, state.max_body());
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<usize>().ok());
    // Refuse a client that sends `Expect: 100-continue` immediately (curl sends it for large bodies).
    if headers.contains_key(header::EXPECT) && announced.is_some_and(|length| length > limit) {
        return Err(too_large(limit));
    }
    let mut frames = body.into_data_stream();
    let mut received = Received { body: state.budget.buffer(tenant, limit), counter: ValueCounter::default() };
    let mut decoder = Decoder::from_headers(headers)?;
    // Bytes received, and the number of bytes that they decode to.
    let (mut sent, mut total, mut rate) = (0, 0, Rate::begin(options));
    while let Some(frame) = rate.next(frames.next()).await? {
        let frame = frame
            .map_err(|e| ApiError::new(StatusCode::BAD_REQUEST, format!("the request body could not be read: {e}")))?;
        sent += frame.len();
        let (length, waiting) = (frame.len(), Clock::now());
        decoder.feed(frame);
        while total <= limit
            && let Some(part) = decoder.next()?
        {
            total += part.len();
            if total <= limit {
                received.counter.push(&part);
                received.body.push(&part).await.map_err(|error| over_budget(&error, state))?;
            }
            if part.len() > MAX_DECODED {
                tokio::task::yield_now().await;
            }
        }
        if total <= limit {
            rate.received(length, waiting.elapsed());
        } else if sent > MAX_DISCARD {
            break;
        }
    }
    if total > limit {
        return Err(too_large(limit));
    }
    decoder.finish()?;
    Ok(received)
}

/// Checks that the bytes of a body keep coming.
struct Rate<'a> {
    options: &'a ApiOptions,
    window: Duration,
    /// End of the current window.
    end: Clock,
    /// Bytes received in the current window.
    bytes: usize,
    /// When the last byte came.
    last: Clock,
}

impl<'a> Rate<'a> {
    fn begin(options: &'a ApiOptions) -> Self {
        let (now, window) = (Clock::now(), RATE_WINDOW.min(options.client_timeout));
        Self { options, window, end: now + window, bytes: 0, last: now }
    }

    /// Waits for the next frame, as long as the rate allows.
    async fn next<T>(&mut self, frame: impl Future<Output = T>) -> Result<T, ApiError> {
        let mut frame = std::pin::pin!(frame);
        loop {
            let silent = self.last + self.options.client_timeout;
            match timeout_at(silent.min(self.end), frame.as_mut()).await {
                Ok(frame) => return Ok(frame),
                Err(_) if silent <= self.end => return Err(too_silent(self.options)),
                Err(_) => self.check_window()?,
            }
        }
    }

    /// Counts a frame. `stalled` is the time for which the server did not read from the client.
    fn received(&mut self, bytes: usize, stalled: Duration) {
        self.bytes += bytes;
        self.last = Clock::now();
        self.end += stalled;
    }

    /// Ends the current window and begins the next one.
    fn check_window(&mut self) -> Result<(), ApiError> {
        let min_bytes = self.options.limits.min_body_rate as f64 * self.window.as_secs_f64();
        if (self.bytes as f64) < min_bytes {
            let (seconds, rate) = (self.window.as_secs_f64(), self.options.limits.min_body_rate);
            let message = format!(
                "the request body came too slowly: {} bytes in {seconds} s, at least {rate} bytes/s are expected \
                 (--min-body-rate)",
                self.bytes
            );
            return Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, message));
        }
        (self.bytes, self.end) = (0, Clock::now() + self.window);
        Ok(())
    }
}

fn too_large(limit: usize) -> ApiError {
    let message = format!("the request body is larger than the limit of {limit} bytes (--max-body-size)");
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message)
}

fn too_silent(options: &ApiOptions) -> ApiError {
    let message = format!("no byte of the request body came for {} s", options.client_timeout.as_secs_f64());
    ApiError::new(StatusCode::REQUEST_TIMEOUT, message)
}
