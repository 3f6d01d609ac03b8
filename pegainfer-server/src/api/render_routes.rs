//! `POST /v1/completions/render` and `POST /v1/chat/completions/render`: a request as it would run, rendered and
//! tokenized, for routers that choose a server by the tokens of the prompt. Nothing is generated.

use super::body::{self, RequestContext};
use super::chat_request::ChatRequest;
use super::completion::{Completion, CompletionRequest};
use super::images::Pictures;
use super::large_response::{self, json_bytes};
use super::model_state::ModelState;
use super::policy::with_ignored;
use super::rendered::{IMAGE_BYTES, Repeated, TOKEN_BYTES};
use super::schema::Body;
use super::state::AppState;
use super::submitted_chat::RenderedChat;
use crate::error::ApiError;
use axum::extract::{Request, State};
use axum::http::HeaderValue;
use axum::response::Response;
use pegainfer_core::engine::GenerateRequest;
use serde::{Serialize, Serializer};
use std::sync::Arc;

/// Handles `POST /v1/completions/render`: a list with one request for each prompt.
pub async fn completion(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let (context, bytes) = body::read(request, &state).await?;
    let shared = state.clone();
    let request = bytes.parse(&state, move |bytes| CompletionRequest::read(bytes, &shared.policy)).await?;
    let repeated = Repeated::new(&request.generation, &request.sampling);
    let mut completion = Completion::new(request, &context, &state).await?;
    let prompts = std::mem::take(&mut completion.prompts);
    let (model, field) = (completion.model.clone(), completion.prompt_field());
    let requests = prompts.into_iter().map(|ids| first(completion.requests(ids)?, &model, field));
    let requests = requests.collect::<Result<Vec<_>, _>>()?;
    let Completion { params, structured, ignored, .. } = completion;
    let tokens: usize = requests.iter().map(|request| request.prompt.len()).sum();
    let bytes = tokens * TOKEN_BYTES + requests.len() * repeated.max_bytes(&params, structured.as_ref());
    let write = move || {
        let render = |request: &GenerateRequest| repeated.render("cmpl", &params, request, structured.as_ref());
        json_bytes(&Rendered(requests.iter().map(render)))
    };
    respond(context, &model, tokens, bytes, write, ignored).await
}

/// Handles `POST /v1/chat/completions/render`.
pub async fn chat(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let (context, bytes) = body::read(request, &state).await?;
    let shared = state.clone();
    let request = bytes.parse(&state, move |bytes| ChatRequest::read(Body::parse(bytes)?, &shared.policy)).await?;
    let repeated = Repeated::new(&request.generation, &request.sampling);
    let RenderedChat { model, params, ids, images, rendered, logprobs, ignored, .. } =
        RenderedChat::new(request, &context, &state).await?;
    context.hold.keep(size_of_val(ids.as_slice()) + images.bytes());
    let mut requests = params.requests(ids, usize::MAX, logprobs, None, &model)?;
    let pictures = Pictures::add(&mut requests, images, &context, &model).await?;
    let request = first(requests, &model, params.names.messages)?;
    // Sampling parameters have no word for a structure after reasoning, nor for a limit of reasoning.
    let (mut structured, mut lost) = (rendered.structured, Vec::new());
    if let Some(thinking) = rendered.thinking {
        lost.extend(structured.take().map(|structured| structured.field));
        lost.extend(thinking.budget.map(|_| params.names.thinking_budget));
    }
    let ignored = model.policy.check_more(ignored, &lost)?;
    let tokens = request.prompt.len();
    let image_bytes = request.images.len() * IMAGE_BYTES;
    let bytes = tokens * TOKEN_BYTES + image_bytes + repeated.max_bytes(&params, structured.as_ref());
    drop(pictures);
    let write = move || json_bytes(&repeated.render("chatcmpl", &params, &request, structured.as_ref()));
    respond(context, &model, tokens, bytes, write, ignored).await
}

/// The request for the first choice of a prompt, if an engine can serve it.
fn first(
    requests: Vec<GenerateRequest>,
    model: &ModelState,
    prompt_field: &'static str,
) -> Result<GenerateRequest, ApiError> {
    let request = requests.into_iter().next().ok_or_else(|| ApiError::internal("a prompt has at least one choice"))?;
    model.model.engine.check(&request).map_err(|error| ApiError::from_submit(error, prompt_field))?;
    Ok(request)
}

/// A list that is rendered while it is written.
struct Rendered<I>(I);

impl<I: Iterator<Item: Serialize> + Clone> Serialize for Rendered<I> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.clone())
    }
}

/// Responds with the JSON from `write`, of at most `bytes` bytes, which runs off the async threads. The request keeps
/// memory for its `tokens`.
async fn respond(
    context: RequestContext,
    model: &ModelState,
    tokens: usize,
    bytes: usize,
    write: impl FnOnce() -> Vec<u8> + Send + 'static,
    ignored: Option<HeaderValue>,
) -> Result<Response, ApiError> {
    large_response::check_size("the rendered requests", bytes, model)?;
    context.hold.shrink(tokens * size_of::<u32>());
    let share = large_response::share(model, &context.hold, context.tenant, bytes).await?;
    let json = context.hold.work(model, move |_| write()).await?;
    drop(context);
    Ok(with_ignored(large_response::json_response(json, share), ignored))
}
