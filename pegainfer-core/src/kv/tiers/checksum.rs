//! The checksum of a block's bytes.

/// `k a ^ rotate(l b, 32)` mod 2^64 for odd constants `k` and `l`, of the sums `a = Σ w_i` and `b = Σ (i + 1) w_i` mod
/// 2^64 over the 32-bit little-endian words `w_i`. Any change of one word, and any exchange of two words, changes it.
/// The sums can be computed in any order, so a device does it while it copies.
#[derive(Debug, Clone, Copy, Default)]
pub struct Checksum {
    a: u64,
    b: u64,
    words: u64,
}

impl Checksum {
    /// Adds the bytes that follow, a multiple of 4.
    pub fn add(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<4>();
        debug_assert!(rest.is_empty(), "a block has whole words");
        let (mut a, mut b) = (0u64, 0u64);
        for (i, word) in (0u32..).zip(words) {
            let word = u64::from(u32::from_le_bytes(*word));
            a = a.wrapping_add(word);
            b = b.wrapping_add(word.wrapping_mul(u64::from(i)));
        }
        // Σ (words + i + 1) w_i
        self.b = self.b.wrapping_add(b).wrapping_add(a.wrapping_mul(self.words + 1));
        self.a = self.a.wrapping_add(a);
        self.words += words.len() as u64;
    }

    /// The checksum of all words if these are the sums `a` and `b` over them, as a device computes them.
    pub fn of_sums([a, b]: [u64; 2]) -> u64 {
        Self { a, b, words: 0 }.sum()
    }

    /// The checksum of all bytes so far.
    pub fn sum(self) -> u64 {
        // Odd constants, so that different sums stay different.
        let (a, b) = (self.a.wrapping_mul(0x9e37_79b9_7f4a_7c15), self.b.wrapping_mul(0xc2b2_ae3d_27d4_eb4f));
        a ^ b.rotate_left(32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng;

    fn sum(bytes: &[u8]) -> u64 {
        let mut checksum = Checksum::default();
        checksum.add(bytes);
        checksum.sum()
    }

    #[test]
    fn every_bit_and_every_exchange_of_words_counts() {
        let bytes: Vec<u8> = (0..256).map(|i| rng::bits(1, i) as u8).collect();
        let whole = sum(&bytes);
        for bit in 0..8 * bytes.len() {
            let mut changed = bytes.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(sum(&changed), whole, "bit {bit}");
        }
        for i in 0..bytes.len() / 4 {
            for j in 0..i {
                let mut changed = bytes.clone();
                (0..4).for_each(|byte| changed.swap(4 * i + byte, 4 * j + byte));
                assert!(changed == bytes || sum(&changed) != whole, "words {i} and {j}");
            }
        }
    }

    #[test]
    fn parts_have_the_sum_of_the_whole() {
        let bytes: Vec<u8> = (0..400).map(|i| rng::bits(2, i) as u8).collect();
        let mut checksum = Checksum::default();
        bytes.chunks(28).for_each(|part| checksum.add(part));
        assert_eq!(checksum.sum(), sum(&bytes));
    }
}
