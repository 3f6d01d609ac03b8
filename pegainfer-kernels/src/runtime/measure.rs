//! Measures the steps of a loaded engine for the ledger.

use super::executor::Executor;
use super::load::Engine;
use super::model::{Model, ragged};
use crate::SOURCES_HASH;
use crate::heads::BLOCK_SIZE;
use pegainfer_core::engine::StepEngine;
use pegainfer_core::exec::Device;
use pegainfer_core::ledger::{
    self, Effort, GridLimits, Header, MeasureStep, OpLine, Remeasured, StepLine, StepLoad, blocks_of,
};
use pegainfer_core::schedule::{SequenceState, StepExecutor};
use pegainfer_core::tensor::OpError;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// KV tokens that measured steps attend to at most, on the CPU and on a GPU: all of them are written first.
const KV_TOKENS: (usize, usize) = (16 << 10, 512 << 10);
/// Tokens of the prompts that write them.
const PROMPT_TOKENS: usize = 512;
/// Tokens of the longest prompt whose ops are timed.
const MAX_TIMED_PROMPT: usize = 8192;
/// Runs of a step whose ops are timed.
const OP_RUNS: usize = 3;

/// What was measured of an engine.
#[derive(Debug)]
pub struct Measured {
    /// The engine's properties. The names of model, device and formats are left empty.
    pub header: Header,
    /// Times of steps.
    pub steps: Vec<StepLine>,
    /// Times of ops in some of them, where each op begins when those before it have ended and CUDA graphs are not replayed.
    pub ops: Vec<OpLine>,
}

/// Measures a grid of steps. `graphs`: whether decode steps are replayed as CUDA graphs.
pub fn measure<M: Model>(
    engine: &mut Engine<M>,
    graphs: bool,
    effort: Effort,
    progress: &mut dyn FnMut(&StepLine),
) -> Result<Measured, OpError> {
    let header = header::<M>(engine, graphs)?;
    let executor = engine.executor();
    let on_gpu = executor.exec().device() == Device::Cuda;
    let kv_tokens = if on_gpu { KV_TOKENS.1 } else { KV_TOKENS.0 };
    let limits = limits(&header, kv_tokens / BLOCK_SIZE);
    write_kv(executor, &limits)?;
    let steps = ledger::measure(&mut Pipelined(executor), &limits, effort, progress)?;
    let ops = time_ops(executor, &steps, &limits)?;
    Ok(Measured { header, steps, ops })
}

/// Measures `steps` of a ledger again, as far as this engine can run them; returns its properties, and the times.
pub fn measure_again<M: Model>(
    engine: &mut Engine<M>,
    graphs: bool,
    steps: &[StepLine],
    progress: &mut dyn FnMut(&StepLine),
) -> Result<(Header, Vec<Remeasured>), OpError> {
    let header = header::<M>(engine, graphs)?;
    let limits = limits(&header, blocks_of(steps, BLOCK_SIZE));
    let executor = engine.executor();
    write_kv(executor, &limits)?;
    let again = ledger::measure_again(&mut Pipelined(executor), &limits, steps, progress)?;
    Ok((header, again))
}

/// What an engine can run, with at most `kv_blocks` blocks.
fn limits(header: &Header, kv_blocks: usize) -> GridLimits {
    GridLimits {
        max_num_seqs: header.max_num_seqs,
        max_tokens: header.max_num_batched_tokens,
        mixed_tokens: header.max_num_mixed_tokens,
        max_context: header.max_model_len,
        kv_blocks: header.kv_blocks.min(kv_blocks),
        block_size: BLOCK_SIZE,
        graphs: header.graphs,
    }
}

fn header<M: Model>(engine: &mut Engine<M>, graphs: bool) -> Result<Header, OpError> {
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
        kernels: SOURCES_HASH.to_owned(),
        model: String::new(),
        device: String::new(),
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
fn write_kv<M: Model>(executor: &mut Executor<M>, limits: &GridLimits) -> Result<(), OpError> {
    let tokens = PROMPT_TOKENS.min(limits.max_tokens).min(limits.max_context);
    let blocks = tokens.div_ceil(BLOCK_SIZE);
    let prompts = (limits.max_tokens / tokens).clamp(1, limits.max_num_seqs);
    let mut first = 0;
    while first + blocks <= limits.kv_blocks {
        let prompts = prompts.min((limits.kv_blocks - first) / blocks);
        executor.run(&ragged::<M>(&vec![(tokens, tokens); prompts]).over_blocks(BLOCK_SIZE, first))?;
        first += prompts * blocks;
    }
    Ok(())
}

/// Runs steps as the engine does: the next one is launched while one runs, where the device computes beside the host.
struct Pipelined<'a, M: Model>(&'a mut Executor<M>);

impl<M: Model> MeasureStep for Pipelined<'_, M> {
    fn run(&mut self, rows: &[(usize, usize)], runs: usize) -> Result<Vec<Duration>, OpError> {
        let (step, depth) = (ragged::<M>(rows), self.0.useful_depth());
        let (mut times, mut in_flight, mut last) = (Vec::with_capacity(runs), 0, Instant::now());
        // With two steps in flight, the first time is that of a launch, too.
        let extra = usize::from(depth > 1);
        for _ in 0..runs + extra {
            self.0.launch(&step)?;
            in_flight += 1;
            if in_flight == depth {
                self.finish(&mut times, &mut last)?;
                in_flight -= 1;
            }
        }
        for _ in 0..in_flight {
            self.finish(&mut times, &mut last)?;
        }
        Ok(times.split_off(extra))
    }
}

impl<M: Model> Pipelined<'_, M> {
    fn finish(&mut self, times: &mut Vec<Duration>, last: &mut Instant) -> Result<(), OpError> {
        self.0.finish()?;
        let now = Instant::now();
        times.push(now - std::mem::replace(last, now));
        Ok(())
    }
}

/// The ops of some steps: of one sequence and of the most, of a short and a long chunk, and of a mixed step.
fn time_ops<M: Model>(
    executor: &mut Executor<M>,
    steps: &[StepLine],
    limits: &GridLimits,
) -> Result<Vec<OpLine>, OpError> {
    let context = 256.min(limits.max_context).min(limits.kv_blocks / limits.max_num_seqs * BLOCK_SIZE).max(1);
    let chunk = limits.max_tokens.min(limits.max_context).min(512);
    let prompt = limits.max_tokens.min(limits.max_context).min(MAX_TIMED_PROMPT);
    let decoding = vec![(1, context); limits.max_num_seqs];
    let mut mixed = vec![(1, context); limits.max_num_seqs.div_ceil(8)];
    mixed.push((chunk.saturating_sub(mixed.len()).max(2), chunk));
    let chosen = [
        vec![(1, context)],
        vec![(1, context); limits.max_num_seqs.div_ceil(8)],
        decoding,
        vec![(chunk, chunk)],
        vec![(prompt, prompt)],
        mixed,
    ];
    let mut lines: Vec<OpLine> = Vec::new();
    executor.time_ops(true);
    for rows in chosen {
        let load = StepLoad::of_rows(rows.iter().copied());
        let measured = |line: &StepLine| line.load.kind() == load.kind();
        if !steps.iter().any(measured) || lines.iter().any(|line| line.load == load) {
            continue;
        }
        let step = ragged::<M>(&rows);
        let mut best: Option<BTreeMap<&'static str, (usize, Duration)>> = None;
        for _ in 0..OP_RUNS {
            let mut ops = BTreeMap::new();
            executor.run(&step)?;
            for (op, time) in executor.take_op_times() {
                let entry: &mut (usize, Duration) = ops.entry(op).or_default();
                *entry = (entry.0 + 1, entry.1 + time);
            }
            let total = |ops: &BTreeMap<_, (usize, Duration)>| ops.values().map(|(_, time)| *time).sum::<Duration>();
            if best.as_ref().is_none_or(|best| total(&ops) < total(best)) {
                best = Some(ops);
            }
        }
        for (op, (calls, time)) in best.into_iter().flatten() {
            lines.push(OpLine { load, op: op.to_owned(), calls, us: time.as_secs_f64() * 1e6 });
        }
    }
    executor.time_ops(false);
    Ok(lines)
}
