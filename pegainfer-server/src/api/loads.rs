//! `GET /v1/loads` and `/loads`: the load of each engine, in the shape of SGLang that smg reads.

use super::state::AppState;
use axum::Json;
use axum::extract::State;
use jiff::Timestamp;
use pegainfer_core::engine::{EngineCell, EngineStats};
use schemars::JsonSchema;
use serde::Serialize;
use std::sync::Arc;

/// Load of all engines.
#[derive(Serialize, JsonSchema)]
pub struct Loads {
    /// Time of the response, such as `2026-11-30T08:52:29.123Z`; smg takes only a string.
    timestamp: String,
    /// Version of the server.
    version: &'static str,
    /// Number of engines.
    dp_rank_count: usize,
    /// Load of each engine.
    loads: Vec<RankLoad>,
    /// Sums over the engines.
    aggregate: AggregateLoad,
}

/// Load of one engine.
#[derive(Serialize, JsonSchema)]
pub struct RankLoad {
    /// Number of the engine among those of its model, as in `X-data-parallel-rank`.
    dp_rank: usize,
    /// Name of the model.
    model: String,
    /// Running requests.
    num_running_reqs: usize,
    /// Waiting requests.
    num_waiting_reqs: usize,
    /// Running and waiting requests.
    num_total_reqs: usize,
    /// Prompt tokens that are predicted to be computed before the open requests have their first tokens; 0 for a model
    /// with one engine, which predicts nothing.
    num_waiting_uncached_tokens: usize,
    /// Tokens of the KV cache that requests hold, in whole blocks.
    num_used_tokens: usize,
    /// Both of these tokens.
    num_total_tokens: usize,
    /// Tokens that the KV cache holds.
    max_total_num_tokens: usize,
    /// Used part of the KV cache, from 0 to 1.
    token_usage: f64,
    /// Part of the prompt tokens that were found in the prefix cache since the start, from 0 to 1.
    cache_hit_rate: f64,
    /// Maximum number of running requests.
    max_running_requests: usize,
}

/// Sums over engines.
#[derive(Serialize, JsonSchema)]
pub struct AggregateLoad {
    /// Running requests.
    total_running_reqs: usize,
    /// Waiting requests, also those that wait for their model.
    total_waiting_reqs: usize,
    /// Running and waiting requests.
    total_reqs: usize,
    /// Used and waiting tokens.
    total_tokens: usize,
    /// Mean of the used parts of the KV caches, from 0 to 1.
    avg_token_usage: f64,
}

/// Handles `GET /v1/loads` and `GET /loads`. SGLang's query parameters have no effect: all numbers are cheap.
pub async fn loads(State(state): State<Arc<AppState>>) -> Json<Loads> {
    let mut loads = Vec::new();
    for model in state.models.peek_all() {
        let ranks = model.engine.engines().iter().enumerate();
        loads.extend(ranks.map(|(dp_rank, engine)| RankLoad::of(dp_rank, &model.names[0], engine)));
    }
    let sum = |count: fn(&RankLoad) -> usize| loads.iter().map(count).sum::<usize>();
    let (running, waiting) = (sum(|load| load.num_running_reqs), sum(|load| load.num_waiting_reqs));
    let waiting = waiting + state.models.waiting();
    let usage: f64 = loads.iter().map(|load| load.token_usage).sum();
    let aggregate = AggregateLoad {
        total_running_reqs: running,
        total_waiting_reqs: waiting,
        total_reqs: running + waiting,
        total_tokens: sum(|load| load.num_total_tokens),
        avg_token_usage: usage / loads.len().max(1) as f64,
    };
    let (timestamp, version) = (Timestamp::now().to_string(), env!("CARGO_PKG_VERSION"));
    Json(Loads { timestamp, version, dp_rank_count: loads.len(), loads, aggregate })
}

impl RankLoad {
    fn of(dp_rank: usize, model: &str, engine: &EngineCell) -> Self {
        let (stats, limits) = (engine.stats(), engine.limits());
        let EngineStats { running, waiting, kv_blocks_total, kv_blocks_free, .. } = stats;
        let used = kv_blocks_total.saturating_sub(kv_blocks_free);
        let (used_tokens, waiting_tokens) = (used * limits.block_size, engine.predicted_tokens());
        let part = |part: f64, whole: f64| part / whole.max(1.0);
        Self {
            dp_rank,
            model: model.to_owned(),
            num_running_reqs: running,
            num_waiting_reqs: waiting,
            num_total_reqs: running + waiting,
            num_waiting_uncached_tokens: waiting_tokens,
            num_used_tokens: used_tokens,
            num_total_tokens: used_tokens + waiting_tokens,
            max_total_num_tokens: limits.kv_capacity_tokens(),
            token_usage: part(used as f64, kv_blocks_total as f64),
            cache_hit_rate: part(stats.prefix_hits as f64, stats.prefix_queries as f64),
            max_running_requests: limits.max_num_seqs,
        }
    }
}
