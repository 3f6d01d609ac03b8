//! Values of FP8 e4m3, FP4 E2M1 and E8M0 codes, all exact.

/// The value of an e4m3 byte (1 sign, 4 exponent bits with bias 7, 3 mantissa bits; no infinity, 0x7f is NaN).
pub fn e4m3(byte: u8) -> f32 {
    // A table: the weights of a GEMM are decoded one by one.
    static VALUES: [f32; 256] = {
        let mut values = [0.0; 256];
        let mut byte = 0;
        while byte < 256 {
            values[byte] = if byte & 0x7f == 0x7f { f32::NAN } else { decode_e4m3(byte as u8) };
            byte += 1;
        }
        values
    };
    VALUES[usize::from(byte)]
}

/// Value of an e4m3 byte that is not NaN (NaN gives 480). Loops over it are vectorised.
#[inline(always)]
pub const fn decode_e4m3(byte: u8) -> f32 {
    // As the upper bits of an f32, the byte is smaller by the difference of the biases; multiplying is exact also for
    // subnormals.
    let magnitude = f32::from_bits((byte as u32 & 0x7f) << 20) * f32::from_bits((120 + 127) << 23);
    f32::from_bits(magnitude.to_bits() | (byte as u32 & 0x80) << 24)
}

/// The value of an E2M1 code, bit 3 its sign: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
pub fn e2m1(code: u8) -> f32 {
    const VALUES: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
    VALUES[usize::from(code & 15)]
}

/// Value of an E8M0 byte: `2^(byte - 127)`, exact also for subnormals; 255 is NaN.
pub fn e8m0(byte: u8) -> f32 {
    match byte {
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        _ => f32::from_bits(u32::from(byte) << 23),
    }
}
