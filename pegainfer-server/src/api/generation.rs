//! One running choice: turns the engine's tokens into deltas of text. [`submit`] begins it, [`collect`] waits for all
//! of it.

mod collect;
mod submit;

use super::delta::{Counts, Delta, Finish, PromptInfo, StopReason};
use super::images::Pictures;
use super::quota::OpenRequest;
use super::timings::Timings;
use crate::adapters::OpenAdapter;
use crate::error::{ApiError, truncate_for_error};
use crate::fair_queue::Permits;
use crate::lifecycle::Deadline;
use crate::metrics::{Outcome, RequestRecord};
use crate::models::Lease;
use crate::output::Outbox;
use crate::rates::Reservation;
use crate::record::Recording;
use crate::tenant::Tenant;
use axum::http::StatusCode;
use futures_util::future::BoxFuture;
use pegainfer_bench::recording::format::Reason;
use pegainfer_core::engine::{FinishReason, TokenEvent, TokenLogprobs, TokenOut, TokenStream};
use pegainfer_text::{Detokenizer, StopScanner, Tokenizer};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::watch;

/// A submitted request. Dropping it cancels the request.
pub struct Generation {
    /// `None` once the choice is complete.
    stream: Option<TokenStream>,
    tokenizer: Arc<Tokenizer>,
    detokenizer: Detokenizer,
    scanner: StopScanner,
    stops: Vec<String>,
    /// True if the text includes the stop string.
    include_stop: bool,
    stop_token_ids: Vec<u32>,
    max_tokens: usize,
    /// True if the client asked for no token, only for its prompt.
    prompt_only: bool,
    /// The prompt's vector, once it is there.
    vector: Option<Box<[f32]>>,
    min_tokens: usize,
    counts: Counts,
    /// Sent with the first delta.
    prompt: Option<PromptInfo>,
    /// Characters decoded so far, including held-back ones and an echoed prompt.
    chars: usize,
    deadline: Option<Deadline>,
    /// Resolves when the request has to be cancelled.
    cutoff: BoxFuture<'static, ApiError>,
    record: RequestRecord,
    /// When the whole body had arrived, if the response has timings.
    timed_from: Option<Instant>,
    /// Log-probabilities of the prompt, if the client asked for them.
    report: Option<PromptReport>,
    tenant: Tenant,
    /// Output that the client has not read yet.
    outbox: Option<Arc<Outbox>>,
    /// Counts the choice among its tenant's open requests.
    _open: Option<OpenRequest>,
    /// Counts the choice among those of its adapter, if it has one.
    adapter: Option<OpenAdapter>,
    /// Tokens of the API key that are reserved for this choice.
    reserved: Option<Reservation>,
    /// Entry of the request in the recording, if the server records.
    recording: Option<Recording>,
    /// Memory of the prompt's images.
    _pictures: Option<Arc<Permits>>,
    /// Keeps the model in memory; dropped last.
    _model: Arc<Lease>,
}

/// Log-probabilities of a prompt's tokens from the second on.
type PromptLogprobs = Arc<[TokenLogprobs]>;

/// Where the log-probabilities of the prompt come from.
enum PromptReport {
    /// This choice computes them, for the others.
    Own(watch::Sender<Option<PromptLogprobs>>),
    /// The first choice of the prompt computes them.
    Shared(watch::Receiver<Option<PromptLogprobs>>),
}

impl PromptReport {
    fn own() -> Self {
        Self::Own(watch::Sender::new(None))
    }
}

impl Generation {
    /// Tenant of the request.
    pub fn tenant(&self) -> Tenant {
        self.tenant
    }

    /// Output that the client has not read yet; `None` for a request without a connection.
    pub fn outbox(&self) -> Option<&Arc<Outbox>> {
        self.outbox.as_ref()
    }

    /// The vector of the prompt, if the request asked for it and the engine has reported it.
    pub fn take_vector(&mut self) -> Option<Box<[f32]>> {
        self.vector.take()
    }

    /// Keeps the memory of the prompt's images until the choice is dropped.
    pub fn keep_pictures(&mut self, pictures: &Pictures) {
        self._pictures = pictures.permits();
    }

    /// Token counts so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Timings so far, if the client asked for them.
    pub fn timings(&self) -> Option<Timings> {
        Some(Timings::new(self.record.stages(), self.timed_from?, self.counts.completion))
    }

    /// The next delta; `None` after the last one. Each token gives one delta, and the last one carries the finish
    /// reason.
    pub async fn next(&mut self) -> Option<Result<Delta, ApiError>> {
        let mut last = None;
        loop {
            let stream = self.stream.as_mut()?;
            let event = tokio::select! {
                biased;
                event = stream.recv() => event,
                error = &mut self.cutoff => return Some(Err(self.cancel(error))),
            };
            let at = stream.at();
            self.record.runs_on(stream.engine());
            match event {
                Some(TokenEvent::Admitted { cached_tokens }) => {
                    self.counts.cached = cached_tokens;
                    self.adapter.iter_mut().for_each(OpenAdapter::admitted);
                    self.record.admitted(cached_tokens, at);
                }
                Some(TokenEvent::Prompt(logprobs)) => self.prompt_logprobs(logprobs.into()),
                Some(TokenEvent::Vector(vector)) => self.vector = Some(vector),
                Some(TokenEvent::Token(_)) if self.prompt_only => {
                    self.wait_for_report().await;
                    return Some(Ok(self.prompt_end()));
                }
                Some(TokenEvent::Token(token)) => {
                    self.wait_for_report().await;
                    let delta = self.token(token, at);
                    let is_last =
                        delta.token.as_ref().is_some_and(|t| t.is_stop) || self.counts.completion == self.max_tokens;
                    if delta.finish.is_some() || !is_last {
                        return Some(Ok(delta));
                    }
                    // The engine's `Finished` event follows immediately.
                    last = Some(delta);
                }
                Some(TokenEvent::Finished { reason, .. }) => {
                    self.record_end(match reason {
                        FinishReason::Stop(_) => Reason::Stop,
                        FinishReason::Length => Reason::Length,
                    });
                    return Some(Ok(self.finish(last, reason)));
                }
                Some(TokenEvent::Failed { error }) => return Some(Err(self.fail(error))),
                Some(TokenEvent::GrammarFailed { error }) => return Some(Err(self.fail_grammar(&error))),
                None => return Some(Err(self.ended_early())),
            }
        }
    }

    /// The only delta of a request for its prompt. The prompt's log-probabilities arrived before the token, which is
    /// dropped.
    fn prompt_end(&mut self) -> Delta {
        self.stream = None;
        self.record.end(Outcome::Length);
        let finish = Some(Finish { reason: "length", stop_reason: None });
        Delta { text: String::new(), token: None, offset: self.chars, finish, prompt: self.prompt.take() }
    }

    fn prompt_logprobs(&mut self, logprobs: PromptLogprobs) {
        if let Some(PromptReport::Own(sender)) = &self.report {
            sender.send_replace(Some(logprobs.clone()));
        }
        if let Some(prompt) = &mut self.prompt {
            prompt.logprobs = Some(logprobs);
        }
    }

    /// Before the first token: waits until the first choice of the prompt has the prompt's log-probabilities.
    async fn wait_for_report(&mut self) {
        if let Some(PromptReport::Own(_)) = &self.report {
            // No more log-probabilities will be sent.
            self.report = None;
        }
        let (Some(prompt), Some(PromptReport::Shared(report))) = (&mut self.prompt, &mut self.report) else { return };
        // If the first choice failed, so does the whole request.
        if let Ok(logprobs) = report.wait_for(Option::is_some).await {
            prompt.logprobs.clone_from(&logprobs);
        }
    }

    /// Records how the engine ended the request.
    fn record_end(&mut self, reason: Reason) {
        if let Some(recording) = &mut self.recording {
            recording.ended(reason);
        }
    }

    fn token(&mut self, token: TokenOut, at: Instant) -> Delta {
        self.counts.completion += 1;
        if let Some(recording) = &mut self.recording {
            recording.token(token.id);
        }
        self.record.token(at, token.drafted);
        if let Some(reserved) = &mut self.reserved {
            reserved.spend();
        }
        let started = (self.timed_from.is_some() || self.record.is_traced()).then(Instant::now);
        let offset = self.chars;
        let mut decoded = String::new();
        if !token.is_stop || self.include_stop {
            self.detokenizer.push(&self.tokenizer, token.id, &mut decoded);
        }
        let (text, finish) = self.scan(&decoded);
        if let Some(started) = started {
            self.record.detokenized(started.elapsed());
        }
        Delta { text, token: Some(token), offset, finish, prompt: self.prompt.take() }
    }

    /// Looks for stop strings in decoded text, except in the first `min_tokens` tokens. A match ends the choice;
    /// dropping the stream cancels the request in the engine.
    fn scan(&mut self, decoded: &str) -> (String, Option<Finish>) {
        self.chars += decoded.chars().count();
        if self.counts.completion <= self.min_tokens {
            return (decoded.to_owned(), None);
        }
        let mut text = String::new();
        let finish = self.scanner.push(decoded, &mut text).map(|found| {
            self.stream = None;
            self.record.end(Outcome::Stop);
            Finish { reason: "stop", stop_reason: Some(StopReason::Text(self.stops[found].clone())) }
        });
        if let Some(Finish { stop_reason: Some(StopReason::Text(stop)), .. }) =
            finish.as_ref().filter(|_| self.include_stop)
        {
            text.push_str(stop);
        }
        (text, finish)
    }

    /// Completes the last delta with the text that was held back.
    fn finish(&mut self, last: Option<Delta>, reason: FinishReason) -> Delta {
        let (text, offset) = (String::new(), self.chars);
        let mut delta = last.unwrap_or(Delta { text, token: None, offset, finish: None, prompt: None });
        let mut rest = String::new();
        self.detokenizer.finish(&mut rest);
        let (text, stopped) = self.scan(&rest);
        delta.text += &text;
        if stopped.is_some() {
            delta.finish = stopped;
            return delta;
        }
        self.scanner.finish(&mut delta.text);
        self.stream = None;
        delta.finish = Some(match reason {
            FinishReason::Length => {
                self.record.end(Outcome::Length);
                Finish { reason: "length", stop_reason: None }
            }
            FinishReason::Stop(id) => {
                self.record.end(Outcome::Stop);
                let asked_for = self.stop_token_ids.contains(&id);
                Finish { reason: "stop", stop_reason: asked_for.then_some(StopReason::Token(id)) }
            }
        });
        delta
    }

    /// The engine ended the stream early: the deadline passed, or the engine stopped.
    fn ended_early(&mut self) -> ApiError {
        match self.deadline {
            Some(deadline) if deadline.at <= Instant::now() => self.cancel(deadline.error()),
            _ => self.fail("the engine stopped before the request was complete".into()),
        }
    }

    /// Cancels the request.
    fn cancel(&mut self, error: ApiError) -> ApiError {
        self.stream = None;
        self.record.end(Outcome::Abort);
        error
    }

    /// The grammar allows no further token.
    fn fail_grammar(&mut self, error: &str) -> ApiError {
        self.record_end(Reason::Failed);
        self.stream = None;
        self.record.end(Outcome::Error);
        let message = format!("the grammar of the request cannot be followed: {}", truncate_for_error(error));
        ApiError::new(StatusCode::BAD_REQUEST, message).with_code("grammar_failed")
    }

    fn fail(&mut self, error: String) -> ApiError {
        self.record_end(Reason::Failed);
        self.stream = None;
        self.record.end(Outcome::Error);
        ApiError::internal(error)
    }
}
