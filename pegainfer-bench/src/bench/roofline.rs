//! Roofline: the time of a step's recorded ops if memory bandwidth or arithmetic is the only limit.

use super::limits::{Limits, Load, Work};
use super::peaks::Peaks;
use super::stats::Figures;
use super::workload::Point;
use anyhow::Result;
use half::bf16;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::isa::Isa;
use pegainfer_core::tensor::DType;
use pegainfer_kernels::{cuda, ops};
use pegainfer_models::engine;
use pegainfer_runtime::Overrides;
use rayon::prelude::*;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// `(m, k, n)` of the GEMM `[m, k] x [k, n]` for measurements on the CPU, larger than a core's caches.
const GEMM: (usize, usize, usize) = (256, 2560, 9728);
/// Minimum duration of a measurement on the CPU.
const MIN_DURATION: Duration = Duration::from_millis(300);

/// Limits of a device, and the model to which they are applied.
#[derive(Debug, Clone, Serialize)]
pub struct Roofline {
    #[serde(skip)]
    model: PathBuf,
    /// Formats of weights and KV cache that differ from config.json's.
    #[serde(skip)]
    overrides: Overrides,
    /// Ranks that share the model.
    #[serde(skip)]
    ranks: usize,
    /// Engines with these limits each, which share the requests.
    pub engines: usize,
    /// Memory bandwidth in bytes per second.
    pub read_bytes_s: f64,
    /// Source of `read_bytes_s`.
    pub read_source: &'static str,
    /// bf16 arithmetic rate in FLOP/s; `None` if it is unknown.
    pub peak_flop_s: Option<f64>,
    /// Source of `peak_flop_s`.
    pub peak_source: &'static str,
}

impl Roofline {
    /// The limits of `exec`, rank 0 of `ranks`, for one engine of the model in `model`, with `overrides`. Given limits
    /// (bytes/s and FLOP/s) are not measured. Call it while no engine is loaded, so that both fit into memory. `device` is the device's name.
    pub fn new(
        (model, overrides, ranks): (&Path, Overrides, usize),
        mut exec: Exec,
        device: &str,
        read: Option<f64>,
        peak: Option<f64>,
    ) -> Result<Self> {
        let (read_bytes_s, read_source) = match read {
            Some(read) => (read, "as given"),
            None => {
                let bytes = engine::weight_bytes(model, &overrides)?;
                (read_bandwidth(&mut exec, bytes)?, "a plain read of the weights' size")
            }
        };
        let (peak_flop_s, peak_source) = match (peak, exec.device()) {
            (Some(peak), _) => (Some(peak), "as given"),
            (None, Device::Cuda) => (Peaks::from_datasheet(device).flop_s, "the datasheet's dense bf16"),
            (None, _) => (Some(gemm_rate(&mut exec)?), "a measured bf16 GEMM"),
        };
        let model = model.to_owned();
        Ok(Self { model, overrides, ranks, engines: 1, read_bytes_s, read_source, peak_flop_s, peak_source })
    }

    /// The limits of a point with the metrics `figures`, at their mean batch size and context length.
    pub fn limits(&self, point: Point, figures: &Figures) -> Result<Limits> {
        let Point { prompt_len, output_len, .. } = point;
        let cached = (figures.cached_tokens as usize).min(prompt_len - 1);
        let sequences = figures.decoding.round().max(1.0) as usize;
        let load = Load { sequences, engines: self.engines, output_len };
        let prefill = self.step(1, prompt_len - cached, prompt_len)?;
        let decode = self.step(load.batch(), 1, prompt_len + output_len.div_ceil(2))?;
        let peaks = Peaks { read_bytes_s: Some(self.read_bytes_s), flop_s: self.peak_flop_s };
        Ok(Limits::new(load, decode, prefill, peaks))
    }

    /// Work of a step of `batch` sequences that attend to `context` tokens, the last `tokens` of them new.
    fn step(&self, batch: usize, tokens: usize, context: usize) -> Result<Work> {
        let records = engine::record_rank(&self.model, &self.overrides, self.ranks, (batch, tokens, context))?;
        Ok(Work::of(&records))
    }
}

/// Rates of this machine's CPU, measured: a plain read of `bytes` bytes and a bf16 GEMM.
pub fn cpu_peaks(bytes: u64) -> Result<Peaks> {
    let mut exec = Exec::cpu(Isa::best(), None)?;
    let (read, flops) = (read_bandwidth(&mut exec, bytes)?, gemm_rate(&mut exec)?);
    Ok(Peaks { read_bytes_s: Some(read), flop_s: Some(flops) })
}

/// Bandwidth of a plain read of `bytes` bytes, in bytes per second: the best of several runs.
fn read_bandwidth(exec: &mut Exec, bytes: u64) -> Result<f64> {
    if exec.device() == Device::Cuda {
        return Ok(cuda::read_bandwidth(exec, bytes)?);
    }
    let mut data = exec.tensor("read", &[bytes as usize / 2], DType::Bf16)?;
    // Pages that were never written all map to one zero page.
    data.host_mut::<bf16>().fill(bf16::ONE);
    let lines = data.host::<bf16>().as_chunks::<64>().0;
    let seconds = best(|| {
        std::hint::black_box(exec.on_host(|| lines.par_chunks(1 << 14).map(read).reduce(|| 0, |a, b| a ^ b)));
        Ok(())
    })?;
    Ok(bytes as f64 / seconds)
}

/// Reads every element. The result keeps the compiler from removing the reads.
fn read(lines: &[[bf16; 64]]) -> u16 {
    let lanes = lines.iter().fold([0u16; 64], |a, line| std::array::from_fn(|i| a[i] ^ line[i].to_bits()));
    lanes.into_iter().fold(0, |a, b| a ^ b)
}

/// FLOP/s of one large GEMM on the CPU: the best of several runs.
fn gemm_rate(exec: &mut Exec) -> Result<f64> {
    let (m, k, n) = GEMM;
    let mut x = exec.tensor("x", &[m, k], DType::Bf16)?;
    let mut w = exec.tensor("w", &[n, k], DType::Bf16)?;
    let mut out = exec.tensor("out", &[m, n], DType::Bf16)?;
    x.host_mut::<bf16>().fill(bf16::ONE);
    w.host_mut::<bf16>().fill(bf16::ONE);
    let seconds = exec.install(|exec| best(|| Ok(ops::linear(exec, &x, &w, &mut out)?)))??;
    Ok((2 * m * k * n) as f64 / seconds)
}

/// Seconds of the fastest run of `work`. Short work is repeated more often, because other programs may disturb it.
fn best(mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    let (start, mut best, mut runs) = (Instant::now(), f64::INFINITY, 0);
    while runs < 3 || start.elapsed() < MIN_DURATION {
        let begin = Instant::now();
        work()?;
        best = best.min(begin.elapsed().as_secs_f64());
        runs += 1;
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::limits::Limit;
    use crate::bench::stats::{Completion, Measurements};
    use crate::bench::workload::Arrivals;
    use pegainfer_kernels::ops::KvDType;
    use pegainfer_testing::model_dir;

    fn roofline(read: f64, peak: Option<f64>) -> Roofline {
        let (read_source, peak_source) = ("", "");
        let (model, overrides) = (model_dir(), Overrides::default());
        let engines = 1;
        Roofline {
            model,
            overrides,
            ranks: 1,
            engines,
            read_bytes_s: read,
            read_source,
            peak_flop_s: peak,
            peak_source,
        }
    }

    fn limits(roofline: &Roofline, cached: usize) -> Limits {
        let point = Point { arrivals: Arrivals::Closed { streams: 4 }, requests: 4, prompt_len: 100, output_len: 20 };
        let start = Instant::now();
        // Four requests that decode all the time, so the batch size is four.
        let stamps = vec![Duration::ZERO, Duration::from_secs(1)];
        let completion = Completion { start, stamps, prompt: 100, asked: 20, tokens: 20, cached };
        let mut measurements = Measurements::default();
        (0..4).for_each(|_| measurements.add(completion.clone()));
        roofline.limits(point, &Figures::new(&measurements, 0, Duration::from_secs(1))).unwrap()
    }

    fn total(batch: usize, tokens: usize, context: usize) -> (f64, f64) {
        total_with(&Overrides::default(), batch, tokens, context)
    }

    fn total_with(overrides: &Overrides, batch: usize, tokens: usize, context: usize) -> (f64, f64) {
        let records = engine::record(&model_dir(), overrides, batch, tokens, context).unwrap();
        (records.iter().map(|r| r.bytes).sum::<u64>() as f64, records.iter().map(|r| r.flops).sum::<u64>() as f64)
    }

    #[test]
    fn limits_are_those_of_the_recorded_steps() {
        let (decode, prefill) = (total(4, 1, 110), total(1, 100, 100));
        // Low bandwidth, so everything is memory-bound.
        let slow = limits(&roofline(1e6, Some(1e18)), 0);
        assert_eq!(slow.tpot_ms, Limit { value: decode.0 / 1e6 * 1e3, by: "memory" });
        assert_eq!(slow.ttft_ms, Limit { value: prefill.0 / 1e6 * 1e3, by: "memory" });
        let expected = 20.0 / (19.0 / 4.0 * decode.0 / 1e6);
        assert!((slow.output_tok_s.value / expected - 1.0).abs() < 1e-9, "{slow:?}");
        // Low arithmetic rate, so everything is compute-bound.
        let weak = limits(&roofline(1e18, Some(1e6)), 0);
        assert_eq!(weak.decode_ms, Limit { value: decode.1 / 1e6 * 1e3, by: "compute" });
        // While a request computes its other 19 tokens, three others compute their prompts.
        let expected = (decode.1 + 3.0 / 19.0 * prefill.1) / 1e6 * 1e3;
        assert!((weak.tpot_ms.value / expected - 1.0).abs() < 1e-9, "{weak:?}");
        let expected = 20.0 / ((19.0 / 4.0 * decode.1 + prefill.1) / 1e6);
        assert!((weak.output_tok_s.value / expected - 1.0).abs() < 1e-9, "{weak:?}");
        // Cached tokens are not computed again.
        let cached = limits(&roofline(1e18, Some(1e6)), 96);
        assert_eq!(cached.ttft_ms, Limit { value: total(1, 4, 100).1 / 1e6 * 1e3, by: "compute" });
        // Without a known peak, only memory counts.
        assert_eq!(limits(&roofline(1e18, None), 0).ttft_ms.by, "memory");
    }

    #[test]
    fn engines_share_the_sequences() {
        let with = |engines| limits(&Roofline { engines, ..roofline(1e6, Some(1e18)) }, 0);
        let (two, three, nine) = (with(2), with(3), with(9));
        // Four sequences: two on each of two engines, two and one and one on three, one on each of four of nine.
        for (limits, batch, busy) in [(two, 2, 2.0), (three, 2, 2.0), (nine, 1, 4.0)] {
            let decode = total(batch, 1, 110).0 / 1e6;
            assert_eq!(limits.tpot_ms, Limit { value: decode * 1e3, by: "memory" });
            let expected = busy * 20.0 / (19.0 / batch as f64 * decode);
            assert!((limits.output_tok_s.value / expected - 1.0).abs() < 1e-9, "{limits:?}");
            assert_eq!(limits.ttft_ms, with(1).ttft_ms);
        }
    }

    #[test]
    fn limits_are_those_of_the_formats_that_are_served() {
        let fp8 = Overrides {
            quantization: Some(pegainfer_runtime::AtLoad::Fp8),
            kv_dtype: KvDType::Fp8,
            ..Overrides::default()
        };
        let slow = Roofline { overrides: fp8.clone(), ..roofline(1e6, Some(1e18)) };
        let bytes = total_with(&fp8, 4, 1, 110).0;
        assert_eq!(limits(&slow, 0).tpot_ms, Limit { value: bytes / 1e6 * 1e3, by: "memory" });
        assert!(bytes < 0.8 * total(4, 1, 110).0, "{bytes}");
    }

    #[test]
    fn given_rates_are_not_measured() {
        let (exec, none) = (Exec::meta().unwrap(), Overrides::default());
        let given =
            Roofline::new((&model_dir(), none, 1), exec, "cuda (NVIDIA H200)", Some(4.3e12), Some(790e12)).unwrap();
        assert_eq!((given.read_bytes_s, given.peak_flop_s), (4.3e12, Some(790e12)));
    }
}
