//! Latencies and token counts of one request.

use super::choices::{ChoiceResult, Choices};
use super::model::ModelMetrics;
use super::outcome::Outcome;
use super::per_engine::RequestMetrics;
use crate::trace::{ChoiceTrace, Stages};
use std::sync::Arc;
use std::time::{Duration, Instant};

impl ModelMetrics {
    /// Starts the record of a newly submitted choice. `request` collects all choices of the HTTP request. `is_first` is
    /// true for the first choice of its prompt.
    pub fn request(
        self: &Arc<Self>,
        request: Option<Arc<Choices>>,
        is_first: bool,
        prompt_tokens: usize,
        max_tokens: usize,
        submitted: Instant,
    ) -> RequestRecord {
        if let Some(request) = &request {
            request.runs_on(self);
        }
        RequestRecord {
            metrics: self.clone(),
            engine: 0,
            request,
            is_first,
            prompt_tokens,
            cached_tokens: 0,
            accepted_draft_tokens: 0,
            tokens: 0,
            max_tokens,
            submitted,
            admitted: None,
            first_token: None,
            last_token: submitted,
            detokenizing: Duration::ZERO,
            ended: false,
            trace: None,
        }
    }
}

/// Record of one request. Dropping it early counts the request as aborted.
pub struct RequestRecord {
    metrics: Arc<ModelMetrics>,
    /// Number of the engine that has the request.
    engine: usize,
    /// Choices of the same HTTP request.
    request: Option<Arc<Choices>>,
    is_first: bool,
    prompt_tokens: usize,
    cached_tokens: usize,
    accepted_draft_tokens: usize,
    tokens: usize,
    max_tokens: usize,
    submitted: Instant,
    admitted: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Instant,
    detokenizing: Duration,
    ended: bool,
    trace: Option<ChoiceTrace>,
}

impl RequestRecord {
    /// Attaches a trace, which stores the stages.
    pub fn trace(&mut self, trace: Option<ChoiceTrace>) {
        self.trace = trace;
    }

    /// True if a trace is attached.
    pub fn is_traced(&self) -> bool {
        self.trace.is_some()
    }

    /// Sets the engine that has the request.
    pub fn runs_on(&mut self, engine: usize) {
        self.engine = engine;
    }

    /// Metrics of that engine's requests.
    fn metrics(&self) -> &RequestMetrics {
        self.metrics.requests(self.engine)
    }

    /// Adds the detokenization time of one token.
    pub fn detokenized(&mut self, time: Duration) {
        self.detokenizing += time;
    }

    /// Records that the request left the queue at `at`.
    pub fn admitted(&mut self, cached_tokens: usize, at: Instant) {
        self.cached_tokens = cached_tokens;
        self.admitted = Some(at);
        self.metrics().queue.observe((at - self.submitted).as_secs_f64());
    }

    /// Records a token emitted at `at`; `drafted` is that of `TokenOut`.
    pub fn token(&mut self, at: Instant, drafted: bool) {
        if self.first_token.is_none() {
            self.first_token = Some(at);
            self.metrics().time_to_first_token.observe((at - self.submitted).as_secs_f64());
        } else {
            self.metrics().inter_token.observe((at - self.last_token).as_secs_f64());
        }
        self.tokens += 1;
        self.accepted_draft_tokens += usize::from(drafted);
        self.last_token = at;
        if let Some(trace) = &mut self.trace {
            trace.token(at);
        }
    }

    /// Records the end of the request. Only the first call has an effect.
    pub fn end(&mut self, outcome: Outcome) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        let per_token = self.time_per_token();
        self.metrics.finished(self.engine, outcome);
        if matches!(outcome, Outcome::Stop | Outcome::Length) {
            self.complete(per_token);
        }
        self.report(outcome, per_token);
        if let Some(trace) = self.trace.take() {
            trace.end(self.stages(), outcome.name());
        }
    }

    /// The stages reached so far.
    pub fn stages(&self) -> Stages {
        Stages {
            submitted: self.submitted,
            admitted: self.admitted,
            first_token: self.first_token,
            last_token: self.last_token,
            engine: self.engine,
            cached_tokens: self.cached_tokens,
            accepted_draft_tokens: self.accepted_draft_tokens,
            detokenizing: self.detokenizing,
        }
    }

    fn complete(&self, per_token: Option<Duration>) {
        let metrics = self.metrics();
        let until_last = |from: Instant| (self.last_token - from).as_secs_f64();
        metrics.e2e.observe(until_last(self.submitted));
        metrics.prompt_tokens.observe(self.prompt_tokens as f64);
        metrics.generation_tokens.observe(self.tokens as f64);
        metrics.max_tokens.observe(self.max_tokens as f64);
        if let (Some(admitted), Some(first)) = (self.admitted, self.first_token) {
            metrics.prefill.observe((first - admitted).as_secs_f64());
            metrics.decode.observe(until_last(first));
            metrics.inference.observe(until_last(admitted));
        }
        if let Some(time) = per_token {
            metrics.time_per_output_token.observe(time.as_secs_f64());
        }
    }

    fn time_per_token(&self) -> Option<Duration> {
        let first = self.first_token?;
        let steps = u32::try_from(self.tokens.checked_sub(1)?).ok().filter(|&n| n > 0)?;
        Some((self.last_token - first) / steps)
    }

    fn report(&self, outcome: Outcome, per_token: Option<Duration>) {
        let Some(request) = &self.request else { return };
        let since = |at: Option<Instant>| at.map(|at| at - self.submitted);
        // All choices of a prompt share its tokens.
        let once_per_prompt = |tokens: usize| if self.is_first { tokens } else { 0 };
        request.add(ChoiceResult {
            prompt_tokens: once_per_prompt(self.prompt_tokens),
            cached_tokens: once_per_prompt(self.cached_tokens),
            tokens: self.tokens,
            outcome,
            queued: since(self.admitted),
            first_token: since(self.first_token),
            per_token,
        });
    }
}

impl Drop for RequestRecord {
    fn drop(&mut self) {
        self.end(Outcome::Abort);
    }
}
