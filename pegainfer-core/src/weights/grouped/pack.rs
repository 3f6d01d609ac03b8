//! Packing of codes into the order of [`format`](super::format).

use super::format::{GroupFormat, RUN};

/// Packs a row of codes, one byte per column, of a format of 4, 5 or 6 bits. `out`: the bytes of the row's codes.
///
/// Formats of 8 bits store the codes as they are.
pub fn pack_codes(format: GroupFormat, codes: &[u8], out: &mut [u8]) {
    let bits = format.bits();
    if bits == 8 {
        return out.copy_from_slice(codes);
    }
    let (low, high) = out.split_at_mut(codes.len() / 2);
    pack_nibbles(codes, low);
    match bits {
        5 => pack_fifth_bits(codes, high),
        6 => pack_upper_pairs(codes, high),
        _ => {}
    }
}

/// Packs the lower 4 bits of each code: columns `j` and `j + 16` of each 32 into one byte. `out`: half as many bytes.
pub fn pack_nibbles(codes: &[u8], out: &mut [u8]) {
    for (codes, out) in codes.chunks_exact(RUN).zip(out.chunks_exact_mut(RUN / 2)) {
        let (low, high) = codes.split_at(RUN / 2);
        out.iter_mut().zip(low.iter().zip(high)).for_each(|(out, (low, high))| *out = low & 15 | high << 4);
    }
}

/// Packs bit 4 of each code: a little-endian u32 per 32 columns. `out`: an eighth as many bytes.
pub fn pack_fifth_bits(codes: &[u8], out: &mut [u8]) {
    for (codes, out) in codes.chunks_exact(8).zip(out) {
        *out = codes.iter().enumerate().fold(0, |bits, (j, code)| bits | (code >> 4 & 1) << j);
    }
}

/// Packs bits 4 and 5 of each code: columns `l`, `l + 8`, `l + 16`, `l + 24` of each 32 into one byte. `out`: a quarter
/// as many bytes.
pub fn pack_upper_pairs(codes: &[u8], out: &mut [u8]) {
    for (codes, out) in codes.chunks_exact(RUN).zip(out.chunks_exact_mut(RUN / 4)) {
        for (l, out) in out.iter_mut().enumerate() {
            *out = (0..4).fold(0, |bits, i| bits | (codes[l + 8 * i] >> 4 & 3) << (2 * i));
        }
    }
}
