//! Dummy weights: seeded random values with the right shapes, without a checkpoint.

use crate::rng::{GOLDEN, mix};
use crate::team;
use half::bf16;

/// Elements per random stream; fixed, so that values do not depend on the number of threads.
const CHUNK: usize = 1 << 16;

/// Fills `out` with values drawn uniformly from ±`limit`, equal for equal `seed` on all machines.
///
/// Elements `65536 c` to `65536 (c + 1)` are stream `c`; its group `g` of four elements gets the 64 bits
/// `mix(mix(seed ^ mix(c)) + (g + 1) GOLDEN)`, 16 for each element from the low ones up. They are read as a signed number
/// over 32768, which is multiplied by `limit` in f32 and rounded to bf16. The CUDA kernel is csrc/rows/dummy.cu of
/// pegainfer-kernels.
pub fn uniform(out: &mut [bf16], seed: u64, limit: f32) {
    team::for_each_chunk(out, CHUNK, |i, chunk| {
        let mut state = mix(seed ^ mix(i as u64));
        for group in chunk.chunks_mut(4) {
            state = state.wrapping_add(GOLDEN);
            let bits = mix(state);
            for (j, value) in group.iter_mut().enumerate() {
                // 16 random bits as a number in [-1, 1).
                let unit = f32::from((bits >> (16 * j)) as i16) / 32768.0;
                *value = bf16::from_f32(unit * limit);
            }
        }
    });
}

/// Seed of the tensor `name`.
pub(super) fn seed_of(seed: u64, name: &str) -> u64 {
    name.bytes().fold(seed, |hash, byte| mix(hash ^ u64::from(byte)))
}
