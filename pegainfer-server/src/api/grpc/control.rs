//! The calls of `vllm.Control` about the server and its requests.

use super::fields::Fields;
use super::wire::{self, Call};
use crate::api::policy::with_ignored;
use crate::api::state::AppState;
use crate::error::ApiError;
use crate::kv_events::KvEventSource;
use crate::models::{Lease, ModelStatus};
use crate::trace::MayTrace;
use axum::extract::{Request, State};
use axum::response::Response;
use prost::Message;
use std::sync::Arc;
use vllm_proto::{
    AbortRequest, AbortResponse, GetKvEventSourcesRequest, GetKvEventSourcesResponse, GetModelInfoRequest,
    GetServerInfoRequest, ModelInfo, ParallelismInfo, RlCapabilities, ServerInfo, ShutdownRequest, ShutdownResponse,
};

/// Version of the API: the name of its protobuf package.
const API_VERSION: &str = "vllm";

/// Answers a call whose request has `fields` fields.
pub async fn answer<M: Message + Default + 'static, R: Message>(
    state: &Arc<AppState>,
    request: Request,
    fields: &'static Fields,
    answer: impl AsyncFnOnce(M) -> Result<R, ApiError>,
) -> Result<Response, ApiError> {
    let Call { message, unknown, .. } = wire::read(request, state, fields).await?;
    let unknown: Vec<&str> = unknown.iter().map(String::as_str).collect();
    let ignored = state.policy.check_ignored(&unknown)?;
    Ok(with_ignored(wire::reply(&answer(message).await?), ignored))
}

/// The first model: calls without a name mean it. `None` if it is not in memory.
fn first_model(state: &AppState) -> (Option<ModelStatus>, Option<Lease>) {
    let id = state.models.find(None);
    (id.map(|id| state.models.status(id)), id.and_then(|id| state.models.peek(id)))
}

/// Handles `Control.GetServerInfo`. Numbers that are unknown are 0: those of a model that is not in memory, and the
/// maximum number of tokens in a step.
pub async fn server_info(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let reply = async |_: GetServerInfoRequest| Ok(describe_server(&state));
    answer(&state, request, &const { Fields::flat(0) }, reply).await
}

fn describe_server(state: &AppState) -> ServerInfo {
    let (status, model) = first_model(state);
    let mut info = ServerInfo {
        engine_version: env!("CARGO_PKG_VERSION").into(),
        api_version: API_VERSION.into(),
        instance_id: format!("{:016x}", state.hash_salt("instance")),
        rl_capabilities: Some(RlCapabilities {
            sleep_mode_enabled: status.is_some_and(|status| !status.pinned),
            ..RlCapabilities::default()
        }),
        proto_version: vllm_proto::VERSION.into(),
        ..ServerInfo::default()
    };
    let Some(model) = model else { return info };
    let (limits, engines) = (model.engine.limits(), model.engine.engines().len() as u32);
    let ranks = model.placement.as_ref().map_or(1, |placement| placement.ranks as u32);
    info.parallelism = Some(ParallelismInfo {
        tensor_parallel_size: ranks,
        pipeline_parallel_size: 1,
        data_parallel_size: engines,
        data_parallel_rank: 0,
        decode_context_parallel_size: 1,
        world_size: u64::from(ranks * engines),
        data_parallel_size_local: engines,
    });
    info.max_model_len = limits.max_model_len as u32;
    info.kv_block_size = limits.block_size as u32;
    info.total_kv_blocks = limits.kv_blocks as u64;
    info.max_running_requests = limits.max_num_seqs as u64;
    info.max_loras = model.adapters.as_ref().map_or(0, |adapters| adapters.max_loras as u32);
    info.effective_attention_block_size = Some(limits.block_size as u64);
    info
}

/// Handles `Control.GetModelInfo`, about the first model.
pub async fn model_info(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let reply = async |_: GetModelInfoRequest| Ok(describe_model(&state));
    answer(&state, request, &const { Fields::flat(0) }, reply).await
}

fn describe_model(state: &AppState) -> ModelInfo {
    let (status, model) = first_model(state);
    let Some(ModelStatus { names, root, .. }) = status else { return ModelInfo::default() };
    let mut names = names.into_iter();
    let name = names.next().unwrap_or_default();
    // Sidecars of routers read the tokenizer and the chat template from here.
    let origin = model.as_ref().and_then(|model| model.text.checkpoint.origin.clone());
    ModelInfo {
        model_id: origin.or(root).unwrap_or_else(|| name.clone()),
        served_model_name: name,
        served_model_aliases: names.collect(),
        supports_text_input: true,
        supports_token_ids_input: true,
        supports_lora: model.is_some_and(|model| model.adapters.is_some()),
        ..ModelInfo::default()
    }
}

/// Handles `Control.GetKvEventSources`.
pub async fn kv_event_sources(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let reply = async |_: GetKvEventSourcesRequest| {
        let sources = state.kv_event_sources().into_iter().map(describe_source).collect();
        Ok(GetKvEventSourcesResponse { sources })
    };
    answer(&state, request, &const { Fields::flat(0) }, reply).await
}

fn describe_source(source: KvEventSource) -> vllm_proto::KvEventSource {
    vllm_proto::KvEventSource {
        transport: source.transport.to_owned(),
        endpoint: source.endpoint,
        topic: source.topic,
        replay_endpoint: source.replay_endpoint.unwrap_or_default(),
        data_parallel_rank: Some(source.data_parallel_rank.into()),
        encoding: source.encoding.to_owned(),
        schema_version: 1,
        buffer_steps: source.buffer_steps,
        hwm: source.hwm,
        max_queue_size: source.max_queue_size,
    }
}

/// Handles `Control.Abort`: cancels the caller's calls with these names, or everybody's if the caller is an admin.
pub async fn abort(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let is_admin = request.extensions().get::<MayTrace>().is_some();
    let Call { context, message, .. }: Call<AbortRequest> =
        wire::read(request, &state, &const { Fields::flat(1) }).await?;
    let tenant = (!is_admin).then_some(context.tenant);
    message.request_ids.iter().for_each(|name| state.aborts.abort(tenant, name));
    Ok(wire::reply(&AbortResponse {}))
}

/// Handles `Control.Shutdown`, for admins: the server drains and ends, as after a signal.
pub async fn shutdown(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let reply = async |_: ShutdownRequest| {
        log::info!("an admin asked for the end of the server");
        state.lifecycle.ask_to_stop();
        Ok(ShutdownResponse {})
    };
    answer(&state, request, &const { Fields::flat(0) }, reply).await
}
