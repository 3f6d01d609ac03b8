//! Blocks of GGUF files as codes and scales of [`grouped::format`](crate::weights::grouped::format).
//!
//! Bytes of a block, fields in this order; `d`, `m` and `dmin` are f16, and numbers are little-endian. The formulas of
//! the values are those of the formats.
//!
//! | type | values, bytes | layout |
//! |---|---|---|
//! | Q8_0 | 32, 34 | `d`, 32 i8 |
//! | Q4_0, IQ4_NL | 32, 18 | `d`, nibbles `[16]` |
//! | Q4_1 | 32, 20 | `d`, `m`, nibbles `[16]` |
//! | Q5_0 | 32, 22 | `d`, fifth bits u32, nibbles `[16]` |
//! | Q5_1 | 32, 24 | `d`, `m`, fifth bits u32, nibbles `[16]` |
//! | Q4_K | 256, 144 | `d`, `dmin`, scales `[12]`, nibbles `[128]` |
//! | Q5_K | 256, 176 | `d`, `dmin`, scales `[12]`, fifth bits `[32]`, nibbles `[128]` |
//! | Q6_K | 256, 210 | lower four bits `[128]`, upper two `[64]`, 16 i8 scales, `d` |
//! | IQ4_XS | 256, 136 | `d`, `scales_h` u16, `scales_l [4]`, nibbles `[128]` |
//!
//! Nibbles and fifth bits of blocks of 32, and the nibbles of IQ4_XS, have the order of the rows in memory. Those of the
//! K types differ: in Q4_K and Q5_K byte `32 c + i` holds value `64 c + i` and, in the high nibble, `64 c + 32 + i`, and
//! bit `s` of byte `i` of the fifth bits belongs to value `32 s + i`. In Q6_K byte `64 t + l`, `l` below 32, holds values
//! `128 t + l` and `128 t + 64 + l`; byte `64 t + 32 + l` those 32 later; and the bits of byte `32 t + l` of the upper
//! two belong to values `128 t + l`, `+ 32`, `+ 64`, `+ 96`, from the low bits up.

use super::block_type::BlockType;
use crate::weights::grouped::pack::pack_codes;
use pegainfer_model_files::gguf::TensorType;

/// Values of the largest block.
const SUPER_BLOCK: usize = 256;

/// Repacks a row of blocks with `k` values. `codes` and `scales`: the bytes of a row of the type's format.
pub fn repack(kind: BlockType, k: usize, blocks: &[u8], codes: &mut [u8], scales: &mut [u8]) {
    match kind.kind() {
        TensorType::Q8_0 => {
            for (i, block) in blocks.chunks_exact(34).enumerate() {
                scales[2 * i..2 * i + 2].copy_from_slice(&block[..2]);
                codes[32 * i..32 * i + 32].copy_from_slice(&block[2..]);
            }
        }
        TensorType::Q4_0 | TensorType::IQ4_NL => simple(k, blocks, (codes, scales), (false, false)),
        TensorType::Q4_1 => simple(k, blocks, (codes, scales), (true, false)),
        TensorType::Q5_0 => simple(k, blocks, (codes, scales), (false, true)),
        TensorType::Q5_1 => simple(k, blocks, (codes, scales), (true, true)),
        TensorType::IQ4_XS => {
            for (i, block) in blocks.chunks_exact(136).enumerate() {
                scales[8 * i..8 * i + 8].copy_from_slice(&block[..8]);
                codes[128 * i..128 * i + 128].copy_from_slice(&block[8..]);
            }
        }
        TensorType::Q6_K => {
            for (scales, block) in scales.chunks_exact_mut(18).zip(blocks.chunks_exact(210)) {
                scales.copy_from_slice(&block[192..]);
            }
            super_blocks(kind, (k, blocks, 210), codes, q6_k);
        }
        // Q4_K and Q5_K.
        _ => {
            let bytes = kind.kind().block_bytes();
            for (scales, block) in scales.chunks_exact_mut(16).zip(blocks.chunks_exact(bytes)) {
                scales.copy_from_slice(&block[..16]);
            }
            super_blocks(kind, (k, blocks, bytes), codes, if kind.format().bits() == 5 { q5_k } else { q4_k });
        }
    }
}

/// Blocks of 32 values of 4 or 5 bits.
fn simple(k: usize, blocks: &[u8], (codes, scales): (&mut [u8], &mut [u8]), (has_min, fifth_bits): (bool, bool)) {
    let groups = k / 32;
    let (nibbles, upper) = codes.split_at_mut(k / 2);
    let bytes = 18 + 2 * usize::from(has_min) + 4 * usize::from(fifth_bits);
    for (i, block) in blocks.chunks_exact(bytes).enumerate() {
        let (d, mut rest) = block.split_at(2);
        scales[2 * i..2 * i + 2].copy_from_slice(d);
        if has_min {
            let at = 2 * (groups + i);
            scales[at..at + 2].copy_from_slice(&rest[..2]);
            rest = &rest[2..];
        }
        if fifth_bits {
            upper[4 * i..4 * i + 4].copy_from_slice(&rest[..4]);
            rest = &rest[4..];
        }
        nibbles[16 * i..16 * i + 16].copy_from_slice(rest);
    }
}

/// Unpacks blocks of 256 values by `unpack` and packs the codes of the row.
fn super_blocks(
    kind: BlockType,
    (k, blocks, bytes): (usize, &[u8], usize),
    codes: &mut [u8],
    unpack: fn(&[u8], &mut [u8]),
) {
    let mut unpacked = vec![0; k];
    for (values, block) in unpacked.chunks_exact_mut(SUPER_BLOCK).zip(blocks.chunks_exact(bytes)) {
        unpack(block, values);
    }
    pack_codes(kind.format(), &unpacked, codes);
}

fn q4_k(block: &[u8], values: &mut [u8]) {
    nibbles_of_64(&block[16..], values);
}

fn q5_k(block: &[u8], values: &mut [u8]) {
    let (upper, nibbles) = block[16..].split_at(32);
    nibbles_of_64(nibbles, values);
    for (s, values) in values.chunks_exact_mut(32).enumerate() {
        values.iter_mut().zip(upper).for_each(|(value, bits)| *value |= (bits >> s & 1) << 4);
    }
}

/// Nibbles of runs of 64 values: first the low ones of 32 bytes, then the high ones.
fn nibbles_of_64(bytes: &[u8], values: &mut [u8]) {
    for (bytes, values) in bytes.chunks_exact(32).zip(values.chunks_exact_mut(64)) {
        let (low, high) = values.split_at_mut(32);
        for ((byte, low), high) in bytes.iter().zip(low).zip(high) {
            (*low, *high) = (byte & 15, byte >> 4);
        }
    }
}

fn q6_k(block: &[u8], values: &mut [u8]) {
    let (low, upper) = (&block[..128], &block[128..192]);
    for (t, values) in values.chunks_exact_mut(128).enumerate() {
        for (i, value) in values.iter_mut().enumerate() {
            // Run of 32 values, and position in it.
            let (run, l) = (i / 32, i % 32);
            let nibble = low[64 * t + 32 * (run % 2) + l] >> (run / 2 * 4) & 15;
            *value = nibble | (upper[32 * t + l] >> (2 * run) & 3) << 4;
        }
    }
}
