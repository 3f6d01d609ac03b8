//! Pooling in the reference kernel of `ops::deepseek_v4::compress`; the op does the rest.

use super::batch::{Rows, Source};

/// Operands of the pooling. `width` is `2 dim` with overlap, else `dim`; values and scores are f32.
pub struct Pooling<'a> {
    /// Values of this step's tokens, `[T, width]`.
    pub values: &'a [f32],
    /// Their scores, position bias included, `[T, width]`.
    pub scores: &'a [f32],
    /// Values of the tokens before, `[slots, ring, width]`.
    pub value_rings: &'a [f32],
    /// Their scores.
    pub score_rings: &'a [f32],
    /// Tokens of a ring.
    pub ring: usize,
    /// Tokens from one entry to the next.
    pub ratio: usize,
    /// Width of an entry.
    pub dim: usize,
    /// An entry also has the `ratio` tokens before its own, with the first half of their values.
    pub overlap: bool,
}

impl Pooling<'_> {
    /// Values of a token: two halves with overlap.
    pub fn width(&self) -> usize {
        self.dim * if self.overlap { 2 } else { 1 }
    }

    /// Entry `i` of row `b`, whose last token is in this step: per channel, the values of its tokens weighted by the
    /// softmax of their scores.
    pub fn entry(&self, rows: Rows<'_>, b: usize, i: usize) -> Vec<f32> {
        let own = i * self.ratio;
        let mut tokens = Vec::with_capacity(2 * self.ratio);
        if self.overlap && i > 0 {
            // Before the first entry there are no tokens: scores of minus infinity, not of 0.
            tokens.extend((own - self.ratio..own).map(|p| self.token(rows, b, p, 0)));
        }
        let half = if self.overlap { self.dim } else { 0 };
        tokens.extend((own..own + self.ratio).map(|p| self.token(rows, b, p, half)));
        (0..self.dim).map(|channel| softmax_pool(&tokens, channel)).collect()
    }

    /// Values and scores of one token, from channel `first` on.
    fn token(&self, rows: Rows<'_>, b: usize, position: usize, first: usize) -> (&[f32], &[f32]) {
        let (values, scores, at) = match rows.source(b, position, self.ring) {
            Source::Fresh(t) => (self.values, self.scores, t),
            Source::Ring(at) => (self.value_rings, self.score_rings, at),
        };
        let at = at * self.width() + first;
        (&values[at..][..self.dim], &scores[at..][..self.dim])
    }
}

fn softmax_pool(tokens: &[(&[f32], &[f32])], channel: usize) -> f32 {
    let max = tokens.iter().map(|(_, scores)| scores[channel]).fold(f32::NEG_INFINITY, f32::max);
    let (mut sum, mut pooled) = (0.0, 0.0);
    for (values, scores) in tokens {
        let weight = (scores[channel] - max).exp();
        sum += weight;
        pooled += weight * values[channel];
    }
    pooled / sum
}
