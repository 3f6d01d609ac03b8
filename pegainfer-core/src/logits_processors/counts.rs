//! Penalties and the token counts that they depend on. The device keeps the counts of each sequence and adds the
//! updates of a step ([`CountUpdate`]), so penalties cost the same after ten tokens and after ten thousand.

use std::sync::Arc;

/// Number of occurrences of a token in a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TokenCount(u16);

impl TokenCount {
    /// Bit that is set if the prompt contains the token; the lower bits count generated occurrences.
    pub const IN_PROMPT: u16 = 1 << 15;
    /// Largest number of occurrences that are counted.
    pub const MAX: u16 = Self::IN_PROMPT - 1;

    /// The count with these bits.
    pub fn from_bits(bits: u16) -> Self {
        Self(bits)
    }

    /// The bits.
    pub fn bits(self) -> u16 {
        self.0
    }

    /// The count when the prompt has the token.
    pub fn with_prompt(self) -> Self {
        Self(self.0 | Self::IN_PROMPT)
    }

    /// The count after the token was generated `times` more times; stops at [`MAX`](Self::MAX).
    pub fn plus(self, times: usize) -> Self {
        let generated = (usize::from(self.generated()) + times).min(usize::from(Self::MAX));
        Self(self.0 & Self::IN_PROMPT | generated as u16)
    }

    /// Number of times the token was generated.
    pub fn generated(self) -> u16 {
        self.0 & Self::MAX
    }

    /// True if the token does not occur.
    pub fn is_zero(self) -> bool {
        self.0 == 0
    }
}

/// The penalties of a request, named as in the API: presence and frequency as OpenAI defines them, repetition as in
/// CTRL (Keskar et al., 2019).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Penalties {
    /// Subtracted from the logit of every generated token.
    pub presence: f32,
    /// Subtracted once per occurrence of a generated token.
    pub frequency: f32,
    /// Divides the positive logits of the tokens of the prompt and of the output, and multiplies the others.
    pub repetition: f32,
}

impl Penalties {
    /// The new logit of a token, in f32, rounded after each operation:
    /// `(logit > 0 ? logit / repetition : logit * repetition) - (presence + frequency * generated)`, without the second
    /// term if the token was not generated, and unchanged if it does not occur.
    pub fn apply(self, count: TokenCount, logit: f32) -> f32 {
        if count.is_zero() {
            return logit;
        }
        let scaled = if logit > 0.0 { logit / self.repetition } else { logit * self.repetition };
        match count.generated() {
            0 => scaled,
            // Computed from the count, so that rounding errors do not accumulate.
            generated => scaled - (self.presence + self.frequency * f32::from(generated)),
        }
    }
}

/// The penalties of one sample.
#[derive(Debug, Clone, PartialEq)]
pub struct CountedPenalties {
    /// The request's.
    pub penalties: Penalties,
    /// Slot of the sequence's counts on the device.
    pub slot: u32,
    /// Drafts before the sample, which count as generated for this sample only.
    pub drafts: Vec<u32>,
}

/// Tokens that a step adds to the counts of one sequence before it samples.
#[derive(Debug, Clone, PartialEq)]
pub struct CountUpdate {
    /// Slot of the sequence's counts on the device, below the number of rows of the largest step.
    pub slot: u32,
    /// True if the counts start at zero; otherwise the tokens are added to earlier counts.
    pub starts: bool,
    /// Tokens of the prompt; only if `starts`.
    pub prompt: Arc<[u32]>,
    /// Generated tokens, possibly placeholders, as in [`Step::tokens`](crate::schedule::Step).
    pub generated: Vec<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn penalties_follow_their_definitions() {
        let penalties = Penalties { presence: 1.0, frequency: 0.5, repetition: 2.0 };
        let count = TokenCount::default();
        for (count, expected) in [
            (count, [3.0, -3.0]),
            (count.with_prompt(), [1.5, -6.0]),
            (count.plus(1), [0.0, -7.5]),
            (count.plus(1).with_prompt().plus(2), [-1.0, -8.5]),
        ] {
            assert_eq!([3.0, -3.0].map(|logit| penalties.apply(count, logit)), expected, "{count:?}");
        }
        assert_eq!(penalties.apply(count.plus(1), f32::NEG_INFINITY), f32::NEG_INFINITY);
    }

    #[test]
    fn counts_stop_at_the_largest() {
        let count = TokenCount::default().with_prompt().plus(40_000);
        assert_eq!((count.generated(), count.plus(1)), (TokenCount::MAX, count));
        assert_eq!(TokenCount::from_bits(count.bits()), count);
    }
}
