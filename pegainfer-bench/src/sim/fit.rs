//! Requests that the simulated engine would refuse, and searches without a result.

use super::args::SimArgs;
use super::workload::Workload;
use pegainfer_core::ledger::Header;
use thiserror::Error;

/// Flags that no simulation can follow.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum UnfitError {
    /// The context is shorter than a request.
    #[error(
        "a prompt of {prompt} tokens and an output of {output} exceed the context of {context} tokens of this ledger: give \
         a smaller --prompt-len or --output-len"
    )]
    Context {
        /// Prompt tokens.
        prompt: usize,
        /// Output tokens.
        output: usize,
        /// The ledger's context length.
        context: usize,
    },
    /// The KV cache is smaller than a request.
    #[error(
        "a prompt of {prompt} tokens and an output of {output} exceed the KV cache of {capacity} tokens: give a smaller \
         --prompt-len or --output-len, or a larger --kv-cache-tokens"
    )]
    KvCache {
        /// Prompt tokens.
        prompt: usize,
        /// Output tokens.
        output: usize,
        /// Tokens of the KV cache.
        capacity: usize,
    },
    /// No request of the trace fits.
    #[error(
        "none of the trace's {requests} requests fits: the shortest has {shortest} tokens, and the limit is {limit} (context \
         {context}, KV cache {capacity})"
    )]
    Trace {
        /// Number of requests.
        requests: usize,
        /// Prompt and output tokens of the shortest request.
        shortest: usize,
        /// The smaller of the other two.
        limit: usize,
        /// The ledger's context length.
        context: usize,
        /// Tokens of the KV cache.
        capacity: usize,
    },
    /// One output token has no TPOT.
    #[error("--slo-tpot needs an --output-len of at least 2: a single token has no TPOT")]
    NoTpot,
}

/// Checks the requests of the flags that search a rate.
///
/// # Errors
/// No request fits, or the limited metric does not exist.
pub fn check_search(args: &SimArgs, header: &Header) -> Result<(), UnfitError> {
    let (prompt, output) = (args.prompt_len.get(), args.output_len.get());
    match args.slo_tpot {
        Some(_) if output == 1 => Err(UnfitError::NoTpot),
        _ => check_request(prompt, output, header),
    }
}

/// Checks that a workload has requests that fit. Others of a trace are refused one by one, as by a server.
///
/// # Errors
/// No request fits.
pub fn check_workload(workload: &Workload, header: &Header) -> Result<(), UnfitError> {
    let requests = match workload {
        Workload::Point(point) => return check_request(point.prompt_len, point.output_len, header),
        Workload::Trace { trace, .. } => &trace.requests,
    };
    if requests.iter().any(|request| check_request(request.prompt_len, request.output_len, header).is_ok()) {
        return Ok(());
    }
    let shortest = requests.iter().map(|request| request.prompt_len + request.output_len).min().unwrap_or(0);
    let (context, capacity) = (header.max_model_len, capacity(header));
    Err(UnfitError::Trace { requests: requests.len(), shortest, limit: context.min(capacity), context, capacity })
}

/// The checks of a request that the engine's limits make, before the simulation starts.
fn check_request(prompt: usize, output: usize, header: &Header) -> Result<(), UnfitError> {
    let (tokens, context, capacity) = (prompt + output, header.max_model_len, capacity(header));
    if tokens > context {
        Err(UnfitError::Context { prompt, output, context })
    } else if tokens - 1 > capacity {
        // The KV of the last token is never written.
        Err(UnfitError::KvCache { prompt, output, capacity })
    } else {
        Ok(())
    }
}

/// Tokens of the KV cache.
fn capacity(header: &Header) -> usize {
    header.kv_blocks * header.block_size
}
