//! Measures the engine thread's own time per step, by running it over a device that takes no time.

use super::device::SimulatedDevice;
use super::setup;
use anyhow::{Result, ensure};
use pegainfer_core::engine::{GenerateRequest, RequestId, StepEngine};
use pegainfer_core::ledger::{Header, HostCost, Law, OpShares, StepLine, StepLoad};
use std::time::Instant;

/// Number of generated tokens per sequence.
const STEPS: usize = 256;
/// Maximum number of sequences in the larger of two runs.
const MAX_SEQUENCES: usize = 64;
/// Number of runs; the fastest counts.
const RUNS: usize = 5;

/// The host's time per step on this machine, for the engine of `header`.
pub fn host_cost(header: &Header) -> Result<HostCost> {
    let sequences = header.max_num_seqs.min(header.kv_blocks).min(MAX_SEQUENCES);
    let one = best(header, 1)?;
    if sequences == 1 {
        return Ok(HostCost { step_us: one, row_us: 0.0 });
    }
    let many = best(header, sequences)?;
    let row_us = ((many - one) / (sequences - 1) as f64).max(0.0);
    Ok(HostCost { step_us: (one - row_us).max(0.0), row_us })
}

/// Microseconds of a decode step of `rows` sequences.
fn best(header: &Header, rows: usize) -> Result<f64> {
    let mut best = f64::INFINITY;
    for _ in 0..RUNS {
        best = best.min(decode(header, rows)?);
    }
    Ok(best)
}

fn decode(header: &Header, rows: usize) -> Result<f64> {
    let no_time = |rows: &[(usize, usize)]| {
        let load = StepLoad::of_rows(rows.iter().copied());
        StepLine { load, us: 0.0, spread: 0.0, runs: 0 }
    };
    let law = Law::new(&[no_time(&[(1, 1)]), no_time(&[(2, 2)])], false)?;
    let device = SimulatedDevice::<()>::new(law, HostCost::default(), header.depth, OpShares::default(), false);
    let mut engine = setup::engine(device, header, (), None);
    let tokens = STEPS.min(header.max_model_len - 1).min(header.kv_blocks / rows * header.block_size - 1).max(1);
    for i in 0..rows {
        let request = GenerateRequest { ignore_eos: true, ..GenerateRequest::greedy(vec![i as u32], tokens) };
        engine.add(RequestId(i as u64), request);
    }
    let start = Instant::now();
    while engine.has_work() {
        match engine.plan() {
            Some(_) => engine.launch()?,
            None => {
                engine.wait();
                engine.finish()?;
            }
        }
    }
    let (time, steps) = (start.elapsed(), engine.stats().steps);
    ensure!(steps > 0, "the engine ran no step");
    Ok(time.as_secs_f64() * 1e6 / steps as f64)
}
