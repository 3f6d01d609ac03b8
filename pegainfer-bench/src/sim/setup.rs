//! The engine of a ledger, as measured or with other flags.

use super::device::SimulatedDevice;
use super::tiers::{Links, TierSizes};
use crate::defaults::Defaults;
use anyhow::{Context, Result};
use clap::Parser;
use pegainfer_core::engine::EngineLimits;
use pegainfer_core::kv::Naming;
use pegainfer_core::kv::tiers::Tiers;
use pegainfer_core::ledger::{Header, Ledger};
use pegainfer_core::schedule::{EngineCore, SequenceState, TokenBudget};
use pegainfer_models::args::EngineArgs;
use pegainfer_models::{engine, model_path};

/// Bytes of a GPU that any model fits.
const LARGE: u64 = 1 << 42;

/// An engine over a simulated device, with the sizes of `header`, and copies of KV blocks of these sizes.
pub fn engine<S: SequenceState>(
    device: SimulatedDevice<S>,
    header: &Header,
    state: S,
    tiers: Option<TierSizes>,
) -> EngineCore<SimulatedDevice<S>> {
    let limits = EngineLimits {
        max_model_len: header.max_model_len,
        vocab_size: header.vocab_size,
        block_size: header.block_size,
        kv_blocks: header.kv_blocks,
        // Tokens and their format mean nothing here.
        kv_cache_dtype: "simulated",
        max_num_seqs: header.max_num_seqs,
        eos_token_ids: Vec::new(),
        num_speculative_tokens: None,
        image_token: None,
        unsupported: &[],
        max_loras: 0,
        hidden_size: 0,
    };
    let tokens = TokenBudget { step: header.max_num_batched_tokens, mixed: header.max_num_mixed_tokens };
    let device = device.with_links(tiers.map(|sizes| Links::new(sizes, header.block_size)));
    let mut engine = EngineCore::new(device, limits, tokens, state, None);
    if let Some(sizes) = tiers {
        let pool = engine.scheduler().pool().clone();
        let (blocks, states) = sizes.slots(sizes.host_tokens, header.block_size);
        // A token counts as a byte.
        let mut tiers = Tiers::new(pool, Naming::random(), blocks, header.block_size);
        if states > 0 {
            tiers.use_states(states, sizes.state_tokens);
        }
        let (blocks, states) = sizes.slots(sizes.disk_tokens, header.block_size);
        if blocks > 0 {
            tiers.use_disk(blocks, []);
        }
        if states > 0 {
            tiers.use_state_disk(states, []);
        }
        engine.use_tiers(tiers);
    }
    engine
}

/// Tokens of KV that are as large as a recurrent state of the ledger's model; 0 for a model without states.
pub fn state_tokens(ledger: &Ledger) -> Result<usize> {
    let Header { state, model, ranks, kv_cache_dtype, .. } = &ledger.header;
    if state.is_none() {
        return Ok(0);
    }
    let config = ledger.config.as_ref().context(
        "--kv-offloading-tokens: the ledger has no config.json, which has the size of a state; measure the ledger again",
    )?;
    let model = model_path::from_config(config, model)?;
    let engine = Defaults::try_parse_from(["sim", "--kv-cache-dtype", kv_cache_dtype])?.engine;
    let engine = EngineArgs { tensor_parallel_size: (*ranks).try_into().ok(), ..engine };
    let fit = engine::gpu_fit(&model.dir, &engine, LARGE)?;
    let (state, token) = (fit.states / fit.sequences.max(1) as u64, fit.kv / fit.kv_tokens.max(1) as u64);
    Ok((state / token.max(1)) as usize)
}
