//! Loading.

use crate::config::{Config, ConfigError};
use crate::executor::{Executor, StepBounds};
use crate::plan::{self, Step};
use crate::weights::Weights;
use crate::workspace::Workspace;
use pegainfer_core::engine::EngineLimits;
use pegainfer_core::engine::options::{check_step, context_len, most_blocks, pool_blocks, step_tokens};
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::schedule::{self, StateConfig, StateSlots, TokenBudget};
use pegainfer_core::tensor::OpError;
use pegainfer_core::weights::{Source, WeightsError};
use pegainfer_kernels::ops;
use pegainfer_kernels::ops::BLOCK_SIZE;
use pegainfer_kernels::step::StepSize;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use thiserror::Error;

/// The Qwen3.5 engine.
pub type Engine = schedule::EngineCore<Executor>;

/// What to load and how much of the machine to use.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// Directory of the checkpoint.
    pub model_path: PathBuf,
    /// Seed of dummy weights; `None` reads the checkpoint's.
    pub dummy_seed: Option<u64>,
    /// Context length; `None` takes the model's.
    pub max_model_len: Option<usize>,
    /// Sequences that run at once.
    pub max_num_seqs: usize,
    /// Tokens of one step; `None` takes 512 on the CPU, and on a GPU up to 40,960, as a twelfth of its memory has room for.
    pub max_num_batched_tokens: Option<usize>,
    /// Tokens of a step in which requests decode while the prompts of a few others are computed.
    pub max_num_mixed_tokens: usize,
    /// Whether a GPU replays decode steps as CUDA graphs.
    pub cuda_graph: bool,
    /// Bytes of the KV pool; `None` takes what `max_num_seqs` sequences of full length could use: on the CPU at most
    /// [`DEFAULT_KV_BYTES`], on a GPU at most what the rest leaves of `gpu_memory_utilization`.
    pub kv_cache_bytes: Option<u64>,
    /// Share of a GPU's memory that may be in use when the engine is loaded, 0 to 1.
    pub gpu_memory_utilization: f64,
    /// Bytes of the copies of recurrent state that the prefix cache goes on from, beside the state of running sequences;
    /// less than one copy keeps none, and then there is no prefix cache. `None` takes [`DEFAULT_STATE_BYTES`], or on a GPU
    /// a [`STATE_SHARE`]th of its memory.
    pub state_cache_bytes: Option<u64>,
    /// Tokens between copies, a multiple of [`BLOCK_SIZE`]; one more is made where a prompt's last full block ends.
    pub state_cache_interval: usize,
}

/// Upper bound of the default KV pool.
pub const DEFAULT_KV_BYTES: u64 = 4 << 30;
/// Default of [`LoadOptions::state_cache_bytes`].
pub const DEFAULT_STATE_BYTES: u64 = 1 << 30;
/// Inverse of the same on a GPU.
pub const STATE_SHARE: u64 = 20;
/// Copies of state that are worth keeping track of.
const MOST_COPIES: u64 = 4096;

/// Why an engine cannot be loaded; one sentence for the user.
#[derive(Debug, Error)]
pub enum LoadError {
    /// config.json.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The weights.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// An option does not fit the model or another option.
    #[error("{0}")]
    Option(String),
    /// An op refused what the configuration asks for.
    #[error("the model cannot run: {0}")]
    Op(#[from] OpError),
    /// The KV pool and the slots.
    #[error(
        "cannot allocate the KV cache and the recurrent state: {0}; lower --kv-cache-memory, --state-cache-memory or \
         --max-num-seqs"
    )]
    State(std::io::Error),
    /// The workspace.
    #[error("cannot allocate the activations: {0}; lower --max-num-batched-tokens or --max-num-seqs")]
    Workspace(#[from] std::io::Error),
}

/// A loaded engine, ready for its thread, and what start-up prints about it.
#[derive(Debug)]
pub struct Loaded {
    /// The engine.
    pub engine: Engine,
    /// The model's numbers.
    pub config: Config,
    /// From the first weight to the last, on the device.
    pub weights_time: Duration,
}

/// Loads a Qwen3.5 checkpoint onto `exec`. `progress` is called with (bytes of this piece, bytes of all weights).
pub fn load(
    mut exec: Exec,
    options: &LoadOptions,
    progress: &mut (dyn FnMut(u64, u64) + Send),
) -> Result<Loaded, LoadError> {
    let config = Config::load(&options.model_path)?;
    let bounds = bounds(&config, options, &mut exec)?;
    let source = match options.dummy_seed {
        Some(seed) => Source::Dummy { seed, std: config.initializer_range, uniform: ops::uniform },
        None => Source::open(&options.model_path)?,
    };
    let total = config.weight_bytes();
    let start = Instant::now();
    let weights = Weights::load(&mut exec, &config, &source, &mut |bytes| progress(bytes, total))?;
    exec.synchronize()?;
    let weights_time = start.elapsed();
    let mut executor = Executor::new(exec, config.clone(), weights, bounds)?;
    // One token through the model: what it cannot run is refused here, and its first pages are touched before the
    // first request would wait for them.
    executor.run(&plan::uniform(1, 1, 1))?;
    if executor.exec().device() == Device::Cuda {
        let blocks = executor.kv_blocks();
        let most = (bounds.size.rows.min(blocks), bounds.size.tokens.min(bounds.size.context).min(blocks * BLOCK_SIZE));
        for rows in schedule::warm_up(options.max_num_mixed_tokens, most) {
            executor.run(&plan::ragged(&rows))?;
        }
    }
    let limits = EngineLimits {
        max_model_len: bounds.size.context,
        vocab_size: config.vocab_size,
        block_size: BLOCK_SIZE,
        kv_blocks: executor.kv_blocks(),
        max_num_seqs: bounds.size.rows,
        eos_token_ids: config.eos_token_ids.clone(),
        unsupported: &[],
    };
    let snapshots = bounds.slots - bounds.size.rows;
    let slots = StateSlots::new(StateConfig {
        sequences: bounds.size.rows,
        snapshots,
        interval: if snapshots > 0 { options.state_cache_interval } else { 0 },
        block_tokens: BLOCK_SIZE,
        within_chunks: true,
    });
    log::info!(
        "recurrent state: {:.1} MB for each of up to {} requests, and room for {snapshots} snapshots in the prefix cache",
        config.slot_bytes() as f64 / 1e6,
        bounds.size.rows
    );
    let tokens = TokenBudget { step: bounds.size.tokens, mixed: options.max_num_mixed_tokens };
    Ok(Loaded { engine: Engine::new(executor, limits, tokens, slots), config, weights_time })
}

/// The largest step these options allow.
fn bounds(config: &Config, options: &LoadOptions, exec: &mut Exec) -> Result<StepBounds, LoadError> {
    let context = context_len(options.max_model_len, config.max_position_embeddings).map_err(LoadError::Option)?;
    let memory = if exec.device() == Device::Cuda { Some(exec.gpu()?.info()?.memory as u64) } else { None };
    let tokens = step_tokens(options.max_num_batched_tokens, memory, Workspace::token_bytes(config));
    check_step(options.max_num_seqs, tokens).map_err(LoadError::Option)?;
    let interval = options.state_cache_interval;
    if interval == 0 || !interval.is_multiple_of(BLOCK_SIZE) {
        return Err(LoadError::Option(format!(
            "--state-cache-interval is {interval}, but copies are made at multiples of {BLOCK_SIZE} tokens"
        )));
    }
    let block_bytes = config.block_bytes();
    let useful = (context.div_ceil(BLOCK_SIZE) * options.max_num_seqs) as u64;
    let (kv_blocks, gpu_memory_share) = match (options.kv_cache_bytes, exec.device()) {
        (Some(bytes), _) => (bytes / block_bytes, None),
        (None, Device::Cuda) => (useful.min(most_blocks(BLOCK_SIZE)), Some(options.gpu_memory_utilization)),
        (None, _) => (useful.min(DEFAULT_KV_BYTES / block_bytes), None),
    };
    let kv_blocks = pool_blocks(kv_blocks, BLOCK_SIZE, block_bytes).map_err(LoadError::Option)?;
    let slot_bytes = (config.slot_bytes() as u64).max(1);
    let state_bytes = match (options.state_cache_bytes, memory) {
        (Some(bytes), _) => bytes,
        (None, Some(memory)) => memory / STATE_SHARE,
        (None, None) => DEFAULT_STATE_BYTES,
    };
    let copies = (state_bytes / slot_bytes).min(MOST_COPIES);
    Ok(StepBounds {
        size: StepSize { tokens, rows: options.max_num_seqs, context },
        kv_blocks,
        gpu_memory_share,
        graphs: options.cuda_graph,
        slots: options.max_num_seqs + copies as usize,
        // Each ends where a copy is made (one more than whole intervals fit, and one at the end of a prompt), or with its
        // row.
        segments: tokens / interval + 3 * options.max_num_seqs,
    })
}

/// The ops of one step, without weights or memory: `batch` rows that each add `tokens` tokens to a context of
/// `context` tokens in all, and sample.
pub fn record(config: &Config, batch: usize, tokens: usize, context: usize) -> Result<Vec<OpRecord>, LoadError> {
    record_step(config, &plan::uniform(batch, tokens, context))
}

/// The ops of `step`, whose blocks and slots are numbered through, without weights or memory.
pub fn record_step(config: &Config, step: &Step) -> Result<Vec<OpRecord>, LoadError> {
    let mut exec = Exec::meta()?;
    let source = Source::Dummy { seed: 0, std: 0.0, uniform: ops::uniform };
    let weights = Weights::load(&mut exec, config, &source, &mut |_| {})?;
    let (tokens, rows, segments) = (step.tokens.len(), step.rows.len(), step.state.len());
    let context = step.kv_lens.iter().copied().max().unwrap_or(0) as usize;
    let kv_blocks = rows * step.max_blocks;
    let size = StepSize { tokens, rows, context };
    let bounds = StepBounds { size, kv_blocks, gpu_memory_share: None, slots: rows, segments, graphs: false };
    let mut executor = Executor::new(exec, config.clone(), weights, bounds)?;
    let (result, records) = executor.record(step);
    result?;
    Ok(records)
}
