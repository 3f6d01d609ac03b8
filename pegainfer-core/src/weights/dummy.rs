//! Dummy weights: seeded random values with the right shapes, without a checkpoint.

use super::grouped::format::{GroupFormat, GroupScales, IQ4_VALUES, Offset, SUPER_BLOCK, Values};
use crate::rng::{GOLDEN, mix};
use crate::small_floats::{e2m1, e4m3};
use crate::team;
use half::{bf16, f16};

/// Elements per random stream; fixed, so that values do not depend on the number of threads.
const CHUNK: usize = 1 << 16;
/// The e4m3 code of 1.
const E4M3_ONE: u8 = 0x38;

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

/// Fills `out` with random bytes, each masked by `mask`. Equal seeds give equal bytes on all machines.
///
/// Bytes `65536 c` to `65536 (c + 1)` are stream `c`; its group `g` of eight bytes is the little-endian number
/// `mix(mix(seed ^ mix(c)) + (g + 1) GOLDEN)`.
pub fn random_bytes(out: &mut [u8], seed: u64, mask: u8) {
    random_bytes_from(0, out, seed, mask);
}

/// The part of [`random_bytes`] that begins at byte `first`, a multiple of 65,536.
pub fn random_bytes_from(first: usize, out: &mut [u8], seed: u64, mask: u8) {
    team::for_each_chunk(out, CHUNK, |i, chunk| {
        let mut state = mix(seed ^ mix((first / CHUNK + i) as u64));
        for group in chunk.chunks_mut(8) {
            state = state.wrapping_add(GOLDEN);
            let bytes = mix(state).to_le_bytes();
            group.iter_mut().zip(bytes).for_each(|(out, byte)| *out = byte & mask);
        }
    });
}

/// Scales of group-quantised weights whose codes are [`random_bytes`]: the mask of the codes, and a row of scales for
/// `k` columns, with which the weights have a mean of about 0 and the standard deviation `std`.
pub fn dummy_scales(format: GroupFormat, k: usize, std: f32) -> (u8, Vec<u8>) {
    // Without the upper bit of the exponent, no e4m3 code is NaN.
    let mask = if format.values == Values::E4m3 { 0xbf } else { 0xff };
    let (scale, centre) = scale_and_centre(format, std);
    let groups = k / format.group();
    let half = |value: f32| f16::from_f32(value).to_le_bytes();
    let repeated = |block: &[u8]| block.repeat(k / SUPER_BLOCK);
    let row = match format.scales {
        GroupScales::Plain { dtype, offset, .. } => {
            let offsets = match offset {
                Offset::None => Vec::new(),
                Offset::Zero => vec![centre; groups],
                Offset::Min => dtype.bytes(-scale * f32::from(centre)).repeat(groups),
            };
            [dtype.bytes(scale).repeat(groups), offsets].concat()
        }
        // Every scale and minimum of 6 bits is 32.
        GroupScales::K4 => {
            let (d, dmin) = (half(scale / 32.0), half(scale * f32::from(centre) / 32.0));
            repeated(&[&d[..], &dmin, &[0xa0; 8], &[0; 4]].concat())
        }
        GroupScales::K6 => repeated(&[&[32; 16][..], &half(scale / 32.0)].concat()),
        // Every scale is 48, less 32.
        GroupScales::Xs => repeated(&[&half(scale / 16.0)[..], &[0xff; 2], &[0; 4]].concat()),
        GroupScales::E4m3 => [&scale.to_le_bytes()[..], &vec![E4M3_ONE; groups]].concat(),
        GroupScales::E8m0 => vec![(scale.log2().round() + 127.0).clamp(0.0, 254.0) as u8; groups],
    };
    (mask, row)
}

/// Scale with which random codes have the standard deviation `std`, and the code that is taken for 0 by an offset.
fn scale_and_centre(format: GroupFormat, std: f32) -> (f32, u8) {
    let values: Vec<f32> = match format.values {
        Values::Int { bits } => (0..1 << bits).map(|code| code as f32 - (1 << (bits - 1)) as f32).collect(),
        Values::Iq4 => IQ4_VALUES.iter().map(|value| f32::from(*value)).collect(),
        Values::E2m1 => (0..16).map(e2m1).collect(),
        Values::E4m3 => (0..=255u8).filter(|code| code & 0x40 == 0).map(e4m3).collect(),
    };
    let square = values.iter().map(|value| value * value).sum::<f32>() / values.len() as f32;
    (std / square.sqrt(), if let Values::Int { bits: bits @ 4..=6 } = format.values { 1 << (bits - 1) } else { 0 })
}

/// Seed of the tensor `name`.
pub(super) fn seed_of(seed: u64, name: &str) -> u64 {
    name.bytes().fold(seed, |hash, byte| mix(hash ^ u64::from(byte)))
}
