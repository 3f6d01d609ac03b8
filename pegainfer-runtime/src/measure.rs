//! Measures the steps of a loaded engine for the ledger.

mod kernels;
mod measurable;
mod ops;
mod pipelined;

pub use measurable::Measurable;
use pegainfer_core::engine::StepEngine;
use pegainfer_core::exec::Device;
use pegainfer_core::ledger::{
    self, GridLimits, Header, KernelLine, OpLine, Remeasured, Rows, Selection, StepLine, blocks_of, blocks_of_rows,
};
use pegainfer_core::schedule::{EngineCore, SequenceState};
use pegainfer_core::tensor::OpError;
use pegainfer_kernels::sources;
use pipelined::Pipelined;

/// Maximum number of KV tokens that measured steps attend to, on the CPU and on a GPU; all are written first.
const KV_TOKENS: (usize, usize) = (16 << 10, 512 << 10);
/// Tokens of the prompts that write them.
const PROMPT_TOKENS: usize = 512;

/// Measurements of an engine.
#[derive(Debug)]
pub struct Measured {
    /// The engine's properties. The names of model, device and formats are left empty, and the number of ranks is 1.
    pub header: Header,
    /// Times of steps.
    pub steps: Vec<StepLine>,
    /// Op times of some steps. Each op starts after earlier ones have ended, and CUDA graphs are not replayed.
    pub ops: Vec<OpLine>,
    /// Kernels of these steps as they are served, if they were asked for.
    pub kernels: Vec<KernelLine>,
}

/// Measures steps, and the ops of some of them. `graphs`: decode steps are replayed as CUDA graphs.
pub fn measure<E: Measurable>(
    engine: &mut EngineCore<E>,
    graphs: bool,
    selection: Selection<'_>,
    progress: &mut dyn FnMut(&StepLine),
) -> Result<Measured, OpError> {
    let header = header(engine, graphs)?;
    let executor = engine.executor();
    let on_gpu = executor.exec().device() == Device::Cuda;
    let kv_tokens = if on_gpu { KV_TOKENS.1 } else { KV_TOKENS.0 };
    let blocks = |steps: &[Rows]| steps.iter().map(|rows| blocks_of_rows(rows, header.block_size)).max().unwrap_or(0);
    let limits = limits(
        &header,
        match selection {
            Selection::Grid(_) => kv_tokens / header.block_size,
            Selection::Steps { steps, .. } => blocks(steps),
        },
    );
    write_kv(executor, &limits)?;
    let recorded = match selection {
        Selection::Steps { steps, kernels: true } => steps,
        _ => &[],
    };
    if !recorded.is_empty() {
        kernels::capture_graphs(executor, &limits, recorded)?;
    }
    let mut target = Pipelined(executor);
    let (steps, timed) = match selection {
        Selection::Grid(effort) => {
            let mut steps = ledger::measure(&mut target, &limits, effort, progress)?;
            let timed = ops::typical_steps(&limits);
            let more = ledger::measure_steps(&mut target, &limits, &timed, progress)?;
            steps.extend(
                more.into_iter().filter(|line| steps.iter().all(|other| other.load != line.load)).collect::<Vec<_>>(),
            );
            (steps, timed)
        }
        Selection::Steps { steps, .. } => {
            (ledger::measure_steps(&mut target, &limits, steps, progress)?, steps.to_vec())
        }
    };
    let kernels = if recorded.is_empty() { Vec::new() } else { kernels::record_kernels(executor, recorded)? };
    let ops = ops::time_ops(executor, &timed)?;
    Ok(Measured { header, steps, ops, kernels })
}

/// Measures `steps` of a ledger again, as far as this engine can run them; returns its properties, and the times.
pub fn measure_again<E: Measurable>(
    engine: &mut EngineCore<E>,
    graphs: bool,
    steps: &[StepLine],
    progress: &mut dyn FnMut(&StepLine),
) -> Result<(Header, Vec<Remeasured>), OpError> {
    let header = header(engine, graphs)?;
    let limits = limits(&header, blocks_of(steps, header.block_size));
    let executor = engine.executor();
    write_kv(executor, &limits)?;
    let again = ledger::measure_again(&mut Pipelined(executor), &limits, steps, progress)?;
    Ok((header, again))
}

/// Limits of an engine with up to `kv_blocks` blocks.
fn limits(header: &Header, kv_blocks: usize) -> GridLimits {
    GridLimits {
        max_num_seqs: header.max_num_seqs,
        max_tokens: header.max_num_batched_tokens,
        mixed_tokens: header.max_num_mixed_tokens,
        max_context: header.max_model_len,
        kv_blocks: header.kv_blocks.min(kv_blocks),
        block_size: header.block_size,
        graphs: header.graphs,
    }
}

fn header<E: Measurable>(engine: &mut EngineCore<E>, graphs: bool) -> Result<Header, OpError> {
    let limits = engine.limits();
    let config = engine.scheduler().config();
    let (max_num_batched_tokens, max_num_mixed_tokens) = (config.max_num_batched_tokens, config.max_num_mixed_tokens);
    let state = engine.scheduler().state().slots();
    let executor = engine.executor();
    let driver = match executor.exec().device() {
        Device::Cuda => Some(executor.exec().gpu()?.info()?.driver),
        _ => None,
    };
    Ok(Header {
        version: Header::VERSION,
        program: env!("CARGO_PKG_VERSION").to_owned(),
        kernels: sources::hash(executor.exec().device(), E::FAMILY).to_owned(),
        measured: None,
        model: String::new(),
        device: String::new(),
        ranks: 1,
        driver: driver.map(|version| format!("CUDA {}.{}", version / 1000, version % 1000 / 10)),
        quantization: None,
        kv_cache_dtype: limits.kv_cache_dtype.to_owned(),
        kv_blocks: limits.kv_blocks,
        block_size: limits.block_size,
        max_model_len: limits.max_model_len,
        vocab_size: limits.vocab_size,
        max_num_seqs: limits.max_num_seqs,
        max_num_batched_tokens,
        max_num_mixed_tokens,
        depth: executor.useful_depth(),
        graphs: graphs && executor.exec().device() == Device::Cuda,
        state,
    })
}

/// Writes the blocks that measured steps read: memory that was never written is not like memory that was.
fn write_kv<E: Measurable>(executor: &mut E, limits: &GridLimits) -> Result<(), OpError> {
    let tokens = PROMPT_TOKENS.min(limits.max_tokens).min(limits.max_context);
    let blocks = tokens.div_ceil(limits.block_size);
    let prompts = (limits.max_tokens / tokens).clamp(1, limits.max_num_seqs);
    let mut first = 0;
    while first + blocks <= limits.kv_blocks {
        let prompts = prompts.min((limits.kv_blocks - first) / blocks);
        let step = E::step(&vec![(tokens, tokens); prompts]).over_blocks(limits.block_size, first);
        executor.launch(&step)?;
        executor.sample(&step)?;
        executor.finish()?;
        first += prompts * blocks;
    }
    Ok(())
}
