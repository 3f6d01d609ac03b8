//! Searches: the highest rate within latency limits, and suitable flags for a workload.

use super::report::figures;
use super::simulation::Simulation;
use super::workload::Workload;
use crate::bench::percentiles::Percentiles;
use crate::bench::report::number;
use crate::bench::stats::Figures;
use crate::bench::workload::Point;
use anyhow::{Result, bail};
use pegainfer_core::rng;
use std::fmt::{self, Write};
use std::num::NonZeroUsize;
use std::time::Duration;

/// Default number of arrivals per tried rate: p99 is the tenth largest.
const REQUESTS: NonZeroUsize = NonZeroUsize::MIN.saturating_add(999);
/// Relative width of the final interval of the bisection.
const PRECISION: f64 = 0.01;
/// First tried rate, and maximum rate.
const RATES: (f64, f64) = (1.0, 1e5);
/// Largest measured error near saturation: measured over simulated latency, minus 1 (docs/performance/simulation.md,
/// Qwen3-4B on an H200 at 48 requests a second; p90 and p99 of TTFT and TPOT).
pub const NEAR_SATURATION: f64 = 0.38;
/// Tried mixed budgets.
const MIXED: [usize; 8] = [128, 256, 384, 512, 768, 1024, 2048, 4096];
/// Tried factors of the ledger's other sizes.
const FACTORS: [f64; 3] = [0.25, 0.5, 1.0];

/// Latency limits.
#[derive(Debug, Clone, Copy)]
pub struct Slo {
    /// Limit of TTFT.
    pub ttft: Option<Duration>,
    /// Limit of TPOT.
    pub tpot: Option<Duration>,
    /// Quantile of the requests, in percent.
    pub quantile: u8,
}

impl Slo {
    /// Limits below which latencies may still be higher by `error`.
    fn tightened(self, error: f64) -> Self {
        let tightened = |limit: Option<Duration>| limit.map(|limit| limit.div_f64(1.0 + error));
        Self { ttft: tightened(self.ttft), tpot: tightened(self.tpot), ..self }
    }

    /// The first limit that is exceeded.
    fn exceeded(&self, figures: &Figures) -> Option<&'static str> {
        let at = |times: Percentiles| match self.quantile {
            50 => times.p50,
            90 => times.p90,
            _ => times.p99,
        };
        let over = |limit: Option<Duration>, times| limit.is_some_and(|limit| at(times) > limit.as_secs_f64() * 1e3);
        if figures.failed > 0 {
            Some("requests that do not fit")
        } else if over(self.ttft, figures.ttft_ms) {
            Some("TTFT")
        } else {
            over(self.tpot, figures.tpot_ms).then_some("TPOT")
        }
    }
}

/// Lengths and number of the requests of a search.
#[derive(Debug, Clone, Copy)]
pub struct Lengths {
    /// Prompt length in tokens.
    pub prompt: NonZeroUsize,
    /// Output length in tokens.
    pub output: NonZeroUsize,
    /// Number of requests per run.
    pub requests: Option<NonZeroUsize>,
}

/// The highest rate of one seed, and its limit.
#[derive(Debug, Clone, Copy)]
struct Highest {
    qps: f64,
    /// The limit that a higher rate exceeds.
    exceeded: &'static str,
    /// Fraction of time for which the device is busy.
    busy: f64,
}

/// The highest Poisson rates within limits over several seeds.
#[derive(Debug)]
pub struct HighestRates {
    slo: Slo,
    /// By seed, lowest first.
    all: Vec<Highest>,
    /// Median rate, in requests per second, that keeps latencies [`NEAR_SATURATION`] below the limits; `None` if no rate
    /// does.
    pub with_margin: Option<f64>,
}

/// The highest Poisson rates within the limits.
pub fn highest_rate(
    simulation: &Simulation,
    slo: Slo,
    lengths: Lengths,
    (seed, runs): (u64, usize),
) -> Result<HighestRates> {
    let search = |slo: Slo| -> Result<Vec<Highest>> {
        let seeds = (0..runs as u64).map(|run| rng::bits(seed, run));
        let mut all = seeds.map(|seed| bisect(simulation, slo, lengths, seed)).collect::<Result<Vec<_>>>()?;
        all.sort_by(|a, b| a.qps.total_cmp(&b.qps));
        Ok(all)
    };
    let all = search(slo)?;
    // The limits may be so tight that a single request exceeds them with the margin.
    let margin = search(slo.tightened(NEAR_SATURATION)).ok();
    Ok(HighestRates { slo, all, with_margin: margin.map(|all| all[all.len() / 2].qps) })
}

impl fmt::Display for HighestRates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { slo, all, with_margin } = self;
        let (first, middle, last) = (all[0], all[all.len() / 2], all[all.len() - 1]);
        let limit = |name: &str, limit: Option<Duration>| limit.map(|limit| format!("{name} below {limit:?}"));
        let limits: Vec<String> = [limit("TTFT", slo.ttft), limit("TPOT", slo.tpot)].into_iter().flatten().collect();
        writeln!(
            f,
            "{:.2} requests per second ({:.2} to {:.2} with {} seeds) keep p{} of {}; beyond, {} exceeds its limit. The device \
             is busy {} % of the time.",
            middle.qps,
            first.qps,
            last.qps,
            all.len(),
            slo.quantile,
            limits.join(" and "),
            middle.exceeded,
            number(100.0 * middle.busy, 0)
        )?;
        let rate = match with_margin {
            Some(rate) => format!("{rate:.2} requests per second"),
            None => "no rate".to_owned(),
        };
        writeln!(
            f,
            "Near saturation, latencies on a card were up to {:.0} % above the simulated ones: with that margin, {rate}.",
            100.0 * NEAR_SATURATION
        )
    }
}

fn bisect(simulation: &Simulation, slo: Slo, lengths: Lengths, seed: u64) -> Result<Highest> {
    let requests = lengths.requests.or(Some(REQUESTS));
    let try_rate = |qps: f64| -> Result<(Option<&'static str>, f64)> {
        let point = Point::poisson(qps, requests, lengths.prompt.get(), lengths.output.get());
        let workload = Workload::Point(point);
        let run = workload.run(simulation, seed, false)?;
        let busy = run.tally.busy() / run.wall.as_secs_f64();
        Ok((slo.exceeded(&figures(&run)), busy))
    };
    let (mut low, mut high) = (None, RATES.0);
    // The same seed gives the same requests at each rate, only closer together.
    let mut exceeded = loop {
        match try_rate(high)? {
            (Some(what), _) => break what,
            (None, _) if high >= RATES.1 => bail!("no rate up to {high} requests per second exceeds the limits"),
            (None, busy) => {
                low = Some((high, busy));
                high *= 2.0;
            }
        }
    };
    if low.is_none() {
        let mut rate = high;
        while low.is_none() && rate > 1e-3 {
            rate /= 2.0;
            match try_rate(rate)? {
                (None, busy) => low = Some((rate, busy)),
                (Some(what), _) => (high, exceeded) = (rate, what),
            }
        }
    }
    let Some((mut low, mut busy)) = low else {
        bail!("a single request exceeds the limit of {exceeded}: no rate is low enough");
    };
    while high / low > 1.0 + PRECISION {
        let middle = (high * low).sqrt();
        match try_rate(middle)? {
            (None, part) => (low, busy) = (middle, part),
            (Some(what), _) => (high, exceeded) = (middle, what),
        }
    }
    Ok(Highest { qps: low, exceeded, busy })
}

/// Runs the workload with other engine sizes, and lists the results, best TPOT first.
pub fn tune(simulation: &Simulation, workload: &Workload, seed: u64) -> Result<String> {
    let measured = &simulation.header;
    let mut rows: Vec<(String, Figures, bool)> = Vec::new();
    let mixed = || MIXED.into_iter().chain([measured.max_num_mixed_tokens]);
    for (batched, seqs) in FACTORS.iter().flat_map(|a| FACTORS.iter().map(move |b| (*a, *b))) {
        let batched = ((measured.max_num_batched_tokens as f64 * batched) as usize).max(1);
        let seqs = ((measured.max_num_seqs as f64 * seqs) as usize).max(1);
        for mixed in mixed().filter(|mixed| *mixed <= batched) {
            let mut header = measured.clone();
            (header.max_num_batched_tokens, header.max_num_seqs, header.max_num_mixed_tokens) = (batched, seqs, mixed);
            let flags =
                format!("--mixed-step-token-budget {mixed} --max-num-batched-tokens {batched} --max-num-seqs {seqs}");
            if seqs > batched || rows.iter().any(|row| row.0 == flags) {
                continue;
            }
            let mut simulation = simulation.clone();
            simulation.header = header;
            let run = workload.run(&simulation, seed, false)?;
            let current = (batched, seqs, mixed)
                == (measured.max_num_batched_tokens, measured.max_num_seqs, measured.max_num_mixed_tokens);
            rows.push((flags, figures(&run), current));
        }
    }
    rows.sort_by(|a, b| a.1.tpot_ms.p50.total_cmp(&b.1.tpot_ms.p50));
    let mut out = format!(
        "{}\n{:>9} {:>9} {:>9} {:>9} {:>9}  (* the ledger's)\n",
        workload.place().0,
        "TTFT p50",
        "p99",
        "TPOT p50",
        "p99",
        "out tok/s"
    );
    for (flags, Figures { ttft_ms, tpot_ms, output_tok_s, .. }, current) in rows {
        let mark = if current { "*" } else { " " };
        let _ = writeln!(
            out,
            "{:>9} {:>9} {:>9} {:>9} {:>9} {mark} {flags}",
            number(ttft_ms.p50, 1),
            number(ttft_ms.p99, 1),
            number(tpot_ms.p50, 3),
            number(tpot_ms.p99, 3),
            number(output_tok_s, 1)
        );
    }
    Ok(out)
}
