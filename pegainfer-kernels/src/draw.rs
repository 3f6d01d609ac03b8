//! Parameters of sampling and reporting one row, in the layout that kernels read.

use pegainfer_core::rng;
use pegainfer_core::sampling::SamplingParams;

/// Words of a packed [`Draw`]: the columns of the tensor that `ops::sample` and `ops::logprobs` read.
pub const DRAW_WORDS: usize = crate::limits::sampling::DRAW_WORDS;

/// Sampling parameters of one row, reduced to what a kernel needs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Draw {
    /// The random number, uniform in 64 bits.
    pub random: u64,
    /// min-p keeps logits of at least the largest one plus this; -inf keeps all.
    pub min_p_offset: f64,
    /// `log2(e) / temperature`; 0 is greedy.
    pub scale: f32,
    /// Maximum number of tokens to keep; 0 keeps all.
    pub top_k: u32,
    /// Share of the weight to keep; 1 keeps all.
    pub top_p: f32,
    /// Number of most likely tokens to report; see `GenerateRequest::logprobs`.
    pub logprobs: Option<usize>,
}

impl Draw {
    /// The draw of the token at `position`: the random number is [`rng::bits`] of the seed and the position.
    pub fn new(params: &SamplingParams, position: u64, logprobs: Option<usize>) -> Self {
        let temperature = f64::from(params.temperature());
        let scale = (std::f64::consts::LOG2_E / temperature).min(f64::from(f32::MAX)) as f32;
        let min_p = f64::from(params.min_p());
        Self {
            random: rng::bits(params.seed(), position),
            min_p_offset: if min_p > 0.0 { temperature * min_p.ln() } else { f64::NEG_INFINITY },
            scale: if params.is_greedy() { 0.0 } else { scale },
            top_k: params.top_k(),
            top_p: params.top_p(),
            logprobs,
        }
    }

    /// Packs as: random number, low word first; min-p offset, likewise; scale; top-k; top-p; 0, or 1 plus the number of
    /// tokens to report.
    pub fn words(&self) -> [u32; DRAW_WORDS] {
        let halves = |x: u64| [x as u32, (x >> 32) as u32];
        let ([r0, r1], [m0, m1]) = (halves(self.random), halves(self.min_p_offset.to_bits()));
        let logprobs = self.logprobs.map_or(0, |n| n as u32 + 1);
        [r0, r1, m0, m1, self.scale.to_bits(), self.top_k, self.top_p.to_bits(), logprobs]
    }

    /// The inverse of [`words`](Self::words).
    pub fn from_words(words: &[u32; DRAW_WORDS]) -> Self {
        let whole = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        Self {
            random: whole(words[0], words[1]),
            min_p_offset: f64::from_bits(whole(words[2], words[3])),
            scale: f32::from_bits(words[4]),
            top_k: words[5],
            top_p: f32::from_bits(words[6]),
            logprobs: words[7].checked_sub(1).map(|n| n as usize),
        }
    }

    /// True when no random number is used.
    pub fn is_greedy(&self) -> bool {
        self.scale == 0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packing_loses_nothing() {
        for (t, k, p, m, seed, logprobs) in
            [(0.0, 0, 1.0, 0.0, 0, None), (0.7, 20, 0.95, 0.1, u64::MAX, Some(0)), (1e-45, 3, 0.1, 1.0, 9, Some(20))]
        {
            let draw = Draw::new(&SamplingParams::new(t, k, p, m, seed).unwrap(), 5, logprobs);
            assert_eq!(Draw::from_words(&draw.words()), draw);
            assert_eq!(draw.is_greedy(), t == 0.0);
            assert!(draw.scale.is_finite() && draw.min_p_offset <= 0.0, "{draw:?}");
        }
    }
}
