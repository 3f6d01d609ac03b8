//! The engine of a ledger, as measured or with other flags.

use super::device::SimulatedDevice;
use pegainfer_core::engine::EngineLimits;
use pegainfer_core::ledger::Header;
use pegainfer_core::schedule::{EngineCore, SequenceState, TokenBudget};

/// An engine over a simulated device, with the sizes of `header`.
pub fn engine<S: SequenceState>(
    device: SimulatedDevice<S>,
    header: &Header,
    state: S,
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
    EngineCore::new(device, limits, tokens, state, None)
}
