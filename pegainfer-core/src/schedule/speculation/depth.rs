//! How many drafts are worth their place in a step.
//!
//! A step of `t` tokens takes a time proportional to `1 + r t`, where `r` is the cost of a token relative to the fixed
//! cost of reading the weights ([`StepCost`] measures both). `n` decoding sequences give `n` tokens in it. If the
//! drafts of a sequence are accepted with probability `a`, its `k`-th draft gives `a^k` tokens more. It is worth its
//! time if that is at least what the step gives in the same time: `a^k >= n r / (1 + r t)`. Drafts made by the model
//! come from passes that cost `d` each and serve all sequences: `r + d / n` replaces `r`.

/// Cost of a token, relative to the fixed cost, before the first measurement. High enough to start with few drafts.
const INITIAL_TOKEN_COST: f64 = 0.02;
/// Cost of a draft pass of the model, relative to the fixed cost, before the first measurement.
const INITIAL_DRAFT_COST: f64 = 0.1;
/// Weight of a new measurement of the draft cost in its moving average.
const DRAFT_WEIGHT: f64 = 0.1;
/// Largest accepted cost of a token, relative to the fixed cost.
const MAX_TOKEN_COST: f64 = 4.0;
/// Factor by which the weight of old measurements decays at each new one.
const COST_DECAY: f64 = 0.98;
/// Minimum variance of step sizes from which the cost of a token is computed, and minimum number of steps.
const MIN_VARIANCE: f64 = 0.25;
const MIN_STEPS: f64 = 8.0;

/// Measured cost of decode steps: a line fitted to step times, with decaying weights.
#[derive(Debug)]
pub struct StepCost {
    /// Decayed sums of 1, tokens, tokens squared, seconds, and tokens times seconds.
    sums: [f64; 5],
    /// Seconds of a step without tokens; 0 before the first.
    fixed: f64,
    token_cost: f64,
    draft_cost: f64,
}

impl StepCost {
    pub fn new() -> Self {
        Self { sums: [0.0; 5], fixed: 0.0, token_cost: INITIAL_TOKEN_COST, draft_cost: INITIAL_DRAFT_COST }
    }

    /// Adds a decode step of `tokens` tokens that took `seconds`, draft passes excluded.
    pub fn measured(&mut self, tokens: usize, seconds: f64) {
        let t = tokens as f64;
        for (sum, value) in self.sums.iter_mut().zip([1.0, t, t * t, seconds, t * seconds]) {
            *sum = *sum * COST_DECAY + value;
        }
        let [n, t, tt, s, ts] = self.sums;
        let variance = (n * tt - t * t) / (n * n);
        self.fixed = s / n;
        if n < MIN_STEPS || variance < MIN_VARIANCE {
            return;
        }
        let per_token = ((n * ts - t * s) / (n * tt - t * t)).max(0.0);
        let fixed = ((s - per_token * t) / n).max(0.0);
        self.fixed = fixed;
        self.token_cost = if fixed * MAX_TOKEN_COST > per_token { per_token / fixed } else { MAX_TOKEN_COST };
    }

    /// Adds `passes` draft passes of the model that took `seconds` after a decode step.
    pub fn drafted(&mut self, passes: usize, seconds: f64) {
        if passes > 0 && self.fixed > 0.0 {
            let cost = (seconds / passes as f64 / self.fixed).min(MAX_TOKEN_COST);
            self.draft_cost += DRAFT_WEIGHT * (cost - self.draft_cost);
        }
    }

    /// Cost of a token, relative to the fixed cost.
    pub fn token_cost(&self) -> f64 {
        self.token_cost
    }

    /// Cost of a draft pass of the model for all sequences, relative to the fixed cost.
    pub fn draft_cost(&self) -> f64 {
        self.draft_cost
    }
}

/// Prior of a new sequence: accepted and tried drafts.
const PRIOR: (f64, f64) = (1.5, 2.0);
/// Factor by which the weight of older drafts decays when newer ones are verified.
const VERIFIED_DECAY: f64 = 0.85;
/// Decay factor when no draft was worth its cost; in time drafts are tried again.
const SKIPPED_DECAY: f64 = 0.97;

/// Acceptance rate of a sequence's drafts, with decaying weights.
#[derive(Debug)]
pub struct Acceptance {
    accepted: f64,
    tried: f64,
}

impl Acceptance {
    pub fn new() -> Self {
        Self { accepted: PRIOR.0, tried: PRIOR.1 }
    }

    /// Adds the result of `drafts` drafts, of which `accepted` were accepted. Drafts after a refused one were not
    /// tried.
    pub fn verified(&mut self, drafts: usize, accepted: usize) {
        self.accepted = self.accepted * VERIFIED_DECAY + accepted as f64;
        self.tried = self.tried * VERIFIED_DECAY + drafts.min(accepted + 1) as f64;
    }

    /// Records that drafts were proposed but none was worth its cost.
    pub fn skipped(&mut self) {
        let decay = |value: f64, prior: f64| value * SKIPPED_DECAY + prior * (1.0 - SKIPPED_DECAY);
        (self.accepted, self.tried) = (decay(self.accepted, PRIOR.0), decay(self.tried, PRIOR.1));
    }

    /// Number of drafts, up to `max_drafts`, worth their cost in a step of `tokens` tokens with `decoding` decoding
    /// sequences.
    pub fn depth(&self, max_drafts: usize, tokens: usize, decoding: usize, token_cost: f64) -> usize {
        let min_rate = decoding as f64 * token_cost / (1.0 + token_cost * tokens as f64);
        let rate = self.accepted / self.tried;
        (1..=max_drafts).take_while(|k| rate.powi(*k as i32) >= min_rate).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cost_of_a_token_is_found_from_steps_of_different_sizes() {
        let mut cost = StepCost::new();
        (0..50).for_each(|_| cost.measured(4, 0.010));
        assert_eq!(cost.token_cost(), INITIAL_TOKEN_COST, "steps of one size tell nothing");
        (0..50).for_each(|i| cost.measured(1 + i % 7, 0.010 + 0.0005 * (1 + i % 7) as f64));
        assert!((cost.token_cost() - 0.05).abs() < 0.02, "{}", cost.token_cost());
        (0..400).for_each(|i| cost.measured(1 + i % 7, 0.001 * (1 + i % 7) as f64));
        assert!(cost.token_cost() > 3.0, "no fixed cost: {}", cost.token_cost());
    }

    #[test]
    fn the_cost_of_the_models_drafts_is_that_of_a_pass_and_shared_by_the_sequences() {
        let mut cost = StepCost::new();
        cost.drafted(3, 1.0);
        assert_eq!(cost.draft_cost(), INITIAL_DRAFT_COST, "no step was measured");
        (0..100).for_each(|_| {
            cost.measured(4, 0.010);
            cost.drafted(3, 0.006);
        });
        assert!((cost.draft_cost() - 0.2).abs() < 0.01, "{}", cost.draft_cost());
    }

    #[test]
    fn more_is_drafted_where_more_is_accepted_and_tokens_are_cheap() {
        let mut sure = Acceptance::new();
        (0..20).for_each(|_| sure.verified(4, 4));
        let mut unsure = Acceptance::new();
        (0..20).for_each(|_| unsure.verified(4, 1));
        let depth = |acceptance: &Acceptance, sequences, cost| acceptance.depth(8, sequences, sequences, cost);
        assert_eq!(depth(&sure, 1, 0.05), 8);
        assert_eq!(depth(&unsure, 1, 0.05), 4, "half of them each time: a sixteenth for 0.048");
        assert_eq!(depth(&unsure, 64, 0.05), 0, "0.76 of a token in that time");
        assert!(depth(&sure, 64, 0.05) > 0);
        assert_eq!(depth(&unsure, 1, 0.0), 8, "tokens that cost nothing");
    }

    #[test]
    fn a_sequence_that_stopped_drafting_tries_again() {
        let mut acceptance = Acceptance::new();
        (0..20).for_each(|_| acceptance.verified(4, 0));
        assert_eq!(acceptance.depth(4, 1, 1, 0.05), 0);
        let skipped = (0..1000).take_while(|_| {
            acceptance.skipped();
            acceptance.depth(4, 1, 1, 0.05) == 0
        });
        assert!((2..50).contains(&skipped.count()));
    }
}
