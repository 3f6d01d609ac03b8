//! `Inference.Generate` and `Inference.GenerateStream`.

use super::fields::Fields;
use super::output::{ResponseWriter, aborted, whole};
use super::request::{CompletionFields, NAMES, Report};
use super::wire::{self, Call};
use crate::api::aborts::{AbortEntry, is_abort};
use crate::api::body::{RequestContext, Submitted};
use crate::api::completion::{Completion, CompletionInput};
use crate::api::delta::ChoiceOutput;
use crate::api::generation::Generation;
use crate::api::large_response::GrowingResponse;
use crate::api::model_state::{ModelState, Wanted, unknown};
use crate::api::params::Params;
use crate::api::policy::with_ignored;
use crate::api::sse;
use crate::api::state::AppState;
use crate::error::{ApiError, truncate_for_error};
use crate::ids;
use axum::extract::{Request, State};
use axum::http::HeaderValue;
use axum::response::Response;
use std::sync::Arc;
use vllm_proto::GenerateRequest;

/// vLLM's default of `max_new_tokens`.
const DEFAULT_MAX_TOKENS: usize = 20;

/// A call that the engine has.
struct SubmittedCall {
    state: ModelState,
    params: Params,
    generations: Vec<Generation>,
    report: Report,
    submitted: Submitted,
    /// Value of `x-ignored-fields`.
    ignored: Option<HeaderValue>,
}

/// Handles `Inference.Generate`.
pub async fn generate(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let SubmittedCall { state, params, generations, report, submitted: _, ignored } =
        submit(&state, request, false).await?;
    let growing = GrowingResponse::new(params.tenant);
    let mut generation = generations.into_iter().next().ok_or_else(|| ApiError::internal("no sequence was started"))?;
    let mut output = ChoiceOutput::default();
    while let Some(delta) = generation.next().await {
        match delta {
            Ok(delta) => {
                growing.add(&delta, &state)?;
                output.push(delta, true);
            }
            Err(error) if is_abort(&error) => output.finish = Some(aborted()),
            Err(error) => return Err(error),
        }
    }
    let counts = generation.counts();
    let write = move || {
        let mut bytes = Vec::new();
        wire::push(&mut bytes, &whole(output, counts, report));
        bytes
    };
    let (bytes, share) = growing.write(&state, write).await?;
    Ok(with_ignored(wire::reply_bytes(bytes, share), ignored))
}

/// Handles `Inference.GenerateStream`.
pub async fn generate_stream(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let SubmittedCall { state, params, generations, report, submitted, ignored } =
        submit(&state, request, true).await?;
    let (n, prompt) = (params.n, generations.first().map_or(0, |generation| generation.counts().prompt));
    let writer = ResponseWriter::new(report, prompt, params);
    let response = sse::respond(state.server, submitted, generations, n, writer).await?;
    Ok(with_ignored(response, ignored))
}

/// Reads a call and gives it to the engine.
async fn submit(state: &Arc<AppState>, request: Request, streams: bool) -> Result<SubmittedCall, ApiError> {
    let Call { context, message, unknown }: Call<GenerateRequest> =
        wire::read(request, state, &Fields::GENERATE).await?;
    let fields = CompletionFields::new(message)?;
    if !streams && fields.generation.n.is_some_and(|n| n.count() > 1) {
        let message = "a response holds one sequence: call GenerateStream for sampling.num_sequences above 1";
        return Err(ApiError::invalid("sampling.num_sequences", message));
    }
    let ignored: Vec<&str> = fields.ignored.iter().copied().chain(unknown.iter().map(String::as_str)).collect();
    let ignored = state.policy.check_ignored(&ignored)?;
    let abort = Arc::new(state.aborts.enter(context.tenant, name(&fields, &context)?));
    tokio::select! {
        biased;
        error = abort.aborted() => Err(error),
        submitted = run(state, context, fields, ignored, abort.clone()) => submitted,
    }
}

/// The name of a call for `Abort`: its own, or the one in the header `x-request-id`.
fn name(fields: &CompletionFields, context: &RequestContext) -> Result<String, ApiError> {
    fields.sampling.request_id.clone().map_or_else(|| ids::request_id(&context.headers), Ok)
}

async fn run(
    state: &Arc<AppState>,
    context: RequestContext,
    fields: CompletionFields,
    ignored: Option<HeaderValue>,
    abort: Arc<AbortEntry>,
) -> Result<SubmittedCall, ApiError> {
    let CompletionFields { prompt, generation, mut sampling, structured, logprobs, report, .. } = fields;
    let state = model(state, fields.model, fields.adapter, &context).await?;
    if !fields.has_temperature && !state.model.text.checkpoint.defaults.has_temperature {
        sampling.temperature = Some(0.0);
    }
    let mut params = Params::new(generation, sampling, &NAMES, &context, &state).await?;
    params.abort = Some(abort);
    let (prompt_field, default_max_tokens) = ("prompt", DEFAULT_MAX_TOKENS);
    let input = CompletionInput { prompts: prompt, structured, logprobs, prompt_field, default_max_tokens };
    let mut completion = Completion::with_params((state, params), input, ignored, &context).await?;
    let generations = completion.submit(&context).await?;
    let Completion { model: state, params, ignored, .. } = completion;
    Ok(SubmittedCall { state, params, generations, report, submitted: context.submitted(), ignored })
}

/// The model of a call, with its adapter.
async fn model(
    server: &Arc<AppState>,
    model: Option<String>,
    adapter: Option<String>,
    context: &RequestContext,
) -> Result<ModelState, ApiError> {
    let models = &server.models;
    let Some(adapter) = adapter else { return ModelState::named(server, Wanted::from(model), context, None).await };
    if let Some(model) = model.as_ref().filter(|name| models.find(Some(name.as_str())).is_none()) {
        return Err(unknown(models, model, &context.allowed));
    }
    let state = ModelState::named(server, Wanted::from(Some(adapter.clone())), context, None).await;
    let state = state.map_err(|error| error.with_param("lora_name"))?;
    let is_of = |model: String| state.model.names.contains(&model);
    if state.adapter.is_none() || !model.is_none_or(is_of) {
        let message = format!("the model has no adapter {:?}", truncate_for_error(&adapter));
        return Err(ApiError::invalid("lora_name", message).with_status(axum::http::StatusCode::NOT_FOUND));
    }
    Ok(state)
}
