//! Selection and timing of the steps measured for a ledger.

use super::law::Law;
use super::load::{StepKind, StepLine, StepLoad};
use crate::schedule::GRAPH_SIZES;
use crate::tensor::OpError;
use std::time::{Duration, Instant};

/// Longest context of decoding sequences, in tokens; attention is linear beyond it.
const MAX_DECODE_CONTEXT: usize = 4096;
/// Cached tokens before a chunk, to compare its attention with that of a chunk without.
const PRIOR_CONTEXT: usize = 4096;
/// Tokens per prompt in steps with several prompts.
const SHORT_PROMPT: usize = 512;
/// Relative interpolation error above which a step in the middle is measured.
const REFINE_ABOVE: f64 = 0.02;
/// Maximum number of times that an interval is halved.
const MAX_HALVINGS: u32 = 3;
/// Chunk lengths are multiples of this many tokens, except the smallest.
const TOKEN_UNIT: usize = 16;
/// Time for which a step runs before it is measured again: the clock of a GPU follows its load.
pub(super) const AGAIN_SETTLE: Duration = Duration::from_millis(150);
/// Measuring time of each step of a list.
pub(super) const PER_STEP: Duration = Duration::from_millis(250);

/// Runs steps with consecutively numbered blocks and state slots.
pub trait MeasureStep {
    /// Runs a step of `rows`, each with the tokens that it adds and its context, `runs` times, as close together as an
    /// engine does. Returns the time of each.
    fn run(&mut self, rows: &[(usize, usize)], runs: usize) -> Result<Vec<Duration>, OpError>;
}

/// Rows of a step, as (tokens that the row adds, tokens of its context with these).
pub type Rows = Vec<(usize, usize)>;

/// Selection of the measured steps.
#[derive(Debug, Clone, Copy)]
pub enum Selection<'a> {
    /// A grid of steps, from which the law is fitted.
    Grid(Effort),
    /// Only the listed steps.
    Steps {
        /// The rows of each step.
        steps: &'a [Rows],
        /// True if the kernels of served steps are recorded as well.
        kernels: bool,
    },
}

/// Limits of the measured engine.
#[derive(Debug, Clone, Copy)]
pub struct GridLimits {
    /// Sequences of a step.
    pub max_num_seqs: usize,
    /// Tokens of a step.
    pub max_tokens: usize,
    /// Tokens of a mixed step.
    pub mixed_tokens: usize,
    /// Context length.
    pub max_context: usize,
    /// KV blocks of the pool, as far as they were ever written.
    pub kv_blocks: usize,
    /// Tokens of a KV block.
    pub block_size: usize,
    /// True if decode steps are padded to the sizes of CUDA graphs.
    pub graphs: bool,
}

/// Measuring time.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Minimum time per step; a step that takes longer runs once after its warm-up.
    pub per_step: Duration,
    /// Time for all steps, after which no interval is halved any more.
    pub refine: Duration,
}

impl GridLimits {
    /// True if the pool holds a step of `rows`, each with as many blocks as the longest.
    pub fn holds(&self, rows: &[(usize, usize)]) -> bool {
        let context = rows.iter().map(|row| row.1).max().unwrap_or(0);
        let tokens: usize = rows.iter().map(|row| row.0).sum();
        blocks_of_rows(rows, self.block_size) <= self.kv_blocks
            && rows.len() <= self.max_num_seqs
            && tokens <= self.max_tokens
            && context <= self.max_context
    }

    /// Measures a step for the second of the times, after a warm-up of the first.
    pub(super) fn time(
        &self,
        target: &mut dyn MeasureStep,
        rows: &[(usize, usize)],
        (settle, per_step): (Duration, Duration),
    ) -> Result<StepLine, OpError> {
        let load = StepLoad::of_rows(rows.iter().copied());
        // The first steps of a shape load kernels and capture its CUDA graph.
        let warm_up = if self.graphs && load.kind() == StepKind::Decode { 3 } else { 1 };
        let first = target.run(rows, warm_up)?.into_iter().min().unwrap_or_default();
        let runs = |time: Duration| (time.as_secs_f64() / first.as_secs_f64().max(1e-6)).clamp(0.0, 200.0);
        if runs(settle) >= 1.0 {
            target.run(rows, runs(settle) as usize)?;
        }
        let runs = runs(per_step).max(1.0);
        let runs = if runs > 1.0 { runs.max(5.0) as usize } else { 1 };
        let mut times: Vec<f64> = target.run(rows, runs)?.iter().map(|time| time.as_secs_f64() * 1e6).collect();
        times.sort_unstable_by(f64::total_cmp);
        let at = |quantile: usize| times[(times.len() - 1) * quantile / 4];
        Ok(StepLine { load, us: at(2), spread: (at(3) - at(1)) / at(2), runs })
    }

    /// Numbers of decoding sequences.
    fn decode_rows(&self) -> Vec<usize> {
        let mut rows: Vec<usize> = GRAPH_SIZES.into_iter().filter(|rows| *rows <= self.max_num_seqs).collect();
        if !self.graphs && rows.last() != Some(&self.max_num_seqs) {
            rows.push(self.max_num_seqs);
        }
        rows
    }

    /// Contexts of `rows` decoding sequences: powers of four blocks up to the longest, because caches and split kernels
    /// make short contexts anything but linear.
    fn decode_contexts(&self, rows: usize) -> Vec<usize> {
        let most = (self.kv_blocks / rows * self.block_size).min(self.max_context).min(MAX_DECODE_CONTEXT);
        let powers = (0..).map(|i| self.block_size << (2 * i)).take_while(|context| *context < most);
        powers.chain((most > 0).then_some(most)).collect()
    }

    /// Chunk lengths: powers of two and the values midway between them, up to the largest step.
    fn chunks(&self) -> Vec<usize> {
        let most = self.max_tokens.min(self.max_context).min(self.kv_blocks * self.block_size);
        let powers = (0..).map(|i| TOKEN_UNIT << i).take_while(|tokens| *tokens < most);
        let mut chunks = vec![2];
        chunks.extend(powers.flat_map(|tokens| [tokens, tokens + tokens / 2]).filter(|tokens| *tokens < most));
        chunks.push(most);
        chunks.dedup();
        chunks
    }

    /// Steps of `tokens` tokens with few and many query-key pairs: short prompts, if more than one fits, a single
    /// prompt, and a chunk after cached tokens.
    fn prefills(&self, tokens: usize) -> Vec<Rows> {
        let mut steps = Vec::new();
        if tokens >= 2 * SHORT_PROMPT {
            let mut prompts = vec![(SHORT_PROMPT, SHORT_PROMPT); tokens / SHORT_PROMPT];
            let rest = tokens % SHORT_PROMPT;
            prompts.extend((rest > 1).then_some((rest, rest)));
            steps.push(prompts);
        }
        steps.push(vec![(tokens, tokens)]);
        let longest = self.max_context.min(self.kv_blocks * self.block_size);
        let prior = PRIOR_CONTEXT.min(longest - tokens.min(longest));
        if prior > tokens / 4 {
            steps.push(vec![(tokens, tokens + prior)]);
        }
        steps
    }

    /// Mixed steps: one chunk, with an eighth, half, and all but one of the sequences decoding.
    fn mixed(&self) -> Vec<Rows> {
        let mut steps = Vec::new();
        for decoding in [self.max_num_seqs.div_ceil(8), self.max_num_seqs.div_ceil(2), self.max_num_seqs - 1] {
            let most = self.kv_blocks / (decoding + 1) * self.block_size;
            for tokens in [64, self.mixed_tokens / 2, self.mixed_tokens, 2 * self.mixed_tokens, 4 * self.mixed_tokens] {
                let Some(chunk) = tokens.checked_sub(decoding).filter(|chunk| *chunk > 1) else { continue };
                let context = (self.max_context / 2).min(1024).min(most).max(1);
                let mut rows = vec![(1, context); decoding];
                rows.push((chunk, chunk));
                steps.push(rows);
            }
        }
        steps
    }
}

/// Number of KV blocks of `block_size` tokens that a step of `rows` takes: all rows get as many as the longest.
pub fn blocks_of_rows(rows: &[(usize, usize)], block_size: usize) -> usize {
    rows.len() * rows.iter().map(|row| row.1).max().unwrap_or(0).div_ceil(block_size)
}

/// Measures `steps`, equal ones once. An error names the first step that the engine cannot run.
pub fn measure_steps(
    target: &mut dyn MeasureStep,
    limits: &GridLimits,
    steps: &[Rows],
    progress: &mut dyn FnMut(&StepLine),
) -> Result<Vec<StepLine>, OpError> {
    let mut lines: Vec<StepLine> = Vec::new();
    for rows in steps {
        let load = StepLoad::of_rows(rows.iter().copied());
        if !limits.holds(rows) {
            let message = format!(
                "a step of {load} does not fit an engine of {} sequences, {} tokens a step, {} tokens of context and {} KV \
                 blocks; raise --max-num-seqs, --max-num-batched-tokens, --max-model-len or --kv-cache-memory",
                limits.max_num_seqs, limits.max_tokens, limits.max_context, limits.kv_blocks
            );
            return Err(OpError { op: "ledger", message });
        }
        if lines.iter().all(|line| line.load != load) {
            let line = limits.time(target, rows, (AGAIN_SETTLE, PER_STEP))?;
            progress(&line);
            lines.push(line);
        }
    }
    Ok(lines)
}

/// Measures a grid of steps, finer where the time is not linear.
pub fn measure(
    target: &mut dyn MeasureStep,
    limits: &GridLimits,
    effort: Effort,
    progress: &mut dyn FnMut(&StepLine),
) -> Result<Vec<StepLine>, OpError> {
    let start = Instant::now();
    let mut grid = Grid { target, limits, effort, progress, steps: Vec::new() };
    for rows in limits.decode_rows() {
        for context in limits.decode_contexts(rows) {
            grid.time(&vec![(1, context); rows])?;
        }
    }
    let chunks = limits.chunks();
    for &tokens in &chunks {
        for rows in limits.prefills(tokens) {
            grid.time(&rows)?;
        }
    }
    for rows in limits.mixed() {
        grid.time(&rows)?;
    }
    let mut intervals: Vec<(usize, usize, u32)> = chunks.windows(2).map(|pair| (pair[0], pair[1], 0)).collect();
    // The first halving of each interval finds the largest errors; later ones refine those intervals.
    let mut next = 0;
    while let Some(&(low, high, depth)) = intervals.get(next) {
        next += 1;
        let middle = usize::midpoint(low, high).next_multiple_of(TOKEN_UNIT);
        if middle >= high || start.elapsed() > effort.refine {
            continue;
        }
        let error = grid.refine(&limits.prefills(middle))?;
        if error > REFINE_ABOVE && depth + 1 < MAX_HALVINGS {
            intervals.extend([(low, middle, depth + 1), (middle, high, depth + 1)]);
        }
    }
    Ok(grid.steps)
}

/// A measurement in progress.
struct Grid<'a> {
    target: &'a mut dyn MeasureStep,
    limits: &'a GridLimits,
    effort: Effort,
    progress: &'a mut dyn FnMut(&StepLine),
    steps: Vec<StepLine>,
}

impl Grid<'_> {
    /// Measures a step, if the engine can run it.
    fn time(&mut self, rows: &[(usize, usize)]) -> Result<(), OpError> {
        let load = StepLoad::of_rows(rows.iter().copied());
        if !self.limits.holds(rows) || self.steps.iter().any(|line| line.load == load) {
            return Ok(());
        }
        let line = self.limits.time(self.target, rows, (Duration::ZERO, self.effort.per_step))?;
        (self.progress)(&line);
        self.steps.push(line);
        Ok(())
    }

    /// Measures steps and returns the largest error of the law fitted before, beyond the spread of the measurement
    /// itself.
    fn refine(&mut self, steps: &[Rows]) -> Result<f64, OpError> {
        let (law, before) = (Law::new(&self.steps, self.limits.graphs), self.steps.len());
        for rows in steps {
            self.time(rows)?;
        }
        let Ok(law) = law else { return Ok(0.0) };
        let error = |line: &StepLine| (law.time(&line.load).us / line.us - 1.0).abs() - line.spread;
        Ok(self.steps[before..].iter().map(error).fold(0.0, f64::max))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes 1 ms for each started 256 tokens, 0.1 ms a decoding sequence, and 10 us for 1,000 KV tokens or pairs.
    struct Stairs(Vec<usize>);

    impl MeasureStep for Stairs {
        fn run(&mut self, rows: &[(usize, usize)], runs: usize) -> Result<Vec<Duration>, OpError> {
            self.0.push(rows.len());
            let load = StepLoad::of_rows(rows.iter().copied());
            let stairs = load.prefill_tokens.div_ceil(256) as u64 * 1000;
            let us = stairs + load.decode_rows as u64 * 100 + (load.decode_kv as u64 + load.pairs) / 100;
            Ok(vec![Duration::from_micros(us.max(1)); runs])
        }
    }

    const LIMITS: GridLimits = GridLimits {
        max_num_seqs: 10,
        max_tokens: 2000,
        mixed_tokens: 512,
        max_context: 4000,
        kv_blocks: 300,
        block_size: 16,
        graphs: false,
    };

    fn measured(limits: &GridLimits) -> Vec<StepLine> {
        let effort = Effort { per_step: Duration::from_millis(1), refine: Duration::from_secs(10) };
        measure(&mut Stairs(vec![]), limits, effort, &mut |_| {}).unwrap()
    }

    #[test]
    fn the_grid_stays_within_the_limits_and_has_all_kinds() {
        let steps = measured(&LIMITS);
        for kind in StepKind::ALL {
            assert!(steps.iter().filter(|line| line.load.kind() == kind).count() >= 4, "{kind:?}");
        }
        for StepLine { load, us, .. } in &steps {
            assert!(load.tokens() <= 2000 && load.decode_rows + load.prefill_rows <= 11 && *us >= 1.0, "{load:?}");
            assert!(load.decode_kv <= 300 * 16);
        }
        let most = steps.iter().map(|line| line.load.decode_rows).max();
        assert_eq!(most, Some(10), "the largest number of sequences is not a graph's, and is measured");
        let mut loads: Vec<String> = steps.iter().map(|line| format!("{:?}", line.load)).collect();
        loads.sort_unstable();
        loads.dedup();
        assert_eq!(loads.len(), steps.len(), "a step is measured once");
    }

    #[test]
    fn stairs_are_found() {
        let steps = measured(&LIMITS);
        let law = Law::new(&steps, false).unwrap();
        let error = |tokens: usize| {
            let load = StepLoad::of_rows([(tokens, tokens)]);
            let us = (tokens.div_ceil(256) * 1000) as f64 + load.pairs as f64 / 100.0;
            (law.time(&load).us / us - 1.0).abs()
        };
        let mean = (300..2000).step_by(10).map(error).sum::<f64>() / 170.0;
        assert!(mean < 0.05, "mean error {mean}");
    }

    #[test]
    fn steps_of_several_prompts_are_not_taken_for_one_long_prompt() {
        let law = Law::new(&measured(&LIMITS), false).unwrap();
        for rows in [vec![(300, 300); 6], vec![(100, 100); 15], vec![(700, 700), (600, 600), (200, 200)]] {
            let load = StepLoad::of_rows(rows.iter().copied());
            let us = (load.tokens().div_ceil(256) * 1000) as f64 + load.pairs as f64 / 100.0;
            let error = (law.time(&load).us / us - 1.0).abs();
            assert!(error < 0.15, "{rows:?}: {error}");
        }
    }
}
