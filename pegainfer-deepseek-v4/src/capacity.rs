//! The largest step of an engine and the sizes of its pools, from the options it is loaded with.

use crate::bounds::StepBounds;
use crate::config::Config;
use crate::load_error::LoadError;
use crate::load_options::{DEFAULT_KV_BYTES, LoadOptions};
use crate::plan::PAGE_TOKENS;
use crate::state;
use pegainfer_core::engine::options::{check_step, context_len, max_pool_blocks, pool_blocks};
use pegainfer_core::schedule::speculation::Speculation;

/// Default number of running sequences.
const DEFAULT_SEQS: usize = 64;
/// Larger defaults for GPUs with enough memory, largest first.
const MORE_SEQS: [usize; 2] = [256, 128];

/// The largest step these options allow, with the default number of sequences and KV cache of a CPU.
pub(crate) fn bounds(config: &Config, options: &LoadOptions) -> Result<StepBounds, LoadError> {
    let rows = options.max_num_seqs.unwrap_or(DEFAULT_SEQS.min(options.max_num_batched_tokens));
    bounds_of(config, options, rows)
}

/// Bounds for `rows` running sequences.
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

/// `min_bounds`, or by default what fits the GPUs: more sequences, if they leave at least the KV cache of `min_bounds`,
/// and a larger KV cache. `pages_left(bounds)`: number of pages that fit next to everything else that these bounds
/// need.
pub(crate) fn on_gpus(
    config: &Config,
    options: &LoadOptions,
    min_bounds: StepBounds,
    mut pages_left: impl FnMut(StepBounds) -> Result<usize, LoadError>,
) -> Result<StepBounds, LoadError> {
    let is_given = options.kv_cache_bytes.is_some();
    let more = if options.max_num_seqs.is_none() { &MORE_SEQS[..] } else { &[] };
    for rows in more.iter().filter(|rows| (min_bounds.rows..=min_bounds.tokens).contains(rows)) {
        let wider = bounds_of(config, options, *rows)?;
        let left = pages_left(wider)?;
        if left >= wider.pages {
            return Ok(StepBounds { pages: if is_given { wider.pages } else { left }, ..wider });
        }
    }
    Ok(if is_given {
        min_bounds
    } else {
        StepBounds { pages: pages_left(min_bounds)?.max(min_bounds.pages), ..min_bounds }
    })
}

/// Number of pages in `bytes` bytes, up to the number that the sequences of `bounds` can use.
pub(crate) fn pages_of(bytes: u64, config: &Config, options: &LoadOptions, bounds: StepBounds) -> usize {
    (bytes / page_bytes(config, options)).min(useful_pages(bounds.context, bounds.rows)) as usize
}

/// Bytes of a page; 1 for a model with only window layers, which needs pages only to count tokens.
fn page_bytes(config: &Config, options: &LoadOptions) -> u64 {
    state::page_bytes(config, options.numerics).max(1) as u64
}

/// Number of pages that `rows` sequences of `context` tokens can use, up to the maximum of a pool.
fn useful_pages(context: usize, rows: usize) -> u64 {
    ((context.div_ceil(PAGE_TOKENS) * rows) as u64).min(max_pool_blocks(PAGE_TOKENS))
}
