//! The engine of a ledger, as measured or with other flags.

use super::device::SimulatedDevice;
use super::tiers::{Links, TierSizes};
use pegainfer_core::engine::EngineLimits;
use pegainfer_core::kv::Naming;
use pegainfer_core::kv::tiers::Tiers;
use pegainfer_core::ledger::Header;
use pegainfer_core::schedule::{EngineCore, SequenceState, TokenBudget};

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
    if let Some(TierSizes { host_tokens, disk_tokens, .. }) = tiers {
        let pool = engine.scheduler().pool().clone();
        // Nothing asks for the bytes of a slot.
        let mut tiers = Tiers::new(pool, Naming::random(), host_tokens / header.block_size, 0);
        if disk_tokens > 0 {
            tiers.use_disk(disk_tokens / header.block_size, []);
        }
        engine.use_tiers(tiers);
    }
    engine
}
