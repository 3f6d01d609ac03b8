//! Submits the choices of a request to the engine.

use super::{Generation, PromptLogprobs, PromptReport};
use crate::api::delta::{Counts, PromptInfo};
use crate::api::model_state::ModelState;
use crate::api::params::Params;
use crate::api::quota::OpenRequest;
use crate::api::response_size;
use crate::api::token_rate::too_many;
use crate::error::ApiError;
use crate::rates::{Refused, Reservation};
use crate::rejection::Rejection;
use crate::trace::ChoiceTrace;
use axum::http::StatusCode;
use pegainfer_core::engine::{GenerateRequest, SubmitError, TokenStream};
use pegainfer_text::{Detokenizer, StopScanner};
use tokio::sync::watch;

impl Generation {
    /// Submits one request per choice, all or none: the first refusal cancels the others.
    pub fn submit_all(
        state: &ModelState,
        params: &Params,
        requests: Vec<GenerateRequest>,
        prompt_field: &'static str,
    ) -> Result<Vec<Self>, ApiError> {
        if params.include_metrics && requests.len() != 1 {
            let message = format!("include_metrics needs one choice of one prompt, got {}", requests.len());
            return Err(ApiError::invalid("include_metrics", message));
        }
        for request in &requests {
            state.model.engine.check(request).map_err(|e| ApiError::from_submit(e, prompt_field))?;
        }
        check_response_size(&requests, state.options.limits.max_response_bytes)?;
        let mut open = enter(state, params, requests.len())?;
        let (prompts, reserved) = reserve(state, params, &requests)?.unzip();
        let mut reserved = reserved.into_iter().flatten();
        if let Some(trace) = &params.trace {
            trace.stage("tokenize");
        }
        state.model.metrics.requested(params.n);
        let mut generations: Vec<Self> = Vec::with_capacity(requests.len());
        let choices = requests.len();
        for (choice, mut request) in requests.into_iter().enumerate() {
            request.label = Some(params.label(choice, choices));
            // The first choice of a prompt computes the prompt and its log-probabilities; the others find it in the
            // prefix cache.
            let first = choice - choice % params.n;
            let report = match generations.get(first) {
                Some(generation) => {
                    request.only_if_cached = false;
                    request.same_prompt_as = generation.stream.as_ref().map(TokenStream::id);
                    request.prompt_logprobs.take().map(|_| PromptReport::Shared(generation.report_of_prompt()))
                }
                None => request.prompt_logprobs.map(|_| PromptReport::own()),
            };
            let mut generation = Self::submit(state, params, request, generations.get(first), prompt_field)?;
            generation.record.trace(params.trace.clone().map(|trace| ChoiceTrace::new(trace, choice)));
            (generation.report, generation._open, generation.reserved) = (report, open.pop(), reserved.next());
            generations.push(generation);
        }
        // The prompts are computed even if the choices end early.
        prompts.into_iter().for_each(Reservation::keep);
        Ok(generations)
    }

    /// The log-probabilities that the first choice of a prompt will report.
    fn report_of_prompt(&self) -> watch::Receiver<Option<PromptLogprobs>> {
        match &self.report {
            Some(PromptReport::Own(sender)) => sender.subscribe(),
            Some(PromptReport::Shared(receiver)) => receiver.clone(),
            // The client did not ask for them, so nobody waits.
            None => watch::channel(None).1,
        }
    }

    /// Submits one choice. `first` is the first choice of the same prompt, if this is another one.
    fn submit(
        state: &ModelState,
        params: &Params,
        request: GenerateRequest,
        first: Option<&Self>,
        prompt_field: &'static str,
    ) -> Result<Self, ApiError> {
        let (prompt, max_tokens) = (request.prompt.len(), request.max_tokens);
        let image_tokens = request.images.iter().map(|span| span.image.tokens()).sum();
        let kept = params.keeps_prompt().then(|| PromptInfo { ids: request.prompt.clone(), logprobs: None });
        let echoed = kept.as_ref().filter(|_| params.echo);
        let count = |prompt: &PromptInfo| state.model.text.checkpoint.tokenizer.decode_all(&prompt.ids).chars().count();
        let chars = first.map_or_else(|| echoed.map_or(0, count), |first| first.chars);
        let recording = state
            .options
            .recorder
            .as_ref()
            .map(|recorder| recorder.add(&request, first.and_then(|first| first.recording.as_ref())));
        let stream = state.model.engine.submit(request).map_err(|e| {
            if matches!(e, SubmitError::QueueFull { .. }) {
                state.metrics.rejected(Rejection::QueueFull);
            }
            ApiError::from_submit(e, prompt_field)
        })?;
        if let Some(outbox) = &params.outbox {
            outbox.watch(stream.backlog());
        }
        // The engine also enforces the deadline: nobody may be polling when it passes.
        if let Some(deadline) = params.deadline {
            stream.cancel_at(deadline.at);
        }
        let record =
            state.model.metrics.request(params.choices.clone(), first.is_none(), prompt, max_tokens, stream.at());
        Ok(Self {
            stream: Some(stream),
            tokenizer: state.model.text.checkpoint.tokenizer.clone(),
            detokenizer: Detokenizer::new(params.show_special),
            scanner: StopScanner::new(&params.stop),
            stops: params.stop.clone(),
            include_stop: params.include_stop,
            stop_token_ids: params.stop_token_ids.clone(),
            max_tokens,
            prompt_only: params.max_tokens == Some(0),
            vector: None,
            min_tokens: params.min_tokens,
            counts: Counts { prompt, image_tokens, ..Counts::default() },
            prompt: kept,
            chars,
            deadline: params.deadline,
            cutoff: params.cutoff(&state.lifecycle),
            record,
            timed_from: params.include_metrics.then_some(params.received),
            report: None,
            tenant: params.tenant,
            outbox: params.outbox.clone(),
            _open: None,
            adapter: params.adapter_use(state),
            reserved: None,
            recording,
            _pictures: None,
            _model: state.model.clone(),
        })
    }
}

/// Counts requests among the open ones of their tenant.
fn enter(state: &ModelState, params: &Params, requests: usize) -> Result<Vec<OpenRequest>, ApiError> {
    state.quota.enter(params.tenant, requests).map_err(|message| {
        state.metrics.rejected(Rejection::RequestsPerKey);
        ApiError::new(StatusCode::TOO_MANY_REQUESTS, message).with_code("rate_limit_exceeded")
    })
}

/// Takes the tokens of the requests from the rate of their key: prompt tokens and maximum output tokens.
fn reserve(
    state: &ModelState,
    params: &Params,
    requests: &[GenerateRequest],
) -> Result<Option<(Reservation, Vec<Reservation>)>, ApiError> {
    let Some(meter) = &params.meter else { return Ok(None) };
    let prompts = requests.iter().step_by(params.n.max(1)).map(|request| request.prompt.len()).sum();
    let choices = requests.iter().map(|request| request.max_tokens);
    meter.take(choices.clone().fold(prompts, usize::saturating_add)).map_err(|refused| match refused {
        Refused::TooMany { .. } => {
            ApiError::invalid(params.names.max_tokens, refused.to_string()).with_code("exceeds_token_rate")
        }
        Refused::Exceeded(exceeded) => too_many(&exceeded, state),
    })?;
    let reservation = |tokens: usize| Reservation::new(meter.clone(), tokens);
    Ok(Some((reservation(prompts), choices.map(reservation).collect())))
}

/// Refuses requests whose response could become too large.
fn check_response_size(requests: &[GenerateRequest], limit: u64) -> Result<(), ApiError> {
    let bytes = response_size::bytes(requests);
    if bytes <= limit {
        return Ok(());
    }
    let message = format!(
        "the response may have {bytes} bytes, at most {limit} are given (--max-response-bytes): ask for fewer choices, \
         tokens or log-probabilities"
    );
    Err(ApiError::new(StatusCode::BAD_REQUEST, message).with_code("response_too_large"))
}
