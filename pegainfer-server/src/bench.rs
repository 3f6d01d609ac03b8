//! `pegainfer bench`: latency and throughput of the engine in this process, without HTTP.
//!
//! Closed loop: each stream submits its next request when the last one has ended. Every request has its own random
//! prompt, so that the prefix cache helps nobody. Times are the client's: from `submit` to the arrival of an event.

use crate::cli::BenchArgs;
use crate::{engine, model_path};
use anyhow::{Context, Result, bail, ensure};
use half::bf16;
use pegainfer_core::engine::{EngineHandle, GenerateRequest, TokenEvent};
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::rng;
use pegainfer_core::sampling::SamplingParams;
use pegainfer_core::tensor::DType;
use pegainfer_kernels::cuda;
use rayon::prelude::*;
use serde::Serialize;
use serde_json::json;
use std::fmt::Write;
use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

/// One point of a benchmark.
#[derive(Debug, Clone, Copy)]
pub struct Point {
    /// Requests in flight at once.
    pub streams: usize,
    /// Requests of each stream that are measured, after one that warms up.
    pub rounds: usize,
    /// Prompt tokens of each request.
    pub prompt_len: usize,
    /// Tokens each request generates.
    pub output_len: usize,
    /// Of the prompts.
    pub seed: u64,
}

/// What a point gave. Times are milliseconds.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// Requests in flight at once.
    pub streams: usize,
    /// Requests measured.
    pub requests: usize,
    /// Prompt tokens of each.
    pub prompt_len: usize,
    /// Generated tokens of each.
    pub output_len: usize,
    /// Time to first token.
    pub ttft_p50_ms: f64,
    /// Time to first token.
    pub ttft_p99_ms: f64,
    /// Time per output token after the first.
    pub tpot_p50_ms: f64,
    /// Time per output token after the first.
    pub tpot_p99_ms: f64,
    /// Generated tokens a second, all streams together.
    pub output_tok_s: f64,
    /// Prompt and generated tokens a second.
    pub total_tok_s: f64,
    /// Bytes of weights a second that decode streams at this TPOT, as a share of a plain read of as many bytes on this
    /// machine. With several streams it says how much of the memory limit of a decode step is reached.
    pub read_share: f64,
}

struct Sample {
    first: Duration,
    per_token: Duration,
}

/// Runs the command.
pub fn run(args: &BenchArgs) -> Result<()> {
    let dir = model_path::resolve(&args.engine)?.dir;
    let (exec, device) = engine::open_device(&args.engine)?;
    let floor = Floor::measure(exec, engine::weight_bytes(&dir)?)?;
    let most = args.streams.iter().max().copied().unwrap_or(NonZeroUsize::MIN);
    ensure!(
        most <= args.engine.max_num_seqs,
        "{most} streams need --max-num-seqs {most}: they would wait for each other"
    );
    let engine = engine::load(&dir, &args.engine)?.handle;
    let mut rows = Vec::new();
    for (i, streams) in args.streams.iter().enumerate() {
        let point = Point {
            streams: streams.get(),
            rounds: args.rounds.get(),
            prompt_len: args.prompt_len.get(),
            output_len: args.output_len.get(),
            seed: args.seed.wrapping_add(i as u64),
        };
        rows.push(measure(&engine, point, floor)?);
    }
    if args.json {
        let report = json!({"model": dir, "device": device, "floor": floor, "rows": rows});
        println!("{report:#}");
    } else {
        print!("{device}\n{}", table(&rows, floor));
    }
    Ok(())
}

/// Runs one point.
pub fn measure(engine: &EngineHandle, point: Point, floor: Floor) -> Result<Row> {
    ensure!(point.output_len >= 2, "--output-len must be at least 2: TPOT needs a second token");
    let round = |streams: usize, rounds: usize, seed: u64| -> Result<(Vec<Sample>, Duration)> {
        let start = Instant::now();
        let samples = std::thread::scope(|scope| {
            let stream = |s: usize| {
                scope.spawn(move || {
                    let ask = |r| request(engine, point, seed ^ (((s as u64) << 32) | r as u64));
                    (0..rounds).map(ask).collect::<Result<Vec<_>>>()
                })
            };
            let threads: Vec<_> = (0..streams).map(stream).collect();
            let join =
                |t: std::thread::ScopedJoinHandle<'_, _>| t.join().unwrap_or_else(|_| bail!("a stream panicked"));
            threads.into_iter().map(join).collect::<Result<Vec<_>>>()
        })?;
        Ok((samples.into_iter().flatten().collect(), start.elapsed()))
    };
    round(point.streams, 1, rng::bits(point.seed, 0))?;
    let (samples, wall) = round(point.streams, point.rounds, rng::bits(point.seed, 1))?;
    let first: Vec<f64> = samples.iter().map(|s| s.first.as_secs_f64() * 1e3).collect();
    let per_token: Vec<f64> = samples.iter().map(|s| s.per_token.as_secs_f64() * 1e3).collect();
    let output = (samples.len() * point.output_len) as f64 / wall.as_secs_f64();
    let tpot = percentile(&per_token, 50.0);
    Ok(Row {
        streams: point.streams,
        requests: samples.len(),
        prompt_len: point.prompt_len,
        output_len: point.output_len,
        ttft_p50_ms: percentile(&first, 50.0),
        ttft_p99_ms: percentile(&first, 99.0),
        tpot_p50_ms: tpot,
        tpot_p99_ms: percentile(&per_token, 99.0),
        output_tok_s: output,
        total_tok_s: output * (point.prompt_len + point.output_len) as f64 / point.output_len as f64,
        read_share: floor.milliseconds() / tpot,
    })
}

fn request(engine: &EngineHandle, point: Point, seed: u64) -> Result<Sample> {
    let vocab = engine.limits().vocab_size as u64;
    let prompt = (0..point.prompt_len as u64).map(|i| (rng::bits(seed, i) % vocab) as u32).collect();
    let start = Instant::now();
    let mut stream = engine.submit(GenerateRequest {
        prompt,
        max_tokens: point.output_len,
        sampling: SamplingParams::greedy(),
        rules: None,
        stop_token_ids: Vec::new(),
        ignore_eos: true,
        logprobs: None,
        // Random prompts share no prefix; this makes it certain.
        cache_salt: seed,
    })?;
    let (mut first, mut last) = (None, start);
    while let Some(event) = stream.blocking_recv() {
        match event {
            TokenEvent::Token(_) => {
                last = Instant::now();
                first.get_or_insert(last);
            }
            TokenEvent::Failed { error } => bail!(error),
            TokenEvent::Admitted { .. } | TokenEvent::Finished { .. } => {}
        }
    }
    let first = first.context("the engine stopped")?;
    Ok(Sample { first: first - start, per_token: (last - first) / (point.output_len as u32 - 1) })
}

/// The memory limit of a decode step: reading the weights once.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Floor {
    /// Bytes of weights that a step reads.
    pub bytes: u64,
    /// Bytes a second of a plain read of as much memory on all threads, the best of three.
    pub bytes_per_second: f64,
}

impl Floor {
    /// Measures the machine. Call it while no engine is loaded, so that both fit the memory.
    pub fn measure(mut exec: Exec, bytes: u64) -> Result<Self> {
        if exec.device() == Device::Cuda {
            return Ok(Self { bytes, bytes_per_second: cuda::read_bandwidth(&mut exec, bytes)? });
        }
        let mut data = exec.tensor("read", &[bytes as usize / 2], DType::Bf16)?;
        // Pages that were never written are all the same zero page.
        data.host_mut::<bf16>().fill(bf16::ONE);
        let lines = data.host::<bf16>().as_chunks::<64>().0;
        let best = (0..3).map(|_| {
            let start = Instant::now();
            std::hint::black_box(exec.on_host(|| lines.par_chunks(1 << 14).map(read).reduce(|| 0, |a, b| a ^ b)));
            start.elapsed().as_secs_f64()
        });
        Ok(Self { bytes, bytes_per_second: bytes as f64 / best.fold(f64::INFINITY, f64::min) })
    }

    fn milliseconds(&self) -> f64 {
        self.bytes as f64 / self.bytes_per_second * 1e3
    }
}

/// Reads every element; the result keeps the compiler from leaving it out.
fn read(lines: &[[bf16; 64]]) -> u16 {
    let lanes = lines.iter().fold([0u16; 64], |a, line| std::array::from_fn(|i| a[i] ^ line[i].to_bits()));
    lanes.into_iter().fold(0, |a, b| a ^ b)
}

/// The rows as a table for people.
pub fn table(rows: &[Row], floor: Floor) -> String {
    let mut out = format!(
        "{:>7} {:>6} {:>6} {:>10} {:>10} {:>10} {:>10} {:>11} {:>11} {:>7}\n",
        "streams",
        "prompt",
        "output",
        "TTFT p50",
        "TTFT p99",
        "TPOT p50",
        "TPOT p99",
        "out tok/s",
        "all tok/s",
        "% read"
    );
    for row in rows {
        let _ = writeln!(
            out,
            "{:>7} {:>6} {:>6} {:>10.2} {:>10.2} {:>10.3} {:>10.3} {:>11.1} {:>11.1} {:>7.1}",
            row.streams,
            row.prompt_len,
            row.output_len,
            row.ttft_p50_ms,
            row.ttft_p99_ms,
            row.tpot_p50_ms,
            row.tpot_p99_ms,
            row.output_tok_s,
            row.total_tok_s,
            100.0 * row.read_share
        );
    }
    let _ = writeln!(
        out,
        "times in ms; % read: a plain read of the weights ({:.3} GB at {:.1} GB/s) over TPOT",
        floor.bytes as f64 / 1e9,
        floor.bytes_per_second / 1e9
    );
    out
}

/// Linear interpolation between the closest ranks.
fn percentile(values: &[f64], percent: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let at = percent / 100.0 * sorted.len().saturating_sub(1) as f64;
    let (low, high) = (at.floor() as usize, at.ceil() as usize);
    match (sorted.get(low), sorted.get(high)) {
        (Some(a), Some(b)) => a + (b - a) * at.fract(),
        _ => f64::NAN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_interpolate() {
        let values = [4.0, 1.0, 3.0, 2.0];
        assert_eq!(percentile(&values, 0.0), 1.0);
        assert_eq!(percentile(&values, 50.0), 2.5);
        assert_eq!(percentile(&values, 100.0), 4.0);
        assert!(percentile(&[], 50.0).is_nan());
    }
}
