//! Loading.

use crate::bounds::{Sharing, StepBounds};
use crate::capacity::{self, bounds, on_gpus};
use crate::config::Config;
use crate::draft_method::{check_tensors, with_drafts};
use crate::executor::Executor;
use crate::inventory;
use crate::load_error::LoadError;
use crate::load_options::LoadOptions;
use crate::numerics::Numerics;
use crate::plan::{self, PAGE_TOKENS, Step};
use crate::shard::{MAX_RANKS, Shard};
use crate::state;
use crate::weights::{Source, Weights};
use pegainfer_core::engine::EngineLimits;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::kv::DeviceMemory;
use pegainfer_core::parallel::RankBytes;
use pegainfer_core::record::OpRecord;
use pegainfer_core::schedule::{EngineCore, StateConfig, StateSlots, TokenBudget};
use pegainfer_core::weights::Checkpoint;
use pegainfer_kernels::ops::deepseek_v4::SIDE_STREAMS;
use pegainfer_kernels::parallel;
use pegainfer_runtime::SyntheticAcceptance;
use std::time::{Duration, Instant};

/// The DeepSeek-V4 engine.
pub type DeepSeekEngine = EngineCore<Executor>;

/// Tokens of the largest step of the warm-up.
const WARM_UP_TOKENS: usize = 4096;

/// A loaded engine, ready for its thread, and the facts that start-up prints.
#[derive(Debug)]
pub struct Loaded {
    /// The engine.
    pub engine: DeepSeekEngine,
    /// The model's numbers.
    pub config: Config,
    /// Bytes of the weights of all ranks.
    pub weight_bytes: u64,
    /// Time from the first weight to the last, on the device.
    pub weights_time: Duration,
    /// Bytes of pages and slots on each rank.
    pub kv_bytes: u64,
}

/// Loads a DeepSeek-V4 checkpoint onto one rank per `execs`. `progress` is called with (bytes of this chunk, bytes of
/// all weights).
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
    let weights_time = start.elapsed();
    ranks.iter_mut().try_for_each(|(exec, _)| exec.open_side_streams(SIDE_STREAMS))?;
    if ranks.iter().all(|(exec, _)| exec.device() == Device::Cuda) {
        bounds = on_gpus(&config, options, bounds, |bounds| pages_left(&mut ranks, &config, options, bounds))?;
    }
    let ranks = ranks.into_iter().zip(weights).map(|((exec, shard), weights)| (exec, shard, weights)).collect();
    let mut executor = Executor::new(config.clone(), options.numerics, ranks, bounds)?;
    executor.set_synthetic_acceptance(SyntheticAcceptance::of(options.speculation.as_ref()));
    if options.check_ranks {
        executor.check_ranks();
    }
    // One token through the model, which refuses what it cannot run.
    executor.run(&plan::uniform(1, 1, 1))?;
    let tokens = bounds.tokens.min(bounds.context).min(bounds.pages * PAGE_TOKENS).min(WARM_UP_TOKENS);
    executor.warm_up(tokens)?;
    executor.capture_graphs(bounds.rows.min(bounds.pages), bounds.drafts)?;
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
    let engine = DeepSeekEngine::new(executor, limits, tokens, slots, options.speculation.clone());
    Ok(Loaded { engine, config, weight_bytes, weights_time, kv_bytes })
}

/// Number of KV cache pages that fit each GPU next to weights and everything else that `bounds` need, up to the number
/// that the sequences of `bounds` can use.
fn pages_left(
    ranks: &mut [(Exec, Shard)],
    config: &Config,
    options: &LoadOptions,
    bounds: StepBounds,
) -> Result<usize, LoadError> {
    // All ranks need about the same.
    let (exec, shard) = &ranks[0];
    let all = without_memory(config, options.numerics, *shard, StepBounds { pages: 1, ..bounds })?.allocated_bytes();
    let coming = all.saturating_sub(exec.allocated_bytes()) + parallel::device_bytes(shard.ranks);
    let mut left = u64::MAX;
    for (exec, _) in ranks {
        let gpu = exec.gpu()?.info()?;
        let memory = DeviceMemory { total: gpu.memory as u64, free: (gpu.free as u64).saturating_sub(coming) };
        left = left.min(memory.left_of(options.gpu_memory_utilization));
    }
    Ok(capacity::pages_of(left, config, options, bounds))
}

/// The ops of one step on rank 0 of `ranks`, without weights or memory: `batch` rows that each add `tokens` tokens to a
/// total context of `context` tokens, and sample. Exchanges are those of GPUs with peer access. If `config` loads
/// layers that draft, their passes after the step are omitted, and slots have the rings for one draft token.
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

/// The ops of a pass of DSpark's stages, which `config` loads, over `blocks` blocks after `context` tokens each.
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

/// Rank 0 of `ranks` on `Meta` for steps of `batch` rows that each add `tokens` tokens, and such a step. Rings are
/// longer by `drafts` tokens.
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
        pages: batch * step.max_blocks(),
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

/// Memory that a GPU needs with these options, for each possible number of ranks: weights, slots, pages, workspace, and
/// an estimate for CUDA.
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
    use crate::load_options::DEFAULT_KV_BYTES;
    use crate::testing::flash;
    use pegainfer_core::parallel::fewest_ranks;

    fn options() -> LoadOptions {
        LoadOptions {
            model_path: std::path::PathBuf::new(),
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

    /// Memory of the official shapes: the weights that `inspect` prints, 128 slots, 4 GiB of pages, and the rest.
    #[test]
    fn a_rank_needs_its_weights_its_state_and_little_more() {
        let config = flash(false);
        let needs = rank_bytes(&config, &options()).unwrap();
        let state = 128 * state::slot_bytes(&config, Numerics::REFERENCE, 0) as u64 + DEFAULT_KV_BYTES;
        assert_eq!(needs.iter().map(|need| need.ranks).collect::<Vec<_>>(), [1, 2, 4, 8]);
        for RankBytes { ranks, bytes } in needs {
            // `wo_a` in bf16 as well.
            let wide = config.layers.len() * config.o_lora_rank * config.heads * config.head_dim * 2 / ranks;
            let rest = bytes as i64 - (weight_bytes(&config, ranks).unwrap() + state + wide as u64) as i64;
            println!("{ranks} ranks: {bytes} bytes, {rest} in addition to weights, slots and pages");
            assert!(
                (500_000_000..2_000_000_000).contains(&rest),
                "{ranks} ranks: {bytes} bytes, {rest} of them for the rest"
            );
        }
    }

    /// Sequences and whole gigabytes of KV cache of a rank of `ranks`, on a GPU with `gigabytes` for it.
    fn on_gpus_of(gigabytes: u64, ranks: usize, options: &LoadOptions) -> (usize, u64) {
        let config = flash(false);
        let left = |bounds: StepBounds| {
            let shard = Shard::all(&config, ranks).unwrap()[0];
            let one_page = StepBounds { pages: 1, ..bounds };
            let taken = without_memory(&config, options.numerics, shard, one_page)?.allocated_bytes();
            let left = (gigabytes * 1_000_000_000).saturating_sub(taken);
            Ok(capacity::pages_of(left, &config, options, bounds))
        };
        let bounds = on_gpus(&config, options, bounds(&config, options).unwrap(), left).unwrap();
        let bytes = bounds.pages * state::page_bytes(&config, options.numerics);
        (bounds.rows, bytes as u64 / 1_000_000_000)
    }

    #[test]
    fn sequences_and_cache_follow_the_memory_of_the_gpus() {
        // Nine tenths of two 141 GB cards, four 80 GB cards, eight 36 GB cards.
        assert_eq!(on_gpus_of(127, 2, &options()), (256, 36));
        assert_eq!(on_gpus_of(72, 4, &options()), (256, 21));
        assert_eq!(on_gpus_of(32, 8, &options()), (128, 5));
        // The values used to choose the number of ranks, even if the utilization leaves less.
        assert_eq!(on_gpus_of(26, 8, &options()), (64, 4));
        assert_eq!(on_gpus_of(22, 8, &options()), (64, 4));
        // Values set by the user are kept.
        let said = LoadOptions { max_num_seqs: Some(100), kv_cache_bytes: Some(5_100_000_000), ..options() };
        assert_eq!(on_gpus_of(127, 2, &said), (100, 5));
        assert_eq!(on_gpus_of(22, 8, &said), (100, 5));
        assert_eq!(on_gpus_of(127, 2, &LoadOptions { max_num_seqs: None, ..said }), (256, 5));
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
