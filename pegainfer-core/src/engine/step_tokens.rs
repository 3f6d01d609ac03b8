//! Histogram of the tokens of a step.

/// Upper bounds of the buckets: powers of two up to the largest usual step. Steps above the last one count only in the
/// sum.
const BOUNDS: [u64; 17] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536];

/// Histogram of tokens in a step: prompt tokens of admitted requests and generated tokens.
#[derive(Debug, Clone, Copy, Default)]
pub struct StepTokens {
    /// Tokens of all steps.
    pub sum: u64,
    /// Number of steps in each bucket; the last one has those above all bounds.
    steps: [u64; BOUNDS.len() + 1],
}

impl StepTokens {
    /// Counts a step.
    pub(super) fn observe(&mut self, tokens: u64) {
        self.sum += tokens;
        self.steps[BOUNDS.partition_point(|&bound| bound < tokens)] += 1;
    }

    /// Number of steps.
    pub fn count(&self) -> u64 {
        self.steps.iter().sum()
    }

    /// Upper bound of each bucket and the number of its steps; the last bound is infinite.
    pub fn buckets(&self) -> Vec<(f64, u64)> {
        let bounds = BOUNDS.iter().map(|&bound| bound as f64).chain([f64::INFINITY]);
        bounds.zip(self.steps).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_inclusive() {
        let mut steps = StepTokens::default();
        [1, 2, 3, 4, 65_536, 65_537].into_iter().for_each(|tokens| steps.observe(tokens));
        let filled: Vec<_> = steps.buckets().into_iter().filter(|(_, steps)| *steps > 0).collect();
        assert_eq!(filled, [(1.0, 1), (2.0, 1), (4.0, 2), (65_536.0, 1), (f64::INFINITY, 1)]);
        assert_eq!((steps.count(), steps.sum), (6, 131_083));
    }
}
