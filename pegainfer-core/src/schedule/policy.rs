//! Admission policy: how many tokens a step may have, and how long new prompts wait for each other.
//!
//! Objective: first tokens as early as the device allows, without making decoding sequences wait longer than necessary
//! between two tokens. Prefill takes the same time per token in a step of any size, about 10 us for a 4B model on an
//! H200, so the step size only decides who waits:
//!
//! - While few sequences decode, prompts go first: [`token_budget`] is the whole step.
//! - While many decode, prefill tokens delay all of them, so the budget is small. It grows with the backlog of prompts:
//!   a step takes the [`DRAIN_STEPS`]th part of it. A short queue costs the decoding sequences next to nothing, and a
//!   long one cannot grow without end, as it would with a fixed budget whose rate is below the arrival rate.
//! - Prompts of one tenant never delay a token of another tenant by more than [`SHARED_BUDGETS`] small budgets, however
//!   many they are.
//! - While requests keep arriving and the step has capacity for more, [`BatchingDelay`] holds them for a few
//!   milliseconds. A step that started with the first few requests would delay all later ones.
//!
//! The constants were chosen by simulating these rules with measured step times and the arrival times of the benchmark,
//! then measured with Qwen3-4B on an H200: docs/benchmarks/h200-qwen3-4b.md.

use super::scheduler::SchedulerConfig;
use std::time::{Duration, Instant};

/// Minimum number of waiting prompts for a batching delay.
pub(super) const MIN_DELAYED_PROMPTS: usize = 2;
/// Number of decoding sequences per prompt up to which prompts take the whole step.
const MAX_DECODING_PER_PROMPT: usize = 2;
/// Number of steps over which the backlog of prompts is spread while many sequences decode.
const DRAIN_STEPS: usize = 6;
/// Budgets are rounded up to this many tokens, the rows of a large GEMM's tile.
const BUDGET_UNIT: usize = 256;
/// Largest step with sequences of several tenants, as a multiple of `max_num_mixed_tokens`: 17 ms of prefill with a 4B
/// model on an H200. Without this bound, 126 prompts of 200 tokens made a step of 290 ms.
const SHARED_BUDGETS: usize = 3;
/// Minimum number of prefill tokens in a step, however many sequences decode.
const MIN_CHUNK: usize = 16;

/// Work that the next step can choose from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PendingWork {
    /// Sequences with one token to compute.
    pub decoding: usize,
    /// Sequences with more, running or about to be admitted.
    pub prompts: usize,
    /// Tokens of these prompts that are not computed.
    pub backlog: usize,
    /// True if these sequences belong to several tenants.
    pub shared: bool,
}

/// Token budget of the next step, decoding sequences included; at most `config.max_num_batched_tokens`.
pub(super) fn token_budget(config: &SchedulerConfig, work: PendingWork) -> usize {
    let PendingWork { decoding, prompts, backlog, shared } = work;
    let smallest = config.max_num_mixed_tokens.max(decoding + MIN_CHUNK);
    let largest = match shared && decoding > 0 {
        true => smallest.max(SHARED_BUDGETS * config.max_num_mixed_tokens),
        false => config.max_num_batched_tokens,
    };
    let draining = decoding + backlog / DRAIN_STEPS;
    let budget = if decoding <= MAX_DECODING_PER_PROMPT * prompts {
        largest
    } else if draining > config.max_num_mixed_tokens {
        draining.next_multiple_of(BUDGET_UNIT).min(largest)
    } else {
        smallest
    };
    budget.min(config.max_num_batched_tokens)
}

/// Largest gap between the arrivals of requests that belong together.
const MAX_ARRIVAL_GAP: Duration = Duration::from_millis(2);
/// Longest delay, relative to the prefill time of the waiting prompts.
const MAX_DELAY: f64 = 0.125;
/// Prefill time per token before the first measurement, in seconds.
const INITIAL_TOKEN_SECONDS: f64 = 1e-5;
/// Smallest step, in tokens, used to measure prefill time per token.
const MIN_MEASURED_TOKENS: usize = 512;
/// Weight of a new measurement in the moving average.
const AVERAGE_WEIGHT: f64 = 0.25;

/// Batching delay: delays admission for a few milliseconds while requests keep arriving. Decoding sequences continue.
#[derive(Debug)]
pub(super) struct BatchingDelay {
    /// When the newest request arrived.
    newest: Option<Instant>,
    /// When the current delay began.
    since: Option<Instant>,
    /// Measured prefill time per token, in seconds.
    token_seconds: f64,
}

impl BatchingDelay {
    pub fn new() -> Self {
        Self { newest: None, since: None, token_seconds: INITIAL_TOKEN_SECONDS }
    }

    /// Records that a request arrived at `now`.
    pub fn arrived(&mut self, now: Instant) {
        self.newest = Some(now);
    }

    /// Records that a step of `tokens` tokens took `time`.
    pub fn measured(&mut self, tokens: usize, time: Duration) {
        if tokens >= MIN_MEASURED_TOKENS {
            // An average, because a single step may have waited for something else.
            self.token_seconds += (time.as_secs_f64() / tokens as f64 - self.token_seconds) * AVERAGE_WEIGHT;
        }
    }

    /// True if admission should wait for more requests. `waiting`: tokens of the requests that could be admitted
    /// together, or `None` if waiting gains nothing.
    pub fn should_wait(&mut self, waiting: Option<usize>, now: Instant) -> bool {
        let arriving = self.newest.is_some_and(|newest| now.duration_since(newest) < MAX_ARRIVAL_GAP);
        let Some(tokens) = waiting.filter(|_| arriving) else {
            self.since = None;
            return false;
        };
        let since = *self.since.get_or_insert(now);
        now.duration_since(since).as_secs_f64() < tokens as f64 * self.token_seconds * MAX_DELAY
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget_of(shared: bool, decoding: usize, prompts: usize, backlog: usize) -> usize {
        let config = SchedulerConfig {
            max_num_seqs: 256,
            max_num_batched_tokens: 40_960,
            max_num_mixed_tokens: 512,
            speculation: None,
            eos_token_ids: Vec::new(),
            max_loras: 0,
        };
        token_budget(&config, PendingWork { decoding, prompts, backlog, shared })
    }

    fn budget(decoding: usize, prompts: usize, backlog: usize) -> usize {
        budget_of(false, decoding, prompts, backlog)
    }

    #[test]
    fn the_budget_is_small_while_many_decode_and_grows_with_the_backlog() {
        assert_eq!(budget(0, 1, 100_000), 40_960, "nobody decodes");
        assert_eq!(budget(64, 32, 32_000), 40_960, "as many first tokens as two decoding sequences wait for");
        assert_eq!(budget(65, 32, 1000), 512);
        assert_eq!(budget(40, 2, 2 * 1024), 512, "a short queue");
        assert_eq!(budget(40, 16, 16 * 1024), 2816, "a sixth of the queue, and a token for each sequence");
        assert_eq!(budget(200, 20, 1 << 20), 40_960, "never more than a step has");
        assert_eq!(budget(600, 0, 0), 768, "every decoding sequence has its token");
        assert_eq!(budget(510, 1, 16), 526, "some prefill always goes on");
    }

    #[test]
    fn prompts_of_one_tenant_delay_another_by_a_bounded_time() {
        let shared = |decoding, prompts, backlog| budget_of(true, decoding, prompts, backlog);
        assert_eq!(shared(0, 126, 25_000), 40_960, "nobody decodes");
        assert_eq!(shared(130, 126, 25_000), 1536);
        assert_eq!(shared(40, 16, 1 << 20), 1536);
        assert_eq!(shared(40, 2, 2 * 1024), 512, "a short queue");
        assert_eq!(shared(2000, 1, 1000), 2016, "every decoding sequence has its token");
    }

    #[test]
    fn arrivals_delay_admission_while_they_go_on_and_no_longer_than_it_gains() {
        let (mut delay, start) = (BatchingDelay::new(), Instant::now());
        let at = |us| start + Duration::from_micros(us);
        (0..40).for_each(|_| delay.measured(1000, Duration::from_millis(16)));
        delay.measured(1, Duration::from_secs(1));
        delay.arrived(at(0));
        assert!(!delay.should_wait(None, at(0)), "one alone begins");
        delay.arrived(at(500));
        assert!(delay.should_wait(Some(2000), at(500)));
        assert!(delay.should_wait(Some(2000), at(2400)));
        assert!(!delay.should_wait(Some(2000), at(2500)), "no more came for 2 ms");
        delay.arrived(at(2600));
        assert!(delay.should_wait(Some(500), at(2600)));
        assert!(!delay.should_wait(Some(500), at(3600)), "500 tokens take 8 ms, and an eighth of that is over");
        delay.arrived(at(3700));
        assert!(delay.should_wait(Some(1000), at(3700)), "with another prompt there is more to gain");
    }
}
