//! Responses of generating calls.

use super::request::{Report, ReportTokens};
use super::wire::{add_headers, push};
use crate::api::aborts::is_abort;
use crate::api::delta::{ChoiceOutput, Counts, Delta, Finish, PromptInfo, StopReason};
use crate::api::logprobs::MIN_LOGPROB;
use crate::api::params::Params;
use crate::api::sse::{ChunkWriter, Events};
use crate::api::timings::Timings;
use crate::api::wire::Usage;
use crate::error::ApiError;
use crate::grpc_status;
use axum::body::Bytes;
use axum::http::HeaderMap;
use hyper::body::Frame;
use pegainfer_core::engine::{TokenLogprobs, TokenOut};
use vllm_proto::candidate_token_info::TokenInfo;
use vllm_proto::finish_info::{FinishReason, StopReason as Stop};
use vllm_proto::{CandidateTokenInfo, FinishInfo, GenerateResponse, SequenceOutput};

/// Writes the responses of a stream.
pub struct ResponseWriter {
    report: Report,
    /// Counts of each sequence; `None` after its end.
    open: Vec<Option<Counts>>,
    /// True after the response with the prompt was written.
    has_begun: bool,
    /// The error that ended the stream.
    failure: Option<ApiError>,
    /// Keeps the call in the list of those that can be cancelled.
    _params: Params,
}

impl ResponseWriter {
    /// A writer of so many sequences. `prompt` counts the tokens of the prompt.
    pub fn new(report: Report, prompt: usize, params: Params) -> Self {
        let counts = Counts { prompt, ..Counts::default() };
        Self { report, open: vec![Some(counts); params.n], has_begun: false, failure: None, _params: params }
    }
}

impl ChunkWriter for ResponseWriter {
    fn headers(headers: &mut HeaderMap) {
        add_headers(headers);
    }

    fn lost(error: &ApiError) -> Frame<Bytes> {
        Frame::trailers(grpc_status::trailers(Some(error)))
    }

    fn trailers(&mut self) -> Option<HeaderMap> {
        Some(grpc_status::trailers(self.failure.as_ref()))
    }

    fn delta(&mut self, out: &mut Events, index: usize, delta: Delta, counts: Counts) {
        let mut output = ChoiceOutput::default();
        output.push(delta, true);
        if !std::mem::replace(&mut self.has_begun, true) {
            let prompt_info = Some(prompt_info(output.prompt.as_ref(), counts.prompt, self.report.prompt));
            out.push_bytes(|bytes| push(bytes, &GenerateResponse { prompt_info, outputs: None }));
        }
        self.open[index] = output.finish.is_none().then_some(counts);
        let outputs = Some(sequence(index, output, counts, self.report));
        out.push_bytes(|bytes| push(bytes, &GenerateResponse { prompt_info: None, outputs }));
    }

    fn finish(&mut self, _: &mut Events, _: Usage, _: Option<Timings>) {}

    /// A call that was cancelled by name succeeds: each open sequence ends as aborted. Other errors become the status.
    fn error(&mut self, out: &mut Events, error: &ApiError) {
        if !is_abort(error) {
            self.failure = Some(error.clone());
            return;
        }
        for (index, counts) in self.open.iter_mut().enumerate() {
            if let Some(counts) = counts.take() {
                let output = ChoiceOutput { finish: Some(aborted()), ..ChoiceOutput::default() };
                let outputs = Some(sequence(index, output, counts, self.report));
                out.push_bytes(|bytes| push(bytes, &GenerateResponse { prompt_info: None, outputs }));
            }
        }
    }

    fn end(&mut self, _: &mut Events) {}

    /// HTTP/2 has pings.
    fn keep_alive(&mut self, _: &mut Events) {}
}

/// End of a sequence that was cancelled by name.
pub fn aborted() -> Finish {
    Finish { reason: "abort", stop_reason: None }
}

/// The only response to a call that is not streamed.
pub fn whole(output: ChoiceOutput, counts: Counts, report: Report) -> GenerateResponse {
    let prompt_info = Some(prompt_info(output.prompt.as_ref(), counts.prompt, report.prompt));
    GenerateResponse { prompt_info, outputs: Some(sequence(0, output, counts, report)) }
}

fn prompt_info(prompt: Option<&PromptInfo>, num_tokens: usize, report: ReportTokens) -> vllm_proto::PromptInfo {
    let mut info = vllm_proto::PromptInfo { num_prompt_tokens: num_tokens as u32, ..Default::default() };
    let Some(PromptInfo { ids, logprobs }) = prompt else { return info };
    if report.ids {
        info.token_ids = ids.to_vec();
    }
    let Some(logprobs) = logprobs else { return info };
    // Nothing predicts the first token: zeros, as vLLM sends.
    if report.logprobs {
        info.logprobs = std::iter::once(0.0).chain(logprobs.iter().map(logprob)).collect();
        info.ranks = std::iter::once(0).chain(logprobs.iter().map(|token| token.rank)).collect();
    }
    if report.candidates {
        let others = ids.iter().skip(1).zip(logprobs.iter()).map(|(id, token)| others(*id, token));
        info.candidate_tokens = std::iter::once(CandidateTokenInfo::default()).chain(others).collect();
    }
    info
}

/// A part of a sequence, or all of it.
fn sequence(index: usize, output: ChoiceOutput, counts: Counts, report: Report) -> SequenceOutput {
    let ChoiceOutput { text, tokens, finish, .. } = output;
    let mut sequence = SequenceOutput {
        index: index as u32,
        text: if report.text { text } else { String::new() },
        num_tokens: tokens.len() as u32,
        finish_info: finish.map(|finish| finish_info(finish, tokens.last().map(|(token, _)| token), counts)),
        ..Default::default()
    };
    let report = report.output;
    for (token, _) in &tokens {
        if report.ids {
            sequence.token_ids.push(token.id);
        }
        let Some(logprobs) = &token.logprobs else { continue };
        if report.logprobs {
            sequence.logprobs.push(logprob(logprobs));
            sequence.ranks.push(logprobs.rank);
        }
        if report.candidates {
            sequence.candidate_tokens.push(others(token.id, logprobs));
        }
    }
    sequence
}

fn logprob(token: &TokenLogprobs) -> f32 {
    token.logprob.max(MIN_LOGPROB)
}

/// The most likely tokens of a position, other than its own.
fn others(id: u32, listed: &TokenLogprobs) -> CandidateTokenInfo {
    let others = listed.top.iter().zip(1..).filter(|((other, _), _)| *other != id);
    let info = |(&(id, logprob), rank): (&(u32, f32), u32)| TokenInfo { id, logprob: logprob.max(MIN_LOGPROB), rank };
    CandidateTokenInfo { tokens: others.map(info).collect() }
}

fn finish_info(finish: Finish, last: Option<&TokenOut>, counts: Counts) -> FinishInfo {
    let (reason, stop_reason) = match (finish.reason, finish.stop_reason) {
        ("length", _) => (FinishReason::Length, None),
        ("abort", _) => (FinishReason::Aborted, None),
        (_, Some(StopReason::Text(text))) => (FinishReason::Stop, Some(Stop::StopString(text))),
        (_, Some(StopReason::Token(id))) => (FinishReason::Stop, Some(Stop::StopTokenId(id))),
        (_, None) => {
            let eos = last.filter(|token| token.is_stop).map(|token| Stop::EosTokenId(token.id));
            (FinishReason::Stop, eos)
        }
    };
    FinishInfo {
        num_output_tokens: counts.completion as u32,
        finish_reason: reason.into(),
        stop_reason,
        num_cached_tokens: Some(counts.cached as u32),
        ..Default::default()
    }
}
