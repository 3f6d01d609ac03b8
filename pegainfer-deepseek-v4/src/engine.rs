//! Loading.

use crate::bounds::{Sharing, StepBounds};
use crate::config::Config;
use crate::draft_method::{check_tensors, with_drafts};
use crate::executor::Executor;
use crate::inventory;
use crate::load_error::LoadError;
use crate::numerics::Numerics;
use crate::plan::{self, PAGE_TOKENS, Step};
use crate::shard::{MAX_RANKS, Shard};
use crate::state;
use crate::weights::{Source, Weights};
use pegainfer_core::engine::EngineLimits;
use pegainfer_core::engine::options::{check_step, context_len, most_blocks, pool_blocks};
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::kv::DeviceMemory;
use pegainfer_core::parallel::RankBytes;
use pegainfer_core::record::OpRecord;
use pegainfer_core::schedule::speculation::Speculation;
use pegainfer_core::schedule::{EngineCore, StateConfig, StateSlots, TokenBudget};
use pegainfer_core::weights::Checkpoint;
use pegainfer_kernels::parallel;
use pegainfer_kernels::runtime::SyntheticAcceptance;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The DeepSeek-V4 engine.
pub type Engine = EngineCore<Executor>;

/// What to load and how much of the machine to use.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// Directory of the checkpoint.
    pub model_path: PathBuf,
    /// Random weights of this seed instead of those of the checkpoint; its config.json is read.
    pub dummy_seed: Option<u64>,
    /// Context length; `None` takes the model's.
    pub max_model_len: Option<usize>,
    /// Sequences that run at once; `None` takes up to 64, and on GPUs 128 or 256 where these leave [`DEFAULT_KV_BYTES`] of KV cache.
    pub max_num_seqs: Option<usize>,
    /// Tokens of one step.
    pub max_num_batched_tokens: usize,
    /// Tokens of a step in which many requests decode beside the prompts of a few others.
    pub max_num_mixed_tokens: usize,
    /// Bytes of compressed entries; `None` takes what `max_num_seqs` sequences of full length could use: on the CPU at most
    /// [`DEFAULT_KV_BYTES`], on GPUs at most what the rest leaves of `gpu_memory_utilization`.
    pub kv_cache_bytes: Option<u64>,
    /// Fraction of a GPU's memory that may be in use when the engine is loaded, 0 to 1.
    pub gpu_memory_utilization: f64,
    /// Load rank 0 of so many alone: what it sends to the others comes back as theirs. One rank can be developed and timed on one
    /// GPU so; what it generates means nothing.
    pub loop_back_ranks: Option<usize>,
    /// Compare tokens and state of all ranks after each step, bit for bit. For development: slow. No effect with one rank.
    pub check_ranks: bool,
    /// Work of prompts that ranks share: [`Sharing::OFFICIAL`], and more in tests of small models.
    pub sharing: Sharing,
    /// Replay decode steps, steps that verify drafts, and passes of the layer that drafts as CUDA graphs, on a GPU.
    pub cuda_graph: bool,
    /// Speculative decoding: how tokens are drafted, and how many; `None` for none.
    pub speculation: Option<Speculation>,
    /// Which roundings a run has.
    pub numerics: Numerics,
}

/// Upper bound of the default for compressed entries on the CPU, and what a GPU has to have left for them by default.
pub const DEFAULT_KV_BYTES: u64 = 4 << 30;

/// Sequences that run at once by default.
const DEFAULT_SEQS: usize = 64;
/// The same on GPUs whose memory holds them, the most first.
const MORE_SEQS: [usize; 2] = [256, 128];

/// Tokens of the largest step of the warm-up.
const WARM_UP_TOKENS: usize = 4096;

/// A loaded engine, ready for its thread, and what start-up prints about it.
#[derive(Debug)]
pub struct Loaded {
    /// The engine.
    pub engine: Engine,
    /// The model's numbers.
    pub config: Config,
    /// Bytes of the weights of all ranks.
    pub weight_bytes: u64,
    /// From the first weight to the last, on the device.
    pub weights_time: Duration,
    /// Bytes of pages and slots on each rank.
    pub kv_bytes: u64,
}

/// Loads a DeepSeek-V4 checkpoint onto as many ranks as there are `execs`. `progress` is called with (bytes of this
/// chunk, bytes of all weights).
pub fn load(
    execs: Vec<Exec>,
    options: &LoadOptions,
    progress: &mut (dyn FnMut(u64, u64) + Send),
) -> Result<Loaded, LoadError> {
    let config =
        with_drafts(Config::load(&options.model_path)?, options.speculation.as_ref(), options.max_num_batched_tokens)?;
    let mut bounds = bounds(&config, options)?;
    let shards = Shard::all(&config, options.loop_back_ranks.unwrap_or(execs.len())).map_err(LoadError::Option)?;
    let checkpoint = match options.dummy_seed {
        Some(_) => None,
        None => Some(Checkpoint::open(&options.model_path)?),
    };
    check_tensors(options.speculation.as_ref(), checkpoint.as_ref())?;
    let source = checkpoint.as_ref().map_or(Source::Dummy(options.dummy_seed.unwrap_or(0)), Source::Checkpoint);
    let entries = inventory::inventory(&config);
    let of_rank = |shard: &Shard| entries.iter().map(|e| e.loaded_bytes(&config, *shard)).sum::<u64>();
    let weight_bytes: u64 = shards.iter().take(execs.len()).map(of_rank).sum();
    let start = Instant::now();
    let mut ranks: Vec<(Exec, Shard)> = execs.into_iter().zip(shards).collect();
    let weights = Weights::load(&mut ranks, &config, source, &mut |bytes| progress(bytes, weight_bytes))?;
    if ranks.iter().all(|(exec, _)| exec.device() == Device::Cuda) {
        bounds = on_gpus(&config, options, bounds, |bounds| pages_left(&mut ranks, &config, options, bounds))?;
    }
    let ranks = ranks.into_iter().zip(weights).map(|((exec, shard), weights)| (exec, shard, weights)).collect();
    let weights_time = start.elapsed();
    let mut executor = Executor::new(config.clone(), options.numerics, ranks, bounds)?;
    executor.set_synthetic_acceptance(SyntheticAcceptance::of(options.speculation.as_ref()));
    if options.check_ranks {
        executor.check_ranks();
    }
    // One token through the model: what it cannot run is refused here.
    executor.run(&plan::uniform(1, 1, 1))?;
    let most = bounds.tokens.min(bounds.context).min(bounds.pages * PAGE_TOKENS).min(WARM_UP_TOKENS);
    executor.warm_up(most)?;
    let limits = EngineLimits {
        max_model_len: bounds.context,
        vocab_size: config.vocab_size,
        block_size: PAGE_TOKENS,
        kv_blocks: bounds.pages,
        kv_cache_dtype: "auto",
        max_num_seqs: bounds.rows,
        eos_token_ids: config.eos_token_ids.clone(),
        num_speculative_tokens: options.speculation.as_ref().map(|speculation| speculation.num_tokens),
        unsupported: &[],
    };
    let pages = bounds.pages * state::page_bytes(&config, options.numerics);
    let kv_bytes = (pages + bounds.slots * state::slot_bytes(&config, options.numerics, bounds.drafts)) as u64;
    let tokens = TokenBudget { step: bounds.tokens, mixed: options.max_num_mixed_tokens };
    let slots = StateSlots::new(StateConfig {
        sequences: bounds.rows,
        snapshots: bounds.slots - bounds.rows,
        interval: PAGE_TOKENS,
        block_tokens: PAGE_TOKENS,
        // The ops update a slot in place.
        within_chunks: false,
    });
    let engine = Engine::new(executor, limits, tokens, slots, options.speculation.clone());
    Ok(Loaded { engine, config, weight_bytes, weights_time, kv_bytes })
}

/// The largest step these options allow, with the default number of sequences and KV cache of a CPU.
fn bounds(config: &Config, options: &LoadOptions) -> Result<StepBounds, LoadError> {
    let rows = options.max_num_seqs.unwrap_or(DEFAULT_SEQS.min(options.max_num_batched_tokens));
    bounds_of(config, options, rows)
}

/// The same for `rows` sequences at once.
fn bounds_of(config: &Config, options: &LoadOptions, rows: usize) -> Result<StepBounds, LoadError> {
    let context = context_len(options.max_model_len, config.max_position_embeddings).map_err(LoadError::Option)?;
    let tokens = options.max_num_batched_tokens;
    check_step(rows, tokens).map_err(LoadError::Option)?;
    let page_bytes = page_bytes(config, options);
    let pages = match options.kv_cache_bytes {
        Some(bytes) => bytes / page_bytes,
        None => useful_pages(context, rows).min(DEFAULT_KV_BYTES / page_bytes),
    };
    let pages = pool_blocks(pages, PAGE_TOKENS, page_bytes).map_err(LoadError::Option)?;
    // A slot for each running sequence, and as many for snapshots.
    let speculation = options.speculation.as_ref();
    Ok(StepBounds {
        tokens,
        rows,
        samples: Speculation::samples(speculation, rows, tokens),
        drafts: speculation.map_or(0, |speculation| speculation.num_tokens),
        context,
        slots: 2 * rows,
        pages,
        sharing: options.sharing,
        graphs: options.cuda_graph,
    })
}

/// What GPUs hold beside the weights: by default more sequences at once than `least`, and a larger KV cache. `pages_left` says how many
/// pages fit beside all else.
fn on_gpus(
    config: &Config,
    options: &LoadOptions,
    least: StepBounds,
    mut pages_left: impl FnMut(StepBounds) -> Result<usize, LoadError>,
) -> Result<StepBounds, LoadError> {
    let given = options.kv_cache_bytes.is_some();
    let more = if options.max_num_seqs.is_none() { &MORE_SEQS[..] } else { &[] };
    for rows in more.iter().filter(|rows| (least.rows..=least.tokens).contains(rows)) {
        let wider = bounds_of(config, options, *rows)?;
        if let Ok(left) = pages_left(wider)
            && left >= wider.pages
        {
            return Ok(StepBounds { pages: if given { wider.pages } else { left }, ..wider });
        }
    }
    Ok(if given { least } else { StepBounds { pages: pages_left(least)?, ..least } })
}

/// Pages that fit each GPU beside weights, workspace and slots, at most what `bounds.rows` sequences of full length can use. An error if none
/// does.
fn pages_left(
    ranks: &mut [(Exec, Shard)],
    config: &Config,
    options: &LoadOptions,
    bounds: StepBounds,
) -> Result<usize, LoadError> {
    let mut pages = useful_pages(bounds.context, bounds.rows) as usize;
    for (exec, shard) in ranks {
        let one_page = StepBounds { pages: 1, ..bounds };
        let all = without_memory(config, options.numerics, *shard, one_page)?.allocated_bytes();
        let coming = all.saturating_sub(exec.allocated_bytes()) + parallel::device_bytes(shard.ranks);
        let gpu = exec.gpu()?.info()?;
        let memory = DeviceMemory { total: gpu.memory as u64, free: (gpu.free as u64).saturating_sub(coming) };
        let fitting = memory.blocks(options.gpu_memory_utilization, page_bytes(config, options), pages);
        pages = fitting.map_err(LoadError::Option)?;
    }
    Ok(pages)
}

/// Bytes of a page; one for a model of window layers alone, which needs pages only to count tokens.
fn page_bytes(config: &Config, options: &LoadOptions) -> u64 {
    state::page_bytes(config, options.numerics).max(1) as u64
}

/// Pages of `rows` sequences of `context` tokens, at most those of a pool.
fn useful_pages(context: usize, rows: usize) -> u64 {
    ((context.div_ceil(PAGE_TOKENS) * rows) as u64).min(most_blocks(PAGE_TOKENS))
}

/// The ops of one step on rank 0 of `ranks`, without weights or memory: `batch` rows that each add `tokens` tokens to a context
/// of `context` tokens in all, and sample. Exchanges are those of GPUs that access each other's memory. Where `config`
/// loads layers that draft, their passes behind the step are left out, and slots have the rings for one draft token.
pub fn record(
    config: &Config,
    numerics: Numerics,
    ranks: usize,
    (batch, tokens, context): (usize, usize, usize),
) -> Result<Vec<OpRecord>, LoadError> {
    let drafts = usize::from(config.loads_drafts);
    let (mut executor, step) = recorder(config, numerics, ranks, (batch, tokens, context), drafts)?;
    let (result, records) = executor.record(&step);
    result?;
    Ok(records)
}

/// The same of a pass of DSpark's stages, which `config` loads, over `blocks` blocks behind `context` tokens each.
pub fn record_blocks(
    config: &Config,
    numerics: Numerics,
    ranks: usize,
    (blocks, context): (usize, usize),
) -> Result<Vec<OpRecord>, LoadError> {
    let tokens = config.loaded_dspark().map_or(1, |dspark| dspark.block.tokens);
    let context = context.max(tokens);
    let (mut executor, _) = recorder(config, numerics, ranks, (blocks, tokens, context), tokens)?;
    let (result, records) = executor.record_blocks(blocks, context);
    result?;
    Ok(records)
}

/// Rank 0 of `ranks` on `Meta` for steps of `batch` rows that each add `tokens` tokens, and such a step. Rings are longer by `drafts`
/// tokens.
fn recorder(
    config: &Config,
    numerics: Numerics,
    ranks: usize,
    (batch, tokens, context): (usize, usize, usize),
    drafts: usize,
) -> Result<(Executor, Step), LoadError> {
    let step = plan::uniform(batch, tokens, context);
    let bounds = StepBounds {
        tokens: batch * tokens,
        rows: batch,
        samples: batch * drafts.max(1),
        drafts,
        context,
        slots: batch,
        pages: batch * step.max_blocks,
        sharing: Sharing::OFFICIAL,
        graphs: false,
    };
    let shards = Shard::all(config, ranks).map_err(LoadError::Option)?;
    Ok((without_memory(config, numerics, shards[0], bounds)?, step))
}

/// One rank on `Meta`.
fn without_memory(
    config: &Config,
    numerics: Numerics,
    shard: Shard,
    bounds: StepBounds,
) -> Result<Executor, LoadError> {
    let mut exec = Exec::meta()?;
    let weights = Weights::shapes(&mut exec, config, shard)?;
    Executor::new(config.clone(), numerics, vec![(exec, shard, weights)], bounds)
}

/// Bytes that a GPU needs with these options, for each number of ranks that can share the model: weights, slots, pages, workspace, and
/// about what CUDA takes.
pub fn rank_bytes(config: &Config, options: &LoadOptions) -> Result<Vec<RankBytes>, LoadError> {
    let config = &with_drafts(config.clone(), options.speculation.as_ref(), options.max_num_batched_tokens)?;
    let bounds = bounds(config, options)?;
    let possible = (1..=MAX_RANKS).filter_map(|ranks| Shard::all(config, ranks).ok());
    let need = |shards: Vec<Shard>| {
        let executor = without_memory(config, options.numerics, shards[0], bounds)?;
        let ranks = shards.len();
        Ok(RankBytes { ranks, bytes: executor.allocated_bytes() + parallel::device_bytes(ranks) })
    };
    possible.map(need).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::weight_bytes;
    use crate::testing::flash;
    use pegainfer_core::parallel::fewest_ranks;

    fn options() -> LoadOptions {
        LoadOptions {
            model_path: PathBuf::new(),
            dummy_seed: None,
            max_model_len: None,
            max_num_seqs: None,
            max_num_batched_tokens: 4096,
            max_num_mixed_tokens: 512,
            kv_cache_bytes: None,
            gpu_memory_utilization: 0.9,
            loop_back_ranks: None,
            check_ranks: false,
            sharing: Sharing::OFFICIAL,
            cuda_graph: true,
            speculation: None,
            numerics: Numerics::REFERENCE,
        }
    }

    /// What the official shapes take: the weights that `inspect` prints, 128 slots, 4 GiB of pages, and the rest.
    #[test]
    fn a_rank_needs_its_weights_its_state_and_little_more() {
        let config = flash(false);
        let needs = rank_bytes(&config, &options()).unwrap();
        let state = 128 * state::slot_bytes(&config, Numerics::REFERENCE, 0) as u64 + DEFAULT_KV_BYTES;
        assert_eq!(needs.iter().map(|need| need.ranks).collect::<Vec<_>>(), [1, 2, 4, 8]);
        for RankBytes { ranks, bytes } in needs {
            let rest = bytes as i64 - (weight_bytes(&config, ranks).unwrap() + state) as i64;
            println!("{ranks} ranks: {bytes} bytes, {rest} beside weights, slots and pages");
            assert!(
                (500_000_000..2_000_000_000).contains(&rest),
                "{ranks} ranks: {bytes} bytes, {rest} of them beside"
            );
        }
    }

    /// Sequences and gigabytes of KV cache on GPUs of which so many gigabytes are for `ranks` ranks.
    fn on_gpus_of(gigabytes: u64, ranks: usize, options: &LoadOptions) -> Result<(usize, u64), LoadError> {
        let config = flash(false);
        let page_bytes = page_bytes(&config, options);
        let left = |bounds: StepBounds| {
            let shard = Shard::all(&config, ranks).unwrap()[0];
            let taken =
                without_memory(&config, options.numerics, shard, StepBounds { pages: 1, ..bounds })?.allocated_bytes();
            let free = (gigabytes * 1_000_000_000).saturating_sub(taken);
            match (free / page_bytes).min(useful_pages(bounds.context, bounds.rows)) {
                0 => Err(LoadError::Option("nothing is left".to_owned())),
                pages => Ok(pages as usize),
            }
        };
        let bounds = on_gpus(&config, options, bounds(&config, options)?, left)?;
        Ok((bounds.rows, bounds.pages as u64 * page_bytes / 1_000_000_000))
    }

    #[test]
    fn sequences_and_cache_follow_the_memory_of_the_gpus() {
        let of = |gigabytes, ranks, options: &LoadOptions| on_gpus_of(gigabytes, ranks, options).unwrap();
        // Two of 141 GB and four of 80 GB, nine tenths of them.
        assert_eq!(of(127, 2, &options()), (256, 38));
        assert_eq!(of(72, 4, &options()), (256, 21));
        assert_eq!(of(32, 8, &options()), (128, 6));
        assert_eq!(of(26, 8, &options()), (64, 2));
        assert!(on_gpus_of(22, 8, &options()).is_err());
        // What the user says stays.
        let said = LoadOptions { max_num_seqs: Some(100), kv_cache_bytes: Some(5_100_000_000), ..options() };
        assert_eq!(of(127, 2, &said), (100, 5));
        assert_eq!(of(127, 2, &LoadOptions { max_num_seqs: None, ..said }), (256, 5));
    }

    #[test]
    fn the_official_shapes_take_two_large_gpus_or_four_of_80_gb() {
        let config = flash(false);
        let needs = rank_bytes(&config, &options()).unwrap();
        let free = |gigabytes: u64, gpus| vec![gigabytes * 1_000_000_000; gpus];
        assert_eq!(fewest_ranks(&needs, &free(141, 8)), Ok(2));
        assert_eq!(fewest_ranks(&needs, &free(80, 8)), Ok(4));
        assert_eq!(fewest_ranks(&needs, &free(180, 1)), Ok(1));
        let one = fewest_ranks(&needs, &free(141, 1)).unwrap_err();
        assert!(one.contains("141.0 GB is free on the one GPU: 2 such GPUs hold it"), "{one}");
        let small = fewest_ranks(&needs, &free(24, 8)).unwrap_err();
        assert!(small.contains("it takes 8 GPUs with 2"), "{small}");
        // Fewer sequences and a smaller cache let it fit.
        let lower = LoadOptions { max_num_seqs: Some(8), kv_cache_bytes: Some(512 << 20), ..options() };
        assert_eq!(fewest_ranks(&rank_bytes(&config, &lower).unwrap(), &free(24, 8)), Ok(8));
    }
}
