//! The least times and the highest rate of a load, from the work of its steps and the rates of a device.

use super::peaks::Peaks;
use pegainfer_core::record::OpRecord;
use serde::Serialize;
use std::ops::{Add, Mul};

/// The minimum of a time or the maximum of a rate, and the limiting resource.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Limit {
    /// Value, in the unit of the metric.
    pub value: f64,
    /// Limiting resource: `memory` or `compute`.
    pub by: &'static str,
}

/// The limits of the metrics of a point.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Limits {
    /// TTFT in milliseconds: prefill of the prompt alone, without the tokens found in the prefix cache.
    pub ttft_ms: Limit,
    /// TPOT in milliseconds of a decode step with nothing else in it.
    pub decode_ms: Limit,
    /// TPOT in milliseconds: the same step with its part of the prompts of the other requests, which are spread evenly.
    /// A run in which prompts wait for each other, so that fewer requests decode, may have a lower one.
    pub tpot_ms: Limit,
    /// Generated tokens per second, if steps of that batch size also computed all prefills.
    pub output_tok_s: Limit,
}

/// Bytes moved and floating-point operations.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Work {
    /// Bytes read and written.
    pub bytes: f64,
    /// Floating-point operations.
    pub flops: f64,
}

/// Requests that decode at the same time, on some engines.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    /// Number of sequences that decode.
    pub sequences: usize,
    /// Engines that share them.
    pub engines: usize,
    /// Generated tokens of a request.
    pub output_len: usize,
}

impl Work {
    /// The work of these ops.
    pub fn of(records: &[OpRecord]) -> Self {
        let bytes = records.iter().map(|record| record.bytes as f64).sum();
        Self { bytes, flops: records.iter().map(|record| record.flops as f64).sum() }
    }
}

impl Limits {
    /// The limits of a load. `decode` is the work of a step of [`Load::batch`] sequences, `prefill` that of a prompt.
    /// A prompt reads no weights of its own while others decode: their step needs these anyway.
    pub fn new(load: Load, decode: Work, prefill: Work, peaks: Peaks) -> Self {
        let batch = load.batch() as f64;
        // A request's decode steps: its first token comes with its prompt.
        let steps = load.output_len.saturating_sub(1) as f64;
        let arithmetic = Work { bytes: 0.0, ..prefill };
        // While a request decodes, each of the others computes a prompt.
        let prompts = if steps > 0.0 { (batch - 1.0) / steps } else { 0.0 };
        let request = Limit::new(decode * (steps / batch) + arithmetic, peaks);
        // An engine has no more than `batch` of the sequences.
        let busy = load.sequences as f64 / batch;
        Self {
            ttft_ms: Limit::new(prefill, peaks),
            decode_ms: Limit::new(decode, peaks),
            tpot_ms: Limit::new(decode + arithmetic * prompts, peaks),
            output_tok_s: Limit { value: busy * load.output_len as f64 * 1e3 / request.value, by: request.by },
        }
    }
}

impl Load {
    /// Sequences of a step of the engine that has most.
    pub fn batch(self) -> usize {
        self.sequences.div_ceil(self.engines)
    }
}

impl Limit {
    /// Milliseconds of some work; a rate that is unknown does not limit it.
    pub fn new(work: Work, peaks: Peaks) -> Self {
        let memory = peaks.read_bytes_s.map_or(0.0, |rate| work.bytes / rate * 1e3);
        let compute = peaks.flop_s.map_or(0.0, |rate| work.flops / rate * 1e3);
        match compute > memory {
            true => Self { value: compute, by: "compute" },
            false => Self { value: memory, by: "memory" },
        }
    }
}

impl Add for Work {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { bytes: self.bytes + other.bytes, flops: self.flops + other.flops }
    }
}

impl Mul<f64> for Work {
    type Output = Self;

    fn mul(self, factor: f64) -> Self {
        Self { bytes: self.bytes * factor, flops: self.flops * factor }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DECODE: Work = Work { bytes: 8e9, flops: 1e12 };
    const PREFILL: Work = Work { bytes: 9e9, flops: 8e12 };
    const PEAKS: Peaks = Peaks { read_bytes_s: Some(4e12), flop_s: Some(800e12) };

    fn limits(sequences: usize, output_len: usize) -> Limits {
        Limits::new(Load { sequences, engines: 1, output_len }, DECODE, PREFILL, PEAKS)
    }

    #[test]
    fn a_single_request_waits_for_no_prompt_of_others() {
        let alone = limits(1, 100);
        assert_eq!(alone.tpot_ms, Limit { value: 2.0, by: "memory" });
        assert_eq!((alone.decode_ms, alone.ttft_ms), (alone.tpot_ms, Limit { value: 10.0, by: "compute" }));
    }

    #[test]
    fn each_step_has_its_part_of_the_prompts_of_others() {
        // 128 requests of 128 tokens: a prompt in each step.
        let full = limits(128, 128);
        assert_eq!(full.tpot_ms, Limit { value: (1e12 + 8e12) / 800e12 * 1e3, by: "compute" });
        assert_eq!(full.decode_ms, Limit { value: 2.0, by: "memory" });
        // A tenth of a prompt has less arithmetic than the step's reads take.
        let seldom = limits(11, 1001);
        assert_eq!(seldom.tpot_ms, Limit { value: 2.0, by: "memory" });
    }

    #[test]
    fn the_rate_is_that_of_steps_with_all_prompts() {
        let full = limits(128, 128);
        let request = (127.0 / 128.0 * 1e12 + 8e12) / 800e12;
        assert!((full.output_tok_s.value * request / 128.0 - 1.0).abs() < 1e-9);
    }

    #[test]
    fn a_request_of_one_token_has_no_steps() {
        let one = limits(4, 1);
        assert_eq!((one.tpot_ms, one.output_tok_s.value), (one.decode_ms, 1e3 / 10.0));
    }
}
