//! How evenly a running engine's tokens spread over the experts of a model.

/// Upper bounds of the buckets of tokens per expert; those above the last one count only in the sum.
const TOKENS: [f64; 15] =
    [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0];
/// Upper bounds of the buckets of ratios.
const RATIOS: [f64; 13] = [1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0];
/// Mean number of tokens per expert from which on a layer's ratio is taken. With fewer, chance alone makes some expert
/// the most loaded one by far.
const WINDOW: u64 = 16;

/// Number of tokens that each expert of one layer got in a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertCounts {
    /// Number of the layer among those with experts.
    pub layer: usize,
    /// Tokens of each routed expert.
    pub tokens: Vec<u32>,
}

/// A histogram with `N` bounds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LoadHistogram<const N: usize> {
    /// Sum of all values.
    pub sum: f64,
    bounds: [f64; N],
    counts: [u64; N],
    /// Number of values above all bounds.
    above: u64,
}

impl<const N: usize> LoadHistogram<N> {
    fn new(bounds: [f64; N]) -> Self {
        Self { sum: 0.0, bounds, counts: [0; N], above: 0 }
    }

    fn observe(&mut self, value: f64) {
        self.sum += value;
        let bucket = self.bounds.partition_point(|bound| *bound < value);
        *self.counts.get_mut(bucket).unwrap_or(&mut self.above) += 1;
    }

    /// Number of values.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum::<u64>() + self.above
    }

    /// Upper bound of each bucket and the number of its values; the last bound is infinite.
    pub fn buckets(&self) -> Vec<(f64, u64)> {
        self.bounds.into_iter().zip(self.counts).chain([(f64::INFINITY, self.above)]).collect()
    }
}

/// The load of the experts since the engine's start.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertLoad {
    /// Tokens of one expert in one layer of a counted step.
    pub tokens: LoadHistogram<{ TOKENS.len() }>,
    /// Tokens of the most loaded expert of a layer over the mean of its experts, over as many counted steps as give a
    /// mean of 16 tokens.
    pub ratio: LoadHistogram<{ RATIOS.len() }>,
    /// Tokens of each expert of each layer since its last ratio.
    windows: Vec<Vec<u64>>,
}

impl Default for ExpertLoad {
    fn default() -> Self {
        Self { tokens: LoadHistogram::new(TOKENS), ratio: LoadHistogram::new(RATIOS), windows: Vec::new() }
    }
}

impl ExpertLoad {
    /// Counts a layer of a step.
    pub fn add(&mut self, counts: &ExpertCounts) {
        counts.tokens.iter().for_each(|tokens| self.tokens.observe(f64::from(*tokens)));
        if self.windows.len() <= counts.layer {
            self.windows.resize(counts.layer + 1, Vec::new());
        }
        let window = &mut self.windows[counts.layer];
        window.resize(counts.tokens.len(), 0);
        window.iter_mut().zip(&counts.tokens).for_each(|(sum, tokens)| *sum += u64::from(*tokens));
        let (all, experts) = (window.iter().sum::<u64>(), window.len() as u64);
        if experts > 0 && all >= WINDOW * experts {
            let most = window.iter().copied().max().unwrap_or(0);
            self.ratio.observe(most as f64 * experts as f64 / all as f64);
            window.fill(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_of_each_expert_are_counted_and_bounds_are_inclusive() {
        let mut load = ExpertLoad::default();
        load.add(&ExpertCounts { layer: 1, tokens: vec![0, 1, 2, 3, 9000] });
        let filled: Vec<_> = load.tokens.buckets().into_iter().filter(|(_, n)| *n > 0).collect();
        assert_eq!(filled, [(0.0, 1), (1.0, 1), (2.0, 1), (4.0, 1), (f64::INFINITY, 1)]);
        assert_eq!((load.tokens.count(), load.tokens.sum), (5, 9006.0));
    }

    #[test]
    fn a_ratio_is_of_one_layer_and_of_enough_tokens() {
        let mut load = ExpertLoad::default();
        let counts = |layer, tokens: [u32; 4]| ExpertCounts { layer, tokens: tokens.to_vec() };
        load.add(&counts(0, [20, 0, 0, 0]));
        load.add(&counts(1, [0, 20, 20, 20]));
        assert_eq!(load.ratio.count(), 0, "a mean of 15 tokens at most");
        load.add(&counts(0, [20, 8, 8, 8]));
        assert_eq!((load.ratio.count(), load.ratio.sum), (1, 40.0 * 4.0 / 64.0));
        // The next ratio of the layer begins anew.
        load.add(&counts(0, [16, 16, 16, 16]));
        assert_eq!((load.ratio.count(), load.ratio.sum), (2, 2.5 + 1.0));
    }
}
