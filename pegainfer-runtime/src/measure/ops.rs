//! Measures the times of the ops of a step.

use super::measurable::{Measurable, StepOf};
use pegainfer_core::exec::Device;
use pegainfer_core::ledger::{GridLimits, OpLine, Rows, StepLoad};
use pegainfer_core::tensor::OpError;
use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// Numbers of decoding sequences in steps with timed ops, in addition to the engine's maximum.
const DECODE_ROWS: [usize; 4] = [1, 8, 32, 128];
/// Context of these sequences in tokens. At a multiple of a block DeepSeek-V4 would compress more tokens than in other
/// steps.
const DECODE_CONTEXT: usize = 1023;
/// Prompt lengths of steps with timed ops.
const PROMPTS: [usize; 4] = [512, 1024, 4096, 8192];
/// Tokens of the chunk of a mixed step.
const MIXED_CHUNK: usize = 512;
/// Runs of a step with timed ops; the fastest is used.
const RUNS: usize = 3;

/// Microseconds that a GPU waits before a step with timed ops. The host launches ahead meanwhile, so op times exclude
/// launches.
static HEAD_START: AtomicU64 = AtomicU64::new(10_000);

/// Op, kernel and operands: calls with the same key are counted together.
type Key = (&'static str, &'static str, String);

/// Steps with timed ops, as far as the engine can run them: decoding sequences, prompts, and both.
pub fn typical_steps(limits: &GridLimits) -> Vec<Rows> {
    let max_rows = limits.max_num_seqs;
    let decoding = |rows: usize| {
        let fits = limits.kv_blocks / rows * limits.block_size;
        vec![(1, DECODE_CONTEXT.min(limits.max_context).min(fits).max(1)); rows]
    };
    let longest = limits.max_tokens.min(limits.max_context).min(limits.kv_blocks * limits.block_size);
    let mut steps: Vec<Rows> =
        DECODE_ROWS.into_iter().filter(|rows| *rows < max_rows).chain([max_rows]).map(decoding).collect();
    let mut prompts = PROMPTS.map(|tokens| tokens.min(longest).max(2)).to_vec();
    prompts.dedup();
    steps.extend(prompts.into_iter().map(|tokens| vec![(tokens, tokens)]));
    let mut mixed = decoding(max_rows.div_ceil(8));
    let chunk = MIXED_CHUNK.min(longest);
    mixed.push((chunk.saturating_sub(mixed.len()).max(2), chunk.max(2)));
    steps.push(mixed);
    steps.retain(|rows| limits.holds(rows));
    steps
}

/// Times the ops of rank 0 in these steps.
pub fn time_ops<E: Measurable>(executor: &mut E, steps: &[Rows]) -> Result<Vec<OpLine>, OpError> {
    let mut lines: Vec<OpLine> = Vec::new();
    executor.time_ops(true);
    for rows in steps {
        let load = StepLoad::of_rows(rows.iter().copied());
        if lines.iter().any(|line| line.load == load) {
            continue;
        }
        let step = E::step(rows);
        let mut best: Option<BTreeMap<Key, (usize, Duration)>> = None;
        for _ in 0..RUNS {
            let ops = timed_run(executor, &step)?;
            let total = |ops: &BTreeMap<_, (usize, Duration)>| ops.values().map(|(_, time)| *time).sum::<Duration>();
            if best.as_ref().is_none_or(|best| total(&ops) < total(best)) {
                best = Some(ops);
            }
        }
        for ((op, kernel, operands), (calls, time)) in best.into_iter().flatten() {
            let us = time.as_secs_f64() * 1e6;
            lines.push(OpLine { load, op: op.to_owned(), kernel: kernel.to_owned(), operands, calls, us });
        }
    }
    executor.time_ops(false);
    Ok(lines)
}

/// Runs a step once with timed ops. Returns the number of calls and the time of each key.
fn timed_run<E: Measurable>(executor: &mut E, step: &StepOf<E>) -> Result<BTreeMap<Key, (usize, Duration)>, OpError> {
    if executor.exec().device() == Device::Cuda {
        executor.exec().install(|exec| exec.delay(&HEAD_START))?;
    }
    executor.launch(step)?;
    executor.sample(step)?;
    executor.finish()?;
    let mut ops: BTreeMap<Key, (usize, Duration)> = BTreeMap::new();
    for (record, time) in executor.take_timed_ops() {
        let entry = ops.entry((record.op, record.kernel, record.operands())).or_default();
        *entry = (entry.0 + 1, entry.1 + time);
    }
    Ok(ops)
}
