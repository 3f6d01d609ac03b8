//! Checks of load options that all engines share. Errors are sentences that name the flag.

/// The context length: `requested` tokens, or the model's `max_len`.
pub fn context_len(requested: Option<usize>, max_len: usize) -> Result<usize, String> {
    let context = requested.unwrap_or(max_len);
    if context < 2 || context > max_len {
        return Err(format!("--max-model-len is {context}, but this model takes 2 to {max_len} tokens"));
    }
    Ok(context)
}

/// Maximum number of sequences. With [`MAX_TOKENS`] tokens, every input of a step fits one copy to a GPU.
const MAX_SEQS: usize = 1 << 14;
/// Maximum number of tokens in a step.
const MAX_TOKENS: usize = 1 << 18;

/// Default number of tokens in a step on the CPU.
const CPU_TOKENS: usize = 512;
/// Default maximum number of tokens in a step on a GPU: 40 prompts of 1,024 tokens, under half a second for a 4B model
/// on an H200. When 128 such prompts arrive at once, larger steps delay the first answers and smaller steps the later
/// ones (docs/benchmarks/h200-qwen3-4b.md).
const GPU_TOKENS: u64 = 40 << 10;
/// Default step sizes are rounded down to a multiple of this.
const TOKENS_UNIT: u64 = 1 << 10;
/// Divisor of GPU memory: a step's activations take at most this part of it by default.
const ACTIVATIONS: u64 = 12;

/// Maximum number of tokens in a step: `requested`, or on a GPU of `memory` bytes as many as fit an [`ACTIVATIONS`]th
/// of the memory at `token_bytes` each, up to [`GPU_TOKENS`].
pub fn step_tokens(requested: Option<usize>, memory: Option<u64>, token_bytes: u64) -> usize {
    let fitting = |memory: u64| {
        let units = memory / ACTIVATIONS / token_bytes.max(1) / TOKENS_UNIT;
        (units * TOKENS_UNIT).clamp(TOKENS_UNIT, GPU_TOKENS) as usize
    };
    requested.unwrap_or_else(|| memory.map_or(CPU_TOKENS, fitting))
}

/// Smallest memory of a GPU, in bytes, of which `share` holds `fixed` bytes and the activations of a step of
/// [`step_tokens`] tokens at `token_bytes` each. `max_tokens`: limit of the default number of tokens.
pub fn memory_for(fixed: u64, requested: Option<usize>, token_bytes: u64, max_tokens: usize, share: f64) -> u64 {
    let with = |tokens: u64| (fixed + tokens * token_bytes) as f64 / share;
    let memory = match requested {
        Some(tokens) => with(tokens as u64),
        None => {
            let growing = fixed as f64 / (share - 1.0 / ACTIVATIONS as f64).max(f64::MIN_POSITIVE);
            growing.min(with(GPU_TOKENS.min(max_tokens as u64))).max(with(TOKENS_UNIT))
        }
    };
    memory.ceil() as u64
}

/// Checks that a step of `tokens` tokens has at least one for each of `seqs` sequences, and that both are within
/// limits.
pub fn check_step(seqs: usize, tokens: usize) -> Result<(), String> {
    let given = || format!("--max-num-seqs is {seqs} and --max-num-batched-tokens is {tokens}");
    if seqs == 0 || tokens < seqs {
        return Err(format!("{}: there must be at least one sequence and at least one token per sequence", given()));
    }
    if seqs > MAX_SEQS || tokens > MAX_TOKENS {
        return Err(format!("{}: there may be at most {MAX_SEQS} sequences and {MAX_TOKENS} tokens", given()));
    }
    Ok(())
}

/// Maximum number of KV blocks of `block_tokens` tokens: a token's slot in the pool has 32 bits.
pub fn max_pool_blocks(block_tokens: usize) -> u64 {
    u64::from(u32::MAX) / block_tokens as u64
}

/// Checks `blocks` as the size of a pool of blocks of `block_tokens` tokens and `block_bytes` bytes.
pub fn pool_blocks(blocks: u64, block_tokens: usize, block_bytes: u64) -> Result<usize, String> {
    let max_blocks = max_pool_blocks(block_tokens);
    if blocks == 0 || blocks > max_blocks {
        return Err(format!(
            "--kv-cache-memory gives {blocks} KV blocks of {block_bytes} bytes, but a pool has 1 to {max_blocks}"
        ));
    }
    Ok(blocks as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_inclusive_and_errors_name_the_flag() {
        assert_eq!(context_len(None, 100), Ok(100));
        assert_eq!(context_len(Some(2), 100), Ok(2));
        assert!(context_len(Some(101), 100).unwrap_err().contains("--max-model-len is 101"));
        assert!(context_len(Some(1), 100).is_err());
        assert_eq!(check_step(4, 4), Ok(()));
        assert!(check_step(4, 3).unwrap_err().contains("--max-num-batched-tokens is 3"));
        assert!(check_step(0, 3).is_err());
        assert_eq!(check_step(MAX_SEQS, MAX_TOKENS), Ok(()));
        assert!(check_step(1, MAX_TOKENS + 1).unwrap_err().contains("at most"));
        assert_eq!(step_tokens(Some(7), Some(1 << 40), 1), 7);
        assert_eq!(step_tokens(None, None, 73_728), 512);
        assert_eq!(step_tokens(None, Some(150_000_000_000), 73_728), 40_960, "Qwen3-4B on an H200: 3.0 GB");
        assert_eq!(step_tokens(None, Some(25_000_000_000), 73_728), 27_648, "on a GPU of 24 GB");
        for (fixed, token_bytes, share) in
            [(68_000_000_000, 180_000, 0.9), (9_000_000_000, 73_728, 0.85), (1 << 30, 500_000, 0.9)]
        {
            for max_tokens in [4096, usize::MAX] {
                let fits = |memory: u64| {
                    let tokens = step_tokens(None, Some(memory), token_bytes).min(max_tokens);
                    (fixed + tokens as u64 * token_bytes) as f64 <= share * memory as f64
                };
                let memory = memory_for(fixed, None, token_bytes, max_tokens, share);
                assert!(fits(memory) && !fits(memory - memory / 40), "{fixed} bytes fit {memory}");
            }
        }
        assert_eq!(memory_for(1000, Some(10), 8, 4096, 0.5), 2160);
        let max_blocks = max_pool_blocks(16);
        assert_eq!(pool_blocks(max_blocks, 16, 1), Ok(max_blocks as usize));
        assert!(pool_blocks(max_blocks + 1, 16, 1).is_err());
        assert!(pool_blocks(0, 16, 7).unwrap_err().contains("0 KV blocks of 7 bytes"));
    }
}
