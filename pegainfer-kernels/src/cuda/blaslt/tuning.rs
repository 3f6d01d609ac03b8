//! The choice among the heuristic's candidates, by timing them as a step would run them: with weights that are not in
//! the cache.

use super::gemm_size::GemmSize;
use super::{BlasLt, Operands, Plan, m_bucket};
use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::sys;
use cudarc::driver::{DriverError, result, sys as driver};
use pegainfer_core::cuda::DeviceBuffer;
use pegainfer_core::tensor::DType;
use std::time::Instant;

/// Row counts up to here come often, as decode batches, and are timed.
const SMALL: usize = 128;
/// Larger row counts that are timed are powers of two from the first to the second: prefill chunks.
const LARGE: [usize; 2] = [512, 16_384];
/// Bytes of weights that are read in turn: several times the L2 of any GPU.
const COLD_BYTES: usize = 192 << 20;
/// Maximum number of copies of the weights; a model of small weights stays in the L2 anyway.
const COPIES: usize = 24;
/// Rows of x of a measurement, at least: few rows are timed over many GEMMs, thousands over one.
const ROWS: usize = 4096;
/// Number of measurements; the best counts.
const ROUNDS: usize = 3;
/// Minimum speed-up of a candidate over the heuristic's first. Smaller differences are noise, and the results of a GEMM
/// should not change with noise.
const GAIN: f64 = 1.03;

/// True if the candidates for `rows` rows are timed. With usual options that happens before an engine serves, except
/// for the largest two, which are timed at their first use. For other row counts the heuristic's first is mostly as
/// good.
fn is_timed(rows: usize) -> bool {
    rows <= SMALL || rows.is_power_of_two() && (LARGE[0]..=LARGE[1]).contains(&rows)
}

impl BlasLt {
    /// The algorithm for a GEMM that has no plan yet.
    pub(super) fn algorithm(
        &mut self,
        gemm: GemmSize,
        plan: &Plan,
        at: Operands,
    ) -> Result<sys::cublasLtMatmulAlgo_t, CublasError> {
        let rows = m_bucket(gemm.m);
        if rows != gemm.m {
            // There are fewer rows of x than in that plan, so none are read.
            let served = self.plan(GemmSize { m: rows, ..gemm }, Operands { x: 0, ..at })?.algorithm;
            let served = self.accepts(plan, at.scales, &served).then_some(served);
            return served.map_or_else(|| Ok(self.candidates(plan, at.scales)?[0]), Ok);
        }
        let candidates = self.candidates(plan, at.scales)?;
        let chosen =
            if gemm.is_tuned() && is_timed(rows) { self.best_candidate(gemm, plan, at, &candidates) } else { 0 };
        Ok(*candidates.get(chosen).unwrap_or(&candidates[0]))
    }

    /// The candidate that earlier runs or a measurement found the best. The heuristic's first if nothing can be
    /// measured now.
    fn best_candidate(
        &mut self,
        gemm: GemmSize,
        plan: &Plan,
        at: Operands,
        candidates: &[sys::cublasLtMatmulAlgo_t],
    ) -> usize {
        if let Some(known) = self.autotuned.get(gemm) {
            return known;
        }
        match self.place.stream.capture_status() {
            Ok(driver::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE) => {}
            _ => return 0,
        }
        let start = Instant::now();
        match self.fastest(gemm, plan, at, candidates) {
            Ok((chosen, gain)) => {
                let spent = start.elapsed();
                log::debug!("cuBLASLt {gemm:?}: candidate {chosen}, {gain:.2} times as fast, found in {spent:.1?}");
                self.autotuned.add(gemm, chosen);
                chosen
            }
            Err(error) => {
                log::debug!("cuBLASLt {gemm:?} was not measured: {error}");
                0
            }
        }
    }

    /// The fastest candidate, and its speed relative to the first.
    fn fastest(
        &self,
        gemm: GemmSize,
        plan: &Plan,
        at: Operands,
        candidates: &[sys::cublasLtMatmulAlgo_t],
    ) -> Result<(usize, f64), DriverError> {
        let bench = Bench::new(self, gemm, at)?;
        let mut times = Vec::new();
        for algorithm in candidates {
            times.push(bench.time(&Plan { algorithm: *algorithm, ..*plan })?);
        }
        let best = (0..times.len()).min_by(|a, b| times[*a].total_cmp(&times[*b])).unwrap_or(0);
        let gain = times[0] / times[best];
        Ok(if gain < GAIN { (0, 1.0) } else { (best, gain) })
    }
}

/// Operands to measure with, in memory of their own: a GEMM may be asked to add to its output.
struct Bench<'a> {
    blaslt: &'a BlasLt,
    calls: Vec<Operands>,
    _memory: DeviceBuffer,
}

impl<'a> Bench<'a> {
    /// Copies the weights often enough that none is in the cache when it is used again. x is copied from `at` if that
    /// is not 0; otherwise it is zero.
    fn new(blaslt: &'a BlasLt, GemmSize { m, n, k, out, .. }: GemmSize, at: Operands) -> Result<Self, DriverError> {
        let stream = &blaslt.place.stream;
        let aligned = |bytes: usize| bytes.next_multiple_of(256);
        let (x, w, out) =
            (aligned(m * k * DType::Bf16.size()), aligned(n * k * DType::Bf16.size()), m * n * out.size());
        let copies = if w < COLD_BYTES { COLD_BYTES.div_ceil(w).clamp(2, COPIES) } else { 0 };
        let memory = DeviceBuffer::zeroed(stream.context(), stream, copies * w + x + out)?;
        let weights: Vec<u64> = match copies {
            0 => vec![at.w],
            _ => (0..copies).map(|i| memory.address() + (i * w) as u64).collect(),
        };
        let x_at = memory.address() + (copies * w) as u64;
        // SAFETY: the regions lie one after the other in `memory`; sources are live operands of these sizes.
        unsafe {
            for to in weights.iter().take(copies) {
                result::memcpy_dtod_async(*to, at.w, n * k * DType::Bf16.size(), stream.cu_stream())?;
            }
            if at.x != 0 {
                result::memcpy_dtod_async(x_at, at.x, m * k * DType::Bf16.size(), stream.cu_stream())?;
            }
        }
        let operands = |w: &u64| Operands { x: x_at, w: *w, out: x_at + x as u64, ..at };
        let calls = weights.iter().cycle().take((ROWS / m).clamp(1, copies.max(4))).map(operands).collect();
        Ok(Self { blaslt, calls, _memory: memory })
    }

    /// Milliseconds of all calls with this plan; infinite if the library refuses it. A graph runs them without gaps.
    fn time(&self, plan: &Plan) -> Result<f64, DriverError> {
        let stream = &self.blaslt.place.stream;
        stream.begin_capture(driver::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
        let queued = self.calls.iter().try_for_each(|at| self.blaslt.run(plan, *at, false, &self.blaslt.place));
        let graph = stream.end_capture(driver::CUgraphInstantiate_flags(0))?;
        let (Ok(()), Some(graph)) = (queued, graph) else { return Ok(f64::INFINITY) };
        let timing = Some(driver::CUevent_flags::CU_EVENT_DEFAULT);
        let (begin, end) = (stream.context().new_event(timing)?, stream.context().new_event(timing)?);
        let mut best = f64::INFINITY;
        // The first round loads the kernel and does not count.
        for round in 0..=ROUNDS {
            begin.record(stream)?;
            graph.launch()?;
            end.record(stream)?;
            let time = begin.elapsed_ms(&end)?;
            if round > 0 {
                best = best.min(f64::from(time));
            }
        }
        Ok(best)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_counts_that_come_often_are_timed() {
        assert!([16, 128, 512, 1024, 16_384].into_iter().all(is_timed));
        assert!(![144, 256, 640, 32_768].into_iter().any(is_timed));
    }
}
