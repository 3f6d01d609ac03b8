//! A forced acceptance length: measures speculative decoding with drafts of a given quality and any weights.

use pegainfer_core::schedule::Step;
use pegainfer_core::schedule::speculation::Speculation;

/// Replaces tokens sampled after drafts so that a given number is accepted on average. The text is meaningless.
#[derive(Debug)]
pub struct SyntheticAcceptance {
    /// Average number of accepted tokens in a row that verifies drafts.
    length: f64,
    /// Accepted drafts that are due, less than one between rows that have enough drafts.
    due: f64,
}

impl SyntheticAcceptance {
    /// The forced acceptance requested by the user, with a warning in the log; `None` if not requested.
    pub fn of(speculation: Option<&Speculation>) -> Option<Self> {
        let length = speculation?.synthetic_acceptance_length?;
        log::warn!(
            "synthetic_acceptance_length is {length}: drafts are accepted without verification, so all text is meaningless"
        );
        Some(Self::new(length))
    }

    /// Forces `length` accepted tokens on average, at least 1.
    fn new(length: f64) -> Self {
        Self { length, due: 0.0 }
    }

    /// Changes the tokens drawn by the samples of `step`.
    pub fn apply<R>(&mut self, step: &Step<R>, drawn: &mut [u32]) {
        for (row, ends) in step.rows.iter().zip(step.qo_indptr.windows(2)).filter(|(row, _)| row.drafts > 0) {
            self.due += self.length - 1.0;
            let accepted = (self.due as usize).min(row.drafts);
            self.due = (self.due - accepted as f64).min(1.0);
            let first = ends[1] as usize - row.drafts;
            for (sample, token) in step.samples.iter().zip(drawn.iter_mut()) {
                let next = sample.token as usize + 1;
                if (first..ends[1] as usize).contains(&next) {
                    let draft = step.tokens[next];
                    match next - first < accepted {
                        true => *token = draft,
                        false if *token == draft => *token = u32::from(draft == 0),
                        false => {}
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_core::schedule::SampleRow;

    #[test]
    fn the_mean_of_what_counts_is_what_was_asked_for() {
        // A row of two tokens and three drafts, next to one without drafts.
        let mut step = Step::<()>::ragged(16, &[(1, 9), (5, 20)]);
        step.tokens = vec![9, 20, 21, 22, 0, 24];
        step.rows[1].drafts = 3;
        let sample = step.samples[0].clone();
        step.samples = [0, 2, 3, 4, 5].map(|token| SampleRow { token, ..sample.clone() }).to_vec();
        let mut synthetic = SyntheticAcceptance::new(3.25);
        let mut counts = [0; 4];
        for _ in 0..100 {
            let mut drawn = [7, 22, 0, 24, 8];
            synthetic.apply(&step, &mut drawn);
            assert_eq!((drawn[0], drawn[4]), (7, 8), "what verifies no draft stays");
            let accepted = drawn[1..].iter().zip(&step.tokens[3..]).take_while(|(token, draft)| token == draft).count();
            counts[accepted] += 1;
        }
        assert_eq!(counts, [0, 0, 75, 25]);
    }
}
